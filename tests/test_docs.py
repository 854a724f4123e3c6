"""Everything that README, docs and examples tell people to type.

Python is run as it stands, up to the `SMALLER` numbers below. Of commands, flags, values and config
files are checked; those in `RUN` are started, with small files and settings.
"""

import ast
import contextlib
import importlib
import json
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib

import numpy as np
import pytest
import small_runs

from experiments import config as config_lib
from experiments import main
from sotalign_jax import checks

ROOT = small_runs.ROOT
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if "results" not in path.parts),
]
SMALLER = {"range(61)": "range(2)", '"steps": 60': '"steps": 2', "steps=100": "steps=2"}
"""What is smaller here than on the page: enough to see that every line works."""
TOOLS = {"pip", "python", "python3", "source", "bash", "pytest", "mkdocs", "apt-get", "cd", "git"}
"""Commands that are not ours."""


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


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.stem)
def test_python_of_a_page_runs_from_top_to_bottom(page):
    run_python([part for part in blocks(page, "python") if "--8<--" not in part], page.name)


@pytest.mark.parametrize("name", ["klot_in_optax.py", "new_method.py"])
def test_examples_run(name, capsys):
    run_python([(ROOT / "examples" / name).read_text()], name)
    assert len(capsys.readouterr().out.splitlines()) >= 1


def test_the_notebook_runs_and_keeps_its_outputs():
    notebook = json.loads((ROOT / "examples" / "align.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    run_python(["".join(cell["source"]) for cell in cells], "align.ipynb")
    kept = [output for cell in cells for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in kept)
    assert not any(output["output_type"] == "error" for output in kept)


# --- commands -------------------------------------------------------------------------------------


def commands(text: str) -> list[list[str]]:
    """Words of each command; what stands before `&&` is a command of its own."""
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
    return found + [("picture_folder.sh", w) for w in commands(script) if w[0] == "python"]


def check_config(options: dict[str, str]) -> None:
    """The config file exists and knows every setting that is changed."""
    file, _, switches = options.pop("config", "").partition(":")
    if not file:
        return
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    assert (ROOT / file).exists()
    config = module.get_config("" if switches.startswith("from=") else switches)
    for key, value in options.items():
        with contextlib.suppress(ValueError, SyntaxError):
            value = ast.literal_eval(value)
        config_lib.update(config, {key.removeprefix("config."): value})


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
        delattr(flags.FLAGS, flag.name)  # the next command may have one of the same name
print(json.dumps(found))
"""


def flags_of(modules: set[str]) -> dict[str, dict[str, list[str] | None]]:
    """The flags of commands, with the values of those that have a few."""
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


def is_ours(words: list[str]) -> bool:
    return words[1:2] == ["-m"] and words[2].startswith(("experiments", "benchmarks"))


@pytest.mark.filterwarnings("ignore:JAXopt:DeprecationWarning")  # ott-jax imports it
def test_commands_have_the_flags_that_are_typed(capsys):
    typed = [(page, w[2].replace("extract", "extract.__main__"), w) for page, w in documented()
             if is_ours(w)]  # fmt: skip
    assert len(typed) > 20
    known = flags_of({module for _, module, _ in typed if module.startswith("experiments")})
    for page, module, words in typed:
        try:
            if module in known:
                check_ours(words[3:], known[module])
            else:
                check_benchmark(module, words[3:], capsys)
        except (AssertionError, checks.InputError) as error:
            raise AssertionError(f"{page}: {shlex.join(words)}: {error}") from error


def test_other_commands_name_what_exists():
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


@pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")  # ml_collections
def test_your_own_files(tmp_path, capsys):
    """The guide's commands on small files, with `smoke` settings and CCA alone."""
    small_runs.write_files(tmp_path)
    guide = [w for page, w in documented() if page == "guide.md" and "experiments.main" in w]
    by_name, by_folder = guide[:2]
    for name, kind in (("images", "x"), ("texts", "y")):
        for part in ("", "val_", "test_"):
            np.save(f"{part}{name}.npy", np.load(f"{part}{kind}.npy"))
    assert "R@1" in run_command(by_name, capsys)
    assert (tmp_path / "runs" / "mine" / "report.html").stat().st_size > 10_000
    by_folder = [word.replace("FOLDER", str(tmp_path)).replace("mine", "two") for word in by_folder]
    options = [*by_folder, "--config.data.n_pairs=60"]
    assert "R@1" in run_command(options, capsys)
