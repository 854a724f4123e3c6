"""Predicts the time of the training step on accelerators from data sheets.

    python -m benchmarks.model            # the step, its parts, devices, refinement, sweeps
    python -m benchmarks.model --targets a100 --unpaired=100000

Each part of the step is described by the bytes that it moves, the kernels that it launches, and the
operations of its matrix products. A part takes

    max(bytes / bandwidth, operations / peak) + launches * 4 us + exchanges between devices.

Bandwidths and peaks are those of data sheets. A product runs at the peak of the algorithm that the
library chooses for its role (`sotalign_jax.ot.device`). Kernels of the solver are stored as the
library stores them (`sotalign_jax.ot.blocks`). Caches and elementwise operations are not counted,
and all programs are assumed to reach the limit of the device. Nothing is run on an accelerator.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks import common
from benchmarks.compile import STEP, Workload
from sotalign_jax import checks
from sotalign_jax.ot import blocks, device


class Device(NamedTuple):
    """Data sheet of a device. `device.profile` accepts it in place of a `jax.Device`.

    Attributes:
        platform: "gpu" or "tpu".
        compute_capability: That of a GPU, or "".
        gib: GiB of memory that JAX may use, three quarters of a GPU.
        bandwidth: TB/s of memory.
        float32: TFLOP/s of float32 products, which take six bfloat16 passes on a TPU.
        tf32: TFLOP/s of TF32 products.
        bf16: TFLOP/s of bfloat16 products, without sparsity.
        host: GB/s from the host.
        link: GB/s to the other devices, in one direction.
    """

    platform: str
    compute_capability: str
    gib: float
    bandwidth: float
    float32: float
    tf32: float
    bf16: float
    host: float
    link: float

    def memory_stats(self) -> dict[str, int]:
        """Returns the memory limit in the form of `jax.Device.memory_stats`."""
        return {"bytes_limit": int(self.gib * 2**30)}

    def peak(self, algorithm: Any) -> float:
        """Returns the operations per second of matrix products by an algorithm."""
        peaks = {device.HIGHEST: self.float32, device.TF32: self.tf32}
        peaks[device.THREE_PASSES] = self.bf16 / 3
        return 1e12 * (peaks[algorithm] or math.nan)


DEVICES = {
    "t4": Device("gpu", "7.5", 11.25, 0.320, 8.1, 0, 0, 12, 12),
    "v100": Device("gpu", "7.0", 12, 0.900, 15.7, 0, 0, 12, 150),
    "rtx3090": Device("gpu", "8.6", 18, 0.936, 35.6, 35.6, 71, 25, 25),
    "rtx4090": Device("gpu", "8.9", 18, 1.008, 82.6, 82.6, 165, 25, 25),
    "a100": Device("gpu", "8.0", 60, 2.039, 19.5, 156, 312, 25, 300),
    "h100": Device("gpu", "9.0", 60, 3.350, 67, 495, 989, 50, 450),
    "b200": Device("gpu", "10.0", 135, 8.000, 75, 1125, 2250, 50, 900),
    "tpu-v4": Device("tpu", "", 32, 1.228, 275 / 6, 0, 275, 16, 90),
    "tpu-v5e": Device("tpu", "", 16, 0.819, 197 / 6, 0, 197, 16, 90),
    "tpu-v6e": Device("tpu", "", 32, 1.640, 918 / 6, 0, 918, 16, 180),
    "tpu-v5p": Device("tpu", "", 95, 2.765, 459 / 6, 0, 459, 16, 180),
}
"""Values of data sheets, except for the host's GB/s of TPUs, which are guesses. Links are NVLink,
PCIe or ICI."""
LAUNCH, LATENCY = 4e-3, 25e-3
"""Milliseconds to launch a kernel on a GPU, and of a small exchange among the devices of one host.
A TPU program has no launches."""
LEVELS = 2
"""Number of times the teacher's kernel is raised to the 4th power, from epsilon 0.08 to 0.005."""


