"""Tests of every dataset adapter on a tiny tree in the dataset's own format."""

import csv
import io
import itertools
import json
import pathlib
import pickle
import tarfile

import hostile_requests
import numpy as np
import PIL.Image
import pytest
import scipy.io

from sotalign_jax import checks
from sotalign_jax.search import datasets, items


def colour(n: int) -> tuple[int, int, int]:
    """Returns the n-th colour. Colours are far apart, so that JPEG keeps them distinct."""
    return (40 * n % 256, 90 * n % 256, 150 * n % 256)


def write_picture(path, n, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.new("RGB", (8, 6), colour(n)).save(path, **options)


def read(source, modality):
    """Returns ids, contents and groups of all items."""
    items = list(source.items[modality]())
    again = list(source.items[modality]())
    assert [(i.id, i.group) for i in items] == [
        (i.id, i.group) for i in again
    ]  # a second iteration starts over
    return [i.id for i in items], [i.load() for i in items], [i.group for i in items]


def shows(image, n) -> bool:
    middle = np.asarray(image.convert("RGB"))[2, 3].astype(int)
    return np.abs(middle - colour(n)).max() <= 6


def prompts_of(source):
    ids, texts, groups = read(source, "text")
    return dict(zip(ids, zip(texts, groups, strict=True), strict=True))


# --- folders and captions -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_folder_reads_caption_file_and_split(tmp_path, kind):
    for n, name in enumerate(["b.png", "a/c.jpg", "a/lonely.webp"]):
        write_picture(tmp_path / "pictures" / name, n)
    (tmp_path / "pictures" / "notes.md").write_text("no picture")
    rows = [("b.png", "A bee.", "train"), ("a/c.jpg", "A cat, asleep.", "test"),
            ("b.png", "Ein Käfer.", "train"), ("gone.jpg", "Lost.", "test")]  # fmt: skip
    captions = tmp_path / f"captions.{kind}"
    with captions.open("w", encoding="utf-8", newline="") as file:
        if kind == "csv":
            csv.writer(file).writerows([("file", "caption", "split"), *rows])
        else:
            for row in rows:
                record = dict(zip(("image", "text", "split"), row, strict=True))
                file.write(json.dumps(record) + "\n")
    source = datasets.open_dataset("folder", tmp_path / "pictures", captions=captions)

    images = list(source.items["image"]())
    assert [item.id for item in images] == ["b.png", "a/c.jpg", "gone.jpg", "a/lonely.webp"]
    assert shows(images[0].load(), 0) and shows(images[1].load(), 1) and shows(images[3].load(), 2)
    with pytest.raises(FileNotFoundError):
        images[2].load()
    texts = list(source.items["text"]())
    assert [(t.id, t.group) for t in texts] == [
        ("b.png#0", "b.png"),
        ("b.png#1", "b.png"),
        ("a/c.jpg#0", "a/c.jpg"),
        ("gone.jpg#0", "gone.jpg"),
    ]
    assert [t.load() for t in texts[:3]] == ["A bee.", "Ein Käfer.", "A cat, asleep."]

    part = datasets.open_dataset("folder", tmp_path / "pictures", split="test", captions=captions)
    assert read(part, "text") == (["a/c.jpg#0", "gone.jpg#0"], ["A cat, asleep.", "Lost."],
                                  ["a/c.jpg", "gone.jpg"])  # fmt: skip
    assert [item.id for item in part.items["image"]()] == ["a/c.jpg", "gone.jpg"]


def test_folder_reads_text_file_beside_each_picture(tmp_path):
    for n in range(3):
        write_picture(tmp_path / f"{n}.png", n)
    (tmp_path / "0.txt").write_text("A zero.\nde.utf8=Eine Null.\n")
    (tmp_path / "1.txt").write_text("")
    ids, _, groups = read(datasets.open_dataset("folder", tmp_path), "image")
    assert ids == groups == ["0.png", "1.png", "2.png"]
    texts = list(datasets.open_dataset("folder", tmp_path).items["text"]())
    assert (texts[0].load(), texts[0].group) == ("A zero.", "0.png")
    assert texts[1].load() == ""
    with pytest.raises(FileNotFoundError):
        texts[2].load()


def test_folder_applies_exif_orientation(tmp_path):
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees to show it upright
    PIL.Image.new("RGB", (8, 6)).save(tmp_path / "phone.jpg", exif=exif)
    _, (image,), _ = read(datasets.open_dataset("folder", tmp_path), "image")
    assert image.size == (6, 8)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("c.tsv", "file\tcaption\n", "c.tsv"),
        ("c.csv", "file,caption\n", "c.csv"),
        ("c.csv", "name,caption\nb.png,A bee.\n", "'file'"),
        ("c.csv", "file,words\nb.png,A bee.\n", "'caption'"),
        ("c.jsonl", '{"file": "b.png", "caption": "A bee."}\n{"file": "b.png"\n', "line 2"),
        ("c.jsonl", '["b.png", "A bee."]\n', "line 1 is not a JSON object"),
        ("c.csv", 'file,caption\nb.png,A bee.\nb.png,"A bee.\nb.png,Two.\n', "after line 2"),
        ("c.csv", "file,caption\nb.png,Un \udce9t\udce9.\n", "not UTF-8"),
        ("c.csv", "file,caption\nz.png,A zebra.\n", "'z.png'; .*--root"),
        ("c.csv", "file,caption\nb,A bee.\n", "did you mean 'b.png'"),
        ("c.csv", "file,caption\nc.png,A cat.\n", "did you mean 'sub/c.png'"),
        ("c.csv", "file,caption\n/elsewhere/b.png,A bee.\n", "did you mean 'b.png'"),
    ],
)
def test_folder_rejects_bad_caption_files(tmp_path, name, content, named):
    write_picture(tmp_path / "b.png", 0)
    write_picture(tmp_path / "sub" / "c.png", 0)
    (tmp_path / name).write_text(content, errors="surrogateescape")
    with pytest.raises(checks.InputError, match=rf"captions .*{named}") as caught:
        datasets.open_dataset("folder", tmp_path, captions=tmp_path / name)
    assert "\n" not in str(caught.value)


