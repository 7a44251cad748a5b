# SPDX-License-Identifier: Apache-2.0
"""Runs the experiments on the GPU at hand. Each is one verdict of `python -m cute_kernels verify`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from cute_kernels.isa_probes import conversions, copies, products
from cute_kernels.runtime.arch import BLACKWELL, arch_of
from cute_kernels.runtime.compile import launch
from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.verify import Verdict, describe

ARCHS = BLACKWELL
"""Whose facts they are."""

PREFIX = "fact "
NAMES = tuple(PREFIX + name for kind in (conversions, copies, products) for name in kind.NAMES)


def key_of(arch: str, name: str) -> KernelKey:
    """The kernel of an experiment; name: one of NAMES."""
    from cute_kernels.isa_probes.kernels import ConversionKey, ProductKey, TransferKey

    name = name.removeprefix(PREFIX)
    if name in conversions.NAMES:
        return ConversionKey(arch, name)
    return TransferKey(arch, name) if name in copies.NAMES else ProductKey(arch, name)


def keys(arch: str) -> list[KernelKey]:
    """All kernels of an architecture; none where they are no facts."""
    return [key_of(arch, name) for name in NAMES] if arch in ARCHS else []


def fact_of(name: str) -> str:
    """What an experiment finds out, in a line."""
    name = name.removeprefix(PREFIX)
    return next(kind.NAMES[name].fact for kind in (conversions, copies, products) if name in kind.NAMES)


def users_of(name: str) -> tuple[str, ...]:
    """The kernels that rest on what an experiment finds out."""
    name = name.removeprefix(PREFIX)
    return next(kind.USED_BY.get(name, ()) for kind in (conversions, copies, products) if name in kind.NAMES)


def run(name: str, device: torch.device) -> tuple[Any, Any]:
    """What an experiment leaves behind on a GPU, and what it should: uint32 or uint8 arrays."""
    short, key = name.removeprefix(PREFIX), key_of(arch_of(device.index), name)

    def put(array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.int32)).to(device)

    given: tuple[Any, ...]
    numbers: tuple[int, ...] = ()
    if short in conversions.NAMES:
        want = conversions.expect(conversions.NAMES[short])
        given, numbers = (put(conversions.source(conversions.NAMES[short])),), (len(want),)
    elif short in copies.NAMES:
        transfer = copies.NAMES[short]
        want, (memory, rows) = copies.expect(transfer), copies.source(transfer)
        given = (put(memory).view(torch.uint8), put(rows))
        numbers = (copies.KNOWN_ROWS if transfer.is_gathered else copies.KNOWN_PAGES,)
    else:
        experiment = products.NAMES[short]
        blocks = products.memories(experiment)
        want = np.stack(products.expect(experiment))
        given = tuple(put(np.stack(x)) for x in ([b.shared for b in blocks], [b.tensor for b in blocks]))
    out = torch.full((want.nbytes // 4,), -1, dtype=torch.int32, device=device)
    target = out.view(torch.uint8) if want.dtype == np.uint8 else out
    launch(key, device.index, *given, target, *numbers)
    torch.cuda.synchronize(device)
    return out.cpu().numpy().view(want.dtype).reshape(want.shape), want


def verify_fact(name: str) -> Verdict:
    """Verdict of one experiment, twice, on the current CUDA device: every byte of the memories counts."""
    start = time.perf_counter()
    device = torch.device("cuda", torch.cuda.current_device())
    users = f"used by {', '.join(users_of(name)) or 'no kernel'}"
    try:
        for _ in range(2):
            difference = compare(*run(name, device))
            if difference:
                detail = f"{fact_of(name)}: {difference}; {users}"
                return Verdict(name, "fail", 1, detail, time.perf_counter() - start)
    except Exception as error:
        return Verdict(name, "fail", 0, f"{describe(error)}; {users}", time.perf_counter() - start)
    return Verdict(name, "pass", 1, users, time.perf_counter() - start)


def compare(got: Any, want: Any) -> str:
    """What differs and where, or ""."""
    wrong = np.argwhere(got != want)
    if not len(wrong):
        return ""
    first = tuple(int(i) for i in wrong[0])
    return (
        f"{len(wrong)} of {want.size} differ, from {wrong.min(axis=0).tolist()} to {wrong.max(axis=0).tolist()}; "
        f"at {list(first)} expected {int(want[first]):#x}, got {int(got[first]):#x}"
    )
