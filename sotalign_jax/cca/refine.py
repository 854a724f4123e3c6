"""Refines a CCA with unpaired rows: the transport plan between the pools is data.

Two steps alternate. Given maps, the plan P between the pools is a soft matching of their rows.
Given a plan, its cross-moment X^T P Y is evidence like the pairs' own, and a CCA of both gives new
maps:

    S_xy = (1 - tau) A^T B / (n - 1) + tau X^T P Y,    tau = worth / (worth + n),

and S_xx and S_yy likewise with the covariances of the pools. The sampling noise of the pairs'
moments falls as 1 / n while the bias of the plan does not, so the plan counts as a number of pairs,
its worth. Worth, ridges and the number of rounds are chosen on held-out pairs, and no round at all
is chosen unless they gain clearly.

References:
    E. Grave, A. Joulin and Q. Berthet, "Unsupervised alignment of embeddings with Wasserstein
    Procrustes", AISTATS 2019: the alternation, without pairs and with orthogonal maps.
    M. Artetxe, G. Labaka and E. Agirre, "Learning bilingual word embeddings with (almost) no
    bilingual data", ACL 2017: self-learning from nearest neighbours.
    A. P. Dempster, N. M. Laird and D. B. Rubin, "Maximum likelihood from incomplete data via the EM
    algorithm", Journal of the Royal Statistical Society B 39 (1977).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from sotalign_jax.cca import canonical, choose, features, moments
from sotalign_jax.cca.features import Features
from sotalign_jax.cca.moments import Moments
from sotalign_jax.ot import coupling, device, sharding

EPSILON = 0.03
"""Regularisation of the plans."""
TOLERANCE = 1e-2
"""Marginal error of the plans. Pairs and other rows average the rest."""
WORTHS = (1000.0, 3000.0)
"""Numbers of pairs that the plan between two large pools may count as."""
HALF_WORTH_ROWS = 1000
"""Rows of a pool whose plan is worth half as much, because of its own sampling noise."""
FACTORS = (0.3, 1.0)
"""Factors of the ridges that are tried."""
ROUNDS = 4
"""Largest number of rounds."""
LEAST_GAIN = 0.01
"""Relative gain of the held-out score below which no further round is tried."""
POOL_ROWS = 5000
"""Rows of each pool in a batch on a CPU."""
DEVICE_POOL_ROWS = 22_768
"""Rows of each pool in a batch on an accelerator, as many as in the paper's training."""
# Rows of each pool that a plan of the cross-validation sees. It bounds the time of the choice.
_CHOICE_ROWS = 2000
# Number of the `folds`.
_FOLDS = 5


class Step(NamedTuple):
    """Options of one round.

    Attributes:
        worth: Number of pairs that the plan between two large pools counts as.
        factor: Factor of the ridges.
    """

    worth: float
    factor: float

    def share(self, count: int, rows: int) -> float:
        """Computes the weight of the pairs beside a plan.

        Args:
            count: Number of pairs.
            rows: Rows of the smaller batch that the plan couples.

        Returns:
            The weight, between 0 and 1.
        """
        worth = self.worth * rows / (HALF_WORTH_ROWS + rows)
        return count / (count + worth)


STEPS = tuple(Step(worth, factor) for worth in WORTHS for factor in FACTORS)
"""Candidates for every round."""


class Side(NamedTuple):
    """One modality: its features, its pairs in them, and its pool.

    Attributes:
        features: Features of the embeddings.
        pairs: Features of the pairs.
        pool: Embeddings of the pool, read a batch at a time.
    """

    features: Features
    pairs: Float[np.ndarray, "n r"]
    pool: Any


class Pools(NamedTuple):
    """A batch of each pool in feature coordinates, on the device, with both covariances.

    Attributes:
        x: Centred rows of the first pool.
        y: Centred rows of the second pool.
        xx: Covariance of x.
        yy: Covariance of y.
    """

    x: Array
    y: Array
    xx: Float[np.ndarray, "r r"]
    yy: Float[np.ndarray, "s s"]

    @property
    def rows(self) -> int:
        """Rows of the smaller batch."""
        return min(len(self.x), len(self.y))

    def under(self, fitted: canonical.Directions) -> tuple[Moments, float]:
        """Returns the moments of the pools, coupled by the plan of a CCA, and the plan's error."""
        # Padded with zeros, which change no cosine, so that every rank runs the same program.
        width = min(choose.DIRECTIONS, len(fitted.x), len(fitted.y))
        padding = [(0, 0), (0, width - len(fitted.rho))]
        sides = (jnp.asarray(np.pad(side, padding), self.x.dtype) for side in fitted[:2])
        options: Any = {"epsilon": EPSILON, "tolerance": TOLERANCE, "profile": device.profile()}
        cross, error = coupling.cross_moment(self.x, self.y, *sides, **options)
        return Moments(self.xx, self.yy, np.asarray(cross, np.float64)), float(error)


