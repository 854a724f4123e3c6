"""The Gibbs kernel A = exp(K/epsilon + p + q) that Sinkhorn's sweeps sum over.

The plan is P = diag(a e^x) A diag(b e^y), where x and y are the log-scalings that the solver finds
for a kernel with absorbed potentials p and q. The weights a and b are not part of A, so even tiny
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
from sotalign_jax.ot.affinity import HIGHEST
from sotalign_jax.ot.blocks import Block, over_rows

MAX_DRIFT = 30.0
"""Largest log-scaling before a kernel is built again. float32 overflows at exp(88), and an entry
that underflowed in the build, below exp(-87), is still below exp(-27) after both scalings."""
MAX_EXPONENT = 50.0
"""Logarithm of the largest entry of a kernel, so that exp(MAX_DRIFT) times it is finite. Rows of
A diag(b) sum to 1, so no entry is capped if all weights b are at least exp(-MAX_EXPONENT)."""
LEVEL_POWER = 4
"""Ratio of consecutive epsilons when a small epsilon is approached from above."""


class Matrix(NamedTuple):
    """A given affinity K minus the largest entry of each row, which changes no plan.

    Without the subtraction, a large K/epsilon would leave float32 no digits for differences.

    Attributes:
        k: Affinity K.
        top: Largest entry of each row.
    """

    k: Float[Array, "n m"]
    top: Float[Array, " n"]

    @property
    def height(self) -> int:
        """Number of rows."""
        return len(self.k)

    def rows(self, block: Block) -> Float[Array, "size m"]:
        """Returns a block of rows of K."""
        return block.of(self.k) - block.of(self.top)[:, None]


class Cosines(NamedTuple):
    """The cosine affinity K = diag(f_scale) f g^T diag(g_scale) of raw features.

    The inverse norms are kept beside f and g, so that no normalised copy of them exists.

    Attributes:
        f: Raw features of the rows.
        g: Raw features of the columns.
        f_scale: Inverse norms of f.
        g_scale: Inverse norms of g.
        precision: Precision of the product.
    """

    f: Float[Array, "n d"]
    g: Float[Array, "m d"]
    f_scale: Float[Array, " n"]
    g_scale: Float[Array, " m"]
    precision: jax.lax.PrecisionLike = HIGHEST

    @classmethod
    def of(cls, f: Array, g: Array, precision: jax.lax.PrecisionLike = HIGHEST) -> "Cosines":
        """Builds cosine affinities from raw features.

        Args:
            f: Features of the rows, shape [n, d].
            g: Features of the columns, shape [m, d].
            precision: Precision of the product.

        Returns:
            The affinity.

        Example:
            >>> from sotalign_jax.ot.blocks import Block
            >>> block = Block(jnp.int32(0), 1, jnp.array([True]))
            >>> Cosines.of(jnp.array([[3.0, 4.0]]), jnp.eye(2)).rows(block)
            Array([[0.6, 0.8]], dtype=float32)
        """
        if f.dtype == g.dtype == jnp.bfloat16:
            # Rescaled, so that their products cannot overflow.
            f, g = affinity.rescaled(f), affinity.rescaled(g)
        return cls(f, g, affinity.inverse_norms(f), affinity.inverse_norms(g), precision)

    @property
    def height(self) -> int:
        """Number of rows."""
        return len(self.f)

    def rows(self, block: Block) -> Float[Array, "size m"]:
        """Returns a block of rows of K."""
        if self.f.dtype == self.g.dtype == jnp.bfloat16:
            # Products of bfloat16 numbers are exact in float32, so one bfloat16 pass is exact. The
            # scale follows, because scaled rows would not be bfloat16 numbers.
            cosines = affinity.dot(block.of(self.f), self.g.T) * block.of(self.f_scale)[:, None]
        else:
            cosines = affinity.dot(self.left(block), self.g.T, self.precision)
        return cosines * self.g_scale[None, :]

    def left(self, block: Block) -> Float[Array, "size d"]:
        """Returns a block of normalised rows of f."""
        return affinity.as_float(block.of(self.f)) * block.of(self.f_scale)[:, None]


class KernelState(NamedTuple):
    """Arrays of a kernel. `matrix` and `int8` are empty if they are not stored.

    Attributes:
        matrix: A = exp(K/epsilon + p + q).
        int8: `narrow(A)`.
        p: Potentials of the rows that A has absorbed.
        q: Potentials of the columns that A has absorbed.
        x: Log-scalings of the rows, set by the solver when it ends.
        y: Log-scalings of the columns, set by the solver when it ends.
        epsilon: Regularisation of this kernel.
    """

    matrix: Float[Array, "..."]
    int8: Int[Array, "..."]
    p: Float[Array, " n"]
    q: Float[Array, " m"]
    x: Float[Array, " n"]
    y: Float[Array, " m"]
    epsilon: Float[Array, ""]


# Maps codes -128..127 to the leading 11 bits of float32 numbers, 9 of sign and exponent and 2 of
# mantissa. Code -128 is 2^-26, whose biased exponent is 127 - 26 = 101.
_INT8_OFFSET = 2**7 + (101 << 2)


def narrow(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """Rounds numbers >= 0 to 8 bits, 6 of exponent and 2 of mantissa.

    Numbers are clipped to 2^-26 .. 1.75 * 2^37, so zero becomes 2^-26. Fourth powers of a
    kernel's entries need this range, see `Kernel.raise_power`.

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


