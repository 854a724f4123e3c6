"""Tests of tables as text, Markdown and CSV, and of comparisons of runs."""

import csv
import doctest
import errno
import io
import json
import os

import matplotlib.image
import numpy as np
import pytest
from matplotlib.container import ErrorbarContainer

from experiments import protocol, report, spec
from sotalign_jax import aligner, data, diagnostics, evaluation, heads, teachers

ROWS = [["procrustes", 21.1, 3, None], ["cca, ridge", np.float32(21.52), 40, "x|y"]]


def _table() -> report.Table:
    return report.Table(["teacher", "MeanR@1", "n", "note"], ROWS, best=["MeanR@1", "n"])


def test_report_doctests_pass():
    assert doctest.testmod(report).failed == 0


def test_table_text_is_aligned_and_marks_the_best():
    header, rule, first, second = str(_table()).splitlines()
    assert header.split() == ["teacher", "MeanR@1", "n", "note"] and set(rule) == {"-", " "}
    assert first.split() == ["procrustes", "21.1", "3", "-"]
    assert second.split() == ["cca,", "ridge", "21.5*", "40*", "x|y"]
    assert first.index("21.1") == second.index("21.5")  # the mark does not shift the digits


def test_table_markdown_aligns_numbers_and_escapes_bars():
    header, rule, first, second = _table().markdown().splitlines()
    assert rule.count("-:|") == 2 and rule.count("|:-") == 2  # numbers are right-aligned
    assert "**40**" in second and "**21.5**" in second and "**21.1**" not in first
    assert "x\\|y" in second  # an unescaped bar would start a new cell
    assert header.count("|") == 5


def test_table_csv_keeps_every_digit():
    header, first, second = csv.reader(io.StringIO(_table().csv()))
    assert header == ["teacher", "MeanR@1", "n", "note"]
    assert first == ["procrustes", "21.1", "3", ""]
    assert second[0] == "cca, ridge" and np.float32(second[1]) == ROWS[1][1]


def test_table_marks_all_ties_and_never_nan():
    rows = [["a", 1.04], ["b", 0.96], ["c", float("nan")]]
    text = str(report.Table(["m", "v"], rows, best=["v"]))
    assert text.count("1.0*") == 2 and "nan*" not in text


def test_table_shows_means_with_their_spread():
    rows = [["a", diagnostics.Mean([1.0, 3.0])], ["b", diagnostics.Mean([2.0])], ["c", None]]
    table = report.Table(["m", "v"], rows, best=["v"])
    shown = [" ".join(line.split()) for line in str(table).splitlines()[2:]]
    assert shown == ["a 2.0 ± 1.4*", "b 2.0*", "c -"]
    assert "**2.0 ± 1.4**" in table.markdown()
    header, a, b, c = csv.reader(io.StringIO(table.csv()))
    assert header == ["m", "v", "v ±"] and b == ["b", "2.0", ""] and c == ["c", "", ""]
    assert a[:2] == ["a", "2.0"] and float(a[2]) == pytest.approx(2**0.5)


def test_table_save_writes_markdown_and_csv(tmp_path):
    _table().save(tmp_path / "deep" / "table1")
    assert (tmp_path / "deep" / "table1.md").read_text() == _table().markdown() + "\n"
    assert (tmp_path / "deep" / "table1.csv").read_text() == _table().csv()


def test_table_latex_escapes_text_and_marks_the_best():
    rows = [["a & b", diagnostics.Mean([1.0, 3.0])], ["c", 1.0]]
    text = report.Table(["m_1", "v"], rows, best=["v"]).latex()
    assert text.startswith(r"\begin{tabular}{lr}") and text.endswith(r"\end{tabular}")
    assert r"m\_1" in text and r"a \& b" in text
    assert r"\textbf{2.0 $\pm$ 1.4}" in text and text.count("textbf") == 1


def test_table_without_rows_has_a_header():
    assert str(report.Table(["a", "b"], [])).splitlines()[0].split() == ["a", "b"]


# --- comparisons ---------------------------------------------------------------------------------

SCORES = {f"test/mean/R@{k}": 10.0 * k for k in (1, 5, 10)}
BETTER = {key: value + 4 for key, value in SCORES.items()}


def compared(**seeds):
    """Returns the comparison table of results per seed, keyed by label."""
    return report.comparison_table(seeds)


FAILED = {"error": "loss: not finite"}