def test_folder_accepts_absolute_caption_paths_below_the_root(tmp_path, capsys):
    write_picture(tmp_path / "sub" / "b.png", 0)
    (tmp_path / "link").symlink_to(tmp_path / "sub")
    rows = [f"{tmp_path}/sub/b.png,A bee.", "b.png,Two.", "gone.png,Lost."]
    (tmp_path / "c.csv").write_text("\n".join(["file,caption", *rows]))
    for root in ("sub", "link"):
        source = datasets.open_dataset("folder", tmp_path / root, captions=tmp_path / "c.csv")
        assert read(source, "text")[2] == ["b.png", "b.png", "gone.png"]
        assert "1 of 2 captioned files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "row"),
    [
        ("c.csv", "file,caption\nb.png,A bee.\n../outside.png,Out.\n", 3),
        ("c.csv", "file,caption\nb.png,A bee.\nsub/../../outside.png,Out.\n", 3),
        ("c.jsonl", '{"file": "ABSOLUTE/outside.png", "caption": "Out."}\n', 1),
    ],
)
def test_folder_rejects_captions_of_files_outside_of_it(tmp_path, name, content, row):
    write_picture(tmp_path / "pictures" / "b.png", 0)
    write_picture(tmp_path / "outside.png", 1)
    (tmp_path / name).write_text(content.replace("ABSOLUTE", str(tmp_path)))
    with pytest.raises(checks.InputError, match=rf"captions row {row} .*outside.png") as caught:
        datasets.open_dataset("folder", tmp_path / "pictures", captions=tmp_path / name)
    assert "\n" not in str(caught.value)


# --- pictures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "gif", "bmp", "tif"])
def test_picture_reads_usual_formats(tmp_path, suffix):
    write_picture(tmp_path / f"a.{suffix}", 1)
    assert shows(items.picture(tmp_path / f"a.{suffix}"), 1)
    assert shows(items.picture((tmp_path / f"a.{suffix}").read_bytes()), 1)


