"""The data at hand and the cells on it: from changes of settings to something to compute."""

import dataclasses
import functools
import hashlib
import json
import pathlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import config_dict

from experiments import runner, settings
from experiments.configs import compare
from experiments.paper import measures, scales, views
from experiments.paper.cells import Cell, Results
from sotalign_jax import aligner, checks, data, files, recording, training

Changes = Mapping[str, Any]
"""Settings by dotted name, and "method", "use" (data by name), "given" (at the given scale)."""


class Slot(NamedTuple):
    """Files that belong together, by field, what they hold, and what may be missing."""

    fields: tuple[str, ...]
    holds: str
    optional: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{', '.join(self.fields)}: {self.holds}"


_TABLE = ("x", "y", "val_x", "val_y", "test_x", "test_y")
_CLASSES = ("zero_shot_x", "zero_shot_labels", "zero_shot_prompts")
_MAIN = (*_TABLE, "test_x_of_y", *_CLASSES)
_OPTIONAL = ("test_x_of_y", *_CLASSES)
_ANY = ("NAME", "IMAGE+TEXT")
"""What stands for any name in a slot's."""
_SETS = {
    "Food101": "25,250 test images",
    "CIFAR10": "10,000 test images",
    "CIFAR100": "10,000 test images",
    "Aircraft": "3,333 test images, 100 variants",
    "DTD": "1,880 test images, split 1",
    "Flowers": "6,149 test images",
}
SLOTS = {
    "main": Slot(
        _MAIN,
        "CC3M training rows and validation split, COCO val2017 (5,000 images, 25,000 captions), "
        "ImageNet-1k with prompts; DINOv3 ViT-L and NV-Embed-v2",
        _OPTIONAL,
    ),
    "evaluation/flickr30k": Slot(
        ("test_x", "test_y", "test_x_of_y"),
        "Karpathy's 1,000 test images, 5,000 captions",
        _OPTIONAL,
    ),
    **{f"evaluation/{name}": Slot(_CLASSES, holds) for name, holds in _SETS.items()},
    "pairs/NAME": Slot(("x", "y"), "pairs of another source: CC3M-synth, CC12M, COCO"),
    "unpaired/NAME": Slot(
        ("x", "y"),
        "unpaired images (x), texts (y) or both of a source: CC3M-synth, CC12M, ImageNet, COCO, "
        "WikiText103",
        ("x", "y"),
    ),
    "encoders/IMAGE+TEXT": Slot(
        _MAIN, "the same rows as main by another pair of encoders", _OPTIONAL
    ),
    "sue/COCO100": Slot(("x", "y"), "one caption an image, in file order: 400 test rows first"),
    "sue/F30k500": Slot(("x", "y"), "likewise, of Flickr30k"),
    "sue/Polyvore500": Slot(("x", "y"), "likewise, the first 20,000 items of Polyvore"),
    "skyscript": Slot(_TABLE, "SkyScript, 10,000 test rows; DINOv3 ViT-L and NV-Embed-v2"),
    "skyscript30k": Slot(_TABLE, "SkyScript, 30,000 test rows"),
    "librispeech": Slot(_TABLE, "LibriSpeech: WavLM-Large and NV-Embed-v2 on transcripts"),
}
"""Names that a file of --files may hold."""
UNPAIRED = ("CC3M-synth", "CC12M", "ImageNet", "COCO", "WikiText103")
"""Sources of unpaired rows that the paper names."""


