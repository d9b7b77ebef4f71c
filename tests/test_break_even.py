"""Where sparse decode pays: a device's file, what reads it and what writes it."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import sparse_loop_jax as slj
from sparse_loop_jax.bench.break_even import entries, write
from sparse_loop_jax.bench.model import SHAPES
from sparse_loop_jax.cli import main
from sparse_loop_jax.kernels.tuning import file_name
from sparse_loop_jax.sparse import break_even
from sparse_loop_jax.sparse.break_even import BreakEven, slower_below

TINY = SHAPES["tiny"]
TENTH = slj.SparseDecodeConfig(key_retention=0.1)


def entry(speeds, batch=1, retention=0.1) -> BreakEven:
    return BreakEven(break_even.shape_of(TINY), "float32", batch, retention, tuple(speeds))


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A function that makes files of `{device: entries}` those of the package."""

    def ship(**devices):
        folder = tmp_path / "data" / "break_even"
        folder.mkdir(parents=True)
        for device, measured in devices.items():
            listed = [_as_json(e) for e in measured]
            (folder / file_name(device)).write_text(
                json.dumps({"device": device, "entries": listed})
            )
        monkeypatch.setattr(break_even.importlib.resources, "files", lambda package: tmp_path)

    return ship


def _as_json(e: BreakEven) -> dict:
    return {
        "shape": dict(zip(break_even.SHAPE_FIELDS, e.shape, strict=True)),
        "dtype": e.dtype,
        "batch": e.batch,
        "retention": e.retention,
        "times dense": {str(context): speed for context, speed in e.speeds},
    }


@pytest.mark.parametrize(
    ("speeds", "context", "text"),
    [
        # Halfway between 0.9 and 1.1, so halfway between the contexts.
        ([(1000, 0.9), (3000, 1.1)], 2000, "from 2,000 tokens"),
        ([(1000, 0.8), (2000, 0.9), (4000, 1.3)], 2500, "from 2,500 tokens"),
        ([(1000, 1.0), (3000, 1.1)], 0, "at 1,000 tokens or fewer"),
        ([(1000, 0.8), (3000, 0.9)], 3000, "not up to 3,000 tokens"),
        # The last crossing counts.
        ([(1000, 0.8), (2000, 1.1), (3000, 0.9), (4000, 1.0)], 4000, "from 4,000 tokens"),
    ],
)
def test_the_crossing_by_hand(speeds, context, text):
    assert entry(speeds).slower_below == context
    assert str(entry(speeds)) == text


def test_a_bound_comes_from_more_requests_and_fewer_keys_alone():
    found = [
        entry([(1000, 0.9), (3000, 1.1)], batch=4, retention=0.1),
        entry([(1000, 0.9), (9000, 1.1)], batch=4, retention=0.5),
        entry([(100, 0.9), (300, 1.1)], batch=32, retention=0.1),
    ]
    assert slower_below(found, 4, 0.5) == 5000
    assert slower_below(found, 4, 0.25) == slower_below(found, 1, 0.1) == 2000
    assert slower_below(found, 5, 0.5) == 200
    assert slower_below(found, 4, 0.05) == slower_below(found, 33, 0.5) == 0


def test_generate_and_stream_warn_of_contexts_below(shipped, load_gold):
    model = load_gold("mha").model()
    device = jax.devices()[0].device_kind
    ours = dataclasses.replace(
        entry([(8, 0.9), (24, 1.1)]), shape=break_even.shape_of(model.config)
    )
    shipped(**{device: [ours]})
    expected = rf"on {device} below 16 tokens for 1 request at key_retention 0.1; .* end at 11"
    with pytest.warns(slj.SparseSlowerWarning, match=expected) as caught:
        slj.stream(model, [[1] * 8], max_new_tokens=4, sparse=TENTH).close()
    assert caught[0].filename == __file__
    with pytest.warns(slj.SparseSlowerWarning) as caught:
        slj.generate(model, [[1] * 8], max_new_tokens=4, sparse=TENTH)
    assert caught[0].filename == __file__
    # Warnings are errors here, so these are silent.
    longer, two, other = [[1] * 13], [[1] * 8, [2] * 8], dataclasses.replace(TENTH, sink_keys=1)
    for prompts, options in (
        (longer, {"sparse": TENTH}),
        (two, {"sparse": TENTH}),
        (two[:1], {"sparse": other}),
        (two[:1], {}),
        (two[:1], {"sparse": TENTH, "speculative": slj.SpeculativeConfig(2, 2)}),
    ):
        slj.stream(model, prompts, max_new_tokens=4, **options).close()  # pyright: ignore


