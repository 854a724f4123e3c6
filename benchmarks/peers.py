"""Arms of the benchmarks: KLOT and its gradient by our code, by unrolling, and with ott-jax.

An arm is a function of (K, K*) or of features (f, g, f*, g*). It returns the loss, its gradient and
the log-scalings of both plans, log P = K/eps + u + v, from which `common.marginal_error` measures
the error of any arm. In the notation of ott-jax, u is f/eps and K is -cost. Its epsilon is
absolute if it is a float.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from sotalign_jax import checks, klot, klot_from_embeddings
from sotalign_jax.ot import affinity

try:
    from ott.geometry import geometry
    from ott.solvers import linear
    from ott.solvers.linear import acceleration, implicit_differentiation
except ModuleNotFoundError:
    sys.exit(f"error: {checks.not_installed('ott-jax', extra='bench')}")


class Target(NamedTuple):
    """Goal of an arm.

    Attributes:
        epsilon: Regularization of the student's plan.
        epsilon_star: Regularization of the teacher's plan.
        tolerance: Marginal error to reach. 0 runs all iterations.
        student: Most iterations of the student's plan. Unrolled loops run all of them.
        teacher: Most iterations of the teacher's plan.
    """

    epsilon: float
    epsilon_star: float
    tolerance: float
    student: int
    teacher: int


class Scaling(NamedTuple):
    """Log-scalings of a plan, and the number of iterations."""

    u: Array
    v: Array
    iterations: Array | int


class Arm(NamedTuple):
    """Way to compute KLOT. `make(target)` returns loss(*inputs) -> (value, (student, teacher))."""

    name: str
    make: Callable[[Target], Callable[..., tuple[Array, tuple[Scaling, Scaling]]]]
    from_features: bool = False
    unrolled: bool = False
    textbook: bool = True  # it needs about as many iterations as textbook Sinkhorn

    def value_and_grad(self, target: Target) -> Callable[..., Any]:
        """Returns a function that computes ((loss, scalings), gradient in K, or in f and g)."""
        where = (0, 1) if self.from_features else 0
        return jax.value_and_grad(self.make(target), argnums=where, has_aux=True)


# --------------------------------------------------------------------------------------- ours


def ours(
    target: Target, *, function: Callable[..., Any] = klot, **options: Any
) -> Callable[..., Any]:
    """Returns our loss.

    Args:
        target: Goal of the arm.
        function: `klot` of K and K*, or `klot_from_embeddings` of features.
        **options: Further options of the function.
    """

    def loss(*inputs: Array) -> Any:
        value, aux = function(
            *inputs,
            epsilon=target.epsilon,
            epsilon_star=target.epsilon_star,
            tolerance=target.tolerance,
            max_iterations=max(target.student, target.teacher),
            return_aux=True,
            **options,
        )
        return value, tuple(Scaling(plan.u, plan.v, plan.iterations) for plan in aux)

    return loss


# --------------------------------------------------------------------------- plain, unrolled


def plain_step(k: Array, epsilon: float, uv: tuple[Array, Array]) -> tuple[Array, Array]:
    """Runs one textbook iteration in the log domain with uniform weights, first u, then v.

    Args:
        k: Affinities.
        epsilon: Regularization.
        uv: Log-scalings.

    Returns:
        New log-scalings.
    """
    n, m = k.shape
    u = -jnp.log(n) - jax.nn.logsumexp(k / epsilon + uv[1], axis=1)
    v = -jnp.log(m) - jax.nn.logsumexp(k / epsilon + u[:, None], axis=0)
    return u.astype(k.dtype), v.astype(k.dtype)


@functools.partial(jax.jit, static_argnums=1)
def plain_to_tolerance(k: Array, epsilon: float, limit: int, tolerance: float) -> Scaling:
    """Runs textbook Sinkhorn until the marginal error is at most `tolerance`.

    Args:
        k: Affinities.
        epsilon: Regularization.
        limit: Most iterations.
        tolerance: Marginal error to reach.

    Returns:
        Log-scalings and the number of iterations.
    """
    n, m = k.shape

    def unfinished(state: Any) -> Array:
        return (state[3] < limit) & ~(state[2] <= tolerance)

    def step(state: Any) -> Any:
        (u, v), rows = plain_step(k, epsilon, state[:2]), state[0]
        # The columns are exact after a step. The change of u is the log of the relative error of
        # the rows before the step.
        error = jnp.sum(jnp.abs(jnp.exp(rows - u) - 1.0)) / n
        return u, v, jnp.where(state[3] > 0, error, jnp.inf), state[3] + 1

    start = (jnp.zeros(n, k.dtype), jnp.zeros(m, k.dtype), jnp.asarray(jnp.inf, k.dtype), 0)
    u, v, _, iterations = jax.lax.while_loop(unfinished, step, start)
    return Scaling(u, v, iterations)


def unrolled(
    k: Array, epsilon: float, tolerance: float, iterations: int, *, wrap: Any = lambda step: step
) -> Scaling:
    """Runs a fixed number of textbook iterations, which JAX can differentiate.

    Args:
        k: Affinities.
        epsilon: Regularization.
        tolerance: Unused. All solvers have the same arguments.
        iterations: Number of iterations.
        wrap: Transformation of an iteration, such as `jax.checkpoint`.

    Returns:
        Log-scalings and the number of iterations.
    """
    step = wrap(functools.partial(plain_step, k, epsilon))
    start = (jnp.zeros(len(k), k.dtype), jnp.zeros(k.shape[1], k.dtype))
    (u, v), _ = jax.lax.scan(lambda uv, _: (step(uv), None), start, length=iterations)
    return Scaling(u, v, iterations)


def through_plan(target: Target, *, solve: Callable[..., Scaling]) -> Callable[..., Any]:
    """Returns KL(P* || P), whose gradient goes through the solver of the student's plan.

    Args:
        target: Goal of the arm.
        solve: Solver, called with affinities, epsilon, tolerance and number of iterations.
    """
    epsilon, epsilon_star, tolerance, most, most_star = target

    def loss(k: Array, k_star: Array) -> Any:
        k_star = jax.lax.stop_gradient(k_star)
        student = solve(k, epsilon, tolerance, most)
        teacher = solve(k_star, epsilon_star, tolerance, most_star)
        log_p = k / epsilon + student.u[:, None] + student.v
        log_p_star = k_star / epsilon_star + teacher.u[:, None] + teacher.v
        return jnp.sum(jnp.exp(log_p_star) * (log_p_star - log_p)), (student, teacher)

    return loss


# ------------------------------------------------------------------------------------ ott-jax


def _ott(k: Array, epsilon: float, tolerance: float, limit: int, **options: Any) -> Any:
    """Solves for the affinity K with ott-jax.

    `min_iterations` must be 0. If it equals `max_iterations`, ott-jax differentiates another loop,
    and gradients of anything but the cost are wrong.
    """
    return linear.solve(
        geometry.Geometry(cost_matrix=-k, epsilon=epsilon),
        threshold=tolerance,
        min_iterations=0,
        max_iterations=limit,
        **options,
    )


def _scaling(out: Any, epsilon: float) -> Scaling:
    return Scaling(out.f / epsilon, out.g / epsilon, out.n_iters)


def ott_danskin(target: Target, **options: Any) -> Callable[..., Any]:
    """Returns -(<P*, K> + W_eps(K)) / eps with ott-jax, which is KLOT up to a constant.

    By Danskin's theorem its gradient needs no derivative of the solver.

    Args:
        target: Goal of the arm.
        **options: Options of `ott.solvers.linear.solve`.
    """
    epsilon, epsilon_star, tolerance, most, most_star = target

    def loss(k: Array, k_star: Array) -> Any:
        k_star = jax.lax.stop_gradient(k_star)  # the teacher is fixed
        plan = _ott(k_star, epsilon_star, tolerance, most_star, **options)
        out = _ott(k, epsilon, tolerance, most, **options)
        value = -(jnp.vdot(plan.matrix, k) + out.reg_ot_cost) / epsilon
        scalings = _scaling(out, epsilon), _scaling(plan, epsilon_star)
        return value, jax.lax.stop_gradient(scalings)

    return loss


MOMENTUM = acceleration.Momentum(start=40)  # type: ignore[call-arg]
"""Adaptive over-relaxation of ott-jax, the fastest of its options on real embeddings."""


def _tighter(target: Target) -> Callable[..., Any]:
    return ours(target._replace(tolerance=target.tolerance / 10))


def _of_cosines(target: Target) -> Callable[..., Any]:
    loss = ours(target)
    return lambda f, g, z, w: loss(affinity.cosine(f, g), affinity.cosine(z, w))


def _of_features(name: str, **options: Any) -> Arm:
    make = functools.partial(ours, function=klot_from_embeddings, **options)
    return Arm(name, make, from_features=True, textbook=False)


def _through_plan(name: str, solve: Callable[..., Scaling], unrolled: bool = True) -> Arm:
    return Arm(name, functools.partial(through_plan, solve=solve), unrolled=unrolled)


def _through_ott(name: str, how: Any) -> Arm:
    def solve(k: Array, epsilon: float, *goal: Any) -> Scaling:
        return _scaling(_ott(k, epsilon, *goal, implicit_diff=how), epsilon)

    return _through_plan(name, solve, how is None)


OURS = Arm("ours, from K", ours, textbook=False)
OURS_TIGHTER = Arm("ours, a tenth of the error", _tighter, textbook=False)
OURS_OF_COSINES = Arm("ours, from K of features", _of_cosines, from_features=True, textbook=False)
DANSKIN = Arm("ott-jax Danskin", ott_danskin)
DANSKIN_MOMENTUM = Arm(
    "ott-jax Danskin + momentum", functools.partial(ott_danskin, momentum=MOMENTUM)
)
ARMS = (
    OURS,
    _of_features("ours, from features"),
    _of_features("ours, streamed", block_size=256),
    _through_plan("unrolled scan", unrolled),
    _through_plan("checkpointed scan", functools.partial(unrolled, wrap=jax.checkpoint)),
    _through_ott("ott-jax unrolled", None),
    _through_ott("ott-jax implicit", implicit_differentiation.ImplicitDiff()),
    DANSKIN,
    DANSKIN_MOMENTUM,
)
