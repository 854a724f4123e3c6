"""The lab makes the numbers behind tables and figures: each cell once, whoever asks for it.

A cell is a specification in JSON, which decides everything: a config and its data, or something to
measure. Its results are in `cells/KEY.json`, KEY being a hash of the specification. Cells with the
same data are made one after the other: the data and the compiled steps are kept.
Several processes may work in one folder; each takes cells that no other is making.
"""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import itertools
import json
import pathlib
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from ml_collections.config_dict import FrozenConfigDict

from experiments import config as config_lib
from experiments import run, workdir
from experiments.paper.panels import Cell, Changes, Panel
from experiments.paper.sources import MAIN, Data, Photographs, Sources
from sotalign_jax import checks, data, diagnostics, evaluation, heads, training

Results = dict[str, Any]
Asked = tuple[Mapping[str, Any], set[str]]
"""A cell, and the metrics that are wanted of it."""
ARMS = {
    "unrolled scan": "unrolled",
    "ott-jax implicit": "implicit (ott-jax)",
    "ours, from K": "closed form (ours)",
}
"""Ways to the gradient that the paper compares, by the benchmark's names."""
_EPSILONS = (0.5, 0.1, 0.05, 0.02, 0.01, 0.005)
# fmt: off
SIZES: dict[str, tuple[Any, Any, Any]] = {
    # Means and spreads of tables are over the seeds; large grids take the first.
    "seeds": ((0,), (0, 1, 2), (42,)),
    "n_pairs": (1000, 1000, 10_000),
    # Numbers of pairs to sweep, and fewer where options are swept, too.
    "pairs": ((100, 1000), (100, 1000, 3000), (100, 1000, 10_000, 100_000)),
    "few_pairs": ((100, 1000), (100, 1000, 3000), (1000, 10_000, 100_000)),
    # Numbers of unpaired rows to sweep; the last is that of most runs.
    "unpaired": ((300, 5000), (300, 3000, 20_000), (10_000, 100_000, 300_000, 1_000_000)),
    "all_pairs": (3000, 3000, 1_000_000),
    # Rows of each pool when sources of pools are compared: all have as many.
    "pool_rows": (2000, 2500, 1_000_000),
    "t1_pairs": (None, 10_000, None),
    "teacher_noise": ((0.0, 0.5), (0.0, 0.3, 0.5), (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)),
    # Learning rates and weights that are tried on validation.
    "rates": ((1e-3, 2e-3), (5e-4, 1e-3, 2e-3, 4e-3, 8e-3), (3e-5, 1e-4, 3e-4)),
    "pool_noise": ((0.0, 1.0), (0.0, 0.5, 1.0), (0.0, 0.25, 0.5, 0.75, 1.0)),
    "alphas": ((1e-3, 1e-2), (1e-4, 1e-3, 3e-3, 1e-2, 1e-1), (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)),
    "epsilons": ((0.005, 0.05), (0.005, 0.05, 0.2), (0.005, 0.01, 0.05, 0.1, 0.5)),
    "epsilon_changes": ({}, {}, {"sotalign.alpha": 1e-3}),
    "solver_rows": (192, 512, 10_000),
    "solver_epsilons": (_EPSILONS[::2], _EPSILONS, _EPSILONS),
    "distance_rows": (500, 1000, 100_000),
    "projections": (100, 500, 500),
}
# fmt: on
"""How large runs are, and the points of sweeps: quick, full (photographs), and as published."""
TUNED: dict[str, dict[str, Any]] = {
    "structure": {"structure.weight": 10.0, "structure.warmup": 0},
    "structure_semi": {"structure_semi.weight": 10.0, "structure_semi.warmup": 0},
    "nnclr": {"nnclr.weight_text": 10.0, "nnclr.weight_image": 10.0},
    "sclip": {"sclip.weight_text": 1.0, "sclip.weight_image": 0.0},
    # SigLIP's fixed margin turns all rows one way in 8 dimensions, where cosines of a random start
    # spread by 0.35: of n^2 entries n are pairs, so all cosines shrink to below the margin.
    "contrastive_mlp": {"contrastive_mlp.loss": "infonce"},
    "sue": {"sue.epochs": 15, "sue.mmd_epochs": 25},
}
"""Options by method, chosen on COCO's validation split (entry V1); the published warm-up of
STRUCTURE outlasts the steps."""
SHARES = {"sail": 0.25, "sail_semi": 0.25}
"""Learning rates of methods without other options with at most 1,000 pairs, as shares of the usual
one, likewise; with 10,000 pairs validation chose the usual one."""


