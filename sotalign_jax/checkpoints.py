"""Checkpoints of a training run; the only module that imports orbax.

A checkpoint is one folder named by its step. It appears under that name only once it is complete
(orbax writes beside it and renames), and every entry carries a CRC-32 that is compared on reading.
So a process killed at any moment leaves either the new checkpoint or the previous one, never a
mixture. Inside, all entries are one array of bytes, described in the checkpoint's metadata: any
dtype and any structure come back bit for bit, and damaged files give one error instead of one for
every entry that orbax reads at the same time.

Of several processes the first one saves, alone: all hold the same values, so a checkpoint is the
same for any number of devices and processes, and none waits for another one to write it.
"""

import contextlib
import errno
import logging
import math
import os
import pathlib
import re
import shutil
import types
import zlib
from collections.abc import Iterator
from typing import Any, Self, TypeVar
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from sotalign_jax import checks

try:  # orbax documents its v1 interface here, and ships it under `experimental` until 1.0
    from orbax.checkpoint import v1 as ocp  # type: ignore[attr-defined,unused-ignore]
except ImportError:
    from orbax.checkpoint.experimental import v1 as ocp

Tree = TypeVar("Tree")

_LEFTOVER = re.compile(r"\d+\.(orbax-checkpoint-tmp.*|deleted)")
_logger = logging.getLogger(__name__)
# A failed write reaches the caller as one OSError; orbax would log ten tracebacks of it besides.
logging.getLogger("absl").addFilter(lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname)


