"""The Gibbs kernel A = exp(K/epsilon + p + q) that Sinkhorn sweeps over, stored or streamed.

The plan is P = diag(a) A diag(b): with the weights a and b outside, A neither overflows nor loses
an entry that counts, however small a weight is. A stored kernel keeps A in memory and visits K
once, a block of rows at a time, to build it. A streamed one recomputes blocks of rows from the
features in every sweep and never holds more than one of them. Either way:

    blank(q, epsilon)         -> state that is yet to be built
    build(state, log_b)       -> state with p from q, the row update of log-domain Sinkhorn
    update_columns(state, ..) -> q from p, its column update
    sweep(state, a, c, exact) -> row sums s = A c and column sums t = (a/s)^T A
    absorb(state, x, y, k)    -> state of the kernel (diag(e^x) A diag(e^y))^k
    transport(state, ...)     -> products with the plan

Where rows are split over devices, a kernel has the rows of its own, and what it sums over rows is
its own part of the sum.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

from sotalign_jax.ot import affinity, blocks, onepass, sharding
from sotalign_jax.ot.affinity import HIGHEST, THREE_PASSES
from sotalign_jax.ot.blocks import Block, over_rows

MAX_DRIFT = 30.0
"""Scalings beyond exp(+-MAX_DRIFT) call for a rebuild: far from float32's overflow at exp(88), and
what underflowed when the kernel was built still is below exp(-27) of the largest entry."""
MAX_EXPONENT = 50.0
"""Entries are capped at exp(50) while a kernel is built, so that exp(MAX_DRIFT) times them is
finite. A plan has none so large, for P_ij <= min(a_i, b_j) and so A_ij <= 1 / max(a_i, b_j)."""


class Matrix(NamedTuple):
    """An affinity K that is given; less the largest entry of each row, which changes no plan.

    Where K is large against epsilon, K/epsilon would leave float32 no digits for the rest.
    """

    k: Float[Array, "n m"]
    top: Float[Array, " n"]

    @property
    def height(self) -> int:
        """Number of rows."""
        return len(self.k)

    def rows(self, block: Block, columns: Block | None = None) -> Float[Array, "size m"]:
        """A block of rows of K, of all columns or of a block of them."""
        rows = block.of(self.k) - block.of(self.top)[:, None]
        return rows if columns is None else columns.of(rows, axis=1)


class Cosines(NamedTuple):
    """K = diag(f_scale) f g^T diag(g_scale): cosines of raw features, without a copy of them."""

    f: Float[Array, "n d"]
    g: Float[Array, "m d"]
    f_scale: Float[Array, " n"]
    g_scale: Float[Array, " m"]
    precision: jax.lax.PrecisionLike = THREE_PASSES

    @classmethod
    def of(cls, f: Array, g: Array, precision: jax.lax.PrecisionLike = THREE_PASSES) -> "Cosines":
        """Of raw features."""
        return cls(f, g, affinity.inverse_norms(f), affinity.inverse_norms(g), precision)

    @property
    def height(self) -> int:
        """Number of rows."""
        return len(self.f)

    def rows(self, block: Block, columns: Block | None = None) -> Float[Array, "size m"]:
        """A block of rows of K, of all columns or of a block of them."""
        g, scale = self.g, self.g_scale
        if columns is not None:
            g, scale = columns.of(g), columns.of(scale)
        return affinity.dot(self.left(block), g.T, self.precision) * scale[None, :]

    def left(self, block: Block) -> Float[Array, "size d"]:
        """A block of normalised rows of f."""
        return block.of(self.f) * block.of(self.f_scale)[:, None]


class KernelState(NamedTuple):
    """A = exp(K/epsilon + p + q) = diag(e^x) matrix diag(e^y); without a matrix when streamed."""

    matrix: Float[Array, "..."]
    narrow: Int[Array, "..."]
    """The matrix in 8 bits an entry, for sweeps that need no more; empty unless asked for."""
    p: Float[Array, " n"]
    q: Float[Array, " m"]
    x: Float[Array, " n"]
    y: Float[Array, " m"]
    epsilon: Float[Array, ""]


class Products(NamedTuple):
    """P G, P^T F, P 1, P^T 1 and sum_ij P_ij log A_ij for a plan P, F and G normalised."""

    right: Float[Array, "n d"]
    left: Float[Array, "m d"]
    rows: Float[Array, " n"]
    columns: Float[Array, " m"]
    log_moment: Float[Array, ""]


def _raise_to(exponents: Array, power: Array) -> Array:
    """power * exponents, keeping -inf (a zero weight) even for powers that vary."""
    return jnp.where(jnp.isneginf(exponents), exponents, power * exponents)


def _row_major(x: Array) -> Array:
    """x in the order of a stored kernel: a TPU's products may have another, and copy that."""
    in_order = functools.partial(with_layout_constraint, layouts=Layout((0, 1)))
    return jax.lax.platform_dependent(x, tpu=in_order, default=lambda x: x)


