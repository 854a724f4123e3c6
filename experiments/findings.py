"""What the diagnosis found: in plain words, as tables, and as a plot."""

import pathlib
import textwrap
from typing import Any, NamedTuple

import numpy as np

from experiments.diagnosis import (
    BUDGET,
    KNN_ROWS,
    NEIGHBOURS,
    TOLERANCE,
    Encoders,
    Findings,
    above_chance,
)
from sotalign_jax import diagnostics, tables

PAPER = {
    "DINOv2 + Nemotron": (14.6, 19.40),
    "DINOv2 + Qwen3": (18.9, 26.00),
    "DINOv2 + NV-Embed": (18.2, 27.10),
    "DINOv3 + Nemotron": (14.1, 21.40),
    "DINOv3 + Qwen3": (18.0, 29.70),
    "DINOv3 + NV-Embed": (17.6, 30.30),
}
"""Mutual k-NN and SOTAlign's MeanR@1 on COCO of the paper's encoder pairs, in percent."""


# --- in words ----------------------------------------------------------------------------------


class Reading(NamedTuple):
    """What a measurement means: the answer, and what it rests on."""

    answer: str
    reason: str


def read_encoders(found: Encoders) -> Reading:
    """Is this encoder pair worth aligning?"""
    lowest, highest = (choose(score for score, _ in PAPER.values()) for choose in (min, max))
    bar = above_chance(lowest / 100, diagnostics.chance_knn(KNN_ROWS, k=NEIGHBOURS))
    above = found.above_chance
    unclear = found.score.mean - found.chance < 5 / found.rows
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
        f"The {NEIGHBOURS} nearest neighbours of a sample agree to {100 * found.score.mean:.1f} % "
        f"on {found.rows:,} pairs, {100 * found.chance:.1f} % by chance. The paper's six encoder "
        f"pairs score {lowest} to {highest} % on {KNN_ROWS:,}, and its MeanR@1 after alignment "
        "follows the score (r = 0.95 with weaker encoders included, 0.82 on these six). "
        "As the score grows when rows are few, the part above chance is compared: "
        f"{100 * above:.1f} % here, {100 * bar:.1f} % for the paper's lowest. "
        "That this makes numbers of rows comparable is a rule of thumb, "
        "and so is half of the lowest as the line below which to doubt. No better than chance "
        "means by less than 5/rows: a random matching of the bundled pictures varies by 1.4/rows. "
        "Where that is above the line below which to doubt, it can mean anything."
    )
    return Reading(answer, reason)


def _shift_answer(shift: diagnostics.Shift) -> str:
    noise = shift.noise.mean + 2 * shift.noise.std
    if max(shift.pool.mean, shift.sphere.mean) <= noise:
        return f"NOT TO BE TOLD (on {shift.rows} rows even random directions look like the pairs)"
    if shift.pool.mean <= noise:
        return "LIKE THE PAIRS"
    if shift.sphere.mean <= noise:
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
        return Reading(
            "NOT MEASURED: there are no unpaired rows",
            "Pass fewer --pairs than the files have rows, or --unpaired_x and --unpaired_y.",
        )
    answer = "; ".join(f"{side} is {_shift_answer(shift)}" for side, shift in shifts.items())
    reason = (
        "The spherical sliced Wasserstein distance of the pool from the pairs lies between two "
        "marks, measured on samples of the same size: two halves of the pairs (sampling noise) and "
        "random directions (nothing in common, though real data can be farther still). The share "
        "is what remains of it without the noise. In the paper retrieval falls with the distance "
        "summed over both sides (r = -0.76). Random directions as a pool leave it near the "
        "supervised baseline there, so a far pool is more likely useless than harmful; but four of "
        "its fifteen real pools lost against the baseline in one direction of retrieval. Like the "
        "pairs means within two standard deviations of the noise; that less than 50 % is near is "
        "a rule of thumb, not fitted to any result. When far, look for rows more like the pairs, "
        "lower alpha, and compare with training on the pairs alone."
    )
    return Reading(answer, reason)


def read_plans(found: Findings) -> Reading:
    """Which epsilons converge?"""
    if not found.plans:
        return Reading(
            "NOT MEASURED: a transport plan needs unpaired rows of both x and y",
            "Pass fewer --pairs than the files have rows, or --unpaired_x and --unpaired_y.",
        )
    by_epsilon = {row.epsilon: row for row in found.plans}
    student, teacher = (
        by_epsilon[epsilon] for epsilon in (found.options.epsilon, found.options.epsilon_star)
    )
    smallest = diagnostics.smallest_epsilon(found.plans)
    fine = student.converged and teacher.converged
    if fine:
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
        "Plans are solved as in training, to a marginal error of "
        f"{TOLERANCE:g}, on the CCA teacher's affinity of {found.batch:,} unpaired rows a side. "
        "The student's affinity is the teacher's only if its heads start there. A smaller epsilon* "
        f"is not better in itself: at {teacher.epsilon:g} the mass of a row spreads over about "
        f"{teacher.partners:.1f} of {found.batch:,} partners. Near 1 every mistake of the teacher "
        "is taken at its word, near all of them the plan says nothing; which is best, only "
        "validation tells."
    )
    return Reading(answer, reason)


