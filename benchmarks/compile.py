"""Compiles the loss and the training step for devices that are not on this machine.

    pip install "jax[cuda12]" "jax[tpu]"             # compilers only, no device is needed
    python -m benchmarks.compile                     # KLOT and its gradient for every target
    python -m benchmarks.compile --step              # the training step at the paper's size
    python -m benchmarks.compile --step --devices=2 --targets a100 h100

XLA compiles for a device that is described to it and reports the memory of the program. The library
is traced with the profile of that device (`sotalign_jax.ot.device`), so it chooses the same
algorithms and the same storage as on the device itself. Nothing is run. The command fails if a
program does not compile.
"""

import dataclasses
import functools
import importlib.util
import itertools
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies

from benchmarks import common
from sotalign_jax import checks, heads, klot_from_embeddings, methods, sampling, teachers, training
from sotalign_jax.ot import device, sharding

GPUS = ["a100", "h100", "b200", "t4", "v100", "rtx3090", "rtx4090"]
"""GPUs with a description in `benchmarks/targets`."""
TPUS = {"tpu-v3": ("v3:2x2", 15.48), "tpu-v4": ("v4:2x2x1", 15.25)}
TPUS |= {"tpu-v5e": ("v5e:2x4", 15.75), "tpu-v6e": ("v6e:2x4", 31.25)}
"""Topology, and GiB of memory per device. A device is one core of a v3 or v4."""
X64 = {"a100": ("float32, x64", "float64"), "tpu-v5e": ("float32, x64",)}
"""Types to compile with `jax_enable_x64`, by target. A TPU lacks float64 for some operations."""
STEP = ["a100", "h100", "t4", "tpu-v5e"]
"""Default targets of the training step."""


def describe(name: str, count: int = 1) -> tuple[list[Any], device.Profile]:
    """Returns descriptions of the devices of a target, and the library's profile of them.

    Args:
        name: One of `GPUS` or `TPUS`.
        count: Number of devices.

    Raises:
        InputError: The name is unknown, or the compiler is not installed.
    """
    checks.choice("targets", name, (*GPUS, *TPUS))
    gpu = name in GPUS
    if importlib.util.find_spec("jax_cuda12_plugin" if gpu else "libtpu") is None:
        command = f'pip install "jax[{"cuda12" if gpu else "tpu"}]=={jax.__version__}"'
        raise checks.InputError(
            f"targets has {name} but its compiler is not installed; run {command}"
        )
    if gpu:
        file = pathlib.Path(__file__).parent / "targets" / f"{name}.txtpb"
        text, shape = file.read_text(encoding="utf-8"), f"1x1x{count}"
        # By default, JAX reserves 75 % of a GPU's memory.
        gib = 0.75 * int(re.findall(r"device_memory_size: (\d+)", text)[0]) / 2**30
        found = topologies.get_topology_desc(platform="cuda", target_config=text, topology=shape)
    else:
        # The compiler must neither ask a cloud's metadata server for a TPU nor lock one.
        os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        os.environ |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}
        os.environ["TPU_ACCELERATOR_TYPE"] = "v5litepod-1"
        shape, gib = TPUS[name]
        found = topologies.get_topology_desc(platform="tpu", topology_name=shape)
    checks.within(len(found.devices), "devices of a target", devices=count)
    profile = device.profile(found.devices[0])
    return found.devices[:count], profile._replace(memory=int(gib * 2**30))


@dataclasses.dataclass(frozen=True)
class Workload:
    """Shapes of one training step. The defaults are the paper's, with a pool of 100,000 rows."""

    pairs: int = 10_000
    unpaired: int = 22_768
    pool: int = 100_000
    width_x: int = 2048
    width_y: int = 4096
    dim: int = 1024
    teacher_dim: int = 2048

    @property
    def widths(self) -> int:
        """Sum of the widths of both modalities."""
        return self.width_x + self.width_y


def _shape(*size: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(size, dtype)


def _placed(tree: Any, to: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), tree)


def lower_klot(w: Workload, where: Any, dtype: Any = jnp.float32) -> jax.stages.Lowered:
    """Lowers the loss and its gradient with respect to both features, for one device.

    Args:
        w: Shapes.
        where: The device.
        dtype: Dtype of the features.
    """
    widths = w.dim, w.dim, w.teacher_dim, w.teacher_dim
    features = [_shape(w.unpaired, width, dtype=dtype) for width in widths]
    gradient = jax.jit(jax.value_and_grad(klot_from_embeddings, argnums=(0, 1)))
    return gradient.lower(*_placed(features, jax.sharding.SingleDeviceSharding(where)))


