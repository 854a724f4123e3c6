"""Refines a CCA with unpaired rows: the transport plan between the pools is data.

Two steps alternate. Given maps, the plan P between the pools is a soft matching of their rows.
Given a plan, its cross-moment X^T P Y is evidence like the pairs' own, and a CCA of both gives new
maps:

    S_xy = (1 - tau) A^T B / (n - 1) + tau X^T P Y,    tau = worth / (worth + n),

and S_xx and S_yy likewise with the covariances of the pools. The sampling noise of the pairs'
moments falls as 1 / n while the bias of the plan does not, so the plan counts as a constant number
of pairs, its worth. Ridge, power and number of rounds are chosen on held-out pairs, and no round at
all is chosen unless they gain clearly.

References:
    E. Grave, A. Joulin and Q. Berthet, "Unsupervised alignment of embeddings with Wasserstein
    Procrustes", AISTATS 2019: the alternation, without pairs and with orthogonal maps.
    M. Artetxe, G. Labaka and E. Agirre, "Learning bilingual word embeddings with (almost) no
    bilingual data", ACL 2017: self-learning from nearest neighbours.
    A. P. Dempster, N. M. Laird and D. B. Rubin, "Maximum likelihood from incomplete data via the EM
    algorithm", Journal of the Royal Statistical Society B 39 (1977).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from sotalign_jax.cca import canonical, choose, moments
from sotalign_jax.cca.features import Features
from sotalign_jax.cca.moments import Moments
from sotalign_jax.ot import coupling, device, sharding

EPSILON = 0.03
"""Regularisation of the plans."""
TOLERANCE = 1e-2
"""Marginal error of the plans. Pairs and other rows average the rest."""
WORTH = 1000.0
"""Number of pairs that the plan between two large pools counts as."""
FACTORS = (0.3, 1.0, 3.0)
"""Factors of the ridges that are tried."""
POWERS = choose.POWERS[1:]
"""Powers of rho that are tried. Without a weight, hundreds of unreliable directions count fully."""
ROUNDS = 6
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
        factor: Factor of the ridges.
        power: Power of rho that weighs the directions.
    """

    factor: float
    power: float


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

    def under(self, fitted: canonical.Directions) -> Moments:
        """Returns the moments of the pools, coupled by the plan of a CCA."""
        # Padded with zeros, which change no cosine, so that every rank runs the same program.
        width = min(choose.DIRECTIONS, len(fitted.x), len(fitted.y))
        padding = [(0, 0), (0, width - len(fitted.rho))]
        sides = (jnp.asarray(np.pad(side, padding), self.x.dtype) for side in fitted[:2])
        options: Any = {"epsilon": EPSILON, "tolerance": TOLERANCE, "profile": device.profile()}
        cross = coupling.cross_moment(self.x, self.y, *sides, **options)
        return Moments(self.xx, self.yy, np.asarray(cross, np.float64))


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
) -> canonical.Directions:
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
        The directions, weighted by rho^power.
    """
    if rows is None:
        rows = POOL_ROWS if jax.default_backend() == "cpu" else DEVICE_POOL_ROWS
    pairs, widths = of_pairs(x.pairs, y.pairs), (x.features.width, y.features.width)
    fitted = fit(pairs, start, widths)
    for number, step in enumerate(steps):
        report(f"refining the teacher, round {number + 1} of {len(steps)}")
        pools = draw(x, y, rows, seed=(seed, number), mesh=mesh)
        worth = _worth(pools)
        mixed = moments.mix(pairs, pools.under(fitted), worth / (worth + len(x.pairs)))
        options = _options(start, step, len(x.pairs), worth)
        fitted = fit(mixed, options, widths)
    return fitted


class Choice(NamedTuple):
    """Result of `choose_steps`.

    Attributes:
        steps: Options of every round. Empty if no number of rounds gains clearly.
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
    pairs. The best candidate leads to the next round. The best number of rounds is kept, or none if
    its gain is below one standard error.

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
    states = [_Fold.of(x, y, fold, start) for fold in splits]
    table = [np.concatenate([state.first_scores() for state in states])]
    steps: list[Step] = []
    for number in range(ROUNDS):
        report(f"choosing how to refine the teacher, round {number + 1} of at most {ROUNDS}")
        pools = draw(x, y, _CHOICE_ROWS, seed=(seed, number), mesh=mesh)
        tried = [state.candidates(pools) for state in states]
        scores = {step: np.concatenate([one[step][1] for one in tried]) for step in tried[0]}
        best = max(scores, key=lambda step: scores[step].mean())
        steps.append(best)
        table.append(scores[best])
        if table[-1].mean() < (1.0 + LEAST_GAIN) * table[-2].mean():
            break
        states = [
            state._replace(fitted=one[best][0]) for state, one in zip(states, tried, strict=True)
        ]
    means = tuple(float(row.mean()) for row in table)
    best_round = int(np.argmax(means))
    if not choose.clearly_higher(table[best_round], table[0], held):
        best_round = 0
    return Choice(tuple(steps[:best_round]), means[: best_round + 1])


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
    widths: tuple[int, int]
    fitted: canonical.Directions

    @classmethod
    def of(cls, x: Side, y: Side, fold: choose.Fold, start: choose.Options) -> "_Fold":
        """Fits the first CCA of a fold."""
        pairs, count = of_pairs(x.pairs[fold.fit], y.pairs[fold.fit]), len(fold.fit)
        # Fewer pairs need larger ridges.
        more = len(x.pairs) / count
        start = start._replace(ridge_x=start.ridge_x * more, ridge_y=start.ridge_y * more)
        widths = x.features.width, y.features.width
        held_x = x.pairs[fold.held] - x.pairs[fold.fit].mean(axis=0)
        held_y = y.pairs[fold.held] - y.pairs[fold.fit].mean(axis=0)
        fitted = fit(pairs, start, widths)
        return cls(pairs, count, held_x, held_y, start, widths, fitted)

    def first_scores(self) -> np.ndarray:
        """Returns the reciprocal ranks of the held-out pairs before the first round."""
        return choose.reciprocal_ranks(self.held_x @ self.fitted.x, self.held_y @ self.fitted.y)

    def candidates(self, pools: Pools) -> dict[Step, tuple[canonical.Directions, np.ndarray]]:
        """Fits and scores every candidate for the next round."""
        worth = _worth(pools)
        mixed = moments.mix(self.pairs, pools.under(self.fitted), worth / (worth + self.size))
        spectrum, basis_x, basis_y = canonical.spectrum(mixed)
        problem = choose.Problem(spectrum, self.held_x @ basis_x, self.held_y @ basis_y)
        found = {}
        for factor in FACTORS:
            options = _options(self.start, Step(factor, 0.0), self.size, worth)
            ridges = _ridges(mixed, options, self.widths)
            # All powers share one decomposition.
            fitted, scores = choose.held_out_scores(problem, ridges, POWERS)
            turned = canonical.Directions(basis_x @ fitted.x, basis_y @ fitted.y, fitted.rho)
            for power, score in zip(POWERS, scores, strict=True):
                found[Step(factor, power)] = turned.weighted(power), score
        return found


