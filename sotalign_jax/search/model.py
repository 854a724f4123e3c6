"""Trained models with their encoders, which accept raw pictures, texts and sounds.

`Model.load` loads an aligner and the encoders that it was trained with:

    import sotalign_jax as sota

    pictures = sota.Model.load("runs/pictures/run/align-seed0").index("PICTURES")
    for hit in pictures.search("a bird", k=10):
        print(hit.score, hit.id)
"""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sotalign_jax import aligner, checks, confidence, persistence, storage
from sotalign_jax.search import datasets, encoders, extraction, items, shards

Path = str | os.PathLike[str]
Content = Any
"""Path of a file, `PIL.Image.Image`, `items.Sound`, or a text as a str."""
READERS: dict[str, Callable[[pathlib.Path], Any]] = {"image": items.oriented, "audio": items.sound}
"""Functions that read a file, by modality."""
UNREADABLE = 0.5
"""Share of unknown letters from which results of a text are guesses."""
UNKNOWN_SCRIPT = "The text encoder does not know this script: results are guesses."


SEARCH, INDEXED = "search", "indexed.json"
"""Folder of a model's indexes, and file that names the index that it was saved with."""


class Hit(NamedTuple):
    """Search result.

    Attributes:
        id: Path below the indexed folder, or the text itself.
        score: Cosine in the shared space, or calibrated score.
        row: Row in the index.
        confidence: Probability that the result is right, see `sotalign_jax.confidence`. None if
            the query has the modality of the index, if the encoder cannot read it, or if the model
            has no confidence.
        word: "strong", "plausible" or "weak". All results of a text that the encoder cannot read
            are weak. Otherwise empty if there is no confidence.
    """

    id: str
    score: float
    row: int
    confidence: float | None = None
    word: str = ""


class Index(NamedTuple):
    """Items to search: their embeddings, and their features in the shared space.

    Attributes:
        side: Side of the aligner, "x" or "y".
        embeddings: Raw embeddings and the ids of their rows.
        features: Unit features, shape [n, d].
    """

    side: str
    embeddings: extraction.Embeddings
    features: np.ndarray


