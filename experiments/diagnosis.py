"""Measures what can be known before training."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from experiments import workdir
from sotalign_jax import checks, data, diagnostics, methods, teachers

MIN_PAIRS = 20
NEIGHBOURS = 10
KNN_ROWS = 1024
"""The paper's protocol; its scores are of so many rows."""
LADDER = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005)
BUDGET = methods.SOTAlign.max_iterations
TOLERANCE = methods.SOTAlign.tolerance


@dataclasses.dataclass(frozen=True)
class Options:
    """How thoroughly to measure, and the epsilons and ridge meant for training."""

    epsilon: float = 0.05
    epsilon_star: float = 0.005
    ridge: float = 0.1
    subsets: int = 5
    repeats: int = 20
    rows: int = 10_000
    projections: int = 500
    batch: int = 4096

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon, epsilon_star=self.epsilon_star)
        checks.at_least(0, ridge=self.ridge)

    def quick(self) -> "Options":
        """Less of everything."""
        return dataclasses.replace(
            self, subsets=1, repeats=5, rows=1000, projections=100, batch=1024
        )

    def epsilons(self) -> list[float]:
        """The ladder with the chosen ones, largest first."""
        return sorted({*LADDER, self.epsilon, self.epsilon_star}, reverse=True)


class Encoders(NamedTuple):
    """Mutual k-NN of random subsets of the pairs."""

    scores: list[float]
    chance: float
    rows: int

    @property
    def score(self) -> diagnostics.Spread:
        """Mean over the subsets, and its spread."""
        return diagnostics.spread(self.scores)

    @property
    def above_chance(self) -> float:
        """(score - chance) / (1 - chance)."""
        return above_chance(self.score.mean, self.chance)


class Findings(NamedTuple):
    """What was measured; a pool that has no rows has no shift, and no plan without both."""

    options: Options
    shapes: dict[str, Any]
    encoders: Encoders
    shifts: dict[str, diagnostics.Shift]
    plans: list[diagnostics.Convergence]
    batch: int


def measure(dataset: data.Dataset, options: Options, *, seed: int) -> Findings:
    """Runs every diagnostic under one progress bar."""
    pools = {"x": (dataset.pairs_x, dataset.pool_x), "y": (dataset.pairs_y, dataset.pool_y)}
    pools = {side: arrays for side, arrays in pools.items() if len(arrays[1])}
    epsilons = options.epsilons() if len(pools) == 2 else []
    subsets = options.subsets if len(dataset.pairs_x) > KNN_ROWS else 1
    total = subsets + options.repeats * len(pools) + len(epsilons)
    done = 0
    with workdir.Progress(total, "diagnose") as progress:

        def step() -> None:
            nonlocal done
            done += 1
            progress.update(done)

        encoders = _encoders(dataset, subsets, seed, step)
        shifts = {
            side: diagnostics.pool_shift(
                *arrays,
                repeats=options.repeats,
                rows=options.rows,
                projections=options.projections,
                seed=seed,
                on_repeat=step,
            )
            for side, arrays in pools.items()
        }
        plans, batch = [], min(options.batch, len(dataset.pool_x), len(dataset.pool_y))
        if epsilons:
            teacher = teachers.cca(dataset.pairs_x, dataset.pairs_y, ridge=options.ridge)
            rng = np.random.default_rng(seed)
            f, g = (
                np.asarray(project(pool[np.sort(rng.permutation(len(pool))[:batch])]))
                for project, pool in ((teacher.x, dataset.pool_x), (teacher.y, dataset.pool_y))
            )
            for epsilon in epsilons:
                plans += diagnostics.sinkhorn_convergence(
                    f, g, [epsilon], tolerance=TOLERANCE, max_iterations=BUDGET
                )
                step()
    shapes = {key: shape for key, shape in dataset.summary().items() if shape}
    return Findings(options, shapes, encoders, shifts, plans, batch)


def _encoders(dataset: data.Dataset, subsets: int, seed: int, step: Callable[[], None]) -> Encoders:
    n = len(dataset.pairs_x)
    rows = min(KNN_ROWS, n)
    scores = []
    for subset in range(subsets):
        chosen = np.sort(np.random.default_rng((seed, subset)).permutation(n)[:rows])
        x, y = dataset.pairs_x[chosen], dataset.pairs_y[chosen]
        scores.append(diagnostics.mutual_knn(x, y, k=NEIGHBOURS))
        step()
    return Encoders(scores, diagnostics.chance_knn(rows, k=NEIGHBOURS), rows)


def above_chance(score: float, chance: float) -> float:
    """What a score has above chance, as a part of what there could be."""
    return (score - chance) / (1 - chance)
