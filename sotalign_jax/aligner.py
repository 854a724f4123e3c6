"""The trained model: two heads that embed, search, evaluate, save and export."""

from __future__ import annotations  # help(Aligner) shows ArrayLike instead of its ten members

import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from sotalign_jax import (
    checks,
    data,
    evaluation,
    export,
    neighbours,
    persistence,
    runtime,
    sharing,
    tables,
)
from sotalign_jax.calibration import SAMPLE, Calibration, calibrate
from sotalign_jax.cca import refine
from sotalign_jax.confidence import Confidence
from sotalign_jax.export import Index
from sotalign_jax.heads import Head, Heads
from sotalign_jax.neighbours import Found
from sotalign_jax.ot import affinity, device


@dataclasses.dataclass(frozen=True)
class Aligner:
    """Two trained heads that map each modality into the shared space.

    Attributes:
        heads: The trained heads.
        info: Options and validation scores of the training run, as JSON values.
        calibration: Correction of the scores for hubness, computed from a sample of the unpaired
            rows. None if there is no calibration.
        rows: Ids of the training pairs, "pairs_x" and "pairs_y", and of held-out rows, "test_x" and
            "test_y", with their texts, "test_texts". Parts whose ids are unknown are missing.
        calibrated: True if scores are calibrated by default. `align` decides it on validation, see
            `recipe.select`, and every method with an argument `calibrated` follows it.

    Raises:
        InputError: `calibrated` is True without a calibration.
    """

    heads: Heads
    info: dict[str, Any]
    calibration: Calibration | None = None
    rows: persistence.Rows = dataclasses.field(default_factory=dict)
    calibrated: bool = False

    def __post_init__(self) -> None:
        self._correction(self.calibrated)

    def __repr__(self) -> str:
        widths = self.heads.x.d_in, self.heads.y.d_in
        described = "x: {} features, y: {} features".format(*widths)
        if "unpaired" in self.info:
            described += "; " + describe_unpaired(self.info["unpaired"])
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
        sample: int = SAMPLE,
    ) -> Aligner:
        """Returns a copy of the aligner that is calibrated, see `calibration.calibrate`.

        Args:
            x: Unpaired embeddings of the first modality, shape [n, d_x].
            y: Unpaired embeddings of the second modality, shape [m, d_y].
            epsilon: Regularisation in units of cosines. A smaller value corrects more.
            sample: Number of rows of each modality that are kept.

        Returns:
            The aligner, whose scores are calibrated by default. Its heads are the same.
        """
        made = calibrate(self.embed_x(x), self.embed_y(y), epsilon=epsilon, sample=sample)
        # The confidence of calibrated scores belongs to the calibration that it was fitted with.
        known = self.info.get("confidence", {})
        plain = {side: {"plain": fits["plain"]} for side, fits in known.items() if "plain" in fits}
        info = {**self.info, "confidence": plain} if known else self.info
        return dataclasses.replace(self, info=info, calibration=made, calibrated=True)

    def similarity(
        self, x: ArrayLike, y: ArrayLike, *, calibrated: bool | None = None
    ) -> Float[np.ndarray, "n m"]:
        """Computes the score of every x with every y: a cosine, or a calibrated score.

        Args:
            x: Embeddings of the first modality, shape [n, d_x].
            y: Embeddings of the second modality, shape [m, d_y].
            calibrated: True corrects the cosines for hubs, rows that are close to many others, and
                False does not. By default the aligner's own choice. Pass False for classification.

        Returns:
            The scores, shape [n, m].

        Raises:
            InputError: The matrix does not fit into memory, or there is no calibration.

        Example:
            >>> from sotalign_jax.heads import build_heads
            >>> Aligner(build_heads(4, 3, 2), {}).similarity(np.eye(4), np.eye(3)).shape
            (4, 3)
        """
        left, right = tables.read("x", x), tables.read("y", y)
        n, m = len(left.rows), len(right.rows)
        # The system may swap, or kill the process, if such a matrix is allocated.
        needed = 4 * n * m  # bytes in float32
        if needed > device.profile().memory / 2:
            raise checks.InputError(
                f"x and y have {n} and {m} rows, whose similarity takes "
                f"{needed / 2**30:.0f} GiB, more than half of the memory; use search(x, y, k=...) "
                "or pass fewer rows at a time"
            )
        f = jnp.asarray(self._embed("x", self.heads.x, left))
        g = jnp.asarray(self._embed("y", self.heads.y, right))
        cosines = np.asarray(affinity.dot(f, g.T))
        correction = self._correction(calibrated)
        if correction is None:
            return cosines
        return cosines + correction.x(f)[:, None] + correction.y(g)

    def search(
        self,
        queries: ArrayLike,
        gallery: ArrayLike,
        k: int = 10,
        *,
        direction: str = "x_to_y",
        calibrated: bool | None = None,
        block_size: int = 1024,
    ) -> Found:
        """Finds the k rows of the gallery that are most similar to each query.

        The matrix of all scores is never stored.

        Args:
            queries: Embeddings of the queries, shape [n, d_x].
            gallery: Embeddings to search, shape [m, d_y].
            k: Number of results per query. All rows are returned if the gallery has fewer.
            direction: "x_to_y", or "y_to_x" if the queries are of the second modality and the
                gallery is of the first.
            calibrated: As in `similarity`, whose scores these are. For a vector index see `index`.
            block_size: Number of queries, and of rows of the gallery, that are compared at a time.

        Returns:
            Scores and indices, both of shape [n, k], best first. Among equal scores the lower row
            comes first. If the gallery is a table with ids, the attribute `ids` holds those of the
            results, see `tables`.

        Raises:
            InputError: The gallery has no rows, or there is no calibration.

        Example:
            >>> from sotalign_jax.heads import build_heads
            >>> aligner = Aligner(build_heads(4, 3, 2), {})
            >>> scores, indices = aligner.search(np.eye(4), np.eye(3), k=2)
            >>> scores.shape, indices.shape
            ((4, 2), (4, 2))
        """
        checks.choice("direction", direction, ("x_to_y", "y_to_x"))
        # Checked before the gallery is embedded, which may take long.
        checks.whole(1, k=k, block_size=block_size)
        correction = self._correction(calibrated)
        forward = direction == "x_to_y"
        sides = self.heads.x, self.heads.y
        own, other = sides if forward else sides[::-1]
        table = tables.read("gallery", gallery)
        f = self._embed("queries", own, queries)
        g = self._embed("gallery", other, table, min_rows=1)
        bias = None
        if correction is not None:
            bias = correction.y(g) if forward else correction.x(g)
        found = neighbours.nearest(f, g, min(k, len(g)), bias=bias, block_size=block_size)
        scores, indices = jax.device_get(found)
        if correction is not None:
            own_bias = correction.x(f) if forward else correction.y(f)
            scores = scores + own_bias[:, None]
        return Found(scores, indices, None if table.ids is None else table.ids[indices])

    def confidence(
        self,
        queries: ArrayLike,
        gallery: ArrayLike,
        indices: ArrayLike,
        *,
        direction: str = "x_to_y",
        calibrated: bool | None = None,
        block_size: int = 1024,
    ) -> Float[np.ndarray, "n k"]:
        """Computes the probabilities that results of `search` are right, see `confidence`.

        Args:
            queries: Embeddings of the queries, as in `search`.
            gallery: Embeddings that were searched. All of them matter, because rivals with nearly
                equal scores make a result less probable.
            indices: Rows of the gallery that were found for each query, shape [n, k].
            direction: As in `search`.
            calibrated: As in `search`.
            block_size: Number of queries that are compared at a time.

        Returns:
            The probabilities, shape [n, k].

        Raises:
            InputError: No confidence is known, because too few pairs were held out, or `indices`
                are not rows of the gallery.

        Example:
            >>> from sotalign_jax.heads import build_heads
            >>> known = {"confidence": {"x_to_y": {"plain": [20.0, 0.0]}}}
            >>> aligner = Aligner(build_heads(4, 3, 2), known)
            >>> found = aligner.search(np.eye(4), np.eye(3), k=2)
            >>> aligner.confidence(np.eye(4), np.eye(3), found.indices).shape
            (4, 2)
        """
        checks.choice("direction", direction, ("x_to_y", "y_to_x"))
        checks.whole(1, block_size=block_size)
        correction = self._correction(calibrated)
        fitted = self.fitted_confidence(direction, calibrated=calibrated)
        if fitted is None:
            kind = "plain" if correction is None else "calibrated"
            raise checks.InputError(
                f"confidence of {kind} scores is unknown for this aligner, because too few pairs "
                "were held out or because its calibration was replaced; train it with more pairs, "
                "or pass val"
            )
        forward = direction == "x_to_y"
        sides = self.heads.x, self.heads.y
        own, other = sides if forward else sides[::-1]
        f = self._embed("queries", own, queries)
        g = self._embed("gallery", other, gallery, min_rows=1)
        chosen = _checked_indices(indices, len(f), len(g))
        bias_f, bias_g = np.zeros(len(f)), np.zeros(len(g))
        if correction is not None:
            bias_f = correction.x(f) if forward else correction.y(f)
            bias_g = correction.y(g) if forward else correction.x(g)
        found = [np.zeros((0, *chosen.shape[1:]))]
        for start in range(0, len(f), block_size):
            block = slice(start, start + block_size)
            scores = f[block] @ g.T + bias_f[block, None] + bias_g
            probabilities = fitted.probabilities(scores)
            found.append(np.take_along_axis(probabilities, chosen[block], axis=1))
        return np.concatenate(found)

    def fitted_confidence(
        self, direction: str, *, calibrated: bool | None = None
    ) -> Confidence | None:
        """Returns the parameters of the probabilities that results are right.

        Args:
            direction: "x_to_y", or "y_to_x" if the queries are of the second modality.
            calibrated: True for calibrated scores. By default the aligner's own choice.

        Returns:
            The `confidence.Confidence`, or None if it is unknown.
        """
        known = self.info.get("confidence", {}).get(direction, {})
        chosen = self.calibrated if calibrated is None else calibrated
        values = known.get("calibrated" if chosen else "plain")
        return None if values is None else Confidence(*values)

    def _correction(self, calibrated: bool | None) -> Calibration | None:
        """Returns the calibration, or None for plain cosines."""
        if not (self.calibrated if calibrated is None else calibrated):
            return None
        if self.calibration is None:
            raise checks.InputError(
                "calibrated must be False for an aligner without a calibration, got True; make one "
                "with aligner.calibrated_by(x, y) and unpaired rows"
            )
        return self.calibration

    def _embed(self, name: str, head: Head, rows: Any, *, min_rows: int = 0) -> np.ndarray:
        """Checks embeddings and maps them by a head."""
        made = tables.rows(name, rows, width=head.d_in, min_rows=min_rows)
        return evaluation.embed(head, made)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Writes the aligner into a folder. If it fails, an earlier aligner stays intact.

        Args:
            path: The folder. It is created if necessary.
            overwrite: True to replace an existing aligner. Other files are never replaced.

        Raises:
            InputError: The folder has other files, or has an aligner and `overwrite` is False.
            OSError: The files cannot be written.
        """
        persistence.save(path, overwrite=overwrite, **vars(self))

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
        return cls(**persistence.load(path))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        report: evaluation.Report | None = None,
        encoders: Sequence[str] = (),
        data: str | None = None,
        licence: str | None = None,
        private: bool = False,
        token: str | None = None,
        endpoint: str | None = None,
    ) -> str:
        """Uploads the aligner and a model card to the Hugging Face Hub.

        `info` and `rows` are uploaded too. They may name your files and the rows of your data.

        Args:
            repo_id: Name of the repository, such as "me/name". It is created if necessary.
            report: The result of `evaluate` on rows that were not trained on, for the card.
            encoders: Names of the encoders of x and of y, for the card.
            data: Description of the training data, for the card.
            licence: Licence of the heads, such as "apache-2.0", for the card.
            private: True creates a private repository.
            token: Access token. By default that of `hf auth login`.
            endpoint: Address of the Hub.

        Returns:
            Address of the repository.

        Raises:
            InputError: The Hub refuses the upload, or cannot be reached, or huggingface_hub is
                missing.
        """
        described: Any = {"report": report, "encoders": encoders, "data": data, "licence": licence}
        card = sharing.card(repo_id, self.info, calibrated=self.calibrated, **described)
        options: Any = {"private": private, "token": token, "endpoint": endpoint}
        with tempfile.TemporaryDirectory(prefix="sotalign-") as temporary:
            folder = pathlib.Path(temporary) / "aligner"
            self.save(folder)
            return sharing.push(folder, repo_id, card, **options)

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        revision: str | None = None,
        token: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        endpoint: str | None = None,
    ) -> Aligner:
        """Reads an aligner from a folder or from the Hugging Face Hub.

        Args:
            path: A folder, as in `load`, or the name of a repository such as "me/name".
            revision: Branch, tag or commit of the repository. By default "main".
            token: Access token. By default that of `hf auth login`.
            cache_dir: Folder of the downloads. By default that of huggingface_hub.
            endpoint: Address of the Hub.

        Returns:
            The aligner.

        Raises:
            InputError: There is no such folder or repository, it holds no aligner, or
                huggingface_hub is missing.
        """
        if pathlib.Path(path).expanduser().exists():
            return cls.load(path)
        options: Any = {"revision": revision, "token": token, "endpoint": endpoint}
        return cls.load(sharing.fetch(os.fspath(path), cache_dir=cache_dir, **options))

    def evaluate(
        self,
        x: ArrayLike,
        y: ArrayLike,
        x_of_y: ArrayLike | None = None,
        *,
        calibrated: bool | None = None,
    ) -> evaluation.Report:
        """Measures R@k in both directions, with intervals and chance levels.

        Args:
            x: Embeddings of the first modality, shape [n, d_x].
            y: Embeddings of the second modality, shape [m, d_y].
            x_of_y: Row of x that each row of y belongs to, shape [m]. By default row i matches
                row i.
            calibrated: The scores that searches will use. By default the aligner's own choice.

        Returns:
            An `evaluation.Report` of plain scores, and of calibrated ones if there is
            a calibration. `print` shows it as a table, which names the scores of `search`.
        """
        gallery = data.gallery(x, y, x_of_y)
        uses = self._correction(calibrated) is not None
        return evaluation.report(
            self.heads.x, self.heads.y, gallery, self.calibration, calibrated=uses
        )

    def to_numpy(self, *, calibrated: bool | None = None) -> runtime.Embedder:
        """Returns the heads as numpy functions, see `export.to_numpy`.

        Args:
            calibrated: True adds the correction for hubs as the output "bias". By default the
                aligner's own choice.

        Returns:
            The heads. `save` writes them into a folder that needs numpy only.

        Example:
            >>> from sotalign_jax.heads import build_heads
            >>> Aligner(build_heads(4, 3, 2), {}).to_numpy().embed_x(np.eye(4)).shape
            (4, 2)
        """
        return export.to_numpy(self.heads, self._correction(calibrated))

    def export(
        self, path: str | os.PathLike[str], *, calibrated: bool | None = None
    ) -> tuple[pathlib.Path, pathlib.Path]:
        """Writes one ONNX file per modality, see `export.to_onnx`.

        Args:
            path: Name of the files. "model.onnx" writes `model_x.onnx` and `model_y.onnx`.
            calibrated: True adds the correction for hubs as the output "bias". By default the
                aligner's own choice.

        Returns:
            The paths of both files.
        """
        return export.to_onnx(self.heads, path, self._correction(calibrated))

    def index(
        self, gallery: ArrayLike, *, direction: str = "x_to_y", calibrated: bool | None = None
    ) -> Index:
        """Embeds a gallery for an index of inner products, see `export.index`.

        Args:
            gallery: Embeddings to search, shape [m, d_y].
            direction: "x_to_y", or "y_to_x" if the gallery is of the first modality.
            calibrated: True adds the corrections for hubs as two more columns. By default the
                aligner's own choice.

        Returns:
            The index.

        Raises:
            InputError: There is no calibration.
        """
        correction = self._correction(calibrated)
        return export.index(self.heads, gallery, correction, direction=direction)


def _checked_indices(indices: ArrayLike, queries: int, rows: int) -> np.ndarray:
    """Returns row numbers of shape [queries, k]. Raises InputError if they are others."""
    chosen = np.asarray(indices)
    whole = chosen.dtype.kind in "iu" and chosen.ndim == 2 and len(chosen) == queries
    if not whole or (chosen.size and not 0 <= chosen.min() <= chosen.max() < rows):
        raise checks.InputError(
            f"indices must be rows of the gallery, 0..{rows - 1}, of shape [{queries}, k], got "
            f"{chosen.dtype} of shape {chosen.shape}; pass those of search"
        )
    return chosen


def describe_unpaired(gain: Mapping[str, Any]) -> str:
    """Describes in one line what the unpaired rows brought.

    Args:
        gain: The result of `recipe.unpaired_gain`, which is `info["unpaired"]` of an aligner.

    Returns:
        The line.

    Example:
        >>> describe_unpaired({"score": "mean recall", "with": 60.4, "without": 55.3})
        'unpaired data: +5.1 (held-out mean recall 60.4, 55.3 without)'
    """
    brought = gain["with"] - gain["without"]
    values = f"held-out {gain['score']} {gain['with']:.1f}, {gain['without']:.1f} without"
    if gain.get("plan_error", 0.0) > refine.TOLERANCE:
        values += f", plans with a marginal error of {gain['plan_error']:.2g}"
    # A smaller gain would be shown as zero.
    if brought < 0.05:
        return f"unpaired data: no gain ({values})"
    return f"unpaired data: +{brought:.1f} ({values})"
