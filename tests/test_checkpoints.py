"""Checkpoints: exact round trips, kills, damage, full disks."""

import errno
import os
import pathlib
import random
import subprocess
import sys
import textwrap
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from sotalign_jax.checkpoints import Checkpoints

from sotalign_jax import checks


class State(NamedTuple):
    weights: Any
    extra: dict[str, Any]


def _state(seed: int) -> State:
    """Every kind of entry that a training state may hold."""
    rng = np.random.default_rng(seed)
    _, weights = nnx.split(nnx.Linear(3, 4, rngs=nnx.Rngs(seed)))
    extra = {
        "optimiser": optax.lion(1e-3).init(weights),
        "half": jnp.asarray(rng.normal(size=(2, 3)), jnp.float16),
        "bfloat": jnp.asarray(rng.normal(size=5), jnp.bfloat16),
        "odd": np.array([np.nan, -0.0, np.inf, 1e-45], np.float32),
        "wide": rng.normal(size=3),
        "rows": rng.integers(0, 9, size=4),
        "flag": np.array(seed % 2 == 0),
        "key": jax.random.key(seed),
        "key_data": jax.random.key_data(jax.random.key(seed)),
        "empty": jnp.zeros((0, 7)),
        "nothing": None,
        "list": [seed, 0.1 * seed, {"deep/name.with 'signs'": jnp.arange(seed)}],
    }
    return State(weights, extra)


def _bytes(tree: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    arrays = [
        np.asarray(
            jax.random.key_data(leaf)
            if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
            else leaf
        )
        for leaf in jax.tree.leaves(tree)
    ]
    return [(array.dtype.name, array.shape, array.tobytes()) for array in arrays]


def test_round_trip_is_exact(tmp_path):
    saved = _state(3)
    with Checkpoints(tmp_path / "new" / "folder") as checkpoints:
        assert checkpoints.restore_latest(saved) is None
        checkpoints.save(7, saved)
    template = jax.tree.map(lambda x: x, _state(3))
    with Checkpoints(tmp_path / "new" / "folder") as checkpoints:
        step, restored = checkpoints.restore_latest(template)
    assert step == 7
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    assert _bytes(restored) == _bytes(saved)
    assert isinstance(restored.extra["half"], jax.Array)
    assert jax.random.key_impl(restored.extra["key"]) == jax.random.key_impl(saved.extra["key"])
    assert isinstance(restored.weights["kernel"], nnx.Param)


def test_templates_may_be_abstract_and_hold_other_values(tmp_path):
    tree = {"x": jnp.arange(3.0), "y": jnp.float32(2)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, tree)
        _, restored = checkpoints.restore_latest(jax.eval_shape(lambda: tree))
        _, same = checkpoints.restore_latest(jax.tree.map(jnp.zeros_like, tree))
    assert _bytes(restored) == _bytes(same) == _bytes(tree)


def test_saved_values_are_those_at_the_time_of_saving(tmp_path):
    step_once = jax.jit(lambda x: x + 1, donate_argnums=0)
    host = np.zeros(5)
    device = jnp.zeros(1_000_000)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"host": host, "device": device})
        host += 1
        for _ in range(5):
            device = step_once(device)
        _, restored = checkpoints.restore_latest({"host": host, "device": device})
    assert not restored["host"].any() and not np.asarray(restored["device"]).any()


def test_only_the_newest_are_kept(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in [0, 5, 9, 10]:
            checkpoints.save(step, {"x": np.full(3, step)})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["10", "9"]


def test_the_newest_step_may_be_saved_twice_but_not_replaced(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, {"x": np.ones(3)})
        checkpoints.save(4, {"x": np.ones(3)})
        with pytest.raises(checks.InputError, match="step: 4 is not above step 4"):
            checkpoints.save(4, {"x": np.zeros(3)})
        with pytest.raises(checks.InputError, match="step: 3 is not above step 4"):
            checkpoints.save(3, {"x": np.ones(3)})
        _, tree = checkpoints.restore_latest({"x": np.zeros(3)})
    assert tree["x"].all()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"a": np.ones((2, 4)), "b": 1}, r"entry \['a'\] is float64\[2,3\] .*float64\[2,4\]"),
        ({"a": np.ones((2, 3), np.float32), "b": 1}, r"\['a'\] is float64\[2,3\] .*float32\[2,3\]"),
        ({"a": np.ones((2, 3))}, r"entry \['b'\] is int64\[\] .* but missing is needed"),
        ({"a": np.ones((2, 3)), "b": 1, "c": 2}, r"entry \['c'\] is missing"),
    ],
)
def test_other_templates_are_refused(tmp_path, template, message):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"a": np.ones((2, 3)), "b": 1})
        with pytest.raises(checks.InputError, match=message) as caught:
            checkpoints.restore_latest(template)
        assert str(tmp_path) in str(caught.value) and "another directory" in str(caught.value)
        assert checkpoints.steps() == [1]


