"""Tests of the documentation: API reference, docstrings, and all code and commands of the pages.

Python blocks run unchanged, except for the `SMALLER` numbers below. The flags, values and config
files of every command are checked, and a test starts it with small files (`STARTED_BY`).
"""

import ast
import contextlib
import csv
import importlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import PIL.Image
import pytest
import small_runs

import sotalign_jax
from experiments import main, spec
from sotalign_jax import checks

ROOT = small_runs.ROOT
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if "results" not in path.parts),
]
SMALLER = {
    "range(61)": "range(2)",
    '"steps": 60': '"steps": 2',
    "steps=100": "steps=2",
    "x=X, y=Y)": "x=X, y=Y, steps=2)",
    "x=X, y=Y, progress": "x=X, y=Y, steps=2, progress",
    "val=speech.val)": "val=speech.val, steps=2)",
    "n_pairs=1000, n_unpaired=2000": "n_pairs=100, n_unpaired=100",
}
"""Replacements that make the code of the pages faster. Every line still runs."""
TOOLS = {"pip", "python", "python3", "source", "bash", "pytest", "mkdocs", "apt-get", "cd", "git",
         "torchrun", "srun"}  # fmt: skip
"""Third-party commands."""


def blocks(page: pathlib.Path, language: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)


def smaller(code: str) -> str:
    for here, there in SMALLER.items():
        code = code.replace(here, there)
    return code


def run_python(parts: list[str], name: str) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    for part in parts:
        exec(compile(smaller(part), name, "exec"), namespace)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")


# --- Python ---------------------------------------------------------------------------------------

WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]
PACKAGES = {"arrays": ("pandas",), "deploy": ("faiss", "onnx", "onnxruntime", "qdrant_client")}
"""Packages of the extra `[test]` that a page needs."""


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.stem)
def test_python_blocks_of_each_page_run(page):
    for package in PACKAGES.get(page.stem, ()):
        pytest.importorskip(package, reason="needs the extra 'test'")
    # Pictures are needed for `sota.pictures`, which test_pictures.py calls.
    skipped = ("--8<--", "sota.pictures(")
    parts = [part for part in blocks(page, "python") if not any(word in part for word in skipped)]
    run_python(parts, page.name)


@pytest.mark.parametrize("name", ["klot_in_optax.py", "new_method.py"])
def test_examples_run(name, capsys):
    run_python([(ROOT / "examples" / name).read_text()], name)
    assert len(capsys.readouterr().out.splitlines()) >= 1


