"""CSA: canonical correlation analysis with a similarity weighted by the correlations."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from sotalign_jax import checks, data, teachers
from sotalign_jax.heads import Head, Heads, Rows
from sotalign_jax.methods import base
from sotalign_jax.ot import affinity


@dataclasses.dataclass(frozen=True)
class CSA(base.Fitted):
    """sum_k rho_k z_xk z_yk of unit rows z of leading canonical variates of the pairs.

    Published without a ridge: with fewer pairs than features all correlations are then 1 and
    the directions carry next to nothing.

    Attributes:
        dim: directions kept, fewer when the pairs determine fewer; 200 as published.
        ridge: added to both covariances, as a multiple of their mean variance.
    """

    grid: ClassVar[base.Grid] = {"dim": (50, 100, 200)}

    dim: int = 200
    ridge: float = 0.0

    def __post_init__(self) -> None:
        checks.whole(1, dim=self.dim)
        checks.at_least(0, ridge=self.ridge)

    def fit(self, dataset: data.Dataset, *, seed: int, progress: bool = False) -> Heads:
        """Heads whose cosine is CSA's similarity; nothing is random."""
        found = teachers.canonical_correlations(dataset.pairs_x, dataset.pairs_y, ridge=self.ridge)
        rho = found.correlations[: self.dim]
        return Heads(
            CSAHead.fitted(found.mean_x, found.weights_x[:, : self.dim], rho, "x"),
            CSAHead.fitted(found.mean_y, found.weights_y[:, : self.dim], rho, "y"),
        )


class CSAHead(Head):
    """Unit rows whose dot product across modalities is CSA's similarity sum_k rho_k z_xk z_yk.

    z = (row - mean) W / ||(row - mean) W||, and rho_k in [0, 1] is how well direction k correlates.
    Its root is shared between both sides, and what a row then lacks to length 1 is put where the
    other side has a zero:

        x -> (sqrt(rho) z_x, sqrt(1 - ||sqrt(rho) z_x||^2), 0)
        y -> (sqrt(rho) z_y, 0, sqrt(1 - ||sqrt(rho) z_y||^2))

    `d_out` is two more than the directions.

    >>> rho = np.array([1.0, 0.25])
    >>> x, y = (CSAHead.fitted(np.zeros(2), np.eye(2), rho, side) for side in "xy")
    >>> rows = jnp.array([[0.6, 0.8]])
    >>> print(affinity.dot(x(rows), y(rows).T))  # 1.0 * 0.6^2 + 0.25 * 0.8^2
    [[0.52]]
    """

    kind = "csa"
    structure = ("d_in", "d_out", "side")

    def __init__(
        self, d_in: int, d_out: int, *, side: str, dtype: Any = jnp.float32, rngs: nnx.Rngs
    ):
        checks.choice("side", side, ("x", "y"))
        self.d_in, self.d_out, self.side = d_in, d_out, side
        self.mean = nnx.Param(jnp.zeros(d_in, dtype))
        self.kernel = nnx.Param(jnp.zeros((d_in, d_out - 2), dtype))
        self.rho = nnx.Param(jnp.zeros(d_out - 2, dtype))

    def __call__(self, x: Rows) -> Float[Array, "n d_out"]:
        mean, rho = self.mean[...], self.rho[...]
        centred = jnp.asarray(x).astype(mean.dtype) - mean
        z = affinity.l2_normalize(affinity.dot(centred, self.kernel[...])) * jnp.sqrt(rho)
        rest = jnp.sqrt(jnp.maximum(1.0 - jnp.sum(jnp.square(z), axis=1, keepdims=True), 0.0))
        ends = (rest, jnp.zeros_like(rest))
        return jnp.concatenate([z, *(ends if self.side == "x" else ends[::-1])], axis=1)

    @classmethod
    def fitted(cls, mean: Rows, weights: Rows, rho: Rows, side: str) -> "CSAHead":
        """The head of these values; `rho` is clipped to [0, 1]."""
        head = cls(len(mean), len(rho) + 2, side=side, rngs=nnx.Rngs(0))
        head.mean[...] = jnp.asarray(mean, jnp.float32)
        # Lengths are normalised away: a common factor keeps large weights within float32.
        head.kernel[...] = jnp.asarray(weights / np.abs(weights).max(), jnp.float32)
        head.rho[...] = jnp.clip(jnp.asarray(rho, jnp.float32), 0.0, 1.0)
        return head
