"""Least time and memory of the training step on accelerators that need not be there.

    python -m benchmarks.roofline --target=a100     # or h100, tpu-v5e, tpu-v6e, tpu-v5p
    python -m benchmarks.roofline --target=h100 --devices=8     # memory of each, and what they say
    python -m benchmarks.roofline --target=a100 --arms one-buffer   # where two do not fit
    python -m benchmarks.roofline --target=cpu      # predicted and measured, side by side

XLA compiles the step that `training.fit` runs, at the paper's size, for a device that is described
to it, and tells its memory. Each kernel of the program takes at least

    time = max(bytes / bandwidth, products / their peak, other operations / the vector peak),

where products count at the peak of their precision, and loops as often as a real run repeats them
(`ITERATIONS`). The same is done for the step with the published loss and with ott-jax's plans, and
for what a run does beside its steps. `--target=cpu` asks how far to trust it: bandwidth and peaks
of this machine are measured, then the parts of a small step are predicted and timed.
"""

import collections
import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jaxtyping import Array

from benchmarks import common, programs
from experiments import report as tables
from sotalign_jax import checks, evaluation, heads, methods, sampling, teachers, training
from sotalign_jax.ot import affinity, sharding
from sotalign_jax.ot.klot import klot_from_embeddings, klot_reference

GIB = 2**30

# --- assumptions ---


class Device(NamedTuple):
    """Peaks a second: bytes, products by precision, other operations; and how XLA is told of it."""

    bandwidth: float
    products: Mapping[str, float]
    vector: float
    host: float = 0.0
    """Bytes a second from the host."""
    clock: float = 0.0
    """Of a TPU, to tell its compiler's estimates in seconds."""
    description: str = ""
    slices: Mapping[int, str] = {}
    """How several TPUs are arranged."""

    def limits(self, kernel: programs.Kernel) -> tuple[float, float]:
        """Seconds of one run of a kernel: for its bytes, and for its operations."""
        counts = dict(kernel.operations)
        vector = counts.pop(programs.VECTOR, 0.0) / self.vector
        products = sum(count / self.products[key] for key, count in counts.items())
        return kernel.bytes / self.bandwidth, max(products, vector)


def _passes(bf16: float) -> dict[str, float]:
    """Products that ask for a number of bfloat16 passes (`jax.lax.DotAlgorithmPreset`)."""
    name = "dot_bf16_bf16_f32"
    return {name: bf16, "bfloat16": bf16, **{f"{name}_x{n}": bf16 / n for n in (3, 6, 9)}}


def _gpu(tb: float, fp32: float, tf32: float, bf16: float, host: float, description: str) -> Device:
    """Full float32 products run outside the tensor cores; anything less is one TF32 pass."""
    products = {"float32 highest": fp32, "float16": bf16, **_passes(bf16)}
    products |= dict.fromkeys(("float32 high", "float32 default", "dot_tf32_tf32_f32"), tf32)
    peaks = {key: 1e12 * peak for key, peak in products.items()}
    return Device(1e12 * tb, peaks, 1e12 * fp32, 1e9 * host, description=description)


def _tpu(
    tb: float, bf16: float, vector: float, gigahertz: float, description: str, **slices: str
) -> Device:
    """Float32 products are passes of bfloat16: 6 for the highest precision, 3 for high."""
    passes = {"float32 highest": 6, "float32 high": 3, "float32 default": 1}
    products = {**{key: bf16 / n for key, n in passes.items()}, **_passes(bf16)}
    peaks = {key: 1e12 * peak for key, peak in products.items()}
    known = {int(key[1:]): name for key, name in slices.items()}
    return Device(1e12 * tb, peaks, 1e12 * vector, 16e9, 1e9 * gigahertz, description, known)