def test_notebook_runs_and_keeps_its_outputs():
    notebook = json.loads((ROOT / "examples" / "align.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    run_python(["".join(cell["source"]) for cell in cells], "align.ipynb")
    kept = [output for cell in cells for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in kept)
    assert not any(output["output_type"] == "error" for output in kept)


# --- API reference --------------------------------------------------------------------------------

PACKAGE = ROOT / "sotalign_jax"
REFERENCE = set(re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
INTERNAL = {
    "aligner": "the package exports Aligner",
    "alignment": "the package exports align",
    "checks": "the package exports InputError",
    "duplicates": "called by the splits of the data and by cross-validation",
    "ot": "the package exports the loss, the solver and the plan",
    "persistence": "called by Aligner.save and Aligner.load",
    "selfcheck": "a command, documented in docs/devices.md",
    "extract": "a command, documented in docs/extract.md",
    "pair": "a command, documented in docs/extract.md",
    "serve": "a command, documented in docs/search.md",
    "storage": "files and locks of all writers",
}
"""Modules without an entry in the API reference, with the reason."""


def test_api_reference_has_every_public_module():
    modules = {path.stem for path in PACKAGE.glob("[!_]*.py")}
    modules |= {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    # A package is listed as a whole or module by module.
    listed = {name.removeprefix("sotalign_jax.").split(".")[0] for name in REFERENCE}
    assert modules - listed == INTERNAL.keys()


@pytest.mark.parametrize("package", [sotalign_jax, sotalign_jax.methods], ids=lambda p: p.__name__)
def test_api_reference_has_every_exported_name(package):
    for name in package.__all__:
        places = {package.__name__, f"{package.__name__}.{name}"}
        places.add(getattr(getattr(package, name), "__module__", ""))  # of a re-exported name
        assert places & REFERENCE, name


def public_functions(
    body: list[ast.stmt], prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yields the public functions and methods of a module with their qualified names."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield prefix + node.name, node


NO_SECTIONS = {"overload", "override", "property", "cached_property", "contextmanager"}
"""Decorators of functions whose docstrings need no sections."""


def missing_sections(function: ast.FunctionDef) -> set[str]:
    """Returns the sections that the docstring of a function should have and lacks.

    `Returns:` may be missing if there are fewer than two arguments and the summary says it.
    """
    if any(ast.unparse(d).split(".")[-1] in NO_SECTIONS for d in function.decorator_list):
        return set()
    args = function.args
    names = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    count = sum(name is not None and name.arg not in ("self", "cls") for name in names)
    needed = {"Args:"} if count >= 2 else set()
    doc = ast.get_docstring(function) or ""
    returns = function.returns is not None and ast.unparse(function.returns) != "None"
    if returns and (count >= 2 or not doc.startswith(("Returns", "Yields"))):
        needed.add("Returns:")
    return needed - set(re.findall(r"^\w+:$", doc.replace("Yields:", "Returns:"), re.MULTILINE))


COMMAND_FILES = ("extract", "pair", "selfcheck", "serve")
"""Commands, whose functions are not called by users."""


def test_docstrings_of_public_functions_have_args_and_returns():
    """Complements rule D417 of ruff, which finds arguments missing in an `Args:` section."""
    found = [
        f"{path.relative_to(ROOT)}: {name}: {' '.join(sorted(missing))}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.stem not in COMMAND_FILES and (path.parent.name != "search" or path.stem == "model")
        for name, function in public_functions(ast.parse(path.read_text()).body)
        if (missing := missing_sections(function))
    ]
    assert found == []


def test_fence_marks_plain_and_indented_doctests_as_code():
    pytest.importorskip("griffe", reason="needs the extra 'docs'")
    code = (ROOT / "docs" / "doctests.py").read_text()
    namespace: dict[str, Any] = {}
    exec(compile(code, "doctests.py", "exec"), namespace)
    text = "Adds.\n\n>>> 1 + 1\n2\n\nExample:\n    >>> 2 + 2\n    4\n\nReferences:\n    A book."
    fenced = text.replace(">>> 1 + 1\n2", "```pycon\n>>> 1 + 1\n2\n```")
    inner = "    >>> 2 + 2\n    4"
    assert namespace["fence"](text) == fenced.replace(inner, f"    ```pycon\n{inner}\n    ```")


# --- commands -------------------------------------------------------------------------------------


def commands(text: str) -> list[list[str]]:
    """Splits a script into commands, also at `&&`, and each command into words."""
    joined = text.replace("\\\n", " ")
    lines = [part for line in joined.splitlines() for part in line.split(" && ")]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def documented() -> list[tuple[str, list[str]]]:
    found = [
        (page.name, words)
        for page in PAGES
        for block in blocks(page, "bash")
        for words in commands(block)
    ]
    script = (ROOT / "examples" / "picture_folder.sh").read_text()
    script = script.replace('"${@:5}"', "")  # the user's own options
    return found + [("picture_folder.sh", w) for w in commands(script) if w[0] == "python"]


def check_config(options: dict[str, str]) -> None:
    """Checks that the config file exists and has every changed setting."""
    file, _, switches = options.pop("config", "").partition(":")
    if not file:
        return
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    assert (ROOT / file).exists()
    config = module.get_config("" if switches.startswith("from=") else switches)
    for key, value in options.items():
        with contextlib.suppress(ValueError, SyntaxError):
            value = ast.literal_eval(value)
        config.change({key.removeprefix("config."): value})


FLAGS_OF = """
import importlib, json, sys
from absl import flags
found = {}
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    found[name] = {
        flag.name: getattr(flag.parser, "enum_values", None)
        for flag in flags.FLAGS.get_key_flags_for_module(name)
    }
    for flag in list(flags.FLAGS.flags_by_module_dict().get(name, [])):
        delattr(flags.FLAGS, flag.name)  # the next command may define a flag of the same name
print(json.dumps(found))
"""


def flags_of(modules: set[str]) -> dict[str, dict[str, list[str] | None]]:
    """Returns the flags of each command, with the allowed values of enum flags."""
    done = subprocess.run(
        [sys.executable, "-c", FLAGS_OF, *sorted(modules)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def check_ours(words: list[str], known: dict[str, list[str] | None]) -> None:
    options = dict(re.fullmatch(r"--(\w[\w.]*)(?:=(.*))?", word).groups() for word in words)
    for name, value in options.items():
        if name != "help" and not name.startswith("config."):
            assert name in known, name
            assert value is None or known[name] is None or value in known[name], value
    check_config({name: value for name, value in options.items() if name.startswith("config")})


def check_benchmark(module: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module(module).main(["--help"])
    usage = capsys.readouterr().out
    for word in words:
        if word.startswith("--"):
            assert word.partition("=")[0] in usage, f"{module} {word}"


COMMANDS = ("sotalign_jax", "experiments", "benchmarks", "tests")


def is_ours(words: list[str]) -> bool:
    return words[1:2] == ["-m"] and words[2].split(".")[0] in COMMANDS


@pytest.mark.filterwarnings("ignore:JAXopt:DeprecationWarning")  # ott-jax imports it
def test_documented_commands_use_existing_flags(capsys):
    typed = [(page, re.sub("jax.search$", "jax.search.__main__", words[2]), words)
             for page, words in documented() if is_ours(words)]  # fmt: skip
    assert len(typed) > 20
    others = ("benchmarks", "tests", "sotalign_jax.selfcheck")  # without absl's flags
    known = flags_of({module for _, module, _ in typed if not module.startswith(others)})
    for page, module, words in typed:
        try:
            if module in known:
                check_ours(words[3:], known[module])
            else:
                check_benchmark(module, words[3:], capsys)
        except (AssertionError, checks.InputError) as error:
            raise AssertionError(f"{page}: {shlex.join(words)}: {error}") from error


def test_options_of_the_paper_page_are_accepted():
    spans = re.findall(r"`(--config\.[^`]+=[^`]+)`", (ROOT / "docs" / "paper.md").read_text())
    assert len(spans) > 15
    for span in spans:
        changes = {}
        for key, value in re.findall(r"--config\.([\w.]+)=(\S+)", span):
            changes[key] = spec.parse(key, value)
            section = key.partition(".")[0]
            if section in sotalign_jax.methods.METHODS:
                changes.setdefault("method", section)
        assert spec.expand(spec.Spec().change(changes)), span


def test_documented_shell_commands_name_existing_extras_and_files():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for page, words in documented():
        if is_ours(words):
            continue
        assert pathlib.Path(words[0]).name in TOOLS, f"{page}: {words[0]}"
        for word in words:
            for asked in re.findall(r"^\.\[(.*)\]$", word):
                extras = set(asked.split(","))
                assert extras <= project["optional-dependencies"].keys(), f"{page}: {word}"
            if word.startswith("examples/"):
                assert (ROOT / word).exists(), f"{page}: {word}"


STARTED_BY = {
    "experiments.main --config=experiments/configs/quickstart.py --workdir=runs/quickstart": (
        "test_docs.py::test_readme_quickstart_command_writes_report"
    ),
    "experiments.main --config=experiments/configs/quickstart.py --config.data.name=speech": (
        "test_docs.py::test_documented_runs_resolve"
    ),
    "experiments.main --config=experiments/configs/quickstart.py --workdir=/shared/run": (
        "test_distributed.py::test_main_resumes_identically_on_other_devices_and_processes"
    ),
    "experiments.main --config=experiments/configs/compare.py": (
        "test_docs.py::test_documented_runs_resolve"
    ),
    "experiments.main --config=experiments/configs/files.py:from=$out": (
        "test_docs.py::test_picture_folder_example_runs"
    ),
    "experiments.main --config=experiments/configs/files.py": (
        "test_docs.py::test_guide_commands_run_on_small_files"
    ),
    "experiments.diagnose": "test_diagnose.py::test_diagnose_prints_and_saves_its_findings",
    "experiments.tune": "test_tune.py::test_tune_chooses_best_on_validation_and_tests_it",
    "experiments.recipes": "test_recipes.py::test_recipes_print_a_table_per_score_and_resume",
    "experiments.reproduce --list": "test_reproduce.py::test_reproduce_list_fits_a_terminal",
    "sotalign_jax.extract": "test_docs.py::test_picture_folder_example_runs",
    "sotalign_jax.pair --x=emb/food": "test_extract.py::test_join_zero_shot_writes_evaluable_task",
    "sotalign_jax.pair": "test_docs.py::test_picture_folder_example_runs",
    "sotalign_jax.search": "test_docs.py::test_picture_folder_example_runs",
    "sotalign_jax.serve": "test_docs.py::test_picture_folder_example_runs",
    "benchmarks.gradient --sweep": "test_benchmarks.py::test_gradient_sweep_records_bad_arms",
    "benchmarks.gradient": "test_benchmarks.py::test_gradient_headline_compares_with_ott",
    "benchmarks.convergence": "test_benchmarks.py::test_convergence_main_writes_tables",
    "benchmarks.train_step": "test_benchmarks.py::test_train_step_main_times_ours_and_ott",
    "experiments.unpaired": "test_unpaired.py::test_unpaired_prints_a_row_per_size_and_draws_it",
    "sotalign_jax.selfcheck": "test_selfcheck.py::test_selfcheck_prints_a_table",
    "tests.fuzz_teachers": "test_fuzz.py::test_search_exits_with_one_on_findings",
    "tests.fuzz_files": "test_fuzz.py::test_search_exits_with_one_on_findings",
    "tests.fuzz": "test_fuzz.py::test_fuzz_is_deterministic_and_exits_with_one_on_findings",
    "benchmarks.compile": "test_model.py::test_main_compiles_for_absent_devices",
    "benchmarks.index": "test_faiss_index.py::test_more_clusters_find_more_neighbours",
    "benchmarks.model": "test_model.py::test_main_writes_every_table",
}
"""Maps the beginning of a command to the test that starts it. The first match counts."""
NOT_STARTED = {"benchmarks.precision": "compiles for a minute even with --quick"}
"""Commands that no test starts, with the reason. Only their flags are checked."""


def test_every_documented_command_is_started_by_a_test():
    for page, words in documented():
        if is_ours(words) and words[2] not in NOT_STARTED:
            typed = " ".join(words[2:])
            found = next((by for start, by in STARTED_BY.items() if typed.startswith(start)), None)
            assert found is not None, f"{page}: no test starts {typed}"
            file, _, name = found.partition("::")
            assert f"def {name}" in (ROOT / "tests" / file).read_text(), found


def run_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    options = [word.replace(".py", ".py:smoke", 1) for word in words[3:]]
    options = [o.replace("smoke:", "smoke,") for o in options]
    options = [o.replace("=experiments/", f"={ROOT}/experiments/") for o in options]
    options = [o.replace("n_pairs=1000", "n_pairs=60") for o in options]
    out, error = small_runs.start(
        main, [*options, "--config.runs={'cca': {'method': 'cca'}}"], capsys
    )
    assert error is None, error
    return out


def test_guide_commands_run_on_small_files(tmp_path, capsys):
    """Runs the guide's commands on small files, with `smoke` settings and only CCA."""
    small_runs.write_files(tmp_path)
    by_name, by_folder = (
        words for page, words in documented() if page == "arrays.md" and "experiments.main" in words
    )
    for name, kind in (("images", "x"), ("texts", "y")):
        for part in ("", "val_", "test_"):
            np.save(f"{part}{name}.npy", np.load(f"{part}{kind}.npy"))
    assert "R@1" in run_command(by_name, capsys)
    assert (tmp_path / "runs" / "mine" / "report.html").stat().st_size > 10_000
    by_folder = [word.replace("FOLDER", str(tmp_path)).replace("mine", "two") for word in by_folder]
    options = [*by_folder, "--config.data.n_pairs=60"]
    assert "R@1" in run_command(options, capsys)


def test_readme_quickstart_command_writes_report(tmp_path, capsys):
    """Runs the README's first command with `smoke` settings and only CCA."""
    quickstart = next(w for _, w in documented() if "--workdir=runs/quickstart" in w)
    assert "Texts found by cca-seed0" in run_command(quickstart, capsys)
    page = (tmp_path / "runs" / "quickstart" / "report.html").read_text()
    assert "Own text among the first 10" in page and "data:image/png" in page


@pytest.mark.parametrize(("workdir", "runs"), [("runs/compare", 10), ("runs/speech", 4)])
def test_documented_runs_resolve(workdir, runs, capsys):
    """Resolves the commands with --dry_run. test_methods.py trains every method."""
    typed = next(words for _, words in documented() if f"--workdir={workdir}" in words)
    options = [o.replace("=experiments/", f"={ROOT}/experiments/") for o in typed[3:]]
    out, error = small_runs.start(main, [*options, "--dry_run", "--config.seeds=(0,)"], capsys)
    assert error is None and out.count('"shapes"') >= runs


COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 220)}


def write_pictures(folder: pathlib.Path) -> None:
    """Writes PICTURES with squares of three colours, and captions.csv for two thirds of them."""
    rng = np.random.default_rng(0)
    (folder / "PICTURES" / "sub").mkdir(parents=True)
    captions = [("file", "caption")]
    for number in range(24):
        for colour, rgb in COLOURS.items():
            name = f"{'sub/' if number % 2 else ''}{colour}{number}.png"
            pixels = np.clip(rgb + rng.normal(0, 12, (8, 8, 3)), 0, 255).astype(np.uint8)
            PIL.Image.fromarray(pixels).save(folder / "PICTURES" / name)
            if number < 16:
                captions.append((name, f"a {colour} square"))
    with (folder / "captions.csv").open("w", newline="") as file:
        csv.writer(file).writerows(captions)


def test_picture_folder_example_runs(tmp_path):
    """Runs `picture_folder.sh`, searches, docs/search.md and the server with toy encoders."""
    write_pictures(tmp_path)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    toys = shlex.join([sys.executable, str(ROOT / "tests" / "toy_python.py")])
    python.write_text(f'#!/bin/sh\nexec {toys} "$@"\n')
    python.chmod(0o755)
    path = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def run(*words):
        done = subprocess.run(words, env=os.environ | path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done

    typed = next(words for _, words in documented() if "examples/picture_folder.sh" in words)
    script = [word.replace("examples/", f"{ROOT}/examples/") for word in typed]
    short = ["--config.train.steps=2", "--config.start=teacher"]
    run(*[word.replace("red car", "red square") for word in script], *short)
    out = tmp_path / "runs" / "pictures"
    found = re.findall(r"<br>(?:sub/)?([a-z]+)\d+.png", (out / "found.html").read_text())
    assert found == ["red"] * 10
    assert "data:image/jpeg" in (out / "run" / "report.html").read_text()

    again = next(words for _, words in documented() if "--page=runs/pictures/bird.html" in words)
    done = run(*[word.replace("a bird", "a blue square") for word in again])
    assert (
        done.stdout.count("blue") == 10 and "image rows" not in done.stderr
    )  # the pictures are embedded already
    assert (out / "bird.html").read_text().count("data:image/jpeg") == 10
    model = next(word for word in again if word.startswith("--model="))
    picture = ["--query_image=PICTURES/green0.png", "--texts=captions.csv", "--top=1"]
    assert "a green square" in run("python", "-m", "sotalign_jax.search", model, *picture).stdout

    page = (ROOT / "docs" / "search.md").read_text()
    for there, here in (("car.jpg", "red0.png"), ("bird.jpg", "blue0.png")):
        page = page.replace(there, here)
    (tmp_path / "search.md").write_text(page)
    run("python", "-m", "doctest", "search.md")

    served = next(words for _, words in documented() if "sotalign_jax.serve" in words)
    options = {"env": os.environ | path, "text": True, "stdout": subprocess.PIPE}
    with subprocess.Popen([str(python), *served[1:], "--port=0"], **options) as process:
        address = process.stdout.readline().split()[-1]
        with urllib.request.urlopen(f"{address}?q=a+blue+square") as answer:
            found = re.findall(r"alt='a (\w+) square'", answer.read().decode())
        process.terminate()
    assert len(found) > 3 and set(found) == {"blue"} and process.returncode == 0
