"""Tables that the paper does not have. Each function returns one of them."""

from collections.abc import Mapping, Sequence

from experiments.paper import panels as rules
from experiments.paper import plots, selection, shared
from experiments.paper.main_text import POOLS
from experiments.paper.panels import Panel
from experiments.paper.runs import Setup
from experiments.paper.sizes import (
    SHORT,
    SHORT_ALPHAS,
    SHORT_RATES,
    TEACHER_START,
    TUNED_START,
    TUNED_TEACHER,
    Settings,
)
from experiments.paper.sources import MAIN
from experiments.paper.table import NO_SETTINGS, PaperTable, panel

VALIDATION: Settings = {"metric": "val/mean/R@1"}
RECALLS: shared.Labelled = {
    "R@1": {"metric": "test/mean/R@1"},
    "R@10": {"metric": "test/mean/R@10"},
}


# --- V1: options chosen on validation ------------------------------------------------------------


def v1(setup: Setup) -> PaperTable:
    sizes, names = setup.sizes, setup.sources.names
    usual = {"data.n_pairs": sizes.n_pairs}
    panels = [_validated(setup, f"{sizes.n_pairs:,} pairs", _trials(setup), usual)]
    if setup.scale == "paper":
        panels = [selection.panel_of_trials(setup)]
    if setup.scale == "full":
        panels += [
            _validated(
                setup,
                f"{names.speech}, {sizes.n_pairs:,} pairs",
                _speech_trials(setup),
                {**shared.speech(setup), "data.n_pairs": sizes.n_pairs},
            ),
            _validated(
                setup,
                f"{sizes.many_pairs:,} pairs",
                _long_trials(),
                {"data.n_pairs": sizes.many_pairs},
            ),
        ]
    return PaperTable(
        "V1",
        title="Options chosen on validation, with equal trials per method",
        claim="the other tables use the best of these options (no claim of the paper)",
        panels=panels,
        word="chosen",
        rule=rules.best_rows,
    )


def _validated(setup: Setup, name: str, rows: shared.Labelled, data: Settings) -> Panel:
    """Returns a panel of R@1 on validation."""
    return panel(
        setup,
        name=name,
        corner="trial",
        rows=rows,
        columns={"val R@1": {**VALIDATION, **data}},
        seeds=setup.sizes.first_seed,
        form=".2f",
    )


def _trials(setup: Setup) -> shared.Labelled:
    """Returns the trials of all methods with the usual number of pairs."""
    sizes = setup.sizes
    rows: shared.Labelled = {}
    for method in ("sail", "sail_semi"):
        for rate in sizes.rates:
            rows[f"{method}: rate {rate:.4g}"] = {"method": method, "train.learning_rate": rate}
    for method in ("structure", "structure_semi"):
        for weight in sizes.weights:
            settings = {"method": method, f"{method}.weight": weight}
            rows[f"{method}: weight {weight:.4g}"] = settings
    for method in ("nnclr", "sclip"):
        for text, image in sizes.both_weights:
            label = f"{method}: weight_text {text:.4g}, weight_image {image:.4g}"
            weights = {f"{method}.weight_text": text, f"{method}.weight_image": image}
            rows[label] = {"method": method, **weights}
    for alpha in sizes.tried_alphas:
        rows[f"sotalign: alpha {alpha:.4g}"] = {**shared.SOTALIGN, "sotalign.alpha": alpha}
    return rows


def _speech_trials(setup: Setup) -> shared.Labelled:
    """Returns learning rates on speech, and the start of SOTAlign with the tuned teacher."""
    rows: shared.Labelled = {
        f"{method}: rate {rate:.4g}": {"method": method, "train.learning_rate": rate}
        for method in ("sail", "structure", "sotalign")
        for rate in setup.sizes.speech_rates
    }
    tuned: shared.Labelled = {
        "rate 0.002": {**TUNED_TEACHER, "train.learning_rate": 2e-3},
        "rate 0.002, teacher start": {**TUNED_START, "train.learning_rate": 2e-3},
        "rate 0.0005, teacher start": {**TUNED_START, "train.learning_rate": 5e-4},
    }
    for label, settings in tuned.items():
        rows[f"sotalign (tuned CCA): {label}"] = {**shared.SOTALIGN, **settings}
    return rows


