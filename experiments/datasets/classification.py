"""Labelled pictures: ImageNet, Food-101, CIFAR, DTD, Flowers-102 and FGVC-Aircraft.

The text of such a dataset is its class prompts, every template filled with every class name; the
group of a picture and of a prompt is the number of its class.
"""

import codecs
import csv
import functools
import json
import pathlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from experiments.datasets import base
from sotalign_jax import checks

ZERO_SHOT = pathlib.Path(__file__).parents[1] / "zero_shot"
Labelled = tuple[str, Callable[[], Any], int]
"""Id, loader and class of a picture."""


def source(
    prompts: str, class_names: Sequence[str], pictures: Callable[[], Iterator[Labelled]]
) -> base.Source:
    """A source of labelled pictures whose prompts are those of the set named `prompts`."""
    templates = json.loads((ZERO_SHOT / "templates.json").read_text())[prompts]
    names = tuple(class_names)
    return base.Source(
        {
            "image": functools.partial(_images, pictures),
            "text": functools.partial(_prompts, names, templates),
        },
        names,
    )


def published_names(prompts: str) -> list[str]:
    """Class names as CLIP's zero-shot evaluation writes them."""
    names: list[str] = json.loads((ZERO_SHOT / "class_names.json").read_text())[prompts]
    return names


def _images(pictures: Callable[[], Iterator[Labelled]]) -> Iterator[base.Item]:
    for name, load, label in pictures():
        yield base.Item(name, load, str(label))


def _prompts(class_names: tuple[str, ...], templates: list[str]) -> Iterator[base.Item]:
    for label, name in enumerate(class_names):
        for number, template in enumerate(templates):
            yield base.text_item(f"{label}/{number}", template.format(c=name), str(label))


def _files(root: pathlib.Path, rows: list[tuple[str, int]]) -> Iterator[Labelled]:
    for name, label in rows:
        yield name, functools.partial(base.picture, root / name), label


# --- one function a dataset ---------------------------------------------------------------------


def imagenet(request: base.Request) -> base.Source:
    """ImageNet-1k: SPLIT/SYNSET/*.JPEG, or Kaggle's layout with LOC_val_solution.csv."""
    root, split = request.root, request.split
    checks.choice("split", split, ("train", "val"))
    if (root / "LOC_synset_mapping.txt").exists():
        synsets = [line.split()[0] for line in base.lines(root / "LOC_synset_mapping.txt")]
        folder = root / "ILSVRC" / "Data" / "CLS-LOC" / split
    else:
        folder = base.find(root, split)
        synsets = sorted(path.name for path in folder.iterdir() if path.is_dir())
    names = published_names("imagenet1k")
    if len(synsets) != len(names):
        raise checks.InputError(
            f"root: {folder} has {len(synsets)} synset folders but ImageNet-1k has {len(names)}; "
            "class names go by their order, so keep empty ones as well"
        )
    number = {synset: label for label, synset in enumerate(synsets)}
    if split == "val" and (root / "LOC_val_solution.csv").exists():
        with (root / "LOC_val_solution.csv").open(newline="") as file:
            rows = [
                (f"{row['ImageId']}.JPEG", number[row["PredictionString"].split()[0]])
                for row in csv.DictReader(file)
            ]
        return source("imagenet1k", names, lambda: _files(folder, sorted(rows)))
    return source("imagenet1k", names, lambda: _tree(folder, number))


def _tree(folder: pathlib.Path, number: dict[str, int]) -> Iterator[Labelled]:
    for path in base.pictures_below(folder):
        yield str(path), functools.partial(base.picture, folder / path), number[path.parts[0]]


def food101(request: base.Request) -> base.Source:
    """Food-101: images/CLASS/ID.jpg, meta/classes.txt, meta/test.txt or train.txt."""
    root = base.find(request.root, "meta").parent
    checks.choice("split", request.split, ("train", "test"))
    classes = base.lines(root / "meta" / "classes.txt")
    listed = base.lines(root / "meta" / f"{request.split}.txt")
    rows = [(f"{name}.jpg", classes.index(name.split("/")[0])) for name in listed]
    return source("food101", _spaced(classes), lambda: _files(root / "images", rows))


