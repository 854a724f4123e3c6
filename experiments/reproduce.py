r"""Every table and figure of the paper, ours beside theirs: on bundled data, or on given files.

    python -m experiments.reproduce --list
    python -m experiments.reproduce --only=T1,F5 --workdir=runs/paper
    python -m experiments.reproduce --all --quick --workdir=runs/quick

Each entry leaves NAME.md, NAME.csv and, for figures, NAME.png in the work folder, and all together
report.html. A run that several entries share is made once; started again, the command goes on
where it stopped, and several processes on one work folder share the work. --files names a JSON file
of embedding files by slot ({"skyscript": {"x": "sky_images.npy", ...}, ...}): entries then run on
those, at the paper's sizes; --list names the slots.
"""

import os
import pathlib
import shlex
import sys

import jax
from absl import app, flags

from experiments import launch
from experiments.paper import catalogue, lab, outcomes, report, reproduction, scales
from sotalign_jax import checks

_LIST = flags.DEFINE_bool("list", False, "Name every table and figure and what it needs.")
_ONLY = flags.DEFINE_list("only", [], "Tables and figures to make, such as T1,F5.")
_ALL = flags.DEFINE_bool("all", False, "Make everything that the data allow.")
_QUICK = flags.DEFINE_bool("quick", False, "Short runs of one seed, fewer points.")
_FILES = flags.DEFINE_string("files", None, "JSON file of embedding files by slot.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for cells, tables and the report.")
_RESULTS = flags.DEFINE_string(
    "results", None, "Markdown file to write all results to as well, with the figures beside it."
)
_RUN = flags.DEFINE_bool("run", True, "Make what is missing; --norun reports on what is there.")
_JOBS = flags.DEFINE_integer(
    "jobs", None, "Processes; by default two on a CPU, one on accelerators.", lower_bound=1
)


def _command() -> None:
    given = {} if _FILES.value is None else lab.read_files(_FILES.value)
    main = scales.PAPER if "main" in given else scales.BUNDLED
    scale = scales.QUICK if _QUICK.value else main
    workdir = pathlib.Path(_WORKDIR.value or ".").expanduser().absolute()
    at = lab.Lab(workdir, scale, scales.QUICK if _QUICK.value else scales.PAPER, given)
    if _LIST.value:
        print(reproduction.listing(at))
        return
    if _ALL.value == bool(_ONLY.value):
        raise checks.InputError("only: pass either --only=NAMES or --all; --list names them")
    if _WORKDIR.value is None:
        raise checks.InputError("workdir: is not set; pass --workdir=FOLDER")
    entries = reproduction.choose(tuple(catalogue.ENTRIES) if _ALL.value else _ONLY.value)
    reproduction.compile_once(at)
    # Compiling, which is most of a short run, keeps one core busy.
    jobs = _JOBS.value or (min(2, os.cpu_count() or 1) if jax.default_backend() == "cpu" else 1)
    given_flags = [flag for flag in sys.argv[1:] if flag != "--norun"]
    command = shlex.join(["python", "-m", "experiments.reproduce", *given_flags])
    made = reproduction.make(entries, at, command=command, jobs=jobs if _RUN.value else 0)
    for one in made:
        print(f"\n{outcomes.terminal(one)}")
    if _RESULTS.value is not None:
        report.save_results(pathlib.Path(_RESULTS.value), made, workdir, command)
    print(f"\nTables, figures and report.html are in {workdir}")
    failed = sum(bool(one.failures) for one in made)
    if failed and _RUN.value:
        sys.exit(f"error: runs failed for {failed} of {len(made)} entries, named above")


main = launch.guarded(_command, interrupted="start again with the same --workdir to go on")

if __name__ == "__main__":
    app.run(main, flags_parser=launch.parse)
