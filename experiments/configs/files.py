r"""Trains CCA, SAIL, SOTAlign and `align` on your own embeddings. Row i of x matches row i of y.

    python -m experiments.main --config=experiments/configs/files.py:from=FOLDER --workdir=runs/mine
    python -m experiments.main --config=experiments/configs/files.py --workdir=runs/mine \
        --config.data.files.x=images.npy --config.data.files.y=texts.npy \
        --config.data.files.val_x=val_images.npy --config.data.files.val_y=val_texts.npy \
        --config.data.files.test_x=test_images.npy --config.data.files.test_y=test_texts.npy

`from=FOLDER` reads x.npy, y.parquet, test_x.npz and so on from a folder, such as one written by
`sotalign_jax.pair`. If the folder has an unpaired_x or unpaired_y file, all rows of x and y are
pairs. Without val and test files, a tenth of the rows is held out for validation and a fifth for
the test.
`--config.data.n_pairs` rows are pairs. The pools are the rest: one half of it for x, the other half
for y. `--config.data.pool=random` puts all of it into both pools. Files `unpaired_x` and
`unpaired_y` replace the pools. `files.py:smoke` and `files.py:seeds=3` work as for quickstart.
"""

from experiments import launch, spec


def get_config(arg: str = "") -> spec.Spec:
    """Returns the paper's settings with 1,000 pairs, scaled to a CPU by two rules.

    Steps x learning rate is 0.2 as in the paper, which has 2,000 steps at 1e-4. Lion moves a weight
    by at most the learning rate per step, so fewer steps at a higher rate can go as far.

    alpha x pairs per batch is 1 as in the paper, which has 1e-4 with 10,000 pairs. The gradient of
    SigLIP's mean falls as 1 / pairs.

    "align" is the recipe of `sotalign_jax.align`, which chooses its own settings.
    """
    changes = {
        "runs": {name: {"method": name} for name in ("cca", "sail", "sotalign", "align")},
        "seeds": (0,),
        "data.name": "files",
        "dim": 512,  # the paper has 1024 and batches of 32,768, which take a GPU
        "train.steps": 100,
        "train.eval_every": 10,
        "train.learning_rate": 2e-3,
        "train.unpaired_batch": 1024,
        "sotalign.alpha": 1e-3,
    }
    return launch.switched(spec.Spec().change(changes), arg)
