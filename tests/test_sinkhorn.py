"""Tests of `sinkhorn` against POT and textbook Sinkhorn, on easy and hard problems."""

import functools

import fuzz
import jax
import jax.numpy as jnp
import numpy as np
import ot
import pytest
import scipy.optimize

from sotalign_jax import checks
from sotalign_jax.ot.sinkhorn import Plan, reference, sinkhorn
from sotalign_jax.ot.solver import Status

EPSILONS = (1e-3, 5e-3, 0.05, 1.0)


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def cosines(rng, n, m, d=8):
    return unit(rng.normal(size=(n, d))) @ unit(rng.normal(size=(m, d))).T


def affinities(n, m):
    """Yields affinities on which solvers tend to stall or overflow."""
    rng = np.random.default_rng(0)
    yield "random", cosines(rng, n, m)
    centres = rng.normal(size=(3, 8))
    rows = centres[rng.integers(0, 3, n)] + 0.05 * rng.normal(size=(n, 8))
    columns = centres[np.minimum(rng.integers(0, 5, m), 2)] + 0.05 * rng.normal(size=(m, 8))
    yield "clustered, of other sizes", unit(rows) @ unit(columns).T
    rows, columns = rng.normal(size=(n, 8)), rng.normal(size=(m, 8))
    rows[n // 2 :], columns[m // 3 :] = rows[0], columns[0]
    yield "duplicated", unit(rows) @ unit(columns).T
    k = 0.02 * rng.normal(size=(n, m))
    k[np.arange(min(n, m)), rng.permutation(m)[: min(n, m)]] += 1
    yield "near a permutation", k
    yield "constant", np.full((n, m), 0.3)
    hub = np.concatenate([rng.normal(size=(1, 8)), 0.1 * rng.normal(size=(m - 1, 8)) - 1])
    yield "one hub", unit(rng.normal(size=(n, 8))) @ unit(hub).T


compiled = jax.jit(sinkhorn, static_argnames="max_iterations")


def solve(k, *, epsilon, tolerance=1e-4, max_iterations=400, log_a=None, log_b=None, init_v=None):
    """Calls `sinkhorn` with explicit weights, so that it compiles once per shape."""
    n, m = k.shape
    return compiled(
        jnp.asarray(k),
        epsilon=epsilon,
        tolerance=tolerance,
        max_iterations=max_iterations,
        log_a=jnp.full(n, -jnp.log(n), k.dtype) if log_a is None else log_a,
        log_b=jnp.full(m, -jnp.log(m), k.dtype) if log_b is None else log_b,
        init_v=init_v,
    )


@functools.cache
def textbook(iterations):
    return jax.jit(functools.partial(reference, iterations=iterations, symmetric=False))


def marginal_error(plan: Plan, a=None, b=None):
    P = np.asarray(plan.matrix(), np.float64)
    n, m = P.shape
    a, b = np.full(n, 1 / n) if a is None else a, np.full(m, 1 / m) if b is None else b
    return max(np.abs(P.sum(1) - a).sum(), np.abs(P.sum(0) - b).sum())


# ------------------------------------------------------------------- against other solvers


@pytest.mark.numerics
@pytest.mark.parametrize(("n", "m", "weighted"), [(24, 24, False), (24, 30, False), (24, 30, True)])
def test_sinkhorn_plan_matches_pot(rng, x64, n, m, weighted):
    k = cosines(rng, n, m)
    a, b = np.full(n, 1 / n), np.full(m, 1 / m)
    if weighted:
        a, b = rng.dirichlet(np.ones(n)), rng.dirichlet(np.ones(m))
    for epsilon in (0.05, 0.2):
        expected = ot.bregman.sinkhorn(
            a, b, -k, epsilon, method="sinkhorn_log", stopThr=1e-13, numItermax=50_000
        )
        plan = solve(k, epsilon=epsilon, log_a=np.log(a), log_b=np.log(b), tolerance=1e-11)
        assert plan.converged
        np.testing.assert_allclose(plan.matrix(), expected, rtol=1e-7, atol=1e-11)


def test_sinkhorn_with_small_epsilon_gives_the_optimal_assignment(rng, x64):
    k = rng.normal(size=(24, 24))
    rows, columns = scipy.optimize.linear_sum_assignment(k, maximize=True)
    plan = solve(k, epsilon=2e-3, tolerance=1e-6)
    expected = np.zeros((24, 24))
    expected[rows, columns] = 1 / 24
    assert plan.converged
    np.testing.assert_allclose(plan.matrix(), expected, atol=1e-5)


def test_sinkhorn_matches_the_converged_reference(rng, x64):
    k = cosines(rng, 24, 24)
    ours = solve(k, epsilon=0.1, tolerance=1e-12)
    theirs = textbook(400)(k, epsilon=0.1)
    np.testing.assert_allclose(ours.matrix(), theirs.matrix(), rtol=1e-9)
    np.testing.assert_allclose(theirs.error, marginal_error(theirs), atol=1e-12)


def test_reference_symmetric_takes_half_a_step_in_u(rng, x64):
    """`symmetric` moves u half-way to its next iterate and keeps v."""
    k = cosines(rng, 6, 9)
    plain, symmetric = (reference(k, epsilon=0.1, iterations=2, symmetric=s) for s in (False, True))
    following = -np.log(6) - np.log(np.exp(k / 0.1 + plain.v).sum(1))
    np.testing.assert_allclose(symmetric.u, (plain.u + following) / 2, rtol=1e-12)
    np.testing.assert_array_equal(symmetric.v, plain.v)


# ------------------------------------------------------------------- robustness


@pytest.mark.numerics
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(24, 24), (24, 30)])
def test_sinkhorn_on_hard_affinities_converges_or_beats_textbook(x64, dtype, shape):
    """Plans converge, or are closer than textbook Sinkhorn after as many iterations."""
    for name, k in affinities(*shape):
        k = jnp.asarray(k, dtype)
        for epsilon in EPSILONS:
            plan, case = solve(k, epsilon=epsilon), f"{name}, epsilon={epsilon}"
            assert plan.u.dtype == dtype and plan.iterations <= 400, case
            assert jnp.isfinite(plan.matrix()).all(), case
            # The reported error is the true error up to the rounding of exp(K/epsilon).
            slack = 1e-9 if dtype == np.float64 else 2e-6 / epsilon**0.5 + 6e-8 / epsilon
            assert abs(plan.error - marginal_error(plan)) < slack, case
            assert plan.converged == (plan.error <= 1e-4), case
            if not plan.converged:
                assert plan.error <= textbook(400)(k, epsilon=epsilon).error, case


