"""The configuration of a run as typed, checked dataclasses; config files edit its default."""

import dataclasses
import re
import traceback
import types
import typing
from typing import Any

from absl import flags
from ml_collections import config_dict

from sotalign_jax import checks, data, heads, methods, training

METHODS = (*methods.METHODS, *training.TEACHERS)
"""What `methods` may name: training objectives, and teachers to report on their own."""
PLACEMENT = ("mesh", "on_device")
"""Settings that say where a run computes: it may be continued with others."""


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
    """Which data: "pictures" is bundled, "files" are the user's.

    `test` False leaves the test split and zero-shot classes unread.
    """

    name: str = "pictures"
    n_pairs: int = 1000
    pool: str = "disjoint"
    n_unpaired: int | None = None
    pool_noise: float = 0.0
    test: bool = True
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
        checks.choice("kind", self.kind, tuple(training.TEACHERS))


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
        checks.whole(1, dim=self.dim)
        checks.whole(1, or_none=True, hidden=self.hidden)


@dataclasses.dataclass(frozen=True)
class Settings:
    """One run: a method by name with its options (None for a teacher on its own), and the rest.

    `label` is what it is reported as when it is a variant of the method. `mesh` is the number of
    devices to use (all by default) and `on_device` whether pairs and pools are kept on the device
    (by default if a single one has room); neither changes the result, see `PLACEMENT`.
    """

    method: str = "sotalign"
    label: str | None = None
    options: methods.Method | None = None
    data: Data = dataclasses.field(default_factory=Data)
    teacher: Teacher = dataclasses.field(default_factory=Teacher)
    heads: Head = dataclasses.field(default_factory=Head)
    train: training.TrainConfig = dataclasses.field(default_factory=training.TrainConfig)
    tensorboard: bool = False
    mesh: int | None = None
    on_device: bool | None = None

    @property
    def name(self) -> str:
        """What the run is reported as."""
        return self.label or self.method


def default_config() -> config_dict.ConfigDict:
    """What a config file starts from: the settings of one run, and which runs to make.

    `methods`, `pairs` and `seeds` span the runs; without `pairs` there is data.n_pairs alone.
    Every method has a section of options under its name. `variants.LABEL = METHOD` lets a method
    be named once more, as LABEL; `overrides.NAME` changes any setting for one method or variant.
    """
    config = _to_config(Settings())
    del config["method"], config["label"], config["options"], config.train["seed"]
    for name, method in methods.METHODS.items():
        config[name] = _to_config(method)
    config.methods = ("sotalign",)
    config.pairs = ()
    config.seeds = (42,)
    config.variants = config_dict.ConfigDict()
    config.overrides = config_dict.ConfigDict()
    return config


def plan_runs(config: config_dict.ConfigDict) -> list[Settings]:
    """The settings of every run that a config asks for, methods outermost, seeds innermost.

    Raises:
        InputError: a key or a value that no setting has.
    """
    return plan(plain(config))


def plan(values: dict[str, Any]) -> list[Settings]:
    """`plan_runs` of a config's plain values."""
    base = dict(values)
    variants, overrides = (base.pop(key, {}) for key in ("variants", "overrides"))
    known = plain(default_config())
    del known["variants"], known["overrides"]
    base = _merge(known, base, "config")
    methods_of = method_of_name(variants)
    names, pairs, seeds = (base.pop(key) for key in ("methods", "pairs", "seeds"))
    for name in _distinct(names, "methods"):
        checks.choice("config.methods", name, tuple(methods_of))
    _check_whole(_distinct(pairs, "pairs", least=0), "pairs", 1, "number of pairs")
    _check_whole(_distinct(seeds, "seeds"), "seeds", 0, "seed")
    _check_section(overrides, "config.overrides")
    for name in overrides:
        checks.choice("config.overrides", name, tuple(methods_of))
    runs = []
    for name in names:
        method = methods_of[name]
        section = _merge(base, overrides.get(name, {}), f"config.overrides.{name}")
        options = {
            key: _from_dict(type(registered), section.pop(key), f"config.{key}")
            for key, registered in methods.METHODS.items()
        }
        section |= {"method": method, "label": None if name == method else name}
        for n_pairs in pairs or [section["data"]["n_pairs"]]:
            for seed in seeds:
                chosen = {"train": {"seed": seed}, "data": {"n_pairs": n_pairs}}
                merged = {key: {**section[key], **value} for key, value in chosen.items()}
                run = _from_dict(Settings, {**section, **merged}, "config")
                runs.append(dataclasses.replace(run, options=options.get(method)))
    return runs


