# SPDX-License-Identifier: Apache-2.0
"""An engine's loop in small: layers of every kind over paged caches, a prefill, then decode steps in a CUDA graph.

    python docs/examples/decode_loop.py                   # on a CPU: the references, every step eager
    python docs/examples/decode_loop.py --device cuda     # the kernels: warmed up, captured, replayed
    python docs/examples/decode_loop.py --device cuda --all-kernels

What an engine has to do is in `Engine`: pools, block tables at addresses that stay, metadata once a step for all
layers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch

import cute_kernels
from cute_kernels.layers import (
    PRESETS,
    AttentionOptions,
    BlockTables,
    DeepseekV4Config,
    DeepseekV4Metadata,
    DeepseekV4MetadataBuilder,
    LayerCaches,
    build_layer,
    random_layer_tensors,
)
from cute_kernels.layers.caches import KV_BLOCK_SIZE, STATE_BLOCK_SIZE, SWA_BLOCK_SIZE

LONGEST = 512
"""Tokens that a request may have."""


class Engine:
    """Attention layers of a model and the memory of a batch of requests.

    A real engine hands out pages as requests grow and takes them back; here every request owns its pages from the
    start. Pages that a layer no longer reads (behind the window, states of closed groups) may be given to others.
    """

    def __init__(self, config: DeepseekV4Config, layers: Sequence[int], requests: int, device: str) -> None:
        self.config, self.requests, self.device = config, requests, device
        options = AttentionOptions(max_model_len=LONGEST, max_num_tokens=requests * LONGEST)
        self.layers = [
            build_layer(config, index, random_layer_tensors(config, index), options=options, device=device)
            for index in layers
        ]
        # Layers of a ratio share block tables; each has pools of its own.
        self.tables = {layer.compress_ratio: self._tables(layer.compress_ratio) for layer in self.layers}
        self.caches = [self._pools(layer.compress_ratio) for layer in self.layers]
        self.builder = DeepseekV4MetadataBuilder(config, requests * LONGEST, LONGEST, device)
        self.lengths = torch.zeros(requests, dtype=torch.int32, device=device)

    def _table(self, tokens_per_page: int) -> torch.Tensor:
        pages = -(-LONGEST // tokens_per_page)
        numbers = torch.arange(self.requests * pages, dtype=torch.int32, device=self.device)
        return numbers.view(self.requests, pages)

    def _tables(self, ratio: int) -> BlockTables:
        if ratio == 1:
            return BlockTables(swa=self._table(SWA_BLOCK_SIZE))
        state = self._table(STATE_BLOCK_SIZE[ratio])
        return BlockTables(swa=self._table(SWA_BLOCK_SIZE), compressed=self._table(KV_BLOCK_SIZE), state=state)

    def _pools(self, ratio: int) -> LayerCaches:
        tables = self.tables[ratio]
        counts = [0 if table is None else table.numel() for table in (tables.swa, tables.compressed, tables.state)]
        return LayerCaches.allocate(
            self.config,
            ratio,
            swa_blocks=counts[0],
            compressed_blocks=counts[1],
            state_blocks=counts[2],
            device=self.device,
        )

    def forward(self, hidden: torch.Tensor, metadata: dict[int, DeepseekV4Metadata]) -> torch.Tensor:
        """All layers, one after the other, as a model without its experts would have them."""
        for layer, caches in zip(self.layers, self.caches, strict=True):
            step = metadata[layer.compress_ratio]
            normed = torch.nn.functional.rms_norm(hidden, hidden.shape[-1:])
            hidden = hidden + layer(step.positions, normed, step, caches)
        return hidden

    def prefill(self, hidden: torch.Tensor, prompts: Sequence[int]) -> torch.Tensor:
        """The prompts of all requests, one after the other in `hidden`, in one step."""
        self.lengths.copy_(torch.tensor(prompts, dtype=torch.int32))
        return self.forward(hidden, self.builder.build_step(prompts, prompts, self.tables, num_decodes=0))

    def next_step(self) -> dict[int, DeepseekV4Metadata]:
        """Metadata of a decode step of all requests. The host knows an upper bound of their lengths only, so that a
        captured step may be replayed; the device knows the lengths."""
        self.lengths += 1
        ones, bounds = [1] * self.requests, [LONGEST] * self.requests
        return self.builder.build_step(ones, bounds, self.tables, self.requests, seq_lens_device=self.lengths)


def capture(
    engine: Engine, hidden: torch.Tensor, metadata: dict[int, DeepseekV4Metadata]
) -> tuple[object, torch.Tensor]:
    """A decode step in a CUDA graph: (the graph, where its results lie). Metadata are built before a replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = engine.forward(hidden, metadata)
    return graph, out


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=4, help="decode steps (4)")
    parser.add_argument(
        "--all-kernels", action="store_true", help="have all of the model's kernels first, as a server would (minutes)"
    )
    args = parser.parse_args(argv)

    config, prompts = PRESETS["v4-flash"].reduced(), (150, 7, 64)
    if args.all_kernels:
        # Nothing is compiled after this. A server's kernels come from a folder that `python -m cute_kernels precompile`
        # has filled on all cores; without it they are compiled here, one after the other.
        start = time.perf_counter()
        kernels = cute_kernels.warmup(config)
        print(f"{len(kernels)} kernels ready in {time.perf_counter() - start:.1f} s")
    engine = Engine(config, (0, 2, 3), len(prompts), args.device)
    generator = torch.Generator().manual_seed(0)

    def embed(rows: int) -> torch.Tensor:
        """In place of an embedding table."""
        return torch.randn(rows, config.hidden_size, generator=generator).bfloat16().to(args.device)

    out = engine.prefill(embed(sum(prompts)), prompts)
    print(f"prefill of {prompts} tokens: {list(out.shape)}, all finite: {bool(out.isfinite().all())}")

    hidden = embed(len(prompts))  # a captured step reads its input here
    # Eager, once, before the capture: kernels that nobody has had ready are compiled, workspaces are made.
    out = engine.forward(hidden, engine.next_step())
    if args.device == "cuda":
        graph, out = capture(engine, hidden, engine.next_step())
    else:
        graph = None
        print("the CUDA graph is skipped: there is no GPU in this run, every step is eager")
    for step in range(args.steps):
        hidden.copy_(embed(len(prompts)))
        if graph is None:
            out = engine.forward(hidden, engine.next_step())
        else:
            if step > 0:  # the first replay runs the step that was captured
                engine.next_step()
            graph.replay()  # type: ignore[attr-defined]
        print(f"step {step}: lengths {engine.lengths.tolist()}, mean square {out.float().square().mean():.4f}")


if __name__ == "__main__":
    main()
