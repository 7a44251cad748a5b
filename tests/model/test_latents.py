# SPDX-License-Identifier: Apache-2.0
"""The kernel of compress_latent in the model: numbers that name nothing, where chunks go round their rings. No access
is outside, and where the reference says what comes out, state is its bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.compressor.latent import LatentKey
from cute_kernels.runtime import verify
from tests.compile.reports import compile_report
from tests.gpu import promises
from tests.model.launch import divisor, pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.ptx import parse

OP = promises.OPS["compress_latent"]
NAMES = [argument.name for argument in OP.overload._schema.arguments]


def put_result(memory: GlobalMemory, values: np.ndarray) -> int:
    address = memory.reserve(values.nbytes)
    start = address - memory.BASE
    memory.bytes[start : start + values.nbytes] = values.view(np.uint8).ravel()
    return address


@pytest.mark.parametrize("pairs", [False, True])
def test_bad_numbers(pairs: bool) -> None:
    key = LatentKey("sm_90a", 2, pairs=pairs)
    program, examples = parse(compile_report(key).ptx), verify.examples_of(OP)
    assert examples is not None
    example = next(e for e in examples() if "rings of 8" in e.name)
    compared = 0
    for label, args in promises.with_bad_numbers(OP.name, example.args):
        compared += agrees(key, program, label, args)
    assert compared > 2


@pytest.mark.parametrize("requests", [1, 31, 32, 40])
def test_any_number_of_requests(requests: int) -> None:
    """Of up to 31 each lane of a warp knows a beginning ahead."""
    g = torch.Generator().manual_seed(requests)
    rows = torch.randint(1, 4, (requests,), generator=g)
    owners = torch.arange(requests).repeat_interleave(rows)
    starts = torch.cat([rows.new_zeros(1), rows.cumsum(0)])
    first = torch.randint(0, 100, (requests,), generator=g)
    total = len(owners)
    positions = first[owners] + torch.arange(total) - starts[owners]
    given = {
        "kv_score": torch.randn(total, 1024, generator=g),
        "positions": positions,
        "token_to_req_indices": owners.int(),
        "query_start_loc": starts.int(),
        "state_cache": torch.randn(requests, 8, 1024, generator=g),
        "slot_mapping": owners * 8 + positions % 8,
        "norm_weight": torch.randn(512, generator=g).bfloat16(),
        "eps": 1e-20,
        "compress_ratio": 2,
        "out": torch.zeros(total, 512, dtype=torch.bfloat16),
        "use_pdl": False,
    }
    key = LatentKey("sm_90a", 2, pairs=True)
    program = parse(compile_report(key).ptx)
    assert agrees(key, program, f"{requests} requests", tuple(given[name] for name in NAMES))


def agrees(key: LatentKey, program: Any, label: str, args: tuple[Any, ...]) -> bool:
    """Runs a call, and compares it; whether the reference says what comes out."""
    given, memory = dict(zip(NAMES, args, strict=True)), GlobalMemory(1 << 21)
    out, state = given["out"].contiguous().view(torch.int16).numpy(), given["state_cache"].contiguous().numpy()
    rows, requests = given["slot_mapping"].shape[0], given["query_start_loc"].shape[0] - 1
    inputs = [given[name].numpy() for name in ("positions", "slot_mapping", "token_to_req_indices", "query_start_loc")]
    out_at, state_at = put_result(memory, out), put_result(memory, state)
    values = [memory.put(given["kv_score"].contiguous().numpy()), 4 * 1024]
    values += [memory.put(given["norm_weight"].view(torch.int16).numpy()), out_at, 2 * 512, np.float32(given["eps"])]
    values += [rows, *(memory.put(x) for x in inputs), requests, state_at, state[0].nbytes]
    values += [*divisor(state.shape[1]), state.shape[0] * state.shape[1]]
    blocks = -(-rows // (1 + key.pairs))
    run_grid(program, pack(program, values), memory, blocks=blocks, size=key.smem_bytes, seed=1)
    if not promises.is_defined(OP.name, args):
        return False
    want = dict(zip(NAMES, verify.clone_arguments(args, torch.device("cpu")), strict=True))
    OP.reference(*want.values())
    got = memory.get(state_at, state.shape, np.int32)
    assert np.array_equal(got, want["state_cache"].contiguous().numpy().view(np.int32)), label
    steps = memory.get(out_at, out.shape, np.int16) - want["out"].contiguous().view(torch.int16).numpy()
    assert np.abs(steps).max() <= 1, label
    return True
