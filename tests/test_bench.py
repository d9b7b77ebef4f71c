"""The benchmarks at toy size: their tables, their byte model, their refusals."""

from __future__ import annotations

import json

import jax.numpy as jnp
import pytest

from sparse_loop_jax.bench import report
from sparse_loop_jax.bench.model import SHAPES, state_at, step_bytes
from sparse_loop_jax.bench.rounds import check_sparse, time_rounds
from sparse_loop_jax.bench.speculative import round_bytes
from sparse_loop_jax.cli import main
from sparse_loop_jax.cli.bench import parse_cases
from sparse_loop_jax.cli.bench_options import BENCHMARKS, OPTIONS
from sparse_loop_jax.decoding import DecodeSpec, SpeculativeConfig
from sparse_loop_jax.models import OURO_1_4B, Ouro
from sparse_loop_jax.sparse import SparseDecodeConfig

TINY = SHAPES["tiny"]


def test_the_bytes_of_a_step_are_those_of_the_design():
    # Ouro-1.4B: 9.87 GB of layers a step and 0.2 GB of head; 768 KiB of K/V a token.
    assert step_bytes(OURO_1_4B, 1, 0, 2).weights == pytest.approx(9.87e9 + 0.2e9, rel=2e-3)
    assert step_bytes(OURO_1_4B, 1, 1, 2).kv == 768 * 1024
    # Two loops of four read a tenth: 2.2 / 4.
    sparse, dense = (step_bytes(OURO_1_4B, 8, 8192, 2, r).kv for r in (0.1, 1.0))
    assert sparse == pytest.approx(0.55 * dense)


@pytest.mark.parametrize(
    ("drafting", "retention", "weights", "kv"),
    # Passes over the weights and the K/V of one loop, K = 3 (design, section 5).
    [(2, 1.0, 10, 10), (1, 1.0, 7, 7), (2, 0.1, 10, 8.2), (1, 0.1, 7, 5.2)],
)
def test_the_bytes_of_a_round_are_those_of_the_design(drafting, retention, weights, kv):
    spec = DecodeSpec(OURO_1_4B, speculative=SpeculativeConfig(3, drafting))
    counted = round_bytes(OURO_1_4B, spec, 8, 1024, 2, retention)
    plain = step_bytes(OURO_1_4B, 8, 1024, 2)
    head = OURO_1_4B.vocab_size * OURO_1_4B.hidden_size * 2
    assert (counted.weights - 4 * head) / (plain.weights - head) * 4 == pytest.approx(weights)
    assert counted.kv / plain.kv * 4 == pytest.approx(kv)


@pytest.mark.parametrize("speculative", [None, SpeculativeConfig(2, 1)])
def test_a_state_at_a_context_decodes_from_there(speculative):
    spec = DecodeSpec(TINY, speculative=speculative)
    state = state_at(spec, 2, 40, jnp.float32, new_tokens=6)
    assert state.position.tolist() == [39, 39]
    pages = state.cache.page_table[:, :, :3].ravel().tolist()
    assert len(set(pages)) == len(pages)
    assert pages != sorted(pages)


def test_a_sparse_run_that_ran_dense_is_no_result():
    params = Ouro(TINY, rngs=0).params
    sparse = DecodeSpec(TINY, sparse=SparseDecodeConfig(0.5).compiled_part)
    timed = time_rounds(params, sparse, 1, 20, "float32", 0.5, rounds=2, repeats=1)
    check_sparse(sparse, 1, timed.counters)
    with pytest.raises(RuntimeError, match=r"should capture and consume \(4, 8\) rows"):
        check_sparse(sparse, 2, timed.counters)


