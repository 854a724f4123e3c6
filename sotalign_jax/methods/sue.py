"""SUE: spectral embeddings of each modality by itself, joined by few pairs."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import numpy as np
import tqdm
from flax import nnx
from jaxtyping import Array

from sotalign_jax import canonical, checks, data, mmd, spectral
from sotalign_jax.heads import Heads, Residual, SUEHead, TanhHead
from sotalign_jax.methods import base

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
        checks.whole(1, dim=self.dim, hidden=self.hidden, mmd_hidden=self.mmd_hidden)
        checks.whole(1, neighbours=self.neighbours, scale_neighbour=self.scale_neighbour)
        checks.whole(1, epochs=self.epochs)
        checks.whole(0, mmd_epochs=self.mmd_epochs, patience=self.patience)
        checks.whole(2, batch=self.batch, mmd_batch=self.mmd_batch)
        checks.positive(learning_rate=self.learning_rate, mmd_learning_rate=self.mmd_learning_rate)
        if self.scale_neighbour > self.neighbours + 1:
            raise checks.InputError(
                f"scale_neighbour: is {self.scale_neighbour} but a row has {self.neighbours} "
                "neighbours and itself; pass no more"
            )
        if self.batch < self.eigenvectors:
            raise checks.InputError(
                f"batch: is {self.batch} but {self.eigenvectors} outputs are to be orthonormal "
                "over it; pass more rows, or ask for fewer eigenvectors"
            )
        if self.eigenvectors < self.dim:
            raise checks.InputError(
                f"eigenvectors: is {self.eigenvectors} but dim is {self.dim}; pass at least as many"
            )

    def fit(self, dataset: data.Dataset, *, seed: int, progress: bool = False) -> Heads:
        """Heads of the three stages; the same seed gives the same heads."""
        if len(dataset.pairs_x) <= self.dim:
            raise checks.InputError(
                f"dim: is {self.dim} but there are {len(dataset.pairs_x)} pairs; "
                "ask for fewer directions or add pairs"
            )
        rows_x = np.concatenate([dataset.pairs_x, dataset.pool_x])
        rows_y = np.concatenate([dataset.pairs_y, dataset.pool_y])
        key_x, key_y, key_mmd = jax.random.split(jax.random.key(seed), 3)
        with _Stages(2 * self.epochs + self.mmd_epochs, show=progress) as stages:
            network_x, basis_x = self._eigenvectors(rows_x, key_x, stages.next(self.epochs))
            network_y, basis_y = self._eigenvectors(rows_y, key_y, stages.next(self.epochs))
            affine_x, affine_y = self._variates(
                spectral.apply(network_x, dataset.pairs_x) @ basis_x,
                spectral.apply(network_y, dataset.pairs_y) @ basis_y,
            )
            x = SUEHead.joined(network_x, basis_x @ affine_x.weight, affine_x.bias)
            y = SUEHead.joined(network_y, basis_y @ affine_y.weight, affine_y.bias)
            if self.mmd_epochs:
                key_start, key = jax.random.split(key_mmd)
                residual = mmd.refine(
                    Residual(self.dim, self.mmd_hidden, rngs=nnx.Rngs(params=key_start)),
                    spectral.apply(x, rows_x),
                    spectral.apply(y, rows_y),
                    epochs=self.mmd_epochs,
                    batch=self.mmd_batch,
                    learning_rate=self.mmd_learning_rate,
                    key=key,
                    report=stages.next(self.mmd_epochs),
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
        return spectral.fit(
            network,
            rows,
            graph=spectral.Graph(self.neighbours, self.scale_neighbour),
            schedule=spectral.Schedule(self.epochs, self.batch, self.learning_rate, self.patience),
            key=key,
            report=report,
        )

    def _variates(self, x: np.ndarray, y: np.ndarray) -> tuple["_Affine", "_Affine"]:
        """Maps of the eigenvectors to canonical variates, as found on the pairs.

        They are found on columns of unit variance; the published code then applies them to columns
        as they are, means and all.
        """
        spreads = [table.std(axis=0, ddof=1) for table in (x, y)]
        for spread in spreads:
            spread[spread == 0] = 1.0
        found = canonical.cca(x / spreads[0], y / spreads[1])
        if len(found.correlations) < self.dim:
            raise checks.InputError(
                f"dim: is {self.dim} but the pairs determine {len(found.correlations)} directions; "
                "ask for fewer or add pairs"
            )
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


class _Stages:
    """One progress bar over several trainings."""

    def __init__(self, total: int, *, show: bool) -> None:
        self._bar = tqdm.tqdm(total=total, desc="SUE", disable=not show)
        self._end = 0

    def __enter__(self) -> "_Stages":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def next(self, epochs: int) -> Report:
        """What the next training, of so many epochs, reports to."""
        start, self._end = self._end, self._end + epochs

        def report(epoch: int, loss: float) -> None:
            self._bar.set_postfix(loss=f"{loss:.4g}", refresh=False)
            self._bar.update(start + epoch - self._bar.n)

        return report
