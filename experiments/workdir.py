"""Run folders: config, metrics, checkpoints and progress of a run.

A run folder holds `config.json` (what was asked for), `environment.json` (what it ran on),
`metrics.jsonl` (one strict JSON object a line, no times in it) and `checkpoints/` (orbax, one
folder a step). Killed at any moment and started again, a run leaves the same bytes as an
uninterrupted one. Of several processes the first alone writes, but all save checkpoints together.
"""

import contextlib
import datetime
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from concurrent import futures
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import traverse_util

from experiments import distributed, store
from sotalign_jax import checks, training
from sotalign_jax import progress as progress_lib

DIGESTED = 64 << 20  # of larger files, size and time alone tell whether they changed
_PACKAGES = ("sotalign-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")

# --- files ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` only when all of it is on the disk."""
    temporary = _temporary(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:  # a full disk is reported without a name
        error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(path: pathlib.Path) -> pathlib.Path:
    """Returns a name beside `path` that no other process writes to."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes strict JSON, in the first process alone; an earlier file is replaced at once."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    if distributed.is_first():
        with replacing(path) as file:
            file.write(text.encode())


def read_json(path: pathlib.Path) -> Any:
    """Reads a JSON file; InputError if it is missing, cut short or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise checks.InputError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise checks.InputError(
            f"{path}: is cut short or not JSON ({error}); restore the file or remove its folder"
        ) from error


def fingerprint(path: pathlib.Path) -> dict[str, Any]:
    """Size and modification time of a file, and the digest of one that is not large."""
    status, digest = path.stat(), None
    if status.st_size <= DIGESTED:
        digest = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    return {"bytes": status.st_size, "modified": status.st_mtime_ns, "digest": digest}


def changed(recorded: Mapping[str, Any], path: pathlib.Path) -> str | None:
    """How a file differs from its recorded fingerprint, in a few words; None if it does not.

    Equal size and time are taken for equality. An empty record is of a file that was unreadable.
    """
    try:
        status = path.stat()
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})" if recorded else None
    if status.st_size != recorded.get("bytes"):
        return f"{path.name} has {status.st_size} bytes, had {recorded.get('bytes', 'none')}"
    if status.st_mtime_ns == recorded["modified"]:
        return None
    digest = fingerprint(path)["digest"]
    if digest is None:
        return f"{path.name} was written again"
    return f"{path.name} has other content" if digest != recorded["digest"] else None


# --- run folders ---------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """Versions, devices, git revision and the time now, as plain JSON values."""
    packages, git = {}, None
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    root = pathlib.Path(__file__).parents[1]
    if (root / ".git").exists() and shutil.which("git"):
        command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40"]
        told = subprocess.run([*command, "--dirty=+changes"], capture_output=True, check=False)
        git = told.stdout.decode().strip() or None
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "backend": jax.default_backend(),
        "devices": [f"{device.platform}:{device.device_kind}" for device in jax.devices()],
        "git": git,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def kept_environment(folder: pathlib.Path) -> dict[str, Any]:
    """What a run folder says of where it was made; this environment, if it says nothing."""
    path = folder / "environment.json"
    return read_json(path) if path.exists() else environment()


@contextlib.contextmanager
def claim(
    folder: pathlib.Path,
    config: Mapping[str, Any],
    inputs: Mapping[str, pathlib.Path] | None = None,
) -> Iterator[None]:
    """Opens a run folder and keeps other commands out of it.

    The system lifts the lock even after a kill. If the block ends in an InputError before it has
    written anything, a folder that was created here is removed, so that a corrected start can use
    the same one. Of several processes the first acts for all.

    Args:
        folder: The folder of the run.
        config: What the run is asked for.
        inputs: The files that the run reads, by the names of their settings.

    Raises:
        InputError: The folder is in use, or holds another run or something else.
    """
    if problem := distributed.agree(lambda: _strangers(folder)):
        raise _refused(folder, problem)
    created = not folder.exists()
    with only_process(folder):
        new = distributed.agree(lambda: not (folder / "config.json").exists())
        try:
            open_run(folder, config, inputs)
            yield
        except checks.InputError:
            names = {path.name for path in folder.iterdir()}
            if new and names <= CLAIM and distributed.is_first():
                for name in names:
                    (folder / name).unlink()
                if created:
                    folder.rmdir()
            raise


@contextlib.contextmanager
def only_process(folder: pathlib.Path) -> Iterator[None]:
    """Keeps other commands out of a folder, which is created; a kill lifts the lock."""
    with contextlib.ExitStack() as held:

        def lock() -> None:
            try:
                held.enter_context(store.lock(folder / LOCK, wait=False))
            except BlockingIOError as error:
                text = f"workdir: {folder} is in use by another process; wait for its end"
                raise checks.InputError(f"{text} or choose another --workdir") from error
            except OSError as error:
                raise _refused(folder, f"cannot be created ({error.strerror})") from error
            for leftover in folder.glob(".*.tmp"):  # of a process that was killed
                leftover.unlink()

        distributed.agree(lock)
        yield


