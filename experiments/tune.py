r"""Tunes a method: tries a grid of settings, selects on validation, and tests the selected one.

    python -m experiments.tune --config=experiments/configs/compare.py:seeds=1 --method=sotalign \
        --workdir=runs/tune --grid="{'alpha': [1e-3, 1e-4], 'start': ['random', 'teacher']}"
    python -m experiments.tune --config=experiments/configs/quickstart.py --method=nnclr \
        --workdir=runs/nnclr

A grid has options of the method, and other settings by their dotted names. The default is the
method's own grid. Trials are stored in WORKDIR/trials and never read the test split. The point with
the highest R@1 on validation, averaged over the config's seeds, is trained again with --seeds=N
seeds and tested in WORKDIR/tested-N. Running an interrupted command again resumes it.
"""

import ast
import itertools
import shlex
from collections.abc import Mapping
from typing import Any

from absl import flags

from experiments import distributed, launch, report, run
from experiments import spec as spec_lib
from experiments import workdir as workdir_lib
from sotalign_jax import checks, methods
from sotalign_jax.search import cli

_METHOD = flags.DEFINE_string("method", "sotalign", "Method to tune, or label of a run.")
_GRID = flags.DEFINE_string("grid", None, "Values to try, by setting, as a Python dictionary.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Number of seeds to test with, or 0.", lower_bound=0)
flags.declare_key_flag("config")
flags.declare_key_flag("workdir")
flags.adopt_module_key_flags(distributed)

CHOICES = {"methods": spec_lib.METHODS}
Point = dict[str, Any]
"""A value for every key of a grid."""


def points(grid: Mapping[str, Any], method: str) -> dict[str, Point]:
    """Expands a grid into its points. The last key varies fastest.

    Args:
        grid: Values to try, by setting.
        method: Method whose options are given by their own names.

    Returns:
        Settings of the points, by name.

    Raises:
        InputError: A setting has no list of values.

    >>> points({"alpha": [1e-3, 1], "start": ["teacher"]}, "sotalign")
    {'alpha=0.001,start=teacher': {'sotalign.alpha': 0.001, 'start': 'teacher'},
     'alpha=1,start=teacher': {'sotalign.alpha': 1, 'start': 'teacher'}}
    >>> points({}, "cca")
    {'cca': {}}
    """
    for key, values in grid.items():
        if not isinstance(values, list | tuple) or not values:
            raise checks.InputError(f"grid[{key!r}] must be a list of values, got {values!r}")
    spec = spec_lib.Spec()
    options = spec_lib.settings(spec.options[method]) if method in spec.options else {}
    shared = spec_lib.settings(spec).keys() - options.keys()
    keys = [key if "." in key or key in shared else f"{method}.{key}" for key in grid]
    found = {}
    for values in itertools.product(*grid.values()):
        name = ",".join(f"{key}={value}" for key, value in zip(grid, values, strict=True))
        found[name or method] = dict(zip(keys, values, strict=True))
    return found


def _parsed(grid: str) -> dict[str, Any]:
    """Parses the value of --grid."""
    try:
        return dict(ast.literal_eval(grid))
    except (SyntaxError, TypeError, ValueError) as error:
        text = f"flag --grid={grid} is not a Python dictionary"
        raise checks.InputError(f"{text}; pass one such as {{'alpha': [1e-3]}}") from error


def best(ended: Mapping[str, list[run.Results]]) -> str:
    """Returns the label with the highest mean score over its seeds, or the first of equal ones.

    Args:
        ended: Results of every seed, by label.

    Raises:
        InputError: Every point failed with some seed.
    """
    scores = {
        label: sum(results[run.SCORE] for results in own) / len(own)
        for label, own in ended.items()
        # A point that failed with one seed is out: its mean over the others would be too high.
        if all(run.SCORE in results for results in own)
    }
    if not scores:
        error = next(one["error"] for own in ended.values() for one in own if "error" in one)
        raise checks.InputError(
            f"grid has no point that succeeded with all seeds; first error: {error}"
        )
    return max(scores, key=lambda label: scores[label])


def main() -> None:
    """Tries all points, prints the best one and tests it."""
    spec, workdir, label = launch.from_flags(), cli.workdir(), _METHOD.value
    checks.choice("method", label, tuple({**spec.runs, **dict.fromkeys(spec_lib.METHODS)}))
    changes = spec.runs.get(label, {"method": label})
    method = changes.get("method", spec.method)
    own = methods.METHODS[method].grid if method in methods.METHODS else {}
    tried = points(_parsed(_GRID.value) if _GRID.value else own, method)
    untested = {"data.test": False}
    load = run.Loader()
    listed = {name: {**changes, **point, **untested} for name, point in tried.items()}
    trials = spec_lib.expand(spec.change({"runs": listed}))
    if not (workdir / "trials" / "config.json").exists():
        # Read all data now, including the test split, so that unreadable files end the command
        # before hours of trials.
        whole = {label: {**changes, **({} if _SEEDS.value else untested)}}
        first = next(iter(spec_lib.expand(spec.change({"runs": whole})).values()))
        if load(first).val is None:
            remedy = "pass --config.data.files.val_x=PATH and val_y"
            raise checks.InputError(f"data has no validation split to choose by; {remedy}")
    ended = run.run_all(trials, workdir / "trials", load=load, title=f"tune {label}", trials=True)
    report.compare(trials, ended, workdir / "trials", load=load)
    winner = best(spec_lib.by_label(trials, ended))
    chosen = {label: {**changes, **tried[winner]}}
    text = str(chosen)
    flag = "--config.runs=" + (shlex.quote(text) if '"' in text else f'"{text}"')
    workdir_lib.write_json(workdir / "best.json", {"trial": winner, "runs": chosen})
    if distributed.is_first():
        print(f"\nBest settings of {label}: {flag}")
    if _SEEDS.value:
        seeds = tuple(range(_SEEDS.value))
        tests = spec_lib.expand(spec.change({"runs": chosen, "seed": None, "seeds": seeds}))
        folder = workdir / f"tested-{_SEEDS.value}"
        ended = run.run_all(tests, folder, load=load, title=f"test {label}")
        report.conclude(tests, ended, folder, load=load)


if __name__ == "__main__":
    launch.run(main, choices=CHOICES)
