"""Tar shards in the webdataset layout, as CC3M and CC12M are distributed."""

import functools
import itertools
import json
import pathlib
import tarfile
from collections.abc import Iterator
from typing import NamedTuple

from experiments.datasets import base
from sotalign_jax import checks


class Member(NamedTuple):
    """A file inside a tar: its suffix and where its bytes lie."""

    suffix: str
    tar: pathlib.Path
    offset: int
    size: int

    def read(self) -> bytes:
        """The file's bytes, without touching the rest of the tar."""
        with self.tar.open("rb") as file:
            file.seek(self.offset)
            content = file.read(self.size)
        if len(content) < self.size:
            raise EOFError(f"{self.tar.name} is cut short")
        return content


def webdataset(request: base.Request) -> base.Source:
    """Uncompressed .tar files; consecutive members `KEY.jpg`, `KEY.txt`, `KEY.json` are a sample.

    The caption is the .txt, or the "caption" of the .json. A split selects the tars that have it
    in their name. Ids are TAR/KEY, for keys often start anew in every tar.
    """
    tars = sorted(request.root.glob("*.tar")) if request.root.is_dir() else [request.root]
    tars = [tar for tar in tars if request.split in tar.name]
    if not tars:
        raise checks.InputError(
            f"root: {request.root} holds no .tar with {request.split!r} in its name"
        )
    return base.Source(
        {
            "image": functools.partial(_items, tars, _picture),
            "text": functools.partial(_items, tars, _caption),
        }
    )


def _items(tars: list[pathlib.Path], pick: object) -> Iterator[base.Item]:
    assert callable(pick)
    for tar in tars:
        for key, members in _samples(tar):
            name = f"{tar.stem}/{key}"
            yield base.Item(name, functools.partial(pick, members), name)
        if _cut_short(tar):
            yield base.bad_item(f"{tar.stem}/", f"{tar.name} is cut short; fetch it again", "")


def _samples(tar: pathlib.Path) -> Iterator[tuple[str, tuple[Member, ...]]]:
    """Keys and members of the samples; only headers are read."""
    for key, members in itertools.groupby(_members(tar), key=lambda named: named[0]):
        yield key, tuple(member for _, member in members)


def _members(tar: pathlib.Path) -> Iterator[tuple[str, Member]]:
    try:
        with tarfile.open(tar, "r:") as archive:
            for entry in archive:
                archive.members = []  # type: ignore[attr-defined]  # or every header is kept
                if entry.isfile():
                    folder, _, name = entry.name.rpartition("/")
                    key, _, suffix = name.partition(".")
                    member = Member(f".{suffix.lower()}", tar, entry.offset_data, entry.size)
                    yield f"{folder}/{key}" if folder else key, member
    except tarfile.ReadError:
        return  # `_items` says so, after what could be read


def _cut_short(tar: pathlib.Path) -> bool:
    """Whether the two empty blocks that end a tar are missing."""
    with tar.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - 1024, 0))
        return file.read() != bytes(1024)


def _picture(members: tuple[Member, ...]) -> object:
    for member in members:
        if member.suffix.endswith(base.IMAGE_SUFFIXES):
            return base.picture(member.read())
    raise ValueError("has no picture")


def _caption(members: tuple[Member, ...]) -> str:
    by_suffix = {member.suffix: member for member in members}
    if ".txt" in by_suffix:
        return by_suffix[".txt"].read().decode("utf-8")
    if ".json" in by_suffix:
        caption = json.loads(by_suffix[".json"].read()).get("caption")
        if caption:
            return str(caption)
    raise ValueError("has no caption")
