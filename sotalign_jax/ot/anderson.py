"""Anderson acceleration of a fixed-point iteration x <- x + f(x).

The next point is x + f - (dX + dF) w, where the columns of dX and dF are the last changes of x and
f, and w minimises ||f - dF w||. `update` returns the correction -(dX + dF) w alone, so that the
caller can inspect it, and reject it by calling `reset`.

References:
    D. G. Anderson, "Iterative procedures for nonlinear integral equations", J. ACM 12 (1965).
    H. F. Walker and P. Ni, "Anderson acceleration for fixed-point iterations", SINUM 49 (2011).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sotalign_jax.ot import affinity

# benchmarks/convergence.py counts the sweeps that these constants lead to. A longer memory costs
# products in every sweep, and a shorter one accelerates less.
MEMORY = 12
"""Number of past steps that are combined."""
PLAIN_STEPS = 4
"""Steps without a correction after `init` and after every `reset`."""
MAX_CORRECTION = 3.0
"""Largest absolute correction of an entry, a factor e^3 of a scaling."""


class History(NamedTuple):
    """Past steps of the iteration.

    Changes are stored in a ring buffer. Those from before the last reset are ignored.

    Attributes:
        x: Last point.
        f: Residual at the last point.
        dx: Changes of the point.
        df: Changes of the residual.
        steps: Number of steps since the last reset.
    """

    x: Float[Array, " m"]
    f: Float[Array, " m"]
    dx: Float[Array, "memory m"]
    df: Float[Array, "memory m"]
    steps: Int[Array, ""]


def init(x: Float[Array, " m"]) -> History:
    """Returns an empty history for vectors like x.

    Args:
        x: A vector, whose length and type are used.

    Returns:
        The `History`.
    """
    vector, changes = jnp.zeros_like(x), jnp.zeros((MEMORY, *x.shape), x.dtype)
    return History(vector, vector, changes, changes, jnp.int32(0))


def reset(history: History) -> History:
    """Forgets all past steps.

    Args:
        history: Past steps.

    Returns:
        The history without steps.
    """
    return history._replace(steps=jnp.zeros_like(history.steps))


def update(
    history: History,
    x: Float[Array, " m"],
    f: Float[Array, " m"],
    precision: Any = affinity.HIGHEST,
) -> tuple[Float[Array, " m"], History]:
    """Adds a step to the history and returns the correction of the next one.

    Args:
        history: Past steps.
        x: Current point.
        f: Residual of the plain iteration, whose next point is x + f.
        precision: Precision of the products of past steps.

    Returns:
        The correction, by which the next point differs from x + f, and the new history. The
        correction is zero for the first `PLAIN_STEPS` steps, and if the weights of past steps are
        not finite.

    Example:
        >>> correction, history = update(init(jnp.zeros(2)), jnp.zeros(2), jnp.ones(2))
        >>> correction.tolist(), int(history.steps)
        ([0.0, 0.0], 1)

    References:
        H. F. Walker and P. Ni, "Anderson acceleration for fixed-point iterations", SINUM 49 (2011),
        section 2.
    """
    slot, known = history.steps % MEMORY, history.steps > 0
    change_x, change_f = x - history.x, f - history.f
    # NaN times a zero weight is NaN, so changes that are not finite are stored as zeros.
    known = known & jnp.isfinite(change_x) & jnp.isfinite(change_f)
    dx = history.dx.at[slot].set(jnp.where(known, change_x, 0.0))
    df = history.df.at[slot].set(jnp.where(known, change_f, 0.0))
    # The first change after a reset is zero, so its weight does not matter.
    used = jnp.arange(MEMORY, dtype=jnp.int32) <= history.steps
    gram = jnp.where(used[:, None] & used[None, :], affinity.dot(df, df.T, precision), 0.0)
    # Tikhonov regularisation, which bounds the weights when past steps are nearly parallel.
    ridge = 10 * jnp.finfo(x.dtype).eps * jnp.trace(gram) + jnp.finfo(x.dtype).tiny
    gram = gram + ridge * jnp.eye(MEMORY, dtype=x.dtype)
    weights = solve_positive(gram, jnp.where(used, affinity.dot(df, f, precision), 0.0))
    correction = -affinity.dot(weights, dx + df, precision)
    # Clipped per entry, so that one diverging column does not slow down the others.
    correction = jnp.clip(correction, -MAX_CORRECTION, MAX_CORRECTION)
    use = (history.steps >= PLAIN_STEPS) & jnp.all(jnp.isfinite(weights))
    return jnp.where(use, correction, 0.0), History(x, f, dx, df, history.steps + 1)


def solve_positive(matrix: Float[Array, "k k"], right: Float[Array, " k"]) -> Float[Array, " k"]:
    """Solves a small positive definite system by Gauss-Jordan elimination, unrolled.

    On a GPU, `jnp.linalg.solve` would launch several kernels of a library in every sweep.

    Args:
        matrix: Positive definite matrix, shape [k, k].
        right: Right-hand side, shape [k].

    Returns:
        The solution, shape [k].

    Example:
        >>> solve_positive(jnp.array([[2.0, 0.0], [0.0, 4.0]]), jnp.ones(2)).tolist()
        [0.5, 0.25]
    """
    system = jnp.concatenate([matrix, right[:, None]], axis=1)
    for i in range(len(matrix)):
        # Pivots of a positive definite matrix are positive, so no pivoting is needed.
        row = system[i : i + 1] / system[i, i]
        others = jnp.arange(len(matrix))[:, None] != i
        system = jnp.where(others, system - system[:, i : i + 1] * row, row)
    return system[:, -1]
