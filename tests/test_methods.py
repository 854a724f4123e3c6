"""Tests of the objectives of SOTAlign and SAIL against numpy."""

import dataclasses
import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import logsumexp

from sotalign_jax import checks, heads, methods, sampling, teachers
from sotalign_jax.methods import sotalign
from sotalign_jax.ot.solver import Status

D_X, D_Y, DIM, PAIRS, N, M = 7, 6, 4, 8, 12, 10
EPSILON, EPSILON_STAR = 0.1, 0.05
# Plans must converge, so that oracles and the closed-form gradient agree to rounding.
EXACT = {
    "epsilon": EPSILON,
    "epsilon_star": EPSILON_STAR,
    "tolerance": 1e-6,
    "max_iterations": 2000,
}


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    z, to_x, to_y = rng.normal(size=(60, 5)), rng.normal(size=(5, D_X)), rng.normal(size=(5, D_Y))
    x = (z @ to_x + 0.3 * rng.normal(size=(60, D_X))).astype(np.float32)
    y = (z @ to_y + 0.3 * rng.normal(size=(60, D_Y))).astype(np.float32)
    rows = x[:PAIRS], y[:PAIRS], x[20 : 20 + N], y[40 : 40 + M]
    return sampling.Batch(*map(jnp.asarray, rows))


@pytest.fixture(scope="module")
def teacher(batch):
    return teachers.cca(batch.a, batch.b)


@pytest.fixture(scope="module")
def student():
    return heads.build_heads(D_X, D_Y, DIM, seed=3)


# Compilation dominates the time of these tests, so compile without optimisation.
@functools.partial(
    jax.jit,
    static_argnums=(0, 1),
    compiler_options={"xla_backend_optimization_level": 0},
)
def differentiate(method, graphdef, params, batch, teacher, memory):
    def objective(params, teacher):
        return method(nnx.merge(graphdef, params), batch, teacher, memory)

    return jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)(params, teacher)


class Evaluated(NamedTuple):
    loss: Any
    metrics: Any
    memory: Any
    gradient: Any
    teacher_gradient: Any


def evaluate(method, student, batch, teacher=None, memory=None):
    """Computes loss, metrics and gradients. Compiles once per method and shape."""
    memory = {} if memory is None else memory
    (loss, (metrics, memory)), gradients = differentiate(
        method, *nnx.split(student), batch, teacher, memory
    )
    return Evaluated(loss, metrics, memory, *gradients)


def cosines(f, g):
    unit = [np.asarray(a, np.float64) / np.linalg.norm(a, axis=1, keepdims=True) for a in (f, g)]
    return unit[0] @ unit[1].T


def siglip_by_hand(student, f, g):
    """Computes the mean of -log sigmoid(y_ij z_ij) with positives on the diagonal."""
    k = cosines(f, g)
    logits = np.exp(float(student.log_scale[...])) * k + float(student.bias[...])
    return np.mean(np.logaddexp(0.0, -(2 * np.eye(*k.shape) - 1) * logits))


def log_plan(k, epsilon):
    """Runs textbook Sinkhorn. exp(k / epsilon) stays below e^20 here."""
    kernel, columns = np.exp(k / epsilon), np.ones(k.shape[1])
    for _ in range(5000):
        rows = 1 / len(k) / (kernel @ columns)
        columns = 1 / len(columns) / (rows @ kernel)
    return k / epsilon + np.log(rows)[:, None] + np.log(columns)


def features(student, batch):
    return (student.x(batch.a), student.y(batch.b)), (student.x(batch.x), student.y(batch.y))


def affinities(student, batch, teacher):
    k_star = cosines(teacher.x(batch.x), teacher.y(batch.y))
    return cosines(*features(student, batch)[1]), k_star


