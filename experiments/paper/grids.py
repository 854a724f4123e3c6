"""Narrow tables of panels: at most five columns, so that they fit on a phone.

A panel with numbers of the paper, or with a row of SAIL, becomes one table per column, with our
number, the paper's, and both relative to SAIL. A panel with a column of SAIL becomes one table with
a row per method. Other panels stay grids.
"""

import itertools
import math
from typing import Any

import numpy as np

from experiments import report
from experiments.paper.panels import Panel, Place, paper_results, percent

OVER = "over SAIL"
"""Header of the gain over SAIL, relative to SAIL."""


def of_panel(panel: Panel, ours: str = "here") -> dict[str, report.Table]:
    """Returns the tables of a panel.

    Args:
        panel: Panel with its numbers.
        ours: Header of the column of our numbers.

    Returns:
        Tables by caption.
    """
    has_paper = any(panel.papers(*p) is not None for p in itertools.product(*_labels(panel)))
    if len(panel.rows) == 1:
        return {panel.name: _beside(panel, ours)}
    row_of_sail = any(row.endswith("SAIL") for row in panel.rows)
    if has_paper or (row_of_sail and "SAIL" not in panel.columns):
        made = {_title(panel, column): _beside(panel, ours, column) for column in panel.columns}
        return made if len(panel.columns) > 1 else {panel.name: made.popitem()[1]}
    if "SAIL" in panel.columns and all(c["metric"] == _metric(panel) for c in _settings(panel)):
        return {panel.name: _by_method(panel)}
    rows = [[row, *(_text(panel, row, column) for column in panel.columns)] for row in panel.rows]
    return {panel.name: report.Table([panel.corner, *panel.columns], rows, _digits(panel))}


def of_paper(key: str, corner: str) -> dict[str, report.Table]:
    """Returns a table of the paper as tables by caption.

    Args:
        key: Key of the table in `panels.paper_results`.
        corner: Header of the column of row labels.
    """
    numbers = paper_results()[key]
    columns = {
        column: {"metric": "R@1" if "kNN" not in column else "k-NN"}
        for column in next(iter(numbers.values()))
    }
    found = {(r, c): np.array([v]) for r, row in numbers.items() for c, v in row.items()}
    rows: dict[str, Any] = {row: {} for row in numbers}
    panel = Panel("the paper's own data", corner, rows, columns, (0,), found=found)
    return of_panel(panel, "paper")


def words(column: str) -> str:
    """Converts a column name of the paper such as COCO_T2I_R1 to COCO T2I R@1."""
    parts = [f"R@{w[1:]}" if w[0] == "R" and w[1:].isdigit() else w for w in column.split("_")]
    return " ".join(parts).replace("kNN pct", "k-NN (%)")


def _labels(panel: Panel) -> tuple[list[str], list[str]]:
    return list(panel.rows), list(panel.columns)


def _settings(panel: Panel) -> list[Any]:
    return list(panel.columns.values())


def _metric(panel: Panel) -> str:
    return panel.columns["SAIL"]["metric"]


def _digits(panel: Panel) -> int:
    return int(panel.form[1])


def _title(panel: Panel, column: str) -> str:
    """Returns the caption of a column's table, with the paper's name of the column."""
    papers = panel.named.get(column, column)
    known = any(panel.papers(row, column) is not None for row in panel.rows)
    here = ", ".join(filter(None, (panel.name, words(column))))
    return f"{here} (paper: {words(papers)})" if known and papers != column else here


def _text(panel: Panel, row: str, column: str) -> Any:
    """Returns our number for `report.Table`, which shows the spread of a `Mean` itself."""
    mean = panel.mean(row, column)
    text = mean if panel.form.endswith("f") else f"{mean:{panel.form}}"
    return None if math.isnan(mean) else text


def _relative(panel: Panel, place: Place, sail: Place) -> str | None:
    """Returns the gain over SAIL relative to SAIL, over the seeds that both have."""
    ours, base = (panel.found.get(at, np.empty(0)) for at in (place, sail))
    both = np.isfinite(ours - base) if len(ours) == len(base) else np.zeros(len(base), bool)
    if not both.any() or not base[both].any():
        return None
    return percent(float(ours[both].mean() / base[both].mean() - 1))


def _beside(panel: Panel, ours: str, column: str | None = None) -> report.Table:
    """Returns our numbers beside the paper's, each with its gain relative to SAIL.

    Args:
        panel: Panel with its numbers.
        ours: Header of the column of our numbers.
        column: Column to show, with a row per row of the panel. None shows the columns of a panel
            with a single row.
    """
    (first, *_), columns = _labels(panel)
    places = [(first, c) for c in columns] if column is None else [(r, column) for r in panel.rows]
    rows = []
    for label, place in zip(columns if column is None else panel.rows, places, strict=True):
        sail, paper = panel.baseline(*place), panel.papers(*place)
        gains: list[str | None] = [None, None]
        if sail is not None:
            papers_base = panel.papers(*sail)
            gains[0] = _relative(panel, place, sail)
            if paper is not None and papers_base:
                gains[1] = percent((paper - papers_base) / papers_base)
        rows.append([label, _text(panel, *place), gains[0], paper, gains[1]])
    headers = [panel.corner, ours, OVER, "paper", OVER]
    # Columns without any number are left out.
    kept = [i for i in range(5) if i == 0 or any(row[i] is not None for row in rows)]
    rows = [[row[i] for i in kept] for row in rows]
    return report.Table([headers[i] for i in kept], rows, _digits(panel))


def _by_method(panel: Panel) -> report.Table:
    """Returns a table with a row per method, its gain over SAIL, and a column per row."""
    rows: list[list[Any]] = []
    if panel.shares:
        rows.append(["pairs per input dimension", *(panel.shares[row] for row in panel.rows)])
    for column in panel.columns:
        rows.append([column, *(_text(panel, row, column) for row in panel.rows)])
    for column in panel.columns:
        if "SOTAlign" in column:
            gaps = [panel.gap((row, column), (row, "SAIL")) for row in panel.rows]
            plain = [gap and str(gap._replace(relative=None)) for gap in gaps]
            rows.append([f"{column} - SAIL", *plain])
            rows.append(["in %", *(gap and percent(gap.relative) for gap in gaps)])
    return report.Table([panel.corner, *panel.rows], rows, _digits(panel))
