"""What every method has in common."""

import abc
import sys
from typing import Any, ClassVar, Self

import tqdm
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
        """The loss of heads on a batch, given a `LinearTeacher` and what `start` began."""


class Fitted(Method, abc.ABC):
    """A method that is fitted at once instead of trained step by step."""

    @abc.abstractmethod
    def fit(self, dataset: data.Dataset, *, seed: int, progress: bool = False) -> Heads:
        """Heads that embed both modalities for cosine retrieval."""


def siglip(
    heads: Heads, f: Array, g: Array, normalization: str = "mean", **negatives: Array
) -> Array:
    """SigLIP with the heads' own scale and bias."""
    return losses.siglip(
        f,
        g,
        log_scale=heads.log_scale[...],
        bias=heads.bias[...],
        normalization=normalization,
        **negatives,
    )


class Progress:
    """An observer that shows a progress bar on stderr; ten plain lines where no terminal is.

    >>> with Progress(100, "train", show=False) as progress:
    ...     progress.metrics(50, {"loss": 0.25})
    """

    def __init__(self, total: int, description: str, *, show: bool = True) -> None:
        terminal = sys.stderr.isatty()
        self._total, self._description, self._step = total, description, 0
        self._plain = show and not terminal
        self._shown: dict[str, str] = {}
        self._bar = tqdm.tqdm(total=total, desc=description, disable=not (show and terminal))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Moves to `step` and shows the loss and the latest validation score."""
        before, self._step = self._step, step
        for name, key in (("loss", "loss"), ("MeanR@1", "val/mean/R@1")):
            if key in values:
                self._shown[name] = f"{name} {values[key]:.4g}"
        text = ", ".join(self._shown.values())
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(step - before)
        if self._plain and 10 * step // self._total > 10 * before // self._total:
            line = f"{self._description}: {step}/{self._total}, {text}"
            print(line, file=sys.stderr, flush=True)

    def snapshot(self, step: int, snapshot: Any) -> None:
        pass
