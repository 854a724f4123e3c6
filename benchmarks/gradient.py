"""KLOT and its gradient, ours against other ways: time, memory and iterations.

    python -m benchmarks.gradient            headline: real affinities, ours against ott-jax
    python -m benchmarks.gradient --sweep    every arm against epsilon, to --tolerance
    python -m benchmarks.gradient --sweep --iterations 100       at a fixed number of iterations

No arm is timed before its gradient has been compared with ours in float64. What does not fit in
memory, takes too long or has a wrong gradient is a row of the table, not a gap.
"""

import functools
import math
import pathlib
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from tqdm import tqdm

from benchmarks import common, peers
from benchmarks.common import Problem
from benchmarks.peers import Arm, Target
from experiments import report as tables
from sotalign_jax import checks, klot
from sotalign_jax.ot import affinity, blocks

HEADLINE = (*peers.ARMS[:2], peers.OURS_TIGHTER, peers.DANSKIN, peers.DANSKIN_MOMENTUM)
MEMORY_SHARE = 0.5
"""Share of the memory that a program may ask for."""
ROWS = 64
"""An arm's gradient is compared with ours in float64, on few rows, of converged plans."""
TOLERANCE = 1e-6
MAX_ITERATIONS = 10_000
WRONG = 1e-3
"""Relative difference from our float64 gradient above which an arm is not timed."""


class Row(NamedTuple):
    """One arm at one epsilon; None is what was not measured."""

    arm: str
    n: int
    epsilon: float
    status: str
    student_iterations: int | None
    teacher_iterations: int | None
    error: str | None
    gradient_gap: str
    temporary_mib: float | None
    total_mib: float | None
    seconds: float | None
    times_ours: float | None


def _both_inputs(problem: Problem) -> dict[bool, tuple]:
    """What arms take, by `from_features`: made once, for n x n arrays are large."""
    return {True: problem.features(), False: problem.affinities()}


def _compile(arm: Arm, inputs: Sequence[Any], target: Target) -> Any:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
    return jax.jit(arm.value_and_grad(target)).lower(*shapes).compile()


def _errors(problem: Problem, scalings: Any, target: Target) -> tuple[float, float]:
    """Marginal errors of the student's and the teacher's plan, by one judge for all arms."""
    epsilons = target.epsilon, target.epsilon_star
    parts = zip(problem.affinities(), scalings, epsilons, strict=True)
    student, teacher = (common.marginal_error(k, s.u, s.v, e) for k, s, e in parts)
    return student, teacher


# ------------------------------------------------------------------------------- verification


def _reference(problem: Problem, target: Target, from_features: bool) -> Any:
    """Our gradient in float64 of converged plans, in K or in f and g."""
    with jax.enable_x64(True):
        k, k_star = problem.affinities()

        def loss(*student: Any) -> Any:
            return klot(
                affinity.cosine(*student) if from_features else student[0],
                k_star,
                epsilon=target.epsilon,
                epsilon_star=target.epsilon_star,
                tolerance=1e-10,
                max_iterations=MAX_ITERATIONS,
            )

        student = problem.features()[:2] if from_features else (k,)
        return jax.jit(jax.grad(loss, argnums=tuple(range(len(student)))))(*student)


def _gradient64(arm: Arm, problem: Problem, target: Target, tolerance: float) -> Any:
    """An arm's gradient in float64 at another tolerance, whatever iterations it takes."""
    limit = MAX_ITERATIONS
    goal = target._replace(tolerance=tolerance, student=limit, teacher=limit)
    with jax.enable_x64(True):
        if arm.unrolled:
            epsilons = goal.epsilon, goal.epsilon_star
            # ott-jax looks at its error every 10 iterations, and must not stop by it.
            student, teacher = (
                _tens(peers.plain_to_tolerance(k, epsilon, limit, tolerance).iterations)
                for k, epsilon in zip(problem.affinities(), epsilons, strict=True)
            )
            goal = goal._replace(tolerance=0.0, student=student, teacher=teacher)
        inputs = problem.features() if arm.from_features else problem.affinities()
        return jax.jit(arm.value_and_grad(goal))(*inputs)[1]


def _tens(count: Any) -> int:
    """The next multiple of 10."""
    return math.ceil(int(count) / 10) * 10


# ----------------------------------------------------------------------------------- headline


