"""Recipes on test splits: teachers, SAIL, and both recipes of `align`, plain and calibrated.

python examples/recipes.py coco 500 1000 2000    # from a clone; also flickr8k, rsicd, any .npz file
python examples/recipes.py coco 1000 --search    # what was tried, on validation

A .npz file has paired rows `image` and `text` with a `split` (train, val or test) each; with
`label` (-1 where there is none) and `prompts` [classes, templates, width] also classes. Cells are
appended to runs/recipes.jsonl and not computed again: a run that was stopped goes on there.
"""

import argparse
import functools
import json
import pathlib
import time

import numpy as np
import recipe_search

from experiments import photos
from sotalign_jax import Aligner, align, aligner, data, evaluation, heads, methods, teachers

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("data", help="coco, flickr8k, rsicd, or a .npz file")
parser.add_argument("pairs", nargs="+", type=int)
parser.add_argument("--pools", nargs="+", default=["disjoint"], choices=photos.POOLS)
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--recipes", nargs="+", help="some of those that a table names")
parser.add_argument("--search", action="store_true", help="validation scores of all trials instead")
parser.add_argument("--cells", type=pathlib.Path, default=pathlib.Path("runs/recipes.jsonl"))

SCORES = "R@1", "R@10", "calibrated R@1", "calibrated R@10", "zero-shot"


@functools.lru_cache(1)
def from_file(path):
    with np.load(path, allow_pickle=False) as file:
        table = dict(file)
    rows = {name: np.flatnonzero(table["split"] == name) for name in ("train", "val", "test")}
    x, y = (table[side].astype(np.float32) for side in ("image", "text"))
    parts = {name: (x[chosen], y[chosen]) for name, chosen in rows.items()}
    classes = None
    if "prompts" in table:
        known = rows["test"][table["label"][rows["test"]] >= 0]
        classes = data.zero_shot(x[known], table["label"][known], table["prompts"])
    val, test = data.gallery(*parts["val"]), data.gallery(*parts["test"])
    return functools.partial(
        data.semi_supervised, *parts["train"], val=val, test=test, zero_shot=classes
    )


def load(name, **options):
    if name.endswith(".npz"):
        return from_file(name)(**options)
    return photos.dataset(name, zero_shot_on="imagenet", **options)


@functools.lru_cache(1)
def kernel_teacher(name, pairs, seed):
    """Fitted once for all recipes; whatever the pools, the pairs are the same."""
    dataset = load(name, n_pairs=pairs, seed=seed)
    return teachers.kernel_cca(dataset.pairs_x, dataset.pairs_y, seed=seed)


def leading(teacher, dim=aligner.RECIPES["kernel"].dim):
    """What `align` takes of a kernel teacher."""
    if teacher.dim <= dim:
        return teacher
    maps = teacher.map_x.leading(dim), teacher.map_y.leading(dim)
    return teachers.LinearTeacher(*maps, teacher.correlations[:dim])


def start(dataset, teacher):
    widths = dataset.pairs_x.shape[1], dataset.pairs_y.shape[1], teacher.dim
    return heads.build_heads(*widths, teacher=teacher)


def trained(dataset, seed, pools=True, **options):
    """`align` with a validation set of its own."""
    x, y = (dataset.pool_x, dataset.pool_y) if pools else (None, None)
    pairs = dataset.pairs_x, dataset.pairs_y
    return align(pairs, x, y, val=dataset.val, seed=seed, progress=False, **options)


PAPER = {"recipe": "paper", "steps": 100, "learning_rate": 2e-3, "dim": 512}  # sized for a CPU
SAIL = {**PAPER, "learning_rate": 5e-4, "method": methods.SAIL()}
RECIPES = {  # and what unpaired rows are read for
    "CCA": "calibration",
    "kernel CCA": "calibration",
    "SAIL": "calibration",
    'recipe="paper"': "training",
    "align, no unpaired rows": "nothing",
    "align": "training",
}


def fit(recipe, name, dataset, seed):
    """The aligner that a recipe makes."""
    if recipe == "CCA":
        return Aligner(start(dataset, teachers.cca(dataset.pairs_x, dataset.pairs_y)), {})
    if recipe == "SAIL":
        return trained(dataset, seed, **SAIL)
    if recipe == 'recipe="paper"':
        return trained(dataset, seed, **PAPER)
    teacher = kernel_teacher(name, len(dataset.pairs_x), seed)
    if recipe == "kernel CCA":
        return Aligner(start(dataset, teacher), {})
    return trained(dataset, seed, pools=recipe == "align", teacher=leading(teacher))