def test_picture_refuses_formats_that_start_other_programs(tmp_path):
    (tmp_path / "a.jpg").write_bytes(hostile_requests.eps())
    for file in (tmp_path / "a.jpg", hostile_requests.eps()):
        with pytest.raises(PIL.UnidentifiedImageError, match="not a picture of a known") as caught:
            items.picture(file)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["jpg", "png", "gif"])
def test_picture_reads_large_pictures_at_a_smaller_size(tmp_path, suffix):
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees to show it upright
    PIL.Image.new("L", (4000, 2500), 77).save(tmp_path / f"a.{suffix}", exif=exif)
    image = items.picture(tmp_path / f"a.{suffix}")
    assert image.size == (2000, 1250)
    assert abs(np.asarray(image.convert("L")).astype(int) - 77).max() <= 1
    if suffix != "gif":  # GIF files have no EXIF data
        assert items.oriented(tmp_path / f"a.{suffix}").size == (1250, 2000)
    PIL.Image.new("L", (3000, 2500), 77).save(tmp_path / f"b.{suffix}")
    assert items.picture(tmp_path / f"b.{suffix}").size == (3000, 2500)


def test_picture_averages_transparent_pixels_of_a_palette(tmp_path):
    pixels = np.tile(np.uint8([[0, 1], [1, 0]]), (1500, 1500))
    image = PIL.Image.fromarray(pixels)
    image.putpalette([200, 0, 0, 0, 0, 200])
    image.save(tmp_path / "a.png", transparency=0)
    found = np.asarray(items.picture(tmp_path / "a.png")).astype(int)
    assert found.shape == (1500, 1500, 4)
    assert abs(found - [0, 0, 200, 128]).max() <= 1  # the transparent red has no weight


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        ((11_000, 10_000), "11,000 x 10,000 .* 100 million .*; make"),
        ((30_000, 30_000), "178 million pixels; make"),
        ((30_000, 1), "256 times .*; crop"),
    ],
)
def test_picture_rejects_bombs_before_it_decodes_them(tmp_path, size, problem):
    (tmp_path / "huge.png").write_bytes(hostile_requests.png(*size, complete=False))
    with pytest.raises(OSError, match=f"huge.png has .*{problem}"):
        items.picture(tmp_path / "huge.png")


def test_folder_split_requires_a_split_column(tmp_path):
    (tmp_path / "c.csv").write_text("file,caption\nb.png,A bee.\n")
    with pytest.raises(checks.InputError, match=r"split .*'test'"):
        datasets.open_dataset("folder", tmp_path, split="test", captions=tmp_path / "c.csv")


# --- tar shards ---------------------------------------------------------------------------------


def write_tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def jpeg(n):
    file = io.BytesIO()
    PIL.Image.new("RGB", (8, 6), colour(n)).save(file, "JPEG")
    return file.getvalue()


@pytest.fixture
def shards(tmp_path):
    """Writes tars like CC3M's, with equal keys, a caption in the json and a missing one."""
    first = [("000.jpg", jpeg(0)), ("000.json", b'{"caption": "zero"}'), ("000.txt", b"zero"),
             ("001.jpg", jpeg(1)), ("001.json", b'{"caption": "one", "url": "u"}')]  # fmt: skip
    second = [("sub/000.1.png", b"broken"), ("sub/000.txt", b"two"), ("sub/001.jpg", jpeg(3))]
    write_tar(tmp_path / "cc3m-train-0000.tar", first)
    write_tar(tmp_path / "cc3m-train-0001.tar", second)
    write_tar(tmp_path / "cc3m-validation-0000.tar", first[:3])
    return tmp_path