def headline(
    problem: Problem, arms: Sequence[Arm], target: Target, *, repeats: int, out: pathlib.Path
) -> None:
    """Ours and the strongest uses of ott-jax, to the same marginal error on both plans."""
    small, inputs = problem.first(ROWS), _both_inputs(problem)
    compiled, gaps = {}, {}
    expected = functools.cache(functools.partial(_reference, small, target))
    for arm in tqdm(arms, desc="verify and compile", leave=False):
        found = _gradient64(arm, small, target, TOLERANCE)
        gaps[arm.name] = common.relative(found, expected(arm.from_features))
        if not gaps[arm.name] < WRONG:
            raise checks.InputError(f"{arm.name}: its gradient is {gaps[arm.name]:.1e} off ours")
        compiled[arm.name] = _compile(arm, inputs[arm.from_features], target)
    calls = {a.name: functools.partial(compiled[a.name], *inputs[a.from_features]) for a in arms}
    seconds, results = common.time_interleaved(calls, repeats=repeats, keep=lambda out: out)
    # What all are compared with: the same loss, solved as far as float32 goes.
    exact = peers.OURS.value_and_grad(target._replace(tolerance=1e-5, student=5000, teacher=5000))
    best = jax.jit(exact)(*inputs[False])[1]
    rows: list[list[Any]] = []
    for arm in arms:
        (_, scalings), gradient = results[arm.name]
        close = None if arm.from_features else f"{common.relative(gradient, best):.1e}"
        errors = [f"{error:.1e}" for error in _errors(problem, scalings, target)]
        counts = [int(plan.iterations) for plan in scalings]
        rows.append([arm.name, *counts, *errors, close, f"{gaps[arm.name]:.0e}"])
        ratio = seconds[arm.name] / seconds[peers.OURS.name]
        rows[-1] += [common.memory_of(compiled[arm.name])[0], seconds[arm.name], ratio]
    headers = ["arm", "student its", "teacher its", "student error", "teacher error"]
    headers += ["gradient gap", "gap (float64)", "temp MiB", "seconds", "times ours"]
    n = len(problem.f)
    title = f"KLOT loss + gradient, {problem.name}, n={n}, epsilon {target.epsilon:g}, "
    title += f"epsilon* {target.epsilon_star:g}, marginal error {target.tolerance:g}"
    common.report(title, tables.table(headers, rows, digits=3), out / f"gradient_headline_n{n}")


# -------------------------------------------------------------------------------------- sweep


class Plain(NamedTuple):
    """What textbook Sinkhorn takes to get there, which decides what else can be run."""

    target: Target
    seconds: float
    trouble: str | None


def _plain(problem: Problem, target: Target, limit: float) -> Plain:
    """Iterations and time of textbook Sinkhorn for both plans, in at most `limit` seconds each."""
    counts, total, trouble = [], 0.0, None
    caps = target.student, target.teacher
    epsilons = target.epsilon, target.epsilon_star
    for k, epsilon, cap in zip(problem.affinities(), epsilons, caps, strict=True):
        jax.block_until_ready(peers.plain_to_tolerance(k, epsilon, 5, 0.0))
        start = time.perf_counter()
        jax.block_until_ready(peers.plain_to_tolerance(k, epsilon, 5, 0.0))
        per_iteration = (time.perf_counter() - start) / 5
        affordable = max(10, min(cap, int(limit / per_iteration)))
        found = cap
        if target.tolerance > 0:
            solved = peers.plain_to_tolerance(k, epsilon, affordable, target.tolerance)
            found = int(solved.iterations)
        total += found * per_iteration
        counts.append(_tens(found))
        if found >= affordable and target.tolerance > 0:
            trouble = f"over {cap} its" if affordable == cap else f"over {limit:g} s"
    if trouble is None and total > limit:
        trouble = f"about {total:.0f} s"
    return Plain(target._replace(student=counts[0], teacher=counts[1]), total, trouble)


