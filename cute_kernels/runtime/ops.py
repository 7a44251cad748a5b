"""One way to define an op: schema, checks, fake, CPU and CUDA implementation, all from one call of `define_op`.

`torch.library.Library` is used directly because `torch.library.custom_op` costs ten times more per call.
Every op writes into tensors its caller owns and returns nothing, so its fake has nothing to do but check the
arguments; the functions users call allocate outputs and then call the op.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.runtime import record
from cute_kernels.runtime.record import Cost

NAMESPACE = "cute_kernels"
FALLBACK_VARIABLE = "CUTE_KERNELS_FALLBACK"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


@dataclass(frozen=True)
class Op:
    """A registered op: its schema's name and the functions behind it, all with the schema's argument order."""

    name: str
    overload: torch._ops.OpOverload
    check: Callable[..., None]
    reference: Callable[..., None]
    kernel: str | None
    cost: Callable[..., Cost] | None

    def load_kernel(self) -> Any:
        """The object that launches this op's kernel: `launch(*args)` and `supports(*args) -> (bool, reason)`."""
        assert self.kernel is not None
        return importlib.import_module(self.kernel)


OPS: dict[str, Op] = {}


def fallback_allowed() -> bool:
    """Whether a CUDA call without a kernel may run the reference (CUTE_KERNELS_FALLBACK=reference)."""
    value = os.environ.get(FALLBACK_VARIABLE, "none")
    if value not in ("none", "reference"):
        raise ValueError(f"{FALLBACK_VARIABLE}: expected 'none' or 'reference', got {value!r}")
    return value == "reference"


def define_op(
    schema: str,
    *,
    check: Callable[..., None],
    reference: Callable[..., None],
    kernel: str | None = None,
    cost: Callable[..., Cost] | None = None,
) -> torch._ops.OpOverload:
    """Register `cute_kernels::<schema>` and return the overload to call.

    schema      torch schema without namespace; mutated arguments carry their alias annotation; returns ()
    check       raises ValueError or TypeError on bad arguments, from metadata alone
    reference   what the op means, in torch; it is the CPU implementation
    kernel      dotted name of the module with the CUDA kernel, imported at the first CUDA call
    cost        bytes and flops of a call, for recordings and benchmarks; it may read data
    """
    name = schema.split("(", 1)[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    op = Op(name, overload, check, reference, kernel, cost)

    def on_cpu(*args: Any) -> None:
        check(*args)
        _execute(op, "reference", reference, args)

    def on_cuda(*args: Any) -> None:
        check(*args)
        body, implementation = _choose_cuda(op, args)
        _execute(op, implementation, body, args)

    def fake(*args: Any) -> None:
        check(*args)

    _library.impl(name, on_cpu, "CPU")
    _library.impl(name, on_cuda, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    OPS[name] = op
    return overload


def _choose_cuda(op: Op, args: tuple[Any, ...]) -> tuple[Callable[..., None], str]:
    why = "it has no CUDA kernel yet"
    if op.kernel is not None:
        module = op.load_kernel()
        supported, why = module.supports(*args)
        if supported:
            return module.launch, "kernel"
    if fallback_allowed():
        return op.reference, "reference"
    raise NotImplementedError(
        f"{op.name}: no kernel for this call on CUDA: {why}. Set {FALLBACK_VARIABLE}=reference to run the "
        "reference implementation (slow, exact) instead."
    )


def _execute(op: Op, implementation: str, body: Callable[..., None], args: tuple[Any, ...]) -> None:
    recording = record.active()
    if recording is None:
        body(*args)
        return
    cost = op.cost(*args) if op.cost is not None else Cost()
    device = next(a.device for a in args if isinstance(a, torch.Tensor))
    recording.run(op.name, implementation, cost, device, lambda: body(*args))


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of the elements of the given tensors; None counts nothing."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
