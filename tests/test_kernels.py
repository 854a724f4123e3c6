"""Tests of Gaussian kernel maps and kernel CCA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sotalign_jax import checks, teachers
from sotalign_jax.cca import choose, features

OPTIONS = choose.Options(ridge_x=0.02, ridge_y=0.05, power=0.5, gamma_x=1.0, gamma_y=2.0)


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def centred(rows, fitted):
    """Returns l2(l2(x) - mean) with the mean of the fitted rows."""
    return unit(unit(rows) - unit(fitted).mean(axis=0))


def pairs(n, *, d_x=6, d_y=5, seed=0):
    """Returns two views of shared variables that are related nonlinearly."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, 3))
    mix = np.random.default_rng(99).normal(size=(3, d_x + d_y))
    x, y = z @ mix[:, :d_x], np.tanh(z) @ mix[:, d_x:]
    noise = rng.normal(size=(n, d_x + d_y)) * 0.1 + 0.5
    return x + noise[:, :d_x], y + noise[:, d_x:]


def fit(A, B, options=OPTIONS, *, dtype=jnp.float64, **sizes):
    """Fits a kernel CCA with given options, so that nothing is chosen."""
    given = {"gamma_x": options.gamma_x, "gamma_y": options.gamma_y, "power": options.power}
    ridge = options.ridge_x, options.ridge_y
    return teachers.kernel_cca(A, B, ridge=ridge, **given, **sizes, dtype=dtype)


def inverse_root(matrix):
    values, vectors = np.linalg.eigh(matrix)
    return (vectors / np.sqrt(values)) @ vectors.T


def transcription(A, B, new_a, new_b, landmarks, options):
    """Computes cosines of new rows with textbook kernel CCA and full square roots."""
    sides = []
    for rows, new, gamma in ((A, new_a, options.gamma_x), (B, new_b, options.gamma_y)):
        z, q = centred(rows, rows), centred(new, rows)
        marks = z[landmarks]
        kernel = [np.exp(-gamma * np.square(r[:, None] - marks).sum(-1)) for r in (marks, z, q)]
        m = len(marks)
        H = np.eye(m) - 1 / m
        values, vectors = np.linalg.eigh(H @ kernel[0] @ H)
        kept = values > 1e-7 * values.max()
        phi, new_phi = (k @ vectors[:, kept] / np.sqrt(values[kept]) for k in kernel[1:])
        sides.append((phi - phi.mean(axis=0), new_phi - phi.mean(axis=0)))
    (f, new_f), (g, new_g) = sides
    n = len(A) - 1
    ridge_x = options.ridge_x * np.square(f).sum() / n / A.shape[1]
    ridge_y = options.ridge_y * np.square(g).sum() / n / B.shape[1]
    R_x = inverse_root(f.T @ f / n + ridge_x * np.eye(f.shape[1]))
    R_y = inverse_root(g.T @ g / n + ridge_y * np.eye(g.shape[1]))
    U, rho, Vt = np.linalg.svd(R_x @ (f.T @ g / n) @ R_y, full_matrices=False)
    weight = rho**options.power
    return unit(new_f @ R_x @ U * weight) @ unit(new_g @ R_y @ Vt.T * weight).T


@pytest.mark.parametrize("landmarks", [60, 25])
def test_kernel_cca_matches_textbook_formulas(x64, landmarks):
    (A, B), (new_a, new_b) = pairs(60), pairs(9, seed=1)
    fitted = fit(A, B, landmarks=landmarks)
    marks = np.asarray(fitted.map_x.landmarks)
    same = np.isclose(marks[:, None], centred(A, A)).all(axis=-1)
    assert len(marks) == landmarks and same.any(axis=1).all()  # landmarks are rows of the pairs
    f, g = fitted.map_x(new_a), fitted.map_y(new_b)
    expected = transcription(A, B, new_a, new_b, same.argmax(axis=1), OPTIONS)
    np.testing.assert_allclose(unit(np.asarray(f)) @ unit(np.asarray(g)).T, expected, atol=1e-8)


def test_kernel_cca_with_wide_kernel_is_linear_cca(x64):
    (A, B), (new_a, new_b) = pairs(60), pairs(9, seed=1)
    gamma, ridges = 1e-8, (0.3, 0.1)
    fitted = fit(A, B, choose.Options(*ridges, 1.0, gamma, gamma), dim=3)
    linear = teachers.tuned_cca(
        centred(A, A), centred(B, B), ridge=ridges, power=1.0, dim=3, dtype=jnp.float64
    )
    f, g = unit(np.asarray(fitted.map_x(new_a))), unit(np.asarray(fitted.map_y(new_b)))
    expected = linear.x(centred(new_a, A)) @ linear.y(centred(new_b, B)).T
    np.testing.assert_allclose(f @ g.T, expected, atol=1e-5)


