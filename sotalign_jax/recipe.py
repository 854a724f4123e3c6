"""The path from data to a model: resolve, prepare, train.

1. A `Recipe` describes a training run completely. `default` builds one from the arguments of
   `align`, and the launchers build one from a config.
2. `prepare` fits the teacher and builds the heads to start from.
3. `train` trains the heads, mixes them with the teacher by validation, and calibrates.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from sotalign_jax import (
    calibration,
    checks,
    confidence,
    data,
    evaluation,
    heads,
    methods,
    teachers,
    training,
)
from sotalign_jax.aligner import Aligner, describe_unpaired
from sotalign_jax.heads import Heads, Teacher
from sotalign_jax.methods import Objective
from sotalign_jax.progress import Observer
from sotalign_jax.teachers import Refined

Tree = TypeVar("Tree")
STARTS = ("random", "centred", "teacher")
"""Initial values of heads: random weights, random weights on centred rows, or the teacher's map."""
KERNEL_TEACHERS = ("kernel_cca", "best_cca", "refined_cca")
"""Teachers that may be kernel maps, which heads cannot start at."""
TEACHERS = (*training.TEACHERS, "refined_cca")
"""Names of all teachers. The last one also uses the unpaired rows."""
WORK = {
    "tuned_cca": "cross-validation of its ridges",
    "kernel_cca": "cross-validation of its bandwidths",
    "best_cca": "cross-validation of a linear and a kernel CCA",
    "refined_cca": "cross-validation, then rounds of transport between the pools",
    "contrastive": "training on the pairs",
    "given": "nothing to do",
}
"""Work that fitting a teacher takes, for a line of progress."""
TUNED_TEACHERS = ("tuned_cca", *KERNEL_TEACHERS)
"""Teachers whose options are chosen by cross-validation, which needs a seed."""
# 0.75 was at least as good as the teacher on five data sets. 0.5 and 0.25 gain more where the
# unpaired rows help, and lose where they do not (docs/recipes.md).
MIXTURES = (0.75, 0.5, 0.25)
"""Weights of the teacher that the default recipe chooses between on validation. Without validation
it takes the first one."""
EPSILONS = (0.05, 0.1)
"""Epsilons of the calibration that the default recipe chooses between on validation."""
PATH = 0.2
"""Steps times the peak of the learning rate. Lion moves a weight by at most the learning rate per
step, so the path bounds how far a weight can move. The paper's is 2,000 * 1e-4."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Describes a training run completely, except for the data.

    Attributes:
        method: The method. None returns the teacher itself as the model.
        train: Steps, batches, learning rate and seed.
        teacher: A name of `TEACHERS`, or a fitted teacher.
        teacher_options: Keyword arguments of the function that fits it.
        teacher_noise: Fraction of the teacher's pairs that are mismatched on purpose.
        start: "random" starts the heads at random. "centred" also subtracts the pairs' mean,
            because rows that share a large mean, as of some text encoders, start with cosines near
            1 and may stay there. "teacher" starts linear heads at the teacher's projection.
        head: Kind of the heads. By default that of the method.
        hidden: Width of their hidden layers. By default that of the kind.
        dim: Width of the trained heads' features. None keeps all directions of the teacher that
            the heads start at.
        mixtures: Weights of the teacher in mixtures with the trained heads, see `heads.mix`. If
            there are any, `select` chooses between the teachers, the trained heads and mixtures on
            validation, or takes the first mixture if there is no validation gallery.
        calibration: Candidate epsilons of the calibration. The best one on validation is used.

    Raises:
        InputError: A name is unknown, `dim` is None for random heads, or the heads shall start at a
            kernel teacher.

    Example:
        >>> Recipe(methods.SAIL(), training.TrainConfig(), dim=512).uses_teacher
        False
    """

    method: methods.Method | None
    train: training.TrainConfig
    teacher: str | Teacher = "cca"
    teacher_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    teacher_noise: float = 0.0
    start: str = "random"
    head: str | None = None
    hidden: int | None = None
    dim: int | None = None
    mixtures: tuple[float, ...] = ()
    calibration: tuple[float, ...] = (0.05,)

    def __post_init__(self) -> None:
        checks.choice("start", self.start, STARTS)
        if isinstance(self.teacher, str):
            checks.choice("teacher", self.teacher, TEACHERS)
        checks.whole(1, or_none=True, dim=self.dim)
        if self.dim is None and self.start != "teacher" and isinstance(self.method, Objective):
            raise checks.InputError("dim must be an integer for random heads, got None")
        kernel = self.teacher in KERNEL_TEACHERS or getattr(self.teacher, "is_kernel", False)
        if kernel and self.start == "teacher" and isinstance(self.method, Objective):
            named = repr(self.teacher) if isinstance(self.teacher, str) else "a kernel teacher"
            raise checks.InputError(
                f"start must be 'random' with {named}, which may be nonlinear, got 'teacher'; "
                "choose a linear teacher such as 'tuned_cca' to start at it"
            )

    @property
    def uses_teacher(self) -> bool:
        """True if a teacher must be fitted: for the loss, the start, a mixture, or the model."""
        if isinstance(self.method, Objective):
            return self.method.uses_teacher or self.start == "teacher" or bool(self.mixtures)
        return self.method is None

    def info(self) -> dict[str, Any]:
        """Returns the description as JSON values."""
        # A fitted teacher has no JSON form.
        method, teacher = self.method, self.teacher if isinstance(self.teacher, str) else "given"
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **fields,
            "method": None if method is None else type(method).__name__,
            "options": dataclasses.asdict(method) if dataclasses.is_dataclass(method) else {},
            "teacher": teacher if self.uses_teacher else None,
            "teacher_options": {**self.teacher_options},
            "mixtures": [*self.mixtures],
            "calibration": [*self.calibration],
            "train": dataclasses.asdict(self.train),
        }


