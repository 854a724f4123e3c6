"""Reports on runs: tables in several formats, plots, and pages that compare runs."""

import contextlib
import csv
import dataclasses
import html
import io
import itertools
import math
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tabulate

from experiments import distributed, protocol, retrieved, summary
from experiments import run as run_lib
from experiments import spec as spec_lib
from experiments import workdir as workdir_lib
from sotalign_jax import aligner, confidence, persistence, storage
from sotalign_jax.diagnostics import Mean
from sotalign_jax.search import items, markup

Configs = Mapping[str, spec_lib.Run]
Results = Mapping[str, run_lib.Results]
Seeds = Mapping[str, Sequence[run_lib.Results]]
"""Results of every seed, by label."""

# --- tables --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Table:
    """A table that can be written as text, Markdown, CSV, LaTeX or HTML.

    Attributes:
        headers: Titles of the columns.
        rows: Cells of text, numbers, `Mean` (shown as "8.4 ± 0.6") or None (shown as "-").
        digits: Decimals of numbers, except in CSV.
        best: Headers of the columns in which the largest value is marked.

    >>> rows = [["sail", 24.2], ["sotalign", 30.31]]
    >>> print(Table(["method", "MeanR@1"], rows, best=["MeanR@1"]))
    method      MeanR@1
    --------  ----------
    sail           24.2
    sotalign       30.3*
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[Any]]
    digits: int = 1
    best: Collection[str] = ()

    def __str__(self) -> str:
        """Returns the table as aligned text. A star marks the best value of a column."""
        # Other cells get a space in place of the star, so that digits stay aligned.
        text = self._tabulate("simple", self._cells("{}*", "{} "))
        return "\n".join(line.rstrip() for line in text.splitlines())

    def markdown(self) -> str:
        """Returns a Markdown table with the best value of a column in bold."""
        cells = self._cells("**{}**", "{}")
        return self._tabulate("pipe", [[text.replace("|", r"\|") for text in row] for row in cells])

    def csv(self) -> str:
        """Returns comma-separated values with all digits and no marks."""
        # The spread of a `Mean` becomes a column of its own.
        columns: list[list[Any]] = []
        for header, *values in zip(self.headers, *self.rows, strict=True):
            columns.append([header, *values])
            spreads = [getattr(value, "spread", None) for value in values]
            if any(spread is not None for spread in spreads):
                columns.append([f"{header} ±", *spreads])
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows(zip(*columns, strict=True))
        return buffer.getvalue()

    def html(self) -> str:
        """Returns an HTML table with the best value of a column in bold."""
        # Control characters stand for the tags until the text has been escaped.
        cells = [[html.escape(text) for text in row] for row in self._cells("\0{}\1", "{}")]
        numeric = [any(map(_is_number, values)) for values in zip(*self.rows, strict=True)]
        titles, *rows = cells
        aligned = ["" if number else " class='text'" for number in numeric]
        heads = "".join(
            f"<th{side}>{title}</th>" for side, title in zip(aligned, titles, strict=True)
        )
        # On a narrow screen every row becomes a block whose cells are named by `data-name`.
        lines = [
            "".join(
                f"<td data-name='{title}'{side}>{text}</td>"
                for title, side, text in zip(titles, aligned, row, strict=True)
            )
            for row in rows
        ]
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        body = body.replace("\0", "<b>").replace("\1", "</b>")
        table = f"<table class='stack'><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
        return f"<div class='scroll'>{table}</div>"

    def latex(self) -> str:
        """Returns a LaTeX table for the package booktabs, with the best value of a column bold."""
        # Control characters stand for the braces until the text has been escaped.
        text = self._tabulate("latex_booktabs", self._cells("\0{}\1", "{}"))
        return text.replace("±", r"$\pm$").replace("\0", r"\textbf{").replace("\1", "}")

    def save(self, stem: str | pathlib.Path, title: str = "") -> None:
        """Writes the table as CSV, Markdown and LaTeX.

        Args:
            stem: Path of the files without their suffix.
            title: Title above the Markdown table.
        """
        write(pathlib.Path(f"{stem}.md"), f"{title}\n\n{self.markdown()}\n".lstrip())
        write(pathlib.Path(f"{stem}.csv"), self.csv())
        write(pathlib.Path(f"{stem}.tex"), f"{self.latex()}\n")

    def _tabulate(self, style: str, cells: list[list[str]]) -> str:
        numeric = [any(map(_is_number, values)) for values in zip(*self.rows, strict=True)]
        align = ["right" if right else "left" for right in numeric] or None
        options = {"disable_numparse": True, "preserve_whitespace": True}
        return tabulate.tabulate(cells[1:], cells[0], tablefmt=style, colalign=align, **options)

    def _cells(self, marked: str, plain: str) -> list[list[str]]:
        """Returns header and body as text, with the best values marked."""
        columns = []
        for header, *values in zip(self.headers, *self.rows, strict=True):
            texts = [header, *map(self._text, values)]
            numbers = [value for value in values if _is_number(value) and math.isfinite(value)]
            if header in self.best and numbers:
                # Values are compared as printed, so that all values that look equal are marked.
                top = self._rounded(max(numbers))
                marks = [marked if self._rounded(value) == top else plain for value in values]
                pairs = zip([plain, *marks], texts, strict=True)
                texts = [mark.format(text) for mark, text in pairs]
            columns.append(texts)
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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def write(path: pathlib.Path, content: str | bytes) -> None:
    """Writes a file atomically, so that an earlier file survives a full disk.

    Args:
        path: The file. Its folder is created if it is missing.
        content: Text or bytes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with storage.replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def png(figure: Any) -> bytes:
    """Renders a figure as PNG and closes it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    pyplot().close(figure)
    return buffer.getvalue()


def pyplot() -> Any:
    """Returns matplotlib.pyplot, set up to draw without a screen."""
    import matplotlib  # imported late, because it takes long

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    return plt


def plots(drawn: Mapping[str, bytes], kind: str = "plots") -> str:
    """Returns a grid of plots. The caption of a plot is also its alternative text.

    Args:
        drawn: PNG files by caption.
        kind: CSS class of the grid.
    """
    shown = {html.escape(caption): markup.image(plot, caption) for caption, plot in drawn.items()}
    return markup.cards(*shown.items(), kind=kind)


# --- comparisons of runs -------------------------------------------------------------------------

COLUMNS = {
    "R@1": "mean/R@1",
    "R@5": "mean/R@5",
    "R@10": "mean/R@10",
    "calibrated R@1": "calibrated/mean/R@1",
    "calibrated R@10": "calibrated/mean/R@10",
    "zero-shot": "zero_shot/top1",
}
"""Headers of a comparison table, and the names of their scores."""
SPLITS = {
    "test/1k": ("comparison_1k", "Test, usual protocol (mean over galleries)"),
    "test": ("comparison", "Test, whole split"),
    "val": ("comparison", "Validation split"),
}
"""File stem and table title by split. "val" is used if there is no test split."""
CHANCE = "chance"
"""Label of the last row of a comparison, which has the scores of a random ranking."""
LEGEND = (
    "R@k: percent of queries with a match among the first k, mean of both directions",
    "calibrated: corrected for hubs (rows that are close to many others) with the unpaired data",
    "chance: a random ranking",
    "±: standard deviation over seeds",
)
PLOTTED = ("R@1", "R@10", "calibrated R@10", "zero-shot")
"""Columns that are plotted. The first column is plotted if none of them exists."""
CURVES = {
    "loss": "Training loss. It should fall and level off.",
    "val/mean/R@1": "R@1 on validation, in percent. The parameters at the highest point are kept.",
}
"""Captions of the metrics that are plotted over the steps."""
SOLVER_CURVES = {
    f"{plan}_{key}": f"{title} of the {plan}'s plan."
    for plan in ("teacher", "student")
    for key, title in (("iterations", "Sinkhorn iterations"), ("error", "Marginal error"))
}
SOLVER_HINT = "If an error rises above the tolerance, raise max_iterations or epsilon_star."


def conclude(
    configs: Configs,
    results: Results,
    workdir: pathlib.Path,
    *,
    load: run_lib.Loader | None = None,
) -> None:
    """Compares runs and raises if one of them failed.

    Args:
        configs: Configs by run name, such as "sail-seed0".
        results: Results by run name.
        workdir: Folder that holds the runs.
        load: Reader of the data. The default is a new one.

    Raises:
        FloatingPointError: A run failed.
    """
    compare(configs, results, workdir, load=load)
    if failed := [f"{name}: {one['error']}" for name, one in results.items() if "error" in one]:
        raise FloatingPointError(
            f"{len(failed)} of {len(results)} runs failed; first error: {failed[0]}"
        )


def compare(
    configs: Configs,
    results: Results,
    workdir: pathlib.Path,
    *,
    load: run_lib.Loader | None = None,
) -> None:
    """Prints a comparison of runs and writes it to `workdir`.

    The files are comparison.md, .csv and .png and report.html. A test gallery of more than 1,000
    items adds comparison_1k.md and .csv. If the texts of the test rows are known
    (`retrieved.labels_of`), the page shows texts retrieved by the model that is best on validation.

    Args:
        configs: Configs by run name, such as "sail-seed0".
        results: Results by run name.
        workdir: Folder that holds the runs.
        load: Reader of the data. The default is a new one.
    """
    if distributed.is_first():
        # Two commands that end together write one after the other.
        with storage.locked(workdir, wait=True):
            _compare(configs, results, workdir, load or run_lib.Loader())


def _compare(
    configs: Configs, results: Results, workdir: pathlib.Path, load: run_lib.Loader
) -> None:
    """Prints and writes the comparison of a locked folder."""
    folders = {name: workdir / name if len(configs) > 1 else workdir for name in configs}
    kept = {name: folder / protocol.FILE for name, folder in folders.items()}
    more = {name: workdir_lib.read_scores(path) for name, path in kept.items() if path.exists()}
    results = {name: {**one, **more.get(name, {})} for name, one in results.items()}
    # The test split must not choose the model that is shown and recommended.
    best = max(configs, key=lambda name: validated(results[name]))
    labels = retrieved.labels_of(configs[best])
    compared = comparisons(spec_lib.by_label(configs, results), labels.nouns)
    notes = remarks(results, compared[-1][2])
    advised = advice(results[best], folders[best], labels.nouns)
    texts = [f"{title}\n\n{table}\n" for _, title, table in compared]
    print("\n".join(["", *texts, "*: best of its column", *LEGEND, "", *notes, *advised]))
    shown = [f"<h3>{html.escape(title)}</h3>{table.html()}" for _, title, table in compared]
    shown.append(markup.small("; ".join(["Bold: best of its column", *LEGEND])))
    shown.append(markup.details(f"Settings of {best}", markup.pre(configs[best].to_json())))
    parts = [markup.section("Results", *shown)]
    for stem, title, table in compared:
        table.save(workdir / stem, title)
    _, title, table = compared[0]  # the first table is the headline
    if plot := comparison_plot(table):
        write(workdir / "comparison.png", plot)
        caption = f"{title}. Bars are means over seeds, lines standard deviations, dashes chance."
        parts.append(markup.section("Comparison", plots(bar_plots(table)), markup.small(caption)))
    if paired := paired_table(configs, results, configs[best].label):
        paired.save(workdir / "differences", "Differences on the same seeds")
        parts.append(markup.section("Differences on the same seeds", paired.html(), PAIRED))
    if sweeps := sweep_plots(configs, results):
        parts.append(markup.section("Over a setting", plots(sweeps)))
    seeds = spec_lib.by_label(configs, folders)
    if curves := curve_plots(seeds, CURVES):
        shown = [plots(curves)]
        if solver := curve_plots(seeds, SOLVER_CURVES):
            shown.append(
                markup.details("Solver diagnostics", markup.small(SOLVER_HINT), plots(solver))
            )
        parts.append(markup.section("Training", *shown))
    # A failed run has no model to query.
    if labels.y and (folders[best] / persistence.FOLDER).exists():
        gallery = load(configs[best]).test
        assert gallery is not None
        model = aligner.Aligner.load(folders[best])
        if bins := retrieved.reliability(model, gallery):
            told = f"Confidence of {best}"
            parts.append(markup.section(told, plots({RELIABILITY: reliability_plot(bins)})))
        found = retrieved.find(model, gallery, labels)
        told = retrieved.summary(found, labels)
        print(f"\nTexts found by {best}\n\n{told}")
        print(*(f"\n{one.text(labels.given)}" for one in found[:5]), sep="\n")
        parts.append(markup.section(f"Texts found by {best}", f"<p>{told}</p>", found_cards(found)))
    parts.append(markup.details("Environment", markup.pre(workdir_lib.kept_environment(workdir))))
    title = f"Results: {', '.join(row[0] for row in table.rows if row[0] != CHANCE)}"
    below = summary.head(results[best], folders[best], labels.nouns)
    # The head of the page says what `advised` says in the terminal.
    below += "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    below += markup.small(" ".join([*advised, str(workdir)]))
    write(workdir / "report.html", markup.page(title, below, *parts))
    print(f"\nResults, models and report.html are in {workdir}")


def validated(one: run_lib.Results) -> float:
    """Returns R@1 on validation by the scores that the model uses, or -1."""
    return one.get("val/calibrated/mean/R@1" if one.get("calibrated") else run_lib.SCORE, -1.0)


def advice(one: run_lib.Results, folder: pathlib.Path, nouns: tuple[str, str]) -> list[str]:
    """Returns a line that tells how to load and use a model.

    Args:
        one: Results of its run.
        folder: Folder of its run.
        nouns: Plural nouns for the rows of x and of y.

    Returns:
        One line, or none if the run has no validation score.
    """
    score = validated(one)
    text = f'Use sotalign_jax.Aligner.load("{folder}"), the best model on validation'
    kind = "calibrated R@1" if one.get("calibrated") else "R@1"
    text += f" ({kind} {score:.1f}"
    rows, chance = "val/rows_x", "val/chance/mean/R@1"
    if {rows, chance} <= one.keys():
        text += f" among {one[rows]:,} {nouns[0]}, chance {one[chance]:.2g}"
    return [f"{text})."] if score >= 0 else []


def remarks(results: Results, table: Table) -> list[str]:
    """Returns remarks on failed runs, selected candidates, harmful calibration and chance level.

    Args:
        results: Results by run name.
        table: The comparison on the whole split.

    Returns:
        One sentence per remark.
    """
    said = [f"{name} failed: {one['error']}" for name, one in results.items() if "error" in one]
    for name, one in results.items():
        if one.get("candidates") and "selected" in one:
            scores = ", ".join(f"{key} {score:.1f}" for key, score in one["candidates"].items())
            measured = "mean of plain and calibrated R@1, R@5 and R@10 on validation"
            said.append(f"{name} returns {one['selected']} ({measured}: {scores}).")
            if "kernel_teacher" in one:
                said[-1] += f" Its teacher is {'nonlinear' if one['kernel_teacher'] else 'linear'}."
            if "unpaired" in one:
                line = aligner.describe_unpaired(one["unpaired"])
                said[-1] += f" {line[0].upper()}{line[1:]}."
    hurt = []
    # Only models that use calibrated scores are concerned.
    using = {name.rpartition("-seed")[0] for name, one in results.items() if one.get("calibrated")}
    for label, *row in table.rows:
        if label not in using:
            continue
        shown = dict(zip(table.headers[1:], row, strict=True))
        for name, plain in shown.items():
            calibrated = shown.get(name.replace("R@", "calibrated R@"))
            # Rounded as in the table, so that a remark never contradicts it.
            if isinstance(calibrated, float) and round(calibrated, 1) < round(plain, 1):
                hurt.append(f"{label} ({name} {plain:.1f} to {calibrated:.1f})")
    if hurt:
        said.append(f"Calibration, chosen on validation, hurt on test rows: {', '.join(hurt)}.")
    if chance := [name for name, one in results.items() if protocol.at_chance(one)]:
        text = f"Warning: validation is at chance for {', '.join(chance)}"
        said.append(f"{text}; check that row i of x matches row i of y.")
    return said


def comparisons(results: Seeds, nouns: tuple[str, str]) -> list[tuple[str, str, Table]]:
    """Returns file stem, title and table of every split that has scores.

    Args:
        results: Results of every seed, by label.
        nouns: Plural nouns for the rows of x and of y.
    """
    every = list(itertools.chain.from_iterable(results.values()))
    known = set(itertools.chain.from_iterable(every))
    tested = [
        split
        for split in ("test/1k", "test")
        if any(f"{split}/{key}" in known for key in COLUMNS.values())
    ]
    made = []
    for split in tested or ["val"]:
        x, y = f"{split}/rows_x", f"{split}/rows_y"
        having = [one for one in every if {x, y} <= one.keys()]
        sizes = {f"{one[x]:,.0f} {nouns[0]}, {one[y]:,.0f} {nouns[1]}" for one in having}
        stem, title = SPLITS[split]
        title = ": ".join(filter(None, [title, " | ".join(sorted(sizes))]))
        made.append((stem, title, comparison_table(results, split)))
    return made


def comparison_table(results: Seeds, split: str = "test") -> Table:
    """Returns a table of means and standard deviations over seeds, with a row for chance.

    Args:
        results: Results of every seed, by label.
        split: One of `SPLITS`.

    Returns:
        The table, with a row per label.
    """
    seeds = {label: [one for one in own if "error" not in one] for label, own in results.items()}
    ended = list(itertools.chain.from_iterable(seeds.values()))
    # A score that some runs lack cannot be compared.
    common = set.intersection(*map(set, ended)) if ended else set()
    keys = {name: key for name, key in COLUMNS.items() if f"{split}/{key}" in common}
    scores = [f"{split}/{key}" for key in keys.values()]
    rows: list[list[Any]] = [
        [label, *(Mean([one[key] for one in own]) if own else None for key in scores)]
        for label, own in seeds.items()
    ]
    # Calibration does not change the scores of a random ranking.
    levels = [f"{split}/chance/{key.removeprefix('calibrated/')}" for key in keys.values()]
    if common.intersection(levels):
        found = [{f"{one[key]:.2g}" for one in ended if key in one} for key in levels]
        rows.append([CHANCE, *(" | ".join(sorted(one)) or "-" for one in found)])
    headers = [f"val {name}" if split == "val" else name for name in keys]
    return Table(["method", *headers], rows, best=headers)


def comparison_plot(compared: Table) -> bytes | None:
    """Draws the columns of `PLOTTED` as bars, best on top. Returns a PNG, or None if empty."""
    rows = [row for row in compared.rows if row[0] != CHANCE]
    columns = dict(zip(compared.headers, zip(*rows, strict=True), strict=True))
    labels = columns.pop("method")
    chance = [row for row in compared.rows if row[0] == CHANCE]
    levels = dict(zip(compared.headers, chance[0], strict=True)) if chance else {}
    shown = [name for name in PLOTTED if name in columns] or list(columns)[:1]
    if not shown:
        return None
    # Matplotlib draws the first bar at the bottom.
    order = sorted(range(len(labels)), key=lambda row: columns[shown[0]][row] or 0.0)
    size = 2 + 3 * len(shown), 1.2 + 0.3 * len(labels)
    figure, _ = pyplot().subplots(1, len(shown), figsize=size, sharey=True, layout="constrained")
    for axes, name in zip(figure.axes, shown, strict=True):
        means = [columns[name][row] for row in order]
        # NaN draws no error bar for a single seed.
        spreads = [getattr(mean, "spread", None) or np.nan for mean in means]
        lengths = [mean or 0.0 for mean in means]
        bars = axes.barh([labels[row] for row in order], lengths, 0.7, xerr=spreads, capsize=2)
        texts = ["failed" if mean is None else f"{float(mean):.1f}" for mean in means]
        axes.bar_label(bars, texts, fontsize=7, padding=3)
        with contextlib.suppress(KeyError, ValueError):  # several galleries have several levels
            axes.axvline(float(levels[name]), color="0.4", ls="--", lw=1)
        axes.set_title(f"{name} (%)", fontsize=10)
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    return png(figure)


def bar_plots(compared: Table) -> dict[str, bytes]:
    """Draws each column of `PLOTTED` as upright bars with a line at chance.

    Args:
        compared: Table of a comparison.

    Returns:
        PNG files by the title of the column.
    """
    rows = [row for row in compared.rows if row[0] != CHANCE]
    columns = dict(zip(compared.headers, zip(*rows, strict=True), strict=True))
    levels = {row[0]: dict(zip(compared.headers, row, strict=True)) for row in compared.rows}
    labels = columns.pop("method")
    drawn = {}
    for name in [name for name in PLOTTED if name in columns] or list(columns)[:1]:
        order = sorted(range(len(labels)), key=lambda row: -(columns[name][row] or 0.0))
        shown = [columns[name][row] for row in order]
        means = [mean or 0.0 for mean in shown]
        spreads = [getattr(mean, "spread", None) or np.nan for mean in shown]
        size = max(3.6, 1.2 + 0.45 * len(labels)), 3.4
        figure, axes = pyplot().subplots(figsize=size, layout="constrained")
        bars = axes.bar([labels[row] for row in order], means, 0.7, yerr=spreads, capsize=2)
        texts = ["failed" if mean is None else f"{mean:.1f}" for mean in shown]
        axes.bar_label(bars, texts, fontsize=8, padding=2)
        with contextlib.suppress(KeyError, ValueError):  # several galleries have several levels
            axes.axhline(float(levels[CHANCE][name]), color="0.4", ls="--", lw=1)
        axes.tick_params(axis="x", rotation=90 if len(labels) > 5 else 0)
        axes.margins(y=0.12)
        axes.set_ylim(bottom=0.0)
        axes.set_title(f"{name} (%)", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        drawn[f"{name} (%)"] = png(figure)
    return drawn


PAIRED = markup.small(
    "Mean over the seeds that both methods have, in points, and its 95 % interval by Student's t. "
    "An interval without zero is a difference beyond the chance of the seeds. With fewer than five "
    "seeds it is rough."
)
"""Legend of `paired_table`."""


def paired_table(configs: Configs, results: Results, best: str) -> Table | None:
    """Returns differences between the best method and the others, or None without two seeds.

    Args:
        configs: Configs by run name.
        results: Results by run name.
        best: Label of the best method on validation.
    """
    seeds: dict[str, dict[int, run_lib.Results]] = {}
    for name, one in results.items():
        if "error" not in one:
            seeds.setdefault(configs[name].label, {})[configs[name].seed] = one
    known = [split for one in results.values() if (split := summary.split_of(one))]
    if not known or best not in seeds:
        return None
    shared = set.intersection(*(set(one) for own in seeds.values() for one in own.values()))
    keys = {title: f"{known[0]}/{key}" for title, key in COLUMNS.items()}
    keys = {title: key for title, key in keys.items() if key in shared}
    rows = summary.differences(seeds, best, keys)
    return Table(["methods", "seeds", *keys], rows) if rows else None


def sweep_plots(configs: Configs, results: Results) -> dict[str, bytes]:
    """Draws R@10 over every numeric setting that differs between otherwise equal runs.

    Args:
        configs: Configs by run name.
        results: Results by run name.

    Returns:
        PNG files by caption.
    """
    found = {name: summary.numbers(one) for name, one in results.items()}
    scores = {name: values[10][0] for name, values in found.items() if 10 in values}
    drawn = {}
    for key, lines in summary.swept(configs, scores).items():
        figure, axes = pyplot().subplots(figsize=(4.5, 3), layout="constrained")
        for index, (label, points) in enumerate(lines.items()):
            x, y = np.transpose(points)
            places = np.unique(x)
            means = [y[x == place].mean() for place in places]
            axes.plot(places, means, color=f"C{index % 10}", label=label)
            axes.plot(x, y, ".", color=f"C{index % 10}")
        if min(places) > 0 and max(places) >= 10 * min(places):
            axes.set_xscale("log")
        axes.set_xlabel(key)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=8)
        drawn[f"R@10 in percent over {key}. Lines are means, dots are seeds."] = png(figure)
    return drawn


def curve_plots(
    folders: Mapping[str, Sequence[pathlib.Path]], captions: Mapping[str, str]
) -> dict[str, bytes]:
    """Plots metrics of runs over their steps. Seeds of a method share a colour.

    Args:
        folders: Run folders of every seed, by label.
        captions: Captions by metric.

    Returns:
        PNG files by caption. Metrics that no run has are left out.
    """
    logs = {label: list(map(_metrics, own)) for label, own in folders.items()}
    drawn = {}
    for key, caption in captions.items():
        lines: dict[str, list[Any]] = {}
        for label, log in ((label, log) for label, own in logs.items() for log in own):
            points = [(row["step"], float(row[key])) for row in log if key in row]
            if points:
                lines.setdefault(label, []).append(np.transpose(points))
        if not lines:  # closed-form methods have no steps
            continue
        figure, axes = pyplot().subplots(figsize=(4.5, 3), layout="constrained")
        for index, (label, seeds) in enumerate(lines.items()):
            for number, points in enumerate(seeds):
                shown = {"label": None if number else label, "color": f"C{index % 10}"}
                axes.plot(*points, lw=1.2, **shown)
        if key.endswith("_error"):
            _log_scale(axes)
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=8)
        drawn[caption] = png(figure)
    return drawn


def _metrics(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the metrics of a run, or none for a method without steps."""
    path = folder / "metrics.jsonl"
    return workdir_lib.read_metrics(path) if path.exists() else []


