"""KLOT's value and gradient in closed form: the rules that replace differentiating Sinkhorn.

From an affinity, d KLOT/dK = (P - P*)/eps. From features of unit rows F, G with K = F G^T,

    d/dF = (P - P*) G / eps,    d/dG = (P - P*)^T F / eps,

and each plan is multiplied with the features as soon as it is found, so that the backward pass
keeps arrays of the features' size only, and the two plans share one n x m buffer. With a mesh in
context its rows are split over the devices, see `sharding`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sotalign_jax import sharding
from sotalign_jax.affinity import NORM_FLOOR
from sotalign_jax.kernels import Cosines, Kernel, Matrix
from sotalign_jax.solver import Scalings, finite_range, solve


class KlotAux(NamedTuple):
    """Scalings, marginal error and iterations of both plans (total mass 1)."""

    student: Scalings
    teacher: Scalings


class Options(NamedTuple):
    """What is fixed at trace time."""

    max_iterations: int
    block_size: int | None = None


class Settings(NamedTuple):
    """What may be traced: regularisations, tolerance, log-weights and starting potentials."""

    epsilon: Float[Array, ""]
    epsilon_star: Float[Array, ""]
    tolerance: Float[Array, ""]
    log_a: Float[Array, " n"]
    log_b: Float[Array, " m"]
    init_v: Float[Array, " m"] | None
    init_v_star: Float[Array, " m"] | None


_DERIVATIVES = (
    "{name}: only first derivatives in reverse mode are supported (jax.grad, jax.vjp, "
    "jax.value_and_grad); forward mode and second derivatives are not"
)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _first_order(name: str, x: Any) -> Any:
    """Identity that refuses to be differentiated: guards the gradient rules below."""
    return x


@_first_order.defjvp
def _refuse(name: str, primals: Any, tangents: Any) -> Any:
    raise TypeError(_DERIVATIVES.format(name=name))


def reverse_only(name: str, call: Callable[[], Any]) -> Any:
    """Runs `call`, wording JAX's complaint about forward mode for the user."""
    try:
        return call()
    except TypeError as error:
        if "forward-mode" in str(error):
            raise TypeError(_DERIVATIVES.format(name=name)) from error
        raise


def _zeros(tree: Any) -> Any:
    """Cotangents of everything that is a constant of the loss."""
    return jax.tree.map(jnp.zeros_like, tree)


def _after(x: Array, computed: Any) -> Array:
    """x, which is ready only when all of `computed` is: one plan's memory serves the next.

    Compilers drop barriers and products with zero, and may then run both solves at once. The
    smallest number is lost in the sum: x is exact even where `computed` is NaN.
    """
    touched = sum(jnp.ravel(leaf)[0] for leaf in jax.tree.leaves(computed))
    return x + jnp.where(jnp.isnan(touched), jnp.finfo(x.dtype).tiny, 0)


def _plan(
    kernel: Kernel, settings: Settings, options: Options, *, teacher: bool, span: Any, epsilon: Any
) -> Any:
    return solve(
        kernel,
        settings.log_a,
        settings.log_b,
        epsilon=epsilon,
        tolerance=settings.tolerance,
        max_iterations=options.max_iterations,
        affinity_range=span,
        init_v=settings.init_v_star if teacher else settings.init_v,
    )


def _aux(n: int, m: int, us: Any, others: Any) -> KlotAux:
    """Both plans' scalings, without padding, from their u and all other fields."""
    plans = (Scalings(u[:n], v[:m], *rest) for u, (v, *rest) in zip(us, others, strict=True))
    return KlotAux(*plans)


# --- from affinities ---------------------------------------------------------------------------


def _log_plan(k: Array, scalings: Scalings, epsilon: Any) -> Array:
    return k / epsilon + scalings.u[:, None] + scalings.v[None, :]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def klot_of_affinities(
    options: Options, k: Array, k_star: Array, settings: Settings
) -> tuple[Array, KlotAux]:
    """KL(P* || P) and both plans' scalings; differentiable in k alone."""

    def own_rows(axes: sharding.Axes, rows: Any, shared: Settings) -> Any:
        k, k_star, log_a = rows
        settings = shared._replace(log_a=log_a)

        def plan(k: Array, epsilon: Any, *, teacher: bool) -> Scalings:
            span = finite_range(k, axes)
            kernel = Kernel(Matrix(k), axes=axes)
            return _plan(kernel, settings, options, teacher=teacher, span=span, epsilon=epsilon)[0]

        target = plan(k_star, settings.epsilon_star, teacher=True)
        student = plan(k, _after(settings.epsilon, target), teacher=False)
        log_p = _log_plan(k, student, settings.epsilon)
        log_p_star = _log_plan(k_star, target, settings.epsilon_star)
        p_star = jnp.exp(log_p_star)
        value = jnp.sum(jnp.where(p_star == 0, 0.0, p_star * (log_p_star - log_p)))
        return (student.u, target.u), (sharding.total(value, axes), student[1:], target[1:])

    rows = sharding.pad(k), sharding.pad(k_star), sharding.pad(settings.log_a, -jnp.inf)
    us, (value, *others) = sharding.by_rows(own_rows, rows, settings)
    aux = _aux(len(k), k.shape[1], us, others)
    solved = jnp.isfinite(aux.student.error) & jnp.isfinite(aux.teacher.error)
    return jnp.where(solved, value, jnp.nan), aux


