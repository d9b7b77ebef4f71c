"""`bench attention` and `bench tune` at toy size: tables, refusals, and what gets chosen."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import subprocess
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_loop_jax.bench import (
    attention,
    attention_ops,
    chain,
    measure,
    model,
    torch_peer,
    tune,
    tune_cases,
    tune_products,
)
from sparse_loop_jax.cli import main
from sparse_loop_jax.cli.bench import parse_rows
from sparse_loop_jax.kernels import tuning, workloads
from sparse_loop_jax.kernels.paged_attention.pallas_split import SplitConfig
from sparse_loop_jax.kernels.registry import Op

TINY, ROWS = workloads.tagged("test")


# Workloads -----------------------------------------------------------------------------


def test_bytes_are_those_of_the_design():
    w = workloads.AttentionWorkload(batch=8, context=8192, retention=0.1)
    # 768 KiB a token for 4 loops of 24 layers.
    assert w.dense_bytes == 8 * 8192 * 768 * 1024 // (4 * 24)
    assert w.kept == 820
    assert w.kept_bytes == pytest.approx(0.1 * w.dense_bytes, rel=0.01)
    assert w.scores_bytes == 8 * 16 * 8192 * 4
    assert dataclasses.replace(w, rows=4).kept_bytes == 4 * w.kept_bytes
    assert dataclasses.replace(w, rows=4).dense_bytes == w.dense_bytes


def test_names_tell_workloads_apart():
    names = [w.name for w in workloads.WORKLOADS]
    assert len(set(names)) == len(names)
    w = workloads.AttentionWorkload(batch=8, context=8192, rows=4, retention=0.1)
    assert w.name == "8x8192 rows 4 r 0.1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "batch must be positive, got 0"),
        ({"heads": 3, "kv_heads": 2}, "3 heads do not share 2 kv heads"),
        ({"rows": 50}, "50 rows need as many keys, got 40"),
        ({"retention": 1.5}, r"retention must be in \(0, 1\], got 1.5"),
    ],
)
def test_workloads_without_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **change)


def test_an_unknown_tag_is_refused():
    with pytest.raises(
        ValueError, match=r"no workload is tagged 'all'; the tags are \['bench'"
    ):
        workloads.tagged("all")


def test_tables_share_no_page_and_rows_end_where_they_should():
    inputs = workloads.paged_inputs(ROWS, sets=3)
    pages = np.concatenate([np.asarray(t).ravel() for t in inputs.tables])
    np.testing.assert_array_equal(np.sort(pages), np.arange(inputs.k_pool.shape[0]))
    assert not np.array_equal(pages, np.sort(pages))
    np.testing.assert_array_equal(inputs.lengths, [[31, 32, 33]])
    q, *_, table, _ = inputs.args(2)
    assert q.shape == (1, 3, 4, 16)
    np.testing.assert_array_equal(table, inputs.tables[2])


def test_spread_positions_are_a_selection():
    for w in (TINY, ROWS):
        positions = np.asarray(workloads.spread_positions(w), np.int32)
        assert positions.shape == (w.batch, w.rows, w.heads, w.capacity)
        kept = positions[..., : w.kept]
        assert (np.diff(kept, axis=-1) > 0).all()
        assert kept.max() <= w.context - w.rows
        assert not positions[..., w.kept :].any()


# Timing --------------------------------------------------------------------------------


def test_a_chain_makes_its_calls_one_after_the_other(monkeypatch):
    def step(carry, shared, item):
        return carry * shared + item

    monkeypatch.setattr(chain.Chain, "rounds", lambda self, seconds: 2)
    calls = chain.Chain(
        step, jnp.float32(1), jnp.float32(3), [jnp.float32(1), jnp.float32(2)], 1
    )
    program = calls.lower(1.0).compile()
    want = 1.0
    for item in (1, 2) * (calls.calls() // 2) * 2:
        want = want * 3 + item
    assert float(program(calls.carry, calls.shared, tuple(calls.items))) == want
    timing = calls.time(program, seconds=1.0, repeats=2)
    assert 0 < timing.least <= timing.most


def test_the_size_of_a_chain_on_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert chain.sets_for(1) == chain.MAX_SETS
    assert chain.sets_for(100 << 20) == 3
    assert chain.sets_for(8 << 30) == 1
    calls = chain.Chain(lambda c, s, i: c, 0, 0, [0] * 3, 3 << 30)
    assert calls.calls() == 9  # at least eight, each buffer as often as the others
    assert 1 <= calls.rounds(0.02) <= 3
    assert calls.rounds(2.0) > 100


# bench attention -----------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A function from arguments of `bench attention` to the rows of its JSON."""
    monkeypatch.setattr(measure, "bandwidth", lambda: 1e9)

    def run(arguments: str) -> list[dict]:
        file = tmp_path / "bench.json"
        shared = (
            f"--shape tiny --dtype float32 --cases 1x20 --repeats 1 --no-peer --json {file}"
        )
        assert main(["bench", "attention", *shared.split(), *arguments.split()]) == 0
        return json.loads(file.read_text())["attention"]["rows"]

    return run


