"""Between HTTP and the engine: room for so many prompts, and their progress."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import itertools
import time
from collections.abc import AsyncIterator, Sequence

from sparse_loop_jax.engine import Engine
from sparse_loop_jax.models.ouro import Ouro
from sparse_loop_jax.serve.chat import ChatTemplate
from sparse_loop_jax.serve.config import ServeConfig
from sparse_loop_jax.serve.errors import ApiError
from sparse_loop_jax.serve.fields import SAMPLING_FIELDS, Asked
from sparse_loop_jax.serve.tokens import Tokens
from sparse_loop_jax.serve.worker import EngineThread, Job, Progress

# How long a reader of the metrics waits for the step that runs.
_METRICS_SECONDS = 5.0


class Answer:
    """The progress of the prompts of one HTTP request, on the event loop.

    Attributes:
      latest: of each prompt, None before there was any.
    """

    def __init__(self, count: int):
        self.latest: list[Progress | None] = [None] * count
        self._changed = asyncio.Event()

    def update(self, index: int, progress: Progress) -> None:
        self.latest[index] = progress
        self._changed.set()

    async def changes(self) -> AsyncIterator[list[Progress]]:
        """The latest progress of all prompts, whenever there is more, up to the end.

        What comes while nobody looks is not kept: each progress has everything before it.

        Raises:
          ApiError: there will be no answer.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            now = [progress or Progress() for progress in self.latest]
            for progress in now:
                _raise_for(progress)
            yield now
            if all(progress.finish_reason for progress in now):
                return

    async def end(self) -> list[Progress]:
        """The last progress of every prompt.

        Raises:
          ApiError: as `changes`.
        """
        last: list[Progress] = []
        async for progress in self.changes():
            last = progress
        return last


class Service:
    """Admits prompts and hands their progress to those who asked.

    All of it belongs to one event loop.

    Args:
      model: with a tokenizer, or token ids are all that is taken.
      engine: owned by this service from here on.
      config: limits and the name.
      template: for chats; None refuses them.
      max_context: prompt and continuation of one request, in tokens of K/V.
      rows: requests that the engine runs at once.
      by_priority: whether the engine goes by priority.

    Attributes:
      open: prompts that are not finished.
      capacity: so many at most.
      created: when the service began, in seconds of the epoch.
    """

    def __init__(
        self,
        model: Ouro,
        engine: Engine,
        config: ServeConfig,
        *,
        template: ChatTemplate | None = None,
        max_context: int,
        rows: int,
        by_priority: bool = False,
    ):
        self.config = config
        self.template = template
        self.by_priority = by_priority
        self.tokens = Tokens.of(model, max_context)
        self.capacity = rows + config.max_waiting
        self.created = int(time.time())
        self.open = 0
        self.worker = EngineThread(engine, self._notify)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owners: dict[str, tuple[Answer, int]] = {}
        self._ids = itertools.count()

    def require_room(self, prompts: int) -> None:
        """Refuses what cannot be taken now; costs nothing, so it comes before the work.

        Raises:
          ApiError: 429 while there is no room, 400 if there never is, 503 after a failure.
        """
        if self.worker.failure is not None:
            raise ApiError(503, f"the engine has failed: {self.worker.failure}")
        if prompts > self.capacity:
            raise ApiError(
                400,
                f"{prompts} prompts are more than this server takes at all, which is "
                f"{self.capacity}: send fewer in a request",
                param="prompt",
            )
        if self.open + prompts > self.capacity:
            raise ApiError(
                429,
                f"{self.open} of {self.capacity} places are taken and the request needs "
                f"{prompts}: try again later",
                code="rate_limit_exceeded",
                headers={"Retry-After": "1"},
            )

    def submit(self, prompts: Sequence[Sequence[int]], asked: Asked) -> Answer:
        """Sends prompts to the engine. Give the answer to `leave` in the end.

        Raises:
          ApiError: as `require_room`, and 400 for more tokens than the context has room for.
        """
        self.require_room(len(prompts))
        self._loop = asyncio.get_running_loop()
        seen: collections.Counter[tuple[int, ...]] = collections.Counter()
        jobs = []
        for prompt in prompts:
            room, same = self.tokens.left_after(len(prompt)), tuple(prompt)
            params = asked.params_for(room, seen[same])
            seen[same] += 1
            jobs.append(Job(f"{next(self._ids)}", prompt, params, priority=asked.priority))
        answer = Answer(len(prompts))
        self._owners.update((job.id, (answer, index)) for index, job in enumerate(jobs))
        self.open += len(jobs)
        self.worker.submit(jobs)
        return answer

    def end_all(self) -> None:
        """Tells everybody that the server shuts down, without waiting for the engine's step."""
        told = Progress(finish_reason="abort", error="the server is shutting down")
        for answer, index in self._owners.values():
            answer.update(index, told)
        self.open -= len(self._owners)
        self._owners.clear()
        self.worker.abort_all()

    def leave(self, answer: Answer) -> None:
        """Nobody waits for this answer any more: what still runs of it is aborted."""
        ids = [job_id for job_id, (owner, _) in self._owners.items() if owner is answer]
        if ids:
            self.worker.abort(ids)

    async def metrics(self) -> str:
        """The engine's numbers and the server's, in Prometheus' text format.

        Raises:
          ApiError: 503, the engine is at something that takes long, a compilation perhaps.
        """
        future: concurrent.futures.Future[str] = self.worker.call(
            lambda engine: engine.prometheus()
        )
        try:
            text = await asyncio.wait_for(asyncio.wrap_future(future), _METRICS_SECONDS)
        except TimeoutError:
            raise ApiError(503, "the engine is busy: try again later") from None
        return text + (
            "# TYPE sparse_loop_prompts_open gauge\n"
            f"sparse_loop_prompts_open {self.open}\n"
            "# TYPE sparse_loop_prompts_capacity gauge\n"
            f"sparse_loop_prompts_capacity {self.capacity}\n"
        )

    def _notify(self, news: list[tuple[Job, Progress]]) -> None:
        """In the engine's thread: passes news on to the event loop."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._take, news)

    def _take(self, news: list[tuple[Job, Progress]]) -> None:
        for job, progress in news:
            if job.id not in self._owners:  # told before that the server shuts down
                continue
            answer, index = self._owners[job.id]
            if progress.finish_reason:
                del self._owners[job.id]
                self.open -= 1
            answer.update(index, progress)


def _raise_for(progress: Progress) -> None:
    reason = progress.finish_reason
    if reason == "refused":
        error = str(progress.error)
        field = error.split()[0].rstrip(":")
        raise ApiError(400, error, param=field if field in SAMPLING_FIELDS else None)
    if reason == "abort":
        raise ApiError(503, str(progress.error))
    if reason == "error":
        raise ApiError(500, f"the engine failed: {progress.error}")
