"""The way from the command line to a spec: config files, their switches, and --config.NAME=VALUE.

A config file is a Python file whose `get_config(arg)` returns a changed `spec.Spec`, such as
configs/files.py.
"""

import dataclasses
import pathlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags
from flax import traverse_util

from experiments import distributed
from experiments import spec as spec_lib
from sotalign_jax import checks, data, files
from sotalign_jax.search import cli

SMOKE = {"train.steps": 4, "train.eval_every": 2, "train.unpaired_batch": 64}
SMOKE |= {"sue.epochs": 1, "sue.mmd_epochs": 1}
"""Changes that the switch `smoke` makes."""

_CONFIG = flags.DEFINE_string(
    "config",
    None,
    "Config file, FILE.py[:SWITCH,...]. It is executed, so use only files you trust. "
    "--config.NAME=VALUE changes a setting, such as --config.train.steps=9.",
)
_CHANGES = flags.DEFINE_multi_string("config_change", [], "NAME=VALUE, as --config.NAME=VALUE.")


def run(command: Callable[[], None], *, choices: Mapping[str, Sequence[str]] | None = None) -> None:
    """Runs a command that has the flag --config. See `cli.run`."""
    argv = rewritten(sys.argv)
    cli.run(command, choices=choices, argv=argv, initialize=distributed.initialize)


def rewritten(argv: Sequence[str]) -> list[str]:
    """Rewrites --config.NAME=VALUE to --config_change=NAME=VALUE, a flag that absl can parse.

    Args:
        argv: Words of the command line. A value may also be the next word.

    >>> rewritten(["main", "--config.train.steps", "9", "--config.tensorboard"])
    ['main', '--config_change=train.steps=9', '--config_change=tensorboard=True']
    """
    known = set(spec_lib.names())
    found: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        dashes, dot, change = word.partition("config.")
        if dashes not in ("-", "--") or not dot:
            found.append(word)
            continue
        if "=" not in change:
            switch = change in known and spec_lib.type_of(change)[0] is bool
            alone = switch or not words or words[0].startswith("--")
            change += "=True" if alone else f"={words.pop(0)}"
        found.append(f"--config_change={change}")
    return found


def from_flags() -> spec_lib.Spec:
    """Returns the spec of --config with the changes on the command line."""
    if not _CONFIG.value:
        raise checks.InputError("config is not set; pass --config=experiments/configs/...")
    spec = load(_CONFIG.value)
    changes = {}
    for change in _CHANGES.value:
        name, _, text = change.partition("=")
        changes[name] = spec_lib.parse(name, text)
    listed = changes.get("runs", spec.runs).values()
    own = [traverse_util.flatten_dict(one, sep=".") for one in listed if isinstance(one, dict)]
    for name, value in changes.items():
        # A setting that every run overrides would be ignored on the command line: refuse it.
        if own and all(name in one for one in own):
            text = f"{name} is set to {value!r} but every run of this config sets its own value"
            example = {"LABEL": {name: value}}
            remedy = f'leave it out, or list runs: --config.runs="{example}"'
            raise checks.InputError(f"{text}; {remedy}")
    return spec.change(changes)


def load(named: str) -> spec_lib.Spec:
    """Returns the spec of a config file.

    Args:
        named: FILE.py, or FILE.py:ARG to call `get_config(ARG)`.

    Raises:
        InputError: The file cannot be read, fails, or returns something else.
    """
    file, colon, arg = named.partition(":")
    path = pathlib.Path(file).expanduser()
    try:
        source = path.read_text(encoding="utf-8")
    except OSError as error:
        text = f"config file {file} cannot be read ({error.strerror})"
        raise checks.InputError(f"{text}; check --config") from error
    found: dict[str, Any] = {"__name__": "config", "__file__": str(path)}
    try:
        exec(compile(source, str(path), "exec"), found)  # a config file is code
        if "get_config" not in found:
            raise checks.InputError(f"config file {file} has no function get_config; add it")
        made = found["get_config"](arg) if colon else found["get_config"]()
    except checks.InputError:
        raise
    except Exception as error:  # a config file may raise anything
        raise checks.InputError(_failure(str(path), error)) from error
    if not isinstance(made, spec_lib.Spec):
        text = f"get_config must return a spec.Spec, got {type(made).__name__}"
        raise checks.InputError(f"{text}; change config file {file}")
    return made


