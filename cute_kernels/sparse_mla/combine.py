# SPDX-License-Identifier: Apache-2.0
"""Combination of splits: of merge_attention_states, and of sparse_mla_decode where it splits rows.

One head of one row has 512 columns in each of n splits, and a log-sum-exp with each:

    CTA                       as many heads of one row as its warps have threads for
    thread t of a head's T    vectors t, t + T, ... of every split: 16 bytes each, four fp32 columns or eight bf16 ones
    lane i of its warps       the log-sum-exps of splits i, i + 32, ...

    lses   gmem --> registers --max, sum over lanes--> a split's scale, in its lane --shuffle--+
    outs   gmem --> registers, `held` splits at once ------------------------------------------+--> fp32 sums --> out

All of a thread's loads are under way before any of them is used: most calls are so short that they cost one trip to the
memory and the launch. Splits beyond the `held` first are taken in further rounds; those that are empty are not read.
A split's number alone decides where it stands in every sum, and an empty one adds nothing: a row has the same bits
whatever its batch, and however many empty splits follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl import ptx
from cute_kernels.dsl.convert import bf16_floats, bf16_words
from cute_kernels.dsl.entry import entry_point
from cute_kernels.dsl.reduce import lanes_max, lanes_sum
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import HEAD_DIM
from cute_kernels.models import ModelConfig
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel
from cute_kernels.sparse_mla.arguments import no_logs
from cute_kernels.sparse_mla.call import MergeCall
from cute_kernels.sparse_mla.params import fake_logs
from cute_kernels.sparse_mla.quant_output import (
    HEAD_SCALES,
    SCALED,
    QuantOutput,
    codes_of_lanes,
    fake_quant,
    load_two_angles,
    quant_of,
    turn_two,
)

SHAPES = ((4, 4), (8, 2), (16, 1))
"""(splits that a thread holds at once, vectors of each), by kernel: the same registers, and with few splits as few
warps as there are heads. On an H200 16.8 MB in four splits take 3.8 us so, 5.5 us with one vector a thread
(perf/log/data/merge_2.txt)."""

MOST_TOKENS = 65535
"""Along a grid's third axis."""

INFINITY = float("inf")

QUANTIZED_ARCHS = ("sm_90a",)
"""Where attention's results can be stored as codes."""


# ---- kernel


class CombineArgs(NamedTuple):
    """What the kernel is given, in order (dsl/entry.py).

    outs, lses    splits: fp32 or bf16 [splits, b, s_q, h, 512], fp32 [splits, b, h, s_q]
    sink          address of fp32 [h], or 0
    out           fp32 or bf16 [b, s_q, h, 512]; or codes, and what comes with them (quant_output), else None
    lse           fp32 [b, h, s_q] or empty
    row_step, token_step
                  of codes: row i and token j of the splits become row i * row_step + j * token_step
    use_pdl       whether to launch as a dependent of the kernel before
    """

    outs: cute.Tensor
    lses: cute.Tensor
    sink: Int64
    out: cute.Tensor
    scales: Any
    positions: Any
    table: Any
    lse: cute.Tensor
    row_step: Any
    token_step: Any
    use_pdl: Boolean
    stream: cuda.CUstream


