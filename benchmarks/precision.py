"""Measures the effect of narrower matrix products on plans, gradients and final recall.

    python -m benchmarks.precision

Operands are rounded as on an accelerator and multiplied in float32. TF32 keeps 11 bits and bfloat16
keeps 8. Three passes split an operand into two bfloat16 numbers, six passes into three. Both leave
out the smallest products.

The first table narrows one role at a time: the student's affinity, the teacher's affinity, the
products of KLOT's gradient, the heads, and SigLIP. Errors are those of the gradient of all
parameters, relative to float32 with plans solved to 1e-6. Its first row is the error of the default
tolerance of 1e-4. The second table narrows all roles and trains on COCO's photographs.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array
from tqdm import tqdm

from benchmarks import common, photographs
from sotalign_jax import evaluation, heads, losses, methods, sampling, teachers, training
from sotalign_jax.ot import affinity
from sotalign_jax.ot.klot import klot
from sotalign_jax.ot.sinkhorn import sinkhorn

KINDS = {"1 pass": (7, 1), "TF32": (10, 1), "3 passes": (7, 2), "6 passes": (7, 3)}
"""Stored bits of the mantissa, and number of parts that an operand is split into."""
ROLES = ("student", "teacher", "gradient", "head", "siglip")


def rounded(a: Array, b: Array, kind: str) -> Array:
    """Computes a @ b with rounded operands.

    Args:
        a: Left operand.
        b: Right operand.
        kind: One of `KINDS`, or "" for float32.

    Returns:
        The product in float32.

    >>> third = jnp.full((1, 1), 1 / 3)
    >>> [f"{abs(9 * rounded(third, third, kind)[0, 0] - 1):.0e}" for kind in KINDS]
    ['4e-03', '5e-04', '1e-05', '0e+00']
    """
    if not kind:
        return affinity.dot(a, b)
    bits, count = KINDS[kind]

    def split(x: Array) -> list[Array]:
        parts = []
        for _ in range(count):
            parts.append(jax.lax.reduce_precision(x, 8, bits))
            x = x - parts[-1]  # the next part holds the rounding error
        return parts

    left, right = split(a), split(b)
    # As on an accelerator, products of two small parts are left out. The smallest are added first.
    pairs = [(i, j) for i in range(count) for j in range(count) if i + j < count]
    return sum((affinity.dot(left[i], right[j]) for i, j in reversed(pairs)), jnp.zeros(()))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def product(a: Array, b: Array, forward: str, backward: str) -> Array:
    """Computes a @ b with separate precisions for the product and its gradient.

    Args:
        a: Left operand.
        b: Right operand.
        forward: Kind of the product.
        backward: Kind of the two products of its gradient.
    """
    return rounded(a, b, forward)


def _backward(forward: str, backward: str, operands: Any, gradient: Array) -> tuple[Array, Array]:
    a, b = operands
    return rounded(gradient, b.T, backward), rounded(a.T, gradient, backward)


product.defvjp(lambda a, b, forward, _: (rounded(a, b, forward), (a, b)), _backward)


@dataclasses.dataclass(frozen=True)
class Rounded(methods.SOTAlign):
    """SOTAlign with its own kind of product for each role. "" is float32."""

    kinds: tuple[str, ...] = ("",) * len(ROLES)

    def __call__(
        self, heads: Any, batch: sampling.Batch, teacher: Any, memory: Any
    ) -> tuple[Array, tuple[methods.Metrics, Any]]:
        student, target, gradient, head, siglip = self.kinds

        def embed(one: Any, rows: Array) -> Array:
            affine = one.to_affine()  # a map of unit rows
            rows = affinity.l2_normalize(affinity.as_float(rows))
            return affinity.l2_normalize(product(rows, affine.weight.T, head, head) + affine.bias)

        supervised = losses.siglip_from_affinity(
            product(embed(heads.x, batch.a), embed(heads.y, batch.b).T, siglip, siglip),
            scale=jnp.exp(heads.log_scale[...]),
            bias=heads.bias[...],
        )
        stars = [affinity.l2_normalize(x) for x in (teacher.x(batch.x), teacher.y(batch.y))]
        divergence = klot(
            product(embed(heads.x, batch.x), embed(heads.y, batch.y).T, student, gradient),
            rounded(stars[0], stars[1].T, target),
            tolerance=self.tolerance,
            max_iterations=self.max_iterations,
        )
        return supervised + self.alpha * divergence, ({}, memory)


def errors(rows: Any, start: heads.Heads, teacher: teachers.Teacher, n: int) -> list[list[Any]]:
    """Measures the errors of plans and gradients by role and kind of product.

    Args:
        rows: Pairs and pools.
        start: Heads at which the gradient is computed.
        teacher: The teacher.
        n: Pairs, and unpaired rows per side.

    Returns:
        Rows of the table: role, kind, L1 error of the plan, relative error of the gradient.
    """
    data = training.place(rows)
    batch = sampling.draw(jax.random.key(0), jnp.int32(0), data, pairs=n, unpaired=n)
    graphdef, params = nnx.split(start)
    sides: dict[str, Any] = {"student": (start, 0.05), "teacher": (teacher, 0.005)}

    def gradient(tolerance: float, role: str = "", kind: str = "") -> Any:
        # KLOT has the same weight as SigLIP, so that errors in either are visible.
        kinds = tuple(kind if role == one else "" for one in ROLES)
        method = Rounded(alpha=1.0, tolerance=tolerance, max_iterations=3000, kinds=kinds)

        def loss(params: Any, batch: sampling.Batch, teacher: Any) -> Array:
            return method(nnx.merge(graphdef, params), batch, teacher, {})[0]

        return jax.jit(jax.grad(loss))(params, batch, teacher)

    def plan(role: str, kind: str) -> np.ndarray:
        maps, epsilon = sides[role]
        x, y = affinity.l2_normalize(maps.x(batch.x)), affinity.l2_normalize(maps.y(batch.y))
        found = sinkhorn(rounded(x, y.T, kind), epsilon=epsilon, tolerance=1e-6)
        return np.asarray(found.matrix(), np.float64)

    exact = gradient(1e-6)

    def off(found: Any) -> str:
        return f"{common.relative(found, exact):.1e}"

    made: list[list[Any]] = [["tolerance 1e-4", "float32", None, off(gradient(1e-4))]]
    for role, kind in tqdm(list(itertools.product(ROLES, KINDS)), leave=False):
        moved = None
        if role in sides:
            moved = f"{np.abs(plan(role, kind) - plan(role, '')).sum():.1e}"
        made.append([role, kind, moved, off(gradient(1e-6, role, kind))])
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the errors of single roles, and the recall with all roles narrowed."""
    args = common.options(__doc__, argv, n=2048, dim=256, steps=100)
    if args.quick:
        args.n, args.dim, args.steps = 64, 32, 2
    rows = photographs.coco(100 if args.quick else 1000)
    teacher = teachers.cca(rows.pairs_x, rows.pairs_y)
    widths = rows.pairs_x.shape[1], rows.pairs_y.shape[1]
    start = heads.build_heads(*widths, args.dim, teacher=teacher)
    headers = ["role", "products", "plan, L1", "gradient"]
    table = common.Table(headers, errors(rows, start, teacher, args.n))
    common.publish(f"Errors, {args.n:,} unpaired photographs", table, args.out / "precision")
    config = training.TrainConfig(
        steps=args.steps, unpaired_batch=args.n, eval_every=args.steps, learning_rate=1e-3
    )
    found = []
    for kind in ("", *KINDS):  # "" is float32, the reference
        method = Rounded(alpha=1e-2, kinds=(kind,) * len(ROLES))
        trained, _ = training.fit(method, start, rows, config, teacher=teacher)
        assert rows.val is not None
        scores = evaluation.evaluate(trained.x, trained.y, rows.val)
        found.append([kind or "float32", *(scores[f"mean/R@{k}"] for k in (1, 5, 10))])
    title = f"Validation recall after {args.steps} steps, every role at one precision"
    table = common.Table(["products", "R@1", "R@5", "R@10"], found, digits=2)
    common.publish(title, table, args.out / "precision-recall")


if __name__ == "__main__":
    common.run(main)
