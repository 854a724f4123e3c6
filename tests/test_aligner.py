"""Tests of `align` and `Aligner`: training, search, and saving."""

import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from sotalign_jax import checks, data, evaluation, heads, methods, recipe, teachers
from sotalign_jax.aligner import Aligner, describe_unpaired
from sotalign_jax.alignment import align

D_X, D_Y = 12, 10


@pytest.fixture(scope="module")
def table():
    """Returns 300 matching rows: two noisy linear views of one latent variable."""
    rng = np.random.default_rng(0)
    z, to_x, to_y = rng.normal(size=(300, 6)), rng.normal(size=(6, D_X)), rng.normal(size=(6, D_Y))
    x = z @ to_x + 0.2 * rng.normal(size=(300, D_X))
    y = z @ to_y + 0.2 * rng.normal(size=(300, D_Y))
    return x.astype(np.float32), y.astype(np.float32)


@pytest.fixture(scope="module")
def given(table):
    """Returns arguments of `align`: 50 pairs, and two pools of 75 without common samples."""
    x, y = table
    return {"pairs": (x[:50], y[:50]), "x": x[50:125], "y": y[125:200], "progress": False}


@pytest.fixture(scope="module")
def aligned(given):
    return align(**given)


def mean_r1(aligner, table):
    """Returns mean R@1 on the 100 rows that no test trains on. Chance is 1 %."""
    x, y = table[0][200:], table[1][200:]
    return evaluation.retrieval(aligner.embed_x(x), aligner.embed_y(y))["mean/R@1"]


def unit(rows):
    return np.asarray(rows) / np.linalg.norm(rows, axis=1, keepdims=True)


def quick(pairs, **options):
    """Runs a short supervised `align`, for tests that do not depend on the objective."""
    return align(pairs, **{"steps": 3, "progress": False, "method": methods.SAIL(), **options})


# --- aligning ----------------------------------------------------------------------------------


@pytest.mark.numerics
def test_align_retrieves_unseen_matches(aligned, table):
    assert mean_r1(aligned, table) > 50.0


def test_align_defaults_depend_on_the_number_of_pairs(aligned):
    assert aligned.info["method"] == "SOTAlign"
    assert aligned.info["teacher"] == "refined_cca"
    assert aligned.info["start"] == "centred"
    assert aligned.info["options"]["alpha"] == pytest.approx(3 / 50)
    assert aligned.info["train"]["steps"] == 100
    assert aligned.info["train"]["learning_rate"] == pytest.approx(2e-3)
    assert aligned.info["train"]["unpaired_batch"] == 1024
    assert aligned.info["data"]["pairs_x"] == [50, D_X]
    assert aligned.info["best_step"] == 100  # no validation set, so the last step is kept
    assert (
        aligned.info["selected"] == "mixture with 75% teacher" and aligned.info["candidates"] == {}
    )
    json.dumps(aligned.info, allow_nan=False)


def test_similarity_is_the_cosine_of_unit_embeddings(aligned, table):
    x, y = table[0][:7], table[1][:5]
    f, g = aligned.embed_x(x), aligned.embed_y(y)
    np.testing.assert_allclose(np.linalg.norm(f, axis=1), 1.0, rtol=1e-6)
    similarity = aligned.similarity(x, y, calibrated=False)
    assert similarity.shape == (7, 5)
    np.testing.assert_allclose(similarity, f @ g.T, atol=1e-6)
    for other in (x.tolist(), jnp.asarray(x), x.astype(np.float64)):
        np.testing.assert_allclose(aligned.embed_x(other), f, atol=1e-6)
    np.testing.assert_allclose(aligned.embed_x(x.astype(np.float16)), f, atol=5e-3)


@pytest.mark.parametrize("direction", ["x_to_y", "y_to_x"])
def test_search_matches_sorted_similarity_matrix(aligned, table, direction):
    x, y = table[0][:70], table[1][:90]
    similarity = aligned.similarity(x, y)
    queries, gallery = (x, y) if direction == "x_to_y" else (y, x)
    expected = similarity if direction == "x_to_y" else similarity.T
    scores, indices = aligned.search(queries, gallery, 4, direction=direction, block_size=16)
    assert isinstance(scores, np.ndarray) and indices.shape == (len(queries), 4)
    np.testing.assert_array_equal(indices, np.argsort(-expected, axis=1, kind="stable")[:, :4])
    np.testing.assert_allclose(scores, np.take_along_axis(expected, indices, axis=1), atol=5e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, r"k.* 0"),
        ({"direction": "x"}, r"direction.* 'x'"),
        ({"queries": np.ones((2, 5))}, r"queries.* 5\b"),
        ({"gallery": np.zeros((300, D_Y))}, r"gallery .*rows 0\b"),
    ],
)
def test_search_rejects_bad_arguments(aligned, table, change, message):
    with pytest.raises(checks.InputError, match=message):
        aligned.search(**{"queries": table[0], "gallery": table[1], "k": 3} | change)


