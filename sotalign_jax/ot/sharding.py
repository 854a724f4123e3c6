"""Rows split over the devices of a mesh; with one device nothing here happens.

What grows with the batch is cut by rows, one piece a device: features, plans, row scalings. What
belongs to the columns is the same everywhere, and sums over rows are all-reduced. The mesh is the
one in context, and all of its axes are used:

    with jax.set_mesh(sharding.rows_mesh()):
        loss = jax.jit(klot_from_embeddings)(f, g, f_star, g_star)
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from sotalign_jax import checks

Axes = tuple[str, ...]
"""Names of the mesh axes that rows are split over; empty where they are not."""


def rows_mesh(devices: int | None = None) -> Mesh | None:
    """A mesh of all devices, or of the first `devices`; None when that is a single one.

    >>> rows_mesh(1) is None
    True
    """
    available = jax.devices()
    count = len(available) if devices is None else devices
    if not 1 <= count <= len(available):
        raise checks.InputError(
            f"mesh: {count} devices asked for but {len(available)} are there; "
            f"pass 1 to {len(available)}, or None for all"
        )
    if jax.process_count() > 1 and count != len(available):
        raise checks.InputError(
            f"mesh: {count} devices asked for but {jax.process_count()} processes hold "
            f"{len(available)}; they are used together, leave it out"
        )
    if count == 1:
        return None
    return jax.make_mesh((count,), ("rows",), (AxisType.Auto,), devices=available[:count])


def axes() -> Axes:
    """The axes of the mesh in context; none inside a `shard_map`, which splits rows itself.

    >>> axes()
    ()
    """
    mesh = jax.sharding.get_abstract_mesh()
    return () if mesh.empty or mesh.size == 1 or mesh.manual_axes else mesh.axis_names


def share(n: int) -> int:
    """Most rows, of n, that one device holds.

    >>> share(10)
    10
    """
    return -(-n // jax.sharding.get_abstract_mesh().size) if axes() else n


def pad(x: Array, value: float = 0.0) -> Array:
    """x with rows of `value` at its end, up to equally many for each device."""
    missing = share(len(x)) * jax.sharding.get_abstract_mesh().size - len(x) if axes() else 0
    widths = [(0, missing)] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, widths, constant_values=value) if missing else x


def by_rows(
    function: Callable[[Axes, Any, Any], tuple[Any, Any]], rows: Any, shared: Any
) -> tuple[Any, Any]:
    """Calls function(axes, rows, shared), with rows split over the mesh in context if there is one.

    Args:
        function: gets the axes to reduce over, its own part of `rows`, and all of `shared`;
            returns arrays of its own rows, and others that are the same on every device.
        rows: a pytree of arrays that are padded, see `pad`.
        shared: a pytree of arrays that every device needs whole.
    """
    names = axes()
    if not names:
        return function((), rows, shared)
    split, whole = PartitionSpec(names), PartitionSpec()
    mapped = jax.shard_map(
        functools.partial(function, names),
        in_specs=(split, whole),
        out_specs=(split, whole),
        check_vma=False,  # values that loops carry change between equal and unequal on devices
    )
    return mapped(rows, shared)


# --- inside a function that `by_rows` calls ----------------------------------------------------


def size(axes: Axes) -> int:
    """Number of devices."""
    return jax.lax.axis_size(axes) if axes else 1


def whole(x: Array, axes: Axes) -> Array:
    """All rows of an array of which every device has its own."""
    return jax.lax.all_gather(x, axes, tiled=True) if axes else x


def total(x: Array, axes: Axes) -> Array:
    """The sum of x over devices."""
    return jax.lax.psum(x, axes) if axes else x


def largest(x: Array, axes: Axes) -> Array:
    """The maximum of x over devices."""
    return jax.lax.pmax(x, axes) if axes else x


def total_and_largest(
    x: Float[Array, " m"], y: Float[Array, ""], axes: Axes
) -> tuple[Float[Array, " m"], Float[Array, ""]]:
    """`total(x)` and `largest(y)` of a y >= 0 in one all-reduce: small ones cost only latency."""
    if not axes:
        return x, y
    every = jnp.zeros(size(axes), x.dtype).at[jax.lax.axis_index(axes)].set(y)
    both = jax.lax.psum(jnp.concatenate([x, every]), axes)
    return both[: len(x)], jnp.max(both[len(x) :])


def scattered_total(x: Float[Array, "m d"], axes: Axes) -> Float[Array, "k d"]:
    """The sum of x over devices, of which each keeps its own rows; the last may be padding."""
    if not axes:
        return x
    x = jnp.pad(x, [(0, -len(x) % size(axes)), (0, 0)])
    return jax.lax.psum_scatter(x, axes, tiled=True)


def total_by_rows(
    part: Callable[[Any, Any], tuple[Array, Any]], like: Array, carry: Any, axes: Axes
) -> tuple[Array, Any]:
    """Sums over devices of arrays that never exist whole: each device ends with its own rows.

    The sums travel from device to device in a ring, each adding its part as they pass.

    Args:
        part: (k, carry) -> this device's part of the rows of device k, and the carry.
        like: an array of the parts' shape.
        carry: what `part` changes on its way.
        axes: of the mesh.
    """
    if not axes:
        return part(0, carry)
    count, own = size(axes), jax.lax.axis_index(axes)
    ring = [(k, (k + 1) % count) for k in range(count)]

    def step(i: Array, sums: tuple[Array, Any]) -> tuple[Array, Any]:
        added, carry = part((own - 1 - i) % count, sums[1])
        return jax.lax.ppermute(sums[0], axes, ring) + added, carry

    return jax.lax.fori_loop(0, count, step, (jnp.zeros_like(like), carry))


# --- placing arrays ----------------------------------------------------------------------------


def split_rows(mesh: Mesh) -> NamedSharding:
    """Rows cut into one piece for each device."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SplitRows:
    """The first `size` rows of an array that is padded so that all devices hold equally many."""

    padded: Array
    size: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def place(
        cls, read: Callable[[slice], np.ndarray], shape: tuple[int, ...], dtype: Any, mesh: Mesh
    ) -> "SplitRows":
        """Splits the rows that `read` returns; a process reads those of its own devices alone."""
        size, *width = shape
        padded = _padded(size, mesh)

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            start, stop, _ = index[0].indices(padded)
            rows = np.zeros((stop - start, *width), dtype)
            if start < size:
                rows[: size - start] = read(slice(start, min(stop, size)))
            return rows

        whole = jax.make_array_from_callback((padded, *width), split_rows(mesh), part)
        return cls(whole, size)

    @classmethod
    def shape(cls, x: jax.ShapeDtypeStruct, mesh: Mesh) -> "SplitRows":
        """What `place` returns of rows of this shape, to compile for."""
        size = _padded(len(x), mesh), *x.shape[1:]
        whole: Any = jax.ShapeDtypeStruct(size, x.dtype, sharding=split_rows(mesh))
        return cls(whole, len(x))

    def trim(self) -> Array:
        """The rows without the padding, still split; inside `jit`."""
        return self.padded[: self.size]


def _padded(size: int, mesh: Mesh) -> int:
    return -(-size // mesh.size) * mesh.size


def trim(tree: Any) -> Any:
    """A tree in which every `SplitRows` is an array of its rows."""

    def split(x: Any) -> bool:
        return isinstance(x, SplitRows)

    return jax.tree.map(lambda x: x.trim() if split(x) else x, tree, is_leaf=split)


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Arrays, which all processes hold alike, on every device of the mesh."""

    def place(x: Any) -> Array:
        value = np.asarray(x)
        return jax.make_array_from_callback(value.shape, replicated(mesh), lambda index: value)

    return jax.tree.map(place, tree)


def local(tree: Any) -> Any:
    """Replicated arrays as arrays of one device of this process; others as they are."""

    def one(x: Any) -> Any:
        several = isinstance(x, jax.Array) and len(x.sharding.device_set) > 1
        return x.addressable_data(0) if several else x

    return jax.tree.map(one, tree)
