"""Runs experiments: python -m experiments.main --config=FILE.py[:ARG] --workdir=FOLDER.

Any setting can be changed on the command line, as in --config.train.steps=500. A run that was
interrupted goes on where it stopped when it is started again with the same --workdir.
"""

import json
import pathlib
import signal
import sys

from absl import app, flags, logging
from ml_collections import config_dict, config_flags

from experiments import compare_runs, runner, settings
from sotalign_jax import checks

# Unknown settings are let through here, to be refused with a list of the known ones.
_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "FILE.py[:ARG]", lock_config=False, accept_new_attributes=True
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the results.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print the resolved runs and shapes, and stop.")


def _run(config: config_dict.ConfigDict, workdir: pathlib.Path | None, *, dry_run: bool) -> None:
    runs = settings.plan_runs(config)
    if dry_run:
        for run in runs:
            shapes = runner.load_dataset(run).summary()
            print(json.dumps({"settings": settings.to_json(run), "shapes": shapes}, indent=2))
        return
    if workdir is None:
        raise checks.InputError("workdir: is not set; pass --workdir=FOLDER")
    results = runner.execute_all(runs, workdir, config=settings.plain(config))
    print(compare_runs.report(runs, results, workdir))


def main(argv: list[str]) -> None:
    """Runs, and turns what the user can mend into one line on stderr."""
    logging.set_verbosity(logging.WARNING)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a clean stop, like ctrl-C
    try:
        if len(argv) > 1:
            raise checks.InputError(f"arguments: {argv[1]!r} is not understood; see --help")
        if _CONFIG.value is None:
            raise checks.InputError("config: is not set; pass --config=experiments/configs/...")
        workdir = pathlib.Path(_WORKDIR.value).expanduser() if _WORKDIR.value else None
        _run(_CONFIG.value, workdir, dry_run=_DRY_RUN.value)
    except (checks.InputError, FloatingPointError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: start again with the same --workdir to go on")


def _parse(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except Exception as error:  # a config file may raise anything
        sys.exit(f"error: {settings.explain(error)}")


if __name__ == "__main__":
    app.run(main, flags_parser=_parse)
