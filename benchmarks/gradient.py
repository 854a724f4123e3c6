"""Measures time, memory and iterations of KLOT and its gradient, ours and those of other codes.

    python -m benchmarks.gradient            headline: ours against the strongest uses of ott-jax
    python -m benchmarks.gradient --sweep    all arms at several epsilons, equal for both plans

The gradient of every arm is compared with ours in float64 before the arm is timed. An arm that does
not fit in memory, takes too long or has a wrong gradient keeps its row in the table, with a status.
"""

import functools
import math
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
from tqdm import tqdm

from benchmarks import common, peers
from benchmarks.common import Problem
from benchmarks.peers import Arm, Target
from sotalign_jax import checks
from sotalign_jax.ot import device

HEADLINE = (*peers.ARMS[:2], peers.OURS_TIGHTER, peers.DANSKIN, peers.DANSKIN_MOMENTUM)
MEMORY_SHARE = 0.25
"""Fraction of the device's memory that a program may use."""
ROWS = 64
"""Number of rows on which gradients are compared, because float64 is slow."""
COUNTED = 2048
"""Rows on which iterations of textbook Sinkhorn are counted. They hardly depend on n."""
CONVERGED = 1e-6
MAX_ITERATIONS = 10_000
WRONG = 1e-3
"""Relative difference from our float64 gradient above which a converged gradient is wrong."""


class Row(NamedTuple):
    """Measurements of one arm at one epsilon. None was not measured.

    `gap_converged` and `gap_here` are relative differences from our converged gradient in float64.
    Plans are solved to `CONVERGED` for the first, and to the requested tolerance for the second.
    """

    arm: str
    n: int
    epsilon: float
    status: str
    gap_converged: str
    gap_here: str
    temporary_mib: float
    total_mib: float
    student_iterations: int | None = None
    teacher_iterations: int | None = None
    error: str | None = None
    seconds: float | None = None
    times_ours: float | None = None


def _gradient64(arm: Arm, problem: Problem, target: Target, tolerance: float) -> Any:
    """Returns an arm's gradient in float64 at another tolerance."""
    limit = MAX_ITERATIONS
    goal = target._replace(tolerance=tolerance, student=limit, teacher=limit)
    with jax.enable_x64(True):
        affinities = problem.affinities()
        if arm.unrolled:
            goal = _fixed(affinities, goal)
        inputs = problem.features() if arm.from_features else affinities
        return jax.jit(arm.value_and_grad(goal))(*inputs)[1]


