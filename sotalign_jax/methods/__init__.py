"""Alignment methods: objectives that are trained step by step, and methods that are fitted at once.

A method is a frozen dataclass of its options. Each has its own file and an entry in `METHODS`.
docs/new_method.md and examples/new_method.py show how to write one.
"""

from sotalign_jax.methods.base import Fitted, Method, Metrics, Objective
from sotalign_jax.methods.csa import CSA
from sotalign_jax.methods.nnclr import NNCLR
from sotalign_jax.methods.sail import SAIL, Contrastive
from sotalign_jax.methods.sclip import SCLIP
from sotalign_jax.methods.sotalign import SOTAlign
from sotalign_jax.methods.structure import Structure
from sotalign_jax.methods.sue import SUE
from sotalign_jax.progress import Progress

METHODS: dict[str, Method] = {
    "csa": CSA(),
    "sue": SUE(),
    "contrastive_mlp": Contrastive(),
    "sail": SAIL(),
    "sail_semi": SAIL(supervision="pairs+negatives"),
    "structure": Structure(),
    "structure_semi": Structure(regularize_on="all"),
    "nnclr": NNCLR(),
    "sclip": SCLIP(),
    "sotalign": SOTAlign(),
}
"""All methods by name, with their default options."""

__all__ = [
    "CSA",
    "METHODS",
    "NNCLR",
    "SAIL",
    "SCLIP",
    "SUE",
    "Contrastive",
    "Fitted",
    "Method",
    "Metrics",
    "Objective",
    "Progress",
    "SOTAlign",
    "Structure",
]
