"""Tests of the refinement of teachers by transport plans, against POT and dense formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import ot
import pytest
import scipy.linalg

from sotalign_jax import checks, data, files, recipe, teachers
from sotalign_jax.cca import canonical, choose, features, moments, refine
from sotalign_jax.ot import blocks, coupling, device

OPTIONS = choose.Options(ridge_x=0.5, ridge_y=0.3, power=1.0)


def views(n, *, noise=2.0, seed=0, widths=(24, 20)):
    """Returns two noisy views of eight latent variables."""
    rng, mix = np.random.default_rng(seed), np.random.default_rng(99)
    z = rng.normal(size=(n, 8))
    rows = (z @ mix.normal(size=(8, d)) + noise * rng.normal(size=(n, d)) for d in widths)
    return [view.astype(np.float32) for view in rows]


def noise(n, width, seed=5):
    return np.random.default_rng(seed).normal(size=(n, width)).astype(np.float32)


def linear_side(pairs, pool):
    made = features.principal(pairs, pool, 512)
    return refine.Side(made, made(pairs), pool)


def sides(pairs, pools):
    return [linear_side(*rows) for rows in zip(pairs, pools, strict=True)]


def recall(teacher):
    """Returns R@10 on new pairs."""
    new = views(300, noise=3.0, seed=7)
    scores = np.asarray(teacher.x(new[0]) @ teacher.y(new[1]).T)
    ranks = (scores > np.diag(scores)[:, None]).sum(axis=1)
    return np.mean(ranks < 10)


def inverse_root(matrix):
    values, vectors = np.linalg.eigh(matrix)
    return (vectors / np.sqrt(values)) @ vectors.T


def plan_of(f, g, epsilon):
    """Computes the plan of the cosines of f and g with POT in float64."""
    cosines = moments.unit(f) @ moments.unit(g).T
    weights = [np.full(size, 1.0 / size) for size in cosines.shape]
    # Solved to 1e-9, because the potentials of a rough plan are not unique.
    return ot.bregman.sinkhorn_log(*weights, -cosines, epsilon, numItermax=20_000, stopThr=1e-9)


# --- cross-moments --------------------------------------------------------------------------------


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("n", "m", "rows"),
    # The last block overlaps the one before if the number of rows per block does not divide n.
    [(50, 33, 16), (33, 50, 64), (48, 48, 16), (1, 7, 16), (7, 1, 16), (1100, 130, None)],
)
def test_cross_moment_matches_pot(n, m, rows, monkeypatch, x64):
    if rows is None:
        assert blocks.PRODUCT_ROWS < n < 2 * blocks.PRODUCT_ROWS
    else:
        monkeypatch.setattr(blocks, "PRODUCT_ROWS", rows)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(n, 6)), rng.normal(size=(m, 5))
    to_x, to_y = rng.normal(size=(6, 4)), rng.normal(size=(5, 4))
    arrays = (jnp.asarray(array) for array in (x, y, to_x, to_y))
    options = {"epsilon": 0.1, "tolerance": 1e-8, "profile": device.profile()}
    found, error = coupling.cross_moment(*arrays, **options)
    assert error <= 1e-8
    expected = x.T @ plan_of(x @ to_x, y @ to_y, 0.1) @ y
    np.testing.assert_allclose(found, expected, atol=1e-6 * np.abs(expected).max() + 1e-9)


@pytest.mark.numerics
def test_cross_moment_streams_large_kernels(x64):
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=shape)) for shape in ((300, 6), (70, 5), (6, 4), (5, 4))]
    options = {"epsilon": 0.1, "tolerance": 1e-8}
    tiny = device.Profile("test", memory=1000)
    assert blocks.storage(300, 70, jnp.float64, tiny).block_size == 128
    found, _ = coupling.cross_moment(*arrays, **options, profile=tiny)
    stored, _ = coupling.cross_moment(*arrays, **options, profile=device.profile())
    np.testing.assert_allclose(found, stored, atol=1e-9)


# --- directions and features ----------------------------------------------------------------------


def covariances(d, e, rows, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, d)) * np.linspace(1.0, 3.0, d)
    y = rng.normal(size=(rows, e)) + x[:, :1]
    return moments.of_pairs([(x - x.mean(axis=0), y - y.mean(axis=0))])


def test_moments_of_blocks_are_covariances():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 4)), rng.normal(size=(30, 3))
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    found = moments.of_pairs((x[part], y[part]) for part in (slice(13), slice(13, None)))
    expected = np.cov(np.hstack([x, y]).T)
    np.testing.assert_allclose(found.xx, expected[:4, :4], atol=1e-12)
    np.testing.assert_allclose(found.yy, expected[4:, 4:], atol=1e-12)
    np.testing.assert_allclose(found.xy, expected[:4, 4:], atol=1e-12)


def directions(covered, ridges, most):
    root_x, root_y = map(canonical.cholesky_root, covered[:2], ridges)
    left, rho, right = canonical.leading(root_x.T @ covered.xy @ root_y, most)
    return canonical.Directions(root_x @ left, root_y @ right, rho)


@pytest.mark.parametrize(("d", "e", "rows"), [(7, 5, 40), (5, 9, 40), (12, 10, 16)])
def test_leading_directions_match_inverse_roots_and_svd(d, e, rows):
    covered = covariances(d, e, rows)
    found = directions(covered, (0.3, 0.7), 4)
    root_x = inverse_root(covered.xx + 0.3 * np.eye(d))
    root_y = inverse_root(covered.yy + 0.7 * np.eye(e))
    U, rho, Vt = scipy.linalg.svd(root_x @ covered.xy @ root_y)
    np.testing.assert_allclose(found.rho, rho[:4], atol=1e-10)
    # Products of both directions, because singular vectors are unique up to a common sign.
    for k in range(4):
        ours = np.outer(found.x[:, k], found.y[:, k])
        np.testing.assert_allclose(ours, np.outer(root_x @ U[:, k], root_y @ Vt[k]), atol=1e-8)


@pytest.mark.parametrize("zero", ["x", "y", "both"])
def test_directions_are_finite_for_covariances_of_zero(zero):
    full = covariances(4, 3, 20)
    none = np.zeros((4, 3))
    xx = np.zeros((4, 4)) if zero in ("x", "both") else full.xx
    yy = np.zeros((3, 3)) if zero in ("y", "both") else full.yy
    found = directions(moments.Moments(xx, yy, none), (0.0, 0.0), 4)
    assert len(found.rho) == 0 and found.x.shape == (4, 0) and found.y.shape == (3, 0)
    for covariance in (xx, yy):
        assert np.isfinite(canonical.cholesky_root(covariance, 0.0)).all()
        assert np.isfinite(canonical.diagonal_root(np.diag(covariance), 0.0)).all()
    # Of one pool without variance, the directions of the pairs are left.
    mixed = moments.mix(full, moments.Moments(xx, yy, none), 0.9)
    some = directions(mixed, (0.1, 0.1), 4)
    assert len(some.rho) == 3 and all(np.isfinite(part).all() for part in some)


def test_cholesky_root_whitens_the_covariance_with_its_ridge():
    covered = covariances(6, 2, 30)
    for ridge in (0.0, 0.5):
        root = canonical.cholesky_root(covered.xx, ridge)
        whitened = root.T @ (covered.xx + ridge * np.eye(6)) @ root
        # Without a ridge, 1e-7 times the mean eigenvalue is added.
        np.testing.assert_allclose(whitened, np.eye(6), atol=1e-6)


def test_principal_keeps_the_leading_directions_of_pairs_and_pool():
    pairs, pool, new = (3.0 * noise(n, 9, seed=n) + 1.0 for n in (20, 50, 7))
    unit = [moments.unit(rows) for rows in (pairs, pool, new)]
    centred = np.concatenate([rows - rows.mean(axis=0) for rows in unit[:2]])
    Vt = np.linalg.svd(centred)[2]
    found = features.principal(pairs, pool, 4)
    assert features.width(found) == 9
    expected = (unit[2] - unit[0].mean(axis=0)) @ Vt[:4].T
    ours = found(new)
    np.testing.assert_allclose(ours @ ours.T, expected @ expected.T, atol=1e-10)
    whole = features.principal(pairs, pool, 9)
    np.testing.assert_allclose(whole(new), unit[2] - unit[0].mean(axis=0), atol=1e-12)
    # Rows that vary along two directions only have two coordinates.
    flat = noise(20, 2) @ noise(2, 9, seed=1)
    flat = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    assert features.principal(flat.astype(np.float64), flat[:5], 4).basis.shape[1] <= 2


def test_gaussian_features_reproduce_the_centred_kernel():
    pairs, landmarks = noise(30, 6), noise(12, 6, seed=1)
    found = features.gaussian("x", pairs, landmarks, 0.7)
    mean = moments.unit(pairs).mean(axis=0)
    z, marks = (moments.unit(moments.unit(rows) - mean) for rows in (pairs, landmarks))
    kernel, cross = (
        np.exp(-0.7 * np.square(rows[:, None] - marks).sum(axis=-1)) for rows in (marks, z)
    )
    H = np.eye(12) - 1.0 / 12
    values, vectors = np.linalg.eigh(H @ kernel @ H)
    kept = np.flatnonzero(values > 1e-7 * values.max())
    expected = (cross - cross.mean(axis=0)) @ vectors[:, kept] / np.sqrt(values[kept])
    ours = found(pairs)
    assert ours.shape == expected.shape
    np.testing.assert_allclose(ours @ ours.T, expected @ expected.T, atol=1e-8)
    np.testing.assert_allclose(ours.mean(axis=0), 0.0, atol=1e-10)  # centred on the pairs


# --- one round ------------------------------------------------------------------------------------


def transcription(pairs, pools, new, options, step):
    """Computes cosines of new rows after one round with textbook formulas and POT's plan."""
    n, z, pooled, fresh = len(pairs[0]), [], [], []
    for rows, pool, some in zip(pairs, pools, new, strict=True):
        mean = moments.unit(rows).mean(axis=0)
        z.append(moments.unit(rows) - mean)
        batch = moments.unit(pool)
        pooled.append(batch - batch.mean(axis=0))
        fresh.append(moments.unit(some) - mean)
    ridges = options.ridge_x, options.ridge_y

    def fit(S_x, S_y, S_xy, ridges, power):
        roots = [
            inverse_root(S + ridge * np.trace(S) / len(S) * np.eye(len(S)))
            for S, ridge in ((S_x, ridges[0]), (S_y, ridges[1]))
        ]
        U, rho, Vt = np.linalg.svd(roots[0] @ S_xy @ roots[1], full_matrices=False)
        return roots[0] @ U * rho**power, roots[1] @ Vt.T * rho**power

    S = z[0].T @ z[0] / (n - 1), z[1].T @ z[1] / (n - 1), z[0].T @ z[1] / (n - 1)
    W_x, W_y = fit(*S, ridges, options.power)
    P = plan_of(pooled[0] @ W_x, pooled[1] @ W_y, refine.EPSILON)
    T = [rows.T @ rows / len(rows) for rows in pooled] + [pooled[0].T @ P @ pooled[1]]
    rows = min(len(pool) for pool in pools)
    worth = step.worth * rows / (1000.0 + rows)
    tau = worth / (worth + n)
    mixed = [(1.0 - tau) * s + tau * t for s, t in zip(S, T, strict=True)]
    share = step.factor * n / (n + worth)
    W_x, W_y = fit(*mixed, (ridges[0] * share, ridges[1] * share), options.power)
    return moments.unit(fresh[0] @ W_x) @ moments.unit(fresh[1] @ W_y).T


