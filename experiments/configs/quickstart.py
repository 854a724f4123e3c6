"""CCA, SAIL and SOTAlign on the bundled pictures: a few minutes on two CPU cores.

Ridge, steps, learning rates, alpha and epsilon_star were chosen by MeanR@1 on the validation
split. SOTAlign's heads start at the CCA teacher's projection; the paper's random start is
--config.overrides.sotalign.heads.init=random.

`quickstart.py:seeds=3` repeats everything over three seeds; `quickstart.py:smoke` takes four
steps, to see that everything works.
"""

from ml_collections import config_dict

from experiments import settings
from experiments.configs import files


def get_config(arg: str = "") -> config_dict.ConfigDict:
    """1,000 pairs, the rest of the training rows unpaired."""
    config = files.get_config()
    config.data.name = "pictures"
    config.data.pool = "random"
    return settings.apply_switches(config, arg)
