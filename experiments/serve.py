r"""Serves a web page that searches pictures by text or by picture.

    python -m experiments.serve --model=RUN --images=DIR --index=EXTRACTION --captions=captions.csv
    python -m experiments.serve --model=RUN --images=DIR --port=8000 --host=0.0.0.0

The model is loaded once. By default the page is reachable from this computer only: see --host. The
page loads nothing from other servers, and only pictures in --images are shown.
"""

import collections
import contextlib
import dataclasses
import functools
import html
import io
import pathlib
import re
import statistics
import string
import sys
import time
import urllib.parse
from collections.abc import Callable
from concurrent import futures
from typing import Any

import numpy as np
from absl import flags
from ml_collections.config_dict import FrozenConfigDict

from experiments import cli, model_flags, report, web
from experiments import run as run_lib
from experiments.cli import path_flag
from experiments.extract import datasets, items
from experiments.extract import model as model_lib
from experiments.web import Response
from sotalign_jax import aligner, checks

_CAPTIONS = path_flag(
    "captions",
    None,
    "CSV or JSONL file of captions. The default is a .txt file beside each picture.",
)
_HOST = flags.DEFINE_string(
    "host", "127.0.0.1", "Address to listen at. 0.0.0.0 listens at all addresses."
)
_PORT = flags.DEFINE_integer("port", 7860, "Port to listen at. 0 selects a free port.", 0)
model_flags.declare()
CHOICES = model_flags.CHOICES
PAGE = pathlib.Path(__file__).with_name("serve.html")
SIZES = {"picture": 360, "large": 1600}
"""Longest side of a picture in pixels, by the first part of its URL."""
MEMORY = 320 * 10**6
"""Most memory to decode an upload: 53 million pixels of JPEG, 40 million of PNG, 20 of WEBP."""
SAME = 0.9999
"""Cosine above which two embeddings are of the same picture. Batching changes it by about 1e-6."""


_one_thread = functools.partial(futures.ThreadPoolExecutor, 1)


