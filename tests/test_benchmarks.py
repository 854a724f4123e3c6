"""Tests of the benchmarks: end to end at tiny sizes, and their error measures."""

import csv
import pathlib
import re
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
import ot
import pytest

from experiments import photos
from sotalign_jax import checks, sinkhorn, training
from sotalign_jax.ot import device

with warnings.catch_warnings():
    # ott-jax imports JAXopt, which warns that it is deprecated.
    warnings.filterwarnings("ignore", message="JAXopt", category=DeprecationWarning)
    from benchmarks import (
        common,
        compile,
        convergence,
        gradient,
        model,
        peers,
        photographs,
        precision,
        train_step,
    )


def _rows(path: pathlib.Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# --- quoted tables ------------------------------------------------------------------------------


class Quoted(NamedTuple):
    """A table of a page: `<!-- NAME: PART -->`, below the command that printed it."""

    page: str
    name: str
    part: str
    command: str
    rows: list[dict[str, str]]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _quoted() -> list[Quoted]:
    found = []
    for path in sorted(common.RESULTS.parent.glob("*.md")):
        page = path.read_text()
        for mark in re.finditer(r"<!-- ([^ :]+)(?:: (.+?))? -->\n((?:\|.*\n)+)", page):
            commands = re.findall(r"python -m (benchmarks[^`#\n]*)", page[: mark.start()])
            header, _, *lines = mark[3].splitlines()
            rows = [dict(zip(_cells(header), _cells(line), strict=True)) for line in lines]
            found.append(Quoted(path.name, mark[1], mark[2] or "", commands[-1].strip(), rows))
    return found


QUOTED = _quoted()
MODULES = {
    "compile": compile,
    "convergence": convergence,
    "gradient": gradient,
    "model": model,
    "precision": precision,
    "sweeps": convergence,
    "train_step": train_step,
}
"""The benchmark that writes a table, by the beginning of the table's name."""


def test_results_are_quoted_by_a_page():
    """Pages mark each table with the name of its CSV file, <!-- NAME -->, and link figures."""
    folder = common.RESULTS
    text = "".join(page.read_text() for page in folder.parent.glob("*.md"))
    names = {table.name for table in QUOTED}
    for path in (path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder).with_suffix(""))
        assert f"(results/{name}.png)" in text if path.suffix == ".png" else name in names, name


def _agrees(cell: str, value: str) -> bool:
    """Returns True if a cell of a page is the value of the CSV file, rounded."""
    if cell == value or (cell, value) == ("-", ""):
        return True
    digits = len(cell.partition(".")[2])
    return abs(float(cell) - float(value)) <= 0.501 * 10.0**-digits


def _stem(table: Quoted) -> str:
    return table.name.rpartition("/")[2]


def _file_of(table: Quoted, tmp_path: pathlib.Path) -> list[dict[str, str]]:
    """Returns the rows of the CSV file that a table, or a part of it, was copied from."""
    target, _, pool = table.part.partition(" at ")
    folder = common.RESULTS
    if pool:  # computed by the model, which takes no time, and not stored
        flag = f"--unpaired={pool.replace(',', '')}"
        assert flag in table.command
        model.main([f"--out={tmp_path}", "--targets", target, flag])
        folder = tmp_path
    rows = _rows(folder / f"{table.name}.csv")
    return [row for row in rows if not target or row["target"] == target]


@pytest.mark.parametrize("table", QUOTED, ids=lambda table: table.name + table.part)
def test_quoted_table_is_that_of_its_file(table, tmp_path):
    rows = _file_of(table, tmp_path)
    assert len(rows) == len(table.rows) and list(rows[0]) == list(table.rows[0])
    for row, quoted in zip(rows, table.rows, strict=True):
        assert all(_agrees(quoted[key], row[key]) for key in row), (row, quoted)


@pytest.mark.parametrize("table", QUOTED, ids=lambda table: table.name + table.part)
def test_quoted_table_is_below_its_command(table, capsys):
    (module,) = (module for start, module in MODULES.items() if _stem(table).startswith(start))
    name, *flags = table.command.split()
    assert name == module.__name__
    with pytest.raises(SystemExit):
        module.main(["--help"])
    usage = capsys.readouterr().out
    assert all(flag.partition("=")[0] in usage for flag in flags if flag.startswith("--"))
    if size := re.search(r"_n(\d+)$", table.name):
        assert size[1] in flags or re.search(rf"default: \[?{size[1]}\b", usage)


