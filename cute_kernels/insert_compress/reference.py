"""What the op means: the references of the ops that it is made of, one after the other."""

from __future__ import annotations

from typing import Any

from cute_kernels.insert_compress.call import Call
from cute_kernels.runtime.ops import OPS


def fused_qkv_insert_compress_index(*args: Any) -> None:
    for _, name, arguments in Call(*args).parts():
        OPS[name].reference(*arguments)
