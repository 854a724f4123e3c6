"""Memory of the training step on accelerators that are not there.

    python -m benchmarks.accelerator --target=a100

XLA compiles the very step that `training.fit` runs, at the paper's size by default, for a TPU or
GPU described to it, and tells how much memory the program needs. Nothing is executed, so that
neither speed nor numerics are seen. With --devices=8 or 64 it is the step on so many of them:
memory of each, and what they tell each other.
"""

import argparse
import collections
import dataclasses
import importlib.util
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies

from benchmarks import collectives, common
from experiments import report as tables
from sotalign_jax import checks, heads, methods, sampling, teachers, training
from sotalign_jax.ot import sharding

GIB = 2**30
SIZES = tuple(1024 * k for k in (8, 16, 22, 32, 44, 64, 88, 128, 176, 256, 352, 512, 704, 1024))
"""Unpaired batches among which the largest that fits is sought."""
GPU_RESERVED = 0.05
"""Share of a GPU's memory that CUDA and its libraries take; a TPU's compiler knows its own."""


class Target(NamedTuple):
    """A device to compile for: its memory, and how XLA is told about it."""

    platform: str
    plugin: str
    memory: int
    description: str
    bounds: tuple[int, ...] | None = None
    slices: dict[int, str] = {}  # noqa: RUF012 - how several are arranged


TARGETS = {
    "tpu-v5e": Target(
        "tpu", "libtpu", 16 * GIB, "v5e:1x1", (1, 1, 1), {8: "v5e:2x4", 64: "v5e:8x8"}
    ),
    "tpu-v6e": Target("tpu", "libtpu", 32 * GIB, "v6e:1x1", (1, 1, 1)),
    "tpu-v5p": Target("tpu", "libtpu", 95 * GIB, "v5p:2x2x1"),
    "a100": Target("cuda", "jax_plugins.xla_cuda12", 85_100_068_864, "a100_sxm_80.txtpb"),
    "h100": Target("cuda", "jax_plugins.xla_cuda12", 84_942_979_072, "h100_sxm.txtpb"),
}


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
    dtype: str = "float16"


class Memory(NamedTuple):
    """Bytes that the compiled step needs: nothing but a total when it did not compile.

    Outputs are the donated arguments but for a few metrics, and count in `total` only.
    """

    arguments: int | None
    temporaries: int | None
    total: int
    fits: bool
    exchanged: tuple[collectives.Collective, ...] = ()


def missing_plugin(target: Target) -> str | None:
    """What to install when the compiler for `target` is not there."""
    try:
        found = importlib.util.find_spec(target.plugin) is not None
    except ModuleNotFoundError:  # the plugin's parent package
        found = False
    if found:
        return None
    extra = {"tpu": "tpu", "cuda": "cuda12"}[target.platform]
    return (
        f"target: the compiler for {target.platform} is not installed; "
        f'run pip install "jax[{extra}]=={jax.__version__}"'
    )


