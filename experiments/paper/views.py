"""The bundled pictures seen as other data: weaker encoders, collections apart, the SUE protocol.

Each view is a folder of .npy files, so that a run on it is an ordinary run on files.
"""

import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping

import numpy as np

from sotalign_jax import data

COLLECTIONS = {
    "clipart": ("openclipart",),
    "emoji": ("emoji_fluent3d",),
    "objects": ("sweethome3d", "tuxpaint", "art4apps", "qabcs"),
    "games": ("endlesssky", "gcompris", "scratch", "wesnoth"),
}
"""Sources of the bundled pictures, in groups of a thousand or more."""
PAIRED = "clipart"
"""The collection that the pairs come from when the pools come from others."""
ENCODERS = {"image 1280": 1280, "image 64": 64}, {"text 384": 384, "text 64": 64, "text 16": 16}
"""Leading features kept of each modality: fewer are a weaker encoder of the same samples."""
WEAKEST = ("image 16", 16), ("text 8", 8)
SUE_TEST = 400
Arrays = dict[str, np.ndarray]


def write(folder: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Writes NAME.npy for every array unless the folder is there; returns the paths by name.

    The folder appears complete or not at all, whoever else writes the same one.
    """
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = pathlib.Path(tempfile.mkdtemp(dir=folder.parent))
        for name, array in arrays.items():
            np.save(temporary / f"{name}.npy", array)
        try:
            os.rename(temporary, folder)
        except OSError:  # another process was first
            shutil.rmtree(temporary)
    return {path.stem: str(path) for path in sorted(folder.glob("*.npy"))}


def _evaluated(table: data.Pictures, image: np.ndarray, text: np.ndarray, width: int) -> Arrays:
    """Validation, test and zero-shot parts; prompts are cut to `width` as the texts are."""
    labelled = (table.split == "test") & (table.label >= 0)
    arrays = {
        "zero_shot_x": image[labelled],
        "zero_shot_labels": table.label[labelled],
        "zero_shot_prompts": table.prompts[..., :width],
    }
    for split in ("val", "test"):
        rows = table.split == split
        arrays |= {f"{split}_x": image[rows], f"{split}_y": text[rows]}
    return arrays


def encoders(image_width: int, text_width: int) -> Arrays:
    """The pictures by their leading features: two weaker encoders, the same samples."""
    table = data.pictures()
    image, text = table.image[:, :image_width], table.text[:, :text_width]
    train = table.split == "train"
    return {"x": image[train], "y": text[train], **_evaluated(table, image, text, text_width)}


def collections(pairs: str, images: str, texts: str) -> Arrays:
    """Pairs of one collection, unpaired images and texts of others; all are evaluated on.

    A pool of the pairs' own collection is left out: the rows that are not pairs make it.
    """
    table = data.pictures()
    arrays = _evaluated(table, table.image, table.text, table.text.shape[1])
    rows = collection_rows(table, pairs)
    arrays |= {"x": table.image[rows], "y": table.text[rows]}
    if images != pairs:
        arrays["unpaired_x"] = table.image[collection_rows(table, images)]
    if texts != pairs:
        arrays["unpaired_y"] = table.text[collection_rows(table, texts)]
    return arrays


def collection_rows(table: data.Pictures, name: str) -> np.ndarray:
    """Training rows of a collection."""
    return np.flatnonzero((table.split == "train") & np.isin(table.source, COLLECTIONS[name]))


def shuffled_pictures(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Images and texts in random order with the test rows first, as `sue` reads them."""
    table, rng = data.pictures(), np.random.default_rng(seed)
    test, train = (rng.permutation(np.flatnonzero(table.split == s)) for s in ("test", "train"))
    rows = np.concatenate([test[:SUE_TEST], train])
    return table.image[rows], table.text[rows]


def sue(x: np.ndarray, y: np.ndarray, *, n_pairs: int, seed: int = 0) -> Arrays:
    """SUE's split of a table in its order: 400 test rows first, the last rows are the pairs.

    Of the rows between, each modality loses its own random tenth, and y is shuffled.
    """
    rng = np.random.default_rng(seed)
    between = np.arange(SUE_TEST, len(x) - n_pairs)
    kept_x, kept_y = (rng.permutation(between)[len(between) // 10 :] for _ in range(2))
    return {
        "x": x[-n_pairs:],
        "y": y[-n_pairs:],
        "unpaired_x": x[np.sort(kept_x)],
        "unpaired_y": y[kept_y],
        "test_x": x[:SUE_TEST],
        "test_y": y[:SUE_TEST],
    }
