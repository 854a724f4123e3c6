"""Checks the library on the local devices, against float64 on the host.

    python -m sotalign_jax.selfcheck            # prints a table; exit code 1 if a row fails
    python -m sotalign_jax.selfcheck --json     # prints JSON
    python -m sotalign_jax.selfcheck --only product sweeps
    python -m sotalign_jax.selfcheck --quick    # tiny sizes, to test the command itself

A check is a function that yields rows. A row has an error with its limit, a time, or both. If a
check raises, its row shows the first line of the message, and the next check runs. Times have no
limit. `benchmarks/model.py` predicts the times of several devices.
"""

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from sotalign_jax import checks
from sotalign_jax.ot import affinity, blocks, device, klot, sharding, solver
from sotalign_jax.ot.affinity import Cosines
from sotalign_jax.ot.kernel import Kernel, Operator, widen

# Names of the algorithms of matrix products.
ALGORITHMS: Any = {
    device.HIGHEST: "float32",
    device.TF32: "TF32",
    device.THREE_PASSES: "3 x bf16",
}
# Relative rounding error of an operand: 23, 10 and 15 stored bits of mantissa.
ROUNDOFF = {device.HIGHEST: 2.0**-24, device.TF32: 2.0**-11, device.THREE_PASSES: 2.0**-16}
# Unpaired rows of the paper's batch.
PAPER_ROWS = 22_768
# Width of the features of kernels and plans, regularisation of the teacher, and default tolerance
# of `klot`.
WIDTH, EPSILON, TOLERANCE = 64, 0.005, 1e-4
# Regularisation of the first kernel that the solver builds for `EPSILON`.
FIRST_EPSILON = 16 * EPSILON
# Products and kernels are compared in every 61st row, so that some row of every tile is compared.
STRIDE = 61
# Limits of the relative errors of KLOT and of its gradient. At n = 2,048 the default tolerance
# leaves errors of 4e-6 and 3e-4, and TF32 in the student's role 6e-6 and 5e-4. The limit rejects a
# gradient with the teacher in TF32 (1.2e-3) or the student in bfloat16 (1.9e-3).
VALUE_LIMIT, GRADIENT_LIMIT = 1e-4, 1e-3


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        check: Name of the check, with the size of its problem.
        path: Precision or algorithm that was checked.
        error: Error against float64.
        limit: Largest error that passes.
        ms: Time in milliseconds.

    Example:
        >>> Row("sweep", "float32", error=math.nan, limit=1e-5).ok
        False
    """

    check: str
    path: str
    error: float | None = None
    limit: float | None = None
    ms: float | None = None

    @property
    def ok(self) -> bool:
        """True unless the error exceeds its limit or is NaN."""
        return self.error is None or self.error <= (self.limit or 0.0)


class Sizes(NamedTuple):
    """Sizes of the problems.

    Attributes:
        stream: Float32 numbers in the array that measures bandwidth.
        product: Rows of both operands, and their width.
        kernels: Rows and columns of the kernels that are swept over.
        losses: Rows and columns of KLOT, the largest first.
        rows: Unpaired rows of the teacher's plan and of the training batch.
        widths: Widths of the student's and the teacher's features.
    """

    stream: int
    product: tuple[int, int]
    kernels: tuple[tuple[int, int], ...]
    losses: tuple[tuple[int, int], ...]
    rows: int
    widths: tuple[int, int]


# Blocks of 512 rows divide 2,048 rows, but none of the other sizes, whose last block overlaps the
# one before. The third kernel is much wider than high.
KERNELS, LOSSES = ((2048, 2048), (4099, 4099), (700, 24_576)), ((2048, 2048), (2039, 701))
CPU = Sizes(2**24, (1024, 512), KERNELS, LOSSES, 2048, (128, 256))
ACCELERATOR = Sizes(2**28, (8192, 1024), KERNELS, LOSSES, 4096, (1024, 2048))
QUICK = Sizes(2**16, (192, 64), ((128, 128), (35, 131)), ((128, 128), (127, 35)), 128, (16, 24))


def sizes_of(profile: device.Profile) -> Sizes:
    """Returns the sizes for a device. They include the paper's batch if two of its kernels fit.

    Args:
        profile: Profile of the device.

    Returns:
        The sizes.

    Example:
        >>> sizes_of(device.Profile("cpu")).rows
        2048
    """
    if profile.name == "cpu":
        return CPU
    if not blocks.storage(PAPER_ROWS, PAPER_ROWS, jnp.float32, profile).both:
        return ACCELERATOR
    return ACCELERATOR._replace(kernels=(*KERNELS, (PAPER_ROWS, PAPER_ROWS)), rows=PAPER_ROWS)


# --- problems and their solution in float64 ----------------------------------------------------


def clouds(n: int, m: int, width: int, seed: int = 0) -> list[np.ndarray]:
    """Draws two independent anisotropic Gaussian clouds around a common mean.

    Rows have no partners, so the plan is neither uniform nor close to a permutation.

    Args:
        n: Rows of the first cloud.
        m: Rows of the second cloud.
        width: Width of both.
        seed: Seed of the draws.

    Returns:
        Both clouds, in float32.
    """
    # Variances fall as 1/k: a few directions have most of the variance, as in real embeddings.
    rng, scales = np.random.default_rng(seed), np.arange(1, width + 1, dtype=np.float32) ** -0.5
    mean = 0.5 * scales * rng.standard_normal(width, np.float32)
    return [mean + scales * rng.standard_normal((rows, width), np.float32) for rows in (n, m)]


def features(n: int, m: int, sizes: Sizes) -> list[np.ndarray]:
    """Draws the features f, g of the student and z, w of the teacher.

    Args:
        n: Number of rows.
        m: Number of columns.
        sizes: Sizes. Only `widths` is used.

    Returns:
        The four arrays.
    """
    return clouds(n, m, sizes.widths[0], seed=1) + clouds(n, m, sizes.widths[1], seed=2)


def unit(x: np.ndarray) -> np.ndarray:
    """Scales rows to unit length in float64.

    Args:
        x: Rows.

    Returns:
        The unit rows.
    """
    x = np.asarray(x, np.float64)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def relative(x: Any, exact: Any) -> float:
    """Computes the largest relative error of an entry.

    Args:
        x: Computed array.
        exact: Exact array.

    Returns:
        The error.

    Example:
        >>> relative([1.0, 2.2], [1.0, 2.0])
        0.1
    """
    return float(np.max(np.abs(np.asarray(x, np.float64) / np.asarray(exact) - 1)))


def norm_error(x: Sequence[Any], exact: Sequence[Any]) -> float:
    """Computes the norm of the error of several arrays, relative to that of the exact ones.

    Args:
        x: Computed arrays.
        exact: Exact arrays.

    Returns:
        The error.

    Example:
        >>> norm_error([[3.3], [4.4]], [[3.0], [4.0]])
        0.1
    """
    found, wanted = (np.concatenate([*map(np.ravel, y)], dtype=float) for y in (x, exact))
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def product_error(algorithm: Any, width: int) -> float:
    """Estimates the error of products of unit rows, from their operands and from float32 sums.

    Args:
        algorithm: A key of `ALGORITHMS`.
        width: Width of the rows.

    Returns:
        The typical error of one product.
    """
    # The rounding errors of `width` terms of size 1 / width are independent, and add up as a random
    # walk.
    return ROUNDOFF[algorithm] / math.sqrt(width) + 2.0**-24


def sum_error(count: int) -> float:
    """Bounds the relative error of float32 sums of positive numbers, which grows as a random walk.

    A CPU that adds 4,099 numbers one after the other has 0.4 times this error.

    Args:
        count: Number of summands.

    Returns:
        The bound.
    """
    return 4 * 2.0**-24 * math.sqrt(count)


def exact_sums(matrix: Any, a: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes the sums of `Kernel.sweep` in float64.

    Args:
        matrix: The kernel A, shape [n, m].
        a: Weights of the rows.
        c: Weights of the columns times their scalings.

    Returns:
        The row sums and the column sums.
    """
    # In blocks, because A in float64 would take twice the memory.
    matrix, s, t = np.asarray(matrix), np.zeros(len(a)), np.zeros(len(c))
    for start in range(0, len(a), 1024):
        rows = slice(start, start + 1024)
        part = matrix[rows].astype(np.float64)
        s[rows] = part @ c
        t += (a[rows] / s[rows]) @ part
    return s, t


