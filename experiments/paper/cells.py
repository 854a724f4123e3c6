"""The cells behind tables and figures: each is computed once, whoever asks for it.

A cell is a folder named by a hash of its specification that ends up with a `results.json`. Any
number of processes may share a work folder: whoever holds the lock of a cell computes it, others
go on with the next one.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import pathlib
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from experiments import workdir as workdir_lib

Results = dict[str, Any]
FOLDER = "cells"
_PATIENCE = 0.5
"""Seconds between looks at cells that other processes compute."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """Something to compute: `compute(folder)` returns the results that `spec` determines.

    `after` is the key of a cell that must be finished, or have failed, before.
    """

    spec: Mapping[str, Any]
    compute: Callable[[pathlib.Path], Results] = dataclasses.field(compare=False)
    after: str | None = None

    @property
    def key(self) -> str:
        """The name of its folder.

        >>> Cell({"a": 1, "b": 2}, dict).key == Cell({"b": 2, "a": 1}, dict).key
        True
        """
        text = json.dumps(self.spec, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclasses.dataclass
class Store:
    """Finished cells of a work folder, and why others failed in this process."""

    workdir: pathlib.Path
    failures: dict[str, str] = dataclasses.field(default_factory=dict)

    def folder(self, key: str) -> pathlib.Path:
        return self.workdir / FOLDER / key

    def results(self, key: str) -> Results | None:
        """Results of a finished cell."""
        path = self.folder(key) / "results.json"
        return workdir_lib.read_json(path) if path.exists() else None

    def finish(self, cells: Sequence[Cell], *, show: bool = True) -> None:
        """Computes all cells that are not finished; a failing one is noted, and the rest goes on.

        Every cell is passed over while another process computes it, and looked at again later.
        `show` is for the progress bar.
        """
        wanted = {cell.key: cell for cell in cells}
        waiting = {key: cell for key, cell in wanted.items() if self.results(key) is None}
        done = len(wanted) - len(waiting)
        silent = None if show else io.StringIO()
        with workdir_lib.Progress(len(wanted), "cells", initial=done, stream=silent) as progress:
            while waiting:
                for key, cell in list(waiting.items()):
                    if self._attempt(key, cell):
                        del waiting[key]
                        progress.update(len(wanted) - len(waiting))
                if waiting:
                    time.sleep(_PATIENCE)

    def _attempt(self, key: str, cell: Cell) -> bool:
        """Computes a cell unless it is finished; False while another process computes it."""
        if cell.after and cell.after not in self.failures and self.results(cell.after) is None:
            return False
        folder = self.folder(key)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".log")) as log:
            if log is None:
                return False
            if self.results(key) is not None:
                return True
            log.write(json.dumps(cell.spec) + "\n")
            try:
                with contextlib.redirect_stderr(log):
                    results = cell.compute(folder)
                folder.mkdir(exist_ok=True)
                workdir_lib.write_json(folder / "results.json", results)
            except Exception as error:  # one cell of many: the others are worth having
                traceback.print_exc(file=log)
                first = (str(error).strip() or type(error).__name__).splitlines()[0]
                self.failures[key] = f"{first} (see {FOLDER}/{key}.log)"
        return True


@contextlib.contextmanager
def alone(path: pathlib.Path) -> Iterator[None]:
    """Waits until no other process is in a block with the same file."""
    with path.open("a") as file:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[TextIO | None]:
    """The file opened for appending and locked; None while another process has it.

    The system lifts the lock even after a kill.
    """
    with path.open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        except OSError:  # some network file systems have no locks
            pass
        yield file
