"""Tests of runs and comparisons with experiments.main, run in this process."""

import csv
import io
import json
import os
import pathlib
import signal

import numpy as np
import pytest
import small_runs
from safetensors.numpy import save_file
from small_runs import is_one_line

import sotalign_jax
from experiments import main, run, spec
from sotalign_jax import checks, data, evaluation, methods, recipe, storage, teachers
from sotalign_jax import files as files_lib


def several(*names):
    """Returns the option --config.runs with one run per method."""
    return f"--config.runs={ {name: {'method': name} for name in names} }"


@pytest.fixture
def launch(files, tmp_path, capsys, undrawn):
    """Returns a function that runs the launcher with the small config."""

    def start(*options, method="cca", workdir=tmp_path / "run", config=files / "config.py"):
        argv = list(options)
        if config is not None:
            argv.insert(0, f"--config={config}" + (f":{method}" if method else ""))
        if workdir is not None:
            argv.append(f"--workdir={workdir}")
        return small_runs.start(main, argv, capsys)

    return start


@pytest.fixture
def sail_run(launch, files, tmp_path):
    """Returns a start function, the output and the folder of a finished SAIL run."""
    parts = ("x", "labels", "prompts")
    options = [f"--config.data.files.zero_shot_{p}={files}/zero_shot_{p}.npy" for p in parts]

    def start(*more):
        return launch(*options, "--config.train.pair_batch=60", *more, method="sail")

    out, error = start()
    assert error is None
    return start, out, tmp_path / "run"


def test_main_writes_run_folder_and_second_start_changes_nothing(sail_run, files):
    start, out, run = sail_run
    config = json.loads((run / "config.json").read_text())
    assert config["method"] == "sail" and config["seed"] == 0
    assert config["data"]["files"]["val_x"] == f"{files}/val_x.npy"
    assert "jax" in json.loads((run / "environment.json").read_text())["packages"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 41))
    scored = {line["step"]: line["val/mean/R@1"] for line in lines if "val/mean/R@1" in line}
    assert list(scored) == [*range(3, 40, 3), 40]
    assert (run / "checkpoints" / "40").is_dir()

    results = json.loads((run / "results.json").read_text())
    ways = [f"{part}{way}" for part in ("", "calibrated/") for way in ("x_to_y", "y_to_x", "mean")]
    splits = [f"{split}/{way}" for split in ("val", "test") for way in ways]
    wanted = {f"{name}/R@{k}" for name in splits for k in (1, 5, 10)}
    wanted |= {"best_step", "calibrated"}
    assert results.keys() == wanted | {"test/zero_shot/top1", "test/zero_shot/mean_per_class"}
    assert results["val/mean/R@1"] == max(scored.values()) == scored[results["best_step"]]

    # The saved aligner reproduces the results.
    aligner = sotalign_jax.Aligner.load(run)
    tested = (np.load(files / f"test_{side}.npy") for side in "xy")
    similarity = aligner.similarity(*tested, calibrated=False)
    truth = np.arange(50)
    assert results["test/x_to_y/R@1"] == pytest.approx(100 * np.mean(similarity.argmax(1) == truth))
    assert results["test/y_to_x/R@1"] == pytest.approx(100 * np.mean(similarity.argmax(0) == truth))
    prompts = np.load(files / "zero_shot_prompts.npy").reshape(6, 10)
    classes = aligner.embed_y(prompts).reshape(3, 2, 8).sum(axis=1)
    classes /= np.linalg.norm(classes, axis=1, keepdims=True)
    guess = (aligner.embed_x(np.load(files / "zero_shot_x.npy")) @ classes.T).argmax(1)
    top1 = 100 * np.mean(guess == np.load(files / "zero_shot_labels.npy"))
    assert results["test/zero_shot/top1"] == pytest.approx(top1)
    assert f"{results['test/mean/R@1']:.1f}" in out and "zero-shot" in out

    # A finished run needs no data and prints the same table. Only comparison.png may change.
    before = small_runs.contents(run)
    for path in files.glob("*.npy"):
        path.unlink()
    assert start() == (out, None)
    after = small_runs.contents(run)
    assert after.pop("comparison.png") and before.pop("comparison.png") and after == before

    # Other settings are rejected and no file changes.
    for option, difference in [
        ("--config.train.steps=41", "train.steps=40 but train.steps=41"),
        ("--config.seeds=(1,)", "seed=0 but seed=1"),
        ("--config.seeds=(0,1)", "sail-seed0"),
    ]:
        _, error = start(option)
        assert is_one_line(error) and error.endswith("choose another --workdir")
        assert "error: workdir" in error and difference in error
        assert small_runs.contents(run).keys() == {*before, "comparison.png"}
        assert before.items() <= small_runs.contents(run).items()


