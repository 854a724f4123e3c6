"""Tests of SigLIP and InfoNCE against optax and numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.test_util import check_grads

from sotalign_jax import checks, losses
from sotalign_jax.ot import affinity

K = [[0.6, 0.1, -0.2], [0.0, 0.5, 0.3], [0.2, -0.1, 0.4]]


def features(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize(
    ("normalization", "golden"), [("mean", 0.32977962185504384), ("per_row", 0.9893388655651315)]
)
def test_siglip_from_affinity_golden_values(x64, normalization, golden):
    value = losses.siglip_from_affinity(
        jnp.array(K), scale=20.0, bias=-10.0, normalization=normalization
    )
    np.testing.assert_allclose(value, golden, rtol=1e-14)


def test_initial_scale_and_bias_are_sails():
    assert np.exp(losses.INITIAL_LOG_SCALE) == pytest.approx(20.0)
    assert pytest.approx(-10.0) == losses.INITIAL_BIAS


@pytest.mark.parametrize("columns", [5, 9])
def test_siglip_from_affinity_matches_optax(columns):
    cosines = jnp.tanh(features(0, 5, columns))
    ours = losses.siglip_from_affinity(cosines, scale=7.0, bias=-2.0)
    theirs = optax.losses.sigmoid_binary_cross_entropy(7.0 * cosines - 2.0, np.eye(5, columns))
    np.testing.assert_allclose(ours, theirs.mean(), rtol=1e-6)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_siglip_from_affinity_is_finite_for_huge_logits(sign):
    value, gradient = jax.value_and_grad(losses.siglip_from_affinity)(
        jnp.full((1, 1), sign), scale=1e4, bias=0.0
    )
    assert value == (1e4 if sign < 0 else 0.0)
    assert gradient[0, 0] == (-1e4 if sign < 0 else 0.0)


def test_siglip_normalises_features():
    f, g = features(0, 6, 4), features(1, 6, 4)
    expected = losses.siglip_from_affinity(affinity.cosine(f, g), scale=20.0, bias=-10.0)
    np.testing.assert_allclose(losses.siglip(3.0 * f, 0.1 * g), expected, rtol=1e-6)


@pytest.mark.parametrize("normalization", ["mean", "per_row"])
@pytest.mark.parametrize(("extra_f", "extra_g"), [(3, 5), (0, 5), (3, 0)])
def test_siglip_with_negatives_matches_numpy(normalization, extra_f, extra_g):
    f, g, more_f, more_g = (features(s, n, 4) for s, n in enumerate((6, 6, extra_f, extra_g)))

    def rectangle(anchors, others):
        unit = [r / np.linalg.norm(r, axis=1, keepdims=True) for r in (anchors, others)]
        logits = 20.0 * unit[0] @ unit[1].T - 10.0
        signs = 2 * np.eye(*logits.shape) - 1
        total = np.logaddexp(0.0, -signs * logits).sum()
        return total / (logits.size if normalization == "mean" else len(logits))

    expected = 0.5 * (
        rectangle(f, jnp.concatenate([g, more_g])) + rectangle(g, jnp.concatenate([f, more_f]))
    )
    value = losses.siglip(
        f,
        g,
        negatives_f=more_f if extra_f else None,
        negatives_g=more_g if extra_g else None,
        normalization=normalization,
    )
    np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_siglip_computes_half_precision_features_in_float32():
    f, g = features(0, 6, 4).astype(jnp.float16), features(1, 6, 4).astype(jnp.float16)
    value = losses.siglip(f, g, negatives_g=g)
    assert value.dtype == jnp.float32
    wide = [r.astype(jnp.float32) for r in (f, g)]
    np.testing.assert_allclose(value, losses.siglip(*wide, negatives_g=wide[1]), rtol=1e-6)


def test_infonce_matches_optax():
    f, g, log_scale = features(0, 6, 4), features(1, 6, 4), 1.7
    logits = np.exp(log_scale) * affinity.cosine(f, g)
    labels = np.arange(6)
    cross_entropy = optax.losses.softmax_cross_entropy_with_integer_labels
    expected = 0.5 * (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)).mean()
    np.testing.assert_allclose(losses.infonce(f, g, log_scale=log_scale), expected, rtol=1e-6)


def test_infonce_with_negatives_matches_optax():
    f, g, more_f, more_g = (features(s, n, 4) for s, n in enumerate((6, 6, 3, 5)))
    cross_entropy = optax.losses.softmax_cross_entropy_with_integer_labels
    rows = 20.0 * affinity.cosine(f, jnp.concatenate([g, more_g]))
    columns = 20.0 * affinity.cosine(g, jnp.concatenate([f, more_f]))
    expected = 0.5 * sum(cross_entropy(z, np.arange(6)).mean() for z in (rows, columns))
    value = losses.infonce(f, g, negatives_f=more_f, negatives_g=more_g)
    np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_siglip_and_infonce_gradients_match_finite_differences(x64):
    f, g, more = (jnp.asarray(features(s, 4, 3), jnp.float64) for s in range(3))

    @jax.jit
    def siglip(f, g, more, log_scale, bias):
        return losses.siglip(
            f, g, log_scale=log_scale, bias=bias, negatives_f=more, negatives_g=more
        )

    @jax.jit
    def infonce(f, g, log_scale):
        return losses.infonce(f, g, log_scale=log_scale)

    check_grads(siglip, (f, g, more, jnp.array(1.0), jnp.array(-2.0)), order=1, modes=["rev"])
    check_grads(infonce, (f, g, jnp.array(1.0)), order=1, modes=["rev"])


def test_siglip_and_infonce_reject_bad_arguments():
    with pytest.raises(checks.InputError, match=r"g .*\(4, 2\)"):
        losses.siglip(jnp.ones((3, 2)), jnp.ones((4, 2)))
    with pytest.raises(checks.InputError, match="g "):
        losses.infonce(jnp.ones((3, 2)), jnp.ones((4, 2)))
    with pytest.raises(checks.InputError, match="positives"):
        losses.siglip_from_affinity(jnp.ones((3, 2)), scale=1.0, bias=0.0)
    with pytest.raises(checks.InputError, match=r"normalization.* 'sum'"):
        losses.siglip(jnp.ones((3, 2)), jnp.ones((3, 2)), normalization="sum")