def _worth(pools: Pools) -> float:
    """Returns the number of pairs that a plan between these batches counts as."""
    # Few rows add sampling noise of their own.
    rows = min(len(pools.x), len(pools.y))
    return WORTH * rows / (WORTH + rows)


def _options(start: choose.Options, step: Step, count: int, worth: float) -> choose.Options:
    """Returns the options of a round: ridges fall with the number of pairs and of their worth."""
    share = step.factor * count / (count + worth)
    return choose.Options(start.ridge_x * share, start.ridge_y * share, step.power)


def of_pairs(x: np.ndarray, y: np.ndarray) -> Moments:
    """Computes the moments of pairs, which are centred first.

    Args:
        x: Features of the first modality, shape [n, r].
        y: Features of the second modality, shape [n, s].

    Returns:
        The moments with the divisor n - 1.
    """
    return moments.of_pairs(x - x.mean(axis=0), y - y.mean(axis=0), divisor=max(len(x) - 1, 1))


def _ridges(
    covered: Moments, options: choose.Options, widths: tuple[int, int]
) -> tuple[float, float]:
    """Returns absolute ridges, given options relative to the mean eigenvalues."""
    ridge_x = options.ridge_x * float(np.trace(covered.xx)) / widths[0]
    ridge_y = options.ridge_y * float(np.trace(covered.yy)) / widths[1]
    return ridge_x, ridge_y


def fit(covered: Moments, options: choose.Options, widths: tuple[int, int]) -> canonical.Directions:
    """Fits a CCA to moments.

    Args:
        covered: The moments.
        options: Ridges relative to the mean eigenvalues, and power.
        widths: Widths of the embeddings, which the mean eigenvalues are taken over.

    Returns:
        The directions, weighted by rho^power.
    """
    ridges = _ridges(covered, options, widths)
    spectrum, basis_x, basis_y = canonical.spectrum(covered)
    found = canonical.leading(spectrum, ridges, choose.DIRECTIONS)
    turned = canonical.Directions(basis_x @ found.x, basis_y @ found.y, found.rho)
    return turned.weighted(options.power)
