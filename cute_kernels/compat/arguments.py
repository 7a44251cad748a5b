# SPDX-License-Identifier: Apache-2.0
"""What the compatibility modules share: refusing what is not supported, naming record formats."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.runtime.checks import Checker

MXFP4_FORMATS = {fmt.row_elements: fmt.id for fmt in (formats.INDEXER_MXFP4, formats.INDEXER_MXFP4_WIDE)}


def accept_only(op: str, supported: Any, **arguments: Any) -> None:
    """Raise NotImplementedError unless every argument has the one value that the ops behind `op` know."""
    for name, value in arguments.items():
        if value is supported or (not isinstance(value, torch.Tensor) and value == supported):
            continue
        got = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
        Checker(op).fail(name, f"{supported!r}, the only value supported", got, NotImplementedError)


def required(op: str, argument: str, value: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """An argument that another project lets default to None, but that the op behind `op` cannot do without."""
    Checker(op).tensor(argument, value, dtype, dense_last=False)
    assert value is not None
    return value


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
