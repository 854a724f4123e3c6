"""Settings, runs and comparisons, started in this process the way the command line does."""

import dataclasses
import fcntl
import json

import numpy as np
import pytest
import small_runs
from safetensors.numpy import save_file
from small_runs import is_one_line

import sotalign_jax
from experiments import batch, main, runner, settings
from experiments.configs import compare as compare_config
from experiments.configs import paper, quickstart
from sotalign_jax import checkpoints, checks, data, evaluation, methods, teachers, training

# ml_collections loads config files by a deprecated call.
pytestmark = pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")


@pytest.fixture
def launch(files, tmp_path, capsys):
    """Starts the launcher with the small config; returns what it printed and how it ended."""

    def start(*options, method="cca", workdir=tmp_path / "run", config=files / "config.py"):
        argv = list(options)
        if config is not None:
            argv.insert(0, f"--config={config}" + (f":{method}" if method else ""))
        if workdir is not None:
            argv.append(f"--workdir={workdir}")
        return small_runs.start(main, argv, capsys)

    return start


# --- settings ----------------------------------------------------------------------------------


def test_defaults_are_the_papers():
    (run,) = settings.plan_runs(settings.default_config())
    assert run == settings.Settings(method="sotalign", options=methods.SOTAlign())
    assert run.train == training.TrainConfig()
    assert json.loads(json.dumps(settings.to_json(run)))["train"]["seed"] == 42


def test_methods_and_seeds_span_the_runs_and_overrides_change_one_method():
    config = settings.default_config()
    config.methods, config.seeds = ("cca", "sotalign"), (3, 1)
    config.overrides = {"sotalign": {"train": {"steps": 7}, "sotalign": {"block_size": 5}}}
    runs = settings.plan_runs(config)
    assert [(run.method, run.train.seed) for run in runs] == [
        ("cca", 3),
        ("cca", 1),
        ("sotalign", 3),
        ("sotalign", 1),
    ]
    assert [run.train.steps for run in runs] == [2000, 2000, 7, 7]
    assert [run.options and run.options.block_size for run in runs] == [None, None, 5, 5]


def test_every_method_has_a_section_and_runs_hold_their_own_options():
    config = settings.default_config()
    for name, method in methods.METHODS.items():
        assert config[name].to_dict() == dataclasses.asdict(method)
    config.methods = settings.METHODS
    for run in settings.plan_runs(config):
        assert run.options == methods.METHODS.get(run.method)
        assert json.loads(json.dumps(settings.to_json(run)))["method"] == run.method
    config.sail_semi.siglip_norm = "per_row"
    sail, semi = (run for run in settings.plan_runs(config) if run.method.startswith("sail"))
    assert (sail.options, semi.options.siglip_norm) == (methods.SAIL(), "per_row")


def test_a_method_can_be_named_again_with_other_settings():
    config = settings.default_config()
    config.variants = {"taught": "sotalign"}
    config.methods, config.pairs, config.seeds = ("sotalign", "taught"), (50, 20), (0,)
    config.overrides = {"taught": {"heads": {"init": "teacher"}, "sotalign": {"alpha": 1.0}}}
    runs = settings.plan_runs(config)
    assert [(run.name, run.method, run.data.n_pairs) for run in runs] == [
        ("sotalign", "sotalign", 50),
        ("sotalign", "sotalign", 20),
        ("taught", "sotalign", 50),
        ("taught", "sotalign", 20),
    ]
    assert [run.heads.init for run in runs] == ["random", "random", "teacher", "teacher"]
    assert [run.options.alpha for run in runs] == [1e-4, 1e-4, 1.0, 1.0]
    assert batch.run_names(runs)[3] == "taught-20pairs-seed0"


