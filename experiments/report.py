"""Reports of results: tables as text, Markdown, CSV and HTML, and the comparison of runs."""

import base64
import csv
import dataclasses
import html
import io
import itertools
import json
import math
import pathlib
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tabulate
from ml_collections.config_dict import FrozenConfigDict

from experiments import distributed, photos
from experiments import run as run_lib
from experiments import workdir as workdir_lib
from experiments.extract import extraction, items
from sotalign_jax import aligner, data, files, persistence
from sotalign_jax.diagnostics import Mean

Configs = Mapping[str, FrozenConfigDict]
Results = Mapping[str, run_lib.Results]

# --- tables --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text, numbers, None (shown as "-") and means ("8.4 ± 0.6"), in several formats.

    `digits` are decimals in text and Markdown; the largest of a column in `best` is marked.

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
        """Columns aligned by spaces, numbers to the right, the best of a column with a star."""
        text = self._tabulate("simple", self._cells("{}*", "{} "))
        return "\n".join(line.rstrip() for line in text.splitlines())

    def markdown(self) -> str:
        """A Markdown table, the best of a column in bold."""
        cells = self._cells("**{}**", "{}")
        return self._tabulate("pipe", [[text.replace("|", r"\|") for text in row] for row in cells])

    def csv(self) -> str:
        """Comma-separated values with all digits and no marks."""
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
        """An HTML table, the best of a column in bold."""
        cells = [[html.escape(text) for text in row] for row in self._cells("\0{}\1", "{}")]
        body = self._tabulate("unsafehtml", cells).replace("\0", "<b>").replace("\1", "</b>")
        return f"<div class='scroll'>{body}</div>"

    def save(self, stem: str | pathlib.Path) -> None:
        """Writes `stem`.md and `stem`.csv."""
        write(pathlib.Path(f"{stem}.md"), self.markdown() + "\n")
        write(pathlib.Path(f"{stem}.csv"), self.csv())

    def _tabulate(self, style: str, cells: list[list[str]]) -> str:
        numeric = [any(map(_is_number, values)) for values in zip(*self.rows, strict=True)]
        align = ["right" if right else "left" for right in numeric] or None
        options = {"disable_numparse": True, "preserve_whitespace": True}
        return tabulate.tabulate(cells[1:], cells[0], tablefmt=style, colalign=align, **options)

    def _cells(self, marked: str, plain: str) -> list[list[str]]:
        """Header and body as text, every cell of a column with a best value marked or padded."""
        columns = []
        for header, *values in zip(self.headers, *self.rows, strict=True):
            texts = [header, *map(self._text, values)]
            numbers = [value for value in values if _is_number(value) and math.isfinite(value)]
            if header in self.best and numbers:
                # Compared as printed, so that equal-looking values are all marked.
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
    """Writes a file; on a full disk, as after a kill, an earlier one is intact."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with workdir_lib.replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def png(figure: Any) -> bytes:
    """A figure as a file's content, so that it can be written at once; closes it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    pyplot().close(figure)
    return buffer.getvalue()


