"""Every table and figure of the paper with numbers, in its order: T1 to T7, A1 to A6, F3 to FA10.

An entry says which panels to run, what the paper concludes from them, and how to judge that. Where
the paper's data are not at hand, the photographs of `experiments/data` stand in: COCO for CC3M and
COCO, Flickr8k for Flickr30k, RSICD for SkyScript.
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiments.paper import plots
from experiments.paper.lab import ARMS, Lab
from experiments.paper.panels import (
    Changes,
    Panel,
    Verdict,
    all_above,
    correlated,
    gap,
    joined,
    paper_results,
)

Found = Mapping[str, Panel]
MEAN = "test/mean/R@1"
SAIL: Changes = {"method": "sail"}
OURS: Changes = {"method": "sotalign"}
RETRIEVAL = {
    "zero-shot": {"metric": "ImageNet/top1"},
    "T2I R@1": {"metric": "test/y_to_x/R@1"},
    "I2T R@1": {"metric": "test/x_to_y/R@1"},
}
"""What most tables report: classification, text to image, image to text."""
NAMED = {"zero-shot": "ImageNet", "T2I R@1": "COCO_T2I_R1", "I2T R@1": "COCO_I2T_R1"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A table or figure of the paper.

    Attributes:
        name: as T1 (main text), A1 (appendix), F3 or FA1 (figures).
        title: what it shows.
        varies: what differs between its runs.
        needs: the paper's data, as sources of `--files`.
        claim: what the paper concludes.
        panels: for the data at hand; none when they do not allow it.
        judge: whether the claim held, from the panels by name.
        plot: draws a figure into a file.
        paper: key of the paper's table, shown beside ours or below.
    """

    name: str
    title: str
    varies: str
    needs: tuple[str, ...]
    claim: str
    panels: Callable[[Lab], Sequence[Panel]]
    judge: Callable[[Found], Verdict]
    plot: Callable[[Found, pathlib.Path], None] | None = None
    paper: str | None = None


def _rows_above(panel: Panel, pairs: Sequence[tuple[str, str]]) -> Verdict:
    """Claim: of every pair of rows the first is above the second, in every column."""
    return all_above({k: v for pair in pairs for k, v in panel.row_gaps(*pair).items()})


def _sail_and_ours(sources: Mapping[str, Changes]) -> dict[str, Changes]:
    """A row of SAIL and one of SOTAlign for each source, named as the paper does."""
    methods = {"SAIL": SAIL, "SOTAlign": OURS}
    return {f"{s}/{m}": {**a, **b} for s, a in sources.items() for m, b in methods.items()}


def _ours_above_sail(found: Found) -> Verdict:
    """Claim on rows of `_sail_and_ours`."""
    sources = dict.fromkeys(row.rpartition("/")[0] for row in found[""].rows)
    gaps = {
        f"{source} ({column})": found[""].gap(
            (f"{source}/SOTAlign", column), (f"{source}/SAIL", column)
        )
        for source, column in itertools.product(sources, RETRIEVAL)
    }
    return all_above(gaps)


_lines = functools.partial(plots.lines, ylabel="MeanR@1 (%)")
_percent = functools.partial(plots.lines, ylabel="%")


# --- T1: teachers and divergences --------------------------------------------------------------


def _t1(lab: Lab) -> list[Panel]:
    kinds = {"CKA": "cka", "InfoNCE": "infonce", "KLOT": "klot"}
    rows = {"None": {"method": "teacher"}}
    rows |= {name: {**OURS, "sotalign.divergence": kind} for name, kind in kinds.items()}
    teachers = ("Procrustes", "CCA", "Contrastive")
    columns = {name: {"metric": MEAN, "teacher.kind": name.lower()} for name in teachers}
    key = "T1_divergence_x_teacher"
    made = [Panel("", "divergence", rows, columns, lab.seeds, key)]
    if more := lab.pick(quick=None, full=10_000, paper=None):
        many = {name: {**changes, "data.n_pairs": more} for name, changes in columns.items()}
        made.append(Panel(f"{more:,} pairs", "divergence", rows, many, lab.seeds[:1], key))
    return made


def _judge_t1(found: Found) -> Verdict:
    order = [("KLOT", "InfoNCE"), ("InfoNCE", "CKA"), ("KLOT", "None")]
    parts = {name or "usual pairs": _rows_above(panel, order) for name, panel in found.items()}
    return joined(parts) if len(parts) > 1 else parts["usual pairs"]


