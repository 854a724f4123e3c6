"""Tests of the diagnose command, run in this process."""

import csv
import json
import os

import numpy as np
import pytest
import small_runs
from small_runs import is_one_line

from experiments import diagnose
from sotalign_jax import diagnostics


@pytest.fixture
def start(files, tmp_path, capsys):
    """Returns a function that diagnoses the small files."""

    def run(*options, workdir=tmp_path / "out"):
        argv = [f"--config={files}/config.py", "--quick", f"--workdir={workdir}"]
        return small_runs.start(diagnose, [*argv, *options], capsys)

    return run


def rows(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_diagnose_prints_and_saves_its_findings(start, files, tmp_path):
    text, error = start()
    assert error is None
    out = tmp_path / "out"
    names = ["config.json", "diagnosis.md", "encoders.csv", "environment.json", "inputs.json"]
    assert sorted(os.listdir(out)) == [*names, "plans.csv", "pool.csv"]
    report = (out / "diagnosis.md").read_text(encoding="utf-8")
    for question in ("worth aligning?", "too far from the pairs?", "plans converge?"):
        assert question in text and question in report
    assert "pairs_x 60 x 12" in text and "pool_y 120 x 10" in text and str(out) in text

    # The numbers are those of the library on the same rows.
    (ours, chance, *paper) = rows(out / "encoders.csv")
    assert float(chance["mutual 10-NN (%)"]) == pytest.approx(100 * 10 / 59)
    assert len(paper) == 6 and float(ours["mutual 10-NN (%)"]) > 40
    pools = {row["side"]: row for row in rows(out / "pool.csv")}
    assert pools["x"]["rows"] == "30"
    assert set(pools) == {"x", "y"}
    plans = rows(out / "plans.csv")
    assert [row["epsilon"] for row in plans] == [f"{e:g}" for e in diagnose.LADDER]
    assert {row["chosen for"]: row["epsilon"] for row in plans if row["chosen for"]} == {
        "student": "0.05",
        "teacher": "0.005",
    }
    # The two views share a latent variable. Gaussian features are themselves random directions.
    assert "YES: as alike as" in text
    assert text.count("is CANNOT TELL (on 30 rows even random directions look like") == 2

    # A second run writes the same bytes. Another config leaves the folder unchanged.
    before = small_runs.contents(out)
    assert start() == (text, None)
    assert small_runs.contents(out) == before
    printed, error = start("--config.seed=1")
    assert printed == "" and is_one_line(error)
    assert error.startswith(f"error: workdir {out} ") and "seed=0" in error
    assert json.loads(before["config.json"])["data"]["files"]["x"] == str(files / "x.npy")


def test_diagnose_reports_shuffled_pairs_and_far_pool(start, files, tmp_path):
    rng = np.random.default_rng(1)
    np.save(files / "shuffled.npy", np.load(files / "y.npy")[rng.permutation(300)])
    np.save(files / "far.npy", np.abs(rng.normal(size=(200, 10))) + 1)
    given = {"y": "shuffled", "unpaired_x": "x", "unpaired_y": "far"}
    options = [f"--config.data.files.{name}={files}/{file}.npy" for name, file in given.items()]
    text, error = start(*options, "--config.data.n_pairs=100")
    assert error is None
    assert "NO: no better than chance; check that row i of x matches row i of y" in text
    assert "y is FAR" in text or "y is AS FAR AS RANDOM" in text
    assert "pool_x 300 x 12" in text and "pool_y 200 x 10" in text


def test_diagnose_without_unpaired_rows_reads_only_encoders(start, tmp_path):
    text, error = start("--config.data.n_pairs=300")
    assert error is None and text.count("NOT MEASURED") == 1 and "plans" in text
    assert not (tmp_path / "out" / "pool.csv").exists()
    assert "fewer pairs than there are rows (data.n_pairs)" in text
    assert text.count("## ") == 1


def test_diagnose_rejects_bad_options_and_writes_nothing(start, files, tmp_path):
    np.save(files / "nan.npy", np.full((300, 10), np.nan))
    cases = {
        "--config.data.files.x=gone.npy": "data: files.x: gone.npy ",
        "--config.data.n_pairs=301": "data: n_pairs must be ",
        "--config.data.n_pairs=3": "data.n_pairs must be ",
        f"--config.data.files.y={files}/nan.npy": "data: y has NaN",
        "--config.sotalign.epsilon_star=0": "sotalign.epsilon_star",
        "--config.sotalign.epsilon=-1": "sotalign.epsilon",
        "--config.teacher_options.ridge=-0.1": "teacher_options.ridge",
        "extra": "unexpected argument 'extra'",
    }
    for option, message in cases.items():
        text, error = start(option)
        assert text == "" and is_one_line(error) and error.startswith(f"error: {message}")
    assert not (tmp_path / "out").exists()
    _, error = start(workdir=files)
    assert error.startswith(f"error: workdir {files} ")


@pytest.mark.parametrize(
    ("score", "rows", "answer"),
    [
        (0.012, 1024, "NO"),
        (0.03, 1024, "DOUBTFUL"),
        (0.10, 1024, "WORTH TRYING"),
        (0.141, 1024, "YES"),
        (0.12, 100, "NO"),  # a tenth is chance on a hundred rows
        (0.30, 100, "YES"),
        (0.40, 30, "CANNOT TELL"),  # chance is a third, with a large variance
        (0.80, 30, "YES"),
    ],
)
def test_read_encoders_compares_with_chance(score, rows, answer):
    reading = diagnose.read_encoders([score], rows)
    assert reading.answer.split(":")[0] == answer
    assert f"On {rows:,} pairs, {100 * score:.1f} %" in reading.reason


@pytest.mark.parametrize(
    ("pool", "answer"),
    [
        (0.0105, "LIKE THE PAIRS"),
        (0.03, "NEAR (28 % of the way to random directions)"),
        (0.06, "NEAR (59 % of the way to random directions)"),
        (0.08, "FAR (80 % of the way to random directions)"),
        (0.12, "AS FAR AS RANDOM (120 % of the way to random directions)"),
    ],
)
def test_read_pool_compares_with_noise_and_random_directions(pool, answer):
    def mean(value, spread):
        return diagnostics.Mean([value - spread, value, value + spread])

    shift = diagnostics.Shift(mean(pool, 0.001), mean(0.01, 0.001), mean(0.1, 0.001), 500)
    assert diagnose.read_pool({"x": shift}).answer == f"x is {answer}"
    blurred = shift._replace(noise=mean(0.09, 0.01))
    told = "AS FAR AS RANDOM (farther: " if pool > 0.11 else "CANNOT TELL (on 500 rows"
    assert diagnose.read_pool({"x": blurred}).answer.startswith(f"x is {told}")


def test_read_plans_judges_the_chosen_epsilons():
    options = {"epsilon": 0.05, "epsilon_star": 0.001}

    def reading(converges):
        plans = [
            diagnostics.Convergence(e, 1e-4 if converges(e) else 0.02, 40, converges(e), 3.0)
            for e in diagnose.LADDER
        ]
        return diagnose.read_plans(plans, 256, options).answer

    assert reading(lambda e: e > 0.0007) == (
        "YES: epsilon = 0.05 in 40 iterations, epsilon* = 0.001 in 40; "
        "the smallest epsilon that converges within 500 iterations is 0.001"
    )
    assert reading(lambda e: e > 0.004) == (
        "NO: not at 0.001 (error 2.0e-02); "
        "the smallest epsilon that converges within 500 iterations is 0.005"
    )
    assert "no epsilon converges within 500 iterations" in reading(lambda e: False)
