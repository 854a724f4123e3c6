r"""Compares `align` with teachers, SAIL, STRUCTURE and the paper's recipe on test splits.

    python -m experiments.recipes --sets=coco,flickr8k,rsicd,speech,code --pairs=500,1000,2000
    python -m experiments.recipes --sets=coco --pairs=1000 --store=docs/results/recipes.jsonl \
        --show
    python -m experiments.recipes --sets=pictures.npz --pairs=500 --recipes=CCA,align

Results are kept in --store, see `experiments.store`. Running the command again resumes it. --show
prints the results that are there and computes nothing. A .npz file has paired rows `image` and
`text` with a `split` (train, val or test) each; with `label` (-1 where there is none) and `prompts`
[classes, templates, width] it also has classes.
"""

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from experiments import distributed, photos, report, store
from sotalign_jax import (
    Aligner,
    align,
    calibration,
    checks,
    data,
    evaluation,
    heads,
    methods,
    recipe,
    teachers,
    training,
)
from sotalign_jax.cca import choose, moments, refine
from sotalign_jax.diagnostics import Mean
from sotalign_jax.heads import Teacher
from sotalign_jax.search import cli

_DATA = flags.DEFINE_list(
    "sets", ["coco"], "Data sets: coco, flickr8k, rsicd, speech, code, .npz files."
)
_PAIRS = flags.DEFINE_list("pairs", ["1000"], "Numbers of pairs.")
_SEEDS = flags.DEFINE_integer("repeats", 3, "Seeds of each recipe.", lower_bound=1)
_POOL = flags.DEFINE_enum("pools", "disjoint", photos.POOLS, "Kind of the unpaired pools.")
_RECIPES = flags.DEFINE_list("recipes", None, "Rows of the table, all by default.")
_RESULTS = cli.path_flag("store", "runs/recipes.jsonl", "File of the results.")
_SHOW = flags.DEFINE_bool("show", False, "Print the results that are there, compute nothing.")

# A recipe is a teacher, or options of `align`. "pools" is its use of the pools: "training",
# "calibration" only, or "nothing". The scores of all recipes that are not calibrated by `align`
# itself are calibrated here, with the epsilon that is better on validation, so that calibration
# does not favour `align`.
EITHER = {"pools": "calibration", "epsilons": [*recipe.EPSILONS]}
# Steps x learning rate is the paper's, see configs/files.py. 100 steps are feasible on a CPU.
PAPER = {"recipe": "paper", "steps": 100, "learning_rate": 2e-3, "dim": 512}
# "preset", "selection", "steps" and "directions" are only part of the specification, so that
# results of another recipe are not taken for those of this one.
STEPS = [list(step) for step in refine.STEPS]
DEFAULT = json.loads(json.dumps(recipe.PRESETS["default"]._asdict()))
OURS = {
    "align": {},
    "preset": DEFAULT,
    "steps": STEPS,
    "selection": "the largest share of the teacher that no candidate beats clearly",
}
# Teachers that see the unpaired rows.
UNPAIRED = {"pools": "training", "epsilons": [*recipe.EPSILONS]}
RECIPES: dict[str, dict[str, Any]] = {
    "CCA": {**EITHER, "teacher": "cca"},
    "tuned CCA": {**EITHER, "teacher": "tuned_cca"},
    "kernel CCA": {**EITHER, "teacher": "kernel_cca", "directions": choose.DIRECTIONS},
    "neighbours": {**UNPAIRED, "teacher": "neighbours"},
    "refined CCA": {**UNPAIRED, "teacher": "refined_cca", "steps": STEPS},
    # The rate was chosen on validation data of photographs. Speech needs the paper's larger one.
    "SAIL": {**EITHER, "align": {**PAPER, "learning_rate": 5e-4, "method": "sail"}},
    "SAIL (rate 2e-3)": {**EITHER, "align": {**PAPER, "method": "sail"}},
    "STRUCTURE": {
        **EITHER,
        "align": {**PAPER, "method": "structure"},
        "options": {"warmup": 0},  # the published warm-up is longer than these runs
    },
    'recipe="paper"': {**EITHER, "align": PAPER, "pools": "training"},
    "align (pairs alone)": {**OURS, "pools": "nothing"},
    "align": {**OURS, "pools": "training"},
}
WEIGHTS = (0.2, 0.4, 0.6, 0.8)
"""Weights of the neighbours' moments that `neighbours_cca` chooses between."""
SCORES = ("R@1", "R@10", "calibrated R@1", "calibrated R@10")
NAMES = ("data", "pairs", "pool", "seed", "recipe")