T1 = Entry(
    "T1",
    "Linear teachers and divergences",
    "teacher x divergence, all at the alpha of KLOT with CCA",
    ("main",),
    "KLOT is above InfoNCE, InfoNCE above CKA, and KLOT above its teacher alone, for every teacher",
    _t1,
    _judge_t1,
    paper="T1_divergence_x_teacher",
)


# --- T2: where the pairs come from -------------------------------------------------------------


def _t2(lab: Lab) -> list[Panel]:
    others = [
        name
        for name in lab.sources.collections
        if name != lab.sources.main and lab.sources.has(name, "xy")
    ]
    if not others:
        return []
    sources = {lab.sources.label: {}, **{name: {"data.pairs": name} for name in others}}
    rows = _sail_and_ours(sources)
    return [Panel("", "pairs", rows, RETRIEVAL, lab.seeds, "T2_paired_source", NAMED)]


T2 = Entry(
    "T2",
    "Sources of pairs",
    "the collection that the pairs come from; unpaired rows come from one",
    ("main", "CC3M-synth", "CC12M", "COCO"),
    "SOTAlign is above SAIL whatever the pairs' source",
    _t2,
    _ours_above_sail,
    paper="T2_paired_source",
)


# --- T3, A2, F7: encoders ----------------------------------------------------------------------

_KNN = {"mutual k-NN (%)": {"metric": "mutual_knn/percent"}}


def _encoders(lab: Lab, columns: Mapping[str, Changes]) -> list[Panel]:
    if len(lab.sources.encoders) < 2:
        return []
    rows = _sail_and_ours({name: {"data.encoders": name} for name in lab.sources.encoders})
    named = {**NAMED, "mutual k-NN (%)": "mutual_kNN_pct"}
    return [Panel("", "encoders", rows, columns, lab.seeds, "T3_A2_encoders", named)]


T3 = Entry(
    "T3",
    "Encoders",
    "the pair of frozen encoders",
    ("main", "IMAGE+TEXT"),
    "SOTAlign is above SAIL for every pair of encoders",
    lambda lab: _encoders(lab, RETRIEVAL),
    _ours_above_sail,
    paper="T3_A2_encoders",
)
A2 = dataclasses.replace(
    T3,
    name="A2",
    title="Encoders, with their mutual k-NN",
    panels=lambda lab: _encoders(lab, {**_KNN, **RETRIEVAL}),
)


def _f7(lab: Lab) -> list[Panel]:
    rows = {
        name: {**OURS, "data.encoders": name}
        for name in (*lab.sources.encoders, *lab.sources.weak_encoders)
    }
    columns = {**_KNN, "MeanR@1": {"metric": MEAN}}
    return [Panel("", "encoders", rows, columns, lab.seeds)] if len(rows) > 2 else []


F7 = Entry(
    "F7",
    "Retrieval against the encoders' mutual k-NN",
    "the pair of frozen encoders, weaker ones too",
    ("main", "IMAGE+TEXT"),
    "mutual k-NN predicts MeanR@1 (paper: r = 0.95)",
    _f7,
    lambda found: correlated(found[""], sign=1, paper=0.95),
    plot=plots.scatter,
)


# --- T4, A4, T5, A5: methods -------------------------------------------------------------------

_ALL_PAIRS = "sup/SAIL, all pairs"
_START = "semi/SOTAlign, teacher start"


def _methods(lab: Lab) -> dict[str, Changes]:
    """Every method that the paper compares, and SOTAlign from the teacher's projection."""
    named = {
        "sup/SAIL": "sail",
        "sup/STRUCTURE": "structure",
        "semi/SAIL": "sail_semi",
        "semi/STRUCTURE": "structure_semi",
        "semi/NNCLR": "nnclr",
        "semi/S-CLIP": "sclip",
        "semi/SOTAlign": "sotalign",
    }
    rows: dict[str, Changes] = {_ALL_PAIRS: {**SAIL, **lab.all_pairs}}
    rows |= {name: {"method": method} for name, method in named.items()}
    return {**rows, _START: {**OURS, "heads.init": "teacher"}}


def _by_method(lab: Lab, columns: Mapping[str, Changes], key: str, **named: str) -> list[Panel]:
    named[_ALL_PAIRS] = "sup/SAIL-1M"
    return [Panel("", "method", _methods(lab), columns, lab.seeds, key, named)]


