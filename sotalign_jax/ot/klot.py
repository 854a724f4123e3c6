"""KLOT, its value and its gradient in closed form.

From an affinity, d KLOT/dK = (P - P*)/eps. From features of unit rows F, G with K = F G^T,

    d/dF = (P - P*) G / eps,    d/dG = (P - P*)^T F / eps,

so that the backward pass keeps arrays of the features' size only. Both plans are solved one after
the other, then P - P* is multiplied with the features in blocks of rows. Rows of a plan are read
from a stored kernel, and computed again otherwise (`blocks.Storage`). Rows are split over
the devices of a mesh, see `sharding`.

References:
    J. M. Danskin, "The theory of max-min", Springer 1967: the gradient of an optimal value.
    SOTAlign, ICML 2026, the lemma on the gradient of KLOT.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sotalign_jax import checks
from sotalign_jax.ot import affinity, blocks, device, sharding
from sotalign_jax.ot.affinity import ArrayLike
from sotalign_jax.ot.blocks import Block, over_rows
from sotalign_jax.ot.kernel import Cosines, Kernel, KernelState
from sotalign_jax.ot.sinkhorn import (
    check_limits,
    constant,
    log_plan,
    log_weights,
    reference,
    sinkhorn,
    solve_matrix,
    without_padding,
)
from sotalign_jax.ot.solver import MAX_ITERATIONS, Scalings, goal, solve

MARGINALS = ("prob", "bistochastic")


class KlotAux(NamedTuple):
    """Scalings, marginal error, iterations and convergence of both plans (total mass 1)."""

    student: Scalings
    teacher: Scalings


class Options(NamedTuple):
    """Options that are fixed at trace time: the algorithm of each product, and the storage."""

    max_iterations: int
    sums: jax.lax.PrecisionLike
    teacher: jax.lax.PrecisionLike
    student: jax.lax.PrecisionLike
    gradient: jax.lax.PrecisionLike
    storage: blocks.Storage

    @classmethod
    def of(
        cls,
        max_iterations: int,
        precision: jax.lax.PrecisionLike,
        storage: blocks.Storage | None = None,
    ) -> "Options":
        """Returns the options of this device; a given precision is that of all products."""
        storage = storage or blocks.Storage()
        if precision is not None:
            return cls(max_iterations, precision, precision, precision, precision, storage)
        own = device.profile()
        sums = affinity.HIGHEST
        return cls(max_iterations, sums, own.teacher, own.student, own.gradient, storage)


class Settings(NamedTuple):
    """Options that may be traced: regularisations, tolerance, log-weights, starting potentials."""

    epsilon: Float[Array, ""]
    epsilon_star: Float[Array, ""]
    tolerance: Float[Array, ""]
    log_a: Float[Array, " n"]
    log_b: Float[Array, " m"]
    init_v: Float[Array, " m"] | None
    init_v_star: Float[Array, " m"] | None


_DERIVATIVES = (
    "{name}: only first derivatives in reverse mode are supported (jax.grad, jax.vjp, "
    "jax.value_and_grad), and only in {arguments}; forward mode and second derivatives are not. "
    "Pass jax.lax.stop_gradient of epsilon and the log-weights if they are traced"
)
OF_AFFINITIES = _DERIVATIVES.format(name="klot", arguments="K")
OF_FEATURES = _DERIVATIVES.format(name="klot_from_embeddings", arguments="f and g")


def reverse_only(message: str, call: Callable[[], Any]) -> Any:
    """Calls `call` and replaces JAX's error about forward mode by `message`."""
    try:
        return call()
    except TypeError as error:
        if "forward-mode" in str(error):
            raise TypeError(message) from error
        raise


# Cotangents of everything that is a constant of the loss.
_zeros = functools.partial(jax.tree.map, jnp.zeros_like)


def _after(x: Array, computed: Any) -> Array:
    """Returns x with a data dependency on `computed`, so that XLA runs two solves in turn.

    One solve may then use the memory of the other. Compilers drop optimisation barriers and
    products with zero. Adding the smallest normal number changes no digit of x.
    """
    touched = sum(jnp.ravel(leaf)[0].astype(x.dtype) for leaf in jax.tree.leaves(computed))
    return x + jnp.where(jnp.isnan(touched), jnp.finfo(x.dtype).tiny, 0)


