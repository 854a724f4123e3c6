"""Configs of experiments: the default settings, their checks, and the runs that a config lists.

A config is a locked ConfigDict. A config file is a Python file whose `get_config(arg)` changes
`default()` and returns it, such as configs/files.py.
"""

import ast
import dataclasses
import difflib
import pathlib
import re
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

from absl import flags
from ml_collections import config_flags
from ml_collections.config_dict import ConfigDict, FieldReference, FrozenConfigDict, placeholder

from experiments import photos
from sotalign_jax import checks, data, files, heads, methods, training
from sotalign_jax import recipe as recipe_lib

METHODS = (*methods.METHODS, *recipe_lib.TEACHERS, "align")
"""Values of `method`: methods, teachers without a student, and the recipe of `align`."""
DATA = (*photos.CAPTIONED, "files")
"""Values of `data.name`: data sets of the repository, or "files" for the user's own."""
FILES = (
    *("x", "y", "unpaired_x", "unpaired_y"),
    *("val_x", "val_y", "val_x_of_y"),
    *("test_x", "test_y", "test_x_of_y"),
    *("zero_shot_x", "zero_shot_labels", "zero_shot_prompts"),
)
"""Settings of `data.files`: embedding files in a format of `load_array`.

PATH#KEY selects a member or a column of a file. Row i of `x` matches row i of `y`, and pairs and
pools are drawn from these rows. A `*_x_of_y` file holds the matching row of x for every row of y.
Without it, row i matches row i.
"""
PHOTOS = ("unpaired_images", "unpaired_texts", "evaluate_on", "zero_shot_on")
"""Settings of `data` that apply to the data sets of the repository only: see `photos.dataset`."""
PLACEMENT = ("mesh", "on_device")
"""Settings that place a run on devices. They may change when a run is resumed."""
SMOKE = {"train.steps": 4, "train.eval_every": 2, "train.unpaired_batch": 64}
SMOKE |= {"sue.epochs": 1, "sue.mmd_epochs": 1}
"""Changes that the switch `smoke` makes."""


def default() -> ConfigDict:
    """Returns the default config: one run of SOTAlign with the paper's settings.

    Its settings and sections:

    runs: runs of a comparison, {label: {"dotted.key": value, ...}}. A run is this config with its
        own changes. Without an entry there is a single run of `method`.
    seeds: every run is repeated with each of them. If `seed` is set, it is the only one.
    method: one of `METHODS`. "align" is the recipe of `sotalign_jax.align`. Apart from `data` and
        the seed, it reads `train.steps` and `train.unpaired_batch` only.
    data: if `test` is False, the test split and the zero-shot classes are not read.
        `unpaired_images`, `unpaired_texts`, `evaluate_on` and `zero_shot_on` are arguments of
        `photos.dataset`.
    teacher: `noise` is the fraction of its pairs that are mismatched.
    heads: `kind` None selects the kind that the method was published with. `init` "teacher" starts
        linear heads at the teacher's projection and gives them its width.
    NAME: options of the method of that name.
    mesh: number of devices, all by default.
    on_device: True keeps pairs and pools on the device. The default is True if a single device has
        room for them.
    """
    # A ConfigDict sorts its keys and allows no dots in them, so `runs` must stay a dict.
    config = ConfigDict(convert_dict=False)
    config.update({"method": "sotalign", "seed": placeholder(int), "seeds": (42,)})
    config.runs = {}
    config.data = ConfigDict({"name": "coco", "n_pairs": 1000, "pool": "disjoint"})
    config.data.update({"n_unpaired": placeholder(int), "pool_noise": 0.0, "test": True})
    config.data.update({name: placeholder(str) for name in PHOTOS})
    config.data.files = {name: placeholder(str) for name in FILES}
    config.teacher = ConfigDict(
        {"kind": "cca", "dim": placeholder(int), "ridge": 0.1, "cov_normalize": True, "noise": 0.0}
    )
    config.heads = ConfigDict(
        {"kind": placeholder(str), "dim": 1024, "hidden": placeholder(int), "init": "random"}
    )
    sections: dict[str, Any] = {"train": training.TrainConfig(), **methods.METHODS}
    for section, options in sections.items():
        config[section] = ConfigDict()
        hints = typing.get_type_hints(type(options))
        for field in dataclasses.fields(options):
            value, kinds = getattr(options, field.name), typing.get_args(hints[field.name])
            # Unlike a plain value, a reference accepts None besides values of its type.
            if types.NoneType in kinds:
                value = FieldReference(value, field_type=kinds[0])
            config[section][field.name] = value
    del config.train["seed"]  # the seed of the run is used instead
    config.tensorboard = False
    config.update({"mesh": placeholder(int), "on_device": placeholder(bool)})
    return config.lock()


