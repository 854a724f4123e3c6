"""SpectralNet: a network whose outputs span the smoothest functions on the data's own graph.

Eigenvectors of the graph Laplacian with the smallest eigenvalues vary least between neighbours.
A network that is trained to vary little, with its outputs kept orthonormal, approximates them and
maps new rows as well.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from sotalign_jax import checks
from sotalign_jax.heads import Head, Rows
from sotalign_jax.ot import affinity

_CHUNK_ROWS = 8192

Network = TypeVar("Network", bound=Head)


class Graph(NamedTuple):
    """Which rows of a batch are neighbours, and how near.

    Attributes:
        neighbours: joined to every row, itself not counted; all rows of smaller batches.
        scale: the place, in a row's list of nearest rows that starts with itself, whose median
            distance is the unit of length.
    """

    neighbours: int = 30
    scale: int = 15


class Schedule(NamedTuple):
    """How long to train, and on what.

    Attributes:
        epochs: passes over nine tenths of the rows; the last tenth is for validation.
        batch: rows a step; all of them when there are fewer.
        learning_rate: Adam's, at first.
        patience: epochs without a better validation loss before the rate falls to a tenth.
        min_rate: the rate at which training ends.
    """

    epochs: int
    batch: int
    learning_rate: float
    patience: int = 10
    min_rate: float = 1e-8


def adjacency(rows: Float[Array, "m d"], graph: Graph) -> Float[Array, "m m"]:
    """W_ij = exp(-||x_i - x_j||^2 / s^2) for the nearest rows j of i, made symmetric by a mean.

    Args:
        rows: a batch.
        graph: how many are near, and which distance is s.

    >>> print(adjacency(jnp.array([[0.0], [1.0], [9.0]]), Graph(1, 2)).round(3))
    [[1.    0.368 0.   ]
     [0.368 1.    0.   ]
     [0.    0.    1.   ]]
    """
    rows = affinity.as_float(rows)
    rows -= jnp.mean(rows, axis=0)  # so that little cancels in the distances
    lengths = jnp.sum(jnp.square(rows), axis=1)
    squares = jnp.maximum(lengths[:, None] + lengths - 2.0 * affinity.dot(rows, rows.T), 0.0)
    squares = jnp.fill_diagonal(squares, 0.0, inplace=False)
    count = min(graph.neighbours + 1, len(rows))
    nearest = -jax.lax.top_k(-squares, count)[0]
    unit = jnp.median(jnp.sqrt(nearest[:, min(graph.scale, count) - 1]))
    unit = jnp.maximum(jnp.square(unit), jnp.finfo(squares.dtype).tiny)
    weights = jnp.where(squares <= nearest[:, -1:], jnp.exp(-squares / unit), 0.0)
    return 0.5 * (weights + weights.T)


def variation(y: Float[Array, "m k"], weights: Float[Array, "m m"]) -> Float[Array, ""]:
    """sum_ij W_ij ||y_i - y_j||^2 / (2 m) = tr(Y^T L Y) / m, L = diag(W 1) - W the Laplacian.

    >>> print(variation(jnp.array([[0.0], [1.0]]), jnp.ones((2, 2))))
    0.5
    """
    return jnp.trace(_rayleigh(y, weights))


def _rayleigh(y: Array, weights: Array) -> Array:
    """Y^T L Y / m."""
    degrees = jnp.sum(weights, axis=1, keepdims=True)
    return affinity.dot(y.T, degrees * y - affinity.dot(weights, y)) / len(y)


def orthonormalizer(y: Float[Array, "m k"]) -> Float[Array, "k k"]:
    """The triangular T with (Y T)^T (Y T) / m = I: sqrt(m) R^-1 of Y = Q R.

    R comes from the Cholesky factor of Y^T Y, which takes far less time than Q R does; a
    millionth is added to its diagonal, so that outputs that nearly depend on each other have one.

    >>> y = jnp.array([[3.0, 0.0], [4.0, 0.0], [0.0, 5.0]])
    >>> z = y @ orthonormalizer(y)
    >>> bool(jnp.allclose(z.T @ z / 3, jnp.eye(2), atol=1e-4))
    True
    """
    gram = affinity.dot(y.T, y) / len(y)
    identity = jnp.eye(len(gram), dtype=gram.dtype)
    factor = jnp.linalg.cholesky(gram + 1e-6 * jnp.trace(gram) / len(gram) * identity)
    return jax.scipy.linalg.solve_triangular(factor, identity, lower=True).T


def fit(
    network: Network,
    rows: Rows,
    *,
    graph: Graph,
    schedule: Schedule,
    key: Array,
    report: Callable[[int, float], None] = lambda epoch, loss: None,
) -> tuple[Network, Float[np.ndarray, "k k"]]:
    """Trains a network for the Laplacian's smoothest eigenvectors.

    Each step takes one batch to orthonormalise the outputs and another for the loss; the gradient
    goes through both. Afterwards the outputs are orthonormalised over all rows and rotated by the
    eigenvectors of their Rayleigh matrix, smoothest first: the constant one.

    Args:
        network: where to start; left as it is.
        rows: all rows of one modality, (n, d).
        graph: the graph of a batch.
        schedule: steps and batches.
        key: decides the split and the batches.
        report: called after every epoch with the validation loss.

    Returns:
        The trained network, and the map T: `network(x) @ T` are the eigenvectors, of mean square 1.

    Raises:
        InputError: there are fewer rows than outputs.
        FloatingPointError: the loss became NaN or infinite.
    """
    least = 2 * network.d_out + 2
    if len(rows) < least:
        raise checks.InputError(
            f"eigenvectors: {network.d_out} asked of {len(rows)} rows; add rows, at least {least}, "
            "or ask for fewer"
        )
    graphdef, params = nnx.split(network)
    key, split = jax.random.split(key)
    order = jax.random.permutation(split, len(rows))
    held = max(len(rows) // 10, 1)
    table = jnp.asarray(rows)
    train, val = table[order[held:]], table[order[:held]]
    batch = min(schedule.batch, len(train))
    static: dict[str, Any] = {"graphdef": graphdef, "graph": graph, "batch": batch}
    state = jax.tree.map(jnp.copy, (params, optax.scale_by_adam().init(params)))
    rate, best, waited = schedule.learning_rate, float("inf"), 0
    for epoch in range(1, schedule.epochs + 1):
        epoch_key = jax.random.fold_in(key, epoch)
        state, loss = _epoch(state, train, val, epoch_key, jnp.float32(rate), **static)
        value = float(loss)
        if not np.isfinite(value):
            raise FloatingPointError(
                f"spectral network: the loss is not finite in epoch {epoch}; lower learning_rate"
            )
        report(epoch, value)
        if value < best * (1 - 1e-4):
            best, waited = value, 0
        else:
            waited += 1
        if waited > schedule.patience:
            rate, waited = rate / 10, 0
        if rate <= schedule.min_rate:
            break
    trained = nnx.merge(graphdef, state[0])
    outputs = apply(trained, table).astype(np.float64)
    triangle = np.linalg.qr(outputs, mode="r")
    if np.linalg.matrix_rank(triangle) < len(triangle):
        raise FloatingPointError(
            "spectral network: its outputs depend on each other; lower learning_rate"
        )
    transform = np.sqrt(len(outputs)) * np.linalg.inv(triangle)
    matrix = _mean_rayleigh(state[0], jnp.asarray(transform, jnp.float32), table, key, **static)
    _, vectors = np.linalg.eigh(np.asarray(matrix, np.float64))
    return trained, transform @ vectors


def apply(network: Head, rows: Rows) -> Float[np.ndarray, "n k"]:
    """The network's outputs for any number of rows, in blocks."""
    graphdef, params = nnx.split(network)
    blocks = [rows[start : start + _CHUNK_ROWS] for start in range(0, len(rows), _CHUNK_ROWS)]
    return np.concatenate(
        [np.asarray(_outputs(params, jnp.asarray(block), graphdef=graphdef)) for block in blocks]
    )


