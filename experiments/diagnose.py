"""Before training: python -m experiments.diagnose --x=images.npy --y=texts.npy --pairs=1000.

Is this pair of encoders worth aligning, are the unpaired rows too far from the pairs, and which
epsilons converge? Row i of x matches row i of y in `pairs` rows chosen at random; the rest is the
unpaired pool, or files of its own (--unpaired_x, --unpaired_y). Without files it looks at the
bundled pictures. Trains nothing.
"""

import dataclasses
import pathlib
from typing import Any

from absl import app, flags

from experiments import diagnosis, findings, launch, runner, workdir
from sotalign_jax import checks, data, files

_FILES = {
    "x": "Embeddings of the first modality (.npy, .npz, .safetensors, tfds:...; PATH#KEY).",
    "y": "Embeddings of the second, row i matching row i of x.",
    "unpaired_x": "Unpaired embeddings from x's encoder; the other rows of x by default.",
    "unpaired_y": "Unpaired embeddings from y's encoder; the other rows of y by default.",
}
_PATHS = {name: flags.DEFINE_string(name, None, text) for name, text in _FILES.items()}
_PAIRS = flags.DEFINE_integer("pairs", 1000, "Rows of x and y that are known to match.")
_OUT = flags.DEFINE_string("out", "runs/diagnosis", "Folder for the report, tables and plot.")
_QUICK = flags.DEFINE_bool("quick", False, "Fewer repetitions, planes and rows.")
_EPSILON = flags.DEFINE_float("epsilon", 0.05, "Regularisation of the student's plan.")
_EPSILON_STAR = flags.DEFINE_float("epsilon_star", 0.005, "Regularisation of the teacher's plan.")
_RIDGE = flags.DEFINE_float("ridge", 0.1, "Ridge of the CCA teacher.")
_SEED = flags.DEFINE_integer("seed", 0, "Chooses pairs, samples and planes.", lower_bound=0)


def _load() -> data.Dataset:
    def read(name: str) -> Any:
        path = _PATHS[name].value
        with runner.naming(name):
            return files.load_array(path) if path else None

    arrays = {name: read(name) for name in _FILES}
    given = [name for name, array in arrays.items() if array is not None]
    for name in ("x", "y"):
        if given and name not in given:
            raise checks.InputError(f"{name}: is not set but {given[0]} is; pass --{name}=FILE")
    if not given:
        table = data.pictures()
        train = table.split == "train"
        arrays |= {"x": table.image[train], "y": table.text[train]}
    rows = len(arrays["x"])
    if not diagnosis.MIN_PAIRS <= _PAIRS.value <= rows:
        raise checks.InputError(
            f"pairs: {_PAIRS.value} asked of {rows} rows; "
            f"pass a number in {diagnosis.MIN_PAIRS}..{rows}"
        )
    # The quickstart's pool; with files, that of configs/files.py.
    pool = "disjoint" if given else "random"
    return data.semi_supervised(**arrays, n_pairs=_PAIRS.value, pool=pool, seed=_SEED.value)


def _run() -> None:
    options = diagnosis.Options(
        epsilon=_EPSILON.value, epsilon_star=_EPSILON_STAR.value, ridge=_RIDGE.value
    )
    if _QUICK.value:
        options = options.quick()
    dataset = _load()
    out = pathlib.Path(_OUT.value).expanduser()
    paths = {name: flag.value for name, flag in _PATHS.items()}
    config = {
        "files": {
            name: path and str(pathlib.Path(path).absolute()) for name, path in paths.items()
        },
        "shapes": dataset.summary(),
        "seed": _SEED.value,
        "options": dataclasses.asdict(options),
    }
    workdir.open_run(out, config, flag="out")
    found = diagnosis.measure(dataset, options, seed=_SEED.value)
    print(findings.report(found, out))


main = launch.guarded(_run, interrupted="start again to diagnose")

if __name__ == "__main__":
    app.run(main, flags_parser=launch.parse)