def runs(config: ConfigDict) -> dict[str, FrozenConfigDict]:
    """Expands a config into its runs, keyed by folder name ("sail-seed0").

    A run has `method`, `seed`, the shared sections, and the options of its own method only.

    Args:
        config: A config as returned by `get_config` of a config file.

    Returns:
        The config of every run. Labels vary slowest and seeds fastest.

    Raises:
        InputError: A setting is unknown, or its value has the wrong type or is out of range.
    """
    full = default()
    update(full, _flat(config))
    shared = _flat(full)
    seeds = shared["seeds"] if shared.get("seed") is None else (shared["seed"],)
    if not seeds or len(set(seeds)) < len(seeds):
        raise checks.InputError(f"seeds must be one or more distinct numbers, got {seeds!r}")
    # Check the shared settings first, so that their errors do not name a run.
    for seed in seeds:
        _checked({**shared, "seed": _typed("seeds", seed, int)})
    found = {}
    for label, changes in (shared["runs"] or {shared["method"]: {}}).items():
        if not re.fullmatch(r"\w[\w .,()'+=*-]*", str(label)):
            text = f"runs has the label {label!r}, which cannot name a folder"
            raise checks.InputError(f"{text}; use letters, digits, -, _, ()")
        with checks.naming(f"runs[{label!r}]: "):
            if not isinstance(changes, dict | ConfigDict):
                example = {"method": "sail", "train.steps": 9}
                raise checks.InputError(f"run must be a dict such as {example}, got {changes!r}")
            if own := [name for name in ("seed", "seeds", "runs") if name in changes]:
                raise checks.InputError(f"run must not set {own[0]!r}; set config.{own[0]}")
            for seed in seeds:
                found[f"{label}-seed{seed}"] = _checked({**shared, **_flat(changes), "seed": seed})
    return found


def update(config: ConfigDict, changes: Mapping[str, Any]) -> None:
    """Changes settings by their dotted names.

    Args:
        config: The config to change.
        changes: New values by dotted name, such as {"train.steps": 9}.

    Raises:
        InputError: A name is unknown, or a value has the wrong type.
    """
    for key, value in changes.items():
        *parents, name = str(key).split(".")
        section: Any = config
        for part in parents:
            section = section.get(part) if isinstance(section, ConfigDict) else None
        if not isinstance(section, ConfigDict) or name not in section:
            close = difflib.get_close_matches(str(key), [*config, *_flat(config)], 1)
            known = ", ".join(section if isinstance(section, ConfigDict) else config)
            remedy = f"did you mean {close[0]!r}?" if close else f"choose from {known}"
            raise checks.InputError(f"unknown setting {key!r}; {remedy}")
        if isinstance(section[name], ConfigDict):
            raise checks.InputError(f"{key} is a section; set its entries, such as {key}.NAME")
        # Plain access returns the value of a reference. None is allowed for references only.
        stored = dict(section.items(preserve_field_references=True))[name]
        if value is not None or not isinstance(stored, FieldReference):
            value = _typed(str(key), value, section.get_type(name))
        section[name] = value


def _typed(key: str, value: Any, kind: type) -> Any:
    """Returns the value with the type of its setting. Accepts 1 for 1.0, and lists for tuples."""
    if kind is float and type(value) is int:
        return float(value)
    if kind is tuple and isinstance(value, list):
        return tuple(value)
    if kind is dict and isinstance(value, ConfigDict):
        return value.to_dict()
    # In Python a bool is an int, but --config.train.steps=True is a mistake.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise checks.InputError(f"{key} must be {kind.__name__}, got {value!r}")
    return value


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens nested sections to dotted keys. `runs` stays one value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, dict | ConfigDict) and f"{prefix}{key}" != "runs"
        flat |= _flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flat


