"""Tables of embeddings with ids: data frames, Arrow tables, datasets, structured arrays.

A table has one row per item. Its ids are the column "id", or the index of a pandas object if that
is not merely 0, 1, 2, and so on. All other columns are features: numbers, or vectors of equal
length. None of the packages is imported, because their objects are recognised by their methods.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sotalign_jax import checks

ID = "id"
"""Name of the column that holds ids."""


class Table(NamedTuple):
    """Embeddings with the names of their rows and columns.

    Attributes:
        rows: Embeddings, one per row.
        ids: Ids of the rows, or None if they have none.
        columns: Name of the column that each feature comes from, or None for a plain array.
    """

    rows: np.ndarray
    ids: np.ndarray | None = None
    columns: tuple[str, ...] | None = None


def read(name: str, x: Any) -> Table:
    """Converts a table, array or tensor to an array with ids.

    Args:
        name: Name of the argument for error messages.
        x: A pandas or polars data frame, a pandas series of vectors, an Arrow table, a Hugging Face
            dataset, a structured numpy array, a dictionary of columns, or anything that
            `checks.array` converts. A memory-mapped array stays one, and a `Table` is returned.

    Returns:
        The table.

    Raises:
        InputError: A column does not hold numbers, or vectors of one length, or the columns have
            different numbers of rows.

    Example:
        >>> table = read("x", {"id": ["a", "b"], "f": [0.5, 1.0], "g": [[1, 2], [3, 4]]})
        >>> table.rows.tolist(), table.ids.tolist(), table.columns
        ([[0.5, 1.0, 2.0], [1.0, 3.0, 4.0]], ['a', 'b'], ('f', 'g', 'g'))
    """
    if isinstance(x, Table):
        return x
    columns = _columns(x)
    if columns is None:
        return Table(checks.array(name, x))
    ids = columns.pop(ID) if ID in columns else _index(x)
    if ids is not None:
        ids = np.asarray(ids)
        if ids.ndim != 1:
            raise checks.InputError(f"{name}[{ID!r}] must hold one id per row, got {ids.shape}")
    parts = [_block(f"{name}[{key!r}]", column) for key, column in columns.items()]
    if not parts:
        raise checks.InputError(f"{name} must have a column of features, got none")
    lengths = {key: len(part) for key, part in zip(columns, parts, strict=True)}
    if ids is not None:
        lengths[ID] = len(ids)
    if len(set(lengths.values())) > 1:
        raise _uneven(name, lengths)
    # One dtype for all columns. A column of booleans beside floats becomes floats as well.
    kind = np.result_type(*(checks.native_dtype(part.dtype) for part in parts))
    rows = np.concatenate([part.astype(kind) for part in parts], axis=1)
    widths = [part.shape[1] for part in parts]
    names = [key for key, width in zip(columns, widths, strict=True) for _ in range(width)]
    return Table(rows, ids, tuple(map(str, names)))


def rows(name: str, x: Any, **options: Any) -> np.ndarray:
    """Converts a table, array or tensor to checked embeddings.

    Args:
        name: Name of the argument for error messages.
        x: As in `read`.
        **options: As in `checks.embeddings`.

    Returns:
        The embeddings.

    Raises:
        InputError: See `read` and `checks.embeddings`. The message names rows and columns.

    Example:
        >>> rows("x", {"id": ["a", "b"], "f": [0.5, float("nan")]})
        Traceback (most recent call last):
        sotalign_jax.checks.InputError: x has NaN or inf in row 'b' of 'f'; remove such rows, as
        align does with nan='drop'
    """
    table = read(name, x)
    checks.embeddings(name, table.rows, ids=table.ids, columns=table.columns, **options)
    return table.rows


def matches(pairs: Any, x: Table, y: Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Looks up a table of pairs of ids.

    Args:
        pairs: A table with two columns: ids of x and ids of y. Row numbers are the ids of a table
            without ids.
        x: Table of the first modality.
        y: Table of the second modality.

    Returns:
        Row numbers of x and of y, and a mask of the pairs that have both ids. A missing id is None
        or NaN. The row numbers of such a pair are 0.

    Raises:
        InputError: `pairs` has another number of columns, or its columns have different numbers of
            rows, or an id is unknown or occurs twice.

    Example:
        >>> x, y = Table(np.eye(2), np.array(["a", "b"])), Table(np.eye(3))
        >>> first, second, known = matches({"x": ["b", "a"], "y": [2, 0]}, x, y)
        >>> first.tolist(), second.tolist()
        ([1, 0], [2, 0])
    """
    columns = _columns(pairs)
    if columns is None or len(columns) != 2:
        found = type(pairs).__name__ if columns is None else f"columns {', '.join(columns)}"
        raise checks.InputError(f"pairs must have two columns, ids of x and of y, got {found}")
    numbers, known = [], []
    for side, table, (key, column) in zip("xy", (x, y), columns.items(), strict=True):
        given = np.asarray(column, dtype=object)
        there = np.array([not _missing(one) for one in given], bool)
        numbers.append(_numbers(f"pairs[{key!r}]", given, there, side, table))
        known.append(there)
    lengths = {key: len(there) for key, there in zip(columns, known, strict=True)}
    if len(known[0]) != len(known[1]):
        raise _uneven("pairs", lengths)
    return numbers[0], numbers[1], known[0] & known[1]


