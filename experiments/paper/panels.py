"""Panels of our numbers beside the paper's, and the rules that judge its claims.

A claim that one number is above another is judged by paired differences over seeds. It held if
every difference is positive by more than its standard error. It did not hold if one of them is
negative by more than its standard error. Otherwise it is undecided. The paper's own difference is
shown beside ours.
"""

import dataclasses
import functools
import itertools
import json
import math
import pathlib
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.paper.sizes import Settings
from experiments.paper.sources import FAR, NEAR, nearness
from sotalign_jax import diagnostics

WORDS = {True: "held", False: "did not hold", None: "undecided"}
Place = tuple[str, str]
"""A row and a column."""
Claims = Mapping[str, tuple[Place, Place]]
"""Pairs of places by label. The first place is claimed to have the larger number."""


@functools.cache
def paper_results() -> dict[str, dict[str, dict[str, float]]]:
    """Returns every table of the paper: numbers by key, row and column.

    >>> paper_results()["T1_divergence_x_teacher"]["KLOT"]["CCA"]
    30.3
    """
    tables = json.loads(pathlib.Path(__file__).with_name("results.json").read_text("utf-8"))
    return {
        key: {row: dict(zip(t["cols"], v, strict=True)) for row, v in t["rows"].items()}
        for key, t in tables.items()
    }


