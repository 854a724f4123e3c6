"""Tests of `pictures`, from a folder of pictures to a model."""

import csv

import numpy as np
import PIL.Image
import pytest
import toy_encoders

import sotalign_jax as sota
from sotalign_jax import checks
from sotalign_jax.search import encoders

FAST = {"steps": 3, "recipe": "paper", "method": "sail"}
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 220)}


@pytest.fixture
def toys(monkeypatch):
    """Replaces the encoders by toys, and returns those that were loaded."""
    loaded = []

    def load(name, **_):
        loaded.append(toy_encoders.Toy("text" if "minilm" in name else "image", name=name))
        return loaded[-1]

    monkeypatch.setattr(encoders, "load", load)
    return loaded


@pytest.fixture
def folder(tmp_path, rng):
    """Writes pictures of three colours, and captions for two thirds of them."""
    (tmp_path / "photos").mkdir()
    rows = [("file", "caption")]
    for number in range(18):
        for colour, rgb in COLOURS.items():
            pixels = np.clip(rgb + rng.normal(0, 12, (8, 8, 3)), 0, 255).astype(np.uint8)
            PIL.Image.fromarray(pixels).save(tmp_path / "photos" / f"{colour}{number}.png")
            if number < 12:
                rows.append((f"{colour}{number}.png", f"a {colour} square {number}"))
    with (tmp_path / "captions.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return tmp_path


def test_pictures_trains_saves_and_embeds_once(folder, toys, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    made = sota.pictures(folder / "photos", folder / "captions.csv", **FAST)
    assert {hit.id[:4] for hit in made.search("a blue square 3", k=10)} == {"blue"}
    rows = made.aligner.rows
    assert len(rows["pairs_x"]) == len(set(rows["pairs_x"])) == 29 and len(rows["test_x"]) == 3
    assert not set(rows["pairs_x"]) & set(rows["test_x"])
    assert 0 <= made.aligner.info["results"]["test/y_to_x/R@1"] <= 100
    assert "by chance" in capsys.readouterr().err
    assert [one.embedded for one in toys] == [54, 37]  # the query is a text, too
    assert made.searched.embeddings.folder.is_relative_to(folder / "cache")

    made.save(folder / "saved")
    loaded = sota.Model.load(folder / "saved")
    assert loaded.search("a red square") == made.search("a red square")
    (folder / "photos" / "red99.png").write_bytes((folder / "photos" / "red1.png").read_bytes())
    sota.pictures(folder / "photos", folder / "captions.csv", **FAST)
    assert [one.embedded for one in toys[-2:]] == [1, 0]


def test_pictures_takes_other_captions_and_encoders_in_the_same_cache(folder, toys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    sota.pictures(folder / "photos", folder / "captions.csv", **FAST)
    table = (folder / "captions.csv").read_text()
    (folder / "other.csv").write_text(table.replace("square", "box"))
    sota.pictures(folder / "photos", folder / "other.csv", **FAST)
    assert [one.embedded for one in toys[-2:]] == [0, 36]
    sota.pictures(folder / "photos", folder / "other.csv", text_encoder="minilm", **FAST)
    assert [one.embedded for one in toys[-2:]] == [0, 36]


def test_pictures_rejects_too_few_captions(folder, toys):
    (folder / "few.csv").write_text("file,caption\nred0.png,a red square\n")
    with pytest.raises(checks.InputError, match="captions"):
        sota.pictures(folder / "photos", folder / "few.csv", workdir=folder / "w")
