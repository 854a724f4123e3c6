"""Chosen entries from the data at hand to files and a report."""

import contextlib
import multiprocessing
from collections.abc import Iterator, Sequence

import jax

from experiments.paper import catalogue, cells, lab, outcomes, report
from experiments.paper.entries import Entry
from sotalign_jax import checks, tables


def listing(at: lab.Lab) -> str:
    """Every entry with what it varies and the data it needs."""
    rows = []
    for entry in catalogue.ENTRIES.values():
        here = outcomes.outcome(entry, at, cells.Store(at.workdir)).data
        rows.append([entry.name, entry.title, entry.varies, here, ", ".join(entry.files)])
    table = tables.table(["", "shows", "varies", "runs here on", "the paper's data"], rows)
    slots = tables.table(
        ["slot", "fields"], [(name, str(slot)) for name, slot in lab.SLOTS.items()]
    )
    return f"{table}\n\nSlots of --files:\n\n{slots}"


def choose(names: Sequence[str]) -> list[Entry]:
    """Entries by name.

    Raises:
        InputError: a name that none has.
    """
    for name in names:
        checks.choice("only", name, tuple(catalogue.ENTRIES))
    return [catalogue.ENTRIES[name] for name in dict.fromkeys(names)]


def make(
    entries: Sequence[Entry], at: lab.Lab, *, command: str, jobs: int = 1
) -> list[outcomes.Outcome]:
    """Makes what the entries lack, in `jobs` processes, and writes their files and the report.

    With no jobs it reports on what is there.
    """
    store = cells.Store(at.workdir)
    if jobs:
        with _helpers(jobs, [entry.name for entry in entries], at):
            store.finish(_cells(entries, at))
    made = [outcomes.outcome(entry, at, store) for entry in entries]
    at.workdir.mkdir(parents=True, exist_ok=True)
    with cells.alone(at.workdir / "report.lock"):  # processes that shared the work end together
        for one in made:
            outcomes.save(one, at.workdir)
        html = report.page(made, at.workdir, command)
        (at.workdir / "report.html").write_text(html, encoding="utf-8")
    return made


def compile_once(at: lab.Lab) -> None:
    """Keeps compiled programs in the work folder: runs of one shape share them."""
    jax.config.update("jax_compilation_cache_dir", str(at.workdir / "compiled"))


def _cells(entries: Sequence[Entry], at: lab.Lab) -> list[cells.Cell]:
    return [cell for entry in entries for cell in outcomes.cells_of(entry, at)]


@contextlib.contextmanager
def _helpers(jobs: int, names: Sequence[str], at: lab.Lab) -> Iterator[None]:
    """All processes but this one that make cells of the entries; they end when all are made."""
    context = multiprocessing.get_context("spawn")
    started = [
        context.Process(target=_help, args=(names, at, index / jobs), daemon=True)
        for index in range(1, jobs)
    ]
    for process in started:
        process.start()
    try:
        yield
        for process in started:
            process.join()
    finally:
        for process in started:
            process.terminate()


def _help(names: Sequence[str], at: lab.Lab, start: float) -> None:
    """Makes cells from a share `start` of the list on, and then those before."""
    compile_once(at)
    wanted = _cells(choose(names), at)  # neighbours often share a program: one process compiles it
    first = int(start * len(wanted))
    with contextlib.suppress(KeyboardInterrupt):
        cells.Store(at.workdir).finish(wanted[first:] + wanted[:first], show=False)
