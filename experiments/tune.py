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
import contextlib
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

_METHOD = flags.DEFINE_list("method", None, "What to tune: labels of runs, or methods.")
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
        values: list[Any] = [piece.strip() for piece in listed.split(",")]
        if part != "own" and not (key and all(values)):
            raise checks.InputError(f"grid: cannot read {part!r}; pass KEY=VALUE,VALUE;KEY=VALUE")
        for index, value in enumerate(values):
            with contextlib.suppress(ValueError, SyntaxError):  # a word stands for itself
                values[index] = ast.literal_eval(value)
        own = methods.METHODS[method].grid if method in methods.METHODS else {}
        for name, tried in (own if part == "own" else {key: tuple(values)}).items():
            if name in grid or len(set(map(repr, tried))) < len(tried):
                raise checks.InputError(f"grid: {name} or one of its values is repeated")
            grid[name] = tried
    return grid


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
    """The changes of the run with that label, or of the method of that name, and of a point."""
    changes = dict(config.runs.get(label, {"method": label}))
    method = changes.get("method", config.method)
    return changes | {key if "." in key else f"{method}.{key}": v for key, v in point.items()}


def runs_of(config: ConfigDict, changes: Mapping[str, Point]) -> dict[str, FrozenConfigDict]:
    """The runs of a config with other changes by label, such as "trial-003-seed0"."""
    changed = copy.deepcopy(config)
    changed.runs = dict(changes)
    return config_lib.runs(changed)


class Trial(NamedTuple):
    """A point of the grid, with its score over seeds or why it failed."""

    number: int
    point: Point
    score: Mean | None
    error: str


def ranked(chosen: Mapping[int, Point], ended: Mapping[str, run.Results]) -> list[Trial]:
    """The best first, of equals the first in the grid; those that failed last."""
    trials = []
    for number, point in chosen.items():
        own = [one for name, one in ended.items() if name.startswith(f"trial-{number:03d}-")]
        error = next((one["error"] for one in own if "error" in one), "")
        score = None if error else Mean([one[run.SCORE] for one in own])
        trials.append(Trial(number, point, score, error))
    return sorted(trials, key=lambda trial: 1.0 if trial.score is None else -trial.score)


def trials_table(trials: list[Trial]) -> report.Table:
    """Every trial with its settings and its score, in the order given."""
    columns = ["trial", *trials[0].point, "val R@1", "failed"]
    rows = [[t.number, *map(str, t.point.values()), t.score, t.error] for t in trials]
    width = len(columns) if any(trial.error for trial in trials) else -1
    return report.Table(columns[:width], [r[:width] for r in rows], digits=2, best=["val R@1"])


def tune(config: ConfigDict, label: str, workdir: pathlib.Path) -> dict[str, tuple[Any, ...]]:
    """Chooses among the points of a grid and tests the choice; its configs, results and folders.

    Leaves the trials, trials.md, trials.csv and best.json in `workdir`/`label`, which is one of the
    config's runs or a method.
    """
    untested = {"data.test": False}
    checks.choice("method", label, tuple({**config.runs, **dict.fromkeys(config_lib.METHODS)}))
    grid = parse_grid(_GRID.value, changes_of(config, label, {}).get("method", config.method))
    chosen = points(grid, _LIMIT.value)
    changes = {number: changes_of(config, label, point) for number, point in chosen.items()}
    runs = runs_of(config, {f"trial-{n:03d}": {**own, **untested} for n, own in changes.items()})
    folder, record = workdir / label, {"method": label, "grid": grid}
    if not (folder / "config.json").exists():
        # Data that cannot be read, the test split's included, are known before the first trial.
        first = {**next(iter(changes.values())), **({} if _SEEDS.value else untested)}
        one = next(iter(runs_of(config, {label: first}).values()))
        if run.load_dataset(one).val is None:
            remedy = "pass --config.data.files.val_x=PATH and val_y"
            raise checks.InputError(f"data: there is no validation split to choose by; {remedy}")
    workdir_lib.open_run(workdir, {"config": config_lib.plain(config)})
    workdir_lib.open_run(folder, record)
    ended = run.run_all(runs, folder, record=record, title=f"tune {label}")
    trials = ranked(chosen, ended)
    best = trials[0]
    if distributed.is_first():
        trials_table(trials).save(folder / "trials")
    if best.score is None:
        raise checks.InputError(f"method: every trial of {label} failed, first {best.error}")
    text = repr({label: changes[best.number]})
    flag = "--config.runs=" + (shlex.quote(text) if '"' in text else f'"{text}"')
    found = {"trial": best.number, "trials": len(trials), "settings": best.point}
    scored = {"method": label, **found, run.SCORE: float(best.score), "flag": flag}
    workdir_lib.write_json(folder / "best.json", scored)
    if distributed.is_first():
        print(f"\n{trials_table(trials)}\n\n{label} at its best: {flag}")
    if not _SEEDS.value:
        return {}
    config = copy.deepcopy(config)
    config.seed, config.seeds = None, tuple(range(_SEEDS.value))
    runs = runs_of(config, {f"test-{best.number:03d}": changes[best.number]})
    ended = run.run_all(runs, folder, record=record, title=f"test {label}")
    return {
        f"{label}-seed{one.seed}": (one, ended[name], folder / name) for name, one in runs.items()
    }


def main() -> None:
    """Tunes the methods one after the other, tests every choice, and prints a comparison."""
    config, workdir = config_lib.from_flags(), cli.workdir()
    if not _METHOD.value:
        raise checks.InputError("method: is not set; pass --method=NAME or --method=NAME,NAME")
    ended: dict[str, tuple[Any, ...]] = {}
    for label in _METHOD.value:
        ended |= tune(config, label, workdir)
    if ended:
        columns = zip(*ended.values(), strict=True)
        configs, results, folders = (dict(zip(ended, column, strict=True)) for column in columns)
        report.conclude(configs, results, workdir, folders)


if __name__ == "__main__":
    cli.run(main, choices=CHOICES)