def _judge_methods(found: Found, *, but: str = "Aircraft") -> Verdict:
    """SOTAlign above all, in columns where some method is clearly above chance."""
    panel = found[""]
    ours, peers = "semi/SOTAlign", [r for r in panel.rows if r not in (_ALL_PAIRS, _START)]
    useless = [
        name
        for name, changes in panel.columns.items()
        if changes["metric"]
        and not max(panel.mean(row, name) for row in panel.rows) > 2 * changes.get("chance", 0)
    ]
    gaps = {
        f"{ours} - {row} ({name})": panel.gap((ours, name), (row, name))
        for row in peers
        for name, changes in panel.columns.items()
        if row != ours and changes["metric"] and name not in (*useless, but)
    }
    verdict = all_above(gaps)
    note = f"; at chance for every method: {', '.join(useless)}" if useless else ""
    return verdict._replace(text=verdict.text + note)


def _retrieval(lab: Lab, cuts: tuple[int, ...]) -> list[Panel]:
    columns, named = {}, {}
    for shown, prefix, paper in (
        ("", "test", "COCO"),
        (f"{lab.sources.flickr} ", lab.sources.flickr, "F30k"),
    ):
        for (way, side), k in itertools.product({"T2I": "y_to_x", "I2T": "x_to_y"}.items(), cuts):
            here = prefix == "test" or lab.sources.has(prefix, "test")
            columns[f"{shown}{way} R@{k}"] = {"metric": f"{prefix}/{side}/R@{k}" if here else None}
            named[f"{shown}{way} R@{k}"] = f"{paper}_{way}_R{k}"
    return _by_method(lab, columns, "T4_A4_retrieval", **named)


T4 = Entry(
    "T4",
    "Retrieval by method",
    "the method",
    ("main", "Flickr30k"),
    "SOTAlign is above every method with the same pairs, in every column",
    lambda lab: _retrieval(lab, (1,)),
    _judge_methods,
    paper="T4_A4_retrieval",
)
A4 = dataclasses.replace(
    T4,
    name="A4",
    title="Retrieval by method, R@1 and R@5",
    panels=lambda lab: _retrieval(lab, (1, 5)),
)
_CHANCE = {"Food101": 101, "CIFAR10": 10, "CIFAR100": 100, "Aircraft": 100, "DTD": 47}
_CHANCE |= {"Flowers": 102, "ImageNet": 1000, "Intel": 6}


def _classification(lab: Lab, sets: tuple[str, ...]) -> list[Panel]:
    columns = {
        name: {
            "metric": f"{name}/top1" if lab.sources.has(name, "classes") else None,
            "chance": 100 / _CHANCE[name],
        }
        for name in sets
    }
    return _by_method(lab, columns, "T5_A5_classification")


_SETS = ("Food101", "CIFAR10", "CIFAR100", "DTD", "ImageNet")
T5 = Entry(
    "T5",
    "Zero-shot classification by method",
    "the method",
    ("main", *_SETS[:-1]),
    "SOTAlign is above every method with the same pairs, in every column",
    lambda lab: _classification(lab, _SETS),
    _judge_methods,
    paper="T5_A5_classification",
)
_MORE_SETS = ("Food101", "CIFAR10", "CIFAR100", "Aircraft", "DTD", "Flowers", "ImageNet")
A5 = dataclasses.replace(
    T5,
    name="A5",
    title="Zero-shot classification by method, all sets",
    needs=("main", *_MORE_SETS[:-1]),
    claim=f"{T5.claim} but Aircraft",
    panels=lambda lab: _classification(
        lab, (*_MORE_SETS, "Intel") if lab.sources.has("Intel", "classes") else _MORE_SETS
    ),
)


# --- T6, A6: the SUE protocol ------------------------------------------------------------------

_PEERS: dict[str, Changes] = {
    "CSA": {"method": "csa"},
    "Contrastive": {"method": "contrastive_mlp", "heads.dim": 8},
    "SUE": {"method": "sue"},
}
_LINEAR = {"SOTAlign (linear, d=512)": {**OURS, "heads.dim": 512}}
_MLP = {"SOTAlign (MLP, d=8)": {**OURS, "heads.kind": "mlp", "heads.dim": 8}}
_SUE_CHANCE = 100 * 5 / 400


def _sue(lab: Lab, rows: Mapping[str, Changes]) -> list[Panel]:
    """R@5 among 400 test rows; pairs and test rows are drawn anew by every seed."""
    columns, named = {}, {}
    for source, pairs, paper in lab.sources.sue:
        changes = {"data.pairs": source, "data.n_pairs": pairs, "data.split": "sue"}
        for way, side in {"I2T": "x_to_y", "T2I": "y_to_x"}.items():
            label = f"{source}, {pairs} pairs, {way} R@5"
            columns[label] = {**changes, "metric": f"test/{side}/R@5"}
            named[label] = f"{paper}_{way}"
    if not columns:
        return []
    return [Panel("", "method", rows, columns, lab.seeds, "T6_A6_SUE_protocol", named)]