def test_webdataset_reads_shards_of_a_split(shards):
    source = datasets.open_dataset("webdataset", shards, split="train")
    images, texts = (list(source.items[name]()) for name in ("image", "text"))
    names = ["cc3m-train-0000/000", "cc3m-train-0000/001", "cc3m-train-0001/sub/000",
             "cc3m-train-0001/sub/001"]  # fmt: skip
    assert [i.id for i in images] == [t.group for t in texts] == names
    assert shows(images[0].load(), 0) and shows(images[1].load(), 1) and shows(images[3].load(), 3)
    with pytest.raises(PIL.UnidentifiedImageError):
        images[2].load()
    assert [t.load() for t in texts] == ["zero", "one", "two", ""]  # extraction skips empty texts
    assert len(list(datasets.open_dataset("webdataset", shards).items["image"]())) == 5
    with pytest.raises(checks.InputError, match=r"root .*'test'"):
        datasets.open_dataset("webdataset", shards, split="test")


def test_webdataset_reads_other_captions_by_address(shards, tmp_path):
    captions = tmp_path / "dreamlip.csv"
    captions.write_text("Image Path,raw_caption,shortSV_captions\nu,one,A synthetic one.\n")
    options = {"split": "train", "captions": captions, "column": "shortSV_captions"}
    texts = list(datasets.open_dataset("webdataset", shards, **options).items["text"]())
    assert texts[1].load() == "A synthetic one."
    with pytest.raises(ValueError, match="captions has no row"):  # extraction lists it as skipped
        texts[0].load()
    options["column"] = "longSV_captions"
    with pytest.raises(checks.InputError, match=r"captions .*'longSV_captions'"):
        next(datasets.open_dataset("webdataset", shards, **options).items["text"]())
    inside = datasets.open_dataset("webdataset", shards, split="train", column="url")
    assert [text.load() for text in inside.items["text"]()][:2] == ["", "u"]


@pytest.mark.parametrize("cut", [1600, 2100, 2700])
def test_webdataset_reads_intact_members_of_truncated_tar(shards, cut):
    path = shards / "cc3m-train-0000.tar"
    path.write_bytes(path.read_bytes()[:cut])
    source = datasets.open_dataset("webdataset", shards, split="train")
    images = list(source.items["image"]())
    assert shows(images[0].load(), 0)
    told = [item for item in images if item.id == "cc3m-train-0000/"]
    with pytest.raises(ValueError, match=r"cc3m-train-0000.tar"):
        told[0].load()
    assert images[-1].id == "cc3m-train-0001/sub/001" and shows(images[-1].load(), 3)


def test_webdataset_rejects_a_tar_that_is_no_regular_file(shards):
    (shards / "cc3m-train-0002.tar").symlink_to("/dev/null")
    with pytest.raises(checks.InputError, match=r"root .*0002.tar.*; remove"):
        datasets.open_dataset("webdataset", shards, split="train")


# --- several captions per picture ---------------------------------------------------------------


def test_coco_reads_2017_annotations(tmp_path):
    table = {
        "images": [{"id": 9, "file_name": "9.jpg"}, {"id": 4, "file_name": "4.jpg"}],
        "annotations": [
            {"id": 100 + n, "image_id": 9 if n % 2 else 4, "caption": f"caption {n}"}
            for n in range(12)
        ],
    }
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "captions_val2017.json").write_text(json.dumps(table))
    for n in (4, 9):
        write_picture(tmp_path / "val2017" / f"{n}.jpg", n)
    source = datasets.open_dataset("coco", tmp_path)
    ids, images, groups = read(source, "image")
    assert ids == groups == ["4", "9"] and shows(images[0], 4) and shows(images[1], 9)
    ids, texts, groups = read(source, "text")
    assert groups == ["4"] * 5 + ["9"] * 5  # six captions each, of which five are scored
    assert texts[:2] == ["caption 0", "caption 2"] and ids[5] == "101"
    with pytest.raises(checks.InputError, match=r"root .*captions_train2017.json"):
        datasets.open_dataset("coco", tmp_path, split="train2017")


def karpathy(records):
    return json.dumps({"images": records, "dataset": "tiny"})


def sentences(n):
    return [{"raw": f"caption {n}.{k}", "tokens": [], "sentid": 10 * n + k} for k in range(6)]


