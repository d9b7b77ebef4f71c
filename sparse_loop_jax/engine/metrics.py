"""What an engine counts, and how Prometheus reads it."""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any

from sparse_loop_jax.decoding.config import DecodeSpec
from sparse_loop_jax.decoding.state import RoundCounters
from sparse_loop_jax.engine.request import RequestTimes

# Upper ends in seconds; fixed, so that what is kept does not grow with requests.
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """Counts of seconds by bucket, and their sum."""

    def __init__(self):
        self.counts = [0] * (len(_BUCKETS) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, seconds: float | None) -> None:
        if seconds is None:
            return
        self.counts[bisect.bisect_left(_BUCKETS, seconds)] += 1
        self.sum += seconds

    def lines(self, name: str):
        yield f"# TYPE {name} histogram"
        total = 0
        for end, count in zip((*map(str, _BUCKETS), "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{end}"}} {total}'
        yield f"{name}_sum {self.sum}"
        yield f"{name}_count {total}"


@dataclasses.dataclass
class Counters:
    """Sums since the engine was made."""

    requests_finished_stop: int = 0
    requests_finished_length: int = 0
    requests_finished_abort: int = 0
    requests_finished_error: int = 0
    prompt_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_reused_tokens: int = 0
    generated_tokens: int = 0
    rounds: int = 0
    loops_run: int = 0  # passes over the layers in plain rounds
    loops_skipped: int = 0  # passes that were left out: every row had left
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    captured_rows: int = 0
    consumed_rows: int = 0
    discarded_rounds: int = 0  # outputs of a round for a request that had ended
    discarded_tokens: int = 0
    prefill_calls: int = 0
    preemptions: int = 0
    resumptions: int = 0
    swapped_bytes: int = 0
    failures: int = 0
    compilations: int = 0


class Metrics:
    """Counters and times of one engine; a fixed size whatever passes through."""

    def __init__(self):
        self.counters = Counters()
        self.times = {
            "queue_seconds": Histogram(),
            "time_to_first_token_seconds": Histogram(),
            "time_between_tokens_seconds": Histogram(),
        }

    def add(self, **amounts: Any) -> None:
        for name, amount in amounts.items():
            setattr(self.counters, name, getattr(self.counters, name) + int(amount))

    def round(self, counted: RoundCounters, spec: DecodeSpec) -> None:
        loops_run, loops_skipped = counted.loops(spec)
        self.add(
            rounds=counted.rounds,
            loops_run=loops_run,
            loops_skipped=loops_skipped,
            drafted_tokens=counted.drafted.sum(),
            accepted_tokens=counted.accepted.sum(),
        )
        if counted.sparse is not None:
            self.add(
                captured_rows=counted.sparse.captured, consumed_rows=counted.sparse.consumed
            )

    def finished(self, reason: str, times: RequestTimes) -> None:
        self.add(**{f"requests_finished_{reason}": 1})
        for name, value in zip(
            self.times, (times.queued, times.first_token, times.between_tokens), strict=True
        ):
            self.times[name].observe(value)

    def as_dict(self, gauges: dict[str, int]) -> dict[str, float]:
        """All numbers by name; of times, count and sum."""
        values: dict[str, float] = {**dataclasses.asdict(self.counters), **gauges}
        for name, histogram in self.times.items():
            values[f"{name}_count"] = histogram.count
            values[f"{name}_sum"] = histogram.sum
        return values

    def prometheus(self, gauges: dict[str, int]) -> str:
        """The text exposition format, version 0.0.4."""
        lines = []
        for name, value in dataclasses.asdict(self.counters).items():
            lines += [f"# TYPE {_PREFIX}{name}_total counter", f"{_PREFIX}{name}_total {value}"]
        for name, value in gauges.items():
            lines += [f"# TYPE {_PREFIX}{name} gauge", f"{_PREFIX}{name} {value}"]
        for name, histogram in self.times.items():
            lines += histogram.lines(_PREFIX + name)
        return "\n".join(lines) + "\n"


_PREFIX = "sparse_loop_"
