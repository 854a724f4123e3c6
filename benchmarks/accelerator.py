"""Memory of the training step on accelerators that are not there.

    python -m benchmarks.accelerator --target=a100

XLA compiles the very step that `training.fit` runs, at the paper's size by default, for a TPU or
GPU described to it, and tells how much memory the program needs. Nothing is executed, so that
neither speed nor numerics are seen.
"""

import argparse
import dataclasses
import importlib.util
import os
import pathlib
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from sotalign_jax import checks, heads, methods, sampling, tables, teachers, training

GIB = 2**30
SIZES = (8192, 16_384, 22_768, 32_768, 45_056, 65_536, 90_112, 131_072, 180_224, 262_144, 360_448)
"""Unpaired batches among which the largest that fits is sought."""
GPU_RESERVED = 0.05
"""Share of a GPU's memory left to the CUDA context and libraries; a TPU's compiler knows its own."""


class Target(NamedTuple):
    """A device to compile for: its memory, and how XLA is told about it."""

    platform: str
    plugin: str
    memory: int
    description: str
    bounds: tuple[int, ...] | None = None


TARGETS = {
    "tpu-v5e": Target("tpu", "libtpu", 16 * GIB, "v5e:1x1", (1, 1, 1)),
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
    block_size: int | None = None
    dtype: str = "float16"


class Memory(NamedTuple):
    """Bytes that the compiled step needs; `total` counts donated arrays once."""

    arguments: int
    outputs: int
    temporaries: int
    total: int
    fits: bool


def missing_plugin(target: Target) -> str | None:
    """What to install when the compiler for `target` is not there."""
    try:
        found = importlib.util.find_spec(target.plugin) is not None
    except ModuleNotFoundError:  # the plugin's parent package
        found = False
    extra = {"tpu": "tpu", "cuda": "cuda12"}[target.platform]
    if found:
        return None
    return (
        f"target: the compiler for {target.platform} is not installed; "
        f'run pip install "jax[{extra}]=={jax.__version__}"'
    )


def device(target: Target) -> Any:
    """A device that XLA compiles for without having it."""
    from jax.experimental import topologies

    message = missing_plugin(target)
    if message is not None:
        raise checks.InputError(message)
    options: dict[str, Any]
    if target.platform == "tpu":
        os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # do not wait for a cloud's metadata server
        options = {"topology_name": target.description}
        if target.bounds is not None:
            options["chips_per_host_bounds"] = target.bounds
    else:
        file = pathlib.Path(__file__).parent / "targets" / target.description
        options = {"target_config": file.read_text(encoding="utf-8"), "topology": "1x1x1"}
    return topologies.get_topology_desc(platform=target.platform, **options).devices[0]


def lower(workload: Workload, where: Any) -> Any:
    """The training step of `training.make_step`, lowered for the device `where`."""
    w = workload
    method = methods.SOTAlign(block_size=w.block_size)
    config = training.TrainConfig(pair_batch=w.pairs, unpaired_batch=w.unpaired)
    model = nnx.eval_shape(lambda: heads.build_heads(w.width_x, w.width_y, w.dim))

    def shape(*size: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, dtype)

    rows = max(w.pool, w.unpaired)
    batches = sampling.DeviceData(
        shape(w.pairs, w.width_x, dtype=w.dtype),
        shape(w.pairs, w.width_y, dtype=w.dtype),
        shape(rows, w.width_x, dtype=w.dtype),
        shape(rows, w.width_y, dtype=w.dtype),
    )
    teacher = teachers.LinearTeacher(
        heads.AffineMap(shape(w.dim, w.width_x), shape(w.dim), "l2"),
        heads.AffineMap(shape(w.dim, w.width_y), shape(w.dim), "l2"),
        shape(w.dim),
    )
    state = jax.eval_shape(
        lambda graph, params: training.init_state(
            method, nnx.merge(graph, params), batches, config
        ),
        *nnx.split(model),
    )
    step = training.make_step(method, model, config)
    sharding = jax.sharding.SingleDeviceSharding(where)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        (state, batches, teacher),
    )
    return step.trace(*arguments).lower()
