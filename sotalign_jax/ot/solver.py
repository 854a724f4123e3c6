"""The Sinkhorn solver: kernel-domain sweeps, Anderson acceleration, epsilon-scaling.

Works on any `kernel.Kernel`; `sinkhorn.sinkhorn` is the front door, `klot` the other user.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sotalign_jax import checks
from sotalign_jax.ot import affinity, sharding
from sotalign_jax.ot.blocks import BUILD_ROWS, Block, over_rows
from sotalign_jax.ot.kernel import MAX_DRIFT, Kernel, KernelState

ANDERSON_MEMORY = 12
"""How many past steps the acceleration combines."""
PLAIN_STEPS = 4
"""Plain iterations before the acceleration starts, and after each time it was rejected."""
MAX_ACCELERATED_STEP = 3.0
"""Largest change of a log-scaling by which an accelerated step may leave the plain one."""
MAX_RISE = 3.0
"""An accelerated step whose error exceeds the best one by this factor is taken back."""
PLATEAU = 1e-3
"""Relative rise of the error up to which a later point still replaces an earlier one."""
STALL, STALLED = 0.9, 50
"""A search from a larger epsilon whose error does not fall by this factor in so many sweeps, in the
first half of the budget and far from its goal, is given up: for the next level, or at the last one
for textbook Sinkhorn's start."""
SCALING_FACTOR = 4
"""Ratio of consecutive epsilons when a small epsilon is approached from above."""
MAX_LEVELS = 3
"""How often, at most: raising A to the 4th power three times keeps its rounding below 1e-5."""
SCALING_START = 0.03
"""An epsilon below this fraction of the affinity's range is approached from above."""
SCALING_TOLERANCE = 0.01
"""Marginal error at which an intermediate epsilon is left."""
NARROW_GAIN, NARROW_STALLED = 0.03, 8
"""When the error over a narrow copy of the kernel has fallen by this factor, or has not fallen in
so many sweeps, one over the kernel itself tells by how much the sums of the copy are off."""


def row_range(k: Array, axes: sharding.Axes = ()) -> tuple[Array, Array]:
    """max_j K_ij of each row, and max_i (max_j K_ij - min_j K_ij) on all devices; finite ones."""
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
    """About what the rounding of exponents K/epsilon of this size adds to a marginal error."""
    return 0.5 * jnp.finfo(dtype).eps * exponent


def goal(tolerance: Array, widest: Any, epsilon: Array) -> Array:
    """What to aim at, so that a plan has `tolerance` even after rounding."""
    return jnp.maximum(tolerance - rounding(widest / epsilon, epsilon.dtype), 0.5 * tolerance)


class Scalings(NamedTuple):
    """What a solve returns: log-scalings, marginal error, iterations, and whether it converged."""

    u: Float[Array, " n"]
    v: Float[Array, " m"]
    error: Float[Array, ""]
    iterations: Int[Array, ""]
    converged: Bool[Array, ""]

    def measured(self, error: Array, tolerance: Any) -> "Scalings":
        """With the error of the plan itself; infinite where the solve failed."""
        solved = jnp.isfinite(error) & jnp.isfinite(self.error)
        error = jnp.where(solved, error, jnp.inf)
        return self._replace(error=error, converged=error <= tolerance)


class _Point(NamedTuple):
    """A fixed-point iterate x = log c with what one sweep over the kernel says about it."""

    x: Array
    log_r: Array
    following: Array  # the plain Sinkhorn step from x
    error: Array


class _Search(NamedTuple):
    """The next point to try, the best one so far, and the memory of the acceleration."""

    x: Array
    best: _Point
    mark: Array  # an error, and after how many iterations it was seen
    marked: Array
    drift: Array
    exact: Array  # the next sweep is over the kernel itself, not over its narrow copy
    sure: Array  # so was the last one; or an intermediate epsilon needs no more than the copy
    exact_error: Array  # of the last sweep over the kernel itself
    ratios: tuple[Array, Array]  # of that one's sums to those of the copy
    iterations: Array
    since_reset: Array
    last_x: Array
    last_f: Array
    dx: Array
    df: Array


class _Progress(NamedTuple):
    """State of the solve between two searches."""

    kernel: KernelState
    error: Array
    iterations: Array
    levels: Array  # of epsilon still to come
    fresh: Array  # the kernel was built, and not raised to a power since
    lost: Array  # a column of the fresh kernel underflowed
    drifted: Array
    usable: Array  # rows and columns can be scaled: K and epsilon are sound
    plain: Array  # the start is that of textbook Sinkhorn, or one that was given
    done: Array


