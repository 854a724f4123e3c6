"""Measures how much unpaired pictures, unpaired texts, or both add to 300 captioned pictures.

python examples/one_sided.py    # from a clone; a few minutes on a CPU
"""

import numpy as np

import sotalign_jax as sota
from experiments import photos
from sotalign_jax import evaluation

PAIRS, UNPAIRED, SEEDS = 300, 5000, 3

test = photos.gallery("coco")
pools = {"no unpaired rows": "", "pictures": "x", "texts": "y", "pictures and texts": "xy"}
print(f"{PAIRS} pairs of COCO, {UNPAIRED} unpaired rows a side; mean R@10 of {SEEDS} seeds")
print(f"{'unpaired rows':20} {'plain':>6} {'calibrated':>11}")
for name, sides in pools.items():
    found = []
    for seed in range(SEEDS):
        coco = photos.dataset("coco", n_pairs=PAIRS, n_unpaired=UNPAIRED, seed=seed, test=False)
        given = {side: getattr(coco, f"pool_{side}") for side in sides}
        pairs = coco.pairs_x, coco.pairs_y
        aligner = sota.align(pairs, **given, seed=seed, progress=False)
        heads = aligner.heads
        found.append(evaluation.evaluate(heads.x, heads.y, test, aligner.calibration))
    means = {key: np.mean([scores[key] for scores in found]) for key in found[0]}
    print(f"{name:20} {means['mean/R@10']:6.1f} {means['calibrated/mean/R@10']:11.1f}")
