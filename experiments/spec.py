"""The settings of experiments: one tree of frozen dataclasses, with defaults, checks and JSON form.

A `Spec` describes a comparison. `expand` returns its runs, which the launchers train. Names and
defaults are those of `sotalign_jax.recipe.Recipe`, `TrainConfig` and the methods.
"""

import ast
import dataclasses
import difflib
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Self, TypeVar

from experiments import photos
from sotalign_jax import checks, data, heads, methods, training
from sotalign_jax import recipe as recipe_lib

Changes = Mapping[str, Any]
"""New values of settings by dotted name, such as {"train.steps": 9}."""
Value = TypeVar("Value")
METHODS = (*methods.METHODS, *recipe_lib.TEACHERS, "align")
"""Values of `method`: methods, teachers without a student, and the recipe of `align`."""
DATA = (*photos.CAPTIONED, "files")
"""Values of `data.name`: data sets of the repository, or "files" for the user's own."""
PHOTOS = ("unpaired_images", "unpaired_texts", "evaluate_on", "zero_shot_on")
"""Settings of `Data` that apply to the data sets of the repository only: see `photos.dataset`."""
PLACEMENT = ("mesh", "on_device")
"""Settings that place a run on devices. They may change when a run is resumed."""
_RENAMED = {
    "heads.kind": "head",
    "heads.init": "start",
    "heads.dim": "dim",
    "heads.hidden": "hidden",
    "teacher.kind": "teacher",
    "teacher.noise": "teacher_noise",
    "teacher.dim": "teacher_options.dim",
    "teacher.ridge": "teacher_options.ridge",
    "teacher.cov_normalize": "teacher_options.cov_normalize",
}
"""Earlier names of settings, which errors point out."""


def _within(most: float, **values: float) -> None:
    """Raises InputError if a value is not in 0..most."""
    for name, value in values.items():
        if not 0 <= value <= most:
            raise checks.InputError(f"{name} must be in 0..{most}, got {value}")