@pytest.mark.numerics
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1)])
def test_sinkhorn_converges_on_single_rows_and_columns(rng, shape):
    for epsilon in EPSILONS:
        plan = solve(rng.normal(size=shape).astype(np.float32), epsilon=epsilon)
        assert plan.converged  # although K/epsilon spans thousands
        np.testing.assert_allclose(plan.matrix(), np.full(shape, 1 / max(shape)), rtol=3e-4)


@pytest.mark.parametrize("budget", [1, 2, 25, 50])
def test_sinkhorn_keeps_max_iterations(rng, budget):
    """Includes epsilons far too small for max_iterations and for float32."""
    k = cosines(rng, 24, 24).astype(np.float32)
    for epsilon in (1e-9, 1e-6, 1e-3, 0.5):
        plan = solve(k, epsilon=epsilon, tolerance=1e-7, max_iterations=budget)
        assert plan.iterations <= budget
        assert jnp.isfinite(plan.u).all() and jnp.isfinite(plan.v).all()
        assert jnp.isfinite(plan.error)


def test_sinkhorn_keeps_the_tolerance(rng, x64):
    k = cosines(rng, 24, 24)
    iterations = []
    for tolerance in (1e-2, 1e-5, 1e-10):
        plan = solve(k, epsilon=0.05, tolerance=tolerance)
        assert plan.converged and marginal_error(plan) <= tolerance + 1e-12
        iterations.append(int(plan.iterations))
    assert iterations == sorted(iterations) and iterations[0] < iterations[-1]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("epsilon", [5e-3, 0.5])
def test_sinkhorn_stops_early_on_nan_and_inf_affinities(rng, bad, epsilon):
    k = cosines(rng, 24, 24).astype(np.float32)
    k[3, 4] = bad
    plan = solve(k, epsilon=epsilon)
    assert plan.status == Status.NOT_FINITE and not plan.converged
    assert plan.iterations < 10


def test_sinkhorn_gives_no_mass_to_minus_inf_entries(rng):
    """-inf in K forbids a pair."""
    k = cosines(rng, 24, 24).astype(np.float32)
    k[3, 4] = -np.inf
    plan = solve(k, epsilon=5e-3)
    assert plan.converged and plan.matrix()[3, 4] == 0


