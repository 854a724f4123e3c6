"""Linear teachers: coarse maps into a shared space, fitted on the pairs alone, then frozen.

`procrustes` and `cca` are closed forms, computed on the host in float64; `contrastive` trains
linear heads on the pairs. All three return a `LinearTeacher`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from sotalign_jax import canonical, checks, losses
from sotalign_jax import heads as heads_lib
from sotalign_jax.ot import affinity

_EIGENVALUE_FLOOR = 1e-6


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearTeacher:
    """One frozen affine map per modality, a pytree of float32 arrays.

    Attributes:
      map_x: map of the first modality.
      map_y: map of the second.
      correlations: Pearson correlation of each direction between the two sides of the pairs the
        teacher was fitted on (in-sample: near 1 when there are fewer pairs than features).
    """

    map_x: heads_lib.AffineMap
    map_y: heads_lib.AffineMap
    correlations: Float[Array, " dim"]

    @property
    def dim(self) -> int:
        """Width of the shared space."""
        return self.map_x.weight.shape[0]

    def x(self, rows: heads_lib.Rows) -> Float[Array, "n dim"]:
        """Unit rows of the first modality in the shared space, ready for cosines."""
        return affinity.l2_normalize(self.map_x(rows))

    def y(self, rows: heads_lib.Rows) -> Float[Array, "n dim"]:
        """Unit rows of the second modality in the shared space, ready for cosines."""
        return affinity.l2_normalize(self.map_y(rows))


def procrustes(
    A: heads_lib.Rows,
    B: heads_lib.Rows,
    *,
    dim: int | None = None,
    renorm: bool = False,
) -> LinearTeacher:
    """Orthogonal Procrustes: maximises <A P^T, B Q^T> over P P^T = Q Q^T = I.

    With A^T B = U S V^T the solution is P = U_dim^T, Q = V_dim^T and its value is the sum of the
    `dim` largest singular values. Rows are L2-normalised and centred first (see `cca`).

    Args:
      A: paired embeddings of the first modality, (n, d_x).
      B: paired embeddings of the second, (n, d_y); row i belongs to row i of `A`.
      dim: directions kept; None keeps the numerical rank of A^T B.
      renorm: L2-normalise the centred rows again before fitting.

    Returns:
      The teacher; directions come in order of decreasing singular value.

    Raises:
      InputError: rows do not match, are not finite or are zero; fewer than 2 pairs; or `dim`
        exceeds the rank.

    Example:
      >>> A = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
      >>> teacher = procrustes(A, A[:, ::-1])
      >>> bool(jnp.allclose(teacher.x(A), teacher.y(A[:, ::-1]), atol=1e-5))
      True
    """
    return _closed_form(A, B, dim=dim, renorm=renorm, gain=np.ones_like, scale=1.0)


def cca(
    A: heads_lib.Rows,
    B: heads_lib.Rows,
    *,
    ridge: float = 0.1,
    dim: int | None = None,
    cov_normalize: bool = True,
    renorm: bool = False,
) -> LinearTeacher:
    """Ridge canonical correlation analysis: whitens both sides, then rotates them together.

    Rows become x / ||x|| - mu, mu the mean of the L2-normalised paired rows; mu is stored in the
    map and applied to every later input. With R_x = (S_xx + ridge I)^(-1/2), R_y likewise and
    R_x S_xy R_y = U S V^T, the maps are W_x = U^T R_x and W_y = V^T R_y.

    Unit rows have covariance eigenvalues that sum to at most 1, so the default ridge = 0.1
    outweighs nearly all of them and the result is close to `procrustes`. A smaller ridge gives a
    genuine CCA, at the price of trusting directions of small variance.

    Args:
      A: paired embeddings of the first modality, (n, d_x).
      B: paired embeddings of the second, (n, d_y); row i belongs to row i of `A`.
      ridge: added to the eigenvalues of both covariances.
      dim: directions kept; None keeps the numerical rank, at most min(d_x, d_y, n - 1).
      cov_normalize: covariances A^T A / (n - 1); False takes A^T A, so that the same ridge
        weighs n - 1 times less.
      renorm: L2-normalise the centred rows again before fitting. Later inputs need no such step:
        it would change only the length of the projected row.

    Returns:
      The teacher; directions come in order of decreasing singular value.

    Raises:
      InputError: rows do not match, are not finite or are zero; fewer than 2 pairs; `ridge` is
        negative; or `dim` exceeds the rank.

    Example:
      >>> A = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
      >>> teacher = cca(A, A[:, ::-1], ridge=1e-4, dim=2)
      >>> teacher.x(A).shape, bool(teacher.correlations.min() > 0.999)
      ((50, 2), True)
    """
    checks.at_least(0, ridge=ridge)

    def gain(eigenvalues: np.ndarray) -> np.ndarray:
        return 1.0 / np.sqrt(np.maximum(eigenvalues + ridge, _EIGENVALUE_FLOOR))

    scale = 1.0 / math.sqrt(max(len(A) - 1, 1)) if cov_normalize else 1.0
    return _closed_form(A, B, dim=dim, renorm=renorm, gain=gain, scale=scale)


def contrastive(
    A: heads_lib.Rows,
    B: heads_lib.Rows,
    *,
    dim: int = 1024,
    steps: int = 2000,
    learning_rate: float = 1e-4,
    loss: str = "siglip",
    batch_size: int = 10_000,
    seed: int = 0,
) -> LinearTeacher:
    """SAIL: LayerNorm + Linear heads trained on the pairs by a contrastive loss, then frozen.

    Lion with `optimizer`'s schedule, the whole training in one compiled loop.

    Args:
      A: paired embeddings of the first modality, (n, d_x).
      B: paired embeddings of the second, (n, d_y); row i belongs to row i of `A`.
      dim: width of the shared space.
      steps: training steps.
      learning_rate: its peak.
      loss: "siglip" or "infonce" (symmetric), with learned scale (and bias).
      batch_size: all pairs enter every step unless there are more than this; then a random
        subset does.
      seed: of the random start and of the subsets.

    Returns:
      The teacher; its directions are in no particular order.

    Raises:
      InputError: rows do not match, are not finite or are zero; fewer than 2 pairs; or an option
        is out of range.
      FloatingPointError: the loss became NaN or infinite.

    Example:
      >>> A = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
      >>> contrastive(A, A, dim=3, steps=5).x(A).shape
      (50, 3)
    """
    checks.pairs(A, B, min_rows=2)
    checks.choice("loss", loss, ("siglip", "infonce"))
    checks.whole(1, dim=dim, steps=steps)
    checks.whole(2, batch_size=batch_size)
    start = heads_lib.build_heads(A.shape[1], B.shape[1], dim, seed=seed)
    graphdef, params = nnx.split(start)
    params, history = _train(
        params,
        jnp.asarray(A),
        jnp.asarray(B),
        jax.random.key(seed),
        learning_rate,
        graphdef=graphdef,
        loss=loss,
        steps=steps,
        batch_size=min(batch_size, len(A)),
    )
    bad = np.flatnonzero(~np.isfinite(np.asarray(history)))
    if bad.size:
        raise FloatingPointError(
            f"contrastive: the loss is not finite at step {bad[0]}; lower learning_rate"
        )
    map_x, map_y = nnx.merge(graphdef, params).to_affine()
    correlations = _correlations(np.asarray(map_x(A)), np.asarray(map_y(B)))
    return LinearTeacher(map_x, map_y, _float32(correlations))


def optimizer(
    learning_rate: Any, steps: int, *, weight_decay: float = 1e-5
) -> optax.GradientTransformation:
    """Lion(0.9, 0.99) with a linear warm-up over ceil(10 %) of the steps, then a cosine to 0.

    >>> optimizer(1e-4, 100).init({"w": jnp.zeros(2)})[0].mu
    {'w': Array([0., 0.], dtype=float32)}
    """
    schedule = warmup_cosine(learning_rate, steps)
    return optax.lion(schedule, b1=0.9, b2=0.99, weight_decay=weight_decay)


def warmup_cosine(learning_rate: Any, steps: int) -> Callable[[Any], Array]:
    """Learning rate of step t: peak (t + 1) / w while t < w = ceil(steps / 10), then a cosine to 0.

    >>> rate = warmup_cosine(1.0, 20)
    >>> [round(float(rate(t)), 3) for t in (0, 1, 2, 11, 20)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    warmup = -(-steps // 10)

    def rate(step: Any) -> Array:
        fraction = jnp.clip((step - warmup) / max(steps - warmup, 1), 0.0, 1.0)
        cosine = 0.5 * (1.0 + jnp.cos(jnp.pi * fraction))
        return learning_rate * jnp.where(step < warmup, (step + 1) / warmup, cosine)

    return rate


@functools.partial(jax.jit, static_argnames=("graphdef", "loss", "steps", "batch_size"))
def _train(
    params: Any,
    a: Array,
    b: Array,
    key: Array,
    learning_rate: Any,
    *,
    graphdef: Any,
    loss: str,
    steps: int,
    batch_size: int,
) -> tuple[Any, Array]:
    """Final parameters and the loss of every step."""
    lion = optimizer(learning_rate, steps)

    def objective(params: Any, a: Array, b: Array) -> Array:
        heads = nnx.merge(graphdef, params)
        f, g, log_scale = heads.x(a), heads.y(b), heads.log_scale[...]
        if loss == "infonce":
            return losses.symmetric_infonce(f, g, log_scale=log_scale)
        return losses.siglip(f, g, log_scale=log_scale, bias=heads.bias[...])

    def step(carry: Any, t: Array) -> tuple[Any, Array]:
        params, state = carry
        batch = (a, b)
        if batch_size < len(a):
            rows = jax.random.choice(
                jax.random.fold_in(key, t), len(a), (batch_size,), replace=False
            )
            batch = (a[rows], b[rows])
        value, gradient = jax.value_and_grad(objective)(params, *batch)
        updates, state = lion.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), value

    (params, _), history = jax.lax.scan(step, (params, lion.init(params)), jnp.arange(steps))
    return params, history


def _closed_form(
    A: Any,
    B: Any,
    *,
    dim: int | None,
    renorm: bool,
    gain: Callable[[np.ndarray], np.ndarray],
    scale: float,
) -> LinearTeacher:
    """Rotates the two sides together after weighting their principal directions by `gain`."""
    checks.pairs(A, B, min_rows=2)
    x = _principal("A", A, renorm=renorm, scale=scale)
    y = _principal("B", B, renorm=renorm, scale=scale)
    found = canonical.rotate(x, y, gain)
    rank = len(found.values)
    dim = rank if dim is None else dim
    if not 1 <= dim <= rank:
        raise checks.InputError(
            f"dim: {dim} directions asked but these {len(A)} pairs determine {rank}; "
            f"choose 1 <= dim <= {rank} or add pairs"
        )
    W_x, W_y = found.weights_x[:, :dim].T, found.weights_y[:, :dim].T
    return LinearTeacher(
        map_x=heads_lib.AffineMap(_float32(W_x), _float32(-W_x @ x.mean), norm="l2"),
        map_y=heads_lib.AffineMap(_float32(W_y), _float32(-W_y @ y.mean), norm="l2"),
        correlations=_float32(_correlations(x.centred @ W_x.T, y.centred @ W_y.T)),
    )


def _principal(name: str, x: Any, *, renorm: bool, scale: float) -> canonical.Principal:
    rows = np.asarray(x).astype(np.float64)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    mean = rows.mean(axis=0)
    rows -= mean
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    if lengths.max() < 1e-6:  # what is left is the rounding of float32 inputs
        raise checks.InputError(
            f"pairs {name}: all rows point the same way; pass pairs that differ from each other"
        )
    if renorm:
        rows /= np.maximum(lengths, 1e-8)
    return canonical.principal(rows * scale, mean)


def _correlations(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Pearson correlation of each column of `x` with the same column of `y`."""
    x = x.astype(np.float64) - x.mean(axis=0)
    y = y.astype(np.float64) - y.mean(axis=0)
    norms = np.linalg.norm(x, axis=0) * np.linalg.norm(y, axis=0)
    return np.sum(x * y, axis=0) / np.maximum(norms, np.finfo(np.float64).tiny)


def _float32(x: np.ndarray) -> Array:
    return jnp.asarray(x, jnp.float32)


TEACHERS: dict[str, Callable[..., LinearTeacher]] = {
    "procrustes": procrustes,
    "cca": cca,
    "contrastive": contrastive,
}
"""Every teacher by name."""
