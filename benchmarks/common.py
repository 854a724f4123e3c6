"""Shared code of the benchmarks: problems, timing, memory, flags and reports."""

import argparse
import contextlib
import csv
import dataclasses
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tabulate
from jaxtyping import Array, Float
from tqdm import tqdm

from benchmarks import photographs
from sotalign_jax import checks, teachers, training
from sotalign_jax.ot import affinity

RESULTS = pathlib.Path(__file__).parent / "results"
QUICK = pathlib.Path("runs") / "benchmarks"
MEBIBYTE = 2**20
MEANING = {
    "arms": "regular expression that selects the arms to measure beside ours",
    "budgets": "numbers of passes over K",
    "data": "data to measure on",
    "devices": "number of devices that share a step",
    "dim": "width of the heads",
    "epsilon": "regularisations; gradient's headline takes the student's and the teacher's",
    "max_iterations": "limit of iterations of all solvers",
    "n": "rows per side",
    "only": "number of a single problem to show in full",
    "pairs": "pairs in a batch",
    "problems": "number of problems to draw",
    "repeats": "number of timings of each arm",
    "rows": "rows of the gallery",
    "seed": "seed of the problems",
    "step": "compile the training step instead of the loss",
    "steps": "training steps",
    "sweep": "measure all arms at several epsilons",
    "sweeps": "count the sweeps of a training step",
    "targets": "devices to compile for or to predict times of",
    "time_limit": "seconds after which an arm is not timed any more",
    "tolerance": "marginal error to reach",
    "unpaired": "unpaired rows per side in a batch",
    "width": "width of the rows",
}
"""Help texts of the flags of all benchmarks."""


class Problem(NamedTuple):
    """Unit features of n samples per side: f and g of the student, z and w of the teacher."""

    name: str
    f: Float[np.ndarray, "n d"]
    g: Float[np.ndarray, "n d"]
    z: Float[np.ndarray, "n e"]
    w: Float[np.ndarray, "n e"]

    def first(self, n: int) -> "Problem":
        """Returns the problem of the first n samples."""
        return Problem(self.name, *(x[:n] for x in self[1:]))

    def features(self) -> tuple[Array, Array, Array, Array]:
        """Returns f, g, z and w in JAX's default precision, float64 under `jax.enable_x64`."""
        f, g, z, w = (jnp.asarray(x, float) for x in self[1:])
        return f, g, z, w

    def affinities(self) -> tuple[Array, Array]:
        """Returns the affinities K of the student and K* of the teacher."""
        f, g, z, w = self.features()
        return affinity.dot(f, g.T), affinity.dot(z, w.T)


def _unit(x: Any) -> np.ndarray:
    x = np.asarray(x, np.float64)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def random_problem(n: int) -> Problem:
    """Draws anisotropic Gaussian features around a common mean, independently for both sides.

    Embeddings of real encoders are anisotropic, too, and unpaired samples have no true partner.
    Isotropic features in many dimensions and noisy copies would be too easy, because their plans
    are flat or saturated.
    """
    rng = np.random.default_rng(0)
    scales = np.arange(1, 65) ** -0.5  # variances fall as 1 / i

    def pair() -> tuple[np.ndarray, np.ndarray]:
        mean = 0.5 * scales * rng.standard_normal(64)
        first, second = (mean + scales * rng.standard_normal((n, 64)) for _ in range(2))
        return _unit(first), _unit(second)

    return Problem("random", *pair(), *pair())


def photos_problem(n: int, n_pairs: int = 1000) -> Problem:
    """Returns features of unpaired COCO photographs and captions.

    Args:
        n: Number of samples per side.
        n_pairs: Number of pairs that teacher and student are fitted on.

    Returns:
        Features of a CCA teacher and of a briefly trained contrastive student.

    Raises:
        InputError: There are fewer than n unpaired photographs or captions.
    """
    rows = photographs.coco(n_pairs)
    if n > min(len(rows.pool_x), len(rows.pool_y)):
        raise checks.InputError(
            f"n is {n} but there are {len(rows.pool_x)} unpaired photographs; use --data=random"
        )
    teacher = teachers.cca(rows.pairs_x, rows.pairs_y)
    options: Any = {"dim": 128, "steps": 60, "learning_rate": 1e-3}
    student = training.contrastive(rows.pairs_x, rows.pairs_y, **options)
    x, y = rows.pool_x[:n], rows.pool_y[:n]
    return Problem("photos", *map(_unit, (student.x(x), student.y(y), teacher.x(x), teacher.y(y))))


