"""Ranking: nearest neighbours by cosine similarity, and ranks of matches.

The lower index comes first among equal scores, in both.
"""

import functools
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sotalign_jax import checks, sampling
from sotalign_jax.heads import Rows
from sotalign_jax.ot import affinity, blocks


class Neighbours(NamedTuple):
    """Nearest keys of every query, best first.

    Attributes:
        scores: Cosines, plus the bias of the key if there is one.
        indices: Row numbers of the keys.
    """

    scores: Float[Array, "n k"]
    indices: Int[Array, "n k"]


class Found(Neighbours):
    """Neighbours whose keys may have ids. It unpacks to scores and indices.

    Attributes:
        ids: Ids of the keys, shape [n, k]. None if the keys have none.

    Example:
        >>> scores, indices = found = Found(np.ones((1, 1)), np.zeros((1, 1), int), [["a"]])
        >>> found.ids
        [['a']]
    """

    ids: Any

    def __new__(cls, scores: Any, indices: Any, ids: Any = None) -> Self:
        made = super().__new__(cls, scores, indices)
        made.ids = ids
        return made


def nearest(
    queries: Rows,
    keys: Rows,
    k: int,
    *,
    bias: Float[Rows, " m"] | None = None,
    skip: str = "none",
    block_size: int = 1024,
) -> Neighbours:
    """Finds the k keys with the largest cosine for each query.

    Blocks of queries are compared with blocks of keys, so neither the score matrix nor a second
    copy of the keys is stored.

    Args:
        queries: Rows of any length, shape [n, d].
        keys: Rows of any length, shape [m, d].
        k: Number of neighbours. Among equal scores the lower index comes first.
        bias: Added to all scores of a key, shape [m]. The potential of a `Calibration` lowers the
            scores of hubs, keys that are among the nearest of too many queries.
        skip: Keeps a query from being its own neighbour. "itself" leaves out key i for query i.
            "equal" leaves out keys with the same values as the query, compared by 64-bit hashes,
            for tables in another order.
        block_size: Rows per block.

    Returns:
        The `Neighbours`, shape [n, k].

    Raises:
        InputError: Shapes do not fit, values are not finite, or a query has fewer than k keys.

    Example:
        >>> keys = jnp.array([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]])
        >>> nearest(keys[:1], keys, 2).indices.tolist()
        [[0, 1]]
        >>> nearest(keys[:1], keys, 2, skip="equal").indices.tolist()
        [[1, 2]]

    References:
        M. Radovanovic et al., "Hubs in space: popular nearest neighbors in high-dimensional data",
        JMLR 11 (2010).
    """
    queries, keys = jnp.asarray(queries), jnp.asarray(keys)
    if queries.ndim != 2 or keys.ndim != 2 or queries.shape[1] != keys.shape[1]:
        raise checks.InputError(
            f"keys have shape {keys.shape} but queries have shape {queries.shape}; "
            "pass two matrices of equal width"
        )
    checks.choice("skip", skip, ("none", "equal", "itself"))
    checks.whole(1, block_size=block_size)
    checks.within(len(keys), "keys", k=k)
    # `over_rows` needs at least one row.
    if not len(queries):
        return Neighbours(jnp.zeros((0, k)), jnp.zeros((0, k), jnp.int32))
    for name, rows in (("queries", queries), ("keys", keys)):
        if not checks.finite(rows):
            raise checks.InputError(f"{name} contain NaN or inf; remove such rows")
    bias = None if bias is None else jnp.asarray(bias)
    found = top_k(queries, keys, k, bias=bias, skip=skip, block_size=block_size)
    # Only after the comparison it is known how many keys `skip` has left.
    usable = np.asarray((found.indices >= 0).sum(axis=1))
    if usable.min() < k:
        raise checks.InputError(
            f"k must be <= {usable.min()}, the number of keys that query {usable.argmin()} may "
            f"choose from, got {k}"
        )
    return found


