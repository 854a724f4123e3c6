"""Tests of STRUCTURE: regularizer and loss."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads
from scipy.special import rel_entr, softmax

from sotalign_jax import checks, heads, losses, methods, sampling
from sotalign_jax.ot import affinity

D_X, D_Y, DIM, PAIRS, N, M = 7, 6, 4, 8, 12, 10
ORIGINAL = [[1.0, 0.0, 0.0], [0.8, 0.6, 0.0], [0.0, 1.0, 0.0], [0.0, 0.6, 0.8]]
ALIGNED = [[1.0, 0.0], [0.6, 0.8], [0.8, 0.6], [-0.6, 0.8]]
GOLDEN = {"code": 0.5557619727228821, "js": 0.14933743178780776}


def rows(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def by_hand(original, aligned, tau=0.07, levels=1, js_form="code", weights=(1.0, 1.0, 1.0)):
    """Computes the regularizer in float64, without a floor in the logarithms."""
    kinds = []
    for x in (original, aligned):
        unit = [row / np.sqrt(np.sum(row**2)) for row in np.asarray(x, np.float64)]
        e = np.array(unit) - np.mean(unit, axis=0)
        kinds.append(softmax(e @ e.T / tau, axis=1))
    n, total = len(original), 0.0
    for level in range(1, levels + 1):
        p, q = (np.linalg.matrix_power(k, level) for k in kinds)
        m = (p + q) / 2
        both = [(m, p), (m, q)] if js_form == "code" else [(p, m), (q, m)]
        total += weights[level - 1] * sum(rel_entr(a, b).sum() for a, b in both) / (2 * n)
    return total / levels


# ------------------------------------------------------------------- the regulariser


def regularizer(original, aligned, *, block_size=None, **options):
    return methods.Structure(block_size=block_size, **options).regularizer(original, aligned)


@pytest.mark.parametrize("block_size", [None, 3])
@pytest.mark.parametrize("js_form", ["code", "js"])
def test_regularizer_golden_values(x64, js_form, block_size):
    value = regularizer(
        jnp.array(ORIGINAL), jnp.array(ALIGNED), js_form=js_form, block_size=block_size
    )
    np.testing.assert_allclose(value, GOLDEN[js_form], rtol=0, atol=1e-12)


@pytest.mark.parametrize("js_form", ["code", "js"])
@pytest.mark.parametrize(
    ("levels", "level_weights"), [(1, "none"), (2, "none"), (2, "inverse"), (3, "inverse")]
)
def test_regularizer_matches_numpy_formula(x64, levels, level_weights, js_form):
    original, aligned = rows(0, 9, 5), rows(1, 9, 3)
    value = regularizer(
        original, aligned, tau=0.3, levels=levels, js_form=js_form, level_weights=level_weights
    )
    weights = (1.0, 1 / 2, 1 / 3) if level_weights == "inverse" else (1.0, 1.0, 1.0)
    expected = by_hand(original, aligned, 0.3, levels, js_form, weights)
    np.testing.assert_allclose(value, expected, rtol=1e-9)


def test_regularizer_is_invariant_to_rotation_and_scale(x64):
    original, aligned = rows(0, 9, 5), rows(1, 9, 5)
    turn = np.linalg.qr(rows(2, 5, 5))[0]
    value = regularizer(original, aligned)
    for same in (aligned @ turn, 7.0 * aligned, aligned * rows(3, 9, 1) ** 2):
        np.testing.assert_allclose(regularizer(original, same), value, rtol=1e-9)


def test_regularizer_js_form_is_bounded_and_code_form_is_not():
    # Two tight groups whose members are mixed after alignment.
    group = np.repeat([[1.0, 0.0], [-1.0, 0.0]], 8, axis=0)
    other = np.tile([[1.0, 0.0], [-1.0, 0.0]], (8, 1))
    options = {"tau": 0.05}
    assert regularizer(group, other, js_form="js", **options) <= np.log(2)
    assert regularizer(group, other, js_form="code", **options) > 4 * np.log(2)


@pytest.mark.parametrize("js_form", ["code", "js"])
@pytest.mark.parametrize(("levels", "block_size"), [(1, None), (2, None), (1, 4)])
def test_regularizer_gradient_matches_finite_differences(x64, js_form, levels, block_size):
    original = jnp.asarray(rows(0, 6, 5))

    @jax.jit
    def value(aligned):
        return regularizer(
            original, aligned, tau=0.3, levels=levels, js_form=js_form, block_size=block_size
        )

    check_grads(value, (jnp.asarray(rows(1, 6, 3)),), order=1, modes=["rev"])


@pytest.mark.parametrize("js_form", ["code", "js"])
@pytest.mark.parametrize("block_size", [1, 5, 16, 50])
def test_regularizer_in_blocks_matches_one_block(x64, block_size, js_form):
    original, aligned = jnp.asarray(rows(0, 16, 5)), jnp.asarray(rows(1, 16, 3))

    def both(block_size):
        def value(original, aligned):  # checks a cotangent other than 1
            return 3.0 * regularizer(original, aligned, js_form=js_form, block_size=block_size)

        return jax.jit(jax.value_and_grad(value, argnums=(0, 1)))(original, aligned)

    value, (to_original, to_aligned) = both(block_size)
    expected, (_, gradient) = both(None)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    np.testing.assert_allclose(to_aligned, gradient, atol=1e-12 * np.abs(gradient).max())
    np.testing.assert_array_equal(to_original, 0.0)  # the original rows are frozen
    alone = regularizer(original, aligned, js_form=js_form, block_size=block_size)
    np.testing.assert_allclose(3.0 * alone, expected, rtol=1e-12)


def test_regularizer_in_blocks_saves_memory():
    n, d = 2048, 64

    def temporaries(block_size):
        """Returns the temporary memory of value and gradient in units of one n x n matrix."""
        value = functools.partial(regularizer, block_size=block_size)
        shape = jax.ShapeDtypeStruct((n, d), jnp.float32)
        compiled = jax.jit(jax.value_and_grad(value, argnums=1)).lower(shape, shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes / (4 * n * n)

    # Blocks and features take 1/32 of a matrix each.
    assert temporaries(None) > 3.0
    assert temporaries(64) < 0.5


def test_regularizer_keeps_no_matrix_for_the_backward_pass():
    n, d = 64, 4
    original, aligned = jnp.ones((n, d)), jnp.ones((n, d))
    loss = functools.partial(regularizer, original, block_size=16)
    pull = jax.eval_shape(lambda aligned: jax.vjp(loss, aligned)[1], aligned)
    kept = [leaf.size for leaf in jax.tree.leaves(pull)]
    assert kept and max(kept) <= n * d


@pytest.mark.parametrize("js_form", ["code", "js"])
@pytest.mark.parametrize("block_size", [None, 4])
def test_regularizer_gradient_is_finite_for_degenerate_rows(js_form, block_size):
    # Covers P == Q, probabilities that underflow, equal rows and zero rows.
    same = jnp.asarray(rows(0, 9, 5), jnp.float32)
    far = jnp.repeat(jnp.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]]), 3, axis=0)
    for original, aligned in ((same, same), (same, far), (far, same), (same, 0.0 * same)):
        value, gradient = jax.value_and_grad(regularizer, argnums=1)(
            original, aligned, tau=0.01, js_form=js_form, block_size=block_size
        )
        assert np.isfinite(value) and value >= 0.0
        assert np.all(np.isfinite(gradient))
        if original is aligned:
            np.testing.assert_allclose(value, 0.0, atol=1e-6)
            np.testing.assert_allclose(gradient, 0.0, atol=1e-4)


def test_regularizer_computes_half_precision_in_float32():
    original, aligned = rows(0, 9, 5).astype(np.float16), rows(1, 9, 3).astype(np.float32)
    value = regularizer(original, aligned, tau=0.3)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, by_hand(original, aligned, tau=0.3), rtol=1e-5)


def test_regularizer_rejects_bad_js_form():
    with pytest.raises(checks.InputError, match=r"js_form.* 'kl'"):
        regularizer(jnp.ones((3, 2)), jnp.ones((3, 2)), js_form="kl")


# ------------------------------------------------------------------- the method


@pytest.fixture(scope="module")
def batch():
    shapes = (PAIRS, D_X), (PAIRS, D_Y), (N, D_X), (M, D_Y)
    arrays = [jnp.asarray(rows(seed, *shape), jnp.float32) for seed, shape in enumerate(shapes)]
    return sampling.Batch(*arrays, step=jnp.int32(1000))


@pytest.fixture(scope="module")
def student():
    return heads.build_heads(D_X, D_Y, DIM, seed=3)


@functools.partial(jax.jit, static_argnums=(0, 1))
def differentiate(method, graphdef, params, batch):
    def objective(params):
        return method(nnx.merge(graphdef, params), batch, None, {})

    return jax.value_and_grad(objective, has_aux=True)(params)


def evaluate(method, student, batch):
    (loss, (metrics, memory)), gradient = differentiate(method, *nnx.split(student), batch)
    assert memory == {}
    return loss, metrics, gradient


def regularizer_by_hand(student, batch, regularize_on, **options):
    total = 0.0
    for head, pairs, pool in ((student.x, batch.a, batch.x), (student.y, batch.b, batch.y)):
        chosen = {"pairs": [pairs], "unpaired": [pool], "all": [pairs, pool]}[regularize_on]
        original = np.concatenate(chosen)
        total += by_hand(original, head(original), **options) / 2
    return total


@pytest.mark.parametrize("regularize_on", ["pairs", "all", "unpaired"])
def test_structure_loss_is_infonce_plus_weighted_regularizer(regularize_on, student, batch):
    method = methods.Structure(weight=3.0, tau=0.2, regularize_on=regularize_on, block_size=5)
    loss, metrics, gradient = evaluate(method, student, batch)
    logits = affinity.cosine(student.x(batch.a), student.y(batch.b)) / 0.2
    infonce = np.mean([-np.log(np.diag(softmax(z, axis=1))) for z in (logits, logits.T)])
    regularizer = regularizer_by_hand(student, batch, regularize_on, tau=0.2)
    assert set(metrics) == {"infonce", "structure", "structure_weight"}
    np.testing.assert_allclose(metrics["infonce"], infonce, rtol=1e-5)
    np.testing.assert_allclose(metrics["structure"], regularizer, rtol=1e-4)
    np.testing.assert_allclose(loss, infonce + 3.0 * regularizer, rtol=1e-4)
    for head in (gradient["x"], gradient["y"]):
        assert all(np.any(leaf) for leaf in jax.tree.leaves(head))


def test_structure_passes_options_to_the_regularizer(student, batch):
    options = {"tau": 0.3, "levels": 2, "js_form": "js"}
    method = methods.Structure(contrastive="siglip", level_weights="inverse", **options)
    loss, metrics, _ = evaluate(method, student, batch)
    siglip = losses.siglip(student.x(batch.a), student.y(batch.b))
    regularizer = regularizer_by_hand(student, batch, "pairs", weights=(1.0, 0.5), **options)
    np.testing.assert_allclose(metrics["siglip"], siglip, rtol=1e-5)
    np.testing.assert_allclose(loss, siglip + 10.0 * regularizer, rtol=1e-4)


def test_structure_in_blocks_matches_one_block(student, batch):
    results = [
        evaluate(methods.Structure(regularize_on="all", block_size=size), student, batch)
        for size in (None, 7)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *results)


def test_structure_reads_the_pool_only_if_semi_supervised(student, batch):
    moved = batch._replace(x=batch.x[:, ::-1], y=batch.y[:, ::-1])
    alone, semi = methods.METHODS["structure"], methods.METHODS["structure_semi"]
    assert (alone.pools, semi.pools) == ("", "xy")
    assert evaluate(alone, student, batch)[0] == evaluate(alone, student, moved)[0]
    assert evaluate(semi, student, batch)[0] != evaluate(semi, student, moved)[0]
    empty = batch._replace(x=batch.x[:0], y=batch.y[:0])  # training passes empty pools
    assert evaluate(alone, student, empty)[0] == evaluate(alone, student, batch)[0]


@pytest.mark.parametrize(
    ("warmup", "weights"),
    [(500, {0: 0.0, 125: 2.5, 499: 9.98, 500: 10.0, 10_000: 10.0}), (0, {0: 10.0, 7: 10.0})],
)
def test_structure_weight_warms_up(warmup, weights, student, batch):
    method = methods.Structure(warmup=warmup)
    for step, weight in weights.items():
        loss, metrics, gradient = evaluate(method, student, batch._replace(step=jnp.int32(step)))
        np.testing.assert_allclose(metrics["structure_weight"], weight, rtol=1e-6)
        expected = metrics["infonce"] + weight * metrics["structure"]
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contrastive": "clip"}, r"contrastive.* 'clip'"),
        ({"regularize_on": "pool"}, r"regularize_on.* 'pool'"),
        ({"js_form": "kl"}, r"js_form.* 'kl'"),
        ({"level_weights": "1/l"}, r"level_weights.* '1/l'"),
        ({"weight": -1.0}, r"weight.* -1.0"),
        ({"weight": float("nan")}, r"weight.* nan"),
        ({"warmup": -1}, r"warmup.* -1"),
        ({"tau": 0.0}, r"tau.* 0.0"),
        ({"levels": 0}, r"levels.* 0"),
        ({"block_size": 0}, r"block_size.* 0"),
    ],
)
def test_structure_rejects_bad_options(options, message):
    with pytest.raises(checks.InputError, match=message):
        dataclasses.replace(methods.METHODS["structure"], **options)


def test_structure_accepts_every_value_of_its_grid():
    for name, values in methods.Structure.grid.items():
        for value in values:
            assert getattr(methods.Structure(**{name: value}), name) == value