class Code(NamedTuple):
    """Numbers of sweeps of both plans, and the cost of a sweep.

    Attributes:
        int8: Sweeps of the teacher's plan over the int8 kernel.
        exact: Sweeps of the teacher's plan over the float32 kernel.
        student: Sweeps of the student's plan.
        reads: Number of times that a sweep reads the kernel.
        launches: Number of launches of a sweep on a GPU.
        profile: Algorithms of all roles. None is the library's profile of the device.
    """

    int8: float
    exact: float
    student: float
    reads: int = 2
    launches: int = 41
    profile: device.Profile | None = None


TRAINING, EXACT = Code(34, 2, 5), Code(61, 3, 8)
"""Sweeps at the training tolerance of 1e-2, and at 1e-4. They are means on COCO's photographs
(`python -m benchmarks.convergence --sweeps`). Launches were counted in the program for an A100."""
PUBLISHED, PUBLISHED_EXACT = 100 + 100, 610 + 20
"""Log-sum-exp iterations of both plans: 200 as published, which leave the teacher at an error of
1e-2, and 630 for 1e-4 (`python -m benchmarks.gradient --n 2048 --tolerance 1e-4`, ott-jax without
momentum)."""


REFINED_FEATURES, REFINED_SWEEPS = 512, 13
"""Features of a refined teacher, and sweeps of its plan at epsilon 0.03 and a tolerance of 1e-2: 13
on COCO, 8 on code and 4 on speech, with 5,000 rows of each pool and the teacher of 500 pairs."""
FLASH_SHAPE, FLASH_ITERATIONS, FLASH_MS = (20_000, 64), 10, 21.7
"""Rows per side and width, alternating iterations, and their milliseconds on an A100, as published
by F. Ye et al., "FlashSinkhorn: IO-aware entropic optimal transport", arXiv:2602.03067."""
TRAINING_STEPS = 2000
"""Steps of the paper's training."""


class Part(NamedTuple):
    """Cost of a part of the step on one device.

    Attributes:
        name: Name of the part.
        bytes: Bytes read from and written to the device's memory.
        launches: Number of kernel launches.
        flops: Operations of matrix products.
        role: Role of these products, a field of `device.Profile`.
        sent: Bytes of arrays that several devices gather or sum up.
        exchanges: Number of these arrays.
    """

    name: str
    bytes: float
    launches: float = 0
    flops: float = 0
    role: str = "float32"
    sent: float = 0
    exchanges: float = 0


def beside_klot(w: Workload, count: int) -> list[Part]:
    """Returns the parts of the step without KLOT, on one device.

    Args:
        w: Shapes.
        count: Number of devices that share the step.
    """
    n, p, d, e, widths = w.unpaired / count, w.pairs / count, w.dim, w.teacher_dim, w.widths
    x, f, slabs, logits = (n + p) * widths, (n + p) * 2 * d, math.ceil(p / 1024), p * w.pairs
    # A single device keeps the pools and the teacher's features of y. Several devices receive the
    # rows of a batch from their hosts.
    drawn, mapped = (n * (4 * widths + 8 * e), w.width_x) if count == 1 else (0, widths)
    siglip, gathered = 20 * logits + 16 * slabs * w.pairs * d, 8 * w.pairs * d
    return [
        Part("draw", drawn, 15),
        # Rows are cast, normalized and multiplied, in the backward pass once more.
        Part("heads", 20 * x + 12 * f, 50, 4 * x * d, "heads", 8 * widths * d, 2),
        Part("teacher's features", n * (12 * mapped + 36 * e), 20, 2 * n * mapped * e, "heads"),
        Part("SigLIP", siglip, 20 + 14 * slabs, 6 * logits * d, "siglip", gathered, 2),
        Part("optimizer", 36 * widths * d, 12),
    ]


