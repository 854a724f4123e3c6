"""Tables and figures of the paper: registry, cells, verdicts, files and the report."""

import csv
import dataclasses
import html.parser
import json
import os
import pathlib
import shutil
import subprocess
import sys

import compile_cache
import numpy as np
import pytest
import small_runs

from experiments import runner
from experiments.paper import (
    catalogue,
    cells,
    claims,
    entries,
    lab,
    measures,
    report,
    reproduction,
    scales,
    slots,
    views,
)
from sotalign_jax import checks, data

ROOT = pathlib.Path(__file__).parents[1]
NAMES = ["T1", "T2", "T3", "T4", "T5", "T6", "T7", "A1", "A2", "A3", "A4", "A5", "A6"]
NAMES += ["F3", "F4", "F5", "F6", "F7", *(f"FA{n}" for n in range(1, 11))]
TINY = dataclasses.replace(
    scales.QUICK,
    name="tiny",
    changes={
        "data.n_pairs": 60,
        "data.n_unpaired": None,
        "heads.dim": 8,
        "train.steps": 4,
        "train.eval_every": 2,
        "train.pair_batch": 32,
        "train.unpaired_batch": 32,
        "sotalign.epsilon_star": 0.2,
    },
    seeds=(0, 1),
    upper_bound={"data.n_pairs": 300, "data.n_unpaired": 0},
    pairs=(30, 60),
    unpaired=(40, None),
    teacher_noise=(0.0, 0.5),
)


@pytest.fixture(scope="module", autouse=True)
def _compile_cache(tmp_path_factory):
    with compile_cache.kept_in(tmp_path_factory.mktemp("programs")):
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = small_runs.write_files(tmp_path_factory.mktemp("files"))
    return {path.stem: str(path) for path in folder.glob("*.npy")}


@pytest.fixture
def small(tmp_path, files):
    """A lab on small files, with nothing of the bundled pictures."""
    return lab.Lab(tmp_path / "work", TINY, TINY, {"main": files})


@pytest.fixture
def bundled(tmp_path):
    return lab.Lab(tmp_path / "work", scales.BUNDLED)


# --- the registry ------------------------------------------------------------------------------


def test_every_table_and_figure_is_there(bundled):
    assert list(catalogue.ENTRIES) == NAMES
    for name, entry in catalogue.ENTRIES.items():
        built = entry.build(bundled)
        assert bool(built) == (entry.stand_in is not None), name
        assert set(entry.files) <= set(slots.SLOTS), name
        assert len({grid.name for grid in built}) == len(built), name
        assert (entry.plot is not None) == name.startswith("F"), name
    assert {e.paper for e in catalogue.ENTRIES.values()} - {None} == set(entries.paper_results())


def test_the_paper_is_looked_up_by_names_that_it_has(bundled, small):
    every = {f"{kind}/{name}": small.files["main"] for kind, name in _given_slots()}
    full = dataclasses.replace(small, files={**small.files, **every})
    for at in (bundled, full):
        for entry in catalogue.ENTRIES.values():
            for grid in entry.build(at):
                if grid.paper is None:
                    continue
                table = entries.paper_results()[grid.paper]
                columns = {c.paper for c in grid.columns.values()} - {None}
                assert columns <= set(table["cols"]), entry.name
                if at is full:  # every row of the paper has one of ours
                    rows = {row.paper for row in grid.rows.values()}
                    absent = {"SOTAlign (MLP, d=8)"} if entry.name == "T6" else set()
                    assert set(table["rows"]) <= rows | absent, entry.name


def _given_slots():
    yield from (("pairs", name) for name in ("CC3M-synth", "CC12M", "COCO"))
    named = ("CC3M-synth", "CC12M", "ImageNet", "COCO", "WikiText103")
    yield from (("unpaired", name) for name in named)
    yield from (("sue", name) for name in ("COCO100", "F30k500", "Polyvore500"))
    for row in entries.paper_results()["T3_A2_encoders"]["rows"]:
        yield "encoders", row.rpartition("/")[0]


