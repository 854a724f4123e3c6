"""Labelled pictures: ImageNet, Food-101, CIFAR, DTD, Flowers-102 and FGVC-Aircraft.

The text of such a dataset is its class prompts, every template filled with every class name; the
group of a picture and of a prompt is the number of its class.
"""

import codecs
import csv
import functools
import pathlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from experiments import workdir
from experiments.extract import items
from experiments.extract.items import Item, Source
from sotalign_jax import checks

_FOLDER = pathlib.Path(__file__).parents[1] / "zero_shot"
TEMPLATES, CLASS_NAMES = _FOLDER / "templates.json", _FOLDER / "class_names.json"


def source(
    prompts: str, class_names: Sequence[str], pictures: Callable[[], Iterator[Item]]
) -> Source:
    """A source of labelled pictures whose prompts are those of the set named `prompts`."""
    templates = workdir.read_json(TEMPLATES)[prompts]
    names = tuple(name.replace("_", " ") for name in class_names)

    def texts() -> Iterator[Item]:
        for label, name in enumerate(names):
            for number, template in enumerate(templates):
                text = template.format(c=name)
                yield items.text_item(f"{label}/{number}", text, str(label))

    return Source({"image": pictures, "text": texts}, names)


def published_names(prompts: str) -> list[str]:
    """Class names as CLIP's zero-shot evaluation writes them."""
    names: list[str] = workdir.read_json(CLASS_NAMES)[prompts]
    return names


def _files(
    prompts: str, classes: Sequence[str], root: pathlib.Path, rows: Iterable[tuple[str, int]]
) -> Source:
    """A source of picture files with their labels."""
    table = list(rows)
    return source(
        prompts,
        classes,
        lambda: (items.file_item(name, root / name, str(label)) for name, label in table),
    )


# --- one function a dataset ---------------------------------------------------------------------


def imagenet(root: pathlib.Path, split: str) -> Source:
    """ImageNet-1k: SPLIT/SYNSET/*.JPEG, or Kaggle's layout with LOC_val_solution.csv."""
    checks.choice("split", split, ("train", "val"))
    mapping, solution = root / "LOC_synset_mapping.txt", root / "LOC_val_solution.csv"
    if mapping.exists():
        synsets = [line.split()[0] for line in items.lines(mapping)]
        folder = root / "ILSVRC" / "Data" / "CLS-LOC" / split
    else:
        folder = items.find(root, split)
        synsets = sorted(path.name for path in folder.iterdir() if path.is_dir())
    names = published_names("imagenet1k")
    if len(synsets) != len(names):
        raise checks.InputError(
            f"root: {folder} has {len(synsets)} synset folders but ImageNet-1k has {len(names)}; "
            "class names go by their order, so keep empty ones as well"
        )
    if split == "val" and solution.exists():
        with solution.open(newline="") as file:
            listed = [(f"{r['ImageId']}.JPEG", r["PredictionString"]) for r in csv.DictReader(file)]
        found = sorted((name, synset.split()[0]) for name, synset in listed)
    else:
        found = [(name, pathlib.Path(name).parts[0]) for name in items.pictures_below(folder)]
    number = {synset: label for label, synset in enumerate(synsets)}
    return _files("imagenet1k", names, folder, ((name, number[synset]) for name, synset in found))


def food101(root: pathlib.Path, split: str) -> Source:
    """Food-101: images/CLASS/ID.jpg, meta/classes.txt, meta/test.txt or train.txt."""
    root = items.find(root, "meta").parent
    checks.choice("split", split, ("train", "test"))
    classes = items.lines(root / "meta" / "classes.txt")
    listed = items.lines(root / "meta" / f"{split}.txt")
    rows = ((f"{name}.jpg", classes.index(name.split("/")[0])) for name in listed)
    return _files("food101", classes, root / "images", rows)


def dtd(root: pathlib.Path, split: str) -> Source:
    """Describable textures, split 1: images/CLASS/*.jpg and labels/test1.txt, train1.txt, ..."""
    root = items.find(root, "labels").parent
    listed = items.lines(items.find(root, f"labels/{split}.txt"))
    classes = sorted(path.name for path in (root / "images").iterdir() if path.is_dir())
    rows = ((name, classes.index(name.split("/")[0])) for name in listed)
    return _files("dtd", classes, root / "images", rows)


def flowers(root: pathlib.Path, split: str) -> Source:
    """Flowers-102: jpg/image_NNNNN.jpg, imagelabels.mat, setid.mat; split train, val or test."""
    import scipy.io

    parts = {"train": "trnid", "val": "valid", "test": "tstid"}
    checks.choice("split", split, tuple(parts))
    root = items.find(root, "setid.mat").parent
    labels = scipy.io.loadmat(root / "imagelabels.mat")["labels"].ravel()
    numbers = scipy.io.loadmat(root / "setid.mat")[parts[split]].ravel().tolist()
    rows = ((f"image_{n:05d}.jpg", int(labels[n - 1]) - 1) for n in numbers)
    return _files("flowers", published_names("flowers"), root / "jpg", rows)


def aircraft(root: pathlib.Path, split: str) -> Source:
    """FGVC-Aircraft by variant: data/images/*.jpg, data/variants.txt, images_variant_SPLIT.txt."""
    data = items.find(root, "data/variants.txt", "variants.txt").parent
    variants = items.lines(data / "variants.txt")
    listed = items.lines(items.find(data, f"images_variant_{split}.txt"))
    named = (line.split(maxsplit=1) for line in listed)
    rows = ((f"{name}.jpg", variants.index(variant.strip())) for name, variant in named)
    return _files("fgvc_aircraft", variants, data / "images", rows)


def cifar10(root: pathlib.Path, split: str) -> Source:
    """CIFAR-10 in its Python version: cifar-10-batches-py."""
    names = {"test": ["test_batch"], "train": [f"data_batch_{n}" for n in range(1, 6)]}
    return _cifar(root, split, "cifar10", names, "batches.meta", b"label_names", b"labels")


def cifar100(root: pathlib.Path, split: str) -> Source:
    """CIFAR-100 in its Python version: cifar-100-python, fine labels."""
    names = {"test": ["test"], "train": ["train"]}
    return _cifar(root, split, "cifar100", names, "meta", b"fine_label_names", b"fine_labels")


def _cifar(
    root: pathlib.Path,
    split: str,
    prompts: str,
    batches: dict[str, list[str]],
    meta: str,
    names: bytes,
    labels: bytes,
) -> Source:
    checks.choice("split", split, tuple(batches))
    root = items.find(root, meta).parent

    def pictures() -> Iterator[Item]:
        for file in (root / name for name in batches[split]):
            batch = _unpickle(file)
            # Rows are planes of red, green and blue, 32 x 32 each.
            rows = batch[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            for n, label in enumerate(batch[labels]):
                pixels = functools.partial(items.from_array, np.ascontiguousarray(rows[n]))
                yield Item(f"{file.name}/{n}", pixels, str(int(label)), file)

    return source(prompts, [name.decode() for name in _unpickle(root / meta)[names]], pictures)


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