def _accelerate(
    search: _Search,
    x: Array,
    f: Array,
    b: Array,
    *,
    still: Array,
    turned: Array,
    precision: jax.lax.PrecisionLike,
) -> tuple[Array, Array, Array]:
    """One step of Anderson acceleration for the fixed point of x -> x + f(x).

    While mass moves between far clusters the error stands `still` and f hardly changes: what past
    steps say of it is noise of either sign, and a correction against f is turned round.
    """
    slot = search.since_reset % ANDERSON_MEMORY
    # A step that `turned` from the narrow copy to the kernel itself tells nothing of either.
    fresh = (search.since_reset > 0) & ~turned
    dx = search.dx.at[slot].set(jnp.where(fresh, x - search.last_x, 0.0))
    df = search.df.at[slot].set(jnp.where(fresh, f - search.last_f, 0.0))
    gram = affinity.dot(df, df.T, precision)
    # The ridge bounds the weights when past steps are nearly parallel.
    ridge = 10 * jnp.finfo(x.dtype).eps * jnp.trace(gram) + jnp.finfo(x.dtype).tiny
    identity = jnp.eye(ANDERSON_MEMORY, dtype=x.dtype)
    weights = jnp.linalg.solve(gram + ridge * identity, affinity.dot(df, f, precision))
    correction = -affinity.dot(weights, dx + df, precision)
    backward = still & (jnp.sum(b * f * correction) < 0)
    correction = jnp.where(backward, -correction, correction)
    correction = jnp.clip(correction, -MAX_ACCELERATED_STEP, MAX_ACCELERATED_STEP)
    use = (search.since_reset >= PLAIN_STEPS) & jnp.all(jnp.isfinite(correction))
    return x + f + jnp.where(use, correction, 0.0), dx, df


