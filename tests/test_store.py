"""Tests of the result store: keys, lock, resume after a kill, damaged lines."""

import errno
import fcntl
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import textwrap

import pytest

from experiments import photos, store
from sotalign_jax import checks, storage

ROOT = pathlib.Path(__file__).parents[1]
SPECS = [{"number": number} for number in range(4)]
JOBS = [(spec, {"twice"}) for spec in SPECS]


def double(spec, needed):
    return {"twice": 2 * spec["number"]}


@pytest.fixture
def kept(tmp_path):
    return store.Store(tmp_path / "cells.jsonl")


def fill(kept, jobs=JOBS, compute=double):
    return list(kept.fill(jobs, compute))


# --- keys ----------------------------------------------------------------------------------------


def test_key_of_depends_on_values_only():
    assert store.key_of({"a": 1, "b": {"c": 2}}) == store.key_of({"b": {"c": 2}, "a": 1})
    assert store.key_of({"a": 1}) != store.key_of({"a": 2})


def test_fingerprint_depends_on_content_only(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"rows")
    second.write_bytes(b"rows")
    before = store.fingerprint(first)
    assert before == store.fingerprint(second)
    os.utime(first, ns=(1, 1))
    assert store.fingerprint(first) == before
    first.write_bytes(b"swor")
    assert store.fingerprint(first) != before


def test_fingerprint_of_a_large_file_depends_on_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "DIGESTED", 3)
    (tmp_path / "a").write_bytes(b"rows")
    before = store.fingerprint(tmp_path / "a")
    os.utime(tmp_path / "a", ns=(1, 1))
    assert store.fingerprint(tmp_path / "a") != before


def test_fingerprints_of_photographs_name_the_files_they_read():
    assert set(photos.fingerprints("rsicd")) == {"rsicd.npz", "efficientnet_lite2_pca512.npz"}
    assert "zs_cifar100.npz" not in photos.fingerprints("cifar10")


# --- results -------------------------------------------------------------------------------------


def test_fill_computes_results_once(kept):
    keys = [store.key_of(spec) for spec in SPECS]
    assert fill(kept) == [(key, None) for key in keys]
    again = store.Store(kept.path)
    assert fill(again, compute=lambda *_: pytest.fail("computed again")) == []
    assert again.entries() == kept.entries() and list(again.entries()) == keys
    assert again.results(SPECS[3]) == {"twice": 6} and again.results({"number": 9}) == {}


def test_fill_completes_results_that_lack_a_name(kept):
    fill(kept)
    asked = []

    def thrice(spec, needed):
        asked.append(needed)
        return {"thrice": 3 * spec["number"]}

    fill(kept, [(SPECS[1], {"thrice"})], thrice)
    assert asked == [{"twice", "thrice"}]
    assert store.Store(kept.path).results(SPECS[1]) == {"twice": 2, "thrice": 3}
    assert len(kept.path.read_text().splitlines()) == 5  # the last line of a key is valid
    assert kept.lines(kept.entries()).count("\n") == 4


def test_fill_returns_and_logs_errors_and_computes_the_others(kept):
    def fails(spec, needed):
        if spec["number"] == 1:
            print("a warning", file=sys.stderr)
            raise ValueError("wrong")
        return {"twice": float("nan") if spec["number"] == 2 else 1.0}

    errors = dict(fill(kept, compute=fails))
    assert [type(errors[store.key_of(spec)]) for spec in SPECS] == [
        type(None),
        ValueError,
        ValueError,  # NaN is not JSON
        type(None),
    ]
    log = kept.log(SPECS[1]).read_text()
    assert log.startswith("a warning\n") and "ValueError: wrong" in log
    assert len(kept.entries()) == 2
    assert len(fill(kept)) == 2  # failed results are tried again


def test_add_of_known_entries_leaves_the_file_unchanged(kept):
    fill(kept)
    before = kept.path.read_bytes()
    store.Store(kept.path).add([])
    store.Store(kept.path).add(kept.entries().values())
    assert kept.path.read_bytes() == before


# --- several processes, and kills ----------------------------------------------------------------