def dtd(request: base.Request) -> base.Source:
    """Describable textures, split 1: images/CLASS/*.jpg and labels/test1.txt, train1.txt, ..."""
    root = base.find(request.root, "labels").parent
    listed = base.lines(base.find(root, f"labels/{request.split}.txt"))
    classes = sorted(path.name for path in (root / "images").iterdir() if path.is_dir())
    rows = [(name, classes.index(name.split("/")[0])) for name in listed]
    return source("dtd", _spaced(classes), lambda: _files(root / "images", rows))


def flowers(request: base.Request) -> base.Source:
    """Flowers-102: jpg/image_NNNNN.jpg, imagelabels.mat, setid.mat; split train, val or test."""
    import scipy.io

    parts = {"train": "trnid", "val": "valid", "test": "tstid"}
    checks.choice("split", request.split, tuple(parts))
    root = base.find(request.root, "setid.mat").parent
    labels = scipy.io.loadmat(root / "imagelabels.mat")["labels"].ravel()
    numbers = scipy.io.loadmat(root / "setid.mat")[parts[request.split]].ravel()
    rows = [(f"image_{n:05d}.jpg", int(labels[n - 1]) - 1) for n in numbers.tolist()]
    return source("flowers", published_names("flowers"), lambda: _files(root / "jpg", rows))


def aircraft(request: base.Request) -> base.Source:
    """FGVC-Aircraft by variant: data/images/*.jpg, data/variants.txt, images_variant_SPLIT.txt."""
    data = base.find(request.root, "data/variants.txt", "variants.txt").parent
    variants = base.lines(data / "variants.txt")
    rows = []
    for line in base.lines(base.find(data, f"images_variant_{request.split}.txt")):
        name, _, variant = line.partition(" ")
        rows.append((f"{name}.jpg", variants.index(variant.strip())))
    return source("fgvc_aircraft", variants, lambda: _files(data / "images", rows))


def cifar10(request: base.Request) -> base.Source:
    """CIFAR-10 in its Python version: cifar-10-batches-py."""
    names = {"test": ["test_batch"], "train": [f"data_batch_{n}" for n in range(1, 6)]}
    return _cifar(request, "cifar10", names, "batches.meta", "label_names", "labels")


def cifar100(request: base.Request) -> base.Source:
    """CIFAR-100 in its Python version: cifar-100-python, fine labels."""
    names = {"test": ["test"], "train": ["train"]}
    return _cifar(request, "cifar100", names, "meta", "fine_label_names", "fine_labels")


def _cifar(
    request: base.Request,
    prompts: str,
    batches: dict[str, list[str]],
    meta: str,
    names: str,
    labels: str,
) -> base.Source:
    checks.choice("split", request.split, tuple(batches))
    root = base.find(request.root, meta).parent
    classes = [name.decode() for name in _unpickle(root / meta)[names.encode()]]
    files = [root / name for name in batches[request.split]]

    def pictures() -> Iterator[Labelled]:
        for file in files:
            batch = _unpickle(file)
            # Rows are planes of red, green and blue, 32 x 32 each.
            rows = batch[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            for n, label in enumerate(batch[labels.encode()]):
                yield f"{file.name}/{n}", functools.partial(_from_array, rows[n]), int(label)

    return source(prompts, _spaced(classes), pictures)


def _from_array(pixels: np.ndarray) -> Any:
    import PIL.Image

    return PIL.Image.fromarray(np.ascontiguousarray(pixels))


def _spaced(names: Sequence[str]) -> list[str]:
    return [name.replace("_", " ") for name in names]


class _ArraysOnly(pickle.Unpickler):
    """Reads plain values and numpy arrays; a pickle that asks for anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        home = module.replace("numpy._core", "numpy.core")
        if (home, name) == ("numpy.core.multiarray", "_reconstruct"):
            return np.empty(0).__reduce__()[0]
        if (home, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # bytes, as Python 3 pickles them for 2
            return codecs.encode
        raise pickle.UnpicklingError(f"asks for {module}.{name}, which no CIFAR file does")


def _unpickle(path: pathlib.Path) -> dict[bytes, Any]:
    try:
        with path.open("rb") as file:
            return _ArraysOnly(file, encoding="bytes").load()
    except (OSError, EOFError, pickle.UnpicklingError, ValueError) as error:
        raise checks.InputError(f"root: {path} cannot be read ({error})") from error
