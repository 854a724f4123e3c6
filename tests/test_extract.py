"""Tests of extraction: output, skipped items, kills, full disks and the commands."""

import functools
import json
import os
import pathlib
import resource
import select
import shutil
import signal
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest
import small_runs
import toy_encoders

from experiments import run as run_lib
from experiments import spec
from experiments.configs import files as files_config
from sotalign_jax import checks, files, progress, serve, storage
from sotalign_jax.search import __main__ as search
from sotalign_jax.search import datasets, extraction, items, reading
from sotalign_jax.search import shards as shards_lib

ROOT = pathlib.Path(__file__).parents[1]
NAMES = ("embeddings.npy", "rows.jsonl", "skipped.jsonl", "inputs.jsonl", "metadata.json")


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
    return extraction.extract(source, encoder, out, data={"root": "pictures"}, **options)


def leave_unfinished(root, out):
    """Extracts under a file size limit that only the first shards of 6 items fit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            run(root, out, shard_size=6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- output -------------------------------------------------------------------------------------


def test_extract_writes_encoder_rows_in_order(pictures, tmp_path, capfd):
    metadata = run(pictures, tmp_path / "out", shard_size=7, dtype="float32")
    source = datasets.open_dataset("folder", pictures)
    encoder = toy_encoders.Toy()
    listed = list(source.items["image"]())
    expected = encoder.embed([encoder.prepare(item.load()) for item in listed])
    stored = files.load_array(tmp_path / "out" / "embeddings.npy")
    assert isinstance(stored, np.memmap) and stored.dtype == np.float32
    np.testing.assert_allclose(stored, expected, rtol=1e-6)
    rows = jsonl(tmp_path / "out" / "rows.jsonl")
    assert rows == [{"id": item.id, "group": item.group} for item in listed]
    assert metadata["shape"] == [60, 64] and metadata["count"] == 60 and metadata["skipped"] == 0
    assert metadata["encoder"]["name"] == "toy" and metadata["data"]["items"] == 60
    assert not (tmp_path / "out" / "progress.json").exists()
    shown = capfd.readouterr().err.splitlines()
    assert (
        shown[-1].startswith("extract: 60/60 image rows, ")
        and "image rows/s, 00:00 left" in shown[-1]
    )


def test_extract_is_independent_of_shards_and_threads(pictures, tmp_path):
    for number, (shard_size, workers) in enumerate([(1000, 1), (7, 5), (60, 2)]):
        run(pictures, tmp_path / f"{number}", shard_size=shard_size, workers=workers)
    for name in NAMES[:4]:
        contents = {(tmp_path / f"{n}" / name).read_bytes() for n in range(3)}
        assert len(contents) == 1, name


def test_extract_keeps_text_order_despite_length_batching(pictures, tmp_path):
    run(pictures, tmp_path / "out", modality="text", dtype="float32")
    encoder = toy_encoders.Toy("text")
    first = (pictures / "000.txt").read_text().strip()
    loaded = extraction.load(tmp_path / "out")
    np.testing.assert_allclose(loaded.rows[0], encoder.embed([first])[0], rtol=1e-6)
    assert loaded.origins[0] == extraction.Row("000.png#0", "000.png", first)


def test_extract_queues_at_most_two_batches(pictures, tmp_path):
    encoder = toy_encoders.Toy(batch_size=5)
    run(pictures, tmp_path / "out", encoder=encoder, workers=2)
    assert encoder.prepared == 60 and encoder.most_waiting <= 2 * 5 + 5


def test_extract_leaves_finished_folder_unchanged(pictures, tmp_path):
    run(pictures, tmp_path / "out")
    before = small_runs.contents(tmp_path / "out")
    (tmp_path / "out" / "progress.json").write_text("{}")  # a kill can leave this file
    encoder = toy_encoders.Toy()
    run(pictures, tmp_path / "out", encoder=encoder)
    assert small_runs.contents(tmp_path / "out") == before and encoder.embedded == 0
    assert not (tmp_path / "out" / "progress.json").exists()


def test_extract_limit_takes_the_first_items(pictures, tmp_path):
    assert run(pictures, tmp_path / "out", limit=9)["count"] == 9


# --- skipped items ------------------------------------------------------------------------------


def test_extract_skips_devices_named_like_pictures_and_captions(tmp_path, capfd):
    folder = write_pictures(tmp_path / "pictures", 2)
    (folder / "device.jpg").symlink_to("/dev/null")
    (folder / "device.txt").symlink_to("/dev/null")
    for modality, name in (("image", "device.jpg"), ("text", "device.jpg#0")):
        for _ in range(2):  # the second run compares the folder with the first one
            assert run(folder, tmp_path / modality, modality=modality)["count"] == 2
        (lost,) = jsonl(tmp_path / modality / "skipped.jsonl")
        assert lost["id"] == name and "not a regular file" in lost["reason"]


def test_extract_skips_and_lists_bad_items(tmp_path):
    folder = write_pictures(tmp_path / "pictures", 5)
    (folder / "001.png").write_bytes((folder / "001.png").read_bytes()[:60])  # cut short
    (folder / "002.png").write_text("no picture at all")
    (folder / "003.txt").unlink()
    (folder / "004.txt").write_text("  \n")
    metadata = run(folder, tmp_path / "image", shard_size=2)
    assert metadata["count"] == 3 and metadata["skipped"] == 2
    lost = jsonl(tmp_path / "image" / "skipped.jsonl")
    assert [row["id"] for row in lost] == ["001.png", "002.png"]
    assert lost[0]["reason"] and "not a picture" in lost[1]["reason"]
    metadata = run(folder, tmp_path / "text", modality="text")
    lost = jsonl(tmp_path / "text" / "skipped.jsonl")
    assert [row["id"] for row in lost] == ["003.png#0", "004.png#0"]
    assert "No such file" in lost[0]["reason"] and lost[1]["reason"] == "text is empty"
    # The remaining rows of both sides still match.
    x, y = (extraction.load(tmp_path / side) for side in ("image", "text"))
    extraction.write(tmp_path, extraction.join("test", x, y), x, y)
    assert np.load(tmp_path / "test_x.npy").shape == (1, 64)
    np.testing.assert_array_equal(np.load(tmp_path / "test_x.npy")[0], x.rows[0])


def test_extract_keeps_the_first_of_equal_ids(tmp_path):
    texts = [items.Item(name, name, f"text {n}") for n, name in enumerate("abacb")]
    metadata = extraction.extract(
        items.Source({"text": lambda: iter(texts)}), toy_encoders.Toy("text"), tmp_path / "out",
        data={}, shard_size=2, dtype="float32",
    )  # fmt: skip
    loaded = extraction.load(tmp_path / "out")
    assert [origin.id for origin in loaded.origins] == ["a", "b", "c"]
    np.testing.assert_allclose(loaded.rows[0], toy_encoders.Toy("text").embed(["text 0"])[0])
    assert metadata["skipped"] == 2 and loaded.metadata["shape"] == [3, 64]
    reasons = {(row["id"], row["reason"]) for row in jsonl(tmp_path / "out" / "skipped.jsonl")}
    told = "id is a duplicate; the first item is kept"
    assert reasons == {("a", told), ("b", told)}


def test_extract_rejects_rows_beyond_float16_range(pictures, tmp_path):
    huge = toy_encoders.Toy(scale=1e6)
    with pytest.raises(checks.InputError, match=r"data .*float16"):
        run(pictures, tmp_path / "half", encoder=huge)
    assert run(pictures, tmp_path / "single", encoder=huge, dtype="float32")["count"] == 60
    with pytest.raises(checks.InputError, match=r"data .*zero"):
        run(pictures, tmp_path / "zero", encoder=toy_encoders.Toy(scale=0.0))


def test_extract_without_soundfile_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    sound = items.Item("a", "a", tmp_path / "a.flac", items.sound)
    source = items.Source({"audio": lambda: iter([sound])})
    with pytest.raises(checks.InputError, match=r"soundfile .*\[extract\]"):
        extraction.extract(source, toy_encoders.Toy("audio"), tmp_path / "out", data={})


def test_extract_rejects_empty_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(checks.InputError, match=r"data .*--root"):
        run(tmp_path / "empty", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_extract_rejects_encoder_of_another_modality(pictures, tmp_path):
    with pytest.raises(checks.InputError, match=r"encoder .*audio"):
        run(pictures, tmp_path / "out", modality="audio")


# --- rejected folders ---------------------------------------------------------------------------


def test_extract_with_other_options_leaves_folder_unchanged(pictures, tmp_path):
    run(pictures, tmp_path / "out")
    before = small_runs.contents(tmp_path / "out")
    for options in ({"dtype": "float32"}, {"limit": 5}, {"encoder": toy_encoders.Toy(name="b")}):
        with pytest.raises(checks.InputError, match=r"workdir .*--workdir"):
            run(pictures, tmp_path / "out", **options)
    assert small_runs.contents(tmp_path / "out") == before


def replace_picture(path):
    """Changes the content of a file, but not its size, and advances its modification time."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


