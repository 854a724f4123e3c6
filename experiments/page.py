"""Pages of results to look at: single HTML files that need nothing but themselves."""

import base64
import html
import io
import pathlib
from typing import Any

from experiments.extract import items

STYLE = pathlib.Path(__file__).with_name("page.css")
HEAD = """<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'>
<meta name='viewport' content='width=device-width, initial-scale=1'>
<title>{title}</title><style>{style}</style></head><body><main>"""


def page(title: str, below: str, *parts: str) -> str:
    """A whole page: its title, what stands below it, and other parts, as HTML."""
    head = HEAD.format(title=html.escape(title), style=STYLE.read_text())
    header = f"<header><h1>{html.escape(title)}</h1>{below}</header>"
    return "\n".join([head, header, *parts, "</main></body></html>\n"])


def section(title: str, *parts: str) -> str:
    """Parts in a frame."""
    return "\n".join([f"<section><h2>{html.escape(title)}</h2>", *parts, "</section>"])


def text(content: str) -> str:
    """A paragraph in small print."""
    return f"<p class='small'>{html.escape(content)}</p>"


def image(content: bytes, alt: str, kind: str = "png") -> str:
    """A picture whose bytes are in the page."""
    data = base64.b64encode(content).decode()
    return f"<img alt='{html.escape(alt, quote=True)}' src='data:image/{kind};base64,{data}'>"


def thumbnail(picture: Any, alt: str, side: int = 360) -> str:
    """A `PIL.Image`, made to fit a square of so many pixels, on white."""
    shown, buffer = items.on_white(picture), io.BytesIO()
    shown.thumbnail((side, side))
    shown.save(buffer, "JPEG", quality=85)
    return image(buffer.getvalue(), alt, "jpeg")


def cards(*boxes: tuple[str, str]) -> str:
    """Captions and pictures in boxes, as many to a row as fit."""
    shown = (f"<figure>{one}<figcaption>{title}</figcaption></figure>" for title, one in boxes)
    return f"<div class='cards'>{''.join(shown)}</div>"
