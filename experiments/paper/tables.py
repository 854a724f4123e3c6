"""Tables of the paper, made from their descriptions in `tables.toml`."""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import paper
from experiments.paper import panels as rules
from experiments.paper.panels import WORDS, Claims, Panel, Verdict, paper_results
from experiments.paper.runs import MEASURES, Setup, collect
from experiments.paper.sources import MAIN
from experiments.store import Store

TABLES: Mapping[str, Mapping[str, Any]] = paper.DATA["tables"]
"""Descriptions of all tables by name, in the paper's order."""
Values = dict[str, Any]
"""Values of placeholders by name."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table or figure of the paper. It has no panels if the sources lack its data."""

    name: str  # T1 (main text), A1 (appendix), F3 or FA1 (figures)
    panels: Sequence[Panel]
    title: str
    claim: str
    needs: Sequence[str] = (MAIN,)
    paper: str | None = None
    whole: str = ""
    word: str = ""
    rule: Sequence[Any] = ("above", {})  # name of a function in `panels`, and its options
    plot: Sequence[Any] = ()

    def filled(self, store: Store, failures: Mapping[str, str]) -> "Table":
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
        name, options = self.rule
        return getattr(rules, name)(*self.panels, **options)

    @property
    def tuned_verdict(self) -> Verdict | None:
        """The judgement on the same claim with the tuned teacher, or None if runs are missing."""
        judged = [dataclasses.replace(p, claims=p.tuned) for p in self.panels if p.tuned]
        gaps = [p.gap(*at) for p in judged for at in p.claims.values() if at[0] in p.places()]
        if not gaps or None in gaps:
            return None
        rule = self.rule[0] if self.rule[0].startswith("above") else "above"
        return getattr(rules, rule)(*judged)

    def part(self, name: str) -> "Table":
        """Returns the table with only one of its panels."""
        return dataclasses.replace(self, panels=[one for one in self.panels if one.name == name])

    @property
    def outcome(self) -> str:
        """The verdict in one or two words."""
        if not self.panels:
            return "needs files"
        if self.word:
            return self.word
        # Runs of the tuned teacher are no part of the paper's claim.
        missing = [why for p in self.panels if "tuned" not in p.name for why in p.failures]
        if self.verdict.held is None and any("tuned" not in why for why in missing):
            return "not finished" if any(panel.found for panel in self.panels) else "not run"
        return WORDS[self.verdict.held]

    @property
    def failures(self) -> list[str]:
        """Messages of cells that failed or were not run."""
        return list(dict.fromkeys(why for panel in self.panels for why in panel.failures))


def make(name: str, setup: Setup) -> Table:
    """Makes a table from its description, without numbers.

    Args:
        name: Name of the table, such as "T1".
        setup: Sizes and sources. Panels whose data are missing are left out.

    Returns:
        The table, with the specifications of its cells.
    """
    raw = dict(TABLES[name])
    values, panels = placeholders(setup), []
    for one in raw.pop("panels"):
        for known in _points(one.get("name", ""), values) if values[one.get("when", "any")] else ():
            panel = _panel(one, known, setup, raw.get("paper"))
            if panel.rows and any(column["metric"] for column in panel.columns.values()):
                panels.append(setup.plan(panel))
    return Table(name, panels, **raw)


def placeholders(setup: Setup) -> Values:
    """Returns the values of all placeholders of `tables.toml`.

    Values that lack data are empty, so that rows, columns and panels with these placeholders
    disappear.
    """
    at, names, sizes = setup.sources, setup.sources.names, vars(setup.sizes)

    def shown(*sources: str) -> list[tuple[str, str]]:
        return [(names.label if name == MAIN else name, name) for name in sources]

    others = [name for name in names.collections if name != MAIN and at.has(name, "xy")]
    pair_sources = shown(MAIN, *others) if others else []
    encoders = names.encoders if len(names.encoders) > 1 else []
    all_encoders = [*names.encoders, *names.weak_encoders]
    methods: Sequence[Any] = (("SAIL", "sail", {}), ("SOTAlign", "sotalign", {}))
    tuned = ("SOTAlign (tuned CCA)", "sotalign", paper.DATA["points"]["tuned_teacher"])
    ways = (("I2T", "x_to_y"), ("T2I", "y_to_x"))
    pools, drawn = _pools(setup), (*names.collections, "noise")
    images, texts = (shown(*(name for name in drawn if at.has(name, side))) for side in "xy")
    has_sets = len(images) > 2 < len(texts)  # besides the main source and noise
    retrieval, unlimited = paper.DATA["shared"]["retrieval"].items(), {"data.n_unpaired": None}
    return {
        **sizes,
        **paper.DATA["points"],
        **vars(names),
        "any": True,
        "all": None,
        "quick_photographs": setup.scale == "quick" and not at.given,
        "full_photographs": setup.scale == "full" and not at.given,
        "speech_data": {**dict.fromkeys(("data.pairs", "data.test"), names.speech), **unlimited},
        "retrieval": [(n, c["metric"]) for n, c in retrieval if _available(setup, c)],
        "pair_sources": pair_sources,
        "pair_runs": [(*s, *method) for s in pair_sources for method in (*methods, tuned)],
        "encoders": encoders,
        "encoder_runs": [(name, *method) for name in encoders for method in methods],
        "all_encoders": all_encoders if len(all_encoders) > 2 else [],
        "sue": [(*shown(s)[0], n, key, *way) for s, n, key in names.sue for way in ways],
        "some_noise": [share for share in sizes["pool_noise"] if 0 < share < 1],
        "pools": pools,
        "real_pools": [label for label, *_ in pools if "noise" not in label],
        "image_pools": [pool for pool in pools if pool[2] == MAIN],
        "text_pools": [pool for pool in pools if pool[1] == MAIN],
        "image_sets": images if has_sets else [],
        "text_sets": texts if has_sets else [],
    }


