"""Stands for a Hopper GPU: keeps what ops would have launched."""

from __future__ import annotations

from typing import Any

import pytest

from cute_kernels.runtime.ops import OPS

SMS = 132

Launches = list[tuple[Any, dict[str, Any]]]


def keep_launches(monkeypatch: pytest.MonkeyPatch, module: Any, names: tuple[str, ...]) -> Launches:
    """(key, arguments by name) of all launches of an op's module, in order."""
    from cute_kernels.sparse_mla import select

    kept: Launches = []
    monkeypatch.setattr(select, "arch_of", lambda index: "sm_90a")
    monkeypatch.setattr(module, "multiprocessors", lambda index: SMS)
    monkeypatch.setattr(
        module, "launch_key", lambda key, index, *args: kept.append((key, dict(zip(names, args, strict=True))))
    )
    return kept


def launch(op: str, module: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Do what the op does with these arguments. Returns them."""
    OPS[op].check(*args.values())
    supported, why = module.supports(*args.values())
    assert supported, why
    module.launch(*args.values())
    return args
