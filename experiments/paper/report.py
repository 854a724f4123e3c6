"""What is shown of tables and figures: on the screen, as Markdown, CSV and PNG, and on one page."""

import collections
import dataclasses
import html
import itertools
import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments import page as pages
from experiments import report, workdir
from experiments.paper.entries import ENTRIES, Entry
from experiments.paper.lab import Lab, key_of
from experiments.paper.panels import WORDS, Panel, Verdict, paper_results
from experiments.paper.sources import KNOWN
from sotalign_jax import training

TITLE = "SOTAlign: every table and figure, ours beside the paper's"
FIGURES, CELLS = "figures", "cells.jsonl"
DISCUSSION = pathlib.Path(__file__).with_name("discussion.md")
"""What people found in the results of the photographs."""
_PAPER = " (paper)"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of an entry; without panels there are no data for it."""

    entry: Entry
    lab: Lab
    found: Mapping[str, Panel]

    @property
    def verdict(self) -> Verdict:
        here = bool(self.found)
        return self.entry.judge(self.found) if here else Verdict(None, "its data are not here")

    @property
    def word(self) -> str:
        """The verdict in a word or two."""
        if not self.found:
            return "needs files"
        if self.entry.word:
            return self.entry.word
        if self.verdict.held is None and self.failures:
            return "not finished" if any(p.found for p in self.found.values()) else "not run"
        return WORDS[self.verdict.held]

    @property
    def failures(self) -> list[str]:
        return list(dict.fromkeys(why for panel in self.found.values() for why in panel.failures))

    @property
    def drawn(self) -> bool:
        """Whether there is a figure: of at least half of its numbers."""
        known = sum(len(panel.found) for panel in self.found.values())
        wanted = sum(len(panel.places()) for panel in self.found.values())
        return self.entry.plot is not None and 0 < wanted <= 2 * known

    @property
    def command(self) -> str:
        """Makes this entry alone."""
        quick = " --quick" if self.lab.scale == "quick" else ""
        files = " --files=FILES.json" if self.lab.sources.given or not self.found else ""
        only = f"--only={self.entry.name}{quick}{files}"
        return f"python -m experiments.reproduce {only} --workdir=FOLDER"


# --- tables ------------------------------------------------------------------------------------


def table(panel: Panel) -> report.Table:
    """Ours, and the paper's beside it where it has the same rows."""

    def ours(row: str, column: str) -> Any:
        mean = panel.mean(row, column)
        shown = mean if panel.form.endswith("f") else f"{mean:{panel.form}}"
        return None if math.isnan(mean) else shown

    shown = []
    for column, changes in panel.columns.items():
        shown += [(column, False)] if changes.get("metric", "row") else []
        if any(panel.papers(row, column) is not None for row in panel.rows):
            shown.append((column, True))
    headers = [panel.corner]
    headers += [_words(panel.named.get(c, c)) + _PAPER if paper else c for c, paper in shown]
    rows = [
        [row, *(panel.papers(row, c) if paper else ours(row, c) for c, paper in shown)]
        for row in panel.rows
    ]
    return report.Table(headers, rows, digits=int(panel.form[1]))


def paper_table(made: Outcome) -> report.Table | None:
    """The paper's whole table, when it has rows that ours has not."""
    if made.entry.paper is None:
        return None
    rows = paper_results()[made.entry.paper]
    ours = {panel.named.get(row, row) for panel in made.found.values() for row in panel.rows}
    if set(rows) <= ours:
        return None
    headers = ["paper", *map(_words, next(iter(rows.values())))]
    return report.Table(headers, [[row, *values.values()] for row, values in rows.items()])


def _words(column: str) -> str:
    """The paper's COCO_T2I_R1 as COCO T2I R@1."""
    words = [f"R@{w[1:]}" if w[0] == "R" and w[1:].isdigit() else w for w in column.split("_")]
    return " ".join(words).replace("kNN pct", "k-NN (%)")


