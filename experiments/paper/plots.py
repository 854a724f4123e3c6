"""Figures of panels: lines, bars, scatter plots and heat maps."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments import report
from experiments.paper.panels import Gap, Panel

COLOURS = ("#8a8f98", "#1f6fb2", "#d9822b", "#3a9d6e", "#a04fb0", "#c0392b")
"""Grey for baselines, blue for our method, then others."""
Panels = Sequence[Panel]


def _figure(panels: int, width: float, height: float) -> tuple[Any, Any]:
    """Returns a figure with one axes per panel, at most two side by side, and these axes."""
    columns = min(panels, 2)
    rows = -(-panels // columns)
    options = {"figsize": (width * columns, height * rows), "layout": "constrained"}
    figure, axes = report.pyplot().subplots(rows, columns, squeeze=False, **options)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes.flat[panels:]:
        ax.set_visible(False)
    return figure, axes.flat[:panels]


def _along(labels: list[str]) -> tuple[np.ndarray, bool]:
    """Returns the positions of labels on an axis, and True if it is logarithmic."""
    # Labels such as "alpha=0.1" or "1,000 pairs" have a number. Other labels are evenly spaced.
    numbers = [label.rpartition("=")[2].split()[0].replace(",", "") for label in labels]
    try:
        values = np.array([float(number) for number in numbers])
    except ValueError:
        return np.arange(len(labels), dtype=float), False
    # A logarithmic axis is clearer from a factor of 10 on.
    spans = len(values) > 1 and values.min() > 0 and values.max() / values.min() >= 10
    return (values, True) if spans else (np.arange(len(labels), dtype=float), False)


def _styles(series: list[str]) -> list[dict[str, str]]:
    """Returns colour and line style per label, with blue for our method and grey for SAIL.

    A series of another teacher has the colour of the series without it, and another line: dashed
    for the tuned teacher, dotted for the refined one.
    """
    plain = [re.sub("(tuned|refined) ", "", label).replace(" (CCA)", "") for label in series]
    ours = [any(word in label for word in ("SOTAlign", "ours", "KLOT")) for label in series]
    # Grey is for baselines, so it is used only beside our method.
    rest = iter([*(COLOURS[:1] if any(ours) else ()), *COLOURS[2:], "black", *COLOURS])
    known: dict[str, str] = {"SAIL": next(rest)} if "SAIL" in plain else {}
    for label, own in zip(plain, ours, strict=True):
        if label not in known:
            known[label] = COLOURS[1] if own and COLOURS[1] not in known.values() else next(rest)
    dashes = [":" if "refined" in s else "--" if "tuned" in s else "-" for s in series]
    return [{"color": known[p], "ls": dash} for p, dash in zip(plain, dashes, strict=True)]


def _draw_lines(
    ax: Any,
    along: list[str],
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    shares: Mapping[str, str],
) -> None:
    """Draws means with error bars over labelled positions, and the shares below the labels."""
    places, logarithmic = _along(along)
    for (label, (means, spreads)), style in zip(series.items(), _styles([*series]), strict=True):
        options = {"marker": "o", "ms": 4, "lw": 1.8, "capsize": 2}
        ax.errorbar(places, means, yerr=spreads, label=label, **style, **options)
    ax.set_xscale("log" if logarithmic else "linear")
    ax.set_xticks(places, [f"{a}\n{shares[a]}" if a in shares else a for a in along])
    ax.minorticks_off()
    ax.grid(alpha=0.25)


def lines(panels: Panels, *, log: bool = False, columns: str = "", gain: bool = False) -> Any:
    """Draws a line per column over the rows. Error bars are standard deviations over seeds.

    Args:
        panels: Panels to draw.
        log: Logarithmic values of any unit. Otherwise values are percent.
        columns: Title of the horizontal axis. If given, it shows the columns, with a line per row.
        gain: Also draw the gain over SAIL of the first panel, in percent of SAIL.

    Returns:
        The figure.
    """
    figure, axes = _figure(len(panels) + gain, 3.7, 3.2)
    if gain:
        first, second, *others = axes
        _draw_gain(second, panels[0])
        axes = [first, *others]
    for ax, panel in zip(axes, panels, strict=True):
        along, series = list(panel.rows), list(panel.columns)
        if columns:
            along, series = series, along
        drawn = {}
        for label in series:
            keys = [(label, a) if columns else (a, label) for a in along]
            drawn[label] = [panel.mean(*k) for k in keys], [panel.spread(*k) for k in keys]
        _draw_lines(ax, along, drawn, panel.shares)
        ax.set_yscale("log" if log else "linear")
        metric = next(iter(panel.columns.values())).get("metric") or ""
        unit = metric.rpartition("/")[2].replace("top1", "top-1 accuracy")
        ax.set(xlabel=columns or _title(panel), ylabel=panel.name if log else f"{unit} (%)")
        if len(panels) > 1:
            ax.set_title(panel.name)
        if len(series) > 1:
            ax.legend(frameon=False, fontsize=9, handlelength=3)
    return figure


def _title(panel: Panel) -> str:
    """Returns the title of the horizontal axis."""
    return f"{panel.corner}, and pairs per input dimension" if panel.shares else panel.corner


def _draw_gain(ax: Any, panel: Panel) -> None:
    """Draws the gains of the columns over SAIL, in percent of SAIL, with standard errors."""
    drawn: dict[str, Any] = {}
    for column in panel.columns:
        if column != "SAIL":
            gaps = [panel.gap((row, column), (row, "SAIL")) for row in panel.rows]
            # Nothing is drawn where SAIL has no hit.
            base = [panel.mean(row, "SAIL") / 100 or np.nan for row in panel.rows]
            known = [gap or Gap(np.nan, np.nan) for gap in gaps]
            means, errors = np.array([gap[:2] for gap in known]).T / base
            drawn[column] = means, errors
    _draw_lines(ax, list(panel.rows), drawn, panel.shares)
    ax.axhline(0, color=COLOURS[0], lw=1)
    ax.set(xlabel=_title(panel), ylabel="gain over SAIL (% of SAIL)", title="relative gain")
    ax.legend(frameon=False, fontsize=9, handlelength=3)


def grouped_bars(panels: Panels) -> Any:
    """Draws a group of bars per column, with a bar per row, and last the paper's numbers."""
    shown: list[tuple[str, list[str], Callable[[str, str], float | None], Panel]] = []
    for panel in panels:
        shown.append((f"here, {panel.name}", list(panel.columns), panel.mean, panel))
    known = [c for c in panels[0].columns if panels[0].papers(next(iter(panels[0].rows)), c)]
    shown += [("paper, 10,000 pairs", known, panels[0].papers, panels[0])] if known else []
    figure, axes = _figure(len(shown), 3.7, 3.0)
    for ax, (title, columns, value, panel) in zip(axes, shown, strict=True):
        width = 0.8 / len(panel.rows)
        colours = [COLOURS[0], COLOURS[2], COLOURS[3], COLOURS[1]]
        for i, (row, colour) in enumerate(zip(panel.rows, colours, strict=False)):
            values = [value(row, column) for column in columns]
            spreads = [panel.spread(row, c) if value == panel.mean else 0 for c in columns]
            places = np.arange(len(columns)) + (i - len(panel.rows) / 2 + 0.5) * width
            bars = {"yerr": spreads, "capsize": 2} if any(spreads) else {}
            ax.bar(places, values, width, color=colour, label=row, **bars)
        ax.set_xticks(range(len(columns)), [c.replace(" ", "\n") for c in columns], fontsize=9)
        ax.set(ylabel="R@1 (%)", title=title)
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, ncols=4, loc="outside lower center")
    return figure


