"""Tests of the diagnostics against brute force and POT."""

import jax
import jax.numpy as jnp
import numpy as np
import ot
import pytest

from sotalign_jax import checks, data, diagnostics, teachers
from sotalign_jax.ot import affinity
from sotalign_jax.ot import klot as klot_lib


def _brute_force(x, y, k, clamp):
    """Computes mutual k-NN with a loop over samples."""
    neighbours = []
    for rows in (x, y):
        rows = rows.astype(np.float64)
        if clamp is not None:
            bound = np.mean([np.quantile(np.abs(row), clamp) for row in rows])
            rows = np.clip(rows, -bound, bound)
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        found = []
        for i, row in enumerate(rows):
            scores = rows @ row
            scores[i] = -np.inf
            found.append(set(np.argsort(-scores, kind="stable")[:k].tolist()))
        neighbours.append(found)
    return np.mean([len(a & b) / k for a, b in zip(*neighbours, strict=True)])


def _two_views(rng, n, noise=0.5):
    """Returns two views of the same samples. One feature is huge and uninformative."""
    latent = rng.normal(size=(n, 6))
    x = latent @ rng.normal(size=(6, 20)) + noise * rng.normal(size=(n, 20))
    y = latent @ rng.normal(size=(6, 15)) + noise * rng.normal(size=(n, 15))
    x[:, 3] = 100 * rng.normal(size=n)
    return x, y


@pytest.mark.parametrize("clamp", [0.95, 0.5, None])
@pytest.mark.parametrize(("n", "k"), [(1030, 10), (33, 1), (20, 19)])
def test_mutual_knn_matches_brute_force(x64, rng, n, k, clamp):
    x, y = _two_views(rng, n)
    got = diagnostics.mutual_knn(x, y, k=k, clamp=clamp)
    assert got == pytest.approx(_brute_force(x, y, k, clamp), abs=1e-12)


def test_mutual_knn_of_photographs_matches_brute_force():
    sample = data.photographs()
    x, y = sample.image[:300].astype(np.float16), sample.text[:300].astype(np.float16)
    got = diagnostics.mutual_knn(x, y)
    assert got == pytest.approx(_brute_force(x, y, 10, 0.95), abs=1e-3)
    assert 0.2 < got < 0.32


def test_mutual_knn_clamp_limits_a_huge_feature(rng):
    x, y = _two_views(rng, 200, noise=0.1)
    clamped, raw = (diagnostics.mutual_knn(x, y, clamp=c) for c in (0.8, None))
    assert clamped > raw + 0.1


def test_mutual_knn_of_unrelated_rows_is_chance(rng):
    x, y = _two_views(rng, 120)
    scores = [diagnostics.mutual_knn(x, y[rng.permutation(120)]) for _ in range(10)]
    chance = diagnostics.chance_knn(120)
    assert chance == 10 / 119
    assert np.mean(scores) == pytest.approx(chance, abs=0.012)
    assert diagnostics.mutual_knn(x, y) > 3 * chance


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (np.ones((4, 3)), np.ones((5, 3)), {}, r"y:? has 5 rows but x has 4"),
        (np.ones((4, 3)), np.ones((4, 3)), {}, r"k .*10"),
        (np.ones((4, 3)), np.ones((4, 3)), {"k": 0}, r"k.* 0"),
        (
            np.ones((4, 3)),
            np.ones((4, 3)),
            {"k": 1, "clamp": 0.0},
            r"clamp.* 0.0",
        ),
        (np.full((4, 3), np.inf), np.ones((4, 3)), {"k": 1}, r"x .*rows 0\b"),
    ],
)
def test_mutual_knn_rejects_bad_input(x, y, options, message):
    with pytest.raises(checks.InputError, match=message):
        diagnostics.mutual_knn(x, y, **options)


# --- sliced Wasserstein ---


def _unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def _sets(rng, n, m, dim):
    """Returns directions around two means, with norms that must not matter."""
    x = rng.normal(size=(n, dim)) + 0.4
    y = rng.normal(size=(m, dim)) - 0.1
    return x, 3.0 * y


def _pot(x, y, planes):
    return ot.sliced.linear_sliced_wasserstein_sphere(
        _unit(x), _unit(y), n_projections=len(planes), projections=planes
    )


@pytest.mark.parametrize(
    ("n", "m", "dim", "count"),
    [(40, 40, 6, 32), (57, 31, 9, 33), (250, 90, 3, 5), (1, 5, 2, 8)],
)
def test_sliced_wasserstein_matches_pot(x64, rng, n, m, dim, count):
    x, y = _sets(rng, n, m, dim)
    planes = ot.sliced.get_projections_sphere(dim, count, seed=3)
    got = diagnostics.sliced_wasserstein(x, y, projections=planes)
    assert got == pytest.approx(_pot(x, y, planes), abs=1e-12)


