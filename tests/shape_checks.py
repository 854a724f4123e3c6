"""Checks the array annotations of the package's functions while the tests run.

A call is checked after it has returned, so that bad input raises the package's own error, and
numpy arrays are accepted where JAX arrays are annotated. The import hook of jaxtyping checks before
the call and would reject both.
"""

import functools
import importlib
import inspect
import pkgutil
import types
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np


def install(package: types.ModuleType) -> None:
    """Wraps every plain function with array annotations in the modules of `package`."""
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    # Commands define flags on import, and encoders need torch. Neither annotates arrays.
    other = tuple(f"{package.__name__}.{name}" for name in ("search", "extract", "pair", "serve"))
    names = [info.name for info in found if not info.name.startswith(other)]
    modules = [importlib.import_module(name) for name in names]
    wrapped = {}
    for module in modules:
        for function in vars(module).values():
            local = inspect.isfunction(function) and function.__module__ == module.__name__
            if local and any(map(_mentions_array, function.__annotations__.values())):
                wrapped[function] = checked(function)
    for module in [package, *modules]:  # also where a function was imported by name
        for name, value in list(vars(module).items()):
            if inspect.isfunction(value) and value in wrapped:
                setattr(module, name, wrapped[value])


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `function` to raise TypeError if a call violates its array annotations."""
    signature = inspect.signature(function)
    hints = {name: hint for name, hint in function.__annotations__.items() if _mentions_array(hint)}

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        values = signature.bind(*args, **kwargs).arguments | {"return": result}
        with jaxtyping.jaxtyped("context"):  # a dimension name has one size per call
            for name in filter(values.__contains__, hints):
                if not _fits(values[name], hints[name]):
                    shapes = {key: np.shape(value) for key, value in values.items() if key in hints}
                    raise TypeError(
                        f"{function.__qualname__}: {name} is no {hints[name]}; {shapes}"
                    )
        return result

    return wrapper


def _is_array_hint(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)


def _mentions_array(hint: Any) -> bool:
    return _is_array_hint(hint) or any(map(_mentions_array, typing.get_args(hint)))


def _fits(value: Any, hint: Any) -> bool:
    """Returns True if the arrays in `value` match `hint`, or if it has no arrays."""
    if typing.get_origin(hint) is tuple and isinstance(value, tuple):
        members = typing.get_args(hint)
        return len(members) != len(value) or all(map(_fits, value, members))
    if not isinstance(value, jax.Array | np.ndarray) or not _mentions_array(hint):
        return True
    options = [hint] if _is_array_hint(hint) else filter(_is_array_hint, typing.get_args(hint))
    return any(isinstance(_as(option.array_type, value), option) for option in options)


def _as(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        return np.asarray(value)
    # Most values are traced, and jnp.asarray of a tracer takes longer than its check.
    return value if isinstance(value, jax.Array) else jnp.asarray(value)
