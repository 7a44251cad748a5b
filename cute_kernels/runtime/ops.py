# SPDX-License-Identifier: Apache-2.0
"""One way to define an op: schema, checks, fake, CPU and CUDA implementation, all from one call of `define_op`.

`torch.library.Library` is used directly because `torch.library.custom_op` costs ten times more per call.
Every op writes into tensors its caller owns and returns nothing, so its fake has nothing to do but check the
arguments; the functions users call allocate outputs and then call the op.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from cute_kernels.runtime import record
from cute_kernels.runtime.contract import Contract, Layout
from cute_kernels.runtime.key import Call, OpKernel
from cute_kernels.runtime.log import describe, logger
from cute_kernels.runtime.record import Cost

NAMESPACE = "cute_kernels"
FALLBACK_VARIABLE = "CUTE_KERNELS_FALLBACK"
CHECK_VARIABLE = "CUTE_KERNELS_CHECK"
NVTX_VARIABLE = "CUTE_KERNELS_NVTX"


def _switch(variable: str) -> bool:
    value = os.environ.get(variable, "0")
    if value not in ("0", "1", ""):
        raise ValueError(f"{variable}: expected '0' or '1', got {value!r}")
    return value == "1"


# Read once: an op is defined with or without them, so that neither costs anything where it is off.
CHECKED = _switch(CHECK_VARIABLE)
NVTX = _switch(NVTX_VARIABLE) and torch.version.cuda is not None

MOST_ACCEPTED = 512
"""Calls whose metadata an op remembers as checked: the shapes of a server's decode steps, at 3 kB each."""

MOST_PLACES = 64
"""Addresses of such a call's tensors that are remembered as those of tensors without a common element."""

ALIGNMENT = 128
"""No kernel asks for addresses that are multiples of more."""

T = TypeVar("T")

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


@dataclass(frozen=True)
class Op:
    """A registered op: its schema's name and the functions behind it.

    call_type   record of its arguments, in the schema's order
    check       the whole of it: the contract that follows from the schema, and the op's own checks. It takes arguments
                in the schema's order, as do reference, cost and validate
    kernel      what imports its kernel, None if it has none
    call        what `define_op` returned: runs the op on a record
    on_cuda     its implementation for tensors on a GPU, as the dispatcher calls it
    """

    name: str
    overload: torch._ops.OpOverload
    call_type: type[Any]
    check: Callable[..., None]
    reference: Callable[..., None]
    kernel: Callable[[], OpKernel[Any]] | None
    cost: Callable[..., Cost] | None
    validate: Callable[..., None] | None = None
    contract: Contract | None = None
    call: Callable[[Any], None] | None = None
    on_cuda: Callable[..., None] | None = None

    def load_kernel(self) -> OpKernel[Any]:
        assert self.kernel is not None
        return self.kernel()

    def mutated(self, args: tuple[Any, ...]) -> dict[str, torch.Tensor]:
        """The tensors that a call writes, by name."""
        arguments = zip(self.overload._schema.arguments, args, strict=True)
        return {a.name: value for a, value in arguments if a.alias_info is not None and value is not None}


OPS: dict[str, Op] = {}

_told: set[tuple[str, str]] = set()
"""Op and reason of the references that were logged."""


def fallback_allowed() -> bool:
    """Whether a CUDA call without a kernel may run the reference (CUTE_KERNELS_FALLBACK=reference)."""
    value = os.environ.get(FALLBACK_VARIABLE, "none")
    if value not in ("none", "reference"):
        raise ValueError(f"{FALLBACK_VARIABLE}: expected 'none' or 'reference', got {value!r}")
    return value == "reference"