@functools.partial(jax.jit, static_argnames="graphdef")
def _outputs(params: Any, rows: Array, *, graphdef: Any) -> Array:
    return nnx.merge(graphdef, params)(rows)


def batches(key: Array, n: int, size: int) -> Array:
    """Indices of a shuffled pass over n rows, (n // size, size); a rest is left out."""
    steps = n // size
    return jax.random.permutation(key, n)[: steps * size].reshape(steps, size)


@functools.partial(jax.jit, static_argnames=("graphdef", "graph", "batch"), donate_argnames="state")
def _epoch(
    state: Any,
    train: Array,
    val: Array,
    key: Array,
    rate: Array,
    *,
    graphdef: Any,
    graph: Graph,
    batch: int,
) -> tuple[Any, Array]:
    """The state after a pass over `train`, and the loss on `val`."""
    adam = optax.scale_by_adam()

    def objective(params: Any, rows: Array, others: Array) -> tuple[Array, Array]:
        network = nnx.merge(graphdef, params)
        transform = orthonormalizer(network(others))
        y = affinity.dot(network(rows), transform)
        return variation(y, adjacency(rows, graph)), transform

    def step(state: Any, indices: tuple[Array, ...]) -> tuple[Any, Array]:
        params, moments = state
        rows, others = (train[index] for index in indices)
        gradient, transform = jax.grad(objective, has_aux=True)(params, rows, others)
        updates, moments = adam.update(gradient, moments)
        params = jax.tree.map(lambda p, update: p - rate * update, params, updates)
        return (params, moments), transform

    keys = jax.random.split(key)
    passes = tuple(batches(k, len(train), batch) for k in keys)
    state, transforms = jax.lax.scan(step, state, passes)
    network = nnx.merge(graphdef, state[0])
    size = min(batch, len(val))

    def validate(rows: Array) -> Array:
        y = affinity.dot(network(rows), transforms[-1])
        return variation(y, adjacency(rows, graph))

    steps = len(val) // size
    return state, jnp.mean(jax.lax.map(validate, val[: steps * size].reshape(steps, size, -1)))


@functools.partial(jax.jit, static_argnames=("graphdef", "graph", "batch"))
def _mean_rayleigh(
    params: Any,
    transform: Array,
    rows: Array,
    key: Array,
    *,
    graphdef: Any,
    graph: Graph,
    batch: int,
) -> Array:
    """The mean over a pass of the outputs' Rayleigh matrices."""
    network = nnx.merge(graphdef, params)

    def of_batch(index: Array) -> Array:
        y = affinity.dot(network(rows[index]), transform)
        return _rayleigh(y, adjacency(rows[index], graph))

    return jnp.mean(jax.lax.map(of_batch, batches(key, len(rows), batch)), axis=0)
