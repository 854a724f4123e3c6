"""KLOT's value and gradient in closed form: the rules that replace differentiating Sinkhorn.

From an affinity, d KLOT/dK = (P - P*)/eps. From features of unit rows F, G with K = F G^T,

    d/dF = (P - P*) G / eps,    d/dG = (P - P*)^T F / eps,

and each plan is multiplied with the features as soon as it is found, so that the backward pass
keeps arrays of the features' size only, and the two plans share one n x m buffer. With a mesh in
context its rows are split over the devices, see `sharding`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sotalign_jax import checks
from sotalign_jax.ot import affinity, blocks, sharding
from sotalign_jax.ot.affinity import NORM_FLOOR
from sotalign_jax.ot.kernel import Cosines, Kernel, Matrix
from sotalign_jax.ot.sinkhorn import Plan, log_weights, reference, sinkhorn, without_padding
from sotalign_jax.ot.solver import Scalings, finite_range, solve

MARGINALS = ("prob", "bistochastic")


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


# --- what users call ---


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
    *,
    epsilon: Any,
    epsilon_star: Any,
    tolerance: Any,
    log_a: Array | None,
    log_b: Array | None,
    init_v: tuple[Array, Array] | None,
) -> Settings:
    checks.positive(epsilon=epsilon, epsilon_star=epsilon_star)
    return Settings(
        jnp.asarray(epsilon, dtype),
        jnp.asarray(epsilon_star, dtype),
        jnp.asarray(tolerance, dtype),
        log_weights("log_a", log_a, n, dtype),
        log_weights("log_b", log_b, m, dtype),
        *(init_v if init_v is not None else (None, None)),
    )


def klot(
    K: Float[Array, "n m"],
    K_star: Float[Array, "n m"],
    *,
    epsilon: Any = 0.05,
    epsilon_star: Any = 0.005,
    marginals: str = "prob",
    log_a: Float[Array, " n"] | None = None,
    log_b: Float[Array, " m"] | None = None,
    tolerance: float = 1e-4,
    max_iterations: int = 2000,
    init_v: tuple[Array, Array] | None = None,
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
        return_aux: also return a `KlotAux` with errors, iterations and scalings.

    Returns:
        The loss, or (loss, aux).

    >>> K, K_star = jnp.eye(3) * 0.2, jnp.eye(3)
    >>> loss, gradient = jax.value_and_grad(klot)(K, K_star)
    >>> float(loss), gradient[0].tolist()
    (0.036, [-0.236, 0.118, 0.118])
    """
    affinity.check_affinities(K, K_star)
    K = affinity.as_float(K)
    n, m = K.shape
    mass = _mass(marginals, n, m)
    settings = _settings(
        n,
        m,
        K.dtype,
        epsilon=epsilon,
        epsilon_star=epsilon_star,
        tolerance=tolerance,
        log_a=log_a,
        log_b=log_b,
        init_v=init_v,
    )
    options = Options(max_iterations)
    K_star = jnp.asarray(K_star, K.dtype)
    if not (log_a is None and log_b is None):
        K, K_star = (without_padding(k, settings.log_a, settings.log_b) for k in (K, K_star))
    value, aux = reverse_only("klot", lambda: klot_of_affinities(options, K, K_star, settings))
    value = mass * value
    return (value, jax.lax.stop_gradient(aux)) if return_aux else value


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
    plan = reference(constant, epsilon=epsilon, iterations=iterations, symmetric=symmetric)
    target = reference(
        jax.lax.stop_gradient(K_star),
        epsilon=epsilon_star,
        iterations=iterations,
        symmetric=symmetric,
    )
    p, p_star = plan.matrix(), target.matrix()
    value = jnp.sum(p_star * (target.log_matrix() - plan.log_matrix()))
    surrogate = jnp.sum((p - p_star) / epsilon * K)
    return value + surrogate - jax.lax.stop_gradient(surrogate)


