"""Figures of panels: lines, scatter plots and heat maps."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import report
from experiments.paper.panels import Panel

COLOURS = ("#8a8f98", "#1f6fb2", "#d9822b", "#3a9d6e", "#a04fb0", "#c0392b")
"""Grey for baselines, blue for our method, then others."""
Panels = Sequence[Panel]


def _figure(panels: int, width: float, height: float) -> tuple[Any, Any]:
    """Returns a figure with one axes per panel, and these axes."""
    options = {"figsize": (width * panels, height), "layout": "constrained", "squeeze": False}
    figure, axes = report.pyplot().subplots(1, panels, **options)
    for ax in axes[0]:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes[0]


def _along(labels: list[str]) -> tuple[np.ndarray, bool]:
    """Returns the positions of labels on an axis, and True if it is logarithmic."""
    # Labels such as "alpha=0.1" or "500 pairs" have a number. Other labels are evenly spaced.
    try:
        values = np.array([float(label.rpartition("=")[2].split()[0]) for label in labels])
    except ValueError:
        return np.arange(len(labels), dtype=float), False
    # A logarithmic axis is clearer from a factor of 10 on.
    spans = len(values) > 1 and values.min() > 0 and values.max() / values.min() >= 10
    return (values, True) if spans else (np.arange(len(labels), dtype=float), False)


def _colours(series: list[str]) -> list[str]:
    """Returns a colour per label, with blue for our method. Grey is for baselines only."""
    ours = [any(word in label for word in ("SOTAlign", "ours")) for label in series]
    rest = iter(COLOURS[:1] + COLOURS[2:] if any(ours) else COLOURS[1:])
    return [COLOURS[1] if own else next(rest) for own in ours]


def lines(panels: Panels, *, log: bool = False, columns: str = "") -> Any:
    """Draws a line per column over the rows. Error bars are standard deviations over seeds.

    Args:
        panels: Panels, side by side.
        log: Logarithmic values of any unit. Otherwise values are percent.
        columns: Title of the horizontal axis. If given, it shows the columns, with a line per row.

    Returns:
        The figure.
    """
    figure, axes = _figure(len(panels), 4.4, 3.5)
    for ax, panel in zip(axes, panels, strict=True):
        along, series = list(panel.rows), list(panel.columns)
        if columns:
            along, series = series, along
        places, logarithmic = _along(along)
        for label, colour in zip(series, _colours(series), strict=True):
            keys = [(label, a) if columns else (a, label) for a in along]
            means, spreads = [panel.mean(*k) for k in keys], [panel.spread(*k) for k in keys]
            style = {"color": colour, "marker": "o", "ms": 4, "lw": 1.8}
            ax.errorbar(places, means, yerr=spreads, capsize=2, label=label, **style)
        ax.set(xscale="log" if logarithmic else "linear", yscale="log" if log else "linear")
        ax.set_xticks(places, along, fontsize=8)
        ax.minorticks_off()
        ax.grid(alpha=0.25)
        ax.set(xlabel=columns or panel.corner, ylabel=panel.name if log else "%")
        if len(panels) > 1:
            ax.set_title(panel.name, fontsize=10)
        if len(series) > 1:
            ax.legend(frameon=False, fontsize=8)
    return figure


def scatter(panels: Panels) -> Any:
    """Draws the second column against the first, with a numbered point per row and a fit."""
    (panel,) = panels
    first, second = panel.columns
    # NaN differs from itself, so rows with a missing value are left out.
    known = {row: xy for row, xy in zip(panel.rows, panel.means(), strict=True) if all(xy == xy)}
    x, y = np.reshape([*known.values()], (-1, 2)).T
    figure, (ax,) = _figure(1, 7.0, 4.2)
    for number, (row, point) in enumerate(known.items(), 1):
        bars = {"xerr": panel.spread(row, first), "yerr": panel.spread(row, second)}
        style = {"fmt": "o", "color": COLOURS[1], "ecolor": "#c8ccd2"}
        ax.errorbar(*point, **bars, **style, label=f"{number}  {row}")
        ax.annotate(f"{number}", point, (4, 3), textcoords="offset points", fontsize=8)
    if len(x) > 2 and np.ptp(x) > 0:
        ends = np.array([x.min(), x.max()])
        r = f"r = {np.corrcoef(x, y)[0, 1]:.2f}"
        ax.plot(ends, np.polyval(np.polyfit(x, y, 1), ends), "--", color=COLOURS[2], label=r)
    if known:
        ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    ax.margins(0.12)
    ax.grid(alpha=0.25)
    ax.set(xlabel=first, ylabel=second)
    return figure


def heat_maps(panels: Panels) -> Any:
    """Draws the means as colours and numbers."""
    figure, axes = _figure(len(panels), 4.6, 3.8)
    for ax, panel in zip(axes, panels, strict=True):
        rows, columns, means = list(panel.rows), list(panel.columns), panel.means()
        ax.imshow(means, cmap="viridis", aspect="auto")
        middle = (np.nanmin(means) + np.nanmax(means)) / 2 if np.isfinite(means).any() else 0.0
        for (i, j), value in np.ndenumerate(means):
            if np.isfinite(value):
                spread = panel.spread(rows[i], columns[j])
                text = f"{value:{panel.form}}" + (f"\n±{spread:{panel.form}}" if spread else "")
                colour = "white" if value < middle else "black"  # viridis is dark for small values
                ax.text(j, i, text, ha="center", va="center", color=colour, fontsize=8)
        ax.set_xticks(range(len(columns)), columns, fontsize=8)
        ax.set_yticks(range(len(rows)), rows, fontsize=8)
        ax.set_title(panel.name, fontsize=10)
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0)
    return figure
