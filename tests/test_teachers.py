"""Tests of the teachers against dense formulas and scikit-learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.cross_decomposition import CCA

from sotalign_jax import checks, heads, kernels, teachers, training


def pairs(n, d_x, d_y, *, seed=0, latent=4, noise=0.5):
    """Returns two noisy, uncentred views of latent variables of unequal variance."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, latent)) * np.linspace(2.0, 1.0, latent)
    views = []
    for d in (d_x, d_y):
        mixing = rng.normal(size=(latent, d))
        views.append(z @ mixing + noise * rng.normal(size=(n, d)) + rng.normal(size=d))
    return [v.astype(np.float32) for v in views]


def skewed(n, seed=0):
    """Returns two views of shared variables with noise of larger variance, as in speech."""
    rng, mix = np.random.default_rng(seed), np.random.default_rng(99)
    z, views = rng.normal(size=(n, 10)), []
    for d in (40, 30):
        noise = rng.normal(size=(n, 5)) @ mix.normal(size=(5, d))
        views.append(z @ mix.normal(size=(10, d)) + 10 * noise + 0.3 * rng.normal(size=(n, d)))
    return views


def preprocessed(x):
    x = x.astype(np.float64)
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    return x - x.mean(axis=0)


def inverse_root(s):
    values, vectors = np.linalg.eigh(s)
    return (vectors / np.sqrt(values)) @ vectors.T


def dense_cca(A, B, ridge, dim, scale):
    """Computes the weights of both maps with textbook formulas on full d x d matrices."""
    a, b = preprocessed(A), preprocessed(B)
    R_x = inverse_root(a.T @ a / scale + ridge * np.eye(a.shape[1]))
    R_y = inverse_root(b.T @ b / scale + ridge * np.eye(b.shape[1]))
    U, _, Vt = np.linalg.svd(R_x @ (a.T @ b / scale) @ R_y)
    return U[:, :dim].T @ R_x, Vt[:dim] @ R_y


def cosines(x, y):
    x, y = (r / np.linalg.norm(r, axis=1, keepdims=True) for r in (x, y))
    return x @ y.T


@pytest.mark.parametrize(("n", "d_x", "d_y"), [(60, 8, 5), (12, 20, 30), (12, 20, 5), (9, 9, 9)])
@pytest.mark.parametrize("cov_normalize", [True, False])
def test_cca_matches_dense_formulas_for_few_and_many_pairs(n, d_x, d_y, cov_normalize):
    A, B = pairs(n, d_x, d_y)
    teacher = teachers.cca(A, B, dim=4, cov_normalize=cov_normalize)
    W_x, W_y = dense_cca(A, B, 0.1, 4, n - 1 if cov_normalize else 1)
    # Compares products, because singular vectors are unique only up to a common sign.
    np.testing.assert_allclose(
        np.asarray(teacher.map_x.weight).T @ teacher.map_y.weight, W_x.T @ W_y, atol=1e-4
    )
    np.testing.assert_allclose(
        teacher.x(A) @ teacher.y(B).T,
        cosines(preprocessed(A) @ W_x.T, preprocessed(B) @ W_y.T),
        atol=1e-4,
    )


@pytest.mark.parametrize("n", [60, 12])
def test_cca_and_tuned_cca_match_float64_transcription(x64, n):
    A, B = pairs(n, 20, 15)
    new = [rows.astype(np.float64) for rows in pairs(7, 20, 15, seed=9)]
    a, b = preprocessed(A), preprocessed(B)
    q = [
        r / np.linalg.norm(r, axis=1, keepdims=True)
        - (p / np.linalg.norm(p, axis=1)[:, None]).mean(0)
        for r, p in zip(new, (A.astype(np.float64), B.astype(np.float64)), strict=True)
    ]
    S_x, S_y, S_xy = a.T @ a / (n - 1), b.T @ b / (n - 1), a.T @ b / (n - 1)
    relative = 0.3 * np.trace(S_x) / 20, 0.7 * np.trace(S_y) / 15
    for ridges, teacher in (
        ((0.1, 0.1), teachers.cca(A, B, power=1.5, dim=5, dtype=jnp.float64)),
        (relative, teachers.tuned_cca(A, B, ridge=(0.3, 0.7), power=1.5, dim=5, dtype=jnp.float64)),
    ):
        R_x, R_y = (
            inverse_root(S_x + ridges[0] * np.eye(20)),
            inverse_root(S_y + ridges[1] * np.eye(15)),
        )
        U, rho, Vt = np.linalg.svd(R_x @ S_xy @ R_y)
        weight = rho[:5] ** 1.5
        expected = cosines(q[0] @ R_x @ U[:, :5] * weight, q[1] @ R_y @ Vt[:5].T * weight)
        np.testing.assert_allclose(teacher.x(new[0]) @ teacher.y(new[1]).T, expected, atol=1e-8)


