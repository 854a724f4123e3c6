"""Specifications of the cells of panels, and the runs and measurements that compute them."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from experiments import run, workdir
from experiments.paper import sizes as sizes_lib
from experiments.paper.panels import Panel, Place
from experiments.paper.sizes import Settings, Sizes
from experiments.paper.sources import MAIN, Data, Photographs, Sources
from experiments.spec import Run, expand
from experiments.spec import Spec as Comparison
from experiments.store import Results, Spec, Store, key_of
from sotalign_jax import checks, data, diagnostics, evaluation, heads, recipe, storage, teachers

POOL_READERS = ("refined_cca", "align")
"""Values of `method` that are no entry of `methods.METHODS` and read the pools."""
ARMS = ("unrolled scan", "ott-jax implicit", "ours, from K")
"""Gradients that the paper compares, by their names in `benchmarks.peers`."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """Sizes of the runs, and the sources that they read."""

    scale: str = "full"
    sources: Sources = dataclasses.field(default_factory=Photographs)
    # Options by method that validation has selected, see `selection`.
    chosen: Mapping[str, Settings] = dataclasses.field(default_factory=dict)

    @property
    def sizes(self) -> Sizes:
        """Sizes at this scale."""
        return sizes_lib.SIZES[self.scale]

    def settings(self, changes: Settings, seed: int) -> tuple[Run, Data]:
        """Returns the config and the data of a run.

        Args:
            changes: Settings of a place.
            seed: Seed of the run.
        """
        asked = {k.removeprefix("data."): v for k, v in changes.items() if k.startswith("data.")}
        usual = {"n_pairs": self.sizes.n_pairs, "n_unpaired": self.sizes.unpaired[-1]}
        # The first encoders are the default. Naming them must not give another specification.
        if asked.get("encoders") == self.sources.names.encoders[0]:
            del asked["encoders"]
        wanted = Data(**{**usual, **asked, "seed": seed})
        others = ("data.", "metric", "method", "classes")
        given = {k: v for k, v in changes.items() if not k.startswith(others)}
        method = changes["method"] if changes["method"] != "teacher" else given["teacher"]
        chosen = {**self._usual(method, wanted), **given, "method": method, "seed": seed}
        if method == "align" and "train.steps" not in given:  # as many as outside of the tables
            least, most = recipe.PRESETS["default"].steps
            chosen["train.steps"] = min(max(wanted.n_pairs // 10, least), most)
        return _config(json.dumps(chosen)), wanted

    def _usual(self, method: str, asked: Data) -> dict[str, Any]:
        """Returns the default settings of a method for some data."""
        n = asked.n_pairs
        usual = sizes_lib.usual(self.scale, n)
        if self.scale == "paper":
            options = {**sizes_lib.PAPER_OPTIONS.get(method, {}), **self.chosen.get(method, {})}
            return {**options, **usual}
        if n <= 1000 and asked.pairs != self.sources.names.speech:
            usual["train.learning_rate"] *= sizes_lib.RATE_SHARES.get(method, 1)
        # The paper's alpha of 1e-4 with 10,000 pairs is 1 / n. The tolerance is 1e-4 because the
        # published cells were computed before the training default became 1e-2. Both have the same
        # recall (docs/benchmarks.md).
        sotalign = {"sotalign.alpha": 3 / n, "sotalign.tolerance": 1e-4}
        return {**sotalign, **sizes_lib.OPTIONS.get(method, {}), **usual}

    def spec(self, changes: Settings, seed: int) -> dict[str, Any]:
        """Returns the specification of a cell.

        Args:
            changes: Settings of its place, with the metric.
            seed: Seed of the run or measurement.
        """
        kind, inputs = changes["metric"].partition("/")[0], self.sources.inputs
        if kind in SOLVER_MEASURES:
            rows = {
                "gradient": self.sizes.gradient_rows,
                "convergence": self.sizes.convergence_rows,
            }
            sizes = {"epsilon": changes["epsilon"], "rows": rows[kind]}
            return {"measure": kind, **sizes, **self._checkpoint(seed)}
        sizes = {"rows": self.sizes.distance_rows, "projections": self.sizes.projections}
        if kind == "between":
            left, right = sorted((changes["left"], changes["right"]))
            spec = {"left": left, "right": right, "side": changes["side"], "seed": seed}
            spec |= {"centred": True} if "centred" in changes else {}
            return {"measure": kind, **spec, **sizes, "inputs": inputs((left, right))}
        config, asked = self.settings(changes, seed)
        if kind in MEASURES:
            return {"measure": kind, **sizes, "data": asked._asdict(), "inputs": inputs(asked)}
        method = config.chosen
        # A method that reads no pools has one result for all of them, computed once.
        reads_pools = config.method in POOL_READERS if method is None else method.pools
        if not reads_pools:
            asked = asked._replace(n_unpaired=0, images=None, texts=None, noise=0.0)
        plain = {key: value for key, value in config.to_json().items() if key != "data"}
        return {"config": plain, "data": asked._asdict(), "inputs": inputs(asked)}

    def _checkpoint(self, seed: int) -> dict[str, Any]:
        """Returns the part of a specification that determines the matrices of the solvers.

        The paper takes them from a checkpoint of SAIL. On photographs the student is shorter, see
        `benchmarks.common.photos_problem`.
        """
        if not self.sources.given:
            return {"inputs": self.sources.inputs([MAIN])}
        config, asked = self.settings({"method": "sail"}, seed)
        plain = {key: value for key, value in config.to_json().items() if key != "data"}
        return {"config": plain, "data": asked._asdict(), "inputs": self.sources.inputs(asked)}

    def plan(self, panel: Panel) -> Panel:
        """Returns a panel with the specifications of its cells."""
        specs = {
            place: [self.spec(changes, seed) for seed in panel.seeds]
            for place, changes in panel.places().items()
        }
        shares = {}
        if panel.corner == "pairs":
            for (row, _), (spec, *_) in specs.items():
                width = self.sources.input_dimensions(spec["data"]["pairs"])
                shares[row] = f"{spec['data']['n_pairs'] / width:.2g}"
        return dataclasses.replace(panel, specs=specs, shares=shares)


@functools.cache  # the argument is JSON because a dictionary cannot be hashed
def _config(changes: str) -> Run:
    """Returns the config of one run from its changes, as JSON."""
    (one,) = expand(Comparison().change(json.loads(changes))).values()
    return one


# --- results -----------------------------------------------------------------------------------


def fill(store: Store, sources: Sources, panels: Iterable[Panel]) -> dict[str, str]:
    """Computes the missing cells of panels.

    Args:
        store: Results to complete.
        sources: Sources of the data.
        panels: Panels with their specifications.

    Returns:
        Error messages of failed cells, by key.
    """
    folder = store.path.parent
    with storage.lock(folder / "lock"):
        workdir.write_json(folder / "environment.json", storage.environment())
    # Runs of the same shapes share compiled programs, also between processes.
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    wanted: dict[str, tuple[Spec, set[str]]] = {}
    for panel in panels:
        for _, spec, metric in panel.cells():
            wanted.setdefault(key_of(spec), (spec, set()))[1].add(metric)
    # Cells of the same data come one after the other, so that the data are loaded once.
    jobs = sorted(wanted.values(), key=lambda job: json.dumps(job[0].get("data")))
    failures = {}
    done = sum(store.has(*job) for job in jobs)
    with workdir.Progress(len(jobs), "cells", initial=done) as bar:
        for key, error in store.fill(jobs, functools.partial(compute, sources)):
            if error is not None:
                log = store.log(wanted[key][0]).relative_to(folder)
                failures[key] = f"{checks.first_line(error)} (see {log})"
            bar.advance()
    return failures


def collect(store: Store, panel: Panel, failures: Mapping[str, str]) -> Panel:
    """Returns a panel with the numbers of its finished cells.

    Args:
        store: Results.
        panel: Panel with its specifications.
        failures: Error messages of failed cells, by key.
    """
    values: dict[Place, list[float | None]] = {}
    missing = []
    for place, spec, metric in panel.cells():
        results = store.results(spec)
        values.setdefault(place, []).append(results.get(metric))
        if metric not in results:
            missing.append(f"{', '.join(place)}: {failures.get(key_of(spec), 'not run')}")
    known = {place: some for place, some in values.items() if some != [None] * len(some)}
    found = {place: np.array(some, float) for place, some in known.items()}  # None becomes NaN
    return dataclasses.replace(panel, found=found, failures=tuple(missing))


def compute(sources: Sources, spec: Spec, metrics: Iterable[str]) -> Results:
    """Computes the results of a specification.

    Args:
        sources: Sources of the data.
        spec: Specification of a run or of a measurement.
        metrics: Metrics that are needed. A run is evaluated on their galleries and classes only.

    Returns:
        Values by metric.
    """
    others = ("measure", "inputs", "data", "config")
    options = {key: value for key, value in spec.items() if key not in others}
    if spec.get("measure") in SOLVER_MEASURES:
        problem = _problem(sources, spec)
        return SOLVER_MEASURES[spec["measure"]](problem, epsilon=options["epsilon"])
    if "data" not in spec:
        return MEASURES[spec["measure"]](sources, **options)
    asked = Data(**spec["data"])
    dataset = _dataset(sources, asked)
    if "measure" in spec:
        return MEASURES[spec["measure"]](dataset, seed=asked.seed, **options)
    trained = _train(Run.from_json(spec["config"]), dataset)
    results: Results = {}
    for name in sorted({metric.partition("/")[0] for metric in metrics}):
        own = name in ("val", "test")
        if not own and sources.has(name, "classes"):
            task = sources.classes(name, asked.encoders)
            found = evaluation.evaluate_zero_shot(trained.x, trained.y, task)
            scores = {key.removeprefix("zero_shot/"): value for key, value in found.items()}
        else:
            gallery = getattr(dataset, name) if own else sources.gallery(name)
            scores = evaluation.evaluate(trained.x, trained.y, gallery)
        results |= {f"{name}/{key}": value for key, value in scores.items()}
    return results


@functools.lru_cache(maxsize=2)  # jobs are sorted by data, so few need to stay in memory
def _dataset(sources: Sources, asked: Data) -> data.Dataset:
    return sources.dataset(asked)


def _train(config: Run, dataset: data.Dataset) -> heads.Heads:
    """Trains the heads of a run."""
    resolved, dataset = run.resolve(config, dataset)
    return recipe.train(resolved, recipe.prepare(resolved, dataset)).heads


# --- measurements that need no training --------------------------------------------------------


def _mutual_knn(dataset: data.Dataset, *, seed: int, **sizes: int) -> Results:
    """Computes the mutual k-NN of the encoders on 1,024 pairs, in percent."""
    x, y = dataset.pairs_x, dataset.pairs_y
    # The score depends on the number of rows, so validation pairs are added if there are too few.
    if dataset.val is not None and len(x) < diagnostics.KNN_ROWS:
        _, first = np.unique(dataset.val.x_of_y, return_index=True)
        x, y = np.concatenate([x, dataset.val.x]), np.concatenate([y, dataset.val.y[first]])
    chosen = np.random.default_rng(seed).permutation(len(x))[: diagnostics.KNN_ROWS]
    return {"mutual_knn/percent": 100 * float(diagnostics.mutual_knn(x[chosen], y[chosen]))}


def _shift(dataset: data.Dataset, **sizes: int) -> Results:
    """Computes the sliced Wasserstein distances of the pools from the pairs, and their sum."""
    x = _distance(dataset.pool_x, dataset.pairs_x, **sizes)
    y = _distance(dataset.pool_y, dataset.pairs_y, **sizes)
    return {"shift/x": x, "shift/y": y, "shift/total": x + y}


def _share(dataset: data.Dataset, **sizes: int) -> Results:
    """Computes the distances of the pools as a share of that of random directions, in percent."""
    pools = {"x": (dataset.pairs_x, dataset.pool_x), "y": (dataset.pairs_y, dataset.pool_y)}
    shifts = {s: diagnostics.pool_shift(*rows, repeats=5, **sizes) for s, rows in pools.items()}
    return {f"share/{side}": 100 * shift.share for side, shift in shifts.items()}


def _between(
    sources: Sources, *, left: str, right: str, side: str, centred: bool = False, **sizes: int
) -> Results:
    """Computes the distance between two sources. `centred` subtracts the mean of each first."""
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
    """Computes the sliced Wasserstein distance of at most `rows` random rows of each set."""
    rng = np.random.default_rng(seed)
    chosen = [np.asarray(a[np.sort(rng.permutation(len(a))[:rows])]) for a in (x, y)]
    return diagnostics.sliced_wasserstein(*chosen, projections=projections, seed=seed)


def _gradient(problem: Any, *, epsilon: float) -> Results:
    """Measures memory, time and iterations of KLOT's gradient in float64."""
    checks.require("ott", extra="experiments")
    from benchmarks import gradient, peers

    # Rounding may keep float32 from reaching a marginal error of 1e-6, so this is float64.
    target = peers.Target(epsilon, epsilon, 1e-6, 5000, 5000)
    arms = [arm for arm in peers.ARMS if arm.name in ARMS]
    with jax.enable_x64(True):
        found = gradient.measure(problem, arms, target, repeats=2, time_limit=600.0)
    results: Results = {}
    for row in found:
        counts = row.student_iterations, row.teacher_iterations
        total = None if None in counts else sum(filter(None, counts))
        costs = {"memory": row.temporary_mib, "seconds": row.seconds, "iterations": total}
        results |= {f"gradient/{row.arm}/{kind}": value for kind, value in costs.items()}
    return results


