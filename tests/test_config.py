"""Tests of the config schema, in config files and on the command line."""

import dataclasses
import doctest
import json

import numpy as np
import pytest
import small_runs
from ml_collections.config_dict import ConfigDict
from small_runs import is_one_line

from experiments import config as config_lib
from experiments import main
from experiments.configs import compare, paper, quickstart
from sotalign_jax import checks, methods, training

# ml_collections calls the deprecated load_module.
pytestmark = pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")


def test_config_doctests_pass():
    options = doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(config_lib, optionflags=options).failed == 0


def test_default_config_is_the_papers():
    ((name, one),) = config_lib.runs(config_lib.default()).items()
    assert name == "sotalign-seed42"
    assert config_lib.method(one) == methods.SOTAlign()
    assert config_lib.train(one) == training.TrainConfig()
    assert json.loads(json.dumps(config_lib.plain(one)))["seed"] == 42


def test_default_config_is_locked():
    config = config_lib.default()
    for section in (config, config.train, config.data.files):
        with pytest.raises(AttributeError):
            section.nope = 1


def test_runs_are_the_product_of_labels_and_seeds():
    config = config_lib.default()
    config.runs = {
        "cca": {"method": "cca"},
        "taught (short)": {"heads.init": "teacher", "train.steps": 7, "sotalign.block_size": 5},
    }
    config.seeds = (3, 1)
    runs = config_lib.runs(config)
    assert list(runs) == ["cca-seed3", "cca-seed1", "taught (short)-seed3", "taught (short)-seed1"]
    assert [one.train.steps for one in runs.values()] == [2000, 2000, 7, 7]
    last = runs["taught (short)-seed1"]
    assert (last.method, last.seed, last.heads.init) == ("sotalign", 1, "teacher")
    assert config_lib.method(last).block_size == 5
    assert config.train.steps == 2000  # the config itself is unchanged
    config.seed = 9
    assert list(config_lib.runs(config)) == ["cca-seed9", "taught (short)-seed9"]


def test_runs_hold_only_options_of_their_own_method():
    config = config_lib.default()
    for name, method in methods.METHODS.items():
        assert config[name].to_dict() == dataclasses.asdict(method)
    config.runs = {name: {"method": name} for name in config_lib.METHODS}
    config.sail_semi.siglip_norm = "per_row"
    runs = {one.method: one for one in config_lib.runs(config).values()}
    for name, one in runs.items():
        sections = set(config_lib.plain(one)) & set(methods.METHODS)
        assert sections == {name} & set(methods.METHODS)
    assert config_lib.method(runs["cca"]) is None
    assert config_lib.method(runs["sail"]) == methods.SAIL()
    assert config_lib.method(runs["sail_semi"]).siglip_norm == "per_row"


def test_plain_excludes_mesh_and_on_device():
    config = config_lib.default()
    config.mesh, config.on_device = 1, False
    (placed,) = config_lib.runs(config).values()
    (plain,) = config_lib.runs(config_lib.default()).values()
    assert config_lib.plain(placed) == config_lib.plain(plain)
    assert (placed.mesh, placed.on_device) == (1, False)


def test_runs_accepts_partial_config():
    written = ConfigDict({"method": "sail", "train": {"steps": 5}, "seeds": [1]})
    ((name, one),) = config_lib.runs(written).items()
    assert name == "sail-seed1" and one.train.steps == 5 and one.train.eval_every == 43


