"""Did a claim of the paper hold here? Verdicts from numbers, with the numbers in one line."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

WORDS = {True: "held", False: "did not hold", None: "undecided"}


class Verdict(NamedTuple):
    """Whether a claim held (None: undecided), and why in one line."""

    held: bool | None
    text: str

    def __str__(self) -> str:
        return f"{WORDS[self.held]}: {self.text}"


class Difference(NamedTuple):
    """Mean of paired differences over seeds, and its standard error (0 for one seed)."""

    mean: float
    error: float

    @property
    def sign(self) -> int:
        """1 or -1, and 0 when the difference is within its error."""
        return 0 if abs(self.mean) <= self.error else int(np.sign(self.mean))

    def __str__(self) -> str:
        spread = f" ± {self.error:.1f}" if self.error else ""
        return f"{self.mean:+.1f}{spread}"


def difference(larger: np.ndarray, smaller: np.ndarray) -> Difference | None:
    """Of values seed by seed; None when one is missing (NaN).

    >>> difference(np.array([3.0, 5.0]), np.array([1.0, 2.0]))
    Difference(mean=2.5, error=0.5)
    """
    if not len(larger) == len(smaller) > 0:
        return None
    gaps = larger - smaller
    if not np.isfinite(gaps).all():
        return None
    error = float(gaps.std(ddof=1) / np.sqrt(len(gaps))) if len(gaps) > 1 else 0.0
    return Difference(float(gaps.mean()), error)


def all_above(gaps: Mapping[str, Difference | None]) -> Verdict:
    """A claim that every difference is positive.

    It held when all are positive beyond their standard error, did not when one is negative beyond
    it, and is undecided when one is missing or too small to tell.

    >>> print(all_above({"KLOT - CKA": Difference(2.0, 0.1), "CKA - none": Difference(0.1, 0.3)}))
    undecided: 1 of 2 differences are as claimed; CKA - none +0.1 ± 0.3
    """
    if not gaps:
        return Verdict(None, "nothing to compare")
    signs = {name: None if gap is None else gap.sign for name, gap in gaps.items()}
    good = sum(sign == 1 for sign in signs.values())
    worth = {name for name, sign in signs.items() if sign != 1} or set(gaps)
    shown = [f"{n} {'missing' if g is None else g}" for n, g in gaps.items() if n in worth]
    listed = ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
    text = f"{good} of {len(gaps)} differences are as claimed; {listed}"
    if any(sign == -1 for sign in signs.values()):
        return Verdict(False, text)
    return Verdict(None if any(sign != 1 for sign in signs.values()) else True, text)


def correlated(x: np.ndarray, y: np.ndarray, *, sign: int, paper: float | None) -> Verdict:
    """A claim that two quantities correlate, positively (`sign` 1) or negatively (-1).

    Judged by Pearson's r: it held when chance alone gives such an r in less than one of 20 cases,
    and did not when r has the other sign.

    >>> print(correlated(np.arange(4.0), np.array([0.0, 2, 1, 3]), sign=1, paper=None))
    undecided: Pearson r = 0.80 over 4 points, p = 0.10
    """
    from scipy import stats

    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return Verdict(None, f"{len(x)} points are too few")
    r, p = stats.pearsonr(x, y, alternative="greater" if sign > 0 else "less")
    text = f"Pearson r = {r:.2f} over {len(x)} points, p = {p:.2f}"
    text += "" if paper is None else f" (paper: r = {paper:.2f})"
    return Verdict(False if sign * r <= 0 else True if p < 0.05 else None, text)


def joined(verdicts: Mapping[str, Verdict]) -> Verdict:
    """A claim of several parts: all must hold."""
    text = "; ".join(f"{name} {WORDS[v.held]} ({v.text})" for name, v in verdicts.items())
    held = [verdict.held for verdict in verdicts.values()]
    return Verdict(False if False in held else None if None in held else True, text)
