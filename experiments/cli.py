"""What the command lines share: what a user can mend ends in one line on stderr."""

import argparse
import pathlib
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from sotalign_jax import checks


class Parser(argparse.ArgumentParser):
    """Options as --name=value, mistakes in one line."""

    def __init__(self, description: str | None) -> None:
        plain = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=plain, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        sys.exit(f"error: {message}; see --help")


def path(text: str) -> pathlib.Path:
    """A path, ~ included."""
    return pathlib.Path(text).expanduser()


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def guarded(main: Callable[[], None], *, resume: str) -> None:
    """Runs `main`; errors of input and disk end in one line. `resume` is the folder's flag."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a clean stop, like ctrl-C
    try:
        main()
    except (checks.InputError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(f"interrupted: start again with the same {resume} to go on")