@pytest.mark.parametrize("name", ["../secret.jpg", "/secret.jpg"])
def test_coco_rejects_file_names_outside_of_the_root(tmp_path, name):
    (tmp_path / "annotations").mkdir()
    table = {"images": [{"id": 1, "file_name": name}], "annotations": []}
    (tmp_path / "annotations" / "captions_val2017.json").write_text(json.dumps(table))
    source = datasets.open_dataset("coco", tmp_path)
    with pytest.raises(checks.InputError, match=r"root .*secret.jpg"):
        list(source.items["image"]())


def test_coco_reads_karpathy_splits(tmp_path):
    parts = ["test", "train", "restval", "val"]
    records = [
        {"filepath": "val2014", "filename": f"{n}.jpg", "cocoid": 70 + n, "split": part,
         "imgid": n, "sentences": sentences(n)}
        for n, part in enumerate(parts)
    ]  # fmt: skip
    (tmp_path / "dataset_coco.json").write_text(karpathy(records))
    for n in range(4):
        write_picture(tmp_path / "val2014" / f"{n}.jpg", n)
    source = datasets.open_dataset("coco", tmp_path, split="karpathy-test")
    ids, images, _ = read(source, "image")
    assert ids == ["70"] and shows(images[0], 0)
    ids, texts, groups = read(source, "text")
    assert len(texts) == 5 and set(groups) == {"70"} and texts[4] == "caption 0.4"
    train = datasets.open_dataset("coco", tmp_path, split="karpathy-train")
    assert read(train, "image")[0] == ["71", "72"]
    with pytest.raises(checks.InputError, match=r"split.* 'dev'"):
        datasets.open_dataset("coco", tmp_path, split="karpathy-dev")


def test_flickr30k_reads_test_split(tmp_path):
    records = [
        {"filename": f"{n}.jpg", "split": "test" if n else "train", "sentences": sentences(n)[:5]}
        for n in range(3)
    ]
    (tmp_path / "dataset_flickr30k.json").write_text(karpathy(records))
    for n in range(3):
        write_picture(tmp_path / "flickr30k-images" / f"{n}.jpg", n)
    source = datasets.open_dataset("flickr30k", tmp_path)
    ids, images, _ = read(source, "image")
    assert ids == ["1.jpg", "2.jpg"] and shows(images[1], 2)
    assert read(source, "text")[2] == ["1.jpg"] * 5 + ["2.jpg"] * 5


# --- classification -----------------------------------------------------------------------------

SYNSETS = [f"n{n:08d}" for n in range(1000)]


def test_imagenet_reads_class_folders(tmp_path):
    for synset in SYNSETS:
        (tmp_path / "val" / synset).mkdir(parents=True)
    write_picture(tmp_path / "val" / SYNSETS[1] / "ILSVRC2012_val_00000007.JPEG", 1)
    write_picture(tmp_path / "val" / SYNSETS[0] / "ILSVRC2012_val_00000009.JPEG", 2)
    source = datasets.open_dataset("imagenet", tmp_path)
    ids, images, groups = read(source, "image")
    assert groups == ["0", "1"] and ids[1].endswith("00000007.JPEG") and shows(images[0], 2)
    prompts = prompts_of(source)
    assert len(prompts) == 80_000 and prompts["1/0"] == ("a bad photo of a goldfish.", "1")
    (tmp_path / "val" / SYNSETS[5]).rmdir()
    with pytest.raises(checks.InputError, match=r"root .*999"):
        datasets.open_dataset("imagenet", tmp_path)


