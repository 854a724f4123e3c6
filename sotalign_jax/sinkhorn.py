"""Entropic optimal transport: affinity K -> plan P = exp(K/epsilon + u + v).

    OT_eps(K) = argmin_{P 1 = a, P^T 1 = b}  -<P, K> + eps * sum P log P

`u, v` are log-scalings (dimensionless) everywhere. `sinkhorn` is the fast solver, `reference`
beside it is the plain textbook one.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sotalign_jax import affinity, checks
from sotalign_jax.kernels import (
    BUILD_ROWS,
    MAX_DRIFT,
    Block,
    Kernel,
    KernelState,
    Matrix,
    over_rows,
)

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """A transport plan in scaling form, log P_ij = K_ij/epsilon + u_i + v_j.

    Attributes:
        affinity: K, shape [n, m].
        u: row log-scalings, shape [n]; -inf where the weight is zero.
        v: column log-scalings, shape [m]; -inf where the weight is zero.
        epsilon: the entropic regularisation.
        error: max(||P 1 - a||_1, ||P^T 1 - b||_1), with a and b summing to 1.
        iterations: number of (u, v) updates made.
        converged: whether `error` reached the tolerance asked for.
    """

    affinity: Float[Array, "n m"]
    u: Float[Array, " n"]
    v: Float[Array, " m"]
    epsilon: Float[Array, ""]
    error: Float[Array, ""]
    iterations: Int[Array, ""]
    converged: Bool[Array, ""]

    def log_matrix(self) -> Float[Array, "n m"]:
        """log P."""
        scaled = self.affinity / self.epsilon[..., None, None]  # a vmapped solve gives many plans
        return scaled + self.u[..., :, None] + self.v[..., None, :]

    def matrix(self) -> Float[Array, "n m"]:
        """P."""
        return jnp.exp(self.log_matrix())

    def apply(self, values: Float[Array, "m k"]) -> Float[Array, "n k"]:
        """P @ values: what each row's mass carries over from the columns."""
        return affinity.dot(self.matrix(), values)


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
    error together with the next c. Only matrix-vector products touch A. Three nested loops:
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
    check_positive("max_iterations", max_iterations)

    def search(state: _Progress, goal: Array, budget: Array) -> _Search:
        def unfinished(search: _Search) -> Array:
            within = (search.iterations < budget) & (search.drift <= MAX_DRIFT)
            first = search.iterations == state.iterations
            return first | (within & (search.best.error > goal))

        def step(search: _Search) -> _Search:
            x = search.x
            c = jnp.exp(x)
            s, t = kernel.sweep(state.kernel, a, c)
            f = jnp.where(live, log_b - jnp.log(t) - x, 0.0)
            # A column that underflowed cannot be scaled, however little it adds to the error.
            missing = jnp.where(t > 0, jnp.abs(c * t - b), jnp.inf)
            error = jnp.sum(jnp.where(live, missing, 0.0))
            finite = jnp.isfinite(error)
            point = _Point(x, -jnp.log(s), x + f, error)
            # While mass moves between far clusters the error stands still and the scalings drift.
            better = finite & (error <= (1 + PLATEAU) * search.best.error)
            best = jax.tree.map(lambda new, old: jnp.where(better, new, old), point, search.best)
            sound = finite & (error <= MAX_RISE * search.best.error)
            accelerated, dx, df = _accelerate(search, x, f)
            drift = jnp.maximum(
                jnp.max(jnp.where(live_row, jnp.abs(point.log_r), 0.0)),
                jnp.max(jnp.where(live, jnp.abs(accelerated), 0.0)),
            )
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


def log_weights(
    name: str, given: Float[Array, " n"] | None, size: int, dtype: Any
) -> Float[Array, " n"]:
    """The given log-weights, checked, or uniform ones."""
    if given is None:
        return jnp.full((size,), -jnp.log(size), dtype)
    if jnp.shape(given) != (size,):
        raise checks.InputError(
            f"{name}: has shape {jnp.shape(given)} but the affinity needs ({size},); "
            "pass one log-weight for each of its rows (log_a) or columns (log_b)"
        )
    if not isinstance(given, jax.core.Tracer):
        total = np.exp(np.asarray(given, np.float64)).sum()
        if not abs(total - 1) < 1e-3:
            raise checks.InputError(
                f"{name}: the weights sum to {total:.4g}; pass logarithms of weights that sum to 1"
            )
    return jnp.asarray(given, dtype)


def without_padding(k: Array, log_a: Array, log_b: Array) -> Array:
    """K with zeros in the rows and columns of weight zero, where anything may stand."""
    return jnp.where(jnp.isneginf(log_a)[:, None] | jnp.isneginf(log_b), 0.0, k)


def check_affinity(name: str, k: Any) -> None:
    """Raises unless `k` is a non-empty matrix."""
    shape = jnp.shape(k)
    if len(shape) != 2 or 0 in shape:
        raise checks.InputError(f"{name}: has shape {shape}; pass a non-empty matrix [n, m]")


def check_positive(name: str, value: Any) -> None:
    """Raises for a number that is known, now, not to be positive."""
    if not isinstance(value, jax.core.Tracer) and not float(value) > 0:
        raise checks.InputError(f"{name}: is {float(value):g}; pass a number above 0")


