"""KLOT, the divergence between two transport plans, with its gradient in closed form.

    KLOT(K || K*) = KL(P* || P),    P = OT_eps(K),    P* = OT_eps*(K*)

Its gradient in an affinity K is (P - P*)/eps, because eps KLOT is the Fenchel-Young loss of the
entropic transport problem. For features with unit rows F, G and K = F G^T the gradients are

    d/dF = (P - P*) G / eps,    d/dG = (P - P*)^T F / eps,

and the backward pass keeps only arrays of the features' size. Sinkhorn is never differentiated: by
Danskin's theorem (the envelope theorem), the gradient of an optimal value needs only the optimal
plan.

The teacher's plan is solved first, then the student's. P - P* is then multiplied with the features,
a block of rows at a time. A stored kernel provides the rows of its plan directly. A streamed kernel
computes them again (`blocks.Storage`). Rows are split over the devices of a mesh, see `sharding`.

References:
    SOTAlign, ICML 2026: the lemma on the gradient of KLOT.
    J. M. Danskin, "The theory of max-min", Springer 1967.
    M. Blondel, A. F. T. Martins and V. Niculae, "Learning with Fenchel-Young losses", JMLR 21
    (2020).
"""

from __future__ import annotations  # help() then shows the annotations as they are written

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from sotalign_jax import checks
from sotalign_jax.ot import affinity, blocks, device, sharding
from sotalign_jax.ot.affinity import ArrayLike
from sotalign_jax.ot.blocks import Block, over_rows
from sotalign_jax.ot.kernel import Cosines, Kernel, KernelState
from sotalign_jax.ot.sinkhorn import (
    Centres,
    check_limits,
    constant,
    log_plan,
    log_weights,
    reference,
    solve_matrix,
    without_padding,
)
from sotalign_jax.ot.solver import MAX_ITERATIONS, Scalings, Status, goal, solve

MARGINALS = ("prob", "bistochastic")
"""Choices of `marginals`: plans of total mass 1, or rows and columns of mass 1."""


class KlotAux(NamedTuple):
    """Results of both solves, for plans of total mass 1.

    Attributes:
        student: Scalings, marginal error, iterations and status of P.
        teacher: The same for P*.
    """

    student: Scalings
    teacher: Scalings

    @property
    def solved(self) -> Bool[Array, ""]:
        """False if one of the plans does not exist, so that the loss is NaN."""
        failed = Status.NOT_FINITE
        return (self.student.status != failed) & (self.teacher.status != failed)


class _Options(NamedTuple):
    """Options that are fixed at trace time.

    Attributes:
        max_iterations: Number of sweeps at which a solve stops.
        sums: Precision of sums over a kernel.
        algorithms: Device profile with the precision of each matrix product, see `device.ROLES`.
        storage: The n x m arrays that are kept in memory.
    """

    max_iterations: int
    sums: jax.lax.PrecisionLike
    algorithms: device.Profile
    storage: blocks.Storage

    @classmethod
    def create(
        cls,
        max_iterations: int,
        precision: jax.lax.PrecisionLike = None,
        storage: blocks.Storage | None = None,
    ) -> _Options:
        """Builds the options for this device.

        Args:
            max_iterations: Number of sweeps at which a solve stops.
            precision: Precision of all products. None takes the device's own.
            storage: Arrays that are kept. None stores both kernels.

        Returns:
            The options.
        """
        own, storage = device.profile(), storage or blocks.Storage()
        if precision is None:
            return cls(max_iterations, affinity.HIGHEST, own, storage)
        # A user who asks for a precision gets it in every role, sums included.
        same: Any = dict.fromkeys(device.ROLES, precision)
        return cls(max_iterations, precision, own._replace(**same), storage)


class _Settings(NamedTuple):
    """Options that may be traced."""

    epsilon: Float[Array, ""]
    epsilon_star: Float[Array, ""]
    tolerance: Float[Array, ""]
    log_a: Float[Array, " n"]
    log_b: Float[Array, " m"]
    init_v: Float[Array, " m"] | None
    init_v_star: Float[Array, " m"] | None