def build(
    plan: str, n: float, m: int, d: int, chip: bool, rows: int, stored: int, times: float
) -> list[Part]:
    """Returns the cost of building a kernel: affinities by blocks of rows, and their exponentials.

    On a GPU a block is written by the product and read again for its maximum, its sum and each
    stored copy of the kernel. A TPU keeps it on chip.

    Args:
        plan: "teacher" or "student".
        n: Rows on this device.
        m: Columns.
        d: Width of the features.
        chip: True if blocks stay on chip, as on a TPU.
        rows: Rows per block.
        stored: Bytes per stored entry: 4 for float32, 1 for int8, 5 for both.
        times: Number of builds.
    """
    slabs, kernel, reads = math.ceil(n / rows), 4 * n * m, 2 + (stored > 3) + stored % 2
    # XLA fills the memory of a kernel before the blocks are written, hence the factor 2.
    product, rest = 4 * d * (n + slabs * m), 2 * stored * n * m
    if not chip:
        product, rest = product + kernel, rest + reads * kernel
    flops = times * 2 * n * m * d
    return [
        Part(f"{plan}: affinity", times * product, times * 2 * slabs, flops, plan, 4 * m * d, 1),
        Part(f"{plan}: kernel", times * rest, times * 8 * slabs),
    ]


def sweeps(name: str, n: float, m: int, code: Code, count: float, entry: int) -> Part:
    """Returns the cost of sweeps over a stored kernel.

    Args:
        name: Name of the part.
        n: Rows on this device.
        m: Columns.
        code: Cost of a sweep.
        count: Number of sweeps.
        entry: Bytes per entry of the kernel.
    """
    read = count * code.reads * entry * n * m
    return Part(name, read, count * code.launches, sent=count * 8 * m, exchanges=count)


def gradient(n: float, m: int, d: int, chip: bool, rows: int) -> list[Part]:
    """Returns the cost of the gradient: P - P* by blocks of rows, its sums and its products.

    Args:
        n: Rows on this device.
        m: Columns.
        d: Width of the features.
        chip: True if blocks stay on chip, as on a TPU. Otherwise the sums read them again.
        rows: Rows per block.
    """
    slabs, kernel = math.ceil(n / rows), 4 * n * m
    product, flops = 4 * d * (2 * n + 3 * slabs * m) + (0 if chip else 2) * kernel, 4 * n * m * d
    return [
        Part("gradient: plans", (2 if chip else 7) * kernel, 18 * slabs),
        Part("gradient: products", product, 2 * slabs, flops, "gradient", 4 * m * d, 1),
        Part("gradient: norms", 40 * (n + m) * d, 40),
    ]


def ours(w: Workload, target: Device, code: Code, count: int = 1) -> list[Part]:
    """Returns the parts of our step.

    Args:
        w: Shapes.
        target: The device.
        code: Numbers of sweeps.
        count: Number of devices that share the step.

    Raises:
        InputError: The library would not use an int8 kernel, which this model assumes.
    """
    n, m, chip = w.unpaired / count, w.unpaired, target.platform == "tpu"
    storage = blocks.storage(math.ceil(n), m, "float32", device.profile(target))
    stored, rows = storage.block_size is None, storage.block_size or blocks.BUILD_ROWS
    if not storage.int8:
        raise checks.InputError(
            f"unpaired is {m}, for which no int8 kernel is used; pass another number"
        )
    # Without a stored float32 kernel, each level builds the int8 kernel again, and float32 sweeps
    # and the gradient compute its rows again.
    teacher = 1 + (not storage.both) + (0 if stored else LEVELS + code.exact)
    student = 1 if stored else 2 + code.exact
    parts = [
        *build("teacher", n, m, w.teacher_dim, chip, rows, 5 if stored else 1, teacher),
        sweeps("teacher: int8 sweeps", n, m, code, code.int8, 1 if storage.int8 else 4),
        *build("student", n, m, w.dim, chip, rows, 4 if stored else 1, student),
        sweeps("student: sweeps", n, m, code, code.student, 4 if stored else 1),
        *gradient(n, m, w.dim, chip, storage.block_size or blocks.PRODUCT_ROWS),
    ]
    if stored:
        parts.append(sweeps("teacher: float32 sweeps", n, m, code, code.exact, 4))
        parts.append(Part("teacher: levels", LEVELS * 9 * n * m, 60 * (LEVELS + 1)))
    return beside_klot(w, count) + parts


