"""How fast Sinkhorn's marginal error falls: textbook, over-relaxed and ours.

    python -m benchmarks.convergence
    python -m benchmarks.convergence --narrow --n 2048 4096 8192    # sweeps over the 8-bit copy

First the error after 100 iterations against epsilon: textbook Sinkhorn, the paper's published code
(which ends half a step later) and ours. Then the error against passes over K at one epsilon. A
pass is one update of both scalings, which reads K (or its kernel) twice, whatever the solver. With
--narrow, instead: how many sweeps a GPU or TPU makes over an 8-bit copy of the kernel and over the
kernel itself, and how many over the kernel alone.
"""

import collections
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from tqdm import tqdm

from benchmarks import common
from benchmarks.common import Problem
from experiments import report as tables
from sotalign_jax.ot.kernel import Cosines, Kernel
from sotalign_jax.ot.sinkhorn import Plan, reference, sinkhorn
from sotalign_jax.ot.solver import solve

BUDGETS = (5, 10, 20, 30, 50, 75, 100, 150, 200, 300)
SPARE_PASSES = 10
"""Passes that ours may spend on building and rescaling its kernel, which its iterations do not
count: it gets as many iterations fewer than the others get passes."""


@functools.partial(jax.jit, static_argnums=(2,))
def over_relaxed(k: Array, epsilon: Any, iterations: int, omega: float) -> tuple[Array, Array]:
    """(u, v) after each log-domain iteration whose updates are stretched by omega.

    With omega = 1 it is textbook Sinkhorn.
    """
    n, m = k.shape
    log_a, log_b = -jnp.log(jnp.asarray(n, k.dtype)), -jnp.log(jnp.asarray(m, k.dtype))

    def step(uv: tuple[Array, Array], _: None) -> tuple[Any, Any]:
        u, v = uv
        u = u + omega * (log_a - jax.nn.logsumexp(k / epsilon + v, axis=1) - u)
        v = v + omega * (log_b - jax.nn.logsumexp(k / epsilon + u[:, None], axis=0) - v)
        return (u, v), (u, v)

    start = (jnp.zeros(n, k.dtype), jnp.zeros(m, k.dtype))
    return jax.lax.scan(step, start, length=iterations)[1]


def judge(k: Array, plan: Plan) -> float:
    """The plan's marginal error, measured in float64 from its scalings.

    As scalings are float32 numbers, it can't be much below 1e-7 times the largest of them.
    """
    return common.marginal_error(k, plan.u, plan.v, float(plan.epsilon))


