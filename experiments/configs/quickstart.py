"""CCA, SAIL, SOTAlign and `align` on COCO's photographs: a few minutes on two CPU cores.

The settings are the paper's, scaled by the rules in files.py. `quickstart.py:seeds=3` repeats
everything over three seeds; `quickstart.py:smoke` takes four steps, to see that everything works.
"""

from ml_collections.config_dict import ConfigDict

from experiments import config as config_lib
from experiments.configs import files


def get_config(arg: str = "") -> ConfigDict:
    """1,000 pairs; unpaired images and captions of other photographs."""
    config = files.get_config()
    config.data.name = "coco"
    return config_lib.switched(config, arg)
