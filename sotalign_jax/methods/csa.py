"""CSA: canonical correlation analysis with a similarity weighted by the correlations."""

import dataclasses
from typing import ClassVar

from sotalign_jax import canonical, checks, data
from sotalign_jax.heads import CSAHead, Heads
from sotalign_jax.methods import base


@dataclasses.dataclass(frozen=True)
class CSA(base.Fitted):
    """sum_k rho_k z_xk z_yk of unit rows z of leading canonical variates of the pairs.

    Published without a ridge: with fewer pairs than features all correlations are then 1 and
    the directions carry next to nothing.

    Attributes:
        dim: directions kept, fewer when the pairs determine fewer; 200 as published.
        ridge: added to both covariances, as a multiple of their mean variance.
    """

    grid: ClassVar[base.Grid] = {"dim": (50, 100, 200)}

    dim: int = 200
    ridge: float = 0.0

    def __post_init__(self) -> None:
        checks.whole(1, dim=self.dim)
        checks.at_least(0, ridge=self.ridge)

    def fit(self, dataset: data.Dataset, *, seed: int, progress: bool = False) -> Heads:
        """Heads whose cosine is CSA's similarity; nothing is random."""
        found = canonical.cca(dataset.pairs_x, dataset.pairs_y, ridge=self.ridge)
        rho = found.correlations[: self.dim]
        return Heads(
            CSAHead.fitted(found.mean_x, found.weights_x[:, : self.dim], rho, "x"),
            CSAHead.fitted(found.mean_y, found.weights_y[:, : self.dim], rho, "y"),
        )