@functools.lru_cache(2)  # one for the teacher's pairs, one for the pool of --pool
def load(name: str, pairs: int, pool: str, seed: int) -> data.Dataset:
    """Reads the data of a result.

    Args:
        name: Data set of the repository, or path of a .npz file.
        pairs: Number of pairs.
        pool: Kind of the pools, "disjoint" or "random".
        seed: Seed of pairs and pools.

    Returns:
        Pairs, pools and galleries.
    """
    options: dict[str, Any] = {"n_pairs": pairs, "pool": pool, "seed": seed}
    if not name.endswith(".npz"):
        options["zero_shot_on"] = "imagenet" if name in photos.PHOTOGRAPHS else None
        return photos.dataset(name, **options)
    with np.load(name, allow_pickle=False) as file:
        table = dict(file)
    x, y = (table[side].astype(np.float32) for side in ("image", "text"))
    rows = {part: np.flatnonzero(table["split"] == part) for part in ("train", "val", "test")}
    galleries = {part: data.gallery(x[rows[part]], y[rows[part]]) for part in ("val", "test")}
    own: dict[str, Any] = {**galleries}
    if "prompts" in table:
        known = rows["test"][table["label"][rows["test"]] >= 0]
        own["zero_shot"] = data.zero_shot(x[known], table["label"][known], table["prompts"])
    return data.semi_supervised(x[rows["train"]], y[rows["train"]], **own, **options)


@functools.cache
def inputs(name: str) -> dict[str, str]:
    """Returns fingerprints of the files of a data set."""
    if name.endswith(".npz"):
        return {pathlib.Path(name).name: store.fingerprint(name)}
    return photos.fingerprints(name, *(["imagenet"] if name in photos.PHOTOGRAPHS else []))


def describe(name: str, pairs: int, pool: str, seed: int, label: str) -> dict[str, Any]:
    """Returns the specification of a result.

    Args:
        name: Data set of the repository, or path of a .npz file.
        pairs: Number of pairs.
        pool: Kind of the pools, "disjoint" or "random".
        seed: Seed of pairs and pools.
        label: Name of the recipe.

    Returns:
        Everything that the result depends on, as JSON values.
    """
    # Without pools the result is the same for every kind, and is computed once.
    pool = "none" if RECIPES[label]["pools"] == "nothing" else pool
    named = zip(NAMES, (pathlib.Path(name).stem, pairs, pool, seed, label), strict=True)
    return {**dict(named), "options": RECIPES[label], "inputs": inputs(name)}


@functools.lru_cache(1)
def fit_teacher(kind: str, name: str, pairs: int, seed: int) -> tuple[Any, float]:
    """Fits a teacher. Recipes that follow each other share it.

    Args:
        kind: Name of the teacher in `training.TEACHERS`.
        name: Data set of the repository, or path of a .npz file.
        pairs: Number of pairs.
        seed: Seed of the pairs and of the teacher.

    Returns:
        The teacher, and the processor seconds of the fit.
    """
    rows, began = load(name, pairs, "disjoint", seed), time.process_time()
    options: dict[str, Any] = {} if kind == "cca" else {"seed": seed}
    if kind == "neighbours":
        made = neighbours_cca(rows, **options)
    elif kind == "refined_cca":
        pools = rows.pool_x, rows.pool_y
        made = teachers.refined_cca(rows.pairs_x, rows.pairs_y, *pools, **options)
    else:
        made = training.TEACHERS[kind](rows.pairs_x, rows.pairs_y, **options)
    return made, time.process_time() - began