@pytest.mark.numerics
@pytest.mark.parametrize("step", [refine.Step(1000.0, 1.0), refine.Step(300.0, 0.3)])
def test_refine_by_one_round_matches_textbook_formulas(step, monkeypatch):
    # A plan of the usual marginal error of 1e-2 is one of many.
    monkeypatch.setattr(refine, "TOLERANCE", 1e-5)
    pairs = views(30)
    pools = views(90, seed=1)[0], views(70, seed=2)[1]
    new = views(9, seed=3)
    made = sides(pairs, pools)
    found, error = refine.refine(*made, OPTIONS, [step])
    assert error <= 1e-5
    x, y = (side.features(rows) for side, rows in zip(made, new, strict=True))
    cosines = moments.unit(x @ found.x) @ moments.unit(y @ found.y).T
    expected = transcription(pairs, pools, new, OPTIONS, step)
    # The plan is computed in float32, and epsilon = 0.03 divides the errors of its cosines.
    np.testing.assert_allclose(cosines, expected, atol=3e-4)


def test_refine_without_steps_is_the_cca_of_the_pairs():
    pairs, pools, new = views(30), views(40, seed=1), views(9, seed=3)
    made = sides(pairs, pools)
    found, _ = refine.refine(*made, OPTIONS, [])
    x, y = (side.features(rows) for side, rows in zip(made, new, strict=True))
    options = {"ridge": (OPTIONS.ridge_x, OPTIONS.ridge_y), "power": OPTIONS.power}
    teacher = teachers.tuned_cca(*pairs, **options)
    np.testing.assert_allclose(
        moments.unit(x @ found.x) @ moments.unit(y @ found.y).T,
        teacher.x(new[0]) @ teacher.y(new[1]).T,
        atol=1e-4,
    )


