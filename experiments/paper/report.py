"""All outcomes on one page: report.html, which needs nothing but itself, and Markdown."""

import base64
import collections
import html
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

from experiments import workdir as workdir_lib
from experiments.paper import outcomes
from experiments.paper.cells import FOLDER
from experiments.paper.entries import Values
from experiments.paper.outcomes import Outcome
from experiments.paper.slots import SLOTS
from sotalign_jax import tables

TITLE = "SOTAlign: every table and figure, ours beside the paper's"
STYLE = pathlib.Path(__file__).with_name("report.css")
FIGURES = "figures"
_CLASSES = {True: "held", False: "failed", None: "open"}


def note(made: Sequence[Outcome]) -> str:
    """How to read the numbers."""
    lab, scale = made[0].lab, made[0].lab.scale
    text = f"Main data: {lab.data}. "
    if "main" not in lab.files:
        text += (
            "They stand in for CC3M, COCO and ImageNet at a small scale, so trends are to be "
            "compared, not absolute numbers. "
        )
    seeds = f"{len(scale.seeds)} seed" + ("s" if len(scale.seeds) > 1 else "")
    text += f"Scale: {scale.name}, {seeds}; the large grids (FA4, FA5) have one. "
    text += (
        "± is the standard deviation over seeds. A claim that one thing is above another held when "
        "every difference that it speaks of is as claimed by more than its standard error, and did "
        "not when one is opposite by more than that. A correlation held when p < 0.05 (one-sided). "
        "F3, F4, FA1, FA4, FA5 and FA8 are judged by means alone. "
    )
    if scale.name == "paper":
        text += "Options are the paper's usual ones for every method and were not searched."
    elif scale.name == "quick":
        text += "Runs are short, of one seed, and all at one learning rate: verdicts are hints."
    else:
        text += "Options of the methods were chosen once, on validation with 1,000 pairs."
    return text


def environments(workdir: pathlib.Path) -> dict[str, Any]:
    """What the cells ran on: the newest environment, with every revision that took part."""
    found = [
        workdir_lib.read_json(p) for p in sorted(workdir.glob(f"{FOLDER}/*/run/environment.json"))
    ]
    if not found:
        return workdir_lib.environment()
    newest = max(found, key=lambda one: one["time"])
    revisions = sorted({str(one["git"]) for one in found})
    return {**newest, "git": ", ".join(revisions), "cells": len(found)}


def summary(made: Sequence[Outcome]) -> tables.Table:
    """One line an entry: its claim and whether it held."""
    rows = [[m.entry.name, m.entry.title, m.entry.claim, m.word] for m in made]
    return tables.table(["", "shows", "the paper's claim", "here"], rows)


def save_results(
    path: pathlib.Path, made: Sequence[Outcome], workdir: pathlib.Path, command: str
) -> None:
    """Writes one Markdown page of everything, with the figures in a folder beside it."""
    figures = path.with_name(FIGURES)
    figures.mkdir(parents=True, exist_ok=True)
    for one in made:
        if one.drawn:
            shutil.copy(workdir / f"{one.entry.name}.png", figures)
    path.write_text(results_page(made, workdir, command), encoding="utf-8")


def results_page(made: Sequence[Outcome], workdir: pathlib.Path, command: str) -> str:
    """Commands, verdicts and every table in Markdown."""
    here = environments(workdir)
    machine = f"{here['platform']}, Python {here['python']}, jax {here['packages'].get('jax')}"
    words = [outcomes.markdown(one, level=3, figures=f"{FIGURES}/") for one in made]
    count = collections.Counter(one.word for one in made)
    counted = ", ".join(f"{word}: {n}" for word, n in count.most_common())
    return "\n\n".join(
        [
            "# Results beside the paper's",
            f"Written by\n\n```bash\n{command}\n```",
            note(made),
            f"Ran on {machine}, revision {here['git']}.",
            f"## Verdicts\n\n{counted}.",
            summary(made).markdown(),
            "## Tables and figures",
            *words,
        ]
    )


# --- HTML --------------------------------------------------------------------------------------


def page(made: Sequence[Outcome], workdir: pathlib.Path, command: str) -> str:
    """The whole report as one HTML file."""
    here = environments(workdir)
    packages = here.pop("packages")
    facts = {**here, "devices": ", ".join(here["devices"]), **packages}
    body = [
        f"<header><h1>{html.escape(TITLE)}</h1><p>{html.escape(note(made))}</p>",
        f"<pre>{html.escape(command)}</pre></header>",
        "<h2>Verdicts</h2>",
        _verdicts(made),
        *(_section(one, workdir) for one in made),
        "<section id='environment'><h2>Environment</h2>",
        _html_table(["", ""], [[name, str(value)] for name, value in facts.items()], numbers=0),
        "</section>",
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            "<html lang='en'><head><meta charset='utf-8'>",
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<title>{html.escape(TITLE)}</title>",
            f"<style>\n{STYLE.read_text(encoding='utf-8')}</style></head><body><main>",
            *body,
            "</main></body></html>\n",
        ]
    )


