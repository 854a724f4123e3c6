"""Rows and columns that several tables use. Each function returns settings by label."""

import itertools
from collections.abc import Iterable

from experiments.paper.panels import paper_results
from experiments.paper.runs import Setup
from experiments.paper.sizes import REFINED_TEACHER, TUNED_TEACHER, Settings
from experiments.paper.sources import MAIN
from experiments.paper.table import Above, available

Labelled = dict[str, Settings]
"""Settings by label of a row or a column."""
MEAN_RECALL: Settings = {"metric": "test/mean/R@1"}
SAIL: Settings = {"method": "sail"}
SOTALIGN: Settings = {"method": "sotalign"}
TUNED_SOTALIGN: Settings = {**SOTALIGN, **TUNED_TEACHER}
BOTH_METHODS: Labelled = {"SAIL": SAIL, "SOTAlign": SOTALIGN}
PAPERS_METHODS = {
    "SAIL, more pairs": "sup/SAIL-1M",
    "SAIL": "sup/SAIL",
    "STRUCTURE": "sup/STRUCTURE",
    "SAIL (semi)": "semi/SAIL",
    "STRUCTURE (semi)": "semi/STRUCTURE",
    "NNCLR": "semi/NNCLR",
    "S-CLIP": "semi/S-CLIP",
    "SOTAlign": "semi/SOTAlign",
}
"""The paper's names of the methods of `methods`."""


# --- rows ----------------------------------------------------------------------------------------


def methods(setup: Setup) -> Labelled:
    """Returns all methods that the paper compares, and SOTAlign with another start or teacher."""
    return {
        "SAIL, more pairs": {**SAIL, "data.n_pairs": setup.sizes.all_pairs},
        "SAIL": SAIL,
        "STRUCTURE": {"method": "structure"},
        "SAIL (semi)": {"method": "sail_semi"},
        "STRUCTURE (semi)": {"method": "structure_semi"},
        "NNCLR": {"method": "nnclr"},
        "S-CLIP": {"method": "sclip"},
        "SOTAlign": SOTALIGN,
        "SOTAlign, teacher start": {**SOTALIGN, "start": "teacher"},
        "SOTAlign (tuned CCA)": TUNED_SOTALIGN,
    }


def every_method() -> Above:
    """Returns the claims that SOTAlign, with either teacher, is above every other method."""
    others = ("SAIL", "STRUCTURE", "SAIL (semi)", "STRUCTURE (semi)", "NNCLR", "S-CLIP")
    return [*itertools.product(("SOTAlign", "SOTAlign (tuned CCA)"), others)]


def domain_methods(setup: Setup) -> Labelled:
    """Returns the methods that are compared on satellite images and on speech."""
    return {
        "CCA": {"method": "cca"},
        "SAIL": SAIL,
        "STRUCTURE": {"method": "structure"},
        "SOTAlign": SOTALIGN,
        "tuned CCA": {"method": "tuned_cca"},
        "SOTAlign (tuned CCA)": {**SOTALIGN, **setup.sizes.tuned_start},
        "refined CCA": {"method": "refined_cca"},
        "SOTAlign (refined CCA)": {**SOTALIGN, **REFINED_TEACHER},  # cannot be a start
        "align": {"method": "align"},
    }


def every_domain_method() -> Above:
    """Returns the claims that SOTAlign is above its teacher, SAIL and STRUCTURE."""
    teachers = {"SOTAlign": "CCA", "SOTAlign (tuned CCA)": "tuned CCA"}
    return [(ours, other) for ours, cca in teachers.items() for other in (cca, "SAIL", "STRUCTURE")]


def sizes_of(setting: str, numbers: Iterable[int]) -> Labelled:
    """Returns a row per number of pairs or of unpaired rows, such as "1,000"."""
    return {f"{n:,}": {f"data.{setting}": n} for n in numbers}


def sue_methods() -> Labelled:
    """Returns the other methods of the protocol of SUE, with heads as small as SUE's."""
    return {
        "CSA": {"method": "csa"},
        "Contrastive": {"method": "contrastive_mlp", "head": "mlp", "dim": 8},
        "SUE": {"method": "sue"},
    }


def encoder_runs(setup: Setup) -> Labelled:
    """Returns SAIL and SOTAlign for every pair of encoders, if there are several."""
    encoders = setup.sources.names.encoders
    if len(encoders) < 2:
        return {}
    return {
        f"{encoder}/{label}": {"data.encoders": encoder, **method}
        for encoder in encoders
        for label, method in BOTH_METHODS.items()
    }


def encoder_claims(setup: Setup) -> Above:
    """Returns the claim that SOTAlign is above SAIL for every pair of encoders."""
    encoders = setup.sources.names.encoders if encoder_runs(setup) else ()
    return [(f"{encoder}/SOTAlign", f"{encoder}/SAIL") for encoder in encoders]


# --- columns -------------------------------------------------------------------------------------


def retrieval() -> Labelled:
    """Returns the columns of most tables: classification, text to image, image to text."""
    return {"zero-shot": {"metric": "ImageNet/top1"}, **both_ways(1)}


