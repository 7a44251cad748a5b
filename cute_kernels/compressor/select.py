# SPDX-License-Identifier: Apache-2.0
"""Which kernel the ops that store compressed entries run: one for each ratio."""

from __future__ import annotations

from typing import Any

from cute_kernels.compressor import ratio4, ratio128
from cute_kernels.compressor.call import CompressCall, FusedCall
from cute_kernels.runtime.arguments import of_arguments
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.key import OpKernel

_RATIOS = {4: ratio4, 128: ratio128}


@of_arguments(CompressCall)
def supports_compress(call: CompressCall) -> tuple[bool, str]:
    return _RATIOS[call.compress_ratio].supports(call)


@of_arguments(FusedCall)
def supports_fused(call: FusedCall) -> tuple[bool, str]:
    return _RATIOS[call.compress_ratio].supports(call)


@of_arguments(CompressCall)
def launch_compress(call: CompressCall) -> None:
    _RATIOS[call.compress_ratio].launch_compress(call)


@of_arguments(FusedCall)
def launch_fused(call: FusedCall) -> None:
    _RATIOS[call.compress_ratio].launch_fused(call)


def compress_keys(config: Any, tp: int, arch: str) -> list[KernelKey]:
    """One for each compressor of the model and each format of its entries."""
    return [key for kernels in _RATIOS.values() for key in kernels.deployment_keys(config, tp, arch, fused=False)]


def fused_keys(config: Any, tp: int, arch: str) -> list[KernelKey]:
    """One for each compressor of the model and each format of its entries."""
    return [key for kernels in _RATIOS.values() for key in kernels.deployment_keys(config, tp, arch, fused=True)]


COMPRESS = OpKernel(launch_compress, supports_compress, compress_keys)
FUSED = OpKernel(launch_fused, supports_fused, fused_keys)
