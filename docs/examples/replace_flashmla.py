# SPDX-License-Identifier: Apache-2.0
"""Sparse decode attention as FlashMLA's users call it, over this package: one import line changes.

    python docs/examples/replace_flashmla.py [--device cuda]

The result is compared with attention in float64 over what the cache's records hold.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

import cute_kernels
from cute_kernels import formats

# was: from flash_mla import flash_mla_with_kvcache, get_mla_metadata
from cute_kernels.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata

BATCH, HEADS, TOPK, BLOCK_SIZE, BLOCKS = 3, 16, 128, 64, 8


def attention(q: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """float64 [B, 1, H, 512]: softmax over the rows that the indices name, and a sink that takes its share."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for b in range(q.shape[0]):
        kv = rows[indices[b, 0][indices[b, 0] >= 0].long()].double()
        logits = q[b, 0].double() @ kv.T * 512**-0.5
        weights = torch.cat([logits, sink.double()[:, None]], dim=1).softmax(dim=1)[:, :-1]
        out[b, 0] = weights @ kv
    return out


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args(argv)
    generator = torch.Generator().manual_seed(0)

    # an engine's cache: keys quantized into 584-byte records, pages of 64 rows
    cache = formats.FP8_DS_MLA.allocate(BLOCKS, BLOCK_SIZE, args.device)
    tokens = BLOCKS * BLOCK_SIZE
    k = torch.randn(tokens, 512, generator=generator).bfloat16().to(args.device)
    cute_kernels.quantize_and_insert_k_cache(k, cache, torch.arange(tokens, device=args.device))

    q = torch.randn(BATCH, 1, HEADS, 512, generator=generator).bfloat16().to(args.device)
    sink = torch.randn(HEADS, generator=generator).to(args.device)
    indices = torch.stack([torch.randperm(tokens, generator=generator)[:TOPK] for _ in range(BATCH)]).int()
    indices[1, 40:] = -1  # a request that has fewer keys
    indices = indices[:, None].to(args.device)

    schedule, _ = get_mla_metadata()  # stays empty: nothing is planned ahead
    out, lse = flash_mla_with_kvcache(
        q, cache[:, :, None], None, None, 512, schedule, is_fp8_kvcache=True, indices=indices, attn_sink=sink
    )
    rows = formats.FP8_DS_MLA.read(cache, BLOCK_SIZE, torch.arange(tokens, device=args.device)).cpu()
    want = attention(q.cpu(), rows, indices.cpu(), sink.cpu())
    error = float((out.cpu().double() - want).norm() / want.norm())
    assert error < 5e-3, error
    print(f"out {list(out.shape)}, lse {list(lse.shape)}; relative to float64: {error:.1e} (bf16 results)")


if __name__ == "__main__":
    main()
