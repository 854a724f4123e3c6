"""Small embedding files, a fast config and process helpers for launcher tests."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Callable

import numpy as np
import pytest
from absl import flags

from experiments import launch

ROOT = pathlib.Path(__file__).parents[1]
said = ""


def write_files(folder: pathlib.Path) -> pathlib.Path:
    """Writes x.npy [300, 12], y.npy [300, 10], val_*, test_* and zero_shot_* to `folder`."""
    rng = np.random.default_rng(0)
    latent = rng.normal(size=(400, 6))
    x = latent @ rng.normal(size=(6, 12)) + 0.1 * rng.normal(size=(400, 12))
    y = latent @ rng.normal(size=(6, 10)) + 0.1 * rng.normal(size=(400, 10))
    arrays = {
        "zero_shot_x": x[350:].astype(np.float32),
        "zero_shot_labels": rng.integers(3, size=50),
        "zero_shot_prompts": rng.normal(size=(3, 2, 10)).astype(np.float32),
    }
    splits = {"": slice(300), "val_": slice(300, 350), "test_": slice(350, 400)}
    for name, rows in splits.items():
        arrays[f"{name}x"] = x[rows].astype(np.float32)
        arrays[f"{name}y"] = y[rows].astype(np.float32)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return folder


def write_config(folder: pathlib.Path) -> pathlib.Path:
    """Writes a config file that trains on the files in `folder`. Its :ARG is the method."""
    path = folder / "config.py"
    code = f"""
        from experiments import spec

        FILES = ("x", "y", "val_x", "val_y", "test_x", "test_y")

        def get_config(method="sotalign"):
            return spec.Spec().change({{
                "method": method,
                "seeds": (0,),
                "data": {{"name": "files", "n_pairs": 60}},
                "data.files": {{name: f"{folder}/{{name}}.npy" for name in FILES}},
                "dim": 8,
                "train.steps": 40,
                "train.eval_every": 3,
                "train.pair_batch": 32,
                "train.unpaired_batch": 32,
                "train.learning_rate": 3e-3,
                "sotalign.alpha": 1e-2,
            }})
    """
    path.write_text(textwrap.dedent(code))
    return path


def write(folder: pathlib.Path) -> pathlib.Path:
    """Writes the files and the config that trains on them. Returns `folder`."""
    write_config(write_files(folder))
    return folder


def start(
    module: types.ModuleType, options: list[str], capsys: pytest.CaptureFixture[str]
) -> tuple[str, object]:
    """Runs a launcher in this process. Returns its stdout, and None or its exit status.

    Stores stderr in `small_runs.said`.
    """
    global said
    handler, argv = signal.getsignal(signal.SIGTERM), sys.argv
    sys.argv = [module.__name__, *options]
    try:
        launch.run(module.main, choices=getattr(module, "CHOICES", None))
        out, said = capsys.readouterr()
        return out, None
    except SystemExit as stop:
        out, said = capsys.readouterr()
        return out, stop.code
    finally:
        sys.argv = argv
        signal.signal(signal.SIGTERM, handler)
        for owner, defined in flags.FLAGS.flags_by_module_dict().items():
            if owner.startswith(("experiments", "sotalign_jax")):
                for flag in defined:
                    flag.unparse()


def is_one_line(error: object) -> bool:
    """Returns True if the exit status is a user error: one line that starts with "error: "."""
    return isinstance(error, str) and error.startswith("error: ") and "\n" not in error


def popen(
    module: str, options: list[str], *, compiled: pathlib.Path | None = None, **environment: str
) -> subprocess.Popen[str]:
    """Starts a launcher in its own process, with `compiled` as its compilation cache."""
    shared = {
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.Popen(
        [sys.executable, "-m", f"experiments.{module}", *options],
        cwd=ROOT,
        env=os.environ | (shared if compiled else {}) | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def stop_when(
    process: subprocess.Popen[str], condition: Callable[[], bool], sign: signal.Signals
) -> str:
    """Sends `sign` while `condition` holds. Returns stderr.

    The process is suspended while the condition is checked, so that it cannot change.
    """
    while process.poll() is None:
        if not condition():
            time.sleep(0.001)
            continue
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        held = condition()  # may have changed before the process stopped
        if held:
            process.send_signal(sign)
        process.send_signal(signal.SIGCONT)
        if held:
            _, err = process.communicate()
            assert process.returncode == (-sign if sign == signal.SIGKILL else 1), err
            return err
    raise AssertionError(f"ended before it could be stopped:\n{process.communicate()[1]}")


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """Returns the bytes of every file below `folder` by relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