_DERIVATIVES_ERROR = (
    "{name} supports only first derivatives in {arguments} by reverse mode (jax.grad, jax.vjp, "
    "jax.value_and_grad); pass jax.lax.stop_gradient of other differentiated arguments, such as "
    "epsilon and the log-weights"
)
_AFFINITIES_ERROR = _DERIVATIVES_ERROR.format(name="klot", arguments="K")
_FEATURES_ERROR = _DERIVATIVES_ERROR.format(name="klot_from_embeddings", arguments="f and g")

# Makes zero cotangents for inputs that the loss treats as constants.
_zeros = functools.partial(jax.tree.map, jnp.zeros_like)


def _depend_on(x: Array, computed: Any) -> Array:
    """Returns x with a data dependency on `computed`, so that XLA runs two solves in turn.

    The second solve can then use the memory of the first. The dependency is an added 0, or the
    smallest normal number if entries of `computed` sum to NaN. Neither changes a digit of x.
    Compilers would remove an optimisation barrier or a product with zero.
    """
    # One entry of each array is enough for a dependency on all of it.
    touched = sum(jnp.ravel(leaf)[0].astype(x.dtype) for leaf in jax.tree.leaves(computed))
    return x + jnp.where(jnp.isnan(touched), jnp.finfo(x.dtype).tiny, 0)


def _join_scalings(n: int, m: int, us: Any, others: Any) -> KlotAux:
    """Joins u and the other fields of both plans' scalings, without padding."""
    both = zip(us, others, strict=True)
    return KlotAux(*(Scalings(sharding.join(u, n), v[:m], *rest) for u, (v, *rest) in both))


# --- from affinities ---------------------------------------------------------------------------


class _Centred(NamedTuple):
    """A plan in the form that `sinkhorn.Plan` has, with potentials in two parts."""

    centres: Centres
    u: Array
    v: Array
    epsilon: Array

    def log_plan(self, k: Array) -> Array:
        """Returns log P for these rows of K."""
        return log_plan(k, self.centres.rows, self.u, self.v, self.epsilon, self.centres.columns)

    def scalings(self) -> tuple[Array, Array]:
        """Returns u and v of log P = K/epsilon + u + v."""
        rows, columns = (centre / self.epsilon for centre in self.centres)
        return self.u - rows, self.v - columns


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _klot_of_affinities(
    options: _Options, k: Array, k_star: Array, settings: _Settings
) -> tuple[Array, KlotAux]:
    """Computes KL(P* || P) and both plans' scalings. Differentiable in k alone."""
    return _affinities_fwd(options, k, k_star, settings)[0]


def _affinities_fwd(options: _Options, k: Array, k_star: Array, settings: _Settings) -> Any:
    """Solves both plans and sums KL(P* || P) over their entries."""
    # Second derivatives differentiate this function, and raise here.
    k = constant(_AFFINITIES_ERROR, k)

    def own_rows(axes: sharding.Axes, rows: Any, settings: _Settings) -> Any:
        k, k_star, log_a = rows

        def plan(k: Array, epsilon: Array, init_v: Array | None) -> tuple[Centres, Scalings]:
            limits = epsilon, settings.tolerance, options.max_iterations
            return solve_matrix(k, log_a, settings.log_b, *limits, init_v, axes, options.sums)

        epsilon, epsilon_star = settings.epsilon, settings.epsilon_star
        # One after the other, so that the second solve can use the memory of the first.
        centres_star, teacher = plan(k_star, epsilon_star, settings.init_v_star)
        centres, student = plan(k, _depend_on(epsilon, teacher), settings.init_v)
        kept = _Centred(centres, student.u, student.v, epsilon)
        kept_star = _Centred(centres_star, teacher.u, teacher.v, epsilon_star)
        log_p, log_p_star = kept.log_plan(k), kept_star.log_plan(k_star)
        p_star = jnp.exp(log_p_star)
        # 0 log 0 counts as 0. The product would be NaN where log P is -inf.
        value = jnp.sum(jnp.where(p_star == 0, 0.0, p_star * (log_p_star - log_p)))
        solved = KlotAux(student, teacher).solved
        # If a solve failed, the loss is NaN and not a number that looks plausible.
        value = jnp.where(solved, sharding.psum(value, axes), jnp.nan)
        # Users get scalings of K itself. The backward pass keeps the centred ones, which have more
        # digits.
        (u, v), (u_star, v_star) = kept.scalings(), kept_star.scalings()
        results = (v, *student[2:]), (v_star, *teacher[2:])
        rows = (centres.rows, student.u), (centres_star.rows, teacher.u)
        columns = (centres.columns, student.v), (centres_star.columns, teacher.v)
        return ((u, u_star), rows), (value, columns, *results)

    with sharding.mesh_of(k, k_star):
        rows = sharding.split(k), sharding.split(k_star), sharding.split(settings.log_a, -jnp.inf)
        (us, own), (value, columns, *others) = sharding.shard_map(own_rows, rows, settings)
        aux = _join_scalings(len(k), k.shape[1], us, others)
    return (value, aux), (k, k_star, own, columns, settings, aux)