def ours_within(k: Array, epsilon: float, passes: int) -> float:
    """The error our solver leaves when it may make so many passes."""
    iterations = max(1, passes - min(SPARE_PASSES, passes // 2))
    limits: Any = {"epsilon": epsilon, "tolerance": 0.0, "max_iterations": iterations}
    return judge(k, jax.jit(lambda k: sinkhorn(k, **limits))(k))


def _curves(title: str, label: str, points: Any, curves: Any, stem: pathlib.Path) -> None:
    def draw(ax: Any) -> None:
        for name, errors in curves.items():
            style = "o-" if name.startswith("ours") else "--"
            ax.loglog(points, [e if np.isfinite(e) else np.nan for e in errors], style, label=name)
        ax.set(xlabel=label, ylabel="marginal error (L1)")
        ax.set_title(title, fontsize=9)
        ax.set_ylim(top=3)
        ax.legend(frameon=False)

    common.figure(1, draw, stem)


def against_epsilon(problem: Problem, epsilons: Sequence[float], out: pathlib.Path) -> None:
    """Errors after 100 iterations, on the teacher's affinity."""
    k = problem.affinities()[1]
    curves: dict[str, list[float]] = {"textbook": [], "published": [], "ours": []}
    for epsilon in tqdm(epsilons, desc=f"{problem.name}: error after 100", leave=False):
        for name, symmetric in (("textbook", False), ("published", True)):
            solver = functools.partial(
                reference, epsilon=epsilon, iterations=100, symmetric=symmetric
            )
            curves[name].append(judge(k, jax.jit(solver)(k)))
        curves["ours"].append(ours_within(k, epsilon, 100))
    rows = [
        [
            f"{epsilon:g}",
            *(f"{e:.1e}" for e in errors),
            errors[0] / errors[2],
            errors[1] / errors[2],
        ]
        for epsilon, *errors in zip(epsilons, *curves.values(), strict=True)
    ]
    headers = ["epsilon", *curves, "textbook / ours", "published / ours"]
    stem = out / f"convergence_epsilon_{problem.name}_n{len(k)}"
    title = f"Marginal error after 100 passes over K, {problem.name}, n={len(k)}"
    common.report(title, tables.table(headers, rows), stem)
    _curves(title, "epsilon", epsilons, curves, stem)


def against_passes(
    problem: Problem, epsilon: float, budgets: Sequence[int], out: pathlib.Path
) -> None:
    """Errors against passes over K for each solver, on the teacher's affinity."""
    k = problem.affinities()[1]
    curves: dict[str, list[float]] = {}
    for omega in (1.0, 1.5, 1.8):
        us, vs = over_relaxed(k, epsilon, max(budgets), omega)
        name = "textbook" if omega == 1 else f"momentum {omega:g}"
        curves[name] = [
            common.marginal_error(k, us[passes - 1], vs[passes - 1], epsilon) for passes in budgets
        ]
    desc = f"{problem.name}: ours"
    curves["ours"] = [ours_within(k, epsilon, n) for n in tqdm(budgets, desc=desc, leave=False)]
    n = len(k)
    title = f"Marginal error against passes over K, {problem.name}, n={n}, epsilon {epsilon:g}"
    columns = zip(*curves.values(), strict=True)
    rows = [[p, *(f"{e:.1e}" for e in row)] for p, row in zip(budgets, columns, strict=True)]
    stem = out / f"convergence_passes_{problem.name}_n{n}_eps{epsilon:g}"
    common.report(title, tables.table(["passes", *curves], rows), stem)
    _curves(title, "passes over K", budgets, curves, stem)


def count_sweeps(z: Array, w: Array, epsilon: float, tolerance: float, *, narrow: bool) -> Any:
    """How often a solve on cosines sweeps over the narrow copy (True), and the kernel (False)."""
    counts: collections.Counter[bool] = collections.Counter()

    class Counted(Kernel):
        def sweep(self, *args: Any, narrow: bool = False) -> tuple[Array, Array]:
            jax.debug.callback(lambda: counts.update([narrow]))
            return super().sweep(*args, narrow=narrow)

    weights = -jnp.log(jnp.full(len(z), len(z), z.dtype))
    limits: Any = {"epsilon": epsilon, "tolerance": tolerance, "max_iterations": 500}

    def error(z: Array, w: Array) -> Array:
        return solve(Counted(Cosines.of(z, w), narrow=narrow), weights, weights, **limits)[0].error

    assert jax.jit(error)(z, w) <= tolerance
    jax.effects_barrier()
    return counts


def over_narrow(
    problem: Problem, sizes: Sequence[int], epsilon: float, tolerance: float, out: pathlib.Path
) -> None:
    """Mean sweeps of the teacher's plan, over as many batches of each size as there are rows."""
    z, w = problem.features()[2:]
    rows = []
    for n in sizes:
        batches = [(z[i : i + n], w[i : i + n]) for i in range(0, len(z) - n + 1, n)]
        exact, narrow = (
            [count_sweeps(*batch, epsilon, tolerance, narrow=narrow) for batch in batches]
            for narrow in (False, True)
        )
        each = (exact, False), (narrow, True), (narrow, False)
        means = [np.mean([count[kind] for count in counts]) for counts, kind in each]
        rows.append([n, len(batches), *means])
    headers = ["n", "batches", "over the kernel alone", "over the copy", "and over the kernel"]
    title = f"Sweeps to {tolerance:g}, {problem.name}, epsilon {epsilon:g}"
    common.report(title, tables.table(headers, rows, digits=1), out / f"sweeps_{problem.name}")


def main(argv: Sequence[str] | None = None) -> None:
    """Both tables, for each kind of data."""
    args = common.options(
        __doc__,
        argv,
        n=[2048],
        epsilon=[0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001],
        data=list(common.PROBLEMS),
        passes_epsilon=0.005,
        budgets=list(BUDGETS),
        narrow=False,
        tolerance=1e-4,
    )
    if args.quick:
        args.n, args.epsilon, args.budgets = [96], [0.05, 0.005], [10, 100]
    for name in args.data:
        if args.narrow:
            problem = common.problem(name, max(args.n), quick=args.quick)
            over_narrow(problem, args.n, args.passes_epsilon, args.tolerance, args.out)
            continue
        for n in args.n:
            problem = common.problem(name, n, quick=args.quick)
            against_epsilon(problem, args.epsilon, args.out)
            against_passes(problem, args.passes_epsilon, args.budgets, args.out)


if __name__ == "__main__":
    common.run(main)
