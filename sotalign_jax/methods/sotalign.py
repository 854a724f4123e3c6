"""SOTAlign: supervision on the pairs, and a divergence from a teacher on the unpaired rows.

References:
    SOTAlign, ICML 2026.
"""

import dataclasses
import functools
import math
import warnings
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sotalign_jax import checks, losses
from sotalign_jax.heads import Heads
from sotalign_jax.methods import base, sail
from sotalign_jax.ot import affinity, device, solver
from sotalign_jax.ot import klot as klot_lib
from sotalign_jax.ot.affinity import ArrayLike
from sotalign_jax.ot.sinkhorn import sinkhorn
from sotalign_jax.sampling import Batch, DeviceData

DIVERGENCES = ("klot", "cka", "infonce", "none")
"""Choices of `divergence`."""
KLOT_ON = ("unpaired", "all", "crossmodal")
"""Choices of `klot_on`."""


@dataclasses.dataclass(frozen=True)
class SOTAlign(base.Objective):
    """Trains on SigLIP of the pairs + alpha * divergence(student || teacher) on unpaired rows.

    Attributes:
        alpha: Weight of the divergence.
        divergence: "klot", "cka", "infonce" (see `losses.infonce_divergence`) or "none".
        epsilon: Regularisation of the student's plan, or temperature of "infonce".
        epsilon_star: Regularisation of the teacher's plan, or temperature of its targets.
        marginals: "prob" or "bistochastic", see `klot`. See docs/paper.md for the mean of SigLIP
            that goes with each.
        tolerance: Marginal error at which a solve stops. Recall is the same for 1e-4 to 5e-2, and
            100 iterations of the published loss leave an error of 1e-2 (docs/benchmarks.md). There
            is no option for a fixed number of textbook iterations, see docs/paper.md.
        max_iterations: Number of iterations at which a solve stops.
        block_size: Rows per block to stream KLOT in less memory. By default the device's memory
            decides, see `klot_from_embeddings`.
        klot_on: Rows that KLOT compares: "unpaired" rows, "all" rows, or "crossmodal" for all rows
            with a target plan that transports every pair to itself.
        supervision: "pairs", "pairs+negatives" or "square", see `SAIL`.
        siglip_norm: "mean" or "per_row", see `SAIL`.

    References:
        SOTAlign, ICML 2026.
    """

    grid: ClassVar[base.Grid] = {"alpha": (1e-3, 1e-4, 1e-5)}

    alpha: float = 1e-4
    divergence: str = "klot"
    epsilon: float = 0.05
    epsilon_star: float = 0.005
    marginals: str = "prob"
    tolerance: float = 1e-2
    max_iterations: int = solver.MAX_ITERATIONS
    block_size: int | None = None
    klot_on: str = "unpaired"
    supervision: str = "pairs"
    siglip_norm: str = "mean"

    @property
    def pools(self) -> str:
        """Both modalities if the divergence or the supervision uses unpaired rows."""
        return "" if self.divergence == "none" and self.supervision == "pairs" else "xy"

    @property
    def uses_teacher(self) -> bool:
        """True if there is a divergence from the teacher."""
        return self.divergence != "none"

    def __post_init__(self) -> None:
        checks.choice("divergence", self.divergence, DIVERGENCES)
        checks.choice("klot_on", self.klot_on, KLOT_ON)
        checks.choice("supervision", self.supervision, sail.SUPERVISION)
        checks.choice("marginals", self.marginals, klot_lib.MARGINALS)
        checks.choice("siglip_norm", self.siglip_norm, losses.NORMALIZATIONS)
        checks.at_least(0, alpha=self.alpha)
        checks.positive(epsilon=self.epsilon, epsilon_star=self.epsilon_star)
        checks.positive(tolerance=self.tolerance)
        checks.whole(1, max_iterations=self.max_iterations)
        checks.whole(1, or_none=True, block_size=self.block_size)
        if self.klot_on != "unpaired" and self.divergence != "klot":
            raise checks.InputError(
                f"klot_on={self.klot_on!r} needs divergence='klot', got {self.divergence!r}"
            )
        # The crossmodal target is always an n x m matrix.
        streams = self.divergence == "klot" and self.klot_on != "crossmodal"
        if self.block_size is not None and not streams:
            raise checks.InputError(
                f"block_size must be None, got {self.block_size}; only divergence='klot' with "
                "klot_on='unpaired' or 'all' is streamed"
            )
        # "bistochastic" multiplies KLOT by the number of rows, and "per_row" multiplies SigLIP by
        # the number of columns. Only one of them would change the balance that alpha sets.
        if self.divergence == "klot" and (self.marginals == "prob") != (self.siglip_norm == "mean"):
            warnings.warn(
                f"marginals={self.marginals!r} with siglip_norm={self.siglip_norm!r} leaves one "
                "term thousands of times larger than the other for alpha in 1e-5..1e-3; "
                "pair 'prob' with 'mean', or 'bistochastic' with 'per_row'",
                stacklevel=3,  # past the generated __init__
            )

    def init_memory(self, data: DeviceData, unpaired_batch: int) -> dict[str, Array]:
        """Returns column potentials for a warm start if every batch is the whole pool.

        Potentials depend on the whole batch. If the batch changes, a fresh solve with
        epsilon-scaling takes fewer iterations than one that starts from earlier potentials.

        Args:
            data: The training arrays.
            unpaired_batch: Unpaired rows per step.

        Returns:
            The potentials of both plans, or an empty dictionary.
        """
        whole = unpaired_batch >= max(len(data.pool_x), len(data.pool_y))
        if self.divergence != "klot" or self.klot_on != "unpaired" or not whole:
            return {}
        # Textbook Sinkhorn starts at zeros. Copied, because a donated buffer must not occur twice.
        v = jnp.zeros(len(data.pool_y), jnp.float32)
        return {"v": v, "v_star": v.copy()}

    def __call__(self, heads: Heads, batch: Batch, teacher: Any, memory: Any) -> base.Result:
        with jax.named_scope("heads"):
            f, g = heads.x(batch.a), heads.y(batch.b)
            x, y = (heads.x(batch.x), heads.y(batch.y)) if self.pools else (f[:0], g[:0])
        with jax.named_scope("siglip"):
            siglip = sail.siglip_with_negatives(
                heads, f, g, x, y, self.supervision, self.siglip_norm
            )
        if self.divergence == "none":
            return siglip, ({"siglip": siglip}, memory)
        assert teacher is not None  # checked by `training.fit`
        # Pairs come first, as `_klot_crossmodal` expects.
        if self.klot_on != "unpaired":
            x, y = jnp.concatenate([f, x]), jnp.concatenate([g, y])
        with jax.named_scope("teacher_features"):
            f_star = teacher.x(batch.x) if batch.star_x is None else batch.star_x
            g_star = teacher.y(batch.y) if batch.star_y is None else batch.star_y
            if self.klot_on == "all":
                f_star = jnp.concatenate([teacher.x(batch.a), f_star])
                g_star = jnp.concatenate([teacher.y(batch.b), g_star])
            f_star, g_star = jax.lax.stop_gradient((f_star, g_star))
        with jax.named_scope(self.divergence):
            divergence, metrics, memory = self._divergence(x, y, f_star, g_star, memory)
        loss = siglip + self.alpha * divergence
        return loss, ({"siglip": siglip, self.divergence: divergence, **metrics}, memory)

    def _divergence(
        self, f: Array, g: Array, f_star: Array, g_star: Array, memory: Any
    ) -> tuple[Array, base.Metrics, Any]:
        """Computes the divergence of student features f, g from teacher features."""
        if self.divergence == "cka":
            return losses.cka_from_embeddings(f, g, f_star, g_star), {}, memory
        epsilons: Any = {"epsilon": self.epsilon, "epsilon_star": self.epsilon_star}
        if self.divergence == "infonce":
            affinities = affinity.cosine(f, g), affinity.cosine(f_star, g_star)
            return losses.infonce_divergence(*affinities, **epsilons), {}, memory
        options: Any = {**epsilons, "marginals": self.marginals, "tolerance": self.tolerance}
        options |= {"max_iterations": self.max_iterations}
        # "all" and "crossmodal" add other pairs at every step, so only "unpaired" has warm starts.
        if self.klot_on == "crossmodal":
            value, aux = _klot_crossmodal(f, g, f_star, g_star, **options)
        else:
            options |= {"block_size": self.block_size, "return_aux": True}
            options |= {"init_v": (memory["v"], memory["v_star"]) if memory else None}
            value, aux = klot_lib.klot_from_embeddings(f, g, f_star, g_star, **options)
        if memory:
            memory = {"v": aux.student.v, "v_star": aux.teacher.v}
        metrics: base.Metrics = {}
        for name, plan in aux._asdict().items():
            metrics |= {f"{name}_error": plan.error, f"{name}_iterations": plan.iterations}
            metrics |= {f"{name}_status": plan.status}
        metrics["converged"] = aux.student.converged & aux.teacher.converged
        return value, metrics, memory


