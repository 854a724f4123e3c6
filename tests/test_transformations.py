"""Tests of the loss and the solver under JAX transformations, JAX settings and mypy."""

import functools
import logging
import os
import pathlib
import runpy
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sotalign_jax as sota
from sotalign_jax import checks
from sotalign_jax.methods import sotalign

N, M, D = 9, 7, 4
EXAMPLE = pathlib.Path(__file__).with_name("typing_example.py")


def features(dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(rows, D)).astype(dtype) for rows in (N, M, N, M)]


def everything(f, g, z, w, log_a, log_b):
    """Calls every public loss and solver with padding, and differentiates the losses."""

    def losses(f, g):
        k = jnp.where(jnp.eye(N, M, dtype=bool), -jnp.inf, sota.cosine(f, g))
        k_star, options = sota.cosine(z, w), {"log_a": log_a, "log_b": log_b}
        plan = sota.sinkhorn(jax.lax.stop_gradient(k), epsilon=0.1, **options)
        values = [
            sota.klot(sota.cosine(f, g), k_star, **options),
            sota.klot_from_embeddings(f, g, z, w, **options),
            sota.klot_from_embeddings(f, g, z, w, block_size=4, **options),
            sotalign._klot_crossmodal(f, g, z[2:], w[2:])[0],
        ]
        return jnp.stack(values).sum(), (values, plan.matrix())

    return jax.value_and_grad(losses, argnums=(0, 1), has_aux=True)(f, g)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_losses_work_under_strict_jax_settings(dtype):
    log_a = np.where(np.arange(N) < 8, -np.log(8), -np.inf).astype(dtype)
    log_b = np.where(np.arange(M) < 6, -np.log(6), -np.inf).astype(dtype)
    with (
        jax.enable_x64(dtype == np.float64),
        jax.debug_nans(True),
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
    ):
        (value, (values, matrix)), gradients = jax.jit(everything)(*features(dtype), log_a, log_b)
        assert value.dtype == matrix.dtype == gradients[0].dtype == dtype
        np.testing.assert_allclose(values[1:3], values[0], rtol=1e-3)
        assert matrix[0, 0] == 0 and np.isfinite(matrix).all()


def loss(f, g, z, w, log_a=None):
    return sota.klot_from_embeddings(f, g, z, w, log_a=log_a, block_size=4)


def test_klot_from_embeddings_under_checkpoint_scan_vmap_and_nnx():
    """Every transformation gives the loss and gradient of a plain call."""
    arrays = [jnp.stack(both) for both in zip(features(), features(seed=1), strict=True)]
    plain = jax.jit(jax.value_and_grad(loss))
    expected = [plain(*(x[i] for x in arrays)) for i in range(2)]
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), *expected)

    def scanned(*arrays):
        return jax.lax.scan(lambda carry, xs: (carry, plain(*xs)), None, arrays)[1]

    def rematerialised(*arrays):
        return jax.vmap(jax.value_and_grad(jax.checkpoint(loss)))(*arrays)

    for function in (jax.jit(scanned), nnx.jit(rematerialised)):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-3),
            function(*arrays),
            expected,
        )


def test_losses_outside_of_jit_compile_once(caplog):
    def call(seed):
        f, g, z, w = features(seed=seed)
        k, k_star = sota.cosine(f, g), sota.cosine(z, w)
        plan = sota.sinkhorn(k, epsilon=0.1 + 0.01 * seed)
        return jax.grad(sota.klot)(k, k_star), jax.grad(loss)(f, g, z, w), plan.v

    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        call(0)
        assert any("Compiling" in record.message for record in caplog.records)
        caplog.clear()
        call(1)
        assert not [record for record in caplog.records if "Compiling" in record.message]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("max_iterations", lambda x, i: sota.sinkhorn(x, epsilon=0.1, max_iterations=i)),
        ("max_iterations", lambda x, i: sota.klot(x, x, max_iterations=i)),
        ("block_size", lambda x, i: sota.klot_from_embeddings(x, x, x, x, block_size=i)),
        ("return_aux", lambda x, i: sota.klot(x, x, return_aux=i > 0)),
    ],
)
def test_solvers_reject_traced_static_options(name, call):
    with pytest.raises(checks.InputError, match=rf"{name} .*traced"):
        jax.jit(call)(jnp.eye(3), 5)


def test_klot_accepts_precision():
    arrays = [jnp.ones((4, 3))] * 4
    for function, inputs in ((sota.klot_from_embeddings, arrays), (sota.klot, [jnp.eye(4)] * 2)):
        exact, fast = (
            str(jax.make_jaxpr(functools.partial(function, precision=precision))(*inputs))
            for precision in ("highest", "high")
        )
        highest = "(Precision.HIGHEST, Precision.HIGHEST)"
        changed = fast.count("(Precision.HIGH, Precision.HIGH)")
        # The remaining products solve small linear systems, whose precision JAX sets itself.
        assert exact.count(highest) - fast.count(highest) == changed > 4


def test_solvers_accept_lists_and_numpy_arrays():
    k, k_star = [[0.6, 0.1], [0.0, 0.5]], [[0.5, 0.45], [0.1, 0.2]]
    expected = sota.klot(jnp.array(k), jnp.array(k_star))
    assert sota.klot(k, k_star) == sota.klot(np.array(k), np.array(k_star)) == expected
    f = np.eye(2).tolist()
    assert jnp.isfinite(sota.klot_from_embeddings(f, f, k, k_star))
    assert sota.sinkhorn(k, epsilon=0.1, log_a=[-np.log(2)] * 2).converged


@pytest.mark.slow
def test_typing_example_passes_mypy_strict():
    runpy.run_path(str(EXAMPLE))
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--follow-imports=silent",
    ]
    run = subprocess.run(
        [*command, str(EXAMPLE)],
        cwd=EXAMPLE.parents[1],
        env=os.environ | {"MYPYPATH": str(EXAMPLE.parents[1])},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
