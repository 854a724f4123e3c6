"""Contrastive losses: SAIL, with unpaired rows as negatives or without, and SUE's baseline."""

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


@dataclasses.dataclass(frozen=True)
class SAIL(base.Objective):
    """SigLIP(f(A), g(B)), where row i of A belongs to row i of B.

    Attributes:
        supervision: "pairs"; "pairs+negatives": unpaired rows are wrong for every pair, two
            rectangles A x [B; Y] and B x [A; X] averaged; or "square": one mean over
            [A; X] x [B; Y], where unpaired rows are wrong for each other, too.
        siglip_norm: "mean" over all entries, or "per_row": sum over columns, mean over rows.
    """

    supervision: str = "pairs"
    siglip_norm: str = "mean"

    @property
    def pools(self) -> str:
        return "" if self.supervision == "pairs" else "xy"

    def __post_init__(self) -> None:
        checks.choice("supervision", self.supervision, SUPERVISION)
        checks.choice("siglip_norm", self.siglip_norm, losses.NORMALIZATIONS)

    def __call__(self, heads: Heads, batch: Batch, teacher: Any, memory: Any) -> base.Result:
        f, g = heads.x(batch.a), heads.y(batch.b)
        unpaired = (heads.x(batch.x), heads.y(batch.y)) if self.pools else (f[:0], g[:0])
        loss = supervised(heads, f, g, *unpaired, self.supervision, self.siglip_norm)
        return loss, ({"siglip": loss}, memory)


def supervised(
    heads: Heads, f: Array, g: Array, x: Array, y: Array, supervision: str, normalization: str
) -> Array:
    """SigLIP of paired features f, g, with unpaired ones x, y as `supervision` says."""
    if supervision == "square":
        return losses.siglip_from_affinity(
            affinity.cosine(jnp.concatenate([f, x]), jnp.concatenate([g, y])),
            scale=jnp.exp(heads.log_scale[...]),
            bias=heads.bias[...],
            positives=len(f),
            normalization=normalization,
        )
    negatives = {"negatives_f": x, "negatives_g": y} if supervision != "pairs" else {}
    return base.siglip(heads, f, g, normalization, **negatives)


@dataclasses.dataclass(frozen=True)
class Contrastive(base.Objective):
    """SigLIP or InfoNCE of f(A) and g(B), deep heads: what SUE is compared with.

    The heads are as wide as `heads.hidden` asks, 512 by default and 4096 as published.

    Attributes:
        loss: "siglip", or "infonce": symmetric, with a learned temperature.
    """

    grid: ClassVar[base.Grid] = {"loss": ("siglip", "infonce")}
    head: ClassVar[str] = "tanh"

    loss: str = "siglip"

    def __post_init__(self) -> None:
        checks.choice("loss", self.loss, ("siglip", "infonce"))

    def __call__(self, heads: Heads, batch: Batch, teacher: Any, memory: Any) -> base.Result:
        f, g = heads.x(batch.a), heads.y(batch.b)
        if self.loss == "infonce":
            loss = losses.infonce(f, g, log_scale=heads.log_scale[...])
        else:
            loss = base.siglip(heads, f, g)
        return loss, ({self.loss: loss}, memory)
