"""S-CLIP with pseudo-labels of captions: unpaired rows get soft labels over the batch's pairs.

References:
    S. Mo et al., "S-CLIP: semi-supervised vision-language learning using few specialist captions",
    NeurIPS 2023.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sotalign_jax import checks, losses
from sotalign_jax.heads import Heads
from sotalign_jax.methods import base
from sotalign_jax.ot import affinity
from sotalign_jax.ot.sinkhorn import reference
from sotalign_jax.sampling import Batch

LABELS = ("hard", "softmax", "ot")
"""Choices of `labels`."""
SPACES = ("unimodal", "shared")
"""Choices of `space`."""


@dataclasses.dataclass(frozen=True)
class SCLIP(base.Objective):
    """Trains on InfoNCE of the pairs + w_image CE(f(X), g(B); Q_x) + w_text CE(g(Y), f(A); Q_y).

    Row q of Q_x compares the unpaired image q with the paired images A. It is used as a soft label
    over their captions B, see `pseudo_labels`. CE is `losses.soft_cross_entropy`. All logits are
    cosines times the learned scale s = exp(log_scale), without a bias. If the weight of a modality
    is positive, its unpaired rows are also negatives in InfoNCE.

    Attributes:
        weight_text: Weight of the labels of unpaired y, 0 to leave them out.
        weight_image: Weight of the labels of unpaired x, 0 to leave them out.
        labels: "ot", "softmax" or "hard", see `pseudo_labels`.
        space: Space in which rows are compared, "unimodal" for the embeddings as given, or "shared"
            for the outputs of the heads.
        iterations: Number of Sinkhorn iterations for "ot".
        detach_labels: True to treat labels as constants. In the published code the gradient flows
            through them and through the Sinkhorn iterations.

    References:
        S. Mo et al., "S-CLIP: semi-supervised vision-language learning using few specialist
        captions", NeurIPS 2023.
    """

    grid: ClassVar[base.Grid] = {
        "weight_text": (0.0, 0.1, 1.0, 10.0),
        "weight_image": (0.0, 0.1, 1.0, 10.0),
    }

    weight_text: float = 1.0
    weight_image: float = 1.0
    labels: str = "ot"
    space: str = "unimodal"
    iterations: int = 10
    detach_labels: bool = False

    @property
    def pools(self) -> str:
        """Modalities whose pseudo-labels have a weight."""
        return "x" * (self.weight_image > 0) + "y" * (self.weight_text > 0)

    def __post_init__(self) -> None:
        checks.choice("labels", self.labels, LABELS)
        checks.choice("space", self.space, SPACES)
        checks.at_least(0, weight_text=self.weight_text, weight_image=self.weight_image)
        checks.whole(1, iterations=self.iterations)

    def __call__(self, heads: Heads, batch: Batch, teacher: Any, memory: Any) -> base.Result:
        log_scale = heads.log_scale[...]
        f, g = heads.x(batch.a), heads.y(batch.b)
        # Unpaired rows of weight zero are not embedded.
        x = heads.x(batch.x) if self.weight_image else None
        y = heads.y(batch.y) if self.weight_text else None
        loss = losses.infonce(f, g, log_scale=log_scale, negatives_f=x, negatives_g=y)
        metrics = {"infonce": loss}

        def pseudo_labelled(
            queries: Array, own: Array, other: Array, raw: tuple[Array, Array]
        ) -> Array:
            # Labels over the pairs of the same modality serve as labels over their partners.
            labels = pseudo_labels(
                *(raw if self.space == "unimodal" else (queries, own)),
                scale=jnp.exp(log_scale),
                kind=self.labels,
                iterations=self.iterations,
            )
            if self.detach_labels:
                labels = jax.lax.stop_gradient(labels)
            return losses.soft_cross_entropy(queries, other, labels, log_scale=log_scale)

        if y is not None:
            metrics["text_labels"] = pseudo_labelled(y, g, f, (batch.y, batch.b))
            loss = loss + self.weight_text * metrics["text_labels"]
        if x is not None:
            metrics["image_labels"] = pseudo_labelled(x, f, g, (batch.x, batch.a))
            loss = loss + self.weight_image * metrics["image_labels"]
        return loss, (metrics, memory)


def pseudo_labels(
    queries: Float[Array, "n d"],
    keys: Float[Array, "m d"],
    *,
    scale: Any,
    kind: str = "ot",
    iterations: int = 10,
) -> Float[Array, "n m"]:
    """Computes soft labels of queries over keys from K = cosine(queries, keys).

    Args:
        queries: Unpaired rows, shape [n, d].
        keys: Paired rows of the same modality, shape [m, d].
        scale: Logit scale s.
        kind: "hard" is one-hot at the largest K_qj. "softmax" is the softmax of s K over j. "ot"
            takes the rows of OT_{1/s}(K) with uniform weights, which uses all keys equally.
        iterations: Number of Sinkhorn iterations for "ot". Each one is a column update followed by
            a row update, so the row sums are exact.

    Returns:
        The labels, shape [n, m], with rows that sum to 1.

    Raises:
        InputError: `kind` is unknown.

    Example:
        >>> rows = jnp.array([[1.0, 0.0], [1.0, 0.0]])
        >>> pseudo_labels(rows, jnp.eye(2), scale=20.0, kind="hard").tolist()
        [[1.0, 0.0], [1.0, 0.0]]
        >>> pseudo_labels(rows, jnp.eye(2), scale=20.0).tolist()
        [[0.5, 0.5], [0.5, 0.5]]

    References:
        S. Mo et al., "S-CLIP", NeurIPS 2023.
    """
    checks.choice("kind", kind, LABELS)
    cosines = affinity.cosine(queries, keys)
    if kind == "hard":
        return jax.nn.one_hot(jnp.argmax(cosines, axis=1), len(keys), dtype=cosines.dtype)
    if kind == "softmax":
        return jax.nn.softmax(scale * cosines, axis=1)
    # `reference` updates its rows first. They are the keys, because K is transposed.
    plan = reference(cosines.T, epsilon=1 / scale, iterations=iterations, symmetric=False)
    # Rows of a plan have mass 1/n. The softmax scales them to 1.
    return jax.nn.softmax(plan.log_matrix().T, axis=1)
