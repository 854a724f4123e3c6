"""The Sinkhorn solver: sweeps over a kernel, Anderson acceleration and epsilon-scaling.

Log-scalings. Users see log P = K/epsilon + u + v. Inside, u and v are relative to the log-weights
and to the log-scalings that the kernel A = exp(K/epsilon + absorbed_u + absorbed_v) has absorbed:

    P = diag(a e^u) A diag(b e^v).

`solve` adds the three parts when it ends. For any v, u = -log(A b e^v) makes the rows of P exact,
so the search is a fixed-point iteration in v alone. A *sweep*, one pass over A, gives u, the error
of the columns and the next v. A *level* is one value of epsilon. A solve at a small epsilon starts
at a larger one and divides it by 4 from level to level.

The solver has three nested loops, `_run`, `_build` and `_search`. `_level` is the body of the
second:

    _run      calls `_build` until the solve is done.
    _build    builds A from K, then calls `_level` for one epsilon after the other.
    _level    searches at one epsilon. `_advance` then lowers it or asks for a new build.
    _search   sweeps until the error of the columns is small. A sweep is one iteration.

A stored A reaches the next level by taking the fourth power of its entries. It is built again only
if the scalings drift too far, if a search fails or starts again, or if the solve returns to an
earlier point that was better than the one it ended at. A streamed kernel is built again at every
level.

With an int8 kernel, `_search_int8` replaces `_search`. Most of its sweeps read the int8 kernel, and
a few exact sweeps correct the sums.

References:
    M. Cuturi, "Sinkhorn distances", NeurIPS 2013.
    J. J. Kosowsky and A. L. Yuille, "The invisible hand algorithm", Neural Networks 7 (1994):
    epsilon-scaling.
    B. Schmitzer, "Stabilized sparse scaling algorithms for entropy regularized transport
    problems", SISC 41 (2019): absorption and epsilon-scaling.
    L. Chizat et al., "Scaling algorithms for unbalanced optimal transport problems", Math. Comp. 87
    (2018): absorption of large scalings.
    H. F. Walker and P. Ni, "Anderson acceleration for fixed-point iterations", SINUM 49 (2011).
    H. J. Stetter, "The defect correction principle and discretization methods", Numer. Math. 29
    (1978): the exact sweeps that correct an approximate kernel.
"""

import dataclasses
import enum
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sotalign_jax import checks
from sotalign_jax.ot import affinity, anderson, sharding
from sotalign_jax.ot.blocks import BUILD_ROWS, Block, over_rows
from sotalign_jax.ot.kernel import LEVEL_POWER, MAX_DRIFT, MAX_EXPONENT, Kernel, Operator

# The constants below were tuned on COCO's teacher and on random problems. benchmarks/convergence.py
# counts the sweeps that they lead to, and tests/fuzz.py looks for problems on which they fail.

# A step whose error exceeds the best one by this factor is rejected. The search then continues from
# the best point with an unaccelerated step.
_MAX_RISE = 3.0
# Relative change of the error that counts as standing still.
_PLATEAU = 1e-3
# In a solve that started at a larger epsilon, a search is given up if _STALL_SWEEPS sweeps do
# not reduce its error below _STALL_FACTOR times the earlier one. This applies in the first half of
# the budget and while the error is above 10 times the goal. The solve then continues with the next
# level. At the last level it starts again from `start_v`, without epsilon-scaling.
_STALL_FACTOR, _STALL_SWEEPS = 0.9, 50
# Largest number of levels before the last one. After three fourth powers, the relative rounding
# error of A is still below 1e-5.
_MAX_LEVELS = 3
# An epsilon below this fraction of the affinity's range is approached from above.
_SCALING_START = 0.03
# Marginal error at which a level before the last one ends. An int8 kernel is first corrected at
# this error, because its own error is of that size.
_SCALING_TOLERANCE = 0.01
# A search over a corrected int8 kernel aims at _ROUND_GAIN times its initial error, because the
# correction is not accurate enough for more, but at no less than _ROUND_AIM times the goal. It is
# given up after _ROUND_STALL_SWEEPS sweeps without progress.
_ROUND_GAIN, _ROUND_AIM, _ROUND_STALL_SWEEPS = 0.03, 0.7, 8
# A solve with an int8 kernel may use 1/_INT8_SHARE of the budget. If it has not converged by then,
# it starts again without the int8 kernel. Budgets below _INT8_MIN_BUDGET use no int8 kernel.
_INT8_SHARE, _INT8_MIN_BUDGET = 4, 80
MAX_ITERATIONS = 500
"""Default number of sweeps at which a solve stops: the budget that tests/fuzz.py gives to its
problems."""
# Fraction of the tolerance to aim at, so that rounding does not end a solve just above it.
_MARGIN = 0.99


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Options:
    """Options of one solve.

    Attributes:
        epsilon: Regularisation.
        tolerance: Marginal error at which to stop.
        init_v: Column log-scalings to start from, or None.
        max_iterations: Number of sweeps at which to stop.
        precision: Precision of the sums over the kernel.
    """

    epsilon: Float[Array, ""]
    tolerance: Float[Array, ""]
    init_v: Float[Array, " m"] | None = None
    max_iterations: int = dataclasses.field(default=MAX_ITERATIONS, metadata={"static": True})
    precision: jax.lax.PrecisionLike = dataclasses.field(
        default=affinity.HIGHEST, metadata={"static": True}
    )


