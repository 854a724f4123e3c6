"""How far two sets of embeddings are apart: the linear spherical sliced Wasserstein distance."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sotalign_jax import checks
from sotalign_jax.ot import affinity
from sotalign_jax.ot.blocks import Block, over_rows

GRID = 100
"""Points of the circle at which distributions on it are compared."""
Rows = Any
"""Embeddings [n, d], one a row: numpy (memory-mapped files included) or JAX arrays."""


class Spread(NamedTuple):
    """Mean and sample standard deviation over repetitions."""

    mean: float
    std: float


def spread(values: Sequence[float]) -> Spread:
    """Of some values; 0 when there is only one.

    >>> spread([1.0, 3.0])
    Spread(mean=2.0, std=1.4142135623730951)
    """
    return Spread(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0)


class Shift(NamedTuple):
    """Distances of samples of one size from a sample of the pairs, see `pool_shift`."""

    pool: Spread
    """Of unpaired rows."""
    noise: Spread
    """Of other pairs: what sampling alone makes."""
    sphere: Spread
    """Of random directions: nothing in common."""
    rows: int
    """Size of the samples."""

    @property
    def share(self) -> float:
        """The pool's distance as a share of the random directions', without sampling noise.

        √((pool² - noise²) / (sphere² - noise²)), as squares of independent parts add up: 0 for a
        pool like the pairs, 1 for one as far as random directions.
        """
        own = max(self.pool.mean**2 - self.noise.mean**2, 0.0)
        full = self.sphere.mean**2 - self.noise.mean**2
        return math.sqrt(own / full) if full > 0 else math.nan


def sliced_wasserstein(
    x: Rows, y: Rows, *, projections: int | Array = 500, seed: int = 0, chunk: int = 16
) -> float:
    """Linear spherical sliced Wasserstein distance between two sets of directions.

        SSW² = mean over planes U of mean_t d(φ_x(t), φ_y(t))²

    Rows are L2-normalised, projected onto random planes, and read as angles θ in [0, 1). A set of
    angles with quantile function F⁻¹ is embedded as φ(t) = F⁻¹(t - mean θ + 1/2) - t, where the
    L2 distance on the circle, d(a, b) = min(|a - b|, 1 - |a - b|), compares it with others
    (Liu et al., Linear Spherical Sliced Optimal Transport). The same number as POT's
    `linear_sliced_wasserstein_sphere`. Finite samples of one distribution are not at distance 0:
    see `pool_shift`.

    Args:
        x: [n, d] embeddings of any length.
        y: [m, d] embeddings from the same encoder.
        projections: how many random planes, or the planes themselves as orthonormal [p, d, 2].
        seed: of the planes.
        chunk: planes at once; memory is about 4 * chunk * (n + m) floats.

    Returns:
        The distance, between 0 and 1/2.

    Raises:
        InputError: widths differ, rows are not finite or are zero; or an option is out of range.

    >>> sliced_wasserstein(np.eye(3), np.eye(3) + 0.1, projections=20) < 0.1
    True
    """
    _check_sets(x, y)
    checks.whole(1, chunk=chunk)
    if isinstance(projections, int | np.integer):
        checks.whole(1, projections=projections)
        planes = random_planes(jax.random.key(seed), projections, x.shape[1])
    elif np.ndim(projections) != 3 or np.shape(projections)[1:] != (x.shape[1], 2):
        raise checks.InputError(
            f"projections: has shape {np.shape(projections)}; pass [p, {x.shape[1]}, 2]"
        )
    else:
        planes = affinity.as_float(projections)
    return _distance(*(_embed(affinity.as_float(z), planes, chunk=chunk) for z in (x, y)))


def sliced_wasserstein_spread(
    x: Rows,
    y: Rows,
    *,
    repeats: int = 20,
    rows: int = 100_000,
    projections: int = 500,
    seed: int = 0,
    chunk: int = 16,
) -> Spread:
    """`sliced_wasserstein` over `repeats` seeds, each with new planes and new samples of `rows`.

    A set of fewer rows is taken whole.

    >>> x = np.random.default_rng(0).normal(size=(90, 8))
    >>> near = sliced_wasserstein_spread(x[:50], x[50:], repeats=3, rows=40, projections=50)
    >>> near.std < near.mean
    True
    """
    _check_sets(x, y)
    checks.whole(1, repeats=repeats, rows=rows, projections=projections, chunk=chunk)
    values = []
    for rng, planes in _repetitions(repeats, projections, x.shape[1], seed):
        samples = (_sample(rng, z, min(rows, len(z))) for z in (x, y))
        values.append(_distance(*(_embed(z, planes, chunk=chunk) for z in samples)))
    return spread(values)


def pool_shift(
    pairs: Rows,
    pool: Rows,
    *,
    repeats: int = 20,
    rows: int = 100_000,
    projections: int = 500,
    seed: int = 0,
    chunk: int = 16,
    on_repeat: Callable[[], None] = lambda: None,
) -> Shift:
    """How far unpaired rows are from the paired ones, beside two distances to judge it by.

    The pairs are halved at random; one half's distance is measured to as many unpaired rows
    (`pool`), to the other half (`noise`) and to as many random directions (`sphere`). All samples
    have one size, at most `rows`, because the distance falls with the size. Repeated with
    new halves, samples and planes; `on_repeat` is called after each time, to show progress.

    >>> x = np.random.default_rng(0).normal(size=(60, 8)) + 1
    >>> shift = pool_shift(x, -x, repeats=3, projections=50)
    >>> shift.noise.mean < shift.sphere.mean < shift.pool.mean
    True
    """
    _check_sets(pairs, pool, names=("pairs", "pool"), min_rows=2)
    checks.whole(1, repeats=repeats, rows=rows, projections=projections, chunk=chunk)
    size = min(rows, len(pairs) // 2, len(pool))
    distances: list[list[float]] = [[], [], []]
    for rng, planes in _repetitions(repeats, projections, pairs.shape[1], seed):
        order = rng.permutation(len(pairs))
        half = _embed(_take(pairs, order[:size]), planes, chunk=chunk)
        others = (
            _sample(rng, pool, size),
            _take(pairs, order[size : 2 * size]),
            random_sphere(size, pairs.shape[1], seed=int(rng.integers(2**31))),
        )
        for values, other in zip(distances, others, strict=True):
            values.append(_distance(half, _embed(other, planes, chunk=chunk)))
        on_repeat()
    near, noise, far = map(spread, distances)
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


@functools.partial(jax.jit, static_argnames="chunk")
def _embed(
    x: Float[Array, "n d"], planes: Float[Array, "p d 2"], *, chunk: int
) -> Float[Array, "p grid"]:
    """φ of the rows in every plane; the distance of two sets is one between their φ."""
    x = affinity.l2_normalize(x)

    def embed(block: Block, out: Array) -> Array:
        bases = jnp.moveaxis(block.of(planes), 0, 1).reshape(x.shape[1], -1)
        flat = affinity.dot(x, bases.astype(x.dtype)).reshape(len(x), block.size, 2)
        angles = (jnp.arctan2(-flat[..., 1], -flat[..., 0]) + jnp.pi) / (2 * jnp.pi)
        return block.put(out, _circular_embedding(angles.T))

    return over_rows(len(planes), chunk, embed, jnp.zeros((len(planes), GRID), x.dtype))


def _circular_embedding(angles: Float[Array, "p n"]) -> Float[Array, "p grid"]:
    n = angles.shape[1]
    angles = jnp.abs(angles % 1)
    # Numbers above 0 are ordered as their bits are, and whole numbers sort six times faster.
    bits = jnp.int64 if angles.dtype == jnp.float64 else jnp.int32
    ordered = jnp.sort(jax.lax.bitcast_convert_type(angles, bits), axis=1)
    grid = jnp.linspace(0, 1, GRID, endpoint=False, dtype=angles.dtype)
    levels = (grid - angles.mean(axis=1, keepdims=True) + 0.5) % 1
    # As in POT, the order statistic after the quantile.
    index = jnp.clip(jnp.ceil(levels * n).astype(jnp.int32), 0, n - 1)
    quantiles = jnp.take_along_axis(ordered, index, axis=1)
    return (jax.lax.bitcast_convert_type(quantiles, angles.dtype) - grid) % 1


def _distance(a: Array, b: Array) -> float:
    gap = jnp.abs(a - b)
    return float(jnp.sqrt(jnp.mean(jnp.square(jnp.minimum(gap, 1 - gap)))))


def _repetitions(
    repeats: int, projections: int, dim: int, seed: int
) -> Iterator[tuple[np.random.Generator, Array]]:
    for repeat in range(repeats):
        key = jax.random.fold_in(jax.random.key(seed), repeat)
        yield np.random.default_rng((seed, repeat)), random_planes(key, projections, dim)


def _sample(rng: np.random.Generator, x: Rows, size: int) -> Array:
    return _take(x, rng.permutation(len(x))[:size])


def _take(x: Rows, rows: np.ndarray) -> Array:
    return affinity.as_float(x[np.sort(rows)])  # in order, for files are read faster that way


def _check_sets(
    x: Rows, y: Rows, *, names: tuple[str, str] = ("x", "y"), min_rows: int = 1
) -> None:
    checks.embeddings(names[0], x, min_rows=min_rows)
    checks.embeddings(names[1], y, width=x.shape[1])
    if x.shape[1] < 2:
        raise checks.InputError(f"{names[0]}: rows have width 1; directions need at least 2")