@dataclasses.dataclass(frozen=True)
class Lab:
    """Where cells are kept, how large they are, and what data they stand on."""

    workdir: pathlib.Path
    scale: str = "full"
    sources: Sources = dataclasses.field(default_factory=Photographs)

    @property
    def sizes(self) -> types.SimpleNamespace:
        column = ("quick", "full", "paper").index(self.scale)
        return types.SimpleNamespace(**{name: sizes[column] for name, sizes in SIZES.items()})

    @property
    def seeds(self) -> tuple[int, ...]:
        return self.sizes.seeds

    def alone(self, source: str, n_pairs: int) -> dict[str, Any]:
        """Pairs, pools and galleries of one source."""
        names = {"data.pairs": source, "data.test": source}
        return {**names, "data.n_pairs": n_pairs, "data.n_unpaired": None}

    def settings(self, changes: Changes, seed: int) -> tuple[FrozenConfigDict, Data]:
        """The config that the changes describe, and its data."""
        asked = {k.removeprefix("data."): v for k, v in changes.items() if k.startswith("data.")}
        usual = {"n_pairs": self.sizes.n_pairs, "n_unpaired": self.sizes.unpaired[-1]}
        if asked.get("encoders") == self.sources.encoders[0]:
            del asked["encoders"]
        wanted = Data(**{**usual, **asked, "seed": seed})
        others = ("data.", "metric", "method", "chance")
        given = {k: v for k, v in changes.items() if not k.startswith(others)}
        method = changes["method"]
        method = given["teacher.kind"] if method == "teacher" else method
        own = {"method": method, "seed": seed}
        return _config(json.dumps({**self._usual(method, wanted), **given, **own})), wanted

    def _usual(self, method: str, asked: Data) -> dict[str, Any]:
        """Settings of a method on such data, unless an entry changes them."""
        n, quick = asked.n_pairs, self.scale == "quick"
        if self.scale == "paper":
            return {"train.pair_batch": 32_768} if n > 100_000 else {}
        # Lion moves a weight by at most the rate: steps x rate is about 0.2, as in the paper.
        share = SHARES.get(method, 1.0) if n <= 1000 else 1.0
        steps, rate, every = (100, 2e-3, 10) if n <= 1000 else (200, 1e-3, 10)
        if n >= 10_000:
            steps, rate, every = 600, 3e-4, 25
        return {
            "train.steps": 40 if quick else steps,
            "train.eval_every": 20 if quick else every,
            "train.learning_rate": share * (3e-3 if quick else rate),
            "train.pair_batch": 2048,
            "train.unpaired_batch": 512 if quick else 1024,
            "heads.dim": 256 if quick else 512,
            "heads.hidden": 512,
            "sotalign.alpha": 3 / n,  # the paper's 1e-4 with 10,000 pairs is 1 / n
            **TUNED.get(method, {}),
            **({"sue.epochs": 5, "sue.mmd_epochs": 10} if quick else {}),
        }

    def cell(self, changes: Changes, seed: int) -> dict[str, Any]:
        """The specification of the cell that has the metric of the changes."""
        kind = changes["metric"].partition("/")[0]
        if kind in ("gradient", "convergence"):
            return {"measure": kind, "epsilon": changes["epsilon"], "rows": self.sizes.solver_rows}
        sizes = {"rows": self.sizes.distance_rows, "projections": self.sizes.projections}
        if kind == "between":
            names = sorted((changes["left"], changes["right"]))
            spec = {"left": names[0], "right": names[1], "side": changes["side"], "seed": seed}
            spec |= {"centred": True} if "centred" in changes else {}
            return {"measure": kind, **spec, **sizes, "files": self.sources.stamps(names)}
        config, asked = self.settings(changes, seed)
        spec = {"data": asked._asdict(), "files": self.sources.stamps(asked)}
        if kind in _MEASURES:
            return {"measure": kind, **sizes, **spec}
        method = config_lib.method(config)
        if method is None or not method.pools:  # one run, whatever the pools
            spec["data"] |= {"n_unpaired": 0, "images": None, "texts": None, "noise": 0.0}
        plain = {key: value for key, value in config_lib.plain(config).items() if key != "data"}
        return {"config": plain, **spec}

    def plan(self, panel: Panel) -> Panel:
        """The panel with the cells that it needs."""
        cells: dict[tuple[str, str], list[Cell]] = {}
        for place, changes in panel.places().items():
            specs = [self.cell(changes, seed) for seed in panel.seeds]
            cells[place] = [Cell(key_of(spec), spec, changes["metric"]) for spec in specs]
        return dataclasses.replace(panel, cells=cells)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Lets one process at a time write what all of them write."""
        (self.workdir / "cells").mkdir(parents=True, exist_ok=True)
        with (self.workdir / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def path(self, key: str) -> pathlib.Path:
        return self.workdir / "cells" / f"{key}.json"

    def known(self, key: str) -> dict[str, Any]:
        """Specification, results and seconds of a cell; no results unless it was made."""
        path = self.path(key)
        return workdir.read_json(path) if path.exists() else {"results": {}, "seconds": 0.0}

    def make(self, panels: Iterable[Panel]) -> dict[str, str]:
        """Makes the cells of the panels that are missing; why others failed, by key."""
        wanted: dict[str, Asked] = {}
        for cell in itertools.chain.from_iterable(panel.every_cell() for panel in panels):
            wanted.setdefault(cell.key, (cell.spec, set()))[1].add(cell.metric)
        waiting = [
            asked
            for key, asked in wanted.items()
            if not asked[1] <= self.known(key)["results"].keys()
        ]
        waiting.sort(key=lambda asked: json.dumps(asked[0].get("data")))  # which is loaded once
        failures: dict[str, str] = {}
        with self.writing():
            workdir.write_json(self.workdir / "environment.json", workdir.environment())
        # Compiled programs are kept: runs of one shape share them.
        jax.config.update("jax_compilation_cache_dir", str(self.workdir / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        done = len(wanted) - len(waiting)
        with workdir.Progress(len(wanted), "cells", initial=done) as bar:
            for patient in (False, True):  # what another process is making comes last
                asked, waiting = waiting, []
                for one in asked:
                    try:
                        failures |= self.attempt(one, patient=patient)
                        bar.advance()
                    except BlockingIOError:
                        waiting.append(one)
        return failures

    def collect(self, panel: Panel, failures: Mapping[str, str]) -> Panel:
        """The panel with the numbers of its finished cells."""
        found, missing = {}, []
        for (row, column), cells in panel.cells.items():
            results = [self.known(cell.key)["results"] for cell in cells]
            values = [known.get(cell.metric) for cell, known in zip(cells, results, strict=True)]
            if any(value is not None for value in values):
                found[row, column] = np.array(values, float)  # None becomes NaN
            missing += [
                f"{row}, {column}: {failures.get(cell.key, 'not run')}"
                for cell, known in zip(cells, results, strict=True)
                if cell.metric not in known
            ]
        return dataclasses.replace(panel, found=found, failures=tuple(missing))

    def kept(self, keys: Iterable[str]) -> str:
        """What is known of cells, a line of JSON each."""
        made = [self.known(key) for key in sorted(set(keys)) if self.path(key).exists()]
        lines = [json.dumps(one, sort_keys=True, separators=(",", ":")) for one in made]
        return "".join(f"{line}\n" for line in lines)

    def take(self, path: pathlib.Path) -> None:
        """Reads the cells of a file, as `kept` lists them; those that are here already stay."""
        with self.writing():
            for one in map(json.loads, path.read_text("utf-8").splitlines()):
                if not (at := self.path(key_of(one["spec"]))).exists():
                    workdir.write_json(at, one)

    def attempt(self, asked: Asked, *, patient: bool = True) -> dict[str, str]:
        """Makes one cell unless another process did; {key: why} if it fails.

        While another process makes it, waits or, if not `patient`, raises BlockingIOError.
        """
        spec, metrics = asked
        key = key_of(spec)
        with self.path(key).with_suffix(".log").open("a", encoding="utf-8") as log:
            # Lifted by the system even after a kill.
            fcntl.flock(log, fcntl.LOCK_EX | (0 if patient else fcntl.LOCK_NB))
            known = self.known(key)["results"]
            if metrics <= known.keys():
                return {}
            start = time.process_time()
            try:
                with contextlib.redirect_stderr(log):
                    found = known | self.compute(spec, metrics | known.keys())
            except Exception as error:  # one cell of many: the others are worth having
                traceback.print_exc(file=log)
                return {key: f"{checks.first_line(error)} (see cells/{key}.log)"}
            seconds = round(time.process_time() - start, 1)
            workdir.write_json(self.path(key), {"spec": spec, "results": found, "seconds": seconds})
        return {}

    def compute(self, cell: Mapping[str, Any], metrics: Iterable[str]) -> Results:
        """The results of a cell; a run is evaluated on the sets that the metrics name."""
        if "measure" in cell:
            options = {key: v for key, v in cell.items() if key not in ("measure", "files")}
            return _MEASURES[cell["measure"]](self.sources, **options)
        asked = Data(**cell["data"])
        dataset = _dataset(self.sources, asked)
        trained = _train(FrozenConfigDict(cell["config"]), dataset)
        results: Results = {}
        for name in sorted({metric.partition("/")[0] for metric in metrics}):
            own = name in ("val", "test")
            if not own and self.sources.has(name, "classes"):
                task = self.sources.classes(name, asked.encoders)
                found = evaluation.evaluate_zero_shot(trained.x, trained.y, task)
                scores = {key.removeprefix("zero_shot/"): value for key, value in found.items()}
            else:
                gallery = getattr(dataset, name) if own else self.sources.gallery(name)
                scores = evaluation.evaluate(trained.x, trained.y, gallery)
            results |= {f"{name}/{key}": value for key, value in scores.items()}
        return results


@functools.cache
def _config(changes: str) -> FrozenConfigDict:
    """The config of one run, from its changes in JSON."""
    config = config_lib.default()
    config_lib.update(config, json.loads(changes))
    (one,) = config_lib.runs(config).values()
    return one


def key_of(cell: Mapping[str, Any]) -> str:
    """The name of a cell's file.

    >>> key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(cell, sort_keys=True).encode()).hexdigest()[:16]


