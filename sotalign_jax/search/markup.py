"""HTML pages that refer to no other file."""

import base64
import html
import io
import json
import pathlib
from typing import Any

from sotalign_jax.search import items

STYLE = pathlib.Path(__file__).with_name("markup.css")
HEAD = """<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'>
<meta name='viewport' content='width=device-width, initial-scale=1'>
<title>{title}</title><style>{style}</style></head><body><main>"""


def page(title: str, below: str, *parts: str) -> str:
    """Returns a complete HTML page.

    Args:
        title: Title of the page, as plain text.
        below: HTML in the header, below the title.
        *parts: HTML of the body.
    """
    head = HEAD.format(title=html.escape(title), style=STYLE.read_text())
    header = f"<header><h1>{html.escape(title)}</h1>{below}</header>"
    return "\n".join([head, header, *parts, "</main></body></html>\n"])


def section(title: str, *parts: str) -> str:
    """Returns a framed section.

    Args:
        title: Title of the section, as plain text.
        *parts: HTML of its body.
    """
    return "\n".join([f"<section><h2>{html.escape(title)}</h2>", *parts, "</section>"])


def details(title: str, *parts: str) -> str:
    """Returns a section that is collapsed until the reader opens it.

    Args:
        title: Title of the section, as plain text.
        *parts: HTML of its body.
    """
    return "\n".join([f"<details><summary>{html.escape(title)}</summary>", *parts, "</details>"])


def pre(value: Any) -> str:
    """Returns a JSON value as preformatted text."""
    return f"<pre>{html.escape(json.dumps(value, indent=2))}</pre>"


def small(content: str) -> str:
    """Returns a paragraph in small print."""
    return f"<p class='small'>{html.escape(content)}</p>"


def image(content: bytes, alt: str, kind: str = "png") -> str:
    """Returns a picture that is embedded in the page.

    Args:
        content: Bytes of the picture file.
        alt: Alternative text.
        kind: Format of the file, such as "png".
    """
    data = base64.b64encode(content).decode()
    return f"<img alt='{html.escape(alt, quote=True)}' src='data:image/{kind};base64,{data}'>"


def thumbnail(picture: Any, alt: str) -> str:
    """Returns an embedded thumbnail. Transparent pixels become white.

    Args:
        picture: A `PIL.Image.Image`.
        alt: Alternative text.
    """
    shown, buffer = items.on_white(picture), io.BytesIO()
    shown.thumbnail((360, 360))
    shown.save(buffer, "JPEG", quality=85)
    return image(buffer.getvalue(), alt, "jpeg")


def cards(*boxes: tuple[str, str], kind: str = "cards") -> str:
    """Returns a grid of captioned pictures.

    Args:
        *boxes: HTML of the caption and of the picture of each card.
        kind: CSS class of the grid.
    """
    shown = (f"<figure>{one}<figcaption>{title}</figcaption></figure>" for title, one in boxes)
    return f"<div class='{kind}'>{''.join(shown)}</div>"
