"""STRUCTURE: a contrastive loss on the pairs, and a regulariser that preserves neighbourhoods.

References:
    F. Groeger et al., "With limited data for multimodal alignment, let the STRUCTURE guide you",
    NeurIPS 2025.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sotalign_jax import checks, losses
from sotalign_jax.heads import Heads
from sotalign_jax.methods import base
from sotalign_jax.ot import affinity, blocks, sharding
from sotalign_jax.sampling import Batch

# Added to probabilities inside logarithms, as in the published code.
_FLOOR = 1e-12


@dataclasses.dataclass(frozen=True)
class Structure(base.Objective):
    """Trains on InfoNCE(f(A), g(B)) + lambda_t/2 [R(X, f(X)) + R(Y, g(Y))], R = `regularizer`.

    Attributes:
        weight: Weight lambda of the regulariser.
        warmup: Number of steps of its linear warm-up, lambda_t = lambda min(1, t / warmup).
        tau: Temperature of the regulariser and of InfoNCE.
        contrastive: "infonce", or "siglip" with the heads' own scale and bias.
        regularize_on: Rows X and Y of the regulariser: "pairs", "unpaired" or "all".
        levels: Number of levels: level l compares l-step transition probabilities.
        js_form: "code" or "js", see `regularizer`.
        level_weights: "none", or "inverse" for 1/l at level l.
        block_size: Rows per block. None computes whole matrices, as several levels always do.

    References:
        F. Groeger et al., "With limited data for multimodal alignment, let the STRUCTURE guide
        you", NeurIPS 2025.
    """

    grid: ClassVar[base.Grid] = {"weight": (0.1, 1.0, 10.0, 100.0, 1000.0), "warmup": (0, 500)}

    weight: float = 10.0
    warmup: int = 500
    tau: float = 0.07
    contrastive: str = "infonce"
    regularize_on: str = "pairs"
    levels: int = 1
    js_form: str = "code"
    level_weights: str = "none"
    block_size: int | None = 256

    @property
    def pools(self) -> str:
        """Both modalities if the regulariser uses unpaired rows."""
        return "" if self.regularize_on == "pairs" else "xy"

    def __post_init__(self) -> None:
        checks.choice("contrastive", self.contrastive, ("infonce", "siglip"))
        checks.choice("regularize_on", self.regularize_on, ("pairs", "all", "unpaired"))
        checks.at_least(0, weight=self.weight)
        checks.whole(0, warmup=self.warmup)
        checks.choice("js_form", self.js_form, ("code", "js"))
        checks.choice("level_weights", self.level_weights, ("none", "inverse"))
        checks.positive(tau=self.tau)
        checks.whole(1, levels=self.levels)
        checks.whole(1, or_none=True, block_size=self.block_size)

    def __call__(self, heads: Heads, batch: Batch, teacher: Any, memory: Any) -> base.Result:
        f, g = heads.x(batch.a), heads.y(batch.b)
        if self.contrastive == "infonce":
            contrastive = losses.infonce(f, g, log_scale=-math.log(self.tau))
        else:
            contrastive = base.siglip(heads, f, g)
        x, y = (batch.a, f), (batch.b, g)
        if self.pools:
            unpaired = (batch.x, heads.x(batch.x)), (batch.y, heads.y(batch.y))
            if self.regularize_on == "all":
                unpaired = jax.tree.map(lambda *rows: jnp.concatenate(rows), (x, y), unpaired)
            x, y = unpaired
        change = 0.5 * (self.regularizer(*x) + self.regularizer(*y))
        weight = jnp.float32(self.weight)
        # The step is part of the batch, so a resumed run has the same weight.
        if self.warmup:
            weight *= jnp.minimum(1.0, batch.step / self.warmup)
        metrics = {self.contrastive: contrastive, "structure": change, "structure_weight": weight}
        return contrastive + weight * change, (metrics, memory)

    def regularizer(
        self, original: Float[Array, "n d"], aligned: Float[Array, "n e"]
    ) -> Float[Array, ""]:
        """Computes the divergence between neighbourhoods before and after alignment.

        With unit rows minus their mean as rows of E, P = softmax_rows(E E^T / tau) describes the
        neighbourhoods of the original embeddings, which receive no gradient, and Q those of the
        aligned ones. With M = (P^l + Q^l)/2 at level l, summed over entries,

            D_l = 1/(2n) [KL(M || P^l) + KL(M || Q^l)]     ("code", as published: unbounded)
            D_l = 1/(2n) [KL(P^l || M) + KL(Q^l || M)]     ("js", Jensen-Shannon: at most log 2)

        and the value is the mean over levels of w_l max(D_l, 0). In blocks of rows, value and
        gradient (reverse mode only) take memory O(n (d + block_size)).

        Args:
            original: Embeddings before the head, shape [n, d].
            aligned: Embeddings after the head, shape [n, e].

        Returns:
            The value.

        Example:
            >>> original = jnp.array([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
            >>> turned, merged = original[:, ::-1], jnp.ones((3, 1))
            >>> print(*(f"{Structure().regularizer(original, z):.4f}" for z in (turned, merged)))
            0.0000 1.0287

        References:
            F. Groeger et al., "With limited data for multimodal alignment, let the STRUCTURE guide
            you", NeurIPS 2025.
        """
        rows = _centred(jax.lax.stop_gradient(original)), _centred(aligned)
        dtype = jnp.result_type(*rows)
        x, z = (e.astype(dtype) for e in rows)
        # Powers of P need the whole matrix.
        if self.levels == 1 and self.block_size is not None:
            # A tuple, because static arguments of a `custom_vjp` must be hashable.
            options = self.tau, self.js_form, self.block_size
            return jax.nn.relu(_streamed(options, x, z)) / len(x)
        p, q = _neighbours(x, x, self.tau), _neighbours(z, z, self.tau)
        p_power, q_power, total = p, q, jnp.zeros((), dtype)
        for level in range(1, self.levels + 1):
            if level > 1:
                p_power, q_power = affinity.dot(p_power, p), affinity.dot(q_power, q)
            summed = jnp.sum(_divergence(p_power, q_power, self.js_form))
            # The weight w_l of level l is 1 / weight.
            weight = level if self.level_weights == "inverse" else 1
            # Rounding can make the divergence of equal neighbourhoods negative.
            total += jax.nn.relu(summed / len(x)) / weight
        return total / self.levels


# --- parts of the regulariser ---


def _centred(x: Array) -> Array:
    """Returns unit rows minus their mean."""
    x = affinity.l2_normalize(x)
    return x - jnp.mean(x, axis=0)


def _neighbours(rows: Array, everything: Array, tau: float) -> Array:
    """Computes each row's distribution over all samples, itself included."""
    return jax.nn.softmax(affinity.dot(rows, everything.T) / tau, axis=1)


def _divergence(p: Array, q: Array, js_form: str) -> Array:
    """Computes the divergence of every row of p and q."""
    # The floor is added in the same places as in the published code, for equal results.
    m = (p + q) / 2 + _FLOOR
    log_m, log_p, log_q = jnp.log(m), jnp.log(p + _FLOOR), jnp.log(q + _FLOOR)
    if js_form == "code":
        terms = m * (2 * log_m - log_p - log_q)
    else:
        terms = p * (log_p - log_m) + q * (log_q - log_m)
    return jnp.sum(terms, axis=1) / 2


_Options = tuple[float, str, int]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _streamed(options: _Options, x: Array, z: Array) -> Array:
    """Sums the first level's divergence over rows, a block of rows at a time."""
    return _streamed_forward(options, x, z)[0]  # XLA removes the unused gradient


def _streamed_forward(options: _Options, x: Array, z: Array) -> tuple[Array, Array]:
    """Computes the value and the gradient in z together, so that each block is computed once.

    Each device compares its own rows, which are given by their numbers, with all rows.
    """
    tau, js_form, block_size = options

    def own_rows(axes: sharding.Axes, numbers: Any, shared: Any) -> tuple[Array, Array]:
        x, z = shared

        def add(block: blocks.Block, totals: Any) -> Any:
            def divergence(z: Array) -> Array:
                p, q = (_neighbours(block.of(rows), rows, tau) for rows in (x, z))
                return jnp.sum(jnp.where(block.fresh, _divergence(p, q, js_form), 0))

            # The rows of a block are compared with all rows, so its gradient has the shape of z.
            return jax.tree.map(jnp.add, totals, jax.value_and_grad(divergence)(z))

        start = jnp.zeros((), x.dtype), jnp.zeros_like(z)
        part = (numbers[0], len(numbers)) if axes else None
        value, gradient = blocks.over_rows(len(x), block_size, add, start, part)
        return sharding.psum_scatter(gradient, axes), sharding.psum(value, axes)

    # Row numbers of each device. Those of the padding are beyond the last row.
    numbers = sharding.split(jnp.arange(len(x)), len(x))
    gradient, value = sharding.shard_map(own_rows, numbers, (x, z))
    return value, gradient[: len(z)]


_streamed.defvjp(_streamed_forward, lambda options, gradient, d: (None, d * gradient))
