"""Writes an overview, a page per table or figure of the paper, and CSV and PNG files."""

import functools
import itertools
import json
import math
import pathlib
import re
import textwrap
from collections.abc import Iterable, Sequence

from experiments import report, workdir
from experiments.paper import grids, overview, tables
from experiments.paper.panels import WORDS, Panel, Verdict, paper_results
from experiments.paper.runs import Setup
from experiments.paper.sources import KNOWN
from experiments.paper.table import PaperTable
from experiments.store import Store, key_of
from sotalign_jax import methods, training

FIGURES, CELLS = "figures", "cells.jsonl"
INDEX, DISCUSSION = (pathlib.Path(__file__).with_name(f"{n}.md") for n in ("index", "discussion"))
"""Template of the overview, and the discussion of the results on the repository's data."""
LISTED = (
    *("n_pairs", "n_unpaired", "steps", "learning_rate", "pair_batch", "unpaired_batch"),
    *("dim", "ridge", "alpha", "divergence", "epsilon", "epsilon_star", "weight", "warmup"),
    *("weight_text", "weight_image", "epochs", "mmd_epochs"),
)
"""Settings to list on the page of a table, in this order."""
FURTHER = ("k", "hidden", "batch")
"""Further settings of the protocol."""


def long_table(table: PaperTable) -> report.Table:
    """Returns a table with one row per number, for other programs."""
    rows = []
    for panel in table.panels:
        for row, column in itertools.product(panel.rows, panel.columns):
            mean, seeds = panel.mean(row, column), len(panel.at(row, column))
            ours = [None if math.isnan(mean) else mean, panel.spread(row, column), seeds]
            rows.append([panel.name, row, column, *ours, panel.papers(row, column)])
    return report.Table(["panel", "row", "column", "ours", "spread", "seeds", "paper"], rows)


def claims(made: Sequence[PaperTable]) -> report.Table:
    """Returns a table of at most 12 claims, with verdicts and reasons."""
    known, rows = {table.name: table for table in made}, []
    for claim in overview.CLAIMS:
        outcomes: tuple[list[str], list[str]] = [], []
        for asked in claim.tables:
            name, _, part = asked.partition(" ")
            table = known[name].part(part) if part else known[name]
            label = f"[{name}{', ' if part else ''}{part}]({name}.md)"
            outcomes[0].append(f"{table.outcome} ({label})")
            if table.tuned_verdict:
                outcomes[1].append(f"{_tuned_outcome(table)} ({label})")
        here, tuned = (_merged(some) for some in outcomes)
        rows.append([claim.text, here, tuned or None, claim.why])
    return report.Table(["the paper's claim", "here", "tuned teacher", "why"], rows)


def _merged(outcomes: Sequence[str]) -> str:
    """Joins texts such as "held (T4)" and "held (A4)" to "held (T4, A4)"."""
    labels: dict[str, list[str]] = {}
    for text in outcomes:
        word, _, label = text.partition(" (")
        labels.setdefault(word, []).append(label[:-1])
    return "; ".join(f"{word} ({', '.join(some)})" for word, some in labels.items())


def _tuned_outcome(table: PaperTable) -> str:
    """Returns the verdict on the tuned teacher in one or two words."""
    verdict = table.tuned_verdict
    return WORDS[verdict.held] if verdict else ""


def contents(made: Sequence[PaperTable]) -> report.Table:
    """Returns a table of all pages with their verdicts."""
    rows = [[f"[{t.name}]({t.name}.md)", t.title, t.outcome] for t in made]
    return report.Table(["page", "shows", "verdict"], rows)


def figures(made: Sequence[PaperTable]) -> str:
    """Returns the figures of the overview in Markdown, each with a caption."""
    known = {table.name for table in made if drawn(table)}
    parts = [
        f"### {one.title}\n\n![{one.title}]({FIGURES}/{one.table}.png)\n\n"
        f"{one.caption} More: [{one.table}]({one.table}.md)."
        for one in overview.FIGURES
        if one.table in known
    ]
    return "\n\n".join(parts)


