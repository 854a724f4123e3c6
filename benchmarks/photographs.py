"""COCO's photographs and captions for benchmarks, read from the embedding files of a clone."""

import functools
import pathlib
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from sotalign_jax import checks, data

FOLDER = pathlib.Path(__file__).parents[1] / "experiments" / "data"
_TRAIN, _VAL = 0, 1  # codes of the splits


@functools.cache
def _read(stem: str) -> dict[str, np.ndarray]:
    path = FOLDER / f"{stem}.npz"
    if not path.is_file():
        raise checks.InputError(f"{path} is missing; in a clone, restore it with git checkout")
    with np.load(path, allow_pickle=False) as table:
        return dict(table)


def _images(codes: Int[np.ndarray, "n 512"]) -> Float[np.ndarray, "n 1280"]:
    """Restores image features from their 8-bit principal components."""
    basis = _read("efficientnet_lite2_pca512")
    components = basis["components"].astype(np.float32) * basis["scale"]
    return codes.astype(np.float32) @ np.ascontiguousarray(components.T) + basis["mean"]


def _texts(codes: Int[np.ndarray, "n 384"]) -> Float[np.ndarray, "n 384"]:
    """Restores caption features from 8 bits, with unit length."""
    texts = codes * _read("efficientnet_lite2_pca512")["text_scale"]
    return texts / np.linalg.norm(texts, axis=1, keepdims=True)


def _shuffled(rows: Int[np.ndarray, " n"], seed: int) -> Int[np.ndarray, " n"]:
    """Returns the rows in random order."""
    order = np.random.default_rng((seed, 1)).random(rows.max() + 1)[rows]
    return rows[np.argsort(order, kind="stable")]


def coco(n_pairs: int) -> data.Dataset:
    """Returns pairs, pools and the validation gallery, as the launchers draw them with seed 0.

    Unpaired images are those without captions, so the pools contain no hidden pairs.

    Args:
        n_pairs: Number of pairs of an image and one of its captions.
    """
    table: Any = _read("coco")
    unpaired, owner = _read("coco_unpaired_images")["image"], table["image_of_text"]
    rng = np.random.default_rng(0)
    train = rng.permutation(np.flatnonzero(table["split"] == _TRAIN))
    paired = train[:n_pairs]
    first, last = (np.searchsorted(owner, paired, side) for side in ("left", "right"))
    captions = first + (rng.random(len(train))[:n_pairs] * (last - first)).astype(int)
    rest = np.flatnonzero(np.isin(owner, train[n_pairs:]))
    pool_x = unpaired[_shuffled(np.arange(len(unpaired)), 0)]
    pool_y = table["text"][_shuffled(rest, 1)]
    held_out = np.flatnonzero(table["split"] == _VAL)
    own = np.flatnonzero(np.isin(owner, held_out))
    val = data.gallery(
        _images(table["image"][held_out]),
        _texts(table["text"][own]),
        np.searchsorted(held_out, owner[own]),
    )
    pairs = _images(table["image"][paired]), _texts(table["text"][captions])
    return data.Dataset(*pairs, _images(pool_x), _texts(pool_y), val=val)
