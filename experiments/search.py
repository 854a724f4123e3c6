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
from typing import Any, NamedTuple

import numpy as np

from experiments import cli, contact_sheet, datasets, encoders, extract, extraction, pair
from experiments import report as tables
from experiments.datasets import base, folder
from experiments.extraction import Embeddings, Encoder
from sotalign_jax import aligner, checks, recording

BUNDLED = {"x": {"name": "efficientnet-lite2"}, "y": {"name": "all-minilm-l6-v2"}}
"""Encoders of the bundled pictures."""


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
        found = index(datasets.open_dataset("folder", images), self.image_encoder, self.place)
        wanted = self.model.embed_y(_embed(self.text_encoder, query))
        best = nearest(wanted, self.model.embed_x(found.rows), top)
        results = [(found.origins[row].id, score) for row, score in best]
        tiles = [
            contact_sheet.Tile(base.oriented(images / name), f"{rank}.  {score:.3f}", name)
            for rank, (name, score) in enumerate(results, 1)
        ]
        contact_sheet.save(sheet, query, tiles)
        return results

    def texts(
        self, query: pathlib.Path, texts: Sequence[str], *, top: int, sheet: pathlib.Path
    ) -> list[tuple[str, float]]:
        """The texts that are nearest to a picture, best first, and a sheet of both."""
        try:
            image = base.oriented(query)
        except OSError as error:
            raise checks.InputError(f"query_image: {query} cannot be read ({error})") from error
        source = datasets.Source({"text": functools.partial(_listed, texts)})
        found = index(source, self.text_encoder, self.place)
        wanted = self.model.embed_x(_embed(self.image_encoder, image))
        best = nearest(wanted, self.model.embed_y(found.rows), top)
        results = [(texts[int(found.origins[row].id)], score) for row, score in best]
        lines = [f"{score:.3f}  {text}" for text, score in results]
        contact_sheet.save_answers(sheet, image, lines)
        return results


def _listed(texts: Sequence[str]) -> Iterator[datasets.Item]:
    for number, text in enumerate(texts):
        yield base.text_item(str(number), text, str(number))


def _embed(encoder: Encoder, content: Any) -> np.ndarray:
    return np.asarray(encoder.embed([encoder.prepare(content)]), np.float32)


def _parser() -> cli.Parser:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--model", required=True, type=cli.path, help="folder of a finished run or saved aligner")
    add("--query", help="what to look for among --images")
    add("--images", type=cli.path, help="folder of pictures")
    add("--query_image", type=cli.path, help="picture to find the texts of")
    add("--texts", type=cli.path, help="texts to choose from: .txt with one a line, .csv or .jsonl")
    add("--top", default=10, type=cli.positive, help="how many to show")
    add("--sheet", default="search.png", type=cli.path, help="where the contact sheet is written")
    add("--index", type=cli.path, help="folder for embeddings; MODEL/search by default")
    for side in ("image", "text"):
        add(f"--{side}_encoder", help="instead of the one the model was trained with")
        add(f"--{side}_weights", help="folder with a copy of that encoder's repository")
    add("--device", help="cpu, cuda, ...; the fastest there is by default")
    add("--trust_remote_code", action="store_true", help="run code that comes with the weights")
    return parser


def _main() -> None:
    flags = _parser().parse_args()
    by_text = flags.query is not None and flags.images is not None
    if not by_text and (flags.query_image is None or flags.texts is None):
        raise checks.InputError("query: pass --query and --images, or --query_image and --texts")
    model = aligner.Aligner.load(flags.model)
    options = {"device": flags.device, "trust_remote_code": flags.trust_remote_code}
    found = Searcher(
        model,
        load_encoder(model, "x", flags.image_encoder, flags.image_weights, **options),
        load_encoder(model, "y", flags.text_encoder, flags.text_weights, **options),
        flags.index or flags.model / "search",
    )
    if by_text:
        results = found.pictures(flags.query, flags.images, top=flags.top, sheet=flags.sheet)
    else:
        texts = read_texts(flags.texts)
        results = found.texts(flags.query_image, texts, top=flags.top, sheet=flags.sheet)
    rows = [[rank, score, name] for rank, (name, score) in enumerate(results, 1)]
    print(tables.table(["rank", "cosine", "picture" if by_text else "text"], rows, digits=3))
    print(f"\ncontact sheet: {flags.sheet}")


if __name__ == "__main__":
    cli.guarded(_main, resume="--index")
