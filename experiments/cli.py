"""What the command lines share: what a user can mend ends in one line on stderr."""

import pathlib
import signal
import sys
from collections.abc import Callable

from absl import flags, logging

from sotalign_jax import checks


def required(name: str, value: str | None) -> str:
    """The value of a flag that must be given."""
    if not value:
        raise checks.InputError(f"{name}: is not set; pass --{name}=...")
    return value


def folder(name: str, value: str | None) -> pathlib.Path:
    """The path in a flag that must be given."""
    return pathlib.Path(required(name, value)).expanduser()


def parse(argv: list[str]) -> list[str]:
    """Reads the flags, or says what is wrong with them."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(f"error: {error}")


def guarded(main: Callable[[list[str]], None], *, resume: str) -> Callable[[list[str]], None]:
    """`main` without tracebacks for errors of input and disk; `resume` is the folder's flag."""

    def run(argv: list[str]) -> None:
        logging.set_verbosity(logging.WARNING)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a clean stop, like ctrl-C
        try:
            if len(argv) > 1:
                raise checks.InputError(f"arguments: {argv[1]!r} is not understood; see --help")
            main(argv)
        except (checks.InputError, OSError) as error:
            sys.exit(f"error: {error}")
        except KeyboardInterrupt:
            sys.exit(f"interrupted: start again with the same {resume} to go on")

    return run
