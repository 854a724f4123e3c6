"""From a folder of pictures with some captions to a model that searches them, in one call."""

import dataclasses
import os
import pathlib
from typing import Any

import numpy as np

from sotalign_jax import alignment, data, evaluation, progress, storage
from sotalign_jax.aligner import Aligner
from sotalign_jax.search import datasets, encoders, extraction
from sotalign_jax.search.extraction import Arrays
from sotalign_jax.search.model import SEARCH, Model, Path, embedded

HELD_OUT = 0.1
"""Fraction of the captioned pictures for validation, and for the test."""


def pictures(
    root: Path,
    captions: Path | None = None,
    *,
    workdir: Path | None = None,
    image_encoder: str = "efficientnet-lite2",
    text_encoder: str = "all-minilm-l6-v2",
    device: str | None = None,
    seed: int = 0,
    **options: Any,
) -> Model:
    """Trains a model on a folder of pictures with captions for some of them, and indexes all.

    Embeds the captions and the pictures, holds out a tenth of the captioned pictures for validation
    and another tenth for a test, and aligns both encoders. Pictures without a caption are unpaired
    data. Embeddings are kept, so that another call embeds only files that are new or have changed.

    Args:
        root: Folder of the pictures, which may be in subfolders.
        captions: CSV or JSONL file with the columns `file` and `caption`. By default the caption of
            a picture is the first line of the .txt file beside it.
        workdir: Folder for the embeddings. The default is a folder for these pictures in
            ~/.cache/sotalign-jax, or in XDG_CACHE_HOME.
        image_encoder: Encoder of the pictures, one of `search.encoders.NAMES`.
        text_encoder: Encoder of the captions.
        device: Torch device of the encoders. The default is the fastest.
        seed: Seed of all random choices.
        **options: Options of `align`, such as `steps`.

    Returns:
        The model with the pictures indexed. `model.aligner.info["results"]` has its recall on the
        test pictures, and `model.aligner.rows` the ids of all parts.

    Raises:
        InputError: The pictures or captions cannot be read, or there are too few of them.
    """
    folder = pathlib.Path(root).expanduser()
    table = None if captions is None else pathlib.Path(captions).expanduser()
    out = _cache(folder) if workdir is None else pathlib.Path(workdir).expanduser()
    progress.say(f"embeddings are kept in {out}")
    both = {
        "x": encoders.load(image_encoder, device=device),
        "y": encoders.load(text_encoder, device=device),
    }
    # The captions come first, because they take little time and may name missing files.
    captioned = datasets.open_dataset("folder", folder, captions=table)
    y = embedded(captioned, both["y"], folder if table is None else table, out / "text")
    x = embedded(datasets.open_dataset("folder", folder), both["x"], folder, out / SEARCH)
    arrays = extraction.join("split", x, y, val=HELD_OUT, test=HELD_OUT, seed=seed)
    aligned = _trained(arrays, seed=seed, **options)
    described = {side: encoder.describe() for side, encoder in both.items()}
    rows = extraction.ids_of(arrays)
    aligned = dataclasses.replace(aligned, info=aligned.info | {"encoders": described}, rows=rows)
    return Model(aligned, both, out).with_index("x", x)


def _cache(root: pathlib.Path) -> pathlib.Path:
    """Returns the folder for the embeddings of a folder of pictures."""
    caches = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    path = root.resolve()
    own = storage.digest(os.fsencode(path))[:8]
    return caches / "sotalign-jax" / "pictures" / f"{path.name}-{own}"


def _trained(arrays: Arrays, **options: Any) -> Aligner:
    """Aligns the rows of `extraction.join`, and evaluates the result on the test pictures."""
    extraction.check_pairs(arrays)
    rows = {
        name: np.asarray(part.of.rows[part.chosen], np.float32)
        for name, part in arrays.items()
        if isinstance(part, extraction.Taken)
    }
    owners = {name: part for name, part in arrays.items() if isinstance(part, np.ndarray)}
    galleries = {
        name: data.gallery(rows[f"{name}_x"], rows[f"{name}_y"], owners[f"{name}_x_of_y"])
        for name in ("val", "test")
        if f"{name}_x" in rows
    }
    # Without other rows, the pairs' own ones are the unpaired data.
    x, y = (rows.get(f"unpaired_{side}", rows[side]) for side in "xy")
    aligned = alignment.align((rows["x"], rows["y"]), x, y, val=galleries.get("val"), **options)
    if "test" not in galleries:
        return aligned
    test = galleries["test"]
    scores = evaluation.evaluate(aligned.heads.x, aligned.heads.y, test, aligned.calibration)
    found, by_chance = scores["y_to_x/R@10"], evaluation.chance(len(test.x), 10)
    progress.say(
        f"the right picture is among the first 10 of {len(test.x)} for {found:.0f} % of the "
        f"captions held out for testing, by chance for {by_chance:.0f} %"
    )
    results = {f"test/{name}": value for name, value in scores.items()}
    return dataclasses.replace(aligned, info=aligned.info | {"results": results})
