"""sparse_mla_mixed on Blackwell over e4m3 caches: the kernel over bf16 caches, with warps that make rows f16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from cutlass import Float8E4M3FN

from cute_kernels.sparse_mla.mixed_sm100 import MixedKernel, MixedKey
from cute_kernels.sparse_mla.mixed_sm100_fp8_rows import CodeRows, Front
from cute_kernels.sparse_mla.mixed_sm100_plan import FP8
from cute_kernels.sparse_mla.prefill_args import fake_mixed


@dataclass(frozen=True)
class MixedFp8Key(MixedKey):
    """What distinguishes one compiled kernel from another: nothing but the architecture."""

    kernel_name: ClassVar[str] = "sparse_mla.blackwell.prefill_mixed_fp8"

    @property
    def smem_bytes(self) -> int:
        return FP8.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        return *super().instructions, "cvt.e4m3"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return MixedFp8Kernel(), fake_mixed(Float8E4M3FN)


class MixedFp8Kernel(MixedKernel):
    """Entry point: MixedKernel's, with e4m3 queries and caches."""

    dtype = Float8E4M3FN

    def __init__(self) -> None:
        super().__init__("sparse_mla_mixed_fp8", FP8)
        self.rows, self.front = CodeRows(), Front()
