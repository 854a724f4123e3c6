"""Results by key in one file, which several processes may fill at once.

A specification is plain JSON that decides a result: the settings, and the fingerprints of the files
that are read. The key of a result is a hash of its specification, so that equal inputs are computed
once and changed inputs are computed again.

    {"results": {"test/mean/R@1": 30.3}, "seconds": 71.2, "spec": {...}}

The file FILE.jsonl has one such line for each result, and the last line of a key counts. The folder
FILE beside it has a KEY.log for each result: the lock of the process that computes it, with its
warnings and errors. Killed at any moment, a process loses at most the result under way.
"""

import contextlib
import fcntl
import functools
import hashlib
import io
import json
import os
import pathlib
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from sotalign_jax import checks

Spec = Mapping[str, Any]
Results = dict[str, Any]
Job = tuple[Spec, Collection[str]]
"""A specification, and the names that its results must have."""
DIGESTED = 64 << 20
"""Bytes of the largest file whose content is read for its fingerprint."""


class Entry(NamedTuple):
    """A specification, its results, and the processor seconds that they took."""

    spec: dict[str, Any]
    results: Results
    seconds: float = 0.0


def key_of(spec: Spec) -> str:
    """Returns the key of a specification, whatever the order of its names.

    >>> key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


def fingerprint(path: str | pathlib.Path) -> str:
    """Returns a digest of a file's content, or the size and time of a file above 64 MiB."""
    status = pathlib.Path(path).stat()
    return _fingerprint(str(path), status.st_size, status.st_mtime_ns)


@functools.cache
def _fingerprint(path: str, size: int, modified: int) -> str:
    if size > DIGESTED:
        return f"{size} bytes of {modified}"
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()[:16]


@contextlib.contextmanager
def lock(path: pathlib.Path, *, wait: bool = True) -> Iterator[io.FileIO]:
    """Holds the exclusive lock of a file, which the system lifts even after a kill.

    Args:
        path: The file, created with its folder if it is missing.
        wait: If False, raises BlockingIOError while another process holds the lock.

    Yields:
        The file, open for reading and appending, without a buffer.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:  # some network file systems have no locks
            pass
        yield file


class Store:
    """The results in one file, see above."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._entries: dict[str, Entry] = {}
        self._bytes = self._lines = 0  # read so far

    def entries(self) -> dict[str, Entry]:
        """Returns all results by key, with those that other processes have added.

        Raises:
            InputError: A line is damaged. A last line that a kill cut short is left out instead.
        """
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._bytes)
                for line in file:
                    try:
                        if line.strip():
                            found = json.loads(line)
                            entry = Entry({**found["spec"]}, {**found["results"]}, found["seconds"])
                            self._entries[key_of(entry.spec)] = entry
                    except (KeyError, TypeError, ValueError) as error:
                        if not line.endswith(b"\n"):
                            break
                        text = f"{self.path}: line {self._lines + 1} is damaged"
                        remedy = "restore the file, or remove the line to compute its result again"
                        raise checks.InputError(f"{text}; {remedy}") from error
                    self._bytes += len(line)
                    self._lines += 1
        return self._entries

    def lines(self, keys: Iterable[str]) -> str:
        """Returns the lines of the results that are known, in the order of their keys."""
        known = self.entries()
        return "".join(_line(known[key]) for key in sorted(set(keys)) if key in known)

    def add(self, entries: Iterable[Entry]) -> None:
        """Appends results; one of a key that is known, with all of its names, is left out."""
        try:
            with lock(self.path) as file:
                self.entries()  # reads up to the end of the last whole line
                new = [_line(one) for one in entries if not self.has(one.spec, one.results)]
                file.truncate(self._bytes)  # removes what a kill left of the next one
                file.seek(max(self._bytes - 1, 0))
                if file.read(1) not in (b"", b"\n"):
                    new.insert(0, "\n")
                rest = "".join(new).encode()
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
        except OSError as error:  # a full disk is reported without a name
            error.filename = error.filename or str(self.path)
            raise

    def has(self, spec: Spec, needed: Collection[str] = ()) -> bool:
        """Returns True if the results of a specification have the names that are needed."""
        return key_of(spec) in self.entries() and self.results(spec).keys() >= set(needed)

    def results(self, spec: Spec) -> Results:
        """Returns the results of a specification, none if they are not known."""
        return self.entries().get(key_of(spec), Entry({}, {})).results

    def fill(
        self, jobs: Iterable[Job], compute: Callable[[Spec, set[str]], Results]
    ) -> Iterator[tuple[str, Exception | None]]:
        """Computes the results that are missing, and stores each at once.

        Results that another process is computing come last, when there is nothing else to do.

        Args:
            jobs: Specifications, and the names that their results must have.
            compute: Returns the results of a specification, with these names among others.

        Yields:
            The key of each result that was missing, and the error that ended it, if any.
        """
        waiting = [job for job in jobs if not self.has(*job)]
        for wait in (False, True):
            tried, waiting = waiting, []
            for spec, needed in tried:
                try:
                    with lock(self.log(spec), wait=wait):
                        error = self._compute(spec, set(needed), compute)
                except BlockingIOError:
                    waiting.append((spec, needed))
                else:
                    yield key_of(spec), error

    def log(self, spec: Spec) -> pathlib.Path:
        """Returns the path of the log of a result."""
        return self.path.with_suffix("") / f"{key_of(spec)}.log"

    def _compute(
        self, spec: Spec, needed: set[str], compute: Callable[[Spec, set[str]], Results]
    ) -> Exception | None:
        """Computes one result unless another process has; returns the error that ended it."""
        if self.has(spec, needed):
            return None
        known = self.results(spec)
        start = time.process_time()
        with self.log(spec).open("a", encoding="utf-8") as log:
            try:
                with contextlib.redirect_stderr(log):
                    found = known | compute(spec, needed | known.keys())
                made = Entry(dict(spec), found, round(time.process_time() - start, 1))
                _line(made)
            except Exception as error:  # one result of many: the others are worth having
                traceback.print_exc(file=log)
                return error
        self.add([made])
        return None


def _line(entry: Entry) -> str:
    text = json.dumps(entry._asdict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"{text}\n"
