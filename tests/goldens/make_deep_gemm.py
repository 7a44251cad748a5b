# SPDX-License-Identifier: Apache-2.0
"""Makes the cases of DeepGEMM's casts and scores as its utilities and tests define them, in torch on a CPU.

python -m tests.goldens.make_deep_gemm CHECKOUT    # of github.com/deepseek-ai/DeepGEMM
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests import helpers
from tests.goldens import records

DIM = 128


class OnCpu(TorchFunctionMode):
    """What is asked for on a GPU is made on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **{k: "cpu" if k == "device" else v for k, v in (kwargs or {}).items()})


class Nothing(ModuleType):
    """A module with every name, for what needs a GPU to be imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def load(checkout: Path, name: str) -> Any:
    specification = importlib.util.spec_from_file_location(Path(name).stem, checkout / name)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def quantized(math: Any, x: torch.Tensor, kind: str) -> tuple[Any, torch.Tensor]:
    """(codes and scales of rows [..., 128], the values that they stand for)."""
    flat = x.reshape(-1, DIM)
    if kind == "queries":  # FP8 without a scale, which the weights hold
        codes = x.to(torch.float8_e4m3fn)
        return codes, codes.float()
    if kind == "fp8":
        codes, scales = math.per_custom_dims_cast_to_fp8(flat, (0,), False)
        return (codes, scales), codes.float() * scales[:, None]
    codes, scales = math.per_token_cast_to_fp4(flat, use_ue8m0=True, gran_k=32, use_packed_ue8m0=True)
    values = math.cast_back_from_fp4(codes, scales, gran_k=32, use_packed_ue8m0=True).view(x.shape)
    return (codes.view(*x.shape[:-1], DIM // 2), scales.view(x.shape[:-1])), values


def ranges(math: Any, tests: Any, fp4: bool) -> records.Case:
    rows, heads, keys = 4, 4, 30
    g = helpers.generator(71)
    q, q_values = quantized(math, torch.randn(rows, heads, DIM, generator=g).bfloat16(), "fp4" if fp4 else "queries")
    kv, kv_values = quantized(math, torch.randn(keys, DIM, generator=g).bfloat16(), "fp4" if fp4 else "fp8")
    weights, starts, ends = torch.randn(rows, heads, generator=g), int32([0, 3, 7, 0]), int32([30, 9, 7, 1])
    with OnCpu():
        logits, _ = tests.ref_fp8_mqa_logits(q_values, kv_values, weights, starts, ends)
    arguments = {"q": q if fp4 else (q, None), "kv": kv, "weights": weights}
    return records.Case(arguments | {"cu_seq_len_k_start": starts, "cu_seq_len_k_end": ends}, logits)


def paged(math: Any, tests: Any, fp4: bool) -> records.Case:
    batch, next_n, heads, rows, blocks = 2, 2, 4, 8, 6
    g = helpers.generator(72)
    q = torch.randn(batch, next_n, heads, DIM, generator=g).bfloat16()
    query, q_values = quantized(math, q, "fp4" if fp4 else "queries")
    keys = torch.randn(blocks, rows, 1, DIM, generator=g).bfloat16()
    (codes, scales), values = quantized(math, keys, "fp4" if fp4 else "fp8")
    page = (codes.reshape(blocks, -1), scales.reshape(blocks, -1))
    cache = torch.cat([part.contiguous().view(torch.uint8) for part in page], dim=1)
    weights, lens = torch.randn(batch * next_n, heads, generator=g), int32([21, 9])
    table = int32([[4, 0, 2], [1, 5, 3]])
    with OnCpu():
        shape = (blocks, rows, 1, DIM)
        given = q_values, values.view(shape), weights, lens, table, 3 * rows
        logits = tests.ref_paged_mqa_logits(*given, use_2d_context_lens=False)
    arguments = {"q": query if fp4 else (query, None), "kv_cache": cache.view(blocks, rows, 1, -1)}
    arguments |= {"weights": weights, "context_lens": lens, "block_table": table, "schedule_meta": None}
    return records.Case(arguments | {"max_context_len": 3 * rows, "clean_logits": True}, logits)


def main() -> None:
    checkout = Path(sys.argv[1])
    math = load(checkout, "deep_gemm/utils/math.py")
    for name in ("deep_gemm", "deep_gemm.testing", "generators"):
        sys.modules[name] = Nothing(name)
    sys.modules["deep_gemm.utils"] = math
    tests = load(checkout, "tests/test_attention.py")
    x = helpers.spread((6, 512), 73)
    cases = {
        "fp8_fp4_mqa_logits": ranges(math, tests, fp4=False),
        "fp8_fp4_mqa_logits in MXFP4": ranges(math, tests, fp4=True),
        "fp8_fp4_paged_mqa_logits": paged(math, tests, fp4=False),
        "fp8_fp4_paged_mqa_logits in MXFP4": paged(math, tests, fp4=True),
        "per_token_cast_to_fp8": records.Case({"x": x}, math.per_token_cast_to_fp8(x, True, 128)),
        "per_token_cast_to_fp8 packed": records.Case({"x": x}, math.per_token_cast_to_fp8(x, True, 128, True)),
        "per_token_cast_to_fp4": records.Case({"x": x}, math.per_token_cast_to_fp4(x, True, 32, True)),
    }
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True)
    commit = head.stdout.strip()
    about = {"project": f"DeepGEMM at commit {commit}, deep_gemm/utils/math.py and tests/test_attention.py"}
    records.save(records.FOLDER / "deep_gemm.npz", about | {"license": "MIT"}, cases)


if __name__ == "__main__":
    main()
