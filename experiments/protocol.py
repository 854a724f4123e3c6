"""Retrieval scores for comparison with other work: gallery sizes, chance level, 1,000 items."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from sotalign_jax import aligner, data, evaluation

FOLD = 1000
"""Rows of x in a gallery of the common "COCO 1K" protocol (Karpathy and Fei-Fei 2015)."""
FILE = "protocol.json"
"""Name of the file with these scores in a run folder."""


def scores(model: aligner.Aligner, gallery: data.Gallery) -> dict[str, float]:
    """Computes scores that complement those of `evaluation.evaluate`.

    Args:
        model: The model to score.
        gallery: The items to retrieve.

    Returns:
        The size of the gallery ("rows_x" and "rows_y") and the scores of a random ranking
        ("chance/mean/R@1"). If x has more than 1,000 rows, also the scores of
        `evaluation.evaluate` with the prefix "1k/". They are means over disjoint galleries, each of
        1,000 random rows of x with all their rows of y.

    >>> from sotalign_jax import heads
    >>> model = aligner.Aligner(heads.build_heads(4, 3, 2), {})
    >>> scores(model, data.gallery(np.eye(4), np.eye(3)[[0, 1, 2, 0]]))["chance/mean/R@1"]
    25.0
    """
    sizes = {"rows_x": len(gallery.x), "rows_y": len(gallery.y)}
    if len(gallery.x) <= FOLD:
        return sizes | chance(len(gallery.x), gallery.x_of_y)
    x, y = model.embed_x(gallery.x), model.embed_y(gallery.y)
    # The potentials do not depend on the gallery, so they are computed once for all folds.
    by = model.calibration
    bias_x, bias_y = (None, None) if by is None else (by.x(x), by.y(y))
    made = []
    for rows_x, rows_y, owner in folds(len(x), gallery.x_of_y):
        f, g = x[rows_x], y[rows_y]
        fold = {"rows_x": FOLD, "rows_y": len(g), **chance(FOLD, owner)}
        fold |= evaluation.retrieval(f, g, owner)
        if bias_x is not None and bias_y is not None:
            biases = {"bias_x": bias_x[rows_x], "bias_y": bias_y[rows_y]}
            calibrated = evaluation.retrieval(f, g, owner, **biases)
            fold |= {f"calibrated/{name}": value for name, value in calibrated.items()}
        made.append(fold)
    means = {f"1k/{name}": float(np.mean([fold[name] for fold in made])) for name in made[0]}
    return sizes | chance(len(x), gallery.x_of_y) | means | {"1k/folds": len(made)}


def folds(n: int, x_of_y: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Splits a gallery into disjoint random galleries of 1,000 rows of x.

    Args:
        n: Number of rows of x.
        x_of_y: The matching row of x for every row of y.

    Yields:
        Rows of x, their rows of y, and `x_of_y` of the smaller gallery.
    """
    # The order is random because files are often sorted. A fixed seed gives all methods the same
    # galleries.
    order = np.random.default_rng(0).permutation(n)
    for start in range(0, n - FOLD + 1, FOLD):
        place = np.full(n, -1)
        place[order[start : start + FOLD]] = np.arange(FOLD)
        owner = place[x_of_y]
        yield order[start : start + FOLD], np.flatnonzero(owner >= 0), owner[owner >= 0]


def chance(n: int, x_of_y: np.ndarray) -> dict[str, float]:
    """Returns the expected R@k of a random ranking, averaged over both directions.

    Args:
        n: Number of rows of x.
        x_of_y: The matching row of x for every row of y.

    >>> chance(2, np.array([0, 0, 0, 1]))["chance/mean/R@1"]
    50.0
    """
    m, own, by = len(x_of_y), np.bincount(x_of_y, minlength=n), evaluation.chance
    return {f"chance/mean/R@{k}": (by(m, k, own) + by(n, k)) / 2 for k in evaluation.KS}


def of_galleries(
    model: aligner.Aligner, galleries: Mapping[str, data.Gallery | None]
) -> dict[str, float]:
    """Returns `scores` of several galleries, with the gallery's name as a prefix.

    Args:
        model: The model to score.
        galleries: Galleries by name. None is skipped.
    """
    return {
        f"{name}/{key}": value
        for name, gallery in galleries.items()
        if gallery is not None
        for key, value in scores(model, gallery).items()
    }


def at_chance(results: Mapping[str, Any]) -> bool:
    """Returns True if no R@k on validation is three standard errors above chance.

    >>> at_chance({"val/rows_x": 100, "val/mean/R@1": 2.0, "val/chance/mean/R@1": 1.0})
    True
    """
    # The standard error is that of a proportion over the queries of x.
    names = "val/mean", "val/chance/mean"
    known = [k for k in evaluation.KS if {f"{name}/R@{k}" for name in names} <= results.keys()]
    known = known if results.get("val/rows_x", 0) > 0 else []
    chances = {k: results[f"val/chance/mean/R@{k}"] / 100 for k in known}
    errors = {k: math.sqrt(max(p * (1 - p), 0) / results["val/rows_x"]) for k, p in chances.items()}
    limits = {k: 100 * (chances[k] + 3 * errors[k]) for k in known}
    return bool(known) and all(results[f"val/mean/R@{k}"] <= limits[k] for k in known)
