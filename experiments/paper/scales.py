"""How large the runs behind tables and figures are: sizes, seeds and the points of sweeps."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ml_collections import config_dict

from experiments.configs import compare, paper


@dataclasses.dataclass(frozen=True)
class Scale:
    """One size for all entries.

    Attributes:
        name: "quick", "bundled" or "paper".
        seeds: seeds of every run; the means and spreads of tables are over them.
        grid_seeds: seeds of the large grids (alpha, epsilon), where a point is one of many.
        changes: settings by dotted name, on top of the comparison's or the paper's.
        upper_bound: settings by dotted name of the supervised upper bound.
        pairs: numbers of pairs to sweep.
        unpaired: numbers of unpaired rows to sweep; None is all there are.
        alphas: weights of KLOT to sweep.
        alpha_pairs: numbers of pairs to sweep them at.
        pool_noise: shares of the pools that become noise.
        epsilons: of both plans, for the grid of epsilon and epsilon*.
        epsilon_pairs: two numbers of pairs for that grid.
        teacher_noise: shares of the teacher's pairs that are mismatched.
        source_pairs: pairs taken from one collection when the others bring the pools.
        source_unpaired: rows of each such pool.
        solver_rows: rows a side of the problems that solvers are compared on.
        solver_epsilons: where they are compared.
        distance_rows: rows of a set in its sliced Wasserstein distances, at most.
        projections: directions of those distances.
        distance_seeds: seeds of the distances between sets.
    """

    name: str
    seeds: tuple[int, ...]
    grid_seeds: tuple[int, ...]
    changes: Mapping[str, Any]
    upper_bound: Mapping[str, Any]
    pairs: tuple[int, ...]
    unpaired: tuple[int | None, ...]
    alphas: tuple[float, ...]
    alpha_pairs: tuple[int, ...]
    pool_noise: tuple[float, ...]
    epsilons: tuple[float, ...]
    epsilon_pairs: tuple[int, int]
    teacher_noise: tuple[float, ...]
    source_pairs: int
    source_unpaired: int
    solver_rows: int
    solver_epsilons: tuple[float, ...]
    distance_rows: int = 1000
    projections: int = 500
    distance_seeds: tuple[int, ...] = (0, 1, 2)

    def config(self) -> config_dict.ConfigDict:
        """What a run's settings start from; `overrides` hold what was tuned for each method."""
        return paper.get_config() if self.name == "paper" else compare.get_config()


BUNDLED = Scale(
    name="bundled",
    seeds=(0, 1, 2),
    grid_seeds=(0,),
    changes={},
    upper_bound={"data.n_pairs": 6333, "data.n_unpaired": 0},
    pairs=(100, 300, 1000, 3000),
    unpaired=(100, 300, 1000, 3000, None),
    alphas=(3e-5, 3e-4, 3e-3, 3e-2, 3e-1),
    alpha_pairs=(100, 1000, 3000),
    pool_noise=(0.0, 0.5, 1.0),
    epsilons=(0.01, 0.05, 0.1, 0.5),
    epsilon_pairs=(100, 1000),
    teacher_noise=(0.0, 0.1, 0.3, 0.5),
    source_pairs=500,
    source_unpaired=1000,
    solver_rows=512,
    solver_epsilons=(0.5, 0.1, 0.05, 0.02, 0.01, 0.005),
)

QUICK = dataclasses.replace(
    BUNDLED,
    name="quick",
    seeds=(0,),
    changes={
        "data.n_pairs": 500,
        "heads.dim": 256,
        "train.steps": 60,
        "train.eval_every": 30,
        "train.learning_rate": 6e-4,
        "train.pair_batch": 500,
        "train.unpaired_batch": 256,
    },
    pairs=(100, 500, 2000),
    unpaired=(100, 1000, None),
    alphas=(3e-5, 3e-3, 3e-1),
    alpha_pairs=(100, 500),
    pool_noise=(0.0, 0.5, 1.0),
    epsilons=(0.01, 0.05, 0.5),
    epsilon_pairs=(100, 500),
    teacher_noise=(0.0, 0.2, 0.5),
    solver_rows=192,
    solver_epsilons=(0.5, 0.1, 0.02),
    projections=100,
    distance_seeds=(0,),
)

PAPER = Scale(
    name="paper",
    seeds=(42,),
    grid_seeds=(42,),
    changes={},
    upper_bound={
        "data.n_pairs": 1_000_000,
        "data.n_unpaired": 0,
        "train.pair_batch": 32_768,
    },
    pairs=(100, 300, 1000, 3000, 10_000, 30_000, 100_000),
    unpaired=(10_000, 30_000, 100_000, 300_000, 500_000, 1_000_000),
    alphas=(1e-6, 1e-5, 1e-4, 1e-3, 1e-2),
    alpha_pairs=(1000, 10_000, 100_000),
    pool_noise=(0.0, 0.25, 0.5, 0.75, 1.0),
    epsilons=(0.005, 0.01, 0.05, 0.1, 0.5),
    epsilon_pairs=(1000, 10_000),
    teacher_noise=(0.0, 0.1, 0.2, 0.3, 0.4, 0.5),
    source_pairs=10_000,
    source_unpaired=1_000_000,
    solver_rows=10_000,
    solver_epsilons=(0.5, 0.1, 0.05, 0.02, 0.01, 0.005),
    distance_rows=100_000,
    distance_seeds=tuple(range(20)),
)