def _long_trials() -> shared.Labelled:
    """Returns numbers of steps and the start, with many pairs."""
    rows: shared.Labelled = {}
    for alpha in SHORT_ALPHAS:
        settings = {**shared.SOTALIGN, **SHORT, "sotalign.alpha": alpha}
        rows[f"sotalign: alpha {alpha:.4g}, 200 steps"] = settings
    for rate in SHORT_RATES:
        settings = {**shared.SAIL, **SHORT, "train.learning_rate": rate}
        rows[f"sail: rate {rate:.4g}, 200 steps"] = settings
    return {
        **rows,
        "sail: 600 steps": shared.SAIL,
        "sotalign: 600 steps": shared.SOTALIGN,
        "sotalign: 600 steps, teacher start": {**shared.SOTALIGN, **TEACHER_START},
    }


# --- V2: causes that were tried ------------------------------------------------------------------


def v2(setup: Setup) -> PaperTable:
    panels: list[Panel] = []
    if setup.scale == "quick" and not setup.sources.given:
        panels = [_tried_satellite(setup, ["SOTAlign", "alpha 1e-3"])]
    elif setup.scale == "full":
        panels = [
            _tried_satellite(setup, list(_CAUSES)),
            *_tried_many_pairs(setup),
            _tried_contrastive(setup),
            _tried_pools(setup),
            _tried_small_heads(setup),
            *_tried_noise(setup),
            _tried_centring(setup),
        ]
    return PaperTable(
        "V2",
        title="Possible causes, where a claim did not hold",
        claim="no other table uses these settings (no claim of the paper)",
        panels=panels,
        word="tried",
        rule=rules.best_rows,
    )


_CAUSES: shared.Labelled = {
    "SOTAlign": {},
    "alpha 1e-3": {"sotalign.alpha": 1e-3},
    "alpha 3e-4": {"sotalign.alpha": 3e-4},
    "200 steps": SHORT,
    "epsilon* 0.02": {"sotalign.epsilon_star": 0.02},
    "teacher start": {"start": "teacher"},
}
"""Settings of SOTAlign that were tried for several claims."""


def _tried(
    setup: Setup,
    name: str,
    rows: Mapping[str, Settings],
    columns: Mapping[str, Settings],
    common: Settings = NO_SETTINGS,
    *,
    seeds: Sequence[int] | None = None,
    form: str = ".1f",
) -> Panel:
    """Returns a panel of settings that were tried for a claim, by default with one seed."""
    return panel(
        setup,
        name=name,
        corner="tried",
        rows=rows,
        columns=columns,
        common=common,
        seeds=setup.sizes.first_seed if seeds is None else seeds,
        form=form,
    )


def _tried_satellite(setup: Setup, causes: list[str]) -> Panel:
    """Returns settings that were tried for T7 on satellite images."""
    common = {
        **shared.SOTALIGN,
        **shared.satellite(setup),
        "data.n_pairs": setup.sizes.n_pairs,
    }
    name = f"T7, {setup.sources.names.satellite}"
    return _tried(setup, name, {cause: _CAUSES[cause] for cause in causes}, RECALLS, common)


def _tried_many_pairs(setup: Setup) -> list[Panel]:
    """Returns settings that were tried for F5 with many pairs."""
    n = setup.sizes.many_pairs
    whole = {
        **SHORT,
        "train.pair_batch": n,
        "train.unpaired_batch": 2048,
        "data.n_pairs": n,
    }
    rows = {
        "SAIL": shared.SAIL,
        "SOTAlign, alpha 0.0003": {**shared.SOTALIGN, "sotalign.alpha": 3e-4},
    }
    validated = {"val R@1": VALIDATION, **RECALLS}
    starts = {
        **shared.BOTH_METHODS,
        "SOTAlign, teacher start": {**shared.SOTALIGN, **TEACHER_START},
    }
    return [
        _tried(setup, "F5, all 10,000 pairs in a batch", rows, validated, whole, form=".2f"),
        _tried(setup, f"F5, {n:,} pairs", starts, RECALLS, {"data.n_pairs": n}),
    ]


def _tried_contrastive(setup: Setup) -> Panel:
    """Returns settings that were tried for T1 with the contrastive teacher."""
    causes = ["SOTAlign", "alpha 1e-3", "epsilon* 0.02", "teacher start"]
    return _tried(
        setup,
        "T1, contrastive teacher, MeanR@1",
        {cause: _CAUSES[cause] for cause in causes},
        {
            "InfoNCE": {"sotalign.divergence": "infonce"},
            "KLOT": {"sotalign.divergence": "klot"},
        },
        {**shared.SOTALIGN, **shared.MEAN_RECALL, "teacher": "contrastive"},
    )


