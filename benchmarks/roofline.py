"""Least time of the training step on an accelerator: its bytes and operations against the peaks.

    python -m benchmarks.roofline --target=a100     # or h100, tpu-v5e, tpu-v6e, tpu-v5p, cpu

XLA compiles the step that `training.fit` runs, at the paper's size, for a device that need not be
there. Each kernel of the program takes at least

    time = max(bytes / bandwidth, products / their peak, other operations / the vector peak),

where products count at the peak of their precision, and loops as often as a real run repeats them
(`ITERATIONS`). The same is done for the step with the published loss and with ott-jax's plans.
`--target=cpu` asks how far to trust it: bandwidth and peaks of this machine are measured, then the
parts of a small step are predicted and timed.
"""

import argparse
import collections
import dataclasses
import functools
import importlib.util
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from benchmarks import accelerator, common, programs
from experiments import report as tables
from sotalign_jax import checks, methods, sampling
from sotalign_jax.ot import affinity
from sotalign_jax.ot.klot import klot_reference

# --- assumptions ---


class Device(NamedTuple):
    """Peaks: bytes a second, and operations a second of products by precision and of the rest."""

    bandwidth: float
    products: Mapping[str, float]
    vector: float
    clock: float = 0.0
    """Of a TPU, to tell its compiler's estimates in seconds."""

    def limits(self, kernel: programs.Kernel) -> tuple[float, float]:
        """Seconds of one run of a kernel: for its bytes, and for its operations."""
        counts = dict(kernel.operations)
        vector = counts.pop(programs.VECTOR, 0.0) / self.vector
        products = sum(count / self.products[key] for key, count in counts.items())
        return kernel.bytes / self.bandwidth, max(products, vector)


def _gpu(terabytes: float, fp32: float, tf32: float, bf16: float) -> Device:
    """Full float32 products run outside the tensor cores; anything less is one TF32 pass."""
    products = {
        "float32 highest": fp32,
        "float32 high": tf32,
        "float32 default": tf32,
        "bfloat16": bf16,
        "float16": bf16,
        "dot_tf32_tf32_f32": tf32,
        "dot_tf32_tf32_f32_x3": tf32 / 3,
        **_passes(bf16),
    }
    return _device(terabytes, products, vector=fp32)


def _tpu(terabytes: float, bf16: float, vector: float, gigahertz: float) -> Device:
    """Float32 products are passes of bfloat16: 6 for the highest precision, 3 for high."""
    passes = {"float32 highest": 6, "float32 high": 3, "float32 default": 1, "bfloat16": 1}
    products = {key: bf16 / n for key, n in passes.items()}
    made = _device(terabytes, {**products, **_passes(bf16)}, vector)
    return made._replace(clock=1e9 * gigahertz)


def _passes(bf16: float) -> dict[str, float]:
    """Products that ask for a number of bfloat16 passes (`jax.lax.DotAlgorithmPreset`)."""
    name = "dot_bf16_bf16_f32"
    return {name: bf16, **{f"{name}_x{n}": bf16 / n for n in (3, 6, 9)}}


def _device(terabytes: float, products: Mapping[str, float], vector: float) -> Device:
    return Device(1e12 * terabytes, {k: 1e12 * v for k, v in products.items()}, 1e12 * vector)


DEVICES = {
    "a100": _gpu(2.039, fp32=19.5, tf32=156, bf16=312),
    "h100": _gpu(3.35, fp32=67, tf32=495, bf16=989),
    # The vector unit does 8 x 128 x 4 operations a cycle, on both cores of a v5p.
    "tpu-v5e": _tpu(0.819, bf16=197, vector=6.1, gigahertz=1.5),
    "tpu-v6e": _tpu(1.64, bf16=918, vector=7.2, gigahertz=1.75),
    "tpu-v5p": _tpu(2.765, bf16=459, vector=14.3, gigahertz=1.75),
}
"""Data-sheet peaks: TB/s, and TFLOP/s without sparsity."""


class Iterations(NamedTuple):
    """How often a solve repeats its loops: sweeps in all, levels of epsilon, builds of A."""

    sweeps: float
    levels: float = 1
    builds: float = 1


