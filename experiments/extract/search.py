"""Pictures by text and texts by picture, with an aligned model, and a PNG to look at them."""

import hashlib
import json
import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont

from experiments import photos, workdir
from experiments.extract import datasets, encoders, extraction, items, pair
from experiments.extract.extraction import Embeddings
from experiments.extract.items import Encoder, Source
from sotalign_jax import aligner, checks

TILE, GAP, LINE = 180, 12, 18
INK, PALE = (30, 30, 30), (110, 110, 110)
PHOTOS = {"x": {"name": "efficientnet-lite2"}, "y": {"name": "all-minilm-l6-v2"}}
"""Encoders of the photographs in the repository."""


def trained_with(model: aligner.Aligner) -> dict[str, dict[str, Any]] | None:
    """The encoders of the embeddings that a model was trained on, if they are known."""
    data = model.info.get("settings", {}).get("data", {})
    if data.get("name") in photos.CAPTIONED:
        return PHOTOS
    table = str((data.get("files") or {}).get("x") or "").partition("#")[0]
    noted = pathlib.Path(table).parent / pair.ENCODERS
    if not table or not noted.exists():
        return None
    encoders_json: dict[str, dict[str, Any]] = workdir.read_json(noted)
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


def index(source: Source, encoder: Encoder, place: pathlib.Path, *, of: pathlib.Path) -> Embeddings:
    """Embeddings of a source, kept below `place` by encoder and by the path that they are of.

    What has changed there since is embedded again.
    """
    key = json.dumps([encoder.describe(), str(of.resolve())])
    out = place / hashlib.sha256(key.encode()).hexdigest()[:16]
    change = extraction.difference(source.items[encoder.modality](), out)
    if change is not None:
        print(f"{of}: {change}; embedding it again", file=sys.stderr)
        with workdir.only_process(out):
            shutil.rmtree(out)
    extraction.extract(source, encoder, out, data={"name": "search"}, shard_size=256)
    return extraction.load(out)


def nearest(query: np.ndarray, keys: np.ndarray, top: int) -> list[tuple[int, float]]:
    """Rows of `keys` [n, d] with the largest cosine to `query` [1, d], both of unit length."""
    scores = keys @ query[0]
    best = np.argsort(-scores, kind="stable")[:top]
    return [(int(row), float(scores[row])) for row in best]


def read_texts(path: pathlib.Path) -> list[str]:
    """Distinct texts of a .txt, .csv or .jsonl file."""
    if path.suffix != ".txt":
        return list(dict.fromkeys(row.caption for row in datasets.read_captions(path)))
    try:
        return list(dict.fromkeys(items.lines(path)))
    except (OSError, ValueError) as error:
        raise checks.InputError(f"texts: {path} cannot be read ({error})") from error


class Searcher(NamedTuple):
    """An aligned model with its encoders, and the folder where embeddings are kept."""

    model: aligner.Aligner
    image_encoder: Encoder
    text_encoder: Encoder
    place: pathlib.Path

    def pictures(
        self, query: str, images: pathlib.Path, *, top: int, sheet: pathlib.Path
    ) -> list[tuple[str, float]]:
        """The pictures below `images` that are nearest to a text, best first, and their sheet."""
        source = datasets.open_dataset("folder", images)
        found = index(source, self.image_encoder, self.place, of=images)
        wanted = self.model.embed_y(_embed(self.text_encoder, query))
        best = nearest(wanted, self.model.embed_x(found.rows), top)
        results = [(found.origins[row].id, score) for row, score in best]
        tiles = [
            Tile(items.oriented(images / name), f"{rank}.  {score:.3f}", name)
            for rank, (name, score) in enumerate(results, 1)
        ]
        save_sheet(sheet, query, tiles)
        return results

    def texts(
        self, query: pathlib.Path, file: pathlib.Path, *, top: int, sheet: pathlib.Path
    ) -> list[tuple[str, float]]:
        """The texts of a file that are nearest to a picture, best first, and a sheet of both."""
        try:
            image = items.oriented(query)
        except OSError as error:
            raise checks.InputError(f"query_image: {query} cannot be read ({error})") from error
        texts = read_texts(file)
        source = Source({"text": lambda: map(items.text_item, texts, texts, texts)})
        found = index(source, self.text_encoder, self.place, of=file)
        wanted = self.model.embed_x(_embed(self.image_encoder, image))
        best = nearest(wanted, self.model.embed_y(found.rows), top)
        results = [(found.origins[row].id, score) for row, score in best]
        lines = [f"{score:.3f}  {text}" for text, score in results]
        save_answers(sheet, image, lines)
        return results


def _embed(encoder: Encoder, content: Any) -> np.ndarray:
    return np.asarray(encoder.embed([encoder.prepare(content)]), np.float32)


# --- contact sheets -----------------------------------------------------------------------------


class Tile(NamedTuple):
    """A picture, and the two lines below it."""

    image: Any
    title: str
    detail: str


def save_sheet(
    path: pathlib.Path, heading: str, tiles: Sequence[Tile], *, columns: int = 5
) -> None:
    """Writes the tiles, in rows of `columns`, under a heading."""
    columns = min(columns, len(tiles))
    rows = -(-len(tiles) // columns)
    height = TILE + 2 * LINE + GAP
    sheet = PIL.Image.new(
        "RGB", (GAP + columns * (TILE + GAP), 2 * GAP + LINE + rows * height), "white"
    )
    pen = PIL.ImageDraw.Draw(sheet)
    large, small = (PIL.ImageFont.load_default(size) for size in (16, 12))
    pen.text((GAP, GAP - 4), fitted(pen, heading, large, sheet.width - 2 * GAP), INK, large)
    for number, tile in enumerate(tiles):
        left = GAP + number % columns * (TILE + GAP)
        top = 2 * GAP + LINE + number // columns * height
        picture = _within(tile.image, TILE)
        place = left + (TILE - picture.width) // 2, top + (TILE - picture.height) // 2
        sheet.paste(picture, place)
        for line, (text, ink) in enumerate([(tile.title, INK), (tile.detail, PALE)]):
            below = (left, top + TILE + 2 + line * LINE)
            pen.text(below, fitted(pen, text, small, TILE), ink, small)
    _write(path, sheet)


def save_answers(path: pathlib.Path, image: Any, lines: Sequence[str]) -> None:
    """Writes one picture with lines of text beside it."""
    sheet = PIL.Image.new("RGB", (960, 2 * GAP + max(2 * TILE, len(lines) * 24)), "white")
    pen, font = PIL.ImageDraw.Draw(sheet), PIL.ImageFont.load_default(15)
    picture = _within(image, 2 * TILE)
    sheet.paste(picture, (GAP, GAP))
    left = 3 * GAP + 2 * TILE
    for number, line in enumerate(lines):
        text = fitted(pen, line, font, sheet.width - left - GAP)
        pen.text((left, GAP + number * 24), text, INK, font)
    _write(path, sheet)


def _within(image: Any, side: int) -> Any:
    """A picture on white, as large as fits a square."""
    picture = items.on_white(image)
    scale = side / max(picture.size)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    return picture.resize(size, PIL.Image.Resampling.LANCZOS)


def _write(path: pathlib.Path, sheet: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with workdir.replacing(path) as file:
        # Few colours keep a sheet small; it is to be looked at, not measured.
        sheet.quantize(128).save(file, "PNG", optimize=True)


def fitted(pen: Any, text: str, font: Any, width: int) -> str:
    """The text, or as much of it as fits."""
    if pen.textlength(text, font) <= width:
        return text
    while text and pen.textlength(f"{text}…", font) > width:
        text = text[:-1]
    return f"{text}…"
