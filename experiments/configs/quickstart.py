"""CCA, SAIL and SOTAlign on the bundled pictures: a few minutes on two CPU cores.

Ridge, steps, learning rates, alpha and epsilon_star were chosen by MeanR@1 on the validation
split. SOTAlign's heads start at the CCA teacher's projection; the paper's random start is
--config.runs="{'sotalign': {'method': 'sotalign'}}".

`quickstart.py:seeds=3` repeats everything over three seeds; `quickstart.py:smoke` takes four
steps, to see that everything works.
"""

from ml_collections.config_dict import ConfigDict

from experiments import config as config_lib
from experiments.configs import files


def get_config(arg: str = "") -> ConfigDict:
    """1,000 pairs, the rest of the training rows unpaired."""
    config = files.get_config()
    config.data.name = "pictures"
    config.data.pool = "random"
    return config_lib.switched(config, arg)
