"""Batches as a pure function of (seed, step), so that a resumed run draws the same batches.

Within an epoch rows are drawn without replacement. Their order is never stored: a keyed permutation
of 0 .. n-1 is evaluated at the indices of a batch, in O(batch) for any n.

`draw` takes a batch from arrays on the device. `Feed` reads the same rows from the host, for
memory-mapped files or many devices. Each process reads only the rows of its own devices, and the
next batch is read while a step runs.

References:
    M. Luby and C. Rackoff, "How to construct pseudorandom permutations from pseudorandom
    functions", SIAM J. Comput. 17 (1988): Feistel networks.
    J. Black and P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002: cycle walking.
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
"""Number of threads that read rows. A disk serves several requests at a time."""
# Fewest rows per thread. Smaller parts would cost more in overhead than they gain.
_MIN_ROWS_PER_READER = 256
# Rounds of the Feistel network. Four suffice with ideal round functions (Luby and Rackoff). More
# compensate for a cheap hash.
_ROUNDS = 8


class DeviceData(NamedTuple):
    """Training arrays, on the device or the host, in their stored dtype.

    Attributes:
        pairs_x: Paired rows of the first modality.
        pairs_y: Paired rows of the second modality.
        pool_x: Unpaired rows of the first modality.
        pool_y: Unpaired rows of the second modality.
        near_x: Numbers of the rows of `pool_x` that are closest to each row of `pairs_x`, for
            methods that use them.
        near_y: Numbers of the rows of `pool_y` that are closest to each row of `pairs_y`.
        star_x: The teacher's features of `pool_x`, if they are known.
        star_y: The teacher's features of `pool_y`, if they are known.
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
    """Rows of one step. Parts without a table are None.

    Attributes:
        a: Paired rows of the first modality.
        b: Their partners. Row i belongs to row i of `a`.
        x: Unpaired rows of the first modality.
        y: Unpaired rows of the second modality.
        near_a: A neighbour of each row of `a` in the pool.
        near_b: A neighbour of each row of `b` in the pool.
        step: Number of the step, from 0.
        star_x: The teacher's features of `x`.
        star_y: The teacher's features of `y`.
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


# Table of `DeviceData` that each part of a batch is taken from. "near_a" and "near_b" have no
# tables of their own, because neighbours are rows of the pools.
_TABLES = {"a": "pairs_x", "b": "pairs_y", "x": "pool_x", "y": "pool_y"}
_TABLES |= {"near_a": "pool_x", "near_b": "pool_y", "star_x": "star_x", "star_y": "star_y"}


def hash32(x: Array) -> Array:
    """Hashes 32-bit integers by two rounds of xor-shift and multiply.

    Args:
        x: Unsigned 32-bit integers.

    Returns:
        The hashes, of the same type.

    Example:
        >>> int(hash32(jnp.uint32(0)))
        0

    References:
        C. Wellons, "Prospecting for hash functions", 2018. The multipliers are those of his hash
        "lowbias32", the result of a search for low bias.
    """
    for multiplier, shift in ((0x7FEB352D, 15), (0x846CA68B, 16)):
        x = (x ^ (x >> shift)) * jnp.uint32(multiplier)
    return x ^ (x >> 16)


def permute(key: Array, indices: Int[Array, " b"], size: int) -> Int[Array, " b"]:
    """Evaluates a keyed random permutation of 0 .. size-1 at `indices`.

    A Feistel network permutes the integers below the next power of four. Values outside of
    0 .. size-1 are permuted again until they are inside (cycle walking), which gives a permutation
    of 0 .. size-1.

    Args:
        key: PRNG key of the permutation.
        indices: Numbers in 0 .. size-1.
        size: Number of rows.

    Returns:
        The image of every index.

    Example:
        >>> sorted(permute(jax.random.key(0), jnp.arange(5), 5).tolist())
        [0, 1, 2, 3, 4]

    References:
        M. Luby and C. Rackoff, "How to construct pseudorandom permutations from pseudorandom
        functions", SIAM J. Comput. 17 (1988).
        J. Black and P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.
    """
    # Both halves of a value have the same number of bits, so the domain is a power of four.
    half = max(1, math.ceil(math.log2(max(size, 2)) / 2))
    mask = jnp.uint32(2**half - 1)
    round_keys = jax.random.bits(key, (_ROUNDS,), jnp.uint32)

    def network(value: Array) -> Array:
        left, right = value >> half, value & mask
        for k in range(_ROUNDS):
            # A round is invertible for any function of `right`.
            left, right = right, left ^ (hash32(right ^ round_keys[k]) & mask)
        return (left << half) | right

    def outside(value: Array) -> Array:
        return value >= jnp.uint32(size)

    # The domain is at most four times as large as `size`, so few iterations are expected.
    out = jax.lax.while_loop(
        lambda value: jnp.any(outside(value)),
        lambda value: jnp.where(outside(value), network(value), value),
        network(indices.astype(jnp.uint32)),
    )
    return out.astype(jnp.int32)


def draw_rows(key: Array, step: Int[Array, ""], size: int, batch: int) -> Int[Array, " b"]:
    """Draws the row numbers of a step.

    Each epoch has size // batch disjoint batches, in an order of its own. If the batch size is at
    least `size`, the batch is all rows in order.

    Args:
        key: PRNG key for batch sampling.
        step: Number of the step, from 0.
        size: Number of rows.
        batch: Rows per batch.

    Returns:
        The row numbers, shape [min(batch, size)].

    Example:
        >>> draw_rows(jax.random.key(0), jnp.int32(3), 4, 10).tolist()
        [0, 1, 2, 3]
    """
    if batch >= size:
        return jnp.arange(size)
    per_epoch = size // batch
    # Every epoch drops the size % batch last rows of its order.
    epoch_key = jax.random.fold_in(key, step // per_epoch)
    return permute(epoch_key, (step % per_epoch) * batch + jnp.arange(batch), size)


def row_numbers(
    key: Array, step: Int[Array, ""], data: DeviceData, *, pairs: int, unpaired: int
) -> Batch:
    """Draws the numbers of the rows of a batch, see `draw`.

    Args:
        key: PRNG key for batch sampling.
        step: Number of the step, from 0.
        data: Training arrays.
        pairs: Number of pairs.
        unpaired: Number of rows of each pool.

    Returns:
        A `Batch` of row numbers instead of rows.
    """
    # One key per table, so that changing one batch size does not change the other batches.
    key_pairs, key_x, key_y, *near_keys = jax.random.split(key, 5)
    paired = draw_rows(key_pairs, step, len(data.pairs_x), pairs)
    x = draw_rows(key_x, step, len(data.pool_x), unpaired)
    y = draw_rows(key_y, step, len(data.pool_y), unpaired)

    def neighbour(key: Array, near: Array | None) -> Array | None:
        """Draws one of each pair's neighbours uniformly."""
        if near is None:
            return None
        pick = jax.random.randint(jax.random.fold_in(key, step), paired.shape, 0, near.shape[1])
        return jnp.asarray(near)[paired, pick]

    near_a, near_b = map(neighbour, near_keys, (data.near_x, data.near_y))
    # The teacher's features are rows of tables parallel to the pools.
    star_x, star_y = None if data.star_x is None else x, None if data.star_y is None else y
    return Batch(paired, paired, x, y, near_a, near_b, step, star_x, star_y)