def neighbours_cca(rows: data.Dataset, *, seed: int = 0) -> Teacher:
    """Fits a CCA to the pairs and to mutual nearest neighbours between the pools, twice.

    Neighbours are found by calibrated scores. Their moments are mixed with those of the pairs, with
    the weight that is best on validation.

    Args:
        rows: Pairs, pools and the validation gallery.
        seed: Seed of the options, and of the sample of the pools.

    Returns:
        The teacher.

    References:
        A. Conneau et al., "Word translation without parallel data", ICLR 2018.
    """
    assert rows.val is not None
    chosen = choose.choose(rows.pairs_x, rows.pairs_y, "linear", seed=seed)
    x, y = teachers.side(rows.pairs_x, rows.pool_x), teachers.side(rows.pairs_y, rows.pool_y)
    pools = []
    for number, side in enumerate((x, y)):
        rng = np.random.default_rng((seed, number))
        kept = np.sort(rng.permutation(len(side.pool))[: refine.POOL_ROWS])
        pools.append(side.features(np.asarray(side.pool[kept])))
    options = refine.by_trace(chosen, x.features, y.features)
    pairs = moments.of_pairs([(x.pairs, y.pairs)])
    made = {}
    for weight in WEIGHTS:
        found = refine.fit(pairs, options)
        for _ in range(2):
            f, g = (pool @ side for pool, side in zip(pools, found[:2], strict=True))
            scores = calibration.calibrate(f, g, epsilon=recipe.EPSILONS[0]).scores(f, g)
            best_x, best_y = scores.argmax(axis=1), scores.argmax(axis=0)
            mutual = np.flatnonzero(best_y[best_x] == np.arange(len(f)))
            x_rows, y_rows = pools[0][mutual], pools[1][best_x[mutual]]
            centred = x_rows - x_rows.mean(axis=0), y_rows - y_rows.mean(axis=0)
            coupled = moments.of_pairs([centred])
            found = refine.fit(moments.mix(pairs, coupled, weight), options)
        teacher = teachers.of_features(x.features, y.features, found, pairs)
        score = evaluation.evaluate(teacher.map_x, teacher.map_y, rows.val)["mean/R@10"]
        made[score] = teacher
    return made[max(made)]


def fit(spec: store.Spec, name: str, dataset: data.Dataset) -> tuple[Aligner, float]:
    """Fits the aligner of a recipe.

    Args:
        spec: Specification of the result.
        name: Data set of the repository, or path of a .npz file.
        dataset: Data of the result.

    Returns:
        The aligner, and the processor seconds spent, including those of a shared teacher.
    """
    chosen, seed = spec["options"], spec["seed"]
    pairs, spent = (dataset.pairs_x, dataset.pairs_y), 0.0
    options = {"val": dataset.val, "seed": seed, "progress": False, **chosen.get("align", {})}
    if "teacher" in chosen:
        teacher, spent = fit_teacher(chosen["teacher"], name, spec["pairs"], seed)
        if "align" not in chosen:
            widths = pairs[0].shape[1], pairs[1].shape[1], teacher.dim
            return Aligner(heads.build_heads(*widths, teacher=teacher), {}), spent
        options["teacher"] = teacher
    if "options" in chosen:
        registered: Any = methods.METHODS[options["method"]]
        options["method"] = dataclasses.replace(registered, **chosen["options"])
    pools = () if chosen["pools"] == "nothing" else (dataset.pool_x, dataset.pool_y)
    began = time.process_time()
    model = align(pairs, *pools, **options)
    return model, spent + time.process_time() - began


