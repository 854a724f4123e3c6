"""Canonical correlation analysis in principal bases, on the host in float64."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from sotalign_jax import checks

_EPS = float(np.finfo(np.float64).eps)


class Principal(NamedTuple):
    """Centred rows, the mean taken off, and the rows' principal directions of non-zero variance."""

    centred: Float[np.ndarray, "n d"]
    mean: Float[np.ndarray, " d"]
    eigenvalues: Float[np.ndarray, " r"]
    basis: Float[np.ndarray, "d r"]


class Directions(NamedTuple):
    """Directions of two tables that go together, in order of decreasing singular value."""

    weights_x: Float[np.ndarray, "d_x r"]
    weights_y: Float[np.ndarray, "d_y r"]
    values: Float[np.ndarray, " r"]


class Canonical(NamedTuple):
    """Canonical variates: z_x = (x - mean_x) weights_x, z_y likewise, and corr_k = mean z_xk z_yk.

    Without a ridge every variate has mean square 1 over the pairs, and the correlations are
    Pearson's.
    """

    mean_x: Float[np.ndarray, " d_x"]
    mean_y: Float[np.ndarray, " d_y"]
    weights_x: Float[np.ndarray, "d_x dim"]
    weights_y: Float[np.ndarray, "d_y dim"]
    correlations: Float[np.ndarray, " dim"]


def principal(centred: Float[np.ndarray, "n d"], mean: Float[np.ndarray, " d"]) -> Principal:
    """Eigenvalues and eigenvectors of centred^T centred; no d x d matrix when rows are fewer."""
    if len(centred) < centred.shape[1]:
        _, singular, directions = np.linalg.svd(centred, full_matrices=False)
        eigenvalues, basis = np.square(singular), directions.T
    else:
        eigenvalues, basis = np.linalg.eigh(centred.T @ centred)
    kept = eigenvalues > max(centred.shape) * _EPS * eigenvalues.max()
    return Principal(centred, mean, eigenvalues[kept], basis[:, kept])


def rotate(x: Principal, y: Principal, gain: Callable[[np.ndarray], np.ndarray]) -> Directions:
    """Rotates the two sides together after weighting their principal directions by `gain`.

    In the principal bases V_x, V_y a map R_x = V_x diag(gain) V_x^T is diagonal, so that
    R_x S_xy R_y = V_x C V_y^T with C = (A V_x diag(gain))^T (B V_y diag(gain)) of size rank x rank:
    whatever the number of pairs, nothing lives outside the span of the rows.
    """
    weights_x = x.basis * gain(x.eigenvalues)
    weights_y = y.basis * gain(y.eigenvalues)
    left, values, right = np.linalg.svd(
        (x.centred @ weights_x).T @ (y.centred @ weights_y), full_matrices=False
    )
    rank = int(np.sum(values > values[0] * max(left.shape[0], right.shape[1]) * _EPS))
    return Directions(weights_x @ left[:, :rank], weights_y @ right[:rank].T, values[:rank])


def cca(A: Any, B: Any, *, ridge: float = 0.0) -> Canonical:
    """Canonical correlation analysis of rows as they are: centred, but not normalised.

    With S_xx = A^T A / n of centred rows, R_x = (S_xx + ridge tr(S_xx) / d_x I)^(-1/2), R_y
    likewise and R_x S_xy R_y = U diag(corr) V^T, the weights are R_x U and R_y V. Every direction
    that the pairs determine is kept, at most min(d_x, d_y, n - 1).

    Without a ridge, n - 1 <= max(d_x, d_y) pairs correlate perfectly along every direction: the
    fit says nothing about new rows.

    Args:
        A: paired rows of the first side, (n, d_x).
        B: paired rows of the second, (n, d_y); row i belongs to row i of `A`.
        ridge: added to both covariances, as a multiple of their mean variance.

    Raises:
        InputError: rows do not match, are not finite or are zero; all rows of a side are equal;
            fewer than 2 pairs; or `ridge` is negative.

    >>> A = np.random.default_rng(0).normal(size=(50, 4))
    >>> cca(A, A[:, :2]).correlations.round(6)
    array([1., 1.])
    """
    checks.pairs(A, B, min_rows=2)
    checks.at_least(0, ridge=ridge)
    (x, spread_x), (y, spread_y) = _standard("A", A), _standard("B", B)
    found = rotate(x, y, lambda variances: 1.0 / np.sqrt(variances + ridge))
    return Canonical(
        x.mean,
        y.mean,
        found.weights_x / spread_x,
        found.weights_y / spread_y,
        found.values,
    )


def _standard(name: str, table: Any) -> tuple[Principal, float]:
    """Principal directions of rows divided by their spread, and the spread.

    The covariance of the divided rows has mean variance 1.
    """
    rows = np.asarray(table).astype(np.float64)
    mean = rows.mean(axis=0)
    centred = rows - mean
    lengths = np.linalg.norm(centred, axis=1)
    if lengths.max() < 1e-6 * np.linalg.norm(mean):  # what is left is the rounding of the inputs
        raise checks.InputError(
            f"pairs {name}: all rows are equal; pass pairs that differ from each other"
        )
    spread = math.sqrt(np.mean(np.square(centred)))
    return principal(centred / (spread * math.sqrt(len(rows))), mean), spread