def _fixed(affinities: Any, target: Target) -> Target:
    """Returns a target with the iterations of textbook Sinkhorn, for loops of fixed length."""
    student, teacher = (
        int(peers.plain_to_tolerance(k, epsilon, most, target.tolerance).iterations)
        for k, epsilon, most in zip(affinities, target[:2], target[3:], strict=True)
    )
    # ott-jax checks its error every 10 iterations. A tolerance of 0 keeps it from stopping early.
    tens = {"student": -(-student // 10) * 10, "teacher": -(-teacher // 10) * 10}
    return target._replace(tolerance=0.0, **tens)


def measure(
    problem: Problem,
    arms: Sequence[Arm],
    target: Target,
    *,
    repeats: int,
    time_limit: float,
    slow: Collection[str] = (),
) -> list[Row]:
    """Measures all arms at one epsilon.

    Args:
        problem: The problem to solve.
        arms: Arms to measure.
        target: Epsilons, tolerance and limits of iterations.
        repeats: Number of timings.
        time_limit: Seconds above which an arm is not timed.
        slow: Names of arms that exceeded the limit before.

    Returns:
        A row per arm.
    """
    small, affinities = problem.first(ROWS), problem.affinities()
    inputs = {True: problem.features(), False: affinities}
    textbook = _fixed(problem.first(COUNTED).affinities(), target)
    steps = functools.partial(peers.plain_to_tolerance, affinities[0], target.epsilon, 2, 0.0)
    # Two iterations predict the time of an arm that would run for hours.
    two = common.time_interleaved({"": steps}, repeats=2)[0][""]
    seconds = two / 2 * (textbook.student + textbook.teacher)
    room = MEMORY_SHARE * device.profile().memory / common.MEBIBYTE

    @functools.cache  # computed once for all arms
    def expected(from_features: bool) -> Any:
        reference = peers.OURS_OF_COSINES if from_features else peers.OURS
        return _gradient64(reference, small, target, 1e-10)

    rows: dict[str, Row] = {}
    calls: dict[str, Any] = {}
    for arm in tqdm(arms, desc=f"epsilon {target.epsilon:g}: verify, compile", leave=False):
        converged, here = (
            common.relative(_gradient64(arm, small, target, goal), expected(arm.from_features))
            for goal in (CONVERGED, target.tolerance)
        )
        goal = textbook if arm.unrolled else target
        given = inputs[arm.from_features]
        compiled = jax.jit(arm.value_and_grad(goal)).lower(*given).compile()
        temporary, whole = common.memory_of(compiled)
        # The backward pass of an unrolled loop takes about as long as the loop.
        status, predicted = "ok", seconds * (2 if arm.unrolled else 1)
        if not converged < WRONG:
            status = "wrong gradient"
        elif whole > room:
            status = "does not fit"
        elif arm.name in slow:
            status = f"over {time_limit:g} s before"
        elif arm.textbook and predicted > time_limit:  # ours is faster than this prediction
            status = f"about {predicted:.0f} s"
        rows[arm.name] = Row(
            *(arm.name, len(problem.f), target.epsilon, status),
            *(f"{converged:.0e}", f"{here:.0e}", temporary, whole),
        )
        if status == "ok":
            calls[arm.name] = functools.partial(compiled, *given)
    times, plans = common.time_interleaved(calls, repeats=repeats, keep=lambda out: out[0][1])
    for name, both in plans.items():
        errors = [
            common.marginal_error(k, plan.u, plan.v, epsilon)
            for k, plan, epsilon in zip(affinities, both, target[:2], strict=True)
        ]
        rows[name] = rows[name]._replace(
            student_iterations=int(both[0].iterations),
            teacher_iterations=int(both[1].iterations),
            error=f"{max(errors):.1e}",
            seconds=times[name],
            times_ours=times[name] / times.get(peers.OURS.name, math.nan),
        )
    return list(rows.values())


def draw(arms: Sequence[Arm], rows: Sequence[Row], stem: Any) -> None:
    """Plots memory, time and iterations over epsilon.

    Args:
        arms: Arms that were measured.
        rows: Their rows.
        stem: Path of the figure without its suffix.
    """
    with common.figure(stem, columns=3) as axes:
        for index, arm in enumerate(arms):
            own = [row for row in rows if row.arm == arm.name]
            timed = [row for row in own if row.seconds is not None]
            style = {"marker": "o", "ms": 4, "color": f"C{index}", "label": arm.name}
            style["ls"] = "--" if arm.textbook else "-"
            steps = [(r.student_iterations or 0) + (r.teacher_iterations or 0) for r in timed]
            axes[0].plot([r.epsilon for r in own], [r.temporary_mib for r in own], **style)
            axes[1].plot([r.epsilon for r in timed], [r.seconds for r in timed], **style)
            axes[2].plot([r.epsilon for r in timed], steps, **style)
        names = ("temporary memory (MiB)", "loss + gradient (s)", "iterations, both plans")
        for ax, name in zip(axes, names, strict=True):
            ax.set(xscale="log", yscale="log", xlabel="epsilon", ylabel=name)
        axes[2].legend(frameon=False, fontsize=6)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures the headline, or all arms at several epsilons with --sweep."""
    args = common.options(
        __doc__,
        argv,
        n=4096,
        epsilon=[0.05, 0.005],
        tolerance=1e-3,
        repeats=3,
        sweep=False,
        data=common.DATA,
        arms="",
        max_iterations=5000,
        time_limit=300.0,
    )
    if args.quick:
        args.n, args.repeats = 96, 2
    if not args.sweep and len(args.epsilon) != 2:
        raise checks.InputError(
            f"epsilon must have the student's and the teacher's value, got {len(args.epsilon)}"
        )
    problem = common.problem(args.data, args.n, quick=args.quick)
    every = peers.ARMS if args.sweep else HEADLINE
    arms = [arm for arm in every if arm is peers.OURS or re.search(args.arms, arm.name)]
    pairs = [(epsilon, epsilon) for epsilon in args.epsilon] if args.sweep else [args.epsilon]
    which = "both epsilons equal" if args.sweep else f"epsilon* {args.epsilon[1]:g}"
    reach = f"marginal error {args.tolerance:g}"
    title = f"KLOT loss + gradient, {args.data}, n={args.n}, {which}, {reach}"
    stem = args.out / f"gradient_{'sweep' if args.sweep else 'headline'}_n{args.n}"
    limits = {"repeats": args.repeats, "time_limit": args.time_limit}
    rows: list[Row] = []
    for epsilon, epsilon_star in pairs:
        most = args.max_iterations
        target = Target(epsilon, epsilon_star, args.tolerance, most, most)
        slow = {row.arm for row in rows if (row.seconds or 0.0) > args.time_limit}
        rows += measure(problem, arms, target, slow=slow, **limits)
        table = common.Table([name.replace("_", " ") for name in Row._fields], rows, digits=3)
        common.publish(title, table, stem)  # after each epsilon, in case the command is stopped
    if args.sweep:
        draw(arms, rows, stem)


if __name__ == "__main__":
    common.run(main)