DEVICES = {
    "a100": _gpu(2.039, 19.5, 156, 312, 25, "a100_sxm_80.txtpb"),
    "h100": _gpu(3.35, 67, 495, 989, 50, "h100_sxm.txtpb"),
    # The vector unit does 8 x 128 x 4 operations a cycle, on both cores of a v5p.
    "tpu-v5e": _tpu(0.819, 197, 6.1, 1.5, "v5e:1x1", _8="v5e:2x4", _64="v5e:8x8"),
    "tpu-v6e": _tpu(1.64, 918, 7.2, 1.75, "v6e:1x1"),
    "tpu-v5p": _tpu(2.765, 459, 14.3, 1.75, "v5p:2x2x1"),
}
"""Data-sheet peaks: TB/s, TFLOP/s without sparsity, GB/s from the host, GHz."""


class Iterations(NamedTuple):
    """How often a solve repeats its loops: sweeps, those of them over the kernel itself, and so on.

    `levels` are those of epsilon, `builds` of A.
    """

    sweeps: float
    exact: float | None = None
    levels: float = 1
    builds: float = 1


ITERATIONS = {"teacher_plan": Iterations(57, 4, levels=3), "student_plan": Iterations(7)}
"""By plan, to the default tolerance 1e-4, on COCO's photographs (ACCELERATORS.md)."""
WITHOUT_COPY = ITERATIONS | {"teacher_plan": Iterations(52, levels=3)}
"""Where all sweeps are over the kernel itself."""
OTT_INNER = 10
"""Iterations of ott-jax between two looks at the error."""
OTT_ITERATIONS = {"teacher_plan": Iterations(17), "student_plan": Iterations(2)}
"""Tens of them to that tolerance, same data, with momentum, the fastest of its options."""
PUBLISHED_ITERATIONS = 100
PLAIN_ITERATIONS = 610 + 20
"""Of plain Sinkhorn, both plans, to that tolerance; the published 100 leave the teacher at 1e-2."""
VALIDATIONS = 47
"""Of a run of 2,000 steps."""


def trips(iterations: Mapping[str, Iterations]) -> programs.Trips:
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
        if counted := re.search(r"\b(\d+)_(?:blocks|iterations)\b", own):
            return float(counted[1])
        found = [plan for name, plan in iterations.items() if name in scope]
        if not found:
            return 1.0
        (plan,) = found
        if "narrow_or_exact" in own:  # the share of the latter
            return 1.0 if plan.exact is None else plan.exact / plan.sweeps
        if "raise" in own:
            return (plan.levels - 1) / plan.levels
        if "sweeps" in own:
            return plan.sweeps / (plan.levels * plan.builds)
        if own == "body":
            return OTT_INNER
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
        published = functools.partial(klot_reference, iterations=PUBLISHED_ITERATIONS)
        with jax.named_scope(f"{PUBLISHED_ITERATIONS}_iterations"):
            value = published(k, k_star, epsilon=self.epsilon, epsilon_star=self.epsilon_star)
        return value, {}, memory


class OneBuffer(methods.SOTAlign):
    """SOTAlign on a device where two n x n buffers do not fit: plans share one, with no copy."""

    def _divergence(
        self, f: Array, g: Array, f_star: Array, g_star: Array, memory: Any
    ) -> tuple[Array, methods.Metrics, Any]:
        limits: Any = {"tolerance": self.tolerance, "max_iterations": self.max_iterations}
        epsilons: Any = {"epsilon": self.epsilon, "epsilon_star": self.epsilon_star}
        return klot_from_embeddings(f, g, f_star, g_star, **epsilons, **limits), {}, memory


# --- compiling for devices that are not there ---


@dataclasses.dataclass(frozen=True)
class Workload:
    """Shapes of one training step; the defaults are the paper's, with a pool of 100,000 rows."""

    pairs: int = 10_000
    unpaired: int = 22_768
    pool: int = 100_000
    width_x: int = 2048
    width_y: int = 4096
    dim: int = 1024
    teacher_dim: int = 2048
    block_size: int | None = None