PAPER_HOLDS = {"T1": True, "T4": True, "T5": True, "T6": True, "T7": True, "A3": True}
PAPER_HOLDS |= {"T2": True, "T3": True, "A2": True, "A4": True, "A5": True, "A6": True}


@pytest.mark.parametrize("name", PAPER_HOLDS)
def test_the_papers_own_numbers_are_judged_as_the_paper_does(name, small):
    given = {f"{kind}/{slot}": small.files["main"] for kind, slot in _given_slots()}
    named = [slot for slot in slots.SLOTS if not slot.endswith(("NAME", "TEXT"))]
    given |= dict.fromkeys(named, small.files["main"])
    scale = dataclasses.replace(TINY, teacher_noise=scales.PAPER.teacher_noise)
    at = lab.Lab(small.workdir, scale, scale, given)
    found = {}
    for grid in catalogue.ENTRIES[name].build(at):
        places = {
            (row, column): np.array([value])
            for row in grid.rows
            for column in grid.columns
            if (value := grid.paper_value(row, column)) is not None
        }
        found[grid.name] = entries.Values(grid, places)
    assert catalogue.ENTRIES[name].judge(found).held is PAPER_HOLDS[name]


# --- cells -------------------------------------------------------------------------------------


def test_tables_share_cells(bundled):
    def key(entry, row, column):
        (grid,) = catalogue.ENTRIES[entry].build(bundled)
        return grid.cells(bundled)[row, column][0].key

    ours = key("T1", "KLOT", "CCA")
    assert ours == key("A3", "SOTAlign", "p=0.0") == key("T4", "semi/SOTAlign", "T2I R@1")
    assert ours == key("T3", "image 1280 + text 384, SOTAlign", "T2I R@1")
    assert key("A3", "SOTAlign", "SAIL") == key("T4", "sup/SAIL", "T2I R@1") != ours
    assert key("T2", "clipart, SAIL", "zero-shot") == key("A1", "SAIL", "zero-shot")


def test_a_cell_does_not_depend_on_where_it_is_kept(bundled, tmp_path):
    there = dataclasses.replace(bundled, workdir=tmp_path / "there")
    changes = {"use": "view/encoders/16/8"}
    first, second = (at.cell(changes, "test/mean/R@1", 0) for at in (bundled, there))
    assert first.key == second.key
    assert first.key != bundled.cell(changes, "test/mean/R@1", 1).key


def test_a_failing_cell_is_reported_and_the_others_are_made(tmp_path):
    def fail(folder):
        raise ValueError("no luck\nat all")

    store = cells.Store(tmp_path)
    bad, good = cells.Cell({"n": 1}, fail), cells.Cell({"n": 2}, lambda folder: {"a": 1.0})
    after = cells.Cell({"n": 3}, lambda folder: {"b": 2.0}, after=bad.key)
    store.finish([after, bad, good])
    assert store.results(good.key) == {"a": 1.0} and store.results(bad.key) is None
    assert store.failures[bad.key].startswith("no luck (see ")
    assert "ValueError" in (tmp_path / "cells" / f"{bad.key}.log").read_text()
    assert store.results(after.key) == {"b": 2.0}


def test_two_processes_never_make_the_same_cell(tmp_path):
    code = f"""
        import pathlib, time
        from experiments.paper import cells

        def compute(folder):
            with open({str(tmp_path / "made")!r}, "a") as file:
                file.write(folder.name + "\\n")
            time.sleep(0.3)
            return {{"done": 1}}

        while not pathlib.Path({str(tmp_path / "go")!r}).exists():
            time.sleep(0.01)
        made = [cells.Cell({{"n": n}}, compute) for n in range(6)]
        store = cells.Store(pathlib.Path({str(tmp_path)!r}))
        store.finish(made)
        assert all(store.results(cell.key) for cell in made)
    """
    lines = "\n".join(line[8:] for line in code.splitlines())
    start = [sys.executable, "-c", lines]
    both = [subprocess.Popen(start, cwd=ROOT, stderr=subprocess.DEVNULL) for _ in range(2)]
    (tmp_path / "go").touch()
    assert [process.wait(600) for process in both] == [0, 0]
    made = (tmp_path / "made").read_text().split()
    assert len(made) == len(set(made)) == 6


