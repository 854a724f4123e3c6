"""Linear teachers: coarse maps into a shared space, fitted on the pairs alone, then frozen.

`procrustes` and `cca` are closed forms, computed on the host in float64; both return a
`LinearTeacher`. `canonical_correlations` is the same analysis of rows that are not normalised.
The contrastive teacher is trained: see `training.contrastive`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sotalign_jax import checks, kernels
from sotalign_jax.heads import AffineMap, Rows
from sotalign_jax.heads import LinearTeacher as LinearTeacher

_EIGENVALUE_FLOOR = 1e-6
_EPS = float(np.finfo(np.float64).eps)


def procrustes(
    pairs_x: Rows, pairs_y: Rows, *, dim: int | None = None, renorm: bool = False
) -> LinearTeacher:
    """Orthogonal Procrustes: maximises <A P^T, B Q^T> over P P^T = Q Q^T = I.

    With A^T B = U S V^T the solution is P = U_dim^T, Q = V_dim^T. Rows are L2-normalised and
    centred first, and the arguments are those of `cca`.

    >>> A = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    >>> teacher = procrustes(A, A[:, ::-1])
    >>> bool(jnp.allclose(teacher.x(A), teacher.y(A[:, ::-1]), atol=1e-5))
    True
    """
    return _closed_form(pairs_x, pairs_y, np.ones_like, dim=dim, renorm=renorm)


def cca(
    pairs_x: Rows,
    pairs_y: Rows,
    *,
    ridge: float = 0.1,
    power: float = 0.0,
    dim: int | None = None,
    cov_normalize: bool = True,
    renorm: bool = False,
) -> LinearTeacher:
    """Ridge canonical correlation analysis: whitens both sides, then rotates them together.

    Rows become x / ||x|| - mu, mu the mean of the L2-normalised paired rows, for every later input,
    too. With R_x = (S_xx + ridge I)^(-1/2), R_y likewise and R_x S_xy R_y = U S V^T, the maps are
    W_x = S^power U^T R_x and W_y = S^power V^T R_y, directions in order of decreasing S.

    Unit rows have covariance eigenvalues that sum to at most 1, so the default ridge outweighs
    nearly all of them and the result is close to `procrustes`. A smaller ridge gives a genuine CCA,
    at the price of trusting directions of small variance.

    Args:
      pairs_x: embeddings A of the first modality, (n, d_x).
      pairs_y: embeddings B of the second, (n, d_y); row i belongs to row i of `pairs_x`.
      ridge: added to the eigenvalues of both covariances.
      power: 0 weighs all directions equally; 0.5 or 1 trust those more that the two sides share.
      dim: directions kept; None keeps the numerical rank, at most min(d_x, d_y, n - 1).
      cov_normalize: covariances A^T A / (n - 1), or A^T A, in which the ridge weighs less.
      renorm: L2-normalise the centred rows again before fitting; it would not change the direction
        of a later input.

    >>> A = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    >>> teacher = cca(A, A[:, ::-1], ridge=1e-4, dim=2)
    >>> teacher.x(A).shape, bool(teacher.correlations.min() > 0.999)
    ((50, 2), True)
    """
    checks.at_least(0, ridge=ridge, power=power)

    def gain(eigenvalues: np.ndarray) -> np.ndarray:
        return 1.0 / np.sqrt(np.maximum(eigenvalues + ridge, _EIGENVALUE_FLOOR))

    scale = 1.0 / math.sqrt(max(len(pairs_x) - 1, 1)) if cov_normalize else 1.0
    options: dict[str, Any] = {"dim": dim, "renorm": renorm, "scale": scale, "power": power}
    return _closed_form(pairs_x, pairs_y, gain, **options)


def kernel_cca(
    pairs_x: Rows,
    pairs_y: Rows,
    *,
    gamma_x: float | None = None,
    gamma_y: float | None = None,
    ridge: float | None = None,
    power: float | None = None,
    landmarks: int = 2000,
    dim: int | None = None,
    seed: int = 0,
    dtype: Any = jnp.float32,
) -> LinearTeacher:
    """Canonical correlation analysis of Gaussian kernel features: `cca` beyond linear maps.

    With z = l2(l2(x) - mean) and k(z, z') = exp(-gamma ||z - z'||^2), every row has the Nystrom
    features phi(z) of the landmarks, so that phi(z) . phi(z') = k(z, z') among them. Centred on
    the pairs, with covariances S_xx, S_yy, S_xy and R_x = (S_xx + ridge I)^(-1/2), R_y likewise,

        R_x S_xy R_y = U diag(rho) V^T,
        x -> rho^power * (U^T R_x phi_x(x)),    y -> rho^power * (V^T R_y phi_y(y)).

    As gamma -> 0 the kernel becomes linear: `cca` of the rows z with ridge / (2 gamma). Directions
    come in order of decreasing correlation.

    Args:
      pairs_x: paired embeddings of the first modality, (n, d_x).
      pairs_y: paired embeddings of the second, (n, d_y); row i belongs to row i of `pairs_x`.
      gamma_x: bandwidth; None takes `kernels.choose`'s, as for the next three.
      gamma_y: bandwidth of the second modality.
      ridge: added to the eigenvalues of both covariances, whose sum is at most 1.
      power: 0 weighs all directions equally, as `cca` does by default.
      landmarks: pairs that the kernel compares with; all when there are no more than this, and
        else this many at random. Time grows with its cube, memory with its square.
      dim: directions kept; None keeps all that the pairs determine.
      seed: of the choice of landmarks and of the folds of `kernels.choose`.
      dtype: of the teacher's arrays.

    >>> angle = np.random.default_rng(0).uniform(0, 6.28, size=(60, 1)).astype(np.float32)
    >>> A = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    >>> B = np.concatenate([np.cos(2 * angle), np.sin(2 * angle)], axis=1)  # no linear map of A
    >>> teacher = kernel_cca(A, B, gamma_x=1.0, gamma_y=1.0, ridge=1e-3, power=0.5, dim=2)
    >>> bool(teacher.correlations.min() > 0.95)
    True
    """
    checks.pairs(pairs_x, pairs_y, min_rows=2)
    checks.whole(2, landmarks=landmarks)
    checks.whole(1, or_none=True, dim=dim)
    given = {"gamma_x": gamma_x, "gamma_y": gamma_y, "ridge": ridge, "power": power}
    fixed = {name: value for name, value in given.items() if value is not None}
    checks.at_least(0, **fixed)
    checks.positive(**{name: fixed[name] for name in ("gamma_x", "gamma_y") if name in fixed})
    if len(fixed) < len(given):
        fixed = kernels.choose(pairs_x, pairs_y, seed=seed, **fixed)._asdict()
    options = kernels.Options(**fixed)
    sizes: dict[str, Any] = {"landmarks": landmarks, "dim": dim, "seed": seed, "dtype": dtype}
    map_x, map_y, correlations = kernels.fit(pairs_x, pairs_y, options, **sizes)
    return LinearTeacher(map_x, map_y, _float32(correlations))


class Canonical(NamedTuple):
    """Canonical variates z_x = (x - mean_x) weights_x, z_y likewise; corr_k = mean z_xk z_yk."""

    mean_x: Float[np.ndarray, " d_x"]
    mean_y: Float[np.ndarray, " d_y"]
    weights_x: Float[np.ndarray, "d_x dim"]
    weights_y: Float[np.ndarray, "d_y dim"]
    correlations: Float[np.ndarray, " dim"]


def canonical_correlations(pairs_x: Rows, pairs_y: Rows, *, ridge: float = 0.0) -> Canonical:
    """The analysis behind `cca`, of rows as they are: centred, but not normalised.

    With S_xx = A^T A / n of centred rows, R_x = (S_xx + ridge tr(S_xx) / d_x I)^(-1/2), R_y
    likewise and R_x S_xy R_y = U diag(corr) V^T, the weights are R_x U and R_y V; all directions
    are kept. Without a ridge, n - 1 <= max(d_x, d_y) pairs correlate perfectly along every one.

    >>> A = np.random.default_rng(0).normal(size=(50, 4))
    >>> canonical_correlations(A, A[:, :2]).correlations.round(6)
    array([1., 1.])
    """
    pairs_x, pairs_y = checks.pairs(pairs_x, pairs_y, min_rows=2)
    checks.at_least(0, ridge=ridge)
    sides = []
    for name, pairs in (("pairs_x", pairs_x), ("pairs_y", pairs_y)):
        centred, mean = _centred(name, pairs.astype(np.float64))
        spread = math.sqrt(np.mean(np.square(centred)))
        sides.append((mean, spread, centred / (spread * math.sqrt(len(centred)))))
    (mean_x, spread_x, x), (mean_y, spread_y, y) = sides
    weights_x, weights_y, correlations = _rotated(x, y, lambda v: 1.0 / np.sqrt(v + ridge))
    return Canonical(mean_x, mean_y, weights_x / spread_x, weights_y / spread_y, correlations)


def _closed_form(
    pairs_x: Rows,
    pairs_y: Rows,
    gain: Callable[[np.ndarray], np.ndarray],
    *,
    dim: int | None,
    renorm: bool,
    scale: float = 1.0,
    power: float = 0.0,
) -> LinearTeacher:
    """Of L2-normalised rows, their principal directions weighted by `gain`."""
    pairs_x, pairs_y = checks.pairs(pairs_x, pairs_y, min_rows=2)
    sides = []
    for name, pairs in (("pairs_x", pairs_x), ("pairs_y", pairs_y)):
        unit = pairs.astype(np.float64)
        unit /= np.linalg.norm(unit, axis=1, keepdims=True)
        centred, mean = _centred(name, unit)
        if renorm:
            centred /= np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-8)
        sides.append((mean, centred * scale))
    (mean_x, x), (mean_y, y) = sides
    weights_x, weights_y, values = _rotated(x, y, gain)
    dim = len(values) if dim is None else dim
    checks.within(len(values), f"directions that these {len(pairs_x)} pairs determine", dim=dim)
    W_x, W_y = ((w[:, :dim] * values[:dim] ** power).T for w in (weights_x, weights_y))
    return LinearTeacher(
        map_x=AffineMap(_float32(W_x), _float32(-W_x @ mean_x), norm="l2"),
        map_y=AffineMap(_float32(W_y), _float32(-W_y @ mean_y), norm="l2"),
        correlations=_float32(pearson(x @ W_x.T, y @ W_y.T)),
    )


def _centred(name: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows without their mean, and the mean."""
    mean = rows.mean(axis=0)
    centred = rows - mean
    largest = np.linalg.norm(centred, axis=1).max()
    if largest < 1e-6 * np.linalg.norm(mean):  # what is left is the rounding of the inputs
        raise checks.InputError(
            f"{name}: all rows point the same way; pass pairs that differ from each other"
        )
    return centred, mean