def _judge_sue(found: Found) -> Verdict:
    """A baseline that stays at chance, as a collapsed network does, is no evidence."""
    panel = found[""]
    means = {row: [panel.mean(row, column) for column in panel.columns] for row in panel.rows}
    ours = [row for row in panel.rows if row.startswith("SOTAlign")]
    chance = [row for row in _PEERS if row in means and max(means[row]) < 1.5 * _SUE_CHANCE]
    verdict = _rows_above(panel, [(a, b) for a in ours for b in _PEERS if b not in chance])
    note = f"; at chance here, and so no evidence: {', '.join(chance)}" if chance else ""
    return verdict._replace(text=verdict.text + note)


T6 = Entry(
    "T6",
    "The SUE protocol: very few pairs",
    "the method",
    ("COCO100", "F30k500", "Polyvore500"),
    "SOTAlign is above SUE, contrastive training and CSA",
    lambda lab: _sue(lab, {**_PEERS, **_LINEAR}),
    _judge_sue,
    paper="T6_A6_SUE_protocol",
)
A6 = dataclasses.replace(
    T6,
    name="A6",
    title="The SUE protocol, SOTAlign with SUE's heads too",
    varies="the method and SOTAlign's heads",
    claim=f"{T6.claim}, also with heads as small as SUE's",
    panels=lambda lab: _sue(lab, {**_PEERS, **_MLP, **_LINEAR}),
)


# --- T7: other domains -------------------------------------------------------------------------


def _t7(lab: Lab) -> list[Panel]:
    columns, named = {}, {}
    for source, paper, ways in (
        (
            lab.sources.satellite,
            "SkyScript",
            {"T2I R@10": "y_to_x/R@10", "I2T R@10": "x_to_y/R@10"},
        ),
        ("LibriSpeech", "Libri", {"S2T R@1": "x_to_y/R@1", "T2S R@1": "y_to_x/R@1"}),
    ):
        pairs = 10_000 if source == "SkyScript" else 1000
        for way, metric in ways.items():
            here = f"test/{metric}" if lab.sources.has(source, "test") else None
            columns[f"{source} {way}"] = {**lab.alone(source, pairs), "metric": here}
            named[f"{source} {way}"] = f"{paper}_{way.replace(' R@', '_R')}"
    if not any(changes["metric"] for changes in columns.values()):
        return []
    methods = {"CCA": "cca", "SAIL": "sail", "STRUCTURE": "structure", "SOTAlign": "sotalign"}
    rows = {name: {"method": method} for name, method in methods.items()}
    return [Panel("", "method", rows, columns, lab.seeds, "T7_domains", named)]


T7 = Entry(
    "T7",
    "Satellite images and speech",
    "the method",
    ("SkyScript", "LibriSpeech"),
    "SOTAlign is above CCA, SAIL and STRUCTURE on both",
    _t7,
    lambda found: _rows_above(found[""], [("SOTAlign", b) for b in ("CCA", "SAIL", "STRUCTURE")]),
    paper="T7_domains",
)


# --- A1, F6, FA6, FA7, FA8: where unpaired rows come from --------------------------------------

_UNPAIRED = ("main", "CC3M-synth", "CC12M", "ImageNet", "COCO", "WikiText103")


def _pools(lab: Lab) -> dict[str, Changes]:
    """Sources of unpaired images|texts, all with as many rows; pairs come from the main source."""
    own = lab.sources.main
    if own in lab.sources.given:
        listed = [row for row in paper_results()["A1_unpaired_source"] if "|" in row]
        pairs = [tuple(row.replace(lab.sources.label, own).split("|")) for row in listed]
        pairs = [(x, y) for x, y in pairs if lab.sources.has(x, "x") and lab.sources.has(y, "y")]
    else:
        images = [name for name in lab.sources.collections if lab.sources.has(name, "x")]
        texts = [name for name in lab.sources.collections if lab.sources.has(name, "y")]
        shared = [(name, name) for name in images if name in texts]
        pairs = [*shared, *((x, own) for x in images), *((own, y) for y in texts)]
    pairs += [("noise", "noise"), ("noise", own), (own, "noise")]
    if len(dict.fromkeys(pairs)) <= 4:
        return {}
    shown = {own: lab.sources.label}
    return {
        f"{shown.get(x, x)}|{shown.get(y, y)}": {
            **OURS,
            "data.images": x,
            "data.texts": y,
            "data.n_unpaired": lab.pool_rows,
        }
        for x, y in dict.fromkeys(pairs)
    }


