r"""Tunes methods: tries every point of a grid, chooses on the validation split, tests the choice.

    python -m experiments.tune --config=experiments/configs/compare.py:seeds=1 --method=sotalign \
        --workdir=runs/tune --grid='alpha=1e-3,1e-4;heads.init=random,teacher'
    python -m experiments.tune --config=experiments/configs/quickstart.py --method=sail,nnclr \
        --workdir=runs/tune --grid='own;train.learning_rate=1e-4,3e-4' --limit=20

A grid has options of the method, and other settings by their dotted names; `own` stands for the
values that the method finds worth trying. Trials never look at the test split: the point with the
best mean of MeanR@1 on validation over the config's seeds is trained over --seeds seeds and tested.
Interrupted, it goes on where it stopped when it is started again; a larger --limit adds trials.
"""

import ast
import copy
import itertools
import math
import pathlib
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from absl import flags
from ml_collections.config_dict import ConfigDict, FrozenConfigDict

from experiments import cli, distributed, report, run
from experiments import config as config_lib
from experiments import workdir as workdir_lib
from sotalign_jax import checks, methods
from sotalign_jax.diagnostics import Mean

_METHOD = flags.DEFINE_list(
    "method", None, "What to tune: labels of the config's runs, or methods."
)
_GRID = flags.DEFINE_string("grid", "own", "Values to try, as KEY=VALUE,VALUE;KEY=VALUE.")
_LIMIT = flags.DEFINE_integer("limit", None, "Most points to try, chosen at random.", lower_bound=1)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds to test the choice with.", lower_bound=0)
flags.declare_key_flag("config")
flags.declare_key_flag("workdir")
flags.adopt_module_key_flags(distributed)

CHOICES = {"methods": config_lib.METHODS}
Grid = dict[str, tuple[Any, ...]]
Point = dict[str, Any]
"""A value for every key of a grid."""


# --- grids ---------------------------------------------------------------------------------------


def parse_grid(text: str, method: str) -> Grid:
    """Reads "alpha=1e-3,1e-4;train.learning_rate=3e-4;own"; the order is the grid's.

    >>> parse_grid("alpha=1e-3,1e-4; heads.init=teacher", "sotalign")
    {'alpha': (0.001, 0.0001), 'heads.init': ('teacher',)}
    >>> parse_grid("own", "sotalign"), parse_grid("own", "cca")
    ({'alpha': (0.001, 0.0001, 1e-05)}, {})
    """
    grid: Grid = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        key, _, listed = (piece.strip() for piece in part.partition("="))
        values = tuple(_value(piece.strip()) for piece in listed.split(","))
        found: Mapping[str, tuple[Any, ...]] = {key: values}
        if part == "own":
            found = methods.METHODS[method].grid if method in methods.METHODS else {}
        elif not key or any(value == "" for value in values):
            raise checks.InputError(f"grid: cannot read {part!r}; pass KEY=VALUE,VALUE;KEY=VALUE")
        for name, entries in found.items():
            if name in grid or len(set(map(repr, entries))) < len(entries):
                raise checks.InputError(f"grid: {name} or one of its values is repeated")
            grid[name] = entries
    return grid


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def points(grid: Grid, limit: int | None = None) -> dict[int, Point]:
    """The points of a grid by their number, the last key varying fastest.

    With a `limit` below their number a random choice, the same every time; a smaller limit
    chooses of what a larger one does.

    >>> points({"alpha": (1, 2), "k": (3, 4)}, limit=2)
    {0: {'alpha': 1, 'k': 3}, 2: {'alpha': 2, 'k': 3}}
    """
    total = math.prod(map(len, grid.values()))
    kept = set(np.random.default_rng(0).permutation(total)[:limit].tolist())
    numbered = enumerate(itertools.product(*grid.values()))
    return {i: dict(zip(grid, values, strict=True)) for i, values in numbered if i in kept}