def oracle(name, student, batch, teacher):
    """Computes the divergence in float64 from its formula."""
    k, k_star = affinities(student, batch, teacher)
    if name == "klot":
        log_p, log_p_star = log_plan(k, EPSILON), log_plan(k_star, EPSILON_STAR)
        return np.sum(np.exp(log_p_star) * (log_p_star - log_p))
    if name == "infonce":
        total, k, k_star = 0.0, k / EPSILON, k_star / EPSILON_STAR
        for a, b in ((k, k_star), (k.T, k_star.T)):
            log_s = a - logsumexp(a, axis=1, keepdims=True)
            log_t = b - logsumexp(b, axis=1, keepdims=True)
            total += np.mean(np.sum(np.exp(log_t) * (log_t - log_s), axis=1)) / 2
        return total
    centred = [c - c.mean(0) - c.mean(1, keepdims=True) + c.mean() for c in (k, k_star)]
    return 1.0 - np.sum(centred[0] * centred[1]) / np.prod(list(map(np.linalg.norm, centred)))


@pytest.mark.parametrize("name", ["klot", "cka", "infonce"])
def test_sotalign_loss_is_siglip_plus_alpha_times_divergence(name, student, batch, teacher):
    method = methods.SOTAlign(alpha=0.7, divergence=name, **EXACT)
    loss, metrics, _, gradient, teacher_gradient = evaluate(method, student, batch, teacher)
    siglip = siglip_by_hand(student, *features(student, batch)[0])
    divergence = oracle(name, student, batch, teacher)
    np.testing.assert_allclose(metrics["siglip"], siglip, rtol=1e-5)
    np.testing.assert_allclose(metrics[name], divergence, rtol=1e-4)
    np.testing.assert_allclose(loss, siglip + 0.7 * divergence, rtol=1e-4)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradient))
    assert not any(
        np.any(leaf) for leaf in jax.tree.leaves(teacher_gradient)
    )  # the teacher is frozen


def test_sotalign_gradient_matches_the_sum_of_its_parts(student, batch, teacher):
    graphdef, params = nnx.split(student)
    k, k_star = affinities(student, batch, teacher)
    difference = np.exp(log_plan(k, EPSILON)) - np.exp(log_plan(k_star, EPSILON_STAR))
    difference = jnp.asarray(difference / EPSILON, jnp.float32)

    def surrogate(params):
        """Adds to SigLIP a term whose gradient in K is (P - P*) / epsilon."""
        both = nnx.merge(graphdef, params)
        (f, g), (fx, gy) = features(both, batch)

        def cosine(a, b):
            a, b = (r / jnp.linalg.norm(r, axis=1, keepdims=True) for r in (a, b))
            return jnp.matmul(a, b.T, precision="highest")

        logits = jnp.exp(both.log_scale[...]) * cosine(f, g) + both.bias[...]
        siglip = jnp.mean(jax.nn.softplus(-(2 * jnp.eye(PAIRS) - 1) * logits))
        return siglip + 0.7 * jnp.sum(difference * cosine(fx, gy))

    gradient = evaluate(methods.SOTAlign(alpha=0.7, **EXACT), student, batch, teacher).gradient
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max()),
        gradient,
        jax.jit(jax.grad(surrogate))(params),
    )


def test_sotalign_without_divergence_is_sail(student, batch):
    expected = evaluate(methods.SAIL(), student, batch)
    method = methods.SOTAlign(divergence="none")
    assert not method.pools
    assert not method.uses_teacher
    empty = batch._replace(x=batch.x[:0], y=batch.y[:0])
    for other in (batch, empty):
        result = evaluate(method, student, other)
        assert set(result.metrics) == {"siglip"}
        np.testing.assert_allclose(result.loss, expected.loss, rtol=1e-6)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-8),
            result.gradient,
            expected.gradient,
        )


def test_sotalign_pairs_and_negatives_match_numpy(student, batch):
    method = methods.SOTAlign(divergence="none", supervision="pairs+negatives")
    assert method.pools == "xy"
    assert not method.uses_teacher
    (f, g), (x, y) = features(student, batch)
    # Mean of two rectangles: pairs against pairs and the pool, from each side.
    expected = siglip_by_hand(student, f, np.concatenate([g, y]))
    expected = (expected + siglip_by_hand(student, g, np.concatenate([f, x]))) / 2
    np.testing.assert_allclose(evaluate(method, student, batch).loss, expected, rtol=1e-5)


