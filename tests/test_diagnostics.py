import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sotalign_jax import checks, data, diagnostics, teachers
from sotalign_jax.ot import affinity
from sotalign_jax.ot import klot as klot_lib


def _brute_force(x, y, k, clamp):
    """Mutual k-NN, sample by sample."""
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
    """Two encoders of the same samples; one feature is huge and says nothing."""
    latent = rng.normal(size=(n, 6))
    x = latent @ rng.normal(size=(6, 20)) + noise * rng.normal(size=(n, 20))
    y = latent @ rng.normal(size=(6, 15)) + noise * rng.normal(size=(n, 15))
    x[:, 3] = 100 * rng.normal(size=n)
    return x, y


@pytest.mark.parametrize("clamp", [0.95, 0.5, None])
@pytest.mark.parametrize(("n", "k", "chunk"), [(90, 10, 32), (33, 1, 1024), (20, 19, 7)])
def test_mutual_knn_equals_brute_force(x64, rng, n, k, chunk, clamp):
    x, y = _two_views(rng, n)
    got = diagnostics.mutual_knn(x, y, k=k, clamp=clamp, chunk=chunk)
    assert got == pytest.approx(_brute_force(x, y, k, clamp), abs=1e-12)


def test_mutual_knn_of_the_bundled_pictures_equals_brute_force():
    rows = data.pictures_dataset(n_pairs=300)
    x, y = rows.pairs_x, rows.pairs_y  # float16
    got = diagnostics.mutual_knn(x, y, chunk=128)
    assert got == pytest.approx(_brute_force(x, y, 10, 0.95), abs=1e-3)
    assert 0.12 < got < 0.25


def test_clamping_tames_a_huge_feature(rng):
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


def test_the_score_matrix_never_exists():
    n, dim, chunk = 4096, 8, 64
    shape = jax.ShapeDtypeStruct((n, dim), jnp.float32)
    compiled = diagnostics._neighbours.lower(shape, 0.95, k=10, chunk=chunk).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * n * n / 4


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (np.ones((4, 3)), np.ones((5, 3)), {}, "pairs: x has 4 rows but y has 5"),
        (np.ones((4, 3)), np.ones((4, 3)), {}, r"k: is 10 but there are 4 rows; pass 1\.\.3"),
        (np.ones((4, 3)), np.ones((4, 3)), {"k": 0}, "k: is 0"),
        (
            np.ones((4, 3)),
            np.ones((4, 3)),
            {"k": 1, "clamp": 0.0},
            "clamp: is 0.0; pass a quantile",
        ),
        (
            np.ones((4, 3)),
            np.ones((4, 3)),
            {"k": 1, "chunk": 0},
            "chunk: is 0; pass a whole number of at least 1",
        ),
        (np.full((4, 3), np.inf), np.ones((4, 3)), {"k": 1}, "pairs x: row 0 is NaN or inf"),
    ],
)
def test_bad_mutual_knn_input(x, y, options, message):
    with pytest.raises(checks.InputError, match=message):
        diagnostics.mutual_knn(x, y, **options)


@pytest.fixture(scope="module")
def features():
    """The CCA teacher's view of unpaired pictures and captions."""
    rows = data.pictures_dataset(n_pairs=200, pool="disjoint")
    teacher = teachers.cca(rows.pairs_x, rows.pairs_y)
    return teacher.x(rows.pool_x[:150]), teacher.y(rows.pool_y[:120])


def test_convergence_is_that_of_a_training_step(features):
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


def test_partners_are_the_perplexity_of_the_rows(x64, features):
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


def test_a_ladder_compiles_once_and_names_its_smallest(features):
    before = diagnostics._solve._cache_size()
    rows = diagnostics.sinkhorn_convergence(*features, (0.5, 0.05, 0.0002), max_iterations=12)
    assert diagnostics._solve._cache_size() == before + 1
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
        (np.ones((4, 2)), {}, "g: rows have width 2 but 3"),
        (np.ones((4, 3)), {"epsilons": (0.1, 0.0)}, "epsilons: is 0.0; pass a number above 0"),
        (np.ones((4, 3)), {"tolerance": -1.0}, "tolerance: is -1"),
        (np.ones((4, 3)), {"max_iterations": 0}, "max_iterations: is 0"),
    ],
)
def test_bad_convergence_input(g, options, message):
    with pytest.raises(checks.InputError, match=message):
        diagnostics.sinkhorn_convergence(np.ones((4, 3)), g, **{"epsilons": (0.1,)} | options)
