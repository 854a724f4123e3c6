"""Tables as text, Markdown and CSV; comparisons of runs."""

import csv
import doctest
import errno
import io
import json
import os

import matplotlib.image
import numpy as np
import PIL.Image
import pytest
from matplotlib.container import ErrorbarContainer

from experiments import config as config_lib
from experiments import report
from experiments.extract import extraction
from sotalign_jax import aligner, data, diagnostics, heads

ROWS = [["procrustes", 21.1, 3, None], ["cca, ridge", np.float32(21.52), 40, "x|y"]]


def _table() -> report.Table:
    return report.Table(["teacher", "MeanR@1", "n", "note"], ROWS, best=["MeanR@1", "n"])


def test_examples():
    assert doctest.testmod(report).failed == 0


def test_text_is_aligned_and_marks_the_best():
    header, rule, first, second = str(_table()).splitlines()
    assert header.split() == ["teacher", "MeanR@1", "n", "note"] and set(rule) == {"-", " "}
    assert first.split() == ["procrustes", "21.1", "3", "-"]
    assert second.split() == ["cca,", "ridge", "21.5*", "40*", "x|y"]
    assert first.index("21.1") == second.index("21.5")  # a mark does not move the digits


def test_markdown_is_a_table():
    header, rule, first, second = _table().markdown().splitlines()
    assert rule.count("-:|") == 2 and rule.count("|:-") == 2  # numbers to the right
    assert "**40**" in second and "**21.5**" in second and "**21.1**" not in first
    assert "x\\|y" in second  # a bar inside a cell would start a new one
    assert header.count("|") == 5


def test_csv_holds_every_digit():
    header, first, second = csv.reader(io.StringIO(_table().csv()))
    assert header == ["teacher", "MeanR@1", "n", "note"]
    assert first == ["procrustes", "21.1", "3", ""]
    assert second[0] == "cca, ridge" and np.float32(second[1]) == ROWS[1][1]


def test_equal_values_are_all_marked_and_nan_never_is():
    rows = [["a", 1.04], ["b", 0.96], ["c", float("nan")]]
    text = str(report.Table(["m", "v"], rows, best=["v"]))
    assert text.count("1.0*") == 2 and "nan*" not in text


def test_means_bring_their_spread():
    rows = [["a", diagnostics.Mean([1.0, 3.0])], ["b", diagnostics.Mean([2.0])], ["c", None]]
    table = report.Table(["m", "v"], rows, best=["v"])
    shown = [" ".join(line.split()) for line in str(table).splitlines()[2:]]
    assert shown == ["a 2.0 ± 1.4*", "b 2.0*", "c -"]
    assert "**2.0 ± 1.4**" in table.markdown()
    header, a, b, c = csv.reader(io.StringIO(table.csv()))
    assert header == ["m", "v", "v ±"] and b == ["b", "2.0", ""] and c == ["c", "", ""]
    assert a[:2] == ["a", "2.0"] and float(a[2]) == pytest.approx(2**0.5)


def test_save_writes_both_files(tmp_path):
    _table().save(tmp_path / "deep" / "table1")
    assert (tmp_path / "deep" / "table1.md").read_text() == _table().markdown() + "\n"
    assert (tmp_path / "deep" / "table1.csv").read_text() == _table().csv()


def test_a_table_without_rows_has_a_header():
    assert str(report.Table(["a", "b"], [])).splitlines()[0].split() == ["a", "b"]


# --- comparisons ---------------------------------------------------------------------------------

SCORES = {f"test/mean/R@{k}": 10.0 * k for k in (1, 5, 10)}
BETTER = {key: value + 4 for key, value in SCORES.items()}


def compared(**seeds):
    """The table of the results of every seed by label."""
    return report.comparison_table(
        {f"{label}-seed{i}": one for label, own in seeds.items() for i, one in enumerate(own)}
    )


FAILED = {"error": "loss: not finite"}


def test_the_table_has_means_and_deviations_over_seeds():
    table = compared(sail=[SCORES, FAILED, BETTER], sotalign=[BETTER] * 2, failed=[FAILED])
    assert table.headers == ["method", "R@1", "R@5", "R@10"]
    means = [["sail", 12, 52, 102], ["sotalign", 14, 54, 104], ["failed", None, None, None]]
    assert table.rows == means
    assert [value.spread for value in table.rows[0][1:]] == [pytest.approx(8**0.5)] * 3
    assert "14.0 ± 0.0*" in str(table) and "12.0 ± 2.8 " in str(table)
    single = compared(sail=[SCORES], cca=[BETTER])
    assert "14.0*" in str(single) and "±" not in str(single)


def test_reports_fall_back_to_validation(tmp_path, capsys):
    config = config_lib.default()
    config.data.name = "files"
    config.runs = {name: {"method": name} for name in ("sail", "cca")}
    configs = config_lib.runs(config)
    only_val = {key.replace("test", "val"): value for key, value in SCORES.items()}
    for name, values in [("test", SCORES), ("val", only_val), ("none", {})]:
        folder = tmp_path / name
        folder.mkdir()
        report.conclude(configs, dict.fromkeys(configs, values), folder)
        text = capsys.readouterr().out
        assert "sail" in text and str(folder) in text
        written = {path.name for path in folder.iterdir()}
        plot = set() if name == "none" else {"comparison.png"}
        assert written == {"comparison.md", "comparison.csv", "report.html"} | plot


