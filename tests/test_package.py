"""Tests of the package: layers of imports, light imports and missing extras."""

import ast
import pathlib
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import pytest
import shape_checks
from jaxtyping import Array, Float

import sotalign_jax

FOLDER = pathlib.Path(sotalign_jax.__file__).parent

# Layers, lowest first. A module may import modules of its own layer and of lower ones.
LAYERS = (
    ("checks", "progress", "storage"),
    ("tables",),
    ("ot",),
    ("losses", "cca", "duplicates", "kernels", "calibration", "confidence"),
    ("heads",),
    ("files", "data", "sampling"),
    ("teachers",),
    ("neighbours",),
    ("evaluation",),
    ("runtime",),
    ("export", "persistence", "sharing"),
    ("aligner",),
    ("faiss_index",),
    ("methods",),
    ("training",),
    ("recipe",),
    ("alignment", "diagnostics", "selfcheck"),
    ("estimator", "search"),
    ("extract", "pair", "serve"),
    ("__init__",),
)
LAYER = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = {
    str(path.relative_to(FOLDER).with_suffix("")).removesuffix("/__init__"): path
    for path in sorted(FOLDER.rglob("*.py"))
}


ROOT = FOLDER.parent


def _imports(path: pathlib.Path) -> tuple[set[str], set[str]]:
    """Returns the own modules and the third-party packages that a file imports."""
    inside, outside = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: use an absolute import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            package, *parts = name.split(".")
            if package == "sotalign_jax":
                inside.add(_module(parts))
            else:
                outside.add(package)
    return inside, outside


def _module(parts: list[str]) -> str:
    """Returns the file of an imported name such as methods.base.Method or heads.Heads."""
    while parts and "/".join(parts) not in FILES:
        parts = parts[:-1]
    return "/".join(parts) or "__init__"


@pytest.mark.parametrize("module", FILES)
def test_module_imports_only_lower_layers(module):
    def level(name: str) -> int:
        return LAYER[name.split("/")[0]]

    inside, outside = _imports(FILES[module])
    assert [name for name in inside if level(name) > level(module)] == []
    assert not outside & {"orbax", "experiments", "benchmarks", "tests"}
    if LAYER[module.split("/")[0]] < LAYER["search"]:
        assert not outside & {"absl", "torch", "transformers", "PIL"}


@pytest.mark.parametrize("path", sorted(ROOT.glob("benchmarks/*.py")), ids=lambda path: path.stem)
def test_benchmarks_import_nothing_from_the_launchers(path):
    """The launchers import the benchmarks, so the other direction would be a cycle."""
    _, outside = _imports(path)
    assert "experiments" not in outside


def test_importing_package_loads_no_heavy_package():
    heavy = ["tensorflow", "tensorflow_datasets", "torch", "matplotlib", "sklearn", "ott", "chex"]
    code = f"import sys, sotalign_jax; print(*[name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


WITHOUT = {
    "experiments.main": ("tabulate", "tabulate", "experiments"),
    "experiments.reproduce": ("tabulate", "tabulate", "experiments"),
    "sotalign_jax.search": ("absl", "absl-py", "extract"),
    "sotalign_jax.extract": ("absl", "absl-py", "extract"),
    "benchmarks.gradient": ("ott", "ott-jax", "bench"),
}
"""Maps a command to a missing module, its package and its extra."""


def test_commands_name_a_missing_extra_in_one_line():
    """Commands report a missing extra before any other work."""
    code = """
        import runpy, sys
        for command, module in zip(sys.argv[1::2], sys.argv[2::2]):
            again = ("experiments", "sotalign_jax.search", "absl")
            for name in [name for name in sys.modules if name.startswith(again)]:
                del sys.modules[name]
            sys.modules[module] = None
            try:
                runpy.run_module(command, run_name="__main__", alter_sys=True)
            except (SystemExit, ModuleNotFoundError) as stop:
                print(stop)
            del sys.modules[module]
    """
    pairs = [word for command, (module, *_) in WITHOUT.items() for word in (command, module)]
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *pairs],
        cwd=FOLDER.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.removeprefix("error: ") for line in run.stdout.splitlines()] == [
        f"{package} is not installed; run pip install 'sotalign-jax[{extra}]'"
        for _, package, extra in WITHOUT.values()
    ]


OLD = ("extract", "pair", "search", "serve")


@pytest.mark.parametrize("command", OLD)
def test_old_commands_name_the_new_one(command):
    typed = [sys.executable, "-m", f"experiments.{command}", "--model=m"]
    run = subprocess.run(typed, cwd=FOLDER.parent, capture_output=True, text=True)
    assert run.returncode == 2 and run.stdout == "" and run.stderr.count("\n") == 1
    assert run.stderr.endswith(f"python -m sotalign_jax.{command}\n")


@pytest.mark.parametrize("name", ["Model", "pictures"])
def test_model_names_the_missing_extra_on_first_use(name):
    code = f"""
        import sys
        sys.modules["torch"] = None
        import sotalign_jax as sota
        try:
            sota.{name}
        except sota.InputError as error:
            print(error)
    """
    typed = [sys.executable, "-c", textwrap.dedent(code)]
    run = subprocess.run(typed, capture_output=True, text=True, check=True)
    assert run.stdout == "torch is not installed; run pip install 'sotalign-jax[extract]'\n"


def test_package_is_typed():
    assert (FOLDER / "py.typed").exists()


def test_shape_checks_find_a_wrong_annotation():
    def outer(x: Float[Array, "n"], y: Float[Array, "m"]) -> Float[Array, "m n"]:
        return x[:, None] * y

    assert shape_checks.checked(outer)(jnp.ones(3), jnp.ones(3)).shape == (3, 3)
    with pytest.raises(TypeError, match="outer: return"):
        shape_checks.checked(outer)(jnp.ones(2), jnp.ones(3))
