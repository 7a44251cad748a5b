# SPDX-License-Identifier: Apache-2.0
"""GEMM for few tokens on Hopper: out[t, n] = sum_k a[t, k] b[n, k], with the weight b as wgmma's first operand.

wgmma multiplies 64 rows at least. With few tokens these are 64 outputs, rows of the weight, and the tokens are the
product's columns: 8, 16, 32 or 64. What takes time is bringing the weight, once; the design keeps its copies in
flight without a gap, from before the kernel ahead has ended.

A work tile is 64 (or 128) outputs and up to `tokens` tokens of one group. K is cut into `splits`: the CTAs of a cluster
have one split of a work tile each, sum it, and send the sums of 8 tokens at a time to the CTA that adds up those
tokens, always in the order of the splits. How K is cut follows from the weight's shape alone, never from the number of
tokens, so a token's bits do not depend on its batch.

    warp 8          producer of weights, which come before the dependency has been waited for
    warp 9          producer of tokens, and of the scales (e4m3 only), behind that wait
    warps 0 .. 3    consumer warpgroup 0: wgmma, promotion to fp32 totals, epilogue of work tiles 0, 2, 4 ... of the CTA
    warps 4 .. 7    consumer warpgroup 1: the same of work tiles 1, 3, 5 ...: one multiplies while the other stores.
                    With 128 outputs in a work tile each takes half of them: an e4m3 result has a scale for 128
                    outputs, and 64 tokens are as many bytes as 64 outputs, which both then use

    stage           weights [64 or 128, 128 bytes of K] and tokens [tokens, 128 bytes of K], both with the 128-byte
                    swizzle; e4m3: fp32 scales of the tokens, then that of the weight
    received        [split, blocks of 8 tokens, 4 warps, 32 lanes] 16 bytes, for each consumer warpgroup

    barrier     full                                        empty                          waits for full, for empty
    ring        weights, tokens (TMA), scales (cp.async)    consumer warps are done        consumers, warps 8 and 9
    received    sums of all splits have come                CTAs have read what they got   consumers, consumers
    turn        (not of 128 outputs) the other warpgroup has multiplied the work tile before, one for each warpgroup

e4m3: the tensor cores sum a chunk of 128 with about 14 bits; each chunk is scaled and added to fp32 totals in order.
bf16: the tensor cores add to one fp32 accumulator.

Swapped operands for few tokens and split-K through distributed shared memory are known techniques (DeepGEMM, CUTLASS).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float8E4M3FN, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, convert, ptx, wgmma
from cute_kernels.dsl.reduce import lanes_max_bf16x2
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import round_up
from cute_kernels.linear.params import Strided
from cute_kernels.numerics import E4M3_MAX, OUTPUT_FLOOR
from cute_kernels.runtime.compile import KernelKey

WARP = 32
CHUNK_BYTES = 128
"""Of K in a stage: 128 e4m3 or 64 bf16 numbers."""

BLOCK = 128
"""Outputs, and columns of K, that share a scale of the weight."""

CONSUMER_WARPGROUPS = 2
THREADS = (CONSUMER_WARPGROUPS * 4 + 2) * WARP

MOST_BYTES = {1: 216 * 1024, 2: 112 * 1024}
"""Of shared memory, by the CTAs that share a multiprocessor."""

FRAGMENT_BYTES = 16
"""Of a thread's share of 16 outputs x 8 tokens: rows r and r + 8 of two neighbouring tokens."""


