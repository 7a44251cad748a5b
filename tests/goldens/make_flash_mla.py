# SPDX-License-Identifier: Apache-2.0
"""Makes the cases of FlashMLA's quantizer and attention as its tests define them, in torch on a CPU.

python -m tests.goldens.make_flash_mla CHECKOUT    # of github.com/deepseek-ai/FlashMLA
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from cute_kernels import formats
from tests import helpers
from tests.goldens import records
from tests.sparse_mla import model

HEADS, SINKS = 4, (0.5, -1.0, float("-inf"), float("inf"))


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def load(checkout: Path) -> tuple[Any, Any, Any]:
    """The modules `lib`, `quant` and `ref` of its tests; those beside them that need a GPU are empty."""
    for name in ("flash_mla", "kernelkit"):
        sys.modules[name] = ModuleType(name)
    sys.path.insert(0, str(checkout / "tests"))
    return tuple(importlib.import_module(name) for name in ("lib", "quant", "ref"))  # type: ignore[return-value]


def rows(count: int, seed: int) -> torch.Tensor:
    """bf16 [count, 512] of very different magnitudes, none beyond what attention is good at."""
    return helpers.spread((count, 512), seed).clamp(-6, 6)


def quantized(quant: Any, values: torch.Tensor, block_size: int) -> torch.Tensor:
    """Pages [num_blocks, block_size, 1, 584] with what lies between pages, as its quantizer leaves them."""
    pages = values.view(-1, block_size, 1, 512)
    torch.manual_seed(0)
    made = quant.quantize_k_cache(pages, quant.FP8KVCacheLayout.MODEL1_FP8Sparse)
    stride = -(-block_size * 584 // 576) * 576
    memory = torch.zeros(pages.shape[0], stride, dtype=torch.uint8)
    memory[:, : block_size * 584] = made.view(torch.uint8).reshape(pages.shape[0], -1)
    memory[:, block_size * 576 : block_size * 584].view(pages.shape[0], block_size, 8)[..., 7] = 0
    return memory.as_strided(made.shape, (stride, 584, 584, 1))


def insert(quant: Any) -> records.Case:
    """Its quantizer is asked for whole pages, an insert for slots: every row is inserted in order.

    Its smallest scale is 1e-4, which no engine follows: none of these blocks is so small.
    """
    block_size, magnitudes = 4, torch.exp2(torch.arange(8)[:, None] * 2 - 4.0)
    k = (torch.randn(8, 512, generator=helpers.generator(61)) * magnitudes).bfloat16()
    want = quantized(quant, k, block_size)
    pool = formats.FP8_DS_MLA.allocate(2, block_size)
    flat = pool.as_strided((2, pool.stride(0)), (pool.stride(0), 1))
    arguments = {"k": k, "k_cache": flat, "slot_mapping": torch.arange(8), "block_size": block_size}
    return records.Case(arguments, None, {"k_cache": want.as_strided(flat.shape, flat.stride())})


def gather(quant: Any) -> records.Case:
    cache = quantized(quant, rows(8, 62), 4)
    want = quant.dequantize_k_cache(cache.view(torch.float8_e4m3fn), quant.FP8KVCacheLayout.MODEL1_FP8Sparse)
    out = torch.zeros(1, 8, 512, dtype=torch.bfloat16)
    arguments = {"out": out, "k_cache": cache.squeeze(2), "seq_lens": int32([8]), "gather_lens": None}
    arguments |= {"block_table": int32([[1, 0]]), "block_size": 4, "offset": 0}
    return records.Case(arguments, None, {"out": want.flip(0).reshape(1, 8, 512)})


def decode(lib: Any, quant: Any, ref: Any, sinks: bool, extra: bool) -> records.Case:
    g = helpers.generator(63)
    batch, queries, topk, more = 2, 1, 12, 6

    def scope(count: int, block_size: int, columns: int, seed: int, lengths: list[int] | None) -> tuple[Any, Any, Any]:
        cache = quantized(quant, rows(count, seed), block_size)
        indices = torch.randint(0, count, (batch, queries, columns), generator=g).int()
        indices[torch.rand(indices.shape, generator=g) < 0.2] = -1
        lens = None if lengths is None else int32(lengths)
        plain = quant.dequantize_k_cache(cache.view(torch.float8_e4m3fn), quant.FP8KVCacheLayout.MODEL1_FP8Sparse)
        nothing = torch.empty(0)
        return lib.KVScope(None, nothing, nothing, plain, nothing, indices, lens), cache, indices

    first, cache, indices = scope(16, 8, topk, 64, [12, 0] if extra else None)
    second, extra_cache, extra_indices = scope(8, 2, more, 65, [3, 0])
    q = model.bf16_query((batch, queries, HEADS, 512), 66)
    sink = torch.tensor(SINKS) if sinks else None
    options = lib.ExtraTestParamForDecode(b=batch, is_varlen=False, have_zero_seqlen_k=False)
    parameters = lib.TestParam(s_q=queries, s_kv=16, topk=topk, h_q=HEADS, decode=options)
    test = lib.TestcaseForDecode(parameters, q, sink, model.SCALE, first, second if extra else None)
    result = ref.ref_sparse_attn_decode(parameters, test)
    arguments = {
        "q": q,
        "k_cache": cache,
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": None,
        "softmax_scale": model.SCALE,
        "is_fp8_kvcache": True,
        "indices": indices,
        "attn_sink": sink,
        "topk_length": first.topk_length,
    }
    if extra:
        arguments["extra_k_cache"] = extra_cache
        arguments |= {"extra_indices_in_kvcache": extra_indices, "extra_topk_length": second.topk_length}
    return records.Case(arguments, tuple(value.contiguous() for value in result))


def prefill(lib: Any, ref: Any, sinks: bool, lengths: bool) -> records.Case:
    g = helpers.generator(67)
    parameters = lib.TestParam(s_q=4, s_kv=14, topk=10, h_q=HEADS)
    q, kv = model.bf16_query((4, HEADS, 512), 68), rows(14, 69).view(14, 1, 512)
    indices = torch.randint(-3, 17, (4, 1, 10), generator=g).int()
    indices[1, 0, :2] = int32([2**31 - 1, -(2**31)])
    sink, lens = torch.tensor(SINKS) if sinks else None, int32([10, 4, 0, 1]) if lengths else None
    test = lib.Testcase(parameters, torch.empty(0), q, kv, indices, 0.07, sink, lens)
    out, _, top, lse = ref.ref_sparse_attn_fwd(parameters, test)
    arguments = {"q": q, "kv": kv, "indices": indices, "sm_scale": 0.07, "attn_sink": sink, "topk_length": lens}
    return records.Case(arguments, (out, top, lse))


def main() -> None:
    checkout = Path(sys.argv[1])
    lib, quant, ref = load(checkout)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True)
    about = {"project": f"FlashMLA at commit {head.stdout.strip()}, tests/ref.py and quant.py", "license": "MIT"}
    records.save(
        records.FOLDER / "flash_mla.npz",
        about,
        {
            "quantize_and_insert_k_cache": insert(quant),
            "dequantize_and_gather_k_cache": gather(quant),
            "flash_mla_with_kvcache": decode(lib, quant, ref, sinks=True, extra=True),
            "flash_mla_with_kvcache of one cache": decode(lib, quant, ref, sinks=False, extra=False),
            "flash_mla_sparse_fwd": prefill(lib, ref, sinks=True, lengths=True),
            "flash_mla_sparse_fwd of all columns": prefill(lib, ref, sinks=False, lengths=False),
        },
    )


if __name__ == "__main__":
    main()
