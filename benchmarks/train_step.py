"""The training step: its time against batch size, its parts, and the same step with ott-jax.

    python -m benchmarks.train_step

Random embeddings would make the plans easy, so COCO's photographs are the data; the batch is
`--n` unpaired rows a side and as many pairs as there are. Parts are timed as programs of their
own, forward and backward where the step needs both, so that they do not add up to the step
exactly: XLA fuses across their borders.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array
from tqdm import tqdm

from benchmarks import common, peers
from experiments import photos
from experiments import report as tables
from sotalign_jax import heads, losses, methods, sampling, teachers, training
from sotalign_jax.ot import affinity
from sotalign_jax.ot.kernel import Cosines, Kernel
from sotalign_jax.ot.solver import solve


@dataclasses.dataclass(frozen=True)
class OttSOTAlign(methods.SOTAlign):
    """SOTAlign whose KLOT is written with ott-jax: plans by its solver, gradient by Danskin."""

    momentum: bool = False

    def _divergence(
        self, f: Array, g: Array, z: Array, w: Array, memory: Any
    ) -> tuple[Array, methods.Metrics, Any]:
        limit = self.max_iterations
        target = peers.Target(self.epsilon, self.epsilon_star, self.tolerance, limit, limit)
        options = {"momentum": peers.MOMENTUM} if self.momentum else {}
        loss = peers.ott_danskin(target, **options)
        with jax.named_scope("affinities"):
            full = functools.partial(affinity.cosine, precision=affinity.HIGHEST)
            k, k_star = full(f, g), full(z, w)
        value, (student, teacher) = loss(k, k_star)
        iterations = {"student_iterations": student.iterations}
        return value, {**iterations, "teacher_iterations": teacher.iterations}, memory


_GOAL: dict[str, Any] = {"tolerance": 1e-3, "max_iterations": 3000}
OURS = methods.SOTAlign(**_GOAL)
METHODS: dict[str, methods.Objective] = {
    "ours": OURS,
    "ours, a tenth of the error": methods.SOTAlign(),  # what training does by default
    "ours, streamed": methods.SOTAlign(**_GOAL, block_size=256),
    "ott-jax Danskin": OttSOTAlign(**_GOAL),
    "ott-jax Danskin + momentum": OttSOTAlign(**_GOAL, momentum=True),
    "SigLIP only": methods.SAIL(),
}


class Setting(NamedTuple):
    """What a step of one batch size works on."""

    data: sampling.DeviceData
    teacher: teachers.LinearTeacher
    heads: heads.Heads
    config: training.TrainConfig

    @classmethod
    def of_photos(cls, n: int, n_pairs: int, dim: int) -> "Setting":
        """COCO's pairs, all in every step, and n unpaired rows a side."""
        rows = photos.dataset("coco", n_pairs=n_pairs, test=False)
        return cls(
            training.place(rows),
            teachers.cca(rows.pairs_x, rows.pairs_y),
            heads.build_heads(rows.pairs_x.shape[1], rows.pairs_y.shape[1], dim),
            training.TrainConfig(steps=1000, pair_batch=n_pairs, unpaired_batch=n),
        )

    def step(self, method: methods.Objective) -> tuple[Callable[[], Any], jax.stages.Compiled]:
        """A call that runs the step from one same state, and its compiled program."""
        state = training.init_state(method, self.heads, self.data, self.config)
        step = training.make_step(method, self.heads, self.config)
        # The step donates its state, and a timed call must not: each gets a copy.
        rest = self.data, self.teacher, training.batch_key(self.config)
        compiled = step.lower(state, *rest).compile()
        return lambda: compiled(jax.tree.map(jnp.copy, state), *rest), compiled


