"""Reads and prepares items ahead of the encoder, in threads or in processes.

Threads suffice for texts, for encoders on a CPU and for a few cores, because PIL decodes and
resizes without Python's global lock. A GPU embeds pictures faster than the threads of one process
prepare them, since everything else holds that lock.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import multiprocessing
import os
import pathlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from experiments import workdir
from experiments.extract.items import Item
from sotalign_jax import checks

CHUNK = {"text": 64, "image": 1, "audio": 1}
"""Items that a thread takes at once. One text takes less time than handing it over."""
PROCESS_CHUNK = 8
"""Items that a process takes at once, of any modality: tasks are copied to it."""


@dataclasses.dataclass
class Prepared:
    """State of an item: fingerprint, prepared content, text, and embedding or skip reason."""

    origin: dict[str, Any]
    content: Any = None
    text: str | None = None
    row: np.ndarray | None = None
    reason: str = ""


def identify(origin: pathlib.Path | str) -> dict[str, Any]:
    """Returns the fingerprint of a file or the digest of a text. Unreadable files have {}."""
    if isinstance(origin, str):
        text = origin.encode("utf-8", "surrogatepass")
        return {"digest": hashlib.blake2b(text, digest_size=16).hexdigest()}
    try:
        return workdir.fingerprint(origin)
    except OSError:  # loading the item will fail, too, and record the reason
        return {}


def _prepare(
    item: Item, prepare: Callable[[Any], Any], known: Callable[[Any], dict[str, Any]]
) -> Prepared:
    """Reads and prepares an item. An error of the item becomes the reason to skip it."""
    # The fingerprint is taken first. If the file changes while it is read, the next start sees it.
    result = Prepared(known(item.origin))
    try:
        content = item.load()
        if isinstance(content, str):
            if not content.strip():
                raise ValueError("text is empty")
            result.text = content
        result.content = prepare(content)
    except (checks.InputError, MemoryError):  # not caused by the item, so skipping would hide it
        raise
    except Exception as error:
        result.reason = checks.first_line(error)
    return result


def _prepare_all(
    items: list[Item],
    prepare: Callable[[Any], Any],
    known: Callable[[Any], dict[str, Any]] | None = None,
) -> list[Prepared]:
    """Prepares several items. Items of the same tar share its fingerprint."""
    known = known or functools.lru_cache(maxsize=64)(identify)
    return [_prepare(item, prepare, known) for item in items]


def _follow_parent() -> None:
    """Ends this process with its parent, whose end would otherwise leave it waiting for tasks."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class Reader:
    """Prepares items of one modality in the background.

    Args:
        modality: Modality of the items.
        prepare: Converts the content of an item for the encoder.
        workers: Number of threads.
        processes: Number of processes that take the place of the threads, or 0.
    """

    def __init__(
        self, modality: str, prepare: Callable[[Any], Any], *, workers: int, processes: int = 0
    ) -> None:
        self._prepare, self._stack = prepare, contextlib.ExitStack()
        self._processes = processes > 0
        self.chunk = PROCESS_CHUNK if processes else CHUNK[modality]
        self.count = max(workers, processes)
        self._pool: concurrent.futures.Executor
        if processes:
            # A forked process could inherit locks that another thread holds.
            spawn = multiprocessing.get_context("spawn")
            self._pool = concurrent.futures.ProcessPoolExecutor(
                processes, mp_context=spawn, initializer=_follow_parent
            )
        else:
            self._pool = concurrent.futures.ThreadPoolExecutor(workers)

    def __enter__(self) -> "Reader":
        self._stack.enter_context(self._pool)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def read(self, items: Iterable[Item], batch: int) -> Iterator[Prepared]:
        """Yields prepared items in order, and stays about two batches ahead.

        Args:
            items: The items.
            batch: Number of items in a batch. Prepared pictures need much memory.

        Yields:
            The prepared items.
        """
        task = functools.partial(_prepare_all, prepare=self._prepare)
        if not self._processes:
            task = functools.partial(task, known=functools.lru_cache(maxsize=64)(identify))
        rest = iter(items)
        most = 2 * max(batch // self.chunk, self.count)
        waiting: deque[concurrent.futures.Future[list[Prepared]]] = deque()
        while part := list(itertools.islice(rest, self.chunk)):
            waiting.append(self._pool.submit(task, part))
            if len(waiting) >= most:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
