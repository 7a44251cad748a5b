# SPDX-License-Identifier: Apache-2.0
"""What an engine builds its own attention layers from: cache specs, backends, a layer of the engine's weights, and the
op at which its torch.compile splits.

    register_layer("layers.3.attn", layer, caches)
    with forward_context(metadata):                       # of the step, by compress ratio
        out = hidden_states.new_empty(tokens, heads, 512)
        deepseek_v4_attention(hidden_states, positions, out, "layers.3.attn")
        hidden_states = layer.project(out, positions)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from cute_kernels.formats import HEAD_DIM, KVFormat, compressor_state
from cute_kernels.numerics import ue8m0_scale
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.ops import NAMESPACE

from .attention import AttentionOptions, DeepseekV4MultiHeadLatentAttentionWrapper
from .caches import INDEX_CACHES, KV_BLOCK_SIZE, KV_CACHES, STATE_BLOCK_SIZE, SWA_BLOCK_SIZE, LayerCaches
from .config import COMPRESS_RATIOS, DeepseekV4Config
from .linear import dequantize_weight
from .metadata import DeepseekV4Metadata, DeepseekV4MetadataBuilder
from .mla import DeepseekV4FlashInferMLASparseImpl, DeepseekV4MLAAttention
from .rotary import RotaryEmbedding

__all__ = [
    "DeepseekV4FlashInferMLASparseBackend",
    "DeepseekV4MLABackend",
    "DeepseekV4MLAModules",
    "KVCacheSpec",
    "deepseek_v4_attention",
    "forward_context",
    "get_kv_cache_spec",
    "register_layer",
    "unregister_layer",
]

# ---- cache specs


@dataclass(frozen=True)
class KVCacheSpec:
    """What an allocator must know of one paged cache.

    kv_format        record format
    block_size       source tokens of a page
    compress_ratio   source tokens of a row
    sliding_window   tokens that a request's next step may read; pages before them may go. None: all
    """

    kv_format: KVFormat
    block_size: int
    compress_ratio: int = 1
    sliding_window: int | None = None

    @property
    def rows(self) -> int:
        """Of a page."""
        return self.block_size // self.compress_ratio

    @property
    def dtype(self) -> torch.dtype:
        return self.kv_format.dtype

    @property
    def alignment(self) -> int:
        """Bytes that the distance between pages should be a multiple of."""
        return self.kv_format.alignment

    @property
    def real_page_size_bytes(self) -> int:
        """What the rows of a page take."""
        return self.kv_format.page_bytes(self.rows)

    @property
    def page_size_bytes(self) -> int:
        """The same, rounded up to the alignment. An engine may put pages further apart: strides are read."""
        return self.kv_format.page_stride(self.rows)

    def view(self, memory: torch.Tensor, page_stride: int | None = None) -> torch.Tensor:
        """A pool [num_blocks, rows, row elements] over memory of the engine.

        memory        uint8 [bytes], contiguous, at a multiple of 16 bytes on a GPU
        page_stride   bytes from page to page; default `page_size_bytes`
        """
        stride, size = page_stride or self.page_size_bytes, self.dtype.itemsize
        c = Checker("KVCacheSpec.view")
        c.tensor("memory", memory, torch.uint8, (None,), contiguous=True)
        least = self.real_page_size_bytes
        fits = stride >= least and stride % size == 0
        c.require(fits, "page_stride", f"a multiple of {size} of at least {least} bytes", stride)
        pages, width = (memory.shape[0] - least) // stride + 1, self.kv_format.row_elements
        used = memory[: memory.shape[0] // size * size].view(self.dtype)
        return used.as_strided((pages, self.rows, width), (stride // size, width, 1))


def get_kv_cache_spec(
    config: DeepseekV4Config, compress_ratio: int, *, kv_cache: str = "fp8_ds_mla", index_cache: str = "fp8"
) -> dict[str, KVCacheSpec]:
    """The caches of a layer of this kind, by their names in `LayerCaches`.

    kv_cache, index_cache   as in AttentionOptions
    """
    c = Checker("get_kv_cache_spec")
    c.one_of("compress_ratio", compress_ratio, COMPRESS_RATIOS)
    c.one_of("kv_cache", kv_cache, tuple(KV_CACHES))
    c.one_of("index_cache", index_cache, tuple(INDEX_CACHES))
    rows = KV_CACHES[kv_cache]
    specs = {"swa": KVCacheSpec(rows, SWA_BLOCK_SIZE, sliding_window=config.sliding_window)}
    if compress_ratio == 1:
        return specs
    # groups of ratio 4 overlap: an entry also reads the group before
    window = 2 * compress_ratio if compress_ratio == 4 else compress_ratio
    page = STATE_BLOCK_SIZE[compress_ratio]
    specs["compressed"] = KVCacheSpec(rows, KV_BLOCK_SIZE, compress_ratio)
    specs["state"] = KVCacheSpec(compressor_state(config.head_dim, compress_ratio), page, sliding_window=window)
    if compress_ratio == 4:
        state = compressor_state(config.index_head_dim, compress_ratio)
        specs["indexer"] = KVCacheSpec(INDEX_CACHES[index_cache], KV_BLOCK_SIZE, compress_ratio)
        specs["indexer_state"] = KVCacheSpec(state, page, sliding_window=window)
    return specs


# ---- backends


class DeepseekV4MLABackend:
    """Attention over fp8_ds_mla caches, as engines ask a backend class what it takes."""

    supported_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)
    supported_kv_cache_dtypes: ClassVar[tuple[str, ...]] = ("fp8_ds_mla",)

    @staticmethod
    def get_name() -> str:
        return "CUTE_KERNELS_MLA_DSV4"

    @staticmethod
    def get_impl_cls() -> type[DeepseekV4MLAAttention]:
        return DeepseekV4MLAAttention

    @staticmethod
    def get_metadata_cls() -> type[DeepseekV4Metadata]:
        return DeepseekV4Metadata

    @staticmethod
    def get_builder_cls() -> type[DeepseekV4MetadataBuilder]:
        return DeepseekV4MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int]:
        """Source tokens of a page of the compressed and indexer caches."""
        return [KV_BLOCK_SIZE]

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return [HEAD_DIM]

    @staticmethod
    def get_padded_num_q_heads(num_heads: int) -> int:
        """The number itself: any from 1 to 128 is native."""
        Checker("get_padded_num_q_heads").require(1 <= num_heads <= 128, "num_heads", "1 to 128", num_heads)
        return num_heads

    @classmethod
    def get_kv_cache_spec(
        cls, config: DeepseekV4Config, compress_ratio: int, kv_cache: str | None = None, index_cache: str = "fp8"
    ) -> dict[str, KVCacheSpec]:
        """`get_kv_cache_spec` of this module; kv_cache is the backend's first by default."""
        kv_cache = cls.supported_kv_cache_dtypes[0] if kv_cache is None else kv_cache
        Checker("get_kv_cache_spec").one_of("kv_cache", kv_cache, cls.supported_kv_cache_dtypes)
        return get_kv_cache_spec(config, compress_ratio, kv_cache=kv_cache, index_cache=index_cache)