def long_table(made: Outcome) -> report.Table:
    """One line a number, for other programs."""
    rows = []
    for name, panel in made.found.items():
        for row, column in itertools.product(panel.rows, panel.columns):
            mean, seeds = panel.mean(row, column), len(panel.at(row, column))
            ours = [None if math.isnan(mean) else mean, panel.spread(row, column), seeds]
            rows.append([name, row, column, *ours, panel.papers(row, column)])
    return report.Table(["panel", "row", "column", "ours", "spread", "seeds", "paper"], rows)


def summary(made: Sequence[Outcome]) -> report.Table:
    """One line an entry: its claim, whether it held, and the size of the effect."""
    rows = [[m.entry.name, m.entry.claim, m.word, m.verdict.effect or None] for m in made]
    return report.Table(["", "the paper's claim", "here", "effect, mean (and the paper's)"], rows)


def minutes(lab: Lab, entries: Iterable[Entry]) -> dict[str, float]:
    """Processor minutes of every entry's finished cells that none before it has."""
    seen: set[str] = set()
    found = {}
    for entry in entries:
        own = {key_of(c): c for panel in entry.panels(lab) for c, _ in lab.cells(panel)}
        found[entry.name] = lab.minutes(cell for key, cell in own.items() if key not in seen)
        seen |= own.keys()
    return found


def listing(lab: Lab) -> str:
    """Every entry, whether it runs on the data at hand, and the sources that --files may name."""
    taken = minutes(lab, ENTRIES.values())
    timed = any(taken.values())
    rows: list[list[Any]] = []
    for name, entry in ENTRIES.items():
        title = entry.title if entry.panels(lab) else f"{entry.title} (needs files)"
        rows.append([name, title, *([taken[name]] if timed else [])])
    headers = ["", "shows", *(["processor minutes"] if timed else [])]
    named = [[name, holds] for name, (_, holds) in KNOWN.items()]
    return (
        f"{report.Table(headers, rows)}\n\nThe paper's own data, as sources "
        f"of --files={{SOURCE: {{FIELD: PATH}}}}:\n\n{report.Table(['source', 'holds'], named)}"
    )


def settings(lab: Lab, panel: Panel) -> str:
    """Every value that decides the numbers of a panel; those that differ within it are listed."""
    found: dict[str, dict[str, None]] = {}

    def add(name: str, value: Any) -> None:
        text = f"{value:g}" if isinstance(value, float) else f"{value}"
        found.setdefault(name, {})[text] = None

    for cell, _ in lab.cells(panel):
        if "config" not in cell:
            continue
        config, data = cell["config"], cell["data"]
        method, train, heads = config["method"], config.get("train"), config.get("heads")
        add("pairs", data["n_pairs"])
        if data["n_unpaired"] != 0:
            add("rows of each pool", data["n_unpaired"] or "all")
        if method in training.TEACHERS:
            add("teacher", f"{method} (ridge {config['teacher']['ridge']:g})")
            continue
        if not train or not heads:
            continue
        add("steps", train["steps"])
        add("peak rate", float(train["learning_rate"]))
        add("pairs in a batch", min(train["pair_batch"], data["n_pairs"]))
        if data["n_unpaired"] != 0:
            add("unpaired rows in a batch", train["unpaired_batch"])
        add("heads", f"{heads['kind'] or 'linear'} of width {heads['dim']}, start {heads['init']}")
        own = config.get(method) or {}
        if method == "sotalign":
            teacher = config["teacher"]
            add("teacher", f"{teacher['kind']} (ridge {teacher['ridge']:g})")
            add("epsilon / epsilon*", f"{own['epsilon']:g} / {own['epsilon_star']:g}")
            add("alpha", float(own["alpha"]))
        for option in SHOWN_OPTIONS:
            if option in own and method != "sotalign":
                add(f"{method} {option}", float(own[option]))
    return "; ".join(f"{name} {' | '.join(values)}" for name, values in found.items())


SHOWN_OPTIONS = ("weight", "warmup", "weight_text", "weight_image", "epochs", "mmd_epochs")


# --- one entry ---------------------------------------------------------------------------------


class Block(NamedTuple):
    """A part of what is shown: "text", "claim", "image", "table" or "code"."""

    kind: str
    content: Any
    caption: str = ""


