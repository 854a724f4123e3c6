"""Run folders: config, metrics, checkpoints and progress of a run.

A run folder holds

    config.json       settings of the run
    environment.json  versions and devices that it ran on
    inputs.json       fingerprints of the files that it reads
    metrics.jsonl     one strict JSON object per step, without times
    checkpoints/      orbax checkpoints, one folder per step

A run that is killed at any moment and started again leaves the same bytes as an uninterrupted run.
If a run has several processes, only the first one writes, except that all processes save
checkpoints together.
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
import stat
import subprocess
from collections.abc import Iterator, Mapping
from concurrent import futures
from typing import IO, Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import traverse_util

from experiments import distributed, store
from sotalign_jax import checks, files, training
from sotalign_jax import progress as progress_lib

# Larger files are compared by size and modification time, because hashing them would delay every
# start by seconds.
DIGESTED = 64 << 20
# How JSON stores numbers that are not finite, see `_number`.
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_CHECKPOINTS = 2
"""Number of checkpoints that a run keeps."""
_PACKAGES = ("sotalign-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")

# --- files ---------------------------------------------------------------------------------------


replacing = files.replacing
"""Writer of whole files, which the library has."""


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes strict JSON and replaces an earlier file atomically. Only the first process writes.

    Args:
        path: The file.
        value: A JSON value without NaN and infinity.
    """
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    if distributed.is_first():
        with replacing(path) as file:
            file.write(text.encode())


def read_json(path: pathlib.Path) -> Any:
    """Reads a JSON file that holds an object.

    Raises:
        InputError: The file is missing, cut short, not JSON or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise checks.InputError(f"{path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise checks.InputError(
            f"{path} is cut short or not JSON ({error}); restore the file or remove its folder"
        ) from error
    if not isinstance(value, dict):
        raise _not_an_object(str(path), value)
    return value


def read_scores(path: pathlib.Path) -> dict[str, Any]:
    """Reads results of a run, whose scores must be numbers.

    Raises:
        InputError: The file is missing or damaged.
    """
    results = read_json(path)
    candidates = results.get("candidates", {})
    scores = {name: value for name, value in results.items() if "/" in name}
    if isinstance(candidates, dict):
        scores |= {f"candidates.{name}": value for name, value in candidates.items()}
    else:
        scores["candidates"] = candidates
    for name, value in scores.items():
        if type(value) not in (int, float) or not math.isfinite(value):
            raise checks.InputError(
                f"{path} must have a number for {name}, got {json.dumps(value)}; restore the file "
                "or remove it"
            )
    return results


def _not_an_object(where: str, value: Any) -> checks.InputError:
    shown = json.dumps(value)
    shown = shown if len(shown) <= 40 else f"{shown[:40]}..."
    return checks.InputError(
        f"{where} must hold a JSON object, got {shown}; restore the file or remove its folder"
    )


@contextlib.contextmanager
def open_regular(path: pathlib.Path, mode: str = "rb", **options: Any) -> Iterator[IO[Any]]:
    """Opens a regular file to read it. Links are followed.

    A FIFO would wait for a writer and a device may never end, so both are refused.

    Args:
        path: The file.
        mode: "rb" or "r".
        **options: Options of `open`.

    Raises:
        OSError: The file cannot be read or is not a regular one.
    """
    with open(path, mode, opener=_open_without_waiting, **options) as file:
        # The open file is checked, because its path may name another one at any time.
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path.name} is not a regular file; remove it")
        yield file


def _open_without_waiting(path: str, flags: int) -> int:
    # Windows has no FIFOs in folders and no such flag.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def fingerprint(path: pathlib.Path) -> dict[str, Any]:
    """Returns the size and modification time of a file, and a digest if it is not large."""
    with open_regular(path) as file:
        status, digest = os.fstat(file.fileno()), None
        if status.st_size <= DIGESTED:
            digest = hashlib.blake2b(file.read(), digest_size=16).hexdigest()
    return {"bytes": status.st_size, "modified": status.st_mtime_ns, "digest": digest}


def changed(recorded: Mapping[str, Any], path: pathlib.Path) -> str | None:
    """Compares a file with its recorded fingerprint.

    A file of the same size and modification time counts as unchanged.

    Args:
        recorded: Fingerprint of the file, or an empty one if the file was unreadable.
        path: The file.

    Returns:
        The difference in a few words, or None.
    """
    try:
        status = path.stat()
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})" if recorded else None
    if not stat.S_ISREG(status.st_mode):
        return f"{path.name} is not a regular file" if recorded else None
    if status.st_size != recorded.get("bytes"):
        return f"{path.name} has {status.st_size} bytes but had {recorded.get('bytes', 'none')}"
    if status.st_mtime_ns == recorded.get("modified"):
        return None
    digest = fingerprint(path)["digest"]
    if digest is None:
        return f"{path.name} was modified"
    return f"{path.name} has other content" if digest != recorded.get("digest") else None


# --- run folders ---------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """Returns versions, devices, git revision and current time as JSON values."""
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
    """Returns the environment recorded in a run folder, or the current one if there is none."""
    path = folder / "environment.json"
    return read_json(path) if path.exists() else environment()


@contextlib.contextmanager
def claim(
    folder: pathlib.Path,
    config: Mapping[str, Any],
    inputs: Mapping[str, pathlib.Path] | None = None,
) -> Iterator[None]:
    """Opens a run folder and locks it against other commands.

    The operating system releases the lock even after a kill. If the block raises InputError before
    it has written a result, the claim is withdrawn: files and folders created here are removed, so
    that a corrected command can use the same folder. If the run has several processes, the first
    one acts for all.

    Args:
        folder: Run folder.
        config: Settings of the run, as JSON values.
        inputs: Files that the run reads, by the names of their settings.

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
            # Withdraw the claim only if the folder holds nothing but the claim itself.
            if new and distributed.is_first():
                names = {path.name for path in folder.iterdir()}
                for name in names if names <= CLAIM else ():
                    (folder / name).unlink()
                if created:
                    with contextlib.suppress(OSError):  # it is not empty
                        folder.rmdir()
            raise


