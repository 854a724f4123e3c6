"""Every table and figure of the paper with numbers, in its order: T1-T7, A1-A6, F3-F7, FA1-FA10.

An entry says what to run, what the paper concludes from it, and how to judge that. Where the
paper's data are not at hand, photographs stand in for them, see `sources`.
"""

import functools
import itertools
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from experiments.paper import plots
from experiments.paper.lab import ARMS, Lab
from experiments.paper.panels import (
    Panel,
    Verdict,
    all_above,
    correlated,
    gap,
    joined,
    paper_results,
)
from experiments.paper.sources import MAIN

Found = Mapping[str, Panel]
Rows = dict[str, dict[str, Any]]
MEAN = "test/mean/R@1"
SAIL: dict[str, Any] = {"method": "sail"}
OURS: dict[str, Any] = {"method": "sotalign"}
UNROLLED, IMPLICIT, CLOSED = ARMS.values()


class Entry:
    """A table or figure of the paper; its docstring says what it shows.

    Attributes:
        claim: what the paper concludes.
        is_claim: False for what the paper does not claim.
        needs: the paper's data, as sources of --files.
        paper: key of the paper's table, shown beside ours or below.
        plot: draws a figure into a file.
    """

    claim: str
    is_claim: bool = True
    needs: tuple[str, ...] = ("main",)
    paper: str | None = None
    plot: Callable[[Found, pathlib.Path], None] | None = None

    @property
    def name(self) -> str:
        """T1 (main text), A1 (appendix), F3 or FA1 (figures)."""
        return type(self).__name__

    @property
    def title(self) -> str:
        return (self.__doc__ or "").strip().rstrip(".")

    def panels(self, lab: Lab) -> Sequence[Panel]:
        """For the data at hand; none when they do not allow it."""
        raise NotImplementedError

    def judge(self, found: Found) -> Verdict:
        """Whether the claim held, from the panels by name."""
        raise NotImplementedError


# --- what several entries share ----------------------------------------------------------------


def retrieval(lab: Lab) -> Rows:
    """Columns of most tables: classification, text to image, image to text."""
    classes = "ImageNet/top1" if lab.sources.has("ImageNet", "classes") else None
    ways = {"T2I R@1": "test/y_to_x/R@1", "I2T R@1": "test/x_to_y/R@1"}
    return {name: {"metric": m} for name, m in {"zero-shot": classes, **ways}.items()}


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


def ours_above_sail(panel: Panel) -> Verdict:
    """Claim on the rows of `sail_and_ours`."""
    sources = dict.fromkeys(row.rpartition("/")[0] for row in panel.rows)
    but = [name for name in panel.columns if name not in NAMED]
    table = paper_results()[panel.paper or ""]
    gains = [
        table[row][c] - table[row.replace("SOTAlign", "SAIL")][c]
        for row, c in itertools.product(table, NAMED.values())
        if row.endswith("/SOTAlign")
    ]
    pairs = [(f"{source}/SOTAlign", f"{source}/SAIL") for source in sources]
    return rows_above(panel, pairs, but, paper=float(np.mean(gains)))


def two_lines(metric: str) -> Rows:
    return {"SAIL": {**SAIL, "metric": metric}, "SOTAlign": {**OURS, "metric": metric}}


def second_above_first(panel: Panel) -> Verdict:
    """Claim on the columns of `two_lines`."""
    gaps = {f"SOTAlign - SAIL ({r})": panel.gap((r, "SOTAlign"), (r, "SAIL")) for r in panel.rows}
    return all_above(gaps)


# --- what was chosen on validation -------------------------------------------------------------

BOTH = ("weight_text", "weight_image")
WEIGHTS = ((1.0, 0.0), (0.0, 1.0), (0.1, 0.1), (1.0, 1.0), (10.0, 10.0))
TRIALS: dict[str, tuple[tuple[str, ...], tuple[tuple[float, ...], ...]]] = {
    "structure": (("weight",), ((0.1,), (1.0,), (10.0,), (100.0,), (1000.0,))),
    "structure_semi": (("weight",), ((0.1,), (1.0,), (10.0,), (100.0,), (1000.0,))),
    "nnclr": (BOTH, WEIGHTS),
    "sclip": (BOTH, WEIGHTS),
}
"""Points of the paper's grids by method, as many for each."""


