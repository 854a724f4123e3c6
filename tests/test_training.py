"""Tests of the training step and of `fit`: optimizer, resume, and failures."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sotalign_jax import (
    checks,
    data,
    evaluation,
    heads,
    losses,
    methods,
    sampling,
    teachers,
    training,
)
from sotalign_jax.ot import affinity, device

D_X, D_Y = 12, 10


@pytest.fixture(scope="module")
def dataset():
    """Returns 60 pairs, 40 and 36 unpaired rows and a gallery of 80: noisy linear views."""
    rng = np.random.default_rng(0)
    z, to_x, to_y = rng.normal(size=(216, 6)), rng.normal(size=(6, D_X)), rng.normal(size=(6, D_Y))
    x = (z @ to_x + 0.5 * rng.normal(size=(216, D_X))).astype(np.float32)
    y = (z @ to_y + 0.5 * rng.normal(size=(216, D_Y))).astype(np.float32)
    return data.dataset(
        (x[:60], y[:60]),
        x=x[60:100],
        y=y[100:136],
        val=data.gallery(x[136:], y[136:]),
    )


@pytest.fixture(scope="module")
def teacher(dataset):
    return teachers.cca(dataset.pairs_x, dataset.pairs_y)


@pytest.fixture(scope="module")
def start():
    return heads.build_heads(D_X, D_Y, 8, seed=1)


class Recorder(training.Observer):
    """Records steps, metrics and snapshots on the host."""

    def __init__(self):
        self.steps, self.values, self.snapshots = [], [], {}

    def metrics(self, step, values):
        self.steps.append(step)
        self.values.append({name: float(value) for name, value in values.items()})

    def snapshot(self, step, snapshot):
        self.snapshots[step] = jax.tree.map(np.array, snapshot)


CONFIG = training.TrainConfig(
    steps=23, pair_batch=32, unpaired_batch=16, learning_rate=3e-3, eval_every=4, seed=5
)
# One batch holds the whole pool, so that potentials are carried from step to step.
WHOLE_POOL = training.TrainConfig(steps=150, learning_rate=3e-3, eval_every=50, seed=0)
SOTALIGN = methods.SOTAlign(alpha=1e-3)


def run(method, start, dataset, config=CONFIG, **options):
    recorder = Recorder()
    trained, best = training.fit(method, start, dataset, config, observer=recorder, **options)
    return trained, best, recorder


def assert_same(first, second):
    """Asserts bitwise equality."""
    chex.assert_trees_all_equal(*(jax.tree.map(np.asarray, tree) for tree in (first, second)))


@pytest.fixture(scope="module")
def sail(start, dataset):
    return run(methods.SAIL(), start, dataset)


# --- one step ----------------------------------------------------------------------------------


def test_step_matches_lion_by_hand_and_optax(start, dataset):
    config = dataclasses.replace(CONFIG, steps=30, weight_decay=0.1)
    method, batches = methods.SAIL(), training.place(dataset)
    state = training.init_state(method, start, batches, config)
    step = training.make_step(method, start, config)
    graphdef, params = nnx.split(start)
    lion = optax.lion(3e-3, b1=0.9, b2=0.99, weight_decay=0.1)  # the updates are rescaled below
    momentum = jax.tree.map(jnp.zeros_like, params)
    key = training.batch_key(config)
    opt_state = lion.init(params)

    @jax.jit
    def gradient_of(params, t):
        batch = sampling.draw(key, t, batches, pairs=32, unpaired=16)
        return jax.grad(lambda p: method(nnx.merge(graphdef, p), batch, None, {})[0])(params)

    for t in range(2):
        state, metrics = step(state, batches, None, key)
        rate = 3e-3 * (t + 1) / 3  # warm-up over a tenth of the steps
        gradient = gradient_of(params, jnp.int32(t))
        expected = jax.tree.map(
            lambda p, m, g, rate=rate: p - rate * (jnp.sign(0.9 * m + 0.1 * g) + 0.1 * p),
            params,
            momentum,
            gradient,
        )
        momentum = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g, momentum, gradient)
        updates, opt_state = lion.update(gradient, opt_state, params)
        by_optax = optax.apply_updates(
            params, jax.tree.map(lambda u, t=t: u * (t + 1) / 3, updates)
        )
        norm = math.sqrt(sum(float(np.sum(np.square(g))) for g in jax.tree.leaves(gradient)))
        np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-4)
        params = expected
        for other in (expected, by_optax):
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.params, other
            )
    assert int(state.step) == 2


def test_warmup_cosine_warms_up_then_falls_to_zero():
    rates = [float(training.warmup_cosine(1e-4, 2000)(t)) for t in range(2001)]
    assert rates[0] == pytest.approx(1e-4 / 200)
    assert rates[199] == pytest.approx(1e-4)
    assert np.argmax(rates) in (199, 200)
    assert rates[1100] == pytest.approx(5e-5, rel=1e-3)  # middle of the decay
    assert rates[2000] == pytest.approx(0.0, abs=1e-12)
    assert np.all(np.diff(rates[200:]) <= 0)


def test_step_compiles_once_and_donates_its_state(start, dataset, teacher):
    class Counted(methods.SOTAlign):
        __call__ = chex.assert_max_traces(methods.SOTAlign.__call__, n=1)

    method, batches = Counted(**dataclasses.asdict(SOTALIGN)), training.place(dataset)
    state = training.init_state(method, start, batches, WHOLE_POOL)
    assert set(state.memory) == {"v", "v_star"}
    step = training.make_step(method, start, WHOLE_POOL)
    for _ in range(3):
        before = state
        state, metrics = step(state, batches, teacher, training.batch_key(WHOLE_POOL))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert int(metrics["teacher_iterations"]) == 1
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((batches, teacher)))


def test_fit_compiles_once(start, dataset):
    class Counted(methods.SAIL):
        __call__ = chex.assert_max_traces(methods.SAIL.__call__, n=1)

    _, _, recorder = run(Counted(), start, dataset)
    assert len(recorder.steps) == CONFIG.steps


def test_make_step_shares_programs_of_equal_options(sail, start, dataset):
    def program(method, **changes):
        return training.make_step(method, start, dataclasses.replace(CONFIG, **changes))

    class Mine(methods.SAIL):
        """Another method with the options of SAIL."""

    first = program(methods.SAIL())
    assert first is program(methods.SAIL(), seed=7) is not program(methods.SAIL(), steps=24)
    assert first is not program(Mine()) and first is not program(methods.SAIL("square"))
    _, _, other = run(methods.SAIL(), start, dataset, dataclasses.replace(CONFIG, seed=7))
    assert other.values[0]["loss"] != sail[2].values[0]["loss"]

    class Unhashable(methods.SAIL):
        __hash__ = None

    with pytest.raises(checks.InputError, match=r"method .*Unhashable"):
        program(Unhashable())


def test_place_leaves_unread_pools_on_the_host(dataset):
    placed = training.place(dataset, pools="")
    assert placed.pool_x.shape == (0, D_X)
    assert placed.pool_y.shape == (0, D_Y)
    placed = training.place(dataset, pools="x")
    assert placed.pool_y.shape == (0, D_Y)
    np.testing.assert_array_equal(placed.pool_x, dataset.pool_x)
    np.testing.assert_array_equal(training.place(dataset).pool_y, dataset.pool_y)


# --- the loop ----------------------------------------------------------------------------------


def test_with_features_caches_teacher_features_that_fit(dataset, teacher):
    placed = training.place(dataset)
    cached = training.cache_teacher_features(placed, teacher)
    np.testing.assert_allclose(cached.star_x, teacher.x(dataset.pool_x), atol=1e-6)
    np.testing.assert_allclose(cached.star_y, teacher.y(dataset.pool_y), atol=1e-6)
    batch = sampling.draw(jax.random.key(0), jnp.int32(3), cached, pairs=5, unpaired=7)
    np.testing.assert_allclose(batch.star_x, teacher.x(batch.x), atol=1e-6)
    np.testing.assert_allclose(batch.star_y, teacher.y(batch.y), atol=1e-6)
    needed = sum(x.nbytes for x in jax.tree.leaves(cached))
    for memory, fit in ((2 * needed, True), (2 * needed - 2, False)):
        with device.compiling_for(device.Profile("test", memory=memory)):
            assert (training.cache_teacher_features(placed, teacher).star_x is not None) == fit


def test_fit_rejects_heads_that_cannot_be_trained(dataset):
    start = heads.build_heads(dataset.pairs_x.shape[1], dataset.pairs_y.shape[1], 3)
    with pytest.raises(checks.InputError, match=r"^heads\b.* 'mixed'"):
        training.fit(methods.SAIL(), heads.mix(start, start, 0.5), dataset, training.TrainConfig())


def test_with_features_skips_pools_smaller_than_their_features(dataset, teacher):
    placed = training.place(dataset)
    narrow = placed._replace(pool_x=placed.pool_x.astype(jnp.float16)[:, : teacher.dim])
    maps = dataclasses.replace(
        teacher, map_x=heads.AffineMap(jnp.eye(teacher.dim), jnp.zeros(teacher.dim))
    )
    cached = training.cache_teacher_features(narrow, maps)
    assert cached.star_x is None and cached.star_y.shape == (len(placed.pool_y), teacher.dim)
    batch = sampling.draw(jax.random.key(0), jnp.int32(0), cached, pairs=5, unpaired=7)
    assert batch.star_x is None and batch.star_y.shape == (7, teacher.dim)


@pytest.mark.parametrize("klot_on", methods.sotalign.KLOT_ON)
def test_sotalign_loss_is_unchanged_by_cached_features(start, dataset, teacher, klot_on):
    method = methods.SOTAlign(klot_on=klot_on)
    draw = functools.partial(sampling.draw, jax.random.key(0), jnp.int32(0), pairs=9, unpaired=16)
    placed = training.place(dataset)
    losses = [
        method(start, draw(data), teacher, {})[0]
        for data in (placed, training.cache_teacher_features(placed, teacher))
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_fit_reports_every_step_once_and_in_order(sail):
    _, _, recorder = sail
    assert recorder.steps == list(range(1, 24))
    assert list(recorder.snapshots) == [4, 8, 12, 16, 20, 23]  # every 4 steps and at the last step
    scored = [
        step
        for step, values in zip(recorder.steps, recorder.values, strict=True)
        if "val/mean/R@1" in values
    ]
    assert scored == list(recorder.snapshots)
    assert {"loss", "siglip", "gradient_norm"} <= set(recorder.values[0])


def test_fit_leaves_the_given_heads_unchanged(start, dataset, sail):
    assert_same(nnx.state(start), nnx.state(heads.build_heads(D_X, D_Y, 8, seed=1)))
    assert not np.array_equal(sail[0].x.linear.kernel[...], start.x.linear.kernel[...])


def test_fit_is_a_function_of_the_seed(start, dataset, sail):
    again = run(methods.SAIL(), start, dataset)
    assert_same(nnx.state(again[0]), nnx.state(sail[0]))
    assert again[2].values == sail[2].values
    other = run(methods.SAIL(), start, dataset, dataclasses.replace(CONFIG, seed=6))
    assert other[2].values[0] != sail[2].values[0]


def score(recorder):
    return {
        step: values["val/mean/R@1"]
        for step, values in zip(recorder.steps, recorder.values, strict=True)
        if "val/mean/R@1" in values
    }


class Spoiled(methods.SAIL):
    """Minimises the loss for 20 steps and then maximises it. The memory counts steps."""

    def init_memory(self, data, unpaired_batch):
        return jnp.int32(0)

    def __call__(self, heads, batch, teacher, memory):
        loss, (metrics, _) = super().__call__(heads, batch, teacher, {})
        return jnp.where(memory < 20, 1.0, -1.0) * loss, (metrics, memory + 1)


def test_fit_keeps_the_best_parameters(start, dataset):
    config = dataclasses.replace(CONFIG, learning_rate=2e-2, steps=40)
    trained, best, recorder = run(Spoiled(), start, dataset, config)
    scores = score(recorder)
    at = max(scores, key=scores.get)  # the first of ties
    assert 4 < at < 40
    assert scores[at] > scores[4] + 5.0
    assert scores[at] > scores[40] + 5.0
    assert int(best.step) == at
    np.testing.assert_allclose(best.mean_r1, scores[at], rtol=1e-6)
    assert_same(nnx.state(trained), recorder.snapshots[at].state.params)
    kept = evaluation.evaluate(trained.x, trained.y, dataset.val)
    assert kept["mean/R@1"] == scores[at]


def test_fit_without_validation_keeps_the_last_parameters(start, dataset):
    blind = dataclasses.replace(dataset, val=None)
    trained, best, recorder = run(Spoiled(), start, blind)
    assert int(best.step) == CONFIG.steps
    assert_same(nnx.state(trained), recorder.snapshots[CONFIG.steps].state.params)
    assert not any(name.startswith("val") for values in recorder.values for name in values)


@pytest.fixture(scope="module")
def sotalign(start, dataset, teacher):
    return run(SOTALIGN, start, dataset, WHOLE_POOL, teacher=teacher)


@pytest.mark.parametrize("batches", ["drawn", "whole"])
def test_fit_resumed_is_bit_identical(start, dataset, teacher, batches, request):
    if batches == "whole":
        config, stop = WHOLE_POOL, 100
        trained, best, full = request.getfixturevalue("sotalign")
    else:
        config, stop = dataclasses.replace(CONFIG, steps=11), 4
        trained, best, full = run(SOTALIGN, start, dataset, config, teacher=teacher)
    snapshot = full.snapshots[stop]
    assert bool(snapshot.state.memory) == (batches == "whole")
    templates = []

    def resume(template):
        templates.append(jax.tree.structure(template))
        return jax.tree.map(jnp.asarray, snapshot)

    again, again_best, rest = run(SOTALIGN, start, dataset, config, teacher=teacher, resume=resume)
    assert templates == [jax.tree.structure(snapshot)]
    assert rest.steps == list(range(stop + 1, config.steps + 1))
    assert rest.values == full.values[stop:]
    assert_same(nnx.state(again), nnx.state(trained))
    assert_same(tuple(again_best), tuple(best))
    assert_same(rest.snapshots[config.steps], full.snapshots[config.steps])


def test_fit_does_not_train_a_finished_run(start, dataset, sail):
    trained, best, recorder = sail

    def resume(template):
        return jax.tree.map(jnp.asarray, recorder.snapshots[CONFIG.steps])

    again, again_best, silent = run(methods.SAIL(), start, dataset, resume=resume)
    assert silent.steps == []
    assert_same(nnx.state(again), nnx.state(trained))
    assert_same(tuple(again_best), tuple(best))


def test_fit_starts_over_if_resume_returns_none(start, dataset, sail):
    again = run(methods.SAIL(), start, dataset, resume=lambda template: None)
    assert_same(nnx.state(again[0]), nnx.state(sail[0]))


# --- errors ------------------------------------------------------------------------------------


class BrokenLoss(methods.SAIL):
    """Returns a NaN loss from the seventh step on."""

    def init_memory(self, data, unpaired_batch):
        return jnp.int32(1)

    def __call__(self, heads, batch, teacher, memory):
        loss, (metrics, _) = super().__call__(heads, batch, teacher, {})
        return self.spoil(loss, heads, memory >= 7), (metrics, memory + 1)

    def spoil(self, loss, heads, broken):
        return jnp.where(broken, jnp.nan, loss)


class BrokenGradient(BrokenLoss):
    """Has a NaN gradient, of sqrt(x^2) at x = 0, from the seventh step on."""

    def spoil(self, loss, heads, broken):
        zero = heads.bias[...] - jax.lax.stop_gradient(heads.bias[...])
        return loss + jnp.sqrt(zero**2 + jnp.where(broken, 0.0, 1.0))


@pytest.mark.parametrize("method", [BrokenLoss(), BrokenGradient()])
def test_fit_stops_on_non_finite_loss_or_gradient(start, dataset, method):
    recorder = Recorder()
    with pytest.raises(training.NonFiniteLossError, match=r"at step 7 \(.*loss .*\); lower"):
        training.fit(method, start, dataset, CONFIG, observer=recorder)
    assert recorder.steps == [1, 2, 3, 4, 5, 6]  # the steps before are reported
    assert list(recorder.snapshots) == [4]


def test_fit_stops_on_nan_in_the_pool(start, dataset, teacher):
    pool = dataset.pool_x.copy()
    pool[3, 2] = np.nan  # bypasses the checks of `data.dataset`
    spoiled = dataclasses.replace(dataset, pool_x=pool)
    with pytest.raises(training.NonFiniteLossError, match=r"at step 1 \(.*klot nan"):
        run(SOTALIGN, start, spoiled, WHOLE_POOL, teacher=teacher)


def test_fit_warns_with_the_status_of_unconverged_plans(start, dataset, teacher):
    method = methods.SOTAlign(max_iterations=2, tolerance=1e-6)
    config = dataclasses.replace(CONFIG, steps=1)
    with pytest.warns(UserWarning, match=r"step 1 .*teacher .*OUT_OF_ITERATIONS"):
        run(method, start, dataset, config, teacher=teacher)


def test_fit_stops_on_too_large_learning_rate(start, dataset):
    config = dataclasses.replace(CONFIG, learning_rate=1e30)
    with pytest.raises(training.NonFiniteLossError, match=r"at step 2 \(.*; lower learning_rate"):
        run(methods.SAIL(), start, dataset, config)


def test_fit_rejects_missing_pool_or_teacher(start, dataset, teacher):
    empty = dataclasses.replace(dataset, pool_y=dataset.pool_y[:0])
    with pytest.raises(checks.InputError, match="pool_y"):
        run(methods.SOTAlign(), start, empty, teacher=teacher)
    with pytest.raises(checks.InputError, match=r"teacher.* None"):
        run(methods.SOTAlign(), start, dataset)
    wrong = teachers.cca(dataset.pairs_x[:, :5], dataset.pairs_y)
    with pytest.raises(checks.InputError, match=r"teacher .*\(5, 10\)"):
        run(methods.SOTAlign(), start, dataset, teacher=wrong)


@pytest.mark.parametrize(
    ("method", "on_device"),
    [
        (methods.SCLIP(weight_text=0.0), True),
        (methods.SCLIP(weight_image=0.0), False),
        (methods.NNCLR(k=2, weight_text=0.0), False),
        (methods.NNCLR(k=2, weight_image=0.0), True),
    ],
)
def test_fit_requires_only_the_pools_a_method_reads(start, dataset, method, on_device):
    unread = "y" if method.pools == "x" else "x"
    pools = {"x": dataset.pool_x, "y": dataset.pool_y}
    config = dataclasses.replace(CONFIG, steps=3)
    empty = dataclasses.replace(dataset, **{f"pool_{unread}": pools[unread][:0]})
    one, both = (
        run(method, start, rows, config, on_device=on_device)[2].values for rows in (empty, dataset)
    )
    assert one == both and len(one) == 3  # the missing pool is never read
    missing = dataclasses.replace(dataset, **{f"pool_{method.pools}": pools[method.pools][:0]})
    with pytest.raises(checks.InputError, match=f"pool_{method.pools}"):
        run(method, start, missing, config)


def test_fit_of_sail_ignores_the_pools(start, dataset, sail):
    empty = dataclasses.replace(dataset, pool_x=dataset.pool_x[:0], pool_y=dataset.pool_y[:0])
    assert run(methods.SAIL(), start, empty)[2].values == sail[2].values


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, r"steps.* 0"),
        ({"pair_batch": 1.5}, r"pair_batch.* 1.5"),
        ({"unpaired_batch": -1}, r"unpaired_batch.* -1"),
        ({"eval_every": 0}, r"eval_every.* 0"),
        ({"learning_rate": float("nan")}, r"learning_rate.* nan"),
        ({"weight_decay": -1.0}, r"weight_decay.* -1.0"),
    ],
)
def test_train_config_rejects_bad_options(options, message):
    with pytest.raises(checks.InputError, match=message):
        training.TrainConfig(**options)


def test_fit_on_half_precision_data_matches_single(start, dataset, teacher):
    half = data.Dataset(
        *(
            getattr(dataset, name).astype(np.float16)
            for name in ("pairs_x", "pairs_y", "pool_x", "pool_y")
        )
    )
    assert training.place(half).pool_x.dtype == jnp.float16  # uses half the memory
    single = data.Dataset(
        *(
            getattr(half, name).astype(np.float32)
            for name in ("pairs_x", "pairs_y", "pool_x", "pool_y")
        )
    )
    runs = [run(methods.SAIL(), start, each)[2] for each in (half, single)]
    np.testing.assert_allclose(
        [values["loss"] for values in runs[0].values],
        [values["loss"] for values in runs[1].values],
        rtol=1e-4,
    )


# --- learning ----------------------------------------------------------------------------------


def test_sotalign_learns_to_retrieve(start, dataset, sotalign):
    before = evaluation.evaluate(start.x, start.y, dataset.val)["mean/R@10"]
    trained, best, recorder = sotalign
    after = evaluation.evaluate(trained.x, trained.y, dataset.val)
    assert before < 30.0  # chance is 10 of 80
    assert after["mean/R@10"] > 70.0
    assert after["mean/R@1"] == pytest.approx(float(best.mean_r1))
    assert after["mean/R@1"] > 20.0  # chance is 1.25
    losses = [values["loss"] for values in recorder.values]
    assert np.mean(losses[-10:]) < 0.5 * losses[0]
    assert [values["teacher_iterations"] for values in recorder.values[1:]] == [1.0] * 149


# --- the contrastive teacher ---


def pairs(n, d_x, d_y, *, latent=4, noise=0.5):
    """Returns two noisy views of shared latent variables."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(n, latent))
    views = (z @ rng.normal(size=(latent, d)) + noise * rng.normal(size=(n, d)) for d in (d_x, d_y))
    return [view.astype(np.float32) for view in views]