def sweep_epsilon(
    problem: Problem, arms: Sequence[Arm], target: Target, *, repeats: int, time_limit: float
) -> list[Row]:
    """Every arm at one epsilon: verified, weighed, and timed when it fits."""
    n = len(problem.f)
    plain = _plain(problem, target, time_limit)
    waiting: dict[str, Any] = {}
    drafts: dict[str, Row] = {}
    room = MEMORY_SHARE * blocks.device_memory() / common.MEBIBYTE
    small, both = problem.first(ROWS), _both_inputs(problem)
    expected = functools.cache(functools.partial(_reference, small, target))
    for arm in tqdm(arms, desc=f"epsilon {target.epsilon:g}: verify, compile", leave=False):
        found = _gradient64(arm, small, target, TOLERANCE)
        gap = common.relative(found, expected(arm.from_features))
        own = common.relative(_gradient64(arm, small, target, 10 * TOLERANCE), found)
        goal = plain.target._replace(tolerance=0.0) if arm.unrolled else target
        inputs = both[arm.from_features]
        compiled = _compile(arm, inputs, goal)
        temporary, whole = common.memory_of(compiled)
        status = "ok"
        if not gap < WRONG:
            status = "wrong gradient"
        elif whole > room:
            status = "does not fit"
        elif plain.trouble and arm.textbook:
            status = plain.trouble
        elif arm.unrolled and 4 * plain.seconds > time_limit:
            status = f"about {4 * plain.seconds:.0f} s"
        drafts[arm.name] = Row(
            arm.name, n, target.epsilon, status, None, None, None, f"{gap:.0e} / {own:.0e}",
            temporary, whole, None, None,
        )  # fmt: skip
        if status == "ok":
            waiting[arm.name] = compiled, inputs
    calls = {name: functools.partial(program, *x) for name, (program, x) in waiting.items()}
    seconds, results = common.time_interleaved(calls, repeats=repeats, keep=lambda out: out[0][1])
    for name, scalings in results.items():
        worst = max(_errors(problem, scalings, target))
        drafts[name] = drafts[name]._replace(
            student_iterations=int(scalings[0].iterations),
            teacher_iterations=int(scalings[1].iterations),
            error=f"{worst:.1e}",
            seconds=seconds[name],
            times_ours=seconds[name] / seconds.get(peers.OURS.name, float("nan")),
            status="ok" if seconds[name] <= time_limit else f"ok, over {time_limit:g} s",
        )
    return list(drafts.values())


def sweep(args: Any, problem: Problem) -> None:
    """The table of all arms against epsilon."""
    fixed = args.iterations is not None
    arms = _choose(peers.ARMS, args.arms)
    n = len(problem.f)
    reach = f"{args.iterations} iterations" if fixed else f"marginal error {args.tolerance:g}"
    kind = f"{args.iterations}its" if fixed else f"tol{args.tolerance:g}"
    kind += "_x64" if args.x64 else ""
    stem = args.out / f"gradient_{problem.name}_n{n}_{kind}"
    title = f"KLOT loss + gradient, {problem.name}, n={n}, both epsilons equal, {reach}"
    rows: list[Row] = []
    for epsilon in tqdm(args.epsilon, desc=f"n={n}"):
        cap = args.iterations if fixed else args.max_iterations
        target = Target(epsilon, epsilon, 0.0 if fixed else args.tolerance, cap, cap)
        rows += sweep_epsilon(
            problem, arms, target, repeats=args.repeats, time_limit=args.time_limit
        )
        table = tables.table([name.replace("_", " ") for name in Row._fields], rows, digits=3)
        common.report(title, table, stem)  # a large problem may be stopped before the last

    def draw(*axes: Any) -> None:
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
        axes[0].legend(frameon=False, fontsize=6)

    common.figure(3, draw, stem)


def _choose(arms: Sequence[Arm], pattern: str) -> list[Arm]:
    return [arm for arm in arms if arm is peers.OURS or re.search(pattern, arm.name)]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the headline, or with --sweep the table against epsilon."""
    args = common.options(
        __doc__,
        argv,
        n=[4096],
        epsilon=[0.05, 0.005],
        repeats=3,
        sweep=False,
        data=tuple(common.PROBLEMS),
        arms="",
        tolerance=float,
        iterations=int,
        x64=False,
        max_iterations=5000,
        time_limit=60.0,
    )
    args.tolerance = args.tolerance or (1e-6 if args.sweep else 1e-3)
    if args.quick:
        args.n, args.repeats = [96], 2
    for n in args.n:
        problem = common.problem(args.data, n, quick=args.quick)
        if args.sweep:
            with jax.enable_x64(args.x64):
                sweep(args, problem)
            continue
        if len(args.epsilon) != 2:
            raise checks.InputError("epsilon: pass the student's and the teacher's")
        student, teacher = args.epsilon
        limit = args.max_iterations
        target = Target(student, teacher, args.tolerance, limit, limit)
        arms = _choose(HEADLINE, args.arms)
        headline(problem, arms, target, repeats=args.repeats, out=args.out)


if __name__ == "__main__":
    common.run(main)
