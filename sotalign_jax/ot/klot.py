"""KLOT, the divergence between two transport plans, with its gradient in closed form.

    KLOT(K || K*) = KL(P* || P),    P = OT_eps(K),    P* = OT_eps*(K*)

Its gradient in an affinity K is (P - P*)/eps, because eps KLOT is the Fenchel-Young loss of the
entropic transport problem. For features with unit rows F, G and K = F G^T the gradients are

    d/dF = (P - P*) G / eps,    d/dG = (P - P*)^T F / eps,

and the backward pass keeps only arrays of the features' size. Sinkhorn is never differentiated: by
Danskin's theorem (the envelope theorem), the gradient of an optimal value needs only the optimal
plan.

Both losses are one function of two affinities, `_klot`. It solves the teacher's plan and then the
student's, and pulls (P - P*)/eps back to the student's arrays while both plans exist, so that the
backward pass only multiplies by a number. For features, P - P* is multiplied with them a block of
rows at a time. A stored kernel provides the rows of its plan directly, whereas a streamed kernel
computes them again (`blocks.Storage`). Rows are split over the devices of a mesh, see `sharding`.

References:
    SOTAlign, ICML 2026: the lemma on the gradient of KLOT.
    J. M. Danskin, "The theory of max-min", Springer 1967.
    M. Blondel, A. F. T. Martins and V. Niculae, "Learning with Fenchel-Young losses", JMLR 21
    (2020).
"""

from __future__ import annotations  # help() then shows the annotations as they are written

import dataclasses
import functools
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from sotalign_jax import checks
from sotalign_jax.ot import affinity, blocks, device, sharding
from sotalign_jax.ot.affinity import ArrayLike, Features
from sotalign_jax.ot.blocks import Block, over_rows
from sotalign_jax.ot.kernel import Kernel, Operator
from sotalign_jax.ot.sinkhorn import (
    Weights,
    check_limits,
    constant,
    reference,
    solve_matrix,
    without_padding,
)
from sotalign_jax.ot.solver import MAX_ITERATIONS, Options, Scalings, Status, goal, solve

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


_Affinity = Array | Features


def _derivatives_error(affinity: _Affinity) -> str:
    """Returns the message for derivatives that are not supported."""
    of_features = isinstance(affinity, Features)
    name, arguments = ("klot_from_embeddings", "f and g") if of_features else ("klot", "K")
    return (
        f"{name} supports only first derivatives in {arguments} by reverse mode (jax.grad, "
        "jax.vjp, jax.value_and_grad); pass jax.lax.stop_gradient of other differentiated "
        "arguments, such as epsilon and the log-weights"
    )


def _after(options: Options, computed: Any) -> Options:
    """Returns options that depend on `computed`, so that XLA runs two solves in turn.

    The second solve can then use the memory of the first. The dependency adds 0 to epsilon, or the
    smallest normal number if entries of `computed` sum to NaN. Neither changes a digit. Compilers
    would remove an optimisation barrier or a product with zero.
    """
    epsilon = options.epsilon
    # One entry of each array is enough for a dependency on all of it.
    touched = sum(jnp.ravel(leaf)[0].astype(epsilon.dtype) for leaf in jax.tree.leaves(computed))
    nothing = jnp.where(jnp.isnan(touched), jnp.finfo(epsilon.dtype).tiny, 0)
    return dataclasses.replace(options, epsilon=epsilon + nothing)


# --- one loss of two affinities ----------------------------------------------------------------


class _Divergence(NamedTuple):
    """Result of `_from_matrices` or `_from_features`.

    Attributes:
        value: KL(P* || P).
        gradient: Gradient in the student's affinity.
        aux: Both plans' scalings.
    """

    value: Float[Array, ""]
    gradient: _Affinity
    aux: KlotAux


@jax.custom_vjp
def _klot(
    student: _Affinity,
    teacher: _Affinity,
    weights: Weights,
    options: Options,
    options_star: Options,
) -> tuple[Array, KlotAux]:
    """Computes KL(P* || P) and both plans' scalings. Differentiable in the student's affinity."""
    return _klot_fwd(student, teacher, weights, options, options_star)[0]


