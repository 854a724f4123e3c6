"""Maximum mean discrepancy: how far apart two samples' distributions are, and a map that helps."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from sotalign_jax import spectral
from sotalign_jax.ot import affinity

WIDTHS = (0.5, 1.0, 2.0)


def mmd(x: Float[Array, "n d"], y: Float[Array, "m d"]) -> Float[Array, ""]:
    """Squared MMD, biased: mean k(x, x') - 2 mean k(x, y) + mean k(y, y').

    k is the sum of exp(-||a - b||^2 / (c s)) over c in `WIDTHS`; s is the mean squared distance
    between two different rows of [x; y], and gets no gradient.

    >>> x = jnp.array([[0.0], [1.0]])
    >>> print(mmd(x, x), mmd(x, x + 5.0) > 1.0)
    0.0 True
    """
    rows = jnp.concatenate([x, y])
    lengths = jnp.sum(jnp.square(rows), axis=1)
    squares = jnp.maximum(lengths[:, None] + lengths - 2.0 * affinity.dot(rows, rows.T), 0.0)
    squares *= 1.0 - jnp.eye(len(rows), dtype=squares.dtype)
    n, total = len(x), len(rows)
    unit = jax.lax.stop_gradient(jnp.sum(squares)) / (total * total - total)
    unit = jnp.maximum(unit, jnp.finfo(squares.dtype).tiny)
    widths = jnp.asarray(WIDTHS, squares.dtype)[:, None, None]
    kernel = jnp.sum(jnp.exp(-squares / (widths * unit)), axis=0)
    return jnp.mean(kernel[:n, :n]) - 2.0 * jnp.mean(kernel[:n, n:]) + jnp.mean(kernel[n:, n:])


def refine(
    network: nnx.Module,
    x: Float[np.ndarray, "n d"],
    y: Float[np.ndarray, "m d"],
    *,
    epochs: int,
    batch: int,
    learning_rate: float,
    key: Array,
    report: Callable[[int, float], None] = lambda epoch, loss: None,
) -> Any:
    """Trains a network that maps rows so that MMD(network(x), y) is small.

    AdamW on shuffled batches of nine tenths of either side; the parameters with the least MMD on
    the last tenth are kept.

    Args:
        network: where to start; left as it is.
        x: rows to be mapped.
        y: rows to come near to, in no particular order.
        epochs: passes over the smaller side.
        batch: rows a step and side; all when there are fewer.
        learning_rate: AdamW's.
        key: decides the split and the batches.
        report: called after every epoch with the validation loss.

    Raises:
        FloatingPointError: the loss became NaN or infinite.
    """
    graphdef, params = nnx.split(network)
    key, *splits = jax.random.split(key, 3)
    train, val = [], []
    for rows, split in zip((x, y), splits, strict=True):
        order = jax.random.permutation(split, len(rows))
        held = max(min(len(x), len(y)) // 10, 1)
        table = jnp.asarray(rows, jnp.float32)[order]
        val.append(table[:held])
        train.append(table[held:])
    batch = min(batch, *map(len, train))
    static: dict[str, Any] = {"graphdef": graphdef, "batch": batch, "learning_rate": learning_rate}
    state = jax.tree.map(jnp.copy, (params, _adamw(learning_rate).init(params)))
    best, least = params, float("inf")
    for epoch in range(1, epochs + 1):
        state, loss = _epoch(state, train, val, jax.random.fold_in(key, epoch), **static)
        value = float(loss)
        if not np.isfinite(value):
            raise FloatingPointError(
                f"mmd: the loss is not finite in epoch {epoch}; lower mmd_learning_rate"
            )
        report(epoch, value)
        if value < least:
            best, least = jax.tree.map(jnp.copy, state[0]), value
    return nnx.merge(graphdef, best)


def _adamw(learning_rate: float) -> optax.GradientTransformation:
    return optax.adamw(learning_rate, weight_decay=1e-2)


@functools.partial(
    jax.jit, static_argnames=("graphdef", "batch", "learning_rate"), donate_argnames="state"
)
def _epoch(
    state: Any,
    train: list[Array],
    val: list[Array],
    key: Array,
    *,
    graphdef: Any,
    batch: int,
    learning_rate: float,
) -> tuple[Any, Array]:
    """The state after a pass, and the loss on `val`."""
    adamw = _adamw(learning_rate)
    x, y = train

    def objective(params: Any, x: Array, y: Array) -> Array:
        return mmd(nnx.merge(graphdef, params)(x), y)

    def step(state: Any, indices: tuple[Array, Array]) -> tuple[Any, None]:
        params, moments = state
        gradient = jax.grad(objective)(params, x[indices[0]], y[indices[1]])
        updates, moments = adamw.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), None

    steps = min(len(x), len(y)) // batch
    keys = jax.random.split(key)
    passes = (spectral.batches(keys[0], len(x), batch), spectral.batches(keys[1], len(y), batch))
    state, _ = jax.lax.scan(step, state, jax.tree.map(lambda index: index[:steps], passes))
    size = min(batch, len(val[0]))
    shown = len(val[0]) // size
    blocks = [rows[: shown * size].reshape(shown, size, -1) for rows in val]
    return state, jnp.mean(jax.lax.map(lambda b: objective(state[0], *b), blocks))
