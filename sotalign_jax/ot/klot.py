"""KLOT's value and gradient in closed form: the rules that replace differentiating Sinkhorn.

From an affinity, d KLOT/dK = (P - P*)/eps. From features of unit rows F, G with K = F G^T,

    d/dF = (P - P*) G / eps,    d/dG = (P - P*)^T F / eps,

so that the backward pass keeps arrays of the features' size only. Where two n x m buffers fit,
P - P* is multiplied with the features at once; where one does, each plan as soon as it is found,
and they share it. Rows are split over the devices of a mesh, see `sharding`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sotalign_jax import checks
from sotalign_jax.ot import affinity, blocks, sharding
from sotalign_jax.ot.affinity import ArrayLike
from sotalign_jax.ot.kernel import Cosines, Kernel
from sotalign_jax.ot.sinkhorn import (
    log_plan,
    log_weights,
    pair,
    reference,
    sinkhorn,
    solve_matrix,
    without_padding,
)
from sotalign_jax.ot.solver import Scalings, goal, solve

MARGINALS = ("prob", "bistochastic")


class KlotAux(NamedTuple):
    """Scalings, marginal error, iterations and convergence of both plans (total mass 1)."""

    student: Scalings
    teacher: Scalings


class Options(NamedTuple):
    """What is fixed at trace time; `both`: two stored kernels exist at a time."""

    max_iterations: int
    precision: jax.lax.PrecisionLike
    block_size: int | None = None
    both: bool = False

    @property
    def sums(self) -> jax.lax.PrecisionLike:
        """Precision of matrix-vector products."""
        return affinity.HIGHEST if self.precision is None else self.precision

    @property
    def products(self) -> jax.lax.PrecisionLike:
        """Precision of products of features."""
        return affinity.THREE_PASSES if self.precision is None else self.precision


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


# Cotangents of everything that is a constant of the loss.
_zeros = functools.partial(jax.tree.map, jnp.zeros_like)


def _after(x: Array, computed: Any) -> Array:
    """x, which is ready only when all of `computed` is: one plan's memory serves the next.

    Compilers drop barriers and products with zero, and may then run both solves at once. The
    smallest number is lost in the sum: x is exact even where `computed` is NaN.
    """
    touched = sum(jnp.ravel(leaf)[0].astype(x.dtype) for leaf in jax.tree.leaves(computed))
    return x + jnp.where(jnp.isnan(touched), jnp.finfo(x.dtype).tiny, 0)


def _joined(n: int, m: int, us: Any, others: Any) -> KlotAux:
    """Both plans' scalings, without padding, from their u and all other fields."""
    return KlotAux(
        *(
            Scalings(sharding.join(u, n), v[:m], *rest)
            for u, (v, *rest) in zip(us, others, strict=True)
        )
    )


# --- from affinities ---------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def klot_of_affinities(
    options: Options, k: Array, k_star: Array, settings: Settings
) -> tuple[Array, KlotAux]:
    """KL(P* || P) and both plans' scalings; differentiable in k alone."""
    return _affinities_fwd(options, k, k_star, settings)[0]


def _affinities_fwd(options: Options, k: Array, k_star: Array, settings: Settings) -> Any:
    k = _first_order("klot", k)

    def own_rows(axes: sharding.Axes, rows: Any, settings: Settings) -> Any:
        k, k_star, log_a = rows

        def plan(k: Array, epsilon: Array, init_v: Array | None) -> tuple[Array, Scalings]:
            limits = epsilon, settings.tolerance, options.max_iterations
            return solve_matrix(k, log_a, settings.log_b, *limits, init_v, axes, options.sums)

        epsilon, epsilon_star = settings.epsilon, settings.epsilon_star
        top_star, target = plan(k_star, epsilon_star, settings.init_v_star)
        top, student = plan(k, _after(epsilon, target), settings.init_v)
        log_p = log_plan(k, top, student.u, student.v, epsilon)
        log_p_star = log_plan(k_star, top_star, target.u, target.v, epsilon_star)
        p_star = jnp.exp(log_p_star)
        value = jnp.sum(jnp.where(p_star == 0, 0.0, p_star * (log_p_star - log_p)))
        solved = jnp.isfinite(student.error) & jnp.isfinite(target.error)
        value = jnp.where(solved, sharding.psum(value, axes), jnp.nan)
        centred = top, student.u, top_star, target.u
        us = student.u - top / epsilon, target.u - top_star / epsilon_star
        return (us, centred), (value, student[1:], target[1:])

    with sharding.mesh_of(k, k_star):
        rows = sharding.split(k), sharding.split(k_star), sharding.split(settings.log_a, -jnp.inf)
        (us, centred), (value, *others) = sharding.shard_map(own_rows, rows, settings)
        aux = _joined(len(k), k.shape[1], us, others)
    return (value, aux), (k, k_star, centred, settings, aux)