def test_bundled_configs_expand_to_expected_runs():
    assert list(config_lib.runs(quickstart.get_config())) == [
        "cca-seed0",
        "sail-seed0",
        "sotalign-seed0",
        "align-seed0",
    ]
    smoke = config_lib.runs(quickstart.get_config("smoke,seeds=2"))
    assert len(smoke) == 8 and all(one.train.steps < 10 for one in smoke.values())
    sail, sotalign = config_lib.runs(paper.get_config()).values()
    assert (sail.method, sotalign.method) == ("sail", "sotalign")
    assert sotalign.train.pair_batch + sotalign.train.unpaired_batch == 32_768
    assert sotalign.data.n_pairs == 10_000 and sotalign.data.n_unpaired == 1_000_000
    assert (sotalign.sotalign.epsilon, sotalign.sotalign.epsilon_star) == (0.05, 0.005)

    everything = config_lib.runs(compare.get_config("pairs=500+2000,seeds=2"))
    labels = {*methods.METHODS, "cca", "procrustes", "sotalign_teacher"}
    assert len(everything) == 4 * len(labels)
    assert {"sail-500pairs-seed0", "sotalign_teacher-2000pairs-seed1"} <= everything.keys()
    assert {one.data.n_pairs for one in everything.values()} == {500, 2000}
    trains = [one.train for one in everything.values()]
    assert len({(t.steps, t.pair_batch, t.unpaired_batch) for t in trains}) == 1  # one budget
    assert len(config_lib.runs(compare.get_config())) == 3 * len(labels)
    short = config_lib.runs(compare.get_config("smoke"))
    assert len(short) == len(labels)  # one seed
    assert short["sue-seed0"].sue.epochs == 1  # overrides the epochs of its run
    for get_config in (quickstart.get_config, paper.get_config, compare.get_config):
        for word in ("bogus", "seeds=", "pairs=5+", "smoke=1"):
            with pytest.raises(checks.InputError, match=word.replace("+", r"\+")):
                get_config(word)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("stpes", 1, "unknown setting 'stpes'"),
        ("train.stpes", 1, "unknown setting 'train.stpes'; did you mean 'train.steps'?"),
        ("trane.steps", 1, "unknown setting 'trane.steps'; did you mean 'train.steps'?"),
        ("train.seed", 1, "unknown setting 'train.seed'"),
        ("train.steps.x", 1, "unknown setting 'train.steps.x'"),
        ("train", 1, "train"),
        ("method", "sale", "method "),
        ("seeds", 5, "seeds must be tuple"),
        ("seeds", (), "seeds"),
        ("seeds", (0, 0), "seeds"),
        ("seeds", ("a",), "seeds must be int"),
        ("seed", -1, "seed"),
        ("runs", 3, "runs must be dict"),
        ("runs", {"a/b": {"method": "sail"}}, "runs has the label 'a/b'"),
        ("runs", {"a": 3}, "runs['a']: "),
        ("runs", {"a": {"metod": "sail"}}, "runs['a']: unknown setting 'metod'; did you mean "),
        ("runs", {"a": {"seed": 3}}, "runs['a']: run must not set 'seed'"),
        ("runs", {"a": {"train.steps": 0}}, "runs['a']: train.steps"),
        ("train.steps", "abc", "train.steps must be int"),
        ("train.steps", True, "train.steps must be int"),
        ("train.steps", None, "train.steps must be int"),
        ("train.steps", 0, "train.steps "),
        ("train.learning_rate", -1.0, "train.learning_rate"),
        ("sotalign.divergence", "l2", "sotalign.divergence"),
        ("data.name", "cc3m", "data.name"),
        ("data.pool", "all", "data.pool"),
        ("data.pool_noise", 2.0, "data.pool_noise must be in 0..1"),
        ("data.files.x", "x.npy", "data.files.x"),
        ("teacher.kind", "ccca", "teacher.kind"),
        ("teacher.ridge", -1, "teacher.ridge"),
        ("heads.kind", "cnn", "heads.kind"),
        ("heads.dim", 0, "heads.dim"),
        ("heads", {"kind": "mlp", "init": "teacher"}, "heads.init"),
    ],
)
def test_runs_rejects_unknown_or_invalid_settings(key, value, message):
    *parents, name = key.split(".")
    nested = {name: value}
    for parent in reversed(parents):
        nested = {parent: nested}
    with pytest.raises(checks.InputError) as error:
        config_lib.runs(ConfigDict(nested, convert_dict=False))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_runs_error_in_shared_setting_names_no_run():
    config = config_lib.default()
    config.runs = {"a": {"method": "sail"}}
    config.train.steps = -1
    with pytest.raises(checks.InputError, match=r"^train.steps "):
        config_lib.runs(config)


# --- the command line --------------------------------------------------------------------------


@pytest.fixture
def launch(files, tmp_path, capsys):
    """Returns a function that runs the launcher with the small config."""

    def start(*options, workdir=tmp_path / "run", config=files / "config.py"):
        argv = [*([] if config is None else [f"--config={config}"]), *options]
        argv += [] if workdir is None else [f"--workdir={workdir}"]
        return small_runs.start(main, argv, capsys)

    return start


