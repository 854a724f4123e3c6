"""Where embeddings come from: the photographs of the repository, or files of the paper's own data.

A source is a collection of images (x), texts (y), or both, with what can be evaluated on it: a
gallery ("test") or class prompts ("classes"). Both `Photographs` and `Files` answer the same
questions; a reproduction stands on one of them and never mixes encoders.
"""

import itertools
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from experiments import photos, workdir
from sotalign_jax import checks, data, files

SUE_TEST = 400
SETS = ("Food101", "CIFAR10", "CIFAR100", "Aircraft", "DTD", "Flowers", "ImageNet", "Intel")
Spec = Mapping[str, Any]
"""Arguments of `dataset`."""


class Photographs:
    """COCO, Flickr8k and RSICD with their captions, texts of Flickr30k, and classification sets."""

    given: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    main = label = "COCO"
    flickr, satellite = "Flickr8k", "RSICD"
    stand_in = "COCO for CC3M and COCO, Flickr8k for Flickr30k, RSICD for SkyScript"
    collections = ("COCO", "Flickr8k", "RSICD", "Flickr30k")
    sue = (("COCO", 100, "COCO100"), ("Flickr8k", 500, "F30k500"))
    # Fewer features make a weaker encoder of the same samples.
    _images: ClassVar = {"EfficientNet": 1280, "EfficientNet/64": 64}
    _texts: ClassVar = {"MiniLM": 384, "MiniLM/64": 64, "MiniLM/16": 16}
    encoders = tuple(f"{x}+{y}" for x, y in itertools.product(_images, _texts))
    weak_encoders = ("EfficientNet/16+MiniLM", "EfficientNet/16+MiniLM/8", "EfficientNet+MiniLM/8")
    _sets: ClassVar = {"Flowers": "flowers102"}

    def has(self, name: str, part: str) -> bool:
        """Whether a source has "x", "y", both ("xy"), a "test" gallery or "classes"."""
        if part == "classes":
            return self._set(name) in photos.ZERO_SHOT
        if part == "x" or part == "y":
            known = photos.IMAGE_POOLS if part == "x" else photos.TEXT_POOLS
            return name.lower() in known
        return name.lower() in photos.CAPTIONED

    def stamps(self, spec: Spec) -> dict[str, Any]:
        """What a result depends on beside the names: nothing, for these files never change."""
        return {}

    def dataset(
        self,
        *,
        seed: int,
        n_pairs: int,
        n_unpaired: int | None,
        pairs: str = main,
        images: str | None = None,
        texts: str | None = None,
        test: str = main,
        noise: float = 0.0,
        encoders: str = encoders[0],
        split: str | None = None,
    ) -> data.Dataset:
        """Pairs and pools from the named sources.

        Args:
            seed: chooses rows.
            n_pairs: rows of the pairs.
            n_unpaired: rows of each pool; all when None.
            pairs: source of the pairs.
            images: source of unpaired images; None is that of the test gallery.
            texts: likewise for texts.
            test: source of the galleries.
            noise: share of the pools that becomes noise.
            encoders: IMAGE+TEXT.
            split: "sue" for the protocol of SUE on the pairs' source.
        """
        if split == "sue":
            return sue_split(*self._one_caption_each(pairs), n_pairs=n_pairs, seed=seed)
        made = photos.dataset(
            pairs.lower(),
            n_pairs=n_pairs,
            n_unpaired=n_unpaired,
            seed=seed,
            unpaired_images=(images or test).lower(),
            unpaired_texts=(texts or test).lower(),
            pool_noise=noise,
            evaluate_on=test.lower(),
        )
        return _narrowed(made, *map(_width, encoders.split("+")))

    def rows(self, name: str, side: str) -> Any:
        """All training rows of one modality."""
        if name == "Flickr30k":
            return photos.texts("flickr30k")
        train = photos.rows_of_split(name.lower(), "train")
        if side == "x":
            return photos.images(name.lower(), train)
        of_train = np.isin(photos.image_of_text(name.lower()), train)
        return photos.texts(name.lower(), np.flatnonzero(of_train))

    def gallery(self, name: str) -> data.Gallery:
        """The test split of a source."""
        return photos.gallery(name.lower())

    def classes(self, name: str, encoders: str) -> data.ZeroShot:
        """A classification set as the encoders see it."""
        task, (x, y) = photos.zero_shot(self._set(name)), map(_width, encoders.split("+"))
        return task._replace(x=task.x[:, :x], prompts=task.prompts[..., :y])

    def _set(self, name: str) -> str:
        return self._sets.get(name, name.lower())

    def _one_caption_each(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        owner, train = (
            photos.image_of_text(name.lower()),
            photos.rows_of_split(name.lower(), "train"),
        )
        first = np.searchsorted(owner, train)
        x, y = photos.images(name.lower(), train), photos.texts(name.lower(), first)
        return np.asarray(x), np.asarray(y)


def _width(encoder: str) -> int | None:
    """How many features "NAME/64" keeps; None is all."""
    _, _, width = encoder.partition("/")
    return int(width) if width else None


def _narrowed(made: data.Dataset, x: int | None, y: int | None) -> data.Dataset:
    """The leading features alone."""
    if x is None and y is None:
        return made

    def gallery(one: data.Gallery | None) -> data.Gallery | None:
        return None if one is None else one._replace(x=one.x[:, :x], y=one.y[:, :y])

    pools = np.asarray(made.pool_x)[:, :x], np.asarray(made.pool_y)[:, :y]
    pairs = made.pairs_x[:, :x], made.pairs_y[:, :y]
    return data.Dataset(*pairs, *pools, gallery(made.val), gallery(made.test))


def sue_split(
    x: np.ndarray, y: np.ndarray, *, n_pairs: int, seed: int, shuffle: bool = True
) -> data.Dataset:
    """SUE's split: 400 test rows, pairs, and pools that each lose their own tenth of the rest.

    Test rows and pairs are drawn anew by every seed, so that a spread over seeds is one over data.
    Without `shuffle` the table's order decides, as published: test rows first, pairs last.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(x)) if shuffle else np.arange(len(x))
    test, between, pairs = np.split(order, [SUE_TEST, len(x) - n_pairs])
    kept_x, kept_y = (rng.permutation(between)[len(between) // 10 :] for _ in range(2))
    gallery = data.gallery(x[test], y[test])
    return data.Dataset(x[pairs], y[pairs], x[np.sort(kept_x)], y[kept_y], test=gallery)


# --- the paper's own data ----------------------------------------------------------------------

_PAIRED = ("x", "y")
_TABLE = (*_PAIRED, "val_x", "val_y", "test_x", "test_y")
_GALLERY = ("test_x", "test_y", "test_x_of_y")
_CLASSES = ("zero_shot_x", "zero_shot_labels", "zero_shot_prompts")
FIELDS = dict.fromkeys((*_TABLE, *_GALLERY, *_CLASSES))
_ENCODERS = "IMAGE+TEXT"
KNOWN: dict[str, tuple[tuple[str, ...], str]] = {
    "main": (_TABLE, "CC3M rows and validation, COCO val2017 (and test_x_of_y: 25,000 captions)"),
    "Flickr30k": (_GALLERY, "Karpathy's 1,000 test images, 5,000 captions"),
    **dict.fromkeys(SETS[:-2], (_CLASSES, "test images, labels, prompts")),
    "ImageNet": (_CLASSES, "likewise; x for unpaired images"),
    **dict.fromkeys(("CC3M-synth", "CC12M", "COCO"), (_PAIRED, "pairs of another source")),
    "WikiText103": (("y",), "unpaired texts"),
    _ENCODERS: (_TABLE, "the rows of main by other encoders"),
    "COCO100": (_PAIRED, "one caption an image, in file order"),
    "F30k500": (_PAIRED, "likewise, of Flickr30k"),
    "Polyvore500": (_PAIRED, "likewise, the first 20,000 items of Polyvore"),
    "SkyScript": (_TABLE, "SkyScript, 10,000 test rows"),
    "SkyScript30k": (_TABLE, "SkyScript, 30,000 test rows"),
    "LibriSpeech": (_TABLE, "WavLM-Large, NV-Embed-v2 on transcripts"),
}
"""Sources that --files may name: the fields that each must have, and what they hold."""


class Files(Photographs):
    """Sources of a JSON file: {source: {field: path}}."""

    main, label = "main", "CC3M"
    flickr, satellite = "Flickr30k", "SkyScript"
    stand_in = ""

    def __init__(self, given: Mapping[str, Mapping[str, str]]) -> None:
        self.given = given
        pools = ("main", "CC3M-synth", "CC12M", "ImageNet", "COCO", "WikiText103")
        self.collections = tuple(name for name in pools if name in given)
        self.encoders = ("main", *(name for name in given if "+" in name))
        self.weak_encoders = ()
        tables = (("COCO100", 100), ("F30k500", 500), ("Polyvore500", 500))
        self.sue = tuple((name, n, name) for name, n in tables if name in given)

    @classmethod
    def read(cls, path: str | pathlib.Path) -> "Files":
        """Reads the JSON file of --files; relative paths start at its folder.

        Raises:
            InputError: a source or a field that is unknown or missing, or a file not there.
        """
        path = pathlib.Path(path).expanduser()
        given = workdir.read_json(path)
        if not isinstance(given, dict):
            raise checks.InputError(f"files: {path} must hold {{source: {{field: path}}}}")
        return cls({name: _checked(name, v, path.resolve().parent) for name, v in given.items()})

    def has(self, name: str, part: str) -> bool:
        fields = {"test": ("test_x",), "classes": ("zero_shot_x",)}.get(part, tuple(part))
        return name == "noise" or all(field in self.given.get(name, {}) for field in fields)

    def stamps(self, spec: Spec) -> dict[str, Any]:
        """Size and time of every file that is read: one that changes makes other cells."""
        names = {"main", *(value for value in spec.values() if value in self.given)}
        found: dict[str, Any] = {}
        for name, field in itertools.product(sorted(names & set(self.given)), FIELDS):
            if value := self.given[name].get(field):
                file = pathlib.Path(files.split_key(value)[0])
                stat = file.stat() if file.exists() else None
                found[value] = stat and [stat.st_size, stat.st_mtime_ns]
        return found

    def dataset(
        self,
        *,
        seed: int,
        n_pairs: int,
        n_unpaired: int | None,
        pairs: str = main,
        images: str | None = None,
        texts: str | None = None,
        test: str = main,
        noise: float = 0.0,
        encoders: str = main,
        split: str | None = None,
    ) -> data.Dataset:
        own = encoders if encoders != self.main else test
        if split == "sue":
            x, y = (self._load(pairs, side) for side in "xy")
            return sue_split(x, y, n_pairs=n_pairs, seed=seed, shuffle=False)
        paired = own if pairs == self.main else pairs
        pools = {}
        for side, source in (("x", images or own), ("y", texts or own)):
            if source == "noise":
                width = self._load(own, side).shape[1]
                rng = np.random.default_rng((seed, 7))
                pools[side] = rng.standard_normal((n_unpaired or 10_000, width), np.float32)
            elif source != paired:
                pools[side] = self._load(source, side)
        smallest = min((len(pool) for pool in pools.values()), default=None)
        if None not in (smallest, n_unpaired):
            n_unpaired = min(n_unpaired, smallest)  # type: ignore[type-var]
        return data.semi_supervised(
            self._load(paired, "x"),
            self._load(paired, "y"),
            n_pairs=n_pairs,
            n_unpaired=n_unpaired,
            seed=seed,
            unpaired_x=pools.get("x"),
            unpaired_y=pools.get("y"),
            pool_noise=noise,
            val=self.gallery(own, "val"),
            test=self.gallery(own),
        )

    def rows(self, name: str, side: str) -> Any:
        return self._load(name, side)

    def gallery(self, name: str, part: str = "test") -> data.Gallery:
        owner = self._load(name, f"{part}_x_of_y")
        return data.gallery(self._load(name, f"{part}_x"), self._load(name, f"{part}_y"), owner)

    def classes(self, name: str, encoders: str) -> data.ZeroShot:
        own = name if encoders == self.main else encoders
        return data.zero_shot(*(self._load(own, field) for field in _CLASSES))

    def _load(self, name: str, field: str) -> Any:
        value = self.given.get(name, {}).get(field)
        return None if value is None else files.load_array(value)


def _checked(name: str, fields: Any, here: pathlib.Path) -> dict[str, str]:
    kind = _ENCODERS if "+" in name and name != _ENCODERS else name
    if kind not in KNOWN or name == _ENCODERS:
        raise checks.InputError(f"files: unknown source {name!r}; choose from {', '.join(KNOWN)}")
    if not isinstance(fields, dict) or not fields:
        raise checks.InputError(f"files: {name}: must be paths by field, got {fields!r}")
    paths = {}
    for field, value in fields.items():
        checks.choice(f"files: {name}", field, tuple(FIELDS))
        if not isinstance(value, str):
            raise checks.InputError(f"files: {name}: {field}: must be a path, got {value!r}")
        remote = value.startswith("tfds:")
        paths[field] = value if remote else str(here / pathlib.Path(value).expanduser())
        if not remote and not pathlib.Path(files.split_key(paths[field])[0]).is_file():
            raise checks.InputError(f"files: {name}: {field}: {paths[field]}: no such file")
    wanted = [field for field in KNOWN[kind][0] if field != "test_x_of_y"]
    if absent := [field for field in wanted if field not in fields]:
        raise checks.InputError(f"files: {name}: {absent[0]}: is not set; pass its path")
    return paths
