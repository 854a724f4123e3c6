import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sotalign_jax import feeding, sampling


@pytest.fixture
def data(rng):
    arrays = [rng.normal(size=size).astype(np.float16) for size in ((30, 4), (30, 3), (70, 4))]
    near = rng.integers(50, size=(30, 5))
    return sampling.DeviceData(*arrays, rng.normal(size=(50, 3)), None, near)


@pytest.mark.parametrize("pairs", [8, 99])
def test_the_same_batches_as_on_the_device(data, pairs):
    """In order, out of order and once more; also where a batch holds all pairs."""
    key, sizes = jax.random.key(3), {"pairs": pairs, "unpaired": 16}
    placed = jax.tree.map(jnp.asarray, data)
    draw = jax.jit(lambda step: sampling.draw(key, step, placed, **sizes))
    with feeding.Feed(data, key, **sizes) as feed:
        for step in (0, 1, 2, 7, 2):
            expected, batch = draw(jnp.int32(step)), feed(step)
            assert batch.x.dtype == jnp.float16 and batch.near_a is None
            jax.tree.map(np.testing.assert_array_equal, batch, expected)


def test_memory_mapped_rows_are_read_by_need(tmp_path, rng):
    """Only the batch is read of files that are larger than it; pairs that are all used, once."""

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
    with feeding.Feed(sampling.DeviceData(*arrays), key, pairs=6, unpaired=600) as feed:
        for step in range(3):
            feed(step)
    # The batch ahead may be under way.
    assert [array.read for array in arrays[:2]] == [6, 6]
    assert all(3 * 600 <= array.read <= 4 * 600 for array in arrays[2:])


def test_many_readers_keep_the_order(rng):
    rows = rng.normal(size=(9000, 2)).astype(np.float32)
    data = sampling.DeviceData(rows[:3], rows[:3], rows, rows)
    size = feeding.READERS * 300
    with feeding.Feed(data, jax.random.key(1), pairs=3, unpaired=size) as feed:
        batch = feed(0)
    expected = sampling.row_numbers(jax.random.key(1), jnp.int32(0), data, pairs=3, unpaired=size)
    np.testing.assert_array_equal(batch.x, rows[np.asarray(expected.x)])
    assert len({tuple(row) for row in np.asarray(batch.x)}) == size
    assert not any(a is b for a, b in itertools.combinations((batch.x, batch.y), 2))
