"""Tables: text, Markdown and CSV."""

import csv
import io

import numpy as np
import pytest

from sotalign_jax import checks, tables

ROWS = [["procrustes", 21.1, 3, None], ["cca, ridge", np.float32(21.52), 40, "x|y"]]


def _table() -> tables.Table:
    return tables.table(
        ["teacher", "MeanR@1", "n", "note"], ROWS, best={"MeanR@1": "max", "n": "min"}
    )


def test_text_is_aligned_and_marks_the_best():
    assert str(_table()).splitlines() == [
        "teacher     MeanR@1    n   note",
        "----------  --------  ---  ----",
        "procrustes     21.1    3*  -",
        "cca, ridge     21.5*  40   x|y",
    ]


def test_markdown_is_a_table():
    header, rule, first, second = _table().markdown().splitlines()
    assert rule.startswith("| ----------") and rule.count(":") == 2
    assert "**3**" in first and "**21.5**" in second and "**21.1**" not in first
    assert "x\\|y" in second  # a bar inside a cell would start a new one
    assert header.count("|") == 5


def test_csv_holds_every_digit():
    header, first, second = csv.reader(io.StringIO(_table().csv()))
    assert header == ["teacher", "MeanR@1", "n", "note"]
    assert first == ["procrustes", "21.1", "3", ""]
    assert second[0] == "cca, ridge" and np.float32(second[1]) == ROWS[1][1]


def test_equal_values_are_all_marked_and_nan_never_is():
    rows = [["a", 1.04], ["b", 0.96], ["c", float("nan")]]
    text = str(tables.table(["m", "v"], rows, best={"v": "max"}))
    assert text.count("1.0*") == 2 and "nan*" not in text


def test_means_bring_their_spread():
    rows = [["a", tables.Mean([1.0, 3.0])], ["b", tables.Mean([2.0])], ["c", None]]
    table = tables.table(["m", "v"], rows, best={"v": "max"})
    assert str(table).splitlines()[2:] == ["a  2.0 ± 1.4*", "b        2.0*", "c          -"]
    assert "**2.0 ± 1.4**" in table.markdown()
    header, a, b, c = csv.reader(io.StringIO(table.csv()))
    assert header == ["m", "v", "v ±"] and b == ["b", "2.0", ""] and c == ["c", "", ""]
    assert a[:2] == ["a", "2.0"] and float(a[2]) == pytest.approx(2**0.5)


def test_save_writes_both_files(tmp_path):
    paths = _table().save(tmp_path / "deep" / "table1")
    assert [path.name for path in paths] == ["table1.md", "table1.csv"]
    assert paths[0].read_text() == _table().markdown() + "\n"
    assert paths[1].read_text() == _table().csv()


def test_a_table_without_rows_has_a_header():
    assert str(tables.table(["a", "b"], [])).splitlines() == ["a  b", "-  -"]


def test_mistakes_are_named():
    with pytest.raises(checks.InputError, match="3 cells; there are 2 headers"):
        tables.table(["a", "b"], [[1, 2, 3]])
    with pytest.raises(checks.InputError, match="best: 'c' is unknown"):
        tables.table(["a"], [[1]], best={"c": "max"})
    with pytest.raises(checks.InputError, match="best a: 'up' is unknown"):
        tables.table(["a"], [[1]], best={"a": "up"})
