"""Divergences between a student's and a teacher's affinities: KLOT, CKA, generalised InfoNCE.

All take the student first; the teacher (`K_star`, `f_star`, `g_star`) receives no gradient.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sotalign_jax import affinity, checks, closed_form, kernels, sharding
from sotalign_jax.sinkhorn import (
    Plan,
    check_affinity,
    log_weights,
    reference,
    sinkhorn,
    without_padding,
)
from sotalign_jax.solver import Scalings

MARGINALS = ("prob", "bistochastic")


def _check_affinities(k: Any, k_star: Any) -> None:
    check_affinity("K", k)
    if jnp.shape(k) != jnp.shape(k_star):
        raise checks.InputError(
            f"K_star: has shape {jnp.shape(k_star)} but K has {jnp.shape(k)}; "
            "compute both affinities on the same rows and columns"
        )


def _check_features(f: Array, g: Array, f_star: Array, g_star: Array) -> None:
    for name, student, teacher in (("f", f, f_star), ("g", g, g_star)):
        check_affinity(name, student)
        if len(student) != len(teacher):
            raise checks.InputError(
                f"{name}_star: has {len(teacher)} rows but {name} has {len(student)}; "
                "student and teacher must embed the same samples"
            )
    for names, x, y in (("f and g", f, g), ("f_star and g_star", f_star, g_star)):
        if x.shape[1] != y.shape[1]:
            raise checks.InputError(
                f"{names}: have widths {x.shape[1]} and {y.shape[1]}; "
                "their cosine needs one shared space"
            )


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
) -> closed_form.Settings:
    checks.positive(epsilon=epsilon, epsilon_star=epsilon_star)
    return closed_form.Settings(
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
    _check_affinities(K, K_star)
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
    options = closed_form.Options(max_iterations)
    K_star = jnp.asarray(K_star, K.dtype)
    if not (log_a is None and log_b is None):
        K, K_star = (without_padding(k, settings.log_a, settings.log_b) for k in (K, K_star))
    value, aux = closed_form.reverse_only(
        "klot", lambda: closed_form.klot_of_affinities(options, K, K_star, settings)
    )
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
    features = closed_form.Features(*(x.astype(dtype) for x in arrays))
    n, m = len(features.f), len(features.g)
    _check_features(*features)
    if isinstance(block_size, str):
        checks.choice("block_size", block_size, ("auto",))
        block_size = kernels.auto_block(sharding.share(n), m, dtype.itemsize)
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
        features = closed_form.Features(
            *(
                jnp.where(jnp.isneginf(weights)[:, None], 0.0, x)
                for x, weights in zip(features, (settings.log_a, settings.log_b) * 2, strict=True)
            )
        )
    options = closed_form.Options(max_iterations, block_size)
    value, aux = closed_form.reverse_only(
        "klot_from_embeddings", lambda: closed_form.klot_of_features(options, features, settings)
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
    aux = closed_form.KlotAux(_scalings(plan), _scalings(target))
    return (value, jax.lax.stop_gradient(aux)) if return_aux else value


def _scalings(plan: Plan) -> Scalings:
    return Scalings(plan.u, plan.v, plan.error, plan.iterations)


def cka(
    K: Float[Array, "n m"],
    K_star: Float[Array, "n m"],
) -> Float[Array, ""]:
    """Loss 1 - CKA(K, K*) with CKA = <HKH, HK*H> / (||HKH|| ||HK*H||), H = I - 11^T/n.

    >>> print(cka(jnp.eye(3), 2 * jnp.eye(3) + 1).round(4))
    0.0
    """
    _check_affinities(K, K_star)

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
    _check_features(f, g, f_star, g_star)

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
    _check_affinities(K, K_star)
    checks.positive(epsilon=epsilon, epsilon_star=epsilon_star)
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
