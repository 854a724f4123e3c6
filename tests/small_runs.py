"""Embedding files and a config file for runs that take little time."""

import pathlib
import textwrap

import numpy as np


def write_files(folder: pathlib.Path) -> pathlib.Path:
    """Writes x.npy [300, 12], y.npy [300, 10], val_*, test_* and zero_shot_* into `folder`."""
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
    """Writes a config file that trains on the files in `folder`; its :ARG is a method."""
    path = folder / "config.py"
    code = f"""
        from experiments import settings

        def get_config(method="sotalign"):
            config = settings.default_config()
            config.methods = (method,)
            config.seeds = (0,)
            config.data.name = "files"
            config.data.n_pairs = 60
            for name in ("x", "y", "val_x", "val_y", "test_x", "test_y"):
                config.data.files[name] = f"{folder}/{{name}}.npy"
            config.heads.dim = 8
            config.train.steps = 40
            config.train.eval_every = 3
            config.train.pair_batch = 32
            config.train.unpaired_batch = 32
            config.train.learning_rate = 3e-3
            config.sotalign.alpha = 1e-2
            return config
    """
    path.write_text(textwrap.dedent(code))
    return path


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """Every file below `folder`, to see that nothing was touched."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
