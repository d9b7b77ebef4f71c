"""`sparse-loop bench serve`: a workload replayed against an engine in this process."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from sparse_loop_jax.bench.report import Row
from sparse_loop_jax.bench.serve_workload import TimedRequest
from sparse_loop_jax.engine import Engine, RequestOutput, SamplingParams
from sparse_loop_jax.generation.buckets import CHUNKS
from sparse_loop_jax.generation.memory import peak_bytes

# Tokens after which a request of the warm-up has run a prompt, and a round at least.
_WARM_TOKENS = 2


@dataclasses.dataclass
class Served:
    """One request of a replay, in seconds of its clock.

    Attributes:
      request: what arrived.
      added: when the engine was told of it: later than it arrived where a step was running.
      queued: from `added` to the first prompt tokens on their way to the device.
      told: when new tokens came out, and how many.
    """

    request: TimedRequest
    added: float = 0.0
    queued: float = 0.0
    told: list[tuple[float, int]] = dataclasses.field(default_factory=list)

    @property
    def queueing(self) -> float:
        """From its arrival to its first prompt tokens on their way."""
        return self.added - self.request.seconds + self.queued

    @property
    def first_token(self) -> float:
        return self.told[0][0] - self.request.seconds

    @property
    def end_to_end(self) -> float:
        return self.told[-1][0] - self.request.seconds

    @property
    def between_tokens(self) -> list[float]:
        """Of each token after the first output; tokens that come together share their time."""
        gaps = []
        for (before, _), (now, count) in zip(self.told, self.told[1:], strict=False):
            gaps += [(now - before) / count] * count
        return gaps


@dataclasses.dataclass(frozen=True)
class Replay:
    """What came of a workload.

    Attributes:
      served: in the order of arrival.
      seconds: from the first arrival to the last token.
      counters: of the engine, by how much they grew.
    """

    served: list[Served]
    seconds: float
    counters: dict[str, float]

    def times(self) -> dict[str, list[float]]:
        """Seconds by what was measured."""
        return {
            "queueing": [s.queueing for s in self.served],
            "first token": [s.first_token for s in self.served],
            "between tokens": [gap for s in self.served for gap in s.between_tokens],
            "end to end": [s.end_to_end for s in self.served],
        }

    def row(self) -> Row:
        """Throughput and what the engine did."""
        counters = self.counters
        tokens = sum(count for s in self.served for _, count in s.told)
        prompt = sum(len(s.request.prompt) for s in self.served)
        drafted, rounds = counters["drafted_tokens"], counters["rounds"]
        peak = peak_bytes()
        return {
            "requests": len(self.served),
            "seconds": self.seconds,
            "requests/s": len(self.served) / self.seconds,
            "tokens/s": tokens / self.seconds,
            "prompt tokens/s": prompt / self.seconds,
            "rounds": int(rounds),
            "accepted": counters["accepted_tokens"] / drafted if drafted else None,
            "preemptions": int(counters["preemptions"]),
            "compiled": int(counters["compilations"]),
            "peak GB": None if peak is None else peak / 1e9,
        }

    def time_rows(self) -> list[Row]:
        """Percentiles in milliseconds, interpolated between neighbours."""
        rows = []
        for name, seconds in self.times().items():
            row: Row = {"ms": name}
            for q in (50, 95, 99):
                row[f"p{q}"] = 1e3 * float(np.percentile(seconds, q)) if seconds else None
            row["mean"] = 1e3 * float(np.mean(seconds)) if seconds else None
            rows.append(row)
        return rows


def replay(
    engine: Engine,
    workload: Sequence[TimedRequest],
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Replay:
    """Adds each request at its time and steps until all have ended.

    Times count from when a request *arrives*, also where the engine could not be told yet: a
    workload that is too much is seen as waiting, not as fewer requests.

    Raises:
      ValueError: a request never fits the engine.
      RuntimeError: one did not come to its end, or the engine has other requests.
    """
    if engine.has_unfinished:
        raise RuntimeError("the engine has requests of somebody else's")
    waiting = sorted(workload, key=lambda request: request.seconds)
    served = [Served(request) for request in waiting]
    before = engine.metrics()
    start = clock()
    following = 0
    while following < len(served) or engine.has_unfinished:
        while following < len(served):
            one = served[following]
            one.added = clock() - start
            if one.added < one.request.seconds:
                break
            engine.add_request(
                str(following),
                one.request.prompt,
                SamplingParams(max_tokens=one.request.max_tokens, ignore_eos=True),
                priority=one.request.priority,
            )
            following += 1
        if engine.has_unfinished:
            for output in engine.step():
                _note(served[int(output.request_id)], output, clock() - start)
        else:
            sleep(max(0.0, served[following].request.seconds - (clock() - start)))
    after = engine.metrics()
    last = max(one.told[-1][0] for one in served)
    return Replay(
        served,
        last - served[0].request.seconds,
        {name: after[name] - before[name] for name in after},
    )


def warm_up(engine: Engine, workload: Sequence[TimedRequest], vocab_size: int) -> None:
    """Compiles what a replay will need, with other prompts of the same lengths.

    All at once, and then for each chunk length one such prompt, and as many as run at once.
    Each is ended as soon as it has been through a prompt and a round.
    """
    rng = np.random.default_rng(0)
    largest = max(workload, key=lambda request: request.kv_tokens)
    longest = max(len(request.prompt) for request in workload)
    groups = [[(len(r.prompt), r.max_tokens) for r in (largest, *workload)]]
    together = min(len(workload), int(engine.metrics()["rows"]))
    for chunk in CHUNKS:
        one = (min(chunk, longest), 1)
        groups += [[one], [one] * together]
        if chunk >= longest:
            break
    for group in groups:
        for index, (length, most) in enumerate(group):
            prompt = rng.integers(1, vocab_size, length).tolist()
            params = SamplingParams(max_tokens=most, ignore_eos=True)
            engine.add_request(str(index), prompt, params)
        while engine.has_unfinished:
            for output in engine.step():
                if len(output.token_ids) >= _WARM_TOKENS and not output.finished:
                    engine.abort(output.request_id)


def _note(one: Served, output: RequestOutput, now: float) -> None:
    if output.new_token_ids:
        one.told.append((now, len(output.new_token_ids)))
    if output.times.queued is not None:
        one.queued = output.times.queued
    if output.finished and output.finish_reason != "length":
        raise RuntimeError(
            f"request {output.request_id} ended with {output.finish_reason!r} after "
            f"{len(output.token_ids)} of {one.request.max_tokens} tokens"
        )
