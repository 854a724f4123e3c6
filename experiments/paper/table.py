"""A table or figure of the paper, and the function that makes its panels."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from experiments.paper import panels as rules
from experiments.paper.panels import WORDS, Claims, Panel, Verdict, paper_results
from experiments.paper.runs import MEASURES, SOLVER_MEASURES, Setup, collect
from experiments.paper.sizes import Settings
from experiments.paper.sources import MAIN
from experiments.store import Store

Above = Sequence[tuple[str, str]]
"""Pairs of rows or columns. The first of each is claimed to have the larger numbers."""
NO_SETTINGS: Settings = {}
ADDED = ("tuned", "refined", "align")
"""Words in the labels of rows and columns that the paper does not have."""


@dataclasses.dataclass(frozen=True)
class PaperTable:
    """A table or figure of the paper. It has no panels if the sources lack its data.

    Attributes:
        name: T1 (main text), A1 (appendix), F3 or FA1 (figures), V1 or S1 (additions).
        title: Title.
        claim: The paper's conclusion.
        panels: Panels, without those whose data are missing.
        paper: Key of the paper's numbers in `panels.paper_results`.
        needs: The paper's data, by their names in `sources.KNOWN`.
        whole: If set, the claim is judged only if no number is missing. It names the numbers.
        word: Verdict if the paper makes no claim.
        rule: Function that judges the claim by the panels.
        tuned_rule: Function that judges the same claim for the tuned teacher.
        plot: Function that draws the panels, or None.
    """

    name: str
    title: str
    claim: str
    panels: Sequence[Panel]
    paper: str | None = None
    needs: Sequence[str] = (MAIN,)
    whole: str = ""
    word: str = ""
    rule: Callable[..., Verdict] = rules.above
    tuned_rule: Callable[..., Verdict] = rules.above
    plot: Callable[[Sequence[Panel]], Any] | None = None

    def filled(self, store: Store, failures: Mapping[str, str]) -> "PaperTable":
        """Returns the table with the numbers of its finished cells.

        Args:
            store: Results.
            failures: Error messages of failed cells, by key.
        """
        panels = [collect(store, panel, failures) for panel in self.panels]
        return dataclasses.replace(self, panels=panels)

    @property
    def verdict(self) -> Verdict:
        """The judgement on the claim."""
        if not self.panels:
            return Verdict(None, "its data are not here")
        if self.whole and not all(panel.complete for panel in self.panels):
            return Verdict(None, f"{self.whole} are missing")
        return self.rule(*self.panels)

    @property
    def tuned_verdict(self) -> Verdict | None:
        """The judgement on the same claim with the tuned teacher, or None if runs are missing."""
        judged = [dataclasses.replace(p, claims=p.tuned) for p in self.panels if p.tuned]
        gaps = [p.gap(*at) for p in judged for at in p.claims.values() if at[0] in p.places()]
        if not gaps or None in gaps:
            return None
        return self.tuned_rule(*judged)

    def part(self, name: str) -> "PaperTable":
        """Returns the table with only one of its panels."""
        return dataclasses.replace(self, panels=[one for one in self.panels if one.name == name])

    @property
    def outcome(self) -> str:
        """The verdict in one or two words."""
        if not self.panels:
            return "needs files"
        if self.word:
            return self.word
        # Runs of other teachers are no part of the paper's claim.
        missing = [f"{panel.name}, {why}" for panel in self.panels for why in panel.failures]
        ours = [why for why in missing if not any(word in why for word in ADDED)]
        if self.verdict.held is None and ours:
            return "not finished" if any(panel.found for panel in self.panels) else "not run"
        return WORDS[self.verdict.held]

    @property
    def failures(self) -> list[str]:
        """Messages of cells that failed or were not run."""
        return list(dict.fromkeys(why for panel in self.panels for why in panel.failures))

    @property
    def partial(self) -> list[str]:
        """Rows and columns with numbers of some seeds only, with the number of these seeds."""
        found: dict[str, None] = {}
        for panel in self.panels:
            for row, column in panel.places():
                number = len(panel.at(row, column))
                if 0 < number < len(panel.seeds):
                    seeds = "seed 0 alone" if number == 1 else f"{number} seeds"
                    found[f"{row}, {column}: {seeds}"] = None
        return list(found)


def panel(
    setup: Setup,
    *,
    corner: str,
    rows: Mapping[str, Settings],
    columns: Mapping[str, Settings],
    name: str = "",
    common: Settings = NO_SETTINGS,
    paper: str | None = None,
    named: Mapping[str, str] | None = None,
    above: Above = (),
    unjudged: Collection[str] = (),
    columns_above: Above = (),
    claims: Claims | None = None,
    seeds: Sequence[int] | None = None,
    form: str = ".1f",
) -> Panel:
    """Makes a panel with the specifications of its cells.

    Columns whose data are missing are left out, unless the paper has numbers for them.

    Args:
        setup: Sizes and sources.
        corner: Header of the column of row labels.
        rows: Settings by row.
        columns: Settings by column.
        name: Name, unique within a table.
        common: Settings of all columns.
        paper: Key of the paper's numbers in `panels.paper_results`.
        named: The paper's labels by ours, in addition to `paper_names`.
        above: Rows that are claimed to be above others in every column.
        unjudged: Columns to which `above` does not apply.
        columns_above: Columns that are claimed to be above others in every row.
        claims: Further claims by label. Those on labels with "tuned" are judged separately.
        seeds: Seeds, those of the setup by default.
        form: Format of a number.

    Returns:
        The panel, without numbers.
    """
    labels = {**paper_names(setup), **(named or {})}
    papers = next(iter(paper_results()[paper].values())) if paper else {}
    kept: dict[str, Settings] = {}
    for label, own in columns.items():
        settings: dict[str, Any] = {**common, **own}
        if not available(setup, settings["metric"], settings):
            if labels.get(label, label) not in papers:
                continue
            settings["metric"] = None
        kept[label] = settings
    judged = [label for label in kept if label not in unjudged]
    every = {**(claims or {}), **_row_claims(above, judged), **_column_claims(columns_above, rows)}
    tuned = {label for label, places in every.items() if "tuned" in f"{name}{places}"}
    made = Panel(
        name,
        corner,
        rows,
        kept,
        setup.sizes.seeds if seeds is None else seeds,
        claims={label: places for label, places in every.items() if label not in tuned},
        tuned={label: places for label, places in every.items() if label in tuned},
        named=labels,
        form=form,
        paper=paper,
    )
    return setup.plan(made)


def _row_claims(above: Above, columns: Collection[str]) -> dict[str, tuple[Any, Any]]:
    """Returns claims on rows in every column. Claims against the same row follow each other."""
    return {
        f"{high} - {low} ({column})": ((high, column), (low, column))
        for low, group in itertools.groupby(above, key=lambda pair: pair[1])
        for column, (high, _) in itertools.product(columns, list(group))
    }


def _column_claims(above: Above, rows: Collection[str]) -> dict[str, tuple[Any, Any]]:
    """Returns claims on columns in every row."""
    return {
        f"{high} - {low} ({row})": ((row, high), (row, low))
        for low, group in itertools.groupby(above, key=lambda pair: pair[1])
        for row, (high, _) in itertools.product(rows, list(group))
    }


def last_above_first(corner: str, rows: Collection[str], column: str) -> Claims:
    """Returns the claim that the last row of a column is above its first row."""
    first, *_, last = rows
    return {f"{last} - {first} {corner}": ((last, column), (first, column))}


def available(setup: Setup, metric: str, settings: Settings = NO_SETTINGS) -> bool:
    """Returns True if the sources have the gallery or the classes of a metric."""
    name = metric.partition("/")[0]
    if name in ("val", "test"):
        name = settings.get("data.test", MAIN)
    known = (MAIN, *MEASURES, *SOLVER_MEASURES)
    return name in known or any(setup.sources.has(name, part) for part in ("classes", "test"))


def paper_names(setup: Setup) -> dict[str, str]:
    """Returns the paper's labels of columns by ours."""
    names = {"zero-shot": "ImageNet", "mutual k-NN (%)": "mutual_kNN_pct"}
    for way, cut in itertools.product(("T2I", "I2T"), (1, 5)):
        names[f"{way} R@{cut}"] = f"COCO_{way}_R{cut}"
        names[f"{setup.sources.names.flickr} {way} R@{cut}"] = f"F30k_{way}_R{cut}"
    return names
