# SPDX-License-Identifier: Apache-2.0
"""On a machine with a GPU, every call of these tests runs there too, and must leave what it leaves on the CPU."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.compat.agreement import tensors
from tests.goldens.records import on

MODULES = ("deep_gemm", "flash_mla", "flashinfer", "vllm")
ROUNDED = {
    "deepseek_v4_fp8_einsum": 2**-7,
    "flash_mla_sparse_fwd": 2**-7,
    "flash_mla_with_kvcache": 2**-7,
    "trtllm_batch_decode_sparse_mla_dsv4": 2**-7,
    "fp8_fp4_mqa_logits": 1e-4,
    "fp8_fp4_paged_mqa_logits": 1e-4,
    "fp8_mqa_logits": 1e-4,
    "fp8_paged_mqa_logits": 1e-4,
}
"""Name -> how far results may be off, of the largest one: tensor cores add in an order of their own."""

QUERIES = 2**-7
"""The same of the inserts' queries, whose norm may be rounded in another order."""

COUNTED = {
    "test_batch_invariant_means_one_split",
    "test_dependent_launches",
    "test_inserts_start_early_only_behind_slots_that_are_there",
    "test_int64_indices_in_a_graph",
}
"""Tests that count or capture calls."""


class DependentLaunches(TorchDispatchMode):
    """Every op inside gets this use_pdl, whatever it was called with."""

    def __init__(self, use_pdl: bool) -> None:
        super().__init__()
        self.use_pdl = use_pdl

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        if func.namespace == "cute_kernels" and "use_pdl" in names:
            place = names.index("use_pdl")
            args = (*args[:place], self.use_pdl, *args[place + 1 :])
        return func(*args, **(kwargs or {}))


def same(name: str, got: Any, want: Any) -> None:
    """Tensors in nested values agree: in every bit, or as far as the rounding of `name` allows."""
    for a, b in zip(tensors(got), tensors(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        bound = ROUNDED.get(name, QUERIES if "qnorm" in name else 0.0)
        if bound and a.dtype in (torch.bfloat16, torch.float32):
            finite = b.isfinite()
            off, least = (a[finite].float() - b[finite].float()).abs(), b[finite].float().abs()
            assert bool((off <= bound * (least.amax() if least.numel() else 0.0)).all()), name
        else:
            assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), name


def is_defined(name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether results have no rows or columns that nobody writes."""
    given = inspect.signature(function).bind(*args, **kwargs)
    given.apply_defaults()
    if "mqa_logits" in name:
        return bool(given.arguments.get("clean_logits", False))
    return given.arguments.get("num_rows") is None or "mixed" not in name


def also_on_gpu(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, called on a GPU with copies of its arguments first, with dependent launches and without."""

    @wraps(function)
    def both(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not any(True for _ in tensors([args, kwargs])):
            return function(*args, **kwargs)
        runs = []
        for use_pdl in (False, True):
            given = on("cuda", (args, kwargs))
            try:
                with DependentLaunches(use_pdl):
                    result = function(*given[0], **given[1])
            except (TypeError, ValueError, NotImplementedError) as error:
                with pytest.raises(type(error)):
                    function(*on("cpu", args), **on("cpu", kwargs))
                continue
            runs.append(on("cpu", (result, given)))
        result = function(*args, **kwargs)
        for run in runs:
            if is_defined(name, function, args, kwargs):
                same(name, run[0], result)
            same(name, run[1], (args, kwargs))
        return result

    return both


@pytest.fixture(autouse=True)
def every_call_on_the_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available() and request.function.__name__ not in COUNTED:
        for module in [importlib.import_module(f"cute_kernels.compat.{name}") for name in MODULES]:
            for name in module.__all__:
                function = getattr(module, name)
                if inspect.isfunction(function):
                    doubled = also_on_gpu(name, function)
                    monkeypatch.setattr(module, name, doubled)
                    if getattr(request.module, name, None) is function:
                        monkeypatch.setattr(request.module, name, doubled)
