"""Divergences between a student's and a teacher's affinities: KLOT, CKA, generalised InfoNCE.

All take the student first; the teacher (`K_star`, `f_star`, `g_star`) receives no gradient.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sotalign_jax import affinity, checks, sinkhorn
from sotalign_jax.kernels import DenseKernel, Kernel, StreamedKernel

MARGINALS = ("prob", "bistochastic")


class KlotAux(NamedTuple):
    """Scalings, marginal error and iterations of both plans (total mass 1)."""

    student: sinkhorn.Scalings
    teacher: sinkhorn.Scalings


class _Options(NamedTuple):
    """What is fixed at trace time."""

    tolerance: float
    max_iterations: int
    block_size: int | None = None


class _Settings(NamedTuple):
    """What may be traced: regularisations, log-weights and starting potentials."""

    epsilon: Any
    epsilon_star: Any
    log_a: Array
    log_b: Array
    init_v: Array | None
    init_v_star: Array | None


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


def _reverse_only(name: str, call: Callable[[], Any]) -> Any:
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


# --------------------------------------------------------------------------- from affinities


def _solve_both(
    student: Kernel,
    teacher: Kernel,
    settings: _Settings,
    options: _Options,
    ranges: tuple[Any, Any],
) -> KlotAux:
    def solve(kernel: Kernel, epsilon: Any, init_v: Array | None, span: Any) -> sinkhorn.Scalings:
        scalings, _ = sinkhorn.solve(
            kernel,
            settings.log_a,
            settings.log_b,
            epsilon=epsilon,
            tolerance=options.tolerance,
            max_iterations=options.max_iterations,
            affinity_range=span,
            init_v=init_v,
        )
        return scalings

    target = solve(teacher, settings.epsilon_star, settings.init_v_star, ranges[1])
    epsilon = _after(settings.epsilon, target)
    return KlotAux(solve(student, epsilon, settings.init_v, ranges[0]), target)


def _log_plan(k: Array, scalings: sinkhorn.Scalings, epsilon: Any) -> Array:
    return k / epsilon + scalings.u[:, None] + scalings.v[None, :]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _klot(options: _Options, k: Array, k_star: Array, settings: _Settings) -> tuple[Array, KlotAux]:
    ranges = sinkhorn.finite_range(k), sinkhorn.finite_range(k_star)
    kernels = DenseKernel(k), DenseKernel(k_star)
    aux = _solve_both(*kernels, settings, options, ranges)
    log_p = _log_plan(k, aux.student, settings.epsilon)
    log_p_star = _log_plan(k_star, aux.teacher, settings.epsilon_star)
    p_star = jnp.exp(log_p_star)
    return jnp.sum(jnp.where(p_star > 0, p_star * (log_p_star - log_p), 0.0)), aux


def _klot_fwd(options: _Options, k: Array, k_star: Array, settings: _Settings) -> Any:
    k = _first_order("klot", k)
    value, aux = _klot(options, k, k_star, settings)
    return (value, aux), (k, k_star, settings, aux)


def _klot_bwd(options: _Options, residuals: Any, cotangents: Any) -> Any:
    k, k_star, settings, aux = residuals
    p = jnp.exp(_log_plan(k, aux.student, settings.epsilon))
    p_star = jnp.exp(_log_plan(k_star, aux.teacher, settings.epsilon_star))
    gradient = cotangents[0] * (p - p_star) / settings.epsilon
    return gradient, jnp.zeros_like(k_star), _zeros(settings)


_klot.defvjp(_klot_fwd, _klot_bwd)


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
    log_a: Array | None,
    log_b: Array | None,
    init: tuple[Array, Array] | None,
) -> _Settings:
    sinkhorn.check_positive("epsilon", epsilon)
    sinkhorn.check_positive("epsilon_star", epsilon_star)
    return _Settings(
        jnp.asarray(epsilon, dtype),
        jnp.asarray(epsilon_star, dtype),
        sinkhorn.log_weights("log_a", log_a, n, dtype),
        sinkhorn.log_weights("log_b", log_b, m, dtype),
        *(init if init is not None else (None, None)),
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
    init: tuple[Array, Array] | None = None,
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
        init: (v, v_star), column log-scalings to start from, as `aux.student.v` holds them.
        return_aux: also return a `KlotAux` with errors, iterations and scalings.

    Returns:
        The loss, or (loss, aux).

    >>> K, K_star = jnp.eye(3) * 0.2, jnp.eye(3)
    >>> loss, gradient = jax.value_and_grad(klot)(K, K_star)
    >>> print(round(float(loss), 4), gradient[0].round(3))
    0.0359 [-0.235  0.117  0.117]
    """
    sinkhorn.check_affinity("K", K)
    if jnp.shape(K) != jnp.shape(K_star):
        raise checks.InputError(
            f"K_star: has shape {jnp.shape(K_star)} but K has {jnp.shape(K)}; "
            "compute both affinities on the same rows and columns"
        )
    K = affinity.as_float(K)
    n, m = K.shape
    settings = _settings(
        n,
        m,
        K.dtype,
        epsilon=epsilon,
        epsilon_star=epsilon_star,
        log_a=log_a,
        log_b=log_b,
        init=init,
    )
    options = _Options(tolerance, max_iterations)
    K_star = jnp.asarray(K_star, K.dtype)
    value, aux = _reverse_only("klot", lambda: _klot(options, K, K_star, settings))
    value = _mass(marginals, n, m) * value
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
    plan = sinkhorn.reference(constant, epsilon=epsilon, iterations=iterations, symmetric=symmetric)
    target = sinkhorn.reference(
        jax.lax.stop_gradient(K_star),
        epsilon=epsilon_star,
        iterations=iterations,
        symmetric=symmetric,
    )
    p, p_star = plan.matrix(), target.matrix()
    value = jnp.sum(p_star * (target.log_matrix() - plan.log_matrix()))
    surrogate = jnp.sum((p - p_star) / epsilon * K)
    return value + surrogate - jax.lax.stop_gradient(surrogate)


