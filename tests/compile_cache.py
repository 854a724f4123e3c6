"""Compiled programs kept on disk while a test module runs: every `fit` compiles anew otherwise."""

import contextlib
import os
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def kept_in(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Programs that took a while to compile are read back when they are compiled once more."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
