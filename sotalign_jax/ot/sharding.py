"""Functions to split rows over the devices of a mesh. With one device they do nothing.

Arrays that grow with the batch are split by rows: features, plans and row scalings. Arrays of the
columns are replicated, and sums over rows are all-reduced. Computation follows data: the mesh is
the one in context (`jax.set_mesh`), or else that of the arrays. Its axes may be Auto or Explicit,
and rows are split over all of them:

    f, g, f_star, g_star = jax.device_put((f, g, f_star, g_star), split_rows(mesh))
    loss = jax.jit(klot_from_embeddings)(f, g, f_star, g_star)
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from sotalign_jax import checks

Axes = tuple[str, ...]
"""Names of the mesh axes that rows are split over, empty if they are not split."""


def rows_mesh(devices: int | None = None) -> Mesh | None:
    """Builds a mesh with one axis of devices.

    Args:
        devices: Number of devices, by default all.

    Returns:
        The mesh, or None for a single device.

    Raises:
        InputError: There are fewer devices, or some devices of several processes would be unused.

    Example:
        >>> rows_mesh(1) is None
        True
    """
    available = jax.devices()
    count = len(available) if devices is None else devices
    if not 1 <= count <= len(available):
        raise checks.InputError(
            f"mesh must have 1..{len(available)} devices, or None for all of them, got {count}"
        )
    # All processes must take part in every computation.
    if jax.process_count() > 1 and count != len(available):
        raise checks.InputError(
            f"mesh must have all {len(available)} devices of the {jax.process_count()} processes, "
            f"got {count}; pass None"
        )
    if count == 1:
        return None
    return jax.make_mesh((count,), ("rows",), (AxisType.Auto,), devices=available[:count])


@contextlib.contextmanager
def mesh_of(*arrays: Array) -> Iterator[None]:
    """Puts the mesh of the arrays in context, unless there is one already.

    It works inside `jit` as well, because the type of an array names its mesh.

    Args:
        *arrays: Arrays, which may be split over a mesh.
    """
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    found = [mesh for mesh in meshes if not mesh.empty]
    if found and jax.sharding.get_abstract_mesh().empty:
        with jax.sharding.use_abstract_mesh(found[0]):
            yield
    else:
        yield


def axes() -> Axes:
    """Returns the axes of the mesh in context that rows are split over.

    There are none inside a user's `shard_map`, which splits rows itself, or inside a `vmap` over
    problems that are split over the mesh.

    Example:
        >>> axes()
        ()
    """
    mesh = jax.sharding.get_abstract_mesh()
    # A mesh of one device needs no collectives. Manual axes belong to a user's `shard_map`.
    unsplit = mesh.empty or mesh.size == 1 or mesh.manual_axes or _splits_problems(mesh)
    return () if unsplit else mesh.axis_names


def _splits_problems(mesh: AbstractMesh) -> bool:
    """Returns True inside a `vmap` over problems that are split over Explicit axes.

    JAX has no function for this. A `shard_map` omits the axes that a `vmap` has taken, so one is
    traced to see its axes.
    """
    if not mesh.explicit_axes or mesh.manual_axes:
        return False
    left: list[Axes] = []

    def note() -> tuple[()]:
        left.append(jax.sharding.get_abstract_mesh().manual_axes)
        return ()

    # Traced only, never run.
    jax.eval_shape(jax.shard_map(note, in_specs=(), out_specs=()))
    return set(left[0]) != set(mesh.axis_names)


def share(n: int) -> int:
    """Returns the number of rows per device, if n rows are split over the mesh in context.

    Args:
        n: Number of rows.

    Returns:
        The number, rounded up. It is n without a mesh.

    Example:
        >>> share(10)
        10
    """
    return -(-n // jax.sharding.get_abstract_mesh().size) if axes() else n


def _reshard(x: Array, spec: PartitionSpec) -> Array:
    """Reshards x if the axes of the mesh are Explicit. With Auto axes the compiler does it."""
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    return jax.sharding.reshard(x, spec) if explicit else x


def split(x: Array, value: float = 0.0) -> Array:
    """Splits rows over the devices, after padding them to equally many per device.

    Args:
        x: Array with rows first.
        value: Value of the padding.

    Returns:
        The padded array, or x itself without a mesh.

    Example:
        >>> split(jnp.ones((5, 2))).shape
        (5, 2)
    """
    if not axes():
        return x
    # Shards must have equal sizes.
    missing = share(len(x)) * jax.sharding.get_abstract_mesh().size - len(x)
    if missing:
        widths = [(0, missing)] + [(0, 0)] * (x.ndim - 1)
        x = jnp.pad(_reshard(x, PartitionSpec()), widths, constant_values=value)
    return _reshard(x, PartitionSpec(axes()))


def join(x: Array, n: int) -> Array:
    """Removes the padding of `split` from an array of n rows.

    Args:
        x: Padded array.
        n: Number of rows without padding.

    Returns:
        The first n rows.

    Example:
        >>> join(jnp.ones((6, 2)), 5).shape
        (5, 2)
    """
    return x if len(x) == n else _reshard(x, PartitionSpec())[:n]


def like(x: Array, reference: Array) -> Array:
    """Splits x as the reference is split, if the axes of the mesh are Explicit.

    Args:
        x: Array to split.
        reference: Array of the same number of dimensions.

    Returns:
        The array with the sharding of the reference.
    """
    return _reshard(x, jax.typeof(reference).sharding.spec)


def gather_explicit(x: Array) -> Array:
    """Replicates x on every device, if the axes of the mesh are Explicit.

    Args:
        x: Array to replicate.

    Returns:
        The replicated array.
    """
    return _reshard(x, PartitionSpec())


def shard_map(
    function: Callable[[Axes, Any, Any], tuple[Any, Any]], rows: Any, shared: Any
) -> tuple[Any, Any]:
    """Calls function(axes, rows, shared), with rows split over the mesh in context if there is one.

    Args:
        function: Gets the axes to reduce over, its own part of `rows`, and all of `shared`. It
            returns arrays of its own rows, and arrays that are the same on every device.
        rows: A pytree of arrays that are padded, see `split`.
        shared: A pytree of arrays that every device needs whole.

    Returns:
        The arrays of all rows, and the arrays that are the same on every device.

    Example:
        >>> rows, total = shard_map(lambda axes, x, y: (x, psum(x.sum(), axes)), jnp.ones(3), None)
        >>> float(total)
        3.0
    """
    names = axes()
    if not names:
        alone = functools.partial(function, ())
        if _splits_problems(jax.sharding.get_abstract_mesh()):
            # Loops that carry constants cannot be batched over Explicit axes.
            alone = jax.sharding.auto_axes(alone, out_sharding=PartitionSpec())
        return alone(rows, shared)
    # One axis or several, rows are split over all of them.
    by_rows, whole = PartitionSpec(names), PartitionSpec()
    mapped = jax.shard_map(
        functools.partial(function, names),
        in_specs=(by_rows, whole),
        out_specs=(by_rows, whole),
        check_vma=False,  # the carry of a loop may become different on every device
    )
    return mapped(
        jax.tree.map(lambda x: _reshard(x, by_rows), rows),
        jax.tree.map(lambda x: _reshard(x, whole), shared),
    )


def varying(x: Any) -> frozenset[str]:
    """Returns the axes of a user's `shard_map` over which an array varies.

    Args:
        x: An array.

    Returns:
        The names of the axes, empty outside of a `shard_map`.
    """
    kind: Any = jax.typeof(x)
    return kind.mat.varying if hasattr(kind, "mat") else kind.vma  # JAX before 0.10.2


def vary_like(tree: Any, *references: Array) -> Any:
    """Casts arrays to vary over all axes of a user's `shard_map` over which a reference varies.

    Loops require that their carry has one type before and after a step.

    Args:
        tree: Pytree of arrays.
        *references: Arrays to imitate.

    Returns:
        The cast pytree.
    """
    wanted: frozenset[str] = frozenset().union(*map(varying, references))

    def cast(x: Any) -> Array:
        missing = tuple(wanted - varying(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree) if wanted else tree


def vary_alike(tree: Any) -> Any:
    """Casts all arrays of a tree to vary over the axes of any of them.

    Args:
        tree: Pytree of arrays.

    Returns:
        The cast pytree.
    """
    return vary_like(tree, *jax.tree.leaves(tree))


# --- inside a function that `shard_map` calls --------------------------------------------------


def size(axes: Axes) -> int:
    """Returns the number of devices along the axes.

    Args:
        axes: Axes of the mesh, empty for one device.

    Returns:
        The number of devices.
    """
    return jax.lax.axis_size(axes) if axes else 1


def all_gather(x: Array, axes: Axes) -> Array:
    """Gathers the rows of all devices.

    Args:
        x: Rows of this device.
        axes: Axes of the mesh, empty for one device.

    Returns:
        The rows of all devices, on every device.
    """
    return jax.lax.all_gather(x, axes, tiled=True) if axes else x


def psum(x: Array, axes: Axes) -> Array:
    """Sums x over devices.

    Args:
        x: Array of this device.
        axes: Axes of the mesh, empty for one device.

    Returns:
        The sum, on every device.
    """
    return jax.lax.psum(x, axes) if axes else x


def pmax(x: Array, axes: Axes) -> Array:
    """Computes the maximum of x over devices.

    Args:
        x: Array of this device.
        axes: Axes of the mesh, empty for one device.

    Returns:
        The maximum of every entry, on every device.
    """
    return jax.lax.pmax(x, axes) if axes else x


def psum_and_pmax(
    x: Float[Array, " m"], y: Float[Array, ""], axes: Axes
) -> tuple[Float[Array, " m"], Float[Array, ""]]:
    """Computes psum(x), and pmax(y) of a y >= 0, with one all-reduce.

    Latency dominates the cost of a small all-reduce, so one is faster than two.

    Args:
        x: Vector to sum.
        y: Number >= 0 whose maximum is wanted.
        axes: Axes of the mesh, empty for one device.

    Returns:
        The sum and the maximum.
    """
    if not axes:
        return x, y
    # Each device writes its y into a slot of its own, so the sum over devices collects all y.
    every = jnp.zeros(size(axes), x.dtype).at[jax.lax.axis_index(axes)].set(y)
    both = jax.lax.psum(jnp.concatenate([x, every]), axes)
    return both[: len(x)], jnp.max(both[len(x) :])


def psum_scatter(x: Float[Array, "m d"], axes: Axes) -> Float[Array, "k d"]:
    """Sums x over devices and returns the rows that belong to this device.

    Args:
        x: Array to sum, shape [m, d].
        axes: Axes of the mesh, empty for one device.

    Returns:
        The rows of this device. The last rows may be padding.
    """
    if not axes:
        return x
    # A scatter needs equally many rows for each device.
    x = jnp.pad(x, [(0, -len(x) % size(axes)), (0, 0)])
    return jax.lax.psum_scatter(x, axes, tiled=True)


# --- placing arrays ----------------------------------------------------------------------------


def split_rows(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that splits rows over all devices.

    Args:
        mesh: Devices to split over.

    Returns:
        The sharding.
    """
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that replicates an array on every device.

    Args:
        mesh: Devices to place on.

    Returns:
        The sharding.
    """
    return NamedSharding(mesh, PartitionSpec())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SplitRows:
    """Rows that are padded so that all devices hold equally many.

    Attributes:
        padded: Array with padding at its end.
        size: Number of rows without padding.
    """

    padded: Array
    size: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def place(
        cls, read: Callable[[np.ndarray], np.ndarray], shape: tuple[int, ...], mesh: Mesh
    ) -> "SplitRows":
        """Reads and places the rows of this process's devices. Padding repeats the last row.

        Args:
            read: Maps row numbers to rows.
            shape: Shape of the whole array without padding.
            mesh: Devices to split over.

        Returns:
            The placed rows.
        """
        size, *width = shape
        padded = _padded(size, mesh)

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            return read(np.minimum(np.arange(padded)[index[0]], size - 1))

        whole = jax.make_array_from_callback((padded, *width), split_rows(mesh), part)
        return cls(whole, size)

    @classmethod
    def shape(cls, x: jax.ShapeDtypeStruct, mesh: Mesh) -> "SplitRows":
        """Returns the shape of the result of `place`, for ahead-of-time compilation.

        Args:
            x: Shape and type of the whole array without padding.
            mesh: Devices to split over.

        Returns:
            A `SplitRows` of shapes.
        """
        size = _padded(len(x), mesh), *x.shape[1:]
        whole: Any = jax.ShapeDtypeStruct(size, x.dtype, sharding=split_rows(mesh))
        return cls(whole, len(x))

    def trim(self) -> Array:
        """Returns the rows without padding, inside `jit`. They stay split."""
        return self.padded[: self.size]


def _padded(size: int, mesh: Mesh) -> int:
    """Rounds a number of rows up to a multiple of the devices."""
    return -(-size // mesh.size) * mesh.size


def trim(tree: Any) -> Any:
    """Replaces every `SplitRows` of a tree by its rows, inside `jit`.

    Args:
        tree: Pytree of arrays.

    Returns:
        The pytree without padding.
    """

    def split(x: Any) -> bool:
        return isinstance(x, SplitRows)

    return jax.tree.map(lambda x: x.trim() if split(x) else x, tree, is_leaf=split)


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Places arrays that all processes hold on every device of the mesh.

    Args:
        tree: Pytree of arrays.
        mesh: Devices to place on.

    Returns:
        The placed pytree.
    """

    def place(x: Any) -> Array:
        value = np.asarray(x)
        return jax.make_array_from_callback(value.shape, replicated(mesh), lambda index: value)

    return jax.tree.map(place, tree)


def local(tree: Any) -> Any:
    """Replaces replicated arrays by their copy on one device of this process.

    Args:
        tree: Pytree of arrays.

    Returns:
        The pytree with arrays of one device.
    """

    def one(x: Any) -> Any:
        # All copies of a replicated array are equal.
        several = isinstance(x, jax.Array) and len(x.sharding.device_set) > 1
        return x.addressable_data(0) if several else x

    return jax.tree.map(one, tree)