def test_sliced_wasserstein_in_low_precision_is_close_to_pot(rng):
    x, y = _sets(rng, 300, 200, 16)
    planes = ot.sliced.get_projections_sphere(16, 50, seed=0)
    expected = _pot(x, y, planes)
    got = diagnostics.sliced_wasserstein(x.astype(np.float32), y, projections=planes)
    assert got == pytest.approx(expected, rel=1e-4)
    narrow = diagnostics.sliced_wasserstein(x.astype(np.float16), y, projections=planes)
    assert narrow == pytest.approx(expected, rel=1e-2)


def test_sliced_wasserstein_on_the_circle_has_golden_value(x64):
    turns = np.array([[0.2, 0.5, 0.8], [0.4, 0.5, 0.7]])
    x, y = (np.stack([np.cos(2 * np.pi * t), np.sin(2 * np.pi * t)], axis=1) for t in turns)
    distance = diagnostics.sliced_wasserstein(x, y, projections=np.eye(2)[None])
    assert distance**2 == pytest.approx(0.0127, abs=1e-12)


def test_random_planes_are_orthonormal_and_match_pot(x64, rng):
    planes = np.asarray(diagnostics._random_planes(jax.random.key(0), 400, 5))
    gram = np.einsum("pdi,pdj->pij", planes, planes)
    np.testing.assert_allclose(gram, np.broadcast_to(np.eye(2), gram.shape), atol=1e-12)
    x, y = _sets(rng, 60, 60, 5)
    ours = diagnostics.sliced_wasserstein(x, y, projections=2000)
    assert ours == pytest.approx(_pot(x, y, ot.sliced.get_projections_sphere(5, 2000)), rel=0.05)
    assert ours != diagnostics.sliced_wasserstein(x, y, projections=2000, seed=1)


def test_random_sphere_is_uniform():
    x = np.asarray(diagnostics._random_sphere(20_000, 3, seed=1))
    np.testing.assert_allclose(np.linalg.norm(x, axis=1), 1, atol=1e-6)
    # Archimedes: each coordinate of a direction in space is uniform in -1..1.
    deciles = np.quantile(x, np.linspace(0.1, 0.9, 9), axis=0)
    np.testing.assert_allclose(deciles, np.linspace(-0.8, 0.8, 9)[:, None].repeat(3, 1), atol=0.03)


def test_pool_shift_grows_with_the_share_of_random_directions(rng):
    pairs = rng.normal(size=(401, 12)) + 0.5
    fresh = rng.normal(size=(600, 12)) + 0.5
    noise = rng.normal(size=(600, 12))
    shares = []
    for fraction in (0.0, 0.5, 1.0):
        pool = np.concatenate([noise[: int(600 * fraction)], fresh[int(600 * fraction) :]])
        shift = diagnostics.pool_shift(pairs, pool, repeats=8, projections=60)
        assert shift.rows == 200
        assert shift.noise < 0.5 * shift.sphere
        shares.append(shift.share)
    assert shares[0] < 0.15 and shares[0] < shares[1] < shares[2]
    # The share is 1 if the pool itself is random directions.
    assert shares[2] == pytest.approx(1.0, abs=0.05)


def test_pool_shift_samples_at_most_the_smallest_set(tmp_path, rng):
    np.save(tmp_path / "pool.npy", rng.normal(size=(30, 5)).astype(np.float16))
    pool = np.load(tmp_path / "pool.npy", mmap_mode="r")
    pairs = rng.normal(size=(100, 5))
    assert diagnostics.pool_shift(pairs, pool, repeats=3, projections=10).rows == 30
    assert diagnostics.pool_shift(pairs, pool, repeats=1, projections=10, rows=7).rows == 7


def test_pool_shift_compiles_once_and_needs_little_memory(compilations):
    n, dim, count = 4096, 8, 256
    x = np.random.default_rng(0).normal(size=(90, dim))
    diagnostics.pool_shift(x, x + 1, repeats=1, projections=9)
    with compilations() as compiled:
        diagnostics.pool_shift(x, x + 1, repeats=3, projections=9)
    assert not compiled
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((n, dim), (count, dim, 2))]
    memory = diagnostics._circle_embedding.lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * n * count / 2


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (np.ones((4, 3)), np.ones((4, 2)), {}, r"y.* 2\b"),
        (np.ones((4, 1)), np.ones((4, 1)), {}, r"x.* 1\b"),
        (np.zeros((4, 3)), np.ones((4, 3)), {}, r"x .*rows 0\b"),
        (np.ones((4, 3)), np.full((4, 3), np.nan), {}, r"y .*rows 0\b"),
        (np.ones((4, 3)), np.ones((4, 3)), {"projections": 0}, r"projections.* 0"),
        (
            np.ones((4, 3)),
            np.ones((4, 3)),
            {"projections": np.ones((5, 4, 2))},
            r"projections .*\(5, 4, 2\)",
        ),
    ],
)
def test_sliced_wasserstein_rejects_bad_input(x, y, options, message):
    with pytest.raises(checks.InputError, match=message):
        diagnostics.sliced_wasserstein(x, y, **options)


