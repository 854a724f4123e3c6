r"""Tunes a method: tries every point of a grid, chooses on the validation split, tests the choice.

    python -m experiments.tune --config=experiments/configs/compare.py:seeds=1 --method=sotalign \
        --workdir=runs/tune --grid='alpha=1e-3,1e-4;heads.init=random,teacher'
    python -m experiments.tune --config=experiments/configs/quickstart.py --method=sail \
        --workdir=runs/sail --grid='own;train.learning_rate=1e-4,3e-4'

A grid has options of the method, and other settings by their dotted names; `own` stands for the
values that the method finds worth trying. The trials are a comparison, in WORKDIR/trials, that
never looks at the test split: the point with the best mean of MeanR@1 on validation over the
config's seeds is trained over --seeds seeds and tested in WORKDIR/tested. Interrupted, it goes on
where it stopped when it is started again.
"""

import ast
import contextlib
import itertools
import shlex
from collections.abc import Mapping
from typing import Any

from absl import flags

from experiments import cli, distributed, report, run
from experiments import config as config_lib
from experiments import workdir as workdir_lib
from sotalign_jax import checks, methods

_METHOD = flags.DEFINE_string("method", "sotalign", "Label of a run, or a method.")
_GRID = flags.DEFINE_string("grid", "own", "Values to try, as KEY=VALUE,VALUE;KEY=VALUE.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds to test the choice with.", lower_bound=0)
flags.declare_key_flag("config")
flags.declare_key_flag("workdir")
flags.adopt_module_key_flags(distributed)

CHOICES = {"methods": config_lib.METHODS}
Point = dict[str, Any]
"""A value for every key of a grid."""


def parse_grid(text: str, method: str) -> dict[str, Point]:
    """The points of "alpha=1e-3,1e-4;train.learning_rate=3e-4;own" by name, the last key fastest.

    >>> parse_grid("alpha=1e-3,1; heads.init=teacher", "sotalign")  # doctest: +NORMALIZE_WHITESPACE
    {'alpha=0.001,heads.init=teacher': {'sotalign.alpha': 0.001, 'heads.init': 'teacher'},
     'alpha=1,heads.init=teacher': {'sotalign.alpha': 1, 'heads.init': 'teacher'}}
    >>> list(parse_grid("own", "sotalign")), parse_grid("own", "cca")
    (['alpha=0.001', 'alpha=0.0001', 'alpha=1e-05'], {'cca': {}})
    """
    grid: dict[str, tuple[Any, ...]] = {}
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
    found = {}
    for one in itertools.product(*grid.values()):
        point = dict(zip(grid, one, strict=True))
        name = ",".join(f"{key}={value}" for key, value in point.items()) or method
        found[name] = {k if "." in k else f"{method}.{k}": v for k, v in point.items()}
    return found


def best(ended: Mapping[str, run.Results]) -> str:
    """The label with the best mean score over its seeds, of equals the first."""
    seeds: dict[str, list[run.Results]] = {}
    for name, results in ended.items():
        seeds.setdefault(name.rpartition("-seed")[0], []).append(results)
    scores = {
        label: sum(results[run.SCORE] for results in own) / len(own)
        for label, own in seeds.items()
        if all(run.SCORE in results for results in own)
    }
    if not scores:
        error = next(iter(ended.values()))["error"]
        raise checks.InputError(f"grid: every trial failed, first {error}")
    return max(scores, key=lambda label: scores[label])


def main() -> None:
    """Tries the points, prints the best one, and tests it."""
    config, workdir, label = config_lib.from_flags(), cli.workdir(), _METHOD.value
    checks.choice("method", label, tuple({**config.runs, **dict.fromkeys(config_lib.METHODS)}))
    changes = dict(config.runs.get(label, {"method": label}))
    points = parse_grid(_GRID.value, changes.get("method", config.method))
    untested = {"data.test": False}
    config.runs = {name: {**changes, **point, **untested} for name, point in points.items()}
    trials = config_lib.runs(config)
    if not workdir.exists():
        # Data that cannot be read, the test split's included, are known before the first trial.
        config.runs = {label: {**changes, **({} if _SEEDS.value else untested)}}
        if run.load_dataset(next(iter(config_lib.runs(config).values()))).val is None:
            remedy = "pass --config.data.files.val_x=PATH and val_y"
            raise checks.InputError(f"data: there is no validation split to choose by; {remedy}")
    ended = run.run_all(trials, workdir / "trials", title=f"tune {label}")
    report.compare(trials, ended, workdir / "trials")
    chosen = {label: {**changes, **points[best(ended)]}}
    text = str(chosen)
    flag = "--config.runs=" + (shlex.quote(text) if '"' in text else f'"{text}"')
    workdir_lib.write_json(workdir / "best.json", {"trial": best(ended), "runs": chosen})
    if distributed.is_first():
        print(f"\n{label} at its best: {flag}")
    if _SEEDS.value:
        config.runs, config.seed, config.seeds = chosen, None, tuple(range(_SEEDS.value))
        tests = config_lib.runs(config)
        tested = run.run_all(tests, workdir / "tested", title=f"test {label}")
        report.conclude(tests, tested, workdir / "tested")


if __name__ == "__main__":
    cli.run(main, choices=CHOICES)
