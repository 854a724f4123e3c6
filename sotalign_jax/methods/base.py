"""Base classes of the methods."""

import abc
from typing import Any, ClassVar

from jaxtyping import Array

from sotalign_jax import data, losses
from sotalign_jax.heads import Heads
from sotalign_jax.sampling import Batch, DeviceData

Metrics = dict[str, Array]
"""Scalars of a step by name, which a run records."""
Result = tuple[Array, tuple[Metrics, Any]]
"""A loss, its metrics and the new memory."""
Grid = dict[str, tuple[Any, ...]]
"""Values to try, by the name of the option."""


class Method:
    """Base of all methods. A method is a frozen dataclass of its options.

    Attributes:
        grid: Values of options for a search, as in the paper.
    """

    grid: ClassVar[Grid] = {}

    @property
    def pools(self) -> str:
        """Modalities whose unpaired rows the method reads: "xy", "x", "y" or ""."""
        return ""

    def check(self, dataset: data.Dataset) -> None:
        """Checks that the data can be used with these options.

        Args:
            dataset: Pairs and pools.

        Raises:
            InputError: They cannot, for example because a pool has too few rows.
        """


class Objective(Method, abc.ABC):
    """A method that trains heads step by step. Calling it computes the loss of a batch.

    Attributes:
        head: Kind of the heads, see `heads.KINDS`.
    """

    head: ClassVar[str] = "linear"

    @property
    def uses_teacher(self) -> bool:
        """True if a teacher must be fitted first."""
        return False

    def prepare(self, arrays: DeviceData) -> DeviceData:
        """Adds arrays that are computed once before the first step, such as nearest neighbours.

        Args:
            arrays: The training arrays.

        Returns:
            The training arrays with the additional ones.
        """
        return arrays

    def init_memory(self, data: DeviceData, unpaired_batch: int) -> Any:
        """Builds the initial memory, a state of the method that is passed from step to step.

        Args:
            data: The training arrays.
            unpaired_batch: Unpaired rows per step.

        Returns:
            A pytree. It is saved with every snapshot.
        """
        return {}

    @abc.abstractmethod
    def __call__(self, heads: Heads, batch: Batch, teacher: Any, memory: Any) -> Result:
        """Computes the loss of a batch.

        Args:
            heads: The heads.
            batch: Rows of one step.
            teacher: The `Teacher`, or None if the method uses none.
            memory: State of the method, as `init_memory` or the last step returned it.

        Returns:
            The loss, and a pair of metrics and the new memory.
        """


class Fitted(Method, abc.ABC):
    """A method that is fitted at once instead of trained step by step."""

    @abc.abstractmethod
    def fit(self, dataset: data.Dataset, *, seed: int, progress: bool = False) -> Heads:
        """Fits heads for cosine retrieval.

        Args:
            dataset: Pairs and pools.
            seed: Seed of all random choices.
            progress: True shows a progress bar.

        Returns:
            The heads.
        """


def siglip(
    heads: Heads, f: Array, g: Array, normalization: str = "mean", **negatives: Array
) -> Array:
    """Computes the SigLIP loss with the heads' own logit scale and bias.

    Args:
        heads: The heads, for their scale and bias.
        f: Features of the first modality.
        g: Features of the second modality. Row i belongs to row i of `f`.
        normalization: One of `losses.NORMALIZATIONS`.
        **negatives: `negatives_f` and `negatives_g` of `losses.siglip`.

    Returns:
        The loss.

    References:
        X. Zhai et al., "Sigmoid loss for language image pre-training", ICCV 2023.
    """
    learned = {"log_scale": heads.log_scale[...], "bias": heads.bias[...]}
    return losses.siglip(f, g, normalization=normalization, **learned, **negatives)