class CombineKernel:
    def __init__(self, key: CombineKey) -> None:
        self.held = key.held
        self.vectors = key.vectors
        self.more = key.more
        self.fp32_parts = key.fp32_parts
        self.fp32_out = key.fp32_out
        self.columns = 4 if key.fp32_parts else 8  # of a vector
        self.threads = HEAD_DIM // (self.columns * key.vectors)  # of a head
        self.heads = key.warps * 32 // self.threads  # of a CTA
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        kinds = ["fp32" if is_fp32 else "bf16" for is_fp32 in (key.fp32_parts, key.fp32_out)]
        self.name = f"merge_attention_states_{kinds[0]}_{kinds[1]}_{key.held}{'_more' if key.more else ''}"
        self.name += "_quant" if key.quantized else ""

    @cute.jit
    def launch(self, args: CombineArgs) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        outs, lses, out, lse = args.outs, args.lses, args.out, args.lse
        quant = None if args.scales is None else quant_of(out, args.scales, args.positions, args.table)
        # the last strides of outs and out are those of columns
        kernel = self.kernel(
            address(outs),
            *(stride_bytes(outs, axis) for axis in range(4)),
            address(lses),
            *(stride_bytes(lses, axis) for axis in range(4)),
            args.sink,
            *([None] * 4 if quant is not None else [address(out), *(stride_bytes(out, axis) for axis in range(3))]),
            address(lse),
            *(stride_bytes(lse, axis) for axis in range(3)),
            length(outs, 0),
            length(outs, 3),
            quant,
            (args.row_step, args.token_step),
        )
        kernel.launch(
            grid=[length(outs, 1), cute.ceil_div(length(outs, 3), self.heads), length(outs, 2)],
            block=[self.threads * self.heads, 1, 1],
            stream=args.stream,
            use_pdl=args.use_pdl if const_expr(self.has_dependency) else False,
        )

    @cute.kernel
    def kernel(
        self,
        outs: Int64,
        outs_split: Int64,
        outs_row: Int64,
        outs_token: Int64,
        outs_head: Int64,
        lses: Int64,
        lses_split: Int64,
        lses_row: Int64,
        lses_head: Int64,
        lses_token: Int64,
        sink: Int64,
        out: Any,
        out_row: Any,
        out_token: Any,
        out_head: Any,
        lse: Int64,
        lse_row: Int64,
        lse_head: Int64,
        lse_token: Int64,
        splits: Int32,
        heads: Int32,
        quant: Any,
        steps: tuple[Any, Any],
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        row, block, token = (Int64(i) for i in cute.arch.block_idx())
        slot = cute.arch.make_warp_uniform(thread // self.threads)
        thread = thread % self.threads
        lane = thread % 32
        head = Int32(block) * self.heads + slot
        is_there = head < heads
        # past the end the last one is loaded again, and nothing else is done
        head = Int64(cutlass.min(head, heads - 1))
        source = outs + row * outs_row + token * outs_token + head * outs_head + Int64(thread) * 16
        lse_row_at = lses + row * lses_row + token * lses_token + head * lses_head
        if const_expr(self.has_dependency):
            # the product behind this kernel takes longer to begin than all that is done here
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()

        if const_expr(quant is not None):
            # the table's row is asked for as soon as the position is there
            number = Int32(row) * steps[0] + Int32(token) * steps[1]
            angles_at = quant.angles_at(number) + Int64(lane % 16 * 8)
        # with no more splits than are held, groups of so many lanes do the same
        own = self.load_lse(lse_row_at, lses_split, lane if const_expr(self.more) else lane % self.held, splits)
        logit = ptx.load_global_s32_where(sink != 0, sink + head * 4)
        held = self.load_splits(source, outs_split, Int32(0), [i < splits for i in range(self.held)])
        if const_expr(quant is not None):
            angles = load_two_angles(angles_at)
        # keeps the loads together: the assembler would begin to add before it asks for all splits
        cute.arch.sync_warp()
        if is_there:
            lse_max, total = self.reduce_lses(own, lse_row_at, lses_split, lane, splits)
            extra = cutlass.select_(sink != 0, logit.bitcast(Float32), Float32(-INFINITY))
            factor = ptx.reciprocal(ptx.add_rn(total, ptx.exp2((extra - lse_max) * ptx.LOG2_E)))
            sums = cute.make_rmem_tensor((self.vectors * self.columns,), Float32)
            sums.fill(0.0)
            self.accumulate(sums, held, self.scale(own, lse_max, factor))
            if const_expr(self.more):
                for first in cutlass.range(Int32(self.held), splits, self.held, unroll=1):
                    scale = self.scale(
                        self.load_lse(lse_row_at, lses_split, first + lane % self.held, splits), lse_max, factor
                    )
                    wanted = [cute.arch.shuffle_sync(scale, i) >= 0.0 for i in range(self.held)]
                    self.accumulate(sums, self.load_splits(source, outs_split, first, wanted), scale)
            if const_expr(quant is not None):
                self.store_quantized(quant, number, Int32(head), thread, sums, angles)
            else:
                self.store(out + row * out_row + token * out_token + head * out_head, thread, sums)
            # only where all splits are empty the largest weight is not 1
            result = lse_max + ptx.log2(total) * ptx.LN_2
            result = Float32(cutlass.select_(total == 0.0, Float32(INFINITY), result))
            where = lse + row * lse_row + token * lse_token + head * lse_head
            ptx.store_global_s32(where, result.bitcast(Int32), (thread == 0) & (lse != 0))

    def load_lse(self, lse_row_at: Any, stride: Any, split: Any, splits: Any) -> Any:
        """Log-sum-exp of a split, or that of an empty one if there is no such split."""
        bits = ptx.load_global_s32_where(split < splits, lse_row_at + Int64(split) * stride)
        return cutlass.select_(split < splits, bits.bitcast(Float32), Float32(INFINITY))

    def load_splits(self, source: Any, stride: Any, first: Any, wanted: Any) -> list[Any]:
        """A thread's vectors of the splits from `first` on, four words each; nothing is read of unwanted ones."""
        held = []
        for i, is_wanted in enumerate(wanted):
            at = source + Int64(first + i) * stride
            vectors = [ptx.load_global_128_where(is_wanted, at + v * self.threads * 16) for v in range(self.vectors)]
            held.append([word for vector in vectors for word in vector])
        return held

    @cute.jit
    def reduce_lses(self, own: Any, lse_row_at: Any, stride: Any, lane: Any, splits: Any) -> Any:
        """(largest log-sum-exp, or -inf if all splits are empty; sum of exp(log-sum-exp - largest)), in every lane."""
        lanes = 32 if const_expr(self.more) else self.held
        lse_max = cutlass.select_(is_empty(own), Float32(-INFINITY), own)
        if const_expr(self.more):
            for first in cutlass.range(Int32(32), splits, 32, unroll=1):
                split_lse = self.load_lse(lse_row_at, stride, first + lane, splits)
                lse_max = ptx.max_f32(lse_max, cutlass.select_(is_empty(split_lse), Float32(-INFINITY), split_lse))
        lse_max = lanes_max(lse_max, lanes)
        total = cutlass.select_(is_empty(own), Float32(0.0), ptx.exp2((own - lse_max) * ptx.LOG2_E))
        if const_expr(self.more):
            for first in cutlass.range(Int32(32), splits, 32, unroll=1):
                split_lse = self.load_lse(lse_row_at, stride, first + lane, splits)
                weight = ptx.exp2((split_lse - lse_max) * ptx.LOG2_E)
                total = ptx.add_rn(total, cutlass.select_(is_empty(split_lse), Float32(0.0), weight))
        return lse_max, lanes_sum(total, lanes)

    def scale(self, split_lse: Any, lse_max: Any, factor: Any) -> Any:
        """What a split of this log-sum-exp is multiplied by; negative if it is empty."""
        return cutlass.select_(
            is_empty(split_lse), Float32(-1.0), ptx.exp2((split_lse - lse_max) * ptx.LOG2_E) * factor
        )

    @cute.jit
    def accumulate(self, sums: Any, held: Any, scale: Any) -> None:
        """Add the held splits to the sums; the scale of number i is lane i's."""
        for i in range_constexpr(self.held):
            factor = cute.arch.shuffle_sync(scale, i)
            values = [word.bitcast(Float32) for word in held[i]] if self.fp32_parts else bf16_floats(held[i])
            for c in range_constexpr(self.vectors * self.columns):
                # nothing of an empty split may get into the sum, even 0 times NaN
                sums[c] = cutlass.select_(factor < 0.0, sums[c], ptx.fma_rn(factor, values[c], sums[c]))

    def store(self, target: Any, thread: Any, sums: Any) -> None:
        size = 4 if self.fp32_out else 2
        for v in range(self.vectors):
            values = [sums[v * self.columns + c] for c in range(self.columns)]
            words = [value.bitcast(Int32) for value in values] if self.fp32_out else bf16_words(values)
            at = target + Int64(thread + v * self.threads) * (self.columns * size)
            if len(words) == 2:
                ptx.store_global_64(at, words[0], words[1])
            for i in range(len(words) // 4):
                ptx.store_global_128(at + i * 16, words[4 * i : 4 * i + 4])

    @cute.jit
    def store_quantized(self, quant: QuantOutput, token: Any, head: Any, thread: Any, sums: Any, angles: Any) -> None:
        """Store a head's results as codes. A scale's 128 columns are one vector of each lane of a warp.

        angles   words: cosines and sines of pairs number 2 * (lane % 16) and the one behind it
        """
        lane, warp = thread % 32, thread // 32
        target = quant.codes_at(token, head) + lane * 4
        for v in range_constexpr(self.vectors):
            chunk = v * (self.threads // 32) + warp
            four = bf16_floats(bf16_words([sums[v * 4 + i] for i in range(4)]))
            if const_expr(v == self.vectors - 1):
                # the last one has the rotary columns, in the last warp
                four = turn_two(four, angles, (chunk == HEAD_SCALES - 1) & (lane >= 16))
            byte, codes = codes_of_lanes(four, 32)
            quant.store_scale(byte, token, head, chunk, lane, True)
            ptx.store_global_s32(target + chunk * SCALED, codes[0])


def is_empty(split_lse: Any) -> Any:
    """Whether a log-sum-exp, infinite of either sign, marks a split that attended to nothing."""
    return ptx.abs_f32(split_lse) == INFINITY


# ---- key


@dataclass(frozen=True)
class CombineKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    fp32_parts   whether the splits are fp32; else they are bf16
    fp32_out     the same of the result
    held         splits of which a thread holds its columns at once, a power of two and at most 32
    vectors      16-byte vectors of a split that a thread has
    more         whether there may be more splits than `held`
    warps        of a CTA, a multiple of those of a head
    quantized    whether results are turned back and become e4m3 codes, see quant_output; the splits are fp32 then
    """

    kernel_name: ClassVar[str] = "sparse_mla.combine"
    fp32_parts: bool
    fp32_out: bool
    held: int
    vectors: int
    more: bool = False
    warps: int = 4
    quantized: bool = False

    @property
    def instructions(self) -> tuple[str, ...]:
        if self.quantized:
            return "ld.global.128", "cvt.e4m3"
        return "ld.global.128", "st.global.64" if self.fp32_parts and not self.fp32_out else "st.global.128"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        def values(is_fp32: bool, dimensions: int) -> Any:
            shape = tuple(cute.sym_int() for _ in range(dimensions))
            strides = tuple(cute.sym_int64(divisibility=4 if is_fp32 else 8) for _ in range(dimensions))
            kind = Float32 if is_fp32 else BFloat16
            return make_fake_tensor(kind, (*shape, HEAD_DIM), stride=(*strides, 1), assumed_align=16)

        codes, scales, positions, table = (
            fake_quant() if self.quantized else (values(self.fp32_out, 3), None, None, None)
        )
        fakes = CombineArgs(
            outs=values(self.fp32_parts, 4),
            lses=fake_logs(4),
            sink=Int64(0),
            out=codes,
            scales=scales,
            positions=positions,
            table=table,
            lse=fake_logs(3),
            row_step=Int32(1) if self.quantized else None,
            token_step=Int32(1) if self.quantized else None,
            use_pdl=Boolean(False),
            stream=make_fake_stream(use_tvm_ffi_env_stream=True),
        )
        return entry_point(CombineKernel(self).launch, fakes)


def key_for(arch: str, fp32_parts: bool, fp32_out: bool, splits: int, quantized: bool = False) -> CombineKey:
    """The kernel that combines so many splits of these types."""
    held, vectors = next((shape for shape in SHAPES if splits <= shape[0]), SHAPES[-1])
    if not fp32_parts:  # a vector has twice the columns: a head has at least one warp
        vectors = min(vectors, 2)
    return CombineKey(arch, fp32_parts, fp32_out, held, vectors, splits > held, quantized=quantized)


def deployment_keys(config: ModelConfig, tp: int, arch: str) -> list[CombineKey]:
    """For rows that sparse_mla_decode splits, and for contexts that are distributed: few splits or many."""
    counts = [*(held for held, _ in SHAPES), SHAPES[-1][0] + 1]
    keys = [key_for(arch, True, fp32_out, splits) for fp32_out in (False, True) for splits in counts]
    if arch in QUANTIZED_ARCHS:
        keys += [key_for(arch, True, False, splits, quantized=True) for splits in counts]
    return keys


@cache
def _key(device_index: int, fp32_parts: bool, fp32_out: bool, splits: int, quantized: bool = False) -> CombineKey:
    return key_for(arch_of(device_index), fp32_parts, fp32_out, splits, quantized)


def why_not(call: MergeCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    for name, tensor in (("outs", call.outs), ("out", call.out)):
        multiple = 16 // tensor.element_size()
        strides = [tensor.stride(axis) for axis in range(tensor.dim() - 1) if tensor.shape[axis] > 1]
        if tensor.data_ptr() % 16 or any(stride % multiple for stride in strides):
            return (
                f"heads of {name} must be 16-byte aligned, got address {tensor.data_ptr():#x} and strides "
                f"{tuple(tensor.stride())}"
            )
    if min(call.out.shape[:2]) > MOST_TOKENS:
        return f"b or s_q must be at most {MOST_TOKENS}, got shape {tuple(call.out.shape)}"
    return ""


def launch(call: MergeCall, use_pdl: bool = False) -> None:
    """Run the kernel on the current stream of out's device.

    use_pdl   start while the kernel before on the stream still runs, and wait for it
    """
    outs, lses, attn_sink, out, lse = call
    if out.numel() == 0:
        return
    if out.shape[1] > MOST_TOKENS:  # rows and tokens are the same to the kernel, but for their limits
        outs, lses, out = outs.transpose(1, 2), lses.transpose(1, 3), out.transpose(0, 1)
        lse = None if lse is None else lse.transpose(0, 2)
    key = _key(out.device.index, outs.element_size() == 4, out.element_size() == 4, outs.shape[0])
    sink = 0 if attn_sink is None else attn_sink.data_ptr()
    lse = no_logs(3, out.device.index) if lse is None else lse
    launch_key(key, out.device.index, outs, lses, sink, out, lse, use_pdl)


def launch_quantized(outs: Any, lses: Any, attn_sink: Any, quant: tuple[Any, ...], lse: Any) -> None:
    """As `launch`, as a dependent of the kernel before, of fp32 splits that become codes.

    quant   codes, their scales, positions and the table of cosines and sines: see quant_output
    """
    s_q = outs.shape[2]
    steps = s_q, 1
    if s_q > MOST_TOKENS:
        outs, lses, steps = outs.transpose(1, 2), lses.transpose(1, 3), (1, s_q)
        lse = None if lse is None else lse.transpose(0, 2)
    index = outs.device.index
    key = _key(index, True, False, outs.shape[0], True)
    sink = 0 if attn_sink is None else attn_sink.data_ptr()
    lse = no_logs(3, index) if lse is None else lse
    launch_key(key, index, outs, lses, sink, *quant, lse, *steps, True)


KERNEL = OpKernel(launch, why_not, deployment_keys)