@dataclasses.dataclass(frozen=True)
class Model:
    """An aligner with the encoders of its two modalities.

    Attributes:
        aligner: Maps embeddings into the shared space.
        encoders: Encoders of the sides "x" and "y".
        folder: Folder that the aligner was loaded from. New indexes are stored in it.
        indexed: Items to search, set by `index`.
    """

    aligner: aligner.Aligner
    encoders: Mapping[str, encoders.Encoder]
    folder: pathlib.Path
    indexed: Index | None = None

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        x_encoder: str | None = None,
        y_encoder: str | None = None,
        x_weights: str | None = None,
        y_weights: str | None = None,
        device: str | None = None,
        trust_remote_code: bool = False,
    ) -> "Model":
        """Loads a trained model with the encoders that it was trained with.

        Args:
            path: Folder of a finished run, folder with a single finished run, or folder written by
                `Model.save` or `Aligner.save`.
            x_encoder: Encoder of the first modality. The default is the one trained with.
            y_encoder: Encoder of the second modality. The default is the one trained with.
            x_weights: Folder with a copy of the first encoder's repository.
            y_weights: Folder with a copy of the second encoder's repository.
            device: Torch device of the encoders. The default is the fastest.
            trust_remote_code: Run code that comes with the weights.

        Returns:
            The model, with the items that were indexed when it was saved. The encoders stay in
            memory.

        Raises:
            InputError: There is no model, an encoder is unknown, its weights are not those trained
                with, or a package is missing.
        """
        folder = pathlib.Path(path).expanduser()
        # The work folder of a single run is accepted in place of the folder of that run.
        below = sorted(folder.glob(f"*/{persistence.FOLDER}"))
        folder = below[0].parent if len(below) == 1 else folder
        aligned = aligner.Aligner.load(folder)
        options: dict[str, Any] = {"device": device, "trust_remote_code": trust_remote_code}
        x = load_encoder(aligned, "x", x_encoder, x_weights, **options)
        y = load_encoder(aligned, "y", y_encoder, y_weights, **options)
        model = cls(aligned, {"x": x, "y": y}, folder)
        if not (folder / INDEXED).exists():
            return model
        saved = storage.read_json(folder / INDEXED)
        return model.with_index(saved["side"], extraction.load(folder / SEARCH / saved["name"]))

    def save(self, path: Path, *, overwrite: bool = False) -> None:
        """Writes the model and its indexed items into a folder, which `load` reads anywhere.

        Neither the training files nor the indexed files are needed to search afterwards. The
        weights of the encoders are not copied.

        Args:
            path: The folder, which is created.
            overwrite: True to replace an existing model.

        Raises:
            InputError: The folder holds a model already, or other files in its place.
            OSError: The files cannot be written.
        """
        folder = pathlib.Path(path).expanduser()
        self.aligner.save(folder / persistence.FOLDER, overwrite=overwrite)
        (folder / INDEXED).unlink(missing_ok=True)
        if self.indexed is None:
            return
        source = self.indexed.embeddings.folder
        assert source is not None  # `index` reads every index from a folder
        target = folder / SEARCH / source.name
        if target.resolve() != source.resolve():
            shutil.copytree(source, target, dirs_exist_ok=True)
        storage.write_json(folder / INDEXED, {"side": self.indexed.side, "name": source.name})

    def encode_image(self, images: Path | Sequence[Content]) -> np.ndarray:
        """Maps pictures into the shared space.

        Args:
            images: Paths or `PIL.Image.Image`s, or a single path.

        Returns:
            Unit features, shape [n, d].

        Raises:
            InputError: A picture cannot be read, or the model has no image encoder.
        """
        return self._features(self._side("image"), images)

    def encode_text(self, texts: str | Sequence[str]) -> np.ndarray:
        """Maps texts into the shared space.

        Args:
            texts: Texts, or a single one.

        Returns:
            Unit features, shape [n, d].

        Raises:
            InputError: A text is empty, or the model has no text encoder.
        """
        return self._features(self._side("text"), texts)

    def encode_audio(self, sounds: Path | Sequence[Content]) -> np.ndarray:
        """Maps sounds into the shared space.

        Args:
            sounds: Paths or `items.Sound`s, or a single path.

        Returns:
            Unit features, shape [n, d].

        Raises:
            InputError: A sound cannot be read, or the model has no audio encoder.
        """
        return self._features(self._side("audio"), sounds)

    def similarity(
        self, x: Sequence[Content], y: Sequence[Content], *, calibrated: bool | None = None
    ) -> np.ndarray:
        """Computes the score of every x with every y: see `Aligner.similarity`.

        Args:
            x: n items of the first modality, such as paths of pictures.
            y: m items of the second modality, such as texts.
            calibrated: True corrects the cosines for hubness. By default the aligner's own choice.

        Returns:
            Scores, shape [n, m].
        """
        rows = self._embed("x", x), self._embed("y", y)
        return self.aligner.similarity(*rows, calibrated=calibrated)

    def index(self, of: Path, place: Path | None = None) -> "Model":
        """Embeds the items to search.

        Embeddings are stored by encoder and path, and read again by the next call, which embeds
        only files that are new or have changed.

        Args:
            of: Folder of pictures; file of texts (.txt with one per line, .csv or .jsonl); or
                finished extraction of any modality.
            place: Extraction of the same items, or folder to store embeddings in. The default is
                the folder "search" of the model.

        Returns:
            A model that searches these items.

        Raises:
            InputError: There is nothing to embed, or the extraction is of other items or of
                another encoder.
        """
        of = pathlib.Path(of).expanduser()
        place = self.folder / SEARCH if place is None else pathlib.Path(place).expanduser()
        if (of / shards.INPUTS).exists():
            modality = extraction.load(of).metadata["encoder"]["modality"]
            source, place = None, of
        elif of.is_file():
            texts, modality = read_texts(of), "text"
            source = items.Source({"text": lambda: map(items.Item, texts, texts, texts)})
        else:
            source, modality = datasets.open_dataset("folder", of), "image"
        side = self._side(modality)
        return self.with_index(side, embedded(source, self.encoders[side], of, place))

    def with_index(self, side: str, embeddings: extraction.Embeddings) -> "Model":
        """Returns a model that searches the items of an extraction.

        Args:
            side: Side of the aligner that the items belong to, "x" or "y".
            embeddings: Their raw embeddings.

        Returns:
            The model.
        """
        features = self._map(side, embeddings.rows)
        return dataclasses.replace(self, indexed=Index(side, embeddings, features))

    def search(self, query: Content, k: int = 10, *, calibrated: bool | None = None) -> list[Hit]:
        """Finds the indexed items that are most similar to a query.

        Args:
            query: Text as a str, or another item as a `pathlib.Path`, `PIL.Image.Image` or
                `items.Sound`. It may have the modality of the index.
            k: Number of results. All items are returned if there are fewer.
            calibrated: True corrects the scores for hubness. The correction is between modalities,
                so the query must have the other modality. By default the aligner's own choice.

        Returns:
            Results, best first. Among equal scores the lower row comes first.

        Raises:
            InputError: Nothing is indexed, or the query cannot be read.
        """
        checks.whole(1, k=k)
        side = self.side_of(query)
        feature = self._features(side, [query])[0]
        scores = self._scores(side, feature[None], calibrated)[0]
        if self.warning(query):
            return [hit._replace(word="weak") for hit in self._best(scores, k)]
        probabilities = None
        if side != self.searched.side:
            direction = "x_to_y" if side == "x" else "y_to_x"
            uses = self.uses_calibration(side, calibrated)
            fitted = self.aligner.fitted_confidence(direction, calibrated=uses)
            probabilities = None if fitted is None else fitted.probabilities(scores)
        return self._best(scores, k, probabilities)

    def similar(self, row: int, k: int = 10) -> list[Hit]:
        """Finds the indexed items that are most similar to one of them, which is left out.

        Nothing is read or embedded, because the index holds the item's features.

        Args:
            row: Row of the item in the index.
            k: Number of results. All other items are returned if there are fewer.

        Returns:
            Results, best first. The scores are cosines.

        Raises:
            InputError: Nothing is indexed, or there is no such row.
        """
        checks.whole(1, k=k)
        features = self.searched.features
        if not 0 <= row < len(features):
            raise checks.InputError(f"row must be in 0 ... {len(features) - 1}, got {row}")
        scores = features @ features[row]
        scores[row] = -np.inf
        return self._best(scores, min(k, len(features) - 1))

    def side_of(self, query: Content) -> str:
        """Returns the side whose encoder reads a query, "x" or "y"."""
        # Only a text is a str. Any other query has the modality that is not text.
        others = [e.modality for e in self.encoders.values() if e.modality != "text"]
        return self._side("text" if isinstance(query, str) else (*others, "image")[0])

    def warning(self, query: Content) -> str:
        """Returns a sentence if the text encoder cannot read a query, or else "".

        Args:
            query: Text, or another item.

        Returns:
            The sentence. Tokenizers written in Python do not tell what they cannot read.
        """
        if not isinstance(query, str):
            return ""
        unknown = self.encoders[self.side_of(query)].unknown
        if unknown is None or unknown(query) < UNREADABLE:
            return ""
        return UNKNOWN_SCRIPT

    def uses_calibration(self, side: str, calibrated: bool | None = None) -> bool:
        """Returns True if scores of queries are calibrated.

        Args:
            side: Side of the queries, "x" or "y".
            calibrated: The wanted scores. By default the aligner's own choice.

        Returns:
            The choice. Queries of the indexed modality have plain cosines.
        """
        crossed = side != self.searched.side
        return (self.aligner.calibrated and crossed) if calibrated is None else calibrated

    @property
    def searched(self) -> Index:
        """The items to search."""
        if self.indexed is None:
            raise checks.InputError("nothing is indexed; call model.index(FOLDER) first")
        return self.indexed

    def _best(
        self, scores: np.ndarray, k: int, probabilities: np.ndarray | None = None
    ) -> list[Hit]:
        """Returns the k items of the highest scores."""
        origins = self.searched.embeddings.origins
        # Stable, so that equal scores keep the row order. Words need the first results in any case.
        best = np.argsort(-scores, kind="stable")[: max(k, confidence.FIRST)]
        hits = [Hit(origins[row].id, float(scores[row]), int(row)) for row in best]
        if probabilities is not None:
            claimed = probabilities[best].tolist()
            known = zip(hits, claimed, confidence.words(claimed), strict=True)
            hits = [hit._replace(confidence=p, word=word) for hit, p, word in known]
        return hits[:k]

    def _side(self, modality: str) -> str:
        """Returns the side with an encoder of this modality."""
        sides = [side for side, own in self.encoders.items() if own.modality == modality]
        if len(sides) != 1:  # none, or both sides have this modality
            has = " and ".join(own.modality for own in self.encoders.values())
            remedy = "use model.encoders and model.aligner"
            raise checks.InputError(f"{modality} needs its own encoder, got {has}; {remedy}")
        return sides[0]

    def _embed(self, side: str, contents: Any) -> np.ndarray:
        """Computes raw embeddings, shape [n, d_x] or [n, d_y], batch by batch."""
        encoder = self.encoders[side]
        rest = iter([contents] if isinstance(contents, str | os.PathLike) else contents)
        rows = []
        while batch := list(itertools.islice(rest, encoder.batch_size)):
            read = [encoder.prepare(_read(content, encoder.modality)) for content in batch]
            found: dict[int, np.ndarray] = {}
            for chosen in encoder.split(read):
                made = encoder.embed([read[n] for n in chosen])
                found |= zip(chosen, np.asarray(made, np.float32), strict=True)
            rows += [found[n] for n in range(len(read))]
        if not rows:
            raise checks.InputError(f"{encoder.modality} must have at least one item, got 0")
        return np.stack(rows)

    def _map(self, side: str, rows: np.ndarray) -> np.ndarray:
        return self.aligner.embed_x(rows) if side == "x" else self.aligner.embed_y(rows)

    def _features(self, side: str, contents: Any) -> np.ndarray:
        return self._map(side, self._embed(side, contents))

    def _scores(self, side: str, features: np.ndarray, calibrated: bool | None) -> np.ndarray:
        """Returns the scores of queries with all indexed items, those of `Aligner.similarity`."""
        cosines = features @ self.searched.features.T
        if not self.uses_calibration(side, calibrated):
            return cosines
        if side == self.searched.side:
            text = f"calibrated=True but query and index are both {self.encoders[side].modality}"
            raise checks.InputError(f"{text}; leave it out")
        known = self._calibration
        assert self.aligner.calibration is not None
        correct = self.aligner.calibration.x if side == "x" else self.aligner.calibration.y
        return cosines + known + correct(features)[:, None]

    @functools.cached_property
    def _calibration(self) -> np.ndarray:
        """Potentials of the indexed items, computed once."""
        known, (side, _, features) = self.aligner.calibration, self.searched
        if known is None:
            text = "calibrated=True but this model has no calibration"
            raise checks.InputError(f"{text}; leave it out, or use Aligner.calibrated_by")
        return known.x(features) if side == "x" else known.y(features)


