# SPDX-License-Identifier: Apache-2.0
"""What the ops mean: the references of the ops that they are made of, one after the other."""

from __future__ import annotations

from cute_kernels.insert_compress.call import Call, CompressCall
from cute_kernels.runtime.arguments import of_arguments
from cute_kernels.runtime.ops import OPS


@of_arguments(Call)
def fused_qkv_insert_compress_index(call: Call) -> None:
    for _, name, arguments in call.parts():
        OPS[name].reference(*arguments)


@of_arguments(CompressCall)
def fused_qkv_insert_compress(call: CompressCall) -> None:
    for _, name, arguments in call.parts():
        OPS[name].reference(*arguments)