def devices(name: str, count: int = 1) -> list[Any]:
    """Devices that XLA compiles for without having them."""
    device, gpu = DEVICES[name], not name.startswith("tpu")
    try:
        found = importlib.util.find_spec("jax_plugins.xla_cuda12" if gpu else "libtpu")
    except ModuleNotFoundError:  # the plugin's parent package
        found = None
    if found is None:
        extra = "cuda12" if gpu else "tpu"
        raise checks.InputError(
            f"target: the compiler for {name} is not installed; "
            f'run pip install "jax[{extra}]=={jax.__version__}"'
        )
    if gpu:
        file = pathlib.Path(__file__).parent / "targets" / device.description
        each = min(count, 8)
        topology = {
            "target_config": file.read_text(encoding="utf-8"),
            "topology": f"1x{-(-count // each)}x{each}",
        }
        return topologies.get_topology_desc(platform="cuda", **topology).devices[:count]
    # No device is opened: no cloud's metadata server is asked for one, nor is it locked.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    os.environ |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}
    os.environ["TPU_ACCELERATOR_TYPE"] = "v5litepod-1"
    if count > 1 and count not in device.slices:
        known = ", ".join(map(str, (1, *device.slices)))
        raise checks.InputError(f"devices: is {count}; this target comes as {known}")
    options: dict[str, Any] = {"topology_name": device.slices.get(count, device.description)}
    if count == 1 and device.description.endswith(":1x1"):
        options["chips_per_host_bounds"] = (1, 1, 1)
    return topologies.get_topology_desc(platform="tpu", **options).devices[:count]


def _shape(*size: int, dtype: Any = jnp.float32) -> Any:
    """What stands for an array."""
    return jax.ShapeDtypeStruct(size, dtype)


def _placed(tree: Any, to: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), tree)


def lower(workload: Workload, where: Sequence[Any], method: methods.Objective | None = None) -> Any:
    """The training step of `training.make_step`, lowered for one device or for several."""
    w = workload
    method = method or methods.SOTAlign(block_size=w.block_size)
    config = training.TrainConfig(pair_batch=w.pairs, unpaired_batch=w.unpaired)
    model = nnx.eval_shape(lambda: heads.build_heads(w.width_x, w.width_y, w.dim))

    def rows(unpaired: int) -> list[Any]:
        sizes = [(n, d) for n in (w.pairs, unpaired) for d in (w.width_x, w.width_y)]
        return [_shape(*size, dtype="float16") for size in sizes]

    map_x, map_y = (
        heads.AffineMap(_shape(w.teacher_dim, width), _shape(w.teacher_dim), "l2")
        for width in (w.width_x, w.width_y)
    )
    teacher = teachers.LinearTeacher(map_x, map_y, _shape(w.teacher_dim))
    batches: Any = sampling.DeviceData(*rows(w.pool))
    star_x, star_y = training.kept_features(batches, teacher)
    batches = batches._replace(star_x=star_x, star_y=star_y)
    state = jax.eval_shape(
        lambda graph, params: training.init_state(
            method, nnx.merge(graph, params), batches, config
        ),
        *nnx.split(model),
    )
    if len(where) == 1:
        step = training.make_step(method, model, config)
        one = jax.sharding.SingleDeviceSharding(where[0])
        key = jax.eval_shape(lambda: training.batch_key(config))
        return step.trace(*_placed((state, batches, teacher, key), one)).lower()
    # Several devices get the rows of each batch from their hosts.
    mesh = jax.sharding.Mesh(np.array(where), ("rows",))
    everywhere = sharding.replicated(mesh)
    split: Any = [sharding.SplitRows.shape(x, mesh) for x in rows(w.unpaired)]
    a, b, x, y = split
    batch = sampling.Batch(a, b, x, y, step=_placed(_shape(dtype=jnp.int32), everywhere))
    step = training.make_step(method, model, config, mesh)
    with jax.set_mesh(mesh):
        return step.trace(_placed(state, everywhere), batch, _placed(teacher, everywhere)).lower()


class Step(NamedTuple):
    """A compiled step: its program, and GiB of arguments, temporaries and all."""

    program: programs.Program
    arguments: float
    temporaries: float
    total: float