class V1(Entry):
    """Options tried on validation, as many for every method."""

    claim = "options of the other tables, the best of these (no claim of the paper)"
    is_claim = False

    def panels(self, lab: Lab) -> Sequence[Panel]:
        def rate(method: str, value: float) -> tuple[str, dict[str, Any]]:
            return f"{method}: rate {value:.2g}", {"method": method, "train.learning_rate": value}

        def alpha(value: float) -> tuple[str, dict[str, Any]]:
            return f"sotalign: alpha {value:.2g}", {**OURS, "sotalign.alpha": value}

        rows: Rows = dict(rate(m, r) for m in ("sail", "sail_semi") for r in lab.sizes.rates)
        for method, (names, points) in TRIALS.items():
            for point in points[: len(lab.sizes.rates)]:
                values = dict(zip(names, point, strict=True))
                label = ", ".join(f"{name} {value:g}" for name, value in values.items())
                changes = {f"{method}.{name}": value for name, value in values.items()}
                rows[f"{method}: {label}"] = {"method": method, **changes}
        rows |= dict(map(alpha, lab.sizes.alphas[: len(lab.sizes.rates)]))
        many: Rows = dict(rate("sail", r) for r in lab.sizes.many_rates)
        many |= dict(map(alpha, lab.sizes.many_alphas))
        made = []
        for pairs, tried in ((lab.sizes.n_pairs, rows), (lab.sizes.t1_pairs, many)):
            columns = {"val R@1": {"metric": "val/mean/R@1", "data.n_pairs": pairs}}
            if tried:
                seeds = lab.seeds[:1]
                made.append(Panel(f"{pairs} pairs", "trial", tried, columns, seeds, form=".2f"))
        return made

    def judge(self, found: Found) -> Verdict:
        parts = []
        for name, panel in found.items():
            for method in dict.fromkeys(row.split(":")[0] for row in panel.rows):
                own = [row for row in panel.rows if row.startswith(f"{method}:")]
                best = max(own, key=lambda row: np.nan_to_num(panel.mean(row, "val R@1")))
                parts.append(f"{best.replace(':', '')} at {name}")
        return Verdict(None, "best " + "; ".join(parts))


# --- tables of the main text -------------------------------------------------------------------


class T1(Entry):
    """Linear teachers and divergences."""

    claim = (
        "KLOT is above InfoNCE, InfoNCE above CKA, and KLOT above its teacher alone, for every "
        "teacher"
    )
    paper = "T1_divergence_x_teacher"

    def panels(self, lab: Lab) -> Sequence[Panel]:
        kinds = {"CKA": "cka", "InfoNCE": "infonce", "KLOT": "klot"}
        rows: Rows = {"None": {"method": "teacher"}}
        rows |= {name: {**OURS, "sotalign.divergence": kind} for name, kind in kinds.items()}
        made: list[Panel] = []
        for pairs, seeds in ((lab.sizes.n_pairs, lab.seeds), (lab.sizes.t1_pairs, lab.seeds[:1])):
            columns = {
                name: {"metric": MEAN, "teacher.kind": name.lower(), "data.n_pairs": pairs}
                for name in ("Procrustes", "CCA", "Contrastive")
            }
            title = f"{pairs} pairs" if made else ""
            made.append(Panel(title, "divergence", rows, columns, seeds, self.paper))
        return made if lab.sizes.t1_pairs else made[:1]

    def judge(self, found: Found) -> Verdict:
        order = [("KLOT", "InfoNCE"), ("InfoNCE", "CKA"), ("KLOT", "None")]
        parts = {name or "usual pairs": rows_above(panel, order) for name, panel in found.items()}
        return joined(parts) if len(parts) > 1 else parts["usual pairs"]


