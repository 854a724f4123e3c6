"""Files and folders of results: atomic writes, digests, locks, and folders of one command."""

import contextlib
import datetime
import hashlib
import importlib.metadata
import io
import json
import os
import pathlib
import platform
import re
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import IO, Any, BinaryIO

import jax
from flax import traverse_util

from sotalign_jax import checks

if sys.platform != "win32":
    import fcntl

# Larger files are compared by size and modification time, because hashing them would delay every
# start by seconds.
DIGESTED = 64 << 20
LOCK = ".lock"
"""Name of the file that is locked while a command uses a folder."""
_PACKAGES = ("sotalign-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")

# --- files ---------------------------------------------------------------------------------------

TEMPORARY = re.compile(r"\..+\.\d+\.tmp")
"""Names of the files that `replacing` writes to. A killed process leaves them behind."""


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a temporary file that replaces `path` once it is completely on disk.

    Readers see the earlier file or the new one, and a failed write leaves the earlier one as it is.
    A symbolic link stays, and the file that it points to is replaced.

    Args:
        path: The file to write.

    Yields:
        The temporary file, open for writing bytes.

    Raises:
        OSError: The file cannot be written.
    """
    try:
        target = pathlib.Path(path).expanduser().resolve()
    except (ValueError, RuntimeError) as error:  # a NUL character, or an unknown user
        raise OSError(f"{os.fspath(path)!r} is no path ({checks.first_line(error)})") from error
    # Another process or thread may write the same file at the same time.
    own = f"{os.getpid()}.{threading.get_ident()}"
    temporary = target.with_name(f".{target.name}.{own}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)  # atomic within a file system
    except OSError as error:
        # The error of a full disk does not name the file, and others name the temporary one.
        reason = error.strerror or checks.first_line(error)
        remedy = "free some space, or choose another folder"
        raise OSError(f"{path} cannot be written ({reason}); {remedy}") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes strict JSON and replaces an earlier file atomically.

    Args:
        path: The file.
        value: A JSON value without NaN and infinity.
    """
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    with replacing(path) as file:
        file.write(text.encode())


def read_json(path: pathlib.Path) -> Any:
    """Returns the object in a JSON file.

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


def digest(*contents: pathlib.Path | bytes) -> str:
    """Returns the SHA-256 of files and bytes, one after another, as hexadecimal digits.

    >>> digest(b"")[:8]
    'e3b0c442'
    """
    hashed = hashlib.sha256()
    for content in contents:
        if isinstance(content, bytes):
            hashed.update(content)
        else:
            with content.open("rb") as file:
                hashlib.file_digest(file, lambda: hashed)
    return hashed.hexdigest()


def fingerprint(path: pathlib.Path) -> dict[str, Any]:
    """Returns the size and modification time of a file, and a digest if it is not large."""
    with open_regular(path) as file:
        status, found = os.fstat(file.fileno()), None
        if status.st_size <= DIGESTED:
            found = digest(file.read())[:32]
    return {"bytes": status.st_size, "modified": status.st_mtime_ns, "digest": found}


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
    now = fingerprint(path)["digest"]
    if now is None:
        return f"{path.name} was modified"
    return f"{path.name} has other content" if now != recorded.get("digest") else None


@contextlib.contextmanager
def lock(path: pathlib.Path, *, wait: bool = True) -> Iterator[io.FileIO]:
    """Holds an exclusive lock on a file. The operating system releases it even after a kill.

    Args:
        path: The file. It is created, with its folder, if it is missing.
        wait: If False, raises BlockingIOError while another process holds the lock.

    Yields:
        The file, open for reading and appending, without a buffer.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        try:
            if sys.platform != "win32":  # which has no such locks
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:  # some network file systems have no locks: go on without one
            pass
        yield file


# --- folders -------------------------------------------------------------------------------------


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


def remove_temporary(folder: pathlib.Path) -> None:
    """Removes temporary files that killed processes have left. The caller holds the lock."""
    for leftover in folder.glob(".*.tmp"):
        if TEMPORARY.fullmatch(leftover.name):
            leftover.unlink()


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
            held.enter_context(lock(folder / LOCK, wait=wait))
        except BlockingIOError as error:
            text = f"workdir {folder} is in use by another process; wait for its end"
            raise checks.InputError(f"{text} or choose another --workdir") from error
        except OSError as error:
            raise refused(folder, f"cannot be created ({error.strerror})") from error
        remove_temporary(folder)
        yield


def strangers(folder: pathlib.Path) -> str | None:
    """Returns an error message if a folder holds something other than a command's results."""
    if not folder.is_dir() or (folder / "config.json").exists():
        return None
    # A kill during the very first write leaves a temporary .config.json.PID.THREAD.tmp.
    own = re.compile(r"\.lock|\.config\.json\..*")
    names = sorted(path.name for path in folder.iterdir() if not own.fullmatch(path.name))
    return f"holds {names[0]} but no config.json, so it is not a run folder" if names else None


def refused(folder: pathlib.Path, problem: str) -> checks.InputError:
    """Returns the error for a folder that cannot be used.

    Args:
        folder: The folder.
        problem: Predicate of the message.

    Returns:
        The error to raise.
    """
    return checks.InputError(f"workdir {folder} {problem}; choose another --workdir")


def open_folder(
    folder: pathlib.Path,
    config: Mapping[str, Any],
    inputs: Mapping[str, pathlib.Path] | None = None,
) -> None:
    """Creates a folder of results, or opens an existing one with the same config and inputs.

    A missing input does not count as changed, because a finished command does not need it.

    Args:
        folder: Folder of results.
        config: Settings of the command, as JSON values.
        inputs: Files that it reads, by the names of their settings.

    Raises:
        InputError: The folder holds other results, or an input has changed. Nothing is overwritten.
    """
    if problem := _open(folder, config, inputs or {}):
        raise refused(folder, problem)


def _open(
    folder: pathlib.Path, config: Mapping[str, Any], inputs: Mapping[str, pathlib.Path]
) -> str | None:
    """Creates or opens a folder. Returns an error message, or None."""
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
    elif problem := strangers(folder):
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
