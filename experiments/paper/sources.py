"""Where embeddings come from: the photographs of the repository, or files of the paper's own data.

A source is a collection of images (x), texts (y), or both, with what can be evaluated on it: a
gallery ("test") or class prompts ("classes"). `Photographs` and `Files` answer the same questions;
a reproduction stands on one of them and never mixes encoders.
"""

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from experiments import photos, workdir
from sotalign_jax import checks, data, files

MAIN = "main"
NEAR, FAR, AS_RANDOM = 2 / 3, 0.95, "AS FAR AS RANDOM"


def place(share: float) -> str:
    """How far unpaired rows are, by their `share` of the way from the pairs to random directions.

    >>> place(0.5), place(0.8), place(1.5)
    ('NEAR', 'FAR', 'AS FAR AS RANDOM')
    """
    return "NEAR" if share < NEAR else "FAR" if share < FAR else AS_RANDOM


class Data(NamedTuple):
    """Which pairs, pools and galleries a run has; "main" is the source of most runs."""

    seed: int  # chooses rows
    n_pairs: int
    n_unpaired: int | None  # rows of each pool; all when None
    pairs: str = MAIN  # source of the pairs
    images: str | None = None  # source of unpaired ones, or "noise"; None is that of the test
    texts: str | None = None  # likewise
    test: str = MAIN  # source of the galleries
    noise: float = 0.0  # share of the pools that becomes noise
    encoders: str = MAIN  # or IMAGE+TEXT
    split: str | None = None  # "sue" for the protocol of SUE on the pairs' source


def sue_split(x: Any, y: Any, asked: Data, *, shuffle: bool) -> data.Dataset:
    """Pairs, pools and test rows of SUE's protocol, see `data.sue_rows`."""
    test, rows = data.sue_rows(len(x), n_pairs=asked.n_pairs, seed=asked.seed, shuffle=shuffle)
    gallery = data.gallery(x[test], y[test])
    return data.Dataset(x[rows.pairs], y[rows.pairs], x[rows.x], y[rows.y], test=gallery)


# --- photographs -------------------------------------------------------------------------------


class Photographs:
    """COCO, Flickr8k and RSICD with their captions, texts of Flickr30k, and classification sets."""

    given: Mapping[str, Mapping[str, str]] = {}  # files by source and field
    label = "COCO"  # what tables call the main source
    stand_in = "COCO for CC3M and COCO, Flickr8k for Flickr30k, RSICD for SkyScript"
    flickr, satellite = "Flickr8k", "RSICD"
    collections: tuple[str, ...] = (MAIN, "Flickr8k", "RSICD", "Flickr30k")  # of pairs and pools
    # Source, pairs and the paper's name of the protocol of SUE.
    sue: tuple[tuple[str, int, str], ...] = ((MAIN, 100, "COCO100"), ("Flickr8k", 500, "F30k500"))
    # That of the main source first. EfficientNet/64 is the first 64 of its features: a weaker view
    # that stands in for another encoder.
    encoders: tuple[str, ...] = tuple(
        f"{image}+{text}"
        for image in ("EfficientNet", "EfficientNet/64")
        for text in photos.TEXT_ENCODERS
    )
    weak_encoders: tuple[str, ...] = (  # for the correlation alone
        "EfficientNet/16+MiniLM",
        "EfficientNet/16+WordLlama",
        "EfficientNet+MiniLM/16",
    )

    def has(self, name: str, part: str) -> bool:
        """Whether a source has "x", "y", both ("xy"), a "test" gallery or "classes"."""
        known = {"x": photos.IMAGE_POOLS, "y": photos.TEXT_POOLS, "classes": photos.ZERO_SHOT}
        return _photos(name) in known.get(part, photos.CAPTIONED)

    def stamps(self, names: Iterable[Any]) -> dict[str, Any]:
        """What results depend on beside the names of the sources."""
        return {}

    def dataset(self, asked: Data) -> data.Dataset:
        """Pairs, pools and galleries."""
        name, test = _photos(asked.pairs), _photos(asked.test)
        if asked.split == "sue":
            train = photos.rows_of_split(name, "train")
            first = np.searchsorted(photos.image_of_text(name), train)  # one caption an image
            x, y = photos.images(name, train), photos.texts(name, first)
            return sue_split(np.asarray(x), np.asarray(y), asked, shuffle=True)
        made = photos.dataset(
            name,
            n_pairs=asked.n_pairs,
            n_unpaired=asked.n_unpaired,
            seed=asked.seed,
            unpaired_images=test if asked.images is None else _photos(asked.images),
            unpaired_texts=test if asked.texts is None else _photos(asked.texts),
            pool_noise=asked.noise,
            evaluate_on=test,
            text_encoder=_views(asked.encoders)[1],
        )
        if asked.encoders == MAIN:
            return made
        d_x, _, d_y = _views(asked.encoders)
        pools = np.asarray(made.pool_x)[:, :d_x], np.asarray(made.pool_y)[:, :d_y]
        pairs = made.pairs_x[:, :d_x], made.pairs_y[:, :d_y]
        val, held_out = (
            g and g._replace(x=g.x[:, :d_x], y=g.y[:, :d_y]) for g in (made.val, made.test)
        )
        return data.Dataset(*pairs, *pools, val, held_out)

    def rows(self, name: str, side: str) -> Any:
        """All training rows of one modality."""
        name = _photos(name)
        if name not in photos.CAPTIONED:
            return photos.texts(name)
        train = photos.rows_of_split(name, "train")
        if side == "x":
            return photos.images(name, train)
        return photos.texts(name, np.flatnonzero(np.isin(photos.image_of_text(name), train)))

    def gallery(self, name: str) -> data.Gallery:
        """The test split of a source."""
        return photos.gallery(_photos(name))

    def classes(self, name: str, encoders: str) -> data.ZeroShot:
        """A classification set as the encoders see it."""
        d_x, texts, d_y = _views(encoders)
        task = photos.zero_shot(_photos(name), texts)
        return task._replace(x=task.x[:, :d_x], prompts=task.prompts[..., :d_y])