@dataclass(frozen=True)
class SwapAbKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    operands      "e4m3" (with scales) or "bf16"
    output        "bf16", "fp32" or "e4m3" (with a scale for each token and 128 outputs)
    tokens        of a work tile: 8, 16, 32 or 64
    splits        of K: CTAs of a cluster, 1 to 8
    cooperative   work tiles of 128 outputs, half of them for each consumer warpgroup; else of 64
    """

    kernel_name: ClassVar[str] = "linear.hopper.gemm_swap_ab"
    operands: str = "e4m3"
    output: str = "bf16"
    tokens: int = 8
    splits: int = 1
    cooperative: bool = False

    @property
    def ctas_per_multiprocessor(self) -> int:
        """Up to 32 tokens two: the next GEMM's CTAs can start beside this one's and bring its weights. With more,
        registers do not allow that."""
        return 2 if self.tokens <= 32 else 1

    @property
    def outputs(self) -> int:
        """Of a work tile."""
        return 128 if self.cooperative else 64

    @property
    def stage_bytes(self) -> int:
        return (self.outputs + self.tokens) * CHUNK_BYTES

    @property
    def scales_per_stage(self) -> int:
        return round_up(self.tokens + 1, 4) if self.operands == "e4m3" else 0

    @property
    def stages(self) -> int:
        room = MOST_BYTES[self.ctas_per_multiprocessor] - 2048 - CONSUMER_WARPGROUPS * self.received_bytes
        return min(12, room // self.stage_bytes)

    @property
    def blocks_received(self) -> int:
        """Blocks of 8 tokens that a CTA adds up."""
        return -(-(self.tokens // 8) // self.splits)

    @property
    def received_bytes(self) -> int:
        """Of one consumer warpgroup."""
        if self.splits == 1:
            return 0
        return self.splits * self.blocks_received * wgmma.WARPGROUP * FRAGMENT_BYTES

    @property
    def smem_bytes(self) -> int:
        bars = (2 * self.stages + 3 * CONSUMER_WARPGROUPS) * 8
        maxima = 2 * 4 * 8 * 4 if self.output == "e4m3" else 0
        before = bars + maxima + self.stages * self.scales_per_stage * 4
        received = CONSUMER_WARPGROUPS * self.received_bytes
        return round_up(round_up(before, 128) + received, 1024) + self.stages * self.stage_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        together = ("barrier.cluster",) if self.splits > 1 else ()
        return "wgmma", "tma.load", *together, "mbarrier", "griddepcontrol"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        def tensor(dtype: Any, divisibility: int, align: int, dense: bool = True) -> Any:
            stride = [cute.sym_int64(divisibility=divisibility) for _ in range(2)]
            last = 1 if dense else cute.sym_int64()
            shape = tuple(cute.sym_int() for _ in range(3))
            return make_fake_tensor(dtype, shape, stride=(*stride, last), assumed_align=align)

        is_fp8 = self.operands == "e4m3"
        operand, unit = (Float8E4M3FN, 16) if is_fp8 else (BFloat16, 8)
        a, b = (tensor(operand, unit, 16) for _ in range(2))
        scales = [tensor(Float32, 1, 4, dense=False) if is_fp8 else None for _ in range(2)]
        dtype, divisibility, align = {
            "bf16": (BFloat16, 2, 4), "fp32": (Float32, 1, 4), "e4m3": (Float8E4M3FN, 2, 2)
        }[self.output]  # fmt: skip
        out = tensor(dtype, divisibility, align)
        out_scale = None
        if self.output == "e4m3":
            out_scale = make_fake_tensor(
                Float32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1), assumed_align=4
            )
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        entry = (a, scales[0], b, scales[1], out, out_scale, Int32(1), Boolean(False), stream)
        return SwapAbKernel(self), entry


class TileScheduler(NamedTuple):
    """The work tiles of a cluster: numbers first, first + step ... below `end`; and its CTA's split of K. Step and
    tiles are divisors, made on the host."""

    first: Any
    end: Any
    step: Any
    output_tiles: Any
    token_tiles: Any
    first_chunk: Any
    chunks: Any

    @property
    def count(self) -> Any:
        """Work tiles of the cluster."""
        return (self.end - self.first + self.step.divisor - 1) // self.step

    def coords(self, index: Any) -> tuple[Any, Any, Any]:
        """Group, tile of outputs and tile of tokens of the cluster's work tile `index`. CTAs that run together have
        the same weights where there are several tiles of tokens."""
        line, token_tile = divmod(self.first + index * self.step.divisor, self.token_tiles)
        group, output_tile = divmod(line, self.output_tiles)
        return group, output_tile, token_tile


class SwapAbKernel:
    """Entry point: (a, a_scale, b, b_scale, out, memory of out's scales, number of clusters, whether to launch as a
    dependent of the kernel before, stream). Scales are None where there are none."""

    def __init__(self, key: SwapAbKey) -> None:
        self.key = key
        self.is_fp8 = key.operands == "e4m3"
        self.operand: Any = Float8E4M3FN if self.is_fp8 else BFloat16
        self.chunk = CHUNK_BYTES if self.is_fp8 else CHUNK_BYTES // 2
        self.tokens, self.outputs, self.stages, self.splits = key.tokens, key.outputs, key.stages, key.splits
        self.blocks = key.tokens // 8
        # of a product, and of those that use a stage
        self.warpgroups = CONSUMER_WARPGROUPS if key.cooperative else 1
        # chunks under way; those of e4m3 are summed outside the tensor cores, and two are enough to hide that
        self.depth = 2 if self.is_fp8 else 4
        suffix = "cooperative" if key.cooperative else "in_turns"
        self.name = f"gemm_swap_ab_{key.operands}_{key.output}_t{key.tokens}_s{key.splits}_{suffix}"

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        a_scale: cute.Tensor | None,
        b: cute.Tensor,
        b_scale: cute.Tensor | None,
        out: cute.Tensor,
        out_scale: cute.Tensor | None,
        clusters: Int32,
        use_pdl: Boolean,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        nothing = Strided(Int64(0), (Int64(0), Int64(0), Int64(0)))
        scales = [Strided.of(s) if const_expr(self.is_fp8) else nothing for s in (a_scale, b_scale)]
        result_scale = (Int64(0), Int64(0), Int32(0))
        if const_expr(self.key.output == "e4m3"):
            result_scale = (address(out_scale), stride_bytes(out_scale, 0), length(out_scale, 1))
        output_tiles = cute.ceil_div(length(out, 2), self.outputs)
        token_tiles = cute.ceil_div(length(out, 0), self.tokens)
        kernel = self.kernel(
            *self.tma_atoms(a, b),
            *(wgmma.make_mma(self.operand, self.warpgroups, self.tokens) for _ in range(2)),
            *scales,
            Strided.of(out),
            *result_scale,
            length(out, 0),
            length(out, 2),
            length(out, 1) * output_tiles * token_tiles,
            *(cute.fast_divmod_create_divisor_v2(number) for number in (clusters, output_tiles, token_tiles)),
            cute.ceil_div(length(a, 2), self.chunk),
        )
        kernel.launch(
            grid=[clusters * self.splits, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[self.splits, 1, 1] if const_expr(self.splits > 1) else None,
            stream=stream,
            use_pdl=use_pdl,
        )

    def tma_atoms(self, a: Any, b: Any) -> tuple[Any, ...]:
        """Of the weights and of the tokens the copy and what it reads, then of each where it writes."""
        weight_tiles = wgmma.swizzled_tiles(self.operand, self.outputs, self.stages)
        token_tiles = wgmma.swizzled_tiles(self.operand, self.tokens, self.stages)
        # both as [rows, K, groups]
        weights = cute.make_tensor(b.iterator, cute.select(b.layout, mode=[1, 2, 0]))
        tokens = cute.make_tensor(a.iterator, cute.select(a.layout, mode=[0, 2, 1]))
        load = cpasync.CopyBulkTensorTileG2SOp()
        weight_copy, weight_source = cpasync.make_tiled_tma_atom(
            load, weights, weight_tiles, (self.outputs, self.chunk)
        )
        token_copy, token_source = cpasync.make_tiled_tma_atom(load, tokens, token_tiles, (self.tokens, self.chunk))
        return weight_copy, weight_source, token_copy, token_source, weight_tiles, token_tiles

    @cute.jit
    def wait_for_cluster(self) -> None:
        """Until the barriers of all its CTAs are there."""
        if const_expr(self.splits > 1):
            cute.arch.cluster_wait()

    # ---- producer

    @cute.jit
    def load_weights(self, work: Any, ring: Any, tile: Any, weights: Any) -> None:
        """Fill the ring with the weights of all work tiles. By warp 8, which does not wait for the kernel ahead: they
        are constant operands. tile: place of the first work tile."""
        copy, target, source = weights
        stage, phase = barriers.start()
        for index in cutlass.range(work.count, unroll=1):
            group, output_tile, _ = tile
            for chunk in cutlass.range(work.chunks, unroll=1):
                ring.wait_empty(stage, phase)
                full = ring.full(stage)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, self.outputs * CHUNK_BYTES)
                cute.copy(
                    copy,
                    source[None, output_tile, work.first_chunk + chunk, group],
                    target[None, stage],
                    tma_bar_ptr=full,
                )
                stage, phase = barriers.advance(stage, phase, self.stages)
            tile = work.coords(index + 1)

    @cute.jit
    def load_tokens(
        self, work: Any, ring: Any, tile: Any, memory: Any, scales: Any, scale_sources: Any, tokens: Any
    ) -> None:
        """The same of the tokens, and the scales of both. By warp 9, once the kernel ahead has ended."""
        copy, copied, found = memory
        a_scale, b_scale = scale_sources
        lane = cute.arch.lane_idx()
        per_lane = cutlass.const_expr(-(-self.tokens // WARP))
        stage, phase = barriers.start()
        cute.arch.griddepcontrol_wait()
        for index in cutlass.range(work.count, unroll=1):
            group, output_tile, token_tile = tile
            sources: list[Any] = []
            weight_source: Any = None
            if const_expr(self.is_fp8):
                # tokens beyond the last have no scales of their own; their results are not stored
                first = token_tile * self.tokens + lane
                sources = [a_scale.at(cutlass.min(first + i * WARP, tokens - 1), group) for i in range(per_lane)]
                weight_source = b_scale.at(group, output_tile * self.outputs // BLOCK)
            for local in cutlass.range(work.chunks, unroll=1):
                chunk = work.first_chunk + local
                ring.wait_empty(stage, phase)
                full = ring.full(stage)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, self.tokens * CHUNK_BYTES)
                cute.copy(copy, found[None, token_tile, chunk, group], copied[None, stage], tma_bar_ptr=full)
                if const_expr(self.is_fp8):
                    target = scales + (stage * self.key.scales_per_stage + lane) * 4
                    for i in range_constexpr(per_lane):
                        is_token = None if const_expr((i + 1) * WARP <= self.tokens) else lane + i * WARP < self.tokens
                        source = sources[i] + Int64(chunk) * a_scale.strides[2]
                        ptx.copy_async_32(target + i * WARP * 4, source, is_token)
                    if lane == 0:
                        ptx.copy_async_32(target + self.tokens * 4, weight_source + Int64(chunk) * b_scale.strides[2])
                    cute.arch.cp_async_mbarrier_arrive_noinc(full)
                stage, phase = barriers.advance(stage, phase, self.stages)
            tile = work.coords(index + 1)
        if const_expr(self.is_fp8):
            # no lane ends with copies under way
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)

    # ---- mainloop

    @cute.jit
    def wait_turn(self, turn: Any, index: Any) -> None:
        """Wait until the work tile before has come, which the other warpgroup multiplies: the parity that a full
        barrier is waited for with tells two phases apart, not more."""
        if index > 0:
            ptx.wait_mbarrier(turn, index - 1 >> 1 & 1)

    @cute.jit
    def multiply_e4m3(
        self, work: Any, ring: Any, mma: Any, weights: Any, tokens: Any, scales: Any, totals: Any, index: Any, half: Any
    ) -> None:
        """totals = the CTA's split of work tile `index`, this warpgroup's 64 outputs of it."""
        lane = cute.arch.lane_idx()
        products = [wgmma.accumulators(mma[0], self.outputs, self.tokens) for _ in range(self.depth)]
        totals.fill(0.0)
        position = index * work.chunks
        stage, phase = position % self.stages, position // self.stages & 1
        for _ in cutlass.range(work.chunks // self.depth, unroll=1):
            under_way = []
            for i in range_constexpr(self.depth):
                ring.wait_full(stage, phase)
                # loads queue behind the operands that tensor cores read: they come first
                factors = self.load_factors(scales + stage * (self.key.scales_per_stage * 4), lane)
                wgmma.multiply(*mma, products[i], half, weights, tokens, stage)
                under_way.append((stage, factors))
                stage, phase = barriers.advance(stage, phase, self.stages)
            for i in range_constexpr(self.depth):
                wgmma.wait(self.depth - 1 - i)
                used, factors = under_way[i]
                self.release(ring, used, lane)
                self.promote(totals, products[i], factors)
        for _ in cutlass.range(work.chunks % self.depth, unroll=1):
            ring.wait_full(stage, phase)
            factors = self.load_factors(scales + stage * (self.key.scales_per_stage * 4), lane)
            wgmma.multiply(*mma, products[0], half, weights, tokens, stage)
            wgmma.wait(0)
            self.release(ring, stage, lane)
            self.promote(totals, products[0], factors)
            stage, phase = barriers.advance(stage, phase, self.stages)

    @cute.jit
    def multiply_bf16(
        self, work: Any, ring: Any, mma: Any, weights: Any, tokens: Any, totals: Any, index: Any, half: Any
    ) -> None:
        """The same of bf16 operands: the tensor cores add up all chunks."""
        lane = cute.arch.lane_idx()
        mma, mma_more = mma
        sums = wgmma.accumulators(mma, self.outputs, self.tokens)
        sums.fill(0.0)
        position = index * work.chunks
        stage, phase = position % self.stages, position // self.stages & 1
        for _ in cutlass.range(work.chunks // self.depth, unroll=1):
            used = []
            for _i in range_constexpr(self.depth):
                ring.wait_full(stage, phase)
                wgmma.multiply(mma_more, mma_more, sums, half, weights, tokens, stage)
                used.append(stage)
                stage, phase = barriers.advance(stage, phase, self.stages)
            for i in range_constexpr(self.depth):
                wgmma.wait(self.depth - 1 - i)
                self.release(ring, used[i], lane)
        for _ in cutlass.range(work.chunks % self.depth, unroll=1):
            ring.wait_full(stage, phase)
            wgmma.multiply(mma_more, mma_more, sums, half, weights, tokens, stage)
            wgmma.wait(0)
            self.release(ring, stage, lane)
            stage, phase = barriers.advance(stage, phase, self.stages)
        for i in range_constexpr(self.tokens // 2):
            totals[i] = sums[i]

    def load_factors(self, scales: Any, lane: Any) -> list[Any]:
        """What the products of the thread's tokens, two of every 8, are multiplied with."""
        weight = ptx.load_shared_f32(scales + self.tokens * 4)
        factors: list[Any] = []
        for block in range(self.blocks):
            factors += ptx.load_shared_f32x2(scales + (block * 8 + lane % 4 * 2) * 4)
        return [factor * weight for factor in factors]

    @cute.jit
    def promote(self, totals: cute.Tensor, products: cute.Tensor, factors: Any) -> None:
        """Add a chunk's scaled products to the fp32 totals."""
        for i in range_constexpr(self.tokens // 2):
            totals[i] = totals[i] + factors[i // 4 * 2 + i % 2] * products[i]

    @cute.jit
    def release(self, ring: Any, stage: Any, lane: Any) -> None:
        # one lane arrives for all: they must have read their scales
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(ring.empty(stage))

    # ---- epilogue

    @cute.jit
    def combine(
        self, totals: Any, rank: Any, warp: Any, lane: Any, received: Any, bars: Any, use: Any, is_last: Any
    ) -> None:
        """Send the totals of every 8 tokens to the CTA that adds them up, and add up this CTA's, into the first of
        `totals`. By one warpgroup.

        received, bars   the warpgroup's memory and barriers: sums have arrived; sums have been read everywhere
        use              how many work tiles it has combined before
        """
        full, empty = bars, bars + 8
        slots = cutlass.const_expr(self.key.blocks_received)
        fragment = (warp * WARP + lane) * FRAGMENT_BYTES
        block_bytes = cutlass.const_expr(wgmma.WARPGROUP * FRAGMENT_BYTES)
        mine = (self.blocks - rank + self.splits - 1) // self.splits
        if mine > 0 and warp == 0 and lane == 0:
            ptx.expect_bytes(full, mine * (self.splits * block_bytes))
        if use > 0:
            ptx.wait_mbarrier(empty, use - 1 & 1)
        own = received + rank * (slots * block_bytes) + fragment
        for block in range_constexpr(self.blocks):
            target = const_expr(block % self.splits)
            words = [totals[4 * block + i].bitcast(Int32) for i in range(4)]
            place = ptx.map_shared(own + block // self.splits * block_bytes, target)
            ptx.store_remote_128(place, words, ptx.map_shared(full, target))
        if mine > 0:
            ptx.wait_mbarrier_cluster(full, use & 1)
            for slot in range_constexpr(slots):
                if slot < mine:
                    sums = [Float32(0.0)] * 4
                    for split in range_constexpr(self.splits):
                        start = received + (split * slots + slot) * block_bytes + fragment
                        found = [word.bitcast(Float32) for word in ptx.load_shared_128(start)]
                        sums = found if const_expr(split == 0) else [s + f for s, f in zip(sums, found, strict=True)]
                    for i in range_constexpr(4):
                        totals[4 * slot + i] = sums[i]
            if not is_last:
                cute.arch.sync_warp()
                if lane < self.splits:
                    ptx.arrive_cluster(ptx.map_shared(empty, lane))

    @cute.jit
    def store(
        self, totals: Any, rank: Any, warp: Any, lane: Any, half: Any, maxima: Any, tile: Any, result: Any, sizes: Any
    ) -> None:
        """Store the blocks of 8 tokens that this CTA has in `totals`. By one warpgroup, or by both."""
        group, output_tile, token_tile = tile
        out, out_scale, scale_row, padded_tokens = result
        tokens, outputs = sizes
        first_output = output_tile * self.outputs + half * wgmma.ROWS + warp * 16
        for slot in range_constexpr(self.key.blocks_received):
            block = slot * self.splits + rank
            first_token = token_tile * self.tokens + block * 8
            values = [totals[4 * slot + i] for i in range(4)]
            if const_expr(self.key.output == "fp32"):
                for i in range_constexpr(4):
                    token, output = first_token + lane % 4 * 2 + i % 2, first_output + lane // 4 + i // 2 * 8
                    target = out.at(token, group) + Int64(output) * 4
                    is_inside = block < self.blocks and token < tokens and output < outputs
                    ptx.store_global_f32(target, values[i], is_inside)
            else:
                # outputs become columns: a lane has two neighbours of each 8 outputs of one token
                low = ptx.transpose_matrix(ptx.bf16x2(values[0], values[1]))
                high = ptx.transpose_matrix(ptx.bf16x2(values[2], values[3]))
                token, output = first_token + lane // 4, first_output + lane % 4 * 2
                is_inside = block < self.blocks and token < tokens
                if const_expr(self.key.output == "bf16"):
                    target = out.at(token, group) + Int64(output) * 2
                    ptx.store_global_s32(target, low, is_inside and output < outputs)
                    ptx.store_global_s32(target + 16, high, is_inside and output + 8 < outputs)
                else:
                    byte = self.scale_byte(low, high, warp, lane, half, maxima)
                    factor = convert.ue8m0_inverse(byte)
                    codes = convert.e4m3_from_bf16x4(low, high, factor)
                    target = out.at(token, group) + Int64(output)
                    ptx.store_global_16(target, codes, is_inside and output < outputs)
                    ptx.store_global_16(target + 8, codes >> 16, is_inside and output + 8 < outputs)
                    row = group * (outputs // BLOCK) + output_tile
                    # the tokens between the last one and the padded length get zeros
                    scale = byte << 23 if token < tokens else Int32(0)
                    is_mine = half == 0 and warp == 0 and lane % 4 == 0 and block < self.blocks
                    target = out_scale + Int64(row) * scale_row + Int64(token) * 4
                    ptx.store_global_s32(target, scale, is_mine and token < padded_tokens)

    @cute.jit
    def scale_byte(self, low: Any, high: Any, warp: Any, lane: Any, half: Any, maxima: Any) -> Any:
        """Exponent byte of the scale of a lane's token, over 128 outputs in the eight consumer warps."""
        halves = convert.absmax_bf16x2(low, high)
        largest = ptx.max_f32(convert.bf16_low(halves), convert.bf16_high(halves))
        byte = convert.ue8m0_from_absmax(largest, E4M3_MAX, OUTPUT_FLOOR)
        byte = lanes_max_bf16x2(byte << 7, lanes=4) >> 7
        # the warps' maxima of 8 tokens; the barrier behind the loads keeps the next block's from overtaking them
        if lane % 4 == 0:
            ptx.store_shared_s32(maxima + ((half * 4 + warp) * 8 + lane // 4) * 4, byte)
        threads = cutlass.const_expr(CONSUMER_WARPGROUPS * wgmma.WARPGROUP)
        cute.arch.barrier(barrier_id=1, number_of_threads=threads)
        for other in range_constexpr(2 * 4):
            byte = cutlass.max(byte, ptx.load_shared_s32(maxima + (other * 8 + lane // 4) * 4))
        cute.arch.barrier(barrier_id=1, number_of_threads=threads)
        return byte

    # ---- kernel

    @cute.kernel
    def kernel(
        self,
        weight_copy: cute.CopyAtom,
        weight_source: cute.Tensor,
        token_copy: cute.CopyAtom,
        token_source: cute.Tensor,
        weight_tiles: cute.ComposedLayout,
        token_tiles: cute.ComposedLayout,
        mma: cute.TiledMma,
        mma_more: cute.TiledMma,
        a_scale: Strided,
        b_scale: Strided,
        out: Strided,
        out_scale: Int64,
        scale_row: Int64,
        padded_tokens: Int32,
        tokens: Int32,
        outputs: Int32,
        tiles: Int32,
        clusters: cute.FastDivmodDivisorV2,
        output_tiles: cute.FastDivmodDivisorV2,
        token_tile_count: cute.FastDivmodDivisorV2,
        chunks: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        lane = thread % WARP
        rank, cluster = Int32(0), cta
        if const_expr(self.splits > 1):
            rank = cute.arch.make_warp_uniform(cta % self.splits)
            cluster = cta // self.splits

        smem = SmemAllocator()
        ring = barriers.Ring.allocate(smem, self.stages)
        bars = smem.allocate_array(Int64, 3 * CONSUMER_WARPGROUPS)
        maxima = Int32(0)
        if const_expr(self.key.output == "e4m3"):
            maxima = smem.allocate_array(Int32, 2 * 4 * 8).toint()
        scales = Int32(0)
        if const_expr(self.is_fp8):
            scales = smem.allocate_array(Float32, self.stages * self.key.scales_per_stage).toint()
        received = Int32(0)
        if const_expr(self.splits > 1):
            memory = smem.allocate_tensor(
                Int32, cute.make_layout(CONSUMER_WARPGROUPS * self.key.received_bytes // 4), byte_alignment=128
            )
            received = memory.iterator.toint()
        weights = smem.allocate_tensor(
            self.operand, weight_tiles.outer, byte_alignment=1024, swizzle=weight_tiles.inner
        )
        token_rows = smem.allocate_tensor(
            self.operand, token_tiles.outer, byte_alignment=1024, swizzle=token_tiles.inner
        )
        if warp == CONSUMER_WARPGROUPS * 4:
            for copy in (weight_copy, token_copy):
                cpasync.prefetch_descriptor(copy)
        # found while the barriers are made: it is on the way to the first copy
        first_chunk = rank * chunks // self.splits
        end_chunk = (rank + 1) * chunks // self.splits
        work = TileScheduler(
            cluster, tiles, clusters, output_tiles, token_tile_count, first_chunk, end_chunk - first_chunk
        )
        tile = work.coords(Int32(0))
        if thread == 0:
            # one arrival announces the bytes of the weights, one those of the tokens, one per lane its scales
            ring.initialize(2 + (WARP if self.is_fp8 else 0), 4 * self.warpgroups)
            for group in range(CONSUMER_WARPGROUPS):
                cute.arch.mbarrier_init(bars + 2 * group, 1)
                cute.arch.mbarrier_init(bars + 2 * group + 1, 4 * min(self.splits, self.blocks))
                cute.arch.mbarrier_init(bars + 2 * CONSUMER_WARPGROUPS + group, 4)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if const_expr(self.splits > 1):
            # nobody sends to a CTA whose barriers are not there yet; weights need not wait for that
            cute.arch.cluster_arrive_relaxed()
        cute.arch.griddepcontrol_launch_dependents()

        wgmma.accumulate(mma_more)
        if warp >= CONSUMER_WARPGROUPS * 4:
            if warp == CONSUMER_WARPGROUPS * 4:
                self.load_weights(
                    work, ring, tile, (weight_copy, *self.partition(weight_copy, weight_source, weights, self.outputs))
                )
                self.wait_for_cluster()
            else:
                self.wait_for_cluster()
                self.load_tokens(
                    work,
                    ring,
                    tile,
                    (token_copy, *self.partition(token_copy, token_source, token_rows, self.tokens)),
                    scales,
                    (a_scale, b_scale),
                    tokens,
                )
        else:
            self.wait_for_cluster()
            warpgroup = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
            # half: of a work tile's outputs
            first, step, half = warpgroup, Int32(CONSUMER_WARPGROUPS), Int32(0)
            if const_expr(self.key.cooperative):
                first, step, half = Int32(0), Int32(1), warpgroup
            own_bars, turns = bars.toint() + warpgroup * 16, bars.toint() + CONSUMER_WARPGROUPS * 16
            own_received = received + warpgroup * self.key.received_bytes
            totals = cute.make_rmem_tensor((self.tokens // 2,), Float32)
            use = Int32(0)
            for index in cutlass.range(first, work.count, step, unroll=1):
                if const_expr(not self.key.cooperative):
                    self.wait_turn(turns + warpgroup * 8, index)
                if const_expr(self.is_fp8):
                    self.multiply_e4m3(work, ring, (mma, mma_more), weights, token_rows, scales, totals, index, half)
                else:
                    self.multiply_bf16(work, ring, (mma, mma_more), weights, token_rows, totals, index, half)
                if const_expr(not self.key.cooperative):
                    ptx.arrive_mbarrier(turns + (1 - warpgroup) * 8, lane == 0)
                if const_expr(self.splits > 1):
                    is_last = index + step >= work.count
                    self.combine(totals, rank, warp % 4, lane, own_received, own_bars, use, is_last)
                    use += 1
                result = out, out_scale, scale_row, padded_tokens
                # a CTA has waited for all that others send to it, and for their arrivals at its barriers
                self.store(totals, rank, warp % 4, lane, half, maxima, work.coords(index), result, (tokens, outputs))

    def partition(self, copy: Any, source: Any, tile: Any, rows: int) -> Any:
        """What a bulk copy writes, by stage, and reads, by tile, chunk and group."""
        grid = cute.local_tile(source, (rows, self.chunk), (None, None, None))
        return cpasync.tma_partition(
            copy, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(grid, 0, 2)
        )
