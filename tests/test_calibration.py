"""Tests of the calibration of scores against POT."""

import jax.numpy as jnp
import numpy as np
import ot
import pytest

from sotalign_jax import calibration, checks, sinkhorn


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def pools(n=40, m=30, d=8):
    rng = np.random.default_rng(0)
    hub = 2 * rng.normal(size=d)
    return unit(rng.normal(size=(n, d)) + hub), unit(rng.normal(size=(m, d)) + hub)


def test_calibrate_potentials_on_pools_match_pot(x64):
    f, g = pools()
    epsilon = 0.05
    fitted = calibration.calibrate(f, g, epsilon=epsilon, tolerance=1e-10)
    uniform = np.full(len(f), 1 / len(f)), np.full(len(g), 1 / len(g))
    _, log = ot.bregman.sinkhorn(
        *uniform,
        -f @ g.T,
        epsilon,
        method="sinkhorn_log",
        stopThr=1e-12,
        numItermax=10_000,
        log=True,
    )
    for ours, theirs in ((fitted.x(f), log["log_u"]), (fitted.y(g), log["log_v"])):
        np.testing.assert_allclose(
            ours - ours.mean(), epsilon * (theirs - theirs.mean()), atol=1e-8
        )


def test_scores_on_pools_are_the_scaled_log_plan():
    f, g = pools()
    fitted = calibration.calibrate(f, g, epsilon=0.05, tolerance=1e-5)
    log_plan = sinkhorn(jnp.asarray(f @ g.T), epsilon=0.05, tolerance=1e-5).log_matrix()
    expected = 0.05 * (log_plan + np.log(len(f) * len(g)))
    np.testing.assert_allclose(
        fitted.scores(3 * f, g), expected, atol=1e-4
    )  # scores normalise their rows


def test_scores_retrieve_better_than_cosine_with_hubs():
    rng = np.random.default_rng(0)
    g = unit(rng.normal(size=(200, 16)) + 1.0)
    f = unit(g + 0.25 * rng.normal(size=g.shape) + 0.5)
    pool_f, pool_g, f, g = f[:100], g[100:200], f[150:], g[150:]
    fitted = calibration.calibrate(pool_f, pool_g)

    def hits(scores):
        return np.mean(scores.argmax(axis=1) == np.arange(len(scores)))

    assert hits(fitted.scores(f, g)) > hits(f @ g.T)


def test_calibrate_keeps_a_fixed_sample_of_the_pools():
    f, g = pools()
    fitted = calibration.calibrate(f, g, sample=12)
    assert fitted.f.shape == fitted.g.shape == (12, 8)
    same = calibration.calibrate(f, g, sample=12)
    np.testing.assert_array_equal(fitted.x(f), same.x(f))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda f, g: calibration.calibrate(f, g[:, :3]), "g"),
        (lambda f, g: calibration.calibrate(f, g, epsilon=0.0), "epsilon"),
        (lambda f, g: calibration.calibrate(f, g, sample=0), "sample"),
        (lambda f, g: calibration.calibrate(f[0], g), "f"),
        (lambda f, g: calibration.calibrate(f, g).x(f[:, :3]), "rows"),
    ],
)
def test_calibrate_rejects_bad_arguments(call, name):
    with pytest.raises(checks.InputError, match=rf"^{name}\b"):
        call(*pools())
