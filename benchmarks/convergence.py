"""Compares the convergence of Sinkhorn solvers: textbook, published, over-relaxed and ours.

    python -m benchmarks.convergence
    python -m benchmarks.convergence --sweeps --n 2048 4096 8192    # sweeps of a training step

The first table has the marginal error after 100 passes over K for several epsilons, the second one
at epsilon 0.005 for several numbers of passes. A pass is one update of both scalings, which reads K
or its kernel twice in all solvers. The paper's published code is textbook Sinkhorn that ends half a
step later.
With --sweeps, the command counts the sweeps of both plans of a training step instead, with float32
kernels and with an int8 kernel for the teacher, as on a GPU or TPU.
"""

import collections
import functools
import itertools
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
from sotalign_jax.ot.affinity import Cosines
from sotalign_jax.ot.kernel import Operator
from sotalign_jax.ot.sinkhorn import Plan, reference, sinkhorn
from sotalign_jax.ot.solver import solve

PASSES = 100
EPSILON, STUDENT_EPSILON = 0.005, 0.05
TOLERANCES = (1e-2, 1e-4)
"""Default tolerances of training and of the loss."""
SPARE_PASSES = 10
"""Passes that our solver may spend on building and rescaling its kernel. Its iterations do not
count them, so it gets this many iterations less than other solvers get passes."""


def judge(k: Array, plan: Plan) -> float:
    """Returns a plan's marginal error, computed in float64 from its scalings.

    Scalings are float32, so the error cannot be much below 1e-7 times the largest of them.

    Args:
        k: Affinities.
        plan: The plan.
    """
    return common.marginal_error(k, plan.u, plan.v, float(plan.epsilon))


def textbook(k: Array, epsilon: float, passes: int, symmetric: bool = False) -> float:
    """Returns the marginal error of textbook Sinkhorn or of the published code.

    Args:
        k: Affinities.
        epsilon: Regularization.
        passes: Number of iterations.
        symmetric: Run the published code.
    """
    limits: Any = {"epsilon": epsilon, "iterations": passes, "symmetric": symmetric}
    return judge(k, jax.jit(functools.partial(reference, **limits))(k))