def unusable(table: Table) -> np.ndarray:
    """Returns the numbers of rows that have NaN or inf, or only zeros."""
    found = [bad for bad, _, _ in checks.bad_rows(table.rows)]
    return np.unique(np.concatenate(found)) if found else np.empty(0, np.intp)


def names(table: Table, numbers: Sequence[int] | np.ndarray) -> list[Any]:
    """Returns the ids of rows as JSON values, or their numbers if the table has no ids.

    Args:
        table: The table.
        numbers: Row numbers.

    Returns:
        One name per row.
    """
    kept = np.asarray(numbers, np.intp)
    if table.ids is None:
        return kept.tolist()
    return [one if isinstance(one, str | int) else str(one) for one in table.ids[kept].tolist()]


def is_table(x: Any) -> bool:
    """Returns True if an object has named columns."""
    if isinstance(x, np.ndarray):
        return x.dtype.names is not None
    frame = hasattr(x, "to_numpy") and (hasattr(x, "columns") or hasattr(x, "iloc"))
    return isinstance(x, Mapping | Table) or hasattr(x, "column_names") or frame


def _columns(x: Any) -> dict[str, Any] | None:
    """Returns the columns of a table by name, or None for any other object."""
    if isinstance(x, Mapping):
        return dict(x)
    if isinstance(x, np.ndarray):
        return None if x.dtype.names is None else {name: x[name] for name in x.dtype.names}
    # A Hugging Face dataset in its Arrow format returns an Arrow table of its selected rows.
    if hasattr(x, "with_format") and hasattr(x, "column_names"):
        x = x.with_format("arrow")[:]
    if hasattr(x, "column_names") and hasattr(x, "combine_chunks"):
        chunks = {name: x.column(name).combine_chunks() for name in x.column_names}
        return {name: _from_arrow(chunk) for name, chunk in chunks.items()}
    if hasattr(x, "to_numpy") and hasattr(x, "columns"):
        return {str(name): x[name].to_numpy() for name in x.columns}
    if hasattr(x, "to_numpy") and hasattr(x, "index") and hasattr(x, "iloc"):  # a pandas series
        return {str(x.name): x.to_numpy()}
    return None


def _from_arrow(array: Any) -> np.ndarray:
    """Converts an Arrow array to numpy. Lists become a matrix if they have one length."""
    if hasattr(array, "chunks"):  # combine_chunks of some versions returns a chunked array
        array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
    if hasattr(array, "flatten") and hasattr(array.type, "value_type") and len(array):
        values = array.flatten().to_numpy(zero_copy_only=False)
        if array.null_count == 0 and len(values) % len(array) == 0:
            lengths = np.array([len(one) for one in array])
            if (lengths == lengths[0]).all():
                return values.reshape(len(array), -1)
    return array.to_numpy(zero_copy_only=False)


