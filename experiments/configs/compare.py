"""Every method on COCO's photographs: same data, same steps, same batches.

    python -m experiments.main --config=experiments/configs/compare.py --workdir=runs/compare

`compare.py:pairs=500+1000+2000,seeds=3` compares with three numbers of pairs; `compare.py:smoke`
takes four steps, to see that everything works. A new method of `methods.METHODS` takes part by
itself.
"""

from typing import Any

from ml_collections.config_dict import ConfigDict

from experiments import config as config_lib
from experiments.configs import quickstart
from sotalign_jax import methods

CHOSEN: dict[str, dict[str, Any]] = {
    # The published warm-up of 500 steps would outlast these runs.
    "structure": {"structure.warmup": 0},
    "structure_semi": {"structure_semi.warmup": 0},
    "sue": {"sue.epochs": 15, "sue.mmd_epochs": 25},  # as much as the time allows
}
"""What differs from a method's published options. `experiments.tune` chooses better ones."""


def get_config(arg: str = "") -> ConfigDict:
    """1,000 pairs, the rest of the training rows unpaired, three seeds."""
    config = quickstart.get_config()
    config.runs = {name: {"method": name} for name in ("procrustes", "cca")}  # teachers alone
    for name in methods.METHODS:
        config.runs[name] = {"method": name, **CHOSEN.get(name, {})}
    # SOTAlign as in the paper starts from random heads; once more from its teacher's projection.
    config.runs["sotalign_teacher"] = {"method": "sotalign", "heads.init": "teacher"}
    config.seeds = (0, 1, 2)
    config.heads.hidden = 512  # of heads that have hidden layers: wider ones take CPUs too long
    return config_lib.switched(config, arg)
