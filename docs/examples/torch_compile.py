# SPDX-License-Identifier: Apache-2.0
"""Ops inside torch.compile: one graph without breaks, any number of tokens, caches written in place.

python docs/examples/torch_compile.py [--device cuda]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

import cute_kernels
from cute_kernels import formats

BLOCK_SIZE = 64


def store_keys(x: torch.Tensor, weight: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Normalize keys and store them: the op writes into `cache`, which the compiler knows from its schema."""
    k = torch.nn.functional.rms_norm(x, x.shape[-1:], weight)
    cute_kernels.quantize_and_insert_k_cache(k, cache, slots)
    return k.float().square().mean()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args(argv)
    device = args.device
    # on a CPU the graph is run as it is: no C++ compiler is needed for an example
    compiled = torch.compile(
        store_keys, fullgraph=True, dynamic=True, backend="inductor" if device == "cuda" else "aot_eager"
    )
    weight = torch.ones(512, dtype=torch.bfloat16, device=device)
    for tokens in (5, 17):
        x = torch.randn(tokens, 512, generator=torch.Generator().manual_seed(tokens)).bfloat16().to(device)
        slots = torch.arange(tokens, device=device) * 3
        eager, graph = (formats.FP8_DS_MLA.allocate(2, BLOCK_SIZE, device) for _ in range(2))
        mean = store_keys(x, weight, eager, slots)
        assert torch.allclose(compiled(x, weight, graph, slots), mean, rtol=1e-2)
        stored = formats.FP8_DS_MLA.read(graph, BLOCK_SIZE, slots)
        error = float((stored.float() - x.float()).norm() / x.float().norm())
        print(f"{tokens} tokens in one graph: cache rows are the keys within {100 * error:.1f}% (e4m3)")


if __name__ == "__main__":
    main()