@functools.cache
def discussion() -> dict[str, str]:
    """Returns the paragraphs of `discussion.md` by the names of their tables."""
    parts = re.split(r"^## (.+)$", DISCUSSION.read_text("utf-8"), flags=re.MULTILINE)[1:]
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return {name: text.strip() for names, text in pairs for name in names.split(", ")}


def minutes(store: Store, made: Iterable[PaperTable]) -> dict[str, float]:
    """Returns the processor minutes of each table.

    Args:
        store: Results with the seconds spent on them.
        made: Tables in order. A cell that several tables share counts for the first of them.

    Returns:
        Minutes by table name.
    """
    known, found = store.entries(), {}
    seen: set[str] = set()
    for table in made:  # the sum over tables must be the time of the whole reproduction
        keys = {key_of(spec) for panel in table.panels for _, spec, _ in panel.cells()}
        found[table.name] = sum(known[k].seconds for k in (keys - seen) & known.keys()) / 60
        seen |= keys
    return found


def listing(setup: Setup, store: Store) -> str:
    """Returns a list of all tables and of all sources that --files may name.

    Args:
        setup: Sizes and sources. Tables that lack data are marked.
        store: Stored results, whose processor minutes are shown.
    """
    made = [tables.make(name, setup) for name in tables.TABLES]
    taken = minutes(store, made)
    width = 3 if any(taken.values()) else 2  # without stored results there are no minutes to show
    rows = [[t.name, t.title + ("" if t.panels else " (needs files)"), taken[t.name]] for t in made]
    headers, rows = ["", "shows", "processor minutes"][:width], [row[:width] for row in rows]
    named = [[name, holds] for name, (_, holds) in KNOWN.items()]
    parts = [
        f"{report.Table(headers, rows)}",
        "The paper's own data, as sources of --files={SOURCE: {FIELD: PATH}}:",
        f"{report.Table(['source', 'holds'], named)}",
    ]
    if setup.scale == "paper":
        parts.append(protocol(setup, made))
    return "\n\n".join(parts)


def protocol(setup: Setup, made: Sequence[PaperTable]) -> str:
    """Returns what validation selects, and the seeds and settings of each table.

    Args:
        setup: Sizes and sources.
        made: Tables. Those without panels are left out.
    """
    sizes = setup.sizes
    text = (
        f"Validation of {setup.sources.names.label} selects these options by MeanR@1, with "
        f"{sizes.n_pairs:,} pairs and seed {sizes.seeds[0]}, for all tables that do not vary them:"
    )
    lines = textwrap.wrap(text, 78)
    for method, grid in sizes.grids.items():
        options = [f"{name} {_values(values)}" for name, values in grid.items()]
        lines += _wrapped(method, "; ".join(options))
    lines += ["", "Protocol of each table:"]
    for table in made:
        seeds = dict.fromkeys(_seeds(panel.seeds) for panel in table.panels)
        used = dict.fromkeys(filter(None, (settings(panel, setup) for panel in table.panels)))
        if table.panels:
            lines += _wrapped(table.name, f"seeds {' and '.join(seeds)}. {'. '.join(used)}")
    return "\n".join(lines)


def _wrapped(label: str, text: str) -> list[str]:
    """Returns lines of a labelled paragraph that fit a terminal."""
    return textwrap.wrap(text, 78, initial_indent=f"{label}: ", subsequent_indent="    ")


def _values(values: Iterable[object]) -> str:
    """Returns values of one setting as text."""
    return " | ".join(f"{v:g}" if isinstance(v, float) else f"{v}" for v in values)


def _seeds(seeds: Sequence[int]) -> str:
    """Returns seeds as text, such as "0, 1, 2" or "0 to 19"."""
    return f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 5 else ", ".join(map(str, seeds))


