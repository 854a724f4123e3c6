"""Runs from settings to folders of results; started again they go on where they stopped."""

import contextlib
import dataclasses
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.sharding import Mesh

from experiments import locks, processes
from experiments import settings as settings_lib
from experiments.settings import Settings
from sotalign_jax import (
    aligner,
    checkpoints,
    checks,
    data,
    evaluation,
    files,
    heads,
    methods,
    recording,
    teachers,
    training,
)
from sotalign_jax.ot import sharding

Results = dict[str, float]


class UnusableError(checks.InputError):
    """Settings, each of which is right, that cannot be used together or with the data."""


def execute(
    settings: Settings,
    workdir: pathlib.Path,
    *,
    within: tuple[pathlib.Path, dict[str, Any]] | None = None,
    inner: bool = False,
) -> Results:
    """Makes one run in `workdir`, or finishes the one begun there; returns its results.

    Everything that can be wrong with the input is found before the folder is claimed, so that a
    corrected start can use the same one. `within` is the folder and config of a set of runs;
    `inner` puts its progress below theirs.

    Raises:
        UnusableError: the settings cannot be used with this data; the folder is not claimed.
        FloatingPointError: the loss is not finite.
    """

    def claim() -> pathlib.Path:
        if within is not None:
            recording.open_run(*within)
        return recording.open_run(workdir, settings_lib.to_json(settings)).path

    results_path = workdir / "results.json"

    def finished() -> Results | None:
        if ((workdir if within is None else within[0]) / "config.json").exists():
            claim()
            if results_path.exists():
                return recording.read_json(results_path)
        return None

    earlier = processes.agree(finished)
    if earlier is not None:
        return earlier
    try:
        prepared = prepare(settings)
    except checks.InputError as error:
        raise UnusableError(str(error)) from error
    except FloatingPointError:
        claim()  # a fit that failed is remembered in its folder
        raise
    with locks.only_process(claim(), flag="workdir"):
        results: Results = {}
        trained = prepared.start
        if prepared.method is not None:
            try:
                trained, best = _train(settings, prepared, workdir, inner=inner)
            except checks.InputError as error:  # what only the method's preparation can tell
                raise UnusableError(f"config.{settings.method}.{error}") from error
            results["best_step"] = int(best.step)
        results |= evaluate(trained, prepared.dataset)
        info = {"settings": settings_lib.to_json(settings), "results": results}
        # What a killed start left may be incomplete.
        shutil.rmtree(workdir / aligner.FOLDER, ignore_errors=True)
        aligner.Aligner(trained, info).save(workdir / aligner.FOLDER)
        recording.write_json(results_path, results)
    return results


def load_dataset(settings: Settings) -> data.Dataset:
    """Reads and splits the data that the settings name."""
    options: dict[str, Any] = {
        "n_pairs": settings.data.n_pairs,
        "pool": settings.data.pool,
        "n_unpaired": settings.data.n_unpaired,
        "pool_noise": settings.data.pool_noise,
        "seed": settings.train.seed,
    }
    with naming("config.data"):
        if settings.data.name == "pictures":
            dataset = data.pictures_dataset(**options)
            if not settings.data.test:
                dataset = dataclasses.replace(dataset, test=None, zero_shot=None)
        else:
            dataset = _load_files(settings.data.files, options, test=settings.data.test)
    check_pool(settings, dataset)
    return dataset


def check_pool(settings: Settings, dataset: data.Dataset) -> None:
    """Raises when the run's method needs other unpaired rows than there are."""
    if settings.options is not None:
        with naming("config.data"):
            training.check_pool(settings.options, dataset)


def _load_files(paths: settings_lib.Files, options: dict[str, Any], *, test: bool) -> data.Dataset:
    def load(name: str, *, required: bool = False) -> Any:
        if path := getattr(paths, name):
            with naming(f"files.{name}"):
                return files.load_array(path)
        if required:
            raise checks.InputError(
                f"files.{name}: is not set; pass --config.data.files.{name}=PATH"
            )
        return None

    def gallery(name: str) -> data.Gallery | None:
        if not any(getattr(paths, f"{name}_{part}") for part in ("x", "y", "x_of_y")):
            return None
        x, y = (load(f"{name}_{side}", required=True) for side in "xy")
        with naming(f"files.{name}"):
            return data.gallery(x, y, load(f"{name}_x_of_y"))

    zero_shot = None
    parts = [f"zero_shot_{part}" for part in ("x", "labels", "prompts")]
    if test and any(getattr(paths, part) for part in parts):
        arrays = [load(part, required=True) for part in parts]
        with naming("files.zero_shot"):
            zero_shot = data.zero_shot(*arrays)
    return data.semi_supervised(
        load("x", required=True),
        load("y", required=True),
        unpaired_x=load("unpaired_x"),
        unpaired_y=load("unpaired_y"),
        val=gallery("val"),
        test=gallery("test") if test else None,
        zero_shot=zero_shot,
        **options,
    )


class Prepared(NamedTuple):
    """What a run starts from.

    With a method that is trained, `start` are the heads before the first step; without one they
    are the model already: a teacher's maps, or what a fitted method found.
    """

    dataset: data.Dataset
    method: methods.Objective | None
    teacher: teachers.LinearTeacher | None
    start: heads.Heads
    mesh: Mesh | None = None


