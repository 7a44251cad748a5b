# SPDX-License-Identifier: Apache-2.0
"""The kernel of build_step_metadata in the model: every byte of what it writes, on the calls of `verify`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.indices import step_metadata
from cute_kernels.indices.call import StepCall
from cute_kernels.indices.step_metadata import LANES, SEGMENT, THREADS, WARPS, StepKey
from cute_kernels.indices.verify_cases import step
from cute_kernels.runtime.registry import all_ops
from cute_kernels.runtime.verify import Example, raw_memory
from tests.compile.reports import compile_report
from tests.model.launch import divisor, pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.ptx import parse

EXAMPLES = {example.name: example for example in step()}


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_byte(name: str) -> None:
    example: Example = EXAMPLES[name]
    call = StepCall(*example.args)
    assert step_metadata.why_not(call) == ""
    program = parse(compile_report(StepKey("sm_90a", 4 if call.window_size % 4 == 0 else 1)).ptx)
    memory = GlobalMemory(1 << 24)
    bases: dict[int, int] = {}
    op = all_ops()["build_step_metadata"]
    for tensor in op.mutated(tuple(call)).values():
        raw = raw_memory(tensor).numpy()
        base = memory.reserve(max(raw.size, 1))
        memory.bytes[base - memory.BASE :][: raw.size] = raw
        bases[tensor.untyped_storage().data_ptr()] = base

    def put(tensor: torch.Tensor | None) -> int:
        """Address of the first element of a tensor, with all the memory behind it; 0 of None."""
        if tensor is None:
            return 0
        storage = tensor.untyped_storage().data_ptr()
        bases[storage] = bases.get(storage) or memory.put(raw_memory(tensor).numpy())
        return bases[storage] + tensor.data_ptr() - storage

    def table(tensor: torch.Tensor | None, rows_per_page: int) -> list[int]:
        if tensor is None:
            return [0] * 5
        return [put(tensor), tensor.stride(0) * 4, call.num_requests, tensor.shape[1], rows_per_page.bit_length() - 1]

    def place(tensor: torch.Tensor | None) -> list[int]:
        return [0, 0] if tensor is None else [put(tensor), tensor.stride(0) * 4]

    layout, buffer, number = call.layout(), put(call.buffer), 0
    upload = put(call.upload)
    seq_lens = put(call.seq_lens) or upload + 4 * (call.num_requests + 1)
    lists = call.c128a_decode_buffer, call.c128a_prefill_buffer
    segments = max(-(-call.c128a_columns // SEGMENT), 1)
    values: list[Any] = [buffer, upload, seq_lens, put(call.min_restart), put(call.key_starts)]
    values += [call.num_requests]
    values += [call.num_tokens, call.num_decodes, call.num_decode_tokens, call.window_size, layout.room]
    values += [call.c128a_columns, *divisor(segments), *place(lists[0]), *place(lists[1])]
    for kind in call.every_kind():
        values.append(0 if kind.swa is None else buffer + layout.kind_offset(number))
        number += kind.swa is not None
        values += table(kind.swa, call.swa_block_size)
        values += table(kind.compressed, call.kv_block_size // kind.ratio) + table(kind.state, kind.state_block_size)
        values.append(kind.topk)
    ctas = [-(-call.num_tokens // THREADS), -(-(call.num_requests + 1) // THREADS), -(-call.num_decode_tokens // WARPS)]
    values += [ctas[0], sum(ctas[:2]), sum(ctas)]
    if lists != (None, None):
        ctas.append(-(-call.num_tokens * segments // WARPS))
    assert WARPS * LANES == THREADS

    run_grid(program, pack(program, values), memory, blocks=sum(ctas), size=0, seed=1)
    assert memory.written.max() == 1
    op.reference(*call)
    for name_of, tensor in op.mutated(tuple(call)).items():
        base = bases[tensor.untyped_storage().data_ptr()]
        want = raw_memory(tensor)
        got = torch.from_numpy(memory.get(base, tuple(want.shape), np.uint8))
        wrong = (got != want).nonzero().flatten()
        assert wrong.numel() == 0, f"{name_of}: byte {int(wrong[0])} of {want.numel()}, room {layout.room}"
