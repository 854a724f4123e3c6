"""STRUCTURE: a contrastive loss on the pairs, and neighbourhoods that must survive the heads."""

import dataclasses
import math
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from sotalign_jax import checks, losses, structure
from sotalign_jax.heads import Heads
from sotalign_jax.methods import base
from sotalign_jax.sampling import Batch
from sotalign_jax.teachers import LinearTeacher

CONTRASTIVE = ("infonce", "siglip")
REGULARIZE_ON = ("pairs", "all", "unpaired")


@dataclasses.dataclass(frozen=True)
class Structure(base.Objective):
    """InfoNCE(f(A), g(B)) + lambda_t/2 [R(X, f(X)) + R(Y, g(Y))], R = `structure.regularizer`.

    Attributes:
        weight: lambda, of the regulariser.
        warmup: steps until it is reached: lambda_t = lambda min(1, t / warmup), t from 0.
        tau: temperature of the regulariser and of InfoNCE.
        contrastive: "infonce", or "siglip" with the heads' own scale and bias.
        regularize_on: which rows X and Y are: the "pairs", the "unpaired" ones, or "all" of them.
        levels: see `structure.regularizer`, as for all options below.
        js_form: "code" or "js".
        level_weights: "none" or "inverse".
        block_size: rows at a time, or None for whole matrices.
    """

    grid: ClassVar[base.Grid] = {"weight": (0.1, 1.0, 10.0, 100.0, 1000.0), "warmup": (0, 500)}

    weight: float = 10.0
    warmup: int = 500
    tau: float = 0.07
    contrastive: str = "infonce"
    regularize_on: str = "pairs"
    levels: int = 1
    js_form: str = "code"
    level_weights: str = "none"
    block_size: int | None = 256

    @property
    def pools(self) -> str:
        return "" if self.regularize_on == "pairs" else "xy"

    def __post_init__(self) -> None:
        checks.choice("contrastive", self.contrastive, CONTRASTIVE)
        checks.choice("regularize_on", self.regularize_on, REGULARIZE_ON)
        checks.at_least(0, weight=self.weight)
        checks.whole(0, warmup=self.warmup)
        structure.check_options(**self._options())

    def _options(self) -> dict[str, Any]:
        names = ("tau", "levels", "js_form", "level_weights", "block_size")
        return {name: getattr(self, name) for name in names}

    def weight_at(self, step: Array | int) -> Float[Array, ""]:
        """lambda_t.

        >>> print(Structure(weight=10.0, warmup=500).weight_at(125))
        2.5
        """
        if not self.warmup:
            return jnp.float32(self.weight)
        return self.weight * jnp.minimum(1.0, jnp.asarray(step, jnp.float32) / self.warmup)

    def __call__(
        self, heads: Heads, batch: Batch, teacher: LinearTeacher | None, memory: Any
    ) -> tuple[Array, tuple[base.Metrics, Any]]:
        f, g = heads.x(batch.a), heads.y(batch.b)
        if self.contrastive == "infonce":
            contrastive = losses.symmetric_infonce(f, g, log_scale=-math.log(self.tau))
        else:
            contrastive = base.siglip(heads, f, g)
        rows_x, rows_y = (batch.a, f), (batch.b, g)
        if self.pools:
            unpaired_x, unpaired_y = (batch.x, heads.x(batch.x)), (batch.y, heads.y(batch.y))
            if self.regularize_on == "all":
                rows_x, rows_y = _stack(rows_x, unpaired_x), _stack(rows_y, unpaired_y)
            else:
                rows_x, rows_y = unpaired_x, unpaired_y
        options = self._options()
        regularizer = 0.5 * (
            structure.regularizer(*rows_x, **options) + structure.regularizer(*rows_y, **options)
        )
        weight = self.weight_at(batch.step)
        metrics = {
            self.contrastive: contrastive,
            "structure": regularizer,
            "structure_weight": weight,
        }
        return contrastive + weight * regularizer, (metrics, memory)


def _stack(pairs: tuple[Array, Array], unpaired: tuple[Array, Array]) -> tuple[Array, Array]:
    """Originals and features of both."""
    original, aligned = (jnp.concatenate(both) for both in zip(pairs, unpaired, strict=True))
    return original, aligned
