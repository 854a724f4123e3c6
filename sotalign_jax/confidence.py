"""Probabilities that results of a search are right, fitted to held-out pairs.

The result i of a query with scores s_1 ... s_m over a gallery is right with the probability

    p_i = exp(a s_i) / (sum_j exp(a s_j) + m exp(b)).

Rivals with nearly equal scores share the probability, so p falls in larger and denser galleries
without any change of a and b. The last term stands for a query whose answer is not in the gallery.

A result is right if it is the query's own row. Another row may describe the query just as well, so
the probabilities are lower than a person's judgement of the results.

References:
    C. Guo et al., "On calibration of modern neural networks", ICML 2017, for the slope a, which is
    an inverse temperature.
    A. H. Murphy, R. L. Winkler, "Reliability of subjective probability forecasts of precipitation
    and temperature", Applied Statistics 26 (1977), for reliability curves.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import ArrayLike, Bool, Float, Int
from scipy import special

from sotalign_jax import checks
from sotalign_jax.calibration import Calibration

STRONG = 0.8
"""A result is strong from this probability on."""
# Of 802 clip-art pictures, the first ten reach 0.36 for "a dog" and 0.41 for "a bird", and at most
# 0.22 for texts in languages that the encoder cannot read.
TOGETHER, FIRST = 1 / 3, 10
"""Results are plausible if at most `FIRST` of them together have the probability `TOGETHER`."""
SHARE = 0.25
"""Results that are less probable than this share of the best one are weak: the set of "a red car"
among 802 drawings otherwise ends with tugboats."""
WORDS = ("weak", "plausible", "strong")
"""Words for results, from the least to the most probable."""
LEAST = 10
"""Fewest held-out queries that a confidence is fitted to."""
ABSENT = 0.25
"""Assumed number of queries without an answer, per query that has one."""
QUERIES = 500
"""Most held-out queries that are used. The standard error of the slope is about 4 % then."""
_ITERATIONS = 50
EDGES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Bins of a reliability curve."""


class Confidence(NamedTuple):
    """Parameters of the probabilities of one direction and one kind of scores.

    Attributes:
        slope: The factor a of the scores.
        floor: The term b of an answer that is absent.
    """

    slope: float
    floor: float

    def probabilities(self, scores: Float[ArrayLike, "*n m"]) -> Float[np.ndarray, "*n m"]:
        """Computes the probabilities that results are right.

        Args:
            scores: Scores of queries with all rows of the gallery, shape [m] or [n, m].

        Returns:
            The probabilities in float64, of the same shape. They increase with the score and their
            sum over the gallery is below 1.

        Example:
            >>> Confidence(slope=20.0, floor=0.0).probabilities([0.5, 0.2, 0.1]).round(3)
            array([0.997, 0.002, 0.   ])
        """
        logits = self.slope * np.asarray(scores, np.float64)
        return np.exp(logits - self.normaliser(logits)[..., None])

    def normaliser(self, logits: Float[np.ndarray, "*n m"]) -> Float[np.ndarray, " *n"]:
        """Computes log(sum_j exp(a s_j) + m exp(b)).

        Args:
            logits: The scores times the slope, shape [m] or [n, m].

        Returns:
            The normalisers of the queries, shape [] or [n].
        """
        absent = self.floor + np.log(logits.shape[-1])
        return np.logaddexp(special.logsumexp(logits, axis=-1), absent)