def prepare(settings: Settings) -> Prepared:
    """Finds the devices, reads the data, fits the teacher if one is needed, builds the heads."""
    if settings.tensorboard:
        checks.require("tensorboardX", extra="tensorboard")
    with naming("config"):
        mesh = sharding.rows_mesh(settings.mesh)
    dataset, method = load_dataset(settings), settings.options
    if isinstance(method, methods.Fitted):
        with naming(f"config.{settings.method}"):
            fitted = method.fit(dataset, seed=settings.train.seed, progress=True)
        return Prepared(dataset, None, None, fitted)
    assert method is None or isinstance(method, methods.Objective)
    as_start = method is None or settings.heads.init == "teacher"
    kind = "linear" if method is None else settings.heads.kind or method.head
    teacher = None
    if method is None or as_start or method.uses_teacher:
        with naming("config.teacher"):
            name = settings.method if method is None else settings.teacher.kind
            teacher = fit_teacher(settings, dataset, name)
    with naming("config.heads"):
        start = heads.build_heads(
            dataset.pairs_x.shape[1],
            dataset.pairs_y.shape[1],
            teacher.dim if teacher is not None and as_start else settings.heads.dim,
            kind=kind,
            hidden=settings.heads.hidden,
            seed=settings.train.seed,
            teacher=teacher if as_start else None,
        )
    return Prepared(dataset, method, teacher, start, mesh)


def fit_teacher(settings: Settings, dataset: data.Dataset, kind: str) -> teachers.LinearTeacher:
    """Fits the teacher, on mismatched pairs if the settings ask for noise."""
    pairs_y = dataset.pairs_y
    if settings.teacher.noise:
        pairs_y = data.mismatch_pairs(
            pairs_y, fraction=settings.teacher.noise, seed=settings.train.seed
        )
    options: dict[str, Any] = {}
    if settings.teacher.dim is not None:
        options["dim"] = settings.teacher.dim
    if kind == "cca":
        options["ridge"] = settings.teacher.ridge
        options["cov_normalize"] = settings.teacher.cov_normalize
    if kind == "contrastive":
        options["seed"] = settings.train.seed
        options.setdefault("dim", settings.heads.dim)
        options["steps"] = settings.train.steps
        options["learning_rate"] = settings.train.learning_rate
    return training.TEACHERS[kind](dataset.pairs_x, pairs_y, **options)


def evaluate(trained: heads.Heads, dataset: data.Dataset) -> Results:
    """Retrieval on validation and test, and zero-shot classification, keyed like test/mean/R@1."""
    results: Results = {}
    for name, gallery in (("val", dataset.val), ("test", dataset.test)):
        if gallery is not None:
            scores = evaluation.evaluate(trained.x, trained.y, gallery)
            results |= {f"{name}/{key}": value for key, value in scores.items()}
    if dataset.zero_shot is not None:
        scores = evaluation.evaluate_zero_shot(trained.x, trained.y, dataset.zero_shot)
        results |= {f"test/{key}": value for key, value in scores.items()}
    return results


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Says which settings an error is about."""
    try:
        yield
    except checks.InputError as error:
        raise checks.InputError(f"{where}: {error}") from error


def _train(
    settings: Settings, prepared: Prepared, folder: pathlib.Path, *, inner: bool
) -> tuple[heads.Heads, training.Best]:
    assert prepared.method is not None
    with _Recorder(settings, folder, inner=inner) as recorder:
        return training.fit(
            prepared.method,
            prepared.start,
            prepared.dataset,
            settings.train,
            teacher=processes.from_first(prepared.teacher),
            resume=recorder.resume,
            observer=recorder,
            mesh=prepared.mesh,
            on_device=settings.on_device,
        )


class _Recorder:
    """Writes metrics and checkpoints of one run, and shows its progress."""

    def __init__(self, settings: Settings, folder: pathlib.Path, *, inner: bool) -> None:
        self._settings, self._folder, self._inner = settings, folder, inner
        self._log = recording.MetricLog(folder / "metrics.jsonl")
        saved = processes.first_workdir(folder) / "checkpoints"
        self._checkpoints = checkpoints.Checkpoints(saved)
        self._bar: recording.Progress | None = None
        self._board: Any = None

    def __enter__(self) -> "_Recorder":
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.__exit__(*error)
        if self._board is not None:
            self._board.close()
        self._log.close()
        self._checkpoints.__exit__(*error)

    def resume(self, template: training.Snapshot) -> training.Snapshot | None:
        """The newest checkpoint, with the log cut back to its step; the same for all processes."""
        found = None

        def restore() -> int:
            nonlocal found
            found = self._checkpoints.restore_latest(template)
            step = 0 if found is None else found[0]
            self._log.truncate_after(step)
            if self._settings.tensorboard:
                self._board = recording.tensorboard(self._folder / "tensorboard", resume_after=step)
            return step

        step = processes.agree(restore)
        if processes.is_first():
            name = f"{self._settings.name} seed {self._settings.train.seed}"
            self._bar = recording.Progress(
                self._settings.train.steps, name, initial=step, inner=self._inner
            )
        return processes.from_first(template if found is None else found[1])

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """One line of the log, the bar, and TensorBoard if asked for."""
        self._log.append(step, values)
        if self._bar is not None:
            self._bar.update(step, loss=values["loss"], mean_r1=values.get("val/mean/R@1"))
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, float(value), step)

    def snapshot(self, step: int, snapshot: training.Snapshot) -> None:
        """Saves in the background; the log reaches the disk first."""
        self._log.flush()
        self._checkpoints.save(step, snapshot)
