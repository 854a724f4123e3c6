"""Every table and figure of the paper with numbers, by name."""

from experiments.paper import main_tables, protocols, shifts, solvers, sources, sweeps
from experiments.paper.entries import Entry

ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        main_tables.T1,
        sources.T2,
        sources.T3,
        main_tables.T4,
        main_tables.T5,
        protocols.T6,
        protocols.T7,
        shifts.A1,
        sources.A2,
        sweeps.A3,
        main_tables.A4,
        main_tables.A5,
        protocols.A6,
        solvers.F3,
        solvers.F4,
        sweeps.F5,
        shifts.F6,
        sources.F7,
        solvers.FA1,
        sweeps.FA2,
        sweeps.FA3,
        sweeps.FA4,
        sweeps.FA5,
        shifts.FA6,
        shifts.FA7,
        shifts.FA8,
        shifts.FA9,
        shifts.FA10,
    )
}
