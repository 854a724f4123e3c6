"""Checks the solver and the loss on random hard problems.

    python -m tests.fuzz --problems=10000 --seed=0     exit code 1 if anything is found
    python -m tests.fuzz --seed=0 --only=1234          one problem again, in full

Affinities are flat, clustered, duplicated, near a permutation, constant, huge or shifted, and some
contain -inf or NaN. Epsilon ranges from 1e-4 to 10. Weights range down to 1e-15 on both sides and
include padding. Arrays are float32 or float64. A third of the problems is extreme: weights over 30
decades with hubs, sparse bits, float16 rows of tiny norms, or many more columns than rows.
Problems with features also check the loss, with stored and streamed affinities, and in float32 with
an int8 kernel as on a GPU or TPU. Problem i of a seed does not depend on the other options. The
findings are

    non-finite       a result is not finite although the problem is valid
    not converged    the plan, or a plan of the loss, has not converged, but textbook Sinkhorn in
                     float64 converges within the same number of iterations
    false converged  the marginals of `plan.matrix()` miss the tolerance of a converged plan
    false error      the potentials u and v of `sinkhorn`, `klot` or `klot_from_embeddings` have a
                     plan with a larger error than the one that is reported with them
    another loss     stored, streamed and given affinities converge to different values
    a plausible NaN  K has a NaN and the plan claims to be finite
    a false status   a plan is out of iterations although it has taken fewer

and a solve that exceeds its number of iterations. A plan that has not converged is excused, and
counted, if rounding K/epsilon to its dtype moves exponents by more than the tolerance, and either
textbook Sinkhorn in that dtype does not converge or K is streamed and rounded in every sweep.
"""

import collections
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from benchmarks import common
from sotalign_jax.ot import affinity
from sotalign_jax.ot.affinity import Cosines
from sotalign_jax.ot.kernel import MAX_EXPONENT, Operator
from sotalign_jax.ot.klot import klot, klot_from_embeddings
from sotalign_jax.ot.sinkhorn import sinkhorn
from sotalign_jax.ot.solver import Scalings, Status, solve

ITERATIONS = 500
SHAPES = ((24, 40), (96, 64), (200, 200))
"""Few shapes, because each one compiles. Padding covers all smaller shapes."""
LONG_SHAPES = ((3, 400), (400, 3))
"""Shapes of extreme problems, beside `SHAPES`."""
WIDTH = 6
DTYPES = (np.float32, np.float64)


class Case(NamedTuple):
    """One problem. `name` describes how it was generated."""

    name: str
    k: np.ndarray
    log_a: np.ndarray
    log_b: np.ndarray
    epsilon: float
    tolerance: float
    features: tuple[np.ndarray, ...] | None
    half: bool = False  # the features are numbers of float16, and are given as such


def _digits_lost(case: Case, k: np.ndarray, streamed: bool) -> bool:
    """Returns True if rounding K/epsilon moves exponents by more than the tolerance.

    The solver subtracts the row maximum from a given K, but not from streamed cosines.
    """
    finite = np.where(np.isfinite(k), k, np.nan).astype(np.float64)
    if np.isnan(finite).all(axis=1).any():
        return False
    widest = np.max(np.nanmax(finite, axis=1) - np.nanmin(finite, axis=1))
    widest = np.nanmax(np.abs(finite)) if streamed else widest
    return bool(np.finfo(case.k.dtype).eps * widest / case.epsilon > case.tolerance)


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


FEATURES = ("random", "clustered", "duplicated", "copies", "narrow")
EXTREME_FEATURES = ("bits", "tiny half")


