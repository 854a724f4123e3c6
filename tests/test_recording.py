"""Run folders, metrics that survive a kill, progress display."""

import io
import json
import math
import os
import pathlib
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest

from sotalign_jax import checks, recording


def test_json_round_trip_leaves_no_other_file(tmp_path):
    value = {"a": [1, 2.5, None, True], "b": {"ü": "text"}}
    recording.write_json(tmp_path / "x.json", value)
    recording.write_json(tmp_path / "x.json", value | {"a": 0})
    assert recording.read_json(tmp_path / "x.json") == value | {"a": 0}
    assert os.listdir(tmp_path) == ["x.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    recording.write_json(path, {"a": 1})
    for bad in [{"a": math.nan}, {"a": object()}]:
        with pytest.raises(checks.InputError, match=r"x\.json: cannot be written as JSON"):
            recording.write_json(path, bad)
    code = """
        import resource, signal, sys
        from sotalign_jax import recording
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        try:
            recording.write_json(sys.argv[1], "x" * 5000)
        except OSError as error:
            print(error)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "File too large" in run.stdout and str(path) in run.stdout
    assert recording.read_json(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["x.json"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "rows.bin"
    path.write_bytes(b"old")

    def write(content):
        with recording.replacing(path) as file:
            file.write(content)
            if content == b"part":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(b"part")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["rows.bin"]
    write(b"new")
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["rows.bin"]


def test_unreadable_json_is_named(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(checks.InputError, match=r"config\.json: cannot be read \(No such file"):
        recording.read_json(path)
    path.write_text('{"seed": 1, "ste')
    with pytest.raises(checks.InputError, match=r"config\.json: is cut short or not JSON"):
        recording.read_json(path)


def test_environment_is_json_and_names_the_versions():
    environment = json.loads(json.dumps(recording.environment()))
    assert environment["packages"]["numpy"] == np.__version__
    assert environment["devices"] and environment["backend"] in environment["devices"][0]
    root = pathlib.Path(recording.__file__).parents[1]
    head = ["git", "-C", str(root), "rev-parse", "HEAD"]
    known = subprocess.run(head, capture_output=True, text=True, check=False)
    if (root / ".git").exists() and known.returncode == 0:
        assert environment["git"].removesuffix("+changes") == known.stdout.strip()
    else:
        assert environment["git"] is None


CONFIG = {"seed": 0, "method": {"name": "sotalign", "alpha": 1e-4}, "ks": (1, 5)}


def test_a_run_is_created_then_resumed(tmp_path):
    workdir = tmp_path / "runs" / "one"
    assert recording.open_run(workdir, CONFIG) == (workdir, False)
    created = {path.name: path.read_bytes() for path in workdir.iterdir()}
    assert created.keys() == {"config.json", "environment.json"}
    (workdir / "metrics.jsonl").write_text("")
    assert recording.open_run(str(workdir), CONFIG) == (workdir, True)
    assert all((workdir / name).read_bytes() == text for name, text in created.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed=0 but seed=1 is asked for; choose another --workdir"),
        ({"method": {"name": "sotalign", "alpha": 1e-3}}, "method.alpha=0.0001 but method.alpha"),
        ({"ks": (1, 5, 10)}, r"ks=\[1, 5\] but ks=\[1, 5, 10\]"),
        ({"new": None}, "new=unset but new=None"),
        ({"method": {"name": "sotalign"}}, "method.alpha=0.0001 but method.alpha=unset"),
    ],
)
def test_another_configuration_is_refused(tmp_path, change, message):
    recording.open_run(tmp_path, CONFIG)
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(checks.InputError, match=message):
        recording.open_run(tmp_path, CONFIG | change)
    assert (tmp_path / "config.json").read_bytes() == before


def test_a_folder_with_other_things_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(checks.InputError, match=r"holds thesis\.tex but no config\.json"):
        recording.open_run(tmp_path, CONFIG)
    with pytest.raises(checks.InputError, match=r"thesis\.tex cannot be created"):
        recording.open_run(tmp_path / "thesis.tex", CONFIG)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_messages_name_the_flag_of_the_folder(tmp_path):
    recording.open_run(tmp_path / "run", {"n": 1}, flag="out")
    with pytest.raises(checks.InputError, match=r"^out: .*n=1 but n=2 .*another --out$"):
        recording.open_run(tmp_path / "run", {"n": 2}, flag="out")


def test_a_start_killed_early_can_be_repeated(tmp_path):
    (tmp_path / ".config.json.tmp").write_text('{"se')
    assert not recording.open_run(tmp_path, CONFIG).resumed
    (tmp_path / "environment.json").unlink()
    assert recording.open_run(tmp_path, CONFIG).resumed
    assert sorted(os.listdir(tmp_path)) == ["config.json", "environment.json"]


def _metrics(step: int) -> dict[str, object]:
    return {"loss": jnp.float32(1 / step), "b": np.int64(step), "a": 1 / step, "ok": True}


def test_metrics_are_strict_json_in_a_fixed_order(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with recording.MetricLog(path) as log:
        log.append(3, _metrics(3))
        log.append(np.int32(4), {"x": jnp.inf, "y": np.float32(-np.inf), "z": np.array([np.nan])})
        log.flush()
    lines = path.read_text().splitlines()
    assert lines[0] == '{"step": 3, "a": 0.3333333333333333, "b": 3, "loss": 0.33333334, "ok": 1}'

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(lines[1], parse_constant=refuse)["x"] == "Infinity"
    first, second = recording.read_metrics(path)
    assert np.float32(first["loss"]) == np.float32(1 / 3) and first["a"] == 1 / 3
    assert (second["x"], second["y"]) == (math.inf, -math.inf) and math.isnan(second["z"])


@pytest.mark.parametrize("torn", [b"", b'{"step": 9', b'{"step": 9, "loss": 1}'])
def test_a_resumed_log_has_the_same_bytes(tmp_path, torn):
    with recording.MetricLog(tmp_path / "whole.jsonl") as log:
        for step in range(1, 12):
            log.append(step, _metrics(step))
    path = tmp_path / "resumed.jsonl"
    with recording.MetricLog(path) as log:
        for step in range(1, 9):
            log.append(step, _metrics(step))
    with path.open("ab") as file:
        file.write(torn)
    assert [record["step"] for record in recording.read_metrics(path)] == list(range(1, 9))
    with recording.MetricLog(path) as log:
        log.truncate_after(6)
        for step in range(7, 12):
            log.append(step, _metrics(step))
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_truncating_keeps_everything_when_nothing_is_beyond(tmp_path):
    path = tmp_path / "m.jsonl"
    with recording.MetricLog(path) as log:
        log.truncate_after(5)
        log.append(5, {"loss": 1})
        log.truncate_after(5)
        log.truncate_after(100)
        log.append(6, {"loss": 2})
        assert len(recording.read_metrics(path)) == 2
        log.truncate_after(-1)
    assert path.read_bytes() == b""


def test_unusable_metrics_are_named(tmp_path):
    path = tmp_path / "m.jsonl"
    with pytest.raises(checks.InputError, match=r"m\.jsonl: cannot be read"):
        recording.read_metrics(path)
    with recording.MetricLog(path) as log, pytest.raises(checks.InputError, match=r"shape \(2,\)"):
        log.append(1, {"loss": np.ones(2)})
    for line in ['{"step": 1}\nnonsense\n{"step": 2}\n', '{"step": 1}\n{"loss": 2}\n', "1\n2\n"]:
        path.write_text(line)
        with pytest.raises(checks.InputError, match=r"m\.jsonl: line [12] is not a record"):
            recording.read_metrics(path)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_shows_loss_score_and_time():
    stream = Terminal()
    with recording.Progress(20, "train", initial=5, stream=stream) as progress:
        for step in range(6, 21):
            progress.update(step, loss=jnp.float32(0.5), mean_r1=40.25 if step == 6 else None)
    last = stream.getvalue().rsplit("\r", 1)[-1]
    assert "train" in last and "20/20" in last and "loss 0.5, MeanR@1 40.25" in last


def test_progress_without_a_terminal_is_a_line_every_tenth():
    stream = io.StringIO()
    with recording.Progress(1000, "train", initial=300, stream=stream) as progress:
        for step in range(301, 1001):
            progress.update(step, loss=0.125)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 7
    assert lines[0].startswith("train: 400/1000, loss 0.125, ") and lines[0].endswith(" left")
    assert lines[-1] == "train: 1000/1000, loss 0.125, 00:00 left"


def test_progress_of_runs_within_a_bar_over_runs():
    plain, terminal = io.StringIO(), Terminal()
    for stream in (plain, terminal):
        with (
            recording.Progress(2, "compare", unit="runs", stream=stream) as outer,
            recording.Progress(10, "sail seed 0", inner=True, stream=stream) as inner,
        ):
            inner.update(10, loss=0.5)
            outer.update(1)
    assert plain.getvalue().startswith("compare: 1/2 runs, ")
    assert len(plain.getvalue().splitlines()) == 1
    assert "sail seed 0" in terminal.getvalue() and "runs/s" in terminal.getvalue()


def test_progress_with_a_unit_shows_the_rate():
    stream = io.StringIO()
    with recording.Progress(10, "extract", unit="rows", rate=True, stream=stream) as progress:
        progress.update(10)
    assert stream.getvalue().startswith("extract: 10/10 rows, ")
    assert stream.getvalue().endswith(" rows/s, 00:00 left\n")


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_closed_stream_does_not_end_the_run(kind):
    stream = kind()
    with recording.Progress(10, "train", stream=stream) as progress:
        progress.update(1)
        stream.close()
        for step in range(2, 11):
            progress.update(step, loss=1.0)
    with recording.Progress(10, "train", stream=stream) as progress:
        progress.update(10)


def test_no_standard_error_is_no_problem(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with recording.Progress(10, "train") as progress:
        progress.update(10)


def test_tensorboard_writes_events(tmp_path):
    writer = recording.tensorboard(tmp_path, resume_after=3)
    writer.add_scalar("loss", 0.5, 4)
    writer.close()
    (file,) = tmp_path.iterdir()
    assert b"loss" in file.read_bytes()


def test_a_missing_tensorboard_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(
        checks.InputError, match=r"not installed; run pip install -e '\.\[tensorboard\]'"
    ):
        recording.tensorboard(tmp_path)
