"""sparse_mla_mixed on Hopper over e4m3 caches: the kernel over bf16 ones, with rows that become f16 on their way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from cutlass import Float8E4M3FN

from cute_kernels.sparse_mla.mixed_sm90 import MixedKernel, MixedKey, fake_arguments
from cute_kernels.sparse_mla.mixed_sm90_fp8_plan import FP8
from cute_kernels.sparse_mla.mixed_sm90_fp8_rows import CodeRows
from cute_kernels.sparse_mla.prefill_sm90 import PrefillKernel


@dataclass(frozen=True)
class MixedFp8Key(MixedKey):
    """What distinguishes one compiled kernel from another: nothing but the architecture."""

    kernel_name: ClassVar[str] = "sparse_mla.hopper.prefill_mixed_fp8"

    @property
    def smem_bytes(self) -> int:
        return FP8.smem_bytes

    def kernel(self) -> PrefillKernel:
        return MixedKernel("sparse_mla_mixed_fp8", CodeRows(Float8E4M3FN), FP8)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return self.kernel(), fake_arguments(Float8E4M3FN)