def _checked(changes: Mapping[str, Any]) -> FrozenConfigDict:
    """Returns the checked config of one run, without the sections that it does not use."""
    config = default()
    update(config, changes)
    flat, kind, source = _flat(config), config.heads.kind, config.data.name
    checks.choice("method", config.method, METHODS)
    checks.choice("data.name", source, DATA)
    checks.choice("data.pool", config.data.pool, data.POOLS)
    checks.choice("teacher.kind", config.teacher.kind, recipe_lib.TEACHERS)
    checks.choice("heads.init", config.heads.init, recipe_lib.STARTS)
    checks.choice("heads.kind", kind or "linear", heads.KINDS)
    checks.whole(1, **{key: flat[key] for key in ("data.n_pairs", "heads.dim")})
    checks.whole(1, or_none=True, **{key: flat[key] for key in ("teacher.dim", "heads.hidden")})
    checks.whole(0, or_none=True, **{"data.n_unpaired": config.data.n_unpaired})
    checks.at_least(0, **{"teacher.ridge": config.teacher.ridge})
    for key, most in {"seed": 2**32 - 1, "data.pool_noise": 1, "teacher.noise": 1}.items():
        if not 0 <= flat[key] <= most:
            raise checks.InputError(f"{key} must be in 0..{most}, got {flat[key]}")
    own = [f"data.files.{name}" for name in FILES]
    misplaced = [f"data.{name}" for name in PHOTOS] if source == "files" else own
    if given := [key for key in misplaced if flat[key]]:
        other = photos.CAPTIONED[0] if source == "files" else "files"
        remedy = f"leave it out, or pass --config.data.name={other}"
        raise checks.InputError(f"{given[0]} is set but data.name is {source!r}; {remedy}")
    if config.heads.init == "teacher" and kind not in (None, "linear"):
        text = f"heads.init is 'teacher' but heads.kind is {kind!r}, not linear"
        raise checks.InputError(f"{text}; choose init 'random' or kind 'linear'")
    train(config)  # both raise if an option is out of range
    method(config)
    others = {"seeds", "runs", *methods.METHODS} - {config.method}
    values = config.to_dict()
    if config.method == "align":  # it chooses all other settings itself
        others |= {"teacher", "heads"}
        values["train"] = {name: values["train"][name] for name in ("steps", "unpaired_batch")}
    return FrozenConfigDict({k: v for k, v in values.items() if k not in others})


def train(config: ConfigDict) -> training.TrainConfig:
    """Returns the training options of a run."""
    with checks.naming("train."):
        return training.TrainConfig(seed=config.seed, **config.train.to_dict())


def method(config: ConfigDict) -> methods.Method | None:
    """Returns the method of a run, or None if the run is `align` or a teacher on its own."""
    if config.method not in methods.METHODS:
        return None
    with checks.naming(f"{config.method}."):
        registered: Any = methods.METHODS[config.method]
        return dataclasses.replace(registered, **config[config.method].to_dict())


def recipe(config: ConfigDict, dataset: data.Dataset) -> recipe_lib.Recipe:
    """Resolves the config of a run to the recipe for its data.

    Args:
        config: Config of the run.
        dataset: Data of the run. `align` chooses its settings by their size.

    Returns:
        The recipe.
    """
    if config.method == "align":
        return recipe_lib.default(dataset, seed=config.seed, **config.train.to_dict())
    chosen, asked, training = method(config), config.teacher, train(config)
    options: dict[str, Any] = {} if asked.dim is None else {"dim": asked.dim}
    kind = asked.kind if chosen is not None else config.method
    if kind == "cca":
        options |= {"ridge": asked.ridge, "cov_normalize": asked.cov_normalize}
    if kind == "contrastive":  # it is trained as long as a student would be
        own = {"steps": training.steps, "learning_rate": training.learning_rate}
        options = {"dim": config.heads.dim, "batch_size": training.pair_batch} | own | options
    return recipe_lib.Recipe(
        chosen,
        training,
        teacher=kind,
        teacher_options=options,
        teacher_noise=asked.noise,
        start=config.heads.init,
        head=config.heads.kind,
        hidden=config.heads.hidden,
        dim=config.heads.dim if chosen is not None and config.heads.init != "teacher" else None,
    )


def plain(config: ConfigDict) -> dict[str, Any]:
    """Returns the settings that a run's result depends on, as JSON values for config.json."""
    return {key: value for key, value in config.to_dict().items() if key not in PLACEMENT}


# --- config files and the command line -----------------------------------------------------------