def method_bars(panels: Panels, *, columns: Sequence[str]) -> Any:
    """Draws a bar per row with the mean over some columns, and the paper's beside it.

    Error bars are standard deviations over seeds.

    Args:
        panels: One panel.
        columns: Columns to average.

    Returns:
        The figure.
    """
    (panel,) = panels
    known = [c for c in columns if c in panel.columns]
    rows = list(panel.rows)
    # One average of the columns per seed.
    averages = [np.mean([panel.at(row, c) for c in known], axis=0) for row in rows]
    here = [float(a.mean()) if len(a) else np.nan for a in averages]
    spreads = [float(a.std(ddof=1)) if len(a) > 1 else 0.0 for a in averages]
    papers = [[panel.papers(row, c) for c in known] for row in rows]
    paper = [np.nan if None in some else float(np.mean(some)) for some in papers]  # type: ignore[arg-type]
    figure, axes = _figure(2, 4.0, 0.33 * len(rows) + 0.9)
    sides = ("here", here, spreads), ("paper", paper, None)
    for ax, (title, values, errors) in zip(axes, sides, strict=True):
        colours = [COLOURS[1] if "SOTAlign" in row else COLOURS[0] for row in rows]
        bars = ax.barh(range(len(rows)), values, xerr=errors, color=colours, capsize=2)
        labels = ["" if np.isnan(value) else f"{value:.1f}" for value in values]
        ax.bar_label(bars, labels, padding=3)
        ax.set_yticks(range(len(rows)), rows if ax is axes[0] else [""] * len(rows))
        # From top to bottom. Equal limits, since a bar without a number does not widen them.
        ax.set_ylim(len(rows) - 0.4, -0.6)
        ax.margins(x=0.15)
        ax.set(title=title, xlabel=f"mean of {' and '.join(known)} (%)")
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
    if len(x) > 2 and np.ptp(x) > 0 and np.ptp(y) > 0:
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
    figure, axes = _figure(len(panels), 4.0, 3.6)
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
