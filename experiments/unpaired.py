r"""Measures recall against the number of unpaired rows, for the teacher that plans refine.

    python -m experiments.unpaired --names=coco,speech,code --paired=500

Results are kept in --into, see `experiments.store`. Running the command again resumes it. --figure
draws the table. Smaller pools are subsets of larger ones.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from experiments import distributed, photos, recipes, report, store
from sotalign_jax import Aligner, evaluation, heads, recipe, teachers
from sotalign_jax.cca import refine
from sotalign_jax.diagnostics import Mean
from sotalign_jax.search import cli

_NAMES = flags.DEFINE_list("names", ["coco", "speech", "code"], "Data sets of the repository.")
_PAIRED = flags.DEFINE_integer("paired", 500, "Number of pairs.", lower_bound=1)
_TIMES = flags.DEFINE_integer("times", 3, "Seeds.", lower_bound=1)
_INTO = cli.path_flag("into", "runs/unpaired.jsonl", "File of the results.")
_FIGURE = cli.path_flag("figure", None, "PNG file to draw.")
ROWS = (0, 300, 1000, 3000, "all")
"""Rows of each pool. 0 stands for the teacher of the pairs alone."""
SCORES = ("R@10", "calibrated R@10")


def describe(name: str, rows: int | str, seed: int) -> dict[str, Any]:
    """Returns everything that a result depends on, as JSON values."""
    options = [refine.STEPS, refine.EPSILON, refine.POOL_ROWS, refine.ROUNDS, refine.LEAST_GAIN]
    found = {"data": name, "pairs": _PAIRED.value, "rows": rows, "seed": seed}
    return {**found, "options": options, "inputs": photos.fingerprints(name)}


def compute(spec: store.Spec, needed: set[str]) -> store.Results:
    """Fits the teacher on the pairs and on pools of a size, and scores it on the test split.

    Args:
        spec: Specification of the result.
        needed: Unused: all scores are computed.

    Returns:
        Scores in percent, and the number of rows of the smaller pool.
    """
    dataset = recipes.load(spec["data"], spec["pairs"], "disjoint", spec["seed"])
    rows = None if spec["rows"] == "all" else max(spec["rows"], 1)
    pool_x, pool_y = dataset.pool_x[:rows], dataset.pool_y[:rows]
    pairs = dataset.pairs_x, dataset.pairs_y
    if spec["rows"]:
        teacher = teachers.refined_cca(*pairs, pool_x, pool_y, seed=spec["seed"])
    else:
        teacher = teachers.tuned_cca(*pairs, seed=spec["seed"])
    widths = dataset.pairs_x.shape[1], dataset.pairs_y.shape[1], teacher.dim
    model = Aligner(heads.build_heads(*widths, teacher=teacher), {})
    # All pools are calibrated by the same rows, so that only the teachers differ.
    calibration = recipe.calibrate(model.heads, dataset, recipe.EPSILONS)
    assert dataset.test is not None
    scores = evaluation.evaluate(model.heads.x, model.heads.y, dataset.test, calibration)
    smaller = min(len(pool_x), len(pool_y)) if spec["rows"] else 0
    plain, calibrated = scores["mean/R@10"], scores["calibrated/mean/R@10"]
    return {"R@10": plain, "calibrated R@10": calibrated, "rows": smaller}


def table(known: Mapping[str, store.Results], name: str) -> report.Table:
    """Returns the table of a data set, with one row per size of the pools.

    Args:
        known: Results by key.
        name: The data set.

    Returns:
        The table.
    """
    made = []
    for rows in ROWS:
        found = [known[store.key_of(describe(name, rows, s))] for s in range(_TIMES.value)]
        scores = [Mean([one[score] for one in found]) for score in SCORES]
        made.append([f"{found[0]['rows']:,}", *scores])
    return report.Table(["unpaired rows of each modality", *SCORES], made)


def draw(known: Mapping[str, store.Results], names: Sequence[str]) -> Any:
    """Draws recall against the number of unpaired rows.

    Args:
        known: Results by key.
        names: The data sets.

    Returns:
        The figure.
    """
    figure, axes = report.pyplot().subplots(
        1, len(names), squeeze=False, figsize=(3.4 * len(names), 3.0), layout="constrained"
    )
    for ax, name in zip(axes.flat, names, strict=True):
        for score in SCORES:
            points = []
            for rows in ROWS:
                found = [known[store.key_of(describe(name, rows, s))] for s in range(_TIMES.value)]
                mean = Mean([one[score] for one in found])
                points.append((found[0]["rows"], float(mean), mean.spread or 0.0))
            x, y, spread = zip(*points, strict=True)
            ax.errorbar(x, y, yerr=spread, marker="o", capsize=2, label=score)
        ax.set_xscale("symlog", linthresh=300)
        ax.set(title=name, xlabel="unpaired rows of each modality", ylabel="percent")
    axes.flat[0].legend(frameon=False)
    return figure


def main() -> None:
    """Computes missing results, and prints a table for each data set."""
    kept = store.Store(_INTO.value)
    specs = [
        describe(name, rows, seed)
        for name in _NAMES.value
        for seed in range(_TIMES.value)
        for rows in ROWS
    ]
    for _, error in kept.fill([(spec, ()) for spec in specs], compute):
        if error is not None:
            raise error
    known = {key: one.results for key, one in kept.entries().items()}
    for name in _NAMES.value:
        shown = table(known, name).markdown()
        print(f"\n{name}, {_PAIRED.value:,} pairs: recall of the refined CCA in percent\n\n{shown}")
    if _FIGURE.value is not None:
        report.write(pathlib.Path(_FIGURE.value), report.png(draw(known, _NAMES.value)))


if __name__ == "__main__":
    cli.run(main, initialize=distributed.initialize)
