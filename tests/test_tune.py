"""Tests of tuning: grids, choice by validation, failed trials and kills."""

import csv
import doctest
import json
import math
import re
import shlex
import signal

import numpy as np
import pytest
import small_runs
from small_runs import is_one_line

from experiments import main, run, spec, tune
from sotalign_jax import checks, methods


@pytest.fixture
def launch(files, tmp_path, capsys, undrawn):
    def start(*options, module=tune, workdir=tmp_path / "run"):
        argv = [f"--config={files}/config.py:cca", *options, f"--workdir={workdir}"]
        return small_runs.start(module, argv, capsys)

    return start


def results(folder):
    return json.loads((folder / "results.json").read_text())


def best(folder):
    return json.loads((folder / "best.json").read_text())


# --- grids -------------------------------------------------------------------------------------


def test_tune_doctests_pass():
    assert doctest.testmod(tune, optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0


@pytest.mark.parametrize("grid", [{"alpha": 1}, {"alpha": []}, {"start": "random"}])
def test_points_rejects_grids_without_lists(grid):
    with pytest.raises(checks.InputError, match=rf"^grid.*{next(iter(grid))}"):
        tune.points(grid, "sotalign")


def test_points_of_every_methods_grid_are_valid_settings():
    for name, method in methods.METHODS.items():
        points = tune.points(method.grid, name)
        assert len(points) == math.prod(map(len, method.grid.values()))
        listed = {label: {"method": name, **point} for label, point in points.items()}
        expanded = spec.expand(spec.Spec().change({"runs": listed}))
        for one, point in zip(expanded.values(), points.values(), strict=True):
            assert one.method == name
            for key, value in point.items():
                assert one.of(key) == value


# --- the choice --------------------------------------------------------------------------------

RIDGES = "--grid={'teacher_options.ridge': [10.0, 1e-1, 1e-6], 'teacher_options.dim': (2, 6)}"


def test_tune_chooses_best_on_validation_and_tests_it(launch, tmp_path):
    out, error = launch("--method=cca", RIDGES, "--seeds=2")
    assert error is None
    trials = tmp_path / "run" / "trials"
    names = [
        f"teacher_options.ridge={r},teacher_options.dim={d}"
        for r in ("10.0", "0.1", "1e-06")
        for d in (2, 6)
    ]
    scores = {name: results(trials / f"{name}-seed0")["val/mean/R@1"] for name in names}
    assert len(set(scores.values())) > 2
    found = best(tmp_path / "run")
    assert found["trial"] == max(scores, key=scores.get)
    config = json.loads((trials / f"{found['trial']}-seed0" / "config.json").read_text())
    chosen = {f"teacher_options.{key}": config["teacher_options"][key] for key in ("ridge", "dim")}
    assert found["runs"] == {"cca": {"method": "cca", **chosen}}

    rows = list(csv.DictReader((trials / "comparison.csv").read_text().splitlines()))
    assert {row["method"]: float(row["val R@1"]) for row in rows[:-1]} == scores
    assert f"{max(scores.values()):.1f}*" in out

    tested = [results(tmp_path / "run" / "tested-2" / f"cca-seed{seed}") for seed in (0, 1)]
    assert tested[0]["val/mean/R@1"] == max(scores.values())  # the same run, also evaluated on test
    mean = np.mean([one["test/mean/R@1"] for one in tested])
    assert f"{mean:.1f} ± " in out

    # The printed flags reproduce the run, and a second start prints the same.
    flag = re.search("Best settings of cca: (.*)", out)[1]
    _, error = launch(*shlex.split(flag), module=main, workdir=tmp_path / "again")
    assert error is None and results(tmp_path / "again") == tested[0]
    assert launch("--method=cca", RIDGES, "--seeds=2") == (out, None)


def test_tune_trials_never_read_the_test_split(launch, files, tmp_path):
    for name in ("test_x", "test_y"):
        (files / f"{name}.npy").write_bytes(b"not an array")
    (files / "zero_shot_x.npy").unlink()
    zero_shot = [
        f"--config.data.files.zero_shot_{p}={files}/zero_shot_{p}.npy"
        for p in ("x", "labels", "prompts")
    ]
    # This holds even if the grid asks for the test split.
    grid = "--grid={'teacher_options.ridge': [0.1, 0.01], 'data.test': [True]}"
    out, error = launch("--method=cca", grid, *zero_shot, "--seeds=0")
    assert error is None and "Best settings of cca" in out
    trials = [path.parent for path in (tmp_path / "run" / "trials").glob("*/config.json")]
    assert len(trials) == 2
    for folder in trials:
        assert not [key for key in results(folder) if key.startswith("test")]
        assert json.loads((folder / "config.json").read_text())["data"]["test"] is False
    # An unreadable test split is reported before the trials.
    new = tmp_path / "new"
    _, error = launch("--method=cca", grid, *zero_shot, workdir=new)
    assert is_one_line(error) and "data: files.test_x: " in error and not new.exists()
    _, error = launch("--method=cca", grid, *zero_shot, "--seeds=1")
    assert is_one_line(error) and "data: files.test_x: " in error


def test_best_prefers_the_first_tie_and_skips_failed_trials():
    scores = {"a": (1.0, 2.0), "b": (3.0, 3.0), "c": (2.0, 4.0), "d": (9.0,)}
    ended = {name: [{run.SCORE: score} for score in seeds] for name, seeds in scores.items()}
    assert tune.best({**ended, "d": [*ended["d"], {"error": "why"}]}) == "b"
    assert tune.best(ended) == "d"
    with pytest.raises(checks.InputError, match=r"^grid .* why$"):
        tune.best({"d": [{"error": "why"}]})


def test_tune_chooses_by_the_mean_over_seeds(launch, tmp_path):
    out, error = launch("--method=cca", RIDGES, "--seeds=0", "--config.seeds=(0,1)")
    assert error is None and "±" in out
    ended = results(tmp_path / "run" / "trials")
    scores = {
        name: np.mean([ended[f"{name}-seed{seed}"]["val/mean/R@1"] for seed in (0, 1)])
        for name in (key.removesuffix("-seed0") for key in ended if key.endswith("-seed0"))
    }
    assert len(scores) == 6 and best(tmp_path / "run")["trial"] == max(scores, key=scores.get)


def test_tune_lists_failed_trials(launch, tmp_path):
    options = (
        "--method=sail",
        "--grid={'train.learning_rate': [1e38, 1e-3]}",
        "--config.train.steps=4",
    )
    out, error = launch(*options, "--seeds=1")
    assert error is None
    assert "train.learning_rate=1e+38-seed0 failed: loss " in out
    assert best(tmp_path / "run")["trial"] == "train.learning_rate=0.001"
    assert launch(*options, "--seeds=1") == (out, None)  # a second start does not repeat it


def test_tune_lists_settings_that_the_data_rule_out(launch, tmp_path):
    out, error = launch("--method=cca", "--grid={'teacher_options.dim': [11, 5]}", "--seeds=0")
    assert error is None and "teacher_options.dim=11-seed0 failed: teacher: dim must be " in out
    options = ("--method=cca", "--grid={'teacher_options.dim': [11, 12]}")
    _, error = launch(*options, workdir=tmp_path / "other")
    assert is_one_line(error) and "grid " in error and "teacher: dim must be " in error


def test_tune_lists_options_that_the_pools_rule_out(launch):
    options = ("--method=nnclr", "--grid={'k': [5, 500]}", "--config.train.steps=2")
    out, error = launch(*options, "--seeds=0")
    assert error is None and "got 500" in out


def test_best_skips_points_with_a_failed_seed():
    some = {"a": [{run.SCORE: 9.0}, {"error": "loss"}], "b": [{run.SCORE: 1.0}]}
    assert tune.best(some) == "b"
    with pytest.raises(checks.InputError, match=r"^grid .* loss$"):
        tune.best({"a": some["a"]})


def test_tune_lists_fitted_methods_that_fail(launch):
    sizes = {"eigenvectors": 8, "hidden": 8, "batch": 64, "epochs": 1, "mmd_epochs": 1}
    options = ("--method=sue", "--grid={'mmd_learning_rate': [1e38, 1e-3]}", "--seeds=0")
    options += tuple(f"--config.sue.{name}={value}" for name, value in sizes.items())
    out, error = launch(*options)
    assert error is None and "mmd_learning_rate=1e+38-seed0 failed: loss of the " in out


def test_tune_accepts_runs_of_the_config(launch, tmp_path):
    options = (
        "--config.runs={'narrow': {'method': 'cca', 'teacher_options.dim': 3}}",
        "--grid={'teacher_options.ridge': [0.1, 0.01]}",
        "--seeds=1",
    )
    out, error = launch(*options, "--method=narrow")
    assert error is None and "Best settings of narrow" in out
    found = best(tmp_path / "run")
    trial = tmp_path / "run" / "trials" / f"{found['trial']}-seed0"
    stored = json.loads((trial / "config.json").read_text())["teacher_options"]
    assert stored["dim"] == 3
    assert stored["ridge"] == found["runs"]["narrow"]["teacher_options.ridge"]
    _, error = launch("--method=narrow", options[0], "--grid={'teacher_options.ridge': [0.5, 0.2]}")
    assert is_one_line(error) and "error: workdir " in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method=sial"], "method must be one of "),
        (
            ["--method=sotalign", "--grid={'alhpa': [1]}"],
            "unknown setting 'sotalign.alhpa'; did you mean",
        ),
        (
            ["--method=sotalign", "--grid={'alpha': [1, 'x']}"],
            "sotalign.alpha must be float",
        ),
        (["--grid={'alpha': [1, -1]}"], "sotalign.alpha must be "),
        (["--method=cca", "--grid={'train.seed': [1]}"], "unknown setting 'train.seed'"),
        (["--method=cca", "--grid=ridge"], "flag --grid=ridge"),
        (["--method=cca", "--config.seeds=()"], "error: seeds "),
        (["--method=cca", "--config.train.steps=0"], "error: train.steps must be "),
        (["--method=cca", "--config.data.files.val_x=", "--config.data.files.val_y="], "no valid"),
        (["--method=cca", "--config.data.files.x=gone.npy"], "files.x: gone.npy "),
        (["--method=cca", "--seeds=-1"], "flag --seeds=-1"),
    ],
)
def test_tune_rejects_bad_options_in_one_line(launch, tmp_path, options, message):
    _, error = launch(*options)
    assert is_one_line(error) and message in error
    assert not (tmp_path / "run").exists()


