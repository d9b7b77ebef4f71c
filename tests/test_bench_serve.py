"""`sparse-loop bench serve`: workloads, the replay's clock, and the command."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from sparse_loop_jax.bench.model import SHAPES
from sparse_loop_jax.bench.serve import replay
from sparse_loop_jax.bench.serve_workload import (
    Arrival,
    TimedRequest,
    make_workload,
    parse_range,
    read_workload,
    with_tokens,
)
from sparse_loop_jax.cli import main
from sparse_loop_jax.engine import RequestOutput, RequestTimes

MODEL: Any = SimpleNamespace(config=SHAPES["tiny"], tokenizer=None)


class Clock:
    """Time that passes in steps and in sleep alone."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class OneAtATime:
    """Serves the first request that came: a token a second, after a second in its prompt."""

    def __init__(self, clock: Clock, reason="length"):
        self.clock = clock
        self.reason = reason
        self.requests: list[list] = []  # id, max_tokens, when added, when started, tokens
        self.rounds = 0

    def metrics(self):
        return {
            "rounds": self.rounds, "drafted_tokens": 0, "accepted_tokens": 0,
            "preemptions": 0, "compilations": 0,
        }  # fmt: skip

    def add_request(self, request_id, prompt, params, *, priority=0):
        assert params.ignore_eos
        self.requests.append([request_id, params.max_tokens, self.clock.now, None, []])

    @property
    def has_unfinished(self):
        return bool(self.requests)

    def step(self):
        request_id, limit, added, started, tokens = request = self.requests[0]
        self.clock.now += 1
        self.rounds += 1
        if started is None:
            request[3] = self.clock.now - 1
            return []
        tokens.append(5)
        finished = len(tokens) == limit
        if finished:
            del self.requests[0]
        return [
            RequestOutput(
                request_id, list(tokens), [5], None, finished,
                self.reason if finished else None, 1, 0,
                RequestTimes(started - added, None, None),
            )
        ]  # fmt: skip


def test_times_count_from_the_arrival():
    clock = Clock()
    engine: Any = OneAtATime(clock)
    workload = [
        TimedRequest(0.0, [1], 2, 0),
        TimedRequest(0.5, [1], 1, 0),  # arrives during a step
        TimedRequest(10.0, [1], 3, 0),  # while nothing runs
    ]
    done = replay(engine, workload, clock=clock, sleep=clock.sleep)
    times = done.times()
    # The first: a second in its prompt, tokens at 2 and 3. The second: told at 1, begun at 3.
    assert times["queueing"] == [0.0, 2.5, 0.0]
    assert times["first token"] == [2.0, 4.5, 2.0]
    assert times["between tokens"] == [1.0, 1.0, 1.0]
    assert times["end to end"] == [3.0, 4.5, 4.0]
    assert done.seconds == 14.0
    row = done.row()
    assert (row["requests"], row["tokens/s"]) == (3, 6 / 14)
    assert (row["prompt tokens/s"], row["rounds"], row["accepted"]) == (3 / 14, 9, None)
    (first,) = [r for r in done.time_rows() if r["ms"] == "first token"]
    assert (first["p50"], first["mean"]) == (2000.0, pytest.approx(8500 / 3))
    assert first["p99"] == pytest.approx(4450.0)


def test_tokens_that_come_together_share_their_time():
    clock = Clock()
    engine: Any = OneAtATime(clock)
    step = engine.step

    def three_at_once():
        outputs = [output for _ in range(3) for output in step()]
        new = [token for output in outputs for token in output.new_token_ids]
        return [RequestOutput(**{**vars(outputs[-1]), "new_token_ids": new})]

    engine.step = three_at_once
    done = replay(engine, [TimedRequest(0.0, [1], 5, 0)], clock=clock, sleep=clock.sleep)
    assert done.served[0].told == [(3.0, 2), (6.0, 3)]
    assert done.times()["between tokens"] == [1.0, 1.0, 1.0]


def test_a_request_that_fails_is_no_measurement():
    clock = Clock()
    engine: Any = OneAtATime(clock, reason="error")
    with pytest.raises(RuntimeError, match="request 0 ended with 'error' after 1 of 1 tokens"):
        replay(engine, [TimedRequest(0.0, [1], 1, 0)], clock=clock, sleep=clock.sleep)
    engine.add_request("x", [1], SimpleNamespace(max_tokens=1, ignore_eos=True))
    with pytest.raises(RuntimeError, match="has requests of somebody else's"):
        replay(engine, [], clock=clock)


