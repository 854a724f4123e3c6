"""The accelerator benchmark: command line, bisection, and a real compile where a plugin is."""

import importlib.util

import pytest

from benchmarks import accelerator
from sotalign_jax import checks

TINY = accelerator.Workload(
    pairs=64, unpaired=256, pool=512, width_x=32, width_y=48, dim=16, teacher_dim=16
)


def test_target_is_required_and_checked(capsys):
    for arguments in ([], ["--target=abacus"], ["--target=a100", "--unpaired=0"]):
        with pytest.raises(SystemExit) as stop:
            accelerator.main(arguments)
        assert stop.value.code == 2
    assert "tpu-v5e" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "command"), [("a100", 'pip install "jax[cuda12]=='), ("tpu-v5e", '"jax[tpu]==')]
)
def test_missing_plugin_is_one_line_with_the_command(name, command, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(checks.InputError, match="is not installed") as error:
        accelerator.devices(accelerator.TARGETS[name])
    assert command in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(SystemExit, match=r"^error: target: "):
        accelerator.main([f"--target={name}"])


@pytest.mark.parametrize("limit", [0, 1, 3, 4, 8, 9])
def test_bisection_finds_the_largest_size(limit):
    sizes = (1, 2, 4, 8)
    asked = []

    def fits(size):
        asked.append(size)
        return size <= limit

    expected = max((size for size in sizes if size <= limit), default=None)
    assert accelerator.largest_fitting(sizes, fits) == expected
    assert len(asked) <= 3


@pytest.mark.parametrize(
    "message",
    [
        "Ran out of memory in memory space hbm. Used 29.10G of 15.75G hbm. Exceeded hbm by 13.35G",
        "the total memory required for HLO temporaries (29.10G) exceeds available HBM (15.75G).",
    ],
)
def test_out_of_memory_messages(message):
    assert accelerator.needed_bytes(message) == pytest.approx(29.1 * accelerator.GIB)
    assert accelerator.needed_bytes("INTERNAL: something else") is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a100", "tpu-v5e"])
def test_training_step_compiles_and_counts_its_arguments(name):
    target = accelerator.TARGETS[name]
    pytest.importorskip(target.plugin)
    where = accelerator.devices(target)
    dense = accelerator.measure(TINY, target, where)
    # The float16 pairs and pools, then the float32 heads, momentum and teacher.
    rows = 2 * (TINY.pairs + TINY.pool) * (TINY.width_x + TINY.width_y)
    weights = 4 * 3 * TINY.dim * (TINY.width_x + TINY.width_y)
    assert dense.fits and dense.arguments >= rows + weights
    assert dense.total >= dense.arguments + dense.temporaries
