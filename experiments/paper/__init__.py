"""Reproduction of the paper's tables and figures, and verdicts on its claims.

Terms of this package:

    table    a table or figure of the paper, such as T1 or F5, with the claim that the paper makes
    panel    a grid of numbers with labelled rows and columns; a figure may have several
    place    a row and a column of a panel
    cell     one number of a panel: a metric of a run or of a measurement, for one seed
    source   a set of embeddings: data of the repository, or files of the paper's own data
    setup    the sizes of the runs (quick, full or as published) and the sources that they read
    verdict  the judgement on a claim (held, did not hold, undecided), with the numbers behind it

`main_text`, `appendix` and `additions` have a function for each table, and `tables` lists them in
the paper's order. The functions call `table.panel`. They take the rows and columns that several
tables use from `shared`, sizes and default settings from `sizes`, and names from `sources`. `runs`
turns the cells of a panel into specifications and computes each of them once, in an
`experiments.store`. `panels` has the rules that judge claims, and `results.json` the paper's
numbers. `grids` and `plots` show panels, and `documents` writes the pages.

A row or a column is a label with settings: settings of a config by dotted name, settings of the
data as "data.NAME", the "method", and the "metric" to show. A new table is a function in one of the
three modules and an entry in `tables.TABLES`.
"""
