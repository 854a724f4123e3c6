"""Trains two linear maps with KLOT in an optax loop, so that they learn the plan of a teacher.

python examples/klot_in_optax.py    # half a minute on a CPU, most of it compiling
"""

import jax
import jax.numpy as jnp
import optax

import sotalign_jax as sota

photos = sota.data.photographs()  # embeddings of 640 photographs and captions
X, Y = jnp.asarray(photos.image[300:]), jnp.asarray(photos.text[300:])  # used as unpaired rows
teacher = sota.cca(photos.image[:300], photos.text[:300], ridge=0.1)  # from the pairs
data = {"x": X, "y": Y, "teacher": (teacher.x(X), teacher.y(Y))}  # constants

keys = jax.random.split(jax.random.key(0))
params = {
    "x": jax.random.normal(keys[0], (X.shape[1], 128)) / X.shape[1] ** 0.5,
    "y": jax.random.normal(keys[1], (Y.shape[1], 128)) / Y.shape[1] ** 0.5,
}
optimizer = optax.adam(1e-2)
state = optimizer.init(params)


def loss(params, data):
    """Returns KLOT between the plans of the student's and of the teacher's features."""
    f, g = sota.l2_normalize(data["x"] @ params["x"]), sota.l2_normalize(data["y"] @ params["y"])
    return sota.klot_from_embeddings(f, g, *data["teacher"], epsilon=0.05, epsilon_star=0.05)


@jax.jit
def step(params, state, data):
    """Takes one step. The gradient is exact and does not differentiate through Sinkhorn."""
    value, gradient = jax.value_and_grad(loss)(params, data)
    updates, state = optimizer.update(gradient, state)
    return optax.apply_updates(params, updates), state, value


for number in range(61):
    params, state, value = step(params, state, data)
    if number % 20 == 0:
        print(f"step {number:2d}: KLOT {value:.3f}")