# --- the default recipe --------------------------------------------------------------------------


class Preset(NamedTuple):
    """Default values of a named recipe, which replace arguments of `default` that are None.

    Attributes:
        teacher: A name of `TEACHERS`.
        dim: Width of the features of random heads.
        pair_batch: Pairs per step.
        alpha: `default` sets the alpha of SOTAlign to this value divided by the number of pairs in
            a batch, because SigLIP's gradient shrinks with that number and KLOT's does not.
        steps: Smallest and largest default number of steps. The default is one step per ten pairs,
            clipped to this range.
        mixtures: Weights of the teacher in mixtures with the trained heads.
        calibration: Epsilons of the calibration.
        start: Start of the heads.
    """

    teacher: str
    dim: int
    pair_batch: int
    alpha: float
    steps: tuple[int, int]
    mixtures: tuple[float, ...]
    calibration: tuple[float, ...]
    start: str


# The values of "default" were chosen on validation data, see docs/recipes.md.
PRESETS = {
    "default": Preset("refined_cca", 512, 2048, 3.0, (100, 600), MIXTURES, EPSILONS, "centred"),
    "paper": Preset("cca", 1024, 10_000, 1.0, (2000, 2000), (), (0.05,), "random"),
}
"""The recipes of `align` by name."""


def default(
    dataset: data.Dataset,
    *,
    preset: str = "default",
    method: str | methods.Method | None = None,
    teacher: str | Teacher | None = None,
    start: str | None = None,
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
        teacher: A name of `TEACHERS`, or a fitted teacher.
        start: One of `STARTS`.
        dim: Width of the trained heads' features.
        steps: Number of training steps.
        learning_rate: Peak of the learning rate.
        unpaired_batch: Unpaired rows per step.
        seed: Seed of all random choices.

    Returns:
        The recipe.

    Raises:
        InputError: An argument is out of range, or a name is unknown.

    Example:
        >>> rows = np.eye(8, dtype=np.float32)
        >>> default(data.dataset((rows, rows))).train.steps
        100
    """
    checks.choice("recipe", preset, tuple(PRESETS))
    values, n_pairs = PRESETS[preset], len(dataset.pairs_x)
    mixes = method is None or teacher is not None
    method = resolve_method(method)
    if method is None:
        # SigLIP's gradient falls with the pairs of a batch, and KLOT's does not. Dividing by the
        # pairs keeps the balance of both terms.
        alpha = values.alpha / min(n_pairs, values.pair_batch)
        unpaired = len(dataset.pool_x) or len(dataset.pool_y)
        method = methods.SOTAlign(alpha=alpha) if unpaired else methods.SAIL()
    # 22,768 is the paper's batch. The transport costs its square per step, which a CPU cannot
    # afford.
    if unpaired_batch is None:
        unpaired_batch = 1024 if jax.default_backend() == "cpu" else 22_768
    if steps is None:
        steps = int(np.clip(n_pairs // 10, *values.steps))
    checks.whole(1, steps=steps, unpaired_batch=unpaired_batch)
    steps = int(steps)
    train = training.TrainConfig(
        steps=steps,
        pair_batch=values.pair_batch,
        unpaired_batch=int(unpaired_batch),
        learning_rate=PATH / steps if learning_rate is None else float(learning_rate),
        eval_every=20,
        seed=int(seed),
    )
    start = values.start if start is None else start
    return Recipe(
        method,
        train,
        teacher=values.teacher if teacher is None else teacher,
        start=start,
        dim=values.dim if dim is None and start != "teacher" else dim,
        # If the caller chose a method without a teacher, its heads are returned without mixtures.
        mixtures=values.mixtures if mixes or getattr(method, "uses_teacher", False) else (),
        calibration=values.calibration,
    )


def resolve_method(method: str | methods.Method | None) -> methods.Method | None:
    """Looks up a method by its name in `methods.METHODS`.

    Args:
        method: The name. A method, or None, is returned unchanged.

    Returns:
        The method.

    Raises:
        InputError: There is no such name.

    Example:
        >>> type(resolve_method("sail")).__name__
        'SAIL'
    """
    if not isinstance(method, str):
        return method
    checks.choice("method", method, tuple(methods.METHODS))
    return methods.METHODS[method]


# --- prepare -------------------------------------------------------------------------------------


class Prepared(NamedTuple):
    """The state before the first training step.

    Attributes:
        dataset: The data, with the pairs' rows in place of a missing pool.
        start: The heads to start from. None for a `methods.Fitted`, which has no training steps.
        teacher: The teacher. None if the recipe uses no teacher.
        refined: How unpaired rows refined the teacher. None if they were not used.
    """

    dataset: data.Dataset
    start: Heads | None
    teacher: Teacher | None
    refined: Refined | None = None


def _same(tree: Tree) -> Tree:
    """Returns its argument. A single process needs no broadcast."""
    return tree


def prepare(
    recipe: Recipe,
    dataset: data.Dataset,
    *,
    observer: Observer | None = None,
    broadcast: Callable[[Teacher | Refined], Teacher | Refined] = _same,
    mesh: Mesh | None = None,
) -> Prepared:
    """Fits the teacher and builds the heads to start from.

    Args:
        recipe: The recipe.
        dataset: Pairs, pools and galleries.
        observer: Callbacks for stages.
        broadcast: Copies the first process's teacher to all processes, whose own fits may differ
            by rounding.
        mesh: Devices of this process that the plans of "refined_cca" are split over.

    Returns:
        The state before the first step.

    Raises:
        InputError: The recipe and the data do not fit together.
    """
    observer = observer or Observer()
    if recipe.method is not None:
        dataset = fill_pools(recipe.method.pools, dataset)
        training.check_pool(recipe.method, dataset)
    teacher, refined = None, None
    if recipe.uses_teacher:
        name = recipe.teacher if isinstance(recipe.teacher, str) else "given"
        doing = WORK.get(name, "closed form")
        observer.stage(f"fitting the teacher {name} on {len(dataset.pairs_x):,} pairs: {doing}")
        start = time.perf_counter()
        fitted = broadcast(fit_teacher(recipe, dataset, mesh=mesh, report=observer.stage))
        refined = fitted if isinstance(fitted, Refined) else None
        teacher = fitted.teacher if isinstance(fitted, Refined) else fitted
        observer.stage(f"fitted the teacher in {time.perf_counter() - start:.1f} s; preparing")
    return Prepared(dataset, _start(recipe, dataset, teacher), teacher, refined)


def fill_pools(pools: str, dataset: data.Dataset) -> data.Dataset:
    """Fills an empty pool with the pairs' own rows, if the other pool has rows.

    Args:
        pools: The modalities whose pool the method uses: "xy", "x", "y" or "".
        dataset: The data.

    Returns:
        The data. If both pools are empty, they stay empty.

    Example:
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


def fit_teacher(
    recipe: Recipe,
    dataset: data.Dataset,
    *,
    mesh: Mesh | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Teacher | Refined:
    """Fits the teacher of a recipe.

    Args:
        recipe: The recipe. A fitted teacher is checked and returned.
        dataset: Pairs and pools.
        mesh: Devices that the plans of "refined_cca" are split over.
        report: Called with a line of progress.

    Returns:
        The teacher, with its refinement if the teacher is "refined_cca" and there are pools.

    Raises:
        InputError: The teacher does not fit the data. The message begins with "teacher".
    """
    teacher, seed, pairs_y = recipe.teacher, recipe.train.seed, dataset.pairs_y
    if not isinstance(teacher, str):
        heads.check_widths(teacher, dataset.pairs_x.shape[1], dataset.pairs_y.shape[1])
        return teacher
    options = dict(recipe.teacher_options)
    if recipe.teacher_noise:
        pairs_y = data.mismatch_pairs(pairs_y, fraction=recipe.teacher_noise, seed=seed)
    if teacher in TUNED_TEACHERS:
        options = {"seed": seed} | options
    if teacher == "contrastive":
        options = {"seed": seed, "dim": recipe.dim or PRESETS["default"].dim} | options
    with checks.naming("teacher: "):
        if teacher != "refined_cca":
            return training.TEACHERS[teacher](dataset.pairs_x, pairs_y, **options)
        pools = fill_pools("xy", dataset)
        if not len(pools.pool_x):
            return teachers.best_cca(dataset.pairs_x, pairs_y, **options)
        return teachers.refine(
            dataset.pairs_x,
            pairs_y,
            pools.pool_x,
            pools.pool_y,
            mesh=mesh,
            report=report,
            **options,
        )


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
            dim = teacher.dim if recipe.dim is None else recipe.dim
            return heads.build_heads(*widths, dim, kind=kind, teacher=teacher)
        assert recipe.dim is not None
        made = heads.build_heads(
            *widths, recipe.dim, kind=kind, hidden=recipe.hidden, seed=recipe.train.seed
        )
        if recipe.start == "centred":
            for head, pairs in ((made.x, dataset.pairs_x), (made.y, dataset.pairs_y)):
                assert isinstance(head, heads.Network)
                head.centre(pairs)
        return made


# --- train ---------------------------------------------------------------------------------------


def train(
    recipe: Recipe,
    prepared: Prepared,
    *,
    observer: Observer | None = None,
    progress: bool = False,
    **options: Any,
) -> Aligner:
    """Trains the prepared heads, mixes them with the teacher, and calibrates.

    Args:
        recipe: The recipe.
        prepared: The result of `prepare`.
        observer: Callbacks for stages, metrics and snapshots.
        progress: True shows the progress of a `methods.Fitted`. Other methods report to `observer`.
        **options: `resume`, `mesh` and `on_device` of `training.fit`.

    Returns:
        The aligner. Its `info` has the options, the validation score of every candidate, and the
        confidence of its results.
    """
    dataset, start, teacher, refined = prepared
    observer = observer or Observer()
    method, seed = recipe.method, recipe.train.seed
    info = {**recipe.info(), "data": dataset.summary()}
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
        mixtures, epsilons = recipe.mixtures, recipe.calibration
        first = None if refined is None else refined.first
        model, calibrated, found = select(
            trained, teacher, dataset, mixtures, epsilons, first=first
        )
        if refined is not None:
            found["unpaired"] = unpaired_gain(found, refined)
            observer.stage(describe_unpaired(found["unpaired"]))
        chosen = found.pop("calibrated")
        info = {**info, "best_step": int(best.step), **found}
        aligned = Aligner(model, info, calibrated, calibrated=chosen)
        return fit_confidence(aligned, dataset.val)
    if refined is not None:
        info["unpaired"] = unpaired_gain({"candidates": {}}, refined)
    made = _calibrate(_embed(trained, dataset), dataset, recipe.calibration)
    aligned = Aligner(trained, info, made.calibration, calibrated=made.helps)
    return fit_confidence(aligned, dataset.val)


def fit_confidence(aligned: Aligner, gallery: data.Gallery | None) -> Aligner:
    """Fits the probabilities that results are right, see `confidence.of_gallery`.

    Args:
        aligned: The aligner.
        gallery: Held-out pairs, or None.

    Returns:
        The aligner with "confidence" in its `info`. Without held-out pairs, or if there are too
        few, no probabilities are known.
    """
    if gallery is None:
        return aligned
    f = evaluation.embed(aligned.heads.x, gallery.x)
    g = evaluation.embed(aligned.heads.y, gallery.y)
    fitted = confidence.of_gallery(f, g, gallery.x_of_y, aligned.calibration)
    return dataclasses.replace(aligned, info={**aligned.info, "confidence": fitted})


def unpaired_gain(selection: Mapping[str, Any], refined: Refined) -> dict[str, Any]:
    """Measures what the unpaired rows brought.

    Args:
        selection: The dictionary that `select` returns.
        refined: The refinement of the teacher.

    Returns:
        "rounds" of the refinement, and "plan_error", the largest marginal error of its plans.
        "with" and "without" are the scores of the selected teacher, before any mixing with trained
        heads, and of the teacher of the pairs alone. "score" names them: the mean of plain and
        calibrated R@1, R@5 and R@10 on validation, or, if the teacher of the pairs alone is no
        candidate, the teacher's mean reciprocal rank in cross-validation, in percent.

    Example:
        >>> best = {"base": "teacher", "candidates": {"pairs alone": 55.3, "teacher": 60.4}}
        >>> unpaired_gain(best, Refined(None, None, (0.5, 0.6)))["with"]
        60.4
    """
    scores = selection["candidates"]
    # Without mixtures the trained heads are the only candidate.
    if "pairs alone" in scores:
        gain = {"score": "mean recall", "with": scores[selection["base"]]}
        gain["without"] = scores["pairs alone"]
    else:
        ranks = [100.0 * score for score in refined.scores]
        gain = {"score": "mean reciprocal rank", "with": ranks[-1], "without": ranks[0]}
    return {"rounds": refined.rounds, "plan_error": refined.plan_error, **gain}


def select(
    trained: Heads,
    teacher: Teacher | None,
    dataset: data.Dataset,
    weights: Sequence[float] = (),
    epsilons: Sequence[float] = (0.05,),
    *,
    first: Teacher | None = None,
) -> tuple[Heads, calibration.Calibration, dict[str, Any]]:
    """Selects the teacher, the trained heads or a mixture of both on validation.

    Teacher and trained heads err on different rows, so a mixture often retrieves better than either
    of them. So do the teachers with and without the unpaired rows. Plain and calibrated retrieval
    count equally. First a teacher is selected, then this teacher, one of its mixtures or the
    trained heads. Both times it is the first candidate that no other one beats by more than a
    standard error, because small galleries favour candidates by chance.

    Args:
        trained: The heads after training.
        teacher: The teacher. It may be None if there are no weights.
        dataset: Pools, pairs, and the validation gallery. Without a gallery the first mixture is
            returned.
        weights: Weights of the teacher. Without any the trained heads are returned.
        epsilons: Candidate epsilons of the calibration, see `calibrate`.
        first: The teacher before its refinement, another candidate.

    Returns:
        The selected heads, their calibration, and a dictionary. "selected" names the candidate.
        "candidates" maps each candidate to its mean of plain and calibrated R@1, R@5 and R@10 on
        validation. "base" names the teacher that is mixed with the trained heads. "kernel_teacher"
        is True if the teacher is nonlinear. "calibrated" is True if scores shall be calibrated by
        default: if the mean of R@1, R@5 and R@10 on validation is then higher, or without
        a gallery, if there are unpaired rows, because calibration then raised recall on all data
        sets of docs/recipes.md.

    References:
        L. Breiman, "Stacked regressions", Machine Learning 24 (1996).
        L. Breiman et al., "Classification and regression trees" (1984), the rule of one standard
        error.
    """
    if not weights:
        found = _calibrate(_embed(trained, dataset), dataset, epsilons)
        scores = {} if dataset.val is None else {"trained": _mean(*found.hits)}
        alone: dict[str, Any] = {"selected": "trained", "candidates": scores}
        alone["calibrated"] = found.helps
        if teacher is not None:
            alone["kernel_teacher"] = teacher.is_kernel
        return trained, found.calibration, alone
    assert teacher is not None
    models = trained, teacher, first
    known = _Candidates(dataset, _middle(epsilons), sum(_width(model) for model in models))
    widths = trained.x.d_in, trained.y.d_in
    known.add("teacher", heads.build_heads(*widths, teacher.dim, teacher=teacher))
    base = "teacher"
    if first is not None and first is not teacher:
        known.add("pairs alone", heads.build_heads(*widths, first.dim, teacher=first))
        known.mix("both teachers", "pairs alone", "teacher", 0.5)
        base = known.best(("teacher", "both teachers", "pairs alone"))
    known.add("trained", trained)
    mixtures = [f"mixture with {weight:.0%} teacher" for weight in weights]
    for name, weight in zip(mixtures, weights, strict=True):
        known.mix(name, base, "trained", weight)
    selected = mixtures[0] if dataset.val is None else known.best((base, *mixtures, "trained"))
    found = _calibrate(known.padded(selected), dataset, epsilons)
    info = {
        "calibrated": found.helps,
        "selected": selected,
        "base": base,
        "candidates": known.scores(),
        "kernel_teacher": (teacher if base == "teacher" or first is None else first).is_kernel,
    }
    made, width = found.calibration, known.rows[selected].pool_x.shape[1]
    made = dataclasses.replace(made, f=made.f[:, :width], g=made.g[:, :width])
    return known.heads[selected], made, info


def _width(model: Heads | Teacher | None) -> int:
    """Returns the number of features of a model."""
    if model is None:
        return 0
    return model.dim if isinstance(model, Teacher) else model.x.d_out


class _Embedded(NamedTuple):
    """Unit features of the rows that `select` needs: a sample of each pool, and the validation."""

    pool_x: np.ndarray
    pool_y: np.ndarray
    val_x: np.ndarray
    val_y: np.ndarray


class _Candidates:
    """Candidate models, in which mixtures are made of features that are embedded once."""

    def __init__(self, dataset: data.Dataset, epsilon: float, width: int) -> None:
        self.dataset, self.epsilon, self.width = dataset, epsilon, width
        self.heads: dict[str, Heads] = {}
        self.rows: dict[str, _Embedded] = {}
        self.hits: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def add(self, name: str, model: Heads) -> None:
        """Adds a model."""
        self.heads[name], self.rows[name] = model, _embed(model, self.dataset)

    def mix(self, name: str, first: str, second: str, weight: float) -> None:
        """Adds a mixture of two candidates."""
        self.heads[name] = heads.mix(self.heads[first], self.heads[second], weight)
        # Like `heads.mix_features`, which would be compiled for every shape.
        a, b = np.sqrt([weight, 1.0 - weight], dtype=np.float32)
        both = zip(self.rows[first], self.rows[second], strict=True)
        self.rows[name] = _Embedded(*(np.concatenate([a * f, b * g], axis=1) for f, g in both))

    def padded(self, name: str) -> _Embedded:
        """Returns features in a common width, so that all candidates run the same programs."""
        # Zeros change no cosine.
        missing = self.width - self.rows[name].pool_x.shape[1]
        return _Embedded(*(np.pad(part, [(0, 0), (0, missing)]) for part in self.rows[name]))

    def scores(self) -> dict[str, float]:
        """Returns the mean of plain and calibrated R@1, R@5 and R@10 of every candidate."""
        if self.dataset.val is None:
            return {}
        for name in self.heads.keys() - self.hits.keys():
            self.hits[name] = _score(self.padded(name), self.dataset.val, self.epsilon).hits
        return {name: _mean(*self.hits[name]) for name in self.heads}

    def best(self, names: Sequence[str]) -> str:
        """Returns the first of some candidates that none of them beats clearly."""
        scores = self.scores()
        if not scores:
            return names[0]
        highest = self.hits[max(names, key=lambda name: scores[name])]
        return next(name for name in names if not _clearly_better(highest, self.hits[name]))


def _middle(epsilons: Sequence[float]) -> float:
    """Returns the geometric mean of epsilons, which are scales."""
    return float(np.exp(np.mean(np.log(epsilons))))


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
    return _calibrate(_embed(model, dataset), dataset, epsilons).calibration


def _embed(model: Heads, dataset: data.Dataset) -> _Embedded:
    """Embeds a sample of each pool, or of the pairs if it is empty, and the validation gallery."""
    rng = np.random.default_rng(0)
    pools, val = [], []
    for side, head in (("x", model.x), ("y", model.y)):
        pool, pairs = getattr(dataset, f"pool_{side}"), getattr(dataset, f"pairs_{side}")
        rows = pool if len(pool) else pairs
        # Rows are drawn before they are embedded, since a pool may have millions of them.
        kept = np.sort(rng.permutation(len(rows))[: calibration.SAMPLE])
        drawn = np.asarray(rows[kept])
        queries = drawn[:0] if dataset.val is None else getattr(dataset.val, side)
        # Together, so that they share a compiled program.
        both = evaluation.embed(head, np.concatenate([drawn, queries]))
        pools.append(both[: len(drawn)])
        val.append(both[len(drawn) :])
    return _Embedded(*pools, *val)


class _Scored(NamedTuple):
    """A calibration, its R@10 in percent, the `_hits` of all queries, and whether to use it."""

    calibration: calibration.Calibration
    recall: float
    hits: tuple[np.ndarray, np.ndarray]
    helps: bool


def _calibrate(rows: _Embedded, dataset: data.Dataset, epsilons: Sequence[float]) -> _Scored:
    """Returns the calibration with the best calibrated R@10, or the middle one by default."""
    if dataset.val is None:
        made = calibration.calibrate(rows.pool_x, rows.pool_y, epsilon=_middle(epsilons))
        unpaired = len(dataset.pool_x) > 0 and len(dataset.pool_y) > 0
        return _Scored(made, 0.0, (np.zeros(1), np.zeros(1)), unpaired)
    tried = [_score(rows, dataset.val, epsilon) for epsilon in epsilons]
    return max(tried, key=lambda one: one.recall)


def _score(rows: _Embedded, gallery: data.Gallery, epsilon: float) -> _Scored:
    """Scores a model on validation, plain and calibrated."""
    made = calibration.calibrate(rows.pool_x, rows.pool_y, epsilon=epsilon)
    x, y = rows.val_x, rows.val_y
    plain = evaluation.ranks(x, y, gallery.x_of_y)
    found = evaluation.ranks(x, y, gallery.x_of_y, bias_x=made.x(x), bias_y=made.y(y))
    recall = evaluation.recalls(found, (10,))["mean/R@10"]
    gain = _mean(_hits(found.x), _hits(found.y)) - _mean(_hits(plain.x), _hits(plain.y))
    return _Scored(made, recall, (_hits(plain.x, found.x), _hits(plain.y, found.y)), gain > 0)


def _hits(*ranks: np.ndarray) -> np.ndarray:
    """Returns the percentage of cut-offs that each query's ranks are within."""
    # R@1 alone is too noisy to distinguish mixtures. The rSum of the retrieval literature is six
    # times the mean of one table.
    within = [rank < k for rank in ranks for k in evaluation.KS]
    return 100.0 * np.mean(within, axis=0)


def _mean(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the mean over both directions."""
    return float(np.mean([x.mean(), y.mean()]))


def _clearly_better(hits: tuple[Any, Any], others: tuple[Any, Any]) -> bool:
    """Returns True if hits exceed others by more than the standard error of the difference."""
    gains = [a - b for a, b in zip(hits, others, strict=True)]
    error = np.sqrt(sum(gain.var() / len(gain) for gain in gains)) / 2.0
    return bool(_mean(*gains) > error)