LOCK = ".lock"
CLAIM = {LOCK, "config.json", "environment.json", "inputs.json"}
"""The files of a run folder in which nothing has been computed."""


def _strangers(folder: pathlib.Path) -> str | None:
    """Returns an error message if a folder holds something other than a run."""
    if not folder.is_dir() or (folder / "config.json").exists():
        return None
    own = re.compile(r"\.lock|\.config\.json\..*")  # a kill may leave the latter
    names = sorted(path.name for path in folder.iterdir() if not own.fullmatch(path.name))
    return f"holds {names[0]} but no config.json, so it is not a run folder" if names else None


def _refused(folder: pathlib.Path, problem: str) -> checks.InputError:
    return checks.InputError(f"workdir: {folder} {problem}; choose another --workdir")


def open_run(
    folder: pathlib.Path,
    config: Mapping[str, Any],
    inputs: Mapping[str, pathlib.Path] | None = None,
) -> None:
    """Creates a run folder, or opens the one with exactly this config and these inputs again.

    An input that is gone is no change, for a finished run does not need it. Of several processes
    the first looks for all.

    Args:
        folder: The folder of the run.
        config: What the run is asked for.
        inputs: The files that the run reads, by the names of their settings.

    Raises:
        InputError: The folder holds another run, or the inputs changed. Nothing is overwritten.
    """
    if problem := distributed.agree(lambda: _open(folder, config, inputs or {})):
        raise _refused(folder, problem)


def _open(
    folder: pathlib.Path, config: Mapping[str, Any], inputs: Mapping[str, pathlib.Path]
) -> str | None:
    """Creates or opens a run folder; returns an error message, or None."""
    path, noted = folder / "config.json", folder / "inputs.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"cannot be created ({error.strerror})"
    if path.exists():
        before, now = (
            traverse_util.flatten_dict(values, sep=".", keep_empty_nodes=True)
            for values in (read_json(path), json.loads(json.dumps(config)))
        )
        for key in [*now, *before]:
            old, new = before.get(key, "unset"), now.get(key, "unset")
            if old != new:
                return f"holds a run with {key}={old} but {key}={new} is asked for"
    elif problem := _strangers(folder):
        return problem
    else:
        write_json(path, config)
    if not (folder / "environment.json").exists():
        write_json(folder / "environment.json", environment())
    present = {name: file for name, file in inputs.items() if file.exists()}
    kept = read_json(noted) if noted.exists() else {}
    for name in present.keys() & kept.keys():
        if change := changed(kept[name], present[name]):
            return f"was made from other data: {name}: {change}"
    if added := {name: fingerprint(present[name]) for name in present if name not in kept}:
        write_json(noted, kept | added)
    return None


# --- what training shows and leaves --------------------------------------------------------------


class Progress(progress_lib.Progress):
    """A progress bar that only the first of several processes shows."""

    def __init__(self, total: int, title: str, **options: Any) -> None:
        super().__init__(total, title, show=distributed.is_first(), **options)


