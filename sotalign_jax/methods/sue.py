"""SUE: spectral embeddings of each modality, joined by few pairs.

Of all orthonormal functions on a graph, the eigenvectors of its Laplacian with the smallest
eigenvalues vary least between neighbours. A SpectralNet is a network that is trained to vary little
between neighbours, while its outputs are kept orthonormal. It approximates those eigenvectors, and
also maps rows that are not in the graph.

References:
    A. Yacobi et al., "Learning shared representations from unpaired data", NeurIPS 2025 (SUE).
    U. Shaham et al., "SpectralNet: spectral clustering using deep neural networks", ICLR 2018.
    A. Gretton et al., "A kernel two-sample test", JMLR 13 (2012) (MMD).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from sotalign_jax import checks, data, evaluation, teachers
from sotalign_jax.heads import Dense, Head, Heads, Rows, TanhHead
from sotalign_jax.methods import base
from sotalign_jax.ot import affinity
from sotalign_jax.progress import Progress

# Bandwidths of the Gaussian kernels in `mmd`, in units of the mean squared distance, as published.
_BANDWIDTHS = (0.5, 1.0, 2.0)

_Network = TypeVar("_Network", bound=nnx.Module)
# Weight and bias of an affine map.
_Affine = tuple[np.ndarray, np.ndarray]
# Callback that receives the number of an epoch, from 1, and the loss on held-out rows.
_Report = Callable[[int, float], None]
# Raw outputs of a network, computed in blocks of rows.
outputs = functools.partial(evaluation.embed, unit=False)


@dataclasses.dataclass(frozen=True)
class SUE(base.Fitted):
    """Fits SpectralNets on all rows, CCA on the pairs, and a residual network by MMD.

    1. One network per modality learns the smoothest eigenvectors of its graph of neighbours.
    2. CCA on the pairs maps the eigenvectors of both modalities to canonical variates, which span
       the shared space.
    3. A residual network moves the first modality so that both distributions agree.

    The defaults are for thousands of rows on a CPU. The published settings, for 30,000 rows on a
    GPU, are hidden=4096, batch=5162, learning_rate=1e-4 and epochs=100.

    Attributes:
        dim: Number of canonical variates, the width of the shared space. Published: 8.
        eigenvectors: Number of outputs of each spectral network.
        hidden: Width of the hidden layers of the spectral networks.
        neighbours: Number of neighbours of a row in the graph of a batch.
        scale_neighbour: Rank of the neighbour whose median distance is the bandwidth of the graph.
            The row itself has rank 1.
        epochs: Epochs of each spectral network.
        batch: Rows per step of a spectral network.
        learning_rate: Learning rate of a spectral network's Adam.
        patience: Epochs without improvement before that rate is divided by 10.
        centred: True for canonical variates of zero mean and unit variance. The published code does
            not subtract the mean, and scales the directions differently.
        mmd_epochs: Epochs of the residual network, 0 to leave it out.
        mmd_batch: Rows per step of the residual network.
        mmd_learning_rate: Learning rate of the residual network's AdamW.
        mmd_hidden: Width of the hidden layers of the residual network.

    References:
        A. Yacobi et al., "Learning shared representations from unpaired data", NeurIPS 2025.
    """

    grid: ClassVar[base.Grid] = {"dim": (8, 16, 30)}
    pools = "xy"

    dim: int = 8
    eigenvectors: int = 30
    hidden: int = 256
    neighbours: int = 30
    scale_neighbour: int = 15
    epochs: int = 40
    batch: int = 1024
    learning_rate: float = 1e-3
    patience: int = 10
    centred: bool = False
    mmd_epochs: int = 100
    mmd_batch: int = 32
    mmd_learning_rate: float = 1e-3
    mmd_hidden: int = 32

    def __post_init__(self) -> None:
        checks.whole(1, hidden=self.hidden, mmd_hidden=self.mmd_hidden)
        checks.whole(1, neighbours=self.neighbours, epochs=self.epochs)
        checks.whole(0, mmd_epochs=self.mmd_epochs, patience=self.patience)
        checks.whole(2, batch=self.batch, mmd_batch=self.mmd_batch)
        checks.positive(learning_rate=self.learning_rate, mmd_learning_rate=self.mmd_learning_rate)
        neighbourhood = "rows in a neighbourhood, the row itself included"
        checks.within(self.neighbours + 1, neighbourhood, scale_neighbour=self.scale_neighbour)
        # A batch of m rows has at most m orthonormal columns.
        checks.within(self.batch, "rows in a batch", eigenvectors=self.eigenvectors)
        checks.within(self.eigenvectors, "eigenvectors", dim=self.dim)

    def fit(self, dataset: data.Dataset, *, seed: int, progress: bool = False) -> Heads:
        """Fits the three stages. Equal seeds give equal heads.

        Args:
            dataset: Pairs and pools.
            seed: Seed of networks and batches.
            progress: True shows a progress bar.

        Returns:
            The heads.

        Raises:
            InputError: There are too few pairs or rows.
            FloatingPointError: A loss is not finite.
        """
        pairs, pools = (dataset.pairs_x, dataset.pairs_y), (dataset.pool_x, dataset.pool_y)
        n = len(pairs[0])
        checks.within(n - 1, f"directions that {n} pairs can determine", dim=self.dim)
        # Both networks learn from all rows of their modality. Only CCA uses the pairing.
        rows = [np.concatenate(parts) for parts in zip(pairs, pools, strict=True)]
        *keys, key_mmd = jax.random.split(jax.random.key(seed), 3)
        with Progress(2 * self.epochs + self.mmd_epochs, "SUE", show=progress) as bar:

            def report(before: int) -> _Report:
                return lambda epoch, loss: bar.metrics(before + epoch, {"loss": loss})

            spectral, eigenvectors = [], []
            for side, before in enumerate((0, self.epochs)):
                start, key = jax.random.split(keys[side])
                widths = rows[side].shape[1], self.eigenvectors
                fresh = TanhHead(*widths, hidden=self.hidden, rngs=nnx.Rngs(params=start))
                network, basis = fit_spectral(
                    fresh, rows[side], self, key=key, report=report(before)
                )
                spectral.append((network, basis))
                eigenvectors.append(outputs(network, pairs[side]) @ basis)
            # The maps to eigenvectors and from there to variates are both linear, and become one.
            x, y = (
                SUEHead(network, Dense.of(basis @ weight, bias))
                for (network, basis), (weight, bias) in zip(
                    spectral, self.variates(*eigenvectors), strict=True
                )
            )
            if self.mmd_epochs:
                start, key = jax.random.split(key_mmd)
                residual = Residual(self.dim, self.mmd_hidden, rngs=nnx.Rngs(params=start))
                embedded = outputs(x, rows[0]), outputs(y, rows[1])
                residual = refine(
                    residual, *embedded, self, key=key, report=report(2 * self.epochs)
                )
                x = SUEHead(x.network, x.linear, residual)
        return Heads(x, y)

    def variates(self, x: np.ndarray, y: np.ndarray) -> tuple[_Affine, _Affine]:
        """Fits the maps from eigenvectors to canonical variates, on the pairs.

        They are fitted on columns of unit variance. The published code then applies them to the
        columns without that scaling, and without subtracting the means.

        Args:
            x: Eigenvectors of the first modality at the pairs, shape [n, k].
            y: Eigenvectors of the second modality at the pairs, shape [n, k].

        Returns:
            Weight and bias of each side.

        References:
            H. Hotelling, "Relations between two sets of variates", Biometrika 28 (1936).
        """
        spreads = [table.std(axis=0, ddof=1) for table in (x, y)]
        # A constant column has no variance, and stays as it is.
        spreads = [np.where(spread == 0, 1.0, spread) for spread in spreads]
        found = teachers.canonical_correlations(x / spreads[0], y / spreads[1])
        checks.within(len(found.correlations), "directions that the pairs determine", dim=self.dim)

        def affine(weights: np.ndarray, mean: np.ndarray, spread: np.ndarray) -> _Affine:
            weight = weights[:, : self.dim]
            if self.centred:
                return weight / spread[:, None], -mean @ weight
            # In the published solver, the component of each direction that is orthogonal to the
            # directions before it has length 1.
            lengths = np.abs(np.diag(np.linalg.qr(weight, mode="r")))
            return weight / lengths, np.zeros(self.dim)

        x_map = affine(found.weights_x, found.mean_x, spreads[0])
        return x_map, affine(found.weights_y, found.mean_y, spreads[1])


class Residual(nnx.Module):
    """Residual network z + W_3 relu(W_2 relu(W_1 z)), with biases.

    Args:
        width: Width of input and output.
        hidden: Width of the hidden layers.
        rngs: Source of random keys.

    Example:
        >>> Residual(3, 8, rngs=nnx.Rngs(0))(jnp.ones((5, 3))).shape
        (5, 3)
    """

    def __init__(self, width: int, hidden: int, *, rngs: nnx.Rngs):
        self.hidden = hidden
        widths = (width, hidden, hidden, width)
        self.layers = nnx.List([Dense(a, b, rngs=rngs) for a, b in itertools.pairwise(widths)])

    def __call__(self, z: Float[Array, "n d"]) -> Float[Array, "n d"]:
        first, second, last = self.layers
        return z + last(jax.nn.relu(second(jax.nn.relu(first(z)))))


class SUEHead(Head):
    """SUE's head, residual(network(x) W + b) of a spectral network and canonical variates.

    Args:
        network: Spectral network.
        linear: Map from its outputs to canonical variates.
        residual: Residual network, or None.

    Example:
        >>> network = TanhHead(8, 6, hidden=16, rngs=nnx.Rngs(0))
        >>> SUEHead(network, Dense(6, 3, rngs=nnx.Rngs(0)))(jnp.ones((5, 8))).shape
        (5, 3)
    """

    kind = "sue"

    def __init__(self, network: TanhHead, linear: Dense, residual: Residual | None = None):
        self.d_in, self.d_out = network.d_in, linear.bias.shape[0]
        self.network, self.linear, self.residual = network, linear, residual

    def __call__(self, x: Rows) -> Float[Array, "n d_out"]:
        z = self.linear(self.network(x))
        return z if self.residual is None else self.residual(z)

    def options(self) -> dict[str, Any]:
        """Returns the structure of the head as JSON values."""
        return {
            "d_in": self.d_in,
            "d_out": self.d_out,
            "outputs": self.network.d_out,
            "hidden": self.network.hidden,
            "norm": self.network.norm,
            "residual": None if self.residual is None else self.residual.hidden,
        }

    @classmethod
    def from_options(
        cls, *, d_in: int, d_out: int, outputs: int, residual: int | None, **network: Any
    ) -> "SUEHead":
        """Builds a head of this structure with arbitrary parameters.

        Args:
            d_in: Width of the embeddings.
            d_out: Width of the shared space.
            outputs: Number of outputs of the spectral network.
            residual: Width of the residual network's hidden layers. None leaves it out.
            **network: Other options of the spectral network.

        Returns:
            The head.
        """
        rngs = nnx.Rngs(0)
        last = None if residual is None else Residual(d_out, residual, rngs=rngs)
        inner = TanhHead(d_in, outputs, **network, rngs=rngs)
        return cls(inner, Dense(outputs, d_out, rngs=rngs), last)


# --- spectral networks ---


def adjacency(
    rows: Float[Array, "m d"], *, neighbours: int, scale_neighbour: int
) -> Float[Array, "m m"]:
    """Builds the graph of nearest neighbours of a batch.

    W_ij = exp(-||x_i - x_j||^2 / s^2) for the nearest rows j of i, averaged with W^T. The bandwidth
    s is the median distance of a row to its `scale_neighbour`-th nearest row, itself included.

    Args:
        rows: Embeddings, shape [m, d].
        neighbours: Number of neighbours of a row, without itself.
        scale_neighbour: Rank of the neighbour that determines the bandwidth.

    Returns:
        The weights W, shape [m, m].

    Example:
        >>> rows = jnp.array([[0.0], [1.0], [9.0]])
        >>> print(adjacency(rows, neighbours=1, scale_neighbour=2).round(3))
        [[1.    0.368 0.   ]
         [0.368 1.    0.   ]
         [0.    0.    1.   ]]
    """
    rows = affinity.as_float(rows)
    # Centred rows are shorter, so their squared distances lose fewer digits by cancellation.
    rows -= jnp.mean(rows, axis=0)
    squares = _squared_distances(rows)
    count = min(neighbours + 1, len(rows))
    nearest = -jax.lax.top_k(-squares, count)[0]
    bandwidth = jnp.median(jnp.sqrt(nearest[:, min(scale_neighbour, count) - 1]))
    # If most rows are equal, the median distance is 0.
    scale = jnp.maximum(jnp.square(bandwidth), jnp.finfo(squares.dtype).tiny)
    # All rows as close as the last neighbour count, so that ties do not depend on their order.
    weights = jnp.where(squares <= nearest[:, -1:], jnp.exp(-squares / scale), 0.0)
    return 0.5 * (weights + weights.T)


def _squared_distances(rows: Array) -> Array:
    """Computes all ||x_i - x_j||^2, exactly 0 on the diagonal."""
    lengths = jnp.sum(jnp.square(rows), axis=1)
    squares = jnp.maximum(lengths[:, None] + lengths - 2.0 * affinity.dot(rows, rows.T), 0.0)
    # Rounding would leave small distances on the diagonal.
    return squares * (1.0 - jnp.eye(len(rows), dtype=squares.dtype))


def rayleigh(y: Float[Array, "m k"], weights: Float[Array, "m m"]) -> Float[Array, "k k"]:
    """Computes Y^T L Y / m of the Laplacian L = diag(W 1) - W.

    Its trace, sum_ij W_ij ||y_i - y_j||^2 / (2 m), measures how much Y varies between neighbours.

    Args:
        y: Outputs of a network, shape [m, k].
        weights: Graph W, shape [m, m].

    Returns:
        The matrix, shape [k, k].

    Example:
        >>> print(rayleigh(jnp.array([[0.0], [1.0]]), jnp.ones((2, 2))))
        [[0.5]]
    """
    degrees = jnp.sum(weights, axis=1, keepdims=True)
    return affinity.dot(y.T, degrees * y - affinity.dot(weights, y)) / len(y)


def orthonormalizer(y: Float[Array, "m k"]) -> Float[Array, "k k"]:
    """Returns the triangular T with (Y T)^T (Y T) / m = I, which is sqrt(m) R^-1 of Y = Q R.

    Args:
        y: Outputs of a network, shape [m, k].

    Returns:
        T, shape [k, k].

    Example:
        >>> y = jnp.array([[3.0, 0.0], [4.0, 0.0], [0.0, 5.0]])
        >>> z = y @ orthonormalizer(y)
        >>> bool(jnp.allclose(z.T @ z / 3, jnp.eye(2), atol=1e-5))
        True
    """
    # A Cholesky factorisation of Y^T Y would square the condition number, too much for float32.
    triangle = jnp.linalg.qr(y)[1]
    identity = jnp.eye(len(triangle), dtype=y.dtype)
    return jnp.sqrt(len(y)) * jax.scipy.linalg.solve_triangular(triangle, identity)


def fit_spectral(
    network: TanhHead,
    rows: Rows,
    options: SUE,
    *,
    key: Array,
    report: _Report = lambda epoch, loss: None,
) -> tuple[TanhHead, Float[np.ndarray, "k k"]]:
    """Trains a network to compute the smoothest eigenvectors of a graph's Laplacian.

    Each step orthonormalises the outputs on one batch and computes the loss on another. The
    gradient flows through both.

    Args:
        network: Initial network.
        rows: Embeddings of one modality, shape [n, d].
        options: Options of the method.
        key: PRNG key for the batches and for the tenth of the rows that is held out.
        report: Called after every epoch with the loss on the held-out rows.

    Returns:
        The network and the basis T. The columns of `network(x) @ T` are the eigenvectors, of mean
        square 1 and smoothest first. The first one is constant.

    Raises:
        InputError: There are too few rows.
        FloatingPointError: The loss is not finite, or outputs depend on each other.

    References:
        U. Shaham et al., "SpectralNet", ICLR 2018.
    """
    most, of = len(rows) // 2 - 1, f"eigenvectors that {len(rows)} rows can determine"
    checks.within(most, of, eigenvectors=network.d_out)
    key, split = jax.random.split(key)
    table = jnp.asarray(rows)
    train, val = _hold_out(split, table, max(len(rows) // 10, 1))
    batch = min(options.batch, len(train))
    trained = _train_spectral(network, train, val, options, batch, key=key, report=report)
    return trained, _eigenbasis(trained, table, options, batch, key=key)


def _batch_rayleigh(network: TanhHead, transform: Array, rows: Array, options: SUE) -> Array:
    """Computes the Rayleigh matrix of a network's transformed outputs on the graph of a batch."""
    graph = adjacency(rows, neighbours=options.neighbours, scale_neighbour=options.scale_neighbour)
    return rayleigh(affinity.dot(network(rows), transform), graph)


