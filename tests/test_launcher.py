"""Tests of the launcher in its own processes: kills, signals and exit codes."""

import json
import os
import re
import signal

import pytest
import small_runs

from experiments import diagnose, main, tune

STEPS = 90
"""Enough steps to stop a run at several moments, even if this process polls slowly."""
QUICKSTART = small_runs.ROOT / "experiments/configs/quickstart.py"
SAME = ("config.json", "metrics.jsonl", "results.json", "aligner/heads.safetensors")

FROM_ML_COLLECTIONS = pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return small_runs.write(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def start(files):
    """Returns a function that starts the launcher. Processes share a compilation cache."""

    def popen(*options, compile_anew=False):
        compiled = None if compile_anew else files / "compiled"
        return small_runs.popen("main", list(options), compiled=compiled)

    return popen


@pytest.fixture(scope="module")
def uninterrupted(files, start):
    """Returns the folder and the output of an uninterrupted run."""
    workdir = files / "uninterrupted"
    process = start(*command(files, workdir))
    out, err = process.communicate()
    assert process.returncode == 0, err
    return workdir, out


def command(files, workdir, steps=STEPS):
    return (
        f"--config={files}/config.py",
        f"--config.train.steps={steps}",
        f"--workdir={workdir}",
    )


def lines(workdir):
    path = workdir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def checkpoints(workdir):
    folder = workdir / "checkpoints"
    return os.listdir(folder) if folder.exists() else []


def saved(workdir):
    """Returns the last step with a complete checkpoint."""
    return max((int(name) for name in checkpoints(workdir) if name.isdigit()), default=0)


def saving(workdir):
    """Returns the steps whose checkpoints are being written."""
    names = [name for name in checkpoints(workdir) if ".orbax-checkpoint-tmp" in name]
    return [int(name.split(".")[0]) for name in names]


def test_main_killed_repeatedly_writes_identical_bytes(files, start, uninterrupted, tmp_path):
    reference, table = uninterrupted
    run = tmp_path / "run"
    options = command(files, run)

    # Kill during the first save, when no checkpoint exists.
    small_runs.stop_when(start(*options), lambda: saving(run) == [3], signal.SIGKILL)
    assert not (run / "checkpoints" / "3").exists() and lines(run) >= 3
    # Kill during training, when the log has steps beyond the last checkpoint.
    small_runs.stop_when(start(*options), lambda: lines(run) > saved(run) > 3, signal.SIGKILL)
    # Kill during a later save, and leave a truncated line in the log.
    small_runs.stop_when(
        start(*options), lambda: any(step > 15 for step in saving(run)), signal.SIGKILL
    )
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 99, "lo')
    # SIGTERM ends the run with one line.
    err = small_runs.stop_when(start(*options), lambda: lines(run) > 30, signal.SIGTERM)
    assert err.splitlines()[-1].startswith("interrupted: ")
    assert "Traceback" not in err and not saving(run)
    # Kill after training, before the results are written and with an incomplete aligner.
    small_runs.stop_when(start(*options), (run / "aligner").exists, signal.SIGKILL)
    (run / "results.json").unlink(missing_ok=True)
    (run / "aligner" / "aligner.json").unlink()
    # Resume until the end, with newly compiled programs.
    process = start(*options, compile_anew=True)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out == table.replace(str(reference), str(run))
    for name in SAME:
        assert (run / name).read_bytes() == (reference / name).read_bytes(), name
    assert sorted(os.listdir(run)) == sorted(os.listdir(reference))
    assert len((run / "metrics.jsonl").read_bytes().splitlines()) == STEPS


def test_main_align_killed_repeatedly_writes_identical_bytes(files, start, tmp_path):
    def options(folder):
        return *command(files, tmp_path / folder, steps=60), "--config.method=align"

    process = start(*options("whole"))
    assert process.communicate() and process.returncode == 0
    run = tmp_path / "run"
    # Kill before training, during training, and after the last checkpoint.
    for moment in ((run / "config.json").exists, lambda: lines(run) > saved(run) >= 20):
        small_runs.stop_when(start(*options("run")), moment, signal.SIGKILL)
    process = start(*options("run"))
    assert process.communicate() and process.returncode == 0
    for name in SAME:
        assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


@FROM_ML_COLLECTIONS
def test_main_on_finished_run_prints_its_table_again(files, uninterrupted, capsys):
    reference, table = uninterrupted
    before = small_runs.contents(reference)
    out, error = small_runs.start(main, [*command(files, reference)], capsys)
    assert (out, error, small_runs.said) == (table, None, "")
    after = small_runs.contents(reference)
    for name in ("comparison.png", "report.html"):
        assert after.pop(name) and before.pop(name)
    assert after == before
    results = json.loads(before["results.json"])
    assert {"test/x_to_y/R@1", "test/y_to_x/R@10", "test/mean/R@1"} <= results.keys()


def test_main_with_other_settings_leaves_finished_run_unchanged(files, start, uninterrupted):
    reference, _ = uninterrupted
    before = small_runs.contents(reference)
    process = start(*command(files, reference, steps=91))
    out, err = process.communicate()
    assert process.returncode == 1 and out == ""
    assert err.startswith(f"error: workdir {reference} ") and err.count("\n") == 1
    assert "train.steps=90" in err and "train.steps=91" in err
    assert small_runs.contents(reference) == before


@FROM_ML_COLLECTIONS
def test_main_rejects_bad_options_in_one_line(files, tmp_path, capsys):
    quickstart = f"--config={QUICKSTART}"
    run = tmp_path / "run"
    cases = {
        (f"{quickstart}:bogus",): "config has an unknown switch 'bogus'",
        ("--config=nope.py", "--config.train.steps=1"): "config file nope.py cannot be read",
        (quickstart, "--config.train.stpes=1"): (
            "unknown setting 'train.stpes'; did you mean 'train.steps'?"
        ),
        (f"--config={files}/config.py", "--config.data.files.x=gone.npy"): (
            "data: files.x: gone.npy "
        ),
    }
    for options, message in cases.items():
        out, error = small_runs.start(main, [*options, f"--workdir={run}"], capsys)
        assert out == "" and small_runs.is_one_line(error)
        assert error.startswith(f"error: {message}")
    assert not run.exists()


@FROM_ML_COLLECTIONS
def test_main_dry_run_writes_nothing(tmp_path, capsys):
    options = [f"--config={QUICKSTART}", f"--workdir={tmp_path}/run", "--dry_run"]
    out, error = small_runs.start(main, options, capsys)
    assert error is None and small_runs.said == "" and os.listdir(tmp_path) == []
    assert out.count('"config"') == 4 and '"zero_shot_prompts"' in out


def test_main_exits_quietly_on_closed_stdout(files, start):
    for option in ("--dry_run", "--help"):
        with start(f"--config={files}/config.py", option) as process:
            process.stdout.close()
            assert process.stderr.read() == ""
        assert process.returncode == 1


@pytest.mark.parametrize(
    ("command", "own", "choice"),
    [
        (main, {"config", "workdir", "dry_run"}, "sotalign"),
        (tune, {"config", "workdir", "method", "grid", "seeds"}, "nnclr"),
        (diagnose, {"config", "workdir", "quick"}, None),
    ],
)
def test_help_lists_own_flags_choices_and_examples(command, own, choice, capsys):
    out, error = small_runs.start(command, ["--help"], capsys)
    assert error is None
    listed = set(re.findall(r"^  --(?:\[no\])?(\w+)", out, re.MULTILINE))
    assert own <= listed and not {"verbosity", "logtostderr", "only_check_args"} & listed
    assert ("config" in listed) == ("config" in own)
    assert out.count(f"python -m {command.__name__} ") >= 2
    assert choice is None or re.search(rf"^methods: .*\b{choice}\b", out, re.DOTALL | re.MULTILINE)