# --- tables, plot, files -----------------------------------------------------------------------


def encoders_table(found: Encoders) -> tables.Table:
    """Ours beside chance and the paper's."""
    deviation = 100 * found.score.std if len(found.scores) > 1 else None
    rows: list[list[Any]] = [["this pair", found.rows, 100 * found.score.mean, deviation]]
    rows += [["chance", found.rows, 100 * found.chance, None]]
    rows += [[f"paper: {name}", KNN_ROWS, score, None] for name, (score, _) in PAPER.items()]
    return tables.table(["encoders", "rows", f"mutual {NEIGHBOURS}-NN (%)", "±"], rows)


def pool_table(shifts: dict[str, diagnostics.Shift]) -> tables.Table:
    """Distances from the pairs of both pools and their sum."""
    headers = ["side", "rows", "two halves", "±", "pool", "±", "random", "±", "share"]
    rows: list[list[Any]] = []
    for side, shift in shifts.items():
        marks = (shift.noise, shift.pool, shift.sphere)
        rows.append([side, shift.rows, *(v for mark in marks for v in mark), shift.share])
    if len(rows) == 2:
        sums = [rows[0][column] + rows[1][column] for column in (2, 4, 6)]
        rows.append(["x + y", None, sums[0], None, sums[1], None, sums[2], None, None])
    return tables.table(headers, rows, digits=4)


def plans_table(found: Findings) -> tables.Table:
    """Every epsilon of the ladder."""
    chosen = {found.options.epsilon: "student", found.options.epsilon_star: "teacher"}
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
    headers = ["epsilon", "chosen for", "converged", "iterations", "error", "partners"]
    return tables.table(headers, rows)


def report(found: Findings, out: pathlib.Path) -> str:
    """Writes diagnosis.md and .png and a CSV a table into `out`; returns the text to print."""
    made = {
        "encoders": (
            "Is this pair of encoders worth aligning?",
            encoders_table(found.encoders),
            read_encoders(found.encoders),
        ),
        "pool": (
            "Are the unpaired rows too far from the pairs?",
            pool_table(found.shifts),
            read_pool(found.shifts),
        ),
        "plans": ("Do the transport plans converge?", plans_table(found), read_plans(found)),
    }
    shapes = ", ".join(f"{key} {n:,} x {d:,}" for key, (n, d) in found.shapes.items())
    text, markdown = [shapes], ["# Before training", shapes]
    for name, (title, table, reading) in made.items():
        text.append(f"== {title}\n   {reading.answer}")
        markdown += [f"## {title}", f"**{reading.answer}.** {reading.reason}"]
        if table.rows:
            text.append(str(table))
            markdown.append(table.markdown())
            (out / f"{name}.csv").write_text(table.csv(), encoding="utf-8")
        text.append(textwrap.fill(reading.reason, 100))
    markdown.append("![diagnosis](diagnosis.png)")
    (out / "diagnosis.md").write_text("\n\n".join(markdown) + "\n", encoding="utf-8")
    plot(found, out / "diagnosis.png")
    return "\n" + "\n\n".join([*text, f"Report, tables and plot are in {out}"])


def plot(found: Findings, path: pathlib.Path) -> None:
    """Ours among the paper's encoder pairs; the pool between noise and chaos; iterations."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

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
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _plot_encoders(ax: Any, found: Encoders) -> None:
    scores, recalls = zip(*PAPER.values(), strict=True)
    ax.scatter(scores, recalls, color="0.5", label="the paper's encoder pairs")
    ax.axvline(100 * found.score.mean, color="C0", label="this pair")
    ax.axvline(100 * found.chance, color="C3", linestyle=":", label="chance")
    ax.set(xlabel=f"mutual {NEIGHBOURS}-NN (%)", ylabel="the paper's MeanR@1 on COCO (%)")
    ax.set_xlim(0, max(*scores, 100 * found.score.mean) * 1.08)
    ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(0.15, 0.5))


def _plot_pool(ax: Any, shifts: dict[str, diagnostics.Shift]) -> None:
    names = {"two halves of the pairs": "noise", "pool": "pool", "random directions": "sphere"}
    for index, (label, field) in enumerate(names.items()):
        marks = [getattr(shift, field) for shift in shifts.values()]
        means, stds = zip(*marks, strict=True)
        colour = ("0.7", "C0", "C3")[index]
        places = np.arange(len(shifts)) + (index - 1) * 0.27
        ax.bar(places, means, 0.25, yerr=stds, color=colour, label=label)
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
