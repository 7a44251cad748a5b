"""Kernels of compress_norm_rope_store: one for each ratio."""

from __future__ import annotations

from typing import Any

from cute_kernels.compressor import entry_c4, entry_c128
from cute_kernels.runtime.compile import KernelKey

_BY_RATIO = {4: entry_c4, 128: entry_c128}
_RATIO = 11
"""Position of compress_ratio in the schema."""


def supports(*args: Any) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    return _BY_RATIO[args[_RATIO]].supports_compress(*args)


def launch(*args: Any) -> None:
    """Run the kernel on the current stream of the tensors' device. Arguments in the schema's order."""
    _BY_RATIO[args[_RATIO]].launch_compress(*args)


def deployment_keys(config: Any, tp: int, arch: str) -> list[KernelKey]:
    """One for each compressor of the model and each format of its entries."""
    return [key for kernels in _BY_RATIO.values() for key in kernels.deployment_keys(config, tp, arch, fused=False)]
