"""The sweep over a stored kernel with one read of it, on GPUs and TPUs.

    s = A c,    t = (a / s)^T A.

A row of s needs all of its row of A before t can have its share, so that two products read A
twice. Here the rows of a block stay on chip for both.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from sotalign_jax.ot import affinity

LEAST = 2**22
"""Entries of a kernel below which it is not worth it."""
_TPU_BYTES = 2**23
"""Of a TPU's block of rows; two blocks and products of their size exist at a time."""
_GPU_COLUMNS = 24 * 1024
"""A row of A and as many sums of columns fit into the registers of 1,024 threads (64 each)."""
_OFFSET = 2**7 + (101 << 2)
"""Of 2^-26, the smallest number that is kept in 8 bits."""
_GPU_PROGRAMS = 528
"""How many share the rows: four for each of an H100's 132 processors, five of an A100's 108."""


def narrow(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """Numbers >= 0 in 8 bits, 6 of exponent and 2 of mantissa: 2^-26 to 2^38, rounded.

    Sums of a kernel's entries need the range of a fourth power, see `Kernel.absorb`.

    >>> widen(narrow(jnp.array([1.0, 1.3, 1e6]))).tolist()
    [1.0, 1.25, 1048576.0]
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.clip(((bits + 2**20) >> 21) - _OFFSET, -(2**7), 2**7 - 1).astype(jnp.int8)


def widen(x: Int[Array, "..."]) -> Float[Array, "..."]:
    """The numbers that were narrowed."""
    return jax.lax.bitcast_convert_type((x.astype(jnp.int32) + _OFFSET) << 21, jnp.float32)


def _entries(x: Array) -> Array:
    return widen(x) if x.dtype == jnp.int8 else x


def two_reads(
    matrix: Array,
    a: Float[Array, " n"],
    c: Float[Array, " m"],
    precision: jax.lax.PrecisionLike = affinity.HIGHEST,
) -> tuple[Float[Array, " n"], Float[Array, " m"]]:
    """s and t by two products."""
    matrix = _entries(matrix)
    s = affinity.dot(matrix, c, precision)
    return s, affinity.dot(a / s, matrix, precision)


def sweep(
    matrix: Array,
    a: Float[Array, " n"],
    c: Float[Array, " m"],
    precision: jax.lax.PrecisionLike = affinity.HIGHEST,
) -> tuple[Float[Array, " n"], Float[Array, " m"]]:
    """s and t of a matrix [n, m], which may be narrow, with one read of it where the device can.

    >>> s, t = sweep(jnp.ones((2, 3)), jnp.ones(2), jnp.ones(3))
    >>> s.tolist(), t.round(2).tolist()
    ([3.0, 3.0], [0.67, 0.67, 0.67])
    """
    plain = functools.partial(two_reads, precision=precision)
    if matrix.size < LEAST or a.dtype != jnp.float32:
        return plain(matrix, a, c)
    branches = {"tpu": on_tpu}
    if matrix.shape[1] <= _GPU_COLUMNS:
        branches["cuda"] = on_gpu
    return jax.lax.platform_dependent(matrix, a, c, default=plain, **branches)


def on_tpu(matrix: Array, a: Array, c: Array, *, interpret: bool = False) -> tuple[Array, Array]:
    """Blocks of rows pass through the vector memory one after another; t is summed there."""
    n, m = matrix.shape
    size = max(32, _TPU_BYTES // (4 * m) // 32 * 32)

    def kernel(matrix_ref: Any, a_ref: Any, c_ref: Any, s_ref: Any, t_ref: Any) -> None:
        block = pl.program_id(0)
        inside = block * size + jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0) < n
        rows = _entries(matrix_ref[...])
        s = jnp.sum(rows * c_ref[...], axis=1, keepdims=True)
        s_ref[...] = s
        # The last block reaches beyond the matrix, where anything may be.
        share = jnp.where(inside, rows * (a_ref[...] / s), 0.0)
        before = jnp.where(block == 0, 0.0, t_ref[...])
        t_ref[...] = before + jnp.sum(share, axis=0, keepdims=True)

    columns = pl.BlockSpec((1, m), lambda i: (0, 0))
    own_rows = pl.BlockSpec((size, 1), lambda i: (i, 0))
    s, t = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(n, size),),
        in_specs=[pl.BlockSpec((size, m), lambda i: (i, 0)), own_rows, columns],
        out_specs=[own_rows, columns],
        out_shape=[jax.ShapeDtypeStruct((n, 1), a.dtype), jax.ShapeDtypeStruct((1, m), a.dtype)],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=6 * _TPU_BYTES),
        interpret=interpret,
    )(matrix, a[:, None], c[None, :])
    return s[:, 0], t[0]


def on_gpu(matrix: Array, a: Array, c: Array, *, interpret: bool = False) -> tuple[Array, Array]:
    """Every program takes each `programs`-th row and sums its own t, in registers."""
    n, m = matrix.shape
    programs = min(n, _GPU_PROGRAMS)
    pieces = _pieces(m)

    def kernel(matrix_ref: Any, a_ref: Any, c_ref: Any, s_ref: Any, t_ref: Any) -> None:
        own = pl.program_id(0)

        def piece(ref: Any, row: tuple[Array, ...], start: int, size: int) -> Array:
            columns = start + jnp.arange(size)
            return _entries(triton.load(ref.at[*row, columns], mask=columns < m, other=0))

        def row(k: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            i = own + k * programs
            parts = [piece(matrix_ref, (i,), *one) for one in pieces]
            products = zip(parts, pieces, strict=True)
            s = sum(jnp.sum(part * piece(c_ref, (), *one)) for part, one in products)
            s_ref[i] = s
            weight = a_ref[i] / s
            return tuple(t + weight * part for t, part in zip(sums, parts, strict=True))

        start = tuple(jnp.zeros(size, a.dtype) for _, size in pieces)
        sums = jax.lax.fori_loop(0, pl.cdiv(n - own, programs), row, start)
        for t, (begin, size) in zip(sums, pieces, strict=True):
            columns = begin + jnp.arange(size)
            triton.store(t_ref.at[own, columns], t, mask=columns < m)

    s, parts = pl.pallas_call(
        kernel,
        grid=(programs,),
        out_shape=[
            jax.ShapeDtypeStruct((n,), a.dtype),
            jax.ShapeDtypeStruct((programs, m), a.dtype),
        ],
        compiler_params=triton.CompilerParams(num_warps=32, num_stages=1),
        interpret=interpret,
    )(matrix, a, c)
    return s, jnp.sum(parts, axis=0)


@functools.cache
def _pieces(m: int) -> tuple[tuple[int, int], ...]:
    """(start, size) of powers of two, at least 1024, that cover m columns.

    >>> _pieces(22_768)
    ((0, 16384), (16384, 4096), (20480, 2048), (22528, 1024))
    """
    pieces, start = [], 0
    while start < m:
        size = max(1024, 2 ** ((m - start).bit_length() - 1))
        pieces.append((start, size))
        start += size
    return tuple(pieces)
