"""Prompts in, tokens out: `generate`, `stream`, and `start` for the steps underneath."""

from sparse_loop_jax.generation.generate import generate
from sparse_loop_jax.generation.outputs import GenerateOutput, GenerateStats
from sparse_loop_jax.generation.start import start
from sparse_loop_jax.generation.stream import StreamChunk, stream

__all__ = ["GenerateOutput", "GenerateStats", "StreamChunk", "generate", "start", "stream"]
