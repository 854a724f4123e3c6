"""Entropic optimal transport: affinity K -> plan P = exp(K/epsilon + u + v).

    OT_eps(K) = argmin_{P 1 = a, P^T 1 = b}  -<P, K> + eps * sum P log P

`u, v` are log-scalings (dimensionless) everywhere. `sinkhorn` is the fast solver, `reference`
beside it is the plain textbook one.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sotalign_jax import checks
from sotalign_jax.ot import affinity, sharding
from sotalign_jax.ot.kernel import Kernel, Matrix
from sotalign_jax.ot.solver import Scalings, finite_range, solve


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """A transport plan in scaling form, log P_ij = K_ij/epsilon + u_i + v_j.

    Attributes:
        affinity: K, shape [n, m].
        u: row log-scalings, shape [n]; -inf where the weight is zero.
        v: column log-scalings, shape [m]; -inf where the weight is zero.
        epsilon: the entropic regularisation.
        error: max(||P 1 - a||_1, ||P^T 1 - b||_1), with a and b summing to 1.
        iterations: number of (u, v) updates made.
        converged: whether `error` reached the tolerance asked for.
    """

    affinity: Float[Array, "n m"]
    u: Float[Array, " n"]
    v: Float[Array, " m"]
    epsilon: Float[Array, ""]
    error: Float[Array, ""]
    iterations: Int[Array, ""]
    converged: Bool[Array, ""]

    def log_matrix(self) -> Float[Array, "n m"]:
        """log P."""
        scaled = self.affinity / self.epsilon[..., None, None]  # a vmapped solve gives many plans
        return scaled + self.u[..., :, None] + self.v[..., None, :]

    def matrix(self) -> Float[Array, "n m"]:
        """P."""
        return jnp.exp(self.log_matrix())

    def apply(self, values: Float[Array, "m k"]) -> Float[Array, "n k"]:
        """P @ values: what each row's mass carries over from the columns."""
        return affinity.dot(self.matrix(), values)


def log_weights(
    name: str, given: Float[Array, " n"] | None, size: int, dtype: Any
) -> Float[Array, " n"]:
    """The given log-weights, checked, or uniform ones."""
    if given is None:
        return jnp.full((size,), -jnp.log(size), dtype)
    if jnp.shape(given) != (size,):
        raise checks.InputError(
            f"{name}: has shape {jnp.shape(given)} but the affinity needs ({size},); "
            "pass one log-weight for each of its rows (log_a) or columns (log_b)"
        )
    if not isinstance(given, jax.core.Tracer):
        total = np.exp(np.asarray(given, np.float64)).sum()
        if not abs(total - 1) < 1e-3:
            raise checks.InputError(
                f"{name}: the weights sum to {total:.4g}; pass logarithms of weights that sum to 1"
            )
    return jnp.asarray(given, dtype)


def without_padding(k: Array, log_a: Array, log_b: Array) -> Array:
    """K with zeros in the rows and columns of weight zero, where anything may stand."""
    return jnp.where(jnp.isneginf(log_a)[:, None] | jnp.isneginf(log_b), 0.0, k)


@jax.custom_jvp
def _not_differentiable(k: Array) -> Array:
    return k


@_not_differentiable.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise TypeError(
        "sinkhorn: plans are not differentiable; use klot or klot_from_embeddings, whose gradient "
        "is exact, or pass jax.lax.stop_gradient(K)"
    )


