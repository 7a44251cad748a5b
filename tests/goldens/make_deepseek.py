# SPDX-License-Identifier: Apache-2.0
"""Makes the cases of DeepSeek's own model code, run on a CPU.

    python -m tests.goldens.make_deepseek FOLDER    # `inference` of huggingface.co/deepseek-ai/DeepSeek-V4-Pro

Its kernels need a GPU and are replaced: quantization by nothing, so that what it quantizes is kept in bf16, and sparse
attention by a look at its arguments. Whether a copy of model.py is the one that made the files, `about` tells by a hash
of the definitions that run.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from tests import helpers
from tests.goldens import records
from tests.goldens.inputs import levels

USED = ("RMSNorm", "precompute_freqs_cis", "apply_rotary_emb", "get_window_topk_idxs", "get_compress_topk_idxs")
USED += ("Compressor", "Attention")
ROPE = 64


def load(folder: Path) -> Any:
    kernel: Any = ModuleType("kernel")
    for name in ("act_quant", "fp4_act_quant", "fp8_gemm", "fp4_gemm", "sparse_attn", "hc_split_sinkhorn"):
        setattr(kernel, name, lambda x, *others: x)
    sys.modules["kernel"] = kernel
    sys.path.insert(0, str(folder))
    return importlib.import_module("model")


def parameters(model: Any, **changed: Any) -> Any:
    sizes = {"max_batch_size": 1, "max_seq_len": 256, "dim": 64, "n_heads": 2, "q_lora_rank": 64, "o_groups": 1}
    sizes |= {"o_lora_rank": 8, "window_size": 8, "rope_factor": 16.0, "original_seq_len": 65536}
    sizes |= {"compress_rope_theta": 160000.0, "rope_theta": 10000.0}
    return model.ModelArgs(**sizes | changed)


def table(model: Any, positions: int, compressed: bool) -> torch.Tensor:
    """fp32 [positions, 64]: cos in columns 0..31, sin in 32..63."""
    length, theta = (65536, 160000.0) if compressed else (0, 10000.0)
    angles = model.precompute_freqs_cis(ROPE, positions, length, theta, 16.0, 32, 1)
    return torch.cat([angles.real, angles.imag], dim=1).contiguous()


def rotary(model: Any, compressed: bool) -> records.Case:
    positions = [0, 1, 127, 1000, 4095]
    return records.Case({"compressed": compressed}, (positions, table(model, 4096, compressed)[positions].clone()))


def norm(model: Any) -> records.Case:
    x, weight = helpers.spread((5, 448), 81), helpers.spread((448,), 82)
    layer = model.RMSNorm(448, 1e-6)
    layer.weight.data = weight.float()
    return records.Case({"hidden_states": x, "weight": weight, "eps": 1e-6}, layer(x).detach())


class Halves(nn.Module):
    """A projection that hands on one half of its input."""

    def __init__(self, second: bool) -> None:
        super().__init__()
        self.second = second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.chunk(2, dim=-1)[self.second]


def compressor(model: Any, ratio: int, head_dim: int, prompt: int, tokens: int) -> records.Case:
    """Entries of a request: those of its prompt, and those that its decode steps close one by one."""
    width = head_dim * (2 if ratio == 4 else 1)
    layer = model.Compressor(parameters(model, rope_head_dim=ROPE), ratio, head_dim)
    layer.wkv, layer.wgate = Halves(False), Halves(True)
    layer.ape.data = levels((ratio, width), 83, 5) / 3
    weight = (levels((head_dim,), 84, 9) + 3).bfloat16()
    layer.norm.weight.data = weight.float()
    layer.kv_cache = torch.zeros(1, tokens // ratio, head_dim, dtype=torch.bfloat16)
    cos_sin = table(model, tokens, True)
    layer.freqs_cis = torch.complex(*cos_sin.chunk(2, dim=1))
    x = torch.cat([levels((tokens, width), 85, 5), levels((tokens, width), 86, 3)], dim=1).bfloat16()
    with torch.no_grad():
        layer(x[None, :prompt], 0)
        for position in range(prompt, tokens):
            layer(x[None, position : position + 1], position)
    needed = cos_sin[: (tokens // ratio - 1) * ratio + 1].clone()
    arguments = {"x": x, "ape": layer.ape.data, "weight": weight, "cos_sin_cache": needed, "ratio": ratio}
    return records.Case(arguments | {"prompt": prompt, "eps": 1e-6}, layer.kv_cache[0])


class Given(nn.Module):
    """A projection with a known result."""

    def __init__(self, result: torch.Tensor) -> None:
        super().__init__()
        self.result = result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.result[None].clone()


def attention(model: Any) -> records.Case:
    """What one layer without a compressor gives its attention, and what it makes of the result."""
    tokens, heads, weight = 6, 2, helpers.spread((512,), 90)
    layer = model.Attention(0, parameters(model, compress_ratios=(0,)))
    q, kv, out = (helpers.spread((tokens, n * 512), 91 + n).clamp(-8, 8) for n in (heads, 1, heads))
    layer.wq_b, layer.wkv, layer.wo_b = Given(q), Given(kv), nn.Identity()
    layer.kv_norm.weight.data = weight.float()
    seen: dict[str, torch.Tensor] = {}

    def attend(q: torch.Tensor, kv: torch.Tensor, sink: Any, indices: torch.Tensor, scale: float) -> torch.Tensor:
        seen.update(q=q[0], kv=kv[0], indices=indices[0], rotated=out.view(1, tokens, heads, 512).clone())
        return seen["rotated"]  # rotated in place

    model.sparse_attn = attend
    with torch.no_grad():
        layer(torch.zeros(1, tokens, 64, dtype=torch.bfloat16), 0)
    arguments = {"q": q.view(tokens, heads, 512), "kv": kv, "kv_weight": weight, "out": out.view(tokens, heads, 512)}
    arguments |= {"cos_sin_cache": table(model, tokens, False), "eps": 1e-6, "window": 8}
    return records.Case(arguments, seen | {"rotated": seen["rotated"][0]})


def main() -> None:
    model = load(Path(sys.argv[1]))
    source = "".join(inspect.getsource(getattr(model, name)) for name in USED)
    about = {
        "project": "DeepSeek-V4-Pro, inference/model.py",
        "license": "MIT",
        "definitions": ", ".join(USED),
        "sha256": hashlib.sha256(source.encode()).hexdigest(),
    }
    files = {
        "deepseek_layer": {
            "rotary table": rotary(model, False),
            "rotary table with YaRN": rotary(model, True),
            "norm": norm(model),
            "attention": attention(model),
        },
        "deepseek_compressor": {
            "entries of 4 tokens": compressor(model, 4, 512, 11, 20),
            "the indexer's entries": compressor(model, 4, 128, 9, 16),
        },
        "deepseek_compressor_128": {
            "an entry of a prompt": compressor(model, 128, 512, 128, 128),
            "an entry of decoded tokens": compressor(model, 128, 512, 3, 128),
        },
    }
    for name, cases in files.items():
        records.save(records.FOLDER / f"{name}.npz", about, cases)


if __name__ == "__main__":
    main()
