"""Several runs: one after the other, under one progress bar, whatever becomes of each."""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments import distributed, runner
from experiments import settings as settings_lib
from experiments import workdir as workdir_lib
from experiments.settings import Settings

_FAILED = "failed.json"


class Outcome(NamedTuple):
    """How a run ended: its results, or none of them and why it failed."""

    results: runner.Results
    error: str | None = None


def execute_all(
    runs: Sequence[Settings], workdir: pathlib.Path, *, config: dict[str, Any]
) -> dict[str, Outcome]:
    """Makes the runs, or finishes those begun, and returns how they ended, by name.

    A single run lives in `workdir` itself, several in a folder each below it. `config` is what
    the runs were planned from; a folder of several runs keeps it and refuses another one.
    What fails ends a single run, or a first one whose settings cannot be used; among several runs
    it is an outcome like others.
    """
    if len(runs) == 1:
        return {run_names(runs)[0]: Outcome(runner.execute(runs[0], workdir))}
    if not (workdir / "config.json").exists():
        # What any method lacks is known before the first one trains.
        for run in {run.data: run for run in runs}.values():
            dataset = runner.load_dataset(run)
            for other in runs:
                if other.data == run.data:
                    runner.check_pool(other, dataset)
    folders = {name: workdir / name for name in run_names(runs)}
    ended: dict[str, Outcome] = {}
    with Progress(list(folders.values()), "compare") as progress:
        for run, (name, folder) in zip(runs, folders.items(), strict=True):
            ended[name] = attempt(run, folder, within=(workdir, config))
            progress.finished(folder)
    written = {
        name: outcome.results if outcome.error is None else {"error": outcome.error}
        for name, outcome in ended.items()
    }
    workdir_lib.write_json(workdir / "results.json", written)
    return ended


def run_names(runs: Sequence[Settings]) -> list[str]:
    """A name for every run: its method, its number of pairs if that varies, and its seed."""
    several = len({run.data.n_pairs for run in runs}) > 1
    return [
        f"{run.name}-{run.data.n_pairs}pairs-seed{run.train.seed}"
        if several
        else f"{run.name}-seed{run.train.seed}"
        for run in runs
    ]


class Progress:
    """A bar over runs, which counts those finished earlier as done."""

    def __init__(self, folders: Sequence[pathlib.Path], title: str) -> None:
        self._waiting = {folder for folder in folders if not _is_finished(folder)}
        self._total = len(folders)
        initial = self._total - len(self._waiting)
        self._bar = workdir_lib.Progress(self._total, title, initial=initial, unit="runs")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)

    def finished(self, folder: pathlib.Path, best: float | None = None) -> None:
        """Moves on by the run in `folder`; `best` is the best MeanR@1 so far."""
        if folder in self._waiting:
            self._waiting.remove(folder)
            self._bar.update(self._total - len(self._waiting), mean_r1=best)


def _is_finished(folder: pathlib.Path) -> bool:
    return any((folder / name).exists() for name in ("results.json", _FAILED))


def attempt(
    settings: Settings,
    workdir: pathlib.Path,
    *,
    within: tuple[pathlib.Path, dict[str, Any]] | None = None,
) -> Outcome:
    """`execute` as one of several runs: one that fails says so and leaves the others alone.

    A loss that is not finite would be so again, and is remembered in failed.json. The first of the
    runs `within` a folder raises when its settings cannot be used: nothing is lost by a new start.
    """

    def remembered() -> str | None:
        path = workdir / _FAILED
        return workdir_lib.read_json(path)["error"] if path.exists() else None

    failure = distributed.agree(remembered)
    if failure is not None:
        workdir_lib.open_run(workdir, settings_lib.to_json(settings))  # refuses other settings
        return Outcome({}, failure)
    try:
        return Outcome(runner.execute(settings, workdir, within=within, inner=True))
    except runner.UnusableError as error:
        if within is not None and not (within[0] / "config.json").exists():
            raise
        return Outcome({}, str(error))
    except FloatingPointError as error:
        workdir_lib.write_json(workdir / _FAILED, {"error": str(error)})
        return Outcome({}, str(error))
