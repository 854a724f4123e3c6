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
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array
from tqdm import tqdm

from benchmarks import common, peers
from experiments import photos
from experiments import report as tables
from sotalign_jax import data, heads, losses, methods, sampling, teachers, training
from sotalign_jax.ot import affinity
from sotalign_jax.ot.kernel import Cosines, Kernel
from sotalign_jax.ot.solver import solve


@dataclasses.dataclass(frozen=True)
class OttSOTAlign(methods.SOTAlign):
    """SOTAlign whose KLOT is written with ott-jax: plans by its solver, gradient by Danskin."""

    momentum: bool = False

    def start(self, data: sampling.DeviceData, unpaired_batch: int) -> dict[str, Array]:
        """No warm start: ott-jax begins anew in every step."""
        return {}

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


class Setting:
    """Data, teacher and heads for one batch size."""

    def __init__(self, rows: data.Dataset, teacher: teachers.LinearTeacher, n: int, dim: int):
        self.data = training.place(rows)
        self.teacher = teacher
        self.heads = heads.build_heads(
            rows.pairs_x.shape[1], rows.pairs_y.shape[1], dim, teacher=None
        )
        self.config = training.TrainConfig(
            steps=1000, pair_batch=len(rows.pairs_x), unpaired_batch=n
        )

    def step(self, method: methods.Objective) -> tuple[Callable[[], Any], jax.stages.Compiled]:
        """A call that runs the step from one same state, and its compiled program."""
        state = training.init_state(method, self.heads, self.data, self.config)
        step = training.make_step(method, self.heads, self.config)
        # The step donates its state, and a timed call must not: each gets a copy.
        rest = self.data, self.teacher, training.batch_key(self.config)
        compiled = step.lower(state, *rest).compile()
        return lambda: compiled(jax.tree.map(jnp.copy, state), *rest), compiled


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the step: a jitted function, the step's own numbers for it, how often it runs."""

    function: Any
    arguments: tuple[Any, ...]
    times: int = 1

    def __call__(self) -> Any:
        """Runs it."""
        return [self.function(*self.arguments) for _ in range(self.times)]


def parts(setting: Setting, method: methods.SOTAlign) -> dict[str, Part]:
    """The parts of a step, each on the step's own numbers."""
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
    state = student(f, g)[1]

    @jax.jit
    def products(state: Any, f: Array, g: Array) -> Any:
        cosines = Cosines.of(f, g)
        return Kernel(cosines).transport(state, jnp.exp(log_a), jnp.exp(log_b), cosines)

    optimizer = training.optimizer(config.learning_rate, config.steps)
    opt_state = optimizer.init(params)

    @jax.jit
    def update(gradient: Any, opt_state: Any, params: Any) -> Any:
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return {
        "draw": Part(draw, (key, jnp.int32(1), setting.data)),
        "heads, both ways": Part(embed_and_back, (params, batch, features)),
        "teacher features": Part(project, (setting.teacher, batch)),
        "SigLIP, both ways": Part(siglip, (a, b)),
        "teacher solve": Part(teacher, (z, w)),
        "student solve": Part(student, (f, g)),
        "products (two plans)": Part(products, (state, f, g), times=2),
        "optimiser": Part(update, (params, opt_state, params)),
    }


def measure(
    setting: Setting, chosen: dict[str, methods.Objective], n: int, repeats: int
) -> tuple[list[list[Any]], list[list[Any]]]:
    """Rows for the steps and for the parts of ours."""
    compiled, calls = {}, {}
    for name, method in tqdm(chosen.items(), desc=f"n={n}: compile", leave=False):
        calls[name], compiled[name] = setting.step(method)
    seconds, metrics = common.time_interleaved(
        calls, repeats=repeats, title=f"n={n}: steps", keep=lambda out: out[1]
    )
    keys = ("student_iterations", "teacher_iterations")
    notes = {
        name: [int(found[key]) if key in found else None for key in keys]
        for name, found in metrics.items()
    }
    whole = seconds["ours"]
    memory = {name: common.memory_of(program)[0] for name, program in compiled.items()}
    steps = [
        [n, name, *notes[name], memory[name], seconds[name], seconds[name] / whole]
        for name in chosen
    ]
    pieces = parts(setting, OURS)
    for call in pieces.values():
        jax.block_until_ready(call())
    times, _ = common.time_interleaved(pieces, repeats=max(repeats, 3), title=f"n={n}: parts")
    shares = [[n, name, 1e3 * t, 100 * t / whole] for name, t in times.items()]
    shares.append([n, "sum of parts", 1e3 * sum(times.values()), 100 * sum(times.values()) / whole])
    shares.append([n, "the step", 1e3 * whole, 100.0])
    return steps, shares


def main(argv: Sequence[str] | None = None) -> None:
    """Steps and parts for every batch size."""
    args = common.options(
        __doc__, argv, n=[512, 1024, 2048, 4096], repeats=3, n_pairs=1000, methods="", dim=512
    )
    if args.quick:
        args.n, args.n_pairs, args.dim, args.repeats = [64], 100, 32, 2
    chosen = {k: m for k, m in METHODS.items() if k == "ours" or re.search(args.methods, k)}
    rows = photos.dataset("coco", n_pairs=args.n_pairs, test=False)
    teacher = teachers.cca(rows.pairs_x, rows.pairs_y)
    steps: list[list[Any]] = []
    shares: list[list[Any]] = []
    for n in args.n:
        found = measure(Setting(rows, teacher, n, args.dim), chosen, n, args.repeats)
        steps, shares = steps + found[0], shares + found[1]
    headers = ["n", "method", "student its", "teacher its", "temp MiB", "seconds", "times ours"]
    title = f"One training step, photographs, {args.n_pairs} pairs, width {args.dim}"
    common.report(title, tables.table(headers, steps, digits=3), args.out / "train_step")
    headers = ["n", "part", "ms", "% of the step"]
    common.report("Parts of our step", tables.table(headers, shares), args.out / "train_step_parts")


if __name__ == "__main__":
    common.run(main)
