r"""Joins two extractions into training files. Rows of the same group become pairs.

    python -m sotalign_jax.pair --x=emb/image --y=emb/text --workdir=emb/files
    python -m sotalign_jax.pair --x=emb/food/image --y=emb/food/text --part=zero_shot \
        --workdir=emb/files

The files are named after their settings (`x.npy`, `test_y.npy`, ...). The command prints the config
for experiments.main. Files of other parts stay in the folder. Rows without a partner become the
pools `unpaired_x` and `unpaired_y`.
"""

from typing import Any

from sotalign_jax import data, files
from sotalign_jax.search import cli, extraction
from sotalign_jax.search.cli import flags, path_flag

_X = path_flag("x", None, "Extraction of the pictures (or sounds).", required=True)
_Y = path_flag("y", None, "Extraction of the texts.", required=True)
_PART = flags.DEFINE_enum(
    "part", "split", extraction.PARTS, "Part to write. split writes train, val and test; "
    "zero_shot writes labelled pictures and class prompts.",
)  # fmt: skip
_OPTIONS = (
    flags.DEFINE_float(
        "val", data.VAL_AND_TEST[0], "Fraction of the pictures for validation (split only)."
    ),
    flags.DEFINE_float(
        "test", data.VAL_AND_TEST[1], "Fraction of the pictures for the test (split only)."
    ),
    flags.DEFINE_integer("seed", 0, "Seed of the random split (split only).", 0),
)
flags.declare_key_flag("workdir")


def main() -> None:
    """Writes the files and prints their shapes."""
    x, y, out = extraction.load(_X.value), extraction.load(_Y.value), cli.workdir()
    options: dict[str, Any] = {flag.name: flag.value for flag in _OPTIONS}
    arrays = extraction.join(_PART.value, x, y, **options)
    extraction.check_pairs(arrays)  # training would fail
    extraction.write(out, arrays, x, y)
    for name in arrays:
        path = out / f"{name}.npy"
        print(files.describe(files.load_array(path), path))
    print(f"\nTo train, run experiments.main with --config=experiments/configs/files.py:from={out}")


if __name__ == "__main__":
    cli.run(main)
