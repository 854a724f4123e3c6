"""Kernel canonical correlation analysis: maps through a Gaussian kernel, and their fit.

The fit runs on the host in float64 and in blocks of rows, so memory grows with the landmarks
and not with the pairs. `teachers.kernel_cca` is the public function.

References:
    P. L. Lai and C. Fyfe, "Kernel and nonlinear canonical correlation analysis", International
    Journal of Neural Systems 10 (2000).
    D. R. Hardoon, S. Szedmak and J. Shawe-Taylor, "Canonical correlation analysis: an overview with
    application to learning methods", Neural Computation 16 (2004).
    C. Williams and M. Seeger, "Using the Nystroem method to speed up kernel machines", NeurIPS
    2000.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sotalign_jax import checks, crossval
from sotalign_jax.ot import affinity

Rows = Array | np.ndarray
# With 2,000 landmarks in float64, a block of the kernel takes 33 MB.
BLOCK = 2048
"""Number of rows whose kernel is computed at a time."""
# Smallest eigenvalue of the kernel that is kept, relative to the largest. It is close to the
# precision of float32, in which the maps are evaluated.
_SMALLEST = 1e-7


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KernelMap:
    """The map x -> (k(z) - centre) W^T with z = l2(l2(x) - mean), a pytree.

    Entry j of k(z) is exp(-gamma ||z - landmark_j||^2). In numpy:

        z = unit(unit(x) - mean)
        k = np.exp(-gamma * np.square(z[:, None] - landmarks).sum(-1))
        (k - centre) @ weight.T

    Attributes:
        mean: Mean of the unit rows that the map was fitted on.
        landmarks: Unit rows like z.
        gamma: Bandwidth of the Gaussian kernel.
        centre: Mean of k over the rows that the map was fitted on.
        weight: Output directions, one per row.

    Example:
        >>> pull = KernelMap(jnp.zeros(2), jnp.eye(2), jnp.array(1.0), jnp.zeros(2), jnp.eye(2))
        >>> print(pull(jnp.array([[3.0, 0.0]])).round(3))  # near the first landmark
        [[1.    0.135]]
    """

    mean: Float[Array, " d_in"]
    landmarks: Float[Array, "m d_in"]
    gamma: Float[Array, ""]
    centre: Float[Array, " m"]
    weight: Float[Array, "d_out m"]

    @property
    def d_in(self) -> int:
        """Width of the embeddings."""
        return self.landmarks.shape[1]

    @property
    def d_out(self) -> int:
        """Number of output directions."""
        return self.weight.shape[0]

    def __call__(self, x: Array | np.ndarray) -> Float[Array, "n d_out"]:
        """Maps rows of shape [n, d_in] in the precision of the weight, whatever their dtype."""
        rows = affinity.l2_normalize(jnp.asarray(x).astype(self.weight.dtype))
        z = affinity.l2_normalize(rows - self.mean)
        # ||z - l||^2 = ||z||^2 + 1 - 2 z.l for unit landmarks l. Rounding may make it negative.
        squared = jnp.sum(jnp.square(z), axis=-1, keepdims=True) + 1.0
        distances = jnp.maximum(squared - 2.0 * affinity.dot(z, self.landmarks.T), 0.0)
        return affinity.dot(jnp.exp(-self.gamma * distances) - self.centre, self.weight.T)

    def leading(self, dim: int) -> "KernelMap":
        """Returns the map to the first output directions.

        Args:
            dim: Number of directions.

        Returns:
            The smaller map.

        Raises:
            InputError: The map has fewer directions.
        """
        checks.within(self.d_out, "directions in this map", dim=dim)
        return dataclasses.replace(self, weight=self.weight[:dim])


def fit(
    pairs_x: Rows,
    pairs_y: Rows,
    options: crossval.Options,
    *,
    landmarks: int,
    dim: int | None,
    seed: int,
    dtype: Any,
) -> tuple[KernelMap, KernelMap, Float[np.ndarray, " dim"]]:
    """Fits the maps of `teachers.kernel_cca`.

    Landmarks are drawn in `crossval.order`, so they do not depend on the order of the pairs.

    Args:
        pairs_x: Paired embeddings of the first modality, shape [n, d_x].
        pairs_y: Paired embeddings of the second modality, shape [n, d_y].
        options: Bandwidths, relative ridges and power.
        landmarks: Largest number of landmarks.
        dim: Number of directions. None keeps all that the pairs determine, at most 512.
        seed: Seed of the choice of landmarks.
        dtype: Dtype of the maps' arrays.

    Returns:
        Both maps, and Pearson's correlation of each direction on the pairs.

    Raises:
        InputError: All rows of a modality are equal, or the pairs determine fewer than `dim`
            directions.
    """
    pairs_x, pairs_y = np.asarray(pairs_x), np.asarray(pairs_y)
    n = len(pairs_x)
    chosen = np.arange(n)
    if n > landmarks:
        chosen = np.sort(crossval.order(pairs_x, pairs_y, seed=seed)[:landmarks])
    x = _basis("pairs_x", pairs_x, chosen, options.gamma_x)
    y = _basis("pairs_y", pairs_y, chosen, options.gamma_y)
    # Two passes over the pairs, because the covariances need the means. No array of n rows is kept.
    centres = [
        sum(side.kernel(rows).sum(axis=0) for rows in _blocks(pairs)) / n
        for side, pairs in ((x, pairs_x), (y, pairs_y))
    ]
    sums: list[Any] = [0.0, 0.0, 0.0]
    for rows_x, rows_y in zip(_blocks(pairs_x), _blocks(pairs_y), strict=True):
        f = (x.kernel(rows_x) - centres[0]) @ x.whiten
        g = (y.kernel(rows_y) - centres[1]) @ y.whiten
        sums = [a + b for a, b in zip(sums, (f.T @ f, g.T @ g, f.T @ g), strict=True)]
    xx, yy, xy = (total / (n - 1) for total in sums)
    # Relative to the trace over the width of the embeddings, as in `crossval`, which chooses them.
    ridges = (
        options.ridge_x * float(np.trace(xx)) / pairs_x.shape[1],
        options.ridge_y * float(np.trace(yy)) / pairs_y.shape[1],
    )
    found = _canonical(xx, yy, xy, ridges)
    rank = len(found.rho)
    dim = min(rank, crossval.DIRECTIONS) if dim is None else dim
    checks.within(rank, f"directions that these {n} pairs determine", dim=dim)
    maps = []
    sides = zip((x, y), centres, (found.weights_x, found.weights_y), strict=True)
    for basis, centre, weights in sides:
        # Directions are weighted by rho^power, as in `teachers.cca`.
        weight = (basis.whiten @ (weights[:, :dim] * found.rho[:dim] ** options.power)).T
        arrays = (basis.mean, basis.landmarks, basis.gamma, centre, weight)
        maps.append(KernelMap(*(jnp.asarray(array, dtype) for array in arrays)))
    return maps[0], maps[1], found.correlations[:dim]


# --- features and moments ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Basis:
    """Nystroem features phi(z) = (k(z) - centre) @ whiten of the landmarks of one side."""

    mean: Float[np.ndarray, " d"]
    landmarks: Float[np.ndarray, "m d"]
    gamma: float
    whiten: Float[np.ndarray, "m r"]

    def kernel(self, rows: Any) -> Float[np.ndarray, "n m"]:
        """Computes the kernel of rows with the landmarks."""
        return _gauss(_prepared(rows, self.mean), self.landmarks, self.gamma)


class _Canonical(NamedTuple):
    """Weights of the features, the singular values, and Pearson's correlations on the pairs."""

    weights_x: Float[np.ndarray, "r k"]
    weights_y: Float[np.ndarray, "s k"]
    rho: Float[np.ndarray, " k"]
    correlations: Float[np.ndarray, " k"]


