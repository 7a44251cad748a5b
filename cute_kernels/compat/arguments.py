# SPDX-License-Identifier: Apache-2.0
"""What the compatibility modules share: refusing what is not supported, naming record formats, integers of both widths.

The ops take indices, lengths and block tables as int32, slots and positions as int64; engines have them in either
width. What has the other one is converted by a launch or two into new memory, which under a CUDA graph's capture is the
graph's own: no wait, and the kernels are the same.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.runtime.checks import Checker

INT32_MAX = torch.iinfo(torch.int32).max

MXFP4_FORMATS = {fmt.row_elements: fmt.id for fmt in (formats.INDEXER_MXFP4, formats.INDEXER_MXFP4_WIDE)}


def accept_only(op: str, supported: Any, **arguments: Any) -> None:
    """Raise NotImplementedError unless every argument has the one value that the ops behind `op` know."""
    for name, value in arguments.items():
        if value is supported or (not isinstance(value, torch.Tensor) and value == supported):
            continue
        got = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
        Checker(op).fail(name, f"{supported!r}, the only value supported", got, NotImplementedError)


def required(op: str, argument: str, value: torch.Tensor | None) -> torch.Tensor:
    """An int32 or int64 tensor of any strides that another project lets default to None, but that the op behind `op`
    cannot do without; as `as_int32` gives it."""
    Checker(op).tensor(argument, value, (torch.int32, torch.int64), dense_last=False)
    return as_int32(value)


def as_int32(value: Any) -> Any:
    """int32 or int64 numbers as int32, dense in the last dimension; anything else as it is, for the op to check.

    Numbers that int32 has not stay what they mean as an index or a length: those below are -1, those above the largest.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype == torch.int64:
        return value.clamp(-1, INT32_MAX).to(torch.int32, memory_format=torch.contiguous_format)
    return dense_last(value) if value.dtype == torch.int32 else value


def as_int64(value: Any) -> Any:
    """int32 or int64 numbers as int64, dense in the last dimension; anything else as it is, for the op to check."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype == torch.int32:
        return value.to(torch.int64, memory_format=torch.contiguous_format)
    return dense_last(value) if value.dtype == torch.int64 else value


def needs_int64(*values: Any) -> bool:
    """Whether `as_int64` makes new memory of any. Inserts read slots and positions ahead of their dependency: right
    behind the launch that writes them they must not start early."""
    return any(
        value.dtype == torch.int32 or (value.dim() > 0 and value.shape[-1] > 1 and value.stride(-1) != 1)
        for value in values
        if isinstance(value, torch.Tensor)
    )


def dense_last(value: torch.Tensor) -> torch.Tensor:
    """A tensor whose last dimension is dense: this one, or a copy."""
    return value if value.dim() == 0 or value.stride(-1) == 1 or value.shape[-1] <= 1 else value.contiguous()


def slots_of(rows: Any, slot_mapping: Any) -> Any:
    """The slots of `rows` as int64: an engine's buffer may be longer, and those behind belong to no row of the call."""
    slots = as_int64(slot_mapping)
    if isinstance(slots, torch.Tensor) and slots.dim() == 1 and isinstance(rows, torch.Tensor) and rows.dim():
        return slots[: rows.shape[0]]
    return slots


def key_scales(codes: Any, scales: Any) -> tuple[Any, Any]:
    """Indexer keys and their scales as an engine may gather them, in the dtypes of the logits ops: no copy if dense.

    Scales as bytes [N, 4] or as a column [N, 1] become [N]; FP8 codes as bytes become e4m3.
    """
    is_fp8 = isinstance(codes, torch.Tensor) and codes.dim() == 2 and codes.shape[-1] == formats.INDEX_DIM
    if is_fp8 and codes.dtype in (torch.uint8, torch.int8):
        codes = codes.view(torch.float8_e4m3fn)
    if isinstance(scales, torch.Tensor) and scales.dim() == 2:
        if scales.dtype in (torch.uint8, torch.int8) and scales.shape[1] == 4:
            scales = scales.contiguous().view(torch.float32 if is_fp8 else torch.int32)
        if scales.shape[1] == 1:
            scales = scales.squeeze(1)
            scales = dense_last(scales)
    return codes, scales


def indexer_format(kv_cache: torch.Tensor, mxfp4: bool) -> str:
    """Record format id of an indexer cache: whether it is MXFP4 the caller says, how wide its rows are the tensor."""
    return MXFP4_FORMATS.get(kv_cache.shape[-1], formats.INDEXER_MXFP4.id) if mxfp4 else formats.INDEXER_FP8.id


def query_codes(op: str, q: Any) -> Any:
    """The pair (codes, scales or None) of DeepGEMM as `q` of the logits ops: FP8 codes alone, or an MXFP4 pair."""
    c = Checker(op)
    if not isinstance(q, (tuple, list)) or len(q) != 2:
        c.fail("q", "a pair (codes, scales or None)", type(q).__name__, TypeError)
    codes, scales = q
    c.tensor("q[0]", codes, (torch.float8_e4m3fn, torch.uint8, torch.int8), dense_last=False)
    if scales is None:
        return codes
    if codes.dtype == torch.float8_e4m3fn:
        c.fail("q[1]", "None: the scale of FP8 codes belongs into weights", "a tensor", NotImplementedError)
    return codes, scales
