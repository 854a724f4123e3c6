"""Pages of the search site: answers to requests as HTML, JSON or pictures.

| address | answer |
|---|---|
| `/` | the start page; a POST with a picture file answers with similar pictures |
| `/?q=TEXT`, `/?like=NAME` | results; `&k=20` sets their number, `&calibrated=off` the scores |
| `/picture/NAME`, `/large/NAME` | a picture of the folder |
| `/api/search`, `/api/openapi.json` | results as JSON, and their description |
"""

import dataclasses
import functools
import html
import io
import json
import pathlib
import re
import string
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

from sotalign_jax import checks
from sotalign_jax.search import items, markup, web
from sotalign_jax.search import model as model_lib
from sotalign_jax.search.web import Response

PAGE = pathlib.Path(__file__).with_name("serve.html")
API = pathlib.Path(__file__).with_name("serve_api.json")
SIZES = {"picture": 360, "large": 1600}
"""Longest side of a picture in pixels, by the first part of its URL."""
MEMORY = 320 * 10**6
"""Most memory to decode an upload: 53 million pixels of JPEG, 40 million of PNG, 20 of WEBP."""
MOST = 200
"""Most results of a request, unless --top is larger."""
NOTHING = "Nothing convincing found. These are the nearest pictures; try other words."
MOSAIC = 24
"""Number of pictures on the start page."""

_one_thread = functools.partial(futures.ThreadPoolExecutor, 1)


class Missing(checks.InputError):
    """Raised for a picture or a page that does not exist."""


class Query(NamedTuple):
    """Search of one request.

    Attributes:
        content: Text, `PIL.Image.Image`, or row of an indexed picture.
        k: Number of results.
        calibrated: Rank by calibrated scores.
        asked: Parameters of its address.
        above: HTML above the results.
    """

    content: Any
    k: int
    calibrated: bool
    asked: Mapping[str, str]
    above: str = ""


