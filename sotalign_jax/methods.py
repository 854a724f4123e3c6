"""What is trained: each method is an objective of (heads, batch).

A method is a frozen dataclass of options with four parts:

    uses_pool                                   whether it reads unpaired rows
    uses_teacher                                whether a teacher must be fitted first
    start(data, unpaired_batch) -> memory       what it carries from step to step (a pytree)
    __call__(heads, batch, teacher, memory)     -> loss, (metrics, memory)

so that adding one is a class here and a line in `METHODS`.
"""

import dataclasses
import math
import warnings
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sotalign_jax import affinity, checks, divergences, losses
from sotalign_jax.heads import Heads
from sotalign_jax.sampling import Batch, DeviceData
from sotalign_jax.teachers import LinearTeacher

DIVERGENCES = ("klot", "cka", "infonce", "none")
Metrics = dict[str, Array]


class Method(Protocol):
    """What training needs of a method."""

    @property
    def uses_pool(self) -> bool:
        """Whether unpaired rows enter the loss."""

    @property
    def uses_teacher(self) -> bool:
        """Whether a teacher must be fitted first."""

    def start(self, data: DeviceData, unpaired_batch: int) -> Any:
        """What the method carries from step to step."""

    def __call__(
        self, heads: Heads, batch: Batch, teacher: LinearTeacher | None, memory: Any
    ) -> tuple[Array, tuple[Metrics, Any]]:
        """Loss, metrics and the new memory."""


def _supervised(
    heads: Heads, f: Array, g: Array, normalization: str, **negatives: Array
) -> Float[Array, ""]:
    return losses.siglip(
        f,
        g,
        log_scale=heads.log_scale[...],
        bias=heads.bias[...],
        normalization=normalization,
        **negatives,
    )


@dataclasses.dataclass(frozen=True)
class SAIL:
    """SigLIP on the pairs alone.

    Attributes:
        siglip_norm: "mean" over all n^2 entries, or "per_row": sum over columns, mean over rows.
    """

    siglip_norm: str = "mean"

    uses_pool = False
    uses_teacher = False

    def __post_init__(self) -> None:
        checks.choice("siglip_norm", self.siglip_norm, losses.NORMALIZATIONS)

    def start(self, data: DeviceData, unpaired_batch: int) -> dict[str, Array]:
        """Nothing is carried over."""
        return {}

    def __call__(
        self, heads: Heads, batch: Batch, teacher: LinearTeacher | None, memory: Any
    ) -> tuple[Array, tuple[Metrics, Any]]:
        """The supervised term."""
        loss = _supervised(heads, heads.x(batch.a), heads.y(batch.b), self.siglip_norm)
        return loss, ({"siglip": loss}, memory)


