"""Panels, rows x columns of numbers, ours and the paper's; and what they say of its claims.

A claim that one thing is above another is judged by paired differences over seeds: it held when
every difference is positive beyond its standard error, did not when one is negative beyond it, and
is undecided otherwise. The paper's own difference stands beside ours.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sotalign_jax import diagnostics

WORDS = {True: "held", False: "did not hold", None: "undecided"}
Changes = Mapping[str, Any]
"""Settings by dotted name, data of `sources.dataset` as "data.NAME", and the "metric" to show."""


@functools.cache
def paper_results() -> dict[str, dict[str, dict[str, float]]]:
    """Every table of the paper: numbers by key, row and column.

    >>> paper_results()["T1_divergence_x_teacher"]["KLOT"]["CCA"]
    30.3
    """
    tables = json.loads(pathlib.Path(__file__).with_name("results.json").read_text("utf-8"))
    return {
        key: {row: dict(zip(t["cols"], v, strict=True)) for row, v in t["rows"].items()}
        for key, t in tables.items()
    }


class Cell(NamedTuple):
    """A number to make: a metric of a run, or of a measurement, that a specification decides."""

    key: str
    spec: dict[str, Any]
    metric: str


@dataclasses.dataclass(frozen=True)
class Panel:
    """A table, or one panel of a figure: what to run, and the numbers found.

    A place is run with the changes of its row and of its column. A metric of None cannot be had
    here: only the paper's number is shown.
    """

    name: str  # unique within an entry
    corner: str  # what the rows are
    rows: Mapping[str, Changes]  # by label
    columns: Mapping[str, Changes]  # likewise, with the metric
    seeds: Sequence[int]
    paper: str | None = None  # key of the paper's table
    named: Mapping[str, str] = dataclasses.field(default_factory=dict)  # the paper's labels by ours
    form: str = ".1f"  # how a number is written
    # By (row, column): cells, one a seed; what they gave, NaN where one failed; and why they did.
    cells: Mapping[tuple[str, str], Sequence[Cell]] = dataclasses.field(default_factory=dict)
    found: Mapping[tuple[str, str], np.ndarray] = dataclasses.field(default_factory=dict)
    failures: tuple[str, ...] = ()

    def places(self) -> dict[tuple[str, str], Changes]:
        """What to run at every place that can be had here."""
        both = itertools.product(self.rows.items(), self.columns.items())
        return {(row, column): {**c, **r} for (row, r), (column, c) in both if c["metric"]}

    def every_cell(self) -> Iterator[Cell]:
        return itertools.chain.from_iterable(self.cells.values())

    def at(self, row: str, column: str) -> np.ndarray:
        """Values of the seeds that have one."""
        values = self.found.get((row, column), np.empty(0))
        return values[np.isfinite(values)]

    def mean(self, row: str, column: str) -> float:
        """Over seeds; NaN when there is no value."""
        values = self.at(row, column)
        return diagnostics.Mean(values.tolist()) if len(values) else np.nan

    def spread(self, row: str, column: str) -> float:
        """Standard deviation over seeds (of the sample); 0 for one seed."""
        return getattr(self.mean(row, column), "spread", None) or 0.0

    def means(self) -> np.ndarray:
        """[rows, columns], NaN where there is none."""
        return np.array([[self.mean(row, column) for column in self.columns] for row in self.rows])

    @property
    def complete(self) -> bool:
        """Whether every place has all its seeds."""
        return all(len(self.at(*place)) == len(self.seeds) for place in self.places())

    def papers(self, row: str, column: str) -> float | None:
        """The paper's number at a place."""
        row, column = (self.named.get(label, label) for label in (row, column))
        return paper_results().get(self.paper or "", {}).get(row, {}).get(column)

    def gap(self, high: tuple[str, str], low: tuple[str, str]) -> "Gap | None":
        """How far one place is above another, seed by seed; None when a value is missing."""
        ours = [self.found.get(place, np.empty(0)) for place in (high, low)]
        papers = [self.papers(*place) for place in (high, low)]
        paper = None if None in papers else papers[0] - papers[1]  # type: ignore[operator]
        return gap(*ours, paper=paper)