def fit(scores: Float[ArrayLike, "n m"], right: Bool[ArrayLike, "n m"]) -> Confidence | None:
    """Fits a confidence to the scores of held-out queries.

    The slope is one standard error below the most likely one, so that few held-out pairs give low
    probabilities.

    Args:
        scores: Scores of n queries with the m rows of a gallery.
        right: True where a row belongs to the query. A query may have several such rows, which
            count as one answer.

    Returns:
        The confidence. None if fewer than `LEAST` queries have a right and a wrong row, or if
        the scores do not tell them apart.

    Raises:
        InputError: The shapes differ.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> right = np.eye(200, dtype=bool)
        >>> 2.0 < fit(rng.normal(size=(200, 200)) + 3.0 * right, right).slope < 3.0
        True
    """
    scores, right = np.asarray(scores, np.float64), np.asarray(right, bool)
    if scores.ndim != 2 or right.shape != scores.shape:
        raise checks.InputError(
            f"right must have the shape of scores, {scores.shape}, got {right.shape}"
        )
    usable = np.flatnonzero(right.any(axis=1) & ~right.all(axis=1))
    if len(usable) < LEAST:
        return None
    usable = usable[:: -(-len(usable) // QUERIES)]
    scores, right = scores[usable], right[usable]
    # In standard deviations, so that the steps and the ridge of the solver fit all scores.
    centre, scale = scores.mean(), max(scores.std(), np.finfo(np.float32).tiny)
    units = (scores - centre) / scale
    slope, _, error = _newton(units, right)
    slope -= error
    if slope <= 0:
        return None
    _, floor, _ = _newton(units, right, slope=slope)
    return Confidence(float(slope / scale), float(floor + slope * centre / scale))


def _newton(
    scores: np.ndarray, right: np.ndarray, *, slope: float | None = None
) -> tuple[float, float, float]:
    """Maximises the likelihood of slope and floor, or of the floor for a given slope.

    The third result is the standard error of the slope.
    """
    n, m = scores.shape
    powers = scores[..., None] ** np.arange(3)
    own = (powers * right[..., None]).sum(axis=1) / right.sum(axis=1)[:, None]
    absent = np.tile([0.0, 1.0], (n, 1))
    # Each query once with its answer, and once without it. The third line is one query in all,
    # whose answer is a random row. It keeps the slope finite if all queries are answered.
    cases = (
        (1.0, 1.0, own[:, [1]] * [1.0, 0.0]),
        (ABSENT, 0.0, absent),
        (1.0 / n, 1.0, powers[..., 1].mean(axis=1)[:, None] * [1.0, 0.0]),
    )
    free = [1] if slope is not None else [0, 1]
    theta = np.array([1.0 if slope is None else slope, 0.0])
    hessian = np.eye(2)
    for _ in range(_ITERATIONS):
        floor = theta[1] + np.log(m)
        shift = np.maximum((theta[0] * scores).max(axis=1), floor)
        odds = np.exp(theta[0] * scores - shift[:, None])[..., None] * powers
        # The rows of one query count as one answer.
        answer = (odds * right[..., None]).sum(axis=1) / right.sum(axis=1)[:, None]
        wrong = (odds * ~right[..., None]).sum(axis=1)
        nothing = np.exp(floor - shift)
        gradient = np.zeros(2)
        hessian = 1e-6 * np.eye(2)
        for weight, answered, wanted in cases:
            moments = wrong + answered * answer
            total = moments[:, 0] + nothing
            mean = np.stack([moments[:, 1], nothing], axis=1) / total[:, None]
            second = np.array([moments[:, 2] / total, nothing / total])
            gradient += weight * (mean - wanted).sum(axis=0)
            hessian += weight * (np.diag(second.sum(axis=1)) - mean.T @ mean)
        step = np.linalg.solve(hessian[np.ix_(free, free)], gradient[free])
        # Without a limit, the first step from far away may overshoot.
        theta[free] -= np.clip(step, -1.0, 1.0)
        if np.abs(step).max() < 1e-9:
            break
    return float(theta[0]), float(theta[1]), float(np.sqrt(np.linalg.inv(hessian)[0, 0]))


def of_gallery(
    f: Float[ArrayLike, "n d"],
    g: Float[ArrayLike, "m d"],
    x_of_y: Int[ArrayLike, " m"],
    calibrated_by: Calibration | None = None,
) -> dict[str, dict[str, list[float]]]:
    """Fits confidences of both directions, for plain and for calibrated scores.

    Args:
        f: Unit features of held-out rows of the first modality, shape [n, d].
        g: Unit features of held-out rows of the second modality, shape [m, d].
        x_of_y: Row of f that each row of g belongs to.
        calibrated_by: Calibration of the scores. Without one there are plain scores only.

    Returns:
        [slope, floor] by direction ("x_to_y", "y_to_x") and by kind of scores ("plain",
        "calibrated"), as JSON values. Those that could not be fitted are left out.

    Example:
        >>> rows = np.random.default_rng(0).normal(size=(30, 8))
        >>> unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        >>> sorted(of_gallery(unit, unit, np.arange(30)))
        ['x_to_y', 'y_to_x']
    """
    f, g, owner = np.asarray(f), np.asarray(g), np.asarray(x_of_y)
    # Rows of g stay with their row of f, so that no answer is lost.
    kept = np.arange(len(f))[:: max(1, -(-len(f) // QUERIES))]
    chosen = np.flatnonzero(np.isin(owner, kept))
    f, g, owner = f[kept], g[chosen], np.searchsorted(kept, owner[chosen])
    cosines = f @ g.T
    biases = {"plain": (np.zeros(len(f)), np.zeros(len(g)))}
    if calibrated_by is not None:
        biases["calibrated"] = (calibrated_by.x(f), calibrated_by.y(g))
    found: dict[str, dict[str, list[float]]] = {"x_to_y": {}, "y_to_x": {}}
    for kind, (bias_x, bias_y) in biases.items():
        corrected = cosines + bias_x[:, None] + bias_y
        for direction, scores, answers in (
            ("x_to_y", corrected, owner[None, :] == np.arange(len(f))[:, None]),
            ("y_to_x", corrected.T, owner[:, None] == np.arange(len(f))[None, :]),
        ):
            fitted = fit(scores, answers)
            if fitted is not None:
                found[direction][kind] = list(fitted)
    return {direction: fits for direction, fits in found.items() if fits}


def words(probabilities: Float[ArrayLike, " k"]) -> list[str]:
    """Describes the results of one query in words.

    A result is strong from the probability `STRONG` on. It is plausible if it belongs to the
    smallest set of best results that together have the probability `TOGETHER`, the set has at most
    `FIRST` results, and it is at least `SHARE` times as probable as the best one. All others are
    weak.

    Args:
        probabilities: Probabilities of the results, best first.

    Returns:
        One of `WORDS` for each result.

    Example:
        >>> words([0.9, 0.05]), words([0.3, 0.25, 0.1]), words([0.1, 0.1, 0.1])
        (['strong', 'weak'], ['plausible', 'plausible', 'weak'], ['weak', 'weak', 'weak'])
    """
    given = np.asarray(probabilities, np.float64)
    together = np.cumsum(given)
    # The result that reaches the sum still belongs to the set.
    size = int(np.searchsorted(together, TOGETHER)) + 1
    reached = bool(len(given)) and together[-1] >= TOGETHER and size <= FIRST
    least = SHARE * given.max(initial=0.0)
    return [
        "strong"
        if p >= STRONG
        else "plausible"
        if reached and rank < size and p >= least
        else "weak"
        for rank, p in enumerate(given)
    ]


class Bin(NamedTuple):
    """One bin of a reliability curve.

    Attributes:
        low: Lowest probability.
        high: Highest probability.
        claimed: Mean probability of the results in the bin.
        right: Share of them that are right.
        size: Number of results.
    """

    low: float
    high: float
    claimed: float
    right: float
    size: int


def reliability(
    probabilities: Float[ArrayLike, "..."],
    right: Bool[ArrayLike, "..."],
    edges: Sequence[float] = EDGES,
) -> list[Bin]:
    """Compares probabilities with the share of results that are right.

    Args:
        probabilities: Probabilities of results of any queries.
        right: True for the results that are right, of the same shape.
        edges: Ends of the bins, ascending. The last bin includes its upper end.

    Returns:
        The bins that have results.

    Raises:
        InputError: The shapes differ.

    Example:
        >>> reliability([0.9, 0.85, 0.1], [True, False, False], edges=(0, 0.5, 1))[1].right
        0.5
    """
    claimed, true = np.ravel(probabilities).astype(np.float64), np.ravel(right).astype(bool)
    if claimed.shape != true.shape:
        raise checks.InputError(
            f"right has {true.size} values but probabilities has {claimed.size}; pass one for each"
        )
    place = np.clip(np.searchsorted(edges, claimed, side="right") - 1, 0, len(edges) - 2)
    found = []
    for number in np.unique(place):
        chosen = place == number
        low, high = float(edges[number]), float(edges[number + 1])
        share = float(true[chosen].mean())
        found.append(Bin(low, high, float(claimed[chosen].mean()), share, int(chosen.sum())))
    return found


def summary(
    probabilities: Float[ArrayLike, "n m"], right: Bool[ArrayLike, "n m"]
) -> Mapping[str, tuple[float, float]]:
    """Measures the words of results.

    Args:
        probabilities: Probabilities of n queries over a gallery of m rows.
        right: True where a row is right.

    Returns:
        For each word the number of results per query, among the first `FIRST`, and the share of
        them that are right.

    Example:
        >>> summary([[0.9, 0.05]], [[True, False]])["strong"]
        (1.0, 1.0)
    """
    claimed, true = np.asarray(probabilities, np.float64), np.asarray(right, bool)
    order = np.argsort(-claimed, axis=1, kind="stable")[:, :FIRST]
    best, hits = np.take_along_axis(claimed, order, 1), np.take_along_axis(true, order, 1)
    named = np.array([words(row) for row in best])
    return {
        word: (
            float((named == word).sum() / len(named)),
            float(hits[named == word].mean()) if (named == word).any() else float("nan"),
        )
        for word in reversed(WORDS)
    }
