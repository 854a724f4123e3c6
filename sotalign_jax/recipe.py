"""The path from data to a model: resolve, prepare, train.

1. A `Recipe` describes a training completely. `default` builds one from the arguments of `align`,
   and the launchers build one from a config.
2. `prepare` fits the teacher, maps the data through kernel features if there are any, and builds
   the heads to start from.
3. `train` trains the heads, selects among the candidates on validation, and calibrates.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from flax import nnx

from sotalign_jax import calibration, checks, data, evaluation, heads, methods, training
from sotalign_jax.heads import Heads, Teacher
from sotalign_jax.methods import Objective
from sotalign_jax.persistence import Parts
from sotalign_jax.progress import Observer

Tree = TypeVar("Tree")
STARTS = ("random", "teacher")
"""Initial values of linear heads."""
KERNEL_TEACHERS = ("kernel_cca", "best_cca")
"""Teachers that may be kernel maps."""
EPSILONS = (0.05, 0.1)
"""Epsilons of the calibration that the default recipe chooses between on validation."""
CALIBRATED_BY = 2048
"""Rows of each pool kept for calibration. 8,192 rows would add 0.6 points of R@10 (CCA, COCO)."""
# The width that cross-validation scores (crossval.DIRECTIONS), so that the heads keep the
# directions that were chosen.
MOST_FEATURES = 512
"""Largest number of directions of a kernel teacher that heads are trained on."""
# 512 features in float32 are 200 MB per pool. More rows cost memory and time before the first step.
MOST_MAPPED = 100_000
"""Largest number of rows of each pool that are mapped to kernel features."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A complete description of a training, except for the data.

    Attributes:
        method: The method. None returns the teacher itself as the model.
        train: Steps, batches, learning rate and seed.
        teacher: A name of `training.TEACHERS`, or a fitted teacher.
        teacher_options: Keyword arguments of the function that fits it.
        teacher_noise: Fraction of the teacher's pairs that are mismatched on purpose.
        start: "teacher" starts linear heads at the teacher's projection, "random" at random.
        features: "kernel" trains heads on the features of kernel CCA in place of the embeddings.
        head: Kind of the heads. None takes the method's own.
        hidden: Width of their hidden layers. None takes the kind's usual one.
        dim: Width of the shared space. None keeps all directions of the teacher that the heads
            start at, but at most `MOST_FEATURES` of a kernel teacher.
        average: Weight of the start in the average of start and trained heads. If it is positive,
            the best of start, trained heads and average on validation is returned, or the average
            if there is no validation gallery.
        calibration: Candidate epsilons of the calibration. The best one on validation is used.

    Raises:
        InputError: A name is unknown, or `dim` is None for random heads.

    >>> Recipe(methods.SAIL(), training.TrainConfig(), dim=512).uses_teacher
    False
    """

    method: methods.Method | None
    train: training.TrainConfig
    teacher: str | Teacher = "cca"
    teacher_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    teacher_noise: float = 0.0
    start: str = "random"
    features: str | None = None
    head: str | None = None
    hidden: int | None = None
    dim: int | None = None
    average: float = 0.0
    calibration: tuple[float, ...] = (0.05,)

    def __post_init__(self) -> None:
        checks.choice("start", self.start, STARTS)
        if isinstance(self.teacher, str):
            checks.choice("teacher", self.teacher, tuple(training.TEACHERS))
        if self.features is not None:
            checks.choice("features", self.features, ("kernel",))
        given = None if isinstance(self.teacher, str) else self.teacher
        if self.features == "kernel" and given is not None and not given.is_kernel:
            raise checks.InputError(
                "teacher maps embeddings but features='kernel' replaces them; pass a kernel "
                "teacher, or the name of one that is fitted on the features"
            )
        checks.whole(1, or_none=True, dim=self.dim)
        if self.dim is None and self.start == "random" and isinstance(self.method, Objective):
            raise checks.InputError("dim: is None but random heads need one; pass dim=512")

    @property
    def uses_teacher(self) -> bool:
        """True if a teacher must be fitted: for the loss, as the start, or as the model."""
        if isinstance(self.method, Objective):
            return self.method.uses_teacher or self.start == "teacher"
        return self.method is None

    def info(self) -> dict[str, Any]:
        """Returns the description as JSON values."""
        method, teacher = self.method, self.teacher if isinstance(self.teacher, str) else "given"
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **fields,
            "method": None if method is None else type(method).__name__,
            "options": dataclasses.asdict(method) if dataclasses.is_dataclass(method) else {},
            "teacher": teacher if self.uses_teacher else None,
            "teacher_options": {**self.teacher_options},
            "calibration": [*self.calibration],
            "train": dataclasses.asdict(self.train),
        }


# --- the default recipe --------------------------------------------------------------------------


class Preset(NamedTuple):
    """Default values of a named recipe, which replace arguments of `default` that are None.

    Attributes:
        teacher: A name of `training.TEACHERS`.
        start: Where linear heads start.
        dim: Width of the shared space of random heads.
        pair_batch: Pairs per step.
        alpha: Weight of KLOT, multiplied by the number of pairs in a batch. `default` divides
            by that number, because SigLIP's gradient falls with it.
        steps: Smallest and largest number of steps. A tenth of the pairs is clipped to this range.
        path: Steps times the learning rate. Lion moves a weight by at most the learning rate per
            step, so that the path bounds how far a weight can move.
        average: Weight of the start in the average of start and trained heads.
        calibration: Epsilons of the calibration.
    """

    teacher: str
    start: str
    dim: int
    pair_batch: int
    alpha: float
    steps: tuple[int, int]
    path: float
    average: float
    calibration: tuple[float, ...]


# "default": values chosen on validation data, see docs/recipes.md. "paper": the paper's, whose
# 2,000 steps at a peak of 1e-4 are a path of 0.2.
PRESETS = {
    "default": Preset("kernel_cca", "teacher", 512, 2048, 3.0, (100, 600), 0.05, 0.5, EPSILONS),
    "paper": Preset("cca", "random", 1024, 10_000, 1.0, (2000, 2000), 0.2, 0.0, (0.05,)),
}
"""The recipes of `align` by name."""


def default(
    dataset: data.Dataset,
    *,
    preset: str = "default",
    method: str | methods.Method | None = None,
    teacher: str | Teacher | None = None,
    start: str | None = None,
    features: str | None = None,
    dim: int | None = None,
    steps: int | None = None,
    learning_rate: float | None = None,
    unpaired_batch: int | None = None,
    seed: int = 0,
) -> Recipe:
    """Resolves the arguments of `align` to a recipe for the data.

    Args:
        dataset: Pairs, pools and the validation gallery.
        preset: A key of `PRESETS`, whose values replace arguments that are None.
        method: A method, or a name of `methods.METHODS`.
        teacher: A name of `training.TEACHERS`, or a fitted teacher.
        start: One of `STARTS`.
        features: "kernel" trains the heads on the features of kernel CCA.
        dim: Width of the shared space.
        steps: Number of training steps.
        learning_rate: Peak of the learning rate.
        unpaired_batch: Unpaired rows per step.
        seed: Seed of everything random.

    Returns:
        The recipe.

    Raises:
        InputError: An argument is out of range, or a name is unknown.

    >>> rows = np.eye(8, dtype=np.float32)
    >>> default(data.dataset((rows, rows))).train.steps
    100
    """
    checks.choice("recipe", preset, tuple(PRESETS))
    usual, n_pairs = PRESETS[preset], len(dataset.pairs_x)
    method = named(method)
    if method is None:
        # SigLIP's gradient falls with the pairs of a batch, and KLOT's does not. Dividing by the
        # pairs keeps the balance of both terms.
        alpha = usual.alpha / min(n_pairs, usual.pair_batch)
        unpaired = len(dataset.pool_x) or len(dataset.pool_y)
        method = methods.SOTAlign(alpha=alpha) if unpaired else methods.SAIL()
    linear = isinstance(method, Objective) and method.head == "linear"
    # Heads can start at the teacher only if they are linear, and if they see the same features as
    # the teacher.
    if start is None:
        kernel = features is None or teacher is None or _is_kernel(teacher)
        start = usual.start if linear and kernel else "random"
    # 22,768 is the paper's batch. The transport costs its square per step, which a CPU cannot
    # afford.
    if unpaired_batch is None:
        unpaired_batch = 1024 if jax.default_backend() == "cpu" else 22_768
    if steps is None:
        steps = int(np.clip(n_pairs // 10, *usual.steps))
    checks.whole(1, steps=steps, unpaired_batch=unpaired_batch)
    steps = int(steps)
    train = training.TrainConfig(
        steps=steps,
        pair_batch=usual.pair_batch,
        unpaired_batch=int(unpaired_batch),
        learning_rate=usual.path / steps if learning_rate is None else float(learning_rate),
        eval_every=20,
        seed=int(seed),
    )
    return Recipe(
        method,
        train,
        teacher=usual.teacher if teacher is None else teacher,
        start=start,
        features=features,
        dim=usual.dim if dim is None and start == "random" else dim,
        average=usual.average if start == "teacher" else 0.0,
        calibration=usual.calibration,
    )


def named(method: str | methods.Method | None) -> methods.Method | None:
    """Looks up a method by its name in `methods.METHODS`.

    Args:
        method: The name. A method, or None, is returned unchanged.

    Returns:
        The method.

    Raises:
        InputError: There is no such name.

    >>> type(named("sail")).__name__
    'SAIL'
    """
    if not isinstance(method, str):
        return method
    checks.choice("method", method, tuple(methods.METHODS))
    return methods.METHODS[method]


# --- prepare -------------------------------------------------------------------------------------


class Prepared(NamedTuple):
    """The state of a training before its first step.

    Attributes:
        dataset: The data, mapped to kernel features if there are any.
        start: The heads to start from, which take rows of `dataset`. None for a
            `methods.Fitted`, which has no training steps.
        teacher: The teacher, which takes rows of `dataset`. None if the recipe uses no teacher.
        features: The kernel maps that the rows of `dataset` have passed through.
        shapes: Shapes of the data before any mapping to features.
    """

    dataset: data.Dataset
    start: Heads | None
    teacher: Teacher | None
    features: Teacher | None
    shapes: dict[str, Any]


def _same(tree: Tree) -> Tree:
    """Returns its argument. A single process needs no broadcast."""
    return tree


def prepare(
    recipe: Recipe,
    dataset: data.Dataset,
    *,
    observer: Observer | None = None,
    broadcast: Callable[[Teacher], Teacher] = _same,
) -> Prepared:
    """Fits the teacher, maps the data to kernel features and builds the heads to start from.

    Args:
        recipe: The description of the training.
        dataset: Pairs, pools and galleries.
        observer: Callbacks for stages.
        broadcast: Copies the first process's teacher to all processes, whose own fits may differ
            by rounding.

    Returns:
        The state before the first step.

    Raises:
        InputError: The recipe and the data do not fit together.
    """
    observer = observer or Observer()
    if recipe.method is not None:
        dataset = fill_pools(recipe.method.pools, dataset)
        training.check_pool(recipe.method, dataset)
    shapes, teacher, features = dataset.summary(), None, None
    # With features="kernel" the heads take kernel features, and a linear teacher is fitted on them
    # below. Otherwise the heads take the features of a kernel teacher if they start at it.
    if recipe.features is not None:
        observer.stage("fitting kernel features")
        maps = "kernel_cca" if isinstance(recipe.teacher, str) else recipe.teacher
        maps = maps if _is_kernel(maps) else "kernel_cca"
        features = broadcast(_features(recipe, fit_teacher(recipe, dataset, maps)))
    elif recipe.uses_teacher:
        observer.stage("fitting the teacher")
        teacher = broadcast(fit_teacher(recipe, dataset, recipe.teacher))
        if teacher.is_kernel and recipe.start == "teacher":
            features = _features(recipe, teacher)
    if features is not None:
        observer.stage("mapping the data to kernel features")
        dataset = mapped(dataset, features, seed=recipe.train.seed)
        if teacher is not None or _is_kernel(recipe.teacher):
            # The rows are the kernel teacher's features by now, so the teacher needs no maps.
            teacher = Teacher(None, None, features.correlations)
        elif recipe.uses_teacher:
            teacher = broadcast(fit_teacher(recipe, dataset, recipe.teacher))
    return Prepared(dataset, _start(recipe, dataset, teacher), teacher, features, shapes)


def fill_pools(pools: str, dataset: data.Dataset) -> data.Dataset:
    """Fills an empty pool with the pairs' own rows, if the other pool has rows.

    Args:
        pools: The modalities whose pool the method uses: "xy", "x", "y" or "".
        dataset: The data.

    Returns:
        The data. If both pools are empty, they stay empty.

    >>> rows = np.eye(8)
    >>> fill_pools("xy", data.dataset((rows, rows), x=np.ones((5, 8)))).pool_y.shape
    (8, 8)
    """
    if len(dataset.pool_x) or len(dataset.pool_y):
        for side in pools:
            if not len(getattr(dataset, f"pool_{side}")):
                pairs = getattr(dataset, f"pairs_{side}")
                dataset = dataclasses.replace(dataset, **{f"pool_{side}": pairs})
    return dataset


def _is_kernel(teacher: str | Teacher) -> bool:
    """Returns True for a kernel teacher, or for a name whose teacher may be one."""
    return teacher in KERNEL_TEACHERS if isinstance(teacher, str) else teacher.is_kernel


def _features(recipe: Recipe, teacher: Teacher) -> Teacher:
    """Returns the directions of a kernel teacher that heads are trained on."""
    if recipe.start == "teacher" and recipe.dim is not None:
        return teacher.leading(recipe.dim)
    return teacher.leading(min(teacher.dim, MOST_FEATURES))


def fit_teacher(recipe: Recipe, dataset: data.Dataset, teacher: str | Teacher) -> Teacher:
    """Fits a teacher on the pairs.

    Args:
        recipe: The description of the training, which has seed, noise and options of the teacher.
        dataset: The pairs.
        teacher: A name of `training.TEACHERS`. A fitted teacher is checked and returned.

    Returns:
        The teacher.

    Raises:
        InputError: The teacher does not fit the data. The message begins with "teacher: ".
    """
    if not isinstance(teacher, str):
        heads.check_widths(teacher, dataset.pairs_x.shape[1], dataset.pairs_y.shape[1])
        return teacher
    seed, pairs_y = recipe.train.seed, dataset.pairs_y
    # The recipe's options are for its own teacher. A kernel CCA that is fitted only for its
    # features takes the defaults.
    options = dict(recipe.teacher_options) if teacher == recipe.teacher else {}
    if recipe.teacher_noise:
        pairs_y = data.mismatch_pairs(pairs_y, fraction=recipe.teacher_noise, seed=seed)
    if teacher in ("tuned_cca", *KERNEL_TEACHERS):
        options = {"seed": seed} | options
    if teacher == "contrastive":
        options = {"seed": seed, "dim": recipe.dim or MOST_FEATURES} | options
    with checks.naming("teacher: "):
        return training.TEACHERS[teacher](dataset.pairs_x, pairs_y, **options)


def mapped(dataset: data.Dataset, features: Teacher, *, seed: int = 0) -> data.Dataset:
    """Replaces the embeddings by unit features, for training and validation.

    Args:
        dataset: Pairs, pools and the validation gallery. Other galleries are left out.
        features: Maps of both modalities.
        seed: Seed of the rows that are drawn from a pool larger than `MOST_MAPPED`.

    Returns:
        The mapped data, in memory.
    """
    rng = np.random.default_rng(seed)

    def apply(map: Any, rows: Any) -> np.ndarray:
        if len(rows) > MOST_MAPPED:
            # Sorted, because a memory-mapped pool is read fastest in the order of the file.
            rows = rows[np.sort(rng.choice(len(rows), MOST_MAPPED, replace=False))]
        if not len(rows):
            return np.zeros((0, features.dim), np.float32)
        return evaluation.embed(map, rows)

    x, y, val = features.map_x, features.map_y, dataset.val
    pairs = evaluation.embed(x, dataset.pairs_x), evaluation.embed(y, dataset.pairs_y)
    pools = apply(x, dataset.pool_x), apply(y, dataset.pool_y)
    if val is not None:
        val = val._replace(x=evaluation.embed(x, val.x), y=evaluation.embed(y, val.y))
    return data.Dataset(*pairs, *pools, val=val)


def _start(recipe: Recipe, dataset: data.Dataset, teacher: Teacher | None) -> Heads | None:
    """Builds the heads to start from, or returns None for a method without training steps."""
    method = recipe.method
    if isinstance(method, methods.Fitted):
        return None
    assert method is None or isinstance(method, Objective)
    widths = dataset.pairs_x.shape[1], dataset.pairs_y.shape[1]
    # Without a method the model is the teacher itself, as linear heads that start at it.
    kind = "linear" if method is None else recipe.head or method.head
    with checks.naming("heads: "):
        if method is None or recipe.start == "teacher":
            assert teacher is not None
            # Rows that were mapped to kernel features are in the shared space already.
            if teacher.map_x is None and kind == "linear":
                return heads.identity_heads(teacher.dim)
            dim = teacher.dim if recipe.dim is None else recipe.dim
            return heads.build_heads(*widths, dim, kind=kind, teacher=teacher)
        assert recipe.dim is not None
        return heads.build_heads(
            *widths, recipe.dim, kind=kind, hidden=recipe.hidden, seed=recipe.train.seed
        )


# --- train ---------------------------------------------------------------------------------------


def train(
    recipe: Recipe,
    prepared: Prepared,
    *,
    observer: Observer | None = None,
    progress: bool = False,
    **options: Any,
) -> Parts:
    """Trains the prepared heads, selects among the candidates, and calibrates.

    Args:
        recipe: The description of the training.
        prepared: The result of `prepare`.
        observer: Callbacks for stages, metrics and snapshots.
        progress: True shows the progress of a `methods.Fitted`. Others report to `observer`.
        **options: `resume`, `mesh` and `on_device` of `training.fit`.

    Returns:
        The heads, which accept embeddings, the calibration, and `info`, a dictionary with the
        options and the validation score of every candidate.
    """
    dataset, start, teacher, features, shapes = prepared
    method, seed = recipe.method, recipe.train.seed
    info = {**recipe.info(), "data": shapes}
    if isinstance(method, methods.Fitted):
        trained = method.fit(dataset, seed=seed, progress=progress)
    elif method is None:
        assert start is not None
        trained = start
    else:
        assert start is not None and isinstance(method, Objective)
        trained, best = training.fit(
            method, start, dataset, recipe.train, teacher=teacher, observer=observer, **options
        )
        trained, found = select(start, trained, dataset.val, average=recipe.average)
        info |= {"best_step": int(best.step), **found}
    # Calibrate before the kernel maps are prepended: the rows of `dataset` are mapped already.
    made = calibrate(trained, dataset, recipe.calibration)
    return Parts(trained if features is None else heads.prepend(features, trained), info, made)


def select(
    start: Heads, trained: Heads, gallery: data.Gallery | None, *, average: float
) -> tuple[Heads, dict[str, Any]]:
    """Selects the best of start, trained heads and their average on validation.

    Averaging the weights before and after training often generalises better than either. Among
    equal scores the simplest candidate is selected: the start, then the trained heads.

    Args:
        start: The heads before training. The result calls them "teacher".
        trained: The heads after training.
        gallery: The validation gallery. Without one the average is returned.
        average: Weight of the start in the average. 0 returns the trained heads.

    Returns:
        The selected heads, and a dictionary: "selected" names the candidate, "candidates" has the
        MeanR@1 of each, "val_mean_r1" that of the selected one.

    References:
        M. Wortsman et al., "Robust fine-tuning of zero-shot models", CVPR 2022.
    """
    candidates = {"trained": trained}
    if average:
        graphdef, before = nnx.split(start)
        after = nnx.state(trained)
        mean = jax.tree.map(lambda a, b: average * a + (1 - average) * b, before, after)
        candidates = {"teacher": start, **candidates, "average": nnx.merge(graphdef, mean)}
    if gallery is None:
        name = list(candidates)[-1]
        return candidates[name], {"selected": name, "candidates": {}, "val_mean_r1": None}
    scores = {
        name: evaluation.evaluate(one.x, one.y, gallery)["mean/R@1"]
        for name, one in candidates.items()
    }
    # `max` returns the first of equals, and candidates are sorted by simplicity.
    name = max(scores, key=lambda name: scores[name])
    return candidates[name], {"selected": name, "candidates": scores, "val_mean_r1": scores[name]}


def calibrate(
    model: Heads, dataset: data.Dataset, epsilons: Sequence[float]
) -> calibration.Calibration:
    """Computes a calibration from a sample of each pool, or of the pairs if the pool is empty.

    Args:
        model: The heads.
        dataset: Pools, pairs, and the validation gallery.
        epsilons: Candidates. The one with the best calibrated R@10 on validation is used.
            Without validation their geometric mean is used.

    Returns:
        The calibration.
    """
    rng = np.random.default_rng(0)
    features = []
    for side, head in (("x", model.x), ("y", model.y)):
        pool, pairs = getattr(dataset, f"pool_{side}"), getattr(dataset, f"pairs_{side}")
        rows = pool if len(pool) else pairs
        # Rows are drawn before they are embedded, since a pool may have millions of them.
        kept = np.sort(rng.permutation(len(rows))[:CALIBRATED_BY])
        features.append(evaluation.embed(head, np.asarray(rows[kept])))
    val = dataset.val
    # Epsilons are scales, whose middle is the geometric mean.
    if val is None or len(epsilons) == 1:
        epsilons = [float(np.exp(np.mean(np.log(epsilons))))] if len(epsilons) > 1 else epsilons
        return calibration.calibrate(*features, epsilon=epsilons[0], sample=CALIBRATED_BY)
    tried = [calibration.calibrate(*features, epsilon=e, sample=CALIBRATED_BY) for e in epsilons]
    scores = [evaluation.evaluate(model.x, model.y, val, one) for one in tried]
    best = max(range(len(tried)), key=lambda i: scores[i]["calibrated/mean/R@10"])
    return tried[best]
