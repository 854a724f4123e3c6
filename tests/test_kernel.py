"""Tests of the Gibbs kernel, and of solves with an int8 kernel."""

import collections
import functools

import fuzz
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sotalign_jax.ot import blocks, device, solver
from sotalign_jax.ot import kernel as kernel_lib
from sotalign_jax.ot.affinity import Cosines, Matrix
from sotalign_jax.ot.kernel import Operator

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
    """Builds a kernel of cosines. Blocks have 5 rows, which do not divide N = 12."""
    if kind == "given":
        k = cosines(features)
        return Operator(Matrix(k, k.max(1)))
    return Operator(features, block_size=5 if kind == "streamed" else None)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr("sotalign_jax.ot.blocks.BUILD_ROWS", 5)


def build(operator, q, *, b=None, epsilon=EPSILON):
    log_b = jnp.log(jnp.full(M, 1 / M, q.dtype) if b is None else b)
    return operator.build(operator.blank(q, jnp.asarray(epsilon, q.dtype)), log_b)


def matrix(operator, k, kernel):
    """Returns the Gibbs kernel A. A given affinity has its row maximum subtracted."""
    k = k - k.max(1, keepdims=True) if isinstance(operator.affinity, Matrix) else k
    return np.exp(np.asarray(k) / kernel.epsilon + kernel.absorbed_u[:, None] + kernel.absorbed_v)


@KINDS
def test_kernel_operations_match_their_definitions(rng, x64, kind):
    features = cosine_affinity(rng)
    operator, k = make(kind, features), cosines(features)
    a, b = jnp.asarray(rng.dirichlet(np.ones(N))), jnp.asarray(rng.dirichlet(np.ones(M)))
    kernel = build(operator, jnp.asarray(rng.normal(size=M)), b=b)
    A = matrix(operator, k, kernel)
    np.testing.assert_allclose(A @ b, 1.0, rtol=1e-12)

    c = jnp.asarray(rng.uniform(size=M))
    s, t = operator.sweep(kernel, a, c)
    np.testing.assert_allclose(s, A @ c, rtol=1e-12)
    np.testing.assert_allclose(t, (a / (A @ c)) @ A, rtol=1e-12)
    balanced = kernel._replace(absorbed_v=operator.update_columns(kernel, jnp.log(a)))
    np.testing.assert_allclose(a @ matrix(operator, k, balanced), 1.0, rtol=1e-12)

    u, v = jnp.asarray(rng.normal(size=N)), jnp.asarray(rng.normal(size=M))
    scaled = kernel._replace(u=u, v=v)
    log_a = np.log(A) + u[:, None] + v
    expected = a[:, None] * np.exp(log_a) * b

    def add(block, sums):
        plan, moment = operator.plan_rows(scaled, block, a, b)
        return block.add(sums[0], plan), block.add(sums[1], moment)

    plan, moment = blocks.over_rows(N, 5, add, (jnp.zeros((N, M)), jnp.zeros((N, M))))
    np.testing.assert_allclose(plan, expected, rtol=1e-10)
    np.testing.assert_allclose(moment, expected * log_a, rtol=1e-10)


@KINDS
def test_raise_power_gives_the_kernel_of_a_quarter_of_epsilon(rng, x64, kind):
    features = cosine_affinity(rng)
    operator, k = make(kind, features), cosines(features)
    before = build(operator, jnp.zeros(M))
    u, v = jnp.asarray(rng.normal(size=N)), jnp.asarray(rng.normal(size=M))
    after = operator.raise_power(before, u, v)
    scaled = (np.exp(u)[:, None] * matrix(operator, k, before) * np.exp(v)) ** 4
    A = matrix(operator, k, after)
    np.testing.assert_allclose(after.epsilon, EPSILON / 4)
    np.testing.assert_allclose(A / scaled, (A / scaled)[0, 0], rtol=1e-10)
    s, _ = operator.sweep(after, jnp.ones(N), jnp.ones(M))
    np.testing.assert_allclose(s, A.sum(1), rtol=1e-10)


def test_narrow_keeps_two_bits_of_mantissa(rng):
    x = np.exp(3 * rng.normal(size=(50, 40))).astype(np.float32)
    np.testing.assert_allclose(kernel_lib.widen(kernel_lib.narrow(x)), x, rtol=2.0**-3)