WIDTHS = 128, 381
"""Widths of the student's and the teacher's features of `common.photos_problem`."""


def _ours() -> Iterator[tuple[peers.Arm, dict[str, str]]]:
    """Yields our arms with their quoted rows."""
    arms = {arm.name: arm for arm in (*peers.ARMS, peers.OURS_TIGHTER) if not arm.textbook}
    for table in QUOTED:
        if _stem(table).startswith("gradient_"):
            yield from ((arms[row["arm"]], row) for row in table.rows if row["arm"] in arms)


def _memory(arm: peers.Arm, n: int) -> tuple[float, float]:
    """Compiles the loss of photographs and its gradient. Returns MiB of temporaries and of all."""
    student, teacher = (
        jax.ShapeDtypeStruct((n, width if arm.from_features else n), np.float32) for width in WIDTHS
    )
    inputs = [student, student, teacher, teacher] if arm.from_features else [student, teacher]
    loss = arm.value_and_grad(peers.Target(0.05, 0.005, 1e-3, 5000, 5000))
    return common.memory_of(jax.jit(loss).lower(*inputs).compile())


def test_quoted_memory_is_that_of_the_compiled_loss():
    """Memory depends neither on epsilon nor on the tolerance."""
    kept: dict[tuple[str, int], tuple[float, float]] = {}
    quoted = list(_ours())
    assert {row["arm"] for _, row in quoted} > {peers.OURS.name, "ours, streamed"}
    for arm, row in quoted:
        case = arm.name, int(row["n"])
        if case not in kept:
            kept[case] = _memory(arm, case[1])
        columns = row["temporary mib"], row["total mib"]
        assert tuple(map(float, columns)) == pytest.approx(kept[case], rel=0.01), row


def test_quoted_iterations_are_those_of_the_solver():
    problem = common.photos_problem(4096)
    assert (problem.f.shape[1], problem.z.shape[1]) == WIDTHS
    (table,) = (table for table in QUOTED if table.name == "gradient_headline_n4096")
    target = peers.Target(0.05, 0.005, 1e-3, 5000, 5000)
    _, plans = jax.jit(peers.OURS.value_and_grad(target))(*problem.affinities())[0]
    (row,) = (row for row in table.rows if row["arm"] == peers.OURS.name)
    quoted = [int(row[f"{plan} iterations"]) for plan in ("student", "teacher")]
    assert [int(plan.iterations) for plan in plans] == quoted


def test_quoted_training_step_has_the_memory_and_iterations_of_the_code():
    rows = photographs.coco(1000)
    (table,) = (table for table in QUOTED if table.name == "train_step")
    for name in ("ours", "ours, streamed"):
        (row,) = (row for row in table.rows if row["method"] == name)
        config = training.TrainConfig(steps=1000, pair_batch=1000, unpaired_batch=int(row["n"]))
        call, compiled = train_step.step_of(train_step.METHODS[name], rows, 512, config)
        # Tests compile without most optimisations, and such a program takes up to 6 % more.
        assert float(row["temp MiB"]) == pytest.approx(common.memory_of(compiled)[0], rel=0.1)
        if name == "ours":
            metrics = call()[1]
            assert int(metrics["student_iterations"]) == int(row["student its"])
            assert int(metrics["teacher_iterations"]) == int(row["teacher its"])


def test_quoted_memory_of_accelerators_counts_features_and_gradients():
    (table,) = (table for table in QUOTED if table.name == "compile-klot")
    for row in _rows(common.RESULTS / f"{table.name}.csv"):
        work = compile.Workload(unpaired=int(row["n"]))
        size = 8 if row["dtype"] == "float64" else 4
        features = size * work.unpaired * 2 * (work.dim + work.teacher_dim)
        gradients = size * work.unpaired * 2 * work.dim
        beside = float(row["total MiB"]) - float(row["temporaries MiB"])
        expected = (features + gradients) / common.MEBIBYTE
        assert beside == pytest.approx(expected, rel=0.002), row  # a TPU pads rows