def test_bundled_configs():
    names = [run.method for run in settings.plan_runs(quickstart.get_config())]
    assert names == ["cca", "sail", "sotalign"]
    smoke = settings.plan_runs(quickstart.get_config("smoke,seeds=2"))
    assert len(smoke) == 6 and all(run.train.steps < 10 for run in smoke)
    sail, sotalign = settings.plan_runs(paper.get_config())
    assert (sail.method, sotalign.method) == ("sail", "sotalign")
    assert sotalign.train.pair_batch + sotalign.train.unpaired_batch == 32_768
    assert sotalign.data.n_pairs == 10_000 and sotalign.data.n_unpaired == 1_000_000
    assert (sotalign.options.epsilon, sotalign.options.epsilon_star) == (0.05, 0.005)
    appendix = settings.plan_runs(paper.get_config("seeds=1,appendix"))[1]
    epsilon_star = dataclasses.replace(sotalign.options, epsilon_star=0.01)
    assert appendix.options == epsilon_star and appendix.train.seed == 0
    with pytest.raises(checks.InputError, match=r"config: 'apendix' is unknown; .*, appendix$"):
        paper.get_config("apendix")
    everything = settings.plan_runs(compare_config.get_config("pairs=500+2000,seeds=2"))
    names = list(dict.fromkeys(run.name for run in everything))
    assert {*methods.METHODS, "cca", "procrustes", "sotalign_teacher"} == set(names)
    assert len(everything) == 4 * len(names)
    assert {run.data.n_pairs for run in everything} == {500, 2000}
    trains = [run.train for run in everything]
    assert len({(t.steps, t.pair_batch, t.unpaired_batch) for t in trains}) == 1  # one budget
    assert len(settings.plan_runs(compare_config.get_config())) == 3 * len(names)
    starts = {run.name: run.heads.init for run in everything if run.method == "sotalign"}
    assert starts == {"sotalign": "random", "sotalign_teacher": "teacher"}
    for get_config in (quickstart.get_config, paper.get_config, compare_config.get_config):
        with pytest.raises(checks.InputError, match=r"config: 'bogus' is unknown; choose of smoke"):
            get_config("bogus")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("nope", 1, "config.nope: is no setting; choose of contrastive_mlp, csa, data, "),
        ("train.nope", 1, "config.train.nope: is no setting; choose of eval_every"),
        ("train.seed", 1, "config.train.seed: is no setting"),
        ("train", 1, "config.train: is 1; set its entries"),
        ("method", "sail", "config.method: is no setting"),
        ("methods", (), r"config.methods: is \(\); pass a tuple of at least one entry"),
        ("methods", ("sale",), "config.methods: 'sale' is unknown; choose one of csa, "),
        ("pairs", 5, "config.pairs: is 5; pass a tuple"),
        ("pairs", (0,), "config.pairs: 0 is no number of pairs; pass whole numbers >= 1"),
        ("pairs", (5, 5), "config.pairs: 5 comes twice"),
        ("variants", 3, "config.variants: is 3; set its entries"),
        ("variants", {"cca": "cca"}, "config.variants.cca: is a method's name; choose another"),
        ("variants", {"s": "sial"}, "config.variants.s: 'sial' is unknown; choose one of csa"),
        ("variants", {"a/b": "sail"}, "config.variants: 'a/b' names folders and files; use"),
        ("seeds", (0, 0), "config.seeds: 0 comes twice"),
        ("seeds", (-1,), "config.seeds: -1 is no seed"),
        ("seeds", ("a",), "config.seeds: 'a' is no seed"),
        ("train.steps", "abc", "config.train.steps: is 'abc'; pass a value of type int"),
        ("train.steps", True, "config.train.steps: is True; pass a value of type int"),
        ("train.steps", 0, "config.train.steps: is 0; pass a whole number of at least 1"),
        ("train.learning_rate", -1.0, "config.train.learning_rate: is -1.0; pass a number"),
        ("sotalign.divergence", "l2", "config.sotalign.divergence: 'l2' is unknown; choose"),
        ("data.name", "cc3m", "config.data.name: 'cc3m' is unknown; choose one of pictures"),
        ("data.pool", "all", "config.data.pool: 'all' is unknown; choose one of disjoint"),
        ("data.files.x", "x.npy", "config.data.files.x: is set but name is 'pictures'"),
        ("teacher.kind", "ccca", "config.teacher.kind: 'ccca' is unknown; choose one of"),
        ("heads.kind", "cnn", "config.heads.kind: 'cnn' is unknown; choose one of linear, mlp"),
        ("heads.dim", 0, "config.heads.dim: is 0; pass a whole number of at least 1"),
        ("heads", {"kind": "mlp", "init": "teacher"}, "config.heads.init: a linear teacher"),
        ("overrides", {"sial": {}}, "config.overrides: 'sial' is unknown; choose one of "),
        ("overrides", {"sotalign": 3}, "config.overrides.sotalign: is 3; set its entries"),
        ("overrides", {"sotalign": {"no": 3}}, "config.overrides.sotalign.no: is no setting"),
    ],
)
def test_settings_that_do_not_exist_are_named(path, value, message):
    config = settings.default_config()
    *parents, name = path.split(".")
    node = config
    for parent in parents:
        node = node[parent]
    with config.ignore_type():
        if name == "heads":
            node[name].update(value)
        else:
            node[name] = value
    with pytest.raises(checks.InputError, match=f"^{message}") as error:
        settings.plan_runs(config)
    assert "\n" not in str(error.value)


