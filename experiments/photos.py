"""Data sets in the repository: captioned photographs, transcribed speech, and documented code.

Embeddings are stored as 8-bit codes and restored to float32 when rows are read. Pools are lazy,
pairs and galleries are arrays. An utterance or a Python function is called an image, its transcript
or docstring a caption. `data/README.md` describes the files.
"""

import functools
import importlib.resources
import io
import pathlib
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from sotalign_jax import checks, data, files, storage

FOLDER = pathlib.Path(__file__).parent / "data"
PHOTOGRAPHS = ("coco", "flickr8k", "rsicd")
"""Collections of images with captions."""
ENCODERS = {"x": {"name": "efficientnet-lite2"}, "y": {"name": "all-minilm-l6-v2"}}
"""Encoders of the photographs and of their captions."""
CAPTIONED = (*PHOTOGRAPHS, "speech", "code")
"""Collections that pairs come from. "speech" is Common Voice, "code" Python functions."""
GALLERIES = (*CAPTIONED, "librispeech")
"""Collections to evaluate on. "librispeech" is a test split for models trained on "speech"."""
LABELLED = {"coco": "photograph", "speech": "utterance", "librispeech": "utterance"}
"""Galleries whose texts are stored, and the noun for one of their images."""
ZERO_SHOT = {
    "imagenet": "zs_imagenet_val5k",
    "cifar10": "zs_cifar10",
    "cifar100": "zs_cifar100",
    "food101": "zs_food101_64px",
    "flowers102": "zs_flowers102",
    "intel": "zs_intel6",
}
"""Files of the classification sets."""
IMAGE_POOLS = (*CAPTIONED, *ZERO_SHOT, "noise")
"""Sources of unpaired images or utterances."""
TEXT_POOLS = (*CAPTIONED, "flickr30k", "noise")
"""Sources of unpaired texts."""
POOLS = ("disjoint", "random")
TEXT_ENCODERS = ("MiniLM", "WordLlama", "words")
"""Text encoders. The last two embed COCO's captions and class prompts when these are read."""
_FILES = {**ZERO_SHOT, "coco_unpaired": "coco_unpaired_images", "librispeech": "speech"}
_FILES["flickr30k"] = "flickr30k_unpaired_texts"
_SPLITS = {"train": 0, "val": 1, "test": 2}
_LIBRISPEECH = 5  # number of its split in the file of Common Voice
_VAL_IMAGES = 500  # held out of the train split if a collection has no validation split

# --- files and features -------------------------------------------------------------------------


def checksums() -> dict[str, str]:
    """Returns the SHA-256 of every file in the folder, as listed in SHA256SUMS."""
    lines = (FOLDER / "SHA256SUMS").read_text().splitlines()
    return {name: digest for digest, name in map(str.split, lines)}


def fingerprints(*sources: str) -> dict[str, str]:
    """Returns shortened checksums of the files that the named sources are read from.

    Args:
        *sources: Collections and classification sets.

    Returns:
        The first 16 digits of each file's SHA-256, by file name.

    >>> list(fingerprints("coco"))
    ['coco.npz', 'coco_captions.txt', 'coco_unpaired_images.npz', 'efficientnet_lite2_pca512.npz']
    """
    stems = [_FILES.get(name, name) for name in (*sources, "efficientnet_lite2")]
    named = {file for stem in stems for file in checksums() if re.match(rf"{stem}[._]", file)}
    return {file: checksums()[file][:16] for file in sorted(named)}


def read(name: str) -> bytes:
    """Returns the bytes of one file of the folder.

    Args:
        name: File name.

    Raises:
        InputError: The file is missing or differs from its checksum.
    """
    path = FOLDER / name
    content = path.read_bytes() if path.is_file() else None
    if content is None or storage.digest(content) != checksums()[name]:
        text = f"{path} is missing or differs from its checksum in SHA256SUMS"
        raise checks.InputError(f"{text}; in a clone, restore it with git checkout {path}")
    return content


@functools.cache
def _table(name: str) -> dict[str, np.ndarray]:
    content = io.BytesIO(read(f"{_FILES.get(name, name)}.npz"))
    with np.load(content, allow_pickle=False) as table:
        return dict(table)


@functools.cache
def _basis() -> tuple[np.ndarray, ...]:
    """Returns the mean and principal components of the image features, and the text scale."""
    basis = _table("efficientnet_lite2_pca512")
    components = basis["components"].astype(np.float32) * basis["scale"]
    return basis["mean"], np.ascontiguousarray(components.T), basis["text_scale"]


def _restore_images(codes: Int[np.ndarray, "n 512"]) -> Float[np.ndarray, "n 1280"]:
    mean, components, _ = _basis()
    return codes.astype(np.float32) @ components + mean


