"""SUE: spectral embeddings of each modality by itself, joined by few pairs.

Eigenvectors of a graph's Laplacian with the smallest eigenvalues vary least between neighbours. A
SpectralNet is trained to vary little between neighbours, with its outputs kept orthonormal: it
approximates those eigenvectors and maps new rows as well.
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

WIDTHS = (0.5, 1.0, 2.0)
"""Of the Gaussians in `mmd`, in units of the mean squared distance."""

Network = TypeVar("Network", bound=nnx.Module)
Affine = tuple[np.ndarray, np.ndarray]
Report = Callable[[int, float], None]
outputs = functools.partial(evaluation.embed, unit=False)


@dataclasses.dataclass(frozen=True)
class SUE(base.Fitted):
    """SpectralNet on all rows of each modality, CCA on the pairs, then MMD between the modalities.

    1. A network per modality learns the smoothest eigenvectors of its graph of neighbours.
    2. Their leading canonical variates over the pairs are the shared space.
    3. A residual network moves the first modality so that both distributions agree.

    The defaults are for thousands of rows on a CPU; published for 30,000 on a GPU: hidden 4096,
    batch 5162, learning rate 1e-4, 100 epochs.

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
        near = "rows in a row's neighbourhood, itself counted"
        checks.within(self.neighbours + 1, near, scale_neighbour=self.scale_neighbour)
        over = "rows in a batch, over which they are orthonormal"
        checks.within(self.batch, over, eigenvectors=self.eigenvectors)
        checks.within(self.eigenvectors, "eigenvectors", dim=self.dim)

    def fit(self, dataset: data.Dataset, *, seed: int, progress: bool = False) -> Heads:
        """Heads of the three stages; the same seed gives the same heads."""
        pairs = dataset.pairs_x, dataset.pairs_y
        n = len(pairs[0])
        checks.within(n - 1, f"directions that {n} pairs can determine", dim=self.dim)
        pools = dataset.pool_x, dataset.pool_y
        rows = [np.concatenate(parts) for parts in zip(pairs, pools, strict=True)]
        *keys, key_mmd = jax.random.split(jax.random.key(seed), 3)
        with Progress(2 * self.epochs + self.mmd_epochs, "SUE", show=progress) as bar:

            def report(before: int) -> Report:
                return lambda epoch, loss: bar.metrics(before + epoch, {"loss": loss})

            spectral = []
            for own, side_key, before in zip(rows, keys, (0, self.epochs), strict=True):
                start, key = jax.random.split(side_key)
                widths = own.shape[1], self.eigenvectors
                fresh = TanhHead(*widths, hidden=self.hidden, rngs=nnx.Rngs(params=start))
                spectral.append(fit_spectral(fresh, own, self, key=key, report=report(before)))
            sides = zip(spectral, pairs, strict=True)
            affines = self.variates(
                *(outputs(network, own) @ basis for (network, basis), own in sides)
            )
            x, y = (
                SUEHead(network, Dense.of(basis @ weight, bias))
                for (network, basis), (weight, bias) in zip(spectral, affines, strict=True)
            )
            if self.mmd_epochs:
                start, key = jax.random.split(key_mmd)
                residual = Residual(self.dim, self.mmd_hidden, rngs=nnx.Rngs(params=start))
                moved, hear = (outputs(x, rows[0]), outputs(y, rows[1])), report(2 * self.epochs)
                residual = refine(residual, *moved, self, key=key, report=hear)
                x = SUEHead(x.network, x.linear, residual)
        return Heads(x, y)

    def variates(self, x: np.ndarray, y: np.ndarray) -> tuple[Affine, Affine]:
        """Weight and bias of each side's map from eigenvectors of the pairs to canonical variates.

        They are found on columns of unit variance; the published code then applies them to columns
        as they are, means and all.
        """
        spreads = [table.std(axis=0, ddof=1) for table in (x, y)]
        spreads = [np.where(spread == 0, 1.0, spread) for spread in spreads]
        found = teachers.canonical_correlations(x / spreads[0], y / spreads[1])
        checks.within(len(found.correlations), "directions that the pairs determine", dim=self.dim)

        def affine(weights: np.ndarray, mean: np.ndarray, spread: np.ndarray) -> Affine:
            weight = weights[:, : self.dim]
            if self.centred:
                return weight / spread[:, None], -mean @ weight
            # The published solver's: the part of a direction across those before it has length 1.
            lengths = np.abs(np.diag(np.linalg.qr(weight, mode="r")))
            return weight / lengths, np.zeros(self.dim)

        x_map = affine(found.weights_x, found.mean_x, spreads[0])
        return x_map, affine(found.weights_y, found.mean_y, spreads[1])


class Residual(nnx.Module):
    """z + W_3 relu(W_2 relu(W_1 z)), biases left out.

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
    """residual(network(x) W + b): SUE's network, its outputs' projection, and a last correction.

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
        rngs = nnx.Rngs(0)
        last = None if residual is None else Residual(d_out, residual, rngs=rngs)
        inner = TanhHead(d_in, outputs, **network, rngs=rngs)
        return cls(inner, Dense(outputs, d_out, rngs=rngs), last)


