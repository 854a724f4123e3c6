"""Fences the doctests of docstrings, which the site would otherwise show as quotations."""

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^( *)>>> .*(?:\n\1(?! *$).*)*", re.MULTILINE)


def fence(text: str) -> str:
    """Puts every doctest of a docstring into a code block, which ends at the next empty line."""
    return _DOCTEST.sub(r"\1```pycon\n\g<0>\n\1```", text)


class Doctests(griffe.Extension):
    """Extension of griffe, which reads the docstrings for mkdocstrings."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Fences the doctests of an object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = fence(obj.docstring.value)
