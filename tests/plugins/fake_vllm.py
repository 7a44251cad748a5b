# SPDX-License-Identifier: Apache-2.0
"""The parts of vLLM's classes that the plug-in's mixins lie over: small ones, with the names of seams.py and nothing
else, over caches on the CPU. One request of `TOKENS` tokens, whose last `DECODES` rows can be a decode batch too."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cute_kernels import formats
from tests.helpers import generator
from tests.plugins import seams

HEADS, TOKENS, DECODES, TOP_K = 2, 150, 3, 16
SWA_ROWS, PAGE_TOKENS = 64, 256
PREFIX = "model.layers.3.attn"
MAX_TOKENS, MAX_LEN = 512, 512


class Step:
    """What the engine's forward context and workspace hold."""

    metadata: Any = None
    reserved: int = 0
    is_locked: bool = False


def make_modules(monkeypatch: pytest.MonkeyPatch) -> type[Step]:
    """Modules that the mixins import at each call."""
    step = type("OwnStep", (Step,), {})

    class Manager:
        def get_simultaneous(self, *shapes_and_dtypes: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
            made = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes_and_dtypes]
            size = sum(t.numel() * t.element_size() for t in made)
            assert size <= step.reserved or not step.is_locked, "the workspace is locked"
            step.reserved = max(step.reserved, size)
            return made

    for name, function in (
        ("vllm.forward_context", {"get_forward_context": lambda: SimpleNamespace(attn_metadata=step.metadata)}),
        ("vllm.v1.worker.workspace", {"current_workspace_manager": Manager}),
    ):
        module = ModuleType(name)
        vars(module).update(function)
        for parent in (".".join(name.split(".")[:n]) for n in range(1, name.count(".") + 1)):
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, name, module)
    return step


def reserve(*shapes_and_dtypes: tuple[tuple[int, ...], torch.dtype]) -> None:
    sys.modules["vllm.v1.worker.workspace"].current_workspace_manager().get_simultaneous(*shapes_and_dtypes)


def nbytes(shapes_and_dtypes: list[tuple[tuple[int, ...], torch.dtype]]) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes_and_dtypes)


def draw(g: torch.Generator, *shape: int) -> torch.Tensor:
    """Normal values, the same on every device."""
    return torch.randn(shape, generator=g, device="cpu").to(torch.get_default_device())


def only(file: str, name: str, **values: Any) -> SimpleNamespace:
    """Metadata that has the fields of seams.py: values, or None."""
    known = seams.FIELDS["vllm"][file][name]
    assert set(values) <= known, set(values) - known
    return SimpleNamespace(**{field: values.get(field) for field in known})


def rotary() -> SimpleNamespace:
    angles = torch.arange(MAX_LEN)[:, None] / 10000 ** (torch.arange(32) / 32)
    return SimpleNamespace(cos_sin_cache=torch.cat([angles.cos(), angles.sin()], -1))


class Cache:
    def __init__(self, prefix: str, kv_cache: torch.Tensor) -> None:
        self.prefix, self.kv_cache = prefix, kv_cache