def _pools(setup: Setup) -> list[tuple[str, str, str]]:
    """Returns label, source of images and source of texts of all pools to compare."""
    at = setup.sources
    if at.given:
        listed = [row.split("|") for row in paper_results()["A1_unpaired_source"] if "|" in row]
        named = [[MAIN if name == at.names.label else name for name in row] for row in listed]
        pairs = [(x, y) for x, y in named if at.has(x, "x") and at.has(y, "y")]
    else:
        images, texts = ([n for n in at.names.collections if at.has(n, side)] for side in "xy")
        pairs = [(name, name) for name in images if name in texts]
        pairs += [*((x, MAIN) for x in images), *((MAIN, y) for y in texts)]
    if len(set(pairs)) < 2:  # a single pool cannot be compared
        return []
    pairs += [("noise", "noise"), ("noise", MAIN), (MAIN, "noise")]
    return [(f"{x}|{y}".replace(MAIN, at.names.label), x, y) for x, y in dict.fromkeys(pairs)]


def _available(setup: Setup, settings: Mapping[str, Any]) -> bool:
    """Returns True if the sources have the gallery or classes of a metric."""
    name, at = settings["metric"].partition("/")[0], setup.sources
    if name in ("val", "test"):
        name = settings.get("data.test", MAIN)
    return name in (MAIN, *MEASURES) or at.has(name, "classes") or at.has(name, "test")


def _panel(raw: Values, values: Values, setup: Setup, key: str | None) -> Panel:
    """Makes a panel from its description, for one value of the placeholder in its name."""
    shared = paper.DATA["shared"]
    parts = ("rows", "columns", "named", "above", "columns_above")
    raw = {k: shared[v] if k in parts and isinstance(v, str) else v for k, v in raw.items()}
    rows, columns = _expand(raw["rows"], values), _expand(raw["columns"], values)
    common = _fill(raw.get("common", {}), values)
    named = _expand({**shared["named"], **raw.get("named", {})}, values)
    papers = next(iter(paper_results()[key].values())) if key else {}
    for label, settings in list(columns.items()):
        columns[label] = {**common, **settings}
        if not _available(setup, columns[label]):
            # The column stays if the paper has numbers for it.
            columns[label]["metric"] = None
            if named.get(label, label) not in papers:
                del columns[label]
    name = raw.get("name", "").format(**values)
    seeds = setup.sizes.seeds[:1] if raw.get("one_seed") else setup.sizes.seeds
    claims = _claims(raw, rows, columns, values)
    tuned = {k: v for k, v in claims.items() if "tuned" in f"{name}{v}"}
    return Panel(
        name,
        raw["corner"],
        rows,
        columns,
        seeds,
        claims={label: places for label, places in claims.items() if label not in tuned},
        tuned=tuned,
        named=named,
        form=raw.get("form", ".1f"),
        paper=key,
    )


def _points(label: str, values: Values) -> list[Values]:
    """Returns copies of `values`, one for each value of the placeholder in a label."""
    found = re.search(r"\{(\w+)", label)
    if not found:
        return [values]
    points = values[found[1]]
    points = points if isinstance(points, list) else [points] if points else []
    return [{**values, found[1]: point} for point in points]


def _expand(settings: Mapping[str, Any], values: Values) -> dict[str, Any]:
    """Repeats rows or columns for all values of the placeholders in their labels."""
    return {
        label.format(**known): _fill(value, known)
        for label, value in settings.items()
        for known in _points(label, values)
    }


def _fill(value: Any, known: Values) -> Any:
    """Replaces the placeholders in a setting, or in a dictionary of settings."""
    if isinstance(value, dict):
        filled = {name: _fill(one, known) for name, one in value.items()}
        return filled.pop("*", {}) | filled
    if not isinstance(value, str):
        return value
    # A string that is just a placeholder becomes its value, which need not be a string.
    if whole := re.fullmatch(r"\{(\w+)(?:\[(\d)\])?\}", value):
        found = known[whole[1]]
        return found[int(whole[2])] if whole[2] else found
    return value.format(**known)


def _claims(raw: Values, rows: Values, columns: Values, values: Values) -> Claims:
    """Returns the claims of a panel."""
    judged = [name for name in columns if name not in raw.get("unjudged", ())]
    claims = {name: (tuple(a), tuple(b)) for name, (a, b) in raw.get("claims", {}).items()}
    if column := raw.get("last_above_first"):
        first, *_, last = rows
        claims[f"{last} - {first} {raw['corner']}"] = ((last, column), (first, column))
    for kind, others in {"above": judged, "columns_above": list(rows)}.items():
        listed = [(one, known) for one in raw.get(kind, ()) for known in _points(one[0], values)]
        pairs = [[label.format(**known) for label in one] for one, known in listed]
        # Claims against the same place follow each other, so that the verdict lists them together.
        for low, group in itertools.groupby(pairs, key=lambda pair: pair[1]):
            for other, (high, _) in itertools.product(others, list(group)):
                places = ((high, other), (low, other))
                if kind == "columns_above":
                    places = ((other, high), (other, low))
                claims[f"{high} - {low} ({other})"] = places
    return claims