@dataclasses.dataclass(frozen=True)
class Site:
    """State shared by all requests.

    Attributes:
        model: Model with the pictures indexed.
        images: Folder of the pictures.
        caption: Function that returns a picture's caption by its id, or "".
        pairs: Unit embeddings of the captioned training pictures, or None if unknown.
        typical: Mean and standard deviation of the scores of text queries. The key is True for
            calibrated scores.
        top: Number of results.
        searcher: Thread that searches, so that requests use the encoders one after another.
        decoder: Thread that decodes pictures, because each one may take `items.MEMORY`.
    """

    model: model_lib.Model
    images: pathlib.Path
    caption: Callable[[str], str]
    pairs: np.ndarray | None
    typical: dict[bool, tuple[float, float] | None]
    top: int
    # A lock would run in the threads of the requests. Each thread keeps memory that it has freed.
    searcher: futures.Executor = dataclasses.field(default_factory=_one_thread)
    decoder: futures.Executor = dataclasses.field(default_factory=_one_thread)

    def answer(self, method: str, address: str, content: bytes = b"") -> Response:
        """Answers a request. See `web.Site.answer`."""
        try:
            parts = urllib.parse.urlsplit(address)
        except ValueError:
            return self.page(error="This address is malformed.", status=400)
        if method == "GET":
            return self.get(parts)
        if parts.path != "/":
            return self.page(error=f"{parts.path} accepts no files; send them to /.", status=405)
        return self.post(content)

    def get(self, parts: urllib.parse.SplitResult) -> Response:
        """Answers a GET request with a page of results or with a picture."""
        kind, _, name = parts.path[1:].partition("/")
        if kind in SIZES:
            return self.picture(name, SIZES[kind])
        if parts.path != "/":
            return self.page(error=f"{parts.path}: there is no such page.", status=404)
        asked = urllib.parse.parse_qs(parts.query, keep_blank_values=True)
        if "like" in asked:
            return self.like(asked["like"][-1])
        if "q" not in asked:
            return self.page()
        query, calibrated = asked["q"][-1].strip(), "calibrated" in asked
        if not query:
            return self.page(error="Type a few words to search for.", calibrated=calibrated)
        return self.results(query, query, calibrated=calibrated)

    def post(self, content: bytes) -> Response:
        """Answers an upload with the pictures most similar to it."""
        if len(content) > web.LARGEST:
            text = f"The file is too large; choose one of at most {web.LARGEST >> 20} MB."
            return self.page(error=text, status=413)
        try:
            picture, thumbnail = self.decoder.submit(_read_upload, content).result()
        except Exception as error:  # decoders raise errors of many kinds for damaged files
            text = f"The picture cannot be read: {checks.first_line(error)}"
            return self.page(error=text, status=400)
        return self.results(picture, above=f"<p class='asked'>{thumbnail}</p>")

    def like(self, row: str) -> Response:
        """Searches for the pictures most similar to an indexed one."""
        path = self.path(row)
        if path is None:
            return self.page(error=f"There is no picture {row}.", status=404)
        name = html.escape(path.name)
        shown = f"<p class='asked'><img alt='{name}' src='/picture/{row}'></p>"
        return self.results(int(row), above=shown)

    def path(self, row: str) -> pathlib.Path | None:
        """Returns the picture file of an indexed row, or None if there is none."""
        # Requests name rows, not paths. The check below also refuses links out of the folder.
        if not re.fullmatch("[0-9]{1,9}", row) or int(row) >= self.count:
            return None
        origin = self.model.searched.embeddings.origins[int(row)]
        path = (self.images / origin.id).resolve()
        return path if path.is_relative_to(self.images.resolve()) else None

    def picture(self, row: str, size: int) -> Response:
        """Answers with a picture.

        Args:
            row: Row of the picture in the index.
            size: Longest side in pixels.

        Returns:
            A JPEG file, or status 404 if there is no such picture.
        """
        path = self.path(row)
        try:
            if path is None:
                raise FileNotFoundError
            status = path.stat()
            version = status.st_mtime_ns, status.st_size
            return Response(_jpeg(path, size, version, self.decoder), "image/jpeg")
        except Exception:  # the file was removed or damaged after it was indexed
            return Response(b"no such picture", "text/plain", 404)

    def results(
        self, query: Any, text: str = "", *, above: str = "", calibrated: bool = False
    ) -> Response:
        """Searches and returns the page with the results.

        Args:
            query: Text, `PIL.Image.Image`, or row of an indexed picture.
            text: Text for the search field.
            above: HTML above the results.
            calibrated: Rank by calibrated scores.
        """
        began = time.perf_counter()
        try:
            if isinstance(query, int):
                searching = self.searcher.submit(self.model.similar, query, self.top)
            else:
                search = functools.partial(self.model.search, calibrated=calibrated)
                searching = self.searcher.submit(search, query, self.top)
            hits = searching.result()
        except checks.InputError as error:
            return self.page(text, error=str(error), calibrated=calibrated, status=400)
        typical = self.typical[calibrated] if isinstance(query, str) else None
        scores, note = [f"{hit.score:.3f}" for hit in hits], "Scores are cosines."
        if typical is not None:
            mean, deviation = typical
            scores = [f"{(hit.score - mean) / deviation:+.1f}" for hit in hits]
            # The largest of n normal scores is about this quantile.
            chance = statistics.NormalDist().inv_cdf(1 - 1 / (self.count + 1))
            note = "Scores are standard deviations above the mean of training texts; "
            note += f"among {self.count} pictures, chance alone reaches {chance:+.1f}."
        cards = "".join(map(self._card, hits, scores, self._captioned([hit.row for hit in hits])))
        took = f"The best {len(hits)} of {self.count} in {time.perf_counter() - began:.2f} s."
        shown = f"{above}<p class='small'>{took} {note}</p><div class='cards'>{cards}</div>"
        return self.page(text, shown, calibrated=calibrated)

    def page(
        self,
        query: str = "",
        results: str = "",
        *,
        error: str = "",
        calibrated: bool = False,
        status: int = 200,
    ) -> Response:
        """Returns the page with results or an error message.

        Args:
            query: Text for the search field.
            results: HTML of the results.
            error: Error message, or "".
            calibrated: Tick the box for calibrated scores.
            status: HTTP status.
        """
        filled = string.Template(PAGE.read_text(encoding="utf-8")).substitute(
            title=html.escape(query or "Search pictures"),
            query=html.escape(query),
            count=self.count,
            focus="" if results else "autofocus",
            calibrated="checked" if calibrated else "",
            calibration="" if self.model.aligner.calibration else "hidden",
            error=html.escape(error),
            results=results,
        )
        return Response(filled.encode(errors="replace"), status=status)

    @property
    def count(self) -> int:
        """Number of pictures."""
        return len(self.model.searched.features)

    def _captioned(self, rows: list[int]) -> list[bool | None]:
        """Returns True for rows that were trained on with a caption, or None if unknown."""
        if self.pairs is None:
            return [None] * len(rows)
        found = self.model.searched.embeddings.rows[rows]
        return list((_unit(found) @ self.pairs.T).max(axis=1) > SAME)

    def _card(self, hit: model_lib.Hit, score: str, seen: bool | None) -> str:
        caption, name = html.escape(self.caption(hit.id)), html.escape(hit.id)
        tag = "" if seen is None else "no caption in training"
        tag = "<span>captioned in training</span>" if seen else tag
        return f"""<figure><a href='/large/{hit.row}'><img alt='{caption or name}'
            src='/picture/{hit.row}' loading='lazy'></a><figcaption><a class='like'
            href='/?like={hit.row}'>similar</a><b>{score}</b><br>{caption and f"<q>{caption}</q>"}
            <div title='{name}'>{name.rpartition("/")[2]}</div>{tag}</figcaption></figure>"""


