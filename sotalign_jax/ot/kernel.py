"""The Gibbs kernel A = exp(K/epsilon + absorbed_u + absorbed_v) that Sinkhorn's sweeps sum over.

The plan is P = diag(a e^u) A diag(b e^v), where u and v are the log-scalings that the solver finds
relative to those that the kernel has absorbed. The weights a and b are not part of A, so even tiny
weights neither overflow A nor make it lose entries that matter.

A *stored* kernel keeps A in memory as float32 or float64. It reads K once, a block of rows at a
time, to build A. A *streamed* kernel recomputes blocks of rows from the features in every sweep.
Either may have an *int8 kernel* beside it, A in 8 bits per entry, for sweeps that need not be
exact.

If rows are split over devices, a kernel holds the rows of one device, and its sums over rows are
partial sums.

References:
    B. Schmitzer, "Stabilized sparse scaling algorithms for entropy regularized transport
    problems", SISC 41 (2019): absorption of potentials, and epsilon-scaling.
    L. Chizat et al., "Scaling algorithms for unbalanced optimal transport problems", Math. Comp. 87
    (2018): absorption of potentials.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

from sotalign_jax.ot import affinity, blocks, sharding
from sotalign_jax.ot.affinity import HIGHEST, Cosines, Matrix
from sotalign_jax.ot.blocks import Block, over_rows

MAX_DRIFT = 30.0
"""Largest log-scaling before a kernel is built again. float32 overflows at exp(88), and an entry
that underflowed in the build, below exp(-87), is still below exp(-27) after both scalings."""
MAX_EXPONENT = 50.0
"""Logarithm of the largest entry of a kernel, so that exp(MAX_DRIFT) times it is finite. Rows of
A diag(b) sum to 1, so no entry is capped if all weights b are at least exp(-MAX_EXPONENT)."""
LEVEL_POWER = 4
"""Ratio of consecutive epsilons when a small epsilon is approached from above."""


class Kernel(NamedTuple):
    """A Gibbs kernel. `matrix` and `int8` are empty if they are not stored.

    Attributes:
        matrix: A = exp(K/epsilon + absorbed_u + absorbed_v).
        int8: `narrow(A)`.
        absorbed_u: Row log-scalings that A has absorbed.
        absorbed_v: Column log-scalings that A has absorbed.
        u: The other part of the row log-scalings, set by the solver when it ends.
        v: The other part of the column log-scalings, set by the solver when it ends.
        epsilon: Regularisation of this kernel.
    """

    matrix: Float[Array, "..."]
    int8: Int[Array, "..."]
    absorbed_u: Float[Array, " n"]
    absorbed_v: Float[Array, " m"]
    u: Float[Array, " n"]
    v: Float[Array, " m"]
    epsilon: Float[Array, ""]


# Maps codes -128..127 to the leading 11 bits of float32 numbers, 9 of sign and exponent and 2 of
# mantissa. Code -128 is 2^-26, whose biased exponent is 127 - 26 = 101.
_INT8_OFFSET = 2**7 + (101 << 2)


def narrow(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """Rounds numbers >= 0 to 8 bits, 6 of exponent and 2 of mantissa.

    Numbers are clipped to 2^-26 .. 1.75 * 2^37, so zero becomes 2^-26. Fourth powers of a
    kernel's entries need this range, see `Operator.raise_power`.

    Args:
        x: Float32 numbers >= 0.

    Returns:
        The 8-bit codes.

    Example:
        >>> widen(narrow(jnp.array([1.0, 1.3, 1e6]))).tolist()
        [1.0, 1.25, 1048576.0]
    """
    # The leading bits of a positive float32 are its exponent and mantissa. Adding half of the last
    # bit that is kept, 2^20, and shifting by 21 bits rounds to the nearest code.
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.clip(((bits + 2**20) >> 21) - _INT8_OFFSET, -(2**7), 2**7 - 1).astype(jnp.int8)


def widen(x: Int[Array, "..."]) -> Float[Array, "..."]:
    """Returns the float32 numbers of 8-bit codes.

    Args:
        x: 8-bit codes of `narrow`.

    Returns:
        The numbers, in float32.

    Example:
        >>> widen(jnp.array([-24], jnp.int8)).tolist()
        [1.0]
    """
    return jax.lax.bitcast_convert_type((x.astype(jnp.int32) + _INT8_OFFSET) << 21, jnp.float32)


class Operator(NamedTuple):
    """Builds the kernel of an affinity and sums over it, by pure functions of a `Kernel`.

    Attributes:
        affinity: Rows of K.
        block_size: Rows per block of a streamed kernel, or None to store A.
        int8: True to keep an int8 kernel as well.
        axes: Axes of the mesh that rows are split over.
        precision: Precision of the sums over A.
    """

    affinity: Matrix | Cosines
    block_size: int | None = None
    int8: bool = False
    axes: sharding.Axes = ()
    precision: jax.lax.PrecisionLike = HIGHEST

    @property
    def stored(self) -> bool:
        """True if A is kept in memory."""
        return self.block_size is None

    def _over_rows(self, body: Callable[[Block, Any], Any], carry: Any) -> Any:
        """Runs a function over blocks of this device's rows."""
        size = self.block_size or blocks.BUILD_ROWS
        carry = sharding.vary_like(carry, self.affinity[0])
        return over_rows(self.affinity.height, size, body, carry)

    def blank(self, absorbed_v: Array, epsilon: Array) -> Kernel:
        """Returns a kernel that has yet to be built.

        Args:
            absorbed_v: Column log-scalings to absorb.
            epsilon: Regularisation.

        Returns:
            The kernel, with arrays of the final shapes.
        """
        shape = self.affinity.height, len(absorbed_v)
        dtype = absorbed_v.dtype
        # Filled with a traced value. XLA would allocate a constant before an earlier solve has
        # freed its memory.
        matrix = jnp.full(shape if self.stored else 0, epsilon, dtype)
        int8 = jnp.full(shape if self.int8 else 0, epsilon.astype(jnp.int8), jnp.int8)
        u, v = jnp.zeros(shape[0], dtype), jnp.zeros(shape[1], dtype)
        kernel = Kernel(matrix, int8, u, absorbed_v, u, v, epsilon)
        return sharding.vary_like(kernel, self.affinity[0])

    def build(self, kernel: Kernel, log_b: Array) -> Kernel:
        """Sets absorbed_u, and fills A, so that rows of A diag(b) sum to 1.

        This is the row update, absorbed_u_i = -log sum_j b_j exp(K_ij/epsilon + absorbed_v_j).

        Args:
            kernel: A kernel with absorbed_v and epsilon.
            log_b: Log-weights of the columns.

        Returns:
            The kernel with new absorbed_u and A.
        """
        b = jnp.exp(log_b)

        def body(block: Block, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            matrix, int8, u = carry
            # Row-major, as A is stored. Otherwise a TPU may compute the product transposed and copy
            # A.
            rows = with_layout_constraint(self.affinity.rows(block), Layout((0, 1)))
            logs = rows / kernel.epsilon + kernel.absorbed_v[None, :]
            # Subtracts the weighted maximum, as in a logsumexp. Columns of tiny weight may exceed
            # it. The cap keeps an entry finite whose column has a weight below `MAX_EXPONENT`'s.
            top = jnp.max(logs + log_b[None, :], axis=1)
            rows = jnp.exp(jnp.minimum(logs - top[:, None], MAX_EXPONENT))
            s = affinity.dot(rows, b, self.precision)
            rows = rows / s[:, None]
            if self.stored:
                matrix = block.put(matrix, rows)
            if self.int8:
                int8 = block.put(int8, narrow(rows))
            return matrix, int8, block.put(u, -top - jnp.log(s))

        with jax.named_scope("build"):
            carry = kernel.matrix, kernel.int8, kernel.absorbed_u
            matrix, int8, u = self._over_rows(body, carry)
        return kernel._replace(matrix=matrix, int8=int8, absorbed_u=u)

    def update_columns(self, kernel: Kernel, log_a: Array) -> Float[Array, " m"]:
        """Returns a new absorbed_v by a column update in the log domain.

        The update is -log sum_i a_i exp(K_ij/epsilon + absorbed_u_i), for columns that underflow in
        A.

        Args:
            kernel: A kernel with absorbed_u and epsilon.
            log_a: Log-weights of the rows.

        Returns:
            The log-scalings to absorb. Those of -inf, of weight zero, stay -inf.
        """
        infinity = jnp.full_like(kernel.absorbed_v, jnp.inf)
        finite_u = jnp.where(jnp.isneginf(log_a), 0.0, log_a + kernel.absorbed_u)

        def body(block: Block, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            # Online logsumexp: when the running maximum rises, the sum so far is rescaled.
            highest, total = carry
            logs = self.affinity.rows(block) / kernel.epsilon + block.of(finite_u)[:, None]
            counted = block.fresh & ~jnp.isneginf(block.of(log_a))
            logs = jnp.where(counted[:, None], logs, -jnp.inf)
            top = jnp.maximum(highest, jnp.max(logs, axis=0))
            base = jnp.where(jnp.isneginf(top), 0.0, top)
            added = jnp.sum(jnp.exp(logs - base[None, :]), axis=0)
            return top, total * jnp.exp(highest - base) + added

        highest, total = self._over_rows(body, (-infinity, jnp.zeros_like(infinity)))
        top = sharding.pmax(highest, self.axes)
        base = jnp.where(jnp.isneginf(top), 0.0, top)
        total = sharding.psum(total * jnp.exp(highest - base), self.axes)
        old = kernel.absorbed_v
        return jnp.where(jnp.isneginf(old), old, -base - jnp.log(total))

    def sweep(self, kernel: Kernel, a: Array, c: Array) -> tuple[Array, Array]:
        """Computes the row sums s = A c and the column sums t = (a/s)^T A.

        Args:
            kernel: A kernel that is built.
            a: Weights of the rows.
            c: Weights of the columns times their scalings.

        Returns:
            The sums s and t. Where rows are split over devices, t is a partial sum.
        """
        if self.stored:
            s = affinity.dot(kernel.matrix, c, self.precision)
            return s, affinity.dot(a / s, kernel.matrix, self.precision)

        def body(block: Block, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            s, t = carry
            # Not capped: an overflow makes the error infinite, and the kernel is built again.
            rows = jnp.exp(self._log_rows(kernel, block))
            s_k = affinity.dot(rows, c, self.precision)
            weights = jnp.where(block.fresh, block.of(a) / s_k, 0.0)
            return block.put(s, s_k), t + affinity.dot(weights, rows, self.precision)

        return self._over_rows(body, (jnp.zeros_like(a), jnp.zeros_like(c)))

    def sweep_int8(self, kernel: Kernel, a: Array, c: Array) -> tuple[Array, Array]:
        """Computes `sweep` over the int8 kernel.

        The sums are not written as matrix products, because XLA fuses the conversion to float32
        only into sums of products on GPUs and TPUs. A sweep then reads a quarter of the bytes.

        Args:
            kernel: A kernel that is built.
            a: Weights of the rows.
            c: Weights of the columns times their scalings.

        Returns:
            The sums s and t, as `sweep` does.
        """
        entries = widen(kernel.int8)
        s = jnp.sum(entries * c[None, :], axis=1)
        return s, jnp.sum(entries * (a / s)[:, None], axis=0)

    def raise_power(self, kernel: Kernel, u: Array, v: Array) -> Kernel:
        """Absorbs u and v and moves to epsilon/4, whose kernel is the fourth power of this one.

        A stored A is raised in place. A streamed kernel must be built again.

        Args:
            kernel: A kernel that is built.
            u: Row log-scalings to absorb.
            v: Column log-scalings to absorb.

        Returns:
            The kernel at epsilon/4.
        """

        def raised(absorbed: Array, scaling: Array) -> Array:
            # Log-scalings of weight zero stay -inf.
            power = LEVEL_POWER * (absorbed + scaling)
            return jnp.where(jnp.isneginf(absorbed), absorbed, power)

        matrix, int8 = kernel.matrix, kernel.int8
        if self.stored:
            # Weighted rows of A sum to 1, those of A^4 to values in 1..m^3. The shift, raised to
            # the fourth power, divides by m^1.5 and centres that range around 1.
            u = u - 0.375 * math.log(len(v))
            scaled = matrix * jnp.exp(u)[:, None] * jnp.exp(v)[None, :]
            matrix = jnp.square(jnp.square(scaled))
            int8 = narrow(matrix) if self.int8 else int8
        return kernel._replace(
            matrix=matrix,
            int8=int8,
            absorbed_u=raised(kernel.absorbed_u, u),
            absorbed_v=raised(kernel.absorbed_v, v),
            epsilon=kernel.epsilon / LEVEL_POWER,
        )

    def _log_rows(self, kernel: Kernel, block: Block) -> Array:
        """Recomputes a block of rows of log A + u + v."""
        u, v = kernel.absorbed_u + kernel.u, kernel.absorbed_v + kernel.v
        return self.affinity.rows(block) / kernel.epsilon + block.of(u)[:, None] + v[None, :]

    def plan_rows(
        self, kernel: Kernel, block: Block, a: Array, b: Array
    ) -> tuple[Float[Array, "size m"], Float[Array, "size m"]]:
        """Returns a block of rows of the plan P, and of P log(P / (a b)).

        Rows that an earlier block has visited are zero, so sums over blocks count every row once.

        Args:
            kernel: The kernel of a solved plan.
            block: Rows to compute.
            a: Weights of the rows.
            b: Weights of the columns.

        Returns:
            Both blocks, shape [size, m].
        """
        weights = jnp.where(block.fresh, block.of(a), 0.0)
        # log(P / (a b)) = log A + u + v. A stored kernel takes the logarithm of its entries. A
        # streamed one computes the exponents anyway.
        if self.stored:
            rows, u, v = block.of(kernel.matrix), block.of(kernel.u), kernel.v
            logs = jnp.log(jnp.where(rows > 0, rows, 1.0)) + u[:, None] + v[None, :]
            weights, b = weights * jnp.exp(u), b * jnp.exp(v)
        else:
            logs = jnp.minimum(self._log_rows(kernel, block), MAX_EXPONENT)
            rows = jnp.exp(logs)
        plan = weights[:, None] * rows * b[None, :]
        return plan, jnp.where(plan > 0, plan * logs, 0.0)
