# SPDX-License-Identifier: Apache-2.0
"""Argument checks and costs that the sparse attention ops share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.linear.scales import output_scale_shape
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.contract import lies_apart
from cute_kernels.runtime.ops import Cost, nbytes
from cute_kernels.sparse_mla import schedule
from cute_kernels.sparse_mla.selection import Selection, count_rows

MAX_HEADS = 128
MOST_NUMBERS = 2**30
"""Rows, slots, columns and work tiles are counted in int32, with room for what is added to the last of them."""

PAGED_FORMATS = (formats.FP8_DS_MLA, formats.PLAIN_BF16, *formats.MXFP8_FORMATS)
"""Of the window's cache, or the only one."""

EXTRA_FORMATS = (*PAGED_FORMATS, *formats.NVFP4_FORMATS)
"""Of the compressed cache."""


def check_query(
    c: Checker, argument: str, q: torch.Tensor, dtypes: tuple[torch.dtype, ...], leading: Sequence[str]
) -> None:
    """q [*leading, h, 512] with 1 <= h <= 128."""
    c.tensor(argument, q, dtypes, (*leading, "h", formats.HEAD_DIM))
    c.require(1 <= q.shape[-2] <= MAX_HEADS, argument, f"1 to {MAX_HEADS} heads", f"shape {list(q.shape)}")


def check_cache(c: Checker, argument: str, cache: torch.Tensor, fmt: formats.KVFormat) -> None:
    """A paged cache of the given format with rows in its pages."""
    fmt.check(c, argument, cache)
    c.require(cache.shape[1] >= 1, argument, "at least one row per page", f"shape {list(cache.shape)}")


def check_sink(c: Checker, argument: str, sink: torch.Tensor | None) -> None:
    c.tensor(argument, sink, torch.float32, ("h",), optional=True)


def check_lengths(c: Checker, argument: str, lengths: torch.Tensor | None) -> None:
    """int32 [b] or [b, s_q], or None."""
    by_token = isinstance(lengths, torch.Tensor) and lengths.dim() == 2
    c.tensor(argument, lengths, torch.int32, ("b", "s_q") if by_token else ("b",), optional=True)


def list_tiles(indices: object, extra_k_cache: object, extra_indices: object, extra_block_table: object) -> int:
    """Tiles of the longest row that the widths of a decode call's lists allow.

    The arguments need not be checked: what is not a tensor has no tiles.
    """
    widths = [
        x.shape[-1] if isinstance(x, torch.Tensor) and x.dim() else 0
        for x in (indices, extra_indices, extra_block_table)
    ]
    if widths[2]:
        widths[2] *= (
            extra_k_cache.shape[1] if isinstance(extra_k_cache, torch.Tensor) and extra_k_cache.dim() > 1 else 0
        )
    return sum(schedule.num_tiles(width) for width in widths)


def check_absent(c: Checker, reason: str, **arguments: object) -> None:
    """Every given argument must be None."""
    for argument, value in arguments.items():
        c.require(value is None, argument, f"None {reason}", "a tensor")


def check_partial(c: Checker, out: torch.Tensor, attn_sink: torch.Tensor | None) -> None:
    """fp32 output is a partial result: the sink must be left to the merge that makes the whole."""
    if out.dtype == torch.float32:
        c.require(attn_sink is None, "attn_sink", "None with an fp32 out (a partial result)", "a tensor")


def check_logs(c: Checker, argument: str, logs: torch.Tensor | None, shape: Sequence[str]) -> None:
    """fp32 numbers of heads, or None: any strides that give each number an address of its own."""
    c.tensor(argument, logs, torch.float32, shape, optional=True, dense_last=False)
    if logs is not None and not lies_apart(logs):
        strides = f"strides {tuple(logs.stride())} of shape {list(logs.shape)}"
        c.fail(argument, "a tensor whose elements lie apart", strides)


