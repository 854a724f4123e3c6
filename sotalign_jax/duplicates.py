"""Rows of one direction, such as a picture with five captions, and the groups that they connect."""

from typing import Any

import numpy as np
from jaxtyping import Int
from scipy import sparse

from sotalign_jax import checks
from sotalign_jax.cca.moments import unit

# Random projections of unit rows that are compared. Unequal rows share a cell of all of them with
# negligible probability.
_PROJECTIONS = 8
# Widths of a cell. Encoders change a row by about 1e-6 from batch to batch. Rows of a narrow cone
# need narrower cells.
_LEAST_CELL, _MOST_CELL, _CELL = 4e-6, 1e-4, 1e-2
# Grids that are shifted against each other. Rows that a boundary separates in one grid share a cell
# of another.
_GRIDS = 4


def first_duplicate(x: Any) -> Int[np.ndarray, " n"]:
    """Returns, for every row, the index of the first row of the same direction.

    Directions that differ by rounding count as the same, because an encoder returns slightly other
    features for the same item in another batch. Lengths do not matter, because no model depends on
    them.

    Args:
        x: Array [n, d], which is read in chunks, so that it may be memory-mapped.

    Returns:
        Indices [n].

    Example:
        >>> first_duplicate(np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 1e-9]])).tolist()
        [0, 1, 0]
    """
    n = len(x)
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(x.shape[1], _PROJECTIONS))
    projected = np.empty((n, _PROJECTIONS))
    for start in range(0, n, checks.CHUNK_ROWS):
        chunk = np.asarray(x[start : start + checks.CHUNK_ROWS])
        projected[start : start + len(chunk)] = unit(chunk) @ directions
    # Odd factors, so that sums of cell numbers, which wrap around, are hashes of the cells.
    factors = rng.integers(1 << 62, size=_PROJECTIONS) * 2 + 1
    cell = np.clip(_CELL * projected.std(axis=0).max(initial=0.0), _LEAST_CELL, _MOST_CELL)
    firsts = []
    for shift in range(_GRIDS):
        cells = np.floor(projected / cell + shift / _GRIDS).astype(np.int64)
        _, first, member = np.unique(cells @ factors, return_index=True, return_inverse=True)
        firsts.append(first[member])
    groups = _connected(n, *firsts)
    _, first = np.unique(groups, return_index=True)
    return first[groups]


def group_duplicates(
    first_x: Int[np.ndarray, " n"], first_y: Int[np.ndarray, " n"], *, largest: int
) -> Int[np.ndarray, " n"]:
    """Groups the rows of a paired table that share an x or a y, directly or through other rows.

    A group larger than `largest` cannot be held out, for example if a third of the pictures have
    the same caption. It is divided into the rows of each x, and if necessary into single rows.

    Args:
        first_x: Result of `first_duplicate` for x.
        first_y: Result of `first_duplicate` for y.
        largest: Size of the largest group.

    Returns:
        The group of every row. Rows with different numbers share nothing, except where a group was
        divided.

    Example:
        >>> group_duplicates(np.array([0, 0, 2, 3]), np.array([0, 1, 1, 3]), largest=3).tolist()
        [0, 0, 0, 1]
    """
    n = len(first_x)
    rows = np.arange(n)
    groups = _connected(n, first_x, first_y)
    for finer in (first_x, rows):
        # New numbers start above the largest one, so that they differ from all others.
        too_large = np.bincount(groups)[groups] > largest
        groups = np.where(too_large, groups.max(initial=0) + 1 + finer, groups)
    return groups


def _connected(n: int, *others: np.ndarray) -> np.ndarray:
    """Numbers the connected components of a graph with edges from row i to every others[k][i]."""
    rows = np.tile(np.arange(n), len(others))
    ends = rows, np.concatenate(others)
    graph = sparse.coo_array((np.ones(len(rows), bool), ends), shape=(n, n))
    return sparse.csgraph.connected_components(graph, directed=False)[1]