def _affinities_bwd(options: Options, residuals: Any, cotangents: Any) -> Any:
    k, k_star, centred, settings, aux = residuals

    def own_rows(axes: sharding.Axes, rows: Any, shared: Any) -> Any:
        k, k_star, (top, u, top_star, u_star) = rows
        v, v_star, epsilon, epsilon_star, scale = shared
        p = jnp.exp(log_plan(k, top, u, v, epsilon))
        p_star = jnp.exp(log_plan(k_star, top_star, u_star, v_star, epsilon_star))
        return scale * (p - p_star) / epsilon, ()

    with sharding.mesh_of(k, k_star):
        solved = jnp.isfinite(aux.student.error) & jnp.isfinite(aux.teacher.error)
        scale = jnp.where(solved, cotangents[0], jnp.nan)
        epsilons = settings.epsilon, settings.epsilon_star
        gradient, _ = sharding.shard_map(
            own_rows,
            (sharding.split(k), sharding.split(k_star), centred),
            (aux.student.v, aux.teacher.v, *epsilons, scale),
        )
        gradient = sharding.like(sharding.join(gradient, len(k)), k)
    return gradient, jnp.zeros_like(k_star), _zeros(settings)


klot_of_affinities.defvjp(_affinities_fwd, _affinities_bwd)


# --- from features -----------------------------------------------------------------------------


class Features(NamedTuple):
    """Raw rows of the student (f, g) and of the teacher (z, w)."""

    f: Float[Array, "n d"]
    g: Float[Array, "m d"]
    z: Float[Array, "n e"]
    w: Float[Array, "m e"]


