"""Persistent compilation cache for a test module, because every `fit` compiles its own step."""

import contextlib
import os
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def kept_in(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Caches programs that take at least 0.2 s to compile in `folder`."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
