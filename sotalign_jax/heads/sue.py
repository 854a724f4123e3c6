"""The head of SUE: a spectral network, a linear map and, for one modality, a residual."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from sotalign_jax.heads.affine import Rows
from sotalign_jax.heads.layers import Dense, Head
from sotalign_jax.heads.mlp import TanhHead


class Residual(nnx.Module):
    """z + W_3 relu(W_2 relu(W_1 z)), biases left out.

    Example:
      >>> Residual(3, 8, rngs=nnx.Rngs(0))(jnp.ones((5, 3))).shape
      (5, 3)
    """

    def __init__(self, width: int, hidden: int, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        """Draws the weights."""
        self.hidden = hidden
        widths = (width, hidden, hidden, width)
        self.layers = nnx.List(
            [Dense(a, b, dtype=dtype, rngs=rngs) for a, b in itertools.pairwise(widths)]
        )

    def __call__(self, z: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """Moves rows of the shared space."""
        *inner, last = self.layers
        moved = z
        for layer in inner:
            moved = jax.nn.relu(layer(moved))
        return z + last(moved)


class SUEHead(Head):
    """residual(network(x) W + b): SUE's network, its outputs' projection, and a last correction.

    Example:
      >>> SUEHead(8, 3, outputs=6, hidden=16, residual=4, rngs=nnx.Rngs(0))(jnp.ones((5, 8))).shape
      (5, 3)
    """

    kind = "sue"

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        outputs: int,
        hidden: int,
        norm: str = "l2",
        residual: int | None = None,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Draws a fresh head.

        Args:
          d_in: width of the embeddings.
          d_out: width of the shared space.
          outputs: width of the network's output.
          hidden: width of its hidden layers, see `TanhHead`.
          norm: how it normalises rows, "l2" or "layer".
          residual: hidden width of the residual; None means there is none.
          dtype: of the parameters, and so of the computation.
          rngs: random streams for the weights.
        """
        self.d_in, self.d_out = d_in, d_out
        self.network = TanhHead(d_in, outputs, hidden=hidden, norm=norm, dtype=dtype, rngs=rngs)
        self.linear = Dense(outputs, d_out, dtype=dtype, rngs=rngs)
        self.residual = (
            None if residual is None else Residual(d_out, residual, dtype=dtype, rngs=rngs)
        )

    def __call__(self, x: Rows) -> Float[Array, "n d_out"]:
        """Maps rows of shape (n, d_in) into the shared space."""
        z = self.linear(self.network(x))
        return z if self.residual is None else self.residual(z)

    def options(self) -> dict[str, Any]:
        return {
            "d_in": self.d_in,
            "d_out": self.d_out,
            "outputs": self.network.d_out,
            "hidden": self.network.hidden,
            "norm": self.network.input.norm,
            "residual": None if self.residual is None else self.residual.hidden,
        }

    @classmethod
    def joined(
        cls,
        network: TanhHead,
        kernel: Rows,
        bias: Rows,
        residual: Residual | None = None,
    ) -> "SUEHead":
        """The head of parts that were trained one after the other."""
        head = cls(
            network.d_in,
            kernel.shape[1],
            outputs=network.d_out,
            hidden=network.hidden,
            norm=network.input.norm,
            residual=None if residual is None else residual.hidden,
            rngs=nnx.Rngs(0),
        )
        head.network = network
        if residual is not None:
            head.residual = residual
        head.linear.kernel[...] = jnp.asarray(kernel, jnp.float32)
        head.linear.bias[...] = jnp.asarray(bias, jnp.float32)
        return head
