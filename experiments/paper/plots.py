"""Figures: lines, scatters with their correlation, heat maps; each file appears complete or not."""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from experiments import report, workdir
from experiments.paper.panels import Panel

COLOURS = ("#8a8f98", "#1f6fb2", "#d9822b", "#3a9d6e", "#a04fb0", "#c0392b")
"""Grey is for what is compared with, the next one for ours."""
Found = Mapping[str, Panel]


@contextlib.contextmanager
def _figure(path: pathlib.Path, panels: int, width: float, height: float) -> Iterator[Any]:
    """Axes to draw on, which become the file at the end."""
    plt = report.pyplot()
    size = (width * panels, height)
    made, axes = plt.subplots(1, panels, figsize=size, layout="constrained", squeeze=False)
    for ax in axes[0]:
        ax.spines[["top", "right"]].set_visible(False)
    try:
        yield axes[0]
        with workdir.replacing(path) as file:
            made.savefig(file, format="png", dpi=150)
    finally:
        plt.close(made)


def _along(labels: list[str]) -> tuple[np.ndarray, bool]:
    """Where labels stand on an axis, and whether it is logarithmic."""
    try:
        values = np.array([float(label.rpartition("=")[2].split()[0]) for label in labels])
    except ValueError:
        return np.arange(len(labels), dtype=float), False
    spans = len(values) > 1 and values.min() > 0 and values.max() / values.min() >= 10
    return (values, True) if spans else (np.arange(len(labels), dtype=float), False)


def _colours(series: list[str]) -> list[str]:
    """Ours in blue beside others, or any colours but grey."""
    ours = [any(word in label for word in ("SOTAlign", "ours")) for label in series]
    rest = iter(COLOURS[:1] + COLOURS[2:] if any(ours) else COLOURS[1:])
    return [COLOURS[1] if own else next(rest) for own in ours]


def lines(
    found: Found,
    path: pathlib.Path,
    *,
    ylabel: str,
    xlabel: str | None = None,
    log: bool = False,
    transpose: bool = False,
) -> None:
    """Rows along the axis, a line a column (or the reverse); bars are the spread over seeds."""
    with _figure(path, len(found), 4.4, 3.5) as axes:
        for ax, (name, panel) in zip(axes, found.items(), strict=True):
            along, series = list(panel.rows), list(panel.columns)
            if transpose:
                along, series = series, along
            places, logarithmic = _along(along)
            for label, colour in zip(series, _colours(series), strict=True):
                keys = [(label, a) if transpose else (a, label) for a in along]
                means, spreads = zip(
                    *((panel.mean(*k), panel.spread(*k)) for k in keys), strict=True
                )
                style = {"color": colour, "marker": "o", "ms": 4, "lw": 1.8}
                ax.errorbar(places, means, yerr=spreads, capsize=2, label=label, **style)
            ax.set_xscale("log" if logarithmic else "linear")
            ax.set_yscale("log" if log else "linear")
            ax.set_xticks(places, along, fontsize=8)
            ax.minorticks_off()
            ax.grid(alpha=0.25)
            ax.set(xlabel=xlabel or panel.corner, ylabel=ylabel or name)
            if len(found) > 1:
                ax.set_title(name, fontsize=10)
            if len(series) > 1:
                ax.legend(frameon=False, fontsize=8)


def scatter(found: Found, path: pathlib.Path) -> None:
    """The second column against the first, a point a row, with the least-squares line."""
    (panel,) = found.values()
    first, second = panel.columns
    points = panel.means()
    known = np.isfinite(points).all(1)
    labels = [row for row, there in zip(panel.rows, known, strict=True) if there]
    (x, y), rows = points[known].T, labels
    with _figure(path, 1, 6.0, 4.2) as (ax,):
        bars = {"xerr": [panel.spread(r, first) for r in rows]}
        bars["yerr"] = [panel.spread(r, second) for r in rows]
        ax.errorbar(x, y, **bars, fmt="none", ecolor="#c8ccd2", lw=1)
        ax.scatter(x, y, s=34, color=COLOURS[1], zorder=3)
        if len(x) > 2 and np.ptp(x) > 0:
            slope, intercept = np.polyfit(x, y, 1)
            ends, r = np.array([x.min(), x.max()]), np.corrcoef(x, y)[0, 1]
            ax.plot(ends, slope * ends + intercept, "--", color=COLOURS[2], label=f"r = {r:.2f}")
            ax.legend(frameon=False)
        ax.margins(0.12)
        ax.grid(alpha=0.25)
        ax.set(xlabel=first, ylabel=second)
        _label(ax, labels, points[known])


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
    """Means as colours and numbers."""
    with _figure(path, len(found), 4.6, 3.8) as axes:
        for ax, (name, panel) in zip(axes, found.items(), strict=True):
            rows, columns, means = list(panel.rows), list(panel.columns), panel.means()
            ax.imshow(means, cmap="viridis", aspect="auto")
            middle = (np.nanmin(means) + np.nanmax(means)) / 2 if np.isfinite(means).any() else 0.0
            for (i, j), value in np.ndenumerate(means):
                if np.isfinite(value):
                    spread = panel.spread(rows[i], columns[j])
                    text = f"{value:{panel.form}}" + (f"\n±{spread:{panel.form}}" if spread else "")
                    colour = "white" if value < middle else "black"
                    ax.text(j, i, text, ha="center", va="center", color=colour, fontsize=8)
            ax.set_xticks(range(len(columns)), columns, fontsize=8)
            ax.set_yticks(range(len(rows)), rows, fontsize=8)
            ax.set_title(name, fontsize=10)
            ax.spines[:].set_visible(False)
            ax.tick_params(length=0)
