"""Exact nearest neighbours by cosine, in blocks on the device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sotalign_jax import checks, sampling
from sotalign_jax.ot import affinity, blocks


def nearest(
    queries: Float[Array, "n d"],
    keys: Float[Array, "m d"],
    k: int,
    *,
    skip_equal: bool = False,
    chunk: int = 1024,
) -> Int[Array, "n k"]:
    """The k keys of largest cosine for each query, best first, ties to the lower index.

    Keys are cast to float32 and normalised a block at a time, so that neither the score matrix nor
    a second copy of the keys ever exists.

    `skip_equal` leaves out keys that equal the query in every value. Where keys and queries are
    samples of one table it is how a query is kept from being its own neighbour: row numbers are
    no help, for arrays that were given apart (a pool that also holds the paired rows, in another
    order) do not share them. It leaves out exact duplicates of the query, too, which tell nothing
    that the query does not; near-duplicates stay. Rows are compared by hashes of 64 bits.

    Args:
        queries: embeddings, in any scale and float dtype.
        keys: embeddings of the same encoder.
        k: neighbours of each query.
        skip_equal: whether keys equal to the query are left out.
        chunk: most queries, and most keys, that are compared at a time.

    Returns:
        Rows of `keys`.

    Raises:
        InputError: there are fewer than k keys for a query, or rows are NaN or infinite.

    >>> keys = jnp.array([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]])
    >>> nearest(keys[:1], keys, 2).tolist(), nearest(keys[:1], keys, 2, skip_equal=True).tolist()
    ([[0, 1]], [[1, 2]])
    """
    queries, keys = jnp.asarray(queries), jnp.asarray(keys)
    if queries.ndim != 2 or keys.ndim != 2 or queries.shape[1] != keys.shape[1]:
        raise checks.InputError(
            f"keys: have shape {keys.shape} but queries have {queries.shape}; "
            "pass two matrices of one width"
        )
    checks.whole(1, k=k, chunk=chunk)
    if k > len(keys):
        raise checks.InputError(
            f"k: {k} neighbours asked of {len(keys)} keys; ask for fewer or add keys"
        )
    if not len(queries):
        return jnp.zeros((0, k), jnp.int32)
    index, finite = _search(queries, keys, k, skip_equal=skip_equal, chunk=chunk)
    for name, fine in zip(("queries", "keys"), finite, strict=True):
        if not fine:
            raise checks.InputError(f"{name}: rows contain NaN or inf; remove such rows")
    found = np.asarray((index >= 0).sum(axis=1))
    if found.min() < k:
        raise checks.InputError(
            f"k: {k} neighbours asked but only {found.min()} keys differ from query "
            f"{found.argmin()}; ask for fewer or add keys"
        )
    return index


@functools.partial(jax.jit, static_argnames=("k", "skip_equal", "chunk"))
def _search(
    queries: Array, keys: Array, k: int, *, skip_equal: bool, chunk: int
) -> tuple[Array, tuple[Array, Array]]:
    """The table, -1 where there are too few keys; and whether queries and keys are finite."""

    def search(block: blocks.Block, table: Array) -> Array:
        rows = block.of(queries).astype(jnp.float32)
        unit, hashes = affinity.l2_normalize(rows), _hashes(rows)

        def merge(block: blocks.Block, best: tuple[Array, Array]) -> tuple[Array, Array]:
            scores, index = best
            rows = block.of(keys).astype(jnp.float32)
            usable = block.fresh[None, :]
            if skip_equal:
                equal = (hashes[:, None, :] == _hashes(rows)[None, :, :]).all(axis=2)
                usable = usable & ~equal
            cosines = affinity.dot(unit, affinity.l2_normalize(rows).T)
            cosines = jnp.where(usable, cosines, -jnp.inf)
            # Among equals `top_k` takes the first, and earlier keys stand before later ones.
            scores, place = jax.lax.top_k(jnp.concatenate([scores, cosines], axis=1), k)
            kept = jnp.take_along_axis(index, jnp.minimum(place, k - 1), axis=1)
            added = (block.start + place - k).astype(jnp.int32)
            return scores, jnp.where(place < k, kept, added)

        shape = block.size, k
        nothing = jnp.full(shape, -jnp.inf, jnp.float32), jnp.full(shape, -1, jnp.int32)
        scores, index = blocks.over_rows(len(keys), chunk, merge, nothing)
        return block.put(table, jnp.where(jnp.isneginf(scores), -1, index))

    table = blocks.over_rows(len(queries), chunk, search, jnp.zeros((len(queries), k), jnp.int32))
    return table, (_finite(queries, chunk), _finite(keys, chunk))


def _finite(rows: Array, chunk: int) -> Array:
    def body(block: blocks.Block, finite: Array) -> Array:
        return finite & jnp.isfinite(block.of(rows)).all()

    return blocks.over_rows(len(rows), chunk, body, jnp.asarray(True))


def _hashes(rows: Array) -> Array:
    """Two 32-bit hashes of each row: sums of its values, mixed with a key of their column."""
    values = jnp.where(rows == 0, 0.0, rows)  # 0 and -0 are equal
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    columns = jax.random.bits(jax.random.key(0), (2, rows.shape[1]), jnp.uint32)
    return sampling.mix(bits[:, None, :] ^ columns).sum(axis=2, dtype=jnp.uint32)
