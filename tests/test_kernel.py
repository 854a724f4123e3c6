import collections
import functools

import fuzz
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sotalign_jax.ot import blocks, onepass, solver
from sotalign_jax.ot.kernel import Cosines, Kernel, Matrix

N, M, EPSILON = 12, 9, 0.05
KINDS = pytest.mark.parametrize("kind", ["given", "stored", "streamed"])


def cosine_affinity(rng, dtype=None):
    f, g = (jnp.asarray(rng.normal(size=(n, 4)), dtype) for n in (N, M))
    return Cosines(f, g, 1 / jnp.linalg.norm(f, axis=1), 1 / jnp.linalg.norm(g, axis=1))


def normalised(features):
    return features.f * features.f_scale[:, None], features.g * features.g_scale[:, None]


def cosines(features):
    f, g = normalised(features)
    return f @ g.T


def make(kind, features):
    """A kernel of the features' cosines, in blocks of 5 rows, which do not divide the 12."""
    if kind == "given":
        k = cosines(features)
        return Kernel(Matrix(k, k.max(1)))
    return Kernel(features, block_size=5 if kind == "streamed" else None)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr("sotalign_jax.ot.blocks.BUILD_ROWS", 5)


def build(kernel, q, *, b=None, epsilon=EPSILON):
    log_b = jnp.log(jnp.full(M, 1 / M, q.dtype) if b is None else b)
    return kernel.build(kernel.blank(q, jnp.asarray(epsilon, q.dtype)), log_b)


def matrix(kernel, k, state):
    """A; of an affinity that is given, the largest entry of each row is taken off."""
    k = k - k.max(1, keepdims=True) if isinstance(kernel.affinity, Matrix) else k
    return np.exp(np.asarray(k) / state.epsilon + state.p[:, None] + state.q)


@KINDS
def test_every_operation_equals_its_definition(rng, x64, kind):
    features = cosine_affinity(rng)
    kernel, k = make(kind, features), cosines(features)
    a, b = jnp.asarray(rng.dirichlet(np.ones(N))), jnp.asarray(rng.dirichlet(np.ones(M)))
    state = build(kernel, jnp.asarray(rng.normal(size=M)), b=b)
    A = matrix(kernel, k, state)
    np.testing.assert_allclose(A @ b, 1.0, rtol=1e-12)

    c = jnp.asarray(rng.uniform(size=M))
    s, t = kernel.sweep(state, a, c)
    np.testing.assert_allclose(s, A @ c, rtol=1e-12)
    np.testing.assert_allclose(t, (a / (A @ c)) @ A, rtol=1e-12)
    balanced = state._replace(q=kernel.update_columns(state, jnp.log(a)))
    np.testing.assert_allclose(a @ matrix(kernel, k, balanced), 1.0, rtol=1e-12)

    products, _ = kernel.transport(state, a, b, features)
    plan, (f, g) = a[:, None] * A * b, normalised(features)
    np.testing.assert_allclose(products.right, plan @ g, rtol=1e-10)
    np.testing.assert_allclose(products.left, plan.T @ f, rtol=1e-10)
    np.testing.assert_allclose(products.rows, plan.sum(1), rtol=1e-10)
    np.testing.assert_allclose(products.columns, plan.sum(0), rtol=1e-10)
    np.testing.assert_allclose(products.log_moment, (plan * np.log(A)).sum(), rtol=1e-10)
    for difference in kernel.transport(state, a, b, features, minus=products)[0]:
        np.testing.assert_allclose(difference, 0.0, atol=1e-12)
    if kind == "streamed":  # two kernels are stored at a time
        return
    star = build(kernel, jnp.asarray(rng.normal(size=M)), b=b)
    log_star = np.log(matrix(kernel, k, star))
    plan_star = a[:, None] * np.exp(log_star) * b
    less, moment = plan - plan_star, (plan * np.log(A) - plan_star * log_star).sum()
    wanted = less @ g, less.T @ f, less.sum(1), less.sum(0), moment
    for in_place in (False, True):
        moved, of_star = kernel.transport(state, a, b, features, star=star, in_place=in_place)
        for found, expected in zip(moved, wanted, strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-12)
        np.testing.assert_allclose(of_star[0], plan_star.sum(1), rtol=1e-10)
        np.testing.assert_allclose(of_star[1], plan_star.sum(0), rtol=1e-10)


