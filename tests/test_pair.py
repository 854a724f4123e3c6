"""Tests of folders of embedding files, as read by `from=FOLDER`."""

import numpy as np
import pytest

from experiments import run as run_lib
from experiments import spec
from experiments.configs import files as files_config
from sotalign_jax import checks


def test_get_config_from_folder_lists_files_if_x_or_y_is_missing(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((30, 4)))
    (tmp_path / "texts.parquet").touch()
    with pytest.raises(checks.InputError, match=r"config .* no y; .*texts.parquet"):
        files_config.get_config(f"from={tmp_path}")
    np.save(tmp_path / "y.npy", np.ones((30, 4)))
    np.savez(tmp_path / "y.npz", np.ones((30, 4)))
    with pytest.raises(checks.InputError, match=r"config .* y.npy and y.npz"):
        files_config.get_config(f"from={tmp_path}")


def test_get_config_from_folder_holds_out_validation_and_test(tmp_path, capsys):
    rows = np.random.default_rng(0).normal(size=(640, 4))
    np.savez(tmp_path / "x.npz", rows)
    np.savetxt(tmp_path / "y.csv", rows, delimiter=",")
    config = files_config.get_config(f"from={tmp_path}")
    assert capsys.readouterr().err.count("\n") == 1
    one = spec.expand(config)["sotalign-seed0"]
    shapes = run_lib.load_dataset(one).summary()
    assert one.data.n_pairs == 448 and shapes["pairs_x"] == shapes["pool_x"] == [448, 4]
    assert shapes["val_x"] == [64, 4] and shapes["test_y"] == [128, 4]
    one = spec.expand(config.change({"data.test": False}))["sotalign-seed0"]
    assert run_lib.load_dataset(one).summary()["test_x"] is None