CHANGES = {
    "renamed": (lambda folder: (folder / "002.png").rename(folder / "999.png"), "'003.png'"),
    "removed": (lambda folder: (folder / "040.png").unlink(), "'040.png' is gone"),
    "added": (lambda folder: shutil.copy(folder / "000.png", folder / "z.png"), "'z.png' is new"),
    "replaced": (lambda folder: replace_picture(folder / "001.png"), "001.png has other content"),
    "cut": (lambda folder: (folder / "001.png").write_bytes(b"cut"), "001.png has 3 bytes"),
    "gone bad": (lambda folder: (folder / "000.png").write_text("text"), "000.png has 4 bytes"),
}


@pytest.mark.parametrize(("change", "told"), CHANGES.values(), ids=CHANGES)
def test_extract_detects_changes_since_an_interruption(tmp_path, change, told):
    folder, out = write_pictures(tmp_path / "pictures", 41), tmp_path / "out"
    leave_unfinished(folder, out)
    before = small_runs.contents(out)
    change(folder)
    if "gone" in told or "new" in told:  # not embedded yet
        assert run(folder, out, shard_size=6)["count"] in (40, 42)
        return
    with pytest.raises(checks.InputError, match=rf"workdir .*{told}"):
        run(folder, out, shard_size=6)
    assert small_runs.contents(out) == before


