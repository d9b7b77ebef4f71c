"""From a checkpoint and options to a service that is ready."""

from __future__ import annotations

from sparse_loop_jax.checkpoint import load
from sparse_loop_jax.checkpoint.loading import local_directory
from sparse_loop_jax.decoding import SpeculativeConfig
from sparse_loop_jax.engine import CacheConfig, Engine, SchedulerConfig
from sparse_loop_jax.models.ouro import Ouro
from sparse_loop_jax.serve.chat import ChatTemplate
from sparse_loop_jax.serve.config import ServeConfig
from sparse_loop_jax.serve.service import Service
from sparse_loop_jax.sparse import SparseDecodeConfig


def load_with_template(
    path: str | None, *, dtype: str | None = None, revision: str | None = None
) -> tuple[Ouro, ChatTemplate | None]:
    """A model and its chat template; arguments and errors as `load`'s."""
    with local_directory(path, revision) as directory:
        template = ChatTemplate.load(directory)  # before minutes of reading weights
        return load(directory, dtype=dtype), template


def make_service(
    model: Ouro,
    config: ServeConfig,
    *,
    template: ChatTemplate | None = None,
    cache: CacheConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    sparse: SparseDecodeConfig | None = None,
    speculative: SpeculativeConfig | None = None,
    implementation: str | None = None,
) -> Service:
    """An engine and the service that owns it.

    Raises:
      ValueError: as `Engine`.
    """
    scheduler = SchedulerConfig() if scheduler is None else scheduler
    engine = Engine(
        model,
        cache=cache,
        scheduler=scheduler,
        sparse=sparse,
        speculative=speculative,
        implementation=implementation,
    )
    return Service(
        model,
        engine,
        config,
        template=template,
        max_context=engine.memory_plan.max_context,
        rows=scheduler.max_num_seqs,
        by_priority=scheduler.policy == "priority",
    )