def _train_spectral(
    network: TanhHead,
    train: Array,
    val: Array,
    options: SUE,
    batch: int,
    *,
    key: Array,
    report: _Report,
) -> TanhHead:
    """Runs Adam on the trace of the Rayleigh matrix. The learning rate falls on plateaus."""
    graphdef, params = nnx.split(network)

    def loss(params: Any, transform: Array, rows: Array) -> Array:
        return jnp.trace(_batch_rayleigh(nnx.merge(graphdef, params), transform, rows, options))

    def objective(params: Any, rows: Array, others: Array) -> tuple[Array, Array]:
        transform = orthonormalizer(nnx.merge(graphdef, params)(others))
        return loss(params, transform, rows), transform

    # The learning rate is an argument of the step, so lowering it compiles nothing.
    adam = optax.scale_by_adam()
    pass_over = _pass(objective, loss, adam, batch)
    state = jax.tree.map(jnp.copy, (params, adam.init(params)))
    rate, best, waited = options.learning_rate, float("inf"), 0
    for epoch in range(1, options.epochs + 1):
        epoch_key = jax.random.fold_in(key, epoch)
        state, held = pass_over(state, (train, train), (val,), epoch_key, jnp.float32(rate))
        value = _finite(held, "spectral network", epoch, "learning_rate")
        report(epoch, value)
        # PyTorch's ReduceLROnPlateau with its default threshold and factor, as published.
        best, waited = (value, 0) if value < best * (1 - 1e-4) else (best, waited + 1)
        if waited > options.patience:
            rate, waited = rate / 10, 0
        if rate <= 1e-8:  # too small to change the network
            break
    return nnx.merge(graphdef, state[0])