def test_tune_checks_partial_configs_before_reading_data(launch, files, tmp_path):
    for written, message in [
        ({"data": {"tset": False}}, "'data.tset'"),
        ({}, "teacher must be "),
    ]:
        head = "from experiments import spec\ndef get_config(_):\n"
        (files / "config.py").write_text(f"{head} return spec.Spec().change({written})")
        _, error = launch("--method=cca", "--grid={'teacher': ['cac']}")
        assert is_one_line(error) and message in error
        assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_tune_killed_in_a_trial_resumes_identically(files, tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"

    def start(workdir):
        options = [
            f"--config={files}/config.py",
            "--method=sail",
            "--grid={'train.learning_rate': [1e-2, 1e-3]}",
            "--seeds=1",
            "--config.train.steps=12",
            f"--workdir={workdir}",
        ]
        return small_runs.popen("tune", options, compiled=tmp_path / "compiled")

    second = "trials/train.learning_rate=0.001-seed0"
    middle = run / second / "checkpoints" / "3"
    small_runs.stop_when(start(run), middle.exists, signal.SIGKILL)
    assert not (run / "best.json").exists()
    printed = []
    for workdir in (run, whole):
        process = start(workdir)
        out, err = process.communicate()
        assert process.returncode == 0, err
        printed.append(out.replace(str(workdir), ""))
        assert "tune sail: 2/2 runs, val R@1" in err
        assert ("tune sail: 1/2" in err) == (workdir == whole)  # the first trial was finished
    assert printed[0] == printed[1]
    for name in ("best.json", "trials/comparison.csv", f"{second}/metrics.jsonl"):
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name
