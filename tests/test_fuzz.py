import fuzz
import pytest


@pytest.mark.slow
def test_nothing_is_found_in_a_few_hundred_problems():
    """Of one shape, so that little is compiled; the command has more."""
    problems = [i for i in range(900) if fuzz.make(7, i).k.shape == fuzz.SHAPES[0]]
    assert len(problems) > 250
    assert not any(report.found for report in fuzz.run(problems, 7).values())


def test_a_problem_is_the_same_again_and_findings_end_the_command(monkeypatch, capsys):
    first, again = fuzz.make(3, 14), fuzz.make(3, 14)
    assert first.name == again.name and first.k.tobytes() == again.k.tobytes()
    monkeypatch.setattr(fuzz, "check", lambda case: fuzz.Report(["wrong"]))
    with pytest.raises(SystemExit) as stopped:
        fuzz.main(["--problems=2", "--seed=3"])
    assert stopped.value.code == 1
    assert "--seed=3 --only=1" in capsys.readouterr().out
