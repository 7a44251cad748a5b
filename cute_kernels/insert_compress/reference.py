"""What the op means: the references of the ops that it is made of, one after the other."""

from __future__ import annotations

from cute_kernels.insert_compress.call import Call, of_arguments
from cute_kernels.runtime.ops import OPS


@of_arguments
def fused_qkv_insert_compress_index(call: Call) -> None:
    for _, name, arguments in call.parts():
        OPS[name].reference(*arguments)
