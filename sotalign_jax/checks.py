"""Checks of what users hand in: one clear line naming the argument, the value and the remedy."""

import contextlib
import importlib
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CHUNK_ROWS = 65_536
"""Rows that are checked at a time."""
_share = (0, 1)


class InputError(ValueError):
    """Something the user gave cannot be used; the message says what and how to mend it."""


def not_installed(package: str, *, extra: str) -> InputError:
    """What to raise when a package of an extra is missing.

    >>> not_installed("torch", extra="extract")
    InputError("torch: is not installed; run pip install -e '.[extract]'")
    """
    return InputError(f"{package}: is not installed; run pip install -e '.[{extra}]'")


def require(module: str, *, extra: str) -> Any:
    """Imports a module of an extra's package, when it is needed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise not_installed(error.name or module, extra=extra) from error


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Puts `where` before the message of an InputError.

    >>> with naming("teacher: "):
    ...     whole(1, dim=0)
    Traceback (most recent call last):
    sotalign_jax.checks.InputError: teacher: dim: is 0; pass a whole number of at least 1
    """
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}{error}") from error


def first_line(error: BaseException) -> str:
    r"""What an error says, in one line.

    >>> first_line(OSError("no such file\nat 0x7f"))
    'no such file'
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def set_share(index: int, count: int) -> None:
    """Lets this process look at every `count`-th part of an array only: others see the rest."""
    global _share
    _share = index, count


def array(name: str, x: Any) -> np.ndarray:
    """`x` as a numpy array; torch tensors may be bfloat16, on any device, or require a gradient.

    >>> array("x", [[1.0, 2.0]]).shape
    (1, 2)
    """
    try:
        if hasattr(x, "detach"):
            x = x.detach().cpu()
            x = x.float() if str(x.dtype) == "torch.bfloat16" else x  # numpy has no such type
        return np.asarray(x)
    except (TypeError, ValueError) as error:
        message = f"{name}: not an array of numbers ({error}); pass a 2-D float array"
        raise InputError(message) from error


def embeddings(name: str, x: Any, *, width: int | None = None, min_rows: int = 1) -> None:
    """Raises unless `x` is a 2-D float array of finite, non-zero rows.

    Reads `x` in row chunks, so memory-mapped files larger than memory are fine.

    >>> embeddings("x", np.ones((3, 2)), width=4)
    Traceback (most recent call last):
    sotalign_jax.checks.InputError: x: rows have width 2 but 4 is needed; use one encoder for both
    """
    shape = np.shape(x)
    if len(shape) != 2:
        raise InputError(f"{name}: has shape {shape}; pass a 2-D array, one embedding a row")
    if shape[0] < min_rows:
        raise InputError(f"{name}: has {shape[0]} rows but at least {min_rows} are needed")
    if shape[1] == 0:
        raise InputError(f"{name}: rows have width 0; pass embeddings with at least one feature")
    if width is not None and shape[1] != width:
        raise InputError(
            f"{name}: rows have width {shape[1]} but {width} is needed; use one encoder for both"
        )
    kind = np.dtype(x.dtype)
    if kind.kind not in "fV" and "float" not in kind.name:  # bfloat16 registers as kind V
        raise InputError(f"{name}: has dtype {kind}; pass real floating-point embeddings")
    index, count = _share
    for start in range(index * CHUNK_ROWS, shape[0], count * CHUNK_ROWS):
        block = np.asarray(x[start : start + CHUNK_ROWS]).astype(np.float32)
        for bad, problem in (
            (~np.isfinite(block).all(axis=1), "NaN or inf; remove such rows before aligning"),
            (~block.any(axis=1), "all zeros and has no direction; remove such rows"),
        ):
            if bad.any():
                raise InputError(f"{name}: row {start + np.flatnonzero(bad)[0]} is {problem}")


def rows(name: str, x: Any, *, width: int | None = None, min_rows: int = 1) -> np.ndarray:
    """`x` as a numpy array; raises unless it holds embeddings.

    >>> rows("x", [[1.0, 2.0]]).shape
    (1, 2)
    """
    made = array(name, x)
    embeddings(name, made, width=width, min_rows=min_rows)
    return made


def features(name: str, x: Any, *, ndim: int = 2, width: int | None = None) -> jax.Array:
    """`x` as a JAX array; raises unless it is a non-empty, finite array of `ndim` dimensions.

    >>> features("y", np.ones((3, 2)), width=4)
    Traceback (most recent call last):
    sotalign_jax.checks.InputError: y: features have width 2 but 4 is needed; map both modalities
    into the shared space first
    """
    out = jnp.asarray(x)
    if out.ndim != ndim or 0 in out.shape or not jnp.issubdtype(out.dtype, jnp.floating):
        raise InputError(
            f"{name}: has shape {out.shape} and dtype {out.dtype}; "
            f"pass a non-empty {ndim}-D array of float features"
        )
    if width is not None and out.shape[-1] != width:
        raise InputError(
            f"{name}: features have width {out.shape[-1]} but {width} is needed; "
            "map both modalities into the shared space first"
        )
    if not finite(out):
        raise InputError(f"{name}: features contain NaN or inf; check the heads and their inputs")
    return out


@jax.jit
def finite(x: jax.Array) -> jax.Array:
    """Whether no value is NaN or infinite.

    >>> bool(finite(jnp.array([1.0, jnp.nan])))
    False
    """
    return jnp.isfinite(x).all()


def pairs(
    x: Any, y: Any, *, names: tuple[str, str] = ("pairs_x", "pairs_y"), min_rows: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Both as numpy arrays; raises unless they are embeddings, as many rows of one as of the other.

    >>> pairs(np.ones((3, 2)), np.ones((4, 2)))
    Traceback (most recent call last):
    sotalign_jax.checks.InputError: pairs_y: has 4 rows but pairs_x has 3; paired arrays need equal
    length
    """
    x, y = rows(names[0], x, min_rows=min_rows), rows(names[1], y, min_rows=min_rows)
    if len(x) != len(y):
        raise InputError(
            f"{names[1]}: has {len(y)} rows but {names[0]} has {len(x)}; "
            "paired arrays need equal length"
        )
    return x, y