@KINDS
@pytest.mark.parametrize("power", [1.0, 4.0])
def test_absorb_scales_and_raises(rng, x64, kind, power):
    features = cosine_affinity(rng)
    kernel, k = make(kind, features), cosines(features)
    before = build(kernel, jnp.zeros(M))
    x, y = jnp.asarray(rng.normal(size=N)), jnp.asarray(rng.normal(size=M))
    after = kernel.absorb(before, x, y, jnp.asarray(power))
    scaled = (np.exp(x)[:, None] * matrix(kernel, k, before) * np.exp(y)) ** power
    A = matrix(kernel, k, after)
    np.testing.assert_allclose(after.epsilon, EPSILON / power)
    np.testing.assert_allclose(A / scaled, (A / scaled)[0, 0], rtol=1e-10)
    s, _ = kernel.sweep(after, jnp.ones(N), jnp.ones(M))
    np.testing.assert_allclose(s, A.sum(1), rtol=1e-10)
    products, _ = kernel.transport(after, jnp.ones(N), jnp.ones(M), features)
    np.testing.assert_allclose(products.rows, A.sum(1), rtol=1e-10)
    np.testing.assert_allclose(products.log_moment, (A * np.log(A)).sum(), rtol=1e-10)


def test_a_narrow_copy_is_made_and_raised(rng):
    kernel, a, b = Kernel(cosine_affinity(rng, jnp.float32), narrow=True), jnp.ones(N), jnp.ones(M)
    state = build(kernel, jnp.zeros(M), b=b / M)
    for _ in range(2):
        sweeps = [kernel.sweep(state, a, b, narrow=narrow) for narrow in (True, False)]
        for got, wanted in zip(*sweeps, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0.2)
        state = kernel.absorb(state, jnp.zeros(N), jnp.zeros(M), jnp.asarray(4.0))


def clustered(rng, epsilon, noise=0.5):
    """A problem that takes many sweeps: rows near a few centres, more of some than of others."""
    centres = rng.normal(size=(6, 16))
    f, g = (
        centres[rng.integers(0, 6, 160) ** 2 % 6] + noise * rng.normal(size=(160, 16))
        for _ in range(2)
    )
    log_a = jnp.full(160, -jnp.log(160.0))
    options = {"epsilon": epsilon, "tolerance": 1e-4, "max_iterations": 500}
    kernel = Kernel(Cosines.of(*(jnp.asarray(x, jnp.float32) for x in (f, g))), narrow=True)
    return kernel, functools.partial(solver.solve, log_a=log_a, log_b=log_a, **options)


@pytest.mark.parametrize("epsilon", [0.1, 0.01])
def test_most_sweeps_over_a_narrow_copy_lead_to_the_plan_of_the_kernel(rng, epsilon, monkeypatch):
    read = collections.Counter()
    sweep = Kernel.sweep

    def counted(self, *arguments, narrow=False):
        jax.debug.callback(lambda: read.update(["copy" if narrow else "kernel"]))
        return sweep(self, *arguments, narrow=narrow)

    kernel, solve = clustered(rng, epsilon)
    expected, _ = solve(kernel._replace(narrow=False))
    monkeypatch.setattr(Kernel, "sweep", counted)
    found, state = solve(kernel)
    jax.effects_barrier()
    assert found.converged and state.narrow.size == 0
    assert read["copy"] == found.iterations <= 1.5 * expected.iterations
    assert 1 <= read["kernel"] <= 0.25 * read["copy"]
    assert found.error == pytest.approx(float(column_error(kernel, state)), abs=1e-6)


def column_error(kernel, state):
    """Of the plan with uniform weights, whose rows are exact."""
    n = len(state.p)
    uniform = jnp.full(n, 1 / n)
    return jnp.sum(jnp.abs(kernel._replace(narrow=False).sweep(state, uniform, uniform)[1] - 1)) / n


