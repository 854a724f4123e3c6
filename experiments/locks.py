"""One process a run folder."""

import contextlib
import fcntl
import pathlib
from collections.abc import Iterator

from sotalign_jax import checks


@contextlib.contextmanager
def only_process(folder: pathlib.Path, *, flag: str) -> Iterator[None]:
    """Keeps other processes out of a run folder; the system lifts the lock even after a kill.

    Raises:
        InputError: another process is in it.
    """
    with (folder / "config.json").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise checks.InputError(
                f"{flag}: {folder} is in use by another process; wait for its end or choose "
                f"another --{flag}"
            ) from error
        except OSError:  # some network file systems have no locks
            pass
        yield
