"""Whether a file is still the one that a result was computed from."""

import datetime
import hashlib
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from experiments import distributed, workdir
from sotalign_jax import checks

INPUTS = "inputs.json"
"""Where a run folder keeps the fingerprints of what it reads."""
WHOLE = 64 << 20
"""Files of up to so many bytes are digested whole, larger ones by samples."""
BLOCK = 1 << 20


def fingerprint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Size, modification time in nanoseconds and digest of a file, as JSON values.

    The digest is of the whole content up to 64 MiB; of larger files it is of 64 blocks of 1 MiB,
    evenly spread from the first to the last.

    Raises:
        OSError: the file cannot be read.
    """
    status = os.stat(path)
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        for block in range(WHOLE // BLOCK):
            if status.st_size > WHOLE:
                file.seek(block * (status.st_size - BLOCK) // (WHOLE // BLOCK - 1))
            digest.update(file.read(BLOCK))
    return {
        "bytes": status.st_size,
        "modified": status.st_mtime_ns,
        "digest": digest.hexdigest(),
    }


def changed(recorded: Mapping[str, Any], path: str | os.PathLike[str]) -> str | None:
    """How a file differs from its recorded fingerprint, in a few words; None if it does not.

    Equal size and modification time are taken for equality. A file that was written again with
    the same content is unchanged, unless it is so large that only samples can be compared. An
    empty record stands for a file that could not be read.
    """
    name = pathlib.Path(path).name
    try:
        status = os.stat(path)
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})" if recorded else None
    if status.st_size != recorded.get("bytes"):
        return f"{name} has {status.st_size} bytes, had {recorded.get('bytes', 'none')}"
    if status.st_mtime_ns == recorded["modified"]:
        return None
    if fingerprint(path)["digest"] != recorded["digest"]:
        return f"{name} has other content"
    if status.st_size > WHOLE:
        when = datetime.datetime.fromtimestamp(status.st_mtime_ns / 1e9, datetime.UTC)
        return f"{name} was written again at {when:%Y-%m-%d %H:%M:%S} UTC"
    return None


def keep(folder: pathlib.Path, inputs: Mapping[str, pathlib.Path]) -> None:
    """Notes what a run in `folder` reads, by the names of its settings, or finds it unchanged.

    A file that is not there is no change: a finished run does not need it, and one that does need
    it says so.

    Raises:
        InputError: a file has changed since the run began; nothing is overwritten.
    """

    def note_or_compare() -> None:
        present = {name: path for name, path in inputs.items() if path.exists()}
        kept = workdir.read_json(folder / INPUTS) if (folder / INPUTS).exists() else {}
        for name in present.keys() & kept.keys():
            change = changed(kept[name], present[name])
            if change is not None:
                raise checks.InputError(
                    f"workdir: {folder} was made from other data: {name}: {change}; choose another "
                    "--workdir, or restore the file"
                )
        if new := {name: fingerprint(path) for name, path in present.items() if name not in kept}:
            workdir.write_json(folder / INPUTS, kept | new)

    distributed.agree(note_or_compare)
