"""A kernel teacher and kernel features wherever teachers and embeddings can stand."""

import dataclasses
import importlib
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx

import sotalign_jax as sota
from sotalign_jax import checks, data, evaluation, heads, methods, teachers, training

OPTIONS = {"gamma_x": 1.0, "gamma_y": 2.0, "ridge": 0.003, "power": 0.5}


@pytest.fixture(scope="module")
def rows():
    """160 matching rows of two modalities; the second is no linear map of the first."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(160, 3))
    x, y = z @ rng.normal(size=(3, 6)), np.tanh(z) @ rng.normal(size=(3, 5))
    return x.astype(np.float32), y.astype(np.float32)


@pytest.fixture(scope="module")
def dataset(rows):
    x, y = rows
    return data.dataset(
        (x[:60], y[:60]), x=x[60:100], y=y[60:110], val=data.gallery(x[110:], y[110:])
    )


@pytest.fixture(scope="module")
def teacher(dataset):
    return teachers.kernel_cca(dataset.pairs_x, dataset.pairs_y, **OPTIONS)


def train(method, start, dataset, teacher=None):
    config = training.TrainConfig(steps=4, learning_rate=1e-2, weight_decay=0.1, eval_every=4)
    return training.fit(method, start, dataset, config, teacher=teacher)[0]


def frozen(trained):
    return nnx.state(trained, heads.Frozen)


def test_heads_start_where_a_kernel_teacher_is(dataset, teacher):
    start = heads.build_heads(6, 5, 7, teacher=teacher)
    f, g = evaluation.embed(start.x, dataset.val.x), evaluation.embed(start.y, dataset.val.y)
    x = evaluation.embed(teacher.map_x.leading(7), dataset.val.x)
    y = evaluation.embed(teacher.map_y.leading(7), dataset.val.y)
    np.testing.assert_allclose(f @ g.T, x @ y.T, atol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_training_changes_the_head_and_not_the_features(dataset, teacher, kind):
    start = heads.build_heads(6, 5, 4, kind=kind, features=teacher)
    no_val = data.dataset((dataset.pairs_x, dataset.pairs_y))  # so that the last step is kept
    trained = train(methods.SAIL(), start, no_val)
    jax.tree.map(np.testing.assert_array_equal, frozen(trained), frozen(start))
    before, after = (nnx.state(h, nnx.Param)["x"] for h in (start, trained))
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), before, after)
    assert any(jax.tree.leaves(moved))


class Heard(training.Observer):
    def __init__(self):
        self.klot = []

    def metrics(self, step, values):
        self.klot.append(values["klot"])


def test_sotalign_follows_a_kernel_teacher(dataset, teacher):
    method = methods.SOTAlign(alpha=1.0)
    config = training.TrainConfig(steps=20, learning_rate=3e-3, eval_every=20)
    start = heads.build_heads(6, 5, 4, features=teacher)
    heard = Heard()
    training.fit(method, start, dataset, config, teacher=teacher, observer=heard)
    assert heard.klot[-1] < 0.8 * heard.klot[0]


def test_training_behind_frozen_features_is_training_with_them(dataset, teacher):
    method = methods.SOTAlign(alpha=0.1, tolerance=1e-4)  # loose plans differ by their rounding
    config = training.TrainConfig(steps=3, learning_rate=1e-2, eval_every=3)
    start = heads.build_heads(6, 5, teacher.dim, teacher=teacher)
    unselected = dataclasses.replace(dataset, val=None)
    fitted, _ = training.fit(method, start, unselected, config, teacher=teacher)
    rows = training.place(dataset)
    state = training.init_state(method, start, rows, config)
    step = training.make_step(method, start, config)
    for _ in range(config.steps):
        state, _ = step(state, rows, teacher, training.batch_key(config))
    stepped = nnx.merge(nnx.graphdef(start), state.params)
    x = dataset.pairs_x[:9]
    # Lion takes signs: rounding may turn a few.
    assert np.isclose(fitted.x(x), stepped.x(x), rtol=1e-3, atol=1e-3).mean() > 0.98


@pytest.mark.parametrize(
    "options",
    [
        {"teacher": "kernel_cca"},
        {"features": "kernel", "method": "sail", "init": "random"},
        {"features": "kernel", "method": "csa"},
    ],
)
def test_aligned_saved_and_loaded(rows, tmp_path, options):
    x, y = rows
    aligner = sota.align((x[:60], y[:60]), x[60:], y[60:], steps=3, progress=False, **options)
    assert aligner.heads.x.kind == "kernel"
    aligner.save(tmp_path / "a")
    loaded = sota.Aligner.load(tmp_path / "a")
    for calibrated in (False, True):
        np.testing.assert_array_equal(
            loaded.similarity(x[:5], y[:4], calibrated=calibrated),
            aligner.similarity(x[:5], y[:4], calibrated=calibrated),
        )


@pytest.mark.parametrize(("side", "other"), [("x", "y"), ("y", "x")])
def test_a_missing_pool_is_the_pairs_own_rows(rows, side, other):
    x, y = rows
    pool = {"x": x[60:]} if side == "x" else {"y": y[60:]}
    aligner = sota.align((x[:60], y[:60]), **pool, steps=3, progress=False)
    own = {"x": x[:60], "y": y[:60]}[other]
    both = sota.align((x[:60], y[:60]), **pool, **{other: own}, steps=3, progress=False)
    assert aligner.info["method"] == "SOTAlign"
    np.testing.assert_array_equal(aligner.embed_x(x), both.embed_x(x))


@pytest.mark.parametrize("direction", ["x_to_y", "y_to_x"])
def test_calibrated_search_ranks_as_calibrated_similarity_does(rows, direction):
    x, y = rows
    aligner = sota.Aligner(heads.build_heads(6, 5, 4), {}).calibrated_by(x[:50], y[50:90])
    queries, keys = (x[:9], y[:20]) if direction == "x_to_y" else (y[:9], x[:20])
    found = aligner.search(queries, keys, k=5, direction=direction, calibrated=True)
    scores = aligner.similarity(x[:9], y[:20], calibrated=True)
    if direction == "y_to_x":
        scores = aligner.similarity(x[:20], y[:9], calibrated=True).T
    np.testing.assert_array_equal(found.indices, np.argsort(-scores, axis=1)[:, :5])
    plain = aligner.search(queries, keys, k=5, direction=direction)
    assert (plain.indices != found.indices).any()


def test_both_columns_of_an_evaluation(rows):
    x, y = rows
    aligner = sota.Aligner(heads.build_heads(6, 5, 4), {}).calibrated_by(x[:50], y[50:90])
    gallery = data.gallery(x[:30], y[:30])
    scores = aligner.similarity(gallery.x, gallery.y, calibrated=True)
    best = 100 * np.mean(scores.argmax(axis=1) == np.arange(30))
    metrics = evaluation.evaluate(aligner.heads.x, aligner.heads.y, gallery, aligner.calibration)
    plain = evaluation.evaluate(aligner.heads.x, aligner.heads.y, gallery)
    np.testing.assert_allclose(metrics["calibrated/x_to_y/R@1"], best)
    assert plain.items() <= metrics.items()


def test_what_cannot_be_combined_is_named(rows, dataset, teacher):
    x, y = rows
    linear = teachers.cca(dataset.pairs_x, dataset.pairs_y)
    with pytest.raises(checks.InputError, match=r"^features:"):
        heads.build_heads(6, 5, 4, features=linear)
    with pytest.raises(checks.InputError, match=r"^features:"):
        heads.build_heads(9, 5, 4, features=teacher)
    with pytest.raises(checks.InputError, match=r"^init:"):
        sota.align((x, y), features="kernel", teacher=linear, init="teacher", progress=False)
    with pytest.raises(checks.InputError, match=r"^calibrated:"):
        sota.Aligner(heads.build_heads(6, 5, 4), {}).similarity(x, y, calibrated=True)


def test_recipes_of_a_file_are_computed_once(rows, tmp_path, monkeypatch, capsys):
    """`examples/recipes.py` on a .npz file: a table, cells that stay, and the search."""
    x, y = rows
    split = np.repeat(["train", "val", "test"], [120, 20, 20])
    label = np.where(np.arange(160) % 2, np.arange(160) % 3, -1)
    np.savez(tmp_path / "toy.npz", image=x, text=y, split=split, label=label, prompts=y[:3, None])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[1] / "examples")
    recipes = importlib.import_module("recipes")

    def run(*words):
        monkeypatch.setattr("sys.argv", ["recipes.py", "toy.npz", "60", *words])
        recipes.main()
        return capsys.readouterr().out

    words = "--seeds", "2", "--recipes", "CCA", "kernel CCA"
    table = run(*words, "--pools", "disjoint", "random")
    assert table.count("| kernel CCA | ") == 4  # recalls and seconds, for both pools
    assert table.count(" ± ") == 16
    cells = (tmp_path / "runs" / "recipes.jsonl").read_text().splitlines()
    assert len(cells) == 8  # recipes, pools, seeds
    monkeypatch.setattr(recipes, "fit", None)  # nothing is fitted again
    assert run(*words) in table
    shown = run("--show", "runs/recipes.jsonl", "--seeds", "2")
    assert "| SAIL | - / - | - |" in shown  # a cell that was not run
    assert table.splitlines()[4] in shown
    found = run("--search", "--recipes", "CCA", "SigLIP alone, mean")
    assert found.startswith("toy.npz, 60 pairs") and found.count("\n| ") == 2
