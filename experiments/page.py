"""Pages of results to look at: single HTML files that need nothing but themselves."""

import base64
import html
import io
from collections.abc import Mapping
from typing import Any

from experiments.extract import items


def page(title: str, *parts: str) -> str:
    """A whole page under a title; the parts are HTML."""
    return "\n".join(
        [
            "<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'>",
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body><main>",
            *parts,
            "</main></body></html>\n",
        ]
    )


def section(title: str, *parts: str, name: str = "") -> str:
    """Parts in a frame; `name` is what a link calls it."""
    identity = f" id='{name}'" if name else ""
    return "\n".join([f"<section{identity}><h2>{html.escape(title)}</h2>", *parts, "</section>"])


def text(content: str, kind: str = "small") -> str:
    """A paragraph."""
    return f"<p class='{kind}'>{html.escape(content)}</p>"


def code(content: str) -> str:
    """Text in lines of its own, as typed."""
    return f"<pre>{html.escape(content)}</pre>"


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


def card(title: str, *parts: str, kind: str = "") -> str:
    """One of several boxes that stand side by side, for `cards`."""
    return f"<figure class='{kind}'>{''.join(parts)}<figcaption>{title}</figcaption></figure>"


def cards(*boxes: str) -> str:
    """Boxes in rows, as many to a row as fit."""
    return f"<div class='cards'>{''.join(boxes)}</div>"


def environment(here: Mapping[str, Any]) -> str:
    """What results were made on, as `workdir.environment` tells it."""
    facts = {**here, "devices": ", ".join(here["devices"]), **here["packages"]}
    rows = [
        f"<tr><td>{k}</td><td>{html.escape(str(v))}</td></tr>"
        for k, v in facts.items()
        if k != "packages"
    ]
    return section("Environment", f"<table>{''.join(rows)}</table>", name="environment")


STYLE = """
:root { --ink: #1d2430; --soft: #667085; --line: #e4e7ec; --wash: #f6f7f9; --accent: #1f6fb2; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--wash); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
header, section, .verdicts { background: #fff; border: 1px solid var(--line); border-radius: 10px; }
header, section { padding: 1.2rem 1.4rem; margin: 1.2rem 0; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .6rem; }
h2 { font-size: 1.15rem; margin: .3rem 0 .5rem; }
.name { color: var(--accent); margin-right: .3rem; }
p { margin: .5rem 0; }
.claim { font-weight: 500; }
.small, caption, .theirs { color: var(--soft); }
.small, caption, table { font-size: .875rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; min-width: 50%; }
caption { text-align: left; padding: .2rem 0; font-style: italic; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
.verdicts td, .verdicts th, #environment td { text-align: left; white-space: normal; }
.verdicts { border-collapse: separate; border-spacing: 0; width: 100%; }
.badge { display: inline-block; padding: .05rem .6rem; border-radius: 999px; font-size: .8rem;
  font-weight: 600; white-space: nowrap; }
.badge.held { background: #dcf5e6; color: #14683a; }
.badge.failed { background: #fde3e1; color: #96241b; }
.badge.open { background: #eceef2; color: #4a5365; }
img { display: block; max-width: 100%; max-height: 30rem; margin: .8rem auto; }
pre { background: var(--wash); border: 1px solid var(--line); border-radius: 6px;
  padding: .6rem .8rem; overflow-x: auto; font-size: .8rem; margin: .8rem 0 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(12rem, 1fr)); gap: .8rem; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 8px; overflow: hidden; }
figure img { width: 100%; height: 11rem; object-fit: contain; margin: 0; background: #fff; }
figcaption { padding: .6rem .8rem; font-size: .8rem; color: var(--soft); overflow-wrap: anywhere; }
figcaption b { color: var(--ink); }
ol { margin: .4rem 0 0; padding-left: 1.2rem; }
.right { color: #14683a; }
.wrong { color: #96241b; }
a { color: var(--accent); text-decoration: none; }
"""
