"""Training: a jitted Lion step, and a loop that keeps the best parameters on validation.

Batches, learning rate and warm starts of a step are functions of the data, the state and (seed,
step). A run that resumes from a `Snapshot` is therefore bit-identical to an uninterrupted one. All
steps share one compiled program. On a mesh the rows of a batch are split over its devices (see
`sharding`), and heads, optimiser state and teacher are replicated.
"""

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from sotalign_jax import checks, data, evaluation, sampling, teachers
from sotalign_jax.heads import (
    Heads,
    KernelHead,
    LinearHead,
    MixedHead,
    Rows,
    Teacher,
    build_heads,
    check_widths,
)
from sotalign_jax.methods import Contrastive, Method, Objective
from sotalign_jax.ot import device, sharding, solver
from sotalign_jax.progress import Observer

# Steps between reads of the metrics. JAX dispatches steps asynchronously, and a read waits until
# the device has finished them. A larger number would discover a NaN later.
_REPORT_EVERY = 10


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Options of `fit`. The defaults are the paper's, or those of docs/paper.md where it has none.

    Attributes:
        steps: Number of optimisation steps.
        pair_batch: Pairs per step, or all pairs if there are fewer.
        unpaired_batch: Unpaired rows per step and modality, or all rows if there are fewer.
        learning_rate: Peak learning rate, reached after a warm-up over a tenth of the steps.
        weight_decay: Decoupled weight decay, which is multiplied by the learning rate.
        eval_every: Steps between validations.
        seed: Seed of the initial heads and of all batches.

    Raises:
        InputError: A number is out of range.
    """

    steps: int = 2000
    pair_batch: int = 10_000
    unpaired_batch: int = 22_768
    learning_rate: float = 1e-4
    weight_decay: float = 1e-5
    eval_every: int = 43
    seed: int = 42

    def __post_init__(self) -> None:
        checks.whole(1, steps=self.steps, eval_every=self.eval_every)
        checks.whole(1, pair_batch=self.pair_batch, unpaired_batch=self.unpaired_batch)
        checks.at_least(0, learning_rate=self.learning_rate, weight_decay=self.weight_decay)


class TrainState(NamedTuple):
    """State that one training step updates.

    Attributes:
        step: Number of steps done.
        params: Parameters of the heads.
        opt_state: State of the optimiser.
        memory: State of the method, such as warm starts. See `Objective.init_memory`.
    """

    step: Int[Array, ""]
    params: Any
    opt_state: Any
    memory: Any


class Best(NamedTuple):
    """The parameters with the highest validation MeanR@1 so far.

    Without a validation gallery they are the latest parameters, and `mean_r1` has no meaning.

    Attributes:
        params: The parameters.
        step: Number of steps that led to them.
        mean_r1: Their validation score.
    """

    params: Any
    step: Int[Array, ""]
    mean_r1: Float[Array, ""]


class Snapshot(NamedTuple):
    """A checkpoint that `fit` can resume from.

    Attributes:
        state: State after the last step.
        best: The best parameters so far.
    """

    state: TrainState
    best: Best


class NonFiniteLossError(FloatingPointError):
    """The loss or its gradient became NaN or infinite."""


# --- data on the device ---


def place(
    dataset: data.Dataset, *, pools: str = "xy", on_device: bool = True
) -> sampling.DeviceData:
    """Collects the training arrays of a dataset.

    Args:
        dataset: Pairs and pools.
        pools: Modalities whose pool is used, "xy", "x", "y" or "". Other pools become empty.
        on_device: True to copy the arrays to the default device.

    Returns:
        The arrays.
    """
    x, y = dataset.pool_x, dataset.pool_y
    read = x if "x" in pools else x[:0], y if "y" in pools else y[:0]
    arrays: Any = dataset.pairs_x, dataset.pairs_y, *read
    # A pool may be `files.MappedRows`, which `np.asarray` reads into memory.
    if on_device:
        arrays = (jnp.asarray(np.asarray(x)) for x in arrays)
    return sampling.DeviceData(*arrays)


def _bytes(*arrays: Any) -> int:
    """Returns the total size of arrays, or of their shapes, in bytes."""
    return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in arrays)


def _fits_in_memory(arrays: Iterable[Any]) -> bool:
    """Returns True if the arrays need at most half of the device's memory."""
    return _bytes(*arrays) <= device.profile().memory / 2


