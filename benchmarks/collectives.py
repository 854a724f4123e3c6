"""What the devices of a compiled program tell each other, read from its text."""

import math
import re
from typing import NamedTuple

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_LINE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\((.*)")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\[([\d,]*)\]")


class Collective(NamedTuple):
    """One exchange: its kind, the numbers of each array it returns, bytes, and whether it loops."""

    kind: str
    sizes: tuple[int, ...]
    bytes: int
    in_loop: bool


def find(program: str) -> list[Collective]:
    """The collectives of an optimised program, largest first; those of a loop count once.

    >>> line = '%r = f32[16]{0} all-reduce(f32[16]{0} %t), metadata={op_name="jit(f)/while/psum"}'
    >>> find(line)
    [Collective(kind='all-reduce', sizes=(16,), bytes=64, in_loop=True)]
    """
    found = []
    for shapes, kind, rest in _LINE.findall(program):
        arrays = [
            (math.prod(map(int, filter(None, size.split(",")))), int(bits or 8) // 8)
            for _, bits, size in _ARRAY.findall(shapes)
        ]
        sizes = tuple(count for count, _ in arrays)
        moved = sum(count * width for count, width in arrays)
        found.append(Collective(kind, sizes, moved, "/while/" in rest))
    return sorted(found, key=lambda one: -one.bytes)