def test_main_writes_several_runs_to_one_folder(launch, tmp_path):
    options = [several("procrustes", "cca"), "--config.seeds=(0,1)"]
    out, error = launch(*options)
    assert error is None and "±" in out
    run = tmp_path / "run"
    results = json.loads((run / "results.json").read_text())
    assert list(results) == ["procrustes-seed0", "procrustes-seed1", "cca-seed0", "cca-seed1"]
    for name, values in results.items():
        assert json.loads((run / name / "results.json").read_text()) == values
        assert sotalign_jax.Aligner.load(run / name).info["results"] == values
    assert json.loads((run / "config.json").read_text()).keys() == results.keys()
    assert {"comparison.md", "comparison.csv", "comparison.png"} <= small_runs.contents(run).keys()
    before = small_runs.contents(run)
    assert launch(*options) == (out, None)
    for other in [
        ["--config.seeds=(0,1,2)", options[0]],
        [*options, "--config.teacher_options.dim=3"],
        [],
    ]:
        _, error = launch(*other)
        assert is_one_line(error) and "error: workdir" in error
    after = small_runs.contents(run)
    assert after.pop("comparison.png") and before.pop("comparison.png") and after == before


def test_main_reads_files_once_and_embeds_each_gallery_once_a_run(launch, files, monkeypatch):
    read, embedded = [], []
    load_array, embed = files_lib.load_array, evaluation.embed

    def counted(path):
        read.append(pathlib.Path(path).stem)
        return load_array(path)

    def watched(head, rows, **options):
        embedded.extend(name for name in ("test_x", "test_y") if np.array_equal(rows, held[name]))
        return embed(head, rows, **options)

    held = {name: np.load(files / f"{name}.npy") for name in ("test_x", "test_y")}
    monkeypatch.setattr(files_lib, "load_array", counted)
    monkeypatch.setattr(evaluation, "embed", watched)
    _, error = launch(several("procrustes", "cca", "sail"), "--config.train.steps=2", method=None)
    assert error is None
    assert sorted(read) == ["test_x", "test_y", "val_x", "val_y", "x", "y"]
    assert sorted(embedded) == 3 * ["test_x"] + 3 * ["test_y"]


def test_main_with_cca_matches_the_teachers_scores(launch, files, tmp_path):
    options = [
        "--config.teacher_options.ridge=0.01",
        "--config.teacher_options.dim=5",
        "--config.teacher_noise=0.2",
    ]
    assert launch(*options)[1] is None
    arrays = {path.stem: np.load(path) for path in files.glob("*.npy")}
    rows = data.split_rows(300, n_pairs=60, seed=0).pairs
    y = data.mismatch_pairs(arrays["y"][rows], fraction=0.2, seed=0)
    teacher = teachers.cca(arrays["x"][rows], y, ridge=0.01, dim=5)
    gallery = data.gallery(arrays["test_x"], arrays["test_y"])
    expected = evaluation.evaluate(teacher.map_x, teacher.map_y, gallery)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert {f"test/{key}": value for key, value in expected.items()}.items() <= results.items()


def test_main_starts_from_contrastive_teacher_without_galleries(launch, files, tmp_path):
    out, error = launch(
        f"--config.data.files={{'x': '{files}/x.npy', 'y': '{files}/y.npy'}}",
        "--config.teacher=contrastive",
        "--config.start=teacher",
        "--config.train.steps=2",
        "--config.tensorboard",
        method="sail",
    )
    assert error is None and "sail" in out
    run = tmp_path / "run"
    results = json.loads((run / "results.json").read_text())  # on held-out rows
    assert {"best_step", "val/mean/R@1", "test/mean/R@1"} <= results.keys()
    assert list((run / "tensorboard").iterdir())