class Recorder(contextlib.ExitStack, progress_lib.Observer):
    """Keeps the metrics and checkpoints of a run, and shows its progress.

    A line of metrics reaches the operating system before `metrics` returns. A checkpoint is the
    pytree of host arrays that `to_arrays` makes of a snapshot, which plain orbax reads:
    `ocp.StandardCheckpointer().restore(folder / "checkpoints" / str(step) / "default")`.
    Every process takes part in saving and restoring, and the first does all else.
    """

    def __init__(
        self, folder: pathlib.Path, *, steps: int, tensorboard: bool = False, **progress: Any
    ) -> None:
        """Opens the records in `folder`; options of `Progress` say how the steps are shown."""
        super().__init__()
        self._folder, self._tensorboard = folder.absolute(), tensorboard
        self._progress = {"total": steps, **progress}
        self._bar: Progress | None = None
        self._board: Any = None

    @functools.cached_property
    def _checkpoints(self) -> ocp.CheckpointManager:
        """The checkpoints, opened when they are needed: a failed start leaves no files."""

        def remove_unfinished() -> None:  # orbax would do it in a thread that outlives an early end
            for path in (self._folder / "checkpoints").glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(path, ignore_errors=True)

        distributed.agree(remove_unfinished)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.preservation_policy.LatestN(2),
            # Saved within the step, for processes meet in collectives, which have one order.
            enable_async_checkpointing=False,
        )
        manager = ocp.CheckpointManager(self._folder / "checkpoints", options=options)
        self.callback(manager.close)
        return manager

    @functools.cached_property
    def _log(self) -> BinaryIO:
        """The file of metrics, opened when it is needed."""
        log = self._folder / "metrics.jsonl" if distributed.is_first() else pathlib.Path(os.devnull)
        return self.enter_context(log.open("ab"))

    def resume(self, template: training.Snapshot) -> training.Snapshot:
        """Returns the newest checkpoint, or `template`; cuts the log back to its step."""
        step = distributed.agree(self._checkpoints.latest_step) or 0
        distributed.agree(lambda: self._cut_log(step))
        start = self._restore(step, template) if step else distributed.from_first(template)
        if self._tensorboard and distributed.is_first():
            board = checks.require("tensorboardX", extra="tensorboard")
            folder = str(self._folder / "tensorboard")
            # Hides points beyond the restored step.
            self._board = board.SummaryWriter(folder, purge_step=step + 1)
            self.callback(self._board.close)
        self._bar = self.enter_context(Progress(initial=step, **self._progress))
        return start

    def _cut_log(self, step: int) -> None:
        """Removes metrics of steps after a checkpoint's, and a last line that a kill cut short."""
        path, kept, last = self._folder / "metrics.jsonl", 0, 0
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break
            try:
                last = int(json.loads(line)["step"])
            except (KeyError, TypeError, ValueError) as error:
                raise _damaged(path, f"line {number} is damaged") from error
            if last > step:
                break
            if last != number:
                raise _damaged(path, f"has step {last} in line {number}")
            kept += len(line)
        if min(last, step) != step:
            raise _damaged(path, f"ends at step {last} but there is a checkpoint of step {step}")
        self._log.truncate(kept)

    def _restore(self, step: int, template: training.Snapshot) -> training.Snapshot:
        wanted = to_arrays(template)
        try:
            found = self._checkpoints.restore(step, args=ocp.args.StandardRestore(wanted))
            shapes, needed = ([x.shape for x in jax.tree.leaves(t)] for t in (found, wanted))
            if shapes != needed:
                raise ValueError(f"arrays have shapes {shapes}, but {needed} are needed")
        except Exception as error:  # orbax raises many kinds for damaged files
            where = self._folder / "checkpoints" / str(step)
            text = f"checkpoints: {where} cannot be restored ({checks.first_line(error)})"
            remedy = "remove it to continue from the one before, or choose another --workdir"
            raise OSError(f"{text}; {remedy}") from error

        def like(leaf: Any, array: np.ndarray) -> Any:
            if _is_key(leaf):
                return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
            return jnp.asarray(array)

        return jax.tree.map(like, template, found)

    def stage(self, text: str) -> None:
        """Prints what is happening before the first step."""
        progress_lib.say(f"{self._progress['title']}: {text} ...", show=distributed.is_first())

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """One line of the log, names in order; the bar; and TensorBoard if asked for."""
        numbers = {name: _number(values[name]) for name in sorted(values)}
        line = json.dumps({"step": int(step), **numbers}, allow_nan=False)
        self._log.write(line.encode() + b"\n")
        self._log.flush()
        if self._bar is not None:
            self._bar.metrics(step, values)
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, float(value), step)

    def snapshot(self, step: int, snapshot: training.Snapshot) -> None:
        """Saves a checkpoint; the log reaches the disk first."""
        arrays = ocp.args.StandardSave(to_arrays(snapshot))
        try:
            if distributed.is_first():
                os.fsync(self._log.fileno())
            with futures.ThreadPoolExecutor(1) as thread:  # ctrl-C waits until it is saved
                thread.submit(self._checkpoints.save, step, args=arrays).result()
        except (OSError, ValueError) as error:  # tensorstore has a ValueError for a full disk
            text = f"step {step} was not saved in {self._folder} ({checks.first_line(error)})"
            remedy = "start again with the same --workdir to go on from the one before"
            raise OSError(f"checkpoints: {text}; {remedy}") from error


def _damaged(path: pathlib.Path, problem: str) -> checks.InputError:
    remedy = f"restore the file, or remove it and {path.parent / 'checkpoints'} to train again"
    return checks.InputError(f"{path} {problem}; {remedy}")


def to_arrays(tree: Any) -> Any:
    """The tree with host arrays for leaves, PRNG keys as their data."""
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if _is_key(x) else x), tree)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _number(value: Any) -> int | float | str:
    """As JSON: narrow floats by their own digits (float32 0.1 as 0.1), no NaN but "NaN"."""
    scalar = np.asarray(value)[()]
    if scalar.dtype.kind in "biu":
        return int(scalar)
    number = float(str(scalar))
    return number if math.isfinite(number) else json.dumps(number)
