"""Tuning: grids, the choice by validation alone, failures, and kills."""

import doctest
import json
import shlex
import signal

import numpy as np
import pytest
import small_runs
from small_runs import is_one_line

from experiments import config as config_lib
from experiments import main, run, tune
from sotalign_jax import checks, methods

pytestmark = pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")


@pytest.fixture
def launch(files, tmp_path, capsys):
    def start(*options, module=tune, workdir=tmp_path / "run"):
        argv = [f"--config={files}/config.py:cca", *options, f"--workdir={workdir}"]
        return small_runs.start(module, argv, capsys)

    return start


def results(folder):
    return json.loads((folder / "results.json").read_text())


# --- grids -------------------------------------------------------------------------------------


def test_examples():
    assert doctest.testmod(tune).failed == 0


def test_grids_are_read_in_order():
    text = "k=1,2; heads.init=random,teacher ;flag=True,None;"
    assert tune.parse_grid(text, "sail") == {
        "k": (1, 2),
        "heads.init": ("random", "teacher"),
        "flag": (True, None),
    }
    own = methods.SOTAlign.grid
    assert list(tune.parse_grid("own;train.steps=1", "sotalign")) == [*own, "train.steps"]
    assert tune.points({}) == {0: {}}


@pytest.mark.parametrize("text", ["alpha", "alpha=", "=1", "alpha=1,", "a=1;a=2", "a=1,1"])
def test_grids_that_make_no_sense(text):
    with pytest.raises(checks.InputError, match=r"^grid: "):
        tune.parse_grid(text, "sotalign")


def test_a_limit_chooses_the_same_points_every_time():
    grid = {"a": tuple(range(5)), "b": tuple(range(7))}
    every = tune.points(grid)
    assert list(every) == list(range(35)) and every[8] == {"a": 1, "b": 1}
    few, more = tune.points(grid, 6), tune.points(grid, 12)
    assert len(few) == 6 and few.items() <= more.items() <= every.items()
    assert list(few) == sorted(few) and len({point["a"] for point in more.values()}) > 1
    assert tune.points(grid, 99) == every


def test_every_method_can_be_tuned_by_its_own_grid():
    config = config_lib.default()
    for name, method in methods.METHODS.items():
        grid = tune.parse_grid("own", name)
        assert grid == dict(method.grid)
        for point in tune.points(grid).values():
            changes = tune.changes_of(config, name, point)
            (one,) = tune.runs_of(config, {name: changes}).values()
            assert one.method == name
            assert all(one[name][key] == value for key, value in point.items())


# --- the choice --------------------------------------------------------------------------------

RIDGES = "--grid=teacher.ridge=10.0,1e-1,1e-6;teacher.dim=2,6"


def test_the_best_on_validation_is_chosen_and_tested(launch, tmp_path):
    out, error = launch("--method=cca", RIDGES, "--seeds=2")
    assert error is None
    folder = tmp_path / "run" / "cca"
    trials = [folder / f"trial-{i:03d}-seed0" for i in range(6)]
    scores = [results(trial)["val/mean/R@1"] for trial in trials]
    assert len(set(scores)) > 2
    best = json.loads((folder / "best.json").read_text())
    assert best["trial"] == scores.index(max(scores)) and best["trials"] == 6
    assert best["val/mean/R@1"] == max(scores)
    config = json.loads((trials[best["trial"]] / "config.json").read_text())
    assert best["settings"] == {
        f"teacher.{key}": config["teacher"][key] for key in ("ridge", "dim")
    }

    lines = (folder / "trials.csv").read_text().splitlines()
    assert lines[0] == "trial,teacher.ridge,teacher.dim,val R@1"
    shown = [float(line.split(",")[-1]) for line in lines[1:]]
    assert shown == sorted(scores, reverse=True)
    assert f"{max(scores):.2f}*" in out

    tested = [results(folder / f"test-{best['trial']:03d}-seed{seed}") for seed in (0, 1)]
    assert tested[0]["val/mean/R@1"] == max(scores)  # the same run, now with a test
    mean = np.mean([one["test/mean/R@1"] for one in tested])
    assert f"{mean:.1f} ± " in out

    # What was printed makes the same run.
    assert best["flag"] in out
    _, error = launch(*shlex.split(best["flag"]), module=main, workdir=tmp_path / "again")
    assert error is None and results(tmp_path / "again") == tested[0]


