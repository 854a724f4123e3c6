"""Reports of results: mean and spread, tables as text, Markdown and CSV, and the comparison."""

import csv
import dataclasses
import html
import io
import json
import math
import os
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tabulate

from experiments import distributed, page, retrieval
from experiments import run as run_lib
from experiments import workdir as workdir_lib
from sotalign_jax import aligner, checks
from sotalign_jax.diagnostics import Mean

if TYPE_CHECKING:
    from ml_collections.config_dict import FrozenConfigDict

    from experiments.run import Outcome, Results

# --- tables --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of results as aligned text (`str`), Markdown and CSV; made by `table`."""

    headers: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    digits: int
    best: Mapping[str, str]

    def __str__(self) -> str:
        """Columns aligned by spaces, numbers to the right, the best of a column with a star."""
        text = self._tabulate(self._cells("{}*", "{} "), "simple")
        return "\n".join(line.rstrip() for line in text.splitlines())

    def markdown(self) -> str:
        """A Markdown table, the best of a column in bold."""
        cells = [[text.replace("|", r"\|") for text in row] for row in self._cells("**{}**", "{}")]
        return self._tabulate(cells, "pipe")

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

    def html(self, caption: str = "", *, theirs: Sequence[str] = ()) -> str:
        """An HTML table, the best of a column in bold, and columns `theirs` in another colour."""
        kinds = [" class='theirs'" if header in theirs else "" for header in self.headers]
        cells = self._cells("\0{}", "{}")
        lines: list[str] = []
        for row in cells:
            tag = "td" if lines else "th"
            texts = [html.escape(text) for text in row]
            marked = [f"<b>{text[1:]}</b>" if text[:1] == "\0" else text for text in texts]
            pairs = zip(kinds, marked, strict=True)
            lines.append("".join(f"<{tag}{kind}>{text}</{tag}>" for kind, text in pairs))
        title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        return f"<div class='scroll'><table>{title}{body}</table></div>"

    def save(self, stem: str | os.PathLike[str]) -> list[pathlib.Path]:
        """Writes `stem`.md and `stem`.csv and returns their paths."""
        paths = [pathlib.Path(f"{os.fspath(stem)}{suffix}") for suffix in (".md", ".csv")]
        for path, text in zip(paths, [self.markdown() + "\n", self.csv()], strict=True):
            write(path, text)
        return paths

    def _tabulate(self, cells: list[list[str]], style: str) -> str:
        numeric = [any(_is_number(row[i]) for row in self.rows) for i in range(len(self.headers))]
        return tabulate.tabulate(
            cells[1:],
            cells[0],
            tablefmt=style,
            colalign=["right" if right else "left" for right in numeric] if self.rows else None,
            disable_numparse=True,
            preserve_whitespace=True,
        )

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
        rows: one sequence a row, of text, numbers or None (shown as "-"); a `diagnostics.Mean` is
            shown as "8.4 ± 0.6", and is two columns in CSV.
        digits: decimals of floating-point numbers in text and Markdown.
        best: which columns to mark, such as `{"MeanR@1": "max", "loss": "min"}`.

    Returns:
        A `Table`.

    Raises:
        InputError: a row has another length than the header, or `best` names no column.

    >>> print(table(["method", "MeanR@1"], [["sail", 24.2], ["sotalign", 30.31]],
    ...             best={"MeanR@1": "max"}))
    method      MeanR@1
    --------  ----------
    sail           24.2
    sotalign       30.3*
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


# --- comparisons of runs -------------------------------------------------------------------------

COLUMNS = {
    "R@1": "test/mean/R@1",
    "R@5": "test/mean/R@5",
    "R@10": "test/mean/R@10",
    "calibrated R@1": "test/calibrated/mean/R@1",
    "calibrated R@10": "test/calibrated/mean/R@10",
    "zero-shot": "test/zero_shot/top1",
    "val R@1": "val/mean/R@1",
}
"""What is shown of every run."""
SEVERAL = ("R@1", "R@10", "calibrated R@10", "zero-shot")
"""What is shown for every number of pairs when there are several."""
PANELS = {
    "mean/R@1": "R@1, both ways",
    "mean/R@10": "R@10, both ways",
    "zero_shot/top1": "zero-shot top-1",
}
"""What is plotted, with its title."""