class Checkpoints:
    """The newest `keep` checkpoints of one run in `directory`; one process writes at a time.

    >>> import tempfile
    >>> with Checkpoints(tempfile.mkdtemp(), keep=2) as checkpoints:
    ...     checkpoints.save(10, {"weight": jnp.ones(3), "count": 7})
    ...     step, tree = checkpoints.restore_latest({"weight": jnp.zeros(3), "count": 0})
    >>> step, tree
    (10, {'count': array(7), 'weight': Array([1., 1., 1.], dtype=float32)})
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 2) -> None:
        """Opens `directory`, creating it if needed, and removes what a killed save left there.

        Args:
            directory: where the checkpoints are; used for nothing else.
            keep: how many of the newest checkpoints stay on disk.

        Raises:
            InputError: `keep` is below 1, or the directory cannot be created.
        """
        if keep < 1:
            raise checks.InputError(f"keep: is {keep}; keep at least 1 checkpoint")
        self.directory = pathlib.Path(directory).absolute()
        self._keep = keep
        self._pending: tuple[int, Any] | None = None
        self._writes = jax.process_index() == 0
        if not self._writes:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise checks.InputError(
                f"checkpoints: {self.directory} cannot be created ({error.strerror}); "
                "choose another directory"
            ) from error
        for entry in self.directory.iterdir():
            if _LEFTOVER.fullmatch(entry.name):
                shutil.rmtree(entry)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        if error is None:
            self.wait()
            return
        try:
            self.wait()
        except OSError as failed:  # the error already on its way is the one to report
            _logger.warning("%s", failed)

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, in ascending order."""
        return sorted(int(entry.name) for entry in self.directory.iterdir() if entry.name.isdigit())

    def save(self, step: int, tree: Any) -> None:
        """Saves a pytree of arrays, numbers and PRNG keys; the writing goes on in the background.

        The values are copied before this returns, so the caller may donate or change the arrays.
        Saving the newest step once more, with the same values, does nothing.

        Args:
            step: a number at or above zero, above every step saved before.
            tree: any pytree, such as a NamedTuple of `nnx.State` and optax states.

        Raises:
            InputError: the step is not above the saved ones, or an entry is not numeric.
            OSError: this save, or the one before it, could not be written (such as a full disk).
                Earlier checkpoints are intact.
        """
        if step < 0:
            raise checks.InputError(f"step: is {step}; steps count from 0")
        self.wait()
        arrays = _to_arrays(tree)
        if not self._writes:
            return
        entries = {name: _describe(array) for name, array in arrays.items()}
        latest = max(self.steps(), default=-1)
        if step <= latest:
            if step == latest and self._entries(step) == entries:
                return
            raise checks.InputError(
                f"step: {step} is not above step {latest}, already saved in {self.directory}; "
                "restore from there first or choose another directory"
            )
        payload = np.frombuffer(b"".join(a.tobytes() for a in arrays.values()) or b"0", np.uint8)
        try:
            with _alone():
                response = ocp.save_async(
                    self._folder(step), {"payload": payload}, custom_metadata={"entries": entries}
                )
        except Exception as error:
            raise self._write_error(step, error) from error
        self._pending = (step, response)

    def wait(self) -> None:
        """Blocks until the last save is complete, then drops checkpoints beyond `keep`.

        Raises:
            OSError: the save could not be written.
        """
        if self._pending is None:
            return
        step, response = self._pending
        self._pending = None
        try:
            response.result()
        except Exception as error:
            raise self._write_error(step, error) from error
        for old in self.steps()[: -self._keep]:
            # Renamed first, so that a kill never leaves half of it under a valid name.
            shutil.rmtree(self._folder(old).rename(self.directory / f"{old}.deleted"))

    def restore_latest(self, template: Tree) -> tuple[int, Tree] | None:
        """Reads the newest checkpoint into the structure of `template`.

        A checkpoint that cannot be read is named in one warning, renamed to `STEP.unreadable`
        and the one before it is used.

        Args:
            template: a pytree with the structure, shapes and dtypes of the saved one. Where it
                holds a `jax.Array` (or a `ShapeDtypeStruct`) the result does too, with the same
                sharding; elsewhere the result holds numpy arrays.

        Returns:
            The step and the tree, or None when nothing has been saved yet.

        Raises:
            InputError: the template differs from the checkpoint, or no checkpoint is readable.
        """
        self.wait()
        unreadable: list[int] = []
        for step in reversed(self.steps()):
            try:
                stored = self._read(step)
            except Exception as error:  # orbax raises many kinds for damaged files
                reason = (str(error) or type(error).__name__).splitlines()[0][:200]
                _logger.warning("checkpoint %s cannot be read (%s)", self._folder(step), reason)
                unreadable.append(step)
                continue
            tree = self._fill(template, stored, step)
            for bad in unreadable:
                self._set_aside(bad)
            return step, tree
        if unreadable:
            raise checks.InputError(
                f"checkpoints: none of the steps {unreadable[::-1]} in {self.directory} can be "
                "read; remove that directory to start again"
            )
        return None

    def _folder(self, step: int) -> pathlib.Path:
        return self.directory / str(step)

    def _entries(self, step: int) -> dict[str, Any]:
        with _alone():
            metadata = ocp.metadata(self._folder(step)).custom_metadata
        return dict(metadata["entries"])

    def _read(self, step: int) -> dict[str, np.ndarray]:
        with _alone():
            payload = np.asarray(ocp.load(self._folder(step))["payload"])
        arrays, start = {}, 0
        for name, entry in self._entries(step).items():
            dtype, count = np.dtype(entry["dtype"]), math.prod(entry["shape"])
            values = payload[start : start + count * dtype.itemsize].view(dtype)
            arrays[name] = values.reshape(entry["shape"]).copy()  # aligned and writeable
            start += count * dtype.itemsize
            if _describe(arrays[name]) != entry:
                raise ValueError(f"entry {name} is damaged")
        return arrays

    def _fill(self, template: Tree, stored: dict[str, np.ndarray], step: int) -> Tree:
        paths, structure = jax.tree_util.tree_flatten_with_path(template)
        wanted = {_name(path): leaf for path, leaf in paths}
        for name in [*wanted, *stored]:
            saved = _shape_text(stored[name]) if name in stored else "missing"
            asked = _shape_text(_storable(wanted[name])) if name in wanted else "missing"
            if saved != asked:
                raise checks.InputError(
                    f"checkpoints: entry {name} is {saved} at step {step} in {self.directory} but "
                    f"{asked} is needed; use the settings it was saved with or another directory"
                )
        leaves = [_like(leaf, stored[name]) for name, leaf in wanted.items()]
        return jax.tree.unflatten(structure, leaves)

    def _set_aside(self, step: int) -> None:
        aside = self.directory / f"{step}.unreadable"
        shutil.rmtree(aside, ignore_errors=True)
        self._folder(step).rename(aside)

    def _write_error(self, step: int, error: Exception) -> OSError:
        code = getattr(error, "errno", None)
        if code is None:  # tensorstore puts the system's error number into its message
            number = re.search(r"os_error_code='(\d+)'", str(error))
            code = int(number[1]) if number else errno.EIO
        return OSError(
            code,
            f"{os.strerror(code)}; the checkpoint of step {step} was not written, earlier ones "
            "are intact; make room or choose another directory",
            str(self.directory),
        )


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Keeps orbax from waiting for other processes of a run: this one reads or writes alone.

    With others it would meet them in collectives, some of them started by its background thread:
    they could come between those of a training step, in another order in each process.
    """
    if jax.process_count() == 1:
        yield
        return
    own = jax.process_index()
    options = ocp.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process{own}"
    )
    # In spite of the options orbax compares the folder with that of all the processes it counts.
    with (
        mock.patch.object(jax, "process_count", return_value=1),
        ocp.Context(multiprocessing_options=options),
    ):
        yield


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path) or "tree"


def _to_arrays(tree: Any) -> dict[str, np.ndarray]:
    """The leaves as host arrays of their own, by name."""
    arrays = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        array = np.array(_storable(leaf))
        if array.dtype.kind in "OUSMm":
            raise checks.InputError(
                f"checkpoints: entry {_name(path)} is of type {type(leaf).__name__}; "
                "only arrays and numbers can be saved"
            )
        arrays[_name(path)] = array
    return arrays


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _storable(leaf: Any) -> Any:
    """PRNG keys as their uint32 data, everything else as something with a shape and dtype."""
    if _is_key(leaf):
        return jax.random.key_data(leaf)
    return leaf if hasattr(leaf, "dtype") else np.asarray(leaf)


def _like(leaf: Any, array: np.ndarray) -> Any:
    """`array` as the kind of array that the template has in this place."""
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        # An uncommitted array stays free to follow the arrays it is combined with.
        return jax.device_put(array, leaf.sharding if getattr(leaf, "committed", True) else None)
    return array


def _shape_text(array: Any) -> str:
    return f"{np.dtype(array.dtype).name}[{','.join(map(str, array.shape))}]"


def _describe(array: np.ndarray) -> dict[str, Any]:
    return {
        "shape": list(array.shape),
        "dtype": array.dtype.name,
        "crc32": zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data),
    }
