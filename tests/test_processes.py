"""One run on several devices and processes, as users start it: kills, restarts, the same result."""

import itertools
import json
import os
import shutil
import signal
import socket
import time

import pytest
import small_runs

STEPS = 20


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


def free_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture(scope="module")
def two(start):
    """Starts two processes that make one run."""

    def popen(workdir, *options):
        options = f"--coordinator={free_address()}", "--num_processes=2", *options
        return [start(workdir, *options, f"--process_id={index}") for index in range(2)]

    return popen


@pytest.fixture(scope="module")
def reference(start, tmp_path_factory):
    """An uninterrupted run on one device."""
    folder = tmp_path_factory.mktemp("one") / "run"
    finish(start(folder))
    return folder


def finish(*processes):
    for process in processes:
        _, err = process.communicate()
        assert process.returncode == 0, err


def wait_for_step(process, workdir, step):
    """Returns once there is a checkpoint of `step` or a later one."""
    folder = workdir / "checkpoints"
    while process.poll() is None:
        names = os.listdir(folder) if folder.exists() else []
        if any(name.isdigit() and int(name) >= step for name in names):
            return
        time.sleep(0.005)
    raise AssertionError(f"ended before step {step}:\n{process.communicate()[1]}")


def assert_noticed(survivor, *, lost):
    """Within a minute the survivor names the lost process in its last line, and ends."""
    try:
        _, err = survivor.communicate(timeout=60)
    finally:
        survivor.kill()
    last = err.splitlines()[-1]
    assert survivor.returncode == 1, err
    assert last.startswith(f"error: process {lost} "), err
    assert last.endswith("; start all processes again with the same --workdir to go on")


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
    assert sorted(os.listdir(workdir)) == sorted(os.listdir(reference))


@pytest.mark.slow
def test_two_processes_give_the_same_as_one(two, reference, tmp_path):
    first, second = two(tmp_path / "run")
    out, err = first.communicate()
    assert first.returncode == 0, err
    assert "R@1" in out
    out, err = second.communicate()
    assert (out, second.returncode) == ("", 0), err  # the first one talks
    assert_same_result(tmp_path / "run", reference)


@pytest.mark.slow
def test_killed_on_eight_devices_and_on_two_processes_it_ends_the_same(
    start, two, reference, tmp_path
):
    eight, both, damaged = tmp_path / "eight", tmp_path / "two", tmp_path / "damaged"
    process = start(eight, devices=8)
    wait_for_step(process, eight, 5)
    process.kill()
    process.communicate()
    # Damaged, it ends all processes, though one alone reads it;
    shutil.copytree(eight, both)
    shutil.copytree(eight, damaged)
    for file in (damaged / "checkpoints").rglob("*"):
        if file.is_file():
            os.truncate(file, file.stat().st_size // 2)
    last = []
    for process in two(damaged):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1, err
        last.append(err.splitlines()[-1])
    assert "checkpoints" in last[0] and last[1].startswith("error: ")
    # whole, it continues on one device,
    finish(start(eight, "--config.mesh=1", "--config.on_device=false"))
    assert_same_result(eight, reference)
    # and on two processes, of which one is killed. The other must not wait for it.
    first, second = two(both)
    wait_for_step(second, both, 9)
    second.kill()
    second.communicate()
    assert_noticed(first, lost=1)
    assert not (both / "results.json").exists()
    finish(*two(both))
    assert_same_result(both, reference)


@pytest.mark.slow
def test_a_process_that_is_lost_is_noticed(two, tmp_path):
    """Killed or standing still; the first one also keeps what the processes share."""
    cases = [(0, signal.SIGKILL), (0, signal.SIGSTOP), (1, signal.SIGSTOP)]
    pairs = []
    try:
        for victim, sign in cases:
            run = tmp_path / f"{victim}-{sign}"
            pairs.append(two(run, "--patience=30"))
            wait_for_step(pairs[-1][victim], run, 1)
            pairs[-1][victim].send_signal(sign)
        for (victim, _), pair in zip(cases, pairs, strict=True):
            assert_noticed(pair[1 - victim], lost=victim)
    finally:
        for process in itertools.chain(*pairs):
            process.kill()
            process.communicate()


def test_processes_that_never_come_are_not_waited_for(start, tmp_path):
    """Killed before it has joined, a process is as good as never started."""
    options = f"--coordinator={free_address()}", "--num_processes=2", "--patience=5"
    alone = [start(tmp_path / "run", *options, "--process_id=0")]
    options = f"--coordinator={free_address()}", *options[1:]
    alone.append(start(tmp_path / "run", *options, "--process_id=1"))
    for process in alone:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        last = err.splitlines()[-1]
        assert last.startswith("error: coordinator: 127.0.0.1:"), err
        assert "cannot be joined (not all processes came within 15 s); start every" in last, err


def test_flags_of_processes_belong_together(start, tmp_path):
    cases = {
        ("--num_processes=2", "--process_id=0"): "coordinator: is not set; pass --coordinator, ",
        ("--coordinator=127.0.0.1:1", "--num_processes=2", "--process_id=2"): (
            "process_id: is 2; pass a number from 0 to 1, another one for each process"
        ),
        (
            "--config.mesh=2",
        ): "mesh: 2 devices asked for but 1 are there; pass 1 to 1, or None",
    }
    processes = [start(tmp_path / "run", *options) for options in cases]
    for process, message in zip(processes, cases.values(), strict=True):
        _, err = process.communicate()
        assert process.returncode == 1
        assert err.startswith(f"error: {message}") and err.count("\n") == 1, err