NUMBERS = {
    "renamed": (1, 0, 1, 40),
    "removed": (0, 0, 1, 40),
    "added": (1, 0, 0, 41),
    "replaced": (0, 1, 0, 40),
    "cut": (0, 1, 0, 40),
    "gone bad": (0, 1, 0, 40),
}


@pytest.mark.parametrize("name", CHANGES)
def test_extract_updates_only_what_changed(tmp_path, capfd, name):
    folder, out = write_pictures(tmp_path / "pictures", 41), tmp_path / "out"
    run(folder, out, shard_size=6)
    change, told = CHANGES[name]
    change(folder)
    encoder = toy_encoders.Toy()
    metadata = run(folder, out, shard_size=6, encoder=encoder)
    added, changed, removed, kept = NUMBERS[name]
    counts = f"{added} added, {changed} changed, {removed} removed, {kept} kept"
    shown = capfd.readouterr().err
    assert counts in shown and told.strip("'").split()[0] in shown
    assert encoder.prepared <= added + changed and encoder.embedded <= added + changed
    assert metadata["data"]["items"] == 41 + added - removed
    run(folder, tmp_path / "anew", shard_size=6)
    assert same(out, tmp_path / "anew")
    encoder = toy_encoders.Toy()
    run(folder, out, shard_size=6, encoder=encoder)  # nothing is left to do
    assert encoder.embedded == 0


def test_extract_keeps_former_files_until_an_update_is_complete(tmp_path):
    folder, out = write_pictures(tmp_path / "pictures", 41), tmp_path / "out"
    run(folder, out, shard_size=6)
    before = small_runs.contents(out)
    write_pictures(tmp_path / "more", 61)
    for path in sorted((tmp_path / "more").glob("*"))[82:]:
        shutil.copy(path, folder / path.name)
    leave_unfinished(folder, out)  # the disk is full during the update
    now = small_runs.contents(out)
    assert {name: now[name] for name in before} == before
    assert any(name.startswith("next") for name in map(str, now))
    assert run(folder, out, shard_size=6)["count"] == 61
    run(folder, tmp_path / "anew", shard_size=6)
    assert same(out, tmp_path / "anew")


@pytest.mark.parametrize("ranks", [(1, 0), (0, 1)])
def test_extract_is_updated_by_several_processes(tmp_path, ranks):
    folder, out = write_pictures(tmp_path / "pictures", 41), tmp_path / "out"
    run(folder, out, shard_size=6)
    (folder / "020.png").unlink()
    shutil.copy(folder / "000.png", folder / "z.png")
    PIL.Image.new("RGB", (5, 5), "red").save(folder / "001.png")
    before, encoder = (out / "metadata.json").read_bytes(), toy_encoders.Toy()
    first, last = (shards_lib.Process(rank, 2) for rank in ranks)
    assert run(folder, out, shard_size=6, encoder=encoder, process=first) is None
    assert (out / "metadata.json").read_bytes() == before
    assert run(folder, out, shard_size=6, encoder=encoder, process=last)["count"] == 41
    run(folder, tmp_path / "anew", shard_size=6)
    assert encoder.embedded == 2 and same(out, tmp_path / "anew")


