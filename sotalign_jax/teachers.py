"""Teachers: maps into a shared space that are fitted on the pairs and then frozen.

`procrustes`, `cca` and `tuned_cca` are linear, and `kernel_cca` is not. `best_cca` chooses between
the last two, and `refined_cca` refines its choice with unpaired rows. All are closed forms, which
are computed on the host in float64, and return a `Teacher`. The contrastive teacher is trained, see
`training.contrastive`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from sotalign_jax import checks
from sotalign_jax.cca import canonical, choose, features, moments
from sotalign_jax.cca import refine as refinement
from sotalign_jax.cca.canonical import pearson as pearson
from sotalign_jax.cca.features import Features, Linear
from sotalign_jax.files import MappedRows
from sotalign_jax.heads import AffineMap, Rows
from sotalign_jax.heads import Teacher as Teacher
from sotalign_jax.kernels import KernelMap

# Time grows with the cube of the landmarks. With fewer pairs than this, every pair is a landmark
# and the solution is exact.
LANDMARKS = 2000
"""Largest number of landmarks of a kernel CCA."""
REFINED_FEATURES = 512
"""Features of each modality that a refined teacher is fitted in. 1,024 gain at most half a point on
clip-art and COCO."""
# Smallest eigenvalue that `cca` divides by, so that a ridge of 0 cannot overflow.
_EIGENVALUE_FLOOR = 1e-6
Pool = Rows | MappedRows
"""Unpaired embeddings, which may be read lazily."""
Ridge = float | tuple[float, float]
"""One ridge for both sides, or one for each."""


def procrustes(
    pairs_x: Rows, pairs_y: Rows, *, dim: int | None = None, renorm: bool = False
) -> Teacher:
    """Fits orthogonal maps that maximise <A P^T, B Q^T> over P P^T = Q Q^T = I.

    With A^T B = U S V^T the solution is P = U_dim^T, Q = V_dim^T.

    Args:
        pairs_x: Paired embeddings A of the first modality, shape [n, d_x]. Rows are L2-normalised
            and centred first.
        pairs_y: Paired embeddings B of the second modality, shape [n, d_y].
        dim: Number of directions. None keeps the numerical rank.
        renorm: L2-normalises the centred rows again before fitting.

    Returns:
        The teacher.

    Raises:
        InputError: The pairs do not match or do not determine `dim` directions.

    Example:
        >>> A = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
        >>> teacher = procrustes(A, A[:, ::-1])
        >>> bool(jnp.allclose(teacher.x(A), teacher.y(A[:, ::-1]), atol=1e-5))
        True

    References:
        P. H. Schoenemann, "A generalized solution of the orthogonal Procrustes problem",
        Psychometrika 31 (1966).
    """
    return _closed_form(pairs_x, pairs_y, (np.ones_like, np.ones_like), dim=dim, renorm=renorm)


def cca(
    pairs_x: Rows,
    pairs_y: Rows,
    *,
    ridge: float = 0.1,
    power: float = 0.0,
    dim: int | None = None,
    cov_normalize: bool = True,
    renorm: bool = False,
    dtype: Any = jnp.float32,
) -> Teacher:
    """Fits a canonical correlation analysis with the paper's absolute ridge.

    Every row is mapped to x / ||x|| - mu first, where mu is the mean of the L2-normalised paired
    rows. With R_x = (S_xx + ridge I)^(-1/2), R_y likewise and R_x S_xy R_y = U diag(rho) V^T
    the maps are

        W_x = diag(rho^power) U^T R_x,    W_y = diag(rho^power) V^T R_y,

    directions in order of decreasing rho. The covariance eigenvalues of unit rows sum to at most 1,
    so the default ridge outweighs nearly all of them and the result is close to `procrustes`.
    `tuned_cca` chooses a ridge for each side.

    Args:
        pairs_x: Paired embeddings of the first modality, shape [n, d_x].
        pairs_y: Paired embeddings of the second modality, shape [n, d_y]. Row i belongs to row i of
            `pairs_x`.
        ridge: Added to the eigenvalues of both covariances.
        power: 0 weighs all directions equally. Larger values favour directions of high correlation.
        dim: Number of directions. None keeps the numerical rank, at most min(d_x, d_y, n - 1).
        cov_normalize: Uses covariances A^T A / (n - 1). False uses A^T A, in which the ridge weighs
            less.
        renorm: L2-normalises the centred rows again before fitting.
        dtype: Dtype of the teacher's arrays.

    Returns:
        The teacher.

    Raises:
        InputError: The pairs do not match or do not determine `dim` directions, or an option
            is out of range.

    Example:
        >>> A = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
        >>> teacher = cca(A, A[:, ::-1], ridge=1e-4, dim=2)
        >>> teacher.x(A).shape, bool(teacher.correlations.min() > 0.999)
        ((50, 2), True)

    References:
        H. Hotelling, "Relations between two sets of variates", Biometrika 28 (1936).
        H. D. Vinod, "Canonical ridge and econometrics of joint production", Journal of
        Econometrics 4 (1976).
    """
    checks.at_least(0, ridge=ridge, power=power)

    def gain(eigenvalues: np.ndarray) -> np.ndarray:
        return 1.0 / np.sqrt(np.maximum(eigenvalues + ridge, _EIGENVALUE_FLOOR))

    # Scaling the rows scales their covariances: (A / sqrt(n - 1))^T (A / sqrt(n - 1)).
    scale = 1.0 / math.sqrt(max(len(pairs_x) - 1, 1)) if cov_normalize else 1.0
    options: dict[str, Any] = {"dim": dim, "renorm": renorm, "scale": scale, "power": power}
    return _closed_form(pairs_x, pairs_y, (gain, gain), **options, dtype=dtype)


def tuned_cca(
    pairs_x: Rows,
    pairs_y: Rows,
    *,
    ridge: Ridge | None = None,
    power: float | None = None,
    dim: int | None = None,
    seed: int = 0,
    dtype: Any = jnp.float32,
) -> Teacher:
    """Fits a canonical correlation analysis whose options are chosen by cross-validation.

    The maps are those of `cca`, with R_x = (S_xx + ridge_x tr(S_xx) / d_x I)^(-1/2): the ridge of
    each side is relative to the mean eigenvalue of its own covariance. The options are chosen by
    the mean reciprocal rank of held-out pairs, see `cca.choose`. The choice does not depend on the
    order of the pairs. With fewer than 6 pairs the ridges are 10,000 / n and the power is 0.5.

    Args:
        pairs_x: Paired embeddings of the first modality, shape [n, d_x].
        pairs_y: Paired embeddings of the second modality, shape [n, d_y].
        ridge: Ridge of both sides, or one ridge for each. None chooses both.
        power: Power of rho that weighs the directions. None chooses it.
        dim: Number of directions. None keeps all that the pairs determine, at most 512.
        seed: Seed of the folds.
        dtype: Dtype of the teacher's arrays.

    Returns:
        The teacher.

    Raises:
        InputError: As in `cca`.

    Example:
        >>> A = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
        >>> teacher = tuned_cca(A, A[:, ::-1])
        >>> best = (teacher.x(A) @ teacher.y(A[:, ::-1]).T).argmax(axis=1)
        >>> best.tolist() == list(range(50))
        True

    References:
        H. D. Vinod, "Canonical ridge and econometrics of joint production", Journal of
        Econometrics 4 (1976).
        M. Stone, "Cross-validatory choice and assessment of statistical predictions", Journal of
        the Royal Statistical Society B 36 (1974).
    """
    A, B, ridges = _checked(pairs_x, pairs_y, ridge, power)
    options = choose.choose(A, B, "linear", ridges=ridges, power=power, seed=seed)
    return _relative_cca(A, B, options, dim=dim, dtype=dtype)


def kernel_cca(
    pairs_x: Rows,
    pairs_y: Rows,
    *,
    gamma_x: float | None = None,
    gamma_y: float | None = None,
    ridge: Ridge | None = None,
    power: float | None = None,
    landmarks: int = LANDMARKS,
    dim: int | None = None,
    seed: int = 0,
    dtype: Any = jnp.float32,
) -> Teacher:
    """Fits a canonical correlation analysis of Gaussian kernel features.

    With z = l2(l2(x) - mean) and k(z, z') = exp(-gamma ||z - z'||^2), phi(z) are the Nystroem
    features, for which phi(z) . phi(z') = k(z, z') if z and z' are landmarks. The features are
    centred on the pairs. With R_x = (S_xx + ridge_x tr(S_xx) / d_x I)^(-1/2) and R_y likewise,

        R_x S_xy R_y = U diag(rho) V^T,
        x -> rho^power * (U^T R_x phi_x(x)),    y -> rho^power * (V^T R_y phi_y(y)).

    As gamma -> 0 the kernel becomes linear, and the result approaches `tuned_cca` of the rows z.
    Options that are None are chosen as in `tuned_cca`. With fewer than 6 pairs, each bandwidth is
    1 / the median squared distance of two rows.

    Args:
        pairs_x: Paired embeddings of the first modality, shape [n, d_x].
        pairs_y: Paired embeddings of the second modality, shape [n, d_y].
        gamma_x: Bandwidth of the first modality. None chooses it.
        gamma_y: Bandwidth of the second modality. None chooses it.
        ridge: Ridge of both sides, or one ridge for each. None chooses both.
        power: Power of rho that weighs the directions. None chooses it.
        landmarks: Largest number of pairs that become landmarks. Time grows with its cube, memory
            with its square.
        dim: Number of directions. None keeps all that the pairs determine, at most 512.
        seed: Seed of the folds and of the choice of landmarks.
        dtype: Dtype of the teacher's arrays.

    Returns:
        The teacher, whose maps are `kernels.KernelMap`.

    Raises:
        InputError: The pairs do not match or do not determine `dim` directions, or an option
            is out of range.

    Example:
        >>> angle = np.random.default_rng(0).uniform(0, 6.28, size=(60, 1)).astype(np.float32)
        >>> A = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
        >>> B = np.concatenate([np.cos(2 * angle), np.sin(2 * angle)], axis=1)  # no linear map of A
        >>> teacher = kernel_cca(A, B, gamma_x=1.0, gamma_y=1.0, ridge=1e-2, power=0.5, dim=2)
        >>> bool(teacher.correlations.min() > 0.95)
        True

    References:
        P. L. Lai and C. Fyfe, "Kernel and nonlinear canonical correlation analysis",
        International Journal of Neural Systems 10 (2000).
        D. R. Hardoon, S. Szedmak and J. Shawe-Taylor, "Canonical correlation analysis: an overview
        with application to learning methods", Neural Computation 16 (2004).
        C. Williams and M. Seeger, "Using the Nystroem method to speed up kernel machines", NeurIPS
        2000.
    """
    A, B, ridges = _checked(pairs_x, pairs_y, ridge, power)
    checks.whole(2, landmarks=landmarks)
    checks.whole(1, or_none=True, dim=dim)
    gammas = {"gamma_x": gamma_x, "gamma_y": gamma_y}
    checks.positive(**{name: gamma for name, gamma in gammas.items() if gamma is not None})
    given: dict[str, Any] = {"ridges": ridges, "power": power, **gammas}
    options = choose.choose(A, B, "kernel", **given, seed=seed)
    sizes = {"landmarks": landmarks, "dim": dim, "seed": seed, "dtype": dtype}
    return _fitted_kernel(A, B, options, **sizes)


def best_cca(
    pairs_x: Rows,
    pairs_y: Rows,
    *,
    dim: int | None = None,
    seed: int = 0,
    dtype: Any = jnp.float32,
) -> Teacher:
    """Fits `tuned_cca` or `kernel_cca`, whichever cross-validation prefers.

    Both are scored on the same folds. The kernel CCA is chosen if its mean reciprocal rank is
    higher by more than one standard error of the paired difference. Otherwise the linear CCA is
    chosen, which is deployed as one matrix per modality. With fewer than 6 pairs it always is.

    Args:
        pairs_x: Paired embeddings of the first modality, shape [n, d_x].
        pairs_y: Paired embeddings of the second modality, shape [n, d_y].
        dim: Number of directions. None keeps all that the pairs determine, at most 512.
        seed: Seed of the folds and of the choice of landmarks.
        dtype: Dtype of the teacher's arrays.

    Returns:
        The teacher.

    Raises:
        InputError: As in `cca`.

    Example:
        >>> A = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
        >>> type(best_cca(A, A[:, ::-1]).map_x).__name__
        'AffineMap'
    """
    A, B, _ = _checked(pairs_x, pairs_y, None, None)
    options = choose.choose_each(A, B, seed=seed)[-1]
    return _fitted(A, B, options, dim=dim, seed=seed, dtype=dtype)


class Refined(NamedTuple):
    """Result of `refine`.

    Attributes:
        teacher: The refined teacher, or `first` if no round gained clearly.
        first: The teacher of the pairs alone, as `best_cca` fits it.
        scores: Mean reciprocal rank of held-out pairs before the first and after every round, in
            cross-validation. Without a clear gain it holds one number, and with fewer than 6 pairs
            none.
        plan_error: Largest marginal error of the plans that refined the teacher. It exceeds
            `cca.refine.TOLERANCE` if the solver did not converge.
    """

    teacher: Teacher
    first: Teacher
    scores: tuple[float, ...]
    plan_error: float = 0.0

    @property
    def rounds(self) -> int:
        """Number of rounds of the refinement."""
        return max(len(self.scores) - 1, 0)


def refine(
    pairs_x: Rows,
    pairs_y: Rows,
    x: Pool,
    y: Pool,
    *,
    dim: int | None = None,
    seed: int = 0,
    dtype: Any = jnp.float32,
    mesh: Mesh | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Refined:
    """Fits a CCA on the pairs, and refines it with transport plans between unpaired rows.

    In every round, the plan P between random batches X and Y of the pools under the current
    teacher's cosines acts as soft pairs: the next CCA is fitted to

        S_xy = (1 - tau) A^T B / (n - 1) + tau X^T P Y,    tau = worth / (worth + n),

    and to S_xx and S_yy with the covariances of X and Y. The plan counts as 1,000 or 3,000 pairs,
    and as fewer if a pool has few rows. This worth, the ridges and the number of rounds are
    chosen by cross-validation on the pairs. No round is made unless the mean reciprocal rank of
    held-out pairs gains more than the best of as many candidates would by chance. The linear CCA is
    refined, in the leading principal directions of pairs and pools. `first` may be a kernel CCA,
    which the unpaired rows replace on most data. Where they do not, a mixture of both is better
    than either.

    Args:
        pairs_x: Paired embeddings A of the first modality, shape [n, d_x].
        pairs_y: Paired embeddings B of the second modality, shape [n, d_y].
        x: Unpaired embeddings of the first modality. A memory-mapped array is read in batches.
        y: Unpaired embeddings of the second modality.
        dim: Number of directions of both teachers. None keeps at most 512.
        seed: Seed of folds, landmarks and batches.
        dtype: Dtype of the teacher's arrays.
        mesh: Devices to split the plans over.
        report: Called with a line of progress.

    Returns:
        The teachers with and without the unpaired rows, and their scores.

    Raises:
        InputError: As in `cca`, or a pool is empty or of another width.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> z = rng.normal(size=(400, 4)).astype(np.float32)
        >>> A, B = z @ rng.normal(size=(4, 9)), z @ rng.normal(size=(4, 7))
        >>> found = refine(A[:30], B[:30], A[30:200], B[200:])
        >>> found.teacher.dim, len(found.scores) > 0
        (4, True)

    References:
        E. Grave, A. Joulin and Q. Berthet, "Unsupervised alignment of embeddings with Wasserstein
        Procrustes", AISTATS 2019.
        M. Artetxe, G. Labaka and E. Agirre, "Learning bilingual word embeddings with (almost) no
        bilingual data", ACL 2017.
    """
    A, B, _ = _checked(pairs_x, pairs_y, None, None)
    x, y = _checked_pool("x", x, A.shape[1]), _checked_pool("y", y, B.shape[1])
    linear, *better = choose.choose_each(A, B, seed=seed)
    first = _fitted(A, B, better[0] if better else linear, dim=dim, seed=seed, dtype=dtype)
    if len(A) < checks.MIN_PAIRS:
        return Refined(first, first, ())
    side_x, side_y = side(A, x, seed), side(B, y, seed + 1)
    common: dict[str, Any] = {"seed": seed, "mesh": mesh, "report": report}
    splits = refinement.folds(A, B, seed=seed)
    choice = refinement.choose_steps(side_x, side_y, linear, splits, **common)
    if not choice.steps:
        return Refined(first, first, choice.scores)
    found, error = refinement.refine(side_x, side_y, linear, choice.steps, **common)
    covered = moments.of_pairs([(side_x.pairs, side_y.pairs)])
    teacher = of_features(side_x.features, side_y.features, found, covered, dtype)
    teacher = teacher if dim is None else teacher.leading(dim)
    return Refined(teacher, first, choice.scores, error)


def refined_cca(pairs_x: Rows, pairs_y: Rows, x: Pool, y: Pool, **options: Any) -> Teacher:
    """Returns the teacher of `refine`.

    Args:
        pairs_x: Paired embeddings of the first modality, shape [n, d_x].
        pairs_y: Paired embeddings of the second modality, shape [n, d_y].
        x: Unpaired embeddings of the first modality.
        y: Unpaired embeddings of the second modality.
        **options: Options of `refine`.

    Returns:
        The teacher.
    """
    return refine(pairs_x, pairs_y, x, y, **options).teacher


class Canonical(NamedTuple):
    """Canonical variates z_x = (x - mean_x) weights_x and z_y likewise.

    Attributes:
        mean_x: Mean of the first modality.
        mean_y: Mean of the second modality.
        weights_x: Directions of the first modality, one per column.
        weights_y: Directions of the second modality.
        correlations: Mean of z_xk z_yk over the pairs, for every direction k.
    """

    mean_x: Float[np.ndarray, " d_x"]
    mean_y: Float[np.ndarray, " d_y"]
    weights_x: Float[np.ndarray, "d_x dim"]
    weights_y: Float[np.ndarray, "d_y dim"]
    correlations: Float[np.ndarray, " dim"]


def canonical_correlations(pairs_x: Rows, pairs_y: Rows, *, ridge: float = 0.0) -> Canonical:
    """Computes the canonical correlations of rows that are centred but not normalised.

    With S_xx = A^T A / n of centred rows, R_x = (S_xx + ridge tr(S_xx) / d_x I)^(-1/2), R_y
    likewise and R_x S_xy R_y = U diag(corr) V^T, the weights are R_x U and R_y V. All directions
    are kept. Without a ridge, n <= max(d_x, d_y) + 1 pairs correlate perfectly along all of them.

    Args:
        pairs_x: Paired rows of the first modality, shape [n, d_x].
        pairs_y: Paired rows of the second modality, shape [n, d_y].
        ridge: Ridge, relative to the mean eigenvalue of each covariance.

    Returns:
        Means, weights and correlations.

    Raises:
        InputError: The pairs do not match, or the ridge is negative.

    Example:
        >>> A = np.random.default_rng(0).normal(size=(50, 4))
        >>> canonical_correlations(A, A[:, :2]).correlations.round(6)
        array([1., 1.])

    References:
        H. Hotelling, "Relations between two sets of variates", Biometrika 28 (1936).
    """
    pairs_x, pairs_y = checks.pairs(pairs_x, pairs_y, min_rows=2)
    checks.at_least(0, ridge=ridge)
    sides = []
    for name, pairs in (("pairs_x", pairs_x), ("pairs_y", pairs_y)):
        centred, mean = moments.centred(name, pairs.astype(np.float64))
        # Divided out, so that the relative ridge of `_rotated` is `ridge` itself.
        spread = math.sqrt(np.mean(np.square(centred)))
        sides.append((mean, spread, centred / (spread * math.sqrt(len(centred)))))
    (mean_x, spread_x, x), (mean_y, spread_y, y) = sides

    def gain(eigenvalues: np.ndarray) -> np.ndarray:
        return 1.0 / np.sqrt(eigenvalues + ridge)

    found = _rotated(x, y, (gain, gain))
    return Canonical(mean_x, mean_y, found.x / spread_x, found.y / spread_y, found.rho)


def _checked(
    pairs_x: Rows, pairs_y: Rows, ridge: Ridge | None, power: float | None
) -> tuple[np.ndarray, np.ndarray, tuple[float, float] | None]:
    """Returns the pairs as arrays and a ridge for each side, after checks."""
    ridges = ridge if ridge is None or isinstance(ridge, tuple) else (ridge, ridge)
    for value in ridges or ():
        checks.at_least(0, ridge=value)
    if power is not None:
        checks.at_least(0, power=power)
    pairs_x, pairs_y = checks.pairs(pairs_x, pairs_y, min_rows=2)
    # Rejects equal rows here, because an error within a fold could not name the argument.
    for name, pairs in (("pairs_x", pairs_x), ("pairs_y", pairs_y)):
        moments.centred(name, moments.unit(pairs))
    return pairs_x, pairs_y, ridges


def _checked_pool(name: str, pool: Pool, width: int) -> Pool:
    """Returns a pool after checks."""
    if isinstance(pool, MappedRows):
        # `data.dataset` has read all rows already, which takes long for large files.
        checks.embeddings(name, pool[:1], width=width)
        return pool
    pool = checks.array(name, pool)
    checks.embeddings(name, pool, width=width)
    return pool


def _relative_cca(
    pairs_x: np.ndarray,
    pairs_y: np.ndarray,
    options: choose.Options,
    *,
    dim: int | None,
    dtype: Any,
) -> Teacher:
    """Fits a linear CCA with ridges relative to the mean eigenvalues."""

    def gain(ridge: float, width: int) -> canonical.Gain:
        # The floor avoids a division by zero without a ridge.
        return lambda v: 1.0 / np.sqrt(v + max(ridge, canonical.EPS) * v.sum() / width)

    gains = gain(options.ridge_x, pairs_x.shape[1]), gain(options.ridge_y, pairs_y.shape[1])
    scale = 1.0 / math.sqrt(len(pairs_x) - 1)
    fitted = {"dim": dim, "renorm": False, "scale": scale, "power": options.power, "dtype": dtype}
    return _closed_form(pairs_x, pairs_y, gains, **fitted, most=choose.DIRECTIONS)


def _fitted(
    pairs_x: np.ndarray,
    pairs_y: np.ndarray,
    options: choose.Options,
    *,
    dim: int | None,
    seed: int,
    dtype: Any,
) -> Teacher:
    """Fits a linear or a kernel CCA with the given options."""
    # Options without a bandwidth are those of a linear CCA.
    if options.gamma_x is None:
        return _relative_cca(pairs_x, pairs_y, options, dim=dim, dtype=dtype)
    sizes = {"landmarks": LANDMARKS, "dim": dim, "seed": seed, "dtype": dtype}
    return _fitted_kernel(pairs_x, pairs_y, options, **sizes)


def side(pairs: np.ndarray, pool: Pool, seed: int = 0) -> refinement.Side:
    """Computes the features of a modality from its pairs and a sample of its pool.

    Args:
        pairs: Paired embeddings, shape [n, d].
        pool: Unpaired embeddings of the same modality.
        seed: Seed of the sample.

    Returns:
        The modality in at most 512 features.
    """
    rng = np.random.default_rng((seed, 2))
    kept = np.sort(rng.permutation(len(pool))[: refinement.POOL_ROWS])
    made = features.principal(pairs, np.asarray(pool[kept]), REFINED_FEATURES)
    return refinement.Side(made, made(pairs), pool)


def _fitted_kernel(
    pairs_x: np.ndarray,
    pairs_y: np.ndarray,
    options: choose.Options,
    *,
    landmarks: int,
    dim: int | None,
    seed: int,
    dtype: Any,
) -> Teacher:
    """Fits a CCA of the kernel features of at most `landmarks` pairs."""
    n = len(pairs_x)
    chosen = np.arange(n)
    if n > landmarks:
        # Drawn in an order that depends on the content of the pairs alone.
        chosen = np.sort(choose.order(pairs_x, pairs_y, seed=seed)[:landmarks])
    assert options.gamma_x is not None and options.gamma_y is not None
    x = features.gaussian("pairs_x", pairs_x, pairs_x[chosen], options.gamma_x)
    y = features.gaussian("pairs_y", pairs_y, pairs_y[chosen], options.gamma_y)
    blocks = zip(features.blocks(pairs_x), features.blocks(pairs_y), strict=True)
    covered = moments.of_pairs((x(rows_x), y(rows_y)) for rows_x, rows_y in blocks)
    # Relative to the trace over the width of the embeddings, as in `cca.choose`.
    root_x = canonical.cholesky_root(
        covered.xx, options.ridge_x * float(np.trace(covered.xx)) / features.width(x)
    )
    root_y = canonical.cholesky_root(
        covered.yy, options.ridge_y * float(np.trace(covered.yy)) / features.width(y)
    )
    found = canonical.rotate(root_x, covered.xy, root_y)
    rank = len(found.rho)
    dim = min(rank, choose.DIRECTIONS) if dim is None else dim
    checks.within(rank, f"directions that these {n} pairs determine", dim=dim)
    kept = canonical.Directions(found.x[:, :dim], found.y[:, :dim], found.rho[:dim])
    return of_features(x, y, kept.weighted(options.power), covered, dtype)


def of_features(
    x: Features,
    y: Features,
    directions: canonical.Directions,
    covered: moments.Moments,
    dtype: Any = jnp.float32,
) -> Teacher:
    """Builds the teacher that maps rows to features and then to directions.

    Args:
        x: Features of the first modality.
        y: Features of the second modality.
        directions: Directions in feature coordinates.
        covered: Moments of the pairs in feature coordinates, which give the correlations.
        dtype: Dtype of the teacher's arrays.

    Returns:
        The teacher.
    """
    correlations = canonical.correlations(covered, directions)
    return Teacher(
        _map_of(x, directions.x, dtype),
        _map_of(y, directions.y, dtype),
        jnp.asarray(correlations, jnp.float32),
    )


def _map_of(of: Features, directions: np.ndarray, dtype: Any) -> AffineMap | KernelMap:
    """Builds the map of rows to directions in feature coordinates."""
    if isinstance(of, Linear):
        # Centring becomes the bias -W mean, so the maps accept rows that are not centred.
        weight = (of.basis @ directions).T
        bias = -weight @ of.mean
        return AffineMap(jnp.asarray(weight, dtype), jnp.asarray(bias, dtype), norm="l2")
    weight = (of.whiten @ directions).T
    arrays = (of.mean, of.landmarks, of.gamma, of.centre, weight)
    return KernelMap(*(jnp.asarray(array, dtype) for array in arrays))


def _closed_form(
    pairs_x: Rows,
    pairs_y: Rows,
    gains: tuple[canonical.Gain, canonical.Gain],
    *,
    dim: int | None,
    renorm: bool,
    scale: float = 1.0,
    power: float = 0.0,
    dtype: Any = jnp.float32,
    most: int | None = None,
) -> Teacher:
    """Fits linear maps on unit rows, with principal directions weighted by `gains`."""
    pairs_x, pairs_y = checks.pairs(pairs_x, pairs_y, min_rows=2)
    sides = []
    for name, pairs in (("pairs_x", pairs_x), ("pairs_y", pairs_y)):
        centred, mean = moments.centred(name, moments.unit(pairs))
        if renorm:
            # A row at the mean has no direction, and stays near zero.
            centred /= np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-8)
        sides.append((mean, centred * scale))
    (mean_x, x), (mean_y, y) = sides
    found = _rotated(x, y, gains)
    dim = len(found.rho[:most]) if dim is None else dim
    checks.within(len(found.rho), f"directions that these {len(pairs_x)} pairs determine", dim=dim)
    weights = found.rho[:dim] ** power
    W_x, W_y = (found.x[:, :dim] * weights).T, (found.y[:, :dim] * weights).T
    # Centring becomes the bias -W mean, so the maps accept rows that are not centred.
    # With a ridge, the singular values are smaller than the correlations of the pairs.
    return Teacher(
        map_x=AffineMap(jnp.asarray(W_x, dtype), jnp.asarray(-W_x @ mean_x, dtype), norm="l2"),
        map_y=AffineMap(jnp.asarray(W_y, dtype), jnp.asarray(-W_y @ mean_y, dtype), norm="l2"),
        correlations=jnp.asarray(pearson(x @ W_x.T, y @ W_y.T), dtype),
    )


def _rotated(
    x: np.ndarray, y: np.ndarray, gains: tuple[canonical.Gain, canonical.Gain]
) -> canonical.Directions:
    """Computes the directions of centred rows, whose products are the covariances."""
    root_x, root_y = canonical.principal_root(x, gains[0]), canonical.principal_root(y, gains[1])
    return canonical.rotate(root_x, x.T @ y, root_y)
