"""Damages files of a finished run and of its aligner, and uses them again.

    python -m tests.fuzz_files --problems=200 --seed=0    exit code 1 if anything is found
    python -m tests.fuzz_files --seed=0 --only=12         one problem again, in full

A JSON file becomes null, a list, a number or text, is cut short, or has one of its values replaced.
A line of metrics or a tensor changes likewise. The run is then loaded, resumed and reported. Each
of these must work, or raise an error of one line that a command shows to its user.
"""

import atexit
import contextlib
import functools
import io
import json
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from experiments import report, run, spec
from sotalign_jax import Aligner, checks
from tests import fuzz, small_runs

JSON = ("config.json", "environment.json", "inputs.json", "protocol.json", "results.json")
JSON += ("aligner/aligner.json",)
TENSORS = ("aligner/heads.safetensors", "aligner/calibration.safetensors")
FILES = (*JSON, "metrics.jsonl", *TENSORS)
VALUES: tuple[Any, ...] = (None, [], {}, 0, -1, 1e300, True, "text", [1, 2], {"a": None})
EXPECTED = (checks.InputError, OSError, FloatingPointError)
"""Errors that `experiments.cli` prints in one line."""


@functools.cache
def finished() -> tuple[Any, pathlib.Path]:
    """Trains a model for a few steps. Returns its config and its run folder."""
    root = pathlib.Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    small_runs.write_files(root)
    names = ("x", "y", "val_x", "val_y", "test_x", "test_y")
    changes = {
        "method": "sotalign",
        "data": {"name": "files", "n_pairs": 60},
        "data.files": {name: f"{root}/{name}.npy" for name in names},
        "dim": 4,
        "train": {"steps": 4, "eval_every": 2, "pair_batch": 32, "unpaired_batch": 32},
    }
    (made,) = spec.expand(spec.Spec().change(changes)).values()
    run.run(made, root / "run")
    return made, root / "run"


def _replaced(rng: np.random.Generator, value: Any) -> Any:
    """Replaces the value, or one inside it."""
    if value and isinstance(value, dict | list) and rng.uniform() < 0.8:
        inside = list(value) if isinstance(value, dict) else range(len(value))
        key = inside[rng.integers(len(inside))]
        copy = value.copy()
        if rng.uniform() < 0.2:
            del copy[key]
        else:
            copy[key] = _replaced(rng, copy[key])
        return copy
    return VALUES[rng.integers(len(VALUES))]


def _damage_text(rng: np.random.Generator, text: bytes) -> tuple[str, bytes]:
    """Cuts a file short, or changes some of its bytes."""
    size = len(text)
    if rng.uniform() < 0.5:
        kept = int(rng.integers(size + 1)) if rng.uniform() < 0.8 else 0
        return f"cut to {kept} bytes", text[:kept]
    at = int(rng.integers(size))
    return f"garbled at {at}", text[:at] + rng.bytes(min(4, size - at)) + text[at + 4 :]


def _damage_tensors(rng: np.random.Generator, path: pathlib.Path) -> str:
    """Changes a tensor of a file, and removes its digest."""
    tensors = load_file(path)
    name = str(rng.choice(sorted(tensors)))
    array = tensors[name]
    changes: dict[str, Callable[[], np.ndarray]] = {
        "cut": lambda: array[: len(array) // 2].copy() if array.ndim else array[None],
        "flat": lambda: array.reshape(-1).copy(),
        "empty": lambda: np.zeros((0, *array.shape[1:]), array.dtype),
        "integers": lambda: array.astype(np.int32),
        "another name": lambda: array,
    }
    kind = str(rng.choice(list(changes)))
    del tensors[name]
    tensors["other" if kind == "another name" else name] = changes[kind]()
    save_file(tensors, path)
    described = path.with_name("aligner.json")
    kept = json.loads(described.read_text()) | {"sha256": {}}
    described.write_text(json.dumps(kept))
    return f"{name} {kind}"


def damage(rng: np.random.Generator, folder: pathlib.Path) -> str:
    """Damages one file of a run folder. Returns what was done."""
    name = str(rng.choice(FILES))
    path = folder / name
    text, kind = path.read_bytes(), str(rng.choice(["text", "value", "value", "missing"]))
    if kind == "missing":
        path.unlink()
        return f"{name} removed"
    if kind == "text":
        done, text = _damage_text(rng, text)
        path.write_bytes(text)
        return f"{name} {done}"
    if name in TENSORS:
        return f"{name} {_damage_tensors(rng, path)}"
    lines = text.splitlines() if name == "metrics.jsonl" else [text]
    at = rng.integers(len(lines))
    lines[at] = json.dumps(_replaced(rng, json.loads(lines[at]))).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")
    return f"{name} became {lines[at].decode()[:60] if name == 'metrics.jsonl' else 'other JSON'}"


def _use(folder: pathlib.Path) -> dict[str, Callable[[], Any]]:
    """Returns the uses of a run folder by name."""
    config, _ = finished()

    def load() -> None:
        aligner = Aligner.load(folder)
        f, g = aligner.embed_x(np.ones((2, 12))), aligner.embed_y(np.ones((3, 10)))
        if aligner.calibration is not None:
            aligner.calibration.scores(f, g)

    def again() -> None:
        results = run.run(config, folder)
        report.compare({"sotalign-seed0": config}, {"sotalign-seed0": results}, folder)

    return {"load": load, "run": again}


def check(seed: int, index: int) -> tuple[str, list[str]]:
    """Damages a copy of the run and uses it. Returns what was done and the findings."""
    rng = np.random.default_rng([seed, index])
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary) / "run"
        shutil.copytree(finished()[1], folder)
        name = damage(rng, folder)
        if rng.uniform() < 0.5:  # as after a kill before the end
            (folder / "results.json").unlink(missing_ok=True)
            name += ", unfinished"
        found = []
        for label, use in _use(folder).items():
            try:
                said = io.StringIO()
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                    use()
            except EXPECTED as error:
                if "\n" in str(error):
                    found.append(f"{label}: an error of several lines, {str(error)!r}")
            except Exception as error:
                found.append(f"{label}: {type(error).__name__}: {checks.first_line(error)}")
    return name, found


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    fuzz.search(__doc__, argv, check, problems=200)


if __name__ == "__main__":
    main()
