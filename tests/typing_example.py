"""Example of typed user code. `test_transformations` runs it and checks it with mypy."""

from typing import assert_type

import jax
import numpy as np

import sotalign_jax as sota


@jax.jit
def step(f: jax.Array, g: jax.Array, z: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    def loss(f: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, aux = sota.klot_from_embeddings(f, g, z, w, block_size=4, return_aux=True)
        assert_type(value, jax.Array)
        assert_type(aux.student.converged, jax.Array)
        return value, aux.student.converged & aux.teacher.converged

    (_, converged), gradient = jax.value_and_grad(loss, has_aux=True)(f)
    return f - 0.1 * gradient, converged


rng = np.random.default_rng(0)
f, g, z, w = (rng.normal(size=(8, 3)).astype(np.float32) for _ in range(4))
K, K_star = sota.cosine(f, g), sota.cosine(z, w)
assert_type(K, jax.Array)
assert_type(sota.klot(K, K_star), jax.Array)
assert_type(sota.klot(np.asarray(K), np.asarray(K_star), epsilon=0.1), jax.Array)
assert_type(sota.klot_from_embeddings(f, g, z, w, precision="high"), jax.Array)

plan = sota.sinkhorn(np.asarray(K), epsilon=0.1, log_a=np.full(8, -np.log(8)))
assert_type(plan, sota.Plan)
assert_type(plan.matrix(), jax.Array)
assert_type(plan.u, jax.Array)
f_new, converged = step(*map(jax.numpy.asarray, (f, g, z, w)))
assert bool(converged) and bool(plan.converged) and f_new.shape == f.shape
