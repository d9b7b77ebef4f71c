"""What the small model's recipe minimises, by which rule, and on what schedule."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import arguments

from examples.train_tiny import network, objective, plan, schedule, state, train
from sparse_loop_jax.models.forward import exit_probabilities, forward_params

pytest_plugins = ["tiny_runs"]


# The objective -------------------------------------------------------------------------


def textbook(params, config, batch, beta=0.1):
    """The same loss by the library's forward pass, without staging."""
    out = forward_params(params, config, batch.ids)
    log_p = jax.nn.log_softmax(out.logits, axis=-1)
    loss = -jnp.take_along_axis(log_p, batch.targets[..., None], axis=-1)[..., 0]
    exits = exit_probabilities(out.gate_logits)
    entropy = -(exits * jnp.log(exits)).sum(axis=0)
    each = (exits * loss).sum(axis=0) - beta * entropy
    return (batch.weights * each).sum() / batch.weights.sum()


@pytest.fixture(scope="module")
def objective_gradient(small):
    """A jitted function (targets, weights) -> loss, gradient."""
    config, params, batch = small
    chosen = objective.Objective(dtype="float32", rows=8)

    @jax.jit
    def compute(targets, weights):
        given = objective.Batch(batch.ids, targets, weights)
        return jax.value_and_grad(
            lambda p: objective.loss_and_metrics(p, config, chosen, given)[0]
        )(params)

    return compute


def test_the_objective_is_the_textbook_s_with_its_gradient(small, objective_gradient):
    config, params, batch = small
    loss, gradient = objective_gradient(batch.targets, batch.weights)
    wanted, expected = jax.jit(jax.value_and_grad(lambda p: textbook(p, config, batch)))(params)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), gradient, expected
    )


def test_staged_targets_teach_shallow_loops_but_not_the_gate(small, objective_gradient):
    _, _, batch = small
    # One position alone; its shallow loops are asked for token 3, or for what comes next.
    weights = jnp.zeros_like(batch.weights).at[0, 5].set(1.0)
    _, plain = objective_gradient(batch.targets, weights)
    _, staged = objective_gradient(batch.targets.at[:2, 0, 5].set(3), weights)
    np.testing.assert_allclose(staged.exit_gate, plain.exit_gate, rtol=1e-4, atol=1e-7)
    answer = int(batch.targets[0, 0, 5])
    assert answer != 3
    assert np.abs(staged.head[3]).sum() > 10 * np.abs(plain.head[3]).sum()
    # Every loop weighs the same: two of three ask for token 3, whose logits start near chance.
    pull = [float(jnp.linalg.norm(staged.head[token])) for token in (3, answer)]
    assert 1 < pull[0] / pull[1] < 4


def test_a_batch_must_be_a_multiple_of_the_rows(small):
    config, params, batch = small
    with pytest.raises(ValueError, match="24 tokens a batch are no multiple of rows=7"):
        objective.loss_and_metrics(params, config, objective.Objective(rows=7), batch)


def test_states_are_those_of_the_library_s_forward(small):
    config, params, batch = small
    states = jax.jit(lambda p: network.loop_states(p, config, batch.ids, dtype="float32"))(
        params
    )
    out = forward_params(params, config, batch.ids)
    np.testing.assert_allclose(states, out.hidden, rtol=1e-4, atol=1e-5)


def test_chunked_attention_is_causal_attention(small):
    q, k, v = (
        jax.random.normal(jax.random.key(i), (2, 12, heads, 8))
        for i, heads in ((0, 4), (1, 2), (2, 2))
    )
    chunked = jax.jit(lambda *args: network.chunked_attention(*args, chunk=4))(q, k, v)
    wide_k, wide_v = (np.repeat(x, 2, axis=2) for x in (k, v))  # each serves two query heads
    weights = np.exp(np.einsum("bthd,bshd->bhts", q, wide_k) / 8**0.5) * np.tri(12)
    weights /= weights.sum(axis=-1, keepdims=True)
    whole = np.einsum("bhts,bshd->bthd", weights, wide_v)
    np.testing.assert_allclose(chunked, whole, atol=1e-5)
    with pytest.raises(ValueError, match="a length of 12 is no multiple of the chunk of 5"):
        network.chunked_attention(q, k, v, chunk=5)


# The optimizer -------------------------------------------------------------------------


def _gradient(params):
    return jax.tree.map(
        lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape), params
    )


def test_muon_levels_the_singular_values_of_matrices_alone(small):
    _, params, _ = small
    gradient = _gradient(params)

    def first_step(rule) -> Any:
        transform = state.make_optimizer(params, state.Optimizer(rule))
        still = jax.tree.map(jnp.zeros_like, params)  # nothing to decay
        return transform.update(gradient, transform.init(params), still)[0]

    muon, adam = first_step("muon"), first_step("adamw")
    moved = np.linalg.svd(muon.layers[0].gate_up, compute_uv=False)
    assert moved.max() / moved.min() < 2 < np.linalg.cond(gradient.layers[0].gate_up)
    # Downhill, about as far as Adam.
    assert float(jnp.vdot(muon.layers[0].gate_up, gradient.layers[0].gate_up)) > 0
    ratio = jnp.linalg.norm(muon.layers[0].gate_up) / jnp.linalg.norm(adam.layers[0].gate_up)
    assert 0.1 < float(ratio) < 1
    for name in ("embed", "head", "exit_gate"):  # each number by itself, as Adam has it
        step = np.abs(np.asarray(getattr(muon, name)))
        np.testing.assert_allclose(step, step.max(), rtol=1e-2)