def _joined(n: int, m: int, us: Any, others: Any) -> KlotAux:
    """Joins both plans' scalings, without padding, from their u and all other fields."""
    return KlotAux(
        *(
            Scalings(sharding.join(u, n), v[:m], *rest)
            for u, (v, *rest) in zip(us, others, strict=True)
        )
    )


# --- from affinities ---------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def klot_of_affinities(
    options: Options, k: Array, k_star: Array, settings: Settings
) -> tuple[Array, KlotAux]:
    """Computes KL(P* || P) and both plans' scalings; differentiable in k alone."""
    return _affinities_fwd(options, k, k_star, settings)[0]


def _affinities_fwd(options: Options, k: Array, k_star: Array, settings: Settings) -> Any:
    k = constant(OF_AFFINITIES, k)  # a second derivative would differentiate this function

    def own_rows(axes: sharding.Axes, rows: Any, settings: Settings) -> Any:
        k, k_star, log_a = rows

        def plan(k: Array, epsilon: Array, init_v: Array | None) -> tuple[Array, Scalings]:
            limits = epsilon, settings.tolerance, options.max_iterations
            return solve_matrix(k, log_a, settings.log_b, *limits, init_v, axes, options.sums)

        epsilon, epsilon_star = settings.epsilon, settings.epsilon_star
        top_star, target = plan(k_star, epsilon_star, settings.init_v_star)
        top, student = plan(k, _after(epsilon, target), settings.init_v)
        log_p = log_plan(k, top, student.u, student.v, epsilon)
        log_p_star = log_plan(k_star, top_star, target.u, target.v, epsilon_star)
        p_star = jnp.exp(log_p_star)
        value = jnp.sum(jnp.where(p_star == 0, 0.0, p_star * (log_p_star - log_p)))
        solved = jnp.isfinite(student.error) & jnp.isfinite(target.error)
        value = jnp.where(solved, sharding.psum(value, axes), jnp.nan)
        centred = top, student.u, top_star, target.u
        us = student.u - top / epsilon, target.u - top_star / epsilon_star
        return (us, centred), (value, student[1:], target[1:])

    with sharding.mesh_of(k, k_star):
        rows = sharding.split(k), sharding.split(k_star), sharding.split(settings.log_a, -jnp.inf)
        (us, centred), (value, *others) = sharding.shard_map(own_rows, rows, settings)
        aux = _joined(len(k), k.shape[1], us, others)
    return (value, aux), (k, k_star, centred, settings, aux)


def _affinities_bwd(options: Options, residuals: Any, cotangents: Any) -> Any:
    k, k_star, centred, settings, aux = residuals

    def own_rows(axes: sharding.Axes, rows: Any, shared: Any) -> Any:
        k, k_star, (top, u, top_star, u_star) = rows
        v, v_star, epsilon, epsilon_star, scale = shared
        p = jnp.exp(log_plan(k, top, u, v, epsilon))
        p_star = jnp.exp(log_plan(k_star, top_star, u_star, v_star, epsilon_star))
        return scale * (p - p_star) / epsilon, ()

    with sharding.mesh_of(k, k_star):
        solved = jnp.isfinite(aux.student.error) & jnp.isfinite(aux.teacher.error)
        scale = jnp.where(solved, cotangents[0], jnp.nan)
        epsilons = settings.epsilon, settings.epsilon_star
        gradient, _ = sharding.shard_map(
            own_rows,
            (sharding.split(k), sharding.split(k_star), centred),
            (aux.student.v, aux.teacher.v, *epsilons, scale),
        )
        gradient = sharding.like(sharding.join(gradient, len(k)), k)
    return gradient, jnp.zeros_like(k_star), _zeros(settings)


klot_of_affinities.defvjp(_affinities_fwd, _affinities_bwd)


# --- from features -----------------------------------------------------------------------------


class Features(NamedTuple):
    """Raw features of the student (f, g) and of the teacher (z, w)."""

    f: Float[Array, "n d"]
    g: Float[Array, "m d"]
    z: Float[Array, "n e"]
    w: Float[Array, "m e"]