def settings(panel: Panel, unselected: Setup | None = None) -> str:
    """Returns the settings of a panel as text. A setting with several values lists all of them.

    Args:
        panel: Panel with its specifications.
        unselected: If given, options that its grids select are left out, unless the panel varies
            or sets them.
    """
    found: dict[str, dict[str, None]] = {}
    grids = {} if unselected is None else unselected.sizes.grids
    defaults = {
        f"{method}.{name}": [_values([getattr(methods.METHODS[method], name)])]
        for method, grid in grids.items()
        for name in grid
    }
    listed = LISTED if unselected is None else (*LISTED, *FURTHER)
    for _, spec, _ in panel.cells():
        if "config" not in spec:
            continue
        method, config = spec["config"]["method"], spec["config"] | {"data": spec["data"]}
        # Only sections that the method reads are listed.
        closed = method in training.TEACHERS
        student = [] if closed or method in ("csa", "sue") else ["train", "head", "dim", "start"]
        teacher = ["teacher", "teacher_options"] if closed or method == "sotalign" else []
        for section in ["data", *student, *teacher, method]:
            options = config.get(section, {})
            if not isinstance(options, dict):  # a setting outside of sections
                options = {"": options}
            for name in ("", *listed):
                if name in options:
                    unset = "linear" if section == "head" else "all"
                    value = unset if options[name] is None else options[name]
                    found.setdefault(f"{section}.{name}".rstrip("."), {})[_values([value])] = None
    shown = {name: list(values) for name, values in found.items()}
    return "; ".join(
        f"{name} {' | '.join(values)}"
        for name, values in shown.items()
        if values != defaults.get(name)
    )


def drawn(table: PaperTable) -> bool:
    """Returns True if the table has a figure and at least half of its numbers are known."""
    known = sum(len(panel.found) for panel in table.panels)
    wanted = sum(len(panel.places()) for panel in table.panels)
    return table.plot is not None and 0 < wanted <= 2 * known


def markdown(table: PaperTable, setup: Setup, index: str = "RESULTS.md") -> str:
    """Returns the page of a table in Markdown.

    Args:
        table: PaperTable with its numbers.
        setup: Sizes and sources of its runs.
        index: Name of the overview, which the page links to.
    """
    heading = f"{table.name}: {table.title}"
    parts = [f"# {heading}", f"**Claim:** {table.claim}."]
    parts.append(f"**Verdict: {table.outcome}.** {_reasons(table.verdict)}")
    if tuned := table.tuned_verdict:
        parts.append(f"**With the tuned teacher: {_tuned_outcome(table)}.** {_reasons(tuned)}")
    if discussed(setup) and table.name in discussion():
        parts.append(discussion()[table.name])
    parts += [f"![{heading}]({FIGURES}/{table.name}.png)"] if drawn(table) else []
    known = [panel.known() for panel in table.panels if panel.found]
    shown = [one for panel in known for one in grids.of_panel(panel).items()]
    if _has_more_rows(table):
        assert table.paper is not None
        shown += grids.of_paper(table.paper, table.panels[0].corner).items()
    parts += [(f"*{name}*\n\n" if name else "") + one.markdown() for name, one in shown]
    if partial := table.partial:
        parts.append(f"Numbers of fewer seeds, which have no comparable ±: {'; '.join(partial)}.")
    known_places = [text.partition(":")[0] for text in partial]
    if failures := [why for why in table.failures if why.partition(":")[0] not in known_places]:
        rest = f"; and {len(failures) - 3} more" if len(failures) > 3 else ""
        parts.append(f"Missing: {'; '.join(failures[:3])}{rest}.")
    parts += ["## Settings", *_settings(table, setup)]
    quick = " --quick" if setup.scale == "quick" else ""
    files = " --files=FILES.json" if setup.sources.given or not table.panels else ""
    command = f"--only={table.name}{quick}{files} --workdir=FOLDER"
    parts.append(f"```\npython -m experiments.reproduce {command}\n```")
    return "\n\n".join([*parts, f"[All results, and how claims are judged]({index})"]) + "\n"


def _reasons(verdict: Verdict) -> str:
    """Returns the reasons of a verdict: a sentence, or a list with an item per part."""
    if not verdict.parts:
        return f"{verdict.text[:1].upper()}{verdict.text[1:]}."
    parts = verdict.parts.items()
    return "\n\n" + "\n".join(f"- {name}: {WORDS[v.held]}. {_reasons(v)}" for name, v in parts)