SLOW = """
    import os, pathlib, sys, time
    from experiments import store

    def compute(spec, needed):
        with open("computed", "a") as file:
            print(spec["number"], file=file)
        if spec["number"] == int(sys.argv[1]):
            os.kill(os.getpid(), 9)
        time.sleep(0.02)
        return {"twice": 2 * spec["number"]}

    kept = store.Store(pathlib.Path("cells.jsonl"))
    jobs = [({"number": number}, {"twice"}) for number in range(int(sys.argv[2]))]
    errors = [error for _, error in kept.fill(jobs, compute) if error]
    sys.exit(len(errors))
"""


def launch(folder, killed, count):
    command = [sys.executable, "-c", textwrap.dedent(SLOW), str(killed), str(count)]
    return subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_fill_shares_work_between_processes(tmp_path):
    running = [launch(tmp_path, -1, 60) for _ in range(3)]
    assert [one.wait(120) for one in running] == [0, 0, 0]
    numbers = (tmp_path / "computed").read_text().split()
    assert sorted(map(int, numbers)) == list(range(60))
    entries = store.Store(tmp_path / "cells.jsonl").entries().values()
    assert len(entries) == 60
    assert all(entry.results == {"twice": 2 * entry.spec["number"]} for entry in entries)


def test_fill_killed_loses_only_the_current_result(tmp_path):
    assert launch(tmp_path, 2, 4).wait(60) == -signal.SIGKILL
    assert len(store.Store(tmp_path / "cells.jsonl").entries()) == 2
    assert launch(tmp_path, -1, 4).wait(60) == 0
    assert (tmp_path / "computed").read_text().split() == ["0", "1", "2", "2", "3"]


@pytest.mark.parametrize("cut", [1, 10, 25])
def test_fill_recomputes_a_truncated_last_line(kept, cut):
    fill(kept)
    whole = kept.path.read_bytes()
    kept.path.write_bytes(whole[:-cut])
    again = store.Store(kept.path)
    assert len(again.entries()) == 3 + (cut == 1)  # a line without its newline is complete
    fill(again, JOBS[3:])
    fill(again, [({"number": 9}, {"twice"})])
    assert len(store.Store(kept.path).entries()) == 5
    assert kept.path.read_bytes().startswith(whole)


def test_fill_postpones_results_locked_by_another_process(kept):
    made = []
    log = kept.log(SPECS[0])
    log.parent.mkdir()
    with log.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def watched(spec, needed):
            made.append(spec["number"])
            fcntl.flock(other, fcntl.LOCK_UN)
            return double(spec, needed)

        fill(kept, JOBS[:2], watched)
    assert made == [1, 0]


def test_lock_excludes_others(tmp_path):
    path = tmp_path / "run" / "lock"
    with storage.lock(path), pytest.raises(BlockingIOError), storage.lock(path, wait=False):
        pytest.fail("both hold it")
    with storage.lock(path, wait=False):
        pass


# --- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage", ["{", "[]", "1", '{"spec": {}}', '{"spec": 1, "results": 2, "seconds": 3}', "\0\0"]
)
def test_entries_and_fill_reject_damaged_lines(kept, damage):
    fill(kept)
    lines = kept.path.read_text().splitlines()
    kept.path.write_text("\n".join([*lines[:2], damage, *lines[2:]]) + "\n")
    for use in (store.Store.entries, fill):
        with pytest.raises(checks.InputError, match=r"cells\.jsonl: line 3 is damaged") as error:
            use(store.Store(kept.path))
        assert "\n" not in str(error.value)


def test_fill_on_full_disk_names_the_file_and_resumes(kept):
    fill(kept, JOBS[:1])
    before = kept.path.read_bytes()
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 9, most[1]))
    try:
        with pytest.raises(OSError) as error:  # noqa: PT011
            fill(kept)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
        signal.signal(signal.SIGXFSZ, ignored)
    assert error.value.errno == errno.EFBIG and error.value.filename == str(kept.path)
    fill(kept)
    assert kept.path.read_bytes().startswith(before)
    assert [json.loads(line)["spec"] for line in kept.path.read_text().splitlines()] == SPECS


def test_store_reads_again_a_file_whose_lines_were_removed(kept):
    fill(kept)
    lines = kept.path.read_bytes().splitlines(keepends=True)
    kept.path.write_bytes(lines[0])
    fill(kept)
    assert len(kept.entries()) == 4 and b"\0" not in kept.path.read_bytes()
    assert len(store.Store(kept.path).entries()) == 4