def test_comparison_table_has_means_and_deviations_over_seeds():
    table = compared(sail=[SCORES, FAILED, BETTER], sotalign=[BETTER] * 2, failed=[FAILED])
    assert table.headers == ["method", "R@1", "R@5", "R@10"]
    means = [["sail", 12, 52, 102], ["sotalign", 14, 54, 104], ["failed", None, None, None]]
    assert table.rows == means
    assert [value.spread for value in table.rows[0][1:]] == [pytest.approx(8**0.5)] * 3
    assert "14.0 ± 0.0*" in str(table) and "12.0 ± 2.8 " in str(table)
    single = compared(sail=[SCORES], cca=[BETTER])
    assert "14.0*" in str(single) and "±" not in str(single)


def whole(split="test", n=50, **more):
    """Returns stored scores with the gallery size and the chance level."""
    chance = protocol.chance(n, np.arange(n))
    values = {"rows_x": n, "rows_y": n, **chance, **more}
    scores = {key.replace("test", split): value for key, value in SCORES.items()}
    return scores | {f"{split}/{key}": value for key, value in values.items()}


def files_configs(*labels):
    runs = {name: {"method": name} for name in labels}
    return spec.expand(spec.Spec().change({"data.name": "files", "seeds": (0,), "runs": runs}))


def test_conclude_falls_back_to_validation(tmp_path, capsys):
    configs = files_configs("sail", "cca")
    only_val = {key.replace("test", "val"): value for key, value in SCORES.items()}
    for name, values in [("test", SCORES), ("val", only_val), ("none", {})]:
        folder = tmp_path / name
        folder.mkdir()
        report.conclude(configs, dict.fromkeys(configs, values), folder)
        text = capsys.readouterr().out
        assert "sail" in text and str(folder) in text
        written = {path.name for path in folder.iterdir()}
        plot = set() if name == "none" else {"comparison.png"}
        assert (
            written
            == {".lock", "comparison.md", "comparison.csv", "comparison.tex", "report.html"} | plot
        )
        assert ("val R@1" in text) == (name == "val")


def test_compare_reports_gallery_size_and_chance(tmp_path, capsys):
    usual = {"1k/rows_x": 1000.0, "1k/rows_y": 5001.3, "1k/mean/R@1": 20.0, "1k/mean/R@10": 60.0}
    results = whole(n=2000, **usual, **{"1k/chance/mean/R@1": 0.1, "1k/chance/mean/R@10": 1.0})
    report.compare(files_configs("cca"), {"cca-seed0": results}, tmp_path)
    text = capsys.readouterr().out
    headline, rest = text.split("Test, whole split: 2,000 rows of x, 2,000 rows of y\n")
    assert "1,000 rows of x, 5,001 rows of y\n" in headline
    assert [line.split() for line in headline.splitlines()[-4:]][1:] == [
        ["cca", "20.0*", "60.0*"],
        ["chance", "0.1", "1"],
        [],
    ]
    assert ["chance", "0.05", "0.25", "0.5"] in [line.split() for line in rest.splitlines()]
    assert "*: best of its column\n" in rest
    page = (tmp_path / "report.html").read_text()
    for name in ("comparison", "comparison_1k"):
        title, _, *lines = (tmp_path / f"{name}.md").read_text().splitlines()
        assert title in text and title in page and lines[-1].startswith("| chance")
        assert (tmp_path / f"{name}.csv").read_text().splitlines()[-1].startswith("chance,0.")


@pytest.mark.parametrize(
    "missing", ["test/rows_x", "test/rows_y", "val/rows_x", "val/chance/mean/R@1"]
)
def test_compare_leaves_out_incomplete_sizes_of_galleries(missing, tmp_path, capsys, undrawn):
    results = whole("val") | whole("test")
    del results[missing]
    report.compare(files_configs("cca"), {"cca-seed0": results}, tmp_path)
    shown = capsys.readouterr().out
    assert ("Test, whole split: " in shown) == missing.startswith("val")
    assert ("(R@1 10.0 among 50 " in shown) == missing.startswith("test")


def test_compare_reports_where_calibration_hurts_or_helps(tmp_path, capsys):
    names = ("sail", "cca", "sotalign")
    results = {}
    for name, (plain, calibrated) in zip(names, [(8, 7), (8, 9), (8, 8.01)], strict=True):
        scores = whole("val") | whole("test", **{"calibrated/mean/R@1": calibrated})
        better = {"val/calibrated/mean/R@1": 10.0 * calibrated, "val/mean/R@1": 10.0 * plain}
        better |= {"test/mean/R@1": float(plain), "calibrated": name != "sotalign"}
        results[f"{name}-seed0"] = scores | better
    report.compare(files_configs(*names), results, tmp_path)
    text = capsys.readouterr().out
    assert "hurt on test rows: sail (R@1 8.0 to 7.0).\n" in text
    assert f'Use sotalign_jax.Aligner.load("{tmp_path}/cca-seed0")' in text
    assert "(calibrated R@1 90.0 among 50 rows of x, chance 2)" in text


