"""The first lines of a report: a verdict, three numbers, and code that uses the model.

Also compares methods seed by seed, and draws scores over a setting that differs between runs.
"""

import html
import itertools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.stats
from flax import traverse_util

from experiments import run as run_lib
from experiments import spec as spec_lib
from sotalign_jax import evaluation

SPLITS = ("test/1k", "test", "val")
"""Splits of a verdict. The first one with scores counts."""
CODE = """import numpy as np
import sotalign_jax as sota

model = sota.Aligner.load({folder!r})
queries = np.load("queries.npy")  # embeddings of {x}, {width_x:,} features
keys = np.load("keys.npy")  # embeddings of {y}, {width_y:,} features
found = model.search(queries, keys, k=10)
print(found.indices[0], found.scores[0])
"""
"""Use of a model in Python."""


def split_of(one: run_lib.Results) -> str | None:
    """Returns the split that a verdict is about, or None if a run has no scores."""
    return next((split for split in SPLITS if f"{split}/mean/R@10" in one), None)


def numbers(one: run_lib.Results) -> dict[int, tuple[float, float | None]]:
    """Returns R@k by the scores that the model uses, and that of a random ranking, by k.

    >>> numbers({"val/mean/R@1": 8.0, "val/mean/R@10": 30.0, "val/chance/mean/R@10": 2.0})
    {1: (8.0, None), 10: (30.0, 2.0)}
    """
    split = split_of(one)
    if split is None:
        return {}
    way = "calibrated/mean" if one.get("calibrated") else "mean"
    found = {}
    for k in evaluation.KS:
        score = one.get(f"{split}/{way}/R@{k}", one.get(f"{split}/mean/R@{k}"))
        if score is not None:
            found[k] = score, one.get(f"{split}/chance/mean/R@{k}")
    return found


def percent(value: float) -> str:
    """Returns a share in percent with two significant digits.

    >>> percent(87.3), percent(0.254), percent(100.0)
    ('87', '0.25', '100')
    """
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def verdict(one: run_lib.Results, nouns: tuple[str, str]) -> str:
    """Returns one sentence on the model: how often it finds a match among the first ten.

    Args:
        one: Results of its run, with those of `protocol`.
        nouns: Plural nouns for the rows of x and of y.

    Returns:
        The sentence, or "" if there are no scores.
    """
    if 10 not in (found := numbers(one)):
        return ""
    split = split_of(one)
    score, chance = found[10]
    x, y = nouns
    text = f"Your model finds a match among the first ten for {percent(score)} % of the queries"
    text += "" if chance is None else f", by chance for {percent(chance)} %"
    if {f"{split}/rows_x", f"{split}/rows_y"} <= one.keys():
        sizes = one[f"{split}/rows_x"], one[f"{split}/rows_y"]
        held = "validation" if split == "val" else "test"
        text += f" ({sizes[0]:,.0f} {x} and {sizes[1]:,.0f} {y} held out for {held})"
    return f"{text}."


def head(one: run_lib.Results, folder: pathlib.Path, nouns: tuple[str, str]) -> str:
    """Returns HTML with the verdict, three numbers, and code to copy.

    Args:
        one: Results of a run, with those of `protocol`.
        folder: Folder of the run.
        nouns: Plural nouns for the rows of x and of y.
    """
    found = numbers(one)
    if not found:
        return ""
    tiles = []
    for k, (score, chance) in found.items():
        name = "found first" if k == 1 else f"among the first {k}"
        below = "" if chance is None else f"<small>chance {percent(chance)} %</small>"
        tiles.append(f"<div><b>{percent(score)} %</b><span>{name}</span>{below}</div>")
    parts = [f"<p class='verdict'>{html.escape(verdict(one, nouns))}</p>"]
    parts.append(f"<div class='numbers'>{''.join(tiles)}</div>")
    noted = folder / "aligner" / "aligner.json"
    if noted.exists():
        shapes = json.loads(noted.read_text())["info"].get("data", {})
        widths = [(shapes.get(f"pairs_{side}") or [0, 0])[1] for side in "xy"]
        names = dict(zip(("x", "y", "width_x", "width_y"), (*nouns, *widths), strict=True))
        code = html.escape(CODE.format(folder=str(folder), **names))
        named = html.escape(folder.name)
        parts.append(f"<p>To use {named}, the best model on validation, copy this code:</p>")
        parts.append(f"<pre class='copy'>{code}</pre>")
    return "\n".join(parts)


