"""Tests of KLOT and other divergences: values, gradients, memory and bad arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from sotalign_jax import checks, losses
from sotalign_jax.ot import affinity, blocks, device
from sotalign_jax.ot import klot as klot_lib
from sotalign_jax.ot.solver import Status

K = [[0.6, 0.1, -0.2], [0.0, 0.5, 0.3], [0.2, -0.1, 0.4]]
K_STAR = [[0.5, 0.45, 0.0], [0.1, 0.2, 0.35], [0.3, 0.0, 0.1]]
N, M = 16, 20
EPSILON, EPSILON_STAR = 0.2, 0.1


def features(*shapes, dtype=None):
    rng = np.random.default_rng(1)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def cosines(n=N, m=N):
    f, g, f_star, g_star = features((n, 5), (m, 5), (n, 7), (m, 7))
    return affinity.cosine(f, g), affinity.cosine(f_star, g_star)


@functools.cache
def value_and_gradient(marginals):
    loss = functools.partial(klot_lib.klot, marginals=marginals)
    return jax.jit(jax.value_and_grad(loss))


def exact(
    k, k_star, *, epsilon=EPSILON, epsilon_star=EPSILON_STAR, log_a=None, log_b=None, **options
):
    """Computes value and gradient of converged plans. Compiles once per shape."""
    n, m = k.shape
    return value_and_gradient(options.get("marginals", "prob"))(
        k,
        k_star,
        epsilon=epsilon,
        epsilon_star=epsilon_star,
        tolerance=1e-12,
        log_a=jnp.full(n, -jnp.log(n)) if log_a is None else log_a,
        log_b=jnp.full(m, -jnp.log(m)) if log_b is None else log_b,
    )


@functools.cache
def compiled_from_embeddings(block_size):
    loss = functools.partial(klot_lib.klot_from_embeddings, block_size=block_size)
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def from_embeddings(
    arrays, *, block_size=None, epsilon=EPSILON, epsilon_star=EPSILON_STAR, tolerance
):
    return compiled_from_embeddings(block_size)(
        *arrays, epsilon=epsilon, epsilon_star=epsilon_star, tolerance=tolerance
    )


def central_difference(loss, x, direction, step=1e-4):
    """Computes a directional derivative to fourth order in the step."""

    def difference(h):
        return (loss(x + h * direction) - loss(x - h * direction)) / (2 * h)

    return (4 * difference(step) - difference(2 * step)) / 3


# ------------------------------------------------------------------- golden values


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("options", "value", "slope"),
    [
        ({"epsilon_star": 0.05}, 4.903465931862673, 5.699006111146208),
        ({"epsilon_star": 0.05, "symmetric": False}, 4.903472266462736, 5.678451944016244),
        ({"epsilon_star": 0.05, "iterations": 2}, 4.612686291281675, 4.948400786879906),
        ({}, 5.983270160631753, None),
    ],
)
def test_klot_reference_golden_values(x64, options, value, slope):
    loss = functools.partial(klot_lib.klot_reference, **options)
    ours, gradient = jax.value_and_grad(loss)(jnp.array(K), jnp.array(K_STAR))
    np.testing.assert_allclose(ours, value, rtol=1e-13)
    if slope is not None:
        np.testing.assert_allclose(gradient[0, 0], slope, rtol=1e-13)


@pytest.mark.numerics
def test_klot_matches_the_converged_reference(x64):
    k, k_star = cosines()
    reference = functools.partial(klot_lib.klot_reference, iterations=3000)
    options = {"epsilon": EPSILON, "epsilon_star": EPSILON_STAR}
    value, gradient = jax.jit(jax.value_and_grad(reference))(k, k_star, **options)
    ours, our_gradient = exact(k, k_star)
    np.testing.assert_allclose(ours, value, rtol=1e-10)
    np.testing.assert_allclose(our_gradient, gradient, rtol=1e-8, atol=1e-11)


def test_infonce_divergence_golden_value(x64):
    value = losses.infonce_divergence(
        jnp.array(K), jnp.array(K_STAR), epsilon_star=0.05, symmetric=False
    )
    np.testing.assert_allclose(value, 3.2003793801462144, rtol=1e-14)


# ------------------------------------------------------------------- the gradient is exact


def test_klot_gradient_matches_finite_differences(rng, x64):
    k, k_star = cosines()
    _, gradient = exact(k, k_star)
    for _ in range(3):
        direction = rng.normal(size=k.shape)
        slope = central_difference(lambda k: exact(k, k_star)[0], k, direction)
        np.testing.assert_allclose(jnp.sum(gradient * direction), slope, rtol=1e-8)


@pytest.mark.numerics
def test_klot_from_embeddings_gradient_matches_finite_differences(x64):
    rng = np.random.default_rng(7)  # another seed, because the loss is constant along the features
    f, g, *teacher = features((N, 5), (M, 5), (N, 7), (M, 7))
    solve = functools.partial(from_embeddings, tolerance=1e-12)
    _, (df, dg) = solve((f, g, *teacher))
    direction = rng.normal(size=f.shape)
    slope = central_difference(lambda f: solve((f, g, *teacher))[0], f, direction)
    np.testing.assert_allclose(jnp.sum(df * direction), slope, rtol=1e-8)
    direction = rng.normal(size=g.shape)
    slope = central_difference(lambda g: solve((f, g, *teacher))[0], g, direction)
    np.testing.assert_allclose(jnp.sum(dg * direction), slope, rtol=1e-8)


# ------------------------------------------------------------------- properties of klot


def test_klot_bistochastic_is_n_times_prob(x64):
    k, k_star = cosines()
    value, gradient = exact(k, k_star)
    n_value, n_gradient = exact(k, k_star, marginals="bistochastic")
    np.testing.assert_allclose(n_value, N * value, rtol=1e-14)
    np.testing.assert_allclose(n_gradient, N * gradient, rtol=1e-14)


def test_klot_is_positive_and_zero_only_at_the_teacher(x64):
    k, k_star = cosines()
    assert exact(k, k_star)[0] > 0
    assert exact(k_star, k)[0] > 0
    value, gradient = exact(k, k, epsilon=EPSILON, epsilon_star=EPSILON)
    np.testing.assert_allclose(value, 0.0, atol=1e-12)
    np.testing.assert_allclose(gradient, 0.0, atol=1e-11)


def test_klot_ignores_shifts_of_rows_and_columns(rng, x64):
    k, k_star = cosines()
    shift = rng.normal(size=(N, 1)) + rng.normal(size=N)
    value, gradient = exact(k, k_star)
    for shifted in (exact(k + shift, k_star), exact(k, k_star + shift)):
        np.testing.assert_allclose(shifted[0], value, rtol=1e-10)
        np.testing.assert_allclose(shifted[1], gradient, atol=1e-10)


def test_klot_with_padding_matches_the_smaller_problem(x64):
    k, k_star = cosines()
    log_a = jnp.full(N, -jnp.inf).at[:9].set(-jnp.log(9.0))
    log_b = jnp.full(N, -jnp.inf).at[:11].set(-jnp.log(11.0))
    value, gradient = exact(k, k_star, log_a=log_a, log_b=log_b)
    reference = functools.partial(klot_lib.klot_reference, iterations=3000)
    small_value, small_gradient = jax.jit(jax.value_and_grad(reference))(
        k[:9, :11], k_star[:9, :11], epsilon=EPSILON, epsilon_star=EPSILON_STAR
    )
    np.testing.assert_allclose(value, small_value, rtol=1e-9)
    np.testing.assert_allclose(gradient[:9, :11], small_gradient, atol=1e-9)
    assert jnp.sum(jnp.abs(gradient[9:])) == jnp.sum(jnp.abs(gradient[:, 11:])) == 0


def test_klot_gives_no_gradient_to_the_teacher():
    assert not jax.jit(jax.grad(klot_lib.klot, argnums=1))(jnp.array(K), jnp.array(K_STAR)).any()
    f, *rest = features((N, 3), (M, 3), (N, 4), (M, 4))
    slopes = jax.jit(jax.grad(klot_lib.klot_from_embeddings, argnums=(2, 3)))
    assert not any(slope.any() for slope in slopes(f, *rest))


def test_klot_aux_reports_and_restarts_both_solves(x64):
    k, k_star = cosines()
    loss = jax.jit(functools.partial(klot_lib.klot, return_aux=True, tolerance=1e-6))
    unknown = jnp.full(N, jnp.nan)
    value, aux = loss(k, k_star, init_v=(unknown, unknown))
    assert aux.student.error <= 1e-6 and aux.teacher.error <= 1e-6
    assert 1 < aux.student.iterations < aux.teacher.iterations
    p = jnp.exp(k / 0.05 + aux.student.u[:, None] + aux.student.v)
    np.testing.assert_allclose(p.sum(1), 1 / N, atol=1e-6)
    again, restarted = loss(k, k_star, init_v=(aux.student.v, aux.teacher.v))
    assert restarted.student.iterations == restarted.teacher.iterations == 1
    np.testing.assert_allclose(again, value, rtol=1e-5)


# ------------------------------------------------------------------- from embeddings


def with_tiny_weights(dtype, n=48):
    """Returns an affinity with hub columns, and log-weights that span 30 decades."""
    rng = np.random.default_rng(0)
    k = rng.uniform(-1, 1, (n, n))
    k[:, :2] += 5
    a, b = np.full(n, 1e-12), np.ones(n)
    a[rng.integers(n)] = 1
    b[rng.uniform(size=n) < 0.5] = 1e-30
    logs = np.log(a / a.sum()), np.log(b / b.sum())
    return k.astype(dtype), *(x.astype(dtype) for x in logs)


@pytest.mark.numerics
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-9), (np.float32, 1e-4)])
def test_klot_reports_the_error_of_the_potentials_it_returns(x64, dtype, tolerance):
    k, log_a, log_b = with_tiny_weights(dtype)
    given = {"epsilon": dtype(2e-3), "epsilon_star": dtype(2e-3), "tolerance": dtype(tolerance)}
    _, aux = jax.jit(functools.partial(klot_lib.klot, return_aux=True))(
        k, k, log_a=log_a, log_b=log_b, **given
    )
    for plan in aux:
        logs = k.astype(np.float64) / 2e-3 + np.asarray(plan.u, np.float64)[:, None]
        matrix = np.exp(logs + np.asarray(plan.v, np.float64))
        error = max(
            np.abs(matrix.sum(axis) - np.exp(np.float64(log))).sum()
            for axis, log in ((1, log_a), (0, log_b))
        )
        # Potentials of 2,500 have three digits after the point in float32.
        assert plan.converged and error <= tolerance + (5e-4 if dtype == np.float32 else 1e-12)


@pytest.mark.numerics
def test_klot_gradient_of_float16_rows_of_tiny_norm_is_finite(rng):
    f, g = rng.normal(size=(2, 8, 4)).astype(np.float16)
    f[0] *= 1e-7
    for loss in (klot_lib.klot_from_embeddings, lambda f, g, *_: affinity.cosine(f, g).sum()):
        value, gradient = jax.value_and_grad(loss)(f, g, g, f)
        assert jnp.isfinite(value) and jnp.isfinite(gradient).all()
        assert gradient.dtype == jnp.float16 and jnp.abs(gradient[0]).max() > 1


@pytest.mark.numerics
@pytest.mark.parametrize("block_size", [None, 6, 32])
def test_klot_from_embeddings_matches_klot_of_cosines(x64, block_size):
    """Covers stored cosines, blocks that do not divide the rows, and one larger block."""
    arrays = features((N, 5), (M, 5), (N, 7), (M, 7))
    k, pull = jax.vjp(affinity.cosine, *arrays[:2])
    value, gradient = exact(k, affinity.cosine(*arrays[2:]))
    ours, gradients = from_embeddings(arrays, block_size=block_size, tolerance=1e-12)
    np.testing.assert_allclose(ours, value, rtol=1e-10)
    for our, expected in zip(gradients, pull(gradient), strict=True):
        np.testing.assert_allclose(our, expected, atol=1e-10)


@pytest.mark.numerics
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kernels", [2, 1, 0.3])
def test_klot_from_embeddings_is_independent_of_storage(x64, monkeypatch, kernels, int8):
    """Covers memory for two kernels, for one kernel, and for only an int8 kernel."""
    monkeypatch.setattr(blocks, "INT8_ENTRIES", 1)
    arrays = features((N, 5), (M, 5), (N, 7), (M, 7))
    options = {"epsilon": 0.05, "epsilon_star": 0.01, "tolerance": 1e-5}
    value, gradients = from_embeddings(arrays, **options)
    room = (kernels + 0.25) * 4 * N * M
    profile = device.Profile("test", memory=int(2 * room), int8=int8)
    stored = blocks.storage(N, M, jnp.float32, profile)
    assert (stored.block_size is None, stored.both) == (kernels >= 1, kernels == 2)
    assert stored.int8 == int8
    with device.compiling_for(profile):
        loss = functools.partial(klot_lib.klot_from_embeddings, **options)
        ours, our_gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(
            *(x.astype(jnp.float32) for x in arrays)
        )
    np.testing.assert_allclose(ours, value, rtol=1e-4)
    for our, expected in zip(our_gradients, gradients, strict=True):
        assert np.linalg.norm(our - expected) < 1e-3 * np.linalg.norm(expected)


@pytest.mark.numerics
@pytest.mark.parametrize("block_size", [None, 6])
def test_klot_from_embeddings_in_float32_is_close_to_float64(x64, block_size):
    arrays = features((N, 5), (M, 5), (N, 7), (M, 7))
    narrow = [x.astype(jnp.float32) for x in arrays]
    options = {"epsilon": 0.05, "epsilon_star": 0.02, "tolerance": 1e-5, "block_size": block_size}
    value, gradients = from_embeddings(arrays, **options)
    ours, our_gradients = from_embeddings(narrow, **options)
    assert ours.dtype == our_gradients[0].dtype == jnp.float32
    np.testing.assert_allclose(ours, value, rtol=1e-4)
    for our, expected in zip(our_gradients, gradients, strict=True):
        assert np.linalg.norm(our - expected) < 1e-3 * np.linalg.norm(expected)


def test_klot_from_embeddings_gradients_keep_half_precision():
    arrays = features((4, 3), (4, 3), (4, 2), (4, 2), dtype=jnp.bfloat16)
    value, gradients = jax.eval_shape(compiled_from_embeddings(None), *arrays)
    assert value.dtype == jnp.float32
    assert all(gradient.dtype == jnp.bfloat16 for gradient in gradients)


def test_klot_from_embeddings_streamed_with_weights_and_warm_start(x64):
    """Weights and warm starts behave as in `klot`, although blocks are padded."""
    arrays = features((N, 5), (M, 5), (N, 7), (M, 7))
    log_a = jnp.log(jnp.arange(1.0, N + 1) / (N * (N + 1) / 2))
    k, k_star = affinity.cosine(*arrays[:2]), affinity.cosine(*arrays[2:])
    loss = functools.partial(
        klot_lib.klot_from_embeddings, block_size=6, return_aux=True, tolerance=1e-10
    )
    loss = jax.jit(functools.partial(loss, log_a=log_a, epsilon=EPSILON, epsilon_star=EPSILON_STAR))
    value, aux = loss(*arrays, init_v=(jnp.zeros(M), jnp.zeros(M)))
    np.testing.assert_allclose(value, exact(k, k_star, log_a=log_a)[0], rtol=1e-8)
    assert aux.student.u.shape == (N,) and aux.student.v.shape == (M,)
    again, restarted = loss(*arrays, init_v=(aux.student.v, aux.teacher.v))
    assert restarted.student.iterations == restarted.teacher.iterations == 1
    np.testing.assert_allclose(again, value, rtol=1e-8)


def hard_features(n, m, d=8):
    """Yields features on which solvers tend to stall, overflow or lose digits."""
    rng = np.random.default_rng(0)
    f, g = rng.normal(size=(n, d)), rng.normal(size=(m, d))
    yield "random", f, g
    centres = rng.normal(size=(3, d))
    rows, columns = centres[rng.integers(0, 3, n)], centres[np.minimum(rng.integers(0, 5, m), 2)]
    yield "clustered", rows + 0.05 * f, columns + 0.05 * g
    yield "duplicated", f[np.arange(n) % (n // 2)], g[np.arange(m) % (m // 3)]
    yield "near a permutation", g[rng.permutation(m)[:n]] + 1e-3 * f, g
    yield "constant", np.ones((n, d)), np.ones((m, d))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-4), (np.float64, 1e-6)])
def test_klot_from_embeddings_on_hard_features_agrees_in_all_modes(x64, dtype, tolerance):
    @jax.jit
    def dense(f, g, z, w, **options):
        def loss(f, g):
            return klot_lib.klot(affinity.cosine(f, g), affinity.cosine(z, w), **options)

        return jax.value_and_grad(loss, argnums=(0, 1))(f, g)

    problems = list(hard_features(16, 20))
    for (name, *student), (other, *teacher) in zip(problems, problems[1:] + problems, strict=False):
        arrays = [jnp.asarray(x, dtype) for x in (*student, *teacher)]
        for epsilon, epsilon_star in ((1e-3, 1e-3), (0.05, 0.005), (1.0, 1.0)):
            case = f"{name}, teacher {other}, epsilon={epsilon}"
            options = {"epsilon": epsilon, "epsilon_star": epsilon_star, "tolerance": tolerance}
            value, gradients = dense(*arrays, **options)
            for block_size in (None, 6):
                ours, our_gradients = from_embeddings(arrays, block_size=block_size, **options)
                assert abs(ours - value) < tolerance / epsilon, case
                for our, expected in zip(our_gradients, gradients, strict=True):
                    assert jnp.isfinite(our).all(), case
                    assert epsilon * jnp.linalg.norm(our - expected) < tolerance, case


@pytest.mark.numerics
def test_klot_from_embeddings_cancels_large_potentials():
    """K/epsilon is 1000, so that float32 rounding adds 6e-5 to the mass of a streamed plan."""
    arrays = [jnp.ones((N, 8)), jnp.ones((M, 8))] * 2
    options = {"epsilon": 1e-3, "epsilon_star": 1e-3, "tolerance": 1e-4}
    for block_size in (None, 6):
        assert abs(from_embeddings(arrays, block_size=block_size, **options)[0]) < 1e-3


def test_klot_from_embeddings_ignores_row_norms_and_zero_rows(x64):
    f, g, z, w = features((N, 5), (M, 5), (N, 7), (M, 7), dtype=jnp.float32)
    options = {"tolerance": 1e-5}
    value, (gradient, _) = from_embeddings((f, g, z, w), **options)
    for scale in (1e20, 1e-25):
        scaled, (slope, _) = from_embeddings((f * jnp.float32(scale), g, z, w), **options)
        np.testing.assert_allclose(scaled, value, rtol=1e-5)
        np.testing.assert_allclose(slope * jnp.float32(scale), gradient, rtol=1e-2, atol=1e-4)
    _, (gradient, _) = from_embeddings((f.at[2].set(0.0), g, z, w), **options)
    assert not gradient[2].any() and jnp.isfinite(gradient).all()


@pytest.mark.parametrize("bad", ["student", "teacher"])
def test_klot_from_embeddings_propagates_nan(x64, bad):
    f, g, z, w = features((N, 5), (M, 5), (N, 7), (M, 7))
    f, z = (f * jnp.nan, z) if bad == "student" else (f, z * jnp.nan)
    assert jnp.isnan(from_embeddings((f, g, z, w), tolerance=1e-12)[0])


# ------------------------------------------------------------------- memory


def test_klot_from_embeddings_keeps_no_matrix_for_the_backward_pass():
    n, d = 64, 4
    arrays = features((n, d), (n, d), (n, d), (n, d), dtype=jnp.float32)
    for block_size in (None, 16):
        loss = functools.partial(klot_lib.klot_from_embeddings, block_size=block_size)
        pull = jax.eval_shape(lambda *arrays, loss=loss: jax.vjp(loss, *arrays)[1], *arrays)
        kept = [leaf.size for leaf in jax.tree.leaves(pull)]
        assert kept and max(kept) <= n * d


def temporary_matrices(n, d, block_size=None, teacher_width=None):
    """Returns the temporary memory of loss and gradient in units of one n x n matrix."""
    shape, star = (
        jax.ShapeDtypeStruct((n, width), jnp.float32) for width in (d, teacher_width or d)
    )
    loss = functools.partial(klot_lib.klot_from_embeddings, block_size=block_size)
    loss = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    compiled = loss.lower(shape, shape, star, star).compile()
    return compiled.memory_analysis().temp_size_in_bytes / (4 * n * n)


@pytest.mark.numerics
def test_klot_from_embeddings_memory_follows_storage():
    # In addition to the kernels, a few blocks take 1/8 of a matrix each and features 1/32.
    assert 2 < temporary_matrices(8192, 256) < 2.75
    with device.compiling_for(device.Profile("accelerator", int8=False, memory=3 * 4 * 8192**2)):
        assert 1 < temporary_matrices(8192, 256) < 1.75
    assert temporary_matrices(8192, 256, block_size=128) < 0.15


# ------------------------------------------------------------------- CKA and InfoNCE


def brute_force_cka(k, k_star):
    def centring(n):
        return np.eye(n) - np.ones((n, n)) / n

    n, m = k.shape
    x, y = (centring(n) @ np.asarray(matrix) @ centring(m) for matrix in (k, k_star))
    return 1 - (x * y).sum() / (np.linalg.norm(x) * np.linalg.norm(y))


@pytest.mark.numerics
@pytest.mark.parametrize("m", [N, M])
def test_cka_and_cka_from_embeddings_match_brute_force(x64, m):
    arrays = features((N, 5), (m, 5), (N, 7), (m, 7))
    k, k_star = affinity.cosine(*arrays[:2]), affinity.cosine(*arrays[2:])
    expected = brute_force_cka(k, k_star)
    np.testing.assert_allclose(losses.cka(k, k_star), expected, rtol=1e-12)
    np.testing.assert_allclose(losses.cka_from_embeddings(*arrays), expected, rtol=1e-12)

    def dense(f, g):
        return losses.cka(affinity.cosine(f, g), k_star)

    gradients = jax.jit(jax.grad(losses.cka_from_embeddings, argnums=(0, 1)))(*arrays)
    expected = jax.jit(jax.grad(dense, argnums=(0, 1)))(*arrays[:2])
    for ours, dense_gradient in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(ours, dense_gradient, atol=1e-13)


def test_cka_ignores_shift_and_positive_scale(x64):
    k, k_star = cosines()
    np.testing.assert_allclose(losses.cka(k, 3 * k + 1), 0.0, atol=1e-14)
    np.testing.assert_allclose(losses.cka(k, -k), 2.0, atol=1e-14)
    check_grads(lambda k: losses.cka(k, k_star), (k,), order=1, modes=["rev"])
    assert not jax.grad(losses.cka, argnums=1)(k, k_star).any()


def test_infonce_divergence_gradient_is_difference_of_softmaxes(x64):
    k, k_star = cosines()
    loss = functools.partial(losses.infonce_divergence, symmetric=False)
    gradient = jax.grad(loss)(k, k_star)
    difference = jax.nn.softmax(k / 0.05) - jax.nn.softmax(k_star / 0.005)
    np.testing.assert_allclose(gradient, difference / (N * 0.05), atol=1e-13)
    assert not jax.grad(losses.infonce_divergence, argnums=1)(k, k_star).any()


def test_infonce_divergence_symmetric_is_mean_of_directions(x64):
    k, k_star = cosines()
    rows = losses.infonce_divergence(k, k_star, symmetric=False)
    columns = losses.infonce_divergence(k.T, k_star.T, symmetric=False)
    np.testing.assert_allclose(
        losses.infonce_divergence(k, k_star), (rows + columns) / 2, rtol=1e-14
    )


def test_infonce_divergence_hard_targets_are_the_limit_of_soft(x64):
    k, k_star = cosines()
    hard = losses.infonce_divergence(k, k_star, targets="hard")
    soft = losses.infonce_divergence(k, k_star, epsilon_star=1e-5)
    np.testing.assert_allclose(soft, hard, rtol=1e-10)


# ------------------------------------------------------------------- errors


def klot_on_features(f, g):
    return klot_lib.klot_from_embeddings(f, g, f, g)


def klot_on_affinity(k, k_star):
    return klot_lib.klot(k, k_star)


@pytest.mark.parametrize("loss", [klot_on_affinity, klot_on_features])
def test_klot_rejects_higher_and_forward_derivatives(loss):
    x = jnp.eye(3)
    with pytest.raises(TypeError, match=r"klot.* reverse mode"):
        jax.eval_shape(jax.grad(lambda x: jax.grad(loss)(x, 2 * x).sum()), x)
    with pytest.raises(TypeError, match=r"klot.* reverse mode"):
        jax.eval_shape(jax.hessian(loss), x, x)
    with pytest.raises(TypeError, match=r"klot.* reverse mode"):
        jax.jvp(lambda x: loss(x, x), (x,), (x,))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: klot_lib.klot(jnp.eye(3), jnp.eye(4)), r"K_star .*\(4, 4\)"),
        (lambda: klot_lib.klot(jnp.ones(3), jnp.ones(3)), r"K .*\(3,\)"),
        (lambda: klot_lib.klot(jnp.ones((0, 2)), jnp.ones((0, 2))), r"K .*\(0, 2\)"),
        (lambda: klot_lib.klot(jnp.eye(3), jnp.eye(3), epsilon=0), r"epsilon.* 0"),
        (lambda: klot_lib.klot(jnp.eye(3), jnp.eye(3), epsilon_star=-1), r"epsilon_star.* -1"),
        (lambda: klot_lib.klot(jnp.eye(3), jnp.eye(3), marginals="rows"), r"marginals.* 'rows'"),
        (
            lambda: klot_lib.klot(jnp.ones((2, 3)), jnp.ones((2, 3)), marginals="bistochastic"),
            "marginals.* 2 x 3",
        ),
        (
            lambda: klot_lib.klot(jnp.eye(3), jnp.eye(3), log_a=jnp.zeros(2)),
            r"log_a .*\(2,\)",
        ),
        (
            lambda: klot_lib.klot(jnp.eye(3), jnp.eye(3), init_v=(jnp.zeros(2), jnp.zeros(3))),
            r"init_v .*\(2,\)",
        ),
        (
            lambda: klot_lib.klot(jnp.eye(3), jnp.eye(3), init_v=jnp.zeros(3)),
            r"init_v.* ArrayImpl",
        ),
        (
            lambda: klot_lib.klot_from_embeddings(*features((3, 2), (3, 2), (4, 2), (3, 2))),
            r"f_star .*4 rows",
        ),
        (
            lambda: klot_lib.klot_from_embeddings(*features((3, 2), (3, 2), (3, 2), (5, 2))),
            r"g_star .*5 rows",
        ),
        (
            lambda: klot_lib.klot_from_embeddings(*features((3, 2), (3, 4), (3, 2), (3, 2))),
            "g .*width 4",
        ),
        (
            lambda: klot_lib.klot_from_embeddings(*features((3, 2), (3, 2), (3, 2), (3, 1))),
            "g_star .*width 1",
        ),
        (
            lambda: klot_lib.klot_from_embeddings(*features((3, 2), (0, 2), (3, 2), (0, 2))),
            r"g .*\(0, 2\)",
        ),
        (
            lambda: klot_lib.klot_from_embeddings(*features(*[(3, 2)] * 4), block_size=0),
            r"block_size.* 0",
        ),
        (
            lambda: losses.infonce_divergence(jnp.eye(3), jnp.eye(3), targets="firm"),
            r"targets.* 'firm'",
        ),
    ],
)
def test_losses_reject_bad_arguments(call, message):
    with pytest.raises(checks.InputError, match=message):
        call()


def test_klot_propagates_nan_affinities():
    nan = jnp.full((3, 3), jnp.nan)
    for k, k_star in (
        (nan, jnp.eye(3)),
        (jnp.eye(3), nan),
        (jnp.eye(3).at[0, 1].set(jnp.nan), nan),
    ):
        value, aux = klot_lib.klot(k, k_star, max_iterations=5, return_aux=True)
        assert jnp.isnan(value) and not aux.solved
        for plan, given in zip(aux, (k, k_star), strict=True):
            assert (plan.status == Status.NOT_FINITE) == jnp.isnan(given).any()


def test_klot_from_embeddings_ignores_values_in_padding(rng):
    f, g = (rng.normal(size=(5, 4)).astype(np.float32) for _ in range(2))
    weights = jnp.where(jnp.arange(5) < 4, -jnp.log(4.0), -jnp.inf)
    small = klot_lib.klot_from_embeddings(f[:4], g[:4], g[:4], f[:4])
    f[4], g[4] = np.nan, np.inf
    padded = functools.partial(klot_lib.klot_from_embeddings, log_a=weights, log_b=weights)
    value, gradient = jax.value_and_grad(padded)(f, g, g, f)
    np.testing.assert_allclose(value, small, rtol=1e-3)
    assert jnp.isfinite(gradient[:4]).all() and not gradient[4].any()


@pytest.mark.parametrize("divergence", [losses.cka, losses.infonce_divergence, klot_lib.klot])
def test_divergences_reject_affinities_of_other_shapes(divergence):
    with pytest.raises(checks.InputError, match=r"K_star .*\(1, 3\)"):
        divergence(jnp.eye(3), jnp.ones((1, 3)))
