"""Numbers that need no training: encoder similarity, distances of sets, costs of solvers."""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from sotalign_jax import checks, data, diagnostics

KNN_ROWS = 1024
TIME_LIMIT = 600.0
"""Seconds for one way to the gradient: room enough for the sizes here on a busy machine."""
Results = dict[str, Any]


def mutual_knn(dataset: data.Dataset, *, seed: int, rows: int, projections: int) -> Results:
    """Mutual k-NN of the encoders, in percent, on 1,024 pairs; validation makes up for few."""
    x, y = dataset.pairs_x, dataset.pairs_y
    if dataset.val is not None and len(x) < KNN_ROWS:
        x = np.concatenate([x, dataset.val.x[dataset.val.x_of_y]])
        y = np.concatenate([y, dataset.val.y])
    chosen = np.random.default_rng(seed).permutation(len(x))[:KNN_ROWS]
    return {"mutual_knn/percent": 100 * float(diagnostics.mutual_knn(x[chosen], y[chosen]))}


def shift(dataset: data.Dataset, *, seed: int, rows: int, projections: int) -> Results:
    """Sliced Wasserstein distances of the pools from the pairs, and their sum."""
    options = {"seed": seed, "rows": rows, "projections": projections}
    x = _distance(np.asarray(dataset.pool_x), dataset.pairs_x, **options)
    y = _distance(np.asarray(dataset.pool_y), dataset.pairs_y, **options)
    return {"shift/x": x, "shift/y": y, "shift/total": x + y}


def between(
    left: np.ndarray | None, right: np.ndarray | None, *, seed: int, rows: int, projections: int
) -> Results:
    """The distance between two sets; None stands for random directions."""
    if left is None and right is None:
        return {"between/distance": 0.0}
    width = next(x.shape[1] for x in (left, right) if x is not None)
    rng = np.random.default_rng((seed, 7))
    sets = [rng.standard_normal((rows, width)) if x is None else x for x in (left, right)]
    value = _distance(*sets, seed=seed, rows=rows, projections=projections)
    return {"between/distance": value}


def _distance(x: Any, y: Any, *, seed: int, rows: int, projections: int) -> float:
    """Of at most `rows` rows of each set, chosen by the seed, which draws the planes too."""
    rng = np.random.default_rng(seed)
    chosen = [a[rng.permutation(len(a))[:rows]] for a in (x, y)]
    return diagnostics.sliced_wasserstein(*chosen, projections=projections, seed=seed)


DATASET: Mapping[str, Callable[..., Results]] = {"mutual_knn": mutual_knn, "shift": shift}
"""Measures of a run's data."""


# --- solvers -----------------------------------------------------------------------------------


def gradient(*, epsilon: float, n: int) -> Results:
    """Memory, time and iterations of KLOT's gradient to a marginal error of 1e-6, in float64."""
    with warnings.catch_warnings():
        # ott-jax imports JAXopt, which says that it is no longer maintained.
        warnings.filterwarnings("ignore", message="JAXopt", category=DeprecationWarning)
        checks.require("ott", extra="experiments")
        from benchmarks import gradient as benchmark
        from benchmarks import peers

    target = peers.Target(epsilon, epsilon, 1e-6, 5000, 5000)
    arms = [arm for arm in peers.ARMS if arm.name in ARMS]
    problem = _problem(n)
    with jax.enable_x64(True):
        rows = benchmark.sweep_epsilon(problem, arms, target, repeats=2, time_limit=TIME_LIMIT)
    results: Results = {}
    for row in rows:
        iterations = row.student_iterations, row.teacher_iterations
        results[f"gradient/{row.arm}/memory"] = row.temporary_mib
        results[f"gradient/{row.arm}/seconds"] = row.seconds
        done = None if None in iterations else sum(filter(None, iterations))
        results[f"gradient/{row.arm}/iterations"] = done
        results[f"gradient/{row.arm}/status"] = row.status
    return results


ARMS = {
    "unrolled scan": "unrolled",
    "ott-jax implicit": "implicit (ott-jax)",
    "ours, from K": "closed form (ours)",
}
"""Ways to the gradient that the paper compares, by the benchmark's names."""


def convergence(*, epsilon: float, n: int) -> Results:
    """Marginal errors after 100 iterations on a teacher's affinity, of total mass 1."""
    from benchmarks import convergence as benchmark
    from sotalign_jax.ot.sinkhorn import reference

    k = _problem(n).affinities()[1]
    plain = jax.jit(functools.partial(reference, epsilon=epsilon, iterations=100))(k)
    return {
        "convergence/textbook": benchmark.judge(k, plain),
        "convergence/ours": benchmark.ours_within(k, epsilon, 100),
    }


def _problem(n: int) -> Any:
    from benchmarks import common

    return common.pictures_problem(n) if n <= 5000 else common.random_problem(n)


SOLVER: Mapping[str, Callable[..., Results]] = {"gradient": gradient, "convergence": convergence}
"""Measures of solvers at one epsilon."""
