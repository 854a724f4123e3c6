"""Extraction: what is written, what is skipped, and what a kill or a full disk leaves."""

import functools
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest
import small_runs
import toy_encoders

from experiments import config as config_lib
from experiments import datasets, extract, extraction, locks, pair
from experiments import run as run_lib
from experiments.configs import files as files_config
from experiments.datasets import base
from sotalign_jax import checks, files, recording

ROOT = pathlib.Path(__file__).parents[1]
NAMES = ("embeddings.npy", "rows.jsonl", "skipped.jsonl", "metadata.json")


def write_pictures(folder, count, *, captions=True):
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(count):
        pixels = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
        PIL.Image.fromarray(pixels).save(folder / f"{n:03d}.png")
        if captions:
            (folder / f"{n:03d}.txt").write_text(f"picture number {n} of {pixels[0, 0]}\n")
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("data") / "pictures", 60)


def run(root, out, *, modality="image", encoder=None, captions=None, **options):
    source = datasets.open_dataset("folder", root, captions=captions)
    encoder = encoder or toy_encoders.Toy(modality)
    return extract.run(source, encoder, out, data={"root": "pictures"}, **options)


def jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- what is written ----------------------------------------------------------------------------


def test_rows_are_the_encoders_in_order(pictures, tmp_path, capfd):
    metadata = run(pictures, tmp_path / "out", shard_size=7, dtype="float32")
    source = datasets.open_dataset("folder", pictures)
    encoder = toy_encoders.Toy()
    items = list(source.items["image"]())
    expected = encoder.embed([encoder.prepare(item.load()) for item in items])
    stored = files.load_array(tmp_path / "out" / "embeddings.npy")
    assert isinstance(stored, np.memmap) and stored.dtype == np.float32
    np.testing.assert_allclose(stored, expected, rtol=1e-6)
    rows = jsonl(tmp_path / "out" / "rows.jsonl")
    assert rows == [{"id": item.id, "group": item.group} for item in items]
    assert metadata["shape"] == [60, 64] and metadata["count"] == 60 and metadata["skipped"] == 0
    assert metadata["encoder"]["name"] == "toy" and metadata["data"]["items"] == 60
    for name in NAMES[:3]:
        content = (tmp_path / "out" / name).read_bytes()
        noted = metadata["files"][name]
        assert noted == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert not (tmp_path / "out" / "shards").exists()
    shown = capfd.readouterr().err.splitlines()
    assert (
        shown[-1].startswith("extract: 60/60 image rows, ")
        and "image rows/s, 00:00 left" in shown[-1]
    )


def test_shards_and_threads_change_nothing(pictures, tmp_path):
    for number, (shard_size, workers) in enumerate([(1000, 1), (7, 5), (60, 2)]):
        run(pictures, tmp_path / f"{number}", shard_size=shard_size, workers=workers)
    for name in NAMES[:3]:
        contents = {(tmp_path / f"{n}" / name).read_bytes() for n in range(3)}
        assert len(contents) == 1, name


def test_texts_come_back_in_order_though_batched_by_length(pictures, tmp_path):
    run(pictures, tmp_path / "out", modality="text", dtype="float32")
    encoder = toy_encoders.Toy("text")
    first = (pictures / "000.txt").read_text().strip()
    loaded = extraction.load(tmp_path / "out")
    np.testing.assert_allclose(loaded.rows[0], encoder.embed([first])[0], rtol=1e-6)
    assert loaded.origins[0] == extraction.Row("000.png#0", "000.png")


def test_no_more_than_two_batches_wait(pictures, tmp_path):
    encoder = toy_encoders.Toy(batch_size=5)
    run(pictures, tmp_path / "out", encoder=encoder, workers=2)
    assert encoder.prepared == 60 and encoder.most_waiting <= 2 * 5 + 5


def test_a_finished_folder_is_left_alone(pictures, tmp_path):
    run(pictures, tmp_path / "out")
    before = small_runs.contents(tmp_path / "out")
    (tmp_path / "out" / "shards").mkdir()  # a kill can leave it behind
    encoder = toy_encoders.Toy()
    run(pictures, tmp_path / "out", encoder=encoder)
    assert small_runs.contents(tmp_path / "out") == before and encoder.embedded == 0
    assert not (tmp_path / "out" / "shards").exists()


def test_a_limit_takes_the_first(pictures, tmp_path):
    assert run(pictures, tmp_path / "out", limit=9)["count"] == 9


# --- what is skipped ----------------------------------------------------------------------------


