"""A file of results that several processes can fill at the same time.

A specification is a JSON value that determines a result: settings, and fingerprints of the files
that are read. A result is stored under a hash of its specification, so that equal specifications
are computed once and changed ones are computed again.

    {"results": {"test/mean/R@1": 30.3}, "seconds": 71.2, "spec": {...}}

FILE.jsonl has one such line per result. If a key occurs twice, its last line counts. The folder
FILE has a KEY.log per result. This file is locked while a process computes the result, and it
receives warnings and errors. A process that is killed loses at most the result it is computing.
"""

import contextlib
import functools
import json
import os
import pathlib
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from sotalign_jax import checks, storage

Spec = Mapping[str, Any]
Results = dict[str, Any]
Job = tuple[Spec, Collection[str]]
"""A specification, and the names that its results must have."""


class Entry(NamedTuple):
    """A specification, its results, and the processor seconds spent on them."""

    spec: dict[str, Any]
    results: Results
    seconds: float = 0.0


def key_of(spec: Spec) -> str:
    """Returns the key of a specification. The order of its names does not matter.

    >>> key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    True
    """
    return storage.digest(json.dumps(spec, sort_keys=True).encode())[:16]


def fingerprint(path: str | pathlib.Path) -> str:
    """Returns a digest of a file, or its size and modification time if it exceeds 64 MiB."""
    status = pathlib.Path(path).stat()
    return _fingerprint(str(path), status.st_size, status.st_mtime_ns)


@functools.cache  # size and time are in the key, so a file that changed is read again
def _fingerprint(path: str, size: int, modified: int) -> str:
    if size > storage.DIGESTED:
        return f"{size} bytes of {modified}"
    return storage.digest(pathlib.Path(path))[:16]


class Store:
    """Results in one file, by specification."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._entries: dict[str, Entry] = {}
        self._bytes = self._lines = 0  # read so far; `entries` reads the rest only

    def entries(self) -> dict[str, Entry]:
        """Returns all results by key, including those that other processes have added.

        A last line without an end was cut short by a kill and is ignored.

        Raises:
            InputError: A line is damaged.
        """
        if self.path.exists():
            if self.path.stat().st_size < self._bytes:  # the user has removed lines
                self._entries, self._bytes, self._lines = {}, 0, 0
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
        """Returns the stored lines of some results, sorted by key."""
        known = self.entries()
        return "".join(_line(known[key]) for key in sorted(set(keys)) if key in known)

    def add(self, entries: Iterable[Entry]) -> None:
        """Appends results, except those that are already stored with all of their names."""
        try:
            with storage.lock(self.path) as file:
                self.entries()  # reads up to the end of the last whole line
                new = [_line(one) for one in entries if not self.has(one.spec, one.results)]
                file.truncate(self._bytes)  # a kill may have left a part of the next line
                file.seek(max(self._bytes - 1, 0))
                if file.read(1) not in (b"", b"\n"):  # the last line is whole but for its end
                    new.insert(0, "\n")
                rest = "".join(new).encode()
                while rest:  # an unbuffered write may be partial
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
        except OSError as error:  # the error of a full disk does not name the file
            error.filename = error.filename or str(self.path)
            raise

    def has(self, spec: Spec, needed: Collection[str] = ()) -> bool:
        """Returns True if a specification has results of all needed names.

        Args:
            spec: The specification.
            needed: Names that its results must have.
        """
        return key_of(spec) in self.entries() and self.results(spec).keys() >= set(needed)

    def results(self, spec: Spec) -> Results:
        """Returns the results of a specification, or an empty dictionary."""
        return self.entries().get(key_of(spec), Entry({}, {})).results

    def fill(
        self, jobs: Iterable[Job], compute: Callable[[Spec, set[str]], Results]
    ) -> Iterator[tuple[str, Exception | None]]:
        """Computes missing results and stores each one immediately.

        Results that another process is computing are left for the end.

        Args:
            jobs: Specifications, and the names that their results must have.
            compute: Function that returns the results of a specification with at least these names.

        Yields:
            The key of each missing result, and the exception if it could not be computed.
        """
        waiting = [job for job in jobs if not self.has(*job)]
        for wait in (False, True):
            tried, waiting = waiting, []
            for spec, needed in tried:
                try:
                    with storage.lock(self.log(spec), wait=wait):
                        error = self._compute(spec, set(needed), compute)
                except BlockingIOError:
                    waiting.append((spec, needed))
                else:
                    yield key_of(spec), error

    def log(self, spec: Spec) -> pathlib.Path:
        """Returns the path of a result's log, which is also its lock."""
        return self.path.with_suffix("") / f"{key_of(spec)}.log"

    def _compute(
        self, spec: Spec, needed: set[str], compute: Callable[[Spec, set[str]], Results]
    ) -> Exception | None:
        """Computes one result and stores it. Returns the exception if it fails."""
        if self.has(spec, needed):  # another process stored it while this one waited for the lock
            return None
        known = self.results(spec)
        start = time.process_time()
        with self.log(spec).open("a", encoding="utf-8") as log:
            try:
                with contextlib.redirect_stderr(log):
                    found = known | compute(spec, needed | known.keys())
                made = Entry(dict(spec), found, round(time.process_time() - start, 1))
                _line(made)  # a result that is not JSON fails here, not while the file is open
            except Exception as error:  # the other results can still be computed
                traceback.print_exc(file=log)
                return error
        self.add([made])
        return None


def _line(entry: Entry) -> str:
    text = json.dumps(entry._asdict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"{text}\n"
