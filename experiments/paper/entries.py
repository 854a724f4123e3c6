"""Every table and figure of the paper with numbers, in its order: T1-T7, A1-A6, F3-F7, FA1-FA10.

An entry says what to run, what the paper concludes from it, and how to judge that. Where the
paper's data are not at hand, photographs stand in for them, see `sources`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.paper import plots
from experiments.paper.lab import ARMS, Lab
from experiments.paper.panels import (
    Gap,
    Panel,
    Verdict,
    all_above,
    correlated,
    gap,
    joined,
    paper_results,
)
from experiments.paper.sources import FAR, MAIN, NEAR, place

Found = Mapping[str, Panel]
Rows = dict[str, dict[str, Any]]
Panels = Iterator[Panel]
MEAN = "test/mean/R@1"
SAIL: dict[str, Any] = {"method": "sail"}
OURS: dict[str, Any] = {"method": "sotalign"}
UNROLLED, IMPLICIT, CLOSED = ARMS.values()


@dataclasses.dataclass(frozen=True)
class Entry:
    """A table or figure of the paper."""

    name: str  # T1 (main text), A1 (appendix), F3 or FA1 (figures)
    title: str
    claim: str  # what the paper concludes
    make: Callable[[Lab], Iterable[Panel]]  # for the data at hand; none when they do not allow it
    rule: Callable[..., Verdict]  # whether the claim held, from the panels
    needs: tuple[str, ...] = (MAIN,)  # the paper's data, as sources of --files
    paper: str | None = None  # key of the paper's table, shown beside ours or below
    plot: Callable[[Found], Any] | None = None
    whole: str = ""  # what a claim cannot be judged without: "runs", ...
    word: str = ""  # in place of a verdict, where the paper claims nothing

    def panels(self, lab: Lab) -> list[Panel]:
        """What to run on the data at hand."""
        return [lab.plan(dataclasses.replace(p, paper=self.paper)) for p in self.make(lab)]

    def judge(self, found: Found) -> Verdict:
        """Whether the claim held, from the panels by name."""
        if self.whole and not all(panel.complete for panel in found.values()):
            return Verdict(None, f"{self.whole} are missing")
        return self.rule(*found.values())


# --- what several entries share ----------------------------------------------------------------


def retrieval(lab: Lab) -> Rows:
    """Columns of most tables: classification, text to image, image to text."""
    classes = "ImageNet/top1" if lab.sources.has("ImageNet", "classes") else None
    ways = {"T2I R@1": "test/y_to_x/R@1", "I2T R@1": "test/x_to_y/R@1"}
    return {name: {"metric": m} for name, m in {"zero-shot": classes, **ways}.items()}


WAYS = {"T2I": "y_to_x", "I2T": "x_to_y"}
NAMED = {"zero-shot": "ImageNet", "T2I R@1": "COCO_T2I_R1", "I2T R@1": "COCO_I2T_R1"}


def sail_and_ours(sources: Rows) -> Rows:
    """A row of SAIL and one of SOTAlign for each source, named as the paper does."""
    methods = {"SAIL": SAIL, "SOTAlign": OURS}
    return {f"{s}/{m}": {**a, **b} for s, a in sources.items() for m, b in methods.items()}


def rows_above(
    panel: Panel,
    pairs: Iterable[tuple[str, str]],
    but: Sequence[str] = (),
    paper: float | None = None,
) -> Verdict:
    """Claim: of every pair of rows the first is above the second, in every column `but` some."""
    columns = [name for name, c in panel.columns.items() if c["metric"] and name not in but]
    places = itertools.product(pairs, columns)
    gaps = {f"{a} - {b} ({c})": panel.gap((a, c), (b, c)) for (a, b), c in places}
    return all_above(gaps, paper=paper)


def papers_gain(panel: Panel, low_of: Callable[[str], str | None], columns: Iterable[str]) -> float:
    """Mean difference, in the paper's table, of its rows from those that `low_of` names."""
    table = paper_results()[panel.paper or ""]
    pairs = [(row, low) for row in table if (low := low_of(row))]
    places = itertools.product(pairs, columns)
    return float(np.mean([table[row][c] - table[low][c] for (row, low), c in places]))


def ours_above_sail(panel: Panel) -> Verdict:
    """Claim on the rows of `sail_and_ours`."""

    def sail(row: str) -> str | None:
        return row.replace("SOTAlign", "SAIL") if row.endswith("/SOTAlign") else None

    paper = papers_gain(panel, sail, NAMED.values())
    pairs = [(row, low) for row in panel.rows if (low := sail(row))]
    return rows_above(panel, pairs, [c for c in panel.columns if c not in NAMED], paper)


def two_lines(metric: str) -> Rows:
    """Columns of figures that compare SAIL with SOTAlign."""
    return {"SAIL": {**SAIL, "metric": metric}, "SOTAlign": {**OURS, "metric": metric}}


def second_above_first(panel: Panel) -> Verdict:
    """Claim on the columns of `two_lines`."""
    gaps = {f"SOTAlign - SAIL ({r})": panel.gap((r, "SOTAlign"), (r, "SAIL")) for r in panel.rows}
    return all_above(gaps)


def each(judge: Callable[[Panel], Verdict]) -> Callable[..., Verdict]:
    """Claim: every panel is judged so."""
    return lambda *panels: joined({panel.name: judge(panel) for panel in panels})