def _convergence(problem: Any, *, epsilon: float) -> Results:
    """Measures the marginal errors after 100 iterations on the second affinity of a problem."""
    from benchmarks import convergence
    from sotalign_jax.ot.sinkhorn import reference

    k = problem.affinities()[1]
    plain = jax.jit(functools.partial(reference, epsilon=epsilon, iterations=100))(k)
    return {
        "convergence/textbook Sinkhorn": convergence.judge(k, plain),
        "convergence/ours": convergence.ours_within(k, epsilon, 100),
    }


def _problem(sources: Sources, spec: Spec) -> Any:
    """Returns the transport problem of a specification, on the rows of unpaired data."""
    from benchmarks import common

    if "config" not in spec:
        return common.photos_problem(spec["rows"])
    described = json.dumps({name: spec[name] for name in ("config", "data")}, sort_keys=True)
    return _trained_problem(sources, described, spec["rows"])


@functools.lru_cache(maxsize=1)  # all epsilons share the training
def _trained_problem(sources: Sources, described: str, rows: int) -> Any:
    """Returns the features of a CCA and of trained heads, on unpaired rows.

    Convergence is measured on the second affinity, which is that of the trained heads.
    """
    from benchmarks import common

    spec = json.loads(described)
    dataset = _dataset(sources, Data(**spec["data"]))
    resolved, dataset = run.resolve(Run.from_json(spec["config"]), dataset)
    prepared = recipe.prepare(resolved, dataset)
    trained = recipe.train(resolved, prepared).heads
    teacher = teachers.cca(dataset.pairs_x, dataset.pairs_y)
    x, y = (pool[: min(rows, len(pool))] for pool in (dataset.pool_x, dataset.pool_y))
    n = min(len(x), len(y))
    maps = (teacher.map_x, teacher.map_y, trained.x, trained.y)
    features = [evaluation.embed(one, side) for one, side in zip(maps, (x, y, x, y), strict=True)]
    return common.Problem("trained", *(np.asarray(some[:n]) for some in features))


_ALL = (_mutual_knn, _shift, _share, _between)
MEASURES: dict[str, Callable[..., Results]] = {made.__name__[1:]: made for made in _ALL}
"""Measurements of data by the first word of their metrics."""
SOLVER_MEASURES = {"gradient": _gradient, "convergence": _convergence}
"""Measurements of solvers on a transport problem."""
