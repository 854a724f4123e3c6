"""Sizes of the runs, points of the sweeps, and default settings of the methods, by scale.

Lion changes a weight by at most the learning rate in a step, so the number of steps times the rate
bounds the distance from the start. It is about 0.2 at every scale, as in the paper.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sotalign_jax import methods

SCALES = ("quick", "full", "paper")
"""Short runs, runs on the repository's data, and runs on the paper's data."""
Settings = Mapping[str, Any]
Grid = Mapping[str, Sequence[Any]]
"""Settings of a config by dotted name, settings of the data as "data.NAME", and the metric."""

CUTS = (1, 5, 10)
"""Numbers of neighbours among which recall looks for the partner."""
TUNED_TEACHER: Settings = {"teacher": "tuned_cca"}
"""The teacher that cross-validation chooses in place of the paper's, see `teachers.tuned_cca`."""
TUNED_START: Settings = {**TUNED_TEACHER, "start": "teacher"}
"""The tuned teacher, with heads that start at its projection."""
REFINED_TEACHER: Settings = {"teacher": "refined_cca"}
"""The teacher that transport plans between the unpaired rows refine, see `teachers.refine`."""
TEACHER_START: Settings = {"start": "teacher", "sotalign.alpha": 1e-3}
SHORT: Settings = {"train.steps": 200, "train.learning_rate": 1e-3, "train.eval_every": 10}
"""Fewer steps with the larger numbers of pairs."""
SHORT_ALPHAS = (3e-4, 5e-4, 3 / 2048)  # the last one is 3 / pairs in a batch
SHORT_RATES = (2.5e-4, 5e-4, 1e-3)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of runs and measurements. An empty sweep or a size of 0 leaves a panel out."""

    seeds: Sequence[int]  # the first one is that of panels with a single seed
    n_pairs: int
    # Numbers of pairs: in most figures, in panels that also sweep an option, and on speech.
    pairs: Sequence[int]
    first_pairs: Sequence[int]
    few_pairs: Sequence[int]
    speech_pairs: Sequence[int]
    # Numbers of unpaired rows. The last one is the default.
    unpaired: Sequence[int]
    all_pairs: int  # pairs of "SAIL, more pairs"
    many_pairs: int  # a larger number of pairs, or 0 for none
    pool_rows: int  # rows of each pool in comparisons of sources
    # The tuned teacher on satellite images and speech. Validation chose its start on speech (S1).
    # On satellite images the start follows V2, which is on the test split.
    tuned_start: Settings
    # Options tried on validation (V1).
    rates: Sequence[float]
    speech_rates: Sequence[float]
    weights: Sequence[float]
    both_weights: Sequence[tuple[float, float]]  # of texts and of images
    tried_alphas: Sequence[float]
    # Options that validation selects for all other tables: a grid for each method.
    grids: Mapping[str, Grid]
    # Sweeps.
    teacher_noise: Sequence[float]
    pool_noise: Sequence[float]
    alphas: Sequence[float]
    epsilons: Sequence[float]
    epsilon_settings: Settings
    # Measurements without training.
    gradient_rows: int
    convergence_rows: int
    solver_epsilons: Sequence[float]
    distance_rows: int
    distance_seeds: Sequence[int]
    projections: int
    t7_speech_pairs: int = 1000

    @property
    def first_seed(self) -> Sequence[int]:
        """The seed of panels with a single seed."""
        return self.seeds[:1]


QUICK = Sizes(
    seeds=(0,),
    n_pairs=1000,
    pairs=(100, 1000),
    first_pairs=(100, 1000),
    few_pairs=(100, 1000),
    speech_pairs=(100, 1000),
    unpaired=(300, 5000),
    all_pairs=3000,
    many_pairs=0,
    pool_rows=2000,
    tuned_start=TUNED_START,
    rates=(1e-3, 2e-3),
    speech_rates=(),
    weights=(0.1, 1.0),
    both_weights=((1.0, 0.0), (0.0, 1.0)),
    tried_alphas=(1e-3, 1e-2),
    grids={},
    teacher_noise=(0.0, 0.5),
    pool_noise=(0.0, 1.0),
    alphas=(1e-3, 1e-2),
    epsilons=(0.005, 0.05),
    epsilon_settings={},
    gradient_rows=192,
    convergence_rows=192,
    solver_epsilons=(0.5, 0.05, 0.01),
    distance_rows=500,
    distance_seeds=(0,),
    projections=100,
)
FULL = Sizes(
    seeds=(0, 1, 2),
    n_pairs=1000,
    pairs=(100, 1000, 3000),
    first_pairs=(100, 1000),
    few_pairs=(100, 1000, 3000),
    speech_pairs=(100, 300, 1000, 3000),
    unpaired=(300, 3000, 20_000),
    all_pairs=3000,
    many_pairs=10_000,
    pool_rows=2500,
    tuned_start={**TUNED_START, "train.learning_rate": 5e-4},
    rates=(5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
    speech_rates=(5e-4, 1e-3, 2e-3, 4e-3),
    weights=(0.1, 1.0, 10.0, 100.0, 1000.0),
    both_weights=((1.0, 0.0), (0.0, 1.0), (0.1, 0.1), (1.0, 1.0), (10.0, 10.0)),
    tried_alphas=(1e-4, 1e-3, 3e-3, 1e-2, 1e-1),
    grids={},
    teacher_noise=(0.0, 0.3, 0.5),
    pool_noise=(0.0, 0.5, 1.0),
    alphas=(1e-4, 1e-3, 3e-3, 1e-2, 1e-1),
    epsilons=(0.005, 0.05, 0.2),
    epsilon_settings={},
    gradient_rows=512,
    convergence_rows=512,
    solver_epsilons=(0.5, 0.1, 0.05, 0.02, 0.01, 0.005),
    distance_rows=1000,
    distance_seeds=(0,),
    projections=500,
)
PAPER = Sizes(
    seeds=(42,),
    n_pairs=10_000,
    pairs=(100, 1000, 10_000, 100_000),
    first_pairs=(1000, 10_000),
    few_pairs=(1000, 10_000, 100_000),
    speech_pairs=(100, 300, 1000, 3000),
    unpaired=(10_000, 100_000, 300_000, 1_000_000),
    all_pairs=1_000_000,
    many_pairs=0,
    pool_rows=1_000_000,
    tuned_start=TUNED_START,
    rates=(),
    speech_rates=(),
    weights=(),
    both_weights=(),
    tried_alphas=(),
    grids={
        method: methods.METHODS[method].grid
        for method in ("structure", "structure_semi", "nnclr", "sclip", "sotalign")
    },
    teacher_noise=(0.0, 0.1, 0.2, 0.3, 0.4, 0.5),
    pool_noise=(0.0, 0.25, 0.5, 0.75, 1.0),
    alphas=(1e-6, 1e-5, 1e-4, 1e-3, 1e-2),
    epsilons=(0.005, 0.01, 0.05, 0.1, 0.5),
    epsilon_settings={"sotalign.alpha": 1e-3},
    gradient_rows=10_000,
    convergence_rows=32_768,
    solver_epsilons=(0.5, 0.1, 0.05, 0.02, 0.01, 0.005),
    distance_rows=100_000,
    distance_seeds=range(20),
    projections=500,
)
SIZES = {"quick": QUICK, "full": FULL, "paper": PAPER}


# --- default settings of runs --------------------------------------------------------------------

# Options of the methods on the repository's data, chosen on COCO's validation split (V1). STRUCTURE
# has no warm-up, because the published one is longer than these runs.
OPTIONS: Mapping[str, Settings] = {
    "structure": {"structure.weight": 10.0, "structure.warmup": 0},
    "structure_semi": {"structure_semi.weight": 10.0, "structure_semi.warmup": 0},
    "nnclr": {"nnclr.weight_text": 10.0, "nnclr.weight_image": 10.0},
    "sclip": {"sclip.weight_text": 1.0, "sclip.weight_image": 0.0},
    # SigLIP collapses in 8 dimensions: only n of n^2 entries are pairs, so it lowers all cosines
    # below its margin. InfoNCE has no margin.
    "contrastive_mlp": {"contrastive_mlp.loss": "infonce"},
    "sue": {"sue.epochs": 15, "sue.mmd_epochs": 25},
}
# Options that the paper does not select. SUE has its published sizes, see `methods.SUE`.
PAPER_OPTIONS: Mapping[str, Settings] = {
    "contrastive_mlp": OPTIONS["contrastive_mlp"],
    "sue": {
        "sue.hidden": 4096,
        "sue.batch": 5162,
        "sue.learning_rate": 1e-4,
        "sue.epochs": 100,
        "sue.mmd_epochs": 100,
    },
}
PAPER_BATCH = 32_768
"""Rows of a batch in the paper, of which at most 10,000 are pairs."""
RATE_SHARES = {"sail": 0.25, "sail_semi": 0.25}
"""Learning rates of methods without other options, as shares of the usual rate.

