"""Loops over blocks of rows, and the choice of the kernels that a device stores."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from sotalign_jax.ot import device

BUILD_ROWS = 512
"""Rows per block while a stored kernel is built or measured: about as many as fit into the on-chip
memory of a TPU at the paper's batch size."""
PRODUCT_ROWS = 1024
"""Rows per block of a plan that is multiplied with features. Every block reads and writes the whole
gradient of the columns, so larger blocks save bytes."""
INT8_ENTRIES = 2**25
"""Fewest entries of a kernel for which an int8 kernel pays off. Smaller ones lose more time to the
launches of additional sweeps than they save in bytes."""


class Storage(NamedTuple):
    """Arrays of n x m entries that are kept in memory.

    Attributes:
        block_size: Rows per block of streamed kernels, or None to store kernels in float32.
        both: True if the kernels of both plans are stored at a time.
        int8: True if sweeps read an int8 kernel.
    """

    block_size: int | None = None
    both: bool = True
    int8: bool = False


def storage(n: int, m: int, dtype: Any, profile: device.Profile | None = None) -> Storage:
    """Chooses the storage of two kernels of n x m entries by the memory of the device.

    Kernels may take half of the memory. If both fit in float32, both are stored. If only one fits,
    one is stored at a time. If none fits, only an int8 kernel is stored, and exact sweeps are
    streamed.

    Args:
        n: Rows of the affinity on one device.
        m: Columns.
        dtype: Type of the kernel's entries.
        profile: Profile of the device, by default of the local one.

    Returns:
        The `Storage`.

    Example:
        >>> a100 = device.Profile("cuda 8.0", memory=60 * 2**30)
        >>> storage(22_768, 22_768, "float32", a100)
        Storage(block_size=None, both=True, int8=True)
        >>> storage(100_000, 100_000, "float32", a100)
        Storage(block_size=2560, both=False, int8=True)
    """
    profile = device.profile() if profile is None else profile
    itemsize, room = jnp.dtype(dtype).itemsize, profile.memory / 2
    # `kernel.narrow` encodes float32 numbers only.
    int8 = profile.int8 and itemsize == 4 and n * m >= INT8_ENTRIES
    int8_bytes = n * m if int8 else 0
    # An int8 kernel is kept beside the float32 one.
    for both in (True, False):
        if (1 + both) * n * m * itemsize + int8_bytes <= room:
            return Storage(None, both, int8)
    # About three blocks exist at a time. They may take a twentieth of the memory. Multiples of 128
    # fill the tiles of a TPU.
    rows = int(profile.memory / 20 // (3 * m * itemsize))
    rows = min(max(rows // 128 * 128, 128), 4096)
    return Storage(rows, False, int8 and int8_bytes <= room)


class Block(NamedTuple):
    """A block of consecutive rows.

    Attributes:
        start: Number of the first row.
        size: Number of rows.
        fresh: True for rows that no earlier block has visited. The last block may overlap the one
            before.
    """

    start: Int[Array, ""]
    size: int
    fresh: Bool[Array, " size"]

    def of(self, x: Array) -> Array:
        """Returns these rows of x.

        Args:
            x: Array with rows first.

        Returns:
            The rows.

        Example:
            >>> Block(jnp.int32(1), 2, jnp.ones(2, bool)).of(jnp.arange(4)).tolist()
            [1, 2]
        """
        return jax.lax.dynamic_slice_in_dim(x, self.start, self.size)

    def put(self, x: Array, rows: Array) -> Array:
        """Returns x with these rows replaced.

        Args:
            x: Array with rows first.
            rows: New rows, one for each row of the block.

        Returns:
            The new array. Inside a loop XLA updates x in place.

        Example:
            >>> Block(jnp.int32(1), 2, jnp.ones(2, bool)).put(jnp.zeros(4), jnp.ones(2)).tolist()
            [0.0, 1.0, 1.0, 0.0]
        """
        return jax.lax.dynamic_update_slice_in_dim(x, rows, self.start, 0)

    def add(self, x: Array, rows: Array) -> Array:
        """Returns x with values added to these rows.

        Args:
            x: Array with rows first.
            rows: Rows to add, one for each row of the block.

        Returns:
            The new array.
        """
        return self.put(x, self.of(x) + rows)


def over_rows(
    n: int,
    size: int,
    body: Callable[[Block, Any], Any],
    carry: Any,
    part: tuple[Any, int] | None = None,
) -> Any:
    """Runs a function over blocks of rows, one after the other.

    Blocks are explicit because only some of XLA's backends fuse a reduction into the computation of
    a matrix. Others would store the whole matrix.

    Args:
        n: Number of rows.
        size: Rows per block. The last block overlaps the one before if `size` does not divide n.
        body: Maps (block, carry) to the next carry.
        carry: Initial carry.
        part: (first, count) to visit only these rows.

    Returns:
        The last carry.

    Example:
        >>> over_rows(5, 2, lambda block, total: total + jnp.sum(block.fresh), 0).item()
        5
    """
    first, count = (0, n) if part is None else part
    # A table smaller than a block is one smaller block.
    size = min(count, size)

    def step(i: Array, carry: Any) -> Any:
        begin = first + i * size
        # All blocks have one size, so that the loop compiles once.
        start = jnp.minimum(begin, n - size)
        rows = start + jnp.arange(size)
        fresh = rows >= begin if part is None else (rows >= begin) & (rows < first + count)
        return body(Block(start, size, fresh), carry)

    return jax.lax.fori_loop(0, -(-count // size), step, carry)
