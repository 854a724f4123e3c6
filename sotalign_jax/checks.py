"""Input validation: every error is one line with the argument, its value and the remedy."""

import contextlib
import importlib
import math
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

CHUNK_ROWS = 65_536
"""Number of rows that are read and checked at a time. Files may be larger than memory."""
MIN_PAIRS = 6
"""Smallest number of pairs to train or cross-validate on. A third of them is held out, and folds of
fewer pairs cannot distinguish options."""
# Problems of rows, for error messages.
_INFINITE, _ZEROS = "NaN or inf", "only zeros"
# Index of this process and number of processes, set by experiments.distributed.
_shard = (0, 1)


class InputError(ValueError):
    """Raised for an invalid argument. The message has its name, its value and a remedy."""


def not_installed(package: str, *, extra: str) -> InputError:
    """Returns the error for a package of an optional extra that is missing.

    Args:
        package: Name of the package.
        extra: Extra of this project that installs it.

    Returns:
        The error to raise.

    Example:
        >>> not_installed("torch", extra="extract")
        InputError("torch is not installed; run pip install 'sotalign-jax[extract]'")
    """
    return InputError(f"{package} is not installed; run pip install 'sotalign-jax[{extra}]'")


def require(module: str, *, extra: str) -> Any:
    """Imports a module that belongs to an optional extra.

    Args:
        module: Name of the module.
        extra: Extra of this project that installs it.

    Returns:
        The module.

    Raises:
        InputError: The package is not installed.

    Example:
        >>> require("json", extra="files").dumps([1])
        '[1]'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise not_installed(error.name or module, extra=extra) from error


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Adds a prefix to the message of every InputError that is raised within the context.

    Args:
        where: The prefix, such as "teacher: ".

    Raises:
        InputError: The error with the prefix.

    Example:
        >>> with naming("teacher: "):
        ...     whole(1, dim=0)
        Traceback (most recent call last):
        sotalign_jax.checks.InputError: teacher: dim must be an integer >= 1, got 0
    """
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}{error}") from None