def exact_error(x: np.ndarray, y: np.ndarray, u: Any, v: Any) -> float:
    """Computes the larger marginal error of a plan in float64.

    Args:
        x: Features of the rows.
        y: Features of the columns.
        u: Row log-scalings.
        v: Column log-scalings.

    Returns:
        The larger of both L1 errors.
    """
    x, y, u, v = unit(x), unit(y), np.asarray(u, np.float64), np.asarray(v, np.float64)
    in_rows, columns = 0.0, np.zeros(len(y))
    for start in range(0, len(x), 1024):
        rows = slice(start, start + 1024)
        part = np.exp(x[rows] @ y.T / EPSILON + u[rows, None] + v)
        in_rows += np.sum(np.abs(np.sum(part, axis=1) - 1 / len(x)))
        columns += np.sum(part, axis=0)
    return float(np.maximum(in_rows, np.sum(np.abs(columns - 1 / len(y)))))


@functools.cache
def exact_loss(n: int, m: int, sizes: Sizes) -> tuple[Any, list[Any]]:
    """Computes KLOT and its gradient in float64 on the CPU, to a hundredth of the tolerance.

    Smaller problems are the largest one with weights of zero, so one program serves all sizes.

    Args:
        n: Number of rows.
        m: Number of columns.
        sizes: Sizes, whose first loss is the largest problem.

    Returns:
        The value, and the gradients in f and g.
    """
    cpu, largest = jax.devices("cpu")[0], sizes.losses[0]
    # Storage and algorithms are chosen while a function is traced, so it needs the CPU's profile.
    with jax.enable_x64(True), jax.default_device(cpu), device.compiling_for(device.profile(cpu)):
        arrays = [jnp.asarray(x, jnp.float64) for x in features(*largest, sizes)]
        log_a = np.where(np.arange(largest[0]) < n, 0.0, -np.inf)
        log_b = np.where(np.arange(largest[1]) < m, 0.0, -np.inf)
        options = {"log_a": log_a, "log_b": log_b, "tolerance": TOLERANCE / 100}
        (value, _), (df, dg) = loss_and_gradient(*arrays, **options)
        return value, [np.asarray(df)[:n], np.asarray(dg)[:m]]


