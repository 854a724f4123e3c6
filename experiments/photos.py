"""Real photographs with human captions: pairs, unpaired pools, galleries and class prompts.

    python -m experiments.photos     # checks every file of experiments/data and counts its rows

Embeddings are kept as 8-bit codes and restored to float32 features for the rows that are read:
pools are lazy, pairs and galleries are arrays. `data/README.md` says what the files hold.
"""

import functools
import hashlib
import importlib.resources
import io
import pathlib
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from sotalign_jax import checks, data, files

FOLDER = pathlib.Path(__file__).parent / "data"
CAPTIONED = ("coco", "flickr8k", "rsicd")
"""Collections of images with captions: what pairs and galleries come from."""
ZERO_SHOT = {
    "imagenet": "zs_imagenet_val5k",
    "cifar10": "zs_cifar10",
    "cifar100": "zs_cifar100",
    "food101": "zs_food101_64px",
    "flowers102": "zs_flowers102",
    "intel": "zs_intel6",
}
"""Classification sets, and their files."""
IMAGE_POOLS = (*CAPTIONED, *ZERO_SHOT, "noise")
"""Where unpaired images may come from."""
TEXT_POOLS = (*CAPTIONED, "flickr30k", "noise")
"""Where unpaired texts may come from."""
POOLS = ("disjoint", "random")
TEXT_ENCODERS = ("MiniLM", "WordLlama", "words")
"""What makes features of texts; the last two read COCO's captions and class prompts when asked."""
_IMAGE_FILES = {
    **{name: name for name in CAPTIONED},
    "coco_unpaired": "coco_unpaired_images",
    **ZERO_SHOT,
}
_SPLITS = {"train": 0, "val": 1, "test": 2}
_VAL_IMAGES = 500  # held out of a train split that comes without a validation split


# --- files and features -------------------------------------------------------------------------


def checksums(folder: pathlib.Path = FOLDER) -> dict[str, str]:
    """SHA-256 of every file in the folder, as its SHA256SUMS says."""
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    return {name: digest for digest, name in map(str.split, lines)}


def read(name: str, folder: pathlib.Path = FOLDER) -> bytes:
    """The bytes of one file, checked.

    Raises:
        InputError: the file is missing, or differs from its checksum.
    """
    path = folder / name
    if not path.is_file():
        raise checks.InputError(
            f"{path}: no such file; the photographs are part of the repository, not of the "
            "installed package: run from a clone"
        )
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != checksums(folder)[name]:
        raise checks.InputError(
            f"{path}: differs from its checksum in SHA256SUMS; restore it with git checkout {path}"
        )
    return content


@functools.cache
def _table(stem: str) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(read(f"{stem}.npz")), allow_pickle=False) as table:
        return {name: table[name] for name in table.files}


@functools.cache
def _basis() -> tuple[np.ndarray, ...]:
    basis = _table("efficientnet_lite2_pca512")
    components = basis["components"].astype(np.float32) * basis["scale"]
    return basis["mean"], np.ascontiguousarray(components.T), basis["text_scale"]


def _restore_images(codes: Int[np.ndarray, "n 512"]) -> Float[np.ndarray, "n 1280"]:
    mean, components, _ = _basis()
    return codes.astype(np.float32) @ components + mean


def _restore_texts(codes: Int[np.ndarray, "*n 384"]) -> Float[np.ndarray, "*n 384"]:
    texts = codes * _basis()[2]
    return texts / np.linalg.norm(texts, axis=-1, keepdims=True)


