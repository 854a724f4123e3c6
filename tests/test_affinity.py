"""Tests of cosines, dot products and normalization, and of their precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics.pairwise
from jax.test_util import check_grads

from sotalign_jax.ot import affinity, device
from sotalign_jax.ot import klot as klot_lib
from sotalign_jax.ot.sinkhorn import sinkhorn


def test_cosine_equals_scikit_learn(rng, x64):
    f, g = rng.normal(size=(7, 5)), rng.normal(size=(4, 5))
    expected = sklearn.metrics.pairwise.cosine_similarity(f, g)
    np.testing.assert_allclose(affinity.cosine(f, g), expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_cosine_of_narrow_features_is_computed_in_float32(rng, dtype):
    f, g = (jnp.asarray(rng.normal(size=(6, 64)), dtype) for _ in range(2))
    k = affinity.cosine(f, g)
    assert k.dtype == jnp.float32
    wide = [np.asarray(x, np.float64) for x in (f, g)]
    np.testing.assert_allclose(k, sklearn.metrics.pairwise.cosine_similarity(*wide), atol=3e-7)


def test_as_float_keeps_float64(x64):
    assert affinity.as_float(np.ones(3)).dtype == jnp.float64
    assert affinity.as_float(np.ones(3, np.float32)).dtype == jnp.float32


def program(function, *arrays, platform):
    fresh = functools.partial(
        function
    )  # a new function, because jit would reuse the trace of another profile
    return jax.jit(fresh).trace(*arrays).lower(lowering_platforms=(platform,)).as_text()


def test_cosine_uses_dot_algorithms_only_on_their_platform(x64):
    for platform in ("tpu", "cuda", "cpu"):
        rows = jnp.ones((3, 2), "float32"), jnp.ones((4, 2), "float32")
        with device.compiling_for(device.Profile("test", teacher=device.THREE_PASSES)):
            text = program(affinity.cosine, *rows, platform=platform)
            wide = program(affinity.cosine, *(x.astype("float64") for x in rows), platform="tpu")
        assert ("num_primitive_operations = 3" in text) == (platform != "cpu")
        assert ("HIGHEST" in text) == (platform == "cpu")
        assert "HIGHEST" in wide
        with device.compiling_for(device.Profile("test", teacher=device.TF32)):
            text = program(affinity.cosine, *rows, platform=platform)
        assert ("tf32" in text) == (platform == "cuda")


def test_dot_of_bfloat16_accumulates_in_float32(rng):
    a, b = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((5, 64), (64, 3)))
    product = affinity.dot(a, b)
    assert product.dtype == jnp.float32
    np.testing.assert_allclose(product, np.float64(a) @ np.float64(b), rtol=1e-5, atol=1e-5)


def test_l2_normalize_gives_unit_rows_and_keeps_zero_rows(rng):
    x = rng.normal(size=(2, 3, 4)).astype(np.float32)
    x[1, 2] = 0.0
    unit = affinity.l2_normalize(x)
    norms = np.linalg.norm(unit, axis=-1)
    np.testing.assert_allclose(norms, [[1, 1, 1], [1, 1, 0]], atol=1e-6)


@pytest.mark.parametrize("scale", [1e-25, 1e-9, 1e20, 1e30])
def test_l2_normalize_handles_tiny_and_huge_rows(rng, scale):
    x = rng.normal(size=(5, 4)).astype(np.float32)
    np.testing.assert_allclose(
        affinity.l2_normalize(x * np.float32(scale)), affinity.l2_normalize(x), rtol=1e-5
    )


def test_l2_normalize_gradient_matches_finite_differences(rng, x64):
    x = jnp.asarray(rng.normal(size=(3, 4)))
    check_grads(jax.jit(affinity.l2_normalize), (x,), order=1)


def test_l2_normalize_gradient_at_zero_is_zero():
    gradient = jax.grad(lambda x: affinity.l2_normalize(x).sum())(jnp.zeros((2, 3)))
    assert not gradient.any()


def rounded(x, bits):
    """Rounds the mantissa of float32 to `bits`: 10 for TF32, 7 for bfloat16."""
    whole = np.ascontiguousarray(x, np.float32).view(np.uint32)
    drop = 23 - bits
    half = np.uint32(1 << (drop - 1))
    return ((whole + half) >> drop << drop).astype(np.uint32).view(np.float32)


def test_sinkhorn_plan_degrades_with_tf32_and_bfloat16_affinities(rng):
    """Uses ambiguous data: if g is a noisy copy of f, the plan saturates in every precision."""
    f, g = (rng.normal(size=(48, 64)) + 2.0 for _ in range(2))
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (f, g)]

    def worst_entry(k):
        exact = sinkhorn(jnp.asarray(unit[0] @ unit[1].T, jnp.float32), epsilon=5e-3)
        plan = sinkhorn(jnp.asarray(k, jnp.float32), epsilon=5e-3, init_v=exact.v)
        ratio = np.asarray(plan.log_matrix() - exact.log_matrix())[exact.matrix() > 1e-4]
        return np.abs(np.expm1(ratio)).max()

    tf32, bfloat16 = (rounded(unit[0], b) @ rounded(unit[1], b).T for b in (10, 7))
    assert worst_entry(affinity.cosine(f.astype(np.float32), g.astype(np.float32))) < 2e-3
    assert worst_entry(tf32) > 5e-3 and worst_entry(bfloat16) > 5e-2


@pytest.mark.parametrize("block_size", [None, 16])
def test_klot_from_embeddings_uses_the_dot_algorithm_of_each_role(block_size):
    roles = {"teacher": device.THREE_PASSES, "student": device.TF32, "gradient": device.TF32}
    loss = jax.grad(functools.partial(klot_lib.klot_from_embeddings, block_size=block_size))
    with device.compiling_for(device.Profile("test", **roles)):
        text = program(loss, *([jnp.ones((48, 64))] * 4), platform="cuda")
    sums, three = text.count("[HIGHEST, HIGHEST]"), text.count("num_primitive_operations = 3")
    tf32 = text.count("lhs_precision_type = tf32")
    assert min(sums, three, tf32) > 0
    assert sums + three + tf32 == text.count("stablehlo.dot_general")


def test_cosine_accepts_precision():
    program = jax.make_jaxpr(lambda x: affinity.cosine(x, x, precision="high"))(jnp.ones((2, 3)))
    assert "precision=(Precision.HIGH, Precision.HIGH)" in str(program)