# --- what was chosen on validation -------------------------------------------------------------

WEIGHTS = [{"weight": weight} for weight in (0.1, 1.0, 10.0, 100.0, 1000.0)]
BOTH_WEIGHTS = [
    {"weight_text": text, "weight_image": image}
    for text, image in ((1.0, 0.0), (0.0, 1.0), (0.1, 0.1), (1.0, 1.0), (10.0, 10.0))
]
SHORT = {"train.steps": 200, "train.learning_rate": 1e-3, "train.eval_every": 10}
STARTED: dict[str, Any] = {**OURS, "heads.init": "teacher", "sotalign.alpha": 1e-3}


def best_rows(*panels: Panel) -> Verdict:
    """The best row of every column, or of every method in it where rows are "METHOD: TRIAL"."""
    parts = []
    for panel, column in ((p, c) for p in panels for c in p.columns):
        known = [row for row in panel.rows if len(panel.at(row, column))]
        ordered = sorted(known, key=lambda row: panel.mean(row, column))
        best = {row.rpartition(": ")[0]: row for row in ordered}
        if len(known) > 1:
            parts.append(f"{panel.name}, {column}: {', '.join(best.values())}")
    return Verdict(None, "best at " + "; ".join(parts) if parts else "runs are missing")


def trials(method: str, points: Iterable[Mapping[str, float]], **also: Any) -> Rows:
    """A row for every point, {option: value}, of a grid; "rate" is the learning rate."""
    rows: Rows = {}
    for point in points:
        label = ", ".join(f"{name} {value:.4g}" for name, value in point.items())
        changes = {f"{method}.{name}": value for name, value in point.items() if name != "rate"}
        changes |= {"train.learning_rate": point["rate"]} if "rate" in point else {}
        rows[f"{method}: {label}"] = {"method": method, **also, **changes}
    return rows


def v1(lab: Lab) -> Panels:
    """As many points of the paper's grids for each method; with most pairs, steps and start too."""
    rates = [{"rate": rate} for rate in lab.sizes.rates]
    grids = {"sail": rates, "sail_semi": rates, "structure": WEIGHTS, "structure_semi": WEIGHTS}
    grids |= {"nnclr": BOTH_WEIGHTS, "sclip": BOTH_WEIGHTS}
    grids["sotalign"] = [{"alpha": alpha} for alpha in lab.sizes.alphas]
    rows: Rows = {}
    for method, points in grids.items():
        rows |= trials(method, points[: len(rates)])
    short = trials("sotalign", [{"alpha": a} for a in (3e-4, 5e-4, 3 / 2048)], **SHORT)
    short |= trials("sail", [{"rate": r} for r in (2.5e-4, 5e-4, 1e-3)], **SHORT)
    many = {f"{name}, 200 steps": changes for name, changes in short.items()}
    many |= {"sail: 600 steps": SAIL, "sotalign: 600 steps": OURS}
    many["sotalign: 600 steps, teacher start"] = STARTED
    for pairs, tried in ((lab.sizes.n_pairs, rows), (lab.sizes.t1_pairs, many)):
        columns = {"val R@1": {"metric": "val/mean/R@1", "data.n_pairs": pairs}}
        if pairs:
            yield Panel(f"{pairs} pairs", "trial", tried, columns, lab.seeds[:1], form=".2f")


# --- tables of the main text -------------------------------------------------------------------


def in_order(*panels: Panel) -> Verdict:
    order = [("KLOT", "InfoNCE"), ("InfoNCE", "CKA"), ("KLOT", "None")]
    parts = {panel.name or "usual pairs": rows_above(panel, order) for panel in panels}
    return joined(parts) if len(parts) > 1 else parts["usual pairs"]


def t1(lab: Lab) -> Panels:
    rows: Rows = {"None": {"method": "teacher"}}
    rows |= {n: {**OURS, "sotalign.divergence": n.lower()} for n in ("CKA", "InfoNCE", "KLOT")}
    many = lab.sizes.t1_pairs
    for name, n_pairs, seeds in (
        ("", lab.sizes.n_pairs, lab.seeds),
        (f"{many} pairs", many, lab.seeds[:1]),
    ):
        columns = {
            teacher: {"metric": MEAN, "teacher.kind": teacher.lower(), "data.n_pairs": n_pairs}
            for teacher in ("Procrustes", "CCA", "Contrastive")
        }
        if n_pairs:
            yield Panel(name, "divergence", rows, columns, seeds)


def t2(lab: Lab) -> Panels:
    at = lab.sources
    others = [name for name in at.collections if name != MAIN and at.has(name, "xy")]
    rows = sail_and_ours({at.label: {}, **{name: {"data.pairs": name} for name in others}})
    if others:
        yield Panel("", "pairs/method", rows, retrieval(lab), lab.seeds, named=NAMED)


KNN = "mutual k-NN (%)"
PERCENT: Rows = {KNN: {"metric": "mutual_knn/percent"}}


def by_encoders(lab: Lab, knn: bool = False) -> Panels:
    rows = sail_and_ours({name: {"data.encoders": name} for name in lab.sources.encoders})
    columns = {**(PERCENT if knn else {}), **retrieval(lab)}
    named = {**NAMED, KNN: "mutual_kNN_pct"}
    if len(rows) > 2:
        yield Panel("", "encoders/method", rows, columns, lab.seeds[:1], named=named)