class Kernel(NamedTuple):
    """The kernel of an affinity. All methods are pure functions of a `KernelState`.

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

    def blank(self, q: Array, epsilon: Array) -> KernelState:
        """Returns a state that has yet to be built.

        Args:
            q: Potentials of the columns to absorb.
            epsilon: Regularisation.

        Returns:
            The state, with arrays of the final shapes.
        """
        shape = self.affinity.height, len(q)
        # Filled with a traced value. XLA would allocate a constant before an earlier solve has
        # freed its memory.
        matrix = jnp.full(shape if self.stored else 0, epsilon, q.dtype)
        int8 = jnp.full(shape if self.int8 else 0, epsilon.astype(jnp.int8), jnp.int8)
        p = jnp.zeros(shape[0], q.dtype)
        state = KernelState(matrix, int8, p, q, p, jnp.zeros_like(q), epsilon)
        return sharding.vary_like(state, self.affinity[0])

    def build(self, state: KernelState, log_b: Array) -> KernelState:
        """Sets p_i = -log sum_j b_j exp(K_ij/epsilon + q_j), the row update, and fills A.

        Rows of A diag(b) then sum to 1.

        Args:
            state: State with the potentials q and epsilon.
            log_b: Log-weights of the columns.

        Returns:
            The state with new p and A.
        """
        b = jnp.exp(log_b)

        def body(block: Block, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            matrix, int8, p = carry
            # Row-major, as A is stored. Otherwise a TPU may compute the product transposed and copy
            # A.
            rows = with_layout_constraint(self.affinity.rows(block), Layout((0, 1)))
            logs = rows / state.epsilon + state.q[None, :]
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
            return matrix, int8, block.put(p, -top - jnp.log(s))

        with jax.named_scope("build"):
            carry = state.matrix, state.int8, state.p
            matrix, int8, p = self._over_rows(body, carry)
        return state._replace(matrix=matrix, int8=int8, p=p)

    def update_columns(self, state: KernelState, log_a: Array) -> Float[Array, " m"]:
        """Returns q_j = -log sum_i a_i exp(K_ij/epsilon + p_i), the column update.

        It is computed in the log domain, for columns that underflow in A.

        Args:
            state: State with the potentials p and epsilon.
            log_a: Log-weights of the rows.

        Returns:
            The potentials of the columns. Those of -inf, of weight zero, stay -inf.
        """
        infinity = jnp.full_like(state.q, jnp.inf)
        finite_p = jnp.where(jnp.isneginf(log_a), 0.0, log_a + state.p)

        def body(block: Block, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            # Online logsumexp: when the running maximum rises, the sum so far is rescaled.
            highest, total = carry
            logs = self.affinity.rows(block) / state.epsilon + block.of(finite_p)[:, None]
            counted = block.fresh & ~jnp.isneginf(block.of(log_a))
            logs = jnp.where(counted[:, None], logs, -jnp.inf)
            top = jnp.maximum(highest, jnp.max(logs, axis=0))
            base = jnp.where(jnp.isneginf(top), 0.0, top)
            added = jnp.sum(jnp.exp(logs - base[None, :]), axis=0)
            return top, total * jnp.exp(highest - base) + added

        highest, total = self._over_rows(body, (-infinity, jnp.zeros_like(state.q)))
        top = sharding.pmax(highest, self.axes)
        base = jnp.where(jnp.isneginf(top), 0.0, top)
        total = sharding.psum(total * jnp.exp(highest - base), self.axes)
        return jnp.where(jnp.isneginf(state.q), state.q, -base - jnp.log(total))

    def sweep(self, state: KernelState, a: Array, c: Array) -> tuple[Array, Array]:
        """Computes the row sums s = A c and the column sums t = (a/s)^T A.

        Args:
            state: A kernel that is built.
            a: Weights of the rows.
            c: Weights of the columns times their scalings.

        Returns:
            The sums s and t. Where rows are split over devices, t is a partial sum.
        """
        if self.stored:
            s = affinity.dot(state.matrix, c, self.precision)
            return s, affinity.dot(a / s, state.matrix, self.precision)

        def body(block: Block, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            s, t = carry
            # Not capped: an overflow makes the error infinite, and the kernel is built again.
            rows = jnp.exp(self._log_rows(state, block))
            s_k = affinity.dot(rows, c, self.precision)
            weights = jnp.where(block.fresh, block.of(a) / s_k, 0.0)
            return block.put(s, s_k), t + affinity.dot(weights, rows, self.precision)

        return self._over_rows(body, (jnp.zeros_like(a), jnp.zeros_like(c)))

    def sweep_int8(self, state: KernelState, a: Array, c: Array) -> tuple[Array, Array]:
        """Computes `sweep` over the int8 kernel.

        The sums are not written as matrix products, because XLA fuses the conversion to float32
        only into sums of products on GPUs and TPUs. A sweep then reads a quarter of the bytes.

        Args:
            state: A kernel that is built.
            a: Weights of the rows.
            c: Weights of the columns times their scalings.

        Returns:
            The sums s and t, as `sweep` does.
        """
        entries = widen(state.int8)
        s = jnp.sum(entries * c[None, :], axis=1)
        return s, jnp.sum(entries * (a / s)[:, None], axis=0)

    def raise_power(self, state: KernelState, x: Array, y: Array) -> KernelState:
        """Absorbs x and y and moves to epsilon/4, whose kernel is the fourth power of this one.

        A stored A is raised in place. A streamed kernel must be built again.

        Args:
            state: A kernel that is built.
            x: Log-scalings of the rows.
            y: Log-scalings of the columns.

        Returns:
            The state at epsilon/4.
        """

        def absorbed(potential: Array, scaling: Array) -> Array:
            raised = LEVEL_POWER * (potential + scaling)
            # Potentials of weight zero stay -inf.
            return jnp.where(jnp.isneginf(potential), potential, raised)

        matrix, int8 = state.matrix, state.int8
        if self.stored:
            # Weighted rows of A sum to 1, those of A^4 to values in 1..m^3. The shift, raised to
            # the fourth power, divides by m^1.5 and centres that range around 1.
            x = x - 0.375 * math.log(len(y))
            scaled = matrix * jnp.exp(x)[:, None] * jnp.exp(y)[None, :]
            matrix = jnp.square(jnp.square(scaled))
            int8 = narrow(matrix) if self.int8 else int8
        p, q = absorbed(state.p, x), absorbed(state.q, y)
        return state._replace(
            matrix=matrix, int8=int8, p=p, q=q, epsilon=state.epsilon / LEVEL_POWER
        )

    def _log_rows(self, state: KernelState, block: Block) -> Array:
        """Recomputes a block of rows of log A + x + y."""
        p, q = state.p + state.x, state.q + state.y
        return self.affinity.rows(block) / state.epsilon + block.of(p)[:, None] + q[None, :]

    def plan_rows(
        self, state: KernelState, block: Block, a: Array, b: Array
    ) -> tuple[Float[Array, "size m"], Float[Array, "size m"]]:
        """Returns a block of rows of the plan P, and of P log(P / (a b)).

        Rows that an earlier block has visited are zero, so sums over blocks count every row once.

        Args:
            state: The kernel of a solved plan.
            block: Rows to compute.
            a: Weights of the rows.
            b: Weights of the columns.

        Returns:
            Both blocks, shape [size, m].
        """
        weights = jnp.where(block.fresh, block.of(a), 0.0)
        # log(P / (a b)) = log A + x + y. A stored kernel takes the logarithm of its entries. A
        # streamed one computes the exponents anyway.
        if self.stored:
            rows, x, y = block.of(state.matrix), block.of(state.x), state.y
            logs = jnp.log(jnp.where(rows > 0, rows, 1.0)) + x[:, None] + y[None, :]
            weights, b = weights * jnp.exp(x), b * jnp.exp(y)
        else:
            logs = jnp.minimum(self._log_rows(state, block), MAX_EXPONENT)
            rows = jnp.exp(logs)
        plan = weights[:, None] * rows * b[None, :]
        return plan, jnp.where(plan > 0, plan * logs, 0.0)
