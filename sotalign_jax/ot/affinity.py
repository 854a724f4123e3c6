"""L2 normalisation, cosine affinities, and products at an asked-for precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sotalign_jax import checks
from sotalign_jax.ot import sharding

ArrayLike = jax.Array | np.ndarray
"""What users hand in; nested lists work too."""

HIGHEST = jax.lax.Precision.HIGHEST
"""Full float32, for sums over a kernel and for small systems: bytes limit them, not operations."""
THREE_PASSES = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3
"""For products of features: three bfloat16 passes with float32 sums on a GPU or TPU, float32 on a
CPU. For the teacher's plan they change KLOT's gradient by 1e-5, its tolerance of 1e-4 by 6e-4, one
TF32 pass by 6e-4, one bfloat16 pass by 9e-3 (benchmarks/ACCELERATORS.md)."""


def as_float(x: ArrayLike) -> Array:
    """Casts to float32, keeping float64: affinities and potentials are never narrower."""
    x = jnp.asarray(x)
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def as_floats(*arrays: ArrayLike) -> tuple[Array, ...]:
    """`as_float` of each, all float64 if one is."""
    floats = [as_float(x) for x in arrays]
    wide = any(x.dtype == jnp.float64 for x in floats)
    return tuple(x.astype(jnp.float64) if wide else x for x in floats)


NORM_FLOOR = 2.0**-100
"""Rows without an entry above this count as zero."""


@functools.partial(jax.jit, inline=True)
def _power_of_two(x: Float[Array, "... d"]) -> Float[Array, "..."]:
    """What brings the largest entry of each row near 1; a product with it is exact.

    Compiled also where a caller is not: one program instead of a dozen.
    """
    largest = jnp.max(jnp.abs(jax.lax.stop_gradient(x)), axis=-1)
    _, exponent = jnp.frexp(largest)
    power = jnp.exp2(-jnp.clip(exponent, -100, 100).astype(x.dtype))
    return jnp.where(largest > NORM_FLOOR, power, 0.0)


def inverse_norms(x: Float[Array, "n d"]) -> Float[Array, " n"]:
    """1/||x|| of every row and 0 for zero rows, for entries of any size up to 1e30."""
    power = _power_of_two(x)
    squared = jnp.sum(jnp.square(x * power[..., None]), axis=-1)
    return jnp.where(power > 0, jax.lax.rsqrt(jnp.where(power > 0, squared, 1.0)) * power, 0.0)


def l2_normalize(x: Float[ArrayLike, "... d"]) -> Float[Array, "... d"]:
    """Rows scaled to unit length, x / ||x||, whatever their size.

    Zero rows stay zero, and so does their gradient.

    >>> l2_normalize(jnp.array([[3.0, 4.0], [3e-25, 4e-25], [0.0, 0.0]]))
    Array([[0.6, 0.8],
           [0.6, 0.8],
           [0. , 0. ]], dtype=float32)
    """
    rows = as_float(x)
    rows = rows * _power_of_two(rows)[..., None]
    squared = jnp.sum(jnp.square(rows), axis=-1, keepdims=True)
    return rows / jnp.sqrt(jnp.where(squared > 0, squared, 1.0))


def dot(a: Array, b: Array, precision: jax.lax.PrecisionLike = HIGHEST) -> Array:
    """a @ b, at the highest precision unless another one is asked for."""
    if precision is not THREE_PASSES:
        return jnp.matmul(a, b, precision=precision)
    exact = functools.partial(jnp.matmul, precision=HIGHEST)
    if jnp.promote_types(a.dtype, b.dtype) != jnp.float32:
        return exact(a, b)
    # A CPU has no such algorithm, and XLA may even abort where it is asked for one.
    fast = functools.partial(jnp.matmul, precision=THREE_PASSES)
    return jax.lax.platform_dependent(a, b, default=exact, cuda=fast, tpu=fast)


def cosine(
    f: Float[ArrayLike, "n d"],
    g: Float[ArrayLike, "m d"],
    *,
    precision: jax.lax.PrecisionLike = THREE_PASSES,
) -> Float[Array, "n m"]:
    """Cosine affinity K_ij = <f_i, g_j> / (||f_i|| ||g_j||).

    >>> cosine(jnp.array([[1.0, 0.0]]), jnp.array([[2.0, 0.0], [0.0, 1.0]]))
    Array([[1., 0.]], dtype=float32)
    """
    x, y = l2_normalize(f), l2_normalize(g)
    with sharding.mesh_of(x, y):  # rows of both may be split over the same devices
        return dot(x, sharding.gather_explicit(y).T, precision)


# --- checks ---


def check_affinity(name: str, k: ArrayLike) -> None:
    """Raises unless `k` is a non-empty matrix."""
    shape = np.shape(k)
    if len(shape) != 2 or 0 in shape:
        raise checks.InputError(f"{name}: has shape {shape}; pass a non-empty matrix [n, m]")


def check_affinities(k: ArrayLike, k_star: ArrayLike) -> None:
    """Raises unless both are matrices of one shape."""
    check_affinity("K", k)
    if np.shape(k) != np.shape(k_star):
        raise checks.InputError(
            f"K_star: has shape {np.shape(k_star)} but K has {np.shape(k)}; "
            "compute both affinities on the same rows and columns"
        )


def check_features(f: ArrayLike, g: ArrayLike, f_star: ArrayLike, g_star: ArrayLike) -> None:
    """Raises unless student and teacher embed the same rows, each in one space."""
    for name, student, teacher in (("f", f, f_star), ("g", g, g_star)):
        check_affinity(name, student)
        check_affinity(f"{name}_star", teacher)
        if len(student) != len(teacher):
            raise checks.InputError(
                f"{name}_star: has {len(teacher)} rows but {name} has {len(student)}; "
                "student and teacher must embed the same samples"
            )
    check_widths(f, g, f_star, g_star)


def check_widths(f: ArrayLike, g: ArrayLike, f_star: ArrayLike, g_star: ArrayLike) -> None:
    """Raises unless f and g, and f_star and g_star, have one width."""
    for names, x, y in (("f and g", f, g), ("f_star and g_star", f_star, g_star)):
        widths = np.shape(x)[1], np.shape(y)[1]
        if widths[0] != widths[1]:
            raise checks.InputError(
                f"{names}: have widths {widths[0]} and {widths[1]}; "
                "their cosine needs one shared space"
            )
