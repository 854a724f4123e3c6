"""From arrays to an aligned space in one call, and back from disk."""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float
from numpy.typing import ArrayLike
from safetensors.numpy import load_file, save_file

import sotalign_numpy
from sotalign_jax import (
    checks,
    data,
    evaluation,
    export,
    methods,
    neighbours,
    teachers,
    training,
)
from sotalign_jax.calibration import Calibration, calibrate
from sotalign_jax.export import Index
from sotalign_jax.heads import Head, Heads, build_heads, on_features, rebuild
from sotalign_jax.kernels import KernelMap
from sotalign_jax.neighbours import Neighbours
from sotalign_jax.ot import affinity, device

FORMAT = 2
"""Version of the files that `Aligner.save` writes."""
FOLDER = "aligner"
"""Where a run folder keeps its aligner."""
_DESCRIPTION, _TENSORS = "aligner.json", "heads.safetensors"
_CALIBRATION = "calibration.safetensors"
_CALIBRATED_BY = 2048  # rows of each pool; 8,192 add 0.6 points of R@10 (CCA, COCO)
HELD_OUT = 0.1
"""Share of the pairs kept back for model selection when no validation set is given."""


@dataclasses.dataclass(frozen=True)
class Aligner:
    """Two trained heads that map each modality into the shared space.

    Attributes:
        heads: the trained heads.
        info: how they came about (options, validation score), as JSON values.
        calibration: what makes scores comparable between rows, by a sample of the unpaired ones.
    """

    heads: Heads
    info: dict[str, Any]
    calibration: Calibration | None = None

    def __repr__(self) -> str:
        widths = self.heads.x.d_in, self.heads.y.d_in
        return "Aligner(x: {} features, y: {} features)".format(*widths)

    def embed_x(self, x: ArrayLike) -> Float[np.ndarray, "n d"]:
        """Unit features of the first modality's embeddings, shape [n, d_x] -> [n, d]."""
        return self._embed("x", self.heads.x, x)

    def embed_y(self, y: ArrayLike) -> Float[np.ndarray, "m d"]:
        """Unit features of the second modality's embeddings, shape [m, d_y] -> [m, d]."""
        return self._embed("y", self.heads.y, y)

    def calibrated_by(
        self, x: ArrayLike, y: ArrayLike, *, epsilon: float = 0.05, sample: int = _CALIBRATED_BY
    ) -> "Aligner":
        """The same aligner, calibrated by unpaired rows: see `calibration.calibrate`."""
        made = calibrate(self.embed_x(x), self.embed_y(y), epsilon=epsilon, sample=sample)
        return dataclasses.replace(self, calibration=made)

    def similarity(
        self, x: ArrayLike, y: ArrayLike, *, calibrated: bool = False
    ) -> Float[np.ndarray, "n m"]:
        """Cosine similarity of every x [n, d_x] with every y [m, d_y] in the shared space.

        `calibrated` corrects the cosines for rows that are close to everything, by the unpaired
        rows. It helps retrieval; for classification leave it off, where it costs points.
        """
        x, y = checks.array("x", x), checks.array("y", y)
        needed = 4 * len(x) * len(y)
        if needed > device.profile().memory / 2:
            raise checks.InputError(
                f"x, y: the similarity of {len(x)} x {len(y)} rows takes {needed / 2**30:.0f} GiB, "
                "more than half of the memory; use search(x, y, k=...), or fewer rows at a time"
            )
        f, g = jnp.asarray(self.embed_x(x)), jnp.asarray(self.embed_y(y))
        if calibrated:
            return self._calibration().scores(f, g)
        return np.asarray(affinity.dot(f, g.T))

    def search(
        self,
        queries: ArrayLike,
        gallery: ArrayLike,
        k: int = 10,
        *,
        direction: str = "x_to_y",
        calibrated: bool = False,
        chunk: int = 1024,
    ) -> Neighbours:
        """The k rows of the gallery that are most similar to each query, best first.

        Returns (scores, indices), both [n, k], of queries [n, d_x] and a gallery [m, d_y]; with
        direction="y_to_x" the queries are of the second modality and the gallery of the first.
        Among equal scores the lower row comes first. Scores are cosines; `calibrated` corrects
        them for rows that are close to everything, as `similarity` does, up to a constant of each
        query (in a vector index: `calibration.with_bias`). `chunk` queries are compared with as
        many rows of the gallery at a time: the matrix of all scores never exists.

        >>> aligner = Aligner(build_heads(4, 3, 2), {})
        >>> scores, indices = aligner.search(np.eye(4), np.eye(3), k=2)
        >>> scores.shape, indices.shape
        ((4, 2), (4, 2))
        """
        checks.choice("direction", direction, ("x_to_y", "y_to_x"))
        checks.whole(1, chunk=chunk)
        rows = checks.array("gallery", gallery)
        checks.within(len(rows), "rows in the gallery", k=k)
        forward = direction == "x_to_y"
        sides = self.heads.x, self.heads.y
        own, other = sides if forward else sides[::-1]
        f, g = self._embed("queries", own, queries), self._embed("gallery", other, rows)
        bias = None
        if calibrated:
            bias = self._calibration().y(g) if forward else self._calibration().x(g)
        return jax.device_get(neighbours.nearest(f, g, k, bias=bias, chunk=chunk))

    def _calibration(self) -> Calibration:
        if self.calibration is None:
            raise checks.InputError(
                "calibrated: is True but this aligner has no calibration; make one with "
                "aligner.calibrated_by(x, y), given unpaired rows"
            )
        return self.calibration

    def _embed(self, name: str, head: Head, rows: ArrayLike) -> np.ndarray:
        return evaluation.embed(head, checks.rows(name, rows, width=head.d_in))

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Writes `aligner.json` and the tensors beside it into the folder `path`, all or nothing.

        With `overwrite` an aligner that is there is replaced, but never anything else.
        """
        path = pathlib.Path(path).expanduser().absolute()
        entries = path.iterdir() if path.is_dir() else filter(pathlib.Path.exists, [path])
        names = {entry.name for entry in entries}
        if strangers := sorted(names - {_DESCRIPTION, _TENSORS, _CALIBRATION}):
            raise checks.InputError(
                f"path: {path} holds {strangers[0]}, which is not part of an aligner; "
                "choose another folder"
            )
        if names and not overwrite:
            raise checks.InputError(
                f"path: {path} holds an aligner already; choose another folder, or pass "
                "overwrite=True"
            )
        sides = {"x": self.heads.x, "y": self.heads.y}
        heads = {side: {"kind": h.kind, "options": h.options()} for side, h in sides.items()}
        described = {"format": FORMAT, "heads": heads, "info": self.info}
        try:
            text = json.dumps(described, indent=2, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise checks.InputError(f"info: cannot be written as JSON ({error})") from error
        temporary, previous = (path.with_name(f".{path.name}.{end}") for end in ("tmp", "old"))
        if previous.exists() and not path.exists():
            previous.rename(path)  # a save was killed between the two renames below
        for leftover in (temporary, previous):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir(parents=True)
        parameters = nnx.to_flat_state(nnx.state(self.heads))
        tensors = {_dotted(name): np.asarray(leaf[...]) for name, leaf in parameters}
        save_file(tensors, temporary / _TENSORS)
        if self.calibration is not None:
            arrays = jax.tree.map(np.asarray, vars(self.calibration))
            save_file(arrays, temporary / _CALIBRATION)
        (temporary / _DESCRIPTION).write_text(text + "\n", encoding="utf-8")
        if path.exists():
            path.rename(previous)  # whole until the new one stands in its place
        temporary.rename(path)
        shutil.rmtree(previous, ignore_errors=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Aligner":
        """Reads what `save` wrote; `path` may also be the folder of a finished run."""
        given = pathlib.Path(path).expanduser()
        folder = given if (given / _DESCRIPTION).exists() else given / FOLDER
        if not (folder / _DESCRIPTION).exists():
            below = sorted(given.glob(f"*/{FOLDER}/{_DESCRIPTION}"))
            runs = ", ".join(str(file.parents[1]) for file in below)
            raise checks.InputError(
                f"path: {path} holds no aligner; pass a folder that Aligner.save wrote, or the "
                f"folder of a finished run{f', such as {runs}' if runs else ''}"
            )
        with _reading(folder / _DESCRIPTION):
            described = json.loads((folder / _DESCRIPTION).read_text(encoding="utf-8"))
        written = described.get("format") if isinstance(described, dict) else None
        if written != FORMAT:
            raise checks.InputError(
                f"path: {folder} has format {written} but this version reads {FORMAT}; "
                "load it with the version of sotalign-jax that wrote it"
            )
        with _reading(folder / _DESCRIPTION):
            # Shapes alone: nothing is allocated before they are known to be those of the tensors.
            shapes = nnx.eval_shape(
                lambda: Heads(*(rebuild(**described["heads"][side]) for side in "xy"))
            )
            info = described["info"]
        with _reading(folder / _TENSORS):
            tensors = load_file(folder / _TENSORS)
        graphdef, state = nnx.split(shapes)
        leaves = {_dotted(name): leaf for name, leaf in nnx.to_flat_state(state)}
        for name in sorted(leaves.keys() | tensors.keys()):
            wanted, found = (p[name].shape if name in p else None for p in (leaves, tensors))
            if wanted != found:
                raise checks.InputError(
                    f"path: {folder / _TENSORS} has {name} of shape {found} but {_DESCRIPTION} "
                    f"describes {wanted}; save the aligner again"
                )
        for name, leaf in leaves.items():
            leaf.set_value(jnp.asarray(tensors[name]))
        calibration = None
        if (folder / _CALIBRATION).exists():
            with _reading(folder / _CALIBRATION):
                arrays = load_file(folder / _CALIBRATION)
                calibration = Calibration(**jax.tree.map(jnp.asarray, arrays))
        return cls(nnx.merge(graphdef, state), info, calibration)

    def evaluate(
        self, x: ArrayLike, y: ArrayLike, x_of_y: ArrayLike | None = None
    ) -> evaluation.Report:
        """Measures R@k in both directions, with intervals and chance levels.

        Args:
            x: embeddings of the first modality, shape [n, d_x].
            y: embeddings of the second modality, shape [m, d_y].
            x_of_y: row of x that each row of y belongs to, shape [m]. By default row i matches
                row i.

        Returns:
            An `evaluation.Report`, with calibrated scores if there is a calibration. `print` shows
            it as a table.
        """
        gallery = data.gallery(x, y, x_of_y)
        return evaluation.report(self.heads.x, self.heads.y, gallery, self.calibration)

    def to_numpy(self) -> sotalign_numpy.Embedder:
        """Returns the heads in numpy, see `export.to_numpy`."""
        return export.to_numpy(self.heads, self.calibration)

    def export(self, path: str | os.PathLike[str]) -> tuple[pathlib.Path, pathlib.Path]:
        """Writes `model_x.onnx` and `model_y.onnx` for "model.onnx", see `export.to_onnx`."""
        return export.to_onnx(self.heads, path, self.calibration)

    def index(
        self, gallery: ArrayLike, *, direction: str = "x_to_y", calibrated: bool = False
    ) -> Index:
        """Embeds a gallery for an index of inner products, see `export.index`."""
        calibration = self._calibration() if calibrated else None
        return export.index(self.heads, gallery, calibration, direction=direction)


def _dotted(name: tuple[Any, ...]) -> str:
    return ".".join(map(str, name))


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[None]:
    """Errors while a file is read say that it is damaged."""
    try:
        yield
    except Exception as error:
        raise checks.InputError(
            f"path: {path} is missing or damaged ({checks.first_line(error)}); save the aligner "
            "again"
        ) from error


class Recipe(NamedTuple):
    """What `align` does where its arguments leave it open.

    Attributes:
        teacher: a name of `training.TEACHERS`.
        init: where linear heads start.
        dim: width of the shared space, for the contrastive teacher, too; that of other linear
            teachers is their own.
        pair_batch: pairs per step.
        alpha: weight of KLOT, times the pairs of a batch: SigLIP's gradient falls with them.
        steps: the fewest and the most, a tenth of the pairs between them.
        path: steps times the learning rate: Lion moves a weight by at most so much.
        kept: share of the start in the heads, if that was the teacher; the rest is what training
            made of it. Neither forgets what the other knows.
        calibration: epsilon of calibrated retrieval.
    """

    teacher: str
    init: str
    dim: int
    pair_batch: int
    alpha: float
    steps: tuple[int, int]
    path: float
    kept: float
    calibration: float


RECIPES = {
    "kernel": Recipe("kernel_cca", "teacher", 512, 2048, 3.0, (100, 600), 0.05, 0.5, 0.1),
    "paper": Recipe("cca", "random", 1024, 10_000, 1.0, (2000, 2000), 0.2, 0.0, 0.05),
}
"""The best one found (see the results in the docs), and the paper's."""