@dataclasses.dataclass(frozen=True)
class Files:
    """Embedding files in a format of `load_array`. PATH#KEY selects a member or a column.

    Row i of `x` matches row i of `y`, and pairs and pools are drawn from these rows. A `*_x_of_y`
    file holds the matching row of x for every row of y. Without it, row i matches row i.

    Attributes:
        x: Training rows of the first modality.
        y: Training rows of the second modality.
        unpaired_x: Pool of the first modality.
        unpaired_y: Pool of the second modality.
        val_x: Validation rows of the first modality.
        val_y: Validation rows of the second modality.
        val_x_of_y: Matching validation rows.
        test_x: Test rows of the first modality.
        test_y: Test rows of the second modality.
        test_x_of_y: Matching test rows.
        zero_shot_x: Rows to classify.
        zero_shot_labels: Their classes, as numbers.
        zero_shot_prompts: Prompts of the classes, shape [classes, prompts, d_y].
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

    def given(self) -> dict[str, str]:
        """Returns the paths that are set, by name."""
        return {name: path for name, path in vars(self).items() if path}


@dataclasses.dataclass(frozen=True)
class Data:
    """Data of a run.

    Attributes:
        name: Bundled data `coco`, `flickr8k`, `rsicd`, `speech` or `code`, or `files`.
        n_pairs: Number of pairs.
        pool: `disjoint` or `random` unpaired rows, see
            [Files and formats](files.md#pairs-and-pools).
        n_unpaired: Largest size of a pool. None takes all rows.
        pool_noise: Fraction of the pools that is replaced by random directions.
        test: False does not read the test split and the zero-shot classes.
        unpaired_images: Another bundled collection to take the pool of images from.
        unpaired_texts: Another bundled collection to take the pool of texts from.
        evaluate_on: Another bundled collection to validate and test on.
        zero_shot_on: A bundled classification set to test on.
        files: Your own files.
    """

    name: str = "coco"
    n_pairs: int = 1000
    pool: str = "disjoint"
    n_unpaired: int | None = None
    pool_noise: float = 0.0
    test: bool = True
    unpaired_images: str | None = None
    unpaired_texts: str | None = None
    evaluate_on: str | None = None
    zero_shot_on: str | None = None
    files: Files = Files()

    def __post_init__(self) -> None:
        checks.choice("name", self.name, DATA)
        checks.choice("pool", self.pool, data.POOLS)
        checks.whole(1, n_pairs=self.n_pairs)
        checks.whole(0, or_none=True, n_unpaired=self.n_unpaired)
        _within(1, pool_noise=self.pool_noise)
        own = self.name == "files"
        misplaced = [name for name in PHOTOS if getattr(self, name)] if own else self.files.given()
        for name in misplaced:
            key = name if own else f"files.{name}"
            other = photos.CAPTIONED[0] if own else "files"
            remedy = f"leave it out, or pass --config.data.name={other}"
            raise checks.InputError(f"{key} is set but data.name is {self.name!r}; {remedy}")


@dataclasses.dataclass(frozen=True)
class TeacherOptions:
    """Options of the teacher. `ridge` and `cov_normalize` are read by `cca` only.

    Attributes:
        dim: Number of directions. None keeps all that the pairs determine.
        ridge: Regularisation of CCA.
        cov_normalize: True divides covariances by the number of pairs minus one.
    """

    dim: int | None = None
    ridge: float = 0.1
    cov_normalize: bool = True

    def __post_init__(self) -> None:
        checks.whole(1, or_none=True, dim=self.dim)
        checks.at_least(0, ridge=self.ridge)


@dataclasses.dataclass(frozen=True)
class Spec:
    """Settings of a comparison. The defaults are one run of SOTAlign with the paper's settings.

    Attributes:
        method: A method, a teacher alone, or `align` for the recipe of `sotalign_jax.align`.
        seed: The only seed, if it is set.
        seeds: Seeds that every run is repeated with.
        runs: Runs of the comparison, `{label: {"dotted.name": value}}`. A run is this spec with its
            own changes. Without an entry there is a single run of `method`.
        data: Data of a run.
        teacher: The teacher, see [Teachers](#teachers).
        teacher_options: Options of the teacher.
        teacher_noise: Fraction of the teacher's pairs that are mismatched on purpose.
        start: `random`, `centred` or `teacher`, which starts linear heads at the teacher and gives
            them its width.
        head: Kind of the heads. None selects the kind that the method was published with.
        hidden: Width of hidden layers. None selects that of the kind.
        dim: Width of the heads' features.
        train: Training.
        options: Options of every method by its name.
        tensorboard: True also writes TensorBoard files (extra `[tensorboard]`).
        mesh: Number of devices. None takes all.
        on_device: True keeps pairs and pools on the device. None does so if a single device has
            room for them.

    Raises:
        InputError: A value is out of range.

    >>> Spec().change({"train.steps": 9}).train.steps
    9
    """

    method: str = "sotalign"
    seed: int | None = None
    seeds: tuple[int, ...] = (42,)
    runs: Mapping[str, Changes] = dataclasses.field(default_factory=dict)
    data: Data = Data()
    teacher: str = "cca"
    teacher_options: TeacherOptions = TeacherOptions()
    teacher_noise: float = 0.0
    start: str = "random"
    head: str | None = None
    hidden: int | None = None
    dim: int = 1024
    train: training.TrainConfig = dataclasses.field(default_factory=training.TrainConfig)
    options: Mapping[str, methods.Method] = dataclasses.field(
        default_factory=lambda: dict(methods.METHODS)
    )
    tensorboard: bool = False
    mesh: int | None = None
    on_device: bool | None = None

    def __post_init__(self) -> None:
        checks.choice("method", self.method, METHODS)
        checks.choice("teacher", self.teacher, recipe_lib.TEACHERS)
        checks.choice("start", self.start, recipe_lib.STARTS)
        checks.choice("head", self.head or "linear", heads.KINDS)
        checks.whole(1, dim=self.dim)
        checks.whole(1, or_none=True, hidden=self.hidden)
        _within(1, teacher_noise=self.teacher_noise)
        if self.seed is not None:
            _within(2**32 - 1, seed=self.seed)
        if self.start == "teacher" and self.head not in (None, "linear"):
            text = f"start is 'teacher' but head is {self.head!r}, not linear"
            raise checks.InputError(f"{text}; choose start 'random' or head 'linear'")

    def change(self, changes: Changes) -> Self:
        """Returns a copy with other values.

        Args:
            changes: New values by name. Entries of a section have dotted names, or are nested.

        Returns:
            The changed copy.

        Raises:
            InputError: A name is unknown, or a value has the wrong type or is out of range.
        """
        return changed(self, changes)

    def of(self, name: str) -> Any:
        """Returns the value of a setting or section by its dotted name, "" for the spec itself.

        Raises:
            InputError: There is no such setting.
        """
        found: Any = self
        for part in name.split(".") if name else ():
            entries = settings(found) if dataclasses.is_dataclass(found) else {}
            if part not in entries:
                raise _unknown(name)
            found = entries[part]
        return found


@dataclasses.dataclass(frozen=True)
class Run(Spec):
    """Settings of one run.

    Attributes:
        seed: Seed of the run.
        label: Name of the run in its comparison, which all of its seeds share.
    """

    seed: int = 0
    label: str = ""

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return f"{self.label}-seed{self.seed}"

    @property
    def chosen(self) -> methods.Method | None:
        """The method with its options. None for `align` and for a teacher on its own."""
        return self.options.get(self.method)

    def to_json(self) -> dict[str, Any]:
        """Returns the settings that the results depend on, as JSON values."""
        unused = {"runs", "seeds", *PLACEMENT, *self.options} - {self.method}
        if self.method == "align":  # it chooses its other settings itself
            unused |= {name for name in settings(self) if name.startswith("teacher")}
            unused |= {"start", "head", "hidden", "dim"}
        found = {key: value for key, value in _json(self).items() if key not in unused}
        if self.method == "align":
            found["train"] = {name: found["train"][name] for name in ("steps", "unpaired_batch")}
        return found

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Run":
        """Returns the run with the settings that `to_json` returned.

        Raises:
            InputError: A setting is unknown or invalid, as in runs of older versions.
        """
        return cls().change(values)

    def recipe(self, dataset: data.Dataset) -> recipe_lib.Recipe:
        """Resolves the run to the recipe for its data. `align` chooses its settings by their size.

        Args:
            dataset: Data of the run.

        Returns:
            The recipe.
        """
        train = dataclasses.replace(self.train, seed=self.seed)
        if self.method == "align":
            return recipe_lib.default(
                dataset, steps=train.steps, unpaired_batch=train.unpaired_batch, seed=self.seed
            )
        trained = self.chosen is not None
        teacher = self.teacher if trained else self.method
        return recipe_lib.Recipe(
            self.chosen,
            train,
            teacher=teacher,
            teacher_options=self._options_of(teacher),
            teacher_noise=self.teacher_noise,
            start=self.start,
            head=self.head,
            hidden=self.hidden,
            dim=self.dim if trained and self.start != "teacher" else None,
        )

    def _options_of(self, teacher: str) -> dict[str, Any]:
        """Returns the options that a teacher reads."""
        asked, train = self.teacher_options, self.train
        options: dict[str, Any] = {} if asked.dim is None else {"dim": asked.dim}
        if teacher == "cca":
            options |= {"ridge": asked.ridge, "cov_normalize": asked.cov_normalize}
        if teacher == "contrastive":  # it is trained as long as a student would be
            own = {"steps": train.steps, "learning_rate": train.learning_rate}
            options = {"dim": self.dim, "batch_size": train.pair_batch} | own | options
        return options


def expand(spec: Spec) -> dict[str, Run]:
    """Expands a comparison into its runs.

    Args:
        spec: The comparison.

    Returns:
        The runs by name ("sail-seed0"). Labels vary slowest and seeds fastest.

    Raises:
        InputError: A setting of a run is unknown or invalid.
    """
    seeds = spec.seeds if spec.seed is None else (spec.seed,)
    if not seeds or len(set(seeds)) < len(seeds):
        raise checks.InputError(f"seeds must be one or more distinct numbers, got {seeds!r}")
    shared = {field.name: getattr(spec, field.name) for field in dataclasses.fields(Spec)}
    shared |= {"seeds": (), "runs": {}}
    found = {}
    listed: Mapping[str, Any] = spec.runs or {spec.method: {}}
    for label, changes in listed.items():
        if not re.fullmatch(r"\w[\w .,()'+=*-]*", str(label)):
            text = f"runs has the label {label!r}, which cannot name a folder"
            raise checks.InputError(f"{text}; use letters, digits, -, _, ()")
        with checks.naming(f"runs[{label!r}]: "):
            if not isinstance(changes, Mapping):
                example = {"method": "sail", "train.steps": 9}
                raise checks.InputError(f"run must be a dict such as {example}, got {changes!r}")
            if own := [name for name in ("seed", "seeds", "runs") if name in changes]:
                raise checks.InputError(f"run must not set {own[0]!r}; set config.{own[0]}")
        for seed in seeds:
            one = Run(**{**shared, "seed": seed, "label": str(label)})
            with checks.naming(f"runs[{label!r}]: "):
                one = one.change(changes)
            found[one.name] = one
    return found


def by_label(runs: Mapping[str, Run], values: Mapping[str, Value]) -> dict[str, list[Value]]:
    """Groups values of runs by their labels.

    Args:
        runs: Runs by name.
        values: A value for each run.

    Returns:
        The values of a label's seeds, by label.

    >>> by_label({"a-seed1": Run(label="a", seed=1)}, {"a-seed1": 3.0})
    {'a': [3.0]}
    """
    found: dict[str, list[Value]] = {}
    for name, value in values.items():
        found.setdefault(runs[name].label, []).append(value)
    return found


# --- the tree by names ---------------------------------------------------------------------------


def settings(node: Any) -> dict[str, Any]:
    """Returns the values of a section by name. The methods are sections of the root."""
    # The seed of the run is used for training, too.
    hidden = {"seed"} if isinstance(node, training.TrainConfig) else {"label", "options"}
    names = [field.name for field in dataclasses.fields(node) if field.name not in hidden]
    found = {name: getattr(node, name) for name in names}
    return found | (dict(node.options) if isinstance(node, Spec) else {})


def names(node: Any = None, where: str = "") -> Iterator[str]:
    """Yields the dotted names of all settings and sections below a section, or below the root."""
    for name, value in settings(Spec() if node is None else node).items():
        yield f"{where}{name}"
        if dataclasses.is_dataclass(value):
            yield from names(value, f"{where}{name}.")


def type_of(name: str) -> tuple[type, bool]:
    """Returns the class of a setting's values, and True if they may be None.

    Args:
        name: Dotted name of the setting. The class of a section is `dict`.

    Raises:
        InputError: There is no such setting.

    >>> type_of("data.n_unpaired"), type_of("data")
    ((<class 'int'>, True), (<class 'dict'>, False))
    """
    above, _, last = name.rpartition(".")
    if dataclasses.is_dataclass(Spec().of(name)):
        return dict, False
    return _kind(typing.get_type_hints(type(Spec().of(above)))[last])


def _kind(hint: Any) -> tuple[type, bool]:
    """Returns the class that a type hint names, and True if None is allowed."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kind = next(one for one in kinds if one is not types.NoneType)
    origin = typing.get_origin(kind) or kind
    return (dict if origin is Mapping else origin), types.NoneType in kinds


def parse(name: str, text: str) -> Any:
    """Returns the value of a setting on the command line.

    Args:
        name: Dotted name of the setting. A section accepts a dictionary, which replaces it.
        text: The value as text.

    Raises:
        InputError: There is no such setting, or the text has another type.

    >>> parse("seeds", "(0, 1)"), parse("data.n_unpaired", "None"), parse("dim", "8")
    ((0, 1), None, 8)
    """
    kind, optional = type_of(name)
    if optional and text in ("", "None"):
        return None
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind in (dict, tuple):
            value = ast.literal_eval(text)
            if kind is dict and not isinstance(value, dict):
                raise TypeError
            if kind is tuple:
                value = tuple(value) if isinstance(value, tuple | list) else (value,)
        else:
            value = kind(text)
    except (KeyError, SyntaxError, TypeError, ValueError) as error:
        flag = f"--config.{name}={text}"
        raise checks.InputError(f"{flag} must be {kind.__name__}, got {text!r}") from error
    section = Spec().of(name)
    return changed(section, value, f"{name}.") if dataclasses.is_dataclass(section) else value


def changed(node: Any, changes: Changes, where: str = "") -> Any:
    """Returns a copy of a section with other values. Its checks run once, on the copy.

    Args:
        node: A dataclass of the tree.
        changes: New values by name.
        where: Dotted name of the section, followed by a dot, for errors.

    Raises:
        InputError: A name is unknown, or a value has the wrong type or is out of range.
    """
    known = settings(node)
    hints = typing.get_type_hints(type(node))
    new: dict[str, Any] = {}
    for name, value in _nested(changes).items():
        key = f"{where}{name}"
        if name not in known:
            raise _unknown(
                f"{key}.{next(iter(value))}" if value and isinstance(value, dict) else key
            )
        if not dataclasses.is_dataclass(known[name]):
            new[name] = _typed(key, value, hints[name])
        elif isinstance(value, type(known[name])):
            new[name] = value
        elif isinstance(value, Mapping):
            new[name] = changed(known[name], value, f"{key}.")
        else:
            raise checks.InputError(f"{key} is a section; set its entries, such as {key}.NAME")
    if own := {name: new.pop(name) for name in list(new) if name not in hints}:
        new["options"] = {**node.options, **own}
    with checks.naming(where):
        return dataclasses.replace(node, **new)


def _typed(key: str, value: Any, hint: Any) -> Any:
    """Returns the value with the type of its setting. Accepts 1 for 1.0, and lists for tuples."""
    kind, optional = _kind(hint)
    if value is None and optional:
        return None
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(value, Mapping) and kind is not dict:
        raise _unknown(f"{key}.{next(iter(value), '')}")
    if kind is tuple and isinstance(value, list | tuple):
        return tuple(_typed(key, one, typing.get_args(hint)[0]) for one in value)
    # In Python a bool is an int, but --config.train.steps=True is a mistake.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise checks.InputError(f"{key} must be {kind.__name__}, got {value!r}")
    return value


def _nested(changes: Changes) -> dict[str, Any]:
    """Groups dotted names by their first parts: {"train.steps": 9} becomes {"train": {...}}."""
    found: dict[str, Any] = {}
    for key, value in changes.items():
        name, _, rest = str(key).partition(".")
        if rest:
            found.setdefault(name, {})[rest] = value
        elif isinstance(value, Mapping) and isinstance(found.get(name), dict):
            found[name] |= value
        else:
            found[name] = dict(value) if isinstance(value, Mapping) else value
    return found


def _unknown(key: str) -> checks.InputError:
    """Returns the error for an unknown name, with the closest known one."""

    def likeness(name: str) -> float:
        # A name without its section, such as "stpes", is compared with the last parts of all names.
        parts = (name, name.rpartition(".")[2])
        return max(difflib.SequenceMatcher(None, key, part).ratio() for part in parts)

    closest = _RENAMED.get(key) or max(names(), key=likeness)
    if key in _RENAMED or likeness(closest) > 0.6:
        return checks.InputError(f"unknown setting {key!r}; did you mean {closest!r}?")
    return checks.InputError(f"unknown setting {key!r}; choose from {', '.join(settings(Spec()))}")


def _json(node: Any) -> dict[str, Any]:
    """Returns a section as JSON values."""
    return {
        name: _json(value) if dataclasses.is_dataclass(value) else value
        for name, value in settings(node).items()
    }


# --- documentation -------------------------------------------------------------------------------


def meanings(section: type) -> dict[str, str]:
    """Returns the attributes of a dataclass and what its docstring says about them."""
    text = inspect.cleandoc(section.__doc__ or "").partition("Attributes:\n")[2]
    listed = textwrap.dedent(text.partition("\n\n")[0])
    found = re.findall(r"^(\w+): (.*(?:\n +.*)*)", listed, re.MULTILINE)
    return {name: " ".join(said.split()) for name, said in found}


def table() -> str:
    """Returns a Markdown table of all settings, with the meanings in their docstrings."""
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    spec = Spec()
    for name in names():
        above, _, last = name.rpartition(".")
        value = spec.of(name)
        if not dataclasses.is_dataclass(value):
            said = meanings(type(spec.of(above)))[last]
            rows.append(f"| `{name}` | `{value}` | {said} |")
    return "\n".join(rows)