ITERATIONS = {"teacher_plan": Iterations(52, levels=3), "student_plan": Iterations(7)}
"""By plan, to the default tolerance 1e-4: means of 100 steps on COCO's photographs, n = 2,048."""
OTT_INNER = 10
"""Iterations of ott-jax between two looks at the error."""
OTT_ITERATIONS = {"teacher_plan": Iterations(17), "student_plan": Iterations(2)}
"""Tens of them to that tolerance, same data, with momentum, the fastest of its options."""
PUBLISHED_ITERATIONS = 100
PLAIN_ITERATIONS = 610 + 20
"""Of plain Sinkhorn, both plans, to that tolerance; the published 100 leave the teacher at 1e-2."""


def trips(iterations: Mapping[str, Iterations]) -> Callable[[str], float]:
    """How often a loop runs, by its scope: `89_blocks/while`, or a loop of the solver.

    A loop right inside another, without a name, is ott-jax's.

    >>> count = trips({"plan": Iterations(sweeps=12, levels=3)})
    >>> [count(f"plan/builds/while/body/{x}/while") for x in ("levels", "build/89_blocks")]
    [3.0, 89.0]
    >>> count("plan/builds/while/body/levels/while/body/sweeps/while")
    4.0
    """

    def count(scope: str) -> float:
        own = scope.removesuffix("/while").rpartition("/while/")[2]
        counted = re.search(r"\b(\d+)_(?:blocks|iterations)\b", own)
        if counted:
            return float(counted[1])
        found = [plan for name, plan in iterations.items() if name in scope]
        if not found:
            return 1.0
        (plan,) = found
        if own == "body":
            return OTT_INNER
        if "sweeps" in own:
            return plan.sweeps / (plan.levels * plan.builds)
        return plan.levels / plan.builds if "levels" in own else plan.builds

    return count


@dataclasses.dataclass(frozen=True)
class Published(methods.SOTAlign):
    """SOTAlign with the published loss: both affinities whole, 100 log-sum-exp iterations each."""

    def start(self, data: sampling.DeviceData, unpaired_batch: int) -> dict[str, Array]:
        """No warm start."""
        return {}

    def _divergence(
        self, f: Array, g: Array, f_star: Array, g_star: Array, memory: Any
    ) -> tuple[Array, methods.Metrics, Any]:
        with jax.named_scope("affinities"):
            full = functools.partial(affinity.cosine, precision=affinity.HIGHEST)
            k, k_star = full(f, g), full(f_star, g_star)
        with jax.named_scope(f"{PUBLISHED_ITERATIONS}_iterations"):
            value = klot_reference(
                k,
                k_star,
                epsilon=self.epsilon,
                epsilon_star=self.epsilon_star,
                iterations=PUBLISHED_ITERATIONS,
            )
        return value, {}, memory


# --- from kernels to parts ---

PARTS = {
    "draw": "draw",
    "teacher_features": "teacher's features",
    "siglip": "SigLIP",
    "heads": "heads",
    "teacher_plan.*sweeps": "teacher: sweeps",
    "teacher_plan.*levels": "teacher: levels",
    "teacher_plan.*build/": "teacher: affinity and kernel",
    "teacher_plan": "teacher: rest",
    "teacher_products": "teacher: products",
    "student_plan.*sweeps": "student: sweeps",
    "student_plan.*levels": "student: levels",
    "student_plan.*build/": "student: affinity and kernel",
    "student_plan": "student: rest",
    "student_products": "student: products",
    "klot.*affinities": "affinities and their gradient",
    "klot.*_iterations.*while": "log-sum-exp iterations",
    "klot": "KLOT: rest",
    "optimizer": "optimizer",
    "": "rest",
}
"""Names of parts by the scopes that they are found under, in this order."""


def part_of(scope: str) -> str:
    """The part that a kernel belongs to.

    >>> part_of("jit(step)/transpose(jvp(heads))/dot_general")
    'heads'
    """
    return next(name for pattern, name in PARTS.items() if re.search(pattern, scope))


@dataclasses.dataclass
class Cost:
    """Bytes, operations by precision, seconds (for bytes, operations, at least), kernels.

    `cycles` are what a TPU's compiler expects; of kernels written by hand, the least.
    """

    bytes: float = 0.0
    operations: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    memory: float = 0.0
    compute: float = 0.0
    seconds: float = 0.0
    runs: float = 0.0
    cycles: float = 0.0

    def add(self, kernel: programs.Kernel, device: Device) -> None:
        """Adds all runs of a kernel."""
        memory, compute = device.limits(kernel)
        self.bytes += kernel.times * kernel.bytes
        for key, count in kernel.operations.items():
            self.operations[key] += kernel.times * count  # type: ignore[assignment]
        self.memory += kernel.times * memory
        self.compute += kernel.times * compute
        self.seconds += kernel.times * max(memory, compute)
        self.runs += kernel.times
        least = device.clock * max(memory, compute) if kernel.opcode == "custom-call" else 0
        self.cycles += kernel.times * (kernel.cycles or least)

    @property
    def products(self) -> float:
        """Operations of products."""
        return sum(count for key, count in self.operations.items() if key != programs.VECTOR)


