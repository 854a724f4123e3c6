r"""Your own embeddings: CCA, SAIL, SOTAlign and `align` on files, row i of x matching row i of y.

    python -m experiments.main --config=experiments/configs/files.py:from=FOLDER --workdir=runs/mine
    python -m experiments.main --config=experiments/configs/files.py --workdir=runs/mine \
        --config.data.files.x=images.npy --config.data.files.y=texts.npy \
        --config.data.files.val_x=val_images.npy --config.data.files.val_y=val_texts.npy \
        --config.data.files.test_x=test_images.npy --config.data.files.test_y=test_texts.npy

`from=FOLDER` takes x.npy, y.parquet, test_x.npz, ... of a folder such as `experiments.pair` writes;
with an unpaired_x or unpaired_y file, all rows of x and y are pairs. Without val and test files, a
tenth of the rows is held out for validation and a fifth for the test.
`--config.data.n_pairs` rows are kept as pairs; the rest, split in two halves, is the unpaired pool
(`--config.data.pool=random` gives both sides all of it, `files.unpaired_x` and `unpaired_y` bring
pools of their own). `files.py:smoke` and `files.py:seeds=3` work as for quickstart.
"""

from ml_collections.config_dict import ConfigDict

from experiments import config as config_lib


def get_config(arg: str = "") -> ConfigDict:
    """The paper's settings with 1,000 pairs, scaled to a CPU by two rules.

    Steps x rate = 0.2: Lion moves a weight by at most the rate in a step, so fewer steps at a
    higher rate go as far as the paper's 2,000 steps at 1e-4. alpha x pairs of a batch = 1: the
    gradient of SigLIP's mean falls as 1 / pairs, and the paper has 1e-4 with 10,000 pairs.
    "align" is the recipe of `sotalign_jax.align`, which has its own.
    """
    config = config_lib.default()
    config.runs = {
        "cca": {"method": "cca"},
        "sail": {"method": "sail"},
        "sotalign": {"method": "sotalign"},
        "align": {"method": "align"},
    }
    config.seeds = (0,)
    config.data.name = "files"
    config.heads.dim = 512
    config.train.steps = 100
    config.train.eval_every = 10
    config.train.learning_rate = 2e-3
    config.train.unpaired_batch = 1024
    config.sotalign.alpha = 1e-3
    return config_lib.switched(config, arg)