@pytest.mark.parametrize("loss", ["siglip", "infonce"])
def test_contrastive_learns_the_pairs(loss):
    A, B = pairs(64, 12, 10, latent=8, noise=0.1)
    teacher = training.contrastive(A, B, dim=8, learning_rate=1e-3, loss=loss)
    k = teacher.x(A) @ teacher.y(B).T
    assert float(jnp.mean(jnp.argmax(k, axis=1) == jnp.arange(64))) > 0.95
    assert teacher.map_x.norm == "layer"
    assert float(teacher.correlations.mean()) > 0.7


def test_contrastive_matches_a_plain_training_loop():
    A, B = pairs(20, 6, 5)
    start = heads.build_heads(6, 5, 3, seed=4)
    graphdef, params = nnx.split(start)
    lion = optax.lion(training.warmup_cosine(1e-2, 4), b1=0.9, b2=0.99, weight_decay=1e-5)
    state = lion.init(params)

    @jax.jit
    @jax.grad
    def gradient(params):
        h = nnx.merge(graphdef, params)
        return losses.siglip(h.x(A), h.y(B), log_scale=h.log_scale[...], bias=h.bias[...])

    update = jax.jit(lion.update)
    for _ in range(4):
        updates, state = update(gradient(params), state, params)
        params = optax.apply_updates(params, updates)
    trained = nnx.merge(graphdef, params)
    teacher = training.contrastive(A, B, dim=3, steps=4, learning_rate=1e-2, seed=4)
    np.testing.assert_allclose(teacher.x(A), affinity.l2_normalize(trained.x(A)), atol=1e-5)


def test_contrastive_is_a_function_of_the_seed():
    A, B = pairs(20, 6, 5)
    runs = [
        training.contrastive(A, B, dim=3, steps=5, learning_rate=1e-2, batch_size=8, seed=s)
        for s in (0, 0, 1)
    ]
    np.testing.assert_array_equal(runs[0].map_x.weight, runs[1].map_x.weight)
    assert (runs[0].map_x.weight != runs[2].map_x.weight).any()


def test_warmup_cosine_matches_optax():
    steps, warmup = 95, 10
    theirs = optax.join_schedules(
        [
            optax.linear_schedule(1e-4 / warmup, 1e-4, warmup - 1),
            optax.cosine_decay_schedule(1e-4, steps - warmup),
        ],
        [warmup],
    )
    ours = training.warmup_cosine(1e-4, steps)
    t = jnp.arange(steps)
    np.testing.assert_allclose(ours(t), theirs(t.astype(jnp.float32)), atol=1e-10)


def test_contrastive_stops_on_divergence():
    A, B = pairs(20, 6, 5)
    with pytest.raises(FloatingPointError, match=r"loss .*step"):
        training.contrastive(A, B, dim=3, steps=5, learning_rate=1e38, batch_size=8)
