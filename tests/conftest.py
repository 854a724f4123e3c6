"""Fixtures, and shape checking of the package while the tests run."""

from collections.abc import Iterator

import jax
import numpy as np
import pytest
import shape_checks

import sotalign_jax

shape_checks.install(sotalign_jax)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit numbers in JAX, for comparisons at full precision."""
    with jax.enable_x64(True):
        yield