def method_of_name(variants: Any) -> dict[str, str]:
    """The method behind everything that `methods` may name: methods, teachers and variants."""
    _check_section(variants, "config.variants")
    names = {name: name for name in METHODS}
    for label, method in variants.items():
        if label in names:
            raise checks.InputError(f"config.variants.{label}: is a method's name; choose another")
        checks.choice(f"config.variants.{label}", method, METHODS)
        if not _LABEL.fullmatch(label):
            raise checks.InputError(
                f"config.variants: {label!r} names folders and files; use letters, digits and _"
            )
    return names | variants


_LABEL = re.compile(r"\w+")


def _check_whole(values: tuple[Any, ...], key: str, least: int, what: str) -> None:
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**32:
            raise checks.InputError(
                f"config.{key}: {value!r} is no {what}; pass whole numbers >= {least}"
            )


def _distinct(values: Any, key: str, *, least: int = 1) -> tuple[Any, ...]:
    if not isinstance(values, tuple | list) or len(values) < least:
        wanted = "a tuple of at least one entry" if least else "a tuple"
        raise checks.InputError(f"config.{key}: is {values!r}; pass {wanted}")
    for value in values:
        if values.count(value) > 1:
            raise checks.InputError(f"config.{key}: {value!r} comes twice; name every run once")
    return tuple(values)


def to_json(settings: Settings) -> dict[str, Any]:
    """Plain values of every setting that the result depends on."""
    return without_placement(dataclasses.asdict(settings))


def without_placement(values: dict[str, Any]) -> dict[str, Any]:
    """Plain values of a config but for those in `PLACEMENT`."""
    return {key: value for key, value in values.items() if key not in PLACEMENT}


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
    """`base` with `changes`, which may not have keys of their own."""
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


def apply_switches(
    config: config_dict.ConfigDict, arg: str, **own: dict[str, Any]
) -> config_dict.ConfigDict:
    """Understands the part after the colon of --config=FILE.py:smoke,seeds=3,pairs=500+1000.

    `smoke` shortens training to a few steps; `seeds=N` runs the seeds 0 .. N-1; `pairs=N+M` runs
    everything with N and with M pairs. A word of the config's `own` makes the changes it names.

    Raises:
        InputError: another word.
    """
    for word in filter(None, arg.split(",")):
        name, _, value = word.partition("=")
        if name == "smoke":
            short = {
                "train": {"steps": 4, "eval_every": 2, "unpaired_batch": 64},
                "sue": {"epochs": 1, "mmd_epochs": 1},
            }
            for section in (config, *config.overrides.values()):
                for part in short.keys() & section.keys():
                    known = section[part].keys()
                    section[part].update({k: v for k, v in short[part].items() if k in known})
        elif name == "seeds" and value.isdigit() and int(value) > 0:
            config.seeds = tuple(range(int(value)))
        elif name == "pairs" and all(number.isdigit() for number in value.split("+")):
            config.pairs = tuple(map(int, value.split("+")))
        elif word in own:
            config.update(own[word])
        else:
            known = ", ".join(["smoke", "seeds=N", "pairs=N+M", *own])
            raise checks.InputError(f"config: {word!r} is unknown; choose of {known}")
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