def test_imagenet_reads_kaggle_layout(tmp_path):
    mapping = "".join(f"{synset} some name\n" for synset in SYNSETS)
    (tmp_path / "LOC_synset_mapping.txt").write_text(mapping)
    (tmp_path / "LOC_val_solution.csv").write_text(
        f"ImageId,PredictionString\nILSVRC2012_val_00000002,{SYNSETS[7]} 1 2 3 4 \n"
        f"ILSVRC2012_val_00000001,{SYNSETS[3]} 1 2 3 4 {SYNSETS[3]} 5 6 7 8 \n"
    )
    folder = tmp_path / "ILSVRC" / "Data" / "CLS-LOC"
    write_picture(folder / "val" / "ILSVRC2012_val_00000001.JPEG", 1)
    write_picture(folder / "val" / "ILSVRC2012_val_00000002.JPEG", 2)
    write_picture(folder / "train" / SYNSETS[9] / "n_1.JPEG", 3)
    _, images, groups = read(datasets.open_dataset("imagenet", tmp_path), "image")
    assert groups == ["3", "7"] and shows(images[1], 2)
    _, images, groups = read(datasets.open_dataset("imagenet", tmp_path, split="train"), "image")
    assert groups == ["9"] and shows(images[0], 3)


def test_food101_reads_pictures_and_prompts(tmp_path):
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "classes.txt").write_text("apple_pie\nbaby_back_ribs\n")
    (tmp_path / "meta" / "test.txt").write_text("baby_back_ribs/22\napple_pie/11\n")
    write_picture(tmp_path / "images" / "apple_pie" / "11.jpg", 1)
    write_picture(tmp_path / "images" / "baby_back_ribs" / "22.jpg", 2)
    source = datasets.open_dataset("food101", tmp_path)
    ids, images, groups = read(source, "image")
    assert ids == ["baby_back_ribs/22.jpg", "apple_pie/11.jpg"] and groups == ["1", "0"]
    assert shows(images[0], 2) and source.classes == ("apple pie", "baby back ribs")
    expected = ("a photo of baby back ribs, a type of food.", "1")
    assert prompts_of(source)["1/0"] == expected


def test_dtd_reads_pictures_and_prompts(tmp_path):
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "test1.txt").write_text("dotted/dotted_2.jpg\n")
    write_picture(tmp_path / "images" / "banded" / "banded_1.jpg", 1)
    write_picture(tmp_path / "images" / "dotted" / "dotted_2.jpg", 2)
    source = datasets.open_dataset("dtd", tmp_path)
    ids, images, groups = read(source, "image")
    assert (ids, groups) == (["dotted/dotted_2.jpg"], ["1"]) and shows(images[0], 2)
    assert len(prompts_of(source)) == 2 * 8
    assert prompts_of(source)["1/0"][0] == "a photo of a dotted texture."


def test_flowers_reads_pictures_and_prompts(tmp_path):
    scipy.io.savemat(tmp_path / "imagelabels.mat", {"labels": np.array([[77, 1, 102]], np.uint8)})
    ids = {"trnid": [[1]], "valid": [[2]], "tstid": [[3, 2]]}
    scipy.io.savemat(tmp_path / "setid.mat", {k: np.array(v, np.uint16) for k, v in ids.items()})
    for n in (1, 2, 3):
        write_picture(tmp_path / "jpg" / f"image_{n:05d}.jpg", n)
    source = datasets.open_dataset("flowers", tmp_path)
    names, images, groups = read(source, "image")
    assert names == ["image_00003.jpg", "image_00002.jpg"] and groups == ["101", "0"]
    assert shows(images[0], 3) and len(source.classes) == 102
    assert prompts_of(source)["0/0"][0] == "a photo of a pink primrose, a type of flower."


def test_aircraft_reads_pictures_and_prompts(tmp_path):
    data = tmp_path / "data"
    write_picture(data / "images" / "0034309.jpg", 1)
    write_picture(data / "images" / "1340192.jpg", 2)
    (data / "variants.txt").write_text("707-320\nBoeing 717\n")
    listed = "0034309 Boeing 717\n1340192 707-320\n"
    (data / "images_variant_test.txt").write_text(listed)
    source = datasets.open_dataset("aircraft", tmp_path)
    ids, images, groups = read(source, "image")
    assert ids == ["0034309.jpg", "1340192.jpg"] and groups == ["1", "0"] and shows(images[0], 1)
    expected = "a photo of the Boeing 717, a type of aircraft."
    assert prompts_of(source)["1/1"][0] == expected