def remove_temporary(folder: pathlib.Path) -> None:
    """Removes temporary files that killed processes have left. The caller holds the lock."""
    for leftover in folder.glob(".*.tmp"):
        if files.TEMPORARY.fullmatch(leftover.name):
            leftover.unlink()


@contextlib.contextmanager
def only_process(folder: pathlib.Path) -> Iterator[None]:
    """Creates a folder and locks it. The operating system releases the lock after a kill."""
    with contextlib.ExitStack() as held:
        distributed.agree(lambda: held.enter_context(locked(folder)))
        yield


@contextlib.contextmanager
def locked(folder: pathlib.Path, *, wait: bool = False) -> Iterator[None]:
    """Creates and locks a folder for this process, and removes what killed processes left there.

    Args:
        folder: Folder of results.
        wait: True to wait for another process that uses the folder.

    Raises:
        InputError: Another process uses the folder, or it cannot be created.
    """
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(store.lock(folder / LOCK, wait=wait))
        except BlockingIOError as error:
            text = f"workdir {folder} is in use by another process; wait for its end"
            raise checks.InputError(f"{text} or choose another --workdir") from error
        except OSError as error:
            raise _refused(folder, f"cannot be created ({error.strerror})") from error
        remove_temporary(folder)
        yield


LOCK = ".lock"
CLAIM = {LOCK, "config.json", "environment.json", "inputs.json"}
"""Files of a run folder in which nothing has been computed."""


def _strangers(folder: pathlib.Path) -> str | None:
    """Returns an error message if a folder holds something other than a run."""
    if not folder.is_dir() or (folder / "config.json").exists():
        return None
    # A kill during the very first write leaves a temporary .config.json.PID.THREAD.tmp.
    own = re.compile(r"\.lock|\.config\.json\..*")
    names = sorted(path.name for path in folder.iterdir() if not own.fullmatch(path.name))
    return f"holds {names[0]} but no config.json, so it is not a run folder" if names else None


def _refused(folder: pathlib.Path, problem: str) -> checks.InputError:
    return checks.InputError(f"workdir {folder} {problem}; choose another --workdir")


def open_run(
    folder: pathlib.Path,
    config: Mapping[str, Any],
    inputs: Mapping[str, pathlib.Path] | None = None,
) -> None:
    """Creates a run folder, or opens an existing one that has the same config and inputs.

    A missing input does not count as changed, because a finished run does not need it. If the run
    has several processes, the first one checks for all.

    Args:
        folder: Run folder.
        config: Settings of the run, as JSON values.
        inputs: Files that the run reads, by the names of their settings.

    Raises:
        InputError: The folder holds another run, or an input has changed. Nothing is overwritten.
    """
    if problem := distributed.agree(lambda: _open(folder, config, inputs or {})):
        raise _refused(folder, problem)