ALL_PAIRS, OURS_SEMI, TEACHER_START = (
    "sup/SAIL, many more pairs",
    "semi/SOTAlign",
    "semi/SOTAlign, teacher start",
)


def by_method(lab: Lab, columns: Rows, named: Mapping[str, str]) -> Panel:
    """Every method that the paper compares, and SOTAlign from the teacher's projection."""
    rows: Rows = {ALL_PAIRS: {**SAIL, "data.n_pairs": lab.sizes.all_pairs}}
    for kind, names in {"sup": "SAIL STRUCTURE", "semi": "SAIL STRUCTURE NNCLR S-CLIP"}.items():
        for name in names.split():
            both = kind == "semi" and name in ("SAIL", "STRUCTURE")
            method = name.lower().replace("-", "") + ("_semi" if both else "")
            rows[f"{kind}/{name}"] = {"method": method}
    rows |= {OURS_SEMI: OURS, TEACHER_START: {**OURS, "heads.init": "teacher"}}
    named = {**named, ALL_PAIRS: "sup/SAIL-1M"}
    return Panel("", "method", rows, columns, lab.seeds, named=named)


def ours_above_all(panel: Panel, but: Sequence[str] = ()) -> Verdict:
    """Columns where no method is clearly (three times) above chance judge nothing."""
    useless = []
    for name, changes in panel.columns.items():
        means = [panel.mean(row, name) for row in panel.rows if len(panel.at(row, name))]
        if means and max(means) <= 3 * changes.get("chance", 0.0):
            useless.append(name)
    peers = [row for row in panel.rows if row not in (ALL_PAIRS, OURS_SEMI, TEACHER_START)]
    verdict = rows_above(panel, [(OURS_SEMI, row) for row in peers], [*useless, *but])
    note = f"; near chance for every method: {', '.join(useless)}" if useless else ""
    return verdict._replace(text=verdict.text + note)


def retrieval_by_method(lab: Lab, cuts: tuple[int, ...] = (1,)) -> Panels:
    columns: Rows = {}
    named, sources = {}, ("test", lab.sources.flickr)
    for source, (way, side), k in itertools.product(sources, WAYS.items(), cuts):
        own = source == "test"
        label = f"{'' if own else f'{source} '}{way} R@{k}"
        here = own or lab.sources.has(source, "test")
        columns[label] = {"metric": f"{source}/{side}/R@{k}" if here else None}
        named[label] = f"{'COCO' if own else 'F30k'}_{way}_R{k}"
    yield by_method(lab, columns, named)


CLASSES = {"Food101": 101, "CIFAR10": 10, "CIFAR100": 100, "Aircraft": 100, "DTD": 47}
CLASSES |= {"Flowers": 102, "ImageNet": 1000, "Intel": 6}
FIVE_SETS = ("Food101", "CIFAR10", "CIFAR100", "DTD", "ImageNet")


def classes_by_method(lab: Lab, sets: Iterable[str] = FIVE_SETS) -> Panels:
    columns: Rows = {}
    for name in sets:
        here = lab.sources.has(name, "classes")
        metric = f"{name}/top1" if here else None
        if here or name != "Intel":  # which the paper has not
            columns[name] = {"metric": metric, "chance": 100 / CLASSES[name]}
    yield by_method(lab, columns, {})


SMALL = {"heads.kind": "mlp", "heads.dim": 8}
SUE_PEERS: Rows = {
    "CSA": {"method": "csa"},
    "Contrastive": {"method": "contrastive_mlp", **SMALL},
    "SUE": {"method": "sue"},
}
SUE_LARGE: Rows = {"SOTAlign (linear, d=512)": {**OURS, "heads.dim": 512}}
SUE_SMALL: Rows = {"SOTAlign (MLP, d=8)": {**OURS, **SMALL}}


def few_pairs(lab: Lab, ours: Rows = SUE_LARGE) -> Panels:
    columns, named = {}, {}
    ways = {"I2T": "x_to_y", "T2I": "y_to_x"}
    for (source, pairs, paper), (way, side) in itertools.product(lab.sources.sue, ways.items()):
        changes = {"data.pairs": source, "data.n_pairs": pairs, "data.split": "sue"}
        shown = lab.sources.label if source == MAIN else source
        label = f"{shown}, {pairs} pairs, {way} R@5"
        columns[label] = {**changes, "metric": f"test/{side}/R@5"}
        named[label] = f"{paper}_{way}"
    if columns:
        yield Panel("", "method", {**SUE_PEERS, **ours}, columns, lab.seeds, named=named)


def above_sue(panel: Panel) -> Verdict:
    """A baseline at chance in a column, as a collapsed one is, is no evidence there."""
    chance = 100 * 5 / 400
    ours = [row for row in panel.rows if row not in SUE_PEERS]
    gaps: dict[str, Gap | None] = {}
    useless = []
    for peer, column in itertools.product(SUE_PEERS, panel.columns):
        if panel.mean(peer, column) <= 1.5 * chance:
            useless.append(f"{peer} ({column})")
        else:
            found = {row: panel.gap((row, column), (peer, column)) for row in ours}
            gaps |= {f"{row} - {peer} ({column})": one for row, one in found.items()}
    verdict = all_above(gaps)
    note = f"; at chance, and so no evidence: {', '.join(useless)}" if useless else ""
    return verdict._replace(text=verdict.text + note)


