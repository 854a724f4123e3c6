"""Contrastive losses on features, and divergences between two affinities.

In `siglip` and `infonce`, row i of `f` and row i of `g` are a positive pair, and all other pairs
are negatives. Features are L2-normalised inside, so heads pass their raw outputs. `cka` and
`infonce_divergence` compare a student's affinity with a teacher's, as `klot` does.

References:
    X. Zhai et al., "Sigmoid loss for language image pre-training", ICCV 2023 (SigLIP).
    A. van den Oord et al., "Representation learning with contrastive predictive coding", 2018
    (InfoNCE).
    A. Radford et al., "Learning transferable visual models from natural language supervision", ICML
    2021 (CLIP).
    S. Kornblith et al., "Similarity of neural network representations revisited", ICML 2019 (CKA).
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
"""Initial logarithm of the learned logit scale, as in SAIL."""
INITIAL_BIAS = -10.0
"""Initial logit bias, as in SigLIP. It is close to the log-odds of one positive among many
negatives, so that the first steps need not correct for the imbalance."""
NORMALIZATIONS = ("mean", "per_row")
"""Choices of `normalization`: sum(l) / (n m), or sum(l) / n. See docs/paper.md."""
# `siglip` streams affinities with at least this many entries, 128 MiB in float32.
_STREAMED_ENTRIES = 2**25

_Scalar = Float[Array, ""] | float


def siglip(
    f: Float[Array, "n d"],
    g: Float[Array, "m d"],
    *,
    log_scale: _Scalar = INITIAL_LOG_SCALE,
    bias: _Scalar = INITIAL_BIAS,
    negatives_f: Float[Array, "p d"] | None = None,
    negatives_g: Float[Array, "q d"] | None = None,
    normalization: str = "mean",
) -> Float[Array, ""]:
    """Computes the pairwise sigmoid loss of paired features.

    The loss is `siglip_from_affinity(cosine(f, g))`. With negatives it is the average of the losses
    of two rectangles, f against [g; negatives_g] and g against [f; negatives_f]. Large affinities
    are computed in blocks of rows, and are not kept for the gradient.

    Args:
        f: Features of the first modality, shape [n, d].
        g: Features of the second modality, shape [n, d]. Row i belongs to row i of f.
        log_scale: Logarithm of the logit scale.
        bias: Logit bias.
        negatives_f: Unpaired features of the first modality, shape [p, d].
        negatives_g: Unpaired features of the second modality, shape [q, d].
        normalization: "mean" over all entries as in SAIL, or "per_row" as in big_vision.

    Returns:
        The loss.

    Raises:
        InputError: f and g differ in shape, or `normalization` is unknown.

    Example:
        >>> f = jnp.eye(3)
        >>> print(f"{siglip(f, f):.6f} {siglip(f, -f, normalization='per_row'):.4f}")
        0.000045 30.0001

    References:
        X. Zhai et al., "Sigmoid loss for language image pre-training", ICCV 2023.
    """
    _check_rows(f, g)
    checks.choice("normalization", normalization, NORMALIZATIONS)
    scale = jnp.exp(jnp.asarray(log_scale))

    def loss(anchors: Array, others: Array) -> Array:
        # On a mesh the affinity is split over the devices, and blocks would cut across shards.
        if len(anchors) * len(others) >= _STREAMED_ENTRIES and not sharding.axes():
            rows = affinity.l2_normalize(anchors), affinity.l2_normalize(others)
            numbers = (jnp.asarray(x, rows[0].dtype) for x in (scale, bias))
            count = len(anchors) * (len(others) if normalization == "mean" else 1)
            return _siglip_sum(*rows, *numbers) / count
        return siglip_from_affinity(
            affinity.cosine(anchors, others), scale=scale, bias=bias, normalization=normalization
        )

    if negatives_f is None and negatives_g is None:
        return loss(f, g)  # the same in both directions
    return _both_directions(loss, f, g, negatives_f, negatives_g)


@jax.custom_vjp
def _siglip_sum(f: Array, g: Array, scale: Array, bias: Array) -> Array:
    """Computes sum_ij -log sigmoid(y_ij z_ij) of unit rows without an n x m residual."""
    return _siglip_rows(f, g, scale, bias)[0]


def _siglip_rows(f: Array, g: Array, scale: Array, bias: Array) -> tuple[Array, Any]:
    """Computes the sum and all gradients in one pass, so that each block is computed once."""
    product = functools.partial(affinity.dot, precision=device.profile().siglip)

    def body(block: Block, sums: Any) -> Any:
        value, (df, dg, d_scale, d_bias) = sums
        rows, own = block.of(f), block.start + jnp.arange(block.size)
        cosines = product(rows, g.T)
        signs = jnp.where(own[:, None] == jnp.arange(len(g)), 1.0, -1.0)
        logits = signs * (scale * cosines + bias)
        # The last block may overlap the one before. Its rows that were visited get weight zero.
        fresh = jnp.where(block.fresh, 1.0, 0.0).astype(f.dtype)[:, None]
        # The derivative of -log sigmoid(z) is -sigmoid(-z).
        slopes = -fresh * signs * jax.nn.sigmoid(-logits)
        df = block.add(df, scale * product(slopes, g))
        dg = dg + scale * product(slopes.T, rows)
        value = value - jnp.sum(fresh * jax.nn.log_sigmoid(logits))
        return value, (df, dg, d_scale + jnp.sum(slopes * cosines), d_bias + jnp.sum(slopes))

    nothing = jnp.zeros((), f.dtype), jax.tree.map(jnp.zeros_like, (f, g, scale, bias))
    # Every block reads and writes all of dg, so these blocks are larger than those of a kernel.
    return over_rows(len(f), 4 * BUILD_ROWS, body, nothing)


_siglip_sum.defvjp(_siglip_rows, lambda gradients, d: tuple(d * x for x in gradients))


def siglip_from_affinity(
    affinities: Float[Array, "n m"],
    *,
    scale: _Scalar,
    bias: _Scalar,
    positives: int | None = None,
    normalization: str = "mean",
) -> Float[Array, ""]:
    """Computes the pairwise sigmoid loss of an affinity whose diagonal holds the positives.

    z_ij = s K_ij + b,  y_ij = +1 if i = j else -1,  l_ij = -log sigmoid(y_ij z_ij).

    Args:
        affinities: Cosines K, shape [n, m].
        scale: Logit scale s.
        bias: Logit bias b.
        positives: Number of leading diagonal entries that are positive. By default all n.
        normalization: "mean", sum(l) / (n m) as in SAIL, or "per_row", sum(l) / n as in big_vision
            and open_clip.

    Returns:
        The loss.

    Raises:
        InputError: The diagonal is shorter than `positives`, or `normalization` is unknown.

    Example:
        >>> print(siglip_from_affinity(jnp.zeros((2, 2)), scale=20.0, bias=0.0))  # log 2
        0.6931472

    References:
        X. Zhai et al., "Sigmoid loss for language image pre-training", ICCV 2023.
    """
    checks.choice("normalization", normalization, NORMALIZATIONS)
    affinities = affinity.as_float(affinities)
    rows, columns = affinities.shape
    positives = rows if positives is None else positives
    if min(rows, columns) < positives:
        raise checks.InputError(
            f"positives must be at most {min(rows, columns)}, the diagonal of an affinity of shape "
            f"{affinities.shape}, got {positives}"
        )
    dtype = affinities.dtype
    logits = affinities * jnp.asarray(scale, dtype) + jnp.asarray(bias, dtype)
    positive = jnp.eye(rows, columns, dtype=dtype) * (jnp.arange(columns) < positives)
    signs = 2.0 * positive - 1.0
    # `log_sigmoid` is accurate for large negative logits, where log(sigmoid(z)) is -inf.
    per_row = -jnp.sum(jax.nn.log_sigmoid(signs * logits), axis=1)
    return jnp.mean(per_row) / (columns if normalization == "mean" else 1)


def infonce(
    f: Float[Array, "n d"],
    g: Float[Array, "m d"],
    *,
    log_scale: _Scalar = INITIAL_LOG_SCALE,
    negatives_f: Float[Array, "p d"] | None = None,
    negatives_g: Float[Array, "q d"] | None = None,
) -> Float[Array, ""]:
    """Computes InfoNCE averaged over both directions, the loss of CLIP.

    1/2 [CE(s cos(f, [g; negatives_g])) + CE(s cos(g, [f; negatives_f]))], where CE(Z) is the mean
    over rows i of logsumexp_j Z_ij - Z_ii, and s = exp(log_scale).

    Args:
        f: Features of the first modality, shape [n, d].
        g: Features of the second modality, shape [n, d]. Row i belongs to row i of f.
        log_scale: Logarithm of the logit scale. For a fixed temperature tau pass -log tau.
        negatives_f: Unpaired features of the first modality, shape [p, d].
        negatives_g: Unpaired features of the second modality, shape [q, d].

    Returns:
        The loss.

    Raises:
        InputError: f and g differ in shape.

    Example:
        >>> print(f"{infonce(jnp.ones((4, 2)), jnp.ones((4, 2))):.4f}")  # log 4
        1.3863

    References:
        A. van den Oord et al., "Representation learning with contrastive predictive coding", 2018.
        A. Radford et al., "Learning transferable visual models from natural language supervision",
        ICML 2021, figure 3.
    """
    _check_rows(f, g)
    scale = jnp.exp(jnp.asarray(log_scale))

    def loss(anchors: Array, others: Array) -> Array:
        # Cast, because a float64 scale would make all logits float64.
        cosines = affinity.cosine(anchors, others)
        logits = cosines * scale.astype(cosines.dtype)
        return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.diagonal(logits))

    return _both_directions(loss, f, g, negatives_f, negatives_g)


def soft_cross_entropy(
    queries: Float[Array, "n d"],
    keys: Float[Array, "m d"],
    labels: Float[Array, "n m"],
    *,
    log_scale: _Scalar = INITIAL_LOG_SCALE,
) -> Float[Array, ""]:
    """Computes the cross-entropy between soft labels and a softmax over keys.

    mean_i -sum_j Q_ij log softmax_j(s cos(queries, keys))_ij, with s = exp(log_scale).

    Args:
        queries: Features, shape [n, d].
        keys: Features, shape [m, d].
        labels: Q, one distribution over the keys for each query, shape [n, m].
        log_scale: Logarithm of the logit scale.

    Returns:
        The loss.

    Raises:
        InputError: The shape of `labels` does not fit.

    Example:
        >>> print(soft_cross_entropy(jnp.ones((3, 2)), jnp.ones((4, 2)), jnp.full((3, 4), 0.25)))
        1.3862944

    References:
        S. Mo et al., "S-CLIP: semi-supervised vision-language learning using few specialist
        captions", NeurIPS 2023.
    """
    cosines = affinity.cosine(queries, keys)
    if labels.shape != cosines.shape:
        raise checks.InputError(
            f"labels must have shape {cosines.shape}, got {labels.shape}; pass one distribution "
            "over the keys for each query"
        )
    logits = cosines * jnp.exp(jnp.asarray(log_scale, cosines.dtype))
    return -jnp.mean(jnp.sum(labels * jax.nn.log_softmax(logits, axis=1), axis=1))


def _both_directions(
    loss: Callable[[Array, Array], Array],
    f: Array,
    g: Array,
    negatives_f: Array | None,
    negatives_g: Array | None,
) -> Array:
    """Computes 1/2 [loss(f, [g; negatives_g]) + loss(g, [f; negatives_f])]."""

    # Pairs come first, so that the positives are on the diagonal.
    def joined(paired: Array, unpaired: Array | None) -> Array:
        if unpaired is None:
            return paired
        return jnp.concatenate([affinity.as_float(paired), affinity.as_float(unpaired)])

    return 0.5 * (loss(f, joined(g, negatives_g)) + loss(g, joined(f, negatives_f)))


def _check_rows(f: Array, g: Array) -> None:
    """Raises InputError unless f and g can be paired row by row."""
    if f.shape != g.shape:
        raise checks.InputError(
            f"g has shape {g.shape} but f has shape {f.shape}; row i of one must belong to row i "
            "of the other"
        )


# --- divergences between a student's and a teacher's affinities ----------------------------------


def cka(K: Float[Array, "n m"], K_star: Float[Array, "n m"]) -> Float[Array, ""]:
    """Computes 1 - CKA(K, K*), where CKA is the cosine of the centred affinities.

        CKA(K, K*) = <HKH, HK*H> / (||HKH|| ||HK*H||),    H = I - 11^T/n

    Args:
        K: Student affinity, shape [n, m].
        K_star: Teacher affinity, shape [n, m]. It receives no gradient.

    Returns:
        The loss. It is 0 if K* is a multiple of K plus constants per row and per column.

    Raises:
        InputError: The shapes differ.

    Example:
        >>> print(cka(jnp.eye(3), 2 * jnp.eye(3) + 1).round(4))
        0.0

    References:
        S. Kornblith et al., "Similarity of neural network representations revisited", ICML 2019.
    """
    affinity.check_affinities(K, K_star)

    def centred(k: Array) -> Array:
        k = affinity.as_float(k)
        # H K H, without the matrix H.
        return k - k.mean(0) - k.mean(1, keepdims=True) + k.mean()

    k, k_star = centred(K), centred(jax.lax.stop_gradient(K_star))
    return 1.0 - jnp.sum(k * k_star) / (jnp.linalg.norm(k) * jnp.linalg.norm(k_star))


def cka_from_embeddings(
    f: Float[Array, "n d"],
    g: Float[Array, "m d"],
    f_star: Float[Array, "n e"],
    g_star: Float[Array, "m e"],
) -> Float[Array, ""]:
    """Computes `cka(cosine(f, g), cosine(f_star, g_star))` in O(n d + d^2) memory.

    With unit rows minus their mean as rows of F and G, and likewise of F* and G*:

        <HKH, HK*H> = sum (F^T F*) * (G^T G*),    ||HKH||^2 = sum (F^T F) * (G^T G).

    Args:
        f: Student features of the rows, shape [n, d].
        g: Student features of the columns, shape [m, d].
        f_star: Teacher features of the rows, shape [n, e]. They receive no gradient.
        g_star: Teacher features of the columns, shape [m, e]. They receive no gradient.

    Returns:
        The loss.

    Raises:
        InputError: The shapes do not fit.

    Example:
        >>> f, g = jnp.eye(3), jnp.eye(3) + 0.5
        >>> print(cka_from_embeddings(f, g, f, g).round(4))
        0.0

    References:
        S. Kornblith et al., "Similarity of neural network representations revisited", ICML 2019.
    """
    affinity.check_features(f, g, f_star, g_star)

    def centred(x: Array) -> Array:
        # F G^T of centred F and G has centred rows and columns.
        x = affinity.l2_normalize(x)
        return x - x.mean(0)

    student = centred(f), centred(g)
    teacher = centred(jax.lax.stop_gradient(f_star)), centred(jax.lax.stop_gradient(g_star))

    def inner(one: tuple[Array, Array], other: tuple[Array, Array]) -> Array:
        return jnp.sum(affinity.dot(one[0].T, other[0]) * affinity.dot(one[1].T, other[1]))

    # Products of d x e matrices replace those of n x m matrices.
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
    """Computes the mean over rows of KL(softmax(K*/eps*) || softmax(K/eps)).

    This is InfoNCE with the teacher's softmax as soft labels. Unlike plans of `klot`, which have
    given row and column sums, a softmax normalises only rows or only columns.

    Args:
        K: Student affinity, shape [n, m].
        K_star: Teacher affinity, shape [n, m]. It receives no gradient.
        epsilon: Temperature of the student.
        epsilon_star: Temperature of the teacher.
        targets: "soft", or "hard" for the teacher's nearest column, the limit for eps* -> 0.
        symmetric: True to average over rows and columns. See docs/paper.md for both options.

    Returns:
        The loss.

    Raises:
        InputError: The shapes differ, or an option is invalid.

    Example:
        >>> K = jnp.array([[0.6, 0.1], [0.0, 0.5]])
        >>> print(infonce_divergence(K, K, epsilon=0.05, epsilon_star=0.05).round(4))
        0.0

    References:
        A. van den Oord et al., "Representation learning with contrastive predictive coding", 2018.
        G. Hinton, O. Vinyals and J. Dean, "Distilling the knowledge in a neural network", 2015.
    """
    checks.choice("targets", targets, ("soft", "hard"))
    affinity.check_affinities(K, K_star)
    checks.positive(epsilon=epsilon, epsilon_star=epsilon_star)
    k, k_star = affinity.as_float(K), affinity.as_float(jax.lax.stop_gradient(K_star))

    def rows(k: Array, k_star: Array) -> Array:
        log_s = jax.nn.log_softmax(k / epsilon, axis=1)
        if targets == "hard":
            # The entropy of one-hot targets is 0, so the divergence is the cross-entropy.
            nearest = jnp.argmax(k_star, axis=1)
            return -jnp.mean(jnp.take_along_axis(log_s, nearest[:, None], axis=1))
        log_t = jax.nn.log_softmax(k_star / epsilon_star, axis=1)
        return jnp.mean(jnp.sum(jnp.exp(log_t) * (log_t - log_s), axis=1))

    if symmetric:
        return (rows(k, k_star) + rows(k.T, k_star.T)) / 2
    return rows(k, k_star)