def _klot_crossmodal(
    f: Float[ArrayLike, "n d"],
    g: Float[ArrayLike, "m d"],
    f_star: Float[ArrayLike, "p e"],
    g_star: Float[ArrayLike, "q e"],
    *,
    epsilon: float = 0.05,
    epsilon_star: float = 0.005,
    marginals: str = "prob",
    tolerance: float = 1e-4,
    max_iterations: int = solver.MAX_ITERATIONS,
) -> tuple[Float[Array, ""], klot_lib.KlotAux]:
    """Computes KL(T || OT_eps(K)) of K = cosine(f, g) over pairs and unpaired rows together.

    The first k = n - p = m - q rows of f and g are pairs, which T transports to themselves. The
    other rows follow the teacher's plan P* = OT_eps*(cosine(f_star, g_star)):

        T = diag(s I / k, (1 - s) P*),    s = 2 k / (n + m),

    T has mass 1, and uniform marginals if n = m. The gradient in K is (P - T)/eps. It needs both
    matrices, so memory is a few n x m arrays.
    """
    n, m, unpaired = len(f), len(g), (len(f_star), len(g_star))
    pairs = n - unpaired[0]
    if pairs != m - unpaired[1] or pairs < 1 or min(unpaired) < 1:
        raise checks.InputError(
            f"f and g have {n} and {m} rows but f_star and g_star have {unpaired[0]} and "
            f"{unpaired[1]}; pass teacher features of the unpaired rows, with as many pairs before "
            "them in f as in g"
        )
    # The share of the mass that pairs have. It is their share of the rows if n = m.
    mass, share = klot_lib.total_mass(marginals, n, m), 2 * pairs / (n + m)
    f, g, f_star, g_star = affinity.as_floats(f, g, f_star, g_star)

    # The student's plan has the marginals of T.
    def weights(rest: int) -> Array:
        logs = math.log(share / pairs), math.log((1 - share) / rest)
        return jnp.repeat(jnp.array(logs, f.dtype), np.array([pairs, rest]))

    solve = functools.partial(sinkhorn, tolerance=tolerance, max_iterations=max_iterations)
    target = solve(affinity.cosine(*jax.lax.stop_gradient((f_star, g_star))), epsilon=epsilon_star)
    t = jax.scipy.linalg.block_diag(
        jnp.eye(pairs, dtype=f.dtype) * (share / pairs), (1 - share) * target.matrix()
    )
    k = affinity.cosine(f, g, precision=device.profile().student)
    log_a, log_b = map(weights, unpaired)
    # By Danskin's theorem the plan is a constant in the gradient, which the surrogate below has.
    plan = solve(jax.lax.stop_gradient(k), epsilon=epsilon, log_a=log_a, log_b=log_b)
    log_p = plan.log_matrix()
    value = jnp.sum(jax.scipy.special.xlogy(t, t) - t * log_p)
    # The surrogate has the gradient of the closed form, and cancels in the value.
    surrogate = jnp.sum((jnp.exp(log_p) - t) / epsilon * k)
    value = mass * (value + surrogate - jax.lax.stop_gradient(surrogate))
    aux = klot_lib.KlotAux(
        *(solver.Scalings(x.u, x.v, x.error, x.iterations, x.status) for x in (plan, target))
    )
    return jnp.where(aux.solved, value, jnp.nan), aux
