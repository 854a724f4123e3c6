"""Runs `python -m MODULE` with toy encoders, which need neither torch nor weights."""

import runpy
import sys

import toy_encoders

from sotalign_jax.search import encoders


def load(name, **_):
    return toy_encoders.Toy("text" if "minilm" in name else "image", name=name)


if __name__ == "__main__":
    encoders.load = load
    sys.argv = sys.argv[2:]  # drops this file and -m
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