def published(w: Workload, iterations: int) -> list[Part]:
    """Returns the parts of the step with the published loss.

    Its affinities are float32 products, the default of PyTorch. A log-sum-exp reads an affinity
    twice, and an iteration has two of them.

    Args:
        w: Shapes.
        iterations: Iterations of both plans.
    """
    n, d, e, kernel = w.unpaired, w.dim, w.teacher_dim, 4 * w.unpaired**2
    return [
        *beside_klot(w, 1),
        Part("affinities", 4 * kernel + 16 * n * (2 * d + e), 28, 2 * n * n * (e + 3 * d)),
        Part("iterations", 4 * iterations * kernel, 14 * iterations),
        Part("plans and loss", 12 * kernel, 22),
    ]


def refinement(w: Workload, target: Device) -> list[Part]:
    """Returns the parts of one round of `teachers.refine` on a device, without the host's work.

    Its kernel is stored in float32 and has no int8 copy. Its plan is multiplied with the rows of
    one pool and then with those of the other, a block at a time.

    Args:
        w: Shapes.
        target: The device.
    """
    n, r, chip = w.unpaired, REFINED_FEATURES, target.platform == "tpu"
    slabs = math.ceil(n / blocks.PRODUCT_ROWS)
    product = 4 * r * (2 * n + 2 * slabs * n) + (1 if chip else 3) * 4 * n * n
    return [
        *build("teacher", n, n, r, chip, blocks.BUILD_ROWS, 4, 1),
        sweeps("sweeps", n, n, TRAINING, REFINED_SWEEPS, 4),
        Part("cross-moment", product, 20 * slabs, 2 * n * n * r + 2 * n * r * r, "teacher"),
    ]


def predict(
    parts: Sequence[Part], target: Device, code: Code = TRAINING, count: int = 1
) -> tuple[float, float, float]:
    """Predicts the milliseconds of parts.

    Args:
        parts: Parts of a step.
        target: The device.
        code: Numbers of sweeps, whose profile is used if there is one.
        count: Number of devices that share the step.

    Returns:
        The times of bytes and products, of launches, and of exchanges. The step takes their sum.
    """
    profile = code.profile or device.profile(target)
    work = launches = exchanges = 0.0
    for part in parts:
        peak = target.peak(getattr(profile, part.role, device.HIGHEST))
        work += max(part.bytes / (1e9 * target.bandwidth), 1e3 * part.flops / peak)
        launches += part.launches * LAUNCH if target.platform == "gpu" else 0.0
        if count > 1:
            # In a ring, each device sends this share of an array.
            sent = part.sent * (1 - 1 / count) / (1e6 * target.link)
            exchanges += sent + part.exchanges * LATENCY
    return work, launches, exchanges


def step_row(name: str, w: Workload) -> list[Any]:
    """Returns the table row that compares our step with the published loss.

    Args:
        name: Name of the device.
        w: Shapes.
    """
    target = DEVICES[name]
    trained, exact = (predict(ours(w, target, code), target, code) for code in (TRAINING, EXACT))
    theirs = [sum(predict(published(w, i), target)) for i in (PUBLISHED, PUBLISHED_EXACT)]
    others: list[Any] = [*theirs, theirs[0] / sum(trained), theirs[1] / sum(exact)]
    if 16 * w.unpaired**2 > target.gib * 2**30:  # four matrices of the published loss do not fit
        others = [None] * 4
    sent = 2 * w.unpaired * w.widths / (1e6 * target.host)
    return [name, sum(trained), trained[1], sum(exact), *others, sent]


def part_rows(name: str, w: Workload) -> list[list[Any]]:
    """Returns a table row per part of a step at the training tolerance.

    Args:
        name: Name of the device.
        w: Shapes.
    """
    target = DEVICES[name]
    rows: list[list[Any]] = [
        [x.name, x.bytes / 1e9, x.flops / 1e12, round(x.launches), sum(predict([x], target))]
        for x in ours(w, target, TRAINING)
    ]
    rows.append(["the step", *(sum(row[i] for row in rows) for i in range(1, 5))])
    return [[name, *row] for row in rows]