def align(
    pairs: tuple[ArrayLike, ArrayLike],
    x: ArrayLike | None = None,
    y: ArrayLike | None = None,
    *,
    val: tuple[ArrayLike, ArrayLike] | data.Gallery | None = None,
    recipe: str = "kernel",
    teacher: str | teachers.LinearTeacher | None = None,
    init: str | None = None,
    features: str | None = None,
    dim: int | None = None,
    alpha: float | None = None,
    epsilon: float = 0.05,
    epsilon_star: float = 0.005,
    steps: int | None = None,
    learning_rate: float | None = None,
    unpaired_batch: int | None = None,
    method: str | methods.Method | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Aligner:
    """Aligns two modalities from few pairs and many unpaired embeddings.

    Fits a teacher on the pairs, then trains a head per modality on

        SigLIP(pairs) + alpha * KLOT(student affinity || teacher affinity) on the unpaired rows.

    With neither x nor y it is supervised training (SAIL); with one of them, the pairs' own rows
    take the place of the other. The parameters with the best MeanR@1 on `val` are kept; without
    `val`, a tenth of the pairs is held out for it when there are at least 100, and else the last
    parameters are kept. A sample of the unpaired rows stays for calibrated retrieval.

    Args:
        pairs: (pairs_x, pairs_y), embeddings of shapes [n, d_x] and [n, d_y]; row i of one
            matches row i of the other.
        x: unpaired embeddings of the first modality, shape [n_x, d_x].
        y: unpaired embeddings of the second modality, shape [n_y, d_y].
        val: matching embeddings (V_x, V_y) to select on, or a `Gallery`.
        recipe: where this leaves an argument open: "kernel" starts the heads at a kernel teacher
            and returns the mean of start and result; "paper" is the paper's, from random heads.
        teacher: "cca", "kernel_cca", "procrustes", "contrastive", or a fitted `LinearTeacher`.
        init: start the heads at the "teacher"'s projection, or "random", as heads that are not
            linear always do. Heads that start at a kernel teacher are heads on its features.
        features: "kernel": the heads of any method see kernel features of the pairs, those of
            `teachers.kernel_cca`, in place of the embeddings.
        dim: width of the shared space; a linear teacher that the heads start at has its own.
        alpha: weight of KLOT.
        epsilon: regularisation of the student's plan.
        epsilon_star: regularisation of the teacher's plan.
        steps: training steps.
        learning_rate: its peak.
        unpaired_batch: unpaired rows per step; None takes up to 22,768 on an accelerator and up
            to 1,024 on CPU.
        method: what replaces SOTAlign: a name of `methods.METHODS`, or a method with its options,
            such as `methods.SAIL()`; alpha, epsilon and epsilon_star are then its own. CSA and SUE
            take no steps and have their own `dim`: only `seed` and `progress` matter to them.
        seed: decides everything random.
        progress: show a progress bar.

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(300, 8)).astype(np.float32)
    >>> to_x, to_y = rng.normal(size=(8, 12)), rng.normal(size=(8, 10))
    >>> X, Y = (z @ to_x).astype(np.float32), (z @ to_y).astype(np.float32)
    >>> aligner = align((X[:50], Y[:50]), X[50:], Y[50:], steps=20, progress=False)
    >>> aligner.similarity(X[:5], Y[:5]).shape
    (5, 5)
    """
    gallery = val if isinstance(val, data.Gallery) or val is None else data.gallery(*val)
    dataset = data.dataset(pairs, x=x, y=y, val=gallery)
    seed = int(seed)
    checks.choice("recipe", recipe, tuple(RECIPES))
    usual = RECIPES[recipe]
    teacher = usual.teacher if teacher is None else teacher
    dim = usual.dim if dim is None else dim
    asked = isinstance(method, str) and method == "sotalign"
    if isinstance(method, str):
        checks.choice("method", method, tuple(methods.METHODS))
        method = None if asked else methods.METHODS[method]
    if gallery is None and not isinstance(method, methods.Fitted):  # which selects nothing
        dataset = hold_out(dataset, seed=seed)
    n_pairs = len(dataset.pairs_x)
    unpaired = bool(len(dataset.pool_x) or len(dataset.pool_y))
    if method is None:
        if not (x is None and y is None) and not unpaired:
            raise checks.InputError(
                "x, y: both have no rows; pass unpaired rows, or neither to train on the pairs "
                "alone"
            )
        weight = usual.alpha / min(n_pairs, usual.pair_batch) if alpha is None else float(alpha)
        method = methods.SAIL()
        if unpaired or asked:
            method = methods.SOTAlign(
                alpha=weight, epsilon=float(epsilon), epsilon_star=float(epsilon_star)
            )
    elif alpha is not None:
        raise checks.InputError(
            f"alpha: is {alpha} but method {type(method).__name__} brings its own options; leave "
            "it out, or pass method=methods.SOTAlign(alpha=...)"
        )
    if unpaired and "x" in method.pools and not len(dataset.pool_x):
        dataset = dataclasses.replace(dataset, pool_x=dataset.pairs_x)
    if unpaired and "y" in method.pools and not len(dataset.pool_y):
        dataset = dataclasses.replace(dataset, pool_y=dataset.pairs_y)
    training.check_pool(method, dataset)
    info: dict[str, Any] = {
        "method": type(method).__name__,
        "options": dataclasses.asdict(method) if dataclasses.is_dataclass(method) else {},
        "data": dataset.summary(),
        "features": features,
    }
    maps = None
    if features is not None:
        checks.choice("features", features, ("kernel",))
        if isinstance(teacher, teachers.LinearTeacher) and isinstance(teacher.map_x, KernelMap):
            maps = teacher
        else:
            maps = _fit_teacher("kernel_cca", dataset, dim=dim, seed=seed)
    if isinstance(method, methods.Fitted):
        seen = dataset if maps is None else training.mapped(dataset, maps)
        made = method.fit(seen, seed=seed, progress=progress)
        made = made if maps is None else on_features(maps, made)
        return calibrated(made, dataset, info, epsilon=usual.calibration)
    assert isinstance(method, methods.Objective)
    if maps is not None and teacher == "kernel_cca":
        teacher = maps  # fitted once
    other = maps is not None and teacher is not maps  # whose directions features have not
    init = init or (usual.init if method.head == "linear" and not other else "random")
    checks.choice("init", init, ("teacher", "random"))
    if init == "teacher" and other:
        raise checks.InputError(
            "init: heads on kernel features can start at a kernel teacher only; pass "
            "teacher='kernel_cca' or init='random'"
        )
    if unpaired_batch is None:
        unpaired_batch = 1024 if jax.default_backend() == "cpu" else 22_768
    steps = int(np.clip(n_pairs // 10, *usual.steps)) if steps is None else steps
    checks.whole(1, steps=steps)
    config = training.TrainConfig(
        steps=steps,
        pair_batch=usual.pair_batch,
        unpaired_batch=unpaired_batch,
        learning_rate=usual.path / steps if learning_rate is None else float(learning_rate),
        eval_every=20,
        seed=seed,
    )
    fitted = None
    if method.uses_teacher or init == "teacher":
        fitted = _fit_teacher(teacher, dataset, dim=dim, seed=seed)
    start = build_heads(
        dataset.pairs_x.shape[1],
        dataset.pairs_y.shape[1],
        fitted.dim if init == "teacher" and fitted is not None else dim,
        kind=method.head,
        seed=seed,
        teacher=fitted if init == "teacher" else None,
        features=None if init == "teacher" else maps,
    )
    with methods.Progress(config.steps, "align", show=progress) as bar:
        heads, best = training.fit(method, start, dataset, config, teacher=fitted, observer=bar)
    if init == "teacher":
        heads = _mean(start, heads, usual.kept)
    given = teacher if isinstance(teacher, str) else "given"
    score = evaluation.evaluate(heads.x, heads.y, dataset.val) if dataset.val is not None else {}
    info |= {
        "recipe": recipe,
        "init": init,
        "teacher": None if fitted is None else given,
        "train": dataclasses.asdict(config),
        "best_step": int(best.step),
        "val_mean_r1": score.get("mean/R@1"),
    }
    return calibrated(heads, dataset, info, epsilon=usual.calibration)


def _mean(start: Heads, trained: Heads, share: float) -> Heads:
    """Heads whose parameters are share * start + (1 - share) * trained."""
    graphdef, before = nnx.split(start)
    after = nnx.state(trained)
    return nnx.merge(
        graphdef, jax.tree.map(lambda a, b: share * a + (1 - share) * b, before, after)
    )


def calibrated(
    heads: Heads, dataset: data.Dataset, info: dict[str, Any], *, epsilon: float = 0.05
) -> Aligner:
    """An aligner calibrated by a sample of the pools, or of the pairs where there are none."""
    rng = np.random.default_rng(0)
    some = []
    for pool, pairs in ((dataset.pool_x, dataset.pairs_x), (dataset.pool_y, dataset.pairs_y)):
        rows = pool if len(pool) else pairs
        kept = np.sort(rng.permutation(len(rows))[:_CALIBRATED_BY])  # embed no more than is kept
        some.append(np.asarray(rows[kept]))
    return Aligner(heads, info).calibrated_by(*some, epsilon=epsilon)


def _fit_teacher(
    teacher: str | teachers.LinearTeacher, dataset: data.Dataset, *, dim: int, seed: int
) -> teachers.LinearTeacher:
    if isinstance(teacher, teachers.LinearTeacher):
        return teacher
    checks.choice("teacher", teacher, tuple(training.TEACHERS))
    options = {"contrastive": {"dim": dim, "seed": seed}, "kernel_cca": {"seed": seed}}
    fit = training.TEACHERS[teacher]
    fitted = fit(dataset.pairs_x, dataset.pairs_y, **options.get(teacher, {}))
    if teacher != "kernel_cca" or fitted.dim <= dim:
        return fitted
    maps = fitted.map_x.leading(dim), fitted.map_y.leading(dim)
    return teachers.LinearTeacher(*maps, fitted.correlations[:dim])


def hold_out(dataset: data.Dataset, *, seed: int) -> data.Dataset:
    """Moves a tenth of the pairs to the validation gallery, if there are at least 100.

    >>> small = data.dataset((np.ones((100, 2)), np.ones((100, 3))))
    >>> hold_out(small, seed=0).summary()["val_x"]
    [10, 2]
    """
    n = len(dataset.pairs_x)
    if n < 100:
        return dataset
    order = np.random.default_rng(seed).permutation(n)
    held, kept = np.split(order, [int(HELD_OUT * n)])
    return dataclasses.replace(
        dataset,
        pairs_x=dataset.pairs_x[kept],
        pairs_y=dataset.pairs_y[kept],
        val=data.gallery(dataset.pairs_x[held], dataset.pairs_y[held]),
    )