def _through_norm(gradient: Array, x: Array, factor: Any) -> Array:
    """The gradient in x, given that in x/||x||: its part across x, times factor / ||x||."""
    scale = affinity.inverse_norms(x)
    along = jnp.sum(gradient * x, axis=1) * scale * scale
    return (gradient - along[:, None] * x) * (scale * factor)[:, None]


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
        log_b, epsilon, tolerance = settings.log_b, settings.epsilon, settings.tolerance
        a, b = jnp.exp(log_a), jnp.exp(log_b)

        def cosines_of(x: Array, y: Array) -> Cosines:
            return Cosines.of(x, sharding.all_gather(y, axes), options.products)

        def kernel_of(cosines: Cosines) -> Kernel:
            return Kernel(cosines, options.block_size, axes, options.sums)

        def plan(
            kernel: Kernel, epsilon: Array, init_v: Array | None, *, narrow: bool = False
        ) -> Any:
            return solve(
                kernel._replace(narrow=narrow),
                log_a,
                log_b,
                epsilon=epsilon,
                tolerance=tolerance if kernel.stored else goal(tolerance, 1.0, epsilon),
                max_iterations=options.max_iterations,
                init_v=init_v,
            )

        def measured(scalings: Scalings, rows: Array, columns: Array) -> Scalings:
            """With the error of the plan that was multiplied, which was rounded since."""
            in_rows = sharding.psum(jnp.sum(jnp.abs(rows - a)), axes)
            in_columns = jnp.sum(jnp.abs(sharding.psum(columns, axes) - b))
            return scalings.measured(jnp.maximum(in_rows, in_columns), tolerance)

        with jax.named_scope("teacher_plan"):
            kernel = kernel_of(cosines_of(z, w))
            exact = functools.partial(plan, kernel, init_v=settings.init_v_star)
            if options.both and a.dtype == jnp.float32:
                # Many sweeps, which on a GPU or TPU take as long as reading the kernel does.
                fast = functools.partial(exact, narrow=True)
                branches = {"default": exact, "cuda": fast, "tpu": fast}
                teacher, star = jax.lax.platform_dependent(settings.epsilon_star, **branches)
            else:
                teacher, star = exact(settings.epsilon_star)
        # Columns come together from all devices only when they are needed.
        cosines = cosines_of(f, _after(g, teacher) if axes else g)
        if not options.both:
            with jax.named_scope("teacher_products"):
                target, _ = kernel.transport(star, a, b, cosines)
        with jax.named_scope("student_plan"):
            kernel = kernel_of(cosines)
            before = teacher if options.both else target
            student, state = plan(kernel, _after(epsilon, before), settings.init_v)
        with jax.named_scope("student_products"):
            if options.both:
                less_star = functools.partial(kernel.transport, state, a, b, cosines, star=star)
                whole = functools.partial(less_star, in_place=True)  # a TPU keeps blocks on chip
                moved, of_star = jax.lax.platform_dependent(default=less_star, cuda=whole)
            else:
                moved, _ = kernel.transport(state, a, b, cosines, minus=target)
                of_star = target.rows, target.columns
        teacher = measured(teacher, *of_star)
        student = measured(student, moved.rows + of_star[0], moved.columns + of_star[1])

        # <P*, log P*> - <P*, log P> = <P*, log A*> - <P, log A> + <P - P*, log A>, with the rows
        # and columns of P - P* as they are: where K/eps is large, what rounding adds to their
        # sums would not cancel otherwise.
        in_rows = jnp.sum(jnp.where(a > 0, moved.rows * state.p, 0.0))
        in_columns = jnp.sum(jnp.where(b > 0, moved.columns * state.q, 0.0))
        cross = jnp.sum(jnp.sum(moved.right * f, axis=1) * cosines.f_scale) / epsilon
        value = sharding.psum(in_rows + in_columns + cross - moved.log_moment, axes)
        solved = jnp.isfinite(student.error) & jnp.isfinite(teacher.error)
        value, factor = (jnp.where(solved, x, jnp.nan) for x in (value, 1 / epsilon))
        df, dg = _through_norm(moved.right, f, factor), _through_norm(moved.left, g, factor)
        return (df, dg, student.u, teacher.u), (value, student[1:], teacher[1:])

    with sharding.mesh_of(*features):
        rows = (*map(sharding.split, (f, g, z, w)), sharding.split(settings.log_a, -jnp.inf))
        (df, dg, *us), (value, *others) = sharding.shard_map(
            own_rows, rows, _split_columns(settings)
        )
        aux = _joined(len(f), len(g), us, others)
        df, dg = (sharding.like(sharding.join(dx, len(x)), x) for dx, x in ((df, f), (dg, g)))
    return (value, aux), (df, dg, features, settings)


def _split_columns(settings: Settings) -> Settings:
    """Settings for columns that are padded to equally many for each device."""
    v, v_star = (
        None if v is None else sharding.split(v) for v in (settings.init_v, settings.init_v_star)
    )
    log_b = sharding.split(settings.log_b, -jnp.inf)
    return settings._replace(log_b=log_b, init_v=v, init_v_star=v_star)


def _features_bwd(options: Options, residuals: Any, cotangents: Any) -> Any:
    df, dg, features, settings = residuals
    constants = _zeros((features.z, features.w))
    return Features(cotangents[0] * df, cotangents[0] * dg, *constants), _zeros(settings)


klot_of_features.defvjp(_features_fwd, _features_bwd)


# Calls outside of `jit` find their compiled program again.
_affinities = jax.jit(klot_of_affinities, static_argnums=0)
_features = jax.jit(klot_of_features, static_argnums=0)


# --- what users call ---------------------------------------------------------------------------


class _KlotOptions(TypedDict, total=False):
    """For type checkers."""

    epsilon: Any
    epsilon_star: Any
    marginals: str
    tolerance: Any
    max_iterations: int
    precision: jax.lax.PrecisionLike
    log_a: ArrayLike | None
    log_b: ArrayLike | None
    init_v: tuple[ArrayLike, ArrayLike] | None


class _EmbeddingsOptions(_KlotOptions, total=False):
    block_size: int | str | None


def _mass(marginals: str, n: int, m: int) -> int:
    checks.choice("marginals", marginals, MARGINALS)
    if marginals == "prob":
        return 1
    if n != m:
        raise checks.InputError(
            f"marginals: 'bistochastic' needs a square affinity but it is {n} x {m}; use 'prob'"
        )
    return n


