"""Entry point of all commands: parses absl flags, prints --help, and reports errors in one line."""

import os
import pathlib
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from sotalign_jax import checks

try:
    from absl import flags as flags  # the commands import them from here
    from absl import logging
except ModuleNotFoundError:
    sys.exit(f"error: {checks.not_installed('absl-py', extra='extract')}")


class _PathParser(flags.ArgumentParser[pathlib.Path]):
    def parse(self, argument: str) -> pathlib.Path:
        return pathlib.Path(argument).expanduser()


def path_flag(name: str, default: str | None, text: str, **options: Any) -> flags.FlagHolder[Any]:
    """Defines a flag whose value is a path. A leading ~ is expanded to the home folder.

    Args:
        name: Name of the flag.
        default: Default value, or None.
        text: Help text.
        **options: Options of `flags.DEFINE`, such as `required`.

    Returns:
        The flag.
    """
    return flags.DEFINE(_PathParser(), name, default, text, **options)


_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the results.")
# --help of a command lists the key flags of its module. A command that uses --workdir declares it.
flags.disclaim_key_flags()


def workdir() -> pathlib.Path:
    """Returns the folder of --workdir.

    Raises:
        InputError: The flag is not set.
    """
    if not _WORKDIR.value:
        raise checks.InputError("workdir is not set; pass --workdir=FOLDER")
    return pathlib.Path(_WORKDIR.value).expanduser()


def run(
    command: Callable[[], None],
    *,
    choices: Mapping[str, Sequence[str]] | None = None,
    argv: Sequence[str] | None = None,
    initialize: Callable[[], None] | None = None,
) -> None:
    """Parses the flags of the command line and runs a command.

    --help prints the docstring of the command's module, `choices` and the flags. Errors that the
    user can correct are printed in one line, without a traceback.

    Args:
        command: Function to run.
        choices: Values to list in --help, by title.
        argv: Words of the command line. The default is sys.argv.
        initialize: Function to call first, once the flags are parsed.

    Raises:
        SystemExit: The command failed or was interrupted. The exit code is 1.
    """
    argv = sys.argv if argv is None else argv
    try:
        if {"--help", "-help", "-h", "--helpfull", "--helpshort"} & set(argv[1:]):
            print(_help(command, choices or {}))
        else:
            _start(command, argv, initialize)
        print(end="", flush=True)  # a closed pipe must raise here, not while Python exits
    except BrokenPipeError:  # a reader such as `head` has closed the pipe
        # Python flushes stdout once more when it exits, and would print another error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (checks.InputError, FloatingPointError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: run the same command again to resume it")


def _help(command: Callable[[], None], choices: Mapping[str, Sequence[str]]) -> str:
    lists = [f"{title}: {', '.join(names)}" for title, names in choices.items()]
    layout = {"width": 100, "subsequent_indent": "    ", "break_on_hyphens": False}
    shown = [sys.modules[command.__module__].__doc__ or ""]
    shown += [textwrap.fill(text, **layout) for text in lists]  # type: ignore[arg-type]
    return "\n\n".join(map(str.strip, [*shown, flags.FLAGS.main_module_help()]))


def keep_programs() -> None:
    """Keeps compiled programs in ~/.cache/sotalign-jax, so that the next command starts faster.

    JAX_COMPILATION_CACHE_DIR names another folder, or none if it is empty.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        jax.config.update("jax_compilation_cache_dir", str(folder / "sotalign-jax"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def _start(
    command: Callable[[], None], argv: Sequence[str], initialize: Callable[[], None] | None
) -> None:
    logging.set_verbosity(logging.WARNING)
    keep_programs()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop cleanly, as on ctrl-C
    try:
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(f"error: {checks.first_line(error)}")
    if len(rest) > 1:
        raise checks.InputError(f"unexpected argument {rest[1]!r}; see --help")
    if initialize is not None:
        initialize()
    command()
