r"""Your own embeddings: CCA, SAIL and SOTAlign on files, row i of x matching row i of y.

    python -m experiments.main --config=experiments/configs/files.py --workdir=runs/mine \
        --config.data.files.x=images.npy --config.data.files.y=texts.npy \
        --config.data.files.val_x=val_images.npy --config.data.files.val_y=val_texts.npy \
        --config.data.files.test_x=test_images.npy --config.data.files.test_y=test_texts.npy

`--config.data.n_pairs` rows are kept as pairs; the rest, split in two halves, is the unpaired pool
(`--config.data.pool=random` gives both sides all of it, `files.unpaired_x` and `unpaired_y` bring
pools of their own). `files.py:smoke` and `files.py:seeds=3` work as for quickstart.
"""

from ml_collections.config_dict import ConfigDict

from experiments import config as config_lib


def get_config(arg: str = "") -> ConfigDict:
    """What was good on the bundled pictures, with 1,000 pairs."""
    config = config_lib.default()
    config.runs = {
        "cca": {"method": "cca"},
        "sail": {"method": "sail"},
        "sotalign": {"method": "sotalign", "heads.init": "teacher"},
    }
    config.seeds = (0,)
    config.data.name = "files"
    config.teacher.ridge = 0.01
    config.heads.dim = 512
    config.train.steps = 200
    config.train.eval_every = 20
    config.train.learning_rate = 3e-4
    config.train.unpaired_batch = 1024
    config.sotalign.alpha = 3e-3
    config.sotalign.epsilon_star = 0.02
    return config_lib.switched(config, arg)