def _settings(
    n: int,
    m: int,
    dtype: Any,
    epsilon: Any,
    epsilon_star: Any,
    tolerance: Any,
    log_a: ArrayLike | None,
    log_b: ArrayLike | None,
    init_v: tuple[ArrayLike, ArrayLike] | None,
) -> Settings:
    checks.positive(epsilon=epsilon, epsilon_star=epsilon_star)
    return Settings(
        jnp.asarray(epsilon, dtype),
        jnp.asarray(epsilon_star, dtype),
        jnp.asarray(tolerance, dtype),
        log_weights("log_a", log_a, n, dtype),
        log_weights("log_b", log_b, m, dtype),
        *pair("init_v", init_v, dtype),
    )


def _returned(value: Array, aux: KlotAux, return_aux: bool) -> Any:
    return (value, jax.lax.stop_gradient(aux)) if return_aux else value


@overload
def klot(
    K: ArrayLike,
    K_star: ArrayLike,
    *,
    return_aux: Literal[False] = ...,
    **options: Unpack[_KlotOptions],
) -> Float[Array, ""]: ...


@overload
def klot(
    K: ArrayLike, K_star: ArrayLike, *, return_aux: Literal[True], **options: Unpack[_KlotOptions]
) -> tuple[Float[Array, ""], KlotAux]: ...


def klot(
    K: Float[ArrayLike, "n m"],
    K_star: Float[ArrayLike, "n m"],
    *,
    epsilon: Any = 0.05,
    epsilon_star: Any = 0.005,
    marginals: str = "prob",
    log_a: Float[ArrayLike, " n"] | None = None,
    log_b: Float[ArrayLike, " m"] | None = None,
    tolerance: float = 1e-4,
    max_iterations: int = 2000,
    init_v: tuple[ArrayLike, ArrayLike] | None = None,
    precision: jax.lax.PrecisionLike = None,
    return_aux: bool = False,
) -> Any:
    """KLOT(K || K*) = KL(P* || P) with P = OT_eps(K), P* = OT_eps*(K*).

    The gradient in K is (P - P*)/eps in closed form: Sinkhorn is not differentiated, and beyond K
    and K* only four vectors are kept for the backward pass. `K_star`, the epsilons and the
    weights are constants: they receive no gradient. It is exact when both plans are converged,
    which `return_aux` shows.

    Args:
        K: student affinity, shape [n, m].
        K_star: teacher affinity, same shape.
        epsilon: regularisation of the student's plan.
        epsilon_star: regularisation of the teacher's plan.
        marginals: "prob", plans of total mass 1 as in the published code, or "bistochastic",
            rows and columns of mass 1 as in the paper: value and gradient are n times as large.
        log_a: log-weights of the rows (-inf pads); uniform by default.
        log_b: log-weights of the columns, likewise.
        tolerance: marginal error at which each solve stops, see `sinkhorn`.
        max_iterations: number of iterations at which each solve stops.
        init_v: (v, v_star), column log-scalings to start from, as `aux.student.v` holds them.
        precision: of all matrix products, "highest", "high" or "default"; static. By default
            sums over the kernel are "highest" and products of features `affinity.THREE_PASSES`.
        return_aux: also return a `KlotAux`: `aux.student.converged`, errors, iterations, scalings.

    Returns:
        The loss, or (loss, aux).

    >>> K, K_star = jnp.eye(3) * 0.2, jnp.eye(3)
    >>> loss, gradient = jax.jit(jax.value_and_grad(klot))(K, K_star)
    >>> float(loss), gradient[0].tolist()
    (0.036, [-0.236, 0.118, 0.118])
    """
    checks.static(max_iterations=max_iterations, precision=precision, return_aux=return_aux)
    checks.whole(1, max_iterations=max_iterations)
    affinity.check_affinities(K, K_star)
    k = affinity.as_float(K)
    n, m = k.shape
    mass = _mass(marginals, n, m)
    settings = _settings(n, m, k.dtype, epsilon, epsilon_star, tolerance, log_a, log_b, init_v)
    k_star = jnp.asarray(K_star, k.dtype)
    if not (log_a is None and log_b is None):
        k, k_star = (without_padding(x, settings.log_a, settings.log_b) for x in (k, k_star))
    options = Options(max_iterations, precision)
    arrays = sharding.vary_alike((k, k_star, settings))
    value, aux = reverse_only("klot", lambda: _affinities(options, *arrays))
    return _returned(mass * value, aux, return_aux)