def test_the_plot_grows_with_the_number_of_bars():
    zero_shot = {"test/zero_shot/top1": 40.0}
    results = {
        f"a_method_of_a_long_name_{i}": [SCORES | zero_shot, BETTER | zero_shot] for i in range(36)
    }
    tables = compared(**results, failed=[FAILED]), compared(sail=[SCORES])
    plots = map(report.comparison_plot, tables)
    many, one = (matplotlib.image.imread(io.BytesIO(plot)) for plot in plots)
    assert many.shape[0] > 4 * one.shape[0] and many.shape[1] > one.shape[1]
    assert many.shape[0] < 3000


def test_a_single_seed_has_no_error_bars(monkeypatch):
    drawn = []

    def keep(figure):
        drawn.append(figure)
        return b""

    monkeypatch.setattr(report, "png", keep)
    report.comparison_plot(compared(sail=[SCORES], cca=[BETTER]))
    report.comparison_plot(compared(sail=[SCORES, BETTER], cca=[BETTER]))
    for figure, expected in zip(drawn, (0, 1), strict=True):
        bars = [bar for bar in figure.axes[0].containers if isinstance(bar, ErrorbarContainer)]
        segments = [line for bar in bars for line in bar.lines[2][0].get_segments()]
        assert sum(len(line) > 0 and np.isfinite(line).all() for line in segments) == expected
        report.pyplot().close(figure)


def test_curves_are_drawn_for_what_was_recorded(tmp_path):
    assert report.curves_plot({"cca-seed0": tmp_path}) is None
    for name, keys in {"sail-seed0": ["loss"], "sotalign-seed0": ["loss", "teacher_error"]}.items():
        (tmp_path / name).mkdir()
        rows = [{"step": step, **dict.fromkeys(keys, 1.0 / step)} for step in range(1, 5)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    plot = report.curves_plot({name: tmp_path / name for name in ("sail-seed0", "sotalign-seed0")})
    assert plot.startswith(b"\x89PNG") and len(plot) > 10_000


def test_errors_that_hardly_differ_have_powers_of_ten_beside_them(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(report, "png", lambda figure: drawn.append(figure) or b"")
    for name, values in {"level": (9.389e-5, 9.391e-5), "zero": (0.0, 0.0)}.items():
        rows = [{"step": step, "teacher_error": value} for step, value in enumerate(values)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        report.curves_plot({f"{name}-seed0": tmp_path / name})
    assert drawn[0].axes[0].get_ylim() == pytest.approx((1e-5, 1e-4))
    for figure in drawn:
        report.pyplot().close(figure)


def test_files_on_a_full_disk_are_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "comparison.png"
    report.write(path, b"before")

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left.*comparison.png"):
        report.write(path, b"after")
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


# --- what a model finds --------------------------------------------------------------------------


@pytest.fixture
def gallery():
    """Nine pictures with two captions each."""
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(n, d)).astype(np.float32) for n, d in ((9, 5), (18, 4)))
    return data.gallery(x, y, np.repeat(np.arange(9), 2))


@pytest.fixture
def labels(tmp_path):
    PIL.Image.new("RGB", (30, 20), "red").save(tmp_path / "0.png")
    pictures = [tmp_path / f"{i}.png" for i in range(9)]  # the first alone is at hand
    return report.Labels([p.name for p in pictures], [f"text <{i}>" for i in range(18)], pictures)


def test_the_nearest_captions_are_marked_right_or_wrong(gallery, labels):
    model = aligner.Aligner(heads.build_heads(5, 4, 3, seed=0), {})
    found = report.find(model, gallery, labels)
    assert sorted(one.name for one in found) == list(labels.x)
    scores = model.similarity(gallery.x, gallery.y)
    for one in found:
        row = labels.x.index(one.name)
        best = np.argsort(-scores[row])[:3]
        assert one.retrieved == tuple((f"text <{i}>", i // 2 == row) for i in best)
        assert one.caption == f"text <{2 * row}>" and one.picture == labels.pictures[row]
    text = found[0].text()
    assert text.count("\n") == 3 and text.startswith(f"{found[0].name}: {found[0].caption}")
    right = sum(one.retrieved[0][1] for one in found)
    page = report.found_cards(found, each=9)
    for word, count in (("right", right), ("wrong", 9 - right)):
        assert f"Nearest caption {word}: {count} of 9 pictures" in page
    assert page.count("<figure") == 9 and page.count("data:image/jpeg") == 1
    assert "text &lt;0&gt;" in page and "text <" not in page


def test_another_pictures_caption_in_the_same_words_is_right(gallery, labels):
    model = aligner.Aligner(heads.build_heads(5, 4, 3, seed=0), {})
    said = [f"text {i // 6}" for i in range(18)]  # three pictures share their words
    for one in report.find(model, gallery, labels._replace(y=said)):
        for text, right in one.retrieved:
            assert right == (text == one.caption)


def test_labels_of_files_are_those_that_pair_noted(tmp_path):
    config = config_lib.default()
    config.data.name = "files"
    for name in ("x", "y", "test_x", "test_y"):
        config.data.files[name] = str(tmp_path / f"{name}.npy")
    (run,) = config_lib.runs(config).values()
    assert report.labels_of(run) is None
    metadata = {"encoder": {}, "data": {"root": str(tmp_path)}}
    rows_x = [extraction.Row(name, name) for name in ("a.png", "b.png")]
    rows_y = [extraction.Row("a.png#0", "a.png", "One."), extraction.Row("b.png#0", "b.png")]
    x, y = (extraction.Embeddings(np.ones((2, 3)), rows, metadata) for rows in (rows_x, rows_y))
    extraction.write(tmp_path, extraction.join("test", x, y), x, y)
    found = report.labels_of(run)
    assert found.x == ["a.png", "b.png"] and found.y == ["One.", "b.png#0"]
    assert found.pictures == [tmp_path / "a.png", tmp_path / "b.png"]
