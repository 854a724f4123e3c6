"""Pictures with several captions each: COCO (2017 and Karpathy's splits) and Flickr30k."""

import functools
import pathlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from experiments import workdir
from experiments.datasets import base
from sotalign_jax import checks

KARPATHY = {
    "train": ("train", "restval"),  # as usual, what Karpathy left over is trained on
    "val": ("val",),
    "test": ("test",),
}


class Captioned(NamedTuple):
    """A picture and its captions, with ids."""

    id: str
    file: pathlib.Path
    captions: list[tuple[str, str]]


def coco(request: base.Request) -> base.Source:
    """COCO captions: split val2017, train2017 or karpathy-train, -val, -test; five captions each.

    The 2017 splits need `annotations/captions_SPLIT.json` and the pictures in `SPLIT/`, the
    others `dataset_coco.json` and the pictures in `train2014/` and `val2014/`.
    """
    root, split = request.root, request.split
    if split.startswith("karpathy-"):
        records = _karpathy(base.find(root, "dataset_coco.json"), split.removeprefix("karpathy-"))
        return _source(
            Captioned(
                str(record["cocoid"]),
                root / record["filepath"] / record["filename"],
                [(str(sentence["sentid"]), sentence["raw"]) for sentence in record["sentences"]],
            )
            for record in records
        )
    name = f"captions_{split}.json"
    table = workdir.read_json(base.find(root, f"annotations/{name}", name))
    captions: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for entry in table["annotations"]:
        captions[entry["image_id"]].append((str(entry["id"]), entry["caption"]))
    return _source(
        Captioned(str(entry["id"]), root / split / entry["file_name"], captions[entry["id"]])
        for entry in sorted(table["images"], key=lambda entry: entry["id"])
    )


def flickr30k(request: base.Request) -> base.Source:
    """Flickr30k in Karpathy's splits: `dataset_flickr30k.json` beside the folder of pictures."""
    root = request.root
    records = _karpathy(base.find(root, "dataset_flickr30k.json"), request.split)
    pictures = base.find(root, "flickr30k-images", "flickr30k_images", "images", "Images")
    return _source(
        Captioned(
            record["filename"],
            pictures / record["filename"],
            [(str(sentence["sentid"]), sentence["raw"]) for sentence in record["sentences"]],
        )
        for record in records
    )


def _karpathy(path: pathlib.Path, split: str) -> list[dict[str, Any]]:
    checks.choice("split", split, tuple(KARPATHY))
    records = workdir.read_json(path)["images"]
    return [record for record in records if record["split"] in KARPATHY[split]]


def _source(records: Iterator[Captioned]) -> base.Source:
    table = list(records)
    return base.Source(
        {"image": functools.partial(_images, table), "text": functools.partial(_texts, table)}
    )


def _images(table: list[Captioned]) -> Iterator[base.Item]:
    for record in table:
        yield base.Item(record.id, functools.partial(base.picture, record.file), record.id)


def _texts(table: list[Captioned]) -> Iterator[base.Item]:
    for record in table:
        for identity, caption in record.captions[: base.CAPTIONS]:
            yield base.text_item(identity, caption, record.id)
        if not record.captions:
            yield base.bad_item(f"{record.id}#0", "has no caption", record.id)