@pytest.mark.parametrize(("unpaired", "val"), [(90, True), (0, True), (0, False)])
def test_main_align_matches_align(launch, files, tmp_path, unpaired, val):
    options = ["--config.train.steps=3", f"--config.data.n_unpaired={unpaired}"]
    options += [] if val else [f"--config.data.files.val_{side}=" for side in "xy"]
    options += ["--config.data.n_pairs=120"]
    _, error = launch(*options, method="align")
    assert error is None
    page = (tmp_path / "run" / "report.html").read_text()
    assert "&quot;steps&quot;: 3" in page
    assert "ridge" not in page and "learning_rate" not in page  # the recipe sets these
    made = sotalign_jax.Aligner.load(tmp_path / "run")
    arrays = {name: np.load(files / f"{name}.npy") for name in ("x", "y", "val_x", "val_y")}
    rows = data.semi_supervised(arrays["x"], arrays["y"], n_pairs=120, n_unpaired=unpaired, seed=0)
    expected = sotalign_jax.align(
        (rows.pairs_x, rows.pairs_y),
        *((rows.pool_x, rows.pool_y) if unpaired else ()),
        val=(arrays["val_x"], arrays["val_y"]) if val else None,
        steps=3,
        unpaired_batch=32,
        progress=False,
    )
    assert made.info["selected"] == expected.info["selected"] and "settings" in made.info
    tested = arrays["val_x"], arrays["val_y"]
    for calibrated in (False, True):
        ours, theirs = (one.similarity(*tested, calibrated=calibrated) for one in (made, expected))
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("kind", ["glu", "tanh"])
def test_main_trains_and_saves_nonlinear_heads(launch, tmp_path, kind):
    options = (f"--config.head={kind}", "--config.hidden=9", "--config.train.steps=2")
    assert launch(*options, method="sail")[1] is None
    aligner = sotalign_jax.Aligner.load(tmp_path / "run")
    assert aligner.heads.x.kind == kind and aligner.heads.y.hidden == 9
    assert aligner.info["settings"]["head"] == kind


def test_resolve_uses_the_methods_own_head_by_default(files, monkeypatch):
    class Published(methods.SAIL):
        head = "tanh"

    def prepared(**changes):
        paths = {name: f"{files}/{name}.npy" for name in ("x", "y")}
        own = {"name": "files", "n_pairs": 60, "files": paths}
        one = spec.Run().change({"method": "sail", "hidden": 5, "data": own, **changes})
        return recipe.prepare(*run.resolve(one, run.load_dataset(one)))

    monkeypatch.setitem(methods.METHODS, "sail", Published())
    assert prepared().start.x.kind == "tanh"
    assert prepared(head="linear").start.x.kind == "linear"
    with pytest.raises(checks.InputError, match=r"^heads: kind\b.* 'tanh'"):
        prepared(start="teacher")


@pytest.mark.parametrize(
    ("harm", "options", "message"),
    [
        ({"y": lambda a: a[:-1]}, [], "data: y"),
        ({"val_x": lambda a: a[:, 1:]}, [], "data: val_x"),
        ({"test_y": lambda a: a[:9]}, [], "data: files.test: gallery"),
        ({"x": lambda a: a * np.where(np.arange(300) == 7, np.nan, 1)[:, None]}, [], "in row 7;"),
        ({"y": lambda a: a * (np.arange(300) != 8)[:, None]}, [], "in row 8;"),
        ({"val_y": lambda a: a * np.inf}, [], "files.val: gallery y has NaN"),
        ({"x": lambda a: a[0]}, [], "data: x "),
        ({"x": lambda a: a.astype(int)}, [], "int64"),
        ({}, ["n_pairs=301"], "data: n_pairs must be "),
        ({}, ["n_pairs=300"], "data: pool_x "),
        ({}, ["n_unpaired=121"], "n_unpaired must be "),
        ({}, ["n_pairs=1"], "data: n_pairs must be "),
        ({}, ["files.test_y="], "files.test_y"),
        ({}, ["files.val_x=gone.npy"], "data: files.val_x: gone.npy "),
        ({}, ["files.val_x=x.csv"], "files.val_x: x.csv "),
        ({}, ["files.zero_shot_x=x.npy"], "files.zero_shot_x: x.npy "),
    ],
)
def test_main_rejects_bad_data_in_one_line(launch, files, tmp_path, harm, options, message):
    for name, change in harm.items():
        np.save(files / f"{name}.npy", change(np.load(files / f"{name}.npy")))
    options = [f"--config.data.{option}" for option in options]
    _, error = launch(*options, method="sotalign")
    assert is_one_line(error) and message in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