def above_the_first_three(panel: Panel) -> Verdict:
    return rows_above(panel, [("SOTAlign", row) for row in ("CCA", "SAIL", "STRUCTURE")])


def t7(lab: Lab) -> Panels:
    columns, named, sky = {}, {}, (lab.sources.satellite, "SkyScript", lab.sizes.n_pairs)
    speech = "LibriSpeech", "Libri", 1000
    for (source, paper, pairs), way, cut, side in (
        (sky, "T2I", 10, "y_to_x"),
        (sky, "I2T", 10, "x_to_y"),
        (speech, "S2T", 1, "x_to_y"),
        (speech, "T2S", 1, "y_to_x"),
    ):
        metric = f"test/{side}/R@{cut}" if lab.sources.has(source, "test") else None
        columns[f"{source} {way} R@{cut}"] = {**lab.alone(source, pairs), "metric": metric}
        named[f"{source} {way} R@{cut}"] = f"{paper}_{way}_R{cut}"
    rows = {name: {"method": name.lower()} for name in ("CCA", "SAIL", "STRUCTURE", "SOTAlign")}
    if any(changes["metric"] for changes in columns.values()):
        yield Panel("", "method", rows, columns, lab.seeds, named=named)


# --- tables of the appendix --------------------------------------------------------------------

UNPAIRED = (MAIN, "CC3M-synth", "CC12M", "ImageNet", "COCO", "WikiText103")


def pools(lab: Lab) -> Rows:
    """Sources of unpaired images|texts, all with as many rows; pairs come from the main source."""
    at = lab.sources
    if at.given:
        listed = [row.split("|") for row in paper_results()["A1_unpaired_source"] if "|" in row]
        named = [[MAIN if name == at.label else name for name in row] for row in listed]
        pairs = [(x, y) for x, y in named if at.has(x, "x") and at.has(y, "y")]
    else:
        images, texts = ([n for n in at.collections if at.has(n, side)] for side in "xy")
        pairs = [(name, name) for name in images if name in texts]
        pairs += [*((x, MAIN) for x in images), *((MAIN, y) for y in texts)]
    if len(set(pairs)) < 2:
        return {}
    pairs += [("noise", "noise"), ("noise", MAIN), (MAIN, "noise")]
    sizes = {**OURS, "data.n_unpaired": lab.sizes.pool_rows}
    return {
        f"{x}|{y}".replace(MAIN, at.label): {**sizes, "data.images": x, "data.texts": y}
        for x, y in dict.fromkeys(pairs)
    }


def real_pools_above_sail(panel: Panel) -> Verdict:
    real = [row for row in panel.rows if "|" in row and "noise" not in row]
    columns = ("COCO_T2I_R1", "COCO_I2T_R1")
    paper = papers_gain(panel, lambda row: "SAIL" if "|" in row else None, columns)
    return rows_above(panel, [(row, "SAIL") for row in real], tuple(NAMED), paper)


def a1(lab: Lab) -> Panels:
    if rows := pools(lab):
        columns = {**retrieval(lab), "MeanR@1": {"metric": MEAN}}
        rows = {"SAIL": {**next(iter(rows.values())), **SAIL}, **rows}
        yield Panel("", "images|texts", rows, columns, lab.seeds[:1], named=NAMED)


def half_above_sail(panel: Panel) -> Verdict:
    worst, sail = ("SOTAlign", "p=0.5"), ("SOTAlign", "SAIL")
    return all_above({"p=0.5 - SAIL": panel.gap(worst, sail)})


def a3(lab: Lab) -> Panels:
    shares = lab.sizes.teacher_noise
    columns: Rows = {f"p={p}": {**OURS, "teacher.noise": p, "metric": MEAN} for p in shares}
    columns["SAIL"] = {**SAIL, "metric": MEAN}
    yield Panel("", "MeanR@1", {"SOTAlign": {}}, columns, lab.seeds)


# --- figures of the main text ------------------------------------------------------------------


def by_epsilon(lab: Lab, name: str, form: str, metrics: Mapping[str, str]) -> Panel:
    rows = {f"{e:g}": {"epsilon": e} for e in lab.sizes.solver_epsilons}
    columns = {title: {"metric": metric} for title, metric in metrics.items()}
    return Panel(name, "epsilon", rows, columns, (0,), form=form)


COSTS = {"memory": ("memory (MiB)", ".1f"), "seconds": ("time (s)", ".3f")}
COSTS["iterations"] = "iterations", ".0f"


def costs(
    lab: Lab, kinds: Iterable[str] = COSTS, ways: Sequence[str] = tuple(ARMS.values())
) -> Panels:
    """What ways to the gradient take."""
    for kind in kinds:
        metrics = {w: f"gradient/{arm}/{kind}" for arm, w in ARMS.items() if w in ways}
        yield by_epsilon(lab, *COSTS[kind], metrics)


def takes_more(panel: Panel, other: str, what: str) -> Verdict:
    """Claim: another way takes more than the closed form, at every epsilon where both are known."""
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
    return Verdict(held, text, size)


