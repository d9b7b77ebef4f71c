"""Ouro: configuration, weights and arithmetic."""

from sparse_loop_jax.models.config import OURO_1_4B, OURO_2_6B, OuroConfig
from sparse_loop_jax.models.forward import ForwardOutput, forward
from sparse_loop_jax.models.ouro import Ouro
from sparse_loop_jax.models.params import LayerParams, OuroParams, param_shapes

__all__ = [
    "OURO_1_4B",
    "OURO_2_6B",
    "ForwardOutput",
    "LayerParams",
    "Ouro",
    "OuroConfig",
    "OuroParams",
    "forward",
    "param_shapes",
]
