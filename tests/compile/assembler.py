# SPDX-License-Identifier: Apache-2.0
"""What the assembler of CuTe DSL makes of Blackwell's kernels: `python -m tests.compile.assembler` prints it as JSON.

cuda       its version
takes      instruction that not every one takes -> whether it does
chosen     instruction -> whether the kernels here use it
problems   key -> what is wrong with the kernel
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import CUDA_VERSION, Int32
from cutlass.base_dsl.common import DSLBaseError
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl import ptx
from cute_kernels.indexer.blackwell.logits import BlackwellLogitsKey
from cute_kernels.kv_cache.gather import GatherKey
from cute_kernels.runtime.compile import compile_report
from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.report import Facts, problems
from cute_kernels.sparse_mla.blackwell.decode import BlackwellDecodeKey
from cute_kernels.sparse_mla.blackwell.decode_2cta import BlackwellPairDecodeKey

CHOSEN = {
    "cvt.rn.bf16x2.e4m3x2 {$w0}, half;": ptx.HAS_BF16_OF_E4M3,
    "cvt.rn.satfinite.e4m3x2.bf16x2 half, {$r0}; mov.b32 {$w0}, {half, half};": ptx.HAS_E4M3_OF_BF16,
}

KEYS = (
    BlackwellDecodeKey("sm_100a"),
    BlackwellPairDecodeKey("sm_103a"),
    BlackwellLogitsKey("sm_100a", 64, 3, False, True),
    GatherKey("sm_100a", gathered=True, rows=4),
)


@dataclass(frozen=True)
class InstructionKey(KernelKey):
    """A kernel of one instruction, of `half`, 16 bits, and $r0 to $w0."""

    kernel_name: ClassVar[str] = "tests.instruction"
    text: str = ""

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        out = make_fake_tensor(Int32, (cute.sym_int(),), stride=(1,))
        return Instruction(self.text), (out, make_fake_stream(use_tvm_ffi_env_stream=True))


class Instruction:
    """(out, stream)."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cute.jit
    def __call__(self, out: cute.Tensor, stream: cuda.CUstream) -> None:
        self.kernel.set_name_prefix("instruction", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(out).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, out: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        text = f"{{ .reg .b16 half; cvt.u16.u32 half, {{$r0}}; {self.text} }}"
        out[thread] = ptx.inline_ptx(text, write_only_types=[Int32], read_only_args=[out[thread]])


def takes(text: str) -> bool:
    try:
        compile_report(InstructionKey("sm_100a", text=text))
    except DSLBaseError:
        return False
    return True


def findings(report_of: Callable[[KernelKey], Facts] = compile_report) -> dict[str, Any]:
    return {
        "cuda": [CUDA_VERSION.major, CUDA_VERSION.minor],
        "takes": {text: takes(text) for text in CHOSEN},
        "chosen": CHOSEN,
        "problems": {str(key): problems(key, report_of(key)) for key in KEYS},
    }


if __name__ == "__main__":
    json.dump(findings(), sys.stdout)
