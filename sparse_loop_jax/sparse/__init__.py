"""Cross-loop sparse decode attention and its reference store.

The method is FlashLoop's (Yang and Liu, 2026, arXiv 2609.29812,
https://github.com/Superone77/FlashLoop).
"""

from sparse_loop_jax.sparse.arithmetic import retained_count, retained_counts
from sparse_loop_jax.sparse.break_even import SparseSlowerWarning
from sparse_loop_jax.sparse.config import SparseDecodeConfig
from sparse_loop_jax.sparse.pytrees import (
    ReferenceLease,
    SparseDecodePlan,
    SparseDecodeReferenceStore,
    StaleLeaseError,
)

__all__ = [
    "ReferenceLease",
    "SparseDecodeConfig",
    "SparseDecodePlan",
    "SparseDecodeReferenceStore",
    "SparseSlowerWarning",
    "StaleLeaseError",
    "retained_count",
    "retained_counts",
]