def switched(config: ConfigDict, arg: str) -> ConfigDict:
    """Applies the switches after the colon of --config=FILE.py:smoke,seeds=3,pairs=500+1000.

    Args:
        config: The config to change.
        arg: Switches separated by commas. `smoke` takes four steps with one seed. `seeds=N` repeats
            the runs with seeds 0 .. N-1. `pairs=N+M` repeats them with N and with M pairs.
            `from=FOLDER` reads the files of a folder.

    Returns:
        The same config.

    Raises:
        InputError: A switch is unknown, or a folder lacks files.
    """
    words = [word for word in arg.split(",") if word]
    # `smoke` comes first: it sets a single seed, and seeds=N must override it.
    for word in sorted(words, key=lambda word: word != "smoke"):
        name, _, value = word.partition("=")
        numbers = [int(number) for number in value.split("+") if number.isdigit()]
        if word == "smoke":
            update(config, SMOKE)
            config.runs = {  # a run's own steps would override those of `smoke`
                label: {key: value for key, value in one.items() if key not in SMOKE}
                for label, one in config.runs.items()
            }
            config.seeds = config.seeds[:1]
        elif name == "from" and value:
            _read_from(config, pathlib.Path(value).expanduser())
        elif name == "seeds" and len(numbers) == 1:
            config.seeds = tuple(range(*numbers))
        elif name == "pairs" and len(numbers) == value.count("+") + 1:
            config.runs = {
                f"{label}-{number}pairs": {**changes, "data.n_pairs": number}
                for label, changes in (config.runs or {config.method: {}}).items()
                for number in numbers
            }
        else:
            known = "smoke, seeds=N, pairs=N+M, from=FOLDER"
            raise checks.InputError(f"config has an unknown switch {word!r}; choose from {known}")
    return config


def _read_from(config: ConfigDict, folder: pathlib.Path) -> None:
    """Sets the data files to those of a folder, and the number of pairs to their rows."""
    found: dict[str, list[pathlib.Path]] = {name: [] for name in FILES}
    others = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        known = path.stem in found and path.suffix.lower() in files.READERS
        found[path.stem].append(path) if known else others.append(path.name)
    if missing := [name for name in ("x", "y") if not found[name]]:
        text = (
            f"config switch from={folder} needs files x and y, such as x.npy, got no {missing[0]}"
        )
        has = ", ".join(others[:10]) or "no files"
        raise checks.InputError(f"{text}; the folder holds {has}")
    if several := [paths for paths in found.values() if len(paths) > 1]:
        names = " and ".join(path.name for path in several[0])
        raise checks.InputError(f"config switch from={folder} found {names}; remove all but one")
    config.data.name = "files"
    for name, paths in found.items():
        config.data.files[name] = str(paths[0]) if paths else None
    # Files of unpaired rows are the pools, so that every row of x and y can be a pair.
    rows = held = len(files.load_array(config.data.files.x))
    if not found["val_x"] and not found["test_x"]:
        rows -= sum(data.held_out_sizes(rows, data.VAL_AND_TEST))
    held -= rows
    if found["unpaired_x"] or found["unpaired_y"] or rows < config.data.n_pairs:
        config.data.n_pairs = rows
        aside = f"; {held:,} other rows are held out" if held else ""
        print(f"{folder}: all {rows:,} rows of x and y are pairs{aside}", file=sys.stderr)


class DictParser(flags.ArgumentParser):
    """Parses flags that are Python dictionaries: --config.runs="{'cca': {'method': 'cca'}}"."""

    def parse(self, argument: Any) -> dict[str, Any]:
        try:
            return dict(ast.literal_eval(argument) if isinstance(argument, str) else argument)
        except (SyntaxError, TypeError, ValueError) as error:
            raise ValueError("pass a Python dictionary") from error


config_flags.register_flag_parser_for_type(dict, DictParser())
_CONFIG = config_flags.DEFINE_config_file(
    "config",
    None,
    "Config file, FILE.py[:SWITCH,...]. It is executed, so use only files you trust.",
)


def from_flags() -> ConfigDict:
    """Returns the config of --config with the changes on the command line."""
    if not flags.FLAGS["config"].present:
        raise checks.InputError("config is not set; pass --config=experiments/configs/...")
    full = default()  # a config file may return its own ConfigDict with some settings only
    try:
        update(full, _flat(_CONFIG.value))
    except AttributeError as error:
        text = f"get_config must return a ConfigDict, got {type(_CONFIG.value).__name__}"
        raise checks.InputError(f"{text}; change the config file") from error
    except OSError as error:  # ml_collections reports an unreadable file only here
        text = str(error).splitlines()[-1].strip()
        raise checks.InputError(f"config file cannot be read ({text}); check --config") from error
    listed = [one for one in full.runs.values() if isinstance(one, dict | ConfigDict)]
    own = [_flat(changes) for changes in listed]
    # A setting that every run overrides would be ignored on the command line: refuse it.
    for key, value in config_flags.get_override_values(flags.FLAGS["config"]).items():
        if own and all(key in changes for changes in own):
            text = f"{key} is set to {value!r} but every run of this config sets its own value"
            example = {"LABEL": {key: value}}
            remedy = f'leave it out, or list runs: --config.runs="{example}"'
            raise checks.InputError(f"{text}; {remedy}")
    return full