def _a1(lab: Lab) -> list[Panel]:
    pools = _pools(lab)
    if not pools:
        return []
    rows = {"SAIL": {**next(iter(pools.values())), **SAIL}, **pools}
    columns = {**RETRIEVAL, "MeanR@1": {"metric": MEAN}}
    key = "A1_unpaired_source"
    return [Panel("", "unpaired images|texts", rows, columns, lab.seeds, key, NAMED)]


def _judge_a1(found: Found) -> Verdict:
    rows = [row for row in found[""].rows if "|" in row and "noise" not in row]
    return all_above(
        {f"{r} - SAIL": found[""].gap((r, "MeanR@1"), ("SAIL", "MeanR@1")) for r in rows}
    )


A1 = Entry(
    "A1",
    "Sources of unpaired rows",
    "the collections that unpaired images and texts come from",
    _UNPAIRED,
    "SOTAlign is above SAIL (by MeanR@1) whatever the unpaired rows' source",
    _a1,
    _judge_a1,
    paper="A1_unpaired_source",
)


def _shift(lab: Lab, side: str, fixed: int | None) -> list[Panel]:
    """Distance of the pools from the pairs and retrieval; `fixed` keeps images (0) or texts (1)."""
    own = lab.sources.label
    rows = {n: c for n, c in _pools(lab).items() if fixed is None or n.split("|")[fixed] == own}
    columns = {"distance": {"metric": f"shift/{side}"}, "MeanR@1": {"metric": MEAN}}
    made = Panel("", "unpaired images|texts", rows, columns, lab.seeds, form=".3f")
    return [made] if rows else []


F6 = Entry(
    "F6",
    "Retrieval against the shift of the unpaired rows",
    "the sources of unpaired rows; noise is one",
    _UNPAIRED,
    "MeanR@1 falls with the distance of the pools from the pairs (paper: r = -0.76)",
    lambda lab: _shift(lab, "total", None),
    lambda found: correlated(found[""], sign=-1, paper=-0.76),
    plot=plots.scatter,
)
FA6 = Entry(
    "FA6",
    "Retrieval against the shift of the unpaired images",
    "the source of unpaired images; texts are of the pairs' source",
    _UNPAIRED,
    "MeanR@1 falls with the distance of the pools from the pairs",
    lambda lab: _shift(lab, "x", 1),
    lambda found: correlated(found[""], sign=-1, paper=None),
    plot=plots.scatter,
)
FA7 = dataclasses.replace(
    FA6,
    name="FA7",
    title="Retrieval against the shift of the unpaired texts",
    varies="the source of unpaired texts; images are of the pairs' source",
    panels=lambda lab: _shift(lab, "y", 0),
)


def _fa8(lab: Lab) -> list[Panel]:
    made = []
    for side, title in (("x", "images"), ("y", "texts")):
        names = [
            name for name in (*lab.sources.collections, "noise") if lab.sources.has(name, side)
        ]
        rows = {name: {"left": name, "side": side} for name in names}
        columns = {name: {"right": name, "metric": "between/distance"} for name in names}
        made.append(Panel(title, "distance", rows, columns, lab.seeds, form=".3f"))
    return made if all(len(panel.rows) > 2 for panel in made) else []


def _judge_fa8(found: Found) -> Verdict:
    if not all(panel.complete for panel in found.values()):
        return Verdict(None, "distances are missing")
    closer = [np.max(row[:-1]) < row[-1] for p in found.values() for row in p.means()[:-1]]
    return Verdict(all(closer), f"so for {sum(closer)} of {len(closer)} sets")


FA8 = Entry(
    "FA8",
    "Distances between sets of images and of texts",
    "the two sets",
    _UNPAIRED,
    "real sets are closer to each other than to random directions (ours: the paper draws none)",
    _fa8,
    _judge_fa8,
    plot=plots.heat_maps,
)


# --- A3: noise in the teacher's pairs ----------------------------------------------------------


def _a3(lab: Lab) -> list[Panel]:
    shares = lab.pick(
        quick=(0.0, 0.5), full=(0.0, 0.1, 0.3, 0.5), paper=(0, 0.1, 0.2, 0.3, 0.4, 0.5)
    )
    columns = {f"p={p:.1f}": {**OURS, "teacher.noise": float(p)} for p in shares} | {"SAIL": SAIL}
    rows = {"SOTAlign": {"metric": MEAN}}
    return [Panel("", "MeanR@1", rows, columns, lab.seeds, "A3_teacher_noise")]


