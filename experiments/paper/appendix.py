"""Tables and figures of the paper's appendix. Each function returns one of them."""

import functools
from collections.abc import Sequence

from experiments.paper import panels as rules
from experiments.paper import plots, shared
from experiments.paper.main_text import POOLS, gradient_panel
from experiments.paper.panels import Panel
from experiments.paper.runs import Setup
from experiments.paper.sizes import CUTS, Settings
from experiments.paper.sources import MAIN
from experiments.paper.table import PaperTable, last_above_first, panel


def a1(setup: Setup) -> PaperTable:
    paper = "A1_unpaired_source"
    columns = {**shared.retrieval(), "MeanR@1": shared.MEAN_RECALL}
    panels = []
    for name, method in {"": shared.SOTALIGN, "tuned CCA": shared.TUNED_SOTALIGN}.items():
        made = panel(
            setup,
            name=name,
            corner="images|texts",
            rows={"SAIL": shared.SAIL, **shared.pool_runs(setup, method)},
            columns=columns,
            paper=paper,
            above=[(pool, "SAIL") for pool in shared.real_pools(setup)],
            unjudged=list(shared.retrieval()),
        )
        panels.append(made)
    return PaperTable(
        "A1",
        title="Sources of the unpaired images|texts",
        claim="SOTAlign is above SAIL in MeanR@1 for every source of unpaired data",
        panels=panels if shared.pools(setup) else [],
        paper=paper,
        needs=POOLS,
    )


def a2(setup: Setup) -> PaperTable:
    paper = "T3_A2_encoders"
    similarity = {"mutual k-NN (%)": {"metric": "mutual_knn/percent"}}
    made = panel(
        setup,
        corner="encoders/method",
        rows=shared.encoder_runs(setup),
        columns={**similarity, **shared.retrieval()},
        paper=paper,
        above=shared.encoder_claims(setup),
        unjudged=list(similarity),
    )
    return PaperTable(
        "A2",
        title="Pairs of encoders, with their mutual k-NN",
        claim="SOTAlign is above SAIL for every pair of encoders",
        panels=[made],
        paper=paper,
        needs=[MAIN, "IMAGE+TEXT"],
    )


def a3(setup: Setup) -> PaperTable:
    paper = "A3_teacher_noise"
    panels = []
    for name, row, method in (
        ("", "SOTAlign", shared.SOTALIGN),
        ("tuned CCA", "SOTAlign (tuned CCA)", shared.TUNED_SOTALIGN),
    ):
        columns: shared.Labelled = {
            f"p={share}": {**method, "teacher_noise": share} for share in setup.sizes.teacher_noise
        }
        made = panel(
            setup,
            name=name,
            corner="MeanR@1",
            rows={row: {}},
            columns={**columns, "SAIL": shared.SAIL},
            common=shared.MEAN_RECALL,
            paper=paper,
            claims={"p=0.5 - SAIL": ((row, "p=0.5"), (row, "SAIL"))},
        )
        panels.append(made)
    return PaperTable(
        "A3",
        title="Mismatched pairs in the teacher's data",
        claim="with half of the teacher's pairs mismatched, SOTAlign is still above SAIL",
        panels=panels,
        paper=paper,
    )


def a4(setup: Setup) -> PaperTable:
    paper = "T4_A4_retrieval"
    flickr = setup.sources.names.flickr
    columns: shared.Labelled = {}
    for gallery, prefix in (("test", ""), (flickr, f"{flickr} ")):
        first, fifth = (shared.both_ways(cut, gallery, prefix) for cut in (1, 5))
        for way in zip(first, fifth, strict=True):
            columns |= {label: {**first, **fifth}[label] for label in way}
    made = panel(
        setup,
        corner="method",
        rows=shared.methods(setup),
        columns=columns,
        paper=paper,
        named=shared.PAPERS_METHODS,
        above=shared.every_method(),
    )
    return PaperTable(
        "A4",
        title="Retrieval by method, R@1 and R@5",
        claim="SOTAlign is above every other method with the same pairs, in every column",
        panels=[made],
        paper=paper,
        needs=[MAIN, "Flickr30k"],
        rule=rules.above_if_any_learns,
        tuned_rule=rules.above_if_any_learns,
    )


def a5(setup: Setup) -> PaperTable:
    paper = "T5_A5_classification"
    sets = ["Food101", "CIFAR10", "CIFAR100", "Aircraft", "DTD", "Flowers", "ImageNet"]
    made = panel(
        setup,
        corner="method",
        rows=shared.methods(setup),
        columns=shared.classes([*sets, "Intel"]),
        paper=paper,
        named=shared.PAPERS_METHODS,
        above=shared.every_method(),
        unjudged=["Aircraft", "Intel"],
    )
    return PaperTable(
        "A5",
        title="Zero-shot classification by method, all data sets",
        claim=(
            "SOTAlign is above every other method with the same pairs, on every data set "
            "except Aircraft"
        ),
        panels=[made],
        paper=paper,
        needs=[MAIN, *sets],
        rule=rules.above_if_any_learns,
        tuned_rule=rules.above_if_any_learns,
    )


