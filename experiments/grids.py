"""Which settings a search tries: grids, their points, and the settings that a point stands for."""

import ast
import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments import settings
from sotalign_jax import checks, methods

OWN = "own"
"""What stands for the method's own grid in the text of a grid."""
Grid = dict[str, tuple[Any, ...]]
Point = dict[str, Any]
"""A value for every key of a grid; keys as in `settings_of`."""


def own_grid(method: str) -> Grid:
    """The values that a method finds worth trying; teachers have none.

    >>> own_grid("cca")
    {}
    """
    return dict(methods.METHODS[method].grid) if method in methods.METHODS else {}


def parse(text: str, method: str) -> Grid:
    """Reads "alpha=1e-3,1e-4;train.learning_rate=3e-4;own"; the order is the grid's.

    >>> parse("alpha=1e-3,1e-4; heads.init=teacher", "sotalign")
    {'alpha': (0.001, 0.0001), 'heads.init': ('teacher',)}
    """
    grid: Grid = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        key, found, listed = (piece.strip() for piece in part.partition("="))
        values = tuple(_value(piece.strip()) for piece in listed.split(","))
        if part == OWN:
            found_keys = own_grid(method)
        elif not found or not key or any(value == "" for value in values):
            raise checks.InputError(
                f"grid: {part!r} is not understood; pass KEY=VALUE,VALUE;KEY=VALUE or {OWN!r}"
            )
        else:
            found_keys = {key: values}
        for name, entries in found_keys.items():
            if name in grid or len(set(map(repr, entries))) < len(entries):
                raise checks.InputError(
                    f"grid: {name} comes twice or repeats a value; name it once"
                )
            grid[name] = entries
    return grid


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def points(grid: Grid, limit: int | None = None) -> dict[int, Point]:
    """The points of a grid by their number, the last key varying fastest.

    With a `limit` below their number a random choice, the same every time; a smaller limit
    chooses of what a larger one does.

    >>> points({"alpha": (1, 2), "k": (3, 4)}, limit=2)
    {0: {'alpha': 1, 'k': 3}, 2: {'alpha': 2, 'k': 3}}
    """
    total = math.prod(map(len, grid.values()))
    chosen = np.random.default_rng(0).permutation(total)[:limit]
    numbered = enumerate(itertools.product(*grid.values()))
    kept = set(chosen.tolist())
    return {i: dict(zip(grid, values, strict=True)) for i, values in numbered if i in kept}


def settings_of(point: Mapping[str, Any], method: str) -> dict[str, Any]:
    """A point as nested settings: plain keys are options of the method, dotted ones any setting.

    >>> settings_of({"alpha": 0.1, "train.steps": 5}, "sotalign")
    {'sotalign': {'alpha': 0.1}, 'train': {'steps': 5}}
    """
    nested: dict[str, Any] = {}
    for key, value in point.items():
        *sections, name = key.split(".") if "." in key else (method, key)
        node = nested
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return nested


def with_point(values: dict[str, Any], name: str, point: Mapping[str, Any]) -> dict[str, Any]:
    """A config's plain values that ask for one method or variant alone, changed by a point."""
    method = settings.method_of_name(values.get("variants", {}))[name]
    overrides = dict(values.get("overrides", {}))
    changes = settings_of(point, method)
    overrides[name] = merged(overrides.get(name, {}), changes)
    return {**values, "methods": (name,), "overrides": overrides}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Nested dictionaries with the entries of both, those of `changes` first.

    >>> merged({"heads": {"dim": 8}}, {"heads": {"init": "teacher"}})
    {'heads': {'dim': 8, 'init': 'teacher'}}
    """
    out = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if both else value
    return out
