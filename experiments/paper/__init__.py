"""Reproduction of the paper's tables and figures, and verdicts on its claims.

Terms of this package:

    table    a table or figure of the paper, such as T1 or F5, with the claim that the paper makes
    panel    a grid of numbers with labelled rows and columns; a figure may have several
    place    a row and a column of a panel
    cell     one number of a panel: a metric of a run or of a measurement, for one seed
    source   a set of embeddings: data of the repository, or files of the paper's own data
    setup    the sizes of the runs (quick, full or as published) and the sources that they read
    verdict  the judgement on a claim (held, did not hold, undecided), with the numbers behind it

`tables.toml` describes the tables in the paper's order, and `results.json` has the paper's numbers.
`tables` makes the panels. `runs` turns their cells into specifications and computes each of them
once, in an `experiments.store`. `grids` and `plots` show panels, and `report` writes the pages. A
row or a column is a label with settings: settings of a config by dotted name, settings of the data
as "data.NAME", the "method", and the "metric" to show.
"""

import pathlib
import tomllib
from typing import Any

DATA: dict[str, Any] = tomllib.loads(
    pathlib.Path(__file__).with_name("tables.toml").read_text("utf-8")
)
"""The content of `tables.toml`."""
