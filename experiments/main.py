r"""Trains the runs of a config and compares them.

    python -m experiments.main --config=experiments/configs/quickstart.py --workdir=runs/quickstart
    python -m experiments.main --config=experiments/configs/compare.py:pairs=500+2000,seeds=3 \
        --workdir=runs/compare --config.train.steps=500

Any setting of a config can be changed on the command line. FILE.py:smoke takes four steps to check
the installation. :seeds=N and :pairs=N+M repeat the runs. The work folder gets report.html and
comparison.md, .csv and .png. Running an interrupted command again resumes it.
"""

import json

from absl import flags

from experiments import distributed, launch, report, run, spec
from sotalign_jax.search import cli

_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Print the runs and the shapes of their data, and train nothing."
)
flags.declare_key_flag("config")
flags.declare_key_flag("workdir")
flags.adopt_module_key_flags(distributed)  # lists its flags in --help of this command

CHOICES = {"methods": spec.METHODS, "data": spec.DATA}


def main() -> None:
    """Executes the runs of the config and prints a comparison."""
    runs = spec.expand(launch.from_flags())
    load = run.Loader()
    if _DRY_RUN.value:
        for one in runs.values():
            shapes = load(one).summary()
            print(json.dumps({"config": one.to_json(), "shapes": shapes}, indent=2))
        return
    workdir = cli.workdir()
    report.conclude(runs, run.run_all(runs, workdir, load=load), workdir, load=load)


if __name__ == "__main__":
    launch.run(main, choices=CHOICES)
