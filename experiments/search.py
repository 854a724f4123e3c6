r"""Searches pictures by text, or texts by picture, with an aligned model.

    python -m experiments.search --model=RUN --query="a red car" --images=DIR
    python -m experiments.search --model=RUN --query_image=car.jpg --texts=captions.txt

Prints the best and writes them on an HTML page, pictures included. The encoders are those of the
model's training files (of the photographs, if it was trained on them); embeddings of a folder are
kept in --index, so that the next search of it is quick, and made again when its files change.
--index may also be an extraction of the pictures: then nothing is embedded.
"""

import hashlib
import html
import json
import pathlib
import shutil
import sys
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from experiments import cli, photos, report, workdir
from experiments.cli import path_flag
from experiments.extract import datasets, encoders, extraction, items
from sotalign_jax import aligner, checks

_MODEL = path_flag("model", None, "Folder of a finished run or saved aligner.")
_QUERY = flags.DEFINE_string("query", None, "What to look for among --images.")
_IMAGES = path_flag("images", None, "Folder of pictures.")
_PICTURE = path_flag("query_image", None, "Picture to find the texts of.")
_TEXTS = path_flag("texts", None, "Texts to choose from: .txt with one a line, .csv or .jsonl.")
_CALIBRATED = flags.DEFINE_bool("calibrated", False, "Correct for hubs by unpaired rows.")
_TOP = flags.DEFINE_integer("top", 10, "How many to show.", 1)
_PAGE = path_flag("page", "search.html", "Where the page is written.")
_INDEX = path_flag(
    "index", None, "Folder for embeddings, or an extraction; MODEL/search by default."
)
_ENCODERS = {
    side: flags.DEFINE_string(f"{side}_encoder", None, "Instead of the one trained with.")
    for side in ("image", "text")
}
_WEIGHTS = {
    side: flags.DEFINE_string(f"{side}_weights", None, "Folder with a copy of its repository.")
    for side in ("image", "text")
}
_DEVICE = flags.DEFINE_string("device", None, "cpu, cuda, ...; by default the fastest there is.")
_TRUST = flags.DEFINE_bool("trust_remote_code", False, "Run code that comes with the weights.")

CHOICES = {
    f"{side} encoders": [n for n, spec in encoders.NAMES.items() if spec.kind.modality == side]
    for side in ("image", "text")
}
PHOTOS = {"x": {"name": "efficientnet-lite2"}, "y": {"name": "all-minilm-l6-v2"}}
"""Encoders of the photographs in the repository."""


def trained_with(model: aligner.Aligner) -> dict[str, dict[str, Any]] | None:
    """The encoders of the embeddings that a model was trained on, if they are known."""
    data = model.info.get("settings", {}).get("data", {})
    if data.get("name") in photos.CAPTIONED:
        return PHOTOS
    table = str((data.get("files") or {}).get("x") or "").partition("#")[0]
    noted = pathlib.Path(table).parent / extraction.ENCODERS
    return workdir.read_json(noted) if table and noted.exists() else None


def load_encoder(
    model: aligner.Aligner, side: str, name: str | None, weights: str | None, **options: Any
) -> encoders.Encoder:
    """The encoder that one side of a model was trained with, or the one that the user names."""
    if name is not None:
        return encoders.load(name, weights=weights, **options)
    flag = {"x": "image_encoder", "y": "text_encoder"}[side]
    known = trained_with(model)
    if known is None:
        text = f"{flag}: the model does not say what its embeddings came from"
        raise checks.InputError(f"{text}; pass --{flag}=NAME")
    described = known[side]
    options["max_length"] = described.get("max_length")
    if isinstance(described.get("pooling"), str):
        options["pool"] = described["pooling"]
    encoder = encoders.load(described["name"], weights=weights, **options)
    now = encoder.describe()["revision"]
    if described.get("revision", now) != now:
        text = f"{described['name']} is at {now} but {described['revision']} was trained on"
        remedy = "load those weights, or name the encoder to use it anyway"
        raise checks.InputError(f"{flag}: {text}; {remedy}")
    return encoder


def read_texts(path: pathlib.Path) -> list[str]:
    """Distinct texts of a .txt, .csv or .jsonl file."""
    if path.suffix != ".txt":
        return list(dict.fromkeys(caption for _, caption in datasets.read_captions(path)))
    try:
        return list(dict.fromkeys(items.lines(path)))
    except (OSError, ValueError) as error:
        raise checks.InputError(f"texts: {path} cannot be read ({error})") from error


class Answer(NamedTuple):
    """What was found, best first, with its scores; and the same as an HTML page."""

    results: list[tuple[str, float]]
    page: str