@dataclasses.dataclass(frozen=True)
class SOTAlign:
    """SigLIP on the pairs + alpha * divergence(student affinity || teacher affinity) on the pool.

    Attributes:
        alpha: weight of the divergence.
        divergence: "klot", "cka", "infonce" or "none".
        epsilon: regularisation of the student's plan (temperature for "infonce").
        epsilon_star: regularisation of the teacher's plan.
        marginals: "prob" or "bistochastic", see `divergences.klot`.
        tolerance: marginal error at which the plans' solves stop.
        max_iterations: iterations at which they stop.
        block_size: None, or rows per block to stream KLOT in less memory.
        supervision: "pairs", or "pairs+negatives": unpaired rows are extra SigLIP negatives.
        siglip_norm: "mean" or "per_row", see `SAIL`.
    """

    alpha: float = 1e-4
    divergence: str = "klot"
    epsilon: float = 0.05
    epsilon_star: float = 0.005
    marginals: str = "prob"
    tolerance: float = 1e-4
    max_iterations: int = 500
    block_size: int | None = None
    supervision: str = "pairs"
    siglip_norm: str = "mean"

    @property
    def uses_pool(self) -> bool:
        """Whether unpaired rows enter the loss."""
        return self.divergence != "none" or self.supervision == "pairs+negatives"

    @property
    def uses_teacher(self) -> bool:
        """Whether there is a divergence, which needs a target."""
        return self.divergence != "none"

    def __post_init__(self) -> None:
        checks.choice("divergence", self.divergence, DIVERGENCES)
        checks.choice("supervision", self.supervision, ("pairs", "pairs+negatives"))
        checks.choice("marginals", self.marginals, divergences.MARGINALS)
        checks.choice("siglip_norm", self.siglip_norm, losses.NORMALIZATIONS)
        if not 0 <= self.alpha < math.inf:
            raise checks.InputError(f"alpha: is {self.alpha}; pass a number of at least 0")
        for name in ("max_iterations", "block_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise checks.InputError(f"{name}: is {value}; pass at least 1")
        for name in ("epsilon", "epsilon_star", "tolerance"):
            if not 0 < getattr(self, name) < math.inf:
                raise checks.InputError(f"{name}: is {getattr(self, name)}; pass a number above 0")
        if (self.marginals == "prob") != (self.siglip_norm == "mean"):
            warnings.warn(
                f"marginals={self.marginals!r} with siglip_norm={self.siglip_norm!r} leaves one "
                "term thousands of times larger than the other for alpha in 1e-5..1e-3; "
                "pair 'prob' with 'mean', or 'bistochastic' with 'per_row'",
                stacklevel=3,  # past the generated __init__
            )

    def start(self, data: DeviceData, unpaired_batch: int) -> dict[str, Array]:
        """Both plans' column potentials, to start from, when every batch is the whole pool.

        Potentials depend on the whole batch: for changing batches a fresh solve with
        epsilon-scaling takes fewer iterations than one that starts from earlier potentials.
        """
        whole = unpaired_batch >= max(len(data.pool_x), len(data.pool_y))
        if self.divergence != "klot" or not whole:
            return {}
        v = jnp.zeros(len(data.pool_y), jnp.float32)
        return {"v": v, "v_star": v.copy()}

    def __call__(
        self, heads: Heads, batch: Batch, teacher: LinearTeacher | None, memory: Any
    ) -> tuple[Array, tuple[Metrics, Any]]:
        """The supervised term plus the weighted divergence."""
        f, g = heads.x(batch.x), heads.y(batch.y)
        negatives = {}
        if self.supervision == "pairs+negatives":
            negatives = {"negatives_f": f, "negatives_g": g}
        siglip = _supervised(
            heads, heads.x(batch.a), heads.y(batch.b), self.siglip_norm, **negatives
        )
        if self.divergence == "none":
            return siglip, ({"siglip": siglip}, memory)
        assert teacher is not None  # `training.fit` asked for it
        z, w = jax.lax.stop_gradient((teacher.x(batch.x), teacher.y(batch.y)))
        divergence, metrics, memory = self._divergence(f, g, z, w, memory)
        loss = siglip + self.alpha * divergence
        return loss, ({"siglip": siglip, self.divergence: divergence, **metrics}, memory)

    def _divergence(
        self, f: Array, g: Array, z: Array, w: Array, memory: Any
    ) -> tuple[Array, Metrics, Any]:
        if self.divergence == "cka":
            return divergences.cka_from_embeddings(f, g, z, w), {}, memory
        if self.divergence == "infonce":
            value = divergences.infonce(
                affinity.cosine(f, g),
                affinity.cosine(z, w),
                epsilon=self.epsilon,
                epsilon_star=self.epsilon_star,
            )
            return value, {}, memory
        init_v = (memory["v"], memory["v_star"]) if memory else None
        value, aux = divergences.klot_from_embeddings(
            f,
            g,
            z,
            w,
            epsilon=self.epsilon,
            epsilon_star=self.epsilon_star,
            marginals=self.marginals,
            tolerance=self.tolerance,
            max_iterations=self.max_iterations,
            init_v=init_v,
            block_size=self.block_size,
            return_aux=True,
        )
        if memory:
            memory = {"v": aux.student.v, "v_star": aux.teacher.v}
        metrics = {
            "student_error": aux.student.error,
            "student_iterations": aux.student.iterations,
            "teacher_error": aux.teacher.error,
            "teacher_iterations": aux.teacher.iterations,
            "converged": jnp.maximum(aux.student.error, aux.teacher.error) <= self.tolerance,
        }
        return value, metrics, memory


METHODS: dict[str, type[SAIL] | type[SOTAlign]] = {"sail": SAIL, "sotalign": SOTAlign}