# --- parts of the library, compiled ------------------------------------------------------------


loss = functools.partial(klot.klot_from_embeddings, return_aux=True)
loss_and_gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def log_uniform(n: int) -> Array:
    """Returns uniform log-weights.

    Args:
        n: Number of rows.

    Returns:
        The log-weights, shape [n].
    """
    return jnp.full(n, -math.log(n), jnp.float32)


@functools.partial(jax.jit, static_argnames=("algorithm", "int8"))
def build(x: Array, y: Array, *, algorithm: Any, int8: bool) -> Kernel:
    """Builds the first kernel of a cosine affinity.

    Args:
        x: Features of the rows.
        y: Features of the columns.
        algorithm: Algorithm of the affinity.
        int8: True to build the int8 kernel as well.

    Returns:
        The kernel.
    """
    operator = Operator(Cosines.of(x, y, algorithm), int8=int8)
    start = operator.blank(jnp.zeros(len(y), jnp.float32), jnp.float32(FIRST_EPSILON))
    return operator.build(start, log_uniform(len(y)))


@functools.partial(jax.jit, static_argnames=("algorithm", "int8"))
def solve(x: Array, y: Array, *, algorithm: Any, int8: bool) -> solver.Scalings:
    """Solves the teacher's plan as `klot_from_embeddings` does.

    Args:
        x: Features of the rows.
        y: Features of the columns.
        algorithm: Algorithm of the affinity.
        int8: True to use an int8 kernel.

    Returns:
        The scalings of the plan.
    """
    operator, logs = Operator(Cosines.of(x, y, algorithm), int8=int8), log_uniform(len(x))
    goal = solver.goal(jnp.float32(TOLERANCE), 1.0, jnp.float32(EPSILON))
    limits: Any = {"epsilon": EPSILON, "tolerance": goal, "max_iterations": solver.MAX_ITERATIONS}
    return solver.solve(operator, logs, log_uniform(len(y)), **limits)[0]