@pytest.mark.parametrize("fit", [teachers.tuned_cca, teachers.kernel_cca, teachers.best_cca])
@pytest.mark.parametrize("n", [2, 5, 6, 30])
def test_tuned_teachers_are_independent_of_pair_order(fit, n):
    A, B = pairs(n, 8, 5)
    turned = np.random.default_rng(1).permutation(n)
    first, second = fit(A, B), fit(A[turned], B[turned])
    np.testing.assert_allclose(first.x(A) @ first.y(B).T, second.x(A) @ second.y(B).T, atol=1e-3)


@pytest.mark.parametrize("fit", [teachers.cca, teachers.tuned_cca, teachers.best_cca])
def test_linear_teachers_are_scale_invariant(fit):
    A, B = pairs(40, 8, 5)
    plain, tiny = fit(A, B), fit(1e-25 * A, B)
    np.testing.assert_allclose(tiny.x(1e-25 * A), plain.x(A), atol=1e-4)


def test_tuned_cca_retrieves_better_than_the_papers_ridge():
    (A, B), (new_a, new_b) = skewed(300), skewed(300, seed=1)

    def right(teacher):
        return float(np.mean(np.argmax(teacher.x(new_a) @ teacher.y(new_b).T, 1) == np.arange(300)))

    assert right(teachers.tuned_cca(A, B)) > right(teachers.cca(A, B)) + 0.2


def test_best_cca_is_linear_unless_the_kernel_is_better():
    A, B = pairs(80, 8, 5)
    assert isinstance(teachers.best_cca(A, B).map_x, heads.AffineMap)
    angle = np.random.default_rng(0).uniform(0, 2 * np.pi, size=(120, 1))
    A = np.hstack([np.cos(angle), np.sin(angle)])
    B = np.hstack([np.cos(2 * angle), np.sin(2 * angle)])
    assert isinstance(teachers.best_cca(A, B).map_x, kernels.KernelMap)


def test_cca_centres_new_rows_with_the_stored_means():
    A, B = pairs(60, 8, 5)
    new, _ = pairs(7, 8, 5, seed=9)
    teacher = teachers.cca(A, B)
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (A, new)]
    projected = (unit[1] - unit[0].mean(axis=0)) @ np.asarray(teacher.map_x.weight).T
    projected /= np.linalg.norm(projected, axis=1, keepdims=True)
    np.testing.assert_allclose(teacher.x(new), projected, atol=1e-4)


def test_cca_matches_scikit_learn():
    A, B = pairs(400, 6, 5, latent=3)
    a, b = preprocessed(A), preprocessed(B)
    theirs = CCA(n_components=3, scale=False, max_iter=5000, tol=1e-12).fit(a, b)
    variates = theirs.transform(a, b)
    expected = [np.corrcoef(variates[0][:, k], variates[1][:, k])[0, 1] for k in range(3)]
    teacher = teachers.cca(A, B, ridge=0.0, dim=3)
    np.testing.assert_allclose(teacher.correlations, expected, atol=1e-4)
    for affine, rows, variate in ((teacher.map_x, A, variates[0]), (teacher.map_y, B, variates[1])):
        ours = np.asarray(affine(rows))
        same = [abs(np.corrcoef(ours[:, k], variate[:, k])[0, 1]) for k in range(3)]
        np.testing.assert_allclose(same, 1.0, atol=1e-4)


def test_cca_without_ridge_whitens():
    A, B = pairs(500, 6, 5)
    teacher = teachers.cca(A, B, ridge=1e-9)
    for affine, rows in ((teacher.map_x, A), (teacher.map_y, B)):
        covariance = np.cov(np.asarray(affine(rows)), rowvar=False)
        np.testing.assert_allclose(covariance, np.eye(5), atol=1e-3)


def test_cca_with_default_ridge_is_close_to_procrustes():
    A, B = pairs(400, 64, 48, latent=24, noise=1.0)
    reference = teachers.procrustes(A, B)

    def agreement(teacher):
        k = [np.ravel(t.x(A) @ t.y(B).T) for t in (teacher, reference)]
        return np.corrcoef(*k)[0, 1]

    assert agreement(teachers.cca(A, B)) > 0.97
    assert agreement(teachers.cca(A, B, cov_normalize=False)) < 0.9


@pytest.mark.parametrize("n", [60, 7])
def test_procrustes_value_is_the_sum_of_singular_values(n):
    A, B = pairs(n, 8, 9)
    teacher = teachers.procrustes(A, B, dim=3)
    P, Q = np.asarray(teacher.map_x.weight), np.asarray(teacher.map_y.weight)
    for frame in (P, Q):
        np.testing.assert_allclose(frame @ frame.T, np.eye(3), atol=1e-5)
    a, b = preprocessed(A), preprocessed(B)
    value = np.sum((a @ P.T) * (b @ Q.T))
    singular = np.linalg.svd(a.T @ b, compute_uv=False)
    assert value == pytest.approx(singular[:3].sum(), rel=1e-5)
    rng = np.random.default_rng(0)
    for _ in range(20):
        frames = [np.linalg.qr(rng.normal(size=(d, 3)))[0] for d in (8, 9)]
        assert np.sum((a @ frames[0]) * (b @ frames[1])) < value