def _open(
    folder: pathlib.Path, config: Mapping[str, Any], inputs: Mapping[str, pathlib.Path]
) -> str | None:
    """Creates or opens a run folder. Returns an error message, or None."""
    path, noted = folder / "config.json", folder / "inputs.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"cannot be created ({error.strerror})"
    if path.exists():
        # Through JSON and back, so that tuples compare equal to the lists that were stored.
        before, now = (
            traverse_util.flatten_dict(values, sep=".", keep_empty_nodes=True)
            for values in (read_json(path), json.loads(json.dumps(config)))
        )
        for key in [*now, *before]:
            old, new = before.get(key, "unset"), now.get(key, "unset")
            if old != new:
                return f"holds a run with {key}={old} but {key}={new} was requested"
    elif problem := _strangers(folder):
        return problem
    else:
        write_json(path, config)
    if not (folder / "environment.json").exists():
        write_json(folder / "environment.json", environment())
    present = {name: file for name, file in inputs.items() if file.exists()}
    kept = read_json(noted) if noted.exists() else {}
    for name in present.keys() & kept.keys():
        if not isinstance(kept[name], dict):
            raise _not_an_object(f"{name} in {noted}", kept[name])
        if change := changed(kept[name], present[name]):
            return f"was made from other data ({name}: {change})"
    # An input that was missing at the first start is recorded once it appears.
    if added := {name: fingerprint(present[name]) for name in present if name not in kept}:
        write_json(noted, kept | added)
    return None


# --- metrics, checkpoints and progress ------------------------------------------------------------


class Progress(progress_lib.Progress):
    """A progress bar that only the first of several processes shows."""

    def __init__(self, total: int, title: str, **options: Any) -> None:
        super().__init__(total, title, show=distributed.is_first(), **options)