def test_search_clips_k_and_accepts_no_queries(aligned, table):
    x, y = table
    every = aligned.search(x[:4], y[:6], k=1000)
    np.testing.assert_array_equal(np.sort(every.indices, axis=1), np.tile(np.arange(6), (4, 1)))
    for calibrated in (False, True):
        none = aligned.search(x[:0], y[:6], k=3, calibrated=calibrated)
        assert none.scores.shape == none.indices.shape == (0, 3)
        assert aligned.similarity(x[:0], y[:6], calibrated=calibrated).shape == (0, 6)
    assert aligned.embed_x(x[:0]).shape == (0, aligned.embed_x(x[:1]).shape[1])
    with pytest.raises(checks.InputError, match=r"^gallery\b"):
        aligned.search(x[:4], y[:0])


# --- one choice between plain and calibrated scores ----------------------------------------------


def hubs(seed, rows=400, hub=0.0):
    """Returns matching unit rows of both sides, where some rows of y are close to every x."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(rows, 8))
    x = z + 0.7 * rng.normal(size=z.shape)
    x[:, 0] += 3.0
    y = z + 0.0
    y[:, 0] += hub * rng.random(rows)
    return unit(x).astype(np.float32), unit(y).astype(np.float32)


SAME = heads.Teacher(*(heads.AffineMap(jnp.eye(8), jnp.zeros(8)) for _ in "xy"), jnp.ones(8))


@pytest.mark.parametrize("hub", [0.0, 6.0])
def test_align_decides_on_validation_between_plain_and_calibrated_scores(hub, tmp_path):
    x, y = hubs(0, hub=hub)
    val_x, val_y = hubs(1, hub=hub)
    aligner = align(
        (x[:20], y[:20]), x, y, val=(val_x, val_y), method=methods.SAIL(), teacher=SAME,
        steps=1, progress=False,
    )  # fmt: skip
    gallery = data.gallery(val_x, val_y)
    found = evaluation.evaluate(aligner.heads.x, aligner.heads.y, gallery, aligner.calibration)
    means = [
        np.mean([found[f"{kind}mean/R@{k}"] for k in (1, 5, 10)]) for kind in ("", "calibrated/")
    ]
    assert aligner.calibrated == (means[1] > means[0])
    if hub:
        assert aligner.calibrated
    # Everything follows the choice, and does so after saving.
    aligner.save(tmp_path / "a")
    loaded = Aligner.load(tmp_path / "a")
    assert loaded.calibrated == aligner.calibrated
    for choice in (None, False, True):
        expected = aligner.calibrated if choice is None else choice
        wanted = aligner.similarity(val_x, val_y, calibrated=expected)
        scores = loaded.similarity(val_x, val_y, calibrated=choice)
        np.testing.assert_array_equal(scores, wanted)
        top = loaded.search(val_x, val_y, k=3, calibrated=choice)
        np.testing.assert_allclose(top.scores, -np.sort(-wanted, axis=1)[:, :3], atol=1e-5)
        index = loaded.index(val_y, calibrated=choice)
        np.testing.assert_allclose(index.queries(val_x) @ index.keys.T, wanted, atol=1e-5)
        report = loaded.evaluate(val_x, val_y, calibrated=choice)
        assert report.calibrated == expected == report.to_dict()["calibrated"]
        steps = loaded.to_numpy(calibrated=choice).x.steps
        assert (steps[-1][0] == "bias") == expected


def test_choice_without_validation_needs_unpaired_rows(given):
    assert quick(given["pairs"], x=given["x"], y=given["y"], method="sotalign").calibrated
    assert not quick(given["pairs"]).calibrated


def test_load_of_an_older_aligner_uses_plain_cosines(saved, table):
    x, y = table
    calibrated = Aligner.load(saved).calibrated_by(x, y)
    assert calibrated.calibrated
    calibrated.save(saved, overwrite=True)
    described = json.loads((saved / "aligner.json").read_text())
    del described["calibrated"]
    (saved / "aligner.json").write_text(json.dumps(described))
    old = Aligner.load(saved)
    assert not old.calibrated and old.calibration is not None
    cosines = old.embed_x(x[:5]) @ old.embed_y(y[:5]).T
    np.testing.assert_allclose(old.similarity(x[:5], y[:5]), cosines, atol=1e-6)
    with pytest.raises(checks.InputError, match=r"^calibrated\b"):
        Aligner(old.heads, {}, calibrated=True)


def test_similarity_rejects_matrix_larger_than_memory(aligned):
    rows = np.broadcast_to(np.float32(1.0), (10**7, D_X)), np.broadcast_to(1.0, (10**7, D_Y))
    with pytest.raises(checks.InputError, match=r"x and y .*search"):
        aligned.similarity(*rows)


def test_embed_accepts_bfloat16_torch_tensors_with_gradients(aligned, table):
    torch = pytest.importorskip("torch")
    x = torch.tensor(table[0][:7])
    expected = aligned.embed_x(x.bfloat16().float().numpy())
    np.testing.assert_array_equal(aligned.embed_x(x.bfloat16().requires_grad_()), expected)


def test_align_is_deterministic_for_a_seed(aligned, given, table):
    again = align(**given)
    assert again.info == aligned.info
    for a, b in zip(parameters(again), parameters(aligned), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", [">f4", np.longdouble, np.uint8, bool])
def test_align_accepts_other_stored_types(rng, dtype):
    bits = rng.random((60, 16)) < 0.4
    bits[:, 0] = True
    x, y = bits[:, :10].astype(dtype), bits[:, 4:].astype(np.float32)
    made, wanted = (quick((rows, y)) for rows in (x, x.astype(np.float32)))
    for rows in (x, x.astype(np.float32)):
        np.testing.assert_array_equal(made.embed_x(rows), wanted.embed_x(x.astype(np.float32)))


def test_align_seeds_random_start_and_accepts_numpy_scalars(given, tmp_path):
    options = {"start": "random", "dim": np.int64(4), "learning_rate": np.float32(1e-3)}
    options |= {"steps": np.int64(3), "unpaired_batch": np.int32(16)}
    first, same, other = (
        quick(given["pairs"], seed=seed, **options) for seed in (np.int64(0), 0, 1)
    )
    np.testing.assert_array_equal(parameters(first)[-1], parameters(same)[-1])
    assert not np.allclose(parameters(first)[-1], parameters(other)[-1])
    assert first.embed_x(given["x"]).shape == (75, 4)
    first.save(tmp_path / "aligner")
    assert Aligner.load(tmp_path / "aligner").info == same.info


def test_align_limits_pair_batch_with_many_pairs():
    rows = np.random.default_rng(0).normal(size=(3000, 5)).astype(np.float32)
    options = {"steps": 1, "teacher": "cca", "unpaired_batch": 32, "progress": False}
    infos = [
        align((rows, rows), rows, rows, recipe=p, dim=5, **options).info for p in recipe.PRESETS
    ]
    assert [info["train"]["pair_batch"] for info in infos] == [2048, 10_000]
    weights = [info["options"]["alpha"] for info in infos]
    assert weights == pytest.approx([3 / 2048, 1 / 2700])  # a tenth of the pairs is held out


def parameters(aligner):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(aligner.heads))]


def test_align_without_pool_trains_sail(given, table):
    aligner = align(given["pairs"], steps=20, progress=False)
    assert aligner.info["method"] == "SAIL"
    assert aligner.info["data"]["pool_x"] == [0, D_X]
    assert mean_r1(aligner, table) > 20.0


def test_align_accepts_method_names(given):
    for name in ("sail_semi", "sotalign"):
        aligner = align(**given, method=name, steps=2)
        assert aligner.info["method"] == type(methods.METHODS[name]).__name__
    assert aligner.info["options"]["alpha"] == methods.SOTAlign().alpha  # as published
    semi, sail = (align(**given, method=name, steps=2) for name in ("sail_semi", "sail"))
    assert semi.info["options"]["supervision"] == "pairs+negatives"
    assert any((a != b).any() for a, b in zip(parameters(semi), parameters(sail), strict=True))


class TanhSAIL(methods.SAIL):
    head = "tanh"


def test_align_starts_linear_heads_at_a_linear_teacher(given):
    options = {"teacher": "cca", "dim": 4, "steps": 1, "learning_rate": 0.0, "recipe": "paper"}
    taught, random = (quick(given["pairs"], start=s, **options) for s in ("teacher", "random"))
    start = heads.build_heads(D_X, D_Y, 4, teacher=teachers.cca(*given["pairs"]))
    np.testing.assert_allclose(taught.embed_x(given["x"]), unit(start.x(given["x"])), atol=1e-5)
    assert not np.allclose(random.embed_x(given["x"]), taught.embed_x(given["x"]))
    with pytest.raises(checks.InputError, match=r"dim\b.* 100000"):
        quick(given["pairs"], **{**options, "start": "teacher", "dim": 100_000})
    with pytest.raises(checks.InputError, match=r"^start\b.*refined_cca.*nonlinear"):
        quick(given["pairs"], start="teacher")
    bent = quick(given["pairs"], method=TanhSAIL(), dim=4, steps=1)
    assert bent.heads.x.kind == "tanh" and bent.heads.x.d_out == 4
    with pytest.raises(checks.InputError, match=r"kind.* 'tanh'"):
        quick(given["pairs"], method=TanhSAIL(), teacher="cca", start="teacher")


def test_align_mixes_with_the_teacher_in_the_default_recipe_only(given):
    ours = align(**given, teacher="cca", dim=4, steps=3)
    fitted = teachers.cca(*given["pairs"])
    assert ours.heads.x.kind == "mixed" and ours.heads.x.d_out == 4 + fitted.dim
    teacher = heads.build_heads(D_X, D_Y, fitted.dim, teacher=fitted)
    trained = ours.heads.x.second, ours.heads.y.second
    x, y = given["x"][:7], given["y"][:5]
    alone = unit(teacher.x(x)) @ unit(teacher.y(y)).T
    student = unit(trained[0](x)) @ unit(trained[1](y)).T
    np.testing.assert_allclose(
        ours.similarity(x, y, calibrated=False), 0.75 * alone + 0.25 * student, atol=1e-5
    )
    assert quick(given["pairs"], method=None).heads.x.kind == "mixed"  # with SAIL
    assert quick(given["pairs"]).heads.x.kind == "linear"
    info = quick(given["pairs"], recipe="paper", method=None, steps=1).info
    assert (info["teacher"], info["start"]) == (None, "random")  # SAIL has no teacher
    with pytest.raises(checks.InputError, match="recipe"):
        quick(given["pairs"], recipe="best")


def test_align_selects_on_the_given_validation_set(given, table):
    x, y = table[0][200:], table[1][200:]
    # The paper's recipe has one epsilon. Of several, the candidates are compared with the mean.
    aligner = quick(given["pairs"], val=(x, y), recipe="paper")
    gallery = data.gallery(x, y)
    found = evaluation.evaluate(aligner.heads.x, aligner.heads.y, gallery, aligner.calibration)
    kinds = ("", "calibrated/")
    expected = np.mean([found[f"{kind}mean/R@{k}"] for kind in kinds for k in (1, 5, 10)])
    assert max(aligner.info["candidates"].values()) == pytest.approx(expected, rel=1e-5)
    captions = data.gallery(x[:50], y, np.arange(100) // 2)
    assert quick(given["pairs"], val=captions).info["data"]["val_y"] == [100, D_Y]


@pytest.mark.parametrize("parts", [1, 3])
def test_align_refuses_a_validation_set_of_other_parts(given, table, parts):
    val = (table[0][:20], table[1][:20], np.arange(20))[:parts]
    with pytest.raises(checks.InputError, match=r"^val"):
        quick(given["pairs"], val=val)


def test_align_holds_out_a_tenth_of_many_pairs(table):
    aligner = quick((table[0][:200], table[1][:200]))
    assert aligner.info["data"]["pairs_x"] == [180, D_X]
    assert aligner.info["data"]["val_x"] == [20, D_X]
    assert aligner.info["candidates"]


def test_align_accepts_teacher_by_name_or_fitted(given, table):
    fitted = teachers.procrustes(*given["pairs"])
    named = quick(given["pairs"], method=None, teacher="procrustes")
    ready = quick(given["pairs"], method=None, teacher=fitted)
    np.testing.assert_array_equal(named.embed_x(table[0]), ready.embed_x(table[0]))
    assert named.info["teacher"] == "procrustes" and ready.info["teacher"] == "given"


def test_align_with_contrastive_teacher_respects_dim(given, table):
    aligner = quick(given["pairs"], method=None, teacher="contrastive", dim=6)
    assert aligner.embed_x(table[0][:2]).shape == (2, 12)  # a mixture of 6 and 6


def test_align_prints_progress_on_request(given, capsys):
    quick(given["pairs"])
    assert capsys.readouterr().err == ""
    quick(given["pairs"], progress=True)
    assert "align: 3/3, loss" in capsys.readouterr().err


@pytest.mark.parametrize("seed", range(3))
def test_align_returns_no_candidate_below_the_teacher_on_validation(given, table, seed):
    val = table[0][200:], table[1][200:]
    options = {"learning_rate": 3e-2, "steps": 20, "seed": seed, "val": val}  # far too large a rate
    aligner = align(**given, **options)
    scores = aligner.info["candidates"]
    gain, base = aligner.info["unpaired"], aligner.info["base"]
    # Without a round there is only one teacher.
    both = {"pairs alone", "both teachers"} if gain["rounds"] else set()
    assert {"trained", "teacher"} | both < {*scores} and len(scores) == 5 + len(both)
    assert scores[aligner.info["selected"]] >= scores[base] >= scores["teacher"]
    assert base in ("teacher", "pairs alone", "both teachers")
    if both:
        assert (gain["score"], gain["without"]) == ("mean recall", scores["pairs alone"])
        assert gain["with"] == scores[base]
    assert describe_unpaired(gain) in repr(aligner)


def test_select_scores_the_pairs_alone_beside_the_refined_teacher(table):
    x, y = table
    dataset = data.dataset((x[:20], y[:20]), val=data.gallery(x[50:90], y[50:90]))
    first, refined = teachers.cca(x[:8], y[:8]), teachers.cca(x[:20], y[:20])
    trained = heads.build_heads(D_X, D_Y, 4)
    chosen, _, found = recipe.select(trained, refined, dataset, (0.5,), first=first)
    assert [*found["candidates"]] == [
        *("teacher", "pairs alone", "both teachers", "trained", "mixture with 50% teacher")
    ]
    _, _, alone = recipe.select(trained, first, dataset, (0.5,))
    assert found["candidates"]["pairs alone"] == alone["candidates"]["teacher"]
    assert not found["kernel_teacher"] and chosen.x.d_in == D_X


def test_select_mixes_two_clearly_better_teachers_and_saves_the_nested_mixture(tmp_path):
    rng = np.random.default_rng(0)
    # Each teacher sees one half of the features, so both together retrieve far better.
    z = rng.normal(size=(200, 8)).astype(np.float32)
    halves = [heads.AffineMap(jnp.eye(8)[k : k + 4], jnp.zeros(4)) for k in (0, 4)]
    first, refined = (heads.Teacher(half, half, jnp.ones(4)) for half in halves)
    noisy = z + 0.6 * rng.normal(size=z.shape).astype(np.float32)
    dataset = data.dataset((z, noisy), x=z, y=noisy, val=data.gallery(z, noisy))
    trained = heads.build_heads(8, 8, 4)
    chosen, made, found = recipe.select(trained, refined, dataset, (0.95,), first=first)
    scores = found["candidates"]
    assert found["base"] == "both teachers" and scores["both teachers"] > scores["teacher"] + 5
    model = Aligner(heads.mix(chosen, trained, 0.9), {}, None)
    model.save(tmp_path / "mixed")
    np.testing.assert_allclose(
        Aligner.load(tmp_path / "mixed").embed_x(z), model.embed_x(z), atol=1e-6
    )
    np.testing.assert_allclose(model.to_numpy().embed_x(z), model.embed_x(z), atol=1e-5)
    assert made is not None


# --- what the unpaired rows brought ------------------------------------------------------------


@pytest.mark.parametrize(
    ("selection", "scores", "expected"),
    [
        ({"pairs alone": 50.0, "teacher": 58.5, "trained": 60.0}, (0.5, 0.6), 8.5),
        ({}, (0.5, 0.55, 0.625), 12.5),
        ({"trained": 40.0}, (0.25, 0.375), 12.5),  # without mixtures, nothing to compare with
        ({}, (0.5,), 0.0),
    ],
)
def test_unpaired_gain_compares_with_the_pairs_alone(selection, scores, expected):
    found = {"selected": "trained", "base": "teacher", "candidates": selection}
    gain = recipe.unpaired_gain(found, teachers.Refined(None, None, scores))
    assert gain["rounds"] == len(scores) - 1
    assert gain["with"] - gain["without"] == expected
    assert gain["score"] == ("mean recall" if len(selection) > 1 else "mean reciprocal rank")


def test_describe_unpaired_names_no_gain():
    for brought, start in ((3.14, "unpaired data: +3.1 "), (0.04, "unpaired data: no gain ")):
        gain = {"score": "mean recall", "with": 50.0 + brought, "without": 50.0}
        line = describe_unpaired(gain)
        assert line.startswith(start) and "50.0 without" in line
    assert "no gain" in describe_unpaired(gain | {"with": 48.0})


def test_align_reports_the_unpaired_gain_of_every_recipe(given, table):
    options = {"teacher": "refined_cca", "start": "random", "dim": 4, "steps": 1}
    options |= {"unpaired_batch": 16, "recipe": "paper"}
    val = table[0][200:260], table[1][200:260]
    aligner = align(**given, val=val, **options)
    assert [*aligner.info["candidates"]] == ["trained"]
    assert aligner.info["unpaired"]["score"] == "mean reciprocal rank"


def test_align_starts_centred_so_that_a_common_mean_does_not_collapse():
    rng = np.random.default_rng(0)
    z, sides = rng.normal(size=(300, 6)), []
    for width in (32, 24):
        common = 8.0 * rng.normal(size=width)
        sides.append((z @ rng.normal(size=(6, width)) + common).astype(np.float32))
    x, y = sides
    norms, recalls = {}, {}
    for start in ("random", "centred"):
        aligner = quick((x[:60], y[:60]), start=start, steps=20, dim=16)
        f, g = aligner.embed_x(x[60:]), aligner.embed_y(y[60:])
        norms[start] = [np.linalg.norm(rows.mean(axis=0)) for rows in (f, g)]
        recalls[start] = evaluation.retrieval(f, g)["mean/R@1"]
    assert min(norms["random"]) > 0.8 > 0.6 > max(norms["centred"]), norms
    assert recalls["centred"] > recalls["random"] + 20


def test_select_prefers_the_simplest_of_tied_candidates(table):
    pairs = table[0][:50], table[1][:50]
    dataset = data.dataset(pairs, val=data.gallery(table[0][:9], table[1][:9]))
    teacher = teachers.procrustes(*pairs)
    trained = heads.build_heads(D_X, D_Y, teacher.dim, teacher=teacher)
    _, _, found = recipe.select(trained, teacher, dataset, (0.5,))
    assert found["selected"] == "teacher" and len(set(found["candidates"].values())) == 1
    _, _, found = recipe.select(trained, teacher, data.dataset(pairs), (0.3, 0.5))
    assert found["selected"] == "mixture with 30% teacher"
    chosen, _, found = recipe.select(trained, None, dataset)
    assert chosen is trained and [*found["candidates"]] == ["trained"]


# --- bad inputs --------------------------------------------------------------------------------


def changed(array, row, value):
    out = array.copy()
    out[row] = value
    return out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: {"x": g["x"][:0], "y": g["y"][:0]}, r"^x or y\b"),
        (lambda g: {"x": g["x"][:, 1:]}, r"x.* 11\b"),
        (lambda g: {"y": g["x"]}, r"y.* 12\b"),
        (lambda g: {"x": changed(g["x"], 4, np.nan)}, r"x .*row 4\b"),
        (lambda g: {"y": changed(g["y"], 5, 0.0)}, r"y .*row 5\b"),
        (lambda g: {"y": g["y"].astype(int)}, r"y .*int64"),
        (lambda g: {"pairs": (g["x"], g["y"][:9])}, r"pairs_y:? has 9 rows"),
        (lambda g: {"pairs": (g["x"][0], g["y"])}, r"pairs_x .*\(12,\)"),
        (lambda g: {"pairs": (g["x"][:0], g["y"][:0])}, r"pairs_x .*rows.* 0"),
        (lambda g: {"pairs": (changed(g["x"], 2, np.inf), g["y"])}, r"pairs_x .*row 2\b"),
        (lambda g: {"val": (g["x"], g["y"][:9])}, r"gallery.* 75"),
        (lambda g: {"val": (g["y"], g["y"])}, r"val_x.* 10\b"),
        (lambda g: {"start": "zeros"}, r"start.* 'zeros'"),
        (lambda g: {"method": "sial"}, r"method.* 'sial'"),
        (lambda g: {"method": "sotalign", "x": None, "y": None}, "pool_x .*SOTAlign"),
        (lambda g: {"method": methods.NNCLR(k=999)}, r"k.* 999"),
        (lambda g: {"teacher": "pca"}, r"teacher.* 'pca'"),
        (lambda g: {"steps": 0}, r"steps.* 0"),
        (lambda g: {"unpaired_batch": 0}, r"unpaired_batch.* 0"),
    ],
)
def test_align_rejects_bad_inputs(given, change, message):
    with pytest.raises(checks.InputError, match=message) as caught:
        align(**{**given, **change(given)})
    assert "\n" not in str(caught.value)


def test_align_rejects_two_arrays_instead_of_pairs(table):
    x, y = table
    with pytest.raises(checks.InputError, match=r"pairs must be \(A, B\).* ndarray"):
        align(x, y)


def test_align_rejects_semi_supervised_method_without_pool(given):
    with pytest.raises(checks.InputError, match="pool_x"):
        align(given["pairs"], method=methods.SOTAlign(), progress=False)
    for method in ("sclip", "sail_semi"):
        with pytest.raises(checks.InputError, match="pool_x"):
            align(given["pairs"], method=method, progress=False)


def test_align_with_one_pool_for_method_that_reads_one(given):
    aligner = align(
        given["pairs"],
        x=given["x"],
        method=methods.SCLIP(weight_text=0.0),
        steps=3,
        unpaired_batch=16,
        progress=False,
    )
    assert aligner.info["data"]["pool_y"] == [0, 10]
    assert np.isfinite(aligner.similarity(given["x"], given["y"])).all()


@pytest.mark.parametrize("start", ["teacher", "random"])
def test_align_rejects_teacher_of_other_widths(given, start):
    wrong = teachers.cca(given["pairs"][0][:, :5], given["pairs"][1])
    with pytest.raises(checks.InputError, match=r"teacher .*\(5, 10\)"):
        align(**given, teacher=wrong, start=start)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.ones((3, 5)), r"x.* 5\b"),
        (np.full((3, D_X), np.nan), r"x .*rows 0\b"),
        (np.zeros((3, D_X)), r"x .*rows 0\b"),
        (np.ones(D_X), r"x .*\(12,\)"),
        (np.ones((3, D_X), int), r"x .*int64"),
    ],
)
def test_embed_rejects_bad_rows(aligned, rows, message):
    with pytest.raises(checks.InputError, match=message):
        aligned.embed_x(rows)


# --- on disk -----------------------------------------------------------------------------------


def moved(built, size=0.1):
    """Returns the heads with noise added to every parameter."""
    graphdef, params = nnx.split(built)
    rng = np.random.default_rng(1)
    return nnx.merge(
        graphdef, jax.tree.map(lambda p: p + size * rng.normal(size=p.shape).astype("f4"), params)
    )


FULL_DISK = """
    import pathlib, resource, signal, sys
    from sotalign_jax import Aligner, heads
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    path = pathlib.Path(sys.argv[1])
    Aligner(heads.build_heads(4, 3, 2), {}).save(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    try:
        Aligner(heads.build_heads(400, 300, 200), {}).save(path, overwrite=True)
    except OSError as error:
        print(error)
"""


def test_save_on_full_disk_raises_and_keeps_old_aligner(tmp_path):
    # A file size limit replaces a full disk: the operating system refuses the write.
    code, path = textwrap.dedent(FULL_DISK), tmp_path / "aligner"
    run = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    (line,) = run.stdout.splitlines()
    assert line.startswith(f"path {path} ")
    assert Aligner.load(path).heads.x.d_in == 4 and os.listdir(tmp_path) == ["aligner"]


def mixed_heads():
    rngs = nnx.Rngs(0)
    linear = heads.LinearHead(D_X, 4, norm="l2", rngs=rngs)
    return heads.Heads(linear, heads.MLPHead(D_Y, 4, hidden=3, rngs=rngs))


HEADS = {
    "linear": lambda: heads.build_heads(D_X, D_Y, 4),
    "l2": lambda: heads.build_heads(D_X, D_Y, 4, norm="l2"),
    "mlp": lambda: heads.build_heads(D_X, D_Y, 4, kind="mlp", hidden=9),
    "mlp as wide as its input": lambda: heads.build_heads(D_X, D_Y, 4, kind="mlp"),
    "glu": lambda: heads.build_heads(D_X, D_Y, 4, kind="glu"),
    "tanh": lambda: heads.build_heads(D_X, D_Y, 4, kind="tanh", hidden=9),
    "one of each": mixed_heads,
}


@pytest.mark.parametrize("kind", HEADS)
def test_save_and_load_round_trip_is_bit_identical(kind, tmp_path):
    aligner = Aligner(moved(HEADS[kind]()), {"note": [1, None, "x"]})
    aligner.save(tmp_path / "deep" / "aligner")
    loaded = Aligner.load(tmp_path / "deep" / "aligner")
    assert loaded.info == aligner.info
    assert nnx.graphdef(loaded.heads) == nnx.graphdef(aligner.heads)
    for a, b in zip(parameters(loaded), parameters(aligner), strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


def test_save_and_load_trained_aligner_keeps_similarity(aligned, table, tmp_path):
    aligned.save(tmp_path / "aligner")
    loaded = Aligner.load(tmp_path / "aligner")
    assert loaded.info == aligned.info
    np.testing.assert_array_equal(
        loaded.similarity(table[0], table[1]), aligned.similarity(table[0], table[1])
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["aligner"]  # no leftovers


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "saved"
    Aligner(HEADS["linear"](), {}).save(path)
    return path


def test_save_overwrites_only_on_request(saved, tmp_path):
    other = Aligner(moved(HEADS["linear"]()), {"version": 2})
    with pytest.raises(checks.InputError, match=rf"{saved} holds an aligner already; .*overwrite"):
        other.save(saved)
    assert Aligner.load(saved).info == {}
    other.save(saved, overwrite=True)
    assert Aligner.load(saved).info == {"version": 2}


def test_save_never_removes_other_files(saved, tmp_path):
    (saved / "notes.txt").write_text("precious")
    aligner = Aligner(HEADS["linear"](), {})
    for overwrite in (False, True):
        with pytest.raises(checks.InputError, match=rf"{saved} holds notes.txt"):
            aligner.save(saved, overwrite=overwrite)
    assert (saved / "notes.txt").read_text() == "precious"
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(checks.InputError, match=str(file)):
        aligner.save(file, overwrite=True)
    assert file.read_text() == "precious"


def test_save_replaces_the_target_of_a_symbolic_link(saved, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(saved)
    for version in (1, 2):
        Aligner(HEADS["linear"](), {"version": version}).save(link, overwrite=True)
        assert link.is_symlink() and Aligner.load(saved).info == {"version": version}
    assert sorted(os.listdir(tmp_path)) == ["link", "saved"]


def test_save_and_load_at_the_same_time_see_whole_aligners(saved):
    made = [Aligner(heads.build_heads(8 + tag, 3, 2), {"tag": tag}) for tag in (0, 1)]
    made[0].save(saved, overwrite=True)

    def write(aligner):
        for _ in range(10):
            aligner.save(saved, overwrite=True)

    def read(_):
        found = [Aligner.load(saved) for _ in range(10)]
        return [one.heads.x.d_in - 8 == one.info["tag"] for one in found]

    with concurrent.futures.ThreadPoolExecutor() as threads:
        savers = [threads.submit(write, one) for one in made]
        whole = threads.submit(read, None).result()
        for saver in savers:
            saver.result()
    assert all(whole) and os.listdir(saved.parent) == ["saved"]


def test_load_after_a_kill_between_two_renames(saved):
    saved.rename(saved.with_name(".saved.old"))
    assert Aligner.load(saved).info == {}
    Aligner(HEADS["linear"](), {"version": 2}).save(saved, overwrite=True)
    assert Aligner.load(saved).info == {"version": 2} and os.listdir(saved.parent) == ["saved"]


@pytest.mark.parametrize("path", ["/", "a\0b", "~nobody-of-that-name/a"])
def test_save_and_load_reject_paths_that_are_no_folder(path):
    for call in (Aligner(HEADS["linear"](), {}).save, Aligner.load):
        with pytest.raises(checks.InputError, match=r"^path ") as caught:
            call(path)
        assert "\n" not in str(caught.value)


def test_save_accepts_an_empty_folder(tmp_path, monkeypatch):
    (tmp_path / "made").mkdir()
    monkeypatch.chdir(tmp_path)
    Aligner(HEADS["linear"](), {}).save("made")
    assert Aligner.load("made").info == {}


def test_save_and_load_expand_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    Aligner(HEADS["linear"](), {"at": "home"}).save("~/aligner")
    assert (tmp_path / "aligner").is_dir()
    assert Aligner.load("~/aligner").info == {"at": "home"}


def test_save_with_bad_info_keeps_old_aligner(saved):
    with pytest.raises(checks.InputError, match="info "):
        Aligner(HEADS["linear"](), {"score": float("nan")}).save(saved, overwrite=True)
    assert Aligner.load(saved).info == {}
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


def test_load_accepts_finished_run_folder_only(saved, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(checks.InputError, match=rf"{run} holds no aligner; .* finished run"):
        Aligner.load(run)
    shutil.move(saved, run / "aligner")
    assert Aligner.load(run).info == {}
    with pytest.raises(checks.InputError, match="nowhere holds no aligner"):
        Aligner.load(tmp_path / "nowhere")


def truncate(folder):
    path = folder / "heads.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def garbage(folder):
    (folder / "heads.safetensors").write_bytes(b"not tensors at all")


def remove(folder):
    (folder / "heads.safetensors").unlink()


def lose_tensor(folder):
    tensors = load_file(folder / "heads.safetensors")
    del tensors["y.linear.kernel"]
    save_file(tensors, folder / "heads.safetensors")


def other_shape(folder):
    tensors = load_file(folder / "heads.safetensors")
    tensors["x.linear.bias"] = tensors["x.linear.bias"][:2]
    save_file(tensors, folder / "heads.safetensors")


def whole_numbers(folder):
    tensors = load_file(folder / "heads.safetensors")
    save_file(tensors | {"x.linear.bias": np.zeros(4, np.int32)}, folder / "heads.safetensors")


def other_values(folder):
    tensors = load_file(folder / "heads.safetensors")
    tensors["x.linear.bias"] = tensors["x.linear.bias"] + 1
    save_file(tensors, folder / "heads.safetensors")


def cut_description(folder):
    path = folder / "aligner.json"
    path.write_text(path.read_text()[:-20])


def edit(**changes):
    def apply(folder):
        path = folder / "aligner.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return apply


def option(**changes):
    """Returns a function that changes options of the x head in aligner.json."""

    def apply(folder):
        path = folder / "aligner.json"
        described = json.loads(path.read_text())
        described["heads"]["x"]["options"].update(changes)
        path.write_text(json.dumps(described))

    return apply


def calibration(**changes):
    """Returns a function that saves a calibration with other arrays and without a digest."""

    def apply(folder):
        rng = np.random.default_rng(0)
        rows = (rng.normal(size=(20, width)).astype(np.float32) for width in (D_X, D_Y))
        Aligner.load(folder).calibrated_by(*rows).save(folder, overwrite=True)
        path = folder / "calibration.safetensors"
        save_file(load_file(path) | changes, path)
        edit(sha256={})(folder)

    return apply


def nest(folder):
    (folder / "aligner.json").write_text('{"format": 3, "heads": ' + "[" * 100_000)


def list_instead(folder):
    (folder / "aligner.json").write_text("[1]")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "heads.safetensors is missing or damaged"),
        (garbage, "heads.safetensors is missing or damaged"),
        (remove, "heads.safetensors is missing or damaged"),
        (lose_tensor, r"has nothing for y.linear.kernel but aligner.json describes float\[10, 4\]"),
        (other_shape, r"has float\[2\] for x.linear.bias but aligner.json describes float\[4\]"),
        (whole_numbers, r"has int32\[4\] for x.linear.bias but aligner.json describes float\[4\]"),
        (other_values, "heads.safetensors is missing or damaged .its content has changed"),
        (cut_description, "aligner.json is missing or damaged"),
        (edit(format=99), "has format 99 but this version reads 3; load it with the version"),
        (list_instead, "has format None but this version reads 3"),
        (edit(heads={}), "aligner.json is missing or damaged"),
        (edit(heads={"x": {"kind": "cnn"}}), "aligner.json is missing or damaged"),
        (edit(heads={"x": {"kind": "linear", "depth": 3}}), "aligner.json is missing or damaged"),
        (edit(heads=None), "aligner.json is missing or damaged"),
        (edit(heads=[1, 2]), "aligner.json is missing or damaged"),
        (option(d_out=-1), r"d_out.* -1"),
        (option(d_out=0), r"d_out.* 0"),
        (option(d_out="4"), "aligner.json is missing or damaged"),
        (option(d_out=10**12), "aligner.json"),  # and nothing of that size is allocated
        (option(d_out=10**30), "aligner.json"),
        (option(norm="batch"), r"norm.* 'batch'"),
        (nest, "aligner.json is missing or damaged"),
        (calibration(f=np.ones((20, 3), np.float32)), "calibration.safetensors .*f has shape"),
        (calibration(u=np.ones(19, np.float32)), "calibration.safetensors .*u has shape"),
        (calibration(v=np.full(20, np.nan, np.float32)), "calibration.safetensors .*v has NaN"),
        (calibration(epsilon=np.zeros((), np.float32)), "calibration.safetensors .*epsilon is 0"),
        (calibration(w=np.ones(2)), "calibration.safetensors .*w"),
    ],
)
def test_load_names_damaged_files(saved, damage, message):
    damage(saved)
    with pytest.raises(checks.InputError, match=message) as caught:
        Aligner.load(saved)
    assert str(saved) in str(caught.value)
    assert "\n" not in str(caught.value)