def _as_features(*arrays: ArrayLike) -> Features:
    """Casts to float32, or to float64 if one array is, but keeps a pair of bfloat16 arrays."""
    floats = affinity.as_floats(*arrays)
    given = [jnp.asarray(x) for x in arrays]
    if floats[0].dtype == jnp.float32:
        for pair in (slice(0, 2), slice(2, 4)):
            if all(x.dtype == jnp.bfloat16 for x in given[pair]):
                floats = (*floats[: pair.start], *given[pair], *floats[pair.stop :])
    return Features(*floats)


def _zero_padding(features: Features, settings: Settings) -> Features:
    """Replaces features of weight zero by zeros: they may be anything."""
    weights = (settings.log_a, settings.log_b) * 2
    padded = zip(features, weights, strict=True)
    return Features(*(jnp.where(jnp.isneginf(logs)[:, None], 0.0, x) for x, logs in padded))


def _through_norm(gradient: Array, x: Array, factor: Any) -> Array:
    """Returns the gradient in x, given that in x/||x||: its part across x, times factor / ||x||."""
    rows, scale = affinity.as_float(x), affinity.inverse_norms(x)
    along = jnp.sum(gradient * rows, axis=1) * scale * scale
    return ((gradient - along[:, None] * rows) * (scale * factor)[:, None]).astype(x.dtype)


class _Solved(NamedTuple):
    """A solved plan: its kernel, and the scalings."""

    kernel: Kernel
    state: KernelState
    scalings: Scalings

    def measured(self, rows: Array, columns: Array, weights: Any, tolerance: Array) -> Scalings:
        """Returns the scalings with the error of the plan that was multiplied, given its sums."""
        (a, b), axes = weights, self.kernel.axes
        in_rows = sharding.psum(jnp.sum(jnp.abs(rows - a)), axes)
        in_columns = jnp.sum(jnp.abs(sharding.psum(columns, axes) - b))
        return self.scalings.measured(jnp.maximum(in_rows, in_columns), tolerance)

    def without_matrix(self) -> "_Solved":
        """Frees the kernel: rows of the plan are computed again when they are needed."""
        kernel = self.kernel._replace(block_size=blocks.PRODUCT_ROWS)
        empty = sharding.vary_like(jnp.zeros(0, self.state.p.dtype), self.state.p)
        return _Solved(kernel, self.state._replace(matrix=empty), self.scalings)


def _solve_features(
    options: Options,
    axes: sharding.Axes,
    sides: tuple[Array, Array],
    weights: tuple[Array, Array],
    epsilon: Array,
    tolerance: Array,
    init_v: Array | None,
    *,
    teacher: bool,
) -> _Solved:
    """Solves the plan of one pair of features, of which each device has its own rows."""
    storage, (x, y) = options.storage, sides
    precision = options.teacher if teacher else options.student
    cosines = Cosines.of(x, sharding.all_gather(y, axes), precision)
    # The student's few sweeps are not worth a copy of a stored kernel.
    int8 = storage.int8 and (teacher or storage.block_size is not None)
    kernel = Kernel(cosines, storage.block_size, int8, axes, options.sums)
    scalings, state = solve(
        kernel,
        *weights,
        epsilon=epsilon,
        tolerance=goal(tolerance, 1.0, epsilon),
        max_iterations=options.max_iterations,
        init_v=init_v,
    )
    return _Solved(kernel, state, scalings)


class _Products(NamedTuple):
    """Sums over P - P*, and the marginals of P*; F and G are normalised.

    Attributes:
        right: (P - P*) G.
        left: (P - P*)^T F.
        rows: (P - P*) 1.
        columns: (P - P*)^T 1.
        moment: sum of P log(P / (a b)) - P* log(P* / (a b)).
        rows_star: P* 1.
        columns_star: P*^T 1.
    """

    right: Float[Array, "n d"]
    left: Float[Array, "m d"]
    rows: Float[Array, " n"]
    columns: Float[Array, " m"]
    moment: Float[Array, ""]
    rows_star: Float[Array, " n"]
    columns_star: Float[Array, " m"]