# --------------------------------------------------------------------------- from embeddings


class _Features(NamedTuple):
    """Unit rows of the student (f, g) and of the teacher (z, w)."""

    f: Array
    g: Array
    z: Array
    w: Array


def _pad_rows(x: Array, multiple: int, value: float = 0.0) -> Array:
    extra = -x.shape[0] % multiple
    return jnp.pad(x, [(0, extra)] + [(0, 0)] * (x.ndim - 1), constant_values=value)


def _kernel(f: Array, g: Array, block_size: int | None) -> Kernel:
    if block_size is None:
        return DenseKernel(f, g)
    return StreamedKernel(f, g, block_size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _klot_features(
    options: _Options, features: _Features, settings: _Settings
) -> tuple[Array, KlotAux]:
    return _klot_features_fwd(options, features, settings)[0]


def _klot_features_fwd(options: _Options, features: _Features, settings: _Settings) -> Any:
    """Both plans, one after the other, each multiplied with the features while it exists."""
    f, g, z, w = _first_order("klot_from_embeddings", features)
    a = jnp.exp(settings.log_a)

    def transport(x: Array, y: Array, epsilon: Any, init_v: Array | None) -> Any:
        kernel = _kernel(x, y, options.block_size)
        scalings, state = sinkhorn.solve(
            kernel,
            settings.log_a,
            settings.log_b,
            epsilon=epsilon,
            tolerance=options.tolerance,
            max_iterations=options.max_iterations,
            init_v=init_v,
        )
        return scalings, kernel.transport(state, a, g, f)

    teacher, target = transport(z, w, settings.epsilon_star, settings.init_v_star)
    student, moved = transport(f, g, _after(settings.epsilon, target), settings.init_v)
    # <P*, log P*> - <P*, log P>, with the rows of P* exact and its columns as they are.
    weighted = jnp.where(a > 0, a * (settings.log_a - student.u), 0.0)
    columns = jnp.where(target.columns > 0, target.columns * student.v, 0.0)
    cross = jnp.sum(target.right * f) / settings.epsilon
    value = target.log_moment + jnp.sum(weighted) - jnp.sum(columns) - cross
    df = (moved.right - target.right) / settings.epsilon
    dg = (moved.left - target.left) / settings.epsilon
    return (value, KlotAux(student, teacher)), (df, dg, features, settings)


def _klot_features_bwd(options: _Options, residuals: Any, cotangents: Any) -> Any:
    df, dg, features, settings = residuals
    constants = _zeros((features.z, features.w))
    return _Features(cotangents[0] * df, cotangents[0] * dg, *constants), _zeros(settings)


_klot_features.defvjp(_klot_features_fwd, _klot_features_bwd)


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
    init: tuple[Array, Array] | None = None,
    block_size: int | None = None,
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
        init: see `klot`.
        block_size: None keeps one n x m buffer; a number of rows streams, recomputing blocks of
            that many rows in every iteration, in memory O(n (d + block_size)).
        return_aux: see `klot`.

    Returns:
        The loss, or (loss, aux).

    >>> f, g = jnp.eye(3), jnp.eye(3) + 0.5
    >>> print(klot_from_embeddings(f, g, f, g, epsilon_star=0.05).round(4))
    0.0
    """
    features = tuple(map(affinity.as_float, (f, g, f_star, g_star)))
    dtype = jnp.result_type(*features)
    unit = _Features(*(affinity.l2_normalize(x.astype(dtype)) for x in features))
    n, m = unit.f.shape[0], unit.g.shape[0]
    for name, rows, other, count in (("f_star", unit.z, "f", n), ("g_star", unit.w, "g", m)):
        if rows.shape[0] != count:
            raise checks.InputError(
                f"{name}: has {rows.shape[0]} rows but {other} has {count}; "
                "student and teacher must embed the same samples"
            )
    for names, x, y in (("f and g", unit.f, unit.g), ("f_star and g_star", unit.z, unit.w)):
        if x.shape[1] != y.shape[1]:
            raise checks.InputError(
                f"{names}: have widths {x.shape[1]} and {y.shape[1]}; "
                "their cosine needs one shared space"
            )
    sinkhorn.check_affinity("f g^T", jax.ShapeDtypeStruct((n, m), dtype))
    settings = _settings(
        n,
        m,
        dtype,
        epsilon=epsilon,
        epsilon_star=epsilon_star,
        log_a=log_a,
        log_b=log_b,
        init=init,
    )
    if block_size is not None:
        if block_size < 1:
            raise checks.InputError(f"block_size: is {block_size}; pass at least 1, or None")
        padded_a = _pad_rows(settings.log_a, block_size, -jnp.inf)
        settings = settings._replace(log_a=padded_a)
        unit = unit._replace(f=_pad_rows(unit.f, block_size), z=_pad_rows(unit.z, block_size))
    options = _Options(tolerance, max_iterations, block_size)
    value, aux = _reverse_only(
        "klot_from_embeddings", lambda: _klot_features(options, unit, settings)
    )
    value = _mass(marginals, n, m) * value
    if not return_aux:
        return value
    aux = KlotAux(*(s._replace(u=s.u[:n]) for s in jax.lax.stop_gradient(aux)))
    return value, aux


# --------------------------------------------------------------------------- CKA and InfoNCE


def cka(
    K: Float[Array, "n m"],
    K_star: Float[Array, "n m"],
) -> Float[Array, ""]:
    """Loss 1 - CKA(K, K*) with CKA = <HKH, HK*H> / (||HKH|| ||HK*H||), H = I - 11^T/n.

    >>> print(cka(jnp.eye(3), 2 * jnp.eye(3) + 1).round(4))
    0.0
    """

    def centred(k: Array) -> Array:
        k = affinity.as_float(k)
        return k - k.mean(0) - k.mean(1, keepdims=True) + k.mean()

    k, k_star = centred(K), centred(jax.lax.stop_gradient(K_star))
    return 1.0 - jnp.sum(k * k_star) / (jnp.linalg.norm(k) * jnp.linalg.norm(k_star))


def cka_from_embeddings(
    f: Float[Array, "n d"],
    g: Float[Array, "m d"],
    f_star: Float[Array, "n e"],
    g_star: Float[Array, "m e"],
) -> Float[Array, ""]:
    """`cka` of cosine affinities in O(n d + d^2) memory.

    With K = F G^T, K* = Z W^T (unit rows, then columns centred):

        <HKH, HK*H> = sum (F^T Z) * (G^T W),    ||HKH||^2 = sum (F^T F) * (G^T G).

    >>> f, g = jnp.eye(3), jnp.eye(3) + 0.5
    >>> print(cka_from_embeddings(f, g, f, g).round(4))
    0.0
    """

    def centred(x: Array) -> Array:
        x = affinity.l2_normalize(x)
        return x - x.mean(0)

    f, g = centred(f), centred(g)
    z, w = centred(jax.lax.stop_gradient(f_star)), centred(jax.lax.stop_gradient(g_star))

    def inner(x: Array, y: Array, z: Array, w: Array) -> Array:
        return jnp.sum(affinity.dot(x.T, z) * affinity.dot(y.T, w))

    return 1.0 - inner(f, g, z, w) / jnp.sqrt(inner(f, g, f, g) * inner(z, w, z, w))


def infonce(
    K: Float[Array, "n m"],
    K_star: Float[Array, "n m"],
    *,
    epsilon: Any = 0.05,
    epsilon_star: Any = 0.005,
    targets: str = "soft",
    symmetric: bool = True,
) -> Float[Array, ""]:
    """Generalised InfoNCE, the mean over rows of KL(softmax(K*/eps*) || softmax(K/eps)).

    Args:
        K: student affinity, shape [n, m].
        K_star: teacher affinity, same shape; no gradient.
        epsilon: temperature of the student.
        epsilon_star: temperature of the teacher (soft targets).
        targets: "soft", or "hard": the teacher's nearest column, its limit for eps* -> 0.
        symmetric: average rows and columns.

    >>> K = jnp.array([[0.6, 0.1], [0.0, 0.5]])
    >>> print(infonce(K, K, epsilon=0.05, epsilon_star=0.05).round(4))
    0.0
    """
    checks.choice("targets", targets, ("soft", "hard"))
    k, k_star = affinity.as_float(K), affinity.as_float(jax.lax.stop_gradient(K_star))

    def rows(k: Array, k_star: Array) -> Array:
        log_s = jax.nn.log_softmax(k / epsilon, axis=1)
        if targets == "hard":
            nearest = jnp.argmax(k_star, axis=1)
            return -jnp.mean(jnp.take_along_axis(log_s, nearest[:, None], axis=1))
        log_t = jax.nn.log_softmax(k_star / epsilon_star, axis=1)
        return jnp.mean(jnp.sum(jnp.exp(log_t) * (log_t - log_s), axis=1))

    if symmetric:
        return (rows(k, k_star) + rows(k.T, k_star.T)) / 2
    return rows(k, k_star)