def _rotated(
    x: np.ndarray, y: np.ndarray, gain: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Both weights and the singular values, the principal directions weighted by `gain`.

    In the principal bases V_x, V_y a map R_x = V_x diag(gain) V_x^T is diagonal, so that
    R_x S_xy R_y = V_x C V_y^T with C = (A V_x diag(gain))^T (B V_y diag(gain)) of size rank x rank.
    """
    weights = []
    for centred in (x, y):
        if len(centred) < centred.shape[1]:  # no d x d matrix when rows are fewer
            _, singular, directions = np.linalg.svd(centred, full_matrices=False)
            eigenvalues, basis = np.square(singular), directions.T
        else:
            eigenvalues, basis = np.linalg.eigh(centred.T @ centred)
        kept = eigenvalues > max(centred.shape) * _EPS * eigenvalues.max()
        weights.append(basis[:, kept] * gain(eigenvalues[kept]))
    left, values, right = np.linalg.svd((x @ weights[0]).T @ (y @ weights[1]), full_matrices=False)
    rank = int(np.sum(values > values[0] * max(left.shape[0], right.shape[1]) * _EPS))
    return weights[0] @ left[:, :rank], weights[1] @ right[:rank].T, values[:rank]


def pearson(x: Float[np.ndarray, "n d"], y: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " d"]:
    """Pearson correlation of each column of `x` with the same column of `y`.

    >>> pearson(np.array([[0.0], [1.0], [2.0]]), np.array([[5.0], [4.0], [3.0]]))
    array([-1.])
    """
    x = x.astype(np.float64) - x.mean(axis=0)
    y = y.astype(np.float64) - y.mean(axis=0)
    norms = np.linalg.norm(x, axis=0) * np.linalg.norm(y, axis=0)
    return np.sum(x * y, axis=0) / np.maximum(norms, np.finfo(np.float64).tiny)


def _float32(x: np.ndarray) -> Array:
    return jnp.asarray(x, jnp.float32)