def pyplot() -> Any:
    """matplotlib.pyplot, drawing into files."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    return plt


# --- pages: single HTML files that need nothing but themselves -----------------------------------

STYLE = pathlib.Path(__file__).with_name("report.css")
HEAD = """<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'>
<meta name='viewport' content='width=device-width, initial-scale=1'>
<title>{title}</title><style>{style}</style></head><body><main>"""


def page(title: str, below: str, *parts: str) -> str:
    """A whole page: its title, what stands below it, and other parts, as HTML."""
    head = HEAD.format(title=html.escape(title), style=STYLE.read_text())
    header = f"<header><h1>{html.escape(title)}</h1>{below}</header>"
    return "\n".join([head, header, *parts, "</main></body></html>\n"])


def section(title: str, *parts: str) -> str:
    """Parts in a frame."""
    return "\n".join([f"<section><h2>{html.escape(title)}</h2>", *parts, "</section>"])


def small(content: str) -> str:
    """A paragraph in small print."""
    return f"<p class='small'>{html.escape(content)}</p>"


def image(content: bytes, alt: str, kind: str = "png") -> str:
    """A picture whose bytes are in the page."""
    data = base64.b64encode(content).decode()
    return f"<img alt='{html.escape(alt, quote=True)}' src='data:image/{kind};base64,{data}'>"


def thumbnail(picture: Any, alt: str) -> str:
    """A small copy of a `PIL.Image`, on white."""
    shown, buffer = items.on_white(picture), io.BytesIO()
    shown.thumbnail((360, 360))
    shown.save(buffer, "JPEG", quality=85)
    return image(buffer.getvalue(), alt, "jpeg")


def cards(*boxes: tuple[str, str]) -> str:
    """Captions and pictures in boxes, as many to a row as fit."""
    shown = (f"<figure>{one}<figcaption>{title}</figcaption></figure>" for title, one in boxes)
    return f"<div class='cards'>{''.join(shown)}</div>"


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
EXPLAINED = (
    "Percent, retrieval averaged over both directions. R@k: the match is among the first k of the "
    "test split; calibrated: after correcting for rows that are close to everything; val: on the "
    "validation split, from which the parameters to keep are chosen."
)
"""What the columns mean, below the table of the page."""
PLOTTED = ("R@1", "R@10", "calibrated R@10", "zero-shot")
"""Columns that are plotted; the first one if none of these is there."""
CURVES = {
    "loss": "loss",
    "teacher_iterations": "iterations, teacher's plan",
    "teacher_error": "marginal error, teacher's plan",
    "val/mean/R@1": "R@1 on validation (%)",
    "student_iterations": "iterations, student's plan",
    "student_error": "marginal error, student's plan",
}
"""Metrics over the steps that are drawn, with their titles."""
SETTINGS = (
    *("data.name", "data.n_pairs", "data.pool", "data.n_unpaired"),
    *("teacher.kind", "teacher.ridge", "heads.dim", "heads.init"),
    *("train.steps", "train.learning_rate", "train.pair_batch", "train.unpaired_batch"),
    *("sotalign.divergence", "sotalign.alpha", "sotalign.epsilon", "sotalign.epsilon_star"),
)
"""What makes a result, printed below it."""


def conclude(configs: Configs, results: Results, workdir: pathlib.Path) -> None:
    """Compares runs; those that failed are named in an error at the end."""
    compare(configs, results, workdir)
    if failed := [f"{name}: {one['error']}" for name, one in results.items() if "error" in one]:
        raise FloatingPointError(f"{len(failed)} of {len(results)} runs failed, first {failed[0]}")


def compare(configs: Configs, results: Results, workdir: pathlib.Path) -> None:
    """Writes comparison.md, .csv and .png and report.html into `workdir`; prints the table.

    The report has curves of the training and, where captions are known (COCO, or files made by
    `experiments.pair`), what the model that is best on validation found; the first of these are
    printed, too, and kept in retrieved.txt.
    """
    if not distributed.is_first():
        return
    folders = {name: workdir / name if len(configs) > 1 else workdir for name in configs}
    compared, settings = comparison_table(results), settings_text(configs)
    compared.save(workdir / "comparison")
    failed = [f"{name} failed: {one['error']}" for name, one in results.items() if "error" in one]
    print("\n".join([f"\n{compared}\n", *failed, settings]))
    shown = [section("Results", compared.html(), small(EXPLAINED), small(settings))]
    if plot := comparison_plot(compared):
        write(workdir / "comparison.png", plot)
        shown.append(section("Comparison", image(plot, "scores of the runs")))
    if plot := curves_plot(folders):
        shown.append(section("Training", image(plot, "curves over the steps")))
    best = max(configs, key=lambda name: results[name].get(run_lib.SCORE, -1.0))
    labels = labels_of(configs[best]) if configs[best].data.test else None
    if labels and (folders[best] / persistence.FOLDER).exists():
        gallery = run_lib.load_dataset(configs[best]).test
        assert gallery is not None
        found = find(aligner.Aligner.load(folders[best]), gallery, labels)
        title = f"What {best} finds for pictures it has not seen"
        text = "\n".join([f"{title}:", *(one.text() for one in found[:5]), ""])
        write(workdir / "retrieved.txt", text)
        print(f"\n{text}")
        shown.append(section(title, found_cards(found)))
    here = json.dumps(workdir_lib.kept_environment(workdir), indent=2)
    shown.append(section("Environment", f"<pre>{html.escape(here)}</pre>"))
    title = f"Results: {', '.join(label for label, *_ in compared.rows)}"
    write(workdir / "report.html", page(title, small(str(workdir)), *shown))
    print(f"\nResults, models and report.html are in {workdir}")


def settings_text(configs: Configs) -> str:
    """Values of `SETTINGS`, all of them where runs differ."""
    parts = []
    for key in SETTINGS:
        section, name = key.split(".")
        having = [c[section] for c in configs.values() if name in c.get(section, {})]
        found = dict.fromkeys(str(one[name]) for one in having)
        parts += [f"{key}={' | '.join(found)}"] if found else []
    return textwrap.fill("; ".join(parts), 100, break_long_words=False, break_on_hyphens=False)


def comparison_table(results: Results) -> Table:
    """Mean and standard deviation over the seeds of runs named LABEL-seedS that did not fail."""
    seeds: dict[str, list[run_lib.Results]] = {}
    for name, one in results.items():
        own = seeds.setdefault(name.rpartition("-seed")[0], [])
        own += [one] if "error" not in one else []
    ended = list(itertools.chain.from_iterable(seeds.values()))
    common = set.intersection(*map(set, ended)) if ended else set()
    columns = {header: key for header, key in COLUMNS.items() if key in common}
    rows = [
        [label, *(Mean([one[key] for one in own]) if own else None for key in columns.values())]
        for label, own in seeds.items()
    ]
    return Table(["method", *columns], rows, best=columns)


def comparison_plot(compared: Table) -> bytes | None:
    """Bars of `PLOTTED`, best on top, with the spread over seeds; None without numbers."""
    columns = dict(zip(compared.headers, zip(*compared.rows, strict=True), strict=True))
    labels = columns.pop("method")
    shown = [name for name in PLOTTED if name in columns] or list(columns)[:1]
    if not shown:
        return None
    # The first bar is drawn at the bottom.
    order = sorted(range(len(labels)), key=lambda row: columns[shown[0]][row] or 0.0)
    size = 2 + 3 * len(shown), 1.2 + 0.3 * len(labels)
    figure, _ = pyplot().subplots(1, len(shown), figsize=size, sharey=True, layout="constrained")
    for axes, name in zip(figure.axes, shown, strict=True):
        means = [columns[name][row] for row in order]
        spreads = [getattr(mean, "spread", None) or np.nan for mean in means]
        lengths = [mean or 0.0 for mean in means]
        bars = axes.barh([labels[row] for row in order], lengths, 0.7, xerr=spreads, capsize=2)
        texts = ["failed" if mean is None else f"{float(mean):.1f}" for mean in means]
        axes.bar_label(bars, texts, fontsize=7, padding=3)
        axes.set_title(f"{name} (%)", fontsize=10)
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    return png(figure)


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
    plt, rows = pyplot(), math.ceil(len(keys) / 3)
    figure = plt.figure(figsize=(11, 0.5 + 2.3 * rows), layout="constrained")
    labels = dict.fromkeys(name.rpartition("-seed")[0] for name in logs)
    colours = {label: f"C{index % 10}" for index, label in enumerate(labels)}
    for index, key in enumerate(keys, 1):
        ax = figure.add_subplot(rows, 3, index)
        for name, log in logs.items():
            drawn = [(row["step"], float(row[key])) for row in log if key in row]
            colour = colours[name.rpartition("-seed")[0]]
            ax.plot(*np.reshape(drawn, (-1, 2)).T, color=colour, lw=1.2)
        ax.set_title(CURVES[key], fontsize=10)
        ax.set_xlabel("step")
        if key.endswith("_error"):
            _log_scale(ax)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.spines[["top", "right"]].set_visible(False)
    lines = [plt.Line2D([], [], color=colour, label=label) for label, colour in colours.items()]
    figure.legend(handles=lines, loc="outside lower center", ncols=5, frameon=False)
    return png(figure)


def _log_scale(ax: Any) -> None:
    """Whole decades, so that powers of ten are marked even where values hardly differ."""
    ends = np.array([ax.dataLim.minposy, ax.dataLim.intervaly[1]])
    if np.isfinite(ends).all() and ends[1] > 0:
        low, high = np.floor(np.log10(ends))
        ax.set(yscale="log", ylim=(10.0**low, 10.0 ** (high + 1)))


# --- what a model finds for pictures that it has not seen ----------------------------------------


class Labels(NamedTuple):
    """What the rows of a test gallery are: names of x, captions of y, and pictures of x, if any."""

    x: Sequence[str]
    y: Sequence[str]
    pictures: Sequence[pathlib.Path] = ()


WORDS = {True: "right", False: "wrong"}


class Found(NamedTuple):
    """The captions nearest to a picture, best first, and whether each says what its own do."""

    name: str
    caption: str
    retrieved: tuple[tuple[str, bool], ...]
    picture: pathlib.Path | None = None

    def text(self) -> str:
        """The picture's own caption, and below it those that were found."""
        found = [f"  {WORDS[right]}  {caption.strip()}" for caption, right in self.retrieved]
        return "\n".join([f"{self.name}: {self.caption.strip()}", *found])

    def card(self) -> tuple[str, str]:
        """Likewise as HTML, and the picture if its file is at hand."""
        rows = [f"<li class='{WORDS[right]}'>{html.escape(t)}</li>" for t, right in self.retrieved]
        title = f"<b>{html.escape(self.caption)}</b><br>{html.escape(self.name)}"
        shown = ""
        if self.picture is not None and self.picture.exists():
            shown = thumbnail(items.oriented(self.picture), self.caption)
        return f"{title}<ol>{''.join(rows)}</ol>", shown