Grouped = dict[str, dict[int, list["Results"]]]
"""Results of every seed, by label and number of pairs; those of failed runs are missing."""


def conclude(
    configs: Mapping[str, "FrozenConfigDict"],
    outcomes: Mapping[str, "Outcome"],
    workdir: pathlib.Path,
    *,
    folders: Mapping[str, pathlib.Path] | None = None,
) -> None:
    """Writes comparison.md, .csv and .png and report.html into `workdir`; prints the table.

    The report has curves of the training and, where captions are known (COCO, or files made by
    `experiments.pair`), what the model that is best on validation found; the first of these are
    printed, too, and kept in retrieved.txt. `folders` are those of the runs, if they are not named
    after them in `workdir`.

    Raises:
        FloatingPointError: runs failed; the others are in the table.
    """
    if distributed.is_first():
        own = {name: workdir / name if len(configs) > 1 else workdir for name in configs}
        _conclude(configs, outcomes, workdir, folders or own)
    failed = [f"{name}: {outcome.error}" for name, outcome in outcomes.items() if outcome.error]
    if failed:
        raise FloatingPointError(f"{len(failed)} of {len(outcomes)} runs failed, first {failed[0]}")


def _conclude(
    configs: Mapping[str, "FrozenConfigDict"],
    outcomes: Mapping[str, "Outcome"],
    workdir: pathlib.Path,
    folders: Mapping[str, pathlib.Path],
) -> None:
    results, settings = grouped(configs, outcomes), settings_text(configs)
    compared = comparison_table(results)
    compared.save(workdir / "comparison")
    print(f"\n{compared}\n\n{settings}")
    shown = [page.section("Results", compared.html(), page.text(settings))]
    if (plot := comparison_plot(results)) is not None:
        write(workdir / "comparison.png", plot)
        shown.append(page.section("Comparison", page.image(plot, "scores of the runs")))
    if (plot := curves_plot(folders)) is not None:
        shown.append(page.section("Training", page.image(plot, "curves over the steps")))
    scores = {name: outcomes[name].results.get(run_lib.SCORE, -1.0) for name in configs}
    best = max(scores, key=scores.__getitem__)
    if found := _found(configs[best], folders[best]):
        title = f"What {best} finds for pictures it has not seen"
        text = f"{title}:\n{retrieval.render(found[:5])}\n"
        write(workdir / "retrieved.txt", text)
        print(f"\n{text}")
        shown.append(page.section(title, retrieval.cards(found)))
    title = ", ".join(results)
    head = f"<header><h1>{html.escape(title)}</h1>{page.text(str(workdir))}</header>"
    shown.append(page.environment(workdir_lib.kept_environment(workdir)))
    write(workdir / "report.html", page.page(title, head, *shown))
    print(f"\nResults, models and report.html are in {workdir}")


def _found(config: "FrozenConfigDict", folder: pathlib.Path) -> list[retrieval.Found]:
    """What the model in a run's folder finds on its test split; nothing if that is not known."""
    labels = retrieval.labels(config) if config.data.test else None
    if labels is None or not (folder / aligner.FOLDER).exists():
        return []
    gallery = run_lib.load_dataset(config).test
    assert gallery is not None
    return retrieval.find(aligner.Aligner.load(folder), gallery, labels)


SETTINGS = (
    *("data.name", "data.n_pairs", "data.pool", "data.n_unpaired"),
    *("teacher.kind", "teacher.ridge", "heads.dim", "heads.init"),
    *("train.steps", "train.learning_rate", "train.pair_batch", "train.unpaired_batch"),
    *("sotalign.divergence", "sotalign.alpha", "sotalign.epsilon", "sotalign.epsilon_star"),
)
"""What makes a result, printed below it."""