def _failure(path: str, error: Exception) -> str:
    """Describes an exception in a config file in one line, with the user's line."""
    told = checks.first_line(error)
    lines = [one for one in traceback.extract_tb(error.__traceback__) if one.filename == path]
    if not lines:  # a syntax error names its own line
        return f"config file {path} cannot be read ({told}); correct it"
    where = f"config file {path} fails in line {lines[-1].lineno}, `{lines[-1].line}`"
    return f"{where}: {told}"


def switched(spec: spec_lib.Spec, arg: str) -> spec_lib.Spec:
    """Applies the switches after the colon of --config=FILE.py:smoke,seeds=3,pairs=500+1000.

    Args:
        spec: The spec to change.
        arg: Switches separated by commas. `smoke` takes four steps with one seed. `seeds=N` repeats
            the runs with seeds 0 .. N-1. `pairs=N+M` repeats them with N and with M pairs.
            `from=FOLDER` reads the files of a folder.

    Returns:
        The changed spec.

    Raises:
        InputError: A switch is unknown, or a folder lacks files.
    """
    words = [word for word in arg.split(",") if word]
    # `smoke` comes first: it sets a single seed, and seeds=N must override it.
    for word in sorted(words, key=lambda word: word != "smoke"):
        name, _, value = word.partition("=")
        numbers = [int(number) for number in value.split("+") if number.isdigit()]
        if word == "smoke":
            spec = _short(spec)
        elif name == "from" and value:
            spec = _read_from(spec, pathlib.Path(value).expanduser())
        elif name == "seeds" and len(numbers) == 1:
            spec = spec.change({"seeds": tuple(range(*numbers))})
        elif name == "pairs" and len(numbers) == value.count("+") + 1:
            runs = {
                f"{label}-{number}pairs": {**changes, "data.n_pairs": number}
                for label, changes in (spec.runs or {spec.method: {}}).items()
                for number in numbers
            }
            spec = spec.change({"runs": runs})
        else:
            known = "smoke, seeds=N, pairs=N+M, from=FOLDER"
            raise checks.InputError(f"config has an unknown switch {word!r}; choose from {known}")
    return spec


def _short(spec: spec_lib.Spec) -> spec_lib.Spec:
    """Returns a spec of four steps with one seed."""
    # A run's own steps would override those of `smoke`.
    runs = {
        label: {name: value for name, value in changes.items() if name not in SMOKE}
        for label, changes in spec.runs.items()
    }
    return spec.change({**SMOKE, "runs": runs, "seeds": spec.seeds[:1]})


def _read_from(spec: spec_lib.Spec, folder: pathlib.Path) -> spec_lib.Spec:
    """Sets the data files to those of a folder, and the number of pairs to their rows."""
    names = [field.name for field in dataclasses.fields(spec_lib.Files)]
    found: dict[str, list[pathlib.Path]] = {name: [] for name in names}
    others = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        known = path.stem in found and path.suffix.lower() in files.READERS
        found[path.stem].append(path) if known else others.append(path.name)
    if missing := [name for name in ("x", "y") if not found[name]]:
        has = ", ".join(others[:10]) or "no files"
        raise checks.InputError(
            f"config switch from={folder} needs files x and y, such as x.npy, got no "
            f"{missing[0]}; the folder holds {has}"
        )
    if several := [paths for paths in found.values() if len(paths) > 1]:
        both = " and ".join(path.name for path in several[0])
        raise checks.InputError(f"config switch from={folder} found {both}; remove all but one")
    paths = {name: str(given[0]) if given else None for name, given in found.items()}
    changes: dict[str, Any] = {"data.name": "files", "data.files": paths}
    # Files of unpaired rows are the pools, so that every row of x and y can be a pair.
    rows = held = len(files.load_array(str(paths["x"])))
    if not paths["val_x"] and not paths["test_x"]:
        rows -= sum(data.held_out_sizes(rows, data.VAL_AND_TEST))
    held -= rows
    if paths["unpaired_x"] or paths["unpaired_y"] or rows < spec.data.n_pairs:
        changes["data.n_pairs"] = rows
        aside = f"; {held:,} other rows are held out" if held else ""
        print(f"{folder}: all {rows:,} rows of x and y are pairs{aside}", file=sys.stderr)
    return spec.change(changes)
