"""Figures: lines, scatters with their correlation, heat maps."""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.paper import claims
from experiments.paper.entries import Values

COLOURS = ("#8a8f98", "#1f6fb2", "#d9822b", "#3a9d6e", "#a04fb0", "#c0392b")
"""Grey is for what is compared with, the next one for ours."""
OURS = ("SOTAlign", "ours")
"""Words in the names of what is ours."""
Found = Mapping[str, Values]


def _axes(panels: int, *, width: float = 4.4, height: float = 3.5) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    made, axes = plt.subplots(
        1, panels, figsize=(width * panels, height), layout="constrained", squeeze=False
    )
    for ax in axes[0]:
        ax.spines[["top", "right"]].set_visible(False)
    return made, axes[0]


def _save(made: Any, path: pathlib.Path) -> None:
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path, dpi=150)
    plt.close(made)


def _numbers(labels: list[str]) -> tuple[np.ndarray, bool]:
    """Where labels stand on an axis, and whether they are numbers that fit a log scale."""
    words = [label.rpartition("=")[2].split()[0] for label in labels]
    try:
        values = np.array([float(word) for word in words])
    except ValueError:
        return np.arange(len(labels), dtype=float), False
    spans = len(values) > 1 and values.min() > 0 and values.max() / values.min() >= 10
    return (values, True) if spans else (np.arange(len(labels), dtype=float), False)


def _colours(series: list[str]) -> list[str]:
    """Ours in blue beside others, or any colours but grey."""
    compared = [not any(word in label for word in OURS) for label in series]
    rest = iter(COLOURS[:1] + COLOURS[2:] if not all(compared) else COLOURS[1:])
    return [next(rest) if other else COLOURS[1] for other in compared]


def lines(
    found: Found,
    path: pathlib.Path,
    *,
    ylabel: str,
    xlabel: str | None = None,
    log: bool = False,
    transpose: bool = False,
) -> None:
    """A panel a grid: rows along the axis, a line a column (or the reverse, `transpose`d).

    Bars are the spread over seeds.
    """
    made, axes = _axes(len(found))
    for ax, (name, values) in zip(axes, found.items(), strict=True):
        grid = values.grid
        along, series = list(grid.rows), list(grid.columns)
        if transpose:
            along, series = series, along
        places, logarithmic = _numbers(along)
        for label, colour in zip(series, _colours(series), strict=True):
            keys = [(label, a) if transpose else (a, label) for a in along]
            means = [np.nan if (m := values.mean(*key)) is None else m for key in keys]
            spreads = [values.spread(*key) or 0.0 for key in keys]
            style = {"color": colour, "marker": "o", "ms": 4, "lw": 1.8}
            ax.errorbar(places, means, yerr=spreads, capsize=2, label=label, **style)
        if logarithmic:
            ax.set_xscale("log")
        ax.set_xticks(places, along, fontsize=8)
        ax.minorticks_off()
        if log:
            ax.set_yscale("log")
        ax.grid(alpha=0.25)
        ax.set(xlabel=xlabel or grid.corner, ylabel=ylabel or name)
        if len(found) > 1:
            ax.set_title(name, fontsize=10)
        if len(series) > 1:
            ax.legend(frameon=False, fontsize=8)
    _save(made, path)


def scatter(found: Found, path: pathlib.Path) -> None:
    """The second column against the first, a point a row, with the least-squares line."""
    (values,) = found.values()
    names = list(values.grid.columns)
    x, y = (values.column(name) for name in names)
    known = np.isfinite(x) & np.isfinite(y)
    made, (ax,) = _axes(1, width=6.0, height=4.2)
    spread = [[values.spread(row, name) or 0.0 for row in values.grid.rows] for name in names]
    ax.errorbar(x, y, yerr=spread[1], xerr=spread[0], fmt="none", ecolor="#c8ccd2", lw=1)
    ax.scatter(x, y, s=34, color=COLOURS[1], zorder=3)
    if known.sum() > 2 and np.ptp(x[known]) > 0:
        slope, intercept = np.polyfit(x[known], y[known], 1)
        ends = np.array([x[known].min(), x[known].max()])
        r = np.corrcoef(x[known], y[known])[0, 1]
        ax.plot(ends, slope * ends + intercept, "--", color=COLOURS[2], label=f"r = {r:.2f}")
        ax.legend(frameon=False)
    ax.margins(0.12)
    ax.grid(alpha=0.25)
    ax.set(xlabel=names[0], ylabel=names[1])
    labels = [row for row, there in zip(values.grid.rows, known, strict=True) if there]
    _label(ax, labels, np.stack([x, y], axis=1)[known])
    _save(made, path)


_SIDES = [(dx, dy) for dy in (5, -5, 14, -14, 23, -23) for dx in (5, -5, 0)]
"""Places of a label beside its point, the usual one first."""


def _label(ax: Any, labels: list[str], points: np.ndarray) -> None:
    """Writes a label at each point, where it covers least of other labels and points."""
    ax.figure.draw_without_rendering()
    frame = ax.get_window_extent().extents
    spots = ax.transData.transform(points)
    taken = list(np.concatenate([spots - 5, spots + 5], axis=1))

    def place(text: Any, side: tuple[int, int]) -> np.ndarray:
        text.set(position=side, va="bottom" if side[1] > 0 else "top")
        text.set_ha({5: "left", -5: "right", 0: "center"}[side[0]])
        return text.get_window_extent().extents

    def covered(box: np.ndarray) -> float:
        outside = _area(box, box) - _area(box, frame)
        return outside + sum(_area(box, other) for other in taken)

    for label, point in zip(labels, points, strict=True):
        text = ax.annotate(label, point, (0, 0), textcoords="offset points", fontsize=7)
        costs = {side: covered(place(text, side)) for side in _SIDES}
        taken.append(place(text, min(costs, key=costs.__getitem__)))


def _area(first: np.ndarray, second: np.ndarray) -> float:
    """Of what two boxes (left, bottom, right, top) share."""
    low, high = np.maximum(first[:2], second[:2]), np.minimum(first[2:], second[2:])
    return float(np.prod(np.maximum(high - low, 0.0)))


def heat_maps(found: Found, path: pathlib.Path) -> None:
    """A panel a grid: means as colours and numbers."""
    made, axes = _axes(len(found), width=4.6, height=3.8)
    for ax, (name, values) in zip(axes, found.items(), strict=True):
        grid = values.grid
        means = np.array([values.column(column) for column in grid.columns]).T
        ax.imshow(means, cmap="viridis", aspect="auto")
        middle = (np.nanmin(means) + np.nanmax(means)) / 2 if np.isfinite(means).any() else 0.0
        for (i, j), value in np.ndenumerate(means):
            if np.isfinite(value):
                colour = "white" if value < middle else "black"
                row, column = list(grid.rows)[i], list(grid.columns)[j]
                spread = values.spread(row, column)
                text = f"{value:{grid.form}}" + (f"\n±{spread:{grid.form}}" if spread else "")
                ax.text(j, i, text, ha="center", va="center", color=colour, fontsize=8)
        ax.set_xticks(range(len(grid.columns)), list(grid.columns), fontsize=8)
        ax.set_yticks(range(len(grid.rows)), list(grid.rows), fontsize=8)
        ax.set_title(name, fontsize=10)
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0)
    _save(made, path)


def correlation(values: Values, *, sign: int, paper: float | None) -> claims.Verdict:
    """Whether the second column correlates with the first, as in `scatter`."""
    first, second = values.grid.columns
    return claims.correlated(values.column(first), values.column(second), sign=sign, paper=paper)