def _photos(name: str) -> str:
    """What `photos` calls a source."""
    return {MAIN: "coco", "Flowers": "flowers102"}.get(name, name.lower())


def _views(encoders: str) -> tuple[int | None, str, int | None]:
    """Features of images, the text encoder, and its features, of IMAGE/64+TEXT/16; None is all."""
    if encoders == MAIN:
        return None, photos.TEXT_ENCODERS[0], None
    (_, _, image), (text, _, kept) = (part.partition("/") for part in encoders.split("+"))
    return int(image) if image else None, text, int(kept) if kept else None


# --- the paper's own data ----------------------------------------------------------------------

_PAIRED = ("x", "y")
_TABLE = (*_PAIRED, "val_x", "val_y", "test_x", "test_y")
_CLASSES = ("zero_shot_x", "zero_shot_labels", "zero_shot_prompts")
FIELDS = (*_TABLE, "test_x_of_y", *_CLASSES)
KNOWN: dict[str, tuple[tuple[str, ...], str]] = {
    MAIN: (_TABLE, "CC3M rows and validation, COCO val2017 (test_x_of_y: 25,000)"),
    "Flickr30k": (_TABLE[-2:], "Karpathy's 1,000 test images, 5,000 captions (and test_x_of_y)"),
    "ImageNet": (_CLASSES, "test images, labels, prompts (and x for unpaired images)"),
    "Food101": (_CLASSES, "test images, labels, prompts"),
    "CIFAR10": (_CLASSES, "likewise"),
    "CIFAR100": (_CLASSES, "likewise"),
    "Aircraft": (_CLASSES, "likewise"),
    "DTD": (_CLASSES, "likewise"),
    "Flowers": (_CLASSES, "likewise"),
    "CC3M-synth": (_PAIRED, "pairs"),
    "CC12M": (_PAIRED, "pairs"),
    "COCO": (_PAIRED, "pairs"),
    "WikiText103": (("y",), "unpaired texts"),
    "IMAGE+TEXT": (_TABLE, "the rows of main by other encoders"),
    "COCO100": (_PAIRED, "one caption an image, in file order"),
    "F30k500": (_PAIRED, "likewise, of Flickr30k"),
    "Polyvore500": (_PAIRED, "likewise, the first 20,000 items of Polyvore"),
    "SkyScript": (_TABLE, "SkyScript, 10,000 test rows"),
    "SkyScript30k": (_TABLE, "SkyScript, 30,000 test rows"),
    "LibriSpeech": (_TABLE, "WavLM-Large, NV-Embed-v2 on transcripts"),
}
"""Sources that --files may name: the fields that each must have, and what they hold."""


