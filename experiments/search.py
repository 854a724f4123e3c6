r"""Searches pictures by text, or texts by picture, with an aligned model.

    python -m experiments.search --model=RUN --query="a red car" --images=DIR
    python -m experiments.search --model=RUN --query_image=car.jpg --texts=captions.txt

Prints the best and writes a contact sheet. The encoders are those of the model's training files
(of the bundled pictures, if it was trained on them); embeddings of a folder are kept in --index,
so that the next search of it is quick.
"""

import functools
import hashlib
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from absl import app, flags

from experiments import cli, contact_sheet, datasets, encoders, extract, extraction, pair
from experiments.datasets import base, folder
from experiments.extraction import Embeddings, Encoder
from sotalign_jax import aligner, checks, recording, tables

BUNDLED = {"x": {"name": "efficientnet-lite2"}, "y": {"name": "all-minilm-l6-v2"}}
"""Encoders of the bundled pictures."""

_MODEL = flags.DEFINE_string("model", None, "Folder of a finished run, or of a saved aligner.")
_QUERY = flags.DEFINE_string("query", None, "What to look for among --images.")
_QUERY_IMAGE = flags.DEFINE_string("query_image", None, "Picture to find the texts of.")
_IMAGES = flags.DEFINE_string("images", None, "Folder of pictures.")
_TEXTS = flags.DEFINE_string(
    "texts", None, "Texts to choose from: .txt with one a line, or a .csv or .jsonl of captions."
)
_TOP = flags.DEFINE_integer("top", 10, "How many to show.", lower_bound=1)
_SHEET = flags.DEFINE_string("sheet", "search.png", "Where the contact sheet is written.")
_INDEX = flags.DEFINE_string("index", None, "Folder for embeddings; by default MODEL/search.")
_X = flags.DEFINE_string("image_encoder", None, "Instead of the one the model was trained with.")
_Y = flags.DEFINE_string("text_encoder", None, "Instead of the one the model was trained with.")
_WEIGHTS_X = flags.DEFINE_string("image_weights", None, "Local copy of the image encoder.")
_WEIGHTS_Y = flags.DEFINE_string("text_weights", None, "Local copy of the text encoder.")
_TRUST = flags.DEFINE_bool("trust_remote_code", False, "Run code that comes with the weights.")
_DEVICE = flags.DEFINE_string("device", None, "cpu, cuda, ...; the fastest there is by default.")


def trained_with(model: aligner.Aligner) -> dict[str, dict[str, Any]] | None:
    """The encoders of the embeddings that a model was trained on, if they are known."""
    data = model.info.get("settings", {}).get("data", {})
    if data.get("name") == "pictures":
        return BUNDLED
    table = str((data.get("files") or {}).get("x") or "").partition("#")[0]
    noted = pathlib.Path(table).parent / pair.ENCODERS
    if not table or not noted.exists():
        return None
    encoders_json: dict[str, dict[str, Any]] = recording.read_json(noted)
    return encoders_json


def load_encoder(
    model: aligner.Aligner, side: str, name: str | None, weights: str | None, **options: Any
) -> Encoder:
    """The encoder that belongs to one side of a model, or the one that the user names.

    Raises:
        InputError: it is not known, or its embeddings are not the ones trained on.
    """
    flag = {"x": "image_encoder", "y": "text_encoder"}[side]
    known = trained_with(model)
    if name is not None:
        return encoders.load(name, weights=weights, **options)
    if known is None:
        raise checks.InputError(
            f"{flag}: the model does not say what its embeddings came from; pass --{flag}=NAME"
        )
    described = known[side]
    pool = described.get("pooling")
    encoder = encoders.load(
        described["name"],
        weights=weights,
        pool=pool if isinstance(pool, str) and pool != "own" else None,
        max_length=described.get("max_length"),
        **options,
    )
    now = encoder.describe()["revision"]
    if described.get("revision", now) != now:
        raise checks.InputError(
            f"{flag}: {described['name']} is at {now} but the model was trained on "
            f"{described['revision']}; load those weights, or name the encoder to use it anyway"
        )
    return encoder


def index(source: datasets.Source, encoder: Encoder, place: pathlib.Path) -> Embeddings:
    """Embeddings of a source, computed once: its folder is named by encoder and content."""
    _, digest = extraction.fingerprint(source.items[encoder.modality]())
    name = hashlib.sha256(json.dumps([encoder.describe(), digest]).encode()).hexdigest()[:16]
    extract.run(source, encoder, place / name, data={"name": "search"}, shard_size=256)
    return extraction.load(place / name)


