"""SUE: spectral embeddings of each modality by itself, joined by few pairs.

Eigenvectors of a graph's Laplacian with the smallest eigenvalues vary least between neighbours. A
SpectralNet is trained to vary little between neighbours, with its outputs kept orthonormal: it
approximates those eigenvectors and maps new rows as well.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from sotalign_jax import checks, data, teachers
from sotalign_jax.heads import Dense, Head, Heads, Rows, TanhHead
from sotalign_jax.methods import base
from sotalign_jax.ot import affinity

WIDTHS = (0.5, 1.0, 2.0)
"""Of the Gaussians in `mmd`, in units of the mean squared distance."""
_CHUNK_ROWS = 8192
_LEAST_RATE = 1e-8  # at which the training of a spectral network ends

Network = TypeVar("Network", bound=Head)
Report = Callable[[int, float], None]


@dataclasses.dataclass(frozen=True)
class SUE(base.Fitted):
    """SpectralNet on all rows of each modality, CCA on the pairs, then MMD between the modalities.

    1. A network per modality learns the smoothest eigenvectors of its graph of neighbours.
    2. Their leading canonical variates over the pairs are the shared space.
    3. A residual network moves the first modality so that both distributions agree.

    Published for 30,000 rows on a GPU: hidden 4096, batch 5162, learning rate 1e-4, 100 epochs. The
    defaults here are for thousands of rows on a CPU.

    Attributes:
        dim: canonical variates kept, the width of the shared space; 8 as published.
        eigenvectors: outputs of each spectral network.
        hidden: width of their hidden layers.
        neighbours: of each row in the graph of a batch.
        scale_neighbour: whose median distance is the unit of length, the row itself counted.
        epochs: of each spectral network.
        batch: its rows a step.
        learning_rate: its Adam's.
        patience: epochs without improvement before that rate falls to a tenth.
        centred: canonical variates of unit variance, the pairs' mean taken off; the published code
            leaves the mean on and has directions of other lengths.
        mmd_epochs: of the residual network; 0 leaves it out.
        mmd_batch: its rows a step.
        mmd_learning_rate: its AdamW's.
        mmd_hidden: its width.
    """

    grid: ClassVar[base.Grid] = {"dim": (8, 16, 30)}

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

    @property
    def pools(self) -> str:
        return "xy"

    def __post_init__(self) -> None:
        checks.whole(1, hidden=self.hidden, mmd_hidden=self.mmd_hidden)
        checks.whole(1, neighbours=self.neighbours, epochs=self.epochs)
        checks.whole(0, mmd_epochs=self.mmd_epochs, patience=self.patience)
        checks.whole(2, batch=self.batch, mmd_batch=self.mmd_batch)
        checks.positive(learning_rate=self.learning_rate, mmd_learning_rate=self.mmd_learning_rate)
        near = "rows in a row's neighbourhood, itself counted"
        checks.within(self.neighbours + 1, near, scale_neighbour=self.scale_neighbour)
        over = "rows in a batch, over which they are orthonormal"
        checks.within(self.batch, over, eigenvectors=self.eigenvectors)
        checks.within(self.eigenvectors, "eigenvectors", dim=self.dim)

    def fit(self, dataset: data.Dataset, *, seed: int, progress: bool = False) -> Heads:
        """Heads of the three stages; the same seed gives the same heads."""
        pairs = len(dataset.pairs_x)
        checks.within(pairs - 1, f"directions that {pairs} pairs can determine", dim=self.dim)
        rows_x = np.concatenate([dataset.pairs_x, dataset.pool_x])
        rows_y = np.concatenate([dataset.pairs_y, dataset.pool_y])
        key_x, key_y, key_mmd = jax.random.split(jax.random.key(seed), 3)
        with base.Progress(2 * self.epochs + self.mmd_epochs, "SUE", show=progress) as bar:

            def report(epoch: int, loss: float, *, before: int = 0) -> None:
                bar.metrics(before + epoch, {"loss": loss})

            network_x, basis_x = self._eigenvectors(rows_x, key_x, report)
            report_y = functools.partial(report, before=self.epochs)
            network_y, basis_y = self._eigenvectors(rows_y, key_y, report_y)
            affine_x, affine_y = self.variates(
                apply(network_x, dataset.pairs_x) @ basis_x,
                apply(network_y, dataset.pairs_y) @ basis_y,
            )
            x = SUEHead.joined(network_x, basis_x @ affine_x.weight, affine_x.bias)
            y = SUEHead.joined(network_y, basis_y @ affine_y.weight, affine_y.bias)
            if self.mmd_epochs:
                key_start, key = jax.random.split(key_mmd)
                residual = refine(
                    Residual(self.dim, self.mmd_hidden, rngs=nnx.Rngs(params=key_start)),
                    apply(x, rows_x),
                    apply(y, rows_y),
                    epochs=self.mmd_epochs,
                    batch=self.mmd_batch,
                    learning_rate=self.mmd_learning_rate,
                    key=key,
                    report=functools.partial(report, before=2 * self.epochs),
                )
                x = SUEHead.joined(x.network, x.linear.kernel[...], x.linear.bias[...], residual)
        return Heads(x, y)

    def _eigenvectors(
        self, rows: np.ndarray, key: Array, report: Report
    ) -> tuple[TanhHead, np.ndarray]:
        """A spectral network, and the basis in which its outputs are eigenvectors."""
        start, key = jax.random.split(key)
        network = TanhHead(
            rows.shape[1], self.eigenvectors, hidden=self.hidden, rngs=nnx.Rngs(params=start)
        )
        return fit_spectral(network, rows, self, key=key, report=report)

    def variates(self, x: np.ndarray, y: np.ndarray) -> tuple["_Affine", "_Affine"]:
        """Maps of the eigenvectors to canonical variates, as found on the pairs.

        They are found on columns of unit variance; the published code then applies them to columns
        as they are, means and all.
        """
        spreads = [table.std(axis=0, ddof=1) for table in (x, y)]
        for spread in spreads:
            spread[spread == 0] = 1.0
        found = teachers.canonical_correlations(x / spreads[0], y / spreads[1])
        rank = len(found.correlations)
        checks.within(rank, "directions that the pairs determine", dim=self.dim)
        return (
            self._affine(found.weights_x, found.mean_x, spreads[0]),
            self._affine(found.weights_y, found.mean_y, spreads[1]),
        )

    def _affine(self, weights: np.ndarray, mean: np.ndarray, spread: np.ndarray) -> "_Affine":
        weight = weights[:, : self.dim]
        if self.centred:
            return _Affine(weight / spread[:, None], -mean @ weight)
        # The published solver's lengths: of each direction, the part across those before it is 1.
        lengths = np.abs(np.diag(np.linalg.qr(weight, mode="r")))
        return _Affine(weight / lengths, np.zeros(self.dim))


class _Affine(NamedTuple):
    """z -> z weight + bias."""

    weight: np.ndarray
    bias: np.ndarray


# --- the head ---


class Residual(nnx.Module):
    """z + W_3 relu(W_2 relu(W_1 z)), biases left out.

    Example:
      >>> Residual(3, 8, rngs=nnx.Rngs(0))(jnp.ones((5, 3))).shape
      (5, 3)
    """

    def __init__(self, width: int, hidden: int, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        self.hidden = hidden
        widths = (width, hidden, hidden, width)
        self.layers = nnx.List(
            [Dense(a, b, dtype=dtype, rngs=rngs) for a, b in itertools.pairwise(widths)]
        )

    def __call__(self, z: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """Moves rows of the shared space."""
        *inner, last = self.layers
        moved = z
        for layer in inner:
            moved = jax.nn.relu(layer(moved))
        return z + last(moved)


class SUEHead(Head):
    """residual(network(x) W + b): SUE's network, its outputs' projection, and a last correction.

    Example:
      >>> SUEHead(8, 3, outputs=6, hidden=16, residual=4, rngs=nnx.Rngs(0))(jnp.ones((5, 8))).shape
      (5, 3)
    """

    kind = "sue"

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        outputs: int,
        hidden: int,
        norm: str = "l2",
        residual: int | None = None,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Of a `TanhHead` with so many outputs; `residual` is a hidden width, or None for none."""
        self.d_in, self.d_out = d_in, d_out
        self.network = TanhHead(d_in, outputs, hidden=hidden, norm=norm, dtype=dtype, rngs=rngs)
        self.linear = Dense(outputs, d_out, dtype=dtype, rngs=rngs)
        self.residual = (
            None if residual is None else Residual(d_out, residual, dtype=dtype, rngs=rngs)
        )

    def __call__(self, x: Rows) -> Float[Array, "n d_out"]:
        """Maps rows of shape (n, d_in) into the shared space."""
        z = self.linear(self.network(x))
        return z if self.residual is None else self.residual(z)

    def options(self) -> dict[str, Any]:
        return {
            "d_in": self.d_in,
            "d_out": self.d_out,
            "outputs": self.network.d_out,
            "hidden": self.network.hidden,
            "norm": self.network.input.norm,
            "residual": None if self.residual is None else self.residual.hidden,
        }

    @classmethod
    def joined(
        cls,
        network: TanhHead,
        kernel: Rows,
        bias: Rows,
        residual: Residual | None = None,
    ) -> "SUEHead":
        """The head of parts that were trained one after the other."""
        head = cls(
            network.d_in,
            kernel.shape[1],
            outputs=network.d_out,
            hidden=network.hidden,
            norm=network.input.norm,
            residual=None if residual is None else residual.hidden,
            rngs=nnx.Rngs(0),
        )
        head.network = network
        if residual is not None:
            head.residual = residual
        head.linear.kernel[...] = jnp.asarray(kernel, jnp.float32)
        head.linear.bias[...] = jnp.asarray(bias, jnp.float32)
        return head


