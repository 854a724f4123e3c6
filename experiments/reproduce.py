r"""Every table and figure of the paper, ours beside theirs: on photographs, or on given files.

    python -m experiments.reproduce --list
    python -m experiments.reproduce --only=T1,F5 --workdir=runs/paper
    python -m experiments.reproduce --all --quick --workdir=runs/quick
    python -m experiments.reproduce --list --cells=docs/results/cells.jsonl

The work folder gets RESULTS.md with all tables and claims, figures/, and NAME.csv for each entry. A
run that several entries share is made once; started again, the command goes on where it stopped,
and started twice, in two terminals, it shares the runs between two processes.
--cells starts from results that were kept: with --norun, docs/results/RESULTS.md is made again
without training. --files names a JSON file of embedding files by source ({"SkyScript": {"x":
"images.npy", ...}, ...}): entries then run on those alone, at the paper's sizes; --list names them.
"""

import itertools
import pathlib
import shlex
import sys
import tempfile

from absl import flags

from experiments import cli
from experiments.paper import entries, lab, report, sources
from sotalign_jax import checks

_LIST = flags.DEFINE_bool("list", False, "Name every table and figure and what it needs.")
_ONLY = flags.DEFINE_list("only", [], "Tables and figures to make, such as T1,F5.")
_ALL = flags.DEFINE_bool("all", False, "Make everything that the data allow.")
_QUICK = flags.DEFINE_bool("quick", False, "Short runs of one seed, fewer points.")
_FILES = flags.DEFINE_string("files", None, "JSON file of embedding files by source.")
_RESULTS = flags.DEFINE_string("results", None, "The page to write; RESULTS.md by default.")
_CELLS = flags.DEFINE_string(
    "cells", None, "File of finished cells to start from, such as docs/results/cells.jsonl."
)
_RUN = flags.DEFINE_bool("run", True, "Make what is missing; --norun reports on what is there.")
flags.declare_key_flag("workdir")


def main() -> None:
    """Makes the chosen entries and prints them."""
    for name in _ONLY.value:
        checks.choice("only", name, tuple(entries.ENTRIES))
    if not _LIST.value and _ALL.value == bool(_ONLY.value):
        raise checks.InputError("only: pass either --only=NAMES or --all; --list names them")
    if _CELLS.value is not None and not pathlib.Path(_CELLS.value).is_file():
        raise checks.InputError(f"cells: {_CELLS.value}: no such file")
    given = sources.Photographs() if _FILES.value is None else sources.Files.read(_FILES.value)
    scale = "quick" if _QUICK.value else "paper" if given.given else "full"
    with tempfile.TemporaryDirectory() as unused:
        folder = pathlib.Path(unused) if _LIST.value else cli.workdir().absolute()
        at = lab.Lab(folder, scale, given)
        if _CELLS.value is not None:
            at.take(pathlib.Path(_CELLS.value))
        if _LIST.value:
            print(report.listing(at))
        else:
            _make(at)


def _make(at: lab.Lab) -> None:
    chosen = [entries.ENTRIES[name] for name in dict.fromkeys(_ONLY.value or entries.ENTRIES)]
    panels = {entry.name: entry.panels(at) for entry in chosen}
    failures: dict[str, str] = {}
    if _RUN.value:
        failures = at.make(itertools.chain.from_iterable(panels.values()))
    made = [
        report.Outcome(entry, at, {p.name: at.collect(p, failures) for p in panels[entry.name]})
        for entry in chosen
    ]
    shown = [flag for flag in sys.argv[1:] if flag != "--norun"]
    command = shlex.join(["python", "-m", "experiments.reproduce", *shown])
    page = pathlib.Path(_RESULTS.value or at.workdir / "RESULTS.md")
    with at.writing():
        report.save(page, made, at, command)
    print("\n".join(map(report.markdown, made)))
    print(f"Tables and figures are in {page} and beside it, numbers as CSV in {at.workdir}")
    if failures:
        raise FloatingPointError(f"{len(failures)} cells failed, named above")


if __name__ == "__main__":
    cli.run(main, choices={"tables and figures": tuple(entries.ENTRIES)})
