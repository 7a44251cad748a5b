# SPDX-License-Identifier: Apache-2.0
"""What many tests need: poisoned pools, opcheck, random data with the values that break kernels."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.library import opcheck

FORKS = """
import os, sys, warnings, torch
for code in {codes!r}:
    with warnings.catch_warnings():
        # from Python 3.12 on: threads of libraries hold nothing that a child needs
        warnings.filterwarnings("ignore", message=".*multi-threaded", category=DeprecationWarning)
        child = os.fork()
    if not child:
        exec(code, {{"__name__": "__main__"}})
        sys.exit()
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
"""

POISON_BYTE = 0xA5

traces_all = False
"""--thorough: conftest.py sets it."""


def poisoned_pool(
    fmt: Any, num_blocks: int, block_size: int, extra_stride: int = 0, device: str = "cpu"
) -> torch.Tensor:
    """A pool of `fmt` whose every byte, padding included, is POISON_BYTE; `extra_stride` adds bytes to each page."""
    cache = fmt.allocate(num_blocks, block_size, device, fmt.page_stride(block_size) + extra_stride)
    raw_bytes(cache).fill_(POISON_BYTE)
    return cache


def raw_bytes(cache: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory behind a pool (or any tensor), page padding included, as uint8 [n]."""
    storage = cache.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage, 0, (storage.nbytes(),))


def run_in_forks(codes: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Each, at the root of the repository, in a process of its own in which nothing but torch is imported: once for all
    of them. Status 1 if one raises."""
    command = [sys.executable, "-c", FORKS.format(codes=list(codes))]
    return subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's elements, to compare floats without mercy."""
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def check_op(name: str, *args: Any, traces: bool | None = None) -> None:
    """torch.library.opcheck of cute_kernels::<name> with schema-order arguments. traces: whether the call is traced as
    torch.compile does, which takes longest; None is with --thorough. tests/contract/test_opcheck.py traces a call of
    every op, and tests of the ops compile functions that call them."""
    overload = getattr(torch.ops.cute_kernels, name).default
    utils = ["test_autograd_registration", "test_faketensor"]
    utils += ["test_aot_dispatch_dynamic"] if traces or (traces is None and traces_all) else []
    if not any(isinstance(a, torch.Tensor) and a.dtype == torch.float8_e4m3fn for a in args):
        opcheck(overload, args, test_utils=("test_schema", *utils))
        return
    # opcheck's schema test cannot compare float8 tensors: compare the bytes of what must not change instead.
    opcheck(overload, args, test_utils=utils)
    inputs = [
        a
        for argument, a in zip(overload._schema.arguments, args, strict=True)
        if isinstance(a, torch.Tensor) and not (argument.alias_info and argument.alias_info.is_write)
    ]
    before = [bits(a).clone() for a in inputs]
    overload(*args)
    assert all(torch.equal(bits(a), old) for a, old in zip(inputs, before, strict=True))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def spread(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal values, rows of very different magnitudes, with exact zeros, a zero row and a tiny row among them."""
    g = generator(seed)
    x = torch.randn(shape, generator=g)
    magnitude = torch.exp2(torch.randint(-18, 12, (*shape[:-1], 1), generator=g).float())
    x = x * magnitude
    x[torch.rand(shape, generator=g) < 0.02] = 0.0
    flat = x.view(-1, shape[-1])
    if flat.shape[0] > 2:
        flat[1] = 0.0
        flat[2] *= 1e-6
    return x.to(dtype)