def klot_reference(
    K: Float[Array, "n m"],
    K_star: Float[Array, "n m"],
    *,
    epsilon: Any = 0.05,
    epsilon_star: Any = 0.005,
    iterations: int = 100,
    symmetric: bool = True,
) -> Float[Array, ""]:
    """The paper's published loss, digit by digit: fixed iterations, final half-step.

    Value KL(P* || P), gradient (P - P*)/eps whether or not the plans have converged. For
    comparison; `klot` is the one to use.

    >>> print(klot_reference(jnp.eye(3) * 0.2, jnp.eye(3)).round(4))
    0.0359
    """
    constant = jax.lax.stop_gradient(K)
    plain = functools.partial(reference, iterations=iterations, symmetric=symmetric)
    plan = plain(constant, epsilon=epsilon)
    target = plain(jax.lax.stop_gradient(K_star), epsilon=epsilon_star)
    p, p_star = plan.matrix(), target.matrix()
    value = jnp.sum(p_star * (target.log_matrix() - plan.log_matrix()))
    surrogate = jnp.sum((p - p_star) / epsilon * K)
    return value + surrogate - jax.lax.stop_gradient(surrogate)


@overload
def klot_from_embeddings(
    f: ArrayLike,
    g: ArrayLike,
    f_star: ArrayLike,
    g_star: ArrayLike,
    *,
    return_aux: Literal[False] = ...,
    **options: Unpack[_EmbeddingsOptions],
) -> Float[Array, ""]: ...


@overload
def klot_from_embeddings(
    f: ArrayLike,
    g: ArrayLike,
    f_star: ArrayLike,
    g_star: ArrayLike,
    *,
    return_aux: Literal[True],
    **options: Unpack[_EmbeddingsOptions],
) -> tuple[Float[Array, ""], KlotAux]: ...


def klot_from_embeddings(
    f: Float[ArrayLike, "n d"],
    g: Float[ArrayLike, "m d"],
    f_star: Float[ArrayLike, "n e"],
    g_star: Float[ArrayLike, "m e"],
    *,
    epsilon: Any = 0.05,
    epsilon_star: Any = 0.005,
    marginals: str = "prob",
    log_a: Float[ArrayLike, " n"] | None = None,
    log_b: Float[ArrayLike, " m"] | None = None,
    tolerance: float = 1e-4,
    max_iterations: int = 2000,
    init_v: tuple[ArrayLike, ArrayLike] | None = None,
    block_size: int | str | None = None,
    precision: jax.lax.PrecisionLike = None,
    return_aux: bool = False,
) -> Any:
    """KLOT between the cosine affinities of features: `klot(cosine(f, g), cosine(f_star, g_star))`.

    Rows are L2-normalised inside. Each plan is multiplied with the features as soon as it is
    found, so that the backward pass keeps arrays of the features' size only, never n x m:

        d/df = (P - P*) g / eps,    d/dg = (P - P*)^T f / eps    (on normalised rows).

    Computation follows data: rows that are placed on a mesh, or a mesh in context, split all of it
    over the devices. Arrays made inside of `jit` alone show no mesh: use `jax.set_mesh` for them.
    Inside a `shard_map` every device has a problem of its own: `pmean` its loss. Zero rows have
    cosine 0 with all others, and no gradient.

    `f, g` are student features of shapes [n, d] and [m, d]; `f_star, g_star` those of the teacher
    for the same samples, [n, e] and [m, e], which receive no gradient. `block_size=None` keeps one
    n x m buffer; a number of rows streams, recomputing blocks of so many rows in every iteration,
    in memory O(n (d + block_size)); "auto" decides by the device's memory, and keeps two buffers
    where they fit, for half of the gradient's products. Value and gradients are the same. All
    other options are those of `klot`.

    >>> f, g = jnp.eye(3), jnp.eye(3) + 0.5
    >>> print(jax.jit(klot_from_embeddings)(f, g, f, g, epsilon_star=0.05).round(4))
    0.0
    """
    checks.static(
        max_iterations=max_iterations,
        precision=precision,
        block_size=block_size,
        return_aux=return_aux,
    )
    checks.whole(1, max_iterations=max_iterations)
    affinity.check_features(f, g, f_star, g_star)
    features = Features(*affinity.as_floats(f, g, f_star, g_star))
    n, m, dtype = len(features.f), len(features.g), features.f.dtype
    both = False
    if isinstance(block_size, str):
        checks.choice("block_size", block_size, ("auto",))
        with sharding.mesh_of(*features):
            rows = sharding.share(n)
            block_size = blocks.auto_block(rows, m, dtype.itemsize)
            both = rows == n and blocks.auto_block(2 * n, m, dtype.itemsize) is None
    checks.whole(1, or_none=True, block_size=block_size)
    mass = _mass(marginals, n, m)
    settings = _settings(n, m, dtype, epsilon, epsilon_star, tolerance, log_a, log_b, init_v)
    if not (log_a is None and log_b is None):
        features = Features(
            *(
                jnp.where(jnp.isneginf(weights)[:, None], 0.0, x)
                for x, weights in zip(features, (settings.log_a, settings.log_b) * 2, strict=True)
            )
        )
    options = Options(max_iterations, precision, block_size, both)
    arrays = sharding.vary_alike((features, settings))
    value, aux = reverse_only("klot_from_embeddings", lambda: _features(options, *arrays))
    return _returned(mass * value, aux, return_aux)