def test_sinkhorn_of_infeasible_problem_is_not_converged(rng):
    k = cosines(rng, 24, 24).astype(np.float32)
    k[:, 4] = -np.inf
    plan = solve(k, epsilon=5e-3)
    assert plan.status == Status.NOT_FINITE and not plan.converged


def test_sinkhorn_status_names_the_cause(rng):
    k = cosines(rng, 24, 24).astype(np.float32)
    constant = np.full((24, 24), 0.3, np.float32)
    for given, options, status in (
        (k, {"epsilon": 0.05}, Status.CONVERGED),
        (k, {"epsilon": 5e-3, "max_iterations": 3}, Status.OUT_OF_ITERATIONS),
        # float32 numbers near 1/24 are 4e-9 apart.
        (constant, {"epsilon": 0.05, "tolerance": 1e-8}, Status.ROUNDING),
        # Most columns are not the best one of any row.
        (k, {"epsilon": 1e-6, "max_iterations": 1}, Status.UNDERFLOW),
        (k, {"epsilon": -1.0}, Status.NOT_FINITE),
    ):
        assert solve(given, **options).status == status


@pytest.mark.parametrize("epsilon", [-0.1, 0.0, np.nan, np.inf, 1e-44])
def test_sinkhorn_with_bad_traced_epsilon_stops_at_once(rng, epsilon):
    plan = solve(cosines(rng, 24, 24).astype(np.float32), epsilon=np.float32(epsilon))
    assert plan.status == Status.NOT_FINITE and not plan.converged
    assert plan.error == np.inf and plan.iterations == 0


@pytest.mark.parametrize("value", [0.3, -7.3, 1e3])
def test_sinkhorn_converges_on_constants_large_against_epsilon(value):
    plan = solve(np.full((24, 24), value, np.float32), epsilon=2e-4)
    assert plan.converged and marginal_error(plan) < 1e-4


# ------------------------------------------------------------------- weights and warm starts


def tiny(n, weight=1e-15):
    w = np.full(n, (1 - weight) / (n - 1))
    w[3] = weight
    return w


def gaussian(n, mean):
    w = np.exp(-np.square((np.linspace(-1, 2, n) - mean) / 0.17) / 2)
    return w / w.sum()


@pytest.mark.parametrize(
    ("a", "b", "epsilon"),
    [
        (np.full(24, 1 / 24), tiny(24), 0.05),
        (tiny(24), np.full(24, 1 / 24), 0.05),
        (gaussian(24, 0.2), gaussian(24, 0.8), 1.8),
        (gaussian(24, 0.2), gaussian(24, 0.8), 0.05),
    ],
)
def test_sinkhorn_converges_quickly_with_tiny_weights(rng, a, b, epsilon):
    x = np.linspace(-1, 2, 24)
    uniform, squares = rng.uniform(-1, 1, size=(24, 24)), -np.square(x[:, None] - x)
    for k in (uniform, squares):
        plan = solve(
            k.astype(np.float32),
            epsilon=epsilon,
            log_a=np.log(a).astype(np.float32),
            log_b=np.log(b).astype(np.float32),
        )
        assert plan.converged and plan.iterations < 60
        assert marginal_error(plan, a, b) < 1.1e-4


@pytest.mark.numerics
@pytest.mark.parametrize("index", [2061, 5196])
def test_sinkhorn_does_not_stall_between_far_clusters(index):
    """The residual is nearly constant, so that Anderson acceleration would add noise."""
    assert fuzz.make(20261117, index).name.startswith("permutation")
    assert not fuzz.run([index], 20261117)[index].found


@pytest.mark.numerics
def test_sinkhorn_with_more_iterations_is_not_worse(x64):
    rng = np.random.default_rng([5, 0])
    k = 0.02 * rng.normal(size=(64, 48))
    k[np.arange(64), rng.integers(0, 48, 64)] += 1
    log_a, log_b = (-35 * rng.uniform(size=size) for size in k.shape)
    weights = {"log_a": log_a - scipy.special.logsumexp(log_a)}
    weights["log_b"] = log_b - scipy.special.logsumexp(log_b)
    options = {"epsilon": 1.8e-4, "tolerance": 1e-9, **weights}
    # The last solve starts a search again, which ends at an error of 0.2.
    errors = [float(solve(k, max_iterations=most, **options).error) for most in (80, 160, 500)]
    assert errors[2] <= 1.01 * min(errors) < 0.1