# --- times -------------------------------------------------------------------------------------


def timed(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, float]:
    """Calls a function four times and measures the last three calls.

    Args:
        function: The function. Its first call compiles it.
        *args: Arguments, which are placed on the device first.
        **options: Keyword arguments.

    Returns:
        The result, and the time of the fastest call in milliseconds.
    """
    args, times = jax.block_until_ready(jax.tree.map(jnp.asarray, args)), []
    # The fastest call has the least noise from other processes.
    for _ in range(4):
        result = None  # frees the memory of the run before
        start = time.perf_counter()
        result = jax.block_until_ready(function(*args, **options))
        times.append(1e3 * (time.perf_counter() - start))
    return result, min(times[1:])


# --- checks ------------------------------------------------------------------------------------


def check_memory(sizes: Sizes) -> Iterator[Row]:
    """Measures the bandwidth of memory by an elementwise loop in place."""
    # Several turns in one launch, so that the time of a launch is negligible.
    turns = 20
    loop = jax.jit(lambda x, n: jax.lax.fori_loop(0, n, lambda i, x: 0.5 * x + 0.5, x))
    ms = timed(loop, jnp.ones(sizes.stream, jnp.float32), turns)[1] / turns
    moved = 8 * sizes.stream  # every number is read and written
    yield Row("memory", f"{moved / 2**21:.0f} MiB in place, {moved / ms / 1e6:.1f} GB/s", ms=ms)


def check_product(sizes: Sizes, algorithm: Any, roles: Sequence[str]) -> Iterator[Row]:
    """Compares products of isotropic unit rows with float64.

    The limit is 16 times the estimated error. The largest of all errors is 3 times the estimate,
    10 times on hardware that truncates operands, and 23 times for bfloat16 instead of TF32.

    Args:
        sizes: Sizes. Only `product` is used.
        algorithm: A key of `ALGORITHMS`.
        roles: Roles in which this device uses it.

    Yields:
        One row.
    """
    (n, width), rng = sizes.product, np.random.default_rng(0)
    x, y = (unit(rng.standard_normal((n, width))).astype(np.float32) for _ in range(2))
    product, ms = timed(jax.jit(lambda x, y: affinity.dot(x, y.T, algorithm)), x, y)
    exact = x[::STRIDE].astype(np.float64) @ y.T.astype(np.float64)
    error = float(np.max(np.abs(np.asarray(product[::STRIDE]) - exact)))
    used = "all roles" if len(roles) == len(device.ROLES) else ", ".join(roles) or "unused"
    path = f"{ALGORITHMS[algorithm]}, {2e-9 * n * n * width / ms:.3g} TFLOP/s ({used})"
    yield Row(f"product {n} x {n} x {width}", path, error, 16 * product_error(algorithm, width), ms)


def check_sweeps(n: int, m: int) -> Iterator[Row]:
    """Compares a kernel, its int8 kernel, and the sums over both with float64.

    Args:
        n: Number of rows.
        m: Number of columns.

    Yields:
        Two rows for the build and two for the sweeps.
    """
    (x, y), algorithm = clouds(n, m, WIDTH), device.profile().teacher
    state, ms = timed(build, x, y, algorithm=algorithm, int8=True)
    exact = np.exp(unit(x[::STRIDE]) @ unit(y).T / FIRST_EPSILON)
    error = relative(state.matrix[::STRIDE], exact / np.mean(exact, axis=1, keepdims=True))
    limit = 16 * product_error(algorithm, WIDTH) / FIRST_EPSILON + sum_error(m)
    yield Row(f"build {n} x {m}", ALGORITHMS[algorithm], error, limit, ms)
    # Two bits of mantissa, and no number below 2^-26.
    error = relative(widen(state.int8[::STRIDE]), jnp.maximum(state.matrix[::STRIDE], 2.0**-26))
    yield Row(f"build {n} x {m}", "int8", error, 2.0**-3)

    a = np.full(n, 1 / n, np.float32)
    c = np.random.default_rng(0).uniform(0.5, 1.5, m).astype(np.float32) / np.float32(m)
    operator = Operator(Cosines.of(jnp.asarray(x), jnp.asarray(y)), int8=True)
    for path, sweep in (("float32", operator.sweep), ("int8", operator.sweep_int8)):
        found, ms = timed(jax.jit(sweep), state, a, c)
        exact = exact_sums(state.matrix if path == "float32" else widen(state.int8), a, c)
        error = float(np.max([*map(relative, found, exact)]))
        yield Row(f"sweep {n} x {m}", path, error, sum_error(max(n, m)), ms)