class T2(Entry):
    """Sources of pairs; unpaired rows come from one source."""

    claim = "SOTAlign is above SAIL whatever the pairs' source"
    needs = ("main", "CC3M-synth", "CC12M", "COCO")
    paper = "T2_paired_source"

    def panels(self, lab: Lab) -> Sequence[Panel]:
        at = lab.sources
        others = [name for name in at.collections if name != MAIN and at.has(name, "xy")]
        rows = sail_and_ours({at.label: {}, **{name: {"data.pairs": name} for name in others}})
        made = Panel("", "pairs/method", rows, retrieval(lab), lab.seeds, self.paper, NAMED)
        return [made] if others else []

    def judge(self, found: Found) -> Verdict:
        return ours_above_sail(found[""])


class T3(Entry):
    """Pairs of encoders."""

    claim = "SOTAlign is above SAIL for every pair of encoders"
    needs = ("main", "IMAGE+TEXT")
    paper = "T3_A2_encoders"
    columns: ClassVar[Rows] = {}

    def panels(self, lab: Lab) -> Sequence[Panel]:
        rows = sail_and_ours({name: {"data.encoders": name} for name in lab.sources.encoders})
        columns, named = {**self.columns, **retrieval(lab)}, {**NAMED, KNN: "mutual_kNN_pct"}
        seeds = lab.sizes.encoder_seeds
        made = Panel("", "encoders/method", rows, columns, seeds, self.paper, named)
        return [made] if len(rows) > 2 else []

    def judge(self, found: Found) -> Verdict:
        return ours_above_sail(found[""])


KNN = "mutual k-NN (%)"
ALL_PAIRS, OURS_SEMI, TEACHER_START = (
    "sup/SAIL, many more pairs",
    "semi/SOTAlign",
    "semi/SOTAlign, teacher start",
)


class T4(Entry):
    """Retrieval by method."""

    claim = "SOTAlign is above every method with the same pairs, in every column"
    needs: tuple[str, ...] = ("main", "Flickr30k")
    paper = "T4_A4_retrieval"
    cuts: tuple[int, ...] = (1,)
    but: tuple[str, ...] = ()

    def columns(self, lab: Lab) -> tuple[Rows, dict[str, str]]:
        """What is shown of every method, and the paper's names for it."""
        flickr, named = lab.sources.flickr, {}
        columns: Rows = {}
        ways = {"T2I": "y_to_x", "I2T": "x_to_y"}
        for source, (way, side), k in itertools.product(("test", flickr), ways.items(), self.cuts):
            here = source == "test" or lab.sources.has(source, "test")
            label = f"{'' if source == 'test' else f'{source} '}{way} R@{k}"
            columns[label] = {"metric": f"{source}/{side}/R@{k}" if here else None}
            named[label] = f"{'COCO' if source == 'test' else 'F30k'}_{way}_R{k}"
        return columns, named

    def panels(self, lab: Lab) -> Sequence[Panel]:
        """Every method that the paper compares, and SOTAlign from the teacher's projection."""
        rows: Rows = {ALL_PAIRS: {**SAIL, "data.n_pairs": lab.sizes.all_pairs}}
        for kind, names in {"sup": "SAIL STRUCTURE", "semi": "SAIL STRUCTURE NNCLR S-CLIP"}.items():
            for name in names.split():
                both = kind == "semi" and name in ("SAIL", "STRUCTURE")
                method = name.lower().replace("-", "") + ("_semi" if both else "")
                rows[f"{kind}/{name}"] = {"method": method}
        rows |= {OURS_SEMI: OURS, TEACHER_START: {**OURS, "heads.init": "teacher"}}
        columns, named = self.columns(lab)
        named[ALL_PAIRS] = "sup/SAIL-1M"
        return [Panel("", "method", rows, columns, lab.seeds, self.paper, named)]

    def judge(self, found: Found) -> Verdict:
        """Columns where no method is clearly (three times) above chance judge nothing."""
        panel = found[""]
        chance = {name: changes.get("chance", 0.0) for name, changes in panel.columns.items()}
        useless = [
            name
            for name in panel.columns
            if (means := [panel.mean(row, name) for row in panel.rows if len(panel.at(row, name))])
            and max(means) <= 3 * chance[name]
        ]
        peers = [row for row in panel.rows if row not in (ALL_PAIRS, OURS_SEMI, TEACHER_START)]
        verdict = rows_above(panel, [(OURS_SEMI, row) for row in peers], [*useless, *self.but])
        note = f"; near chance for every method: {', '.join(useless)}" if useless else ""
        return verdict._replace(text=verdict.text + note)