def _restore_texts(
    codes: Int[np.ndarray, "*n 384"], scale: Float[np.ndarray, " 384"] | None = None
) -> Float[np.ndarray, "*n 384"]:
    texts = codes * (_basis()[2] if scale is None else scale)
    # Rounding to 8 bits changes the lengths, and the encoder's features have length 1.
    return texts / np.linalg.norm(texts, axis=-1, keepdims=True)


class Rows(files.MappedRows):
    """Lazy features: row i is restore(codes[rows[i]]).

    Args:
        codes: Stored codes, one row each.
        rows: Any index of the codes.
        restore: Function from codes to features.
    """

    def __init__(self, codes: np.ndarray, rows: Any, restore: Callable[[Any], np.ndarray]) -> None:
        super().__init__(codes, np.arange(len(codes))[rows])
        self._restore = restore
        self.dtype, self.shape = np.dtype(np.float32), (len(self), restore(codes[:1]).shape[1])

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._restore(super().__getitem__(index))


def _first_field(source: str) -> str:
    """Returns the name of the first modality in the file of a source."""
    return next(field for field in ("image", "speech", "code") if field in _table(source))


def images(source: str, rows: Any = slice(None)) -> Rows:
    """Returns lazy features of the first modality.

    Images have 1,280 features, speech has 512 and code 384.

    Args:
        source: A collection, a classification set, or "coco_unpaired", COCO's images without
            captions.
        rows: Any index of the source's rows.
    """
    checks.choice("images", source, (*GALLERIES, *ZERO_SHOT, "coco_unpaired"))
    field, table = _first_field(source), _table(source)
    if field == "image":
        return Rows(table[field], rows, _restore_images)
    return Rows(table[field], rows, lambda codes: codes * table[f"{field}_scale"])


def texts(source: str, rows: Any = slice(None), encoder: str = "MiniLM") -> Rows:
    """Returns lazy features of captions or transcripts, shape [m, 384].

    Args:
        source: A collection, or "flickr30k".
        rows: Any index of the source's rows.
        encoder: One of `TEXT_ENCODERS`. All but the first have 256 features and embed COCO only.
    """
    known = (*GALLERIES, "flickr30k") if encoder == "MiniLM" else ("coco",)
    checks.choice("texts", source, known)
    if encoder == "MiniLM":
        table = _table(source)
        restore = functools.partial(_restore_texts, scale=table.get("text_scale"))
        return Rows(table["text"], rows, restore)
    return Rows(_caption_features(encoder), rows, np.asarray)


def input_dimensions(name: str) -> int:
    """Returns the number of independent features of both modalities together.

    Images have 1,280 features in the span of 512 principal components, which are stored.

    Args:
      name: one of `GALLERIES`.

    >>> input_dimensions("coco"), input_dimensions("speech")
    (896, 896)
    """
    table = _table(name)
    return table[_first_field(name)].shape[1] + table["text"].shape[1]


def image_of_text(name: str) -> Int[np.ndarray, " m"]:
    """Returns the image row of every caption row. Captions of one image are adjacent."""
    table = _table(name)
    return table["image_of_text"] if "image" in table else np.arange(len(table["text"]))


@functools.cache
def captions(name: str = "coco") -> tuple[str, ...]:
    """Returns the caption or transcript of every text row of one of `LABELLED`.

    >>> captions("speech")[0]
    'His father died later that year.'
    """
    checks.choice("captions", name, tuple(LABELLED))
    return tuple(read(f"{_FILES.get(name, name)}_captions.txt").decode().splitlines())


@functools.cache
def rows_of_split(name: str, split: str) -> Int[np.ndarray, " n"]:
    """Returns the image rows of a split. They do not depend on the seed of a run.

    Flickr8k and RSICD have no validation split, so 500 of their train images are held out for it.
    LibriSpeech has a test split only. Its other splits are those of Common Voice.

    Args:
        name: One of `GALLERIES`.
        split: "train", "val" or "test".
    """
    checks.choice("name", name, GALLERIES)
    checks.choice("split", split, tuple(_SPLITS))
    splits = _table(name)["split"]
    if name == "librispeech" and split == "test":
        return np.flatnonzero(splits == _LIBRISPEECH)
    if split == "test" or (splits == _SPLITS["val"]).any():
        return np.flatnonzero(splits == _SPLITS[split])
    train = np.random.default_rng(0).permutation(np.flatnonzero(splits == _SPLITS["train"]))
    return np.sort(train[:_VAL_IMAGES] if split == "val" else train[_VAL_IMAGES:])


# --- other text encoders ------------------------------------------------------------------------


