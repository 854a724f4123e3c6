"""All tables and figures by name, in the paper's order."""

import dataclasses
from collections.abc import Callable, Mapping

from experiments.paper import additions, appendix, main_text
from experiments.paper.runs import Setup
from experiments.paper.table import PaperTable

TABLES: Mapping[str, Callable[[Setup], PaperTable]] = {
    "T1": main_text.t1,
    "T2": main_text.t2,
    "T3": main_text.t3,
    "T4": main_text.t4,
    "T5": main_text.t5,
    "T6": main_text.t6,
    "T7": main_text.t7,
    "A1": appendix.a1,
    "A2": appendix.a2,
    "A3": appendix.a3,
    "A4": appendix.a4,
    "A5": appendix.a5,
    "A6": appendix.a6,
    "F3": main_text.f3,
    "F4": main_text.f4,
    "F5": main_text.f5,
    "F6": main_text.f6,
    "F7": main_text.f7,
    "FA1": appendix.fa1,
    "FA2": appendix.fa2,
    "FA3": appendix.fa3,
    "FA4": appendix.fa4,
    "FA5": appendix.fa5,
    "FA6": appendix.fa6,
    "FA7": appendix.fa7,
    "FA8": appendix.fa8,
    "FA9": appendix.fa9,
    "FA10": appendix.fa10,
    "V1": additions.v1,
    "V2": additions.v2,
    "V3": additions.v3,
    "S1": additions.s1,
}
"""The functions that make the tables."""


def make(name: str, setup: Setup) -> PaperTable:
    """Makes a table without numbers.

    Args:
        name: Name of the table, such as "T1".
        setup: Sizes and sources. Panels whose data are missing are left out.

    Returns:
        The table, with the specifications of its cells.
    """
    made = TABLES[name](setup)
    return dataclasses.replace(made, panels=[panel for panel in made.panels if panel.places()])
