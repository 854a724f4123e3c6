r"""Measures before training whether two encoders, their pools and the epsilons are suitable.

    python -m experiments.diagnose --config=experiments/configs/files.py:from=FOLDER \
        --workdir=runs/before
    python -m experiments.diagnose --config=experiments/configs/quickstart.py --quick \
        --workdir=runs/photographs

Measures the pairs and pools of the first run of a config, a CCA teacher fitted on these pairs, and
the convergence of SOTAlign's plans. No student is trained.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from experiments import launch, report, run
from experiments import spec as spec_lib
from experiments import workdir as workdir_lib
from experiments.paper.panels import paper_results
from experiments.paper.sources import AS_RANDOM, FAR, NEAR, nearness
from sotalign_jax import checks, data, diagnostics, methods, recipe, teachers
from sotalign_jax.diagnostics import KNN_ROWS, Mean
from sotalign_jax.search import cli

_QUICK = flags.DEFINE_bool("quick", False, "Use fewer repetitions, projections and rows.")
flags.declare_key_flag("config")
flags.declare_key_flag("workdir")

MIN_PAIRS = 20
NEIGHBOURS = 10  # as in the paper's mutual k-NN
# Epsilons to try, down to a tenth of the default epsilon*.
LADDER = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005)
BUDGET = methods.SOTAlign.max_iterations
TOLERANCE = methods.SOTAlign.tolerance
THOROUGH = {"subsets": 5, "repeats": 20, "rows": 10_000, "projections": 500, "batch": 4096}
QUICK = {"subsets": 1, "repeats": 5, "rows": 1000, "projections": 100, "batch": 1024}
PAPER = {
    row.removesuffix("/SOTAlign"): numbers["mutual_kNN_pct"]
    for row, numbers in paper_results()["T3_A2_encoders"].items()
    if row.endswith("/SOTAlign")
}
"""Mutual k-NN of the encoder pairs in the paper, in percent."""
NO_POOL = """NOT MEASURED: the distance of a pool needs unpaired rows, and transport plans need
unpaired rows of both sides; keep fewer pairs than there are rows (data.n_pairs), or pass files of
unpaired rows."""


def measure(
    dataset: data.Dataset,
    teacher: teachers.Teacher,
    options: Mapping[str, Any],
    *,
    seed: int,
) -> "Iterator[Reading]":
    """Runs the diagnostics. Those that need a missing pool are skipped.

    Args:
        dataset: Data of a run.
        teacher: CCA teacher fitted on the pairs.
        options: `THOROUGH` or `QUICK`, with the epsilons of SOTAlign.
        seed: Seed of all random choices.

    Yields:
        The reading of each diagnostic.
    """
    n = len(dataset.pairs_x)
    rows, subsets = min(KNN_ROWS, n), options["subsets"] if n > KNN_ROWS else 1
    # Chance depends on the number of rows, so larger sets are measured on subsets of KNN_ROWS.
    knn = []
    for subset in range(subsets):
        some = np.sort(np.random.default_rng((seed, subset)).permutation(n)[:rows])
        x, y = dataset.pairs_x[some], dataset.pairs_y[some]
        knn.append(diagnostics.mutual_knn(x, y, k=NEIGHBOURS))
    yield read_encoders(knn, rows)
    pools = {"x": (dataset.pairs_x, dataset.pool_x), "y": (dataset.pairs_y, dataset.pool_y)}
    pools = {side: arrays for side, arrays in pools.items() if len(arrays[1])}
    sizes = {name: options[name] for name in ("repeats", "rows", "projections")}
    if pools:
        shifts = {
            side: diagnostics.pool_shift(*arrays, **sizes, seed=seed)
            for side, arrays in pools.items()
        }
        yield read_pool(shifts)
    if len(pools) == 2:
        batch = min(options["batch"], len(dataset.pool_x), len(dataset.pool_y))
        rng = np.random.default_rng(seed)
        f, g = (
            np.asarray(project(pool[np.sort(rng.permutation(len(pool))[:batch])]))
            for project, pool in ((teacher.x, dataset.pool_x), (teacher.y, dataset.pool_y))
        )
        epsilons = sorted({*LADDER, options["epsilon"], options["epsilon_star"]}, reverse=True)
        plans = diagnostics.sinkhorn_convergence(
            f, g, epsilons, tolerance=TOLERANCE, max_iterations=BUDGET
        )
        yield read_plans(plans, batch, options)


# --- interpretation -------------------------------------------------------------------------------


class Reading(NamedTuple):
    """Interpretation of a measurement.

    Attributes:
        name: Name of its CSV file.
        question: Question that the measurement answers.
        answer: Answer, which starts with a word in capitals.
        reason: Explanation of the answer.
        table: The numbers.
    """

    name: str
    question: str
    answer: str
    reason: str
    table: report.Table


def read_encoders(scores: Sequence[float], rows: int) -> Reading:
    """Compares the encoders with those of the paper, by mutual k-NN above chance.

    Args:
        scores: Mutual k-NN of every subset of the pairs.
        rows: Number of pairs in a subset.

    Returns:
        The reading.
    """
    score, chance = Mean(scores), diagnostics.chance_knn(rows, k=NEIGHBOURS)
    lowest, highest = min(PAPER.values()), max(PAPER.values())
    above, usual = (score - chance) / (1 - chance), diagnostics.chance_knn(KNN_ROWS, k=NEIGHBOURS)
    bar = (lowest / 100 - usual) / (1 - usual)
    # A random matching has a standard deviation of about 1.4 / rows, so 5 / rows is over three.
    unclear = score - chance < 5 / rows
    if unclear and 5 / rows > bar / 2:
        answer = f"CANNOT TELL: {rows} pairs are too few to exclude chance; pass 100 or more"
    elif unclear:
        answer = (
            "NO: no better than chance; check that row i of x matches row i of y, or use other "
            "encoders"
        )
    elif above >= bar:
        answer = "YES: as alike as the encoder pairs that the paper aligns"
    elif above >= bar / 2:
        answer = "WORTH TRYING: less alike than the paper's encoder pairs, but far above chance"
    else:
        answer = "DOUBTFUL: above chance, but far less alike than the paper's encoder pairs"
    reason = (
        f"On {rows:,} pairs, {100 * score:.1f} % of the {NEIGHBOURS} nearest neighbours of a "
        f"sample are the same in both encoders, and {100 * chance:.1f} % by chance. The paper's "
        f"six encoder pairs score {lowest} to {highest} % on {KNN_ROWS:,} pairs, and the MeanR@1 "
        "after alignment is correlated with the score (r = 0.82, or 0.95 with weaker encoders). "
        "The score grows if there are few rows, so the part above chance is compared: "
        f"{100 * above:.1f} % here and {100 * bar:.1f} % for the lowest of the paper. As a rule "
        "of thumb, less than half of the lowest is doubtful, and less than 5/rows above chance "
        "is no better than chance (a random matching varies by 1.4/rows)."
    )
    lines: list[list[Any]] = [
        ["this pair", rows, Mean([100 * score for score in scores])],
        ["chance", rows, 100 * chance],
        *([f"paper: {name}", KNN_ROWS, knn] for name, knn in PAPER.items()),
    ]
    table = report.Table(["encoders", "rows", f"mutual {NEIGHBOURS}-NN (%)"], lines)
    return Reading("encoders", "Is this pair of encoders worth aligning?", answer, reason, table)


def _place(shift: diagnostics.Shift) -> str:
    """Returns the distance of a pool in words."""
    # Distances within two standard deviations of the sampling noise cannot be told apart.
    noise = shift.noise + 2 * (shift.noise.spread or 0.0)
    if max(shift.pool, shift.sphere) <= noise:
        return f"CANNOT TELL (on {shift.rows} rows even random directions look like the pairs)"
    if shift.pool <= noise:
        return "LIKE THE PAIRS"
    if shift.sphere <= noise:
        return f"{AS_RANDOM} (farther: random directions look like the pairs, the pool does not)"
    return f"{nearness(shift.share)} ({100 * shift.share:.0f} % of the way to random directions)"


def read_pool(shifts: Mapping[str, diagnostics.Shift]) -> Reading:
    """Places the distance of each pool between sampling noise and random directions."""
    question = "Are the unpaired rows too far from the pairs?"
    answer = "; ".join(f"{side} is {_place(shift)}" for side, shift in shifts.items())
    reason = (
        "The spherical sliced Wasserstein distance between the pool and the pairs is compared "
        "with two other distances: between two halves of the pairs (sampling noise), and between "
        f"the pairs and random directions. Less than {100 * NEAR:.0f} % of the way to random "
        f"directions is near, and {100 * FAR:.0f} % or more is as far as random. The farther side "
        "counts. docs/results/V3.md measures twelve pools for 1,000 pairs of COCO: SOTAlign was "
        "better than training on the pairs alone with all near pools, with three of four far "
        "pools, and with no pool that is as far as random. If a pool is far, lower alpha and "
        "compare with the pairs alone. If it is as far as random, leave it out."
    )
    headers = ["side", "rows", "two halves", "pool", "random", "share"]
    lines: list[list[Any]] = [
        [side, shift.rows, shift.noise, shift.pool, shift.sphere, shift.share]
        for side, shift in shifts.items()
    ]
    return Reading("pool", question, answer, reason, report.Table(headers, lines, digits=4))


def read_plans(
    plans: Sequence[diagnostics.Convergence], batch: int, options: Mapping[str, Any]
) -> Reading:
    """Reports which epsilons converge.

    Args:
        plans: Convergence by epsilon.
        batch: Number of unpaired rows per side.
        options: The epsilons of SOTAlign, "epsilon" and "epsilon_star".

    Returns:
        The reading.
    """
    question = "Do the transport plans converge?"
    by_epsilon = {plan.epsilon: plan for plan in plans}
    student, teacher = (by_epsilon[options[name]] for name in ("epsilon", "epsilon_star"))
    if student.converged and teacher.converged:
        answer = f"YES: epsilon = {student.epsilon:g} in {student.iterations} iterations, "
        answer += f"epsilon* = {teacher.epsilon:g} in {teacher.iterations}"
    else:
        failed = [plan for plan in (student, teacher) if not plan.converged]
        answer = "NO: " + ", ".join(f"not at {p.epsilon:g} (error {p.error:.1e})" for p in failed)
    smallest = diagnostics.smallest_epsilon(plans)
    answer += (
        f"; the smallest epsilon that converges within {BUDGET} iterations is {smallest:g}"
        if smallest is not None
        else f"; no epsilon converges within {BUDGET} iterations, so raise max_iterations"
    )
    reason = (
        f"Plans are solved as in training, to a marginal error of {TOLERANCE:g}, on the CCA "
        f"teacher's affinity of {batch:,} unpaired rows per side. A smaller epsilon* is not always "
        f"better. At {teacher.epsilon:g} the mass of a row spreads over about "
        f"{teacher.partners:.1f} partners. With one partner, the plan copies every mistake of the "
        "teacher. With all partners, it carries no information. Choose epsilon* on validation."
    )
    chosen = {student.epsilon: "student", teacher.epsilon: "teacher"}
    headers = ["epsilon", "chosen for", "converged", "iterations", "error", "partners"]
    lines = [
        [f"{plan.epsilon:g}", chosen.get(plan.epsilon, ""), "yes" if plan.converged else "no",
         plan.iterations, f"{plan.error:.1e}", plan.partners]
        for plan in plans
    ]  # fmt: skip
    return Reading("plans", question, answer, reason, report.Table(headers, lines))


# --- the command ----------------------------------------------------------------------------------


def main() -> None:
    """Runs the diagnostics, prints the readings, and writes diagnosis.md and CSV files."""
    spec = launch.from_flags()
    out = cli.workdir()
    options: dict[str, Any] = {
        name: spec.of(f"sotalign.{name}") for name in ("epsilon", "epsilon_star")
    }
    options |= QUICK if _QUICK.value else THOROUGH
    # The first run may change the data, such as n_pairs. Its other settings are not used here.
    changes = next(iter(spec.runs.values()), {})
    first = {"first": {**changes, "method": "cca", "data.test": False}}
    one = next(iter(spec_lib.expand(spec.change({"runs": first})).values()))
    with checks.naming("data."):
        checks.whole(MIN_PAIRS, n_pairs=one.data.n_pairs)
    dataset = run.load_dataset(one)
    resolved, dataset = run.resolve(one, dataset)
    teacher = recipe.prepare(resolved, dataset).teacher
    assert teacher is not None  # the method is a teacher
    workdir_lib.open_run(out, {**one.to_json(), "options": options}, run.inputs(one))
    shapes = ((key, shape) for key, shape in dataset.summary().items() if shape)
    parts = [", ".join(f"{key} {n:,} x {d:,}" for key, (n, d) in shapes)]
    print(f"\n{parts[0]}")
    for name, question, answer, reason, table in measure(dataset, teacher, options, seed=one.seed):
        why = textwrap.fill(reason, 100)
        parts.append(f"## {question}\n\n**{answer}.**\n\n{why}\n\n{table.markdown()}")
        print(f"\n{parts[-1]}", flush=True)
        report.write(out / f"{name}.csv", table.csv())
    if len(parts) < 4:  # the shapes and three readings are complete
        parts.append(NO_POOL)
        print(f"\n{NO_POOL}")
    report.write(out / "diagnosis.md", "\n\n".join(["# Before training", *parts]) + "\n")
    print(f"\nReport and tables are in {out}")


if __name__ == "__main__":
    launch.run(main)