def settings_text(configs: Mapping[str, "FrozenConfigDict"]) -> str:
    """Values of `SETTINGS`; where runs differ, each value with the runs that have it."""
    parts = []
    for key in SETTINGS:
        section, name = key.split(".")
        runs: dict[Any, list[str]] = {}
        for run, config in configs.items():
            if section in config:
                label = run.rpartition("-seed")[0]
                labels = runs.setdefault(config[section][name], [])
                labels.extend([label] if label not in labels else [])
        if len(runs) == 1:
            parts.append(f"{key}={next(iter(runs))}")
        elif runs:
            parts.append(f"{key}=" + ", ".join(f"{v} ({'/'.join(of)})" for v, of in runs.items()))
    return textwrap.fill("; ".join(parts), 100, break_long_words=False, break_on_hyphens=False)


def grouped(
    configs: Mapping[str, "FrozenConfigDict"], outcomes: Mapping[str, "Outcome"]
) -> Grouped:
    """Results by label and number of pairs, in the order of the runs.

    Runs named LABEL-Npairs-seedS, as many as there are numbers of pairs, are rows of one label.
    """
    several = len({config.data.n_pairs for config in configs.values()}) > 1
    results: Grouped = {}
    for name, config in configs.items():
        label, n_pairs = name.rpartition("-seed")[0], config.data.n_pairs
        label = label.removesuffix(f"-{n_pairs}pairs") if several else label
        seeds = results.setdefault(label, {}).setdefault(n_pairs, [])
        if outcomes[name].error is None:
            seeds.append(outcomes[name].results)
    return results


def comparison_table(results: Grouped) -> Table:
    """Mean and standard deviation over seeds; a group of columns for every number of pairs."""
    budgets = _budgets(results)
    present = [header for header, key in COLUMNS.items() if _has(results, key)]
    if len(budgets) > 1:
        present = [header for header in present if header in SEVERAL] or present[:1]
    columns = {
        header if len(budgets) == 1 else f"{n_pairs}: {header}": (n_pairs, COLUMNS[header])
        for n_pairs in budgets
        for header in present
    }
    rows = [
        [name, *(_mean(of_pairs.get(n_pairs, []), key) for n_pairs, key in columns.values())]
        for name, of_pairs in results.items()
    ]
    return table(["method", *columns], rows, best=dict.fromkeys(columns, "max"))


def comparison_plot(results: Grouped) -> bytes | None:
    """Bars of R@1, R@10 and zero-shot accuracy, best on top; whiskers show the spread over seeds.

    On the test split, on validation when there is no test split, and no plot without either.
    """
    splits = [name for name in ("test", "val") if _has(results, f"{name}/mean/R@1")]
    if not splits:
        return None
    plt = pyplot()
    budgets = _budgets(results)
    several = len(budgets) > 1
    keys = [key for panel in PANELS if _has(results, key := f"{splits[0]}/{panel}")]

    def score(name: str) -> float:
        means = [_mean(results[name].get(n_pairs, []), keys[0]) for n_pairs in budgets]
        return sum(mean or 0.0 for mean in means)

    names = sorted(results, key=score)  # the first bar is drawn at the bottom
    height = 1.2 + 0.18 * len(names) * (len(budgets) + 0.6)
    figure, _ = plt.subplots(
        1, len(keys), figsize=(2 + 3 * len(keys), height), sharey=True, layout="constrained"
    )
    shades = plt.get_cmap("viridis")
    thickness = 0.8 / len(budgets)
    for axes, key in zip(figure.axes, keys, strict=True):
        for index, n_pairs in enumerate(budgets):
            means = [_mean(results[name].get(n_pairs, []), key) for name in names]
            places = [place + 0.4 - thickness * (index + 0.5) for place, _ in enumerate(names)]
            bars = axes.barh(
                places,
                [mean or 0.0 for mean in means],
                thickness * 0.9,
                xerr=[getattr(mean, "spread", None) or np.nan for mean in means],
                error_kw={"elinewidth": 1, "capsize": 2},
                color=shades(0.25 + 0.5 * index / max(len(budgets) - 1, 1)),
                label=f"{n_pairs:,} pairs",
            )
            texts = ["failed" if mean is None else f"{float(mean):.1f}" for mean in means]
            axes.bar_label(bars, texts, fontsize=7, padding=3)
        axes.set_title(PANELS[key.partition("/")[2]], fontsize=10)
        axes.set_xlabel(f"{splits[0]} (%)" if several else f"{splits[0]} (%), {budgets[0]:,} pairs")
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_yticks(range(len(names)), names)
    figure.axes[0].set_ylim(-0.6, len(names) - 0.4)
    if several:
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=len(budgets),
            frameon=False,
        )
    return png(figure)


