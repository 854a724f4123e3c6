"""Predicts the time of the training step on accelerators, by arithmetic.

    python -m benchmarks.model                          # the step, its parts, several devices
    python -m benchmarks.model --targets a100 --unpaired=100000

Every part of the step is a line below: the bytes that it moves, the kernels that it launches, and
the operations of its matrix products. A part takes

    max(bytes / bandwidth, operations / peak) + launches * 4 us + exchanges between devices.

Bandwidth and peaks are those of data sheets. A product runs at the peak of the algorithm that the
library chooses for its role (`sotalign_jax.ot.device`), and kernels are stored where the library
stores them (`sotalign_jax.ot.blocks`). Caches and elementwise operations are not counted, and every
kernel is assumed to reach its limit. Nothing was run on an accelerator.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks import common
from benchmarks.compile import STEP, Workload
from experiments import report as tables
from sotalign_jax import checks
from sotalign_jax.ot import blocks, device


class Device(NamedTuple):
    """Peaks of a device. `device.profile` accepts it in place of a `jax.Device`.

    Attributes:
        platform: "gpu" or "tpu".
        compute_capability: of a GPU.
        gib: memory that JAX may use; three quarters of a GPU.
        bandwidth: TB/s of memory.
        float32: TFLOP/s of float32 products; six bfloat16 passes on a TPU.
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
        """Returns the memory as a `jax.Device` does."""
        return {"bytes_limit": int(self.gib * 2**30)}

    def peak(self, algorithm: Any) -> float:
        """Returns the operations a second of products by an algorithm."""
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
"""Data sheets, but for the host's GB/s of TPUs, a guess. Links are NVLink, PCIe or ICI."""
LAUNCH, LATENCY = 4e-3, 25e-3
"""Milliseconds to launch a kernel on a GPU, and of a small exchange among the devices of one host.
The kernels of a TPU program follow each other."""
LEVELS = 2
"""How often the teacher's kernel is raised to the 4th power: epsilon* 0.005 starts at 0.08."""


class Code(NamedTuple):
    """Sweeps of a version of the library, and their cost.

    Attributes:
        int8: sweeps of the teacher's plan over the int8 kernel.
        exact: sweeps of the teacher's plan over the float32 kernel.
        student: sweeps of the student's plan.
        reads: how often a sweep reads the kernel.
        launches: kernels that a sweep launches on a GPU.
        profile: algorithms of all roles; None for the library's own.
    """

    int8: float
    exact: float
    student: float
    reads: int = 2
    launches: int = 41
    profile: device.Profile | None = None


NEW, NEW_EXACT = Code(34, 2, 5), Code(61, 3, 8)
"""At the training tolerance 1e-2, and to 1e-4. Sweeps are means on COCO's photographs
(`python -m benchmarks.convergence --sweeps`), launches were counted in the program for an A100."""
_PASSES: Any = [device.THREE_PASSES] * 5
OLD = Code(57, 4, 7, 1, 60, device.Profile("old", *_PASSES))
"""The code before, to 1e-4: Pallas kernels read a kernel once, all products take three passes."""
PUBLISHED, PUBLISHED_EXACT = 100 + 100, 610 + 20
"""Log-sum-exp iterations of both plans: as published, which leaves the teacher at 1e-2, and to 1e-4
(`python -m benchmarks.gradient --n 2048 --tolerance 1e-4`, ott-jax without momentum)."""


class Part(NamedTuple):
    """Counts of a part of the step on one device.

    Attributes:
        name: of the part.
        bytes: read from and written to the device's memory.
        launches: of kernels.
        flops: operations of matrix products.
        role: of these products, a field of `device.Profile`.
        sent: bytes of arrays that several devices gather or sum up.
        exchanges: number of these arrays.
    """

    name: str
    bytes: float
    launches: float = 0
    flops: float = 0
    role: str = "float32"
    sent: float = 0
    exchanges: float = 0