def test_trials_never_see_the_test_split(launch, files, tmp_path):
    for name in ("test_x", "test_y"):
        (files / f"{name}.npy").write_bytes(b"not an array")
    (files / "zero_shot_x.npy").unlink()
    zero_shot = [
        f"--config.data.files.zero_shot_{p}={files}/zero_shot_{p}.npy"
        for p in ("x", "labels", "prompts")
    ]
    # Not even when the grid asks for it.
    grid = "--grid=teacher.ridge=0.1,0.01;data.test=True"
    out, error = launch("--method=cca", grid, *zero_shot, "--seeds=0")
    assert error is None and "cca at its best" in out
    for folder in (tmp_path / "run" / "cca").glob("trial-*"):
        assert not [key for key in results(folder) if key.startswith("test")]
        assert json.loads((folder / "config.json").read_text())["data"]["test"] is False
    # Whether it can be read is known before the trials.
    new = tmp_path / "new"
    _, error = launch("--method=cca", grid, *zero_shot, workdir=new)
    assert is_one_line(error) and "data: files.test_x: " in error and not new.exists()
    _, error = launch("--method=cca", grid, *zero_shot, "--seeds=1")
    assert is_one_line(error) and "1 of 1 runs failed, first cca-seed0: " in error


def test_of_equal_trials_the_first_is_chosen():
    scores = [1.0, 3.0, 3.0]
    ended = {f"trial-{i:03d}-seed0": {run.SCORE: s} for i, s in enumerate(scores)}
    ended["trial-009-seed0"] = {"error": "why"}
    trials = tune.ranked({i: {"k": i} for i in (9, 0, 1, 2)}, ended)
    assert [trial.number for trial in trials] == [1, 2, 0, 9]
    assert "why" in str(tune.trials_table(trials))


def test_the_mean_over_seeds_decides(launch, tmp_path):
    out, error = launch("--method=cca", RIDGES, "--seeds=0", "--config.seeds=(0,1)")
    assert error is None and "±" in out
    folder = tmp_path / "run" / "cca"
    scores = [
        np.mean([results(folder / f"trial-{i:03d}-seed{s}")["val/mean/R@1"] for s in (0, 1)])
        for i in range(6)
    ]
    assert json.loads((folder / "best.json").read_text())["trial"] == int(np.argmax(scores))


def test_a_trial_that_fails_is_a_row(launch, tmp_path):
    options = ("--method=sail", "--grid=train.learning_rate=1e38,1e-3", "--config.train.steps=4")
    out, error = launch(*options, "--seeds=1")
    assert error is None
    assert "loss: " in out and "1e+38" in out
    assert json.loads((tmp_path / "run" / "sail" / "best.json").read_text())["trial"] == 1
    before = small_runs.contents(tmp_path / "run" / "sail" / "trial-000-seed0")
    assert launch(*options, "--seeds=1") == (out, None)  # and stays one
    assert small_runs.contents(tmp_path / "run" / "sail" / "trial-000-seed0") == before


def test_settings_that_the_data_do_not_allow_are_rows(launch, tmp_path):
    out, error = launch("--method=cca", "--grid=teacher.dim=11,5", "--seeds=0")
    assert error is None and "teacher: dim: is 11" in out
    options = ("--method=cca", "--grid=teacher.dim=11,12")
    _, error = launch(*options, workdir=tmp_path / "other")
    assert is_one_line(error) and "every trial of cca failed, first teacher: dim" in error


def test_methods_that_cannot_use_the_data_or_cannot_be_fitted_are_rows(launch, tmp_path):
    out, error = launch("--method=nnclr", "--grid=k=5,500", "--seeds=0", "--config.train.steps=2")
    assert error is None and "k: is 500" in out
    sizes = {"eigenvectors": 8, "hidden": 8, "batch": 64, "epochs": 1, "mmd_epochs": 1}
    options = ("--method=sue", "--grid=mmd_learning_rate=1e38,1e-3", "--seeds=0")
    options += tuple(f"--config.sue.{name}={value}" for name, value in sizes.items())
    for _ in range(2):  # found, and remembered
        out, error = launch(*options, workdir=tmp_path / "fits")
        assert error is None and "mmd: " in out