def _eigenbasis(
    network: TanhHead, table: Array, options: SUE, batch: int, *, key: Array
) -> Float[np.ndarray, "k k"]:
    """Returns the matrix that turns outputs of a network into eigenvectors, smoothest first."""
    graphdef, params = nnx.split(network)

    @jax.jit
    def mean_rayleigh(params: Any, transform: Array, rows: Array, key: Array) -> Array:
        def batch_rayleigh(index: Array) -> Array:
            return _batch_rayleigh(nnx.merge(graphdef, params), transform, rows[index], options)

        return jnp.mean(jax.lax.map(batch_rayleigh, _batches(key, len(rows), batch)), axis=0)

    found = outputs(network, table).astype(np.float64)
    triangle = np.linalg.qr(found, mode="r")
    if np.linalg.matrix_rank(triangle) < len(triangle):
        raise FloatingPointError(
            "outputs of the spectral network are linearly dependent; lower learning_rate"
        )
    # Orthonormal over all rows, in float64. The training steps were orthonormal over batches.
    transform = np.sqrt(len(found)) * np.linalg.inv(triangle)
    matrix = mean_rayleigh(params, jnp.asarray(transform, jnp.float32), table, key)
    # Rayleigh-Ritz: orthonormal outputs span the eigenvectors, and the eigenvectors of the Rayleigh
    # matrix are the rotation to them.
    _, rotation = np.linalg.eigh(np.asarray(matrix, np.float64))
    return transform @ rotation


