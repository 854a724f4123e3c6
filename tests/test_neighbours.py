import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.neighbors import NearestNeighbors

from sotalign_jax import checks, neighbours


def by_sorting(queries, keys, k, skip="none"):
    """Brute force in float64: a stable sort keeps ties in order."""
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
    """Rows of any length, among them some of the queries, one of them twice."""
    rows = rng.normal(size=(101, 8)) * rng.uniform(0.1, 10.0, size=(101, 1))
    rows[[5, 60, 61, 100]] = queries[[2, 9, 9, 36]]
    return rows.astype(np.float32)


@pytest.mark.parametrize("chunk", [1, 16, 1024])
@pytest.mark.parametrize("skip", ["none", "equal"])
def test_equals_brute_force_whatever_the_chunk(queries, keys, chunk, skip):
    found = neighbours.nearest(queries, keys, 6, skip=skip, chunk=chunk).indices
    np.testing.assert_array_equal(found, by_sorting(queries, keys, 6, skip))
    assert found.dtype == jnp.int32


def test_equals_scikit_learn(queries, keys):
    keys = np.delete(keys, 61, axis=0)  # it promises nothing about ties
    theirs = NearestNeighbors(n_neighbors=4, metric="cosine", algorithm="brute").fit(keys)
    np.testing.assert_array_equal(
        neighbours.nearest(queries, keys, 4).indices,
        theirs.kneighbors(queries, return_distance=False),
    )


def test_scores_are_cosines_of_the_indices(queries, keys):
    scores, indices = neighbours.nearest(queries, keys, 5)
    unit = [a / np.linalg.norm(a, axis=1, keepdims=True) for a in (queries, keys)]
    expected = np.take_along_axis(unit[0] @ unit[1].T, np.asarray(indices), axis=1)
    np.testing.assert_allclose(scores, expected, atol=1e-6)


@pytest.mark.parametrize("chunk", [4, 100])
def test_a_row_is_not_its_own_neighbour_but_its_duplicate_is(keys, chunk):
    found = neighbours.nearest(keys, keys, 1, skip="itself", chunk=chunk).indices
    assert found[60].tolist() == [61] and found[61].tolist() == [60]
    assert not np.any(np.asarray(found)[:, 0] == np.arange(len(keys)))


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_ties_go_to_the_lower_index(chunk):
    # Cosines of 0, 1/2 and 1, without rounding.
    kinds = np.array([[4, 0, 0, 0], [1, 1, 1, 1], [0, 0, 2, 0]], np.float32)
    keys = kinds[[1, 0, 1, 2, 0, 1, 2, 0, 0, 1, 2]]
    found = neighbours.nearest(kinds[:1], keys, 11, chunk=chunk).indices
    assert found.tolist() == [[1, 4, 7, 8, 0, 2, 5, 9, 3, 6, 10]]
    found = neighbours.nearest(kinds[:1], keys, 6, chunk=chunk, skip="equal").indices
    assert found.tolist() == [[0, 2, 5, 9, 3, 6]]


def test_only_rows_with_the_same_values_are_skipped():
    query = jnp.array([[1.0, 0.0, 2.0]], jnp.float32)
    keys = jnp.array([[2, 0, 4], [1, -0.0, 2], [1, 0, 2.002], [2, 0, 1], [1, 0, 2]], jnp.float16)
    # The same direction in another length stays, and so does the same set of values.
    assert neighbours.nearest(query, keys, 3, skip="equal").indices.tolist() == [[0, 2, 3]]
    with pytest.raises(checks.InputError, match=r"k.* 4"):
        neighbours.nearest(query, keys, 4, skip="equal")


def test_rows_that_differ_in_one_value_are_told_apart(rng):
    # Few distinct values in many columns, where a weak hash would collide.
    rows = rng.integers(0, 2, size=(400, 64)).astype(np.float16) + 1
    rows = np.unique(rows, axis=0)
    flipped = rows.copy()
    flipped[np.arange(len(rows)), rng.integers(64, size=len(rows))] *= 2
    keys = np.concatenate([flipped, rows])
    found = np.asarray(neighbours.nearest(rows, keys, len(keys) - 1, skip="equal").indices)
    missing = np.arange(len(keys)).sum() - found.sum(axis=1)  # one key of each query
    np.testing.assert_array_equal(missing, len(rows) + np.arange(len(rows)))


def test_half_precision_is_compared_in_float32(queries, keys):
    half = queries.astype(np.float16), keys.astype(np.float16)
    np.testing.assert_array_equal(neighbours.nearest(*half, 5).indices, by_sorting(*half, 5))


def test_works_with_64_bits(x64, queries, keys):
    wide = queries.astype(np.float64), keys.astype(np.float64)
    found = neighbours.nearest(*wide, 5, skip="equal", chunk=16).indices
    np.testing.assert_array_equal(found, by_sorting(*wide, 5, "equal"))
    assert found.dtype == jnp.int32


@pytest.mark.parametrize("skip", ["none", "equal"])
def test_memory_is_a_block_whatever_the_number_of_keys(skip):
    def temporaries(n, m, d=32, chunk=64):
        queries, keys = jnp.ones((n, d), jnp.float16), jnp.ones((m, d), jnp.float16)
        lowered = neighbours.top_k.lower(queries, keys, 5, skip=skip, chunk=chunk)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    small, large = temporaries(256, 512), temporaries(256, 65_536)
    assert large < small + 65_536  # less than a byte a key: no copy, no column of scores
    assert large < 64 * 64 * 4 * 20  # a few blocks
    assert temporaries(8192, 512) < small + 2 * 8192 * 5 * 4  # and the table


def test_compiles_once_for_a_shape(queries, keys, compilations):
    neighbours.nearest(queries, keys, 3)
    with compilations() as compiled:
        neighbours.nearest(2.0 * queries, keys, 3)
    assert not compiled


def test_no_queries_have_no_neighbours(keys):
    assert neighbours.nearest(keys[:0], keys, 3).indices.shape == (0, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 102}, r"k.* 102"),
        ({"k": 0}, r"k.* 0"),
        ({"chunk": 0}, r"chunk.* 0"),
        ({"queries": np.ones((3, 7))}, r"keys: have shape \(101, 8\)"),
        ({"queries": np.ones(8)}, r"queries have \(8,\); pass two matrices of one width"),
        ({"queries": np.full((3, 8), np.nan)}, "queries: rows contain NaN or inf"),
        ({"keys": np.full((9, 8), np.inf)}, "keys: rows contain NaN or inf"),
    ],
)
def test_mistakes_are_named(queries, keys, options, message):
    with pytest.raises(checks.InputError, match=message):
        neighbours.nearest(**{"queries": queries, "keys": keys, "k": 3} | options)