def blocks(made: Outcome) -> list[Block]:
    """All that is known of an entry."""
    entry, verdict = made.entry, made.verdict
    shown = [Block("claim", verdict, f"{entry.claim}.")]
    if made.drawn:
        shown.append(Block("image", f"{entry.name}.png", f"{entry.name}: {entry.title}"))
    shown += [Block("table", table(panel), name) for name, panel in made.found.items()]
    if (whole := paper_table(made)) is not None:
        shown.append(Block("table", whole, "The paper, on its own data"))
    if made.failures:
        named, more = made.failures[:3], len(made.failures) - 3
        rest = f"; and {more} more" if more > 0 else ""
        shown.append(Block("text", f"Missing: {'; '.join(named)}{rest}."))
    if made.found:
        seeds = dict.fromkeys(", ".join(map(str, p.seeds)) for p in made.found.values())
        data = made.lab.sources.stand_in or "the files that were given"
        shown.append(Block("text", f"Data: {data}. Seeds {' and '.join(seeds)}."))
        used = dict.fromkeys(filter(None, (settings(made.lab, p) for p in made.found.values())))
        shown += [Block("text", f"Settings: {one}.") for one in used]
    else:
        holds = [f"{name} ({KNOWN[name][1]})" for name in entry.needs]
        shown.append(Block("text", f"It needs files, named in FILES.json: {'; '.join(holds)}."))
        fields = {name: dict.fromkeys(KNOWN[name][0], "PATH.npy") for name in entry.needs}
        shown.append(Block("code", json.dumps(fields, indent=1)))
    return [*shown, Block("code", made.command)]


def markdown(made: Outcome, *, level: int = 1, figures: str = "") -> str:
    """An entry as Markdown; its figure is in the folder `figures`, from the page's own."""
    parts = [f"{'#' * level} {made.entry.name}: {made.entry.title}"]
    for kind, content, caption in blocks(made):
        if kind == "claim":
            parts.append(f"**Claim:** {caption}\n**Here:** {content}.")
        elif kind == "image":
            parts.append(f"![{caption}]({figures}{content})")
        elif kind == "table":
            parts.append((f"*{caption}*\n\n" if caption else "") + content.markdown())
        else:
            parts.append(f"```\n{content}\n```" if kind == "code" else content)
    return "\n\n".join(parts) + "\n"


def terminal(made: Outcome) -> str:
    """An entry for the screen."""
    parts = [f"{made.entry.name}: {made.entry.title}"]
    for kind, content, caption in blocks(made):
        if kind == "table":
            parts.append((f"{caption}\n" if caption else "") + str(content))
        elif kind != "image" and kind != "claim":
            parts.append(content)
    return "\n".join([*parts, f"Claim: {made.entry.claim}.\nHere: {made.verdict}."])


def save(made: Sequence[Outcome], lab: Lab, command: str) -> None:
    """Writes NAME.md, NAME.csv, NAME.png of every entry, and report.html."""
    lab.workdir.mkdir(parents=True, exist_ok=True)
    for one in made:
        stem = lab.workdir / one.entry.name
        report.write(stem.with_suffix(".md"), markdown(one))
        report.write(stem.with_suffix(".csv"), long_table(one).csv())
        if one.drawn and one.entry.plot is not None:
            one.entry.plot(one.found, stem.with_suffix(".png"))
    report.write(lab.workdir / "report.html", page(made, lab, command))


# --- all of them -------------------------------------------------------------------------------


def note(lab: Lab) -> str:
    """How to read the numbers."""
    data = f"Data: {lab.sources.stand_in or 'files'}. "
    if lab.sources.stand_in:
        data += (
            "Encoders and sizes are smaller than the paper's, so trends are to be compared, not "
            "absolute numbers. The image encoder was trained with ImageNet's labels; Food-101's "
            "images are 64 pixels wide. "
        )
    text = (
        f"{data}Scale: {lab.scale}, seeds {', '.join(map(str, lab.seeds))}; FA4 and FA5 take the "
        "first. ± is the standard deviation over seeds. A claim that one thing is above another "
        "held when every difference that it speaks of is as claimed by more than its standard "
        "error, and did not when one is opposite by more than that. A correlation held when "
        "p < 0.05 (one-sided). F3, F4, FA1, FA4, FA5 and FA8 are judged by means alone."
    )
    short = " Runs are short, of one seed, all at one learning rate: verdicts are hints."
    return text + (short if lab.scale == "quick" else "")


