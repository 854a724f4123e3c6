"""NNCLR as in DeCLIP: nearest neighbours of paired rows are additional positives.

References:
    D. Dwibedi et al., "With a little help from my friends: nearest-neighbor contrastive learning of
    visual representations", ICCV 2021 (NNCLR).
    Y. Li et al., "Supervision exists everywhere: a data efficient contrastive language-image
    pre-training paradigm", ICLR 2022 (DeCLIP).
"""

import dataclasses
from typing import Any, ClassVar

from jaxtyping import Array

from sotalign_jax import checks, data, losses, neighbours
from sotalign_jax.heads import Heads
from sotalign_jax.methods import base
from sotalign_jax.sampling import Batch, DeviceData


@dataclasses.dataclass(frozen=True)
class NNCLR(base.Objective):
    """Trains on SigLIP of the pairs, and of pairs with one side replaced by its neighbour.

        SigLIP(f(A), g(B)) + w_text SigLIP(f(A), g(NN(B))) + w_image SigLIP(f(NN(A)), g(B))

    NN(b) is drawn at every step from the k unpaired rows with the largest cosine to b, computed on
    the embeddings and not on the features. Pools may contain the paired rows, because a row is
    never its own neighbour, see `neighbours.nearest`.

    Attributes:
        k: Number of neighbours to draw from.
        weight_text: Weight of the neighbours in y, 0 to leave them out.
        weight_image: Weight of the neighbours in x, 0 to leave them out.
        siglip_norm: "mean" or "per_row", see `SAIL`.

    References:
        D. Dwibedi et al., "With a little help from my friends: nearest-neighbor contrastive
        learning of visual representations", ICCV 2021.
        Y. Li et al., "Supervision exists everywhere: a data efficient contrastive language-image
        pre-training paradigm", ICLR 2022.
    """

    grid: ClassVar[base.Grid] = {
        "k": (1, 5, 10),
        "weight_text": (0.0, 0.1, 1.0, 10.0),
        "weight_image": (0.0, 0.1, 1.0, 10.0),
    }

    k: int = 5
    weight_text: float = 1.0
    weight_image: float = 1.0
    siglip_norm: str = "mean"

    @property
    def pools(self) -> str:
        """Modalities whose neighbours have a weight."""
        # Multiplied by False, a string is empty.
        return "x" * (self.weight_image > 0) + "y" * (self.weight_text > 0)

    def __post_init__(self) -> None:
        checks.choice("siglip_norm", self.siglip_norm, losses.NORMALIZATIONS)
        checks.at_least(0, weight_text=self.weight_text, weight_image=self.weight_image)
        checks.whole(1, k=self.k)

    def check(self, dataset: data.Dataset) -> None:
        """Raises InputError if a pool has fewer than k rows."""
        for side in self.pools:
            rows = len(dataset.pool_x if side == "x" else dataset.pool_y)
            checks.within(rows, f"rows in pool {side}", k=self.k)

    def prepare(self, arrays: DeviceData) -> DeviceData:
        """Finds the nearest neighbours of the pairs in each pool that is used.

        Args:
            arrays: The training arrays.

        Returns:
            The training arrays with `near_x` and `near_y`.
        """

        # The embeddings are frozen, so the neighbours do not change during training.
        def table(pairs: Array, pool: Array) -> Array:
            return neighbours.nearest(pairs, pool, self.k, skip="equal").indices

        return arrays._replace(
            near_x=table(arrays.pairs_x, arrays.pool_x) if self.weight_image else None,
            near_y=table(arrays.pairs_y, arrays.pool_y) if self.weight_text else None,
        )

    def __call__(self, heads: Heads, batch: Batch, teacher: Any, memory: Any) -> base.Result:
        f, g = heads.x(batch.a), heads.y(batch.b)
        loss = base.siglip(heads, f, g, self.siglip_norm)
        metrics = {"siglip": loss}
        if self.weight_text:
            assert batch.near_b is not None  # `prepare` has found the neighbours
            # The neighbour of a text is the positive of its image, and the neighbours of other
            # texts are the negatives.
            term = base.siglip(heads, f, heads.y(batch.near_b), self.siglip_norm)
            loss, metrics["text_neighbours"] = loss + self.weight_text * term, term
        if self.weight_image:
            assert batch.near_a is not None
            term = base.siglip(heads, heads.x(batch.near_a), g, self.siglip_norm)
            loss, metrics["image_neighbours"] = loss + self.weight_image * term, term
        return loss, (metrics, memory)
