"""Recipes on photographs: teachers, SAIL, and both recipes of `align`, plain and calibrated.

python examples/recipes.py rsicd 500 1000    # from a clone; five minutes on two CPU cores
"""

import functools
import sys

import numpy as np

from experiments import photos
from sotalign_jax import align, aligner, evaluation, heads, methods, teachers

SEEDS, SAIL = 3, methods.SAIL()


def started(teacher, data, seed):
    """A teacher alone, calibrated by the pools."""
    maps = teacher(data.pairs_x, data.pairs_y)
    widths = data.pairs_x.shape[1], data.pairs_y.shape[1], maps.dim
    return aligner.calibrated(heads.build_heads(*widths, teacher=maps), data, {})


def trained(data, seed, pools=True, **options):
    """`align` with a validation set of its own."""
    x, y = (data.pool_x, data.pool_y) if pools else (None, None)
    pairs = data.pairs_x, data.pairs_y
    return align(pairs, x, y, val=data.val, seed=seed, progress=False, **options)


paper = {"recipe": "paper", "steps": 100, "learning_rate": 2e-3, "dim": 512}  # sized for a CPU
RECIPES = {
    "CCA": functools.partial(started, teachers.cca),
    "kernel CCA": functools.partial(started, teachers.kernel_cca),
    "SAIL": functools.partial(trained, **{**paper, "learning_rate": 5e-4}, method=SAIL),
    'recipe="paper"': functools.partial(trained, **paper),
    "align's own, no unpaired rows": functools.partial(trained, pools=False),
    "align's own": trained,
}

name, *numbers = sys.argv[1:]
imagenet = photos.zero_shot("imagenet")
print(f"{name}, mean of {SEEDS} seeds ± their spread")
print("| pairs | recipe | R@1 | R@10 | calibrated R@1 | calibrated R@10 | ImageNet |")
print("|---:|---|---:|---:|---:|---:|---:|")
for pairs in map(int, numbers):
    rows = {recipe: [] for recipe in RECIPES}
    for seed in range(SEEDS):
        data = photos.dataset(name, n_pairs=pairs, seed=seed)
        for recipe, fit in RECIPES.items():
            model = fit(data, seed)
            x, y = model.heads.x, model.heads.y
            found = evaluation.evaluate(x, y, data.test, model.calibration)
            zero_shot = evaluation.evaluate_zero_shot(x, y, imagenet)["zero_shot/top1"]
            keys = [f"{kind}mean/R@{k}" for kind in ("", "calibrated/") for k in (1, 10)]
            rows[recipe].append([*(found[key] for key in keys), zero_shot])
    for recipe, values in rows.items():
        means, spreads = np.mean(values, axis=0), np.std(values, axis=0, ddof=1)
        cells = (f"{m:.1f} ± {s:.1f}" for m, s in zip(means, spreads, strict=True))
        print(f"| {pairs} | {recipe} | {' | '.join(cells)} |", flush=True)
