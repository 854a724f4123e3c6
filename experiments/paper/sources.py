"""Where pairs come from, and which encoders embed them."""

import itertools
from collections.abc import Mapping

from experiments.paper import plots, views
from experiments.paper.claims import Verdict, all_above, difference
from experiments.paper.entries import Column, Entry, Grid, Row, Values
from experiments.paper.lab import Changes, Lab
from experiments.paper.main_tables import MEAN, RETRIEVAL


def both_methods(sources: Mapping[str, Changes]) -> dict[str, Row]:
    """A row of SAIL and one of SOTAlign for each source."""
    return {
        f"{name}, {title}": Row({**changes, "method": title.lower()}, f"{name}/{title}")
        for name, changes in sources.items()
        for title in ("SAIL", "SOTAlign")
    }


def gains(values: Values) -> Verdict:
    """Claim: SOTAlign is above SAIL for every source, in every column of `RETRIEVAL`."""
    names = dict.fromkeys(row.rpartition(", ")[0] for row in values.grid.rows)
    return all_above(
        {
            f"{name}, {column}": difference(
                values.at(f"{name}, SOTAlign", column), values.at(f"{name}, SAIL", column)
            )
            for name in names
            for column in RETRIEVAL
        }
    )


# --- T2: where the pairs come from -------------------------------------------------------------


def paired_sources(lab: Lab) -> dict[str, Changes]:
    """Sources of pairs, with unpaired rows of one source; none when only some files are given."""
    given = lab.given("pairs/")
    if given or "main" in lab.files:
        if not (given and "main" in lab.files):
            return {}
        return {"CC3M": {}, **{name: {"use": f"pairs/{name}"} for name in given}}
    own = views.PAIRED
    sizes = {
        "data.n_pairs": lab.scale.source_pairs,
        "data.n_unpaired": lab.scale.source_unpaired,
    }
    return {n: {"use": f"view/collections/{n}/{own}/{own}", **sizes} for n in views.COLLECTIONS}


def _paired_sources(lab: Lab) -> list[Grid]:
    rows = both_methods(paired_sources(lab))
    grid = Grid("", "pairs, method", rows, RETRIEVAL, lab.scale.seeds, "T2_paired_source")
    return [grid] if rows else []


T2 = Entry(
    "T2",
    "Sources of pairs",
    "the collection that the pairs come from; unpaired rows come from one",
    "collections of the bundled pictures; unpaired rows are clipart",
    ("main", "pairs/NAME"),
    _paired_sources,
    "SOTAlign is above SAIL whatever the pairs' source",
    lambda found: gains(found[""]),
    paper="T2_paired_source",
)


# --- T3, A2, F7: encoders ----------------------------------------------------------------------


def encoder_pairs(lab: Lab, *, weakest: bool = False) -> dict[str, Changes]:
    """Pairs of encoders: files, or views of the pictures by fewer features."""
    given = lab.given("encoders/")
    if given:
        pairs: dict[str, Changes] = {n: {"use": f"encoders/{n}", "given": True} for n in given}
        return {"DINOv3+NV-Embed-v2": {}, **pairs} if "main" in lab.files else pairs
    if "main" in lab.files:
        return {}
    images, texts = (dict(side) for side in views.ENCODERS)
    if weakest:
        images |= {views.WEAKEST[0][0]: views.WEAKEST[0][1]}
        texts |= {views.WEAKEST[1][0]: views.WEAKEST[1][1]}
    full = max(images.values()), max(texts.values())
    return {
        f"{image} + {text}": {} if (d_x, d_y) == full else {"use": f"view/encoders/{d_x}/{d_y}"}
        for (image, d_x), (text, d_y) in itertools.product(images.items(), texts.items())
    }


_ENCODERS = "views of the bundled pictures by their leading features, as weaker encoders"
_ENCODER_CLAIM = "SOTAlign is above SAIL for every pair of encoders"


def _encoders(lab: Lab) -> list[Grid]:
    rows = both_methods(encoder_pairs(lab))
    grid = Grid("", "encoders, method", rows, RETRIEVAL, lab.scale.seeds, "T3_A2_encoders")
    return [grid] if rows else []


def _encoders_in_full(lab: Lab) -> list[Grid]:
    columns = {"mutual k-NN": Column("mutual_knn/percent", paper="mutual_kNN_pct"), **RETRIEVAL}
    return [
        Grid("", grid.corner, grid.rows, columns, grid.seeds, grid.paper) for grid in _encoders(lab)
    ]


T3 = Entry(
    "T3",
    "Encoders",
    "the pair of frozen encoders",
    _ENCODERS,
    ("main", "encoders/IMAGE+TEXT"),
    _encoders,
    _ENCODER_CLAIM,
    lambda found: gains(found[""]),
    paper="T3_A2_encoders",
)
A2 = Entry(
    "A2",
    "Encoders, with their mutual k-NN",
    "the pair of frozen encoders",
    _ENCODERS,
    ("main", "encoders/IMAGE+TEXT"),
    _encoders_in_full,
    _ENCODER_CLAIM,
    lambda found: gains(found[""]),
    paper="T3_A2_encoders",
)


def _similarity(lab: Lab) -> list[Grid]:
    rows = {n: Row(changes) for n, changes in encoder_pairs(lab, weakest=True).items()}
    columns = {"mutual k-NN (%)": Column("mutual_knn/percent"), "MeanR@1": Column(MEAN)}
    return [Grid("", "encoders", rows, columns, lab.scale.seeds)] if rows else []


F7 = Entry(
    "F7",
    "Retrieval against the encoders' mutual k-NN",
    "the pair of frozen encoders, weaker ones too",
    _ENCODERS,
    ("main", "encoders/IMAGE+TEXT"),
    _similarity,
    "mutual k-NN predicts MeanR@1 (paper: r = 0.95)",
    lambda found: plots.correlation(found[""], sign=1, paper=0.95),
    plot=plots.scatter,
)