def compute(name: str, spec: store.Spec, needed: set[str]) -> store.Results:
    """Fits a recipe and scores it on the test split.

    Args:
        name: Data set of the repository, or path of a .npz file.
        spec: Specification of the result.
        needed: Unused: all scores are computed.

    Returns:
        Scores in percent, the candidate that `align` selected, its kind of teacher, and processor
        seconds.
    """
    pool = "disjoint" if spec["pool"] == "none" else spec["pool"]
    dataset = load(name, spec["pairs"], pool, spec["seed"])
    model, seconds = fit(spec, name, dataset)
    if epsilons := spec["options"].get("epsilons"):
        made = recipe.calibrate(model.heads, dataset, epsilons)
        model = dataclasses.replace(model, calibration=made)
    assert dataset.test is not None
    x, y = model.heads.x, model.heads.y
    found = evaluation.evaluate(x, y, dataset.test, model.calibration)
    scores = {score: found[score.replace(" ", "/").replace("R@", "mean/R@")] for score in SCORES}
    if dataset.zero_shot is not None:
        top = evaluation.evaluate_zero_shot(x, y, dataset.zero_shot)
        scores["zero-shot"] = top["zero_shot/top1"]
    chosen = ("selected", "kernel_teacher")
    selected = {name: model.info[name] for name in chosen if name in model.info}
    return scores | selected | {"seconds": seconds}


def tables(
    known: Mapping[tuple[Any, ...], store.Results],
    name: str,
    pairs: Sequence[int],
    labels: Sequence[str],
) -> dict[str, report.Table]:
    """Returns a table for each score, with a row per recipe and a column per number of pairs.

    Args:
        known: Results by the values of `NAMES`.
        name: Data set of the repository, or path of a .npz file.
        pairs: Numbers of pairs.
        labels: Names of the recipes.

    Returns:
        Tables by score. A score without results has no table.
    """

    def cell(label: str, n: int, score: str) -> Mean | None:
        pool = "none" if RECIPES[label]["pools"] == "nothing" else _POOL.value
        stem = pathlib.Path(name).stem
        found = [known.get((stem, n, pool, seed, label), {}) for seed in range(_SEEDS.value)]
        values = [one[score] for one in found if score in one]
        return Mean(values) if values else None

    headers = [f"{n:,} pairs" for n in pairs]
    made = {}
    for score in (*SCORES, "zero-shot", "seconds"):
        rows = [[label, *(cell(label, n, score) for n in pairs)] for label in labels]
        rows = [row for row in rows if any(value is not None for value in row[1:])]
        if rows:
            best = [] if score == "seconds" else headers
            made[score] = report.Table(["recipe", *headers], rows, best=best)
    return made


def main() -> None:
    """Computes missing results and prints a table for each data set and score."""
    labels = _RECIPES.value or [*RECIPES]
    for label in labels:
        checks.choice("recipes", label, tuple(RECIPES))
    if not all(n.isdigit() for n in _PAIRS.value):
        raise checks.InputError(f"pairs must be integers such as 500,1000, got {_PAIRS.value}")
    pairs = [int(n) for n in _PAIRS.value]
    kept = store.Store(_RESULTS.value)
    if _SHOW.value and not kept.path.exists():
        raise checks.InputError(f"store: {kept.path} does not exist; leave out --show")
    for name in _DATA.value:
        if not _SHOW.value:
            specs = [
                describe(name, n, _POOL.value, seed, label)
                for n in pairs
                for seed in range(_SEEDS.value)
                for label in labels
            ]
            for _, error in kept.fill([(s, ()) for s in specs], functools.partial(compute, name)):
                if error is not None:
                    raise error
        known = {
            tuple(one.spec[key] for key in NAMES): one.results
            for one in kept.entries().values()
            # A results file may hold results of recipes that have changed since.
            if one.spec["options"] == RECIPES.get(one.spec["recipe"])
        }
        for score, table in tables(known, name, pairs, labels).items():
            unit = "seconds of one core" if score == "seconds" else f"{score} in percent"
            print(f"\n{pathlib.Path(name).stem}, {_POOL.value} pools: {unit}\n\n{table.markdown()}")


if __name__ == "__main__":
    cli.run(main, choices={"recipes": tuple(RECIPES)}, initialize=distributed.initialize)