def _log_scale(ax: Any) -> None:
    """Makes an axis logarithmic over whole decades.

    Matplotlib labels powers of ten only, and values that hardly differ may have none in between.
    """
    ends = np.array([ax.dataLim.minposy, ax.dataLim.intervaly[1]])
    if np.isfinite(ends).all() and ends[1] > 0:
        low, high = np.floor(np.log10(ends))
        ax.set(yscale="log", ylim=(10.0**low, 10.0 ** (high + 1)))


# --- retrieved texts -----------------------------------------------------------------------------


NO_PICTURES = "The cards have no pictures, because only embeddings are stored here."
LINKED = " The names below are links to them."


RELIABILITY = (
    "Share of right results among the first ten, by their probability. Numbers count results. "
    "Points above the line are more often right than the model says."
)


def reliability_plot(bins: Sequence[confidence.Bin]) -> bytes:
    """Draws a reliability curve, see `retrieved.reliability`."""
    figure, ax = pyplot().subplots(figsize=(4.5, 3.6), layout="constrained")
    ax.plot([0, 1], [0, 1], color="0.7", linestyle="--")
    ax.plot([one.claimed for one in bins], [one.right for one in bins], marker="o")
    for one in bins:
        place = (one.claimed, one.right)
        ax.annotate(f"{one.size:,}", place, (0, 7), textcoords="offset points", ha="center")
    ax.set(xlabel="probability", ylabel="share right", xlim=(-0.03, 1.03), ylim=(-0.03, 1.1))
    return png(figure)