class Searcher(NamedTuple):
    """An aligned model with its encoders, and the folder where embeddings are kept."""

    model: aligner.Aligner
    image_encoder: encoders.Encoder
    text_encoder: encoders.Encoder
    place: pathlib.Path
    calibrated: bool = False

    @property
    def score(self) -> str:
        """What results are ranked by."""
        return "calibrated score" if self.calibrated else "cosine"

    def pictures(self, query: str, images: pathlib.Path, *, top: int) -> Answer:
        """The pictures below `images` that are nearest to a text, best first."""
        source = datasets.open_dataset("folder", images)
        results = self._search(query, source, "image", images, top)
        titles = (
            f"<b>{rank}. {score:.3f}</b><br>{html.escape(name)}"
            for rank, (name, score) in enumerate(results, 1)
        )
        shown = (report.thumbnail(items.oriented(images / name), name) for name, _ in results)
        cards = report.cards(*zip(titles, shown, strict=True))
        below = report.small(f"The best pictures in {images}, each with its {self.score}.")
        return Answer(results, report.page(query, below, cards))

    def texts(self, query: pathlib.Path, file: pathlib.Path, *, top: int) -> Answer:
        """The texts of a file that are nearest to a picture, best first."""
        try:
            image = items.oriented(query)
        except OSError as error:
            raise checks.InputError(f"query_image: {query} cannot be read ({error})") from error
        texts = read_texts(file)
        source = items.Source({"text": lambda: map(items.Item, texts, texts, texts)})
        results = self._search(image, source, "text", file, top)
        lines = "".join(f"<li>{html.escape(text)} ({score:.3f})</li>" for text, score in results)
        parts = report.thumbnail(image, query.name), f"<ol>{lines}</ol>"
        below = report.small(f"The best texts in {file}, each with its {self.score}.")
        return Answer(results, report.page(query.name, below, *parts))

    def _search(
        self, query: Any, source: items.Source, modality: str, of: pathlib.Path, top: int
    ) -> list[tuple[str, float]]:
        """The items of a source nearest to a query, and their scores."""
        own, other, direction = self.text_encoder, self.image_encoder, "y_to_x"
        if modality == "text":
            own, other, direction = other, own, "x_to_y"
        found = self._embedded(source, other, of)
        asked = np.asarray(own.embed([own.prepare(query)]), np.float32)
        k = min(top, len(found.rows))
        scores, rows = self.model.search(
            asked, found.rows, k, direction=direction, calibrated=self.calibrated
        )
        return [(found.origins[r].id, float(s)) for r, s in zip(rows[0], scores[0], strict=True)]

    def _embedded(
        self, source: items.Source, encoder: encoders.Encoder, of: pathlib.Path
    ) -> extraction.Embeddings:
        """A source's embeddings: those at the place itself if it is an extraction.

        Else embeddings are kept by encoder and path, and made again when what is there has changed.
        """
        listed = source.items[encoder.modality]
        if (self.place / extraction.INPUTS).exists():
            ready = extraction.load(self.place)
            change = extraction.difference(listed(), self.place)
            if ready.metadata["encoder"] != encoder.describe():
                change = "it has another encoder"
            if change is not None:
                text = f"index: {self.place} is not an extraction of {of}: {change}"
                raise checks.InputError(f"{text}; extract it again, or leave --index out")
            return ready
        key = json.dumps([encoder.describe(), str(of.resolve())])
        out = self.place / hashlib.sha256(key.encode()).hexdigest()[:16]
        if change := extraction.difference(listed(), out):
            print(f"{of}: {change}; embedding it again", file=sys.stderr)
            with workdir.only_process(out):
                shutil.rmtree(out)
        extraction.extract(source, encoder, out, data={"name": "search"}, shard_size=256)
        return extraction.load(out)


def _searcher() -> Searcher:
    """The one that the flags describe."""
    if _MODEL.value is None:
        raise checks.InputError("model: is not set; pass --model=FOLDER")
    model = aligner.Aligner.load(_MODEL.value)
    if _CALIBRATED.value and model.calibration is None:
        raise checks.InputError("calibrated: this model has no calibration; leave --calibrated out")
    options: dict[str, Any] = {"device": _DEVICE.value, "trust_remote_code": _TRUST.value}
    image, text = (
        load_encoder(model, side, _ENCODERS[name].value, _WEIGHTS[name].value, **options)
        for side, name in (("x", "image"), ("y", "text"))
    )
    place = _INDEX.value or _MODEL.value / "search"
    return Searcher(model, image, text, place, _CALIBRATED.value)


def main() -> None:
    """Searches, prints the best and writes the page."""
    if _QUERY.value is not None and _IMAGES.value is not None:
        kind, searcher = "picture", _searcher()
        answer = searcher.pictures(_QUERY.value, _IMAGES.value, top=_TOP.value)
    elif _PICTURE.value is not None and _TEXTS.value is not None:
        kind, searcher = "text", _searcher()
        answer = searcher.texts(_PICTURE.value, _TEXTS.value, top=_TOP.value)
    else:
        raise checks.InputError("query: pass --query and --images, or --query_image and --texts")
    rows = [[rank, score, name] for rank, (name, score) in enumerate(answer.results, 1)]
    print(report.Table(["rank", searcher.score, kind], rows, digits=3))
    report.write(_PAGE.value, answer.page)
    print(f"\nto look at: {_PAGE.value}")


if __name__ == "__main__":
    cli.run(main, choices=CHOICES)
