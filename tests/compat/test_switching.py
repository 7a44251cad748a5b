# SPDX-License-Identifier: Apache-2.0
"""docs/switching.md: every difference has a call before and one after, and those after can be made."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import cute_kernels
from cute_kernels.compat import vllm

PAGE = (Path(__file__).parents[2] / "docs" / "switching.md").read_text(encoding="utf-8")
PARTS = {part.splitlines()[0]: part for part in PAGE[PAGE.index("## One by one") :].split("\n### ")[1:]}
MODULES = {"FlashMLA": "flash_mla", "DeepGEMM": "deep_gemm", "FlashInfer": "flashinfer"}
NOT_MENTIONED = {
    "FlashMLASchedMeta",
    "MXFP4_BLOCK_SIZE",
    "build_c128a_topk_metadata",
    "fp8_mqa_logits",
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert",
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert",
    "fused_inv_rope_fp8_quant",
    "fused_mtp_input_rmsnorm",
    "fused_q_kv_rmsnorm",
    "mtp_shared_head_rmsnorm",
}
"""What vLLM has under the same name with the same arguments and results."""


def examples(part: str) -> list[tuple[str, str]]:
    """(call, "before" or "after") of the indented lines."""
    return re.findall(r"^    (.+?)  # (before|after)$", part, re.M)


def call_of(line: str) -> ast.Call:
    statement = ast.parse(line).body[0]
    value = getattr(statement, "value", None)
    assert isinstance(value, ast.Call), line
    return value


@pytest.mark.parametrize("title", PARTS)
def test_calls_come_in_pairs(title: str) -> None:
    part = PARTS[title]
    kinds = [kind for _, kind in examples(part)]
    assert kinds == ["before", "after"] * (len(kinds) // 2)
    assert len(kinds) == len(re.findall(r"^    ", part, re.M))
    paragraphs = [text for text in part.split("\n\n")[1:] if not text.startswith("    ")]
    assert len(paragraphs) - len(kinds) // 2 in (0, 1), "a paragraph for each pair, and perhaps one for all"


@pytest.mark.parametrize("title", PARTS)
def test_calls_after_the_switch_can_be_made(title: str) -> None:
    module = importlib.import_module(f"cute_kernels.compat.{MODULES.get(title, 'vllm')}")
    for line in [line for line, kind in examples(PARTS[title]) if kind == "after"]:
        call = call_of(line)
        *of, name = ast.unparse(call.func).split(".")
        assert of in ([], ["cute_kernels"]), line
        home = next(h for h in ([cute_kernels] if of else [module, vllm]) if hasattr(h, name))
        parameters = inspect.signature(getattr(home, name)).parameters
        assert {keyword.arg for keyword in call.keywords} <= set(parameters), line
        assert len(call.args) <= len(parameters), line


def test_every_function_is_here_or_has_no_difference() -> None:
    named = set(re.findall(r"\w+", PAGE[PAGE.index("## One by one") :]))
    for module in (*MODULES.values(), "vllm"):
        exported = set(importlib.import_module(f"cute_kernels.compat.{module}").__all__)
        missing = exported - named - NOT_MENTIONED
        assert missing == set(), module