def costs(
    kernels: Iterable[programs.Kernel],
    device: Device,
    key: Callable[[programs.Kernel], str] = lambda kernel: part_of(kernel.scope),
) -> dict[str, Cost]:
    """Costs by part, the dearest first."""
    found: dict[str, Cost] = collections.defaultdict(Cost)
    for kernel in kernels:
        found[key(kernel)].add(kernel, device)
    return dict(sorted(found.items(), key=lambda item: -item[1].seconds))


def total(parts: Mapping[str, Cost]) -> Cost:
    """The sum of all."""
    made = Cost()
    for cost in parts.values():
        made.bytes += cost.bytes
        made.operations.update(cost.operations)
        made.memory += cost.memory
        made.compute += cost.compute
        made.seconds += cost.seconds
        made.runs += cost.runs
        made.cycles += cost.cycles
    return made


def parts_table(parts: Mapping[str, Cost], device: Device) -> tables.Table:
    """One row a part, then the step; for a TPU also what its compiler expects."""
    whole = total(parts)

    def row(name: str, cost: Cost) -> list[Any]:
        amounts = [round(cost.runs), cost.bytes / 1e9, cost.products / 1e12]
        seconds = [1e3 * cost.memory, 1e3 * cost.compute, 1e3 * cost.seconds]
        expected = [1e3 * cost.cycles / device.clock] if device.clock else []
        return [name, *amounts, *seconds, 100 * cost.seconds / whole.seconds, *expected]

    rows = [row(name, cost) for name, cost in parts.items() if cost.seconds > 1e-6 * whole.seconds]
    rows.append(row("the step", whole))
    headers = ["part", "kernels", "GB", "TFLOP", "ms for bytes", "ms for operations", "ms", "%"]
    headers += ["compiler's ms"] if device.clock else []
    return tables.table(headers, rows, digits=2)


def precision_table(parts: Mapping[str, Cost], device: Device) -> tables.Table:
    """Operations by precision, and what they take at its peak."""
    rows = []
    for key, count in total(parts).operations.most_common():
        peak = device.vector if key == programs.VECTOR else device.products[key]
        rows.append([key, count / 1e12, peak / 1e12, 1e3 * count / peak])
    return tables.table(["precision", "TFLOP", "peak TFLOP/s", "ms"], rows, digits=2)


PRECISIONS = {
    "as compiled": None,
    "6 passes": "dot_bf16_bf16_f32_x6",
    "3 passes": "dot_bf16_bf16_f32_x3",
    "1 pass": "dot_bf16_bf16_f32",
}
"""Other precisions of products, in passes of bfloat16, to see what they would save."""


def at_precision(kernel: programs.Kernel, precision: str | None) -> programs.Kernel:
    """The kernel with all of its products at another precision, unless that is None."""
    if precision is None:
        return kernel
    made: collections.Counter[str] = collections.Counter()
    for key, count in kernel.operations.items():
        made[key if key == programs.VECTOR else precision] += count  # type: ignore[assignment]
    return kernel._replace(operations=made)


def savings_table(kernels: Sequence[programs.Kernel], device: Device) -> tables.Table:
    """Milliseconds of each part that has products, with these at other precisions."""
    found = {
        name: costs((at_precision(kernel, key) for kernel in kernels), device)
        for name, key in PRECISIONS.items()
    }
    compiled = found["as compiled"]
    rows = [
        [part, *(1e3 * parts[part].seconds for parts in found.values())]
        for part, cost in compiled.items()
        if cost.products > 0.01 * total(compiled).products
    ]
    rows.append(["the step", *(1e3 * total(parts).seconds for parts in found.values())])
    return tables.table(["part", *found], rows, digits=2)


