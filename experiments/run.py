"""From configs to folders of results: one run, or many; started again they go on where they were.

A run's folder holds config.json, environment.json, inputs.json, metrics.jsonl, results.json,
checkpoints/ and aligner/.
"""

import dataclasses
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from ml_collections.config_dict import FrozenConfigDict as Config

from experiments import config as config_lib
from experiments import distributed, photos
from experiments import workdir as workdir_lib
from experiments.config import naming
from sotalign_jax import aligner, checks, data, evaluation, files, heads, methods, training
from sotalign_jax.ot import sharding
from sotalign_jax.teachers import LinearTeacher

Results = dict[str, Any]
"""Scores such as test/mean/R@1; {"error": why} of a run that failed."""
Set = tuple[pathlib.Path, dict[str, Any]]
"""The folder of several runs, and their configs by name, which its config.json keeps."""
SCORE = "val/mean/R@1"
"""The score that chooses: of checkpoints, and of settings."""
MOST_UNPAIRED = 100_000
"""Rows of a pool that `align`, which keeps them in memory, is given at most, drawn at random."""


class UnusableError(checks.InputError):
    """Settings, each of which is right, that cannot be used together or with the data."""


def run_all(
    configs: Mapping[str, Config], workdir: pathlib.Path, *, title: str = "compare"
) -> dict[str, Results]:
    """Makes the runs, or finishes those begun, under one progress bar; their results by name.

    A single run lives in `workdir` itself, several in a folder each below it. What fails ends a
    single run; among several it is a result like others, but settings that cannot be used end all
    of them before the first is begun.
    """
    if len(configs) == 1:
        return {name: run(config, workdir) for name, config in configs.items()}
    within = workdir, record(configs)
    if not (workdir / "config.json").exists():
        loaded: dict[Any, data.Dataset] = {}
        for config in configs.values():  # what any method lacks is known before the first trains
            loaded[config.data] = loaded.get(config.data) or load_dataset(config)
            _check_pool(config, loaded[config.data])
    done = {name for name in configs if (workdir / name / "results.json").exists()}
    ended: dict[str, Results] = {}
    with workdir_lib.Progress(len(configs), title, initial=len(done), unit="runs") as bar:
        for name, config in configs.items():
            try:
                ended[name] = run(config, workdir / name, within=within)
            except FloatingPointError as error:
                workdir_lib.open_run(*within)
                ended[name] = {"error": str(error)}
            except UnusableError as error:
                if not (workdir / "config.json").exists():
                    raise  # of the first run: nothing is lost by a new start
                ended[name] = {"error": str(error)}
            if name not in done:
                scores = [one[SCORE] for one in ended.values() if SCORE in one]
                bar.advance(mean_r1=max(scores, default=None))
    workdir_lib.write_json(workdir / "results.json", ended)
    return ended


def record(configs: Mapping[str, Config]) -> dict[str, Any]:
    """What the folder of several runs keeps in its config.json."""
    return {name: config_lib.plain(config) for name, config in configs.items()}


def run(config: Config, folder: pathlib.Path, *, within: Set | None = None) -> Results:
    """Makes one run in `folder`, or finishes the one begun there; returns its results.

    Everything that can be wrong with the input is found before the folder is claimed, so that a
    corrected start can use the same one. `within` is a set of runs, whose progress is shown above
    this one's.
    """

    def claim() -> None:
        if within is not None:
            workdir_lib.open_run(*within)
        workdir_lib.open_run(folder, config_lib.plain(config), inputs(config))

    ended = folder / "results.json"
    if distributed.agree(((folder if within is None else within[0]) / "config.json").exists):
        claim()
        if distributed.agree(ended.exists):
            return distributed.agree(lambda: workdir_lib.read_json(ended))
    try:
        if config.tensorboard:
            checks.require("tensorboardX", extra="tensorboard")
        mesh = sharding.rows_mesh(config.mesh)
        if config.on_device and mesh is not None:
            text = f"on_device: is True but {mesh.size} devices read their rows from the host"
            raise checks.InputError(f"{text}; leave it out")
        dataset = load_dataset(config)
        prepared = prepare(config, dataset)
    except checks.InputError as error:
        raise UnusableError(str(error)) from error
    claim()
    with workdir_lib.only_process(folder):
        results = _finish(config, folder, dataset, prepared, mesh, inner=within is not None)
        workdir_lib.write_json(ended, results)
    return results