def cached_feature_shapes(batches: sampling.DeviceData, teacher: Teacher) -> tuple[Any, Any]:
    """Returns the shapes of the teacher's features that are cached for all steps.

    Features of a pool are cached if they are no larger than the pool itself or need a Gaussian
    kernel, and if all arrays together need at most half of the device's memory.

    Args:
        batches: The training arrays.
        teacher: The teacher.

    Returns:
        The shapes of the features of each pool, or None for features that are not cached.
    """
    # `eval_shape` computes shapes and types without any arithmetic.
    features = jax.eval_shape(
        lambda teacher, x, y: (teacher.x(x), teacher.y(y)), teacher, batches.pool_x, batches.pool_y
    )
    pools = zip(features, (batches.pool_x, batches.pool_y), strict=True)
    # A linear map costs a step little. The kernel map of a row costs as much as all its landmarks.
    x, y = (
        found if teacher.is_kernel or _bytes(found) <= _bytes(pool) else None
        for found, pool in pools
    )
    return (x, y) if _fits_in_memory(jax.tree.leaves((batches, x, y))) else (None, None)


def cache_teacher_features(batches: sampling.DeviceData, teacher: Teacher) -> sampling.DeviceData:
    """Computes the teacher's features of the pools once for all steps.

    Features that are not cached, see `cached_feature_shapes`, are computed in every step.

    Args:
        batches: The training arrays.
        teacher: The teacher.

    Returns:
        The training arrays, with `star_x` and `star_y` set where they are cached.

    Example:
        >>> from sotalign_jax import teachers
        >>> A = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
        >>> batches = sampling.DeviceData(A, A, A, A)
        >>> cache_teacher_features(batches, teachers.procrustes(A, A)).star_x.shape
        (9, 3)
    """

    def embed(kept: Any, teacher_map: Any, pool: Any) -> Array | None:
        return None if kept is None else jnp.asarray(evaluation.embed(teacher_map, pool))

    x, y = cached_feature_shapes(batches, teacher)
    return batches._replace(
        star_x=embed(x, teacher.map_x, batches.pool_x),
        star_y=embed(y, teacher.map_y, batches.pool_y),
    )


# --- one step ---


def init_state(
    method: Objective, heads: Heads, batches: sampling.DeviceData, config: TrainConfig
) -> TrainState:
    """Builds the state before the first step.

    Args:
        method: The objective.
        heads: The heads to start from.
        batches: The training arrays.
        config: Options of the training.

    Returns:
        The state. It shares no arrays with `heads`.
    """
    # Copied, because the first step donates the state's arrays and the caller keeps the heads.
    params = jax.tree.map(jnp.copy, nnx.state(heads))
    memory = method.init_memory(batches, config.unpaired_batch)
    return TrainState(jnp.int32(0), params, _optimizer(config).init(params), memory)


