# SPDX-License-Identifier: Apache-2.0
"""Kernel of the RMS norms: of fused_q_kv_rmsnorm (Q_KV), fused_mtp_input_rmsnorm (MTP_INPUT) and
mtp_shared_head_rmsnorm (SHARED_HEAD).

A call norms one matrix, or two of different widths and weights in different CTAs. The rows of the second may come in
streams, several for each token. One warp, or all warps of a CTA, take a row of `width` columns:

    vectors of 16 bytes, dealt to the lanes of its warps in turn
    lane l of w warps    columns 8 * l .. + 7, 8 * (l + 32 * w) .. + 7, ...

A row is read once and stays in registers: its squares are summed lane by lane, then by shuffles, then over the CTA's
warps in shared memory. Who sums what follows from the widths alone, so a row's bits do not depend on its batch.

Of few tokens, a CTA takes a row that else a warp would take (`spread`): a lane has one vector, and lanes' squares are
added in the order in which one warp has them, so that the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import convert, ptx
from cute_kernels.dsl.reduce import lanes_sum, square_sum
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import HEAD_DIM
from cute_kernels.models import ModelConfig, latent_ratios
from cute_kernels.norm.call import MtpInputCall, QKvCall, SharedHeadCall
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel

# ---- config

VECTOR = 8
"""bf16 columns that a lane loads at once."""

WARP_COLUMNS = 2048
"""Widest row that one warp takes alone: sums need no shared memory, and a CTA takes several rows."""

CTA_WARP_COLUMNS = 1024
"""Columns for each warp of a CTA that takes one row."""

WARPS = 4
"""Of a CTA whose warps take a row each."""

MOST_WARPS = 16
"""Of a CTA. With more of them a lane's part of a row and its fp32 weights would not fit into registers."""

FEW_TOKENS = 512
"""Tokens of q and kv up to which a CTA takes a row.

On an H200, q_lora_rank 1536: 1.07 instead of 1.14 µs for one token, 1.95 instead of 2.04 for 376, 2.18 instead of 2.27
for 472, 3.66 instead of 3.29 for 1024 (perf/results/h200/fused_q_kv_rmsnorm.json).
"""

MOST_COLUMNS = MOST_WARPS * CTA_WARP_COLUMNS
"""Of a row."""


