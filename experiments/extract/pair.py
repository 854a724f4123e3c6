"""Joins two extractions into files for experiments.main, matching rows by their group."""

import pathlib
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from experiments import workdir
from experiments.extract.extraction import Embeddings
from sotalign_jax import checks, data

PARTS = ("train", "val", "test", "split", "sue", "zero_shot")
ENCODERS = "encoders.json"
TEST = "test.json"
"""What the rows of the test files are: ids, and the dataset that has them."""


class Taken(NamedTuple):
    """Rows `chosen` of an array that may be larger than memory; written in blocks."""

    rows: np.ndarray
    chosen: np.ndarray

    def blocks(self, size: int = 65_536) -> Iterator[np.ndarray]:
        """The rows, so many at a time."""
        for start in range(0, len(self.chosen), size):
            yield self.rows[self.chosen[start : start + size]]


Arrays = dict[str, Taken | np.ndarray]


class Matched(NamedTuple):
    """Rows of x and of y that belong together, y[j] to x[x_of_y[j]], and those without a partner.

    `unpaired` holds the latter, by the name of their file, where there are any.
    """

    x: np.ndarray
    y: np.ndarray
    x_of_y: np.ndarray
    unpaired: Arrays


def match(x: Embeddings, y: Embeddings) -> Matched:
    """Row numbers of x that have rows of y, of the rows of y that have one of x, and of the rest.

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
    unpaired: Arrays = {}
    for name, side, paired in (("unpaired_x", x, rows_x), ("unpaired_y", y, rows_y)):
        alone = np.setdiff1d(np.arange(len(side.rows)), paired)
        if len(alone):
            unpaired[name] = Taken(side.rows, alone)
    return Matched(rows_x, np.array(rows_y), x_of_y, unpaired)


def gallery_arrays(x: Embeddings, y: Embeddings, prefix: str) -> Arrays:
    """Files of a validation or test gallery, all captions of a picture included."""
    matched = match(x, y)
    return {
        f"{prefix}_x": Taken(x.rows, matched.x),
        f"{prefix}_y": Taken(y.rows, matched.y),
        f"{prefix}_x_of_y": matched.x_of_y,
    }


def table_arrays(x: Embeddings, y: Embeddings) -> Arrays:
    """Files of a training table and its pools: the rows without a partner.

    The table has a row per caption, so a picture comes as often as its captions.
    """
    matched = match(x, y)
    table: Arrays = {"x": Taken(x.rows, matched.x[matched.x_of_y]), "y": Taken(y.rows, matched.y)}
    return table | matched.unpaired


def split_arrays(x: Embeddings, y: Embeddings, *, val: float, test: float, seed: int) -> Arrays:
    """Files of train, val and test: every group, so every picture with a caption, is in one.

    Rows without a partner become the pools of training.
    """
    if not (val >= 0 and test >= 0 and val + test < 1):
        raise checks.InputError(f"val, test: are {val} and {test}; pass fractions that leave some")
    matched = match(x, y)
    order = np.random.default_rng(seed).permutation(len(matched.x))
    ends = np.rint(np.cumsum([val, test]) * len(order)).astype(int)
    parts = dict(zip(("val", "test", "train"), np.split(order, ends), strict=True))
    arrays: Arrays = {}
    for name, chosen in parts.items():
        if not len(chosen):
            continue
        chosen = np.sort(chosen)
        captions = np.flatnonzero(np.isin(matched.x_of_y, chosen))
        owner = np.searchsorted(chosen, matched.x_of_y[captions])
        rows_x, rows_y = matched.x[chosen], matched.y[captions]
        if name == "train":
            arrays |= {"x": Taken(x.rows, rows_x[owner]), "y": Taken(y.rows, rows_y)}
        else:
            arrays |= {f"{name}_x": Taken(x.rows, rows_x), f"{name}_y": Taken(y.rows, rows_y)}
            arrays |= {f"{name}_x_of_y": owner}
    return arrays | matched.unpaired


def sue_arrays(x: Embeddings, y: Embeddings, *, n_pairs: int, seed: int) -> Arrays:
    """Files of the SUE protocol, with one caption a picture; see `data.sue_rows`."""
    matched = match(x, y)
    _, first = np.unique(matched.x_of_y, return_index=True)
    rows_x, rows_y = matched.x, matched.y[first]
    test, rows = data.sue_rows(len(rows_x), n_pairs=n_pairs, seed=seed)
    return {
        "x": Taken(x.rows, rows_x[rows.pairs]),
        "y": Taken(y.rows, rows_y[rows.pairs]),
        "unpaired_x": Taken(x.rows, rows_x[rows.x]),
        "unpaired_y": Taken(y.rows, rows_y[rows.y]),
        "test_x": Taken(x.rows, rows_x[test]),
        "test_y": Taken(y.rows, rows_y[test]),
    }


def zero_shot_arrays(x: Embeddings, y: Embeddings) -> Arrays:
    """Files of a classification task: pictures, labels and prompts [classes, templates, width].

    Raises:
        InputError: the extractions are not of one classification set, or prompts are missing.
    """
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


def write(out: pathlib.Path, arrays: Arrays) -> None:
    """Writes the files, which `files.py:from=OUT` reads; pools of an earlier table are removed."""
    for name in ("unpaired_x", "unpaired_y") if "x" in arrays else ():
        (out / f"{name}.npy").unlink(missing_ok=True)
    for name, array in arrays.items():
        with workdir.replacing(out / f"{name}.npy") as file:
            if isinstance(array, np.ndarray):
                np.save(file, array)
                continue
            shape, dtype = (len(array.chosen), array.rows.shape[1]), array.rows.dtype.str
            header = {"descr": dtype, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for block in array.blocks():
                file.write(block.data)


def note_test(out: pathlib.Path, arrays: Arrays, x: Embeddings, y: Embeddings) -> None:
    """Notes what the test rows are, so that a report can show them."""
    if "test_x" not in arrays:
        return
    source = dict(y.metadata["data"])
    for name in ("root", "captions"):
        if source.get(name):
            source[name] = str(pathlib.Path(source[name]).absolute())
    ids = {
        side: [of.origins[row].id for row in arrays[f"test_{side}"].chosen]  # type: ignore[union-attr]
        for side, of in (("x", x), ("y", y))
    }
    workdir.write_json(out / TEST, {"data": source, **ids})


def claim(out: pathlib.Path, x: Embeddings, y: Embeddings) -> None:
    """Notes the encoders beside the files, so that a search can use a model trained on them.

    Raises:
        InputError: the folder has files of other encoders.
    """
    out.mkdir(parents=True, exist_ok=True)
    encoders = {"x": x.metadata["encoder"], "y": y.metadata["encoder"]}
    noted = out / ENCODERS
    if noted.exists() and workdir.read_json(noted) != encoders:
        raise checks.InputError(
            f"workdir: {out} has files of other encoders (see {ENCODERS}); choose another --workdir"
        )
    workdir.write_json(noted, encoders)
