"""Recipes on test splits: teachers, SAIL, and both recipes of `align`, plain and calibrated.

python examples/recipes.py coco 500 1000 2000    # from a clone; also flickr8k, rsicd, any .npz file
python examples/recipes.py coco 500 1000 2000 --show docs/results/recipes.jsonl    # no computing
python examples/recipes.py coco 1000 --search    # what was tried, on validation

A .npz file has paired rows `image` and `text` with a `split` (train, val or test) each; with
`label` (-1 where there is none) and `prompts` [classes, templates, width] also classes. Results are
kept in runs/recipes.jsonl (see `experiments.store`): running the command again resumes it.
"""

import argparse
import dataclasses
import functools
import itertools
import pathlib
import time

import numpy as np
import recipe_search

from experiments import photos, store
from sotalign_jax import Aligner, align, checks, data, evaluation, heads, teachers
from sotalign_jax import recipe as recipe_lib

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("data", help="coco, flickr8k, rsicd, or a .npz file")
parser.add_argument("pairs", nargs="+", type=int)
parser.add_argument("--pools", nargs="+", default=["disjoint"], choices=photos.POOLS)
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--recipes", nargs="+", help="some of those that a table names")
parser.add_argument("--search", action="store_true", help="validation scores of all trials instead")
parser.add_argument("--cells", type=pathlib.Path, default=pathlib.Path("runs/recipes.jsonl"))
parser.add_argument("--show", type=pathlib.Path, help="print the results of this file, run nothing")

# A recipe is a teacher, or what `align` makes with these options. It reads unpaired rows for
# training, for calibration alone, or not at all. Calibration takes the best of the epsilons on
# validation; `align` has one of its own, 0.1, and is not flattered.
EITHER = {"pools": "calibration", "epsilons": [0.05, 0.1]}
PAPER = {"recipe": "paper", "steps": 100, "learning_rate": 2e-3, "dim": 512}  # sized for a CPU
RECIPES = {
    "CCA": {**EITHER, "teacher": "cca"},
    "kernel CCA": {**EITHER, "teacher": "kernel"},
    "kernel CCA, epsilon 0.1": {**EITHER, "teacher": "kernel", "epsilons": [0.1]},
    "SAIL": {**EITHER, "align": {**PAPER, "learning_rate": 5e-4, "method": "sail"}},
    'recipe="paper"': {**EITHER, "align": PAPER, "pools": "training"},
    "align, no unpaired rows": {"teacher": "kernel", "align": {}, "pools": "nothing"},
    "align": {"teacher": "kernel", "align": {}, "pools": "training"},
}
PLAIN, CALIBRATED = "R@10", "calibrated R@10"
LEADS = {  # of a score of `align` over another's of the same seed
    "CCA": (CALIBRATED, "CCA", PLAIN),
    "SAIL": (CALIBRATED, "SAIL", PLAIN),
    "CCA, calibrated": (CALIBRATED, "CCA", CALIBRATED),
    "SAIL, calibrated": (CALIBRATED, "SAIL", CALIBRATED),
    "kernel CCA, calibrated": (CALIBRATED, "kernel CCA", CALIBRATED),
    "kernel CCA, both by 0.1": (CALIBRATED, "kernel CCA, epsilon 0.1", CALIBRATED),
    "kernel CCA, both plain": (PLAIN, "kernel CCA", PLAIN),
    "no unpaired rows, calibrated": (CALIBRATED, "align, no unpaired rows", CALIBRATED),
    "no unpaired rows, both plain": (PLAIN, "align, no unpaired rows", PLAIN),
}


# --- data ----------------------------------------------------------------------------------------


@functools.lru_cache(1)
def from_file(path):
    with np.load(path, allow_pickle=False) as file:
        table = dict(file)
    rows = {name: np.flatnonzero(table["split"] == name) for name in ("train", "val", "test")}
    x, y = (table[side].astype(np.float32) for side in ("image", "text"))
    parts = {name: (x[chosen], y[chosen]) for name, chosen in rows.items()}
    galleries = {name: data.gallery(*parts[name]) for name in ("val", "test")}
    if "prompts" in table:
        known = rows["test"][table["label"][rows["test"]] >= 0]
        classes = x[known], table["label"][known], table["prompts"]
        galleries["zero_shot"] = data.zero_shot(*classes)
    return functools.partial(data.semi_supervised, *parts["train"], **galleries)