class DeepseekV4FlashInferMLASparseBackend(DeepseekV4MLABackend):
    """Attention over plain caches."""

    supported_kv_cache_dtypes: ClassVar[tuple[str, ...]] = ("bf16", "fp8")

    @staticmethod
    def get_name() -> str:
        return "FLASHINFER_MLA_SPARSE_DSV4"

    @staticmethod
    def get_impl_cls() -> type[DeepseekV4MLAAttention]:
        return DeepseekV4FlashInferMLASparseImpl


# ---- a layer of an engine's weights


@dataclass
class DeepseekV4MLAModules:
    """The parts of an attention layer as an engine holds them, loaded and cut for this rank.

    A linear is anything with `weight` [out, in], bf16 or e4m3, and beside an e4m3 one the fp32 or e8m0 scales of blocks
    of 128 x 128 as `scale`, `weight_scale` or `weight_scale_inv`; a norm anything with `weight`.

    config               takes the place of an engine's configuration
    fused_wqa_wkv        wq_a above wkv
    wo_a                 [groups * o_lora_rank, columns of a group], or with the groups as a dimension of their own
    attn_sink            fp32 [heads or more]: those of padded heads are left out
    rotary_emb           anything with `cos_sin_cache` fp32 [positions, 64]
    indexer              of C4A layers: has wq_b, weights_proj and compressor
    indexer_rotary_emb   None, or with the same table as rotary_emb
    topk_indices_buffer  int32 [rows, index_topk], shared by C4A layers, or None
    aux_stream_list      CUDA streams, or None (AttentionOptions.aux_streams)
    compressor           of layers with one: has fused_wkv_wgate (wkv above wgate; kept as bf16), ape and norm
    """

    config: DeepseekV4Config
    fused_wqa_wkv: Any
    q_norm: Any
    wq_b: Any
    kv_norm: Any
    wo_a: Any
    wo_b: Any
    attn_sink: torch.Tensor
    rotary_emb: Any
    indexer: Any
    indexer_rotary_emb: Any
    topk_indices_buffer: torch.Tensor | None
    aux_stream_list: Sequence[torch.cuda.Stream] | None = None
    compressor: Any = None

    def build(
        self, layer_index: int, options: AttentionOptions | None = None
    ) -> DeepseekV4MultiHeadLatentAttentionWrapper:
        """Layer `layer_index` of these weights, which it shares where their dtypes are its own. Weights that read the
        same input are copied once, to lie below each other.

        options   those of the layer; their streams and buffer are the fields' where these are given
        """
        options = options or AttentionOptions()
        if self.aux_stream_list is not None:
            options = replace(options, aux_streams=self.aux_stream_list)
        if self.topk_indices_buffer is not None:
            options = replace(options, topk_indices_buffer=self.topk_indices_buffer)
        self._check(layer_index)
        table, device = self.rotary_emb.cos_sin_cache, self.attn_sink.device
        linears = {"wqa_wkv": self.fused_wqa_wkv, "wq_b": self.wq_b, "wo_a": self.wo_a, "wo_b": self.wo_b}
        if self.indexer is not None:
            linears["indexer.wq_b"] = self.indexer.wq_b
        quantized = frozenset(n for n, module in linears.items() if module.weight.dtype == torch.float8_e4m3fn)
        layer = DeepseekV4MultiHeadLatentAttentionWrapper(
            self.config,
            layer_index,
            quantized=quantized,
            options=options,
            rotary_emb=RotaryEmbedding(self.config, self.config.compress_ratio_of(layer_index) > 1, table=table),
            device=device,
        )
        layer.load_state_dict(self._state(layer), assign=True)
        return layer

    def _check(self, layer_index: int) -> None:
        c, ratio = Checker("DeepseekV4MLAModules"), self.config.compress_ratio_of(layer_index)
        for name, part, needed in (
            ("compressor", self.compressor, ratio > 1), ("indexer", self.indexer, ratio == 4),
        ):  # fmt: skip
            expected = "a module" if needed else "None"
            got = "None" if part is None else "a module"
            c.require((part is not None) == needed, name, f"{expected} for compress ratio {ratio}", got)
        if self.indexer_rotary_emb is not None:
            same = self.indexer_rotary_emb.cos_sin_cache.data_ptr() == self.rotary_emb.cos_sin_cache.data_ptr()
            c.require(same, "indexer_rotary_emb", "None or the table of rotary_emb", "another")

    def _state(self, layer: DeepseekV4MultiHeadLatentAttentionWrapper) -> dict[str, torch.Tensor]:
        """The layer's tensors by its names."""
        parts = {"fused_wqa_wkv": self.fused_wqa_wkv, "wq_b": self.wq_b, "o_proj.wo_b": self.wo_b}
        found = {"q_norm_weight": self.q_norm.weight, "kv_norm_weight": self.kv_norm.weight}
        found["mla_attn.attn_sink"] = self.attn_sink[: layer.num_heads]
        for prefix, compressor in self._compressors():
            wkv_wgate, name = compressor.fused_wkv_wgate, prefix + "fused_wkv_wgate"
            found[name + ".weight"] = wkv_wgate.weight
            if wkv_wgate.weight.dtype == torch.float8_e4m3fn:
                found[name + ".weight"] = dequantize_weight(wkv_wgate.weight, _scale(name, wkv_wgate), torch.float32)
            found[prefix + "ape"], found[prefix + "norm_weight"] = compressor.ape, compressor.norm.weight
        if self.indexer is not None:
            parts["indexer.wq_b"], parts["indexer.weights_proj"] = self.indexer.wq_b, self.indexer.weights_proj
        for name, module in parts.items():
            found[name + ".weight"] = module.weight
            if module.weight.dtype == torch.float8_e4m3fn:
                found[name + ".scale"] = _scale(name, module)
        found["o_proj.wo_a"] = self.wo_a.weight
        if self.wo_a.weight.dtype == torch.float8_e4m3fn:
            found["o_proj.wo_a_scale"] = _scale("wo_a", self.wo_a)
        own = layer.state_dict()
        return {name: _as_own(name, tensor, own) for name, tensor in found.items()} | {
            name: tensor for name, tensor in own.items() if name.startswith("mla_attn.") and name not in found
        }

    def _compressors(self) -> Iterator[tuple[str, Any]]:
        if self.compressor is not None:
            yield "compressor.", self.compressor
        if self.indexer is not None:
            yield "indexer.compressor.", self.indexer.compressor


