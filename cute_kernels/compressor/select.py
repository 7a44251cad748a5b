# SPDX-License-Identifier: Apache-2.0
"""Which kernel the ops that store compressed entries run: one for each ratio."""

from __future__ import annotations

from cute_kernels.compressor import ratio4, ratio128
from cute_kernels.compressor.call import CompressCall, FusedCall
from cute_kernels.models import ModelConfig
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.key import OpKernel

_RATIOS = {4: ratio4, 128: ratio128}


def why_not_compress(call: CompressCall) -> str:
    return _RATIOS[call.compress_ratio].why_not(call)


def why_not_fused(call: FusedCall) -> str:
    return _RATIOS[call.compress_ratio].why_not(call)


def launch_compress(call: CompressCall) -> None:
    _RATIOS[call.compress_ratio].launch_compress(call)


def launch_fused(call: FusedCall) -> None:
    _RATIOS[call.compress_ratio].launch_fused(call)


def compress_keys(config: ModelConfig, tp: int, arch: str) -> list[KernelKey]:
    """One for each compressor of the model and each format of its entries."""
    return [key for kernels in _RATIOS.values() for key in kernels.deployment_keys(config, tp, arch, fused=False)]


def fused_keys(config: ModelConfig, tp: int, arch: str) -> list[KernelKey]:
    """One for each compressor of the model and each format of its entries."""
    return [key for kernels in _RATIOS.values() for key in kernels.deployment_keys(config, tp, arch, fused=True)]


COMPRESS = OpKernel(launch_compress, why_not_compress, compress_keys)
FUSED = OpKernel(launch_fused, why_not_fused, fused_keys)
