"""Loops over blocks of rows, and how large a block may be on a device."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

BUILD_ROWS = 256
"""Rows of K that exist at a time while a stored kernel is built, measured or multiplied: as many
as a TPU keeps on chip at the paper's size."""


def auto_block(n: int, m: int, itemsize: int, memory: int | None = None) -> int | None:
    """Rows per block for streaming, or None where the stored kernel takes less than half.

    Args:
        n: rows of the affinity.
        m: columns.
        itemsize: bytes of a number.
        memory: bytes of the device; by default `device_memory`.

    >>> auto_block(22_768, 22_768, 4, 80 * 2**30), auto_block(10**6, 10**6, 4, 80 * 2**30)
    (None, 256)
    """
    memory = device_memory() if memory is None else memory
    if 1.25 * n * m * itemsize <= memory / 2:
        return None
    rows = int(memory / 20 // (3 * m * itemsize))  # about three blocks exist at a time
    return min(max(rows // 128 * 128, 128), 4096)


def device_memory() -> int:
    """Bytes of the first device; of the host when that is the device."""
    stats = jax.local_devices()[0].memory_stats() or {}
    on_host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return stats.get("bytes_limit", on_host)


class Block(NamedTuple):
    """A block of consecutive rows, or of columns."""

    start: Int[Array, ""]
    size: int
    fresh: Bool[Array, " size"]
    """Rows that no earlier block held: the last block may reach back into the one before."""

    def of(self, x: Array, axis: int = 0) -> Array:
        """These rows of x, or columns for axis 1."""
        return jax.lax.dynamic_slice_in_dim(x, self.start, self.size, axis)

    def put(self, x: Array, rows: Array) -> Array:
        """x with these rows replaced."""
        return jax.lax.dynamic_update_slice_in_dim(x, rows, self.start, 0)

    def add(self, x: Array, rows: Array) -> Array:
        """x with these rows added to."""
        return self.put(x, self.of(x) + rows)


def over_rows(
    n: int,
    size: int,
    body: Callable[[Block, Any], Any],
    carry: Any,
    part: tuple[Any, int] | None = None,
) -> Any:
    """Runs body(block, carry) over blocks of `size` rows: of all n, or of `part` = (first, count).

    Explicit blocks, for a reduction of a whole matrix is fused by some compilers only and costs
    others a copy of it.
    """
    first, count = (0, n) if part is None else part
    size = min(count, size)

    def step(i: Array, carry: Any) -> Any:
        begin = first + i * size
        start = jnp.minimum(begin, n - size)
        rows = start + jnp.arange(size)
        fresh = rows >= begin if part is None else (rows >= begin) & (rows < first + count)
        return body(Block(start, size, fresh), carry)

    number = -(-count // size)
    with jax.named_scope(f"{number}_blocks"):  # not every compiled program tells it
        return jax.lax.fori_loop(0, number, step, carry)