def test_kernel_cca_finds_nonlinear_correlations():
    angle = np.random.default_rng(0).uniform(0, 2 * np.pi, size=(80, 1))
    A = np.hstack([np.cos(angle), np.sin(angle)])
    B = np.hstack([np.cos(2 * angle), np.sin(2 * angle)])
    assert teachers.cca(A, B, ridge=1e-3).correlations.max() < 0.5
    assert fit(A, B, dim=2, dtype=jnp.float32).correlations.min() > 0.95


def test_kernel_cca_in_blocks_matches_one_pass(monkeypatch):
    A, B = pairs(50)
    whole = fit(A, B, landmarks=20, dim=4, dtype=jnp.float32)
    monkeypatch.setattr(features, "BLOCK", 7)
    parts = fit(A, B, landmarks=20, dim=4, dtype=jnp.float32)
    np.testing.assert_allclose(
        whole.map_x(A) @ whole.map_y(B).T, parts.map_x(A) @ parts.map_y(B).T, rtol=1e-3
    )


def test_kernel_map_is_a_pytree_and_matches_numpy():
    A, B = pairs(40)
    kernel_map = fit(A, B, dtype=jnp.float32).map_x
    out = jax.jit(lambda m, rows: m(rows))(kernel_map, jnp.asarray(A, jnp.float32))
    host = jax.tree.map(np.asarray, kernel_map)
    z = unit(unit(A) - host.mean)
    k = np.exp(-host.gamma * np.square(z[:, None] - host.landmarks).sum(-1))
    np.testing.assert_allclose(out, (k - host.centre) @ host.weight.T, atol=1e-2)
    np.testing.assert_allclose(kernel_map.leading(3)(A), out[:, :3], atol=1e-3)


def test_choose_kernel_keeps_given_options():
    A, B = pairs(90)
    chosen = choose.choose(A, B, "kernel")
    assert choose.choose(A, B, "kernel") == chosen
    fixed = choose.choose(A, B, "kernel", gamma_x=0.7, ridges=(0.2, 0.4), power=1.5)
    assert fixed[:4] == (0.2, 0.4, 1.5, 0.7)

    def found(options):
        new = pairs(200, seed=5)
        fitted = fit(A, B, options, dtype=jnp.float32)
        cosines = unit(np.asarray(fitted.map_x(new[0]))) @ unit(np.asarray(fitted.map_y(new[1]))).T
        return np.mean(cosines.argmax(axis=1) == np.arange(200))

    ridges = {"ridge_x": chosen.ridge_x * 1e3, "ridge_y": chosen.ridge_y * 1e3}
    assert found(chosen) >= found(chosen._replace(**ridges)) + 0.02


def test_kernel_cca_landmarks_are_independent_of_pair_order():
    A, B = pairs(50)
    turned = np.random.default_rng(3).permutation(50)
    first = fit(A, B, landmarks=20, dtype=jnp.float32)
    second = fit(A[turned], B[turned], landmarks=20, dtype=jnp.float32)
    np.testing.assert_allclose(
        np.sort(first.map_x.landmarks[:, 0]), np.sort(second.map_x.landmarks[:, 0]), rtol=1e-4
    )


def test_kernel_cca_is_scale_invariant():
    (A, B), (new, _) = pairs(40), pairs(9, seed=1)
    plain = teachers.kernel_cca(A, B)
    tiny = teachers.kernel_cca((1e-25 * A).astype(np.float32), B)
    np.testing.assert_allclose(tiny.x((1e-25 * new).astype(np.float32)), plain.x(new), atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"gamma_x": 0.0}, "gamma_x"), ({"ridge": (0.1, -1.0)}, "ridge"), ({"power": "1"}, "power")],
)
def test_kernel_cca_rejects_options_out_of_range(change, message):
    with pytest.raises(checks.InputError, match=message):
        teachers.kernel_cca(*pairs(20), **change)


def test_kernel_cca_rejects_more_directions_than_pairs_determine():
    with pytest.raises(checks.InputError, match="dim"):
        fit(*pairs(10), dim=10)


def test_kernel_cca_rejects_equal_rows():
    A, B = pairs(10)
    with pytest.raises(checks.InputError, match="pairs_x"):
        fit(np.ones_like(A), B)
