"""Selection of options on validation at the paper's scale.

The paper tries a grid for each method, on CC3M with its usual number of pairs, and selects the
point with the highest recall on CC3M's validation split. Every table then uses the selected
options, unless it varies them itself.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping

from experiments.paper.panels import Panel
from experiments.paper.runs import Setup, collect
from experiments.paper.sizes import Settings
from experiments.paper.table import panel
from experiments.store import Store

METRIC = "val/mean/R@1"


def trials(setup: Setup) -> dict[str, dict[str, Settings]]:
    """Returns the points of all grids, by method and label.

    Args:
        setup: Sizes with the grids. Only the paper's scale has some.
    """
    return {
        method: {
            ", ".join(f"{name} {value:g}" for name, value in zip(grid, values, strict=True)): {
                f"{method}.{name}": value for name, value in zip(grid, values, strict=True)
            }
            for values in itertools.product(*grid.values())
        }
        for method, grid in setup.sizes.grids.items()
    }


def panel_of_trials(setup: Setup, tuned: Collection[str] | None = None) -> Panel:
    """Returns the panel of trials, with a row "METHOD: POINT" for each.

    Args:
        setup: Sizes with the grids.
        tuned: Methods to try, all by default.
    """
    rows = {
        f"{method}: {label}": {"method": method, **point}
        for method, points in trials(setup).items()
        for label, point in points.items()
        if tuned is None or method in tuned
    }
    n = setup.sizes.n_pairs
    return panel(
        setup,
        name=f"{n:,} pairs",
        corner="trial",
        rows=rows,
        columns={"val R@1": {"metric": METRIC, "data.n_pairs": n}},
        seeds=setup.sizes.first_seed,
        form=".2f",
    )


def chosen(setup: Setup, filled: Panel) -> dict[str, Settings]:
    """Returns the best point of each method. A method without a finished trial is left out.

    Args:
        setup: Sizes with the grids.
        filled: The panel of all trials with its numbers.
    """
    best = {}
    for method, points in trials(setup).items():
        scores = {label: filled.mean(f"{method}: {label}", "val R@1") for label in points}
        known = {label: score for label, score in scores.items() if not math.isnan(score)}
        if known:
            best[method] = points[max(known, key=lambda label: known[label])]
    return best


def selected(setup: Setup, store: Store, failures: Mapping[str, str]) -> Setup:
    """Returns the setup with the options that finished trials select.

    Args:
        setup: Sizes with the grids.
        store: Results of the trials.
        failures: Error messages of failed trials, by key.
    """
    filled = collect(store, panel_of_trials(setup), failures)
    return dataclasses.replace(setup, chosen=chosen(setup, filled))