# --- runs --------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def _dataset(sources: Sources, asked: Data) -> data.Dataset:
    return sources.dataset(asked)


def _train(config: FrozenConfigDict, dataset: data.Dataset) -> heads.Heads:
    """The heads of a run: trained, fitted at once, or a teacher's maps."""
    prepared = run.prepare(config, dataset)
    method, start = prepared.method, prepared.start
    if method is None:
        return start
    train = config_lib.train(config)
    return training.fit(method, start, dataset, train, teacher=prepared.teacher)[0]


# --- measures that need no training ------------------------------------------------------------


def _mutual_knn(sources: Sources, *, data: dict[str, Any], **sizes: int) -> Results:
    """Mutual k-NN of the encoders, in percent, on 1,024 pairs; validation makes up for few."""
    dataset = _dataset(sources, Data(**data))
    x, y = dataset.pairs_x, dataset.pairs_y
    if dataset.val is not None and len(x) < diagnostics.KNN_ROWS:
        _, first = np.unique(dataset.val.x_of_y, return_index=True)
        x, y = np.concatenate([x, dataset.val.x]), np.concatenate([y, dataset.val.y[first]])
    chosen = np.random.default_rng(data["seed"]).permutation(len(x))[: diagnostics.KNN_ROWS]
    return {"mutual_knn/percent": 100 * float(diagnostics.mutual_knn(x[chosen], y[chosen]))}


