"""Cross-validation of canonical correlation analyses on the pairs.

A held-out pair is scored by the reciprocal rank of its own partner among all held-out rows.
`Search.linear` and `Search.kernel` climb over a grid of options to a local maximum of the mean
score. Both use only the Gram matrices of a fold. A kernel CCA is a linear CCA of kernel features,
so they share all other code.

References:
    M. Stone, "Cross-validatory choice and assessment of statistical predictions", Journal of the
    Royal Statistical Society B 36 (1974).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from sotalign_jax import checks
from sotalign_jax.cca import canonical
from sotalign_jax.cca.moments import unit
from sotalign_jax.duplicates import first_duplicate, group_duplicates

RIDGES = tuple(10.0 ** (k / 2) for k in range(-4, 7))
"""Ridges that are tried, relative to the mean eigenvalue: 0.01 to 1,000 in half decades."""
BANDWIDTHS = tuple(10.0 ** (k / 2) for k in range(-4, 3))
"""Bandwidths that are tried, in units of 1 / the median squared distance of two rows. 0.01 is
nearly linear, and 10 uses close neighbours only."""
POWERS = (0.0, 0.5, 1.0, 1.5, 2.0)
"""Powers of rho that are tried. Cross-validation chooses 0.5 to 1.5 on photographs, and 1 to 2 on
speech."""
DIRECTIONS = 512
"""Largest number of directions that are scored, and that a chosen teacher keeps."""
# Folds of one repetition. A third of the pairs is held out.
_SPLITS = 3
# Number of pairs to score. Fewer pairs are split again into other folds, at most 10 times.
_SCORED, _REPETITIONS = 1000, 10
# Largest numbers of pairs of a fold that are fitted on and scored. They bound the time.
_FIT_ROWS, _HELD_ROWS = 1000, 500
# Principal directions of each side that are kept. With 1,000 the chosen options were no better on
# five data sets.
_RANK = 400


class Fold(NamedTuple):
    """One split of the pairs.

    Attributes:
        fit: Row numbers of the pairs to fit on.
        held: Row numbers of the pairs to score.
    """

    fit: Int[np.ndarray, " n"]
    held: Int[np.ndarray, " m"]


class Side(NamedTuple):
    """One modality of one fold in the principal coordinates of the rows fitted on.

    Attributes:
        fit: Coordinates of the rows fitted on, scaled to orthonormal columns.
        variances: Variance of each coordinate, relative to the mean over all features.
        held: Coordinates of the held-out rows, relative to the square root of that mean.
    """

    fit: Float[np.ndarray, "n r"]
    variances: Float[np.ndarray, " r"]
    held: Float[np.ndarray, "m r"]


class Options(NamedTuple):
    """Options of a CCA.

    Attributes:
        ridge_x: Ridge of the first modality, relative to the mean eigenvalue of its covariance.
        ridge_y: Ridge of the second modality.
        power: Power of rho that weighs the directions.
        gamma_x: Bandwidth of the Gaussian kernel, None if the CCA is linear.
        gamma_y: Bandwidth of the second modality.
    """

    ridge_x: float
    ridge_y: float
    power: float
    gamma_x: float | None = None
    gamma_y: float | None = None


# --- rows, folds and scores ---------------------------------------------------------------------


def order(*sides: np.ndarray, seed: int = 0) -> Int[np.ndarray, " n"]:
    """Returns a random permutation of the pairs that depends only on their content.

    Pairs are sorted by a random projection of their unit rows and then shuffled. The same pairs in
    another order, or in another scale, give the same sequence of pairs.

    Args:
        *sides: Arrays with one row per pair.
        seed: Seed of the projection and of the shuffle.

    Returns:
        Row numbers in the new order.

    Example:
        >>> rows = np.random.default_rng(1).normal(size=(5, 3))
        >>> bool((rows[order(rows)] == rows[::-1][order(rows[::-1])]).all())
        True
    """
    rng = np.random.default_rng(seed)
    # Continuous projections of different pairs differ, so their order is unambiguous.
    keys = sum(unit(side) @ rng.normal(size=side.shape[1]) for side in sides)
    return np.argsort(keys)[rng.permutation(len(sides[0]))]


def groups(pairs_x: np.ndarray, pairs_y: np.ndarray) -> Int[np.ndarray, " n"]:
    """Groups pairs that share a row, such as the captions of one picture.

    Pairs of one group must not be fitted on and held out at the same time.

    Args:
        pairs_x: Paired embeddings of the first modality.
        pairs_y: Paired embeddings of the second modality.

    Returns:
        The group of every pair. Groups of more than a third of the pairs are divided.

    Example:
        >>> x, y = np.eye(9)[[0, 0, 1, 2, 3, 4, 5, 6, 7]], np.eye(9)
        >>> [len(set(groups(x, y)[:2])), len(set(groups(x, y)))]  # the first two share a row of x
        [1, 8]
    """
    first_x, first_y = first_duplicate(pairs_x), first_duplicate(pairs_y)
    return group_duplicates(first_x, first_y, largest=len(pairs_x) // _SPLITS)


def folds(
    shuffled: Int[np.ndarray, " n"],
    group: Int[np.ndarray, " n"] | None = None,
    *,
    splits: int = _SPLITS,
    repetitions: int | None = None,
    fit_rows: int | None = _FIT_ROWS,
    seed: int = 0,
) -> list[Fold]:
    """Splits pairs into folds, repeatedly if there are few of them.

    Args:
        shuffled: Row numbers as `order` returns them.
        group: The group of every row, see `groups`. Of a group that is held out, one pair is
            scored.
        splits: Folds of one repetition.
        repetitions: Number of repetitions. None splits fewer than 1,000 pairs again, at most ten
            times.
        fit_rows: Largest number of pairs to fit on. None takes all.
        seed: Seed of the repetitions.

    Returns:
        The folds of every repetition, with at most 500 pairs to score each.

    Example:
        >>> [len(fold.held) for fold in folds(np.arange(900))[:3]]
        [300, 300, 300]
    """
    rng, n = np.random.default_rng(seed), len(shuffled)
    if repetitions is None:
        # Few pairs give noisy scores, which more repetitions average out.
        repetitions = min(max(1, round(_SCORED / n)), _REPETITIONS)
    made = []
    for _ in range(repetitions):
        own = np.arange(n) if group is None else group[shuffled]
        _, first = np.unique(own, return_index=True)
        first.sort()  # the first pair of every group, in the shuffled order
        for part in np.array_split(first, min(splits, len(first))):
            fit, held = shuffled[~np.isin(own, own[part])], shuffled[part]
            made.append(Fold(fit[:fit_rows], held[:_HELD_ROWS]))
        shuffled = rng.permutation(shuffled)
    return made


def reciprocal_ranks(
    f: Float[np.ndarray, "m k"], g: Float[np.ndarray, "m k"]
) -> Float[np.ndarray, " m"]:
    """Computes 1 / rank of each row's partner by cosine, averaged over both directions.

    Ties count half, so features without information score no better than chance.

    Args:
        f: Features of the first modality.
        g: Features of the second modality. Row i is the partner of row i of f.

    Returns:
        One score in (0, 1] per pair.

    Example:
        >>> reciprocal_ranks(np.eye(2), np.eye(2))
        array([1., 1.])
    """
    cosines = unit(f) @ unit(g).T
    own = np.diag(cosines)
    total = np.zeros(len(own))
    for scores in (cosines, cosines.T):
        ahead = (scores > own[:, None]).sum(axis=1)
        # The partner ties with itself, which does not count.
        ties = (scores == own[:, None]).sum(axis=1) - 1
        total += 0.5 / (1.0 + ahead + 0.5 * ties)
    return total


def clearly_higher(
    scores: Float[np.ndarray, " m"],
    others: Float[np.ndarray, " m"],
    held: Int[np.ndarray, " m"],
    *,
    errors: float = 1.0,
) -> bool:
    """Returns True if scores are higher than others by more than some standard errors.

    The error is that of the mean difference over pairs. A pair that several repetitions hold out
    counts once.

    Args:
        scores: Scores of held-out pairs.
        others: Scores of the same pairs.
        held: Number of the pair of every score.
        errors: Number of standard errors.

    Returns:
        True if the mean difference exceeds them.

    Example:
        >>> clearly_higher(np.array([0.9, 0.8]), np.array([0.5, 0.5]), np.arange(2))
        True

    References:
        L. Breiman et al., "Classification and regression trees" (1984), the rule of one standard
        error.
    """
    # Mean gain of every pair over the repetitions that held it out.
    times = np.bincount(held)
    each = np.bincount(held, weights=scores - others)[times > 0] / times[times > 0]
    error = each.std(ddof=min(1, len(each) - 1)) / math.sqrt(len(each))
    return bool(each.mean() > errors * error)


class Problem(NamedTuple):
    """A CCA in principal coordinates, with held-out pairs to score it on.

    Attributes:
        x: Variances of the first modality's coordinates.
        y: Variances of the second modality's coordinates.
        xy: Cross-covariance of the coordinates.
        held_x: Held-out rows of the first modality.
        held_y: Their partners.
    """

    x: Float[np.ndarray, " r"]
    y: Float[np.ndarray, " s"]
    xy: Float[np.ndarray, "r s"]
    held_x: Float[np.ndarray, "m r"]
    held_y: Float[np.ndarray, "m s"]

    def scores(
        self, ridges: tuple[float, float], powers: Sequence[float]
    ) -> Float[np.ndarray, "p m"]:
        """Fits a CCA and scores it on the held-out pairs.

        Args:
            ridges: Ridges of both modalities.
            powers: Powers of rho, which share one decomposition.

        Returns:
            The reciprocal ranks of the held-out pairs, one row per power.
        """
        root_x = canonical.diagonal_root(self.x, ridges[0])
        root_y = canonical.diagonal_root(self.y, ridges[1])
        left, rho, right = canonical.leading(root_x[:, None] * self.xy * root_y, DIRECTIONS)
        f, g = (self.held_x * root_x) @ left, (self.held_y * root_y) @ right
        weights = [rho**power for power in powers]
        return np.stack([reciprocal_ranks(f * weight, g * weight) for weight in weights])


# --- the search ---------------------------------------------------------------------------------


def climb(
    score: Callable[[tuple[int, ...]], float],
    starts: Iterable[tuple[int, ...]],
    moves: Sequence[tuple[int, ...]],
    sizes: tuple[int, ...],
) -> tuple[int, ...]:
    """Climbs over a grid from the best start to a point that no move improves.

    Args:
        score: Returns the value of a point. It is called repeatedly, and should cache its results.
        starts: Points to start from.
        moves: Steps that are tried from every point.
        sizes: Number of points along each axis.

    Returns:
        The best point found. Among equal points the first one.

    Example:
        >>> climb(lambda point: -abs(point[0] - 3), [(0,), (8,)], [(1,), (-1,)], (9,))
        (3,)
    """
    best = max(starts, key=score)
    # The score rises in every iteration and the grid is finite, so the loop ends.
    while True:
        steps = [tuple(a + b for a, b in zip(best, move, strict=True)) for move in moves]
        inside = [p for p in steps if all(0 <= i < n for i, n in zip(p, sizes, strict=True))]
        found = max([best, *inside], key=score)
        if found == best:
            return best
        best = found


class Search:
    """Cross-validates CCAs of the same pairs on the same folds.

    Args:
        pairs_x: Paired embeddings of the first modality, at least `checks.MIN_PAIRS` rows.
        pairs_y: Paired embeddings of the second modality.
        seed: Seed of the folds.

    Example:
        >>> rows = np.random.default_rng(0).normal(size=(40, 3))
        >>> search = Search(rows, rows[:, ::-1])
        >>> float(search.scores(search.linear()).mean())
        1.0
    """

    def __init__(self, pairs_x: np.ndarray, pairs_y: np.ndarray, *, seed: int = 0):
        self._pairs = {"x": pairs_x, "y": pairs_y}
        shuffled = order(pairs_x, pairs_y, seed=seed)
        self._folds = folds(shuffled, groups(pairs_x, pairs_y), seed=seed)
        self._typical = {side: _typical(rows[shuffled]) for side, rows in self._pairs.items()}
        self._sides: dict[tuple[str, int, float | None], Side] = {}
        self._problems: dict[tuple[Any, ...], Problem] = {}
        self._tables: dict[tuple[Options, tuple[float, ...]], np.ndarray] = {}

    def linear(
        self, *, ridges: tuple[float, float] | None = None, power: float | None = None
    ) -> Options:
        """Chooses the options of a linear CCA.

        Args:
            ridges: Ridges of both sides, None to choose them.
            power: Power of rho, None to choose it.

        Returns:
            The options of the highest mean score on the folds. `for_all_pairs` adapts them to all
            pairs.
        """
        axes = [RIDGES, RIDGES] if ridges is None else [ridges[:1], ridges[1:]]
        diagonal = range(2, 9) if ridges is None else range(1)  # 0.1 to 100 on both sides
        return self._climb(
            lambda x, y: Options(x, y, 0.0),
            axes,
            [(k, k) for k in diagonal],
            [(1, 0), (-1, 0), (0, 1), (0, -1)],
            POWERS if power is None else (power,),
        )

    def kernel(
        self,
        start: Options,
        *,
        gammas: tuple[float | None, float | None] = (None, None),
        fixed: bool = False,
        power: float | None = None,
    ) -> Options:
        """Chooses the options of a kernel CCA, given those of the linear one.

        The search starts at the ridges of the linear CCA, with the same bandwidth on both sides.

        Args:
            start: Options of the linear CCA.
            gammas: Bandwidths of both sides, None to choose them.
            fixed: True to keep the ridges of `start`.
            power: Power of rho, None to choose it.

        Returns:
            The options of the highest mean score on the folds. `for_all_pairs` adapts them to all
            pairs.
        """
        axes: list[Sequence[float]] = [
            [c / self._typical[side] for c in BANDWIDTHS] if gamma is None else [gamma]
            for side, gamma in zip("xy", gammas, strict=True)
        ]
        # One common factor for both ridges: four free axes would take too many fits.
        axes.append([1.0] if fixed else RIDGES)
        sizes = [len(axis) - 1 for axis in axes]
        diagonal = range(1, len(BANDWIDTHS) - 1)
        # The axis of a given option has only the index 0. Other ridges start at the factor 1.
        return self._climb(
            lambda x, y, r: Options(start.ridge_x * r, start.ridge_y * r, 0.0, x, y),
            axes,
            [
                (min(k, sizes[0]), min(k, sizes[1]), sizes[2] and RIDGES.index(1.0))
                for k in diagonal
            ],
            [(1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0), (0, 0, 1), (0, 0, -1)],
            POWERS if power is None else (power,),
        )

    def scores(self, options: Options) -> Float[np.ndarray, " m"]:
        """Returns the reciprocal ranks of all held-out pairs, fold by fold.

        Args:
            options: Options of the CCA.

        Returns:
            One score per held-out pair.
        """
        # A table holds one row per power, and is cached under power 0.
        return self._table(options._replace(power=0.0), (options.power,))[0]

    def clearly_better(self, options: Options, simpler: Options) -> bool:
        """Returns True if `options` beats `simpler` clearly, see `clearly_higher`.

        Args:
            options: Options of the more complex CCA.
            simpler: Options of the simpler CCA.

        Returns:
            True if `options` is clearly better.
        """
        held = np.concatenate([fold.held for fold in self._folds])
        return clearly_higher(self.scores(options), self.scores(simpler), held)

    def for_all_pairs(self, options: Options) -> Options:
        """Scales the ridges from the size of a fold to all pairs.

        Args:
            options: Options that were chosen on the folds.

        Returns:
            The options for a fit on all pairs.
        """
        # More pairs make less noisy covariances, which need a smaller ridge.
        share = np.mean([len(fold.fit) for fold in self._folds]) / len(self._pairs["x"])
        ridges = float(options.ridge_x * share), float(options.ridge_y * share)
        return options._replace(ridge_x=ridges[0], ridge_y=ridges[1])

    def _climb(
        self,
        make: Callable[..., Options],
        axes: Sequence[Sequence[float]],
        starts: Iterable[tuple[int, ...]],
        moves: Sequence[tuple[int, ...]],
        powers: tuple[float, ...],
    ) -> Options:
        """Climbs over the values of `axes` with the best power at every point."""

        def at(point: tuple[int, ...]) -> Options:
            return make(*(axis[i] for axis, i in zip(axes, point, strict=True)))

        def means(point: tuple[int, ...]) -> np.ndarray:
            return self._table(at(point), powers).mean(axis=1)

        # All powers of a point share one eigendecomposition, so powers need no axis.
        best = climb(lambda p: means(p).max(), starts, moves, tuple(map(len, axes)))
        return at(best)._replace(power=powers[int(means(best).argmax())])

    def _table(self, options: Options, powers: tuple[float, ...]) -> np.ndarray:
        """Returns the scores of all held-out pairs, one row per power."""
        if (options, powers) not in self._tables:
            ridges = options.ridge_x, options.ridge_y
            parts = []
            for i in range(len(self._folds)):
                problem = self._problem(i, options.gamma_x, options.gamma_y)
                parts.append(problem.scores(ridges, powers))
            self._tables[options, powers] = np.concatenate(parts, axis=1)
        return self._tables[options, powers]

    def _problem(self, fold: int, *gammas: float | None) -> Problem:
        """Returns the CCA of one fold in principal coordinates."""
        if (fold, *gammas) not in self._problems:
            x, y = (self._side(name, fold, g) for name, g in zip("xy", gammas, strict=True))
            scales = np.sqrt(x.variances)[:, None] * np.sqrt(y.variances)
            cross = scales * (x.fit.T @ y.fit)
            self._problems[fold, *gammas] = Problem(x.variances, y.variances, cross, x.held, y.held)
        return self._problems[fold, *gammas]

    def _side(self, name: str, fold: int, gamma: float | None) -> Side:
        """Returns one modality of one fold in principal coordinates."""
        if (name, fold, gamma) not in self._sides:
            fit, held = (unit(self._pairs[name][rows]) for rows in self._folds[fold])
            fit, held = fit - fit.mean(axis=0), held - fit.mean(axis=0)
            if gamma is not None:
                fit, held = unit(fit), unit(held)
            grams = [rows @ fit.T for rows in (fit, held)]
            if gamma is not None:
                # exp(-gamma ||z - z'||^2) of unit rows, whose squared distance is 2 - 2 z.z'.
                grams = [np.exp(2.0 * gamma * (gram - 1.0)) for gram in grams]
            self._sides[name, fold, gamma] = _principal(*grams, width=fit.shape[1])
        return self._sides[name, fold, gamma]


def choose(
    pairs_x: np.ndarray,
    pairs_y: np.ndarray,
    kind: str,
    *,
    ridges: tuple[float, float] | None = None,
    power: float | None = None,
    gamma_x: float | None = None,
    gamma_y: float | None = None,
    seed: int = 0,
) -> Options:
    """Chooses the options of a CCA by cross-validation on the pairs.

    With fewer than `checks.MIN_PAIRS` pairs, ridges are 10,000 / n, the power is 0.5 and bandwidths
    are 1 / the median squared distance of two rows.

    Args:
        pairs_x: Paired embeddings of the first modality.
        pairs_y: Paired embeddings of the second modality.
        kind: "linear" or "kernel". `choose_each` compares both.
        ridges: Ridges of both sides, None to choose them.
        power: Power of rho, None to choose it.
        gamma_x: Bandwidth of the first modality, None to choose it.
        gamma_y: Bandwidth of the second modality, None to choose it.
        seed: Seed of the folds.

    Returns:
        The options for a fit on all pairs.

    Example:
        >>> rows = np.random.default_rng(0).normal(size=(60, 3))
        >>> choose(rows, rows[:, ::-1], "linear", power=0.0).power
        0.0
    """
    given = kind == "linear" or (gamma_x is not None and gamma_y is not None)
    if ridges is not None and power is not None and given:
        return Options(*ridges, power, gamma_x, gamma_y)
    n = len(pairs_x)
    if n < checks.MIN_PAIRS:
        # With such large ridges the CCA is nearly a Procrustes analysis.
        ridges = (1e4 / n, 1e4 / n) if ridges is None else ridges
        options = Options(*ridges, 0.5 if power is None else power)
        if kind == "linear":
            return options
        return options._replace(
            gamma_x=gamma_x or 1.0 / _typical(pairs_x), gamma_y=gamma_y or 1.0 / _typical(pairs_y)
        )
    search = Search(pairs_x, pairs_y, seed=seed)
    found = search.linear(ridges=ridges, power=power)
    if kind == "kernel":
        found = search.kernel(
            found, gammas=(gamma_x, gamma_y), fixed=ridges is not None, power=power
        )
    return found if ridges is not None else search.for_all_pairs(found)


def choose_each(pairs_x: np.ndarray, pairs_y: np.ndarray, *, seed: int = 0) -> list[Options]:
    """Chooses the options of a linear CCA, and of a kernel CCA if that is clearly better.

    Args:
        pairs_x: Paired embeddings of the first modality.
        pairs_y: Paired embeddings of the second modality.
        seed: Seed of the folds.

    Returns:
        One or two options for a fit on all pairs, those of the linear CCA first.

    Example:
        >>> rows = np.random.default_rng(0).normal(size=(60, 3))
        >>> len(choose_each(rows, rows[:, ::-1]))
        1
    """
    if len(pairs_x) < checks.MIN_PAIRS:
        return [choose(pairs_x, pairs_y, "linear")]
    search = Search(pairs_x, pairs_y, seed=seed)
    linear = search.linear()
    kernel = search.kernel(linear)
    better = search.clearly_better(kernel, linear)
    return [search.for_all_pairs(one) for one in ((linear, kernel) if better else (linear,))]


def _typical(rows: np.ndarray) -> float:
    """Returns the median squared distance of two unit rows, centred on the first 1,000 rows."""
    # 500 rows have 125,000 distances, whose median hardly depends on the sample.
    z = unit(rows[:1000])
    z = unit(z - z.mean(axis=0))[:500]
    distances = 2.0 - 2.0 * (z @ z.T)[~np.eye(len(z), dtype=bool)]
    # Equal rows, such as a caption that most pictures share, would make the median zero.
    distances = distances[distances > 1e-9]
    return float(np.median(distances)) if len(distances) else 2.0


def _principal(gram: np.ndarray, cross: np.ndarray, *, width: int) -> Side:
    """Computes principal coordinates from the Gram matrices fit x fit and held x fit.

    References:
        B. Schoelkopf, A. Smola and K.-R. Mueller, "Nonlinear component analysis as a kernel
        eigenvalue problem", Neural Computation 10 (1998), kernel PCA.
    """
    # Centring the Gram matrices centres the features. Held-out rows are centred by the mean of the
    # fitted ones.
    n, means = len(gram), gram.mean(axis=0)
    gram = gram - means - means[:, None] + means.mean()
    cross = cross - means - cross.mean(axis=1, keepdims=True) + means.mean()
    eigenvalues, vectors = np.linalg.eigh(gram)
    eigenvalues = np.maximum(eigenvalues, 1e-30)  # a fold of equal rows scores as chance
    # The ridges of `teachers` are relative to this mean eigenvalue.
    mean = float(eigenvalues.sum()) / (n - 1) / width
    kept = np.flatnonzero(eigenvalues > 1e-10 * eigenvalues[-1])[-_RANK:]
    eigenvalues, vectors = eigenvalues[kept], vectors[:, kept]
    held = cross @ (vectors / np.sqrt(eigenvalues * mean))
    return Side(vectors, eigenvalues / (n - 1) / mean, held)
