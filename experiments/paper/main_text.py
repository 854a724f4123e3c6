"""Tables and figures of the paper's main text. Each function returns one of them."""

import functools

from experiments.paper import panels as rules
from experiments.paper import plots, shared
from experiments.paper.runs import Setup
from experiments.paper.sizes import REFINED_TEACHER, TUNED_TEACHER
from experiments.paper.sources import MAIN
from experiments.paper.table import PaperTable, last_above_first, panel

POOLS = (MAIN, "CC3M-synth", "CC12M", "ImageNet", "COCO", "WikiText103")
"""The paper's sources of unpaired data."""
GRADIENTS = {
    "unrolled": "unrolled scan",
    "implicit (ott-jax)": "ott-jax implicit",
    rules.CLOSED: "ours, from K",
}
"""Gradients that the paper compares, by label, with their names in `benchmarks.peers`."""


def t1(setup: Setup) -> PaperTable:
    paper = "T1_divergence_x_teacher"
    divergences: shared.Labelled = {"None": {"method": "teacher"}}
    for label in ("CKA", "InfoNCE", "KLOT"):
        divergences[label] = {**shared.SOTALIGN, "sotalign.divergence": label.lower()}
    teachers: shared.Labelled = {
        "Procrustes": {**shared.MEAN_RECALL, "teacher": "procrustes"},
        "CCA": {**shared.MEAN_RECALL, "teacher": "cca"},
        "Contrastive": {**shared.MEAN_RECALL, "teacher": "contrastive"},
        "tuned CCA": {**shared.MEAN_RECALL, **TUNED_TEACHER},
        "refined CCA": {**shared.MEAN_RECALL, **REFINED_TEACHER},
    }
    sizes = setup.sizes
    numbers = [sizes.n_pairs, sizes.many_pairs] if sizes.many_pairs else [sizes.n_pairs]
    panels = [
        panel(
            setup,
            name=f"{n:,} pairs",
            corner="divergence",
            rows=divergences,
            columns=teachers,
            common={"data.n_pairs": n},
            paper=paper,
            above=[("KLOT", "InfoNCE"), ("InfoNCE", "CKA"), ("KLOT", "None")],
            unjudged=["refined CCA"],
        )
        for n in numbers
    ]
    return PaperTable(
        "T1",
        title="Teachers and divergences",
        claim=(
            "for every teacher, KLOT is above InfoNCE, InfoNCE is above CKA, "
            "and KLOT is above the teacher alone"
        ),
        panels=panels,
        paper=paper,
        plot=plots.grouped_bars,
    )


def t2(setup: Setup) -> PaperTable:
    paper = "T2_paired_source"
    sources = shared.pair_sources(setup)
    methods = {**shared.BOTH_METHODS, "SOTAlign (tuned CCA)": shared.TUNED_SOTALIGN}
    rows: shared.Labelled = {
        f"{source}/{label}": {**pairs, **method}
        for source, pairs in sources.items()
        for label, method in methods.items()
    }
    above = [(f"{source}/SOTAlign", f"{source}/SAIL") for source in sources]
    above += [(f"{source}/SOTAlign (tuned CCA)", f"{source}/SAIL") for source in sources]
    made = panel(
        setup,
        corner="pairs/method",
        rows=rows,
        columns=shared.retrieval(),
        paper=paper,
        above=above,
    )
    return PaperTable(
        "T2",
        title="Sources of the pairs",
        claim="SOTAlign is above SAIL for every source of pairs",
        panels=[made],
        paper=paper,
        needs=[MAIN, "CC3M-synth", "CC12M", "COCO"],
    )


def t3(setup: Setup) -> PaperTable:
    paper = "T3_A2_encoders"
    made = panel(
        setup,
        corner="encoders/method",
        rows=shared.encoder_runs(setup),
        columns=shared.retrieval(),
        paper=paper,
        above=shared.encoder_claims(setup),
    )
    return PaperTable(
        "T3",
        title="Pairs of encoders",
        claim="SOTAlign is above SAIL for every pair of encoders",
        panels=[made],
        paper=paper,
        needs=[MAIN, "IMAGE+TEXT"],
    )


