"""From configs to folders of results: one run, or many; started again they go on where they were.

A run's folder holds config.json, environment.json, metrics.jsonl, results.json, checkpoints/ and
aligner/.
"""

import dataclasses
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ml_collections.config_dict import FrozenConfigDict

from experiments import config as config_lib
from experiments import distributed, fingerprint, photos
from experiments import workdir as workdir_lib
from experiments.config import naming
from sotalign_jax import (
    aligner,
    checks,
    data,
    evaluation,
    files,
    heads,
    methods,
    teachers,
    training,
)
from sotalign_jax.ot import sharding

Results = dict[str, float]
SCORE = "val/mean/R@1"
"""The score that chooses: of checkpoints, and of settings."""
FAILED = "failed.json"
"""Why a run failed; it would fail again."""


class UnusableError(checks.InputError):
    """Settings, each of which is right, that cannot be used together or with the data."""


class Outcome(NamedTuple):
    """How a run ended: its results, or none of them and why it failed."""

    results: Results
    error: str | None = None


# --- many runs -----------------------------------------------------------------------------------


def run_all(
    configs: Mapping[str, FrozenConfigDict],
    workdir: pathlib.Path,
    *,
    record: dict[str, Any] | None = None,
    title: str = "compare",
) -> dict[str, Outcome]:
    """Makes the runs, or finishes those begun, under one progress bar; how they ended, by name.

    A single run lives in `workdir` itself, several in a folder each below it. The folder keeps what
    they were asked for with and refuses anything else; with a `record` to keep instead, it may hold
    more runs later, and a single one has a folder, too. What fails ends a single run, or a first
    one whose settings cannot be used; among several runs it is an outcome like others.
    """
    if len(configs) == 1 and record is None:
        return {name: Outcome(run(config, workdir)) for name, config in configs.items()}
    within = workdir, record or {name: config_lib.plain(c) for name, c in configs.items()}
    if not (workdir / "config.json").exists():
        # What any method lacks is known before the first one trains.
        for one in {config.data: config for config in configs.values()}.values():
            dataset = load_dataset(one)
            for other in configs.values():
                if other.data == one.data:
                    _check_pool(other, dataset)
    ends = ("results.json", FAILED)
    waiting = {n for n in configs if not any((workdir / n / end).exists() for end in ends)}
    outcomes: dict[str, Outcome] = {}
    best: float | None = None
    with workdir_lib.Progress(
        len(configs), title, initial=len(configs) - len(waiting), unit="runs"
    ) as bar:
        for name, config in configs.items():
            outcomes[name] = _attempt(config, workdir / name, within)
            score = outcomes[name].results.get(SCORE)
            best = max((s for s in (best, score) if s is not None), default=None)
            if name in waiting:
                bar.advance(mean_r1=best)
    if record is None:
        ended = {
            name: o.results if o.error is None else {"error": o.error}
            for name, o in outcomes.items()
        }
        workdir_lib.write_json(workdir / "results.json", ended)
    return outcomes


def _attempt(
    config: FrozenConfigDict, folder: pathlib.Path, within: tuple[pathlib.Path, dict[str, Any]]
) -> Outcome:
    """One of several runs: one that fails says so and leaves the others alone.

    A loss that is not finite would be so again, and is remembered. The first of the runs raises
    when its settings cannot be used: nothing is lost by a new start.
    """

    def remembered() -> str | None:
        path = folder / FAILED
        return workdir_lib.read_json(path)["error"] if path.exists() else None

    failure = distributed.agree(remembered)
    if failure is not None:
        _claim(config, folder)  # refuses another config, or other data
        return Outcome({}, failure)
    try:
        return Outcome(run(config, folder, within=within))
    except UnusableError as error:
        if not (within[0] / "config.json").exists():
            raise
        return Outcome({}, str(error))
    except FloatingPointError as error:
        workdir_lib.write_json(folder / FAILED, {"error": str(error)})
        return Outcome({}, str(error))


# --- one run -------------------------------------------------------------------------------------


