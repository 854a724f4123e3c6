"""What can be known before training: encoder pairs, unpaired pools and epsilons, from embeddings.

`mutual_knn` tells how alike two encoders see the same samples, `pool_shift` how far unpaired rows
are from the pairs, `sinkhorn_convergence` at which epsilons the transport plans can be solved.
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
"""Embeddings [n, d], one a row: numpy (memory-mapped files included) or JAX arrays."""
KNN_ROWS = 1024
"""Rows of the usual protocol of `mutual_knn`, whose scores depend on their number."""
GRID = 100
"""Points of the circle at which distributions on it are compared."""
PLANES = 16
"""Planes that rows are projected onto at a time: about 4 * PLANES * (n + m) floats."""


# --- mutual nearest neighbours -----------------------------------------------------------------


def mutual_knn(x: Rows, y: Rows, *, k: int = 10, clamp: float | None = 0.95) -> float:
    """Mutual k-NN: how many of a sample's neighbours in one space are neighbours in the other.

        mean_i |N_x(i) ∩ N_y(i)| / k

    N(i) are the k rows of largest cosine with row i, itself left out, ties going to the lower
    index. Features are first clamped at ± the mean over samples of the `clamp`-quantile of |value|,
    so that few huge features do not decide. 1 means the same neighbours, `chance_knn` unrelated
    spaces. The score depends on the number of rows: the usual protocol takes 1,024.

    >>> x = random_sphere(50, 4)
    >>> mutual_knn(x, x[:, ::-1])
    1.0
    """
    checks.pairs(x, y, names=("x", "y"), min_rows=2)
    if not 1 <= k < len(x):
        raise checks.InputError(f"k: is {k} but there are {len(x)} rows; pass 1..{len(x) - 1}")
    if clamp is not None and not 0 < clamp <= 1:
        raise checks.InputError(f"clamp: is {clamp}; pass a quantile in 0..1, or None")
    tables = []
    for rows in (affinity.as_float(x), affinity.as_float(y)):
        clamped = rows if clamp is None else _clamped(rows, clamp)
        tables.append(neighbours.top_k(clamped, clamped, k, skip="itself").indices)
    shared = int((tables[0][:, :, None] == tables[1][:, None, :]).sum())
    return shared / (len(x) * k)


def chance_knn(n: int, *, k: int = 10) -> float:
    """What `mutual_knn` expects of n rows matched at random: k / (n - 1).

    >>> round(chance_knn(1024), 4)
    0.0098
    """
    return k / (n - 1)


@jax.jit
def _clamped(x: Float[Array, "n d"], quantile: Any) -> Float[Array, "n d"]:
    bound = jnp.quantile(jnp.abs(x), quantile, axis=1).mean()
    return jnp.clip(x, -bound, bound)


# --- sliced Wasserstein -------------------------------------------------------------------------


class Mean(float):
    """A mean of repetitions, with the sample's standard deviation as `spread`, None of one value.

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
    """Distances from a sample of the pairs, all samples of one size `rows`, see `pool_shift`.

    `pool` is that of unpaired rows, `noise` of other pairs, `sphere` of random directions.
    """

    pool: Mean
    noise: Mean
    sphere: Mean
    rows: int

    @property
    def share(self) -> float:
        """The pool's distance as a share of the random directions', without sampling noise.

        √((pool² - noise²) / (sphere² - noise²)), as squares of independent parts add up: 0 for a
        pool like the pairs, 1 for one as far as random directions.
        """
        own = max(self.pool**2 - self.noise**2, 0.0)
        full = self.sphere**2 - self.noise**2
        return math.sqrt(own / full) if full > 0 else math.nan


