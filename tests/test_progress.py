"""Tests of progress bars on a terminal, and of plain lines without one."""

import doctest
import io
import itertools
import sys
import time

import numpy as np
import pytest

from sotalign_jax import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_doctests_pass():
    assert doctest.testmod(progress).failed == 0


def test_progress_on_a_terminal_shows_loss_score_and_time(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.Progress(20, "train", initial=5) as bar:
        bar.advance(mean_r1=40.25)
        for _ in range(14):
            bar.advance(loss=np.float32(0.5))
    last = stream.getvalue().rsplit("\r", 1)[-1]
    assert "train" in last and "20/20" in last and "val R@1 40.25, loss 0.5" in last


def test_progress_without_terminal_prints_a_line_every_tenth(capsys):
    with progress.Progress(1000, "train", initial=300, unit="rows", rate=True) as bar:
        for _ in range(700):
            bar.advance(loss=0.125)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 7
    assert lines[0].startswith("train: 400/1000 rows, loss 0.125, ") and " rows/s, " in lines[0]
    assert lines[-1].startswith("train: 1000/1000") and lines[-1].endswith("00:00 left")


def test_progress_excludes_compilation_from_the_time_left(capsys, monkeypatch):
    clock = itertools.chain([1000.0], itertools.count(1001.0))  # the first step returns at 1000 s
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with progress.Progress(10, "train") as bar:
        for _ in range(10):
            bar.advance()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "train: 1/10"  # one step gives no rate yet
    assert lines[1] == "train: 2/10, 00:08 left"  # one step per second


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_progress_nests_an_inner_bar_and_survives_a_closed_stream(monkeypatch, kind):
    stream = kind()
    monkeypatch.setattr(sys, "stderr", stream)
    with (
        progress.Progress(2, "compare", unit="runs") as outer,
        progress.Progress(10, "sail seed 0", inner=True) as inner,
    ):
        inner.stage("compiling (once)")
        inner.advance(10, loss=0.5)
        outer.advance()
        text = stream.getvalue()
        stream.close()  # must not stop the run
        outer.advance()
        outer.stage("still there")
    if kind is Terminal:
        assert "sail seed 0" in text and "runs/s" in text and "compiling (once) ...\n" in text
    else:
        assert text == "compare: 1/2 runs\n"


def test_say_prints_its_own_line_above_an_open_bar(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.Progress(2, "train") as bar:
        progress.say("reading 1,000,000 x 4,096")
        bar.stage("compiling (once)")
    lines = [line.rsplit("\r", 1)[-1] for line in stream.getvalue().split("\n")]
    assert lines[:2] == ["reading 1,000,000 x 4,096", "train: compiling (once) ..."]


def test_progress_is_silent_if_hidden_or_without_stderr(monkeypatch, capsys):
    with progress.Progress(2, "train", show=False) as bar:
        bar.stage("compiling (once)")
        bar.advance(2)
    progress.say("fitting the teacher", show=False)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys, "stderr", None)
    progress.say("fitting the teacher")
