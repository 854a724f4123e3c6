"""Tests of the fuzzers: few problems of each. The commands draw many."""

import fuzz
import fuzz_files
import fuzz_teachers
import pytest


@pytest.mark.slow
@pytest.mark.numerics
def test_fuzz_finds_nothing_in_a_few_hundred_problems():
    """Uses problems of one shape, to limit compilation. The command covers all shapes."""
    problems = [i for i in range(1000) if fuzz.make(7, i).k.shape == fuzz.SHAPES[0]]
    assert len(problems) > 250
    assert not any(report.found for report in fuzz.run(problems, 7).values())


@pytest.mark.slow
def test_fuzz_finds_nothing_in_problems_of_other_shapes():
    problems = [i for i in range(40) if fuzz.make(7, i).k.shape != fuzz.SHAPES[0]]
    shapes = {fuzz.make(7, i).k.shape for i in problems}
    assert len(shapes) > 3
    assert not any(report.found for report in fuzz.run(problems, 7).values())


def test_fuzz_is_deterministic_and_exits_with_one_on_findings(monkeypatch, capsys):
    first, again = fuzz.make(3, 14), fuzz.make(3, 14)
    assert first.name == again.name and first.k.tobytes() == again.k.tobytes()
    monkeypatch.setattr(fuzz, "check", lambda case: fuzz.Report(["wrong"]))
    with pytest.raises(SystemExit) as stopped:
        fuzz.main(["--problems=2", "--seed=3"])
    assert stopped.value.code == 1
    assert "--seed=3 --only=1" in capsys.readouterr().out


@pytest.mark.parametrize("fuzzer", [fuzz_teachers, fuzz_files])
def test_search_exits_with_one_on_findings(monkeypatch, capsys, fuzzer):
    monkeypatch.setattr(fuzzer, "check", lambda seed, index: (f"problem {index}", ["wrong"]))
    with pytest.raises(SystemExit) as stopped:
        fuzzer.main(["--problems=2", "--seed=3"])
    assert stopped.value.code == 1
    assert "--seed=3 --only=1: problem 1" in capsys.readouterr().out


@pytest.mark.parametrize("index", [4, 10, 18, 23])
def test_teachers_of_degenerate_pairs_are_finite_or_refused(index):
    assert fuzz_teachers.check(0, index)[1] == []


def test_damaged_files_are_refused_in_one_line(undrawn):
    found = dict(fuzz_files.check(0, index) for index in range(8))
    assert not any(found.values()), found
