"""Where unpaired rows come from, how far that is from the pairs, and SkyScript's sweeps."""

from collections.abc import Mapping

from experiments.paper import plots, views
from experiments.paper.claims import Verdict, all_above, difference, joined
from experiments.paper.entries import Column, Entry, Grid, Row, Values, column_gaps, paper_results
from experiments.paper.lab import Changes, Lab
from experiments.paper.main_tables import MEAN, RETRIEVAL

Found = Mapping[str, Values]
_STAND_IN = "collections of the bundled pictures: pairs are clipart, pools come from any"
_FILES = ("main", "unpaired/NAME")
_SHIFT = "MeanR@1 falls with the distance of the pools from the pairs"


def unpaired_sources(lab: Lab) -> dict[str, Changes]:
    """Sources of unpaired images | texts; none when only some files are given.

    All pairs come from one source.
    """
    given = lab.given("unpaired/")
    if given or "main" in lab.files:
        if not (given and "main" in lab.files):
            return {}
        has = {
            side: {"CC3M", *(name for name, fields in given.items() if side in fields)}
            for side in "xy"
        }
        sources: dict[str, Changes] = {}
        for row in paper_results()["A1_unpaired_source"]["rows"]:
            images, _, texts = row.partition("|")
            if images in has["x"] and texts in has["y"]:
                sources[row] = _given(lab, images, texts)
        return {**sources, "random|random": {"data.pool_noise": 1.0}}
    own, others = views.PAIRED, [name for name in views.COLLECTIONS if name != views.PAIRED]
    pairs = [(own, own), *((n, n) for n in others), *((n, own) for n in others)]
    pairs += [(own, n) for n in others]
    found = {f"{x}|{y}": _collection(lab, x, y) for x, y in pairs}
    return {**found, "random|random": {**_collection(lab, own, own), "data.pool_noise": 1.0}}


def _given(lab: Lab, images: str, texts: str) -> Changes:
    """Pools of given files: as many rows as usual, or as the smaller file has."""
    names = {"x": images, "y": texts}
    others = {side: name for side, name in names.items() if name != "CC3M"}
    if not others:
        return {}
    sizes = [lab.rows(f"unpaired/{name}", side) for side, name in others.items()]
    usual = lab.run({}, 0).data.n_unpaired
    slots = "|".join("main" if name == "CC3M" else name for name in names.values())
    return {
        "use": f"unpaired/{slots}",
        "data.n_unpaired": None if usual is None else min(usual, *sizes),
    }


def _collection(lab: Lab, images: str, texts: str) -> Changes:
    return {
        "use": f"view/collections/{views.PAIRED}/{images}/{texts}",
        "data.n_pairs": lab.scale.source_pairs,
        "data.n_unpaired": lab.scale.source_unpaired,
    }


def _sources(lab: Lab) -> list[Grid]:
    sources = unpaired_sources(lab)
    if not sources:
        return []
    own = next(iter(sources.values()))
    rows = {"SAIL": Row({**own, "method": "sail"}, "SAIL")}
    if "main" in lab.files:
        upper = {"method": "sail", **lab.scale.upper_bound}
        rows = {"SAIL-1M": Row(upper, "SAIL-1M"), **rows}
    rows |= {name: Row(changes, name) for name, changes in sources.items()}
    columns = {**RETRIEVAL, "MeanR@1": Column(MEAN)}
    grid = Grid("", "unpaired images|texts", rows, columns, lab.scale.seeds, "A1_unpaired_source")
    return [grid]


def _judge_sources(found: Found) -> Verdict:
    values = found[""]
    return all_above(
        {
            f"{row} - SAIL": difference(values.at(row, "MeanR@1"), values.at("SAIL", "MeanR@1"))
            for row in values.grid.rows
            if not row.startswith(("SAIL", "random"))
        }
    )


A1 = Entry(
    "A1",
    "Sources of unpaired rows",
    "the collections that unpaired images and texts come from",
    _STAND_IN,
    _FILES,
    _sources,
    "SOTAlign is above SAIL (by MeanR@1) whatever the unpaired rows' source",
    _judge_sources,
    paper="A1_unpaired_source",
)


def _distance(lab: Lab, side: str, keep: str | None) -> list[Grid]:
    """Distance and retrieval of sources; `keep` holds one modality at the pairs' own source."""
    sources, rows = unpaired_sources(lab), {}
    if not sources:
        return []
    own = next(iter(sources)).partition("|")[0]
    for name, changes in sources.items():
        images, _, texts = name.partition("|")
        if keep is None or {"x": images, "y": texts}[keep] == own:
            rows[name] = Row(changes)
    columns = {"distance": Column(f"shift/{side}"), "MeanR@1": Column(MEAN)}
    return [Grid("", "unpaired images|texts", rows, columns, lab.scale.seeds, form=".3f")]