# --- spectral networks ---


def adjacency(
    rows: Float[Array, "m d"], *, neighbours: int, scale_neighbour: int
) -> Float[Array, "m m"]:
    """W_ij = exp(-||x_i - x_j||^2 / s^2) for the nearest rows j of i, made symmetric by a mean.

    s is the median distance of a row's `scale_neighbour`-th nearest row, itself counted.

    >>> rows = jnp.array([[0.0], [1.0], [9.0]])
    >>> print(adjacency(rows, neighbours=1, scale_neighbour=2).round(3))
    [[1.    0.368 0.   ]
     [0.368 1.    0.   ]
     [0.    0.    1.   ]]
    """
    rows = affinity.as_float(rows)
    rows -= jnp.mean(rows, axis=0)  # so that little cancels in the distances
    squares = _squared_distances(rows)
    count = min(neighbours + 1, len(rows))
    nearest = -jax.lax.top_k(-squares, count)[0]
    unit = jnp.median(jnp.sqrt(nearest[:, min(scale_neighbour, count) - 1]))
    unit = jnp.maximum(jnp.square(unit), jnp.finfo(squares.dtype).tiny)
    weights = jnp.where(squares <= nearest[:, -1:], jnp.exp(-squares / unit), 0.0)
    return 0.5 * (weights + weights.T)


