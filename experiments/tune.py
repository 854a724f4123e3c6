"""Tunes methods: python -m experiments.tune --config=FILE.py --method=NAME,NAME --workdir=FOLDER.

Every point of the method's grid, or of --grid, is trained without a look at the test split; the
one with the best MeanR@1 on the validation split is then trained over --seeds seeds and tested.

    --grid='alpha=1e-3,1e-4;heads.init=random,teacher'    options of the method, and other settings
    --grid='own;train.learning_rate=1e-4,3e-4'            its own grid times two learning rates
    --limit=20                                            at most 20 points, chosen at random

Trials run over the config's own seeds, and their mean decides. Interrupted, it goes on where it
stopped when it is started again; a larger --limit adds trials.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import app, flags

from experiments import batch, compare, distributed, grids, launch, run_flags, runner, settings
from experiments import workdir as workdir_lib
from experiments.settings import Settings
from sotalign_jax import checks, tables

SCORE = "val/mean/R@1"
"""What decides."""

_METHOD = flags.DEFINE_list("method", None, "What to tune: methods, teachers or variants.")
_GRID = flags.DEFINE_string("grid", grids.OWN, "Values to try, as KEY=VALUE,VALUE;KEY=VALUE.")
_LIMIT = flags.DEFINE_integer("limit", None, "Most points of a grid to try.", lower_bound=1)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds to test the choice with.", lower_bound=0)


class Planned(NamedTuple):
    """A point of the grid with its runs, one a seed, or why they cannot be planned."""

    number: int
    point: grids.Point
    runs: list[Settings]
    error: str | None = None


class Trial(NamedTuple):
    """A point of the grid with its score over the seeds, or why there is none."""

    number: int
    point: grids.Point
    score: tables.Mean | None
    error: str | None = None


def plan(values: dict[str, Any], name: str, points: dict[int, grids.Point]) -> list[Planned]:
    """The runs of every point.

    Raises:
        InputError: a value that cannot be used whatever the others are.
    """
    settings.plan(values)  # a config that is wrong without the grid says so in its own words
    if len(pairs := values.get("pairs", ())) > 1:
        raise checks.InputError(f"config.pairs: is {pairs}; tune with one number of pairs")
    planned = []
    for number, point in points.items():
        try:
            runs = settings.plan(grids.with_point(values, name, point))
            planned.append(Planned(number, point, runs))
        except checks.InputError as error:
            planned.append(Planned(number, point, [], str(error)))
    for key, value in {(key, repr(value)): None for p in planned for key, value in p.point.items()}:
        errors = [p.error for p in planned if repr(p.point[key]) == value]
        if all(errors):
            raise checks.InputError(f"grid: {errors[0]}")
    if all(p.error for p in planned):
        raise checks.InputError(f"{planned[0].error}")
    return planned


def check_data(planned: list[Planned], *, test: bool) -> None:
    """Raises when data cannot be read (the test split's only if `test`) or none is to select on."""
    run = next(p.runs[0] for p in planned if p.runs)
    if runner.load_dataset(run if test else _without_test(run)).val is None:
        raise checks.InputError(
            "config.data: there is no validation split to choose by; pass "
            "--config.data.files.val_x=PATH and val_y"
        )


def _without_test(run: Settings) -> Settings:
    return dataclasses.replace(run, data=dataclasses.replace(run.data, test=False))


def search(planned: list[Planned], folder: pathlib.Path, title: str) -> list[Trial]:
    """Makes the trials, which never read the test split, or finishes those begun; ranks them."""
    folders = {
        (p.number, run.train.seed): folder / f"trial-{p.number:03d}-seed{run.train.seed}"
        for p in planned
        for run in p.runs
    }
    trials = []
    best = None
    with batch.Progress(list(folders.values()), title) as progress:
        for number, point, runs, error in planned:
            scores: list[float] = []
            for run in runs:
                place = folders[number, run.train.seed]
                if error is None:  # a trial that failed once cannot score
                    results, error = batch.attempt(_without_test(run), place)
                    scores += [results[SCORE]] if error is None else []
                progress.finished(place, best)
            score = tables.Mean(scores) if scores and error is None else None
            best = max(filter(None, (best, score)), default=None)
            trials.append(Trial(number, point, score, error))
    return ranked(trials)


def ranked(trials: list[Trial]) -> list[Trial]:
    """The best first, of equals the first in the grid; those that failed last."""
    return sorted(trials, key=lambda trial: 1.0 if trial.score is None else -trial.score)


def trials_table(trials: list[Trial]) -> tables.Table:
    """Every trial with its settings and its score, in the order given."""
    keys = list(trials[0].point)
    rows = [[t.number, *map(str, t.point.values()), t.score, t.error or ""] for t in trials]
    headers = ["trial", *keys, "val R@1", "failed"]
    if not any(trial.error for trial in trials):
        headers, rows = headers[:-1], [row[:-1] for row in rows]
    return tables.table(headers, rows, digits=2, best={"val R@1": "max"})


def tune(
    values: dict[str, Any],
    name: str,
    workdir: pathlib.Path,
    *,
    grid: str,
    limit: int | None,
    test: bool,
) -> Trial:
    """The best trial for one method or variant.

    Leaves the trials, trials.md, trials.csv and best.json in `workdir`/`name`.

    Args:
        values: a config's plain values.
        name: the method, teacher or variant.
        workdir: folder for this and other methods with the same config.
        grid: as in `grids.parse`.
        limit: most points to try.
        test: whether the choice will be tested, so that it is known now if it can be.

    Raises:
        InputError: the grid or the data cannot be used, or every trial failed.
    """
    names = settings.method_of_name(values.get("variants", {}))
    checks.choice("method", name, tuple(names))
    wanted = grids.parse(grid, names[name])
    planned = plan(values, name, grids.points(wanted, limit))
    folder = workdir / name
    if not (folder / "config.json").exists():
        check_data(planned, test=test)
    workdir_lib.open_run(workdir, {"config": settings.without_placement(values)})
    workdir_lib.open_run(folder, {"method": name, "grid": wanted})
    trials = search(planned, folder, f"tune {name}")
    table = trials_table(trials)
    if distributed.is_first():
        table.save(folder / "trials")
    best = trials[0]
    if best.score is None:
        raise checks.InputError(f"method: every trial of {name} failed, first {best.error}")
    overrides = grids.with_point(values, name, best.point)["overrides"][name]
    flag = f'--config.overrides.{name}="{overrides}"'
    workdir_lib.write_json(
        folder / "best.json",
        {
            "method": name,
            "trial": best.number,
            "trials": len(trials),
            "settings": best.point,
            SCORE: float(best.score),
            "overrides": overrides,
            "flag": flag,
        },
    )
    if distributed.is_first():
        print(f"\n{table}\n\n{name} at its best: {flag}")
    return best


def test(
    values: dict[str, Any], name: str, best: Trial, folder: pathlib.Path, *, seeds: Sequence[int]
) -> tuple[list[Settings], dict[str, batch.Outcome]]:
    """Trains the chosen settings over the seeds and tests them; the runs and how they ended."""
    if not seeds:
        return [], {}
    chosen = grids.with_point({**values, "seeds": tuple(seeds)}, name, best.point)
    runs = settings.plan(chosen)
    places = [folder / f"test-{best.number:03d}-seed{run.train.seed}" for run in runs]
    with batch.Progress(places, f"test {name}") as progress:
        ended = {}
        for run, place in zip(runs, places, strict=True):
            ended[f"{name}/{place.name}"] = batch.attempt(run, place)
            progress.finished(place)
    return runs, ended


def _run() -> None:
    """Tunes the methods one after the other, tests every choice, and prints a comparison."""
    values, workdir = settings.plain(run_flags.config()), run_flags.workdir()
    if not _METHOD.value:
        raise checks.InputError("method: is not set; pass --method=NAME or --method=NAME,NAME")
    runs: list[Settings] = []
    ended: dict[str, batch.Outcome] = {}
    for name in _METHOD.value:
        best = tune(
            values, name, workdir, grid=_GRID.value, limit=_LIMIT.value, test=_SEEDS.value > 0
        )
        tested, outcomes = test(values, name, best, workdir / name, seeds=range(_SEEDS.value))
        runs += tested
        ended |= outcomes
    if runs:
        compare.conclude(runs, ended, workdir)


main = launch.guarded(_run, interrupted="start again with the same --workdir to go on")

if __name__ == "__main__":
    app.run(main, flags_parser=launch.parse)