# --- spectral networks ---


def adjacency(
    rows: Float[Array, "m d"], *, neighbours: int, scale_neighbour: int
) -> Float[Array, "m m"]:
    """W_ij = exp(-||x_i - x_j||^2 / s^2) for the nearest rows j of i, made symmetric by a mean.

    s is the median distance to the `scale_neighbour`-th nearest row, the row itself counted.

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


def _squared_distances(rows: Array) -> Array:
    lengths = jnp.sum(jnp.square(rows), axis=1)
    squares = jnp.maximum(lengths[:, None] + lengths - 2.0 * affinity.dot(rows, rows.T), 0.0)
    return squares * (1.0 - jnp.eye(len(rows), dtype=squares.dtype))


def rayleigh(y: Float[Array, "m k"], weights: Float[Array, "m m"]) -> Float[Array, "k k"]:
    """Y^T L Y / m of the Laplacian L = diag(W 1) - W; its trace is how much Y varies.

    The trace is sum_ij W_ij ||y_i - y_j||^2 / (2 m).

    >>> print(rayleigh(jnp.array([[0.0], [1.0]]), jnp.ones((2, 2))))
    [[0.5]]
    """
    degrees = jnp.sum(weights, axis=1, keepdims=True)
    return affinity.dot(y.T, degrees * y - affinity.dot(weights, y)) / len(y)


def orthonormalizer(y: Float[Array, "m k"]) -> Float[Array, "k k"]:
    """The triangular T with (Y T)^T (Y T) / m = I: sqrt(m) R^-1 of Y = Q R.

    Not by the Cholesky factor of Y^T Y: squaring the condition number fails in float32.

    >>> y = jnp.array([[3.0, 0.0], [4.0, 0.0], [0.0, 5.0]])
    >>> z = y @ orthonormalizer(y)
    >>> bool(jnp.allclose(z.T @ z / 3, jnp.eye(2), atol=1e-5))
    True
    """
    triangle = jnp.linalg.qr(y)[1]
    identity = jnp.eye(len(triangle), dtype=y.dtype)
    return jnp.sqrt(len(y)) * jax.scipy.linalg.solve_triangular(triangle, identity)


def fit_spectral(
    network: TanhHead,
    rows: Rows,
    options: SUE,
    *,
    key: Array,
    report: Report = lambda epoch, loss: None,
) -> tuple[TanhHead, Float[np.ndarray, "k k"]]:
    """A network trained for the Laplacian's smoothest eigenvectors, and the map T to them.

    `network(x) @ T` are the eigenvectors, of mean square 1, smoothest first: the constant one.
    Each step takes one batch to orthonormalise the outputs and another for the loss; the gradient
    goes through both. `key` decides the batches and which tenth of the rows is held out; `report`
    is told the loss on it after every epoch.
    """
    most, of = len(rows) // 2 - 1, f"eigenvectors that {len(rows)} rows can determine"
    checks.within(most, of, eigenvectors=network.d_out)
    graphdef, params = nnx.split(network)
    key, split = jax.random.split(key)
    table = jnp.asarray(rows)
    train, val = _hold_out(split, table, max(len(rows) // 10, 1))
    batch = min(options.batch, len(train))
    graph = {"neighbours": options.neighbours, "scale_neighbour": options.scale_neighbour}

    def rayleigh_of(params: Any, transform: Array, rows: Array) -> Array:
        y = affinity.dot(nnx.merge(graphdef, params)(rows), transform)
        return rayleigh(y, adjacency(rows, **graph))

    def loss(params: Any, transform: Array, rows: Array) -> Array:
        return jnp.trace(rayleigh_of(params, transform, rows))

    def objective(params: Any, rows: Array, others: Array) -> tuple[Array, Array]:
        transform = orthonormalizer(nnx.merge(graphdef, params)(others))
        return loss(params, transform, rows), transform

    @jax.jit
    def mean_rayleigh(params: Any, transform: Array, rows: Array, key: Array) -> Array:
        passes = _batches(key, len(rows), batch)
        matrices = jax.lax.map(lambda index: rayleigh_of(params, transform, rows[index]), passes)
        return jnp.mean(matrices, axis=0)

    adam = optax.scale_by_adam()
    pass_over = _pass(objective, loss, adam, batch)
    state = jax.tree.map(jnp.copy, (params, adam.init(params)))
    rate, best, waited = options.learning_rate, float("inf"), 0
    for epoch in range(1, options.epochs + 1):
        epoch_key = jax.random.fold_in(key, epoch)
        state, held = pass_over(state, (train, train), (val,), epoch_key, jnp.float32(rate))
        value = _finite(held, "spectral network", epoch, "learning_rate")
        report(epoch, value)
        best, waited = (value, 0) if value < best * (1 - 1e-4) else (best, waited + 1)
        if waited > options.patience:
            rate, waited = rate / 10, 0
        if rate <= 1e-8:  # too small to change anything
            break
    trained = nnx.merge(graphdef, state[0])
    found = outputs(trained, table).astype(np.float64)
    triangle = np.linalg.qr(found, mode="r")
    if np.linalg.matrix_rank(triangle) < len(triangle):
        raise FloatingPointError(
            "spectral network: its outputs depend on each other; lower learning_rate"
        )
    transform = np.sqrt(len(found)) * np.linalg.inv(triangle)
    matrix = mean_rayleigh(state[0], jnp.asarray(transform, jnp.float32), table, key)
    _, vectors = np.linalg.eigh(np.asarray(matrix, np.float64))
    return trained, transform @ vectors


def _pass(
    objective: Callable[..., tuple[Array, Any]],
    validate: Callable[..., Array],
    optimizer: optax.GradientTransformation,
    batch: int,
) -> Callable[..., Any]:
    """A pass over shuffled tables: (state, train, val, key, rate) -> (state, loss on val).

    A step takes a batch of each table of `train` to objective(params, *rows) -> (loss, aux), and
    validate(params, aux, *rows), given the last step's aux, is averaged over blocks of `val`.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def pass_over(state: Any, train: Any, val: Any, key: Array, rate: Array) -> Any:
        def step(state: Any, indices: tuple[Array, ...]) -> tuple[Any, Any]:
            params, moments = state
            rows = (table[index] for table, index in zip(train, indices, strict=True))
            gradient, aux = jax.grad(objective, has_aux=True)(params, *rows)
            updates, moments = optimizer.update(gradient, moments, params)
            params = jax.tree.map(lambda p, update: p - rate * update, params, updates)
            return (params, moments), aux

        steps, keys = min(map(len, train)) // batch, jax.random.split(key)
        passes = [_batches(k, len(t), batch)[:steps] for k, t in zip(keys, train, strict=True)]
        state, aux = jax.lax.scan(step, state, tuple(passes))
        last = jax.tree.map(lambda of_steps: of_steps[-1], aux)
        blocks = [_blocks(rows, batch) for rows in val]
        losses = jax.lax.map(lambda rows: validate(state[0], last, *rows), blocks)
        return state, jnp.mean(losses)

    return pass_over


