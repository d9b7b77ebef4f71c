"""Dense attention that also keeps a reference for the loops to come."""

from sparse_loop_jax.kernels.capture_attention import (
    pallas as pallas,
    triton_launch as triton_launch,
    xla as xla,
)
from sparse_loop_jax.kernels.capture_attention.op import (
    CaptureOutput,
    StoredCapture,
    capture_attention,
    capture_into,
)

__all__ = ["CaptureOutput", "StoredCapture", "capture_attention", "capture_into"]