def _index(x: Any) -> np.ndarray | None:
    """Returns the index of a pandas object, or None if it merely counts the rows."""
    index = getattr(x, "index", None)
    if index is None or not hasattr(index, "to_numpy"):
        return None
    made = index.to_numpy()
    counts = made.dtype.kind in "iu" and np.array_equal(made, np.arange(len(made)))
    return None if counts else made


def _block(name: str, column: Any) -> np.ndarray:
    """Converts a column to a matrix of numbers. Missing numbers become NaN."""
    made = _array(name, column)
    if made.ndim == 0:
        raise checks.InputError(f"{name} must hold one value per row, got {column!r}")
    if made.dtype == object:
        vectors = [one for one in made if np.ndim(one) == 1]
        if vectors:
            return _stacked(name, made, len(vectors[0]))
        try:
            # None and pandas' missing values become NaN.
            made = np.array([np.nan if _missing(one) else one for one in made], np.float64)
        except (TypeError, ValueError) as error:
            raise checks.InputError(
                f"{name} must hold numbers or vectors ({checks.first_line(error)}); drop the "
                f"column, or call it {ID!r} if it holds ids"
            ) from error
    if made.dtype.kind not in "biufV" and "float" not in made.dtype.name:
        raise checks.InputError(
            f"{name} must hold numbers or vectors, got dtype {made.dtype}; drop the column, or "
            f"call it {ID!r} if it holds ids"
        )
    return made.reshape(len(made), math.prod(made.shape[1:]))


def _array(name: str, column: Any) -> np.ndarray:
    """Converts a column to an array, of objects if it is ragged."""
    if isinstance(column, np.ndarray):
        return column
    if hasattr(column, "detach"):
        return checks.stored(name, column)
    try:
        return np.asarray(column)
    except ValueError:  # vectors of several lengths, or with missing ones among them
        return np.fromiter(column, object)


def _stacked(name: str, column: np.ndarray, width: int) -> np.ndarray:
    """Stacks a column of vectors. A missing vector becomes a row of NaN."""
    missing = np.full(width, np.nan, np.float32)
    vectors = [missing if _missing(one) else np.asarray(one) for one in column]
    shapes = {one.shape for one in vectors}
    if len(shapes) > 1:
        raise checks.InputError(
            f"{name} must hold vectors of one length, got shapes {sorted(shapes)}"
        )
    return np.stack(vectors)


def _uneven(name: str, lengths: Mapping[str, int]) -> checks.InputError:
    """Returns the error for columns of different lengths."""
    found = ", ".join(f"{length} in {key!r}" for key, length in lengths.items())
    return checks.InputError(f"{name} must have columns of equal length, got rows {found}")


def _missing(value: Any) -> bool:
    """Returns True for None, NaN and pandas' missing values."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float | np.floating) and bool(np.isnan(value))


def _numbers(
    name: str, given: np.ndarray, there: np.ndarray, side: str, table: Table
) -> np.ndarray:
    """Returns the row numbers of ids. Raises InputError if an id is unknown or occurs twice."""
    if given.ndim != 1 or not all(isinstance(one, Hashable) for one in given):
        raise checks.InputError(f"{name} must hold one id per row, got lists; pass a flat column")
    ids = range(len(table.rows)) if table.ids is None else table.ids.tolist()
    row_of = {one: number for number, one in enumerate(ids)}
    if len(row_of) < len(ids):
        twice = next(one for number, one in enumerate(ids) if row_of[one] != number)
        raise checks.InputError(f"{side} has the id {twice!r} twice; ids of pairs must be unique")
    unknown = [one for one in given[there] if one not in row_of]
    if unknown:
        shown = checks.listed([repr(one) for one in unknown])
        raise checks.InputError(f"{name} has ids that are not in {side}: {shown}; correct them")
    return np.array([row_of[one] if known else 0 for one, known in zip(given, there, strict=True)])