def t4(setup: Setup) -> PaperTable:
    paper = "T4_A4_retrieval"
    flickr = setup.sources.names.flickr
    made = panel(
        setup,
        corner="method",
        rows=shared.methods(setup),
        columns={**shared.both_ways(1), **shared.both_ways(1, flickr, f"{flickr} ")},
        paper=paper,
        named=shared.PAPERS_METHODS,
        above=shared.every_method(),
    )
    return PaperTable(
        "T4",
        title="Retrieval by method",
        claim="SOTAlign is above every other method with the same pairs, in every column",
        panels=[made],
        paper=paper,
        needs=[MAIN, "Flickr30k"],
        rule=rules.above_if_any_learns,
        tuned_rule=rules.above_if_any_learns,
        plot=functools.partial(plots.method_bars, columns=["T2I R@1", "I2T R@1"]),
    )


def t5(setup: Setup) -> PaperTable:
    paper = "T5_A5_classification"
    sets = ["Food101", "CIFAR10", "CIFAR100", "DTD", "ImageNet"]
    made = panel(
        setup,
        corner="method",
        rows=shared.methods(setup),
        columns=shared.classes(sets),
        paper=paper,
        named=shared.PAPERS_METHODS,
        above=shared.every_method(),
    )
    return PaperTable(
        "T5",
        title="Zero-shot classification by method",
        claim="SOTAlign is above every other method with the same pairs, on every data set",
        panels=[made],
        paper=paper,
        needs=[MAIN, *sets],
        rule=rules.above_if_any_learns,
        tuned_rule=rules.above_if_any_learns,
    )


def t6(setup: Setup) -> PaperTable:
    paper = "T6_A6_SUE_protocol"
    ours = "SOTAlign (linear, d=512)"
    columns, named = shared.sue_columns(setup)
    made = panel(
        setup,
        corner="method",
        rows={**shared.sue_methods(), ours: {**shared.SOTALIGN, "dim": 512}},
        columns=columns,
        paper=paper,
        named=named,
        above=[(ours, other) for other in ("CSA", "Contrastive", "SUE")],
    )
    return PaperTable(
        "T6",
        title="Very few pairs: the protocol of SUE",
        claim="SOTAlign is above SUE, contrastive training and CSA",
        panels=[made],
        paper=paper,
        needs=["COCO100", "F30k500", "Polyvore500"],
        rule=rules.above_if_it_learns,
        tuned_rule=rules.above_if_it_learns,
    )


def t7(setup: Setup) -> PaperTable:
    paper = "T7_domains"
    names = setup.sources.names
    satellite = panel(
        setup,
        name=names.satellite,
        corner="method",
        rows=shared.domain_methods(setup),
        columns=shared.both_ways(10),
        common={**shared.satellite(setup), "data.n_pairs": setup.sizes.n_pairs},
        paper=paper,
        named={"T2I R@10": "SkyScript_T2I_R10", "I2T R@10": "SkyScript_I2T_R10"},
        above=shared.every_domain_method(),
    )
    speech = panel(
        setup,
        name=names.speech,
        corner="method",
        rows=shared.domain_methods(setup),
        columns={
            "S2T R@1": {"metric": "test/x_to_y/R@1"},
            "T2S R@1": {"metric": "test/y_to_x/R@1"},
        },
        common={**shared.speech(setup), "data.n_pairs": setup.sizes.t7_speech_pairs},
        paper=paper,
        named={"S2T R@1": "Libri_S2T_R1", "T2S R@1": "Libri_T2S_R1"},
        above=shared.every_domain_method(),
    )
    return PaperTable(
        "T7",
        title="Satellite images and speech",
        claim="SOTAlign is above CCA, SAIL and STRUCTURE on satellite images and on speech",
        panels=[satellite, speech],
        paper=paper,
        needs=["SkyScript", "LibriSpeech"],
    )


def gradient_panel(setup: Setup, name: str, cost: str, ways: list[str], form: str) -> rules.Panel:
    """Makes a panel of a cost of KLOT's gradient by epsilon.

    Args:
        setup: Sizes and sources.
        name: Name of the panel, with the unit.
        cost: "memory", "seconds" or "iterations".
        ways: Labels of `GRADIENTS`.
        form: Format of a number.
    """
    return panel(
        setup,
        name=name,
        corner="epsilon",
        rows=epsilons(setup),
        columns={way: {"metric": f"gradient/{GRADIENTS[way]}/{cost}"} for way in ways},
        seeds=setup.sizes.first_seed,
        form=form,
    )


def epsilons(setup: Setup) -> shared.Labelled:
    """Returns a row per epsilon of the solver."""
    return {f"{epsilon:g}": {"epsilon": epsilon} for epsilon in setup.sizes.solver_epsilons}


