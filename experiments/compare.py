"""Runs side by side: python -m experiments.compare --config=FILE.py[:ARG] --workdir=FOLDER.

experiments/configs/compare.py has every method; `compare.py:pairs=500+1000+2000,seeds=3` trains
each with three numbers of pairs over three seeds. Leaves comparison.md, .csv and .png beside the
runs. Interrupted, it goes on where it stopped when it is started again.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app

from experiments import batch, distributed, launch, run_flags, runner, settings
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
"""What is shown of every run."""
SEVERAL = ("R@1", "R@10", "zero-shot")
"""What is shown for every number of pairs when there are several."""
PANELS = ("mean/R@1", "mean/R@10", "zero_shot/top1")
"""What is plotted."""

Results = dict[str, dict[int, list[runner.Results]]]
"""Results of every seed, by method and number of pairs; those of failed runs are missing."""


def run(values: dict[str, Any], workdir: pathlib.Path) -> None:
    """Makes the runs that a config's plain values ask for, and reports on them."""
    runs = settings.plan(values)
    config = settings.without_placement(values)
    conclude(runs, batch.execute_all(runs, workdir, config=config), workdir)


def conclude(
    runs: Sequence[Settings], ended: Mapping[str, batch.Outcome], workdir: pathlib.Path
) -> None:
    """Prints the report.

    Raises:
        FloatingPointError: runs failed; the others are in the report.
    """
    if distributed.is_first():
        print(report(runs, list(ended.values()), workdir))
    failed = [f"{name}: {outcome.error}" for name, outcome in ended.items() if outcome.error]
    if failed:
        raise FloatingPointError(f"{len(failed)} of {len(ended)} runs failed, first {failed[0]}")


def report(runs: Sequence[Settings], ended: Sequence[batch.Outcome], workdir: pathlib.Path) -> str:
    """Writes comparison.md, .csv and .png for the runs; returns the text."""
    results = grouped(runs, ended)
    table = comparison_table(results)
    table.save(workdir / "comparison")
    comparison_plot(results, workdir / "comparison.png")
    return f"\n{table}\n\nResults, models and the comparison are in {workdir}"


def grouped(runs: Sequence[Settings], ended: Sequence[batch.Outcome]) -> Results:
    """Results by method and number of pairs, in the order of the runs."""
    results: Results = {}
    for one, outcome in zip(runs, ended, strict=True):
        seeds = results.setdefault(one.name, {}).setdefault(one.data.n_pairs, [])
        if outcome.error is None:
            seeds.append(outcome.results)
    return results


def comparison_table(results: Results) -> tables.Table:
    """Mean and standard deviation over seeds; a group of columns for every number of pairs."""
    budgets = _budgets(results)
    present = [header for header, key in COLUMNS.items() if _has(results, key)]
    if len(budgets) > 1:
        present = [header for header in present if header in SEVERAL] or present[:1]
    columns = {
        header if len(budgets) == 1 else f"{n_pairs}: {header}": (n_pairs, COLUMNS[header])
        for n_pairs in budgets
        for header in present
    }
    rows = [
        [name, *(_mean(of_pairs.get(n_pairs, []), key) for n_pairs, key in columns.values())]
        for name, of_pairs in results.items()
    ]
    return tables.table(["method", *columns], rows, best=dict.fromkeys(columns, "max"))


def comparison_plot(results: Results, path: pathlib.Path) -> None:
    """Bars of R@1, R@10 and zero-shot accuracy, best on top; whiskers show the spread over seeds.

    On the test split, on validation when there is no test split, and no plot without either.
    """
    splits = [name for name in ("test", "val") if _has(results, f"{name}/{PANELS[0]}")]
    if not splits:
        return
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    budgets = _budgets(results)
    several = len(budgets) > 1
    keys = [key for panel in PANELS if _has(results, key := f"{splits[0]}/{panel}")]

    def score(name: str) -> float:
        means = [_mean(results[name].get(n_pairs, []), keys[0]) for n_pairs in budgets]
        return sum(mean or 0.0 for mean in means)

    names = sorted(results, key=score)  # the first bar is drawn at the bottom
    height = 1.2 + 0.18 * len(names) * (len(budgets) + 0.6)
    figure, _ = plt.subplots(
        1, len(keys), figsize=(2 + 3 * len(keys), height), sharey=True, layout="constrained"
    )
    shades = plt.get_cmap("viridis")
    thickness = 0.8 / len(budgets)
    for axes, key in zip(figure.axes, keys, strict=True):
        for index, n_pairs in enumerate(budgets):
            means = [_mean(results[name].get(n_pairs, []), key) for name in names]
            places = [place + 0.4 - thickness * (index + 0.5) for place, _ in enumerate(names)]
            bars = axes.barh(
                places,
                [mean or 0.0 for mean in means],
                thickness * 0.9,
                xerr=[(mean and mean.spread) or 0.0 for mean in means],
                error_kw={"elinewidth": 1, "capsize": 2},
                color=shades(0.25 + 0.5 * index / max(len(budgets) - 1, 1)),
                label=f"{n_pairs:,} pairs",
            )
            texts = ["failed" if mean is None else f"{float(mean):.1f}" for mean in means]
            axes.bar_label(bars, texts, fontsize=7, padding=3)
        axes.set_title(_TITLES[key.partition("/")[2]], fontsize=10)
        axes.set_xlabel(f"{splits[0]} (%)" if several else f"{splits[0]} (%), {budgets[0]:,} pairs")
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_yticks(range(len(names)), names)
    figure.axes[0].set_ylim(-0.6, len(names) - 0.4)
    if several:
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=len(budgets),
            frameon=False,
        )
    figure.savefig(path, dpi=150)
    plt.close(figure)


_TITLES = dict(zip(PANELS, ("R@1, both ways", "R@10, both ways", "zero-shot top-1"), strict=True))


def _budgets(results: Results) -> list[int]:
    return sorted({n_pairs for of_pairs in results.values() for n_pairs in of_pairs})


def _has(results: Results, key: str) -> bool:
    """Whether all runs that did not fail, and at least one, have this metric."""
    runs = [run for of_pairs in results.values() for seeds in of_pairs.values() for run in seeds]
    return bool(runs) and all(key in run for run in runs)


def _mean(seeds: Sequence[Mapping[str, float]], key: str) -> tables.Mean | None:
    """Over the seeds; None when all of them failed."""
    return tables.Mean([seed[key] for seed in seeds]) if seeds else None


def _run() -> None:
    run(settings.plain(run_flags.config()), run_flags.workdir())


main = launch.guarded(_run, interrupted="start again with the same --workdir to go on")

if __name__ == "__main__":
    app.run(main, flags_parser=launch.parse)