def _finite(loss: Array, what: str, epoch: int, option: str) -> float:
    """The loss as a number; raises unless it is finite."""
    if not np.isfinite(value := float(loss)):
        raise FloatingPointError(f"{what}: the loss is not finite in epoch {epoch}; lower {option}")
    return value


def _hold_out(key: Array, rows: Array, held: int) -> tuple[Array, Array]:
    """Shuffled rows: those to train on, and `held` ones to validate on."""
    order = jax.random.permutation(key, len(rows))
    return rows[order[held:]], rows[order[:held]]


def _batches(key: Array, n: int, size: int) -> Array:
    """Indices of a shuffled pass over n rows, (n // size, size); a rest is left out."""
    steps = n // size
    return jax.random.permutation(key, n)[: steps * size].reshape(steps, size)


def _blocks(rows: Array, most: int) -> Array:
    """Blocks of at most `most` rows to validate on; a rest is left out."""
    size = min(most, len(rows))
    steps = len(rows) // size
    return rows[: steps * size].reshape(steps, size, -1)


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
    network: Network,
    x: Float[np.ndarray, "n d"],
    y: Float[np.ndarray, "m d"],
    options: SUE,
    *,
    key: Array,
    report: Report = lambda epoch, loss: None,
) -> Network:
    """A network trained so that MMD(network(x), y) is small; rows of y are in no order.

    AdamW on shuffled batches of nine tenths of either side, as many passes over the smaller side;
    the parameters with the least MMD on the last tenth, which `report` is told, are kept.
    """
    graphdef, params = nnx.split(network)
    key, *splits = jax.random.split(key, 3)
    held = max(min(len(x), len(y)) // 10, 1)
    sides = (jnp.asarray(rows, jnp.float32) for rows in (x, y))
    parts = [_hold_out(split, rows, held) for split, rows in zip(splits, sides, strict=True)]
    train, val = zip(*parts, strict=True)

    def validate(params: Any, aux: None, x: Array, y: Array) -> Array:
        return mmd(nnx.merge(graphdef, params)(x), y)

    def objective(params: Any, x: Array, y: Array) -> tuple[Array, None]:
        return validate(params, None, x, y), None

    adamw = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(1e-2))
    pass_over = _pass(objective, validate, adamw, min(options.mmd_batch, *map(len, train)))
    rate = jnp.float32(options.mmd_learning_rate)
    state = jax.tree.map(jnp.copy, (params, adamw.init(params)))
    best, least = params, float("inf")
    for epoch in range(1, options.mmd_epochs + 1):
        state, loss = pass_over(state, train, val, jax.random.fold_in(key, epoch), rate)
        value = _finite(loss, "mmd", epoch, "mmd_learning_rate")
        report(epoch, value)
        if value < least:
            best, least = jax.tree.map(jnp.copy, state[0]), value
    return nnx.merge(graphdef, best)
