"""Fences the doctests of docstrings, which the site would show as quotations."""

import re
from typing import Any

import griffe


class Doctests(griffe.Extension):
    """An extension of mkdocstrings' reader of Python."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Every example becomes a block of code up to the next empty line."""
        if obj.docstring is not None:
            value = obj.docstring.value
            fenced = re.sub(r"(?m)^>>> .*(?:\n.+)*", "```pycon\n\\g<0>\n```", value)
            obj.docstring.value = fenced