def _features(
    rng: np.random.Generator, n: int, m: int, kinds: Sequence[str] = FEATURES
) -> tuple[str, np.ndarray, np.ndarray]:
    f, g = rng.normal(size=(n, WIDTH)), rng.normal(size=(m, WIDTH))
    kind = str(rng.choice(kinds))
    if kind == "clustered":
        centres = rng.normal(size=(3, WIDTH))
        f = centres[rng.integers(0, 3, n)] + 0.05 * f
        g = centres[np.minimum(rng.integers(0, 5, m), 2)] + 0.05 * g
    elif kind == "duplicated":
        f, g = f[rng.integers(0, n, n)], g[rng.integers(0, m, m)]
    elif kind == "copies":
        f = g[rng.integers(0, m, n)] + 10.0 ** rng.uniform(-4, 0) * f
    elif kind == "narrow":
        f, g = 0.1 * f + 1, 0.1 * g + 1
    elif kind == "bits":
        f, g = ((x > 1).astype(float) for x in (f, g))
        for x in (f, g):
            x[~x.any(axis=1), 0] = 1
    elif kind == "tiny half":
        # Down to the smallest numbers of float16, and not to zero.
        f, g = (np.sign(x) * np.maximum(np.abs(x) * 1e-6, 6e-8) for x in (f, g))
        f, g = (np.float16(x).astype(float) for x in (f, g))
    return kind, f, g


AFFINITIES = ("uniform", "permutation", "constant", "huge", "distances", "shifted", "hub")
EXTREME_AFFINITIES = ("hubs", "uniform", "permutation")


def _affinity(
    rng: np.random.Generator, n: int, m: int, kinds: Sequence[str] = AFFINITIES
) -> tuple[str, np.ndarray]:
    kind = str(rng.choice(kinds))
    k = rng.uniform(-1, 1, size=(n, m))
    if kind == "permutation":
        k = 0.02 * rng.normal(size=(n, m))
        k[np.arange(n) % n, rng.permutation(max(n, m))[:n] % m] += 1
    elif kind == "constant":
        k = np.full((n, m), rng.normal() * 10.0 ** rng.uniform(-3, 3))
    elif kind == "huge":
        k = k * 10.0 ** rng.uniform(1, 6)
    elif kind == "distances":
        x, y = np.linspace(-1, 2, n), np.linspace(-1, 2, m)
        k = -np.square(x[:, None] - y[None, :])
    elif kind == "shifted":
        k = k + 10.0 ** rng.uniform(0, 4) + rng.normal(size=(n, 1)) + rng.normal(size=(1, m))
    elif kind == "hub":
        k[:, 0] += 2
    elif kind == "hubs":
        k[:, :2] += rng.uniform(1, 5)
    return kind, k


WEIGHTS = ("uniform", "uniform", "dirichlet", "one tiny", "gaussian", "spread")
EXTREME_WEIGHTS = ("uniform", "decades", "one heavy", "half tiny")


def _weights(
    rng: np.random.Generator, n: int, kinds: Sequence[str] = WEIGHTS
) -> tuple[str, np.ndarray]:
    kind = str(rng.choice(kinds))
    w = np.ones(n)
    if kind == "dirichlet":
        w = np.maximum(rng.dirichlet(np.full(n, 0.3)), 1e-15)
    elif kind == "one tiny" and n > 1:
        w[rng.integers(n)] = 10.0 ** rng.uniform(-15, -3)
    elif kind == "gaussian":
        x = np.linspace(-1, 2, n)
        w = np.maximum(np.exp(-np.square((x - rng.uniform(-0.5, 1.5)) / 0.17) / 2), 1e-15)
    elif kind == "spread":
        w = 10.0 ** rng.uniform(-15, 0, size=n)
    elif kind == "decades":
        w = 10.0 ** rng.uniform(-30, 0, size=n)
    elif kind == "one heavy":
        w[:] = 10.0 ** rng.uniform(-30, -3)
        w[rng.integers(n)] = 1
    elif kind == "half tiny":
        w[rng.uniform(size=n) < 0.5] = 10.0 ** rng.uniform(-30, -3)
    return kind, np.log(w / w.sum())


