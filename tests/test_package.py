"""The shape of the package: which module may import which, and what an import costs."""

import ast
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import pytest
import shape_checks
from jaxtyping import Array, Float

import sotalign_jax

FOLDER = pathlib.Path(sotalign_jax.__file__).parent

# A module imports only modules above it.
ORDER = [
    "checks",
    "affinity",
    "kernels",
    "solver",
    "sinkhorn",
    "closed_form",
    "divergences",
    "losses",
    "heads",
    "teachers",
    "files",
    "data",
    "sampling",
    "evaluation",
    "sliced",
    "diagnostics",
    "methods",
    "training",
    "checkpoints",
    "tables",
    "recording",
    "aligner",
    "__init__",
]
MODULES = sorted(path.stem for path in FOLDER.glob("*.py"))


def _imports(module: str) -> tuple[set[str], set[str]]:
    """The package's own modules and the outside packages that a module names, at any depth."""
    inside, outside = set(), set()
    for node in ast.walk(ast.parse((FOLDER / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}.py line {node.lineno}: use an absolute import"
            if node.module == "sotalign_jax":
                inside |= {alias.name for alias in node.names}
            elif node.module.startswith("sotalign_jax."):
                inside.add(node.module.split(".")[1])
            else:
                outside.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            for name in (alias.name.split(".") for alias in node.names):
                if name[0] == "sotalign_jax":
                    inside.add(name[1] if len(name) > 1 else "__init__")
                else:
                    outside.add(name[0])
    return inside, outside


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    assert module in ORDER, f"{module}.py: give it a place in ORDER"
    inside, outside = _imports(module)
    above = set(ORDER[: ORDER.index(module)])
    assert inside <= above, f"{module}.py imports {sorted(inside - above)} from below"
    assert ("orbax" in outside) == (module == "checkpoints")


@pytest.mark.parametrize("module", MODULES)
def test_modules_stay_small(module):
    assert len((FOLDER / f"{module}.py").read_text().splitlines()) <= 450


def test_import_is_light():
    heavy = ["tensorflow", "tensorflow_datasets", "torch", "matplotlib", "sklearn", "ott", "chex"]
    code = f"import sys, sotalign_jax; print(*[name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_package_is_typed():
    assert (FOLDER / "py.typed").exists()


def test_shape_checks_find_a_wrong_annotation():
    def outer(x: Float[Array, "n"], y: Float[Array, "m"]) -> Float[Array, "m n"]:
        return x[:, None] * y

    assert shape_checks.checked(outer)(jnp.ones(3), jnp.ones(3)).shape == (3, 3)
    with pytest.raises(TypeError, match="outer: return"):
        shape_checks.checked(outer)(jnp.ones(2), jnp.ones(3))
