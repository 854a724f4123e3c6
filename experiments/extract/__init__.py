"""Raw data to embeddings: datasets through encoders to files, and search among them."""

import pathlib
import textwrap
from collections.abc import Iterable
from typing import Any

from absl import flags

flags.disclaim_key_flags()  # a flag belongs to the command that calls `path_flag`


class _PathParser(flags.ArgumentParser[pathlib.Path]):
    def parse(self, argument: str) -> pathlib.Path:
        return pathlib.Path(argument).expanduser()


def path_flag(name: str, default: str | None, text: str, **options: Any) -> flags.FlagHolder[Any]:
    """Defines a flag whose value is a path, ~ included."""
    return flags.DEFINE(_PathParser(), name, default, text, **options)


def one_of(names: Iterable[str]) -> str:
    """The help of a flag with many choices; names with hyphens stay in one piece."""
    listed = textwrap.fill(", ".join(names), 72, break_on_hyphens=False)
    return f"One of\n{listed}"
