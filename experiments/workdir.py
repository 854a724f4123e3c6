"""What a run leaves on disk and shows on the screen: config, metrics, checkpoints, progress.

A run folder holds `config.json` (what was asked for), `environment.json` (what it ran on),
`metrics.jsonl` (one strict JSON object a line, no times in it) and `checkpoints/` (orbax, one
folder a step). Killed at any moment and started again, a run leaves the same bytes as an
uninterrupted one. Of several processes the first alone writes, but all save checkpoints together.
"""

import contextlib
import datetime
import fcntl
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent import futures
from typing import Any, BinaryIO, Self, TextIO, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tqdm

from experiments import distributed
from sotalign_jax import checks, training

PathLike = str | os.PathLike[str]
Tree = TypeVar("Tree")

_PACKAGES = ("sotalign-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def write_json(path: PathLike, value: Any) -> None:
    """Writes `value` as indented strict JSON; a reader sees the old file or the new, never a part.

    Of several processes the first alone writes.

    Raises:
        InputError: the value is not JSON (a NaN, an object, ...).
        OSError: the file cannot be written; an earlier one is intact.

    >>> import tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "config.json"
    >>> write_json(path, {"steps": 2000})
    >>> read_json(path)
    {'steps': 2000}
    """
    path = pathlib.Path(path)
    try:
        text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise checks.InputError(f"{path}: cannot be written as JSON ({error})") from error
    if distributed.is_first():
        with replacing(path) as file:
            file.write(text.encode())


@contextlib.contextmanager
def replacing(path: PathLike) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` only when all of it is on the disk.

    Raises:
        OSError: the file cannot be written, as on a full disk; an earlier one is intact.
    """
    path = pathlib.Path(path)
    temporary = _temporary(path)
    try:
        with _naming(path), temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: PathLike) -> Any:
    """Reads a JSON file.

    Raises:
        InputError: the file is missing, cut short or not JSON.
    """
    try:
        return json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise checks.InputError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise checks.InputError(
            f"{path}: is cut short or not JSON ({error}); restore the file or remove its folder"
        ) from error


def environment() -> dict[str, Any]:
    """Versions, devices, git revision and the time now, as plain JSON values."""
    packages = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "backend": jax.default_backend(),
        "devices": [f"{device.platform}:{device.device_kind}" for device in jax.devices()],
        "git": _git_revision(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def kept_environment(folder: pathlib.Path) -> dict[str, Any]:
    """What a run folder says of where it was made; this environment, if it says nothing."""
    path = folder / "environment.json"
    return read_json(path) if path.exists() else environment()


def open_run(workdir: PathLike, config: Mapping[str, Any]) -> pathlib.Path:
    """Creates a run folder, or opens the one with exactly this config again; returns its path.

    Several processes call this together, and the first alone looks and writes.

    Args:
        workdir: the run's folder; created with its parents when missing.
        config: everything that decides the result, as JSON values; tuples count as lists.

    Raises:
        InputError: the folder holds another run or other files; nothing is overwritten.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> open_run(folder, {"seed": 0}) == open_run(folder, {"seed": 0})
    True
    >>> open_run(folder, {"seed": 1})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    sotalign_jax.checks.InputError: workdir: ... holds a run with seed=0 but seed=1 is asked for;...
    """
    path = pathlib.Path(workdir)
    problem = distributed.agree(lambda: _open(path, config))
    if problem:
        raise checks.InputError(f"workdir: {path} {problem}; choose another --workdir")
    return path


def _open(path: pathlib.Path, config: Mapping[str, Any]) -> str | None:
    """Creates or opens a run folder; or why it cannot be had."""
    config_path = path / "config.json"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"cannot be created ({error.strerror})"
    if config_path.exists():
        before = _flatten(read_json(config_path))
        now = _flatten(json.loads(json.dumps(config)))
        for key in [*now, *before]:
            old, new = before.get(key, "unset"), now.get(key, "unset")
            if old != new:
                return f"holds a run with {key}={old} but {key}={new} is asked for"
    else:
        others = sorted(entry.name for entry in path.iterdir() if entry != _temporary(config_path))
        if others:
            return f"holds {others[0]} but no config.json, so it is not a run folder"
        write_json(config_path, config)
    if not (path / "environment.json").exists():
        write_json(path / "environment.json", environment())
    return None


@contextlib.contextmanager
def only_process(folder: pathlib.Path) -> Iterator[None]:
    """Keeps other commands out of a run folder; the system lifts the lock even after a kill.

    Raises:
        InputError: another process is in it.
    """
    with contextlib.ExitStack() as stack:

        def lock() -> None:
            file = stack.enter_context((folder / "config.json").open("rb"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise checks.InputError(
                    f"workdir: {folder} is in use by another process; wait for its end or choose "
                    "another --workdir"
                ) from error
            except OSError:  # some network file systems have no locks
                pass

        distributed.agree(lock)
        yield


class MetricLog:
    """Appends metrics to a file, one JSON object a line: the step, then the names in order.

    Each line reaches the operating system before `append` returns. Strict JSON has no NaN or
    infinity: they are written as the strings "NaN", "Infinity" and "-Infinity". Narrow floats
    are written with the digits that identify them in their own type (float32 0.1 as 0.1).

    >>> import tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> with MetricLog(path) as log:
    ...     log.append(1, {"loss": np.float32(0.1)})
    ...     log.append(2, {"loss": float("nan")})
    >>> print(path.read_text(), end="")
    {"step": 1, "loss": 0.1}
    {"step": 2, "loss": "NaN"}
    """

    def __init__(self, path: PathLike) -> None:
        """Opens `path` for appending; what is in it stays."""
        self.path = pathlib.Path(path)
        self._file = self.path.open("ab")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def append(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes one line; the values are numbers or arrays holding one number."""
        record = {"step": int(step)} | {name: _number(metrics[name]) for name in sorted(metrics)}
        with _naming(self.path):
            self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
            self._file.flush()

    def flush(self) -> None:
        """Asks the operating system to put the lines on the disk itself."""
        with _naming(self.path):
            os.fsync(self._file.fileno())

    def truncate_after(self, step: int) -> None:
        """Drops the lines beyond `step`, and a last line cut short by a kill, before resuming."""
        kept = 0
        for index, line in enumerate(self.path.read_bytes().splitlines(keepends=True)):
            try:
                if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                    break
            except (ValueError, KeyError, TypeError) as error:
                raise checks.InputError(
                    f"{self.path}: line {index + 1} is not a record of metrics; restore or remove "
                    "the file"
                ) from error
            kept += len(line)
        self._file.truncate(kept)


class Progress:
    """A progress bar with loss, MeanR@1, rate and time left; ten plain lines where no terminal is.

    >>> with Progress(100, "train", stream=sys.stdout) as progress:
    ...     progress.update(50, loss=0.25)  # doctest: +ELLIPSIS
    train: 50/100, loss 0.25, ... left
    """

    def __init__(
        self,
        total: int,
        description: str,
        *,
        initial: int = 0,
        unit: str = "",
        rate: bool = False,
        inner: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        """Starts at step `initial` of `total`; writes to `stream`.

        By default this is stderr for the first process, and nothing for the others.

        `unit` is what is counted, such as "rows"; plain lines show its `rate`, too, if asked. An
        `inner` bar stands below another one and is gone at its end; without a terminal it says
        nothing.
        """
        self._total, self._initial, self._step = total, initial, initial
        self._description, self._unit, self._inner = description, unit, inner
        self._rate = rate
        self._shown: dict[str, float] = {}
        self._start = time.monotonic()
        self._stream = stream
        if stream is None and distributed.is_first():
            self._stream = sys.stderr
        self._bar: tqdm.tqdm[Any] | None = None
        with self._tolerant():
            if self._stream is not None and self._stream.isatty():
                self._bar = tqdm.tqdm(
                    total=total,
                    desc=description,
                    initial=initial,
                    unit=f" {unit}" if unit else "it",
                    leave=not inner,
                    file=self._stream,
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._tolerant():
            if self._bar is not None:
                self._bar.close()

    def advance(self, count: int = 1, *, mean_r1: Any = None) -> None:
        """Moves on by `count`."""
        self.update(self._step + count, mean_r1=mean_r1)

    def update(self, step: int, *, loss: Any = None, mean_r1: Any = None) -> None:
        """Moves to `step`; the last known loss and MeanR@1 stay on show.

        Converting a device array to a number waits for the device, so pass values that are
        already on the host or pass them now and then.
        """
        previous, self._step = self._step, step
        if loss is not None:
            self._shown["loss"] = float(loss)
        if mean_r1 is not None:
            self._shown["MeanR@1"] = float(mean_r1)
        text = ", ".join(f"{name} {value:.4g}" for name, value in self._shown.items())
        tenth = 10 * step // max(self._total, 1) > 10 * previous // max(self._total, 1)
        with self._tolerant():
            if self._bar is not None:
                self._bar.set_postfix_str(text, refresh=False)
                self._bar.update(step - previous)
            elif self._stream is not None and tenth and not self._inner:
                done = max(step - self._initial, 1)
                seconds = max(time.monotonic() - self._start, 1e-9)
                left = seconds / done * (self._total - step)
                count = f"{step}/{self._total} {self._unit}".rstrip()
                parts = [f"{self._description}: {count}", text]
                if self._rate:
                    parts.append(f"{done / seconds:.3g} {self._unit}/s")
                parts.append(f"{tqdm.tqdm.format_interval(left)} left")
                print(", ".join(filter(None, parts)), file=self._stream, flush=True)

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        """A closed terminal or pipe ends the display, not the run."""
        try:
            yield
        except (OSError, ValueError):  # ValueError: I/O operation on closed file
            self._stream = None
            if self._bar is not None:
                self._bar.disable = True
                self._bar = None


class DamagedError(checks.InputError):
    """A checkpoint that cannot be restored."""


KEEP = 2
"""How many of the newest checkpoints stay on disk."""


class Recorder:
    """Observer of `training.fit`: keeps the metrics and checkpoints of a run, shows its progress.

    A checkpoint is the pytree of host arrays that `to_arrays` makes of a snapshot, so plain orbax
    reads it on any number of devices:
    `ocp.StandardCheckpointer().restore(folder / "checkpoints" / str(step) / "default")`.
    Every process takes part in saving and restoring, and the first does all else.
    """

    def __init__(
        self,
        folder: PathLike,
        *,
        steps: int,
        title: str,
        tensorboard: bool = False,
        inner: bool = False,
    ) -> None:
        """Opens the records in `folder`; an `inner` run shows its progress below another bar."""
        self._folder = pathlib.Path(folder).absolute()
        self._steps, self._title, self._inner = steps, title, inner
        self._tensorboard = tensorboard and distributed.is_first()
        self._opened = contextlib.ExitStack()
        distributed.agree(self._remove_unfinished)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.preservation_policy.LatestN(KEEP),
            # Saved within the step, for processes meet in collectives, which have one order.
            enable_async_checkpointing=False,
        )
        self._checkpoints = ocp.CheckpointManager(self._folder / "checkpoints", options=options)
        self._opened.callback(self._checkpoints.close)
        self._log: MetricLog | None = None
        if distributed.is_first():
            self._log = self._opened.enter_context(MetricLog(self._folder / "metrics.jsonl"))
        self._bar: Progress | None = None
        self._board: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def _remove_unfinished(self) -> None:
        """What a kill left; orbax would do it in a thread that outlives an early end."""
        for path in (self._folder / "checkpoints").glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(path, ignore_errors=True)

    def resume(self, template: training.Snapshot) -> training.Snapshot:
        """The newest checkpoint, or `template` if there is none; cuts the log back to its step.

        Raises:
            InputError: the checkpoint cannot be read, or is not one of this template.
        """
        step = distributed.agree(self._checkpoints.latest_step)
        start = distributed.from_first(template) if step is None else self._restore(step, template)
        if self._log is not None:
            self._log.truncate_after(step or 0)
        if self._tensorboard:
            board = checks.require("tensorboardX", extra="tensorboard")
            # What was shown beyond the restored step is hidden.
            self._board = board.SummaryWriter(
                str(self._folder / "tensorboard"), purge_step=(step or 0) + 1
            )
            self._opened.callback(self._board.close)
        bar = Progress(self._steps, self._title, initial=step or 0, inner=self._inner)
        self._bar = self._opened.enter_context(bar)
        return start

    def _restore(self, step: int, template: Tree) -> Tree:
        wanted = to_arrays(template)
        try:
            found = self._checkpoints.restore(step, args=ocp.args.StandardRestore(wanted))
            jax.tree_util.tree_map_with_path(_check_shape, found, wanted)
        except Exception as error:  # orbax raises many kinds for damaged files
            raise DamagedError(
                f"checkpoints: {self._folder / 'checkpoints' / str(step)} cannot be restored "
                f"({checks.first_line(error)}); remove it to continue from the one before, or "
                "choose another --workdir"
            ) from error
        return from_arrays(found, template)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """One line of the log, the bar, and TensorBoard if asked for."""
        if self._log is not None:
            self._log.append(step, values)
        if self._bar is not None:
            self._bar.update(step, loss=values["loss"], mean_r1=values.get("val/mean/R@1"))
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, float(value), step)

    def snapshot(self, step: int, snapshot: training.Snapshot) -> None:
        """Saves a checkpoint; the log reaches the disk first.

        Raises:
            OSError: the checkpoint could not be written; earlier ones are intact.
        """
        if self._log is not None:
            self._log.flush()
        arrays = ocp.args.StandardSave(to_arrays(snapshot))
        try:
            with futures.ThreadPoolExecutor(1) as thread:  # ctrl-C waits until it is saved
                thread.submit(self._checkpoints.save, step, args=arrays).result()
        except (OSError, ValueError) as error:  # tensorstore has a ValueError for a full disk
            raise OSError(
                f"checkpoints: step {step} was not saved in {self._folder} "
                f"({checks.first_line(error)}); start again with the same --workdir to go on from "
                "the one before"
            ) from error


def to_arrays(tree: Any) -> Any:
    """The tree with host arrays for leaves, PRNG keys as their data.

    >>> to_arrays({"key": jax.random.key(7), "count": jnp.int32(3)})
    {'count': array(3, dtype=int32), 'key': array([0, 7], dtype=uint32)}
    """
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if _is_key(x) else x), tree)


def from_arrays(arrays: Any, template: Tree) -> Tree:
    """What `to_arrays` was given, on the default device; `template` tells which leaves are keys."""

    def like(leaf: Any, array: np.ndarray) -> Any:
        if _is_key(leaf):
            return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
        return jnp.asarray(array)

    return jax.tree.map(like, template, arrays)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _check_shape(path: Any, found: np.ndarray, wanted: np.ndarray) -> None:
    if found.shape != wanted.shape:
        name = jax.tree_util.keystr(path)
        raise ValueError(f"{name} has shape {found.shape}, but {wanted.shape} is needed")


def _temporary(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f".{path.name}.tmp")


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
    """Adds the path to errors of writing, such as a full disk, which come without it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _git_revision() -> str | None:
    """The checkout's commit, with "+changes" if files differ; None for an installed package."""
    root = pathlib.Path(__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        described = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty=+changes"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):  # no git program, or no commit yet
        return None
    return described.stdout.strip()


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted keys."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _number(value: Any) -> int | float | str:
    array = np.asarray(value)
    if array.size != 1:
        raise checks.InputError(f"metrics: a value has shape {array.shape}; pass single numbers")
    scalar = array.reshape(())[()]
    if array.dtype.kind in "biu":
        return int(scalar)
    number = float(str(scalar))
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
