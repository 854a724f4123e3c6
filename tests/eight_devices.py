"""Tests of rows sharded over eight devices. `test_sharding` runs this file in its own process."""

import dataclasses
import functools
import math
import re

import compile_cache
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_refine

import sotalign_jax as sota
from benchmarks import compile as targets
from experiments import workdir
from sotalign_jax import checks, data, heads, methods, teachers, training
from sotalign_jax.cca import refine
from sotalign_jax.ot import blocks, device, sharding

N, M, D = 61, 50, 8  # neither N nor M is a multiple of eight


@pytest.fixture(scope="module", autouse=True)
def _compiled(tmp_path_factory):
    with compile_cache.kept_in(tmp_path_factory.mktemp("compiled")):
        yield


@pytest.fixture(scope="module")
def mesh():
    return sharding.rows_mesh()


def features(dtype=jnp.float64):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(rows, D)), dtype) for rows in (N, M, N, M)]


def on(mesh, function, *arguments):
    """Returns jit(function)(*arguments), called with the mesh in context."""
    with jax.set_mesh(mesh):
        return jax.jit(function)(*arguments)


def assert_close(actual, expected, rtol=1e-7):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        scale = np.abs(b).max(where=np.isfinite(b), initial=0)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=max(rtol * scale, 1e-12))


def test_rows_mesh_uses_the_requested_number_of_devices(mesh):
    assert mesh.size == len(jax.devices()) == 8
    assert sharding.rows_mesh(1) is None and sharding.rows_mesh(2).size == 2
    with pytest.raises(checks.InputError, match=r"mesh .*9"):
        sharding.rows_mesh(9)


@pytest.mark.parametrize("block_size", [None, 5])
def test_klot_from_embeddings_on_mesh_matches_one_device(block_size, mesh, x64):
    f, g, z, w = features()

    def loss(f, g):
        return sota.klot_from_embeddings(
            f, g, z, w, block_size=block_size, tolerance=1e-9, return_aux=True
        )

    function = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    assert_close(on(mesh, function, f, g), jax.jit(function)(f, g))


