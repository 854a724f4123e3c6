"""Aligners on disk: a folder with a description in JSON and tensors in safetensors files.

- aligner.json: format, structure of both heads, info, digests of the tensor files
- heads.safetensors: parameters of the heads by dotted name, such as x.linear.kernel
- calibration.safetensors: arrays of the calibration, if there is one
- rows.json: ids of the rows trained on and held out, if they are known
"""

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from sotalign_jax import checks, storage
from sotalign_jax.calibration import Calibration
from sotalign_jax.heads import Heads, rebuild

with contextlib.suppress(ImportError):  # Windows has no such locks: `_locked` does nothing there
    import fcntl

# Increase it when files of older versions cannot be read any more.
FORMAT = 3
"""Version of the files that `save` writes."""
FOLDER = "aligner"
"""Name of the aligner's folder within a run folder."""
_DESCRIPTION, _TENSORS = "aligner.json", "heads.safetensors"
_CALIBRATION, _ROWS = "calibration.safetensors", "rows.json"
Rows = Mapping[str, Sequence[str]]
"""Ids of rows by part, such as `pairs_x`."""


def save(
    path: str | os.PathLike[str],
    *,
    heads: Heads,
    info: dict[str, Any],
    calibration: Calibration | None = None,
    rows: Rows | None = None,
    calibrated: bool = False,
    overwrite: bool = False,
) -> None:
    """Writes the fields of an aligner into a folder. If it fails, an earlier aligner stays intact.

    Savers of one folder take turns, so the last one wins, and `load` waits for them.

    Args:
        path: The folder, which is created. A symbolic link stays, and its target is replaced.
        heads: Both heads.
        info: Any JSON values.
        calibration: The calibration, if there is one.
        rows: Ids of the rows trained on and held out, if they are known.
        calibrated: True if scores are calibrated by default.
        overwrite: True to replace an existing aligner. Other files are never replaced.

    Raises:
        InputError: The folder holds other files, or `info` is not JSON.
        OSError: The files cannot be written, for example because the disk is full.
    """
    arrays = {_TENSORS: {k: np.asarray(leaf[...]) for k, leaf in _leaves(heads).items()}}
    if calibration is not None:
        arrays[_CALIBRATION] = jax.tree.map(np.asarray, vars(calibration))
    sides = {"x": heads.x, "y": heads.y}
    described = {
        "format": FORMAT,
        "heads": {side: {"kind": h.kind, "options": h.options()} for side, h in sides.items()},
        "info": info,
        "calibrated": calibrated,
    }
    folder = _resolved(path)
    temporary, previous = (folder.with_name(f".{folder.name}.{end}") for end in ("tmp", "old"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent, alone=True):
            # An earlier save was killed between its two renames. Restores the aligner it had moved.
            if previous.exists() and not folder.exists():
                previous.rename(folder)
            _check_free(folder, overwrite)
            # Leftovers of a save that was killed.
            for leftover in (temporary, previous):
                shutil.rmtree(leftover, ignore_errors=True)
            try:
                _write(described, arrays, rows, temporary)
                # Renamed, because a rename is atomic within a file system.
                if folder.exists():
                    folder.rename(previous)  # kept until the new one is in its place
                temporary.rename(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(previous, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or checks.first_line(error)
        remedy = "free some space, or choose another folder"
        raise OSError(f"path {path} cannot be written ({reason}); {remedy}") from error


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads an aligner.

    Args:
        path: A folder that `save` wrote, or the folder of a finished run.

    Returns:
        The fields of the aligner by name, as `save` takes them.

    Raises:
        InputError: The folder holds no aligner, or a file of it is missing or damaged.
    """
    # All files are read before a saver may replace them.
    with contextlib.ExitStack() as held:
        return _load(_find(path, held))


def _load(folder: pathlib.Path) -> dict[str, Any]:
    """Reads the fields of the aligner in a folder."""
    with _reading(folder / _DESCRIPTION):
        described = json.loads((folder / _DESCRIPTION).read_text(encoding="utf-8"))
    written = described.get("format") if isinstance(described, dict) else None
    if written != FORMAT:
        raise checks.InputError(
            f"path {folder} has format {written} but this version reads {FORMAT}; "
            "load it with the version of sotalign-jax that wrote it"
        )
    with _reading(folder / _DESCRIPTION):
        # Shapes only, because a damaged description must not allocate memory before its shapes are
        # compared with those of the tensors.
        shapes = nnx.eval_shape(
            lambda: Heads(*(rebuild(**described["heads"][side]) for side in "xy"))
        )
        info, digests = described["info"], {**described.get("sha256", {})}
        # Versions before this choice was stored used plain cosines by default.
        calibrated = bool(described.get("calibrated", False))
    graphdef, state = nnx.split(shapes)
    leaves = _leaves(state)
    tensors = _tensors(folder / _TENSORS, digests, leaves)
    for name, leaf in leaves.items():
        leaf.set_value(jnp.asarray(tensors[name]))
    calibration = None
    if _CALIBRATION in digests or (folder / _CALIBRATION).exists():
        arrays = _tensors(folder / _CALIBRATION, digests)
        with _reading(folder / _CALIBRATION):
            calibration = Calibration(**jax.tree.map(jnp.asarray, arrays))
            _check_calibration(calibration, shapes.x.d_out)
    if calibrated and calibration is None:
        raise checks.InputError(
            f"path {folder} is calibrated but has no {_CALIBRATION}; save the aligner again"
        )
    return {
        "heads": nnx.merge(graphdef, state),
        "info": info,
        "calibration": calibration,
        "rows": _rows(folder / _ROWS, digests),
        "calibrated": calibrated,
    }


def _rows(path: pathlib.Path, digests: dict[str, str]) -> Rows:
    """Reads the ids of rows, if there are any."""
    if path.name not in digests and not path.exists():
        return {}
    with _reading(path):
        if digests.get(path.name) not in (None, storage.digest(path)):
            raise ValueError("its content has changed")
        rows = json.loads(path.read_text(encoding="ascii"))
        if not all(isinstance(ids, list) for ids in rows.values()):
            raise TypeError("a part is no list")
    return {**rows}


def _resolved(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the folder that a path stands for, with symbolic links followed."""
    try:
        folder = pathlib.Path(path).expanduser().resolve()
    # A NUL character, an unknown user and a loop of links raise errors of these types.
    except (ValueError, RuntimeError, OSError) as error:
        reason = checks.first_line(error)
        raise checks.InputError(
            f"path {os.fspath(path)!r} is not a path ({reason}); choose another folder"
        ) from error
    if not folder.name:
        raise checks.InputError(f"path {path} cannot hold an aligner; choose a folder below it")
    return folder


@contextlib.contextmanager
def _locked(folder: pathlib.Path, *, alone: bool) -> Iterator[None]:
    """Locks the entries of a folder, for one saver alone or for loaders together.

    The lock is on the folder itself, so it leaves no file behind. The operating system releases it
    even after a kill.
    """
    with contextlib.ExitStack() as held:
        # Some network file systems have no locks, and a folder may not be readable. Loading from
        # there must work all the same, and a missing folder is reported by the caller.
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def _write(
    described: dict[str, Any], arrays: dict[str, Any], rows: Rows | None, folder: pathlib.Path
) -> None:
    """Writes the files of an aligner into a new folder."""
    folder.mkdir()
    for name, tensors in arrays.items():
        save_file(tensors, folder / name)
    names = list(arrays)
    if rows:
        # File names need not be UTF-8. In ASCII, JSON escapes the surrogates that stand for them.
        (folder / _ROWS).write_text(json.dumps({**rows}), encoding="ascii")
        names.append(_ROWS)
    digests = {name: storage.digest(folder / name) for name in names}
    text = _text({**described, "sha256": digests})
    (folder / _DESCRIPTION).write_text(text + "\n", encoding="utf-8")


def _check_free(path: pathlib.Path, overwrite: bool) -> None:
    """Raises InputError unless a folder is free, or holds an aligner that may be replaced."""
    # A file at the path counts as an entry that does not belong to an aligner.
    entries = path.iterdir() if path.is_dir() else filter(pathlib.Path.exists, [path])
    names = {entry.name for entry in entries}
    if strangers := sorted(names - {_DESCRIPTION, _TENSORS, _CALIBRATION, _ROWS}):
        raise checks.InputError(
            f"path {path} holds {strangers[0]}, which is not part of an aligner; "
            "choose another folder"
        )
    if names and not overwrite:
        raise checks.InputError(
            f"path {path} holds an aligner already; choose another folder, or pass overwrite=True"
        )


def _text(described: dict[str, Any]) -> str:
    """Returns the text of aligner.json."""

    # `info` often has numpy scalars, such as scores and seeds, which json does not know.
    def plain(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"{type(value).__name__} is not a JSON value")

    try:
        return json.dumps(described, indent=2, allow_nan=False, default=plain)
    except (TypeError, ValueError) as error:
        raise checks.InputError(f"info must hold JSON values only ({error})") from error


def _find(path: str | os.PathLike[str], held: contextlib.ExitStack) -> pathlib.Path:
    """Returns the folder of the aligner at `path`, or in the run folder `path`, and locks it."""
    given = _resolved(path)
    for folder in (given, (given / FOLDER).resolve()):
        held.enter_context(_locked(folder.parent, alone=False))
        # A save that was killed between its two renames has left the aligner under the other name.
        for found in (folder, folder.with_name(f".{folder.name}.old")):
            if (found / _DESCRIPTION).exists():
                return found
    # If the path is a folder of several runs, the message lists them.
    below = sorted(given.glob(f"*/{FOLDER}/{_DESCRIPTION}"))
    runs = ", ".join(str(file.parents[1]) for file in below)
    raise checks.InputError(
        f"path {path} holds no aligner; pass a folder that Aligner.save wrote, or the "
        f"folder of a finished run{f', such as {runs}' if runs else ''}"
    )


def _check_calibration(calibration: Calibration, width: int) -> None:
    """Raises ValueError unless the arrays fit together and are finite."""
    n, m = len(calibration.f), len(calibration.g)
    wanted = {"f": (n, width), "g": (m, width), "u": (n,), "v": (m,), "epsilon": ()}
    for name, shape in wanted.items():
        array = getattr(calibration, name)
        if array.shape != shape or 0 in shape:
            raise ValueError(f"{name} has shape {array.shape} instead of {shape}")
        if not jnp.issubdtype(array.dtype, jnp.floating) or not checks.finite(array):
            raise ValueError(f"{name} has NaN, inf or a wrong type")
    if not calibration.epsilon > 0:
        raise ValueError(f"epsilon is {calibration.epsilon}")


def _leaves(heads: Any) -> dict[str, Any]:
    """Returns the variables of heads, or of their state, by dotted name."""
    state = heads if isinstance(heads, nnx.State) else nnx.state(heads)
    return {".".join(map(str, name)): leaf for name, leaf in nnx.to_flat_state(state)}


def _tensors(
    path: pathlib.Path, digests: dict[str, str], leaves: dict[str, Any] | None = None
) -> dict[str, np.ndarray]:
    """Reads a safetensors file and checks its digest, and its tensors against `leaves` if given."""
    with _reading(path):
        tensors = load_file(path)
    for name in sorted(leaves.keys() | tensors.keys()) if leaves is not None else ():
        wanted, found = _kind((leaves or {}).get(name)), _kind(tensors.get(name))
        if wanted != found:
            raise checks.InputError(
                f"path {path} has {found} for {name} but {_DESCRIPTION} describes {wanted}; "
                "save the aligner again"
            )
    # Checked after the shapes, whose message is more helpful. A file without a digest is accepted.
    with _reading(path):
        if digests.get(path.name) not in (None, storage.digest(path)):
            raise ValueError("its content has changed")
    return tensors


def _kind(tensor: Any) -> str:
    """Returns the shape and type of a tensor in words. All floating-point types are equal."""
    if tensor is None:
        return "nothing"
    # The description does not record the precision of the heads.
    floating = jnp.issubdtype(tensor.dtype, jnp.floating)
    return f"{'float' if floating else tensor.dtype}{list(tensor.shape)}"


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[None]:
    """Turns errors while a file is read into an InputError that names the file."""
    try:
        yield
    # json, safetensors and nnx raise errors of many types for a damaged file.
    except Exception as error:
        raise checks.InputError(
            f"path {path} is missing or damaged ({checks.first_line(error)}); save the aligner "
            "again"
        ) from error
