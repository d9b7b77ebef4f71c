"""Workloads of `sparse-loop bench serve`: which requests arrive when."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparse_loop_jax.checkpoint.strict_json import parse_json_object
from sparse_loop_jax.generation.inputs import token_ids
from sparse_loop_jax.generation.options import is_int, is_number
from sparse_loop_jax.models.ouro import Ouro


@dataclasses.dataclass(frozen=True)
class Arrival:
    """One request of a workload.

    Attributes:
      seconds: after the start.
      prompt: a text, token ids, or how many random tokens.
      max_tokens: new tokens; all of them are decoded, whatever they are.
      priority: lower goes first, with `policy="priority"`.
    """

    seconds: float
    prompt: str | tuple[int, ...] | int
    max_tokens: int
    priority: int = 0


@dataclasses.dataclass(frozen=True)
class TimedRequest:
    """An arrival whose prompt is token ids."""

    seconds: float
    prompt: list[int]
    max_tokens: int
    priority: int

    @property
    def kv_tokens(self) -> int:
        """Tokens of K/V that it may hold."""
        return len(self.prompt) + self.max_tokens - 1


def read_workload(path: str | Path) -> list[Arrival]:
    """Reads lines `{"arrival": 0.5, "prompt_tokens": 128, "max_tokens": 32, "priority": 0}`.

    `prompt`, a text or a list of token ids, may stand in place of `prompt_tokens`; `arrival`
    and `priority` may be left out and are 0 then.

    Raises:
      ValueError: a line is malformed, or there is none. It names the line.
      OSError: the file cannot be read.
    """
    arrivals = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if line.strip():
            where = f"{path}, line {number}"
            arrivals.append(_arrival(parse_json_object(line, where), where))
    if not arrivals:
        raise ValueError(f"{path}: has no requests")
    return sorted(arrivals, key=lambda arrival: arrival.seconds)


def make_workload(
    requests: int,
    *,
    rate: float,
    prompt_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    seed: int = 0,
) -> list[Arrival]:
    """Random requests: exponential gaps, and lengths even within bounds, both included.

    Args:
      rate: requests a second on average; infinity: all at once.

    Raises:
      ValueError: there are none, or the rate is not above 0.
    """
    if requests < 1:
        raise ValueError(f"requests must be >= 1, got {requests}")
    if not rate > 0:
        raise ValueError(f"rate must be above 0, got {rate}")
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / rate, requests) if rate < float("inf") else np.zeros(requests)
    prompts = rng.integers(prompt_tokens[0], prompt_tokens[1] + 1, requests)
    outputs = rng.integers(output_tokens[0], output_tokens[1] + 1, requests)
    times = np.cumsum(gaps) - gaps[0]  # the first one begins the clock
    return [
        Arrival(float(t), int(p), int(o))
        for t, p, o in zip(times, prompts, outputs, strict=True)
    ]


def with_tokens(model: Ouro, arrivals: Sequence[Arrival], seed: int = 0) -> list[TimedRequest]:
    """Tokenizes texts and draws random prompts.

    Raises:
      ValueError: as `generate` for its prompts.
    """
    rng = np.random.default_rng(seed)
    requests = []
    for index, arrival in enumerate(arrivals):
        prompt = arrival.prompt
        if isinstance(prompt, int):
            prompt = rng.integers(1, model.config.vocab_size, prompt).tolist()
        ids = token_ids(model, prompt, f"the prompt of request {index}").tolist()
        requests.append(
            TimedRequest(arrival.seconds, ids, arrival.max_tokens, arrival.priority)
        )
    return requests


def parse_range(name: str, text: str) -> tuple[int, int]:
    """ "16:64" to (16, 64), and "16" to (16, 16).

    Raises:
      ValueError: it is neither, or a length is below 1.
    """
    match = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", text.strip())
    low = int(match[1]) if match else 0
    high = int(match[2] or low) if match else 0
    if not match or high < low:
        raise ValueError(f"{name} must be a length like 64 or a range like 16:64, got {text!r}")
    return low, high


def _arrival(data: dict[str, Any], where: str) -> Arrival:
    known = {"arrival", "prompt", "prompt_tokens", "max_tokens", "priority"}
    for name in data:
        if name not in known:
            raise ValueError(f"{where}: {name!r} is none of {', '.join(sorted(known))}")
    if ("prompt" in data) == ("prompt_tokens" in data):
        raise ValueError(f"{where}: give prompt or prompt_tokens, one of them")

    def field(name: str, kind: str, ok: Callable[[Any], bool], default: Any = None) -> Any:
        value = data.get(name, default)
        if not ok(value):
            raise ValueError(f"{where}: {name} must be {kind}, got {value!r:.80}")
        return value

    if "prompt" in data:
        kind = "a text or a list of token ids"
        prompt = field("prompt", kind, lambda v: isinstance(v, str) or _is_ids(v))
    else:
        prompt = field("prompt_tokens", "an integer >= 1", _is_length)
    return Arrival(
        seconds=float(field("arrival", "seconds >= 0", lambda v: is_number(v) and v >= 0, 0)),
        prompt=tuple(prompt) if isinstance(prompt, list) else prompt,
        max_tokens=field("max_tokens", "an integer >= 1", _is_length),
        priority=field("priority", "an integer", is_int, 0),
    )


def _is_length(value: Any) -> bool:
    return is_int(value) and value >= 1


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_int, value))