def nearest(query: np.ndarray, keys: np.ndarray, top: int) -> list[tuple[int, float]]:
    """Rows of `keys` [n, d] with the largest cosine to `query` [1, d], both of unit length."""
    scores = keys @ query[0]
    best = np.argsort(-scores, kind="stable")[:top]
    return [(int(row), float(scores[row])) for row in best]


def read_texts(path: pathlib.Path) -> list[str]:
    """Distinct texts of a .txt, .csv or .jsonl file."""
    if path.suffix != ".txt":
        return list(dict.fromkeys(row.caption for row in folder.read_captions(path)))
    try:
        return list(dict.fromkeys(base.lines(path)))
    except (OSError, ValueError) as error:
        raise checks.InputError(f"texts: {path} cannot be read ({error})") from error


def text_to_image(
    model: aligner.Aligner,
    image_encoder: Encoder,
    text_encoder: Encoder,
    query: str,
    images: pathlib.Path,
    *,
    place: pathlib.Path,
    top: int,
    sheet: pathlib.Path,
) -> list[tuple[str, float]]:
    """The pictures below `images` that are nearest to a text, best first, and their sheet."""
    found = index(datasets.open_dataset("folder", images), image_encoder, place)
    keys = model.embed_x(found.rows)
    best = nearest(model.embed_y(_embed(text_encoder, query)), keys, top)
    results = [(found.origins[row].id, score) for row, score in best]
    tiles = [
        contact_sheet.Tile(base.oriented(images / name), f"{rank}.  {score:.3f}", name)
        for rank, (name, score) in enumerate(results, 1)
    ]
    contact_sheet.save(sheet, query, tiles)
    return results


def image_to_text(
    model: aligner.Aligner,
    image_encoder: Encoder,
    text_encoder: Encoder,
    query: pathlib.Path,
    texts: Sequence[str],
    *,
    place: pathlib.Path,
    top: int,
    sheet: pathlib.Path,
) -> list[tuple[str, float]]:
    """The texts that are nearest to a picture, best first, and a sheet of both."""
    try:
        image = base.oriented(query)
    except OSError as error:
        raise checks.InputError(f"query_image: {query} cannot be read ({error})") from error
    source = datasets.Source({"text": functools.partial(_listed, texts)})
    found = index(source, text_encoder, place)
    keys = model.embed_y(found.rows)
    best = nearest(model.embed_x(_embed(image_encoder, image)), keys, top)
    results = [(texts[int(found.origins[row].id)], score) for row, score in best]
    contact_sheet.save_answers(sheet, image, [f"{score:.3f}  {text}" for text, score in results])
    return results


def _listed(texts: Sequence[str]) -> Iterator[datasets.Item]:
    for number, text in enumerate(texts):
        yield base.text_item(str(number), text, str(number))


def _embed(encoder: Encoder, content: Any) -> np.ndarray:
    return np.asarray(encoder.embed([encoder.prepare(content)]), np.float32)


def _main(argv: list[str]) -> None:
    del argv
    path = cli.folder("model", _MODEL.value)
    model = aligner.Aligner.load(path)
    query = _QUERY.value
    if (query is None) == (_QUERY_IMAGE.value is None):
        raise checks.InputError("query: pass --query with --images, or --query_image with --texts")
    options = {"device": _DEVICE.value, "trust_remote_code": _TRUST.value}
    image_encoder = load_encoder(model, "x", _X.value, _WEIGHTS_X.value, **options)
    text_encoder = load_encoder(model, "y", _Y.value, _WEIGHTS_Y.value, **options)
    place = path / "search" if _INDEX.value is None else cli.folder("index", _INDEX.value)
    sheet = cli.folder("sheet", _SHEET.value)
    shared: dict[str, Any] = {"place": place, "top": _TOP.value, "sheet": sheet}
    if query is not None:
        images = cli.folder("images", _IMAGES.value)
        results = text_to_image(model, image_encoder, text_encoder, query, images, **shared)
    else:
        texts = read_texts(cli.folder("texts", _TEXTS.value))
        picture = cli.folder("query_image", _QUERY_IMAGE.value)
        results = image_to_text(model, image_encoder, text_encoder, picture, texts, **shared)
    rows = [[rank, score, name] for rank, (name, score) in enumerate(results, 1)]
    print(tables.table(["rank", "cosine", "text" if query is None else "picture"], rows, digits=3))
    print(f"\ncontact sheet: {sheet}")


if __name__ == "__main__":
    app.run(cli.guarded(_main, resume="--index"), flags_parser=cli.parse)