# Maps v to the row sums s = A b e^v and the column sums t = (a/s)^T A of a kernel.
_Sweep = Callable[[Array], tuple[Array, Array]]


def row_range(k: Array, axes: sharding.Axes = ()) -> tuple[Array, Array]:
    """Returns max_j K_ij of each row, and the largest max_j K_ij - min_j K_ij on all devices.

    Entries that are not finite are ignored. K is read once, in blocks of rows, without a copy.

    Args:
        k: Affinity, shape [n, m].
        axes: Axes of the mesh that rows are split over.

    Returns:
        The largest entries, shape [n], and the range.

    Example:
        >>> top, widest = row_range(jnp.array([[1.0, 3.0], [0.0, -jnp.inf]]))
        >>> top.tolist(), float(widest)
        ([3.0, 0.0], 2.0)
    """
    # The initial values make the range of a row without finite entries negative, so the maximum
    # ignores it.
    lowest_number = jnp.finfo(k.dtype).min

    def body(block: Block, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        rows = block.of(k)
        finite = jnp.isfinite(rows)
        highest = jnp.max(rows, axis=1, where=finite, initial=lowest_number)
        lowest = jnp.min(rows, axis=1, where=finite, initial=-lowest_number)
        return block.put(carry[0], highest), jnp.maximum(carry[1], jnp.max(highest - lowest))

    nothing = sharding.vary_like((jnp.zeros_like(k[:, 0]), jnp.zeros((), k.dtype)), k)
    top, widest = over_rows(len(k), BUILD_ROWS, body, nothing)
    return top, sharding.pmax(widest, axes)


def rounding(exponent: Any, dtype: Any) -> Array:
    """Estimates the marginal error that comes from rounding the exponents K/epsilon.

    Args:
        exponent: Size of the exponents.
        dtype: Type in which they are rounded.

    Returns:
        The estimate, for plans of total mass 1.
    """
    return 0.5 * jnp.finfo(dtype).eps * exponent


def goal(tolerance: Array, widest: Any, epsilon: Array) -> Array:
    """Returns the tolerance minus the expected rounding error, the marginal error to aim at.

    Args:
        tolerance: Marginal error that was asked for.
        widest: Largest range of K within a row.
        epsilon: Regularisation.

    Returns:
        The error, at least half of the tolerance. Exponents are as large as widest / epsilon.

    Example:
        >>> print(goal(jnp.float32(1e-4), 1.0, jnp.float32(0.05)))
        9.781e-05
    """
    below = _MARGIN * tolerance - rounding(widest / epsilon, epsilon.dtype)
    return jnp.maximum(below, 0.5 * tolerance)


class Status(enum.IntEnum):
    """How a solve ended. Under `jit` a status is an int32 array that compares with these values.

    Attributes:
        CONVERGED: The marginal error is at most the tolerance.
        OUT_OF_ITERATIONS: `max_iterations` did not suffice. Allow more, or raise epsilon.
        ROUNDING: The solver reached the tolerance, but the rounding of K/epsilon leaves the plan
            above it. Compute in float64, or raise epsilon.
        UNDERFLOW: A column has no mass, because its entries of exp(K/epsilon) underflow. Raise
            epsilon.
        NOT_FINITE: There is no plan, because epsilon is not a positive number, or because a row or
            column of K has a NaN or nothing but -inf. The error is infinite and a loss is NaN.

    Example:
        >>> Status(Status.CONVERGED).name
        'CONVERGED'
    """

    CONVERGED = 0
    OUT_OF_ITERATIONS = 1
    ROUNDING = 2
    UNDERFLOW = 3
    NOT_FINITE = 4


class Scalings(NamedTuple):
    """Result of a solve.

    Attributes:
        u: Row log-scalings.
        v: Column log-scalings.
        error: The larger of ||P 1 - a||_1 and ||P^T 1 - b||_1, for marginals of mass 1.
        iterations: Number of sweeps.
        status: The `Status`.
    """

    u: Float[Array, " n"]
    v: Float[Array, " m"]
    error: Float[Array, ""]
    iterations: Int[Array, ""]
    status: Int[Array, ""]

    @property
    def converged(self) -> Bool[Array, ""]:
        """True if the error is at most the tolerance."""
        return self.status == Status.CONVERGED

    def measured(self, error: Array, tolerance: Any) -> "Scalings":
        """Replaces the solver's error, which ignores rounding, by that of the plan itself.

        Args:
            error: Error of the plan.
            tolerance: Marginal error that was asked for.

        Returns:
            The scalings with new values of `error` and `status`.
        """
        finite = jnp.isfinite(error) & (self.status != Status.NOT_FINITE)
        missed = jnp.where(self.converged, Status.ROUNDING, self.status)
        status = jnp.where(error <= tolerance, Status.CONVERGED, missed)
        return self._replace(
            error=jnp.where(finite, error, jnp.inf),
            status=jnp.where(finite, status, Status.NOT_FINITE).astype(jnp.int32),
        )


class _Problem(NamedTuple):
    """Constants of a solve."""

    operator: Operator
    log_a: Array
    log_b: Array
    tolerance: Array
    max_iterations: int | Array
    start_v: Array  # column log-scalings to absorb first: zeros, or from init_v

    @property
    def b(self) -> Array:
        """Weights of the columns."""
        return jnp.exp(self.log_b)

    @property
    def live(self) -> Array:
        """Columns with a weight above zero."""
        return ~jnp.isneginf(self.log_b)

    @property
    def live_rows(self) -> Array:
        """Rows with a weight above zero."""
        return ~jnp.isneginf(self.log_a)


class _Point(NamedTuple):
    """A point v of the search with the results of a sweep at it."""

    v: Array
    u: Array
    next_v: Array  # the v of plain Sinkhorn's next iteration
    error: Array


class _Search(NamedTuple):
    """State of `_search`."""

    v: Array  # the next point to sweep at
    best: _Point
    mark_error: Array  # best error when it last fell by the factor _STALL_FACTOR
    mark_iteration: Array  # number of the sweep at which it did
    drift: Array  # largest log-scaling; infinite if no sweep over this kernel is finite
    iterations: Array
    history: anderson.History


class _Progress(NamedTuple):
    """State of the solve between two searches."""

    kernel: Kernel
    # Result of the last search.
    error: Array
    iterations: Array
    # Epsilon-scaling (Schmitzer 2019).
    levels: Array  # number of levels still to come
    plain: Array  # True if the solve started, or restarted, at the last level
    # Absorption of large log-scalings (Chizat et al. 2018).
    fresh: Array  # True if the kernel was not raised to a power since it was built
    lost: Array  # True if a column of the fresh kernel underflowed
    rebuild: Array  # True if the kernel must be built again
    # The best point of the last level, to which a solve that misses its goal returns.
    best_v: Array  # column log-scalings to absorb
    best_error: Array
    # The end.
    final: Array  # True if the next search is the single sweep that ends the solve
    usable: Array  # False if K or epsilon is not finite
    done: Array


def _choose(condition: Array, yes: Any, no: Any) -> Any:
    """Selects one of two pytrees."""
    return jax.tree.map(lambda one, other: jnp.where(condition, one, other), yes, no)


# --- sweeps ------------------------------------------------------------------------------------


def _evaluate(problem: _Problem, v: Array, s: Array, t: Array) -> tuple[_Point, Array]:
    """Evaluates a point v from the sums of a sweep at it.

    Returns:
        The point, and the largest log-scaling of its rows.
    """
    live, b = problem.live, problem.b
    # This u makes the rows of the plan exact. Its column sums are then b e^v t.
    u = -jnp.log(s)
    # Drift and column sums share the only all-reduce of a sweep.
    row_drift = jnp.max(jnp.where(problem.live_rows, jnp.abs(u), 0.0))
    t, row_drift = sharding.psum_and_pmax(t, row_drift, problem.operator.axes)
    # A column whose sum underflowed cannot be scaled. It makes the error infinite, however small
    # its weight is.
    column_errors = jnp.where(t > 0, b * jnp.abs(jnp.exp(v) * t - 1.0), jnp.inf)
    error = jnp.sum(jnp.where(live, column_errors, 0.0))
    return _Point(v, u, jnp.where(live, -jnp.log(t), v), error), row_drift


def _step(problem: _Problem, sweep: _Sweep, search: _Search) -> _Search:
    """Sweeps at the next point and chooses the one after it."""
    v, best = search.v, search.best
    point, row_drift = _evaluate(problem, v, *sweep(v))
    error, finite = point.error, jnp.isfinite(point.error)
    on_plateau = jnp.abs(error - best.error) <= _PLATEAU * error
    accepted = finite & (error <= _MAX_RISE * best.error)
    # While mass moves between distant clusters, the error stands still and the scalings drift. A
    # later point of such a plateau replaces an earlier one.
    best = _choose(finite & (error <= (1 + _PLATEAU) * best.error), point, best)

    f = point.next_v - v
    correction, history = anderson.update(search.history, v, f, problem.operator.precision)
    # On a plateau f hardly changes, so the sign of the correction is noise. A correction against f
    # would make the search go back and forth.
    backward = on_plateau & (jnp.sum(problem.b * f * correction) < 0)
    accelerated = point.next_v + jnp.where(backward, -correction, correction)
    drift = jnp.maximum(row_drift, jnp.max(jnp.where(problem.live, jnp.abs(accelerated), 0.0)))
    # If not even an unaccelerated step is finite, the kernel must be built again.
    hopeless = ~finite & (search.history.steps == 0)
    improved = best.error < _STALL_FACTOR * search.mark_error
    return _Search(
        v=jnp.where(accepted, accelerated, best.next_v),
        best=best,
        mark_error=jnp.where(improved, best.error, search.mark_error),
        mark_iteration=jnp.where(improved, search.iterations, search.mark_iteration),
        drift=jnp.where(accepted, drift, jnp.where(hopeless, jnp.inf, 0.0)),
        iterations=search.iterations + 1,
        history=_choose(accepted, history, anderson.reset(history)),
    )


def _stalled(problem: _Problem, search: _Search, goal: Array) -> Array:
    """Returns True if the search should be given up, see `_STALL_SWEEPS`."""
    in_first_half = search.iterations <= problem.max_iterations // 2
    far = search.best.error > 10 * goal
    return in_first_half & far & (search.iterations - search.mark_iteration >= _STALL_SWEEPS)


def _unmeasured(problem: _Problem, v: Array) -> _Point:
    """Returns a point with an unknown, infinite error, to start a search at v."""
    return _Point(v, jnp.zeros_like(problem.log_a), v, jnp.asarray(jnp.inf, v.dtype))


class _Limits(NamedTuple):
    """Where a search ends."""

    goal: Array  # error to reach
    budget: Array  # number of sweeps of the solve at which the search ends
    ignore_stall: Array  # True to continue after _STALL_SWEEPS without progress
    # True to sweep at least once if the error of the start is unknown, whatever the budget.
    forced: Array | bool = True
    # True to end after _ROUND_STALL_SWEEPS without progress.
    stop_early: Array | bool = False


def _search(
    problem: _Problem, sweep: _Sweep, start: _Point, iterations: Array, limits: _Limits
) -> _Search:
    """Sweeps until the error is at most the goal, or a limit is reached.

    The search also ends when the scalings drift so far that the kernel must be built again. Its
    best point is the result.
    """

    def unfinished(search: _Search) -> Array:
        waited = search.iterations - search.mark_iteration
        # `~(error <= goal)` and not `error > goal`: a NaN must not look converged.
        within = (search.iterations < limits.budget) & (search.drift <= MAX_DRIFT)
        within &= limits.ignore_stall | ~_stalled(problem, search, limits.goal)
        within &= ~(limits.stop_early & (waited >= _ROUND_STALL_SWEEPS))
        first = limits.forced & jnp.isinf(start.error) & (search.iterations == iterations)
        return first | (within & ~(search.best.error <= limits.goal))

    state = _Search(
        v=start.next_v,
        best=start,
        mark_error=jnp.full_like(start.error, jnp.inf),
        mark_iteration=iterations,
        drift=jnp.zeros_like(start.error),
        iterations=iterations,
        # Empty, because the history of another level would mislead the acceleration.
        history=anderson.init(start.v),
    )
    with jax.named_scope("sweeps"):
        step = functools.partial(_step, problem, sweep)
        state = sharding.vary_like(state, problem.log_a)
        return jax.lax.while_loop(unfinished, step, state)


class _Rounds(NamedTuple):
    """State of `_search_int8` between two rounds."""

    found: _Search  # the last search over the int8 kernel
    exact: _Point  # the last point that halved the error of the exact kernel
    improves: Array  # True if the last round halved the exact error


def _corrected(problem: _Problem, exact: _Sweep, int8: _Sweep, v: Array) -> tuple[_Point, _Sweep]:
    """Measures a point exactly, and scales the sums of the int8 kernel to be exact there.

    The scaled sums are nearly exact around the point.
    """
    sums = exact(v)
    ratios = jax.tree.map(jnp.divide, sums, int8(v))
    ratios = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 1.0), ratios)
    point, _ = _evaluate(problem, v, *sums)
    return point, lambda v: jax.tree.map(jnp.multiply, int8(v), ratios)


