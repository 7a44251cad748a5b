# SPDX-License-Identifier: Apache-2.0
"""What the ops mean: the references of the ops that they are made of, one after the other."""

from __future__ import annotations

from cute_kernels.insert_compress.call import CompressCall, IndexCall
from cute_kernels.runtime.ops import OPS


def fused_qkv_insert_compress_index(call: IndexCall) -> None:
    for _, name, part in call.parts():
        OPS[name].reference(*part)


def fused_qkv_insert_compress(call: CompressCall) -> None:
    for _, name, part in call.parts():
        OPS[name].reference(*part)
