"""Packages of the extra `extract`, imported when they are needed."""

import functools

from sotalign_jax import checks

require = functools.partial(checks.require, extra="extract")