def test_the_command_compares_with_dense(bench, capsys):
    rows = bench("--rows 2 --retentions 0.5")
    assert [row["op"] for row in rows] == ["dense", "select", "capture", "consume"]
    for row in rows:
        assert (row["batch"], row["context"], row["rows"]) == (1, 20, 2)
        assert row["error"] <= 1e-4
        assert row["vs dense"] == pytest.approx(row["us"] / rows[0]["us"])
        assert row["of bandwidth"] == pytest.approx(row["MB"] / row["us"] * 1e3)
        assert row["served by"] == ("pallas" if jax.default_backend() == "gpu" else "xla")
    assert [row["sparse rows"] for row in rows] == [None, None, None, 2]
    assert "served by" in capsys.readouterr().out


def test_the_command_compares_rows_with_one(bench):
    one, two = bench("--rows 2,1")
    assert (one["rows"], two["rows"]) == (1, 2)
    assert one["vs fewest rows"] == two["vs dense"] == 1
    assert two["vs fewest rows"] == pytest.approx(two["us"] / one["us"])


def test_a_peer_is_compared_and_kernels_that_do_not_serve_are_not_timed(monkeypatch):
    monkeypatch.setattr(measure, "bandwidth", lambda: 1e9)
    # No kernel serves heads of 20; one asked for by name is not replaced.
    w = dataclasses.replace(TINY, head_dim=20, retention=None)
    options = attention_ops.Options("pallas", repeats=1)
    (row,) = attention.bench_attention([w], options=options, peer={(2, 40): 1.0})
    assert (row["served by"], row["us"], row["vs torch"]) == ("none", None, None)
    options = attention_ops.Options("xla", repeats=1)
    (row,) = attention.bench_attention([w], options=options, peer={(2, 40): 1.0})
    assert row["vs torch"] == pytest.approx(1e6 / row["us"])


