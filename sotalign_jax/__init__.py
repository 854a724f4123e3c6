"""SOTAlign in JAX: align frozen encoders of two modalities with few pairs, by optimal transport.

>>> import jax, jax.numpy as jnp
>>> import sotalign_jax as sota
>>> loss, gradient = jax.value_and_grad(sota.klot)(jnp.eye(4), 0.5 * jnp.eye(4))
>>> gradient.shape
(4, 4)
"""

import importlib.util
from typing import TYPE_CHECKING, Any

from sotalign_jax import (
    checks,
    data,
    diagnostics,
    evaluation,
    heads,
    losses,
    methods,
    recipe,
    teachers,
    training,
)
from sotalign_jax.aligner import Aligner
from sotalign_jax.alignment import align
from sotalign_jax.checks import InputError
from sotalign_jax.files import load_array
from sotalign_jax.losses import cka, cka_from_embeddings, infonce, infonce_divergence, siglip
from sotalign_jax.ot.affinity import cosine, l2_normalize
from sotalign_jax.ot.klot import klot, klot_from_embeddings, klot_reference
from sotalign_jax.ot.sinkhorn import Plan, sinkhorn
from sotalign_jax.ot.sinkhorn import reference as sinkhorn_reference
from sotalign_jax.ot.solver import Status
from sotalign_jax.teachers import Teacher, best_cca, cca, kernel_cca, procrustes, tuned_cca
from sotalign_jax.training import contrastive

if TYPE_CHECKING:
    from sotalign_jax.search.model import Model as Model
    from sotalign_jax.search.pictures import pictures as pictures

__version__ = "0.1.0"

__all__ = [
    "Aligner",
    "InputError",
    "Plan",
    "Status",
    "Teacher",
    "align",
    "best_cca",
    "cca",
    "cka",
    "cka_from_embeddings",
    "contrastive",
    "cosine",
    "data",
    "diagnostics",
    "evaluation",
    "heads",
    "infonce",
    "infonce_divergence",
    "kernel_cca",
    "klot",
    "klot_from_embeddings",
    "klot_reference",
    "l2_normalize",
    "load_array",
    "losses",
    "methods",
    "procrustes",
    "recipe",
    "siglip",
    "sinkhorn",
    "sinkhorn_reference",
    "teachers",
    "training",
    "tuned_cca",
]

_SEARCH = {"Model": "sotalign_jax.search.model", "pictures": "sotalign_jax.search.pictures"}
"""Modules of the names that need the extra `extract`."""


def __getattr__(name: str) -> Any:
    """Imports `Model` and `pictures` on first use, because arrays need none of their packages."""
    if name not in _SEARCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for package in ("torch", "transformers", "PIL"):
        if importlib.util.find_spec(package) is None:
            raise checks.not_installed(package, extra="extract")
    return getattr(importlib.import_module(_SEARCH[name]), name)
