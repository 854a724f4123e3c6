"""Executes runs: trains and evaluates the model of a config, and stores both in a run folder.

Executing a run again resumes it. A run folder holds config.json, environment.json, inputs.json,
metrics.jsonl, protocol.json, results.json, checkpoints/ and aligner/.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments import distributed, photos, protocol
from experiments import spec as spec_lib
from experiments import workdir as workdir_lib
from experiments.spec import Run
from sotalign_jax import (
    checks,
    data,
    evaluation,
    files,
    persistence,
    progress,
    recipe,
    storage,
    training,
)
from sotalign_jax.aligner import Aligner
from sotalign_jax.ot import sharding
from sotalign_jax.search import extraction

Results = dict[str, Any]
"""Scores by name, such as test/mean/R@1. A failed run has {"error": message} instead."""
SCORE = "val/mean/R@1"
"""Validation score that selects checkpoints and, in `experiments.tune`, settings."""


class UnusableError(checks.InputError):
    """Valid settings that conflict with each other or with the data."""


def run_all(
    configs: Mapping[str, Run],
    workdir: pathlib.Path,
    *,
    load: "Loader | None" = None,
    title: str = "compare",
    trials: bool = False,
) -> dict[str, Results]:
    """Executes runs under one progress bar and resumes unfinished ones.

    A single run is stored in `workdir` itself, each of several in a folder below it. If one of
    several runs fails, its result is the error message. Settings that conflict with the data raise
    before the first run starts.

    Args:
        configs: Configs by run name.
        workdir: Folder of the results. It is locked until all runs have ended.
        load: Reader of the data. The default is a new one.
        title: Title of the progress bar.
        trials: True if a run whose settings cannot be used is a result like others.

    Returns:
        Results by run name.

    Raises:
        UnusableError: The settings conflict with each other or with the data.
        InputError: The folder is in use or holds other runs.
    """
    load = load or Loader()
    if len(configs) == 1:
        return {name: run(config, workdir, load=load) for name, config in configs.items()}
    ended = _finished_all(configs, workdir)
    if len(ended) == len(configs):
        return ended
    with workdir_lib.claim(workdir, record(configs)):
        begun = distributed.agree(lambda: any((workdir / name).exists() for name in configs))
        begun = begun or trials
        if not begun:
            # All data are read once before hours of training. Seeds of a run have the same files.
            for config in {one.data: one for one in reversed([*configs.values()])}.values():
                load(config, observer=_Reading())
            for config in configs.values():
                load.check(config)
        with workdir_lib.Progress(len(configs), title, initial=len(ended), unit="runs") as bar:
            for name, config in configs.items():
                if name in ended:
                    continue
                try:
                    ended[name] = run(config, workdir / name, load=load, inner=True)
                except UnusableError as error:
                    if not begun:
                        raise  # nothing has been computed yet, so the user can simply correct it
                    ended[name] = {"error": str(error)}
                except FloatingPointError as error:  # a diverged run must not stop the others
                    ended[name] = {"error": str(error)}
                begun = True
                scores = [one[SCORE] for one in ended.values() if SCORE in one]
                bar.advance(mean_r1=max(scores, default=None))
        ended = {name: ended[name] for name in configs}  # finished runs were put first above
        workdir_lib.write_json(workdir / "results.json", ended)
    return ended


def record(configs: Mapping[str, Run]) -> dict[str, Any]:
    """Returns the content of config.json for a folder of several runs."""
    return {name: config.to_json() for name, config in configs.items()}


def _finished_all(configs: Mapping[str, Run], workdir: pathlib.Path) -> dict[str, Results]:
    """Returns the results of the finished runs by name."""
    if not distributed.agree((workdir / "config.json").exists):
        return {}
    workdir_lib.open_run(workdir, record(configs))
    found = {name: _finished(config, workdir / name) for name, config in configs.items()}
    return {name: results for name, results in found.items() if results is not None}


def _finished(config: Run, folder: pathlib.Path) -> Results | None:
    """Returns the results of a finished run, or None if it must be executed."""
    if not distributed.agree((folder / "config.json").exists):
        return None
    workdir_lib.open_run(folder, config.to_json(), inputs(config))
    ended = folder / "results.json"
    if not distributed.agree(ended.exists):
        return None
    try:
        # Loading verifies the saved model, so that a damaged one is trained again. JSON cannot
        # carry the model to the other processes: the first one returns None in its place.
        distributed.agree(lambda: Aligner.load(folder) and None)
    except checks.InputError as error:
        progress.say(f"{error}; training the model again", show=distributed.is_first())
        return None
    return distributed.agree(lambda: workdir_lib.read_scores(ended))


def run(
    config: Run, folder: pathlib.Path, *, load: "Loader | None" = None, inner: bool = False
) -> Results:
    """Executes one run in `folder`, or resumes it.

    The folder is claimed first, so that a second command for the same folder fails at once. If the
    data or the settings cannot be used, the claim is withdrawn and the folder stays usable.

    Args:
        config: The run.
        folder: Run folder.
        load: Reader of the data. The default is a new one.
        inner: True if the progress bar is shown below that of `run_all`.

    Returns:
        The results.

    Raises:
        UnusableError: The settings conflict with each other or with the data.
        InputError: The folder cannot be used.
    """
    if (results := _finished(config, folder)) is not None:
        return results
    title = folder.name if inner else f"{config.method} seed {config.seed}"
    shown: dict[str, Any] = {"tensorboard": config.tensorboard, "title": title, "inner": inner}
    with (
        workdir_lib.claim(folder, config.to_json(), inputs(config)),
        workdir_lib.Recorder(folder, steps=config.train.steps, **shown) as recorder,
    ):
        try:
            model, dataset = _train(config, recorder, load or Loader())
        except checks.InputError as error:
            raise UnusableError(str(error)) from error
        results, more = _evaluate(model, dataset)
        workdir_lib.write_json(folder / protocol.FILE, more)
        info = {"settings": config.to_json(), "results": results}
        known = encoders_of(config)
        info |= {"encoders": known} if known else {}
        rows = row_ids(config, dataset)
        model = dataclasses.replace(model, info=model.info | info, rows=rows)
        if distributed.is_first():
            # Overwrite, because a kill during an earlier save may have left an incomplete model.
            model.save(folder / persistence.FOLDER, overwrite=True)
        # Written last: this file marks the run as finished.
        workdir_lib.write_json(folder / "results.json", results)
    return results


def encoders_of(config: Run) -> dict[str, Any] | None:
    """Returns descriptions of the encoders of both sides, or None if they are unknown."""
    if config.data.name in photos.PHOTOGRAPHS:
        return photos.ENCODERS
    if config.data.name != "files":
        return None
    table = pathlib.Path(files.split_key(config.data.files.given()["x"])[0]).expanduser()
    noted = table.parent / extraction.ENCODERS
    return storage.read_json(noted) if noted.exists() else None


def row_ids(config: Run, dataset: data.Dataset) -> persistence.Rows:
    """Returns the ids of the training pairs and of the test rows, by part, if they are known."""
    if config.data.name != "files":
        return {}
    found: dict[str, Sequence[str]] = {}
    paths = config.data.files.given()
    for side in "xy":
        pairs = extraction.read_ids(paths[side])
        if pairs is not None and dataset.pair_rows is not None:
            found[f"pairs_{side}"] = [pairs.ids[row] for row in dataset.pair_rows]
        test = extraction.read_ids(paths.get(f"test_{side}"))
        if test is not None:
            found[f"test_{side}"] = test.ids
            found |= {"test_texts": test.texts} if side == "y" else {}
    return found


def _train(
    config: Run, recorder: workdir_lib.Recorder, load: "Loader"
) -> tuple[Aligner, data.Dataset]:
    """Loads the data, resolves the recipe and trains the model."""
    if config.tensorboard:  # fail before the data are read
        checks.require("tensorboardX", extra="tensorboard")
    mesh = sharding.rows_mesh(config.mesh)
    dataset = load(config, observer=recorder)
    resolved, dataset = resolve(config, dataset)
    # Cross-validation may choose another kind of teacher on a host that rounds differently.
    prepared = recipe.prepare(
        resolved,
        dataset,
        observer=recorder,
        broadcast=lambda teacher: distributed.agree(lambda: teacher),
        # Processes whose cross-validations differ by rounding would wait for each other for ever.
        mesh=mesh if jax.process_count() == 1 else None,
    )
    with checks.naming(f"{config.method}: "):
        model = recipe.train(
            resolved,
            prepared,
            observer=recorder,
            progress=distributed.is_first(),
            resume=recorder.resume,
            mesh=mesh,
            on_device=config.on_device,
        )
    return model, dataset


def resolve(config: Run, dataset: data.Dataset) -> tuple[recipe.Recipe, data.Dataset]:
    """Returns the recipe of a run and its data.

    `align` selects by validation scores. If its data have no validation gallery, some pairs are
    held out for one.

    Args:
        config: The run.
        dataset: Data of the run.

    Returns:
        The recipe, and the data with a validation gallery if the recipe needs one.
    """
    if config.method == "align" and dataset.val is None:
        dataset = data.hold_out(dataset, seed=config.seed)
    return config.recipe(dataset), dataset


def _evaluate(model: Aligner, dataset: data.Dataset) -> tuple[Results, Results]:
    """Returns the scores of a model on all galleries of its data, and those of `protocol`."""
    selection = ("best_step", "selected", "candidates", "kernel_teacher", "unpaired")
    results = {name: model.info[name] for name in selection if name in model.info}
    if results.get("selected") == "trained" and len(results["candidates"]) < 2:
        results = {"best_step": results["best_step"]}  # a single candidate is no selection
    results["calibrated"] = model.calibrated
    more: Results = {}
    for name, gallery in (("val", dataset.val), ("test", dataset.test)):
        if gallery is not None:  # calibrated scores are added as test/calibrated/mean/R@1
            embedded = protocol.embed(model, gallery)
            scores = protocol.recalls(embedded)
            results |= {f"{name}/{key}": value for key, value in scores.items()}
            scores = protocol.scores(embedded)
            more |= {f"{name}/{key}": value for key, value in scores.items()}
    if dataset.zero_shot is not None:
        x, y = model.heads.x, model.heads.y
        scores = evaluation.evaluate_zero_shot(x, y, dataset.zero_shot)
        results |= {f"test/{key}": value for key, value in scores.items()}
    return results, more


KEPT = 4 << 30
"""Bytes of the data sets that are kept for further runs."""


class Loader:
    """Reads the data of runs. Runs that differ in their methods only share one data set."""

    def __init__(self) -> None:
        self._made: dict[tuple[spec_lib.Data, int], data.Dataset] = {}

    def __call__(self, config: Run, *, observer: progress.Observer | None = None) -> data.Dataset:
        """Returns the data of a run, see `load_dataset`."""
        key = config.data, config.seed
        if key not in self._made:
            made = load_dataset(config, observer=observer)
            if sum(map(_bytes, (made, *self._made.values()))) > KEPT:
                self._made.clear()
            self._made[key] = made
        _check_pool(config, self._made[key])
        return self._made[key]

    def check(self, config: Run) -> None:
        """Checks that the method of a run can use the data, if they have been read."""
        if (made := self._made.get((config.data, config.seed))) is not None:
            _check_pool(config, made)


def _bytes(dataset: data.Dataset) -> int:
    """Returns the memory that the arrays of a data set take, without mapped files."""
    arrays = [dataset.pairs_x, dataset.pairs_y, dataset.pool_x, dataset.pool_y]
    arrays += [side for one in (dataset.val, dataset.test) if one for side in (one.x, one.y)]
    return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))


class _Reading(progress.Observer):
    """Shows which file is read before the first run."""

    def stage(self, text: str) -> None:
        progress.say(f"{text} ...", show=distributed.is_first())


def load_dataset(config: Run, *, observer: progress.Observer | None = None) -> data.Dataset:
    """Reads and splits the data of a run.

    Args:
        config: The run.
        observer: Its `stage` is called for every file that is read.

    Returns:
        The data.

    Raises:
        InputError: The data cannot be read, or the method needs pools that they do not have.
    """
    asked, stage = config.data, (observer or progress.Observer()).stage
    names = ("n_pairs", "pool", "n_unpaired", "pool_noise")
    options = {"seed": config.seed, **{name: getattr(asked, name) for name in names}}
    with checks.naming("data: "):
        if asked.name == "files":
            dataset = _files(asked.files, options, stage, asked.test)
        else:
            options |= {name: getattr(asked, name) for name in spec_lib.PHOTOS}
            dataset = photos.dataset(asked.name, test=asked.test, **options)
    _check_pool(config, dataset)
    return dataset


def _check_pool(config: Run, dataset: data.Dataset) -> None:
    """Raises InputError if the pools do not have the rows that the method needs."""
    method = config.chosen
    if method is not None:
        with checks.naming("data: "):
            training.check_pool(method, recipe.fill_pools(method.pools, dataset))


def inputs(config: Run) -> dict[str, pathlib.Path]:
    """Returns the files that a run reads, by the names of their settings."""
    if config.data.name != "files":
        # The checksum file stands for all files of the folder: `photos.read` verifies each by it.
        return {"data.name": photos.FOLDER / "SHA256SUMS"}
    return {
        f"data.files.{name}": pathlib.Path(files.split_key(path)[0]).expanduser()
        for name, path in config.data.files.given().items()
        if not path.startswith("tfds:")
    }


def _files(
    asked: spec_lib.Files,
    options: dict[str, Any],
    stage: Callable[[str], None],
    test: bool,
) -> data.Dataset:
    """Reads the files of a config, and checks every row."""
    paths = asked.given()

    def load(name: str, *, required: bool = True) -> Any:
        if required and name not in paths:
            raise checks.InputError(
                f"files.{name} is not set; pass --config.data.files.{name}=PATH"
            )
        if name not in paths:
            return None
        with checks.naming(f"files.{name}: "):
            array = files.load_array(paths[name])
        stage(f"reading {files.describe(array, paths[name])}")
        return array

    def load_all(group: str, make: Callable[..., Any], *parts: str) -> Any:
        names = [f"{group}_{part}" for part in parts]
        if not paths.keys() & set(names):
            return None
        arrays = [load(name, required=not name.endswith("x_of_y")) for name in names]
        with checks.naming(f"files.{group}: "):
            return make(*arrays)

    made = data.semi_supervised(
        load("x"),
        load("y"),
        unpaired_x=load("unpaired_x", required=False),
        unpaired_y=load("unpaired_y", required=False),
        val=load_all("val", data.gallery, "x", "y", "x_of_y"),
        test=load_all("test", data.gallery, "x", "y", "x_of_y") if test else None,
        zero_shot=load_all("zero_shot", data.zero_shot, "x", "labels", "prompts") if test else None,
        # Files of a gallery replace rows held out of the training file.
        held_out=None if paths.keys() & {"val_x", "test_x"} else data.VAL_AND_TEST,
        **options,
    )
    return made if test else dataclasses.replace(made, test=None)
