"""Runs experiments: python -m experiments.main --config=FILE.py[:ARG] --workdir=FOLDER.

Any setting can be changed on the command line, as in --config.train.steps=500. A run that was
interrupted goes on where it stopped when it is started again with the same --workdir.
"""

import json
import pathlib

from absl import app, flags
from ml_collections import config_flags

from experiments import compare_runs, launch, runner, settings
from sotalign_jax import checks

# Unknown settings are let through here, to be refused with a list of the known ones.
_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "FILE.py[:ARG]", lock_config=False, accept_new_attributes=True
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the results.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print the resolved runs and shapes, and stop.")


def _run() -> None:
    """Plans the runs, makes them and prints a comparison."""
    config = _CONFIG.value
    if config is None:
        raise checks.InputError("config: is not set; pass --config=experiments/configs/...")
    runs = settings.plan_runs(config)
    if _DRY_RUN.value:
        for run in runs:
            shapes = runner.load_dataset(run).summary()
            print(json.dumps({"settings": settings.to_json(run), "shapes": shapes}, indent=2))
        return
    if not _WORKDIR.value:
        raise checks.InputError("workdir: is not set; pass --workdir=FOLDER")
    workdir = pathlib.Path(_WORKDIR.value).expanduser()
    results = runner.execute_all(runs, workdir, config=settings.plain(config))
    print(compare_runs.report(runs, results, workdir))


main = launch.guarded(_run, interrupted="start again with the same --workdir to go on")

if __name__ == "__main__":
    app.run(main, flags_parser=launch.parse)