def _klot_fwd(
    student: _Affinity,
    teacher: _Affinity,
    weights: Weights,
    options: Options,
    options_star: Options,
) -> Any:
    """Computes value and gradient. The teacher is solved with `options_star`."""
    # Second derivatives differentiate this function, and raise here.
    student, teacher = constant(_derivatives_error(student), (student, teacher))
    of_features = isinstance(student, Features)

    def own_rows(axes: sharding.Axes, rows: Any, shared: Any) -> tuple[Any, Any]:
        (student, teacher, log_a), (log_b, options, options_star) = rows, shared
        divergence = _from_features if of_features else _from_matrices
        value, gradient, aux = divergence(
            axes, student, teacher, Weights(log_a, log_b), options, options_star
        )
        # The loss of plans that do not exist is NaN, and not a number that looks plausible.
        value, gradient = jax.tree.map(
            lambda x: jnp.where(aux.solved, x, jnp.nan), (value, gradient)
        )
        return (gradient, [plan.u for plan in aux]), (value, [plan[1:] for plan in aux])

    with sharding.mesh_of(*jax.tree.leaves((student, teacher))):
        shared = weights.log_b, options, options_star
        # Features of columns are split like those of rows, so vectors of columns are padded alike.
        if of_features:
            log_b = sharding.split(weights.log_b, -jnp.inf)
            shared = log_b, _split_init_v(options), _split_init_v(options_star)
        log_a = sharding.split(weights.log_a, -jnp.inf)
        rows = *jax.tree.map(sharding.split, (student, teacher)), log_a
        (gradient, us), (value, others) = sharding.shard_map(own_rows, rows, shared)
        aux = _without_padding(student.shape, us, others)
        # With Explicit mesh axes the gradient must have the sharding of the student.
        gradient = jax.tree.map(
            lambda dx, x: sharding.like(sharding.join(dx, len(x)), x), gradient, student
        )
    return (value, aux), (gradient, teacher, weights, options, options_star)


def _klot_bwd(residuals: Any, cotangents: Any) -> Any:
    """Multiplies the gradient of the forward pass by the cotangent of the value."""
    gradient, *constants = residuals
    # The cotangent of aux is zero, because `_call` stops its gradient.
    scaled = jax.tree.map(lambda dx: (cotangents[0] * dx).astype(dx.dtype), gradient)
    return scaled, *jax.tree.map(jnp.zeros_like, constants)


_klot.defvjp(_klot_fwd, _klot_bwd)


def _split_init_v(options: Options) -> Options:
    """Pads the initial v to equally many columns for each device."""
    return dataclasses.replace(options, init_v=jax.tree.map(sharding.split, options.init_v))


def _without_padding(shape: tuple[int, ...], us: Any, others: Any) -> KlotAux:
    """Joins u and the other fields of both plans' scalings, without padding."""
    n, m = shape
    both = zip(us, others, strict=True)
    return KlotAux(*(Scalings(sharding.join(u, n), v[:m], *rest) for u, (v, *rest) in both))


# --- from matrices -----------------------------------------------------------------------------


def _from_matrices(
    axes: sharding.Axes,
    k: Array,
    k_star: Array,
    weights: Weights,
    options: Options,
    options_star: Options,
) -> _Divergence:
    """Solves both plans of this device's rows of K, and subtracts their matrices."""
    target = solve_matrix(k_star, weights, options_star, axes)
    plan = solve_matrix(k, weights, _after(options, target.scalings), axes)
    log_p, log_p_star = plan.log_matrix(), target.log_matrix()
    p_star = jnp.exp(log_p_star)
    # 0 log 0 counts as 0. The product would be NaN where log P is -inf.
    value = jnp.sum(jnp.where(p_star == 0, 0.0, p_star * (log_p_star - log_p)))
    gradient = (jnp.exp(log_p) - p_star) / options.epsilon
    aux = KlotAux(plan.scalings, target.scalings)
    return _Divergence(sharding.psum(value, axes), gradient, aux)