@pytest.mark.parametrize(("memory", "stored"), [(2**20, True), (2000, False)])
def test_klot_from_embeddings_on_mesh_with_int8_kernels(memory, stored, mesh, monkeypatch):
    """Covers stored float32 kernels beside the int8 kernels, and streamed exact sweeps."""
    monkeypatch.setattr(blocks, "INT8_ENTRIES", 1)
    arrays = features(jnp.float32)
    profile = device.Profile("test", memory=memory)
    own = blocks.storage(-(-N // 8), M, jnp.float32, profile)
    assert own.int8 and (own.block_size is None) == stored
    loss = functools.partial(sota.klot_from_embeddings, epsilon_star=0.01, tolerance=1e-5)
    expected = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*arrays)
    with device.compiling_for(profile):
        actual = on(mesh, jax.value_and_grad(functools.partial(loss), argnums=(0, 1)), *arrays)
    assert_close(actual, expected, rtol=2e-3)


def test_klot_and_sinkhorn_on_mesh_with_weights(mesh, x64):
    f, g, z, w = features()
    k, k_star = sota.cosine(f, g), sota.cosine(z, w)
    log_a = jnp.full(N, -jnp.log(N - 3)).at[jnp.array([0, 7, 60])].set(-jnp.inf)

    def both(k):
        plan = sota.sinkhorn(jax.lax.stop_gradient(k), epsilon=0.02, log_a=log_a, tolerance=1e-9)
        return sota.klot(k, k_star, log_a=log_a, tolerance=1e-9), plan.matrix()

    function = jax.value_and_grad(both, has_aux=True)
    assert_close(on(mesh, function, k), jax.jit(function)(k))


def loss_and_gradients(f, g, z, w):
    """Computes both losses, their gradients in f and g, and a plan in one program."""

    def losses(f, g):
        k = sota.cosine(f, g)
        plan = sota.sinkhorn(jax.lax.stop_gradient(k), epsilon=0.1, tolerance=1e-9)
        value, aux = sota.klot_from_embeddings(f, g, z, w, tolerance=1e-9, return_aux=True)
        other = sota.klot(k, sota.cosine(z, w), tolerance=1e-9)
        return value + 2 * other, (value, other, plan.error, aux.student.v, aux.teacher.converged)

    return jax.value_and_grad(losses, argnums=(0, 1), has_aux=True)(f, g)


def rows_of(placed):
    """Returns the features, cut to multiples of eight rows if they are split."""
    # device_put only splits rows that divide by the devices. Replicated rows are padded later.
    return [x[: len(x) // 8 * 8] for x in features()] if placed == "split" else features()


@functools.cache
def loss_and_gradients_on_one_device(placed):
    return jax.jit(loss_and_gradients)(*rows_of(placed))


KINDS = {"auto": jax.sharding.AxisType.Auto, "explicit": jax.sharding.AxisType.Explicit}


@pytest.mark.parametrize(
    ("kind", "shape", "placed"),
    [("explicit", (8,), "split"), ("explicit", (2, 4), "replicated"), ("auto", (2, 4), "split")],
)
def test_losses_match_on_auto_and_explicit_meshes(kind, shape, placed, x64):
    """The losses use all axes of a mesh, Auto or Explicit, for sharded and replicated arrays."""
    names = ("data", "model")[: len(shape)]
    mesh = jax.make_mesh(shape, names, (KINDS[kind],) * len(shape))
    spec = jax.sharding.PartitionSpec(names[0] if placed == "split" else None)
    with jax.set_mesh(mesh):
        arrays = jax.device_put(rows_of(placed), jax.NamedSharding(mesh, spec))
        actual = jax.jit(loss_and_gradients)(*arrays)
    assert_close(jax.device_get(actual), loss_and_gradients_on_one_device(placed))


def explicit_mesh(shape):
    names = ("data", "model")[: len(shape)]
    return jax.make_mesh(shape, names, (jax.sharding.AxisType.Explicit,) * len(shape))


def test_plan_matrix_of_affinity_sharded_by_columns(x64):
    f, g, _, _ = features()
    k = sota.cosine(f[:24], g[:16])
    mesh = explicit_mesh((8,))
    split = jax.device_put(k, jax.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "data")))

    def solve(k):
        plan = sota.sinkhorn(k, epsilon=0.1, tolerance=1e-9)
        return plan.matrix(), plan.u, plan.v

    with jax.set_mesh(mesh):
        actual = jax.jit(solve)(split)
    expected = jax.jit(solve)(k)
    assert_close(jax.device_get(actual), expected)
    assert_close(
        jax.device_get(sota.sinkhorn(split, epsilon=0.1, tolerance=1e-9).matrix()), expected[0]
    )


def one_problem(f, g, z, w):
    """Computes both losses, their gradient in f, and a plan."""
    options = {"epsilon": 0.2, "epsilon_star": 0.2, "tolerance": 1e-9}

    def losses(f):
        k = sota.cosine(f, g)
        value = sota.klot_from_embeddings(f, g, z, w, **options)
        other = sota.klot(k, sota.cosine(z, w), **options)
        plan = sota.sinkhorn(jax.lax.stop_gradient(k), epsilon=0.2, tolerance=1e-9)
        return value + 2 * other, (value, other, plan.matrix())

    return jax.value_and_grad(losses, has_aux=True)(f)


def test_vmap_over_problems_sharded_on_explicit_mesh(x64):
    """Problems stay on their devices. Mesh axes that do not split them may stay unused."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(8, rows, 4))) for rows in (12, 10, 12, 10)]
    problems = jax.jit(jax.vmap(one_problem))
    expected = problems(*arrays)
    for shape in ((8,), (2, 4)):
        mesh = explicit_mesh(shape)
        with jax.set_mesh(mesh):
            split = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
            actual = problems(*jax.device_put(arrays, split))
        for leaf in jax.tree.leaves(actual):
            assert leaf.sharding.shard_shape(leaf.shape)[0] == 8 // shape[0]
        assert_close(jax.device_get(actual), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_klot_from_embeddings_shards_memory_without_mesh_context(kind):
    """Sharded arguments suffice: without a mesh in context, memory per device still shrinks."""
    mesh = jax.make_mesh((8,), ("rows",), (KINDS[kind],))
    n, d = 1024, 16

    def memory(sharding):
        x = jax.ShapeDtypeStruct((n, d), jnp.float32, sharding=sharding)
        program = jax.jit(sota.klot_from_embeddings).lower(x, x, x, x).compile()
        return program.memory_analysis().temp_size_in_bytes

    alone = memory(None)
    assert alone >= 4 * n * n and memory(sharding.split_rows(mesh)) <= alone / 4


def test_losses_inside_user_shard_map(mesh, x64):
    """Each device solves its own problem. The gradients are those of the mean loss."""
    split, whole = jax.sharding.PartitionSpec("rows"), jax.sharding.PartitionSpec()
    f, g, z, w = (x[:48] for x in features())

    def mean_loss(f, g, z, w):
        def local(f, g, z, w):
            k = sota.cosine(f, g)
            plan = sota.sinkhorn(jax.lax.stop_gradient(k), epsilon=0.1)
            value = sota.klot_from_embeddings(f, g, z, w) + sota.klot(k, sota.cosine(z, w))
            streamed = sota.klot_from_embeddings(f, g, z, w, block_size=4)
            return jax.lax.pmean(value + streamed, "rows"), plan.error[None]

        mapped = jax.shard_map(
            local, in_specs=(split, whole, split, whole), out_specs=(whole, split)
        )
        return mapped(f, g, z, w)

    def by_hand(f, g, z, w):
        def part(rows):
            f, z = rows
            from_k = sota.klot(sota.cosine(f, g), sota.cosine(z, w))
            return 2 * sota.klot_from_embeddings(f, g, z, w) + from_k

        return jnp.mean(jax.lax.map(part, (f.reshape(8, 6, D), z.reshape(8, 6, D))))

    function = jax.value_and_grad(mean_loss, argnums=(0, 1), has_aux=True)
    (value, errors), gradients = on(mesh, function, f, g, z, w)
    assert (errors <= 1e-4).all() and errors.shape == (8,)
    wanted = jax.jit(jax.value_and_grad(by_hand, argnums=(0, 1)))(f, g, z, w)
    assert_close((value, gradients), wanted, rtol=1e-4)
    # Large enough for the fused sweep of accelerators: tracing covers every platform's branch.
    own, other = (jax.ShapeDtypeStruct((n, D), jnp.float32) for n in (8 * 2048, 2048))
    with jax.set_mesh(mesh):
        assert jax.eval_shape(mean_loss, own, other, own, other)[0].shape == ()


def test_structure_regularizer_on_mesh_matches_one_device(mesh, x64):
    x, _, z, _ = features()

    def value(z):
        return methods.Structure(block_size=5).regularizer(x, z)

    assert_close(on(mesh, jax.value_and_grad(value), z), jax.value_and_grad(value)(z))


# --- training ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dataset():
    rng = np.random.default_rng(0)
    z, to_x, to_y = rng.normal(size=(280, 6)), rng.normal(size=(6, 12)), rng.normal(size=(6, 10))
    x = (z @ to_x + 0.3 * rng.normal(size=(280, 12))).astype(np.float32)
    y = (z @ to_y + 0.3 * rng.normal(size=(280, 10))).astype(np.float32)
    return data.dataset(
        (x[:60], y[:60]), x=x[60:160], y=y[140:230], val=data.gallery(x[230:], y[230:])
    )


CONFIG = training.TrainConfig(
    steps=20, pair_batch=30, unpaired_batch=45, learning_rate=3e-3, eval_every=5
)


class Recorder(training.Observer):
    """Records metrics and snapshots."""

    def __init__(self):
        self.values, self.snapshots = [], {}

    def metrics(self, step, values):
        self.values.append({name: float(value) for name, value in values.items()})

    def snapshot(self, step, snapshot):
        self.snapshots[step] = jax.tree.map(np.array, snapshot)


def train(dataset, method, config=CONFIG, **options):
    recorder = Recorder()
    start = heads.build_heads(12, 10, 8, seed=1)
    teacher = teachers.cca(dataset.pairs_x, dataset.pairs_y) if method.uses_teacher else None
    training.fit(method, start, dataset, config, teacher=teacher, observer=recorder, **options)
    return recorder


def assert_same_training(actual, expected):
    for a, b in zip(actual.values, expected.values, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-4)
        assert {k: v for k, v in a.items() if "R@" in k} == {
            k: v for k, v in b.items() if "R@" in k
        }


def test_fit_on_mesh_matches_one_device_and_resumes_on_two(dataset, mesh, tmp_path):
    method = methods.SOTAlign(alpha=1e-2)
    one_device, recorder = (train(dataset, method, mesh=used) for used in (None, mesh))
    assert_same_training(recorder, one_device)
    # A checkpoint written on eight devices can be resumed on two of them.
    with workdir.Recorder(tmp_path, steps=20, title="devices") as saved:
        for step in range(1, 11):
            saved.metrics(step, {})
        saved.snapshot(10, recorder.snapshots[10])
        resumed = train(dataset, method, mesh=sharding.rows_mesh(2), resume=saved.resume)
    assert len(resumed.values) == 10
    one_device.values = one_device.values[10:]
    assert_same_training(resumed, one_device)


def test_refined_teacher_on_mesh_matches_one_device(mesh, monkeypatch):
    monkeypatch.setattr(refine, "ROUNDS", 1)
    pairs = test_refine.views(150, noise=3.0, seed=12)
    # 500 and 450 rows, which do not divide by eight.
    x, y = (
        test_refine.views(500, noise=3.0, seed=1)[0],
        test_refine.views(450, noise=3.0, seed=2)[1],
    )
    rows = *pairs, x, y
    alone, two, eight = (
        teachers.refine(*rows, mesh=used) for used in (None, sharding.rows_mesh(2), mesh)
    )
    assert alone.rounds == 1
    expected = alone.teacher.x(x) @ alone.teacher.y(y).T
    for found in (two, eight):
        np.testing.assert_allclose(found.scores, alone.scores, atol=1e-4)
        np.testing.assert_allclose(found.teacher.x(x) @ found.teacher.y(y).T, expected, atol=1e-4)


@pytest.mark.parametrize(
    "method",
    [
        methods.SAIL(supervision="square"),
        methods.NNCLR(),
        methods.SCLIP(),
        methods.Structure(regularize_on="all", block_size=7, warmup=0),
        methods.SOTAlign(alpha=1e-2, klot_on="crossmodal", supervision="pairs+negatives"),
    ],
    ids=lambda method: type(method).__name__,
)
def test_fit_on_mesh_matches_one_device_for_every_method(method, dataset, mesh):
    config = dataclasses.replace(CONFIG, steps=2)
    assert_same_training(train(dataset, method, config, mesh=mesh), train(dataset, method, config))


def test_fit_rejects_on_device_with_several_devices(dataset, mesh):
    with pytest.raises(checks.InputError, match=r"on_device .*8 devices"):
        train(dataset, methods.SAIL(), mesh=mesh, on_device=True)


# --- the compiled step -------------------------------------------------------------------------

PAPER = targets.Workload(pool=22_768, teacher_dim=1024)
EXCHANGE = re.compile(
    r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def exchanges(program):
    """Lists (kind, largest array size, is in a loop) for every collective of an HLO program."""
    parts, name = {}, ""
    for line in program.splitlines():
        header = re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line)
        name = header[1] if header else name
        parts.setdefault(name, []).append(line)
    bodies = re.findall(r"(?:body|condition)=%?([\w.-]+)", program)
    looping = set()
    while bodies:
        name = bodies.pop()
        if name in parts and name not in looping:
            looping.add(name)
            bodies += re.findall(r"=\{?%([\w.-]+)", "\n".join(parts[name]))
    found = []
    for name, lines in parts.items():
        for result, kind in EXCHANGE.findall("\n".join(lines)):
            shapes = re.findall(r"\[([\d,]*)\]", result)
            size = max(math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)
            found.append((kind, size, name in looping))
    return found


def test_exchanges_finds_collectives_inside_loops(mesh):
    """Checks the helper of the next test on gathers inside and outside of loops.

    One gather is written by hand in a loop, one is added by the compiler, one is outside.
    """
    split = sharding.split_rows(mesh)
    x = jax.device_put(jnp.ones((16, 3)), split)

    def gathers(x):
        def once(axes, x, _):
            return x, sharding.all_gather(x, axes).sum()

        def by_hand(_, s):
            return sharding.shard_map(once, x * s, None)[1]

        def by_compiler(_, x):
            return jax.lax.with_sharding_constraint(x[::-1].cumsum(0), split)

        looped = jax.lax.fori_loop(0, 3, by_hand, 1.0), jax.lax.fori_loop(0, 3, by_compiler, x)
        return looped, jax.lax.with_sharding_constraint(2 * x, sharding.replicated(mesh))

    with jax.set_mesh(mesh):
        found = exchanges(jax.jit(gathers).lower(x).compile().as_text())
    of_whole = [in_loop for kind, size, in_loop in found if (kind, size) == ("all-gather", 48)]
    assert any(of_whole) and not all(of_whole), found


def test_train_step_on_eight_devices_shards_memory_and_loops_do_not_gather():
    """Compiles the step at the paper's size without running it."""
    one, eight = (targets.lower_step(PAPER, jax.devices()[:n]).compile() for n in (1, 8))
    memory = [step.memory_analysis().temp_size_in_bytes for step in (one, eight)]
    assert memory[1] <= memory[0] / 5, memory
    found = exchanges(eight.as_text())
    assert {kind for kind, *_ in found} >= {"all-gather", "all-reduce"}
    largest = max(size for _, size, _ in found)
    assert largest <= PAPER.unpaired * PAPER.dim  # no n x n array is exchanged
    # Sinkhorn's loops exchange column sums with one drift per device, column maxima, and one flag
    # for unusable rows.
    allowed = {("all-reduce", size) for size in (PAPER.unpaired + 8, PAPER.unpaired, 1)}
    in_loops = {(kind, size) for kind, size, in_loop in found if in_loop}
    assert ("all-reduce", PAPER.unpaired + 8) in in_loops <= allowed
