"""What the closed-form gradient saves, and how far Sinkhorn gets in 100 iterations."""

from collections.abc import Mapping

import numpy as np

from experiments.paper import measures, plots
from experiments.paper.claims import Verdict
from experiments.paper.entries import Column, Entry, Grid, Row, Values
from experiments.paper.lab import Lab

Found = Mapping[str, Values]
_STAND_IN = "affinities of bundled pictures, or beyond 5,000 rows of random features"
UNROLLED, IMPLICIT, OURS = measures.ARMS.values()


def _rows(lab: Lab) -> dict[str, Row]:
    return {f"{e:g}": Row({"epsilon": e}) for e in lab.scale.solver_epsilons}


def _gradient(lab: Lab, name: str, quantity: str, arms: tuple[str, ...], form: str) -> Grid:
    columns = {
        title: Column(f"gradient/{arm}/{quantity}")
        for arm, title in measures.ARMS.items()
        if title in arms
    }
    return Grid(name, "epsilon", _rows(lab), columns, (0,), form=form)


def _ratios(values: Values, other: str) -> list[float]:
    """How many times more another way takes, at every epsilon where both are known."""
    pairs = zip(values.column(other), values.column(OURS), strict=True)
    return [float(a / b) for a, b in pairs if a > 0 and b > 0]


def _times(values: Values, other: str, what: str) -> Verdict:
    ratios = _ratios(values, other)
    if not ratios:
        return Verdict(None, f"{other} could not be measured")
    listed = f"{min(ratios):.1f} to {max(ratios):.1f} times the {what} of the closed form"
    text = f"{other} takes {listed}"
    if absent := len(values.grid.rows) - len(ratios):
        text += f", and does not get there at {absent} of {len(values.grid.rows)} epsilons"
    complete = bool(np.isfinite(values.column(OURS)).all())
    return Verdict(False if min(ratios) <= 1 else True if complete else None, text)


F3 = Entry(
    "F3",
    "Memory of KLOT's gradient",
    "epsilon, and how the gradient is computed",
    _STAND_IN,
    (),
    lambda lab: [_gradient(lab, "memory (MiB)", "memory", (OURS, UNROLLED), ".1f")],
    "the closed form takes less memory than unrolling (paper: up to 100 times)",
    lambda found: _times(found["memory (MiB)"], UNROLLED, "memory"),
    plot=lambda found, path: plots.lines(found, path, ylabel="", log=True),
)


def _convergence(lab: Lab) -> list[Grid]:
    columns = {
        "textbook Sinkhorn": Column("convergence/textbook"),
        "ours": Column("convergence/ours"),
    }
    return [Grid("marginal error", "epsilon", _rows(lab), columns, (0,), form=".1e")]


def _judge_convergence(found: Found) -> Verdict:
    values = found["marginal error"]
    errors, rows = values.column("textbook Sinkhorn"), list(values.grid.rows)
    if not (errors >= 0).all():
        return Verdict(None, "errors are missing")
    listed = ", ".join(f"{e:.1e} at {row}" for e, row in zip(errors, rows, strict=True))
    seen = np.maximum(errors, 1e-6)  # below is rounding
    return Verdict(bool((np.diff(seen) >= 0).all() and seen[-1] > seen[0]), listed)


F4 = Entry(
    "F4",
    "Convergence of Sinkhorn after 100 iterations",
    "epsilon",
    _STAND_IN,
    (),
    _convergence,
    "the smaller epsilon, the further 100 iterations are from convergence",
    _judge_convergence,
    plot=lambda found, path: plots.lines(found, path, ylabel="", log=True),
)


def _costs(lab: Lab) -> list[Grid]:
    arms = (OURS, UNROLLED, IMPLICIT)
    return [
        _gradient(lab, "memory (MiB)", "memory", arms, ".1f"),
        _gradient(lab, "time (s)", "seconds", arms, ".3f"),
        _gradient(lab, "iterations", "iterations", arms, ".0f"),
    ]


def _judge_costs(found: Found) -> Verdict:
    memory = _times(found["memory (MiB)"], UNROLLED, "memory")
    seconds = _times(found["time (s)"], IMPLICIT, "time")
    parts = memory.held, seconds.held
    held = False if False in parts else None if None in parts else True
    return Verdict(held, f"{memory.text}; {seconds.text}")


FA1 = Entry(
    "FA1",
    "Memory, time and iterations of KLOT's gradient",
    "epsilon, and how the gradient is computed, to a marginal error of 1e-6; of the times only "
    "ratios mean something, for other runs go on beside them",
    _STAND_IN,
    (),
    _costs,
    "the closed form takes less memory than unrolling and less time than implicit differentiation "
    "(paper: up to 100 and 50 times)",
    _judge_costs,
    plot=lambda found, path: plots.lines(found, path, ylabel="", log=True),
)