def sliced_wasserstein(x: Rows, y: Rows, *, projections: int | Array = 500, seed: int = 0) -> float:
    """Linear spherical sliced Wasserstein distance between two sets of directions, in 0..1/2.

        SSW² = mean over planes U of mean_t d(φ_x(t), φ_y(t))²

    Rows are L2-normalised, projected onto random planes, and read as angles θ in [0, 1). A set of
    angles with quantile function F⁻¹ is embedded as φ(t) = F⁻¹(t - mean θ + 1/2) - t, where the
    L2 distance on the circle, d(a, b) = min(|a - b|, 1 - |a - b|), compares it with others
    (Liu et al., Linear Spherical Sliced Optimal Transport). The same number as POT's
    `linear_sliced_wasserstein_sphere`. Finite samples of one distribution are not at distance 0:
    see `pool_shift`.

    `projections` is how many random planes, or the planes themselves as orthonormal [p, d, 2].

    >>> sliced_wasserstein(np.eye(3), np.eye(3) + 0.1, projections=20) < 0.1
    True
    """
    _check_sets(x, y)
    if isinstance(projections, int | np.integer):
        checks.whole(1, projections=projections)
        planes = random_planes(jax.random.key(seed), projections, x.shape[1])
    elif np.ndim(projections) != 3 or np.shape(projections)[1:] != (x.shape[1], 2):
        raise checks.InputError(
            f"projections: has shape {np.shape(projections)}; pass [p, {x.shape[1]}, 2]"
        )
    else:
        planes = affinity.as_float(projections)
    return _distance(*(circle_embedding(affinity.as_float(z), planes) for z in (x, y)))


