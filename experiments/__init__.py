"""Commands that train, compare and reproduce, used from the checkout.

All want their extra at once: a missing plot library would be noticed only after hours of training.
"""

import importlib.util

from sotalign_jax import checks

for _package in ("absl", "matplotlib", "ml_collections", "orbax", "tabulate"):
    if importlib.util.find_spec(_package) is None:
        raise ModuleNotFoundError(str(checks.not_installed(_package, extra="experiments")))