def draw(key: Array, step: Int[Array, ""], data: DeviceData, *, pairs: int, unpaired: int) -> Batch:
    """Draws the batch of a step.

    Args:
        key: PRNG key for batch sampling.
        step: Number of the step, from 0.
        data: Training arrays.
        pairs: Number of pairs, or all if there are fewer.
        unpaired: Number of rows of each pool, or all if there are fewer.

    Returns:
        The `Batch`.

    Example:
        >>> sizes = (4, 2), (4, 3), (9, 2), (8, 3)
        >>> data = DeviceData(*map(jnp.ones, sizes))
        >>> draw(jax.random.key(0), jnp.int32(0), data, pairs=4, unpaired=5).y.shape
        (5, 3)
    """
    rows = row_numbers(key, step, data, pairs=pairs, unpaired=unpaired)

    def take(name: str, table: Array, numbers: Array) -> Array:
        # A batch of all rows is used as it is. Indexing would copy it in every step.
        return table if _whole(name, table, numbers) else table[numbers]

    return _collect(take, data, rows)


def _whole(name: str, table: Any, numbers: Any) -> bool:
    """Returns True if a part of the batch covers all rows of its table, in order."""
    return len(numbers) == len(table) and not name.startswith("near")


def _collect(take: Callable[[str, Any, Any], Any], data: DeviceData, rows: Batch) -> Batch:
    """Builds a batch, each part by take(name, table, row numbers)."""
    parts: dict[str, Any] = {"step": rows.step}
    for name, table in _TABLES.items():
        numbers = getattr(rows, name)
        parts[name] = None if numbers is None else take(name, getattr(data, table), numbers)
    return Batch(**parts)


