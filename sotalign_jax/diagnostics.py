"""What can be known before training: encoder pairs, unpaired pools and epsilons, from embeddings.

`mutual_knn` tells how alike two encoders see the same samples, `pool_shift` how far unpaired rows
are from the pairs, `sinkhorn_convergence` at which epsilons the transport plans can be solved.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sotalign_jax import checks
from sotalign_jax.ot import affinity, solver
from sotalign_jax.ot.blocks import Block, auto_block, over_rows
from sotalign_jax.ot.kernel import Cosines, Kernel
from sotalign_jax.sliced import (
    Rows,
    Shift,
    Spread,
    pool_shift,
    random_sphere,
    sliced_wasserstein,
    sliced_wasserstein_spread,
    spread,
)

__all__ = [
    "Convergence",
    "Shift",
    "Spread",
    "chance_knn",
    "mutual_knn",
    "pool_shift",
    "random_sphere",
    "sinkhorn_convergence",
    "sliced_wasserstein",
    "sliced_wasserstein_spread",
    "smallest_epsilon",
    "spread",
]


# --- mutual nearest neighbours -----------------------------------------------------------------


def mutual_knn(
    x: Rows, y: Rows, *, k: int = 10, clamp: float | None = 0.95, chunk: int = 1024
) -> float:
    """Mutual k-NN: how many of a sample's neighbours in one space are neighbours in the other.

        mean_i |N_x(i) ∩ N_y(i)| / k

    N(i) are the k rows of largest cosine with row i, itself left out, ties going to the lower
    index. Features are first clamped at ± the mean over samples of the `clamp`-quantile of |value|,
    so that few huge features do not decide. 1 means the same neighbours, `chance_knn` unrelated
    spaces. The score depends on the number of rows: the usual protocol takes 1,024.

    Args:
        x: [n, d_x] embeddings.
        y: [n, d_y] embeddings of the same samples.
        k: number of neighbours.
        clamp: the quantile, or None to leave the features as they are.
        chunk: rows whose neighbours are searched at once; memory is about chunk * n floats.

    Returns:
        The score, between 0 and 1.

    Raises:
        InputError: rows do not match, are not finite or are zero; or an option is out of range.

    >>> x = random_sphere(50, 4)
    >>> mutual_knn(x, x[:, ::-1])
    1.0
    """
    checks.pairs(x, y, names=("x", "y"), min_rows=2)
    checks.whole(1, chunk=chunk)
    if not 1 <= k < len(x):
        raise checks.InputError(f"k: is {k} but there are {len(x)} rows; pass 1..{len(x) - 1}")
    if clamp is not None and not 0 < clamp <= 1:
        raise checks.InputError(f"clamp: is {clamp}; pass a quantile in 0..1, or None")
    near_x, near_y = (_neighbours(affinity.as_float(z), clamp, k=k, chunk=chunk) for z in (x, y))
    shared = int((near_x[:, :, None] == near_y[:, None, :]).sum())
    return shared / (len(x) * k)


def chance_knn(n: int, *, k: int = 10) -> float:
    """What `mutual_knn` expects of n rows matched at random: k / (n - 1).

    >>> round(chance_knn(1024), 4)
    0.0098
    """
    return k / (n - 1)


@functools.partial(jax.jit, static_argnames=("k", "chunk"))
def _neighbours(
    x: Float[Array, "n d"], clamp: float | None, *, k: int, chunk: int
) -> Int[Array, "n k"]:
    n = len(x)
    if clamp is not None:

        def quantiles(block: Block, out: Array) -> Array:
            return block.put(out, jnp.quantile(jnp.abs(block.of(x)), clamp, axis=1))

        bound = over_rows(n, chunk, quantiles, jnp.zeros(n, x.dtype)).mean()
        x = jnp.clip(x, -bound, bound)
    x = affinity.l2_normalize(x)

    def nearest(block: Block, out: Array) -> Array:
        itself = block.start + jnp.arange(block.size)
        scores = affinity.dot(block.of(x), x.T).at[jnp.arange(block.size), itself].set(-jnp.inf)
        return block.put(out, jax.lax.top_k(scores, k)[1])

    return over_rows(n, chunk, nearest, jnp.zeros((n, k), jnp.int32))


# --- Sinkhorn convergence ----------------------------------------------------------------------


class Convergence(NamedTuple):
    """How a transport plan came out at one epsilon."""

    epsilon: float
    error: float
    """L1 marginal error, total mass 1."""
    iterations: int
    converged: bool
    partners: float
    """Over how many columns a row's mass spreads: the perplexity of the plan's rows."""


def sinkhorn_convergence(
    f: Rows,
    g: Rows,
    epsilons: Sequence[float],
    *,
    tolerance: float = 1e-3,
    max_iterations: int = 500,
) -> list[Convergence]:
    """Solves the plan of cos(f, g) at each epsilon, exactly as a training step does.

    `partners` is exp(-Σ P log(P/a)): 1 when every row has a single partner, the number of columns
    when epsilon is so large that all pairs are alike.

    Args:
        f: [n, d] features in the shared space, such as the teacher's of a batch of the pool.
        g: [m, d] features of the other modality.
        epsilons: regularisations to try.
        tolerance: marginal error that counts as converged.
        max_iterations: the budget.

    Returns:
        One `Convergence` an epsilon, in their order.

    Raises:
        InputError: widths differ, rows are not finite or are zero; or an option is out of range.

    >>> f = random_sphere(30, 4)
    >>> sharp, flat = sinkhorn_convergence(f, f, (0.001, 100.0))
    >>> flat.converged, round(sharp.partners, 2), round(flat.partners, 2)
    (True, 1.0, 30.0)
    """
    checks.embeddings("f", f)
    checks.embeddings("g", g, width=f.shape[1])
    checks.positive(tolerance=tolerance)
    for epsilon in epsilons:
        checks.positive(epsilons=epsilon)
    checks.whole(1, max_iterations=max_iterations)
    x, y = affinity.as_float(f), affinity.as_float(g)
    dtype = jnp.result_type(x, y)
    block_size = auto_block(len(x), len(y), dtype.itemsize)
    solve = functools.partial(_solve, max_iterations=max_iterations, block_size=block_size)
    out = []
    for epsilon in epsilons:
        error, iterations, partners = solve(x.astype(dtype), y.astype(dtype), epsilon, tolerance)
        converged = bool(error <= tolerance)
        out.append(Convergence(epsilon, float(error), int(iterations), converged, float(partners)))
    return out


def smallest_epsilon(rows: Sequence[Convergence]) -> float | None:
    """The smallest epsilon that converged, as did all larger ones; None when none did.

    >>> smallest_epsilon([Convergence(0.1, 0.0, 9, True, 1.0), Convergence(0.01, 1.0, 9, False, 1)])
    0.1
    """
    smallest = None
    for row in sorted(rows, key=lambda row: -row.epsilon):
        if not row.converged:
            break
        smallest = row.epsilon
    return smallest


@functools.partial(jax.jit, static_argnames=("max_iterations", "block_size"))
def _solve(
    f: Array, g: Array, epsilon: Any, tolerance: Any, *, max_iterations: int, block_size: int | None
) -> tuple[Array, Array, Array]:
    f, g = affinity.l2_normalize(f), affinity.l2_normalize(g)
    cosines = Cosines(f, g, jnp.ones_like(f[:, 0]), jnp.ones_like(g[:, 0]))
    kernel = Kernel(cosines, block_size)
    a, b = cosines.f_scale / len(f), cosines.g_scale / len(g)
    scalings, state = solver.solve(
        kernel,
        jnp.log(a),
        jnp.log(b),
        epsilon=epsilon,
        tolerance=tolerance,
        max_iterations=max_iterations,
    )
    moved = kernel.transport(state, a, b, cosines)
    partners = jnp.exp(-moved.log_moment - jnp.sum(moved.columns * jnp.log(b)))
    return scalings.error, scalings.iterations, partners
