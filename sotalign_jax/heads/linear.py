"""The linear head of SAIL and SOTAlign."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from sotalign_jax import checks
from sotalign_jax.heads.affine import AffineMap, Rows
from sotalign_jax.heads.layers import Dense, Head, InputNorm
from sotalign_jax.ot import affinity


class LinearHead(Head):
    """LayerNorm(x) W^T + b, the linear head of SAIL: Xavier-uniform W, zero b.

    Example:
      >>> head = LinearHead(8, 3, rngs=nnx.Rngs(0))
      >>> head(jnp.ones((5, 8), jnp.float16)).shape
      (5, 3)
    """

    kind = "linear"

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        norm: str = "layer",
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Draws a fresh head.

        Args:
          d_in: width of the embeddings.
          d_out: width of the shared space.
          norm: "layer", or "l2" for x / ||x|| * sqrt(d) in its place.
          dtype: of the parameters, and so of the computation.
          rngs: random streams for W.
        """
        self.d_in, self.d_out = d_in, d_out
        self.input = InputNorm(d_in, norm=norm, dtype=dtype)
        self.linear = Dense(d_in, d_out, dtype=dtype, rngs=rngs)

    def __call__(self, x: Rows) -> Float[Array, "n d_out"]:
        """Maps rows of shape (n, d_in) into the shared space.

        Scale and shift are applied to W and b, and the backward pass normalises the rows again
        rather than keep them: nothing of shape (n, d_in) is stored.
        """
        return jax.checkpoint(AffineMap.__call__)(self.to_affine(), x)

    def options(self) -> dict[str, Any]:
        return {"d_in": self.d_in, "d_out": self.d_out, "norm": self.input.norm}

    @classmethod
    def from_affine(cls, affine: AffineMap) -> "LinearHead":
        """A head that computes c * affine(x) with one c > 0, and so the same cosines.

        c gives W the root mean square of a Xavier start, sqrt(2 / (d_in + d_out)): a step of a
        sign-based optimiser is then as large, relative to W, as it is from a random start.

        Args:
          affine: the map to start from; its `norm` becomes the head's.

        Returns:
          The head.

        Raises:
          InputError: the map's weight is zero, so that no c exists.

        Example:
          >>> affine = AffineMap(weight=jnp.eye(3), bias=jnp.ones(3), norm="layer")
          >>> head = LinearHead.from_affine(affine)
          >>> x = jnp.array([[1.0, 2.0, 4.0]])
          >>> bool(jnp.allclose(affinity.cosine(head(x), affine(x)), 1.0))
          True
        """
        d_out, d_in = affine.weight.shape
        head = cls(d_in, d_out, norm=affine.norm, dtype=affine.weight.dtype, rngs=nnx.Rngs(0))
        weight = affine.weight / head.input.gain
        rms = float(jnp.sqrt(jnp.mean(jnp.square(weight))))
        if not (math.isfinite(rms) and rms > 0):
            raise checks.InputError(
                f"affine: the weight's root mean square is {rms}; start from a non-zero finite map"
            )
        c = math.sqrt(2.0 / (d_in + d_out)) / rms
        head.linear.kernel[...] = c * weight.T
        head.linear.bias[...] = c * affine.bias
        return head

    def to_affine(self) -> AffineMap:
        """The same map as one weight and one bias, scale and shift folded in."""
        kernel, bias = self.linear.kernel[...], self.linear.bias[...]
        scale, shift = self.input.scale[...], self.input.shift[...]
        return AffineMap(
            weight=(kernel * (self.input.gain * scale)[:, None]).T,
            bias=affinity.dot(shift, kernel) + bias,
            norm=self.input.norm,
        )
