"""Runs experiments: python -m experiments.main --config=FILE.py[:ARG] --workdir=FOLDER.

Any setting can be changed on the command line, as in --config.train.steps=500. A run that was
interrupted goes on where it stopped when it is started again with the same --workdir.
"""

import json

from absl import app, flags

from experiments import compare, launch, run_flags, runner, settings

_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print the resolved runs and shapes, and stop.")


def _run() -> None:
    """Plans the runs, makes them and prints a comparison."""
    config = run_flags.config()
    if not _DRY_RUN.value:
        compare.run(settings.plain(config), run_flags.workdir())
        return
    for run in settings.plan_runs(config):
        shapes = runner.load_dataset(run).summary()
        print(json.dumps({"settings": settings.to_json(run), "shapes": shapes}, indent=2))


main = launch.guarded(_run, interrupted="start again with the same --workdir to go on")

if __name__ == "__main__":
    app.run(main, flags_parser=launch.parse)