CURVES = {
    "loss": "loss",
    "teacher_iterations": "iterations, teacher's plan",
    "teacher_error": "marginal error, teacher's plan",
    "val/mean/R@1": "R@1 on validation (%)",
    "student_iterations": "iterations, student's plan",
    "student_error": "marginal error, student's plan",
}
"""Metrics over the steps that are drawn, with their titles."""


def curves_plot(folders: Mapping[str, pathlib.Path]) -> bytes | None:
    """Metrics of runs over their steps; runs that differ in their seed have one colour."""
    logs = {
        name: [json.loads(line) for line in path.read_text().splitlines()]
        for name, folder in folders.items()
        if (path := folder / "metrics.jsonl").exists()
    }
    keys = [key for key in CURVES if any(key in row for log in logs.values() for row in log)]
    if not keys:
        return None
    plt = pyplot()
    rows = -(-len(keys) // 3)
    size = 11, 0.5 + 2.3 * rows
    figure, axes = plt.subplots(rows, 3, figsize=size, layout="constrained", squeeze=False)
    labels = list(dict.fromkeys(name.rpartition("-seed")[0] for name in logs))
    for ax, key in zip(axes.flat, keys, strict=False):
        for name, log in logs.items():
            label = name.rpartition("-seed")[0]
            drawn = [(row["step"], float(row[key])) for row in log if key in row]
            if drawn:
                ax.plot(*zip(*drawn, strict=True), color=f"C{labels.index(label) % 10}", lw=1.2)
        ax.set_title(CURVES[key], fontsize=10)
        ax.set_yscale("log" if key.endswith("_error") else "linear")
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes.flat[len(keys) :]:
        ax.set_axis_off()
    for ax in axes[-1]:
        ax.set_xlabel("step")
    lines = [plt.Line2D([], [], color=f"C{i % 10}", label=label) for i, label in enumerate(labels)]
    figure.legend(handles=lines, loc="outside lower center", ncols=5, frameon=False)
    return png(figure)


def png(figure: Any) -> bytes:
    """A figure as a file's content, so that it can be written at once; closes it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    pyplot().close(figure)
    return buffer.getvalue()


def write(path: pathlib.Path, content: str | bytes) -> None:
    """Writes a file; on a full disk, as after a kill, an earlier one is intact."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with workdir_lib.replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def pyplot() -> Any:
    """matplotlib.pyplot, drawing into files."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    return plt


def _budgets(results: Grouped) -> list[int]:
    return sorted({n_pairs for of_pairs in results.values() for n_pairs in of_pairs})


def _has(results: Grouped, key: str) -> bool:
    """Whether all runs that did not fail, and at least one, have this metric."""
    runs = [run for of_pairs in results.values() for seeds in of_pairs.values() for run in seeds]
    return bool(runs) and all(key in run for run in runs)


def _mean(seeds: Sequence[Mapping[str, float]], key: str) -> Mean | None:
    """Over the seeds; None when all of them failed."""
    return Mean([seed[key] for seed in seeds]) if seeds else None
