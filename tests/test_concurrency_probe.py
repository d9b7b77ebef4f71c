"""benchmarks/concurrency_probe.py: runs from end to end, and fails where it should."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

PATH = Path(__file__).resolve().parent.parent / "benchmarks" / "concurrency_probe.py"


@pytest.fixture
def probe(monkeypatch):
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("concurrency_probe", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "concurrency_probe", module)
    spec.loader.exec_module(module)
    return module


def _rows(file):
    return json.loads(file.read_text())["concurrency"]["rows"]


def test_a_sparse_case_is_measured_written_and_not_done_again(probe, tmp_path, capsys):
    file = tmp_path / "probe.json"
    arguments = ["--tiny", "--requests", "2", "--modes", "r=0.5", "--json", str(file)]
    assert probe.main(arguments) == 0
    (row,) = _rows(file)
    assert (row["mode"], row["requests"], row["resident"], row["compiled"]) == (
        "r=0.5",
        2,
        2,
        0,
    )
    assert row["consumed"] == 2 * row["captured"] > 0
    assert row["store MB"] > 0
    assert row["ms/round"] > 0
    assert "initial deviation 0.02" in capsys.readouterr().out
    assert probe.main([*arguments, "--resume"]) == 0
    assert _rows(file) == [row]
    # Nothing is begun when there is no time for it.
    assert probe.main(["--tiny", "--requests", "2", "--modes", "dense", "--seconds", "0"]) == 1
    assert "FAILED dense, 2 requests: not begun" in capsys.readouterr().out


@pytest.mark.slow
def test_all_modes(probe, tmp_path):
    file = tmp_path / "probe.json"
    assert probe.main(["--tiny", "--json", str(file)]) == 0
    rows = _rows(file)
    assert [(r["requests"], r["mode"]) for r in rows] == [
        (n, mode) for n in (2, 4) for mode in ("dense", "r=1", "r=0.1", "r=0.5")
    ]
    assert {r["captured"] > 0 for r in rows if r["mode"] in ("r=0.1", "r=0.5")} == {True}
    assert {r["same as dense"] for r in rows if r["mode"] == "r=1"} == {1.0}


def test_the_prompts_are_those_of_the_probe(probe):
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=49152))
    prompts = probe.Probe(model, context=65536).prompts(64)
    assert (len(prompts), {len(p) for p in prompts}) == (64, {256})
    assert prompts[0][:3] == [1, 138, 275]
    assert prompts[63][255] == 1 + (137 * 255 + 53 * 63) % 49000


@pytest.mark.parametrize(
    ("retention", "captured", "consumed", "store", "message"),
    [
        (1.0, 0, 0, 0, None),
        (None, 2, 4, 0, "a dense case captured 2 rows"),
        (1.0, 0, 0, 5, "a store of 5 bytes"),
        (0.5, 8, 16, 5, None),
        (0.5, 0, 0, 5, "captured 0 rows and consumed 0: at least 6"),
        (0.5, 8, 8, 5, "2 times as many are expected"),
        (0.5, 7, 14, 5, "in 2 layers"),
    ],
)
def test_a_case_that_ran_in_another_mode_has_failed(
    probe, retention, captured, consumed, store, message
):
    config = SimpleNamespace(num_hidden_layers=2, total_ut_steps=4)
    here = probe.Probe(SimpleNamespace(config=config), context=64)
    counters = {"captured_rows": captured, "consumed_rows": consumed}
    run = probe.Run([[1, 2, 3, 4]], 1.0, [0.1], [0.1], 1, counters)
    if message is None:
        probe._check_sparse(here, run, retention, store)
        return
    with pytest.raises(RuntimeError, match=message):
        probe._check_sparse(here, run, retention, store)


def test_ratios_are_those_to_dense_decoding_of_as_many_requests(probe):
    def row(mode, requests, speed, first):
        return {
            "mode": mode, "requests": requests, "tokens/s": speed, "first token p95 ms": first
        }  # fmt: skip

    dense = [row("dense", 64, 7.0, 7.0), row("dense", 32, 8.0, 50.0)]
    sparse = row("r=0.1", 32, 6.0, 60.0)
    ratios = probe._against_dense(sparse, [*dense, sparse])
    assert ratios == {"of dense": 0.75, "first token of dense": 1.2}
    assert set(probe._against_dense(sparse, dense[:1]).values()) == {None}


def test_a_case_that_fails_is_told_and_the_next_one_runs(probe, monkeypatch, capsys):
    def measure_case(_probe, mode, requests, dense_tokens):
        if mode == "dense":
            raise RuntimeError("1 of 2 requests were resident at once")
        return {"mode": mode, "requests": requests}, []

    monkeypatch.setattr(probe, "measure_case", measure_case)
    assert probe.main(["--tiny", "--requests", "2", "--modes", "dense,r=0.1"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED dense, 2 requests: 1 of 2 requests were resident at once" in printed
    assert "r=0.1, 2 requests: mode r=0.1, requests 2" in printed