@pytest.mark.parametrize(
    ("arguments", "columns"),
    [
        (
            ["decode", "--retentions", "0.5", "--no-peer", "--steps", "2"],
            {"ms/step", "of roofline", "vs dense"},
        ),
        (["speculative", "--steps", "2"], {"ms/round", "vs plain", "draft loops"}),
        (["prefill"], {"seconds", "TFLOP/s", "attention ms", "attention vs torch"}),
    ],
)
def test_the_commands_print_a_table_and_write_json(arguments, columns, tmp_path, capsys):
    file = tmp_path / "bench.json"
    shared = "--shape tiny --dtype float32 --cases 1x20 --repeats 1 --json"
    assert main(["bench", *arguments, *shared.split(), str(file)]) == 0
    data = json.loads(file.read_text())[arguments[0]]
    assert columns <= set(data["rows"][0])
    assert data["setup"]["shape"] == "tiny"
    assert "jax" in data["setup"]
    printed = capsys.readouterr()
    assert all(column in printed.out for column in columns)
    assert f"{arguments[0]}: 1x20" in printed.err or "draft loops: 1x20" in printed.err


def test_a_second_benchmark_goes_into_the_same_file(tmp_path):
    file = tmp_path / "bench.json"
    report.write_json(file, "a", [{"x": 1}], {})
    report.write_json(file, "b", [{"x": 2}], {})
    report.write_json(file, "a", [{"x": 3}], {})
    data = json.loads(file.read_text())
    assert {name: part["rows"][0]["x"] for name, part in data.items()} == {"a": 3, "b": 2}


def test_what_was_not_measured_is_null_in_the_file(tmp_path):
    file = tmp_path / "bench.json"
    report.write_json(file, "a", [{"x": float("nan"), "y": "text", "z": None}], {})
    assert "NaN" not in file.read_text()
    assert json.loads(file.read_text())["a"]["rows"] == [{"x": None, "y": "text", "z": None}]
    with pytest.raises(ValueError, match="JSON"):
        report.write_json(file, "a", [{"x": float("inf")}], {})


def test_cases_are_read():
    assert parse_cases("1x1024, 8x64") == [(1, 1024), (8, 64)]


@pytest.mark.parametrize("text", ["", "8", "8x", "0x5", "8x-1", "1x2,,3x4"])
def test_malformed_cases_are_refused(text):
    with pytest.raises(ValueError, match="cases are BATCHxTOKENS like 8x1024"):
        parse_cases(text)


def test_every_option_is_of_a_benchmark_and_says_its_default(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for text in ("attention: rows that share pages; default: 1,4", "serve: default: 64"):
        assert text in shown
    for option in OPTIONS:
        assert set(option.benchmarks) <= set(BENCHMARKS)
        assert option.benchmarks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "huge"], "--shape must be one of"),
        (["--cases", ""], "--cases are BATCHxTOKENS like 8x1024, got ''"),
        (["--rows", "4"], "--rows is for bench attention, and bench decode would not use it"),
        (["--no-warm-up"], "--no-warm-up is for bench serve"),
        (["--steps", "0"], "--steps and --repeats must be >= 1"),
        (["--repeats", "0"], "--steps and --repeats must be >= 1"),
        (["--json", "/no/directory/x.json"], "--json /no/directory/x.json: no such directory"),
        (["--device-file", "x.json"], "--device-file is for bench break-even, tune, and"),
        (["--retentions", "abc"], "--retentions are numbers like 1,0.5,0.1, got 'abc'"),
        (["--retentions", "0.5,,1"], "--retentions are numbers like 1,0.5,0.1, got ''"),
        (["--retentions", "0.1,1.5"], "--retentions must be in (0, 1], got 1.5"),
        (["--retentions", "0"], "--retentions must be in (0, 1], got 0"),
    ],
)
def test_bad_arguments_are_one_line(arguments, message, capsys, monkeypatch):
    def allocates(*_):
        raise AssertionError("weights before complaints")

    monkeypatch.setattr("sparse_loop_jax.bench.decode.random_params", allocates)
    assert main(["bench", "decode", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["attention", "--implementation", "foo"],
            "--implementation of bench attention is",
        ),
        (
            ["decode", "--implementation", "triton"],
            "--implementation of bench decode is",
        ),
        (["break-even", "--retentions", "0.5,1"], "leave 1 out of --retentions"),
        (["break-even", "--device-file", "broken.json"], "broken.json"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(
    arguments, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    assert main(["bench", *arguments, "--shape", "tiny", "--cases", "1x20"]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "1x20" not in printed.err  # no measurement was begun
    assert [path.name for path in tmp_path.iterdir()] == ["broken.json"]
