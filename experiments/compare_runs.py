"""Results of several runs side by side: a table and a plot."""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from experiments.settings import Settings
from sotalign_jax import tables

COLUMNS = {
    "R@1": "test/mean/R@1",
    "R@5": "test/mean/R@5",
    "R@10": "test/mean/R@10",
    "x→y R@1": "test/x_to_y/R@1",
    "y→x R@1": "test/y_to_x/R@1",
    "zero-shot": "test/zero_shot/top1",
    "val R@1": "val/mean/R@1",
}
Results = dict[str, list[dict[str, float]]]
"""Results of every seed, by method."""


def report(
    runs: Sequence[Settings], results: Mapping[str, dict[str, float]], workdir: pathlib.Path
) -> str:
    """Writes comparison.md, .csv and .png for results in the order of `runs`; returns the text."""
    grouped: Results = {}
    for run, result in zip(runs, results.values(), strict=True):
        grouped.setdefault(run.method, []).append(result)
    table = comparison_table(grouped)
    table.save(workdir / "comparison")
    comparison_plot(grouped, workdir / "comparison.png")
    return f"\n{table}\n\nResults, models and the comparison are in {workdir}"


def comparison_table(results: Results) -> tables.Table:
    """Mean over seeds of the main metrics, with the standard deviation when there are several."""
    present = {
        header: key
        for header, key in COLUMNS.items()
        if all(key in seed for seeds in results.values() for seed in seeds)
    }
    several = any(len(seeds) > 1 for seeds in results.values())
    headers, rows = ["method"], []
    for header in present:
        headers += [header, "±"] if several else [header]
    for method, seeds in results.items():
        row: list[str | float] = [method]
        for key in present.values():
            values = np.array([seed[key] for seed in seeds])
            row += [values.mean(), float(_spread(values))] if several else [values.mean()]
        rows.append(row)
    return tables.table(headers, rows, best=dict.fromkeys(present, "max"))


def _spread(values: np.ndarray) -> np.ndarray:
    """Standard deviation over seeds (of the sample)."""
    return values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros_like(values[0])


def comparison_plot(results: Results, path: pathlib.Path) -> None:
    """Bars of mean R@1, R@5 and R@10; whiskers show the spread over seeds.

    On the test split, on validation when there is no test split, and no plot without either.
    """
    scored = [seed for seeds in results.values() for seed in seeds]
    splits = [name for name in ("test", "val") if all(f"{name}/mean/R@1" in s for s in scored)]
    if not splits:
        return
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    keys = {name: f"{splits[0]}/mean/{name}" for name in ("R@1", "R@5", "R@10")}
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    width = 0.8 / len(results)
    for index, (method, seeds) in enumerate(results.items()):
        values = np.array([[seed[key] for key in keys.values()] for seed in seeds])
        places = np.arange(len(keys)) + (index - (len(results) - 1) / 2) * width
        spread = _spread(values)
        bars = axes.bar(places, values.mean(axis=0), width * 0.92, yerr=spread, label=method)
        axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=2)
    axes.set_xticks(np.arange(len(keys)), list(keys))
    axes.set_ylabel(f"{splits[0]}, mean of both directions (%)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
