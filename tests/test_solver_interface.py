"""Tests of the arguments of `sinkhorn`, `klot` and `klot_from_embeddings`.

`eight_devices.py` tests arrays that are sharded over an Explicit mesh.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sotalign_jax as sota
from sotalign_jax import checks


def features(*rows, width=4, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(*shape, width)).astype(dtype) for shape in rows]


N, M = 5, 6
FEATURES = features((N,), (M,), (N,), (M,))
K, K_STAR = (
    np.random.default_rng(seed).uniform(-1, 1, (N, M)).astype(np.float32) for seed in (1, 2)
)
CALLS = {
    "sinkhorn": lambda **options: sota.sinkhorn(K, **({"epsilon": 0.1} | options)).matrix(),
    "klot": lambda **options: sota.klot(K, K_STAR, **options),
    "klot_from_embeddings": lambda **options: sota.klot_from_embeddings(*FEATURES, **options),
}
LOSSES = [name for name in CALLS if name != "sinkhorn"]

# ------------------------------------------------------------------- padding


def klot_problem():
    """Returns klot, 6 x 6 affinities and the side (row 0, column 1) of each of their axes."""
    k, k_star = (np.random.default_rng(seed).uniform(-1, 1, (6, 6)) for seed in (1, 2))
    return sota.klot, (k, k_star), ((0, 1), (0, 1))


def klot_from_embeddings_problem():
    """Returns the loss and features. f and f_star index rows of K, g and g_star columns."""
    arrays = features((6,), (6,), (6,), (6,), dtype=np.float64)
    return sota.klot_from_embeddings, tuple(arrays), ((0,), (1,), (0,), (1,))


@pytest.mark.parametrize("problem", [klot_problem, klot_from_embeddings_problem])
def test_bistochastic_klot_with_padding_matches_the_smaller_problem(problem, x64):
    loss, arrays, sides = problem()
    padding = 2, 4  # a row and a column of K
    log_a, log_b = (jnp.full(6, -jnp.log(5.0)).at[index].set(-jnp.inf) for index in padding)

    def without_padding(x, sides):
        for axis, side in enumerate(sides):
            x = np.delete(x, padding[side], axis)
        return x

    options = {"marginals": "bistochastic", "epsilon": 0.2, "epsilon_star": 0.1}
    loss = jax.jit(jax.value_and_grad(functools.partial(loss, tolerance=1e-10, **options)))
    value, gradient = loss(*arrays, log_a=log_a, log_b=log_b)
    expected = loss(*map(without_padding, arrays, sides))
    np.testing.assert_allclose(value, expected[0], rtol=1e-8)
    np.testing.assert_allclose(without_padding(gradient, sides[0]), expected[1], atol=1e-8)
    for axis, side in enumerate(sides[0]):
        assert not jnp.take(gradient, padding[side], axis).any()


# ------------------------------------------------------------------- convergence

PROBLEMS, LIMIT = 24, 500


@jax.jit
@jax.vmap
def solve_embeddings(f, g, f_star, g_star, tolerance):
    options = {"tolerance": tolerance, "max_iterations": LIMIT}
    _, aux = sota.klot_from_embeddings(f, g, f_star, g_star, return_aux=True, **options)
    return {"student": aux.student, "teacher": aux.teacher}


@jax.jit
@jax.vmap
def solve_sinkhorn(f, g, f_star, g_star, tolerance):
    solve = functools.partial(sota.sinkhorn, tolerance=tolerance, max_iterations=LIMIT)
    return {"plan": solve(sota.cosine(f, g), epsilon=0.02)}


@pytest.mark.numerics
@pytest.mark.parametrize("solve", [solve_embeddings, solve_sinkhorn])
def test_solves_end_within_the_tolerance_or_at_max_iterations(solve):
    """A plan may miss its tolerance only if the iterations ran out.

    The solver's internal error equals that of the plan up to rounding. The second solve sets the
    tolerance between the two, a case that otherwise occurs once in thousands of problems.
    """
    arrays = features(*[(PROBLEMS, rows) for rows in (20, 24, 20, 24)])

    def converges(tolerance):
        found = solve(*arrays, tolerance)
        for name, plan in found.items():
            assert (plan.converged | (plan.iterations >= LIMIT)).all(), name
            assert (plan.converged == (plan.error <= tolerance)).all(), name
        return found

    for tolerance in (1e-2, 1e-3, 1e-4):
        for plan in converges(jnp.full(PROBLEMS, tolerance)).values():
            missed = jnp.nextafter(plan.error, jnp.zeros(PROBLEMS))
            converges(jnp.where(plan.error > tolerance / 2, missed, tolerance))


# ------------------------------------------------------------------- scalars

BAD_SCALARS = [
    ("epsilon", np.full(1, 0.1)),
    ("epsilon", np.full(N, 0.1)),
    ("epsilon_star", np.full(1, 0.1)),
    ("epsilon_star", np.full((N, M), 0.1)),
    ("tolerance", float("nan")),
    ("tolerance", float("inf")),
    ("tolerance", -1e-4),
    ("tolerance", np.full(2, 1e-4)),
    ("max_iterations", 2**31),
]


@pytest.mark.parametrize(("name", "value"), BAD_SCALARS)
def test_solvers_reject_bad_scalars(name, value):
    for call in CALLS if name != "epsilon_star" else LOSSES:
        with pytest.raises(checks.InputError, match=rf"\b{name}\b"):
            CALLS[call](**{name: value})


@pytest.mark.parametrize("name", ["epsilon", "epsilon_star", "tolerance"])
def test_solvers_reject_traced_vectors_as_scalars(name):
    vector = jnp.full(N, 0.1)
    for call in CALLS if name != "epsilon_star" else LOSSES:
        with pytest.raises(checks.InputError, match=rf"\b{name}\b"):
            jax.eval_shape(lambda x, call=call: CALLS[call](**{name: x}), vector)


# ------------------------------------------------------------------- types of arrays


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("K", lambda x: sota.sinkhorn(x, epsilon=0.1)),
        ("K", lambda x: sota.klot(x, jnp.eye(3))),
        ("K_star", lambda x: sota.klot(jnp.eye(3), x)),
        ("f", lambda x: sota.klot_from_embeddings(x, *[jnp.eye(3)] * 3)),
        ("g_star", lambda x: sota.klot_from_embeddings(*[jnp.eye(3)] * 3, x)),
    ],
)
def test_solvers_reject_complex_arrays(name, call):
    for given in (np.eye(3) * 1j, (np.eye(3) * 1j).tolist()):
        with pytest.raises(checks.InputError, match=rf"\b{name}\b"):
            call(given)
    with pytest.raises(checks.InputError, match=rf"\b{name}\b"):
        jax.eval_shape(call, jnp.eye(3) * 1j)


def test_sinkhorn_and_klot_accept_integer_and_boolean_affinities():
    expected = sota.sinkhorn(jnp.eye(3), epsilon=0.5).matrix()
    loss = sota.klot(jnp.eye(3), K_STAR[:3, :3])
    for dtype in (bool, int):
        given = np.eye(3, dtype=dtype).tolist()
        np.testing.assert_array_equal(sota.sinkhorn(given, epsilon=0.5).matrix(), expected)
        assert sota.klot(given, K_STAR[:3, :3]) == loss


@pytest.mark.numerics
@pytest.mark.parametrize("wide", ["K", "K_star"])
def test_klot_of_mixed_precision_is_computed_in_float64(wide, x64):
    arrays = {"K": jnp.asarray(K), "K_star": jnp.asarray(K_STAR)}
    arrays[wide] = jnp.asarray(np.random.default_rng(3).uniform(-1, 1, (N, M)))
    loss = jax.jit(jax.value_and_grad(functools.partial(sota.klot, tolerance=1e-10)))
    value, gradient = loss(*(x.astype(jnp.float64) for x in arrays.values()))
    mixed, mixed_gradient = loss(*arrays.values())
    assert mixed.dtype == jnp.float64 and mixed_gradient.dtype == arrays["K"].dtype
    np.testing.assert_allclose(mixed, value, rtol=1e-12)
    np.testing.assert_allclose(mixed_gradient, gradient, rtol=1e-6, atol=1e-8)


@pytest.mark.numerics
def test_klot_from_embeddings_of_bfloat16_matches_float32():
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in FEATURES]
    # At these epsilons, the order of rounding K does not change the value.
    options = {"epsilon": 0.2, "epsilon_star": 0.2, "tolerance": 1e-6}
    loss = functools.partial(sota.klot_from_embeddings, **options)
    loss = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    value, gradients = loss(*narrow)
    expected, expected_gradients = loss(*(x.astype(jnp.float32) for x in narrow))
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for ours, other in zip(gradients, expected_gradients, strict=True):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            ours.astype(jnp.float32), other, rtol=0.01, atol=1e-3 * jnp.abs(other).max()
        )


@pytest.mark.numerics
def test_solvers_keep_float32_with_x64_at_2048_rows(x64):
    f, g, f_star, g_star = map(jnp.asarray, features(*[(2048,)] * 4))
    k = sota.cosine(f, g)
    plan = jax.jit(functools.partial(sota.sinkhorn, epsilon=1.0, tolerance=1e-2))(k)
    assert k.dtype == plan.affinity.dtype == plan.u.dtype == plan.error.dtype == jnp.float32
    assert plan.converged and jax.eval_shape(plan.matrix).dtype == jnp.float32
    loss = functools.partial(sota.klot_from_embeddings, epsilon=1.0, epsilon_star=1.0)
    loss = jax.value_and_grad(functools.partial(loss, tolerance=1e-2), argnums=(0, 1))
    value, gradients = jax.jit(loss)(f, g, f_star, g_star)
    assert value.dtype == gradients[0].dtype == gradients[1].dtype == jnp.float32
    assert value > 0 and all(jnp.isfinite(gradient).all() for gradient in gradients)


# ------------------------------------------------------------------- derivatives

CONSTANTS = {
    "epsilon": 0.1,
    "epsilon_star": 0.1,
    "log_a": np.full(N, -np.log(N), np.float32),
    "log_b": np.full(M, -np.log(M), np.float32),
}


@pytest.mark.parametrize("name", CONSTANTS)
@pytest.mark.parametrize("jit", [False, True])
def test_solvers_reject_derivatives_in_constants(name, jit):
    x = jnp.asarray(CONSTANTS[name])
    for call in CALLS if name != "epsilon_star" else LOSSES:

        def loss(x, call=call):
            return CALLS[call](**{name: x}).sum()

        loss = jax.jit(loss) if jit else loss
        for derivative in (
            jax.grad(loss),
            lambda x, loss=loss: jax.jvp(loss, (x,), (x,)),
            lambda x, loss=loss: jax.linearize(loss, x)[0],
            jax.hessian(loss),
        ):
            with pytest.raises(TypeError, match=rf"^{call}\b"):
                jax.eval_shape(derivative, x)


def test_klot_gradient_with_traced_constants_matches_the_plans(x64):
    """Differentiates under `jit` and `vmap`, with an epsilon that depends on K."""
    k, k_star = (jnp.stack([jnp.asarray(x, jnp.float64), x / 2]) for x in (K, K_STAR))
    epsilons = jnp.array([0.2, 0.3])
    log_a = jnp.log(jnp.arange(1, N + 1) / (N * (N + 1) / 2))
    exact = {"log_a": log_a, "tolerance": 1e-10}

    def loss(k, k_star, epsilon):
        scaled = epsilon * jax.lax.stop_gradient(jnp.max(k))
        return sota.klot(k, k_star, epsilon=scaled, epsilon_star=epsilon, **exact)

    def difference(k, k_star, epsilon):
        scaled = epsilon * jnp.max(k)
        plan = sota.sinkhorn(k, epsilon=scaled, **exact)
        target = sota.sinkhorn(k_star, epsilon=epsilon, **exact)
        return (plan.matrix() - target.matrix()) / scaled

    arguments = k, k_star, epsilons
    gradient, zero = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1))))(*arguments)
    np.testing.assert_allclose(gradient, jax.jit(jax.vmap(difference))(*arguments), atol=1e-8)
    assert not zero.any()


# ------------------------------------------------------------------- devices


class Accelerator:
    """Device that does not report its memory."""

    def __init__(self, platform, compute_capability=""):
        self.platform, self.compute_capability = platform, compute_capability

    def memory_stats(self):
        return None


@pytest.mark.parametrize(
    "accelerator",
    [Accelerator("tpu"), Accelerator("gpu", "8.0"), Accelerator("gpu", "gfx942")],
    ids=lambda device: f"{device.platform} {device.compute_capability}",
)
def test_profile_memory_without_stats_is_not_that_of_the_host(accelerator, monkeypatch):
    from sotalign_jax.ot import device

    pages = 2**30
    monkeypatch.setattr(os, "sysconf", lambda name: pages)  # a host with 2^60 bytes
    assert device.profile(jax.devices("cpu")[0]).memory == pages * pages
    assert 2**30 <= device.profile(accelerator).memory < 2**40
