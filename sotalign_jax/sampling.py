"""Batches as a pure function of (seed, step): a resumed run draws what an uninterrupted one does.

Rows come without replacement within an epoch, in an order that is never stored or sorted: a
keyed permutation of 0 .. n-1 is evaluated only where a batch needs it, in O(batch) whatever n is.

`draw` takes a batch from arrays on the device. `Feed` reads the same rows from the host, of
memory-mapped files or for many devices: each process reads only what its own devices need, and the
next batch is read while a step runs.
"""

import concurrent.futures
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from sotalign_jax.ot import sharding

READERS = 8
"""Rows are read by so many threads: a disk answers several questions at a time."""
_LEAST = 256
_ROUNDS = 8


class DeviceData(NamedTuple):
    """Training arrays, on the device or the host, in their stored dtype.

    `near_x` and `near_y`, for methods that use them, are the rows of each pool that are closest to
    each pair's own row. `star_x` and `star_y` are the teacher's features of each pool, if known.
    """

    pairs_x: Float[Array, "p d_x"]
    pairs_y: Float[Array, "p d_y"]
    pool_x: Float[Array, "u d_x"]
    pool_y: Float[Array, "v d_y"]
    near_x: Int[Array, "p k"] | None = None
    near_y: Int[Array, "p k"] | None = None
    star_x: Float[Array, "u e"] | None = None
    star_y: Float[Array, "v e"] | None = None


class Batch(NamedTuple):
    """One step's rows: a[i] belongs to b[i]; x and y are unpaired; `step` counts from 0.

    `near_a[i]` is a neighbour of a[i] in the pool, and likewise `near_b[i]`; `star_x` and `star_y`
    are the teacher's features of x and y. Each is None without a table of it.
    """

    a: Float[Array, "p d_x"]
    b: Float[Array, "p d_y"]
    x: Float[Array, "n d_x"]
    y: Float[Array, "m d_y"]
    near_a: Float[Array, "p d_x"] | None = None
    near_b: Float[Array, "p d_y"] | None = None
    step: Int[Array, ""] | int = 0
    star_x: Float[Array, "n e"] | None = None
    star_y: Float[Array, "m e"] | None = None


_TABLES = {"a": "pairs_x", "b": "pairs_y", "x": "pool_x", "y": "pool_y"}
_TABLES |= {"near_a": "pool_x", "near_b": "pool_y", "star_x": "star_x", "star_y": "star_y"}
"""What each part of a batch is taken from."""


def mix(x: Array) -> Array:
    """A 32-bit integer hash (two rounds of multiply and xor-shift)."""
    for multiplier, shift in ((0x7FEB352D, 15), (0x846CA68B, 16)):
        x = (x ^ (x >> shift)) * jnp.uint32(multiplier)
    return x ^ (x >> 16)


def permute(key: Array, indices: Int[Array, " b"], size: int) -> Int[Array, " b"]:
    """Where a keyed random permutation of 0 .. size-1 sends `indices`.

    A Feistel network permutes the next power of four; values that fall outside are sent on until
    they fall inside, which keeps it a permutation.

    >>> sorted(permute(jax.random.key(0), jnp.arange(5), 5).tolist())
    [0, 1, 2, 3, 4]
    """
    half = max(1, math.ceil(math.log2(max(size, 2)) / 2))
    mask = jnp.uint32(2**half - 1)
    round_keys = jax.random.bits(key, (_ROUNDS,), jnp.uint32)

    def network(value: Array) -> Array:
        left, right = value >> half, value & mask
        for k in range(_ROUNDS):
            left, right = right, left ^ (mix(right ^ round_keys[k]) & mask)
        return (left << half) | right

    def outside(value: Array) -> Array:
        return value >= jnp.uint32(size)

    out = jax.lax.while_loop(
        lambda value: jnp.any(outside(value)),
        lambda value: jnp.where(outside(value), network(value), value),
        network(indices.astype(jnp.uint32)),
    )
    return out.astype(jnp.int32)