def worse_at_every_step(panel: Panel) -> Verdict:
    errors = panel.means()[:, 0]
    listed = ", ".join(f"{e:.1e} at {row}" for e, row in zip(errors, panel.rows, strict=True))
    seen = np.maximum(errors, 1e-6)  # below is rounding
    return Verdict(bool((np.diff(seen) >= 0).all() and seen[-1] > seen[0]), listed)


def f4(lab: Lab) -> Panels:
    metrics = {name: f"convergence/{name}" for name in ("textbook Sinkhorn", "ours")}
    yield by_epsilon(lab, "marginal error", ".1e", metrics)


def by_count(lab: Lab, kind: str, name: str, metric: str) -> Panel:
    """More "pairs" or "unpaired" rows; SAIL reads none of these: its run is the usual one."""
    rows = {f"{n}": {f"data.n_{kind}": n} for n in getattr(lab.sizes, kind)}
    return Panel(name, kind, rows, two_lines(metric), lab.seeds)


def fading(panel: Panel) -> Verdict:
    """Claim: the gain over SAIL is smaller with the most pairs than at its best."""
    if not panel.complete:
        return Verdict(None, "runs are missing")
    gains = {row: panel.found[row, "SOTAlign"] - panel.found[row, "SAIL"] for row in panel.rows}
    *fewer, most = gains.values()
    fall = gap(max(fewer, key=np.mean), most)
    listed = ", ".join(f"{gain.mean():+.1f} at {row}" for row, gain in gains.items())
    return Verdict(fall.held if fall else None, f"gains {listed}")


def more_helps(panel: Panel) -> Verdict:
    first, *_, last = panel.rows
    found = panel.gap((last, "SOTAlign"), (first, "SOTAlign"))
    return all_above({f"{last} - {first} unpaired": found})


def pairs_and_unpaired(pairs: Panel, unpaired: Panel, many: Panel | None = None) -> Verdict:
    parts = {"above SAIL": second_above_first(pairs)}
    if many is not None:
        parts["with many more pairs"] = second_above_first(many)
    parts["fading gain"] = fading(pairs)
    return joined({**parts, "more unpaired rows": more_helps(unpaired)})


def f5(lab: Lab) -> Panels:
    """With the most pairs, one seed."""
    yield from (by_count(lab, kind, kind, MEAN) for kind in ("pairs", "unpaired"))
    if most := lab.sizes.t1_pairs:
        rows = {f"{most}": {"data.n_pairs": most}}
        columns = {**two_lines(MEAN), "SOTAlign, teacher start": {**STARTED, "metric": MEAN}}
        yield Panel("many pairs, one seed", "pairs", rows, columns, lab.seeds[:1])


def by_shift(lab: Lab, side: str = "total", fixed: int | None = None) -> Panels:
    """`fixed` keeps images (0) or texts (1) of the pairs' source."""
    own, rows = lab.sources.label, pools(lab)
    if fixed is not None:
        rows = {name: c for name, c in rows.items() if name.split("|")[fixed] == own}
    columns = {"distance": {"metric": f"shift/{side}"}, "MeanR@1": {"metric": MEAN}}
    if rows:
        yield Panel("", "images|texts", rows, columns, lab.seeds[:1], form=".3f")


def f7(lab: Lab) -> Panels:
    names = (*lab.sources.encoders, *lab.sources.weak_encoders)
    rows = {name: {**OURS, "data.encoders": name} for name in names}
    columns = {**PERCENT, "MeanR@1": {"metric": MEAN}}
    if len(rows) > 2:
        yield Panel("", "encoders", rows, columns, lab.seeds[:1])


# --- figures of the appendix -------------------------------------------------------------------


def less_memory_and_time(memory: Panel, time: Panel, iterations: Panel) -> Verdict:
    parts = {"memory": takes_more(memory, UNROLLED, "memory")}
    return joined({**parts, "time": takes_more(time, IMPLICIT, "time")})


def every_metric(lab: Lab, kind: str) -> Panels:
    for name, column in retrieval(lab).items():
        if column["metric"]:
            yield by_count(lab, kind, name, column["metric"])


def best_alphas(*panels: Panel) -> Verdict:
    best = [[float(list(p.columns)[i]) for i in p.means().argmax(1)] for p in panels]
    held = best[0] == sorted(best[0], reverse=True), len(set(best[1][:-1])) == 1
    claims = "falling with pairs", "moved by noise alone"
    parts = {}
    for claim, as_claimed, panel, alphas in zip(claims, held, panels, best, strict=True):
        listed = ", ".join(f"{r}: {a:g}" for r, a in zip(panel.rows, alphas, strict=True))
        # An alpha that never moves says nothing of when it would.
        parts[claim] = Verdict(as_claimed if len(set(alphas)) > 1 else None, f"best at {listed}")
    return joined(parts)


def fa4(lab: Lab) -> Panels:
    alphas = lab.sizes.alphas
    columns = {f"{a:g}": {**OURS, "metric": MEAN, "sotalign.alpha": a} for a in alphas}
    pairs: Rows = {f"{n} pairs": {"data.n_pairs": n} for n in lab.sizes.few_pairs}
    noise: Rows = {f"p={p:g}": {"data.noise": p} for p in lab.sizes.pool_noise}
    for name, rows in {"pairs": pairs, "share of noise": noise}.items():
        yield Panel(name, name, rows, columns, lab.seeds[:1])


