"""Tests of one run that is killed and resumed on several devices and processes."""

import json
import os
import shutil
import socket
import time

import pytest
import small_runs

from experiments import main

STEPS = 24
"""Enough steps to kill a run in the middle, even if this process polls slowly."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return small_runs.write(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def start(files):
    """Returns a function that starts one process. All share a compilation cache."""

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
    """Returns a function that starts the two processes of one run."""

    def popen(workdir, *options):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = f"--coordinator=127.0.0.1:{port}", "--num_processes=2", *options
        return [start(workdir, *options, f"--process_id={index}") for index in range(2)]

    return popen


@pytest.fixture(scope="module")
def reference(start, tmp_path_factory):
    """Returns the folder of an uninterrupted run on one device."""
    folder = tmp_path_factory.mktemp("one") / "run"
    finish(start(folder))
    return folder


def finish(*processes):
    """Waits until the processes exit with status 0. Returns their outputs."""
    ended = [process.communicate() for process in processes]
    for process, (_, err) in zip(processes, ended, strict=True):
        assert process.returncode == 0, err
    return [out for out, _ in ended]


def last_step(workdir):
    """Returns the step of the newest checkpoint, or 0."""
    folder = workdir / "checkpoints"
    names = os.listdir(folder) if folder.exists() else []
    return max((int(name) for name in names if name.isdigit()), default=0)


def kill_after(process, workdir, step):
    """Kills a process once a checkpoint of `step` or later exists."""
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
def test_main_resumes_identically_on_other_devices_and_processes(start, two, reference, tmp_path):
    run, one = tmp_path / "run", tmp_path / "one"
    # Two processes: after one is killed, the other exits with an error within --patience.
    first, second = two(run, "--patience=20")
    try:
        kill_after(second, run, 3)
        _, err = first.communicate(timeout=300)  # only guards against waiting forever
    finally:
        first.kill()
    assert first.returncode != 0, err
    # Resume on eight devices and kill again.
    kill_after(start(run, devices=8), run, last_step(run) + 3)
    # Resume on one device until the end.
    shutil.copytree(run, one)
    finish(start(one, "--config.mesh=1", "--config.on_device=false"))
    assert_same_result(one, reference)
    # Resume on two processes. Only the first one prints.
    talk, silence = finish(*two(run))
    assert "R@1" in talk and "R@1" not in silence
    assert_same_result(run, reference)
    # A config that the first process rejects ends both with a one-line error.
    before = small_runs.contents(run)
    for process in two(run, "--config.train.learning_rate=1"):
        _, err = process.communicate()
        assert process.returncode == 1, err
        assert err.startswith(f"error: workdir {run} ") and err.count("\n") == 1, err
    assert small_runs.contents(run) == before


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
def test_main_rejects_inconsistent_process_flags(files, tmp_path, capsys, options, name):
    given = [f"--config={files}/config.py", f"--workdir={tmp_path}/run", *options]
    _, error = small_runs.start(main, given, capsys)
    assert small_runs.is_one_line(error) and error.startswith(f"error: {name} "), error
    assert os.listdir(tmp_path) == []
