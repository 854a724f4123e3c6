"""One run on several hosts: each starts the same command, with its own --process_id.

All processes compute; the first alone keeps records and talks. The others write what it writes
into a folder that is thrown away, and learn from it what it found on disk.
"""

import atexit
import contextlib
import ctypes
import functools
import itertools
import json
import math
import os
import pathlib
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TextIO, TypeVar

import jax
from absl import flags
from jax._src import distributed  # its key-value store has no public name

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

_PATIENCE = flags.DEFINE_float(
    "patience",
    40.0,
    "Seconds to wait for a sign of life of other processes, and three times as long for them to "
    "join.",
    5.0,
)

BEAT = 2.0
"""Seconds between two signs of life."""
DOUBT = 5 * BEAT
"""Seconds without one after which a process counts as lost once an exchange has failed."""
_REMEDY = "start all processes again with the same --workdir to go on"
_agreed = itertools.count()
_ending = threading.Lock()
_stands_for: dict[pathlib.Path, pathlib.Path] = {}


def several() -> bool:
    """Whether this is one of several processes."""
    return _store() is not None


def _store() -> Any:
    """Texts by key that all processes share."""
    return distributed.global_state.client


def _ask(key: str) -> str:
    """Waits for a text that another process leaves: for ever, as `_Watch` ends what is in vain.

    It looks up in between: a signal is handled only there.
    """
    while True:
        try:
            return _store().blocking_key_value_get(key, 1000)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def _meet(where: str) -> None:
    """Waits until all processes are here."""
    _store().key_value_set(f"{where}/{distributed.global_state.process_id}", "here")
    for index in range(distributed.global_state.num_processes):
        _ask(f"{where}/{index}")


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
    _watch.start()
    if not is_first():
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    _meet("start")
    from jax.experimental import multihost_utils

    # Devices are found, and connected, while all are here: it fails if some are late.
    multihost_utils.sync_global_devices("sotalign start")
    # Large files are looked through by all together, a part by each.
    checks.set_share(jax.process_index(), jax.process_count())
    yield
    _meet("end")  # records are complete when any process has ended well
    sys.stdout.flush()
    _watch.ended.set()
    try:
        jax.distributed.shutdown()
    except Exception:  # another process is gone, and with it nothing is lost any more
        _leave(0)


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
    from jaxlib import _jax

    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from us
    patience = int(3 * _PATIENCE.value)
    client = _jax.get_distributed_runtime_client
    _jax.get_distributed_runtime_client = functools.partial(
        client, missed_heartbeat_callback=_first_has_ended
    )
    ctypes.CDLL(None).signal(signal.SIGABRT, _on_abort)
    try:
        jax.distributed.initialize(
            None if automatic else address,
            count,
            index,
            initialization_timeout=patience,
            heartbeat_timeout_seconds=24 * 3600,  # `_Watch` is first, and speaks clearly
            shutdown_timeout_seconds=30,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if "bad_cast" in reason:  # see `_on_abort`
            reason = f"not all processes came within {patience} s"
        raise checks.InputError(
            f"coordinator: {address} cannot be joined ({reason}); start every process with the "
            "same address, that of the first one, or raise --patience"
        ) from error
    finally:
        _jax.get_distributed_runtime_client = client


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _on_abort(number: int) -> None:
    """Called in the thread that aborts; what it aborts for is left to the system on return.

    When the connection to the first process breaks, jaxlib would end this one in its own words. It
    takes a function to call instead, but aborts as it fails to pass a C++ status to Python.
    """
    if _watch.ended.is_set():
        _leave(0)
    host, _, port = str(distributed.global_state.coordinator_address).rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=DOUBT).close()
    except OSError:
        _first_has_ended()
    _suspect()  # a process that stands still can be reached


def _first_has_ended(*_: Any) -> None:
    if not _watch.ended.is_set():
        lost("process 0 has ended")


class _Watch:
    """Signs of life: every process leaves its own with the first one, and looks at the others'."""

    def __init__(self) -> None:
        self.ended, self.doubt = threading.Event(), threading.Event()
        self._answered = 0.0
        self._seen: dict[int, tuple[str, float]] = {}

    def start(self) -> None:
        """Begins once all processes have joined: one that never gives a sign is noticed, too."""
        self._answered = time.monotonic()
        count = distributed.global_state.num_processes
        self._seen = dict.fromkeys(range(count), ("", self._answered))
        for loop in (self._exchange, self._look):
            threading.Thread(target=loop, daemon=True).start()

    def _exchange(self) -> None:
        own, store = distributed.global_state.process_id, _store()
        for beat in itertools.count():
            with contextlib.suppress(Exception):  # `_look` notices when there is no answer
                store.key_value_set(f"alive/{own}", str(beat), True)
                signs = dict(store.key_value_dir_get("alive/"))
                self._answered = time.monotonic()
                for index, (sign, _) in self._seen.items():
                    latest = signs.get(f"alive/{index}", "")
                    if latest != sign:
                        self._seen[index] = latest, self._answered
            if self.ended.wait(BEAT):
                return

    def _look(self) -> None:
        """Apart from `_exchange`, which waits when the first process stands still."""
        while not self.ended.wait(BEAT / 4):
            limit = min(DOUBT if self.doubt.is_set() else math.inf, _PATIENCE.value)
            now = time.monotonic()
            # What is known of the others ends with the last answer of the first, who may be lost.
            silent = {index: self._answered - heard for index, (_, heard) in self._seen.items()}
            silent[0] = max(silent[0], now - self._answered)
            for index, seconds in silent.items():
                if seconds > limit and not self.ended.is_set():
                    lost(f"process {index} gave no sign of life for {seconds:.0f} s")


_watch = _Watch()


def lost(reason: str) -> None:
    """Ends this process at once, as the run cannot go on without another one."""
    stop(f"error: {reason}; {_REMEDY}")


def _suspect() -> None:
    """Leaves `_Watch` the time to end this process, and to tell which other one is lost."""
    _watch.doubt.set()
    time.sleep(DOUBT + 2 * BEAT)


def failed(error: Exception) -> None:
    """Ends this process after an error that another one may have caused, by being lost."""
    _suspect()
    traceback.print_exception(error)
    reason = traceback.format_exception_only(error)[0].splitlines()[0]
    stop(f"error: {reason[:300]}; {_REMEDY}")


def stop(message: str) -> None:
    """Ends one of several processes: an orderly end would wait for the others."""
    _ending.acquire()  # for good: the first message is the last line
    sys.stderr.flush()
    terminal = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # other threads have no say any more
    start = "\n" if os.isatty(terminal) else ""  # after a progress bar
    os.write(terminal, f"{start}{message}\n".encode())
    _leave(1)


def _leave(code: int) -> None:
    for folder in _stands_for:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(code)


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
        found = json.loads(_ask(key))
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
    from jax.experimental import multihost_utils

    _meet(f"arrays {next(_agreed)}")
    arrays = multihost_utils.broadcast_one_to_all(tree, is_source=is_first())
    return jax.tree.map(jax.numpy.asarray, arrays)