def _shift(sources: Sources, *, data: dict[str, Any], rows: int, projections: int) -> Results:
    """Sliced Wasserstein distances of the pools from the pairs, and their sum."""
    dataset = _dataset(sources, Data(**data))
    sizes = {"rows": rows, "projections": projections, "seed": data["seed"]}
    x = _distance(dataset.pool_x, dataset.pairs_x, **sizes)
    y = _distance(dataset.pool_y, dataset.pairs_y, **sizes)
    return {"shift/x": x, "shift/y": y, "shift/total": x + y}


def _share(sources: Sources, *, data: dict[str, Any], **sizes: int) -> Results:
    """How far the pools are on the way from the pairs to random directions, in percent."""
    dataset = _dataset(sources, Data(**data))
    pools = {"x": (dataset.pairs_x, dataset.pool_x), "y": (dataset.pairs_y, dataset.pool_y)}
    options = {**sizes, "repeats": 5, "seed": data["seed"]}
    shifts = {side: diagnostics.pool_shift(*rows, **options) for side, rows in pools.items()}
    return {f"share/{side}": 100 * shift.share for side, shift in shifts.items()}


def _between(
    sources: Sources, *, left: str, right: str, side: str, centred: bool = False, **sizes: int
) -> Results:
    """The distance between two sources; `centred`, once each has lost its mean."""
    rng = np.random.default_rng((sizes["seed"], 7))
    shape = sizes["rows"], sources.rows(MAIN, side).shape[1]
    sets = [
        rng.standard_normal(shape) if name == "noise" else sources.rows(name, side)
        for name in (left, right)
    ]
    if centred:
        sets = [rows - np.mean(rows, axis=0) for rows in map(np.asarray, sets)]
    same = left == right == "noise"
    return {"between/distance": 0.0 if same else _distance(*sets, **sizes)}