@dataclasses.dataclass(frozen=True)
class Lab:
    """Where cells live, how large they are, and which files were given beside the bundled ones.

    Attributes:
        workdir: folder of cells and views.
        scale: size of runs on the main data.
        given_scale: size of runs on files that were given.
        files: paths by slot and field, see `SLOTS`.
    """

    workdir: pathlib.Path
    scale: scales.Scale
    given_scale: scales.Scale = scales.PAPER
    files: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)

    def given(self, prefix: str) -> dict[str, Mapping[str, str]]:
        """Slots that were given below a prefix such as "pairs/", without it."""
        return {k[len(prefix) :]: v for k, v in self.files.items() if k.startswith(prefix)}

    @property
    def data(self) -> str:
        """What the main data are."""
        main = self.files.get("main")
        return "the bundled pictures" if main is None else f"files ({main['x']}, ...)"

    def evaluates(self, name: str) -> bool:
        """Whether trained models can be evaluated on that set, too."""
        return "main" in self.files and f"evaluation/{name}" in self.files

    def rows(self, slot: str, side: str) -> int:
        """How many rows a given file has."""
        return len(files.load_array(self.files[slot][side]))

    # --- settings ------------------------------------------------------------------------------

    def run(self, changes: Changes, seed: int) -> settings.Settings:
        """The run that the changes describe.

        Raises:
            InputError: a change that no setting has.
        """
        values = dict(changes)
        scale = self.given_scale if values.pop("given", False) else self.scale
        config = scale.config()
        own = self._data_of(values.pop("use", "main"))
        method = values.pop("method", "sotalign")
        # What was tuned comes first: a sweep may change it.
        config.update(config.overrides.get(method, {}))
        config.overrides = config_dict.ConfigDict()
        method = compare.VARIANTS.get(method, method)
        for name, value in {**scale.changes, **own, **values}.items():
            _assign(config, name, value)
        config.methods = (config.teacher.kind if method == "teacher" else method,)
        config.seeds, config.variants = (seed,), config_dict.ConfigDict()
        return settings.plan_runs(config)[0]

    def _data_of(self, use: str) -> dict[str, Any]:
        """The data section for data by name."""
        kind, _, name = use.partition("/")
        main = self.files.get("main")
        if kind == "main":
            return {"data.name": "pictures"} if main is None else _section(main)
        if use in self.files and kind != "pairs":
            return _section(self.files[use])
        if kind == "view":
            return _section(self._view(name))
        if main is None:
            raise checks.InputError(f"files: main is not given, which {use} goes with")
        if kind == "pairs":
            pools = {"unpaired_x": main["x"], "unpaired_y": main["y"]}
            return _section({**main, **pools, **self.files[use]})
        images, texts = name.split("|")
        pools = {}
        for side, source in (("x", images), ("y", texts)):
            if source != "main":
                pools[f"unpaired_{side}"] = self.files[f"unpaired/{source}"][side]
        return _section({**main, **pools})

    def _view(self, name: str) -> dict[str, str]:
        """Files of a view of the bundled pictures, or of SUE's split of given files."""
        kind, *words = name.split("/")
        given = self.files.get(f"sue/{words[0]}")
        stem = name.replace("/", "-")
        if given is not None:  # other files are another view
            stamps = json.dumps(_stamps(given.values()))
            stem += "-" + hashlib.sha256(stamps.encode()).hexdigest()[:8]
        folder = self.workdir / "views" / stem
        if folder.exists():
            return views.write(folder, {})
        if kind == "encoders":
            return views.write(folder, views.encoders(int(words[0]), int(words[1])))
        if kind == "collections":
            return views.write(folder, views.collections(*words))
        if given is None:
            x, y = views.shuffled_pictures()
        else:
            x, y = (files.load_array(given[side]) for side in "xy")
        return views.write(folder, views.sue(x, y, n_pairs=int(words[1])))

    # --- cells ---------------------------------------------------------------------------------

    def cell(self, changes: Changes, metric: str, seed: int) -> Cell:
        """The cell whose results have `metric`."""
        kind = metric.partition("/")[0]
        if kind in measures.SOLVER:
            return self._solver_cell(kind, changes)
        if kind == "between":
            return self._between_cell(changes, seed)
        run = self.run(changes, seed)
        if kind in measures.DATASET:
            return self._measure_cell(kind, run)
        own = self._is_own(run)
        spec = self._spec({"run": settings.to_json(run), **({} if own else self._files_of(run))})
        trained = Cell(spec, functools.partial(_run, run=run, keep_model=not own))
        if not metric.startswith("evaluation/"):
            return trained
        slot = "/".join(metric.split("/")[:2])
        paths = dict(self.files[slot])
        spec = {"evaluate": trained.key, "slot": slot, "files": _stamps(paths.values())}
        compute = functools.partial(_evaluate, run=trained.key, slot=slot, paths=paths)
        return Cell(spec, compute, after=trained.key)

    def _is_own(self, run: settings.Settings) -> bool:
        """Whether a run is on bundled data or a view of them, and not on files that were given."""
        views_of = str(self.workdir / "views")
        return run.data.name == "pictures" or (run.data.files.x or "").startswith(views_of)

    def _files_of(self, run: settings.Settings) -> dict[str, Any]:
        given = (
            getattr(run.data.files, field.name) for field in dataclasses.fields(settings.Files)
        )
        return {"files": _stamps(path for path in given if path)}

    def cells(self, changes: Changes, metric: str, seeds: Sequence[int]) -> list[Cell]:
        """A cell per seed, each with the cell that it needs before it."""
        return [self.cell(changes, metric, seed) for seed in seeds]

    def _spec(self, spec: Any) -> Any:
        """Without the place of the work folder, which decides nothing."""
        if isinstance(spec, dict):
            return {key: self._spec(value) for key, value in spec.items()}
        return spec.replace(f"{self.workdir}/", "") if isinstance(spec, str) else spec

    def _measure_cell(self, kind: str, run: settings.Settings) -> Cell:
        sizes = {"rows": self.scale.distance_rows, "projections": self.scale.projections}
        spec = {"measure": kind, "data": settings.to_json(run)["data"], "seed": run.train.seed}
        spec |= {} if self._is_own(run) else self._files_of(run)
        measure = measures.DATASET[kind]

        def compute(folder: pathlib.Path) -> Results:
            return measure(runner.load_dataset(run), seed=run.train.seed, **sizes)

        return Cell(self._spec({**spec, **sizes}), compute)

    def _solver_cell(self, kind: str, changes: Changes) -> Cell:
        options = {"epsilon": changes["epsilon"], "n": self.scale.solver_rows}
        measure = measures.SOLVER[kind]
        return Cell({"measure": kind, **options}, lambda folder: measure(**options))

    def _between_cell(self, changes: Changes, seed: int) -> Cell:
        first, second = sorted((changes["left"], changes["right"]))
        options = {"side": changes["side"], "left": first, "right": second}
        sizes = {"rows": self.scale.distance_rows, "projections": self.scale.projections}

        def compute(folder: pathlib.Path) -> Results:
            left, right = (self._set(options[name], options["side"]) for name in ("left", "right"))
            return measures.between(left, right, seed=seed, **sizes)

        slots = [self.files.get(_slot(name), {}) for name in (first, second)]
        stamps = _stamps(slot[options["side"]] for slot in slots if options["side"] in slot)
        spec = {"measure": "between", **options, "seed": seed, **sizes}
        return Cell({**spec, "files": stamps} if stamps else spec, compute)

    def _set(self, name: str, side: str) -> np.ndarray | None:
        """All rows of one modality of a collection or a given source; None is random directions."""
        if name == "random":
            return None
        if _slot(name) in self.files:
            return files.load_array(self.files[_slot(name)][side])
        table = data.pictures()
        rows = views.collection_rows(table, name)
        return table.image[rows] if side == "x" else table.text[rows]