They apply to photographs with at most 1,000 pairs. Validation chose the usual rate with 10,000
pairs and on speech (V1).
"""


def usual(scale: str, n_pairs: int) -> dict[str, Any]:
    """Returns the default training settings.

    Args:
        scale: One of `SCALES`.
        n_pairs: Number of pairs.
    """
    if scale == "quick":
        return _training(40, 3e-3, 20, unpaired=512, dim=256) | {
            "sue.epochs": 5,
            "sue.mmd_epochs": 10,
        }
    if scale == "paper":
        if n_pairs > 100_000:  # "SAIL, more pairs" has pairs alone
            return {"train.pair_batch": PAPER_BATCH}
        # Unpaired rows fill the batch.
        return {"train.unpaired_batch": PAPER_BATCH - min(n_pairs, 10_000)}
    if n_pairs <= 1000:
        return _training(100, 2e-3, 10)
    if n_pairs < 10_000:
        return _training(200, 1e-3, 10)
    return _training(600, 3e-4, 25)


def _training(
    steps: int, rate: float, eval_every: int, *, unpaired: int = 1024, dim: int = 512
) -> dict[str, Any]:
    """Returns the settings of a training run on the repository's data."""
    return {
        "train.steps": steps,
        "train.eval_every": eval_every,
        "train.learning_rate": rate,
        "train.pair_batch": 2048,
        "train.unpaired_batch": unpaired,
        "dim": dim,
        "hidden": 512,
    }
