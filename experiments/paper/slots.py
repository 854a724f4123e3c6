"""Files of embeddings that tables and figures can be made of, by what they hold."""

import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from experiments import workdir
from sotalign_jax import checks, files


class Slot(NamedTuple):
    """Files that belong together, by field, what they hold, and what may be missing."""

    fields: tuple[str, ...]
    holds: str
    optional: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{', '.join(self.fields)}: {self.holds}"


_TABLE = ("x", "y", "val_x", "val_y", "test_x", "test_y")
_CLASSES = ("zero_shot_x", "zero_shot_labels", "zero_shot_prompts")
_MAIN = (*_TABLE, "test_x_of_y", *_CLASSES)
_OPTIONAL = ("test_x_of_y", *_CLASSES)
_ANY = ("NAME", "IMAGE+TEXT")
"""What stands for any name in a slot's."""
_SETS = {
    "Food101": "25,250 test images",
    "CIFAR10": "10,000 test images",
    "CIFAR100": "10,000 test images",
    "Aircraft": "3,333 test images, 100 variants",
    "DTD": "1,880 test images, split 1",
    "Flowers": "6,149 test images",
}
SLOTS = {
    "main": Slot(
        _MAIN,
        "CC3M training rows and validation split, COCO val2017 (5,000 images, 25,000 captions), "
        "ImageNet-1k with prompts; DINOv3 ViT-L and NV-Embed-v2",
        _OPTIONAL,
    ),
    "evaluation/flickr30k": Slot(
        ("test_x", "test_y", "test_x_of_y"),
        "Karpathy's 1,000 test images, 5,000 captions",
        _OPTIONAL,
    ),
    **{f"evaluation/{name}": Slot(_CLASSES, holds) for name, holds in _SETS.items()},
    "pairs/NAME": Slot(("x", "y"), "pairs of another source: CC3M-synth, CC12M, COCO"),
    "unpaired/NAME": Slot(
        ("x", "y"),
        "unpaired images (x), texts (y) or both of a source: CC3M-synth, CC12M, ImageNet, COCO, "
        "WikiText103",
        ("x", "y"),
    ),
    "encoders/IMAGE+TEXT": Slot(
        _MAIN, "the same rows as main by another pair of encoders", _OPTIONAL
    ),
    "sue/COCO100": Slot(("x", "y"), "one caption an image, in file order: 400 test rows first"),
    "sue/F30k500": Slot(("x", "y"), "likewise, of Flickr30k"),
    "sue/Polyvore500": Slot(("x", "y"), "likewise, the first 20,000 items of Polyvore"),
    "skyscript": Slot(_TABLE, "SkyScript, 10,000 test rows; DINOv3 ViT-L and NV-Embed-v2"),
    "skyscript30k": Slot(_TABLE, "SkyScript, 30,000 test rows"),
    "librispeech": Slot(_TABLE, "LibriSpeech: WavLM-Large and NV-Embed-v2 on transcripts"),
}
"""Names that a file of --files may hold."""
UNPAIRED = ("CC3M-synth", "CC12M", "ImageNet", "COCO", "WikiText103")
"""Sources of unpaired rows that the paper names."""


def stamps(paths: Iterable[str]) -> dict[str, list[int]]:
    """Size and time of each file: one that changes makes other cells."""
    found = {}
    for path in paths:
        file = pathlib.Path(files.split_key(path)[0])
        if file.exists():
            stat = file.stat()
            found[path] = [stat.st_size, stat.st_mtime_ns]
    return found


def slot_of(name: str) -> str | None:
    """Which of `SLOTS` a given name is of, if any.

    >>> slot_of("pairs/CC12M"), slot_of("skyscript"), slot_of("pears/CC12M")
    ('pairs/NAME', 'skyscript', None)
    """
    kind, _, own = name.partition("/")
    for known in SLOTS:
        if known.endswith(_ANY) and known.partition("/")[0] == kind and own not in ("", *_ANY):
            return known
    return name if name in SLOTS and not name.endswith(_ANY) else None


def read(path: str | pathlib.Path) -> dict[str, dict[str, str]]:
    """The JSON file of --files: {slot: {field: path}}; relative paths start at its folder.

    Raises:
        InputError: a slot or a field that is unknown or missing, or a file that is not there.
    """
    path = pathlib.Path(path).expanduser()
    given = workdir.read_json(path)
    if not isinstance(given, dict):
        raise checks.InputError(f"files: {path} holds no object; pass {{slot: {{field: path}}}}")
    return {slot: _read_slot(slot, fields, path.resolve().parent) for slot, fields in given.items()}


def _read_slot(slot: str, fields: Any, here: pathlib.Path) -> dict[str, str]:
    known = slot_of(slot)
    if known is None:
        raise checks.InputError(f"files: {slot!r} is unknown; choose of {', '.join(SLOTS)}")
    if known == "unpaired/NAME":
        checks.choice("files: unpaired", slot.partition("/")[2], UNPAIRED)
    if not isinstance(fields, dict) or not fields:
        raise checks.InputError(f"files: {slot} is {fields!r}; pass paths by field")
    for field, value in fields.items():
        checks.choice(f"files: {slot}", field, SLOTS[known].fields)
        if not isinstance(value, str):
            raise checks.InputError(f"files: {slot}: {field} is {value!r}; pass a path")
    for field in SLOTS[known].fields:
        if field not in fields and field not in SLOTS[known].optional:
            raise checks.InputError(f"files: {slot}: {field} is not set; pass its path")
    paths = {}
    for field, value in fields.items():
        paths[field] = value
        if not value.startswith("tfds:"):
            file = here / pathlib.Path(value).expanduser()
            paths[field] = str(file)
            if not pathlib.Path(files.split_key(file)[0]).is_file():
                raise checks.InputError(f"files: {slot}: {field}: {file}: no such file")
    return paths