def device_rows(name: str, w: Workload, counts: Sequence[int]) -> list[list[Any]]:
    """Returns a table row per number of devices that share a step.

    Args:
        name: Name of the device.
        w: Shapes.
        counts: Numbers of devices.
    """
    target = DEVICES[name]
    found = [predict(ours(w, target, TRAINING, x), target, TRAINING, x) for x in (1, *counts)]
    one = sum(found[0])
    rows = zip((1, *counts), found, strict=True)
    return [[name, x, sum(ms), ms[2], sum(ms) / one, one / sum(ms)] for x, ms in rows]


def refinement_row(name: str, w: Workload) -> list[Any]:
    """Returns the table row that compares a round of the refinement with the paper's training.

    Args:
        name: Name of the device.
        w: Shapes.
    """
    target = DEVICES[name]
    seconds = sum(predict(refinement(w, target), target)) / 1e3
    training = TRAINING_STEPS * sum(predict(ours(w, target, TRAINING), target)) / 1e3
    return [name, seconds, training, training / seconds]


def sweep_rows(target: Device, n: int, widths: Sequence[int]) -> list[list[Any]]:
    """Returns table rows that compare a sweep with FlashSinkhorn, by width of the features.

    Args:
        target: The device.
        n: Rows and columns of the plan.
        widths: Widths of the features.
    """
    rows: list[list[Any]] = []
    potentials = 2 * 4 * n / common.MEBIBYTE
    for d in widths:
        published = FLASH_MS / FLASH_ITERATIONS if (n, d) == FLASH_SHAPE else None
        rows.append(["FlashSinkhorn, published", d, published, 0.0, potentials])
        # An iteration computes the affinity twice, for its rows and for its columns.
        bound = 1e3 * 2 * 2 * n * n * d / target.peak(device.TF32)
        rows.append(["its products at the peak of TF32", d, bound, 0.0, potentials])
        for label, entry in (("ours, int8 kernel", 1), ("ours, float32 kernel", 4)):
            made = build("teacher", n, n, d, False, blocks.BUILD_ROWS, entry, 1)
            once = sum(predict(made, target))
            each = sum(predict([sweeps("", n, n, TRAINING, 1, entry)], target))
            rows.append([label, d, each, once, entry * n * n / common.MEBIBYTE])
    return rows


COLUMNS = {
    "step": "target|ours, 1e-2|launches|ours, 1e-4|published|published, 1e-4|ratio|ratio, 1e-4|"
    "host to device",
    "parts": "target|part|GB|TFLOP|launches|ms",
    "devices": "target|devices|ms|communication|relative|speed-up",
    "refine": "target|seconds a round|seconds of training|ratio",
    "sweep": "code|width|ms a sweep|ms once|MiB",
}
"""Headers of the tables. Times are in milliseconds, unless the header says otherwise."""


def main(argv: Sequence[str] | None = None) -> None:
    """Predicts the times of the step, of its parts and of several devices."""
    sizes = {"devices": [2, 8], "pairs": 10_000, "unpaired": 22_768}
    args = common.options(__doc__, argv, targets=["all"], **sizes)
    checks.whole(1, pairs=args.pairs, unpaired=args.unpaired, devices=min(args.devices))
    names, some = (DEVICES, STEP) if args.targets == ["all"] else [args.targets] * 2
    for name in names:
        checks.choice("targets", name, tuple(DEVICES))
    w = Workload(args.pairs, args.unpaired)
    found = {
        "step": [step_row(name, w) for name in names],
        "parts": [row for name in some for row in part_rows(name, w)],
        "devices": [row for name in some for row in device_rows(name, w, args.devices)],
        "refine": [refinement_row(name, w) for name in names],
        "sweep": sweep_rows(DEVICES["a100"], FLASH_SHAPE[0], [FLASH_SHAPE[1], w.dim]),
    }
    for stem, rows in found.items():
        table = common.Table(COLUMNS[stem].split("|"), rows, digits=1 if stem == "step" else 2)
        common.publish(stem, table, args.out / f"model-{stem}")


if __name__ == "__main__":
    common.run(main)