def test_square_supervision_matches_numpy(student, batch):
    (f, g), (x, y) = features(student, batch)
    k = cosines(np.concatenate([f, x]), np.concatenate([g, y]))
    signs = -np.ones_like(k)
    signs[np.arange(PAIRS), np.arange(PAIRS)] = 1.0
    logits = np.exp(float(student.log_scale[...])) * k + float(student.bias[...])
    expected = np.mean(np.logaddexp(0.0, -signs * logits))
    for method in (
        methods.SAIL("square"),
        methods.SOTAlign(divergence="none", supervision="square"),
    ):
        assert method.pools == "xy"
        np.testing.assert_allclose(evaluate(method, student, batch).loss, expected, rtol=1e-5)


def test_sail_semi_matches_sotalign_without_divergence(student, batch):
    method = methods.METHODS["sail_semi"]
    other = methods.SOTAlign(divergence="none", supervision="pairs+negatives")
    assert evaluate(method, student, batch).loss == evaluate(other, student, batch).loss


def test_sotalign_klot_on_all_includes_pairs(student, batch, teacher):
    both = batch._replace(
        x=jnp.concatenate([batch.a, batch.x]), y=jnp.concatenate([batch.b, batch.y])
    )
    method = methods.SOTAlign(alpha=0.5, klot_on="all", **EXACT)
    got = evaluate(method, student, batch, teacher)
    np.testing.assert_allclose(
        got.metrics["klot"], oracle("klot", student, both, teacher), rtol=1e-4
    )
    assert method.init_memory(whole_pool(batch), N) == {}


def test_sotalign_klot_on_crossmodal_matches_klot_crossmodal(student, batch, teacher):
    method = methods.SOTAlign(alpha=0.5, klot_on="crossmodal", **EXACT)
    got = evaluate(method, student, batch, teacher)
    (f, g), (x, y) = features(student, batch)
    expected, _ = sotalign._klot_crossmodal(
        jnp.concatenate([f, x]),
        jnp.concatenate([g, y]),
        teacher.x(batch.x),
        teacher.y(batch.y),
        **EXACT,
    )
    np.testing.assert_allclose(got.metrics["klot"], expected, rtol=1e-5)
    np.testing.assert_allclose(got.loss, got.metrics["siglip"] + 0.5 * expected, rtol=1e-5)
    assert got.metrics["converged"]


def test_sotalign_streamed_with_negatives_and_divergence(student, batch, teacher):
    negatives = methods.SOTAlign(divergence="none", supervision="pairs+negatives")
    siglip = evaluate(negatives, student, batch).loss
    method = methods.SOTAlign(alpha=0.5, supervision="pairs+negatives", block_size=4, **EXACT)
    result = evaluate(method, student, batch, teacher)
    klot = oracle("klot", student, batch, teacher)
    np.testing.assert_allclose(result.metrics["klot"], klot, rtol=1e-4)
    np.testing.assert_allclose(result.loss, siglip + 0.5 * klot, rtol=1e-4)


def test_sail_ignores_pool_and_teacher(student, batch, teacher):
    moved = batch._replace(x=batch.x + 1.0, y=batch.y[:3])
    loss, metrics, memory, _, _ = evaluate(methods.SAIL(), student, batch)
    assert loss == evaluate(methods.SAIL(), student, moved, teacher).loss
    assert set(metrics) == {"siglip"}
    assert memory == {}
    np.testing.assert_allclose(
        loss, siglip_by_hand(student, *features(student, batch)[0]), rtol=1e-5
    )


def test_sail_per_row_norm_is_mean_times_the_number_of_pairs(student, batch):
    mean = evaluate(methods.SAIL(), student, batch).loss
    per_row = evaluate(methods.SAIL(siglip_norm="per_row"), student, batch).loss
    np.testing.assert_allclose(per_row, PAIRS * mean, rtol=1e-5)


def test_sotalign_bistochastic_marginals_multiply_klot_by_n(student, batch, teacher):
    square = batch._replace(x=batch.x[:M])
    method = methods.SOTAlign(marginals="bistochastic", siglip_norm="per_row", **EXACT)
    metrics = evaluate(method, student, square, teacher).metrics
    expected = M * oracle("klot", student, square, teacher)
    np.testing.assert_allclose(metrics["klot"], expected, rtol=1e-4)
    with pytest.raises(checks.InputError, match="marginals"):
        evaluate(method, student, batch, teacher)


