"""Contrastive methods: SAIL, with or without unpaired rows as negatives, and SUE's baseline.

References:
    L. Zhang et al., "Assessing and learning alignment of unimodal vision and language models",
    CVPR 2025 (SAIL).
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from sotalign_jax import checks, losses
from sotalign_jax.heads import Heads
from sotalign_jax.methods import base
from sotalign_jax.ot import affinity
from sotalign_jax.sampling import Batch

SUPERVISION = ("pairs", "pairs+negatives", "square")
"""Choices of `supervision`."""


@dataclasses.dataclass(frozen=True)
class SAIL(base.Objective):
    """Trains on SigLIP(f(A), g(B)), where row i of A belongs to row i of B.

    Attributes:
        supervision: "pairs" compares the pairs alone. "pairs+negatives" averages the rectangles
            A x [B; Y] and B x [A; X], in which unpaired rows are negatives of every pair. "square"
            takes one mean over [A; X] x [B; Y], in which unpaired rows are also negatives of each
            other.
        siglip_norm: "mean" over all entries, or "per_row", a sum over columns and a mean over rows.

    References:
        L. Zhang et al., "Assessing and learning alignment of unimodal vision and language models",
        CVPR 2025.
    """

    supervision: str = "pairs"
    siglip_norm: str = "mean"

    @property
    def pools(self) -> str:
        """Both modalities if unpaired rows are negatives."""
        return "" if self.supervision == "pairs" else "xy"

    def __post_init__(self) -> None:
        checks.choice("supervision", self.supervision, SUPERVISION)
        checks.choice("siglip_norm", self.siglip_norm, losses.NORMALIZATIONS)

    def __call__(self, heads: Heads, batch: Batch, teacher: Any, memory: Any) -> base.Result:
        f, g = heads.x(batch.a), heads.y(batch.b)
        # Without pools no unpaired rows are embedded.
        unpaired = (heads.x(batch.x), heads.y(batch.y)) if self.pools else (f[:0], g[:0])
        loss = siglip_with_negatives(heads, f, g, *unpaired, self.supervision, self.siglip_norm)
        return loss, ({"siglip": loss}, memory)


def siglip_with_negatives(
    heads: Heads, f: Array, g: Array, x: Array, y: Array, supervision: str, normalization: str
) -> Array:
    """Computes SigLIP of pairs, with or without unpaired features as negatives.

    Args:
        heads: Heads whose logit scale and bias are used.
        f: Features of the pairs' first modality.
        g: Features of the pairs' second modality.
        x: Unpaired features of the first modality.
        y: Unpaired features of the second modality.
        supervision: One of `SUPERVISION`.
        normalization: "mean" or "per_row".

    Returns:
        The loss.

    References:
        X. Zhai et al., "Sigmoid loss for language image pre-training", ICCV 2023.
    """
    # Unpaired rows have no positive. Only the first len(f) entries of the diagonal are positives.
    if supervision == "square":
        return losses.siglip_from_affinity(
            affinity.cosine(jnp.concatenate([f, x]), jnp.concatenate([g, y])),
            scale=jnp.exp(heads.log_scale[...]),
            bias=heads.bias[...],
            positives=len(f),
            normalization=normalization,
        )
    # The rectangles leave out unpaired rows against unpaired rows, which dominate the square.
    negatives = {"negatives_f": x, "negatives_g": y} if supervision != "pairs" else {}
    return base.siglip(heads, f, g, normalization, **negatives)


@dataclasses.dataclass(frozen=True)
class Contrastive(base.Objective):
    """Trains deep heads on SigLIP or InfoNCE of the pairs, the baseline of the SUE paper.

    The hidden layers of the heads are 512 wide by default, and 4096 in the paper.

    Attributes:
        loss: "siglip", or "infonce" with a learned temperature.

    References:
        A. Yacobi et al., "Learning shared representations from unpaired data", NeurIPS 2025.
    """

    grid: ClassVar[base.Grid] = {"loss": ("siglip", "infonce")}
    head: ClassVar[str] = "tanh"

    loss: str = "siglip"

    def __post_init__(self) -> None:
        checks.choice("loss", self.loss, ("siglip", "infonce"))

    def __call__(self, heads: Heads, batch: Batch, teacher: Any, memory: Any) -> base.Result:
        f, g = heads.x(batch.a), heads.y(batch.b)
        if self.loss == "infonce":
            # A bias would cancel in the softmax of InfoNCE.
            loss = losses.infonce(f, g, log_scale=heads.log_scale[...])
        else:
            loss = base.siglip(heads, f, g)
        return loss, ({self.loss: loss}, memory)
