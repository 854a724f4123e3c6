"""What a run leaves on disk and shows on the screen: configuration, metrics, progress.

A run folder holds `config.json` (what was asked for), `environment.json` (what it ran on) and
`metrics.jsonl` (one strict JSON object a line, no times in it, so that an interrupted and resumed
run leaves the same bytes as an uninterrupted one).
"""

import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple, Self, TextIO

import jax
import numpy as np
import tqdm

from sotalign_jax import checks

PathLike = str | os.PathLike[str]

_PACKAGES = ("sotalign-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def write_json(path: PathLike, value: Any) -> None:
    """Writes `value` as indented strict JSON; a reader sees the old file or the new, never a part.

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
    with replacing(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def replacing(path: PathLike) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` only when all of it is on the disk.

    Raises:
        OSError: the file cannot be written, as on a full disk; an earlier one is intact.

    >>> import tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "rows.bin"
    >>> with replacing(path) as file:
    ...     _ = file.write(b"rows")
    >>> path.read_bytes()
    b'rows'
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
    """Versions, devices, git revision and the time now, as plain JSON values.

    >>> sorted(environment())
    ['backend', 'devices', 'git', 'packages', 'platform', 'python', 'time']
    """
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


class Run(NamedTuple):
    """A run folder, and whether it was there before."""

    path: pathlib.Path
    resumed: bool


def open_run(workdir: PathLike, config: Mapping[str, Any], *, flag: str = "workdir") -> Run:
    """Creates a run folder, or opens the one with exactly this configuration again.

    Args:
        workdir: the run's folder; created with its parents when missing.
        config: everything that decides the result, as JSON values; tuples count as lists.
        flag: what the command line calls the folder, for messages.

    Returns:
        The folder, and True when an earlier start of the same run is there to be resumed.

    Raises:
        InputError: the folder holds another run or other files; nothing is overwritten.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> open_run(folder, {"seed": 0}).resumed, open_run(folder, {"seed": 0}).resumed
    (False, True)
    """
    path = pathlib.Path(workdir)
    config_path = path / "config.json"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise checks.InputError(
            f"{flag}: {path} cannot be created ({error.strerror}); choose another --{flag}"
        ) from error
    resumed = config_path.exists()
    if resumed:
        _refuse_other_config(path, read_json(config_path), config, flag)
    else:
        strangers = sorted(
            entry.name for entry in path.iterdir() if entry != _temporary(config_path)
        )
        if strangers:
            raise checks.InputError(
                f"{flag}: {path} holds {strangers[0]} but no config.json, so it is not a run "
                f"folder; choose another --{flag}"
            )
        write_json(config_path, config)
    if not (path / "environment.json").exists():
        write_json(path / "environment.json", environment())
    return Run(path, resumed)


class MetricLog:
    """Appends metrics to a file, one JSON object a line: the step, then the names in order.

    Each line reaches the operating system before `append` returns. Strict JSON has no NaN or
    infinity: they are written as the strings "NaN", "Infinity" and "-Infinity", which
    `read_metrics` turns back into numbers. Narrow floats are written with the digits that
    identify them in their own type (float32 0.1 as 0.1).

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
        self.close()

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

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def truncate_after(self, step: int) -> None:
        """Drops the lines beyond `step`, and a last line cut short by a kill, before resuming."""
        kept = 0
        for length, record in _records(self.path):
            if record["step"] > step:
                break
            kept += length
        self._file.truncate(kept)


def read_metrics(path: PathLike) -> list[dict[str, Any]]:
    """Reads the lines of a `MetricLog`; a last line cut short by a kill is left out.

    Raises:
        InputError: the file is missing, or a line in it is not a record.
    """
    return [
        {name: _NON_FINITE.get(value, value) for name, value in record.items()}
        for _, record in _records(pathlib.Path(path))
    ]


def tensorboard(logdir: PathLike, *, resume_after: int | None = None) -> Any:
    """A `tensorboardX.SummaryWriter`; `add_scalar(name, value, step)` and `close()` are used.

    Args:
        logdir: folder that `tensorboard --logdir` will read.
        resume_after: the restored step; what was shown beyond it is hidden.

    Raises:
        InputError: the optional package is not installed.
    """
    tensorboard_x = checks.require("tensorboardX", extra="tensorboard")
    purge = None if resume_after is None else resume_after + 1
    return tensorboard_x.SummaryWriter(str(logdir), purge_step=purge)


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
        """Starts at step `initial` of `total`; writes to `stream`, by default stderr.

        `unit` is what is counted, such as "rows"; plain lines show its `rate`, too, if asked. An
        `inner` bar stands below another one and is gone at its end; without a terminal it says
        nothing.
        """
        self._total, self._initial, self._step = total, initial, initial
        self._description, self._unit, self._inner = description, unit, inner
        self._rate = rate
        self._shown: dict[str, float] = {}
        self._start = time.monotonic()
        self._stream = sys.stderr if stream is None else stream
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


def _refuse_other_config(path: pathlib.Path, old: Any, new: Mapping[str, Any], flag: str) -> None:
    before, now = _flatten(old), _flatten(json.loads(json.dumps(dict(new))))
    for key in [*now, *before]:
        if before.get(key) != now.get(key) or (key in before) != (key in now):
            raise checks.InputError(
                f"{flag}: {path} holds a run with {key}={before.get(key, 'unset')} but "
                f"{key}={now.get(key, 'unset')} is asked for; choose another --{flag}"
            )


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


def _records(path: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The length in bytes and the content of every complete line."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise checks.InputError(f"{path}: cannot be read ({error.strerror})") from error
    for index, line in enumerate(lines):
        if not line.endswith(b"\n"):
            return
        try:
            record = json.loads(line)
            record["step"]
        except (ValueError, KeyError, TypeError) as error:
            raise checks.InputError(
                f"{path}: line {index + 1} is not a record of metrics; restore or remove the file"
            ) from error
        yield len(line), record
