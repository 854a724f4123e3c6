"""The Gibbs kernel A = exp(K/epsilon + p + q) that Sinkhorn sweeps over, dense or streamed.

Both kernels offer the same four operations, so that the solver and the losses are written once:

    build(q, epsilon)       -> state with every row's largest entry at 1, whatever epsilon is
    sweep(state, a, c)      -> row sums s = A c and column sums t = (a/s)^T A
    absorb(state, x, y, k)  -> state of the kernel (diag(e^x) A diag(e^y))^k
    transport(state, ...)   -> products with the plan P = diag(a) A

`DenseKernel` keeps A in memory and needs K only to build it. `StreamedKernel` recomputes blocks of
rows from the features in every sweep and never holds more than one block.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sotalign_jax import affinity

MAX_DRIFT = 30.0
"""Scalings beyond exp(+-MAX_DRIFT) call for a rebuild: far from float32's overflow at exp(88), and
what underflowed when the kernel was built still is below exp(-27) of the largest entry."""


class KernelState(NamedTuple):
    """A = exp(K/epsilon + p + q); `matrix` is A itself, or None when streamed."""

    matrix: Float[Array, "n m"] | None
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

    def build(self, q: Array, epsilon: Array) -> KernelState: ...

    def sweep(self, state: KernelState, a: Array, c: Array) -> tuple[Array, Array]: ...

    def absorb(self, state: KernelState, x: Array, y: Array, power: Array) -> KernelState: ...

    def transport(self, state: KernelState, a: Array, right: Array, left: Array) -> Products: ...


def _revive(q: Array, column_max: Array) -> Array:
    """Lifts columns that would underflow, so that every live column has an entry to scale."""
    return jnp.where(column_max < -MAX_DRIFT, q - column_max, q)


def _raise_to(exponents: Array, power: Array) -> Array:
    """power * exponents, keeping -inf (a zero weight) even for powers that vary."""
    return jnp.where(jnp.isneginf(exponents), exponents, power * exponents)


class DenseKernel(NamedTuple):
    """A kernel held in memory; `rows` computes K, so that K itself need not be kept."""

    rows: Callable[[], Float[Array, "n m"]]

    def build(self, q: Array, epsilon: Array) -> KernelState:
        scaled = self.rows() / epsilon
        p = -jnp.max(scaled + q, axis=1)
        q = _revive(q, jnp.max(scaled + p[:, None], axis=0) + q)
        return KernelState(jnp.exp(scaled + p[:, None] + q), p, q, epsilon)

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
        logs = jnp.log(jnp.where(plan > 0, plan, 1.0))
        return Products(
            a[:, None] * affinity.dot(plan, right),
            affinity.dot((a[:, None] * left).T, plan).T,
            affinity.dot(a, plan),
            jnp.sum(a * jnp.sum(plan * logs, axis=1)),
        )


class StreamedKernel(NamedTuple):
    """A kernel of K = f g^T recomputed block by block of rows; f is padded to whole blocks."""

    f: Float[Array, "n d"]
    g: Float[Array, "m d"]
    block_size: int

    def _scan(
        self, body: Callable, carry: Array | tuple, *row_vectors: Array
    ) -> tuple[Array | tuple, Array]:
        """Runs body(carry, K_block, *vector_blocks) over the blocks of rows."""
        blocks = tuple(v.reshape(-1, self.block_size, *v.shape[1:]) for v in (self.f, *row_vectors))

        def step(carry: Array, block: tuple[Array, ...]) -> tuple[Array, Array]:
            return body(carry, affinity.dot(block[0], self.g.T), *block[1:])

        carry, out = jax.lax.scan(step, carry, blocks)
        return carry, out.reshape(-1, *out.shape[2:])

    def build(self, q: Array, epsilon: Array) -> KernelState:
        def body(column_max: Array, k: Array) -> tuple[Array, Array]:
            scaled = k / epsilon
            p = -jnp.max(scaled + q, axis=1)
            return jnp.maximum(column_max, jnp.max(scaled + p[:, None], axis=0)), p

        column_max, p = self._scan(body, jnp.full_like(q, -jnp.inf))
        return KernelState(None, p, _revive(q, column_max + q), epsilon)

    def sweep(self, state: KernelState, a: Array, c: Array) -> tuple[Array, Array]:
        def body(t: Array, k: Array, a_k: Array, p_k: Array) -> tuple[Array, Array]:
            rows = jnp.exp(k / state.epsilon + p_k[:, None] + state.q)
            s = affinity.dot(rows, c)
            return t + affinity.dot(a_k / s, rows), s

        t, s = self._scan(body, jnp.zeros_like(c), a, state.p)
        return s, t

    def absorb(self, state: KernelState, x: Array, y: Array, power: Array) -> KernelState:
        return KernelState(
            None,
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
