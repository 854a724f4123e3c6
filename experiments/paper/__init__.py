"""The paper's tables and figures: what to run, what came out, and which claims held.

The words of this package:

    table    a table or figure of the paper, such as T1 or F5, with the claim that the paper makes
    panel    the rows x columns of numbers of a table; a figure may have several
    cell     one number of a panel: a metric of a run or of a measurement, for one seed
    source   a set of embeddings: photographs of the repository, or files of the paper's own data
    setup    the sizes of the runs (quick, full or as published) and the sources that they read
    verdict  whether a claim held, and the numbers that say so

`tables.toml` describes the tables in the paper's order, `results.json` has the paper's numbers. A
panel is made by a function of `tables`; `runs` turns its cells into specifications and computes
them, each once, in an `experiments.store`; `report` writes the page. A row or a column is a label
with settings: those of a config by dotted name, those of the data as "data.NAME", the "method", and
the "metric" to show.
"""

import pathlib
import tomllib
from typing import Any

DATA: dict[str, Any] = tomllib.loads(
    pathlib.Path(__file__).with_name("tables.toml").read_text("utf-8")
)
"""The content of `tables.toml`."""