def test_sweep_int8_sums_the_rounded_kernel(rng):
    operator = Operator(cosine_affinity(rng, jnp.float32), int8=True)
    a, c = (jnp.asarray(rng.uniform(0.1, 1, size), jnp.float32) for size in (N, M))
    kernel = build(operator, jnp.zeros(M))
    for _ in range(2):
        rounded = np.asarray(kernel_lib.widen(kernel_lib.narrow(kernel.matrix)), np.float64)
        s, t = operator.sweep_int8(kernel, a, c)
        np.testing.assert_allclose(s, rounded @ c, rtol=1e-5)
        np.testing.assert_allclose(t, (a / (rounded @ c)) @ rounded, rtol=1e-5)
        kernel = operator.raise_power(kernel, jnp.zeros(N), jnp.zeros(M))


def clustered(rng, epsilon, noise=0.5, **options):
    """Builds a problem that takes many sweeps: clusters of unequal size."""
    centres = rng.normal(size=(6, 16))
    f, g = (
        centres[rng.integers(0, 6, 160) ** 2 % 6] + noise * rng.normal(size=(160, 16))
        for _ in range(2)
    )
    log_a = jnp.full(160, -jnp.log(160.0))
    limits = {"epsilon": epsilon, "tolerance": 1e-4, "max_iterations": 500}
    operator = Operator(Cosines.of(*(jnp.asarray(x, jnp.float32) for x in (f, g))), **options)
    return operator, functools.partial(solver.solve, log_a=log_a, log_b=log_a, **limits)


@pytest.mark.parametrize("block_size", [None, 64])
@pytest.mark.parametrize("epsilon", [0.1, 0.01])
def test_solve_with_int8_sweeps_reaches_the_exact_plan(rng, epsilon, block_size, monkeypatch):
    read = collections.Counter()

    def count(name, sweep):
        def counted(self, *arguments):
            jax.debug.callback(lambda: read.update([name]))
            return sweep(self, *arguments)

        monkeypatch.setattr(Operator, name, counted)

    for name in ("sweep", "sweep_int8"):
        count(name, getattr(Operator, name))
    operator, solve = clustered(rng, epsilon, block_size=block_size, int8=True)
    expected, _ = solve(operator._replace(int8=False))
    jax.effects_barrier()
    read.clear()
    found, kernel = solve(operator)
    jax.effects_barrier()
    assert found.converged and kernel.int8.size == 0
    assert sum(read.values()) == found.iterations <= 1.6 * expected.iterations + 4
    assert 1 <= read["sweep"] <= 4
    assert found.error == pytest.approx(float(column_error(operator, kernel)), abs=1e-6)


def column_error(operator, kernel):
    """Computes the column error of a plan with uniform weights and exact rows."""
    n = len(kernel.absorbed_u)
    weights = jnp.full(n, 1 / n)
    operator = operator._replace(int8=False)
    _, t = operator.sweep(
        kernel._replace(u=0 * kernel.u, v=0 * kernel.v), weights, weights * jnp.exp(kernel.v)
    )
    return jnp.sum(jnp.abs(jnp.exp(kernel.v) * t - 1)) / n


def test_solve_with_int8_restores_columns_that_underflow_exactly():
    """The column underflows in the exact kernel, which must be rebuilt."""
    case = fuzz.make(7, 762)
    rows, columns = (jnp.asarray(x, jnp.float32) for x in (case.log_a, case.log_b))
    z, w = (
        jnp.where(jnp.isfinite(weights)[:, None], x, 0.0)
        for weights, x in zip((rows, columns), case.features[2:], strict=True)
    )
    operator = Operator(Cosines.of(z, w), int8=True)
    limits = {"epsilon": case.epsilon, "tolerance": case.tolerance, "max_iterations": 500}
    found, kernel = solver.solve(operator, rows, columns, **limits)
    a, b = jnp.exp(rows), jnp.exp(columns)
    _, t = operator.sweep(kernel._replace(u=0 * kernel.u, v=0 * kernel.v), a, b * jnp.exp(kernel.v))
    assert found.converged
    assert jnp.sum(b * jnp.abs(jnp.exp(kernel.v) * t - 1)) <= 2 * case.tolerance


def test_solve_falls_back_to_the_exact_kernel_if_int8_stalls(rng, monkeypatch):
    monkeypatch.setattr(kernel_lib, "narrow", lambda x: jnp.zeros_like(x, jnp.int8))
    operator, solve = clustered(rng, 0.05, int8=True)
    found, _ = solve(operator)
    assert found.converged


