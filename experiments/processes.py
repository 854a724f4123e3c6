"""One run on several hosts: each starts the same command, with its own --process_id.

All processes compute; the first alone keeps records and talks. The others write what it writes
into a folder that is thrown away, and learn from it what it found on disk.
"""

import atexit
import contextlib
import json
import os
import pathlib
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO, TypeVar

import jax
from absl import flags
from jax._src import distributed  # its key-value store has no public name
from jax.experimental import multihost_utils

from sotalign_jax import checks

Tree = TypeVar("Tree")

_COORDINATOR = flags.DEFINE_string(
    "coordinator",
    None,
    "HOST:PORT of the first process when there are several, or `auto` to ask the cluster (Slurm, "
    "Open MPI, Kubernetes, TPU).",
)
_COUNT = flags.DEFINE_integer("num_processes", None, "How many processes there are.", 1)
_INDEX = flags.DEFINE_integer("process_id", None, "Which of them this is, from 0.", 0)

BEAT = 3.0
"""Seconds between two signs of life."""
SILENCE = 40.0
"""Seconds without a sign of life after which a process counts as lost."""
_agreed = iter(range(2**63))
_stands_for: dict[pathlib.Path, pathlib.Path] = {}


def several() -> bool:
    """Whether this is one of several processes."""
    return _store() is not None


def _store() -> Any:
    """Texts by key that all processes share."""
    return distributed.global_state.client


def is_first() -> bool:
    """Whether this process keeps the records."""
    return distributed.global_state.process_id == 0


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Joins the other processes that the flags name, if any, and watches over them."""
    given = _COORDINATOR.value, _COUNT.value, _INDEX.value
    if given == (None, None, None):
        yield
        return
    _connect(*given)
    # Large files are looked through by all together, a part by each.
    checks.set_share(jax.process_index(), jax.process_count())
    if not is_first():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    ended = threading.Event()
    threading.Thread(target=_watch, args=(ended,), daemon=True).start()
    yield
    # All wait for the last one: records are complete when any process has ended well.
    _store().wait_at_barrier("sotalign ended", 24 * 3600 * 1000)
    ended.set()


def _connect(address: str | None, count: int | None, index: int | None) -> None:
    automatic = address == "auto"
    if not automatic:
        for name, value in (("coordinator", address), ("num_processes", count)):
            if value is None:
                raise checks.InputError(
                    f"{name}: is not set; pass --coordinator, --num_processes and --process_id "
                    "together, or --coordinator=auto on a cluster"
                )
        if index is None or not 0 <= index < (count or 0):
            raise checks.InputError(
                f"process_id: is {index}; pass a number from 0 to {(count or 0) - 1}, another one "
                "for each process"
            )
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from us
    try:
        jax.distributed.initialize(
            None if automatic else address,
            count,
            index,
            initialization_timeout=120,
            heartbeat_timeout_seconds=2 * int(SILENCE),  # `_watch` is first, and speaks clearly
            shutdown_timeout_seconds=30,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise checks.InputError(
            f"coordinator: {address} cannot be joined ({reason}); start every process with the "
            "same address, that of the first one"
        ) from error


def _watch(ended: threading.Event) -> None:
    """Ends this process when another gives no sign of life."""
    own = distributed.global_state.process_id
    seen: dict[str, tuple[str, float]] = {}
    beat = 0
    while not ended.wait(BEAT):
        beat += 1
        try:
            _store().key_value_set(f"alive/{own}", str(beat), True)
            signs = dict(_store().key_value_dir_get("alive/"))
        except Exception:  # the first process keeps the store
            if not ended.is_set():
                lost("the first process cannot be reached")
            return
        for key, sign in signs.items():
            if seen.get(key, ("", 0.0))[0] != sign:
                seen[key] = sign, time.monotonic()
            elif time.monotonic() - seen[key][1] > SILENCE and not ended.is_set():
                lost(f"process {key.rpartition('/')[2]} gave no sign of life for {SILENCE:.0f} s")


def lost(reason: str) -> None:
    """Ends this process at once, as the run cannot go on without another one."""
    stop(f"error: {reason}; start all processes again with the same --workdir to go on")


def stop(message: str) -> None:
    """Ends one of several processes: an orderly end would wait for the others."""
    print(message, file=sys.stderr, flush=True)
    os._exit(1)


def workdir(path: pathlib.Path) -> pathlib.Path:
    """Where this process writes: `path` for the first one."""
    if not several() or is_first():
        return path
    folder = pathlib.Path(tempfile.mkdtemp(prefix="sotalign-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _stands_for[folder] = path
    return folder


def first_workdir(path: pathlib.Path) -> pathlib.Path:
    """What `path`, in a folder of this process, is for the first one."""
    for folder, original in _stands_for.items():
        if path.is_relative_to(folder):
            return original / path.relative_to(folder)
    return path


def progress_stream() -> TextIO | None:
    """Where progress is shown: nowhere by any but the first process; None is the usual place."""
    return None if is_first() else sys.stdout


def agree(find: Callable[[], Any]) -> Any:
    """What the first process finds, as JSON; the others do not look but ask it.

    Raises:
        InputError: the first process did, and so do all.
    """
    if not several():
        return find()
    store, key = _store(), f"agreed/{next(_agreed)}"
    if not is_first():
        found = json.loads(store.blocking_key_value_get(key, 24 * 3600 * 1000))
        if "error" in found:
            raise checks.InputError(found["error"])
        return found["value"]
    try:
        value = find()
    except checks.InputError as error:
        store.key_value_set(key, json.dumps({"error": str(error)}))
        raise
    store.key_value_set(key, json.dumps({"value": value}))
    return value


def from_first(tree: Tree) -> Tree:
    """Arrays of the first process on all of them: hosts may round differently."""
    if not several():
        return tree
    arrays = multihost_utils.broadcast_one_to_all(tree, is_source=is_first())
    return jax.tree.map(jax.numpy.asarray, arrays)