def compile_step(name: str, count: int, workload: Workload, method: Any = None) -> Step:
    """The step on so many devices of this name; a TPU program that does not fit is an error."""
    try:
        compiled = lower(workload, devices(name, count), method).compile()
    except jax.errors.JaxRuntimeError as error:
        found = re.search(r"(?:Used|temporaries \()\s*([\d.]+[KMGT])", str(error))
        if found is None:
            raise
        raise checks.InputError(
            f"target: the step needs {found[1]}, more than {name} has"
        ) from None
    stats = compiled.memory_analysis()
    arguments = stats.argument_size_in_bytes
    kept = arguments + stats.output_size_in_bytes - stats.alias_size_in_bytes
    total = kept + stats.temp_size_in_bytes
    if DEVICES[name].clock:  # a TPU's temporaries count what is lost to fragmentation twice
        total = stats.peak_memory_in_bytes
    sizes = (x / GIB for x in (arguments, total - kept, total))
    return Step(programs.Program(compiled.as_text()), *sizes)


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


class Cost(NamedTuple):
    """Runs of kernels, bytes, operations of products; seconds for bytes, operations, at least.

    `expected` are a TPU compiler's seconds; of kernels written by hand, the least.
    """

    runs: float = 0.0
    bytes: float = 0.0
    products: float = 0.0
    memory: float = 0.0
    compute: float = 0.0
    seconds: float = 0.0
    expected: float = 0.0

    def plus(self, other: "Cost") -> "Cost":
        """The sum of both."""
        return Cost(*(x + y for x, y in zip(self, other, strict=True)))

    @classmethod
    def of(cls, kernel: programs.Kernel, device: Device) -> "Cost":
        """Of all runs of a kernel."""
        memory, compute = device.limits(kernel)
        products = sum(n for key, n in kernel.operations.items() if key != programs.VECTOR)
        least = max(memory, compute)
        expected = kernel.cycles / device.clock if device.clock else 0.0
        if kernel.opcode == "custom-call" and not expected:
            expected = least
        each = 1, kernel.bytes, products, memory, compute, least, expected
        return cls(*(kernel.times * x for x in each))


def total(costs: Iterable[Cost]) -> Cost:
    """The sum of all."""
    return functools.reduce(Cost.plus, costs, Cost())


def parts(kernels: Iterable[programs.Kernel], device: Device) -> dict[str, Cost]:
    """Costs by part, the dearest first."""
    found: dict[str, Cost] = collections.defaultdict(Cost)
    for kernel in kernels:
        name = part_of(kernel.scope)
        found[name] = found[name].plus(Cost.of(kernel, device))
    return dict(sorted(found.items(), key=lambda item: -item[1].seconds))


def parts_table(found: Mapping[str, Cost], device: Device) -> tables.Table:
    """One row a part, then the step; for a TPU also what its compiler expects."""
    whole = total(found.values())
    rows = [
        [name, round(c.runs), c.bytes / 1e9, c.products / 1e12]
        + [1e3 * x for x in (c.memory, c.compute, c.seconds)]
        + [100 * c.seconds / whole.seconds]
        + ([1e3 * c.expected] if device.clock else [])
        for name, c in {**found, "the step": whole}.items()
        if c.seconds > 1e-6 * whole.seconds
    ]
    headers = ["part", "kernels", "GB", "TFLOP", "ms for bytes", "ms for operations", "ms", "%"]
    return tables.table([*headers, *(["compiler's ms"] if device.clock else [])], rows, digits=2)


# --- reports ---


