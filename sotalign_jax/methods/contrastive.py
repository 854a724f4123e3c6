"""A contrastive loss on the pairs alone, with SUE's network as the head."""

import dataclasses
from typing import Any, ClassVar

from jaxtyping import Array

from sotalign_jax import checks, losses
from sotalign_jax.heads import Heads
from sotalign_jax.methods import base
from sotalign_jax.sampling import Batch
from sotalign_jax.teachers import LinearTeacher

LOSSES = ("siglip", "infonce")


@dataclasses.dataclass(frozen=True)
class Contrastive(base.Objective):
    """SigLIP or InfoNCE of f(A) and g(B), deep heads: what SUE is compared with.

    The heads are as wide as `heads.hidden` asks, by default as published.

    Attributes:
        loss: "siglip", or "infonce": symmetric, with a learned temperature.
    """

    grid: ClassVar[base.Grid] = {"loss": LOSSES}
    head: ClassVar[str] = "tanh"

    loss: str = "siglip"

    def __post_init__(self) -> None:
        checks.choice("loss", self.loss, LOSSES)

    def __call__(
        self, heads: Heads, batch: Batch, teacher: LinearTeacher | None, memory: Any
    ) -> tuple[Array, tuple[base.Metrics, Any]]:
        f, g = heads.x(batch.a), heads.y(batch.b)
        if self.loss == "infonce":
            loss = losses.symmetric_infonce(f, g, log_scale=heads.log_scale[...])
        else:
            loss = base.siglip(heads, f, g)
        return loss, ({self.loss: loss}, memory)