# --- from features -----------------------------------------------------------------------------


def _cast(*features: ArrayLike) -> tuple[Array, ...]:
    """Casts f, g, f_star, g_star to float64 if one is, else to float32 but for bfloat16 pairs."""
    given = tuple(affinity.as_array(x) for x in features)
    f, g, z, w = affinity.as_floats(*given)
    # Products of two bfloat16 numbers are exact in float32, so a cast would only cost memory.
    if f.dtype == jnp.float32 and given[0].dtype == given[1].dtype == jnp.bfloat16:
        f, g = given[:2]
    if z.dtype == jnp.float32 and given[2].dtype == given[3].dtype == jnp.bfloat16:
        z, w = given[2:]
    return f, g, z, w


class _KernelPlan(NamedTuple):
    """A solved plan: its kernel, with the operator that sums over it, and its scalings."""

    operator: Operator
    kernel: Kernel
    scalings: Scalings

    def measured(self, rows: Array, columns: Array, weights: Weights, tolerance: Array) -> Scalings:
        """Returns the scalings with the error of the plan whose marginals `_multiply` summed.

        Args:
            rows: Row sums of the plan.
            columns: Column sums of this device's rows.
            weights: Log-weights of these rows and of all columns.
            tolerance: Marginal error that was asked for.

        Returns:
            The scalings.
        """
        axes = self.operator.axes
        # Row sums are complete on their device. Column sums are added up over devices.
        in_rows = jnp.sum(jnp.abs(rows - jnp.exp(weights.log_a)))
        in_columns = jnp.sum(jnp.abs(sharding.psum(columns, axes) - jnp.exp(weights.log_b)))
        error = jnp.maximum(sharding.psum(in_rows, axes), in_columns)
        return self.scalings.measured(error, tolerance)

    def without_matrix(self) -> _KernelPlan:
        """Frees the stored kernel. Rows of the plan are then computed when they are needed."""
        operator = self.operator._replace(block_size=blocks.PRODUCT_ROWS)
        empty = sharding.vary_like(jnp.zeros(0, self.kernel.u.dtype), self.kernel.u)
        return _KernelPlan(operator, self.kernel._replace(matrix=empty), self.scalings)