def test_sinkhorn_is_accurate_if_the_row_maximum_has_no_mass():
    """K/epsilon spans thousands, and the largest entry of each row has no mass."""
    k = np.linspace(-1, 0, 24, dtype=np.float32)[None, :] * np.ones((24, 1), np.float32)
    log_b = np.log(np.where(np.arange(24) < 23, 1 / 23, 1e-15)).astype(np.float32)
    plan = solve(k, epsilon=2e-4, log_b=log_b)
    assert plan.converged
    np.testing.assert_allclose(plan.matrix().sum(0), np.exp(log_b), rtol=1e-4)
    np.testing.assert_allclose(plan.matrix().sum(1), 1 / 24, rtol=1e-4)


def test_sinkhorn_normalises_traced_weights(rng):
    k = cosines(rng, 24, 24).astype(np.float32)
    scaled = solve(k, epsilon=0.05, log_a=jnp.zeros(24), log_b=jnp.full(24, 3.0))
    np.testing.assert_allclose(scaled.matrix(), solve(k, epsilon=0.05).matrix(), atol=1e-6)


@pytest.mark.numerics
def test_sinkhorn_with_padding_matches_the_smaller_problem(rng, x64):
    k = cosines(rng, 24, 30)
    log_a = jnp.full(24, -jnp.inf).at[:9].set(-jnp.log(9.0))
    log_b = jnp.full(30, -jnp.inf).at[:11].set(-jnp.log(11.0))
    for epsilon in (5e-3, 0.1):
        padded = solve(k, epsilon=epsilon, log_a=log_a, log_b=log_b, tolerance=1e-9)
        small = solve(k[:9, :11], epsilon=epsilon, tolerance=1e-9)
        assert padded.converged and small.converged
        np.testing.assert_allclose(padded.matrix()[:9, :11], small.matrix(), atol=2e-9)
        assert jnp.sum(padded.matrix()[9:]) == jnp.sum(padded.matrix()[:, 11:]) == 0
        assert (padded.u[9:] == -jnp.inf).all() and (padded.v[11:] == -jnp.inf).all()


def test_sinkhorn_warm_start_takes_fewer_iterations(rng):
    k = cosines(rng, 24, 24).astype(np.float32)
    near = k + 1e-3 * rng.normal(size=k.shape).astype(np.float32)
    for epsilon in (5e-3, 0.05):
        plan = solve(k, epsilon=epsilon)
        again = solve(k, epsilon=epsilon, init_v=plan.v)
        assert again.iterations == 1
        cold = solve(near, epsilon=epsilon)
        warm = solve(near, epsilon=epsilon, init_v=plan.v)
        assert warm.converged and warm.iterations < cold.iterations


@pytest.mark.parametrize("scale", [0.0, 10.0, 1e3, 1e6, 1e38, np.inf, np.nan])
@pytest.mark.parametrize("spread", [False, True])
def test_sinkhorn_converges_from_any_start(rng, scale, spread):
    k = cosines(rng, 24, 24).astype(np.float32)
    v = rng.normal(size=24) if spread else np.ones(24)
    for epsilon in (5e-3, 0.05):
        plan = solve(k, epsilon=epsilon, init_v=(scale * v).astype(np.float32))
        assert plan.converged
        assert marginal_error(plan) < 2e-4


# ------------------------------------------------------------------- transformations


def test_sinkhorn_eager_matches_jit_with_uniform_weights(rng):
    k = jnp.asarray(cosines(rng, 24, 24), jnp.float32)
    eager = sinkhorn(k, epsilon=0.05, max_iterations=400)
    np.testing.assert_allclose(eager.v, solve(k, epsilon=0.05).v, atol=1e-5)


def test_sinkhorn_vmap_matches_single_problems(rng, x64):
    k = jnp.stack([k for _, k in affinities(24, 24)])
    epsilons = jnp.array([0.01, 0.02, 0.05, 0.05, 0.1, 0.3])
    batched = jax.jit(jax.vmap(lambda k, epsilon: sinkhorn(k, epsilon=epsilon)))(k, epsilons)
    assert batched.converged.all()
    for i in range(len(k)):
        one = solve(k[i], epsilon=epsilons[i])
        assert abs(one.iterations - batched.iterations[i]) <= 2
        batch_plan = jax.tree.map(lambda leaf, i=i: leaf[i], batched)
        np.testing.assert_allclose(one.matrix(), batch_plan.matrix(), atol=1e-4)


