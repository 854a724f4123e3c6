"""Rows split over the devices of a mesh; with one device nothing here happens.

What grows with the batch is cut by rows, one piece a device: features, plans, row scalings. What
belongs to the columns is the same everywhere, and sums over rows are all-reduced. Computation
follows data: the mesh is the one in context (`jax.set_mesh`) or else that of the arrays, with Auto
or Explicit axes, and all of its axes are used:

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


@contextlib.contextmanager
def mesh_of(*arrays: Array) -> Iterator[None]:
    """Puts the mesh that the arrays live on in context, unless there is one already.

    Inside `jit` too: the type of an array names its mesh, whether its axes are Auto or Explicit.
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

    None inside a user's `shard_map`, which splits rows itself, or inside a `vmap` over problems
    that are split over the mesh.

    >>> axes()
    ()
    """
    mesh = jax.sharding.get_abstract_mesh()
    unsplit = mesh.empty or mesh.size == 1 or mesh.manual_axes or _splits_problems(mesh)
    return () if unsplit else mesh.axis_names


def _splits_problems(mesh: AbstractMesh) -> bool:
    """Returns True inside a `vmap` over problems that are split over Explicit axes.

    JAX has no function for it, but a `shard_map` leaves out the axes that `vmap` has taken.
    """
    if not mesh.explicit_axes or mesh.manual_axes:
        return False
    left: list[Axes] = []

    def note() -> tuple[()]:
        left.append(jax.sharding.get_abstract_mesh().manual_axes)
        return ()

    jax.eval_shape(jax.shard_map(note, in_specs=(), out_specs=()))
    return set(left[0]) != set(mesh.axis_names)


def share(n: int) -> int:
    """Most rows, of n, that one device holds.

    >>> share(10)
    10
    """
    return -(-n // jax.sharding.get_abstract_mesh().size) if axes() else n


def _reshard(x: Array, spec: PartitionSpec) -> Array:
    """x, split as `spec` says, where the axes of the mesh are Explicit; GSPMD does it elsewhere."""
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    return jax.sharding.reshard(x, spec) if explicit else x


def split(x: Array, value: float = 0.0) -> Array:
    """x with rows of `value` at its end, up to equally many for each device, split over them."""
    if not axes():
        return x
    missing = share(len(x)) * jax.sharding.get_abstract_mesh().size - len(x)
    if missing:
        widths = [(0, missing)] + [(0, 0)] * (x.ndim - 1)
        x = jnp.pad(_reshard(x, PartitionSpec()), widths, constant_values=value)
    return _reshard(x, PartitionSpec(axes()))


def join(x: Array, n: int) -> Array:
    """The first n rows of what `split` padded."""
    return x if len(x) == n else _reshard(x, PartitionSpec())[:n]


def like(x: Array, reference: Array) -> Array:
    """x, split as the reference is, where the axes of the mesh are Explicit."""
    return _reshard(x, jax.typeof(reference).sharding.spec)


def gather_explicit(x: Array) -> Array:
    """x, whole on every device, where the axes of the mesh are Explicit; else as it is."""
    return _reshard(x, PartitionSpec())


def shard_map(
    function: Callable[[Axes, Any, Any], tuple[Any, Any]], rows: Any, shared: Any
) -> tuple[Any, Any]:
    """Calls function(axes, rows, shared), with rows split over the mesh in context if there is one.

    Args:
        function: gets the axes to reduce over, its own part of `rows`, and all of `shared`;
            returns arrays of its own rows, and others that are the same on every device.
        rows: a pytree of arrays that are padded, see `split`.
        shared: a pytree of arrays that every device needs whole.
    """
    names = axes()
    if not names:
        alone = functools.partial(function, ())
        if _splits_problems(jax.sharding.get_abstract_mesh()):
            # Loops that carry constants cannot be batched over Explicit axes.
            alone = jax.sharding.auto_axes(alone, out_sharding=PartitionSpec())
        return alone(rows, shared)
    by_rows, whole = PartitionSpec(names), PartitionSpec()
    mapped = jax.shard_map(
        functools.partial(function, names),
        in_specs=(by_rows, whole),
        out_specs=(by_rows, whole),
        check_vma=False,  # values that loops carry change between equal and unequal on devices
    )
    return mapped(
        jax.tree.map(lambda x: _reshard(x, by_rows), rows),
        jax.tree.map(lambda x: _reshard(x, whole), shared),
    )


def varying(x: Any) -> frozenset[str]:
    """Axes of a user's `shard_map` over which an array varies; none outside of one."""
    kind: Any = jax.typeof(x)
    return kind.mat.varying if hasattr(kind, "mat") else kind.vma  # JAX before 0.10.2


def vary_like(tree: Any, *references: Array) -> Any:
    """Arrays that vary over the axes of a user's `shard_map` over which any reference does.

    Loops need it of what they carry.
    """
    wanted: frozenset[str] = frozenset().union(*map(varying, references))

    def cast(x: Any) -> Array:
        missing = tuple(wanted - varying(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree) if wanted else tree


def vary_alike(tree: Any) -> Any:
    """`vary_like` of all arrays of a tree: what any of them varies over, they all do."""
    return vary_like(tree, *jax.tree.leaves(tree))


# --- inside a function that `shard_map` calls --------------------------------------------------


def size(axes: Axes) -> int:
    """Number of devices."""
    return jax.lax.axis_size(axes) if axes else 1


def all_gather(x: Array, axes: Axes) -> Array:
    """All rows of an array of which every device has its own."""
    return jax.lax.all_gather(x, axes, tiled=True) if axes else x


def psum(x: Array, axes: Axes) -> Array:
    """The sum of x over devices."""
    return jax.lax.psum(x, axes) if axes else x


def pmax(x: Array, axes: Axes) -> Array:
    """The maximum of x over devices."""
    return jax.lax.pmax(x, axes) if axes else x


def psum_and_pmax(
    x: Float[Array, " m"], y: Float[Array, ""], axes: Axes
) -> tuple[Float[Array, " m"], Float[Array, ""]]:
    """`psum(x)` and `pmax(y)` of a y >= 0 in one all-reduce: small ones cost only latency."""
    if not axes:
        return x, y
    every = jnp.zeros(size(axes), x.dtype).at[jax.lax.axis_index(axes)].set(y)
    both = jax.lax.psum(jnp.concatenate([x, every]), axes)
    return both[: len(x)], jnp.max(both[len(x) :])


def psum_scatter(x: Float[Array, "m d"], axes: Axes) -> Float[Array, "k d"]:
    """The sum of x over devices, of which each keeps its own rows; the last may be padding."""
    if not axes:
        return x
    x = jnp.pad(x, [(0, -len(x) % size(axes)), (0, 0)])
    return jax.lax.psum_scatter(x, axes, tiled=True)


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
        cls, read: Callable[[np.ndarray], np.ndarray], shape: tuple[int, ...], mesh: Mesh
    ) -> "SplitRows":
        """Splits the rows that `read` returns of their numbers, those of own devices alone.

        The last one is repeated where devices would hold fewer.
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