def _slot(source: str) -> str:
    """Where the rows of a source of FA8 are."""
    return source if source == "main" else f"unpaired/{source}"


def _stamps(paths: Iterable[str]) -> dict[str, list[int]]:
    """Size and time of each file: one that changes makes other cells."""
    found = {}
    for path in paths:
        file = pathlib.Path(path.partition("#")[0])
        if file.exists():
            found[path] = [file.stat().st_size, file.stat().st_mtime_ns]
    return found


def read_files(path: str | pathlib.Path) -> dict[str, dict[str, str]]:
    """The JSON file of --files: {slot: {field: path}}; relative paths start at its folder.

    Raises:
        InputError: a slot or a field that is unknown or missing, or a file that is not there.
    """
    path = pathlib.Path(path).expanduser()
    given = recording.read_json(path)
    if not isinstance(given, dict):
        raise checks.InputError(f"files: {path} holds no object; pass {{slot: {{field: path}}}}")
    return {slot: _read_slot(slot, fields, path.resolve().parent) for slot, fields in given.items()}


def _read_slot(slot: str, fields: Any, here: pathlib.Path) -> dict[str, str]:
    kind, _, name = slot.partition("/")
    open_ended = {known.partition("/")[0]: known for known in SLOTS if known.endswith(_ANY)}
    known = slot if slot in SLOTS else open_ended.get(kind, "") if name else ""
    if known not in SLOTS or slot.endswith(_ANY):
        raise checks.InputError(f"files: {slot!r} is unknown; choose of {', '.join(SLOTS)}")
    if kind == "unpaired":
        checks.choice("files: unpaired", name, UNPAIRED)
    if not isinstance(fields, dict) or not fields:
        raise checks.InputError(f"files: {slot} is {fields!r}; pass paths by field")
    for field, value in fields.items():
        checks.choice(f"files: {slot}", field, SLOTS[known].fields)
        if not isinstance(value, str):
            raise checks.InputError(f"files: {slot}: {field} is {value!r}; pass a path")
    for field in SLOTS[known].fields:
        if field not in fields and field not in SLOTS[known].optional:
            raise checks.InputError(f"files: {slot}: {field} is not set; pass its path")
    paths = {}
    for field, value in fields.items():
        paths[field] = value
        if not value.startswith("tfds:"):
            file = here / pathlib.Path(value).expanduser()
            paths[field] = str(file)
            if not pathlib.Path(str(file).partition("#")[0]).is_file():
                raise checks.InputError(f"files: {slot}: {field}: {file}: no such file")
    return paths


