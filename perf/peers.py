"""Other projects whose kernels are timed beside ours, and which version of them it was."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from typing import Any

PACKAGES = {
    "deepgemm": ("vllm",),
    "deepgemm-pdl": ("vllm",),
    "flashmla": ("vllm",),
    "flashmla-and-planner": ("vllm",),
    "flashmla-gathered": ("vllm",),
    "flashmla-padded": ("vllm",),
    "torch.compile": ("torch", "triton"),
    "vllm": ("vllm", "triton", "nvidia-cutlass-dsl"),
    "vllm-streams": ("vllm", "triton", "nvidia-cutlass-dsl"),
    "vllm-triton": ("vllm", "triton"),
    "vllm-cutedsl": ("vllm", "nvidia-cutlass-dsl"),
}
"""Peer -> what its kernel depends on: module or distribution names, its own project first. A peer that is not named
here is its project's name before the first "-"."""

AND = " + "
"""Between the names of peers that are timed as one."""


def versions(peer: str) -> dict[str, str | None]:
    """Package -> version, of an imported peer."""
    packages = [PACKAGES.get(part, (part.partition("-")[0],)) for part in peer.split(AND)]
    return {package: _version(package) for several in packages for package in several}


def _version(package: str) -> str | None:
    found = getattr(sys.modules.get(package), "__version__", None)
    if found is not None:
        return str(found)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def deepgemm() -> Any:
    """DeepGEMM's ops, as vLLM registers them. An installation that is not whole fails in many ways."""
    import torch

    if not hasattr(torch.ops.deep_gemm, "fp8_fp4_mqa_logits"):
        try:
            importlib.import_module("vllm.third_party.deep_gemm")
        except ImportError:
            load = importlib.import_module("vllm._load")
            load.load("deep_gemm/_C_extension.abi3.so")
            torch.ops.deep_gemm.init(os.path.join(load.LIB, "deep_gemm"), "deep_gemm")
    return torch.ops.deep_gemm