# --- the choice of the rounds ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def informative():
    """Returns 150 pairs, two pools of other samples, and the refinement of the teacher."""
    pairs = views(150, noise=3.0, seed=12)
    pools = views(500, noise=3.0, seed=1)[0], views(450, noise=3.0, seed=2)[1]
    return pairs, pools, teachers.refine(*pairs, *pools)


def test_refine_gains_with_informative_pools(informative):
    *_, found = informative
    assert found.rounds >= 1 and len(found.scores) == found.rounds + 1
    assert found.scores[-1] > found.scores[0]
    assert recall(found.teacher) >= recall(found.first) + 0.01


def test_refine_makes_no_round_with_pools_of_noise():
    for seed in range(10, 16):
        pairs, pools = views(60, seed=seed), (noise(500, 24), noise(450, 20, seed=6))
        found = teachers.refine(*pairs, *pools)
        assert found.rounds == 0, seed
        assert found.teacher is found.first and len(found.scores) == 1


def test_choose_steps_is_deterministic_and_independent_of_pair_order():
    pools = views(200, seed=1)[0], views(150, seed=2)[1]
    A, B = views(40, seed=10)
    turned = np.random.default_rng(1).permutation(40)
    found = []
    for rows in (slice(None), slice(None), turned):
        pairs = A[rows], B[rows]
        splits = refine.folds(*pairs)
        found.append(refine.choose_steps(*sides(pairs, pools), OPTIONS, splits))
    assert found[0].steps == found[1].steps == found[2].steps
    assert found[0].scores == found[1].scores
    np.testing.assert_allclose(found[0].scores, found[2].scores, atol=1e-6)