@functools.lru_cache(2)
def load(name, pairs, pool="disjoint", seed=0):
    if name.endswith(".npz"):
        return from_file(name)(n_pairs=pairs, pool=pool, seed=seed)
    return photos.dataset(name, n_pairs=pairs, pool=pool, seed=seed, zero_shot_on="imagenet")


@functools.cache
def inputs(name):
    """Fingerprints of the files that the data are read from."""
    if name.endswith(".npz"):
        return {pathlib.Path(name).name: store.fingerprint(name)}
    return photos.fingerprints(name, "imagenet")


# --- recipes -------------------------------------------------------------------------------------


def timed(make, *given, **options):
    """What a function makes, and the seconds of a core that it took."""
    began = time.process_time()
    made = make(*given, **options)
    return made, time.process_time() - began


@functools.lru_cache(1)
def fit_teacher(kind, name, pairs, seed):
    """Fitted once for all recipes; whatever the pools, the pairs are the same."""
    dataset = load(name, pairs, seed=seed)
    options = {"seed": seed} if kind == "kernel" else {}
    make = {"cca": teachers.cca, "kernel": teachers.kernel_cca}[kind]
    return timed(make, dataset.pairs_x, dataset.pairs_y, **options)


@functools.lru_cache(1)
def fit(label, name, pairs, pool, seed):
    """The aligner that a recipe makes, and the seconds of a core that it takes."""
    chosen, dataset = RECIPES[label], load(name, pairs, pool, seed)
    rows, seconds = (dataset.pairs_x, dataset.pairs_y), 0.0
    options = {"val": dataset.val, "seed": seed, "progress": False, **chosen.get("align", {})}
    if "teacher" in chosen:
        teacher, seconds = fit_teacher(chosen["teacher"], name, pairs, seed)
        if "align" not in chosen:
            widths = rows[0].shape[1], rows[1].shape[1], teacher.dim
            return Aligner(heads.build_heads(*widths, teacher=teacher), {}), seconds
        options["teacher"] = teacher.leading(min(teacher.dim, recipe_lib.MOST_FEATURES))
    pools = () if chosen["pools"] == "nothing" else (dataset.pool_x, dataset.pool_y)
    model, more = timed(align, rows, *pools, **options)
    return model, seconds + more


def scores(model, gallery):
    """Recalls by name, plain and calibrated."""
    found = evaluation.evaluate(model.heads.x, model.heads.y, gallery, model.calibration)
    cuts = (f"{kind}R@{k}" for kind in ("", "calibrated ") for k in (1, 10))
    return {name: found[name.replace(" ", "/").replace("R@", "mean/R@")] for name in cuts}


def compute(name, spec, needed):
    """Scores of a recipe on the test split."""
    label, pairs, seed = spec["recipe"], spec["pairs"], spec["seed"]
    pool = "disjoint" if spec["pool"] == "none" else spec["pool"]
    dataset = load(name, pairs, pool, seed)
    fitted_on = pool if RECIPES[label]["pools"] == "training" else "disjoint"
    model, seconds = fit(label, name, pairs, fitted_on, seed)
    if epsilons := RECIPES[label].get("epsilons"):
        made = [
            dataclasses.replace(
                model, calibration=recipe_lib.calibrate(model.heads, dataset, epsilon=e)
            )
            for e in epsilons
        ]
        model = max(made, key=lambda one: scores(one, dataset.val)[CALIBRATED])
    found = scores(model, dataset.test)
    if (classes := dataset.zero_shot) is not None:
        top = evaluation.evaluate_zero_shot(model.heads.x, model.heads.y, classes)
        found["zero-shot"] = top["zero_shot/top1"]
    return {**found, "seconds": seconds}


# --- results -------------------------------------------------------------------------------------

NAMES = "data", "pairs", "pool", "seed", "recipe"


def names_of(name, pairs, pool, seed, recipe):
    """The values of NAMES of a result."""
    pool = "none" if RECIPES.get(recipe, {}).get("pools") == "nothing" else pool
    return pathlib.Path(name).stem, pairs, pool, seed, recipe


def describe(name, *names):
    """The specification of a result."""
    named = dict(zip(NAMES, names_of(name, *names), strict=True))
    return {**named, "options": RECIPES.get(names[-1], {}), "inputs": inputs(name)}


def fill(kept, specs, compute):
    """Computes what is missing; an error ends the command."""
    for _, error in kept.fill([(spec, ()) for spec in specs], compute):
        if error is not None:
            raise error