DATA = ("photos", "random")


def problem(name: str, n: int, *, quick: bool = False) -> Problem:
    """Returns a problem by name.

    Args:
        name: One of `DATA`.
        n: Number of samples per side.
        quick: Fit the maps of photographs on few pairs.
    """
    return random_problem(n) if name == "random" else photos_problem(n, 100 if quick else 1000)


def marginal_error(k: Array, u: Array, v: Array, epsilon: float) -> float:
    """Computes the marginal error of a plan in float64 on the host.

        max(||P 1 - 1/n||_1, ||P^T 1 - 1/m||_1)  with  P = exp(K/epsilon + u + v)

    All solvers are measured by this function, so that their own estimates do not matter.

    Args:
        k: Affinities, shape [n, m].
        u: Log-scalings of the rows.
        v: Log-scalings of the columns.
        epsilon: Regularization.
    """
    rows, shift = np.asarray(u, np.float64), np.asarray(v, np.float64)
    n, m = k.shape
    columns, row_error = np.zeros(m), 0.0
    for start in range(0, n, 256):  # by blocks, because a float64 plan may not fit into memory
        block = np.asarray(k[start : start + 256], np.float64) / epsilon
        # A solver that diverged must give a large error, not an overflow warning.
        plan = np.exp(np.minimum(block + rows[start : start + 256, None] + shift, 700.0))
        row_error += float(np.abs(plan.sum(1) - 1 / n).sum())
        columns += plan.sum(0)
    return max(row_error, float(np.abs(columns - 1 / m).sum()))


def relative(x: Any, reference: Any) -> float:
    """Returns ||x - reference|| / ||reference|| over all leaves, or infinity if not finite.

    Args:
        x: Pytree of arrays.
        reference: Pytree of the same structure.
    """
    flat, target = (
        np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])
        for tree in (x, reference)
    )
    gap = float(np.linalg.norm(flat - target) / np.linalg.norm(target))
    return gap if np.isfinite(gap) else float("inf")