def test_folds_of_refine_fit_on_four_fifths_and_separate_shared_rows():
    x, y = np.repeat(noise(20, 6), 2, axis=0), noise(40, 5)
    splits = refine.folds(x, y)
    assert len(splits) == 5
    for fold in splits:
        assert len(fold.fit) == 32
        assert not set(fold.fit // 2) & set(fold.held // 2)


# --- degenerate inputs ----------------------------------------------------------------------------


def assert_finite(found, x, y):
    for teacher in (found.teacher, found.first):
        for rows in (teacher.x(x), teacher.y(y)):
            assert np.isfinite(np.asarray(rows)).all()
    assert np.isfinite(found.scores).all()


WIDTHS = {"widths": (7, 5)}
PAIRS = views(12, **WIDTHS)
POOLS = views(40, seed=1, **WIDTHS)


A, B, X, Y = *PAIRS, *POOLS
DEGENERATE = {
    "rank-deficient pairs": (noise(12, 2) @ noise(2, 7, seed=1), B, X, Y),
    "duplicated pairs": (np.tile(A[:4], (3, 1)), np.tile(B[:4], (3, 1)), X, Y),
    "one pair of another direction": (np.where(np.eye(12)[:, :1], A, A[5]), B, X, Y),
    "3 pairs": (A[:3], B[:3], X, Y),
    "6 pairs": (A[:6], B[:6], X, Y),
    "one row in both pools": (A, B, X[:1], Y[:1]),
    "one row in a pool": (A, B, X, Y[:1]),
    "the pairs as pools": (A, B, A, B),
    "constant pool": (A, B, np.tile(X[:1], (40, 1)), Y),
    "constant pools": (A, B, np.tile(X[:1], (40, 1)), np.tile(Y[:1], (9, 1))),
    "opposite rows": (A, B, np.concatenate([X, -X]), Y),
    "tiny and huge rows": (1e-25 * A, 1e25 * B, 1e-25 * X, 1e25 * Y),
    "rows of many scales": (A, B, X * 10.0 ** np.arange(-20, 20)[:, None], Y),
    "float16": tuple(rows.astype(np.float16) for rows in (A, B, X, Y)),
    "one feature": (A[:, :1], B[:, :1], X[:, :1], Y[:, :1]),
}


@pytest.mark.parametrize("case", DEGENERATE)
def test_refine_is_finite_for_degenerate_inputs(case):
    given = DEGENERATE[case]
    found = teachers.refine(*given)
    assert_finite(found, given[2], given[3])
    assert (found.scores == ()) == (case == "3 pairs")


def test_refine_is_scale_invariant():
    plain = teachers.refine(*PAIRS, *POOLS)
    scaled = teachers.refine(*(np.float32(1e-20) * rows for rows in (*PAIRS, *POOLS)))
    x, y = views(9, seed=3, **WIDTHS)
    np.testing.assert_allclose(
        scaled.teacher.x(x) @ scaled.teacher.y(y).T,
        plain.teacher.x(x) @ plain.teacher.y(y).T,
        atol=1e-3,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda A, B, X, Y: (A, B, X[:0], Y), r"^x .*rows.* 0"),
        (lambda A, B, X, Y: (A, B, X, Y[:, 1:]), r"^y .*width 5.* 4"),
        (lambda A, B, X, Y: (A, B, np.where(np.eye(40, 7), 0.0, X) * 0.0, Y), r"^x .*rows 0\b"),
        (lambda A, B, X, Y: (A, B, X, np.where(Y > 1, np.nan, Y)), r"^y .*NaN"),
        (lambda A, B, X, Y: (A, np.tile(B[:1], (12, 1)), X, Y), r"^pairs_y\b"),
        (lambda A, B, X, Y: (A[:1], B[:1], X, Y), r"^pairs_x\b"),
    ],
)
def test_refine_rejects_bad_rows_in_one_line(change, message):
    with pytest.raises(checks.InputError, match=message) as caught:
        teachers.refine(*change(*PAIRS, *POOLS))
    assert "\n" not in str(caught.value)


