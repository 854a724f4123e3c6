"""The launcher as users start it, in processes of its own: kills, signals, exit codes."""

import json
import os
import re
import signal

import pytest
import small_runs

from experiments import diagnose, main, tune

STEPS = 90
"""Enough to stop a run at several moments, however late this process notices them."""
SAME = ("config.json", "metrics.jsonl", "results.json", "aligner/heads.safetensors")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return small_runs.write(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def start(files):
    """Starts the launcher; processes share compiled programs, as compiling takes longest."""

    def popen(*options, compile_anew=False):
        compiled = None if compile_anew else files / "compiled"
        return small_runs.popen("main", list(options), compiled=compiled)

    return popen


@pytest.fixture(scope="module")
def uninterrupted(files, start):
    """The folder of a run that nothing disturbed, and what it printed."""
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
    """The last step with a complete checkpoint."""
    return max((int(name) for name in checkpoints(workdir) if name.isdigit()), default=0)


def saving(workdir):
    """The steps whose checkpoints are being written."""
    names = [name for name in checkpoints(workdir) if ".orbax-checkpoint-tmp" in name]
    return [int(name.split(".")[0]) for name in names]


def test_a_run_killed_again_and_again_leaves_the_same_bytes(files, start, uninterrupted, tmp_path):
    reference, table = uninterrupted
    run = tmp_path / "run"
    options = command(files, run)

    # In the middle of the first save, when there is nothing to go back to.
    small_runs.stop_when(start(*options), lambda: saving(run) == [3], signal.SIGKILL)
    assert not (run / "checkpoints" / "3").exists() and lines(run) >= 3
    # In the middle of training: steps beyond the last checkpoint are in the log.
    small_runs.stop_when(start(*options), lambda: lines(run) > saved(run) > 3, signal.SIGKILL)
    # In the middle of a later save; the line that was being written is cut short.
    small_runs.stop_when(
        start(*options), lambda: any(step > 15 for step in saving(run)), signal.SIGKILL
    )
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 99, "lo')
    # A polite request to end is followed in one line.
    err = small_runs.stop_when(start(*options), lambda: lines(run) > 30, signal.SIGTERM)
    assert err.splitlines()[-1].startswith("interrupted: ")
    assert "Traceback" not in err and not saving(run)
    # After training, before the results are there; the aligner is only half there.
    small_runs.stop_when(start(*options), (run / "aligner").exists, signal.SIGKILL)
    (run / "results.json").unlink(missing_ok=True)
    (run / "aligner" / "aligner.json").unlink()
    # To the end, with programs compiled afresh.
    process = start(*options, compile_anew=True)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out == table.replace(str(reference), str(run))
    for name in SAME:
        assert (run / name).read_bytes() == (reference / name).read_bytes(), name
    assert sorted(os.listdir(run)) == sorted(os.listdir(reference))
    assert len((run / "metrics.jsonl").read_bytes().splitlines()) == STEPS


def test_a_killed_run_of_align_leaves_the_same_bytes(files, start, tmp_path):
    def options(folder):
        return *command(files, tmp_path / folder, steps=60), "--config.method=align"

    process = start(*options("whole"))
    assert process.communicate() and process.returncode == 0
    run = tmp_path / "run"
    # Before training, in the middle of it, and after its last checkpoint.
    for moment in ((run / "config.json").exists, lambda: lines(run) > saved(run) >= 20):
        small_runs.stop_when(start(*options("run")), moment, signal.SIGKILL)
    small_runs.stop_when(start(*options("run")), lambda: saved(run) == 60, signal.SIGKILL)
    process = start(*options("run"))
    assert process.communicate() and process.returncode == 0
    for name in SAME:
        assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_a_finished_run_prints_its_table_again(files, start, uninterrupted):
    reference, table = uninterrupted
    before = small_runs.contents(reference)
    process = start(*command(files, reference))
    out, err = process.communicate()
    assert (process.returncode, out, err) == (0, table, "")
    after = small_runs.contents(reference)
    for name in ("comparison.png", "report.html"):
        assert after.pop(name) and before.pop(name)
    assert after == before
    results = json.loads(before["results.json"])
    assert {"test/x_to_y/R@1", "test/y_to_x/R@10", "test/mean/R@1"} <= results.keys()


def test_other_settings_leave_a_finished_run_alone(files, start, uninterrupted):
    reference, _ = uninterrupted
    before = small_runs.contents(reference)
    process = start(*command(files, reference, steps=91))
    out, err = process.communicate()
    assert process.returncode == 1 and out == ""
    assert err.startswith(f"error: workdir: {reference} ") and err.count("\n") == 1
    assert "train.steps=90" in err and "train.steps=91" in err
    assert small_runs.contents(reference) == before


def test_mistakes_end_in_one_line(files, start, tmp_path):
    quickstart = "--config=experiments/configs/quickstart.py"
    run = tmp_path / "run"
    cases = {
        (f"{quickstart}:bogus",): "config: unknown switch 'bogus'",
        ("--config=nope.py", "--config.train.steps=1"): "config: nope.py cannot be read",
        (quickstart, "--config.train.stpes=1"): "unknown setting 'stpes'; did you mean 'steps'?",
        (f"--config={files}/config.py", "--config.data.files.x=gone.npy"): (
            "data: files.x: gone.npy: "
        ),
    }
    processes = [start(*options, f"--workdir={run}") for options in cases]
    for process, message in zip(processes, cases.values(), strict=True):
        out, err = process.communicate()
        assert process.returncode == 1 and out == ""
        assert err.startswith(f"error: {message}") and err.count("\n") == 1
    assert not run.exists()


def test_a_dry_run_of_the_quickstart_writes_nothing(start, tmp_path):
    options = ("--config=experiments/configs/quickstart.py", f"--workdir={tmp_path}/run")
    out, err = start(*options, "--dry_run").communicate()
    assert err == "" and os.listdir(tmp_path) == []
    assert out.count('"config"') == 4 and '"zero_shot_prompts"' in out


def test_a_reader_that_has_seen_enough_ends_a_command_quietly(files, start):
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
def test_help_names_a_commands_own_flags_choices_and_examples(command, own, choice, capsys):
    out, error = small_runs.start(command, ["--help"], capsys)
    assert error is None
    listed = set(re.findall(r"^  --(?:\[no\])?(\w+)", out, re.MULTILINE))
    assert own <= listed and not {"verbosity", "logtostderr", "only_check_args"} & listed
    assert ("config" in listed) == ("config" in own)
    assert out.count(f"python -m {command.__name__} ") >= 2
    assert choice is None or re.search(rf"^methods: .*\b{choice}\b", out, re.DOTALL | re.MULTILINE)
