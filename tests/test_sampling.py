"""Tests of permutations, batches and the feed of batches from the host."""

import functools
import itertools
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from sotalign_jax import sampling


@functools.partial(jax.jit, static_argnames="size")
def whole(key, size):
    return sampling.permute(key, jnp.arange(size), size)


@functools.partial(jax.jit, static_argnames="size")
def many(keys, size):
    """Returns one permutation per row."""
    return jax.vmap(lambda key: sampling.permute(key, jnp.arange(size), size))(keys)


@functools.partial(jax.jit, static_argnames=("size", "batch"))
def drawn(key, step, size, batch):
    return sampling.draw_rows(key, step, size, batch)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 1000, 4097])
def test_permute_is_a_permutation(size):
    for seed in range(3):
        order = np.asarray(whole(jax.random.key(seed), size))
        np.testing.assert_array_equal(np.sort(order), np.arange(size))


def test_permute_is_evaluated_pointwise():
    key, chosen = jax.random.key(1), jnp.array([7, 0, 999, 7])
    np.testing.assert_array_equal(
        sampling.permute(key, chosen, 1000), np.asarray(whole(key, 1000))[np.asarray(chosen)]
    )


def test_permute_with_different_keys_rarely_agrees():
    first, second = whole(jax.random.key(0), 4097), whole(jax.random.key(1), 4097)
    # Two random permutations agree in a Poisson(1) number of places.
    assert int(jnp.sum(first == second)) < 8


@pytest.mark.parametrize("size", [2, 3, 13])
def test_permute_is_uniform_at_every_position(size):
    draws = 4000
    orders = np.asarray(many(jax.random.split(jax.random.key(0), draws), size))
    counts = np.stack([np.bincount(orders[:, i], minlength=size) for i in range(size)])
    expected = draws / size
    statistic = np.sum((counts - expected) ** 2 / expected)
    assert stats.chi2.sf(statistic, (size - 1) ** 2) > 1e-4


def test_permute_leaves_no_correlation_of_neighbours():
    order = np.asarray(whole(jax.random.key(3), 4097)).astype(float)
    # A random order has a lag-1 correlation of about 1 / sqrt(4097) = 0.016.
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.08
    assert abs(np.corrcoef(order, np.arange(4097))[0, 1]) < 0.08


@pytest.mark.parametrize(("size", "batch"), [(100, 30), (100, 25), (7, 1), (5, 4)])
def test_draw_rows_is_disjoint_in_an_epoch_and_epochs_differ(size, batch):
    key, per_epoch = jax.random.key(0), size // batch
    epochs = []
    for epoch in range(4):
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        rows = np.concatenate([drawn(key, jnp.int32(step), size, batch) for step in steps])
        assert len(np.unique(rows)) == per_epoch * batch
        assert rows.min() >= 0
        assert rows.max() < size
        epochs.append(tuple(rows.tolist()))
    assert len(set(epochs)) > 1


def test_draw_rows_visits_all_rows_over_epochs():
    rows = [drawn(jax.random.key(0), jnp.int32(step), 10, 7) for step in range(30)]
    assert len(np.unique(np.concatenate(rows))) == 10


def test_draw_rows_of_everything_keeps_the_order():
    for batch in (9, 10):
        np.testing.assert_array_equal(
            drawn(jax.random.key(5), jnp.int32(4), 9, batch), np.arange(9)
        )
    assert drawn(jax.random.key(5), jnp.int32(4), 0, 3).shape == (0,)


@pytest.mark.parametrize("size", [10**6, 10**7, 2**31 - 1])
def test_draw_rows_of_large_pools_uses_memory_of_a_batch(size):
    key = jax.random.key(0)
    rows = np.asarray(drawn(key, jnp.int32(3), size, 256))
    assert len(np.unique(rows)) == 256
    assert rows.min() >= 0
    assert rows.max() < size
    assert rows.max() > size // 2  # a wrong high bit would exclude the upper half
    compiled = drawn.lower(key, jnp.int32(3), size, 256).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 100_000


@pytest.fixture(scope="module")
def data():
    """Returns rows [modality, row number, row number, ...]."""

    def rows(modality, n, width, dtype=jnp.float32):
        numbers = jnp.arange(n, dtype=dtype)[:, None]
        return jnp.concatenate([jnp.full((n, 1), modality, dtype), numbers.repeat(width, 1)], 1)

    return sampling.DeviceData(
        rows(0, 12, 2), rows(1, 12, 3), rows(2, 20, 2, jnp.float16), rows(3, 30, 3)
    )


@functools.partial(jax.jit, static_argnames=("pairs", "unpaired"))
def batch_of(seed, step, data, *, pairs=5, unpaired=6):
    key = jax.random.key(seed)
    return sampling.draw(key, step, data, pairs=pairs, unpaired=unpaired)