class Gap(NamedTuple):
    """Mean of paired differences over seeds, its standard error (0 for one), and the paper's."""

    mean: float
    error: float
    paper: float | None = None

    @property
    def held(self) -> bool | None:
        """Whether it is positive; None when it is within its error."""
        return None if abs(self.mean) <= self.error else self.mean > 0

    def __str__(self) -> str:
        spread = f" ± {self.error:.1f}" if self.error else ""
        return f"{self.mean:+.1f}{spread}" + _paper(self.paper)


def gap(high: np.ndarray, low: np.ndarray, *, paper: float | None = None) -> Gap | None:
    """The difference of values seed by seed; None when one is missing (NaN).

    >>> print(gap(np.array([3.0, 5.0]), np.array([1.0, 2.0]), paper=4.0))
    +2.5 ± 0.5 (paper +4.0)
    """
    if not len(high) == len(low) > 0 or not np.isfinite(high - low).all():
        return None
    gaps = high - low
    error = float(gaps.std(ddof=1) / np.sqrt(len(gaps))) if len(gaps) > 1 else 0.0
    return Gap(float(gaps.mean()), error, paper)


def _paper(value: float | None) -> str:
    return "" if value is None else f" (paper {value:+.1f})"


class Verdict(NamedTuple):
    """Whether a claim held (None: undecided), why in one line, and the size of the effect."""

    held: bool | None
    text: str
    effect: str = ""

    def __str__(self) -> str:
        return f"{WORDS[self.held]}: {self.text}"


def both(parts: Iterable[bool | None]) -> bool | None:
    """True when all are, False when one is, None otherwise."""
    parts = list(parts)
    return False if False in parts else None if None in parts else True


def all_above(gaps: Mapping[str, Gap | None], *, paper: float | None = None) -> Verdict:
    """A claim that every difference is positive; differences not as claimed come first.

    `paper` is its mean difference where it has no numbers for these very rows.

    >>> print(all_above({"KLOT - CKA": Gap(2.0, 0.1), "CKA - none": Gap(0.1, 0.3)}))
    undecided: 1 of 2 differences are as claimed: CKA - none +0.1 ± 0.3, KLOT - CKA +2.0 ± 0.1
    """
    if not gaps:
        return Verdict(None, "nothing to compare")
    held = {name: None if gap is None else gap.held for name, gap in gaps.items()}
    order = sorted(gaps, key=lambda name: (held[name] is True, held[name] is None))
    shown = [f"{name} {'missing' if gaps[name] is None else gaps[name]}" for name in order[:6]]
    rest = f" and {len(order) - 6} more" if len(order) > 6 else ""
    good = sum(value is True for value in held.values())
    text = f"{good} of {len(gaps)} differences are as claimed: {', '.join(shown)}{rest}"
    known = [one for one in gaps.values() if one is not None]
    compared = [one for one in known if one.paper is not None] if paper is None else []
    paper = float(np.mean([one.paper for one in compared])) if compared else paper
    mean = f"{np.mean([one.mean for one in compared or known]):+.1f}" if known else ""
    return Verdict(both(held.values()), text, mean + _paper(paper) if mean else "")


def correlated(panel: Panel, *, sign: int, paper: float | None = None) -> Verdict:
    """A claim that a panel's second column correlates with its first, by Pearson's r.

    It held when chance alone gives such an r in less than one of 20 cases, and did not when r has
    the other sign.
    """
    from scipy import stats

    x, y = panel.means().T
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return Verdict(None, f"{len(x)} points are too few")
    r, p = stats.pearsonr(x, y, alternative="greater" if sign > 0 else "less")
    beside = "" if paper is None else f" (paper r = {paper:.2f})"
    text = f"Pearson r = {r:.2f} over {len(x)} points, p = {p:.2f}{beside}"
    held = False if sign * r <= 0 else True if p < 0.05 else None
    return Verdict(held, text, f"r = {r:.2f}{beside}")


def joined(parts: Mapping[str, Verdict]) -> Verdict:
    """A claim of several parts: all must hold."""
    text = "; ".join(f"{name} {WORDS[v.held]} ({v.text})" for name, v in parts.items())
    effects = "; ".join(f"{name} {v.effect}" for name, v in parts.items() if v.effect)
    return Verdict(both(v.held for v in parts.values()), text, effects)
