import jax
import jax.numpy as jnp
import numpy as np
import ot
import pytest

from sotalign_jax import checks, sliced


def _unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def _sets(rng, n, m, dim):
    """Directions around two different means, in lengths that must not matter."""
    x = rng.normal(size=(n, dim)) + 0.4
    y = rng.normal(size=(m, dim)) - 0.1
    return x, 3.0 * y


def _pot(x, y, planes):
    return ot.sliced.linear_sliced_wasserstein_sphere(
        _unit(x), _unit(y), n_projections=len(planes), projections=planes
    )


@pytest.mark.parametrize(
    ("n", "m", "dim", "count", "chunk"),
    [(40, 40, 6, 30, 16), (57, 31, 9, 33, 7), (250, 90, 3, 5, 100), (1, 5, 2, 8, 1)],
)
def test_the_distance_is_pots(x64, rng, n, m, dim, count, chunk):
    x, y = _sets(rng, n, m, dim)
    planes = ot.sliced.get_projections_sphere(dim, count, seed=3)
    got = sliced.sliced_wasserstein(x, y, projections=planes, chunk=chunk)
    assert got == pytest.approx(_pot(x, y, planes), abs=1e-12)


def test_single_precision_and_narrow_rows_are_close_to_pot(rng):
    x, y = _sets(rng, 300, 200, 16)
    planes = ot.sliced.get_projections_sphere(16, 50, seed=0)
    expected = _pot(x, y, planes)
    got = sliced.sliced_wasserstein(x.astype(np.float32), y, projections=planes)
    assert got == pytest.approx(expected, rel=1e-4)
    narrow = sliced.sliced_wasserstein(x.astype(np.float16), y, projections=planes)
    assert narrow == pytest.approx(expected, rel=1e-2)


def test_the_circle_has_its_golden_value(x64):
    u, v = (sliced._circular_embedding(jnp.array([a])) for a in ([0.2, 0.5, 0.8], [0.4, 0.5, 0.7]))
    assert sliced._distance(u, v) ** 2 == pytest.approx(0.0127, abs=1e-12)


def test_random_planes_are_orthonormal_and_as_far_apart_as_pots(x64, rng):
    planes = np.asarray(sliced.random_planes(jax.random.key(0), 400, 5))
    gram = np.einsum("pdi,pdj->pij", planes, planes)
    np.testing.assert_allclose(gram, np.broadcast_to(np.eye(2), gram.shape), atol=1e-12)
    x, y = _sets(rng, 60, 60, 5)
    ours = sliced.sliced_wasserstein(x, y, projections=2000)
    assert ours == pytest.approx(_pot(x, y, ot.sliced.get_projections_sphere(5, 2000)), rel=0.05)
    assert ours != sliced.sliced_wasserstein(x, y, projections=2000, seed=1)
    assert ours == sliced.sliced_wasserstein(x, y, projections=2000, chunk=999)


def test_random_directions_are_uniform():
    x = np.asarray(sliced.random_sphere(20_000, 3, seed=1))
    np.testing.assert_allclose(np.linalg.norm(x, axis=1), 1, atol=1e-6)
    # Archimedes: each coordinate of a direction in space is uniform in -1..1.
    deciles = np.quantile(x, np.linspace(0.1, 0.9, 9), axis=0)
    np.testing.assert_allclose(deciles, np.linspace(-0.8, 0.8, 9)[:, None].repeat(3, 1), atol=0.03)


def test_the_spread_is_of_new_samples_and_planes(rng):
    x, y = _sets(rng, 80, 70, 6)
    options = {"projections": 40, "chunk": 40}
    got = sliced.sliced_wasserstein_spread(x, y, repeats=4, rows=60, **options)
    again = sliced.sliced_wasserstein_spread(x, y, repeats=4, rows=60, **options)
    other = sliced.sliced_wasserstein_spread(x, y, repeats=4, rows=60, seed=1, **options)
    assert got == again != other and got.std > 0
    assert got.mean == pytest.approx(sliced.sliced_wasserstein(x, y), rel=0.2)
    one = sliced.sliced_wasserstein_spread(x, y, repeats=1, rows=10**6, **options)
    assert one.std == 0.0  # a single value, of all rows


