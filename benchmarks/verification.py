"""Is an arm's gradient right? Compared with ours in float64, on few rows, of converged plans."""

import math
from typing import Any

import jax

from benchmarks import peers
from benchmarks.common import Problem
from benchmarks.peers import Arm, Target
from sotalign_jax import klot
from sotalign_jax.ot import affinity

ROWS = 64
TOLERANCE = 1e-6
MAX_ITERATIONS = 10_000
WRONG = 1e-3
"""Relative difference from our float64 gradient above which an arm is not timed."""


def reference(problem: Problem, target: Target, from_features: bool) -> Any:
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


def gradient64(arm: Arm, problem: Problem, target: Target, tolerance: float) -> Any:
    """An arm's gradient in float64 at another tolerance, whatever iterations it takes."""
    limit = MAX_ITERATIONS
    goal = target._replace(tolerance=tolerance, student=limit, teacher=limit)
    with jax.enable_x64(True):
        if arm.unrolled:
            epsilons = goal.epsilon, goal.epsilon_star
            # ott-jax looks at its error every 10 iterations, and must not stop by it.
            student, teacher = (
                tens(peers.plain_to_tolerance(k, epsilon, limit, tolerance).iterations)
                for k, epsilon in zip(problem.affinities(), epsilons, strict=True)
            )
            goal = goal._replace(tolerance=0.0, student=student, teacher=teacher)
        inputs = problem.features() if arm.from_features else problem.affinities()
        return jax.jit(arm.value_and_grad(goal))(*inputs)[1]


def tens(count: Any) -> int:
    """The next multiple of 10."""
    return math.ceil(int(count) / 10) * 10