def test_a_workload_is_lines_of_json(tmp_path):
    file = tmp_path / "load.jsonl"
    file.write_text(
        '{"arrival": 1.5, "prompt_tokens": 12, "max_tokens": 3, "priority": -1}\n\n'
        '{"prompt": [5, 6], "max_tokens": 2}\n'
        '{"prompt": "text", "max_tokens": 1}\n'
    )
    arrivals = read_workload(file)
    assert arrivals == [
        Arrival(0.0, (5, 6), 2), Arrival(0.0, "text", 1), Arrival(1.5, 12, 3, -1)
    ]  # fmt: skip
    drawn, again = (with_tokens(MODEL, [arrivals[0], arrivals[2]], seed) for seed in (1, 1))
    assert drawn == again
    assert drawn[0] == TimedRequest(0.0, [5, 6], 2, 0)
    assert len(drawn[1].prompt) == 12
    assert drawn[1].kv_tokens == 14
    with pytest.raises(
        ValueError, match="the prompt of request 1 is text and the model has no"
    ):
        with_tokens(MODEL, arrivals)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not valid JSON"),
        ('{"prompt_tokens": 1}', "line 2: max_tokens must be an integer >= 1, got None"),
        ('{"prompt_tokens": 0, "max_tokens": 1}', "prompt_tokens must be an integer >= 1"),
        ('{"max_tokens": 1}', "give prompt or prompt_tokens, one of them"),
        ('{"prompt": "a", "prompt_tokens": 1, "max_tokens": 1}', "one of them"),
        ('{"prompt": 5, "max_tokens": 1}', "prompt must be a text or a list of token ids"),
        ('{"prompt": "a", "max_tokens": 1, "arrival": -1}', "arrival must be seconds >= 0"),
        ('{"prompt": "a", "max_tokens": 1, "priority": 0.5}', "priority must be an integer"),
        ('{"prompt": "a", "max_tokens": 1, "prioriti": 1}', "'prioriti' is none of"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    file = tmp_path / "load.jsonl"
    file.write_text('{"prompt_tokens": 1, "max_tokens": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_workload(file)


def test_an_empty_workload_is_refused(tmp_path):
    file = tmp_path / "load.jsonl"
    file.write_text("\n")
    with pytest.raises(ValueError, match="has no requests"):
        read_workload(file)


def test_random_requests_keep_their_bounds_and_rate():
    lengths: Any = {"prompt_tokens": (3, 9), "output_tokens": (2, 2)}
    made = make_workload(400, rate=20.0, seed=1, **lengths)
    assert made == make_workload(400, rate=20.0, seed=1, **lengths)
    assert made != make_workload(400, rate=20.0, seed=2, **lengths)
    assert {a.prompt for a in made} == set(range(3, 10))
    assert {a.max_tokens for a in made} == {2}
    seconds = [a.seconds for a in made]
    assert seconds[0] == 0
    assert seconds == sorted(seconds)
    assert 16 < 400 / seconds[-1] < 25
    at_once = make_workload(3, rate=float("inf"), **lengths)
    assert {a.seconds for a in at_once} == {0}
    with pytest.raises(ValueError, match="requests must be >= 1, got 0"):
        make_workload(0, rate=1, **lengths)
    with pytest.raises(ValueError, match="rate must be above 0, got 0"):
        make_workload(1, rate=0, **lengths)


def test_ranges_are_read():
    assert parse_range("x", "16:64") == (16, 64)
    assert parse_range("x", "7") == (7, 7)
    for text in ("", "0", "5:4", "a:b", "1:2:3", "-1:5"):
        with pytest.raises(ValueError, match="x must be a length like 64 or a range"):
            parse_range("x", text)


def test_the_command_replays_a_file_and_writes_json(tmp_path, capsys):
    load, out = tmp_path / "load.jsonl", tmp_path / "bench.json"
    load.write_text(
        "".join(
            json.dumps({"arrival": i / 50, "prompt_tokens": 4 + i, "max_tokens": 3}) + "\n"
            for i in range(5)
        )
    )
    options = "--shape tiny --dtype float32 --max-num-seqs 2"
    assert main(["bench", "serve", str(load), *options.split(), "--json", str(out)]) == 0
    data = json.loads(out.read_text())["serve"]
    (row,) = data["rows"]
    assert (row["requests"], row["retention"], row["compiled"]) == (5, 1.0, 0)
    assert row["counters"]["generated_tokens"] == 15
    assert row["counters"]["prompt_tokens"] == 30
    assert [r["ms"] for r in row["ms"]] == [
        "queueing", "first token", "between tokens", "end to end"
    ]  # fmt: skip
    assert all(0 <= r["p50"] <= r["p95"] <= r["p99"] for r in row["ms"])
    assert (data["setup"]["max_num_seqs"], data["setup"]["shape"]) == ("2", "tiny")
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("first token", "p95", "tokens/s", "jax"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "no/such/file"], "no/such/file"),
        (["serve", "--prompt-tokens", "x"], "prompt-tokens must be a length"),
        (["serve", "--requests", "0"], "requests must be >= 1"),
        (["serve", "--seed", "-1"], "--seed must be >= 0, got -1"),
        (["serve", "--draft-loops", "3"], "--draft-loops needs --speculative-tokens"),
        (
            ["decode", "load.jsonl"],
            "workload is for bench serve, and bench decode would not use it",
        ),
    ],
)
def test_bad_arguments_are_one_line(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
