"""Maps through a Gaussian kernel, which `teachers.kernel_cca` fits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sotalign_jax import checks
from sotalign_jax.ot import affinity


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KernelMap:
    """The map x -> (k(z) - centre) W^T with z = l2(l2(x) - mean), a pytree.

    Entry j of k(z) is exp(-gamma ||z - landmark_j||^2). In numpy:

        z = unit(unit(x) - mean)
        k = np.exp(-gamma * np.square(z[:, None] - landmarks).sum(-1))
        (k - centre) @ weight.T

    Attributes:
        mean: Mean of the unit rows that the map was fitted on.
        landmarks: Unit rows like z.
        gamma: Bandwidth of the Gaussian kernel.
        centre: Mean of k over the rows that the map was fitted on.
        weight: Output directions, one per row.

    Example:
        >>> pull = KernelMap(jnp.zeros(2), jnp.eye(2), jnp.array(1.0), jnp.zeros(2), jnp.eye(2))
        >>> print(pull(jnp.array([[3.0, 0.0]])).round(3))  # near the first landmark
        [[1.    0.135]]
    """

    mean: Float[Array, " d_in"]
    landmarks: Float[Array, "m d_in"]
    gamma: Float[Array, ""]
    centre: Float[Array, " m"]
    weight: Float[Array, "d_out m"]

    @property
    def d_in(self) -> int:
        """Width of the embeddings."""
        return self.landmarks.shape[1]

    @property
    def d_out(self) -> int:
        """Number of output directions."""
        return self.weight.shape[0]

    def __call__(self, x: Array | np.ndarray) -> Float[Array, "n d_out"]:
        """Maps rows of shape [n, d_in] in the precision of the weight, whatever their dtype."""
        rows = affinity.l2_normalize(jnp.asarray(x).astype(self.weight.dtype))
        z = affinity.l2_normalize(rows - self.mean)
        # ||z - l||^2 = ||z||^2 + 1 - 2 z.l for unit landmarks l. Rounding may make it negative.
        squared = jnp.sum(jnp.square(z), axis=-1, keepdims=True) + 1.0
        distances = jnp.maximum(squared - 2.0 * affinity.dot(z, self.landmarks.T), 0.0)
        return affinity.dot(jnp.exp(-self.gamma * distances) - self.centre, self.weight.T)

    def leading(self, dim: int) -> "KernelMap":
        """Returns the map to the first output directions.

        Args:
            dim: Number of directions.

        Returns:
            The smaller map.

        Raises:
            InputError: The map has fewer directions.
        """
        checks.within(self.d_out, "directions in this map", dim=dim)
        return dataclasses.replace(self, weight=self.weight[:dim])