@dataclasses.dataclass(frozen=True)
class Panel:
    """A grid of runs, and their numbers.

    A place is run with the settings of its column and its row. If the metric of a column is None,
    the sources do not have its data, and only the paper's number is shown.
    """

    name: str  # unique within a table
    corner: str  # header of the column of row labels
    rows: Mapping[str, Settings]  # by label
    columns: Mapping[str, Settings]  # by label, with the metric
    seeds: Sequence[int]
    claims: Claims = dataclasses.field(default_factory=dict)
    tuned: Claims = dataclasses.field(default_factory=dict)  # the same of the tuned teacher
    named: Mapping[str, str] = dataclasses.field(default_factory=dict)  # the paper's labels by ours
    form: str = ".1f"  # format of a number
    paper: str | None = None  # key of the paper's table
    # By place: one specification per seed, and their numbers, NaN for a failed run. Then the
    # messages of failed runs.
    specs: Mapping[Place, Sequence[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    found: Mapping[Place, np.ndarray] = dataclasses.field(default_factory=dict)
    # Pairs per input dimension by row, if the rows are numbers of pairs.
    shares: Mapping[str, str] = dataclasses.field(default_factory=dict)
    failures: tuple[str, ...] = ()

    def places(self) -> dict[Place, dict[str, Any]]:
        """Returns the settings of all places that can be run."""
        both = itertools.product(self.rows.items(), self.columns.items())
        return {(row, column): {**c, **r} for (row, r), (column, c) in both if c["metric"]}

    def cells(self) -> list[tuple[Place, dict[str, Any], str]]:
        """Returns place, specification and metric of all cells."""
        metrics = {place: settings["metric"] for place, settings in self.places().items()}
        return [(p, spec, metrics[p]) for p, specs in self.specs.items() for spec in specs]

    def at(self, row: str, column: str) -> np.ndarray:
        """Returns the values at a place, without failed seeds."""
        values = self.found.get((row, column), np.empty(0))
        return values[np.isfinite(values)]

    def mean(self, row: str, column: str) -> float:
        """Returns the mean over seeds, or NaN if there is no value."""
        values = self.at(row, column)
        return diagnostics.Mean(values.tolist()) if len(values) else np.nan

    def spread(self, row: str, column: str) -> float:
        """Returns the sample standard deviation over seeds, or 0 for a single seed."""
        return getattr(self.mean(row, column), "spread", None) or 0.0

    def means(self) -> np.ndarray:
        """Returns the means, shape [rows, columns], NaN where a value is missing."""
        return np.array([[self.mean(row, column) for column in self.columns] for row in self.rows])

    @property
    def complete(self) -> bool:
        """True if all places have values of all seeds."""
        return all(len(self.at(*place)) == len(self.seeds) for place in self.places())

    def papers(self, row: str, column: str) -> float | None:
        """Returns the paper's number at a place, or None."""
        row, column = (self.named.get(label, label) for label in (row, column))
        return paper_results().get(self.paper or "", {}).get(row, {}).get(column)

    def known(self) -> "Panel":
        """Returns the panel without rows and columns that have no number, ours or the paper's."""
        both = list(itertools.product(self.rows, self.columns))
        some = [at for at in both if len(self.at(*at)) or self.papers(*at) is not None]
        rows = {row: self.rows[row] for row, _ in some}
        return dataclasses.replace(self, rows=rows, columns={c: self.columns[c] for _, c in some})

    def baseline(self, row: str, column: str) -> Place | None:
        """Returns the place of SAIL with the same data, or None if there is no other such place."""
        metrics = {label: settings["metric"] for label, settings in self.columns.items()}
        if not any(score in (metrics[column] or "R@") for score in ("R@", "top1")):
            return None
        found = [(row, "SAIL")] if "SAIL" in self.columns else []
        names = ("SAIL", f"{row.rpartition('/')[0]}/SAIL")
        found += [(name, column) for name in names if name in self.rows]
        # Columns such as distances have another metric and cannot be compared.
        same = [at for at in found if metrics[at[1]] == metrics[column]]
        return same[0] if same and same[0] != (row, column) else None

    def gap(self, high: Place, low: Place) -> "Gap | None":
        """Returns the difference of two places, or None if a value is missing."""
        ours = [self.found.get(place, np.empty(0)) for place in (high, low)]
        above, below = (self.papers(*place) for place in (high, low))
        paper = None if above is None or below is None else above - below
        made = gap(*ours, paper=paper)
        if made is None or low != self.baseline(*high):
            return made
        share = None if paper is None or not below else paper / below
        base = self.mean(*low)
        return made._replace(relative=made.mean / base if base else None, paper_relative=share)


class Gap(NamedTuple):
    """Difference of two places.

    Attributes:
        mean: Mean of the paired differences over seeds.
        error: Standard error of the mean, or 0 for a single seed.
        paper: The paper's difference, or None.
        relative: The mean relative to SAIL, or None for other differences.
        paper_relative: The paper's difference relative to SAIL, or None.
    """

    mean: float
    error: float
    paper: float | None = None
    relative: float | None = None
    paper_relative: float | None = None

    @property
    def held(self) -> bool | None:
        """True if the difference is positive, None if it is within its standard error."""
        return None if abs(self.mean) <= self.error else self.mean > 0

    def __str__(self) -> str:
        spread = f" ± {self.error:.1f}" if self.error else ""
        ours = f"{self.mean:+.1f}{spread}{percent(self.relative, before=', ')}"
        return ours + _paper(self.paper, self.paper_relative)


def gap(high: np.ndarray, low: np.ndarray, *, paper: float | None = None) -> Gap | None:
    """Returns the difference of values, paired by seed.

    Args:
        high: Values by seed, NaN if missing.
        low: Values of the same seeds.
        paper: The paper's difference.

    Returns:
        The difference, or None if a value is missing.

    >>> print(gap(np.array([3.0, 5.0]), np.array([1.0, 2.0]), paper=4.0))
    +2.5 ± 0.5 (paper +4.0)
    """
    if not len(high) == len(low) > 0 or not np.isfinite(high - low).all():
        return None
    gaps = high - low
    error = float(gaps.std(ddof=1) / np.sqrt(len(gaps))) if len(gaps) > 1 else 0.0
    return Gap(float(gaps.mean()), error, paper)


def percent(share: float | None, *, before: str = "") -> str:
    """Returns a relative gain as text such as "+28 %", or nothing for None.

    Args:
        share: Gain relative to SAIL.
        before: Text to put before it.
    """
    if share is None:
        return ""
    rounded = round(100 * share)
    return f"{before}{rounded:+d} %" if rounded else f"{before}0 %"


def _paper(value: float | None, relative: float | None = None) -> str:
    return "" if value is None else f" (paper {value:+.1f}{percent(relative, before=', ')})"


class Verdict(NamedTuple):
    """Judgement on a claim.

    Attributes:
        held: True if the claim held, None if it is undecided.
        text: The reason, in one line.
        parts: Verdicts on the parts of the claim, by name.
    """

    held: bool | None
    text: str
    parts: Mapping[str, "Verdict"] = types.MappingProxyType({})


def _all(parts: Iterable[bool | None]) -> bool | None:
    """Combines verdicts: False if one is False, otherwise None if one is None."""
    parts = list(parts)
    return False if False in parts else None if None in parts else True


def all_above(gaps: Mapping[str, Gap | None]) -> Verdict:
    """Judges the claim that all differences are positive.

    Args:
        gaps: Differences by label, None if one is missing.

    Returns:
        The verdict. Its text lists the differences that are not as claimed.

    >>> print(all_above({"KLOT - CKA": Gap(2.0, 0.1), "CKA - none": Gap(0.1, 0.3)}).text)
    1 of 2 differences are as claimed, not CKA - none: +0.1 ± 0.3
    """
    if not gaps:
        return Verdict(None, "nothing to compare")
    known = {name: gap for name, gap in gaps.items() if gap is not None}
    held = {name: gap.held for name, gap in known.items()}
    # Differences that contradict the claim come first, then those within their error. The largest
    # of them is the first.
    failed = [name for name in held if not held[name]]
    order = sorted(failed, key=lambda name: (held[name] is None, known[name].mean))
    text = f"{len(held) - len(order)} of {len(gaps)} differences are as claimed"
    if missing := len(gaps) - len(held):
        text += f", {missing} were not computed"
    if order:
        rest = f"; and {len(order) - 6} more" if len(order) > 6 else ""
        text += f", not {'; '.join(f'{name}: {gaps[name]}' for name in order[:6])}{rest}"
    return Verdict(_all([*held.values(), *([None] * missing)]), text)


def joined(parts: Mapping[str, Verdict]) -> Verdict:
    """Combines the verdicts on the parts of a claim, all of which must hold."""
    text = "; ".join(f"{name}: {v.text}" for name, v in parts.items())
    return Verdict(_all(v.held for v in parts.values()), text, parts)


# --- rules: functions that judge claims ----------------------------------------------------------

CLOSED = "closed form (ours)"


def above(*panels: Panel, no_evidence: Collection[Place] = ()) -> Verdict:
    """Judges the claims of panels.

    Args:
        *panels: Panels with claims.
        no_evidence: Places at chance. Being above them is no evidence, so these claims are left
            out.

    Returns:
        The verdict.
    """
    parts = {}
    for panel in panels:
        can, claims = panel.places(), panel.claims.items()
        chosen = {n: p for n, p in claims if p[0] in can and p[1] not in no_evidence}
        parts[panel.name] = all_above({name: panel.gap(*at) for name, at in chosen.items()})
    # A panel without claims is shown only.
    judged = {panel.name: parts[panel.name] for panel in panels if panel.claims} or parts
    return joined(judged) if len(judged) > 1 else next(iter(judged.values()))


def correlated(panel: Panel, *, sign: int, paper: float | None = None) -> Verdict:
    """Judges the claim that the two columns of a panel correlate, by Pearson's r.

    The claim held if p < 0.05 in a one-sided test. It did not hold if r has the other sign.

    Args:
        panel: Panel with two columns.
        sign: Claimed sign of the correlation.
        paper: The paper's r.

    Returns:
        The verdict.
    """
    from scipy import stats

    x, y = panel.means().T
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return Verdict(None, f"{len(x)} points are too few")
    r, p = stats.pearsonr(x, y, alternative="greater" if sign > 0 else "less")
    beside = "" if paper is None else f" (paper r = {paper:.2f})"
    text = f"Pearson r = {r:.2f} over {len(x)} points, p = {p:.1g}{beside}"
    held = False if sign * r <= 0 else True if p < 0.05 else None
    return Verdict(held, text)


def best_rows(*panels: Panel) -> Verdict:
    """Names the best row of each column, or of each method if rows are "METHOD: TRIAL"."""
    parts = []
    for panel, column in ((p, c) for p in panels for c in p.columns):
        known = [row for row in panel.rows if len(panel.at(row, column))]
        ordered = sorted(known, key=lambda row: panel.mean(row, column))
        best = {row.rpartition(": ")[0]: row for row in ordered}
        if len(known) > 1:
            parts.append(f"{panel.name}, {column}: {', '.join(best.values())}")
    return Verdict(None, "best at " + "; ".join(parts) if parts else "runs are missing")


def as_diagnosed(panel: Panel) -> Verdict:
    """Lists SOTAlign's lead over SAIL by the distance of the pools, as `diagnose` classifies it."""
    gains: dict[str, list[float]] = {nearness(share): [] for share in (0.0, NEAR, FAR)}
    for row in panel.rows:
        images, texts, sail, ours = (panel.mean(row, column) for column in panel.columns)
        gains[nearness(max(images, texts) / 100)].append(ours - sail)
    shown = {word: ", ".join(f"{gain:+.1f}" for gain in found) for word, found in gains.items()}
    parts = [f"{word}: SOTAlign - SAIL {found}" for word, found in shown.items()]
    return Verdict(None, "; ".join(parts))


def above_if_any_learns(panel: Panel) -> Verdict:
    """Judges the claims, without columns where no method reaches three times chance."""
    useless = []
    for name, settings in panel.columns.items():
        means = [panel.mean(row, name) for row in panel.rows if len(panel.at(row, name))]
        if means and max(means) <= 300 / settings.get("classes", math.inf):
            useless.append(name)
    verdict = above(panel, no_evidence=[*itertools.product(panel.rows, useless)])
    note = f"; near chance for every method: {', '.join(useless)}" if useless else ""
    return verdict._replace(text=verdict.text + note)


def above_if_it_learns(panel: Panel) -> Verdict:
    """Judges the claims, without baselines that are at chance because they collapsed."""
    # Chance is R@5 among the 400 test rows of SUE's protocol.
    peers = itertools.product(list(panel.rows)[:3], panel.columns)
    useless = [at for at in peers if panel.mean(*at) <= 1.5 * 100 * 5 / 400]
    verdict = above(panel, no_evidence=useless)
    listed = ", ".join(f"{peer} ({column})" for peer, column in useless)
    note = f"; at chance, and so no evidence: {listed}" if useless else ""
    return verdict._replace(text=verdict.text + note)


def takes_more(panel: Panel, other: str, what: str) -> Verdict:
    """Judges the claim that another gradient costs more than the closed form at every epsilon.

    Args:
        panel: Costs, with a row per epsilon and a column per way to compute the gradient.
        other: Column to compare with the closed form.
        what: Name of the cost, such as "memory".

    Returns:
        The verdict.
    """
    ours, theirs = (
        np.array([panel.mean(row, way) for row in panel.rows]) for way in (CLOSED, other)
    )
    ratios = (theirs / ours)[(theirs > 0) & (ours > 0)]
    if not len(ratios):
        return Verdict(None, f"{other} could not be measured")
    size = f"{min(ratios):.1f} to {max(ratios):.1f} times the {what}"
    text = f"{other} takes {size} of the closed form"
    if absent := len(panel.rows) - len(ratios):
        text += f", and does not get there at {absent} of {len(panel.rows)} epsilons"
    held = False if min(ratios) <= 1 else True if np.isfinite(ours).all() else None
    return Verdict(held, text)


def less_memory_and_time(memory: Panel, time: Panel, iterations: Panel) -> Verdict:
    """Judges the memory of the closed form against unrolling, and its time against ott-jax.

    Args:
        memory: Panel of memory.
        time: Panel of seconds.
        iterations: Panel of iterations, which is shown but not judged.

    Returns:
        The verdict.
    """
    parts = {"memory": takes_more(memory, "unrolled", "memory")}
    return joined({**parts, "time": takes_more(time, "implicit (ott-jax)", "time")})


def worse_at_every_step(panel: Panel) -> Verdict:
    """Judges the claim that the first column grows from row to row."""
    errors = panel.means()[:, 0]
    listed = ", ".join(f"{e:.1e} at {row}" for e, row in zip(errors, panel.rows, strict=True))
    seen = np.maximum(errors, 1e-6)  # smaller differences are rounding
    return Verdict(bool((np.diff(seen) >= 0).all() and seen[-1] > seen[0]), listed)


def fading(panel: Panel) -> Verdict:
    """Judges the claim that the gain over SAIL is smaller with the most pairs than at its best."""
    places = itertools.product(panel.rows, ("SOTAlign", "SAIL"))
    if any(len(panel.at(*at)) < len(panel.seeds) for at in places):
        return Verdict(None, "runs are missing")
    gains = {row: panel.found[row, "SOTAlign"] - panel.found[row, "SAIL"] for row in panel.rows}
    *fewer, most = gains.values()
    fall = gap(max(fewer, key=np.mean), most)
    listed = ", ".join(f"{gain.mean():+.1f} at {row}" for row, gain in gains.items())
    return Verdict(fall.held if fall else None, f"gains {listed}")


def pairs_and_unpaired(pairs: Panel, unpaired: Panel) -> Verdict:
    """Judges the claims on the numbers of pairs and of unpaired rows.

    Args:
        pairs: Scores by number of pairs. The gain over SAIL is claimed to fade with more pairs.
        unpaired: Scores by number of unpaired rows.

    Returns:
        The verdict.
    """
    parts = {"above SAIL": above(pairs), "fading gain": fading(pairs)}
    return joined({**parts, "more unpaired rows": above(unpaired)})


def best_alphas(*panels: Panel) -> Verdict:
    """Judges the claims that the best alpha falls with more pairs, and moves with noise only."""
    best = [[float(list(p.columns)[i]) for i in p.means().argmax(1)] for p in panels]
    held = best[0] == sorted(best[0], reverse=True), len(set(best[1][:-1])) == 1
    claims = "falling with pairs", "moved by noise alone"
    parts = {}
    for claim, as_claimed, panel, alphas in zip(claims, held, panels, best, strict=True):
        listed = ", ".join(f"{r}: {a:g}" for r, a in zip(panel.rows, alphas, strict=True))
        # If the best alpha is the same everywhere, the claim cannot be decided.
        parts[claim] = Verdict(as_claimed if len(set(alphas)) > 1 else None, f"best at {listed}")
    return joined(parts)


def smaller_star(*panels: Panel) -> Verdict:
    """Judges the claim that epsilon* (columns) is below epsilon (rows) at the best place."""
    parts = {}
    for panel in panels[:-1]:
        means = panel.means()
        i, j = np.unravel_index(means.argmax(), means.shape)
        row, column = list(panel.rows)[i], list(panel.columns)[j]
        smaller = float(column.split("=")[1]) < float(row.split("=")[1])
        parts[panel.name] = Verdict(smaller, f"best {means.max():.1f} at {row}, {column}")
    return joined(parts)


def noise_is_furthest(*panels: Panel) -> Verdict:
    """Judges the claim that noise, the last column, is farthest from every other set."""
    closer = [max(row[:-1]) < row[-1] for panel in panels for row in panel.means()[:-1]]
    return Verdict(all(closer), f"noise is farthest from {sum(closer)} of {len(closer)} sets")
