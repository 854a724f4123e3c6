"""One run on several devices and processes, as users start it: kills, restarts, the same result."""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import small_runs

ROOT = pathlib.Path(__file__).parents[1]
STEPS = 20


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = small_runs.write_files(tmp_path_factory.mktemp("files"))
    small_runs.write_config(folder)
    return folder


@pytest.fixture(scope="module")
def start(files):
    """Starts one process; all share compiled programs."""
    shared = {
        "JAX_COMPILATION_CACHE_DIR": str(files / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PLATFORMS": "cpu",
    }

    def popen(workdir, *options, devices=1):
        count = f" --xla_force_host_platform_device_count={devices}" if devices > 1 else ""
        command = [
            *(sys.executable, "-m", "experiments.main", f"--config={files}/config.py"),
            *(f"--config.train.steps={STEPS}", f"--workdir={workdir}", *options),
        ]
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | shared | {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + count},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return popen


@pytest.fixture(scope="module")
def two(start):
    """Starts two processes that make one run."""

    def popen(workdir):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        options = f"--coordinator={address}", "--num_processes=2"
        return [start(workdir, *options, f"--process_id={index}") for index in range(2)]

    return popen


def finish(*processes):
    for process in processes:
        _, err = process.communicate()
        assert process.returncode == 0, err


def kill_at(process, workdir, step):
    """Kills a process once there is a checkpoint of `step` or a later one."""
    folder = workdir / "checkpoints"
    while process.poll() is None:
        names = os.listdir(folder) if folder.exists() else []
        if any(name.isdigit() and int(name) >= step for name in names):
            process.kill()
            return
        time.sleep(0.005)
    raise AssertionError(f"ended before it could be killed:\n{process.communicate()[1]}")


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
        assert row.get("val/mean/R@1") == other.get("val/mean/R@1")


@pytest.mark.processes
def test_killed_on_eight_devices_and_on_two_processes_it_ends_the_same(start, two, tmp_path):
    reference, eight, both = tmp_path / "one", tmp_path / "eight", tmp_path / "two"
    finish(start(reference))
    # Eight devices, killed; what they saved continues on one device,
    process = start(eight, devices=8)
    kill_at(process, eight, 6)
    process.communicate()
    shutil.copytree(eight, both)
    finish(start(eight, "--config.mesh=1", "--config.on_device=false"))
    assert_same_result(eight, reference)
    # and on two processes, of which one is killed. The other must not wait for it.
    first, second = two(both)
    kill_at(second, both, 12)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 1
    assert err.splitlines()[-1].startswith("error: ")
    assert err.endswith("start all processes again with the same --workdir to go on\n")
    assert not (both / "results.json").exists()
    second.communicate()
    first, second = two(both)
    out, err = first.communicate()
    assert first.returncode == 0, err
    assert "R@1" in out
    _, err = second.communicate()
    assert (second.returncode, err) == (0, "")
    assert_same_result(both, reference)
    assert sorted(os.listdir(both)) == sorted(os.listdir(reference))


@pytest.mark.processes
def test_a_process_that_stands_still_is_noticed(two, tmp_path):
    first, second = two(tmp_path / "run")
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert first.poll() is None
        time.sleep(0.01)
    second.send_signal(signal.SIGSTOP)
    try:
        _, err = first.communicate(timeout=60)
    finally:
        second.kill()
        second.communicate()
    assert first.returncode == 1
    assert "process 1 gave no sign of life" in err.splitlines()[-1]


def test_flags_of_processes_belong_together(start, tmp_path):
    cases = {
        ("--num_processes=2", "--process_id=0"): "coordinator: is not set; pass --coordinator, ",
        ("--coordinator=127.0.0.1:1", "--num_processes=2", "--process_id=2"): (
            "process_id: is 2; pass a number from 0 to 1, another one for each process"
        ),
        (
            "--config.mesh=2",
        ): "config: mesh: 2 devices asked for but 1 are there; pass 1 to 1, or None",
    }
    processes = [start(tmp_path / "run", *options) for options in cases]
    for process, message in zip(processes, cases.values(), strict=True):
        _, err = process.communicate()
        assert process.returncode == 1
        assert err.startswith(f"error: {message}") and err.count("\n") == 1, err
