"""Compares all methods on COCO's photographs with the same data, steps and batches.

    python -m experiments.main --config=experiments/configs/compare.py --workdir=runs/compare

`compare.py:pairs=500+1000+2000,seeds=3` repeats the comparison with three numbers of pairs.
`compare.py:smoke` takes four steps to check the installation. Every method in `methods.METHODS` is
included.
"""

from typing import Any

from experiments import launch, spec
from experiments.configs import quickstart
from sotalign_jax import methods

CHOSEN: dict[str, dict[str, Any]] = {
    # The published warm-up of 500 steps is longer than these runs.
    "structure": {"structure.warmup": 0},
    "structure_semi": {"structure_semi.warmup": 0},
    "sue": {"sue.epochs": 15, "sue.mmd_epochs": 25},  # feasible on a CPU
}
"""Changes of the methods' published options. `experiments.tune` finds better ones."""


def get_config(arg: str = "") -> spec.Spec:
    """Returns runs of all methods with 1,000 pairs, the other rows as pools, and three seeds."""
    runs = {name: {"method": name} for name in ("procrustes", "cca")}  # teachers alone
    for name in methods.METHODS:
        runs[name] = {"method": name, **CHOSEN.get(name, {})}
    # The paper's SOTAlign starts from random heads. This run starts from the teacher's projection.
    runs["sotalign_teacher"] = {"method": "sotalign", "start": "teacher"}
    changes = {
        "runs": runs,
        "seeds": (0, 1, 2),
        "hidden": 512,  # wider hidden layers take too long on a CPU
    }
    return launch.switched(quickstart.get_config().change(changes), arg)
