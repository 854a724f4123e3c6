"""Teachers and divergences; methods compared by retrieval and classification."""

from collections.abc import Mapping

from experiments.paper.claims import Verdict, all_above
from experiments.paper.entries import Column, Entry, Grid, Row, Values, row_gaps
from experiments.paper.lab import Lab

MEAN = "test/mean/R@1"
T2I, I2T = "test/y_to_x/R@1", "test/x_to_y/R@1"
TOP1 = "test/zero_shot/top1"
PICTURES = "the bundled pictures in place of CC3M, COCO and ImageNet"
Found = Mapping[str, Values]
RETRIEVAL = {
    "zero-shot": Column(TOP1, paper="ImageNet"),
    "T2I R@1": Column(T2I, paper="COCO_T2I_R1"),
    "I2T R@1": Column(I2T, paper="COCO_I2T_R1"),
}
"""What most tables report: text to image, image to text, and classification."""


# --- T1: teachers and divergences --------------------------------------------------------------

_TEACHERS = {"Procrustes": "procrustes", "CCA": "cca", "Contrastive": "contrastive"}
_DIVERGENCES = {"CKA": "cka", "InfoNCE": "infonce", "KLOT": "klot"}


def _teachers_and_divergences(lab: Lab) -> list[Grid]:
    rows = {"None": Row({"method": "teacher"}, "None")}
    rows |= {n: Row({"sotalign.divergence": key}, n) for n, key in _DIVERGENCES.items()}
    columns = {n: Column(MEAN, {"teacher.kind": key}, n) for n, key in _TEACHERS.items()}
    return [Grid("", "divergence", rows, columns, lab.scale.seeds, "T1_divergence_x_teacher")]


def _judge_divergences(found: Found) -> Verdict:
    order = [("KLOT", "InfoNCE"), ("InfoNCE", "CKA"), ("KLOT", "None")]
    return all_above({k: gap for pair in order for k, gap in row_gaps(found[""], *pair).items()})


T1 = Entry(
    "T1",
    "Linear teachers and divergences",
    "teacher x divergence, all at the alpha of KLOT with CCA",
    PICTURES,
    ("main",),
    _teachers_and_divergences,
    "KLOT is above InfoNCE, InfoNCE above CKA, and KLOT above its teacher alone, for every teacher",
    _judge_divergences,
    paper="T1_divergence_x_teacher",
)


# --- T4, A4, T5, A5: methods -------------------------------------------------------------------

OURS = "semi/SOTAlign"
UPPER = "sup/SAIL-1M"


def method_rows(lab: Lab) -> dict[str, Row]:
    """Every method that the paper compares, and SOTAlign from the teacher's projection."""
    named = {
        "sup/SAIL": "sail",
        "sup/STRUCTURE": "structure",
        "semi/SAIL": "sail_semi",
        "semi/STRUCTURE": "structure_semi",
        "semi/NNCLR": "nnclr",
        "semi/S-CLIP": "sclip",
        OURS: "sotalign",
    }
    full = {"method": "sail", **lab.scale.upper_bound}
    rows = {f"{UPPER} (all pairs)": Row(full, UPPER)}
    rows |= {name: Row({"method": method}, name) for name, method in named.items()}
    start = {"method": "sotalign_teacher", "heads.init": "teacher"}
    return {**rows, f"{OURS}, teacher start": Row(start)}


def _judge_methods(found: Found) -> Verdict:
    others = [row for row in found[""].grid.rows if not row.startswith((UPPER, OURS))]
    gaps = {k: v for row in others for k, v in row_gaps(found[""], OURS, row).items()}
    return all_above({k: v for k, v in gaps.items() if _BUT not in k})


def _retrieval(lab: Lab, cuts: tuple[int, ...]) -> list[Grid]:
    columns = {}
    for title, prefix, name in (
        ("", "test", "COCO"),
        ("Flickr30k ", "evaluation/flickr30k", "F30k"),
    ):
        here = prefix == "test" or lab.evaluates("flickr30k")
        for way, side in (("T2I", "y_to_x"), ("I2T", "x_to_y")):
            for k in cuts:
                metric = f"{prefix}/{side}/R@{k}" if here else None
                columns[f"{title}{way} R@{k}"] = Column(metric, paper=f"{name}_{way}_R{k}")
    return [Grid("", "method", method_rows(lab), columns, lab.scale.seeds, "T4_A4_retrieval")]


_METHOD_FILES = ("main", "evaluation/flickr30k")
_METHOD_CLAIM = "SOTAlign is above every method with the same pairs, in every column"
T4 = Entry(
    "T4",
    "Retrieval by method",
    "the method",
    PICTURES,
    _METHOD_FILES,
    lambda lab: _retrieval(lab, (1,)),
    _METHOD_CLAIM,
    _judge_methods,
    paper="T4_A4_retrieval",
)
A4 = Entry(
    "A4",
    "Retrieval by method, R@1 and R@5",
    "the method",
    PICTURES,
    _METHOD_FILES,
    lambda lab: _retrieval(lab, (1, 5)),
    _METHOD_CLAIM,
    _judge_methods,
    paper="T4_A4_retrieval",
)

_BUT = "Aircraft"
_SETS = ("Food101", "CIFAR10", "CIFAR100", _BUT, "DTD", "Flowers")
_MAIN_SETS = ("Food101", "CIFAR10", "CIFAR100", "DTD")


def _classification(lab: Lab, sets: tuple[str, ...]) -> list[Grid]:
    columns = {}
    for name in sets:
        metric = f"evaluation/{name}/zero_shot/top1" if lab.evaluates(name) else None
        columns[name] = Column(metric, paper=name)
    columns["ImageNet" if "main" in lab.files else "16 classes"] = Column(TOP1, paper="ImageNet")
    return [Grid("", "method", method_rows(lab), columns, lab.scale.seeds, "T5_A5_classification")]


_CLASSES = "the 16 classes of the bundled pictures in place of ImageNet"
T5 = Entry(
    "T5",
    "Zero-shot classification by method",
    "the method",
    _CLASSES,
    ("main", *(f"evaluation/{name}" for name in _MAIN_SETS)),
    lambda lab: _classification(lab, _MAIN_SETS),
    _METHOD_CLAIM,
    _judge_methods,
    paper="T5_A5_classification",
)
A5 = Entry(
    "A5",
    "Zero-shot classification by method, all sets",
    "the method",
    _CLASSES,
    ("main", *(f"evaluation/{name}" for name in _SETS)),
    lambda lab: _classification(lab, _SETS),
    f"{_METHOD_CLAIM} but {_BUT}",
    _judge_methods,
    paper="T5_A5_classification",
)