def time_interleaved(
    calls: Mapping[str, Callable[[], Any]],
    *,
    repeats: int,
    title: str = "timing",
    keep: Callable[[Any], Any] = lambda out: None,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Times calls in rounds that run all of them in turn.

    Other jobs on the machine slow down all calls of a round alike, so that ratios of the minima are
    reliable. Outputs come from the timed calls: JAX runs programs asynchronously, so that a program
    started before and not waited for would be charged to the first timed call.

    Args:
        calls: Functions to time, by name.
        repeats: Number of rounds.
        title: Title of the progress bar.
        keep: Function that selects the part of an output to return.

    Returns:
        The least seconds and the kept output of each call.
    """
    best = dict.fromkeys(calls, float("inf"))
    kept = {}
    order = list(calls.items())
    with tqdm(total=repeats * len(calls), desc=title, leave=False) as bar:
        for _ in range(repeats):
            for name, call in order:
                start = time.perf_counter()
                out = jax.block_until_ready(call())
                best[name] = min(best[name], time.perf_counter() - start)
                kept[name] = keep(out)
                del out  # the n x n gradients of several arms would not fit into memory
                bar.update()
            order.reverse()  # no call is always timed after the same other one
    return best, kept


def memory_of(compiled: jax.stages.Compiled) -> tuple[float, float]:
    """Returns MiB of temporaries, and MiB with arguments and outputs, as XLA reports them."""
    analysis: Any = compiled.memory_analysis()
    temporary = analysis.temp_size_in_bytes
    total = temporary + analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    return temporary / MEBIBYTE, total / MEBIBYTE


def machine() -> str:
    """Returns a line about hardware, software and current load."""
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    return (
        f"{jax.devices()[0].device_kind} {platform.machine()}, {os.cpu_count()} cores, "
        f"load {load}; python {platform.python_version()}, jax {jax.__version__}"
    )


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


def options(doc: str | None, argv: Sequence[str] | None, **defaults: Any) -> argparse.Namespace:
    """Parses the flags of a benchmark, which are described by their defaults.

    Args:
        doc: Description for --help.
        argv: Arguments, or None for those of the command line.
        **defaults: Defaults by flag. False makes a switch, a list a flag with several values, and a
            tuple a choice. A type makes a flag without a default.

    Returns:
        Values by flag. With --quick, results go to another folder.

    >>> options("", ["--n", "5", "7"], n=[1], data=("a", "b"), only=int).n
    [5, 7]
    """
    made = argparse.ArgumentParser(description=doc, formatter_class=_Help)
    made.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder for the tables")
    made.add_argument("--quick", action="store_true", help=f"tiny sizes, with results in {QUICK}")
    for name, default in defaults.items():
        how: dict[str, Any] = {"type": type(default), "default": default}
        if default is False:
            how = {"action": "store_true"}
        elif isinstance(default, list):
            how |= {"type": type(default[0]), "nargs": "+"}
        elif isinstance(default, tuple):
            how = {"choices": default, "default": default[0]}
        elif isinstance(default, type):
            how = {"type": default}
        made.add_argument(f"--{name}", help=MEANING[name], **how)
    args = made.parse_args(argv)
    # Results of tiny sizes must not overwrite those in the repository.
    if args.quick and args.out == RESULTS:
        args.out = QUICK
    return args


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text, numbers or None, which is shown as "-". Numbers have `digits` decimals.

    >>> print(Table(["arm", "seconds"], [["ours", 0.25], ["other", None]], digits=2).markdown())
    | arm   |   seconds |
    |:------|----------:|
    | ours  |      0.25 |
    | other |         - |
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[Any]]
    digits: int = 1

    def markdown(self) -> str:
        """Returns the table in Markdown."""
        values = [*zip(*self.rows, strict=True)]
        align = ["right" if any(map(_is_number, column)) else "left" for column in values]
        texts = [[self._text(value) for value in row] for row in self.rows]
        options: Any = {"tablefmt": "pipe", "disable_numparse": True, "colalign": align}
        return tabulate.tabulate(texts, list(self.headers), **options)

    def write(self, path: pathlib.Path) -> None:
        """Writes the table as CSV, with all digits."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([self.headers, *self.rows])

    def _text(self, value: Any) -> str:
        if value is None:
            return "-"
        return f"{value:.{self.digits}f}" if isinstance(value, float | np.floating) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def publish(title: str, table: Table, stem: pathlib.Path | str) -> None:
    """Prints a table in Markdown and writes it as CSV.

    Args:
        title: Title above the table.
        table: The table.
        stem: Path of the CSV file without its suffix.
    """
    table.write(pathlib.Path(f"{stem}.csv"))
    print(f"\n{title}\n\n{table.markdown()}\n\n{machine()}", flush=True)


@contextlib.contextmanager
def figure(stem: pathlib.Path, columns: int = 1) -> Iterator[Any]:
    """Yields a row of axes to draw on, and writes the figure as PNG.

    Args:
        stem: Path of the figure without its suffix.
        columns: Number of axes.
    """
    import matplotlib  # imported late, because it takes long

    matplotlib.use("agg")  # draws without a screen
    from matplotlib import pyplot

    made, axes = pyplot.subplots(
        1, columns, figsize=(4.8 * columns, 3.6), layout="constrained", squeeze=False
    )
    for ax in axes[0]:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.3)
    yield axes[0]
    stem.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(f"{stem}.png", dpi=150)
    pyplot.close(made)


def run(main: Callable[[], None]) -> None:
    """Runs a command. Errors that the user can correct are printed in one line."""
    try:
        # Figures are drawn at the end: a missing package must not cost hours of measurements.
        checks.require("matplotlib", extra="bench")
        main()
    except (checks.InputError, OSError) as error:
        sys.exit(f"error: {error}")
