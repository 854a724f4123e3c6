"""Cross-moments of two pools under the transport plan between them.

The plan P of the teacher's cosines couples the pools softly, and X^T P Y is the cross-covariance of
that coupling. Only blocks of rows of P are computed at a time, as in the backward pass of KLOT.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sotalign_jax.ot import affinity, blocks, device, sharding
from sotalign_jax.ot.affinity import Cosines
from sotalign_jax.ot.blocks import Block, over_rows
from sotalign_jax.ot.kernel import Operator
from sotalign_jax.ot.solver import MAX_ITERATIONS, goal, solve


@functools.partial(jax.jit, static_argnames="profile")
def cross_moment(
    x: Float[Array, "n d"],
    y: Float[Array, "m e"],
    directions_x: Float[Array, "d k"],
    directions_y: Float[Array, "e k"],
    *,
    epsilon: Any,
    tolerance: Any,
    profile: device.Profile,
) -> tuple[Float[Array, "d e"], Float[Array, ""]]:
    """Computes X^T P Y for the plan P between cos(X W_x, Y W_y), with rows split over the mesh.

    Args:
        x: Centred rows X of the first pool.
        y: Centred rows Y of the second pool.
        directions_x: Directions W_x of the teacher.
        directions_y: Directions W_y of the teacher.
        epsilon: Regularisation of the plan.
        tolerance: Marginal error of the plan.
        profile: Profile of the device, which determines how the kernel is stored.

    Returns:
        The cross-moment of the coupling, whose mass is 1, and the plan's marginal error, which may
        exceed the tolerance if the solver reached its largest number of sweeps.
    """
    n, m = len(x), len(y)
    log_a, log_b = (jnp.full(size, -jnp.log(size), x.dtype) for size in (n, m))

    def own_rows(axes: sharding.Axes, rows: Any, shared: Any) -> tuple[Any, Any]:
        (x, log_a), (y, log_b, directions_x, directions_y, epsilon) = rows, shared
        f, g = affinity.dot(x, directions_x), affinity.dot(y, directions_y)
        precision = profile.teacher
        block_size = blocks.storage(len(x), len(y), x.dtype, profile).block_size
        operator = Operator(Cosines.of(f, g, precision), block_size, axes=axes)
        aim = goal(jnp.asarray(tolerance, x.dtype), 1.0, epsilon)
        limits: Any = {"tolerance": aim, "max_iterations": MAX_ITERATIONS}
        scalings, kernel = solve(operator, log_a, log_b, epsilon=epsilon, **limits)
        weights = jnp.exp(log_a), jnp.exp(log_b)

        def body(block: Block, total: Array) -> Array:
            plan, _ = operator.plan_rows(kernel, block, *weights)
            return total + affinity.dot(block.of(x).T, affinity.dot(plan, y, precision), precision)

        start = sharding.vary_like(jnp.zeros((x.shape[1], y.shape[1]), x.dtype), x)
        size = block_size or min(blocks.PRODUCT_ROWS, len(x))
        total = over_rows(len(x), size, body, start)
        return (), (sharding.psum(total, axes), scalings.error)

    with sharding.mesh_of(x, y):
        rows = sharding.split(x), sharding.split(log_a, -jnp.inf)
        shared = y, log_b, directions_x, directions_y, jnp.asarray(epsilon, x.dtype)
        return sharding.shard_map(own_rows, rows, shared)[1]