class Recorder(contextlib.ExitStack, progress_lib.Observer):
    """Stores the metrics and checkpoints of a run, and shows its progress.

    Each line of metrics is handed to the operating system before `metrics` returns. A checkpoint is
    a pytree of host arrays (`to_arrays`) that orbax can read without this project:
    `ocp.StandardCheckpointer().restore(folder / "checkpoints" / str(step) / "default")`.
    All processes save and restore checkpoints together. Only the first one does everything else.
    """

    def __init__(
        self, folder: pathlib.Path, *, steps: int, tensorboard: bool = False, **progress: Any
    ) -> None:
        """Prepares a recorder. No file is opened yet.

        Args:
            folder: Run folder.
            steps: Total number of steps.
            tensorboard: Write the metrics for TensorBoard, too.
            **progress: Options of `Progress`.
        """
        super().__init__()
        self._folder, self._tensorboard = folder.absolute(), tensorboard
        self._progress = {"total": steps, **progress}
        self._bar: Progress | None = None
        self._board: Any = None

    @functools.cached_property
    def _checkpoints(self) -> ocp.CheckpointManager:
        """Checkpoint manager, opened on first use so that a failed start leaves no files."""

        def remove_leftovers() -> None:
            # Orbax would remove them in a thread, which may outlive a command that ends early.
            folder = self._folder / "checkpoints"
            for path in folder.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(path, ignore_errors=True)
            # A kill between a save and the removal of an older checkpoint left one too many.
            steps = sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())
            for step in steps[:-_CHECKPOINTS]:
                shutil.rmtree(folder / str(step), ignore_errors=True)

        distributed.agree(remove_leftovers)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.preservation_policy.LatestN(_CHECKPOINTS),
            # Saving in the background would interleave its collectives with those of training,
            # in an order that differs between processes.
            enable_async_checkpointing=False,
        )
        manager = ocp.CheckpointManager(self._folder / "checkpoints", options=options)
        self.callback(manager.close)
        return manager

    @functools.cached_property
    def _log(self) -> BinaryIO:
        """Metrics file, opened on first use. Only the first process writes to the real one."""
        log = self._folder / "metrics.jsonl" if distributed.is_first() else pathlib.Path(os.devnull)
        return self.enter_context(log.open("ab"))

    def resume(self, template: training.Snapshot) -> training.Snapshot:
        """Restores the newest checkpoint and truncates the metrics to its step.

        Args:
            template: Snapshot of step 0.

        Returns:
            The restored snapshot, or `template` if there is no checkpoint.
        """
        step = distributed.agree(self._checkpoints.latest_step) or 0
        distributed.agree(lambda: self._cut_log(step))
        start = self._restore(step, template) if step else distributed.from_first(template)
        if self._tensorboard and distributed.is_first():
            board = checks.require("tensorboardX", extra="tensorboard")
            folder = str(self._folder / "tensorboard")
            # TensorBoard hides the points that an interrupted run logged after this step.
            self._board = board.SummaryWriter(folder, purge_step=step + 1)
            self.callback(self._board.close)
        self._bar = self.enter_context(Progress(initial=step, **self._progress))
        return start

    def _cut_log(self, step: int) -> None:
        """Removes metrics after a step, and an incomplete last line that a kill left."""
        path, kept, last = self._folder / "metrics.jsonl", 0, 0
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break
            # A gap or a damaged line before the checkpoint cannot be recomputed: refuse to go on.
            try:
                last = _step_of(line)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
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
            text = f"checkpoint {where} cannot be restored ({checks.first_line(error)})"
            remedy = "remove it to resume from an earlier checkpoint, or choose another --workdir"
            raise OSError(f"{text}; {remedy}") from error

        def like(leaf: Any, array: np.ndarray) -> Any:
            if _is_key(leaf):
                return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
            return jnp.asarray(array)

        return jax.tree.map(like, template, found)

    def stage(self, text: str) -> None:
        """Prints a line about the preparation before the first step."""
        progress_lib.say(f"{self._progress['title']}: {text} ...", show=distributed.is_first())

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends a line to the metrics file and updates the progress bar and TensorBoard."""
        # Sorted names, so that an interrupted run leaves the same bytes as an uninterrupted one.
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
        """Saves a checkpoint after the metrics file has reached the disk."""
        arrays = ocp.args.StandardSave(to_arrays(snapshot))
        try:
            if distributed.is_first():
                os.fsync(self._log.fileno())
            # KeyboardInterrupt is raised in the main thread only, so ctrl-C cannot cut a save
            # short: leaving the block waits for the thread.
            with futures.ThreadPoolExecutor(1) as thread:
                thread.submit(self._checkpoints.save, step, args=arrays).result()
        except (OSError, ValueError) as error:  # tensorstore has a ValueError for a full disk
            text = f"step {step} cannot be saved in {self._folder} ({checks.first_line(error)})"
            remedy = "free space and run the command again to resume from an earlier checkpoint"
            raise OSError(f"checkpoint of {text}; {remedy}") from error


def _step_of(line: bytes) -> int:
    """Returns the step of a line of metrics. Raises one of several errors if it is damaged."""
    values = json.loads(line)
    # A resumed run must leave the bytes that `Recorder.metrics` writes, so others are refused.
    if json.dumps(values, allow_nan=False).encode() + b"\n" != line:
        raise ValueError("not written by a run")
    for name, value in values.items():
        if type(value) not in (int, float) and value not in _NOT_FINITE:
            raise TypeError(f"{name} is not a number")
    if type(values["step"]) is not int:
        raise TypeError("step is not an integer")
    return values["step"]


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the lines of a metrics file, without an incomplete last one.

    Raises:
        InputError: A line is damaged.
    """
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if line.endswith(b"\n"):
            try:
                _step_of(line)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise _damaged(path, f"line {number} is damaged") from error
            rows.append(json.loads(line))
    return rows


def _damaged(path: pathlib.Path, problem: str) -> checks.InputError:
    remedy = f"restore the file, or remove it and {path.parent / 'checkpoints'} to train again"
    return checks.InputError(f"{path} {problem}; {remedy}")


def to_arrays(tree: Any) -> Any:
    """Converts the leaves of a tree to host arrays, and PRNG keys to their data."""
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if _is_key(x) else x), tree)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _number(value: Any) -> int | float | str:
    """Converts a scalar to JSON. float32 0.1 becomes 0.1, and NaN becomes "NaN"."""
    scalar = np.asarray(value)[()]
    if scalar.dtype.kind in "biu":
        return int(scalar)
    number = float(str(scalar))  # the shortest digits of its own type, not of float64
    return number if math.isfinite(number) else json.dumps(number)