class T5(T4):
    """Zero-shot classification by method."""

    sets: tuple[str, ...] = ("Food101", "CIFAR10", "CIFAR100", "DTD", "ImageNet")
    needs = ("main", *sets)
    paper = "T5_A5_classification"

    def columns(self, lab: Lab) -> tuple[Rows, dict[str, str]]:
        classes = {"Food101": 101, "CIFAR10": 10, "DTD": 47, "Flowers": 102, "ImageNet": 1000}
        extra = ("Intel",) if self.but and lab.sources.has("Intel", "classes") else ()
        columns: Rows = {
            name: {
                "metric": f"{name}/top1" if lab.sources.has(name, "classes") else None,
                "chance": 100 / {**classes, "Intel": 6}.get(name, 100),
            }
            for name in (*self.sets, *extra)
        }
        return columns, {}


SMALL = {"heads.kind": "mlp", "heads.dim": 8}


class T6(Entry):
    """The SUE protocol: very few pairs."""

    claim = "SOTAlign is above SUE, contrastive training and CSA"
    needs = ("COCO100", "F30k500", "Polyvore500")
    paper = "T6_A6_SUE_protocol"
    peers: ClassVar[Rows] = {
        "CSA": {"method": "csa"},
        "Contrastive": {"method": "contrastive_mlp", **SMALL},
        "SUE": {"method": "sue"},
    }
    ours: ClassVar[Rows] = {"SOTAlign (linear, d=512)": {**OURS, "heads.dim": 512}}

    def panels(self, lab: Lab) -> Sequence[Panel]:
        columns, named = {}, {}
        for source, pairs, paper in lab.sources.sue:
            changes = {"data.pairs": source, "data.n_pairs": pairs, "data.split": "sue"}
            for way, side in {"I2T": "x_to_y", "T2I": "y_to_x"}.items():
                shown = lab.sources.label if source == MAIN else source
                label = f"{shown}, {pairs} pairs, {way} R@5"
                columns[label] = {**changes, "metric": f"test/{side}/R@5"}
                named[label] = f"{paper}_{way}"
        rows = {**self.peers, **self.ours}
        made = Panel("", "method", rows, columns, lab.seeds, self.paper, named)
        return [made] if columns else []

    def judge(self, found: Found) -> Verdict:
        """A baseline that stays at chance, as a collapsed network does, is no evidence."""
        panel, chance = found[""], 100 * 5 / 400
        means = {row: [panel.mean(row, column) for column in panel.columns] for row in panel.rows}
        useless = [row for row in panel.rows if max(means[row]) <= 1.5 * chance]
        peers = [row for row in self.peers if row not in useless]
        verdict = rows_above(panel, itertools.product(self.ours, peers))
        note = f"; at chance, and so no evidence: {', '.join(useless)}" if useless else ""
        return verdict._replace(text=verdict.text + note)


class T7(Entry):
    """Satellite images and speech."""

    claim = "SOTAlign is above CCA, SAIL and STRUCTURE on both"
    needs = ("SkyScript", "LibriSpeech")
    paper = "T7_domains"

    def panels(self, lab: Lab) -> Sequence[Panel]:
        columns, named = {}, {}
        for source, paper, pairs, ways in (
            (
                lab.sources.satellite,
                "SkyScript",
                lab.sizes.satellite,
                {"T2I R@10": "y_to_x", "I2T R@10": "x_to_y"},
            ),
            ("LibriSpeech", "Libri", 1000, {"S2T R@1": "x_to_y", "T2S R@1": "y_to_x"}),
        ):
            for way, side in ways.items():
                metric = (
                    f"test/{side}/{way.split()[1]}" if lab.sources.has(source, "test") else None
                )
                columns[f"{source} {way}"] = {**lab.alone(source, pairs), "metric": metric}
                named[f"{source} {way}"] = f"{paper}_{way.replace(' R@', '_R')}"
        names = ("CCA", "SAIL", "STRUCTURE", "SOTAlign")
        rows: Rows = {name: {"method": name.lower()} for name in names}
        made = Panel("", "method", rows, columns, lab.seeds, self.paper, named)
        return [made] if any(changes["metric"] for changes in columns.values()) else []

    def judge(self, found: Found) -> Verdict:
        return rows_above(found[""], [("SOTAlign", row) for row in ("CCA", "SAIL", "STRUCTURE")])