def test_refine_accepts_lists_and_jax_arrays():
    plain = teachers.refine(*PAIRS, *POOLS)
    listed = teachers.refine(*PAIRS, POOLS[0].tolist(), jnp.asarray(POOLS[1]))
    assert listed.scores == pytest.approx(plain.scores, abs=1e-6)


# --- large pools ----------------------------------------------------------------------------------


def test_refine_reads_mapped_rows_in_batches_only(monkeypatch, tmp_path):
    x, y = views(400, seed=1, **WIDTHS)
    np.save(tmp_path / "x.npy", x)
    largest = []

    class Watched(files.MappedRows):
        """Records the number of rows of every read."""

        def __getitem__(self, index):
            rows = super().__getitem__(index)
            largest.append(len(rows))
            return rows

    mapped = Watched(np.load(tmp_path / "x.npy", mmap_mode="r"), np.arange(400))
    monkeypatch.setattr(refine, "POOL_ROWS", 90)
    monkeypatch.setattr(refine, "_CHOICE_ROWS", 60)
    monkeypatch.setattr(checks, "CHUNK_ROWS", 64)
    found = teachers.refine(*PAIRS, mapped, y)
    assert_finite(found, x, y)
    assert largest and max(largest) <= 90
    assert teachers.refine(*PAIRS, x, y).scores == found.scores


# --- kernels --------------------------------------------------------------------------------------


def circles(n, seed=0):
    angle = np.random.default_rng(seed).uniform(0, 2 * np.pi, size=(n, 1))
    rows = np.random.default_rng(seed + 1).normal(size=(n, 4)) * 0.3
    circle = np.hstack([np.cos(angle), np.sin(angle)])
    double = np.hstack([np.cos(2 * angle), np.sin(2 * angle)])
    return circle + rows[:, :2], double + rows[:, 2:]


def test_refine_returns_the_kernel_teacher_of_the_pairs_beside_the_linear_one():
    pairs, pools = circles(80), (circles(100, seed=4)[0], circles(90, seed=8)[1])
    found = teachers.refine(*pairs, *pools, dim=2)
    assert found.first.is_kernel and found.first.dim == 2
    assert found.teacher is found.first or not found.teacher.is_kernel
    assert_finite(found, *pools)


# --- recipes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x", "y"])
def test_fit_teacher_refines_with_the_pairs_in_place_of_a_missing_pool(name):
    pools = dict(zip("xy", POOLS, strict=True))
    dataset = data.dataset(tuple(PAIRS), **{name: pools[name]})
    found = recipe.fit_teacher(recipe.default(dataset), dataset)
    both = dict(zip("xy", PAIRS, strict=True)) | {name: pools[name]}
    expected = teachers.refine(*PAIRS, both["x"], both["y"])
    assert isinstance(found, teachers.Refined) and found.scores == expected.scores
    jax.tree.map(np.testing.assert_array_equal, found.teacher, expected.teacher)


def test_fit_teacher_without_pools_is_the_teacher_of_the_pairs():
    dataset = data.dataset(tuple(PAIRS))
    chosen = recipe.default(dataset, method="sail", teacher="refined_cca")
    found, expected = recipe.fit_teacher(chosen, dataset), teachers.best_cca(*PAIRS)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_refined_cca_returns_the_teacher_of_refine():
    expected = teachers.refine(*PAIRS, *POOLS, seed=1).teacher
    jax.tree.map(
        np.testing.assert_array_equal, teachers.refined_cca(*PAIRS, *POOLS, seed=1), expected
    )
