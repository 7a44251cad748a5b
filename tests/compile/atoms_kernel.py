# SPDX-License-Identifier: Apache-2.0
"""Kernels that multiply by CuTe DSL's own atoms: what descriptors do they make?

And where, by their layouts, do operands and results lie? Tracing a kernel raises where dsl.umma says something else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import (
    AddressSpace,
    BFloat16,
    Float4E2M1FN,
    Float8E4M3FN,
    Float8E8M0FNU,
    Float32,
    Int32,
    const_expr,
    range_constexpr,
)
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.utils import blackwell_helpers
from cutlass.utils.blockscaled_layout import BlockScaledBasicChunk

from cute_kernels.dsl import umma
from cute_kernels.dsl.tensor import tile
from cute_kernels.runtime.key import KernelKey

DTYPES: dict[str, Any] = {"bf16": BFloat16, "e4m3": Float8E4M3FN, "e2m1": Float4E2M1FN}


@dataclass(frozen=True)
class AtomKey(KernelKey):
    """A product [rows, columns], `depth` summed, of operands with swizzled rows of so many bytes."""

    kernel_name: ClassVar[str] = "tests.umma_atom"
    name: str = "bf16"
    rows: int = 128
    columns: int = 64
    depth: int = 64
    swizzle: int = 128
    b_is_mn: bool = False
    blocks: int = 1
    is_scaled: bool = False

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        out = make_fake_tensor(Int32, (cute.sym_int(),), stride=(1,))
        return Atoms(self), (out, make_fake_stream(use_tvm_ffi_env_stream=True))


class Atoms:
    """(anything, stream)."""

    def __init__(self, key: AtomKey) -> None:
        self.key = key

    def mma(self) -> Any:
        key, dtype = self.key, DTYPES[self.key.name]
        group = tcgen05.CtaGroup.TWO if key.blocks == 2 else tcgen05.CtaGroup.ONE
        majors = OperandMajorMode.K, OperandMajorMode.MN if key.b_is_mn else OperandMajorMode.K
        shape = key.rows, key.columns
        if key.is_scaled:
            return blackwell_helpers.make_blockscaled_trivial_tiled_mma(
                dtype, dtype, *majors, Float8E8M0FNU, 32, group, shape
            )
        return blackwell_helpers.make_trivial_tiled_mma(dtype, dtype, *majors, Float32, group, shape)

    @cute.jit
    def __call__(self, out: cute.Tensor, stream: cuda.CUstream) -> None:
        self.kernel.set_name_prefix("atoms", remove_cutlass_symbol=True, keep_mangled_name=False)
        key, dtype = self.key, DTYPES[self.key.name]
        left = tile(dtype, key.rows // key.blocks, key.depth, key.swizzle)
        right = tile(dtype, key.columns // key.blocks, key.depth, key.swizzle)
        if const_expr(key.b_is_mn):
            atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.MN_SW128, dtype)
            right = cute.tile_to_shape(atom, (key.columns // key.blocks, key.depth), (1, 0))
        kernel = self.kernel(self.mma(), left, right)
        kernel.launch(grid=[key.blocks, 1, 1], block=[32, 1, 1], cluster=[key.blocks, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, left: cute.ComposedLayout, right: cute.ComposedLayout) -> None:
        key, dtype = self.key, DTYPES[self.key.name]
        smem = SmemAllocator()
        a = smem.allocate_tensor(dtype, left.outer, byte_alignment=1024, swizzle=left.inner)
        b = smem.allocate_tensor(dtype, right.outer, byte_alignment=1024, swizzle=right.inner)
        own = mma.get_slice(0)
        a_parts, b_parts = mma.make_fragment_A(own.partition_A(a)), mma.make_fragment_B(own.partition_B(b))
        results = mma.make_fragment_C(own.partition_shape_C((key.rows, key.columns)))
        self.check_results(results.layout)
        self.check_operands(left, right)
        if const_expr(key.is_scaled):
            self.check_scales()
            for field, column in ((tcgen05.Field.SFA, 504), (tcgen05.Field.SFB, 508)):
                mma.set(field, cute.make_ptr(Float8E8M0FNU, Int32(column), AddressSpace.tmem, assumed_align=16))
        for k in range_constexpr(cute.size(a_parts, mode=[2])):
            mma.set(tcgen05.Field.ACCUMULATE, k != 0)
            cute.gemm(mma, results, a_parts[None, None, k], b_parts[None, None, k], results)

    def check_results(self, layout: Any) -> None:
        """Some of the results of the first block."""
        form = f"{'pair' if self.key.blocks == 2 else 'm'}{self.key.rows}"
        for row in (0, 1, 15, 16, 31, 32, 33, 63, self.key.rows // self.key.blocks - 1):
            for column in (0, 1, 31, 32, self.key.columns // 2, self.key.columns - 1):
                block, lane, place = umma.result_place(form, self.key.columns, row, column)
                equal(block << 32 | lane << 16 | place, cute.crd2idx(((row, column), 0, 0), layout))

    def check_operands(self, left: Any, right: Any) -> None:
        """Some elements of the first block's: where they are unswizzled, and how that is swizzled."""
        key, bits = self.key, DTYPES[self.key.name].width
        rows = umma.k_major(bits, key.swizzle)
        columns = umma.mn_major(bits, key.depth * 128) if key.b_is_mn else rows
        for operand, layout in ((rows, left), (columns, right)):
            equal(f"S<{operand.swizzle.bit_length() - 5},4,3>", str(layout.inner))
            for row in (0, 1, 2, 7, 8, 9, 31, 32, 63, 64, 65):
                for k in (0, 1, 7, 8, 9, 15, 16, 31):
                    if row < cute.size(layout.outer, mode=[0]):
                        equal(operand.plain(row, k) * 8 + k * bits % 8, layout.outer((row, k)) * bits)

    def check_scales(self) -> None:
        layout = BlockScaledBasicChunk(32).layout
        for row in range(128):
            for block in range(4):
                equal(umma.scale_offset(row, block), cute.crd2idx((row, 32 * block), layout))


def equal(ours: Any, theirs: Any) -> None:
    if ours != theirs:
        raise AssertionError(f"expected {theirs}, dsl.umma says {ours}")
