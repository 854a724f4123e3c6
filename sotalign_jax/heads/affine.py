"""Affine maps of normalised rows: what linear teachers and linear heads compute."""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sotalign_jax import checks
from sotalign_jax.ot import affinity

Rows = Array | np.ndarray
"""Embeddings of any float dtype, one a row, on the host or on a device."""

_LAYER_NORM_EPSILON = 1e-5
NORMS = ("layer", "l2")


def normalize(x: Float[Array, "... d"], norm: str) -> Float[Array, "... d"]:
    """Rows made comparable: "layer" = (x - mean) / sqrt(var + 1e-5), "l2" = x / ||x||.

    >>> print(normalize(jnp.array([[3.0, 4.0]]), "l2"))
    [[0.6 0.8]]
    """
    checks.choice("norm", norm, NORMS)
    if norm == "l2":
        return affinity.l2_normalize(x)
    x = affinity.as_float(x)
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return centred / jnp.sqrt(variance + _LAYER_NORM_EPSILON)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AffineMap:
    """The map x -> normalize(x) W^T + b, a pytree.

    Attributes:
      weight: W.
      bias: b.
      norm: how rows are normalised first, "l2" or "layer" (without scale and shift: those are
        part of W and b).

    Example:
      >>> half = AffineMap(weight=0.5 * jnp.eye(2), bias=jnp.zeros(2), norm="l2")
      >>> print(half(jnp.array([[3.0, 4.0]])))
      [[0.3 0.4]]
    """

    weight: Float[Array, "d_out d_in"]
    bias: Float[Array, " d_out"]
    norm: str = dataclasses.field(default="l2", metadata={"static": True})

    def __post_init__(self) -> None:
        checks.choice("norm", self.norm, NORMS)

    def __call__(self, x: Rows) -> Float[Array, "n d_out"]:
        """Maps rows of shape (n, d_in) in the precision of the weight, whatever their dtype."""
        rows = normalize(jnp.asarray(x).astype(self.weight.dtype), self.norm)
        return affinity.dot(rows, self.weight.T) + self.bias

    def leading(self, dim: int) -> "AffineMap":
        """The first `dim` output directions.

        Raises:
          InputError: there are fewer than `dim`.
        """
        if not 1 <= dim <= len(self.weight):
            raise checks.InputError(
                f"dim: {dim} directions asked of a map that has {len(self.weight)}; "
                f"choose 1 <= dim <= {len(self.weight)}"
            )
        return AffineMap(self.weight[:dim], self.bias[:dim], self.norm)


class MapPair(Protocol):
    """Anything with one affine map per modality, such as a linear teacher."""

    @property
    def map_x(self) -> AffineMap:
        """The first modality's map."""

    @property
    def map_y(self) -> AffineMap:
        """The second modality's map."""