def save_results(path: pathlib.Path, made: Sequence[Outcome], lab: Lab, command: str) -> None:
    """Writes all results to a Markdown file; beside it the figures, in a folder, and the cells."""
    figures = path.with_name(FIGURES)
    figures.mkdir(parents=True, exist_ok=True)
    for one in made:
        if one.drawn:
            name = f"{one.entry.name}.png"
            report.write(figures / name, (lab.workdir / name).read_bytes())
    panels = [panel for one in made for panel in one.found.values()]
    lab.keep(path.with_name(CELLS), [cell for panel in panels for cell, _ in lab.cells(panel)])
    taken = minutes(lab, [one.entry for one in made])
    each = ", ".join(f"{name} {value:.1f}" for name, value in taken.items() if value >= 0.05)
    here = workdir.kept_environment(lab.workdir)
    count = collections.Counter(one.word for one in made)
    ours = lab.scale == "full" and not lab.sources.given
    parts = [
        "# Results beside the paper's",
        f"Written by\n\n```bash\n{command}\n```",
        note(lab),
        f"Ran on {here['platform']}, Python {here['python']}, jax {here['packages'].get('jax')}, "
        f"revision {here['git']}. Processor time of the cells: {sum(taken.values()):.0f} minutes "
        f"({each}; cells that entries share count for the first). All cells, with every setting, "
        f"are in [{CELLS}]({CELLS}); with --norun --cells=PATH this page is made again without "
        "training.",
        "## Verdicts\n\n" + ", ".join(f"{word}: {n}" for word, n in count.most_common()) + ".",
        summary(made).markdown(),
        *([DISCUSSION.read_text("utf-8").strip()] if ours and len(made) == len(ENTRIES) else []),
        "## Tables and figures",
        *(markdown(one, level=3, figures=f"{FIGURES}/") for one in made),
    ]
    report.write(path, "\n\n".join(parts))


def page(made: Sequence[Outcome], lab: Lab, command: str) -> str:
    """The whole report as one HTML file, which needs nothing but itself."""
    verdicts = "".join(
        f"<tr><td><a href='#{one.entry.name}'>{one.entry.name}</a></td>"
        f"<td>{html.escape(one.entry.claim)}</td><td>{_badge(one)}</td>"
        f"<td>{html.escape(one.verdict.effect)}</td></tr>"
        for one in made
    )
    head = "<th></th><th>the paper's claim</th><th>here</th><th>effect, mean (and the paper's)</th>"
    return pages.page(
        TITLE,
        f"<header><h1>{TITLE}</h1><p>{html.escape(note(lab))}</p>",
        f"{pages.code(command)}</header><h2>Verdicts</h2>",
        f"<div class='scroll'><table class='verdicts'><tr>{head}</tr>{verdicts}</table></div>",
        *(_section(one, lab.workdir) for one in made),
        pages.environment(workdir.kept_environment(lab.workdir)),
    )


def _badge(made: Outcome) -> str:
    kind = {True: "held", False: "failed", None: "open"}[made.verdict.held]
    return f"<span class='badge {kind}'>{made.word}</span>"


def _section(made: Outcome, folder: pathlib.Path) -> str:
    name, title = made.entry.name, html.escape(made.entry.title)
    parts = [f"<section id='{name}'><h2><span class='name'>{name}</span> {title}</h2>"]
    for kind, content, caption in blocks(made):
        if kind == "claim":
            parts.append(f"<p class='claim'>Claim: {html.escape(caption)} {_badge(made)}</p>")
            parts.append(f"<p class='small'>{html.escape(content.text)}.</p>")
        elif kind == "image":
            parts.append(pages.image((folder / content).read_bytes(), caption))
        elif kind == "table":
            all_theirs = caption.startswith("The paper")  # in another colour
            theirs = [h for h in content.headers if all_theirs or h.endswith(_PAPER)]
            parts.append(content.html(caption, theirs=theirs))
        else:
            parts.append(pages.code(content) if kind == "code" else pages.text(content))
    return "\n".join([*parts, "</section>"])