def smaller_star(*panels: Panel) -> Verdict:
    parts = {}
    for panel in panels[:-1]:
        means = panel.means()
        i, j = np.unravel_index(means.argmax(), means.shape)
        row, column = list(panel.rows)[i], list(panel.columns)[j]
        smaller = float(column.split("=")[1]) < float(row.split("=")[1])
        parts[panel.name] = Verdict(smaller, f"best {means.max():.1f} at {row}, {column}")
    return joined(parts)


def fa5(lab: Lab) -> Panels:
    """Both at two numbers of pairs; the usual ε at more of them."""
    usual = {**OURS, "metric": MEAN, **lab.sizes.epsilon_changes}
    rows = {f"ε={e:g}": {"sotalign.epsilon": e} for e in lab.sizes.epsilons}
    stars: Rows = {f"ε*={e:g}": {"sotalign.epsilon_star": e} for e in lab.sizes.epsilons}
    pairs: Rows = {f"{n} pairs": {**usual, "data.n_pairs": n} for n in lab.sizes.few_pairs}
    for name in list(pairs)[:2]:
        columns = {star: {**changes, **pairs[name]} for star, changes in stars.items()}
        yield Panel(name, "MeanR@1", rows, columns, lab.seeds[:1])
    yield Panel("ε=0.05", "MeanR@1", stars, pairs, lab.seeds[:1])


def noise_is_furthest(*panels: Panel) -> Verdict:
    closer = [max(row[:-1]) < row[-1] for panel in panels for row in panel.means()[:-1]]
    return Verdict(all(closer), f"so for {sum(closer)} of {len(closer)} sets")


def fa8(lab: Lab) -> Sequence[Panel]:
    made = []
    for side, title in (("x", "images"), ("y", "texts")):
        names = [n for n in (*lab.sources.collections, "noise") if lab.sources.has(n, side)]
        shown = {name: lab.sources.label if name == MAIN else name for name in names}
        rows = {shown[n]: {"left": n, "side": side} for n in names}
        columns = {shown[n]: {"right": n, "metric": "between/distance"} for n in names}
        made.append(Panel(title, "distance", rows, columns, lab.seeds[:1], form=".3f"))
    return made if all(len(panel.rows) > 2 for panel in made) else []


def fa9(lab: Lab, source: str | None = None) -> Panels:
    source = source or lab.sources.satellite
    rows = {f"{n}": lab.alone(source, n) for n in lab.sizes.few_pairs}
    for k in (1, 5, 10) if lab.sources.has(source, "test") else ():
        yield Panel(f"R@{k}", "pairs", rows, two_lines(f"test/mean/R@{k}"), lab.seeds[:1])


# --- why claims did not hold ---------------------------------------------------------------------


def v2(lab: Lab) -> Panels:
    """Causes that were tried, on the test split, and none of them taken into a table."""
    if lab.sources.given:
        return

    def causes(*names: str) -> Rows:
        changes: Rows = {
            "SOTAlign": {},
            "alpha 1e-3": {"sotalign.alpha": 1e-3},
            "alpha 3e-4": {"sotalign.alpha": 3e-4},
            "200 steps": SHORT,
            "epsilon* 0.02": {"sotalign.epsilon_star": 0.02},
            "teacher start": {"heads.init": "teacher"},
        }
        return {name: {**OURS, **changes[name]} for name in names or changes}

    seeds, recalls = lab.seeds[:1], {f"R@{k}": {"metric": f"test/mean/R@{k}"} for k in (1, 10)}
    source = lab.sources.satellite
    rows = causes(*(("SOTAlign", "alpha 1e-3") if lab.scale == "quick" else ()))
    rows = {n: {**lab.alone(source, lab.sizes.n_pairs), **c} for n, c in rows.items()}
    yield Panel(f"T7, {source}", "tried", rows, recalls, seeds)
    if lab.scale == "quick":
        return

    every = {"train.pair_batch": lab.sizes.t1_pairs, "train.unpaired_batch": 2048, **SHORT}
    every["data.n_pairs"] = lab.sizes.t1_pairs
    rows = {"SAIL": {**SAIL, **every}}
    rows |= {f"SOTAlign, alpha {a}": {**OURS, **every, "sotalign.alpha": a} for a in (1e-4, 3e-4)}
    columns = {"val R@1": {"metric": "val/mean/R@1"}, **recalls}
    yield Panel("F5, all 10,000 pairs in a batch", "tried", rows, columns, seeds, form=".2f")

    rows = causes("SOTAlign", "alpha 1e-3", "epsilon* 0.02", "teacher start")
    contrastive = {"metric": MEAN, "teacher.kind": "contrastive"}
    columns = {n: {**contrastive, "sotalign.divergence": n.lower()} for n in ("InfoNCE", "KLOT")}
    yield Panel("T1, contrastive teacher, MeanR@1", "tried", rows, columns, seeds)

    shifted = {"RSICD|RSICD", "COCO|RSICD", "COCO|Flickr8k"}
    columns = {n: {**c, "metric": MEAN} for n, c in pools(lab).items() if n in shifted}
    rows = rows | causes("alpha 3e-4")
    yield Panel("A1, MeanR@1", "tried", rows, columns, seeds)

    sue = {**OURS, **SMALL, "data.pairs": "Flickr8k", "data.n_pairs": 500, "data.split": "sue"}
    rows = {f"MLP, d={d}": {**sue, "heads.dim": d} for d in (8, 64, 512)}
    rows["MLP, d=8, ten times the alpha"] = {**sue, "sotalign.alpha": 0.06}
    rows["MLP, d=8, a tenth of the rate"] = {**sue, "train.learning_rate": 2e-4}
    rows["MLP, d=8, 200 steps"] = {**sue, **SHORT}
    yield Panel("A6, Flickr8k", "tried", rows, {"R@5": {"metric": "test/mean/R@5"}}, seeds)

    rows = {f"alpha {a:g}": {**OURS, "sotalign.alpha": a} for a in (1e-3, 3e-3)}
    noise: Rows = {"no noise": {"metric": MEAN}, "half noise": {"metric": MEAN, "data.noise": 0.5}}
    yield Panel("FA4, three seeds", "tried", rows, noise, lab.seeds)
    noise = {"half noise, twice the rows": {**noise["half noise"], "train.unpaired_batch": 2048}}
    yield Panel("FA4, one seed", "tried", rows, noise, seeds)

    texts = [name for name in (*lab.sources.collections, "noise") if name != source]
    rows = {source: {"left": source, "side": "y", "centred": True}}
    columns = {
        lab.sources.label if n == MAIN else n: {"right": n, "metric": "between/distance"}
        for n in texts
    }
    yield Panel("FA8, texts less their set's mean", "tried", rows, columns, seeds, form=".3f")


