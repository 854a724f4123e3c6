"""Sends mixed and hostile requests to a running search page: hostile_requests.py PORT COUNT."""

import collections
import concurrent.futures
import itertools
import socket
import struct
import sys
import zlib

LOCAL = b"Host: localhost\r\n"


def png(width, height, *, complete=True):
    """Returns a grey PNG of a few kilobytes, or one without its pixels."""

    def chunk(kind, content):
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    rows = zlib.compress((b"\0" + b"\x80" * width) * height) if complete else b""
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def eps(program=b"showpage"):
    """Returns a PostScript file."""
    return b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\n" + program + b"\n"


def request(line, *headers, host=LOCAL, body=None):
    """Returns a request as bytes."""
    length = [] if body is None else [b"Content-Length: %d" % len(body)]
    lines = b"".join(one + b"\r\n" for one in (*headers, *length))
    return line + b" HTTP/1.1\r\n" + host + lines + b"\r\n" + (body or b"")


def upload(content, *headers, line=b"POST /"):
    return request(line, *headers, body=content)


# Name: request and the statuses of its responses.
ORDINARY = {
    "start": (request(b"GET /"), [200]),
    "head": (request(b"HEAD /"), [200]),
    "text": (request(b"GET /?q=a+red+square"), [200]),
    "calibrated": (request(b"GET /?q=blue&calibrated=on"), [200]),
    "no utf-8": (request(b"GET /?q=%ff%fe\xe9"), [200]),
    "picture": (upload(png(30, 20)), [200]),
    "same origin": (upload(png(9, 9), b"Origin: http://localhost"), [200]),
    "two at once": (request(b"GET /") + request(b"GET /"), [200, 200]),
    "API": (request(b"GET /api/search?q=a+red+square&k=3"), [200]),
    "wrong number": (request(b"GET /api/search?q=a&k=-1"), [400]),
    "body of GET": (request(b"GET /", body=b"GET /none HTTP/1.1\r\n\r\n"), [200]),
    "absolute": (request(b"GET http://localhost/?q=green"), [200]),
    "no page": (request(b"GET /none"), [404]),
    "traversal": (request(b"GET /picture/..%2f..%2fcaptions.csv"), [404]),
    "null": (request(b"GET /\0"), [404]),
}
HOSTILE = {
    "bracket in Host": (request(b"GET /", host=b"Host: [::1\r\n"), [400]),
    "bracket in address": (request(b"GET http://[bad/"), [400]),
    "no Host": (request(b"GET /", host=b""), [400]),
    "two Hosts": (request(b"GET /", b"Host: evil.example"), [400]),
    "user in Host": (request(b"GET /", host=b"Host: evil@localhost\r\n"), [400]),
    "foreign Host": (request(b"GET /", host=b"Host: evil.example\r\n"), [403]),
    "foreign origin": (upload(png(9, 9), b"Origin: https://evil.example"), [403]),
    "hidden origin": (upload(png(9, 9), b"Origin: null"), [403]),
    "other port": (upload(png(9, 9), b"Origin: http://localhost:1"), [403]),
    "5,000 digits": (request(b"POST /", b"Content-Length: " + b"9" * 5000), [413]),
    "negative length": (request(b"POST /", b"Content-Length: -1"), [400]),
    "word as length": (request(b"POST /", b"Content-Length: ten"), [400]),
    "two lengths": (upload(b"ab", b"Content-Length: 1"), [400]),
    "no length": (request(b"POST /"), [411]),
    "chunks": (request(b"POST /", b"Transfer-Encoding: chunked") + b"1\r\na\r\n0\r\n\r\n", [411]),
    "cut short": (request(b"POST /", b"Content-Length: 100") + b"abc", [400]),
    "no colon": (request(b"GET /", b"nonsense"), [400]),
    "space before colon": (request(b"GET /", b"Content-Length : 9"), [400]),
    "long address": (request(b"GET /" + b"a" * 70_000), [414]),
    "long header": (request(b"GET /", b"X: " + b"a" * 70_000), [431]),
    "many headers": (request(b"GET /", *[b"X: 1"] * 200), [431]),
    "put": (upload(b"abc", line=b"PUT /"), [405]),
    "delete": (request(b"DELETE /picture/0"), [405]),
    "options": (request(b"OPTIONS *"), [405]),
    "post elsewhere": (upload(png(9, 9), line=b"POST /picture/0"), [405]),
    "unknown method": (request(b"BREW /"), [501]),
    "HTTP/2": (b"GET / HTTP/2.0\r\n" + LOCAL + b"\r\n", [505]),
    "HTTP/0.9": (b"GET /\r\n\r\n", [400]),
    "empty line": (b"\r\n", [400]),
    "TLS": (b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03 a b c\r\n\r\n", [400]),
    "PostScript": (upload(eps()), [400]),
    "text file": (upload(b"no picture"), [400]),
    "empty file": (upload(b""), [400]),
    "large picture": (upload(png(13_300, 13_300, complete=False)), [400]),
    "huge picture": (upload(png(2**31 - 1, 2**31 - 1, complete=False)), [400]),
    "narrow picture": (upload(png(30_000, 1)), [400]),
    "damaged picture": (upload(png(90, 90)[:60]), [400]),
}


def statuses(port, sent):
    """Sends bytes on a new connection. Returns the statuses of all responses."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as stream:
            found = []
            while line := stream.readline():
                found.append(int(line.split()[1]))
                length = 0
                while (header := stream.readline().strip()) != b"":
                    name, _, value = header.partition(b": ")
                    length = int(value) if name == b"Content-Length" else length
                if not sent.startswith(b"HEAD"):
                    assert len(stream.read(length)) == length
    return found


def wrong_answers(port, count):
    """Sends requests of all kinds from eight threads. Returns the unexpected answers by kind."""
    kinds = [*ORDINARY.items(), *HOSTILE.items()]

    def ask(kind):
        name, (sent, expected) = kind
        try:
            found = statuses(port, sent)
        except OSError as error:
            found = [repr(error)]
        return None if found == expected else (name, tuple(found))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = pool.map(ask, itertools.islice(itertools.cycle(kinds), count))
        return collections.Counter(answer for answer in answers if answer is not None)


if __name__ == "__main__":
    print(f"{len(HOSTILE)} hostile kinds:", dict(wrong_answers(*map(int, sys.argv[1:]))) or "ok")
