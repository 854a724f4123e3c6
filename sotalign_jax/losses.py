"""Losses on features: pairwise sigmoid (SigLIP), symmetric InfoNCE, and soft labels.

The first two compare row i of `f` with row i of `g`; every other row is a negative. Features are
L2-normalised inside, so heads hand over their raw outputs.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sotalign_jax import checks
from sotalign_jax.ot import affinity, device, sharding
from sotalign_jax.ot.blocks import BUILD_ROWS, Block, over_rows

INITIAL_LOG_SCALE = math.log(20.0)
"""Start of the learned logit scale, kept as a logarithm."""
INITIAL_BIAS = -10.0
"""Start of the learned logit bias: about the log-odds of one positive among many negatives."""

NORMALIZATIONS = ("mean", "per_row")

Scalar = Float[Array, ""] | float


def siglip(
    f: Float[Array, "n d"],
    g: Float[Array, "m d"],
    *,
    log_scale: Scalar = INITIAL_LOG_SCALE,
    bias: Scalar = INITIAL_BIAS,
    negatives_f: Float[Array, "p d"] | None = None,
    negatives_g: Float[Array, "q d"] | None = None,
    normalization: str = "mean",
) -> Float[Array, ""]:
    """Pairwise sigmoid loss of paired features: `siglip_from_affinity(cos(f, g))`.

    With unpaired rows as negatives it is the average of two rectangles, f against [g; negatives_g]
    and g against [f; negatives_f], each reduced by itself. The logit scale is exp(log_scale).

    >>> f = jnp.eye(3)
    >>> print(f"{siglip(f, f):.6f} {siglip(f, -f, normalization='per_row'):.4f}")
    0.000045 30.0001
    """
    _check_rows(f, g)
    scale = jnp.exp(jnp.asarray(log_scale))

    def loss(anchors: Array, others: Array) -> Array:
        if len(anchors) * len(others) >= LARGE and not sharding.axes():
            checks.choice("normalization", normalization, NORMALIZATIONS)
            rows = affinity.l2_normalize(anchors), affinity.l2_normalize(others)
            numbers = (jnp.asarray(x, rows[0].dtype) for x in (scale, bias))
            count = len(anchors) * (len(others) if normalization == "mean" else 1)
            return _siglip_sum(*rows, *numbers) / count
        return siglip_from_affinity(
            affinity.cosine(anchors, others), scale=scale, bias=bias, normalization=normalization
        )

    if negatives_f is None and negatives_g is None:
        return loss(f, g)  # both halves are equal: one product is enough
    return _both_directions(loss, f, g, negatives_f, negatives_g)


LARGE = 2**25
"""Entries of an affinity from which on SigLIP computes it, and its gradient, by blocks of rows."""


@jax.custom_vjp
def _siglip_sum(f: Array, g: Array, scale: Array, bias: Array) -> Array:
    """sum_ij -log sigmoid(y_ij z_ij) of unit rows; no array of all z is kept for the gradient."""
    return _siglip_rows(f, g, scale, bias)[0]


def _siglip_rows(f: Array, g: Array, scale: Array, bias: Array) -> tuple[Array, Any]:
    """The sum and its gradients, each block of rows for both as long as it exists."""
    product = functools.partial(affinity.dot, precision=device.profile().siglip)

    def body(block: Block, sums: Any) -> Any:
        value, (df, dg, d_scale, d_bias) = sums
        rows, own = block.of(f), block.start + jnp.arange(block.size)
        cosines = product(rows, g.T)
        signs = jnp.where(own[:, None] == jnp.arange(len(g)), 1.0, -1.0)
        logits = signs * (scale * cosines + bias)
        fresh = jnp.where(block.fresh, 1.0, 0.0).astype(f.dtype)[:, None]
        slopes = -fresh * signs * jax.nn.sigmoid(-logits)
        df = block.add(df, scale * product(slopes, g))
        dg = dg + scale * product(slopes.T, rows)
        value = value - jnp.sum(fresh * jax.nn.log_sigmoid(logits))
        return value, (df, dg, d_scale + jnp.sum(slopes * cosines), d_bias + jnp.sum(slopes))

    nothing = jnp.zeros((), f.dtype), jax.tree.map(jnp.zeros_like, (f, g, scale, bias))
    return over_rows(len(f), 4 * BUILD_ROWS, body, nothing)


_siglip_sum.defvjp(_siglip_rows, lambda gradients, d: tuple(d * x for x in gradients))


def siglip_from_affinity(
    affinities: Float[Array, "n m"],
    *,
    scale: Scalar,
    bias: Scalar,
    positives: int | None = None,
    normalization: str = "mean",
) -> Float[Array, ""]:
    """Pairwise sigmoid loss of a cosine matrix K whose diagonal holds the positives.

    z_ij = s K_ij + b,  y_ij = +1 if i = j else -1,  l_ij = -log sigmoid(y_ij z_ij).

    Of the diagonal, the first `positives` entries are positive, or all. `normalization` is "mean",
    sum(l) / (n m) as in SAIL, or "per_row", sum(l) / n as in big_vision and open_clip.

    >>> print(siglip_from_affinity(jnp.zeros((2, 2)), scale=20.0, bias=0.0))  # log 2
    0.6931472
    """
    checks.choice("normalization", normalization, NORMALIZATIONS)
    affinities = affinity.as_float(affinities)
    rows, columns = affinities.shape
    positives = rows if positives is None else positives
    if min(rows, columns) < positives:
        raise checks.InputError(
            f"affinities: shape {affinities.shape} has no diagonal of {positives} positives; "
            "pass a larger matrix, or fewer positives"
        )
    dtype = affinities.dtype
    logits = affinities * jnp.asarray(scale, dtype) + jnp.asarray(bias, dtype)
    positive = jnp.eye(rows, columns, dtype=dtype) * (jnp.arange(columns) < positives)
    signs = 2.0 * positive - 1.0
    per_row = -jnp.sum(jax.nn.log_sigmoid(signs * logits), axis=1)
    return jnp.mean(per_row) / (columns if normalization == "mean" else 1)


def infonce(
    f: Float[Array, "n d"],
    g: Float[Array, "m d"],
    *,
    log_scale: Scalar = INITIAL_LOG_SCALE,
    negatives_f: Float[Array, "p d"] | None = None,
    negatives_g: Float[Array, "q d"] | None = None,
) -> Float[Array, ""]:
    """InfoNCE averaged over both directions, as in CLIP.

    1/2 [ CE(s cos(f, [g; negatives_g]), i) + CE(s cos(g, [f; negatives_f]), i) ], where CE(Z, i)
    is the mean over rows of logsumexp_j Z_ij - Z_ii and s = exp(log_scale). For a fixed
    temperature tau pass log_scale = -log tau.

    >>> print(f"{infonce(jnp.ones((4, 2)), jnp.ones((4, 2))):.4f}")  # log 4
    1.3863
    """
    _check_rows(f, g)
    scale = jnp.exp(jnp.asarray(log_scale))

    def loss(anchors: Array, others: Array) -> Array:
        cosines = affinity.cosine(anchors, others)
        logits = cosines * scale.astype(cosines.dtype)
        return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.diagonal(logits))

    return _both_directions(loss, f, g, negatives_f, negatives_g)


def soft_cross_entropy(
    queries: Float[Array, "n d"],
    keys: Float[Array, "m d"],
    labels: Float[Array, "n m"],
    *,
    log_scale: Scalar = INITIAL_LOG_SCALE,
) -> Float[Array, ""]:
    """Cross-entropy of a softmax over keys with labels that spread over several of them.

    mean_i -sum_j Q_ij log softmax_j(s cos(queries, keys))_ij, with s = exp(log_scale) and labels
    Q, one distribution over the keys a row.

    >>> print(soft_cross_entropy(jnp.ones((3, 2)), jnp.ones((4, 2)), jnp.full((3, 4), 0.25)))
    1.3862944
    """
    cosines = affinity.cosine(queries, keys)
    if labels.shape != cosines.shape:
        raise checks.InputError(
            f"labels: have shape {labels.shape} but queries and keys need {cosines.shape}; pass "
            "one distribution over the keys for each query"
        )
    logits = cosines * jnp.exp(jnp.asarray(log_scale, cosines.dtype))
    return -jnp.mean(jnp.sum(labels * jax.nn.log_softmax(logits, axis=1), axis=1))


def _both_directions(
    loss: Callable[[Array, Array], Array], f: Array, g: Array, *negatives: Array | None
) -> Array:
    """1/2 [loss(f, [g; negatives_g]) + loss(g, [f; negatives_f])]."""

    def joined(paired: Array, unpaired: Array | None) -> Array:
        if unpaired is None:
            return paired
        return jnp.concatenate([affinity.as_float(paired), affinity.as_float(unpaired)])

    negatives_f, negatives_g = negatives
    return 0.5 * (loss(f, joined(g, negatives_g)) + loss(g, joined(f, negatives_f)))


def _check_rows(f: Array, g: Array) -> None:
    if f.shape != g.shape:
        raise checks.InputError(
            f"features: f has shape {f.shape} but g has {g.shape}; row i of one belongs to row i "
            "of the other"
        )


# --- divergences between a student's and a teacher's affinities; klot is in ot ---


def cka(K: Float[Array, "n m"], K_star: Float[Array, "n m"]) -> Float[Array, ""]:
    """Loss 1 - CKA(K, K*) with CKA = <HKH, HK*H> / (||HKH|| ||HK*H||), H = I - 11^T/n.

    >>> print(cka(jnp.eye(3), 2 * jnp.eye(3) + 1).round(4))
    0.0
    """
    affinity.check_affinities(K, K_star)

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

    With K = F G^T, K* = F* G*^T (unit rows, then columns centred):

        <HKH, HK*H> = sum (F^T F*) * (G^T G*),    ||HKH||^2 = sum (F^T F) * (G^T G).

    >>> f, g = jnp.eye(3), jnp.eye(3) + 0.5
    >>> print(cka_from_embeddings(f, g, f, g).round(4))
    0.0
    """
    affinity.check_features(f, g, f_star, g_star)

    def centred(x: Array) -> Array:
        x = affinity.l2_normalize(x)
        return x - x.mean(0)

    student = centred(f), centred(g)
    teacher = centred(jax.lax.stop_gradient(f_star)), centred(jax.lax.stop_gradient(g_star))

    def inner(one: tuple[Array, Array], other: tuple[Array, Array]) -> Array:
        return jnp.sum(affinity.dot(one[0].T, other[0]) * affinity.dot(one[1].T, other[1]))

    norms = jnp.sqrt(inner(student, student) * inner(teacher, teacher))
    return 1.0 - inner(student, teacher) / norms


def infonce_divergence(
    K: Float[Array, "n m"],
    K_star: Float[Array, "n m"],
    *,
    epsilon: Any = 0.05,
    epsilon_star: Any = 0.005,
    targets: str = "soft",
    symmetric: bool = True,
) -> Float[Array, ""]:
    """Generalised InfoNCE, the mean over rows of KL(softmax(K*/eps*) || softmax(K/eps)).

    `targets` are "soft", or "hard": the teacher's nearest column, the limit for eps* -> 0.
    `symmetric` averages rows and columns. K*, the teacher's affinity, gets no gradient.

    >>> K = jnp.array([[0.6, 0.1], [0.0, 0.5]])
    >>> print(infonce_divergence(K, K, epsilon=0.05, epsilon_star=0.05).round(4))
    0.0
    """
    checks.choice("targets", targets, ("soft", "hard"))
    affinity.check_affinities(K, K_star)
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