def _multiply(
    student: _Solved, teacher: _Solved, weights: tuple[Array, Array], options: Options
) -> _Products:
    """Multiplies P - P* with the student's features, a block of rows at a time."""
    cosines: Any = student.kernel.affinity
    g = affinity.as_float(cosines.g) * cosines.g_scale[:, None]

    def body(block: Block, sums: _Products) -> _Products:
        plan, moment = student.kernel.plan_rows(student.state, block, *weights)
        star, moment_star = teacher.kernel.plan_rows(teacher.state, block, *weights)
        moved = plan - star
        right = affinity.dot(moved, g, options.gradient)
        left = affinity.dot(moved.T, cosines.left(block), options.gradient)
        return _Products(
            right=block.add(sums.right, right),
            left=sums.left + left,
            rows=block.add(sums.rows, jnp.sum(moved, axis=1)),
            columns=sums.columns + jnp.sum(moved, axis=0),
            moment=sums.moment + jnp.sum(moment - moment_star),
            rows_star=block.add(sums.rows_star, jnp.sum(star, axis=1)),
            columns_star=sums.columns_star + jnp.sum(star, axis=0),
        )

    p, q = student.state.p, student.state.q
    sides = jnp.zeros((len(p), g.shape[1]), p.dtype), jnp.zeros(g.shape, p.dtype)
    sums = jnp.zeros_like(p), jnp.zeros_like(q)
    nothing = _Products(*sides, *sums, jnp.zeros((), p.dtype), *sums)
    rows = options.storage.block_size or blocks.BUILD_ROWS
    if options.storage.both:  # there is memory for larger blocks, which save bytes
        rows = min(blocks.PRODUCT_ROWS, max(rows, len(p) // 8))
    with jax.named_scope("products"):
        return over_rows(len(p), rows, body, sharding.vary_like(nothing, p))


def _divergence(
    student: _Solved, moved: _Products, weights: tuple[Array, Array], epsilon: Array
) -> Array:
    """Computes this device's part of KL(P* || P).

    <P*, log P*> - <P*, log P> = <P - P*, K/eps + p + q> - <P, log A> + <P*, log A*>. The marginals
    of P - P* are used as computed, not as zero: otherwise the rounding errors of large K/eps do not
    cancel.
    """
    (a, b), state = weights, student.state
    cosines: Any = student.kernel.affinity
    in_rows = jnp.sum(jnp.where(a > 0, moved.rows * (state.p + state.x), 0.0))
    in_columns = jnp.sum(jnp.where(b > 0, moved.columns * (state.q + state.y), 0.0))
    f = affinity.as_float(cosines.f)
    cross = jnp.sum(jnp.sum(moved.right * f, axis=1) * cosines.f_scale) / epsilon
    return in_rows + in_columns + cross - moved.moment


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def klot_of_features(
    options: Options, features: Features, settings: Settings
) -> tuple[Array, KlotAux]:
    """Computes KL(P* || P) of cosine affinities; differentiable in f and g."""
    return _features_fwd(options, features, settings)[0]


def _features_fwd(options: Options, features: Features, settings: Settings) -> Any:
    """Solves both plans, one after the other, and multiplies their difference with the features."""
    f, g, z, w = constant(OF_FEATURES, features)

    def own_rows(axes: sharding.Axes, rows: Any, settings: Settings) -> Any:
        f, g, z, w, log_a = rows
        tolerance, logs = settings.tolerance, (log_a, settings.log_b)
        weights = jnp.exp(logs[0]), jnp.exp(logs[1])
        solve_one = functools.partial(_solve_features, options, axes, tolerance=tolerance)
        with jax.named_scope("teacher_plan"):
            epsilons = settings.epsilon_star, settings.init_v_star
            teacher = solve_one((z, w), logs, epsilons[0], init_v=epsilons[1], teacher=True)
            if options.storage.block_size is None and not options.storage.both:
                teacher = teacher.without_matrix()
        with jax.named_scope("student_plan"):
            epsilon = _after(settings.epsilon, teacher.scalings)
            student = solve_one((f, g), logs, epsilon, init_v=settings.init_v, teacher=False)
        moved = _multiply(student, teacher, weights, options)
        value = sharding.psum(_divergence(student, moved, weights, settings.epsilon), axes)
        star = moved.rows_star, moved.columns_star
        found = moved.rows + star[0], moved.columns + star[1]
        target = teacher.measured(*star, weights, tolerance)
        plan = student.measured(*found, weights, tolerance)
        solved = jnp.isfinite(plan.error) & jnp.isfinite(target.error)
        value, factor = (jnp.where(solved, x, jnp.nan) for x in (value, 1 / settings.epsilon))
        df = _through_norm(moved.right, f, factor)
        dg = _through_norm(sharding.psum_scatter(moved.left, axes), g, factor)
        return (df, dg, plan.u, target.u), (value, plan[1:], target[1:])

    with sharding.mesh_of(*features):
        rows = (*map(sharding.split, (f, g, z, w)), sharding.split(settings.log_a, -jnp.inf))
        (df, dg, *us), (value, *others) = sharding.shard_map(
            own_rows, rows, _split_columns(settings)
        )
        aux = _joined(len(f), len(g), us, others)
        df, dg = (sharding.like(sharding.join(dx, len(x)), x) for dx, x in ((df, f), (dg, g)))
    return (value, aux), (df, dg, features, settings)


def _split_columns(settings: Settings) -> Settings:
    """Pads the settings of columns to equally many for each device."""
    v, v_star = (
        None if v is None else sharding.split(v) for v in (settings.init_v, settings.init_v_star)
    )
    log_b = sharding.split(settings.log_b, -jnp.inf)
    return settings._replace(log_b=log_b, init_v=v, init_v_star=v_star)


def _features_bwd(options: Options, residuals: Any, cotangents: Any) -> Any:
    df, dg, features, settings = residuals
    gradients = ((cotangents[0] * dx).astype(dx.dtype) for dx in (df, dg))
    return Features(*gradients, *_zeros((features.z, features.w))), _zeros(settings)


klot_of_features.defvjp(_features_fwd, _features_bwd)


# Calls outside of `jit` find their compiled program again.
_affinities = jax.jit(klot_of_affinities, static_argnums=0)
_features = jax.jit(klot_of_features, static_argnums=0)


# --- public functions ---------------------------------------------------------------------------


class _KlotOptions(TypedDict, total=False):
    """For type checkers."""

    epsilon: Any
    epsilon_star: Any
    marginals: str
    tolerance: Any
    max_iterations: int
    precision: jax.lax.PrecisionLike
    log_a: ArrayLike | None
    log_b: ArrayLike | None
    init_v: tuple[ArrayLike, ArrayLike] | None


class _EmbeddingsOptions(_KlotOptions, total=False):
    block_size: int | None


def _mass(marginals: str, n: int, m: int, log_a: Array | None = None) -> Any:
    """Returns the total mass of the plans: 1, or the number of rows that are not padding."""
    checks.choice("marginals", marginals, MARGINALS)
    if marginals == "prob":
        return 1
    if n != m:
        raise checks.InputError(
            f"marginals: 'bistochastic' needs a square affinity but it is {n} x {m}; use 'prob'"
        )
    return n if log_a is None else jnp.sum(~jnp.isneginf(log_a), dtype=log_a.dtype)


def _pair(given: Any, dtype: Any) -> tuple[Array | None, Array | None]:
    """Returns both arrays of a warm start, or (None, None)."""
    if given is None:
        return None, None
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise checks.InputError(
            f"init_v: is {type(given).__name__}; pass a pair of arrays, (v, v_star)"
        )
    first, second = (jax.lax.stop_gradient(jnp.asarray(x, dtype)) for x in given)
    return first, second


def _settings(
    message: str,
    n: int,
    m: int,
    dtype: Any,
    epsilon: Any,
    epsilon_star: Any,
    tolerance: Any,
    log_a: ArrayLike | None,
    log_b: ArrayLike | None,
    init_v: tuple[ArrayLike, ArrayLike] | None,
) -> Settings:
    settings = Settings(
        jnp.asarray(epsilon, dtype),
        jnp.asarray(epsilon_star, dtype),
        jnp.asarray(tolerance, dtype),
        log_weights("log_a", log_a, n, dtype),
        log_weights("log_b", log_b, m, dtype),
        *_pair(init_v, dtype),
    )
    return constant(message, settings)


def _returned(value: Array, aux: KlotAux, return_aux: bool) -> Any:
    return (value, jax.lax.stop_gradient(aux)) if return_aux else value


@overload
def klot(
    K: ArrayLike,
    K_star: ArrayLike,
    *,
    return_aux: Literal[False] = ...,
    **options: Unpack[_KlotOptions],
) -> Float[Array, ""]: ...


@overload
def klot(
    K: ArrayLike, K_star: ArrayLike, *, return_aux: Literal[True], **options: Unpack[_KlotOptions]
) -> tuple[Float[Array, ""], KlotAux]: ...


def klot(
    K: Float[ArrayLike, "n m"],
    K_star: Float[ArrayLike, "n m"],
    *,
    epsilon: Any = 0.05,
    epsilon_star: Any = 0.005,
    marginals: str = "prob",
    log_a: Float[ArrayLike, " n"] | None = None,
    log_b: Float[ArrayLike, " m"] | None = None,
    tolerance: float = 1e-4,
    max_iterations: int = MAX_ITERATIONS,
    init_v: tuple[ArrayLike, ArrayLike] | None = None,
    precision: jax.lax.PrecisionLike = None,
    return_aux: bool = False,
) -> Any:
    """Computes KLOT(K || K*) = KL(P* || P) with P = OT_eps(K), P* = OT_eps*(K*).

    The gradient in K is (P - P*)/eps in closed form: Sinkhorn is not differentiated, and beyond K
    and K* only four vectors are kept for the backward pass. `K_star` is a constant and receives
    no gradient; derivatives in the epsilons and the weights raise a TypeError. The gradient is
    exact when both plans are converged, which `return_aux` shows.

    Args:
        K: student affinity, shape [n, m].
        K_star: teacher affinity, same shape.
        epsilon: regularisation of the student's plan.
        epsilon_star: regularisation of the teacher's plan.
        marginals: "prob", plans of total mass 1 as in the published code, or "bistochastic",
            rows and columns of mass 1 as in the paper: value and gradient are as many times as
            large as there are rows of a positive weight.
        log_a: log-weights of the rows (-inf pads); uniform by default.
        log_b: log-weights of the columns, likewise.
        tolerance: marginal error at which each solve stops, see `sinkhorn`.
        max_iterations: number of iterations at which each solve stops.
        init_v: (v, v_star), column log-scalings to start from, as `aux.student.v` holds them.
        precision: of all matrix products, "highest", "high" or "default"; static. By default
            sums over the kernel are "highest", and products of features are as exact as KLOT needs
            on this device, see `device`.
        return_aux: also return a `KlotAux`: `aux.student.converged`, errors, iterations, scalings.

    Returns:
        The loss, or (loss, aux).

    >>> K, K_star = jnp.eye(3) * 0.2, jnp.eye(3)
    >>> loss, gradient = jax.jit(jax.value_and_grad(klot))(K, K_star)
    >>> float(loss), gradient[0].tolist()
    (0.036, [-0.236, 0.118, 0.118])
    """
    checks.static(precision=precision, return_aux=return_aux)
    scalars = {"epsilon": epsilon, "epsilon_star": epsilon_star, "tolerance": tolerance}
    check_limits(max_iterations=max_iterations, **scalars)
    affinity.check_affinities(K, K_star)
    k, k_star = affinity.as_floats(K, K_star)
    n, m = k.shape
    given: Any = {**scalars, "log_a": log_a, "log_b": log_b, "init_v": init_v}
    settings = _settings(OF_AFFINITIES, n, m, k.dtype, **given)
    mass = _mass(marginals, n, m, settings.log_a)
    if not (log_a is None and log_b is None):
        k, k_star = (without_padding(x, settings.log_a, settings.log_b) for x in (k, k_star))
    options = Options.of(max_iterations, precision)
    arrays = sharding.vary_alike((k, k_star, settings))
    value, aux = reverse_only(OF_AFFINITIES, lambda: _affinities(options, *arrays))
    return _returned(mass * value, aux, return_aux)


def klot_reference(
    K: Float[Array, "n m"],
    K_star: Float[Array, "n m"],
    *,
    epsilon: Any = 0.05,
    epsilon_star: Any = 0.005,
    iterations: int = 100,
    symmetric: bool = True,
) -> Float[Array, ""]:
    """Computes the paper's published loss, digit by digit: fixed iterations, final half-step.

    Value KL(P* || P), gradient (P - P*)/eps whether or not the plans have converged. For
    comparison; `klot` is the one to use.

    >>> print(klot_reference(jnp.eye(3) * 0.2, jnp.eye(3)).round(4))
    0.0359
    """
    constant = jax.lax.stop_gradient(K)
    plain = functools.partial(reference, iterations=iterations, symmetric=symmetric)
    plan = plain(constant, epsilon=epsilon)
    target = plain(jax.lax.stop_gradient(K_star), epsilon=epsilon_star)
    p, p_star = plan.matrix(), target.matrix()
    value = jnp.sum(p_star * (target.log_matrix() - plan.log_matrix()))
    surrogate = jnp.sum((p - p_star) / epsilon * K)
    return value + surrogate - jax.lax.stop_gradient(surrogate)


@overload
def klot_from_embeddings(
    f: ArrayLike,
    g: ArrayLike,
    f_star: ArrayLike,
    g_star: ArrayLike,
    *,
    return_aux: Literal[False] = ...,
    **options: Unpack[_EmbeddingsOptions],
) -> Float[Array, ""]: ...


@overload
def klot_from_embeddings(
    f: ArrayLike,
    g: ArrayLike,
    f_star: ArrayLike,
    g_star: ArrayLike,
    *,
    return_aux: Literal[True],
    **options: Unpack[_EmbeddingsOptions],
) -> tuple[Float[Array, ""], KlotAux]: ...


def klot_from_embeddings(
    f: Float[ArrayLike, "n d"],
    g: Float[ArrayLike, "m d"],
    f_star: Float[ArrayLike, "n e"],
    g_star: Float[ArrayLike, "m e"],
    *,
    epsilon: Any = 0.05,
    epsilon_star: Any = 0.005,
    marginals: str = "prob",
    log_a: Float[ArrayLike, " n"] | None = None,
    log_b: Float[ArrayLike, " m"] | None = None,
    tolerance: float = 1e-4,
    max_iterations: int = MAX_ITERATIONS,
    init_v: tuple[ArrayLike, ArrayLike] | None = None,
    block_size: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    return_aux: bool = False,
) -> Any:
    """Computes `klot(cosine(f, g), cosine(f_star, g_star))` from features.

    Rows are L2-normalised inside. The plans are multiplied with the features as soon as they are
    found, so that the backward pass keeps arrays of the features' size only, never n x m:

        d/df = (P - P*) g / eps,    d/dg = (P - P*)^T f / eps    (on normalised rows).

    Computation follows data: rows that are placed on a mesh, or a mesh in context, split all of it
    over the devices. Arrays made inside of `jit` alone show no mesh: use `jax.set_mesh` for them.
    Inside a `shard_map` every device has a problem of its own: `pmean` its loss. Zero rows have
    cosine 0 with all others, and no gradient.

    Args:
        f: student features of the rows, shape [n, d]. If f and g are bfloat16, their affinity is
            one bfloat16 product, which is exact.
        g: student features of the columns, shape [m, d].
        f_star: teacher features of the same rows, shape [n, e]; they receive no gradient.
        g_star: teacher features of the same columns, shape [m, e], likewise.
        epsilon: see `klot`, as for the other options.
        epsilon_star: see `klot`.
        marginals: see `klot`.
        log_a: see `klot`.
        log_b: see `klot`.
        tolerance: see `klot`.
        max_iterations: see `klot`.
        init_v: see `klot`.
        block_size: number of rows that are recomputed at a time in every iteration, in memory
            O(n (d + block_size)). By default kernels are stored as far as they fit into half of
            the device's memory, see `blocks.storage`. Value and gradients are the same.
        precision: see `klot`.
        return_aux: see `klot`.

    Returns:
        The loss, or (loss, aux).

    >>> f, g = jnp.eye(3), jnp.eye(3) + 0.5
    >>> print(jax.jit(klot_from_embeddings)(f, g, f, g, epsilon_star=0.05).round(4))
    0.0
    """
    checks.static(precision=precision, block_size=block_size, return_aux=return_aux)
    scalars = {"epsilon": epsilon, "epsilon_star": epsilon_star, "tolerance": tolerance}
    check_limits(max_iterations=max_iterations, **scalars)
    affinity.check_features(f, g, f_star, g_star)
    features = _as_features(f, g, f_star, g_star)
    n, m = len(features.f), len(features.g)
    dtype = jnp.float64 if features.f.dtype == jnp.float64 else jnp.float32
    checks.whole(1, or_none=True, block_size=block_size)
    if block_size is None:
        with sharding.mesh_of(*features):
            storage = blocks.storage(sharding.share(n), m, dtype)
    else:
        storage = blocks.Storage(block_size, both=False)
    given: Any = {**scalars, "log_a": log_a, "log_b": log_b, "init_v": init_v}
    settings = _settings(OF_FEATURES, n, m, dtype, **given)
    mass = _mass(marginals, n, m, settings.log_a)
    if not (log_a is None and log_b is None):
        features = _zero_padding(features, settings)
    options = Options.of(max_iterations, precision, storage)
    arrays = sharding.vary_alike((features, settings))
    value, aux = reverse_only(OF_FEATURES, lambda: _features(options, *arrays))
    return _returned(mass * value, aux, return_aux)


def klot_crossmodal(
    f: Float[ArrayLike, "n d"],
    g: Float[ArrayLike, "m d"],
    f_star: Float[ArrayLike, "p e"],
    g_star: Float[ArrayLike, "q e"],
    *,
    epsilon: Any = 0.05,
    epsilon_star: Any = 0.005,
    marginals: str = "prob",
    tolerance: float = 1e-4,
    max_iterations: int = MAX_ITERATIONS,
    precision: jax.lax.PrecisionLike = None,
    return_aux: bool = False,
) -> Any:
    """Computes KL(T || OT_eps(K)) over pairs and unpaired rows at once, K = cosine(f, g).

    The first k = n - p = m - q rows of f and g are pairs, which T transports to themselves; the
    rest follow the teacher's plan P* = OT_eps*(cosine(f_star, g_star)):

        T = diag(s I / k, (1 - s) P*),    s = 2 k / (n + m),

    which has mass 1 and uniform marginals when n = m. The gradient in K is (P - T)/eps. Both
    matrices are kept for it: memory is a few n x m arrays.

    `f, g` are student features of shapes [n, d] and [m, d]; `f_star, g_star` those of the teacher
    for the unpaired rows, [p, e] and [q, e], which receive no gradient. The options are those of
    `klot`.

    >>> f = jnp.eye(3)
    >>> print(jax.jit(klot_crossmodal)(f, f, f[1:], f[1:]).round(4))
    0.0
    """
    n, m, unpaired = len(f), len(g), (len(f_star), len(g_star))
    pairs = n - unpaired[0]
    if pairs != m - unpaired[1] or pairs < 1 or min(unpaired) < 1:
        raise checks.InputError(
            f"f, g: have {n} and {m} rows but f_star and g_star {unpaired}; pass teacher features "
            "of the unpaired rows, with as many pairs before them on either side"
        )
    for name, x in (("f", f), ("g", g), ("f_star", f_star), ("g_star", g_star)):
        affinity.check_affinity(name, x)
    affinity.check_widths(f, g, f_star, g_star)
    f, g, f_star, g_star = affinity.as_floats(f, g, f_star, g_star)
    mass, share = _mass(marginals, n, m), 2 * pairs / (n + m)

    def weights(rest: int) -> Array:
        logs = math.log(share / pairs), math.log((1 - share) / rest)
        return jnp.repeat(jnp.array(logs, f.dtype), np.array([pairs, rest]))

    static = Options.of(max_iterations, precision)
    solved = functools.partial(
        sinkhorn, tolerance=tolerance, max_iterations=max_iterations, precision=static.sums
    )
    targets = jax.lax.stop_gradient((f_star, g_star))
    target = solved(affinity.cosine(*targets, precision=static.teacher), epsilon=epsilon_star)
    t = jax.scipy.linalg.block_diag(
        jnp.eye(pairs, dtype=f.dtype) * (share / pairs), (1 - share) * target.matrix()
    )
    k = affinity.cosine(f, g, precision=static.student)
    log_a, log_b = map(weights, unpaired)
    plan = solved(jax.lax.stop_gradient(k), epsilon=epsilon, log_a=log_a, log_b=log_b)
    log_p = plan.log_matrix()
    value = jnp.sum(jax.scipy.special.xlogy(t, t) - t * log_p)
    surrogate = jnp.sum((jnp.exp(log_p) - t) / epsilon * k)
    value = mass * (value + surrogate - jax.lax.stop_gradient(surrogate))
    value = jnp.where(jnp.isfinite(plan.error) & jnp.isfinite(target.error), value, jnp.nan)
    aux = KlotAux(*(Scalings(x.u, x.v, x.error, x.iterations, x.converged) for x in (plan, target)))
    return _returned(value, aux, return_aux)