def load_encoder(
    aligned: aligner.Aligner, side: str, name: str | None, weights: str | None, **options: Any
) -> encoders.Encoder:
    """Loads the encoder of one side of an aligner.

    Args:
        aligned: Aligner of a run.
        side: "x" or "y".
        name: One of `encoders.NAMES`, or None for the encoder trained with.
        weights: Folder with a copy of its repository, or None.
        **options: Options of `encoders.load`.

    Returns:
        The encoder.

    Raises:
        InputError: The encoder is unknown, or its weights are not those trained with.
    """
    if name is not None:
        return encoders.load(name, weights=weights, **options)
    known = aligned.info.get("encoders")
    if known is None:
        text = f"{side}_encoder is not set and the model does not name its encoder"
        raise checks.InputError(f"{text}; pass --{side}_encoder=NAME")
    described = known[side]
    options["max_length"] = described.get("max_length")
    options["instruction"] = described.get("instruction")
    options["compute_dtype"] = described.get("compute_dtype")
    # The pooling of sentence-transformers is a list of modules, which the model brings along.
    if isinstance(described.get("pooling"), str):
        options["pool"] = described["pooling"]
    encoder = encoders.load(described["name"], weights=weights, **options)
    # Other weights give other embeddings, on which the aligner was not trained.
    now = encoder.describe()["revision"]
    if described.get("revision", now) != now:
        before = described["revision"]
        text = f"{described['name']} has revision {now} but training used {before}"
        remedy = f"load those weights, or pass --{side}_encoder to use these anyway"
        raise checks.InputError(f"{side}_encoder {text}; {remedy}")
    return encoder