def solve(
    kernel: Kernel,
    log_a: Float[Array, " n"],
    log_b: Float[Array, " m"],
    *,
    epsilon: Any,
    tolerance: Any,
    max_iterations: int,
    widest: Any = 1.0,
    init_v: Float[Array, " m"] | None = None,
) -> tuple[Scalings, KernelState]:
    """Stabilised, accelerated Sinkhorn on the kernel A = exp(K/eps + p + q), P = diag(a) A diag(b).

    With r = 1/(A b c), P = diag(a r) A diag(b c) has exact rows, and one sweep over A gives the
    column error together with the next c. Only matrix-vector products touch A, and where its rows
    are split over devices each sweep has one all-reduce, of length m. Three nested loops:
    sweeps until the error is small; levels of epsilon (A -> A^4) when epsilon is small; rebuilds
    of A from K when the scalings drift, which is rare. After a step that triples the best error
    the search goes back to the best point and takes plain steps. A rebuild is the row update of
    log-domain Sinkhorn and is followed by a column update, in the log domain where A underflows:
    no problem takes more iterations than it would without a kernel, and every loop is bounded by
    `max_iterations`.

    Returns the scalings, and the kernel with them absorbed. An epsilon or affinity that is not
    finite, and an epsilon <= 0, give an infinite error; nothing else does.
    """
    checks.whole(1, max_iterations=max_iterations)
    dtype = log_a.dtype
    epsilon = jnp.asarray(epsilon, dtype)
    possible = (epsilon > 0) & jnp.isfinite(epsilon)
    target = jnp.where(possible, epsilon, 1.0)
    a, b = jnp.exp(log_a), jnp.exp(log_b)
    live_row, live = ~jnp.isneginf(log_a), ~jnp.isneginf(log_b)
    infinity, false = jnp.asarray(jnp.inf, dtype), jnp.asarray(False)

    def stalled(search: _Search, goal: Array) -> Array:
        worth = (search.iterations <= max_iterations // 2) & (search.best.error > 10 * goal)
        return worth & (search.iterations - search.marked >= STALLED)

    def search(state: _Progress, goal: Array, budget: Array) -> _Search:
        def unfinished(search: _Search) -> Array:
            within = (search.iterations < budget) & (search.drift <= MAX_DRIFT)
            within &= state.plain | ~stalled(search, goal)
            first = search.iterations == state.iterations
            return first | (within & ~(search.sure & (search.best.error <= goal)))

        def sweep(search: _Search, c: Array) -> tuple[Any, Any]:
            """Sums of the kernel, or of its narrow copy times `ratios`; and what these are now."""
            exact = functools.partial(kernel.sweep, state.kernel, a, c)
            if not kernel.narrow:
                return exact(), search.ratios
            rough = exact(narrow=True)

            def compare() -> tuple[Any, Any]:
                sums = exact()
                ratios = jax.tree.map(jnp.divide, sums, rough)
                return sums, jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 1.0), ratios)

            def correct() -> tuple[Any, Any]:
                return jax.tree.map(jnp.multiply, rough, search.ratios), search.ratios

            with jax.named_scope("narrow_or_exact"):
                return jax.lax.cond(search.exact, compare, correct)

        def step(search: _Search) -> _Search:
            x = search.x
            c = jnp.exp(x)
            (s, t), ratios = sweep(search, b * c)
            turned = search.exact & ~search.sure
            log_r = -jnp.log(s)
            row_drift = jnp.max(jnp.where(live_row, jnp.abs(log_r), 0.0))
            t, row_drift = sharding.psum_and_pmax(t, row_drift, kernel.axes)
            f = jnp.where(live, -jnp.log(t) - x, 0.0)
            # A column that underflowed cannot be scaled, however little it adds to the error.
            missing = jnp.where(t > 0, b * jnp.abs(c * t - 1.0), jnp.inf)
            error = jnp.sum(jnp.where(live, missing, 0.0))
            finite = jnp.isfinite(error)
            point = _Point(x, log_r, x + f, error)
            # While mass moves between far clusters the error stands still and the scalings drift.
            better = finite & (turned | (error <= (1 + PLATEAU) * search.best.error))
            best = jax.tree.map(lambda new, old: jnp.where(better, new, old), point, search.best)
            # What the narrow copy promised, the kernel itself may not keep.
            best = best._replace(error=jnp.where(turned & ~finite, jnp.inf, best.error))
            still = jnp.abs(error - search.best.error) <= PLATEAU * error
            sound = finite & (turned | (error <= MAX_RISE * search.best.error))
            accelerated, dx, df = _accelerate(
                search, x, f, b, still=still, turned=turned, precision=kernel.precision
            )
            drift = jnp.maximum(row_drift, jnp.max(jnp.where(live, jnp.abs(accelerated), 0.0)))
            # Not even a plain step is finite: this kernel is of no use.
            hopeless = ~finite & (turned | (search.since_reset == 0))
            falls = turned | (best.error < STALL * search.mark)
            exact, sure = search.exact, search.sure
            if kernel.narrow:
                near = best.error <= jnp.maximum(goal, NARROW_GAIN * search.exact_error)
                near |= ~falls & (search.iterations - search.marked >= NARROW_STALLED)
                # A copy that leads nowhere gives way to the kernel itself.
                useless = error > STALL * search.exact_error
                end = search.iterations + 2 >= budget  # the last sweep tells the true error
                exact = (state.levels == 0) & (jnp.where(search.exact, useless, near) | end)
                sure = search.exact | (state.levels > 0)
            return _Search(
                x=jnp.where(sound, accelerated, best.following),
                best=best,
                mark=jnp.where(falls, best.error, search.mark),
                marked=jnp.where(falls, search.iterations, search.marked),
                exact=exact,
                sure=sure,
                exact_error=jnp.where(search.exact, error, search.exact_error),
                ratios=ratios,
                drift=jnp.where(sound, drift, jnp.where(hopeless, jnp.inf, 0.0)),
                iterations=search.iterations + 1,
                since_reset=jnp.where(sound, search.since_reset + 1, 0),
                last_x=x,
                last_f=f,
                dx=jnp.where(sound, dx, 0.0),
                df=jnp.where(sound, df, 0.0),
            )

        zeros = jnp.zeros_like(log_b)
        history = jnp.zeros((ANDERSON_MEMORY, *log_b.shape), dtype)
        start = _Search(
            x=zeros,
            best=_Point(zeros, jnp.zeros_like(log_a), zeros, infinity),
            mark=infinity,
            marked=state.iterations,
            drift=jnp.zeros((), dtype),
            exact=(not kernel.narrow) | ((state.levels == 0) & (state.iterations + 1 >= budget)),
            sure=~false,
            exact_error=jnp.ones((), dtype),
            ratios=(jnp.ones_like(log_a), jnp.ones_like(log_b)),
            iterations=state.iterations,
            since_reset=jnp.int32(0),
            last_x=zeros,
            last_f=zeros,
            dx=history,
            df=history,
        )
        with jax.named_scope("sweeps"):
            return jax.lax.while_loop(unfinished, step, sharding.vary_like(start, log_a))

    def level(state: _Progress) -> _Progress:
        last = state.levels == 0
        wanted = jnp.where(last, tolerance, jnp.maximum(tolerance, SCALING_TOLERANCE)).astype(dtype)
        # Half of the budget is kept for the epsilon that was asked for.
        budget = jnp.where(last, max_iterations, max_iterations // 2)
        found = search(state, wanted, budget)
        failed = ~jnp.isfinite(found.best.error)
        spent = found.iterations >= budget
        stall = stalled(found, wanted)
        again = last & ~state.plain & ~spent & stall
        reached = found.sure & (found.best.error <= wanted)
        finished = ~failed & (reached | spent | (stall & ~last))
        x = jnp.where(finished, found.best.x, found.best.following)
        down = finished & ~last
        power = jnp.where(down, SCALING_FACTOR, 1).astype(dtype)
        absorbed = kernel.absorb(state.kernel, found.best.log_r, x, power)
        progress = _Progress(
            kernel=absorbed._replace(q=jnp.where(again, start.q, absorbed.q)),
            error=found.best.error,
            iterations=found.iterations,
            levels=jnp.where(down, state.levels - 1, state.levels),
            fresh=jnp.zeros_like(state.fresh),
            lost=failed & state.fresh,
            drifted=~finished,
            usable=state.usable,
            plain=state.plain | again,
            done=(finished & last) | (failed & (found.iterations >= max_iterations)),
        )
        return sharding.vary_like(progress, log_a)

    def build(state: _Progress) -> _Progress:
        """Rows and, where columns underflowed, columns are updated in the log domain."""
        q = jax.lax.cond(
            state.lost,
            lambda: kernel.update_columns(state.kernel, log_a),
            lambda: state.kernel.q,
        )
        built = kernel.build(state.kernel._replace(q=q), log_b)
        usable = state.usable & jnp.all(jnp.where(live, jnp.isfinite(built.q), True))
        own_rows = jnp.all(jnp.where(live_row, jnp.isfinite(built.p), True))
        usable &= sharding.pmax((~own_rows).astype(jnp.int32), kernel.axes) == 0
        state = state._replace(
            kernel=built, fresh=~false, drifted=false, usable=usable, done=~usable
        )
        state = sharding.vary_like(state, log_a)
        with jax.named_scope("levels"):
            return jax.lax.while_loop(lambda state: ~(state.done | state.drifted), level, state)

    levels = jnp.int32(0)
    guess = jnp.zeros_like(log_b)
    widest = jnp.asarray(widest, dtype)
    if init_v is not None:
        if jnp.shape(init_v) != log_b.shape:
            raise checks.InputError(
                f"init: v has shape {jnp.shape(init_v)} but the affinity has {log_b.size} columns; "
                "pass the scalings of a problem of the same size"
            )
        # v - log b of any plan spans at most range/epsilon: a guess beyond that only costs digits.
        usable = live & jnp.isfinite(init_v)
        guess = jnp.where(usable, init_v, 0.0) - jnp.where(usable, log_b, 0.0)
        guess = jnp.maximum(
            guess - jnp.max(guess, where=live, initial=-jnp.inf), -2 * widest / target
        )
    elif max_iterations >= 20:
        ratio = SCALING_START * widest / target
        needed = jnp.ceil(jnp.log(jnp.maximum(ratio, 1.0)) / math.log(SCALING_FACTOR))
        levels = jnp.minimum(needed, min(max_iterations // 8, MAX_LEVELS)).astype(jnp.int32)
    start = kernel.blank(
        jnp.where(live, guess, -jnp.inf).astype(dtype),
        target * jnp.asarray(SCALING_FACTOR, dtype) ** levels.astype(dtype),
    )
    progress = _Progress(
        start, infinity, jnp.int32(0), levels, false, false, ~false, possible, levels == 0, false
    )
    with jax.named_scope("builds"):
        result = jax.lax.while_loop(
            lambda state: ~state.done, build, sharding.vary_like(progress, log_a)
        )
    # No two distributions are further apart than 2: columns that still underflow count in full.
    error = jnp.where(result.usable, jnp.minimum(result.error, 2.0), jnp.inf)
    scalings = Scalings(
        log_a + result.kernel.p,
        log_b + jnp.where(live, result.kernel.q, 0.0),
        error,
        result.iterations,
        error <= tolerance,
    )
    nothing = jnp.zeros(0, jnp.int8)  # the narrow copy is of no more use
    return scalings, result.kernel._replace(narrow=sharding.vary_like(nothing, log_a))
