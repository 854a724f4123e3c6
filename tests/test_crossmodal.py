"""Tests of KLOT over pairs and unpaired rows together."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import ot
import pytest
from jax.test_util import check_grads

from sotalign_jax import checks, klot_from_embeddings
from sotalign_jax.methods import sotalign

PAIRS, EPSILON, EPSILON_STAR = 3, 0.2, 0.1
EXACT = {"tolerance": 1e-12, "max_iterations": 5000}


def crossmodal(*arrays, **options):
    """Compiles the loss as a whole, which is faster than op-by-op execution."""
    return jax.jit(functools.partial(sotalign._klot_crossmodal, **options))(*arrays)


def cosine(x, y):
    x, y = (r / np.linalg.norm(r, axis=1, keepdims=True) for r in (x, y))
    return x @ y.T


def plan(k, epsilon, a, b):
    return ot.bregman.sinkhorn(
        a, b, -k, epsilon, method="sinkhorn_log", stopThr=1e-14, numItermax=20_000
    )


def transcription(f, g, z, w):
    """Computes the loss and its gradient in K from the block target with POT and numpy."""
    n, m = len(f), len(g)
    share = 2 * PAIRS / (n + m)
    p, q = len(z), len(w)
    target = np.zeros((n, m))
    target[:PAIRS, :PAIRS] = share / PAIRS * np.eye(PAIRS)
    teacher = plan(cosine(z, w), EPSILON_STAR, np.full(p, 1 / p), np.full(q, 1 / q))
    target[PAIRS:, PAIRS:] = (1 - share) * teacher
    student = plan(cosine(f, g), EPSILON, target.sum(1), target.sum(0))
    inside = target > 0
    value = np.sum(target[inside] * np.log(target[inside] / student[inside]))
    return value, (student - target) / EPSILON


def features(rng, n, m):
    f, g = rng.normal(size=(n, 4)), rng.normal(size=(m, 4))
    return f, g, rng.normal(size=(n - PAIRS, 5)), rng.normal(size=(m - PAIRS, 5))


@pytest.mark.parametrize(("n", "m"), [(9, 9), (10, 7)])
def test_klot_crossmodal_matches_dense_transcription(x64, rng, n, m):
    arrays = features(rng, n, m)

    def loss(f, g):
        options = {"epsilon": EPSILON, "epsilon_star": EPSILON_STAR, **EXACT}
        return sotalign._klot_crossmodal(f, g, *arrays[2:], **options)[0]

    student = tuple(map(jnp.asarray, arrays[:2]))
    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*student)
    expected, in_k = transcription(*arrays)
    np.testing.assert_allclose(value, expected, rtol=1e-9)

    def affinity(f, g):
        f, g = (r / jnp.linalg.norm(r, axis=1, keepdims=True) for r in (f, g))
        return jnp.sum(in_k * (f @ g.T))

    wanted = jax.jit(jax.grad(affinity, argnums=(0, 1)))(*student)
    for got, want in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-9)
    if n == m:  # the target's marginals are exact, so the closed form is the true derivative
        check_grads(jax.jit(loss), student, order=1, modes=["rev"], rtol=1e-5)


def test_klot_crossmodal_bistochastic_is_n_times_prob(x64, rng):
    f, g, z, w = map(jnp.asarray, features(rng, 8, 8))
    options = {"epsilon": EPSILON, "epsilon_star": EPSILON_STAR, **EXACT}
    value, aux = crossmodal(f, g, z, w, **options)
    scaled, _ = crossmodal(f, g, z, w, marginals="bistochastic", **options)
    np.testing.assert_allclose(scaled, 8 * value, rtol=1e-12)
    assert aux.student.error <= 1e-12 and aux.teacher.error <= 1e-12
    assert aux.student.u.shape == (8,) and aux.teacher.v.shape == (5,)


def test_klot_crossmodal_with_isolated_pair_is_klot_of_the_rest(x64, rng):
    unpaired = [np.abs(rng.normal(size=(12, 4))) for _ in range(4)]
    both = [np.pad(rows, ((1, 0), (0, 1))) for rows in unpaired[:2]]
    for rows in both:
        rows[0, -1] = 1.0  # its own direction: cosine 1 with its partner, 0 with all other rows
    options = {"epsilon": 0.02, "epsilon_star": EPSILON_STAR, **EXACT}
    found, _ = crossmodal(*map(jnp.asarray, (*both, *unpaired[2:])), **options)
    alone = klot_from_embeddings(*map(jnp.asarray, unpaired), **options)
    np.testing.assert_allclose(found, 12 / 13 * alone, rtol=1e-12)


def test_klot_crossmodal_rejects_mismatched_rows(rng):
    f, g, z, w = features(rng, 8, 8)
    for arrays in ((f, g, z[1:], w), (f, g, f, g), (f[:3], g[:3], z[:0], w[:0])):
        with pytest.raises(checks.InputError, match="f_star"):
            sotalign._klot_crossmodal(*map(jnp.asarray, arrays))
    with pytest.raises(checks.InputError, match="marginals"):
        sotalign._klot_crossmodal(f, g[:-1], z, w[:-1], marginals="bistochastic")
