"""Joins two extractions into files for experiments.main, matching rows by their group."""

import pathlib
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from experiments import workdir
from experiments.extract.extraction import Embeddings, write_header
from sotalign_jax import checks, data

PARTS = ("train", "val", "test", "split", "sue", "zero_shot")
ENCODERS = "encoders.json"
TEST = "test.json"
"""What the rows of the test files are: ids, and the dataset that has them."""
BLOCK = 65_536
"""Rows that are written at a time: they may be larger than memory."""


class Taken(NamedTuple):
    """Rows of an extraction."""

    of: Embeddings
    chosen: np.ndarray


Arrays = dict[str, Taken | np.ndarray]


def match(x: Embeddings, y: Embeddings) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of x that have rows of y, those rows of y, and x_of_y: y[j] belongs to x[x_of_y[j]].

    Raises:
        InputError: no group is in both, or a group has several rows of x.
    """
    row_of: dict[str, int] = {}
    for row, origin in enumerate(x.origins):
        if origin.group in row_of:
            raise checks.InputError(
                f"x: {origin.id!r} and {x.origins[row_of[origin.group]].id!r} share the group "
                f"{origin.group!r}; pass the side with one row a group as x (or --part=zero_shot)"
            )
        row_of[origin.group] = row
    rows_y = [row for row, origin in enumerate(y.origins) if origin.group in row_of]
    if not rows_y:
        raise checks.InputError(
            f"y: none of its groups, such as {y.origins[0].group!r}, is in x, such as "
            f"{x.origins[0].group!r}; extract both from one dataset"
        )
    owners = np.array([row_of[y.origins[row].group] for row in rows_y])
    rows_x, x_of_y = np.unique(owners, return_inverse=True)
    return rows_x, np.array(rows_y), x_of_y


def join(
    part: str,
    x: Embeddings,
    y: Embeddings,
    *,
    val: float = 0.1,
    test: float = 0.2,
    n_pairs: int = 500,
    seed: int = 0,
) -> Arrays:
    """The files of one of PARTS by name.

    A training table has a row per caption, so a picture comes as often as its captions; rows
    without a partner are its pools. A gallery has a picture once, and all its captions. "split"
    has both: every group is in one of train, val and test, which get these fractions. "sue" takes
    one caption a picture, see `data.sue_rows`.
    """
    if part == "zero_shot":
        return _zero_shot(x, y)
    if not (val >= 0 and test >= 0 and val + test < 1):
        raise checks.InputError(f"val, test: are {val} and {test}; pass fractions that leave some")
    rows_x, rows_y, x_of_y = match(x, y)
    if part == "sue":
        rows_y = rows_y[np.unique(x_of_y, return_index=True)[1]]
        tests, kept = data.sue_rows(len(rows_x), n_pairs=n_pairs, seed=seed)
        chosen = {"": (kept.pairs, kept.pairs), "unpaired_": (kept.x, kept.y)}
        return {
            f"{name}{side}": Taken(of, rows[picked])
            for name, both in {**chosen, "test_": (tests, tests)}.items()
            for side, of, rows, picked in zip("xy", (x, y), (rows_x, rows_y), both, strict=True)
        }
    parts = {part: np.arange(len(rows_x))}
    if part == "split":
        order = np.random.default_rng(seed).permutation(len(rows_x))
        ends = np.rint(np.cumsum([val, test]) * len(order)).astype(int)
        parts = dict(zip(("val", "test", "train"), np.split(order, ends), strict=True))
    arrays: Arrays = {}
    for name, pictures in parts.items():
        if not len(pictures):
            continue
        pictures = np.sort(pictures)
        captions = np.flatnonzero(np.isin(x_of_y, pictures))
        owner = np.searchsorted(pictures, x_of_y[captions])
        own_x, own_y = rows_x[pictures], rows_y[captions]
        if name == "train":
            arrays |= {"x": Taken(x, own_x[owner]), "y": Taken(y, own_y)}
        else:
            arrays |= {f"{name}_x": Taken(x, own_x), f"{name}_y": Taken(y, own_y)}
            arrays[f"{name}_x_of_y"] = owner
    for side, of, paired in (("x", x, rows_x), ("y", y, rows_y)) if "train" in parts else ():
        alone = np.setdiff1d(np.arange(len(of.rows)), paired)
        if len(alone):
            arrays[f"unpaired_{side}"] = Taken(of, alone)
    return arrays


def _zero_shot(x: Embeddings, y: Embeddings) -> Arrays:
    """Pictures, labels and prompts [classes, templates, width] of a classification set."""
    classes = x.metadata["data"].get("classes")
    if classes is None or classes != y.metadata["data"].get("classes"):
        raise checks.InputError(
            "zero_shot: x and y are not of one classification set; extract both from food101, ..."
        )
    prompts: dict[int, list[int]] = defaultdict(list)
    for row, origin in enumerate(y.origins):
        prompts[int(origin.group)].append(row)
    sizes = {len(prompts[label]) for label in range(len(classes))}
    if len(sizes) != 1 or 0 in sizes:
        raise checks.InputError(
            f"zero_shot: classes have {min(sizes)} to {max(sizes)} prompts; extract the prompts "
            "again, without --limit"
        )
    return {
        "zero_shot_x": np.asarray(x.rows),
        "zero_shot_labels": np.array([int(origin.group) for origin in x.origins], np.int32),
        "zero_shot_prompts": np.stack([y.rows[prompts[c]] for c in range(len(classes))]),
    }


def write(out: pathlib.Path, arrays: Arrays, x: Embeddings, y: Embeddings) -> None:
    """Writes the files, which `files.py:from=OUT` reads; pools of an earlier table are removed.

    Beside them it notes the encoders, so that a search can use a model trained on these files, and
    what the test rows are, so that a report can show them.

    Raises:
        InputError: the folder has files of other encoders.
    """
    out.mkdir(parents=True, exist_ok=True)
    encoders = {"x": x.metadata["encoder"], "y": y.metadata["encoder"]}
    if (out / ENCODERS).exists() and workdir.read_json(out / ENCODERS) != encoders:
        raise checks.InputError(
            f"workdir: {out} has files of other encoders (see {ENCODERS}); choose another --workdir"
        )
    workdir.write_json(out / ENCODERS, encoders)
    for name in ("unpaired_x", "unpaired_y") if "x" in arrays else ():
        (out / f"{name}.npy").unlink(missing_ok=True)
    for name, array in arrays.items():
        with workdir.replacing(out / f"{name}.npy") as file:
            if isinstance(array, np.ndarray):
                np.save(file, array)
                continue
            rows, chosen = array.of.rows, array.chosen
            write_header(file, rows.dtype, (len(chosen), rows.shape[1]))
            for start in range(0, len(chosen), BLOCK):
                file.write(rows[chosen[start : start + BLOCK]].data)
    if "test_x" in arrays:
        source = dict(y.metadata["data"])
        for name in ("root", "captions"):
            if source.get(name):
                source[name] = str(pathlib.Path(source[name]).absolute())
        taken = {side: arrays[f"test_{side}"] for side in "xy"}
        ids = {
            side: [array.of.origins[row].id for row in array.chosen]
            for side, array in taken.items()
            if isinstance(array, Taken)
        }
        workdir.write_json(out / TEST, {"data": source, **ids})