@pytest.mark.parametrize("moved", [0, 2])
def test_adopt_continues_after_a_kill(pictures, tmp_path, moved):
    run(pictures, tmp_path / "out")
    shutil.copytree(tmp_path / "out", tmp_path / "new")
    (tmp_path / "new").rename(tmp_path / "out" / "next")
    (tmp_path / "out" / "metadata.json").unlink()
    for name in NAMES[:moved]:
        (tmp_path / "out" / "next" / name).rename(tmp_path / "out" / name)
    encoder = toy_encoders.Toy()
    assert run(pictures, tmp_path / "out", encoder=encoder)["count"] == 60
    assert encoder.embedded == 0 and not (tmp_path / "out" / "next").exists()


def test_extract_updates_changed_captions(tmp_path, capfd):
    folder, captions = write_pictures(tmp_path / "pictures", 2), tmp_path / "captions.csv"
    captions.write_text("file,caption\n000.png,A dog.\n001.png,A cat.\n")
    run(folder, tmp_path / "out", modality="text", captions=captions)
    captions.write_text("file,caption\n000.png,A dog.\n001.png,A cow.\n001.png,A bull.\n")
    run(folder, tmp_path / "out", modality="text", captions=captions)
    assert "1 added, 1 changed, 0 removed, 1 kept" in capfd.readouterr().err
    rows = jsonl(tmp_path / "out" / "rows.jsonl")
    assert [row["text"] for row in rows] == ["A dog.", "A cow.", "A bull."]
    run(folder, tmp_path / "beside", modality="text")
    (folder / "001.txt").write_text("a longer caption than before, to be sure of it")
    run(folder, tmp_path / "beside", modality="text")
    assert jsonl(tmp_path / "beside" / "rows.jsonl")[1]["text"].startswith("a longer")


def test_extract_accepts_touched_files_of_equal_content(tmp_path):
    folder = write_pictures(tmp_path / "pictures", 4)
    (folder / "002.png").unlink()
    (folder / "002.png").symlink_to("gone.png")  # skipped in both runs
    run(folder, tmp_path / "out")
    for path in folder.glob("*"):
        if path.exists():
            os.utime(path, ns=(0, 0))
    assert run(folder, tmp_path / "out")["count"] == 3


def test_extract_rejects_folder_with_other_files(pictures, tmp_path):
    (tmp_path / "thesis.tex").write_text("dear to me")
    with pytest.raises(checks.InputError, match=r"workdir .*thesis.tex"):
        run(pictures, tmp_path)


def test_extract_rejects_folder_in_use(pictures, tmp_path):
    run(pictures, tmp_path / "out")
    (tmp_path / "out" / "metadata.json").unlink()
    with (
        storage.locked(tmp_path / "out"),
        pytest.raises(checks.InputError, match=r"workdir .*in use"),
    ):
        run(pictures, tmp_path / "out")


def test_extract_names_truncated_file(pictures, tmp_path):
    leave_unfinished(pictures, tmp_path / "out")
    (tmp_path / "out" / "embeddings.npy").write_bytes(b"cut")
    with pytest.raises(checks.InputError, match=r"workdir .*embeddings.npy"):
        run(pictures, tmp_path / "out", shard_size=6)


def test_load_rejects_unfinished_and_damaged_folders(pictures, tmp_path):
    with pytest.raises(checks.InputError, match=r"check the path"):
        extraction.load(tmp_path)
    leave_unfinished(pictures, tmp_path / "out")
    with pytest.raises(checks.InputError, match=r"out holds no finished extraction"):
        extraction.load(tmp_path / "out")
    run(pictures, tmp_path / "out", shard_size=6)
    (tmp_path / "out" / "rows.jsonl").write_text('{"id": "a", "group": "a"}\n')
    with pytest.raises(checks.InputError, match=r"rows.jsonl 1"):
        extraction.load(tmp_path / "out")


# --- kills and full disks -----------------------------------------------------------------------


def start(pictures, out, sign, at, **environment):
    """Starts to extract in another process, which gets `sign` at item `at`."""
    program = str(ROOT / "tests" / "toy_encoders.py")
    options = {"root": pictures, "out": out, "sign": int(sign), "at": at}
    return subprocess.Popen(
        [sys.executable, program, *(f"--{name}={value}" for name, value in options.items())],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), **environment},
        stderr=subprocess.PIPE,
        text=True,
    )


def kill(pictures, out, sign, at):
    """Extracts in its own process, which gets `sign` at item `at`. Returns its stderr."""
    process = start(pictures, out, sign, at)
    told = process.communicate()[1]
    assert process.returncode == (-sign if sign == signal.SIGKILL else 1), told
    return told


@pytest.fixture(scope="module")
def uninterrupted(pictures, tmp_path_factory):
    out = tmp_path_factory.mktemp("reference") / "out"
    run(pictures, out, shard_size=6)
    return out


