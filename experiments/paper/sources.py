"""Sources of embeddings: the repository's photographs, or files of the paper's own data.

A source has images (x), texts (y), or both. It may also have a gallery ("test") or class prompts
("classes") to evaluate on. `Photographs` and `Files` have the same methods. A reproduction reads
only one of them, so that encoders are never mixed.
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments import photos, store
from sotalign_jax import checks, data, files, storage

MAIN = "main"
# Bounds of the shares in `nearness`. docs/results/V3.md tests them on twelve pools.
NEAR, FAR, AS_RANDOM = 2 / 3, 0.95, "AS FAR AS RANDOM"


def nearness(share: float) -> str:
    """Returns the distance of a pool in words.

    Args:
        share: Distance from the pairs, relative to that of random directions.

    >>> nearness(0.5), nearness(0.8), nearness(1.5)
    ('NEAR', 'FAR', 'AS FAR AS RANDOM')
    """
    return "NEAR" if share < NEAR else "FAR" if share < FAR else AS_RANDOM


@dataclasses.dataclass(frozen=True)
class Names:
    """Names of sources in the tables. An empty name leaves its panels out."""

    label: str  # of the main source
    stand_in: str  # the paper's data that each source replaces
    flickr: str
    satellite: str
    speech: str
    speech_transfer: str  # test rows of another source, for models trained on `speech`
    collections: Sequence[str]  # sources of pairs and unpaired data
    sue: Sequence[tuple[str, int, str]]  # source, pairs and the paper's name in the protocol of SUE
    encoders: Sequence[str]  # pairs of encoders, those of the main source first
    weak_encoders: Sequence[str] = ()  # further encoders in F7


PHOTOGRAPHS = Names(
    label="COCO",
    stand_in=(
        "COCO for CC3M and COCO, Flickr8k for Flickr30k, RSICD for SkyScript, "
        "Common Voice for LibriSpeech"
    ),
    flickr="Flickr8k",
    satellite="RSICD",
    speech="Common Voice",
    speech_transfer="LibriSpeech",
    collections=(MAIN, "Flickr8k", "RSICD", "Flickr30k"),
    sue=((MAIN, 100, "COCO100"), ("Flickr8k", 500, "F30k500")),
    # EfficientNet/64 is its first 64 features. It stands in for a weaker encoder.
    encoders=(
        "EfficientNet+MiniLM",
        "EfficientNet+WordLlama",
        "EfficientNet+words",
        "EfficientNet/64+MiniLM",
        "EfficientNet/64+WordLlama",
        "EfficientNet/64+words",
    ),
    weak_encoders=(
        "EfficientNet/16+MiniLM",
        "EfficientNet/16+WordLlama",
        "EfficientNet+MiniLM/16",
    ),
)
"""Names of the repository's data."""
PAPERS = Names(
    label="CC3M",
    stand_in="",
    flickr="Flickr30k",
    satellite="SkyScript",
    speech="LibriSpeech",
    speech_transfer="",
    collections=(MAIN, "CC3M-synth", "CC12M", "ImageNet", "COCO", "WikiText103"),
    sue=(
        ("COCO100", 100, "COCO100"),
        ("F30k500", 500, "F30k500"),
        ("Polyvore500", 500, "Polyvore500"),
    ),
    encoders=("DINOv3+NV-Embed-v2",),
)
"""Names of the paper's own data in --files. Sources named IMAGE+TEXT are further encoders."""

_PAIRED = ("x", "y")
_SPLIT = ("x", "y", "val_x", "val_y", "test_x", "test_y")
_CLASSES = ("zero_shot_x", "zero_shot_labels", "zero_shot_prompts")
KNOWN: Mapping[str, tuple[Sequence[str], str]] = {
    MAIN: (_SPLIT, "CC3M rows and validation, COCO val2017 (test_x_of_y: 25,000)"),
    "Flickr30k": (
        ("test_x", "test_y"),
        "Karpathy's 1,000 test images, 5,000 captions (and test_x_of_y)",
    ),
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
    "IMAGE+TEXT": ((*_SPLIT, *_CLASSES), "the rows of main and ImageNet by other encoders"),
    "COCO100": (_PAIRED, "one caption an image, in file order"),
    "F30k500": (_PAIRED, "likewise, of Flickr30k"),
    "Polyvore500": (_PAIRED, "likewise, the first 20,000 items of Polyvore"),
    "SkyScript": (_SPLIT, "SkyScript, 10,000 test rows"),
    "SkyScript30k": (_SPLIT, "SkyScript, 30,000 test rows"),
    "LibriSpeech": (_SPLIT, "WavLM-Large, NV-Embed-v2 on transcripts"),
}
"""Sources that --files may name: their required fields, and a description."""
FIELDS = (*_SPLIT, "test_x_of_y", *_CLASSES)


