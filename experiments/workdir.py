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
import functools
import json
import math
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from concurrent import futures
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from experiments import distributed
from sotalign_jax import checks, storage, training
from sotalign_jax import progress as progress_lib

# How JSON stores numbers that are not finite, see `_number`.
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_CHECKPOINTS = 2
"""Number of checkpoints that a run keeps."""


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a JSON file with `storage.write_json`, in the first process only."""
    if distributed.is_first():
        storage.write_json(path, value)


def read_scores(path: pathlib.Path) -> dict[str, Any]:
    """Reads results of a run, whose scores must be numbers.

    Raises:
        InputError: The file is missing or damaged.
    """
    results = storage.read_json(path)
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


# --- run folders ---------------------------------------------------------------------------------


def kept_environment(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the environment recorded in a run folder, or the current one if there is none."""
    path = folder / "environment.json"
    return storage.read_json(path) if path.exists() else storage.environment()


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
    if problem := distributed.agree(lambda: storage.strangers(folder)):
        raise storage.refused(folder, problem)
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


@contextlib.contextmanager
def only_process(folder: pathlib.Path) -> Iterator[None]:
    """Creates a folder and locks it. The operating system releases the lock after a kill."""
    with contextlib.ExitStack() as held:
        distributed.agree(lambda: held.enter_context(storage.locked(folder)))
        yield


CLAIM = {storage.LOCK, "config.json", "environment.json", "inputs.json"}
"""Files of a run folder in which nothing has been computed."""


def open_run(
    folder: pathlib.Path,
    config: Mapping[str, Any],
    inputs: Mapping[str, pathlib.Path] | None = None,
) -> None:
    """Opens a run folder with `storage.open_folder`. The first process does so for all."""
    distributed.agree(lambda: storage.open_folder(folder, config, inputs))


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
