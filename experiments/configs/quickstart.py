"""Trains CCA, SAIL, SOTAlign and `align` on COCO's photographs in minutes on two CPU cores.

The settings are the paper's, scaled by the rules in files.py. `quickstart.py:seeds=3` repeats all
runs with three seeds. `quickstart.py:smoke` takes four steps to check the installation.
"""

from experiments import launch, spec
from experiments.configs import files


def get_config(arg: str = "") -> spec.Spec:
    """Returns runs with 1,000 pairs, and pools of images and captions of other photographs."""
    return launch.switched(files.get_config().change({"data.name": "coco"}), arg)
