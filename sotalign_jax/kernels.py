"""Kernel canonical correlation analysis: maps of rows through a Gaussian kernel, and their fit.

The fit runs on the host in float64, in blocks of rows: memory grows with the landmarks, not with
the pairs. `teachers.kernel_cca` is its public face.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sotalign_jax import checks
from sotalign_jax.ot import affinity

Rows = Array | np.ndarray
BLOCK = 2048
"""Rows whose kernel is computed at a time."""
_SMALLEST = 1e-7
"""Directions of less kernel variance, relative to the largest, drown in float32's rounding."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KernelMap:
    """The map x -> (k(z) - centre) W^T with z = l2(l2(x) - mean), a pytree.

    k(z)_j = exp(-gamma ||z - landmark_j||^2): how close the row is to each landmark. In numpy:

        z = unit(unit(x) - mean)
        k = np.exp(-gamma * np.square(z[:, None] - landmarks).sum(-1))
        (k - centre) @ weight.T

    The landmarks are rows like z, gamma the kernel's bandwidth, and the centre is the mean of k
    over the rows the map was fitted on.

    >>> pull = KernelMap(jnp.zeros(2), jnp.eye(2), jnp.array(1.0), jnp.zeros(2), jnp.eye(2))
    >>> print(pull(jnp.array([[3.0, 0.0]])).round(3))  # at the first landmark; far from the other
    [[1.    0.135]]
    """

    mean: Float[Array, " d_in"]
    landmarks: Float[Array, "m d_in"]
    gamma: Float[Array, ""]
    centre: Float[Array, " m"]
    weight: Float[Array, "d_out m"]

    @property
    def d_in(self) -> int:
        return self.landmarks.shape[1]

    @property
    def d_out(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x: Array | np.ndarray) -> Float[Array, "n d_out"]:
        """Maps rows of shape (n, d_in) in the precision of the weight, whatever their dtype."""
        rows = affinity.l2_normalize(jnp.asarray(x).astype(self.weight.dtype))
        z = affinity.l2_normalize(rows - self.mean)
        squared = jnp.sum(jnp.square(z), axis=-1, keepdims=True) + 1.0
        distances = jnp.maximum(squared - 2.0 * affinity.dot(z, self.landmarks.T), 0.0)
        return affinity.dot(jnp.exp(-self.gamma * distances) - self.centre, self.weight.T)

    def leading(self, dim: int) -> "KernelMap":
        """The first `dim` output directions."""
        checks.within(self.d_out, "directions in this map", dim=dim)
        return dataclasses.replace(self, weight=self.weight[:dim])


class Options(NamedTuple):
    """Bandwidths, a ridge on both covariances, and the power of rho that weighs directions."""

    gamma_x: float
    gamma_y: float
    ridge: float
    power: float


def fit(
    pairs_x: Rows,
    pairs_y: Rows,
    options: Options,
    *,
    landmarks: int,
    dim: int | None,
    seed: int,
    dtype: Any,
) -> tuple[KernelMap, KernelMap, Float[np.ndarray, " dim"]]:
    """The maps of `teachers.kernel_cca`, which explains the arguments, and their correlations."""
    n = len(pairs_x)
    chosen = np.arange(n)
    if n > landmarks:
        chosen = np.sort(np.random.default_rng(seed).choice(n, landmarks, replace=False))
    x = _basis("pairs_x", pairs_x, chosen, options.gamma_x)
    y = _basis("pairs_y", pairs_y, chosen, options.gamma_y)
    # Over all pairs, in blocks of rows: nothing of n rows is kept.
    centres = [
        sum(side.kernel(rows).sum(axis=0) for rows in _blocks(pairs)) / n
        for side, pairs in ((x, pairs_x), (y, pairs_y))
    ]
    sums: list[Any] = [0.0, 0.0, 0.0]
    for rows_x, rows_y in zip(_blocks(pairs_x), _blocks(pairs_y), strict=True):
        f = (x.kernel(rows_x) - centres[0]) @ x.whiten
        g = (y.kernel(rows_y) - centres[1]) @ y.whiten
        sums = [a + b for a, b in zip(sums, (f.T @ f, g.T @ g, f.T @ g), strict=True)]
    found = _canonical(*(total / (n - 1) for total in sums), ridge=options.ridge)
    rank = len(found.rho)
    dim = rank if dim is None else dim
    checks.within(rank, f"directions that these {n} pairs determine", dim=dim)
    maps = []
    sides = zip((x, y), centres, (found.weights_x, found.weights_y), strict=True)
    for basis, centre, weights in sides:
        weight = (basis.whiten @ (weights[:, :dim] * found.rho[:dim] ** options.power)).T
        arrays = (basis.mean, basis.landmarks, basis.gamma, centre, weight)
        maps.append(KernelMap(*(jnp.asarray(array, dtype) for array in arrays)))
    return maps[0], maps[1], found.correlations[:dim]


