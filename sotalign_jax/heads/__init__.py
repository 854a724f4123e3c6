"""Alignment heads: the maps f and g from each encoder's space into the shared one.

Every parameter is an `nnx.Param`, so `nnx.split(heads)` gives one graph definition and one state.
Heads return raw features; the losses and the evaluation L2-normalise them.
"""

from sotalign_jax.heads.affine import AffineMap, MapPair, Rows, normalize
from sotalign_jax.heads.csa import CSAHead
from sotalign_jax.heads.layers import Dense, Head, InputNorm
from sotalign_jax.heads.linear import LinearHead
from sotalign_jax.heads.mlp import GLUHead, MLPHead, TanhHead
from sotalign_jax.heads.pair import KINDS, Heads, build_heads, rebuild
from sotalign_jax.heads.sue import Residual, SUEHead

__all__ = [
    "KINDS",
    "AffineMap",
    "CSAHead",
    "Dense",
    "GLUHead",
    "Head",
    "Heads",
    "InputNorm",
    "LinearHead",
    "MLPHead",
    "MapPair",
    "Residual",
    "Rows",
    "SUEHead",
    "TanhHead",
    "build_heads",
    "normalize",
    "rebuild",
]
