"""HTTP server of the search page: reads requests, refuses malformed and foreign ones, and answers.

Every request is answered, and none ends with a traceback. Requests are not logged, because queries
are private.
"""

import contextlib
import email.errors
import email.message
import http.server
import io
import re
import socket
import sys
import threading
from typing import Any, NamedTuple, Protocol

from sotalign_jax import checks

LARGEST = 64 * 2**20
"""Most bytes of an uploaded file."""
DROPPED = 16 * LARGEST
"""Most bytes of an upload that are read and dropped, so that its sender reads the answer."""
SMALL = 2**20
"""Most bytes of an upload that does not wait for others. A larger one is held in memory, too."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")
HOST = re.compile(r"\[([0-9a-f:.]+)\](:[0-9]{1,5})?|([a-z0-9._-]+)(:[0-9]{1,5})?", re.ASCII)
"""Host with an optional port, in lower case."""
FIELD = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)
"""Name of a header."""
DEFECTS = (
    email.errors.FirstHeaderLineIsContinuationDefect,
    email.errors.MisplacedEnvelopeHeaderDefect,
    email.errors.MissingHeaderBodySeparatorDefect,
)
"""Lines among the headers that are none. Others concern multipart bodies, which are not parsed."""
METHODS = ("GET", "HEAD", "POST")
# The page has inline styles and scripts only, so nothing else may be loaded or executed.
POLICY = "default-src 'none'; img-src 'self' data: blob:; connect-src 'self'; form-action 'self'; "
POLICY += "style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
POLICY += "base-uri 'none'; frame-ancestors 'none'"
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",  # pages of other servers show no pictures
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # pictures may change
}


class Response(NamedTuple):
    """Response to one request: body, content type and HTTP status."""

    content: bytes
    kind: str = "text/html; charset=utf-8"
    status: int = 200


class Site(Protocol):
    """Source of the answers."""

    def answer(self, method: str, address: str, content: bytes) -> Response:
        """Answers a request.

        Args:
            method: "GET" or "POST".
            address: Path and query.
            content: Content of an upload. It has `LARGEST` + 1 bytes if it is larger.
        """
        ...


class Refused(Exception):
    """A request that is not passed to the site: status and reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Handler(http.server.BaseHTTPRequestHandler):
    """Passes requests to the site of its server."""

    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds until an idle connection is closed
    raw_requestline: bytes
    server: "Server"

    def do_GET(self) -> None:
        try:
            host = _host(self.headers)
            _check_sender(self.headers, host, local=self.server.server_address[0] in LOOPBACK)
            length = self._length()
            with self.server.uploads if length > SMALL else contextlib.nullcontext():
                content = self._content(length)
                if self.command not in METHODS:
                    raise Refused(405, f"use {', '.join(METHODS)}")
                method = "POST" if self.command == "POST" else "GET"
                response = self.server.site.answer(method, self.path, content)
        except Refused as refused:
            self.send_error(refused.status, str(refused))
        except TimeoutError:
            self.send_error(408, "the upload took too long; send it again")
        except ConnectionError:
            self.close_connection = True
        # A fault of this program must not end the connection without an answer.
        except Exception as error:
            print(f"error: {type(error).__name__}: {checks.first_line(error)}", file=sys.stderr)
            self.send_error(500, "the search failed; the terminal of the server shows the reason")
        else:
            self._send(response)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = do_GET

    def _length(self) -> int:
        """Returns the length of the body of a request."""
        length = _content_length(self.headers)
        if length is None and self.command == "POST":
            raise Refused(411, "send the file with its Content-Length")
        if length is not None and length > DROPPED:
            raise Refused(413, f"the file is too large; send at most {LARGEST >> 20} MB")
        return length or 0

    def _content(self, length: int) -> bytes:
        """Reads the body of a request, so that the next request starts behind it."""
        left, content = length, io.BytesIO()
        while left and (chunk := self.rfile.read(min(left, 2**20))):
            left -= len(chunk)
            # A browser reads no response before it has sent everything, so the rest of a file that
            # is too large is read and dropped.
            if self.command == "POST" and content.tell() <= LARGEST:
                content.write(chunk)
        if left:
            raise Refused(400, "the upload was cut short; send it again")
        return content.getvalue()[: LARGEST + 1]

    def parse_request(self) -> bool:
        # The method of the base class closes the connection without an answer.
        if not self.raw_requestline.split():
            self.requestline, self.command, self.request_version = "", "", "HTTP/1.1"
            self.send_error(400, "the request is empty")
            return False
        return super().parse_request()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers with a line of text and closes the connection.

        What follows a malformed request cannot be read as another request.
        """
        self.close_connection = True
        text = message or explain or self.responses[code][0]
        self._send(Response(text.encode("ascii", "replace"), "text/plain", code))
        # Closing a connection with unread data discards the answer before it is read.
        with contextlib.suppress(OSError):
            self.connection.settimeout(5)
            self.connection.shutdown(socket.SHUT_WR)
            left = DROPPED
            while left > 0 and (chunk := self.rfile.read1(2**20)):
                left -= len(chunk)

    def _send(self, response: Response) -> None:
        if self.request_version == "HTTP/0.9":  # its answers have no status
            self.request_version = "HTTP/1.0"
        try:
            self.send_response(response.status)
            self.send_header("Content-Type", response.kind)
            self.send_header("Content-Length", str(len(response.content)))
            if response.status == 405:
                self.send_header("Allow", ", ".join(METHODS))
            if self.close_connection:
                self.send_header("Connection", "close")
            for name, value in HEADERS.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(response.content)
        except (ConnectionError, TimeoutError):  # the browser has closed the connection
            self.close_connection = True

    def version_string(self) -> str:
        """Returns the name of the server without its versions."""
        return "sotalign-jax"

    def log_message(self, *_: Any) -> None:
        """Prints nothing, because queries are private."""


def _host(headers: email.message.Message) -> re.Match[str]:
    """Returns the checked Host of a request."""
    broken = any(isinstance(defect, DEFECTS) for defect in headers.defects)
    if broken or not all(FIELD.fullmatch(name) for name in headers):
        raise Refused(400, "a header is malformed")
    hosts = headers.get_all("Host", [])
    host = HOST.fullmatch(hosts[0].strip().lower()) if len(hosts) == 1 else None
    if host is None:
        raise Refused(400, "the header Host must be there once, with the name of this server")
    return host


def _check_sender(headers: email.message.Message, host: re.Match[str], *, local: bool) -> None:
    """Raises if a page of another server has sent a request."""
    if local and (host[1] or host[3]) not in LOOPBACK:
        # DNS rebinding: a page on another server uses a name that resolves to this computer.
        raise Refused(403, "open this page as localhost")
    for origin in headers.get_all("Origin", []):
        if origin.strip().lower().partition("://")[2] != host[0]:
            raise Refused(403, "pages of other servers may not use this one")


def _content_length(headers: email.message.Message) -> int | None:
    """Returns the length of a request's body, or None if it is not stated."""
    if "Transfer-Encoding" in headers:
        raise Refused(411, "send the file with its Content-Length")
    lengths = headers.get_all("Content-Length", [])
    if not lengths:
        return None
    if len(lengths) > 1 or not re.fullmatch("[0-9]+", lengths[0].strip(), re.ASCII):
        raise Refused(400, "Content-Length must be one number")
    # Python converts at most 4,300 digits.
    return int(lengths[0]) if len(lengths[0]) < 19 else DROPPED + 1


class Server(http.server.ThreadingHTTPServer):
    """Web server of one site."""

    request_queue_size = 128  # a page asks for many pictures at once

    def __init__(self, site: Site, host: str, port: int) -> None:
        self.site = site
        self.uploads = threading.Semaphore(4)
        try:
            super().__init__((host, port), Handler)
        except OSError as error:
            text = f"port {port} of {host} cannot be used ({error.strerror})"
            raise checks.InputError(f"{text}; pass another --port or --host") from error

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints one line for an error, unless the client has closed the connection."""
        error = sys.exception()
        if error is not None and not isinstance(error, ConnectionError | TimeoutError):
            print(f"error: {type(error).__name__}: {checks.first_line(error)}", file=sys.stderr)