# --- views of the bundled pictures -------------------------------------------------------------


def test_sue_protocol():
    x = np.arange(1000.0)[:, None]
    split = views.sue(x, 10 * x, n_pairs=100)
    assert split["test_x"].ravel().tolist() == list(range(400))
    assert split["x"].ravel().tolist() == list(range(900, 1000))
    np.testing.assert_array_equal(10 * split["x"], split["y"])
    kept = {
        side: set(split[f"unpaired_{side}"].ravel() // scale)
        for side, scale in (("x", 1), ("y", 10))
    }
    assert len(kept["x"]) == len(kept["y"]) == 450 and kept["x"] != kept["y"]
    assert kept["x"] | kept["y"] <= set(range(400, 900))
    assert (np.diff(split["unpaired_y"].ravel()) < 0).any()


def test_collections_and_encoders(bundled):
    table = data.pictures()
    named = [source for group in views.COLLECTIONS.values() for source in group]
    assert sorted(named) == sorted(set(table.source))
    run = bundled.run({"use": "view/collections/clipart/emoji/clipart", "data.n_pairs": 500}, 0)
    split = runner.load_dataset(run)
    emoji = table.image[(table.source == "emoji_fluent3d") & (table.split == "train")]
    assert split.pairs_x.shape[0] == 500
    np.testing.assert_array_equal(split.pool_x, emoji)
    assert len(split.pool_y) == 2243 - 500 and len(split.test.x) == 999
    weak = runner.load_dataset(bundled.run({"use": "view/encoders/16/8"}, 0))
    assert weak.pairs_x.shape[1] == 16 and weak.zero_shot.prompts.shape[2] == 8


def test_measures(rng):
    x, y = rng.normal(size=(60, 6)), rng.normal(size=(60, 5))
    near = data.dataset((x[:40], y[:40]), x=x[40:], y=y[40:])
    far = data.dataset((x[:40], y[:40]), x=x[40:] + 3, y=y[40:] + 3)
    options = {"seed": 0, "rows": 50, "projections": 40}
    distances = [measures.shift(split, **options) for split in (near, far)]
    assert distances[0]["shift/total"] < distances[1]["shift/total"]
    assert distances[0]["shift/total"] == distances[0]["shift/x"] + distances[0]["shift/y"]
    same = data.dataset((x, x), x=x, y=x)
    assert measures.mutual_knn(same, **options)["mutual_knn/percent"] == 100.0
    assert measures.between(x[:50], x[:50], **options)["between/distance"] < 1e-6
    assert measures.between(x + 3, None, **options)["between/distance"] > 0.05


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*NormalCG:DeprecationWarning")
def test_solver_measures():
    found = measures.gradient(epsilon=0.5, n=64)
    for arm in measures.ARMS:
        assert found[f"gradient/{arm}/status"] == "ok" and found[f"gradient/{arm}/memory"] > 0
        assert found[f"gradient/{arm}/seconds"] > 0 and found[f"gradient/{arm}/iterations"] > 0
    errors = [measures.convergence(epsilon=epsilon, n=64) for epsilon in (0.5, 0.005)]
    assert errors[0]["convergence/textbook"] < errors[1]["convergence/textbook"]


# --- verdicts ----------------------------------------------------------------------------------


def test_verdicts():
    def gap(*values):
        return claims.difference(np.array(values), np.zeros(len(values)))

    assert claims.all_above({"a": gap(1.0, 2.0), "b": gap(0.5)}).held is True
    assert claims.all_above({"a": gap(1.0, 2.0), "b": gap(-1.0, -1.2)}).held is False
    assert claims.all_above({"a": gap(1.0, 2.0), "b": gap(-1.0, 1.2)}).held is None
    assert claims.all_above({"a": gap(1.0), "b": gap()}).held is None
    assert claims.all_above({"a": gap(1.0, 2.0, np.nan)}).held is None  # a seed is missing
    x = np.arange(5.0)
    assert claims.correlated(x, 3 - x, sign=-1, paper=-0.8).held is True
    assert claims.correlated(x, 3 - x, sign=1, paper=None).held is False
    assert claims.correlated(x[:2], x[:2], sign=1, paper=None).held is None
    assert claims.correlated(x, x * [1, 1, 1, 1, 0.2], sign=1, paper=None).held is None  # p = 0.2


def _filled(entry, at, value_of):
    """What an entry finds when `value_of(panel, row, column)` is the value of every seed."""
    found = {}
    for grid in catalogue.ENTRIES[entry].build(at):
        places = {
            (row, column): np.full(len(grid.seeds), value)
            for row in grid.rows
            for column in grid.columns
            if (value := value_of(grid.name, row, column)) is not None
        }
        found[grid.name] = entries.Values(grid, places)
    return catalogue.ENTRIES[entry].judge(found)


def test_a_best_alpha_that_never_moves_proves_nothing(bundled):
    def best(**alphas):
        def value(panel, row, column):
            return 1.0 if float(column) == alphas.get(row.replace(" ", "_"), 3e-3) else 0.0

        verdict = _filled("FA4", bundled, value)
        return verdict.held

    assert best() is None
    assert best(**{"100_pairs": 3e-2, "3000_pairs": 3e-4, "p=1": 3e-5}) is True
    assert best(**{"100_pairs": 3e-4, "p=1": 3e-5}) is False  # it grows with pairs
    assert best(**{"100_pairs": 3e-2, "p=0.5": 3e-5}) is False  # half of noise moves it


def test_missing_runs_prove_nothing(bundled):
    assert _filled("FA8", bundled, lambda panel, row, column: 1.0).held is False
    assert _filled("FA8", bundled, lambda _, r, c: 1.0 + ("random" in (r, c))).held is True
    nearest = _filled("FA8", bundled, lambda _, r, c: 2.0 if "random" in (r, c) else None)
    assert nearest.held is None
    only = _filled("FA5", bundled, lambda p, r, c: 1.0 if (r, c) == ("ε=0.5", "ε*=0.01") else None)
    assert only.held is None
    assert (
        _filled("F3", bundled, lambda p, row, c: {"0.5": 1.0 + (c == "unrolled")}.get(row)).held
        is None
    )


def test_convergence_must_worsen_at_every_step(bundled):
    def errors(*values):
        by_row = dict(zip(("0.5", "0.1", "0.05", "0.02", "0.01", "0.005"), values, strict=True))
        return _filled("F4", bundled, lambda panel, row, column: by_row[row]).held

    assert errors(1e-7, 4e-7, 2e-7, 1e-4, 1e-3, 1e-2) is True  # rounding comes first
    assert errors(1e-7, 1e-2, 1e-5, 1e-4, 1e-3, 2e-2) is False


def test_a_gain_that_fades(bundled):
    def gains(*values):
        by_row = dict(zip(("100", "300", "1000", "3000"), values, strict=True))

        def value(panel, row, column):
            if panel == "unpaired":
                return {"100": 0.0}.get(row, 1.0)
            return 5.0 + (by_row[row] if column == "SOTAlign" else 0.0)

        return _filled("F5", bundled, value).held

    assert gains(1.0, 3.0, 2.0, 0.5) is True
    assert gains(1.0, 2.0, 3.0, 4.0) is False


# --- from files to the report ------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory, files):
    """A table, a figure of two panels, and an entry without data, from real runs."""
    at = lab.Lab(tmp_path_factory.mktemp("made"), TINY, TINY, {"main": files})
    chosen = reproduction.choose(["A3", "F5", "FA9"])
    return at, reproduction.make(chosen, at, command="the <command>", jobs=2)


def test_files_of_an_entry(made):
    at, (noise, pairs, sky) = made
    assert noise.failures == pairs.failures == [] and not sky.ran
    text = (at.workdir / "A3.md").read_text()
    assert "| MeanR@1" in text and "p=0.5 (paper)" in text and "26.6" in text and " ± " in text
    with (at.workdir / "F5.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["panel"] for row in rows] == ["pairs"] * 4 + ["unpaired"] * 4
    assert {row["seeds"] for row in rows} == {"2"}
    assert (at.workdir / "F5.png").stat().st_size > 5000
    text = (at.workdir / "FA9.md").read_text()
    assert "undecided: its data are not here" in text and "- `skyscript`: x, y, val_x" in text
    assert "--only=FA9 --files=FILES.json" in text
    assert not list(at.workdir.glob("cells/*/run/checkpoints"))


def test_values_are_those_of_the_runs(made):
    at, (noise, *_) = made
    values = noise.found[""]
    run = at.run({"method": "sail"}, 0)
    again = runner.execute(run, at.workdir / "again")["test/mean/R@1"]
    assert values.at("SOTAlign", "SAIL")[0] == again


def test_a_finished_cell_is_never_made_again(made, monkeypatch):
    at, first = made
    monkeypatch.setattr(runner, "execute", lambda *args: pytest.fail("ran again"))
    second = reproduction.make([one.entry for one in first], at, command="the <command>")
    assert [str(one.verdict) for one in second] == [str(one.verdict) for one in first]


def test_results_page(made, tmp_path):
    at, outcome = made
    report.save_results(tmp_path / "RESULTS.md", outcome, at.workdir, "the command")
    text = (tmp_path / "RESULTS.md").read_text()
    figures = [path.relative_to(tmp_path) for path in tmp_path.glob("*/*")]
    assert [f"({figure})" in text for figure in figures] == [True]  # F5's
    assert text.startswith("# Results beside the paper's") and "the command" in text
    for one in outcome:
        assert f"### {one.entry.name}: " in text and str(one.verdict) in text


class _Page(html.parser.HTMLParser):
    """Tags with their attributes; raises unless every tag is closed in turn."""

    VOID = ("meta", "img")

    def __init__(self):
        super().__init__()
        self.open, self.tags = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_report_is_well_formed_and_needs_nothing_else(made):
    at, outcome = made
    text = (at.workdir / "report.html").read_text()
    page = _Page()
    page.feed(text)
    assert page.open == []
    ids = {attrs["id"] for _, attrs in page.tags if "id" in attrs}
    assert ids == {"A3", "F5", "FA9", "environment"}
    for tag, attrs in page.tags:
        assert tag not in ("script", "link", "iframe")
        assert attrs.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")
        assert attrs.get("href", "#A3")[1:] in ids
    assert "url(" not in text and "@import" not in text
    assert sum(tag == "img" for tag, _ in page.tags) == 1
    assert "the &lt;command&gt;" in text and "needs files" in text
    assert all(claims.WORDS[one.verdict.held] in text for one in outcome if one.ran)


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
@pytest.mark.parametrize("width", [500, 1200])
def test_report_in_a_browser(made, tmp_path, width):
    """Nothing is wider than the screen, and every picture was decoded."""
    at, _ = made
    probe = """<script>window.onload = () => { document.title = JSON.stringify({
        page: document.documentElement.scrollWidth, screen: window.innerWidth,
        pictures: [...document.images].map(i => i.naturalWidth),
        tables: document.querySelectorAll("table").length}); }</script></body>"""
    text = (at.workdir / "report.html").read_text().replace("</body>", probe)
    (tmp_path / "probe.html").write_text(text)
    shown = subprocess.run(
        [
            BROWSER,
            *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={width},900",
            "--dump-dom",
            (tmp_path / "probe.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    ).stdout
    title = shown.partition("<title>")[2].partition("</title>")[0]
    found = json.loads(title)
    assert found["page"] <= found["screen"] <= width
    assert len(found["pictures"]) == 1 and min(found["pictures"]) > 300
    assert found["tables"] >= 5


# --- the paper's own files ---------------------------------------------------------------------


def test_other_domains_run_on_given_files(small):
    given = dict.fromkeys(("skyscript", "librispeech"), small.files["main"])
    at = dataclasses.replace(small, files=given, given_scale=dataclasses.replace(TINY, seeds=(0,)))
    (outcome,) = reproduction.make(reproduction.choose(["T7"]), at, command="")
    assert outcome.ran and outcome.failures == []
    values = outcome.found[""]
    assert all(len(values.at(row, column)) == 1 for row, column in values.grid.cells(at))
    assert "files given for skyscript, librispeech" in outcome.data


def test_a_model_is_evaluated_on_another_set(small):
    main = small.files["main"]
    other = {name: main[f"val{name[4:]}"] for name in ("test_x", "test_y")}
    at = dataclasses.replace(small, files={"main": main, "evaluation/flickr30k": other})
    metric = "evaluation/flickr30k/mean/R@1"
    made = [at.cell({"method": "sail"}, name, 0) for name in (metric, "test/mean/R@1")]
    store = cells.Store(at.workdir)
    store.finish(made)
    assert store.results(made[0].key)[metric] == store.results(made[1].key)["val/mean/R@1"]


def test_given_sources_are_read(small, tmp_path):
    main = small.files["main"]
    rows = np.random.default_rng(3).normal(size=(70, 12)).astype(np.float32)
    np.save(tmp_path / "images.npy", rows)
    given = {"unpaired/CC12M": {"x": str(tmp_path / "images.npy")}, "pairs/COCO": main}
    at = dataclasses.replace(small, files={"main": main, **given})
    run = at.run({"use": "unpaired/CC12M|main"}, 0)
    np.testing.assert_array_equal(runner.load_dataset(run).pool_x, rows)
    assert list(catalogue.ENTRIES["A1"].build(at)[0].rows)[2:] == [
        "CC3M|CC3M",
        "CC12M|CC3M",
        "random|random",
    ]
    paired = runner.load_dataset(at.run({"use": "pairs/COCO", "data.n_pairs": 30}, 0))
    assert len(paired.pairs_x) == 30 and len(paired.pool_x) == 300


def test_entries_never_mix_given_and_bundled_data(small):
    """With only some of its files an entry waits for the others."""
    main = small.files["main"]
    for given, absent in (
        ({"main": main}, {"T2", "T3", "T6", "T7", "A1", "A2", "A6", "F6", "F7"}),
        ({"pairs/COCO": main, "unpaired/COCO": main}, {"T2", "T7", "A1", "F6"}),
        ({"main": main, "pairs/COCO": main}, {"T3", "T6", "T7", "A1", "A2", "A6", "F6", "F7"}),
    ):
        at = dataclasses.replace(small, files=given)
        shifts = {"FA6", "FA7", "FA8", "FA9", "FA10"}
        built = {name for name, entry in catalogue.ENTRIES.items() if entry.build(at)}
        assert set(NAMES) - built == absent | shifts, given
    assert "the bundled" not in reproduction.listing(
        dataclasses.replace(small, files={"main": main})
    )


def test_a_source_with_fewer_rows_gives_what_it_has(small, tmp_path):
    np.save(tmp_path / "few.npy", np.ones((50, 10), np.float32))
    given = {"main": small.files["main"], "unpaired/COCO": {"y": str(tmp_path / "few.npy")}}
    scale = dataclasses.replace(TINY, changes={**TINY.changes, "data.n_unpaired": 100})
    at = dataclasses.replace(small, scale=scale, files=given)
    row = catalogue.ENTRIES["A1"].build(at)[0].rows["CC3M|COCO"]
    assert at.run(row.changes, 0).data.n_unpaired == 50


def test_a_file_that_changes_makes_other_cells(small, tmp_path):
    main = {name: shutil.copy(path, tmp_path) for name, path in small.files["main"].items()}
    at = dataclasses.replace(small, files={"main": main, "unpaired/COCO": main})
    asked = [({}, "test/mean/R@1"), ({}, "shift/x")]
    asked.append(({"left": "main", "right": "COCO", "side": "x"}, "between/distance"))

    def keys():
        return [at.cell(changes, metric, 0).key for changes, metric in asked]

    before = keys()
    assert keys() == before
    np.save(main["x"], np.load(main["x"])[::-1])
    assert all(new != old for new, old in zip(keys(), before, strict=True))


def test_file_of_files(tmp_path):
    path = tmp_path / "files.json"
    for name in ("a.npy", "b.npz"):
        (tmp_path / name).touch()
    fields = {"x": "a.npy", "y": f"{tmp_path}/b.npz#text"}
    path.write_text(json.dumps({"sue/COCO100": fields, "unpaired/COCO": {"y": "a.npy"}}))
    assert slots.read(path) == {
        "sue/COCO100": {"x": f"{tmp_path}/a.npy", "y": f"{tmp_path}/b.npz#text"},
        "unpaired/COCO": {"y": f"{tmp_path}/a.npy"},
    }
    sky = dict.fromkeys(slots.SLOTS["skyscript"].fields, "a.npy")
    for wrong, message in (
        ({"skyskript": {"x": "a"}}, "files: 'skyskript' is unknown; choose of main"),
        ({"evaluation/food101": {}}, "files: 'evaluation/food101' is unknown; choose of main"),
        ({"pairs/NAME": fields}, "files: 'pairs/NAME' is unknown"),
        ({"unpaired/coco": fields}, "files: unpaired: 'coco' is unknown; choose one of CC3M-synth"),
        ({"skyscript": {"z": "a"}}, "files: skyscript: 'z' is unknown; choose one of x"),
        ({"skyscript": "a"}, "files: skyscript is 'a'; pass paths by field"),
        ({"skyscript": {"x": 3}}, "files: skyscript: x is 3; pass a path"),
        ({"skyscript": fields}, "files: skyscript: val_x is not set; pass its path"),
        ({"skyscript": {**sky, "y": "gone.npy"}}, f"y: {tmp_path}/gone.npy: no such file"),
        ([], "holds no object"),
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(checks.InputError, match=message):
            slots.read(path)


# --- the command -------------------------------------------------------------------------------


def _launch(*options, cwd=ROOT):
    return subprocess.run(
        [sys.executable, "-m", "experiments.reproduce", *options],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_list(tmp_path):
    shown = _launch("--list", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert shown.returncode == 0, shown.stderr
    named = [line.split()[0] for line in shown.stdout.splitlines() if line[:1] in ("T", "A", "F")]
    assert named == NAMES
    assert all(f"\n{slot}" in shown.stdout for slot in slots.SLOTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only=T9", "--workdir=w"], "error: only: 'T9' is unknown; choose one of T1"),
        (["--workdir=w"], "error: only: pass either --only=NAMES or --all; --list names them"),
        (["--all", "--workdir=w", "--files=none.json"], "error: none.json: cannot be read"),
    ],
)
def test_a_wrong_option_ends_in_one_line(options, message, tmp_path):
    ended = _launch(*options, cwd=tmp_path)
    assert ended.returncode == 1 and message in ended.stderr
    assert ended.stderr.count("\n") == 1 and ended.stdout == ""
    assert not (tmp_path / "w").exists()
