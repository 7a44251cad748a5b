# SPDX-License-Identifier: Apache-2.0
"""Kernel of fused_qkv_insert_compress_index: CTAs of four kinds, those that take longest first.

    CTAs                        do what a CTA of               warps
    0 .. entry_end                compressor/ratio4.py does        a team of four for an entry of 512 columns
    entry_end .. index_end        the same                         each a team of its own, for a key of 128 columns
    index_end .. rows_end         kv_cache/qnorm.py                each `rows` heads of a token, or its KV row
    rows_end ..                   indexer/query.py                 each `groups` times four index heads of a token

All of them have four warps, and their code is that of the separate kernels, so the bytes are too. A step with few
tokens takes as long as its longest CTA, and not the sum of four launches. What describes the step - positions,
requests, slots, pages - and the rotary table are read while the kernel ahead runs, which does not write them.

Registers are those of an entry's CTA, which holds eight rows of two times four columns a lane: 128 a thread, so that
four CTAs fit a multiprocessor. CTAs of queries have room for several rows a warp then, and need them where there
are many: 16 warps must have as much under way as otherwise 40. Shared memory is an entry's: biases and the token's own
row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.compressor import epilogue, ratio4
from cute_kernels.compressor.ratio4 import WARPS, C4Kernel, State, Step, Tokens, allocate_own
from cute_kernels.dsl import convert, ptx
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM, INDEX_DIM, INDEXER_FP8, ROPE_DIM
from cute_kernels.indexer import query
from cute_kernels.indexer.query import Queries, QueryKernel, QueryKey, make_queries
from cute_kernels.insert_compress.call import IndexCall
from cute_kernels.kv_cache import qnorm
from cute_kernels.kv_cache.qnorm import QnormKernel, QnormKey, Rows, make_rows
from cute_kernels.models import ModelConfig
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel

FEW_TOKENS = 96
"""Up to so many, warps take one head at a time: on an H200 64 tokens of 64 heads take 5.7 us, 6.2 with four heads a
warp, but 256 tokens 17.3 and 14.5."""

SHAPES = ((1, 2), (4, 2))
"""(rows, groups) for few tokens and for more."""


@dataclass(frozen=True)
class InsertCompressIndexKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    rows             heads of q that a warp holds
    groups           of four index heads that a warp holds
    index_hadamard   whether index queries and keys are transformed
    weights_bf16     dtype of the index heads' weights: bf16, or else fp32
    """

    kernel_name: ClassVar[str] = "insert_compress.insert_compress_index"
    tuning: ClassVar[tuple[str, ...]] = ("rows", "groups")

    rows: int = 1
    groups: int = 2
    index_hadamard: bool = False
    weights_bf16: bool = False

    @property
    def instructions(self) -> tuple[str, ...]:
        return "ld.global.128", "st.global.128", *convert.e4m3_instructions(self.arch), "cp.async"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        def stride(divisibility: int) -> Any:
            return cute.sym_int64(divisibility=divisibility)

        count = cute.sym_int()
        q_shape = (count, cute.sym_int(), HEAD_DIM)
        q = make_fake_tensor(BFloat16, q_shape, stride=(stride(8), stride(8), 1), assumed_align=16)
        kv = make_fake_tensor(BFloat16, (count, HEAD_DIM), stride=(stride(8), 1), assumed_align=16)
        slots, state_slots = (make_fake_tensor(Int64, (cute.sym_int(),), stride=(1,)) for _ in range(2))
        positions = make_fake_tensor(Int64, (count,), stride=(1,), assumed_align=8)
        table = make_fake_tensor(Float32, (cute.sym_int(), ROPE_DIM), stride=(stride(4), 1), assumed_align=16)
        pages = make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1))
        q_shape = (count, cute.sym_int(), INDEX_DIM)
        index_q = make_fake_tensor(BFloat16, q_shape, stride=(cute.sym_int64(), cute.sym_int64(), 1))
        compressor = *(Int64(0),) * 4, *(Int64(0), Int64(0), Int32(0), Int32(1)), Int32(1), *epilogue.fake_numbers()
        numbers = (
            *(Int64(0), Int64(0), Int32(0), Int32(1), Float32(0)),
            *(Int64(0), Int64(0), Int64(0), Int64(0), Int64(0), Int32(0)),
            *(*compressor, *compressor),
            *(Int64(0), Int64(0), Float32(1), Float32(1), Int64(0), Int64(0), Int64(0), Int64(0), Int64(0)),
            *(Boolean(False), Boolean(False)),
        )
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        kernel = InsertCompressIndexKernel(self)
        return kernel, (q, kv, slots, positions, table, state_slots, pages, index_q, *numbers, stream)