class Data(NamedTuple):
    """Description of the pairs, pools and galleries of a run. "main" is the default source."""

    seed: int  # of the random choice of rows
    n_pairs: int
    n_unpaired: int | None  # rows of each pool, None for all
    pairs: str = MAIN  # source of the pairs
    images: str | None = None  # source of unpaired images, or "noise"; None for that of the test
    texts: str | None = None  # source of unpaired texts, or "noise"; None for that of the test
    test: str = MAIN  # source of the galleries
    noise: float = 0.0  # fraction of the pools that is replaced by noise
    encoders: str = MAIN  # or IMAGE+TEXT
    split: str | None = None  # "sue" for the protocol of SUE


_SUE_TEST = 400
"""Number of test rows in the protocol of SUE."""


def _sue_rows(
    n_rows: int, *, n_pairs: int, seed: int = 0, shuffle: bool = False
) -> tuple[np.ndarray, data.Rows]:
    """Splits a table by the protocol of SUE.

    The first 400 rows are the test and the last `n_pairs` rows are the pairs, as published. The
    other rows are the pools, except for a random tenth that is removed from each pool.

    Args:
        n_rows: Number of rows of the table.
        n_pairs: Number of pairs.
        seed: Seed of the random choice.
        shuffle: Shuffle the table first, so that results over seeds vary with the data.

    Returns:
        The test rows, and the rows of pairs and pools.

    Raises:
        InputError: Fewer than two rows are left for the pools.

    References:
        Yacobi et al., Learning Shared Representations from Unpaired Data, 2025.

    >>> test, rows = _sue_rows(600, n_pairs=100)
    >>> len(test), rows.pairs[:3].tolist(), len(rows.x), len(rows.y)
    (400, [500, 501, 502], 90, 90)
    """
    if n_rows - _SUE_TEST - n_pairs < 2:
        raise checks.InputError(
            f"n_pairs must be at most {n_rows - _SUE_TEST - 2}, got {n_pairs}: the table has "
            f"{n_rows} rows, of which {_SUE_TEST} are tests and 2 must be left unpaired"
        )
    rng = np.random.default_rng(seed)
    order = rng.permutation(n_rows) if shuffle else np.arange(n_rows)
    test, rest, pairs = np.split(order, [_SUE_TEST, n_rows - n_pairs])
    x, y = (rng.permutation(rest)[len(rest) // 10 :] for _ in range(2))
    return test, data.Rows(pairs, np.sort(x), y)


def sue_split(x: Any, y: Any, asked: Data, *, shuffle: bool) -> data.Dataset:
    """Returns pairs, pools and a test gallery by the protocol of SUE.

    Args:
        x: Images, one row per pair.
        y: Texts of the same rows.
        asked: Number of pairs and seed.
        shuffle: Shuffle the rows first, so that results over seeds vary with the data.
    """
    test, rows = _sue_rows(len(x), n_pairs=asked.n_pairs, seed=asked.seed, shuffle=shuffle)
    gallery = data.gallery(x[test], y[test])
    return data.Dataset(x[rows.pairs], y[rows.pairs], x[rows.x], y[rows.y], test=gallery)


# --- photographs -------------------------------------------------------------------------------


class Photographs:
    """Sources of the repository: captioned photographs, texts and classification sets."""

    names = PHOTOGRAPHS
    given: Mapping[str, Mapping[str, str]] = {}  # files by source and field

    def has(self, name: str, part: str) -> bool:
        """Returns True if a source has a part: "x", "y", "xy" (both), "test" or "classes"."""
        known = {"x": photos.IMAGE_POOLS, "y": photos.TEXT_POOLS, "xy": photos.CAPTIONED}
        known |= {"test": photos.GALLERIES, "classes": tuple(photos.ZERO_SHOT)}
        return _photos(name) in known[part]

    def inputs(self, names: Iterable[Any]) -> dict[str, str]:
        """Returns fingerprints of the files of sources. Names that are no sources are ignored."""
        known = [n for n in names if n in (*self.names.collections, self.names.speech)]
        return photos.fingerprints(*map(_photos, known))

    def dataset(self, asked: Data) -> data.Dataset:
        """Returns the pairs, pools and galleries that are asked for."""
        name, test = _photos(asked.pairs), _photos(asked.test)
        if asked.split == "sue":
            train = photos.rows_of_split(name, "train")
            first = np.searchsorted(photos.image_of_text(name), train)  # one caption an image
            x, y = photos.images(name, train), photos.texts(name, first)
            return sue_split(np.asarray(x), np.asarray(y), asked, shuffle=True)
        d_x, text_encoder, d_y = _views(asked.encoders)
        options: dict[str, Any] = {name: getattr(asked, name) for name in ("n_pairs", "n_unpaired")}
        options |= {"seed": asked.seed, "pool_noise": asked.noise, "evaluate_on": test}
        options["unpaired_images"] = _photos(asked.images or asked.test)
        options["unpaired_texts"] = _photos(asked.texts or asked.test)
        made = photos.dataset(name, text_encoder=text_encoder, **options)
        if asked.encoders == MAIN:
            return made
        # An encoder such as IMAGE/64 consists of the first 64 features.
        pools = np.asarray(made.pool_x)[:, :d_x], np.asarray(made.pool_y)[:, :d_y]
        pairs = made.pairs_x[:, :d_x], made.pairs_y[:, :d_y]
        val, held_out = (
            g and g._replace(x=g.x[:, :d_x], y=g.y[:, :d_y]) for g in (made.val, made.test)
        )
        return data.Dataset(*pairs, *pools, val, held_out)

    def rows(self, name: str, side: str) -> Any:
        """Returns the training rows of one side, "x" or "y"."""
        name = _photos(name)
        if name not in photos.CAPTIONED:
            return photos.texts(name)
        train = photos.rows_of_split(name, "train")
        if side == "x":
            return photos.images(name, train)
        return photos.texts(name, np.flatnonzero(np.isin(photos.image_of_text(name), train)))

    def input_dimensions(self, name: str) -> int:
        """Returns the number of independent features of both modalities together."""
        return photos.input_dimensions(_photos(name))

    def gallery(self, name: str) -> data.Gallery:
        """Returns the test gallery of a source."""
        return photos.gallery(_photos(name))

    def classes(self, name: str, encoders: str) -> data.ZeroShot:
        """Returns a classification set, embedded by some encoders."""
        d_x, texts, d_y = _views(encoders)
        task = photos.zero_shot(_photos(name), texts)
        return task._replace(x=task.x[:, :d_x], prompts=task.prompts[..., :d_y])


def _photos(name: str) -> str:
    """Returns the name of a source in `photos`."""
    named = {MAIN: "coco", "Flowers": "flowers102", "Common Voice": "speech"}
    return named.get(name, name.lower())


def _views(encoders: str) -> tuple[int | None, str, int | None]:
    """Returns image width, text encoder and text width of IMAGE/64+TEXT/16. None keeps all."""
    if encoders == MAIN:
        return None, photos.TEXT_ENCODERS[0], None
    (_, _, image), (text, _, kept) = (part.partition("/") for part in encoders.split("+"))
    return int(image) if image else None, text, int(kept) if kept else None


# --- the paper's own data ----------------------------------------------------------------------


class Files:
    """Sources listed in a JSON file, {source: {field: path}}. Has the methods of `Photographs`."""

    def __init__(self, given: Mapping[str, Mapping[str, str]]) -> None:
        self.given = given
        self.names = dataclasses.replace(
            PAPERS,
            collections=[name for name in PAPERS.collections if name in given],
            sue=[one for one in PAPERS.sue if one[0] in given],
            encoders=[*PAPERS.encoders, *(name for name in given if "+" in name)],
        )

    @classmethod
    def read(cls, path: str | pathlib.Path) -> "Files":
        """Reads the JSON file of --files. Relative paths start at its folder.

        Raises:
            InputError: A source or a field is unknown or missing, or a file does not exist.
        """
        path = pathlib.Path(path).expanduser()
        given = storage.read_json(path)
        if not isinstance(given, dict):
            raise checks.InputError(f"files: {path} must hold {{source: {{field: path}}}}")
        return cls({name: _checked(name, v, path.resolve().parent) for name, v in given.items()})

    def has(self, name: str, part: str) -> bool:
        wanted = {"test": ("test_x",), "classes": ("zero_shot_x",)}.get(part, tuple(part))
        return name == "noise" or set(wanted) <= set(self.given.get(name, {}))

    def inputs(self, names: Iterable[Any]) -> dict[str, str]:
        found = {}
        for name in sorted(set(names) & set(self.given), key=str):
            for field, path in self.given[name].items():
                file, key = files.split_key(path)
                known = path if path.startswith("tfds:") else store.fingerprint(file)
                found[f"{name}.{field}"] = known if key is None else f"{known}#{key}"
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
        # Pools of different sizes are cut to the smallest one.
        sizes = [len(pool) for pool in pools.values() if pool is not None]
        n = asked.n_unpaired
        return data.semi_supervised(
            x,
            y,
            n_pairs=asked.n_pairs,
            seed=asked.seed,
            n_unpaired=n and min(n, *sizes, len(x) - asked.n_pairs),
            unpaired_x=pools["x"],
            unpaired_y=pools["y"],
            pool_noise=asked.noise,
            val=self.gallery(own, "val"),
            test=self.gallery(own),
        )

    def rows(self, name: str, side: str) -> Any:
        path = self.given.get(name, {}).get(side)
        return None if path is None else files.load_array(path)

    def input_dimensions(self, name: str) -> int:
        return self.rows(name, "x").shape[1] + self.rows(name, "y").shape[1]

    def gallery(self, name: str, split: str = "test") -> data.Gallery:
        return data.gallery(*(self.rows(name, f"{split}_{part}") for part in ("x", "y", "x_of_y")))

    def classes(self, name: str, encoders: str) -> data.ZeroShot:
        own = name if encoders == MAIN else encoders
        return data.zero_shot(*(self.rows(own, field) for field in _CLASSES))


def _checked(name: str, fields: Any, here: pathlib.Path) -> dict[str, str]:
    """Checks the fields of a source and returns their absolute paths."""
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