def define_op(
    schema: str,
    call_type: type[Call],
    *,
    check: Callable[[Call], None],
    reference: Callable[[Call], None],
    kernel: Callable[[], OpKernel[Call]] | None = None,
    cost: Callable[[Call], Cost] | None = None,
    validate: Callable[[Call], None] | None = None,
    in_place: Mapping[str, str] | None = None,
) -> Callable[[Call], None]:
    """Register `cute_kernels::<schema>` and return the function that calls it.

    schema      torch schema without namespace; mutated arguments carry their alias annotation; returns ()
    call_type   NamedTuple of the arguments in the schema's order: what all these functions take
    check       raises ValueError or TypeError on bad arguments, from metadata alone; scalars have their types by then,
                and inputs and results fit each other as runtime.contract has it
    reference   what the op means, in torch; it is the CPU implementation
    kernel      imports and returns the CUDA kernel, at the first CUDA call
    cost        bytes and flops of a call, for recordings and benchmarks; it may read data
    validate    raises ValueError on data that breaks the op's contract (runtime.checks); only called with
                CUTE_KERNELS_CHECK=1, on checked arguments
    in_place    written argument -> the input that may be the very same tensor
    """
    name = schema.split("(", 1)[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    names = tuple(argument.name for argument in overload._schema.arguments)
    given = tuple(getattr(call_type, "_fields", ()))
    if given != names:
        raise TypeError(f"{name}: expected a call record with {names}, got {given}")
    contract = Contract(name, overload._schema, in_place or {})
    whole_check = _of_arguments(call_type, _with_contract(contract, check))
    execute = _of_plain_empties(_of_arguments(call_type, reference))

    def call(arguments: Call) -> None:
        if not contract.has_plain_scalars(arguments):
            contract.check_scalars(arguments)
        try:
            overload(*arguments)
        except RuntimeError:
            # torch refuses what is no tensor before `check` sees it; say it as `check` does
            whole_check(*arguments)
            raise

    def on_cpu(*args: Any) -> None:
        whole_check(*args)
        _execute(op, "reference", execute, args)

    accepted: dict[Any, _Accepted] = {}

    def on_cuda(*args: Any) -> None:
        metadata, addresses = _describe(args)
        known = accepted.get(metadata)
        implementation = "kernel"
        if known is None:
            whole_check(*args)
            body, implementation = _choose_cuda(op, args)
            if implementation == "kernel":
                if len(accepted) >= MOST_ACCEPTED:
                    accepted.clear()
                accepted[metadata] = _Accepted(body, {addresses})
                if logger.isEnabledFor(logging.DEBUG):
                    body = _logged(op, body)
        else:
            body = known.body
            if addresses not in known.places:
                known.check(contract, addresses, args)
        if record.active() is None:
            body(*args)
        else:
            _execute(op, implementation, body, args)

    op = Op(
        name,
        overload,
        call_type,
        whole_check,
        execute,
        kernel,
        None if cost is None else _of_arguments(call_type, cost),
        None if validate is None else _of_arguments(call_type, validate),
        contract,
        call,
        on_cuda,
    )
    _library.impl(name, _instrumented(op, on_cpu), "CPU")
    _library.impl(name, _instrumented(op, on_cuda), "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", whole_check, lib=_library)
    OPS[name] = op

    return call


def _of_arguments(call_type: type[Call], body: Callable[[Call], T]) -> Callable[..., T]:
    """A function of a record as one of the arguments in its order, by whose names it is known."""

    @functools.wraps(body)
    def function(*args: Any) -> T:
        return body(call_type(*args))

    function.__signature__ = inspect.signature(call_type)  # type: ignore[attr-defined]
    return function


@dataclass(slots=True)
class _Accepted:
    """Calls with one metadata, of which one was checked.

    places   addresses of tensors that were found to share no elements that they must not
    layout   what to check at other addresses; made when there are any
    """

    body: Callable[..., None]
    places: set[tuple[int, ...]]
    layout: Layout | None = None

    def check(self, contract: Contract, addresses: tuple[int, ...], args: tuple[Any, ...]) -> None:
        if self.layout is None:
            self.layout = Layout(contract, args)
        self.layout.check(addresses, args)
        if len(self.places) >= MOST_PLACES:
            self.places.clear()
        self.places.add(addresses)


def _with_contract(contract: Contract, check: Callable[[Call], None]) -> Callable[[Call], None]:
    """`check` within the checks of the op's contract."""

    @functools.wraps(check)
    def whole(call: Call) -> None:
        contract.check_scalars(call)
        check(call)
        contract.check_tensors(call)

    return whole


def _instrumented(op: Op, body: Callable[..., None]) -> Callable[..., None]:
    """`body` with validation and an NVTX range around it, as far as the environment asks for them."""
    if CHECKED:
        body = _checked(op, body)
    if NVTX:
        body = _ranged(op.name, body)
    return body


def _ranged(name: str, body: Callable[..., None]) -> Callable[..., None]:
    def ranged(*args: Any) -> None:
        torch.cuda.nvtx.range_push(f"{NAMESPACE}::{name}")
        try:
            body(*args)
        finally:
            torch.cuda.nvtx.range_pop()

    return ranged


def _checked(op: Op, body: Callable[..., None]) -> Callable[..., None]:
    def checked(*args: Any) -> None:
        op.check(*args)
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if op.validate is not None and not capturing:
            op.validate(*args)
        body(*args)

    return checked


def _describe(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """All that checks and `why_not` look at, in two parts: metadata, calls that agree in which pass or fail alike, so
    that one of them is checked; and the addresses of tensors, on which it depends whether they share elements."""
    described: list[Any] = []
    addresses: list[int] = []
    needs_gradient = torch.is_grad_enabled()
    for value in args:
        if isinstance(value, torch.Tensor):
            address = value.data_ptr()
            addresses.append(address)
            described += (value.dtype, value.get_device(), value.shape, value.stride(), address % ALIGNMENT)
            if needs_gradient:
                described.append(value.requires_grad)
        else:
            described.append(tuple(value) if isinstance(value, list) else value)
    return tuple(described), tuple(addresses)


def _choose_cuda(op: Op, args: tuple[Any, ...]) -> tuple[Callable[..., None], str]:
    why = "it has no CUDA kernel yet"
    if op.kernel is not None:
        if not any(value.numel() for value in op.mutated(args).values()):
            return _do_nothing, "kernel"
        kernel = op.load_kernel()
        replaced = _with_plain_empties(args)
        why = kernel.why_not(op.call_type(*replaced))
        if not why:
            launch = _of_arguments(op.call_type, kernel.launch)
            is_plain = all(new is old for new, old in zip(replaced, args, strict=True))
            return launch if is_plain else _of_plain_empties(launch), "kernel"
    if fallback_allowed():
        if (op.name, why) not in _told:
            _told.add((op.name, why))
            logger.info("%s: the reference runs, slowly: no kernel for this call: %s", op.name, why)
        return op.reference, "reference"
    raise NotImplementedError(
        f"{op.name}: no kernel for this call on CUDA: {why}. Set {FALLBACK_VARIABLE}=reference to run the "
        "reference implementation (slow, exact) instead."
    )


def _logged(op: Op, body: Callable[..., None]) -> Callable[..., None]:
    """`body`, with a line on what it is called with and which kernels it launches."""
    # by name, as kernels are: nothing that this module imports may bring the compiler
    compile_ = importlib.import_module("cute_kernels.runtime.compile")

    def logged(*args: Any) -> None:
        with compile_.watch_launches() as launches:
            body(*args)
        kernels = [getattr(key, "identity", key) for key, *_ in launches]
        arguments = ", ".join(map(describe, args))
        logger.debug("%s(%s): %s", op.name, arguments, "; ".join(map(str, kernels)) or "nothing to launch")

    return logged


def _do_nothing(*args: Any) -> None:
    """Runs a call that has nothing to write: all of its results have no elements."""


def _with_plain_empties(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`args`, tensors without elements replaced by contiguous ones where their strides or address are unusual: nobody
    reads them, but a compiled kernel would refuse them, and so may torch in a reference."""
    return tuple(_plain(value) if isinstance(value, torch.Tensor) and value.numel() == 0 else value for value in args)


def _plain(empty: torch.Tensor) -> torch.Tensor:
    plain = empty.new_empty(empty.shape)
    is_plain = plain.stride() == empty.stride() and empty.data_ptr() % ALIGNMENT == 0
    return empty if is_plain else plain


def _of_plain_empties(body: Callable[..., None]) -> Callable[..., None]:
    """`body`, called with plain tensors where they have no elements."""

    @functools.wraps(body)
    def called(*args: Any) -> None:
        body(*_with_plain_empties(args))

    return called


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
