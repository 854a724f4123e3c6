"""Real photographs with human captions: pairs, unpaired pools, galleries and class prompts.

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
_FILES = {**ZERO_SHOT, "coco_unpaired": "coco_unpaired_images"}
_FILES["flickr30k"] = "flickr30k_unpaired_texts"
_SPLITS = {"train": 0, "val": 1, "test": 2}
_VAL_IMAGES = 500  # held out of a train split that comes without a validation split

# --- files and features -------------------------------------------------------------------------


def checksums() -> dict[str, str]:
    """SHA-256 of every file in the folder, as its SHA256SUMS says."""
    lines = (FOLDER / "SHA256SUMS").read_text().splitlines()
    return {name: digest for digest, name in map(str.split, lines)}


def fingerprints(*sources: str) -> dict[str, str]:
    """Returns the checksums, shortened, of the files that the named sources are read from.

    >>> list(fingerprints("coco"))
    ['coco.npz', 'coco_captions.txt', 'coco_unpaired_images.npz', 'efficientnet_lite2_pca512.npz']
    """
    stems = [_FILES.get(name, name) for name in (*sources, "efficientnet_lite2")]
    named = {file for stem in stems for file in checksums() if re.match(rf"{stem}[._]", file)}
    return {file: checksums()[file][:16] for file in sorted(named)}


def read(name: str) -> bytes:
    """The bytes of one file; InputError if it is missing or differs from its checksum."""
    path = FOLDER / name
    content = path.read_bytes() if path.is_file() else None
    if content is None or hashlib.sha256(content).hexdigest() != checksums()[name]:
        text = f"{path}: is missing or differs from its checksum in SHA256SUMS"
        raise checks.InputError(
            f"{text}; run from a clone, and restore it with git checkout {path}"
        )
    return content


@functools.cache
def _table(name: str) -> dict[str, np.ndarray]:
    content = io.BytesIO(read(f"{_FILES.get(name, name)}.npz"))
    with np.load(content, allow_pickle=False) as table:
        return dict(table)


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
    """Row i is restore(codes[rows[i]]), made when it is taken."""

    def __init__(self, codes: np.ndarray, rows: Any, restore: Callable[[Any], np.ndarray]) -> None:
        """Any index of the codes chooses the rows."""
        super().__init__(codes, np.arange(len(codes))[rows])
        self._restore = restore
        self.dtype, self.shape = np.dtype(np.float32), (len(self), restore(codes[:1]).shape[1])

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._restore(super().__getitem__(index))


def images(source: str, rows: Any = slice(None)) -> Rows:
    """Image features [n, 1280] of a captioned collection or a classification set, lazily.

    "coco_unpaired" are COCO's images without captions.
    """
    checks.choice("images", source, (*CAPTIONED, *ZERO_SHOT, "coco_unpaired"))
    return Rows(_table(source)["image"], rows, _restore_images)


def texts(source: str, rows: Any = slice(None), encoder: str = "MiniLM") -> Rows:
    """Caption features [m, 384] of a captioned collection, or of Flickr30k, lazily.

    Another of `TEXT_ENCODERS` has 256 features, of COCO's captions alone.
    """
    checks.choice("texts", source, TEXT_POOLS[:-1] if encoder == "MiniLM" else ("coco",))
    if encoder == "MiniLM":
        return Rows(_table(source)["text"], rows, _restore_texts)
    return Rows(_caption_features(encoder), rows, np.asarray)


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


def encode_words(said: Sequence[str], encoder: str) -> Float[np.ndarray, "n 256"]:
    """Unit features of texts: the mean of their tokens' vectors.

    "WordLlama" has the vectors of its package (Miller 2024), trained for sentences on the tokens of
    a language model; "words" has a random vector for every word.

    >>> same, words = encode_words(["A dog.", "a DOG"], "words")
    >>> bool((same == words).all())
    True
    """
    checks.choice("text_encoder", encoder, TEXT_ENCODERS[1:])
    if encoder == "words":
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
    table = _table(name)
    names = tuple(table["class_names"].tolist())
    if encoder == "MiniLM":
        prompts = _restore_texts(table["prompts"])
    else:
        said = [t.replace("{c}", c) for c in names for t in table["templates"].tolist()]
        prompts = encode_words(said, encoder).reshape(*table["prompts"].shape[:2], -1)
    return data.zero_shot(_restore_images(table["image"]), table["label"], prompts, names)


def test_labels() -> tuple[list[int], list[str]]:
    """COCO's numbers of the images of `gallery("coco")`, and its captions."""
    image_rows, said = rows_of_split("coco", "test"), captions()
    image_ids = _table("coco")["image_id"][image_rows].tolist()
    return image_ids, [said[row] for row in _captions_of("coco", image_rows)]


# --- what is trained on -------------------------------------------------------------------------


class Chosen(NamedTuple):
    """Row numbers of a captioned collection: pairs, and what is left for unpaired pools."""

    images: Int[np.ndarray, " p"]
    texts: Int[np.ndarray, " p"]
    pool_images: Int[np.ndarray, " u"]
    pool_texts: Int[np.ndarray, " v"]


def choose(name: str, *, n_pairs: int, pool: str = "disjoint", seed: int = 0) -> Chosen:
    """Pairs of train images, each with one of its captions at random, and all other rows.

    pool "disjoint" is one half of the other train images, and all captions of the other half;
    "random" all other train images, and all their captions. With one seed, fewer pairs are a subset
    of more.
    """
    rng = np.random.default_rng(seed)
    train = rng.permutation(rows_of_split(name, "train"))
    checks.within(len(train), "train images", least=0, n_pairs=n_pairs)
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

    pool "disjoint": unpaired images and captions are of different photographs, none of them paired,
    so no hidden pair is left. COCO's images are then those without captions, and its texts the
    captions of all train images that are not paired; the other collections' are divided, see
    `choose`. pool "random": images and captions of the same photographs.

    Pools may come from others of `IMAGE_POOLS` and `TEXT_POOLS`; they have `n_unpaired` rows, all
    when None, of which a fraction `pool_noise` is replaced by random directions. Galleries are of
    `evaluate_on`, by default of the pairs' collection, and classes of `zero_shot_on`; without
    `test`, the test split and the classes stay unread. With one seed, fewer pairs are a subset of
    more, and fewer unpaired rows of more.
    """
    checks.whole(1, n_pairs=n_pairs)
    source_x, source_y = unpaired_images or name, unpaired_texts or name
    evaluate_on = evaluate_on or name
    checks.choice("name", name, CAPTIONED)
    checks.choice("pool", pool, POOLS)
    checks.choice("unpaired_images", source_x, IMAGE_POOLS)
    checks.choice("unpaired_texts", source_y, TEXT_POOLS)
    checks.choice("evaluate_on", evaluate_on, CAPTIONED)
    # Noise stands in the place of the pairs' own collection.
    x, y = (name if source == "noise" else source for source in (source_x, source_y))
    if x == "coco" and pool == "disjoint":
        x = "coco_unpaired"
    divided = pool if x == y else "random"
    chosen = choose(name, n_pairs=n_pairs, pool=divided, seed=seed)

    def rows(source: str, side: str, count: int, order: int) -> np.ndarray:
        """`n_unpaired` rows in random order; a row's place does not depend on the others."""
        rest = np.arange(count)
        if source in CAPTIONED:
            own = chosen if source == name else choose(source, n_pairs=0, pool=divided, seed=seed)
            rest = getattr(own, f"pool_{side}")
        if n_unpaired is not None:
            checks.within(len(rest), f"unpaired {side}", least=0, n_unpaired=n_unpaired)
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