def scenes(name, pairs):
    """The scene of every pair of RSICD, after which its images are named."""
    if name != "rsicd":
        return None
    with np.load(photos.FOLDER / "rsicd.npz") as table:
        images = table["file"][photos.choose(name, n_pairs=pairs).images]
    return [str(image).rsplit("_")[0] for image in images]


def try_out(lab, make, spec, needed):
    """Scores of a trial on the validation split."""
    made, seconds = timed(make)
    return {**lab.scores(made), "seconds": seconds}


def search(given, kept):
    """Prints validation scores of all trials, as they come, and how long their fit took."""
    for pairs in given.pairs:
        lab = recipe_search.Lab(load(given.data, pairs), scenes(given.data, pairs))
        print(f"{given.data}, {pairs} pairs, validation: R@10 / calibrated R@10, seconds of a core")
        for label, make in recipe_search.tried(lab):
            spec = describe(given.data, pairs, "disjoint", 0, f"search: {label}")
            if not given.recipes or label in given.recipes:
                if not given.show:
                    fill(kept, [spec], functools.partial(try_out, lab, make))
                if found := kept.results(spec):
                    recalls = f"{found[PLAIN]:.1f} / {found[CALIBRATED]:.1f}"
                    print(f"| {label} | {recalls} | {found['seconds']:.0f} |", flush=True)


# --- tables --------------------------------------------------------------------------------------


def main():
    given = parser.parse_args()
    if given.show and not given.show.exists():
        parser.error(f"--show: {given.show} does not exist")
    recipes = given.recipes or list(RECIPES)
    if not given.search and (unknown := sorted(set(recipes) - set(RECIPES))):
        parser.error(f"--recipes: unknown {unknown[0]!r}; choose from {', '.join(RECIPES)}")
    kept = store.Store(given.show or given.cells)
    try:
        if given.search:
            search(given, kept)
        else:
            tables(given, recipes, kept)
    except checks.InputError as error:
        parser.exit(1, f"error: {error}\n")


def tables(given, recipes, kept):
    """Computes what is missing, and prints a table of every kind of pools."""
    if not given.show:
        order = itertools.product(range(given.seeds), given.pairs, recipes, given.pools)
        specs = [describe(given.data, n, pool, seed, recipe) for seed, n, recipe, pool in order]
        fill(kept, specs, functools.partial(compute, given.data))
    known = {}
    for spec, found, _ in kept.entries().values():
        names = tuple(spec[key] for key in NAMES)
        # What is shown may be of files that are not here.
        if given.show or spec == describe(given.data, *names[1:]):
            known[names] = found
    for pool in given.pools:
        print(f"\n{given.data}, {pool} pools, {given.seeds} seeds: R@10 / calibrated R@10")
        show(given, recipes, functools.partial(at, given, known, pool))


def at(given, known, pool, pairs, recipe, score):
    """A score of every seed whose result is known."""
    names = {seed: names_of(given.data, pairs, pool, seed, recipe) for seed in range(given.seeds)}
    found = {seed: known.get(some, {}) for seed, some in names.items()}
    return {seed: scores[score] for seed, scores in found.items() if score in scores}


def show(given, recipes, of):
    """Prints recalls and zero-shot accuracy, the leads of `align`, and the seconds of a core."""
    sizes = [f"{pairs:,}" for pairs in given.pairs]
    print_row("recipe", *sizes, *(f"zero-shot, {size}" for size in sizes), head=True)
    for recipe in recipes:
        recalls = [[mean(of(n, recipe, s)) for s in (PLAIN, CALIBRATED)] for n in given.pairs]
        classes = [mean(of(n, recipe, "zero-shot")) for n in given.pairs]
        print_row(recipe, *map(" / ".join, recalls), *classes)
    print()
    print_row("`align` above", *LEADS, head=True)
    for pairs in given.pairs:
        row = []
        for score, recipe, other in LEADS.values():
            ours, theirs = of(pairs, "align", score), of(pairs, recipe, other)
            row.append(mean({s: ours[s] - theirs[s] for s in ours.keys() & theirs.keys()}))
        print_row(f"{pathlib.Path(given.data).stem}, {pairs:,}", *row)
    print()
    print_row("seconds of a core", *sizes, head=True)
    for recipe in recipes:
        found = [of(n, recipe, "seconds") for n in given.pairs]
        if any(found):
            print_row(recipe, *(mean(seconds, digits=0) for seconds in found))


def print_row(first, *others, head=False):
    print(f"| {' | '.join([first, *others])} |")
    if head:
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