def a6(setup: Setup) -> PaperTable:
    paper = "T6_A6_SUE_protocol"
    columns, named = shared.sue_columns(setup)
    ours: shared.Labelled = {
        "SOTAlign (MLP, d=8)": {**shared.SOTALIGN, "head": "mlp", "dim": 8},
        "SOTAlign (linear, d=512)": {**shared.SOTALIGN, "dim": 512},
    }
    made = panel(
        setup,
        corner="method",
        rows={**shared.sue_methods(), **ours},
        columns=columns,
        paper=paper,
        named=named,
        above=[(own, other) for other in ("CSA", "Contrastive", "SUE") for own in ours],
    )
    return PaperTable(
        "A6",
        title="The protocol of SUE with small heads",
        claim=(
            "SOTAlign is above SUE, contrastive training and CSA, also with heads as small as SUE's"
        ),
        panels=[made],
        paper=paper,
        needs=["COCO100", "F30k500", "Polyvore500"],
        rule=rules.above_if_it_learns,
        tuned_rule=rules.above_if_it_learns,
    )


def fa1(setup: Setup) -> PaperTable:
    ways = ["unrolled", "implicit (ott-jax)", rules.CLOSED]
    return PaperTable(
        "FA1",
        title="Memory, time and iterations of KLOT's gradient",
        claim=(
            "the closed form needs less memory than unrolling and less time than implicit "
            "differentiation (paper: up to 100 and 50 times less)"
        ),
        panels=[
            gradient_panel(setup, "memory (MiB)", "memory", ways, ".1f"),
            gradient_panel(setup, "time (s)", "seconds", ways, ".3f"),
            gradient_panel(setup, "iterations", "iterations", ways, ".0f"),
        ],
        needs=[],
        rule=rules.less_memory_and_time,
        plot=functools.partial(plots.lines, log=True),
    )


def fa2(setup: Setup) -> PaperTable:
    panels = [
        panel(
            setup,
            name=label,
            corner="pairs",
            rows=shared.sizes_of("n_pairs", setup.sizes.pairs),
            columns=shared.BOTH_METHODS,
            common={"metric": metric},
            columns_above=[("SOTAlign", "SAIL")],
        )
        for label, metric in shared.known_retrieval(setup).items()
    ]
    return PaperTable(
        "FA2",
        title="Number of pairs, by metric",
        claim="SOTAlign is above SAIL at every number of pairs",
        panels=panels,
        plot=plots.lines,
    )


def fa3(setup: Setup) -> PaperTable:
    rows = shared.sizes_of("n_unpaired", setup.sizes.unpaired)
    panels = [
        panel(
            setup,
            name=label,
            corner="unpaired rows",
            rows=rows,
            columns=shared.BOTH_METHODS,
            common={"metric": metric},
            claims=last_above_first("unpaired rows", rows, "SOTAlign"),
        )
        for label, metric in shared.known_retrieval(setup).items()
    ]
    return PaperTable(
        "FA3",
        title="Number of unpaired rows, by metric",
        claim="more unpaired rows help",
        panels=panels,
        plot=plots.lines,
    )


def fa4(setup: Setup) -> PaperTable:
    pairs = panel(
        setup,
        name="pairs",
        corner="pairs",
        rows={f"{n:,} pairs": {"data.n_pairs": n} for n in setup.sizes.few_pairs},
        columns=shared.alphas(setup),
        seeds=setup.sizes.first_seed,
    )
    noise = panel(
        setup,
        name="share of noise",
        corner="share of noise",
        rows={f"p={share:g}": {"data.noise": share} for share in setup.sizes.pool_noise},
        columns=shared.alphas(setup),
        seeds=setup.sizes.first_seed,
    )
    return PaperTable(
        "FA4",
        title="Weight alpha of KLOT",
        claim=(
            "the best alpha falls with more pairs, and changes with noise only if the unpaired "
            "data are all noise"
        ),
        panels=[pairs, noise],
        whole="runs",
        rule=rules.best_alphas,
        plot=functools.partial(plots.lines, columns="alpha"),
    )