def changes_of(config: ConfigDict, label: str, point: Mapping[str, Any]) -> dict[str, Any]:
    """The changes of the run with that label, or of the method of that name, and of a point.

    >>> changes_of(config_lib.default(), "sotalign", {"alpha": 0.1, "train.steps": 5})
    {'method': 'sotalign', 'sotalign.alpha': 0.1, 'train.steps': 5}
    """
    changes = dict(config.runs.get(label, {"method": label}))
    method = changes.get("method", config.method)
    return changes | {key if "." in key else f"{method}.{key}": v for key, v in point.items()}


def with_point(
    config: ConfigDict, label: str, point: Mapping[str, Any], **others: Any
) -> dict[int, FrozenConfigDict]:
    """The runs of one label alone, changed by a point and by others, by seed."""
    changed = copy.deepcopy(config)
    changed.runs = {label: changes_of(config, label, point) | others}
    return {one.seed: one for one in config_lib.runs(changed).values()}


# --- trials --------------------------------------------------------------------------------------


class Trial(NamedTuple):
    """A point of the grid with its runs by seed, and then its score over them, or why it failed."""

    number: int
    point: Point
    runs: dict[int, FrozenConfigDict]
    score: Mean | None = None
    error: str | None = None

    def folder(self, seed: int) -> str:
        """Where the run with a seed lives."""
        return f"trial-{self.number:03d}-seed{seed}"


def plan(config: ConfigDict, label: str, chosen: Mapping[int, Point]) -> list[Trial]:
    """The runs of every point, none of which reads the test split.

    Raises:
        InputError: a value that cannot be used whatever the others are.
    """
    config_lib.runs(config)  # a config that is wrong without the grid says so in its own words
    trials = []
    for number, point in chosen.items():
        try:
            runs = with_point(config, label, point, **{"data.test": False})
            trials.append(Trial(number, point, runs))
        except checks.InputError as error:
            trials.append(Trial(number, point, {}, error=str(error)))
    for key, value in {(key, repr(value)): None for t in trials for key, value in t.point.items()}:
        errors = [t.error for t in trials if repr(t.point[key]) == value]
        if all(errors):
            raise checks.InputError(f"grid: {errors[0]}")
    if all(trial.error for trial in trials):
        raise checks.InputError(f"{trials[0].error}")
    return trials


def search(
    trials: list[Trial], folder: pathlib.Path, *, record: dict[str, Any], title: str
) -> list[Trial]:
    """Makes the trials or finishes those begun; the best first, of equals the first in the grid."""
    configs = {t.folder(seed): one for t in trials for seed, one in t.runs.items()}
    outcomes = run.run_all(configs, folder, record=record, title=title)

    def ended(trial: Trial) -> Trial:
        own = [outcomes[trial.folder(seed)] for seed in trial.runs]
        error = trial.error or next((outcome.error for outcome in own if outcome.error), None)
        scores = [outcome.results[run.SCORE] for outcome in own if outcome.error is None]
        return trial._replace(score=None if error else Mean(scores), error=error)

    return ranked([ended(trial) for trial in trials])


def ranked(trials: list[Trial]) -> list[Trial]:
    """The best first, of equals the first in the grid; those that failed last."""
    return sorted(trials, key=lambda trial: 1.0 if trial.score is None else -trial.score)


def trials_table(trials: list[Trial]) -> report.Table:
    """Every trial with its settings and its score, in the order given."""
    headers = ["trial", *trials[0].point, "val R@1", "failed"]
    rows = [[t.number, *map(str, t.point.values()), t.score, t.error or ""] for t in trials]
    if not any(trial.error for trial in trials):
        headers, rows = headers[:-1], [row[:-1] for row in rows]
    return report.table(headers, rows, digits=2, best={"val R@1": "max"})


# --- the command ---------------------------------------------------------------------------------