# --- tables of the appendix --------------------------------------------------------------------

UNPAIRED = ("main", "CC3M-synth", "CC12M", "ImageNet", "COCO", "WikiText103")


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


class A1(Entry):
    """Sources of unpaired images|texts."""

    claim = "SOTAlign is above SAIL (by MeanR@1) whatever the unpaired rows' source"
    needs = UNPAIRED
    paper = "A1_unpaired_source"

    def panels(self, lab: Lab) -> Sequence[Panel]:
        rows = pools(lab)
        if not rows:
            return []
        columns = {**retrieval(lab), "MeanR@1": {"metric": MEAN}}
        rows = {"SAIL": {**next(iter(rows.values())), **SAIL}, **rows}
        return [Panel("", "images|texts", rows, columns, lab.sizes.pool_seeds, self.paper, NAMED)]

    def judge(self, found: Found) -> Verdict:
        real = [row for row in found[""].rows if "|" in row and "noise" not in row]
        table = paper_results()[self.paper]
        means = {row: (v["COCO_T2I_R1"] + v["COCO_I2T_R1"]) / 2 for row, v in table.items()}
        paper = np.mean([mean - means["SAIL"] for row, mean in means.items() if "|" in row])
        return rows_above(found[""], [(r, "SAIL") for r in real], tuple(NAMED), float(paper))


class A2(T3):
    """Pairs of encoders, with their mutual k-NN."""

    columns: ClassVar[Rows] = {KNN: {"metric": "mutual_knn/percent"}}


class A3(Entry):
    """Noise in the teacher's pairs."""

    claim = "with half of the teacher's pairs mismatched, SOTAlign is still above SAIL"
    paper = "A3_teacher_noise"

    def panels(self, lab: Lab) -> Sequence[Panel]:
        shares = lab.sizes.teacher_noise
        columns: Rows = {f"p={p}": {**OURS, "teacher.noise": p, "metric": MEAN} for p in shares}
        columns["SAIL"] = {**SAIL, "metric": MEAN}
        return [Panel("", "MeanR@1", {"SOTAlign": {}}, columns, lab.seeds, self.paper)]

    def judge(self, found: Found) -> Verdict:
        worst, sail = ("SOTAlign", "p=0.5"), ("SOTAlign", "SAIL")
        return all_above({"p=0.5 - SAIL": found[""].gap(worst, sail)})


class A4(T4):
    """Retrieval by method, R@1 and R@5."""

    cuts = (1, 5)


class A5(T5):
    """Zero-shot classification by method, all sets."""

    claim = f"{T5.claim} but Aircraft"
    but = ("Aircraft", "Intel")  # the paper does not claim the one and has not the other
    sets = ("Food101", "CIFAR10", "CIFAR100", "Aircraft", "DTD", "Flowers", "ImageNet")
    needs = ("main", *sets)


class A6(T6):
    """The SUE protocol, with heads as small as SUE's, too."""

    claim = f"{T6.claim}, also with heads as small as SUE's"
    ours: ClassVar[Rows] = {
        "SOTAlign (MLP, d=8)": {**OURS, **SMALL},
        **T6.ours,
    }


# --- figures of the main text ------------------------------------------------------------------


def by_epsilon(lab: Lab, name: str, form: str, columns: Mapping[str, str]) -> Panel:
    rows = {f"{e:g}": {"epsilon": e} for e in lab.sizes.solver_epsilons}
    shown = {title: {"metric": metric} for title, metric in columns.items()}
    return Panel(name, "epsilon", rows, shown, (0,), form=form)


def costs(lab: Lab, name: str, quantity: str, form: str, *ways: str) -> Panel:
    """What ways to the gradient take."""
    metrics = {w: f"gradient/{arm}/{quantity}" for arm, w in ARMS.items() if w in ways}
    return by_epsilon(lab, name, form, metrics)


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