@pytest.mark.parametrize("max_iterations", [10, 19, 100, 200])
def test_solve_with_int8_keeps_the_budget_and_converges(rng, max_iterations):
    """Uses tight clusters of unequal weight, on which int8 sweeps alone do not converge."""
    centres = rng.normal(size=(4, 8))
    f, g = (np.repeat(centres, 16, axis=0) + 0.02 * rng.normal(size=(64, 8)) for _ in range(2))
    log_b = np.log(np.repeat([0.7, 0.1, 0.1, 0.1], 16) / 16)
    operator = Operator(Cosines.of(jnp.asarray(f, jnp.float32), jnp.asarray(g, jnp.float32)))
    weights = jnp.full(64, -jnp.log(64.0)), jnp.asarray(log_b, jnp.float32)
    limits = {"tolerance": 1e-4, "max_iterations": max_iterations}
    for epsilon in (0.01, 0.002):
        exact, ours = (
            solver.solve(operator._replace(int8=int8), *weights, epsilon=epsilon, **limits)[0]
            for int8 in (False, True)
        )
        assert ours.iterations <= max_iterations
        if exact.converged and exact.iterations <= max_iterations // 2:
            assert ours.converged


@KINDS
def test_update_columns_restores_underflowed_columns(rng, kind):
    operator = make(kind, cosine_affinity(rng, jnp.float32))
    kernel = build(operator, jnp.zeros(M).at[2].set(-500.0).at[5].set(300.0), epsilon=1e-3)
    assert operator.sweep(kernel, jnp.ones(N), jnp.ones(M))[1][2] == 0
    q = operator.update_columns(kernel, jnp.full(N, -jnp.log(N)))
    s, t = operator.sweep(
        operator.build(kernel._replace(absorbed_v=q), jnp.full(M, -jnp.log(M))),
        jnp.ones(N),
        jnp.ones(M),
    )
    assert jnp.isfinite(s).all() and jnp.isfinite(t).all() and (t > 0).all()


@KINDS
def test_kernel_keeps_zero_weights(rng, kind):
    operator = make(kind, cosine_affinity(rng, jnp.float32))
    b = jnp.full(M, 1 / (M - 1)).at[4].set(0.0)
    kernel = build(operator, jnp.zeros(M).at[4].set(-jnp.inf), b=b)
    log_a = jnp.where(jnp.arange(N) < 10, -jnp.log(10.0), -jnp.inf)
    assert operator.update_columns(kernel, log_a)[4] == -jnp.inf
    for _ in range(2):
        s, t = operator.sweep(kernel, jnp.exp(log_a), jnp.ones(M))
        assert jnp.isfinite(s).all() and t[4] == 0 and kernel.absorbed_v[4] == -jnp.inf
        kernel = operator.raise_power(kernel, jnp.zeros(N), jnp.zeros(M))


def test_update_columns_ignores_rows_of_weight_zero():
    k = 20 * jnp.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    operator = Operator(Matrix(k, k.max(1)))
    kernel = operator.blank(jnp.zeros(3), jnp.asarray(EPSILON))
    kernel = operator.build(kernel, jnp.full(3, -jnp.log(3.0)))
    log_a = jnp.log(jnp.array([0.5, 0.5, 0.0]))
    q = operator.update_columns(kernel, log_a)
    _, t = operator.sweep(
        operator.build(kernel._replace(absorbed_v=q), jnp.full(3, -jnp.log(3.0))),
        jnp.exp(log_a),
        jnp.ones(3),
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


@pytest.mark.parametrize(
    ("n", "gibibytes", "block_size", "both", "int8"),
    [
        (1_000, 16, None, True, False),  # too small for an int8 kernel to be faster
        (22_768, 16, None, True, True),
        (22_768, 6, None, False, True),
        (100_000, 60, 2560, False, True),
        (1_000_000, 60, 256, False, False),
    ],
)
def test_storage_keeps_the_kernels_that_fit(n, gibibytes, block_size, both, int8):
    profile = device.Profile("cuda 8.0", memory=gibibytes * 2**30)
    expected = blocks.Storage(block_size, both, int8)
    assert blocks.storage(n, n, jnp.float32, profile) == expected
    assert not blocks.storage(n, n, jnp.float64, profile).int8
    assert not blocks.storage(n, n, jnp.float32, profile._replace(int8=False)).int8
