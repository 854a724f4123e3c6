"""Datasets by name, each read from its own on-disk format; see `experiments.datasets.base`."""

import functools
import pathlib
from collections.abc import Callable
from typing import NamedTuple

from experiments.datasets import captioned, classification, folder, others, tars, tfds
from experiments.datasets.base import Item, Request, Sound, Source
from sotalign_jax import checks

__all__ = ["DATASETS", "Item", "Request", "Sound", "Source", "open_dataset"]


class Adapter(NamedTuple):
    """How a dataset is opened, and the split that the paper evaluates on (or trains on)."""

    open: Callable[[Request], Source]
    split: str


DATASETS = {
    "folder": Adapter(folder.folder, ""),
    "webdataset": Adapter(tars.webdataset, ""),
    "coco": Adapter(captioned.coco, "val2017"),
    "flickr30k": Adapter(captioned.flickr30k, "test"),
    "imagenet": Adapter(classification.imagenet, "val"),
    "food101": Adapter(classification.food101, "test"),
    "cifar10": Adapter(classification.cifar10, "test"),
    "cifar100": Adapter(classification.cifar100, "test"),
    "dtd": Adapter(classification.dtd, "test1"),
    "flowers": Adapter(classification.flowers, "test"),
    "aircraft": Adapter(classification.aircraft, "test"),
    "librispeech": Adapter(others.librispeech, "test-clean"),
    "wikitext": Adapter(others.wikitext, "train"),
    "skyscript": Adapter(others.skyscript, "test"),
    "polyvore": Adapter(others.polyvore, ""),
}


def open_dataset(
    name: str, root: pathlib.Path, *, split: str | None = None, captions: pathlib.Path | None = None
) -> Source:
    """Opens a dataset, `tfds:NAME` included, that lies in `root`.

    Raises:
        InputError: the name is unknown, or `root` does not hold what the dataset consists of.
    """
    if name.startswith("tfds:"):
        adapter = Adapter(functools.partial(tfds.tfds, name.removeprefix("tfds:")), "test")
    else:
        checks.choice("data", name, (*DATASETS, "tfds:NAME"))
        adapter = DATASETS[name]
    if not root.exists():
        raise checks.InputError(f"root: {root} does not exist; pass the dataset's own folder")
    return adapter.open(Request(root, adapter.split if split is None else split, captions))