class F3(Entry):
    """Memory of KLOT's gradient, by the way it is computed."""

    claim = "the closed form takes less memory than unrolling (paper: up to 100 times)"
    needs = ()
    plot = staticmethod(functools.partial(plots.lines, ylabel="", log=True))

    def panels(self, lab: Lab) -> Sequence[Panel]:
        return [costs(lab, "memory (MiB)", "memory", ".1f", CLOSED, UNROLLED)]

    def judge(self, found: Found) -> Verdict:
        return takes_more(found["memory (MiB)"], UNROLLED, "memory")


class F4(F3):
    """Convergence of Sinkhorn after 100 iterations."""

    claim = "the smaller epsilon, the further 100 iterations are from convergence"

    def panels(self, lab: Lab) -> Sequence[Panel]:
        names = ("textbook Sinkhorn", "ours")
        return [by_epsilon(lab, "marginal error", ".1e", {n: f"convergence/{n}" for n in names})]

    def judge(self, found: Found) -> Verdict:
        (panel,) = found.values()
        if not panel.complete:
            return Verdict(None, "errors are missing")
        errors = panel.means()[:, 0]
        listed = ", ".join(f"{e:.1e} at {row}" for e, row in zip(errors, panel.rows, strict=True))
        seen = np.maximum(errors, 1e-6)  # below is rounding
        return Verdict(bool((np.diff(seen) >= 0).all() and seen[-1] > seen[0]), listed)


def by_pairs(lab: Lab, name: str, metric: str) -> Panel:
    rows = {f"{n}": {"data.n_pairs": n} for n in lab.sizes.pairs}
    return Panel(name, "pairs", rows, two_lines(metric), lab.seeds)


def by_unpaired(lab: Lab, name: str, metric: str) -> Panel:
    """SAIL reads no unpaired rows: its run is the usual one."""
    rows = {f"{n}": {"data.n_unpaired": n} for n in lab.sizes.unpaired}
    columns = two_lines(metric)
    return Panel(name, "unpaired", rows, columns, lab.seeds)


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


MANY = "many pairs, one seed"


class F5(Entry):
    """How many pairs, and how many unpaired rows."""

    claim = (
        "SOTAlign is above SAIL at every number of pairs, by less when pairs abound; more unpaired "
        "rows help"
    )
    plot = staticmethod(functools.partial(plots.lines, ylabel="%"))

    def panels(self, lab: Lab) -> Sequence[Panel]:
        """With the most pairs, one seed."""
        made = [by_pairs(lab, "pairs", MEAN), by_unpaired(lab, "unpaired", MEAN)]
        if most := lab.sizes.t1_pairs:
            rows = {f"{most}": {"data.n_pairs": most}}
            made.append(Panel(MANY, "pairs", rows, two_lines(MEAN), lab.seeds[:1]))
        return made

    def judge(self, found: Found) -> Verdict:
        parts = {"above SAIL": second_above_first(found["pairs"])}
        if MANY in found:
            parts["with many more pairs"] = second_above_first(found[MANY])
        parts["fading gain"] = fading(found["pairs"])
        return joined({**parts, "more unpaired rows": more_helps(found["unpaired"])})


class F6(Entry):
    """Retrieval against the shift of the unpaired rows."""

    claim = "MeanR@1 falls with the distance of the pools from the pairs (paper: r = -0.76)"
    needs: tuple[str, ...] = UNPAIRED
    plot = staticmethod(plots.scatter)
    side = "total"
    fixed: int | None = None
    r: float | None = -0.76

    def panels(self, lab: Lab) -> Sequence[Panel]:
        """`fixed` keeps images (0) or texts (1) of the pairs' source."""
        own, rows = lab.sources.label, pools(lab)
        if self.fixed is not None:
            rows = {name: c for name, c in rows.items() if name.split("|")[self.fixed] == own}
        columns = {"distance": {"metric": f"shift/{self.side}"}, "MeanR@1": {"metric": MEAN}}
        seeds = lab.sizes.pool_seeds
        return [Panel("", "images|texts", rows, columns, seeds, form=".3f")] if rows else []

    def judge(self, found: Found) -> Verdict:
        return correlated(found[""], sign=-1, paper=self.r)


