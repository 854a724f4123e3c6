"""Tests of Anderson acceleration on linear fixed-point problems."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sotalign_jax.ot import anderson


def contraction(rng, size=40, radius=0.97):
    """Returns M, c and the fixed point of x -> M x + c. M has eigenvalues in [0, radius]."""
    basis, _ = np.linalg.qr(rng.normal(size=(size, size)))
    matrix = (basis * np.linspace(0, radius, size)) @ basis.T
    shift = rng.normal(size=size) / 10
    return matrix, shift, np.linalg.solve(np.eye(size) - matrix, shift)


def iterate(matrix, shift, steps, accelerate):
    x, history = jnp.zeros(len(shift)), anderson.init(jnp.zeros(len(shift)))
    update = jax.jit(anderson.update)
    for _ in range(steps):
        f = matrix @ x + shift - x
        correction, history = update(history, x, f)
        x = x + f + (correction if accelerate else 0.0)
    return x


def test_update_reaches_the_fixed_point_in_fewer_steps(rng, x64):
    matrix, shift, fixed = contraction(rng)
    plain, ours = (np.abs(iterate(matrix, shift, 60, on) - fixed).max() for on in (False, True))
    assert ours < 1e-4 * plain


def test_update_is_plain_in_first_steps_and_after_reset(rng, x64):
    matrix, shift, _ = contraction(rng)
    x, history = jnp.zeros(len(shift)), anderson.init(jnp.zeros(len(shift)))
    used = []
    for step in range(2 * anderson.PLAIN_STEPS + 4):
        if step == anderson.PLAIN_STEPS + 2:
            history = anderson.reset(history)
        f = matrix @ x + shift - x
        correction, history = anderson.update(history, x, f)
        used.append(bool(jnp.any(correction != 0)))
        x = x + f + correction
    plain = [False] * anderson.PLAIN_STEPS
    assert used == plain + [True] * 2 + plain + [True] * 2


def test_update_bounds_the_correction():
    x = jnp.zeros(3)
    history = anderson.init(x)
    for step in range(16):
        f = jnp.full(3, jnp.inf) if step == 6 else jnp.array([1.0, 2.0, 3.0]) * 0.999**step * 1e3
        correction, history = anderson.update(history, x, f)
        if step == 6:
            history = anderson.reset(history)
        assert jnp.all(jnp.abs(correction) <= anderson.MAX_CORRECTION)
        x = x + jnp.where(jnp.isfinite(f), f, 0.0)


@pytest.mark.parametrize("size", [1, 5, 12])
def test_solve_positive_equals_numpy(rng, x64, size):
    root = rng.normal(size=(size, size + 3))
    matrix, right = root @ root.T, rng.normal(size=size)
    expected = np.linalg.solve(matrix, right)
    np.testing.assert_allclose(anderson.solve_positive(matrix, right), expected, rtol=1e-8)