def run_table(name: str, workload: Workload, step: float, steps: int) -> tables.Table:
    """Seconds of a whole run, its validations, a final zero-shot task, and batches of the host.

    What comes from the host is read and sent while the device works; both are told.
    """
    device, w = DEVICES[name], workload
    one = jax.sharding.SingleDeviceSharding(devices(name)[0])

    def seconds(function: Callable[..., Any], *shapes: Any, **options: Any) -> float:
        lowered = jax.jit(functools.partial(function, **options)).trace(*_placed(shapes, one))
        text = lowered.lower().compile().as_text()
        found = programs.Program(text).kernels(trips({}))
        return total(Cost.of(kernel, device) for kernel in found).seconds

    def embed(rows: int, width: int) -> float:
        head = heads.AffineMap(_shape(w.dim, width), _shape(w.dim), "l2")
        chunk = evaluation.EMBED_CHUNK
        blocks = -(-rows // chunk)
        return blocks * seconds(lambda head, x: head(x), head, _shape(chunk, width, dtype="f2"))

    def classify(x: Array, classes: Array) -> Array:
        return jnp.argmax(affinity.dot(x, classes.T), axis=1)

    ranks = [_shape(5000, w.dim), _shape(25_000, w.dim), _shape(25_000, dtype=jnp.int32)]
    ranks += [_shape(5000), _shape(25_000)]
    validation = embed(5000, w.width_x) + embed(25_000, w.width_y)
    validation += seconds(evaluation.match_ranks, *ranks, chunk=1024)
    zero_shot = embed(50_000, w.width_x) + embed(80_000, w.width_y)
    zero_shot += seconds(classify, _shape(50_000, w.dim), _shape(1000, w.dim))
    widths = w.width_x, w.width_y
    amounts = {  # times, seconds on the device, float16 numbers from the host
        f"{steps:,} steps": (steps, step, w.unpaired * sum(widths)),
        "validations, 5,000 x 25,000": (
            VALIDATIONS,
            validation,
            5000 * (widths[0] + 5 * widths[1]),
        ),
        "zero-shot, 50,000 x 1,000 x 80": (1, zero_shot, 50_000 * widths[0] + 80_000 * widths[1]),
    }
    run = steps * step
    rows = []
    for part, (count, each, numbers) in amounts.items():
        here, sent = count * each, count * 2 * numbers / device.host
        rows.append([part, here, 100 * here / run, sent, 100 * sent / run])
    headers = ["part", "device s", "% of the steps", "from the host s", "% of the steps "]
    return tables.table(headers, rows, digits=1)


def _target(args: Any) -> None:
    name, device = args.target, DEVICES[args.target]
    workload = Workload(args.pairs, args.unpaired, block_size=args.block_size)
    stem = args.out / f"roofline-{name}"
    known: dict[str, Any] = {
        "ours": (methods.SOTAlign(block_size=args.block_size), ITERATIONS),
        "one-buffer": (OneBuffer(), WITHOUT_COPY),
        "published": (Published(), {}),
    }
    if importlib.util.find_spec("ott") is not None and "ott-jax" in args.arms:
        from benchmarks import train_step

        known["ott-jax"] = train_step.OttSOTAlign(momentum=True), OTT_ITERATIONS
    rows = []
    for label in args.arms:
        if label not in known:
            raise checks.InputError(
                f"arms: {label!r} is none of {', '.join(known)}, or not installed"
            )
        method, iterations = known[label]
        print(f"compiling for {name}: {label} ...", flush=True)
        step = compile_step(name, 1, workload, method)
        found = parts(step.program.kernels(trips(iterations)), device)
        seconds = total(found.values()).seconds
        rows.append([label, 1e3 * seconds, step.arguments, step.temporaries, step.total])
        if label == "published":
            plain = found["log-sum-exp iterations"].seconds / (2 * PUBLISHED_ITERATIONS)
            more = (PLAIN_ITERATIONS - 2 * PUBLISHED_ITERATIONS) * plain
            rows.append(["published, to the same error", 1e3 * (seconds + more), *rows[-1][2:]])
        table = parts_table(found, device)
        common.report(f"{label}, {args.unpaired:,} unpaired, {name}", table, f"{stem}-{label}")
        if label == "ours":
            whole = run_table(name, workload, seconds, args.steps)
            common.report(f"A run of {args.steps:,} steps", whole, f"{stem}-run")
    headers = ["plans", "ms a step", "arguments GiB", "temporaries GiB", "total GiB", "times ours"]
    ratios = [[*row, row[1] / rows[0][1]] for row in rows]
    common.report(f"The step, {name}", tables.table(headers, ratios, digits=2), stem)


def _several(args: Any) -> None:
    """Memory of each of several devices, and what they tell each other in a step."""
    workload = Workload(args.pairs, args.unpaired, block_size=args.block_size)
    step = compile_step(args.target, args.devices, workload)
    stem = args.out / f"devices-{args.target}-{args.devices}"
    sizes = [args.target, args.devices, *step[1:]]
    headers = ["target", "devices", "arguments GiB", "temporaries GiB", "total GiB"]
    common.report("Memory of each device", tables.table(headers, [sizes], digits=2), stem)
    counted = collections.Counter(step.program.exchanges())
    when = {True: "each sweep or ring step", False: "once a step"}
    rows = [
        [one.kind, f"{one.bytes / 2**20:.2f}", count, when[one.in_loop]]
        for one, count in counted.items()
        if one.in_loop or one.bytes >= 2**16
    ]
    table = tables.table(["kind", "MiB", "times", "when"], rows)
    common.report("Exchanges", table, f"{stem}-exchanges")


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
    pieces: Mapping[str, Any], device: Device, levels: Mapping[str, float], repeats: int
) -> tables.Table:
    """Predicted and measured times of `train_step.Part`s.

    Those in `levels` are solves, which tell their sweeps themselves.
    """
    compiled = {n: p.function.lower(*p.arguments).compile() for n, p in pieces.items()}
    calls = {n: functools.partial(compiled[n], *p.arguments) for n, p in pieces.items()}
    outputs = {name: jax.block_until_ready(call()) for name, call in calls.items()}
    times, _ = common.time_interleaved(calls, repeats=repeats, title="parts")
    rows: list[list[Any]] = []
    for name, part in pieces.items():
        plan = Iterations(0)
        if name in levels:
            plan = Iterations(int(outputs[name][0].iterations), levels=levels[name])
        kernels = programs.Program(compiled[name].as_text()).kernels(trips({"": plan}))
        predicted = part.times * total(Cost.of(kernel, device) for kernel in kernels).seconds
        rows.append([name, 1e3 * predicted, 1e3 * part.times * times[name]])
    rows.append(["sum of parts", *(sum(row[i] for row in rows) for i in (1, 2))])
    rows = [[*row, row[2] / row[1]] for row in rows]
    return tables.table(["part", "predicted ms", "measured ms", "ratio"], rows, digits=2)


