"""The interface of the package: `align` trains an `Aligner`, which embeds, searches and saves."""

from __future__ import annotations  # help(align) shows ArrayLike instead of its ten members

import dataclasses
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from sotalign_jax import checks, data, evaluation, export, methods, neighbours, persistence, runtime
from sotalign_jax import recipe as recipe_lib
from sotalign_jax.calibration import Calibration, calibrate
from sotalign_jax.export import Index
from sotalign_jax.heads import Head, Heads, Teacher
from sotalign_jax.neighbours import Neighbours
from sotalign_jax.ot import affinity, device
from sotalign_jax.progress import Progress


@dataclasses.dataclass(frozen=True)
class Aligner:
    """Two trained heads that map each modality into the shared space.

    Attributes:
        heads: The trained heads.
        info: Options and validation scores of the training run, as JSON values.
        calibration: Correction of the scores for hubness, computed from a sample of the unpaired
            rows. None if there is no calibration.
    """

    heads: Heads
    info: dict[str, Any]
    calibration: Calibration | None = None

    def __repr__(self) -> str:
        widths = self.heads.x.d_in, self.heads.y.d_in
        described = "x: {} features, y: {} features".format(*widths)
        if "unpaired" in self.info:
            described += "; " + recipe_lib.describe_unpaired(self.info["unpaired"])
        return f"Aligner({described})"

    def embed_x(self, x: ArrayLike) -> Float[np.ndarray, "n d"]:
        """Maps embeddings of the first modality to unit features of the shared space.

        Args:
            x: Embeddings, shape [n, d_x].

        Returns:
            The features, shape [n, d].

        Raises:
            InputError: The embeddings have another width, or values that are not finite.

        Example:
            >>> from sotalign_jax.heads import build_heads
            >>> Aligner(build_heads(4, 3, 2), {}).embed_x(np.eye(4)).shape
            (4, 2)
        """
        return self._embed("x", self.heads.x, x)

    def embed_y(self, y: ArrayLike) -> Float[np.ndarray, "m d"]:
        """Maps embeddings of the second modality to unit features of the shared space.

        Args:
            y: Embeddings, shape [m, d_y].

        Returns:
            The features, shape [m, d].

        Raises:
            InputError: The embeddings have another width, or values that are not finite.

        Example:
            >>> from sotalign_jax.heads import build_heads
            >>> Aligner(build_heads(4, 3, 2), {}).embed_y(np.eye(3)).shape
            (3, 2)
        """
        return self._embed("y", self.heads.y, y)

    def calibrated_by(
        self,
        x: ArrayLike,
        y: ArrayLike,
        *,
        epsilon: float = 0.05,
        sample: int = recipe_lib.CALIBRATION_ROWS,
    ) -> Aligner:
        """Returns a copy of the aligner with a calibration, see `calibration.calibrate`.

        Args:
            x: Unpaired embeddings of the first modality, shape [n, d_x].
            y: Unpaired embeddings of the second modality, shape [m, d_y].
            epsilon: Regularisation in units of cosines. A smaller value corrects more.
            sample: Number of rows of each modality that are kept.

        Returns:
            The calibrated aligner. Its heads are the same.
        """
        made = calibrate(self.embed_x(x), self.embed_y(y), epsilon=epsilon, sample=sample)
        return dataclasses.replace(self, calibration=made)

    def similarity(
        self, x: ArrayLike, y: ArrayLike, *, calibrated: bool = False
    ) -> Float[np.ndarray, "n m"]:
        """Computes the cosine similarity of every x with every y in the shared space.

        Args:
            x: Embeddings of the first modality, shape [n, d_x].
            y: Embeddings of the second modality, shape [m, d_y].
            calibrated: True corrects the cosines for hubs, rows that are close to many others.
                It improves retrieval and harms classification.

        Returns:
            The similarities, shape [n, m].

        Raises:
            InputError: The matrix does not fit into memory, or there is no calibration.

        Example:
            >>> from sotalign_jax.heads import build_heads
            >>> Aligner(build_heads(4, 3, 2), {}).similarity(np.eye(4), np.eye(3)).shape
            (4, 3)
        """
        x, y = checks.array("x", x), checks.array("y", y)
        # The system may swap, or kill the process, if such a matrix is allocated.
        needed = 4 * len(x) * len(y)  # bytes in float32
        if needed > device.profile().memory / 2:
            raise checks.InputError(
                f"x and y have {len(x)} and {len(y)} rows, whose similarity takes "
                f"{needed / 2**30:.0f} GiB, more than half of the memory; use search(x, y, k=...) "
                "or pass fewer rows at a time"
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
        block_size: int = 1024,
    ) -> Neighbours:
        """Finds the k rows of the gallery that are most similar to each query.

        The matrix of all scores is never stored.

        Args:
            queries: Embeddings of the queries, shape [n, d_x].
            gallery: Embeddings to search, shape [m, d_y].
            k: Number of results per query.
            direction: "x_to_y", or "y_to_x" if the queries are of the second modality and the
                gallery is of the first.
            calibrated: True corrects the cosines for hubs as `similarity` does, but leaves out the
                correction of the query, which does not change the order of its results. For
                a vector index see `index`.
            block_size: Number of queries, and of rows of the gallery, that are compared at a time.

        Returns:
            Scores and indices, both of shape [n, k], best first. Among equal scores the lower row
            comes first.

        Raises:
            InputError: The gallery has fewer than k rows, or there is no calibration.

        Example:
            >>> from sotalign_jax.heads import build_heads
            >>> aligner = Aligner(build_heads(4, 3, 2), {})
            >>> scores, indices = aligner.search(np.eye(4), np.eye(3), k=2)
            >>> scores.shape, indices.shape
            ((4, 2), (4, 2))
        """
        checks.choice("direction", direction, ("x_to_y", "y_to_x"))
        checks.whole(1, block_size=block_size)
        # k is checked before the gallery is embedded, which may take long.
        rows = checks.array("gallery", gallery)
        checks.within(len(rows), "rows in the gallery", k=k)
        forward = direction == "x_to_y"
        sides = self.heads.x, self.heads.y
        own, other = sides if forward else sides[::-1]
        f, g = self._embed("queries", own, queries), self._embed("gallery", other, rows)
        bias = None
        if calibrated:
            # The queries' own corrections are left out: a constant per query does not change the
            # order of its results.
            bias = self._calibration().y(g) if forward else self._calibration().x(g)
        return jax.device_get(neighbours.nearest(f, g, k, bias=bias, block_size=block_size))

    def _calibration(self) -> Calibration:
        """Returns the calibration. Raises InputError if there is none."""
        if self.calibration is None:
            raise checks.InputError(
                "calibrated must be False for an aligner without a calibration, got True; make one "
                "with aligner.calibrated_by(x, y) and unpaired rows"
            )
        return self.calibration

    def _embed(self, name: str, head: Head, rows: ArrayLike) -> np.ndarray:
        """Checks embeddings and maps them by a head."""
        return evaluation.embed(head, checks.rows(name, rows, width=head.d_in))

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Writes the aligner into a folder. If it fails, an earlier aligner stays intact.

        Args:
            path: The folder. It is created if necessary.
            overwrite: True to replace an existing aligner. Other files are never replaced.

        Raises:
            InputError: The folder has other files, or has an aligner and `overwrite` is False.
            OSError: The files cannot be written.
        """
        parts = persistence.Parts(self.heads, self.info, self.calibration)
        persistence.save(parts, path, overwrite=overwrite)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Aligner:
        """Reads an aligner.

        Args:
            path: A folder that `save` wrote, or the folder of a finished run.

        Returns:
            The aligner.

        Raises:
            InputError: The folder has no aligner, or one of its files is missing or damaged.
        """
        return cls(*persistence.load(path))

    def evaluate(
        self, x: ArrayLike, y: ArrayLike, x_of_y: ArrayLike | None = None
    ) -> evaluation.Report:
        """Measures R@k in both directions, with intervals and chance levels.

        Args:
            x: Embeddings of the first modality, shape [n, d_x].
            y: Embeddings of the second modality, shape [m, d_y].
            x_of_y: Row of x that each row of y belongs to, shape [m]. By default row i matches
                row i.

        Returns:
            An `evaluation.Report`, with calibrated scores if there is a calibration. `print` shows
            it as a table.
        """
        gallery = data.gallery(x, y, x_of_y)
        return evaluation.report(self.heads.x, self.heads.y, gallery, self.calibration)

    def to_numpy(self) -> runtime.Embedder:
        """Returns the heads as numpy functions, see `export.to_numpy`.

        Example:
            >>> from sotalign_jax.heads import build_heads
            >>> Aligner(build_heads(4, 3, 2), {}).to_numpy().embed_x(np.eye(4)).shape
            (4, 2)
        """
        return export.to_numpy(self.heads, self.calibration)

    def export(self, path: str | os.PathLike[str]) -> tuple[pathlib.Path, pathlib.Path]:
        """Writes one ONNX file per modality, see `export.to_onnx`.

        Args:
            path: Name of the files. "model.onnx" writes `model_x.onnx` and `model_y.onnx`.

        Returns:
            The paths of both files.
        """
        return export.to_onnx(self.heads, path, self.calibration)

    def index(
        self, gallery: ArrayLike, *, direction: str = "x_to_y", calibrated: bool = False
    ) -> Index:
        """Embeds a gallery for an index of inner products, see `export.index`.

        Args:
            gallery: Embeddings to search, shape [m, d_y].
            direction: "x_to_y", or "y_to_x" if the gallery is of the first modality.
            calibrated: True adds the correction for hubs as another column.

        Returns:
            The index.

        Raises:
            InputError: There is no calibration.
        """
        calibration = self._calibration() if calibrated else None
        return export.index(self.heads, gallery, calibration, direction=direction)


def align(
    pairs: tuple[ArrayLike, ArrayLike],
    x: ArrayLike | None = None,
    y: ArrayLike | None = None,
    *,
    val: tuple[ArrayLike, ArrayLike] | data.Gallery | None = None,
    recipe: str = "default",
    method: str | methods.Method | None = None,
    teacher: str | Teacher | None = None,
    start: str | None = None,
    dim: int | None = None,
    steps: int | None = None,
    learning_rate: float | None = None,
    unpaired_batch: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Aligner:
    """Aligns two modalities from few pairs and many unpaired embeddings.

    Fits a teacher on the pairs and refines it with the unpaired rows, then trains a head per
    modality on

        SigLIP(pairs) + alpha * KLOT(student affinity || teacher affinity) on the unpaired rows.

    Without x and y, training is supervised (SAIL). With only one of them, the pairs' own rows
    replace the other. If `val` is None and there are at least 100 pairs, a tenth of them is held
    out for validation, unless the teacher is fitted already. Training keeps its best step on
    validation. With the default recipe, the teacher of the pairs alone, the trained heads, or a
    mixture replaces the refined teacher if it is clearly better on validation. Without validation
    the result is a mixture. A sample of the unpaired rows is kept for calibrated retrieval.

    Args:
        pairs: Embeddings (pairs_x, pairs_y) of shapes [n, d_x] and [n, d_y]. Row i of one matches
            row i of the other.
        x: Unpaired embeddings of the first modality, shape [n_x, d_x].
        y: Unpaired embeddings of the second modality, shape [n_y, d_y].
        val: Matching embeddings (V_x, V_y) to select on, or a `Gallery`.
        recipe: Name of the defaults for arguments below that are None. "default" mixes the trained
            heads with a refined teacher. "paper" is the paper's recipe.
        method: A method with its options, such as `methods.SOTAlign(alpha=1e-3)`, or a name of
            `methods.METHODS`. By default SOTAlign, or SAIL without unpaired rows.
        teacher: A name of `recipe.TEACHERS`, or a fitted teacher. By default "refined_cca", or
            "cca" if `recipe` is "paper".
        start: "teacher" starts the heads at the teacher's projection, "random" at random, and
            "centred" at random on rows without their mean. By default "centred", or "random" if
            `recipe` is "paper". Only linear heads can start at a teacher, which must be linear too,
            such as "tuned_cca".
        dim: Width of the trained heads' features. By default 512, 1,024 if `recipe` is "paper", or
            the teacher's width if the heads start at it. A mixture adds the teacher's features.
        steps: Training steps.
        learning_rate: Peak of the learning rate.
        unpaired_batch: Unpaired rows per step. By default at most 22,768 on an accelerator and
            1,024 on a CPU.
        seed: Seed of all random choices.
        progress: True shows a progress bar.

    Returns:
        The aligner. Its `info` has the options and the validation score of every candidate.

    Raises:
        InputError: The arguments or the data cannot be used. The message names the argument.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> z = rng.normal(size=(300, 8)).astype(np.float32)
        >>> to_x, to_y = rng.normal(size=(8, 12)), rng.normal(size=(8, 10))
        >>> X, Y = (z @ to_x).astype(np.float32), (z @ to_y).astype(np.float32)
        >>> aligner = align((X[:50], Y[:50]), X[50:], Y[50:], steps=20, progress=False)
        >>> aligner.similarity(X[:5], Y[:5]).shape
        (5, 5)

    References:
        S. Roschmann, P. Krzakala et al., "SOTAlign: semi-supervised alignment of unimodal vision
        and language models via optimal transport", ICML 2026.
    """
    gallery = val if isinstance(val, data.Gallery) or val is None else data.gallery(*val)
    dataset = data.dataset(pairs, x=x, y=y, val=gallery)
    # Empty arrays are probably a mistake, and must not silently turn into supervised training.
    if not (x is None and y is None) and not (len(dataset.pool_x) or len(dataset.pool_y)):
        raise checks.InputError(
            "x or y must have rows, got none; pass unpaired rows, or neither argument to train on "
            "the pairs only"
        )
    method = recipe_lib.resolve_method(method)
    checks.whole(0, seed=seed)
    # A `Fitted` method selects nothing on validation, and a fitted teacher has seen all pairs.
    ready = isinstance(method, methods.Fitted) or isinstance(teacher, Teacher)
    if gallery is None and not ready:
        dataset = data.hold_out(dataset, seed=int(seed))
    resolved = recipe_lib.default(
        dataset,
        preset=recipe,
        method=method,
        teacher=teacher,
        start=start,
        dim=dim,
        steps=steps,
        learning_rate=learning_rate,
        unpaired_batch=unpaired_batch,
        seed=seed,
    )
    with Progress(resolved.train.steps, "align", show=progress) as bar:
        prepared = recipe_lib.prepare(resolved, dataset, observer=bar)
        return Aligner(*recipe_lib.train(resolved, prepared, observer=bar, progress=progress))