@dataclasses.dataclass(frozen=True)
class Site:
    """State shared by all requests.

    Attributes:
        model: Model with the pictures indexed.
        images: Folder of the pictures.
        caption: Function that returns a picture's caption by its name, or "".
        captioned: Names of the pictures that were trained on with a caption, or None if unknown.
        top: Number of results.
        examples: Texts that the start page suggests.
        tested: Names of the pictures whose captions were held out for testing.
        searcher: Thread that searches, so that requests use the encoders one after another.
        decoder: Thread that decodes pictures, because each one may take `items.MEMORY`.
    """

    model: model_lib.Model
    images: pathlib.Path
    caption: Callable[[str], str]
    captioned: frozenset[str] | None
    top: int
    examples: Sequence[str] = ()
    tested: frozenset[str] = frozenset()
    # A lock would run in the threads of the requests. Each thread keeps memory that it has freed.
    searcher: futures.Executor = dataclasses.field(default_factory=_one_thread)
    decoder: futures.Executor = dataclasses.field(default_factory=_one_thread)

    def answer(self, method: str, address: str, content: bytes = b"") -> Response:
        """Answers a request. See `web.Site.answer`."""
        try:
            parts = urllib.parse.urlsplit(address)
        except ValueError:
            return self.page(error="This address is malformed.", status=400)
        # File names need not be UTF-8. Python keeps such bytes as surrogates.
        path = urllib.parse.unquote(parts.path, errors="surrogateescape")
        fields = urllib.parse.parse_qs(
            parts.query, keep_blank_values=True, errors="surrogateescape"
        )
        asked = {name: values[-1] for name, values in fields.items()}
        kind, _, name = path[1:].partition("/")
        if method == "POST":
            if path != "/":
                return self.page(error=f"{path} accepts no files; send them to /.", status=405)
            return self.upload(content, asked)
        if kind in SIZES:
            return self.picture(name, SIZES[kind])
        if path == "/api/openapi.json":
            return Response(API.read_bytes(), "application/json")
        if path == "/api/search":
            return self.json(asked)
        if path != "/":
            return self.page(error=f"{path}: there is no such page.", status=404)
        return self.results(asked) if {"q", "like"} & set(asked) else self.page()

    def upload(self, content: bytes, asked: Mapping[str, str]) -> Response:
        """Answers an upload with the pictures most similar to it."""
        if len(content) > web.LARGEST:
            text = f"The file is too large; choose one of at most {web.LARGEST >> 20} MB."
            return self.page(error=text, status=413)
        try:
            picture, thumbnail = self.decoder.submit(_read_upload, content).result()
        except Exception as error:  # decoders raise errors of many kinds for damaged files
            text = f"The picture cannot be read: {checks.first_line(error)}"
            return self.page(error=text, status=400)
        return self.results(asked, picture, f"<p class='asked'>{thumbnail}</p>")

    def picture(self, name: str, size: int) -> Response:
        """Answers with a picture.

        Args:
            name: Name of an indexed picture.
            size: Longest side in pixels.

        Returns:
            A JPEG file, or a WEBP file if it has transparent pixels. Status 404 if there is no
            such picture.
        """
        try:
            path = self.path(name)
            status = path.stat()
            version = status.st_mtime_ns, status.st_size
            return _shrunk(path, size, version, self.decoder)
        except Exception:  # the file was removed or damaged after it was indexed
            return Response(b"no such picture", "text/plain", 404)

    def path(self, name: str) -> pathlib.Path:
        """Returns the file of an indexed picture.

        Raises:
            Missing: No picture has this name, or it is a link out of the folder.
        """
        if name in self.rows:
            path = (self.images / name).resolve()
            if path.is_relative_to(self.images.resolve()):
                return path
        raise Missing(f"there is no picture {name!r}; check the address")

    def query(self, asked: Mapping[str, str], picture: Any = None, above: str = "") -> Query:
        """Returns the search that a request asks for.

        Args:
            asked: Parameters of its address.
            picture: Uploaded `PIL.Image.Image`, or None.
            above: HTML above the results.

        Raises:
            InputError: A parameter is missing or wrong.
        """
        number = asked.get("k", str(self.top))
        if not re.fullmatch("[0-9]{1,9}", number) or not 1 <= int(number) <= self.most:
            raise checks.InputError(f"k must be in 1 ... {self.most}, got {number!r}")
        query = Query(picture, int(number), "q" in asked and self._calibrated(asked), asked, above)
        if picture is not None:
            return query
        if "like" in asked:
            self.path(asked["like"])
            name, address = html.escape(asked["like"]), _quoted(asked["like"])
            shown = f"<p class='asked'><img alt='{name}' src='/picture/{address}'></p>"
            return query._replace(content=self.rows[asked["like"]], above=shown)
        text = asked.get("q", "").encode(errors="surrogateescape").decode(errors="replace").strip()
        if not text:
            raise checks.InputError("Type a few words to search for.")
        return query._replace(content=text)

    def _calibrated(self, asked: Mapping[str, str]) -> bool:
        """Returns True for calibrated scores, by default the model's own choice."""
        if "calibrated" not in asked:
            return self.model.aligner.calibrated
        return asked["calibrated"] != "off"

    def find(self, query: Query) -> list[model_lib.Hit]:
        """Searches. Raises InputError if the query cannot be searched for."""
        if isinstance(query.content, int):
            return self.searcher.submit(self.model.similar, query.content, query.k).result()
        search = functools.partial(self.model.search, calibrated=query.calibrated)
        return self.searcher.submit(search, query.content, query.k).result()

    def warning(self, query: Query) -> str:
        """Returns a sentence if the text encoder cannot read a query, or else ""."""
        # A tokenizer fails, or changes another text's length limit, if two threads use it at once.
        return self.searcher.submit(self.model.warning, query.content).result()

    def json(self, asked: Mapping[str, str]) -> Response:
        """Answers with results as JSON."""
        try:
            query = self.query(asked)
            hits = self.find(query)
        except checks.InputError as error:
            status = 404 if isinstance(error, Missing) else 400
            return _json({"error": str(error)}, status)
        results = [
            {
                "name": hit.id,
                "score": round(hit.score, 6),
                "confidence": None if hit.confidence is None else round(hit.confidence, 4),
                "word": hit.word or None,
                "caption": self.caption(hit.id),
                "captioned_in_training": self._seen(hit.id),
                "picture": f"/large/{_quoted(hit.id)}",
            }
            for hit in hits
        ]
        warning = self.warning(query) or None
        return _json({"pictures": self.count, "warning": warning, "results": results})

    def results(self, asked: Mapping[str, str], picture: Any = None, above: str = "") -> Response:
        """Searches and returns the page with the results.

        Args:
            asked: Parameters of the address.
            picture: Uploaded `PIL.Image.Image`, or None.
            above: HTML above the results.
        """
        began = time.perf_counter()
        calibrated = self._calibrated(asked)
        try:
            query = self.query(asked, picture, above)
            text = query.content if isinstance(query.content, str) else ""
            hits = self.find(query)
        except checks.InputError as error:
            status = 404 if isinstance(error, Missing) else 400
            asked_for = asked.get("q", "").strip()
            return self.page(asked_for, error=str(error), calibrated=calibrated, status=status)
        note = f"The best {len(hits)} of {self.count} in {time.perf_counter() - began:.2f} s."
        warning = self.warning(query)
        if not warning and hits and all(hit.word == "weak" for hit in hits):
            warning = NOTHING
        cards = "".join(map(self._card, hits, [query] * len(hits)))
        shown = f"<p class='warning'>{warning}</p>" if warning else ""
        shown += f"{query.above}<p class='small'>{note}</p><div class='cards'>{cards}</div>"
        if len(hits) == query.k < min(self.count, self.most):
            further = urllib.parse.urlencode(
                {**asked, "k": min(query.k + self.top, self.most)}, errors="surrogateescape"
            )
            address = html.escape(f"/?{further}")
            shown += f"<p class='next'><a class='more button' href='{address}'>More results</a></p>"
        return self.page(text, shown, calibrated=calibrated)

    def page(
        self,
        query: str = "",
        results: str = "",
        *,
        error: str = "",
        calibrated: bool | None = None,
        status: int = 200,
    ) -> Response:
        """Returns the page with results, or else the start page, with or without an error message.

        Args:
            query: Text for the search field.
            results: HTML of the results.
            error: Error message, or "".
            calibrated: Tick the box for calibrated scores. By default the model's own choice.
            status: HTTP status.
        """
        start = not results and not error
        calibrated = self.model.aligner.calibrated if calibrated is None else calibrated
        lead = "Describe what you look for, or choose, drop or paste a picture "
        lead += "to find similar ones."
        filled = string.Template(PAGE.read_text(encoding="utf-8")).substitute(
            title=html.escape(query or "Search pictures"),
            kind="start" if start else "",
            heading=f"Search {self.count:,} pictures",
            lead=f"<p class='lead'>{lead}</p>" if start else "",
            query=html.escape(query),
            example=html.escape((*self.examples, "a red car")[0]),
            focus="" if results else "autofocus",
            calibrated="checked" if calibrated else "",
            calibration="" if self.model.aligner.calibration else "hidden",
            error=html.escape(error),
            results=results or self._start,
            largest=web.LARGEST,
            megabytes=web.LARGEST >> 20,
            # Phones convert their own formats to one of this list.
            accept=",".join(f"image/{name.lower()}" for name in items.FORMATS),
        )
        return Response(filled.encode(errors="replace"), status=status)

    @property
    def count(self) -> int:
        """Number of pictures."""
        return len(self.model.searched.features)

    @property
    def most(self) -> int:
        """Most results of a request."""
        return max(MOST, self.top)

    @functools.cached_property
    def rows(self) -> dict[str, int]:
        """Rows of the pictures in the index, by name."""
        origins = self.model.searched.embeddings.origins
        return {origin.id: row for row, origin in enumerate(origins)}

    @functools.cached_property
    def _start(self) -> str:
        """HTML of the start page: example queries and a mosaic of pictures."""
        chips = "".join(
            f"<li><a class='button' href='/?{urllib.parse.urlencode({'q': text})}'>"
            f"{html.escape(text)}</a></li>"
            for text in self.examples
        )
        if chips:
            chips = f"<p class='small'>Captions that were not used in training:</p>{chips}"
            chips = chips.replace("<li>", "<ul class='chips'><li>", 1) + "</ul>"
        names = list(self.rows)[:: max(1, self.count // MOSAIC)][:MOSAIC]
        tiles = "".join(
            f"<a href='/?like={_quoted(name)}' title='Similar pictures'><img loading='lazy' "
            f"alt='{html.escape(self.caption(name) or name)}' src='/picture/{_quoted(name)}'></a>"
            for name in names
        )
        below = "<p class='small'>Pictures to start from:</p>"
        return f"{chips}{below}<div class='mosaic'>{tiles}</div>"

    def _seen(self, name: str) -> bool | None:
        """Returns True if a picture was trained on with a caption, or None if unknown."""
        return None if self.captioned is None else name in self.captioned

    def _card(self, hit: model_lib.Hit, query: Query) -> str:
        """Returns the HTML of a result."""
        caption, name = html.escape(self.caption(hit.id)), html.escape(hit.id)
        address = _quoted(hit.id)
        told = "The picture and its caption were used in training"
        badge = f"<span class='badge' title='{told}'>captioned</span>" if self._seen(hit.id) else ""
        said = f"<q>{caption}</q>" if caption else ""
        if caption and hit.id in self.tested:
            said += "<span>caption held out for testing</span>"
        return f"""<figure class='{hit.word}'><a class='open' href='/large/{address}'><img
            alt='{caption or name}' src='/picture/{address}' loading='lazy'>{badge}</a><figcaption>
            {_match(hit, query)}{said}<span class='name' title='{name}'>{
            name.rpartition("/")[2]
        }</span>
            <a class='like' href='/?like={address}'>similar</a></figcaption></figure>"""


def _match(hit: model_lib.Hit, query: Query) -> str:
    """Returns the HTML of a bar and words for the quality of a result."""
    told, filled = f"cosine {hit.score:.2f}", hit.score
    if hit.confidence is None and hit.word:
        return "<span class='match'>a guess</span>"
    if hit.confidence is not None:
        told, filled = f"{hit.word} match", hit.confidence
    elif not isinstance(query.content, str):
        told = f"{max(hit.score, 0):.0%} similar"
    elif query.calibrated:
        told = f"score {hit.score:.2f}"
    share = "" if hit.confidence is None else f", probability {hit.confidence:.0%}"
    width = 100 * min(max(filled, 0.02), 1)
    return f"""<span class='bar'><i style='width: {width:.0f}%'></i></span><span class='match'
            title='score {hit.score:.3f}{share}'>{told}</span>"""


@functools.lru_cache(maxsize=256)
def _shrunk(
    path: pathlib.Path, size: int, version: tuple[int, int], decoder: futures.Executor
) -> Response:
    """Returns a smaller copy of a picture. Another `version` of the file is read again."""
    del version
    return decoder.submit(_shrink, path, size).result()


def _shrink(path: pathlib.Path, size: int) -> Response:
    picture, buffer = items.oriented(path), io.BytesIO()
    # Transparent pixels show the colour of the page, which may be dark.
    kind = "WEBP" if items.is_transparent(picture) else "JPEG"
    picture = picture.convert("RGBA") if kind == "WEBP" else items.on_white(picture)
    picture.thumbnail((size, size))
    picture.save(buffer, kind, quality=85)
    return Response(buffer.getvalue(), f"image/{kind.lower()}")


def _read_upload(content: bytes) -> tuple[Any, str]:
    """Returns a picture and the HTML of its thumbnail."""
    picture = items.oriented(content, memory=MEMORY)
    return picture, markup.thumbnail(picture, "the picture searched for")


def _quoted(name: str) -> str:
    """Returns a name for an address, which is also safe in HTML."""
    return urllib.parse.quote(name, errors="surrogateescape")


def _json(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value).encode(), "application/json", status)