def test_bad_items_are_skipped_and_listed(tmp_path):
    folder = write_pictures(tmp_path / "pictures", 5)
    (folder / "001.png").write_bytes((folder / "001.png").read_bytes()[:60])  # cut short
    (folder / "002.png").write_text("no picture at all")
    (folder / "003.txt").unlink()
    (folder / "004.txt").write_text("  \n")
    metadata = run(folder, tmp_path / "image", shard_size=2)
    assert metadata["count"] == 3 and metadata["skipped"] == 2
    lost = jsonl(tmp_path / "image" / "skipped.jsonl")
    assert [row["id"] for row in lost] == ["001.png", "002.png"]
    assert lost[0]["reason"] and "cannot identify image file" in lost[1]["reason"]
    metadata = run(folder, tmp_path / "text", modality="text")
    lost = jsonl(tmp_path / "text" / "skipped.jsonl")
    assert [row["id"] for row in lost] == ["003.png#0", "004.png#0"]
    assert "No such file" in lost[0]["reason"] and lost[1]["reason"] == "is empty"
    # What is left in both still matches.
    x, y = (extraction.load(tmp_path / side) for side in ("image", "text"))
    arrays = pair.gallery_arrays(x, y, "test")
    pair.write(tmp_path, arrays)
    assert np.load(tmp_path / "test_x.npy").shape == (1, 64)
    np.testing.assert_array_equal(np.load(tmp_path / "test_x.npy")[0], x.rows[0])


def test_of_equal_ids_the_first_is_kept(tmp_path):
    def items():
        for n, name in enumerate(["a", "b", "a", "c", "b"]):
            yield base.text_item(name, f"text {n}", name)

    metadata = extraction.extract(
        items, toy_encoders.Toy("text"), tmp_path / "out", data={}, shard_size=2, dtype="float32"
    )
    loaded = extraction.load(tmp_path / "out")
    assert [origin.id for origin in loaded.origins] == ["a", "b", "c"]
    np.testing.assert_allclose(loaded.rows[0], toy_encoders.Toy("text").embed(["text 0"])[0])
    assert metadata["skipped"] == 2 and loaded.metadata["shape"] == [3, 64]
    reasons = {(row["id"], row["reason"]) for row in jsonl(tmp_path / "out" / "skipped.jsonl")}
    told = "duplicate id; the first one is kept"
    assert reasons == {("a", told), ("b", told)}


def test_what_float16_cannot_hold_is_skipped(pictures, tmp_path):
    huge = toy_encoders.Toy(scale=1e6)
    with pytest.raises(checks.InputError, match="none of 60 items could be embedded; the first: "
                       "its embedding is not finite in float16"):  # fmt: skip
        run(pictures, tmp_path / "half", encoder=huge)
    assert run(pictures, tmp_path / "single", encoder=huge, dtype="float32")["count"] == 60
    with pytest.raises(checks.InputError, match="its embedding is zero"):
        run(pictures, tmp_path / "zero", encoder=toy_encoders.Toy(scale=0.0))


