"""Tests of predicted step times, and of compilation for absent devices."""

import csv
import dataclasses
import importlib.util

import jax
import pytest

from benchmarks import common, compile, model
from sotalign_jax import checks
from sotalign_jax.ot import device

PAPER = compile.Workload()
TINY = compile.Workload(64, 256, 512, width_x=32, width_y=48, dim=16, teacher_dim=24)


def total(parts, field):
    return sum(getattr(part, field) for part in parts)


def test_ours_counts_the_flops_of_the_paper_step():
    """Compares with a count by hand: products count once, and twice in the backward pass."""
    n, p, d, e, x, y = 22_768, 10_000, 1024, 2048, 2048, 4096
    heads = 2 * 2 * (n + p) * (x + y) * d  # forward, and the gradient of the weights
    klot = 2 * n * n * e + 2 * n * n * d + 2 * 2 * n * n * d  # affinities, gradient of both sides
    by_hand = heads + 2 * n * x * e + 3 * 2 * p * p * d + klot
    assert by_hand == pytest.approx(6.94e12, rel=1e-3)
    for target in model.DEVICES.values():
        parts = model.ours(PAPER, target, model.TRAINING)
        assert total(parts, "flops") == pytest.approx(by_hand)
        assert total(parts, "bytes") >= 80e9


PALLAS = model.Code(57, 4, 7, 1, 60, device.Profile("pallas", *[device.THREE_PASSES] * 5))
"""A solver whose kernels read the Gibbs kernel once, with all products in three passes."""


@pytest.mark.parametrize(("name", "bound"), [("a100", 124.5), ("h100", 56.2), ("tpu-v5e", 200.5)])
def test_predict_matches_bytes_of_compiled_programs(name, bound):
    """The bounds are times of the bytes that XLA reported for programs with such kernels."""
    target = model.DEVICES[name]
    work, _, _ = model.predict(model.ours(PAPER, target, PALLAS), target, PALLAS)
    assert work == pytest.approx(bound, rel=0.08)


def test_predict_takes_the_slower_of_bytes_and_flops_plus_launches():
    a100, ms = model.DEVICES["a100"], 2.039e9
    assert sum(model.predict([model.Part("", ms)], a100)) == pytest.approx(1)
    part = model.Part("", ms, 100, flops=156e9 * 3, role="student")  # TF32
    assert model.predict([part], a100) == pytest.approx((3, 0.4, 0))
    part = part._replace(role="teacher")  # three passes of bfloat16
    assert model.predict([part], a100)[0] == pytest.approx(3 * 156 / 104)
    v5e = model.predict([part], model.DEVICES["tpu-v5e"])
    assert v5e == pytest.approx((468 / (197 / 3), 0, 0))


@pytest.mark.parametrize("name", model.DEVICES)
def test_devices_have_a_peak_for_every_algorithm_of_their_profile(name):
    target = model.DEVICES[name]
    for algorithm in device.profile(target)[1:6]:
        assert target.peak(algorithm) > 0
    slow = model.predict(model.published(PAPER, model.PUBLISHED), target)
    assert sum(slow) > sum(model.predict(model.ours(PAPER, target, model.TRAINING), target)) > 0


@pytest.mark.parametrize("name", ["a100", "t4", "tpu-v5e"])
def test_device_rows_of_two_devices_take_little_more_than_half(name):
    one, two = model.device_rows(name, PAPER, [2])
    assert one[4] == 1 and 0.5 < two[4] <= 0.58 and two[3] > one[3] == 0


def test_ours_streams_if_float32_kernels_do_not_fit():
    large = dataclasses.replace(PAPER, unpaired=100_000)
    parts = model.ours(large, model.DEVICES["a100"], model.TRAINING)
    teacher = 2 * 100_000**2 * PAPER.teacher_dim
    again = next(part for part in parts if part.name == "teacher: affinity").flops / teacher
    # Builds at three epsilons, exact sweeps and the gradient compute the affinity.
    assert again == 3 + model.TRAINING.exact + 1
    assert "teacher: float32 sweeps" not in {part.name for part in parts}


def test_main_writes_every_table(tmp_path):
    model.main([f"--out={tmp_path}", "--targets", "t4", "a100", "--devices", "4"])
    with (tmp_path / "model-step.csv").open() as file:
        rows = {row["target"]: row for row in csv.DictReader(file)}
    assert rows.keys() == {"t4", "a100"} and float(rows["a100"]["ratio, 1e-4"]) > 1
    with (tmp_path / "model-devices.csv").open() as file:
        counts = [(row["target"], row["devices"]) for row in csv.DictReader(file)]
    assert counts == [("t4", "1"), ("t4", "4"), ("a100", "1"), ("a100", "4")]
    assert (tmp_path / "model-parts.csv").exists()
    with pytest.raises(checks.InputError, match="targets"):
        model.main(["--targets", "abacus"])


def test_documented_predictions_match_the_model(tmp_path, capsys):
    model.main([f"--out={tmp_path}"])
    blocks = capsys.readouterr().out.split("\n\n")
    step, parts, devices, refine = (block for block in blocks if block.startswith("| target"))
    one, several = (
        (common.RESULTS.parent / name).read_text() for name in ("ACCELERATORS.md", "SCALING.md")
    )
    assert step in one and refine in one and devices in several
    assert all(line in one for line in parts.splitlines() if line.startswith("| a100"))


# --- compile ---


def test_describe_without_compiler_names_the_pip_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    for name, extra in (("a100", "cuda12"), ("tpu-v5e", "tpu")):
        with pytest.raises(checks.InputError, match=rf'pip install "jax\[{extra}\]==') as error:
            compile.describe(name)
        assert "\n" not in str(error.value)
    with pytest.raises(SystemExit, match=r"^error: targets"):
        common.run(lambda: compile.main(["--targets", "t4"]))


def test_every_gpu_has_a_target_description():
    for name in compile.GPUS:
        assert (common.RESULTS.parent / "targets" / f"{name}.txtpb").exists()
        assert name in model.DEVICES


@pytest.mark.parametrize("what", ["klot", "step"])
def test_compile_for_reports_program_memory(what):
    own = jax.devices()[:1]
    lower = {
        "klot": lambda: compile.lower_klot(TINY, own[0]),
        "step": lambda: compile.lower_step(TINY, own),
    }
    temporaries, whole, seconds, compiles = compile.compile_for(device.profile(), lower[what])
    assert compiles == "yes" and seconds > 0
    # klot holds float32 features and gradients. A step holds float16 rows, heads and momentum.
    features = 4 * TINY.unpaired * (4 * TINY.dim + 2 * TINY.teacher_dim)
    rows = 2 * (TINY.pairs + TINY.pool) * TINY.widths + 2 * 4 * TINY.dim * TINY.widths
    least = {"klot": features, "step": rows}[what]
    assert whole - temporaries >= least / common.MEBIBYTE


def test_compile_for_reports_compile_errors():
    def fails():
        raise TypeError("dtypes differ\nand more")

    *sizes, _, compiles = compile.compile_for(device.profile(), fails)
    assert sizes == [None, None] and compiles == "dtypes differ"


@pytest.mark.slow
@pytest.mark.optional
@pytest.mark.parametrize(("name", "plugin"), [("t4", "jax_plugins"), ("tpu-v5e", "libtpu")])
def test_main_compiles_for_absent_devices(name, plugin, tmp_path):
    pytest.importorskip(plugin)
    compile.main([f"--out={tmp_path}", "--targets", name, "--n", "1024"])
    with (tmp_path / "compile-klot.csv").open() as file:
        assert {row["compiles"] for row in csv.DictReader(file)} == {"yes"}
