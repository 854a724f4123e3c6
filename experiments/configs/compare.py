"""Every method on the bundled pictures: same data, same steps, same batches.

    python -m experiments.compare --config=experiments/configs/compare.py --workdir=runs/compare

`compare.py:pairs=500+1000+2000,seeds=3` compares with three numbers of pairs; `compare.py:smoke`
takes four steps, to see that everything works. A new method of `methods.METHODS` takes part by
itself.
"""

from ml_collections import config_dict

from experiments import settings
from experiments.configs import quickstart
from sotalign_jax import methods

TEACHERS = ("procrustes", "cca")
"""Teachers that are shown on their own."""
VARIANTS = {"sotalign_teacher": "sotalign"}
"""SOTAlign as in the paper starts from random heads; once more from its teacher's projection."""
CHOSEN = {
    "sotalign_teacher": {"heads": {"init": "teacher"}},
}
"""What differs from the common settings, by method or variant: what `experiments.tune` chose."""


def get_config(arg: str = "") -> config_dict.ConfigDict:
    """1,000 pairs, the rest of the training rows unpaired, three seeds."""
    config = quickstart.get_config()
    config.methods = (*TEACHERS, *methods.METHODS, *VARIANTS)
    config.seeds = (0, 1, 2)
    config.variants = VARIANTS
    config.overrides = {name: CHOSEN[name] for name in config.methods if name in CHOSEN}
    config.train.unpaired_batch = 512
    config.heads.hidden = 512  # of heads that have hidden layers: wider ones take CPUs too long
    return settings.apply_switches(config, arg)
