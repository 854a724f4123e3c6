"""L2 normalisation, affinities by blocks of rows, and matrix products of a given precision.

An affinity K is a `Matrix` or the `Cosines` of features. Both give blocks of their `rows`, so that
no more of K than a block must exist. `Features.pull` takes a gradient in K back to the features.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sotalign_jax import checks
from sotalign_jax.ot import blocks, device, sharding
from sotalign_jax.ot.blocks import Block

ArrayLike = jax.Array | np.ndarray
"""Arrays that public functions accept. Nested lists work as well."""

HIGHEST = device.HIGHEST
"""Full float32, for sums over a kernel and small systems, which are limited by bandwidth."""


def as_array(x: ArrayLike) -> Array:
    """Returns a JAX array of the same numbers, see `checks.native`.

    Args:
        x: An array, on the host in any byte order.

    Returns:
        The array.

    Example:
        >>> as_array(np.ones(2, ">f4")).dtype
        dtype('float32')
    """
    return jnp.asarray(checks.native(x) if isinstance(x, np.ndarray) else x)


def as_float(x: ArrayLike) -> Array:
    """Casts to float32, or keeps float64.

    The gradient of float16 numbers saturates at 65,504. Otherwise that of l2_normalize, which is
    as large as 1/||x||, would be infinite for rows of a tiny norm.

    Args:
        x: An array, on the host in any byte order.

    Returns:
        The array, in float64 if it was, and otherwise in float32.

    Example:
        >>> as_float(np.ones(2, np.float16)).dtype
        dtype('float32')
    """
    x = as_array(x)
    if x.dtype == jnp.float16:
        return _widened(x)
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


@jax.custom_vjp
def _widened(x: Array) -> Array:
    """Casts float16 to float32."""
    return x.astype(jnp.float32)


def _narrowed(_: None, gradient: Array) -> tuple[Array]:
    """Casts a gradient to float16. Entries beyond its range become its largest number."""
    most = jnp.finfo(jnp.float16).max.astype(jnp.float32)
    return (jnp.clip(gradient, -most, most).astype(jnp.float16),)


_widened.defvjp(lambda x: (x.astype(jnp.float32), None), _narrowed)


def as_floats(*arrays: ArrayLike) -> tuple[Array, ...]:
    """Casts all arrays to float32, or to float64 if one is.

    Args:
        *arrays: Arrays of any type.

    Returns:
        The arrays, all of one type.

    Example:
        >>> [x.dtype.name for x in as_floats(np.ones(2, np.float16), np.ones(2, np.float32))]
        ['float32', 'float32']
    """
    floats = [as_float(x) for x in arrays]
    wide = any(x.dtype == jnp.float64 for x in floats)
    return tuple(x.astype(jnp.float64) if wide else x for x in floats)


# Rows whose entries are all below this count as zero, because the power of two that scales them to
# 1 is limited to 2^100 by `power_of_two`.
_NORM_FLOOR = 2.0**-100


@functools.partial(jax.jit, inline=True)
def power_of_two(x: Float[Array, "... d"]) -> Float[Array, "..."]:
    """Returns powers of two that bring the largest entry of each row near 1.

    Products with powers of two are exact. The function is jitted, so that calls outside of `jit`
    run one program instead of a dozen.

    Args:
        x: Rows, shape [..., d].

    Returns:
        One power per row, and 0 for rows of zeros.

    Example:
        >>> power_of_two(jnp.array([[3.0, 4.0], [0.0, 0.0]])).tolist()
        [0.125, 0.0]
    """
    largest = as_float(jnp.max(jnp.abs(jax.lax.stop_gradient(x)), axis=-1))
    # Clipped, so that the power and its products stay normal float32 numbers.
    _, exponent = jnp.frexp(largest)
    power = jnp.exp2(-jnp.clip(exponent, -100, 100).astype(largest.dtype))
    return jnp.where(largest > _NORM_FLOOR, power, 0.0).astype(x.dtype)


def rescaled(x: Float[Array, "... d"]) -> Float[Array, "... d"]:
    """Scales rows exactly, by powers of two, so that their largest entries are near 1.

    Args:
        x: Rows, shape [..., d].

    Returns:
        The scaled rows, of the type of x.

    Example:
        >>> rescaled(jnp.array([[3.0, 4.0]])).tolist()
        [[0.375, 0.5]]
    """
    return x * power_of_two(x)[..., None]


def inverse_norms(x: Float[Array, "n d"]) -> Float[Array, " n"]:
    """Returns 1/||x|| of every row and 0 for zero rows, for entries of any size up to 1e30.

    Args:
        x: Rows, shape [n, d].

    Returns:
        The inverse norms, shape [n].

    Example:
        >>> inverse_norms(jnp.array([[3.0, 4.0], [0.0, 0.0]])).tolist()
        [0.2, 0.0]
    """
    x = as_float(x)
    # Scaled to entries near 1, because squares of tiny or huge entries leave float32.
    power = power_of_two(x)
    squared = jnp.sum(jnp.square(x * power[..., None]), axis=-1)
    # The inner `where` keeps the gradient of zero rows free of NaN.
    return jnp.where(power > 0, jax.lax.rsqrt(jnp.where(power > 0, squared, 1.0)) * power, 0.0)


def l2_normalize(x: Float[ArrayLike, "... d"]) -> Float[Array, "... d"]:
    """Scales rows to unit length, x / ||x||.

    Rows may have any size from 1e-30 to 1e30. Zero rows stay zero, and so does their gradient.

    Args:
        x: Rows, shape [..., d].

    Returns:
        The unit rows, in float32, or in float64 if x is.

    Example:
        >>> l2_normalize(jnp.array([[3.0, 4.0], [3e-25, 4e-25], [0.0, 0.0]]))
        Array([[0.6, 0.8],
               [0.6, 0.8],
               [0. , 0. ]], dtype=float32)
    """
    # Squares of small or large entries would underflow or overflow in float32.
    rows = rescaled(as_float(x))
    squared = jnp.sum(jnp.square(rows), axis=-1, keepdims=True)
    return rows / jnp.sqrt(jnp.where(squared > 0, squared, 1.0))


def dot(a: Array, b: Array, precision: jax.lax.PrecisionLike = HIGHEST) -> Array:
    """Computes a @ b in float32 or float64.

    Args:
        a: Left operand.
        b: Right operand.
        precision: Full float32 by default, or an algorithm of `device.Profile`, which is used where
            the device has it.

    Returns:
        The product, in float32 even if both operands are bfloat16.

    Example:
        >>> dot(jnp.ones((1, 2), jnp.bfloat16), jnp.ones((2, 1), jnp.bfloat16))
        Array([[2.]], dtype=float32)
    """
    # Products of bfloat16 numbers are exact in float32.
    if a.dtype == b.dtype == jnp.bfloat16:
        return jnp.matmul(a, b, preferred_element_type=jnp.float32)
    # JAX raises for algorithms that a platform lacks. `device.matmul` falls back to float32 there.
    if isinstance(precision, jax.lax.DotAlgorithmPreset):
        return device.matmul(a, b, precision)
    return jnp.matmul(a, b, precision=precision)


def cosine(
    f: Float[ArrayLike, "n d"],
    g: Float[ArrayLike, "m d"],
    *,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "n m"]:
    """Computes the cosine affinity K_ij = <f_i, g_j> / (||f_i|| ||g_j||).

    Args:
        f: Rows, shape [n, d].
        g: Columns, shape [m, d].
        precision: Precision of the product, "highest", "high" or "default". By default the
            device's most exact fast algorithm, see `device`.

    Returns:
        The affinity, shape [n, m].

    Example:
        >>> cosine(jnp.array([[1.0, 0.0]]), jnp.array([[2.0, 0.0], [0.0, 1.0]]))
        Array([[1., 0.]], dtype=float32)
    """
    x, y = l2_normalize(f), l2_normalize(g)
    precision = device.profile().teacher if precision is None else precision
    # Rows of x and y may be split over the same devices, and a product has only one such axis.
    with sharding.mesh_of(x, y):
        return dot(x, sharding.gather_explicit(y).T, precision)


# --- affinities that a kernel is built from ---


class Matrix(NamedTuple):
    """A given affinity K minus the largest entry of each row, which changes no plan.

    Without the subtraction, a large K/epsilon would leave float32 no digits for differences.

    Attributes:
        k: Affinity K.
        top: Largest entry of each row.
    """

    k: Float[Array, "n m"]
    top: Float[Array, " n"]

    @property
    def height(self) -> int:
        """Number of rows."""
        return len(self.k)

    def rows(self, block: Block) -> Float[Array, "size m"]:
        """Returns a block of rows of K."""
        return block.of(self.k) - block.of(self.top)[:, None]


class Cosines(NamedTuple):
    """The cosine affinity K = diag(f_scale) f g^T diag(g_scale) of raw features.

    The inverse norms are kept beside f and g, so that no normalised copy of them exists.

    Attributes:
        f: Raw features of the rows.
        g: Raw features of the columns.
        f_scale: Inverse norms of f.
        g_scale: Inverse norms of g.
        precision: Precision of the product.
    """

    f: Float[Array, "n d"]
    g: Float[Array, "m d"]
    f_scale: Float[Array, " n"]
    g_scale: Float[Array, " m"]
    precision: jax.lax.PrecisionLike = HIGHEST

    @classmethod
    def of(cls, f: Array, g: Array, precision: jax.lax.PrecisionLike = HIGHEST) -> "Cosines":
        """Builds cosine affinities from raw features.

        Args:
            f: Features of the rows, shape [n, d].
            g: Features of the columns, shape [m, d].
            precision: Precision of the product.

        Returns:
            The affinity.

        Example:
            >>> from sotalign_jax.ot.blocks import Block
            >>> block = Block(jnp.int32(0), 1, jnp.array([True]))
            >>> Cosines.of(jnp.array([[3.0, 4.0]]), jnp.eye(2)).rows(block)
            Array([[0.6, 0.8]], dtype=float32)
        """
        if f.dtype == g.dtype == jnp.bfloat16:
            # Rescaled, so that their products cannot overflow.
            f, g = rescaled(f), rescaled(g)
        return cls(f, g, inverse_norms(f), inverse_norms(g), precision)

    @property
    def height(self) -> int:
        """Number of rows."""
        return len(self.f)

    def rows(self, block: Block) -> Float[Array, "size m"]:
        """Returns a block of rows of K."""
        if self.f.dtype == self.g.dtype == jnp.bfloat16:
            # Products of bfloat16 numbers are exact in float32, so one bfloat16 pass is exact. The
            # scale follows, because scaled rows would not be bfloat16 numbers.
            cosines = dot(block.of(self.f), self.g.T) * block.of(self.f_scale)[:, None]
        else:
            cosines = dot(self.left(block), self.g.T, self.precision)
        return cosines * self.g_scale[None, :]

    def left(self, block: Block) -> Float[Array, "size d"]:
        """Returns a block of normalised rows of f."""
        return as_float(block.of(self.f)) * block.of(self.f_scale)[:, None]


def _through_norm(gradient: Array, x: Array, factor: Array) -> Array:
    """Returns factor times the gradient in x, given the gradient in x/||x||."""
    rows, scale = as_float(x), inverse_norms(x)
    # The Jacobian of x/||x|| removes the component along x and divides by ||x||.
    along = jnp.sum(gradient * rows, axis=1) * scale * scale
    return ((gradient - along[:, None] * rows) * (scale * factor)[:, None]).astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Features:
    """Raw features, whose cosines are an affinity that a loss is differentiated in.

    Attributes:
        f: Features of the rows.
        g: Features of the columns.
        affinity_precision: Precision of the cosines.
        plan_precision: Precision of the products of plans with features.
        storage: The n x m arrays that are kept in memory.
    """

    f: Float[Array, "n d"]
    g: Float[Array, "m d"]
    affinity_precision: jax.lax.PrecisionLike = dataclasses.field(metadata={"static": True})
    plan_precision: jax.lax.PrecisionLike = dataclasses.field(metadata={"static": True})
    storage: blocks.Storage = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the affinity."""
        return len(self.f), len(self.g)

    def cosines(self, axes: sharding.Axes) -> Cosines:
        """Returns the affinity of this device's rows.

        Args:
            axes: Axes of the mesh that rows are split over.

        Returns:
            The affinity.
        """
        # Every device needs all columns in every block, so they are gathered once.
        return Cosines.of(self.f, sharding.all_gather(self.g, axes), self.affinity_precision)

    def pull(self, right: Array, left: Array, factor: Array) -> "Features":
        """Pulls a gradient D in the affinity back to the features.

        Args:
            right: D G for normalised columns G, shape [n, d].
            left: D^T F for normalised rows F, shape [m, d].
            factor: Number by which the gradient is multiplied.

        Returns:
            The gradients of f and g.
        """
        f, g = _through_norm(right, self.f, factor), _through_norm(left, self.g, factor)
        return dataclasses.replace(self, f=f, g=g)