def _assign(config: config_dict.ConfigDict, name: str, value: Any) -> None:
    *sections, last = name.split(".")
    for section in sections:
        config = config[section]
    config[last] = value


def _section(paths: Mapping[str, str]) -> dict[str, Any]:
    return {"data.name": "files", **{f"data.files.{name}": path for name, path in paths.items()}}


def _run(folder: pathlib.Path, *, run: settings.Settings, keep_model: bool) -> Results:
    """Trains and evaluates; other sets are evaluated on a model that is kept."""
    results = runner.execute(run, folder / "run")
    shutil.rmtree(folder / "run" / "checkpoints", ignore_errors=True)
    if not keep_model:
        shutil.rmtree(folder / "run" / aligner.FOLDER)
    return results


def _evaluate(folder: pathlib.Path, *, run: str, slot: str, paths: Mapping[str, str]) -> Results:
    """Evaluates a run's model on another gallery or classification set."""
    heads = aligner.Aligner.load(folder.with_name(run) / "run").heads
    arrays = {name: files.load_array(path) for name, path in paths.items()}
    results: Results = {}
    if "test_x" in arrays:
        gallery = data.gallery(arrays["test_x"], arrays["test_y"], arrays.get("test_x_of_y"))
        results |= training.evaluate(heads.x, heads.y, gallery)
    if "zero_shot_x" in arrays:
        x, labels, prompts = (arrays[f"zero_shot_{part}"] for part in ("x", "labels", "prompts"))
        task = data.zero_shot(x, labels, prompts)
        results |= training.evaluate_zero_shot(heads.x, heads.y, task)
    return {f"{slot}/{name}": value for name, value in results.items()}