def test_pool_shift_rejects_bad_options():
    x = np.ones((4, 3))
    for name in ("repeats", "rows", "projections"):
        with pytest.raises(checks.InputError, match=rf"{name} .*got 0"):
            diagnostics.pool_shift(x, x, **{name: 0})
    with pytest.raises(checks.InputError, match=r"pairs .*rows.* 1"):
        diagnostics.pool_shift(x[:1], x)


# --- Sinkhorn convergence ---


@pytest.fixture(scope="module")
def features():
    """Returns CCA teacher features of unpaired photographs and captions."""
    image, text, _ = data.photographs()
    teacher = teachers.cca(image[:200], text[:200])
    return teacher.x(image[200:350]), teacher.y(text[350:470])


def test_sinkhorn_convergence_matches_a_training_step(features):
    f, g = features

    @jax.jit
    def teacher_plan(epsilon_star):
        limits = {"tolerance": 1e-3, "max_iterations": 500}
        _, aux = klot_lib.klot_from_embeddings(
            f, g, f, g, epsilon_star=epsilon_star, return_aux=True, **limits
        )
        return aux.teacher

    for row in diagnostics.sinkhorn_convergence(f, g, (0.05, 0.005)):
        plan = teacher_plan(row.epsilon)
        assert row.converged and row.iterations == plan.iterations
        assert row.error == pytest.approx(float(plan.error), abs=1e-5)


def test_sinkhorn_convergence_partners_are_the_row_perplexity(x64, features):
    f, g = (np.asarray(z, np.float64) for z in features)
    epsilons = (1.0, 0.05, 0.01)
    got = diagnostics.sinkhorn_convergence(f, g, epsilons, tolerance=1e-10, max_iterations=5000)
    cosines = np.asarray(affinity.cosine(f, g))
    n, m = cosines.shape
    for epsilon, row in zip(epsilons, got, strict=True):
        u, v = np.zeros(n), np.zeros(m)
        for _ in range(5000):
            u = -np.log(n) - jax.nn.logsumexp(cosines / epsilon + v, axis=1)
            v = -np.log(m) - jax.nn.logsumexp(cosines / epsilon + u[:, None], axis=0)
            plan = n * np.exp(cosines / epsilon + u[:, None] + v)
            if np.abs(plan.sum(1) - 1).mean() < 1e-9:
                break
        expected = np.exp(-np.sum(plan * np.log(plan), axis=1).mean())
        assert row.converged and row.partners == pytest.approx(expected, rel=1e-6)
    assert got[0].partners > got[1].partners > got[2].partners


def test_smallest_epsilon_of_a_ladder_that_compiles_once(features, compilations):
    diagnostics.sinkhorn_convergence(*features, (0.3,), max_iterations=12)
    with compilations() as compiled:
        rows = diagnostics.sinkhorn_convergence(*features, (0.5, 0.05, 0.0002), max_iterations=12)
    assert not compiled
    assert [row.converged for row in rows] == [True, True, False]
    assert rows[2].error > 1e-3 and rows[2].iterations == 12
    assert diagnostics.smallest_epsilon(rows) == 0.05
    assert diagnostics.smallest_epsilon(rows[::-1]) == 0.05
    assert diagnostics.smallest_epsilon(rows[2:]) is None
    lucky = rows[2]._replace(epsilon=0.0001, converged=True)  # below one that failed
    assert diagnostics.smallest_epsilon([*rows, lucky]) == 0.05


@pytest.mark.parametrize(
    ("g", "options", "message"),
    [
        (np.ones((4, 2)), {}, r"g.* 2\b"),
        (np.ones((4, 3)), {"epsilons": (0.1, 0.0)}, r"epsilons.* 0.0"),
        (np.ones((4, 3)), {"tolerance": -1.0}, r"tolerance.* -1"),
        (np.ones((4, 3)), {"max_iterations": 0}, r"max_iterations.* 0"),
    ],
)
def test_sinkhorn_convergence_rejects_bad_input(g, options, message):
    with pytest.raises(checks.InputError, match=message):
        diagnostics.sinkhorn_convergence(np.ones((4, 3)), g, **{"epsilons": (0.1,)} | options)
