"""What is shown of tables and figures: on the screen, as Markdown, CSV and PNG, and on one page."""

import base64
import collections
import dataclasses
import html
import itertools
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments import report, workdir
from experiments.paper.entries import ENTRIES, Entry
from experiments.paper.lab import Lab
from experiments.paper.panels import WORDS, Panel, Verdict, paper_results
from experiments.paper.sources import KNOWN

TITLE = "SOTAlign: every table and figure, ours beside the paper's"
FIGURES = "figures"
_PAPER = " (paper)"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of an entry; without panels there are no data for it."""

    entry: Entry
    lab: Lab
    found: Mapping[str, Panel]

    @property
    def verdict(self) -> Verdict:
        return (
            self.entry.judge(self.found) if self.found else Verdict(None, "its data are not here")
        )

    @property
    def word(self) -> str:
        """The verdict in a word or two."""
        return WORDS[self.verdict.held] if self.found else "needs files"

    @property
    def failures(self) -> list[str]:
        return list(dict.fromkeys(why for panel in self.found.values() for why in panel.failures))

    @property
    def drawn(self) -> bool:
        """Whether there is a figure."""
        return self.entry.plot is not None and any(panel.found for panel in self.found.values())

    @property
    def command(self) -> str:
        """Makes this entry alone."""
        quick = " --quick" if self.lab.scale == "quick" else ""
        files = " --files=FILES.json" if self.lab.sources.given or not self.found else ""
        only = f"--only={self.entry.name}{quick}{files}"
        return f"python -m experiments.reproduce {only} --workdir=FOLDER"

    @property
    def example(self) -> str:
        """A file for --files with what is needed."""
        needed = {name: dict.fromkeys(KNOWN[name][0], "PATH.npy") for name in self.entry.needs}
        return json.dumps(needed, indent=1)


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
    return report.table(headers, rows, digits=int(panel.form[1]))


def paper_table(made: Outcome) -> report.Table | None:
    """The paper's whole table, when it has rows that ours has not."""
    if made.entry.paper is None:
        return None
    rows = paper_results()[made.entry.paper]
    ours = {panel.named.get(row, row) for panel in made.found.values() for row in panel.rows}
    if set(rows) <= ours:
        return None
    headers = ["paper", *map(_words, next(iter(rows.values())))]
    return report.table(headers, [[row, *values.values()] for row, values in rows.items()])


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
    return report.table(["panel", "row", "column", "ours", "spread", "seeds", "paper"], rows)


def summary(made: Sequence[Outcome]) -> report.Table:
    """One line an entry: its claim, whether it held, and the size of the effect."""
    rows = [[m.entry.name, m.entry.claim, m.word, m.verdict.effect or None] for m in made]
    return report.table(["", "the paper's claim", "here", "effect, mean (and the paper's)"], rows)


def listing(lab: Lab) -> str:
    """Every entry, whether it runs on the data at hand, and the sources that --files may name."""
    here = "photographs" if lab.sources.stand_in else "files"
    rows = [[n, e.title, here if e.panels(lab) else "needs files"] for n, e in ENTRIES.items()]
    named = [[name, holds] for name, (_, holds) in KNOWN.items()]
    return (
        f"{report.table(['', 'shows', 'runs here on'], rows)}\n\nThe paper's own data, as sources "
        f"of --files={{SOURCE: {{FIELD: PATH}}}}:\n\n{report.table(['source', 'holds'], named)}"
    )


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
        shown.append(Block("text", "Failed: " + "; ".join(made.failures) + "."))
    if made.found:
        seeds = dict.fromkeys(", ".join(map(str, p.seeds)) for p in made.found.values())
        data = made.lab.sources.stand_in or "the files that were given"
        shown.append(Block("text", f"Data: {data}. Seeds {' and '.join(seeds)}."))
    else:
        holds = [f"{name} ({KNOWN[name][1]})" for name in entry.needs]
        shown.append(Block("text", f"It needs files, named in FILES.json: {'; '.join(holds)}."))
        shown.append(Block("code", made.example))
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
        _write(stem.with_suffix(".md"), markdown(one))
        _write(stem.with_suffix(".csv"), long_table(one).csv())
        if one.drawn and one.entry.plot is not None:
            one.entry.plot(one.found, stem.with_suffix(".png"))
    _write(lab.workdir / "report.html", page(made, lab, command))


def _write(path: pathlib.Path, content: str | bytes) -> None:
    with workdir.replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


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


def _environment(lab: Lab) -> dict[str, Any]:
    path = lab.workdir / "environment.json"
    return workdir.read_json(path) if path.exists() else workdir.environment()