def draw_rows(key: Array, step: Int[Array, ""], size: int, batch: int) -> Int[Array, " b"]:
    """Rows of step `step`: each epoch visits size // batch disjoint batches of a new order.

    Everything, in place, when the batch covers all rows.

    >>> draw_rows(jax.random.key(0), jnp.int32(3), 4, 10).tolist()
    [0, 1, 2, 3]
    """
    if batch >= size:
        return jnp.arange(size)
    per_epoch = size // batch
    epoch_key = jax.random.fold_in(key, step // per_epoch)
    return permute(epoch_key, (step % per_epoch) * batch + jnp.arange(batch), size)


def row_numbers(
    key: Array, step: Int[Array, ""], data: DeviceData, *, pairs: int, unpaired: int
) -> Batch:
    """The numbers of the rows that `draw` takes, in the place of each; None without a table."""
    key_pairs, key_x, key_y, *near_keys = jax.random.split(key, 5)
    paired = draw_rows(key_pairs, step, len(data.pairs_x), pairs)
    x = draw_rows(key_x, step, len(data.pool_x), unpaired)
    y = draw_rows(key_y, step, len(data.pool_y), unpaired)

    def neighbour(key: Array, near: Array | None) -> Array | None:
        """One of each pair's neighbours, all equally likely."""
        if near is None:
            return None
        pick = jax.random.randint(jax.random.fold_in(key, step), paired.shape, 0, near.shape[1])
        return jnp.asarray(near)[paired, pick]

    near_a, near_b = map(neighbour, near_keys, (data.near_x, data.near_y))
    star_x, star_y = None if data.star_x is None else x, None if data.star_y is None else y
    return Batch(paired, paired, x, y, near_a, near_b, step, star_x, star_y)


def draw(key: Array, step: Int[Array, ""], data: DeviceData, *, pairs: int, unpaired: int) -> Batch:
    """The batch of step `step`: up to `pairs` pairs and up to `unpaired` rows of each pool.

    >>> data = DeviceData(jnp.ones((4, 2)), jnp.ones((4, 3)), jnp.ones((9, 2)), jnp.ones((8, 3)))
    >>> draw(jax.random.key(0), jnp.int32(0), data, pairs=4, unpaired=5).y.shape
    (5, 3)
    """
    rows = row_numbers(key, step, data, pairs=pairs, unpaired=unpaired)

    def take(name: str, table: Array, numbers: Array) -> Array:
        return table if _whole(name, table, numbers) else table[numbers]  # no copy of all rows

    return _collect(take, data, rows)


def _whole(name: str, table: Any, numbers: Any) -> bool:
    """Whether a part of every batch is the table itself; neighbours come in any order."""
    return len(numbers) == len(table) and not name.startswith("near")


def _collect(take: Callable[[str, Any, Any], Any], data: DeviceData, rows: Batch) -> Batch:
    """The batch of these rows, each part by take(name, table, row numbers)."""
    parts: dict[str, Any] = {"step": rows.step}
    for name, table in _TABLES.items():
        numbers = getattr(rows, name)
        parts[name] = None if numbers is None else take(name, getattr(data, table), numbers)
    return Batch(**parts)


class Feed:
    """The batches that `draw` makes, step by step, from arrays on the host.

    With a mesh, rows are split over its devices and come as `sharding.SplitRows`.

    >>> data = DeviceData(*(np.ones((9, width)) for width in (2, 3, 2, 3)))
    >>> with Feed(data, jax.random.key(0), pairs=4, unpaired=5) as feed:
    ...     feed(0).y.shape
    (5, 3)
    """

    def __init__(
        self, data: DeviceData, key: Array, *, pairs: int, unpaired: int, mesh: Mesh | None = None
    ) -> None:
        self._data, self._mesh = data, mesh
        self._rows: Callable[[Any], Batch] = jax.jit(
            lambda step: row_numbers(key, step, data, pairs=pairs, unpaired=unpaired)
        )
        self._placed: dict[str, Any] = {}
        self._ahead = concurrent.futures.ThreadPoolExecutor(1)
        self._readers = concurrent.futures.ThreadPoolExecutor(READERS)
        self._next: dict[int, concurrent.futures.Future[Batch]] = {}

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *error: object) -> None:
        # Threads that outlive the interpreter's end would crash it after ctrl-C.
        for executor in (self._ahead, self._readers):
            executor.shutdown(cancel_futures=True)

    def __call__(self, step: int) -> Batch:
        """The batch of a step that is counted from 0; steps are usually asked for in order."""
        waiting = self._next.pop(step, None) or self._start(step)
        self._next = {step + 1: self._start(step + 1)}
        return waiting.result()

    def _start(self, step: int) -> "concurrent.futures.Future[Batch]":
        # Row numbers are asked of the device now: later they would wait for the step to end.
        return self._ahead.submit(self._read, step, self._rows(jnp.int32(step)))

    def _read(self, step: int, numbers: Batch) -> Batch:
        return _collect(self._take, self._data, jax.device_get(numbers)._replace(step=step))

    def _take(self, name: str, array: Any, rows: np.ndarray) -> Any:
        """These rows on the devices; where every batch has all of them, they are placed once."""
        if name in self._placed:
            return self._placed[name]
        if self._mesh is None:
            taken: Any = jnp.asarray(self._gather(array, rows))
        else:
            shape = len(rows), *array.shape[1:]
            taken = sharding.SplitRows.place(
                lambda part: self._gather(array, rows[part]), shape, self._mesh
            )
        if _whole(name, array, rows):
            self._placed[name] = taken
        return taken

    def _gather(self, array: Any, rows: np.ndarray) -> np.ndarray:
        parts = np.array_split(rows, max(1, min(READERS, len(rows) // _LEAST)))
        return np.concatenate(list(self._readers.map(array.__getitem__, parts)))