def klot_from_embeddings(
    f: Float[Array, "n d"],
    g: Float[Array, "m d"],
    f_star: Float[Array, "n e"],
    g_star: Float[Array, "m e"],
    *,
    epsilon: Any = 0.05,
    epsilon_star: Any = 0.005,
    marginals: str = "prob",
    log_a: Float[Array, " n"] | None = None,
    log_b: Float[Array, " m"] | None = None,
    tolerance: float = 1e-4,
    max_iterations: int = 2000,
    init_v: tuple[Array, Array] | None = None,
    block_size: int | str | None = None,
    return_aux: bool = False,
) -> Any:
    """KLOT between the cosine affinities of features: `klot(cosine(f, g), cosine(f_star, g_star))`.

    Rows are L2-normalised inside. Each plan is multiplied with the features as soon as it is
    found, so that the backward pass keeps arrays of the features' size only, never n x m:

        d/df = (P - P*) g / eps,    d/dg = (P - P*)^T f / eps    (on normalised rows).

    Args:
        f: student features of the first modality, shape [n, d].
        g: student features of the second modality, shape [m, d].
        f_star: teacher features of the same n samples, shape [n, e]; no gradient.
        g_star: teacher features of the same m samples, shape [m, e]; no gradient.
        epsilon: see `klot`, as for all options not listed here.
        epsilon_star: see `klot`.
        marginals: see `klot`.
        log_a: see `klot`.
        log_b: see `klot`.
        tolerance: see `klot`.
        max_iterations: see `klot`.
        init_v: see `klot`.
        block_size: None keeps one n x m buffer; a number of rows streams, recomputing blocks of
            that many rows in every iteration, in memory O(n (d + block_size)); "auto" decides by
            the device's memory. Value and gradients are the same.
        return_aux: see `klot`.

    Returns:
        The loss, or (loss, aux).

    >>> f, g = jnp.eye(3), jnp.eye(3) + 0.5
    >>> print(klot_from_embeddings(f, g, f, g, epsilon_star=0.05).round(4))
    0.0
    """
    arrays = tuple(map(affinity.as_float, (f, g, f_star, g_star)))
    dtype = jnp.result_type(*arrays)
    features = Features(*(x.astype(dtype) for x in arrays))
    n, m = len(features.f), len(features.g)
    affinity.check_features(*features)
    if isinstance(block_size, str):
        checks.choice("block_size", block_size, ("auto",))
        block_size = blocks.auto_block(sharding.share(n), m, dtype.itemsize)
    checks.whole(1, or_none=True, block_size=block_size)
    mass = _mass(marginals, n, m)
    settings = _settings(
        n,
        m,
        dtype,
        epsilon=epsilon,
        epsilon_star=epsilon_star,
        tolerance=tolerance,
        log_a=log_a,
        log_b=log_b,
        init_v=init_v,
    )
    if not (log_a is None and log_b is None):
        features = Features(
            *(
                jnp.where(jnp.isneginf(weights)[:, None], 0.0, x)
                for x, weights in zip(features, (settings.log_a, settings.log_b) * 2, strict=True)
            )
        )
    options = Options(max_iterations, block_size)
    value, aux = reverse_only(
        "klot_from_embeddings", lambda: klot_of_features(options, features, settings)
    )
    value = mass * value
    return (value, jax.lax.stop_gradient(aux)) if return_aux else value


def klot_crossmodal(
    f: Float[Array, "n d"],
    g: Float[Array, "m d"],
    f_star: Float[Array, "p e"],
    g_star: Float[Array, "q e"],
    *,
    epsilon: Any = 0.05,
    epsilon_star: Any = 0.005,
    marginals: str = "prob",
    tolerance: float = 1e-4,
    max_iterations: int = 2000,
    return_aux: bool = False,
) -> Any:
    """KL(T || OT_eps(K)) over pairs and unpaired rows at once, K = cosine(f, g).

    The first k = n - p = m - q rows of f and g are pairs, which T transports to themselves; the
    rest follow the teacher's plan P* = OT_eps*(cosine(f_star, g_star)):

        T = diag(s I / k, (1 - s) P*),    s = 2 k / (n + m),

    which has mass 1 and uniform marginals when n = m. The gradient in K is (P - T)/eps. Both
    matrices are kept for it: memory is a few n x m arrays.

    Args:
        f: student features of the first modality, pairs first, shape [n, d].
        g: student features of the second modality, pairs first, shape [m, d].
        f_star: teacher features of the unpaired rows of f, shape [p, e]; no gradient.
        g_star: teacher features of the unpaired rows of g, shape [q, e]; no gradient.
        epsilon: see `klot`, as for all other options.
        epsilon_star: see `klot`.
        marginals: see `klot`.
        tolerance: see `klot`.
        max_iterations: see `klot`.
        return_aux: see `klot`.

    Returns:
        The loss, or (loss, aux).

    >>> f = jnp.eye(3)
    >>> print(klot_crossmodal(f, f, f[1:], f[1:]).round(4))
    0.0
    """
    n, m, unpaired = len(f), len(g), (len(f_star), len(g_star))
    pairs = n - unpaired[0]
    if pairs != m - unpaired[1] or pairs < 1 or min(unpaired) < 1:
        raise checks.InputError(
            f"f, g: have {n} and {m} rows but f_star and g_star {unpaired}; pass teacher features "
            "of the unpaired rows, with as many pairs before them on either side"
        )
    mass, share = _mass(marginals, n, m), 2 * pairs / (n + m)

    def weights(rest: int) -> Array:
        logs = math.log(share / pairs), math.log((1 - share) / rest)
        return jnp.concatenate([jnp.full(pairs, logs[0]), jnp.full(rest, logs[1])])

    options: dict[str, Any] = {"tolerance": tolerance, "max_iterations": max_iterations}
    k_star = affinity.cosine(*jax.lax.stop_gradient((f_star, g_star)))
    target = sinkhorn(k_star, epsilon=epsilon_star, **options)
    t = jax.scipy.linalg.block_diag(
        jnp.eye(pairs) * (share / pairs), (1 - share) * target.matrix()
    ).astype(k_star.dtype)
    k = affinity.cosine(f, g)
    plan = sinkhorn(
        jax.lax.stop_gradient(k),
        epsilon=epsilon,
        log_a=weights(unpaired[0]),
        log_b=weights(unpaired[1]),
        **options,
    )
    log_p = plan.log_matrix()
    value = jnp.sum(jax.scipy.special.xlogy(t, t) - t * log_p)
    surrogate = jnp.sum((jnp.exp(log_p) - t) / epsilon * k)
    value = mass * (value + surrogate - jax.lax.stop_gradient(surrogate))
    aux = KlotAux(_scalings(plan), _scalings(target))
    return (value, jax.lax.stop_gradient(aux)) if return_aux else value


def _scalings(plan: Plan) -> Scalings:
    return Scalings(plan.u, plan.v, plan.error, plan.iterations)
