"""A table or a panel of a figure: rows and columns of changes, and the numbers found for them."""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments import workdir
from experiments.paper import claims
from experiments.paper.cells import Cell, Store
from experiments.paper.lab import Changes, Lab

PAPER = pathlib.Path(__file__).parents[1] / "paper_results.json"
"""Every table of the paper as numbers."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What a row changes, and the paper's name for it."""

    changes: Changes
    paper: str | None = None


@dataclasses.dataclass(frozen=True)
class Column:
    """Which number a column shows, what it changes, and the paper's name for it.

    A metric of None cannot be had here: only the paper's numbers are shown.
    """

    metric: str | None
    changes: Changes = dataclasses.field(default_factory=dict)
    paper: str | None = None


@dataclasses.dataclass(frozen=True)
class Grid:
    """Rows and columns; at each place are the values of the seeds.

    Attributes:
        name: of the panel; unique within an entry.
        corner: what the rows are.
        rows: by label.
        columns: by label.
        seeds: of every place.
        paper: the paper's table, by key in its results.
        form: how a number is written.
    """

    name: str
    corner: str
    rows: Mapping[str, Row]
    columns: Mapping[str, Column]
    seeds: Sequence[int]
    paper: str | None = None
    form: str = ".1f"

    def cells(self, lab: Lab) -> dict[tuple[str, str], list[Cell]]:
        """The cells at every place that can be had."""
        return {
            (row, column): lab.cells({**r.changes, **c.changes}, c.metric, self.seeds)
            for row, r in self.rows.items()
            for column, c in self.columns.items()
            if c.metric is not None
        }

    def paper_value(self, row: str, column: str) -> float | None:
        """The paper's number at a place."""
        names = self.rows[row].paper, self.columns[column].paper
        if self.paper is None or None in names:
            return None
        table = paper_results()[self.paper]
        return table["rows"].get(names[0], {}).get(names[1])

    @property
    def compared(self) -> bool:
        """Whether the paper has numbers for these very rows."""
        return any(
            self.paper_value(row, column) is not None
            for row in self.rows
            for column in self.columns
        )


@functools.cache
def paper_results() -> dict[str, Any]:
    """The paper's tables; rows are values by column."""
    tables = workdir.read_json(PAPER)
    return {
        key: {
            **table,
            "rows": {
                row: dict(zip(table["cols"], values, strict=True))
                for row, values in table["rows"].items()
            },
        }
        for key, table in tables.items()
    }


@dataclasses.dataclass(frozen=True)
class Values:
    """What was found: an array over seeds at every place, NaN for a seed that failed.

    Places without any value are left out.
    """

    grid: Grid
    found: Mapping[tuple[str, str], np.ndarray]
    failures: tuple[str, ...] = ()

    def at(self, row: str, column: str) -> np.ndarray:
        """Values by seed; empty when there are none."""
        return self.found.get((row, column), np.empty(0))

    def known(self, row: str, column: str) -> np.ndarray:
        """Values of the seeds that have one."""
        values = self.at(row, column)
        return values[np.isfinite(values)]

    def mean(self, row: str, column: str) -> float | None:
        values = self.known(row, column)
        return float(values.mean()) if len(values) else None

    def spread(self, row: str, column: str) -> float | None:
        """Standard deviation over seeds (of the sample)."""
        values = self.known(row, column)
        return float(values.std(ddof=1)) if len(values) > 1 else None

    @property
    def complete(self) -> bool:
        """Whether every place has all its seeds."""
        columns = [name for name, column in self.grid.columns.items() if column.metric is not None]
        places = itertools.product(self.grid.rows, columns)
        return all(len(self.known(*place)) == len(self.grid.seeds) for place in places)

    def column(self, column: str) -> np.ndarray:
        """Means down a column, NaN where there is none."""
        means = [self.mean(row, column) for row in self.grid.rows]
        return np.array([np.nan if value is None else value for value in means])


def row_gaps(values: Values, high: str, low: str) -> dict[str, claims.Difference | None]:
    """How far one row is above another, in every column that has numbers."""
    return {
        f"{high} - {low} ({name})": claims.difference(values.at(high, name), values.at(low, name))
        for name, column in values.grid.columns.items()
        if column.metric is not None
    }


def column_gaps(values: Values, high: str, low: str) -> dict[str, claims.Difference | None]:
    """How far one column is above another, in every row."""
    return {
        f"{high} - {low} ({row})": claims.difference(values.at(row, high), values.at(row, low))
        for row in values.grid.rows
    }


def collect(grid: Grid, lab: Lab, store: Store) -> Values:
    """Reads the finished cells of a grid."""
    found, failures = {}, []
    for (row, column), cells in grid.cells(lab).items():
        metric = grid.columns[column].metric or ""
        values = []
        for cell in cells:
            results = store.results(cell.key)
            if results is None:
                failures.append(f"{row}, {column}: {store.failures.get(cell.key, 'not run')}")
            elif metric not in results:
                failures.append(f"{row}, {column}: its data give no {metric}")
            values.append((results or {}).get(metric))
        if any(value is not None for value in values):
            found[row, column] = np.array(values, float)  # None becomes NaN
    return Values(grid, found, tuple(failures))


@dataclasses.dataclass(frozen=True)
class Entry:
    """A table or figure of the paper.

    Attributes:
        name: as T1 (main text), A1 (appendix), F3 or FA1 (figures).
        title: what it shows.
        varies: what differs between its runs.
        stand_in: what stands in for the paper's data when none of its files are given.
        files: slots of `slots.SLOTS` that bring the paper's data.
        build: its grids, for the data at hand; none when they do not allow it.
        claim: what the paper concludes.
        judge: whether that held, from the values of the grids by name.
        plot: draws a figure into a file.
        paper: key of the paper's table, shown beside ours or below.
    """

    name: str
    title: str
    varies: str
    stand_in: str | None
    files: tuple[str, ...]
    build: Callable[[Lab], Sequence[Grid]]
    claim: str
    judge: Callable[[Mapping[str, Values]], claims.Verdict]
    plot: Callable[[Mapping[str, Values], pathlib.Path], None] | None = None
    paper: str | None = None