def encode_words(said: Sequence[str], encoder: str) -> Float[np.ndarray, "n 256"]:
    """Embeds texts as the normalized mean of their token vectors.

    Args:
        said: The texts.
        encoder: "WordLlama" uses the vectors of its package, which were trained on sentences.
            "words" uses a random vector for every word.

    Returns:
        Unit features.

    >>> same, words = encode_words(["A dog.", "a DOG"], "words")
    >>> bool((same == words).all())
    True

    References:
        Miller, "WordLlama: recycled token embeddings from large language models", 2024.
    """
    checks.choice("text_encoder", encoder, TEXT_ENCODERS[1:])
    if encoder == "words":
        # Words are hashed to rows of the table. Collisions are rare with 65,536 rows.
        table = np.random.default_rng(0).standard_normal((1 << 16, 256), np.float32)
        words = [re.findall(r"[a-z0-9]+", text.lower()) or [""] for text in said]
        tokens = [[zlib.crc32(word.encode()) % len(table) for word in some] for some in words]
    else:
        checks.require("wordllama", extra="encoders")
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        root = importlib.resources.files("wordllama")
        cut = Tokenizer.from_file(str(root / "tokenizers" / "l2_supercat_tokenizer_config.json"))
        (table,) = load_file(str(root / "weights" / "l2_supercat_256.safetensors")).values()
        tokens = [one.ids for one in cut.encode_batch(list(said), add_special_tokens=False)]
        table = table.astype(np.float32)
    starts = np.cumsum([0, *map(len, tokens[:-1])])
    features = np.add.reduceat(table[np.concatenate(tokens)], starts)
    return features / np.linalg.norm(features, axis=1, keepdims=True)


@functools.cache
def _caption_features(encoder: str) -> Float[np.ndarray, "m 256"]:
    return encode_words(captions(), encoder)


# --- evaluation ---------------------------------------------------------------------------------


def _captions_of(name: str, image_rows: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.isin(image_of_text(name), image_rows))


def gallery(name: str, split: str = "test", encoder: str = "MiniLM") -> data.Gallery:
    """Returns all images of a split with all their captions.

    Args:
        name: One of `GALLERIES`.
        split: "train", "val" or "test".
        encoder: One of `TEXT_ENCODERS`.
    """
    image_rows = rows_of_split(name, split)
    text_rows = _captions_of(name, image_rows)
    owner = np.searchsorted(image_rows, image_of_text(name)[text_rows])
    x, y = images(name, image_rows), texts(name, text_rows, encoder)
    return data.gallery(np.asarray(x), np.asarray(y), owner)


def zero_shot(name: str, encoder: str = "MiniLM") -> data.ZeroShot:
    """Returns a classification set with its prompts.

    The image encoder was trained with ImageNet's labels. Food-101's images are 64 pixels wide.
    Flowers-102 is near chance with these encoders.

    Args:
        name: One of `ZERO_SHOT`.
        encoder: One of `TEXT_ENCODERS`.
    """
    checks.choice("zero_shot", name, tuple(ZERO_SHOT))
    table = _table(name)
    names = tuple(table["class_names"].tolist())
    if encoder == "MiniLM":
        prompts = _restore_texts(table["prompts"])
    else:
        said = [t.replace("{c}", c) for c in names for t in table["templates"].tolist()]
        prompts = encode_words(said, encoder).reshape(*table["prompts"].shape[:2], -1)
    return data.zero_shot(_restore_images(table["image"]), table["label"], prompts, names)


def test_labels(name: str = "coco") -> tuple[list[int], list[str]]:  # noqa: PT028 (no test)
    """Returns the image numbers and caption texts of the test gallery.

    Args:
        name: One of `LABELLED`. Photographs have COCO's numbers, utterances their row numbers.

    >>> numbers, said = test_labels("librispeech")
    >>> len(numbers), len(said)
    (1515, 1515)
    """
    rows, said, table = rows_of_split(name, "test"), captions(name), _table(name)
    numbers = table["image_id"][rows] if "image_id" in table else rows
    return numbers.tolist(), [said[row] for row in _captions_of(name, rows)]


# --- training -----------------------------------------------------------------------------------


class Chosen(NamedTuple):
    """Row numbers of a collection: the pairs, and the unpaired pools."""

    images: Int[np.ndarray, " p"]
    texts: Int[np.ndarray, " p"]
    pool_images: Int[np.ndarray, " u"]
    pool_texts: Int[np.ndarray, " v"]