def warps_for(width: int) -> int:
    """Of a row."""
    return 1 if width <= WARP_COLUMNS else -(-width // CTA_WARP_COLUMNS)


# ---- a row


class Row:
    """How lanes hold a row, and what they do with it.

    warps       of a row
    rows        of a CTA
    vectors     of a lane; the last one may lie beyond the row's end
    positions   "int64" or "int32": rows at position 0 come out as zeros, and positions are of that type; "": none do
    spread      all warps of a CTA take a row together, however narrow it is
    """

    def __init__(
        self,
        width: int,
        is_fp32_weight: bool,
        cta_warps: int,
        has_dependency: bool,
        positions: str = "",
        spread: bool = False,
    ) -> None:
        self.width = width
        self.is_fp32_weight = is_fp32_weight
        self.has_dependency = has_dependency
        self.positions = positions
        self.spread = spread
        self.warps = 1 if warps_for(width) == 1 and not spread else cta_warps
        self.rows = cta_warps // self.warps
        self.vectors = -(-width // (self.step * VECTOR))

    @cute.jit
    def norm(
        self,
        cta: Any,
        tokens: Any,
        eps: Any,
        x: Any,
        x_token: Any,
        weight: Any,
        out: Any,
        out_token: Any,
        positions: Any,
    ) -> None:
        """Norm the rows of one CTA. Strides are in bytes."""
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        lane = thread % (self.warps * 32)
        if const_expr(self.rows == 1):
            token = cta
        else:
            token = cta * self.rows + warp // self.warps
        # rows past the end load the last row again, and store nothing
        source = Int64(cutlass.min(token, tokens - 1))
        # constant, so they may be asked for ahead of the kernels before
        factors = self.load_weight(weight, lane)
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()
        words = self.load(x + source * x_token, lane)
        is_zero = self.is_first_position(positions, source)
        # the next kernel's CTAs start once all loads of this one are under way, and do not compete with them
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_launch_dependents()
        # a branch keeps the loads together: the assembler would begin to sum before the last is asked for
        if token < tokens:
            mine = self.squares(words, lane)
            if const_expr(self.spread):
                mine = self.warp_order_sum(
                    mine, lane, SmemAllocator().allocate_tensor(Float32, cute.make_layout(32 * self.warps))
                )
            total = lanes_sum(mine)
            if const_expr(self.warps > 1 and not self.spread):
                total = self.cta_sum(total, warp)
            scale = ptx.rsqrt(ptx.fma_rn(total, Float32(1.0 / self.width), eps))
            self.store(out + Int64(token) * out_token, lane, words, factors, scale, is_zero)

    def is_first_position(self, positions: Any, token: Any) -> Any:
        """Whether the token is at position 0; None if there are no positions."""
        if self.positions == "":
            return None
        if self.positions == "int64":
            return ptx.load_global_s64_in_order(positions + token * 8) == 0
        return ptx.load_global_s32_in_order(positions + token * 4) == 0

    @cute.jit
    def cta_sum(self, total: Any, warp: Any) -> Any:
        """Sum over the CTA's warps of a number that all lanes of a warp have, in every thread."""
        sums = SmemAllocator().allocate_tensor(Float32, cute.make_layout(self.warps))
        sums[warp] = total
        cute.arch.sync_threads()
        total = sums[0]
        for i in range_constexpr(1, self.warps):
            total = ptx.add_rn(total, sums[i])
        return total

    @cute.jit
    def warp_order_sum(self, mine: Any, lane: Any, staged: Any) -> Any:
        """Of a row that a CTA takes, in each warp: lanes' sums of squares as one warp that takes it has them. `staged`
        is shared memory of a float a thread. All threads must call."""
        staged[lane] = mine
        cute.arch.sync_threads()
        mine = staged[lane % 32]
        for i in range_constexpr(1, -(-self.width // (32 * VECTOR))):
            mine = ptx.add_rn(mine, staged[i * 32 + lane % 32])
        return mine

    @property
    def step(self) -> int:
        """Vectors from one of a lane's to its next."""
        return self.warps * 32

    def is_inside(self, lane: Any, i: int) -> Any:
        """Whether a lane's vector i is part of the row; None if it is whatever the lane."""
        if (i + 1) * self.step * VECTOR <= self.width:
            return None
        return lane < self.width // VECTOR - i * self.step

    def load(self, start: Any, lane: Any) -> list[Any]:
        """A lane's vectors, as four words each. Beyond the end it gets the row's first one.

        They go through L1 although nobody reads them again: on an H200, loads that leave it out made a call that writes
        as much as it reads 5% slower (hidden 4096, T = 8192: 180 µs instead of 171).
        """
        return [ptx.load_global_128_cached_in_order(start + self._offset(lane, i) * 16) for i in range(self.vectors)]

    def load_weight(self, start: Any, lane: Any) -> list[Any]:
        """The weights of a lane's columns, as four words for each vector, or eight if they are fp32."""
        loaded: list[Any] = []
        for i in range(self.vectors):
            if self.is_fp32_weight:
                at = start + self._offset(lane, i) * 32
                loaded.append((*ptx.load_global_128_cached_in_order(at), *ptx.load_global_128_cached_in_order(at + 16)))
            else:
                loaded.append(ptx.load_global_128_cached_in_order(start + self._offset(lane, i) * 16))
        return loaded

    def _offset(self, lane: Any, i: int) -> Any:
        inside = self.is_inside(lane, i)
        vector = lane + i * self.step
        return Int64(vector if inside is None else cutlass.select_(inside, vector, Int32(0)))

    def squares(self, words: list[Any], lane: Any) -> Any:
        """Sum of the squares of a lane's columns."""
        total = Float32(0.0)
        for i, vector in enumerate(words):
            partial = square_sum(convert.bf16_floats(vector))
            inside = self.is_inside(lane, i)
            total = ptx.add_rn(total, partial if inside is None else cutlass.select_(inside, partial, Float32(0.0)))
        return total

    def store(self, start: Any, lane: Any, words: list[Any], factors: list[Any], scale: Any, is_zero: Any) -> None:
        """Multiply a lane's columns, round them once and store them."""
        for i, vector in enumerate(words):
            rounded = self.normed(vector, factors[i], scale)
            if is_zero is not None:
                rounded = [cutlass.select_(is_zero, Int32(0), pair) for pair in rounded]
            ptx.store_global_128(start + Int64(lane + i * self.step) * 16, rounded, self.is_inside(lane, i))

    def normed(self, vector: Any, factors: Any, scale: Any) -> list[Any]:
        """A vector times its row's scale and its weights, rounded once: four words."""
        if self.is_fp32_weight:
            weights = [word.bitcast(Float32) for word in factors]
        else:
            weights = convert.bf16_floats(factors)
        pairs = zip(convert.bf16_floats(vector), weights, strict=True)
        return convert.bf16_words([ptx.mul_rn(ptx.mul_rn(value, scale), weight) for value, weight in pairs])


# ---- kernel


class RmsNormKernel:
    """Entry point: (rows, weight, out, second rows, second weight, second out, positions, eps, whether to launch as a
    dependent of the kernel before, stream). What the key does not have is None."""

    def __init__(self, key: RmsNormKey) -> None:
        has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        self.warps = key.warps
        self.first = Row(key.width, key.fp32_weight, key.warps, has_dependency, key.positions, key.spread)
        self.second: Any = None
        if key.second_width:
            self.second = Row(key.second_width, key.second_fp32_weight, key.warps, has_dependency, spread=key.spread)
        self.positions = key.positions
        self.has_dependency = has_dependency
        rows = [row for row in (self.first, self.second) if row is not None]
        kinds = [f"{row.width}_{'fp32' if row.is_fp32_weight else 'bf16'}" for row in rows]
        more = [key.positions] * bool(key.positions) + ["spread"] * key.spread
        self.name = "_".join(["rms_norm", *kinds, *more])

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        out: cute.Tensor,
        second_x: cute.Tensor | None,
        second_weight: cute.Tensor | None,
        second_out: cute.Tensor | None,
        positions: cute.Tensor | None,
        eps: Float32,
        use_pdl: Boolean,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        tokens = length(x, 0)
        zero = Int64(0)
        first = (address(x), stride_bytes(x, 0), address(weight), address(out), stride_bytes(out, 0))
        second, streams, rows = (zero,) * 7, Int32(0), self.first.rows
        if const_expr(self.second is not None):
            streams, rows = Int32(1), min(self.first.rows, self.second.rows)
            stride, out_stride = zero, zero
            if const_expr(self.positions != ""):
                streams = length(second_x, 1)
                stride, out_stride = stride_bytes(second_x, 1), stride_bytes(second_out, 1)
            second = (
                address(second_x),
                stride_bytes(second_x, 0),
                stride,
                address(second_weight),
                address(second_out),
                stride_bytes(second_out, 0),
                out_stride,
            )
        where = address(positions) if const_expr(self.positions != "") else zero
        parts = 1 + streams
        kernel = self.kernel(*first, *second, where, tokens, cute.fast_divmod_create_divisor_v2(parts), eps)
        kernel.launch(
            grid=[cute.ceil_div(tokens, rows) * parts, 1, 1],
            block=[self.warps * 32, 1, 1],
            stream=stream,
            use_pdl=use_pdl if const_expr(self.has_dependency) else False,
        )

    @cute.kernel
    def kernel(
        self,
        x: Int64,
        x_token: Int64,
        weight: Int64,
        out: Int64,
        out_token: Int64,
        second_x: Int64,
        second_x_token: Int64,
        second_x_stream: Int64,
        second_weight: Int64,
        second_out: Int64,
        second_out_token: Int64,
        second_out_stream: Int64,
        positions: Int64,
        tokens: Int32,
        parts: cute.FastDivmodDivisorV2,
        eps: Float32,
    ) -> None:
        cta, _, _ = cute.arch.block_idx()
        if const_expr(self.second is None):
            self.first.norm(cta, tokens, eps, x, x_token, weight, out, out_token, positions)
        else:
            # neighbours in the grid take the matrices' rows of the same tokens: the streams of a token are neighbours
            # in memory, and one stream after the other was 3% slower (hidden 7168, T = 8192: 290 µs instead of 281)
            cta, part = divmod(cta, parts) if const_expr(self.positions != "") else (cta >> 1, cta & 1)
            if part == 0:
                self.first.norm(cta, tokens, eps, x, x_token, weight, out, out_token, positions)
            else:
                stream = Int64(part - 1)
                source = second_x + stream * second_x_stream
                target = second_out + stream * second_out_stream
                self.second.norm(
                    cta, tokens, eps, source, second_x_token, second_weight, target, second_out_token, positions
                )


# ---- key


@dataclass(frozen=True)
class RmsNormKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    width            columns of the first matrix, a multiple of 8
    fp32_weight      whether its weight is fp32; else it is bf16
    second_width     columns of the second matrix; 0: there is none
    second_fp32_weight
                     the same of its weight
    positions        "int64" or "int32": tokens have positions of that type, rows of the first matrix at position 0 come
                     out as zeros, and a token has any number of rows (streams) of the second one; "": they have none,
                     and one row of the second matrix
    spread           whether a CTA takes each row, although a warp could
    """

    kernel_name: ClassVar[str] = "norm.rms"
    tuning: ClassVar[tuple[str, ...]] = ("spread",)
    width: int
    fp32_weight: bool
    second_width: int = 0
    second_fp32_weight: bool = False
    positions: str = ""
    spread: bool = False

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.width, self.second_width) if self.second_width else (self.width,)

    @property
    def warps(self) -> int:
        """Of a CTA."""
        if self.spread:
            return -(-max(self.widths) // (32 * VECTOR))
        needed = max(warps_for(width) for width in self.widths)
        return WARPS if needed == 1 else needed

    @property
    def smem_bytes(self) -> int:
        if self.spread:
            return 4 * 32 * self.warps * len(self.widths)
        return sum(4 * self.warps for width in self.widths if warps_for(width) > 1)

    @property
    def instructions(self) -> tuple[str, ...]:
        return "ld.global.128", "st.global.128"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        def matrix(width: int, streams: bool = False) -> Any:
            outer = 2 if streams else 1
            shape: list[Any] = [cute.sym_int() for _ in range(outer)]
            strides: list[Any] = [cute.sym_int64(divisibility=VECTOR) for _ in range(outer)]
            return make_fake_tensor(BFloat16, (*shape, width), stride=(*strides, 1), assumed_align=16)

        def weight(width: int, is_fp32: bool) -> Any:
            return make_fake_tensor(Float32 if is_fp32 else BFloat16, (width,), stride=(1,), assumed_align=16)

        first = (matrix(self.width), weight(self.width, self.fp32_weight), matrix(self.width))
        second: tuple[Any, ...] = (None, None, None)
        if self.second_width:
            streams, width = bool(self.positions), self.second_width
            second = matrix(width, streams), weight(width, self.second_fp32_weight), matrix(width, streams)
        positions = None
        if self.positions:
            positions = make_fake_tensor(
                {"int64": Int64, "int32": Int32}[self.positions], (cute.sym_int(),), stride=(1,)
            )
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return RmsNormKernel(self), (*first, *second, positions, Float32(0), Boolean(False), stream)


@cache
def _key(
    device_index: int,
    width: int,
    is_fp32: bool,
    second_width: int = 0,
    second_is_fp32: bool = False,
    positions: str = "",
    spread: bool = False,
) -> RmsNormKey:
    return RmsNormKey(arch_of(device_index), width, is_fp32, second_width, second_is_fp32, positions, spread)


# ---- launch


def why_not_matrix(name: str, x: Any, weight: Any, out: Any) -> str:
    """Why the kernel cannot norm these rows, 16 bytes at a time; empty if it can."""
    width = x.shape[-1]
    if width == 0:
        return f"rows of {name} must have columns, got none"
    if width % VECTOR or warps_for(width) > MOST_WARPS:
        return f"rows of {name} must have a multiple of {VECTOR} columns, and at most {MOST_COLUMNS}, got {width}"
    for what, tensor in ((name, x), (f"the weight of {name}", weight), (f"the result of {name}", out)):
        strides = [tensor.stride(axis) for axis in range(tensor.dim() - 1) if tensor.shape[axis] > 1]
        if tensor.data_ptr() % 16 or any(stride % VECTOR for stride in strides):
            return (
                f"rows of {what} must be 16-byte aligned, got address {tensor.data_ptr():#x} and strides "
                f"{tuple(tensor.stride())}"
            )
    return ""


def is_spread(tokens: int, *widths: int) -> bool:
    """Whether CTAs take the rows of a call. A row that no warp can take alone has a CTA anyway."""
    return tokens <= FEW_TOKENS and max(widths) <= WARP_COLUMNS


def q_kv_keys(config: ModelConfig, tp: int, arch: str) -> list[RmsNormKey]:
    """Every layer norms its latent query and its KV vector; checkpoints have bf16 weights."""
    several = dict.fromkeys(is_spread(tokens, config.q_lora_rank, HEAD_DIM) for tokens in (1, FEW_TOKENS + 1))
    return [RmsNormKey(arch, config.q_lora_rank, False, HEAD_DIM, False, spread=spread) for spread in several]


def why_not_q_kv(call: QKvCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    for name, x, weight, out in (
        ("qr", call.qr, call.q_weight, call.qr_out),
        ("kv", call.kv, call.kv_weight, call.kv_out),
    ):
        why = why_not_matrix(name, x, weight, out)
        if why:
            return why
    return ""


def launch_q_kv(call: QKvCall) -> None:
    """Run the kernel on the current stream of qr's device."""
    if call.qr.shape[0] == 0:
        return
    device_index = call.qr.device.index
    is_fp32, kv_is_fp32 = call.q_weight.element_size() == 4, call.kv_weight.element_size() == 4
    tokens, width = call.qr.shape
    kv_width = call.kv.shape[1]
    launch_key(
        _key(device_index, width, is_fp32, kv_width, kv_is_fp32, spread=is_spread(tokens, width, kv_width)),
        device_index,
        call.qr,
        call.q_weight,
        call.qr_out,
        call.kv,
        call.kv_weight,
        call.kv_out,
        None,
        call.eps,
        call.use_pdl,
    )


Q_KV = OpKernel(launch_q_kv, why_not_q_kv, q_kv_keys)


def mtp_input_keys(config: ModelConfig, tp: int, arch: str) -> list[RmsNormKey]:
    """The layer of multi-token prediction; checkpoints have bf16 weights, positions are int64."""
    return [RmsNormKey(arch, config.hidden_size, False, config.hidden_size, False, "int64")]


def why_not_mtp_input(call: MtpInputCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    rows = call.inputs_embeds.shape[0] * (call.hc_mult + 1)
    if rows >= 2**31:
        return f"there must be fewer than 2^31 rows, embeddings and streams, got {rows}"
    why = why_not_matrix("inputs_embeds", call.inputs_embeds, call.enorm_weight, call.enorm_out)
    if why:
        return why
    return why_not_matrix("previous_hidden_states", call.previous_hidden_states, call.hnorm_weight, call.hnorm_out)


def launch_mtp_input(call: MtpInputCall) -> None:
    """Run the kernel on the current stream of the tensors' device. Arguments in the schema's order, checked and
    supported."""
    if call.inputs_embeds.shape[0] == 0:
        return
    device_index = call.inputs_embeds.device.index
    is_fp32 = call.enorm_weight.element_size() == 4, call.hnorm_weight.element_size() == 4
    width = call.inputs_embeds.shape[1]
    kind = "int64" if call.positions.element_size() == 8 else "int32"
    launch_key(
        _key(device_index, width, is_fp32[0], width, is_fp32[1], kind),
        device_index,
        call.inputs_embeds,
        call.enorm_weight,
        call.enorm_out,
        call.previous_hidden_states,
        call.hnorm_weight,
        call.hnorm_out,
        call.positions,
        call.eps,
        call.use_pdl,
    )


MTP_INPUT = OpKernel(launch_mtp_input, why_not_mtp_input, mtp_input_keys)


def shared_head_keys(config: ModelConfig, tp: int, arch: str) -> list[RmsNormKey]:
    """The layer of multi-token prediction, or V4.1's draft, which norms its context and KV vectors of it; checkpoints
    have bf16 weights."""
    widths = (config.hidden_size, *((HEAD_DIM,) if latent_ratios(config) else ()))
    return [RmsNormKey(arch, width, False) for width in widths]


def why_not_shared_head(call: SharedHeadCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    return why_not_matrix("hidden_states", call.hidden_states, call.weight, call.out)


def launch_shared_head(call: SharedHeadCall) -> None:
    """Run the kernel on the current stream of the tensors' device. Arguments in the schema's order, checked and
    supported."""
    if call.hidden_states.shape[0] == 0:
        return
    device_index = call.hidden_states.device.index
    key = _key(device_index, call.hidden_states.shape[1], call.weight.element_size() == 4)
    launch_key(
        key, device_index, call.hidden_states, call.weight, call.out, None, None, None, None, call.eps, call.use_pdl
    )


SHARED_HEAD = OpKernel(launch_shared_head, why_not_shared_head, shared_head_keys)
