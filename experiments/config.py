"""The schema of experiments: one locked ConfigDict, and the runs that a config lists.

A config file is plain Python whose `get_config(arg)` changes `default()` and returns it, see
configs/files.py.
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

METHODS = (*methods.METHODS, *training.TEACHERS, "align")
"""What `method` may name: methods, teachers to report on their own, and the recipe of `align`."""
DATA = (*photos.CAPTIONED, "files")
"""What `data.name` may name: photographs in the repository, or the files of the user."""
FILES = (
    *("x", "y", "unpaired_x", "unpaired_y"),
    *("val_x", "val_y", "val_x_of_y"),
    *("test_x", "test_y", "test_x_of_y"),
    *("zero_shot_x", "zero_shot_labels", "zero_shot_prompts"),
)
"""Embedding files of the formats of `load_array`; PATH#KEY names a member or a column.

Row i of `x` matches row i of `y`: pairs and pools are drawn from them. `*_x_of_y` hold, for every
row of y, the matching row of x; without them row i matches row i.
"""
PHOTOS = ("unpaired_images", "unpaired_texts", "evaluate_on", "zero_shot_on")
"""Settings of `data` that choose among the photographs, see `photos.dataset`."""
PLACEMENT = ("mesh", "on_device")
"""Settings that say where a run computes: it may be continued with others."""
SMOKE = {"train.steps": 4, "train.eval_every": 2, "train.unpaired_batch": 64}
SMOKE |= {"sue.epochs": 1, "sue.mmd_epochs": 1}
"""What the switch `smoke` changes."""


def default() -> ConfigDict:
    """One run of SOTAlign with the paper's settings; config files change it.

    `runs` lists the runs of a comparison, {label: {"dotted.key": value, ...}}: each is this config
    with its own changes; without any there is one run, of `method`. Every run is repeated for each
    of `seeds`, or made once with `seed` if that is set.

    data: `test` False leaves the test split and zero-shot classes unread; `unpaired_images` to
        `zero_shot_on` are those of `photos.dataset`, for the photographs only.
    teacher: `noise` is the fraction of its pairs that are mismatched.
    heads: kind None is the one that the method is published with; init "teacher" starts linear
        heads at the teacher's projection, of its width.
    method "align" is the recipe of `sotalign_jax.align`; besides `data` and the seed it reads
        `train.steps` and `train.unpaired_batch` only.
    NAME: the options of the method of that name.
    mesh: the number of devices, all by default. on_device: whether pairs and pools are kept on
        the device, by default if a single one has room.
    """
    config = ConfigDict(convert_dict=False)  # `runs` stays a dict: in order, and with dotted keys
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
            if types.NoneType in kinds:  # what may be None can be set to it
                value = FieldReference(value, field_type=kinds[0])
            config[section][field.name] = value
    del config.train["seed"]
    config.tensorboard = False
    config.update({"mesh": placeholder(int), "on_device": placeholder(bool)})
    return config.lock()


def runs(config: ConfigDict) -> dict[str, FrozenConfigDict]:
    """The runs of a config by folder, such as "sail-seed0"; labels outermost, seeds innermost.

    A run has `method`, `seed`, the shared sections and the options of its own method alone. A key
    that no setting has, or a value of a wrong type or out of range, is an InputError.
    """
    full = default()
    update(full, _flat(config))
    shared = _flat(full)
    seeds = shared["seeds"] if shared.get("seed") is None else (shared["seed"],)
    if not seeds or len(set(seeds)) < len(seeds):
        raise checks.InputError(f"seeds: must be distinct and at least one, got {seeds!r}")
    for seed in seeds:  # an error in a shared setting is not blamed on one run
        _checked({**shared, "seed": _typed("seeds", seed, int)})
    found = {}
    for label, changes in (shared["runs"] or {shared["method"]: {}}).items():
        if not re.fullmatch(r"\w[\w .,()'+=*-]*", str(label)):
            text = f"runs: {label!r} names a folder; use letters, digits, -, _, ()"
            raise checks.InputError(text)
        with checks.naming(f"runs[{label!r}]: "):
            if not isinstance(changes, dict | ConfigDict):
                example = {"method": "sail", "train.steps": 9}
                raise checks.InputError(f"must be a dict such as {example}, got {changes!r}")
            if own := [name for name in ("seed", "seeds", "runs") if name in changes]:
                raise checks.InputError(f"cannot change {own[0]!r}; set config.{own[0]}")
            for seed in seeds:
                found[f"{label}-seed{seed}"] = _checked({**shared, **_flat(changes), "seed": seed})
    return found


def update(config: ConfigDict, changes: Mapping[str, Any]) -> None:
    """Changes settings by their dotted names; an unknown name or another type is an InputError."""
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
            raise checks.InputError(f"{key}: is a section; set its entries, as {key}.NAME = ...")
        stored = dict(section.items(preserve_field_references=True))[name]
        if value is not None or not isinstance(stored, FieldReference):
            value = _typed(str(key), value, section.get_type(name))
        section[name] = value


def _typed(key: str, value: Any, kind: type) -> Any:
    """The value as the kind of a setting; whole numbers are floats, and lists tuples, if asked."""
    if kind is float and type(value) is int:
        return float(value)
    if kind is tuple and isinstance(value, list):
        return tuple(value)
    if kind is dict and isinstance(value, ConfigDict):
        return value.to_dict()
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise checks.InputError(f"{key}: must be {kind.__name__}, got {value!r}")
    return value


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested sections as one dictionary with dotted keys; `runs` is a value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, dict | ConfigDict) and f"{prefix}{key}" != "runs"
        flat |= _flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flat


def _checked(changes: Mapping[str, Any]) -> FrozenConfigDict:
    """Returns the run of these dotted settings, without sections that do not concern it."""
    config = default()
    update(config, changes)
    flat, kind, source = _flat(config), config.heads.kind, config.data.name
    checks.choice("method", config.method, METHODS)
    checks.choice("data.name", source, DATA)
    checks.choice("data.pool", config.data.pool, data.POOLS)
    checks.choice("teacher.kind", config.teacher.kind, tuple(training.TEACHERS))
    checks.choice("heads.init", config.heads.init, ("random", "teacher"))
    checks.choice("heads.kind", kind or "linear", heads.KINDS)
    checks.whole(1, **{key: flat[key] for key in ("data.n_pairs", "heads.dim")})
    checks.whole(1, or_none=True, **{key: flat[key] for key in ("teacher.dim", "heads.hidden")})
    checks.whole(0, or_none=True, **{"data.n_unpaired": config.data.n_unpaired})
    checks.at_least(0, **{"teacher.ridge": config.teacher.ridge})
    for key, most in {"seed": 2**32 - 1, "data.pool_noise": 1, "teacher.noise": 1}.items():
        if not 0 <= flat[key] <= most:
            raise checks.InputError(f"{key}: must be in 0..{most}, got {flat[key]}")
    own = [f"data.files.{name}" for name in FILES]
    misplaced = [f"data.{name}" for name in PHOTOS] if source == "files" else own
    if given := [key for key in misplaced if flat[key]]:
        other = photos.CAPTIONED[0] if source == "files" else "files"
        remedy = f"leave it out, or pass --config.data.name={other}"
        raise checks.InputError(f"{given[0]}: is set but data.name is {source!r}; {remedy}")
    if config.heads.init == "teacher" and kind not in (None, "linear"):
        text = f"heads.init: a linear teacher cannot start heads of kind {kind!r}"
        raise checks.InputError(f"{text}; choose init 'random' or kind 'linear'")
    train(config)
    method(config)
    others = {"seeds", "runs", *methods.METHODS} - {config.method}
    values = config.to_dict()
    if config.method == "align":  # the rest is its own
        others |= {"teacher", "heads"}
        values["train"] = {name: values["train"][name] for name in ("steps", "unpaired_batch")}
    return FrozenConfigDict({k: v for k, v in values.items() if k not in others})


def train(config: ConfigDict) -> training.TrainConfig:
    """Returns the training section of a run."""
    with checks.naming("train."):
        return training.TrainConfig(seed=config.seed, **config.train.to_dict())


def method(config: ConfigDict) -> methods.Method | None:
    """Returns a run's method with its options; None for a teacher on its own, and for `align`."""
    if config.method not in methods.METHODS:
        return None
    with checks.naming(f"{config.method}."):
        registered: Any = methods.METHODS[config.method]
        return dataclasses.replace(registered, **config[config.method].to_dict())