class Files:
    """Sources of a JSON file, {source: {field: path}}; they answer as `Photographs` does."""

    label, stand_in = "CC3M", ""
    flickr, satellite = "Flickr30k", "SkyScript"
    weak_encoders: tuple[str, ...] = ()

    def __init__(self, given: Mapping[str, Mapping[str, str]]) -> None:
        self.given = given
        pools = (MAIN, "CC3M-synth", "CC12M", "ImageNet", "COCO", "WikiText103")
        self.collections = tuple(name for name in pools if name in given)
        self.encoders = ("DINOv3+NV-Embed-v2", *(name for name in given if "+" in name))
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
        wanted = {"test": ("test_x",), "classes": ("zero_shot_x",)}.get(part, tuple(part))
        return name == "noise" or set(wanted) <= set(self.given.get(name, {}))

    def stamps(self, names: Iterable[Any]) -> dict[str, Any]:
        """Size and time of every file that is read: one that changes makes other cells."""
        found: dict[str, Any] = {}
        for name in sorted({MAIN, *map(str, names)} & set(self.given)):
            for path in self.given[name].values():
                file = pathlib.Path(files.split_key(path)[0])
                if file.exists():  # not a tfds: name
                    found[path] = [file.stat().st_size, file.stat().st_mtime_ns]
        return found

    def dataset(self, asked: Data) -> data.Dataset:
        own = asked.test if asked.encoders == MAIN else asked.encoders
        pairs = own if asked.pairs == MAIN else asked.pairs
        x, y = (self.rows(pairs, side) for side in "xy")
        if asked.split == "sue":
            return sue_split(x, y, asked, shuffle=False)
        pools: dict[str, Any] = {"x": None, "y": None}
        for side, source in (("x", asked.images or own), ("y", asked.texts or own)):
            if source == "noise":
                shape = asked.n_unpaired or 10_000, self.rows(own, side).shape[1]
                pools[side] = np.random.default_rng((asked.seed, 7)).standard_normal(shape, "f4")
            elif source != pairs:
                pools[side] = self.rows(source, side)
        sizes = [len(pool) for pool in pools.values() if pool is not None]
        return data.semi_supervised(
            x,
            y,
            n_pairs=asked.n_pairs,
            n_unpaired=asked.n_unpaired and min(asked.n_unpaired, *sizes, len(x) - asked.n_pairs),
            seed=asked.seed,
            unpaired_x=pools["x"],
            unpaired_y=pools["y"],
            pool_noise=asked.noise,
            val=self.gallery(own, "val"),
            test=self.gallery(own),
        )

    def rows(self, name: str, side: str) -> Any:
        path = self.given.get(name, {}).get(side)
        return None if path is None else files.load_array(path)

    def gallery(self, name: str, split: str = "test") -> data.Gallery:
        return data.gallery(*(self.rows(name, f"{split}_{part}") for part in ("x", "y", "x_of_y")))

    def classes(self, name: str, encoders: str) -> data.ZeroShot:
        own = name if encoders == MAIN else encoders
        return data.zero_shot(*(self.rows(own, field) for field in _CLASSES))


def _checked(name: str, fields: Any, here: pathlib.Path) -> dict[str, str]:
    kind = "IMAGE+TEXT" if "+" in name else name
    checks.choice("files", kind, tuple(KNOWN))
    if not isinstance(fields, dict) or not all(isinstance(v, str) for v in fields.values()):
        raise checks.InputError(f"files: {name}: must be paths by field, got {fields!r}")
    paths = {}
    for field, value in fields.items():
        checks.choice(f"files: {name}", field, FIELDS)
        remote = value.startswith("tfds:")
        paths[field] = value if remote else str(here / pathlib.Path(value).expanduser())
        if not remote and not pathlib.Path(files.split_key(paths[field])[0]).is_file():
            raise checks.InputError(f"files: {name}: {field}: {paths[field]}: no such file")
    if absent := [field for field in KNOWN[kind][0] if field not in fields]:
        raise checks.InputError(f"files: {name}: {absent[0]}: is not set; pass its path")
    return paths


Sources = Photographs | Files
