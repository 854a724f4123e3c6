"""Sweeps: pairs, unpaired rows, teacher noise, alpha, epsilons."""

import pathlib
from collections.abc import Mapping

import numpy as np

from experiments.paper import plots
from experiments.paper.claims import Verdict, all_above, difference, joined
from experiments.paper.entries import Column, Entry, Grid, Row, Values, column_gaps
from experiments.paper.lab import Lab
from experiments.paper.main_tables import I2T, MEAN, PICTURES, T2I, TOP1

Found = Mapping[str, Values]
METRICS = {"zero-shot": TOP1, "T2I R@1": T2I, "I2T R@1": I2T}
SAIL = {"method": "sail"}


def _methods(metric: str) -> dict[str, Column]:
    return {"SAIL": Column(metric, SAIL), "SOTAlign": Column(metric)}


# --- F5, FA2, FA3: how many pairs and unpaired rows --------------------------------------------


def _pairs(lab: Lab, name: str, metric: str) -> Grid:
    rows = {f"{n}": Row({"data.n_pairs": n}) for n in lab.scale.pairs}
    return Grid(name, "pairs", rows, _methods(metric), lab.scale.seeds)


def _unpaired(lab: Lab, name: str, metric: str) -> Grid:
    rows = {"all" if n is None else f"{n}": Row({"data.n_unpaired": n}) for n in lab.scale.unpaired}
    return Grid(name, "unpaired", rows, {"SOTAlign": Column(metric)}, lab.scale.seeds)


def _judge_pairs(values: Values) -> Verdict:
    return all_above(column_gaps(values, "SOTAlign", "SAIL"))


def _judge_fading(values: Values) -> Verdict:
    """Claim: the gain over SAIL is smaller with the most pairs than at its best."""
    gains = values.column("SOTAlign") - values.column("SAIL")
    if not np.isfinite(gains).all():
        return Verdict(None, "runs are missing")
    best = int(gains.argmax())
    listed = ", ".join(f"{g:+.1f} at {r}" for g, r in zip(gains, values.grid.rows, strict=True))
    return Verdict(bool(best < len(gains) - 1 and gains[-1] < gains[best]), f"gains {listed}")


def _judge_unpaired(values: Values) -> Verdict:
    first, *_, last = values.grid.rows
    gap = difference(values.at(last, "SOTAlign"), values.at(first, "SOTAlign"))
    return all_above({f"{last} - {first} unpaired": gap})


F5 = Entry(
    "F5",
    "How many pairs, how many unpaired rows",
    "pairs at all unpaired rows (left), unpaired rows at the usual pairs (right)",
    PICTURES,
    ("main",),
    lambda lab: [_pairs(lab, "pairs", MEAN), _unpaired(lab, "unpaired", MEAN)],
    "SOTAlign is above SAIL at every number of pairs, by less when pairs abound; more unpaired "
    "rows help",
    lambda found: joined(
        {
            "above SAIL": _judge_pairs(found["pairs"]),
            "fading gain": _judge_fading(found["pairs"]),
            "more unpaired rows": _judge_unpaired(found["unpaired"]),
        }
    ),
    plot=lambda found, path: plots.lines(found, path, ylabel="MeanR@1 (%)"),
)
FA2 = Entry(
    "FA2",
    "How many pairs: classification and both directions",
    "pairs at all unpaired rows",
    PICTURES,
    ("main",),
    lambda lab: [_pairs(lab, name, metric) for name, metric in METRICS.items()],
    "SOTAlign is above SAIL at every number of pairs",
    lambda found: joined({name: _judge_pairs(values) for name, values in found.items()}),
    plot=lambda found, path: plots.lines(found, path, ylabel="%"),
)
FA3 = Entry(
    "FA3",
    "How many unpaired rows: classification and both directions",
    "unpaired rows at the usual pairs",
    PICTURES,
    ("main",),
    lambda lab: [_unpaired(lab, name, metric) for name, metric in METRICS.items()],
    "more unpaired rows help",
    lambda found: joined({name: _judge_unpaired(values) for name, values in found.items()}),
    plot=lambda found, path: plots.lines(found, path, ylabel="%"),
)


# --- A3: teacher noise -------------------------------------------------------------------------


def _teacher_noise(lab: Lab) -> list[Grid]:
    columns = {
        f"p={p}": Column(MEAN, {"teacher.noise": p}, f"p={p}") for p in lab.scale.teacher_noise
    }
    columns["SAIL"] = Column(MEAN, SAIL, "SAIL")
    rows = {"SOTAlign": Row({}, "SOTAlign")}
    return [Grid("", "MeanR@1", rows, columns, lab.scale.seeds, "A3_teacher_noise")]


def _judge_noise(found: Found) -> Verdict:
    values = found[""]
    *_, worst, sail = values.grid.columns
    gap = difference(values.at("SOTAlign", worst), values.at("SOTAlign", sail))
    return all_above({f"{worst} - SAIL": gap})


