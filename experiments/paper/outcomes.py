"""From finished cells to what is shown of a table or figure: Markdown, CSV and PNG."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping

from experiments.paper import claims, entries
from experiments.paper.cells import Cell, Store
from experiments.paper.entries import Entry, Values
from experiments.paper.lab import Lab
from experiments.paper.slots import SLOTS, slot_of
from sotalign_jax import tables

COMMAND = "python -m experiments.reproduce"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of an entry; without grids there are no data for it."""

    entry: Entry
    lab: Lab
    found: Mapping[str, Values]
    verdict: claims.Verdict

    @property
    def ran(self) -> bool:
        return bool(self.found)

    @property
    def word(self) -> str:
        """The verdict in a word or two."""
        return claims.WORDS[self.verdict.held] if self.ran else "needs files"

    @property
    def drawn(self) -> bool:
        """Whether there is a figure."""
        return self.entry.plot is not None and any(v.found for v in self.found.values())

    @property
    def command(self) -> str:
        """Runs this entry alone."""
        quick = " --quick" if self.lab.scale.name == "quick" else ""
        files = "" if self.ran and not self.lab.files else " --files=FILES.json"
        return f"{COMMAND} --only={self.entry.name}{quick}{files} --workdir=FOLDER"

    @property
    def failures(self) -> list[str]:
        return [text for values in self.found.values() for text in values.failures]

    @property
    def data(self) -> str:
        """What the numbers are measured on."""
        given = [name for name in self.lab.files if slot_of(name) in self.entry.files]
        if not self.ran:
            return "not here: needs files"
        return f"files given for {', '.join(given)}" if given else self.entry.stand_in or ""

    @property
    def needs(self) -> list[str]:
        """Slots that would bring the paper's own data and are not given."""
        given = {slot_of(name) for name in self.lab.files}
        return [slot for slot in self.entry.files if slot not in given]

    @property
    def example(self) -> str:
        """A file for --files with what is needed."""
        slots = {slot: dict.fromkeys(SLOTS[slot].fields, "PATH.npy") for slot in self.needs}
        return json.dumps(slots, indent=1)

    def seeds(self) -> str:
        """Seeds of every grid, as text."""
        sets = dict.fromkeys(tuple(values.grid.seeds) for values in self.found.values())
        return " and ".join(", ".join(map(str, seeds)) for seeds in sets)


def cells_of(entry: Entry, lab: Lab) -> list[Cell]:
    """Every cell that an entry needs; runs come before what is evaluated on them."""
    made = []
    for grid in entry.build(lab):
        for row in grid.rows.values():
            for column in grid.columns.values():
                if column.metric and column.metric.startswith("evaluation/"):
                    changes = {**row.changes, **column.changes}
                    made += lab.cells(changes, "test/mean/R@1", grid.seeds)
        made += [cell for place in grid.cells(lab).values() for cell in place]
    return made


def planned(entry: Entry, lab: Lab) -> Outcome:
    """An entry of which nothing is made or read yet."""
    found = {grid.name: Values(grid, {}) for grid in entry.build(lab)}
    return Outcome(entry, lab, found, claims.Verdict(None, "nothing was run"))


def outcome(entry: Entry, lab: Lab, store: Store) -> Outcome:
    """Reads the finished cells of an entry and judges its claim."""
    found = {grid.name: entries.collect(grid, lab, store) for grid in entry.build(lab)}
    if not found:
        return Outcome(entry, lab, found, claims.Verdict(None, "its data are not here"))
    return Outcome(entry, lab, found, entry.judge(found))


def number(values: Values, row: str, column: str) -> str | None:
    """The mean over seeds with its spread."""
    mean, spread = values.mean(row, column), values.spread(row, column)
    if mean is None:
        return None
    form = values.grid.form
    return f"{mean:{form}}" + ("" if spread is None else f" ± {spread:{form}}")


def columns_of(values: Values) -> list[tuple[str, bool]]:
    """(column, whether it is the paper's) in the order shown: the paper's beside ours."""
    grid = values.grid
    shown = []
    for column in grid.columns:
        if grid.columns[column].metric is not None:
            shown.append((column, False))
        if any(grid.paper_value(row, column) is not None for row in grid.rows):
            shown.append((column, True))
    return shown