def beside_klot(w: Workload, count: int) -> list[Part]:
    """Counts the step without KLOT, on one of `count` devices."""
    n, p, d, e, widths = w.unpaired / count, w.pairs / count, w.dim, w.teacher_dim, w.widths
    x, f, slabs, logits = (n + p) * widths, (n + p) * 2 * d, math.ceil(p / 1024), p * w.pairs
    # One device keeps the pools and the teacher's features of y. Several get rows from their hosts.
    drawn, mapped = (n * (4 * widths + 8 * e), w.width_x) if count == 1 else (0, widths)
    siglip, gathered = 20 * logits + 16 * slabs * w.pairs * d, 8 * w.pairs * d
    return [
        Part("draw", drawn, 15),
        # Rows are cast and normalised, in the backward pass again, and multiplied.
        Part("heads", 20 * x + 12 * f, 50, 4 * x * d, "heads", 8 * widths * d, 2),
        Part("teacher's features", n * (12 * mapped + 36 * e), 20, 2 * n * mapped * e, "heads"),
        Part("SigLIP", siglip, 20 + 14 * slabs, 6 * logits * d, "siglip", gathered, 2),
        Part("optimizer", 36 * widths * d, 12),
    ]


def build(
    plan: str, n: float, m: int, d: int, chip: bool, rows: int, stored: int, times: float
) -> list[Part]:
    """Counts builds of a kernel: affinities by blocks of rows, then their exponentials.

    On a GPU a block is written by the product and read again for its maximum, its sum and each copy
    of the kernel that is stored. A TPU keeps it on chip. `stored` are the bytes of an entry: 4 in
    float32, 1 in int8, 5 in both.
    """
    slabs, kernel, reads = math.ceil(n / rows), 4 * n * m, 2 + (stored > 3) + stored % 2
    product, rest = 4 * d * (n + slabs * m), 2 * stored * n * m  # memory is filled, then written
    if not chip:
        product, rest = product + kernel, rest + reads * kernel
    flops = times * 2 * n * m * d
    return [
        Part(f"{plan}: affinity", times * product, times * 2 * slabs, flops, plan, 4 * m * d, 1),
        Part(f"{plan}: kernel", times * rest, times * 8 * slabs),
    ]


def sweeps(name: str, n: float, m: int, code: Code, count: float, entry: int) -> Part:
    """Counts sweeps over a stored kernel with entries of so many bytes."""
    read = count * code.reads * entry * n * m
    return Part(name, read, count * code.launches, sent=count * 8 * m, exchanges=count)


def gradient(n: float, m: int, d: int, chip: bool, rows: int) -> list[Part]:
    """Counts the gradient by blocks of rows: P - P*, its sums, its products with the features.

    On a GPU the sums of a block read it, or both kernels, again.
    """
    slabs, kernel = math.ceil(n / rows), 4 * n * m
    product, flops = 4 * d * (2 * n + 3 * slabs * m) + (0 if chip else 2) * kernel, 4 * n * m * d
    return [
        Part("gradient: plans", (2 if chip else 7) * kernel, 18 * slabs),
        Part("gradient: products", product, 2 * slabs, flops, "gradient", 4 * m * d, 1),
        Part("gradient: norms", 40 * (n + m) * d, 40),
    ]


def ours(w: Workload, target: Device, code: Code, count: int = 1) -> list[Part]:
    """Counts the step with KLOT in closed form, on one of `count` devices."""
    n, m, chip = w.unpaired / count, w.unpaired, target.platform == "tpu"
    storage = blocks.storage(math.ceil(n), m, "float32", device.profile(target))
    stored, rows = storage.block_size is None, storage.block_size or blocks.BUILD_ROWS
    if not storage.int8:
        raise checks.InputError(f"unpaired: is {m}; pass a number whose int8 kernel pays and fits")
    # Without a float32 kernel every level builds the int8 kernel anew, float32 sweeps compute their
    # rows, and so does the gradient.
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
    """Counts the step with the published loss in the place of ours.

    Its affinities are float32 products, the default of PyTorch. A log-sum-exp reads an affinity
    twice, and an iteration has two of them.
    """
    n, d, e, kernel = w.unpaired, w.dim, w.teacher_dim, 4 * w.unpaired**2
    return [
        *beside_klot(w, 1),
        Part("affinities", 4 * kernel + 16 * n * (2 * d + e), 28, 2 * n * n * (e + 3 * d)),
        Part("iterations", 4 * iterations * kernel, 14 * iterations),
        Part("plans and loss", 12 * kernel, 22),
    ]