def _solve_features(
    features: Features, weights: Weights, options: Options, axes: sharding.Axes
) -> _KernelPlan:
    """Solves the plan of features from this device's rows."""
    block_size, _, int8 = features.storage
    operator = Operator(features.cosines(axes), block_size, int8, axes, options.precision)
    scalings, kernel = solve(
        operator,
        *weights,
        epsilon=options.epsilon,
        tolerance=goal(options.tolerance, 1.0, options.epsilon),
        max_iterations=options.max_iterations,
        init_v=options.init_v,
    )
    return _KernelPlan(operator, kernel, scalings)


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
    student: _KernelPlan, teacher: _KernelPlan, weights: Weights, features: Features
) -> _Products:
    """Multiplies P - P* with the student's features, a block of rows at a time."""
    cosines: Any = student.operator.affinity
    g = affinity.as_float(cosines.g) * cosines.g_scale[:, None]
    product = functools.partial(affinity.dot, precision=features.plan_precision)
    a, b = jnp.exp(weights.log_a), jnp.exp(weights.log_b)

    def body(block: Block, sums: _Products) -> _Products:
        plan, moment = student.operator.plan_rows(student.kernel, block, a, b)
        star, moment_star = teacher.operator.plan_rows(teacher.kernel, block, a, b)
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

    u, v = student.kernel.u, student.kernel.v
    sides = jnp.zeros((len(u), g.shape[1]), u.dtype), jnp.zeros(g.shape, u.dtype)
    sums = jnp.zeros_like(u), jnp.zeros_like(v)
    # The marginals of both plans are summed in the same pass as the products.
    nothing = _Products(*sides, *sums, jnp.zeros((), u.dtype), *sums)
    rows = features.storage.block_size or blocks.BUILD_ROWS
    if features.storage.both:
        # There is memory for larger blocks, which move fewer bytes. An eighth of the rows keeps
        # blocks small against the stored kernels.
        rows = min(blocks.PRODUCT_ROWS, max(rows, len(u) // 8))
    with jax.named_scope("products"):
        return over_rows(len(u), rows, body, sharding.vary_like(nothing, u))


def _fenchel_young(
    student: _KernelPlan, products: _Products, weights: Weights, epsilon: Array
) -> Array:
    """Computes this device's part of KL(P* || P).

    With L = log(P / (a b)) = K/eps + u + v, and L* likewise,

        KL(P* || P) = <P*, L* - L> = <P - P*, L> - (<P, L> - <P*, L*>),

    where the last bracket is `moment`. In exact arithmetic the marginals of P - P* are zero. They
    are used as computed, because otherwise the rounding errors of large K/eps would not cancel.
    """
    kernel = student.kernel
    cosines: Any = student.operator.affinity
    # Potentials of rows and columns of weight zero are not finite, or arbitrary.
    a, b = jnp.exp(weights.log_a), jnp.exp(weights.log_b)
    in_rows = jnp.sum(jnp.where(a > 0, products.rows * (kernel.absorbed_u + kernel.u), 0.0))
    in_columns = jnp.sum(jnp.where(b > 0, products.columns * (kernel.absorbed_v + kernel.v), 0.0))
    # <P - P*, K> = <(P - P*) G, F>, from the product that the gradient needs anyway.
    f = affinity.as_float(cosines.f)
    cross = jnp.sum(jnp.sum(products.right * f, axis=1) * cosines.f_scale) / epsilon
    return in_rows + in_columns + cross - products.moment


def _from_features(
    axes: sharding.Axes,
    student: Features,
    teacher: Features,
    weights: Weights,
    options: Options,
    options_star: Options,
) -> _Divergence:
    """Solves both plans of this device's rows, and multiplies their difference with features."""
    with jax.named_scope("teacher_plan"):
        target = _solve_features(teacher, weights, options_star, axes)
        # If two kernels do not fit, frees the teacher's before the student's is built.
        if teacher.storage.block_size is None and not teacher.storage.both:
            target = target.without_matrix()
    with jax.named_scope("student_plan"):
        plan = _solve_features(student, weights, _after(options, target.scalings), axes)
    products = _multiply(plan, target, weights, student)
    value = sharding.psum(_fenchel_young(plan, products, weights, options.epsilon), axes)
    star_rows, star_columns = products.rows_star, products.columns_star
    # The marginals of P are those of P - P* plus those of P*.
    rows, columns = products.rows + star_rows, products.columns + star_columns
    aux = KlotAux(
        plan.measured(rows, columns, weights, options.tolerance),
        target.measured(star_rows, star_columns, weights, options_star.tolerance),
    )
    # Sums over all devices, and leaves each device the gradient of its own columns.
    left = sharding.psum_scatter(products.left, axes)
    return _Divergence(value, student.pull(products.right, left, 1 / options.epsilon), aux)


# --- public functions ---------------------------------------------------------------------------

# Compiled once here, for calls outside of `jit`.
_compiled = jax.jit(_klot)


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


def _options(
    init_v: Any,
    dtype: Any,
    *,
    epsilon: Any,
    epsilon_star: Any,
    tolerance: Any,
    max_iterations: int,
    precision: jax.lax.PrecisionLike,
) -> tuple[Options, Options]:
    """Checks and casts the options of the student's solve and of the teacher's."""
    check_limits(
        max_iterations=max_iterations,
        tolerance=tolerance,
        epsilon=epsilon,
        epsilon_star=epsilon_star,
    )
    starts: Any = (None, None)
    if init_v is not None:
        if not isinstance(init_v, tuple | list) or len(init_v) != 2:
            raise checks.InputError(
                f"init_v must be a pair of arrays (v, v_star), got {type(init_v).__name__}"
            )
        # The converged plan does not depend on the start, so a zero derivative is correct here.
        starts = jax.lax.stop_gradient([jnp.asarray(v, dtype) for v in init_v])
    limit = jnp.asarray(tolerance, dtype)
    sums = affinity.HIGHEST if precision is None else precision
    student, teacher = (
        Options(jnp.asarray(value, dtype), limit, start, max_iterations, sums)
        for value, start in zip((epsilon, epsilon_star), starts, strict=True)
    )
    return student, teacher


def _call(
    student: _Affinity,
    teacher: _Affinity,
    weights: Weights,
    options: tuple[Options, Options],
    *,
    mass: Any,
    return_aux: bool,
) -> Any:
    """Calls the compiled loss. Derivatives that it does not support raise TypeError."""
    message = _derivatives_error(student)
    arrays = student, teacher, *constant(message, (weights, *options))
    try:
        value, aux = _compiled(*sharding.vary_alike(arrays))
    except TypeError as error:
        # JAX's own message names an internal function and no remedy.
        if "forward-mode" in str(error):
            raise TypeError(message) from error
        raise
    return (mass * value, jax.lax.stop_gradient(aux)) if return_aux else mass * value


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
    which `return_aux` shows. Sinkhorn is not differentiated. The gradient is computed with the
    value, so that the backward pass keeps this matrix alone. `K_star` is a constant and receives no
    gradient.

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
    weights = Weights.of(log_a, log_b, (n, m), k.dtype)
    options = _options(
        init_v,
        k.dtype,
        epsilon=epsilon,
        epsilon_star=epsilon_star,
        tolerance=tolerance,
        max_iterations=max_iterations,
        precision=precision,
    )
    # Plans are always solved with mass 1, and only the result is scaled.
    mass = total_mass(marginals, n, m, weights.log_a)
    if log_a is not None or log_b is not None:
        k, k_star = without_padding(k, weights), without_padding(k_star, weights)
    return _call(k, k_star, weights, options, mass=mass, return_aux=return_aux)


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
    f, g, z, w = _cast(f, g, f_star, g_star)
    n, m = len(f), len(g)
    # Potentials and plans of bfloat16 features are float32.
    dtype = jnp.float64 if f.dtype == jnp.float64 else jnp.float32
    weights = Weights.of(log_a, log_b, (n, m), dtype)
    options = _options(
        init_v,
        dtype,
        epsilon=epsilon,
        epsilon_star=epsilon_star,
        tolerance=tolerance,
        max_iterations=max_iterations,
        precision=precision,
    )
    mass = total_mass(marginals, n, m, weights.log_a)
    if log_a is not None or log_b is not None:
        # Rows of weight zero may be NaN.
        rows, columns = (jnp.isneginf(logs)[:, None] for logs in weights)
        f, z = jnp.where(rows, 0.0, f), jnp.where(rows, 0.0, z)
        g, w = jnp.where(columns, 0.0, g), jnp.where(columns, 0.0, w)
    # A given block size asks for the least memory: no kernel is stored, not even in int8.
    storage = blocks.Storage(block_size, both=False)
    if block_size is None:
        with sharding.mesh_of(f, g, z, w):
            storage = blocks.storage(sharding.share(n), m, dtype)
    own = device.profile()
    if precision is not None:
        # A user who asks for a precision gets it in every role.
        same: Any = dict.fromkeys(device.ROLES, precision)
        own = own._replace(**same)
    teacher = Features(z, w, own.teacher, own.gradient, storage)
    # The student needs too few sweeps for an int8 kernel to pay off if its kernel is stored.
    storage = storage._replace(int8=storage.int8 and storage.block_size is not None)
    student = Features(f, g, own.student, own.gradient, storage)
    return _call(student, teacher, weights, options, mass=mass, return_aux=return_aux)