class Compressor(nn.Module):
    def __init__(self, ratio: int, head_dim: int, k_cache_prefix: str, layers: dict[str, Any]) -> None:
        super().__init__()
        g = generator(ratio + head_dim)
        self.compress_ratio, self.head_dim, self.coff = ratio, head_dim, 2 if ratio == 4 else 1
        self.k_cache_prefix, self.use_fp4_cache, self.rms_norm_eps = k_cache_prefix, False, 1e-6
        width = self.coff * head_dim
        self.ape = nn.Parameter(draw(g, ratio, width), requires_grad=False)
        self.norm = SimpleNamespace(weight=SimpleNamespace(data=draw(g, head_dim).bfloat16()))
        rows = 4 if ratio == 4 else 8
        self.state_cache = Cache(f"{k_cache_prefix}.state", torch.zeros(-(-TOKENS // rows) + 1, rows, 2 * width))
        self._static_forward_context = layers

    def forward(self, kv_score: torch.Tensor, positions: torch.Tensor, rotary_emb: Any) -> None:
        raise AssertionError("the engine's compressor")


class IndexerOp(nn.Module):
    def __init__(self, k_cache: Cache, buffer: torch.Tensor) -> None:
        super().__init__()
        self.k_cache, self.topk_tokens, self.head_dim, self.topk_indices_buffer = k_cache, TOP_K, 128, buffer
        self.max_model_len, self.max_total_seq_len = MAX_LEN // 4, MAX_LEN // 4
        self.skip_k_cache_insert, self.use_fp4_cache, self.candidate_blocks = True, False, None
        self.dense_mha_metadata_layer_name, self.dcp_world_size, self.use_pcp = "", 1, False

    def forward_cuda(self, hidden_states: Any, q_quant: Any, k: Any, weights: Any) -> str:
        if sys.modules["vllm.forward_context"].get_forward_context().attn_metadata is None:
            reserve(*self.gathered())
        return "the engine's indexer"

    def gathered(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """What the engine reserves for a prefill: keys and their scales."""
        return [((self.max_total_seq_len, 128), torch.float8_e4m3fn), ((self.max_total_seq_len, 4), torch.uint8)]


class Indexer(nn.Module):
    def _get_attn_cls(self) -> type:
        return IndexerOp

    def _get_compressor_cls(self) -> type:
        return Compressor

    def __init__(self, prefix: str, layers: dict[str, Any], buffer: torch.Tensor) -> None:
        super().__init__()
        self.use_fp4_kv, self.softmax_scale, self.n_head = False, 128**-0.5, 64
        self.k_cache = Cache(
            f"{prefix}.k_cache", formats.INDEXER_FP8.allocate(2, PAGE_TOKENS // 4, torch.get_default_device())
        )
        layers[self.k_cache.prefix] = self.k_cache
        self.compressor = self._get_compressor_cls()(4, 128, self.k_cache.prefix, layers)
        self.indexer_op = self._get_attn_cls()(self.k_cache, buffer)

    def _q_rope_quant(self, *arguments: Any) -> str:
        return "the engine's queries"


class Attention(nn.Module):
    PREFILL_CHUNK_SIZE = 4

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        return 64

    def _get_indexer_cls(self, vllm_config: Any) -> type:
        return Indexer

    def __init__(self, vllm_config: Any, prefix: str, topk_indices_buffer: Any = None, aux_stream_list: Any = None):
        super().__init__()
        ratio, self.prefix = vllm_config.ratio, prefix
        g = generator(7)
        self.n_local_heads, self.padded_heads = HEADS, self.get_padded_num_q_heads(HEADS)
        self.n_local_groups, self.q_lora_rank, self.o_lora_rank, self.head_dim = 1, 256, 128, formats.HEAD_DIM
        self.eps, self.scale, self.window_size = 1e-6, formats.HEAD_DIM**-0.5, 128
        self.compress_ratio, self.max_num_batched_tokens, self.max_model_len = ratio, MAX_TOKENS, MAX_LEN
        self.attn_sink = nn.Parameter(5 + draw(g, self.padded_heads), requires_grad=False)
        for name, width in (("q_norm", self.q_lora_rank), ("kv_norm", self.head_dim)):
            weight = draw(g, width).bfloat16()
            setattr(self, name, SimpleNamespace(weight=SimpleNamespace(data=weight)))
        self.rotary_emb, self.topk_indices_buffer = rotary(), topk_indices_buffer
        self._einsum_recipe, self._tma_aligned_scales = (1, 128, 128), False
        layers: dict[str, Any] = {prefix: self}
        self.kv_cache = formats.FP8_DS_MLA.allocate(2, PAGE_TOKENS // max(ratio, 1), torch.get_default_device())
        self.swa_cache_layer = Cache(
            f"{prefix}.swa_cache", formats.FP8_DS_MLA.allocate(4, SWA_ROWS, torch.get_default_device())
        )
        self.indexer = None
        if ratio == 4:
            self.indexer = self._get_indexer_cls(vllm_config)(f"{prefix}.indexer", layers, topk_indices_buffer)
        self.compressor = Compressor(ratio, formats.HEAD_DIM, prefix, layers) if ratio > 1 else None

    def forward_mqa(self, q: torch.Tensor, kv: Any, positions: Any, output: torch.Tensor) -> None:
        metadata = sys.modules["vllm.forward_context"].get_forward_context().attn_metadata
        if metadata is None:
            reserve(*self.gathered())
            output.zero_()
            return
        swa, own = metadata[self.swa_cache_layer.prefix], metadata.get(self.prefix)
        rows, cache = swa.num_decode_tokens, self.kv_cache if self.compress_ratio > 1 else None
        if swa.num_prefills > 0:
            self._forward_prefill(
                q=q[rows:],
                positions=positions[rows:],
                compressed_k_cache=cache,
                swa_k_cache=self.swa_cache_layer.kv_cache,
                output=output[rows:],
                attn_metadata=own,
                swa_metadata=swa,
            )
        if swa.num_decodes > 0:
            self._forward_decode(
                q=q[:rows],
                kv_cache=cache,
                swa_metadata=swa,
                attn_metadata=own,
                swa_only=cache is None,
                output=output[:rows],
            )

    def gathered(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """What the engine reserves for its prefill: gathered rows, indices, lengths."""
        top_k = self.topk_indices_buffer.shape[1] if self.compress_ratio > 1 else 0
        entries = MAX_LEN // self.compress_ratio if self.compress_ratio > 1 else 0
        columns = -(-(top_k + self.window_size) // 128) * 128
        rows = (self.PREFILL_CHUNK_SIZE, entries + self.window_size + MAX_TOKENS, self.head_dim)
        return [(rows, torch.bfloat16), ((MAX_TOKENS, columns), torch.int32), ((MAX_TOKENS,), torch.int32)]

    def _forward_prefill(self, **call: Any) -> None:
        raise AssertionError("the engine's prefill")

    def _forward_decode(self, **call: Any) -> None:
        raise AssertionError("the engine's decode")

    def _fused_qnorm_rope_kv_insert(self, q: Any, kv: Any, positions: Any, attn_metadata: Any) -> Any:
        return "the engine's insert"

    def _split_qkv_and_norm(self, qr_kv: torch.Tensor) -> Any:
        return "the engine's norm"

    def _o_proj(self, o: torch.Tensor, positions: torch.Tensor) -> Any:
        return "the engine's projection"


def metadata(layer: Any, decodes: bool) -> dict[str, Any]:
    """Of a prefill of the request's tokens, or of a decode of its last rows, as with speculative tokens."""
    ratio = layer.compress_ratio
    table = torch.arange(4, dtype=torch.int32)[None]
    first = TOKENS - DECODES
    positions = torch.arange(first, TOKENS) if decodes else torch.arange(TOKENS)
    rows = positions.shape[0]
    window = positions[:, None] - 127 + torch.arange(128)
    slots = torch.where(window >= 0, window, -1).int()
    shifts = (slots < 0).sum(1).tolist()
    oldest_first = torch.stack([row.roll(-shift) for row, shift in zip(slots, shifts, strict=True)])
    swa = only(
        "vllm/v1/attention/backends/mla/sparse_swa.py",
        "DeepseekSparseSWAMetadata",
        block_table=table,
        slot_mapping=positions,
        block_size=SWA_ROWS,
        query_start_loc=torch.tensor([0, rows]).int(),
        query_start_loc_cpu=torch.tensor([0, rows], device="cpu").int(),
        is_valid_token=torch.ones(rows, dtype=torch.bool),
        token_to_req_indices=torch.zeros(rows).int(),
        decode_swa_indices=oldest_first[:, None] if decodes else None,
        decode_swa_lens=(positions + 1).clamp(max=128).int() if decodes else None,
        num_decodes=1 if decodes else 0,
        num_decode_tokens=rows if decodes else 0,
        num_prefills=0 if decodes else 1,
        num_prefill_tokens=0 if decodes else rows,
        prefill_seq_lens=None if decodes else torch.tensor([rows]).int(),
        prefill_seq_lens_cpu=None if decodes else torch.tensor([rows], device="cpu").int(),
    )
    found = {layer.swa_cache_layer.prefix: swa}
    if ratio == 1:
        return found
    closes = (positions + 1) % ratio == 0
    entries = (positions + 1) // ratio
    most = int(entries.max())
    all_entries = torch.where(torch.arange(most) < entries[:, None], torch.arange(most), -1).int()
    c128 = ratio == 128
    found[layer.prefix] = only(
        "vllm/models/deepseek_v4/sparse_mla.py",
        "DeepseekV4FlashMLAMetadata",
        block_table=torch.tensor([[0, 1]]).int(),
        block_size=PAGE_TOKENS,
        slot_mapping=torch.where(closes, entries - 1, -1),
        c128a_global_decode_topk_indices=all_entries[:, None] if decodes and c128 else None,
        c128a_decode_topk_lens=entries.int() if decodes and c128 else None,
    )
    compressors = [layer.compressor] if layer.indexer is None else [layer.compressor, layer.indexer.compressor]
    for compressor in compressors:
        pages, state_rows = compressor.state_cache.kv_cache.shape[:2]
        found[compressor.state_cache.prefix] = only(
            seams.COMPRESSOR,
            "CompressorMetadata",
            block_table=torch.arange(pages).int()[None],
            slot_mapping=positions,
            block_size=state_rows,
            token_to_req_indices=torch.zeros(rows).int(),
        )
    if layer.indexer is None:
        return found
    indexer_file = "vllm/v1/attention/backends/mla/indexer.py"
    pages = torch.tensor([[0, 1]]).int()
    decode = only(
        indexer_file,
        "DeepSeekV32IndexerDecodeMetadata",
        block_table=pages,
        seq_lens=entries.int()[None],
        decode_lens=torch.tensor([rows]).int(),
        requires_padding=False,
    )
    chunk = only(
        indexer_file,
        "DeepseekV32IndexerPrefillChunkMetadata",
        block_table=pages,
        cu_seqlen_ks=torch.zeros(rows).int(),
        cu_seqlen_ke=entries.int(),
        max_seqlen_k=most,
        token_start=0,
        token_end=rows,
        skip_kv_gather=False,
        local_cu_seq_lens=torch.tensor([0, most]).int(),
        local_total_seq_lens=most,
        max_local_total_seq_lens=most,
    )
    found[layer.indexer.k_cache.prefix] = only(
        indexer_file,
        "DeepseekV32IndexerMetadata",
        slot_mapping=found[layer.prefix].slot_mapping,
        num_decode_tokens=rows if decodes else 0,
        num_prefills=0 if decodes else 1,
        decode=decode if decodes else None,
        prefill=None if decodes else only(indexer_file, "DeepseekV32IndexerPrefillMetadata", chunks=[chunk]),
    )
    return found


def mixed(layer: Any) -> dict[str, Any]:
    """Attention's metadata of a step with three requests that are the same one: a decode, and two prefills."""
    one = metadata(layer, decodes=True)
    swa, prefill = (of[layer.swa_cache_layer.prefix] for of in (one, metadata(layer, decodes=False)))
    counts = torch.tensor([DECODES, TOKENS, TOKENS], device="cpu")
    starts = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), counts.cumsum(0)]).int()
    swa.query_start_loc, swa.query_start_loc_cpu = starts.to(torch.get_default_device()), starts
    swa.num_prefills, swa.num_prefill_tokens = 2, 2 * TOKENS
    swa.block_table = torch.cat([torch.full_like(swa.block_table, -1), *[swa.block_table] * 2])  # decode names slots
    for name in ("prefill_seq_lens", "prefill_seq_lens_cpu"):
        setattr(swa, name, getattr(prefill, name).repeat(2))
    if layer.compress_ratio > 1:
        one[layer.prefix].block_table = one[layer.prefix].block_table.expand(3, -1)
    return one
