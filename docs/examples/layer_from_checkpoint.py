# SPDX-License-Identifier: Apache-2.0
"""A layer from a checkpoint as DeepSeek publishes them: config.json, and safetensors files with `layers.N.attn.*`.

python docs/examples/layer_from_checkpoint.py                         # a small seeded one, written for this
python docs/examples/layer_from_checkpoint.py --checkpoint DIR --layer 2
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from cute_kernels.layers import (
    BlockTables,
    DeepseekV4Config,
    DeepseekV4MetadataBuilder,
    LayerCaches,
    build_layer,
    random_layer_tensors,
    read_layer_tensors,
)

SMALL = {
    "model_type": "deepseek_v4",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "q_lora_rank": 128,
    "o_groups": 1,
    "o_lora_rank": 128,
    "index_n_heads": 2,
    "index_topk": 8,
    "compress_ratios": [0, 0, 4, 128],
    "max_position_embeddings": 500,
}


def write_small(folder: Path) -> None:
    """A checkpoint of four narrow layers. Scales of FP8 weights are stored as powers of two (ue8m0)."""
    config = DeepseekV4Config.from_dict(SMALL)
    tensors = {}
    for index in range(len(config.compress_ratios)):
        for name, value in random_layer_tensors(config, index).items():
            stored = value.to(torch.float8_e8m0fnu) if name.endswith(".scale") else value
            tensors[f"layers.{index}.attn.{name}"] = stored
    (folder / "config.json").write_text(json.dumps(SMALL))
    save_file(tensors, folder / "model.safetensors")


def run(folder: Path, index: int) -> None:
    config = DeepseekV4Config.from_json(folder / "config.json")
    layer = build_layer(config, index, read_layer_tensors(folder, index))  # CheckpointError names what does not fit
    ratio, tokens = layer.compress_ratio, 100

    # one request: pages 0, 1, ... of every pool
    has_entries = ratio > 1
    caches = LayerCaches.allocate(
        config, ratio, swa_blocks=2, compressed_blocks=int(has_entries), state_blocks=25 * has_entries
    )
    pages = torch.arange(25, dtype=torch.int32)[None]
    tables = BlockTables(pages[:, :2], pages[:, :1] if has_entries else None, pages if has_entries else None)
    builder = DeepseekV4MetadataBuilder(config, tokens, tokens)
    step = builder.build(ratio, [tokens], [tokens], tables, num_decodes=0)
    hidden = torch.randn(tokens, config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = layer(step.positions, hidden, step, caches)
    parameters = sum(buffer.numel() for buffer in layer.buffers())
    print(f"layer {index}, ratio {ratio}, {parameters} weights and scales; output {list(out.shape)} {out.dtype}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, metavar="DIR")
    parser.add_argument("--layer", type=int, default=2)
    args = parser.parse_args(argv)
    if args.checkpoint is not None:
        run(args.checkpoint, args.layer)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_small(Path(folder))
        for index in (0, 2, 3):
            run(Path(folder), index)


if __name__ == "__main__":
    main()
