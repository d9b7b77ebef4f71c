"""Checkpoints: Hugging Face directories, the native format, and the way between them."""

from sparse_loop_jax.checkpoint.loading import load, load_huggingface, load_orbax
from sparse_loop_jax.checkpoint.saving import convert, save_huggingface, save_orbax

__all__ = [
    "convert",
    "load",
    "load_huggingface",
    "load_orbax",
    "save_huggingface",
    "save_orbax",
]
