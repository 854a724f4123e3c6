"""Times the training step for several batch sizes, and the same step with ott-jax.

    python -m benchmarks.train_step

The data are COCO's photographs, because plans of random embeddings are too easy. A batch has `--n`
unpaired rows per side and all pairs. `python -m sotalign_jax.selfcheck` times the parts of a step.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
from tqdm import tqdm

from benchmarks import common, peers, photographs
from sotalign_jax import data, heads, methods, teachers, training
from sotalign_jax.ot import affinity


@dataclasses.dataclass(frozen=True)
class OttSOTAlign(methods.SOTAlign):
    """SOTAlign with KLOT computed by ott-jax. The gradient follows from Danskin's theorem."""

    momentum: bool = False

    def _divergence(
        self, f: Array, g: Array, z: Array, w: Array, memory: Any
    ) -> tuple[Array, methods.Metrics, Any]:
        limit = self.max_iterations
        target = peers.Target(self.epsilon, self.epsilon_star, self.tolerance, limit, limit)
        options = {"momentum": peers.MOMENTUM} if self.momentum else {}
        loss = peers.ott_danskin(target, **options)
        full = functools.partial(affinity.cosine, precision=affinity.HIGHEST)
        k, k_star = full(f, g), full(z, w)
        value, (student, teacher) = loss(k, k_star)
        iterations = {"student_iterations": student.iterations}
        return value, {**iterations, "teacher_iterations": teacher.iterations}, memory


# All solvers reach the same marginal error. "as in training" shows the library's own default.
_GOAL: dict[str, Any] = {"tolerance": 1e-3, "max_iterations": 3000}
OURS = methods.SOTAlign(**_GOAL)
METHODS: dict[str, methods.Objective] = {
    "ours": OURS,
    "ours, as in training": methods.SOTAlign(),
    "ours, streamed": methods.SOTAlign(**_GOAL, block_size=256),
    "ott-jax Danskin": OttSOTAlign(**_GOAL),
    "ott-jax Danskin + momentum": OttSOTAlign(**_GOAL, momentum=True),
    "SigLIP only": methods.SAIL(),
}


def step_of(
    method: methods.Objective, rows: data.Dataset, dim: int, config: training.TrainConfig
) -> tuple[Callable[[], Any], jax.stages.Compiled]:
    """Prepares one training step.

    Args:
        method: The objective.
        rows: Pairs and pools.
        dim: Width of the heads.
        config: Batch sizes and optimizer.

    Returns:
        A function that runs the step from the same state each time, and the compiled program.
    """
    model = heads.build_heads(rows.pairs_x.shape[1], rows.pairs_y.shape[1], dim)
    placed, teacher = training.place(rows), teachers.cca(rows.pairs_x, rows.pairs_y)
    state = training.init_state(method, model, placed, config)
    rest = placed, teacher, training.batch_key(config)
    compiled = training.make_step(method, model, config).lower(state, *rest).compile()
    # The step donates its state, so that a second call could not use it: each call gets a copy.
    return lambda: compiled(jax.tree.map(jnp.copy, state), *rest), compiled


def measure(n: int, chosen: dict[str, methods.Objective], args: Any) -> list[list[Any]]:
    """Times the chosen methods.

    Args:
        n: Unpaired rows per side.
        chosen: Methods by name.
        args: Flags of the command.

    Returns:
        Rows of the table.
    """
    rows = photographs.coco(args.pairs)
    config = training.TrainConfig(steps=1000, pair_batch=args.pairs, unpaired_batch=n)
    calls, memory = {}, {}
    for name, method in tqdm(chosen.items(), desc=f"n={n}: compile", leave=False):
        calls[name], compiled = step_of(method, rows, args.dim, config)
        memory[name] = common.memory_of(compiled)[0]
    seconds, metrics = common.time_interleaved(calls, repeats=args.repeats, keep=lambda out: out[1])
    made = []
    for name, found in metrics.items():
        counts = [found.get(f"{plan}_iterations") for plan in ("student", "teacher")]
        counts = [count if count is None else int(count) for count in counts]
        times = seconds[name], seconds[name] / seconds["ours"]
        made.append([n, name, *counts, memory[name], *times])
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Times the steps of all batch sizes and prints a table."""
    sizes = {"n": [512, 1024, 2048, 4096], "pairs": 1000, "dim": 512}
    args = common.options(__doc__, argv, **sizes, repeats=3, arms="")
    if args.quick:
        args.n, args.pairs, args.dim, args.repeats = [64], 100, 32, 2
    # "ours" is always measured: the last column is relative to it.
    chosen = {k: m for k, m in METHODS.items() if k == "ours" or re.search(args.arms, k)}
    steps = [row for n in args.n for row in measure(n, chosen, args)]
    headers = ["n", "method", "student its", "teacher its", "temp MiB", "seconds", "times ours"]
    title = f"One training step, photographs, {args.pairs} pairs, width {args.dim}"
    common.publish(title, common.Table(headers, steps, digits=3), args.out / "train_step")


if __name__ == "__main__":
    common.run(main)