def check_plan(sizes: Sizes, int8: bool) -> Iterator[Row]:
    """Solves the teacher's plan, and measures its error in float64.

    The error of the affinity in the exponents adds to the tolerance.

    Args:
        sizes: Sizes. Only `rows` is used.
        int8: True to use an int8 kernel.

    Yields:
        One row.
    """
    n, algorithm = sizes.rows, device.profile().teacher
    x, y = clouds(n, n, WIDTH)
    plan, ms = timed(solve, x, y, algorithm=algorithm, int8=int8)
    limit = TOLERANCE + 2 * product_error(algorithm, WIDTH) / EPSILON
    path = f"{'int8' if int8 else 'float32'}, {plan.iterations} sweeps"
    yield Row(f"plan {n} x {n}", path, exact_error(x, y, plan.u, plan.v), limit, ms)


def check_loss(sizes: Sizes, n: int, m: int, x64: bool = False, mesh: Any = None) -> Iterator[Row]:
    """Compares KLOT and its gradient in float32 with float64 on the CPU.

    Args:
        sizes: Sizes, whose first loss is the largest problem.
        n: Number of rows.
        m: Number of columns.
        x64: True to enable 64-bit types, in which float32 arrays must stay float32.
        mesh: Devices that the rows are split over.

    Yields:
        A row for the value and one for the gradient.
    """
    exact_value, exact_gradient = exact_loss(n, m, sizes)
    f, g, z, w = features(*sizes.losses[0], sizes)
    arrays = [f[:n], g[:m], z[:n], w[:m]]
    if mesh is not None:
        arrays = jax.device_put(arrays, sharding.split_rows(mesh))
    # With x64 enabled, a stray float64 constant would widen the result.
    with jax.enable_x64(x64):
        ((value, _), gradient), ms = timed(loss_and_gradient, *arrays)
    dtypes = {str(x.dtype) for x in (value, *gradient)}
    if dtypes != {"float32"}:
        raise TypeError(f"loss and gradient must be float32, got {dtypes}")
    path = "float32" + ", x64" * x64 + (f", {mesh.size} devices" if mesh else "")
    yield Row(f"loss {n} x {m}", path, relative(value, exact_value), VALUE_LIMIT, ms)
    yield Row(f"gradient {n} x {m}", path, norm_error(gradient, exact_gradient), GRADIENT_LIMIT)


def check_devices(sizes: Sizes) -> Iterator[Row]:
    """Splits the rows of KLOT over all devices, for comparison with one device."""
    mesh = sharding.rows_mesh()
    if mesh is None:
        yield Row("devices", "one device")
    else:
        n = sizes.losses[0][0] // mesh.size * mesh.size
        yield from check_loss(sizes, n, n, mesh=mesh)


def check_step(sizes: Sizes) -> Iterator[Row]:
    """Times KLOT and its gradient at the size of a training batch."""
    n = sizes.rows
    int8 = blocks.storage(n, n, jnp.float32).int8
    ((_, aux), _), ms = timed(loss_and_gradient, *features(n, n, sizes))
    error = float(np.maximum(aux.teacher.error, aux.student.error))
    sweeps = f"{aux.teacher.iterations} + {aux.student.iterations} sweeps"
    path = f"{'int8' if int8 else 'float32'}, {sweeps}"
    yield Row(f"step: loss, n = {n}", path, error, TOLERANCE, ms)