def _distance(x: Any, y: Any, *, seed: int, rows: int, projections: int) -> float:
    """Of at most `rows` rows of each set, chosen by the seed, which draws the planes too."""
    rng = np.random.default_rng(seed)
    chosen = [np.asarray(a[np.sort(rng.permutation(len(a))[:rows])]) for a in (x, y)]
    return diagnostics.sliced_wasserstein(*chosen, projections=projections, seed=seed)


def _gradient(sources: Sources, *, epsilon: float, rows: int) -> Results:
    """Memory, time and iterations of KLOT's gradient to a marginal error of 1e-6, in float64."""
    checks.require("ott", extra="experiments")
    from benchmarks import gradient, peers

    target = peers.Target(epsilon, epsilon, 1e-6, 5000, 5000)
    arms = [arm for arm in peers.ARMS if arm.name in ARMS]
    problem = _problem(sources, rows)
    with jax.enable_x64(True):
        found = gradient.measure(problem, arms, target, repeats=2, time_limit=600.0)
    results: Results = {}
    for row in found:
        counts = row.student_iterations, row.teacher_iterations
        results |= {
            f"gradient/{row.arm}/memory": row.temporary_mib,
            f"gradient/{row.arm}/seconds": row.seconds,
            f"gradient/{row.arm}/iterations": None if None in counts else sum(filter(None, counts)),
        }
    return results


def _convergence(sources: Sources, *, epsilon: float, rows: int) -> Results:
    """Marginal errors after 100 iterations on a teacher's affinity, of total mass 1."""
    from benchmarks import convergence
    from sotalign_jax.ot.sinkhorn import reference

    k = _problem(sources, rows).affinities()[1]
    plain = jax.jit(functools.partial(reference, epsilon=epsilon, iterations=100))(k)
    return {
        "convergence/textbook Sinkhorn": convergence.judge(k, plain),
        "convergence/ours": convergence.ours_within(k, epsilon, 100),
    }


def _problem(sources: Sources, n: int) -> Any:
    """Unpaired rows as a CCA teacher and a briefly trained student see them, or random ones."""
    from benchmarks import common

    return common.random_problem(n) if n > 5000 or sources.given else common.photos_problem(n)


_MEASURES: dict[str, Callable[..., Results]] = {
    "mutual_knn": _mutual_knn,
    "shift": _shift,
    "share": _share,
    "between": _between,
    "gradient": _gradient,
    "convergence": _convergence,
}