def write_cifar(path, *pictures):
    """Writes pictures (labels, colour number): labels, then the red, green and blue planes."""
    planes = ([*labels, *np.repeat(colour(n), 1024)] for labels, n in pictures)
    path.write_bytes(bytes(itertools.chain.from_iterable(planes)))


def test_cifar10_reads_both_splits(tmp_path):
    (tmp_path / "batches.meta.txt").write_text("airplane\nautomobile\nbird\n\n")
    write_cifar(tmp_path / "test_batch.bin", ([2], 1), ([0], 2))
    for n in range(1, 6):
        write_cifar(tmp_path / f"data_batch_{n}.bin", ([n % 3], n))
    source = datasets.open_dataset("cifar10", tmp_path)
    ids, images, groups = read(source, "image")
    assert ids == ["test_batch.bin/0", "test_batch.bin/1"] and groups == ["2", "0"]
    assert images[0].size == (32, 32) and shows(images[0], 1) and shows(images[1], 2)
    assert len(prompts_of(source)) == 3 * 18
    _, images, groups = read(datasets.open_dataset("cifar10", tmp_path, split="train"), "image")
    assert groups == ["1", "2", "0", "1", "2"] and shows(images[4], 5)


def test_cifar100_reads_fine_labels_and_names_truncated_file(tmp_path):
    (tmp_path / "fine_label_names.txt").write_text("apple\naquarium_fish\n")
    write_cifar(tmp_path / "test.bin", ([0, 1], 3))
    source = datasets.open_dataset("cifar100", tmp_path)
    _, images, groups = read(source, "image")
    assert groups == ["1"] and shows(images[0], 3)
    assert prompts_of(source)["1/0"][0] == "a photo of a aquarium fish."
    (tmp_path / "test.bin").write_bytes(bytes(3000))
    with pytest.raises(checks.InputError, match=r"root .*test.bin is cut short"):
        next(source.items["image"]())


def test_cifar_reads_the_python_version(tmp_path):
    rows = np.repeat([colour(1), colour(2)], 1024, axis=1).astype(np.uint8)
    files = {"meta": {b"fine_label_names": [b"apple", b"aquarium_fish"]},
             "test": {b"data": rows, b"fine_labels": [1, 0]}}  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_bytes(pickle.dumps(content, protocol=2))
    source = datasets.open_dataset("cifar100", tmp_path)
    ids, images, groups = read(source, "image")
    assert ids == ["test/0", "test/1"] and groups == ["1", "0"] and shows(images[1], 2)
    assert prompts_of(source)["1/0"][0] == "a photo of a aquarium fish."
    (tmp_path / "test").write_bytes(pickle.dumps({b"data": pathlib.Path("x")}))
    with pytest.raises(checks.InputError, match=r"root .*pathlib"):  # code is never run
        next(source.items["image"]())


def test_prompt_templates_are_complete():
    templates = json.loads(datasets.TEMPLATES.read_text())
    sizes = {name: len(listed) for name, listed in templates.items()}
    assert sizes == {"imagenet1k": 80, "food101": 1, "cifar10": 18, "cifar100": 18,
                     "fgvc_aircraft": 2, "dtd": 8, "flowers": 1}  # fmt: skip
    assert all(text.count("{c}") == 1 for listed in templates.values() for text in listed)


# --- others -------------------------------------------------------------------------------------