def cases(sizes: Sizes) -> list[functools.partial[Iterator[Row]]]:
    """Returns the checks with their arguments."""
    own, case = device.profile(), functools.partial
    # Tensor cores have TF32 from capability 8.0 on. The product is shown there even if the library
    # does not use it, for comparison.
    tensor_cores = own.name.startswith("cuda") and float(own.name.split()[1]) >= 8
    roles = {x: [role for role in device.ROLES if getattr(own, role) == x] for x in ALGORITHMS}
    shown = [x for x in ALGORITHMS if roles[x] or tensor_cores or x == device.HIGHEST]
    return [
        case(check_memory, sizes),
        *(case(check_product, sizes, x, roles[x]) for x in shown),
        *(case(check_sweeps, *shape) for shape in sizes.kernels),
        *(case(check_plan, sizes, int8) for int8 in (False, True)),
        *(case(check_loss, sizes, *shape) for shape in sizes.losses),
        case(check_loss, sizes, *sizes.losses[0], x64=True),
        case(check_devices, sizes),
        case(check_step, sizes),
    ]


# --- report ------------------------------------------------------------------------------------

NAMES = ("memory", "product", "sweeps", "plan", "loss", "devices", "step")
COLUMNS = ("check", "path", "error", "limit", "ms", "ok")
FORMAT = "{:<26} | {:<36} | {:>7} | {:>7} | {:>7} | {}"


def describe() -> dict[str, Any]:
    """Describes the device, and the choices of the library for it."""
    own, first = device.profile(), jax.local_devices()[0]
    storage = blocks.storage(PAPER_ROWS, PAPER_ROWS, jnp.float32)
    return {
        "device": f"{jax.device_count()} x {first.device_kind}",
        "capability": getattr(first, "compute_capability", None),
        "memory": f"{own.memory / 2**30:.1f} GiB",
        "jax": jax.__version__,
        "profile": own.name,
        "algorithms": {role: ALGORITHMS.get(getattr(own, role), "other") for role in device.ROLES},
        f"storage at n = {PAPER_ROWS}": storage._asdict(),
    }


def run(case: functools.partial[Iterator[Row]]) -> Iterator[Row]:
    """Yields the rows of a check, and a failing row if it raises."""
    try:
        yield from case()
    except Exception as error:  # of any kind: compilers and devices raise their own
        name, message = case.func.__name__, checks.first_line(error)
        yield Row(name.removeprefix("check_"), f"{type(error).__name__}: {message}", math.nan)


def line(row: Row) -> str:
    """Formats a row of the table.

    Args:
        row: The row.

    Returns:
        One line.
    """
    errors = ("" if x is None else f"{x:.1e}" for x in (row.error, row.limit))
    ms = "" if row.ms is None else f"{row.ms:.3g}"
    return FORMAT.format(row.check, row.path, *errors, ms, "yes" if row.ok else "no")


def as_json(row: Row) -> dict[str, Any]:
    """Converts a row to JSON values, with None for numbers that are not finite.

    Args:
        row: The row.

    Returns:
        A dictionary with the names of `COLUMNS`.
    """
    values = {name: getattr(row, name) for name in COLUMNS}
    # JSON has no NaN and no infinity.
    return {name: None if x in (math.inf, None) or x != x else x for name, x in values.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the checks and prints their rows.

    Args:
        argv: Arguments of the command, by default those of this process.

    Returns:
        The exit code, 1 if a row fails.
    """
    parser = argparse.ArgumentParser(prog="python -m sotalign_jax.selfcheck", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="use tiny sizes")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="checks to run")
    args = parser.parse_args(argv)
    found, rows = describe(), []
    if not args.json:
        print(*(f"{key}: {value}" for key, value in found.items()), sep="\n", end="\n\n")
        print(FORMAT.format(*COLUMNS))
    for case in cases(QUICK if args.quick else sizes_of(device.profile())):
        if case.func.__name__.removeprefix("check_") in args.only:
            for row in run(case):
                rows.append(row)
                if not args.json:
                    print(line(row), flush=True)
    ok = all(row.ok for row in rows)
    # JSON is printed once at the end, so that a program can parse all of stdout.
    if args.json:
        print(json.dumps(found | {"rows": [as_json(row) for row in rows], "ok": ok}, indent=1))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