def same(out, reference):
    for name in NAMES:
        assert (out / name).read_bytes() == (reference / name).read_bytes(), name
    return sorted(os.listdir(out)) == sorted(os.listdir(reference))


def shards(out):
    return storage.read_json(out / "progress.json")["items"] / 6


def test_extract_killed_repeatedly_writes_identical_bytes(pictures, uninterrupted, tmp_path, capfd):
    out = tmp_path / "out"
    for at, saved in ((15, 2), (40, 8)):  # `at` counts from the last saved item
        kill(pictures, out, signal.SIGKILL, at)
        assert shards(out) == saved and not (out / "metadata.json").exists()
    with (out / "inputs.jsonl").open("ab") as file:
        file.write(b'{"id": "half a li')
    run(pictures, out, shard_size=6)
    assert capfd.readouterr().err.startswith("extract: 54/60")  # resumes after the saved shards
    assert same(out, uninterrupted)


def test_extract_resumes_after_full_disk(pictures, uninterrupted, tmp_path):
    for _ in range(2):
        leave_unfinished(pictures, tmp_path / "out")
        saved = int(6 * shards(tmp_path / "out"))
        assert 12 <= saved < 60 and not (tmp_path / "out" / "metadata.json").exists()
    encoder = toy_encoders.Toy()
    run(pictures, tmp_path / "out", encoder=encoder, shard_size=6)
    assert encoder.embedded == 60 - saved and same(tmp_path / "out", uninterrupted)


def test_extract_on_sigterm_ends_in_one_line(pictures, tmp_path):
    told = kill(pictures, tmp_path / "out", signal.SIGTERM, 14)
    assert "Traceback" not in told and shards(tmp_path / "out") == 2
    assert told.splitlines()[-1].startswith("interrupted: ")


# --- several processes --------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [(1, 0), (2, 0, 1)])
def test_extract_shared_by_processes_writes_identical_bytes(
    pictures, uninterrupted, tmp_path, ranks
):
    out = tmp_path / "out"
    for rank in ranks[:-1]:
        one = shards_lib.Process(rank, len(ranks))
        assert run(pictures, out, shard_size=6, process=one) is None
        assert not (out / "metadata.json").exists()
    last = shards_lib.Process(ranks[-1], len(ranks))
    encoder = toy_encoders.Toy()
    metadata = run(pictures, out, shard_size=6, process=last, encoder=encoder)
    assert metadata["count"] == 60 and same(out, uninterrupted)
    assert encoder.embedded == 6 * len(range(last.rank, 10, last.world))


def test_extract_resumes_parts_with_another_number_of_processes(pictures, uninterrupted, tmp_path):
    out, encoder = tmp_path / "out", toy_encoders.Toy()
    run(pictures, out, shard_size=6, process=shards_lib.Process(1, 2))
    run(pictures, out, shard_size=6, encoder=encoder)
    assert encoder.embedded == 30 and same(out, uninterrupted)


def test_extract_keeps_the_first_of_equal_ids_of_all_processes(tmp_path):
    texts = [items.Item(name, name, f"text {n}") for n, name in enumerate("abacb")]
    source = items.Source({"text": lambda: iter(texts)})
    for rank in (1, 0):
        extraction.extract(
            source, toy_encoders.Toy("text"), tmp_path / "out", data={}, shard_size=1,
            process=shards_lib.Process(rank, 2),
        )  # fmt: skip
    loaded = extraction.load(tmp_path / "out")
    assert [origin.text for origin in loaded.origins] == ["text 0", "text 1", "text 3"]


def test_extract_in_two_processes_survives_a_kill(pictures, uninterrupted, tmp_path):
    out = tmp_path / "out"
    ranks = [{"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
    both = [
        start(pictures, out, 0, 0, **ranks[0]),
        start(pictures, out, signal.SIGKILL, 9, **ranks[1]),
    ]
    told = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, -signal.SIGKILL], told
    assert "process 1 of 2" in told[0] and not (out / "metadata.json").exists()
    again = start(pictures, out, 0, 0, **ranks[1])
    again.communicate()
    assert again.returncode == 0 and same(out, uninterrupted)


def test_process_reads_the_variables_of_launchers():
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert shards_lib.process(torchrun) == (shards_lib.Process(5, 8), 1)
    step = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "3"}
    assert shards_lib.process(step) == (shards_lib.Process(3, 4), 3)
    batch_script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert shards_lib.process(batch_script) == (shards_lib.Process(0, 1), 0)
    with pytest.raises(checks.InputError, match=r"environment .*RANK=8"):
        shards_lib.process({"RANK": "8", "WORLD_SIZE": "8"})


