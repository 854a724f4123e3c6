"""Before training: are two encoders worth aligning, and with which unpaired rows and epsilons?

    python -m experiments.diagnose --x=images.npy --y=texts.npy --pairs=1000 --workdir=runs/before
    python -m experiments.diagnose --quick --workdir=runs/photographs

Row i of x matches row i of y in `pairs` rows chosen at random; the rest is the unpaired pool, or
files of its own (--unpaired_x, --unpaired_y). Without files it looks at COCO's photographs.
Trains nothing.
"""

import dataclasses
import pathlib
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from experiments import cli, photos, report
from experiments import workdir as workdir_lib
from experiments.config import naming
from experiments.paper.panels import paper_results
from sotalign_jax import checks, data, diagnostics, files, methods, teachers
from sotalign_jax.diagnostics import KNN_ROWS, Mean

_FILES = {
    "x": "Embeddings of the first modality (.npy, .npz, .safetensors, tfds:...; PATH#KEY).",
    "y": "Embeddings of the second, row i matching row i of x.",
    "unpaired_x": "Unpaired embeddings from x's encoder; the other rows of x by default.",
    "unpaired_y": "Unpaired embeddings from y's encoder; the other rows of y by default.",
}
_PATHS = {name: flags.DEFINE_string(name, None, text) for name, text in _FILES.items()}
_PAIRS = flags.DEFINE_integer("pairs", 1000, "Rows of x and y that are known to match.")
_QUICK = flags.DEFINE_bool("quick", False, "Fewer repetitions, planes and rows.")
_EPSILON = flags.DEFINE_float("epsilon", 0.05, "Regularisation of the student's plan.")
_EPSILON_STAR = flags.DEFINE_float("epsilon_star", 0.005, "Regularisation of the teacher's plan.")
_RIDGE = flags.DEFINE_float("ridge", 0.1, "Ridge of the CCA teacher.")
_SEED = flags.DEFINE_integer("seed", 0, "Chooses pairs, samples and planes.", lower_bound=0)
flags.declare_key_flag("workdir")

# --- measurements ---------------------------------------------------------------------------------

MIN_PAIRS = 20
NEIGHBOURS = 10
LADDER = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005)
BUDGET = methods.SOTAlign.max_iterations
TOLERANCE = methods.SOTAlign.tolerance


@dataclasses.dataclass(frozen=True)
class Options:
    """How thoroughly to measure, and the epsilons and ridge meant for training."""

    epsilon: float = 0.05
    epsilon_star: float = 0.005
    ridge: float = 0.1
    subsets: int = 5
    repeats: int = 20
    rows: int = 10_000
    projections: int = 500
    batch: int = 4096

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon, epsilon_star=self.epsilon_star)
        checks.at_least(0, ridge=self.ridge)

    def quick(self) -> "Options":
        """Less of everything."""
        return dataclasses.replace(
            self, subsets=1, repeats=5, rows=1000, projections=100, batch=1024
        )

    def epsilons(self) -> list[float]:
        """The ladder with the chosen ones, largest first."""
        return sorted({*LADDER, self.epsilon, self.epsilon_star}, reverse=True)


class Encoders(NamedTuple):
    """Mutual k-NN of random subsets of the pairs."""

    scores: list[float]
    chance: float
    rows: int

    @property
    def score(self) -> Mean:
        """Mean over the subsets, and its spread."""
        return Mean(self.scores)


class Findings(NamedTuple):
    """What was measured; a pool that has no rows has no shift, and no plan without both."""

    options: Options
    shapes: dict[str, Any]
    encoders: Encoders
    shifts: dict[str, diagnostics.Shift]
    plans: list[diagnostics.Convergence]
    batch: int