def _affinities_bwd(options: _Options, residuals: Any, cotangents: Any) -> Any:
    """Computes (P - P*)/eps from the log-scalings of both plans."""
    k, k_star, own, columns, settings, aux = residuals

    def own_rows(axes: sharding.Axes, rows: Any, shared: Any) -> Any:
        (k, k_star, own), (columns, epsilons, scale) = rows, shared
        p, p_star = (
            jnp.exp(_Centred(Centres(row, column), u, v, epsilon).log_plan(affinity))
            for affinity, (row, u), (column, v), epsilon in zip(
                (k, k_star), own, columns, epsilons, strict=True
            )
        )
        return scale * (p - p_star) / epsilons[0], ()

    with sharding.mesh_of(k, k_star):
        solved = aux.solved
        scale = jnp.where(solved, cotangents[0], jnp.nan)
        shared = columns, (settings.epsilon, settings.epsilon_star), scale
        rows = sharding.split(k), sharding.split(k_star), own
        gradient, _ = sharding.shard_map(own_rows, rows, shared)
        # With Explicit mesh axes the gradient must have the sharding of K.
        gradient = sharding.like(sharding.join(gradient, len(k)), k)
    return gradient, jnp.zeros_like(k_star), _zeros(settings)


_klot_of_affinities.defvjp(_affinities_fwd, _affinities_bwd)


# --- from features -----------------------------------------------------------------------------


class _Features(NamedTuple):
    """Raw features of the student (f, g) and of the teacher (z, w)."""

    f: Float[Array, "n d"]
    g: Float[Array, "m d"]
    z: Float[Array, "n e"]
    w: Float[Array, "m e"]

    @classmethod
    def cast(cls, *arrays: ArrayLike) -> _Features:
        """Casts to float64 if any array is, else to float32 except for pairs of bfloat16 arrays."""
        given, floats = [affinity.as_array(x) for x in arrays], affinity.as_floats(*arrays)
        if floats[0].dtype == jnp.float32:
            # Products of two bfloat16 numbers are exact in float32, so a cast would only cost
            # memory.
            student, teacher = (
                x.dtype == y.dtype == jnp.bfloat16 for x, y in (given[:2], given[2:])
            )
            kept = student, student, teacher, teacher
            floats = tuple(x if keep else y for keep, x, y in zip(kept, given, floats, strict=True))
        return cls(*floats)

    def without_padding(self, settings: _Settings) -> _Features:
        """Replaces rows of weight zero by zeros, because they may be NaN."""
        padded = jnp.isneginf(settings.log_a)[:, None], jnp.isneginf(settings.log_b)[:, None]
        return _Features(*(jnp.where(padded[i % 2], 0.0, x) for i, x in enumerate(self)))


def _through_norm(gradient: Array, x: Array, factor: Any) -> Array:
    """Returns factor times the gradient in x, given the gradient in x/||x||."""
    rows, scale = affinity.as_float(x), affinity.inverse_norms(x)
    # The Jacobian of x/||x|| removes the component along x and divides by ||x||.
    along = jnp.sum(gradient * rows, axis=1) * scale * scale
    return ((gradient - along[:, None] * rows) * (scale * factor)[:, None]).astype(x.dtype)


