"""Reads and prepares items ahead of the encoder, in threads or in processes.

Threads suffice for texts, for encoders on a CPU and for a few cores, because PIL decodes and
resizes without Python's global lock. A GPU embeds pictures faster than the threads of one process
prepare them, since everything else holds that lock.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import multiprocessing
import pathlib
import queue
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import connection
from typing import Any

import numpy as np

from sotalign_jax import checks, storage
from sotalign_jax.search.items import Item

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
        return {"digest": storage.digest(text)[:32]}
    try:
        return storage.fingerprint(origin)
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


def _serve(tasks: connection.Connection, prepare: Callable[[Any], Any]) -> None:
    """Prepares the items that a reader sends, until it closes the connection or is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the reader is interrupted, too, and closes it
    # A killed reader leaves no task, or nobody to send a result to.
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            items = tasks.recv()
            try:
                tasks.send(_prepare_all(items, prepare))
            except Exception as error:
                tasks.send(error)


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
        self._prepare = prepare
        self._processes = processes
        self._stack = contextlib.ExitStack()
        self._idle: queue.SimpleQueue[connection.Connection] = queue.SimpleQueue()
        self.chunk = PROCESS_CHUNK if processes else CHUNK[modality]
        self.count = max(workers, processes)
        # Every process has a thread here, which waits for it.
        self._pool = concurrent.futures.ThreadPoolExecutor(processes or workers)

    def __enter__(self) -> "Reader":
        with contextlib.ExitStack() as stack:
            for _ in range(self._processes):
                self._start_process(stack)
            stack.enter_context(self._pool)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _start_process(self, stack: contextlib.ExitStack) -> None:
        """Starts a process, which ends when `stack` is closed."""
        # A forked process could inherit locks that another thread holds, and open connections.
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        with theirs:
            process = spawn.Process(target=_serve, args=(theirs, self._prepare), daemon=True)
            process.start()
        stack.callback(process.join)
        stack.enter_context(ours)  # closed before the process is joined
        self._idle.put(ours)

    def _delegate(self, items: list[Item]) -> list[Prepared]:
        """Prepares items in an idle process."""
        tasks = self._idle.get()
        try:
            tasks.send(items)
            result = tasks.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            text = "a process of --processes was killed, perhaps for want of memory"
            raise ChildProcessError(f"{text}; run again, with fewer processes") from error
        finally:
            self._idle.put(tasks)
        if isinstance(result, Exception):
            raise result
        return result

    def read(self, items: Iterable[Item], batch: int) -> Iterator[Prepared]:
        """Yields prepared items in order, and stays about two batches ahead.

        Args:
            items: The items.
            batch: Number of items in a batch. Prepared pictures need much memory.

        Yields:
            The prepared items.
        """
        known = functools.lru_cache(maxsize=64)(identify)
        here = functools.partial(_prepare_all, prepare=self._prepare, known=known)
        task = self._delegate if self._processes else here
        rest = iter(items)
        most = 2 * max(batch // self.chunk, self.count)
        waiting: deque[concurrent.futures.Future[list[Prepared]]] = deque()
        while part := list(itertools.islice(rest, self.chunk)):
            waiting.append(self._pool.submit(task, part))
            if len(waiting) >= most:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
