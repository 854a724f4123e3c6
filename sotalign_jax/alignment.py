"""`align`, the path from arrays to an `Aligner` in one call."""

from __future__ import annotations  # help(align) shows short types

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from sotalign_jax import checks, data, methods, tables
from sotalign_jax import recipe as recipe_lib
from sotalign_jax.aligner import Aligner
from sotalign_jax.heads import Teacher
from sotalign_jax.progress import Progress


def align(
    pairs: Any,
    x: Any = None,
    y: Any = None,
    *,
    val: tuple[Any, Any] | data.Gallery | None = None,
    nan: str = "raise",
    recipe: str = "default",
    method: str | methods.Method | None = None,
    teacher: str | Teacher | None = None,
    start: str | None = None,
    dim: int | None = None,
    steps: int | None = None,
    learning_rate: float | None = None,
    unpaired_batch: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Aligner:
    """Aligns two modalities from few pairs and many unpaired embeddings.

    Fits a teacher on the pairs and refines it with the unpaired rows, then trains a head per
    modality on

        SigLIP(pairs) + alpha * KLOT(student affinity || teacher affinity) on the unpaired rows.

    Without x and y, training is supervised (SAIL). With only one of them, the pairs' own rows
    replace the other. If `val` is None and there are at least 100 pairs, a tenth of them is held
    out for validation, unless the teacher is fitted already. Training keeps its best step on
    validation. With the default recipe, the teacher of the pairs alone, the trained heads, or a
    mixture replaces the refined teacher if it is clearly better on validation. Without validation
    the result is a mixture. A sample of the unpaired rows is kept for calibrated retrieval.

    Args:
        pairs: Embeddings (pairs_x, pairs_y) of shapes [n, d_x] and [n, d_y]. Row i of one matches
            row i of the other. Or a table of two columns, the ids of rows of x and of y that match.
            The other rows of x and y are then unpaired.
        x: Unpaired embeddings of the first modality, shape [n_x, d_x], as an array, a tensor, or a
            table with ids such as a data frame, see `tables`.
        y: Unpaired embeddings of the second modality, shape [n_y, d_y].
        val: Matching embeddings (V_x, V_y) to select on, or a `Gallery`.
        nan: "drop" leaves out rows that have NaN or inf, or only zeros, together with their pairs,
            and lists them in `info["dropped"]`. "raise" raises an error that names them.
        recipe: Name of the defaults for arguments below that are None. "default" mixes the trained
            heads with a refined teacher. "paper" is the paper's recipe.
        method: A method with its options, such as `methods.SOTAlign(alpha=1e-3)`, or a name of
            `methods.METHODS`. By default SOTAlign, or SAIL without unpaired rows.
        teacher: A name of `recipe.TEACHERS`, or a fitted teacher. By default "refined_cca", or
            "cca" if `recipe` is "paper".
        start: "teacher" starts the heads at the teacher's projection, "random" at random, and
            "centred" at random on rows without their mean. By default "centred", or "random" if
            `recipe` is "paper". Only linear heads can start at a teacher, which must be linear too,
            such as "tuned_cca".
        dim: Width of the trained heads' features. By default 512, 1,024 if `recipe` is "paper", or
            the teacher's width if the heads start at it. A mixture adds the teacher's features.
        steps: Training steps.
        learning_rate: Peak of the learning rate.
        unpaired_batch: Unpaired rows per step. By default at most 22,768 on an accelerator and
            1,024 on a CPU.
        seed: Seed of all random choices.
        progress: True shows a progress bar.

    Returns:
        The aligner. Its `info` has the options and the validation score of every candidate.

    Raises:
        InputError: The arguments or the data cannot be used. The message names the argument.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> z = rng.normal(size=(300, 8)).astype(np.float32)
        >>> to_x, to_y = rng.normal(size=(8, 12)), rng.normal(size=(8, 10))
        >>> X, Y = (z @ to_x).astype(np.float32), (z @ to_y).astype(np.float32)
        >>> aligner = align((X[:50], Y[:50]), X[50:], Y[50:], steps=20, progress=False)
        >>> aligner.similarity(X[:5], Y[:5]).shape
        (5, 5)

    References:
        S. Roschmann, P. Krzakala et al., "SOTAlign: semi-supervised alignment of unimodal vision
        and language models via optimal transport", ICML 2026.
    """
    checks.choice("nan", nan, ("raise", "drop"))
    by_ids = tables.is_table(pairs)
    given, dropped = (_by_ids if by_ids else _by_rows)(pairs, x, y, nan)
    if val is not None and not isinstance(val, data.Gallery):
        val_x, val_y = _paired("val", val, nan, dropped)
        val = data.gallery(val_x, val_y)
    dataset = data.dataset(given.pairs, x=given.x, y=given.y, val=val)
    # Empty arrays are probably a mistake, and must not silently turn into supervised training.
    unpaired = len(dataset.pool_x) or len(dataset.pool_y)
    if not by_ids and not (x is None and y is None) and not unpaired:
        raise checks.InputError(
            "x or y must have rows, got none; pass unpaired rows, or neither argument to train on "
            "the pairs only"
        )
    method = recipe_lib.resolve_method(method)
    checks.whole(0, seed=seed)
    # A `Fitted` method selects nothing on validation, and a fitted teacher has seen all pairs.
    ready = isinstance(method, methods.Fitted) or isinstance(teacher, Teacher)
    if val is None and not ready:
        dataset = data.hold_out(dataset, seed=int(seed))
    resolved = recipe_lib.default(
        dataset,
        preset=recipe,
        method=method,
        teacher=teacher,
        start=start,
        dim=dim,
        steps=steps,
        learning_rate=learning_rate,
        unpaired_batch=unpaired_batch,
        seed=seed,
    )
    with Progress(resolved.train.steps, "align", show=progress) as bar:
        prepared = recipe_lib.prepare(resolved, dataset, observer=bar)
        made = recipe_lib.train(resolved, prepared, observer=bar, progress=progress)
    return dataclasses.replace(made, info=made.info | {"dropped": dropped}) if dropped else made


class _Given(NamedTuple):
    """Arrays of `data.dataset`."""

    pairs: Any
    x: Any
    y: Any


def _by_rows(pairs: Any, x: Any, y: Any, nan: str) -> tuple[_Given, dict[str, list[Any]]]:
    """Returns the arrays of paired tables and pools, and the names of dropped rows."""
    dropped: dict[str, list[Any]] = {}
    if isinstance(pairs, tuple | list) and len(pairs) == 2:
        pairs = _paired("pairs", pairs, nan, dropped)
    pools = []
    for name, pool in (("x", x), ("y", y)):
        if pool is None or not (nan == "drop" or tables.is_table(pool)):
            pools.append(pool)
            continue
        table = _checked(name, pool, nan)
        pools.append(_without(table.rows, _unusable(name, table, nan, dropped)))
    return _Given(pairs, *pools), dropped


def _paired(name: str, pair: Any, nan: str, dropped: dict[str, list[Any]]) -> tuple[Any, Any]:
    """Returns both arrays of matching rows, without those that are unusable on either side."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        found = f"{len(pair)} parts" if isinstance(pair, tuple | list) else type(pair).__name__
        raise checks.InputError(
            f"{name} must be (A, B), where A[i] belongs to B[i], got {found}; for other matches, "
            "pass a Gallery as val"
        )
    if nan == "raise" and not any(tables.is_table(one) for one in pair):
        return pair[0], pair[1]
    both = [_checked(f"{name}_{side}", one, nan) for side, one in zip("xy", pair, strict=True)]
    sizes = [len(one.rows) for one in both]
    if sizes[0] != sizes[1]:
        raise checks.InputError(
            f"{name}_y has {sizes[1]} rows but {name}_x has {sizes[0]}; row i of one must belong "
            "to row i of the other"
        )
    bad = np.unique(np.concatenate([_unusable("", one, nan, {}) for one in both]))
    if len(bad):
        dropped[name] = tables.names(both[0], bad)
    return _without(both[0].rows, bad), _without(both[1].rows, bad)


def _by_ids(pairs: Any, x: Any, y: Any, nan: str) -> tuple[_Given, dict[str, list[Any]]]:
    """Returns the arrays of pairs of ids and of all other rows, and the names of dropped rows."""
    if x is None or y is None:
        raise checks.InputError("x and y must be given if pairs are ids, got None")
    dropped: dict[str, list[Any]] = {}
    left, right = _checked("x", x, nan), _checked("y", y, nan)
    rows_x, rows_y, known = tables.matches(pairs, left, right)
    if not known.all() and nan == "raise":
        missing = checks.listed([str(row) for row in np.flatnonzero(~known)])
        raise checks.InputError(
            f"pairs has no id in row {missing}; remove such rows, as align does with nan='drop'"
        )
    bad_x = _unusable("x", left, nan, dropped)
    bad_y = _unusable("y", right, nan, dropped)
    kept = known & ~np.isin(rows_x, bad_x) & ~np.isin(rows_y, bad_y)
    if not kept.all():
        dropped["pairs"] = np.flatnonzero(~kept).tolist()
    # A usable row of a dropped pair is unpaired now.
    pool_x = _without(left.rows, np.union1d(rows_x[kept], bad_x))
    pool_y = _without(right.rows, np.union1d(rows_y[kept], bad_y))
    paired = left.rows[rows_x[kept]], right.rows[rows_y[kept]]
    return _Given(paired, pool_x, pool_y), dropped


def _checked(name: str, x: Any, nan: str) -> tables.Table:
    """Returns a table whose rows are usable, unless those that are not will be dropped."""
    table = tables.read(name, x)
    if nan == "raise":
        tables.rows(name, table, min_rows=0)
    return table


def _unusable(
    name: str, table: tables.Table, nan: str, dropped: dict[str, list[Any]]
) -> np.ndarray:
    """Returns the numbers of rows to drop, and notes their names."""
    # Arrays of another shape are reported by `data.dataset`.
    if nan == "raise" or table.rows.ndim != 2:
        return np.empty(0, np.intp)
    bad = tables.unusable(table)
    if len(bad):
        dropped[name] = tables.names(table, bad)
    return bad


def _without(rows: np.ndarray, bad: np.ndarray) -> np.ndarray:
    """Returns all rows but some. Nothing is copied if there are none."""
    return np.delete(rows, bad, axis=0) if len(bad) else rows
