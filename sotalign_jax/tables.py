"""Tables of results: aligned text for the terminal, Markdown and CSV for files."""

import csv
import dataclasses
import io
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from sotalign_jax import checks


class Mean(float):
    """A mean with its spread, shown as "8.4 ± 0.6"; two columns in CSV.

    >>> print(table(["method", "R@1"], [["sail", Mean([7.0, 8.0, 9.0])]]))
    method        R@1
    ------  ---------
    sail    8.0 ± 1.0
    """

    spread: float | None

    def __new__(cls, values: Sequence[float]) -> Self:
        """Of at least one value; the spread is the sample's standard deviation, None for one."""
        mean = super().__new__(cls, np.mean(values))
        mean.spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return mean


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of results as aligned text (`str`), Markdown and CSV; made by `table`."""

    headers: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    digits: int
    best: Mapping[str, str]

    def __str__(self) -> str:
        """Columns aligned by spaces, numbers to the right, the best of a column with a star."""
        cells = self._cells("{}*", "{} ")
        rule = ["-" * width for width in _widths(cells)]
        return "\n".join(
            self._line(row, cells, "  ").rstrip() for row in [cells[0], rule, *cells[1:]]
        )

    def markdown(self) -> str:
        """A Markdown table, the best of a column in bold."""
        cells = [[text.replace("|", r"\|") for text in row] for row in self._cells("**{}**", "{}")]
        widths = _widths(cells)
        rule = [
            "-" * (width - 1) + ":" if self._numeric(column) else "-" * width
            for column, width in enumerate(widths)
        ]
        return "\n".join(
            f"| {self._line(row, cells, ' | ')} |" for row in [cells[0], rule, *cells[1:]]
        )

    def csv(self) -> str:
        """Comma-separated values with all digits and no marks."""
        columns: list[list[Any]] = []
        for index, header in enumerate(self.headers):
            values = [row[index] for row in self.rows]
            columns.append([header, *values])
            spreads = [getattr(value, "spread", None) for value in values]
            if any(spread is not None for spread in spreads):
                columns.append([f"{header} ±", *spreads])
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows(zip(*columns, strict=True))
        return buffer.getvalue()

    def save(self, stem: str | os.PathLike[str]) -> list[pathlib.Path]:
        """Writes `stem`.md and `stem`.csv and returns their paths."""
        paths = [pathlib.Path(f"{os.fspath(stem)}{suffix}") for suffix in (".md", ".csv")]
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, [self.markdown() + "\n", self.csv()], strict=True):
            path.write_text(text, encoding="utf-8")
        return paths

    def _numeric(self, column: int) -> bool:
        return any(_is_number(row[column]) for row in self.rows)

    def _cells(self, marked: str, plain: str) -> list[list[str]]:
        """Header and body as text, every cell of a column with a best value marked or padded."""
        columns = []
        for index, header in enumerate(self.headers):
            values = [row[index] for row in self.rows]
            texts = [self._text(value) for value in values]
            numbers = [value for value in values if _is_number(value) and math.isfinite(value)]
            if header in self.best and numbers:
                # Compared as printed, so that equal-looking values are all marked.
                top = self._rounded(max(numbers) if self.best[header] == "max" else min(numbers))
                marks = [marked if self._rounded(value) == top else plain for value in values]
                texts = [mark.format(text) for mark, text in zip(marks, texts, strict=True)]
                columns.append([plain.format(header), *texts])
            else:
                columns.append([header, *texts])
        return [list(row) for row in zip(*columns, strict=True)]

    def _text(self, value: Any) -> str:
        if value is None:
            return "-"
        if isinstance(value, float | np.floating):
            spread = getattr(value, "spread", None)
            return self._rounded(value) + ("" if spread is None else f" ± {self._rounded(spread)}")
        return str(value)

    def _rounded(self, value: Any) -> str:
        return f"{value:.{self.digits}f}" if _is_number(value) else ""

    def _line(self, row: list[str], cells: list[list[str]], separator: str) -> str:
        return separator.join(
            text.rjust(width) if self._numeric(column) else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, _widths(cells), strict=True))
        )


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    digits: int = 1,
    best: Mapping[str, str] | None = None,
) -> Table:
    """Makes a table of results.

    Args:
        headers: the column names.
        rows: one sequence a row, of text, numbers or None (shown as "-").
        digits: decimals of floating-point numbers in text and Markdown.
        best: which columns to mark, such as `{"MeanR@1": "max", "loss": "min"}`.

    Returns:
        A `Table`.

    Raises:
        InputError: a row has another length than the header, or `best` names no column.

    >>> print(table(["method", "MeanR@1"], [["sail", 24.2], ["sotalign", 30.31]],
    ...             best={"MeanR@1": "max"}))
    method    MeanR@1
    --------  --------
    sail         24.2
    sotalign     30.3*
    """
    for row in rows:
        if len(row) != len(headers):
            raise checks.InputError(
                f"rows: {list(row)} has {len(row)} cells; there are {len(headers)} headers"
            )
    for name, direction in (best or {}).items():
        checks.choice("best", name, tuple(headers))
        checks.choice(f"best {name}", direction, ("max", "min"))
    return Table(tuple(headers), tuple(tuple(row) for row in rows), digits, dict(best or {}))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _widths(cells: list[list[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*cells, strict=True)]
