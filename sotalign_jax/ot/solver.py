"""The Sinkhorn solver: kernel-domain sweeps, Anderson acceleration, epsilon-scaling.

Works on any `kernel.Kernel`; `sinkhorn.sinkhorn` is the front door, `klot` the other user.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

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
SCALING_FACTOR = 4
"""Ratio of consecutive epsilons when a small epsilon is approached from above."""
MAX_LEVELS = 3
"""How often, at most: raising A to the 4th power three times keeps its rounding below 1e-5."""
SCALING_START = 0.03
"""An epsilon below this fraction of the affinity's range is approached from above."""
SCALING_TOLERANCE = 0.01
"""Marginal error at which an intermediate epsilon is left."""


def finite_range(k: Array, axes: sharding.Axes = ()) -> Array:
    """max K - min K over the finite entries, on all devices when rows are split over `axes`."""

    def body(block: Block, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        rows = block.of(k)
        finite = jnp.isfinite(rows)
        return (
            jnp.maximum(bounds[0], jnp.max(rows, where=finite, initial=-jnp.inf)),
            jnp.minimum(bounds[1], jnp.min(rows, where=finite, initial=jnp.inf)),
        )

    infinity = jnp.asarray(jnp.inf, k.dtype)
    highest, lowest = over_rows(len(k), BUILD_ROWS, body, (-infinity, infinity))
    return sharding.largest(highest, axes) + sharding.largest(-lowest, axes)


class Scalings(NamedTuple):
    """What a solve returns: log-scalings, marginal error and the number of iterations."""

    u: Float[Array, " n"]
    v: Float[Array, " m"]
    error: Float[Array, ""]
    iterations: Int[Array, ""]


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
    drift: Array
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
    fresh: Array
    drifted: Array
    done: Array


def _accelerate(search: _Search, x: Array, f: Array) -> tuple[Array, Array, Array]:
    """One step of Anderson acceleration for the fixed point of x -> x + f(x)."""
    slot = search.since_reset % ANDERSON_MEMORY
    fresh = search.since_reset > 0
    dx = search.dx.at[slot].set(jnp.where(fresh, x - search.last_x, 0.0))
    df = search.df.at[slot].set(jnp.where(fresh, f - search.last_f, 0.0))
    gram = affinity.dot(df, df.T)
    # The ridge bounds the weights when past steps are nearly parallel.
    ridge = 10 * jnp.finfo(x.dtype).eps * jnp.trace(gram) + jnp.finfo(x.dtype).tiny
    identity = jnp.eye(ANDERSON_MEMORY, dtype=x.dtype)
    weights = jnp.linalg.solve(gram + ridge * identity, affinity.dot(df, f))
    correction = -affinity.dot(weights, dx + df)
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
    affinity_range: Any = 1.0,
    init_v: Float[Array, " m"] | None = None,
) -> tuple[Scalings, KernelState]:
    """Stabilised, accelerated Sinkhorn on the row-conditional kernel A = exp(K/eps + p + q).

    P = diag(a r) A diag(c) with r = 1/(A c): rows are exact, and one sweep over A gives the column
    error together with the next c. Only matrix-vector products touch A, and where its rows are
    split over devices each sweep has one all-reduce, of length m. Three nested loops:
    sweeps until the error is small; levels of epsilon (A -> A^4) when epsilon is small; rebuilds
    of A from K when the scalings drift, which is rare. After a step that triples the best error
    the search goes back to the best point and takes plain steps, so that acceleration costs at
    most a constant factor and never robustness.

    Returns the scalings, and the kernel with them absorbed: A = diag(1/a) P.
    """
    dtype = log_a.dtype
    target = jnp.asarray(epsilon, dtype)
    a, b = jnp.exp(log_a), jnp.exp(log_b)
    live_row, live = ~jnp.isneginf(log_a), ~jnp.isneginf(log_b)
    infinity, false = jnp.asarray(jnp.inf, dtype), jnp.asarray(False)
    checks.whole(1, max_iterations=max_iterations)

    def search(state: _Progress, goal: Array, budget: Array) -> _Search:
        def unfinished(search: _Search) -> Array:
            within = (search.iterations < budget) & (search.drift <= MAX_DRIFT)
            first = search.iterations == state.iterations
            return first | (within & (search.best.error > goal))

        def step(search: _Search) -> _Search:
            x = search.x
            c = jnp.exp(x)
            s, t = kernel.sweep(state.kernel, a, c)
            log_r = -jnp.log(s)
            row_drift = jnp.max(jnp.where(live_row, jnp.abs(log_r), 0.0))
            t, row_drift = sharding.total_and_largest(t, row_drift, kernel.axes)
            f = jnp.where(live, log_b - jnp.log(t) - x, 0.0)
            # A column that underflowed cannot be scaled, however little it adds to the error.
            missing = jnp.where(t > 0, jnp.abs(c * t - b), jnp.inf)
            error = jnp.sum(jnp.where(live, missing, 0.0))
            finite = jnp.isfinite(error)
            point = _Point(x, log_r, x + f, error)
            # While mass moves between far clusters the error stands still and the scalings drift.
            better = finite & (error <= (1 + PLATEAU) * search.best.error)
            best = jax.tree.map(lambda new, old: jnp.where(better, new, old), point, search.best)
            sound = finite & (error <= MAX_RISE * search.best.error)
            accelerated, dx, df = _accelerate(search, x, f)
            drift = jnp.maximum(row_drift, jnp.max(jnp.where(live, jnp.abs(accelerated), 0.0)))
            # Not even a plain step is finite: this kernel is of no use.
            hopeless = ~finite & (search.since_reset == 0)
            return _Search(
                x=jnp.where(sound, accelerated, best.following),
                best=best,
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
            drift=jnp.zeros((), dtype),
            iterations=state.iterations,
            since_reset=jnp.int32(0),
            last_x=zeros,
            last_f=zeros,
            dx=history,
            df=history,
        )
        return jax.lax.while_loop(unfinished, step, start)

    def level(state: _Progress) -> _Progress:
        last = state.kernel.epsilon <= 1.5 * target
        goal = jnp.where(last, tolerance, jnp.maximum(tolerance, SCALING_TOLERANCE)).astype(dtype)
        # Half of the budget is kept for the epsilon that was asked for.
        budget = jnp.where(last, max_iterations, max_iterations // 2)
        found = search(state, goal, budget)
        # A kernel that was raised to a power may have lost a column: build it again. If a fresh
        # one fails, K itself is not finite.
        failed = ~jnp.isfinite(found.best.error)
        finished = ~failed & ((found.best.error <= goal) | (found.iterations >= budget))
        x = jnp.where(finished, found.best.x, found.best.following)
        power = jnp.where(finished & ~last, SCALING_FACTOR, 1).astype(dtype)
        return _Progress(
            kernel=kernel.absorb(state.kernel, found.best.log_r, x, power),
            error=found.best.error,
            iterations=found.iterations,
            fresh=false,
            drifted=~finished,
            done=(finished & last) | (failed & state.fresh),
        )

    def build(state: _Progress) -> _Progress:
        built, again = kernel.build(state.kernel, live_row)
        return jax.lax.while_loop(
            lambda state: ~(state.done | state.drifted),
            level,
            state._replace(kernel=built, fresh=~false, drifted=again & ~state.fresh),
        )

    levels = jnp.asarray(0, dtype)
    guess = jnp.zeros_like(log_b)
    if init_v is not None:
        if jnp.shape(init_v) != log_b.shape:
            raise checks.InputError(
                f"init: v has shape {jnp.shape(init_v)} but the affinity has {log_b.size} columns; "
                "pass the scalings of a problem of the same size"
            )
        # v - log b of any plan spans at most range/epsilon: a guess beyond that only costs digits.
        guess = jnp.where(live & jnp.isfinite(init_v), init_v - log_b, 0.0)
        span = 2 * jnp.asarray(affinity_range, dtype) / target
        guess = log_b + jnp.maximum(guess - jnp.max(guess, where=live, initial=-jnp.inf), -span)
    elif max_iterations >= 20:
        ratio = SCALING_START * jnp.asarray(affinity_range, dtype) / target
        levels = jnp.ceil(jnp.log(jnp.maximum(ratio, 1.0)) / jnp.log(float(SCALING_FACTOR)))
        levels = jnp.minimum(levels, min(max_iterations // 8, MAX_LEVELS))
    start = kernel.blank(
        jnp.where(live, guess, -jnp.inf).astype(dtype),
        target * jnp.asarray(float(SCALING_FACTOR), dtype) ** levels,
    )
    result = jax.lax.while_loop(
        lambda state: ~state.done,
        build,
        _Progress(start, infinity, jnp.int32(0), false, ~false, false),
    )
    scalings = Scalings(log_a + result.kernel.p, result.kernel.q, result.error, result.iterations)
    return scalings, result.kernel
