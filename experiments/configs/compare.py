"""Compares all methods on COCO's photographs with the same data, steps and batches.

    python -m experiments.main --config=experiments/configs/compare.py --workdir=runs/compare

`compare.py:pairs=500+1000+2000,seeds=3` repeats the comparison with three numbers of pairs.
`compare.py:smoke` takes four steps to check the installation. Every method in `methods.METHODS` is
included.
"""

from typing import Any

from ml_collections.config_dict import ConfigDict

from experiments import config as config_lib
from experiments.configs import quickstart
from sotalign_jax import methods

CHOSEN: dict[str, dict[str, Any]] = {
    # The published warm-up of 500 steps is longer than these runs.
    "structure": {"structure.warmup": 0},
    "structure_semi": {"structure_semi.warmup": 0},
    "sue": {"sue.epochs": 15, "sue.mmd_epochs": 25},  # feasible on a CPU
}
"""Changes of the methods' published options. `experiments.tune` finds better ones."""


def get_config(arg: str = "") -> ConfigDict:
    """Returns runs of all methods with 1,000 pairs, the other rows as pools, and three seeds."""
    config = quickstart.get_config()
    config.runs = {name: {"method": name} for name in ("procrustes", "cca")}  # teachers alone
    for name in methods.METHODS:
        config.runs[name] = {"method": name, **CHOSEN.get(name, {})}
    # The paper's SOTAlign starts from random heads. This run starts from the teacher's projection.
    config.runs["sotalign_teacher"] = {"method": "sotalign", "heads.init": "teacher"}
    config.seeds = (0, 1, 2)
    config.heads.hidden = 512  # wider hidden layers take too long on a CPU
    return config_lib.switched(config, arg)
