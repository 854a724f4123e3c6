"""The roofline: what a program's text says, loops by their trip counts, time by the peaks."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from benchmarks import common, programs, roofline
from sotalign_jax import checks
from sotalign_jax.ot.blocks import over_rows

LOOP = """
%sliced (p.0: f32[100,8], p.1: s32[]) -> f32[10,8] {
  %p.0 = f32[100,8]{1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %part = f32[10,8]{1,0} dynamic-slice(%p.0, %p.1, %zero), dynamic_slice_sizes={10,8}
  ROOT %doubled = f32[10,8]{1,0} add(%part, %part)
}
%updated (q.0: f32[100,8], q.1: f32[10,8], q.2: s32[]) -> f32[100,8] {
  %q.0 = f32[100,8]{1,0} parameter(0)
  %q.1 = f32[10,8]{1,0} parameter(1)
  %q.2 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %put = f32[100,8]{1,0} dynamic-update-slice(%q.0, %q.1, %q.2, %zero.1)
}
%body (c: (s32[], f32[100,8])) -> (s32[], f32[100,8]) {
  %c = (s32[], f32[100,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = f32[100,8]{1,0} get-tuple-element(%c), index=1
  %rows = f32[10,8]{1,0} fusion(%x, %i), kind=kLoop, calls=%sliced, metadata={op_name="s/add"}
  %new = f32[100,8]{1,0} fusion(%x, %rows, %i), kind=kLoop, calls=%updated
  %copy = f32[100,8]{1,0} copy(%new)
  ROOT %t = (s32[], f32[100,8]{1,0}) tuple(%i, %copy)
}
%condition (d: (s32[], f32[100,8])) -> pred[] {
  %d = (s32[], f32[100,8]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}
ENTRY %main (y: (s32[], f32[100,8])) -> (s32[], f32[100,8]) {
  %y = (s32[], f32[100,8]{1,0}) parameter(0)
  ROOT %w = (s32[], f32[100,8]{1,0}) while(%y), condition=%condition, body=%body, KNOWN
}
"""
KNOWN = 'backend_config={"known_trip_count":{"n":"7"}}'
NAMED = 'metadata={op_name="jit(f)/5_blocks/while"}'


def kernels(text, *trips):
    return {kernel.name: kernel for kernel in programs.Program(text).kernels(*trips)}


def test_a_loop_counts_slices_and_updates_by_what_they_touch():
    found = kernels(LOOP.replace("KNOWN", KNOWN))
    rows, index = 10 * 8 * 4, 4
    assert {kernel.times for kernel in found.values()} == {7}
    assert found["rows"].bytes == 2 * rows + index  # a slice read, as much written
    assert found["new"].bytes == 2 * rows + index  # the rows read, and written in place
    assert found["copy"].bytes == 2 * 100 * 8 * 4
    assert found["rows"].operations == {programs.VECTOR: 80}


def test_a_loop_of_unknown_length_is_counted_by_its_name_and_owns_what_has_none():
    found = kernels(LOOP.replace("KNOWN", NAMED), roofline.trips({}))
    assert {kernel.times for kernel in found.values()} == {5}
    assert found["copy"].scope == "jit(f)/5_blocks/while"
    assert found["rows"].scope == "s/add"


PRODUCT = """
ENTRY %main (a: f32[4,8], b: f32[8,2]) -> f32[4,2] {
  %a = TYPE[4,8]{1,0LAYOUT} parameter(0)
  %b = TYPE[8,2]{1,0} parameter(1)
  ROOT %d = f32[4,2]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}MORE
}
"""


@pytest.mark.parametrize(
    ("dtype", "more", "key"),
    [
        ("f32", "", "float32 default"),
        ("f32", ", operand_precision={highest,highest}", "float32 highest"),
        ("f32", ", operand_precision={high,high}", "float32 high"),
        ("f32", ", algorithm=dot_bf16_bf16_f32_x3", "dot_bf16_bf16_f32_x3"),
        ("bf16", "", "bfloat16"),
    ],
)
def test_products_count_at_their_precision(dtype, more, key):
    text = PRODUCT.replace("TYPE", dtype).replace("LAYOUT", "").replace("MORE", more)
    assert kernels(text)["d"].operations == {key: 2 * 4 * 8 * 2}
    assert all(key in device.products for device in roofline.DEVICES.values())


def test_arrays_on_chip_move_nothing():
    text = PRODUCT.replace("TYPE", "f32").replace("MORE", "")
    in_memory = kernels(text.replace("LAYOUT", ""))["d"].bytes
    assert in_memory - kernels(text.replace("LAYOUT", ":S(1)"))["d"].bytes == 4 * 8 * 4


RENAMED = """
%renames (r: f32[8,2]) -> f32[2,8] {
  %r = f32[8,2]{1,0} parameter(0)
  ROOT %as = f32[2,8]{0,1} bitcast(%r)
}
%product (a: f32[4,8], b: f32[8,2]) -> f32[4,2] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,2]{1,0} parameter(1)
  %c = f32[2,8]{0,1} fusion(%b), kind=kLoop, calls=%renames
  ROOT %d = f32[4,2]{1,0} dot(%a, %c), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
ENTRY %main (x: f32[4,8], y: f32[8,2]) -> f32[4,2] {
  %x = f32[4,8]{1,0} parameter(0)
  %y = f32[8,2]{1,0} parameter(1)
  ROOT %f = f32[4,2]{1,0} fusion(%x, %y), kind=kOutput, calls=%product, "estimated_cycles":"99"
}
"""


def test_an_operand_that_is_only_renamed_is_read():
    kernel = kernels(RENAMED)["f"]
    assert kernel.bytes == 4 * (4 * 8 + 8 * 2 + 4 * 2)
    assert kernel.operations == {"float32 default": 2 * 4 * 8 * 2}
    assert kernel.cycles == 99


def test_time_is_the_larger_of_bytes_and_operations_at_their_peak():
    def slowest(name, **operations):
        counts = {key.replace("_", " "): 1e12 * n for key, n in operations.items()}
        kernel = programs.Kernel("k", "", "fusion", 1, int(2.039e9), counts)
        return max(roofline.DEVICES[name].limits(kernel))

    assert slowest("a100") == pytest.approx(1e-3)
    assert slowest("a100", float32_highest=19.5) == pytest.approx(1)
    assert slowest("a100", float32_default=156) == pytest.approx(1)
    assert slowest("tpu-v5e", float32_highest=197) == pytest.approx(6)
    assert slowest("tpu-v5e", float32_high=197, bfloat16=197) == pytest.approx(4)


def test_a_compiled_loop_over_blocks_does_what_its_formula_says():
    n, m, d, size = 40, 24, 16, 8

    @jax.jit
    def sums(f, g):
        def body(block, total):
            return total + jnp.exp(block.of(f) @ g.T).sum()

        return over_rows(n, size, body, jnp.zeros(()))

    text = sums.lower(jnp.ones((n, d)), jnp.ones((m, d))).compile().as_text()
    found = list(programs.Program(text).kernels(roofline.trips({})))
    cost = roofline.total(roofline.Cost.of(one, roofline.DEVICES["a100"]) for one in found)
    assert cost.products == 2 * n * m * d
    rows, block = size * d * 4, size * m * 4
    blocks = n // size
    assert cost.bytes >= blocks * (rows + m * d * 4)
    assert cost.bytes <= blocks * (3 * rows + 2 * m * d * 4 + 6 * block)


@pytest.mark.parametrize(("dtype", "operations"), [("f32", 4), ("s8", 7)])
@pytest.mark.parametrize("target", ["tpu_custom_call", "__gpu$xla.gpu.triton"])
def test_a_sweep_reads_its_kernel_once_and_widens_a_narrow_one(dtype, operations, target):
    text = """
ENTRY %main (a: DTYPE[64,32], c: f32[32]) -> f32[64] {
  %a = DTYPE[64,32]{1,0} parameter(0)
  %c = f32[32]{0} parameter(1)
  ROOT %s = f32[64]{0} custom-call(%a, %c), custom_call_target="TARGET"
}"""
    (found,) = kernels(text.replace("DTYPE", dtype).replace("TARGET", target)).values()
    assert found.bytes == 64 * 32 * (4 if dtype == "f32" else 1) + 4 * (32 + 64)
    assert dict(found.operations) == {programs.VECTOR: 64 * 32 * operations}


def test_every_part_of_the_step_is_found_under_its_name():
    n, pairs, d, e, x, y = 320, 64, 16, 24, 32, 48  # two blocks of 256 rows, which overlap
    workload = roofline.Workload(pairs, n, 512, x, y, d, e)
    step = roofline.lower(workload, jax.devices()[:1]).compile()
    plans = {
        "teacher_plan": roofline.Iterations(9, levels=3),
        "student_plan": roofline.Iterations(5),
    }
    found = list(programs.Program(step.as_text()).kernels(roofline.trips(plans)))
    parts = roofline.parts(found, roofline.DEVICES["a100"])
    ours = {name for key, name in roofline.PARTS.items() if "affinities" not in key}
    # Both plans are multiplied at once, and the teacher's features of y, whose rows are wider than
    # them, are known before.
    assert set(parts) == ours - {"log-sum-exp iterations", "teacher: products"}
    assert parts["teacher's features"].products == 2 * n * x * e
    computed = 512 * n  # entries of an affinity
    assert parts["heads"].products >= 2 * 2 * (n + pairs) * (x + y) * d
    assert parts["SigLIP"].products >= 3 * 2 * pairs**2 * d
    for name, width in (("teacher", e), ("student", d)):
        built = parts[f"{name}: affinity and kernel"].products
        assert built == 2 * computed * (width + 1)  # rows of K, and their sums
    assert parts["student: products"].products == 2 * 2 * computed * d
    sweeps = parts["teacher: sweeps"]
    assert sweeps.bytes >= 9 * 2 * n * n * 4
    assert sweeps.products >= 9 * 2 * 2 * n * n
    share = sum(cost.seconds for cost in parts.values()) / roofline.total(parts.values()).seconds
    assert share == pytest.approx(1)
    assert parts["rest"].seconds < 0.05 * roofline.total(parts.values()).seconds


def test_with_one_buffer_each_plan_is_multiplied_by_itself():
    workload = roofline.Workload(64, 320, 512, 32, 48, 16, 24)
    step = roofline.lower(workload, jax.devices()[:1], roofline.OneBuffer()).compile()
    found = list(programs.Program(step.as_text()).kernels(roofline.trips(roofline.WITHOUT_COPY)))
    parts = roofline.parts(found, roofline.DEVICES["a100"])
    for name in ("teacher", "student"):
        assert parts[f"{name}: products"].products == 2 * 2 * 512 * 320 * 16


CONDITION = """
%one (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %x = f32[8]{0} negate(%a)
}
%two (b: f32[8]) -> f32[8] {
  %b = f32[8]{0} parameter(0)
  %y = f32[8]{0} negate(%b)
  ROOT %z = f32[8]{0} negate(%y)
}
ENTRY %main (p: pred[], c: f32[8]) -> f32[8] {
  %p = pred[] parameter(0)
  %c = f32[8]{0} parameter(1)
  ROOT %d = f32[8]{0} conditional(%p, %c, %c), true_computation=%two, false_computation=%one, SCOPE
}
"""


def test_of_a_condition_the_cheaper_branch_runs_but_sweeps_run_by_their_share():
    assert set(kernels(CONDITION)) == {"x"}
    plan = roofline.trips({"plan": roofline.Iterations(60, 15)})
    scope = 'metadata={op_name="plan/sweeps/while/body/narrow_or_exact/cond"}'
    found = kernels(CONDITION.replace("SCOPE", scope), plan)
    assert {name: kernel.times for name, kernel in found.items()} == {
        "x": 0.75,
        "y": 0.25,
        "z": 0.25,
    }


def test_a_target_is_required_and_checked():
    with pytest.raises(checks.InputError, match="target: is not set"):
        roofline.main([])
    with pytest.raises(SystemExit):
        roofline.main(["--target=abacus"])
    with pytest.raises(checks.InputError, match="unpaired"):
        roofline.main(["--target=a100", "--unpaired=0"])


@pytest.mark.parametrize(
    ("name", "command"), [("a100", 'pip install "jax[cuda12]=='), ("tpu-v5e", '"jax[tpu]==')]
)
def test_missing_plugin_is_one_line_with_the_command(name, command, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(checks.InputError, match="is not installed") as error:
        roofline.devices(name)
    assert command in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(SystemExit, match=r"^error: target: "):
        common.run(lambda: roofline.main([f"--target={name}", "--arms", "ours"]))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plugin"), [("a100", "jax_plugins"), ("tpu-v5e", "libtpu")])
def test_training_step_compiles_and_counts_its_arguments(name, plugin):
    pytest.importorskip(plugin)
    tiny = roofline.Workload(64, 256, 512, width_x=32, width_y=48, dim=16, teacher_dim=16)
    step = roofline.compile_step(name, 1, tiny)
    # The float16 pairs and pools, then the float32 heads, momentum and teacher.
    rows = 2 * (tiny.pairs + tiny.pool) * (tiny.width_x + tiny.width_y)
    weights = 4 * 3 * tiny.dim * (tiny.width_x + tiny.width_y)
    assert step.arguments * roofline.GIB >= rows + weights
    assert step.total >= step.arguments + step.temporaries


def test_the_published_loss_reads_both_affinities_in_every_iteration():
    n, d, e = 64, 8, 12
    workload = roofline.Workload(32, n, 128, 16, 24, d, e)
    step = roofline.lower(workload, jax.devices()[:1], roofline.Published()).compile()
    found = list(programs.Program(step.as_text()).kernels(roofline.trips({})))
    parts = roofline.parts(found, roofline.DEVICES["a100"])
    # Two log-sum-exps an iteration, of two reads each: the largest entry, then the sum.
    assert parts["log-sum-exp iterations"].bytes >= 2 * 100 * 2 * 2 * n * n * 4
    assert parts["affinities and their gradient"].products == 2 * n * n * (e + 3 * d)


def test_on_this_machine_parts_are_predicted_and_timed():
    x = jnp.ones((64, 64))
    parts = {"product": (jax.jit(jnp.matmul), (x, x)), "sum": (jax.jit(jnp.sum), (x,))}
    device = roofline.Device(1e12, {"float32 default": 2.0 * 64**3}, 1e12)
    table = roofline.compare(parts, device, {})
    rows = {name: numbers for name, *numbers in table.rows}
    assert list(rows) == ["product", "sum", "sum of parts"]
    assert rows["product"][0] == pytest.approx(1e3)
    assert 1e3 * 4 * 64**2 / 1e12 <= rows["sum"][0] <= 1e3 * 10 * 64**2 / 1e12
    for predicted, measured, ratio in rows.values():
        assert measured > 0 and ratio == pytest.approx(measured / predicted)