def read_texts(path: pathlib.Path) -> list[str]:
    """Returns the distinct texts of a .txt file with one per line, or of a .csv or .jsonl file."""
    if path.suffix != ".txt":
        return list(dict.fromkeys(caption for _, caption in datasets.read_captions(path)))
    try:
        return list(dict.fromkeys(items.lines(path)))
    except (OSError, ValueError) as error:
        raise checks.InputError(f"texts {path} cannot be read ({error})") from error


def _read(content: Content, modality: str) -> Any:
    """Reads the file of a path, and returns other content unchanged."""
    if modality == "text":
        if not isinstance(content, str) or not content.strip():
            raise checks.InputError(f"text must not be empty, got {content!r}")
        return content
    if not isinstance(content, str | os.PathLike):
        return content
    try:
        return READERS[modality](pathlib.Path(content).expanduser())
    except checks.InputError:
        raise
    except Exception as error:  # decoders raise errors of many kinds for damaged files
        text = f"{modality} {content} cannot be read ({checks.first_line(error)})"
        raise checks.InputError(f"{text}; pass another file") from error


def embedded(
    source: items.Source | None, encoder: encoders.Encoder, of: pathlib.Path, place: pathlib.Path
) -> extraction.Embeddings:
    """Returns the embeddings of a source, from the extraction at `place` or newly computed.

    Args:
        source: The items. None does not compare those of the extraction with files.
        encoder: Their encoder.
        of: Path of the items, which names their folder in `place`.
        place: Extraction of the items, or folder to store embeddings in.

    Returns:
        The embeddings.

    Raises:
        InputError: There is nothing to embed, or the extraction is of other items or of another
            encoder.
    """
    listed = source.items[encoder.modality] if source else None
    if (place / shards.INPUTS).exists():
        ready = extraction.load(place)
        change = extraction.difference(listed(), place) if listed else None
        if ready.metadata["encoder"] != encoder.describe():
            change = "its encoder is another one"
        if change is not None:
            text = f"index {place} is not an extraction of {of} ({change})"
            raise checks.InputError(f"{text}; extract it again, or leave --index out")
        return ready
    assert source is not None and listed is not None
    # Several folders and encoders may share one place.
    key = json.dumps([encoder.describe(), str(of.resolve())])
    out = place / storage.digest(key.encode())[:16]
    if change := extraction.difference(listed(), out):
        if not any(True for _ in listed()):  # keep the index of an unmounted folder
            raise checks.InputError(f"{of} holds no {encoder.modality}; check the path")
        if not (out / shards.METADATA).exists():
            print(f"{of} has changed ({change}); embedding it again", file=sys.stderr)
            with storage.locked(out):  # another process may be writing these embeddings
                shutil.rmtree(out)
    extraction.extract(source, encoder, out, data={"name": "search"}, shard_size=256, title=str(of))
    return extraction.load(out)