@functools.lru_cache(maxsize=256)
def _jpeg(
    path: pathlib.Path, size: int, version: tuple[int, int], decoder: futures.Executor
) -> bytes:
    """Returns a smaller copy of a picture. Another `version` of the file is read again."""
    del version
    return decoder.submit(_smaller, path, size).result()


def _smaller(path: pathlib.Path, size: int) -> bytes:
    picture, buffer = items.on_white(items.oriented(path)), io.BytesIO()
    picture.thumbnail((size, size))
    picture.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def _read_upload(content: bytes) -> tuple[Any, str]:
    """Returns a picture and the HTML of its thumbnail."""
    picture = items.oriented(content, memory=MEMORY)
    return picture, report.thumbnail(picture, "the picture searched for")


def _unit(rows: np.ndarray) -> np.ndarray:
    rows = np.asarray(rows, np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def training_pairs(aligned: aligner.Aligner, side: str) -> np.ndarray | None:
    """Reads one side of the pairs that a run was trained on.

    Args:
        aligned: Aligner of a run.
        side: "x" or "y".

    Returns:
        Unit embeddings, shape [n, d_x] or [n, d_y]. None if the run did not read files, or if they
        cannot be read any more. The latter is printed.
    """
    settings = aligned.info.get("settings", {})
    if settings.get("data", {}).get("name") != "files":
        return None
    try:
        dataset = run_lib.load_dataset(FrozenConfigDict(settings))
    except checks.InputError as error:
        print(f"captioned pictures cannot be marked: {error}", file=sys.stderr)
        return None
    return _unit(dataset.pairs_x if side == "x" else dataset.pairs_y)


def build(
    searcher: model_lib.Model, images: pathlib.Path, captions: pathlib.Path | None, *, top: int
) -> Site:
    """Reads captions, training pictures and typical scores.

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

    side = searcher.searched.side
    other = "y" if side == "x" else "x"
    pairs = training_pairs(searcher.aligner, side)
    typical = {mode: searcher.typical(other, calibrated=mode) for mode in (False, True)}
    searcher.search("a picture")  # compiles the programs, so that the first visitor need not wait
    return Site(searcher, images, caption, pairs, typical, top)


def main() -> None:
    """Loads the model and serves until interrupted."""
    images = model_flags.IMAGES.value
    if images is None:
        raise checks.InputError("images is not set; pass --images=FOLDER")
    site = build(model_flags.load(images), images, _CAPTIONS.value, top=model_flags.TOP.value)
    with (
        web.Server(site, _HOST.value, _PORT.value) as server,
        contextlib.suppress(KeyboardInterrupt),
    ):
        host, port = str(server.server_address[0]), server.server_port
        print(f"Serving {site.count} pictures at http://{host}:{port}/", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    cli.run(main, choices=CHOICES)