class Feed:
    """Reads the batches of `draw` from arrays on the host, one step ahead.

    With a mesh, rows are split over its devices and come as `sharding.SplitRows`.

    Args:
        data: Training arrays on the host, which may be memory-mapped.
        key: PRNG key for batch sampling.
        pairs: Number of pairs, or all if there are fewer.
        unpaired: Number of rows of each pool, or all if there are fewer.
        mesh: Devices that the rows are split over.

    Example:
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
        # One thread prepares the next batch, and several threads read its rows.
        self._ahead = concurrent.futures.ThreadPoolExecutor(1)
        self._readers = concurrent.futures.ThreadPoolExecutor(READERS)
        self._next: dict[int, concurrent.futures.Future[Batch]] = {}

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *error: object) -> None:
        # Threads that still run at the interpreter's exit would crash it after ctrl-C.
        for executor in (self._ahead, self._readers):
            executor.shutdown(cancel_futures=True)

    def __call__(self, step: int) -> Batch:
        """Returns the batch of a step, and starts to read the next one."""
        # The first step of a resumed run was not read ahead.
        waiting = self._next.pop(step, None) or self._start(step)
        self._next = {step + 1: self._start(step + 1)}
        return waiting.result()

    def _start(self, step: int) -> "concurrent.futures.Future[Batch]":
        """Starts to read the batch of a step."""
        # Row numbers are computed now. Dispatched later, they would wait for the training step.
        return self._ahead.submit(self._read, step, self._rows(jnp.int32(step)))

    def _read(self, step: int, numbers: Batch) -> Batch:
        """Reads the rows of a batch. It runs in the thread that reads ahead."""
        return _collect(self._take, self._data, jax.device_get(numbers)._replace(step=step))

    def _take(self, name: str, array: Any, rows: np.ndarray) -> Any:
        """Places rows on the devices. Parts that cover a whole table are placed once."""
        if name in self._placed:
            return self._placed[name]
        if self._mesh is None:
            taken: Any = jnp.asarray(self._gather(array, rows))
        else:
            shape = len(rows), *array.shape[1:]
            taken = sharding.SplitRows.place(
                lambda part: self._gather(array, rows[part]), shape, self._mesh
            )
        # Parts that are the same at every step are copied to the device once.
        if _whole(name, array, rows):
            self._placed[name] = taken
        return taken

    def _gather(self, array: Any, rows: np.ndarray) -> np.ndarray:
        """Reads rows of an array with several threads."""
        readers = max(1, min(READERS, len(rows) // _MIN_ROWS_PER_READER))
        parts = np.array_split(rows, readers)
        return np.concatenate(list(self._readers.map(array.__getitem__, parts)))
