"""CCA, SAIL and SOTAlign on the bundled pictures: a few minutes on two CPU cores.

Ridge, steps, learning rates, alpha and epsilon_star were chosen by MeanR@1 on the validation
split. SOTAlign's heads start at the CCA teacher's projection; the paper's random start is
--config.overrides.sotalign.heads.init=random.

`quickstart.py:seeds=3` repeats everything over three seeds; `quickstart.py:smoke` takes four
steps, to see that everything works.
"""

from ml_collections import config_dict

from experiments import settings


def get_config(arg: str = "") -> config_dict.ConfigDict:
    """1,000 pairs, the rest of the training rows unpaired."""
    config = settings.default_config()
    config.methods = ("cca", "sail", "sotalign")
    config.seeds = (0,)
    config.data.pool = "random"
    config.teacher.ridge = 0.01
    config.heads.dim = 512
    config.train.steps = 200
    config.train.eval_every = 20
    config.train.learning_rate = 3e-4
    config.train.unpaired_batch = 1024
    config.sotalign.alpha = 3e-3
    config.sotalign.epsilon_star = 0.02
    config.overrides.sotalign = {"heads": {"init": "teacher"}}
    return settings.apply_switches(config, arg)
