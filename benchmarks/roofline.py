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
    """Of a GPU, a file of `targets`."""
    slices: Mapping[int, str] = {}
    """How so many TPUs are arranged."""

    def limits(self, kernel: programs.Kernel) -> tuple[float, float]:
        """Seconds of one run of a kernel: for its bytes, and for its operations."""
        counts = dict(kernel.operations)
        vector = counts.pop(programs.VECTOR, 0.0) / self.vector
        products = sum(count / self.products[key] for key, count in counts.items())
        return kernel.bytes / self.bandwidth, max(products, vector)


_PASSES = {f"dot_bf16_bf16_f32_x{n}": n for n in (3, 6, 9)}
_PASSES |= {"dot_bf16_bf16_f32": 1, "bfloat16": 1}
"""Products that are a number of bfloat16 passes (`jax.lax.DotAlgorithmPreset`)."""


def _device(tb: float, bf16: float, vector: float, float32: Any, **more: Any) -> Device:
    products = {**float32, **{key: bf16 / n for key, n in _PASSES.items()}}
    peaks = {key: 1e12 * peak for key, peak in products.items()}
    return Device(1e12 * tb, peaks, 1e12 * vector, **more)


def _gpu(tb: float, fp32: float, tf32: float, bf16: float, host: float, description: str) -> Device:
    """Full float32 products run outside the tensor cores; anything less is one TF32 pass."""
    float32 = dict.fromkeys(("float32 high", "float32 default", "dot_tf32_tf32_f32"), tf32)
    float32 |= {"float32 highest": fp32, "float16": bf16}
    return _device(tb, bf16, fp32, float32, host=1e9 * host, description=description)


def _tpu(tb: float, bf16: float, vector: float, gigahertz: float, slices: Any) -> Device:
    """Float32 products are passes of bfloat16: 6 for the highest precision, 3 for high."""
    passes = {"float32 highest": 6, "float32 high": 3, "float32 default": 1}
    float32 = {key: bf16 / n for key, n in passes.items()}
    return _device(tb, bf16, vector, float32, host=16e9, clock=1e9 * gigahertz, slices=slices)


DEVICES = {
    "a100": _gpu(2.039, 19.5, 156, 312, 25, "a100_sxm_80.txtpb"),
    "h100": _gpu(3.35, 67, 495, 989, 50, "h100_sxm.txtpb"),
    # The vector unit does 8 x 128 x 4 operations a cycle, on both cores of a v5p.
    "tpu-v5e": _tpu(0.819, 197, 6.1, 1.5, {1: "v5e:1x1", 8: "v5e:2x4", 64: "v5e:8x8"}),
    "tpu-v6e": _tpu(1.64, 918, 7.2, 1.75, {1: "v6e:1x1"}),
    "tpu-v5p": _tpu(2.765, 459, 14.3, 1.75, {1: "v5p:2x2x1"}),
}
"""Data-sheet peaks: TB/s, TFLOP/s without sparsity, GB/s from the host, GHz."""


class Iterations(NamedTuple):
    """How often a solve repeats its loops: sweeps, those of them over the kernel itself, and so on.

    `levels` are those of epsilon.
    """

    sweeps: float
    exact: float | None = None
    levels: float = 1


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
STEPS, VALIDATIONS = 2000, 47
"""Of a run."""


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
            return plan.sweeps / plan.levels
        if own == "body":
            return OTT_INNER
        return float(plan.levels) if "levels" in own else 1.0

    return count


@dataclasses.dataclass(frozen=True)
class Published(methods.SOTAlign):
    """SOTAlign with the published loss: both affinities whole, 100 log-sum-exp iterations each."""

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
    if importlib.util.find_spec("jax_cuda12_plugin" if gpu else "libtpu") is None:
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
    if count not in device.slices:
        known = ", ".join(map(str, device.slices))
        raise checks.InputError(f"devices: is {count}; this target comes as {known}")
    options: dict[str, Any] = {"topology_name": device.slices[count]}
    if device.slices[count].endswith(":1x1"):
        options["chips_per_host_bounds"] = (1, 1, 1)
    return topologies.get_topology_desc(platform="tpu", **options).devices[:count]


def _shape(*size: int, dtype: Any = jnp.float32) -> Any:
    """What stands for an array."""
    return jax.ShapeDtypeStruct(size, dtype)


def _placed(tree: Any, to: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), tree)


def lower(w: Workload, where: Sequence[Any], method: methods.Objective | None = None) -> Any:
    """The training step of `training.make_step`, lowered for one device or for several."""
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
    start = functools.partial(training.init_state, method, batches=batches, config=config)
    state = jax.eval_shape(lambda: start(heads.build_heads(w.width_x, w.width_y, w.dim)))
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
    return Cost(*map(sum, zip(*costs, strict=True)))


