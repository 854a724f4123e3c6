"""How commands start and end: what the user can mend is one line on stderr, no traceback."""

import signal
import sys
from collections.abc import Callable

from absl import app, flags, logging

from experiments import processes, settings
from sotalign_jax import checks


def parse(argv: list[str]) -> list[str]:
    """Reads the flags; the `flags_parser` of `absl.app.run`."""
    if "--help" in argv:
        app.usage(shorthelp=True, writeto_stdout=True, exitcode=0)
    try:
        return flags.FLAGS(argv)
    except Exception as error:  # a config file may raise anything
        sys.exit(f"error: {settings.explain(error)}")


def guarded(command: Callable[[], None], *, interrupted: str) -> Callable[[list[str]], None]:
    """The `main` of `absl.app.run` for a command; `interrupted` is advice for after ctrl-C."""

    def main(argv: list[str]) -> None:
        logging.set_verbosity(logging.WARNING)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a clean stop, like ctrl-C
        try:
            if len(argv) > 1:
                raise checks.InputError(f"arguments: {argv[1]!r} is not understood; see --help")
            with processes.connected():
                command()
        except (checks.InputError, FloatingPointError, OSError) as error:
            end(f"error: {error}")
        except KeyboardInterrupt:
            end(f"interrupted: {interrupted}")
        except Exception as error:
            if not processes.several():
                raise
            processes.failed(error)

    return main


def end(message: str) -> None:
    """Ends with one line and exit code 1; as one of several processes, without waiting for them."""
    if processes.several():
        processes.stop(message)
    sys.exit(message)
