"""Recipes on test splits: teachers, SAIL, and both recipes of `align`, plain and calibrated.

python examples/recipes.py coco 500 1000 2000    # from a clone; also flickr8k, rsicd, any .npz file
python examples/recipes.py coco 500 1000 2000 --show docs/results/recipes.jsonl    # no computing
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
parser.add_argument("--show", type=pathlib.Path, help="print the cells of this file, run nothing")

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


def timed(make, *given, **options):
    """What a function makes, and the seconds of a core that it took."""
    began = time.process_time()
    made = make(*given, **options)
    return made, time.process_time() - began


@functools.lru_cache(1)
def kernel_teacher(name, pairs, seed):
    """Fitted once for all recipes; whatever the pools, the pairs are the same."""
    dataset = load(name, n_pairs=pairs, seed=seed)
    return timed(teachers.kernel_cca, dataset.pairs_x, dataset.pairs_y, seed=seed)


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
    "kernel CCA, epsilon 0.1": "calibration",
    "SAIL": "calibration",
    'recipe="paper"': "training",
    "align, no unpaired rows": "nothing",
    "align": "training",
}

EPSILONS = {"kernel CCA, epsilon 0.1": (0.1,)}  # of calibration, where not chosen on validation


def fit(recipe, name, dataset, seed):
    """The aligner that a recipe makes, and the seconds of a core that it takes."""
    if recipe == "CCA":
        teacher, seconds = timed(teachers.cca, dataset.pairs_x, dataset.pairs_y)
        return Aligner(start(dataset, teacher), {}), seconds
    if recipe == "SAIL":
        return timed(trained, dataset, seed, **SAIL)
    if recipe == 'recipe="paper"':
        return timed(trained, dataset, seed, **PAPER)
    teacher, seconds = kernel_teacher(name, len(dataset.pairs_x), seed)
    if recipe.startswith("kernel CCA"):
        return Aligner(start(dataset, teacher), {}), seconds
    pools = recipe == "align"
    model, more = timed(trained, dataset, seed, pools=pools, teacher=leading(teacher))
    return model, seconds + more


def calibrated(model, dataset, epsilons):
    """By the epsilon that is best on validation."""
    made = [aligner.calibrated(model.heads, dataset, {}, epsilon=e) for e in epsilons]

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
                model, seconds = None, 0.0
                for pool in given.pools:
                    cell = key(given.data, pairs, pool, seed, recipe)
                    if tuple(cell.values()) in known:
                        continue
                    dataset = load(given.data, n_pairs=pairs, pool=pool, seed=seed)
                    if model is None or RECIPES[recipe] == "training":
                        model, seconds = fit(recipe, given.data, dataset, seed)
                    if not recipe.startswith("align"):  # which has 0.1, so is not flattered
                        model = calibrated(model, dataset, EPSILONS.get(recipe, (0.05, 0.1)))
                    found = scores(model, dataset) | {"seconds": seconds}
                    append(given.cells, known, cell, found)


def scenes(name, pairs):
    """The scene of every pair of RSICD, after which its images are named."""
    if name != "rsicd":
        return None
    with np.load(photos.FOLDER / "rsicd.npz") as table:
        images = table["file"][photos.choose(name, n_pairs=pairs).images]
    return [str(image).rsplit("_")[0] for image in images]


def search(given, known):
    """Prints validation scores of all trials, as they come, and how long their fit took."""
    for pairs in given.pairs:
        lab = recipe_search.Lab(load(given.data, n_pairs=pairs), scenes(given.data, pairs))
        print(f"{given.data}, {pairs} pairs, validation: R@10 / calibrated R@10, seconds of a core")
        for label, features in recipe_search.tried(lab):
            if given.recipes and label not in given.recipes:
                continue
            cell = key(given.data, pairs, "disjoint", 0, f"search: {label}")
            if tuple(cell.values()) not in known:
                made, seconds = timed(features)
                append(given.cells, known, cell, {**lab.scores(made), "seconds": seconds})
            plain, calibrated, seconds = known[tuple(cell.values())].values()
            print(f"| {label} | {plain:.1f} / {calibrated:.1f} | {seconds:.0f} |", flush=True)


def main():
    given = parser.parse_args()
    if given.show and not given.show.exists():
        parser.error(f"--show: {given.show} does not exist")
    known = cells(given.show or given.cells)
    recipes = given.recipes or list(RECIPES)
    if not given.show:
        given.cells.parent.mkdir(parents=True, exist_ok=True)
    if given.search:
        search(given, known)
        return
    if unknown := sorted(set(recipes) - set(RECIPES)):
        parser.error(f"--recipes: unknown {unknown[0]!r}; choose from {', '.join(RECIPES)}")
    if not given.show:
        run(given, recipes, known)
    for pool in given.pools:
        print(f"\n{given.data}, {pool} pools, {given.seeds} seeds: R@10 / calibrated R@10")
        show(given, pool, recipes, known)
        show_leads(given, pool, known)
        show_seconds(given, pool, recipes, known)


def at(given, pairs, pool, recipe, score, known):
    """A score of every seed whose cell is known."""
    found = {}
    for seed in range(given.seeds):
        cell = known.get(tuple(key(given.data, pairs, pool, seed, recipe).values()), {})
        if score in cell:
            found[seed] = cell[score]
    return found


def show(given, pool, recipes, known):
    """A row for each recipe: both recalls and zero-shot accuracy at every number of pairs."""
    sizes = [f"{pairs:,}" for pairs in given.pairs]
    header("recipe", *sizes, *(f"zero-shot, {size}" for size in sizes))
    for recipe in recipes:
        of = functools.partial(at, given, pool=pool, recipe=recipe, known=known)
        recalls = [
            f"{mean(of(n, score='R@10'))} / {mean(of(n, score='calibrated R@10'))}"
            for n in given.pairs
        ]
        classes = [mean(of(n, score="zero-shot")) for n in given.pairs]
        print(f"| {recipe} | {' | '.join([*recalls, *classes])} |")


def show_seconds(given, pool, recipes, known):
    """A row for each recipe that was timed: seconds of a core at every number of pairs."""
    print()
    header("seconds of a core", *(f"{pairs:,}" for pairs in given.pairs))
    for recipe in recipes:
        found = [at(given, n, pool, recipe, "seconds", known) for n in given.pairs]
        if any(found):
            print(f"| {recipe} | {' | '.join(mean(seconds, digits=0) for seconds in found)} |")


LEADS = {  # of `align`'s score, over another's of the same seed
    "CCA": ("calibrated R@10", "CCA", "R@10"),
    "SAIL": ("calibrated R@10", "SAIL", "R@10"),
    "CCA, calibrated": ("calibrated R@10", "CCA", "calibrated R@10"),
    "SAIL, calibrated": ("calibrated R@10", "SAIL", "calibrated R@10"),
    "kernel CCA, calibrated": ("calibrated R@10", "kernel CCA", "calibrated R@10"),
    "kernel CCA, both by 0.1": (
        "calibrated R@10",
        "kernel CCA, epsilon 0.1",
        "calibrated R@10",
    ),
    "kernel CCA, both plain": ("R@10", "kernel CCA", "R@10"),
    "no unpaired rows, calibrated": (
        "calibrated R@10",
        "align, no unpaired rows",
        "calibrated R@10",
    ),
    "no unpaired rows, both plain": ("R@10", "align, no unpaired rows", "R@10"),
}


def show_leads(given, pool, known):
    """How far `align` is above the others, the mean over seeds of the difference."""
    print()
    header("`align` above", *LEADS)
    for pairs in given.pairs:
        row = []
        for score, recipe, other in LEADS.values():
            ours = at(given, pairs, pool, "align", score, known)
            theirs = at(given, pairs, pool, recipe, other, known)
            row.append(mean({s: ours[s] - theirs[s] for s in ours.keys() & theirs.keys()}))
        print(f"| {pathlib.Path(given.data).stem}, {pairs:,} | {' | '.join(row)} |")


def header(first, *others):
    print(f"| {' | '.join([first, *others])} |")
    print("|---" + "|---:" * len(others) + "|")


def mean(found, digits=1):
    """The mean over seeds, and their spread where there is more than one."""
    values = list(found.values())
    if not values:
        return "-"
    spread = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):z.{digits}f}{spread}"  # z: no -0.0


if __name__ == "__main__":
    main()