@pytest.mark.parametrize("rule", state.RULES)
def test_matrices_and_tables_have_a_decay_each(small, rule):
    _, params, _ = small
    gradient = _gradient(params)

    def first_step(*decays) -> Any:
        transform = state.make_optimizer(params, state.Optimizer(rule, *decays))
        return transform.update(gradient, transform.init(params), params)[0]

    pulled = jax.tree.map(jnp.subtract, first_step(0.5, 0.25), first_step(0.0, 0.0))
    layer, of = pulled.layers[0], params.layers[0]
    for name in ("qkv", "out", "gate_up", "down"):
        np.testing.assert_allclose(getattr(layer, name), 0.5 * getattr(of, name), atol=1e-5)
    for name in ("embed", "head"):
        want = 0.25 * getattr(params, name)
        np.testing.assert_allclose(getattr(pulled, name), want, atol=1e-5)
    for free in (pulled.norm, pulled.exit_gate, pulled.exit_gate_bias, layer.input_norm):
        np.testing.assert_array_equal(free, 0.0)
    with pytest.raises(ValueError, match="--table-decay must be at least 0, got -1"):
        state.Optimizer(rule, 0.1, -1.0)


# The plan ------------------------------------------------------------------------------


def test_the_schedule():
    stages = schedule.parse_stages("0.35:512,1:2048:4096:0.2", tokens=1024, synthetic=0.7)
    assert stages == (
        schedule.Stage(0.35, 512, 1024, 0.7),
        schedule.Stage(1.0, 2048, 4096, 0.2),
    )
    assert [stage.rows for stage in stages] == [2, 2]
    made = schedule.Schedule(
        steps=100, stages=stages, warmup=10, peak=1.0, hops_from=0.1, hops_by=0.5
    )
    lengths = [made.stage(p).length for p in (0.0, 0.34, 0.35, 0.8, 1.0)]
    assert lengths == [512, 512, 2048, 2048, 2048]
    assert [made.hops(p) for p in (0.0, 0.1, 0.2, 0.3, 0.5, 1.0)] == [1, 1, 2, 4, 8, 8]
    assert made.rate(0, 0.0) == pytest.approx(0.1)
    assert made.rate(50, 0.5) == pytest.approx(0.51)
    assert made.rate(100, 1.0) == pytest.approx(0.02)
    assert made.progress(25, 1e9) == 0.25
    assert schedule.Schedule(minutes=2.0, stages=stages).progress(10**9, 60.0) == 0.5
    assert [made.done(step, 0.0) for step in (99, 100)] == [False, True]
    short = dataclasses.replace(made, until=0.3)
    assert [short.done(step, 0.0) for step in (29, 30)] == [False, True]
    assert short.rate(20, 0.2) == made.rate(20, 0.2)


def test_a_bad_schedule_is_refused():
    def parse(text):
        return schedule.parse_stages(text, tokens=192, synthetic=0.5)

    for budget in ({}, {"steps": 1, "minutes": 1.0}):
        with pytest.raises(ValueError, match="either in steps or in minutes"):
            schedule.Schedule(**budget, stages=parse("1:96"))
    with pytest.raises(ValueError, match="must be positive, got -1"):
        schedule.Schedule(steps=-1, stages=parse("1:96"))
    for stages in (parse("0.5:96"), parse("1:96,0.5:48"), ()):
        with pytest.raises(ValueError, match="must rise to an end of 1"):
            schedule.Schedule(steps=1, stages=stages)
    with pytest.raises(ValueError, match=r"hops_from=0\.5, hops_by=0\.17"):
        schedule.Schedule(steps=1, stages=parse("1:96"), hops_from=0.5)
    for until in (0.0, 1.1, math.nan):
        with pytest.raises(ValueError, match=rf"in \(0, 1\]: --until got {until}"):
            schedule.Schedule(steps=1, stages=parse("1:96"), until=until)
    for text, got in (
        ("96", "'96'"), ("1:96:192:0.5:2", "'1:96:192:0.5:2'"), ("0.5:96,1:x", "'1:x'"),
        ("1:100", r"'1:100'.*\(192\) must be a multiple of those of a row \(100\)"),
        ("1:96:96:1.5", r"'1:96:96:1.5'.* must be in \[0, 1\], got 1.5"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"stages look like .*, got {got}"):
            parse(text)


def test_options_that_do_not_fit_are_refused(corpus, tmp_path):
    with pytest.raises(ValueError, match="--hidden 32 is no multiple of --heads 3"):
        train.main(arguments(corpus, tmp_path, "--heads", "3"))
    with pytest.raises(ValueError, match="--attention cudnn has no float32"):
        train.main(arguments(corpus, tmp_path, "--attention", "cudnn"))


def test_operations_are_six_a_weight_and_use(small):
    config, params, _ = small
    layers = sum(leaf.size for leaf in jax.tree.leaves(params.layers) if leaf.ndim == 2)
    wanted = 3 * (6 * layers + 8 * params.head.size)
    assert plan.operations(config, 0, remat=False) == wanted
    # Attention: scores and sums, 2 operations each, over half of the row; backwards twice that.
    more = plan.operations(config, 100, remat=False) - wanted
    assert more == 3 * (3 * 2 * 2 * 16 * 100 / 2)


def test_the_plan_prints_every_stage(corpus, tmp_path, capsys):
    plan.main([*arguments(corpus, tmp_path, "--stages", "0.5:96,1:192"), "--no-memory"])
    assert re.findall(r"until (\d+)%: (\d+) x (\d+)", capsys.readouterr().out) == [
        ("50", "16", "96"), ("100", "8", "192"),
    ]  # fmt: skip