def measure(dataset: data.Dataset, options: Options, *, seed: int) -> Findings:
    """Runs every diagnostic under one progress bar."""
    pools = {"x": (dataset.pairs_x, dataset.pool_x), "y": (dataset.pairs_y, dataset.pool_y)}
    pools = {side: arrays for side, arrays in pools.items() if len(arrays[1])}
    epsilons = options.epsilons() if len(pools) == 2 else []
    subsets = options.subsets if len(dataset.pairs_x) > KNN_ROWS else 1
    total = subsets + options.repeats * len(pools) + len(epsilons)
    with workdir_lib.Progress(total, "diagnose") as progress:
        encoders = _encoders(dataset, subsets, seed, progress.advance)
        shifts = {
            side: diagnostics.pool_shift(
                *arrays,
                repeats=options.repeats,
                rows=options.rows,
                projections=options.projections,
                seed=seed,
                on_repeat=progress.advance,
            )
            for side, arrays in pools.items()
        }
        plans, batch = [], min(options.batch, len(dataset.pool_x), len(dataset.pool_y))
        if epsilons:
            teacher = teachers.cca(dataset.pairs_x, dataset.pairs_y, ridge=options.ridge)
            rng = np.random.default_rng(seed)
            f, g = (
                np.asarray(project(pool[np.sort(rng.permutation(len(pool))[:batch])]))
                for project, pool in ((teacher.x, dataset.pool_x), (teacher.y, dataset.pool_y))
            )
            for epsilon in epsilons:
                plans += diagnostics.sinkhorn_convergence(
                    f, g, [epsilon], tolerance=TOLERANCE, max_iterations=BUDGET
                )
                progress.advance()
    shapes = {key: shape for key, shape in dataset.summary().items() if shape}
    return Findings(options, shapes, encoders, shifts, plans, batch)


def _encoders(dataset: data.Dataset, subsets: int, seed: int, step: Callable[[], None]) -> Encoders:
    n = len(dataset.pairs_x)
    rows = min(KNN_ROWS, n)
    scores = []
    for subset in range(subsets):
        chosen = np.sort(np.random.default_rng((seed, subset)).permutation(n)[:rows])
        x, y = dataset.pairs_x[chosen], dataset.pairs_y[chosen]
        scores.append(diagnostics.mutual_knn(x, y, k=NEIGHBOURS))
        step()
    return Encoders(scores, diagnostics.chance_knn(rows, k=NEIGHBOURS), rows)


def above_chance(score: float, chance: float) -> float:
    """(score - chance) / (1 - chance)."""
    return (score - chance) / (1 - chance)


# --- what they mean -------------------------------------------------------------------------------

PAPER = {
    encoders: (row["mutual_kNN_pct"], (row["COCO_T2I_R1"] + row["COCO_I2T_R1"]) / 2)
    for name, row in paper_results()["T3_A2_encoders"].items()
    for encoders, _, method in [name.partition("/")]
    if method == "SOTAlign"
}
"""Mutual k-NN and SOTAlign's MeanR@1 on COCO of the paper's encoder pairs, in percent."""


NO_POOL = "Pass fewer --pairs than the files have rows, or --unpaired_x and --unpaired_y."


class Reading(NamedTuple):
    """What a measurement means: the answer, what it rests on, and the numbers, if there are any."""

    answer: str
    reason: str
    table: report.Table | None = None