def _verdicts(made: Sequence[Outcome]) -> str:
    items = []
    for one in made:
        name, title = one.entry.name, html.escape(one.entry.title)
        items.append(
            f"<tr><td><a href='#{name}'>{name}</a></td><td>{title}</td>"
            f"<td>{html.escape(one.entry.claim)}</td><td>{_badge(one)}</td></tr>"
        )
    head = "<tr><th></th><th>shows</th><th>the paper's claim</th><th>here</th></tr>"
    return f"<div class='scroll'><table class='verdicts'>{head}{''.join(items)}</table></div>"


def _badge(made: Outcome) -> str:
    return f"<span class='badge {_CLASSES[made.verdict.held]}'>{made.word}</span>"


def _section(made: Outcome, workdir: pathlib.Path) -> str:
    entry = made.entry
    parts = [
        f"<section id='{entry.name}'><h2><span class='name'>{entry.name}</span> "
        f"{html.escape(entry.title)}</h2>",
        f"<p class='claim'>Claim: {html.escape(entry.claim)}. {_badge(made)}</p>",
        f"<p class='why'>{html.escape(made.verdict.text)}.</p>",
    ]
    picture = workdir / f"{entry.name}.png"
    if made.drawn:
        code = base64.b64encode(picture.read_bytes()).decode()
        alt = html.escape(f"{entry.name}: {entry.title}", quote=True)
        parts.append(f"<img alt='{alt}' src='data:image/png;base64,{code}'>")
    numbers = "\n".join(_compared(values, name) for name, values in made.found.items())
    if made.ran and entry.plot is not None:
        numbers = f"<details><summary>Numbers</summary>{numbers}</details>"
    parts.append(numbers)
    whole = outcomes.paper_table(entry)
    if whole is not None and (outcomes.shows_paper(made) or not made.ran):
        parts.append("<p class='small'>The paper, on its own data:</p>")
        parts.append(_html_table(whole.headers, whole.rows, numbers=1, kind="theirs"))
    parts += [f"<p class='failed small'>{html.escape(f)}</p>" for f in dict.fromkeys(made.failures)]
    if made.ran:
        facts = f"Varies: {entry.varies}. Data: {made.data}; seeds {made.seeds()}."
        parts.append(f"<p class='small'>{html.escape(facts)}</p>")
    if made.needs:
        slots = [f"{name}: {SLOTS[name]}" for name in made.needs]
        items = "".join(f"<li><code>{html.escape(slot)}</code></li>" for slot in slots)
        words = "The paper's own data go in the JSON file of <code>--files</code>"
        example = f"<pre>{html.escape(made.example)}</pre>"
        opened = "" if made.ran else " open"
        parts.append(
            f"<details{opened}><summary>{words}</summary><ul>{items}</ul>{example}</details>"
        )
    parts.append(f"<pre>{html.escape(made.command)}</pre></section>")
    return "\n".join(parts)


def _compared(values: Values, name: str) -> str:
    """A table with the paper's numbers, in another colour, beside ours."""
    grid, shown = values.grid, outcomes.columns_of(values)
    ours = "<small>ours</small>" if grid.compared else ""
    head = ""
    for name, paper in shown:
        text = html.escape(outcomes.paper_label(grid, name) if paper else name)
        kind, whose = ("theirs", "<small>paper</small>") if paper else ("ours", ours)
        head += f"<th class='{kind}'>{text}{whose}</th>"
    lines = []
    for row in grid.rows:
        cells = []
        for column, paper in shown:
            value = grid.paper_value(row, column) if paper else outcomes.number(values, row, column)
            text = "–" if value is None else html.escape(str(value))
            cells.append(f"<td class='{'theirs' if paper else 'ours'}'>{text}</td>")
        lines.append(f"<tr><th scope='row'>{html.escape(row)}</th>{''.join(cells)}</tr>")
    caption = f"<caption>{html.escape(name)}</caption>" if name else ""
    corner = f"<th>{html.escape(grid.corner)}</th>"
    return (
        f"<div class='scroll'><table>{caption}<tr>{corner}{head}</tr>{''.join(lines)}</table></div>"
    )


def _html_table(
    headers: Sequence[str], rows: Sequence[Sequence[Any]], *, numbers: int, kind: str = ""
) -> str:
    """Cells from column `numbers` on are of class `kind`."""
    head = "".join(f"<th>{html.escape(text)}</th>" for text in headers)
    lines = []
    for row in rows:
        kinds = [f" class='{kind}'" if kind and i >= numbers else "" for i in range(len(row))]
        texts = [html.escape(str(value)) for value in row]
        cells = [f"<td{k}>{text}</td>" for k, text in zip(kinds, texts, strict=True)]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    header = f"<tr>{head}</tr>" if any(headers) else ""
    return f"<div class='scroll'><table>{header}{''.join(lines)}</table></div>"