def _scale(name: str, module: Any) -> torch.Tensor:
    for attribute in ("scale", "weight_scale", "weight_scale_inv"):
        scale = getattr(module, attribute, None)
        if isinstance(scale, torch.Tensor):
            return ue8m0_scale(scale.view(torch.uint8)).float() if scale.dtype == torch.float8_e8m0fnu else scale
    return Checker("DeepseekV4MLAModules").fail(name, "scales beside an e4m3 weight", "none")


def _as_own(name: str, tensor: torch.Tensor, own: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """An engine's tensor in the shape of the layer's, and unless it may be either, in its dtype."""
    c = Checker("DeepseekV4MLAModules")
    wanted, tensor = own[name], tensor.detach()
    if tensor.numel() != wanted.numel():
        c.fail(name, f"shape {list(wanted.shape)}", list(tensor.shape))
    if (tensor.dtype == torch.float8_e4m3fn) != (wanted.dtype == torch.float8_e4m3fn):
        c.fail(name, f"dtype {wanted.dtype}", tensor.dtype, TypeError)
    if not tensor.is_floating_point():
        c.fail(name, "floating point numbers", tensor.dtype, TypeError)
    keeps = tensor.dtype == wanted.dtype or (name.endswith("norm_weight") and tensor.dtype == torch.float32)
    return (tensor if keeps else tensor.to(wanted.dtype)).reshape(wanted.shape)


# ---- the op at which an engine's compiler splits


class _Steps(threading.local):
    """Of a thread, the metadata of the steps it is in, the innermost last; None: a profiling run."""

    def __init__(self) -> None:
        self.metadata: list[Mapping[int, DeepseekV4Metadata] | None] = []


_steps = _Steps()
_layers: dict[str, tuple[DeepseekV4MultiHeadLatentAttentionWrapper, LayerCaches | None]] = {}


def register_layer(
    layer_name: str, layer: DeepseekV4MultiHeadLatentAttentionWrapper, caches: LayerCaches | None = None
) -> None:
    """Have `deepseek_v4_attention` find a layer, and its caches once there are any: call it again with them.

    The name keeps the layer until `unregister_layer`; another layer under it raises ValueError.
    """
    if layer_name in _layers and _layers[layer_name][0] is not layer:
        Checker("register_layer").fail("layer_name", "a name that no other layer has", repr(layer_name))
    _layers[layer_name] = layer, caches


def unregister_layer(layer_name: str) -> None:
    """Forget a layer; a name that nobody has is no error."""
    _layers.pop(layer_name, None)


@contextmanager
def forward_context(metadata: Mapping[int, DeepseekV4Metadata] | None) -> Iterator[None]:
    """The step that calls of `deepseek_v4_attention` on this thread belong to.

    metadata   by compress ratio, as `DeepseekV4MetadataBuilder.build_step` gives it; None: profiling run
    """
    _steps.metadata.append(metadata)
    try:
        yield
    finally:
        _steps.metadata.pop()


def deepseek_v4_attention(
    hidden_states: torch.Tensor, positions: torch.Tensor, out: torch.Tensor, layer_name: str
) -> None:
    """A registered layer's `attend`, as one op: an engine's torch.compile sees no more of it than its arguments, and
    may split its graph there.

    hidden_states   bf16 [T, hidden], after attn_norm
    positions       int64 [T]
    out             bf16 [T, heads or more, 512], mutated: what `project` of the layer takes
    layer_name      as in `register_layer`

    Metadata is that of `forward_context`. Raises ValueError or TypeError on arguments that do not fit or a name that
    nobody has, RuntimeError outside a `forward_context`.
    """
    _op(hidden_states, positions, out, layer_name)


def _check(hidden_states: torch.Tensor, positions: torch.Tensor, out: torch.Tensor, layer_name: str) -> Checker:
    c = Checker("deepseek_v4_attention")
    c.tensor("hidden_states", hidden_states, torch.bfloat16, ("T", None))
    c.tensor("positions", positions, torch.int64, ("T",))
    c.tensor("out", out, torch.bfloat16, ("T", None, HEAD_DIM))
    return c


def _attend(hidden_states: torch.Tensor, positions: torch.Tensor, out: torch.Tensor, layer_name: str) -> None:
    c = _check(hidden_states, positions, out, layer_name)
    if layer_name not in _layers:
        c.fail("layer_name", f"one of the {len(_layers)} registered layers", repr(layer_name))
    if not _steps.metadata:
        raise RuntimeError("deepseek_v4_attention: expected to be called within forward_context")
    layer, caches = _layers[layer_name]
    step = _steps.metadata[-1]
    if step is not None and layer.compress_ratio not in step:
        c.fail("layer_name", f"a layer of a kind that the step has ({sorted(step)})", layer.compress_ratio)
    layer.attend(positions, hidden_states, None if step is None else step[layer.compress_ratio], caches, out)


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define(
    "deepseek_v4_attention(Tensor hidden_states, Tensor positions, Tensor(a!) out, str layer_name) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
for _key in ("CPU", "CUDA"):
    _library.impl("deepseek_v4_attention", _attend, _key)


def _fake(hidden_states: torch.Tensor, positions: torch.Tensor, out: torch.Tensor, layer_name: str) -> None:
    _check(hidden_states, positions, out, layer_name)


torch.library.register_fake(f"{NAMESPACE}::deepseek_v4_attention", _fake, lib=_library)
_op = torch.ops.cute_kernels.deepseek_v4_attention.default