class F7(F6):
    """Retrieval against the encoders' mutual k-NN."""

    claim = "mutual k-NN predicts MeanR@1 (paper: r = 0.95)"
    needs = T3.needs

    def panels(self, lab: Lab) -> Sequence[Panel]:
        names = (*lab.sources.encoders, *lab.sources.weak_encoders)
        rows = {name: {**OURS, "data.encoders": name} for name in names}
        columns = {**A2.columns, "MeanR@1": {"metric": MEAN}}
        seeds = lab.sizes.encoder_seeds
        return [Panel("", "encoders", rows, columns, seeds)] if len(rows) > 2 else []

    def judge(self, found: Found) -> Verdict:
        return correlated(found[""], sign=1, paper=0.95)


# --- figures of the appendix -------------------------------------------------------------------


class FA1(F3):
    """Memory, time (ratios alone count) and iterations of KLOT's gradient."""

    claim = (
        "the closed form takes less memory than unrolling and less time than implicit "
        "differentiation (paper: up to 100 and 50 times)"
    )

    def panels(self, lab: Lab) -> Sequence[Panel]:
        ways = (CLOSED, UNROLLED, IMPLICIT)
        return [
            costs(lab, "memory (MiB)", "memory", ".1f", *ways),
            costs(lab, "time (s)", "seconds", ".3f", *ways),
            costs(lab, "iterations", "iterations", ".0f", *ways),
        ]

    def judge(self, found: Found) -> Verdict:
        memory = takes_more(found["memory (MiB)"], UNROLLED, "memory")
        return joined({"memory": memory, "time": takes_more(found["time (s)"], IMPLICIT, "time")})


class FA2(F5):
    """How many pairs: classification and both directions."""

    claim = "SOTAlign is above SAIL at every number of pairs"

    def panels(self, lab: Lab) -> Sequence[Panel]:
        return [by_pairs(lab, n, c["metric"]) for n, c in retrieval(lab).items() if c["metric"]]

    def judge(self, found: Found) -> Verdict:
        return joined({name: second_above_first(panel) for name, panel in found.items()})


class FA3(F5):
    """How many unpaired rows: classification and both directions."""

    claim = "more unpaired rows help"

    def panels(self, lab: Lab) -> Sequence[Panel]:
        return [by_unpaired(lab, n, c["metric"]) for n, c in retrieval(lab).items() if c["metric"]]

    def judge(self, found: Found) -> Verdict:
        return joined({name: more_helps(panel) for name, panel in found.items()})


class FA4(Entry):
    """The weight of KLOT, by pairs and by noise in the pools."""

    claim = (
        "the best alpha falls with more pairs, and noise moves it only when the pools are all noise"
    )
    plot = staticmethod(functools.partial(plots.lines, ylabel="%", xlabel="alpha", transpose=True))

    def panels(self, lab: Lab) -> Sequence[Panel]:
        alphas = lab.sizes.alphas
        columns = {f"{a:g}": {**OURS, "metric": MEAN, "sotalign.alpha": a} for a in alphas}
        pairs: Rows = {f"{n} pairs": {"data.n_pairs": n} for n in lab.sizes.few_pairs}
        noise: Rows = {f"p={p:g}": {"data.noise": p} for p in lab.sizes.pool_noise}
        panels: dict[str, Rows] = {"pairs": pairs, "share of noise": noise}
        return [Panel(name, name, rows, columns, lab.seeds[:1]) for name, rows in panels.items()]

    def judge(self, found: Found) -> Verdict:
        if not all(panel.complete for panel in found.values()):
            return Verdict(None, "runs are missing")
        best = [[float(list(p.columns)[i]) for i in p.means().argmax(1)] for p in found.values()]
        falls, steady = best[0] == sorted(best[0], reverse=True), len(set(best[1][:-1])) == 1
        parts = {}
        for claim, held, panel, alphas in (
            ("falling with pairs", falls, found["pairs"], best[0]),
            ("moved by noise alone", steady, found["share of noise"], best[1]),
        ):
            listed = ", ".join(f"{r}: {a:g}" for r, a in zip(panel.rows, alphas, strict=True))
            # An alpha that never moves says nothing of when it would.
            parts[claim] = Verdict(held if len(set(alphas)) > 1 else None, f"best at {listed}")
        return joined(parts)