def test_a_missing_package_is_no_fault_of_the_items(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    load = functools.partial(base.sound, tmp_path / "a.flac")
    with pytest.raises(checks.InputError, match=r"soundfile: .*install -e '\.\[extract\]'"):
        extraction.extract(
            lambda: iter([base.Item("a", load, "a")]), toy_encoders.Toy("audio"), tmp_path / "out",
            data={},
        )  # fmt: skip


def test_an_empty_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(checks.InputError, match=r"data: no image found in .*; check --root"):
        run(tmp_path / "empty", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_encoder_of_another_modality(pictures, tmp_path):
    with pytest.raises(checks.InputError, match="toy needs audio but the dataset has image and"):
        run(pictures, tmp_path / "out", modality="audio")


# --- what is refused ----------------------------------------------------------------------------


def test_other_options_leave_a_folder_alone(pictures, tmp_path):
    run(pictures, tmp_path / "out")
    before = small_runs.contents(tmp_path / "out")
    for options in ({"dtype": "float32"}, {"limit": 5}, {"encoder": toy_encoders.Toy(name="b")}):
        with pytest.raises(checks.InputError, match=r"out: .* holds a run with .*another --out"):
            run(pictures, tmp_path / "out", **options)
    assert small_runs.contents(tmp_path / "out") == before


def test_a_changed_dataset_is_noticed(tmp_path):
    folder = write_pictures(tmp_path / "pictures", 4)
    run(folder, tmp_path / "out")
    (folder / "002.png").rename(folder / "999.png")
    with pytest.raises(checks.InputError, match=r"holds a run with data.digest="):
        run(folder, tmp_path / "out")


def test_a_folder_of_other_things_is_not_touched(pictures, tmp_path):
    (tmp_path / "thesis.tex").write_text("dear to me")
    with pytest.raises(checks.InputError, match=r"holds thesis.tex but no config.json"):
        run(pictures, tmp_path)


def test_one_process_a_folder(pictures, tmp_path):
    run(pictures, tmp_path / "out")
    (tmp_path / "out" / "metadata.json").unlink()
    with (
        locks.only_process(tmp_path / "out", flag="out"),
        pytest.raises(checks.InputError, match=r"out: .* is in use by another process"),
    ):
        run(pictures, tmp_path / "out")


def test_a_damaged_shard_is_named(pictures, tmp_path, monkeypatch):
    leave_before_joining(pictures, tmp_path / "out", monkeypatch)
    shard = tmp_path / "out" / "shards" / "000001.npz"
    shard.write_bytes(shard.read_bytes()[:-50])
    with pytest.raises(checks.InputError, match=r"out: .*000001.npz: .*delete it and start"):
        run(pictures, tmp_path / "out", shard_size=16)
    shard.unlink()
    assert run(pictures, tmp_path / "out", shard_size=16)["count"] == 60


def test_unfinished_and_damaged_folders_are_not_loaded(pictures, tmp_path, monkeypatch):
    with pytest.raises(checks.InputError, match="holds no finished embeddings; check the path"):
        extraction.load(tmp_path)
    leave_before_joining(pictures, tmp_path / "out", monkeypatch)
    with pytest.raises(checks.InputError, match="start that extraction again to finish it"):
        extraction.load(tmp_path / "out")
    run(pictures, tmp_path / "out", shard_size=16)
    (tmp_path / "out" / "rows.jsonl").write_text('{"id": "a", "group": "a"}\n')
    with pytest.raises(checks.InputError, match="do not belong together"):
        extraction.load(tmp_path / "out")


def leave_before_joining(pictures, out, monkeypatch):
    """Leaves a folder as a kill after the last shard does."""

    def kill(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(extraction, "_join_shards", kill)
        with pytest.raises(KeyboardInterrupt):
            run(pictures, out, shard_size=16)


# --- kills and full disks -----------------------------------------------------------------------


def start(pictures, out, *, limit=0, sign=0, at=0):
    """Extracts in a process of its own, with files of `limit` bytes or a signal at an item."""
    program = str(ROOT / "tests" / "toy_encoders.py")
    arguments = [str(value) for value in (pictures, out, limit, int(sign), at)]
    return subprocess.run(
        [sys.executable, program, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def uninterrupted(pictures, tmp_path_factory):
    out = tmp_path_factory.mktemp("reference") / "out"
    process = start(pictures, out)
    assert process.returncode == 0, process.stderr
    return out


def same(out, reference):
    for name in NAMES:
        assert (out / name).read_bytes() == (reference / name).read_bytes(), name
    return sorted(os.listdir(out)) == sorted(os.listdir(reference))


def shards(out):
    return len(list((out / "shards").glob("*.npz"))) if (out / "shards").exists() else 0


def test_a_run_killed_again_and_again_leaves_the_same_bytes(pictures, uninterrupted, tmp_path):
    out = tmp_path / "out"
    for at, saved in ((4, 0), (15, 2), (40, 8)):  # the last counts from where the second stopped
        process = start(pictures, out, sign=signal.SIGKILL, at=at)
        assert process.returncode == -signal.SIGKILL, process.stderr
        assert shards(out) == saved and not (out / "metadata.json").exists()
    (out / "shards" / ".000009.npz.tmp").write_bytes(b"PK half a shard")
    process = start(pictures, out)
    assert process.returncode == 0, process.stderr
    assert process.stderr.startswith("extract: 54/60")  # what was saved is not embedded again
    assert same(out, uninterrupted)


def test_a_kill_while_the_files_are_joined(pictures, tmp_path, monkeypatch):
    run(pictures, tmp_path / "reference", shard_size=16)
    write = recording.write_json

    def kill(path, value):
        if pathlib.Path(path).name == "metadata.json":
            raise KeyboardInterrupt
        write(path, value)

    with monkeypatch.context() as patch:
        patch.setattr(recording, "write_json", kill)
        with pytest.raises(KeyboardInterrupt):
            run(pictures, tmp_path / "out", shard_size=16)
    assert (tmp_path / "out" / "embeddings.npy").exists()
    with pytest.raises(checks.InputError, match="holds no finished embeddings"):
        extraction.load(tmp_path / "out")
    run(pictures, tmp_path / "out", shard_size=16)
    assert same(tmp_path / "out", tmp_path / "reference")


def test_a_full_disk_loses_nothing(pictures, uninterrupted, tmp_path):
    out = tmp_path / "out"
    for _ in range(2):
        process = start(pictures, out, limit=4000)  # shards fit, the joined file does not
        assert process.returncode == 1
        last = process.stderr.splitlines()[-1]
        assert last.startswith("error: ") and "File too large" in last and "embeddings.npy" in last
        assert shards(out) == 10 and not (out / "embeddings.npy").exists()
    process = start(pictures, out)
    assert process.returncode == 0, process.stderr
    assert same(out, uninterrupted)


def test_a_polite_end_is_one_line(pictures, tmp_path):
    process = start(pictures, tmp_path / "out", sign=signal.SIGTERM, at=14)
    assert process.returncode == 1 and "Traceback" not in process.stderr
    told = "interrupted: start again with the same --out to go on"
    assert process.stderr.splitlines()[-1] == told and shards(tmp_path / "out") == 2


# --- files for experiments.main -----------------------------------------------------------------


def extracted(root, out, **options):
    for modality in ("image", "text"):
        run(root, out / modality, modality=modality, **options)
    return (extraction.load(out / modality) for modality in ("image", "text"))


def smoke_run(folder, arrays):
    config = files_config.get_config("smoke")
    config.runs, config.method = {}, "cca"
    config.data.n_pairs = 20
    for flag in pair.write(folder, arrays):
        name, path = flag.removeprefix("--config.data.files.").split("=")
        config.data.files[name] = path
    (one,) = config_lib.runs(config).values()
    return one


def test_files_go_straight_into_training(pictures, tmp_path):
    x, y = extracted(pictures, tmp_path)
    arrays = pair.split_arrays(x, y, val=0.2, test=0.2, seed=0)
    pair.claim(tmp_path / "files", x, y)
    one = smoke_run(tmp_path / "files", arrays)
    summary = run_lib.load_dataset(one).summary()
    assert summary["test_x"] == [12, 64] and summary["pairs_x"] == [20, 64]
    assert "test/mean/R@1" in run_lib.run(one, tmp_path / "run")


def write_food(root):
    """Food-101's layout: five classes, a colour each."""
    classes = ["apple_pie", "beet_salad", "carrot_cake", "dumplings", "edamame"]
    (root / "meta").mkdir(parents=True)
    (root / "meta" / "classes.txt").write_text("\n".join(classes))
    listed = [f"{name}/{n}" for n in range(3) for name in classes]
    (root / "meta" / "test.txt").write_text("\n".join(listed))
    for name in listed:
        path = root / "images" / f"{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        shade = 50 * classes.index(name.split("/")[0])
        PIL.Image.new("RGB", (8, 8), (shade, 255 - shade, int(name[-1]))).save(path)
    return root


def test_zero_shot_from_pictures_and_class_names_to_accuracy(pictures, tmp_path):
    food = datasets.open_dataset("food101", write_food(tmp_path / "food"))
    for modality in ("image", "text"):
        extract.run(food, toy_encoders.Toy(modality), tmp_path / "food" / modality, data={})
    x, y = (extraction.load(tmp_path / "food" / modality) for modality in ("image", "text"))
    task = pair.zero_shot_arrays(x, y)
    assert task["zero_shot_prompts"].shape == (5, 1, 64)
    assert task["zero_shot_labels"].tolist() == [0, 1, 2, 3, 4] * 3
    prompt = toy_encoders.Toy("text").embed(["a photo of carrot cake, a type of food."])[0]
    np.testing.assert_allclose(task["zero_shot_prompts"][2, 0], prompt, atol=1e-3)

    a, b = extracted(pictures, tmp_path)
    pair.claim(tmp_path / "files", a, b)
    one = smoke_run(tmp_path / "files", pair.table_arrays(a, b) | task)
    results = run_lib.run(one, tmp_path / "run")
    assert {"test/zero_shot/top1", "test/zero_shot/mean_per_class"} <= results.keys()

    broken = y._replace(origins=y.origins[:-1])
    with pytest.raises(checks.InputError, match="classes have 0 to 1 prompts"):
        pair.zero_shot_arrays(x, broken)
    with pytest.raises(checks.InputError, match="not of one classification set"):
        pair.zero_shot_arrays(a, b)


def embeddings(origins, rows=None):
    rows = np.arange(len(origins), dtype=float)[:, None] + 1 if rows is None else rows
    return extraction.Embeddings(rows, [extraction.Row(*o) for o in origins], {"encoder": {}})


def test_captions_find_their_pictures():
    x = embeddings([("p", "p"), ("lonely", "lonely"), ("q", "q")])
    y = embeddings([("q#0", "q"), ("p#0", "p"), ("gone#0", "gone"), ("q#1", "q")])
    matched = pair.match(x, y)
    assert matched.x.tolist() == [0, 2] and matched.y.tolist() == [0, 1, 3]
    assert matched.x_of_y.tolist() == [1, 0, 1]
    train = pair.table_arrays(x, y)
    assert train["x"].chosen.tolist() == [2, 0, 2] and train["y"].chosen.tolist() == [0, 1, 3]
    with pytest.raises(checks.InputError, match="share the group 'q'"):
        pair.match(y, x)
    with pytest.raises(checks.InputError, match="none of its groups, such as 'z'"):
        pair.match(x, embeddings([("z#0", "z")]))


def test_splits_keep_a_picture_and_its_captions_together():
    x = embeddings([(f"{n}", f"{n}") for n in range(50)])
    y = embeddings([(f"{n}#{k}", f"{n}") for n in range(50) for k in range(1 + n % 3)])
    arrays = pair.split_arrays(x, y, val=0.2, test=0.3, seed=1)
    assert len(arrays["val_x"].chosen) == 10 and len(arrays["test_x"].chosen) == 15
    seen = [set(arrays[f"{name}x"].chosen.tolist()) for name in ("", "val_", "test_")]
    assert sum(map(len, seen)) == len(set.union(*seen)) == 50
    for name in ("val", "test"):
        owner = arrays[f"{name}_x"].chosen[arrays[f"{name}_x_of_y"]]
        told = [int(y.origins[row].group) for row in arrays[f"{name}_y"].chosen]
        assert owner.tolist() == told
    told = [int(y.origins[row].group) for row in arrays["y"].chosen]
    assert arrays["x"].chosen.tolist() == told
    with pytest.raises(checks.InputError, match=r"val, test: are 0.5 and 0.5"):
        pair.split_arrays(x, y, val=0.5, test=0.5, seed=0)


def test_the_sue_protocol():
    x = embeddings([(f"{n}", f"{n}") for n in range(600)])
    y = embeddings([(f"{n}#{k}", f"{n}") for n in range(600) for k in range(2)])
    arrays = {k: v.chosen for k, v in pair.sue_arrays(x, y, n_pairs=50, seed=0).items()}
    assert arrays["test_x"].tolist() == list(range(400))
    assert arrays["test_y"].tolist() == list(range(0, 800, 2))  # the first caption of each
    assert arrays["x"].tolist() == list(range(550, 600))
    assert len(arrays["unpaired_x"]) == len(arrays["unpaired_y"]) == 135  # a tenth of 150 removed
    assert set(arrays["unpaired_x"].tolist()) <= set(range(400, 550))
    kept = [row // 2 for row in arrays["unpaired_y"]]
    assert kept != sorted(kept) and set(kept) != set(arrays["unpaired_x"].tolist())
    with pytest.raises(checks.InputError, match="leave 0 of 600 rows"):
        pair.sue_arrays(x, y, n_pairs=200, seed=0)


def test_files_of_other_encoders_are_not_mixed(tmp_path):
    x, y = embeddings([("a", "a")]), embeddings([("a#0", "a")])
    pair.claim(tmp_path, x, y)
    pair.claim(tmp_path, x, y)
    other = y._replace(metadata={"encoder": {"name": "other"}})
    with pytest.raises(checks.InputError, match=r"has files of other encoders .*another --out"):
        pair.claim(tmp_path, x, other)


# --- the command line ---------------------------------------------------------------------------


ASKED = ("--encoder=bert", "--out=o")


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        ("extract", ["--data=coco"], "error: the following arguments are required: --encoder, "),
        ("extract", [*ASKED, "--root=/tmp", "--data=mnist"], "error: data: 'mnist' is unknown"),
        ("extract", [*ASKED, "--root=/tmp", "--data=folder", "--limit=0"], "error: argument --l"),
        ("pair", ["--x=/gone", "--y=/gone", "--out=o"], "error: /gone: holds no finished"),
        ("search", ["--model=m"], "error: query: pass --query and --images, or"),
    ],
)
def test_mistakes_end_in_one_line(tmp_path, module, options, message):
    process = subprocess.run(
        [sys.executable, "-m", f"experiments.{module}", *options],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1 and process.stdout == "", process.stderr
    assert process.stderr.startswith(message) and process.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == []
