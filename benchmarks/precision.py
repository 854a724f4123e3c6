"""What narrower matrix products cost: error of the plans and of the gradient, and final recall.

    python -m benchmarks.precision

Operands are rounded as an accelerator rounds them, and multiplied in float32: TF32 keeps 11 bits,
bfloat16 8; three passes split each operand in two bfloat16 numbers, six in three, and leave out
the smallest products. One role at a time: the student's affinity, the teacher's, the products of
KLOT's gradient, heads, SigLIP. The gradient is that of all parameters, relative to float32 with
plans solved to 1e-6; beside it is what the default tolerance of 1e-4 leaves. Then every role is
narrowed, and COCO's photographs are trained on.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array

from benchmarks import common
from experiments import photos
from experiments import report as tables
from sotalign_jax import evaluation, heads, losses, methods, sampling, teachers, training
from sotalign_jax.ot import affinity
from sotalign_jax.ot.klot import klot
from sotalign_jax.ot.sinkhorn import sinkhorn

KINDS = {"1 pass": (7, 1), "TF32": (10, 1), "3 passes": (7, 2), "6 passes": (7, 3)}
"""Bits that are stored of a mantissa, and numbers that an operand is split into."""
ROLES = ("student", "teacher", "gradient", "heads", "siglip")


def rounded(a: Array, b: Array, kind: str) -> Array:
    """a @ b as an accelerator computes it.

    >>> third = jnp.full((1, 1), 1 / 3)
    >>> [f"{abs(9 * rounded(third, third, kind)[0, 0] - 1):.0e}" for kind in KINDS]
    ['4e-03', '5e-04', '1e-05', '0e+00']
    """
    if kind not in KINDS:
        return affinity.dot(a, b)
    bits, count = KINDS[kind]

    def split(x: Array) -> list[Array]:
        parts = []
        for _ in range(count):
            parts.append(jax.lax.reduce_precision(x, 8, bits))
            x = x - parts[-1]
        return parts

    left, right = split(a), split(b)
    pairs = [(i, j) for i in range(count) for j in range(count) if i + j < count]
    return sum((affinity.dot(left[i], right[j]) for i, j in reversed(pairs)), jnp.zeros(()))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def product(a: Array, b: Array, forward: str, backward: str) -> Array:
    """a @ b, with other precisions of the product and of those of its gradient."""
    return rounded(a, b, forward)


def _backward(forward: str, backward: str, operands: Any, gradient: Array) -> tuple[Array, Array]:
    a, b = operands
    return rounded(gradient, b.T, backward), rounded(a.T, gradient, backward)


product.defvjp(lambda a, b, forward, _: (rounded(a, b, forward), (a, b)), _backward)


@dataclasses.dataclass(frozen=True)
class Rounded(methods.SOTAlign):
    """SOTAlign with a kind of product for each role; "" is float32."""

    student: str = ""
    teacher: str = ""
    gradient: str = ""
    heads: str = ""
    siglip: str = ""

    def start(self, data: sampling.DeviceData, unpaired_batch: int) -> dict[str, Array]:
        """No warm start."""
        return {}

    def __call__(
        self, model: heads.Heads, batch: sampling.Batch, teacher: Any, memory: Any
    ) -> tuple[Array, tuple[methods.Metrics, Any]]:
        def embed(head: Any, rows: Array) -> Array:
            affine = head.to_affine()
            x = heads.normalize(rows, affine.norm)
            out = product(x, affine.weight.T, self.heads, self.heads) + affine.bias
            return affinity.l2_normalize(out)

        pairs = embed(model.x, batch.a), embed(model.y, batch.b).T
        siglip = losses.siglip_from_affinity(
            product(*pairs, self.siglip, self.siglip),
            scale=jnp.exp(model.log_scale[...]),
            bias=model.bias[...],
        )
        f, g = embed(model.x, batch.x), embed(model.y, batch.y)
        divergence = klot(
            product(f, g.T, self.student, self.gradient),
            rounded(teacher.x(batch.x), teacher.y(batch.y).T, self.teacher),
            tolerance=self.tolerance,
            max_iterations=self.max_iterations,
        )
        return siglip + self.alpha * divergence, ({}, memory)


def errors(rows: Any, teacher: teachers.LinearTeacher, n: int, dim: int) -> list[list[Any]]:
    """Relative error of the parameters' gradient, and L1 error of the plan, by role and kind."""
    batch = sampling.draw(
        jax.random.key(0), jnp.int32(0), training.place(rows), pairs=n, unpaired=n
    )
    model = heads.build_heads(rows.pairs_x.shape[1], rows.pairs_y.shape[1], dim, teacher=teacher)
    graphdef, params = nnx.split(model)

    # KLOT is weighted as much as SigLIP, so that an error in either is seen.
    def gradient(**options: Any) -> Any:
        method = Rounded(alpha=1.0, max_iterations=3000, **options)
        loss = jax.jit(jax.grad(lambda p: method(nnx.merge(graphdef, p), batch, teacher, {})[0]))
        return loss(params)

    unit = [affinity.l2_normalize(x) for x in (model.x(batch.x), model.y(batch.y))]
    affinities = {
        "student": (unit, 0.05),
        "teacher": ([teacher.x(batch.x), teacher.y(batch.y)], 0.005),
    }

    def plan(role: str, kind: str) -> np.ndarray:
        (x, y), epsilon = affinities[role]
        found = sinkhorn(rounded(x, y.T, kind), epsilon=epsilon, tolerance=1e-6)
        return np.asarray(found.matrix(), np.float64)

    exact = gradient(tolerance=1e-6)

    def off(**options: Any) -> float:
        difference = optax.tree.sub(gradient(**options), exact)
        return float(optax.tree.norm(difference) / optax.tree.norm(exact))

    made: list[list[Any]] = [["tolerance 1e-4", "float32", None, f"{off(tolerance=1e-4):.1e}"]]
    for role in ROLES:
        for kind in KINDS:
            moved = None
            if role in affinities:
                moved = f"{np.abs(plan(role, kind) - plan(role, '')).sum():.1e}"
            made.append([role, kind, moved, f"{off(tolerance=1e-6, **{role: kind}):.1e}"])
    return made


def recalls(
    rows: Any, teacher: teachers.LinearTeacher, n: int, dim: int, steps: int
) -> list[list[Any]]:
    """Validation recall after training with every role at one kind."""
    made = []
    config = training.TrainConfig(steps=steps, unpaired_batch=n, eval_every=steps)
    start = heads.build_heads(rows.pairs_x.shape[1], rows.pairs_y.shape[1], dim, teacher=teacher)
    for kind in ("", *KINDS):
        method = Rounded(alpha=1e-2, **dict.fromkeys(ROLES, kind))
        trained, _ = training.fit(method, start, rows, config, teacher=teacher)
        scores = evaluation.evaluate(trained.x, trained.y, rows.val)
        made.append([kind or "float32", *(scores[f"mean/R@{k}"] for k in (1, 5, 10))])
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Both tables."""
    parser = common.parser(__doc__, n=[2048], epsilon=[0.05, 0.005])
    parser.add_argument("--dim", type=int, default=256, help="width of the shared space")
    parser.add_argument("--steps", type=int, default=100, help="of each training run")
    args = parser.parse_args(argv)
    if args.quick:
        args.n, args.dim, args.steps = [64], 32, 2
    rows = photos.dataset("coco", n_pairs=100 if args.quick else 1000, test=False)
    teacher = teachers.cca(rows.pairs_x, rows.pairs_y)
    for n in args.n:
        table = tables.table(
            ["role", "products", "plan, L1", "gradient"], errors(rows, teacher, n, args.dim)
        )
        common.report(f"Errors, {n:,} unpaired photographs", table, args.out / "precision")
        headers = ["products", "R@1", "R@5", "R@10"]
        table = tables.table(headers, recalls(rows, teacher, n, args.dim, args.steps), digits=2)
        title = f"Validation recall after {args.steps} steps"
        common.report(title, table, args.out / "precision-recall")


if __name__ == "__main__":
    main()
