"""Comparisons: the table, the plot, and many runs that are interrupted and go on."""

import csv
import io
import json
import signal

import matplotlib.image
import pytest
import small_runs
from small_runs import is_one_line

from experiments import batch, compare, main, settings

pytestmark = pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")

SCORES = {f"test/mean/R@{k}": 10.0 * k for k in (1, 5, 10)}
BETTER = {key: value + 4 for key, value in SCORES.items()}


@pytest.fixture
def launch(files, tmp_path, capsys):
    def start(*options, module=compare):
        argv = [f"--config={files}/config.py", *options, f"--workdir={tmp_path}/run"]
        return small_runs.start(module, argv, capsys)

    return start


# --- tables and plots --------------------------------------------------------------------------


def test_the_table_has_means_and_deviations_over_seeds():
    results = {"sail": {60: [SCORES, BETTER]}, "sotalign": {60: [BETTER] * 2}}
    table = compare.comparison_table(results)
    assert table.headers == ("method", "R@1", "R@5", "R@10")
    assert table.rows == (("sail", 12, 52, 102), ("sotalign", 14, 54, 104))
    assert [value.spread for value in table.rows[0][1:]] == [pytest.approx(8**0.5)] * 3
    assert "14.0 ± 0.0*" in str(table) and "12.0 ± 2.8 " in str(table)
    single = compare.comparison_table({"sail": {60: [SCORES]}, "cca": {60: [BETTER]}})
    assert "14.0*" in str(single) and "±" not in str(single)


def test_several_numbers_of_pairs_are_groups_of_columns():
    results = {"sail": {500: [SCORES], 2000: [BETTER]}, "cca": {500: [BETTER], 2000: []}}
    table = compare.comparison_table(results)
    assert table.headers == ("method", "500: R@1", "500: R@10", "2000: R@1", "2000: R@10")
    assert table.rows == (("sail", 10, 100, 14, 104), ("cca", 14, 104, None, None))


def test_reports_fall_back_to_validation(tmp_path):
    runs = [settings.Settings(method=name) for name in ("sail", "cca")]
    only_val = {key.replace("test", "val"): value for key, value in SCORES.items()}
    for name, values in [("test", SCORES), ("val", only_val), ("none", {})]:
        folder = tmp_path / name
        folder.mkdir()
        text = compare.report(runs, [batch.Outcome(values)] * 2, folder)
        assert "sail" in text and str(folder) in text
        written = {path.name for path in folder.iterdir()}
        plot = set() if name == "none" else {"comparison.png"}
        assert written == {"comparison.md", "comparison.csv"} | plot


def test_the_plot_grows_with_the_number_of_bars(tmp_path):
    zero_shot = {"test/zero_shot/top1": 40.0}
    results = {
        f"a_method_of_a_long_name_{i}": {n: [SCORES | zero_shot, BETTER | zero_shot] for n in pairs}
        for i in range(12)
        for pairs in [(500, 1000, 2000)]
    }
    results["failed"] = {500: [], 1000: [], 2000: []}
    compare.comparison_plot(results, tmp_path / "many.png")
    compare.comparison_plot({"sail": {500: [SCORES]}}, tmp_path / "one.png")
    many, one = (matplotlib.image.imread(tmp_path / f"{name}.png") for name in ("many", "one"))
    assert many.shape[0] > 4 * one.shape[0] and many.shape[1] > one.shape[1]
    assert many.shape[0] < 3000


# --- runs --------------------------------------------------------------------------------------


def test_methods_pairs_and_seeds_in_one_table(launch, tmp_path):
    options = (
        "--config.methods=('procrustes','cca','stiff')",
        "--config.variants.stiff=cca",
        "--config.overrides={'stiff': {'teacher': {'ridge': 10.0}}}",
        "--config.pairs=(30,60)",
        "--config.seeds=(0,1)",
    )
    out, error = launch(*options)
    assert error is None
    run = tmp_path / "run"
    results = json.loads((run / "results.json").read_text())
    assert len(results) == 12 and list(results)[:2] == [
        "procrustes-30pairs-seed0",
        "procrustes-30pairs-seed1",
    ]
    assert (run / "stiff-60pairs-seed1" / "aligner").exists()
    rows = list(csv.DictReader(io.StringIO((run / "comparison.csv").read_text())))
    assert [row["method"] for row in rows] == ["procrustes", "cca", "stiff"]
    scores = [results[f"stiff-60pairs-seed{seed}"]["test/mean/R@1"] for seed in (0, 1)]
    assert float(rows[2]["60: R@1"]) == pytest.approx(sum(scores) / 2)
    spread = abs(scores[0] - scores[1]) / 2**0.5
    assert float(rows[2]["60: R@1 ±"]) == pytest.approx(spread)
    assert "60: R@1" in out and "±" in out and (run / "comparison.md").exists()
    # Both commands make the same runs.
    assert launch(*options, module=main) == (out, None)


def test_a_run_that_fails_is_named_and_leaves_the_others_alone(launch, tmp_path):
    options = (
        "--config.methods=('wild','cca','narrow')",
        "--config.variants={'wild': 'sail', 'narrow': 'cca'}",
        "--config.overrides={'wild': {'train': {'learning_rate': 1e38}}, "
        "'narrow': {'teacher': {'dim': 11}}}",
    )
    out, error = launch(*options)
    assert is_one_line(error) and "2 of 3 runs failed, first wild-seed0: loss: not finite" in error
    rows = out.splitlines()
    assert any(row.startswith("wild") and "-" in row for row in rows)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["cca-seed0"]["test/mean/R@1"] > 0
    assert "not finite" in results["wild-seed0"]["error"]
    assert "dim: 11 directions asked" in results["narrow-seed0"]["error"]
    before = small_runs.contents(tmp_path / "run" / "wild-seed0")
    assert launch(*options) == (out, error)
    assert small_runs.contents(tmp_path / "run" / "wild-seed0") == before


@pytest.mark.slow
def test_a_killed_comparison_goes_on_where_it_stopped(files, tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"

    def start(workdir):
        options = [
            f"--config={files}/config.py",
            "--config.methods=('cca','sail','procrustes')",
            "--config.seeds=(0,1)",
            f"--workdir={workdir}",
        ]
        return small_runs.popen("compare", options, compiled=tmp_path / "compiled")

    middle = run / "sail-seed0" / "checkpoints" / "3"
    small_runs.stop_when(start(run), middle.exists, signal.SIGKILL)
    first = (run / "cca-seed0" / "environment.json").read_bytes()
    assert not (run / "procrustes-seed0").exists()
    for workdir in (run, whole):
        process = start(workdir)
        _, err = process.communicate()
        assert process.returncode == 0, err
        assert "compare: 6/6 runs, 00:00 left" in err
        assert ("compare: 1/6" in err) == (workdir == whole)  # finished runs are not made again
    assert (run / "cca-seed0" / "environment.json").read_bytes() == first
    for name in ("results.json", "comparison.csv", "sail-seed0/metrics.jsonl"):
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name
