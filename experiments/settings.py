"""The configuration of a run as typed, checked dataclasses; config files edit its default."""

import dataclasses
import traceback
import types
import typing
from typing import Any

from absl import flags
from ml_collections import config_dict

from sotalign_jax import checks, data, heads, methods, teachers, training

METHODS = (*methods.METHODS, *teachers.TEACHERS)
"""What `methods` may name: training objectives, and teachers to report on their own."""


@dataclasses.dataclass(frozen=True)
class Files:
    """Embedding files (.npy, .npz, .safetensors, tfds:NAME:SPLIT:FEATURE; PATH#KEY for a member).

    Row i of `x` matches row i of `y`: pairs and pools are drawn from them. `*_x_of_y` hold, for
    every row of y, the matching row of x; without them row i matches row i.
    """

    x: str | None = None
    y: str | None = None
    unpaired_x: str | None = None
    unpaired_y: str | None = None
    val_x: str | None = None
    val_y: str | None = None
    val_x_of_y: str | None = None
    test_x: str | None = None
    test_y: str | None = None
    test_x_of_y: str | None = None
    zero_shot_x: str | None = None
    zero_shot_labels: str | None = None
    zero_shot_prompts: str | None = None


@dataclasses.dataclass(frozen=True)
class Data:
    """Which data: "pictures" is bundled, "files" are the user's."""

    name: str = "pictures"
    n_pairs: int = 1000
    pool: str = "disjoint"
    n_unpaired: int | None = None
    pool_noise: float = 0.0
    files: Files = dataclasses.field(default_factory=Files)

    def __post_init__(self) -> None:
        checks.choice("name", self.name, ("pictures", "files"))
        checks.choice("pool", self.pool, data.POOLS)
        given = [name for name, path in dataclasses.asdict(self.files).items() if path]
        if given and self.name != "files":
            raise checks.InputError(
                f"files.{given[0]}: is set but name is {self.name!r}; "
                "pass --config.data.name=files to use it"
            )


@dataclasses.dataclass(frozen=True)
class Teacher:
    """The linear teacher; `noise` is the fraction of its pairs that are mismatched."""

    kind: str = "cca"
    dim: int | None = None
    ridge: float = 0.1
    cov_normalize: bool = True
    noise: float = 0.0

    def __post_init__(self) -> None:
        checks.choice("kind", self.kind, tuple(teachers.TEACHERS))


