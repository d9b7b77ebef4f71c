"""One request: what was asked, how far it is, and what its owner is told."""

from __future__ import annotations

import dataclasses
import enum
import time
from typing import Any

import numpy as np

from sparse_loop_jax.engine.config import SamplingParams
from sparse_loop_jax.generation.options import ExitRule
from sparse_loop_jax.generation.stops import StopStrings
from sparse_loop_jax.generation.text import TextStream


@dataclasses.dataclass(frozen=True)
class RequestTimes:
    """Seconds on the host's clock; None where it has not come to that yet.

    Attributes:
      queued: from `add_request` to the first prompt tokens on their way to the device.
      first_token: from `add_request` to the first token.
      between_tokens: mean from token to token after the first. Tokens of one round come
        together.
    """

    queued: float | None
    first_token: float | None
    between_tokens: float | None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A request as of now.

    Attributes:
      request_id: as given.
      token_ids: all new tokens so far; a stop token is kept.
      new_token_ids: those that came since the last output of this request.
      text: of all tokens, None without a tokenizer. Until the end, a character whose bytes
        are spread over several tokens waits for the last of them, and so does what may
        become a stop string.
      finished: nothing follows.
      finish_reason: "stop", "length", "abort" or "error" when finished, else None.
      prompt_tokens: length of the prompt.
      reused_prompt_tokens: of them, those whose K/V came from the prefix cache.
      times: what has been measured.
      exit_loops: of each of `token_ids`, the loop that it was read from, counted from 1.
    """

    request_id: str
    token_ids: list[int]
    new_token_ids: list[int]
    text: str | None
    finished: bool
    finish_reason: str | None
    prompt_tokens: int
    reused_prompt_tokens: int
    times: RequestTimes
    exit_loops: list[int] = dataclasses.field(default_factory=list)


class Status(enum.Enum):
    WAITING = "waiting"  # holds nothing on the device; maybe pages on the host
    PREFILL = "prefill"  # has a row and pages, and prompt tokens to run
    DECODE = "decode"  # its row is live in rounds
    FINISHED = "finished"  # still holds its row and pages while rounds with it are out


@dataclasses.dataclass
class SwappedPages:
    """The K/V of a preempted request, bit for bit, and what its row held."""

    # Some blocks each: keys and values, per layer [pages, kv_heads, page_size, head_dim].
    parts: list[tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]]
    history: tuple[np.ndarray, np.ndarray] | None  # of adaptive drafting

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for part in self.parts for pools in part for a in pools)


class Request:
    """The host's record of one request, from `add_request` to its retirement."""

    def __init__(
        self,
        request_id: str,
        prompt: np.ndarray,
        params: SamplingParams,
        *,
        stop_ids: tuple[int, ...],
        exit_rule: ExitRule,
        priority: int,
        arrival: int,
        tokenizer: Any,
    ):
        self.id = request_id
        self.prompt = prompt  # int32 [tokens]
        self.params = params
        self.stop_ids = stop_ids
        self.exit_rule = exit_rule
        self.priority = priority
        self.arrival = arrival  # order of arrival
        self.bypasses = 0  # later requests admitted before it

        self.status = Status.WAITING
        self.finish_reason: str | None = None
        self.row: int | None = None
        self.blocks: list[int] = []
        self.blocks_on_device = 0  # entries that the device's page table has
        self.prefilled = 0  # prompt tokens on their way through the device
        self.reused = 0  # of them, from the prefix cache
        self.hashes: list[bytes] = []  # of its full prompt pages, with a prefix cache
        self.swapped: SwappedPages | None = None
        self.pending = 0  # outputs not yet read that have this request in them
        self.pending_rounds = 0  # of them, rounds

        self.tokens: list[int] = []
        self.exit_loops: list[int] = []
        self._told = 0
        self._text = None if tokenizer is None else TextStream(tokenizer)
        self._stops = StopStrings(params.stop)
        self._arrived = time.perf_counter()
        self._started: float | None = None
        self._first: float | None = None
        self._last: float | None = None

    @property
    def kv_tokens(self) -> int:
        """Tokens whose K/V may be held: the last emitted token is never fed back."""
        return len(self.prompt) + self.params.max_tokens - 1

    @property
    def position(self) -> int:
        """Where the next input goes, by what has been read."""
        return len(self.prompt) + max(len(self.tokens) - 1, 0)

    @property
    def remaining(self) -> int:
        """Tokens that may still come, by what has been read."""
        return self.params.max_tokens - len(self.tokens)

    @property
    def wants_round(self) -> bool:
        """Whether one more round may give it a token: each outstanding one gives some."""
        return self.status is Status.DECODE and self.remaining > self.pending

    def tokens_after_round(self, rows: int) -> int:
        """K/V tokens that one more round of `rows` rows may reach: an upper bound."""
        return min(self.position + rows * (self.pending_rounds + 1), self.kv_tokens)

    def started(self) -> None:
        """Its first tokens are on their way."""
        if self._started is None:
            self._started = time.perf_counter()

    def take(self, ids: list[int], exit_loops: list[int]) -> int:
        """New tokens, as the device emitted them: nothing follows a stop token.

        Returns:
          How many were taken: fewer where a stop string is complete before the last.
        """
        now = time.perf_counter()
        self._first = now if self._first is None else self._first
        self._last = now
        taken, stopped = self._read(ids)
        self.tokens += ids[:taken]
        self.exit_loops += exit_loops[:taken]
        if stopped or self.tokens[-1] in self.stop_ids:
            self.finish("stop")
        elif not self.remaining:
            self.finish("length")
        return taken

    def _read(self, ids: list[int]) -> tuple[int, bool]:
        """Adds the text of new tokens; how many, and whether a stop string is complete."""
        if self._text is None:
            return len(ids), False
        if not self.params.stop:
            self._text.add(ids)
            return len(ids), False
        for count, token in enumerate(ids, start=1):
            self._text.add([token])
            if self._stops.cut(self._text.text(final=False), final=False)[1]:
                return count, True
        return len(ids), False

    def finish(self, reason: str) -> None:
        self.status = Status.FINISHED
        self.finish_reason = reason

    @property
    def times(self) -> RequestTimes:
        between = None
        if self._first is not None and self._last is not None and len(self.tokens) > 1:
            between = (self._last - self._first) / (len(self.tokens) - 1)
        return RequestTimes(
            queued=None if self._started is None else self._started - self._arrived,
            first_token=None if self._first is None else self._first - self._arrived,
            between_tokens=between,
        )

    def output(self) -> RequestOutput:
        """What its owner is told now."""
        finished = self.status is Status.FINISHED
        new, self._told = self.tokens[self._told :], len(self.tokens)
        text = None if self._text is None else self._text.text(final=finished)
        if text is not None:
            text, _ = self._stops.cut(text, final=finished)
        return RequestOutput(
            request_id=self.id,
            token_ids=list(self.tokens),
            new_token_ids=new,
            text=text,
            finished=finished,
            finish_reason=self.finish_reason,
            prompt_tokens=len(self.prompt),
            reused_prompt_tokens=self.reused,
            times=self.times,
            exit_loops=list(self.exit_loops),
        )
