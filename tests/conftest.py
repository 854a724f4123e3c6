"""Shared fixtures. Also installs shape checks on the package's functions."""

import contextlib
import gc
import os
import pathlib
from collections.abc import Callable, Generator, Iterator

# Tests compile thousands of small programs and run each a few times: compile quickly. The older
# emitters take half the time of XLA's MLIR ones, and splitting a small module takes longer than
# compiling it. The two passes over loops take a fifth of the time to compile a Sinkhorn solve.
QUICK = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_disable_hlo_passes=while-loop-invariant-code-motion,simplify-while-loops",
)
# Users run the default flags. COMPILE=default tests the numerics with them, see .ci/run.
if os.environ.get("COMPILE") != "default":
    os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *QUICK))
# The launchers keep programs in the user's cache otherwise.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", "")

# Importing creates many objects and hardly any garbage.
gc.disable()

# Several tests run in parallel, so more BLAS threads would only compete for the same cores.
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

import jax
import numpy as np
import pytest
import shape_checks

import sotalign_jax

shape_checks.install(sotalign_jax)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --no-skips, for environments in which every test can run."""
    parser.addoption("--no-skips", action="store_true", help="report a skipped test as failed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport]:
    """Turns a skip into a failure under --no-skips."""
    report = yield
    needed = item.get_closest_marker("optional") is None
    # A test that is expected to fail has run.
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if skipped and needed and item.config.getoption("--no-skips"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped: {report.longrepr}"
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs files with slow tests first, so that no worker ends alone with one of them."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Enables garbage collection, which skips the objects of the imported modules."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def compilations() -> Callable[[], contextlib.AbstractContextManager[list[str]]]:
    """Returns a context manager that lists the programs compiled inside it."""

    @contextlib.contextmanager
    def counting() -> Iterator[list[str]]:
        compiled: list[str] = []

        def listen(event: str, duration: float, **details: object) -> None:
            if event == "/jax/core/compile/backend_compile_duration":
                compiled.append(event)

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield compiled
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)

    return counting


@pytest.fixture
def x64() -> Iterator[None]:
    """Enables 64-bit numbers in JAX, for comparisons at full precision."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def files(tmp_path: pathlib.Path) -> pathlib.Path:
    """Returns a folder with small embedding files and a config.py that trains on them."""
    import small_runs  # imported here because only launcher tests need it

    folder = tmp_path / "files"
    folder.mkdir()
    return small_runs.write(folder)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the figures of reports blank, because drawing takes longer than most small runs."""
    from experiments import report  # imported here because only launcher tests need it

    def blank(figure: object) -> bytes:
        report.pyplot().close(figure)
        return b"\x89PNG\r\n\x1a\n"

    monkeypatch.setattr(report, "png", blank)
