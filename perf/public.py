# SPDX-License-Identifier: Apache-2.0
"""Calls of the functions that users call, with the arguments of ops: what an eager call costs the host is theirs."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import cute_kernels
from cute_kernels import formats
from cute_kernels.runtime.ops import OPS

Call = Callable[[], Any]

Given = dict[str, Any]
"""An op's arguments by name."""


def bind(op: str, args: tuple[Any, ...]) -> Call:
    """The public function of an op with its arguments, given in the schema's order, as a call that takes none."""
    names = [argument.name for argument in OPS[op].overload._schema.arguments]
    given: Given = dict(zip(names, args, strict=True))
    return _OTHERWISE[op](given) if op in _OTHERWISE else _by_name(op, given)


def _by_name(op: str, given: Given) -> Call:
    """Arguments keep their names; results that the function does not name are its `out`."""
    function = getattr(cute_kernels, op)
    known = inspect.signature(function).parameters
    named = {name: value for name, value in given.items() if name in known}
    mutated = {a.name for a in OPS[op].overload._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    rest = {name: value for name, value in given.items() if name not in known}
    if rest.keys() - mutated:
        raise ValueError(f"{op}: the public function does not take {', '.join(sorted(rest.keys() - mutated))}")
    if rest:
        named["out"] = tuple(rest.values())
    return partial(function, **named)


def _attention(op: str, given: Given) -> Call:
    """What norms queries and what quantizes results are pairs and triples of the function."""
    squares, eps = given.pop("q_squares", None), given.pop("q_norm_eps", 0.0)
    quant = tuple(given.pop(name) for name in ("positions", "cos_sin_cache", "out_scale"))
    more = {} if squares is None else {"q_norm": (squares, eps)}
    more |= {} if quant[0] is None else {"output_quant": quant}
    return partial(getattr(cute_kernels, op), return_lse=given["lse"] is not None, **more, **given)


def _pair(values: Any, scales: Any) -> Any:
    """Queries with their scales, where they have some."""
    return values if scales is None else (values, scales)


def _linear(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module("cute_kernels.linear.ops"), name)
    return function


def _fp8_gemm(given: Given) -> Call:
    rest = {name: given[name] for name in ("batch_invariant", "use_pdl")}
    operands = [given[name] for name in ("a", "a_scale", "weight", "weight_scale")]
    out, out_scale = given["out"], given["out_scale"]
    if given["a"].shape[1] > 1 or out_scale is not None:
        return partial(
            _linear("fp8_grouped_linear"), *operands, out_dtype=out.dtype, out=out, out_scale=out_scale, **rest
        )
    a, a_scale, weight, weight_scale = operands
    single = a[:, 0], a_scale[:, 0], weight[0], weight_scale[0]
    return partial(_linear("fp8_linear"), *single, out_dtype=out.dtype, out=out[:, 0], **rest)


def _bf16_gemm(given: Given) -> Call:
    return partial(_linear("bf16_linear"), out_dtype=given["out"].dtype, **given)


def _fp8_gemm_squares(given: Given) -> Call:
    return partial(_linear("fp8_linear_squares"), blocks=given["squares"].shape[1], **given)


def _fp8_bf16_gemm(given: Given) -> Call:
    return partial(_linear("fp8_bf16_linear"), **given)


def _quantize(given: Given) -> Call:
    return partial(_linear("quantize_fp8_1x128"), **given)


def _indexer_query(given: Given) -> Call:
    q, scale, weights = given.pop("q_quant"), given.pop("q_scale", None), given.pop("weights_out")
    results = {"weights_out_dtype": weights.dtype, "out": (_pair(q, scale), weights)}
    return partial(cute_kernels.fused_indexer_q_rope_quant, use_fp4=scale is not None, **results, **given)


def _inv_rope(given: Given) -> Call:
    return partial(cute_kernels.fused_inv_rope_fp8_quant, quantize=False, **given)


def _all_visible(given: Given) -> Call:
    return partial(cute_kernels.all_visible_entries, k=given["out"].shape[1], **given)


def _select_blocks(given: Given) -> Call:
    return partial(cute_kernels.select_candidate_blocks, num_blocks=given["out"].shape[1], **given)


def _top_k(op: str, given: Given) -> Call:
    stride0, stride1 = given["logits"].stride()
    next_n = {"next_n": given["seq_lens"].shape[1]} if op == "top_k_per_row_decode" else {}
    return partial(getattr(cute_kernels, op), stride0=stride0, stride1=stride1, **next_n, **given)


def _contiguous(op: str, given: Given) -> Call:
    """Of keys in one piece; picks say by their columns how many."""
    q, kv = _pair(given.pop("q"), given.pop("q_scale")), (given.pop("k"), given.pop("k_scale"))
    k = {"k": given["out"].shape[1]} if op == "score_top_k_prefill" else {}
    return partial(getattr(cute_kernels, op), q=q, kv=kv, **k, **given)


def _paged(op: str, given: Given) -> Call:
    q = _pair(given.pop("q"), given.pop("q_scale"))
    more = {"k": given["out"].shape[1]} if op == "score_top_k_decode" else {"schedule_metadata": None}
    return partial(getattr(cute_kernels, op), q=q, **more, **given)


def _save(given: Given) -> Call:
    return partial(cute_kernels.save_partial_states, state_width=given["state_cache"].shape[-1] // 2, **given)


def _compress(given: Given) -> Call:
    """The baseline's signature, which says many things twice."""
    state, slots, fmt = given["state_cache"], given.pop("kv_slot_mapping"), formats.FORMATS[given["kv_format"]]
    head_dim = given["rms_norm_weight"].shape[0]
    use_fp4 = given["kv_format"].startswith("indexer_mxfp4")
    sizes: tuple[int, ...] = (64, 576, 8) if head_dim == formats.HEAD_DIM else (32, 64, 4) if use_fp4 else (128, 128, 4)
    function: Callable[..., None] = cute_kernels.compress_norm_rope_store
    return partial(
        function,
        num_actual=given["slot_mapping"].shape[0],
        block_size=state.shape[1],
        state_width=state.shape[-1] // 2,
        k_cache_metadata=SimpleNamespace(slot_mapping=slots),
        pdl_kwargs=None,
        head_dim=head_dim,
        rope_head_dim=formats.ROPE_DIM,
        overlap=given["compress_ratio"] == 4,
        use_fp4_cache=use_fp4,
        **dict(zip(("quant_block", "token_stride", "scale_dim"), sizes, strict=True)),
        **(given | {"kv_format": fmt.id}),
    )


def _step(given: Given) -> Call:
    kinds = ("swa_block_table", "compressed_block_table", "state_block_table")
    for ratio in ("c4", "c128"):
        tables = tuple(given.pop(f"{ratio}_{kind}") for kind in kinds)
        given[f"{ratio}_block_tables"] = None if tables[0] is None else tables
    return partial(cute_kernels.build_step_metadata, out=given.pop("buffer"), **given)


_OTHERWISE: Mapping[str, Callable[[Given], Call]] = {
    "all_visible_entries": _all_visible,
    "bf16_gemm": _bf16_gemm,
    "build_step_metadata": _step,
    "compress_norm_rope_store": _compress,
    "fp8_bf16_gemm": _fp8_bf16_gemm,
    "fp8_gemm": _fp8_gemm,
    "fp8_gemm_squares": _fp8_gemm_squares,
    "fused_indexer_q_rope_quant_fp8": _indexer_query,
    "fused_indexer_q_rope_quant_mxfp4": _indexer_query,
    "fused_inv_rope": _inv_rope,
    "mqa_logits": partial(_contiguous, "mqa_logits"),
    "paged_mqa_logits": partial(_paged, "paged_mqa_logits"),
    "quantize_fp8_1x128": _quantize,
    "save_partial_states": _save,
    "score_candidates_decode": partial(_paged, "score_top_k_decode"),
    "score_candidates_prefill": partial(_contiguous, "score_top_k_prefill"),
    "score_top_k_decode": partial(_paged, "score_top_k_decode"),
    "score_top_k_prefill": partial(_contiguous, "score_top_k_prefill"),
    "select_candidate_blocks": _select_blocks,
    "sparse_mla_decode": partial(_attention, "sparse_mla_decode"),
    "sparse_mla_prefill": partial(_attention, "sparse_mla_prefill"),
    "sparse_mla_prefill_paged": partial(_attention, "sparse_mla_prefill_paged"),
    "top_k_per_row_decode": partial(_top_k, "top_k_per_row_decode"),
    "top_k_per_row_prefill": partial(_top_k, "top_k_per_row_prefill"),
}
"""Op -> its public function, where arguments have other names or shapes."""