def make(seed: int, index: int) -> Case:
    """Generates problem `index` of `seed`."""
    extreme = np.random.default_rng([seed, index, 2]).uniform() < 1 / 3
    rng = np.random.default_rng([seed, index])
    shapes = SHAPES + LONG_SHAPES if extreme else SHAPES
    shape = shapes[rng.integers(len(shapes))]
    dtype = DTYPES[rng.integers(2)]
    padded = rng.uniform() < 0.6
    n, m = (int(rng.integers(1, size + 1)) if padded else size for size in shape)
    epsilon = float(10.0 ** rng.uniform(-4, 1))
    tolerance = float(rng.choice([1e-4, 1e-9])) if dtype == np.float64 else 1e-4
    features = None
    if rng.uniform() < 0.4:
        kinds = EXTREME_FEATURES if extreme else FEATURES
        kind, f, g = _features(rng, n, m, kinds)
        _, z, w = _features(rng, n, m, (kind,) if kind == "tiny half" else kinds)
        k = _unit(f) @ _unit(g).T
        full = [np.full((size, WIDTH), np.nan, dtype) for size in (*shape, *shape)]
        for x, rows in zip(full, (f, g, z, w), strict=True):
            x[: len(rows)] = rows
        features = tuple(full)
    else:
        kind, k = _affinity(rng, n, m, EXTREME_AFFINITIES if extreme else AFFINITIES)
        spoiled = rng.uniform()
        if spoiled < 0.15:
            k[rng.uniform(size=k.shape) < rng.choice([0.01, 0.3])] = -np.inf
            kind += ", -inf"
        elif spoiled < 0.2:
            k[rng.integers(n), rng.integers(m)] = np.nan
            kind += ", NaN"
    kinds = EXTREME_WEIGHTS if extreme else WEIGHTS
    of_a, log_a = _weights(rng, n, kinds)
    of_b, log_b = _weights(rng, m, kinds)
    given = np.full(shape, np.nan, dtype)
    given[:n, :m] = k
    padded_a, padded_b = (np.full(size, -np.inf) for size in shape)
    padded_a[:n], padded_b[:m] = log_a, log_b
    name = (
        f"{kind}, {n} x {m} in {shape[0]} x {shape[1]}, weights {of_a} / {of_b}, "
        f"epsilon={epsilon:.3g}, tolerance={tolerance:g}, {np.dtype(dtype).name}"
    )
    half = kind == "tiny half" and dtype == np.float32
    return Case(name, given, padded_a, padded_b, epsilon, tolerance, features, half)


_plan = jax.jit(functools.partial(sinkhorn, max_iterations=ITERATIONS))
_klot = jax.jit(functools.partial(klot, max_iterations=ITERATIONS, return_aux=True))


@jax.jit
def _textbook(k: Any, log_a: Any, log_b: Any, epsilon: Any, tolerance: Any) -> Any:
    """Runs log-domain Sinkhorn in the dtype of K. Returns (converged, iterations)."""
    live_rows, live = ~jnp.isneginf(log_a), ~jnp.isneginf(log_b)
    k = jnp.where(live_rows[:, None] & live[None, :], k, 0.0)
    scaled = (k - jnp.max(k, axis=1, keepdims=True)) / epsilon

    def step(state: Any) -> Any:
        v, _, i = state
        u = log_a - jax.nn.logsumexp(scaled + v[None, :], axis=1)
        u = jnp.where(live_rows, u, -jnp.inf)
        columns = jax.nn.logsumexp(scaled + u[:, None], axis=0)
        error = jnp.sum(jnp.abs(jnp.exp(columns + v) - jnp.exp(log_b)))
        return jnp.where(live, log_b - columns, -jnp.inf), error, i + 1

    def unfinished(state: Any) -> Any:
        return ~(state[1] <= tolerance) & (state[2] < ITERATIONS)

    _, error, i = jax.lax.while_loop(unfinished, step, (log_b, jnp.asarray(jnp.inf, k.dtype), 0))
    return error <= tolerance, i


_OPTIONS: dict[str, Any] = {"max_iterations": ITERATIONS, "return_aux": True}


