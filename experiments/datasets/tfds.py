"""Datasets that TensorFlow Datasets has prepared, through random access; no TensorFlow needed."""

import functools
from collections.abc import Iterator
from typing import Any

from experiments.datasets import base, classification
from sotalign_jax import checks, files

PROMPTS = {
    "cifar10": "cifar10",
    "cifar100": "cifar100",
    "dtd": "dtd",
    "food101": "food101",
    "imagenet2012": "imagenet1k",
    "oxford_flowers102": "flowers",
}
"""Which prompts go with a dataset of TFDS."""


def tfds(name: str, request: base.Request) -> base.Source:
    """The first Image and Text feature of NAME; row n of one belongs to row n of the other.

    A ClassLabel `label` and known prompts make it a classification set.
    """
    records = files.open_tfds(name, request.split, folder=str(request.root))
    kinds = {"Image": "image", "Text": "text"}  # sounds cannot be had without TensorFlow
    features: dict[str, str] = {}
    for key, feature in records.dataset_info.features.items():
        modality = kinds.get(type(feature).__name__)
        if modality is not None:
            features.setdefault(modality, key)
    labels: Any = dict(records.dataset_info.features.items()).get("label")
    prompts = PROMPTS.get(name.split("/")[0].split(":")[0])
    if "image" in features and hasattr(labels, "names") and prompts is not None:
        # TFDS names ImageNet's classes by synset and orders both as the published names do.
        published = prompts in ("imagenet1k", "flowers")
        names = classification.published_names(prompts) if published else labels.names
        pictures = functools.partial(_labelled, records, features["image"])
        return classification.source(prompts, [n.replace("_", " ") for n in names], pictures)
    if not features:
        known = ", ".join(records.dataset_info.features)
        raise checks.InputError(f"data: tfds:{name} has {known}; none is an image or a text")
    return base.Source(
        {
            modality: functools.partial(_rows, records, modality, key)
            for modality, key in features.items()
        }
    )


def _rows(records: Any, modality: str, key: str) -> Iterator[base.Item]:
    for n in range(len(records)):
        yield base.Item(str(n), functools.partial(_load, records, n, modality, key), str(n))


def _labelled(records: Any, key: str) -> Iterator[classification.Labelled]:
    for n in range(len(records)):
        load = functools.partial(_load, records, n, "image", key)
        yield str(n), load, int(records[n]["label"])


def _load(records: Any, n: int, modality: str, key: str) -> Any:
    value = records[n][key]
    if modality == "image":
        import PIL.Image

        return PIL.Image.fromarray(value[..., 0] if value.shape[-1] == 1 else value)
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)
