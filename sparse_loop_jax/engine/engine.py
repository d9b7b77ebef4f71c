"""`Engine`: many requests that come and go, in one running batch."""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence

from sparse_loop_jax.decoding.config import SpeculativeConfig
from sparse_loop_jax.engine.config import CacheConfig, SamplingParams, SchedulerConfig
from sparse_loop_jax.engine.executor import Executor
from sparse_loop_jax.engine.loop import ServingLoop
from sparse_loop_jax.engine.memory import MemoryPlan, plan_memory
from sparse_loop_jax.engine.metrics import Metrics
from sparse_loop_jax.engine.request import RequestOutput
from sparse_loop_jax.engine.scheduler import Scheduler
from sparse_loop_jax.engine.validation import make_request
from sparse_loop_jax.generation.options import Options
from sparse_loop_jax.models.ouro import Ouro
from sparse_loop_jax.sparse.config import SparseDecodeConfig


class Engine:
    """Serves requests that arrive at any time; each gets what `generate` would give it.

    `add_request` queues, `step` moves everything on by up to one round and tells what is
    new, `abort` ends one request. Not thread-safe: one thread calls, others hand it their
    requests. Use as a context manager, or call `close`.

    Args:
      model: from `sparse_loop_jax.load`, or an `Ouro`.
      cache: the pool of pages.
      scheduler: who runs.
      sparse: cross-loop sparse attention for decoded tokens; None is dense.
      speculative: draft with the first loops and verify with the rest; None decodes token
        by token.
      implementation: of the ops ("xla", "pallas"); None chooses by platform.

    Attributes:
      memory_plan: what it takes on the device, made before anything was taken.

    Raises:
      ValueError: the arguments do not fit each other, the model or the device.
    """

    def __init__(
        self,
        model: Ouro,
        *,
        cache: CacheConfig | None = None,
        scheduler: SchedulerConfig | None = None,
        sparse: SparseDecodeConfig | None = None,
        speculative: SpeculativeConfig | None = None,
        implementation: str | None = None,
    ):
        cache = _instance("cache", cache, CacheConfig)
        scheduler = _instance("scheduler", scheduler, SchedulerConfig)
        options = Options(
            sparse=sparse,
            speculative=speculative,
            exit_threshold=1.0,  # decided by each request
            page_size=cache.page_size,
            implementation=implementation,
        )
        spec = options.spec_for(model.config)
        outstanding = 2 if speculative is None else speculative.max_outstanding_rounds
        params = model.params
        self.memory_plan: MemoryPlan
        self.memory_plan, sizing = plan_memory(
            params, model.dtype, spec, sparse, cache, scheduler, outstanding
        )
        if sparse is not None:
            sparse.validate_for(model.config, sizing.max_context)
        self._model: Ouro | None = model
        self._spec = spec
        self._sizing = sizing
        self._arrivals = 0
        executor = Executor(params, spec, sizing, model.dtype, outstanding)
        executor.open()
        self._loop = ServingLoop(
            sizing, executor, Scheduler(cache, scheduler, sizing, spec.rows), Metrics()
        )

    # Requests --------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> None:
        """Queues a request.

        Args:
          request_id: of a request that is not being served and has nothing on the device.
          prompt: a string where the model has a tokenizer, or token ids.
          params: None: the defaults.
          priority: lower goes first, with `policy="priority"`.

        Raises:
          ValueError: the id is empty or taken, a value is out of range, or the request could
            never fit the context or the pool. Nothing has changed then.
          RuntimeError: the engine is closed.
        """
        model = self._open_model()
        if not isinstance(request_id, str) or not request_id:
            raise ValueError(f"request_id must be a string that is not empty: {request_id!r}")
        if request_id in self._loop.requests or request_id in self._loop.news:
            raise ValueError(
                f"request {request_id!r} is still being served, or its last rounds are not "
                "over: wait for its end, or choose another id"
            )
        request = make_request(
            model,
            self._sizing,
            self._spec,
            request_id,
            prompt,
            SamplingParams() if params is None else params,
            priority=priority,
            arrival=self._arrivals,
        )
        self._arrivals += 1
        self._loop.add(request)

    def abort(self, request_id: str) -> bool:
        """Ends a request; the next `step` tells so.

        Returns:
          Whether there was such a request, not finished.
        """
        return self._loop.abort(request_id)

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` still has something to do or to tell."""
        return bool(self._loop.requests or self._loop.news)

    def step(self) -> list[RequestOutput]:
        """Admits, runs some prompt tokens, submits a round, and reads the oldest one out.

        Returns:
          What is new, one output a request. Often nothing: results are read late.

        Raises:
          RuntimeError: the engine is closed.
          Exception: whatever failed on the device. Every request has ended with reason
            "error" then, which the next `step` tells, and the engine can be used again.
        """
        self._open_model()
        self._loop.step()
        return self._loop.take_outputs()

    def run(
        self, requests: Iterable[tuple[str, str | Sequence[int], SamplingParams | None]]
    ) -> list[RequestOutput]:
        """Serves these `(id, prompt, params)` to their end; outputs in the order given.

        Raises:
          ValueError: as `add_request`; none of them is left behind then.
          RuntimeError: other requests are being served, whose outputs would be lost.
          Exception: as `step`; these requests are over then, and the engine is free for others.
        """
        self._open_model()
        if self.has_unfinished:
            held = {*self._loop.requests, *self._loop.news}
            raise RuntimeError(
                f"{len(held)} requests are being served or have news: step until "
                "`has_unfinished` is false"
            )
        ids: list[str] = []
        last: dict[str, RequestOutput] = {}
        try:
            for request_id, prompt, params in requests:
                self.add_request(request_id, prompt, params)
                ids.append(request_id)
            while self.has_unfinished:
                last.update((output.request_id, output) for output in self.step())
        except BaseException:
            for request_id in ids:
                self.abort(request_id)
            self._loop.news.clear()
            raise
        return [last[request_id] for request_id in ids]

    # Life ------------------------------------------------------------------------------

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of everything on the device, whatever is going on. Twice is once."""
        self._loop.close()
        self._model = None

    def metrics(self) -> dict[str, float]:
        """Counters since the start, what is in use now, and times, by name."""
        return self._loop.metrics.as_dict(self._loop.gauges())

    def reset_metrics(self) -> None:
        """Counts and times from here on, as of a new engine."""
        self._loop.metrics = Metrics()

    def prometheus(self) -> str:
        """The same in Prometheus' text format."""
        return self._loop.metrics.prometheus(self._loop.gauges())

    def _open_model(self) -> Ouro:
        if self._model is None:
            raise RuntimeError("the engine is closed")
        return self._model


def _instance(name: str, value, kind):
    """The value, or a default one for None."""
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, got {value!r}")
    return value
