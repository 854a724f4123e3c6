"""Writes the page of all tables and figures, with CSV and PNG files."""

import collections
import itertools
import json
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from experiments import paper, report, workdir
from experiments.paper import plots, tables
from experiments.paper.panels import Panel, paper_results
from experiments.paper.runs import Setup
from experiments.paper.sources import KNOWN
from experiments.paper.tables import Table
from experiments.store import Store, key_of
from sotalign_jax import training

FIGURES, CELLS = "figures", "cells.jsonl"
PAGE, DISCUSSION = (pathlib.Path(__file__).with_name(f"{n}.md") for n in ("page", "discussion"))
"""Template of the page, and the discussion of the results on photographs."""


def shown(panel: Panel) -> report.Table:
    """Returns a panel as a table, with the paper's numbers beside ours."""

    def ours(row: str, column: str) -> Any:
        mean = panel.mean(row, column)
        # `report.Table` has fixed-point numbers only. It shows the spread of a `Mean` itself.
        text = mean if panel.form.endswith("f") else f"{mean:{panel.form}}"
        return None if math.isnan(mean) else text

    headers, columns = [panel.corner], []
    for column, settings in panel.columns.items():
        if settings["metric"]:
            headers.append(column)
            columns.append([ours(row, column) for row in panel.rows])
        papers = [panel.papers(row, column) for row in panel.rows]
        if any(value is not None for value in papers):
            headers.append(f"{_words(panel.named.get(column, column))} (paper)")
            columns.append(papers)
    rows = [list(row) for row in zip(panel.rows, *columns, strict=True)]
    return report.Table(headers, rows, digits=int(panel.form[1]))


def paper_table(table: Table) -> report.Table | None:
    """Returns the paper's whole table if it has rows that our panels lack, or None."""
    rows = paper_results()[table.paper] if table.paper else {}
    if set(rows) <= {panel.named.get(row, row) for panel in table.panels for row in panel.rows}:
        return None
    headers = ["paper", *map(_words, next(iter(rows.values())))]
    return report.Table(headers, [[row, *values.values()] for row, values in rows.items()])


def _words(column: str) -> str:
    """Converts a column name of the paper such as COCO_T2I_R1 to COCO T2I R@1."""
    words = [f"R@{w[1:]}" if w[0] == "R" and w[1:].isdigit() else w for w in column.split("_")]
    return " ".join(words).replace("kNN pct", "k-NN (%)")


def long_table(table: Table) -> report.Table:
    """Returns a table with one row per number, for other programs."""
    rows = []
    for panel in table.panels:
        for row, column in itertools.product(panel.rows, panel.columns):
            mean, seeds = panel.mean(row, column), len(panel.at(row, column))
            ours = [None if math.isnan(mean) else mean, panel.spread(row, column), seeds]
            rows.append([panel.name, row, column, *ours, panel.papers(row, column)])
    return report.Table(["panel", "row", "column", "ours", "spread", "seeds", "paper"], rows)


def summary(made: Sequence[Table]) -> report.Table:
    """Returns a table of all claims, verdicts and effects."""
    rows = [
        [table.name, table.claim, table.outcome, table.verdict.effect or None] for table in made
    ]
    return report.Table(["", "the paper's claim", "here", "effect, mean (and the paper's)"], rows)


def minutes(store: Store, made: Iterable[Table]) -> dict[str, float]:
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
    return (
        f"{report.Table(headers, rows)}\n\nThe paper's own data, as sources "
        f"of --files={{SOURCE: {{FIELD: PATH}}}}:\n\n{report.Table(['source', 'holds'], named)}"
    )


def settings(panel: Panel) -> str:
    """Returns the settings of a panel as text. A setting with several values lists all of them."""
    found: dict[str, dict[str, None]] = {}
    listed = paper.DATA["settings"]["listed"]
    for _, spec, _ in panel.cells():
        if "config" not in spec:
            continue
        method, config = spec["config"]["method"], spec["config"] | {"data": spec["data"]}
        # Only sections that the method reads are listed.
        closed = method in training.TEACHERS
        sections = ["data", *([] if closed or method in ("csa", "sue") else ["train", "heads"])]
        sections += ["teacher"] if closed or method == "sotalign" else []
        for section, name in itertools.product([*sections, method], listed):
            options = config.get(section) or {}
            if name in options:
                unset = "linear" if name == "kind" else "all"
                value = unset if options[name] is None else options[name]
                text = f"{value:g}" if isinstance(value, float) else f"{value}"
                found.setdefault(f"{section}.{name}", {})[text] = None
    return "; ".join(f"{name} {' | '.join(values)}" for name, values in found.items())