# --- comparisons over seeds and settings ---------------------------------------------------------


def differences(
    results: Mapping[str, Mapping[int, run_lib.Results]], best: str, keys: Mapping[str, str]
) -> list[list[Any]]:
    """Compares the best method with each other one on the same seeds.

    Args:
        results: Results by label and seed.
        best: Label of the best method.
        keys: Names of the scores, by title.

    Returns:
        A row for each other label: "best - label", the number of seeds that both have, and for
        each score the mean difference with its 95 % interval by Student's t. Labels with fewer than
        two common seeds are left out.

    >>> runs = {"a": {0: {"s": 3.0}, 1: {"s": 5.0}}, "b": {0: {"s": 1.0}, 1: {"s": 3.0}}}
    >>> differences(runs, "a", {"R@1": "s"})
    [['a - b', 2, '+2.0 [+2.0, +2.0]']]
    """
    rows = []
    for label, own in results.items():
        shared = sorted(own.keys() & results[best].keys())
        pairs = [(results[best][seed], own[seed]) for seed in shared]
        pairs = [both for both in pairs if all(set(keys.values()) <= one.keys() for one in both)]
        if label == best or len(pairs) < 2:
            continue
        cells = []
        for key in keys.values():
            gains = np.array([left[key] - right[key] for left, right in pairs])
            spread = gains.std(ddof=1) / len(gains) ** 0.5
            reach = float(scipy.stats.t.ppf(0.975, len(gains) - 1)) * spread
            mean = gains.mean()
            cells.append(f"{mean:+.1f} [{mean - reach:+.1f}, {mean + reach:+.1f}]")
        rows.append([f"{best} - {label}", len(pairs), *cells])
    return rows


def swept(
    runs: Mapping[str, spec_lib.Run], scores: Mapping[str, float]
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Finds numeric settings that differ between runs that are otherwise equal.

    Args:
        runs: Runs by name.
        scores: A score of each run that has one.

    Returns:
        For every such setting, its values and the scores at them, by method.
    """
    flat = {
        name: traverse_util.flatten_dict(runs[name].to_json(), sep=".", keep_empty_nodes=True)
        for name in scores
    }
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for key in dict.fromkeys(itertools.chain.from_iterable(flat.values())):
        values = {name: one.get(key) for name, one in flat.items()}
        kinds = {type(value) for value in values.values()}
        if key == "seed" or not kinds & {int, float} or len(set(values.values())) < 2:
            continue
        groups: dict[Any, list[str]] = {}
        for name, one in flat.items():
            others = tuple((k, str(v)) for k, v in one.items() if k not in (key, "seed"))
            groups.setdefault(others, []).append(name)
        for group in groups.values():
            known = [name for name in group if type(values[name]) in (int, float)]
            if len({values[name] for name in known}) > 1:
                points = [(float(values[name]), scores[name]) for name in known]
                label = _common([runs[name].label for name in known])
                found.setdefault(key, {})[label] = sorted(points)
    return found


def _common(labels: Sequence[str]) -> str:
    """Returns the beginning that labels share, such as "sail" of "sail-500pairs"."""
    shortest = min(labels, key=len)
    length = next(
        (i for i, letter in enumerate(shortest) if any(one[i] != letter for one in labels)),
        len(shortest),
    )
    return shortest[:length].rstrip("-_=,( ") or shortest