def test_a_shift_grows_with_the_share_of_random_directions(rng):
    pairs = rng.normal(size=(401, 12)) + 0.5
    fresh = rng.normal(size=(600, 12)) + 0.5
    noise = rng.normal(size=(600, 12))
    shares = []
    for fraction in (0.0, 0.5, 1.0):
        pool = np.concatenate([noise[: int(600 * fraction)], fresh[int(600 * fraction) :]])
        shift = sliced.pool_shift(pairs, pool, repeats=8, projections=60)
        assert shift.rows == 200
        assert shift.noise.mean < 0.5 * shift.sphere.mean
        shares.append(shift.share)
    assert shares[0] < 0.15 and shares[0] < shares[1] < shares[2]
    # Squares of what sampling and shift add up: the share is 1 when the pool is the mark itself.
    assert shares[2] == pytest.approx(1.0, abs=0.05)


def test_samples_shrink_to_the_smallest_set_and_files_stay_mapped(tmp_path, rng):
    np.save(tmp_path / "pool.npy", rng.normal(size=(30, 5)).astype(np.float16))
    pool = np.load(tmp_path / "pool.npy", mmap_mode="r")
    pairs, repeats = rng.normal(size=(100, 5)), []
    shift = sliced.pool_shift(
        pairs, pool, repeats=3, projections=10, on_repeat=lambda: repeats.append(1)
    )
    assert shift.rows == 30 and len(repeats) == 3
    assert sliced.pool_shift(pairs, pool, repeats=1, projections=10, rows=7).rows == 7


def test_embedding_compiles_once_and_in_little_memory():
    n, dim, count = 4096, 8, 256
    before = sliced._embed._cache_size()
    x = np.random.default_rng(0).normal(size=(90, dim))
    sliced.pool_shift(x, x + 1, repeats=3, projections=9)
    assert sliced._embed._cache_size() == before + 1
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((n, dim), (count, dim, 2))]
    memory = sliced._embed.lower(*shapes, chunk=8).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * n * count / 2


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (np.ones((4, 3)), np.ones((4, 2)), {}, "y: rows have width 2 but 3 is needed"),
        (np.ones((4, 1)), np.ones((4, 1)), {}, "x: rows have width 1; directions need"),
        (np.zeros((4, 3)), np.ones((4, 3)), {}, "x: row 0 is all zeros"),
        (np.ones((4, 3)), np.full((4, 3), np.nan), {}, "y: row 0 is NaN"),
        (np.ones((4, 3)), np.ones((4, 3)), {"projections": 0}, "projections: is 0"),
        (np.ones((4, 3)), np.ones((4, 3)), {"chunk": 0}, "chunk: is 0"),
        (
            np.ones((4, 3)),
            np.ones((4, 3)),
            {"projections": np.ones((5, 4, 2))},
            r"\(5, 4, 2\); pas",
        ),
    ],
)
def test_bad_input(x, y, options, message):
    with pytest.raises(checks.InputError, match=message):
        sliced.sliced_wasserstein(x, y, **options)


def test_bad_repetitions():
    x = np.ones((4, 3))
    for name in ("repeats", "rows", "projections"):
        with pytest.raises(
            checks.InputError, match=f"{name}: is 0; pass a whole number of at least 1"
        ):
            sliced.sliced_wasserstein_spread(x, x, **{name: 0})
        with pytest.raises(
            checks.InputError, match=f"{name}: is 0; pass a whole number of at least 1"
        ):
            sliced.pool_shift(x, x, **{name: 0})
    with pytest.raises(checks.InputError, match="pairs: has 1 rows but at least 2"):
        sliced.pool_shift(x[:1], x)
