"""The data at hand and the cells on it: from changes of settings to something to compute."""

import dataclasses
import functools
import hashlib
import json
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import config_dict

from experiments import runner, settings
from experiments.configs import compare
from experiments.paper import measures, scales, slots, views
from experiments.paper.cells import Cell, Results
from sotalign_jax import aligner, checks, data, evaluation, files

Changes = Mapping[str, Any]
"""Settings by dotted name, and "method", "use" (data by name), "given" (at the given scale)."""


@dataclasses.dataclass(frozen=True)
class Lab:
    """Where cells live, how large they are, and which files were given beside the bundled ones.

    Attributes:
        workdir: folder of cells and views.
        scale: size of runs on the main data.
        given_scale: size of runs on files that were given.
        files: paths by slot and field, see `slots.SLOTS`.
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
            stamps = json.dumps(slots.stamps(given.values()))
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
        spec = self._spec({"run": settings.to_json(run), **self._files_of(run)})
        compute = functools.partial(_run, run=run, keep_model=not self._is_own(run))
        trained = Cell(spec, compute)
        if not metric.startswith("evaluation/"):
            return trained
        slot = "/".join(metric.split("/")[:2])
        paths = dict(self.files[slot])
        spec = {"evaluate": trained.key, "slot": slot, "files": slots.stamps(paths.values())}
        evaluate = functools.partial(_evaluate, run=trained.key, slot=slot, paths=paths)
        return Cell(spec, evaluate, after=trained.key)

    def _is_own(self, run: settings.Settings) -> bool:
        """Whether a run is on bundled data or a view of them, and not on files that were given."""
        views_of = str(self.workdir / "views")
        return run.data.name == "pictures" or (run.data.files.x or "").startswith(views_of)

    def _files_of(self, run: settings.Settings) -> dict[str, Any]:
        """What a specification says of the files that a run was given, if any."""
        if self._is_own(run):
            return {}
        given = (
            getattr(run.data.files, field.name) for field in dataclasses.fields(settings.Files)
        )
        return {"files": slots.stamps(path for path in given if path)}

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
        spec |= self._files_of(run)
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

        given = [self.files.get(_slot(name), {}) for name in (first, second)]
        stamps = slots.stamps(slot[options["side"]] for slot in given if options["side"] in slot)
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
        results |= evaluation.evaluate(heads.x, heads.y, gallery)
    if "zero_shot_x" in arrays:
        x, labels, prompts = (arrays[f"zero_shot_{part}"] for part in ("x", "labels", "prompts"))
        task = data.zero_shot(x, labels, prompts)
        results |= evaluation.evaluate_zero_shot(heads.x, heads.y, task)
    return {f"{slot}/{name}": value for name, value in results.items()}
