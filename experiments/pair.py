r"""Joins two extractions into files for experiments.main, matching rows by their group.

    python -m experiments.pair --x=emb/image --y=emb/text --workdir=emb/files
    python -m experiments.pair --x=emb/food/image --y=emb/food/text --part=zero_shot \
        --workdir=emb/files

The files are named after the settings they are for (`x.npy`, `test_y.npy`, ...), and the config to
pass on is printed; other parts in the folder stay. Rows without a partner become the pools
`unpaired_x` and `unpaired_y`.
"""

from typing import Any

import numpy as np
from absl import flags

from experiments import cli
from experiments.cli import path_flag
from experiments.extract import extraction

_X = path_flag("x", None, "Extraction of the pictures (or sounds).", required=True)
_Y = path_flag("y", None, "Extraction of the texts.", required=True)
_PART = flags.DEFINE_enum(
    "part", "split", extraction.PARTS, "What the files are for; split: train, val and test; sue: "
    "the SUE protocol; zero_shot: labelled pictures and class prompts.",
)  # fmt: skip
_OPTIONS = (
    flags.DEFINE_float("val", 0.1, "split: fraction of the groups for validation."),
    flags.DEFINE_float("test", 0.2, "split: fraction of the groups for the test."),
    flags.DEFINE_integer("n_pairs", 500, "sue: rows kept as pairs.", 1),
    flags.DEFINE_integer("seed", 0, "split and sue: decides what is random.", 0),
)
flags.declare_key_flag("workdir")


def main() -> None:
    """Writes the files and prints their shapes."""
    x, y, out = extraction.load(_X.value), extraction.load(_Y.value), cli.workdir()
    options: dict[str, Any] = {flag.name: flag.value for flag in _OPTIONS}
    arrays = extraction.join(_PART.value, x, y, **options)
    extraction.write(out, arrays, x, y)
    for name in arrays:
        shape = np.load(out / f"{name}.npy", mmap_mode="r").shape
        print(f"{name}: {' x '.join(map(str, shape))}")
    print(f"\npass to experiments.main: --config=experiments/configs/files.py:from={out}")


if __name__ == "__main__":
    cli.run(main)