def as_diagnosed(panel: Panel) -> Verdict:
    """How often SOTAlign was above SAIL with pools that `diagnose` calls near, far, or random."""
    gains: dict[str, list[float]] = {place(share): [] for share in (0.0, NEAR, FAR)}
    for row in panel.rows:
        images, texts, sail, ours = (panel.mean(row, column) for column in panel.columns)
        gains[place(max(images, texts) / 100)].append(ours - sail)
    parts = [
        f"{word}: SOTAlign - SAIL {', '.join(f'{gain:+.1f}' for gain in found)}"
        for word, found in gains.items()
    ]
    return Verdict(None, "; ".join(parts))


def v3(lab: Lab) -> Panels:
    """The pools of A1, and some that are partly noise."""
    rows: Rows = {f"{p:g} of noise": {"data.noise": p} for p in lab.sizes.pool_noise if 0 < p < 1}
    for name, changes in pools(lab).items():
        rows[name] = {key: value for key, value in changes.items() if key != "method"}
    ways = {"images, % of the way": "share/x", "texts, % of the way": "share/y"}
    columns = {name: {**OURS, "metric": metric} for name, metric in ways.items()}
    if len(rows) > 1:
        yield Panel("", "images|texts", rows, columns | two_lines(MEAN), lab.seeds[:1])


# --- all of them, in the paper's order ----------------------------------------------------------

