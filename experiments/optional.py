"""Packages of the extra `extract`, imported when they are needed."""

import importlib
from typing import Any

from sotalign_jax import checks


def require(module: str) -> Any:
    """Imports a package of the extra.

    Raises:
        InputError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise checks.InputError(
            f"{module}: is needed but not installed ({error}); pip install 'sotalign-jax[extract]'"
        ) from error