def predict(
    parts: Sequence[Part], target: Device, code: Code = NEW, count: int = 1
) -> tuple[float, float, float]:
    """Predicts the milliseconds of parts on one of `count` devices.

    Returns:
        The time of bytes and products, of launches, and of exchanges. Their sum is the whole.
    """
    profile = code.profile or device.profile(target)
    work = launches = exchanges = 0.0
    for part in parts:
        peak = target.peak(getattr(profile, part.role, device.HIGHEST))
        work += max(part.bytes / (1e9 * target.bandwidth), 1e3 * part.flops / peak)
        launches += part.launches * LAUNCH if target.platform == "gpu" else 0.0
        if count > 1:
            sent = part.sent * (1 - 1 / count) / (1e6 * target.link)
            exchanges += sent + part.exchanges * LATENCY
    return work, launches, exchanges


def step_row(name: str, w: Workload) -> list[Any]:
    """Compares a step with the code before, which needs bfloat16, and with the published loss."""
    target = DEVICES[name]
    new, exact, old = (predict(ours(w, target, x), target, x) for x in (NEW, NEW_EXACT, OLD))
    theirs = [sum(predict(published(w, i), target)) for i in (PUBLISHED, PUBLISHED_EXACT)]
    before: list[Any] = [sum(old), old[1]]
    others: list[Any] = [*theirs, theirs[0] / sum(new), theirs[1] / sum(exact)]
    if large := 16 * w.unpaired**2 > target.gib * 2**30:  # four matrices of the published loss
        others = [None] * 4
    if large or not target.bf16:
        before = [None] * 2
    sent = 2 * w.unpaired * w.widths / (1e6 * target.host)
    return [name, sum(new), new[1], sum(exact), *before, *others, sent]


def part_rows(name: str, w: Workload) -> list[list[Any]]:
    """Lists the parts of a step at the training tolerance."""
    target = DEVICES[name]
    rows: list[list[Any]] = [
        [x.name, x.bytes / 1e9, x.flops / 1e12, round(x.launches), sum(predict([x], target))]
        for x in ours(w, target, NEW)
    ]
    rows.append(["the step", *(sum(row[i] for row in rows) for i in range(1, 5))])
    return [[name, *row] for row in rows]


def device_rows(name: str, w: Workload, counts: Sequence[int]) -> list[list[Any]]:
    """Compares numbers of devices that share a step."""
    target = DEVICES[name]
    found = [predict(ours(w, target, NEW, x), target, NEW, x) for x in (1, *counts)]
    one = sum(found[0])
    rows = zip((1, *counts), found, strict=True)
    return [[name, x, sum(ms), ms[2], sum(ms) / one, one / sum(ms)] for x, ms in rows]


COLUMNS = {
    "step": "target|new, 1e-2|of it launches|new, 1e-4|old, 1e-4|of it launches |published|"
    "published, 1e-4|ratio|ratio, 1e-4|rows from the host",
    "parts": "target|part|GB|TFLOP|launches|ms",
    "devices": "target|devices|ms|of it exchanges|of one device|speed-up",
}
"""Headers of the tables. Times are milliseconds."""


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the predicted times."""
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
    }
    for stem, rows in found.items():
        table = tables.Table(COLUMNS[stem].split("|"), rows, digits=1 if stem == "step" else 2)
        common.report(stem, table, args.out / f"model-{stem}")


if __name__ == "__main__":
    common.run(main)