def test_draw_takes_rows_of_each_array_and_keeps_pairs(data):
    batch = batch_of(0, jnp.int32(2), data)
    assert [part.shape for part in batch[:4]] == [(5, 3), (5, 4), (6, 3), (6, 4)]
    assert [float(part[0, 0]) for part in batch[:4]] == [0, 1, 2, 3]
    assert batch.near_a is None and batch.near_b is None  # no neighbour tables were given
    assert batch.step == 2
    np.testing.assert_array_equal(batch.a[:, 1], batch.b[:, 1])
    assert batch.x.dtype == jnp.float16  # dtypes are kept
    assert batch.x[:, 1].tolist() != batch.y[:, 1].tolist()  # pools are shuffled independently


def test_draw_is_a_function_of_seed_and_step(data):
    sequence = [batch_of(7, jnp.int32(step), data) for step in range(6)]
    for step in (4, 1):  # in any order, and without jit
        again = sampling.draw(jax.random.key(7), jnp.int32(step), data, pairs=5, unpaired=6)
        jax.tree.map(np.testing.assert_array_equal, sequence[step], again)
    for other in (batch_of(8, jnp.int32(4), data), sequence[5]):
        assert sequence[4].y[:, 1].tolist() != other.y[:, 1].tolist()


def test_draw_of_more_rows_than_data_is_the_data(data):
    batch = batch_of(0, jnp.int32(9), data, pairs=100, unpaired=100)
    jax.tree.map(np.testing.assert_array_equal, batch[:4], data[:4])
    draw = functools.partial(
        sampling.draw, jax.random.key(0), jnp.int32(0), pairs=100, unpaired=100
    )
    assert "gather" not in str(jax.make_jaxpr(draw)(sampling.DeviceData(*data[:4])))  # no copy


# --- batches from the host ---


@pytest.fixture
def on_host(rng):
    arrays = [rng.normal(size=size).astype(np.float16) for size in ((30, 4), (30, 3), (70, 4))]
    near = rng.integers(50, size=(30, 5))
    return sampling.DeviceData(*arrays, rng.normal(size=(50, 3)), None, near)


@pytest.mark.parametrize("pairs", [8, 99])
def test_feed_matches_draw_on_the_device(on_host, pairs):
    """Covers steps in order, out of order and repeated, and batches of all pairs."""
    key, sizes = jax.random.key(3), {"pairs": pairs, "unpaired": 16}
    placed = jax.tree.map(jnp.asarray, on_host)
    draw = jax.jit(lambda step: sampling.draw(key, step, placed, **sizes))
    with sampling.Feed(on_host, key, **sizes) as feed:
        for step in (0, 1, 2, 7, 2):
            expected, batch = draw(jnp.int32(step)), feed(step)
            assert batch.x.dtype == jnp.float16 and batch.near_a is None
            chex.assert_trees_all_equal(batch, expected)


def test_feed_reads_only_the_rows_of_its_batches(tmp_path, rng):
    """Large files are read batch by batch. Pairs that are all in a batch are read once."""

    class Counted:
        def __init__(self, array):
            self.array, self.shape, self.dtype, self.read = array, array.shape, array.dtype, 0

        def __len__(self):
            return len(self.array)

        def __getitem__(self, rows):
            self.read += len(rows)
            return self.array[rows]

    arrays = []
    for name, shape in (("a", (6, 3)), ("b", (6, 2)), ("x", (5000, 3)), ("y", (5000, 2))):
        np.save(tmp_path / name, rng.normal(size=shape))
        arrays.append(Counted(np.load(tmp_path / f"{name}.npy", mmap_mode="r")))
    key = jax.random.key(0)
    with sampling.Feed(sampling.DeviceData(*arrays), key, pairs=6, unpaired=600) as feed:
        for step in range(3):
            feed(step)
    # The next batch may already be prefetched.
    assert [array.read for array in arrays[:2]] == [6, 6]
    assert all(3 * 600 <= array.read <= 4 * 600 for array in arrays[2:])


def test_feed_with_many_readers_keeps_the_order(rng):
    rows = rng.normal(size=(9000, 2)).astype(np.float32)
    data = sampling.DeviceData(rows[:3], rows[:3], rows, rows)
    size = sampling.READERS * 300
    with sampling.Feed(data, jax.random.key(1), pairs=3, unpaired=size) as feed:
        batch = feed(0)
    expected = sampling.row_numbers(jax.random.key(1), jnp.int32(0), data, pairs=3, unpaired=size)
    np.testing.assert_array_equal(batch.x, rows[np.asarray(expected.x)])
    assert len({tuple(row) for row in np.asarray(batch.x)}) == size
    assert not any(a is b for a, b in itertools.combinations((batch.x, batch.y), 2))


def test_feed_joins_its_threads_when_it_ends():
    data = sampling.DeviceData(*(np.ones((900, width), np.float32) for width in (2, 3, 2, 3)))
    before = set(threading.enumerate())
    with sampling.Feed(data, jax.random.key(0), pairs=400, unpaired=500) as feed:
        feed(0)
    assert set(threading.enumerate()) <= before