def labels_of(config: FrozenConfigDict) -> Labels | None:
    """The labels of a run's test rows: of COCO, and of files that `experiments.pair` made."""
    if (config.data.evaluate_on or config.data.name) == "coco":
        image_ids, said = photos.test_labels()
        return Labels([f"photograph {image}" for image in image_ids], said)
    test_x = pathlib.Path(files.split_key(config.data.files.test_x or "")[0]).expanduser()
    noted = test_x.parent / extraction.TEST
    if not config.data.files.test_x or not noted.exists():
        return None
    kept = workdir_lib.read_json(noted)
    pictures = [pathlib.Path(kept["root"]) / x for x in kept["x"]]
    return Labels(kept["x"], kept["y"], pictures)


def find(model: aligner.Aligner, gallery: data.Gallery, labels: Labels) -> list[Found]:
    """The three nearest of all captions to some pictures, which are the same for every model."""
    count, top = min(200, len(gallery.x)), min(3, len(gallery.y))
    asked = np.random.default_rng(0).choice(len(gallery.x), count, replace=False)
    _, rows = model.search(gallery.x[asked], gallery.y, k=top)
    found = []
    for query, best in zip(asked, rows, strict=True):
        own = [labels.y[y] for y in np.flatnonzero(gallery.x_of_y == query).tolist()]
        retrieved = tuple((labels.y[y], labels.y[y] in own) for y in best)
        picture = labels.pictures[query] if labels.pictures else None
        found.append(Found(labels.x[query], own[0], retrieved, picture))
    return found


def found_cards(found: Sequence[Found], each: int = 8) -> str:
    """HTML of pictures whose nearest caption is right, and of as many where it is wrong."""
    parts = [small("In bold a caption of the picture; below it the captions found.")]
    for right, title in WORDS.items():
        some = [one for one in found if one.retrieved[0][1] == right]
        parts.append(f"<h3>Nearest caption {title}: {len(some)} of {len(found)} pictures</h3>")
        parts.append(cards(*(one.card() for one in some[:each])))
    return "\n".join(parts)