A3 = Entry(
    "A3",
    "Noise in the teacher's pairs",
    "the share of mismatched pairs that the teacher is fitted on",
    PICTURES,
    ("main",),
    _teacher_noise,
    "with half of the teacher's pairs mismatched, SOTAlign is still above SAIL",
    _judge_noise,
    paper="A3_teacher_noise",
)


# --- FA4: alpha --------------------------------------------------------------------------------


def _alpha(lab: Lab) -> list[Grid]:
    columns = {f"{a:g}": Column(MEAN, {"sotalign.alpha": a}) for a in lab.scale.alphas}
    seeds = lab.scale.grid_seeds
    pairs = {f"{n} pairs": Row({"data.n_pairs": n}) for n in lab.scale.alpha_pairs}
    noise = {f"p={p:g}": Row({"data.pool_noise": p}) for p in lab.scale.pool_noise}
    return [
        Grid("pairs", "pairs", pairs, columns, seeds),
        Grid("noise", "share of noise", noise, columns, seeds),
    ]


def best_column(values: Values, row: str) -> tuple[str, float] | None:
    """The column of the largest mean in a row."""
    means = {c: m for c in values.grid.columns if (m := values.mean(row, c)) is not None}
    return max(means.items(), key=lambda item: item[1]) if means else None


def _judge_alpha(found: Found) -> Verdict:
    best = {row: best_column(found["pairs"], row) for row in found["pairs"].grid.rows}
    noisy = {row: best_column(found["noise"], row) for row in found["noise"].grid.rows}
    if None in best.values() or None in noisy.values():
        return Verdict(None, "runs are missing")
    falls = [float(b[0]) for b in best.values() if b]
    steady = [b[0] for b in noisy.values() if b][:-1]
    text = ", ".join(f"{row}: {b[0]}" for row, b in best.items() if b)
    noise = ", ".join(f"{row}: {b[0]}" for row, b in noisy.items() if b)
    return joined(
        {
            "falling with pairs": Verdict(falls == sorted(falls, reverse=True), text),
            "steady below p=1": Verdict(len(set(steady)) == 1, noise),
        }
    )


def _alpha_lines(found: Found, path: pathlib.Path) -> None:
    plots.lines(found, path, ylabel="MeanR@1 (%)", transpose=True, xlabel="alpha")


FA4 = Entry(
    "FA4",
    "The weight of KLOT",
    "alpha at several numbers of pairs, and with noise in the pools",
    PICTURES,
    ("main",),
    _alpha,
    "the best alpha falls with more pairs, and noise moves it only when the pools are all noise",
    _judge_alpha,
    plot=_alpha_lines,
)


# --- FA5: epsilons -----------------------------------------------------------------------------


def _weighted(lab: Lab) -> dict[str, float]:
    """The paper varies its epsilons at a larger alpha than its usual one."""
    return {"sotalign.alpha": 1e-3} if lab.scale.name == "paper" else {}


def _epsilon_grid(lab: Lab, pairs: int) -> Grid:
    values, usual = lab.scale.epsilons, {"data.n_pairs": pairs, **_weighted(lab)}
    rows = {f"ε={e:g}": Row({**usual, "sotalign.epsilon": e}) for e in values}
    columns = {f"ε*={e:g}": Column(MEAN, {"sotalign.epsilon_star": e}) for e in values}
    return Grid(f"{pairs} pairs", "MeanR@1", rows, columns, lab.scale.grid_seeds)


def _ratios(lab: Lab) -> Grid:
    """The usual epsilon against several of the teacher's, at both numbers of pairs."""
    rows = {f"ε*={e:g}": Row({"sotalign.epsilon_star": e}) for e in lab.scale.epsilons}
    usual = {"sotalign.epsilon": 0.05, **_weighted(lab)}
    columns = {
        f"{n} pairs": Column(MEAN, {"data.n_pairs": n, **usual}) for n in lab.scale.epsilon_pairs
    }
    return Grid("ε=0.05", "MeanR@1", rows, columns, lab.scale.grid_seeds)


def _epsilons(lab: Lab) -> list[Grid]:
    return [*(_epsilon_grid(lab, n) for n in lab.scale.epsilon_pairs), _ratios(lab)]


def _judge_epsilons(found: Found) -> Verdict:
    verdicts = {}
    for name, values in list(found.items())[:-1]:
        places = {
            (row, column): mean
            for row in values.grid.rows
            for column in values.grid.columns
            if (mean := values.mean(row, column)) is not None
        }
        if not places:
            return Verdict(None, "runs are missing")
        (row, column), mean = max(places.items(), key=lambda item: item[1])
        smaller = float(column.split("=")[1]) < float(row.split("=")[1])
        verdicts[name] = Verdict(smaller, f"best {mean:.1f} at {row}, {column}")
    return joined(verdicts)


FA5 = Entry(
    "FA5",
    "The regularisation of both plans",
    "ε of the student's plan and ε* of the teacher's, at two numbers of pairs",
    PICTURES,
    ("main",),
    _epsilons,
    "the best ε* is smaller than ε, at every number of pairs",
    _judge_epsilons,
    plot=plots.heat_maps,
)