def ours_within(k: Array, epsilon: float, passes: int) -> float:
    """Returns the marginal error of our solver.

    Args:
        k: Affinities.
        epsilon: Regularization.
        passes: Limit of passes over K.
    """
    iterations = max(1, passes - min(SPARE_PASSES, passes // 2))
    # A tolerance of 0 is never reached, so the solver uses all iterations.
    limits: Any = {"epsilon": epsilon, "tolerance": 0.0, "max_iterations": iterations}
    return judge(k, jax.jit(functools.partial(sinkhorn, **limits))(k))


@jax.jit
def over_relaxed(k: Array, epsilon: float, passes: int, omega: float) -> tuple[Array, Array]:
    """Runs Sinkhorn in the log domain with updates multiplied by omega.

    Args:
        k: Affinities.
        epsilon: Regularization.
        passes: Number of iterations.
        omega: Over-relaxation factor. 1 is textbook Sinkhorn.

    Returns:
        The log-scalings u and v.
    """
    n, m = k.shape

    def step(_: Any, uv: tuple[Array, Array]) -> tuple[Array, Array]:
        u, v = uv
        u = u - omega * (jnp.log(n) + jax.nn.logsumexp(k / epsilon + v, axis=1) + u)
        v = v - omega * (jnp.log(m) + jax.nn.logsumexp(k / epsilon + u[:, None], axis=0) + v)
        return u, v

    return jax.lax.fori_loop(0, passes, step, (jnp.zeros(n, k.dtype), jnp.zeros(m, k.dtype)))


def momentum(k: Array, epsilon: float, passes: int, omega: float) -> float:
    """Returns the marginal error of over-relaxed Sinkhorn: see `over_relaxed`.

    Args:
        k: Affinities.
        epsilon: Regularization.
        passes: Number of iterations.
        omega: Over-relaxation factor.
    """
    u, v = over_relaxed(k, epsilon, passes, omega)
    return common.marginal_error(k, u, v, epsilon)


SOLVERS: dict[str, Callable[[Array, float, int], float]] = {
    "textbook": textbook,
    "published": functools.partial(textbook, symmetric=True),
    "momentum 1.5": functools.partial(momentum, omega=1.5),
    "momentum 1.8": functools.partial(momentum, omega=1.8),
    "ours": ours_within,
}


def compare(
    problem: Problem, epsilons: Sequence[float], budgets: Sequence[int], out: pathlib.Path
) -> None:
    """Reports both tables and their curves.

    Args:
        problem: Problem whose teacher's affinity is solved.
        epsilons: Epsilons of the first table.
        budgets: Passes of the second table.
        out: Folder of the results.
    """
    # The teacher's epsilon is the smaller one, so its plan is the harder one.
    k = problem.affinities()[1]
    against = {
        "epsilon": (f"after {PASSES} passes over K", epsilons, [(x, PASSES) for x in epsilons]),
        "passes": (f"at epsilon {EPSILON:g}", budgets, [(EPSILON, x) for x in budgets]),
    }
    for label, (held, points, settings) in against.items():
        errors = [
            [solver(k, *setting) for solver in SOLVERS.values()]
            for setting in tqdm(settings, desc=label, leave=False)
        ]
        cells = [[f"{error:.1e}" for error in row] for row in errors]
        rows = [[f"{point:g}", *row] for point, row in zip(points, cells, strict=True)]
        title = f"Marginal error {held}, {problem.name}, n={len(k)}"
        stem = out / f"convergence_{label}_{problem.name}_n{len(k)}"
        common.publish(title, common.Table([label, *SOLVERS], rows), stem)
        with common.figure(stem) as (ax,):
            # Solvers that diverged leave a gap in their curve.
            curves = np.transpose(np.where(np.isfinite(errors), errors, np.nan))
            for name, curve in zip(SOLVERS, curves, strict=True):
                ax.loglog(points, curve, "o-" if name == "ours" else "--", label=name)
            ax.set(xlabel=label, ylabel="marginal error (L1)", ylim=(1e-7, 3))
            ax.set_title(title, fontsize=9)
            ax.legend(frameon=False)


def count_sweeps(x: Array, y: Array, epsilon: float, tolerance: float, *, int8: bool) -> Any:
    """Counts the sweeps of one solve.

    Args:
        x: Unit features of the rows.
        y: Unit features of the columns.
        epsilon: Regularization.
        tolerance: Marginal error to reach.
        int8: Use an int8 kernel at first.

    Returns:
        Numbers of "float32" and "int8" sweeps.
    """
    counts: collections.Counter[str] = collections.Counter()

    class Counted(Operator):
        def sweep(self, *args: Any) -> tuple[Array, Array]:
            # The solver runs in a compiled loop. Only a callback sees each of its sweeps.
            jax.debug.callback(lambda: counts.update(["float32"]))
            return super().sweep(*args)

        def sweep_int8(self, *args: Any) -> tuple[Array, Array]:
            jax.debug.callback(lambda: counts.update(["int8"]))
            return super().sweep_int8(*args)

    weights = -jnp.log(jnp.full(len(x), len(x), x.dtype))
    limits: Any = {"epsilon": epsilon, "tolerance": tolerance, "max_iterations": 500}

    def error(x: Array, y: Array) -> Array:
        return solve(Counted(Cosines.of(x, y), int8=int8), weights, weights, **limits)[0].error

    assert jax.jit(error)(x, y) <= tolerance
    jax.effects_barrier()  # wait until all callbacks have run
    return counts


def mean_sweeps(n: int, x: Array, y: Array, *options: float, int8: bool = False) -> list[float]:
    """Returns the mean numbers of float32 and int8 sweeps over batches.

    Args:
        n: Rows per batch.
        x: Unit features of all rows.
        y: Unit features of all columns.
        *options: Epsilon and tolerance of `count_sweeps`.
        int8: Use an int8 kernel at first.
    """
    # An incomplete last batch is left out.
    batches = [(x[i : i + n], y[i : i + n]) for i in range(0, len(x) - n + 1, n)]
    found = [count_sweeps(*batch, *options, int8=int8) for batch in batches]
    return [float(np.mean([one[kind] for one in found])) for kind in ("float32", "int8")]


def step_sweeps(problem: Problem, sizes: Sequence[int], out: pathlib.Path) -> None:
    """Reports the sweeps of both plans of a training step.

    Args:
        problem: The problem.
        sizes: Rows per batch.
        out: Folder of the results.
    """
    f, g, z, w = problem.features()
    rows = []
    for n, tolerance in itertools.product(sizes, TOLERANCES):
        alone, _ = mean_sweeps(n, z, w, EPSILON, tolerance)
        exact, rough = mean_sweeps(n, z, w, EPSILON, tolerance, int8=True)
        student, _ = mean_sweeps(n, f, g, STUDENT_EPSILON, tolerance)
        rows.append([n, f"{tolerance:g}", alone, rough, exact, student])
    headers = ["n", "tolerance", "teacher, float32", "teacher, int8", "+ float32", "student"]
    title = f"Sweeps of both plans, {problem.name}, epsilon {EPSILON:g} and {STUDENT_EPSILON:g}"
    common.publish(title, common.Table(headers, rows, digits=1), out / f"sweeps_{problem.name}")


def main(argv: Sequence[str] | None = None) -> None:
    """Reports both tables for all numbers of rows, or the sweeps with --sweeps."""
    args = common.options(
        __doc__,
        argv,
        n=[2048],
        epsilon=[0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001],
        budgets=[10, 20, 30, 50, 100, 200],
        data=common.DATA,
        sweeps=False,
    )
    if args.quick:
        args.n, args.epsilon, args.budgets = [96], [0.05, 0.005], [10, 100]
    if args.sweeps:
        problem = common.problem(args.data, max(args.n), quick=args.quick)
        step_sweeps(problem, args.n, args.out)
        return
    for n in args.n:
        problem = common.problem(args.data, n, quick=args.quick)
        compare(problem, args.epsilon, args.budgets, args.out)


if __name__ == "__main__":
    common.run(main)