def parts(setting: Setting, method: methods.SOTAlign) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """The parts of a step: jitted functions, and the step's own numbers for them."""
    config = setting.config
    graphdef, params = nnx.split(setting.heads)
    key = jax.random.key(0)
    draw = jax.jit(
        functools.partial(sampling.draw, pairs=config.pair_batch, unpaired=config.unpaired_batch)
    )
    batch = draw(key, jnp.int32(0), setting.data)

    def embed(params: Any, batch: sampling.Batch) -> tuple[Array, ...]:
        made = nnx.merge(graphdef, params)
        return made.x(batch.a), made.y(batch.b), made.x(batch.x), made.y(batch.y)

    @jax.jit
    def embed_and_back(params: Any, batch: sampling.Batch, cotangents: Any) -> Any:
        return jax.vjp(lambda p: embed(p, batch), params)[1](cotangents)

    a, b, f, g = features = jax.jit(embed)(params, batch)
    project = jax.jit(lambda teacher, batch: (teacher.x(batch.x), teacher.y(batch.y)))
    z, w = project(setting.teacher, batch)
    siglip = jax.jit(jax.value_and_grad(losses.siglip, argnums=(0, 1)))
    log_a, log_b = (jnp.full(len(x), -jnp.log(len(x))) for x in (f, g))

    def plan(x: Array, y: Array, epsilon: float) -> Any:
        limits: Any = {"tolerance": method.tolerance, "max_iterations": method.max_iterations}
        return solve(Kernel(Cosines.of(x, y)), log_a, log_b, epsilon=epsilon, **limits)

    student = jax.jit(functools.partial(plan, epsilon=method.epsilon))
    teacher = jax.jit(functools.partial(plan, epsilon=method.epsilon_star))
    plans = student(f, g)[1], teacher(z, w)[1]

    @jax.jit
    def products(plans: Any, f: Array, g: Array, z: Array, w: Array) -> Any:
        own = Cosines.of(f, g)
        return [
            Kernel(cosines).transport(state, jnp.exp(log_a), jnp.exp(log_b), own)
            for cosines, state in zip((own, Cosines.of(z, w)), plans, strict=True)
        ]

    optimizer = training.optimizer(config.learning_rate, config.steps)
    opt_state = optimizer.init(params)

    @jax.jit
    def update(gradient: Any, opt_state: Any, params: Any) -> Any:
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return {
        "draw": (draw, (key, jnp.int32(1), setting.data)),
        "heads, both ways": (embed_and_back, (params, batch, features)),
        "teacher features": (project, (setting.teacher, batch)),
        "SigLIP, both ways": (siglip, (a, b)),
        "teacher solve": (teacher, (z, w)),
        "student solve": (student, (f, g)),
        "products (two plans)": (products, (plans, f, g, z, w)),
        "optimiser": (update, (params, opt_state, params)),
    }


def measure(
    setting: Setting, chosen: dict[str, methods.Objective], repeats: int
) -> tuple[list[list[Any]], list[list[Any]]]:
    """Rows for the steps and for the parts of ours."""
    n, calls, memory = setting.config.unpaired_batch, {}, {}
    for name, method in tqdm(chosen.items(), desc=f"n={n}: compile", leave=False):
        calls[name], compiled = setting.step(method)
        memory[name] = common.memory_of(compiled)[0]
    seconds, metrics = common.time_interleaved(calls, repeats=repeats, keep=lambda out: out[1])
    whole = seconds["ours"]
    steps = []
    for name, found in metrics.items():
        counts = [found.get(f"{plan}_iterations") for plan in ("student", "teacher")]
        counts = [count if count is None else int(count) for count in counts]
        steps.append([n, name, *counts, memory[name], seconds[name], seconds[name] / whole])
    pieces = {
        name: functools.partial(function, *arguments)
        for name, (function, arguments) in parts(setting, OURS).items()
    }
    times, _ = common.time_interleaved(pieces, repeats=repeats + 1)  # the first compiles
    times |= {"sum of parts": sum(times.values()), "the step": whole}
    return steps, [[n, name, 1e3 * each, 100 * each / whole] for name, each in times.items()]


def main(argv: Sequence[str] | None = None) -> None:
    """Steps and parts for every batch size."""
    args = common.options(
        __doc__, argv, n=[512, 1024, 2048, 4096], repeats=3, pairs=1000, arms="", dim=512
    )
    if args.quick:
        args.n, args.pairs, args.dim, args.repeats = [64], 100, 32, 2
    chosen = {k: m for k, m in METHODS.items() if k == "ours" or re.search(args.arms, k)}
    steps: list[list[Any]] = []
    shares: list[list[Any]] = []
    for n in args.n:
        found = measure(Setting.of_photos(n, args.pairs, args.dim), chosen, args.repeats)
        steps, shares = steps + found[0], shares + found[1]
    headers = ["n", "method", "student its", "teacher its", "temp MiB", "seconds", "times ours"]
    title = f"One training step, photographs, {args.pairs} pairs, width {args.dim}"
    common.report(title, tables.Table(headers, steps, digits=3), args.out / "train_step")
    headers = ["n", "part", "ms", "% of the step"]
    common.report("Parts of our step", tables.Table(headers, shares), args.out / "train_step_parts")


if __name__ == "__main__":
    common.run(main)