def test_main_names_truncated_files(launch, files, tmp_path, suffix):
    path = files / f"cut{suffix}"
    rows = np.load(files / "x.npy")
    {".npy": np.save, ".npz": np.savez, ".safetensors": lambda p, a: save_file({"a": a}, p)}[
        suffix
    ](path, rows)
    assert launch(f"--config.data.files.x={path}", "--dry_run")[1] is None
    path.write_bytes(path.read_bytes()[:5000])
    _, error = launch(f"--config.data.files.x={path}")
    assert is_one_line(error) and f"data: files.x: {path} " in error
    assert not (tmp_path / "run").exists()


def test_main_can_reuse_the_folder_of_a_rejected_start(launch, tmp_path):
    for options, message in [
        (["--config.teacher_options.dim=11"], "teacher: dim must be "),
        (["--config.teacher_options.ridge=-1"], "teacher_options.ridge"),
        (["--config.teacher_noise=2"], "teacher_noise"),
    ]:
        for more in ([], [several("cca", "procrustes")]):
            _, error = launch(*options, *more)
            assert is_one_line(error) and message in error
    assert not (tmp_path / "run").exists()
    assert launch("--config.teacher_options.dim=10")[1] is None


def test_main_rejects_unusable_folders(launch, tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    before = small_runs.contents(tmp_path)
    for workdir, message in [
        (tmp_path / "note.txt", "note.txt cannot be created"),
        (tmp_path / "note.txt" / "run", "cannot be created (Not a directory)"),
        ("/proc/run", "/proc/run cannot be created"),
        (tmp_path / "full", "holds thesis.tex but no config.json"),
    ]:
        for more in ([], ["--config.seeds=(0,1)"]):
            _, error = launch(*more, workdir=workdir)
            assert is_one_line(error) and "error: workdir" in error and message in error
            assert error.endswith("choose another --workdir")
    assert small_runs.contents(tmp_path) == before


@pytest.mark.parametrize("begun", ["finished", "interrupted", "several"])
def test_main_rejects_run_with_replaced_input(launch, files, tmp_path, begun):
    options = [several("cca", "sail")] if begun == "several" else []
    method = None if begun == "several" else "sail"
    out, error = launch(*options, method=method)
    assert error is None
    if begun == "interrupted":
        (tmp_path / "run" / "results.json").unlink()
    before = small_runs.contents(tmp_path / "run")
    content = (files / "x.npy").read_bytes()
    try:
        np.save(files / "x.npy", np.load(files / "x.npy")[::-1])
        told, error = launch(*options, method=method)
        assert is_one_line(error) and told == ""
        assert "data.files.x: x.npy has other content" in error
        assert small_runs.contents(tmp_path / "run") == before
    finally:
        (files / "x.npy").write_bytes(content)
    again, error = launch(*options, method=method)  # equal content with another modification time
    assert error is None and again == out


def test_main_rejects_folder_in_use(launch, tmp_path):
    assert launch()[1] is None
    run = tmp_path / "run"
    (run / "results.json").unlink()
    before = small_runs.contents(run)
    with storage.lock(run / ".lock"):
        _, error = launch()
    assert is_one_line(error) and "is in use by another process; wait for its end" in error
    assert small_runs.contents(run) == before
    assert launch()[1] is None


@pytest.mark.parametrize("method", ["align", "csa", "sue", "sotalign"])
def test_main_rejects_locked_folder_before_any_computation(launch, tmp_path, capsys, method):
    run = tmp_path / "run"
    with storage.lock(run / ".lock"):  # a first start locks before it reads its data
        _, error = launch(method=method)
    assert is_one_line(error) and "is in use by another process" in error
    assert os.listdir(run) == [".lock"]


def test_main_with_several_runs_rejects_locked_folder(launch, tmp_path):
    with storage.lock(tmp_path / "run" / ".lock"):
        _, error = launch(several("cca", "sail"))
    assert is_one_line(error) and "is in use by another process" in error
    assert os.listdir(tmp_path / "run") == [".lock"]


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("heads.safetensors", "change"),
        ("aligner.json", "remove"),
        ("calibration.safetensors", "cut"),
    ],
)
def test_main_restores_damaged_model_of_finished_run(sail_run, name, harm):
    start, out, run = sail_run
    before = small_runs.contents(run)
    path = run / "aligner" / name
    content = path.read_bytes()
    if harm == "remove":
        path.unlink()
    else:
        path.write_bytes(content[:-9] if harm == "cut" else content[:-9] + b"x" + content[-8:])
    assert start() == (out, None)
    after = small_runs.contents(run)
    for made in ("comparison.png", "report.html"):
        assert after.pop(made) and before.pop(made)
    assert after == before