def _basis(name: str, rows: Any, chosen: np.ndarray, gamma: float | None) -> _Basis:
    """Computes the Nystroem features of the chosen landmarks."""
    assert gamma is not None, "options of a linear CCA"
    mean = _mean(rows)
    landmarks = _prepared(np.asarray(rows)[chosen], mean)
    # Centring the kernel removes the direction that all rows share.
    kernel = _gauss(landmarks, landmarks, gamma)
    kernel = kernel - kernel.mean(axis=0)
    kernel -= kernel.mean(axis=1, keepdims=True)
    # Nystroem: the inner products of features (k - centre) V / sqrt(eigenvalues) are the kernel.
    eigenvalues, vectors = np.linalg.eigh(kernel)
    kept = eigenvalues > _SMALLEST * eigenvalues[-1]
    # The centred kernel of equal rows holds only rounding errors.
    if eigenvalues[-1] < 1e-10:
        raise checks.InputError(
            f"{name} must have rows that differ from each other, got rows of one direction"
        )
    return _Basis(mean, landmarks, gamma, vectors[:, kept] / np.sqrt(eigenvalues[kept]))


def _canonical(
    xx: np.ndarray, yy: np.ndarray, xy: np.ndarray, ridges: tuple[float, float]
) -> _Canonical:
    """Whitens both sides and rotates them onto each other, given their covariances.

    Any square root of (S + ridge I)^(-1) gives the same directions, because a rotation follows. The
    Cholesky factor is the cheapest.
    """
    roots = []
    for covariance, ridge in zip((xx, yy), ridges, strict=True):
        # The floor keeps the covariance invertible without a ridge.
        floor = max(ridge, _SMALLEST * float(np.trace(covariance)) / len(covariance))
        lower = np.linalg.cholesky(covariance + floor * np.eye(len(covariance)))
        roots.append(np.linalg.inv(lower).T)
    x, y = roots
    left, rho, right = np.linalg.svd(x.T @ xy @ y, full_matrices=False)
    # The numerical rank, by the criterion of `np.linalg.matrix_rank`.
    kept = rho > rho[0] * max(left.shape[0], right.shape[1]) * np.finfo(np.float64).eps
    weights_x, weights_y = x @ left[:, kept], y @ right[kept].T
    # Pearson's correlations of the canonical variates. With a ridge they differ from rho.
    variance_x, variance_y, together = (
        np.einsum("ik,ik->k", a, s @ b)
        for a, s, b in (
            (weights_x, xx, weights_x),
            (weights_y, yy, weights_y),
            (weights_x, xy, weights_y),
        )
    )
    scale = np.sqrt(np.maximum(variance_x * variance_y, np.finfo(np.float64).tiny))
    return _Canonical(weights_x, weights_y, np.minimum(rho[kept], 1.0), together / scale)


def _gauss(z: np.ndarray, landmarks: np.ndarray, gamma: float) -> np.ndarray:
    """Computes the Gaussian kernel of rows with unit landmarks."""
    # ||z - l||^2 = ||z||^2 + 1 - 2 z.l for unit landmarks l. Rounding may make it negative.
    distances = np.square(z).sum(axis=1, keepdims=True) + 1.0 - 2.0 * (z @ landmarks.T)
    return np.exp(-gamma * np.maximum(distances, 0.0))


def _prepared(rows: Any, mean: np.ndarray) -> np.ndarray:
    """Returns l2(l2(rows) - mean)."""
    return crossval.unit(crossval.unit(rows) - mean)


def _mean(rows: Any) -> np.ndarray:
    """Computes the mean of the unit rows, a block at a time."""
    total = sum(crossval.unit(block).sum(axis=0) for block in _blocks(rows))
    return np.asarray(total / len(rows))


def _blocks(rows: Any) -> Iterator[np.ndarray]:
    """Yields blocks of rows, read from a memory-mapped array one at a time."""
    for start in range(0, len(rows), BLOCK):
        yield np.asarray(rows[start : start + BLOCK])