def devices(target: Target, count: int = 1) -> list[Any]:
    """Devices that XLA compiles for without having them."""
    message = missing_plugin(target)
    if message is not None:
        raise checks.InputError(message)
    options: dict[str, Any]
    if target.platform == "tpu":
        # No device is opened: do not ask a cloud's metadata server for one, nor lock it.
        os.environ["TPU_SKIP_MDS_QUERY"] = os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
        if count > 1 and count not in target.slices:
            known = ", ".join(map(str, (1, *target.slices)))
            raise checks.InputError(f"devices: is {count}; this target comes as {known}")
        options = {"topology_name": target.slices.get(count, target.description)}
        if target.bounds is not None and count == 1:
            options["chips_per_host_bounds"] = target.bounds
    else:
        file = pathlib.Path(__file__).parent / "targets" / target.description
        hosts, each = (1, count) if count <= 8 else (-(-count // 8), 8)
        topology = f"1x{hosts}x{each}"
        options = {"target_config": file.read_text(encoding="utf-8"), "topology": topology}
    return topologies.get_topology_desc(platform=target.platform, **options).devices[:count]


def lower(workload: Workload, where: Sequence[Any], method: methods.Objective | None = None) -> Any:
    """The training step of `training.make_step`, lowered for one device or for several."""
    w = workload
    if method is None:
        method = methods.SOTAlign(block_size=w.block_size)
    config = training.TrainConfig(pair_batch=w.pairs, unpaired_batch=w.unpaired)
    model = nnx.eval_shape(lambda: heads.build_heads(w.width_x, w.width_y, w.dim))

    def shape(*size: int, dtype: Any = jnp.float32) -> Any:  # stands for an array
        return jax.ShapeDtypeStruct(size, dtype)

    def rows(unpaired: int) -> list[Any]:
        sizes = (w.pairs, w.width_x), (w.pairs, w.width_y), (unpaired, w.width_x)
        return [shape(*size, dtype=w.dtype) for size in (*sizes, (unpaired, w.width_y))]

    def placed(tree: Any, to: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), tree)

    features = shape(w.pool, w.teacher_dim)
    batches: Any = sampling.DeviceData(*rows(w.pool))._replace(star_x=features, star_y=features)
    teacher = teachers.LinearTeacher(
        heads.AffineMap(shape(w.teacher_dim, w.width_x), shape(w.teacher_dim), "l2"),
        heads.AffineMap(shape(w.teacher_dim, w.width_y), shape(w.teacher_dim), "l2"),
        shape(w.teacher_dim),
    )
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
        return step.trace(*placed((state, batches, teacher, key), one)).lower()
    # Several devices get the rows of each batch from their hosts.
    mesh = jax.sharding.Mesh(np.array(where), ("rows",))
    everywhere = sharding.replicated(mesh)
    split: Any = [sharding.SplitRows.shape(x, mesh) for x in rows(w.unpaired)]
    a, b, x, y = split
    batch = sampling.Batch(a, b, x, y, step=placed(shape(dtype=jnp.int32), everywhere))
    step = training.make_step(method, model, config, mesh)
    with jax.set_mesh(mesh):
        return step.trace(placed(state, everywhere), batch, placed(teacher, everywhere)).lower()


def measure(workload: Workload, target: Target, where: Sequence[Any]) -> Memory:
    """Compiles the step and reads its memory; a TPU program that does not fit does not compile."""
    try:
        compiled = lower(workload, where).compile()
    except jax.errors.JaxRuntimeError as error:
        needed = needed_bytes(str(error))
        if needed is None:
            raise
        return Memory(None, None, needed, fits=False)
    exchanged = tuple(collectives.find(compiled.as_text())) if len(where) > 1 else ()
    return memory_of(compiled, target)._replace(exchanged=exchanged)


def memory_of(compiled: Any, target: Target) -> Memory:
    """What a compiled step needs."""
    stats = compiled.memory_analysis()
    arguments = stats.argument_size_in_bytes
    kept = arguments + stats.output_size_in_bytes - stats.alias_size_in_bytes
    if target.platform == "tpu":  # its temporaries count what is lost to fragmentation twice
        peak = stats.peak_memory_in_bytes
        return Memory(arguments, peak - kept, peak, True)
    total = kept + stats.temp_size_in_bytes
    usable = (1 - GPU_RESERVED) * target.memory
    return Memory(arguments, stats.temp_size_in_bytes, total, total <= usable)


def needed_bytes(message: str) -> int | None:
    """What a program would use, from XLA's out-of-memory message; None for other messages.

    >>> needed_bytes("Ran out of memory in memory space hbm. Used 1.5G of 1.0G hbm.") / GIB
    1.5
    """
    found = re.search(r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm", message) or re.search(
        r"required for HLO temporaries \(([\d.]+)([KMGT])\) exceeds", message
    )
    if found is None:
        return None
    return int(float(found[1]) * 1024 ** (1 + "KMGT".index(found[2])))


def largest_fitting(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of `sizes` (ascending) that fits, by bisection; None when none does.

    >>> largest_fitting([1, 2, 4, 8], lambda size: size < 5)
    4
    """
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if fits(sizes[middle]) else (low, middle)
    return sizes[low - 1] if low else None


class Survey:
    """Compiles each workload once, tells about it on stderr, and keeps the results."""

    def __init__(self, name: str, where: Sequence[Any]):
        self.name = name
        self.target = TARGETS[name]
        self.where = where
        self.results: dict[Workload, tuple[Memory, float]] = {}

    def __call__(self, workload: Workload) -> Memory:
        """Memory of the step."""
        if workload not in self.results:
            label = f"{_mode(workload)}, {workload.unpaired:,} unpaired"
            print(f"compiling for {self.name}: {label} ...", file=sys.stderr, flush=True)
            start = time.perf_counter()
            memory = measure(workload, self.target, self.where)
            seconds = time.perf_counter() - start
            self.results[workload] = memory, seconds
            verdict = "fits" if memory.fits else "does not fit"
            print(f"  {memory.total / GIB:.2f} GiB, {verdict} ({seconds:.0f} s)", file=sys.stderr)
        return self.results[workload][0]

    def fits(self, workload: Workload) -> bool:
        """Whether the step fits; larger that fit and smaller that do not tell without compiling."""
        for other, (memory, _) in self.results.items():
            larger = other.unpaired >= workload.unpaired
            if _mode(other) == _mode(workload) and larger == memory.fits:
                return memory.fits
        return self(workload).fits

    def table(self) -> tables.Table:
        """One row for each workload, by mode and size."""
        rows = []
        ordered = sorted(self.results, key=lambda w: (w.block_size or 0, w.unpaired))
        for workload in ordered:
            memory, seconds = self.results[workload]
            sizes = (memory.arguments, memory.temporaries, memory.total)
            rows.append(
                [
                    self.name,
                    len(self.where),
                    _mode(workload),
                    workload.pairs,
                    workload.unpaired,
                    workload.pool,
                    *(None if size is None else size / GIB for size in sizes),
                    100 * memory.total / self.target.memory,
                    "yes" if memory.fits else "no",
                    round(seconds),
                ]
            )
        return tables.table(_HEADERS, rows, digits=2)

    def exchanges(self) -> tables.Table:
        """What the devices tell each other in a step, by kind and size."""
        rows = []
        for workload, (memory, _) in self.results.items():
            counted = collections.Counter(memory.exchanged)
            for one, count in sorted(counted.items(), key=lambda item: -item[0].bytes):
                if one.bytes >= _LEAST_EXCHANGE or one.in_loop:
                    where = "each sweep or ring step" if one.in_loop else "once a step"
                    size = f"{one.bytes / 2**20:.2f}"
                    rows.append([_mode(workload), workload.unpaired, one.kind, size, count, where])
        return tables.table(("KLOT", "unpaired", "kind", "MiB", "times", "when"), rows)


_LEAST_EXCHANGE = 2**16


_HEADERS = (
    "target",
    "devices",
    "KLOT",
    "pairs",
    "unpaired",
    "pool",
    "arguments GiB",
    "temporaries GiB",
    "total GiB",
    "% of device",
    "fits",
    "compile s",
)


def _mode(workload: Workload) -> str:
    return "by memory" if workload.block_size is None else f"streamed {workload.block_size}"


def whole_number(text: str) -> int:
    """A whole number on the command line, such as 22_768."""
    value = int(text.replace("_", ""))
    if value < 1:
        raise ValueError(text)
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", choices=tuple(TARGETS), required=True, help="device to compile for")
    add("--devices", type=whole_number, default=1, help="how many of them work together")
    add(
        "--unpaired",
        type=whole_number,
        nargs="+",
        default=[22_768, 131_072],
        help="unpaired batches",
    )
    add("--pairs", type=whole_number, default=10_000, help="pairs in a step")
    add(
        "--pool",
        type=whole_number,
        default=100_000,
        help="rows of each pool, float16, on the device",
    )
    add("--block_size", type=whole_number, default=1024, help="rows of a block when streaming")
    add(
        "--largest",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="look for the largest unpaired batch that fits",
    )
    add("--out", type=pathlib.Path, default=common.RESULTS, help="folder for the tables")
    return parser


def _survey_mode(
    survey: Survey, arguments: argparse.Namespace, block_size: int | None
) -> int | None:
    """Compiles the sizes asked for; returns the largest that fits when that is asked for too."""

    def at(unpaired: int) -> Workload:
        pool = max(arguments.pool, unpaired)  # a batch is drawn without replacement
        return Workload(arguments.pairs, unpaired, pool, block_size=block_size)

    for unpaired in arguments.unpaired:
        survey(at(unpaired))
    if not arguments.largest:
        return None
    return largest_fitting(SIZES, lambda size: survey.fits(at(size)))


def run(arguments: argparse.Namespace) -> None:
    """Surveys one target; what was compiled is written even if the rest is interrupted."""
    survey = Survey(arguments.target, devices(TARGETS[arguments.target], arguments.devices))
    name = f"accelerator-{arguments.target}"
    if arguments.devices > 1:
        name += f"-{arguments.devices}-devices"
    try:
        largest = {b: _survey_mode(survey, arguments, b) for b in (None, arguments.block_size)}
    finally:
        print(survey.table())
        print("wrote", *survey.table().save(arguments.out / name))
        if arguments.devices > 1:
            print(survey.exchanges())
            print("wrote", *survey.exchanges().save(arguments.out / f"{name}-exchanges"))
    for block_size, size in largest.items():
        if size is not None:
            mode = _mode(Workload(block_size=block_size))
            print(f"largest unpaired batch that fits, {mode}: {size:,} of up to {SIZES[-1]:,}")


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line; what the user can mend ends in one line."""
    arguments = _parser().parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # the target is described, not there
    try:
        run(arguments)
    except (checks.InputError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