def kernels_table(kernels: Sequence[programs.Kernel], device: Device, count: int) -> tables.Table:
    """The kernels that take longest."""

    def seconds(kernel: programs.Kernel) -> float:
        return kernel.times * max(device.limits(kernel))

    rows = [
        [
            kernel.name,
            part_of(kernel.scope),
            kernel.times,
            kernel.bytes / 1e9,
            1e3 * seconds(kernel),
        ]
        for kernel in sorted(kernels, key=seconds, reverse=True)[:count]
    ]
    return tables.table(["kernel", "part", "times", "GB each", "ms"], rows, digits=2)


# --- targets that are not there ---


class Arm(NamedTuple):
    """A method to compile the step of, and the iterations that it takes."""

    method: methods.Objective
    iterations: Mapping[str, Iterations]

    def kernels(
        self, workload: accelerator.Workload, target: str
    ) -> tuple[list[programs.Kernel], accelerator.Memory]:
        """Of the training step, compiled for one device; and its memory."""
        device = accelerator.TARGETS[target]
        compiled = accelerator.lower(workload, accelerator.devices(device), self.method).compile()
        kernels = programs.Program(compiled.as_text()).kernels(trips(self.iterations))
        return list(kernels), accelerator.memory_of(compiled, device)


def arms() -> dict[str, Arm]:
    """Ours, the published loss, and ott-jax's plans where that is installed."""
    made = {"ours": Arm(methods.SOTAlign(), ITERATIONS), "published": Arm(Published(), {})}
    if importlib.util.find_spec("ott") is not None:
        from benchmarks import train_step

        method = train_step.OttSOTAlign(momentum=True)
        made["ott-jax"] = Arm(method, OTT_ITERATIONS)
    return made


def _target(arguments: argparse.Namespace) -> None:
    name, device = arguments.target, DEVICES[arguments.target]
    workload = accelerator.Workload(arguments.pairs, arguments.unpaired)
    stem = arguments.out / f"roofline-{name}"
    seconds: dict[str, float] = {}
    for label, arm in arms().items():
        if label not in arguments.arms:
            continue
        print(f"compiling for {name}: {label} ...", file=sys.stderr, flush=True)
        try:
            kernels, memory = arm.kernels(workload, name)
        except jax.errors.JaxRuntimeError as error:
            needed = accelerator.needed_bytes(str(error))
            if needed is None:
                raise
            print(f"{label}: needs {needed / accelerator.GIB:.1f} GiB, more than {name} has")
            continue
        parts = costs(kernels, device)
        seconds[label] = total(parts).seconds
        if label == "published":
            plain = parts["log-sum-exp iterations"].seconds / (2 * PUBLISHED_ITERATIONS)
            more = PLAIN_ITERATIONS - 2 * PUBLISHED_ITERATIONS
            seconds["published, to the same error"] = seconds[label] + more * plain
        shown = {
            "parts": parts_table(parts, device),
            "precision": precision_table(parts, device),
            "savings": savings_table(kernels, device),
            "kernels": kernels_table(kernels, device, arguments.kernels),
        }
        print(f"\n{label}, {arguments.unpaired:,} unpaired, {arguments.pairs:,} pairs, {name}")
        print(*shown.values(), sep="\n\n", flush=True)
        sizes = memory.arguments or 0, memory.temporaries or 0, memory.total
        print(
            "GiB: arguments {:.2f}, temporaries {:.2f}, total {:.2f}".format(
                *(size / accelerator.GIB for size in sizes)
            )
        )
        print("wrote", *shown["parts"].save(f"{stem}-{label}"))
        if label == "ours":
            print("wrote", *shown["savings"].save(f"{stem}-savings"))
    ours = seconds.get("ours")
    rows = [
        [label, 1e3 * one, one * arguments.steps / 60, one / ours if ours else None]
        for label, one in seconds.items()
    ]
    headers = ["plans", "ms a step", f"minutes of {arguments.steps:,} steps", "times ours"]
    table = tables.table(headers, rows, digits=2)
    print(f"\n{table}\nwrote", *table.save(stem))


# --- this machine ---


