"""Tests of the tree of settings, of config files, and of settings on the command line."""

import dataclasses
import doctest
import json

import numpy as np
import pytest
import small_runs
from small_runs import is_one_line

from experiments import launch, main, spec
from experiments.configs import compare, paper, quickstart
from sotalign_jax import checks, methods, training


@pytest.mark.parametrize("module", [spec, launch])
def test_doctests_pass(module):
    assert doctest.testmod(module).failed == 0


def test_default_spec_is_the_papers():
    ((name, one),) = spec.expand(spec.Spec()).items()
    assert name == one.name == "sotalign-seed42"
    assert one.chosen == methods.SOTAlign() and one.train == training.TrainConfig()
    assert json.loads(json.dumps(one.to_json()))["seed"] == 42


def test_sections_of_a_spec_are_frozen():
    made = spec.Spec()
    for section in (made, made.train, made.data.files):
        with pytest.raises(dataclasses.FrozenInstanceError):
            section.nope = 1


def test_runs_are_the_product_of_labels_and_seeds():
    asked = {
        "cca": {"method": "cca"},
        "taught (short)": {"start": "teacher", "train.steps": 7, "sotalign.block_size": 5},
    }
    made = spec.Spec().change({"runs": asked, "seeds": [3, 1]})
    runs = spec.expand(made)
    assert list(runs) == ["cca-seed3", "cca-seed1", "taught (short)-seed3", "taught (short)-seed1"]
    assert [one.train.steps for one in runs.values()] == [2000, 2000, 7, 7]
    last = runs["taught (short)-seed1"]
    assert (last.label, last.method, last.seed, last.start) == (
        "taught (short)",
        "sotalign",
        1,
        "teacher",
    )
    assert last.chosen.block_size == 5
    assert made.train.steps == 2000  # the spec itself is unchanged
    assert list(spec.expand(made.change({"seed": 9}))) == ["cca-seed9", "taught (short)-seed9"]


def test_stored_runs_hold_only_options_of_their_own_method():
    asked = {name: {"method": name} for name in spec.METHODS}
    made = spec.Spec().change({"runs": asked, "sail_semi.siglip_norm": "per_row"})
    runs = {one.method: one for one in spec.expand(made).values()}
    for name, one in runs.items():
        assert set(one.to_json()) & set(methods.METHODS) == {name} & set(methods.METHODS)
    assert runs["cca"].chosen is None
    assert runs["sail"].chosen == methods.SAIL()
    assert runs["sail_semi"].chosen.siglip_norm == "per_row"


@pytest.mark.parametrize("method", spec.METHODS)
def test_stored_runs_are_read_back(method):
    changes = {"method": method, "seed": 3, "data.n_pairs": 9, "train.steps": 7}
    one = spec.Run().change(changes)
    stored = json.loads(json.dumps(one.to_json()))
    assert spec.Run.from_json(stored) == one
    with pytest.raises(checks.InputError, match=r"'heads.init'; did you mean 'start'"):
        spec.Run.from_json({**stored, "heads.init": "teacher"})


def test_every_setting_can_be_read_and_set_by_its_name():
    made = spec.Spec()
    for name in spec.names():
        value = made.of(name)
        assert made.change({name: value}) == made
        kind, optional = spec.type_of(name)
        if dataclasses.is_dataclass(value):
            assert kind is dict
        else:
            assert isinstance(value, kind) or (optional and value is None)
            assert kind in (bool, dict) or spec.parse(name, str(value)) == value


@pytest.mark.parametrize("name", ["runs", "data", "sail"])
def test_parse_refuses_a_number_for_a_section(name):
    with pytest.raises(checks.InputError, match=f"--config.{name}"):
        spec.parse(name, "5")


def test_documented_table_is_the_one_of_the_docstrings():
    assert spec.table() in (small_runs.ROOT / "docs" / "settings.md").read_text()
    leaves = [name for name in spec.names() if not dataclasses.is_dataclass(spec.Spec().of(name))]
    assert spec.table().count("\n| `") == len(leaves) > 90


def test_to_json_excludes_mesh_and_on_device():
    placed = spec.Run().change({"mesh": 1, "on_device": False})
    assert placed.to_json() == spec.Run().to_json()
    assert (placed.mesh, placed.on_device) == (1, False)