def _affinities_fwd(options: Options, k: Array, k_star: Array, settings: Settings) -> Any:
    k = _first_order("klot", k)
    value, aux = klot_of_affinities(options, k, k_star, settings)
    return (value, aux), (k, k_star, settings, aux)


def _affinities_bwd(options: Options, residuals: Any, cotangents: Any) -> Any:
    k, k_star, settings, aux = residuals
    p = jnp.exp(_log_plan(k, aux.student, settings.epsilon))
    p_star = jnp.exp(_log_plan(k_star, aux.teacher, settings.epsilon_star))
    gradient = cotangents[0] * (p - p_star) / settings.epsilon
    return gradient, jnp.zeros_like(k_star), _zeros(settings)


klot_of_affinities.defvjp(_affinities_fwd, _affinities_bwd)


# --- from features -----------------------------------------------------------------------------


class Features(NamedTuple):
    """Raw rows of the student (f, g) and of the teacher (z, w)."""

    f: Float[Array, "n d"]
    g: Float[Array, "m d"]
    z: Float[Array, "n e"]
    w: Float[Array, "m e"]


def _inverse_norms(x: Array) -> Array:
    return jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(x), axis=1), NORM_FLOOR**2))


def _cosine(x: Array, y: Array) -> Cosines:
    return Cosines(x, y, _inverse_norms(x), _inverse_norms(y))


def _through_norm(gradient: Array, x: Array, scale: Array) -> Array:
    """The gradient in x, given that in x/||x||: its part across x, divided by ||x||."""
    along = jnp.sum(gradient * x, axis=1) * scale * scale
    along = jnp.where(scale * NORM_FLOOR < 1, along, 0.0)  # a floored length is a constant
    return (gradient - along[:, None] * x) * scale[:, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def klot_of_features(
    options: Options, features: Features, settings: Settings
) -> tuple[Array, KlotAux]:
    """KL(P* || P) of cosine affinities, and both plans' scalings; differentiable in f and g."""
    return _features_fwd(options, features, settings)[0]


def _features_fwd(options: Options, features: Features, settings: Settings) -> Any:
    """Both plans, one after the other, each multiplied with the features while it exists."""
    f, g, z, w = _first_order("klot_from_embeddings", features)

    def own_rows(axes: sharding.Axes, rows: Any, settings: Settings) -> Any:
        f, g, z, w, log_a = rows
        settings = settings._replace(log_a=log_a)
        epsilon, a = settings.epsilon, jnp.exp(log_a)
        solve_plan = functools.partial(_plan, settings=settings, options=options, span=1.0)

        kernel = Kernel(_cosine(z, sharding.whole(w, axes)), options.block_size, axes)
        teacher, state = solve_plan(kernel, teacher=True, epsilon=settings.epsilon_star)
        # Columns come together from all devices only when they are needed.
        cosines = _cosine(f, sharding.whole(_after(g, teacher), axes) if axes else g)
        target = kernel.transport(state, a, cosines)
        kernel = Kernel(cosines, options.block_size, axes)
        student, state = solve_plan(kernel, teacher=False, epsilon=_after(epsilon, target))
        moved = kernel.transport(state, a, cosines, minus=target)

        # <P*, log P*> - <P*, log P>, with the rows and columns of P* as they are: where K/eps is
        # large, what rounding adds to their sums would not cancel otherwise.
        in_rows = jnp.sum(jnp.where(a > 0, target.rows * (log_a - student.u), 0.0))
        in_columns = jnp.sum(jnp.where(target.columns > 0, target.columns * student.v, 0.0))
        cross = jnp.sum(jnp.sum(target.right * f, axis=1) * cosines.f_scale) / epsilon
        value = sharding.total(target.log_moment + in_rows - in_columns - cross, axes)
        us = student.u, teacher.u
        return (moved.right, moved.left, *us), (value, student[1:], teacher[1:])

    padded = (*map(sharding.pad, (f, g, z, w)), sharding.pad(settings.log_a, -jnp.inf))
    (right, left, *us), (value, *others) = sharding.by_rows(
        own_rows, padded, _pad_columns(settings)
    )
    df = _through_norm(right[: len(f)], f, _inverse_norms(f)) / settings.epsilon
    dg = _through_norm(left[: len(g)], g, _inverse_norms(g)) / settings.epsilon
    return (value, _aux(len(f), len(g), us, others)), (df, dg, features, settings)


def _pad_columns(settings: Settings) -> Settings:
    """Settings for columns that are padded to equally many for each device."""
    init = (None if v is None else sharding.pad(v) for v in (settings.init_v, settings.init_v_star))
    v, v_star = init
    log_b = sharding.pad(settings.log_b, -jnp.inf)
    return settings._replace(log_b=log_b, init_v=v, init_v_star=v_star)


def _features_bwd(options: Options, residuals: Any, cotangents: Any) -> Any:
    df, dg, features, settings = residuals
    constants = _zeros((features.z, features.w))
    return Features(cotangents[0] * df, cotangents[0] * dg, *constants), _zeros(settings)


klot_of_features.defvjp(_features_fwd, _features_bwd)