def check_quantized(
    c: Checker,
    q: torch.Tensor,
    out: torch.Tensor,
    positions: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
    out_scale: torch.Tensor | None,
) -> bool:
    """Whether a call has output_quant. If so, out and what comes with it fit `fused_inv_rope_fp8_quant`."""
    quant = {"positions": positions, "cos_sin_cache": cos_sin_cache, "out_scale": out_scale}
    given = [name for name, value in quant.items() if value is not None]
    if not given:
        return False
    for name in quant:
        c.require(name in given, name, f"a tensor with {given[0]}", "None")
    *rows, heads, _ = q.shape
    tokens = math.prod(rows)
    c.tensor("positions", positions, torch.int64, (tokens,), dense_last=False)
    c.tensor("cos_sin_cache", cos_sin_cache, torch.float32, (None, formats.ROPE_DIM))
    assert cos_sin_cache is not None
    c.require(cos_sin_cache.shape[0] > 0, "cos_sin_cache", "at least one row", list(cos_sin_cache.shape))
    c.tensor("out", out, torch.float8_e4m3fn, (tokens, None, None))
    groups, width = out.shape[1:]
    is_whole = width % formats.HEAD_DIM == 0 and groups * width == heads * formats.HEAD_DIM
    expected = f"[{tokens}, groups, heads of a group * {formats.HEAD_DIM}] of {heads} heads"
    c.require(is_whole, "out", expected, f"shape {list(out.shape)}")
    c.tensor("out_scale", out_scale, torch.float32, output_scale_shape(tokens, groups, width // formats.HEAD_DIM))
    return True


HEAD_BLOCKS = formats.HEAD_DIM // 128
"""Blocks of a head whose squares are added up."""


def check_q_norm(
    c: Checker, q: torch.Tensor, squares: torch.Tensor | None, eps: float, positions: torch.Tensor | None
) -> None:
    """Sums of squares of each query row's heads, and eps; they come with output_quant, whose angles they need."""
    if squares is None:
        return
    *rows, heads, _ = q.shape
    c.require(positions is not None, "q_norm", "None without output_quant", "a tensor and a number")
    c.tensor("q_norm", squares, torch.float32, (math.prod(rows), heads * HEAD_BLOCKS))
    c.require(eps >= 0, "q_norm", "an eps >= 0", eps)


def norm_arguments(q_norm: Any, op: str) -> tuple[Any, float]:
    """The elements of q_norm, or what stands for None."""
    if q_norm is None:
        return None, 0.0
    if not isinstance(q_norm, tuple) or len(q_norm) != 2:
        Checker(op).fail("q_norm", "(squares, eps)", type(q_norm).__name__, TypeError)
    squares, eps = q_norm
    return squares, eps


def misaligned(name: str, tensor: torch.Tensor, axes: tuple[int, ...]) -> str:
    """Why a tensor's address or its strides along those axes cannot be taken, or nothing."""
    strides = [tensor.stride(axis) * tensor.element_size() for axis in axes if tensor.shape[axis] > 1]
    if tensor.numel() and (tensor.data_ptr() % 16 or any(stride % 16 for stride in strides)):
        return (
            f"{name} must be 16-byte aligned, got address {tensor.data_ptr():#x} and strides {tuple(tensor.stride())}"
        )
    return ""


def misaligned_quant(out: torch.Tensor, cos_sin_cache: torch.Tensor | None) -> str:
    """Why kernels cannot store codes where they belong, or read angles, or nothing."""
    assert cos_sin_cache is not None
    why = misaligned("rows of out", out, (0, 1)) or misaligned("rows of cos_sin_cache", cos_sin_cache, (0,))
    if not why and cos_sin_cache.shape[0] >= 2**31:
        return "cos_sin_cache must have fewer than 2^31 rows"
    return why


def quant_tensors(output_quant: Any, op: str) -> tuple[Any, Any, Any]:
    """The elements of output_quant, or three times None."""
    if output_quant is None:
        return None, None, None
    if not isinstance(output_quant, tuple) or len(output_quant) != 3:
        got = type(output_quant).__name__
        Checker(op).fail("output_quant", "(positions, cos_sin_cache, out_scale)", got, TypeError)
    positions, cos_sin_cache, out_scale = output_quant
    return positions, cos_sin_cache, out_scale


def check_splits(c: Checker, num_splits: int, split_tokens: int) -> None:
    """How many splits a row is cut into, or their size; at most one of the two is not 0."""
    c.require(num_splits >= 0, "num_splits", "a number >= 0", num_splits)
    tile = schedule.TILE
    c.require(
        split_tokens >= 0 and split_tokens % tile == 0, "split_tokens", f"0 or a multiple of {tile}", split_tokens
    )
    c.require(num_splits == 0 or split_tokens == 0, "split_tokens", f"0 with num_splits = {num_splits}", split_tokens)


def check_batch(c: Checker, argument: str, starts: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """starts int32 [R + 1] and seq_lens int32 [R]."""
    c.tensor("seq_lens", seq_lens, torch.int32, ("R",))
    c.tensor(argument, starts, torch.int32, (None,))
    c.require(
        starts.shape[0] == seq_lens.shape[0] + 1, argument, f"R + 1 = {seq_lens.shape[0] + 1} elements", starts.shape[0]
    )


@cache
def no_logs(axes: int, device_index: int) -> torch.Tensor:
    """What stands for log-sum-exps, or largest logits, that nobody asks a kernel for: fp32 without elements."""
    return torch.empty((0,) * axes, dtype=torch.float32, device=torch.device("cuda", device_index))


def as_floats(workspace: torch.Tensor, size: int) -> torch.Tensor:
    """A workspace, of which `size` bytes are used, as fp32."""
    return workspace if workspace.dtype == torch.float32 else workspace[:size].view(torch.float32)


def attention_cost(q: torch.Tensor, out: torch.Tensor, selections: Sequence[Selection]) -> Cost:
    """Attended cache rows must move once, and q and out; each row that a query row attends to costs two products of 512
    per head."""
    heads = q.shape[-2]
    num_rows = q.numel() // (heads * formats.HEAD_DIM)
    counts = [count_rows(s, num_rows) for s in selections]
    moved = sum(different * s.row_bytes for (_, different), s in zip(counts, selections, strict=True))
    pairs = sum(pairs for pairs, _ in counts)
    return Cost(bytes=moved + nbytes(q, out), flops=2 * heads * pairs * 2 * formats.HEAD_DIM)
