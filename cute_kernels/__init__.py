"""The fast path of DeepSeek-V4 sparse attention: every hot op as a torch custom op.

Importing this package needs no GPU and compiles nothing.
"""

from cute_kernels.kv_cache.ops import dequantize_and_gather_k_cache, quantize_and_insert_k_cache
from cute_kernels.runtime.registry import warmup

__all__ = [
    "dequantize_and_gather_k_cache",
    "quantize_and_insert_k_cache",
    "warmup",
]