def test_main_announces_stages_in_order(launch):
    assert launch("--config.train.steps=2", method="align")[1] is None
    order = [
        small_runs.said.index(word)
        for word in ("reading", "fitting the teacher", "compiling", "2/2")
    ]
    assert order == sorted(order)


def test_main_reports_non_finite_loss_in_one_line(launch):
    _, error = launch("--config.train.learning_rate=1e38", method="sail")
    assert is_one_line(error) and "not finite at step" in error


# --- comparisons ---------------------------------------------------------------------------------


def test_main_compares_labels_pairs_and_seeds_in_one_table(launch, tmp_path):
    changes = {
        "procrustes": {"method": "procrustes"},
        "stiff": {"method": "cca", "teacher_options.ridge": 10.0},
    }
    runs = {
        f"{label}-{n}pairs": {**own, "data.n_pairs": n}
        for label, own in changes.items()
        for n in (30, 60)
    }
    out, error = launch(f"--config.runs={runs}", "--config.seeds=(0,1)")
    assert error is None
    run = tmp_path / "run"
    results = json.loads((run / "results.json").read_text())
    assert len(results) == 8 and list(results)[:2] == [
        "procrustes-30pairs-seed0",
        "procrustes-30pairs-seed1",
    ]
    assert (run / "stiff-60pairs-seed1" / "aligner").exists()
    rows = list(csv.DictReader(io.StringIO((run / "comparison.csv").read_text())))
    assert [row["method"] for row in rows] == [*runs, "chance"]
    rows.pop()
    scores = [results[f"stiff-60pairs-seed{seed}"]["test/mean/R@1"] for seed in (0, 1)]
    assert float(rows[-1]["R@1"]) == pytest.approx(sum(scores) / 2)
    spread = abs(scores[0] - scores[1]) / 2**0.5
    assert float(rows[-1]["R@1 ±"]) == pytest.approx(spread)
    assert "stiff-60pairs" in out and "±" in out and (run / "comparison.md").exists()


def test_main_names_failed_runs_and_finishes_the_others(launch, tmp_path):
    runs = {
        "wild": {"method": "sail", "train.learning_rate": 1e38},
        "cca": {"method": "cca"},
        "narrow": {"method": "cca", "teacher_options.dim": 11},
    }
    options = (f"--config.runs={runs}",)
    out, error = launch(*options)
    assert is_one_line(error) and "2 of 3 runs failed; first error: wild-seed0: loss " in error
    rows = out.splitlines()
    assert any(row.startswith("wild") and "-" in row for row in rows)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["cca-seed0"]["test/mean/R@1"] > 0
    assert "loss" in results["wild-seed0"]["error"]
    assert "dim must be " in results["narrow-seed0"]["error"]
    before = small_runs.contents(tmp_path / "run" / "wild-seed0")
    assert launch(*options) == (out, error)
    assert small_runs.contents(tmp_path / "run" / "wild-seed0") == before


@pytest.mark.slow
def test_main_resumes_a_killed_comparison(files, tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"

    def start(workdir):
        options = [
            f"--config={files}/config.py",
            several("cca", "sail", "procrustes"),
            "--config.seeds=(0,1)",
            "--config.train.steps=12",
            f"--workdir={workdir}",
        ]
        return small_runs.popen("main", options, compiled=tmp_path / "compiled")

    middle = run / "sail-seed0" / "checkpoints" / "3"
    small_runs.stop_when(start(run), middle.exists, signal.SIGKILL)
    first = (run / "cca-seed0" / "environment.json").read_bytes()
    assert not (run / "procrustes-seed0").exists()
    for workdir in (run, whole):
        process = start(workdir)
        _, err = process.communicate()
        assert process.returncode == 0, err
        assert "compare: 6/6 runs" in err
        assert ("compare: 1/6" in err) == (workdir == whole)  # finished runs are not repeated
    assert (run / "cca-seed0" / "environment.json").read_bytes() == first
    for name in ("results.json", "comparison.csv", "sail-seed0/metrics.jsonl"):
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name