def recipe(config: ConfigDict, dataset: data.Dataset) -> recipe_lib.Recipe:
    """Resolves a run to the recipe that it follows on its data."""
    if config.method == "align":
        return recipe_lib.default(dataset, seed=config.seed, **config.train.to_dict())
    chosen, asked, training = method(config), config.teacher, train(config)
    options: dict[str, Any] = {} if asked.dim is None else {"dim": asked.dim}
    kind = asked.kind if chosen is not None else config.method
    if kind == "cca":
        options |= {"ridge": asked.ridge, "cov_normalize": asked.cov_normalize}
    if kind == "contrastive":
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
        dim=config.heads.dim if chosen is not None and config.heads.init == "random" else None,
    )


def plain(config: ConfigDict) -> dict[str, Any]:
    """What a run's result depends on, as JSON values: what its config.json holds."""
    return {key: value for key, value in config.to_dict().items() if key not in PLACEMENT}


# --- config files and the command line -----------------------------------------------------------


def switched(config: ConfigDict, arg: str) -> ConfigDict:
    """Applies the switches after the colon of --config=FILE.py:smoke,seeds=3,pairs=500+1000.

    Args:
        config: a config, which is changed.
        arg: switches separated by commas. `smoke` takes four steps with one seed. `seeds=N` makes
            the runs with seeds 0 .. N-1. `pairs=N+M` makes them with N and with M pairs.
            `from=FOLDER` reads the files of a folder.

    Returns:
        The same config.

    Raises:
        InputError: a switch is unknown, or a folder lacks files.
    """
    words = [word for word in arg.split(",") if word]
    for word in sorted(words, key=lambda word: word != "smoke"):  # first, so that seeds=N counts
        name, _, value = word.partition("=")
        numbers = [int(number) for number in value.split("+") if number.isdigit()]
        if word == "smoke":
            update(config, SMOKE)
            config.runs = {  # settings of single runs would hide those of `smoke`
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
            raise checks.InputError(f"config: unknown switch {word!r}; choose from {known}")
    return config


def _read_from(config: ConfigDict, folder: pathlib.Path) -> None:
    """Sets the data files to those of a folder, and the number of pairs to what they hold."""
    found: dict[str, list[pathlib.Path]] = {name: [] for name in FILES}
    others = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        known = path.stem in found and path.suffix.lower() in files.READERS
        found[path.stem].append(path) if known else others.append(path.name)
    if missing := [name for name in ("x", "y") if not found[name]]:
        text = f"config: from={folder} must hold x and y, such as x.npy, and has no {missing[0]}"
        has = ", ".join(others[:10]) or "no files"
        raise checks.InputError(f"{text}; it holds {has}")
    if several := [paths for paths in found.values() if len(paths) > 1]:
        names = " and ".join(path.name for path in several[0])
        raise checks.InputError(f"config: from={folder} holds {names}; remove all but one")
    config.data.name = "files"
    for name, paths in found.items():
        config.data.files[name] = str(paths[0]) if paths else None
    rows = held = len(files.load_array(config.data.files.x))
    if not found["val_x"] and not found["test_x"]:
        rows -= sum(data.held_out_sizes(rows, data.VAL_AND_TEST))
    held -= rows
    if found["unpaired_x"] or found["unpaired_y"] or rows < config.data.n_pairs:
        config.data.n_pairs = rows
        aside = f" without {held} that are held out" if held else ""
        print(f"from={folder}: all {rows:,} rows of x and y{aside} are pairs", file=sys.stderr)


class DictParser(flags.ArgumentParser):
    """Reads --config.runs="{'cca': {'method': 'cca'}}"."""

    def parse(self, argument: Any) -> dict[str, Any]:
        try:
            return dict(ast.literal_eval(argument) if isinstance(argument, str) else argument)
        except (SyntaxError, TypeError, ValueError) as error:
            raise ValueError("pass a Python dictionary") from error


config_flags.register_flag_parser_for_type(dict, DictParser())
_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "FILE.py[:SWITCH,...]: what to run. It is code: run only those you trust."
)


def from_flags() -> ConfigDict:
    """The config that --config names, with the changes on the command line."""
    if not flags.FLAGS["config"].present:
        raise checks.InputError("config: is not set; pass --config=experiments/configs/...")
    full = default()  # for a file may write its config from nothing
    try:
        update(full, _flat(_CONFIG.value))
    except AttributeError as error:
        text = f"config: get_config returned {type(_CONFIG.value).__name__}; return a ConfigDict"
        raise checks.InputError(text) from error
    except OSError as error:  # ml_collections says only now that a file could not be opened
        raise checks.InputError(f"config: {str(error).splitlines()[-1].strip()}") from error
    listed = [one for one in full.runs.values() if isinstance(one, dict | ConfigDict)]
    own = [_flat(changes) for changes in listed]
    for key, value in config_flags.get_override_values(flags.FLAGS["config"]).items():
        if own and all(key in changes for changes in own):
            text = f"{key}: is set to {value!r} but every run of this config has its own"
            example = {"LABEL": {key: value}}
            remedy = f'leave it out, or list runs: --config.runs="{example}"'
            raise checks.InputError(f"{text}; {remedy}")
    return full