def first_line(error: BaseException) -> str:
    r"""Returns the first line of an error's message, or the error's type if it has none.

    Args:
        error: Any exception.

    Returns:
        One line.

    Example:
        >>> first_line(OSError("no such file\nat 0x7f"))
        'no such file'
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def to_python(value: Any) -> Any:
    """Converts a numpy or JAX scalar to the Python number with the same digits.

    Args:
        value: Any value.

    Returns:
        An int, float or bool for a scalar. Other values, tracers included, are returned unchanged.

    Example:
        >>> to_python(np.int64(2)), to_python(np.float32(0.1)), to_python("sum")
        (2, 0.1, 'sum')
    """
    # Tracers are instances of jax.Array without a value.
    scalar = isinstance(value, np.generic | np.ndarray | jax.Array) and np.ndim(value) == 0
    if not scalar or isinstance(value, jax.core.Tracer):
        return value
    number = np.asarray(value)[()]
    # Through its string, because float(np.float32(0.1)) is 0.10000000149011612.
    return float(str(number)) if jnp.issubdtype(number.dtype, jnp.floating) else number.item()


def native_dtype(dtype: Any) -> np.dtype:
    """Returns the type in which JAX computes with stored numbers.

    Args:
        dtype: Type of the stored numbers.

    Returns:
        The type in this machine's byte order. It is float64 for longer floats, and float32 for bits
        and unsigned bytes, such as binary fingerprints. Other types stay as they are.

    Example:
        >>> native_dtype(">f4"), native_dtype(np.uint8), native_dtype(np.float16)
        (dtype('float32'), dtype('float32'), dtype('float16'))
    """
    kind = np.dtype(dtype)
    if kind == np.bool_ or kind == np.uint8:
        return np.dtype(np.float32)
    if kind.kind == "f" and kind.itemsize > 8:
        return np.dtype(np.float64)
    return kind.newbyteorder("=") if kind.kind in "fiuc" else kind


def native(x: np.ndarray) -> np.ndarray:
    """Converts stored numbers to the type in which JAX computes with them.

    Args:
        x: Any array.

    Returns:
        The array in its `native_dtype`, without a copy if it has that type already.

    Example:
        >>> native(np.ones(2, ">f4")).dtype, native(np.array([True, False])).tolist()
        (dtype('float32'), [1.0, 0.0])
    """
    kind = native_dtype(x.dtype)
    # numpy treats equal types of another byte order as different ones.
    return x if kind == x.dtype else x.astype(kind)


def is_mapped(x: Any) -> bool:
    """Returns True if an array is memory-mapped, so that converting all of it costs memory.

    Args:
        x: Any array.

    Returns:
        True for a `numpy.memmap` and for a view of one.

    Example:
        >>> is_mapped(np.ones(2))
        False
    """
    return isinstance(x, np.memmap) or isinstance(getattr(x, "base", None), np.memmap)


def array(name: str, x: Any) -> np.ndarray:
    """Converts an array, tensor or nested list to a numpy array that JAX computes with.

    Args:
        name: Name of the argument for error messages.
        x: Anything that numpy converts, or a torch tensor of any dtype, on any device.

    Returns:
        The numpy array in its `native_dtype`. A memory-mapped array keeps its dtype, and its rows
        are converted when they are read.

    Raises:
        InputError: See `stored`.

    Example:
        >>> array("x", [[1.0, 2.0]]).shape
        (1, 2)
    """
    made = stored(name, x)
    return made if is_mapped(made) else native(made)


def stored(name: str, x: Any) -> np.ndarray:
    """Converts an array, tensor or nested list to a numpy array of the same type of numbers.

    Args:
        name: Name of the argument for error messages.
        x: Anything that numpy converts, or a torch tensor of any dtype, on any device.

    Returns:
        The numpy array. A bfloat16 tensor keeps its dtype.

    Raises:
        InputError: `x` is sparse or ragged, holds arrays as cells, or does not hold numbers.

    Example:
        >>> stored("x", [[1, 2]]).dtype
        dtype('int64')
    """
    # Of scipy.sparse, and of packages with the same interface.
    if hasattr(x, "toarray"):
        raise InputError(
            f"{name} must be dense, got a sparse {type(x).__name__}; pass {name}.toarray()"
        )
    try:
        if hasattr(x, "detach"):
            x = x.detach().cpu()
            # numpy has no bfloat16, so the bits are converted as integers. torch is in
            # `sys.modules`, because the caller has a tensor.
            if str(x.dtype) == "torch.bfloat16":
                return x.view(sys.modules["torch"].int16).numpy().view(ml_dtypes.bfloat16)
        made = np.asarray(x)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{name} must be an array of numbers, got {type(x).__name__} ({first_line(error)})"
        ) from error
    if made.dtype != object:
        return made
    if shapes := {np.shape(cell) for cell in made.ravel()} - {()}:
        cells = f"{name} must be one array, got a column of {made.size} arrays"
        if len(shapes) > 1:
            raise InputError(f"{cells} of different shapes; pass rows of equal length")
        raise InputError(f"{cells} of shape {shapes.pop()}; pass np.stack({name})")
    raise InputError(f"{name} must hold numbers, got dtype object; try {name}.astype(np.float32)")


def embeddings(
    name: str,
    x: Any,
    *,
    width: int | None = None,
    min_rows: int = 1,
    other_width: int | None = None,
    ids: Any = None,
    columns: Sequence[str] | None = None,
) -> None:
    """Checks that an array is 2-D, holds floats, and has only finite, non-zero rows.

    The array is read in chunks of rows and may be memory-mapped. Bits and unsigned bytes count as
    floats, because binary fingerprints are stored so.

    Args:
        name: Name of the argument for error messages.
        x: The array.
        width: Required number of columns.
        min_rows: Required number of rows.
        other_width: Width of the other modality, to recognise exchanged arguments.
        ids: Names of the rows for error messages. By default their numbers.
        columns: Name of the table's column that each feature comes from, for error messages.

    Raises:
        InputError: The array cannot hold embeddings.

    Example:
        >>> embeddings("x", np.ones((3, 2)), width=4)
        Traceback (most recent call last):
        sotalign_jax.checks.InputError: x must have width 4, got 2; use one encoder for both
    """
    # Shape and dtype are checked first, because reading all values of a large file takes long.
    shape = np.shape(x)
    if len(shape) != 2:
        raise InputError(f"{name} must be 2-D, one embedding per row, got shape {shape}")
    if shape[0] < min_rows:
        raise InputError(f"{name} must have at least {min_rows} rows, got {shape[0]}")
    if shape[1] == 0:
        raise InputError(f"{name} must have a width >= 1, got 0")
    if width is not None and shape[1] != width:
        raise wrong_width(name, shape, width, other_width)
    kind = native_dtype(x.dtype)
    if kind.kind in "iu":
        raise InputError(
            f"{name} must be floating-point, got dtype {kind}; pass {name}.astype(np.float32), "
            "multiplied by its scale if it holds 8-bit codes"
        )
    if kind.kind not in "fV" and "float" not in kind.name:  # bfloat16 registers as kind V
        raise InputError(f"{name} must be real and floating-point, got dtype {kind}")
    for bad, problem, block in bad_rows(x):
        # Through `tolist`, because numpy's own strings are shown as np.str_('b').
        named = list(map(repr, bad.tolist() if ids is None else np.asarray(ids)[bad].tolist()))
        where = f"row{'s' if len(named) > 1 else ''} {listed(named)}"
        if columns is not None and problem != _ZEROS:
            features = np.flatnonzero(~np.isfinite(block).all(axis=0))
            parts = dict.fromkeys(columns[feature] for feature in features.tolist())
            where += f" of {listed([repr(part) for part in parts])}"
        raise InputError(
            f"{name} has {problem} in {where}; remove such rows, as align does with nan='drop'"
        )


def bad_rows(x: Any) -> Iterator[tuple[np.ndarray, str, np.ndarray]]:
    """Finds rows that cannot be embeddings, in chunks.

    Args:
        x: The array, which may be memory-mapped.

    Yields:
        Row numbers, their problem in words, and these rows in float32, for every chunk and problem.

    Example:
        >>> [(rows.tolist(), why) for rows, why, _ in bad_rows(np.array([[1.0], [np.nan], [0.0]]))]
        [([1], 'NaN or inf'), ([2], 'only zeros')]
    """
    # Each of `count` processes reads every count-th chunk. Together they read a shared file once.
    index, count = _shard
    for start in range(index * CHUNK_ROWS, len(x), count * CHUNK_ROWS):
        block = np.asarray(x[start : start + CHUNK_ROWS]).astype(np.float32)
        for bad, problem in (
            (~np.isfinite(block).all(axis=1), _INFINITE),
            (~block.any(axis=1), _ZEROS),
        ):
            if bad.any():
                yield start + np.flatnonzero(bad), problem, block[bad]


def listed(names: Sequence[str], *, most: int = 5) -> str:
    """Joins names to a list in words.

    Args:
        names: The names.
        most: Largest number of names that are shown.

    Returns:
        The list.

    Example:
        >>> listed(["8", "131"]), listed(["1", "2", "3", "4"], most=2)
        ('8 and 131', '1, 2 and 2 others')
    """
    shown = [*names[:most]]
    if len(names) > most:
        left = len(names) - most
        shown.append(f"{left} other{'s' if left > 1 else ''}")
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def wrong_width(
    name: str, shape: tuple[int, ...], width: int, other_width: int | None = None
) -> InputError:
    """Returns the error for an array of a wrong width, with the likely cause.

    Args:
        name: Name of the argument.
        shape: Its shape, rows by columns.
        width: The width that it must have.
        other_width: Width of the other modality, to recognise exchanged arguments.

    Returns:
        The error to raise.

    Example:
        >>> wrong_width("x", (500, 384), 512, 384)
        InputError('x must have width 512, got 384; 384 is the width of the other modality, so
        x and y look exchanged')
    """
    cause = "use one encoder for both"
    # The two most frequent mistakes are recognised.
    if shape[0] == width:
        cause = f"its shape is {shape}, so it looks transposed: pass {name}.T"
    elif shape[-1] == other_width:
        cause = f"{other_width} is the width of the other modality, so x and y look exchanged"
    return InputError(f"{name} must have width {width}, got {shape[-1]}; {cause}")


def rows(
    name: str,
    x: Any,
    *,
    width: int | None = None,
    min_rows: int = 1,
    other_width: int | None = None,
) -> np.ndarray:
    """Converts embeddings to a numpy array and checks them.

    Args:
        name: Name of the argument for error messages.
        x: The embeddings, see `array`.
        width: Required number of columns.
        min_rows: Required number of rows.
        other_width: Width of the other modality, to recognise exchanged arguments.

    Returns:
        The numpy array.

    Raises:
        InputError: See `array` and `embeddings`.

    Example:
        >>> rows("x", [[1.0, 2.0]]).shape
        (1, 2)
    """
    made = array(name, x)
    embeddings(name, made, width=width, min_rows=min_rows, other_width=other_width)
    return made


def features(name: str, x: Any, *, ndim: int = 2, width: int | None = None) -> jax.Array:
    """Converts features to a JAX array and checks them.

    Args:
        name: Name of the argument for error messages.
        x: The features.
        ndim: Required number of dimensions.
        width: Required size of the last dimension.

    Returns:
        The JAX array.

    Raises:
        InputError: The features are empty, not finite, not floats or have another shape.

    Example:
        >>> features("y", np.ones((3, 2)), width=4)
        Traceback (most recent call last):
        sotalign_jax.checks.InputError: y must have width 4, got 2; map both modalities into the
        shared space first
    """
    # Features are outputs of heads. Unlike embeddings they may be on a device, and may be zero.
    out = jnp.asarray(native(x) if isinstance(x, np.ndarray) else x)
    if out.ndim != ndim or 0 in out.shape or not jnp.issubdtype(out.dtype, jnp.floating):
        raise InputError(
            f"{name} must be a non-empty {ndim}-D array of floats, got shape {out.shape} and dtype "
            f"{out.dtype}"
        )
    if width is not None and out.shape[-1] != width:
        raise InputError(
            f"{name} must have width {width}, got {out.shape[-1]}; "
            "map both modalities into the shared space first"
        )
    if not finite(out):
        raise InputError(f"{name} must be finite, got NaN or inf; check the heads and their inputs")
    return out


@jax.jit
def finite(x: jax.Array) -> jax.Array:
    """Returns True if every value is finite.

    Args:
        x: Any array.

    Returns:
        A scalar of dtype bool.

    Example:
        >>> bool(finite(jnp.array([1.0, jnp.nan])))
        False
    """
    return jnp.isfinite(x).all()


def pairs(
    x: Any, y: Any, *, names: tuple[str, str] = ("pairs_x", "pairs_y"), min_rows: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Converts paired embeddings to numpy arrays and checks them.

    Args:
        x: Embeddings of one modality.
        y: Embeddings of the other modality. Row i belongs to row i of `x`.
        names: Names of both arguments for error messages.
        min_rows: Required number of rows.

    Returns:
        Both numpy arrays.

    Raises:
        InputError: See `array` and `embeddings`, or the numbers of rows differ.

    Example:
        >>> pairs(np.ones((3, 2)), np.ones((4, 2)))
        Traceback (most recent call last):
        sotalign_jax.checks.InputError: pairs_y has 4 rows but pairs_x has 3; row i of one must
        belong to row i of the other
    """
    # Numbers of rows are compared first, because reading all values of large files takes long.
    x, y = array(names[0], x), array(names[1], y)
    if x.ndim == y.ndim == 2 and len(x) != len(y):
        problem = f"{names[1]} has {len(y)} rows but {names[0]} has {len(x)}"
        for name, own, other in ((names[1], y, x), (names[0], x, y)):
            if own.shape[1] == len(other) and own.size:
                shape = f"{name} has shape {own.shape}, so it looks transposed"
                raise InputError(f"{problem}; {shape}: pass {name}.T")
        raise InputError(f"{problem}; row i of one must belong to row i of the other")
    for name, made in zip(names, (x, y), strict=True):
        embeddings(name, made, min_rows=min_rows)
    return x, y


def choice(name: str, value: str, options: tuple[str, ...]) -> None:
    """Checks that a value is one of the allowed options.

    Args:
        name: Name of the argument for error messages.
        value: The value.
        options: The allowed values.

    Raises:
        InputError: `value` is none of `options`.

    Example:
        >>> choice("marginals", "rows", ("prob", "bistochastic"))
        Traceback (most recent call last):
        sotalign_jax.checks.InputError: marginals must be one of prob, bistochastic, got 'rows'
    """
    if value not in options:
        raise InputError(f"{name} must be one of {', '.join(options)}, got {value!r}")


def positive(**options: Any) -> None:
    """Checks that numbers are finite and above 0. Traced values pass.

    Args:
        **options: Numbers by the names of their arguments.

    Raises:
        InputError: One of them is not.

    Example:
        >>> positive(epsilon=0.05, epsilon_star=0.0)
        Traceback (most recent call last):
        sotalign_jax.checks.InputError: epsilon_star must be > 0, got 0.0
    """
    _check_all(options, lambda value: 0 < value < math.inf, "> 0")


def at_least(least: float, **options: Any) -> None:
    """Checks that numbers are finite and at least `least`. Traced values pass.

    Args:
        least: The smallest allowed number.
        **options: Numbers by the names of their arguments.

    Raises:
        InputError: One of them is smaller, or not a finite number.

    Example:
        >>> at_least(0, ridge=-1.0)
        Traceback (most recent call last):
        sotalign_jax.checks.InputError: ridge must be >= 0, got -1.0
    """
    _check_all(options, lambda value: least <= value < math.inf, f">= {least:g}")


def whole(least: int, *, most: int | None = None, or_none: bool = False, **options: Any) -> None:
    """Checks that numbers are integers in `least`..`most`. Traced values pass.

    Args:
        least: The smallest allowed number.
        most: The largest allowed number, if any.
        or_none: Allow None.
        **options: Numbers by the names of their arguments.

    Raises:
        InputError: One of them is outside, or not an integer.

    Example:
        >>> whole(1, repeats=3, chunk=0)
        Traceback (most recent call last):
        sotalign_jax.checks.InputError: chunk must be an integer >= 1, got 0
    """
    given = {name: v for name, v in options.items() if not (or_none and v is None)}
    limits = f">= {least}" if most is None else f"in {least}..{most}"
    top = math.inf if most is None else most
    wanted = f"an integer {limits}{' or None' if or_none else ''}"
    _check_all(given, lambda value: least <= operator.index(value) <= top, wanted)


def within(most: int, of: str, *, least: int = 1, **options: Any) -> None:
    """Checks that numbers are integers in `least`..`most`, where `most` counts rows or the like.

    Args:
        most: The largest allowed number.
        of: The counted things, for error messages, such as "rows in the gallery".
        least: The smallest allowed number.
        **options: Numbers by the names of their arguments.

    Raises:
        InputError: One of them is outside, or not an integer.

    Example:
        >>> within(5, "rows in the gallery", k=10)
        Traceback (most recent call last):
        sotalign_jax.checks.InputError: k must be an integer in 1..5 (there are 5 rows in the
        gallery), got 10
    """
    wanted = f"an integer in {least}..{most} (there are {most} {of})"
    _check_all(options, lambda value: least <= operator.index(value) <= most, wanted)


def static(**options: Any) -> None:
    """Checks that options that must be known at compile time are not traced.

    Args:
        **options: Values by the names of their arguments.

    Raises:
        InputError: One of them is traced.

    Example:
        >>> jax.jit(lambda steps: static(steps=steps))(3)  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        sotalign_jax.checks.InputError: steps must be known when compiling, got a traced value; ...
    """
    for name, value in options.items():
        if isinstance(value, jax.core.Tracer):
            raise InputError(
                f"{name} must be known when compiling, got a traced value; "
                f"give jax.jit static_argnames={name!r}, or bind it with functools.partial"
            )


def _check_all(options: dict[str, Any], fine: Callable[[Any], bool], wanted: str) -> None:
    """Raises unless every option is a scalar for which `fine` holds, or traced."""
    for name, value in options.items():
        if np.shape(value):
            raise InputError(f"{name} must be {wanted}, got an array of shape {np.shape(value)}")
        # A traced value is unknown here. The solver returns an infinite error for a bad epsilon.
        if isinstance(value, jax.core.Tracer):
            continue
        with contextlib.suppress(TypeError):  # not a number
            if fine(value):
                continue
        shown = to_python(value)
        raise InputError(f"{name} must be {wanted}, got {shown!r}")