@functools.partial(jax.jit, static_argnames="block_size")
def _streamed(features: Any, options: Any, *, block_size: int | None) -> Any:
    f, g, z, w = features

    def loss(f: Any, g: Any) -> Any:
        return klot_from_embeddings(f, g, z, w, **options, block_size=block_size, **_OPTIONS)

    (value, aux), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(f, g)
    return value, gradients, aux


@jax.jit
def _dense(features: Any, options: Any) -> Any:
    f, g, z, w = features
    value, aux = klot(affinity.cosine(f, g), affinity.cosine(z, w), **options, **_OPTIONS)
    return value, aux.student.converged & aux.teacher.converged


@functools.partial(jax.jit, static_argnames="block_size")
def _with_int8(
    x: Any, y: Any, log_a: Any, log_b: Any, epsilon: Any, tolerance: Any, *, block_size: int | None
) -> Scalings:
    """Solves with an int8 kernel and measures the marginal error of the columns."""
    operator = Operator(Cosines.of(x, y), block_size, int8=True)
    limits = {"epsilon": epsilon, "tolerance": tolerance, "max_iterations": ITERATIONS}
    plan, kernel = solve(operator, log_a, log_b, **limits)
    start = kernel._replace(u=jnp.zeros_like(kernel.u), v=jnp.zeros_like(kernel.v))
    # Lighter columns have no mass, and a row of tiny weight may have all of its own in them.
    heavy = jnp.where(jnp.isneginf(log_b), log_b, jnp.maximum(log_b, -MAX_EXPONENT))
    _, t = operator.sweep(start, jnp.exp(log_a), jnp.exp(heavy + kernel.v))
    missing = jnp.exp(log_b) * jnp.abs(jnp.exp(kernel.v) * t - 1)
    missing = jnp.where(jnp.isneginf(log_b), 0.0, missing)
    return plan.measured(jnp.sum(missing), tolerance + 1e-6)


class Report(NamedTuple):
    """Findings of one problem and its number of excused plans."""

    found: list[str]
    excused: int = 0

    def __add__(self, other: Any) -> "Report":
        return Report(self.found + other.found, self.excused + other.excused)


def _check_convergence(
    case: Case, name: str, k: np.ndarray, plan: Any, *, streamed: bool = False
) -> Report:
    """Checks error, iterations and converged of a plan of K against textbook Sinkhorn."""
    if plan.iterations > ITERATIONS:
        return Report([f"{name}: {plan.iterations} iterations of {ITERATIONS}"])
    if plan.converged:
        return Report([])
    # One sweep may be kept to return to the best point.
    if plan.status == Status.OUT_OF_ITERATIONS and plan.iterations < ITERATIONS - 1:
        return Report([f"{name}: a false status after {plan.iterations} iterations"])
    settings = case.log_a, case.log_b, case.epsilon, case.tolerance
    done, needed = _textbook(k.astype(np.float64), *settings)
    dtype = case.k.dtype
    live = k[np.isfinite(case.log_a)][:, np.isfinite(case.log_b)]
    lost = _digits_lost(case, live, streamed)
    if lost and streamed:
        return Report([], 1)
    if done and lost:
        done, needed = _textbook(*(np.asarray(x, dtype) for x in (k, *settings)))
    if not done:
        return Report([], int(lost))
    return Report(
        [
            f"{name} not converged: error {plan.error:.3g} after {plan.iterations} iterations, "
            f"where textbook Sinkhorn needs {needed}"
        ]
    )


def _check_potentials(case: Case, name: str, k: np.ndarray, plan: Any, epsilon: Any) -> Report:
    """Checks the reported error against the plan of u and v, computed in float64."""
    a, b = (np.exp(x) / np.exp(x).sum() for x in (case.log_a, case.log_b))
    logs = k[a > 0][:, b > 0].astype(np.float64) / np.float64(epsilon)
    u, v = (np.asarray(x, np.float64)[w > 0] for x, w in ((plan.u, a), (plan.v, b)))
    matrix = np.exp(np.minimum(logs + u[:, None] + v[None, :], 50))
    true = max(np.abs(matrix.sum(1) - a[a > 0]).sum(), np.abs(matrix.sum(0) - b[b > 0]).sum())
    finite = np.abs(logs[np.isfinite(logs)]).max(initial=1)
    largest = max(finite, np.abs(u).max(), np.abs(v).max())
    # u and v are rounded to their dtype, and so is K if it was computed from features.
    slack = 8 * np.finfo(case.k.dtype).eps * largest
    # Exponents without digits after the point say nothing about the plan.
    if plan.status == Status.NOT_FINITE or slack > 0.1 or true <= plan.error + slack + 1e-6 * true:
        return Report([])
    return Report(
        [f"{name} has a false error: {plan.error:.3g}, that of its u and v is {true:.3g}"]
    )