def parts(kernels: Iterable[programs.Kernel], device: Device) -> dict[str, Cost]:
    """Costs by part, the dearest first."""
    costs = collections.defaultdict(list)
    for kernel in kernels:
        costs[part_of(kernel.scope)].append(Cost.of(kernel, device))
    found = {name: total(own) for name, own in costs.items()}
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
    return tables.Table([*headers, *(["compiler's ms"] if device.clock else [])], rows, digits=2)


# --- reports ---


def run_table(name: str, w: Workload, step: float) -> tables.Table:
    """Seconds of a whole run, its validations, a final zero-shot task, and batches of the host.

    What comes from the host is read and sent while the device works; both are told.
    """
    device = DEVICES[name]
    one = jax.sharding.SingleDeviceSharding(devices(name)[0])

    def seconds(function: Callable[..., Any], *shapes: Any) -> float:
        lowered = jax.jit(function).trace(*_placed(shapes, one)).lower()
        found = programs.Program(lowered.compile().as_text()).kernels(trips({}))
        return total(Cost.of(kernel, device) for kernel in found).seconds

    def embed(rows: int, width: int) -> float:
        head = heads.AffineMap(_shape(w.dim, width), _shape(w.dim), "l2")
        chunk = evaluation.EMBED_CHUNK
        each = seconds(lambda head, x: head(x), head, _shape(chunk, width, dtype="f2"))
        return -(-rows // chunk) * each

    def classify(x: Array, classes: Array) -> Array:
        return jnp.argmax(affinity.dot(x, classes.T), axis=1)

    ranks = functools.partial(evaluation.match_ranks, chunk=1024)
    own = _shape(25_000, dtype=jnp.int32)
    sides = _shape(5000, w.dim), _shape(25_000, w.dim), own, _shape(5000), _shape(25_000)
    validation = embed(5000, w.width_x) + embed(25_000, w.width_y) + seconds(ranks, *sides)
    zero_shot = embed(50_000, w.width_x) + embed(80_000, w.width_y)
    zero_shot += seconds(classify, _shape(50_000, w.dim), _shape(1000, w.dim))
    amounts: dict[str, Any] = {  # times, seconds on the device, rows of x and of y from the host
        f"{STEPS:,} steps": (STEPS, step, w.unpaired, w.unpaired),
        "validations, 5,000 x 25,000": (VALIDATIONS, validation, 5000, 25_000),
        "zero-shot, 50,000 x 1,000 x 80": (1, zero_shot, 50_000, 80_000),
    }
    run, rows = STEPS * step, []
    for part, (count, each, x, y) in amounts.items():
        here, sent = count * each, count * 2 * (x * w.width_x + y * w.width_y) / device.host
        rows.append([part, here, 100 * here / run, sent, 100 * sent / run])
    headers = ["part", "device s", "% of the steps", "from the host s", "% of the steps "]
    return tables.Table(headers, rows, digits=1)


def _target(args: Any) -> None:
    name, device = args.target, DEVICES[args.target]
    workload = Workload(args.pairs, args.unpaired, block_size=args.block_size)
    stem = args.out / f"roofline-{name}"
    known: dict[str, Any] = {
        "ours": (methods.SOTAlign(block_size=args.block_size), ITERATIONS),
        "one-buffer": (OneBuffer(), WITHOUT_COPY),
        "published": (Published(), {}),
    }
    if "ott-jax" in args.arms:
        from benchmarks import train_step  # needs ott-jax

        known["ott-jax"] = train_step.OttSOTAlign(momentum=True), OTT_ITERATIONS
    rows: list[list[Any]] = []
    for label in args.arms:
        checks.choice("arms", label, tuple(known))
        method, iterations = known[label]
        print(f"compiling for {name}: {label} ...", flush=True)
        step = compile_step(name, 1, workload, method)
        found = parts(step.program.kernels(trips(iterations)), device)
        seconds = total(found.values()).seconds
        rows.append([label, 1e3 * seconds, *step[1:]])
        if label == "published":
            plain = found["log-sum-exp iterations"].seconds / (2 * PUBLISHED_ITERATIONS)
            more = (PLAIN_ITERATIONS - 2 * PUBLISHED_ITERATIONS) * plain
            rows.append(["published, to the same error", 1e3 * (seconds + more), *step[1:]])
        table = parts_table(found, device)
        common.report(f"{label}, {args.unpaired:,} unpaired, {name}", table, f"{stem}-{label}")
        if label == "ours":
            whole = run_table(name, workload, seconds)
            common.report(f"A run of {STEPS:,} steps", whole, f"{stem}-run")
    headers = ["plans", "ms a step", "arguments GiB", "temporaries GiB", "total GiB", "times ours"]
    ratios = [[*row, row[1] / rows[0][1]] for row in rows]
    common.report(f"The step, {name}", tables.Table(headers, ratios, digits=2), stem)


def _several(args: Any) -> None:
    """Memory of each of several devices, and what they tell each other in a step."""
    workload = Workload(args.pairs, args.unpaired, block_size=args.block_size)
    step = compile_step(args.target, args.devices, workload)
    stem = args.out / f"devices-{args.target}-{args.devices}"
    sizes = [args.target, args.devices, *step[1:]]
    headers = ["target", "devices", "arguments GiB", "temporaries GiB", "total GiB"]
    common.report("Memory of each device", tables.Table(headers, [sizes], digits=2), stem)
    counted = collections.Counter(step.program.exchanges())
    when = {True: "each sweep or ring step", False: "once a step"}
    rows = [
        [one.kind, f"{one.bytes / 2**20:.2f}", count, when[one.in_loop]]
        for one, count in counted.items()
        if one.in_loop or one.bytes >= 2**16
    ]
    table = tables.Table(["kind", "MiB", "times", "when"], rows)
    common.report("Exchanges", table, f"{stem}-exchanges")


# --- this machine ---


def measure_device(n: int) -> Device:
    """Bandwidth on an n x n array, and peaks, each by a program that is limited by nothing else."""

    def repeat(times: int, function: Callable[[Array], Array], x: Array) -> Any:
        """Each time in place: fresh pages of memory cost more than what is measured."""
        looped = jax.jit(lambda x: jax.lax.fori_loop(0, times, lambda _, x: function(x), x))
        return looped.lower(x).compile(), x

    highest = "float32 highest"
    tests = {
        "bytes": repeat(10, jnp.negative, jnp.ones((n, n))),
        highest: repeat(1, lambda x: affinity.dot(x, x), jnp.full((2048, 2048), 1 / 2048)),
        programs.VECTOR: repeat(2000, lambda x: jnp.exp(-x), jnp.full(2**14, 0.5)),
    }
    calls = {what: functools.partial(*test) for what, test in tests.items()}
    seconds, _ = common.time_interleaved(calls, repeats=10, title="peaks")
    rates = {}
    for what, (compiled, _) in tests.items():
        found = programs.Program(compiled.as_text()).kernels()
        counts = [(one.times, {"bytes": one.bytes, **one.operations}) for one in found]
        rates[what] = sum(times * count.get(what, 0) for times, count in counts) / seconds[what]
    keys = (highest, "float32 high", "float32 default", "bfloat16", "float16")
    return Device(rates["bytes"], dict.fromkeys(keys, rates[highest]), rates[programs.VECTOR])


def compare(pieces: Mapping[str, Any], device: Device, levels: Mapping[str, float]) -> tables.Table:
    """Predicted and measured times of what `train_step.parts` gives.

    Those in `levels` are solves, which tell their sweeps themselves.
    """
    compiled = {name: f.lower(*inputs).compile() for name, (f, inputs) in pieces.items()}
    calls = {n: functools.partial(compiled[n], *inputs) for n, (_, inputs) in pieces.items()}
    times, outputs = common.time_interleaved(calls, repeats=3, keep=lambda out: out)
    rows: list[list[Any]] = []
    for name, program in compiled.items():
        plan = Iterations(0)
        if name in levels:
            plan = Iterations(int(outputs[name][0].iterations), levels=levels[name])
        kernels = programs.Program(program.as_text()).kernels(trips({"": plan}))
        predicted = total(Cost.of(kernel, device) for kernel in kernels).seconds
        rows.append([name, 1e3 * predicted, 1e3 * times[name]])
    rows.append(["sum of parts", *(sum(row[i] for row in rows) for i in (1, 2))])
    rows = [[*row, row[2] / row[1]] for row in rows]
    return tables.Table(["part", "predicted ms", "measured ms", "ratio"], rows, digits=2)


def _check(args: Any) -> None:
    """The parts that `benchmarks.train_step` times, on the default device."""
    from benchmarks import train_step  # needs ott-jax

    n = min(args.unpaired, 2048)
    setting = train_step.Setting.of_photos(n, min(args.pairs, 1000), 512)
    device = measure_device(n)
    peaks = device.bandwidth, device.products["float32 highest"], device.vector
    shown = "measured: {:.1f} GB/s; GFLOP/s: products {:.0f}, other operations {:.1f}"
    print(shown.format(*(x / 1e9 for x in peaks)))
    levels = {f"{x} solve": ITERATIONS[f"{x}_plan"].levels for x in ("teacher", "student")}
    table = compare(train_step.parts(setting, methods.SOTAlign()), device, levels)
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