class Prepared(NamedTuple):
    """What a run starts from; without a method to train, `start` is the model already.

    `aligned` is what `align` made, whose heads are the start.
    """

    method: methods.Objective | None
    teacher: LinearTeacher | None
    start: heads.Heads
    aligned: aligner.Aligner | None = None


def _finish(
    config: Config,
    folder: pathlib.Path,
    dataset: data.Dataset,
    prepared: Prepared,
    mesh: Mesh | None,
    *,
    inner: bool,
) -> Results:
    """Trains, evaluates and saves the model."""
    results: Results = {}
    trained = prepared.start
    if prepared.method is not None:
        title = folder.name if inner else f"{config.method} seed {config.seed}"
        shown = {"tensorboard": config.tensorboard, "title": title, "inner": inner}
        with workdir_lib.Recorder(folder, steps=config.train.steps, **shown) as recorder:
            try:
                trained, best = training.fit(
                    prepared.method,
                    trained,
                    dataset,
                    config_lib.train(config),
                    teacher=distributed.from_first(prepared.teacher),
                    resume=recorder.resume,
                    observer=recorder,
                    mesh=mesh,
                    on_device=config.on_device,
                )
            except checks.InputError as error:  # what only the method's preparation can tell
                raise UnusableError(f"{config.method}.{error}") from error
        results["best_step"] = int(best.step)
    info = {"settings": config_lib.plain(config), "results": results}
    if prepared.aligned is None:
        model = aligner.calibrated(trained, dataset, info)
    else:
        model = dataclasses.replace(prepared.aligned, info=prepared.aligned.info | info)
    x, y = model.heads.x, model.heads.y
    for name, gallery in (("val", dataset.val), ("test", dataset.test)):
        if gallery is not None:  # also calibrated by the pools: test/calibrated/mean/R@1
            scores = evaluation.evaluate(x, y, gallery, model.calibration)
            results |= {f"{name}/{key}": value for key, value in scores.items()}
    if dataset.zero_shot is not None:
        scores = evaluation.evaluate_zero_shot(x, y, dataset.zero_shot)
        results |= {f"test/{key}": value for key, value in scores.items()}
    if distributed.is_first():
        shutil.rmtree(folder / aligner.FOLDER, ignore_errors=True)  # what a kill left
        model.save(folder / aligner.FOLDER)
    return results


def fit_teacher(config: Config, dataset: data.Dataset, kind: str) -> LinearTeacher:
    """Fits the teacher, on mismatched pairs if the config asks for noise."""
    pairs_y = dataset.pairs_y
    if config.teacher.noise:
        pairs_y = data.mismatch_pairs(pairs_y, fraction=config.teacher.noise, seed=config.seed)
    options: dict[str, Any] = {}
    if kind == "cca":
        options = {"ridge": config.teacher.ridge, "cov_normalize": config.teacher.cov_normalize}
    if kind == "contrastive":
        train = config.train
        options = {"steps": train.steps, "learning_rate": train.learning_rate}
        options |= {"batch_size": train.pair_batch, "seed": config.seed, "dim": config.heads.dim}
    if config.teacher.dim is not None:
        options["dim"] = config.teacher.dim
    return training.TEACHERS[kind](dataset.pairs_x, pairs_y, **options)