def test_remarks_name_the_selected_candidate():
    one = {"selected": "mixture", "candidates": {"teacher": 31.2, "mixture": 33.04}}
    (said,) = report.remarks({"align-seed0": SCORES | one}, compared(align=[SCORES]))
    assert "align-seed0 returns mixture" in said and "teacher 31.2, mixture 33.0" in said


def test_remarks_warn_if_validation_is_at_chance():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(400, 5)), rng.normal(size=(400, 4))
    matching = rng.normal(size=(5, 4))
    for given, expected in ((y, True), (x @ matching, False)):
        pairs = data.gallery(x.astype(np.float32), given.astype(np.float32))
        cca = teachers.cca(pairs.x[:200], pairs.y[:200], ridge=1e-3)
        trained = heads.build_heads(5, 4, cca.dim, teacher=cca)
        model = aligner.Aligner(trained, {})
        held = data.gallery(pairs.x[200:], pairs.y[200:])
        scores = evaluation.evaluate(trained.x, trained.y, held)
        scores |= protocol.scores(protocol.embed(model, held))
        one = {f"val/{key}": value for key, value in scores.items()}
        said = report.remarks({"cca-seed0": one}, compared(cca=[one]))
        assert any("validation is at chance for cca-seed0" in line for line in said) == expected


def test_comparison_plot_grows_with_the_number_of_bars():
    zero_shot = {"test/zero_shot/top1": 40.0}
    results = {
        f"a_method_of_a_long_name_{i}": [SCORES | zero_shot, BETTER | zero_shot] for i in range(36)
    }
    tables = compared(**results, failed=[FAILED]), compared(sail=[SCORES])
    plots = map(report.comparison_plot, tables)
    many, one = (matplotlib.image.imread(io.BytesIO(plot)) for plot in plots)
    assert many.shape[0] > 4 * one.shape[0] and many.shape[1] > one.shape[1]
    assert many.shape[0] < 3000


def test_comparison_plot_of_one_seed_has_no_error_bars(monkeypatch):
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


def write_metrics(folder, rows):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_curve_plots_draw_only_recorded_metrics(tmp_path):
    assert report.curve_plots({"cca": [tmp_path]}, report.CURVES) == {}
    folders = {name: [tmp_path / name] for name in ("sail", "align")}
    for (folder,), key in zip(folders.values(), ("loss", "teacher_error"), strict=True):
        rows = [{"step": step, "loss": 1.0, key: 1.0 / step} for step in range(1, 5)]
        write_metrics(folder, rows)
    drawn = report.curve_plots(folders, report.CURVES)
    assert list(drawn) == [report.CURVES["loss"]]
    solver = report.curve_plots(folders, report.SOLVER_CURVES)
    assert list(solver) == ["Marginal error of the teacher's plan."]
    assert all(plot.startswith(b"\x89PNG") for plot in (drawn | solver).values())


def test_compare_folds_solver_diagnostics(tmp_path):
    configs = files_configs("sail", "align")
    rows = [{"step": step, "loss": 1.0, "teacher_error": 1e-3} for step in range(4)]
    write_metrics(tmp_path / "align-seed0", rows)
    report.compare(configs, dict.fromkeys(configs, whole()), tmp_path)
    page = (tmp_path / "report.html").read_text()
    folded = page.split("<summary>Solver diagnostics</summary>")[1].split("</details>")[0]
    assert report.SOLVER_HINT in folded and folded.count("<img alt='Marginal error") == 1
    assert page.count("<img ") == page.count("<img alt='") == 4


def test_curve_plots_of_flat_errors_span_powers_of_ten(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(report, "png", lambda figure: drawn.append(figure) or b"")
    for name, values in {"level": (9.389e-5, 9.391e-5), "zero": (0.0, 0.0)}.items():
        rows = [{"step": step, "teacher_error": value} for step, value in enumerate(values)]
        write_metrics(tmp_path / name, rows)
        report.curve_plots({name: [tmp_path / name]}, report.SOLVER_CURVES)
    assert drawn[0].axes[0].get_ylim() == pytest.approx((1e-5, 1e-4))
    for figure in drawn:
        report.pyplot().close(figure)


def test_write_on_full_disk_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "comparison.png"
    report.write(path, b"before")

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"comparison.png .*No space left"):
        report.write(path, b"after")
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]