A3 = Entry(
    "A3",
    "Noise in the teacher's pairs",
    "the share of mismatched pairs that the teacher is fitted on",
    ("main",),
    "with half of the teacher's pairs mismatched, SOTAlign is still above SAIL",
    _a3,
    lambda found: all_above(found[""].column_gaps("p=0.5", "SAIL")),
    paper="A3_teacher_noise",
)


# --- F3, F4, FA1: memory and time of the gradient, convergence ---------------------------------

UNROLLED, IMPLICIT, CLOSED = ARMS.values()


def _epsilon_rows(lab: Lab) -> dict[str, Changes]:
    usual = (0.5, 0.1, 0.05, 0.02, 0.01, 0.005)
    return {f"{e:g}": {"epsilon": e} for e in lab.pick(quick=usual[::2], full=usual, paper=usual)}


def _costs(lab: Lab, name: str, quantity: str, form: str, *titles: str) -> Panel:
    columns = {
        title: {"metric": f"gradient/{arm}/{quantity}"}
        for arm, title in ARMS.items()
        if title in titles
    }
    return Panel(name, "epsilon", _epsilon_rows(lab), columns, (0,), form=form)


def _times(panel: Panel, other: str, what: str) -> Verdict:
    """Claim: another way takes more than the closed form, at every epsilon where both are known."""
    ours, theirs = (np.array([panel.mean(row, c) for row in panel.rows]) for c in (CLOSED, other))
    ratios = (theirs / ours)[(theirs > 0) & (ours > 0)]
    if not len(ratios):
        return Verdict(None, f"{other} could not be measured")
    size = f"{min(ratios):.1f} to {max(ratios):.1f} times the {what}"
    text = f"{other} takes {size} of the closed form"
    if absent := len(panel.rows) - len(ratios):
        text += f", and does not get there at {absent} of {len(panel.rows)} epsilons"
    held = False if min(ratios) <= 1 else True if np.isfinite(ours).all() else None
    return Verdict(held, text, size)


F3 = Entry(
    "F3",
    "Memory of KLOT's gradient",
    "epsilon, and how the gradient is computed",
    (),
    "the closed form takes less memory than unrolling (paper: up to 100 times)",
    lambda lab: [_costs(lab, "memory (MiB)", "memory", ".1f", CLOSED, UNROLLED)],
    lambda found: _times(found["memory (MiB)"], UNROLLED, "memory"),
    plot=functools.partial(plots.lines, ylabel="", log=True),
)


def _f4(lab: Lab) -> list[Panel]:
    columns = {name: {"metric": f"convergence/{name}"} for name in ("textbook Sinkhorn", "ours")}
    return [Panel("marginal error", "epsilon", _epsilon_rows(lab), columns, (0,), form=".1e")]


def _judge_f4(found: Found) -> Verdict:
    (panel,) = found.values()
    if not panel.complete:
        return Verdict(None, "errors are missing")
    errors = panel.means()[:, 0]
    listed = ", ".join(f"{e:.1e} at {row}" for e, row in zip(errors, panel.rows, strict=True))
    seen = np.maximum(errors, 1e-6)  # below is rounding
    return Verdict(bool((np.diff(seen) >= 0).all() and seen[-1] > seen[0]), listed)


F4 = Entry(
    "F4",
    "Convergence of Sinkhorn after 100 iterations",
    "epsilon",
    (),
    "the smaller epsilon, the further 100 iterations are from convergence",
    _f4,
    _judge_f4,
    plot=functools.partial(plots.lines, ylabel="", log=True),
)
FA1 = Entry(
    "FA1",
    "Memory, time and iterations of KLOT's gradient",
    "epsilon, and how the gradient is computed, to a marginal error of 1e-6; of the times only "
    "ratios mean something, for other runs go on beside them",
    (),
    "the closed form takes less memory than unrolling and less time than implicit differentiation "
    "(paper: up to 100 and 50 times)",
    lambda lab: [
        _costs(lab, "memory (MiB)", "memory", ".1f", CLOSED, UNROLLED, IMPLICIT),
        _costs(lab, "time (s)", "seconds", ".3f", CLOSED, UNROLLED, IMPLICIT),
        _costs(lab, "iterations", "iterations", ".0f", CLOSED, UNROLLED, IMPLICIT),
    ],
    lambda found: joined(
        {
            "memory": _times(found["memory (MiB)"], UNROLLED, "memory"),
            "time": _times(found["time (s)"], IMPLICIT, "time"),
        }
    ),
    plot=functools.partial(plots.lines, ylabel="", log=True),
)


# --- F5, FA2, FA3: how many pairs and unpaired rows --------------------------------------------