class Rows(files.MappedRows):
    """Rows of 8-bit codes, restored when they are taken."""

    def __init__(
        self, codes: np.ndarray, rows: np.ndarray, restore: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        """Row i is restore(codes[rows[i]])."""
        super().__init__(codes, rows)
        self._restore = restore
        self.dtype, self.shape = np.dtype(np.float32), (len(rows), restore(codes[:1]).shape[1])

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._restore(super().__getitem__(index))


def images(source: str, rows: Any = slice(None)) -> Rows:
    """Image features [n, 1280] of a collection, lazily.

    `source` is a captioned collection, a classification set, or "coco_unpaired": COCO's images
    without captions. `rows` are row numbers of it, see `rows_of_split`.
    """
    checks.choice("images", source, tuple(_IMAGE_FILES))
    codes = _table(_IMAGE_FILES[source])["image"]
    return Rows(codes, np.arange(len(codes))[rows], _restore_images)


def texts(source: str, rows: Any = slice(None), encoder: str = "MiniLM") -> Rows:
    """Caption features [m, 384] of a captioned collection, or of Flickr30k, lazily.

    Another of `TEXT_ENCODERS` has 256 features, of COCO's captions alone.
    """
    checks.choice("texts", source, (*CAPTIONED, "flickr30k") if encoder == "MiniLM" else ("coco",))
    if encoder == "MiniLM":
        codes = _table("flickr30k_unpaired_texts" if source == "flickr30k" else source)["text"]
        return Rows(codes, np.arange(len(codes))[rows], _restore_texts)
    codes = _caption_features(encoder)
    return Rows(codes, np.arange(len(codes))[rows], lambda taken: taken)


def image_of_text(name: str) -> Int[np.ndarray, " m"]:
    """The image row of every caption row; the captions of an image are neighbours."""
    return _table(name)["image_of_text"]


@functools.cache
def captions() -> tuple[str, ...]:
    """COCO's captions, one for every text row."""
    return tuple(read("coco_captions.txt").decode().splitlines())


@functools.cache
def rows_of_split(name: str, split: str) -> Int[np.ndarray, " n"]:
    """Image rows of "train", "val" or "test"; the same whatever the seed of a run.

    Flickr8k and RSICD have no validation split of their own: 500 of their train images are it.
    """
    checks.choice("name", name, CAPTIONED)
    checks.choice("split", split, tuple(_SPLITS))
    splits = _table(name)["split"]
    if split == "test" or (splits == _SPLITS["val"]).any():
        return np.flatnonzero(splits == _SPLITS[split])
    train = np.random.default_rng(0).permutation(np.flatnonzero(splits == _SPLITS["train"]))
    return np.sort(train[:_VAL_IMAGES] if split == "val" else train[_VAL_IMAGES:])


# --- other text encoders ------------------------------------------------------------------------


@functools.cache
def _word_vectors(encoder: str) -> tuple[Callable[[Sequence[str]], list[list[int]]], np.ndarray]:
    """What cuts texts into tokens, and a vector [256] of every token."""
    checks.choice("text_encoder", encoder, TEXT_ENCODERS[1:])
    if encoder == "words":
        table = np.random.default_rng(0).standard_normal((1 << 16, 256), np.float32)

        def cut(said: Sequence[str]) -> list[list[int]]:
            words = [re.findall(r"[a-z0-9]+", text.lower()) for text in said]
            return [[zlib.crc32(w.encode()) % len(table) for w in some or [""]] for some in words]

        return cut, table
    checks.require("wordllama", extra="encoders")
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    root = importlib.resources.files("wordllama")
    tokens = Tokenizer.from_file(str(root / "tokenizers" / "l2_supercat_tokenizer_config.json"))
    (table,) = load_file(str(root / "weights" / "l2_supercat_256.safetensors")).values()
    return (
        lambda said: [e.ids for e in tokens.encode_batch(list(said), add_special_tokens=False)]
    ), table.astype(np.float32)


def encode_words(said: Sequence[str], encoder: str) -> Float[np.ndarray, "n 256"]:
    """Unit features of texts: the mean of their tokens' vectors.

    "WordLlama" has the vectors of its package (Miller 2024), trained for sentences on the tokens of
    a language model; "words" has a random vector for every word.

    >>> same, words = encode_words(["A dog.", "a DOG"], "words")
    >>> bool((same == words).all())
    True
    """
    cut, table = _word_vectors(encoder)
    tokens = cut(said)
    sizes = np.array([len(one) for one in tokens])
    starts = np.r_[0, np.cumsum(sizes)[:-1]]
    features = np.add.reduceat(table[np.concatenate(tokens)], starts)
    return features / np.linalg.norm(features, axis=1, keepdims=True)


@functools.cache
def _caption_features(encoder: str) -> Float[np.ndarray, "m 256"]:
    return encode_words(captions(), encoder)


# --- what is evaluated on -----------------------------------------------------------------------


def _captions_of(name: str, image_rows: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.isin(image_of_text(name), image_rows))


def gallery(name: str, split: str = "test", encoder: str = "MiniLM") -> data.Gallery:
    """All images of a split with all their captions, by one of `TEXT_ENCODERS`."""
    image_rows = rows_of_split(name, split)
    text_rows = _captions_of(name, image_rows)
    owner = np.searchsorted(image_rows, image_of_text(name)[text_rows])
    x, y = images(name, image_rows), texts(name, text_rows, encoder)
    return data.gallery(np.asarray(x), np.asarray(y), owner)


def zero_shot(name: str, encoder: str = "MiniLM") -> data.ZeroShot:
    """A classification set with its prompts, by one of `TEXT_ENCODERS`.

    The image encoder was trained with ImageNet's labels; Food-101's images are 64 pixels wide;
    Flowers-102 is near chance with these encoders.
    """
    checks.choice("zero_shot", name, tuple(ZERO_SHOT))
    table = _table(ZERO_SHOT[name])
    names = tuple(table["class_names"].tolist())
    if encoder == "MiniLM":
        prompts = _restore_texts(table["prompts"])
    else:
        said = [t.replace("{c}", c) for c in names for t in table["templates"].tolist()]
        prompts = encode_words(said, encoder).reshape(*table["prompts"].shape[:2], -1)
    return data.zero_shot(_restore_images(table["image"]), table["label"], prompts, names)


def test_labels() -> tuple[list[int], list[str]]:
    """COCO's numbers of the images of `gallery("coco")`, and its captions."""
    image_rows = rows_of_split("coco", "test")
    said = captions()
    return (
        _table("coco")["image_id"][image_rows].tolist(),
        [said[row] for row in _captions_of("coco", image_rows)],
    )


# --- what is trained on -------------------------------------------------------------------------


class Chosen(NamedTuple):
    """Row numbers of a captioned collection: pairs, and what is left for unpaired pools."""

    images: Int[np.ndarray, " p"]
    texts: Int[np.ndarray, " p"]
    pool_images: Int[np.ndarray, " u"]
    pool_texts: Int[np.ndarray, " v"]


def choose(name: str, *, n_pairs: int, pool: str = "disjoint", seed: int = 0) -> Chosen:
    """Pairs of train images, each with one of its captions at random, and all other rows.

    With one seed, fewer pairs are a subset of more.

    Args:
        name: a captioned collection.
        n_pairs: how many images are paired.
        pool: "disjoint": one half of the other train images, and all captions of the other half;
            "random": all other train images, and all their captions.
        seed: chooses the images and their captions.
    """
    checks.choice("pool", pool, POOLS)
    rng = np.random.default_rng(seed)
    train = rng.permutation(rows_of_split(name, "train"))
    if not 0 <= n_pairs <= len(train):
        raise checks.InputError(
            f"n_pairs: {n_pairs} asked of {len(train)} train images; keep it in 1..{len(train)}"
        )
    paired, rest = train[:n_pairs], train[n_pairs:]
    owner = image_of_text(name)
    first, last = (np.searchsorted(owner, paired, side) for side in ("left", "right"))
    paired_texts = first + (rng.random(len(train))[:n_pairs] * (last - first)).astype(int)
    # Counted from the end, where more pairs change nothing.
    x, y = (rest[::-2], rest[-2::-2]) if pool == "disjoint" else (rest, rest)
    return Chosen(paired, paired_texts, x, _captions_of(name, y))


def dataset(
    name: str = "coco",
    *,
    n_pairs: int = 1000,
    pool: str = "disjoint",
    n_unpaired: int | None = None,
    seed: int = 0,
    unpaired_images: str | None = None,
    unpaired_texts: str | None = None,
    pool_noise: float = 0.0,
    evaluate_on: str | None = None,
    test: bool = True,
    zero_shot_on: str | None = None,
    text_encoder: str = "MiniLM",
) -> data.Dataset:
    """Pairs of a captioned collection, unpaired pools, and what to validate and test on.

    With one seed, fewer pairs are a subset of more, and fewer unpaired rows of more.

    Args:
        name: "coco", "flickr8k" or "rsicd": where the pairs come from.
        n_pairs: how many.
        pool: "disjoint": unpaired images and captions are of different photographs, none of them
            paired, so no hidden pair is left. COCO's images are then those without captions, and
            its texts the captions of all train images that are not paired; the other collections'
            are divided, see `choose`. "random": images and captions of the same photographs.
        n_unpaired: rows of each pool; all when None.
        seed: chooses pairs, pools and noise.
        unpaired_images: another source of images, one of `IMAGE_POOLS`.
        unpaired_texts: another source of texts, one of `TEXT_POOLS`.
        pool_noise: fraction of each pool replaced by random directions.
        evaluate_on: the collection of the galleries; that of the pairs when None.
        test: False leaves the test split and the classes unread.
        zero_shot_on: a classification set, one of `ZERO_SHOT`.
        text_encoder: one of `TEXT_ENCODERS`; others than MiniLM know COCO's captions alone.

    Raises:
        InputError: an unknown name, or more rows than there are.
    """
    checks.choice("name", name, CAPTIONED)
    checks.choice("pool", pool, POOLS)
    checks.whole(1, n_pairs=n_pairs)
    source_x, source_y = unpaired_images or name, unpaired_texts or name
    checks.choice("unpaired_images", source_x, IMAGE_POOLS)
    checks.choice("unpaired_texts", source_y, TEXT_POOLS)
    checks.choice("evaluate_on", evaluate_on or name, CAPTIONED)
    # Noise stands in the place of the pairs' own collection.
    x, y = (name if source == "noise" else source for source in (source_x, source_y))
    if x == "coco" and pool == "disjoint":
        x = "coco_unpaired"
    divided = pool if x == y else "random"
    chosen = choose(name, n_pairs=n_pairs, pool=divided, seed=seed)

    def rest(source: str) -> Chosen:
        return chosen if source == name else choose(source, n_pairs=0, pool=divided, seed=seed)

    rows_x = rest(x).pool_images if x in CAPTIONED else np.arange(len(images(x)))
    rows_y = rest(y).pool_texts if y in CAPTIONED else np.arange(len(texts(y)))
    pool_x: Any = images(x, _some("images", rows_x, n_unpaired, seed))
    pool_y: Any = texts(y, _some("texts", rows_y, n_unpaired, seed + 1), text_encoder)
    if noise := 1.0 if source_x == "noise" else pool_noise:
        pool_x = data.replace_with_noise(pool_x, fraction=noise, seed=seed)
    if noise := 1.0 if source_y == "noise" else pool_noise:
        pool_y = data.replace_with_noise(pool_y, fraction=noise, seed=seed + 1)
    return data.Dataset(
        np.asarray(images(name, chosen.images)),
        np.asarray(texts(name, chosen.texts, text_encoder)),
        pool_x,
        pool_y,
        val=gallery(evaluate_on or name, "val", text_encoder),
        test=gallery(evaluate_on or name, "test", text_encoder) if test else None,
        zero_shot=zero_shot(zero_shot_on, text_encoder) if test and zero_shot_on else None,
    )


def _some(what: str, rows: np.ndarray, size: int | None, seed: int) -> np.ndarray:
    """`size` of the rows in random order, in which a row's place does not depend on the others."""
    if size is not None and not 0 <= size <= len(rows):
        raise checks.InputError(
            f"n_unpaired: {size} asked but {len(rows)} unpaired {what} remain; ask for fewer"
        )
    place = np.random.default_rng((seed, 1)).random(rows.max(initial=-1) + 1)[rows]
    return rows[np.argsort(place, kind="stable")][:size]


def main() -> None:
    """Reads every file, which checks it, and prints what it holds."""
    for name in checksums():
        if not name.endswith(".npz"):
            print(f"{name}: {len(read(name).splitlines()):,} lines")
            continue
        shapes = {key: array.shape for key, array in _table(name.removesuffix(".npz")).items()}
        print(f"{name}: " + ", ".join(f"{key} {list(shape)}" for key, shape in shapes.items()))


if __name__ == "__main__":
    from experiments import cli

    cli.run(main)
