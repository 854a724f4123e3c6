"""Flags of every command that makes runs: what to run, and where the results go."""

import pathlib

from absl import flags
from ml_collections import config_dict, config_flags

from sotalign_jax import checks

# Unknown settings are let through here, to be refused with a list of the known ones.
_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "FILE.py[:ARG]", lock_config=False, accept_new_attributes=True
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the results.")


def config() -> config_dict.ConfigDict:
    """The config that --config names, with the changes on the command line."""
    if _CONFIG.value is None:
        raise checks.InputError("config: is not set; pass --config=experiments/configs/...")
    return _CONFIG.value


def workdir() -> pathlib.Path:
    """The folder that --workdir names."""
    if not _WORKDIR.value:
        raise checks.InputError("workdir: is not set; pass --workdir=FOLDER")
    return pathlib.Path(_WORKDIR.value).expanduser()