def test_librispeech_reads_sounds_and_transcripts(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    chapter = tmp_path / "LibriSpeech" / "test-clean" / "61" / "70968"
    chapter.mkdir(parents=True)
    waves = {f"61-70968-000{n}": np.sin(np.arange(800) * (n + 1) / 9) / 2 for n in range(2)}
    lines = [f"{name} HE BEGAN PART {n}\n" for n, name in enumerate(waves)]
    (chapter / "61-70968.trans.txt").write_text("".join(lines))
    for name, wave in waves.items():
        soundfile.write(chapter / f"{name}.flac", wave, 16_000)
    source = datasets.open_dataset("librispeech", tmp_path)
    ids, sounds, groups = read(source, "audio")
    assert ids == groups == list(waves) and sounds[0].rate == 16_000
    np.testing.assert_allclose(sounds[1].wave, waves[ids[1]], atol=1e-4)
    assert read(source, "text") == (ids, ["HE BEGAN PART 0", "HE BEGAN PART 1"], ids)
    with pytest.raises(checks.InputError, match=r"root .*dev-clean"):
        datasets.open_dataset("librispeech", tmp_path, split="dev-clean")
    other = tmp_path / "LibriSpeech" / "test-other" / "9" / "1"
    other.mkdir(parents=True)
    (other / "9-1.trans.txt").write_text("9-1-0000 SHE BEGAN\n")
    both = datasets.open_dataset("librispeech", tmp_path, split="test-other,test-clean")
    assert read(both, "text")[0] == ["9-1-0000", *ids]


def test_wikitext_reads_paragraphs(tmp_path):
    text = (
        " \n = Robert <unk> = \n \n He acts . \n He sings . \n \n = = Career = = \n \n In 2000 . \n"
    )
    (tmp_path / "wiki.valid.raw").write_text(text)
    source = datasets.open_dataset("wikitext", tmp_path, split="val")
    ids, texts, _ = read(source, "text")
    assert texts == ["He acts .", "He sings .", "In 2000 ."] and ids == ["4", "5", "9"]


def test_skyscript_reads_pictures_and_captions(tmp_path):
    rows = [("images2/a.jpg", "a road", "a road, and a pond"), ("images3/b.jpg", "a farm", "")]
    path = tmp_path / "SkyScript_test_30K_filtered_by_CLIP_openai.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("filepath", "title", "title_multi_objects"), *rows])
    write_picture(tmp_path / "images2" / "a.jpg", 1)
    write_picture(tmp_path / "images3" / "b.jpg", 2)
    source = datasets.open_dataset("skyscript", tmp_path)
    ids, images, _ = read(source, "image")
    assert ids == ["images2/a.jpg", "images3/b.jpg"] and shows(images[1], 2)
    assert read(source, "text") == (ids, ["a road, and a pond", ""], ids)
    path.write_text("filepath,title\nimages2/a.jpg,a road\n")
    with pytest.raises(checks.InputError, match=r"captions .*title_multi_objects"):
        datasets.open_dataset("skyscript", tmp_path)


def test_polyvore_reads_parquet_files(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "data").mkdir()
    for part in range(2):
        numbers = range(3 * part, 3 * part + 3)
        columns = {
            "image": [{"bytes": jpeg(n), "path": None} for n in numbers],
            "category": ["Dresses"] * 3,
            "text": [f"dress {n}" if n != 4 else None for n in numbers],
            "item_ID": [f"100_{n}" for n in numbers],
        }
        path = tmp_path / "data" / f"data-0000{part}-of-00002.parquet"
        parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    source = datasets.open_dataset("polyvore", tmp_path)
    ids, images, _ = read(source, "image")
    assert ids == [f"100_{n}" for n in range(6)]
    assert all(shows(image, n) for n, image in enumerate(images))
    texts = list(source.items["text"]())
    assert texts[3].load() == "dress 3"
    with pytest.raises(ValueError, match="is empty"):
        texts[4].load()


def test_open_dataset_rejects_captions_for_coco(tmp_path):
    with pytest.raises(checks.InputError, match=r"captions .*coco"):
        datasets.open_dataset("coco", tmp_path, captions=tmp_path / "c.csv")


def test_open_dataset_rejects_unknown_names_and_missing_roots(tmp_path):
    with pytest.raises(checks.InputError, match=r"data.* 'mnist'"):
        datasets.open_dataset("mnist", tmp_path)
    with pytest.raises(checks.InputError, match=r"root .*gone"):
        datasets.open_dataset("coco", tmp_path / "gone")
    for name in set(datasets.DATASETS) - {"folder", "webdataset", "polyvore"}:
        with pytest.raises(checks.InputError, match=r"root "):
            datasets.open_dataset(name, tmp_path)
