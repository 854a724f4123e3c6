"""CSA: canonical correlation analysis with a similarity weighted by the correlations.

References:
    P. Li et al., "CSA: data-efficient mapping of unimodal features to multimodal features", ICLR
    2025.
"""

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
    """Fits CCA on the pairs, and weights its directions by their correlations.

    The similarity is sum_k rho_k z_xk z_yk of the leading canonical variates z. The method is
    published without a ridge. With fewer pairs than features all correlations are then 1, and the
    directions hold almost no information.

    Attributes:
        dim: Number of directions, or all that the pairs determine if they are fewer. Published:
            200.
        ridge: Multiple of the mean variance that is added to the diagonals of both covariances.

    References:
        P. Li et al., "CSA: data-efficient mapping of unimodal features to multimodal features",
        ICLR 2025.
        H. Hotelling, "Relations between two sets of variates", Biometrika 28 (1936).
    """

    grid: ClassVar[base.Grid] = {"dim": (50, 100, 200)}

    dim: int = 200
    ridge: float = 0.0

    def __post_init__(self) -> None:
        checks.whole(1, dim=self.dim)
        checks.at_least(0, ridge=self.ridge)

    def fit(self, dataset: data.Dataset, *, seed: int, progress: bool = False) -> Heads:
        """Fits heads whose cosine is CSA's similarity.

        Args:
            dataset: The pairs.
            seed: Not used, because the fit is a closed form.
            progress: Not used.

        Returns:
            The heads.
        """
        found = teachers.canonical_correlations(dataset.pairs_x, dataset.pairs_y, ridge=self.ridge)
        # Correlations are in decreasing order.
        rho = found.correlations[: self.dim]
        return Heads(
            CSAHead.fitted(found.mean_x, found.weights_x[:, : self.dim], rho, "x"),
            CSAHead.fitted(found.mean_y, found.weights_y[:, : self.dim], rho, "y"),
        )


class CSAHead(Head):
    """Head with unit rows, whose dot product across modalities is CSA's similarity.

    With z = (row - mean) W / ||(row - mean) W||, and rho_k in [0, 1] the correlation of direction
    k, both modalities multiply z by sqrt(rho). An additional column, which is zero in the other
    modality, fills the row up to length 1:

        x -> (sqrt(rho) z_x, sqrt(1 - ||sqrt(rho) z_x||^2), 0)
        y -> (sqrt(rho) z_y, 0, sqrt(1 - ||sqrt(rho) z_y||^2))

    Attributes:
        d_in: Width of the embeddings.
        d_out: Number of directions plus two.
        side: "x" or "y".

    Example:
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
        # The last two columns of the output hold the remainders of both modalities.
        self.mean = nnx.Param(jnp.zeros(d_in, dtype))
        self.kernel = nnx.Param(jnp.zeros((d_in, d_out - 2), dtype))
        self.rho = nnx.Param(jnp.zeros(d_out - 2, dtype))

    def __call__(self, x: Rows) -> Float[Array, "n d_out"]:
        mean, rho = self.mean[...], self.rho[...]
        centred = jnp.asarray(x).astype(mean.dtype) - mean
        z = affinity.l2_normalize(affinity.dot(centred, self.kernel[...])) * jnp.sqrt(rho)
        # Clipped, because rounding can make the length exceed 1.
        rest = jnp.sqrt(jnp.maximum(1.0 - jnp.sum(jnp.square(z), axis=1, keepdims=True), 0.0))
        ends = (rest, jnp.zeros_like(rest))
        return jnp.concatenate([z, *(ends if self.side == "x" else ends[::-1])], axis=1)

    @classmethod
    def fitted(cls, mean: Rows, weights: Rows, rho: Rows, side: str) -> "CSAHead":
        """Builds a head from fitted values.

        Args:
            mean: Mean of the embeddings, shape [d].
            weights: Canonical directions, shape [d, k].
            rho: Correlations, clipped to [0, 1], shape [k].
            side: "x" or "y".

        Returns:
            The head.
        """
        head = cls(len(mean), len(rho) + 2, side=side, rngs=nnx.Rngs(0))
        head.mean[...] = jnp.asarray(mean, jnp.float32)
        # The outputs are normalised, so a common factor of the weights does not matter. This one
        # keeps large weights within float32.
        head.kernel[...] = jnp.asarray(weights / np.abs(weights).max(), jnp.float32)
        head.rho[...] = jnp.clip(jnp.asarray(rho, jnp.float32), 0.0, 1.0)
        return head