def test_nothing_is_said_of_another_device_shape_or_dtype(shipped):
    shipped(other=[entry([(1000, 0.5)])])
    text = break_even.warning(TINY, jnp.dtype("float32"), TENTH, "other", 1, 100)
    assert text is not None
    assert "below 1,000 tokens" in text
    wider = dataclasses.replace(TINY, vocab_size=257)
    for config, dtype, device in (
        (TINY, "float32", "this"),
        (TINY, "bfloat16", "other"),
        (wider, "float32", "other"),
    ):
        assert break_even.warning(config, dtype, TENTH, device, 1, 100) is None


def test_inspect_reports_it(shipped, load_gold, capsys):
    shape = break_even.shape_of(load_gold("gqa").config)
    measured = [entry([(10, 0.9), (30, 1.1)], 1, 0.1), entry([(10, 0.9)], 8, 0.25)]
    shipped(**{"NVIDIA X": [dataclasses.replace(e, shape=shape) for e in measured]})
    assert main(["inspect", str(load_gold("gqa").directory)]) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "Sparse decode is as fast as dense or faster, measured on NVIDIA X:",
        "     1 x  r = 0.1   from 20 tokens",
        "     8 x  r = 0.25  not up to 10 tokens",
    ]


def test_the_command_measures_and_replaces_its_own_entries(tmp_path, capsys):
    path = tmp_path / "device.json"
    other = _as_json(dataclasses.replace(entry([(5, 1.0)]), dtype="bfloat16"))
    old = _as_json(entry([(7, 1.0)]))
    device = jax.devices()[0].device_kind
    path.write_text(json.dumps({"device": device, "entries": [other, old]}))
    command = "bench break-even --shape tiny --dtype float32 --cases 1x16 --retentions 0.25"
    options = ["--steps", "1", "--repeats", "1", "--device-file", str(path)]
    assert main([*command.split(), *options]) == 0
    assert f"wrote {path}" in capsys.readouterr().out
    found_device, (kept, found) = break_even.read(path)
    assert found_device == device
    assert _as_json(kept) == other
    assert (found.batch, found.retention) == (1, 0.25)
    ((context, speed),) = found.speeds
    assert context == 16
    assert speed > 0

    path.write_text(json.dumps({"device": "another", "entries": []}))
    with pytest.raises(ValueError, match=f"is of 'another', this is '{device}'"):
        write(path, [], "")


def test_rows_of_a_benchmark_become_entries():
    rows = [
        {"batch": batch, "context": context, "retention": retention, "vs dense": speed}
        for batch, context, retention, speed in (
            (8, 100, 1.0, 1.0),
            (8, 100, 0.1, 0.9),
            (8, 300, 0.1, 1.1),
            (1, 100, 0.1, 0.8),
        )
    ]
    shape = dict(zip(break_even.SHAPE_FIELDS, break_even.shape_of(TINY), strict=True))
    same = {"shape": shape, "dtype": "float32", "retention": 0.1}
    assert entries(TINY, "float32", rows) == [
        {**same, "batch": 1, "times dense": {"100": 0.8}},
        {**same, "batch": 8, "times dense": {"100": 0.9, "300": 1.1}},
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "device.json: the file: JSONDecodeError"),
        ("[]", "device.json: the file: TypeError"),
        ('{"device": "x"}', "device.json: the file: KeyError: 'entries'"),
        ('{"device": "x", "entries": [{}]}', r"entries\[0\]: KeyError: 'times dense'"),
        (
            '{"device": "x", "entries": [{"times dense": {}}]}',
            r"entries\[0\]: ValueError: no speed was measured",
        ),
    ],
)
def test_a_broken_file_is_named(tmp_path, text, message):
    path = tmp_path / "device.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        break_even.read(path)