def klot_crossmodal(
    f: Float[ArrayLike, "n d"],
    g: Float[ArrayLike, "m d"],
    f_star: Float[ArrayLike, "p e"],
    g_star: Float[ArrayLike, "q e"],
    *,
    epsilon: Any = 0.05,
    epsilon_star: Any = 0.005,
    marginals: str = "prob",
    tolerance: float = 1e-4,
    max_iterations: int = 2000,
    precision: jax.lax.PrecisionLike = None,
    return_aux: bool = False,
) -> Any:
    """KL(T || OT_eps(K)) over pairs and unpaired rows at once, K = cosine(f, g).

    The first k = n - p = m - q rows of f and g are pairs, which T transports to themselves; the
    rest follow the teacher's plan P* = OT_eps*(cosine(f_star, g_star)):

        T = diag(s I / k, (1 - s) P*),    s = 2 k / (n + m),

    which has mass 1 and uniform marginals when n = m. The gradient in K is (P - T)/eps. Both
    matrices are kept for it: memory is a few n x m arrays.

    `f, g` are student features of shapes [n, d] and [m, d]; `f_star, g_star` those of the teacher
    for the unpaired rows, [p, e] and [q, e], which receive no gradient. The options are those of
    `klot`.

    >>> f = jnp.eye(3)
    >>> print(jax.jit(klot_crossmodal)(f, f, f[1:], f[1:]).round(4))
    0.0
    """
    f, g, f_star, g_star = affinity.as_floats(f, g, f_star, g_star)
    n, m, unpaired = len(f), len(g), (len(f_star), len(g_star))
    pairs = n - unpaired[0]
    if pairs != m - unpaired[1] or pairs < 1 or min(unpaired) < 1:
        raise checks.InputError(
            f"f, g: have {n} and {m} rows but f_star and g_star {unpaired}; pass teacher features "
            "of the unpaired rows, with as many pairs before them on either side"
        )
    affinity.check_widths(f, g, f_star, g_star)
    mass, share = _mass(marginals, n, m), 2 * pairs / (n + m)

    def weights(rest: int) -> Array:
        logs = math.log(share / pairs), math.log((1 - share) / rest)
        return jnp.repeat(jnp.array(logs, f.dtype), np.array([pairs, rest]))

    static = Options(max_iterations, precision)
    solved = functools.partial(
        sinkhorn, tolerance=tolerance, max_iterations=max_iterations, precision=static.sums
    )
    targets = jax.lax.stop_gradient((f_star, g_star))
    target = solved(affinity.cosine(*targets, precision=static.products), epsilon=epsilon_star)
    t = jax.scipy.linalg.block_diag(
        jnp.eye(pairs, dtype=f.dtype) * (share / pairs), (1 - share) * target.matrix()
    )
    k = affinity.cosine(f, g, precision=static.products)
    log_a, log_b = map(weights, unpaired)
    plan = solved(jax.lax.stop_gradient(k), epsilon=epsilon, log_a=log_a, log_b=log_b)
    log_p = plan.log_matrix()
    value = jnp.sum(jax.scipy.special.xlogy(t, t) - t * log_p)
    surrogate = jnp.sum((jnp.exp(log_p) - t) / epsilon * k)
    value = mass * (value + surrogate - jax.lax.stop_gradient(surrogate))
    value = jnp.where(jnp.isfinite(plan.error) & jnp.isfinite(target.error), value, jnp.nan)
    aux = KlotAux(*(Scalings(x.u, x.v, x.error, x.iterations, x.converged) for x in (plan, target)))
    return _returned(value, aux, return_aux)
