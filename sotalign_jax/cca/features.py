"""Feature maps in which a CCA is linear: principal directions, and Gaussian kernel features.

Both map rows to coordinates that are centred on the pairs. They run on the host in float64 and in
blocks of rows.

References:
    C. Williams and M. Seeger, "Using the Nystroem method to speed up kernel machines", NeurIPS
    2000.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import linalg

from sotalign_jax import checks
from sotalign_jax.cca.moments import unit

# With 2,000 landmarks in float64, a block of the kernel takes 33 MB.
BLOCK = 2048
"""Number of rows whose features are computed at a time."""
# Smallest eigenvalue of a kernel that is kept, relative to the largest. It is close to the
# precision of float32, in which the maps are evaluated.
_SMALLEST = 1e-7


@dataclasses.dataclass(frozen=True)
class Linear:
    """The features (unit(x) - mean) @ basis.

    Attributes:
        mean: Mean of the pairs' unit rows.
        basis: Directions, one per column.
    """

    mean: Float[np.ndarray, " d"]
    basis: Float[np.ndarray, "d r"]

    def __call__(self, rows: Any) -> Float[np.ndarray, "n r"]:
        return (unit(rows) - self.mean) @ self.basis


@dataclasses.dataclass(frozen=True)
class Gaussian:
    """The Nystroem features (k(z) - centre) @ whiten with z = unit(unit(x) - mean).

    Their inner products are the Gaussian kernel k(z, z') = exp(-gamma ||z - z'||^2) if z and z' are
    landmarks.

    Attributes:
        mean: Mean of the pairs' unit rows.
        landmarks: Unit rows like z.
        gamma: Bandwidth of the kernel.
        centre: Mean of k over the pairs.
        whiten: Weights of the features, one per column.
    """

    mean: Float[np.ndarray, " d"]
    landmarks: Float[np.ndarray, "m d"]
    gamma: float
    centre: Float[np.ndarray, " m"]
    whiten: Float[np.ndarray, "m r"]

    def __call__(self, rows: Any) -> Float[np.ndarray, "n r"]:
        z = unit(unit(rows) - self.mean)
        return (_kernel(z, self.landmarks, self.gamma) - self.centre) @ self.whiten


Features = Linear | Gaussian


def width(features: Features) -> int:
    """Returns the width of the embeddings that features are computed from."""
    return len(features.mean)


def principal(pairs: Any, others: Any, most: int) -> Linear:
    """Computes the leading principal directions of the pairs and of other rows.

    Args:
        pairs: Paired embeddings, shape [n, d].
        others: Embeddings of the same modality, shape [m, d].
        most: Largest number of directions.

    Returns:
        The features. With at most `most` columns, they are the centred rows themselves.

    Example:
        >>> principal(np.eye(3), np.eye(3), 2).basis.shape
        (3, 2)
    """
    rows = unit(pairs)
    mean, width = rows.mean(axis=0), rows.shape[1]
    if width <= most:
        return Linear(mean, np.eye(width))
    pool = unit(others)
    total = np.zeros((width, width))
    for part in (rows - mean, pool - pool.mean(axis=0)):
        total += part.T @ part
    values, basis = linalg.eigh(total, subset_by_index=[width - most, width - 1])
    # Rows that vary less than rounding need no coordinate.
    return Linear(mean, basis[:, values > 1e-10 * values[-1]])


def gaussian(name: str, pairs: Any, landmarks: Any, gamma: float) -> Gaussian:
    """Computes the Nystroem features of landmarks.

    Args:
        name: Name of the argument for error messages.
        pairs: Paired embeddings, shape [n, d].
        landmarks: Embeddings of the same modality, shape [m, d].
        gamma: Bandwidth of the kernel.

    Returns:
        The features above rounding, in order of increasing variance over the landmarks.

    Raises:
        InputError: All landmarks are equal.

    Example:
        >>> rows = np.random.default_rng(0).normal(size=(9, 4))
        >>> gaussian("x", rows, rows, 1.0)(rows).shape
        (9, 8)
    """
    mean = np.asarray(sum(unit(block).sum(axis=0) for block in blocks(pairs)) / len(pairs))
    z = unit(unit(landmarks) - mean)
    # Centring the kernel removes the direction that all rows share.
    kernel = _kernel(z, z, gamma)
    kernel = kernel - kernel.mean(axis=0)
    kernel -= kernel.mean(axis=1, keepdims=True)
    values, vectors = np.linalg.eigh(kernel)
    # The centred kernel of equal rows holds only rounding errors.
    if values[-1] < 1e-10:
        raise checks.InputError(
            f"{name} must have rows that differ from each other, got rows of one direction"
        )
    kept = np.flatnonzero(values > _SMALLEST * values[-1])
    whiten = vectors[:, kept] / np.sqrt(values[kept])
    raw = Gaussian(mean, z, gamma, np.zeros(len(z)), np.eye(len(z)))
    centre = np.asarray(sum(raw(block).sum(axis=0) for block in blocks(pairs)) / len(pairs))
    return dataclasses.replace(raw, centre=centre, whiten=whiten)


def blocks(rows: Any) -> Iterator[np.ndarray]:
    """Yields blocks of rows, read from a memory-mapped array one at a time."""
    for start in range(0, len(rows), BLOCK):
        yield np.asarray(rows[start : start + BLOCK])


def _kernel(z: np.ndarray, landmarks: np.ndarray, gamma: float) -> np.ndarray:
    """Computes the Gaussian kernel of rows with unit landmarks."""
    # ||z - l||^2 = ||z||^2 + 1 - 2 z.l for unit landmarks l. Rounding may make it negative.
    distances = np.square(z).sum(axis=1, keepdims=True) + 1.0 - 2.0 * (z @ landmarks.T)
    return np.exp(-gamma * np.maximum(distances, 0.0))