def _tried_pools(setup: Setup) -> Panel:
    """Returns settings that were tried for A1 with distant pools."""
    causes = ["SOTAlign", "alpha 1e-3", "epsilon* 0.02", "teacher start", "alpha 3e-4"]
    pools = {
        "RSICD|RSICD": ("RSICD", "RSICD"),
        "COCO|Flickr8k": (MAIN, "Flickr8k"),
        "COCO|RSICD": (MAIN, "RSICD"),
    }
    return _tried(
        setup,
        "A1, MeanR@1",
        {cause: _CAUSES[cause] for cause in causes},
        shared.pool_runs(setup, shared.SOTALIGN, pools),
        shared.MEAN_RECALL,
    )


def _tried_small_heads(setup: Setup) -> Panel:
    """Returns settings that were tried for A6 with heads as small as SUE's."""
    rows: shared.Labelled = {
        "MLP, d=8": {},
        "MLP, d=64": {"dim": 64},
        "MLP, d=512": {"dim": 512},
        "MLP, d=8, ten times the alpha": {"sotalign.alpha": 0.06},
        "MLP, d=8, a tenth of the rate": {"train.learning_rate": 2e-4},
        "MLP, d=8, 200 steps": SHORT,
    }
    heads = {"head": "mlp", "dim": 8}
    data = {"data.pairs": "Flickr8k", "data.n_pairs": 500, "data.split": "sue"}
    return _tried(
        setup,
        "A6, Flickr8k",
        rows,
        {"R@5": {"metric": "test/mean/R@5"}},
        {**shared.SOTALIGN, **heads, **data},
    )


def _tried_noise(setup: Setup) -> list[Panel]:
    """Returns settings that were tried for FA4 with noise in the pools."""
    rows = {f"alpha {alpha}": {"sotalign.alpha": alpha} for alpha in (1e-3, 3e-3)}
    common = {**shared.SOTALIGN, **shared.MEAN_RECALL}
    shares: shared.Labelled = {"no noise": {}, "half noise": {"data.noise": 0.5}}
    twice = {"half noise, twice the rows": {"data.noise": 0.5, "train.unpaired_batch": 2048}}
    return [
        _tried(setup, "FA4, three seeds", rows, shares, common, seeds=setup.sizes.seeds),
        _tried(setup, "FA4, one seed", rows, twice, common),
    ]


def _tried_centring(setup: Setup) -> Panel:
    """Returns the distances of FA8 between texts whose mean was subtracted."""
    sources = {"COCO": MAIN, "Flickr8k": "Flickr8k", "Flickr30k": "Flickr30k", "noise": "noise"}
    return _tried(
        setup,
        "FA8, texts less their set's mean",
        {"RSICD": {"left": "RSICD", "side": "y", "centred": True}},
        {label: {"right": source} for label, source in sources.items()},
        {"metric": "between/distance"},
        form=".3f",
    )


# --- V3 and S1 -----------------------------------------------------------------------------------


def v3(setup: Setup) -> PaperTable:
    rows: shared.Labelled = {
        f"{share:g} of noise": {"data.noise": share}
        for share in setup.sizes.pool_noise
        if 0 < share < 1
    }
    made = panel(
        setup,
        corner="images|texts",
        rows={**rows, **shared.pool_runs(setup, NO_SETTINGS)},
        columns={
            "images, % of the way": {**shared.SOTALIGN, "metric": "share/x"},
            "texts, % of the way": {**shared.SOTALIGN, "metric": "share/y"},
            "SAIL": {**shared.SAIL, **shared.MEAN_RECALL},
            "SOTAlign": {**shared.SOTALIGN, **shared.MEAN_RECALL},
        },
    )
    return PaperTable(
        "V3",
        title="Distance of the unpaired data, and the gain over SAIL",
        claim="unpaired data near the pairs help, random data do not (no claim of the paper)",
        panels=[made],
        needs=POOLS,
        whole="runs",
        word="checked",
        rule=rules.as_diagnosed,
    )


def s1(setup: Setup) -> PaperTable:
    names = setup.sources.names
    galleries = {names.speech: "test"}
    if names.speech_transfer:  # the same models, tested on speech of another source
        galleries[names.speech_transfer] = names.speech_transfer
    panels = [
        panel(
            setup,
            name=name,
            corner="pairs",
            rows=shared.sizes_of("n_pairs", setup.sizes.speech_pairs),
            columns=shared.domain_methods(setup),
            common={"metric": f"{gallery}/mean/R@1", **shared.speech(setup)},
            columns_above=shared.every_domain_method(),
        )
        for name, gallery in galleries.items()
    ]
    return PaperTable(
        "S1",
        title="Speech: number of pairs",
        claim=(
            "SOTAlign is above CCA, SAIL and STRUCTURE on speech at every number of pairs "
            "(the paper reports 1,000 pairs)"
        ),
        panels=panels,
        needs=["LibriSpeech"],
        plot=plots.lines,
    )
