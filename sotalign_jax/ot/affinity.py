"""L2 normalisation, cosine affinities, and products at an asked-for precision."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sotalign_jax import checks

HIGHEST = jax.lax.Precision.HIGHEST
"""At epsilon = 0.005 a worst plan entry is off by 0.004 % with "highest", by 0.03 % with "high" on
a TPU; an accelerator's fast "default" is off by 2 % (TF32 on a GPU) to 16 % (one bfloat16 pass on a
TPU). On CPU all three are the same."""


def as_float(x: Array) -> Array:
    """Casts to float32, keeping float64: affinities and potentials are never narrower."""
    x = jnp.asarray(x)
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


NORM_FLOOR = 1e-8
"""Shorter rows count as having this length."""


def l2_normalize(x: Float[Array, "... d"], *, floor: float = NORM_FLOOR) -> Float[Array, "... d"]:
    """Rows scaled to unit length: x / max(||x||, floor), with a finite gradient at zero.

    >>> l2_normalize(jnp.array([[3.0, 4.0]]))
    Array([[0.6, 0.8]], dtype=float32)
    """
    x = as_float(x)
    # Clamping the square before the root keeps the derivative finite for zero rows.
    squared = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    return x / jnp.sqrt(jnp.maximum(squared, floor**2))


def dot(a: Array, b: Array, precision: jax.lax.PrecisionLike = HIGHEST) -> Array:
    """a @ b, at the highest precision unless another one is asked for."""
    return jnp.matmul(a, b, precision=precision)


def cosine(
    f: Float[Array, "n d"],
    g: Float[Array, "m d"],
    *,
    precision: jax.lax.PrecisionLike = HIGHEST,
) -> Float[Array, "n m"]:
    """Cosine affinity K_ij = <f_i, g_j> / (||f_i|| ||g_j||).

    >>> cosine(jnp.array([[1.0, 0.0]]), jnp.array([[2.0, 0.0], [0.0, 1.0]]))
    Array([[1., 0.]], dtype=float32)
    """
    return dot(l2_normalize(f), l2_normalize(g).T, precision)


# --- checks ---


def check_affinity(name: str, k: Any) -> None:
    """Raises unless `k` is a non-empty matrix."""
    shape = jnp.shape(k)
    if len(shape) != 2 or 0 in shape:
        raise checks.InputError(f"{name}: has shape {shape}; pass a non-empty matrix [n, m]")


def check_affinities(k: Any, k_star: Any) -> None:
    """Raises unless both are matrices of one shape."""
    check_affinity("K", k)
    if jnp.shape(k) != jnp.shape(k_star):
        raise checks.InputError(
            f"K_star: has shape {jnp.shape(k_star)} but K has {jnp.shape(k)}; "
            "compute both affinities on the same rows and columns"
        )


def check_features(f: Array, g: Array, f_star: Array, g_star: Array) -> None:
    """Raises unless student and teacher embed the same rows, each in one space."""
    for name, student, teacher in (("f", f, f_star), ("g", g, g_star)):
        check_affinity(name, student)
        if len(student) != len(teacher):
            raise checks.InputError(
                f"{name}_star: has {len(teacher)} rows but {name} has {len(student)}; "
                "student and teacher must embed the same samples"
            )
    for names, x, y in (("f and g", f, g), ("f_star and g_star", f_star, g_star)):
        if x.shape[1] != y.shape[1]:
            raise checks.InputError(
                f"{names}: have widths {x.shape[1]} and {y.shape[1]}; "
                "their cosine needs one shared space"
            )
