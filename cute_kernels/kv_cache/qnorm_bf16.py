"""Kernel of fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert: qnorm.py with a plain bf16 cache."""

from __future__ import annotations

from typing import Any

from cute_kernels.formats import PLAIN_BF16
from cute_kernels.kv_cache import qnorm_launch
from cute_kernels.kv_cache.qnorm import QnormKey


def deployment_keys(config: Any, tp: int, arch: str) -> list[QnormKey]:
    """One kernel for few rows of q and one for many, for any number of heads."""
    return qnorm_launch.deployment(arch, PLAIN_BF16.id)


def supports(
    q: Any,
    kv: Any,
    kv_cache: Any,
    slot_mapping: Any,
    positions: Any,
    cos_sin_cache: Any,
    eps: float,
    block_size: int,
    kv_format: str,
    use_pdl: bool,
) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    return qnorm_launch.fits(q, kv, kv_cache, cos_sin_cache, block_size, kv_format)


def launch(
    q: Any,
    kv: Any,
    kv_cache: Any,
    slot_mapping: Any,
    positions: Any,
    cos_sin_cache: Any,
    eps: float,
    block_size: int,
    kv_format: str,
    use_pdl: bool,
) -> None:
    """Run the kernel on the current stream of q's device. Arguments in the schema's order, checked and supported."""
    key = qnorm_launch.key_of(q, kv_format)
    qnorm_launch.run(key, q, kv, kv_cache, slot_mapping, positions, cos_sin_cache, eps, block_size, use_pdl)