# --- options by cross-validation ---------------------------------------------------------------


_BANDWIDTHS = (0.5, 2.0, 6.0)
"""gamma times the median squared distance of two rows."""
_RIDGES = (1.0, 3.0, 10.0, 30.0)
"""Ridge times the pairs fitted on, relative to the sum of the covariance's eigenvalues."""
_POWER = 0.5
"""On COCO validation 1.0 is as good at 1,000 pairs and loses at 10,000."""
_CV_ROWS, _CV_HELD_OUT, _CV_LANDMARKS = 3000, 400, 1000


def choose(pairs_x: Rows, pairs_y: Rows, *, seed: int = 0, **fixed: float) -> Options:
    """Options by cross-validation on the pairs: the highest mean reciprocal rank.

    A pair's two rows should find each other among the pairs held out. Bandwidths are tried
    relative to the data's own distances, the ridge relative to the data's own variance: first
    the ridge, then one bandwidth after the other. As noise falls with the pairs, the ridge found
    on a part of them is scaled down by that part; the power is 0.5. Options that are known already
    are `fixed`.

    >>> rows = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    >>> choose(rows, rows[:, ::-1], power=0.0).power
    0.0
    """
    checks.pairs(pairs_x, pairs_y, min_rows=6)
    order = np.random.default_rng(seed).permutation(len(pairs_x))[:_CV_ROWS]
    sides = {"x": np.asarray(pairs_x)[order], "y": np.asarray(pairs_y)[order]}
    held = min(len(order) // 3, _CV_HELD_OUT)
    folds = range(3 if held == len(order) // 3 else 1)

    @functools.cache
    def features(side: str, fold: int, gamma: float) -> tuple[np.ndarray, np.ndarray]:
        """Features of the pairs fitted on, and of those held out, both centred on the former."""
        out = np.zeros(len(order), bool)
        out[fold * held : (fold + 1) * held] = True
        rows = sides[side][~out]
        basis = _basis(f"pairs_{side}", rows, np.arange(min(len(rows), _CV_LANDMARKS)), gamma)
        fit, new = (basis.kernel(part) @ basis.whiten for part in (rows, sides[side][out]))
        return fit - fit.mean(axis=0), new - fit.mean(axis=0)

    @functools.cache
    def score(options: Options) -> float:
        """Mean reciprocal rank of the pairs held out, the mean over folds."""
        scores = []
        for fold in folds:
            x, new_x = features("x", fold, options.gamma_x)
            y, new_y = features("y", fold, options.gamma_y)
            n = len(x) - 1
            found = _canonical(x.T @ x / n, y.T @ y / n, x.T @ y / n, ridge=options.ridge)
            weight = found.rho**options.power
            f, g = new_x @ found.weights_x * weight, new_y @ found.weights_y * weight
            cosines = _unit(f) @ _unit(g).T
            own = np.diag(cosines)
            ranks = (cosines > own[:, None]).sum(axis=1), (cosines > own).sum(axis=0)
            scores.append(float(np.mean([1.0 / (1.0 + r) for r in ranks])))
        return float(np.mean(scores))

    gammas = {}
    for name, rows in (("gamma_x", sides["x"]), ("gamma_y", sides["y"])):
        z = _prepared(rows[:500], _mean(rows))
        typical = float(np.median(2.0 - 2.0 * (z @ z.T)[~np.eye(len(z), dtype=bool)]))
        gammas[name] = [fixed[name]] if name in fixed else [c / typical for c in _BANDWIDTHS]
    middle = {name: tried[len(tried) // 2] for name, tried in gammas.items()}
    start = Options(**middle, ridge=0.0, power=fixed.get("power", _POWER))
    part = len(order) - held
    if "ridge" in fixed:
        ridges = [fixed["ridge"]]
    else:
        variances = []
        for fold in folds:
            fits = features("x", fold, start.gamma_x)[0], features("y", fold, start.gamma_y)[0]
            sums = [np.square(fit).sum() / (len(fit) - 1) for fit in fits]
            variances.append(float(np.mean(sums)))
        ridges = [r * float(np.mean(variances)) / part for r in _RIDGES]
    best = max((start._replace(ridge=ridge) for ridge in ridges), key=score)
    for name in ("gamma_y", "gamma_x"):
        tried = (best._replace(**{name: gamma}) for gamma in gammas[name])
        best = max([best, *tried], key=score)  # the first of equals
    return best if "ridge" in fixed else best._replace(ridge=best.ridge * part / len(pairs_x))


# --- features and moments ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Basis:
    """Nystrom features phi(z) = (k(z) - centre) @ whiten of the landmarks of one side."""

    mean: Float[np.ndarray, " d"]
    landmarks: Float[np.ndarray, "m d"]
    gamma: float
    whiten: Float[np.ndarray, "m r"]

    def kernel(self, rows: Any) -> Float[np.ndarray, "n m"]:
        return _gauss(_prepared(rows, self.mean), self.landmarks, self.gamma)


class _Canonical(NamedTuple):
    """Weights of the features, the singular values, and Pearson's correlations on the pairs."""

    weights_x: Float[np.ndarray, "r k"]
    weights_y: Float[np.ndarray, "s k"]
    rho: Float[np.ndarray, " k"]
    correlations: Float[np.ndarray, " k"]


def _basis(name: str, rows: Any, chosen: np.ndarray, gamma: float) -> _Basis:
    mean = _mean(rows)
    landmarks = _prepared(np.asarray(rows)[chosen], mean)
    # Centring among the landmarks takes off the direction in which all rows are alike.
    kernel = _gauss(landmarks, landmarks, gamma)
    kernel = kernel - kernel.mean(axis=0)
    kernel -= kernel.mean(axis=1, keepdims=True)
    eigenvalues, vectors = np.linalg.eigh(kernel)
    kept = eigenvalues > _SMALLEST * eigenvalues[-1]
    if eigenvalues[-1] < 1e-10:
        raise checks.InputError(
            f"{name}: all rows point the same way; pass pairs that differ from each other"
        )
    return _Basis(mean, landmarks, gamma, vectors[:, kept] / np.sqrt(eigenvalues[kept]))


def _canonical(xx: np.ndarray, yy: np.ndarray, xy: np.ndarray, *, ridge: float) -> _Canonical:
    """Whitens both sides and rotates them together, given their covariances.

    Any square root of (S + ridge I)^(-1) gives the same directions, for the rotation follows it:
    that of Cholesky is the cheapest.
    """
    roots = []
    for covariance in (xx, yy):
        # Without a ridge, directions that the pairs do not determine must not divide by zero.
        floor = max(ridge, _SMALLEST * float(np.trace(covariance)) / len(covariance))
        lower = np.linalg.cholesky(covariance + floor * np.eye(len(covariance)))
        roots.append(np.linalg.inv(lower).T)
    x, y = roots
    left, rho, right = np.linalg.svd(x.T @ xy @ y, full_matrices=False)
    kept = rho > rho[0] * max(left.shape[0], right.shape[1]) * np.finfo(np.float64).eps
    weights_x, weights_y = x @ left[:, kept], y @ right[kept].T
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
    distances = np.square(z).sum(axis=1, keepdims=True) + 1.0 - 2.0 * (z @ landmarks.T)
    return np.exp(-gamma * np.maximum(distances, 0.0))


def _prepared(rows: Any, mean: np.ndarray) -> np.ndarray:
    return _unit(_unit(np.asarray(rows).astype(np.float64)) - mean)


def _mean(rows: Any) -> np.ndarray:
    total = sum(_unit(block.astype(np.float64)).sum(axis=0) for block in _blocks(rows))
    return np.asarray(total / len(rows))


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-8)


def _blocks(rows: Any) -> Iterator[np.ndarray]:
    for start in range(0, len(rows), BLOCK):
        yield np.asarray(rows[start : start + BLOCK])