@jax.jit
def best_ranks(scores: Float[Array, "n m"], matches: Bool[Array, "n m"]) -> Int[Array, " n"]:
    """Computes the rank of each query's best match.

    The rank is the number of keys with a greater score, or with an equal score and a lower index.

    Args:
        scores: Scores of every query with every key, shape [n, m].
        matches: True where a key is right for a query, shape [n, m]. Several keys may match, such
            as five captions of an image, and the best one counts.

    Returns:
        Ranks from 0, shape [n].

    Example:
        >>> best_ranks(jnp.array([[0.1, 0.9, 0.5]]), jnp.array([[True, False, True]])).tolist()
        [1]
    """
    own = jnp.where(matches, scores, -jnp.inf)
    best = own.max(axis=1, keepdims=True)
    at = own.argmax(axis=1, keepdims=True)  # the lowest index among equal maxima
    ahead = (scores > best) | ((scores == best) & (jnp.arange(scores.shape[1]) < at))
    return ahead.sum(axis=1, dtype=jnp.int32)


@functools.partial(jax.jit, static_argnames=("k", "skip", "block_size"))
def top_k(
    queries: Float[Array, "n d"],
    keys: Float[Array, "m d"],
    k: int,
    *,
    bias: Float[Array, " m"] | None = None,
    skip: str = "none",
    block_size: int = 1024,
) -> Neighbours:
    """Finds nearest keys without checks, as the compiled part of `nearest`.

    Args:
        queries: Rows of any length, shape [n, d].
        keys: Rows of any length, shape [m, d].
        k: Number of neighbours.
        bias: Added to all scores of a key, shape [m].
        skip: "none", "itself" or "equal", see `nearest`.
        block_size: Rows per block.

    Returns:
        The `Neighbours`. Missing ones have the score -inf and the index -1.
    """
    # One dtype for both, so that equal rows of a float16 and a float32 table have equal hashes.
    dtype = jnp.result_type(affinity.as_float(queries[:0]), affinity.as_float(keys[:0]))

    def search(block: blocks.Block, table: Neighbours) -> Neighbours:
        rows = block.of(queries).astype(dtype)
        unit, hashes = affinity.l2_normalize(rows), _hashes(rows)
        numbers = block.start + jnp.arange(block.size)

        def merge(block: blocks.Block, best: Neighbours) -> Neighbours:
            rows = block.of(keys).astype(dtype)
            usable = block.fresh[None, :]
            if skip == "equal":
                usable = usable & (hashes[:, None, :] != _hashes(rows)[None, :, :]).any(axis=2)
            if skip == "itself":
                usable = usable & (numbers[:, None] != block.start + jnp.arange(block.size))
            cosines = affinity.dot(unit, affinity.l2_normalize(rows).T)
            if bias is not None:
                cosines = cosines + block.of(bias).astype(dtype)
            cosines = jnp.where(usable, cosines, -jnp.inf)
            # The best k so far compete with the scores of a block. `lax.top_k` prefers the first of
            # equal scores, and earlier keys come first.
            scores, place = jax.lax.top_k(jnp.concatenate([best.scores, cosines], axis=1), k)
            # The minimum keeps indices in range where a new score has won and `kept` is not used.
            kept = jnp.take_along_axis(best.indices, jnp.minimum(place, k - 1), axis=1)
            added = (block.start + place - k).astype(jnp.int32)
            return Neighbours(scores, jnp.where(place < k, kept, added))

        shape = block.size, k
        nothing = Neighbours(jnp.full(shape, -jnp.inf, dtype), jnp.full(shape, -1, jnp.int32))
        scores, indices = blocks.over_rows(len(keys), block_size, merge, nothing)
        # If fewer than k keys are left, skipped ones fill the places, with a score of -inf.
        indices = jnp.where(jnp.isneginf(scores), -1, indices)
        return Neighbours(block.put(table.scores, scores), block.put(table.indices, indices))

    empty = Neighbours(jnp.zeros((len(queries), k), dtype), jnp.zeros((len(queries), k), jnp.int32))
    return blocks.over_rows(len(queries), block_size, search, empty)


def _hashes(rows: Array) -> Array:
    """Returns two 32-bit hashes of each row, sums of its values mixed with a key per column."""
    # 0 and -0 are equal, but have different bits.
    values = jnp.where(rows == 0, 0.0, rows).astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    # One key per column, so that the order of the values matters.
    columns = jax.random.bits(jax.random.key(0), (2, rows.shape[1]), jnp.uint32)
    return sampling.hash32(bits[:, None, :] ^ columns).sum(axis=2, dtype=jnp.uint32)