class FA5(Entry):
    """The regularisation ε of the student's plan, ε* of the teacher's."""

    claim = "the best ε* is smaller than ε, at every number of pairs"
    plot = staticmethod(plots.heat_maps)

    def panels(self, lab: Lab) -> Sequence[Panel]:
        """Both at two numbers of pairs; the usual ε at more of them."""
        usual = {**OURS, "metric": MEAN, **lab.sizes.epsilon_changes}
        rows = {f"ε={e:g}": {"sotalign.epsilon": e} for e in lab.sizes.epsilons}
        stars: Rows = {f"ε*={e:g}": {"sotalign.epsilon_star": e} for e in lab.sizes.epsilons}
        pairs: Rows = {f"{n} pairs": {**usual, "data.n_pairs": n} for n in lab.sizes.few_pairs}
        made = [
            Panel(name, "MeanR@1", rows, {s: {**c, **pairs[name]} for s, c in stars.items()}, seeds)
            for name, seeds in zip(list(pairs)[:2], itertools.repeat(lab.seeds[:1]), strict=False)
        ]
        return [*made, Panel("ε=0.05", "MeanR@1", stars, pairs, lab.seeds[:1])]

    def judge(self, found: Found) -> Verdict:
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


class FA6(F6):
    """Retrieval against the shift of the unpaired images alone."""

    claim = "MeanR@1 falls with the distance of the pools from the pairs"
    side = "x"
    fixed = 1
    r = None


class FA7(FA6):
    """Retrieval against the shift of the unpaired texts alone."""

    side = "y"
    fixed = 0


class FA8(Entry):
    """Distances between sets of images and of texts."""

    claim = (
        "real sets are closer to each other than to random directions (ours: the paper draws none)"
    )
    needs = UNPAIRED
    plot = staticmethod(plots.heat_maps)

    def panels(self, lab: Lab) -> Sequence[Panel]:
        made = []
        for side, title in (("x", "images"), ("y", "texts")):
            names = [n for n in (*lab.sources.collections, "noise") if lab.sources.has(n, side)]
            shown = {name: lab.sources.label if name == MAIN else name for name in names}
            rows = {shown[n]: {"left": n, "side": side} for n in names}
            columns = {shown[n]: {"right": n, "metric": "between/distance"} for n in names}
            seeds = lab.sizes.pool_seeds
            made.append(Panel(title, "distance", rows, columns, seeds, form=".3f"))
        return made if all(len(panel.rows) > 2 for panel in made) else []

    def judge(self, found: Found) -> Verdict:
        if not all(panel.complete for panel in found.values()):
            return Verdict(None, "distances are missing")
        closer = [max(row[:-1]) < row[-1] for p in found.values() for row in p.means()[:-1]]
        return Verdict(all(closer), f"so for {sum(closer)} of {len(closer)} sets")


class FA9(FA2):
    """Satellite images, 10,000 test rows: how many pairs."""

    needs: tuple[str, ...] = ("SkyScript",)

    def source(self, lab: Lab) -> str:
        return lab.sources.satellite

    def panels(self, lab: Lab) -> Sequence[Panel]:
        source = self.source(lab)
        rows = {f"{n}": lab.alone(source, n) for n in lab.sizes.few_pairs}
        panels = {f"R@{k}": two_lines(f"test/mean/R@{k}") for k in (1, 5, 10)}
        seeds = lab.seeds[:1]
        made = [Panel(name, "pairs", rows, columns, seeds) for name, columns in panels.items()]
        return made if lab.sources.has(source, "test") else []


class FA10(FA9):
    """Satellite images, 30,000 test rows: how many pairs."""

    needs = ("SkyScript30k",)

    def source(self, lab: Lab) -> str:
        return "SkyScript30k"


_TABLES = (V1, T1, T2, T3, T4, T5, T6, T7, A1, A2, A3, A4, A5, A6)
_FIGURES = (F3, F4, F5, F6, F7, FA1, FA2, FA3, FA4, FA5, FA6, FA7, FA8, FA9, FA10)
ENTRIES: dict[str, Entry] = {kind.__name__: kind() for kind in (*_TABLES, *_FIGURES)}
"""All of them by name."""