def prepare(config: Config, dataset: data.Dataset) -> Prepared:
    """Fits the teacher and builds the heads; or fits what is fitted at once."""
    if config.method == "align":
        return _aligned(config, dataset)
    method = config_lib.method(config)
    if isinstance(method, methods.Fitted):
        with naming(f"{config.method}: "):
            shown = distributed.is_first()
            return Prepared(None, None, method.fit(dataset, seed=config.seed, progress=shown))
    assert method is None or isinstance(method, methods.Objective)
    as_start = method is None or config.heads.init == "teacher"
    teacher = None
    if as_start or (method is not None and method.uses_teacher):
        with naming("teacher: "):
            kind = config.teacher.kind if method else config.method
            teacher = fit_teacher(config, dataset, kind)
    with naming("heads: "):
        start = heads.build_heads(
            dataset.pairs_x.shape[1],
            dataset.pairs_y.shape[1],
            teacher.dim if teacher is not None and as_start else config.heads.dim,
            kind="linear" if method is None else config.heads.kind or method.head,
            hidden=config.heads.hidden,
            seed=config.seed,
            teacher=teacher if as_start else None,
        )
    return Prepared(method, teacher, start)


def _aligned(config: Config, dataset: data.Dataset) -> Prepared:
    """What `align` makes of the data by its own recipe, in as many steps as other methods have."""
    rng, pools = np.random.default_rng(config.seed), []
    for pool in (dataset.pool_x, dataset.pool_y):
        if len(pool) > MOST_UNPAIRED:
            pool = pool[np.sort(rng.choice(len(pool), MOST_UNPAIRED, replace=False))]
        pools.append(pool if len(pool) else None)
    with naming("align: "):
        made = aligner.align(
            (dataset.pairs_x, dataset.pairs_y),
            *pools,
            val=dataset.val,
            steps=config.train.steps,
            unpaired_batch=config.train.unpaired_batch,
            seed=config.seed,
            progress=distributed.is_first(),
        )
    return Prepared(None, None, made.heads, made)


def load_dataset(config: Config) -> data.Dataset:
    """Reads and splits the data that a config names."""
    asked = config.data
    names = ("n_pairs", "pool", "n_unpaired", "pool_noise")
    options = {"seed": config.seed, **{name: asked[name] for name in names}}
    with naming("data: "):
        if asked.name == "files":
            dataset = _files(asked.files, options, test=asked.test)
        else:
            options |= {name: asked[name] for name in config_lib.PHOTOS}
            dataset = photos.dataset(asked.name, test=asked.test, **options)
    _check_pool(config, dataset)
    return dataset


def _check_pool(config: Config, dataset: data.Dataset) -> None:
    """Raises when the run's method needs other unpaired rows than there are."""
    method = config_lib.method(config)
    if method is not None:
        with naming("data: "):
            training.check_pool(method, dataset)


def inputs(config: Config) -> dict[str, pathlib.Path]:
    """The files that a run reads, by the names of their settings."""
    if config.data.name != "files":
        return {"data.name": photos.FOLDER / "SHA256SUMS"}  # every file there is checked by it
    return {
        f"data.files.{name}": pathlib.Path(files.split_key(path)[0]).expanduser()
        for name, path in config.data.files.items()
        if path and not path.startswith("tfds:")
    }


def _files(paths: Config, options: dict[str, Any], *, test: bool) -> data.Dataset:
    def load(name: str, *, required: bool = True) -> Any:
        with naming(f"files.{name}: "):
            if required and not paths[name]:
                raise checks.InputError(f"is not set; pass --config.data.files.{name}=PATH")
            return files.load_array(paths[name]) if paths[name] else None

    def load_all(group: str, make: Callable[..., Any], *parts: str) -> Any:
        names = [f"{group}_{part}" for part in parts]
        if not any(paths[name] for name in names):
            return None
        arrays = [load(name, required=not name.endswith("x_of_y")) for name in names]
        with naming(f"files.{group}: "):
            return make(*arrays)

    made = data.semi_supervised(
        load("x"),
        load("y"),
        unpaired_x=load("unpaired_x", required=False),
        unpaired_y=load("unpaired_y", required=False),
        val=load_all("val", data.gallery, "x", "y", "x_of_y"),
        test=load_all("test", data.gallery, "x", "y", "x_of_y") if test else None,
        zero_shot=load_all("zero_shot", data.zero_shot, "x", "labels", "prompts") if test else None,
        held_out=None if paths.val_x or paths.test_x else data.VAL_AND_TEST,
        **options,
    )
    return made if test else dataclasses.replace(made, test=None)
