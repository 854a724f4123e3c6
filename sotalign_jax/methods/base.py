"""What every method has in common."""

import abc
import contextlib
import sys
import time
from collections.abc import Mapping
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
    learned = {"log_scale": heads.log_scale[...], "bias": heads.bias[...]}
    return losses.siglip(f, g, normalization=normalization, **learned, **negatives)


class Progress:
    """A bar on stderr with loss, MeanR@1 and time left; ten plain lines where no terminal is.

    It starts at step `initial` and counts `unit`, such as "rows"; plain lines may show its `rate`.
    An `inner` bar stands below another one and is gone at its end; without a terminal it is
    silent. It can be the observer of a training.

    >>> with Progress(100, "train", show=False) as progress:
    ...     progress.metrics(50, {"loss": 0.25})
    """

    def __init__(
        self,
        total: int,
        title: str,
        *,
        show: bool = True,
        initial: int = 0,
        unit: str = "",
        rate: bool = False,
        inner: bool = False,
    ) -> None:
        terminal = sys.stderr is not None and sys.stderr.isatty()
        self._total, self._title, self._unit, self._rate = total, title, unit, rate
        self._initial = self._step = initial
        self._start = time.monotonic()
        self._plain = show and not (inner or terminal or sys.stderr is None)
        self._shown: dict[str, str] = {}
        shown = {"initial": initial, "unit": f" {unit}" if unit else "it", "leave": not inner}
        self._bar = tqdm.tqdm(total=total, desc=title, disable=not (show and terminal), **shown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._bar.close()

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Moves to `step` and shows the loss and the latest validation score."""
        loss, mean_r1 = values.get("loss"), values.get("val/mean/R@1")
        self.advance(step - self._step, loss=loss, mean_r1=mean_r1)

    def advance(
        self, count: int = 1, *, skipped: int = 0, loss: Any = None, mean_r1: Any = None
    ) -> None:
        """Moves on by `count`, of which `skipped` do not count in the rate."""
        before, self._step = self._step, self._step + count
        self._initial += skipped
        self._bar.initial = self._initial
        for name, value in (("loss", loss), ("MeanR@1", mean_r1)):
            if value is not None:
                self._shown[name] = f"{name} {value:.4g}"
        text = ", ".join(self._shown.values())
        with contextlib.suppress(OSError, ValueError):  # a closed stderr ends the display alone
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(count)
            if self._plain and 10 * self._step // self._total > 10 * before // self._total:
                speed = (self._step - self._initial) / max(time.monotonic() - self._start, 1e-9)
                rest = (self._total - self._step) / speed if speed else None
                left = "?" if rest is None else tqdm.tqdm.format_interval(rest)
                done = f"{self._title}: {self._step}/{self._total} {self._unit}".rstrip()
                rate = f"{speed:.3g} {self._unit}/s" if self._rate else ""
                parts = filter(None, (done, text, rate, f"{left} left"))
                print(", ".join(parts), file=sys.stderr, flush=True)

    def snapshot(self, step: int, snapshot: Any) -> None:
        pass