def drawn(table: Table) -> bool:
    """Returns True if the table has a figure and at least half of its numbers are known."""
    known = sum(len(panel.found) for panel in table.panels)
    wanted = sum(len(panel.places()) for panel in table.panels)
    return bool(table.plot) and 0 < wanted <= 2 * known


def markdown(table: Table, setup: Setup) -> str:
    """Returns the section of a table in Markdown.

    Args:
        table: Table with its numbers.
        setup: Sizes and sources of its runs.
    """
    heading = f"{table.name}: {table.title}"
    parts = [f"### {heading}"]
    parts.append(f"**Claim:** {table.claim}.\n**Here:** {table.outcome}: {table.verdict.text}.")
    parts += [f"![{heading}]({FIGURES}/{table.name}.png)"] if drawn(table) else []
    grids = {panel.name: shown(panel) for panel in table.panels}
    if (whole := paper_table(table)) is not None:
        grids["The paper, on its own data"] = whole
    parts += [(f"*{name}*\n\n" if name else "") + grid.markdown() for name, grid in grids.items()]
    if failures := table.failures:
        rest = f"; and {len(failures) - 3} more" if len(failures) > 3 else ""
        parts.append(f"Missing: {'; '.join(failures[:3])}{rest}.")
    if table.panels:
        seeds = dict.fromkeys(", ".join(map(str, panel.seeds)) for panel in table.panels)
        data = setup.sources.names.stand_in or "the files that were given"
        parts.append(f"Data: {data}. Seeds {' and '.join(seeds)}.")
        used = dict.fromkeys(filter(None, map(settings, table.panels)))
        parts += [f"Settings: {one}." for one in used]
    else:
        holds = [f"{name} ({KNOWN[name][1]})" for name in table.needs]
        parts.append(f"It needs files, named in FILES.json: {'; '.join(holds)}.")
        fields = {name: dict.fromkeys(KNOWN[name][0], "PATH.npy") for name in table.needs}
        parts.append(f"```\n{json.dumps(fields, indent=1)}\n```")
    quick = " --quick" if setup.scale == "quick" else ""
    files = " --files=FILES.json" if setup.sources.given or not table.panels else ""
    command = f"--only={table.name}{quick}{files} --workdir=FOLDER"
    return "\n\n".join([*parts, f"```\npython -m experiments.reproduce {command}\n```"]) + "\n"


def page(made: Sequence[Table], setup: Setup, store: Store, command: str) -> str:
    """Returns the page in Markdown.

    Args:
        made: Tables with their numbers.
        setup: Sizes and sources of the runs.
        store: Stored results.
        command: Command that computes the results.
    """
    taken = minutes(store, made)
    here = workdir.kept_environment(store.path.parent)
    count = collections.Counter(table.outcome for table in made)
    notes, stand_in = paper.DATA["notes"], setup.sources.names.stand_in
    # The discussion is about the complete results on photographs, so other pages leave it out.
    discussed = setup.scale == "full" and stand_in and len(made) == len(tables.TABLES)
    text = PAGE.read_text("utf-8").strip()
    return text.format(
        command=command,
        setup=setup,
        here=here,
        data=stand_in or "files",
        stand_in=notes["photographs"] if stand_in else "",
        short=notes["quick"] if setup.scale == "quick" else "",
        seeds=", ".join(map(str, setup.sizes.seeds)),
        minutes=sum(taken.values()),
        each=", ".join(f"{name} {value:.1f}" for name, value in taken.items() if value >= 0.05),
        count=", ".join(f"{word}: {n}" for word, n in count.most_common()),
        summary=summary(made).markdown(),
        discussion=DISCUSSION.read_text("utf-8").strip() + "\n\n" if discussed else "",
        tables="\n\n".join(markdown(table, setup) for table in made),
    )


def save(path: pathlib.Path, made: list[Table], setup: Setup, store: Store, command: str) -> None:
    """Writes the page, its figures and cells beside it, and a CSV file per table.

    Args:
        path: The Markdown file.
        made: Tables with their numbers.
        setup: Sizes and sources of the runs.
        store: Stored results. The CSV files are written to its folder.
        command: Command that computes the results.
    """
    for table in made:
        report.write(store.path.with_name(f"{table.name}.csv"), long_table(table).csv())
        if drawn(table):
            name, options = table.plot
            figure = getattr(plots, name)(table.panels, **options)
            report.write(path.with_name(FIGURES) / f"{table.name}.png", report.png(figure))
    # The cells of a page are stored beside it, unless that file is the store itself.
    if path.with_name(CELLS).resolve() != store.path.resolve():
        cells = [cell for table in made for panel in table.panels for cell in panel.cells()]
        report.write(path.with_name(CELLS), store.lines(key_of(spec) for _, spec, _ in cells))
    report.write(path, page(made, setup, store, command))