def _optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Returns the optimiser of a config."""
    return optimizer(config.learning_rate, config.steps, weight_decay=config.weight_decay)


def optimizer(
    learning_rate: float, steps: int, *, weight_decay: float = 1e-5
) -> optax.GradientTransformation:
    """Builds Lion(0.9, 0.99) with the learning rate of `warmup_cosine`.

    Args:
        learning_rate: Peak of the learning rate.
        steps: Number of steps of the schedule.
        weight_decay: Decoupled weight decay.

    Returns:
        The optimiser.

    Example:
        >>> optimizer(1e-4, 100).init({"w": jnp.zeros(2)})[0].mu
        {'w': Array([0., 0.], dtype=float32)}

    References:
        X. Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023 (Lion).
    """
    return optax.lion(
        warmup_cosine(learning_rate, steps), b1=0.9, b2=0.99, weight_decay=weight_decay
    )


def warmup_cosine(learning_rate: float, steps: int) -> optax.Schedule:
    """Builds a linear warm-up over the first tenth of the steps, followed by a cosine to 0.

    The rate of step t is peak (t + 1) / w while t < w = ceil(steps / 10).

    Args:
        learning_rate: Peak of the learning rate.
        steps: Number of steps.

    Returns:
        The schedule.

    Example:
        >>> rate = warmup_cosine(1.0, 20)
        >>> [round(float(rate(t)), 3) for t in (0, 1, 2, 11, 20)]
        [0.5, 1.0, 1.0, 0.5, 0.0]

    References:
        I. Loshchilov and F. Hutter, "SGDR: stochastic gradient descent with warm restarts", ICLR
        2017: the cosine.
    """
    # Not optax.join_schedules, whose rates differ from these by rounding in a fifth of the steps.
    # Every recorded metric of a seed would change in its last digits.
    warmup = -(-steps // 10)  # ceil(steps / 10)

    def rate(step: Any) -> Array:
        fraction = jnp.clip((step - warmup) / max(steps - warmup, 1), 0.0, 1.0)
        cosine = 0.5 * (1.0 + jnp.cos(jnp.pi * fraction))
        return learning_rate * jnp.where(step < warmup, (step + 1) / warmup, cosine)

    return rate


def batch_key(config: TrainConfig) -> Array:
    """Returns the PRNG key for batch sampling.

    Args:
        config: Options of the training, for their seed.

    Returns:
        The key.
    """
    # Folded, so that batches and initial heads share no random numbers.
    return jax.random.fold_in(jax.random.key(config.seed), 1)


def _sizes(config: TrainConfig) -> dict[str, int]:
    """Returns the batch sizes as arguments of `sampling.draw`."""
    return {"pairs": config.pair_batch, "unpaired": config.unpaired_batch}


def make_step(
    method: Objective, heads: Heads, config: TrainConfig, mesh: Mesh | None = None
) -> jax.stages.Wrapped:
    """Builds the jitted training step (state, data, teacher, key) -> (state, metrics).

    The data are `sampling.DeviceData`, from which the step draws a batch with the key of
    `batch_key`, or a `sampling.Batch`, which needs no key. The state is donated. Runs that differ
    only in their seed and their arrays share one compiled program.

    Args:
        method: The objective, a frozen dataclass.
        heads: Heads with the structure to train. Their values are not used.
        config: Options of the training.
        mesh: Devices that the rows are split over. Call the step within `jax.set_mesh(mesh)`.

    Returns:
        The step.

    Raises:
        InputError: The method is not hashable.
    """
    # Programs are cached by the method's options, which frozen dataclasses hash.
    if not isinstance(method, Hashable):
        raise checks.InputError(
            f"method must be hashable, got {type(method).__name__}; make it a frozen dataclass"
        )
    # The seed reaches the step only through the key and the arrays. As part of the cache key, each
    # seed would compile a program of its own.
    return _program(method, nnx.graphdef(heads), dataclasses.replace(config, seed=0), mesh)


@functools.lru_cache(maxsize=8)
def _program(
    method: Objective, graphdef: Any, config: TrainConfig, mesh: Mesh | None
) -> jax.stages.Wrapped:
    """Builds the jitted step of `make_step`, once for each structure and each set of options."""
    optimizer = _optimizer(config)

    def step(
        state: TrainState,
        batches: sampling.DeviceData | sampling.Batch,
        teacher: Teacher | None,
        key: Array | None = None,
    ) -> tuple[TrainState, dict[str, Array]]:
        # The type is known at trace time, so a run compiles only one of the two branches.
        if isinstance(batches, sampling.Batch):
            batch = sharding.trim(batches)
        else:
            assert key is not None, "pass batch_key(config)"
            with jax.named_scope("draw"):
                batch = sampling.draw(key, state.step, batches, **_sizes(config))

        def objective(params: Any) -> tuple[Array, Any]:
            return method(nnx.merge(graphdef, params), batch, teacher, state.memory)

        (loss, (metrics, memory)), gradient = jax.value_and_grad(objective, has_aux=True)(
            state.params
        )
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        # A finite loss may have a NaN gradient, which its norm reveals.
        metrics = {"loss": loss, "gradient_norm": optax.tree.norm(gradient), **metrics}
        return TrainState(state.step + 1, params, opt_state, memory), metrics

    if mesh is None:
        return jax.jit(step, donate_argnums=0)
    # Without `out_shardings`, XLA may leave the new state split over the devices, and the next
    # step would be compiled again for that layout.
    return jax.jit(step, donate_argnums=0, out_shardings=sharding.replicated(mesh))


# --- the loop ---


def check_pool(method: Method, dataset: data.Dataset) -> None:
    """Checks that the data have the unpaired rows that a method needs.

    Args:
        method: The method.
        dataset: The data.

    Raises:
        InputError: A pool has no rows, or too few.
    """
    for side in method.pools:
        if not len(dataset.pool_x if side == "x" else dataset.pool_y):
            raise checks.InputError(
                f"pool_{side} has no rows but {type(method).__name__} needs unpaired samples of "
                f"{' and '.join(method.pools)}; add some, or train with method 'sail'"
            )
    method.check(dataset)


def fit(
    method: Objective,
    heads: Heads,
    dataset: data.Dataset,
    config: TrainConfig,
    *,
    teacher: Teacher | None = None,
    resume: Callable[[Snapshot], Snapshot | None] | None = None,
    observer: Observer | None = None,
    mesh: Mesh | None = None,
    on_device: bool | None = None,
) -> tuple[Heads, Best]:
    """Trains copies of heads and keeps the parameters with the best validation MeanR@1.

    The initial heads are validated as well, so the result is never worse on validation than they
    are. Without a validation gallery the last parameters are kept.

    Args:
        method: The objective, such as `methods.SOTAlign()`.
        heads: The heads to start from.
        dataset: Pairs, pools and the validation gallery.
        config: Steps, batches and learning rate.
        teacher: The frozen teacher, for methods that use one.
        resume: Receives the initial snapshot as a template, and returns the snapshot to continue
            from, or None to start from the initial one.
        observer: Callbacks for stages, metrics and snapshots.
        mesh: Devices to split the rows over, see `sharding.rows_mesh`. If they belong to several
            processes, all of them must call this function with the same arguments.
        on_device: True keeps pairs and pools on the device. False reads the rows of each step from
            the host. By default they are kept on the device if there is no mesh and they need at
            most half of its memory. The choice does not change the batches.

    Returns:
        The trained heads, and the parameters, step and score of the best validation.

    Raises:
        InputError: The data, the teacher or the method do not fit together.
        NonFiniteLossError: The loss or its gradient is NaN or infinite. The message names the step.
    """
    observer = observer or Observer()
    check_pool(method, dataset)
    for head in (heads.x, heads.y):
        if isinstance(head, KernelHead | MixedHead):
            raise checks.InputError(
                f"heads must be trainable, got kind {head.kind!r}; start from random heads or a "
                "linear teacher"
            )
    if method.uses_teacher:
        _check_teacher(method, teacher, dataset)
    on_device = _on_device(on_device, method, dataset, mesh)
    batches = method.prepare(place(dataset, pools=method.pools, on_device=on_device))
    if on_device and teacher is not None and method.uses_teacher:
        batches = cache_teacher_features(batches, teacher)
    graphdef = nnx.graphdef(heads)
    state, best = _start(method, heads, batches, dataset, config, resume)
    # Only now, because `resume` and the first validation need arrays on one device.
    if mesh is not None:
        state, teacher = sharding.replicate((state, teacher), mesh)
    step = make_step(method, heads, config, mesh)
    # `Feed` draws the rows on the host and passes a `Batch`, so the step needs no key.
    key = batch_key(config) if on_device else None
    if int(state.step) < config.steps:
        observer.stage("compiling the training step (once)")
    warned = False
    # Metrics stay on the device until `unread` is full or a validation needs them.
    unread: list[tuple[int, dict[str, Array]]] = []
    with _source(batches, config, mesh, on_device) as data_of:
        for number in range(int(state.step) + 1, config.steps + 1):
            with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
                state, metrics = step(state, data_of(number - 1), teacher, key)
            unread.append((number, metrics))
            validate = number % config.eval_every == 0 or number == config.steps
            if not validate and len(unread) < _REPORT_EVERY:
                continue
            for past, values in jax.device_get(unread):
                # Checked before the validation, so that NaN parameters are never scored or saved.
                _check_finite(past, values)
                if validate and past == number:
                    best = _select(graphdef, state, best, number, dataset.val, values)
                warned = warned or _warn_unconverged(method, past, values)
                observer.metrics(past, values)
            unread.clear()
            if validate:
                observer.snapshot(number, Snapshot(sharding.local(state), best))
    return nnx.merge(graphdef, best.params), best


def _start(
    method: Objective,
    heads: Heads,
    batches: sampling.DeviceData,
    dataset: data.Dataset,
    config: TrainConfig,
    resume: Callable[[Snapshot], Snapshot | None] | None,
) -> Snapshot:
    """Builds or resumes the state of `fit`, and validates the initial heads."""
    state = init_state(method, heads, batches, config)
    # Any score is better than -1. Copied, because the step donates the state's arrays.
    best = Best(jax.tree.map(jnp.copy, state.params), jnp.int32(0), jnp.float32(-1.0))
    if resume is not None:
        state, best = resume(Snapshot(state, best)) or Snapshot(state, best)
    if int(state.step) == 0 and dataset.val is not None:
        best = _select(nnx.graphdef(heads), state, best, 0, dataset.val, {})
    return Snapshot(state, best)


def _source(
    batches: sampling.DeviceData, config: TrainConfig, mesh: Mesh | None, on_device: bool
) -> contextlib.AbstractContextManager[Callable[[int], Any]]:
    """Returns a context with a function that maps the number of a step to its data."""
    if on_device:
        return contextlib.nullcontext(lambda number: batches)
    return sampling.Feed(batches, batch_key(config), mesh=mesh, **_sizes(config))


def _on_device(
    asked: bool | None, method: Objective, dataset: data.Dataset, mesh: Mesh | None
) -> bool:
    """Resolves `on_device` of `fit`. None becomes True without a mesh if the arrays fit."""
    if asked and mesh is not None:
        raise checks.InputError(
            f"on_device must be False or None on a mesh of {mesh.size} devices, which read their "
            "rows from the host, got True"
        )
    if asked is not None:
        return asked
    # The other half of the memory is for the kernels and plans of a step.
    host = place(dataset, pools=method.pools, on_device=False)
    return mesh is None and _fits_in_memory(jax.tree.leaves(host))


def _check_finite(step: int, values: dict[str, Any]) -> None:
    """Raises NonFiniteLossError if the loss or the gradient of a step is NaN or infinite."""
    if not (np.isfinite(values["loss"]) and np.isfinite(values["gradient_norm"])):
        parts = ", ".join(f"{k} {float(value):.4g}" for k, value in values.items())
        raise NonFiniteLossError(
            f"loss or gradient is not finite at step {step} ({parts}); lower learning_rate or "
            "alpha, or raise epsilon_star"
        )


def _warn_unconverged(method: Objective, step: int, values: dict[str, Any]) -> bool:
    """Warns and returns True if a transport plan of this step has not converged."""
    if values.get("converged", True):
        return False
    # Up to 10 % above the tolerance may be rounding, which is harmless.
    error = max(values["student_error"], values["teacher_error"])
    if error <= 1.1 * getattr(method, "tolerance", 0.0):
        return False
    student, teacher = (
        f"{values[f'{name}_error']:.2g}, {solver.Status(values[f'{name}_status']).name}"
        for name in ("student", "teacher")
    )
    warnings.warn(
        f"a transport plan of step {step} stopped above the tolerance (errors: student "
        f"{student}, teacher {teacher}); raise max_iterations or epsilon_star, or accept a "
        "gradient that is off by as much",
        stacklevel=3,
    )
    return True


def _check_teacher(method: Objective, teacher: Teacher | None, dataset: data.Dataset) -> None:
    """Raises InputError unless there is a teacher for these embeddings."""
    if teacher is None:
        raise checks.InputError(
            f"teacher must not be None for {type(method).__name__}; fit one with teachers.cca"
        )
    check_widths(teacher, dataset.pairs_x.shape[1], dataset.pairs_y.shape[1])


def _select(
    graphdef: Any,
    state: TrainState,
    best: Best,
    number: int,
    gallery: data.Gallery | None,
    report: dict[str, Any],
) -> Best:
    """Returns the better of `best` and the current parameters, and adds scores to `report`."""
    # Copied, because the next step donates the state's arrays.
    params = jax.tree.map(jnp.copy, sharding.local(state.params))
    current = Best(params, jnp.int32(number), jnp.float32(0.0))
    if gallery is None:
        return current
    heads = nnx.merge(graphdef, params)
    scores = evaluation.evaluate(heads.x, heads.y, gallery)
    report.update({f"val/{name}": value for name, value in scores.items()})
    score = jnp.float32(scores["mean/R@1"])
    # Among equal scores the earliest step is kept.
    return current._replace(mean_r1=score) if score > best.mean_r1 else best


def contrastive(
    pairs_x: Rows,
    pairs_y: Rows,
    *,
    dim: int = 1024,
    steps: int = 2000,
    learning_rate: float = 1e-4,
    loss: str = "siglip",
    batch_size: int = 10_000,
    seed: int = 0,
) -> Teacher:
    """Fits the contrastive teacher: SAIL's linear heads, trained on the pairs and then frozen.

    Unlike those of CCA, its directions are in no particular order.

    Args:
        pairs_x: Paired embeddings of the first modality, shape [n, d_x].
        pairs_y: Their partners in the second modality, shape [n, d_y].
        dim: Width of the shared space.
        steps: Number of optimisation steps.
        learning_rate: Peak of the learning rate.
        loss: "siglip" or "infonce" (symmetric), both with a learned logit scale.
        batch_size: Pairs per step.
        seed: Seed of the initial heads and of all batches.

    Returns:
        The teacher.

    Raises:
        InputError: The pairs or an option are invalid.
        NonFiniteLossError: The loss or its gradient is NaN or infinite.

    Example:
        >>> A = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
        >>> contrastive(A, A, dim=3, steps=5).x(A).shape
        (50, 3)

    References:
        L. Zhang et al., "Assessing and learning alignment of unimodal vision and language models",
        CVPR 2025 (SAIL).
    """
    pairs_x, pairs_y = checks.pairs(pairs_x, pairs_y, min_rows=2)
    checks.whole(2, batch_size=batch_size)
    # Without a gallery a validation would only copy the parameters, so there is one at the end.
    config = TrainConfig(
        steps=steps,
        pair_batch=batch_size,
        learning_rate=learning_rate,
        eval_every=steps,
        seed=seed,
    )
    dataset = data.dataset((pairs_x, pairs_y))
    start = build_heads(pairs_x.shape[1], pairs_y.shape[1], dim, seed=seed)
    trained, _ = fit(Contrastive(loss), start, dataset, config)
    assert isinstance(trained.x, LinearHead) and isinstance(trained.y, LinearHead)
    map_x, map_y = trained.x.to_affine(), trained.y.to_affine()
    correlations = teachers.pearson(np.asarray(map_x(pairs_x)), np.asarray(map_y(pairs_y)))
    return Teacher(map_x, map_y, jnp.asarray(correlations, jnp.float32))


TEACHERS: dict[str, Callable[..., Teacher]] = {
    "procrustes": teachers.procrustes,
    "cca": teachers.cca,
    "tuned_cca": teachers.tuned_cca,
    "kernel_cca": teachers.kernel_cca,
    "best_cca": teachers.best_cca,
    "contrastive": contrastive,
}
"""Every teacher by name: (pairs_x, pairs_y, **options) -> Teacher."""
