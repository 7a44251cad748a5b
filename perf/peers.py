# SPDX-License-Identifier: Apache-2.0
"""Other projects whose kernels are timed beside ours, and which version of them it was."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextvars import ContextVar
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

PACKAGES = {
    "cublas": ("torch",),
    "deepgemm": ("vllm",),
    "deepgemm-flattened": ("vllm",),
    "deepgemm-pdl": ("vllm",),
    "flashmla": ("vllm",),
    "flashmla-and-planner": ("vllm",),
    "flashmla-decode": ("vllm",),
    "flashmla-flattened": ("vllm",),
    "flashmla-padded-flattened": ("vllm",),
    "flashmla-gathered": ("vllm",),
    "flashmla-padded": ("vllm",),
    "torch.compile": ("torch", "triton"),
    "vllm": ("vllm", "triton", "nvidia-cutlass-dsl"),
    "vllm-classes": ("vllm", "triton", "nvidia-cutlass-dsl"),
    "vllm-streams": ("vllm", "triton", "nvidia-cutlass-dsl"),
    "vllm-triton": ("vllm", "triton"),
    "vllm-triton-plain": ("vllm", "triton"),
    "vllm-cutedsl": ("vllm", "nvidia-cutlass-dsl"),
}
"""Peer -> what its kernel depends on: module or distribution names, its own project first. A peer that is not named
here is its project's name before the first "-"."""

MOST_COMPILERS = 12
"""Processes that compile DeepGEMM's kernels: each has a CUDA context of its own."""

AND = " + "
"""Between the names of peers that are timed as one."""


ABSENT = "cannot be imported"
"""What the reason begins with why a peer was skipped that was not there."""


class PeerMissing(RuntimeError):
    """A peer that is to be measured cannot be imported."""


_MISSING_ALLOWED: ContextVar[bool] = ContextVar("whether a peer that cannot be imported is skipped", default=False)


@contextlib.contextmanager
def missing_allowed(allowed: bool = True) -> Iterator[None]:
    """Whether, in the block, a peer that cannot be imported is skipped or ends the sweep."""
    token = _MISSING_ALLOWED.set(allowed)
    try:
        yield
    finally:
        _MISSING_ALLOWED.reset(token)


def load_peer(name: str, loader: Callable[[], T]) -> T | str:
    """What a peer's loader returns, or why it cannot where peers may be missing (`missing_allowed`). Else PeerMissing:
    a ratio to the peers that happen to be there says nothing."""
    try:
        return loader()
    except Exception as error:  # an installation that is not whole fails in many ways
        return load_failure(name, error)


def load_failure(name: str, error: Exception) -> str:
    """Why a peer is not there, where peers may be missing. Else PeerMissing."""
    reason = f"{ABSENT}: {type(error).__name__}: {error}"
    if not _MISSING_ALLOWED.get():
        raise PeerMissing(f"the peer {name} {reason}") from error
    return reason


def without_dependent_launch(run: Callable[..., T], module: str) -> Callable[..., T]:
    """vLLM's function, which asks the platform whether to launch as a dependent, told no. module: where it asks."""
    asked: Any = importlib.import_module(module)

    class Platform:
        def __getattr__(self, name: str) -> Any:
            return (lambda: False) if name == "is_arch_support_pdl" else getattr(platform, name)

    platform, plain = asked.current_platform, Platform()

    def call(*args: Any) -> T:
        asked.current_platform = plain
        try:
            return run(*args)
        finally:
            asked.current_platform = platform

    return call


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


class Product(NamedTuple):
    """An FP8 product: a linear's, or of so many groups at once."""

    rows: int
    groups: int
    outputs: int
    columns: int
    is_grouped: bool = False


def compile_products(products: Iterable[Product]) -> None:
    """Let DeepGEMM, which compiles a kernel when it is first called, compile those of some products into its cache on
    disk, in processes side by side: one by one that takes minutes. What cannot be compiled fails when it is called."""
    # by rows: products of one weight may take the same kernel, which two processes at a time would compile twice
    wanted = sorted(set(products))
    count = min(os.cpu_count() or 1, MOST_COMPILERS, max(len(wanted), 1))
    executor = ProcessPoolExecutor(count, mp_context=get_context("spawn"))
    with contextlib.suppress(BrokenExecutor), executor as pool:
        for done in [pool.submit(_compile, product) for product in wanted]:
            with contextlib.suppress(Exception):
                done.result()


def _compile(product: Product) -> None:
    import torch

    rows, groups, outputs, columns, is_grouped = product
    codes = partial(torch.zeros, dtype=torch.float8_e4m3fn, device="cuda")
    a, b = codes(groups, rows, columns).transpose(0, 1), codes(groups, outputs, columns)
    padded = -(-rows // 4) * 4
    a_scale = torch.ones(groups, columns // 128, padded, device="cuda").permute(2, 0, 1)[:rows]
    b_scale = torch.ones(groups, -(-outputs // 128), columns // 128, device="cuda")
    out = torch.empty(rows, groups, outputs, dtype=torch.bfloat16, device="cuda")
    ops = deepgemm()
    if is_grouped:
        ops.fp8_einsum("bhr,hdr->bhd", a, a_scale, b, b_scale, out, None, [1, 128, 128])
    else:
        ops.fp8_fp4_gemm_nt(a[:, 0], a_scale[:, 0], b[0], b_scale[0], out[:, 0])
    torch.cuda.synchronize()