@dataclasses.dataclass(frozen=True)
class Head:
    """The alignment heads; a kind of None is the one that the method is published with.

    init "teacher" starts linear heads at the teacher's projection, of its width.
    """

    kind: str | None = None
    dim: int = 1024
    hidden: int | None = None
    init: str = "random"

    def __post_init__(self) -> None:
        if self.kind is not None:
            checks.choice("kind", self.kind, heads.KINDS)
        checks.choice("init", self.init, ("random", "teacher"))
        if self.init == "teacher" and self.kind not in (None, "linear"):
            raise checks.InputError(
                f"init: a linear teacher cannot start heads of kind {self.kind!r}; "
                "choose init 'random' or kind 'linear'"
            )
        for name in ("dim", "hidden"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise checks.InputError(f"{name}: is {value}; pass at least 1")


@dataclasses.dataclass(frozen=True)
class Settings:
    """One run: a method by name with its options (None for a teacher on its own), and the rest."""

    method: str = "sotalign"
    options: methods.Method | None = None
    data: Data = dataclasses.field(default_factory=Data)
    teacher: Teacher = dataclasses.field(default_factory=Teacher)
    heads: Head = dataclasses.field(default_factory=Head)
    train: training.TrainConfig = dataclasses.field(default_factory=training.TrainConfig)
    tensorboard: bool = False


def default_config() -> config_dict.ConfigDict:
    """What a config file starts from: the settings of one run, and which runs to make.

    `methods` and `seeds` span the runs; every method has a section of options under its name;
    `overrides.METHOD` changes other settings for one method.
    """
    config = _to_config(Settings())
    del config["method"], config["options"], config.train["seed"]
    for name, method in methods.METHODS.items():
        config[name] = _to_config(method)
    config.methods = ("sotalign",)
    config.seeds = (42,)
    config.overrides = config_dict.ConfigDict()
    return config


def plan_runs(config: config_dict.ConfigDict) -> list[Settings]:
    """The settings of every run that a config asks for, methods outermost.

    Raises:
        InputError: a key or a value that no setting has.
    """
    base = plain(config)
    overrides = base.pop("overrides", {})
    known = plain(default_config())
    del known["overrides"]
    base = _merge(known, base, "config")
    names, seeds = (_distinct(base.pop(key), key) for key in ("methods", "seeds"))
    for name in names:
        checks.choice("config.methods", name, METHODS)
    for seed in seeds:
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
            raise checks.InputError(f"config.seeds: {seed!r} is no seed; pass whole numbers >= 0")
    _check_section(overrides, "config.overrides")
    for name in overrides:
        checks.choice("config.overrides", name, METHODS)
    runs = []
    for name in names:
        settings = _merge(base, overrides.get(name, {}), f"config.overrides.{name}")
        options = {
            key: _from_dict(type(method), settings.pop(key), f"config.{key}")
            for key, method in methods.METHODS.items()
        }
        for seed in seeds:
            values = {**settings, "method": name, "train": {**settings["train"], "seed": seed}}
            run = _from_dict(Settings, values, "config")
            runs.append(dataclasses.replace(run, options=options.get(name)))
    return runs


def _distinct(values: Any, key: str) -> tuple[Any, ...]:
    if not isinstance(values, tuple | list) or not values:
        raise checks.InputError(f"config.{key}: is {values!r}; pass a tuple of at least one entry")
    for value in values:
        if values.count(value) > 1:
            raise checks.InputError(f"config.{key}: {value!r} comes twice; name every run once")
    return tuple(values)


def to_json(settings: Settings) -> dict[str, Any]:
    """Plain values of every setting."""
    return dataclasses.asdict(settings)


def plain(config: config_dict.ConfigDict) -> dict[str, Any]:
    """A ConfigDict as nested dictionaries.

    Raises:
        InputError: it is something else, as when get_config forgets to return, or its file could
            not be opened, which ml_collections reports only now.
    """
    try:
        return config.to_dict()
    except AttributeError as error:
        kind = type(config).__name__
        raise checks.InputError(
            f"config: get_config returned {kind}; return a ConfigDict"
        ) from error
    except OSError as error:
        raise checks.InputError(explain(error)) from error


def _to_config(instance: Any) -> config_dict.ConfigDict:
    """A dataclass as a ConfigDict, typed placeholders where the default is None."""
    config = config_dict.ConfigDict()
    hints = typing.get_type_hints(type(instance))
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if dataclasses.is_dataclass(value):
            config[field.name] = _to_config(value)
        elif value is None:
            config[field.name] = config_dict.placeholder(_members(hints[field.name])[0])
        else:
            config[field.name] = value
    return config


def _merge(base: dict[str, Any], changes: dict[str, Any], where: str) -> dict[str, Any]:
    _check_section(changes, where)
    merged = dict(base)
    for key, value in changes.items():
        if key not in base:
            known = ", ".join(sorted(base))
            raise checks.InputError(f"{where}.{key}: is no setting; choose of {known}")
        nested = isinstance(base[key], dict)
        merged[key] = _merge(base[key], value, f"{where}.{key}") if nested else value
    return merged


def _check_section(values: Any, where: str) -> None:
    if not isinstance(values, dict):
        raise checks.InputError(f"{where}: is {values!r}; set its entries, as {where}.NAME = ...")


def _from_dict(kind: type, values: dict[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(kind)
    arguments = {}
    for key, value in values.items():
        hint, name = hints[key], f"{where}.{key}"
        if dataclasses.is_dataclass(hint):
            arguments[key] = _from_dict(typing.cast(type, hint), value, name)
        else:
            arguments[key] = _checked(value, _members(hint), name)
    try:
        return kind(**arguments)
    except checks.InputError as error:
        raise checks.InputError(f"{where}.{error}") from error


def _checked(value: Any, kinds: tuple[type, ...], where: str) -> Any:
    if value is None and types.NoneType in kinds:
        return None
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds if kind is not types.NoneType)
        raise checks.InputError(f"{where}: is {value!r}; pass a value of type {wanted}")
    return value


def _members(hint: Any) -> tuple[type, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def apply_switches(config: config_dict.ConfigDict, arg: str) -> config_dict.ConfigDict:
    """Understands the part after the colon of --config=FILE.py:smoke,seeds=3.

    `smoke` shortens training to a few steps; `seeds=N` runs the seeds 0 .. N-1.

    Raises:
        InputError: another word.
    """
    for word in filter(None, arg.split(",")):
        name, _, value = word.partition("=")
        if name == "smoke":
            short = {"steps": 4, "eval_every": 2, "unpaired_batch": 64}
            for section in (config, *config.overrides.values()):
                if "train" in section:
                    section.train.update({k: v for k, v in short.items() if k in section.train})
        elif name == "seeds" and value.isdigit() and int(value) > 0:
            config.seeds = tuple(range(int(value)))
        else:
            raise checks.InputError(f"config: {word!r} is unknown; choose of smoke, seeds=N")
    return config


def explain(error: BaseException) -> str:
    """One line on why the command line or the config file could not be read.

    A config file is a program: what it raises is shown with its place. Libraries wrap such errors
    in tracebacks and lists of attempts, of which the last line says what is the matter.
    """
    cause: BaseException | None = error
    while cause is not None:
        for frame in traceback.extract_tb(cause.__traceback__):
            if frame.name == "get_config" and isinstance(cause, checks.InputError):
                return str(cause)
            if frame.name == "get_config":
                where = f"{frame.filename}, line {frame.lineno}, `{frame.line}`"
                return f"config: {where}: {_last_line(cause)}"
        cause = cause.__context__
    return ("" if isinstance(error, flags.Error) else "config: ") + _last_line(error)


def _last_line(error: BaseException) -> str:
    while error.args and isinstance(error.args[0], BaseException):
        error = error.args[0]
    missing = isinstance(error, KeyError) and error.args
    text = f"{error.args[0]}" if missing else f"{error}"  # a KeyError prints its text quoted
    last = (text.strip() or type(error).__name__).splitlines()[-1].strip()
    return f"{last} is no setting" if missing and last.startswith("'") else last