def refine(
    x: Side,
    y: Side,
    start: choose.Options,
    steps: Sequence[Step],
    *,
    rows: int | None = None,
    seed: int = 0,
    mesh: Mesh | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> tuple[canonical.Directions, float]:
    """Fits a CCA to the pairs, and refines it with a plan between new batches in every round.

    Args:
        x: First modality.
        y: Second modality.
        start: Options of the first CCA, for a fit on all pairs.
        steps: Options of every round, see `choose_steps`.
        rows: Rows of each pool that a round sees. None takes `POOL_ROWS` on a CPU and
            `DEVICE_POOL_ROWS` on an accelerator.
        seed: Seed of the batches.
        mesh: Devices to split the plans over.
        report: Called with a line of progress.

    Returns:
        The directions, weighted by rho^power, and the largest marginal error of the plans.
    """
    if rows is None:
        rows = POOL_ROWS if jax.default_backend() == "cpu" else DEVICE_POOL_ROWS
    start = by_trace(start, x.features, y.features)
    pairs = moments.of_pairs([(x.pairs, y.pairs)])
    fitted, errors = fit(pairs, start), []
    for number, step in enumerate(steps):
        report(f"refining the teacher, round {number + 1} of {len(steps)}")
        pools = draw(x, y, rows, seed=(seed, number), mesh=mesh)
        coupled, error = pools.under(fitted)
        fitted = add(pairs, len(x.pairs), coupled, pools.rows, start, step)
        errors.append(error)
    return fitted, max(errors, default=0.0)


class Choice(NamedTuple):
    """Result of `choose_steps`.

    Attributes:
        steps: Options of every round. Empty if the rounds do not gain clearly.
        scores: Mean reciprocal rank of held-out pairs before the first and after every round. It is
            the best of several candidates, so that it is slightly optimistic.
    """

    steps: tuple[Step, ...]
    scores: tuple[float, ...]


def folds(pairs_x: np.ndarray, pairs_y: np.ndarray, *, seed: int = 0) -> list[choose.Fold]:
    """Splits the pairs for `choose_steps`.

    Args:
        pairs_x: Paired embeddings of the first modality.
        pairs_y: Paired embeddings of the second modality.
        seed: Seed of the folds.

    Returns:
        Five folds, which fit on four fifths of all pairs. A plan is worth more beside few pairs, so
        smaller folds would choose too many rounds.

    Example:
        >>> rows = np.random.default_rng(0).normal(size=(50, 3))
        >>> [len(fold.fit) for fold in folds(rows, rows)]
        [40, 40, 40, 40, 40]
    """
    shuffled = choose.order(pairs_x, pairs_y, seed=seed)
    group = choose.groups(pairs_x, pairs_y)
    # A fold of one pair would always rank it first.
    splits = max(2, min(_FOLDS, len(pairs_x) // 3))
    return choose.folds(shuffled, group, splits=splits, repetitions=1, fit_rows=None)


def choose_steps(
    x: Side,
    y: Side,
    start: choose.Options,
    splits: Sequence[choose.Fold],
    *,
    seed: int = 0,
    mesh: Mesh | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Choice:
    """Chooses the options of every round by cross-validation on the pairs.

    In every round all folds compute one plan each, and every candidate is scored on the held-out
    pairs. The best candidate leads to the next round, until one gains less than a hundredth.
    The rounds are kept if they gain more than the best of all k candidates would by chance, because
    the largest of k normal variables is about sqrt(2 log k) standard deviations.

    Args:
        x: First modality.
        y: Second modality.
        start: Options of the first CCA, for a fit on all pairs.
        splits: The `folds`.
        seed: Seed of the batches.
        mesh: Devices to split the plans over.
        report: Called with a line of progress.

    Returns:
        The steps and their scores.
    """
    held = np.concatenate([fold.held for fold in splits])
    start = by_trace(start, x.features, y.features)
    states = [_Fold.of(x, y, fold, start) for fold in splits]
    table = [np.concatenate([state.scores(state.fitted) for state in states])]
    steps: list[Step] = []
    tried = 0
    for number in range(ROUNDS):
        report(f"choosing how to refine the teacher, round {number + 1} of at most {ROUNDS}")
        pools = draw(x, y, _CHOICE_ROWS, seed=(seed, number), mesh=mesh)
        found = [state.candidates(pools) for state in states]
        scores = {step: np.concatenate([one[step][1] for one in found]) for step in STEPS}
        tried += len(STEPS)
        best = max(STEPS, key=lambda step: scores[step].mean())
        steps.append(best)
        table.append(scores[best])
        if table[-1].mean() < (1.0 + LEAST_GAIN) * table[-2].mean():
            break
        states = [
            state._replace(fitted=one[best][0]) for state, one in zip(states, found, strict=True)
        ]
    means = tuple(float(row.mean()) for row in table)
    rounds = int(np.argmax(means))
    chance = math.sqrt(2.0 * math.log(tried))
    if not choose.clearly_higher(table[rounds], table[0], held, errors=chance):
        rounds = 0
    return Choice(tuple(steps[:rounds]), means[: rounds + 1])


def draw(x: Side, y: Side, rows: int, *, seed: tuple[int, int], mesh: Mesh | None = None) -> Pools:
    """Draws a batch of each pool and computes its covariances.

    Args:
        x: First modality.
        y: Second modality.
        rows: Largest number of rows of each batch.
        seed: Seed of the run, and number of the round.
        mesh: Devices to split plans over.

    Returns:
        The batches.
    """
    batches = []
    for number, side in enumerate((x, y)):
        rng = np.random.default_rng((*seed, number))
        kept = np.sort(rng.permutation(len(side.pool))[:rows])
        batch = side.features(np.asarray(side.pool[kept]))
        batches.append(batch - batch.mean(axis=0))
    f, g = batches
    place = None if mesh is None else sharding.replicated(mesh)
    on_x, on_y = (jax.device_put(batch.astype(np.float32), place) for batch in batches)
    return Pools(on_x, on_y, f.T @ f / len(f), g.T @ g / len(g))


class _Fold(NamedTuple):
    """A fold of the choice: what it fits on, its held-out pairs, and its current CCA."""

    pairs: Moments
    size: int
    held_x: np.ndarray
    held_y: np.ndarray
    start: choose.Options
    fitted: canonical.Directions

    @classmethod
    def of(cls, x: Side, y: Side, fold: choose.Fold, start: choose.Options) -> "_Fold":
        """Fits the first CCA of a fold."""
        mean_x, mean_y = x.pairs[fold.fit].mean(axis=0), y.pairs[fold.fit].mean(axis=0)
        pairs = moments.of_pairs([(x.pairs[fold.fit] - mean_x, y.pairs[fold.fit] - mean_y)])
        # Fewer pairs need larger ridges.
        start = _scaled(start, len(x.pairs) / len(fold.fit))
        held_x, held_y = x.pairs[fold.held] - mean_x, y.pairs[fold.held] - mean_y
        return cls(pairs, len(fold.fit), held_x, held_y, start, fit(pairs, start))

    def scores(self, fitted: canonical.Directions) -> np.ndarray:
        """Returns the reciprocal ranks of the held-out pairs."""
        return choose.reciprocal_ranks(self.held_x @ fitted.x, self.held_y @ fitted.y)

    def candidates(self, pools: Pools) -> dict[Step, tuple[canonical.Directions, np.ndarray]]:
        """Fits and scores every candidate for the next round."""
        coupled, _ = pools.under(self.fitted)
        found = {}
        for step in STEPS:
            fitted = add(self.pairs, self.size, coupled, pools.rows, self.start, step)
            found[step] = fitted, self.scores(fitted)
        return found


def add(
    pairs: Moments, count: int, coupled: Moments, rows: int, start: choose.Options, step: Step
) -> canonical.Directions:
    """Fits a CCA to pairs and to the plan between two batches.

    Args:
        pairs: Moments of the pairs.
        count: Number of pairs.
        coupled: Moments of the batches under their plan.
        rows: Rows of the smaller batch.
        start: Options for these pairs alone, see `by_trace`.
        step: Options of the round.

    Returns:
        The directions, weighted by rho^power.
    """
    share = step.share(count, rows)
    # Ridges fall with the number of pairs and of their worth.
    return fit(moments.mix(pairs, coupled, 1.0 - share), _scaled(start, step.factor * share))


def by_trace(options: choose.Options, x: Features, y: Features) -> choose.Options:
    """Makes ridges relative to the trace of a covariance instead of its mean eigenvalue.

    Args:
        options: Options of a CCA.
        x: Features of the first modality, whose embeddings' width the mean is taken over.
        y: Features of the second modality.

    Returns:
        The options for `fit`.
    """
    ridge_x, ridge_y = options.ridge_x / features.width(x), options.ridge_y / features.width(y)
    return options._replace(ridge_x=ridge_x, ridge_y=ridge_y)


def _scaled(options: choose.Options, factor: float) -> choose.Options:
    """Multiplies both ridges. They fall with the number of pairs and of their worth."""
    return options._replace(ridge_x=factor * options.ridge_x, ridge_y=factor * options.ridge_y)


def fit(covered: Moments, options: choose.Options) -> canonical.Directions:
    """Fits a CCA to moments.

    Args:
        covered: The moments.
        options: Ridges relative to the traces, see `by_trace`, and power.

    Returns:
        The directions, weighted by rho^power.
    """
    ridge_x = options.ridge_x * float(np.trace(covered.xx))
    ridge_y = options.ridge_y * float(np.trace(covered.yy))
    root_x = canonical.cholesky_root(covered.xx, ridge_x)
    root_y = canonical.cholesky_root(covered.yy, ridge_y)
    left, rho, right = canonical.leading(root_x.T @ covered.xy @ root_y, choose.DIRECTIONS)
    found = canonical.Directions(root_x @ left, root_y @ right, rho)
    return found.weighted(options.power)