# --- the command line --------------------------------------------------------------------------


def test_settings_without_a_default_and_tuples_can_be_set(launch, files):
    out, error = launch(
        "--config.data.n_unpaired=100",
        "--config.sotalign.block_size=16",
        "--config.teacher.dim=8",
        f"--config.data.files.zero_shot_x={files}/zero_shot_x.npy",
        f"--config.data.files.zero_shot_labels={files}/zero_shot_labels.npy",
        f"--config.data.files.zero_shot_prompts={files}/zero_shot_prompts.npy",
        "--config.methods=('sail', 'sotalign')",
        "--config.seeds=(0,1)",
        "--config.overrides={'sail': {'train': {'steps': 5}}}",
        "--config.train.learning_rate=1",
        "--config.tensorboard",
        "--dry_run",
        workdir=None,
    )
    assert error is None
    decoder, runs = json.JSONDecoder(), []
    while out.strip():
        run, end = decoder.raw_decode(out.lstrip())
        runs.append(run)
        out = out.lstrip()[end:]
    asked = [run["settings"] for run in runs]
    assert [(one["method"], one["train"]["seed"]) for one in asked] == [
        ("sail", 0),
        ("sail", 1),
        ("sotalign", 0),
        ("sotalign", 1),
    ]
    assert [one["train"]["steps"] for one in asked] == [5, 5, 40, 40]
    assert asked[2]["options"]["block_size"] == 16 and asked[0]["teacher"]["dim"] == 8
    assert asked[0]["options"] == dataclasses.asdict(methods.SAIL())
    assert asked[0]["train"]["learning_rate"] == 1.0 and asked[0]["tensorboard"] is True
    assert runs[0]["shapes"] == {
        "pairs_x": [60, 12],
        "pairs_y": [60, 10],
        "pool_x": [100, 12],
        "pool_y": [100, 10],
        "val_x": [50, 12],
        "val_y": [50, 10],
        "test_x": [50, 12],
        "test_y": [50, 10],
        "zero_shot_x": [50, 12],
        "zero_shot_prompts": [3, 2, 10],
    }


def test_a_dry_run_writes_nothing(launch, tmp_path):
    before = small_runs.contents(tmp_path)
    _, error = launch("--dry_run")
    assert error is None
    assert small_runs.contents(tmp_path) == before and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--config.nope=1"],
            "config.nope: is no setting; choose of contrastive_mlp, csa, data, heads",
        ),
        (["--config.train.nope=1"], "config.train.nope: is no setting; choose of eval_every"),
        (["--config.trane.steps=1"], 'config: Did you mean "train" instead of "trane"?'),
        (["--config.train.steps=abc"], "flag --config.train.steps=abc: invalid literal for int"),
        (["--config.teacher.dim=abc"], "flag --config.teacher.dim=abc: invalid literal for int"),
        (
            ["--config.train.steps=-4"],
            "config.train.steps: is -4; pass a whole number of at least 1",
        ),
        (["--config.methods=('sale',)"], "config.methods: 'sale' is unknown; choose one of csa"),
        (["--config.data.pool=all"], "config.data.pool: 'all' is unknown; choose one of"),
        (["--wrkdir=a"], "Unknown command line flag 'wrkdir'. Did you mean: workdir"),
        (["again"], "arguments: 'again' is not understood; see --help"),
    ],
)
def test_a_wrong_option_ends_in_one_line(launch, tmp_path, options, message):
    _, error = launch(*options)
    assert is_one_line(error) and message in error
    assert not (tmp_path / "run").exists()


