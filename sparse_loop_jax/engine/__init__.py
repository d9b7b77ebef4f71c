"""Continuous batching: requests that come and go over one running decode state."""

from sparse_loop_jax.engine.config import CacheConfig, SamplingParams, SchedulerConfig
from sparse_loop_jax.engine.engine import Engine
from sparse_loop_jax.engine.memory import MemoryPlan
from sparse_loop_jax.engine.request import RequestOutput, RequestTimes

__all__ = [
    "CacheConfig",
    "Engine",
    "MemoryPlan",
    "RequestOutput",
    "RequestTimes",
    "SamplingParams",
    "SchedulerConfig",
]
