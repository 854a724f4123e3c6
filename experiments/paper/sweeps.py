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
    usual = {**SAIL, "data.n_unpaired": lab.run({}, 0).data.n_unpaired}
    columns = {"SAIL": Column(metric, usual), "SOTAlign": Column(metric)}
    return Grid(name, "unpaired", rows, columns, lab.scale.seeds)


def _judge_pairs(values: Values) -> Verdict:
    return all_above(column_gaps(values, "SOTAlign", "SAIL"))


def _judge_fading(values: Values) -> Verdict:
    """Claim: the gain over SAIL is smaller with the most pairs than at its best."""
    if not values.complete:
        return Verdict(None, "runs are missing")
    gains = {row: values.at(row, "SOTAlign") - values.at(row, "SAIL") for row in values.grid.rows}
    listed = ", ".join(f"{gain.mean():+.1f} at {row}" for row, gain in gains.items())
    *fewer, most = gains.values()
    fall = difference(max(fewer, key=np.mean), most)
    return Verdict(_HOLDS[fall.sign] if fall else None, f"gains {listed}")


_HOLDS = {1: True, 0: None, -1: False}
"""Whether a difference is as claimed, by its sign."""


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


def best_columns(values: Values) -> dict[str, str]:
    """The column of the largest mean in each row."""
    columns = list(values.grid.columns)
    means = np.array([values.column(column) for column in columns])
    return {row: columns[best] for row, best in zip(values.grid.rows, means.argmax(0), strict=True)}


def _judge_alpha(found: Found) -> Verdict:
    if not all(values.complete for values in found.values()):
        return Verdict(None, "runs are missing")
    texts, alphas = {}, {}
    for name, values in found.items():
        best = best_columns(values)
        texts[name] = ", ".join(f"{row}: {column}" for row, column in best.items())
        alphas[name] = [float(column) for column in best.values()]
    falls = alphas["pairs"] == sorted(alphas["pairs"], reverse=True)
    steady = len(set(alphas["noise"][:-1])) == 1
    # An alpha that never moves says nothing of when it would.
    moves = {name: len(set(found)) > 1 for name, found in alphas.items()}
    return joined(
        {
            "falling with pairs": Verdict(
                falls if moves["pairs"] else None, f"best at {texts['pairs']}"
            ),
            "moved by noise alone": Verdict(
                steady if moves["noise"] else None, f"best at {texts['noise']}"
            ),
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
    """The usual epsilon against several of the teacher's, at more numbers of pairs."""
    rows = {f"ε*={e:g}": Row({"sotalign.epsilon_star": e}) for e in lab.scale.epsilons}
    usual = {"sotalign.epsilon": 0.05, **_weighted(lab)}
    columns = {
        f"{n} pairs": Column(MEAN, {"data.n_pairs": n, **usual}) for n in lab.scale.alpha_pairs
    }
    return Grid("ε=0.05", "MeanR@1", rows, columns, lab.scale.grid_seeds)


def _epsilons(lab: Lab) -> list[Grid]:
    return [*(_epsilon_grid(lab, n) for n in lab.scale.epsilon_pairs), _ratios(lab)]


def _judge_epsilons(found: Found) -> Verdict:
    if not all(values.complete for values in found.values()):
        return Verdict(None, "runs are missing")
    verdicts = {}
    for name, values in list(found.items())[:-1]:
        places = {
            (row, column): float(values.at(row, column).mean())
            for row in values.grid.rows
            for column in values.grid.columns
        }
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