def test_dry_run_shows_settings_from_the_command_line(launch, files):
    out, error = launch(
        "--config.data.n_unpaired=100",
        "--config.sotalign.block_size=16",
        "--config.teacher.dim=8",
        *(
            f"--config.data.files.zero_shot_{part}={files}/zero_shot_{part}.npy"
            for part in ("x", "labels", "prompts")
        ),
        "--config.runs={'sail': {'method': 'sail', 'train.steps': 5}, 'sotalign': {}}",
        "--config.seeds=(0,1)",
        "--config.train.learning_rate=1",
        "--config.tensorboard",
        "--dry_run",
        workdir=None,
    )
    assert error is None
    decoder, shown = json.JSONDecoder(), []
    while out.strip():
        one, end = decoder.raw_decode(out.lstrip())
        shown.append(one)
        out = out.lstrip()[end:]
    asked = [one["config"] for one in shown]
    names = [(one["method"], one["seed"], one["train"]["steps"]) for one in asked]
    assert names == [("sail", 0, 5), ("sail", 1, 5), ("sotalign", 0, 40), ("sotalign", 1, 40)]
    assert asked[2]["sotalign"]["block_size"] == 16 and asked[0]["teacher"]["dim"] == 8
    assert asked[0]["train"]["learning_rate"] == 1.0 and asked[0]["tensorboard"] is True
    assert shown[0]["shapes"] == {
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config.train.stpes=1"], "unknown setting 'stpes'; did you mean 'steps'?"),
        (["--config.trane.steps=1"], "unknown setting 'trane'; did you mean 'train'?"),
        (["--config.nope=1"], "unknown setting 'nope'"),
        (["--config.train.steps=abc"], "--config.train.steps=abc"),
        (["--config.teacher.dim=abc"], "--config.teacher.dim=abc"),
        (["--config.runs=cca"], "--config.runs=cca"),
        (["--config.train.steps=-4"], "train.steps "),
        (["--config.method=sale"], "method "),
        (["--wrkdir=a"], "'wrkdir'. Did you mean: workdir"),
        (["again"], "'again'"),
        (["--config.data.files.x="], "data: files.x"),
        (
            [
                "--config.runs={'a': {'train.steps': 5}, 'b': {'train': {'steps': 6}}}",
                "--config.train.steps=7",
            ],
            "train.steps is set to 7 but every run",
        ),
        (["--config.runs={'a': 5}", "--config.train.steps=7"], "runs['a']: run must be a dict"),
    ],
)
def test_main_rejects_bad_options_in_one_line(launch, tmp_path, options, message):
    _, error = launch(*options)
    assert is_one_line(error) and message in error
    assert not (tmp_path / "run").exists()


def test_main_requires_workdir_and_config(launch):
    _, error = launch(workdir=None)
    assert is_one_line(error) and error.startswith("error: workdir")
    _, error = launch(config=None)
    assert is_one_line(error) and error.startswith("error: config")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (None, "config file cannot be read ([Errno 2]"),
        ("def get_config(:", "invalid syntax (bad.py, line 1)"),
        ("x = 1", "has no attribute 'get_config'"),
        ("def get_config():\n return 3", "get_config must return a ConfigDict, got int"),
        ("def get_config():\n pass", "get_config must return a ConfigDict, got NoneType"),
        ("config.nope = 1", "bad.py fails in line 4, `config.nope = 1`: unknown setting 'nope'"),
        ("config.train.stpes = 1", "unknown setting 'stpes'; did you mean 'steps'?"),
        ("config.trane.steps = 1", "unknown setting 'trane'; did you mean 'train'?"),
        ("config.train.steps = 'abc'", "bad.py fails in line 4, `config.train.steps = 'abc'`: "),
        ("config.train.steps /= 0", "line 4, `config.train.steps /= 0`: division by zero"),
        ("config_lib.switched(config, 'bogus')", "config has an unknown switch 'bogus'"),
    ],
)
def test_main_rejects_bad_config_files_in_one_line(launch, tmp_path, code, message):
    path = tmp_path / "bad.py"
    if code is not None and code.startswith("config"):
        head = "from experiments import config as config_lib\ndef get_config():\n"
        code = f"{head} config = config_lib.default()\n {code}\n return config\n"
    if code is not None:
        path.write_text(code)
    _, error = launch(config=path)
    assert is_one_line(error) and message in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("file", [quickstart, compare])
def test_get_config_from_folder_uses_its_files(file, tmp_path):
    for name in ("x", "y"):
        np.save(tmp_path / f"{name}.npy", np.zeros((30, 4)))
    config = file.get_config(f"from={tmp_path}")
    resolved = list(config_lib.runs(config).values())
    assert {one.data.name for one in resolved} == {"files"}
    assert {one.data.files.x for one in resolved} == {str(tmp_path / "x.npy")}
