"""Tests of the selfcheck command, on the CPU with tiny sizes."""

import json
import os
import pathlib
import re
import subprocess
import sys

import jax.numpy as jnp
import pytest

from sotalign_jax import selfcheck
from sotalign_jax.ot import affinity, device, kernel

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _forget():
    """Clears compiled programs, because tests monkeypatch parts of them."""
    yield
    selfcheck.build.clear_cache()


def report(capsys, *only):
    """Runs checks in this process. Returns the exit code and the rows."""
    code = selfcheck.main(["--quick", "--json", "--only", *only])
    return code, json.loads(capsys.readouterr().out)["rows"]


@pytest.mark.slow
def test_selfcheck_passes_on_two_devices():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-m", "sotalign_jax.selfcheck", "--quick", "--json"],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] and found["profile"] == "cpu" and found["device"] == "2 x cpu"
    assert found["algorithms"] == dict.fromkeys(device.ROLES, "float32")
    rows = found["rows"]
    assert all(tuple(row) == selfcheck.COLUMNS for row in rows)
    assert all(row["ok"] and row["error"] is not None for row in rows if row["limit"])
    names = {row["check"].split()[0] for row in rows}
    assert names == {"memory", "product", "build", "sweep", "plan", "loss", "gradient", "step:"}
    assert {row["path"] for row in rows if row["check"].startswith("gradient")} == {
        "float32",
        "float32, x64",
        "float32, 2 devices",
    }


def test_selfcheck_prints_a_table(capsys):
    assert selfcheck.main(["--quick", "--only", "memory", "devices"]) == 0
    *header, names, memory, devices = capsys.readouterr().out.splitlines()
    assert any(line.startswith("algorithms: ") for line in header)
    assert [word.strip() for word in names.split("|")] == [*selfcheck.COLUMNS]
    assert "GB/s" in memory and "one device" in devices
    assert memory.endswith("| yes") and devices.endswith("| yes")


def test_selfcheck_fails_on_bfloat16_product(monkeypatch, capsys):
    def narrow(a, b, precision=None):
        return jnp.matmul(*(x.astype(jnp.bfloat16).astype(x.dtype) for x in (a, b)))

    monkeypatch.setattr(affinity, "dot", narrow)
    code, (row,) = report(capsys, "product")
    assert code == 1 and not row["ok"] and row["error"] > 10 * row["limit"]


@pytest.mark.parametrize("wrong", ["float32", "int8"])
def test_selfcheck_fails_on_inexact_sweep(wrong, monkeypatch, capsys):
    name = "sweep" if wrong == "float32" else "sweep_int8"
    right = getattr(kernel.Operator, name)

    def sweep(self, state, a, c):
        s, t = right(self, state, a, c)
        return s, t.at[-1].multiply(1 + 1e-4)

    monkeypatch.setattr(kernel.Operator, name, sweep)
    code, rows = report(capsys, "sweeps")
    failed = [(row["check"].split()[0], row["path"]) for row in rows if not row["ok"]]
    assert code == 1 and failed == [("sweep", wrong)] * len(selfcheck.QUICK.kernels)


def test_check_loss_fails_on_wrong_gradient(monkeypatch):
    right = selfcheck.loss_and_gradient

    def scaled(*features, **options):
        value, (df, dg) = right(*features, **options)
        in_float32 = df.dtype == jnp.float32
        return value, (df * 1.002 if in_float32 else df, dg)

    monkeypatch.setattr(selfcheck, "loss_and_gradient", scaled)
    loss, gradient = selfcheck.check_loss(selfcheck.QUICK, 128, 128)
    assert loss.ok and not gradient.ok


def test_selfcheck_fails_on_nan(monkeypatch, capsys):
    monkeypatch.setattr(kernel.Operator, "sweep", lambda self, state, a, c: (a / a, c * jnp.nan))
    code, rows = report(capsys, "sweeps")
    failed = [row for row in rows if not row["ok"]]
    assert code == 1 and len(failed) == len(selfcheck.QUICK.kernels)
    assert all(row["error"] is None and row["limit"] > 0 for row in failed)


def test_selfcheck_exception_fails_one_check(monkeypatch, capsys):
    def refuse(*args, **options):
        raise RuntimeError("INTERNAL: no such algorithm\nat some address")

    monkeypatch.setattr(selfcheck, "solve", refuse)
    code, rows = report(capsys, "plan", "devices")
    assert code == 1 and [row["ok"] for row in rows] == [False, False, True]
    assert rows[0]["path"] == "RuntimeError: INTERNAL: no such algorithm"


@pytest.mark.parametrize(
    ("name", "roles", "paths"),
    [
        ("cuda 7.5", {}, ["float32 (all roles)"]),
        ("cuda 8.9", {}, ["float32 (all roles)", "TF32 (unused)", "3 x bf16 (unused)"]),
        (
            "tpu",
            {"teacher": device.THREE_PASSES},
            ["float32 (student, gradient, heads, siglip)", "3 x bf16 (teacher)"],
        ),
    ],
)
def test_selfcheck_lists_product_algorithms_of_a_device(name, roles, paths, capsys):
    """All checks pass, because a CPU computes every algorithm in float32."""
    with device.compiling_for(device.Profile(name, **roles)):
        code, rows = report(capsys, "product")
    assert code == 0
    assert [re.sub(r", .* TFLOP/s", "", row["path"]) for row in rows] == paths


def test_sizes_of_depend_on_memory():
    gpu = device.Profile("cuda 8.0", memory=60 * 2**30)
    paper = selfcheck.PAPER_ROWS
    assert selfcheck.sizes_of(gpu).kernels[-1] == (paper, paper)
    assert selfcheck.sizes_of(gpu).rows == paper
    assert selfcheck.sizes_of(gpu._replace(memory=6 * 2**30)) == selfcheck.ACCELERATOR
    assert selfcheck.sizes_of(device.Profile("cpu")) == selfcheck.CPU
