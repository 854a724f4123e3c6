"""The sweep with one read, in Pallas' interpreter, against two products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sotalign_jax.ot import onepass


@pytest.mark.parametrize("sweep", [onepass.on_tpu, onepass.on_gpu])
@pytest.mark.parametrize(("n", "m"), [(8, 1024), (13, 1500), (700, 2100)])
def test_equals_two_products(rng, sweep, n, m):
    matrix = np.exp(3 * rng.normal(size=(n, m))).astype(np.float32)
    a, c = (rng.uniform(0.1, 1, size).astype(np.float32) for size in (n, m))
    narrow = onepass.narrow(matrix)
    np.testing.assert_allclose(onepass.widen(narrow), matrix, rtol=2.0**-3)
    for given, exact in ((matrix, matrix), (narrow, onepass.widen(narrow))):
        s, t = sweep(given, a, c, interpret=True)
        rows = np.asarray(exact, np.float64) @ c
        np.testing.assert_allclose(s, rows, rtol=1e-5)
        np.testing.assert_allclose(t, (a / rows) @ np.asarray(exact, np.float64), rtol=1e-5)


@pytest.mark.parametrize("sweep", [onepass.on_tpu, onepass.on_gpu])
def test_zero_weights_add_nothing(sweep):
    matrix = jnp.ones((9, 1024)).at[4].set(0.0)
    a, c = jnp.ones(9).at[2].set(0.0), jnp.ones(1024)
    s, t = sweep(matrix.at[4, 0].set(1.0), a, c, interpret=True)
    assert s.tolist() == [1024.0] * 4 + [1.0] + [1024.0] * 4
    np.testing.assert_allclose(t[1:], 7 / 1024, rtol=1e-6)


def test_on_a_cpu_large_kernels_are_swept_by_products(monkeypatch):
    monkeypatch.setattr(onepass, "LEAST", 1)
    arrays = jnp.ones((3, 5)), jnp.ones(3), jnp.ones(5)
    program = jax.jit(onepass.sweep).lower(*arrays).as_text()
    assert "dot_general" in program and "custom_call" not in program
    for got, wanted in zip(onepass.sweep(*arrays), onepass.two_reads(*arrays), strict=True):
        assert got.tolist() == wanted.tolist()
