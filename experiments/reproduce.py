r"""Reproduces the tables and figures of the paper, on the repository's data or on your own files.

    python -m experiments.reproduce --list
    python -m experiments.reproduce --only=T1,F5 --workdir=runs/paper
    python -m experiments.reproduce --all --quick --workdir=runs/quick
    python -m experiments.reproduce --list --cells=docs/results/cells.jsonl

The work folder gets an overview RESULTS.md, NAME.md and NAME.csv for each table, figures/, and
cells.jsonl with the results of all runs. A run that several tables share is computed once. Running
the command again resumes it. Running it in two terminals divides the runs between two processes.
--cells starts from stored results. With --norun as well, the pages are written again without
training:

    python -m experiments.reproduce --all --norun --workdir=runs/paper \
        --cells=docs/results/cells.jsonl --results=docs/results/RESULTS.md

--files is a JSON file with the embedding files of each source ({"SkyScript": {"x": "images.npy",
...}, ...}). Tables then use these sources only, at the paper's sizes. Options of the methods are
selected on the validation split of "main" first, as in the paper. --list names the sources, and
with --files it also prints the protocol of each table.
"""

import itertools
import os
import pathlib
import shlex
import sys
from collections.abc import Sequence

from absl import flags

from experiments import distributed, store
from experiments.paper import documents, runs, selection, sources, table, tables
from sotalign_jax import checks, storage
from sotalign_jax.search import cli

_LIST = flags.DEFINE_bool("list", False, "List all tables and figures and the data they need.")
_ONLY = flags.DEFINE_list("only", [], "Tables and figures to make, such as T1,F5.")
_ALL = flags.DEFINE_bool("all", False, "Make all tables and figures.")
_QUICK = flags.DEFINE_bool("quick", False, "Short runs with one seed and fewer points.")
_FILES = flags.DEFINE_string("files", None, "JSON file that lists embedding files by source.")
_RESULTS = flags.DEFINE_string("results", None, "Overview to write; WORKDIR/RESULTS.md by default.")
_CELLS = flags.DEFINE_string(
    "cells", None, "File of stored results to start from, such as docs/results/cells.jsonl."
)
_RUN = flags.DEFINE_bool("run", True, "Compute missing results; --norun uses stored ones only.")
flags.declare_key_flag("workdir")


def main() -> None:
    """Makes the chosen tables and prints them, or lists all of them."""
    for name in _ONLY.value:
        checks.choice("only", name, tuple(tables.TABLES))
    if not _LIST.value and _ALL.value == bool(_ONLY.value):
        raise checks.InputError("only: pass either --only=NAMES or --all; --list names them")
    if _CELLS.value is not None and not pathlib.Path(_CELLS.value).is_file():
        raise checks.InputError(f"cells: {_CELLS.value}: no such file")
    given = sources.Photographs() if _FILES.value is None else sources.Files.read(_FILES.value)
    setup = runs.Setup("quick" if _QUICK.value else "paper" if given.given else "full", given)
    kept = store.Store(pathlib.Path(_CELLS.value or os.devnull))
    if _LIST.value:
        print(documents.listing(setup, kept))
        return
    own = store.Store(cli.workdir().absolute() / documents.CELLS)
    own.add(kept.entries().values())
    _make(setup, own)


def _make(setup: runs.Setup, own: store.Store) -> None:
    """Computes missing results, writes the pages and prints them."""
    names = dict.fromkeys(_ONLY.value or tables.TABLES)
    setup, failures = _select(setup, own, [tables.make(name, setup) for name in names])
    made = [tables.make(name, setup) for name in names]
    if _RUN.value:
        panels = itertools.chain.from_iterable(one.panels for one in made)
        failures |= runs.fill(own, setup.sources, panels)
    made = [one.filled(own, failures) for one in made]
    # The page shows the command that computes its results, so --norun is left out.
    shown = [flag for flag in sys.argv[1:] if flag != "--norun"]
    command = shlex.join(["python", "-m", "experiments.reproduce", *shown])
    page = pathlib.Path(_RESULTS.value or own.path.with_name("RESULTS.md"))
    # Two processes that share the runs must not write the page at the same time.
    with storage.lock(own.path.with_name("lock")):
        documents.save(page, made, setup, own, command)
    print("\n".join(documents.markdown(one, setup) for one in made))
    print(f"The overview is {page}, with its pages beside it. CSV files are in {own.path.parent}")
    if failures:
        raise FloatingPointError(f"{len(failures)} cells failed, named above")


def _select(
    setup: runs.Setup, own: store.Store, made: Sequence[table.PaperTable]
) -> tuple[runs.Setup, dict[str, str]]:
    """Tries the grids of the methods in the tables, and selects the best points on validation.

    Returns the setup with the selected options, and the messages of failed trials by key.
    """
    specs = [spec for one in made for panel in one.panels for _, spec, _ in panel.cells()]
    used = {spec["config"]["method"] for spec in specs if "config" in spec}
    grids = {method: grid for method, grid in setup.sizes.grids.items() if method in used}
    failures: dict[str, str] = {}
    if grids and _RUN.value:
        trials = selection.panel_of_trials(setup, list(grids))
        failures = runs.fill(own, setup.sources, [trials])
    selected = selection.selected(setup, own, failures)
    for method in grids:
        point = selected.chosen.get(method)
        found = "no trial has finished, so its defaults are used"
        if point is not None:
            found = ", ".join(f"{name} {value:g}" for name, value in point.items())
        print(f"selected on validation, {method}: {found}")
    return selected, failures


if __name__ == "__main__":
    cli.run(
        main,
        choices={"tables and figures": tuple(tables.TABLES)},
        initialize=distributed.initialize,
    )