def save_results(path: pathlib.Path, made: Sequence[Outcome], lab: Lab, command: str) -> None:
    """Writes all results to a Markdown file, with the figures in a folder beside it."""
    figures = path.with_name(FIGURES)
    figures.mkdir(parents=True, exist_ok=True)
    for one in made:
        if one.drawn:
            name = f"{one.entry.name}.png"
            _write(figures / name, (lab.workdir / name).read_bytes())
    here = _environment(lab)
    count = collections.Counter(one.word for one in made)
    parts = [
        "# Results beside the paper's",
        f"Written by\n\n```bash\n{command}\n```",
        note(lab),
        f"Ran on {here['platform']}, Python {here['python']}, jax {here['packages'].get('jax')}, "
        f"revision {here['git']}.",
        "## Verdicts\n\n" + ", ".join(f"{word}: {n}" for word, n in count.most_common()) + ".",
        summary(made).markdown(),
        "## Tables and figures",
        *(markdown(one, level=3, figures=f"{FIGURES}/") for one in made),
    ]
    _write(path, "\n\n".join(parts))


def page(made: Sequence[Outcome], lab: Lab, command: str) -> str:
    """The whole report as one HTML file, which needs nothing but itself."""
    here = _environment(lab)
    facts = {**here, "devices": ", ".join(here["devices"]), **here.pop("packages")}
    verdicts = "".join(
        f"<tr><td><a href='#{one.entry.name}'>{one.entry.name}</a></td>"
        f"<td>{html.escape(one.entry.claim)}</td><td>{_badge(one)}</td>"
        f"<td>{html.escape(one.verdict.effect)}</td></tr>"
        for one in made
    )
    head = "<th></th><th>the paper's claim</th><th>here</th><th>effect, mean (and the paper's)</th>"
    facts_table = report.table(["on", ""], [[k, str(v)] for k, v in facts.items()])
    return "\n".join(
        [
            "<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'>",
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<title>{TITLE}</title><style>{STYLE}</style></head><body><main>",
            f"<header><h1>{TITLE}</h1><p>{html.escape(note(lab))}</p>",
            f"<pre>{html.escape(command)}</pre></header><h2>Verdicts</h2>",
            f"<div class='scroll'><table class='verdicts'><tr>{head}</tr>{verdicts}</table></div>",
            *(_section(one, lab.workdir) for one in made),
            f"<section id='environment'><h2>Environment</h2>{_html_table(facts_table)}</section>",
            "</main></body></html>\n",
        ]
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
            code = base64.b64encode((folder / content).read_bytes()).decode()
            alt = html.escape(caption, quote=True)
            parts.append(f"<img alt='{alt}' src='data:image/png;base64,{code}'>")
        elif kind == "table":
            parts.append(_html_table(content, caption))
        elif kind == "code":
            parts.append(f"<pre>{html.escape(content)}</pre>")
        else:
            parts.append(f"<p class='small'>{html.escape(content)}</p>")
    return "\n".join([*parts, "</section>"])


def _texts(shown: report.Table) -> list[list[str]]:
    """Cells as they are printed."""
    lines = shown.markdown().splitlines()[2:]
    cells = [line.strip("|").replace(r"\|", "\0").split("|") for line in lines]
    return [[text.replace("\0", "|").strip() for text in row] for row in cells]


def _html_table(shown: report.Table, caption: str = "") -> str:
    """The paper's numbers are in another colour."""
    theirs = caption.startswith("The paper")
    kinds = [" class='theirs'" if theirs or h.endswith(_PAPER) else "" for h in shown.headers]
    rows = [("th", shown.headers), *(("td", row) for row in _texts(shown))]
    lines = [
        "".join(
            f"<{tag}{k}>{html.escape(text)}</{tag}>" for k, text in zip(kinds, row, strict=True)
        )
        for tag, row in rows
    ]
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<div class='scroll'><table>{title}{body}</table></div>"


STYLE = """
:root { --ink: #1d2430; --soft: #667085; --line: #e4e7ec; --wash: #f6f7f9; --accent: #1f6fb2; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--wash); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
header, section, .verdicts { background: #fff; border: 1px solid var(--line); border-radius: 10px; }
header, section { padding: 1.2rem 1.4rem; margin: 1.2rem 0; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .6rem; }
h2 { font-size: 1.15rem; margin: .3rem 0 .5rem; }
.name { color: var(--accent); margin-right: .3rem; }
p { margin: .5rem 0; }
.claim { font-weight: 500; }
.small, caption, .theirs { color: var(--soft); }
.small, caption, table { font-size: .875rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; min-width: 50%; }
caption { text-align: left; padding: .2rem 0; font-style: italic; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
.verdicts td, .verdicts th, #environment td { text-align: left; white-space: normal; }
.verdicts { border-collapse: separate; border-spacing: 0; width: 100%; }
.badge { display: inline-block; padding: .05rem .6rem; border-radius: 999px; font-size: .8rem;
  font-weight: 600; white-space: nowrap; }
.badge.held { background: #dcf5e6; color: #14683a; }
.badge.failed { background: #fde3e1; color: #96241b; }
.badge.open { background: #eceef2; color: #4a5365; }
img { display: block; max-width: 100%; max-height: 26rem; margin: .8rem auto; }
pre { background: var(--wash); border: 1px solid var(--line); border-radius: 6px;
  padding: .6rem .8rem; overflow-x: auto; font-size: .8rem; margin: .8rem 0 0; }
a { color: var(--accent); text-decoration: none; }
"""
