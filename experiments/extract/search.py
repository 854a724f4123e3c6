"""Pictures by text and texts by picture, with an aligned model, and a page to look at them."""

import hashlib
import html
import json
import pathlib
import shutil
import sys
from typing import Any, NamedTuple

import numpy as np

from experiments import page, photos, workdir
from experiments.extract import datasets, encoders, extraction, items, pair
from experiments.extract.encoders import Encoder
from experiments.extract.items import Source
from sotalign_jax import aligner, checks

PHOTOS = {"x": {"name": "efficientnet-lite2"}, "y": {"name": "all-minilm-l6-v2"}}
"""Encoders of the photographs in the repository."""


def trained_with(model: aligner.Aligner) -> dict[str, dict[str, Any]] | None:
    """The encoders of the embeddings that a model was trained on, if they are known."""
    data = model.info.get("settings", {}).get("data", {})
    if data.get("name") in photos.CAPTIONED:
        return PHOTOS
    table = str((data.get("files") or {}).get("x") or "").partition("#")[0]
    noted = pathlib.Path(table).parent / pair.ENCODERS
    known: dict[str, dict[str, Any]] | None = None
    if table and noted.exists():
        known = workdir.read_json(noted)
    return known


def load_encoder(
    model: aligner.Aligner, side: str, name: str | None, weights: str | None, **options: Any
) -> Encoder:
    """The encoder that belongs to one side of a model, or the one that the user names.

    Raises:
        InputError: it is not known, or its embeddings are not the ones trained on.
    """
    if name is not None:
        return encoders.load(name, weights=weights, **options)
    flag = {"x": "image_encoder", "y": "text_encoder"}[side]
    known = trained_with(model)
    if known is None:
        raise checks.InputError(
            f"{flag}: the model does not say what its embeddings came from; pass --{flag}=NAME"
        )
    described = known[side]
    options["max_length"] = described.get("max_length")
    if isinstance(described.get("pooling"), str):
        options["pool"] = described["pooling"]
    encoder = encoders.load(described["name"], weights=weights, **options)
    now = encoder.describe()["revision"]
    if described.get("revision", now) != now:
        raise checks.InputError(
            f"{flag}: {described['name']} is at {now} but the model was trained on "
            f"{described['revision']}; load those weights, or name the encoder to use it anyway"
        )
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
    """What was found, best first, with its cosines; and the same as an HTML page."""

    results: list[tuple[str, float]]
    page: str


class Searcher(NamedTuple):
    """An aligned model with its encoders, and the folder where embeddings are kept."""

    model: aligner.Aligner
    image_encoder: Encoder
    text_encoder: Encoder
    place: pathlib.Path

    def pictures(self, query: str, images: pathlib.Path, *, top: int) -> Answer:
        """The pictures below `images` that are nearest to a text, best first."""
        source = datasets.open_dataset("folder", images)
        results = self._search(query, source, "image", images, top)
        boxes = [
            page.card(
                f"<b>{rank}. {score:.3f}</b><br>{html.escape(name)}",
                page.thumbnail(items.oriented(images / name), name),
            )
            for rank, (name, score) in enumerate(results, 1)
        ]
        return Answer(results, _page(query, f"pictures in {images}", page.cards(*boxes)))

    def texts(self, query: pathlib.Path, file: pathlib.Path, *, top: int) -> Answer:
        """The texts of a file that are nearest to a picture, best first."""
        try:
            image = items.oriented(query)
        except OSError as error:
            raise checks.InputError(f"query_image: {query} cannot be read ({error})") from error
        texts = read_texts(file)
        source = Source({"text": lambda: map(items.text_item, texts, texts, texts)})
        results = self._search(image, source, "text", file, top)
        lines = "".join(f"<li>{html.escape(text)} ({score:.3f})</li>" for text, score in results)
        parts = page.thumbnail(image, query.name), f"<ol>{lines}</ol>"
        return Answer(results, _page(query.name, f"texts in {file}", *parts))

    def _search(
        self, query: Any, source: Source, modality: str, of: pathlib.Path, top: int
    ) -> list[tuple[str, float]]:
        """The items of a source nearest to a query, and their cosines.

        Embeddings are kept by encoder and by the path that they are of, and made again when what
        is there has changed.
        """
        own, other, direction = self.text_encoder, self.image_encoder, "y_to_x"
        if modality == "text":
            own, other, direction = other, own, "x_to_y"
        key = json.dumps([other.describe(), str(of.resolve())])
        out = self.place / hashlib.sha256(key.encode()).hexdigest()[:16]
        change = extraction.difference(source.items[modality](), out)
        if change is not None:
            print(f"{of}: {change}; embedding it again", file=sys.stderr)
            with workdir.only_process(out):
                shutil.rmtree(out)
        extraction.extract(source, other, out, data={"name": "search"}, shard_size=256)
        found = extraction.load(out)
        asked = np.asarray(own.embed([own.prepare(query)]), np.float32)
        k = min(top, len(found.rows))
        scores, rows = self.model.search(asked, found.rows, k, direction=direction)
        return [(found.origins[r].id, float(s)) for r, s in zip(rows[0], scores[0], strict=True)]


def _page(query: str, among: str, *parts: str) -> str:
    head = f"<header><h1>{html.escape(query)}</h1>{page.text(f'The best {among}.')}</header>"
    return page.page(query, head, *parts)