_costs = functools.partial(plots.lines, log=True)
_alphas = functools.partial(plots.lines, columns="alpha")
_encoders = (MAIN, "IMAGE+TEXT")
_sue = ("COCO100", "F30k500", "Polyvore500")
_seven_sets = tuple(name for name in CLASSES if name != "Intel")
_falls = "MeanR@1 falls with the distance of the pools from the pairs"
_above_all = "SOTAlign is above every method with the same pairs, in every column"
_above_at_every_number = "SOTAlign is above SAIL at every number of pairs"
_falling = functools.partial(correlated, sign=-1)
# fmt: off
_ALL = (
    Entry("V1", "Options tried on validation, as many for every method",
          "options of the other tables, the best of these (no claim of the paper)",
          v1, best_rows, word="chosen"),
    Entry("V2", "Where a claim did not hold: causes tried, on the test split",
          "none of these changes a table (no claim of the paper)", v2, best_rows, word="tried"),
    Entry("V3", "What `diagnose` says of unpaired rows, and what they gave",
          "near pools help, far ones may, random ones do not (no claim of the paper)",
          v3, as_diagnosed, UNPAIRED, word="checked", whole="runs"),
    # Tables of the main text.
    Entry("T1", "Linear teachers and divergences",
          "KLOT is above InfoNCE, InfoNCE above CKA, and KLOT above its teacher alone, for every "
          "teacher", t1, in_order, paper="T1_divergence_x_teacher"),
    Entry("T2", "Sources of pairs; unpaired rows come from one source",
          "SOTAlign is above SAIL whatever the pairs' source", t2, ours_above_sail,
          (MAIN, "CC3M-synth", "CC12M", "COCO"), "T2_paired_source"),
    Entry("T3", "Pairs of encoders", "SOTAlign is above SAIL for every pair of encoders",
          by_encoders, ours_above_sail, _encoders, "T3_A2_encoders"),
    Entry("T4", "Retrieval by method", _above_all,
          retrieval_by_method, ours_above_all, (MAIN, "Flickr30k"), "T4_A4_retrieval"),
    Entry("T5", "Zero-shot classification by method", _above_all,
          classes_by_method, ours_above_all, (MAIN, *FIVE_SETS), "T5_A5_classification"),
    Entry("T6", "The SUE protocol: very few pairs",
          "SOTAlign is above SUE, contrastive training and CSA",
          few_pairs, above_sue, _sue, "T6_A6_SUE_protocol"),
    Entry("T7", "Satellite images and speech", "SOTAlign is above CCA, SAIL and STRUCTURE on both",
          t7, above_the_first_three, ("SkyScript", "LibriSpeech"), "T7_domains"),
    # Tables of the appendix.
    Entry("A1", "Sources of unpaired images|texts",
          "SOTAlign is above SAIL (by MeanR@1) whatever the unpaired rows' source",
          a1, real_pools_above_sail, UNPAIRED, "A1_unpaired_source"),
    Entry("A2", "Pairs of encoders, with their mutual k-NN",
          "SOTAlign is above SAIL for every pair of encoders",
          functools.partial(by_encoders, knn=True), ours_above_sail,
          _encoders, "T3_A2_encoders"),
    Entry("A3", "Noise in the teacher's pairs",
          "with half of the teacher's pairs mismatched, SOTAlign is still above SAIL",
          a3, half_above_sail, paper="A3_teacher_noise"),
    Entry("A4", "Retrieval by method, R@1 and R@5", _above_all,
          functools.partial(retrieval_by_method, cuts=(1, 5)), ours_above_all,
          (MAIN, "Flickr30k"), "T4_A4_retrieval"),
    Entry("A5", "Zero-shot classification by method, all sets", f"{_above_all} but Aircraft",
          functools.partial(classes_by_method, sets=CLASSES),
          functools.partial(ours_above_all, but=("Aircraft", "Intel")),
          (MAIN, *_seven_sets), "T5_A5_classification"),
    Entry("A6", "The SUE protocol, with heads as small as SUE's, too",
          "SOTAlign is above SUE, contrastive training and CSA, also with heads as small as SUE's",
          functools.partial(few_pairs, ours={**SUE_SMALL, **SUE_LARGE}), above_sue,
          _sue, "T6_A6_SUE_protocol"),
    # Figures of the main text.
    Entry("F3", "Memory of KLOT's gradient, by the way it is computed",
          "the closed form takes less memory than unrolling (paper: up to 100 times)",
          functools.partial(costs, kinds=("memory",), ways=(CLOSED, UNROLLED)),
          functools.partial(takes_more, other=UNROLLED, what="memory"), (), plot=_costs),
    Entry("F4", "Convergence of Sinkhorn after 100 iterations",
          "the smaller epsilon, the further 100 iterations are from convergence",
          f4, worse_at_every_step, (), plot=_costs, whole="errors"),
    Entry("F5", "How many pairs, and how many unpaired rows",
          "SOTAlign is above SAIL at every number of pairs, by less when pairs abound; more "
          "unpaired rows help", f5, pairs_and_unpaired, plot=plots.lines),
    Entry("F6", "Retrieval against the shift of the unpaired rows", f"{_falls} (paper: r = -0.76)",
          by_shift, functools.partial(_falling, paper=-0.76), UNPAIRED, plot=plots.scatter),
    Entry("F7", "Retrieval against the encoders' mutual k-NN",
          "mutual k-NN predicts MeanR@1 (paper: r = 0.95)",
          f7, functools.partial(correlated, sign=1, paper=0.95), _encoders, plot=plots.scatter),
    # Figures of the appendix.
    Entry("FA1", "Memory, time (ratios alone count) and iterations of KLOT's gradient",
          "the closed form takes less memory than unrolling and less time than implicit "
          "differentiation (paper: up to 100 and 50 times)",
          costs, less_memory_and_time, (), plot=_costs),
    Entry("FA2", "How many pairs: classification and both directions", _above_at_every_number,
          functools.partial(every_metric, kind="pairs"), each(second_above_first),
          plot=plots.lines),
    Entry("FA3", "How many unpaired rows: classification and both directions",
          "more unpaired rows help",
          functools.partial(every_metric, kind="unpaired"), each(more_helps), plot=plots.lines),
    Entry("FA4", "The weight of KLOT, by pairs and by noise in the pools",
          "the best alpha falls with more pairs, and noise moves it only when the pools are all "
          "noise", fa4, best_alphas, plot=_alphas, whole="runs"),
    Entry("FA5", "The regularisation ε of the student's plan, ε* of the teacher's",
          "the best ε* is smaller than ε, at every number of pairs",
          fa5, smaller_star, plot=plots.heat_maps, whole="runs"),
    Entry("FA6", "Retrieval against the shift of the unpaired images alone", _falls,
          functools.partial(by_shift, side="x", fixed=1), _falling, UNPAIRED, plot=plots.scatter),
    Entry("FA7", "Retrieval against the shift of the unpaired texts alone", _falls,
          functools.partial(by_shift, side="y", fixed=0), _falling, UNPAIRED, plot=plots.scatter),
    Entry("FA8", "Distances between sets of images and of texts",
          "real sets are closer to each other than to random directions (ours: the paper draws "
          "none)", fa8, noise_is_furthest, UNPAIRED, plot=plots.heat_maps, whole="distances"),
    Entry("FA9", "Satellite images, 10,000 test rows: how many pairs", _above_at_every_number,
          fa9, each(second_above_first), ("SkyScript",), plot=plots.lines),
    Entry("FA10", "Satellite images, 30,000 test rows: how many pairs", _above_at_every_number,
          functools.partial(fa9, source="SkyScript30k"), each(second_above_first),
          ("SkyScript30k",), plot=plots.lines),
)
# fmt: on
ENTRIES: dict[str, Entry] = {entry.name: entry for entry in _ALL}
"""All of them by name."""
