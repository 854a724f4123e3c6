"""Retrieval scores of a run: recall, gallery sizes, chance level, and the 1,000-item protocol."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from sotalign_jax import aligner, data, evaluation

FOLD = 1000
"""Rows of x in a gallery of the common "COCO 1K" protocol (Karpathy and Fei-Fei 2015)."""
FILE = "protocol.json"
"""Name of the file with these scores in a run folder."""


class Embedded(NamedTuple):
    """A gallery in the shared space. It is embedded once for all of its scores.

    Attributes:
        x: Features of the rows of x.
        y: Features of the rows of y.
        x_of_y: The matching row of x for every row of y.
        bias_x: Correction of each row of x for hubs. None if the model is not calibrated.
        bias_y: Correction of each row of y for hubs. None if the model is not calibrated.
    """

    x: np.ndarray
    y: np.ndarray
    x_of_y: np.ndarray
    bias_x: np.ndarray | None = None
    bias_y: np.ndarray | None = None

    def part(self, rows_x: np.ndarray, rows_y: np.ndarray, x_of_y: np.ndarray) -> "Embedded":
        """Returns some of the rows. The corrections do not depend on the gallery."""
        bias_x = None if self.bias_x is None else self.bias_x[rows_x]
        bias_y = None if self.bias_y is None else self.bias_y[rows_y]
        return Embedded(self.x[rows_x], self.y[rows_y], x_of_y, bias_x, bias_y)


def embed(model: aligner.Aligner, gallery: data.Gallery) -> Embedded:
    """Embeds a gallery.

    Args:
        model: The model.
        gallery: Matching rows of both modalities.

    Returns:
        The gallery in the shared space.
    """
    x = evaluation.embed(model.heads.x, gallery.x)
    y = evaluation.embed(model.heads.y, gallery.y)
    by = model.calibration
    biases = () if by is None else (np.asarray(by.x(x)), np.asarray(by.y(y)))
    return Embedded(x, y, gallery.x_of_y, *biases)


def recalls(gallery: Embedded) -> dict[str, float]:
    """Computes the scores of `evaluation.evaluate`: plain recall, and "calibrated/..." if known."""
    found = evaluation.retrieval(gallery.x, gallery.y, gallery.x_of_y)
    if gallery.bias_x is not None:
        calibrated = evaluation.retrieval(
            gallery.x, gallery.y, gallery.x_of_y, bias_x=gallery.bias_x, bias_y=gallery.bias_y
        )
        found |= {f"calibrated/{name}": value for name, value in calibrated.items()}
    return found


def scores(gallery: Embedded) -> dict[str, float]:
    """Computes scores that complement `recalls`, for comparison with other work.

    Args:
        gallery: The items to retrieve.

    Returns:
        The size of the gallery ("rows_x" and "rows_y") and the scores of a random ranking
        ("chance/mean/R@1"). If x has more than 1,000 rows, also the scores of `recalls` with the
        prefix "1k/". They are means over disjoint galleries, each of 1,000 random rows of x with
        all their rows of y.

    >>> scores(Embedded(np.eye(4), np.eye(4), np.array([0, 1, 2, 0])))["chance/mean/R@1"]
    25.0
    """
    sizes: dict[str, float] = {"rows_x": len(gallery.x), "rows_y": len(gallery.y)}
    sizes |= chance(len(gallery.x), gallery.x_of_y)
    if len(gallery.x) <= FOLD:
        return sizes
    made = []
    for rows_x, rows_y, owner in folds(len(gallery.x), gallery.x_of_y):
        fold = {"rows_x": FOLD, "rows_y": len(rows_y), **chance(FOLD, owner)}
        made.append(fold | recalls(gallery.part(rows_x, rows_y, owner)))
    means = {f"1k/{name}": float(np.mean([fold[name] for fold in made])) for name in made[0]}
    return sizes | means | {"1k/folds": len(made)}


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
