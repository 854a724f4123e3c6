"""Tests of nearest neighbours against a stable sort and scikit-learn."""

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.neighbors import NearestNeighbors

from sotalign_jax import checks, neighbours


def by_sorting(queries, keys, k, skip="none"):
    """Computes neighbours in float64 with a stable sort, which keeps ties in order."""
    q, c = (np.asarray(a, np.float64) for a in (queries, keys))
    unit = [a / np.linalg.norm(a, axis=1, keepdims=True) for a in (q, c)]
    scores = unit[0] @ unit[1].T
    if skip == "equal":
        scores[(q[:, None, :] == c[None, :, :]).all(axis=2)] = -np.inf
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


@pytest.fixture
def queries(rng):
    return rng.normal(size=(37, 8)).astype(np.float32)


@pytest.fixture
def keys(rng, queries):
    """Returns rows of various norms that include some queries, one of them twice."""
    rows = rng.normal(size=(101, 8)) * rng.uniform(0.1, 10.0, size=(101, 1))
    rows[[5, 60, 61, 100]] = queries[[2, 9, 9, 36]]
    return rows.astype(np.float32)


@pytest.mark.parametrize("block_size", [1, 16, 1024])
@pytest.mark.parametrize("skip", ["none", "equal"])
def test_nearest_matches_brute_force_for_every_block_size(queries, keys, block_size, skip):
    found = neighbours.nearest(queries, keys, 6, skip=skip, block_size=block_size).indices
    np.testing.assert_array_equal(found, by_sorting(queries, keys, 6, skip))
    assert found.dtype == jnp.int32


def test_nearest_matches_scikit_learn(queries, keys):
    keys = np.delete(keys, 61, axis=0)  # scikit-learn does not specify the order of ties
    theirs = NearestNeighbors(n_neighbors=4, metric="cosine", algorithm="brute").fit(keys)
    np.testing.assert_array_equal(
        neighbours.nearest(queries, keys, 4).indices,
        theirs.kneighbors(queries, return_distance=False),
    )


def test_nearest_scores_are_cosines(queries, keys):
    scores, indices = neighbours.nearest(queries, keys, 5)
    unit = [a / np.linalg.norm(a, axis=1, keepdims=True) for a in (queries, keys)]
    expected = np.take_along_axis(unit[0] @ unit[1].T, np.asarray(indices), axis=1)
    np.testing.assert_allclose(scores, expected, atol=1e-6)


@pytest.mark.parametrize("block_size", [4, 100])
def test_nearest_skips_the_row_itself_but_not_its_duplicate(keys, block_size):
    found = neighbours.nearest(keys, keys, 1, skip="itself", block_size=block_size).indices
    assert found[60].tolist() == [61] and found[61].tolist() == [60]
    assert not np.any(np.asarray(found)[:, 0] == np.arange(len(keys)))


@pytest.mark.parametrize("block_size", [1, 3, 100])
def test_nearest_breaks_ties_by_the_lower_index(block_size):
    # The cosines are exactly 0, 1/2 and 1.
    kinds = np.array([[4, 0, 0, 0], [1, 1, 1, 1], [0, 0, 2, 0]], np.float32)
    keys = kinds[[1, 0, 1, 2, 0, 1, 2, 0, 0, 1, 2]]
    found = neighbours.nearest(kinds[:1], keys, 11, block_size=block_size).indices
    assert found.tolist() == [[1, 4, 7, 8, 0, 2, 5, 9, 3, 6, 10]]
    found = neighbours.nearest(kinds[:1], keys, 6, block_size=block_size, skip="equal").indices
    assert found.tolist() == [[0, 2, 5, 9, 3, 6]]


def test_nearest_skips_only_rows_of_equal_values():
    query = jnp.array([[1.0, 0.0, 2.0]], jnp.float32)
    keys = jnp.array([[2, 0, 4], [1, -0.0, 2], [1, 0, 2.002], [2, 0, 1], [1, 0, 2]], jnp.float16)
    # Rows of equal direction, or with the same values in another order, are kept.
    assert neighbours.nearest(query, keys, 3, skip="equal").indices.tolist() == [[0, 2, 3]]
    with pytest.raises(checks.InputError, match=r"^k\b"):
        neighbours.nearest(query, keys, 4, skip="equal")


def test_nearest_distinguishes_rows_that_differ_in_one_value(rng):
    # Uses few distinct values in many columns, for which a weak hash would collide.
    rows = rng.integers(0, 2, size=(400, 64)).astype(np.float16) + 1
    rows = np.unique(rows, axis=0)
    flipped = rows.copy()
    flipped[np.arange(len(rows)), rng.integers(64, size=len(rows))] *= 2
    keys = np.concatenate([flipped, rows])
    found = np.asarray(neighbours.nearest(rows, keys, len(keys) - 1, skip="equal").indices)
    missing = np.arange(len(keys)).sum() - found.sum(
        axis=1
    )  # index of the skipped key of each query
    np.testing.assert_array_equal(missing, len(rows) + np.arange(len(rows)))


def test_nearest_compares_half_precision_in_float32(queries, keys):
    half = queries.astype(np.float16), keys.astype(np.float16)
    np.testing.assert_array_equal(neighbours.nearest(*half, 5).indices, by_sorting(*half, 5))


def test_nearest_works_with_x64(x64, queries, keys):
    wide = queries.astype(np.float64), keys.astype(np.float64)
    found = neighbours.nearest(*wide, 5, skip="equal", block_size=16).indices
    np.testing.assert_array_equal(found, by_sorting(*wide, 5, "equal"))
    assert found.dtype == jnp.int32


@pytest.mark.parametrize("skip", ["none", "equal"])
def test_top_k_memory_is_independent_of_the_number_of_keys(skip):
    def temporaries(n, m, d=32, block_size=64):
        queries, keys = jnp.ones((n, d), jnp.float16), jnp.ones((m, d), jnp.float16)
        lowered = neighbours.top_k.lower(queries, keys, 5, skip=skip, block_size=block_size)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    small, large = temporaries(256, 512), temporaries(256, 65_536)
    assert large < small + 65_536  # less than a byte per key: no copy, no column of scores
    assert large < 64 * 64 * 4 * 20  # a few blocks
    assert temporaries(8192, 512) < small + 2 * 8192 * 5 * 4  # plus the result table


def test_nearest_compiles_once_per_shape(queries, keys, compilations):
    neighbours.nearest(queries, keys, 3)
    with compilations() as compiled:
        neighbours.nearest(2.0 * queries, keys, 3)
    assert not compiled


def test_nearest_of_no_queries_is_empty(keys):
    assert neighbours.nearest(keys[:0], keys, 3).indices.shape == (0, 3)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"k": 102}, "k"),
        ({"k": 0}, "k"),
        ({"block_size": 0}, "block_size"),
        ({"queries": np.ones((3, 7))}, "keys"),
        ({"queries": np.ones(8)}, "keys"),
        ({"queries": np.full((3, 8), np.nan)}, "queries"),
        ({"keys": np.full((9, 8), np.inf)}, "keys"),
    ],
)
def test_nearest_rejects_bad_arguments(queries, keys, options, name):
    with pytest.raises(checks.InputError, match=rf"^{name}\b"):
        neighbours.nearest(**{"queries": queries, "keys": keys, "k": 3} | options)
