"""What an engine is told: per request, about its pages, and about its schedule."""

from __future__ import annotations

import dataclasses
from typing import Literal

from sparse_loop_jax.generation.options import (
    check_exit,
    check_page_size,
    check_sampling,
    is_int,
    is_number,
)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is continued; as the arguments of `generate` of the same names.

    Attributes:
      max_tokens: at most so many new tokens.
      temperature: 0 is greedy; otherwise logits are divided by it and drawn from.
      top_k: keep only the k most probable tokens; None keeps all.
      top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
      seed: of the draws, which are those of `generate` with this prompt and seed.
      stop: a text or several that end the request. The output's text is cut before the one
        that is complete first; its tokens end with the one that completed it. Needs a model
        with a tokenizer.
      stop_token_ids: tokens that end the request, besides the checkpoint's own.
      ignore_eos: leave the checkpoint's stop tokens out.
      exit_threshold: summed exit probability at which a token leaves the loops; None: the
        checkpoint's; 1.0 never. Leaving early needs plain, dense decoding.
      min_loops: the gate decides from this loop on, counted from 1.
      max_loops: a token leaves after so many loops whatever the gate says; None: all.

    Raises:
      ValueError: a value is out of range.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    exit_threshold: float | None = None
    min_loops: int = 1
    max_loops: int | None = None

    def __post_init__(self):
        _require_integer("max_tokens", self.max_tokens, 1)
        check_sampling(self.temperature, self.top_k, self.top_p, self.seed)
        check_exit(self.exit_threshold, self.min_loops, self.max_loops)
        texts = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(texts, tuple | list) or not all(
            isinstance(text, str) and text for text in texts
        ):
            raise ValueError(
                f"stop must be a text or a tuple of texts, none of them empty: {self.stop!r}"
            )
        object.__setattr__(self, "stop", tuple(texts))
        stops = self.stop_token_ids
        if not isinstance(stops, tuple | list) or not all(is_int(t) and t >= 0 for t in stops):
            raise ValueError(f"stop_token_ids must be a tuple of token ids, got {stops!r}")
        object.__setattr__(self, "stop_token_ids", tuple(int(t) for t in stops))
        _require_bool("ignore_eos", self.ignore_eos)

    @property
    def sampled(self) -> bool:
        return self.temperature > 0


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """The pool of K/V pages.

    Attributes:
      num_pages: pages of a layer, over all loops and requests. A request takes one a loop
        for each `page_size` tokens.
      memory_bytes: bytes of all layers' pools, instead of `num_pages`. With neither, as much
        as `max_num_seqs` requests of the longest context could use, and no more than the
        device has room for.
      page_size: tokens in a page, a power of two.
      enable_prefix_caching: share the pages of full prompt pages between requests that begin
        alike, and keep them after their request as long as nobody needs the room.
      watermark: share of the pages that is kept free when a request is admitted, so that
        the running ones can grow.
      device_bytes: bytes that the engine may take on the device besides the weights; None:
        `utilization` of what the device reports free, or no limit where it reports nothing.
      utilization: see `device_bytes`.

    Raises:
      ValueError: a value is out of range, or both sizes are given.
    """

    num_pages: int | None = None
    memory_bytes: int | None = None
    page_size: int = 16
    enable_prefix_caching: bool = False
    watermark: float = 0.01
    device_bytes: int | None = None
    utilization: float = 0.9

    def __post_init__(self):
        for name in ("num_pages", "memory_bytes", "device_bytes"):
            if getattr(self, name) is not None:
                _require_integer(name, getattr(self, name), 1)
        if self.num_pages is not None and self.memory_bytes is not None:
            raise ValueError(
                f"give num_pages or memory_bytes, not both: got {self.num_pages} and "
                f"{self.memory_bytes}"
            )
        check_page_size(self.page_size)
        _require_bool("enable_prefix_caching", self.enable_prefix_caching)
        if not is_number(self.watermark) or not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be in [0, 1), got {self.watermark!r}")
        if not is_number(self.utilization) or not 0 < self.utilization <= 1:
            raise ValueError(f"utilization must be in (0, 1], got {self.utilization!r}")


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Which requests run, and how much of a step goes to prompts.

    Attributes:
      max_num_seqs: requests that run at once.
      max_context: longest prompt and continuation together that is served; None: the
        model's own limit, or what the pool holds if that is less.
      max_prefill_tokens: prompt tokens that a step runs between two rounds, padding
        included; longer prompts go in chunks.
      policy: "fcfs", in order of arrival; "priority", lower numbers first.
      max_bypasses: how many later requests may be admitted before a waiting one; then it is
        next, whatever comes.
      scan_limit: waiting requests that are looked at when one is to be admitted.
      max_stop_ids: stop tokens that a request may have.

    Raises:
      ValueError: a value is out of range.
    """

    max_num_seqs: int = 8
    max_context: int | None = None
    max_prefill_tokens: int = 2048
    policy: Literal["fcfs", "priority"] = "fcfs"
    max_bypasses: int = 8
    scan_limit: int = 64
    max_stop_ids: int = 8

    def __post_init__(self):
        for name in ("max_num_seqs", "max_prefill_tokens", "scan_limit", "max_stop_ids"):
            _require_integer(name, getattr(self, name), 1)
        _require_integer("max_bypasses", self.max_bypasses, 0)
        if self.max_context is not None:
            _require_integer("max_context", self.max_context, 1)
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"policy must be 'fcfs' or 'priority', got {self.policy!r}")


def _require_integer(name: str, value, least: int) -> None:
    if not is_int(value) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")


def _require_bool(name: str, value) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