@pytest.mark.parametrize("fit", [teachers.procrustes, teachers.cca])
def test_teacher_dim_is_at_most_the_numerical_rank(fit):
    A, B = pairs(6, 10, 12)
    assert fit(A, B).dim == 5  # centring removes one direction
    A, B = pairs(50, 10, 12, latent=3, noise=0.0)
    A, B = A - A.mean(0), B - B.mean(0)
    assert fit(A[:, [0, 1, 1]], B).dim == 2


@pytest.mark.parametrize("fit", [teachers.procrustes, teachers.cca])
def test_renorm_fits_on_unit_rows(fit):
    A, B = pairs(60, 8, 5)
    a = preprocessed(A)
    teacher = fit(A, B, renorm=True, dim=4)
    rows_a = a / np.linalg.norm(a, axis=1, keepdims=True)
    b = preprocessed(B)
    rows_b = b / np.linalg.norm(b, axis=1, keepdims=True)
    roots = [np.eye(8), np.eye(5)]
    if fit is teachers.cca:
        roots = [inverse_root(r.T @ r / 59 + 0.1 * np.eye(r.shape[1])) for r in (rows_a, rows_b)]
    U, _, Vt = np.linalg.svd(roots[0] @ rows_a.T @ rows_b @ roots[1])
    np.testing.assert_allclose(
        np.asarray(teacher.map_x.weight).T @ teacher.map_y.weight,
        roots[0] @ U[:, :4] @ Vt[:4] @ roots[1],
        atol=1e-4,
    )


def test_teacher_is_a_float32_pytree_of_unit_rows():
    A, B = pairs(30, 8, 5)
    teacher = teachers.cca(A.astype(np.float16), B.astype(np.float64))
    leaves = jax.tree.leaves(teacher)
    assert len(leaves) == 5
    assert all(isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32 for leaf in leaves)
    x, y = jax.jit(lambda t, a, b: (t.x(a), t.y(b)))(teacher, A, B)
    np.testing.assert_allclose(jnp.linalg.norm(x, axis=1), 1.0, atol=1e-5)
    np.testing.assert_allclose(jnp.linalg.norm(y, axis=1), 1.0, atol=1e-5)


@pytest.mark.parametrize("fit", training.TEACHERS.values())
def test_teachers_reject_bad_pairs(fit):
    A, B = pairs(20, 8, 5)
    with pytest.raises(checks.InputError, match=r"pairs_y:? has 18 rows"):
        fit(A, B[:18])
    with pytest.raises(checks.InputError, match=r"pairs_. .*rows.* 1"):
        fit(A[:1], B[:1])
    for bad in (np.nan, 0.0):
        broken = A.copy()
        broken[3] = bad
        with pytest.raises(checks.InputError, match=r"pairs_x .*row 3\b"):
            fit(broken, B)


def test_cca_accepts_lists_of_rows():
    A, B = pairs(20, 8, 5)
    listed, plain = teachers.cca(A.tolist(), B.tolist()), teachers.cca(A, B)
    np.testing.assert_allclose(listed.x(A), plain.x(A), atol=1e-5)
    with pytest.raises(checks.InputError, match="pairs_y "):
        teachers.cca(A, [[1.0], [2.0, 3.0]])


@pytest.mark.parametrize("fit", [teachers.procrustes, teachers.cca])
def test_linear_teachers_reject_bad_dim_and_equal_rows(fit):
    A, B = pairs(20, 8, 5)
    with pytest.raises(checks.InputError, match=r"dim.* 6"):
        fit(A, B, dim=6)
    with pytest.raises(checks.InputError, match=r"dim.* 0"):
        fit(A, B, dim=0)
    for renorm in (False, True):
        with pytest.raises(checks.InputError, match=r"pairs_y\b"):
            fit(A, np.outer(np.arange(1, 21), B[0]).astype(np.float32), renorm=renorm)


def test_cca_and_contrastive_reject_options_out_of_range():
    A, B = pairs(20, 8, 5)
    with pytest.raises(checks.InputError, match=r"ridge.* -1"):
        teachers.cca(A, B, ridge=-1.0)
    with pytest.raises(checks.InputError, match=r"loss.* 'mse'"):
        training.contrastive(A, B, loss="mse")
    with pytest.raises(checks.InputError, match=r"steps.* 0"):
        training.contrastive(A, B, steps=0)