def _check(args: Any) -> None:
    """The parts that `benchmarks.train_step` times, on the default device."""
    from benchmarks import train_step  # needs ott-jax
    from experiments import photos

    n = min(args.unpaired, 2048)
    rows = photos.dataset("coco", n_pairs=min(args.pairs, 1000), test=False)
    teacher = teachers.cca(rows.pairs_x, rows.pairs_y)
    pieces = train_step.parts(train_step.Setting(rows, teacher, n, dim=512), methods.SOTAlign())
    device = measure_device(n)
    peaks = device.bandwidth, device.products["float32 highest"], device.vector
    shown = "measured: {:.1f} GB/s; GFLOP/s: products {:.0f}, other operations {:.1f}"
    print(shown.format(*(x / 1e9 for x in peaks)))
    levels = {f"{x} solve": ITERATIONS[f"{x}_plan"].levels for x in ("teacher", "student")}
    table = compare(pieces, device, levels, args.repeats)
    common.report(f"This machine, {n:,} unpaired", table, args.out / "roofline-cpu")


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles for a target, or measures this machine."""
    args = common.options(
        __doc__,
        argv,
        target=("", *DEVICES, "cpu"),
        devices=1,
        unpaired=22_768,
        pairs=10_000,
        block_size=int,
        steps=2000,
        repeats=3,
        arms=["ours", "published", "ott-jax"],
    )
    if not args.target:
        raise checks.InputError(f"target: is not set; pass one of {', '.join(DEVICES)}, cpu")
    checks.whole(1, devices=args.devices, unpaired=args.unpaired, pairs=args.pairs)
    checks.whole(1, or_none=True, block_size=args.block_size)
    jax.config.update("jax_platforms", "cpu")  # the target is described, not there
    if args.target == "cpu":
        _check(args)
    else:
        (_target if args.devices == 1 else _several)(args)


if __name__ == "__main__":
    common.run(main)