def read_encoders(found: Encoders) -> Reading:
    """Is this encoder pair worth aligning?"""
    lowest, highest = (choose(score for score, _ in PAPER.values()) for choose in (min, max))
    bar = above_chance(lowest / 100, diagnostics.chance_knn(KNN_ROWS, k=NEIGHBOURS))
    above = above_chance(found.score, found.chance)
    unclear = found.score - found.chance < 5 / found.rows
    if unclear and 5 / found.rows > bar / 2:
        answer = f"CANNOT TELL: chance varies too much on {found.rows} pairs; pass 100 or more"
    elif unclear:
        answer = (
            "NO: no better than chance; check that row i of x matches row i of y, and if it does, "
            "these encoders have too little in common"
        )
    elif above >= bar:
        answer = "YES: as alike as the encoder pairs that the paper aligns"
    elif above >= bar / 2:
        answer = "WORTH TRYING: less alike than the paper's encoder pairs, but far above chance"
    else:
        answer = "DOUBTFUL: above chance, but far less alike than the paper's encoder pairs"
    reason = (
        f"The {NEIGHBOURS} nearest neighbours of a sample agree to {100 * found.score:.1f} % "
        f"on {found.rows:,} pairs, {100 * found.chance:.1f} % by chance. The paper's six encoder "
        f"pairs score {lowest} to {highest} % on {KNN_ROWS:,}, and its MeanR@1 after alignment "
        "follows the score (r = 0.82; 0.95 with weaker encoders). The score grows when rows are "
        f"few, so the part above chance is compared: {100 * above:.1f} % here, {100 * bar:.1f} % "
        "for the paper's lowest. Rules of thumb: below half of the lowest is doubtful, and within "
        "5/rows of chance is no better than chance (a random matching varies by 1.4/rows)."
    )
    rows: list[list[Any]] = [
        ["this pair", found.rows, Mean([100 * score for score in found.scores])],
        ["chance", found.rows, 100 * found.chance],
        *([f"paper: {name}", KNN_ROWS, score] for name, (score, _) in PAPER.items()),
    ]
    table = report.table(["encoders", "rows", f"mutual {NEIGHBOURS}-NN (%)"], rows)
    return Reading(answer, reason, table)


def _shift_answer(shift: diagnostics.Shift) -> str:
    noise = shift.noise + 2 * (shift.noise.spread or 0.0)
    if max(shift.pool, shift.sphere) <= noise:
        return f"CANNOT TELL (on {shift.rows} rows even random directions look like the pairs)"
    if shift.pool <= noise:
        return "LIKE THE PAIRS"
    if shift.sphere <= noise:
        return (
            "AS FAR AS RANDOM (farther: random directions look like the pairs, the pool does not)"
        )
    place = f"({100 * shift.share:.0f} % of the way to random directions)"
    if shift.share < 0.5:
        return f"NEAR {place}"
    return f"FAR {place}" if shift.share < 0.95 else f"AS FAR AS RANDOM {place}"


def read_pool(shifts: dict[str, diagnostics.Shift]) -> Reading:
    """Is the pool too far from the pairs?"""
    if not shifts:
        return Reading("NOT MEASURED: there are no unpaired rows", NO_POOL)
    answer = "; ".join(f"{side} is {_shift_answer(shift)}" for side, shift in shifts.items())
    reason = (
        "The spherical sliced Wasserstein distance of the pool from the pairs is placed between "
        "two marks: two halves of the pairs (sampling noise) and random directions (nothing in "
        "common). The share is what remains without the noise; that less than 50 % is near is a "
        "rule of thumb. In the paper retrieval falls with the distance summed over both sides (r "
        "= -0.76). Random directions as a pool leave it near the supervised baseline, but four of "
        "its fifteen real pools fell below the baseline in one direction. When far, look for rows "
        "more like the pairs, lower alpha, and compare with training on the pairs alone."
    )
    headers = ["side", "rows", "two halves", "pool", "random", "share"]
    rows: list[list[Any]] = [
        [side, shift.rows, shift.noise, shift.pool, shift.sphere, shift.share]
        for side, shift in shifts.items()
    ]
    if len(rows) == 2:
        rows.append(["x + y", None, *(rows[0][i] + rows[1][i] for i in (2, 3, 4)), None])
    return Reading(answer, reason, report.table(headers, rows, digits=4))