def test_what_must_be_given(launch, files):
    assert launch(workdir=None)[1] == "error: workdir: is not set; pass --workdir=FOLDER"
    _, error = launch(config=None)
    assert is_one_line(error) and "config: is not set; pass --config=" in error
    _, error = launch("--config.data.files.x=", method="sail")
    assert is_one_line(error) and "config.data: files.x: is not set; pass --config.data" in error


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (None, "config: [Errno 2] No such file or directory: "),
        ("def get_config(:", "config: invalid syntax (bad.py, line 1)"),
        ("x = 1", "has no attribute 'get_config'"),
        ("def get_config():\n return 3", "config: get_config returned int; return a ConfigDict"),
        (
            "config.nope = 1",
            "config.nope: is no setting; choose of contrastive_mlp, csa, data, heads",
        ),
        ("config.train.nope = 1", "config.train.nope: is no setting; choose of eval_every"),
        (
            "config.trane.steps = 1",
            'bad.py, line 4, `config.trane.steps = 1`: Did you mean "train"',
        ),
        ("config.train.steps = 'abc'", "bad.py, line 4, `config.train.steps = 'abc'`: Could not"),
        ("config.train.steps /= 0", "line 4, `config.train.steps /= 0`: division by zero"),
        ("settings.apply_switches(config, 'bogus')", "config: 'bogus' is unknown; choose of"),
    ],
)
def test_a_bad_config_file_ends_in_one_line(launch, tmp_path, code, message):
    path = tmp_path / "bad.py"
    if code is not None and code.startswith(("config", "settings")):
        head = "from experiments import settings\ndef get_config():\n"
        code = f"{head} config = settings.default_config()\n {code}\n return config\n"
    if code is not None:
        path.write_text(code)
    _, error = launch(config=path, method=None)
    assert is_one_line(error) and message in error
    assert not (tmp_path / "run").exists()


# --- runs --------------------------------------------------------------------------------------


@pytest.fixture
def sail_run(launch, files, tmp_path):
    """A finished run of SAIL with zero-shot classes, and what it printed."""
    parts = ("x", "labels", "prompts")
    options = [f"--config.data.files.zero_shot_{p}={files}/zero_shot_{p}.npy" for p in parts]

    def start(*more):
        return launch(*options, "--config.train.pair_batch=60", *more, method="sail")

    out, error = start()
    assert error is None
    return start, out, tmp_path / "run"


def test_a_run_folder_and_its_second_start(sail_run, files):
    start, out, run = sail_run
    config = json.loads((run / "config.json").read_text())
    assert config["method"] == "sail" and config["train"]["seed"] == 0
    assert config["data"]["files"]["val_x"] == f"{files}/val_x.npy"
    assert "jax" in json.loads((run / "environment.json").read_text())["packages"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 41))
    scored = {line["step"]: line["val/mean/R@1"] for line in lines if "val/mean/R@1" in line}
    assert list(scored) == [*range(3, 40, 3), 40]
    assert checkpoints.Checkpoints(run / "checkpoints").steps()[-1] == 40

    results = json.loads((run / "results.json").read_text())
    splits = [f"{split}/{way}" for split in ("val", "test") for way in ("x_to_y", "y_to_x", "mean")]
    wanted = {f"{name}/R@{k}" for name in splits for k in (1, 5, 10)} | {"best_step"}
    assert results.keys() == wanted | {"test/zero_shot/top1", "test/zero_shot/mean_per_class"}
    assert results["val/mean/R@1"] == max(scored.values()) == scored[results["best_step"]]

    # The saved aligner is the model that the results are about.
    aligner = sotalign_jax.Aligner.load(run)
    similarity = aligner.similarity(*(np.load(files / f"test_{side}.npy") for side in "xy"))
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

    # A finished run needs no data, prints the same table and changes nothing but its copies.
    before = small_runs.contents(run)
    for path in files.glob("*.npy"):
        path.unlink()
    assert start() == (out, None)
    after = small_runs.contents(run)
    assert after.pop("comparison.png") and before.pop("comparison.png") and after == before

    # Other settings are refused and nothing is touched.
    for option, difference in [
        ("--config.train.steps=41", "train.steps=40 but train.steps=41 is asked for"),
        ("--config.seeds=(1,)", "train.seed=0 but train.seed=1 is asked for"),
        ("--config.methods=('sail','cca')", "unset but contrastive_mlp.loss=siglip is asked for"),
    ]:
        _, error = start(option)
        assert is_one_line(error) and error.endswith("choose another --workdir")
        assert "error: workdir: " in error and difference in error
        assert small_runs.contents(run).keys() == {*before, "comparison.png"}
        assert before.items() <= small_runs.contents(run).items()


