"""Fits teachers to degenerate pairs.

    python -m tests.fuzz_teachers --problems=500 --seed=0    exit code 1 if anything is found
    python -m tests.fuzz_teachers --seed=0 --only=12         one problem again, in full

Both modalities get rows of one of `KINDS`: of deficient rank, duplicated, constant, one-hot, of a
huge or tiny scale, and so on. Every teacher must either be finite, on the pairs and on new rows, or
raise an InputError of one line.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from sotalign_jax import checks, teachers
from tests import fuzz

FITS: dict[str, Callable[..., Any]] = {
    "procrustes": teachers.procrustes,
    "cca": teachers.cca,
    "tuned_cca": teachers.tuned_cca,
    "kernel_cca": teachers.kernel_cca,
    "best_cca": teachers.best_cca,
}
SIZES = (3, 7, 24)
"""Numbers of pairs. Few, because each one compiles."""
WIDTHS = 6, 4

Make = Callable[[np.random.Generator, np.ndarray], np.ndarray]


def _with(column: Any, at: Any = 0) -> Make:
    """Returns a kind that sets columns to a value."""

    def make(_: np.random.Generator, x: np.ndarray) -> np.ndarray:
        x = x.copy()
        x[:, at] = column
        return x

    return make


def _one_hot(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    return np.eye(x.shape[1])[rng.integers(0, x.shape[1], len(x))]


def _outlier(value: float) -> Make:
    """Returns a kind whose first row is scaled."""
    return lambda _, x: np.concatenate([value * x[:1], x[1:]])


# Each maps (generator, normal rows) to degenerate rows of the same shape.
KINDS: dict[str, Make] = {
    "normal": lambda _, x: x,
    "rank one": lambda rng, x: np.outer(x[:, 0], rng.normal(size=x.shape[1])),
    "rank two": lambda rng, x: x[:, :2] @ rng.normal(size=(2, x.shape[1])),
    "almost rank one": lambda _, x: x[:, :1] + 1e-7 * x,
    "equal rows": lambda _, x: np.repeat(x[:1], len(x), axis=0),
    "two different rows": lambda rng, x: x[rng.integers(0, 2, len(x))],
    "duplicated rows": lambda rng, x: x[rng.integers(0, len(x), len(x))],
    "duplicated columns": lambda _, x: np.repeat(x[:, :1], x.shape[1], axis=1),
    "opposite rows": lambda _, x: x[:1] * np.where(np.arange(len(x)) % 2, 1, -1)[:, None],
    "constant column": _with(1.0),
    "zero columns": _with(0.0, slice(1, None)),
    "huge constant column": _with(1e8),
    "one column varies": lambda _, x: np.concatenate([x[:, :1], np.ones_like(x[:, 1:])], axis=1),
    "constant": lambda _, x: np.ones_like(x),
    "one-hot": _one_hot,
    "bits": lambda _, x: np.concatenate([np.ones_like(x[:, :1]), x[:, 1:] > 0], axis=1),
    "signs": lambda _, x: np.sign(x),
    "positive": lambda _, x: np.abs(x),
    "huge": lambda _, x: x * 1e30,
    "tiny": lambda _, x: x * 1e-30,
    "rows of many scales": lambda rng, x: x * 10.0 ** rng.uniform(-25, 25, (len(x), 1)),
    "columns of many scales": lambda rng, x: x * 10.0 ** rng.uniform(-15, 15, x.shape[1]),
    "huge outlier": _outlier(1e20),
    "tiny outlier": _outlier(1e-20),
    "narrow cone": lambda _, x: 1 + 1e-5 * x,
    "heavy tails": lambda _, x: x**9,
    "largest float32": lambda _, x: np.sign(x) * np.finfo(np.float32).max,
    "line": lambda _, x: np.arange(1.0, len(x) + 1)[:, None] * np.ones_like(x),
}
DTYPES = (np.float32, np.float64, np.float16)


def make(seed: int, index: int) -> tuple[str, np.ndarray, np.ndarray]:
    """Generates the name and the pairs of problem `index` of `seed`."""
    rng = np.random.default_rng([seed, index])
    # Every kind comes once among as many problems, in x or in y.
    kinds = [tuple(KINDS)[index % len(KINDS)], str(rng.choice(list(KINDS)))]
    rng.shuffle(kinds)
    n, dtype = int(rng.choice(SIZES)), DTYPES[rng.integers(len(DTYPES))]
    latent = rng.normal(size=(n, 3))
    pairs = []
    for kind, width in zip(kinds, WIDTHS, strict=True):
        rows = latent @ rng.normal(size=(3, width)) + 0.3 * rng.normal(size=(n, width))
        largest = float(np.finfo(dtype).max)
        made = np.clip(KINDS[kind](rng, rows).astype(np.float64), -largest, largest)
        pairs.append(made.astype(dtype))
    return f"{kinds[0]} / {kinds[1]}, {n} pairs, {np.dtype(dtype).name}", *pairs


def check(seed: int, index: int) -> tuple[str, list[str]]:
    """Fits all teachers to a problem. Returns its name and the findings."""
    name, x, y = make(seed, index)
    found = []
    for label, fit in FITS.items():
        try:
            teacher = fit(x, y)
            rng = np.random.default_rng(0)
            features = [
                side(rows)
                for side, pairs in ((teacher.x, x), (teacher.y, y))
                for rows in (pairs, rng.normal(size=(7, pairs.shape[1])).astype(pairs.dtype))
            ]
        except checks.InputError as error:
            if "\n" in str(error):
                found.append(f"{label}: an error of several lines, {str(error)!r}")
            continue
        except Exception as error:
            found.append(f"{label}: {type(error).__name__}: {checks.first_line(error)}")
            continue
        leaves = jax.tree.leaves((teacher, features))
        if not all(np.isfinite(np.asarray(leaf, np.float64)).all() for leaf in leaves):
            found.append(f"{label}: not finite")
    return name, found


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    fuzz.search(__doc__, argv, check, problems=500)


if __name__ == "__main__":
    main()