def _has_more_rows(table: PaperTable) -> bool:
    """Returns True if the paper's table has rows that ours lacks, and few columns."""
    rows = paper_results()[table.paper] if table.paper else {}
    ours = {panel.named.get(row, row) for panel in table.panels for row in panel.rows}
    return not set(rows) <= ours and len(next(iter(rows.values()))) <= 4


def _settings(table: PaperTable, setup: Setup) -> list[str]:
    """Returns paragraphs on the data, seeds and settings of a table, or on the files it needs."""
    if not table.panels:
        holds = [f"{name} ({KNOWN[name][1]})" for name in table.needs]
        fields = {name: dict.fromkeys(KNOWN[name][0], "PATH.npy") for name in table.needs}
        example = f"```\n{json.dumps(fields, indent=1)}\n```"
        return [f"It needs files, named in FILES.json: {'; '.join(holds)}.", example]
    listed = dict.fromkeys(_seeds(panel.seeds) for panel in table.panels)
    data = setup.sources.names.stand_in or "the files that were given"
    used = dict.fromkeys(filter(None, map(settings, table.panels)))
    return [f"Data: {data}. Seeds {' and '.join(listed)}.", *(f"Settings: {one}." for one in used)]


def discussed(setup: Setup) -> bool:
    """Returns True if `discussion.md` and the overview are about the results of a setup."""
    return setup.scale == "full" and not setup.sources.given


def page(made: Sequence[PaperTable], setup: Setup, store: Store, command: str) -> str:
    """Returns the overview in Markdown.

    Args:
        made: Tables with their numbers.
        setup: Sizes and sources of the runs.
        store: Stored results.
        command: Command that computes the results.
    """
    taken = minutes(store, made)
    stand_in = setup.sources.names.stand_in
    complete = discussed(setup) and len(made) == len(tables.TABLES)
    brief = f"## In brief\n\n{claims(made).markdown()}\n\n" if complete else ""
    pictures = f"## Five figures\n\n{figures(made)}\n\n" if complete else ""
    return INDEX.read_text("utf-8").format(
        command=command,
        setup=setup,
        here=workdir.kept_environment(store.path.parent),
        data=stand_in or "files",
        stand_in=overview.PHOTOGRAPHS_NOTE if stand_in else "",
        short=overview.QUICK_NOTE if setup.scale == "quick" else "",
        seeds=", ".join(map(str, setup.sizes.seeds)),
        minutes=sum(taken.values()),
        each=", ".join(f"{name} {value:.1f}" for name, value in taken.items() if value >= 0.05),
        brief=brief,
        pictures=pictures,
        contents=contents(made).markdown(),
    )


def save(
    path: pathlib.Path, made: list[PaperTable], setup: Setup, store: Store, command: str
) -> None:
    """Writes the overview, a page per table, figures and cells beside it, and CSV files.

    Args:
        path: The Markdown file of the overview.
        made: Tables with their numbers.
        setup: Sizes and sources of the runs.
        store: Stored results. The CSV files are written to its folder.
        command: Command that computes the results.
    """
    # The overview names the revision. Writing other pages first would make it look changed.
    index = page(made, setup, store, command)
    for table in made:
        report.write(store.path.with_name(f"{table.name}.csv"), long_table(table).csv())
        report.write(path.with_name(f"{table.name}.md"), markdown(table, setup, path.name))
        if table.plot is not None and drawn(table):
            figure = table.plot([panel.known() for panel in table.panels])
            report.write(path.with_name(FIGURES) / f"{table.name}.png", report.png(figure))
    # The cells of a page are stored beside it, unless that file is the store itself.
    if path.with_name(CELLS).resolve() != store.path.resolve():
        cells = [cell for table in made for panel in table.panels for cell in panel.cells()]
        report.write(path.with_name(CELLS), store.lines(key_of(spec) for _, spec, _ in cells))
    report.write(path, index)