def test_several_runs_share_a_folder(launch, tmp_path):
    options = ["--config.methods=('procrustes','cca')", "--config.seeds=(0,1)"]
    out, error = launch(*options)
    assert error is None and "±" in out
    run = tmp_path / "run"
    results = json.loads((run / "results.json").read_text())
    assert list(results) == ["procrustes-seed0", "procrustes-seed1", "cca-seed0", "cca-seed1"]
    for name, values in results.items():
        assert json.loads((run / name / "results.json").read_text()) == values
        assert sotalign_jax.Aligner.load(run / name).info["results"] == values
    assert json.loads((run / "config.json").read_text())["seeds"] == [0, 1]
    assert {"comparison.md", "comparison.csv", "comparison.png"} <= small_runs.contents(run).keys()
    before = small_runs.contents(run)
    assert launch(*options) == (out, None)
    for other in [["--config.seeds=(0,1,2)", options[0]], [*options, "--config.teacher.dim=3"], []]:
        _, error = launch(*other)
        assert is_one_line(error) and "error: workdir: " in error
    after = small_runs.contents(run)
    assert after.pop("comparison.png") and before.pop("comparison.png") and after == before


def test_a_teacher_as_method_scores_what_the_teacher_does(launch, files, tmp_path):
    options = [
        "--config.teacher.ridge=0.01",
        "--config.teacher.dim=5",
        "--config.teacher.noise=0.2",
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


def test_a_contrastive_teacher_starts_the_heads_and_no_gallery_is_needed(launch, files, tmp_path):
    out, error = launch(
        f"--config.data.files={{'x': '{files}/x.npy', 'y': '{files}/y.npy'}}",
        "--config.teacher.kind=contrastive",
        "--config.heads.init=teacher",
        "--config.train.steps=2",
        "--config.tensorboard",
        method="sail",
    )
    assert error is None and "sail" in out
    run = tmp_path / "run"
    assert json.loads((run / "results.json").read_text()) == {"best_step": 2}
    assert not (run / "comparison.png").exists() and list((run / "tensorboard").iterdir())


@pytest.mark.parametrize("kind", ["glu", "tanh"])
def test_heads_of_every_kind_train_and_are_saved(launch, tmp_path, kind):
    options = (f"--config.heads.kind={kind}", "--config.heads.hidden=9", "--config.train.steps=2")
    assert launch(*options, method="sail")[1] is None
    aligner = sotalign_jax.Aligner.load(tmp_path / "run")
    assert aligner.heads.x.kind == kind and aligner.heads.y.hidden == 9
    assert aligner.info["settings"]["heads"]["kind"] == kind


def test_heads_are_the_methods_own_unless_told(files):
    class Published(methods.SAIL):
        head = "tanh"

    config = settings.default_config()
    config.methods = ("sail",)
    config.heads.hidden = 5
    config.data.name, config.data.n_pairs = "files", 60
    config.data.files.update({name: f"{files}/{name}.npy" for name in ("x", "y")})
    (run,) = settings.plan_runs(config)
    run = dataclasses.replace(run, options=Published())
    assert runner.prepare(run).start.x.kind == "tanh"
    other = dataclasses.replace(run, heads=dataclasses.replace(run.heads, kind="linear"))
    assert runner.prepare(other).start.x.kind == "linear"
    taught = dataclasses.replace(run, heads=dataclasses.replace(run.heads, init="teacher"))
    with pytest.raises(checks.InputError, match=r"config.heads: teacher: cannot start heads of"):
        runner.prepare(taught)


@pytest.mark.parametrize(
    ("harm", "options", "message"),
    [
        ({"y": lambda a: a[:-1]}, [], "config.data: pairs: x has 300 rows but y has 299; paired"),
        ({"val_x": lambda a: a[:, 1:]}, [], "config.data: val x: width 11 differs from the pairs'"),
        ({"test_y": lambda a: a[:9]}, [], "files.test: gallery: x has 50 rows but y has 9; pass"),
        ({"x": lambda a: a * np.where(np.arange(300) == 7, np.nan, 1)[:, None]}, [], "x: row 7 is"),
        ({"y": lambda a: a * (np.arange(300) != 8)[:, None]}, [], "y: row 8 is all zeros"),
        ({"val_y": lambda a: a * np.inf}, [], "files.val: gallery y: row 0 is NaN or inf; remove"),
        ({"x": lambda a: a[0]}, [], "x: has shape (12,); pass a 2-D array"),
        ({"x": lambda a: a.astype(int)}, [], "x: has dtype int64; pass real floating-point"),
        ({}, ["n_pairs=301"], "config.data: n_pairs: 301 asked of 300 rows; keep it in 1..300"),
        ({}, ["n_pairs=300"], "config.data: pool x: has no rows but SOTAlign learns from"),
        ({}, ["n_unpaired=121"], "n_unpaired: 121 asked but 120 rows remain for a disjoint pool"),
        ({}, ["n_pairs=1"], "config.teacher: pairs_x: has 1 rows but at least 2 are needed"),
        ({}, ["files.test_y="], "files.test_y: is not set; pass --config.data.files.test_y=PATH"),
        ({}, ["files.val_x=gone.npy"], "config.data: files.val_x: gone.npy: no such file; check"),
        ({}, ["files.val_x=x.csv"], "files.val_x: x.csv: unknown format '.csv'; use .npy"),
        ({}, ["files.zero_shot_x=x.npy"], "files.zero_shot_x: x.npy: no such file"),
    ],
)
def test_bad_data_end_in_one_line(launch, files, tmp_path, harm, options, message):
    for name, change in harm.items():
        np.save(files / f"{name}.npy", change(np.load(files / f"{name}.npy")))
    options = [f"--config.data.{option}" for option in options]
    _, error = launch(*options, method="sotalign")
    assert is_one_line(error) and message in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
def test_truncated_files_are_named(launch, files, tmp_path, suffix):
    path = files / f"cut{suffix}"
    rows = np.load(files / "x.npy")
    {".npy": np.save, ".npz": np.savez, ".safetensors": lambda p, a: save_file({"a": a}, p)}[
        suffix
    ](path, rows)
    assert launch(f"--config.data.files.x={path}", "--dry_run")[1] is None
    path.write_bytes(path.read_bytes()[:5000])
    _, error = launch(f"--config.data.files.x={path}")
    assert is_one_line(error) and f"config.data: files.x: {path}: cannot be read" in error
    assert not (tmp_path / "run").exists()


def test_a_corrected_start_can_use_the_same_folder(launch, tmp_path):
    for options, message in [
        (
            ["--config.teacher.dim=11"],
            "config.teacher: dim: 11 directions asked but these 60 pairs",
        ),
        (
            ["--config.teacher.ridge=-1"],
            "config.teacher: ridge: is -1.0; pass a number of at least 0",
        ),
        (["--config.teacher.noise=2"], "config.teacher: fraction: 2.0 is outside 0..1"),
    ]:
        for more in ([], ["--config.methods=('cca','procrustes')"]):
            _, error = launch(*options, *more)
            assert is_one_line(error) and message in error
    assert not (tmp_path / "run").exists()
    assert launch("--config.teacher.dim=10")[1] is None


def test_folders_that_cannot_be_used(launch, tmp_path):
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
            assert is_one_line(error) and "error: workdir: " in error and message in error
            assert error.endswith("choose another --workdir")
    assert small_runs.contents(tmp_path) == before


def test_a_folder_in_use_is_refused(launch, tmp_path):
    assert launch()[1] is None
    run = tmp_path / "run"
    (run / "results.json").unlink()
    before = small_runs.contents(run)
    with (run / "config.json").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _, error = launch()
    assert is_one_line(error) and "is in use by another process; wait for its end" in error
    assert small_runs.contents(run) == before
    assert launch()[1] is None


def test_a_loss_that_is_not_finite_ends_in_one_line(launch):
    _, error = launch("--config.train.learning_rate=1e38", method="sail")
    assert is_one_line(error) and "loss: not finite at step" in error