@jax.custom_jvp
def _not_differentiable(k: Array) -> Array:
    return k


@_not_differentiable.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise TypeError(
        "sinkhorn: plans are not differentiable; use klot or klot_from_embeddings, whose gradient "
        "is exact, or pass jax.lax.stop_gradient(K)"
    )


def sinkhorn(
    K: Float[Array, "n m"],
    *,
    epsilon: Any,
    log_a: Float[Array, " n"] | None = None,
    log_b: Float[Array, " m"] | None = None,
    tolerance: float = 1e-4,
    max_iterations: int = 2000,
    init: tuple[Array, Array] | None = None,
) -> Plan:
    """Solves OT_eps(K), the entropic transport plan of an affinity.

    Stops when max(||P 1 - a||_1, ||P^T 1 - b||_1) <= tolerance; `Plan.converged` tells whether it
    was reached. Works under `jit` and `vmap`, in float32 and float64, for any epsilon > 0.

    Args:
        K: affinity (larger is closer), shape [n, m].
        epsilon: entropic regularisation, in the units of K.
        log_a: log-weights of the rows, exp(log_a) summing to 1; -inf pads. Uniform by default.
        log_b: log-weights of the columns, likewise.
        tolerance: marginal error (L1, total mass 1) to stop at.
        max_iterations: number of (u, v) updates to stop at.
        init: (u, v) to start from, such as those of a similar problem. Only v matters, for u
            follows from it.

    Returns:
        The `Plan`.

    >>> plan = sinkhorn(jnp.array([[1.0, 0.0], [0.0, 1.0]]), epsilon=0.5)
    >>> plan.matrix().tolist(), bool(plan.converged)
    ([[0.44, 0.06], [0.06, 0.44]], True)
    """
    check_affinity("K", K)
    check_positive("epsilon", epsilon)
    K = _not_differentiable(affinity.as_float(K))
    weights = (
        log_weights("log_a", log_a, K.shape[0], K.dtype),
        log_weights("log_b", log_b, K.shape[1], K.dtype),
    )
    if not (log_a is None and log_b is None):
        K = without_padding(K, *weights)
    scalings, _ = solve(
        Kernel(Matrix(K)),
        *weights,
        epsilon=epsilon,
        tolerance=tolerance,
        max_iterations=max_iterations,
        affinity_range=finite_range(K),
        init_v=None if init is None else init[1],
    )
    return Plan(
        affinity=K,
        u=scalings.u,
        v=scalings.v,
        epsilon=jnp.asarray(epsilon, K.dtype),
        error=scalings.error,
        iterations=scalings.iterations,
        converged=scalings.error <= tolerance,
    )


def finite_range(k: Array) -> Array:
    """max K - min K over the finite entries."""

    def body(block: Block, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        rows = block.of(k)
        finite = jnp.isfinite(rows)
        return (
            jnp.maximum(bounds[0], jnp.max(rows, where=finite, initial=-jnp.inf)),
            jnp.minimum(bounds[1], jnp.min(rows, where=finite, initial=jnp.inf)),
        )

    infinity = jnp.asarray(jnp.inf, k.dtype)
    highest, lowest = over_rows(len(k), BUILD_ROWS, body, (-infinity, infinity))
    return highest - lowest


def reference(
    K: Float[Array, "n m"],
    *,
    epsilon: Any,
    iterations: int = 100,
    symmetric: bool = True,
) -> Plan:
    """Textbook log-domain Sinkhorn with uniform weights, as in the paper's published loss.

    Repeats u = log a - LSE_j(K/eps + v), v = log b - LSE_i(K/eps + u) from v = 0. `symmetric`
    ends, as the published code does, with u moved half-way to its next iterate. Differentiable
    by unrolling, and slow: `sinkhorn` is the one to use. `converged` means an error of at most
    1e-4, the default tolerance there.

    >>> reference(jnp.eye(2), epsilon=0.5).matrix().tolist()
    [[0.44, 0.06], [0.06, 0.44]]
    """
    check_affinity("K", K)
    check_positive("epsilon", epsilon)
    K = affinity.as_float(K)
    n, m = K.shape
    scaled = K / epsilon
    log_a, log_b = -jnp.log(jnp.asarray(n, K.dtype)), -jnp.log(jnp.asarray(m, K.dtype))

    def update_u(v: Array) -> Array:
        return log_a - jax.nn.logsumexp(scaled + v[None, :], axis=1)

    def step(uv: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        u = update_u(uv[1])
        return (u, log_b - jax.nn.logsumexp(scaled + u[:, None], axis=0)), None

    start = (jnp.zeros(n, K.dtype), jnp.zeros(m, K.dtype))
    (u, v), _ = jax.lax.scan(step, start, length=iterations)
    if symmetric:
        u = (u + update_u(v)) / 2
    matrix = jnp.exp(scaled + u[:, None] + v[None, :])
    error = jnp.maximum(
        jnp.sum(jnp.abs(matrix.sum(1) - 1 / n)), jnp.sum(jnp.abs(matrix.sum(0) - 1 / m))
    )
    return Plan(
        affinity=K,
        u=u,
        v=v,
        epsilon=jnp.asarray(epsilon, K.dtype),
        error=error,
        iterations=jnp.asarray(iterations),
        converged=error <= 1e-4,
    )
