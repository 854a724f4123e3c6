"""Both modalities' heads together, and how they are built."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sotalign_jax import checks, losses
from sotalign_jax.heads.affine import AffineMap, MapPair
from sotalign_jax.heads.csa import CSAHead
from sotalign_jax.heads.layers import Head
from sotalign_jax.heads.linear import LinearHead
from sotalign_jax.heads.mlp import GLUHead, MLPHead, TanhHead
from sotalign_jax.heads.sue import SUEHead

KINDS = ("linear", "mlp", "glu", "tanh")
"""Heads that start from random weights and can be trained by any objective."""
_CLASSES: dict[str, Any] = {
    head.kind: head for head in (LinearHead, MLPHead, GLUHead, TanhHead, CSAHead, SUEHead)
}


def rebuild(kind: str, options: dict[str, Any]) -> Head:
    """A head of the structure that `Head.options` described; its values are arbitrary.

    >>> rebuild("linear", {"d_in": 4, "d_out": 2, "norm": "l2"}).d_out
    2
    """
    return _CLASSES[kind](**options, rngs=nnx.Rngs(0))


class Heads(nnx.Module):
    """Everything that is trained: one head per modality, the logit scale and the logit bias.

    Attributes:
      x: head of the first modality.
      y: head of the second.
      log_scale: logarithm of the logit scale, from log 20.
      bias: logit bias, from -10.
    """

    def __init__(self, x: Head, y: Head):
        """Joins two heads and starts scale and bias at SigLIP's values."""
        self.x = x
        self.y = y
        dtype = jax.tree.leaves(nnx.state(x))[0].dtype
        self.log_scale = nnx.Param(jnp.asarray(losses.INITIAL_LOG_SCALE, dtype))
        self.bias = nnx.Param(jnp.asarray(losses.INITIAL_BIAS, dtype))

    def to_affine(self) -> tuple[AffineMap, AffineMap]:
        """Both heads as affine maps.

        Raises:
          InputError: a head is not linear.
        """
        if not (isinstance(self.x, LinearHead) and isinstance(self.y, LinearHead)):
            raise checks.InputError(
                f"heads: {self.x.kind} heads are no affine maps; build with kind='linear'"
            )
        return self.x.to_affine(), self.y.to_affine()


def build_heads(
    d_x: int,
    d_y: int,
    dim: int,
    *,
    kind: str = "linear",
    hidden: int | None = None,
    norm: str | None = None,
    seed: int = 0,
    teacher: MapPair | None = None,
    dtype: Any = jnp.float32,
) -> Heads:
    """Fresh heads from widths d_x and d_y to a shared space of width `dim`.

    Args:
      d_x: width of the first modality's embeddings.
      d_y: width of the second modality's.
      dim: width of the shared space.
      kind: one of `KINDS`.
      hidden: hidden width of those that have one; None means their usual one.
      norm: "layer" or "l2"; None means the kind's usual one; a teacher brings its own.
      seed: of the random start.
      teacher: start linear heads from the first `dim` directions of this teacher.
      dtype: of the parameters; with a teacher, the teacher's.

    Returns:
      The heads, all of whose variables are `nnx.Param`.

    Raises:
      InputError: an option is unknown, or the teacher does not fit the widths.

    Example:
      >>> heads = build_heads(8, 6, 4)
      >>> graphdef, params = nnx.split(heads)
      >>> heads.x(jnp.ones((2, 8))).shape, heads.y(jnp.ones((2, 6))).shape
      ((2, 4), (2, 4))
    """
    checks.choice("kind", kind, KINDS)
    checks.whole(1, d_x=d_x, d_y=d_y, dim=dim)
    checks.whole(1, or_none=True, hidden=hidden)
    if teacher is not None:
        return _heads_from_teacher(teacher, d_x, d_y, dim, kind)
    options: dict[str, Any] = {"dtype": dtype, "rngs": nnx.Rngs(seed)}
    if norm is not None:
        options["norm"] = norm
    if kind != "linear":
        options["hidden"] = hidden
    return Heads(*(_CLASSES[kind](width, dim, **options) for width in (d_x, d_y)))


def _heads_from_teacher(teacher: MapPair, d_x: int, d_y: int, dim: int, kind: str) -> Heads:
    if kind != "linear":
        raise checks.InputError(
            f"teacher: cannot start heads of kind {kind!r}; use kind='linear' or teacher=None"
        )
    widths = teacher.map_x.weight.shape[1], teacher.map_y.weight.shape[1]
    if widths != (d_x, d_y):
        raise checks.InputError(
            f"teacher: maps widths {widths} but the embeddings have {(d_x, d_y)}; "
            "fit the teacher on the same encoders"
        )
    return Heads(
        LinearHead.from_affine(teacher.map_x.leading(dim)),
        LinearHead.from_affine(teacher.map_y.leading(dim)),
    )