def choose(name: str, *, n_pairs: int, pool: str = "disjoint", seed: int = 0) -> Chosen:
    """Draws pairs of a train image and one of its captions. The rest are the pools.

    With the same seed, a smaller number of pairs is a subset of a larger one.

    Args:
        name: One of `CAPTIONED`.
        n_pairs: Number of pairs.
        pool: "disjoint" takes one half of the other train images, and the captions of the other
            half. "random" takes all other train images and all their captions.
        seed: Seed of the draw.
    """
    rng = np.random.default_rng(seed)
    train = rng.permutation(rows_of_split(name, "train"))
    checks.within(len(train), "train images", least=0, n_pairs=n_pairs)
    paired, rest = train[:n_pairs], train[n_pairs:]
    owner = image_of_text(name)
    first, last = (np.searchsorted(owner, paired, side) for side in ("left", "right"))
    # Random numbers are drawn for all images, so that the pairs of a seed are nested.
    paired_texts = first + (rng.random(len(train))[:n_pairs] * (last - first)).astype(int)
    # Pools are divided from the end of the permutation. More pairs take rows from its start, and so
    # leave the division of the others unchanged.
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
    """Returns pairs, pools and galleries of a collection.

    With the same seed, a smaller number of pairs or unpaired rows is a subset of a larger one.

    Args:
        name: One of `CAPTIONED`.
        n_pairs: Number of pairs.
        pool: "disjoint" takes unpaired images and captions from different photographs, so that the
            pools contain no hidden pairs. COCO's unpaired images are then those without captions,
            and its unpaired texts are the captions of all train images that are not in a pair.
            Other collections are divided (see `choose`). "random" takes both from the same
            photographs.
        n_unpaired: Number of rows of each pool. None takes all.
        seed: Seed of pairs and pools.
        unpaired_images: Source of the images, one of `IMAGE_POOLS`. The default is `name`.
        unpaired_texts: Source of the texts, one of `TEXT_POOLS`. The default is `name`.
        pool_noise: Fraction of the pools that is replaced by random directions.
        evaluate_on: One of `GALLERIES`. The default is `name`.
        test: If False, the test split and the classification set are not read.
        zero_shot_on: One of `ZERO_SHOT`, or None.
        text_encoder: One of `TEXT_ENCODERS`.

    Returns:
        The data of a run.

    Raises:
        InputError: A source is unknown, has too few rows, or has another width than the pairs.

    >>> made = dataset("speech", n_pairs=1000, evaluate_on="librispeech")
    >>> made.pairs_x.shape, made.pool_x.shape, len(made.val.x), len(made.test.x)
    ((1000, 512), (5240, 512), 611, 1515)
    """
    checks.whole(1, n_pairs=n_pairs)
    source_x, source_y = unpaired_images or name, unpaired_texts or name
    evaluate_on = evaluate_on or name
    checks.choice("name", name, CAPTIONED)
    checks.choice("pool", pool, POOLS)
    checks.choice("unpaired_images", source_x, IMAGE_POOLS)
    checks.choice("unpaired_texts", source_y, TEXT_POOLS)
    checks.choice("evaluate_on", evaluate_on, GALLERIES)
    # Noise replaces rows of the pairs' own collection, which determine its number and width.
    x, y = (name if source == "noise" else source for source in (source_x, source_y))
    if x == "coco" and pool == "disjoint":
        x = "coco_unpaired"
    divided = pool if x == y else "random"
    chosen = choose(name, n_pairs=n_pairs, pool=divided, seed=seed)

    def rows(source: str, side: str, count: int, order: int) -> np.ndarray:
        """Returns `n_unpaired` rows in random order."""
        rest = np.arange(count)
        if source in CAPTIONED:
            own = chosen if source == name else choose(source, n_pairs=0, pool=divided, seed=seed)
            rest = getattr(own, f"pool_{side}")
        if n_unpaired is not None:
            checks.within(len(rest), f"unpaired {side}", least=0, n_unpaired=n_unpaired)
        # The position of a row depends on its own number only, so that pools of a seed are nested.
        place = np.random.default_rng((order, 1)).random(rest.max(initial=-1) + 1)[rest]
        return rest[np.argsort(place, kind="stable")][:n_unpaired]

    def noisy(pool: Any, source: str, seed: int) -> Any:
        fraction = 1.0 if source == "noise" else pool_noise
        return data.replace_with_noise(pool, fraction=fraction, seed=seed) if fraction else pool

    pool_x = images(x, rows(x, "images", len(images(x)), seed))
    pool_y = texts(y, rows(y, "texts", len(texts(y)), seed + 1), text_encoder)
    return data.Dataset(
        np.asarray(images(name, chosen.images)),
        np.asarray(texts(name, chosen.texts, text_encoder)),
        noisy(pool_x, source_x, seed),
        noisy(pool_y, source_y, seed + 1),
        val=gallery(evaluate_on, "val", text_encoder),
        test=gallery(evaluate_on, "test", text_encoder) if test else None,
        zero_shot=zero_shot(zero_shot_on, text_encoder) if test and zero_shot_on else None,
    )
