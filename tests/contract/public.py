# SPDX-License-Identifier: Apache-2.0
"""Good calls of the functions that users import, from the calls their ops are verified with."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from cute_kernels.runtime import registry
from cute_kernels.runtime.ops import Op

PACKAGES = ("compressor", "indexer", "indices", "insert_compress", "kv_cache", "linear", "norm", "output", "sparse_mla")
Values = dict[str, Any]


def functions() -> dict[str, tuple[Callable[..., Any], Op]]:
    """Public function -> the op that it calls with the arguments `named` makes."""
    found = {}
    ops = registry.all_ops()
    for package in PACKAGES:
        for name, function in vars(importlib.import_module(f"cute_kernels.{package}.ops")).items():
            op = ops.get(OTHER_OPS.get(name, name))
            if op is not None and inspect.isfunction(function):
                found[name] = (function, op)
    return found


OTHER_OPS = {
    "bf16_linear": "bf16_gemm",
    "fp8_bf16_linear": "fp8_bf16_gemm",
    "fp8_grouped_linear": "fp8_gemm",
    "fp8_linear": "fp8_gemm",
    "fp8_linear_squares": "fp8_gemm_squares",
    "fused_indexer_q_rope_quant": "fused_indexer_q_rope_quant_mxfp4",
}


def named(function: Callable[..., Any], op: Op, args: tuple[Any, ...], allocates: bool) -> Values | None:
    """Keyword arguments of `function` for a call of its op; results that it can allocate are left out if `allocates`.
    None: the function does not make this call."""
    given = dict(zip((a.name for a in op.overload._schema.arguments), args, strict=True))
    special = SPECIAL.get(function.__name__, lambda given: {})(given)
    if special is None:
        return None
    written = op.mutated(args)
    values = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in special:
            values[name] = special[name]
        elif name in given:
            is_default = parameter.default is None and name in written
            if not (is_default and allocates):
                values[name] = given[name]
    return values


def scalars_of(function: Callable[..., Any]) -> dict[str, bool]:
    parameters = inspect.signature(function).parameters
    return {name: "Tensor" not in str(p.annotation) and p.annotation != "Any" for name, p in parameters.items()}


def defaults(function: Callable[..., Any]) -> Values:
    parameters = inspect.signature(function).parameters
    return {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}


def _pair(first: Any, second: Any) -> Any:
    return first if second is None else (first, second)


def _compress(v: Values) -> Values:
    head = v["rms_norm_weight"].shape[0]
    widths = {
        "fp8_ds_mla/1": (576, 8),
        "indexer_fp8/1": (128, 4),
        "indexer_mxfp4/1": (64, 4),
        "indexer_mxfp4_wide/1": (64, 4),
    }
    stride, scales = widths.get(v["kv_format"], (head * v["kv_cache"].element_size(), 0))
    blocks = {"indexer_fp8/1": 128, "indexer_mxfp4/1": 32, "indexer_mxfp4_wide/1": 32}
    return {
        "num_actual": v["slot_mapping"].shape[0],
        "block_size": v["state_cache"].shape[1],
        "state_width": v["state_cache"].shape[2] // 2,
        "k_cache_metadata": SimpleNamespace(slot_mapping=v["kv_slot_mapping"]),
        "pdl_kwargs": None,
        "head_dim": head,
        "rope_head_dim": 64,
        "overlap": v["compress_ratio"] == 4,
        "use_fp4_cache": "mxfp4" in v["kv_format"],
        "quant_block": blocks.get(v["kv_format"], 64),
        "token_stride": stride,
        "scale_dim": scales,
    }


def _topk(v: Values) -> Values:
    strides = {"stride0": v["logits"].stride(0), "stride1": v["logits"].stride(1)}
    return strides | ({"next_n": v["seq_lens"].shape[1]} if "seq_lens" in v else {})


def _attention(v: Values) -> Values:
    quant = v["positions"], v["cos_sin_cache"], v["out_scale"]
    special: Values = {"output_quant": None if quant[0] is None else quant}
    if quant[0] is not None:
        special["out"] = v["out"]
    if "q_squares" in v:
        special["q_norm"] = None if v["q_squares"] is None else (v["q_squares"], v["q_norm_eps"])
    return special


def _step(v: Values) -> Values:
    tables = {
        f"{kind}_block_tables": tuple(v[f"{kind}_{t}_block_table"] for t in ("swa", "compressed", "state"))
        for kind in ("c4", "c128")
    }
    return {name: None if table[0] is None else table for name, table in tables.items()} | {"out": v["buffer"]}


def _one_group(v: Values) -> Values | None:
    if v["a"].shape[1] != 1 or v["out_scale"] is not None:
        return None
    return {
        "a": v["a"][:, 0],
        "a_scale": v["a_scale"][:, 0],
        "weight": v["weight"][0],
        "weight_scale": v["weight_scale"][0],
        "out": v["out"][:, 0],
    }


SPECIAL: dict[str, Callable[[Values], Values | None]] = {
    "compress_norm_rope_store": _compress,
    "save_partial_states": lambda v: {"state_width": v["kv"].shape[1]},
    "all_visible_entries": lambda v: {"k": v["out"].shape[1]},
    "fused_indexer_q_rope_quant": lambda v: {
        "use_fp4": True, "weights_out_dtype": v["weights_out"].dtype,
        "out": ((v["q_quant"], v["q_scale"]), v["weights_out"]),
    },
    "mqa_logits": lambda v: {"q": _pair(v["q"], v["q_scale"]), "kv": (v["k"], v["k_scale"])},
    "paged_mqa_logits": lambda v: {"q": _pair(v["q"], v["q_scale"]), "schedule_metadata": None},
    "score_top_k_decode": lambda v: {"q": _pair(v["q"], v["q_scale"]), "k": v["out"].shape[1]},
    "score_top_k_prefill": lambda v: {
        "q": _pair(v["q"], v["q_scale"]), "kv": (v["k"], v["k_scale"]), "k": v["out"].shape[1],
    },
    "select_candidate_blocks": lambda v: {
        "num_blocks": v["out"].shape[1],
    },
    "top_k_per_row_decode": _topk,
    "top_k_per_row_prefill": _topk,
    "build_flashinfer_mixed_sparse_indices": lambda v: {"out": (v["sparse_indices"], v["sparse_topk_lens"])},
    "build_step_metadata": _step,
    "combine_topk_swa_indices": lambda v: {"out": (v["out_indices"], v["out_lens"])},
    "fused_qkv_insert_compress_index": lambda v: {"out": (v["index_q_quant"], v["index_weights_out"])},
    "fused_mtp_input_rmsnorm": lambda v: {"out": (v["enorm_out"], v["hnorm_out"])},
    "fused_q_kv_rmsnorm": lambda v: {"out": (v["qr_out"], v["kv_out"])},
    "fp8_linear": _one_group,
    "fp8_linear_squares": lambda v: {"blocks": v["squares"].shape[1]},
    "sparse_mla_decode": _attention,
    "sparse_mla_prefill": _attention,
    "sparse_mla_prefill_paged": _attention,
}  # fmt: skip
