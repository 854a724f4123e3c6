"""Tests of run folders: atomic JSON, fingerprints, metrics and checkpoints."""

import doctest
import hashlib
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from experiments import workdir
from sotalign_jax import checks, storage, training


def test_digest_is_the_sha256_of_all_contents(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    found = storage.digest(tmp_path / "a", b"def")
    assert found == hashlib.sha256(b"abcdef").hexdigest()


def test_workdir_doctests_pass():
    assert doctest.testmod(workdir).failed == 0


# --- JSON and run folders ----------------------------------------------------------------------


def test_write_json_replaces_files_atomically(tmp_path):
    path = tmp_path / "x.json"
    value = {"a": [1, 2.5, None, True], "b": {"ü": "text"}}
    workdir.write_json(path, {"old": 0})
    workdir.write_json(path, value)
    with pytest.raises(ValueError, match="nan"):
        workdir.write_json(path, {"a": math.nan})

    def interrupted():
        with storage.replacing(path) as file:
            file.write(b"part")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert storage.read_json(path) == value and os.listdir(tmp_path) == ["x.json"]


def test_read_json_names_missing_and_damaged_files(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(checks.InputError, match=r"config\.json"):
        storage.read_json(path)
    for text in ('{"seed": 1, "ste', "null", "[]", "3"):
        path.write_text(text)
        with pytest.raises(checks.InputError, match=r"config\.json") as caught:
            storage.read_json(path)
        assert "\n" not in str(caught.value)


def test_environment_is_json_with_package_versions():
    environment = json.loads(json.dumps(storage.environment()))
    assert environment["packages"]["numpy"] == np.__version__
    assert environment["devices"] and environment["backend"] in environment["devices"][0]
    root = pathlib.Path(storage.__file__).parents[1]
    head = ["git", "-C", str(root), "rev-parse", "HEAD"]
    known = subprocess.run(head, capture_output=True, text=True, check=False)
    if (root / ".git").exists() and known.returncode == 0:
        assert environment["git"].removesuffix("+changes") == known.stdout.strip()
    else:
        assert environment["git"] is None


CONFIG = {"seed": 0, "method": {"name": "sotalign", "alpha": 1e-4}, "ks": (1, 5)}


def test_open_run_creates_and_reopens_a_run(tmp_path):
    folder = tmp_path / "runs" / "one"
    workdir.open_run(folder, CONFIG)
    created = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert created.keys() == {"config.json", "environment.json"}
    (folder / "metrics.jsonl").write_text("")
    workdir.open_run(folder, CONFIG)
    assert all((folder / name).read_bytes() == text for name, text in created.items())


def test_claim_succeeds_after_an_early_kill(tmp_path):
    (tmp_path / ".config.json.1.tmp").write_text('{"se')
    with workdir.claim(tmp_path, CONFIG):
        (tmp_path / "environment.json").unlink()
    with workdir.claim(tmp_path, CONFIG):
        assert sorted(os.listdir(tmp_path)) == [".lock", "config.json", "environment.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "^workdir .*seed=0 .*seed=1 .*--workdir"),
        ({"method": {"name": "sotalign", "alpha": 1e-3}}, "method.alpha=0.0001 .*method.alpha"),
        ({"ks": (1, 5, 10)}, r"ks=\[1, 5\] .*ks=\[1, 5, 10\]"),
        ({"new": None}, "new=unset .*new=None"),
        ({"method": {"name": "sotalign"}}, "method.alpha=0.0001 .*method.alpha=unset"),
    ],
)
def test_open_run_rejects_another_config(tmp_path, change, message):
    workdir.open_run(tmp_path, CONFIG)
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(checks.InputError, match=message):
        workdir.open_run(tmp_path, CONFIG | change)
    assert (tmp_path / "config.json").read_bytes() == before


@pytest.mark.parametrize("text", ["[]", "null", '{"x": []}', '{"x": null}'])
def test_open_run_rejects_damaged_fingerprints(tmp_path, text):
    (tmp_path / "x.npy").write_bytes(b"rows")
    folder = tmp_path / "run"
    workdir.open_run(folder, CONFIG)
    (folder / "inputs.json").write_text(text)
    with pytest.raises(checks.InputError, match=r"inputs\.json must hold a JSON object"):
        workdir.open_run(folder, CONFIG, {"x": tmp_path / "x.npy"})


def test_open_run_rejects_folders_with_other_files(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    for folder in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(checks.InputError, match=r"^workdir .*thesis\.tex"):
            workdir.open_run(folder, CONFIG)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_claim_rejects_folder_in_use(tmp_path):
    with (
        workdir.claim(tmp_path, CONFIG),
        pytest.raises(checks.InputError, match=r"workdir .* in use"),
        workdir.claim(tmp_path, CONFIG),
    ):
        pass
    with workdir.claim(tmp_path, CONFIG):
        pass


@pytest.mark.parametrize("existed", [False, True])
def test_claim_is_withdrawn_after_bad_input_unless_files_were_written(tmp_path, existed):
    folder = tmp_path / "run"
    if existed:
        folder.mkdir()

    def fail(*names):
        with workdir.claim(folder, CONFIG):
            for name in names:
                (folder / name).write_text("")
            raise checks.InputError("x is bad")

    with pytest.raises(checks.InputError, match="x is bad"):
        fail()
    assert folder.exists() == existed and (not existed or not os.listdir(folder))
    with pytest.raises(checks.InputError, match="x is bad"):
        fail("metrics.jsonl")
    assert {"config.json", "metrics.jsonl"} <= set(os.listdir(folder))
    with pytest.raises(checks.InputError, match="x is bad"):
        fail()
    assert (folder / "config.json").exists()


# --- inputs ------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "x.npy"
    path.write_bytes(bytes(range(256)))
    return path


def overwrite(path, place):
    """Changes one byte of a file and advances its modification time."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def test_fingerprint_is_json_and_unchanged(file):
    recorded = storage.fingerprint(file)
    assert json.loads(json.dumps(recorded)) == recorded
    assert recorded["bytes"] == 256 and recorded["modified"] == file.stat().st_mtime_ns
    assert storage.changed(recorded, file) is None


def test_changed_detects_content_size_and_missing_file(file):
    recorded = storage.fingerprint(file)
    overwrite(file, 77)
    assert "x.npy" in storage.changed(recorded, file)
    file.write_bytes(b"short")
    assert "x.npy has 5 bytes but had 256" in storage.changed(recorded, file)
    file.unlink()
    assert "x.npy cannot be read" in storage.changed(recorded, file)


def test_changed_ignores_rewritten_equal_content(file):
    recorded = storage.fingerprint(file)
    file.write_bytes(bytes(range(256)))
    os.utime(file, ns=(0, 0))
    assert storage.changed(recorded, file) is None


def test_fingerprint_does_not_wait_for_a_fifo(tmp_path):
    os.mkfifo(tmp_path / "a.jpg")
    found = []

    def read():
        try:
            storage.fingerprint(tmp_path / "a.jpg")
        except OSError as error:
            found.append(str(error))

    # A daemon, so that the tests end even if it waits.
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(30)
    assert found == ["a.jpg is not a regular file; remove it"]


def test_changed_reports_a_file_that_became_a_device(file):
    recorded = storage.fingerprint(file)
    file.unlink()
    file.symlink_to("/dev/null")
    assert "x.npy is not a regular file" in storage.changed(recorded, file)
    assert storage.changed({}, file) is None


def test_changed_of_an_unreadable_file_until_it_exists(tmp_path, file):
    assert storage.changed({}, tmp_path / "gone") is None
    assert "x.npy" in storage.changed({}, file)
    with pytest.raises(OSError, match="gone"):
        storage.fingerprint(tmp_path / "gone")


def test_changed_detects_rewritten_large_files_by_time(tmp_path):
    path = tmp_path / "large.npy"
    with path.open("wb") as file:
        file.truncate(storage.DIGESTED + 1)  # a sparse file
    recorded = storage.fingerprint(path)
    assert storage.changed(recorded, path) is None
    overwrite(path, 0)
    assert "large.npy was modified" in storage.changed(recorded, path)


# --- metrics -----------------------------------------------------------------------------------


def _metrics(step: int) -> dict[str, object]:
    return {"loss": jnp.float32(1 / step), "b": np.int64(step), "a": 1 / step, "ok": True}


def _recorder(folder: pathlib.Path, **options: Any) -> workdir.Recorder:
    return workdir.Recorder(folder, steps=20, title="run", inner=True, **options)


def test_recorder_writes_metrics_as_strict_json_in_fixed_order(tmp_path):
    with _recorder(tmp_path) as recorder:
        recorder.metrics(3, _metrics(3))
        recorder.metrics(4, {"x": jnp.inf, "y": np.float32(-np.inf), "z": np.float64(np.nan)})
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == [
        '{"step": 3, "a": 0.3333333333333333, "b": 3, "loss": 0.33333334, "ok": 1}',
        '{"step": 4, "x": "Infinity", "y": "-Infinity", "z": "NaN"}',
    ]


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda lines: [*lines[:2], b"{]\n", *lines[3:]], "line 3 is damaged"),
        (lambda lines: [*lines[:2], b'{"step":3}\n', *lines[3:]], "line 3 is damaged"),
        (lambda lines: [*lines[:2], b'{"step": 3.0}\n', *lines[3:]], "line 3 is damaged"),
        (lambda lines: [*lines[:2], b'{"step": 3, "a": []}\n', *lines[3:]], "line 3 is damaged"),
        (lambda lines: [*lines[:2], b"[3]\n", *lines[3:]], "line 3 is damaged"),
        (lambda lines: [*lines[:2], *lines[3:]], "has step 4 in line 3"),
        (lambda lines: lines[:4], "ends at step 4 but there is a checkpoint of step 6"),
        (lambda lines: [], "ends at step 0"),
    ],
)
def test_recorder_resume_rejects_metrics_that_do_not_fit(tmp_path, harm, message):
    with _recorder(tmp_path) as recorder:
        for step in range(1, 9):
            recorder.metrics(step, _metrics(step))
            if step == 6:
                recorder.snapshot(step, {"x": np.ones(2)})
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(b"".join(harm(log.read_bytes().splitlines(keepends=True))))
    before = log.read_bytes()
    with (
        _recorder(tmp_path) as recorder,
        pytest.raises(checks.InputError, match=rf"metrics.jsonl {message}.*; restore"),
    ):
        recorder.resume({"x": np.zeros(2)})
    assert log.read_bytes() == before


@pytest.mark.parametrize("torn", [b"", b'{"step": 9', b'{"step": 9, "loss": 1}'])
def test_recorder_resumed_log_has_identical_bytes(tmp_path, torn):
    def write(folder, steps, saved=None):
        with _recorder(folder) as recorder:
            recorder.resume({"x": np.zeros(2)})
            for step in steps:
                recorder.metrics(step, _metrics(step))
                if step == saved:
                    recorder.snapshot(step, {"x": np.ones(2)})
        return folder / "metrics.jsonl"

    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
    whole = write(tmp_path / "whole", range(1, 12))
    resumed = write(tmp_path / "resumed", range(1, 9), saved=6)
    with resumed.open("ab") as file:
        file.write(torn)
    write(tmp_path / "resumed", range(7, 12))
    assert resumed.read_bytes() == whole.read_bytes()


# --- checkpoints -------------------------------------------------------------------------------


def _snapshot(seed: int) -> training.Snapshot:
    """Returns a snapshot with every kind of leaf that a training state may hold."""
    rng = np.random.default_rng(seed)
    _, params = nnx.split(nnx.Linear(3, 4, rngs=nnx.Rngs(seed)))
    memory = {
        "half": jnp.asarray(rng.normal(size=(2, 3)), jnp.float16),
        "bfloat": jnp.asarray(rng.normal(size=5), jnp.bfloat16),
        "odd": jnp.array([np.nan, -0.0, np.inf, 1e-45], np.float32),
        "flag": jnp.array(seed % 2 == 0),
        "key": jax.random.key(seed),
        "nothing": None,
        "empty": {},
        "list": [jnp.int32(seed), {"deep/name.with 'signs'": jnp.arange(seed + 1)}],
    }
    state = training.TrainState(jnp.int32(seed), params, optax.lion(1e-3).init(params), memory)
    best = training.Best(jax.tree.map(jnp.copy, params), jnp.int32(seed), jnp.float32(0.5))
    return training.Snapshot(state, best)


def _bytes(tree: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    arrays = jax.tree.leaves(workdir.to_arrays(tree))
    return [(array.dtype.name, array.shape, array.tobytes()) for array in arrays]


def test_recorder_resumes_exactly_from_its_newest_checkpoint(tmp_path):
    with _recorder(tmp_path) as recorder:
        assert _bytes(recorder.resume(_snapshot(3))) == _bytes(_snapshot(3))
        for step in range(1, 9):
            recorder.metrics(step, {"loss": 1 / step})
            if step % 2 == 0:
                recorder.snapshot(step, _snapshot(step))
        recorder.metrics(9, {"loss": 0.0})
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["6", "8"]  # the newest two are kept
    # A kill during the removal or the writing of a checkpoint leaves such folders.
    shutil.rmtree(tmp_path / "checkpoints" / "6" / "default")
    (tmp_path / "checkpoints" / "9.orbax-checkpoint-tmp").mkdir()
    with _recorder(tmp_path) as recorder:
        template = jax.tree.map(lambda x: x, _snapshot(8))
        found = recorder.resume(template)
        assert jax.tree.structure(found) == jax.tree.structure(template)
        assert _bytes(found) == _bytes(_snapshot(8))
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(found))
        assert jax.random.key_impl(found.state.memory["key"]) == "threefry2x32"
        assert isinstance(found.state.params["kernel"], nnx.Param)
        recorder.metrics(9, {"loss": 1 / 9})
        recorder.snapshot(10, _snapshot(10))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 10))
    assert json.loads(lines[-1])["loss"] == 1 / 9
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["10", "8"]


def test_recorder_checkpoint_is_readable_by_plain_orbax(tmp_path):
    saved = _snapshot(4)
    with _recorder(tmp_path) as recorder:
        recorder.snapshot(7, saved)
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "checkpoints" / "7" / "default")
    kernel = found["state"]["params"]["kernel"]["value"]
    np.testing.assert_array_equal(kernel, saved.state.params["kernel"][...])
    np.testing.assert_array_equal(found["state"]["step"], 4)
    assert found["state"]["memory"]["bfloat"].dtype == jnp.bfloat16
    assert sorted(_bytes(found)) == sorted(_bytes(saved))  # all leaves are bitwise equal


def test_recorder_resume_names_unusable_checkpoints(tmp_path):
    with _recorder(tmp_path) as recorder:
        for step in range(1, 4):
            recorder.metrics(step, _metrics(step))
        recorder.snapshot(3, {"a": np.ones((2, 3)), "b": np.ones(2)})
    for template in [
        {"a": np.ones((2, 4)), "b": np.ones(2)},
        {"a": np.ones((2, 3))},
        {"a": np.ones((2, 3)), "b": np.ones(2), "c": np.ones(2)},
    ]:
        with (
            _recorder(tmp_path) as recorder,
            pytest.raises(OSError, match=r"checkpoint .*/3 "),
        ):
            recorder.resume(template)
    for file in (tmp_path / "checkpoints" / "3").rglob("*"):
        if file.is_file():
            os.truncate(file, file.stat().st_size // 2)
    with (
        _recorder(tmp_path) as recorder,
        pytest.raises(OSError, match=r"checkpoint .*/3 "),
    ):
        recorder.resume({"a": np.ones((2, 3)), "b": np.ones(2)})


FULL_DISK = """
    import pathlib, resource, signal, sys, numpy as np
    from experiments import workdir
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    noise = np.random.default_rng(0).normal
    folder = pathlib.Path(sys.argv[1])
    workdir.write_json(folder / "x.json", {"a": 1})
    with workdir.Recorder(folder, steps=9, title="run") as recorder:
        recorder.metrics(1, {})
        recorder.snapshot(1, {"x": noise(size=1000)})
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        try:
            recorder.snapshot(2, {"x": noise(size=500_000)})
        except OSError as error:
            print(error)
        try:
            workdir.write_json(folder / "x.json", "x" * 500_000)
        except OSError as error:
            print(error)
"""


def test_recorder_and_write_json_on_full_disk_keep_old_files(tmp_path):
    # A file size limit replaces a full disk: the operating system refuses the write.
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FULL_DISK), str(tmp_path)],
        cwd=pathlib.Path(storage.__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    checkpoint, file = run.stdout.splitlines()
    assert "step 2" in checkpoint and "File too large" in checkpoint
    assert "File too large" in file and str(tmp_path / "x.json") in file
    assert storage.read_json(tmp_path / "x.json") == {"a": 1}
    with _recorder(tmp_path) as recorder:
        found = recorder.resume({"x": np.zeros(1000)})
        recorder.snapshot(2, found)
    np.testing.assert_array_equal(
        found["x"], np.random.default_rng(0).normal(size=1000).astype(np.float32)
    )
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["1", "2"]


def test_recorder_removes_a_checkpoint_that_a_kill_left(tmp_path):
    with _recorder(tmp_path) as recorder:
        for step in (1, 2):
            recorder.snapshot(step, {"x": np.ones(2)})
    shutil.copytree(tmp_path / "checkpoints" / "1", tmp_path / "checkpoints" / "0")
    with _recorder(tmp_path) as recorder, pytest.raises(checks.InputError, match="ends at step 0"):
        recorder.resume({"x": np.ones(2)})
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["1", "2"]


def test_locked_removes_files_that_a_kill_left(tmp_path):
    for name in (".report.html.1.tmp", ".report.html.1.2.tmp", ".kept.tmp"):
        (tmp_path / name).write_text("<html>")
    with storage.locked(tmp_path, wait=True):
        assert sorted(os.listdir(tmp_path)) == [".kept.tmp", ".lock"]


def test_recorder_writes_tensorboard_on_request(tmp_path, monkeypatch):
    with _recorder(tmp_path, tensorboard=True) as shown:
        shown.resume({"x": np.zeros(2)})
        shown.metrics(1, {"loss": 0.5})
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in file.read_bytes()
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with (
        _recorder(tmp_path, tensorboard=True) as shown,
        pytest.raises(checks.InputError, match="tensorboardX"),
    ):
        shown.resume({"x": np.zeros(2)})
