# SPDX-License-Identifier: Apache-2.0
"""Layers whose context several ranks share: one process's results for any division, and errors on all ranks."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from layers import Communicator, CommunicatorError, ContextParallel, ThreadCommunicator
from tests.layers.context_engine import ContextEngine, Steps, context_steps, layer_of, together
from tests.layers.engine import CONFIG, KINDS, Request, hidden_rows, make_layer, relative, same_bytes
from tests.layers.ranks import run_threads

SHARED: dict[str, Any] = {"cp_kv": "sharded", "cp_prefill": "zigzag"}
FORMS: dict[str, dict[str, Any]] = {
    "replicated": {"cp_prefill": "zigzag"},
    "sharded": SHARED,
    "decode alone": {"cp_kv": "sharded"},
    "own heads": {"cp_kv": "sharded", "cp_heads": "own"},
}


def assert_as_one(results: list[Any], whole: dict[str, Any], options: dict[str, Any], limit: float = 4e-3) -> None:
    """Caches and picks are one process's, outputs nearly, and all ranks hold the same bytes."""
    for held in results:
        if isinstance(held, BaseException):
            raise held
        assert same_bytes(held["outputs"], results[0]["outputs"])
        assert same_bytes(held["picks"], whole["picks"])
        assert same_bytes(held["window"], whole["window"])
    assert same_bytes(together(results, options), whole["entries"])
    for ours, theirs in zip(results[0]["outputs"], whole["outputs"], strict=True):
        assert ours.dtype == torch.bfloat16
        assert relative(ours, theirs) <= limit


SAMPLE = (2, 4, "sharded", "fp8"), (2, 4, "own heads", "mxfp4"), (2, 128, "sharded", "fp8")
"""What runs without --thorough."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("index_cache", ["fp8", "mxfp4"])
@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_every_kind_and_form(size: int, ratio: int, index_cache: str, form: str, thorough: bool) -> None:
    if ratio != 4 and index_cache != "fp8":
        pytest.skip("has no indexer")
    if not thorough and (size, ratio, form, index_cache) not in SAMPLE:
        pytest.skip("needs --thorough")
    options: dict[str, Any] = {"config": replace(CONFIG, o_groups=4), "index_cache": index_cache}
    whole = context_steps(None, ratio, options)
    # outputs of one rank's heads are its own; partial sums of tensor-parallel ranks are rounded
    limit = 4e-3 if form == "own heads" else 1e-4
    options |= FORMS[form]
    assert_as_one(run_threads(size, context_steps, ratio, options), whole, options, limit)
