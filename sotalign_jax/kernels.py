"""The Gibbs kernel A = exp(K/epsilon + p + q) that Sinkhorn sweeps over, dense or streamed.

Both kernels offer the same operations, so that the solver and the losses are written once:

    blank(q, epsilon)       -> state that is yet to be built
    build(state, live)      -> state with every row's largest entry at 1, whatever epsilon is;
                               whether it must be built again; `live` marks rows of positive weight
    sweep(state, a, c)      -> row sums s = A c and column sums t = (a/s)^T A
    absorb(state, x, y, k)  -> state of the kernel (diag(e^x) A diag(e^y))^k
    transport(state, ...)   -> products with the plan P = diag(a) A

`DenseKernel` keeps A in memory, and K only a block of rows at a time. `StreamedKernel` recomputes
blocks of rows from the features in every sweep and never holds more than one block.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sotalign_jax import affinity

MAX_DRIFT = 30.0
"""Scalings beyond exp(+-MAX_DRIFT) call for a rebuild: far from float32's overflow at exp(88), and
what underflowed when the kernel was built still is below exp(-27) of the largest entry."""
BUILD_ROWS = 256
"""Rows of K that exist at a time while a dense kernel is built or measured."""


class KernelState(NamedTuple):
    """A = exp(K/epsilon + p + q); `matrix` is A itself, or empty when streamed."""

    matrix: Float[Array, "..."]
    p: Float[Array, " n"]
    q: Float[Array, " m"]
    epsilon: Float[Array, ""]


class Products(NamedTuple):
    """P right, P^T left, P^T 1 and sum_ij P_ij log A_ij for a plan P = diag(a) A."""

    right: Float[Array, "n k"]
    left: Float[Array, "m l"]
    columns: Float[Array, " m"]
    log_moment: Float[Array, ""]


class Kernel(Protocol):
    """What the solver needs to know of an affinity."""

    def blank(self, q: Array, epsilon: Array) -> KernelState: ...

    def build(self, state: KernelState, live: Array) -> tuple[KernelState, Array]: ...

    def sweep(self, state: KernelState, a: Array, c: Array) -> tuple[Array, Array]: ...

    def absorb(self, state: KernelState, x: Array, y: Array, power: Array) -> KernelState: ...

    def transport(self, state: KernelState, a: Array, right: Array, left: Array) -> Products: ...


def _scale(k: Array, state: KernelState, live: Array) -> tuple[Array, Array, Array]:
    """K/epsilon + p for a block of rows, their p, and the largest exponent in each column."""
    scaled = k / state.epsilon
    p = -jnp.max(scaled + state.q, axis=1)
    scaled = scaled + p[:, None]
    return scaled, p, jnp.max(scaled, axis=0, where=live[:, None], initial=-jnp.inf)


def _revive(q: Array, column_max: Array) -> tuple[Array, Array]:
    """Lifts columns that underflow, so that every live column has an entry to scale.

    Returns q, and whether it changed: then the kernel must be built again. It does so once at
    most, for p stays as it is and the lifted columns have their largest entry at 1.
    """
    lost = ~jnp.isneginf(q) & (column_max + q < -MAX_DRIFT) & jnp.isfinite(column_max)
    return jnp.where(lost, -column_max, q), jnp.any(lost)


def _raise_to(exponents: Array, power: Array) -> Array:
    """power * exponents, keeping -inf (a zero weight) even for powers that vary."""
    return jnp.where(jnp.isneginf(exponents), exponents, power * exponents)


def over_rows(n: int, body: Callable[..., Any], carry: Any) -> Any:
    """Runs body(block, start, carry) over blocks of rows; block(x) are those of x from start on.

    The last block may overlap the one before. Reductions of a whole matrix would be fused by some
    compilers only, and cost others a copy of it.
    """
    size = min(n, BUILD_ROWS)

    def step(i: Array, carry: Any) -> Any:
        start = jnp.minimum(i * size, n - size)
        return body(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), start, carry)

    return jax.lax.fori_loop(0, -(-n // size), step, carry)


class DenseKernel(NamedTuple):
    """A kernel held in memory, of K = f g^T, or of K = f when g is None."""

    f: Float[Array, "n d"]
    g: Float[Array, "m d"] | None = None

    def blank(self, q: Array, epsilon: Array) -> KernelState:
        # Filled with anything that is not a constant, which XLA would keep and copy.
        n = self.f.shape[0]
        matrix = jnp.full((n, q.shape[0]), epsilon)
        return KernelState(matrix, jnp.zeros(n, q.dtype), q, epsilon)

    def build(self, state: KernelState, live: Array) -> tuple[KernelState, Array]:
        def body(block: Callable, start: Array, carry: tuple) -> tuple[Array, Array, Array]:
            matrix, p, column_max = carry
            k = block(self.f) if self.g is None else affinity.dot(block(self.f), self.g.T)
            scaled, p_k, highest = _scale(k, state, block(live))
            return (
                jax.lax.dynamic_update_slice(matrix, jnp.exp(scaled + state.q), (start, 0)),
                jax.lax.dynamic_update_slice(p, p_k, (start,)),
                jnp.maximum(column_max, highest),
            )

        lowest = jnp.full_like(state.q, -jnp.inf)
        matrix, p, column_max = over_rows(len(state.p), body, (state.matrix, state.p, lowest))
        q, changed = _revive(state.q, column_max)
        return KernelState(matrix, p, q, state.epsilon), changed

    def sweep(self, state: KernelState, a: Array, c: Array) -> tuple[Array, Array]:
        s = affinity.dot(state.matrix, c)
        return s, affinity.dot(a / s, state.matrix)

    def absorb(self, state: KernelState, x: Array, y: Array, power: Array) -> KernelState:
        """Powers of 4 (one level of epsilon-scaling) and 1 are in-place products of A."""
        scaled = state.matrix * jnp.exp(x)[:, None] * jnp.exp(y)
        return KernelState(
            jnp.where(power > 1, jnp.square(jnp.square(scaled)), scaled),
            _raise_to(state.p + x, power),
            _raise_to(state.q + y, power),
            state.epsilon / power,
        )

    def transport(self, state: KernelState, a: Array, right: Array, left: Array) -> Products:
        plan = state.matrix

        def body(block: Callable, start: Array, moments: Array) -> Array:
            rows = block(plan)
            logs = jnp.log(jnp.where(rows > 0, rows, 1.0))
            return jax.lax.dynamic_update_slice(moments, jnp.sum(rows * logs, axis=1), (start,))

        return Products(
            a[:, None] * affinity.dot(plan, right),
            affinity.dot((a[:, None] * left).T, plan).T,
            affinity.dot(a, plan),
            jnp.sum(a * over_rows(len(a), body, jnp.zeros_like(a))),
        )


class StreamedKernel(NamedTuple):
    """A kernel of K = f g^T recomputed block by block of rows; f is padded to whole blocks."""

    f: Float[Array, "n d"]
    g: Float[Array, "m d"]
    block_size: int

    def _scan(
        self, body: Callable[..., tuple[Any, Array]], carry: Any, *row_vectors: Array
    ) -> tuple[Any, Array]:
        """Runs body(carry, K_block, *vector_blocks) over the blocks of rows."""
        blocks = tuple(v.reshape(-1, self.block_size, *v.shape[1:]) for v in (self.f, *row_vectors))

        def step(carry: Any, block: tuple[Array, ...]) -> tuple[Any, Array]:
            return body(carry, affinity.dot(block[0], self.g.T), *block[1:])

        carry, out = jax.lax.scan(step, carry, blocks)
        return carry, out.reshape(-1, *out.shape[2:])

    def blank(self, q: Array, epsilon: Array) -> KernelState:
        return KernelState(jnp.zeros(0, q.dtype), jnp.zeros_like(self.f[:, 0]), q, epsilon)

    def build(self, state: KernelState, live: Array) -> tuple[KernelState, Array]:
        def body(column_max: Array, k: Array, live_k: Array) -> tuple[Array, Array]:
            _, p, highest = _scale(k, state, live_k)
            return jnp.maximum(column_max, highest), p

        column_max, p = self._scan(body, jnp.full_like(state.q, -jnp.inf), live)
        q, _ = _revive(state.q, column_max)
        return state._replace(p=p, q=q), jnp.asarray(False)  # nothing is stored: q counts at once

    def sweep(self, state: KernelState, a: Array, c: Array) -> tuple[Array, Array]:
        def body(t: Array, k: Array, a_k: Array, p_k: Array) -> tuple[Array, Array]:
            rows = jnp.exp(k / state.epsilon + p_k[:, None] + state.q)
            s = affinity.dot(rows, c)
            return t + affinity.dot(a_k / s, rows), s

        t, s = self._scan(body, jnp.zeros_like(c), a, state.p)
        return s, t

    def absorb(self, state: KernelState, x: Array, y: Array, power: Array) -> KernelState:
        return KernelState(
            state.matrix,
            _raise_to(state.p + x, power),
            _raise_to(state.q + y, power),
            state.epsilon / power,
        )

    def transport(self, state: KernelState, a: Array, right: Array, left: Array) -> Products:
        def body(sums: tuple, k: Array, a_k: Array, p_k: Array, left_k: Array) -> tuple:
            logs = k / state.epsilon + p_k[:, None] + state.q
            plan = a_k[:, None] * jnp.exp(logs)
            added = (
                affinity.dot(left_k.T, plan).T,
                jnp.sum(plan, axis=0),
                jnp.sum(jnp.where(plan > 0, plan * logs, 0.0)),
            )
            return jax.tree.map(jnp.add, sums, added), affinity.dot(plan, right)

        start = (
            jnp.zeros((right.shape[0], left.shape[1]), left.dtype),
            jnp.zeros_like(state.q),
            jnp.zeros((), left.dtype),
        )
        (transposed, columns, moment), out = self._scan(body, start, a, state.p, left)
        return Products(out, transposed, columns, moment)
