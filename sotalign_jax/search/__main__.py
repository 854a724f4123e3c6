r"""Searches pictures or texts with a trained model.

    python -m sotalign_jax.search --model=RUN --images=DIR --query="a red car" --query="a bird"
    python -m sotalign_jax.search --model=RUN --texts=captions.txt --query_image=car.jpg

Prints the best results of every query and writes them to an HTML page. The encoders are those that
the model was trained with. Embeddings of a folder are stored in --index, so that the next search is
quick. They are computed again when files change. --index may also be an extraction of the pictures.
`sotalign_jax.serve` keeps the model loaded and answers in a browser.
"""

import html
import pathlib
import sys
from collections.abc import Sequence

from sotalign_jax import checks, storage
from sotalign_jax.search import cli, items, markup, model, model_flags
from sotalign_jax.search.cli import flags, path_flag

_QUERY = flags.DEFINE_multi_string("query", [], "Text to search for; may be repeated.")
_QUERIES = path_flag("queries", None, "File of texts to search for: .txt, .csv or .jsonl.")
_PICTURE = flags.DEFINE_multi_string("query_image", [], "Picture to search for; may be repeated.")
_TEXTS = path_flag(
    "texts", None, "File of texts to search: .txt with one per line, .csv or .jsonl."
)
_PAGE = path_flag("page", "search.html", "HTML page to write.")
model_flags.declare()
CHOICES = model_flags.CHOICES


def shown(query: str | pathlib.Path, hits: list[model.Hit], images: pathlib.Path | None) -> str:
    """Renders the results of one query as HTML.

    Args:
        query: Text, or path of a picture. A picture is shown above its results.
        hits: Results, best first.
        images: Folder of the pictures, or None if texts were searched.

    Returns:
        Cards with the pictures, or a list of the texts.
    """
    asked = "" if isinstance(query, str) else markup.thumbnail(items.oriented(query), query.name)
    if images is None:
        lines = "".join(f"<li>{html.escape(hit.id)} ({quality(hit)})</li>" for hit in hits)
        return f"{asked}<ol>{lines}</ol>"
    titles = (
        f"<b class='{hit.word}'>{rank}. {quality(hit)}</b><br>{html.escape(hit.id)}"
        for rank, hit in enumerate(hits, 1)
    )
    found = (markup.thumbnail(items.oriented(images / hit.id), hit.id) for hit in hits)
    return asked + markup.cards(*zip(titles, found, strict=True))


def quality(hit: model.Hit) -> str:
    """Describes a result in words, or by its score if the model has no confidence."""
    return f"{hit.word} match" if hit.word else f"{hit.score:.3f}"


def listed(hits: Sequence[model.Hit], score: str, kind: str) -> str:
    """Returns results as lines of text.

    Args:
        hits: Results, best first.
        score: Title of the scores.
        kind: Title of the names.
    """
    width = max(len(score), 6)
    longest = max([len(kind), *(len(hit.id) for hit in hits)])
    lines = [f"  rank  {score:>{width}}  {kind}", f"------  {'-' * width}  {'-' * longest}"]
    lines += [
        f"{rank:>6}  {hit.score:>{width}.3f}  {hit.id:{longest}}  {hit.word}".rstrip()
        for rank, hit in enumerate(hits, 1)
    ]
    return "\n".join(lines)


def main() -> None:
    """Answers all queries, prints the results and writes the page."""
    images, texts = model_flags.IMAGES.value, _TEXTS.value
    queries: list[str | pathlib.Path] = [*_QUERY.value]
    queries += [] if _QUERIES.value is None else model.read_texts(_QUERIES.value)
    queries += [pathlib.Path(file).expanduser() for file in _PICTURE.value]
    if not queries:
        raise checks.InputError("query is not set; pass --query, --queries or --query_image")
    if (images is None) == (texts is None):  # both or none
        raise checks.InputError(
            "images or texts must be set, and not both; pass --images or --texts"
        )
    searched, calibrated = images or texts, model_flags.CALIBRATED.value
    searcher = model_flags.load(searched)
    kind = "picture" if images else "text"
    titles = [query if isinstance(query, str) else query.name for query in queries]
    parts = []
    for title, query in zip(titles, queries, strict=True):
        hits = searcher.search(query, model_flags.TOP.value, calibrated=calibrated)
        uses = searcher.uses_calibration(searcher.side_of(query), calibrated)
        score = "calibrated score" if uses else "cosine"
        table = listed(hits, score, kind)
        # Flushed, because the next query may take a while.
        print(f"{title}\n\n{table}\n" if len(queries) > 1 else table, flush=True)
        warning = searcher.warning(query)
        if warning:
            print(warning, file=sys.stderr)
        part = (markup.small(warning) if warning else "") + shown(query, hits, images)
        parts.append(markup.section(title, part) if len(queries) > 1 else part)
    below = markup.small(f"The best {kind}s in {searched}, each with its score.")
    _PAGE.value.parent.mkdir(parents=True, exist_ok=True)
    with storage.replacing(_PAGE.value) as file:
        file.write(markup.page(", ".join(titles[:3]), below, *parts).encode())
    print(f"\nThe results are in {_PAGE.value}")


if __name__ == "__main__":
    cli.run(main, choices=CHOICES)
