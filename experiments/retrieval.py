"""What a model finds for pictures that it has not seen: captions, right and wrong, to look at."""

import html
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from ml_collections.config_dict import FrozenConfigDict

from experiments import page, photos, workdir
from experiments.extract import datasets, items, pair
from sotalign_jax import aligner, data, files


class Labels(NamedTuple):
    """What the rows of a test gallery are: names of x, captions of y, and pictures of x, if any."""

    x: Sequence[str]
    y: Sequence[str]
    pictures: Sequence[pathlib.Path] = ()


class Found(NamedTuple):
    """The captions nearest to a picture, best first.

    Attributes:
        name: of the picture.
        caption: one of its own.
        retrieved: the captions, and whether each is one of its own.
        picture: its file, if that is at hand.
    """

    name: str
    caption: str
    retrieved: tuple[tuple[str, bool], ...]
    picture: pathlib.Path | None = None


def labels(config: FrozenConfigDict) -> Labels | None:
    """The labels of a run's test rows: of COCO, and of files that `experiments.pair` made."""
    if (config.data.evaluate_on or config.data.name) == "coco":
        image_ids, said = photos.test_labels()
        return Labels([f"photograph {image}" for image in image_ids], said)
    table = config.data.files.test_x
    noted = (
        pathlib.Path(files.split_key(table)[0]).expanduser().parent / pair.TEST if table else None
    )
    if noted is None or not noted.exists():
        return None
    kept = workdir.read_json(noted)
    root = pathlib.Path(kept["data"]["root"])
    captions = datasets.captions(kept["data"], kept["y"])
    return None if captions is None else Labels(kept["x"], captions, [root / x for x in kept["x"]])


def find(
    model: aligner.Aligner,
    gallery: data.Gallery,
    labels: Labels,
    *,
    queries: int = 200,
    top: int = 3,
    seed: int = 0,
) -> list[Found]:
    """The nearest of all captions to some pictures, the same for every model.

    Args:
        model: an aligner.
        gallery: the test rows.
        labels: what they are.
        queries: pictures, chosen by `seed`.
        top: captions for each.
        seed: chooses the pictures.
    """
    count = min(queries, len(gallery.x))
    asked = np.random.default_rng(seed).choice(len(gallery.x), count, replace=False)
    _, rows = model.search(gallery.x[asked], gallery.y, k=min(top, len(gallery.y)))
    found = []
    for query, best in zip(asked, rows, strict=True):
        retrieved = tuple((labels.y[y], bool(gallery.x_of_y[y] == query)) for y in best)
        own = labels.y[np.flatnonzero(gallery.x_of_y == query)[0]]
        picture = labels.pictures[query] if labels.pictures else None
        found.append(Found(labels.x[query], own, retrieved, picture))
    return found


def render(found: Sequence[Found]) -> str:
    """Text to read: each picture's own caption, and below it those that were found."""
    lines = []
    for one in found:
        lines.append(f"{one.name}: {one.caption.strip()}")
        lines += [
            f"  {'right' if right else 'wrong'}  {caption.strip()}"
            for caption, right in one.retrieved
        ]
    return "\n".join(lines)


def cards(found: Sequence[Found], each: int = 8) -> str:
    """HTML of pictures whose first caption is right, and of as many whose is not."""
    parts = []
    right = [one for one in found if one.retrieved[0][1]]
    wrong = [one for one in found if not one.retrieved[0][1]]
    for title, some in (("Right", right), ("Wrong", wrong)):
        parts.append(page.text(f"{title} at first: {len(some)} of {len(found)} pictures."))
        parts.append(page.cards(*map(_card, some[:each])))
    return "\n".join(parts)


def _card(one: Found) -> str:
    shown = ""
    if one.picture is not None and one.picture.exists():
        shown = page.thumbnail(items.oriented(one.picture), one.caption)
    rows = "".join(
        f"<li class='{'right' if right else 'wrong'}'>{html.escape(caption)}</li>"
        for caption, right in one.retrieved
    )
    title = f"<b>{html.escape(one.caption)}</b><br>{html.escape(one.name)}"
    return page.card(f"{title}<ol>{rows}</ol>", shown)