def test_extract_reads_pictures_in_processes(pictures, tmp_path, uninterrupted):
    # Toy.prepare can be pickled, and its counters stay in the other process.
    encoder = toy_encoders.Toy()
    run(pictures, tmp_path / "out", shard_size=6, encoder=encoder, processes=1)
    assert same(tmp_path / "out", uninterrupted)
    assert encoder.prepared == 0 and encoder.embedded == 60


READ_IN_PROCESS = """
import os
from sotalign_jax.search import items, reading
# The content of this link is the number of the process that reads it.
with reading.Reader("image", os.readlink, workers=1, processes=1) as reader:
    (read,) = reader.read([items.Item("link", "link", "/proc/self")], batch=1)
    print(read.content, flush=True)
    input()
"""


def test_reader_processes_end_after_a_kill_of_the_reader():
    command = [sys.executable, "-c", READ_IN_PROCESS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as reader:
        process = os.pidfd_open(int(reader.stdout.readline()))
        assert select.select([process], [], [], 0)[0] == []  # still runs
        reader.kill()
    ended, _, _ = select.select([process], [], [], 60)  # readable once it has ended
    os.close(process)
    assert ended == [process]


def test_reader_reports_a_killed_process():
    link = items.Item("link", "link", "/proc/self")
    with reading.Reader("image", os.readlink, workers=1, processes=1) as reader:
        (read,) = reader.read([link], batch=1)
        os.kill(int(read.content), signal.SIGKILL)
        with pytest.raises(ChildProcessError, match="--processes"):
            list(reader.read([link], batch=1))


def test_reader_raises_errors_of_the_settings_in_processes():
    needed = functools.partial(checks.require, extra="extract")
    absent = items.Item("a", "a", "no_such_package")
    with (
        reading.Reader("audio", needed, workers=1, processes=1) as reader,
        pytest.raises(checks.InputError, match="no_such_package"),
    ):
        list(reader.read([absent], batch=1))


# --- files for experiments.main -----------------------------------------------------------------


def extracted(root, out, **options):
    for modality in ("image", "text"):
        run(root, out / modality, modality=modality, **options)
    return (extraction.load(out / modality) for modality in ("image", "text"))


def smoke_run(folder, arrays, x, y):
    extraction.write(folder, arrays, x, y)
    config = files_config.get_config(f"smoke,from={folder}")
    changes = {"runs": {}, "method": "cca", "data.n_pairs": 20}
    (one,) = spec.expand(config.change(changes)).values()
    return one


def test_join_split_writes_files_for_training(pictures, tmp_path):
    x, y = extracted(pictures, tmp_path)
    one = smoke_run(tmp_path / "files", extraction.join("split", x, y, val=0.2), x, y)
    summary = run_lib.load_dataset(one).summary()
    assert summary["test_x"] == [12, 64] and summary["pairs_x"] == [20, 64]
    assert "test/mean/R@1" in run_lib.run(one, tmp_path / "run")


def write_food(root):
    """Writes a tree like Food-101's, with five classes of one colour each."""
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


def test_join_zero_shot_writes_evaluable_task(pictures, tmp_path):
    food = datasets.open_dataset("food101", write_food(tmp_path / "food"))
    for modality in ("image", "text"):
        extraction.extract(food, toy_encoders.Toy(modality), tmp_path / "food" / modality, data={})
    x, y = (extraction.load(tmp_path / "food" / modality) for modality in ("image", "text"))
    task = extraction.join("zero_shot", x, y)
    assert task["zero_shot_prompts"].shape == (5, 1, 64)
    assert task["zero_shot_labels"].tolist() == [0, 1, 2, 3, 4] * 3
    prompt = toy_encoders.Toy("text").embed(["a photo of carrot cake, a type of food."])[0]
    np.testing.assert_allclose(task["zero_shot_prompts"][2, 0], prompt, atol=1e-3)

    a, b = extracted(pictures, tmp_path)
    one = smoke_run(tmp_path / "files", extraction.join("train", a, b) | task, a, b)
    results = run_lib.run(one, tmp_path / "run")
    assert {"test/zero_shot/top1", "test/zero_shot/mean_per_class"} <= results.keys()

    broken = y._replace(origins=y.origins[:-1])
    with pytest.raises(checks.InputError, match=r"zero_shot .*prompts"):
        extraction.join("zero_shot", x, broken)
    with pytest.raises(checks.InputError, match=r"zero_shot "):
        extraction.join("zero_shot", a, b)


def embeddings(origins, rows=None):
    rows = np.arange(len(origins), dtype=float)[:, None] + 1 if rows is None else rows
    return extraction.Embeddings(rows, [extraction.Row(*o) for o in origins], {"encoder": {}})


def test_match_pairs_captions_with_their_pictures():
    x = embeddings([("p", "p"), ("lonely", "lonely"), ("q", "q")])
    y = embeddings([("q#0", "q"), ("p#0", "p"), ("gone#0", "gone"), ("q#1", "q")])
    found = [rows.tolist() for rows in extraction.match(x, y)]
    assert found == [[0, 2], [0, 1, 3], [1, 0, 1]]
    with pytest.raises(checks.InputError, match=r"x .*'q'"):
        extraction.match(y, x)
    with pytest.raises(checks.InputError, match=r"y .*'z'"):
        extraction.match(x, embeddings([("z#0", "z")]))


def test_join_puts_rows_without_partner_into_pools():
    x = embeddings([("p", "p"), ("lonely", "lonely"), ("q", "q")])
    y = embeddings([("q#0", "q"), ("p#0", "p"), ("gone#0", "gone"), ("q#1", "q")])
    rows = {name: array.chosen.tolist() for name, array in extraction.join("train", x, y).items()}
    assert rows == {"x": [2, 0, 2], "y": [0, 1, 3], "unpaired_x": [1], "unpaired_y": [2]}
    split = extraction.join("split", x, y, val=0.0, test=0.5)
    assert split["unpaired_x"].chosen.tolist() == [1] and len(split["test_x"].chosen) == 1
    paired = extraction.join("train", x._replace(rows=x.rows[::2], origins=x.origins[::2]), y)
    assert "unpaired_x" not in paired and "unpaired_y" in paired


def test_join_split_keeps_captions_with_their_picture():
    x = embeddings([(f"{n}", f"{n}") for n in range(50)])
    y = embeddings([(f"{n}#{k}", f"{n}") for n in range(50) for k in range(1 + n % 3)])
    arrays = extraction.join("split", x, y, val=0.2, test=0.3, seed=1)
    assert len(arrays["val_x"].chosen) == 10 and len(arrays["test_x"].chosen) == 15
    seen = [set(arrays[f"{name}x"].chosen.tolist()) for name in ("", "val_", "test_")]
    assert sum(map(len, seen)) == len(set.union(*seen)) == 50
    for name in ("val", "test"):
        owner = arrays[f"{name}_x"].chosen[arrays[f"{name}_x_of_y"]]
        told = [int(y.origins[row].group) for row in arrays[f"{name}_y"].chosen]
        assert owner.tolist() == told
    told = [int(y.origins[row].group) for row in arrays["y"].chosen]
    assert arrays["x"].chosen.tolist() == told
    with pytest.raises(checks.InputError, match=r"val and test .*0\.5"):
        extraction.join("split", x, y, val=0.5, test=0.5)


def test_join_split_keeps_equal_pictures_and_captions_together():
    rng = np.random.default_rng(0)
    x = embeddings([(f"{n}", f"{n}") for n in range(60)], rng.normal(size=(60, 4)))
    y = embeddings([(f"{n}#0", f"{n}") for n in range(60)], rng.normal(size=(60, 3)))
    x.rows[30:40], y.rows[40:50] = x.rows[:10], y.rows[10:20]  # copies of pictures and of captions
    for seed in range(3):
        arrays = extraction.join("split", x, y, val=0.2, test=0.3, seed=seed)
        parts = [set(arrays[f"{name}x"].chosen.tolist()) for name in ("", "val_", "test_")]
        assert [len(part) for part in parts] == [30, 12, 18]
        for first, second in [(n, n + 30) for n in range(20)]:
            assert sum({first, second} <= part for part in parts) == 1


def test_extract_progress_counts_only_embedded_rows(tmp_path, monkeypatch):
    folder = write_pictures(tmp_path / "pictures", 20)
    for n in range(10):
        (folder / f"{n:03d}.txt").unlink()
    counted = []

    class Bar(progress.Progress):
        def advance(self, count=1, *, skipped=0, **shown):
            counted.append((count, skipped))
            super().advance(count, skipped=skipped, **shown)

    monkeypatch.setattr(extraction, "Progress", Bar)
    assert run(folder, tmp_path / "out", modality="text")["skipped"] == 10
    assert [sum(column) for column in zip(*counted, strict=True)] == [20, 10]


def test_write_rejects_files_of_other_encoders(tmp_path):
    x, y = embeddings([("a", "a")]), embeddings([("a#0", "a")])
    extraction.write(tmp_path, {}, x, y)
    extraction.write(tmp_path, {}, x, y)
    other = y._replace(metadata={"encoder": {"name": "other"}})
    with pytest.raises(checks.InputError, match=r"workdir .*encoders.json"):
        extraction.write(tmp_path, {}, x, other)


# --- the command line ---------------------------------------------------------------------------


def start_command(module, options, folder):
    """Runs a command whose flags cannot be defined beside those of other commands."""
    return subprocess.run(
        [sys.executable, "-m", f"sotalign_jax.{module}", *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_extract_rejects_bad_options_in_one_line(tmp_path):
    options = ["--encoder=bert", "--data=mnist", "--root=/tmp", "--workdir=o"]
    process = start_command("extract", options, tmp_path)
    assert process.returncode == 1 and process.stdout == "", process.stderr
    assert process.stderr.startswith("error: ") and process.stderr.count("\n") == 1
    assert "data" in process.stderr and os.listdir(tmp_path) == []


@pytest.mark.parametrize(("module", "argument"), [(search, "query"), (serve, "images")])
def test_commands_reject_missing_options_in_one_line(module, argument, capsys):
    out, error = small_runs.start(module, ["--model=m"], capsys)
    assert out == "" and small_runs.is_one_line(error) and argument in error


def assert_lists(shown, name, listed):
    assert [word for word in listed if word not in shown] == []
    assert shown.count(f"python -m {name} --") == 2
    assert "--process_id" not in shown  # a flag of another command


@pytest.mark.parametrize(
    ("module", "listed"),
    [
        ("extract", ("--encoder", "all-minilm-l6-v2", "st:NAME", "--data", "coco")),
        ("pair", ("--x", "--part", "zero_shot")),
    ],
)
def test_help_of_own_process_lists_flags_choices_and_two_examples(module, listed, tmp_path):
    process = start_command(module, ["--help"], tmp_path)
    assert process.returncode == 0 and process.stderr == ""
    assert_lists(process.stdout, f"sotalign_jax.{module}", listed)


@pytest.mark.parametrize(
    ("module", "listed"),
    [
        (search, ("--model", "--y_encoder", "all-minilm-l6-v2", "--index")),
        (serve, ("--model", "--y_encoder", "all-minilm-l6-v2", "--port")),
    ],
)
def test_help_lists_flags_choices_and_two_examples(module, listed, capsys):
    out, error = small_runs.start(module, ["--help"], capsys)
    assert error is None and small_runs.said == ""
    assert_lists(out, module.__name__.removesuffix(".__main__"), listed)


def test_pair_prints_config_that_training_reads(pictures, tmp_path):
    captions = tmp_path / "captions.csv"
    captions.write_text("file,caption\n000.png,one\n001.png,two\n")
    extracted(pictures, tmp_path / "few", captions=captions)
    few = [f"--{name}={tmp_path / 'few' / place}" for name, place in
           (("x", "image"), ("y", "text"), ("workdir", "files"))]  # fmt: skip
    process = start_command("pair", few, tmp_path)
    assert process.returncode == 1 and "error: x and y " in process.stderr
    assert not (tmp_path / "few" / "files").exists()
    rows = [f"{n:03d}.png,picture {n}" for n in range(20)] + ["gone.png,a text alone"]
    captions.write_text("\n".join(["file,caption", *rows]))
    x, y = extracted(pictures, tmp_path, captions=captions)
    options = [f"--{name}={tmp_path / place}" for name, place in
               (("x", "image"), ("y", "text"), ("workdir", "files"))]  # fmt: skip
    process = start_command("pair", [*options, "--part=train"], tmp_path)
    assert process.returncode == 0, process.stderr
    assert "40 x 64 float16 from unpaired_x.npy" in process.stdout
    assert "1 x 64 float16 from unpaired_y.npy" in process.stdout
    _, _, switch = process.stdout.strip().rpartition("files.py:")
    read = files_config.get_config(switch).data
    files = tmp_path / "files"
    assert read.files.unpaired_y == str(files / "unpaired_y.npy") and read.files.test_x is None
    assert read.n_pairs == 14  # all rows that are not held out are pairs
    (files / "unpaired_y.npy").unlink()
    config = files_config.get_config(switch).change({"runs": {}, "method": "cca"})
    (one,) = spec.expand(config).values()
    shapes = run_lib.load_dataset(one).summary()
    assert shapes["pool_x"] == [40, 64] and shapes["pool_y"] == shapes["pairs_y"] == [14, 64]
    extraction.write(files, {"x": np.zeros((30, 4)), "y": np.zeros((30, 4))}, x, y)
    read = files_config.get_config(switch).data  # pools of the previous table are removed
    assert read.files.unpaired_x is None and read.n_pairs == 21
    with pytest.raises(checks.InputError, match=r"config .*from=.*gone"):
        files_config.get_config(f"from={tmp_path}/gone")