class Kernel(NamedTuple):
    """The kernel of an affinity: stored, or streamed by blocks of `block_size` rows.

    `axes` are those of the mesh that the rows are split over. With `narrow`, a stored kernel has
    a copy of a quarter of its size, which most sweeps read.
    """

    affinity: Matrix | Cosines
    block_size: int | None = None
    axes: sharding.Axes = ()
    precision: jax.lax.PrecisionLike = HIGHEST
    narrow: bool = False

    @property
    def stored(self) -> bool:
        """Whether A is kept in memory."""
        return self.block_size is None

    def _over_rows(self, body: Callable[[Block, Any], Any], carry: Any, factor: int = 1) -> Any:
        """Over blocks of rows; `factor` times as many at a time where columns are fewer."""
        size = self.block_size
        if size is None:  # many devices, of which each has few rows, need smaller blocks
            size = blocks.BUILD_ROWS // (2 if self.axes else 1)
        carry = sharding.vary_like(carry, self.affinity[0])
        return over_rows(self.affinity.height, factor * size, body, carry)

    def blank(self, q: Array, epsilon: Array) -> KernelState:
        """A state that is yet to be built."""
        n = self.affinity.height

        def unfilled(kept: bool, dtype: Any) -> Array:
            shape = (n, len(q)) if kept else (0,)

            def empty(x: Array) -> Array:
                return sharding.vary_like(jax.lax.empty(shape, dtype), x)

            def full(x: Array) -> Array:
                return jnp.full(shape, x.astype(dtype))  # a constant XLA would keep and copy

            return jax.lax.platform_dependent(epsilon, cuda=empty, tpu=empty, default=full)

        p = jnp.zeros(n, q.dtype)
        copies = unfilled(self.stored, q.dtype), unfilled(self.narrow, jnp.int8)
        state = KernelState(*copies, p, q, p, jnp.zeros_like(q), epsilon)
        return sharding.vary_like(state, self.affinity[0])

    def build(self, state: KernelState, log_b: Array) -> KernelState:
        """p_i = -log sum_j b_j exp(K_ij/epsilon + q_j): rows of A diag(b) sum to 1."""
        b = jnp.exp(log_b)

        def body(block: Block, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            matrix, narrow, p = carry
            logs = _row_major(self.affinity.rows(block)) / state.epsilon + state.q[None, :]
            top = jnp.max(logs + log_b[None, :], axis=1)
            rows = jnp.exp(jnp.minimum(logs - top[:, None], MAX_EXPONENT))
            s = affinity.dot(rows, b, self.precision)
            if self.stored:
                rows = rows / s[:, None]
                matrix = block.put(matrix, rows)
            if self.narrow:
                narrow = block.put(narrow, onepass.narrow(rows))
            return matrix, narrow, block.put(p, -top - jnp.log(s))

        with jax.named_scope("build"):
            carry = state.matrix, state.narrow, state.p
            matrix, narrow, p = self._over_rows(body, carry)
        x, y = jnp.zeros_like(state.x), jnp.zeros_like(state.y)
        return KernelState(matrix, narrow, p, state.q, x, y, state.epsilon)

    def update_columns(self, state: KernelState, log_a: Array) -> Float[Array, " m"]:
        """q_j = -log sum_i a_i exp(K_ij/epsilon + p_i), for columns that underflow in A."""
        infinity = jnp.full_like(state.q, jnp.inf)
        finite_p = jnp.where(jnp.isneginf(log_a), 0.0, log_a + state.p)

        def body(block: Block, carry: tuple[Array, Array]) -> tuple[Array, Array]:
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

    def _log_rows(self, state: KernelState, block: Block, columns: Block | None = None) -> Array:
        scaled = self.affinity.rows(block, columns) / state.epsilon
        q = state.q if columns is None else columns.of(state.q)
        return scaled + block.of(state.p)[:, None] + q[None, :]

    def sweep(
        self, state: KernelState, a: Array, c: Array, *, narrow: bool = False
    ) -> tuple[Array, Array]:
        """Reads a stored A once or twice, or its narrow copy; computes a streamed one once."""
        if self.stored:
            matrix = state.narrow if narrow else state.matrix
            split = self.axes or sharding.varying(matrix)
            function = onepass.two_reads if split else onepass.sweep
            left, right = jnp.exp(state.x), jnp.exp(state.y)
            s, t = function(matrix, a, right * c, self.precision)
            return left * s, right * t

        def body(block: Block, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            s, t = carry
            rows = jnp.exp(self._log_rows(state, block))  # overflow calls for a rebuild
            s_k = affinity.dot(rows, c, self.precision)
            weights = jnp.where(block.fresh, block.of(a) / s_k, 0.0)
            return block.put(s, s_k), t + affinity.dot(weights, rows, self.precision)

        return self._over_rows(body, (jnp.zeros_like(a), jnp.zeros_like(c)))

    def absorb(self, state: KernelState, x: Array, y: Array, power: Array) -> KernelState:
        """A power of 4 (one level of epsilon-scaling) is taken in place; 1 leaves the matrix."""
        # Weighted rows sum to 1, those of A^4 to anything between 1 and m^3: centre that range.
        raised = power > 1
        x = x - jnp.where(raised, 0.375 * jnp.log(float(len(y))), 0.0).astype(x.dtype)

        def raise_matrix(_: Any, copies: tuple[Array, Array]) -> tuple[Array, Array]:
            scaled = copies[0] * jnp.exp(x)[:, None] * jnp.exp(y)[None, :]
            matrix = jnp.square(jnp.square(scaled))
            return matrix, onepass.narrow(matrix) if self.narrow else copies[1]

        copies = state.matrix, state.narrow
        if self.stored:  # a loop, not a condition, for it works in place
            with jax.named_scope("raise"):
                times = raised.astype(jnp.int32)
                copies = jax.lax.fori_loop(0, times, raise_matrix, copies)
        p, q = _raise_to(state.p + x, power), _raise_to(state.q + y, power)
        outside = jnp.where(raised, 0.0, x), jnp.where(raised, 0.0, y)
        return KernelState(*copies, p, q, *outside, state.epsilon / power)

    def transport(
        self,
        state: KernelState,
        a: Array,
        b: Array,
        features: Cosines,
        *,
        star: KernelState | None = None,
        in_place: bool = False,
        minus: Products | None = None,
    ) -> tuple[Products, tuple[Array, Array]]:
        """Products of the plan with normalised features, and the marginals of `star`'s plan.

        Less the plan of `star`, which is stored, too; with `in_place` the difference takes the
        place of its kernel and is multiplied as a whole, for no block of it is to be added to all
        of `left`. Or less the products in `minus`, in their place. Each device sums over its own
        rows; `left` alone is the sum over all, of which it keeps the rows that are its own.
        """
        height = len(features.g) // sharding.size(self.axes)
        start = Products(
            jnp.zeros_like(features.f),
            jnp.zeros_like(features.g, shape=(height, features.g.shape[1])),
            jnp.zeros_like(state.p),
            jnp.zeros_like(state.q),
            jnp.zeros((), state.q.dtype),
        )
        if minus is not None:
            start = jax.tree.map(jnp.negative, minus)
        marginals = jnp.zeros_like(state.p), jnp.zeros_like(state.q)

        def add(sums: Products, columns: Block | None = None, kept: Array | None = None) -> Any:
            """With the products of all columns, or of a block of them.

            Or without products: P - P* is put in the place of P*'s kernel, which is `kept`.
            """

            def of(x: Array, axis: int = 0) -> Array:
                return x if columns is None else columns.of(x, axis)

            def plan_of(state: KernelState, block: Block) -> tuple[Array, Array]:
                """Rows of a plan P, and of P log A."""
                weights, shares = jnp.where(block.fresh, block.of(a), 0.0), of(b)
                if self.stored:
                    rows, x, y = of(block.of(state.matrix), 1), block.of(state.x), of(state.y)
                    logs = jnp.log(jnp.where(rows > 0, rows, 1.0)) + x[:, None] + y[None, :]
                    weights, shares = weights * jnp.exp(x), shares * jnp.exp(y)
                else:
                    logs = jnp.minimum(self._log_rows(state, block, columns), MAX_EXPONENT)
                    rows = jnp.exp(logs)
                plan = weights[:, None] * rows * shares[None, :]
                return plan, jnp.where(plan > 0, plan * logs, 0.0)

            def body(block: Block, carry: Any) -> Any:
                sums, (rows_star, columns_star), kept = carry
                fresh: Any = None if kept is None else block.fresh[:, None]
                plan, moments = plan_of(state, block)
                if star is not None:
                    before = star if kept is None else star._replace(matrix=kept)
                    plan_star, moments_star = plan_of(before, block)
                    rows_star = block.add(rows_star, jnp.sum(plan_star, axis=1))
                    columns_star = columns_star + jnp.sum(plan_star, axis=0)
                    plan, moments = plan - plan_star, moments - moments_star
                if kept is not None:  # rows of an earlier block hold the difference already
                    plan = jnp.where(fresh, plan, block.of(kept))
                    kept = block.put(kept, plan)
                else:
                    scaled = plan * of(features.g_scale)[None, :]
                    right = affinity.dot(scaled, of(features.g), features.precision)
                    left = affinity.dot(plan.T, features.left(block), features.precision)
                    sums = sums._replace(right=block.add(sums.right, right), left=sums.left + left)
                masses = of(sums.columns) + jnp.sum(plan, axis=0, where=fresh)
                sums = sums._replace(
                    rows=block.add(sums.rows, jnp.sum(plan, axis=1, where=fresh)),
                    columns=masses if columns is None else columns.put(sums.columns, masses),
                    log_moment=sums.log_moment + jnp.sum(moments),
                )
                return sums, (rows_star, columns_star), kept

            # Each block reads and writes all of `left`: larger ones of a large problem save bytes.
            large = self.stored and self.affinity.height >= 40 * blocks.BUILD_ROWS
            factor = (2 if large else 1) if columns is None else sharding.size(self.axes)
            return self._over_rows(body, (sums, marginals, kept), factor)

        if in_place and star is not None:
            sums, of_star, plan = add(start, kept=star.matrix)
            f, g = features.f * features.f_scale[:, None], features.g * features.g_scale[:, None]
            right = affinity.dot(plan, g, features.precision)
            left = affinity.dot(plan.T, f, features.precision)
            return sums._replace(right=right, left=left), of_star
        if not self.axes:
            return add(start)[:2]

        def of_columns(k: Any, sums: Products) -> tuple[Array, Products]:
            columns = Block(k * height, height, jnp.ones(height, bool))
            sums, *_ = add(sums._replace(left=jnp.zeros_like(start.left)), columns)
            return sums.left, sums

        left, sums = sharding.psum_ring(of_columns, start.left, start, self.axes)
        return sums._replace(left=start.left + left), marginals
