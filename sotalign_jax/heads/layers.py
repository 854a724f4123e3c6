"""The parts that heads are made of, and what all heads have in common."""

import abc
import math
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from sotalign_jax import checks
from sotalign_jax.heads.affine import NORMS, Rows, normalize
from sotalign_jax.ot import affinity


class Head(nnx.Module):
    """A map from one encoder's rows into the shared space; all its variables are `nnx.Param`.

    Attributes:
      kind: the name it is built and saved under.
      d_in: width of the embeddings.
      d_out: width of the shared space.
    """

    kind: ClassVar[str]
    d_in: int
    d_out: int

    @abc.abstractmethod
    def __call__(self, x: Rows) -> Float[Array, "n d_out"]:
        """Maps rows of shape (n, d_in) into the shared space."""

    @abc.abstractmethod
    def options(self) -> dict[str, Any]:
        """What the constructor needs for a head of the same structure, as JSON values."""


class InputNorm(nnx.Module):
    """normalize(x) * scale + shift with learned scale and shift; norm="layer" is LayerNorm.

    With norm="l2" rows are brought to length sqrt(d), the length LayerNorm gives them, so that
    the weights behind see inputs of one size.
    """

    def __init__(self, width: int, *, norm: str = "layer", dtype: Any = jnp.float32):
        """Starts from scale 1 and shift 0."""
        checks.choice("norm", norm, NORMS)
        self.norm = norm
        self.gain = math.sqrt(width) if norm == "l2" else 1.0
        self.scale = nnx.Param(jnp.ones(width, dtype))
        self.shift = nnx.Param(jnp.zeros(width, dtype))

    def __call__(self, x: Rows) -> Float[Array, "n d"]:
        """Normalises rows of shape (n, d) in the precision of the parameters."""
        rows = normalize(jnp.asarray(x).astype(self.scale[...].dtype), self.norm)
        return rows * (self.gain * self.scale[...]) + self.shift[...]


class Dense(nnx.Module):
    """x W + b at the affinity precision: Xavier-uniform W, zero b."""

    def __init__(self, d_in: int, d_out: int, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        """Draws W."""
        xavier = nnx.initializers.xavier_uniform()
        self.kernel = nnx.Param(xavier(rngs.params(), (d_in, d_out), dtype))
        self.bias = nnx.Param(jnp.zeros(d_out, dtype))

    def __call__(self, x: Float[Array, "n d_in"]) -> Float[Array, "n d_out"]:
        """Applies the layer."""
        return affinity.dot(x, self.kernel[...]) + self.bias[...]