def _check_klot(case: Case, options: dict[str, Any]) -> Report:
    """Checks both plans of the loss of K."""
    epsilons = options["epsilon"], 3 * options["epsilon"]
    _, aux = jax.device_get(_klot(case.k, case.k, **options, epsilon_star=epsilons[1]))
    report = Report([])
    for name, plan, epsilon in zip(("student", "teacher"), aux, epsilons, strict=True):
        label = f"{name} of klot"
        report += _check_potentials(case, label, case.k, plan, epsilon)
        own = case._replace(epsilon=float(epsilon))
        report += _check_convergence(own, label, case.k, plan)
    return report


def check(case: Case) -> Report:
    """Checks the plan of K, and the loss of K and of its features."""
    dtype, found = case.k.dtype, []
    options = {
        "log_a": case.log_a.astype(dtype),
        "log_b": case.log_b.astype(dtype),
        "epsilon": np.asarray(case.epsilon, dtype),
        "tolerance": np.asarray(case.tolerance, dtype),
    }
    plan = _plan(case.k, **options)
    matrix = np.asarray(plan.matrix(), np.float64)
    plan = jax.device_get(plan)
    a, b = (np.exp(x) / np.exp(x).sum() for x in (case.log_a, case.log_b))
    true = max(np.abs(matrix.sum(1) - a).sum(), np.abs(matrix.sum(0) - b).sum())
    live = case.k[a > 0][:, b > 0]
    if np.isnan(live).any():
        if plan.status != Status.NOT_FINITE:
            found.append(f"a plausible NaN: error {plan.error:.3g}")
        return Report(found)
    slack = case.tolerance + (1e-6 if dtype == np.float32 else 1e-14)
    if plan.converged and not true <= slack:
        found.append(f"false converged: error {plan.error:.3g}, the matrix's {true:.3g}")
    reachable = np.isfinite(live).any(axis=1).all() and np.isfinite(live).any(axis=0).all()
    finite = np.isfinite(matrix).all() and np.isfinite(plan.error)
    finite = finite and np.isfinite(plan.u[a > 0]).all() and np.isfinite(plan.v[b > 0]).all()
    if reachable and not finite:
        found.append(f"non-finite: error {plan.error}")
    report = Report(found) + _check_convergence(case, "plan", case.k, plan)
    if reachable:
        report += _check_potentials(case, "plan", case.k, plan, options["epsilon"])
    if case.features is not None:
        return report + _check_losses(case, options)
    return report + _check_klot(case, options) if reachable else report


