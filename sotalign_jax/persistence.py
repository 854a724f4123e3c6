"""Aligners on disk: a folder with a description in JSON and tensors in safetensors files.

- aligner.json: format, structure of both heads, info, digests of the tensor files
- heads.safetensors: parameters of the heads by dotted name, such as x.linear.kernel
- calibration.safetensors: arrays of the calibration, if there is one
"""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from sotalign_jax import checks
from sotalign_jax.calibration import Calibration
from sotalign_jax.heads import Heads, rebuild

# Increase it when files of older versions cannot be read any more.
FORMAT = 3
"""Version of the files that `save` writes."""
FOLDER = "aligner"
"""Name of the aligner's folder within a run folder."""
_DESCRIPTION, _TENSORS = "aligner.json", "heads.safetensors"
_CALIBRATION = "calibration.safetensors"


class Parts(NamedTuple):
    """The parts of an aligner.

    Attributes:
        heads: Both heads.
        info: Any JSON values.
        calibration: The calibration, if there is one.
    """

    heads: Heads
    info: dict[str, Any]
    calibration: Calibration | None = None


def save(parts: Parts, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Writes an aligner into a folder. If it fails, an earlier aligner stays intact.

    Args:
        parts: The aligner.
        path: The folder, which is created.
        overwrite: True to replace an existing aligner. Other files are never replaced.

    Raises:
        InputError: The folder holds other files, or `info` is not JSON.
        OSError: The files cannot be written, for example because the disk is full.
    """
    # Written to a temporary folder and renamed. A rename is atomic within a file system, so neither
    # a reader nor a crash sees half an aligner.
    path = pathlib.Path(path).expanduser().absolute()
    temporary, previous = (path.with_name(f".{path.name}.{end}") for end in ("tmp", "old"))
    # An earlier save was killed between its two renames. Restores the aligner that it had moved.
    if previous.exists() and not path.exists():
        previous.rename(path)
    _check_free(path, overwrite)
    arrays = {_TENSORS: {k: np.asarray(leaf[...]) for k, leaf in _leaves(parts.heads).items()}}
    if parts.calibration is not None:
        arrays[_CALIBRATION] = jax.tree.map(np.asarray, vars(parts.calibration))
    # Leftovers of a save that was killed.
    for leftover in (temporary, previous):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        for name, tensors in arrays.items():
            save_file(tensors, temporary / name)
        text = _description(parts, {name: _digest(temporary / name) for name in arrays})
        (temporary / _DESCRIPTION).write_text(text + "\n", encoding="utf-8")
        if path.exists():
            path.rename(previous)  # kept until the new one is in its place
        temporary.rename(path)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or checks.first_line(error)
        raise OSError(f"path {path} cannot be written ({reason}); free some space") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(previous, ignore_errors=True)


def load(path: str | os.PathLike[str]) -> Parts:
    """Reads an aligner.

    Args:
        path: A folder that `save` wrote, or the folder of a finished run.

    Returns:
        The parts of the aligner.

    Raises:
        InputError: The folder holds no aligner, or a file of it is missing or damaged.
    """
    folder = _find(path)
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
    return Parts(nnx.merge(graphdef, state), info, calibration)


def _check_free(path: pathlib.Path, overwrite: bool) -> None:
    """Raises InputError unless a folder is free, or holds an aligner that may be replaced."""
    # A file at the path counts as an entry that does not belong to an aligner.
    entries = path.iterdir() if path.is_dir() else filter(pathlib.Path.exists, [path])
    names = {entry.name for entry in entries}
    if strangers := sorted(names - {_DESCRIPTION, _TENSORS, _CALIBRATION}):
        raise checks.InputError(
            f"path {path} holds {strangers[0]}, which is not part of an aligner; "
            "choose another folder"
        )
    if names and not overwrite:
        raise checks.InputError(
            f"path {path} holds an aligner already; choose another folder, or pass overwrite=True"
        )


def _description(parts: Parts, digests: dict[str, str]) -> str:
    """Returns the text of aligner.json."""
    sides = {"x": parts.heads.x, "y": parts.heads.y}
    heads = {side: {"kind": h.kind, "options": h.options()} for side, h in sides.items()}
    described = {"format": FORMAT, "heads": heads, "info": parts.info, "sha256": digests}

    # `info` often has numpy scalars, such as scores and seeds, which json does not know.
    def plain(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"{type(value).__name__} is not a JSON value")

    try:
        return json.dumps(described, indent=2, allow_nan=False, default=plain)
    except (TypeError, ValueError) as error:
        raise checks.InputError(f"info must hold JSON values only ({error})") from error


def _find(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the folder of the aligner at `path`, or in the run folder `path`."""
    given = pathlib.Path(path).expanduser()
    folder = given if (given / _DESCRIPTION).exists() else given / FOLDER
    if (folder / _DESCRIPTION).exists():
        return folder
    # If the path is a folder of several runs, the message lists them.
    below = sorted(given.glob(f"*/{FOLDER}/{_DESCRIPTION}"))
    runs = ", ".join(str(file.parents[1]) for file in below)
    raise checks.InputError(
        f"path {path} holds no aligner; pass a folder that Aligner.save wrote, or the "
        f"folder of a finished run{f', such as {runs}' if runs else ''}"
    )


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
        if digests.get(path.name) not in (None, _digest(path)):
            raise ValueError("its content has changed")
    return tensors


def _kind(tensor: Any) -> str:
    """Returns the shape and type of a tensor in words. All floating-point types are equal."""
    if tensor is None:
        return "nothing"
    # The description does not record the precision of the heads.
    floating = jnp.issubdtype(tensor.dtype, jnp.floating)
    return f"{'float' if floating else tensor.dtype}{list(tensor.shape)}"


def _digest(path: pathlib.Path) -> str:
    """Returns the SHA-256 digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
