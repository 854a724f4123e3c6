"""The regulariser of STRUCTURE: what is similar within a modality stays similar after its head."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sotalign_jax import checks
from sotalign_jax.ot import affinity, blocks, sharding

JS_FORMS = ("code", "js")
LEVEL_WEIGHTS = ("none", "inverse")

_FLOOR = 1e-12
"""Added to probabilities inside logarithms, as in the published code."""


def regularizer(
    original: Float[Array, "n d"],
    aligned: Float[Array, "n e"],
    *,
    tau: float = 0.07,
    levels: int = 1,
    js_form: str = "code",
    level_weights: str = "none",
    block_size: int | None = None,
) -> Float[Array, ""]:
    """How far neighbourhoods after alignment are from those before, within one modality.

    E holds unit rows minus their mean; P = softmax_rows(E E^T / tau) of the original embeddings,
    Q of the aligned ones. With M = (P^l + Q^l)/2 at level l, summed over entries,

        D_l = 1/(2n) [KL(M || P^l) + KL(M || Q^l)]     ("code", as published: unbounded)
        D_l = 1/(2n) [KL(P^l || M) + KL(Q^l || M)]     ("js", Jensen-Shannon: at most log 2)

    and the value is the mean over levels of w_l max(D_l, 0).

    Args:
      original: embeddings before the head; no gradient.
      aligned: features of the same samples after it.
      tau: temperature of both softmaxes.
      levels: how many matrix powers are compared, from the first on.
      js_form: "code" or "js".
      level_weights: "none": w_l = 1, or "inverse": w_l = 1/l.
      block_size: rows that exist at a time when `levels` is 1, in memory O(n (d + block_size))
        for value and gradient (reverse mode only); None keeps whole n x n matrices, which powers
        need in any case. Value and gradient are the same.

    Returns:
      The value, a scalar.

    Raises:
      InputError: lengths differ, or an option cannot be used.

    Example:
      >>> original = jnp.array([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
      >>> turned, merged = original[:, ::-1], jnp.ones((3, 1))
      >>> for aligned in (turned, merged):
      ...     print(f"{regularizer(original, aligned):.4f}")
      0.0000
      1.0287
    """
    check_options(tau, levels, js_form, level_weights, block_size)
    if len(original) != len(aligned):
        raise checks.InputError(
            f"aligned: has {len(aligned)} rows but original has {len(original)}; "
            "both must hold the same samples"
        )
    rows = _centred(jax.lax.stop_gradient(original)), _centred(aligned)
    dtype = jnp.result_type(*rows)
    x, z = (e.astype(dtype) for e in rows)
    if levels == 1 and block_size is not None:
        return jax.nn.relu(_streamed((tau, js_form, block_size), x, z)) / len(x)
    p, q = _neighbours(x, x, tau), _neighbours(z, z, tau)
    p_power, q_power, total = p, q, jnp.zeros((), dtype)
    for level in range(1, levels + 1):
        if level > 1:
            p_power, q_power = affinity.dot(p_power, p), affinity.dot(q_power, q)
        divergence = jax.nn.relu(jnp.sum(_divergence(p_power, q_power, js_form)) / len(x))
        total += divergence / (level if level_weights == "inverse" else 1)
    return total / levels


def check_options(
    tau: float, levels: int, js_form: str, level_weights: str, block_size: int | None
) -> None:
    """Raises unless `regularizer` can use these options."""
    checks.choice("js_form", js_form, JS_FORMS)
    checks.choice("level_weights", level_weights, LEVEL_WEIGHTS)
    checks.positive(tau=tau)
    checks.whole(1, levels=levels)
    checks.whole(1, or_none=True, block_size=block_size)


def _centred(x: Array) -> Array:
    x = affinity.l2_normalize(x)
    return x - jnp.mean(x, axis=0)


def _neighbours(rows: Array, everything: Array, tau: float) -> Array:
    """Each row's distribution over all samples, itself included."""
    return jax.nn.softmax(affinity.dot(rows, everything.T) / tau, axis=1)


def _divergence(p: Array, q: Array, js_form: str) -> Array:
    """D of every row of p and q."""
    m = (p + q) / 2 + _FLOOR
    log_m, log_p, log_q = jnp.log(m), jnp.log(p + _FLOOR), jnp.log(q + _FLOOR)
    if js_form == "code":
        terms = m * (2 * log_m - log_p - log_q)
    else:
        terms = p * (log_p - log_m) + q * (log_q - log_m)
    return jnp.sum(terms, axis=1) / 2


_Options = tuple[float, str, int]


def _of_block(options: _Options, block: blocks.Block, x: Array, z: Array) -> Array:
    tau, js_form, _ = options
    p, q = _neighbours(block.of(x), x, tau), _neighbours(block.of(z), z, tau)
    return jnp.sum(jnp.where(block.fresh, _divergence(p, q, js_form), 0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _streamed(options: _Options, x: Array, z: Array) -> Array:
    """Sum over rows of the first level's divergence, a block of rows at a time."""

    def own_rows(axes: sharding.Axes, rows: Any, shared: Any) -> tuple[tuple[()], Array]:
        x, z = shared

        def add(block: blocks.Block, total: Array) -> Array:
            return total + _of_block(options, block, x, z)

        value = _over_own(options, axes, rows, len(x), add, jnp.zeros((), x.dtype))
        return (), sharding.psum(value, axes)

    return _by_rows(own_rows, x, z)[1]


def _streamed_forward(options: _Options, x: Array, z: Array) -> tuple[Array, Array]:
    """The value, and already the gradient in z: every block is computed once."""

    def own_rows(axes: sharding.Axes, rows: Any, shared: Any) -> tuple[Array, Array]:
        x, z = shared

        def add(block: blocks.Block, totals: Any) -> Any:
            of_block = functools.partial(_of_block, options, block, x)
            return jax.tree.map(jnp.add, totals, jax.value_and_grad(of_block)(z))

        start = jnp.zeros((), x.dtype), jnp.zeros_like(z)
        value, gradient = _over_own(options, axes, rows, len(x), add, start)
        return sharding.psum_scatter(gradient, axes), sharding.psum(value, axes)

    gradient, value = _by_rows(own_rows, x, z)
    return value, gradient[: len(z)]


def _by_rows(own_rows: Any, x: Array, z: Array) -> tuple[Any, Array]:
    """Each device compares some rows, known by their numbers, with all of them."""
    return sharding.shard_map(own_rows, sharding.split(jnp.arange(len(x)), len(x)), (x, z))


def _over_own(
    options: _Options, axes: sharding.Axes, numbers: Array, n: int, add: Any, start: Any
) -> Any:
    part = (numbers[0], len(numbers)) if axes else None
    return blocks.over_rows(n, options[-1], add, start, part)


def _streamed_backward(options: _Options, gradient: Array, cotangent: Array) -> tuple[None, Array]:
    return None, cotangent * gradient


_streamed.defvjp(_streamed_forward, _streamed_backward)