def test_quoted_sweeps_are_those_of_the_predictions():
    (table,) = (table for table in QUOTED if table.name == "sweeps_photos")
    columns = "teacher, int8", "+ float32", "student"
    found = {tuple(int(float(row[key])) for key in columns): row["tolerance"] for row in table.rows}
    for code, tolerance in ((model.TRAINING, "1e-2"), (model.EXACT, "1e-4")):
        assert found[code[:3]] == tolerance


def test_readme_quotes_the_table_of_the_gradient():
    readme = (common.RESULTS.parents[1] / "README.md").read_text()
    quoted = re.findall(r"^\| (ours|ott-jax), (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", readme, re.M)
    rows = {row["arm"]: row for row in _rows(common.RESULTS / "gradient_headline_n4096.csv")}
    for code, arm, *cells in quoted:
        arm = arm.replace("Danskin's rule", "Danskin")
        row = rows[f"ours, {arm}" if code == "ours" else f"ott-jax {arm}"]
        columns = row["teacher iterations"], row["temporary mib"], row["times ours"]
        assert all(map(_agrees, cells, columns)), (cells, row)
    assert len(quoted) == 4


# --- the commands -------------------------------------------------------------------------------


def test_photographs_are_those_of_the_launchers():
    ours, theirs = photographs.coco(50), photos.dataset("coco", n_pairs=50, test=False)
    np.testing.assert_array_equal(ours.pairs_x, theirs.pairs_x)
    np.testing.assert_array_equal(ours.pairs_y, theirs.pairs_y)
    np.testing.assert_allclose(ours.pool_x[:40], theirs.pool_x[:40], atol=1e-5)
    np.testing.assert_array_equal(ours.pool_y[-40:], theirs.pool_y[-40:])
    assert ours.val is not None and theirs.val is not None
    np.testing.assert_array_equal(ours.val.y, theirs.val.y)
    np.testing.assert_array_equal(ours.val.x_of_y, theirs.val.x_of_y)


def test_gradient_headline_compares_with_ott(tmp_path):
    gradient.main(["--quick", "--arms", "Danskin$", "--out", str(tmp_path)])
    rows = _rows(tmp_path / "gradient_headline_n96.csv")
    assert [row["arm"] for row in rows] == ["ours, from K", "ott-jax Danskin"]
    for row in rows:
        assert row["status"] == "ok" and float(row["error"]) <= 1e-3 * 1.01
        assert float(row["gap converged"]) < gradient.WRONG


def test_gradient_sweep_records_bad_arms(tmp_path, monkeypatch):
    def doubled(target: peers.Target):
        loss = peers.through_plan(target, solve=peers.unrolled)
        return lambda k, k_star: (2 * loss(k, k_star)[0], loss(k, k_star)[1])

    wrong = peers.Arm("doubled", doubled, unrolled=True)
    monkeypatch.setattr(peers, "ARMS", (*peers.ARMS, wrong))
    options = ["--epsilon", "0.1", "--tolerance", "1e-6", "--arms", "scan|doubled"]
    small = device.Profile("cpu", int8=False, memory=4 * common.MEBIBYTE)
    with device.compiling_for(small):
        gradient.main(["--quick", "--sweep", "--data", "random", *options, "--out", str(tmp_path)])
    rows = {r["arm"]: r for r in _rows(tmp_path / "gradient_sweep_n96.csv")}
    assert rows["doubled"]["status"] == "wrong gradient"
    assert rows["unrolled scan"]["status"] == "does not fit"
    assert float(rows["unrolled scan"]["temporary mib"]) > 1.0
    assert rows["doubled"]["seconds"] == rows["unrolled scan"]["seconds"] == ""
    assert rows["checkpointed scan"]["status"] == rows["ours, from K"]["status"] == "ok"
    assert int(rows["checkpointed scan"]["student iterations"]) % 10 == 0
    assert float(rows["checkpointed scan"]["seconds"]) > 0


def test_closed_form_gradient_uses_a_hundredth_of_unrolled_memory():
    target = peers.Target(0.05, 0.005, 0.0, 100, 100)
    matrix = jax.ShapeDtypeStruct((4096, 4096), np.float32)
    unrolled = next(arm for arm in peers.ARMS if arm.name == "unrolled scan")
    ours, theirs = (
        common.memory_of(jax.jit(arm.value_and_grad(target)).lower(matrix, matrix).compile())
        for arm in (peers.OURS, unrolled)
    )
    assert theirs[0] > 100 * ours[0]


