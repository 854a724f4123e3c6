"""Tests of CSA against scikit-learn and the published formula."""

import jax
import numpy as np
import pytest
import scipy.linalg
from flax import nnx
from sklearn.cross_decomposition import CCA

from sotalign_jax import Aligner, align, checks, data, evaluation, methods
from sotalign_jax.methods.csa import CSAHead
from sotalign_jax.teachers import canonical_correlations


def views(n, d_x, d_y, *, seed=0, latent=4, noise=0.5):
    """Returns two noisy, uncentred views of latent variables of unequal variance."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, latent)) * np.linspace(2.0, 1.0, latent)
    sides = []
    for d in (d_x, d_y):
        mixing = rng.normal(size=(latent, d))
        sides.append(z @ mixing + noise * rng.normal(size=(n, d)) + 3.0 * rng.normal(size=d))
    return [side.astype(np.float32) for side in sides]


def textbook(A, B, ridge=0.0):
    """Solves CCA as a generalised eigenproblem. Returns directions and correlations."""
    a, b = (t.astype(np.float64) - t.astype(np.float64).mean(axis=0) for t in (A, B))
    s_xx, s_yy, s_xy = a.T @ a / len(a), b.T @ b / len(b), a.T @ b / len(a)
    s_xx = s_xx + ridge * np.trace(s_xx) / len(s_xx) * np.eye(len(s_xx))
    s_yy = s_yy + ridge * np.trace(s_yy) / len(s_yy) * np.eye(len(s_yy))
    squares, w_x = scipy.linalg.eigh(s_xy @ np.linalg.solve(s_yy, s_xy.T), s_xx)
    order = np.argsort(-squares)[: min(s_xy.shape)]
    rho, w_x = np.sqrt(np.maximum(squares[order], 0.0)), w_x[:, order]
    return w_x, np.linalg.solve(s_yy, s_xy.T @ w_x) / rho, rho


def csa(A, B, **options):
    return methods.CSA(**options).fit(data.dataset((A, B)), seed=0)


def mean_r1(fitted, test):
    return evaluation.evaluate(fitted.x, fitted.y, test)["mean/R@1"]


# --- canonical correlation analysis --------------------------------------------------------------


def test_canonical_correlations_match_scikit_learn():
    A, B = views(400, 6, 5)
    found = canonical_correlations(A, B)
    theirs = CCA(n_components=4, scale=False, max_iter=5000, tol=1e-12).fit(A, B)
    variates = theirs.transform(A, B)
    for k in range(4):
        expected = np.corrcoef(variates[0][:, k], variates[1][:, k])[0, 1]
        np.testing.assert_allclose(found.correlations[k], expected, atol=1e-5)
        ours = (A - found.mean_x) @ found.weights_x[:, k]
        assert abs(np.corrcoef(ours, variates[0][:, k])[0, 1]) > 1 - 1e-5
        ours = (B - found.mean_y) @ found.weights_y[:, k]
        assert abs(np.corrcoef(ours, variates[1][:, k])[0, 1]) > 1 - 1e-5


@pytest.mark.parametrize("ridge", [0.0, 0.3])
@pytest.mark.parametrize(("n", "d_x", "d_y"), [(60, 8, 5), (60, 5, 8), (20, 6, 6)])
def test_canonical_correlations_solve_the_generalised_eigenproblem(n, d_x, d_y, ridge):
    A, B = views(n, d_x, d_y)
    w_x, w_y, rho = textbook(A, B, ridge)
    found = canonical_correlations(A, B, ridge=ridge)
    np.testing.assert_allclose(found.correlations, rho, atol=1e-9)
    # Compares products, because directions are unique only up to a common sign.
    np.testing.assert_allclose(
        found.weights_x * rho @ found.weights_y.T, w_x * rho @ w_y.T, atol=1e-8
    )
    z_x, z_y = (A - found.mean_x) @ found.weights_x, (B - found.mean_y) @ found.weights_y
    np.testing.assert_allclose(np.mean(z_x * z_y, axis=0), rho, atol=1e-6)


def test_canonical_correlations_are_scale_invariant():
    A, B = views(50, 6, 5)
    found, scaled = (
        canonical_correlations(A, B, ridge=0.1),
        canonical_correlations(1e-3 * A + 7, 5e4 * B, ridge=0.1),
    )
    np.testing.assert_allclose(scaled.correlations, found.correlations, atol=1e-4)


def test_canonical_correlations_of_few_pairs_are_one_without_ridge():
    A, B = views(15, 20, 30)
    found = canonical_correlations(A, B)
    np.testing.assert_allclose(found.correlations, np.ones(14), atol=1e-9)
    z = (A - found.mean_x) @ found.weights_x
    np.testing.assert_allclose(z.T @ z / 15, np.eye(14), atol=1e-6)
    assert canonical_correlations(A, B, ridge=0.5).correlations[0] < 0.99


@pytest.mark.parametrize(
    ("A", "B", "options", "message"),
    [
        (np.ones((5, 2)), np.eye(5), {}, r"pairs_x\b"),
        (np.eye(5), np.eye(4), {}, r"pairs_y:? has 4 rows"),
        (np.eye(1), np.eye(1), {}, r"pairs_x .*rows.* 1"),
        (np.eye(3), np.eye(3), {"ridge": -1.0}, r"ridge.* -1.0"),
    ],
)
def test_canonical_correlations_reject_bad_pairs(A, B, options, message):
    with pytest.raises(checks.InputError, match=message):
        canonical_correlations(A, B, **options)


# --- CSA -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "ridge"), [(2, 0.0), (5, 0.0), (200, 0.0), (3, 0.2)])
def test_csa_similarity_is_the_published_formula(dim, ridge):
    A, B = views(80, 8, 5)
    X, Y = views(30, 8, 5, seed=1)
    w_x, w_y, rho = (part[..., :dim] for part in textbook(A, B, ridge))
    z_x, z_y = (X - A.mean(axis=0)) @ w_x, (Y - B.mean(axis=0)) @ w_y
    z_x /= np.linalg.norm(z_x, axis=1, keepdims=True)
    z_y /= np.linalg.norm(z_y, axis=1, keepdims=True)
    fitted = csa(A, B, dim=dim, ridge=ridge)
    f, g = evaluation.embed(fitted.x, X), evaluation.embed(fitted.y, Y)
    np.testing.assert_allclose(f @ g.T, (z_x * rho) @ z_y.T, atol=2e-5)
    np.testing.assert_allclose(np.linalg.norm(fitted.x(X), axis=1), 1.0, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(fitted.y(Y), axis=1), 1.0, atol=1e-6)


def test_csa_head_clips_correlations_and_accepts_float16():
    rho = np.array([1.0 + 1e-9, 0.5, -1e-9])
    head = CSAHead.fitted(np.ones(3), 1e30 * np.eye(3), rho, "y")
    assert float(head.rho[...].min()) == 0.0 and float(head.rho[...].max()) == 1.0
    rows = views(6, 3, 3)[0].astype(np.float16)
    assert np.isfinite(head(rows)).all() and head(rows).dtype == np.float32
    np.testing.assert_array_equal(head(rows)[:, 3], 0.0)  # this coordinate belongs to the x side
    with pytest.raises(checks.InputError, match=r"side.* 'z'"):
        CSAHead(3, 5, side="z", rngs=nnx.Rngs(0))


def test_csa_retrieves_with_many_pairs_and_is_chance_with_few():
    X, Y = views(400, 40, 40, latent=12, noise=0.2)
    test = data.gallery(X[200:], Y[200:])
    chance = 100 / 200
    assert mean_r1(csa(X[:200], Y[:200], dim=12), test) > 90
    few = X[:40], Y[:40]  # rank 39 after centring, below 40 features
    assert mean_r1(csa(*few, dim=12), test) < 5 * chance
    assert mean_r1(csa(*few, dim=12, ridge=0.1), test) > 50


def test_csa_ignores_pools_and_survives_save_and_load(tmp_path):
    A, B = views(120, 8, 5)
    X, Y = views(100, 8, 5, seed=1)
    alone = align((A, B), method=methods.CSA(dim=4), progress=False)
    pooled = align((A, B), X, Y, method=methods.CSA(dim=4), seed=7, progress=False)
    same = alone.similarity(X, Y, calibrated=False), pooled.similarity(X, Y, calibrated=False)
    np.testing.assert_array_equal(*same)
    assert not methods.CSA().pools
    assert alone.info["data"]["pairs_x"] == [
        120,
        8,
    ]  # CSA selects nothing, so no pairs are held out
    alone.save(tmp_path / "saved")
    loaded = Aligner.load(tmp_path / "saved")
    np.testing.assert_array_equal(loaded.similarity(X, Y), alone.similarity(X, Y))
    assert loaded.info["options"] == {"dim": 4, "ridge": 0.0}
    assert nnx.graphdef(loaded.heads) == nnx.graphdef(alone.heads)
    assert len(jax.tree.leaves(nnx.state(loaded.heads))) == 8  # three per side, plus scale and bias


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0}, r"dim.* 0"),
        ({"ridge": -0.1}, r"ridge.* -0.1"),
        ({"ridge": float("nan")}, r"ridge.* nan"),
    ],
)
def test_csa_rejects_bad_options(options, message):
    with pytest.raises(checks.InputError, match=message):
        methods.CSA(**options)