def lower_step(w: Workload, where: Sequence[Any]) -> jax.stages.Lowered:
    """Lowers the step that `training.fit` runs.

    Args:
        w: Shapes.
        where: One device, or several that share the step.
    """
    method = methods.SOTAlign()
    config = training.TrainConfig(pair_batch=w.pairs, unpaired_batch=w.unpaired)
    build = functools.partial(heads.build_heads, w.width_x, w.width_y, w.dim)
    model = nnx.eval_shape(build)

    def rows(unpaired: int) -> list[Any]:
        sizes = [(n, d) for n in (w.pairs, unpaired) for d in (w.width_x, w.width_y)]
        return [_shape(*size, dtype="float16") for size in sizes]

    e = w.teacher_dim
    x, y = (heads.AffineMap(_shape(e, d), _shape(e), "l2") for d in (w.width_x, w.width_y))
    teacher = teachers.Teacher(x, y, _shape(e))
    data: Any = sampling.DeviceData(*rows(w.pool))
    star_x, star_y = training.cached_feature_shapes(data, teacher)
    data = data._replace(star_x=star_x, star_y=star_y)
    state = jax.eval_shape(lambda: training.init_state(method, build(), data, config))
    if len(where) == 1:
        step = training.make_step(method, model, config)
        key = jax.eval_shape(lambda: training.batch_key(config))
        one = jax.sharding.SingleDeviceSharding(where[0])
        return step.lower(*_placed((state, data, teacher, key), one))
    # Several devices receive the rows of each batch from their hosts.
    mesh = jax.sharding.Mesh(np.array(where), ("rows",))
    everywhere = sharding.replicated(mesh)
    split: Any = [sharding.SplitRows.shape(x, mesh) for x in rows(w.unpaired)]
    batch = sampling.Batch(*split)._replace(step=_placed(_shape(dtype=jnp.int32), everywhere))
    step = training.make_step(method, model, config, mesh)
    with jax.set_mesh(mesh):
        return step.lower(_placed(state, everywhere), batch, _placed(teacher, everywhere))


def compile_for(profile: device.Profile, lower: Callable[[], jax.stages.Lowered]) -> list[Any]:
    """Returns MiB of temporaries, MiB in all, seconds to compile, and "yes" or the error.

    Args:
        profile: Profile of the device to compile for.
        lower: Function that lowers the program.
    """
    jax.clear_caches()  # traces depend on the profile, which is not part of their key
    start = time.perf_counter()
    try:
        with device.compiling_for(profile):
            stats: Any = lower().compile().memory_analysis()
    except Exception as error:  # the table reports failures of any kind
        return [None, None, time.perf_counter() - start, checks.first_line(error)[:120]]
    kept = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    total = kept + stats.temp_size_in_bytes
    if profile.name == "tpu":  # its temporaries count fragmentation twice
        total = stats.peak_memory_in_bytes
    sizes = ((total - kept) / common.MEBIBYTE, total / common.MEBIBYTE)
    return [*sizes, time.perf_counter() - start, "yes"]


def rows_of(name: str, described: Any, w: Workload, args: Any) -> list[list[Any]]:
    """Compiles the training step for a target, or the loss for all sizes and types.

    Args:
        name: Name of the target.
        described: Result of `describe`.
        w: Shapes of the training step.
        args: Flags of the command.

    Returns:
        Rows of the table.
    """
    where, profile = described
    if args.step:
        found = compile_for(profile, lambda: lower_step(w, where))
        return [[name, profile.name, w.unpaired, "float32", *found]]
    rows = []
    for kind, n in itertools.product(("float32", *X64.get(name, ())), args.n):
        print(f"compiling for {name}: n = {n}, {kind} ...", flush=True)
        with jax.enable_x64(kind != "float32"):
            sizes = Workload(unpaired=n)
            lower = functools.partial(lower_klot, sizes, where[0], kind.partition(",")[0])
            rows.append([name, profile.name, n, kind, *compile_for(profile, lower)])
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles the programs for all targets and prints a table of their memory."""
    sizes = {"n": [1024, 4099, 22_768], "pairs": 10_000, "unpaired": 22_768}
    args = common.options(__doc__, argv, targets=["all"], step=False, devices=1, **sizes)
    checks.whole(1, devices=args.devices, unpaired=args.unpaired, pairs=args.pairs)
    jax.config.update("jax_platforms", "cpu")  # the targets are described, but not present
    names = args.targets
    if names == ["all"]:
        names = STEP if args.step else [*GPUS, *TPUS]
    w = Workload(args.pairs, args.unpaired)
    # Describe all targets first: a missing compiler would otherwise show up after hours.
    described = {name: describe(name, args.devices) for name in names}
    rows = [row for name in names for row in rows_of(name, described[name], w, args)]
    headers = ["target", "profile", "n", "dtype", "temporaries MiB", "total MiB", "s", "compiles"]
    name = f"step-{args.devices}" if args.step else "klot"
    common.publish(name, common.Table(headers, rows, digits=0), args.out / f"compile-{name}")
    failed = [row for row in rows if row[-1] != "yes"]
    if failed:
        sys.exit(f"error: {len(failed)} of {len(rows)} programs do not compile")


if __name__ == "__main__":
    common.run(main)