def pool_shift(
    pairs: Rows,
    pool: Rows,
    *,
    repeats: int = 20,
    rows: int = 100_000,
    projections: int = 500,
    seed: int = 0,
) -> Shift:
    """How far unpaired rows are from the paired ones, beside two distances to judge it by.

    The pairs are halved at random; one half's distance is measured to as many unpaired rows
    (`pool`), to the other half (`noise`) and to as many random directions (`sphere`). All samples
    have one size, at most `rows`, because the distance falls with the size. Repeated with
    new halves, samples and planes.

    >>> x = np.random.default_rng(0).normal(size=(60, 8)) + 1
    >>> shift = pool_shift(x, -x, repeats=3, projections=50)
    >>> shift.noise < shift.sphere < shift.pool
    True
    """
    _check_sets(pairs, pool, names=("pairs", "pool"), min_rows=2)
    checks.whole(1, repeats=repeats, rows=rows, projections=projections)
    size = min(rows, len(pairs) // 2, len(pool))
    distances: list[list[float]] = [[], [], []]
    for repeat in range(repeats):
        rng = np.random.default_rng((seed, repeat))
        key = jax.random.fold_in(jax.random.key(seed), repeat)
        planes = random_planes(key, projections, pairs.shape[1])
        order = rng.permutation(len(pairs))
        half = circle_embedding(_take(pairs, order[:size]), planes)
        others = (
            _take(pool, rng.permutation(len(pool))[:size]),
            _take(pairs, order[size : 2 * size]),
            random_sphere(size, pairs.shape[1], seed=int(rng.integers(2**31))),
        )
        for values, other in zip(distances, others, strict=True):
            values.append(_distance(half, circle_embedding(other, planes)))
    near, noise, far = map(Mean, distances)
    return Shift(near, noise, far, rows=size)


def random_sphere(n: int, dim: int, *, seed: int = 0) -> Float[Array, "n dim"]:
    """Directions uniform on the unit sphere.

    >>> random_sphere(2, 3).shape
    (2, 3)
    """
    return affinity.l2_normalize(jax.random.normal(jax.random.key(seed), (n, dim)))


def random_planes(key: Array, count: int, dim: int) -> Float[Array, "count dim 2"]:
    """Orthonormal bases of planes, uniformly random: the Q of Gaussian matrices.

    >>> random_planes(jax.random.key(0), 5, 3).shape
    (5, 3, 2)
    """
    return jnp.linalg.qr(jax.random.normal(key, (count, dim, 2)))[0]


@jax.jit
def circle_embedding(
    x: Float[Array, "n d"], planes: Float[Array, "p d 2"]
) -> Float[Array, "p grid"]:
    """φ of the rows in every plane; the distance of two sets is one between their φ.

    >>> circle_embedding(jnp.eye(3), random_planes(jax.random.key(0), 5, 3)).shape
    (5, 100)
    """
    x = affinity.l2_normalize(x)

    n, grid = len(x), jnp.linspace(0, 1, GRID, endpoint=False, dtype=x.dtype)

    def embed(block: Block, out: Array) -> Array:
        bases = jnp.moveaxis(block.of(planes), 0, 1).reshape(x.shape[1], -1)
        flat = affinity.dot(x, bases.astype(x.dtype)).reshape(n, block.size, 2)
        angles = (jnp.arctan2(-flat[..., 1], -flat[..., 0]) + jnp.pi) / (2 * jnp.pi)
        angles = jnp.abs(angles.T % 1)
        # Numbers above 0 are ordered as their bits are, and whole numbers sort six times faster.
        bits = jnp.int64 if angles.dtype == jnp.float64 else jnp.int32
        ordered = jnp.sort(jax.lax.bitcast_convert_type(angles, bits), axis=1)
        levels = (grid - angles.mean(axis=1, keepdims=True) + 0.5) % 1
        # As in POT, the order statistic after the quantile.
        index = jnp.clip(jnp.ceil(levels * n).astype(jnp.int32), 0, n - 1)
        quantiles = jnp.take_along_axis(ordered, index, axis=1)
        return block.put(out, (jax.lax.bitcast_convert_type(quantiles, angles.dtype) - grid) % 1)

    return over_rows(len(planes), PLANES, embed, jnp.zeros((len(planes), GRID), x.dtype))


def _distance(a: Array, b: Array) -> float:
    gap = jnp.abs(a - b)
    return float(jnp.sqrt(jnp.mean(jnp.square(jnp.minimum(gap, 1 - gap)))))


def _take(x: Rows, rows: np.ndarray) -> Array:
    return affinity.as_float(x[np.sort(rows)])  # in order, for files are read faster that way


def _check_sets(
    x: Rows, y: Rows, *, names: tuple[str, str] = ("x", "y"), min_rows: int = 1
) -> None:
    checks.embeddings(names[0], x, min_rows=min_rows)
    checks.embeddings(names[1], y, width=x.shape[1])
    if x.shape[1] < 2:
        raise checks.InputError(f"{names[0]}: rows have width 1; directions need at least 2")


# --- Sinkhorn convergence ----------------------------------------------------------------------


class Convergence(NamedTuple):
    """How a transport plan came out at one epsilon.

    `error` is the L1 marginal error; `partners`, the perplexity of the plan's rows.
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
    """Solves the plan of cos(f, g), [n, d] and [m, d], at each epsilon as a training step does.

    `partners` is exp(-Σ P log(P/a)): 1 when every row has a single partner, the number of columns
    when epsilon is so large that all pairs are alike.

    >>> f = random_sphere(30, 4)
    >>> sharp, flat = sinkhorn_convergence(f, f, (0.001, 100.0))
    >>> flat.converged, round(sharp.partners, 2), round(flat.partners, 2)
    (True, 1.0, 30.0)
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
        # The student's plan at so large an epsilon is a b^T, and KL(P || a b^T) = Σ P log(P/ab).
        value, aux = klot_from_embeddings(
            x, y, x, y, epsilon=1e9, epsilon_star=epsilon, return_aux=True, **options
        )
        error, iterations, converged = (part.item() for part in aux.teacher[2:])
        partners = len(y) * math.exp(-value)
        out.append(Convergence(epsilon, error, iterations, converged, partners))
    return out


def smallest_epsilon(rows: Sequence[Convergence]) -> float | None:
    """The smallest epsilon that converged, as did all larger ones; None when none did.

    >>> smallest_epsilon([Convergence(0.1, 0.0, 9, True, 1.0), Convergence(0.01, 1.0, 9, False, 1)])
    0.1
    """
    ordered = sorted(rows, key=lambda row: -row.epsilon)
    fine = [row.epsilon for row in itertools.takewhile(lambda row: row.converged, ordered)]
    return fine[-1] if fine else None