def f3(setup: Setup) -> PaperTable:
    return PaperTable(
        "F3",
        title="Memory of KLOT's gradient",
        claim="the closed form needs less memory than unrolling (paper: up to 100 times less)",
        panels=[gradient_panel(setup, "memory (MiB)", "memory", ["unrolled", rules.CLOSED], ".1f")],
        needs=[],
        rule=functools.partial(rules.takes_more, other="unrolled", what="memory"),
        plot=functools.partial(plots.lines, log=True),
    )


def f4(setup: Setup) -> PaperTable:
    errors = panel(
        setup,
        name="marginal error",
        corner="epsilon",
        rows=epsilons(setup),
        columns={
            "textbook Sinkhorn": {"metric": "convergence/textbook Sinkhorn"},
            "ours": {"metric": "convergence/ours"},
        },
        seeds=setup.sizes.first_seed,
        form=".1e",
    )
    return PaperTable(
        "F4",
        title="Error of Sinkhorn after 100 iterations",
        claim="the error after 100 iterations grows as epsilon falls",
        panels=[errors],
        needs=[],
        whole="errors",
        rule=rules.worse_at_every_step,
        plot=functools.partial(plots.lines, log=True),
    )


def f5(setup: Setup) -> PaperTable:
    sizes = setup.sizes
    many = [sizes.many_pairs] if sizes.many_pairs else []
    both: shared.Labelled = {
        "SAIL": {**shared.SAIL, **shared.MEAN_RECALL},
        "SOTAlign": {**shared.SOTALIGN, **shared.MEAN_RECALL},
    }
    further: shared.Labelled = {
        "SOTAlign (tuned CCA)": {**both["SOTAlign"], **TUNED_TEACHER},
        "refined CCA": {**shared.MEAN_RECALL, "method": "teacher", **REFINED_TEACHER},
        "SOTAlign (refined CCA)": {**both["SOTAlign"], **REFINED_TEACHER},
        "align": {**shared.MEAN_RECALL, "method": "align"},
    }
    pairs = panel(
        setup,
        name="pairs",
        corner="pairs",
        rows=shared.sizes_of("n_pairs", [*sizes.pairs, *many]),
        columns={**both, **further},
        columns_above=[("SOTAlign", "SAIL"), ("SOTAlign (tuned CCA)", "SAIL")],
    )
    rows = shared.sizes_of("n_unpaired", sizes.unpaired)
    unpaired = panel(
        setup,
        name="unpaired",
        corner="unpaired rows",
        rows=rows,
        columns=both,
        claims=last_above_first("unpaired rows", rows, "SOTAlign"),
    )
    return PaperTable(
        "F5",
        title="Number of pairs and of unpaired rows",
        claim=(
            "SOTAlign is above SAIL at every number of pairs, its gain falls when there are many "
            "pairs, and more unpaired rows help"
        ),
        panels=[pairs, unpaired],
        rule=rules.pairs_and_unpaired,
        plot=functools.partial(plots.lines, gain=True),
    )


def f6(setup: Setup) -> PaperTable:
    made = panel(
        setup,
        corner="images|texts",
        rows=shared.pool_runs(setup, shared.SOTALIGN),
        columns={
            "distance from the pairs": {"metric": "shift/total"},
            "MeanR@1": shared.MEAN_RECALL,
        },
        form=".3f",
    )
    return PaperTable(
        "F6",
        title="Retrieval and the distance of the unpaired data",
        claim=(
            "MeanR@1 falls with the distance of the unpaired data from the pairs (paper: r = -0.76)"
        ),
        panels=[made],
        needs=POOLS,
        rule=functools.partial(rules.correlated, sign=-1, paper=-0.76),
        plot=plots.scatter,
    )


def f7(setup: Setup) -> PaperTable:
    names = setup.sources.names
    encoders = [*names.encoders, *names.weak_encoders]
    asked = encoders if len(encoders) > 2 else []  # two points have no correlation
    rows = {encoder: {**shared.SOTALIGN, "data.encoders": encoder} for encoder in asked}
    made = panel(
        setup,
        corner="encoders",
        rows=rows,
        columns={
            "mutual k-NN (%)": {"metric": "mutual_knn/percent"},
            "MeanR@1": shared.MEAN_RECALL,
        },
    )
    return PaperTable(
        "F7",
        title="Retrieval and the encoders' mutual k-NN",
        claim="MeanR@1 rises with the mutual k-NN of the encoders (paper: r = 0.95)",
        panels=[made],
        needs=[MAIN, "IMAGE+TEXT"],
        rule=functools.partial(rules.correlated, sign=1, paper=0.95),
        plot=plots.scatter,
    )