def fa5(setup: Setup) -> PaperTable:
    sizes = setup.sizes
    common: Settings = {**shared.SOTALIGN, **shared.MEAN_RECALL, **sizes.epsilon_settings}
    student = {f"ε={epsilon:g}": {"sotalign.epsilon": epsilon} for epsilon in sizes.epsilons}
    teacher = {f"ε*={epsilon:g}": {"sotalign.epsilon_star": epsilon} for epsilon in sizes.epsilons}
    panels = [
        panel(
            setup,
            name=f"{n:,} pairs",
            corner="MeanR@1",
            rows=student,
            columns=teacher,
            common={**common, "data.n_pairs": n},
            seeds=setup.sizes.first_seed,
        )
        for n in sizes.first_pairs
    ]
    default_epsilon = panel(
        setup,
        name="ε=0.05",
        corner="MeanR@1",
        rows=teacher,
        columns={f"{n:,} pairs": {"data.n_pairs": n} for n in sizes.few_pairs},
        common=common,
        seeds=setup.sizes.first_seed,
    )
    return PaperTable(
        "FA5",
        title="Regularisation ε of the student and ε* of the teacher",
        claim="the best ε* is smaller than ε at every number of pairs",
        panels=[*panels, default_epsilon],
        whole="runs",
        rule=rules.smaller_star,
        plot=plots.heat_maps,
    )


def _by_distance(setup: Setup, metric: str, chosen: dict[str, shared.Pool]) -> Panel:
    """Returns a panel of MeanR@1 and the distance of the pools."""
    return panel(
        setup,
        corner="images|texts",
        rows=shared.pool_runs(setup, shared.SOTALIGN, chosen),
        columns={"distance from the pairs": {"metric": metric}, "MeanR@1": shared.MEAN_RECALL},
        form=".3f",
    )


def fa6(setup: Setup) -> PaperTable:
    pools = {label: pool for label, pool in shared.pools(setup).items() if pool[1] == MAIN}
    return PaperTable(
        "FA6",
        title="Retrieval and the distance of the unpaired images",
        claim="MeanR@1 falls with the distance of the unpaired images from the pairs",
        panels=[_by_distance(setup, "shift/x", pools)],
        needs=POOLS,
        rule=functools.partial(rules.correlated, sign=-1),
        plot=plots.scatter,
    )


def fa7(setup: Setup) -> PaperTable:
    pools = {label: pool for label, pool in shared.pools(setup).items() if pool[0] == MAIN}
    return PaperTable(
        "FA7",
        title="Retrieval and the distance of the unpaired texts",
        claim="MeanR@1 falls with the distance of the unpaired texts from the pairs",
        panels=[_by_distance(setup, "shift/y", pools)],
        needs=POOLS,
        rule=functools.partial(rules.correlated, sign=-1),
        plot=plots.scatter,
    )


def fa8(setup: Setup) -> PaperTable:
    sets = {side: _sets(setup, side) for side in "xy"}
    panels = [
        panel(
            setup,
            name={"x": "images", "y": "texts"}[side],
            corner="distance",
            rows={label: {"left": name, "side": side} for label, name in named.items()},
            columns={
                label: {"right": name, "metric": "between/distance"}
                for label, name in named.items()
            },
            seeds=setup.sizes.distance_seeds,
            form=".3f",
        )
        for side, named in sets.items()
    ]
    # Both modalities need a set besides the main source and noise.
    return PaperTable(
        "FA8",
        title="Distances between data sets",
        claim=(
            "real data sets are closer to each other than to random directions "
            "(the paper has no random directions)"
        ),
        panels=panels if all(len(named) > 2 for named in sets.values()) else [],
        needs=POOLS,
        whole="distances",
        rule=rules.noise_is_furthest,
        plot=plots.heat_maps,
    )


def _sets(setup: Setup, side: str) -> dict[str, str]:
    """Returns the sources of one side, "x" or "y", by label. Noise is the last one."""
    at, label = setup.sources, setup.sources.names.label
    known = [name for name in (*at.names.collections, "noise") if at.has(name, side)]
    return {label if name == MAIN else name: name for name in known}


def _satellite_panels(setup: Setup, source: str, seeds: Sequence[int]) -> list[Panel]:
    """Returns a panel of SAIL and SOTAlign by number of pairs for each cut of recall."""
    return [
        panel(
            setup,
            name=f"R@{cut}",
            corner="pairs",
            rows=shared.sizes_of("n_pairs", setup.sizes.few_pairs),
            columns=shared.BOTH_METHODS,
            common={"metric": f"test/mean/R@{cut}", **shared.satellite(setup, source)},
            columns_above=[("SOTAlign", "SAIL")],
            seeds=seeds,
        )
        for cut in CUTS
    ]


def fa9(setup: Setup) -> PaperTable:
    source = setup.sources.names.satellite
    return PaperTable(
        "FA9",
        title="Satellite images, 10,000 test rows: number of pairs",
        claim="SOTAlign is above SAIL at every number of pairs",
        panels=_satellite_panels(setup, source, setup.sizes.seeds),
        needs=["SkyScript"],
        plot=plots.lines,
    )


def fa10(setup: Setup) -> PaperTable:
    return PaperTable(
        "FA10",
        title="Satellite images, 30,000 test rows: number of pairs",
        claim="SOTAlign is above SAIL at every number of pairs",
        panels=_satellite_panels(setup, "SkyScript30k", setup.sizes.first_seed),
        needs=["SkyScript30k"],
        plot=plots.lines,
    )