def test_convergence_main_writes_tables(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    convergence.main(["--quick", "--data", "random"])
    tmp_path = (
        tmp_path / "runs" / "benchmarks"
    )  # the default output is never the folder of published results
    rows = _rows(tmp_path / "convergence_passes_random_n96.csv")
    assert [row["passes"] for row in rows] == ["10", "100"]
    assert float(rows[1]["ours"]) < float(rows[1]["textbook"])
    assert len(_rows(tmp_path / "convergence_epsilon_random_n96.csv")) == 2


def test_convergence_sweeps_counts_sweeps_of_both_plans(tmp_path):
    options = ["--sweeps", "--quick", "--data", "random"]
    convergence.main([*options, f"--out={tmp_path}"])
    for row in _rows(tmp_path / "sweeps_random.csv"):
        alone, rough, exact, student = (float(row[key]) for key in list(row)[2:])
        assert alone > 0 and rough > exact >= 1 and student > 0


def test_train_step_main_times_ours_and_ott(tmp_path):
    train_step.main(["--quick", "--arms", "Danskin$", "--out", str(tmp_path)])
    rows = _rows(tmp_path / "train_step.csv")
    assert [row["method"] for row in rows] == ["ours", "ott-jax Danskin"]
    assert all(float(row["seconds"]) > 0 for row in rows)


def test_photos_problem_rejects_too_many_photographs():
    with pytest.raises(checks.InputError, match=r"n.* 100000"):
        common.photos_problem(100_000)


def test_marginal_error_matches_plan_error_and_pot(x64):
    k = common.random_problem(40).affinities()[0]
    plan = sinkhorn(k, epsilon=0.05, tolerance=1e-3)
    assert common.marginal_error(k, plan.u, plan.v, 0.05) == pytest.approx(float(plan.error))
    weights = np.full(40, 1 / 40)
    exact = ot.bregman.sinkhorn_log(weights, weights, -np.asarray(k), 0.05, stopThr=1e-10)
    plain = peers.plain_to_tolerance(k, 0.05, 1000, 1e-9)
    found = np.exp(k / 0.05 + plain.u[:, None] + plain.v)
    np.testing.assert_allclose(found, exact, rtol=1e-6)


def test_over_relaxed_with_factor_one_is_textbook_sinkhorn(x64):
    k = common.random_problem(30).affinities()[0]
    u, v = convergence.over_relaxed(k, 0.05, 7, 1.0)
    uv = (np.zeros(30), np.zeros(30))
    for _ in range(7):
        uv = peers.plain_step(k, 0.05, uv)
    np.testing.assert_allclose(u, uv[0], rtol=1e-12)
    np.testing.assert_allclose(v, uv[1], rtol=1e-12)
    assert convergence.momentum(k, 0.05, 7, 1.0) == pytest.approx(convergence.textbook(k, 0.05, 7))


def test_gradient_sweep_skips_arms_over_the_time_limit(tmp_path):
    options = ["--epsilon", "0.1", "0.05", "--data", "random", "--arms", "Danskin$"]
    gradient.main(["--quick", "--sweep", *options, "--time_limit", "1e-9", "--out", str(tmp_path)])
    ours, slow, again, _ = _rows(tmp_path / "gradient_sweep_n96.csv")
    assert ours["status"] == "ok" and float(ours["seconds"]) > 0
    assert slow["status"].startswith("about") and slow["seconds"] == ""
    assert again["arm"] == ours["arm"] and again["status"] == "over 1e-09 s before"


def test_time_interleaved_alternates_calls_and_keeps_outputs():
    """The order alternates, so that no call always runs after the same other call."""
    log = []
    calls = {name: lambda name=name: log.append(name) or np.ones(1) for name in "abc"}
    seconds, kept = common.time_interleaved(calls, repeats=2, keep=lambda out: float(out[0]))
    assert log == ["a", "b", "c", "c", "b", "a"]
    assert set(seconds) == set("abc") and kept == dict.fromkeys("abc", 1.0)


def test_memory_of_counts_arguments_and_outputs():
    compiled = jax.jit(lambda x: x + 1).lower(np.zeros((256, 1024), np.float32)).compile()
    temporary, total = common.memory_of(compiled)
    assert total == pytest.approx(2.0 + temporary)