def test_plan_is_a_pytree_with_lazy_views(rng, x64):
    k = cosines(rng, 24, 30)
    plan = solve(k, epsilon=0.1)
    assert isinstance(plan, Plan)
    np.testing.assert_allclose(plan.matrix(), np.exp(plan.log_matrix()))
    values = rng.normal(size=(30, 3))
    np.testing.assert_allclose(plan.apply(values), plan.matrix() @ values, rtol=1e-12)


def test_sinkhorn_solves_half_precision_in_float32(rng):
    k = jnp.asarray(cosines(rng, 4, 4), jnp.bfloat16)
    plan = jax.eval_shape(functools.partial(sinkhorn, epsilon=0.1), k)
    assert plan.centred_v.dtype == plan.affinity.dtype == jnp.float32


# ------------------------------------------------------------------- errors


def test_sinkhorn_rejects_derivatives_of_plans():
    k = jnp.eye(3)

    def loss(k):
        return sinkhorn(k, epsilon=0.1).matrix().sum()

    with pytest.raises(TypeError, match=r"sinkhorn .*klot"):
        jax.grad(loss)(k)
    with pytest.raises(TypeError, match=r"sinkhorn .*klot"):
        jax.jvp(loss, (k,), (k,))
    jax.eval_shape(jax.grad(lambda k: loss(jax.lax.stop_gradient(k))), k)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((3,), {}, r"K .*\(3,\)"),
        ((0, 3), {}, r"K .*\(0, 3\)"),
        ((3, 3), {"epsilon": 0.0}, r"epsilon.* 0.0"),
        ((3, 3), {"epsilon": -1.0}, r"epsilon.* -1"),
        ((3, 3), {"epsilon": float("nan")}, r"epsilon.* nan"),
        ((3, 3), {"max_iterations": 0}, r"max_iterations.* 0"),
        ((3, 4), {"log_a": jnp.zeros(4)}, r"log_a .*\(4,\)"),
        ((3, 4), {"log_b": jnp.zeros(3)}, r"log_b .*\(3,\)"),
        ((3, 4), {"init_v": jnp.zeros(3)}, r"init_v .*\(3,\)"),
    ],
)
def test_sinkhorn_rejects_bad_arguments(shape, options, message):
    with pytest.raises(checks.InputError, match=message):
        sinkhorn(jnp.zeros(shape), **({"epsilon": 0.1} | options))


@pytest.mark.parametrize("mask", [-10.0, -1e4, -1e9])
def test_sinkhorn_error_is_exact_with_a_large_mask(rng, mask):
    """Epsilon annealing must keep its precision although K has a wide range."""
    k = rng.uniform(size=(24, 24)).astype(np.float32)
    k[3, 5] = mask
    plan = solve(k, epsilon=0.05)
    rows, columns = (np.asarray(plan.matrix(), np.float64).sum(axis) - 1 / 24 for axis in (1, 0))
    assert plan.converged and max(abs(rows).sum(), abs(columns).sum()) < 2e-4


@pytest.mark.parametrize("padding", [-np.inf, np.nan, 1e9])
def test_sinkhorn_ignores_values_in_padding(rng, padding):
    k = np.full((12, 12), padding, np.float32)
    k[:9, :11] = cosines(rng, 9, 11)
    log_a = np.where(np.arange(12) < 9, -np.log(9.0), -np.inf)
    log_b = np.where(np.arange(12) < 11, -np.log(11.0), -np.inf)
    plan = solve(k, epsilon=0.05, log_a=log_a, log_b=log_b)
    small = solve(k[:9, :11], epsilon=0.05)
    np.testing.assert_allclose(plan.matrix()[:9, :11], small.matrix(), atol=1e-5)
    assert plan.matrix()[9:].sum() == 0 and plan.matrix()[:, 11:].sum() == 0


def test_plan_matrix_of_vmapped_plans_is_batched(rng):
    k = jnp.asarray(rng.normal(size=(3, 3, 3)), jnp.float32)
    plans = jax.vmap(lambda k: sinkhorn(k, epsilon=0.5))(k)
    single = jnp.stack([sinkhorn(one, epsilon=0.5).matrix() for one in k])
    np.testing.assert_allclose(plans.matrix(), single, atol=1e-4)


def test_sinkhorn_rejects_weights_instead_of_log_weights():
    with pytest.raises(checks.InputError, match=r"log_a .*4\.187"):
        sinkhorn(jnp.eye(3), epsilon=0.1, log_a=jnp.ones(3) / 3)
