"""What is shown of tables and figures: one Markdown page, with CSV and PNG files."""

import collections
import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments import report, workdir
from experiments.paper.entries import ENTRIES, Entry
from experiments.paper.lab import Lab
from experiments.paper.panels import WORDS, Panel, Verdict, paper_results
from experiments.paper.sources import KNOWN
from sotalign_jax import training

FIGURES, CELLS = "figures", "cells.jsonl"
DISCUSSION = pathlib.Path(__file__).with_name("discussion.md")
"""What people found in the results of the photographs."""
_PAPER = " (paper)"
# fmt: off
SHOWN = (
    "n_pairs", "n_unpaired", "steps", "learning_rate", "pair_batch", "unpaired_batch", "kind",
    "dim", "init", "ridge", "alpha", "divergence", "epsilon", "epsilon_star", "weight", "warmup",
    "weight_text", "weight_image", "epochs", "mmd_epochs",
)
# fmt: on
"""Settings that are shown below tables, in this order."""
UNSET = {"kind": "linear"}
"""What a setting of None stands for, "all" unless it is named here."""


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
        shown += [(column, False)] if changes["metric"] else []
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


def minutes(lab: Lab, panels: Mapping[str, Iterable[Panel]]) -> dict[str, float]:
    """Processor minutes of every entry's finished cells that none before it has."""
    seen: set[str] = set()
    found = {}
    for name, own in panels.items():
        keys = {cell.key for panel in own for cell in panel.every_cell()} - seen
        found[name] = sum(lab.known(key)["seconds"] for key in keys) / 60
        seen |= keys
    return found


def listing(lab: Lab) -> str:
    """Every entry, whether it runs on the data at hand, and the sources that --files may name."""
    panels = {name: entry.panels(lab) for name, entry in ENTRIES.items()}
    taken = minutes(lab, panels)
    timed = any(taken.values())
    rows: list[list[Any]] = []
    for name, entry in ENTRIES.items():
        title = entry.title if panels[name] else f"{entry.title} (needs files)"
        rows.append([name, title, *([taken[name]] if timed else [])])
    headers = ["", "shows", *(["processor minutes"] if timed else [])]
    named = [[name, holds] for name, (_, holds) in KNOWN.items()]
    return (
        f"{report.Table(headers, rows)}\n\nThe paper's own data, as sources "
        f"of --files={{SOURCE: {{FIELD: PATH}}}}:\n\n{report.Table(['source', 'holds'], named)}"
    )


def settings(panel: Panel) -> str:
    """Values that decide the numbers of a panel; those that differ within it are listed."""
    found: dict[str, dict[str, None]] = {}
    for _, spec, _ in panel.every_cell():
        if "config" not in spec:
            continue
        method, config = spec["config"]["method"], spec["config"] | {"data": spec["data"]}
        closed = method in training.TEACHERS
        sections = ["data", *([] if closed or method in ("csa", "sue") else ["train", "heads"])]
        sections += ["teacher"] if closed or method == "sotalign" else []
        for section, name in itertools.product([*sections, method], SHOWN):
            options = config.get(section) or {}
            if name in options:
                value = UNSET.get(name, "all") if options[name] is None else options[name]
                text = f"{value:g}" if isinstance(value, float) else f"{value}"
                found.setdefault(f"{section}.{name}", {})[text] = None
    return "; ".join(f"{name} {' | '.join(values)}" for name, values in found.items())


# --- pages -------------------------------------------------------------------------------------


def markdown(made: Outcome) -> str:
    """All that is known of an entry."""
    entry = made.entry
    parts = [f"### {entry.name}: {entry.title}"]
    parts.append(f"**Claim:** {entry.claim}.\n**Here:** {made.word}: {made.verdict.text}.")
    if made.drawn:
        parts.append(f"![{entry.name}: {entry.title}]({FIGURES}/{entry.name}.png)")
    tables = {name: table(panel) for name, panel in made.found.items()}
    if (whole := paper_table(made)) is not None:
        tables["The paper, on its own data"] = whole
    parts += [(f"*{name}*\n\n" if name else "") + one.markdown() for name, one in tables.items()]
    if made.failures:
        rest = f"; and {len(made.failures) - 3} more" if len(made.failures) > 3 else ""
        parts.append(f"Missing: {'; '.join(made.failures[:3])}{rest}.")
    if made.found:
        seeds = dict.fromkeys(", ".join(map(str, p.seeds)) for p in made.found.values())
        data = made.lab.sources.stand_in or "the files that were given"
        parts.append(f"Data: {data}. Seeds {' and '.join(seeds)}.")
        used = dict.fromkeys(filter(None, map(settings, made.found.values())))
        parts += [f"Settings: {one}." for one in used]
    else:
        holds = [f"{name} ({KNOWN[name][1]})" for name in entry.needs]
        parts.append(f"It needs files, named in FILES.json: {'; '.join(holds)}.")
        fields = {name: dict.fromkeys(KNOWN[name][0], "PATH.npy") for name in entry.needs}
        parts.append(f"```\n{json.dumps(fields, indent=1)}\n```")
    return "\n\n".join([*parts, f"```\n{made.command}\n```"]) + "\n"


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


def save(path: pathlib.Path, made: Sequence[Outcome], lab: Lab, command: str) -> None:
    """Writes all results to a Markdown file; beside it figures, in a folder, and the cells.

    A CSV file an entry goes to the work folder.
    """
    for one in made:
        report.write(lab.workdir / f"{one.entry.name}.csv", long_table(one).csv())
        if one.drawn and one.entry.plot is not None:
            figure = path.with_name(FIGURES) / f"{one.entry.name}.png"
            report.write(figure, report.png(one.entry.plot(one.found)))
    panels = [panel for one in made for panel in one.found.values()]
    kept = lab.kept(cell.key for panel in panels for cell in panel.every_cell())
    report.write(path.with_name(CELLS), kept)
    taken = minutes(lab, {one.entry.name: one.found.values() for one in made})
    each = ", ".join(f"{name} {value:.1f}" for name, value in taken.items() if value >= 0.05)
    here = workdir.kept_environment(lab.workdir)
    count = collections.Counter(one.word for one in made)
    ours = lab.scale == "full" and not lab.sources.given
    parts = [
        "# Results beside the paper's",
        f"Written by\n\n```bash\n{command}\n```",
        note(lab),
        f"Ran on {here['platform']}, Python {here['python']}, jax {here['packages'].get('jax')}, "
        f"revision {here['git']}. Processor time of the cells, summed over cores: "
        f"{sum(taken.values()):.0f} minutes ({each}; cells that entries share count for the "
        f"first). Cells, with every setting, are in [{CELLS}]({CELLS}); with --norun --cells=PATH "
        "this page is made again without training.",
        "## Verdicts\n\n" + ", ".join(f"{word}: {n}" for word, n in count.most_common()) + ".",
        summary(made).markdown(),
        *([DISCUSSION.read_text("utf-8").strip()] if ours and len(made) == len(ENTRIES) else []),
        "## Tables and figures",
        *map(markdown, made),
    ]
    report.write(path, "\n\n".join(parts))