@pytest.mark.parametrize(
    ("marginals", "siglip_norm"), [("prob", "per_row"), ("bistochastic", "mean")]
)
def test_sotalign_warns_of_unbalanced_conventions(marginals, siglip_norm):
    with pytest.warns(UserWarning, match="pair 'prob' with 'mean'") as caught:
        methods.SOTAlign(marginals=marginals, siglip_norm=siglip_norm)
    assert caught[0].filename == __file__  # the warning points at the caller
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        methods.SOTAlign(marginals="bistochastic", siglip_norm="per_row")


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("sotalign", {"divergence": "kl"}, r"divergence.* 'kl'"),
        ("sotalign", {"supervision": "all"}, r"supervision.* 'all'"),
        ("sotalign", {"klot_on": "pairs"}, r"klot_on.* 'pairs'"),
        ("sotalign", {"klot_on": "all", "divergence": "cka"}, r"klot_on.* 'cka'"),
        ("sotalign", {"klot_on": "crossmodal", "block_size": 8}, r"block_size.* 8"),
        ("sail", {"supervision": "all"}, r"supervision.* 'all'"),
        ("sotalign", {"marginals": "uniform"}, r"marginals.* 'uniform'"),
        ("sotalign", {"siglip_norm": "sum"}, r"siglip_norm.* 'sum'"),
        ("sail", {"siglip_norm": "sum"}, r"siglip_norm.* 'sum'"),
        ("sotalign", {"alpha": -1.0}, r"alpha.* -1.0"),
        ("sotalign", {"alpha": float("nan")}, r"alpha.* nan"),
        ("sotalign", {"epsilon": 0.0}, r"epsilon.* 0.0"),
        ("sotalign", {"epsilon_star": -0.1}, r"epsilon_star.* -0.1"),
    ],
)
def test_sotalign_and_sail_reject_bad_options(method, options, message):
    with pytest.raises(checks.InputError, match=message):
        dataclasses.replace(methods.METHODS[method], **options)


def test_methods_are_frozen_and_comparable():
    method = methods.SOTAlign(alpha=1e-3)
    assert dataclasses.replace(method, alpha=1e-4) == methods.SOTAlign()
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.alpha = 1.0


def whole_pool(batch):
    return sampling.DeviceData(batch.a, batch.b, batch.x, batch.y)


def test_sotalign_start_keeps_memory_only_for_whole_pool_batches(batch):
    data = whole_pool(batch)
    assert set(methods.SOTAlign().init_memory(data, N)) == {"v", "v_star"}
    assert methods.SOTAlign().init_memory(data, N - 1) == {}  # M fits, N does not
    assert methods.SOTAlign(divergence="cka").init_memory(data, N) == {}
    assert methods.SAIL().init_memory(data, N) == {}


def test_sotalign_solves_the_teacher_once_for_whole_pool_batches(student, batch, teacher):
    method = methods.SOTAlign(alpha=1.0, **EXACT)
    memory = method.init_memory(whole_pool(batch), N)
    first = evaluate(method, student, batch, teacher, memory)
    second = evaluate(method, student, batch, teacher, first.memory)
    assert first.metrics["teacher_iterations"] > 1
    assert second.metrics["teacher_iterations"] == 1
    assert second.metrics["student_iterations"] == 1
    assert jax.tree.map(jnp.shape, second.memory) == {"v": (M,), "v_star": (M,)}
    klot = oracle("klot", student, batch, teacher)
    for result in (first, second):
        np.testing.assert_allclose(result.metrics["klot"], klot, rtol=1e-4)


def test_sotalign_metrics_report_teacher_convergence(student, batch, teacher):
    method = methods.SOTAlign(max_iterations=3, tolerance=1e-6)
    metrics = evaluate(method, student, batch, teacher).metrics
    assert metrics["teacher_iterations"] <= 3
    assert metrics["teacher_error"] > 1e-6
    assert metrics["teacher_status"] == Status.OUT_OF_ITERATIONS and not metrics["converged"]