def read_plans(found: Findings) -> Reading:
    """Which epsilons converge?"""
    if not found.plans:
        answer = "NOT MEASURED: a transport plan needs unpaired rows of both x and y"
        return Reading(answer, NO_POOL)
    by_epsilon = {row.epsilon: row for row in found.plans}
    student, teacher = (
        by_epsilon[epsilon] for epsilon in (found.options.epsilon, found.options.epsilon_star)
    )
    smallest = diagnostics.smallest_epsilon(found.plans)
    if student.converged and teacher.converged:
        answer = f"YES: epsilon = {student.epsilon:g} in {student.iterations} iterations, "
        answer += f"epsilon* = {teacher.epsilon:g} in {teacher.iterations}"
    else:
        failed = [row for row in (student, teacher) if not row.converged]
        answer = "NO: " + ", ".join(
            f"not at {row.epsilon:g} (error {row.error:.1e})" for row in failed
        )
    answer += (
        f"; down to epsilon* = {smallest:g} within {BUDGET}"
        if smallest is not None
        else f"; no epsilon tried does within {BUDGET} iterations, so allow more"
    )
    reason = (
        f"Plans are solved as in training, to a marginal error of {TOLERANCE:g}, on the CCA "
        f"teacher's affinity of {found.batch:,} unpaired rows a side. A smaller epsilon* is not "
        f"better in itself: at {teacher.epsilon:g} the mass of a row spreads over about "
        f"{teacher.partners:.1f} partners. Near 1 every mistake of the teacher is copied, near all "
        "of them the plan says nothing; which is best, only validation tells."
    )
    chosen = {student.epsilon: "student", teacher.epsilon: "teacher"}
    headers = ["epsilon", "chosen for", "converged", "iterations", "error", "partners"]
    rows = [
        [
            f"{row.epsilon:g}",
            chosen.get(row.epsilon, ""),
            "yes" if row.converged else "no",
            row.iterations,
            f"{row.error:.1e}",
            row.partners,
        ]
        for row in found.plans
    ]
    return Reading(answer, reason, report.table(headers, rows))


# --- files and plot -------------------------------------------------------------------------------


def save(found: Findings, out: pathlib.Path) -> str:
    """Writes diagnosis.md and .png and a CSV a table into `out`; returns the text to print."""
    readings = {
        "encoders": ("Is this pair of encoders worth aligning?", read_encoders(found.encoders)),
        "pool": ("Are the unpaired rows too far from the pairs?", read_pool(found.shifts)),
        "plans": ("Do the transport plans converge?", read_plans(found)),
    }
    shapes = ", ".join(f"{key} {n:,} x {d:,}" for key, (n, d) in found.shapes.items())
    text, markdown = [shapes], ["# Before training", shapes]
    for name, (title, (answer, reason, table)) in readings.items():
        text.append(f"== {title}\n   {answer}")
        markdown += [f"## {title}", f"**{answer}.** {reason}"]
        if table is not None:
            text.append(str(table))
            markdown.append(table.markdown())
            (out / f"{name}.csv").write_text(table.csv(), encoding="utf-8")
        text.append(textwrap.fill(reason, 100))
    markdown.append("![diagnosis](diagnosis.png)")
    (out / "diagnosis.md").write_text("\n\n".join(markdown) + "\n", encoding="utf-8")
    plot(found, out / "diagnosis.png")
    return "\n" + "\n\n".join([*text, f"Report, tables and plot are in {out}"])


def plot(found: Findings, path: pathlib.Path) -> None:
    """Ours among the paper's encoder pairs; the pool between noise and chaos; iterations."""
    plt = report.pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    _plot_encoders(axes[0], found.encoders)
    if found.shifts:
        _plot_pool(axes[1], found.shifts)
    if found.plans:
        _plot_plans(axes[2], found)
    for ax, shown in zip(axes[1:], (found.shifts, found.plans), strict=True):
        if not shown:
            ax.set_axis_off()
            ax.text(0.5, 0.5, "no unpaired rows", ha="center", transform=ax.transAxes)
    report.write(path, report.png(figure))