def test_references_are_not_timed_on_a_gpu_unless_asked_for(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    free, asked = (
        attention_ops.Bound(attention_ops.paged_attention, attention_ops.Options(name))
        for name in (None, "xla")
    )
    assert asked.worth_timing("xla")
    assert free.worth_timing("pallas")
    assert not free.worth_timing("xla")


def op_with(op: Op, spoil=lambda out: out) -> Op:
    """A copy of an op whose implementation "other" spoils what the reference gives."""

    def other(*args, **kwargs):
        kwargs |= {"dense_implementation": "xla"} if "dense_implementation" in kwargs else {}
        return spoil(op.get("xla")(*args, **kwargs))

    copy = Op(op.name)
    copy.implementations |= {"xla": op.get("xla"), "other": other}
    return copy


OPS = ("paged_attention", "select_keys", "capture_attention", "sparse_attention")
WRONG = {
    "dense": ("paged_attention", lambda out: 0 * out, "dense is off by 1"),
    "select": ("select_keys", lambda out: out.at[..., 0].add(1), "select is off by 0.0"),
    "capture": (
        "capture_attention",
        lambda out: out._replace(mass=out.mass * 1.1),
        "capture is off by 0.1",
    ),
    "keys of capture": (
        "capture_attention",
        lambda out: out._replace(positions=out.positions + 1),
        "choice of keys of capture is off by 1",
    ),
    "consume": ("sparse_attention", lambda out: 1.01 * out, "consume is off by 0.01"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_result_fails_the_run(case, monkeypatch):
    name, spoil, message = WRONG[case]
    for other in OPS:
        op = getattr(attention_ops, other)
        copy = op_with(op, spoil) if other == name else op_with(op)
        monkeypatch.setattr(attention_ops, other, copy)
    options = attention_ops.Options("other", repeats=1)
    inputs = workloads.paged_inputs(TINY)
    with pytest.raises(RuntimeError, match=message):
        {
            "paged_attention": lambda: attention_ops.dense(TINY, inputs, options),
            "select_keys": lambda: attention_ops.select(TINY, options),
            "capture_attention": lambda: attention_ops.capture(TINY, inputs, options),
            "sparse_attention": lambda: attention_ops.consume(TINY, inputs, options),
        }[name]()


def test_a_consume_that_is_dense_fails_the_run(monkeypatch):
    inputs = workloads.paged_inputs(TINY)
    for name in ("paged_attention", "select_keys"):
        monkeypatch.setattr(attention_ops, name, op_with(getattr(attention_ops, name)))
    dense = attention_ops.paged_attention(*inputs.args(), implementation="xla")
    silent = op_with(attention_ops.sparse_attention, lambda out: dense)
    monkeypatch.setattr(attention_ops, "sparse_attention", silent)
    with pytest.raises(RuntimeError, match="only 0 rows of consume are not dense ones"):
        attention_ops.consume(TINY, inputs, attention_ops.Options("other", repeats=1))


def test_a_failed_op_has_no_time_and_the_others_do(monkeypatch):
    monkeypatch.setattr(measure, "bandwidth", lambda: 1e9)
    for name in OPS:
        op = getattr(attention_ops, name)
        copy = op_with(op, lambda out: 0 * out) if name == "select_keys" else op_with(op)
        monkeypatch.setattr(attention_ops, name, copy)
    seen = []
    with pytest.raises(RuntimeError, match="select is off by"):
        attention.bench_attention(
            [TINY],
            retentions=[0.5],
            options=attention_ops.Options("other", repeats=1),
            progress=lambda rows: seen.append(len(rows)) or seen.extend(rows),
        )
    count, dense, select, capture, _ = seen
    assert count == 4
    assert (select["us"], select["served by"]) == (None, "failed")
    assert dense["us"] > 0
    assert capture["us"] > 0


@pytest.mark.parametrize("text", ["", "0", "1,,4", "4x", "-1"])
def test_malformed_rows_are_refused(text):
    with pytest.raises(ValueError, match="rows are positive integers like 1,4"):
        parse_rows(text)


# The peer ------------------------------------------------------------------------------


@pytest.fixture
def peer_program(monkeypatch):
    """A function that sets what the peer's program prints; returns what it was asked."""

    def answer(stdout: str, returncode: int = 0) -> list:
        asked = []

        def run(command, **options):
            asked.append(json.loads(command[-1]))
            return types.SimpleNamespace(stdout=stdout, stderr="boom", returncode=returncode)

        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(subprocess, "run", run)
        return asked

    return answer


def test_the_peer_is_asked_for_attention(peer_program):
    asked = peer_program('noise\n{"2x40": 0.5}\n')
    assert torch_peer.attention_seconds(TINY, [(2, 40), (4, 40)]) == {(2, 40): 0.5}
    assert asked[0]["cases"] == [[2, 40], [4, 40]]
    assert (asked[0]["attention"], asked[0]["dim"], asked[0]["dtype"]) == (True, 16, "float32")


def test_a_peer_that_fails_is_left_out(peer_program, capsys):
    peer_program("", returncode=1)
    assert torch_peer.attention_seconds(TINY, [(2, 40)]) is None
    assert "no peer: ['boom']" in capsys.readouterr().out


def test_there_is_no_peer_without_torch(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert torch_peer.attention_seconds(TINY, [(2, 40)]) is None


# bench tune ----------------------------------------------------------------------------

CUT = SplitConfig(
    block_rows=8, block_keys=64, splits=1, min_keys=128, num_warps=2, num_stages=3
)


def case_of(rows=(1,)) -> tune_cases.Case:
    """A case whose configurations cut into 1 (computed), 2, 4 and 8 pieces."""
    grid = [dataclasses.replace(CUT, splits=s) for s in (1, 2, 4, 8)]
    key = (8, 16, 1, 128, 8192, "bfloat16")
    chains: dict = {n: functools.partial(lambda n, c: (n, c.splits), n) for n in rows}
    return tune_cases.Case("paged_attention", "8x8192", key, CUT, grid, chains)


@pytest.fixture
def measured(monkeypatch):
    """A function that sets the microseconds by (rows, splits); None fails to compile."""

    def set_times(times):
        def measure(chain, configs):
            values = [times[chain(config)] for config in configs]
            good = {i: v * 1e-6 for i, v in enumerate(values) if v is not None}
            return good, {i: "too large" for i, v in enumerate(values) if v is None}

        monkeypatch.setattr(tune, "_measure", measure)

    return set_times


def test_the_fastest_configuration_is_chosen_with_its_times(measured):
    measured({(1, 1): 20, (1, 2): 12, (1, 4): 10, (1, 8): None})
    entry = tune.measure_case(case_of())
    assert entry["config"]["splits"] == 4
    assert entry["us"] == {"1": 10.0}
    assert entry["computed us"] == {"1": 20.0}
    assert [t["splits"] for t in entry["tried"]] == [4, 2, 1, 8]
    assert entry["tried"][-1]["error"] == "too large"
    assert entry["key"]["length"] == 8192


def test_the_computed_configuration_stays_where_little_is_gained(measured):
    measured({(1, 1): 10.1, (1, 2): 12, (1, 4): 10, (1, 8): 30})
    assert tune.measure_case(case_of())["config"]["splits"] == 1


def test_all_numbers_of_rows_decide(measured):
    one = {(1, 1): 30, (1, 2): 12, (1, 4): 10, (1, 8): 13}
    measured(one | {(4, 1): 30, (4, 2): 12, (4, 4): 20, (4, 8): None})
    entry = tune.measure_case(case_of((1, 4)))
    assert entry["config"]["splits"] == 2
    assert entry["us"] == {"1": 12.0, "4": 12.0}


def test_nothing_is_chosen_where_nothing_runs(measured):
    nothing = {(1, s): None for s in (1, 2, 4, 8)}
    measured(nothing)
    assert tune.measure_case(case_of()) is None
    measured({(1, s): 1 for s in (1, 2, 4, 8)} | {(4, s): None for s in (1, 2, 4, 8)})
    assert tune.measure_case(case_of((1, 4))) is None


def test_no_case_is_begun_when_the_time_is_over(measured):
    measured({(1, 1): 20, (1, 2): 12, (1, 4): 10, (1, 8): 11})
    other = dataclasses.replace(case_of(), key=(4, 16, 1, 128, 8192, "bfloat16"))
    now = iter([0.0, 1.0, 1.5, 2.0])
    made, notes = [], []

    def make(case):
        made.append(case)
        return case

    plan = [functools.partial(make, c) for c in (case_of(), case_of(), other)]
    entries = tune.tune(iter(plan), seconds=2, note=notes.append, clock=lambda: next(now))
    assert len(made) == 2  # the second is of the first one's bucket and is not measured again
    assert len(entries["paged_attention"]) == 1
    assert notes[-1] == "1 cases were left out: 2 s have passed"


def test_what_is_measured_can_be_looked_up(tmp_path, monkeypatch, capsys):
    w = dataclasses.replace(TINY, context=16, rows=1)
    case = tune_cases.select_case(w)
    small = dataclasses.replace(case, grid=[c for c in case.grid if c.num_warps == 2])
    monkeypatch.setattr(tune, "plan", lambda workloads, config: iter([lambda: small]))
    path = tmp_path / "device.json"
    options = ["--shape", "tiny", "--cases", "2x16", "--device-file", str(path)]
    assert main(["bench", "tune", *options]) == 2
    assert "on cpu they would be interpreted: run it where" in capsys.readouterr().err
    assert not path.exists()
    monkeypatch.setattr("sparse_loop_jax.cli.bench.platform", lambda: "gpu")
    assert main(["bench", "tune", *options]) == 0
    table = tuning.read_table(path)
    found = table.find("select_keys", tuning.bucketed("select_keys", rows=4, length=16))
    assert found["num_warps"] in (1, 2)
    made = json.loads(path.read_text())
    assert made["made"]["command"] == "sparse-loop bench tune --seconds 120"
    (entry,) = made["ops"]["select_keys"]
    assert len(entry["tried"]) == 2
    assert all(t["us"]["1"] > 0 for t in entry["tried"])


def test_products_of_a_model_are_measured_in_their_branch():
    plan = list(tune.plan([], model.SHAPES["tiny"]))
    assert len(plan) == 8  # four matrices, by what their configurations serve
    found = set()
    for make in plan:
        case = make()
        assert tuning.describe(case.op, case.key)["rows"] == max(case.chains)
        found.add(case.op)
    assert found == {"project_qkv", "gated_linear", "linear_add_norm"}
    ending = plan[3]()
    entry = tune.measure_case(
        dataclasses.replace(ending, grid=[], chains={1: ending.chains[1]})
    )
    assert entry is not None
    assert entry["us"]["1"] > 0
    assert set(entry["config"]) == set(tuning.OPS["linear_add_norm"].fields)
    # What is tried fits the matrices of a real model.
    hidden, inner = 2048, 5632
    matrices = {
        "project_qkv": [(128, hidden)],
        "gated_linear": [(inner, hidden)],
        "linear_add_norm": [(hidden, hidden), (hidden, inner)],
    }
    for (op, _), tiles in tune_products.TILES.items():
        assert all(tune_products.cut_of(t).fits(*m) for t in tiles for m in matrices[op])


def test_failures_of_a_grid_are_kept(monkeypatch):
    class Calls(chain.Chain):
        def lower(self, seconds):
            raise NotImplementedError("no such tile\nand more")

    calls = Calls(lambda c, s, i: c, 0, 0, [0], 1)
    times, errors = tune._measure(lambda config: calls, [CUT])
    assert (times, errors) == ({}, {0: "NotImplementedError: no such tile"})


def test_plans_begin_with_what_is_reported():
    plan: list = list(tune_cases.cases(workloads.tagged("tune")))
    assert len(plan) == 5 * len(workloads.tagged("tune"))
    reported = 5 * len(workloads.tagged("bench"))
    assert all("bench" in make.args[0].tags for make in plan[:reported])
    assert not any("bench" in make.args[0].tags for make in plan[reported:])


@pytest.mark.parametrize("make", [tune_cases.paged_case, tune_cases.sparse_case])
def test_grids_are_valid(make):
    case = make(dataclasses.replace(TINY, context=64))
    assert len(set(case.grid)) == len(case.grid) > 2
    assert set(tuning.describe(case.op, case.key)) == set(tuning.OPS[case.op].key)
    assert all(c.splits <= max(64 // 16, 1) for c in case.grid)
