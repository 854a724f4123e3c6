r"""Serves a web page that searches pictures by text or by picture.

    python -m sotalign_jax.serve --model=RUN --images=DIR --index=EXTRACTION --captions=captions.csv
    python -m sotalign_jax.serve --model=RUN --images=DIR --port=8000 --host=0.0.0.0

The model is loaded once. By default the page is reachable from this computer only: see --host. The
page loads nothing from other servers, and only pictures in --images are shown.
"""

import collections
import contextlib
import pathlib

from sotalign_jax import aligner, checks
from sotalign_jax.search import cli, datasets, items, model_flags, pages, web
from sotalign_jax.search import model as model_lib
from sotalign_jax.search.cli import flags

_HOST = flags.DEFINE_string(
    "host", "127.0.0.1", "Address to listen at. 0.0.0.0 listens at all addresses."
)
_PORT = flags.DEFINE_integer("port", 7860, "Port to listen at. 0 selects a free port.", 0)
model_flags.declare()
flags.declare_key_flag("captions")
CHOICES = model_flags.CHOICES
EXAMPLES = 6
"""Number of texts that the start page suggests."""


def held_out(aligned: aligner.Aligner) -> list[str]:
    """Returns texts that an aligner was not trained on, to suggest as queries.

    Args:
        aligned: The aligner.

    Returns:
        At most `EXAMPLES` short texts of the test rows, or none if they are unknown.
    """
    texts = aligned.rows.get("test_texts", [])
    short = list(dict.fromkeys(text.strip() for text in texts if 3 < len(text.strip()) < 50))
    return short[:: max(1, len(short) // EXAMPLES)][:EXAMPLES]


def build(
    searcher: model_lib.Model, images: pathlib.Path, captions: pathlib.Path | None, *, top: int
) -> pages.Site:
    """Reads captions, names of training pictures and example queries.

    Args:
        searcher: Model with the pictures indexed.
        images: Folder of the pictures.
        captions: CSV or JSONL file of captions. None reads the .txt files beside the pictures.
        top: Number of results.

    Returns:
        The site, ready to answer.
    """
    said: dict[str, list[items.Item]] = collections.defaultdict(list)
    for item in datasets.open_dataset("folder", images, captions=captions).items["text"]():
        said[item.group].append(item)

    def caption(name: str) -> str:
        with contextlib.suppress(OSError, ValueError, IndexError):  # the picture has no caption
            return str(said[name][0].load())
        return ""

    side, rows = searcher.searched.side, searcher.aligner.rows
    paired = rows.get(f"pairs_{side}")
    tested = frozenset(rows.get(f"test_{side}", ()))
    captioned = None if paired is None else frozenset(paired)
    searcher.search("a picture")  # compiles the programs, so that the first visitor need not wait
    return pages.Site(searcher, images, caption, captioned, top, held_out(searcher.aligner), tested)


def main() -> None:
    """Loads the model and serves until interrupted."""
    images = model_flags.IMAGES.value
    if images is None:
        raise checks.InputError("images is not set; pass --images=FOLDER")
    site = build(
        model_flags.load(images), images, model_flags.CAPTIONS.value, top=model_flags.TOP.value
    )
    with (
        web.Server(site, _HOST.value, _PORT.value) as server,
        contextlib.suppress(KeyboardInterrupt),
    ):
        host, port = str(server.server_address[0]), server.server_port
        print(f"Serving {site.count} pictures at http://{host}:{port}/", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    cli.run(main, choices=CHOICES)