def run(
    config: FrozenConfigDict,
    workdir: pathlib.Path,
    *,
    within: tuple[pathlib.Path, dict[str, Any]] | None = None,
) -> Results:
    """Makes one run in `workdir`, or finishes the one begun there; returns its results.

    Everything that can be wrong with the input is found before the folder is claimed, so that a
    corrected start can use the same one. `within` is the folder and record of a set of runs, whose
    progress is shown above this one's.

    Raises:
        UnusableError: the config cannot be used with this data; the folder is not claimed.
        FloatingPointError: the loss is not finite.
    """

    def claim() -> pathlib.Path:
        if within is not None:
            workdir_lib.open_run(*within)
        return _claim(config, workdir)

    begun = (workdir if within is None else within[0]) / "config.json"
    results_path = workdir / "results.json"
    if distributed.agree(begun.exists):
        claim()
        if distributed.agree(results_path.exists):
            return distributed.agree(lambda: workdir_lib.read_json(results_path))
    try:
        if config.tensorboard:
            checks.require("tensorboardX", extra="tensorboard")
        mesh = sharding.rows_mesh(config.mesh)
        if config.on_device and mesh is not None:
            raise checks.InputError(
                f"on_device: is True but there are {mesh.size} devices, which read their rows from "
                "the host; leave it out"
            )
        dataset = load_dataset(config)
        prepared = prepare(config, dataset)
    except checks.InputError as error:
        raise UnusableError(str(error)) from error
    except FloatingPointError:
        claim()  # a fit that failed is remembered in its folder
        raise
    with workdir_lib.only_process(claim()):
        results: Results = {}
        trained = prepared.start
        if prepared.method is not None:
            inner = within is not None
            try:
                with workdir_lib.Recorder(
                    workdir,
                    steps=config.train.steps,
                    title=workdir.name if inner else f"{config.method} seed {config.seed}",
                    tensorboard=config.tensorboard,
                    inner=inner,
                ) as recorder:
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
            except workdir_lib.DamagedError:
                raise
            except checks.InputError as error:  # what only the method's preparation can tell
                raise UnusableError(f"{config.method}.{error}") from error
            results["best_step"] = int(best.step)
        info = {"settings": config_lib.plain(config), "results": results}
        model = aligner.calibrated(trained, dataset, info)
        results |= evaluate(model, dataset)
        if distributed.is_first():
            # What a killed start left may be incomplete.
            shutil.rmtree(workdir / aligner.FOLDER, ignore_errors=True)
            model.save(workdir / aligner.FOLDER)
        workdir_lib.write_json(results_path, results)
    return results


def _claim(config: FrozenConfigDict, folder: pathlib.Path) -> pathlib.Path:
    """Opens the folder of a run, which refuses another config and data that have changed."""
    workdir_lib.open_run(folder, config_lib.plain(config))
    fingerprint.keep(folder, inputs(config))
    return folder


class Prepared(NamedTuple):
    """What a run starts from.

    With a method that is trained, `start` are the heads before the first step; without one they
    are the model already: a teacher's maps, or what a fitted method found.
    """

    method: methods.Objective | None
    teacher: teachers.LinearTeacher | None
    start: heads.Heads


def fit_teacher(
    config: FrozenConfigDict, dataset: data.Dataset, kind: str
) -> teachers.LinearTeacher:
    """Fits the teacher, on mismatched pairs if the config asks for noise."""
    pairs_y = dataset.pairs_y
    if config.teacher.noise:
        pairs_y = data.mismatch_pairs(pairs_y, fraction=config.teacher.noise, seed=config.seed)
    options: dict[str, Any] = {}
    if config.teacher.dim is not None:
        options["dim"] = config.teacher.dim
    if kind == "cca":
        options["ridge"] = config.teacher.ridge
        options["cov_normalize"] = config.teacher.cov_normalize
    if kind == "contrastive":
        options["seed"] = config.seed
        options.setdefault("dim", config.heads.dim)
        options["steps"] = config.train.steps
        options["learning_rate"] = config.train.learning_rate
        options["batch_size"] = config.train.pair_batch
    return training.TEACHERS[kind](dataset.pairs_x, pairs_y, **options)


def prepare(
    config: FrozenConfigDict,
    dataset: data.Dataset,
    *,
    fit: Callable[[FrozenConfigDict, data.Dataset, str], teachers.LinearTeacher] = fit_teacher,
) -> Prepared:
    """Fits the teacher if one is needed, and builds the heads; or fits what is fitted at once.

    `fit` is for callers that keep teachers.
    """
    method = config_lib.method(config)
    if isinstance(method, methods.Fitted):
        with naming(f"{config.method}: "):
            fitted = method.fit(dataset, seed=config.seed, progress=True)
        return Prepared(None, None, fitted)
    assert method is None or isinstance(method, methods.Objective)
    as_start = method is None or config.heads.init == "teacher"
    kind = "linear" if method is None else config.heads.kind or method.head
    teacher = None
    if method is None or as_start or method.uses_teacher:
        with naming("teacher: "):
            name = config.method if method is None else config.teacher.kind
            teacher = fit(config, dataset, name)
    with naming("heads: "):
        start = heads.build_heads(
            dataset.pairs_x.shape[1],
            dataset.pairs_y.shape[1],
            teacher.dim if teacher is not None and as_start else config.heads.dim,
            kind=kind,
            hidden=config.heads.hidden,
            seed=config.seed,
            teacher=teacher if as_start else None,
        )
    return Prepared(method, teacher, start)