class _Solved(NamedTuple):
    """A solved plan: its kernel and its scalings."""

    kernel: Kernel
    state: KernelState
    scalings: Scalings

    def measured(self, rows: Array, columns: Array, weights: Any, tolerance: Array) -> Scalings:
        """Returns the scalings with the error of the plan that `_multiply` computed.

        Args:
            rows: Row sums of the plan.
            columns: Column sums of this device's rows.
            weights: Weights of rows and columns.
            tolerance: Marginal error that was asked for.

        Returns:
            The scalings.
        """
        (a, b), axes = weights, self.kernel.axes
        # Row sums are complete on their device. Column sums are added up over devices.
        in_rows = sharding.psum(jnp.sum(jnp.abs(rows - a)), axes)
        in_columns = jnp.sum(jnp.abs(sharding.psum(columns, axes) - b))
        return self.scalings.measured(jnp.maximum(in_rows, in_columns), tolerance)

    def without_matrix(self) -> _Solved:
        """Frees the stored kernel. Rows of the plan are then computed when they are needed."""
        kernel = self.kernel._replace(block_size=blocks.PRODUCT_ROWS)
        empty = sharding.vary_like(jnp.zeros(0, self.state.p.dtype), self.state.p)
        return _Solved(kernel, self.state._replace(matrix=empty), self.scalings)