def _graph(rows: Array, near: tuple[int, int]) -> Array:
    return adjacency(rows, neighbours=near[0], scale_neighbour=near[1])


def _squared_distances(rows: Array) -> Array:
    lengths = jnp.sum(jnp.square(rows), axis=1)
    squares = jnp.maximum(lengths[:, None] + lengths - 2.0 * affinity.dot(rows, rows.T), 0.0)
    return squares * (1.0 - jnp.eye(len(rows), dtype=squares.dtype))


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

    R comes from Householder reflections: the Cholesky factor of Y^T Y takes less time but squares
    the condition number, and in float32 fails on outputs whose directions differ 1,000-fold.

    >>> y = jnp.array([[3.0, 0.0], [4.0, 0.0], [0.0, 5.0]])
    >>> z = y @ orthonormalizer(y)
    >>> bool(jnp.allclose(z.T @ z / 3, jnp.eye(2), atol=1e-5))
    True
    """
    triangle = jnp.linalg.qr(y)[1]
    identity = jnp.eye(len(triangle), dtype=y.dtype)
    return jnp.sqrt(len(y)) * jax.scipy.linalg.solve_triangular(triangle, identity)


def fit_spectral(
    network: Network,
    rows: Rows,
    options: SUE,
    *,
    key: Array,
    report: Report = lambda epoch, loss: None,
) -> tuple[Network, Float[np.ndarray, "k k"]]:
    """Trains a network for the Laplacian's smoothest eigenvectors.

    Each step takes one batch to orthonormalise the outputs and another for the loss; the gradient
    goes through both. Afterwards the outputs are orthonormalised over all rows and rotated by the
    eigenvectors of their Rayleigh matrix, smoothest first: the constant one. A tenth of the rows is
    for validation.

    Args:
        network: where to start; left as it is.
        rows: all rows of one modality, (n, d).
        options: of the graph of a batch, and how long to train.
        key: decides the split and the batches.
        report: called after every epoch with the validation loss.

    Returns:
        The trained network, and the map T: `network(x) @ T` are the eigenvectors, of mean square 1.
    """
    most, of = len(rows) // 2 - 1, f"eigenvectors that {len(rows)} rows can determine"
    checks.within(most, of, eigenvectors=network.d_out)
    graphdef, params = nnx.split(network)
    key, split = jax.random.split(key)
    table = jnp.asarray(rows)
    train, val = hold_out(split, table, max(len(rows) // 10, 1))
    near = options.neighbours, options.scale_neighbour
    batch = min(options.batch, len(train))
    static: dict[str, Any] = {"graphdef": graphdef, "near": near, "batch": batch}
    state = jax.tree.map(jnp.copy, (params, optax.scale_by_adam().init(params)))
    rate, best, waited = options.learning_rate, float("inf"), 0
    for epoch in range(1, options.epochs + 1):
        epoch_key = jax.random.fold_in(key, epoch)
        state, loss = _spectral_epoch(state, train, val, epoch_key, jnp.float32(rate), **static)
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
        if waited > options.patience:
            rate, waited = rate / 10, 0
        if rate <= _LEAST_RATE:
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
    chunks = [rows[start : start + _CHUNK_ROWS] for start in range(0, len(rows), _CHUNK_ROWS)]
    return np.concatenate(
        [np.asarray(_outputs(params, jnp.asarray(block), graphdef=graphdef)) for block in chunks]
    )


@functools.partial(jax.jit, static_argnames="graphdef")
def _outputs(params: Any, rows: Array, *, graphdef: Any) -> Array:
    return nnx.merge(graphdef, params)(rows)


def hold_out(key: Array, rows: Array, held: int) -> tuple[Array, Array]:
    """Shuffled rows: those to train on, and `held` ones to validate on."""
    order = jax.random.permutation(key, len(rows))
    return rows[order[held:]], rows[order[:held]]


def batches(key: Array, n: int, size: int) -> Array:
    """Indices of a shuffled pass over n rows, (n // size, size); a rest is left out."""
    steps = n // size
    return jax.random.permutation(key, n)[: steps * size].reshape(steps, size)


@functools.partial(jax.jit, static_argnames=("graphdef", "near", "batch"), donate_argnames="state")
def _spectral_epoch(
    state: Any,
    train: Array,
    val: Array,
    key: Array,
    rate: Array,
    *,
    graphdef: Any,
    near: tuple[int, int],
    batch: int,
) -> tuple[Any, Array]:
    """The state after a pass over `train`, and the loss on `val`."""
    adam = optax.scale_by_adam()

    def objective(params: Any, rows: Array, others: Array) -> tuple[Array, Array]:
        network = nnx.merge(graphdef, params)
        transform = orthonormalizer(network(others))
        y = affinity.dot(network(rows), transform)
        return variation(y, _graph(rows, near)), transform

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
        return variation(y, _graph(rows, near))

    steps = len(val) // size
    return state, jnp.mean(jax.lax.map(validate, val[: steps * size].reshape(steps, size, -1)))


@functools.partial(jax.jit, static_argnames=("graphdef", "near", "batch"))
def _mean_rayleigh(
    params: Any,
    transform: Array,
    rows: Array,
    key: Array,
    *,
    graphdef: Any,
    near: tuple[int, int],
    batch: int,
) -> Array:
    """The mean over a pass of the outputs' Rayleigh matrices."""
    network = nnx.merge(graphdef, params)

    def of_batch(index: Array) -> Array:
        y = affinity.dot(network(rows[index]), transform)
        return _rayleigh(y, _graph(rows[index], near))

    return jnp.mean(jax.lax.map(of_batch, batches(key, len(rows), batch)), axis=0)


# --- maximum mean discrepancy ---


def mmd(x: Float[Array, "n d"], y: Float[Array, "m d"]) -> Float[Array, ""]:
    """Squared MMD, biased: mean k(x, x') - 2 mean k(x, y) + mean k(y, y').

    k is the sum of exp(-||a - b||^2 / (c s)) over c in `WIDTHS`; s is the mean squared distance
    between two different rows of [x; y], and gets no gradient.

    >>> x = jnp.array([[0.0], [1.0]])
    >>> print(mmd(x, x), mmd(x, x + 5.0) > 1.0)
    0.0 True
    """
    squares = _squared_distances(jnp.concatenate([x, y]))
    n, total = len(x), len(squares)
    unit = jax.lax.stop_gradient(jnp.sum(squares)) / (total * total - total)
    unit = jnp.maximum(unit, jnp.finfo(squares.dtype).tiny)
    widths = jnp.asarray(WIDTHS, squares.dtype)[:, None, None]
    kernel = jnp.sum(jnp.exp(-squares / (widths * unit)), axis=0)
    return jnp.mean(kernel[:n, :n]) - 2.0 * jnp.mean(kernel[:n, n:]) + jnp.mean(kernel[n:, n:])


def refine(
    network: nnx.Module,
    x: Float[np.ndarray, "n d"],
    y: Float[np.ndarray, "m d"],
    *,
    epochs: int,
    batch: int,
    learning_rate: float,
    key: Array,
    report: Report = lambda epoch, loss: None,
) -> Any:
    """Trains a network that maps rows so that MMD(network(x), y) is small.

    AdamW on shuffled batches of nine tenths of either side; the parameters with the least MMD on
    the last tenth are kept.

    Args:
        network: where to start; left as it is.
        x: rows to be mapped.
        y: rows to come near to, in no particular order.
        epochs: passes over the smaller side.
        batch: rows a step and side; all when there are fewer.
        learning_rate: AdamW's.
        key: decides the split and the batches.
        report: called after every epoch with the validation loss.
    """
    graphdef, params = nnx.split(network)
    key, *splits = jax.random.split(key, 3)
    held = max(min(len(x), len(y)) // 10, 1)
    parts = [
        hold_out(split, jnp.asarray(rows, jnp.float32), held)
        for rows, split in zip((x, y), splits, strict=True)
    ]
    train, val = ([part[i] for part in parts] for i in range(2))
    batch = min(batch, *map(len, train))
    static: dict[str, Any] = {"graphdef": graphdef, "batch": batch, "learning_rate": learning_rate}
    state = jax.tree.map(jnp.copy, (params, _adamw(learning_rate).init(params)))
    best, least = params, float("inf")
    for epoch in range(1, epochs + 1):
        state, loss = _mmd_epoch(state, train, val, jax.random.fold_in(key, epoch), **static)
        value = float(loss)
        if not np.isfinite(value):
            raise FloatingPointError(
                f"mmd: the loss is not finite in epoch {epoch}; lower mmd_learning_rate"
            )
        report(epoch, value)
        if value < least:
            best, least = jax.tree.map(jnp.copy, state[0]), value
    return nnx.merge(graphdef, best)


def _adamw(learning_rate: float) -> optax.GradientTransformation:
    return optax.adamw(learning_rate, weight_decay=1e-2)


@functools.partial(
    jax.jit, static_argnames=("graphdef", "batch", "learning_rate"), donate_argnames="state"
)
def _mmd_epoch(
    state: Any,
    train: list[Array],
    val: list[Array],
    key: Array,
    *,
    graphdef: Any,
    batch: int,
    learning_rate: float,
) -> tuple[Any, Array]:
    """The state after a pass, and the loss on `val`."""
    adamw = _adamw(learning_rate)
    x, y = train

    def objective(params: Any, x: Array, y: Array) -> Array:
        return mmd(nnx.merge(graphdef, params)(x), y)

    def step(state: Any, indices: tuple[Array, Array]) -> tuple[Any, None]:
        params, moments = state
        gradient = jax.grad(objective)(params, x[indices[0]], y[indices[1]])
        updates, moments = adamw.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), None

    steps = min(len(x), len(y)) // batch
    keys = jax.random.split(key)
    passes = (batches(keys[0], len(x), batch), batches(keys[1], len(y), batch))
    state, _ = jax.lax.scan(step, state, jax.tree.map(lambda index: index[:steps], passes))
    size = min(batch, len(val[0]))
    shown = len(val[0]) // size
    chunks = [rows[: shown * size].reshape(shown, size, -1) for rows in val]
    return state, jnp.mean(jax.lax.map(lambda b: objective(state[0], *b), chunks))
