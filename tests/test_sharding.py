"""Tests of sharding. Runs `eight_devices.py` in a process with eight devices."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sotalign_jax import checks
from sotalign_jax.ot import sharding


@pytest.mark.slow
def test_eight_devices_file_passes_on_eight_devices():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    file = pathlib.Path(__file__).with_name("eight_devices.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(file)]
    run = subprocess.run(
        command,
        cwd=file.parents[1],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


def test_rows_mesh_of_one_device_is_none():
    assert len(jax.devices()) == 1
    assert sharding.rows_mesh() is None and sharding.axes() == () and sharding.share(7) == 7
    with pytest.raises(checks.InputError, match=r"mesh .*2"):
        sharding.rows_mesh(2)
    x = jnp.ones((3, 2))
    assert sharding.split(x) is x and sharding.psum(x, ()) is x and sharding.all_gather(x, ()) is x
    # A mesh of one device has no effect.
    with jax.set_mesh(jax.make_mesh((1,), ("rows",), (jax.sharding.AxisType.Auto,))):
        assert sharding.axes() == ()


def test_split_rows_place_and_trim_restore_the_rows():
    mesh = jax.make_mesh((1,), ("rows",), (jax.sharding.AxisType.Auto,))
    rows = np.arange(6.0, dtype=np.float32).reshape(3, 2)
    split = sharding.SplitRows.place(rows.__getitem__, rows.shape, mesh)
    np.testing.assert_array_equal(sharding.trim({"x": split, "n": 3})["x"], rows)
    np.testing.assert_array_equal(sharding.local(sharding.replicate(rows, mesh)), rows)