def _search_int8(problem: _Problem, progress: _Progress, limits: _Limits) -> _Search:
    """Searches with few exact sweeps, by defect correction of the int8 kernel.

    At levels before the last one, the int8 kernel is accurate enough as it is. At the last level,
    rounds follow: each corrects the int8 kernel at the last point, and searches until the error has
    fallen to _ROUND_GAIN times that of the point. They end when a round does not halve the error. A
    search over the exact kernel then starts at the best measured point, and sweeps only if that
    point misses the goal.

    References:
        H. J. Stetter, "The defect correction principle and discretization methods", Numer. Math. 29
        (1978).
    """
    last, goal, budget = progress.levels == 0, limits.goal, limits.budget
    exact = _make_sweep(problem, progress.kernel)
    int8 = _make_sweep(problem, progress.kernel, int8=True)
    # The two sweeps of a round and one of the last search must fit in the budget.
    rough = limits._replace(
        budget=jnp.where(last, budget - 3, budget), forced=~last, stop_early=last
    )

    def round_(rounds: _Rounds) -> _Rounds:
        point, sweep = _corrected(problem, exact, int8, rounds.found.best.v)
        improves = jnp.isfinite(point.error) & ~(point.error > 0.5 * rounds.exact.error)
        aim = jnp.maximum(_ROUND_AIM * goal, _ROUND_GAIN * point.error)
        # When the rounds end, an infinite aim makes the search below return at once.
        aim = jnp.where(improves & (point.error > goal), aim, jnp.inf)
        iterations = rounds.found.iterations + 2
        found = _search(problem, sweep, point, iterations, rough._replace(goal=aim))
        rounds = _Rounds(found, _choose(improves, point, rounds.exact), improves)
        return sharding.vary_like(rounds, problem.log_a)

    def unfinished(rounds: _Rounds) -> Array:
        within = rounds.found.iterations + 3 <= budget
        return rounds.improves & within & ~(rounds.exact.error <= goal)

    zero = _unmeasured(problem, jnp.zeros_like(problem.log_b))
    aim = jnp.maximum(_ROUND_AIM * goal, _SCALING_TOLERANCE)
    found = _search(problem, int8, zero, progress.iterations, rough._replace(goal=aim))
    rounds = sharding.vary_like(_Rounds(found, zero, last), problem.log_a)
    rounds = jax.lax.while_loop(unfinished, round_, rounds)
    # At levels before the last one, this search returns at once.
    confirm = limits._replace(goal=jnp.where(last, goal, jnp.inf), forced=last)
    confirmed = _search(problem, exact, rounds.exact, rounds.found.iterations, confirm)
    return _choose(last, confirmed, found)


