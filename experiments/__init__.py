"""Commands that train, compare and reproduce. They are used from a checkout of the repository.

All packages of the extra are required on import. A missing plot library would otherwise be noticed
after hours of training.
"""

import importlib.util

from sotalign_jax import checks

for _package in ("absl", "matplotlib", "orbax", "tabulate"):
    if importlib.util.find_spec(_package) is None:
        raise ModuleNotFoundError(str(checks.not_installed(_package, extra="experiments")))
