"""Tests of the fuzzer of the solver."""

import fuzz
import pytest


@pytest.mark.slow
def test_fuzz_finds_nothing_in_a_few_hundred_problems():
    """Uses problems of one shape, to limit compilation. The command covers all shapes."""
    problems = [i for i in range(900) if fuzz.make(7, i).k.shape == fuzz.SHAPES[0]]
    assert len(problems) > 250
    assert not any(report.found for report in fuzz.run(problems, 7).values())


def test_fuzz_is_deterministic_and_exits_with_one_on_findings(monkeypatch, capsys):
    first, again = fuzz.make(3, 14), fuzz.make(3, 14)
    assert first.name == again.name and first.k.tobytes() == again.k.tobytes()
    monkeypatch.setattr(fuzz, "check", lambda case: fuzz.Report(["wrong"]))
    with pytest.raises(SystemExit) as stopped:
        fuzz.main(["--problems=2", "--seed=3"])
    assert stopped.value.code == 1
    assert "--seed=3 --only=1" in capsys.readouterr().out