def found_cards(found: Sequence[retrieved.Found], each: int = 8) -> str:
    """Returns cards of successful queries (own text among the first ten) and of other queries.

    Args:
        found: Queries with the texts found.
        each: Largest number of cards of either kind.
    """
    parts = [
        markup.small("Bold: the query's own text. Below it: the nearest texts with their scores.")
    ]
    if not any(one.picture is not None and one.picture.exists() for one in found):
        linked = any(one.link for one in found)
        parts.append(markup.small(NO_PICTURES + (LINKED if linked else "")))
    for title, near in (("Own text among the first 10", True), ("Own text further down", False)):
        some = [one for one in found if (one.rank <= 10) == near]
        parts.append(f"<h3>{title}: {len(some)} of {len(found)}</h3>")
        parts.append(markup.cards(*map(_card, some[:each])))
    return "\n".join(parts)


def _card(one: retrieved.Found) -> tuple[str, str]:
    """Returns caption and picture of a query. The caption lists the texts found for it."""
    own, name, shown = *map(html.escape, one.query), ""
    if one.picture is not None and one.picture.exists():
        shown = markup.thumbnail(items.oriented(one.picture), one.query[0])
    if one.link:
        name, shown = (f"<a href='{html.escape(one.link)}'>{part}</a>" for part in (name, shown))
    rows = "".join(
        f"<li{' class=own' if right else ''}>{html.escape(text)} <i>{score:.2f}</i></li>"
        for text, score, right in one.nearest
    )
    return f"<b>{own}</b><br>{name}, rank {one.rank:,} of {one.total:,}<ol>{rows}</ol>", shown
