"""Device-dependent choices: algorithms of matrix products by role, storage and memory.

All knowledge about devices is in this module. A `Profile` lists the choices for one device.
`profile()` looks them up by the platform and the CUDA compute capability of this process's devices:

| device                                | teacher  | student, gradient, heads | SigLIP   | int8 |
|---------------------------------------|----------|--------------------------|----------|------|
| CUDA 8.0, 9.0, 10.x (A100, H100, B200)| 3 x bf16 | TF32                     | TF32     | yes  |
| CUDA 8.6, 8.9, 12.x (RTX 3090, 4090)  | float32  | float32                  | float32  | yes  |
| CUDA 7.x (V100, T4), ROCm             | float32  | float32                  | float32  | yes  |
| TPU                                   | 3 x bf16 | 3 x bf16                 | 3 x bf16 | yes  |
| CPU                                   | float32  | float32                  | float32  | no   |

Three bfloat16 passes and TF32 are used only where the device has them and where they are faster
than float32: an RTX 4090 multiplies 83 TFLOP/s in float32 and in TF32, and 55 in three passes.
`benchmarks/precision.py` measures their errors. Three passes change the gradient of KLOT by 2e-5.
One TF32 pass changes it by 9e-4 in the teacher's affinity and by less in the other roles. Stopping
at the default tolerance of 1e-4 changes it by 1e-3.
"""

import contextlib
import contextvars
import functools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

HIGHEST = jax.lax.Precision.HIGHEST
"""Full float32 on every device."""
TF32 = jax.lax.DotAlgorithmPreset.TF32_TF32_F32
"""Operands with 10 stored bits of mantissa and float32 sums, on the tensor cores of some GPUs."""
THREE_PASSES = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3
"""Three bfloat16 products with float32 sums: nearly float32, at a third of the bfloat16 rate."""

UNKNOWN_MEMORY = 8 * 2**30
"""Bytes assumed for an accelerator that does not report its memory: the smallest common size."""


class Profile(NamedTuple):
    """Choices that depend on the device. Hashable, so it can be a static argument.

    Attributes:
        name: Platform and capability, such as "cuda 8.0".
        teacher: Algorithm of the teacher's affinity, the most sensitive product.
        student: Algorithm of the student's affinity.
        gradient: Algorithm of the products of plans with features.
        heads: Algorithm of linear maps of embeddings.
        siglip: Algorithm of SigLIP's affinities and gradients.
        int8: True if sums over an 8-bit kernel are faster than over a float32 kernel.
        memory: Bytes of device memory.
    """

    name: str
    teacher: jax.lax.PrecisionLike = HIGHEST
    student: jax.lax.PrecisionLike = HIGHEST
    gradient: jax.lax.PrecisionLike = HIGHEST
    heads: jax.lax.PrecisionLike = HIGHEST
    siglip: jax.lax.PrecisionLike = HIGHEST
    int8: bool = True
    memory: int = UNKNOWN_MEMORY


ROLES = ("teacher", "student", "gradient", "heads", "siglip")
"""Fields of `Profile` that hold the algorithm of a product."""
_TENSOR_CORES: dict[str, Any] = dict.fromkeys(ROLES, TF32) | {"teacher": THREE_PASSES}
_TPU: dict[str, Any] = dict.fromkeys(ROLES, THREE_PASSES)
# CUDA capabilities whose tensor cores are faster than float32, see the table above.
_CAPABILITIES = dict.fromkeys(("8.0", "9.0", "10.0", "10.3"), _TENSOR_CORES)

_described: contextvars.ContextVar[Profile | None] = contextvars.ContextVar("device", default=None)


def profile(device: Any = None) -> Profile:
    """Returns the profile of a device, by default of the least capable local one.

    Args:
        device: A `jax.Device`, or a device of `jax.experimental.topologies`.

    Returns:
        The `Profile`, or the one of `compiling_for` inside that context.

    Example:
        >>> profile(jax.devices("cpu")[0]).name
        'cpu'
    """
    described = _described.get()
    if device is None and described is not None:
        return described
    if device is None:
        # A process may see several kinds of GPU. The oldest decides for all.
        device = min(jax.local_devices(), key=_capability)
    platform = device.platform
    if platform == "cpu":
        return Profile("cpu", int8=False, memory=_host_memory())
    if platform == "tpu":
        return Profile("tpu", **_TPU, memory=_memory(device))
    # The capability of a ROCm device is a name. Unknown platforms have none.
    if not _capability(device):
        return Profile("rocm" if platform == "gpu" else platform, memory=_memory(device))
    version = device.compute_capability
    return Profile(f"cuda {version}", **_CAPABILITIES.get(version, {}), memory=_memory(device))


def _capability(device: Any) -> tuple[int, ...]:
    """Returns the CUDA capability of a device as numbers, () for other devices."""
    parts = str(getattr(device, "compute_capability", "")).split(".")
    return tuple(int(part) for part in parts if part.isdigit())


def _memory(device: Any) -> int:
    """Returns the bytes that this process may use of an accelerator."""
    try:
        stats = device.memory_stats() or {}
    except (jax.errors.JaxRuntimeError, NotImplementedError):  # a device that is only described
        stats = {}
    # The limit that XLA's allocator has set for this process, not the size of the device.
    return stats.get("bytes_limit", UNKNOWN_MEMORY)


def _host_memory() -> int:
    """Returns the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextlib.contextmanager
def compiling_for(chosen: Profile) -> Iterator[None]:
    """Uses another profile while a function is traced, to compile it for a device elsewhere.

    Args:
        chosen: The profile to use.

    Example:
        >>> with compiling_for(Profile("cuda 7.5")):
        ...     profile().name
        'cuda 7.5'
    """
    token = _described.set(chosen)
    try:
        yield
    finally:
        _described.reset(token)


def matmul(a: Array, b: Array, algorithm: jax.lax.DotAlgorithmPreset) -> Array:
    """Computes a @ b by an algorithm on the platforms that have it, and in float32 elsewhere.

    Args:
        a: Left operand.
        b: Right operand.
        algorithm: Algorithm of the product.

    Returns:
        The product.
    """
    # Chosen when the program is lowered, because arrays may be on the CPU of a machine with an
    # accelerator.
    exact = functools.partial(jnp.matmul, precision=HIGHEST)
    if jnp.promote_types(a.dtype, b.dtype) != jnp.float32:
        return exact(a, b)
    fast = functools.partial(jnp.matmul, precision=algorithm)
    platforms = ("cuda",) if algorithm is TF32 else ("cuda", "tpu")
    return jax.lax.platform_dependent(a, b, default=exact, **dict.fromkeys(platforms, fast))