def test_what_a_narrow_copy_promises_is_not_the_end():
    """Columns that it has underflow in the kernel, which must be built anew."""
    case = fuzz.make(7, 762)
    rows, columns = (jnp.asarray(x, jnp.float32) for x in (case.log_a, case.log_b))
    z, w = (
        jnp.where(jnp.isfinite(weights)[:, None], x, 0.0)
        for weights, x in zip((rows, columns), case.features[2:], strict=True)
    )
    kernel = Kernel(Cosines.of(z, w), narrow=True)
    limits = {"epsilon": case.epsilon, "tolerance": case.tolerance, "max_iterations": 500}
    found, state = solver.solve(kernel, rows, columns, **limits)
    a, b = jnp.exp(rows), jnp.exp(columns)
    assert found.converged
    assert jnp.sum(b * jnp.abs(kernel.sweep(state, a, b)[1] - 1)) <= 2 * case.tolerance


def test_a_narrow_copy_that_leads_nowhere_gives_way_to_the_kernel(rng, monkeypatch):
    monkeypatch.setattr(onepass, "narrow", lambda x: jnp.zeros_like(x, jnp.int8))
    kernel, solve = clustered(rng, 0.05)
    found, _ = solve(kernel)
    assert found.converged


@KINDS
def test_a_column_that_underflows_is_brought_back(rng, kind):
    kernel = make(kind, cosine_affinity(rng, jnp.float32))
    state = build(kernel, jnp.zeros(M).at[2].set(-500.0).at[5].set(300.0), epsilon=1e-3)
    assert kernel.sweep(state, jnp.ones(N), jnp.ones(M))[1][2] == 0
    q = kernel.update_columns(state, jnp.full(N, -jnp.log(N)))
    s, t = kernel.sweep(
        kernel.build(state._replace(q=q), jnp.full(M, -jnp.log(M))), jnp.ones(N), jnp.ones(M)
    )
    assert jnp.isfinite(s).all() and jnp.isfinite(t).all() and (t > 0).all()


@KINDS
def test_zero_weights_stay_zero(rng, kind):
    kernel = make(kind, cosine_affinity(rng, jnp.float32))
    b = jnp.full(M, 1 / (M - 1)).at[4].set(0.0)
    state = build(kernel, jnp.zeros(M).at[4].set(-jnp.inf), b=b)
    log_a = jnp.where(jnp.arange(N) < 10, -jnp.log(10.0), -jnp.inf)
    assert kernel.update_columns(state, log_a)[4] == -jnp.inf
    for power in (4.0, 1.0):
        s, t = kernel.sweep(state, jnp.exp(log_a), jnp.ones(M))
        assert jnp.isfinite(s).all() and t[4] == 0 and state.q[4] == -jnp.inf
        state = kernel.absorb(state, jnp.zeros(N), jnp.zeros(M), jnp.asarray(power))


def test_a_row_of_weight_zero_does_not_bring_a_column_back():
    k = 20 * jnp.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    kernel = Kernel(Matrix(k, k.max(1)))
    state = kernel.blank(jnp.zeros(3), jnp.asarray(EPSILON))
    state = kernel.build(state, jnp.full(3, -jnp.log(3.0)))
    log_a = jnp.log(jnp.array([0.5, 0.5, 0.0]))
    q = kernel.update_columns(state, log_a)
    _, t = kernel.sweep(
        kernel.build(state._replace(q=q), jnp.full(3, -jnp.log(3.0))), jnp.exp(log_a), jnp.ones(3)
    )
    assert (t > 0).all()


@pytest.mark.parametrize("n", [1, 7, 8, 13])
def test_over_rows_visits_every_row_and_counts_it_once(n):
    x = jnp.arange(1.0, n + 1)

    def body(block, carry):
        doubled, total = carry
        rows = block.of(x)
        return block.put(doubled, 2 * rows), total + jnp.sum(jnp.where(block.fresh, rows, 0.0))

    doubled, total = blocks.over_rows(n, 4, body, (jnp.zeros(n), jnp.zeros(())))
    np.testing.assert_array_equal(doubled, 2 * x)
    assert total == x.sum()


def test_auto_block_streams_what_does_not_fit():
    gib = 2**30
    assert blocks.auto_block(22_768, 22_768, 4, 16 * gib) is None
    block = blocks.auto_block(131_072, 131_072, 4, 80 * gib)
    assert block % 128 == 0 and 3 * block * 131_072 * 4 <= 4 * gib
    assert blocks.auto_block(10**7, 10**7, 4, gib) == 128
    assert blocks.auto_block(8, 8, 4) is None