def _make_sweep(problem: _Problem, kernel: Kernel, *, int8: bool = False) -> _Sweep:
    """Returns the sweep over a kernel as a function of v."""
    sweep = problem.operator.sweep_int8 if int8 else problem.operator.sweep
    a = jnp.exp(problem.log_a)
    return lambda v: sweep(kernel, a, problem.b * jnp.exp(v))


# --- levels of epsilon -------------------------------------------------------------------------


def _budget(problem: _Problem, progress: _Progress) -> Array:
    """Returns the number of sweeps at which the next search ends."""
    most = problem.max_iterations
    # If there is an earlier point to return to, one sweep is kept for it.
    kept = jnp.isfinite(progress.best_error).astype(jnp.int32)
    # Half of the budget is reserved for the last level, whose epsilon was asked for.
    budget = jnp.where(progress.levels == 0, most - kept, most // 2)
    return jnp.where(progress.final, 0, budget)


def _remember(progress: _Progress, best: _Point) -> _Progress:
    """Keeps the best point of the last level. A search that starts again may end at a worse one."""
    better = (progress.levels == 0) & (best.error < progress.best_error)
    return progress._replace(
        best_v=jnp.where(better, progress.kernel.absorbed_v + best.v, progress.best_v),
        best_error=jnp.where(better, best.error, progress.best_error),
    )


def _level(problem: _Problem, progress: _Progress) -> _Progress:
    """Searches at the current epsilon, then moves to the next one or asks for a rebuild."""
    loose = jnp.maximum(problem.tolerance, _SCALING_TOLERANCE)
    goal = jnp.where(progress.levels == 0, problem.tolerance, loose)
    limits = _Limits(goal, _budget(problem, progress), ignore_stall=progress.plain)
    if problem.operator.int8:
        found = _search_int8(problem, progress, limits)
    else:
        zero = _unmeasured(problem, jnp.zeros_like(problem.log_b))
        sweep = _make_sweep(problem, progress.kernel)
        found = _search(problem, sweep, zero, progress.iterations, limits)
    return _advance(problem, progress, found, limits)


def _advance(problem: _Problem, progress: _Progress, found: _Search, limits: _Limits) -> _Progress:
    """Decides what follows a search: the next level, a rebuild, or the end."""
    last, most = progress.levels == 0, problem.max_iterations
    goal, budget = limits.goal, limits.budget
    best, stalled = found.best, _stalled(problem, found, goal)
    failed, spent = ~jnp.isfinite(best.error), found.iterations >= budget
    # A search that stalls at the last level starts again without epsilon-scaling. At another level
    # it continues with the next one.
    restart = last & ~progress.plain & ~spent & stalled
    finished = ~failed & ((best.error <= goal) | spent | (stalled & ~last))
    # A solve that misses its goal returns to its best point, and so does one that has a single
    # sweep left.
    progress = _remember(progress, best)
    worse = finished & ~(best.error <= goal) & (progress.best_error < best.error)
    cut = ~finished & (found.iterations == most - 1)
    back = last & ~progress.final & (worse | cut) & jnp.isfinite(progress.best_error)
    descend, end = finished & ~last, finished & last & ~back

    def lower(_: Any, kernel: Kernel) -> Kernel:
        return problem.operator.raise_power(kernel, best.u, best.v)

    # A `fori_loop` of zero or one iterations updates the kernel in place. A `cond` would copy it.
    kernel = jax.lax.fori_loop(0, descend.astype(jnp.int32), lower, progress.kernel)
    # After an unfinished search, the kernel is built again with potentials that have absorbed the
    # scalings of the best point.
    absorbed = jnp.where(restart, problem.start_v, kernel.absorbed_v + best.next_v)
    kernel = kernel._replace(
        absorbed_v=jnp.where(
            back, progress.best_v, jnp.where(finished, kernel.absorbed_v, absorbed)
        ),
        u=jnp.where(end, best.u, kernel.u),
        v=jnp.where(end, best.v, kernel.v),
    )
    progress = progress._replace(
        kernel=kernel,
        error=best.error,
        iterations=found.iterations,
        levels=progress.levels - descend.astype(jnp.int32),
        fresh=jnp.zeros_like(progress.fresh),
        lost=failed & progress.fresh & ~back,
        rebuild=~finished | back if problem.operator.stored else ~end,
        final=back,
        plain=progress.plain | restart,
        done=end | (failed & (found.iterations >= most)),
    )
    return sharding.vary_like(progress, problem.log_a)


def _build(problem: _Problem, progress: _Progress) -> _Progress:
    """Builds the kernel, then solves level after level until it must be built again.

    The build is a row update in the log domain. If a column underflowed in the last kernel, a
    column update in the log domain precedes it.
    """
    operator, true = problem.operator, jnp.ones_like(progress.done)
    # A column update in the log domain costs as much as a build.
    absorbed_v = jax.lax.cond(
        progress.lost,
        lambda: operator.update_columns(progress.kernel, problem.log_a),
        lambda: progress.kernel.absorbed_v,
    )
    built = operator.build(progress.kernel._replace(absorbed_v=absorbed_v), problem.log_b)
    usable = progress.usable & jnp.all(jnp.where(problem.live, jnp.isfinite(absorbed_v), True))
    own_rows = jnp.all(jnp.where(problem.live_rows, jnp.isfinite(built.absorbed_u), True))
    # All devices must agree. If their loops ended at different iterations, the next all-reduce
    # would wait forever.
    usable &= sharding.pmax((~own_rows).astype(jnp.int32), operator.axes) == 0
    progress = progress._replace(
        kernel=built, fresh=true, rebuild=~true, usable=usable, done=~usable
    )
    with jax.named_scope("levels"):
        return jax.lax.while_loop(
            lambda progress: ~(progress.done | progress.rebuild),
            functools.partial(_level, problem),
            sharding.vary_like(progress, problem.log_a),
        )


def _run(problem: _Problem, progress: _Progress) -> _Progress:
    """Builds and searches, as often as it takes, until the solve is done."""
    with jax.named_scope("builds"):
        return jax.lax.while_loop(
            lambda progress: ~progress.done,
            functools.partial(_build, problem),
            sharding.vary_like(progress, problem.log_a),
        )


def _run_int8(problem: _Problem, start: _Progress) -> _Progress:
    """Solves with an int8 kernel, and again without it if that did not converge.

    An int8 kernel has no zeros, so it may hide a column that underflows in the exact kernel.
    """
    most = problem.max_iterations
    trial = _run(problem._replace(max_iterations=most // _INT8_SHARE), start)
    failed = trial.usable & ~(trial.error <= problem.tolerance)
    # The second solve builds its kernel in the memory of the first.
    memory = start.kernel._replace(matrix=trial.kernel.matrix, int8=trial.kernel.int8)
    again = start._replace(kernel=memory, best_v=trial.best_v, best_error=trial.best_error)
    exact = problem._replace(
        operator=problem.operator._replace(int8=False), max_iterations=most - trial.iterations
    )
    result = _run(exact, _choose(failed, again, trial))
    spent = jnp.where(failed, trial.iterations, 0)
    return result._replace(iterations=result.iterations + spent)


def _number_of_levels(widest: Array, epsilon: Array, max_iterations: int) -> Array:
    """Returns the number of levels before the last one, whose epsilon was asked for."""
    # Too few sweeps for more than one epsilon.
    if max_iterations < 20:
        return jnp.int32(0)
    ratio = jnp.maximum(_SCALING_START * widest / epsilon, 1.0)
    needed = jnp.ceil(jnp.log(ratio) / math.log(LEVEL_POWER))
    # A level needs several sweeps, so there is at most one level for every 8 of the budget.
    return jnp.minimum(needed, min(max_iterations // 8, _MAX_LEVELS)).astype(jnp.int32)


def _relative(init_v: Array, log_b: Array, limit: Array) -> Array:
    """Returns init_v - log b, shifted to a maximum of 0 and clipped at -limit."""
    if jnp.shape(init_v) != log_b.shape:
        raise checks.InputError(
            f"init_v must have shape ({log_b.size},), one entry per column of the affinity, "
            f"got {jnp.shape(init_v)}"
        )
    # Columns without a usable guess start at 0, as in textbook Sinkhorn. A constant added to v
    # changes no plan, so the largest entry is set to 0.
    live = ~jnp.isneginf(log_b)
    usable = live & jnp.isfinite(init_v)
    guess = jnp.where(usable, init_v, 0.0) - jnp.where(usable, log_b, 0.0)
    return jnp.maximum(guess - jnp.max(guess, where=live, initial=-jnp.inf), -limit)


def _init(
    operator: Operator,
    log_a: Array,
    log_b: Array,
    *,
    epsilon: Array,
    tolerance: Any,
    max_iterations: int,
    widest: Array,
    init_v: Array | None,
) -> tuple[_Problem, _Progress]:
    """Chooses the first epsilon, and returns the constants and the initial state of a solve."""
    dtype, live = log_a.dtype, ~jnp.isneginf(log_b)
    possible = (epsilon > 0) & jnp.isfinite(epsilon)
    target = jnp.where(possible, epsilon, 1.0)
    if init_v is None:
        start_v = jnp.zeros_like(log_b)
        levels = _number_of_levels(widest, target, max_iterations)
    else:
        # v - log b of a plan spans at most the range of K over epsilon, and a guess beyond it loses
        # digits. The factor 2 allows for cosines, which span up to 2 although `widest` is 1.
        start_v = _relative(init_v, log_b, 2 * widest / target)
        levels = jnp.int32(0)
    start_v = jnp.where(live, start_v, -jnp.inf).astype(dtype)
    first = target * jnp.asarray(LEVEL_POWER, dtype) ** levels.astype(dtype)
    start = operator.blank(start_v, first)
    # Heavier than given, columns of a tiny weight cannot lose mass to the cap of the kernel. They
    # are scaled by the given weights in the end, which changes the marginals by less than rounding
    # does.
    heavy = jnp.where(live, jnp.maximum(log_b, -MAX_EXPONENT), log_b)
    aim = jnp.asarray(tolerance, dtype)
    problem = _Problem(operator, log_a, heavy, aim, max_iterations, start.absorbed_v)
    false, infinity = jnp.asarray(False), jnp.asarray(jnp.inf, dtype)
    progress = _Progress(
        kernel=start,
        error=infinity,
        iterations=jnp.int32(0),
        levels=levels,
        fresh=false,
        lost=false,
        rebuild=~false,
        best_v=start.absorbed_v,
        best_error=infinity,
        final=false,
        usable=possible,
        plain=levels == 0,
        done=false,
    )
    return problem, progress


def _status(result: _Progress, tolerance: Any) -> Array:
    """Returns the `Status` of a solve that has ended."""
    # No point of the last search has a finite error if a column of its kernel underflows.
    finite = jnp.isfinite(result.error)
    missed = jnp.where(finite, Status.OUT_OF_ITERATIONS, Status.UNDERFLOW)
    status = jnp.where(result.error <= tolerance, Status.CONVERGED, missed)
    return jnp.where(result.usable, status, Status.NOT_FINITE).astype(jnp.int32)


def solve(
    operator: Operator,
    log_a: Float[Array, " n"],
    log_b: Float[Array, " m"],
    *,
    epsilon: Any,
    tolerance: Any,
    max_iterations: int,
    widest: Any = 1.0,
    init_v: Float[Array, " m"] | None = None,
) -> tuple[Scalings, Kernel]:
    """Solves for the plan of an affinity by stabilised, accelerated Sinkhorn.

    The solver calls the methods of the operator and never reads the entries of A itself. If rows
    are split over devices, every sweep has one all-reduce of about m numbers. All loops are bounded
    by `max_iterations`.

    Args:
        operator: The affinity K, with the choice to store or to stream A.
        log_a: Log-weights of the rows, -inf for padding.
        log_b: Log-weights of the columns, -inf for padding.
        epsilon: Regularisation.
        tolerance: Error of the columns at which to stop.
        max_iterations: Number of sweeps at which to stop.
        widest: Largest range of K within a row, or an estimate. It determines the first epsilon.
        init_v: Column log-scalings to start from, instead of epsilon-scaling.

    Returns:
        The scalings, and the kernel with the final u and v.

    Raises:
        InputError: `init_v` does not have one entry per column.
    """
    operator = operator._replace(int8=operator.int8 and max_iterations >= _INT8_MIN_BUDGET)
    dtype = log_a.dtype
    problem, start = _init(
        operator,
        log_a,
        log_b,
        epsilon=jnp.asarray(epsilon, dtype),
        tolerance=tolerance,
        max_iterations=max_iterations,
        widest=jnp.asarray(widest, dtype),
        init_v=init_v,
    )
    result = (_run_int8 if operator.int8 else _run)(problem, start)
    kernel, error = result.kernel, jnp.where(result.usable, result.error, jnp.inf)
    # Here, and only here, log-scalings become those of K.
    u = log_a + kernel.absorbed_u + kernel.u
    v = log_b + jnp.where(problem.live, kernel.absorbed_v + kernel.v, 0.0)
    scalings = Scalings(u, v, error, result.iterations, _status(result, tolerance))
    # Frees the int8 kernel.
    return scalings, kernel._replace(int8=sharding.vary_like(jnp.zeros(0, jnp.int8), log_a))