def sinkhorn(
    K: Float[Array, "n m"],
    *,
    epsilon: Any,
    log_a: Float[Array, " n"] | None = None,
    log_b: Float[Array, " m"] | None = None,
    tolerance: float = 1e-4,
    max_iterations: int = 2000,
    init: tuple[Array, Array] | None = None,
) -> Plan:
    """Solves OT_eps(K), the entropic transport plan of an affinity.

    Stops when max(||P 1 - a||_1, ||P^T 1 - b||_1) <= tolerance; `Plan.converged` tells whether it
    was reached. Works under `jit` and `vmap`, in float32 and float64, for any epsilon > 0.

    Args:
        K: affinity (larger is closer), shape [n, m].
        epsilon: entropic regularisation, in the units of K.
        log_a: log-weights of the rows, exp(log_a) summing to 1; -inf pads. Uniform by default.
        log_b: log-weights of the columns, likewise.
        tolerance: marginal error (L1, total mass 1) to stop at.
        max_iterations: number of (u, v) updates to stop at.
        init: (u, v) to start from, such as those of a similar problem. Only v matters, for u
            follows from it.

    Returns:
        The `Plan`.

    >>> plan = sinkhorn(jnp.array([[1.0, 0.0], [0.0, 1.0]]), epsilon=0.5)
    >>> plan.matrix().tolist(), bool(plan.converged)
    ([[0.44, 0.06], [0.06, 0.44]], True)
    """
    affinity.check_affinity("K", K)
    checks.positive(epsilon=epsilon)
    K = _not_differentiable(affinity.as_float(K))
    weights = (
        log_weights("log_a", log_a, K.shape[0], K.dtype),
        log_weights("log_b", log_b, K.shape[1], K.dtype),
    )
    if not (log_a is None and log_b is None):
        K = without_padding(K, *weights)

    def own_rows(axes: sharding.Axes, rows: Any, shared: Any) -> tuple[Array, Any]:
        (k, log_a), (log_b, options) = rows, shared
        span = finite_range(k, axes)
        scalings, _ = solve(
            Kernel(Matrix(k), axes=axes),
            log_a,
            log_b,
            max_iterations=max_iterations,
            affinity_range=span,
            **options,
        )
        return scalings.u, scalings[1:]

    options = {
        "epsilon": epsilon,
        "tolerance": tolerance,
        "init_v": None if init is None else init[1],
    }
    rows = sharding.pad(K), sharding.pad(weights[0], -jnp.inf)
    u, rest = sharding.by_rows(own_rows, rows, (weights[1], options))
    scalings = Scalings(u[: len(K)], *rest)
    return Plan(
        affinity=K,
        u=scalings.u,
        v=scalings.v,
        epsilon=jnp.asarray(epsilon, K.dtype),
        error=scalings.error,
        iterations=scalings.iterations,
        converged=scalings.error <= tolerance,
    )


def reference(
    K: Float[Array, "n m"],
    *,
    epsilon: Any,
    iterations: int = 100,
    symmetric: bool = True,
) -> Plan:
    """Textbook log-domain Sinkhorn with uniform weights, as in the paper's published loss.

    Repeats u = log a - LSE_j(K/eps + v), v = log b - LSE_i(K/eps + u) from v = 0. `symmetric`
    ends, as the published code does, with u moved half-way to its next iterate. Differentiable
    by unrolling, in the memory of one iteration, and slow: `sinkhorn` is the one to use.
    `converged` means an error of at most 1e-4, the default tolerance there.

    >>> reference(jnp.eye(2), epsilon=0.5).matrix().tolist()
    [[0.44, 0.06], [0.06, 0.44]]
    """
    affinity.check_affinity("K", K)
    checks.positive(epsilon=epsilon)
    K = affinity.as_float(K)
    n, m = K.shape
    scaled = K / epsilon
    log_a, log_b = -jnp.log(jnp.asarray(n, K.dtype)), -jnp.log(jnp.asarray(m, K.dtype))

    def update_u(v: Array) -> Array:
        return log_a - jax.nn.logsumexp(scaled + v[None, :], axis=1)

    def step(uv: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        u = update_u(uv[1])
        return (u, log_b - jax.nn.logsumexp(scaled + u[:, None], axis=0)), None

    start = (jnp.zeros(n, K.dtype), jnp.zeros(m, K.dtype))
    (u, v), _ = jax.lax.scan(jax.checkpoint(step), start, length=iterations)
    if symmetric:
        u = (u + update_u(v)) / 2
    matrix = jnp.exp(scaled + u[:, None] + v[None, :])
    error = jnp.maximum(
        jnp.sum(jnp.abs(matrix.sum(1) - 1 / n)), jnp.sum(jnp.abs(matrix.sum(0) - 1 / m))
    )
    return Plan(
        affinity=K,
        u=u,
        v=v,
        epsilon=jnp.asarray(epsilon, K.dtype),
        error=error,
        iterations=jnp.asarray(iterations),
        converged=error <= 1e-4,
    )