def _columns(metric: str) -> dict[str, Changes]:
    return {"SAIL": {**SAIL, "metric": metric}, "SOTAlign": {**OURS, "metric": metric}}


def _pairs(lab: Lab, name: str, metric: str, **changes: str) -> Panel:
    rows = {f"{n}": {**changes, "data.n_pairs": n} for n in lab.pairs}
    return Panel(name, "pairs", rows, _columns(metric), lab.seeds)


def _unpaired(lab: Lab, name: str, metric: str) -> Panel:
    """SAIL reads no unpaired rows: its run is the usual one."""
    rows = {f"{n}": {"data.n_unpaired": n} for n in lab.unpaired}
    return Panel(name, "unpaired", rows, _columns(metric), lab.seeds)


def _judge_pairs(panel: Panel) -> Verdict:
    return all_above(panel.column_gaps("SOTAlign", "SAIL"))


def _judge_fading(panel: Panel) -> Verdict:
    """Claim: the gain over SAIL is smaller with the most pairs than at its best."""
    if not panel.complete:
        return Verdict(None, "runs are missing")
    found = panel.found
    gains = {row: found[row, "SOTAlign"] - found[row, "SAIL"] for row in panel.rows}
    listed = ", ".join(f"{gain.mean():+.1f} at {row}" for row, gain in gains.items())
    *fewer, most = gains.values()
    fall = gap(max(fewer, key=np.mean), most)
    return Verdict(fall.held if fall else None, f"gains {listed}")


def _judge_unpaired(panel: Panel) -> Verdict:
    first, *_, last = panel.rows
    found = panel.gap((last, "SOTAlign"), (first, "SOTAlign"))
    return all_above({f"{last} - {first} unpaired": found})


F5 = Entry(
    "F5",
    "How many pairs, how many unpaired rows",
    "pairs at all unpaired rows (left), unpaired rows at the usual pairs (right)",
    ("main",),
    "SOTAlign is above SAIL at every number of pairs, by less when pairs abound; more unpaired "
    "rows help",
    lambda lab: [_pairs(lab, "pairs", MEAN), _unpaired(lab, "unpaired", MEAN)],
    lambda found: joined(
        {
            "above SAIL": _judge_pairs(found["pairs"]),
            "fading gain": _judge_fading(found["pairs"]),
            "more unpaired rows": _judge_unpaired(found["unpaired"]),
        }
    ),
    plot=_lines,
)
FA2 = Entry(
    "FA2",
    "How many pairs: classification and both directions",
    "pairs at all unpaired rows",
    ("main",),
    "SOTAlign is above SAIL at every number of pairs",
    lambda lab: [_pairs(lab, name, str(c["metric"])) for name, c in RETRIEVAL.items()],
    lambda found: joined({name: _judge_pairs(panel) for name, panel in found.items()}),
    plot=_percent,
)
FA3 = Entry(
    "FA3",
    "How many unpaired rows: classification and both directions",
    "unpaired rows at the usual pairs",
    ("main",),
    "more unpaired rows help",
    lambda lab: [_unpaired(lab, name, str(c["metric"])) for name, c in RETRIEVAL.items()],
    lambda found: joined({name: _judge_unpaired(panel) for name, panel in found.items()}),
    plot=_percent,
)


# --- FA4: alpha --------------------------------------------------------------------------------


def _fa4(lab: Lab) -> list[Panel]:
    alphas = lab.pick(
        quick=(1e-4, 1e-3, 1e-2),
        full=(1e-5, 1e-4, 1e-3, 1e-2, 1e-1),
        paper=(1e-6, 1e-5, 1e-4, 1e-3, 1e-2),
    )
    columns = {f"{a:g}": {**OURS, "metric": MEAN, "sotalign.alpha": a} for a in alphas}
    pairs = {f"{n} pairs": {"data.n_pairs": n} for n in lab.few_pairs}
    shares = lab.pick(quick=(0.0, 1.0), full=(0.0, 0.5, 1.0), paper=(0.0, 0.25, 0.5, 0.75, 1.0))
    noise = {f"p={p:g}": {"data.noise": p} for p in shares}
    return [
        Panel("pairs", "pairs", pairs, columns, lab.seeds[:1]),
        Panel("noise", "share of noise", noise, columns, lab.seeds[:1]),
    ]


