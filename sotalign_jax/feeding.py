"""Batches of rows that stay on the host: memory-mapped files, or rows for many devices.

The same rows as `sampling.draw` takes on a device, by the same function of (seed, step). Each
process reads only what its own devices need, and the next batch is read while a step runs.
"""

import concurrent.futures
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from sotalign_jax import sampling
from sotalign_jax.ot import sharding

READERS = 8
"""Rows are read by so many threads: a disk answers several questions at a time."""
_LEAST = 256


class Feed:
    """The batches of a run, step by step.

    >>> data = sampling.DeviceData(*(np.ones((9, width)) for width in (2, 3, 2, 3)))
    >>> with Feed(data, jax.random.key(0), pairs=4, unpaired=5) as feed:
    ...     feed(0).y.shape
    (5, 3)
    """

    def __init__(
        self,
        data: sampling.DeviceData,
        key: Array,
        *,
        pairs: int,
        unpaired: int,
        mesh: Mesh | None = None,
    ) -> None:
        """Opens a feed.

        Args:
            data: arrays on the host; only the rows of a batch are read.
            key: see `sampling.draw`, as for the numbers of rows.
            pairs: pairs in a batch.
            unpaired: unpaired rows of each pool in a batch.
            mesh: devices to split the rows of a batch over; then they come as
                `sharding.SplitRows`.
        """
        self._data, self._mesh = data, mesh
        self._rows: Callable[[Any], sampling.RowNumbers] = jax.jit(
            lambda step: sampling.row_numbers(key, step, data, pairs=pairs, unpaired=unpaired)
        )
        self._whole: dict[str, Any] = {}
        self._ahead = concurrent.futures.ThreadPoolExecutor(1)
        self._readers = concurrent.futures.ThreadPoolExecutor(READERS)
        self._next: dict[int, concurrent.futures.Future[sampling.Batch]] = {}

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *error: object) -> None:
        for executor in (self._ahead, self._readers):
            executor.shutdown(wait=False, cancel_futures=True)

    def __call__(self, step: int) -> sampling.Batch:
        """The batch of a step that is counted from 0; steps are usually asked for in order."""
        waiting = self._next.pop(step, None) or self._start(step)
        self._next = {step + 1: self._start(step + 1)}
        return waiting.result()

    def _start(self, step: int) -> "concurrent.futures.Future[sampling.Batch]":
        # Row numbers are asked of the device now: later they would wait for the step to end.
        return self._ahead.submit(self._read, step, self._rows(jnp.int32(step)))

    def _read(self, step: int, numbers: sampling.RowNumbers) -> sampling.Batch:
        rows, data = jax.device_get(numbers), self._data
        return sampling.Batch(
            self._take("a", data.pairs_x, rows.pairs),
            self._take("b", data.pairs_y, rows.pairs),
            self._take("x", data.pool_x, rows.x),
            self._take("y", data.pool_y, rows.y),
            None if rows.near_x is None else self._take("near_a", data.pool_x, rows.near_x),
            None if rows.near_y is None else self._take("near_b", data.pool_y, rows.near_y),
            step,
        )

    def _take(self, name: str, array: Any, rows: np.ndarray) -> Any:
        """These rows on the devices; where every batch has all of them, they are placed once."""
        whole = not name.startswith("near") and len(rows) == len(array)
        if name in self._whole:
            return self._whole[name]
        if self._mesh is None:
            taken: Any = jnp.asarray(self._gather(array, rows))
        else:
            taken = sharding.SplitRows.place(
                lambda part: self._gather(array, rows[part]),
                (len(rows), *array.shape[1:]),
                array.dtype,
                self._mesh,
            )
        if whole:
            self._whole[name] = taken
        return taken

    def _gather(self, array: Any, rows: np.ndarray) -> np.ndarray:
        parts = np.array_split(rows, max(1, min(READERS, len(rows) // _LEAST)))
        return np.concatenate(list(self._readers.map(array.__getitem__, parts)))
