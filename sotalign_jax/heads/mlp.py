"""Heads that are not linear: a plain MLP, SAIL's gated one, and SUE's."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from sotalign_jax.heads.affine import Rows
from sotalign_jax.heads.layers import Dense, Head, InputNorm


class _Hidden(Head):
    """What heads with one adjustable hidden width share."""

    hidden: int
    input: InputNorm

    def options(self) -> dict[str, Any]:
        return {
            "d_in": self.d_in,
            "d_out": self.d_out,
            "hidden": self.hidden,
            "norm": self.input.norm,
        }


class MLPHead(_Hidden):
    """LayerNorm -> Linear -> GELU -> Linear, for when a linear map is too stiff.

    Example:
      >>> MLPHead(8, 3, hidden=16, rngs=nnx.Rngs(0))(jnp.ones((5, 8))).shape
      (5, 3)
    """

    kind = "mlp"

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        hidden: int | None = None,
        norm: str = "layer",
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Draws a fresh head.

        Args:
          d_in: width of the embeddings.
          d_out: width of the shared space.
          hidden: width of the hidden layer; None means as wide as the input.
          norm: "layer", or "l2" for x / ||x|| * sqrt(d) in its place.
          dtype: of the parameters, and so of the computation.
          rngs: random streams for the weights.
        """
        self.d_in, self.d_out = d_in, d_out
        self.hidden = d_in if hidden is None else hidden
        self.input = InputNorm(d_in, norm=norm, dtype=dtype)
        self.inner = Dense(d_in, self.hidden, dtype=dtype, rngs=rngs)
        self.outer = Dense(self.hidden, d_out, dtype=dtype, rngs=rngs)

    def __call__(self, x: Rows) -> Float[Array, "n d_out"]:
        """Maps rows of shape (n, d_in) into the shared space."""
        return self.outer(jax.nn.gelu(self.inner(self.input(x)), approximate=False))


class GLUHead(_Hidden):
    """SAIL's gated head: z = clip(LayerNorm(x)), then W_3 (relu6(W_1 z) * W_2 z).

    Example:
      >>> GLUHead(8, 3, hidden=16, rngs=nnx.Rngs(0))(jnp.ones((5, 8))).shape
      (5, 3)
    """

    kind = "glu"

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        hidden: int | None = None,
        norm: str = "layer",
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Draws a fresh head; `hidden` of None means eight times the input's width, as in SAIL."""
        self.d_in, self.d_out = d_in, d_out
        self.hidden = 8 * d_in if hidden is None else hidden
        self.input = InputNorm(d_in, norm=norm, dtype=dtype)
        self.gate = Dense(d_in, self.hidden, dtype=dtype, rngs=rngs)
        self.inner = Dense(d_in, self.hidden, dtype=dtype, rngs=rngs)
        self.outer = Dense(self.hidden, d_out, dtype=dtype, rngs=rngs)

    def __call__(self, x: Rows) -> Float[Array, "n d_out"]:
        """Maps rows of shape (n, d_in) into the shared space."""
        rows = jnp.clip(self.input(x), -1e3, 1e3)
        return self.outer(jax.nn.relu6(self.gate(rows)) * self.inner(rows))


class TanhHead(_Hidden):
    """SUE's network: L2-normalised rows, hidden-hidden-1024 LeakyReLU layers, then tanh.

    Rows are brought to length sqrt(d), so that encoders of any scale fit the same weights. The
    third layer is as wide as the published one or as `hidden`, whichever is less. The published
    `hidden` of 4096 takes an accelerator.

    Example:
      >>> TanhHead(8, 3, hidden=16, rngs=nnx.Rngs(0))(jnp.ones((5, 8))).shape
      (5, 3)
    """

    kind = "tanh"

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        hidden: int | None = None,
        norm: str = "l2",
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Draws a fresh head; `hidden` of None means 512."""
        self.d_in, self.d_out = d_in, d_out
        self.hidden = 512 if hidden is None else hidden
        self.input = InputNorm(d_in, norm=norm, dtype=dtype)
        widths = (d_in, self.hidden, self.hidden, min(1024, self.hidden), d_out)
        self.layers = nnx.List(
            [Dense(a, b, dtype=dtype, rngs=rngs) for a, b in itertools.pairwise(widths)]
        )

    def __call__(self, x: Rows) -> Float[Array, "n d_out"]:
        """Maps rows of shape (n, d_in) into the shared space."""
        rows = self.input(x)
        *inner, last = self.layers
        for layer in inner:
            rows = jax.nn.leaky_relu(layer(rows))
        return jnp.tanh(last(rows))