def calibrated(model, dataset):
    """By the better epsilon on validation; `align` keeps its own, so that it is not flattered."""
    made = [aligner.calibrated(model.heads, dataset, {}, epsilon=e) for e in (0.05, 0.1)]

    def recall(model):
        x, y = model.heads.x, model.heads.y
        found = evaluation.evaluate(x, y, dataset.val, model.calibration)
        return found["calibrated/mean/R@10"]

    return max(made, key=recall)


def scores(model, dataset):
    x, y = model.heads.x, model.heads.y
    found = evaluation.evaluate(x, y, dataset.test, model.calibration)
    keys = [f"{kind}mean/R@{k}" for kind in ("", "calibrated/") for k in (1, 10)]
    values = [found[key] for key in keys]
    if dataset.zero_shot is not None:
        values.append(evaluation.evaluate_zero_shot(x, y, dataset.zero_shot)["zero_shot/top1"])
    return dict(zip(SCORES, values, strict=False))


def key(name, pairs, pool, seed, recipe):
    pool = "none" if RECIPES.get(recipe) == "nothing" else pool
    return {
        "data": pathlib.Path(name).stem,
        "pairs": pairs,
        "pool": pool,
        "seed": seed,
        "recipe": recipe,
    }


def cells(path):
    lines = path.read_text().splitlines() if path.exists() else []
    read = [json.loads(line) for line in lines]
    return {tuple(cell["key"].values()): cell["scores"] for cell in read}


def append(path, known, cell, found):
    known[tuple(cell.values())] = found
    with path.open("a") as file:
        print(json.dumps({"key": cell, "scores": found}), file=file)


def run(given, recipes, known):
    """Computes the cells that are not known."""
    for seed in range(given.seeds):
        for pairs in given.pairs:
            for recipe in recipes:
                model = None
                for pool in given.pools:
                    cell = key(given.data, pairs, pool, seed, recipe)
                    if tuple(cell.values()) in known:
                        continue
                    dataset = load(given.data, n_pairs=pairs, pool=pool, seed=seed)
                    if model is None or RECIPES[recipe] == "training":
                        model = fit(recipe, given.data, dataset, seed)
                    if not recipe.startswith("align"):
                        model = calibrated(model, dataset)
                    append(given.cells, known, cell, scores(model, dataset))


def search(given, known):
    """Prints validation scores of all trials, as they come, and how long their fit took."""
    for pairs in given.pairs:
        lab = recipe_search.Lab(load(given.data, n_pairs=pairs))
        print(f"{given.data}, {pairs} pairs, validation: R@10 / calibrated R@10, seconds of a core")
        for label, features in recipe_search.tried(lab):
            if given.recipes and label not in given.recipes:
                continue
            cell = key(given.data, pairs, "disjoint", 0, f"search: {label}")
            if tuple(cell.values()) not in known:
                began = time.process_time()
                made, seconds = features(), time.process_time() - began
                append(given.cells, known, cell, {**lab.scores(made), "seconds": seconds})
            plain, calibrated, seconds = known[tuple(cell.values())].values()
            print(f"| {label} | {plain:.1f} / {calibrated:.1f} | {seconds:.0f} |", flush=True)


def main():
    given = parser.parse_args()
    given.cells.parent.mkdir(parents=True, exist_ok=True)
    known = cells(given.cells)
    if given.search:
        search(given, known)
        return
    recipes = given.recipes or list(RECIPES)
    if unknown := sorted(set(recipes) - set(RECIPES)):
        parser.error(f"--recipes: unknown {unknown[0]!r}; choose from {', '.join(RECIPES)}")
    run(given, recipes, known)
    for pool in given.pools:
        print(f"\n{given.data}, {pool} pools, {given.seeds} seeds: R@10 / calibrated R@10")
        show(given, pool, recipes, known)


def show(given, pool, recipes, known):
    """A row for each recipe: both recalls and zero-shot accuracy at every number of pairs."""
    columns = [f"{pairs:,}" for pairs in given.pairs]
    print(f"| {' | '.join(['recipe', *columns, *(f'zero-shot, {c}' for c in columns)])} |")
    print("|---" + "|---:" * 2 * len(columns) + "|")
    for recipe in recipes:
        found = [
            [known[tuple(key(given.data, n, pool, s, recipe).values())] for s in range(given.seeds)]
            for n in given.pairs
        ]
        recalls = [f"{mean(cell, 'R@10')} / {mean(cell, 'calibrated R@10')}" for cell in found]
        classes = [mean(cell, "zero-shot") if "zero-shot" in cell[0] else "-" for cell in found]
        print(f"| {recipe} | {' | '.join([*recalls, *classes])} |")


def mean(cell, name):
    """The mean over seeds, and their spread."""
    values = [found[name] for found in cell]
    spread = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{spread}"


if __name__ == "__main__":
    main()