def tune(
    config: ConfigDict,
    label: str,
    workdir: pathlib.Path,
    *,
    grid: str,
    limit: int | None,
    seeds: int,
) -> dict[str, tuple[FrozenConfigDict, run.Outcome, pathlib.Path]]:
    """Chooses among the points of a grid and tests the choice; its runs, how they ended, and where.

    Leaves the trials, trials.md, trials.csv and best.json in `workdir`/`label`.

    Args:
        config: what the runs start from.
        label: one of its runs, or a method.
        workdir: folder for this and other labels of the same config.
        grid: as in `parse_grid`.
        limit: most points to try.
        seeds: how many to test the choice with.

    Raises:
        InputError: the grid or the data cannot be used, or every trial failed.
    """
    checks.choice("method", label, tuple({**config.runs, **dict.fromkeys(config_lib.METHODS)}))
    wanted = parse_grid(grid, changes_of(config, label, {}).get("method", config.method))
    trials = plan(config, label, points(wanted, limit))
    folder, record = workdir / label, {"method": label, "grid": wanted}
    if not (folder / "config.json").exists():
        _check_data(config, label, trials, test=seeds > 0)
    workdir_lib.open_run(workdir, {"config": config_lib.plain(config)})
    workdir_lib.open_run(folder, record)
    trials = search(trials, folder, record=record, title=f"tune {label}")
    table = trials_table(trials)
    if distributed.is_first():
        table.save(folder / "trials")
    best = trials[0]
    if best.score is None:
        raise checks.InputError(f"method: every trial of {label} failed, first {best.error}")
    chosen = repr({label: changes_of(config, label, best.point)})
    flag = "--config.runs=" + (shlex.quote(chosen) if '"' in chosen else f'"{chosen}"')
    workdir_lib.write_json(
        folder / "best.json",
        {
            "method": label,
            "trial": best.number,
            "trials": len(trials),
            "settings": best.point,
            run.SCORE: float(best.score),
            "flag": flag,
        },
    )
    if distributed.is_first():
        print(f"\n{table}\n\n{label} at its best: {flag}")
    if not seeds:
        return {}
    config = copy.deepcopy(config)
    config.seed, config.seeds = None, tuple(range(seeds))
    tested = with_point(config, label, best.point)
    names = {f"test-{best.number:03d}-seed{seed}": one for seed, one in tested.items()}
    outcomes = run.run_all(names, folder, record=record, title=f"test {label}")
    return {
        f"{label}-seed{one.seed}": (one, outcomes[name], folder / name)
        for name, one in names.items()
    }


def _check_data(config: ConfigDict, label: str, trials: list[Trial], *, test: bool) -> None:
    """Raises when data cannot be read (the test split's only if `test`) or none is to choose by."""
    first = next(trial for trial in trials if trial.runs)
    runs = with_point(config, label, first.point) if test else first.runs
    if run.load_dataset(next(iter(runs.values()))).val is None:
        raise checks.InputError(
            "data: there is no validation split to choose by; pass "
            "--config.data.files.val_x=PATH and val_y"
        )


def main() -> None:
    """Tunes the methods one after the other, tests every choice, and prints a comparison."""
    config, workdir = config_lib.from_flags(), cli.workdir()
    if not _METHOD.value:
        raise checks.InputError("method: is not set; pass --method=NAME or --method=NAME,NAME")
    ended: dict[str, tuple[FrozenConfigDict, run.Outcome, pathlib.Path]] = {}
    for label in _METHOD.value:
        ended |= tune(
            config, label, workdir, grid=_GRID.value, limit=_LIMIT.value, seeds=_SEEDS.value
        )
    if ended:
        configs = {name: config for name, (config, _, _) in ended.items()}
        outcomes = {name: outcome for name, (_, outcome, _) in ended.items()}
        folders = {name: folder for name, (_, _, folder) in ended.items()}
        report.conclude(configs, outcomes, workdir, folders=folders)


if __name__ == "__main__":
    cli.run(main, choices=CHOICES)
