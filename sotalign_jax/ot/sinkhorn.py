"""Entropic optimal transport: affinity K -> plan P = exp(K/epsilon + u + v).

    OT_eps(K) = argmin_{P 1 = a, P^T 1 = b}  -<P, K> + eps * sum P log P

The log-scalings u and v are dimensionless. A `Plan` keeps each of them in two parts,

    u = centred_u - row_centre/epsilon,    v = centred_v - column_centre/epsilon,

where the centres are the plan's potentials in the units of K. K minus its centres is small where
the plan has mass, so little is lost when it is divided by a small epsilon. `sinkhorn` is the fast
solver, and `reference` is textbook Sinkhorn.

References:
    M. Cuturi, "Sinkhorn distances: lightspeed computation of optimal transport", NeurIPS 2013.
    G. Peyre and M. Cuturi, "Computational optimal transport", 2019, section 4.
"""

from __future__ import annotations  # help() then shows the annotations as they are written

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sotalign_jax import checks
from sotalign_jax.ot import affinity, sharding
from sotalign_jax.ot.affinity import ArrayLike, Matrix
from sotalign_jax.ot.blocks import BUILD_ROWS, Block, over_rows
from sotalign_jax.ot.kernel import MAX_EXPONENT, Operator
from sotalign_jax.ot.solver import (
    MAX_ITERATIONS,
    Options,
    Scalings,
    Status,
    goal,
    rounding,
    row_range,
    solve,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """A transport plan in scaling form, log P_ij = K_ij/epsilon + u_i + v_j.

    Attributes:
        affinity: K.
        row_centre: Part of u in the units of K, see the top of this file.
        column_centre: Part of v in the units of K.
        centred_u: The rest of u. It is -inf where a weight is zero.
        centred_v: The rest of v. It is -inf where a weight is zero.
        epsilon: Regularisation.
        error: The larger of ||P 1 - a||_1 and ||P^T 1 - b||_1 of `matrix()` for weights of mass 1,
            plus a bound on the rounding of exponents.
        iterations: Number of sweeps.
        status: How the solve ended, see `Status`.

    Example:
        >>> plan = sinkhorn(jnp.eye(2), epsilon=0.5)
        >>> plan.apply(jnp.ones((2, 1))).tolist()
        [[0.5], [0.5]]
    """

    affinity: Float[Array, "n m"]
    row_centre: Float[Array, " n"]
    column_centre: Float[Array, " m"]
    centred_u: Float[Array, " n"]
    centred_v: Float[Array, " m"]
    epsilon: Float[Array, ""]
    error: Float[Array, ""]
    iterations: Int[Array, ""]
    status: Int[Array, ""]

    @property
    def converged(self) -> Bool[Array, ""]:
        """True if the error is at most the tolerance."""
        return self.status == Status.CONVERGED

    @property
    def u(self) -> Float[Array, " n"]:
        """Row log-scalings, shape [n], with -inf where the weight is zero."""
        return self.centred_u - self.row_centre / self.epsilon[..., None]

    @property
    def v(self) -> Float[Array, " m"]:
        """Column log-scalings, shape [m], with -inf where the weight is zero."""
        return self.centred_v - self.column_centre / self.epsilon[..., None]

    @property
    def scalings(self) -> Scalings:
        """The log-scalings u and v with the result of the solve."""
        return Scalings(self.u, self.v, self.error, self.iterations, self.status)

    def log_matrix(self) -> Float[Array, "n m"]:
        """Returns log P, shape [n, m].

        log P is at most 0. Larger values, where K/epsilon has no digits left, are capped so that P
        is finite.
        """
        # Centred before the division, because K and its centres are close where the plan has mass.
        centred = self.affinity - self.row_centre[..., :, None]
        centred = centred - self.column_centre[..., None, :]
        epsilon = self.epsilon[..., None, None]  # a vmapped solve gives many plans
        scalings = self.centred_u[..., :, None], self.centred_v[..., None, :]
        return jnp.minimum(centred / epsilon + scalings[0] + scalings[1], MAX_EXPONENT)

    def matrix(self) -> Float[Array, "n m"]:
        """Returns P, shape [n, m]."""
        return jnp.exp(self.log_matrix())

    def apply(self, values: Float[Array, "m k"]) -> Float[Array, "n k"]:
        """Computes P @ values.

        Args:
            values: One row per column of the plan, shape [m, k].

        Returns:
            The product, shape [n, k].
        """
        return affinity.dot(self.matrix(), values)


def _top(k: Array) -> Array:
    """Returns the largest finite entry of each row."""
    return jnp.max(k, axis=-1, where=jnp.isfinite(k), initial=jnp.finfo(k.dtype).min)


class Centres(NamedTuple):
    """Potentials of a plan in the units of K.

    Attributes:
        rows: Part of u, see the top of this file.
        columns: Part of v.
    """

    rows: Float[Array, " n"]
    columns: Float[Array, " m"]


class Weights(NamedTuple):
    """Log-weights of rows and columns, normalised to a total weight of 1.

    Attributes:
        log_a: Log-weights of the rows, -inf for padding.
        log_b: Log-weights of the columns, -inf for padding.
    """

    log_a: Float[Array, " n"]
    log_b: Float[Array, " m"]

    @classmethod
    def of(
        cls, log_a: ArrayLike | None, log_b: ArrayLike | None, shape: tuple[int, ...], dtype: Any
    ) -> Weights:
        """Checks and normalises log-weights. None gives uniform weights.

        Args:
            log_a: Log-weights of the rows, or None.
            log_b: Log-weights of the columns, or None.
            shape: Number of rows and of columns.
            dtype: Type of the result.

        Returns:
            The weights.

        Raises:
            InputError: A shape is wrong, or weights that are not traced do not sum to 1.

        Example:
            >>> Weights.of(None, np.log([0.25, 0.75]), (1, 2), jnp.float32).log_b.tolist()
            [-1.386, -0.288]
        """
        n, m = shape
        return cls(_log_weights("log_a", log_a, n, dtype), _log_weights("log_b", log_b, m, dtype))


def _log_weights(name: str, given: ArrayLike | None, size: int, dtype: Any) -> Float[Array, " n"]:
    """Checks and normalises the log-weights of one side."""
    if given is None:
        return jnp.full((size,), -math.log(size), dtype)
    if np.shape(given) != (size,):
        raise checks.InputError(
            f"{name} must have shape ({size},), got {np.shape(given)}; pass one log-weight for "
            "each row (log_a) or column (log_b) of the affinity"
        )
    if not isinstance(given, jax.core.Tracer):
        # Traced weights cannot be checked here. They are normalised below.
        total = np.exp(np.asarray(given, np.float64)).sum()
        # Not `>= 1e-3`, which would accept NaN.
        if not abs(total - 1) < 1e-3:
            raise checks.InputError(
                f"{name} must be logarithms of weights that sum to 1, got a sum of {total:.4g}"
            )
    logs = jnp.asarray(given, dtype)
    return logs - jax.nn.logsumexp(logs)


class _Refined(NamedTuple):
    """State of `_refine`."""

    u: Array  # centred row log-scalings
    v: Array  # centred column log-scalings
    columns: Array  # column sums of the plan
    error: Array
    last_error: Array
    iterations: Array


def _refine(
    k: Array,
    centres: Centres,
    scalings: Scalings,
    weights: Weights,
    options: Options,
    axes: sharding.Axes,
) -> _Refined:
    """Measures the error of the plan's matrix, and reduces it by plain Sinkhorn if that helps.

    Large exponents K/epsilon + u + v lose digits in the solver's kernel. With K centred at the
    plan's own potentials the exponents are small, and an update of plain Sinkhorn repairs the
    rounding. Usually the first update finds that the error is small enough. The error includes a
    bound on rounding, because another program may multiply by 1/epsilon where this one divides, and
    its exponents then differ in their last digit.
    """
    log_a, log_b = weights
    epsilon, tolerance = options.epsilon, options.tolerance

    def update(state: _Refined) -> _Refined:
        # The column update. Columns of weight zero, and those without mass so far, keep their v.
        with_mass = jnp.isfinite(log_b) & (state.columns > 0)
        v = state.v + jnp.where(with_mass, log_b - jnp.log(state.columns), 0.0)

        def body(block: Block, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            centred = block.of(k) - block.of(centres.rows)[:, None] - centres.columns[None, :]
            logs = centred / epsilon + v[None, :]
            # Subtracts the largest exponent, as in a logsumexp.
            highest = _top(logs)
            rows = jnp.exp(logs - highest[:, None])
            s = jnp.sum(rows, axis=1)
            u = block.of(log_a) - highest - jnp.log(s)
            plan = jnp.where(block.fresh, jnp.exp(block.of(log_a)) / s, 0.0)[:, None] * rows
            # Weighted by mass, because rounding matters only in entries with mass.
            exponents = jnp.where(plan > 0, jnp.abs(centred) / epsilon, 0.0)
            return (
                block.put(sums[0], u),
                sums[1] + jnp.sum(plan, axis=0),
                sums[2] + jnp.sum(plan * exponents),
            )

        nothing = jnp.zeros_like(log_a), jnp.zeros_like(log_b), jnp.zeros((), k.dtype)
        u, *sums = over_rows(len(k), BUILD_ROWS, body, sharding.vary_like(nothing, k))
        columns, exponent = (sharding.psum(part, axes) for part in sums)
        error = jnp.sum(jnp.abs(columns - jnp.exp(log_b))) + rounding(exponent, k.dtype)
        updated = _Refined(u, v, columns, error, state.error, state.iterations + 1)
        return sharding.vary_like(updated, k)

    def unfinished(state: _Refined) -> Array:
        # An error that falls by less than a tenth is mostly rounding.
        helps = (state.error > tolerance) & (state.error < 0.9 * state.last_error)
        helps &= scalings.status != Status.NOT_FINITE
        helps &= state.iterations < options.max_iterations
        return (state.iterations < scalings.iterations) | helps

    infinity = jnp.asarray(jnp.inf, k.dtype)
    v = scalings.v + centres.columns / epsilon
    # Column sums of zero make the first update keep v, and only compute u and the error.
    start = _Refined(log_a, v, jnp.zeros_like(log_b), infinity, infinity, scalings.iterations - 1)
    return jax.lax.while_loop(unfinished, update, sharding.vary_like(start, k))


def without_padding(k: Array, weights: Weights) -> Array:
    """Replaces K by 0 in rows and by -inf in columns of weight zero, where it may be NaN.

    Columns become -inf so that they do not affect the largest entry of a row.

    Args:
        k: Affinity, shape [n, m].
        weights: Log-weights of rows and columns.

    Returns:
        The affinity with the replaced entries.

    Example:
        >>> half = jnp.log(jnp.array([1.0, 0.0]))
        >>> without_padding(jnp.full((2, 2), 3.0), Weights(half, half)).tolist()
        [[3.0, -inf], [0.0, 0.0]]
    """
    k = jnp.where(jnp.isneginf(weights.log_b)[None, :], -jnp.inf, k)
    return jnp.where(jnp.isneginf(weights.log_a)[:, None], 0.0, k)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def constant(message: str, x: Any) -> Any:
    """Returns a pytree unchanged, and raises TypeError(message) if it is differentiated.

    Forward and reverse mode both call a `custom_jvp` rule, but only for tangents that may differ
    from zero. `jax.lax.stop_gradient` of the input is therefore accepted.

    Args:
        message: Text of the error.
        x: A pytree of arrays.

    Returns:
        The same pytree.
    """
    return x


@constant.defjvp
def _refuse(message: str, primals: Any, tangents: Any) -> Any:
    """Raises TypeError(message). JAX calls this rule if `constant` is differentiated."""
    raise TypeError(message)


_NOT_DIFFERENTIABLE = (
    "sinkhorn is not differentiable; use klot or klot_from_embeddings, whose gradient is exact, or "
    "pass jax.lax.stop_gradient of K, epsilon and the log-weights"
)


def check_limits(*, max_iterations: int, tolerance: Any, **epsilons: Any) -> None:
    """Checks the limits of a solve.

    Args:
        max_iterations: Number of sweeps at which a solve stops, known at trace time.
        tolerance: Marginal error at which a solve stops.
        **epsilons: Regularisations by the names of their arguments.

    Raises:
        InputError: One of them is invalid.
    """
    checks.static(max_iterations=max_iterations)
    checks.whole(1, most=2**31 - 1, max_iterations=max_iterations)  # counted in int32
    checks.at_least(0, tolerance=tolerance)
    checks.positive(**epsilons)


def sinkhorn(
    K: Float[ArrayLike, "n m"],
    *,
    epsilon: Any,
    log_a: Float[ArrayLike, " n"] | None = None,
    log_b: Float[ArrayLike, " m"] | None = None,
    tolerance: float = 1e-4,
    max_iterations: int = MAX_ITERATIONS,
    init_v: Float[ArrayLike, " m"] | None = None,
    precision: jax.lax.PrecisionLike = affinity.HIGHEST,
) -> Plan:
    """Solves OT_eps(K), the entropic transport plan of an affinity.

    The solver is stabilised Sinkhorn with Anderson acceleration and epsilon-scaling, see
    `ot.solver`. It stops when max(||P 1 - a||_1, ||P^T 1 - b||_1) <= tolerance. `Plan.converged`
    reports whether it did, and `Plan.status` why it did not. The function works under `jit`, `vmap`
    and `shard_map`, in float32 and float64, for epsilons of about 1e-6 to 1e6 times the range of K.
    Plans are not differentiable: use `klot`. A traced epsilon <= 0 gives the status `NOT_FINITE`.

    Args:
        K: Affinity (larger is closer), shape [n, m]. An entry of -inf is forbidden to the plan.
        epsilon: Entropic regularisation, in the units of K.
        log_a: Log-weights of the rows, -inf for padding. Uniform by default. The weights are scaled
            to sum to 1. Outside `jit`, weights that do not sum to 1 raise an error.
        log_b: Log-weights of the columns, like `log_a`.
        tolerance: Marginal error (L1, total mass 1) at which to stop.
        max_iterations: Number of (u, v) updates at which to stop. Static.
        init_v: Column log-scalings to start from, such as `plan.v` of a similar problem. The row
            log-scalings follow from them.
        precision: Precision of the matrix products, "highest", "high" or "default". Static.

    Returns:
        The `Plan`.

    Raises:
        InputError: A shape or an option is invalid.
        TypeError: If the plan is differentiated.

    Example:
        >>> plan = jax.jit(sinkhorn)(jnp.array([[1.0, 0.0], [0.0, 1.0]]), epsilon=0.5)
        >>> plan.matrix().tolist(), bool(plan.converged)
        ([[0.44, 0.06], [0.06, 0.44]], True)

    References:
        M. Cuturi, "Sinkhorn distances", NeurIPS 2013.
        B. Schmitzer, "Stabilized sparse scaling algorithms for entropy regularized transport
        problems", SISC 41 (2019).
        H. F. Walker and P. Ni, "Anderson acceleration for fixed-point iterations", SINUM 49 (2011).
        L. Chizat et al., "Scaling algorithms for unbalanced optimal transport problems", Math.
        Comp. 87 (2018): absorption of large scalings.
    """
    checks.static(precision=precision)
    check_limits(max_iterations=max_iterations, epsilon=epsilon, tolerance=tolerance)
    affinity.check_affinity("K", K)
    k = affinity.as_float(K)
    weights = Weights.of(log_a, log_b, k.shape, k.dtype)
    # Uniform weights have no zeros, so no entry of K needs to be replaced.
    if log_a is not None or log_b is not None:
        k = without_padding(k, weights)
    options = Options(
        jnp.asarray(epsilon, k.dtype),
        jnp.asarray(tolerance, k.dtype),
        None if init_v is None else jnp.asarray(init_v, k.dtype),
        max_iterations,
        precision,
    )
    arrays = constant(_NOT_DIFFERENTIABLE, (k, weights, options))
    return _solve(*sharding.vary_alike(arrays))


@jax.jit
def _solve(k: Array, weights: Weights, options: Options) -> Plan:
    """Solves for the plan, with the rows of K split over the devices of its mesh."""

    def own_rows(axes: sharding.Axes, rows: Any, shared: Any) -> tuple[Any, Any]:
        (k, log_a), (log_b, options) = rows, shared
        plan = solve_matrix(k, Weights(log_a, log_b), options, axes)
        of_columns = plan.column_centre, plan.centred_v
        result = plan.error, plan.iterations, plan.status
        return (plan.row_centre, plan.centred_u), (of_columns, result)

    with sharding.mesh_of(k):
        rows = sharding.split(k), sharding.split(weights.log_a, -jnp.inf)
        of_rows, ((column_centre, v), result) = sharding.shard_map(
            own_rows, rows, (weights.log_b, options)
        )
        # Replicated, because the affinity may be split by columns.
        row_centre, u = (sharding.gather_explicit(sharding.join(x, len(k))) for x in of_rows)
    return Plan(k, row_centre, column_centre, u, v, options.epsilon, *result)


def _potential(x: Array, epsilon: Array) -> Array:
    """Returns epsilon x, rounded to one bit less than its type has.

    The rounding keeps compilers from fusing the product and a later sum into one operation, whose
    result would differ between programs.
    """
    digits = jnp.finfo(x.dtype)
    scaled = epsilon * jnp.where(jnp.isfinite(x), x, 0.0)
    return jax.lax.reduce_precision(scaled, digits.nexp, digits.nmant - 1)


def solve_matrix(k: Array, weights: Weights, options: Options, axes: sharding.Axes) -> Plan:
    """Solves for the plan of K, and measures the error of the potentials that it returns.

    Args:
        k: Affinity, shape [n, m], or this device's rows of it.
        weights: Log-weights of these rows and of all columns.
        options: Options of the solve.
        axes: Axes of the mesh that rows are split over.

    Returns:
        The plan of these rows.
    """
    epsilon, tolerance = options.epsilon, options.tolerance
    top, widest = row_range(k, axes)
    scalings, _ = solve(
        Operator(Matrix(k, top), axes=axes, precision=options.precision),
        *weights,
        epsilon=epsilon,
        tolerance=goal(tolerance, widest, epsilon),
        max_iterations=options.max_iterations,
        widest=widest,
        init_v=options.init_v,
    )
    # The centres are the plan's potentials in the units of K.
    centres = Centres(top - _potential(scalings.u, epsilon), -_potential(scalings.v, epsilon))
    refined = _refine(k, centres, scalings, weights, options, axes)
    found = scalings.measured(refined.error, tolerance)
    result = found.error, refined.iterations, found.status
    return Plan(k, *centres, refined.u, refined.v, epsilon, *result)


def reference(
    K: Float[ArrayLike, "n m"],
    *,
    epsilon: Any,
    iterations: int = 100,
    symmetric: bool = True,
) -> Plan:
    """Runs textbook log-domain Sinkhorn with uniform weights, as in the paper's published loss.

    Repeats u = log a - LSE_j(K/eps + v), v = log b - LSE_i(K/eps + u) from v = 0. JAX can
    differentiate through the iterations, which keep vectors only. This function is for comparison:
    `sinkhorn` is faster, and stops when it has converged.

    Args:
        K: Affinity, shape [n, m].
        epsilon: Entropic regularisation.
        iterations: Number of iterations.
        symmetric: True to end, as the published code does, with u moved half-way to its next
            iterate. See docs/paper.md.

    Returns:
        The `Plan`. It is converged if its error is at most 1e-4, the default tolerance of
        `sinkhorn`.

    Example:
        >>> reference(jnp.eye(2), epsilon=0.5).matrix().tolist()
        [[0.44, 0.06], [0.06, 0.44]]

    References:
        M. Cuturi, "Sinkhorn distances", NeurIPS 2013.
    """
    checks.positive(epsilon=epsilon)
    affinity.check_affinity("K", K)
    K = affinity.as_float(K)
    n, m = K.shape
    scaled = K / epsilon
    log_a, log_b = -jnp.log(jnp.asarray(n, K.dtype)), -jnp.log(jnp.asarray(m, K.dtype))

    def update_u(v: Array) -> Array:
        return log_a - jax.nn.logsumexp(scaled + v[None, :], axis=1)

    def step(uv: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        u = update_u(uv[1])
        return (u, log_b - jax.nn.logsumexp(scaled + u[:, None], axis=0)), None

    # Checkpointing keeps u and v of every iteration, but not the n x m logits.
    start = (jnp.zeros(n, K.dtype), jnp.zeros(m, K.dtype))
    (u, v), _ = jax.lax.scan(jax.checkpoint(step), start, length=iterations)
    if symmetric:
        u = (u + update_u(v)) / 2
    matrix = jnp.exp(scaled + u[:, None] + v[None, :])
    error = jnp.maximum(
        jnp.sum(jnp.abs(matrix.sum(1) - 1 / n)), jnp.sum(jnp.abs(matrix.sum(0) - 1 / m))
    )
    top, zeros = _top(K), jnp.zeros(m, K.dtype)
    scalings = top, zeros, u + top / epsilon, v, jnp.asarray(epsilon, K.dtype)
    missed = jnp.where(jnp.isfinite(error), Status.OUT_OF_ITERATIONS, Status.NOT_FINITE)
    status = jnp.where(error <= 1e-4, Status.CONVERGED, missed).astype(jnp.int32)
    return Plan(K, *scalings, error, jnp.asarray(iterations), status)
