"""Measurements of embeddings before training: encoder pairs, unpaired pools and epsilons.

`mutual_knn` measures how similarly two encoders represent the same samples. `pool_shift` measures
how far unpaired rows are from the pairs. `sinkhorn_convergence` reports at which epsilons the
transport plans can be solved.

References:
    M. Huh et al., "The platonic representation hypothesis", ICML 2024 (mutual k-NN).
    C. Bonet et al., "Spherical sliced-Wasserstein", ICLR 2023.
    X. Liu et al., "Linear spherical sliced optimal transport", ICLR 2025.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sotalign_jax import checks, neighbours
from sotalign_jax.ot import affinity
from sotalign_jax.ot.blocks import Block, over_rows
from sotalign_jax.ot.klot import klot_from_embeddings
from sotalign_jax.ot.solver import MAX_ITERATIONS

Rows = Any
"""Embeddings [n, d], one per row: numpy arrays (memory-mapped files included) or JAX arrays."""
KNN_ROWS = 1024
"""Number of rows in the protocol of Huh et al. The score of `mutual_knn` depends on it."""
# Number of points of the circle at which quantile functions are compared, as in POT.
_GRID = 100
# Number of planes that rows are projected onto at a time. A block of planes needs about
# 4 * _PLANES * (n + m) floats.
_PLANES = 16


# --- mutual nearest neighbours -----------------------------------------------------------------


def mutual_knn(x: Rows, y: Rows, *, k: int = 10, clamp: float | None = 0.95) -> float:
    """Computes the mean overlap of nearest neighbours in two embeddings of the same samples.

        mean_i |N_x(i) ∩ N_y(i)| / k

    N(i) are the k rows of largest cosine with row i, without row i itself. Ties go to the lower
    index. The score is 1 for equal neighbours and `chance_knn` for unrelated spaces. It depends on
    the number of rows, which is 1,024 in the usual protocol.

    Args:
        x: Embeddings by one encoder, shape [n, d].
        y: Embeddings of the same samples by another encoder, shape [n, e].
        k: Number of neighbours.
        clamp: Quantile, or None. Features are clamped at plus and minus the mean over samples of
            this quantile of |value|, so that a few huge features do not dominate the cosines. The
            paper does not state k or this clamp, see docs/paper.md.

    Returns:
        The score in 0..1.

    Raises:
        InputError: The arrays are not paired embeddings, or k or `clamp` are out of range.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(50, 4))
        >>> mutual_knn(x, x[:, ::-1])
        1.0

    References:
        M. Huh et al., "The platonic representation hypothesis", ICML 2024.
    """
    checks.pairs(x, y, names=("x", "y"), min_rows=2)
    if not 1 <= k < len(x):
        raise checks.InputError(f"k must be in 1..{len(x) - 1} for {len(x)} rows, got {k}")
    if clamp is not None and not 0 < clamp <= 1:
        raise checks.InputError(f"clamp must be a quantile > 0 and <= 1 or None, got {clamp}")
    tables = []
    for rows in (affinity.as_float(x), affinity.as_float(y)):
        clamped = rows if clamp is None else _clamped(rows, clamp)
        tables.append(neighbours.top_k(clamped, clamped, k, skip="itself").indices)
    # Counted in integers, because a mean of float32 shares would be rounded.
    shared = int((tables[0][:, :, None] == tables[1][:, None, :]).sum())
    return shared / (len(x) * k)


def chance_knn(n: int, *, k: int = 10) -> float:
    """Returns the expected `mutual_knn` of n rows that are matched at random, k / (n - 1).

    Args:
        n: Number of rows.
        k: Number of neighbours.

    Returns:
        The expected score.

    Example:
        >>> round(chance_knn(1024), 4)
        0.0098
    """
    return k / (n - 1)


@jax.jit
def _clamped(x: Float[Array, "n d"], quantile: Any) -> Float[Array, "n d"]:
    """Clamps features at the mean over rows of a quantile of |value|."""
    bound = jnp.quantile(jnp.abs(x), quantile, axis=1).mean()
    return jnp.clip(x, -bound, bound)


# --- sliced Wasserstein -------------------------------------------------------------------------


class Mean(float):
    """Mean of repeated measurements.

    Attributes:
        spread: Standard deviation of the sample, or None for one value.

    Example:
        >>> mean = Mean([1.0, 3.0])
        >>> mean, mean.spread
        (2.0, 1.4142135623730951)
    """

    spread: float | None

    def __new__(cls, values: Sequence[float]) -> Self:
        mean = super().__new__(cls, np.mean(values))
        mean.spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return mean


class Shift(NamedTuple):
    """Distances from a sample of the pairs to samples of the same size, see `pool_shift`.

    Attributes:
        pool: Distance to unpaired rows.
        noise: Distance to other pairs.
        sphere: Distance to random directions.
        rows: Size of every sample.
    """

    pool: Mean
    noise: Mean
    sphere: Mean
    rows: int

    @property
    def share(self) -> float:
        """Distance of the pool relative to random directions, without sampling noise.

        √((pool² - noise²) / (sphere² - noise²)), because the squares of independent parts add up.
        It is 0 for a pool like the pairs, and 1 for a pool as far away as random directions.
        """
        own = max(self.pool**2 - self.noise**2, 0.0)
        full = self.sphere**2 - self.noise**2
        return math.sqrt(own / full) if full > 0 else math.nan


def sliced_wasserstein(x: Rows, y: Rows, *, projections: int | Array = 500, seed: int = 0) -> float:
    """Computes the linear spherical sliced Wasserstein distance of two sets of directions.

        SSW² = mean over planes U of mean_t d(φ_x(t), φ_y(t))²

    Rows are L2-normalised, projected onto random planes, and read as angles θ in [0, 1). A set of
    angles with quantile function F⁻¹ is embedded as φ(t) = F⁻¹(t - mean θ + 1/2) - t, and
    embeddings are compared by the L2 distance on the circle, d(a, b) = min(|a - b|, 1 - |a - b|).
    The result equals POT's `linear_sliced_wasserstein_sphere`. The distance of two finite samples
    of one distribution is not 0, see `pool_shift`.

    Args:
        x: Rows, shape [n, d].
        y: Rows, shape [m, d].
        projections: Number of random planes, or orthonormal planes of shape [p, d, 2].
        seed: Seed of the planes.

    Returns:
        The distance, in 0..1/2.

    Raises:
        InputError: The sets differ in width, or `projections` is invalid.

    Example:
        >>> sliced_wasserstein(np.eye(3), np.eye(3) + 0.1, projections=20) < 0.1
        True

    References:
        C. Bonet et al., "Spherical sliced-Wasserstein", ICLR 2023.
        X. Liu et al., "Linear spherical sliced optimal transport", ICLR 2025.
    """
    _check_sets(x, y)
    # Given planes are for exact comparisons with other implementations.
    if isinstance(projections, int | np.integer):
        checks.whole(1, projections=projections)
        planes = _random_planes(jax.random.key(seed), projections, x.shape[1])
    elif np.ndim(projections) != 3 or np.shape(projections)[1:] != (x.shape[1], 2):
        raise checks.InputError(
            f"projections must be an integer or planes of shape [p, {x.shape[1]}, 2], got shape "
            f"{np.shape(projections)}"
        )
    else:
        planes = affinity.as_float(projections)
    return _distance(*(_circle_embedding(affinity.as_float(z), planes) for z in (x, y)))


def pool_shift(
    pairs: Rows,
    pool: Rows,
    *,
    repeats: int = 20,
    rows: int = 100_000,
    projections: int = 500,
    seed: int = 0,
) -> Shift:
    """Measures how far unpaired rows are from the pairs, with two distances for comparison.

    The pairs are split into halves at random. The sliced Wasserstein distance of one half is
    computed to as many unpaired rows (`pool`), to the other half (`noise`) and to as many random
    directions (`sphere`). All samples have one size, because the distance falls with the size.

    Args:
        pairs: Paired rows of one modality, shape [n, d].
        pool: Unpaired rows of the same modality, shape [m, d].
        repeats: Number of repetitions with new halves, samples and planes.
        rows: Largest size of a sample.
        projections: Number of random planes.
        seed: Seed of all random choices.

    Returns:
        The `Shift`.

    Raises:
        InputError: The sets differ in width, or an option is invalid.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(60, 8)) + 1
        >>> shift = pool_shift(x, -x, repeats=3, projections=50)
        >>> shift.noise < shift.sphere < shift.pool
        True

    References:
        C. Bonet et al., "Spherical sliced-Wasserstein", ICLR 2023.
    """
    _check_sets(pairs, pool, names=("pairs", "pool"), min_rows=2)
    checks.whole(1, repeats=repeats, rows=rows, projections=projections)
    size = min(rows, len(pairs) // 2, len(pool))
    distances: list[list[float]] = [[], [], []]
    for repeat in range(repeats):
        # Seeded by its number, so that a repetition is the same for any number of them.
        rng = np.random.default_rng((seed, repeat))
        key = jax.random.fold_in(jax.random.key(seed), repeat)
        # The three distances of a repetition use the same planes and the same half of the pairs.
        planes = _random_planes(key, projections, pairs.shape[1])
        order = rng.permutation(len(pairs))
        half = _circle_embedding(_take(pairs, order[:size]), planes)
        others = (
            _take(pool, rng.permutation(len(pool))[:size]),
            _take(pairs, order[size : 2 * size]),
            _random_sphere(size, pairs.shape[1], seed=int(rng.integers(2**31))),
        )
        for values, other in zip(distances, others, strict=True):
            values.append(_distance(half, _circle_embedding(other, planes)))
    near, noise, far = map(Mean, distances)
    return Shift(near, noise, far, rows=size)


def _random_sphere(n: int, dim: int, *, seed: int = 0) -> Float[Array, "n dim"]:
    """Draws directions uniformly from the unit sphere."""
    return affinity.l2_normalize(jax.random.normal(jax.random.key(seed), (n, dim)))


def _random_planes(key: Array, count: int, dim: int) -> Float[Array, "count dim 2"]:
    """Draws orthonormal bases of uniformly random planes, the Q of Gaussian matrices."""
    return jnp.linalg.qr(jax.random.normal(key, (count, dim, 2)))[0]


@jax.jit
def _circle_embedding(
    x: Float[Array, "n d"], planes: Float[Array, "p d 2"]
) -> Float[Array, "p grid"]:
    """Computes φ of the rows in every plane, see `sliced_wasserstein`."""
    x = affinity.l2_normalize(x)
    n, grid = len(x), jnp.linspace(0, 1, _GRID, endpoint=False, dtype=x.dtype)

    def embed(block: Block, out: Array) -> Array:
        # One matrix product projects the rows onto all planes of a block.
        bases = jnp.moveaxis(block.of(planes), 0, 1).reshape(x.shape[1], -1)
        flat = affinity.dot(x, bases.astype(x.dtype)).reshape(n, block.size, 2)
        # The signs and the shift are those of POT, for equal results.
        angles = (jnp.arctan2(-flat[..., 1], -flat[..., 0]) + jnp.pi) / (2 * jnp.pi)
        angles = jnp.abs(angles.T % 1)
        # Positive floats are ordered like their bits, and XLA sorts integers six times faster.
        bits = jnp.int64 if angles.dtype == jnp.float64 else jnp.int32
        ordered = jnp.sort(jax.lax.bitcast_convert_type(angles, bits), axis=1)
        levels = (grid - angles.mean(axis=1, keepdims=True) + 0.5) % 1
        # POT takes the order statistic after the quantile, without interpolation.
        index = jnp.clip(jnp.ceil(levels * n).astype(jnp.int32), 0, n - 1)
        quantiles = jnp.take_along_axis(ordered, index, axis=1)
        return block.put(out, (jax.lax.bitcast_convert_type(quantiles, angles.dtype) - grid) % 1)

    return over_rows(len(planes), _PLANES, embed, jnp.zeros((len(planes), _GRID), x.dtype))


def _distance(a: Array, b: Array) -> float:
    """Computes the L2 distance on the circle."""
    # The shorter of the two ways around the circle.
    gap = jnp.abs(a - b)
    return float(jnp.sqrt(jnp.mean(jnp.square(jnp.minimum(gap, 1 - gap)))))


def _take(x: Rows, rows: np.ndarray) -> Array:
    """Reads rows in ascending order, which is faster for memory-mapped files."""
    return affinity.as_float(x[np.sort(rows)])


def _check_sets(
    x: Rows, y: Rows, *, names: tuple[str, str] = ("x", "y"), min_rows: int = 1
) -> None:
    """Raises InputError unless both are embeddings of one width of at least 2."""
    checks.embeddings(names[0], x, min_rows=min_rows)
    checks.embeddings(names[1], y, width=x.shape[1])
    if x.shape[1] < 2:
        raise checks.InputError(f"{names[0]} must have a width >= 2, got 1")


# --- Sinkhorn convergence ----------------------------------------------------------------------


class Convergence(NamedTuple):
    """Convergence of the transport plan at one epsilon.

    Attributes:
        epsilon: Regularisation.
        error: L1 marginal error.
        iterations: Number of sweeps.
        converged: True if the error is at most the tolerance.
        partners: Perplexity of the plan's rows.
    """

    epsilon: float
    error: float
    iterations: int
    converged: bool
    partners: float


def sinkhorn_convergence(
    f: Rows,
    g: Rows,
    epsilons: Sequence[float],
    *,
    tolerance: float = 1e-3,
    max_iterations: int = MAX_ITERATIONS,
) -> list[Convergence]:
    """Solves the plan of cosine(f, g) at each epsilon, as a training step does.

    `partners` is the perplexity exp(-Σ P log(P/a)) of the plan's rows. It is 1 if every row has a
    single partner, and the number of columns if epsilon is so large that the plan is uniform.

    Args:
        f: Features of the rows, shape [n, d].
        g: Features of the columns, shape [m, d].
        epsilons: Regularisations.
        tolerance: Marginal error at which a solve stops.
        max_iterations: Number of sweeps at which a solve stops.

    Returns:
        One `Convergence` for each epsilon.

    Raises:
        InputError: The features differ in width, or an option is invalid.

    Example:
        >>> f = np.random.default_rng(0).normal(size=(30, 4))
        >>> sharp, flat = sinkhorn_convergence(f, f, (0.001, 100.0))
        >>> flat.converged, round(sharp.partners, 2), round(flat.partners, 2)
        (True, 1.0, 30.0)

    References:
        M. Cuturi, "Sinkhorn distances", NeurIPS 2013.
    """
    checks.embeddings("f", f)
    checks.embeddings("g", g, width=f.shape[1])
    checks.positive(tolerance=tolerance)
    for epsilon in epsilons:
        checks.positive(epsilons=epsilon)
    checks.whole(1, max_iterations=max_iterations)
    x, y = affinity.as_floats(f, g)
    options: Any = {"tolerance": tolerance, "max_iterations": max_iterations}
    out = []
    for epsilon in epsilons:
        # At epsilon = 1e9 the student's plan is a b^T, so KLOT is KL(P || a b^T) = Σ P log(P/ab).
        value, aux = klot_from_embeddings(
            x, y, x, y, epsilon=1e9, epsilon_star=epsilon, return_aux=True, **options
        )
        # With b = 1/m, KLOT is Σ P log(P/a) + log m.
        partners = len(y) * math.exp(-value)
        plan = aux.teacher
        found = plan.error.item(), plan.iterations.item(), plan.converged.item()
        out.append(Convergence(epsilon, *found, partners))
    return out


def smallest_epsilon(rows: Sequence[Convergence]) -> float | None:
    """Returns the smallest epsilon at and above which every solve converged.

    Args:
        rows: Results of `sinkhorn_convergence`.

    Returns:
        The epsilon, or None if the largest one did not converge.

    Example:
        >>> fine, coarse = Convergence(0.1, 0.0, 9, True, 1.0), Convergence(0.01, 1.0, 9, False, 1)
        >>> smallest_epsilon([fine, coarse])
        0.1
    """
    # From the largest epsilon down to the first one that failed.
    ordered = sorted(rows, key=lambda row: -row.epsilon)
    fine = [row.epsilon for row in itertools.takewhile(lambda row: row.converged, ordered)]
    return fine[-1] if fine else None
