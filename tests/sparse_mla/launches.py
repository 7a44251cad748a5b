# SPDX-License-Identifier: Apache-2.0
"""Stands for a Hopper GPU: keeps what ops would have launched."""

from __future__ import annotations

from typing import Any

import pytest

from cute_kernels.runtime.ops import OPS

SMS = 132

Launches = list[tuple[Any, dict[str, Any]]]


def keep_launches(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> Launches:
    """(key, arguments by name) of all launches, in order."""
    from cute_kernels.sparse_mla import launch as module
    from cute_kernels.sparse_mla import select

    kept: Launches = []
    monkeypatch.setattr(select, "arch_of", lambda index: "sm_90a")
    monkeypatch.setattr(module, "multiprocessors", lambda index: SMS)
    monkeypatch.setattr(
        module, "launch_key", lambda key, index, *args: kept.append((key, dict(zip(names, args, strict=True))))
    )
    return kept


def launch(op: str, args: dict[str, Any]) -> dict[str, Any]:
    """Do what the op does with these arguments. Returns them."""
    OPS[op].check(*args.values())
    kernel = OPS[op].load_kernel()
    call = OPS[op].call_type(*args.values())
    assert kernel.why_not(call) == ""
    kernel.launch(call)
    return args