def text_table(values: Values) -> tables.Table:
    """Ours and, where it has the same rows, the paper's beside it."""
    grid, shown = values.grid, columns_of(values)
    fixed = grid.form.endswith("f")

    def ours(row: str, column: str) -> tables.Mean | str | None:
        at = values.known(row, column)
        return tables.Mean(at.tolist()) if fixed and len(at) else number(values, row, column)

    headers = [grid.corner]
    headers += [f"{paper_label(grid, name)} (paper)" if paper else name for name, paper in shown]
    rows = [
        [
            row,
            *(grid.paper_value(row, name) if paper else ours(row, name) for name, paper in shown),
        ]
        for row in grid.rows
    ]
    return tables.table(headers, rows, digits=int(grid.form[1]))


def paper_label(grid: entries.Grid, column: str) -> str:
    """What the paper calls a column: its own data, and not what stands in for them."""
    return _words(grid.columns[column].paper or column)


def paper_table(entry: Entry) -> tables.Table | None:
    """The paper's whole table."""
    if entry.paper is None:
        return None
    table = entries.paper_results()[entry.paper]
    rows = [[row, *values.values()] for row, values in table["rows"].items()]
    return tables.table(["paper", *map(_words, table["cols"])], rows)


def _words(column: str) -> str:
    """The paper's COCO_T2I_R1 as COCO T2I R@1."""
    words = [f"R@{w[1:]}" if w[0] == "R" and w[1:].isdigit() else w for w in column.split("_")]
    return " ".join(words).replace("kNN pct", "k-NN (%)")


def shows_paper(made: Outcome) -> bool:
    """Whether the paper's whole table is shown: it has rows that ours has not."""
    if made.entry.paper is None:
        return False
    ours = {r.paper for values in made.found.values() for r in values.grid.rows.values()}
    return not set(entries.paper_results()[made.entry.paper]["rows"]) <= ours


def long_table(made: Outcome) -> tables.Table:
    """One line a number, for other programs."""
    rows = []
    for name, values in made.found.items():
        for row in values.grid.rows:
            for column in values.grid.columns:
                at = values.known(row, column)
                ours = [values.mean(row, column), values.spread(row, column), len(at)]
                rows.append([name, row, column, *ours, values.grid.paper_value(row, column)])
    return tables.table(["panel", "row", "column", "ours", "spread", "seeds", "paper"], rows)


def markdown(made: Outcome, *, level: int = 1, figures: str = "") -> str:
    """All that is known of an entry; its figure is in the folder `figures`, from the page's own."""
    entry = made.entry
    parts = [f"{'#' * level} {entry.name}: {entry.title}"]
    parts.append(f"**Claim:** {entry.claim}.\n**Here:** {made.verdict}.")
    if made.ran:
        parts.append(f"Varies: {entry.varies}. Data: {made.data}; seeds {made.seeds()}.")
    if made.drawn:
        parts.append(f"![{entry.name}: {entry.title}]({figures}{entry.name}.png)")
    for name, values in made.found.items():
        parts += [f"*{name}*"] if name else []
        parts.append(text_table(values).markdown())
    whole = paper_table(entry)
    if whole is not None and (shows_paper(made) or not made.ran):
        parts += ["The paper, on its own data:", whole.markdown()]
    if made.failures:
        parts.append("Failed: " + "; ".join(dict.fromkeys(made.failures)) + ".")
    if made.needs and made.ran:
        slots = ", ".join(f"`{slot}`" for slot in made.needs)
        parts.append(f"The paper's own data go in the JSON file of `--files` as {slots}.")
    elif made.needs:
        slots = "\n".join(f"- `{slot}`: {SLOTS[slot]}" for slot in made.needs)
        parts.append(f"It needs files, named in FILES.json:\n\n{slots}")
        parts.append(f"```json\n{made.example}\n```")
    parts.append(f"`{made.command}`")
    return "\n\n".join(parts) + "\n"


def terminal(made: Outcome) -> str:
    """Tables and verdict, for the screen."""
    parts = [f"{made.entry.name}: {made.entry.title}"]
    for name, values in made.found.items():
        parts += [name] if name else []
        parts.append(str(text_table(values)))
    parts += dict.fromkeys(made.failures)
    if not made.ran:
        parts += ["It needs files, named in FILES.json:", made.example, made.command]
    parts.append(f"Claim: {made.entry.claim}.\nHere: {made.verdict}.")
    return "\n".join(parts)


def save(made: Outcome, folder: pathlib.Path) -> None:
    """Writes NAME.md, NAME.csv and for figures NAME.png."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / made.entry.name
    stem.with_suffix(".md").write_text(markdown(made), encoding="utf-8")
    stem.with_suffix(".csv").write_text(long_table(made).csv(), encoding="utf-8")
    if made.drawn and made.entry.plot is not None:
        made.entry.plot(made.found, stem.with_suffix(".png"))