def _check_losses(case: Case, options: dict[str, Any]) -> Report:
    options = options | {"epsilon_star": options["epsilon"]}
    assert case.features is not None
    f, g, *rest = case.features
    rows, columns = np.isfinite(case.log_a)[:, None], np.isfinite(case.log_b)[:, None]
    clean = [
        np.where(live, x, 1) for x, live in zip((f, g, *rest), (rows, columns) * 2, strict=True)
    ]
    expected, sound = jax.device_get(_dense(clean, options))
    wide = [_unit(x.astype(np.float64)) for x in clean]
    affinities = {"student": wide[0] @ wide[1].T, "teacher": wide[2] @ wide[3].T}
    report = Report([])
    if f.dtype == np.float32:
        live = [np.where(x > 0, y, 0) for x, y in zip((rows, columns) * 2, clean, strict=True)]
        names = "log_a", "log_b", "epsilon", "tolerance"
        for side, name in enumerate(affinities):
            pair = live[2 * side : 2 * side + 2]
            for block_size in (None, 16):
                given = (options[x] for x in names)
                plan = jax.device_get(_with_int8(*pair, *given, block_size=block_size))
                label, streamed = f"{name}, int8, {block_size=},", block_size is not None
                k = affinities[name]
                report += _check_convergence(case, label, k, plan, streamed=streamed)
    given = tuple(np.float16(x) for x in case.features) if case.half else case.features
    for block_size in (None, 16):
        found = []
        value, gradients, aux = jax.device_get(_streamed(given, options, block_size=block_size))
        if not np.isfinite(value) or not all(np.isfinite(x).all() for x in gradients):
            found.append(f"non-finite: loss {value} or its gradient, block_size={block_size}")
        # Two plans within the tolerance differ by at most their moved mass times the range of K.
        slack = (4 * case.tolerance + 20 * np.finfo(f.dtype).eps) * (1 + 2 / case.epsilon)
        sound = sound and aux.student.converged and aux.teacher.converged
        if sound and not abs(value - expected) <= slack + 1e-3 * abs(expected):
            found.append(f"another loss: {value:.6g} is not {expected:.6g}, {block_size=}")
        report += Report(found)
        for name, k in affinities.items():
            name_of = f"{name}, {block_size=},"
            streamed, plan = block_size is not None, getattr(aux, name)
            report += _check_convergence(case, name_of, k, plan, streamed=streamed)
            report += _check_potentials(case, name_of, k, plan, options["epsilon"])
    return report


def run(problems: Sequence[int], seed: int, *, progress: bool = False) -> dict[int, Report]:
    """Returns reports by problem number. Groups problems by shape, so that each compiles once."""
    groups = collections.defaultdict(list)
    for index in problems:
        case = make(seed, index)
        groups[case.k.shape, case.k.dtype.name, case.features is None].append(index)
    reports = {}
    with tqdm(total=len(problems), disable=not progress) as bar, jax.enable_x64(True):
        for index in itertools.chain(*groups.values()):
            case = make(seed, index)
            reports[index] = check(case)
            if found := reports[index].found:
                tqdm.write(f"--seed={seed} --only={index}: {case.name}\n    {'; '.join(found)}")
            bar.update()
    return reports


def search(
    doc: str | None,
    argv: Sequence[str] | None,
    check: Callable[[int, int], tuple[str, list[str]]],
    *,
    problems: int,
) -> None:
    """Runs the command line of another fuzzer, and exits.

    Args:
        doc: Description for --help.
        argv: Arguments, or None for those of the command line.
        check: Maps (seed, index) to the name of a problem and the findings.
        problems: Default number of problems.
    """
    args = common.options(doc, argv, problems=problems, seed=0, only=int)
    chosen = range(args.problems) if args.only is None else [args.only]
    findings = 0
    for index in tqdm(chosen, disable=args.only is not None):
        name, found = check(args.seed, index)
        findings += bool(found)
        if found or args.only is not None:
            tqdm.write(f"--seed={args.seed} --only={index}: {name}\n    {'; '.join(found)}")
    print(f"{len(chosen)} problems, {findings} with findings")
    sys.exit(bool(findings))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    args = common.options(__doc__, argv, problems=1000, seed=0, only=int)
    if args.quick:
        args.problems = 20
    problems = range(args.problems) if args.only is None else [args.only]
    if args.only is not None:
        case = make(args.seed, args.only)
        print(case.name, case._asdict(), sep="\n")
    reports = run(problems, args.seed, progress=args.only is None).values()
    findings = sum(bool(report.found) for report in reports)
    print(f"{len(reports)} problems, {findings} with findings")
    excused = sum(report.excused for report in reports)
    print(
        f"{excused} plans were excused: not converged, but rounding K/epsilon to its dtype moves "
        "exponents by more than the tolerance, and textbook Sinkhorn in that dtype fails, too, or "
        "K is streamed"
    )
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
