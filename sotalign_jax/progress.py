"""Progress of long computations, on stderr."""

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Any, Self

import tqdm


def say(text: str, *, show: bool = True) -> None:
    """Prints one line to stderr, above any open bar.

    Args:
        text: The line, such as "compiling (once)".
        show: If False, prints nothing.

    Example:
        >>> say("fitting the teacher", show=False)
    """
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed
        if show and sys.stderr is not None:
            tqdm.tqdm.write(text, file=sys.stderr)
            sys.stderr.flush()


class Observer:
    """Callbacks invoked while a model is prepared and trained. All methods are optional."""

    def stage(self, text: str) -> None:
        """Called when a stage begins.

        Args:
            text: Name of the stage, such as "fitting the teacher".
        """

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Called with the metrics of a step.

        Args:
            step: Number of the step, from 1.
            values: Metrics by name, with "val/..." scores if the step was validated.
        """

    def snapshot(self, step: int, snapshot: Any) -> None:
        """Called after a validation with a state to resume from.

        Args:
            step: Number of the step, from 1.
            snapshot: A `training.Snapshot`. Copy it, because the next step donates its arrays.
        """


class Progress(Observer):
    """Progress bar on stderr with the loss, the validation score and the time left.

    Without a terminal it prints ten plain lines instead. The time left is estimated without the
    first step, which includes compilation. It can be passed to `training.fit` as its observer.

    Args:
        total: Number of steps.
        title: Text in front of the bar.
        show: If False, shows nothing.
        initial: Steps that were done before.
        unit: Name of the steps, such as "rows".
        rate: If True, plain lines show the steps per second.
        inner: If True, the bar is shown below another one and removed at its end. Without a
            terminal it shows nothing.

    Example:
        >>> with Progress(100, "train", show=False) as progress:
        ...     progress.stage("compiling (once)")
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
        # Programs without a console, such as pythonw, have no stderr.
        terminal = sys.stderr is not None and sys.stderr.isatty()
        self._total, self._title, self._unit, self._rate = total, title, unit, rate
        self._step, self._inner = initial, inner
        self._visible = show and (terminal or not inner)
        self._plain = self._visible and not terminal
        self._clock: tuple[int, float] | None = None  # the first step that returned, and its time
        self._shown: dict[str, str] = {}
        self._bar = self._open(leave=False)

    def _open(self, *, leave: bool) -> tqdm.tqdm:
        """Opens a bar at the current step."""
        options = {"initial": self._step, "unit": f" {self._unit}" if self._unit else "it"}
        hidden = self._plain or not self._visible
        return tqdm.tqdm(
            total=self._total, desc=self._title, disable=hidden, leave=leave, **options
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._bar.close()

    def stage(self, text: str) -> None:
        """Prints one line above the bar, if the bar is shown.

        Args:
            text: Name of the stage.
        """
        say(f"{self._title}: {text} ...", show=self._visible)

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Moves to a step and shows the loss and the latest validation score.

        Args:
            step: Number of the step, from 1.
            values: Metrics, of which "loss" and "val/mean/R@1" are shown.
        """
        loss, mean_r1 = values.get("loss"), values.get("val/mean/R@1")
        self.advance(step - self._step, loss=loss, mean_r1=mean_r1)

    def advance(
        self, count: int = 1, *, skipped: int = 0, loss: Any = None, mean_r1: Any = None
    ) -> None:
        """Moves the bar by some steps.

        Args:
            count: Number of steps.
            skipped: Number of them that took no time, such as results of an earlier run. They do
                not count in the rate.
            loss: Loss to show.
            mean_r1: Validation score to show.
        """
        before, self._step = self._step, self._step + count
        # The rate counts steps after the first one of the clock, so moving that leaves out
        # skipped steps.
        if self._clock is not None:
            self._clock = self._clock[0] + skipped, self._clock[1]
        for name, value in (("loss", loss), ("val R@1", mean_r1)):
            if value is not None:
                self._shown[name] = f"{name} {value:.4g}"
        text = ", ".join(self._shown.values())
        # If stderr is closed, only the display ends.
        with contextlib.suppress(OSError, ValueError):
            if self._clock is None:
                self._clock = self._step, time.monotonic()
                # Starts a new bar, whose clock does not include compilation.
                self._bar.close()
                self._bar = self._open(leave=not self._inner)
                count = 0
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(count)
            # A plain line for every tenth of the steps.
            if self._plain and 10 * self._step // self._total > 10 * before // self._total:
                print(", ".join(filter(None, self._line(text))), file=sys.stderr, flush=True)

    def _line(self, text: str) -> tuple[str, ...]:
        """Returns the parts of a plain line. An unknown part is empty."""
        assert self._clock is not None
        first, since = self._clock
        done = f"{self._title}: {self._step}/{self._total} {self._unit}".rstrip()
        if self._step <= first:
            return done, text
        # Measured from the first step that returned, because that one includes compilation.
        speed = (self._step - first) / max(time.monotonic() - since, 1e-9)
        left = tqdm.tqdm.format_interval((self._total - self._step) / speed)
        rate = f"{speed:.3g} {self._unit}/s" if self._rate else ""
        return done, text, rate, f"{left} left"