def _pass(
    objective: Callable[..., tuple[Array, Any]],
    validate: Callable[..., Array],
    optimizer: optax.GradientTransformation,
    batch: int,
) -> Callable[..., Any]:
    """Builds a jitted epoch over shuffled tables: (state, train, val, key, rate) -> (state, loss).

    Args:
        objective: Maps (params, *rows) to (loss, aux), with a batch of each table of `train`.
        validate: Maps (params, aux, *rows) to a loss, with the aux of the last step. It is averaged
            over blocks of `val`.
        optimizer: Transformation of the gradient, without the learning rate.
        batch: Rows per step.

    Returns:
        The function of an epoch. The state, (params, optimizer state), is donated.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def pass_over(state: Any, train: Any, val: Any, key: Array, rate: Array) -> Any:
        def step(state: Any, indices: tuple[Array, ...]) -> tuple[Any, Any]:
            params, opt_state = state
            rows = (table[index] for table, index in zip(train, indices, strict=True))
            gradient, aux = jax.grad(objective, has_aux=True)(params, *rows)
            updates, opt_state = optimizer.update(gradient, opt_state, params)
            params = jax.tree.map(lambda p, update: p - rate * update, params, updates)
            return (params, opt_state), aux

        # A pass over the smaller table. The tables are shuffled independently.
        steps, keys = min(map(len, train)) // batch, jax.random.split(key)
        batches = [_batches(k, len(t), batch)[:steps] for k, t in zip(keys, train, strict=True)]
        state, aux = jax.lax.scan(step, state, tuple(batches))
        # `scan` stacks the aux of all steps. Validation uses that of the last one.
        last = jax.tree.map(lambda stacked: stacked[-1], aux)
        blocks = [_blocks(rows, batch) for rows in val]
        losses = jax.lax.map(lambda rows: validate(state[0], last, *rows), blocks)
        return state, jnp.mean(losses)

    return pass_over


def _finite(loss: Array, network: str, epoch: int, option: str) -> float:
    """Returns the loss as a number, and raises FloatingPointError unless it is finite."""
    value = float(loss)
    if not np.isfinite(value):
        raise FloatingPointError(
            f"loss of the {network} is {value} in epoch {epoch}; lower {option}"
        )
    return value


def _hold_out(key: Array, rows: Array, held: int) -> tuple[Array, Array]:
    """Shuffles rows and splits them into rows to train on and `held` rows to validate on."""
    order = jax.random.permutation(key, len(rows))
    return rows[order[held:]], rows[order[:held]]


def _batches(key: Array, n: int, size: int) -> Array:
    """Draws the row numbers of a shuffled epoch, shape [n // size, size], without the remainder."""
    return _blocks(jax.random.permutation(key, n), size)


def _blocks(rows: Array, most: int) -> Array:
    """Splits rows into blocks of at most `most` rows, without the remainder."""
    size = min(most, len(rows))
    # `scan` and `map` need blocks of equal shape. Shuffling changes the remainder in every epoch.
    count = len(rows) // size
    return rows[: count * size].reshape(count, size, *rows.shape[1:])


# --- maximum mean discrepancy ---


def mmd(x: Float[Array, "n d"], y: Float[Array, "m d"]) -> Float[Array, ""]:
    """Computes the biased squared MMD, mean k(x, x') - 2 mean k(x, y) + mean k(y, y').

    The kernel k(a, b) is the sum of exp(-||a - b||^2 / (c s)) over c = 0.5, 1 and 2. The scale s is
    the mean squared distance between two different rows of [x; y]. It receives no gradient.

    Args:
        x: Rows, shape [n, d].
        y: Rows, shape [m, d].

    Returns:
        The squared discrepancy.

    Example:
        >>> x = jnp.array([[0.0], [1.0]])
        >>> print(mmd(x, x), mmd(x, x + 5.0) > 1.0)
        0.0 True

    References:
        A. Gretton et al., "A kernel two-sample test", JMLR 13 (2012).
    """
    squares = _squared_distances(jnp.concatenate([x, y]))
    n, total = len(x), len(squares)
    # The mean is over the entries off the diagonal, which is 0.
    scale = jax.lax.stop_gradient(jnp.sum(squares)) / (total * total - total)
    scale = jnp.maximum(scale, jnp.finfo(squares.dtype).tiny)
    bandwidths = jnp.asarray(_BANDWIDTHS, squares.dtype)[:, None, None]
    kernel = jnp.sum(jnp.exp(-squares / (bandwidths * scale)), axis=0)
    return jnp.mean(kernel[:n, :n]) - 2.0 * jnp.mean(kernel[:n, n:]) + jnp.mean(kernel[n:, n:])


def refine(
    network: _Network,
    x: Float[np.ndarray, "n d"],
    y: Float[np.ndarray, "m d"],
    options: SUE,
    *,
    key: Array,
    report: _Report = lambda epoch, loss: None,
) -> _Network:
    """Trains a network to minimise MMD(network(x), y).

    A tenth of the smaller side is held out of each side. The parameters with the smallest MMD on
    the held-out rows are kept. An epoch is a pass over the smaller side.

    Args:
        network: Initial network.
        x: Rows that the network maps, shape [n, d].
        y: Rows of the target distribution, in any order, shape [m, d].
        options: Options of the method.
        key: PRNG key for the batches and for the rows that are held out.
        report: Called after every epoch with the MMD of the held-out rows.

    Returns:
        The trained network.

    Raises:
        FloatingPointError: The loss is not finite.

    References:
        A. Gretton et al., "A kernel two-sample test", JMLR 13 (2012).
    """
    graphdef, params = nnx.split(network)
    key, *splits = jax.random.split(key, 3)
    # Both sides hold out equally many rows, so that their blocks have equal sizes.
    held = max(min(len(x), len(y)) // 10, 1)
    sides = (jnp.asarray(rows, jnp.float32) for rows in (x, y))
    parts = [_hold_out(split, rows, held) for split, rows in zip(splits, sides, strict=True)]
    train, val = zip(*parts, strict=True)

    def validate(params: Any, aux: None, x: Array, y: Array) -> Array:
        return mmd(nnx.merge(graphdef, params)(x), y)

    def objective(params: Any, x: Array, y: Array) -> tuple[Array, None]:
        return validate(params, None, x, y), None

    # The default weight decay of PyTorch's AdamW.
    adamw = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(1e-2))
    pass_over = _pass(objective, validate, adamw, min(options.mmd_batch, *map(len, train)))
    rate = jnp.float32(options.mmd_learning_rate)
    state = jax.tree.map(jnp.copy, (params, adamw.init(params)))
    best, least = params, float("inf")
    for epoch in range(1, options.mmd_epochs + 1):
        state, loss = pass_over(state, train, val, jax.random.fold_in(key, epoch), rate)
        value = _finite(loss, "residual network", epoch, "mmd_learning_rate")
        report(epoch, value)
        if value < least:
            # Copied, because the next epoch donates `state`.
            best, least = jax.tree.map(jnp.copy, state[0]), value
    return nnx.merge(graphdef, best)
