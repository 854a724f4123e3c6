"""What every method has in common."""

import abc
from typing import Any, ClassVar

from jaxtyping import Array

from sotalign_jax import data, losses
from sotalign_jax.heads import Heads
from sotalign_jax.sampling import Batch, DeviceData

Metrics = dict[str, Array]
Result = tuple[Array, tuple[Metrics, Any]]
"""A loss, its metrics and the new memory."""
Grid = dict[str, tuple[Any, ...]]


class Method:
    """Options of a method, a frozen dataclass; `grid` has values worth trying, as in the paper."""

    grid: ClassVar[Grid] = {}

    @property
    def pools(self) -> str:
        """The modalities whose unpaired rows it reads: "xy", "x", "y" or ""."""
        return ""

    def check(self, dataset: data.Dataset) -> None:
        """Raises when the data cannot be used with these options."""


class Objective(Method, abc.ABC):
    """A method that trains heads, of the kind `head`, by the loss of a call with a batch."""

    head: ClassVar[str] = "linear"

    @property
    def uses_teacher(self) -> bool:
        """Whether a teacher must be fitted first."""
        return False

    def prepare(self, arrays: DeviceData) -> DeviceData:
        """The training arrays with all that must be known of them before the first step."""
        return arrays

    def start(self, data: DeviceData, unpaired_batch: int) -> Any:
        """What is carried from step to step: a pytree."""
        return {}

    @abc.abstractmethod
    def __call__(self, heads: Heads, batch: Batch, teacher: Any, memory: Any) -> Result:
        """The loss of heads on a batch, given a `Teacher` and what `start` began."""


class Fitted(Method, abc.ABC):
    """A method that is fitted at once instead of trained step by step."""

    @abc.abstractmethod
    def fit(self, dataset: data.Dataset, *, seed: int, progress: bool = False) -> Heads:
        """Heads that embed both modalities for cosine retrieval."""


def siglip(
    heads: Heads, f: Array, g: Array, normalization: str = "mean", **negatives: Array
) -> Array:
    """SigLIP with the heads' own scale and bias."""
    learned = {"log_scale": heads.log_scale[...], "bias": heads.bias[...]}
    return losses.siglip(f, g, normalization=normalization, **learned, **negatives)