def test_mistakes_are_named(tmp_path):
    with pytest.raises(checks.InputError, match="keep: is 0"):
        Checkpoints(tmp_path, keep=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(checks.InputError, match="file cannot be created"):
        Checkpoints(tmp_path / "file")
    with Checkpoints(tmp_path / "c") as checkpoints:
        with pytest.raises(checks.InputError, match=r"entry \['name'\] is of type str"):
            checkpoints.save(0, {"name": "text"})
        with pytest.raises(checks.InputError, match="step: is -1"):
            checkpoints.save(-1, {})


def _damage(folder: pathlib.Path, how: str) -> None:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        if how == "remove" and path.parent.name == "d":
            path.unlink()
        elif how == "truncate" and path.parent.name == "d":
            path.write_bytes(content[: len(content) // 2])
        elif how == "flip" and path.parent.name == "d":
            middle = len(content) // 2
            path.write_bytes(
                content[:middle] + bytes([content[middle] ^ 16]) + content[middle + 1 :]
            )
        elif how == "metadata" and path.name == "_CHECKPOINT_METADATA":
            path.write_bytes(content[:20])


@pytest.mark.parametrize("how", ["remove", "truncate", "flip", "metadata"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, caplog, rng, how):
    trees = {step: {"x": rng.normal(size=5000), "n": np.array(step)} for step in (10, 20, 30)}
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step, tree in trees.items():
            checkpoints.save(step, tree)
    _damage(tmp_path / "30", how)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        step, tree = checkpoints.restore_latest(trees[10])
        assert step == 20 and _bytes(tree) == _bytes(trees[20])
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert f"{tmp_path / '30'} cannot be read" in caplog.text
        # The run goes on from 20 and its checkpoints count, also at the damaged step.
        checkpoints.save(25, trees[10])
        checkpoints.save(30, trees[30])
        assert checkpoints.restore_latest(trees[10])[0] == 30
    _damage(tmp_path / "30", how)
    with pytest.raises(checks.InputError, match=r"none of the steps \[30\] .* can be read"):
        Checkpoints(tmp_path).restore_latest(trees[10])


SAVE_LOOP = """
    import sys, numpy as np
    from sotalign_jax.checkpoints import Checkpoints
    with Checkpoints(sys.argv[1]) as checkpoints:
        restored = checkpoints.restore_latest({"x": np.zeros(300_000), "step": 0})
        step = restored[0] if restored else 0
        print("ready", flush=True)
        while True:
            step += 1
            tree = {"x": np.random.default_rng(step).normal(size=300_000), "step": step}
            checkpoints.save(step, tree)
            print(step, flush=True)
"""


def test_a_kill_in_mid_save_loses_at_most_that_save(tmp_path):
    source = random.Random(0)
    latest = 0
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SAVE_LOOP), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout.readline() == "ready\n"
            for _ in range(source.randint(2, 6)):
                begun = int(process.stdout.readline())
            # A moment that differs from round to round, counted in work done rather than time.
            np.random.default_rng(0).normal(size=source.randint(1, 2_000_000))
            process.kill()
        with Checkpoints(tmp_path) as checkpoints:
            step, tree = checkpoints.restore_latest({"x": np.zeros(300_000), "step": 0})
            assert step >= begun - 1 > latest - 1  # the save before the last one begun was complete
            assert tree["step"] == step
            np.testing.assert_array_equal(
                tree["x"], np.random.default_rng(step).normal(size=300_000)
            )
            assert all(entry.name.isdigit() for entry in tmp_path.iterdir())
        latest = step


LIMITED_DISK = """
    import resource, signal, sys, numpy as np
    from sotalign_jax.checkpoints import Checkpoints
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    noise = np.random.default_rng(0).normal
    with Checkpoints(sys.argv[1]) as checkpoints:
        checkpoints.save(1, {"x": noise(size=1000)})
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        try:
            checkpoints.save(2, {"x": noise(size=500_000)})
            checkpoints.wait()
        except OSError as error:
            print(error.errno, error)
        print(checkpoints.steps(), checkpoints.restore_latest({"x": np.zeros(1000)})[0])
        checkpoints.save(3, {"x": noise(size=1000)})
        print(checkpoints.restore_latest({"x": np.zeros(1000)})[0])
"""


def test_a_write_that_fails_is_reported_and_harms_nothing(tmp_path):
    # A limit on file sizes stands in for a full disk: the write itself fails in the kernel.
    code = textwrap.dedent(LIMITED_DISK)
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    message, before, after = run.stdout.splitlines()
    assert message.startswith(str(errno.EFBIG)) and os.strerror(errno.EFBIG) in message
    assert "step 2 was not written" in message and str(tmp_path) in message
    assert (before, after) == ("[1] 1", "3")
    assert run.stderr == ""


def test_an_error_on_its_way_is_not_hidden_and_the_save_completes(tmp_path):
    def interrupted() -> None:
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, {"x": np.ones(3)})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert Checkpoints(tmp_path).steps() == [1]


def test_leftovers_go_and_other_files_stay(tmp_path):
    for name in ["12.orbax-checkpoint-tmp", "11.deleted"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_text("x")
    (tmp_path / "notes.txt").write_text("mine")
    Checkpoints(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]