def evaluate(model: aligner.Aligner, dataset: data.Dataset) -> Results:
    """Retrieval on validation and test, and zero-shot classification, keyed like test/mean/R@1.

    Retrieval is reported twice, also calibrated by the pools: test/calibrated/mean/R@1.
    """
    x, y = model.heads.x, model.heads.y
    results: Results = {}
    for name, gallery in (("val", dataset.val), ("test", dataset.test)):
        if gallery is not None:
            scores = evaluation.evaluate(x, y, gallery, model.calibration)
            results |= {f"{name}/{key}": value for key, value in scores.items()}
    if dataset.zero_shot is not None:
        scores = evaluation.evaluate_zero_shot(x, y, dataset.zero_shot)
        results |= {f"test/{key}": value for key, value in scores.items()}
    return results


# --- data ----------------------------------------------------------------------------------------


def load_dataset(config: FrozenConfigDict) -> data.Dataset:
    """Reads and splits the data that a config names."""
    options: dict[str, Any] = {
        "n_pairs": config.data.n_pairs,
        "pool": config.data.pool,
        "n_unpaired": config.data.n_unpaired,
        "pool_noise": config.data.pool_noise,
        "seed": config.seed,
    }
    with naming("data: "):
        if config.data.name == "files":
            dataset = _files(config, options)
        else:
            options |= {name: config.data[name] for name in config_lib.PHOTOS}
            dataset = photos.dataset(config.data.name, test=config.data.test, **options)
    if not config.data.test:
        dataset = dataclasses.replace(dataset, test=None, zero_shot=None)
    _check_pool(config, dataset)
    return dataset


def inputs(config: FrozenConfigDict) -> dict[str, pathlib.Path]:
    """The files that a run reads, by the names of their settings."""
    if config.data.name != "files":
        return {"data.name": photos.FOLDER / "SHA256SUMS"}  # every file there is checked by it
    named = {f"data.files.{name}": path for name, path in config.data.files.items() if path}
    return {
        name: pathlib.Path(files.split_key(path)[0]).expanduser()
        for name, path in named.items()
        if not path.startswith("tfds:")
    }


def _files(config: FrozenConfigDict, options: dict[str, Any]) -> data.Dataset:
    paths = config.data.files

    def load(name: str, *, required: bool = False) -> Any:
        if paths[name]:
            with naming(f"files.{name}: "):
                return files.load_array(paths[name])
        if required:
            raise checks.InputError(
                f"files.{name}: is not set; pass --config.data.files.{name}=PATH"
            )
        return None

    def gallery(name: str) -> data.Gallery | None:
        if not any(paths[f"{name}_{part}"] for part in ("x", "y", "x_of_y")):
            return None
        x, y = (load(f"{name}_{side}", required=True) for side in "xy")
        with naming(f"files.{name}: "):
            return data.gallery(x, y, load(f"{name}_x_of_y"))

    def zero_shot() -> data.ZeroShot | None:
        parts = [f"zero_shot_{part}" for part in ("x", "labels", "prompts")]
        if not any(paths[part] for part in parts):
            return None
        arrays = [load(part, required=True) for part in parts]
        with naming("files.zero_shot: "):
            return data.zero_shot(*arrays)

    return data.semi_supervised(
        load("x", required=True),
        load("y", required=True),
        unpaired_x=load("unpaired_x"),
        unpaired_y=load("unpaired_y"),
        val=gallery("val"),
        test=gallery("test") if config.data.test else None,
        zero_shot=zero_shot() if config.data.test else None,
        **options,
    )


def _check_pool(config: FrozenConfigDict, dataset: data.Dataset) -> None:
    """Raises when the run's method needs other unpaired rows than there are."""
    method = config_lib.method(config)
    if method is not None:
        with naming("data: "):
            training.check_pool(method, dataset)
