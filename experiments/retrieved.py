"""Examples of retrieval: the texts that a model finds for test rows, beside the correct ones."""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments import photos
from experiments import spec as spec_lib
from sotalign_jax import aligner, confidence, data, neighbours
from sotalign_jax.search import extraction, items

COCO = "http://images.cocodataset.org/train2017/{:012d}.jpg"
"""Address of a COCO photograph by its number."""


class Labels(NamedTuple):
    """Names and texts of the test rows. Unknown ones are empty.

    Attributes:
        nouns: Plural nouns for the rows of x and of y.
        given: Participle that introduces a query, such as "heard".
        x: Names of the rows of x.
        y: Texts of the rows of y.
        links: Addresses of the rows of x.
        pictures: Picture files of the rows of x.
    """

    nouns: tuple[str, str] = ("rows of x", "rows of y")
    given: str = "given"
    x: Sequence[str] = ()
    y: Sequence[str] = ()
    links: Sequence[str] = ()
    pictures: Sequence[pathlib.Path] = ()


class Found(NamedTuple):
    """A query and the texts nearest to it.

    Attributes:
        query: Correct text and name of the query.
        rank: Rank of the first correct text, from 1.
        total: Number of texts.
        nearest: Text, score and correctness of the nearest texts, best first.
        picture: Picture file of the query, or None.
        link: Address of the query, or "".
    """

    query: tuple[str, str]
    rank: int
    total: int
    nearest: Sequence[tuple[str, float, bool]]
    picture: pathlib.Path | None = None
    link: str = ""

    def text(self, given: str) -> str:
        """Returns the query and the texts found as lines of text.

        Args:
            given: Participle that introduces the query, such as "heard".
        """
        own, name = self.query
        lines = [f"{given}: {own} ({name}; its own text has rank {self.rank:,} of {self.total:,})"]
        for text, score, right in self.nearest:
            lines.append(f"found: {score:5.2f}  {text}{'  <- its own' if right else ''}")
        return "\n".join(lines)


def labels_of(config: spec_lib.Run) -> Labels:
    """Returns the labels of a run's test rows.

    The labels are known for the data of the repository and for files of `sotalign_jax.pair`. For
    other data, only the nouns are returned.
    """
    name = config.data.evaluate_on or config.data.name
    photographs = Labels(("images", "captions"), "shown")
    if name != "files":
        nouns = photographs
        if photos.LABELLED.get(name) == "utterance":
            nouns = Labels(("utterances", "transcripts"), "heard")
        elif name == "code":
            nouns = Labels(("functions", "docstrings"), "read")
        if name not in photos.LABELLED or not config.data.test:
            return nouns
        ids, said = photos.test_labels(name)
        links = [COCO.format(one) for one in ids] if name == "coco" else ()
        return nouns._replace(x=[f"{photos.LABELLED[name]} {i}" for i in ids], y=said, links=links)
    tests = config.data.files.test_x, config.data.files.test_y
    x, y = map(extraction.read_ids, tests)
    # Other files have no names and texts, only rows.
    if not config.data.test or x is None or y is None:
        return Labels()
    paths = [pathlib.Path(x.root) / one for one in x.ids]
    pictures = all(path.suffix.lower() in items.IMAGE_SUFFIXES for path in paths)
    labels = photographs._replace(pictures=paths) if pictures else Labels()
    texts = [text or one for text, one in zip(y.texts, y.ids, strict=True)]
    return labels._replace(x=x.ids, y=texts, links=[path.as_uri() for path in paths])


def find(model: aligner.Aligner, gallery: data.Gallery, labels: Labels) -> list[Found]:
    """Finds the three texts nearest to each of 200 random test rows of x.

    A text with the same words as one of the correct texts counts as correct.

    Args:
        model: The model to query.
        gallery: Test rows. The queries are the same for every model.
        labels: Names and texts of the test rows.

    Returns:
        The queries with the texts found.
    """
    count = min(200, len(gallery.x))
    # The same seed for all models, so that their examples can be compared.
    asked = np.random.default_rng(0).choice(len(gallery.x), count, replace=False)
    said = [text.strip() for text in labels.y]
    codes = {text: code for code, text in enumerate(said)}
    # Equal texts get equal codes: captions such as "a dog" occur several times.
    words = np.array([codes[text] for text in said])
    owned = [np.flatnonzero(gallery.x_of_y == query) for query in asked]
    right = np.stack([np.isin(words, words[own]) for own in owned])
    top = model.search(gallery.x[asked], gallery.y, k=3)
    scores = model.similarity(gallery.x[asked], gallery.y)
    ranks = np.asarray(neighbours.best_ranks(scores, right))
    found = []
    for number, (query, own) in enumerate(zip(asked.tolist(), owned, strict=True)):
        rows = zip(top.indices[number], top.scores[number], strict=True)
        nearest = [(said[row], float(score), bool(right[number, row])) for row, score in rows]
        picture = labels.pictures[query] if labels.pictures else None
        link = labels.links[query] if labels.links else ""
        names = said[own[0]], labels.x[query]
        rank = int(ranks[number]) + 1
        found.append(Found(names, rank, len(said), nearest, picture, link))
    return found


def summary(found: Sequence[Found], labels: Labels) -> str:
    """Summarises the ranks of the correct texts in two sentences.

    Args:
        found: Queries with the texts found.
        labels: Names and texts of the test rows.

    Returns:
        The sentences.
    """
    ranks, (x, y) = [one.rank for one in found], labels.nouns
    near, chance = sum(rank <= 10 for rank in ranks), 10 * len(found) / len(labels.x)
    return (
        f"For {near} of {len(found)} test {x} one of their own {y} is among the first 10 of "
        f"{len(labels.y):,}, by chance for {chance:.2g}. The median rank is {np.median(ranks):.0f}."
    )


def reliability(model: aligner.Aligner, gallery: data.Gallery) -> list[confidence.Bin]:
    """Compares the probabilities of results with the share that is right, on test rows.

    Args:
        model: The model to query.
        gallery: Test rows. At most 500 rows of y are queries for rows of x.

    Returns:
        The bins of the first ten results, or none if the model has no confidence.
    """
    if model.fitted_confidence("y_to_x") is None:
        return []
    asked = np.arange(len(gallery.y))[:: -(-len(gallery.y) // 500)]
    queries = gallery.y[asked]
    found = model.search(queries, gallery.x, k=confidence.FIRST, direction="y_to_x").indices
    claimed = model.confidence(queries, gallery.x, found, direction="y_to_x")
    right = found == np.asarray(gallery.x_of_y)[asked, None]
    return confidence.reliability(claimed, right)