F6 = Entry(
    "F6",
    "Retrieval against the shift of the unpaired rows",
    "the sources of unpaired rows; random directions are one",
    _STAND_IN,
    _FILES,
    lambda lab: _distance(lab, "total", None),
    f"{_SHIFT} (paper: r = -0.76)",
    lambda found: plots.correlation(found[""], sign=-1, paper=-0.76),
    plot=plots.scatter,
)
FA6 = Entry(
    "FA6",
    "Retrieval against the shift of the unpaired images",
    "the source of unpaired images; texts are of the pairs' source",
    _STAND_IN,
    _FILES,
    lambda lab: _distance(lab, "x", "y"),
    _SHIFT,
    lambda found: plots.correlation(found[""], sign=-1, paper=None),
    plot=plots.scatter,
)
FA7 = Entry(
    "FA7",
    "Retrieval against the shift of the unpaired texts",
    "the source of unpaired texts; images are of the pairs' source",
    _STAND_IN,
    _FILES,
    lambda lab: _distance(lab, "y", "x"),
    _SHIFT,
    lambda found: plots.correlation(found[""], sign=-1, paper=None),
    plot=plots.scatter,
)


def _matrices(lab: Lab) -> list[Grid]:
    """Distances between every two sets, for each modality."""
    given, grids, seeds = lab.given("unpaired/"), [], lab.scale.distance_seeds
    if not unpaired_sources(lab):
        return []
    for side, title in (("x", "images"), ("y", "texts")):
        names = ["main", *(name for name, fields in given.items() if side in fields)]
        names = [*(names if given else views.COLLECTIONS), "random"]
        rows = {name: Row({"left": name, "side": side}) for name in names}
        columns = {name: Column("between/distance", {"right": name}) for name in names}
        grids.append(Grid(title, "distance", rows, columns, seeds, form=".3f"))
    return grids


def _judge_matrices(found: Found) -> Verdict:
    if not all(values.complete for values in found.values()):
        return Verdict(None, "distances are missing")
    closer = []
    for values in found.values():
        names = [name for name in values.grid.rows if name != "random"]
        means = {name: values.column(name)[:-1].max() for name in names}
        closer += [means[name] < values.column(name)[-1] for name in names]
    return Verdict(all(closer), f"so for {sum(closer)} of {len(closer)} sets")


FA8 = Entry(
    "FA8",
    "Distances between sets of images and of texts",
    "the two sets",
    "collections of the bundled pictures",
    _FILES,
    _matrices,
    "real sets are closer to each other than to random directions (ours: the paper draws none)",
    _judge_matrices,
    plot=plots.heat_maps,
)


def _skyscript(lab: Lab, slot: str) -> list[Grid]:
    if slot not in lab.files:
        return []
    grids, scale = [], lab.given_scale
    for k in (1, 5, 10):
        metric = f"test/mean/R@{k}"
        base = {"use": slot, "given": True, "data.n_unpaired": None}
        rows = {f"{n}": Row({**base, "data.n_pairs": n}) for n in scale.pairs}
        columns = {"SAIL": Column(metric, {"method": "sail"}), "SOTAlign": Column(metric)}
        grids.append(Grid(f"R@{k}", "pairs", rows, columns, scale.seeds))
    return grids


def _judge_skyscript(found: Found) -> Verdict:
    return joined({n: all_above(column_gaps(v, "SOTAlign", "SAIL")) for n, v in found.items()})


FA9 = Entry(
    "FA9",
    "SkyScript, 10,000 test rows",
    "pairs",
    None,
    ("skyscript",),
    lambda lab: _skyscript(lab, "skyscript"),
    "SOTAlign is above SAIL at every number of pairs",
    _judge_skyscript,
    plot=lambda found, path: plots.lines(found, path, ylabel="%"),
)
FA10 = Entry(
    "FA10",
    "SkyScript, 30,000 test rows",
    "pairs",
    None,
    ("skyscript30k",),
    lambda lab: _skyscript(lab, "skyscript30k"),
    "SOTAlign is above SAIL at every number of pairs",
    _judge_skyscript,
    plot=lambda found, path: plots.lines(found, path, ylabel="%"),
)
