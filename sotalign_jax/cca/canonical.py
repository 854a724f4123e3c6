"""From moments to canonical directions: whiten both sides, then rotate them onto each other.

A root R of a covariance satisfies R^T (S + ridge I) R = I. The rotation follows from the singular
value decomposition R_x^T S_xy R_y = U diag(rho) V^T, and the directions are R_x U and R_y V. Every
root gives the same directions, so callers take the cheapest one that is accurate enough.

References:
    H. Hotelling, "Relations between two sets of variates", Biometrika 28 (1936).
    H. D. Vinod, "Canonical ridge and econometrics of joint production", Journal of Econometrics 4
    (1976).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from sotalign_jax.cca.moments import Moments

EPS = float(np.finfo(np.float64).eps)
TINY = float(np.finfo(np.float64).tiny) ** 0.5
Gain = Callable[[np.ndarray], np.ndarray]
"""Maps eigenvalues to the weights of the principal directions, such as 1 / sqrt(eigenvalue)."""
# Smallest ridge, relative to the mean eigenvalue.
_SMALLEST = 1e-7


class Directions(NamedTuple):
    """Canonical directions, one per column, in order of decreasing rho.

    Attributes:
        x: Directions of the first modality.
        y: Directions of the second modality.
        rho: Singular values of the whitened cross-covariance.
    """

    x: Float[np.ndarray, "d k"]
    y: Float[np.ndarray, "e k"]
    rho: Float[np.ndarray, " k"]

    def weighted(self, power: float) -> "Directions":
        """Returns the directions multiplied by rho^power."""
        weights = self.rho**power
        return Directions(self.x * weights, self.y * weights, self.rho)


def principal_root(rows: np.ndarray, gain: Gain) -> Float[np.ndarray, "d r"]:
    """Computes a root from the principal directions of centred rows, weighted by `gain`.

    Args:
        rows: Centred rows, scaled so that rows^T rows is the covariance, shape [n, d].
        gain: Weights of the directions, given their eigenvalues.

    Returns:
        One column per direction. Directions of rounding size are left out.
    """
    # With fewer rows than features, an SVD of the rows avoids the d x d covariance.
    if len(rows) < rows.shape[1]:
        _, singular, directions = np.linalg.svd(rows, full_matrices=False)
        eigenvalues, basis = np.square(singular), directions.T
    else:
        eigenvalues, basis = np.linalg.eigh(rows.T @ rows)
    # The criterion of `np.linalg.matrix_rank`.
    kept = eigenvalues > max(rows.shape) * EPS * eigenvalues.max()
    return basis[:, kept] * gain(eigenvalues[kept])


def cholesky_root(covariance: np.ndarray, ridge: float) -> Float[np.ndarray, "d d"]:
    """Computes a root of S + ridge I by a Cholesky decomposition, the fastest way.

    Args:
        covariance: The covariance S.
        ridge: Ridge. It is at least 1e-7 times the mean eigenvalue, so that the root exists.

    Returns:
        The root.

    Example:
        >>> cholesky_root(np.diag([3.0, 8.0]), 1.0).round(6).tolist()
        [[0.5, 0.0], [0.0, 0.333333]]
    """
    least = _SMALLEST * float(np.trace(covariance)) / len(covariance)
    # A covariance of zero, as of a pool of one row, gets a root as well.
    floor = max(ridge, least, TINY)
    lower = np.linalg.cholesky(covariance + floor * np.eye(len(covariance)))
    return np.linalg.inv(lower).T


def diagonal_root(variances: np.ndarray, ridge: float) -> Float[np.ndarray, " r"]:
    """Computes the root of S + ridge I for a diagonal S, as of principal coordinates.

    Args:
        variances: Diagonal of S. There may be no variance at all.
        ridge: Ridge, which has the floor of `cholesky_root`.

    Returns:
        Diagonal of the root.

    Example:
        >>> diagonal_root(np.array([3.0, 8.0]), 1.0).round(6).tolist()
        [0.5, 0.333333]
    """
    return 1.0 / np.sqrt(
        np.maximum(variances, 0.0) + max(ridge, _SMALLEST * variances.mean(), TINY)
    )


def rotate(root_x: np.ndarray, cross: np.ndarray, root_y: np.ndarray) -> Directions:
    """Rotates whitened coordinates of both modalities onto each other.

    Args:
        root_x: Root of the first modality, shape [d, r].
        cross: Cross-covariance, shape [d, e].
        root_y: Root of the second modality, shape [e, s].

    Returns:
        The directions up to the numerical rank.
    """
    left, rho, right = np.linalg.svd(root_x.T @ cross @ root_y, full_matrices=False)
    rank = int(np.sum(rho > rho[0] * max(left.shape[0], right.shape[1]) * EPS))
    return Directions(root_x @ left[:, :rank], root_y @ right[:rank].T, rho[:rank])


def leading(
    whitened: Float[np.ndarray, "r s"], most: int
) -> tuple[Float[np.ndarray, "r k"], Float[np.ndarray, " k"], Float[np.ndarray, "s k"]]:
    """Computes leading singular vectors from the smaller Gram matrix, which is faster than an SVD.

    The Gram matrix squares the condition number, so small singular values are left out, which suits
    a search over options.

    Args:
        whitened: Whitened cross-covariance.
        most: Largest number of singular vectors.

    Returns:
        The left vectors, the singular values in decreasing order, and the right vectors.

    Example:
        >>> leading(np.diag([2.0, 4.0]), 1)[1]
        array([4.])
    """
    if whitened.shape[0] < whitened.shape[1]:
        right, rho, left = leading(whitened.T, most)
        return left, rho, right
    values, right = np.linalg.eigh(whitened.T @ whitened)
    kept = np.flatnonzero(values > 1e-12 * values[-1])[::-1][:most]
    rho, right = np.sqrt(values[kept]), right[:, kept]
    return whitened @ right / rho, rho, right


def correlations(covered: Moments, directions: Directions) -> Float[np.ndarray, " k"]:
    """Computes Pearson's correlation of every direction from moments.

    With a ridge the correlations differ from rho.

    Args:
        covered: Moments of the rows to correlate.
        directions: Directions of both modalities.

    Returns:
        One correlation per direction.

    Example:
        >>> same = Moments(2 * np.eye(1), 2 * np.eye(1), np.eye(1))
        >>> correlations(same, Directions(np.eye(1), np.eye(1), np.ones(1)))
        array([0.5])
    """
    x, y = directions.x, directions.y
    variance_x = np.sum(x * (covered.xx @ x), axis=0)
    variance_y = np.sum(y * (covered.yy @ y), axis=0)
    together = np.sum(x * (covered.xy @ y), axis=0)
    return together / np.sqrt(np.maximum(variance_x * variance_y, np.finfo(np.float64).tiny))


def pearson(x: Float[np.ndarray, "n d"], y: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " d"]:
    """Computes Pearson's correlation of each column of `x` with the same column of `y`.

    Args:
        x: Samples of the first modality.
        y: Samples of the second modality.

    Returns:
        One correlation per column.

    Example:
        >>> pearson(np.array([[0.0], [1.0], [2.0]]), np.array([[5.0], [4.0], [3.0]]))
        array([-1.])
    """
    # float64, because correlations near 1 differ in their last digits.
    x = x.astype(np.float64) - x.mean(axis=0)
    y = y.astype(np.float64) - y.mean(axis=0)
    norms = np.linalg.norm(x, axis=0) * np.linalg.norm(y, axis=0)
    return np.sum(x * y, axis=0) / np.maximum(norms, np.finfo(np.float64).tiny)
