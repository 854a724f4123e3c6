"""What the devices of a compiled program tell each other, read from its text."""

import math
import re
from typing import NamedTuple

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_LINE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{$")
_NAME = re.compile(r"%([\w.-]+)")
_CONTINUED = re.compile(r"%async-collective-done[\w.-]* = .*calls=%([\w.-]+)")
"""Computations of a TPU that end an exchange; `async_collective_fusion`s are in its midst."""
_LOOP = re.compile(r"\b(?:body|condition)=%([\w.-]+)")


class Collective(NamedTuple):
    """One exchange: its kind, the numbers of each array it returns, bytes, and whether it loops."""

    kind: str
    sizes: tuple[int, ...]
    bytes: int
    in_loop: bool


def find(program: str) -> list[Collective]:
    """The collectives of an optimised program, largest first; those of a loop count once.

    >>> program = '''
    ... %body (x: f32[16]) -> f32[16] {
    ...   ROOT %r = f32[16]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
    ... }
    ... ENTRY %main (x: f32[16]) -> f32[16] {
    ...   %w = f32[16]{0} while(%x), condition=%less, body=%body
    ...   ROOT %g = (f32[16]{0}, f32[32]{0}) all-gather-start(%w), dimensions={0}
    ... }'''
    >>> [(one.kind, one.bytes, one.in_loop) for one in find(program)]
    [('all-gather', 128, False), ('all-reduce', 64, True)]
    """
    computations = _computations(program)
    looping = _reachable(computations, _LOOP.findall(program))
    continued = _CONTINUED.findall(program)
    found = []
    for name, text in computations.items():
        if name in continued or name.startswith("async_collective_fusion"):
            continue  # counted where it starts
        for shapes, kind, start in _LINE.findall(text):
            arrays = [
                (math.prod(map(int, filter(None, size.split(",")))), int(bits or 8) // 8)
                for _, bits, size in _ARRAY.findall(shapes)
            ]
            if start and kind != "all-reduce":  # it returns operands and counters, too
                arrays = [array for array in arrays if array[0] > 1]
                arrays = arrays[len(arrays) // 2 :]
            sizes = tuple(count for count, _ in arrays)
            moved = sum(count * width for count, width in arrays)
            found.append(Collective(kind, sizes, moved, name in looping))
    return sorted(found, key=lambda one: -one.bytes)


def _computations(program: str) -> dict[str, str]:
    """The text of each computation, by name."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in program.splitlines():
        header = _COMPUTATION.match(line)
        name = header[1] if header else name
        found.setdefault(name, []).append(line)
    return {name: "\n".join(lines) for name, lines in found.items()}


def _reachable(computations: dict[str, str], names: list[str]) -> set[str]:
    """These computations, and those that they call."""
    reached: set[str] = set()
    while names:
        name = names.pop()
        if name in computations and name not in reached:
            reached.add(name)
            names += _NAME.findall(computations[name])
    return reached