def measure_device(n: int, repeats: int = 10) -> Device:
    """Bandwidth on an n x n array, and peaks, each by a program that is limited by nothing else."""

    def chain(x: Array) -> Array:
        return jax.lax.fori_loop(0, 2000, lambda i, x: jnp.exp(-x), x)

    def rate(function: Callable[[Array], Array], x: Array, what: str) -> float:
        # In place where bytes count: fresh pages of memory cost more than they.
        donated = (0,) if what == "bytes" else ()
        compiled = jax.jit(function, donate_argnums=donated).lower(x).compile()
        done = 0.0
        for kernel in programs.Program(compiled.as_text() or "").kernels():
            counts = {"bytes": kernel.bytes, **kernel.operations}
            done += kernel.times * counts.get(what, 0.0)
        least = float("inf")
        for _ in range(repeats):
            start = time.perf_counter()
            x = jax.block_until_ready(compiled(x))
            least = min(least, time.perf_counter() - start)
        return done / least

    highest = "float32 highest"
    product = rate(lambda x: affinity.dot(x, x), jnp.full((2048, 2048), 1 / 2048), highest)
    keys = (highest, "float32 high", "float32 default", "bfloat16", "float16")
    return Device(
        rate(lambda x: -x, jnp.ones((n, n)), "bytes"),
        dict.fromkeys(keys, product),
        rate(chain, jnp.full(2**14, 0.5), programs.VECTOR),
    )


def compare(
    parts: Mapping[str, Any], device: Device, levels: Mapping[str, float], repeats: int
) -> tables.Table:
    """Predicted and measured times of `train_step.Part`s.

    Those in `levels` are solves, which tell their sweeps themselves.
    """
    compiled = {n: p.function.lower(*p.arguments).compile() for n, p in parts.items()}
    calls = {n: functools.partial(compiled[n], *p.arguments) for n, p in parts.items()}
    outputs = {name: jax.block_until_ready(call()) for name, call in calls.items()}
    times, _ = common.time_interleaved(calls, repeats=repeats, title="parts")
    rows: list[list[Any]] = []
    for name, part in parts.items():
        plan = Iterations(0)
        if name in levels:
            plan = Iterations(int(outputs[name][0].iterations), levels[name])
        kernels = programs.Program(compiled[name].as_text()).kernels(trips({"": plan}))
        predicted = part.times * total(costs(kernels, device)).seconds
        measured = part.times * times[name]
        rows.append([name, 1e3 * predicted, 1e3 * measured, measured / predicted])
    predicted, measured = (sum(float(row[i]) for row in rows) for i in (1, 2))
    rows.append(["sum of parts", predicted, measured, measured / predicted])
    return tables.table(["part", "predicted ms", "measured ms", "ratio"], rows, digits=2)


def _check(arguments: argparse.Namespace) -> None:
    """The parts that `benchmarks.train_step` times, on the default device."""
    from benchmarks import train_step  # needs ott-jax
    from experiments import photos
    from sotalign_jax import teachers

    n = min(arguments.unpaired, 2048)
    rows = photos.dataset("coco", n_pairs=min(arguments.pairs, 1000), test=False)
    teacher = teachers.cca(rows.pairs_x, rows.pairs_y)
    parts = train_step.parts(train_step.Setting(rows, teacher, n, dim=512), methods.SOTAlign())
    device = measure_device(n)
    peaks = device.bandwidth, device.products["float32 highest"], device.vector
    shown = "measured: {:.1f} GB/s; GFLOP/s: products {:.0f}, other operations {:.1f}"
    print(shown.format(*(x / 1e9 for x in peaks)))
    levels = {f"{x} solve": ITERATIONS[f"{x}_plan"].levels for x in ("teacher", "student")}
    table = compare(parts, device, levels, arguments.repeats)
    common.report(f"This machine, {n:,} unpaired", table, arguments.out / "roofline-cpu")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", choices=(*DEVICES, "cpu"), required=True, help="device to compile for")
    add("--unpaired", type=accelerator.whole_number, default=22_768, help="unpaired batch")
    add("--pairs", type=accelerator.whole_number, default=10_000, help="pairs in a step")
    add("--steps", type=accelerator.whole_number, default=2000, help="steps of a run")
    add("--kernels", type=accelerator.whole_number, default=12, help="how many kernels to list")
    add(
        "--repeats", type=accelerator.whole_number, default=3, help="rounds of the check on the CPU"
    )
    names = ("ours", "published", "ott-jax")
    add("--arms", nargs="+", choices=names, default=names, help="whose plans the step has")
    add("--out", type=pathlib.Path, default=common.RESULTS, help="folder for the tables")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line."""
    arguments = _parser().parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # the target is described, not there
    try:
        (_check if arguments.target == "cpu" else _target)(arguments)
    except (checks.InputError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
