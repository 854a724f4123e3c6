"""How fast Sinkhorn's marginal error falls: textbook, over-relaxed and ours.

    python -m benchmarks.convergence

First the error after 100 iterations against epsilon: textbook Sinkhorn, the paper's published code
(which ends half a step later) and ours. Then the error against passes over K at one epsilon. A
pass is one update of both scalings, which reads K (or its kernel) twice, whatever the solver.
"""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from tqdm import tqdm

from benchmarks import common
from benchmarks.common import Problem
from experiments import report as tables
from sotalign_jax.ot.sinkhorn import Plan, reference, sinkhorn

BUDGETS = (5, 10, 20, 30, 50, 75, 100, 150, 200, 300)
SPARE_PASSES = 10
"""Passes that ours may spend on building and rescaling its kernel, which its iterations do not
count: it gets as many iterations fewer than the others get passes."""
MOVED = 0.01
"""How far the features move, relative to their length, before a warm start."""


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


def ours_within(k: Array, epsilon: float, passes: int, init: Any = None) -> float:
    """The error our solver leaves when it may make so many passes."""
    iterations = max(1, passes - min(SPARE_PASSES, passes // 2))
    solve = jax.jit(
        lambda k: sinkhorn(k, epsilon=epsilon, tolerance=0.0, max_iterations=iterations, init=init)
    )
    return judge(k, solve(k))


def against_epsilon(problem: Problem, epsilons: Sequence[float], out: pathlib.Path) -> None:
    """Errors after 100 iterations, on the teacher's affinity."""
    k = problem.affinities()[1]
    rows = []
    for epsilon in tqdm(epsilons, desc=f"{problem.name}: error after 100", leave=False):
        plain, published = (
            functools.partial(reference, epsilon=epsilon, iterations=100, symmetric=symmetric)
            for symmetric in (False, True)
        )
        theirs = [judge(k, jax.jit(solver)(k)) for solver in (plain, published)]
        rows.append([epsilon, *theirs, ours_within(k, epsilon, 100)])
    texts = [
        [f"{epsilon:g}", *(f"{error:.1e}" for error in errors), errors[0] / errors[2],
         errors[1] / errors[2]]
        for epsilon, *errors in rows
    ]  # fmt: skip
    headers = ["epsilon", "textbook", "published", "ours", "textbook / ours", "published / ours"]
    n = len(k)
    stem = out / f"convergence_epsilon_{problem.name}_n{n}"
    title = f"Marginal error after 100 passes over K, {problem.name}, n={n}"
    common.report(title, tables.table(headers, texts), stem)
    made, (ax,) = common.figure(1, width=5)
    styles = {"textbook": "o--", "published (half-step)": "s:", "ours": "o-"}
    for column, (name, style) in enumerate(styles.items(), start=1):
        ax.loglog([row[0] for row in rows], [row[column] for row in rows], style, label=name)
    ax.set(xlabel="epsilon", ylabel="marginal error (L1)", title=title)
    ax.title.set_fontsize(9)
    ax.legend(frameon=False)
    common.save_figure(made, stem)


def _moved(problem: Problem, seed: int = 0) -> Array:
    """The teacher's affinity after its features moved a little, as in a step of training."""
    rng = np.random.default_rng(seed)

    def move(x: np.ndarray) -> Array:
        noise = rng.standard_normal(x.shape) / np.sqrt(x.shape[1])
        return jnp.asarray(x + MOVED * noise, jnp.float32)

    return move(problem.z) @ move(problem.w).T


def _at(k: Array, u: Array, v: Array, epsilon: float, passes: int) -> float:
    return common.marginal_error(k, u[passes - 1], v[passes - 1], epsilon)


def against_passes(
    problem: Problem, epsilon: float, budgets: Sequence[int], out: pathlib.Path
) -> None:
    """Errors against passes over K for each solver, on the teacher's affinity."""
    k = problem.affinities()[1]
    earlier = jax.jit(functools.partial(sinkhorn, epsilon=epsilon, tolerance=1e-4))(_moved(problem))
    init = earlier.u, earlier.v
    curves: dict[str, Callable[[int], float]] = {}
    for omega in (1.0, 1.5, 1.8):
        u, v = over_relaxed(k, epsilon, max(budgets), omega)
        name = "textbook" if omega == 1 else f"momentum {omega:g}"
        curves[name] = functools.partial(_at, k, u, v, epsilon)
    curves["ours"] = lambda passes: ours_within(k, epsilon, passes)
    curves["ours, warm start"] = lambda passes: ours_within(k, epsilon, passes, init)
    found: dict[str, list[float]] = {}
    for name, curve in tqdm(curves.items(), desc=f"{problem.name}: passes", leave=False):
        found[name] = [curve(passes) for passes in budgets]
    n = len(k)
    title = f"Marginal error against passes over K, {problem.name}, n={n}, epsilon {epsilon:g}"
    columns = zip(*found.values(), strict=True)
    rows = [[p, *(f"{e:.1e}" for e in row)] for p, row in zip(budgets, columns, strict=True)]
    stem = out / f"convergence_passes_{problem.name}_n{n}_eps{epsilon:g}"
    common.report(title, tables.table(["passes", *found], rows), stem)
    if 100 in budgets:
        place = list(budgets).index(100)
        ratio = found["textbook"][place] / found["ours"][place]
        print(f"{problem.name}: error after 100 passes at epsilon {epsilon:g} is {ratio:.1f} times "
              f"below textbook Sinkhorn's ({found['textbook'][place]:.1e} -> "
              f"{found['ours'][place]:.1e})")  # fmt: skip
    made, (ax,) = common.figure(1, width=5)
    for name, values in found.items():
        style = "o-" if name.startswith("ours") else "--"
        ax.loglog(budgets, [e if np.isfinite(e) else np.nan for e in values], style, label=name)
    ax.set(xlabel="passes over K", ylabel="marginal error (L1)", title=title)
    ax.title.set_fontsize(9)
    ax.set_ylim(top=3)
    ax.legend(frameon=False)
    common.save_figure(made, stem)


def main(argv: Sequence[str] | None = None) -> None:
    """Both tables, for each kind of data."""
    parser = common.parser(__doc__, n=[2048], epsilon=[0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001])
    parser.add_argument("--data", choices=list(common.PROBLEMS), nargs="+",
                        default=list(common.PROBLEMS))  # fmt: skip
    parser.add_argument("--passes_epsilon", type=float, default=0.005)
    parser.add_argument("--budgets", type=int, nargs="+", default=list(BUDGETS), help="passes")
    args = common.parse(parser, argv)
    if args.quick:
        args.n, args.epsilon, args.budgets = [96], [0.05, 0.005], [10, 100]
    for name in args.data:
        for n in args.n:
            problem = common.problem(name, n, quick=args.quick)
            against_epsilon(problem, args.epsilon, args.out)
            against_passes(problem, args.passes_epsilon, args.budgets, args.out)


if __name__ == "__main__":
    main()