def _plot_encoders(ax: Any, found: Encoders) -> None:
    scores, recalls = zip(*PAPER.values(), strict=True)
    ax.scatter(scores, recalls, color="0.5", label="the paper's encoder pairs")
    ax.axvline(100 * found.score, color="C0", label="this pair")
    ax.axvline(100 * found.chance, color="C3", linestyle=":", label="chance")
    ax.set(xlabel=f"mutual {NEIGHBOURS}-NN (%)", ylabel="the paper's MeanR@1 on COCO (%)")
    ax.set_xlim(0, max(*scores, 100 * found.score) * 1.08)
    ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(0.15, 0.5))


def _plot_pool(ax: Any, shifts: dict[str, diagnostics.Shift]) -> None:
    names = {"two halves of the pairs": "noise", "pool": "pool", "random directions": "sphere"}
    for index, (label, field) in enumerate(names.items()):
        means = [getattr(shift, field) for shift in shifts.values()]
        spreads = [mean.spread or 0.0 for mean in means]
        colour = ("0.7", "C0", "C3")[index]
        places = np.arange(len(shifts)) + (index - 1) * 0.27
        ax.bar(places, means, 0.25, yerr=spreads, color=colour, label=label)
    ax.set_xticks(range(len(shifts)), list(shifts))
    ax.set_ylabel("distance from the pairs (SSW)")
    ax.legend(frameon=False, fontsize=8)


def _plot_plans(ax: Any, found: Findings) -> None:
    for converged, face in ((True, "C0"), (False, "none")):
        rows = [row for row in found.plans if row.converged == converged]
        label = "converged" if converged else "not converged"
        points = [row.epsilon for row in rows], [row.iterations for row in rows]
        ax.scatter(*points, facecolors=face, edgecolors="C0", label=label)
    ax.axhline(BUDGET, color="C3", linestyle=":", label="budget")
    chosen = {"ε*": found.options.epsilon_star, "ε": found.options.epsilon}
    for name, epsilon in chosen.items():
        ax.axvline(epsilon, color="0.8", zorder=0)
        ax.annotate(name, (epsilon, 1), xycoords=("data", "axes fraction"), color="0.4")
    ax.set(xscale="log", yscale="log", xlabel="epsilon", ylabel="iterations")
    ax.legend(frameon=False, fontsize=8)


# --- the command ----------------------------------------------------------------------------------


def _load() -> data.Dataset:
    def read(name: str) -> Any:
        path = _PATHS[name].value
        with naming(f"{name}: "):
            return files.load_array(path) if path else None

    arrays = {name: read(name) for name in _FILES}
    given = [name for name, array in arrays.items() if array is not None]
    for name in ("x", "y"):
        if given and name not in given:
            raise checks.InputError(f"{name}: is not set but {given[0]} is; pass --{name}=FILE")
    rows = len(arrays["x"]) if given else len(photos.rows_of_split("coco", "train"))
    if not MIN_PAIRS <= _PAIRS.value <= rows:
        raise checks.InputError(
            f"pairs: {_PAIRS.value} asked of {rows} rows; pass a number in {MIN_PAIRS}..{rows}"
        )
    if not given:
        return photos.dataset(n_pairs=_PAIRS.value, seed=_SEED.value, test=False)
    return data.semi_supervised(**arrays, n_pairs=_PAIRS.value, seed=_SEED.value)


def main() -> None:
    """Measures, prints and saves what was found."""
    options = Options(epsilon=_EPSILON.value, epsilon_star=_EPSILON_STAR.value, ridge=_RIDGE.value)
    if _QUICK.value:
        options = options.quick()
    dataset = _load()
    workdir = cli.workdir()
    paths = {name: flag.value for name, flag in _PATHS.items()}
    config = {
        "files": {
            name: path and str(pathlib.Path(path).absolute()) for name, path in paths.items()
        },
        "shapes": dataset.summary(),
        "seed": _SEED.value,
        "options": dataclasses.asdict(options),
    }
    workdir_lib.open_run(workdir, config)
    found = measure(dataset, options, seed=_SEED.value)
    print(save(found, workdir))


if __name__ == "__main__":
    cli.run(main)