class InsertCompressIndexKernel:
    """Entry point: (q, kv, slots, positions, cos and sin table, state slots, block table, index q; of the keys' cache:
    address, page stride in bytes, rows of the pool, rows of a page, eps; what both compressors share: addresses of
    entry slots, requests, starts and restarts, keep_every, save_all; of each compressor: address and row stride of
    kv_score, of ape, of its state cache address, page stride, pages, rows of a page, tokens of a team,
    `entry.numbers`; of the index queries: address and row stride of the weights, two factors, address, token and head
    stride of the codes, address and row stride of the scaled weights; whether weights are rounded, use_pdl,
    stream)."""

    def __init__(self, key: InsertCompressIndexKey) -> None:
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        self.groups = key.groups
        self.qnorm = QnormKernel(QnormKey(key.arch, FP8_DS_MLA.id, True, key.rows, WARPS, True))
        query = QueryKey(
            key.arch, "", key.index_hadamard, weights_bf16=key.weights_bf16, groups=key.groups, warps=WARPS
        )
        self.query = QueryKernel(query, early=True)
        entries, keys = (
            epilogue.EntryStore(kv_format, False, "", hadamard, key.arch)
            for kv_format, hadamard in ((FP8_DS_MLA.id, False), (INDEXER_FP8.id, key.index_hadamard))
        )
        self.entries = C4Kernel("", True, False, entries, self.has_dependency, early=True)
        self.index_keys = C4Kernel("", True, False, keys, self.has_dependency, early=True)
        self.name = (
            f"qkv_insert_compress_index_r{key.rows}g{key.groups}"
            + "_hadamard" * key.index_hadamard
            + "_bf16_weights" * key.weights_bf16
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kv: cute.Tensor,
        slots: cute.Tensor,
        positions: cute.Tensor,
        table: cute.Tensor,
        state_slots: cute.Tensor,
        block_table: cute.Tensor,
        index_q: cute.Tensor,
        k_pool: Int64,
        k_page_stride: Int64,
        k_capacity: Int32,
        k_page_rows: Int32,
        k_eps: Float32,
        entry_slots: Int64,
        requests: Int64,
        starts: Int64,
        min_restart: Int64,
        keep_every: Int64,
        save_all: Int32,
        kv_score: Int64,
        row_stride: Int64,
        ape: Int64,
        ape_stride: Int64,
        state_pool: Int64,
        state_page_stride: Int64,
        state_pages: Int32,
        state_page_rows: Int32,
        per_team: Int32,
        pool: Int64,
        page_stride: Int64,
        page_rows: Int32,
        capacity: Int32,
        weight: Int64,
        angles: Int64,
        angles_stride: Int64,
        angles_rows: Int32,
        fp8_scale: Int64,
        eps: Float32,
        index_kv_score: Int64,
        index_row_stride: Int64,
        index_ape: Int64,
        index_ape_stride: Int64,
        index_state_pool: Int64,
        index_state_page_stride: Int64,
        index_state_pages: Int32,
        index_state_page_rows: Int32,
        index_per_team: Int32,
        index_pool: Int64,
        index_page_stride: Int64,
        index_page_rows: Int32,
        index_capacity: Int32,
        index_weight: Int64,
        index_angles: Int64,
        index_angles_stride: Int64,
        index_angles_rows: Int32,
        index_fp8_scale: Int64,
        index_eps: Float32,
        weights: Int64,
        weights_stride: Int64,
        softmax_scale: Float32,
        head_scale: Float32,
        codes: Int64,
        codes_token: Int64,
        codes_head: Int64,
        out: Int64,
        out_stride: Int64,
        round_weights: Boolean,
        use_pdl: Boolean,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        in_place = (address(q), stride_bytes(q, 0), stride_bytes(q, 1), Int64(0))
        keys = (k_pool, k_page_stride, k_capacity, k_page_rows)
        rows = make_rows(q, in_place, (kv, slots, Int64(0)), positions, table, keys, k_eps, self.qnorm.rows)
        queries = make_queries(
            positions,
            index_q,
            (address(table), stride_bytes(table, 0), Int64(length(table, 0))),
            (weights, weights_stride, softmax_scale, head_scale),
            (codes, codes_token, codes_head, Int64(0), Int64(0), out, out_stride),
            round_weights,
            self.groups,
        )
        entries = make_compressor(
            (address(state_slots), entry_slots, address(positions), requests, length(state_slots, 0), per_team),
            (state_pool, state_page_stride, state_pages, state_page_rows),
            block_table,
            (kv_score, row_stride, ape, ape_stride, starts, min_restart, keep_every, save_all),
            (pool, page_stride, page_rows, capacity, weight, angles, angles_stride, angles_rows, fp8_scale, eps),
        )
        index_keys = make_compressor(
            (address(state_slots), entry_slots, address(positions), requests, length(state_slots, 0), index_per_team),
            (index_state_pool, index_state_page_stride, index_state_pages, index_state_page_rows),
            block_table,
            (index_kv_score, index_row_stride, index_ape, index_ape_stride, starts, min_restart, keep_every, save_all),
            (
                *(index_pool, index_page_stride, index_page_rows, index_capacity, index_weight),
                *(index_angles, index_angles_stride, index_angles_rows, index_fp8_scale, index_eps),
            ),
        )
        count = length(state_slots, 0)
        entry_end = cute.ceil_div(count, per_team * self.entries.teams)
        index_end = entry_end + cute.ceil_div(count, index_per_team * self.index_keys.teams)
        rows_end = index_end + cute.ceil_div(rows.units, WARPS)
        ctas = rows_end + cute.ceil_div(queries.units, WARPS)
        self.kernel(entries, index_keys, rows, queries, entry_end, index_end, rows_end).launch(
            grid=[ctas, 1, 1],
            block=[WARPS * 32, 1, 1],
            stream=stream,
            use_pdl=use_pdl if const_expr(self.has_dependency) else False,
        )

    @cute.kernel
    def kernel(
        self,
        entries: tuple[Tokens, State, Step, epilogue.Cache],
        index_keys: tuple[Tokens, State, Step, epilogue.Cache],
        rows: Rows,
        queries: Queries,
        entry_end: Int32,
        index_end: Int32,
        rows_end: Int32,
    ) -> None:
        cta, _, _ = cute.arch.block_idx()
        sums = cute.arch.alloc_smem(Float32, 2 * WARPS, 8 * WARPS).toint()
        own = allocate_own()
        if cta < entry_end:
            self.entries.run(cta, *entries, sums, own)
        elif cta < index_end:
            self.index_keys.run(cta - entry_end, *index_keys, sums, own)
        elif cta < rows_end:
            self.qnorm.run(cta - index_end, rows)
        else:
            self.query.run(cta - rows_end, queries)


def make_compressor(
    tokens: Any, state: Any, block_table: Any, step: Any, cache: Any
) -> tuple[Tokens, State, Step, epilogue.Cache]:
    """From an entry point's numbers to what ratio4.py takes. state: address, page stride, pages, rows of a page."""
    pool, page_stride, pages, page_rows = state
    table = address(block_table), stride_bytes(block_table, 0), length(block_table, 0), length(block_table, 1)
    divisor = cute.fast_divmod_create_divisor_v2(page_rows)
    return (
        Tokens(*tokens),
        State(
            pool, page_stride, pages, pages * page_rows, divisor, *table, divisor
        ),  # the last one is of cyclic tables alone
        Step(*step),
        epilogue.make_cache(*cache),
    )


def keys_of(arch: str) -> list[InsertCompressIndexKey]:
    """All kernels of an architecture."""
    options = [(hadamard, weights_bf16) for hadamard in (False, True) for weights_bf16 in (False, True)]
    return [InsertCompressIndexKey(arch, *shape, *option) for option in options for shape in SHAPES]


def deployment_keys(config: ModelConfig, tp: int, arch: str) -> list[InsertCompressIndexKey]:
    """Layers of ratio 4, with the usual formats of both caches."""
    return keys_of(arch) if 4 in config.compress_ratios else []


@cache
def _key(device_index: int, shape: tuple[int, int], index_hadamard: bool, weights_bf16: bool) -> InsertCompressIndexKey:
    return InsertCompressIndexKey(arch_of(device_index), *shape, index_hadamard, weights_bf16)


def why_not(call: IndexCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    for why in (
        qnorm.why_not_quant_insert(call.insert()),
        ratio4.why_not(call.compress()),
        ratio4.why_not(call.compress_index()),
        query.why_not(call.query()),
    ):
        if why:
            return why
    for name, tensor, size in (
        ("norm_weight", call.norm_weight, 2),
        ("index_norm_weight", call.index_norm_weight, 2),
        ("cos_sin_cache", call.cos_sin_cache, 4),
    ):
        if tensor.element_size() != size:
            return f"{name} must have {size} bytes an element, got {tensor.dtype}"
    if call.index_q.shape[1] == 0:
        return "there must be index heads"
    return ""


def launch(call: IndexCall) -> None:
    """Run the kernel on the current stream of q's device."""
    shape = SHAPES[call.q.shape[0] > FEW_TOKENS]
    key = _key(call.q.device.index, shape, call.index_hadamard, call.index_weights.element_size() == 2)
    launch_with(key, call)


def launch_with(key: InsertCompressIndexKey, call: IndexCall) -> None:
    """`launch` with a kernel of the caller's choice: for tests and benchmarks."""
    if call.q.shape[0] == 0:
        return
    k_cache, out = call.k_cache, call.index_weights_out
    k_pool = k_cache.data_ptr(), k_cache.stride(0) * k_cache.element_size(), k_cache.shape[0] * call.block_size
    launch_key(
        key,
        call.q.device.index,
        *(call.q, call.kv, call.slot_mapping, call.positions, call.cos_sin_cache),
        *(call.state_slot_mapping, call.state_block_table, call.index_q),
        *(*k_pool, call.block_size, call.eps),
        *(call.entry_slot_mapping.data_ptr(), call.token_to_req_indices.data_ptr(), call.query_start_loc.data_ptr()),
        *(0 if call.min_restart is None else call.min_restart.data_ptr(), call.keep_every, call.persist == "all"),
        *_compressor(call, HEAD_DIM, call.kv_score, call.ape, call.state_cache, call.entry_cache, call.norm_weight),
        *_compressor(
            *(call, INDEX_DIM, call.index_kv_score, call.index_ape),
            *(call.index_state_cache, call.index_cache, call.index_norm_weight),
        ),
        *(call.index_weights.data_ptr(), call.index_weights.stride(0) * call.index_weights.element_size()),
        *(call.softmax_scale, call.head_scale),
        *(call.index_q_quant.data_ptr(), call.index_q_quant.stride(0), call.index_q_quant.stride(1)),
        *(out.data_ptr(), out.stride(0) * 4),
        *(call.round_weights, call.use_pdl),
    )


def _compressor(
    call: IndexCall, dim: int, kv_score: Any, ape: Any, state: Any, kv_cache: Any, weight: Any
) -> tuple[Any, ...]:
    """The numbers of one compressor, in the entry point's order."""
    count, requests = call.state_slot_mapping.shape[0], call.state_block_table.shape[0]
    pages, page_rows, _ = state.shape
    return (
        *(kv_score.data_ptr(), kv_score.stride(0) * 4, ape.data_ptr(), ape.stride(0) * 4),
        *(state.data_ptr(), state.stride(0) * 4, pages, page_rows),
        ratio4.tokens_per_team(count, requests, dim, 4 if call.persist == "all" else 16),
        *epilogue.numbers(kv_cache, call.cos_sin_cache, weight, None, call.eps),
    )


KERNEL = OpKernel(launch, why_not, deployment_keys)