def test_runs_can_be_tuned_and_share_a_folder(launch, tmp_path):
    options = (
        "--config.runs={'narrow': {'method': 'cca', 'teacher.dim': 3}}",
        "--grid=teacher.ridge=0.1,0.01",
        "--seeds=1",
    )
    out, error = launch(*options, "--method=cca,narrow")
    assert error is None and "narrow at its best" in out
    best = json.loads((tmp_path / "run" / "narrow" / "best.json").read_text())
    trial = tmp_path / "run" / "narrow" / f"trial-{best['trial']:03d}-seed0"
    teacher = json.loads((trial / "config.json").read_text())["teacher"]
    assert (teacher["dim"], teacher["ridge"]) == (3, best["settings"]["teacher.ridge"])
    assert launch(*options, "--method=procrustes")[1] is None
    # More points of the same grid may follow, another grid may not.
    assert launch(*options, "--method=cca", "--limit=1")[1] is None
    _, error = launch("--method=cca", options[0], "--grid=teacher.ridge=0.5")
    assert is_one_line(error) and "error: workdir: " in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "method: "),
        (["--method=sial"], "method: "),
        (["--method=sotalign", "--grid=alhpa=1"], "unknown setting 'sotalign.alhpa'; did you mean"),
        (["--method=sotalign", "--grid=alpha=1,x"], "sotalign.alpha: must be float, got 'x'"),
        (["--method=sotalign", "--grid=alpha=1,-1"], "sotalign.alpha: "),
        (["--method=cca", "--grid=train.seed=1"], "unknown setting 'train.seed'"),
        (["--method=cca", "--grid=ridge"], "grid: "),
        (["--method=cca", "--config.seeds=()"], "error: seeds: "),
        (["--method=cca", "--config.train.steps=0"], "error: train.steps: "),
        (["--method=cca", "--config.data.files.val_x=", "--config.data.files.val_y="], "no valid"),
        (["--method=cca", "--config.data.files.x=gone.npy"], "files.x: gone.npy: "),
        (["--method=cca", "--limit=0"], "flag --limit=0"),
    ],
)
def test_mistakes_end_in_one_line(launch, tmp_path, options, message):
    _, error = launch(*options)
    assert is_one_line(error) and message in error
    assert not (tmp_path / "run").exists()


def test_a_config_written_from_nothing_is_checked_before_it_is_read(launch, files, tmp_path):
    for written, message in [({"data": {"tset": False}}, "'data.tset'"), ({}, "teacher.kind: ")]:
        head = "from ml_collections import ConfigDict\ndef get_config(_):\n"
        (files / "config.py").write_text(f"{head} return ConfigDict({written})")
        _, error = launch("--method=cca", "--grid=teacher.kind=cac")
        assert is_one_line(error) and message in error
        assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_killed_in_a_trial_it_ends_the_same(files, tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"

    def start(workdir):
        options = [
            f"--config={files}/config.py",
            "--method=sail",
            "--grid=train.learning_rate=1e-2,1e-3",
            "--seeds=1",
            "--config.train.steps=12",
            f"--workdir={workdir}",
        ]
        return small_runs.popen("tune", options, compiled=tmp_path / "compiled")

    middle = run / "sail" / "trial-001-seed0" / "checkpoints" / "3"
    small_runs.stop_when(start(run), middle.exists, signal.SIGKILL)
    assert not (run / "sail" / "best.json").exists()
    printed = []
    for workdir in (run, whole):
        process = start(workdir)
        out, err = process.communicate()
        assert process.returncode == 0, err
        printed.append(out.replace(str(workdir), ""))
        assert "tune sail: 2/2 runs, MeanR@1" in err
        assert ("tune sail: 1/2" in err) == (workdir == whole)  # the first was done
    assert printed[0] == printed[1]
    for name in ("best.json", "trials.csv", "trial-001-seed0/metrics.jsonl"):
        first, second = (folder / "sail" / name for folder in (run, whole))
        assert first.read_bytes() == second.read_bytes(), name
