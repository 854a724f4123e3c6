"""Other protocols: very few pairs as in SUE, satellite images and speech."""

from collections.abc import Mapping

from experiments.paper.claims import Verdict, all_above
from experiments.paper.entries import Column, Entry, Grid, Row, Values, row_gaps
from experiments.paper.lab import Lab

Found = Mapping[str, Values]


# --- T6, A6: the SUE protocol ------------------------------------------------------------------


def _sue(lab: Lab, methods: Mapping[str, Row]) -> list[Grid]:
    given = lab.given("sue/")
    if not given and "main" in lab.files:
        return []
    tables = {name: (name, 100 if name == "COCO100" else 500) for name in given}
    if not given:
        tables = {f"{n} pairs": ("pictures", n) for n in (100, 500)}
    columns = {}
    for title, (name, pairs) in tables.items():
        changes = {"use": f"view/sue/{name}/{pairs}", "data.n_pairs": pairs}
        changes |= {"data.n_unpaired": None, "given": bool(given)}
        paper = name if given else {100: "COCO100", 500: "F30k500"}[pairs]
        for way, side in (("I2T", "x_to_y"), ("T2I", "y_to_x")):
            columns[f"{title}, {way} R@5"] = Column(f"test/{side}/R@5", changes, f"{paper}_{way}")
    scale = lab.given_scale if given else lab.scale
    return [Grid("", "method", methods, columns, scale.seeds, "T6_A6_SUE_protocol")]


_LINEAR = {"SOTAlign (linear, d=512)": Row({"heads.dim": 512}, "SOTAlign (linear, d=512)")}
_MLP = {"SOTAlign (MLP, d=8)": Row({"heads.kind": "mlp", "heads.dim": 8}, "SOTAlign (MLP, d=8)")}
_PEERS = {
    "CSA": Row({"method": "csa"}, "CSA"),
    "Contrastive": Row({"method": "contrastive_mlp", "heads.dim": 8}, "Contrastive"),
    "SUE": Row({"method": "sue"}, "SUE"),
}


def _judge_sue(found: Found) -> Verdict:
    ours = [row for row in found[""].grid.rows if row.startswith("SOTAlign")]
    pairs = [(row, peer) for row in ours for peer in _PEERS]
    return all_above({k: gap for pair in pairs for k, gap in row_gaps(found[""], *pair).items()})


_SUE = "the bundled pictures, 100 and 500 pairs and 400 test rows as in SUE's protocol"
_SUE_FILES = ("sue/COCO100", "sue/F30k500", "sue/Polyvore500")
T6 = Entry(
    "T6",
    "The SUE protocol: very few pairs",
    "the method",
    _SUE,
    _SUE_FILES,
    lambda lab: _sue(lab, {**_PEERS, **_LINEAR}),
    "SOTAlign is above SUE, contrastive training and CSA",
    _judge_sue,
    paper="T6_A6_SUE_protocol",
)
A6 = Entry(
    "A6",
    "The SUE protocol, SOTAlign with SUE's heads too",
    "the method and SOTAlign's heads",
    _SUE,
    _SUE_FILES,
    lambda lab: _sue(lab, {**_PEERS, **_MLP, **_LINEAR}),
    "SOTAlign is above SUE, contrastive training and CSA, also with heads as small as SUE's",
    _judge_sue,
    paper="T6_A6_SUE_protocol",
)


# --- T7: other domains -------------------------------------------------------------------------


def _domains(lab: Lab) -> list[Grid]:
    columns = {}
    for slot, title, pairs, ways in (
        ("skyscript", "SkyScript", 10_000, {"T2I_R10": "y_to_x/R@10", "I2T_R10": "x_to_y/R@10"}),
        ("librispeech", "Libri", 1000, {"S2T_R1": "x_to_y/R@1", "T2S_R1": "y_to_x/R@1"}),
    ):
        changes = {"use": slot, "given": True, "data.n_unpaired": None, "data.n_pairs": pairs}
        if lab.given_scale.name != "paper":
            del changes["data.n_pairs"]
        for way, metric in ways.items():
            found = f"test/{metric}" if slot in lab.files else None
            columns[f"{title} {way.replace('_R', ' R@')}"] = Column(
                found, changes, f"{title}_{way}"
            )
    if all(column.metric is None for column in columns.values()):
        return []
    names = {"CCA": "cca", "SAIL": "sail", "STRUCTURE": "structure", "SOTAlign": "sotalign"}
    rows = {name: Row({"method": method}, name) for name, method in names.items()}
    return [Grid("", "method", rows, columns, lab.given_scale.seeds, "T7_domains")]


def _judge_domains(found: Found) -> Verdict:
    peers = ("CCA", "SAIL", "STRUCTURE")
    return all_above(
        {k: gap for row in peers for k, gap in row_gaps(found[""], "SOTAlign", row).items()}
    )


T7 = Entry(
    "T7",
    "Satellite images and speech",
    "the method",
    None,
    ("skyscript", "librispeech"),
    _domains,
    "SOTAlign is above CCA, SAIL and STRUCTURE on both",
    _judge_domains,
    paper="T7_domains",
)