def choice(name: str, value: str, options: tuple[str, ...]) -> None:
    """Raises unless `value` is one of `options`.

    >>> choice("marginals", "rows", ("prob", "bistochastic"))
    Traceback (most recent call last):
    sotalign_jax.checks.InputError: marginals: 'rows' is unknown; choose one of prob, bistochastic
    """
    if value not in options:
        raise InputError(f"{name}: {value!r} is unknown; choose one of {', '.join(options)}")


def positive(**options: Any) -> None:
    """Raises unless every option is a finite number above 0, or traced and so not known yet.

    >>> positive(epsilon=0.05, epsilon_star=0.0)
    Traceback (most recent call last):
    sotalign_jax.checks.InputError: epsilon_star: is 0.0; pass a number above 0
    """
    _every(options, lambda value: 0 < value < math.inf, "a number above 0")


def at_least(least: float, **options: Any) -> None:
    """Raises unless every option is a finite number of at least `least`, or traced.

    >>> at_least(0, ridge=-1.0)
    Traceback (most recent call last):
    sotalign_jax.checks.InputError: ridge: is -1.0; pass a number of at least 0
    """
    _every(options, lambda value: least <= value < math.inf, f"a number of at least {least:g}")


def whole(least: int, *, most: int | None = None, or_none: bool = False, **options: Any) -> None:
    """Raises unless every option is a whole number in `least`..`most`, or None if `or_none`.

    >>> whole(1, repeats=3, chunk=0)
    Traceback (most recent call last):
    sotalign_jax.checks.InputError: chunk: is 0; pass a whole number of at least 1
    """
    given = {name: v for name, v in options.items() if not (or_none and v is None)}
    limits = f"of at least {least}" if most is None else f"in {least}..{most}"
    top = math.inf if most is None else most
    wanted = f"a whole number {limits}{', or None' if or_none else ''}"
    _every(given, lambda value: least <= operator.index(value) <= top, wanted)


def within(most: int, of: str, *, least: int = 1, **options: Any) -> None:
    """Raises unless every option is a whole number of at least `least` and of what there is.

    >>> within(5, "rows in the gallery", k=10)
    Traceback (most recent call last):
    sotalign_jax.checks.InputError: k: is 10; pass a whole number in 1..5, for there are 5 rows in
    the gallery
    """
    wanted = f"a whole number in {least}..{most}, for there are {most} {of}"
    _every(options, lambda value: least <= operator.index(value) <= most, wanted)


def static(**options: Any) -> None:
    """Raises if an option that is fixed when a program is compiled is traced.

    >>> jax.jit(lambda steps: static(steps=steps))(3)  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    sotalign_jax.checks.InputError: steps: is traced but must be known when compiling; ...
    """
    for name, value in options.items():
        if isinstance(value, jax.core.Tracer):
            raise InputError(
                f"{name}: is traced but must be known when compiling; "
                f"give jax.jit static_argnames={name!r}, or bind it with functools.partial"
            )


def _every(options: dict[str, Any], fine: Callable[[Any], bool], wanted: str) -> None:
    for name, value in options.items():
        if np.shape(value):
            raise InputError(f"{name}: has shape {np.shape(value)}; pass {wanted}")
        if isinstance(value, jax.core.Tracer):
            continue
        with contextlib.suppress(TypeError):  # not a number
            if fine(value):
                continue
        shown = repr(value) if isinstance(value, str) else value
        raise InputError(f"{name}: is {shown}; pass {wanted}")