def both_ways(cut: int, gallery: str = "test", prefix: str = "") -> Labelled:
    """Returns recall from texts to images and back.

    Args:
        cut: Number of neighbours.
        gallery: Gallery of the metric.
        prefix: Text before the label.
    """
    return {
        f"{prefix}T2I R@{cut}": {"metric": f"{gallery}/y_to_x/R@{cut}"},
        f"{prefix}I2T R@{cut}": {"metric": f"{gallery}/x_to_y/R@{cut}"},
    }


def sue_columns(setup: Setup) -> tuple[Labelled, dict[str, str]]:
    """Returns the columns of the protocol of SUE, and the paper's labels by ours."""
    columns: Labelled = {}
    named = {}
    for source, n_pairs, key in setup.sources.names.sue:
        shown = setup.sources.names.label if source == MAIN else source
        data = {"data.pairs": source, "data.n_pairs": n_pairs, "data.split": "sue"}
        for way, direction in {"I2T": "x_to_y", "T2I": "y_to_x"}.items():
            label = f"{shown}, {n_pairs} pairs, {way} R@5"
            columns[label] = {"metric": f"test/{direction}/R@5", **data}
            named[label] = f"{key}_{way}"
    return columns, named


def classes(names: Iterable[str]) -> Labelled:
    """Returns the top-1 accuracy on classification sets."""
    return {name: {"metric": f"{name}/top1", "classes": CLASSES[name]} for name in names}


CLASSES = {
    "Food101": 101,
    "CIFAR10": 10,
    "CIFAR100": 100,
    "Aircraft": 100,
    "DTD": 47,
    "Flowers": 102,
    "ImageNet": 1000,
    "Intel": 6,
}
"""Numbers of classes of the classification sets."""


def alphas(setup: Setup) -> Labelled:
    """Returns MeanR@1 of SOTAlign by alpha."""
    return {
        f"{alpha:g}": {**SOTALIGN, **MEAN_RECALL, "sotalign.alpha": alpha}
        for alpha in setup.sizes.alphas
    }


def known_retrieval(setup: Setup) -> dict[str, str]:
    """Returns the metrics of `retrieval` whose data the sources have, by label."""
    metrics = {label: settings["metric"] for label, settings in retrieval().items()}
    return {label: metric for label, metric in metrics.items() if available(setup, metric)}


# --- data of panels ------------------------------------------------------------------------------


def speech(setup: Setup) -> Settings:
    """Returns the settings of runs on speech, with all unpaired rows."""
    name = setup.sources.names.speech
    return {"data.pairs": name, "data.test": name, "data.n_unpaired": None}


def satellite(setup: Setup, name: str = "") -> Settings:
    """Returns the settings of runs on satellite images, with all unpaired rows."""
    name = name or setup.sources.names.satellite
    return {"data.pairs": name, "data.test": name, "data.n_unpaired": None}


def pair_sources(setup: Setup) -> Labelled:
    """Returns the sources of pairs by label, if there are several."""
    others = [
        n for n in setup.sources.names.collections if n != MAIN and setup.sources.has(n, "xy")
    ]
    if not others:
        return {}
    named = {setup.sources.names.label: MAIN, **{name: name for name in others}}
    return {label: {"data.pairs": name} for label, name in named.items()}


Pool = tuple[str, str]
"""Sources of unpaired images and of unpaired texts."""


def pools(setup: Setup) -> dict[str, Pool]:
    """Returns the pools to compare, by label. A single pool cannot be compared."""
    at, label = setup.sources, setup.sources.names.label
    if at.given:
        listed = [row.split("|") for row in paper_results()["A1_unpaired_source"] if "|" in row]
        named = [[MAIN if name == label else name for name in row] for row in listed]
        pairs = [(x, y) for x, y in named if at.has(x, "x") and at.has(y, "y")]
    else:
        images, texts = ([n for n in at.names.collections if at.has(n, side)] for side in "xy")
        pairs = [(name, name) for name in images if name in texts]
        pairs += [(name, MAIN) for name in images]
        pairs += [(MAIN, name) for name in texts]
    if len(set(pairs)) < 2:
        return {}
    pairs += [("noise", "noise"), ("noise", MAIN), (MAIN, "noise")]
    return {f"{x}|{y}".replace(MAIN, label): (x, y) for x, y in dict.fromkeys(pairs)}


def real_pools(setup: Setup) -> list[str]:
    """Returns the labels of the pools without noise."""
    return [label for label in pools(setup) if "noise" not in label]


def pool_data(setup: Setup, pool: Pool) -> Settings:
    """Returns the settings of a pool. All pools have the same number of rows."""
    images, texts = pool
    return {
        "data.images": images,
        "data.texts": texts,
        "data.n_unpaired": setup.sizes.pool_rows,
    }


def pool_runs(setup: Setup, method: Settings, chosen: dict[str, Pool] | None = None) -> Labelled:
    """Returns a run of a method for each pool, or for the chosen ones."""
    asked = pools(setup) if chosen is None else chosen
    return {label: {**method, **pool_data(setup, pool)} for label, pool in asked.items()}