def test_bundled_configs_expand_to_expected_runs():
    assert list(spec.expand(quickstart.get_config())) == [
        "cca-seed0",
        "sail-seed0",
        "sotalign-seed0",
        "align-seed0",
    ]
    smoke = spec.expand(quickstart.get_config("smoke,seeds=2"))
    assert len(smoke) == 8 and all(one.train.steps < 10 for one in smoke.values())
    sail, sotalign = spec.expand(paper.get_config()).values()
    assert (sail.method, sotalign.method) == ("sail", "sotalign")
    assert sotalign.train.pair_batch + sotalign.train.unpaired_batch == 32_768
    assert sotalign.data.n_pairs == 10_000 and sotalign.data.n_unpaired == 1_000_000
    assert (sotalign.chosen.epsilon, sotalign.chosen.epsilon_star) == (0.05, 0.005)

    everything = spec.expand(compare.get_config("pairs=500+2000,seeds=2"))
    labels = {*methods.METHODS, "cca", "procrustes", "sotalign_teacher"}
    assert len(everything) == 4 * len(labels)
    assert {"sail-500pairs-seed0", "sotalign_teacher-2000pairs-seed1"} <= everything.keys()
    assert {one.data.n_pairs for one in everything.values()} == {500, 2000}
    trains = [one.train for one in everything.values()]
    assert len({(t.steps, t.pair_batch, t.unpaired_batch) for t in trains}) == 1  # one budget
    assert len(spec.expand(compare.get_config())) == 3 * len(labels)
    short = spec.expand(compare.get_config("smoke"))
    assert len(short) == len(labels)  # one seed
    assert short["sue-seed0"].chosen.epochs == 1  # overrides the epochs of its run
    for get_config in (quickstart.get_config, paper.get_config, compare.get_config):
        for word in ("bogus", "seeds=", "pairs=5+", "smoke=1"):
            with pytest.raises(checks.InputError, match=word.replace("+", r"\+")):
                get_config(word)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("stpes", 1, "unknown setting 'stpes'; did you mean 'train.steps'?"),
        ("train.stpes", 1, "unknown setting 'train.stpes'; did you mean 'train.steps'?"),
        ("trane.steps", 1, "unknown setting 'trane.steps'; did you mean 'train.steps'?"),
        ("sotalign.alfa", 1, "unknown setting 'sotalign.alfa'; did you mean 'sotalign.alpha'?"),
        ("heads.kind", "mlp", "unknown setting 'heads.kind'; did you mean 'head'?"),
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
        ("teacher", "ccca", "teacher must"),
        ("teacher_options.ridge", -1, "teacher_options.ridge"),
        ("head", "cnn", "head "),
        ("dim", 0, "dim "),
        ("runs", {"a": {"head": "mlp", "start": "teacher"}}, "runs['a']: start "),
    ],
)
def test_runs_rejects_unknown_or_invalid_settings(key, value, message):
    with pytest.raises(checks.InputError) as error:
        spec.expand(spec.Spec().change({key: value}))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_runs_error_in_shared_setting_names_no_run():
    changes = {"runs": {"a": {"method": "sail"}}, "train.steps": -1}
    with pytest.raises(checks.InputError, match=r"^train.steps "):
        spec.expand(spec.Spec().change(changes))


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
        "--config.teacher_options.dim=8",
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
    assert asked[2]["sotalign"]["block_size"] == 16 and asked[0]["teacher_options"]["dim"] == 8
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
        (["--config.train.stpes=1"], "'train.stpes'; did you mean 'train.steps'?"),
        (["--config.trane.steps=1"], "'trane.steps'; did you mean 'train.steps'?"),
        (["--config.sotalign.alfa", "1"], "'sotalign.alfa'; did you mean 'sotalign.alpha'?"),
        (["--config.nope=1"], "unknown setting 'nope'"),
        (["--config.train.steps=abc"], "--config.train.steps=abc"),
        (["--config.teacher_options.dim=abc"], "--config.teacher_options.dim=abc"),
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
        (None, "bad.py cannot be read (No such file or directory)"),
        ("def get_config(:", "invalid syntax (bad.py, line 1)"),
        ("x = 1", "has no function get_config"),
        ("def get_config():\n return 3", "get_config must return a spec.Spec, got int"),
        ("def get_config():\n pass", "get_config must return a spec.Spec, got NoneType"),
        ("config.nope = 1", "bad.py fails in line 4, `config.nope = 1`: cannot assign to field"),
        ("config = config.change({'train.stpes': 1})", "did you mean 'train.steps'?"),
        ("config = config.change({'train.steps': 'a'})", "train.steps must be int, got 'a'"),
        ("config.train.steps / 0", "line 4, `config.train.steps / 0`: division by zero"),
        ("launch.switched(config, 'bogus')", "config has an unknown switch 'bogus'"),
    ],
)
def test_main_rejects_bad_config_files_in_one_line(launch, tmp_path, code, message):
    path = tmp_path / "bad.py"
    if code is not None and code.startswith(("config", "launch")):
        head = "from experiments import launch, spec\ndef get_config():\n"
        code = f"{head} config = spec.Spec()\n {code}\n return config\n"
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
    resolved = list(spec.expand(config).values())
    assert {one.data.name for one in resolved} == {"files"}
    assert {one.data.files.x for one in resolved} == {str(tmp_path / "x.npy")}
