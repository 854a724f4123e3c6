"""One run on several devices and processes, as users start it: kills, restarts, the same result."""

import json
import os
import shutil
import socket
import time

import pytest
import small_runs

from experiments import main

STEPS = 24
"""Enough to kill a run in the middle, however late this process notices where it is."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return small_runs.write(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def start(files):
    """Starts one process; all share compiled programs."""

    def popen(workdir, *options, devices=1):
        count = f" --xla_force_host_platform_device_count={devices}" if devices > 1 else ""
        given = [f"--config={files}/config.py", f"--config.train.steps={STEPS}"]
        given += ["--config.train.eval_every=1", f"--workdir={workdir}", *options]
        return small_runs.popen(
            "main",
            given,
            compiled=files / "compiled",
            JAX_PLATFORMS="cpu",
            XLA_FLAGS=os.environ.get("XLA_FLAGS", "") + count,
        )

    return popen


@pytest.fixture(scope="module")
def two(start):
    """Starts two processes that make one run."""

    def popen(workdir, *options):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = f"--coordinator=127.0.0.1:{port}", "--num_processes=2", *options
        return [start(workdir, *options, f"--process_id={index}") for index in range(2)]

    return popen


@pytest.fixture(scope="module")
def reference(start, tmp_path_factory):
    """An uninterrupted run on one device."""
    folder = tmp_path_factory.mktemp("one") / "run"
    finish(start(folder))
    return folder


def finish(*processes):
    """Waits for processes that end well; what they printed."""
    ended = [process.communicate() for process in processes]
    for process, (_, err) in zip(processes, ended, strict=True):
        assert process.returncode == 0, err
    return [out for out, _ in ended]


def last_step(workdir):
    """The step of the newest checkpoint, 0 if there is none."""
    folder = workdir / "checkpoints"
    names = os.listdir(folder) if folder.exists() else []
    return max((int(name) for name in names if name.isdigit()), default=0)


def kill_after(process, workdir, step):
    """Kills a process once there is a checkpoint of `step` or a later one."""
    while last_step(workdir) < step:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.005)
    process.kill()
    process.communicate()
    assert not (workdir / "results.json").exists(), "ended before it was killed"


def assert_same_result(workdir, reference):
    results, expected = (
        json.loads((folder / "results.json").read_text()) for folder in (workdir, reference)
    )
    assert results == expected  # the best step, and R@k of both splits
    rows, others = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (workdir, reference)
    )
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row, other in zip(rows, others, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=2e-4)
        assert row["val/mean/R@1"] == other["val/mean/R@1"]
    assert sorted(os.listdir(workdir)) == sorted(os.listdir(reference))


@pytest.mark.slow
def test_killed_and_continued_on_other_devices_it_ends_the_same(start, two, reference, tmp_path):
    run, one = tmp_path / "run", tmp_path / "one"
    # On two processes: when one is killed, the other ends within --patience, and not well.
    first, second = two(run, "--patience=20")
    try:
        kill_after(second, run, 3)
        _, err = first.communicate(timeout=300)  # no limit but against waiting for ever
    finally:
        first.kill()
    assert first.returncode != 0, err
    # On eight devices, killed again.
    kill_after(start(run, devices=8), run, last_step(run) + 3)
    # To the end on one device,
    shutil.copytree(run, one)
    finish(start(one, "--config.mesh=1", "--config.on_device=false"))
    assert_same_result(one, reference)
    # and on two processes, of which the first talks.
    talk, silence = finish(*two(run))
    assert "R@1" in talk and "R@1" not in silence
    assert_same_result(run, reference)
    # What only the first looks at, and refuses, ends both in one line.
    before = small_runs.contents(run)
    for process in two(run, "--config.train.learning_rate=1"):
        _, err = process.communicate()
        assert process.returncode == 1, err
        assert err.startswith(f"error: workdir: {run} ") and err.count("\n") == 1, err
    assert small_runs.contents(run) == before


@pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")  # how configs are read
@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--num_processes=2", "--process_id=0"], "coordinator"),
        (["--coordinator=127.0.0.1:1", "--process_id=0"], "num_processes"),
        (["--coordinator=localhost", "--num_processes=2", "--process_id=0"], "coordinator"),
        (["--coordinator=127.0.0.1:1", "--num_processes=2", "--process_id=2"], "process_id"),
        (["--coordinator=127.0.0.1:1", "--num_processes=2"], "process_id"),
        (["--coordinator=auto"], "coordinator"),  # there is no cluster to ask
    ],
)
def test_flags_of_processes_belong_together(files, tmp_path, capsys, options, name):
    given = [f"--config={files}/config.py", f"--workdir={tmp_path}/run", *options]
    _, error = small_runs.start(main, given, capsys)
    assert small_runs.is_one_line(error) and error.startswith(f"error: {name}: "), error
    assert os.listdir(tmp_path) == []