def _solve_features(
    options: _Options,
    axes: sharding.Axes,
    x: Array,
    y: Array,
    weights: tuple[Array, Array],
    epsilon: Array,
    tolerance: Array,
    init_v: Array | None,
    *,
    teacher: bool,
) -> _Solved:
    """Solves the plan of the teacher's or the student's features from this device's rows."""
    storage, own = options.storage, options.algorithms
    precision = own.teacher if teacher else own.student
    # Every device needs all columns in every block, so they are gathered once.
    cosines = Cosines.of(x, sharding.all_gather(y, axes), precision)
    # The student needs too few sweeps for an int8 kernel to pay off if its kernel is stored.
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
    """Sums over P - P*, and the marginals of P*. F and G are normalised.

    Attributes:
        right: (P - P*) G.
        left: (P - P*)^T F.
        rows: (P - P*) 1.
        columns: (P - P*)^T 1.
        moment: Sum of P log(P / (a b)) - P* log(P* / (a b)).
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
    student: _Solved, teacher: _Solved, weights: tuple[Array, Array], options: _Options
) -> _Products:
    """Multiplies P - P* with the student's features, a block of rows at a time."""
    cosines: Any = student.kernel.affinity
    g = affinity.as_float(cosines.g) * cosines.g_scale[:, None]
    product = functools.partial(affinity.dot, precision=options.algorithms.gradient)

    def body(block: Block, sums: _Products) -> _Products:
        plan, moment = student.kernel.plan_rows(student.state, block, *weights)
        star, moment_star = teacher.kernel.plan_rows(teacher.state, block, *weights)
        # Subtracted before the product: one product instead of two, and no cancellation after it.
        difference = plan - star
        return _Products(
            right=block.add(sums.right, product(difference, g)),
            left=sums.left + product(difference.T, cosines.left(block)),
            rows=block.add(sums.rows, jnp.sum(difference, axis=1)),
            columns=sums.columns + jnp.sum(difference, axis=0),
            moment=sums.moment + jnp.sum(moment - moment_star),
            rows_star=block.add(sums.rows_star, jnp.sum(star, axis=1)),
            columns_star=sums.columns_star + jnp.sum(star, axis=0),
        )

    p, q = student.state.p, student.state.q
    sides = jnp.zeros((len(p), g.shape[1]), p.dtype), jnp.zeros(g.shape, p.dtype)
    sums = jnp.zeros_like(p), jnp.zeros_like(q)
    # The marginals of both plans are summed in the same pass as the products.
    nothing = _Products(*sides, *sums, jnp.zeros((), p.dtype), *sums)
    rows = options.storage.block_size or blocks.BUILD_ROWS
    if options.storage.both:
        # There is memory for larger blocks, which move fewer bytes. An eighth of the rows keeps
        # blocks small against the stored kernels.
        rows = min(blocks.PRODUCT_ROWS, max(rows, len(p) // 8))
    with jax.named_scope("products"):
        return over_rows(len(p), rows, body, sharding.vary_like(nothing, p))


def _divergence(
    student: _Solved, products: _Products, weights: tuple[Array, Array], epsilon: Array
) -> Array:
    """Computes this device's part of KL(P* || P).

    With L = log(P / (a b)) = K/eps + (p + x) + (q + y), and L* likewise,

        KL(P* || P) = <P*, L* - L> = <P - P*, L> - (<P, L> - <P*, L*>),

    where the last bracket is `moment`. In exact arithmetic the marginals of P - P* are zero. They
    are used as computed, because otherwise the rounding errors of large K/eps would not cancel.
    """
    (a, b), state = weights, student.state
    cosines: Any = student.kernel.affinity
    # Potentials of rows and columns of weight zero are not finite, or arbitrary.
    in_rows = jnp.sum(jnp.where(a > 0, products.rows * (state.p + state.x), 0.0))
    in_columns = jnp.sum(jnp.where(b > 0, products.columns * (state.q + state.y), 0.0))
    # <P - P*, K> = <(P - P*) G, F>, from the product that the gradient needs anyway.
    f = affinity.as_float(cosines.f)
    cross = jnp.sum(jnp.sum(products.right * f, axis=1) * cosines.f_scale) / epsilon
    return in_rows + in_columns + cross - products.moment


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _klot_of_features(
    options: _Options, features: _Features, settings: _Settings
) -> tuple[Array, KlotAux]:
    """Computes KL(P* || P) of cosine affinities. Differentiable in f and g."""
    return _features_fwd(options, features, settings)[0]


def _features_fwd(options: _Options, features: _Features, settings: _Settings) -> Any:
    """Solves both plans and computes the value and the gradient.

    The gradient is computed in the forward pass, while the kernels exist.
    """
    f, g, z, w = constant(_FEATURES_ERROR, features)

    def own_rows(axes: sharding.Axes, rows: Any, settings: _Settings) -> Any:
        f, g, z, w, log_a = rows
        tolerance, logs = settings.tolerance, (log_a, settings.log_b)
        weights = jnp.exp(logs[0]), jnp.exp(logs[1])
        solve_one = functools.partial(_solve_features, options, axes, tolerance=tolerance)
        with jax.named_scope("teacher_plan"):
            epsilon, init_v = settings.epsilon_star, settings.init_v_star
            teacher = solve_one(z, w, logs, epsilon, init_v=init_v, teacher=True)
            # If two kernels do not fit, frees the teacher's before the student's is built.
            if options.storage.block_size is None and not options.storage.both:
                teacher = teacher.without_matrix()
        with jax.named_scope("student_plan"):
            # The dependency keeps XLA from solving both at once, in twice the memory.
            epsilon = _depend_on(settings.epsilon, teacher.scalings)
            student = solve_one(f, g, logs, epsilon, init_v=settings.init_v, teacher=False)
        products = _multiply(student, teacher, weights, options)
        value = sharding.psum(_divergence(student, products, weights, settings.epsilon), axes)
        star = products.rows_star, products.columns_star
        # The marginals of P are those of P - P* plus those of P*.
        marginals = products.rows + star[0], products.columns + star[1]
        target = teacher.measured(*star, weights, tolerance)
        plan = student.measured(*marginals, weights, tolerance)
        solved = KlotAux(plan, target).solved
        value, factor = (jnp.where(solved, x, jnp.nan) for x in (value, 1 / settings.epsilon))
        df = _through_norm(products.right, f, factor)
        # Sums over all devices, and leaves each device the gradient of its own columns.
        dg = _through_norm(sharding.psum_scatter(products.left, axes), g, factor)
        return (df, dg, plan.u, target.u), (value, plan[1:], target[1:])

    with sharding.mesh_of(*features):
        rows = (*map(sharding.split, (f, g, z, w)), sharding.split(settings.log_a, -jnp.inf))
        (df, dg, *us), (value, *others) = sharding.shard_map(
            own_rows, rows, _split_columns(settings)
        )
        aux = _join_scalings(len(f), len(g), us, others)
        df, dg = (sharding.like(sharding.join(dx, len(x)), x) for dx, x in ((df, f), (dg, g)))
    return (value, aux), (df, dg, features, settings)


def _split_columns(settings: _Settings) -> _Settings:
    """Pads log_b and both initial v, so that all devices have equally many columns."""
    v, v_star = jax.tree.map(sharding.split, (settings.init_v, settings.init_v_star))
    log_b = sharding.split(settings.log_b, -jnp.inf)
    return settings._replace(log_b=log_b, init_v=v, init_v_star=v_star)


def _features_bwd(options: _Options, residuals: Any, cotangents: Any) -> Any:
    """Multiplies the gradient of the forward pass by the cotangent of the value."""
    df, dg, features, settings = residuals
    # The cotangent of aux is zero, because `_call` stops its gradient.
    gradients = ((cotangents[0] * dx).astype(dx.dtype) for dx in (df, dg))
    return _Features(*gradients, *_zeros((features.z, features.w))), _zeros(settings)


_klot_of_features.defvjp(_features_fwd, _features_bwd)


# --- public functions ---------------------------------------------------------------------------

# Compiled once here, for calls outside of `jit`.
_affinities = jax.jit(_klot_of_affinities, static_argnums=0)
_features = jax.jit(_klot_of_features, static_argnums=0)


class _KlotOptions(TypedDict, total=False):
    """Keyword options of `klot`, for type checkers: `return_aux` decides the type of the result."""

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
    """Keyword options of `klot_from_embeddings`, for type checkers."""

    block_size: int | None


def total_mass(marginals: str, n: int, m: int, log_a: Array | None = None) -> Any:
    """Returns the total mass of the plans: 1, or the number of rows that are not padding.

    Args:
        marginals: "prob" or "bistochastic".
        n: Number of rows.
        m: Number of columns.
        log_a: Log-weights of the rows, or None without padding.

    Returns:
        The mass, by which value and gradient are multiplied.

    Raises:
        InputError: `marginals` is unknown, or "bistochastic" with n != m.

    Example:
        >>> total_mass("bistochastic", 5, 5)
        5
    """
    checks.choice("marginals", marginals, MARGINALS)
    if marginals == "prob":
        return 1
    if n != m:
        raise checks.InputError(
            f"marginals='bistochastic' needs a square affinity, got {n} x {m}; use 'prob'"
        )
    return n if log_a is None else jnp.sum(~jnp.isneginf(log_a), dtype=log_a.dtype)


def _settings(
    message: str,
    n: int,
    m: int,
    dtype: Any,
    *,
    log_a: ArrayLike | None,
    log_b: ArrayLike | None,
    init_v: Any,
    max_iterations: int,
    **scalars: Any,
) -> _Settings:
    """Checks and casts the options of a loss. Differentiating them raises TypeError(message)."""
    check_limits(max_iterations=max_iterations, **scalars)
    starts: Any = (None, None)
    if init_v is not None:
        if not isinstance(init_v, tuple | list) or len(init_v) != 2:
            raise checks.InputError(
                f"init_v must be a pair of arrays (v, v_star), got {type(init_v).__name__}"
            )
        # The converged plan does not depend on the start, so a zero derivative is correct here.
        starts = jax.lax.stop_gradient([jnp.asarray(v, dtype) for v in init_v])
    settings = _Settings(
        **{name: jnp.asarray(value, dtype) for name, value in scalars.items()},
        log_a=log_weights("log_a", log_a, n, dtype),
        log_b=log_weights("log_b", log_b, m, dtype),
        init_v=starts[0],
        init_v_star=starts[1],
    )
    return constant(message, settings)


def _call(
    message: str, function: Callable[..., Any], options: _Options, *arrays: Any, mass: Any
) -> tuple[Array, KlotAux]:
    """Calls a compiled loss, and replaces JAX's error about forward mode by `message`."""
    try:
        value, aux = function(options, *sharding.vary_alike(arrays))
    except TypeError as error:
        # JAX's own message names an internal function and no remedy.
        if "forward-mode" in str(error):
            raise TypeError(message) from error
        raise
    return mass * value, jax.lax.stop_gradient(aux)


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
    """Computes KLOT(K || K*) = KL(P* || P) with P = OT_eps(K) and P* = OT_eps*(K*).

    The gradient in K is (P - P*)/eps in closed form. It is exact if both plans have converged,
    which `return_aux` shows. Sinkhorn is not differentiated. The backward pass keeps K, K* and
    vectors of length n or m. `K_star` is a constant and receives no gradient.

    Args:
        K: Student affinity, shape [n, m].
        K_star: Teacher affinity, shape [n, m].
        epsilon: Regularisation of the student's plan.
        epsilon_star: Regularisation of the teacher's plan.
        marginals: "prob", plans of total mass 1 as in the published code, or "bistochastic", rows
            and columns of mass 1 as in the paper. The latter multiplies value and gradient by the
            number of rows with a positive weight. See docs/paper.md.
        log_a: Log-weights of the rows, -inf for padding. Uniform by default.
        log_b: Log-weights of the columns, -inf for padding. Uniform by default.
        tolerance: Marginal error at which each solve stops, see `sinkhorn`.
        max_iterations: Number of iterations at which each solve stops. Static.
        init_v: (v, v_star), column log-scalings to start from, such as `aux.student.v` and
            `aux.teacher.v` of an earlier call.
        precision: Precision of all matrix products, "highest", "high" or "default". Static. By
            default sums over the kernel are "highest", and products of features are as exact as
            KLOT needs on this device, see `device`.
        return_aux: True to return a `KlotAux` as well.

    Returns:
        The loss, or (loss, aux).

    Raises:
        InputError: A shape or an option is invalid.
        TypeError: For derivatives in forward mode, of second order, or in the options.

    Example:
        >>> K, K_star = jnp.eye(3) * 0.2, jnp.eye(3)
        >>> loss, gradient = jax.jit(jax.value_and_grad(klot))(K, K_star)
        >>> float(loss), gradient[0].tolist()
        (0.036, [-0.236, 0.118, 0.118])

    References:
        SOTAlign, ICML 2026, the definition of KLOT and the lemma on its gradient.
    """
    # Checked before `custom_vjp` and `jit`, because inside of them arguments have no names.
    checks.static(precision=precision, return_aux=return_aux)
    affinity.check_affinities(K, K_star)
    k, k_star = affinity.as_floats(K, K_star)
    n, m = k.shape
    given: Any = {"epsilon": epsilon, "epsilon_star": epsilon_star, "tolerance": tolerance}
    given |= {"log_a": log_a, "log_b": log_b, "init_v": init_v, "max_iterations": max_iterations}
    settings = _settings(_AFFINITIES_ERROR, n, m, k.dtype, **given)
    # Plans are always solved with mass 1, and only the result is scaled.
    mass = total_mass(marginals, n, m, settings.log_a)
    if log_a is not None or log_b is not None:
        k, k_star = (without_padding(x, settings.log_a, settings.log_b) for x in (k, k_star))
    options = _Options.create(max_iterations, precision)
    value, aux = _call(_AFFINITIES_ERROR, _affinities, options, k, k_star, settings, mass=mass)
    return (value, aux) if return_aux else value


def klot_reference(
    K: Float[Array, "n m"],
    K_star: Float[Array, "n m"],
    *,
    epsilon: Any = 0.05,
    epsilon_star: Any = 0.005,
    iterations: int = 100,
    symmetric: bool = True,
) -> Float[Array, ""]:
    """Computes the paper's published loss, for comparison with `klot`.

    Both plans take a fixed number of textbook iterations, see `sinkhorn_reference`. The value is
    KL(P* || P) and the gradient (P - P*)/eps, converged or not.

    Args:
        K: Student affinity, shape [n, m].
        K_star: Teacher affinity, shape [n, m]. It receives no gradient.
        epsilon: Regularisation of the student's plan.
        epsilon_star: Regularisation of the teacher's plan.
        iterations: Number of iterations of both solves.
        symmetric: True to end with the half-step of the published code. See docs/paper.md.

    Returns:
        The loss.

    Example:
        >>> print(klot_reference(jnp.eye(3) * 0.2, jnp.eye(3)).round(4))
        0.0359

    References:
        SOTAlign, ICML 2026, and its published code.
    """
    plain = functools.partial(reference, iterations=iterations, symmetric=symmetric)
    plan = plain(jax.lax.stop_gradient(K), epsilon=epsilon)
    target = plain(jax.lax.stop_gradient(K_star), epsilon=epsilon_star)
    p, p_star = plan.matrix(), target.matrix()
    value = jnp.sum(p_star * (target.log_matrix() - plan.log_matrix()))
    # The surrogate has the gradient (P - P*)/eps, and cancels in the value.
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
    """Computes `klot(cosine(f, g), cosine(f_star, g_star))` without an n x m residual.

    Rows are L2-normalised inside. The plans are multiplied with the features in the forward pass,
    so the backward pass keeps only arrays of the features' size:

        d/df = (P - P*) g / eps,    d/dg = (P - P*)^T f / eps    (on normalised rows).

    Computation follows data. If rows are placed on a mesh, or if a mesh is in context, the loss is
    split over its devices. Arrays that are created inside `jit` show no mesh: use `jax.set_mesh`
    for them. Inside a `shard_map` every device solves a problem of its own, and the losses can be
    averaged by a `pmean`. Zero rows have cosine 0 with all others, and no gradient.

    Args:
        f: Student features of the rows, shape [n, d]. If f and g are bfloat16, their affinity is
            one bfloat16 product, which is exact.
        g: Student features of the columns, shape [m, d].
        f_star: Teacher features of the rows, shape [n, e]. They receive no gradient.
        g_star: Teacher features of the columns, shape [m, e]. They receive no gradient.
        epsilon: Regularisation of the student's plan.
        epsilon_star: Regularisation of the teacher's plan.
        marginals: "prob" or "bistochastic", see `klot`.
        log_a: Log-weights of the rows, see `klot`.
        log_b: Log-weights of the columns, see `klot`.
        tolerance: Marginal error at which each solve stops.
        max_iterations: Number of iterations at which each solve stops. Static.
        init_v: (v, v_star), column log-scalings to start from, see `klot`.
        block_size: Rows per block of kernels that are recomputed in every iteration, in
            O((n + m) (d + e) + m block_size) memory. By default kernels are stored if they fit into
            half of the device's memory, see `blocks.storage`. Value and gradient are the same up
            to rounding. Static.
        precision: Precision of all matrix products, see `klot`. Static.
        return_aux: True to return a `KlotAux` as well.

    Returns:
        The loss, or (loss, aux).

    Raises:
        InputError: A shape or an option is invalid.
        TypeError: For derivatives in forward mode, of second order, or in the options.

    Example:
        >>> f, g = jnp.eye(3), jnp.eye(3) + 0.5
        >>> print(jax.jit(klot_from_embeddings)(f, g, f, g, epsilon_star=0.05).round(4))
        0.0

    References:
        SOTAlign, ICML 2026, the lemma on the gradient of KLOT.
    """
    checks.static(precision=precision, block_size=block_size, return_aux=return_aux)
    checks.whole(1, or_none=True, block_size=block_size)
    affinity.check_features(f, g, f_star, g_star)
    features = _Features.cast(f, g, f_star, g_star)
    n, m = len(features.f), len(features.g)
    # Potentials and plans of bfloat16 features are float32.
    dtype = jnp.float64 if features.f.dtype == jnp.float64 else jnp.float32
    given: Any = {"epsilon": epsilon, "epsilon_star": epsilon_star, "tolerance": tolerance}
    given |= {"log_a": log_a, "log_b": log_b, "init_v": init_v, "max_iterations": max_iterations}
    settings = _settings(_FEATURES_ERROR, n, m, dtype, **given)
    mass = total_mass(marginals, n, m, settings.log_a)
    if log_a is not None or log_b is not None:
        features = features.without_padding(settings)
    # A given block size asks for the least memory: no kernel is stored, not even in int8.
    storage = blocks.Storage(block_size, both=False)
    if block_size is None:
        with sharding.mesh_of(*features):
            storage = blocks.storage(sharding.share(n), m, dtype)
    options = _Options.create(max_iterations, precision, storage)
    value, aux = _call(_FEATURES_ERROR, _features, options, features, settings, mass=mass)
    return (value, aux) if return_aux else value
