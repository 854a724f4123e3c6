import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sotalign_jax import kernels
from sotalign_jax.kernels import DenseKernel, StreamedKernel

EPSILON = 0.05


def features(rng, n=12, m=9, d=4):
    return jnp.asarray(rng.normal(size=(n, d))), jnp.asarray(rng.normal(size=(m, d)))


def make(kind, f, g):
    if kind == "affinity":
        return DenseKernel(f @ g.T)
    return DenseKernel(f, g) if kind == "dense" else StreamedKernel(f, g, 4)


def build(kernel, q, *, live=None):
    state = kernel.blank(q, jnp.asarray(EPSILON))
    n = state.p.shape[0]
    live = jnp.ones(n, bool) if live is None else live
    state, again = kernel.build(state, live)
    return kernel.build(state, live)[0] if again else state


KINDS = pytest.mark.parametrize("kind", ["affinity", "dense", "streamed"])


def matrix(k, state):
    return np.exp(np.asarray(k) / state.epsilon + state.p[:, None] + state.q)


@KINDS
def test_every_operation_equals_its_definition(rng, x64, kind, monkeypatch):
    monkeypatch.setattr(kernels, "BUILD_ROWS", 5)  # does not divide the 12 rows
    f, g = features(rng)
    kernel, k = make(kind, f, g), f @ g.T
    state = build(kernel, jnp.asarray(rng.normal(size=9)))
    A = matrix(k, state)
    np.testing.assert_allclose(A.max(axis=1), 1.0, rtol=1e-12)

    a, c = rng.uniform(size=12), rng.uniform(size=9)
    s, t = kernel.sweep(state, a, c)
    np.testing.assert_allclose(s, A @ c, rtol=1e-12)
    np.testing.assert_allclose(t, (a / (A @ c)) @ A, rtol=1e-12)

    products = kernel.transport(state, jnp.asarray(a), g, f)
    plan = a[:, None] * A
    np.testing.assert_allclose(products.right, plan @ g, rtol=1e-10)
    np.testing.assert_allclose(products.left, plan.T @ f, rtol=1e-10)
    np.testing.assert_allclose(products.columns, plan.sum(0), rtol=1e-10)
    np.testing.assert_allclose(products.log_moment, (plan * np.log(A)).sum(), rtol=1e-10)


@KINDS
@pytest.mark.parametrize("power", [1.0, 4.0])
def test_absorb_scales_and_raises(rng, x64, kind, power):
    f, g = features(rng)
    kernel = make(kind, f, g)
    before = build(kernel, jnp.zeros(9))
    x, y = jnp.asarray(rng.normal(size=12)), jnp.asarray(rng.normal(size=9))
    after = kernel.absorb(before, x, y, jnp.asarray(power))
    scaled = np.exp(x)[:, None] * matrix(f @ g.T, before) * np.exp(y)
    np.testing.assert_allclose(after.epsilon, EPSILON / power)
    np.testing.assert_allclose(matrix(f @ g.T, after), scaled**power, rtol=1e-10)
    ones = jnp.ones(12), jnp.ones(9)
    s, _ = kernel.sweep(after, *ones)
    np.testing.assert_allclose(s, (scaled**power).sum(1), rtol=1e-10)


@KINDS
def test_no_live_column_is_lost_to_underflow(rng, kind):
    f, g = (x.astype(jnp.float32) for x in features(rng))
    kernel = make(kind, f, g)
    state = build(kernel, jnp.zeros(9).at[2].set(-500.0).at[5].set(300.0))
    _, t = kernel.sweep(state, jnp.ones(12), jnp.ones(9))
    assert jnp.isfinite(t).all() and (t > 0).all()


@KINDS
def test_zero_weights_stay_zero(rng, kind):
    f, g = (x.astype(jnp.float32) for x in features(rng))
    kernel = make(kind, f, g)
    state = build(kernel, jnp.zeros(9).at[4].set(-jnp.inf), live=jnp.arange(12) < 10)
    for _ in range(2):
        s, t = kernel.sweep(state, jnp.ones(12).at[10:].set(0.0), jnp.ones(9))
        assert jnp.isfinite(s).all() and t[4] == 0 and state.q[4] == -jnp.inf
        state = kernel.absorb(state, jnp.zeros(12), jnp.zeros(9), jnp.asarray(4.0))


def test_columns_are_measured_on_live_rows_only(rng):
    """A row of weight zero must not hide that a column underflows in all others."""
    f = jnp.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    kernel = DenseKernel(20 * f @ f.T)
    state = build(kernel, jnp.zeros(3), live=jnp.array([True, True, False]))
    _, t = kernel.sweep(state, jnp.array([0.5, 0.5, 0.0]), jnp.exp(-jnp.zeros(3)))
    assert (t > 0).all()


@pytest.mark.parametrize("n", [1, 7, 256, 257])
def test_over_rows_visits_every_row(n):
    x = jnp.arange(float(n))

    def body(block, start, out):
        return jax.lax.dynamic_update_slice(out, 2 * block(x), (start,))

    np.testing.assert_array_equal(kernels.over_rows(n, body, jnp.zeros(n)), 2 * x)