def _judge_fa4(found: Found) -> Verdict:
    if not all(panel.complete for panel in found.values()):
        return Verdict(None, "runs are missing")
    best = {n: [float(list(p.columns)[i]) for i in p.means().argmax(1)] for n, p in found.items()}
    as_claimed = {
        "falling with pairs": ("pairs", best["pairs"] == sorted(best["pairs"], reverse=True)),
        "moved by noise alone": ("noise", len(set(best["noise"][:-1])) == 1),
    }
    parts = {}
    for claim, (name, held) in as_claimed.items():
        listed = ", ".join(f"{r}: {a:g}" for r, a in zip(found[name].rows, best[name], strict=True))
        # An alpha that never moves says nothing of when it would.
        parts[claim] = Verdict(held if len(set(best[name])) > 1 else None, f"best at {listed}")
    return joined(parts)


FA4 = Entry(
    "FA4",
    "The weight of KLOT",
    "alpha at several numbers of pairs, and with noise in the pools",
    ("main",),
    "the best alpha falls with more pairs, and noise moves it only when the pools are all noise",
    _fa4,
    _judge_fa4,
    plot=functools.partial(_lines, transpose=True, xlabel="alpha"),
)


# --- FA5: epsilons -----------------------------------------------------------------------------


def _fa5(lab: Lab) -> list[Panel]:
    """Both epsilons at two numbers of pairs; the usual epsilon at more of them."""
    values = lab.pick(
        quick=(0.005, 0.05, 0.5),
        full=(0.005, 0.02, 0.05, 0.2),
        paper=(0.005, 0.01, 0.05, 0.1, 0.5),
    )
    usual = {**OURS, "metric": MEAN, **lab.pick(quick={}, full={}, paper={"sotalign.alpha": 1e-3})}
    rows = {f"ε={e:g}": {"sotalign.epsilon": e} for e in values}
    columns = {f"ε*={e:g}": {**usual, "sotalign.epsilon_star": e} for e in values}
    made = []
    for n in lab.few_pairs[:2]:
        at = {name: {**changes, "data.n_pairs": n} for name, changes in rows.items()}
        made.append(Panel(f"{n} pairs", "MeanR@1", at, columns, lab.seeds[:1]))
    stars = {
        name: {"sotalign.epsilon_star": c["sotalign.epsilon_star"]} for name, c in columns.items()
    }
    pairs = {f"{n} pairs": {**usual, "data.n_pairs": n} for n in lab.few_pairs}
    return [*made, Panel("ε=0.05", "MeanR@1", stars, pairs, lab.seeds[:1])]


def _judge_fa5(found: Found) -> Verdict:
    if not all(panel.complete for panel in found.values()):
        return Verdict(None, "runs are missing")
    parts = {}
    for name, panel in list(found.items())[:-1]:
        means = panel.means()
        i, j = np.unravel_index(means.argmax(), means.shape)
        row, column = list(panel.rows)[i], list(panel.columns)[j]
        smaller = float(column.split("=")[1]) < float(row.split("=")[1])
        parts[name] = Verdict(smaller, f"best {means.max():.1f} at {row}, {column}")
    return joined(parts)


FA5 = Entry(
    "FA5",
    "The regularisation of both plans",
    "ε of the student's plan and ε* of the teacher's, at two numbers of pairs",
    ("main",),
    "the best ε* is smaller than ε, at every number of pairs",
    _fa5,
    _judge_fa5,
    plot=plots.heat_maps,
)


# --- FA9, FA10: pairs of satellite images ------------------------------------------------------


def _satellite(lab: Lab, source: str) -> list[Panel]:
    if not lab.sources.has(source, "test"):
        return []
    rows = {f"{n}": lab.alone(source, n) for n in lab.few_pairs}
    metrics = {f"R@{k}": f"test/mean/R@{k}" for k in (1, 5, 10)}
    return [Panel(name, "pairs", rows, _columns(m), lab.seeds) for name, m in metrics.items()]


FA9 = Entry(
    "FA9",
    "Satellite images, 10,000 test rows",
    "pairs",
    ("SkyScript",),
    "SOTAlign is above SAIL at every number of pairs",
    lambda lab: _satellite(lab, lab.sources.satellite),
    lambda found: joined({name: _judge_pairs(panel) for name, panel in found.items()}),
    plot=_percent,
)
FA10 = dataclasses.replace(
    FA9,
    name="FA10",
    title="Satellite images, 30,000 test rows",
    needs=("SkyScript30k",),
    panels=lambda lab: _satellite(lab, "SkyScript30k"),
)


ENTRIES = {
    entry.name: entry
    for entry in (
        *(T1, T2, T3, T4, T5, T6, T7),
        *(A1, A2, A3, A4, A5, A6),
        *(F3, F4, F5, F6, F7),
        *(FA1, FA2, FA3, FA4, FA5, FA6, FA7, FA8, FA9, FA10),
    )
}
"""All of them by name."""