# --- checks ---


def check_affinity(name: str, k: ArrayLike) -> None:
    """Checks that an affinity is a non-empty real matrix.

    Args:
        name: Name of the argument for error messages.
        k: The affinity.

    Raises:
        InputError: It is not.
    """
    shape = np.shape(k)
    if len(shape) != 2 or 0 in shape:
        raise checks.InputError(f"{name} must be a non-empty matrix [n, m], got shape {shape}")
    if np.iscomplexobj(k):
        raise checks.InputError(f"{name} must be real, got complex entries")


def check_affinities(k: ArrayLike, k_star: ArrayLike) -> None:
    """Checks that two affinities are matrices of one shape.

    Args:
        k: Student affinity.
        k_star: Teacher affinity.

    Raises:
        InputError: They are not.
    """
    check_affinity("K", k)
    check_affinity("K_star", k_star)
    if np.shape(k) != np.shape(k_star):
        raise checks.InputError(
            f"K_star has shape {np.shape(k_star)} but K has shape {np.shape(k)}; "
            "compute both affinities on the same rows and columns"
        )


def check_features(f: ArrayLike, g: ArrayLike, f_star: ArrayLike, g_star: ArrayLike) -> None:
    """Checks that student and teacher embed the same rows, each in one space.

    Args:
        f: Student features of the rows.
        g: Student features of the columns.
        f_star: Teacher features of the rows.
        g_star: Teacher features of the columns.

    Raises:
        InputError: Numbers of rows or widths differ.
    """
    for name, student, teacher in (("f", f, f_star), ("g", g, g_star)):
        check_affinity(name, student)
        check_affinity(f"{name}_star", teacher)
        if len(student) != len(teacher):
            raise checks.InputError(
                f"{name}_star has {len(teacher)} rows but {name} has {len(student)}; "
                "student and teacher must embed the same samples"
            )
    for suffix, x, y in (("", f, g), ("_star", f_star, g_star)):
        widths = np.shape(x)[1], np.shape(y)[1]
        if widths[0] != widths[1]:
            raise checks.InputError(
                f"g{suffix} has width {widths[1]} but f{suffix} has width {widths[0]}; "
                "map both into one shared space first"
            )
