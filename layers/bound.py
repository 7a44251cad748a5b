# SPDX-License-Identifier: Apache-2.0
"""Steps whose launches are kept: what a layer does on the host when a kind of step comes again.

The ops of a layer check arguments, choose kernels and allocate results in every call: some 20 us of host time each. A
bound step is the list of launches that one such pass came down to: compiled functions with their arguments, which
are tensors at fixed addresses (weights, caches, step metadata, scratch) and numbers that follow from the key. Running
it again is one comparison of keys and one call per kernel. Only the hidden states and the result may lie elsewhere each
time: arguments that are views of them are made anew. All other tensors are kept as handles of the call interface, which
it takes several times faster.

While a pass is recorded, a dispatch mode watches torch: memory that ops ask for comes from scratch that all layers of a
thread and stream share (`Scratch`), and any torch operation that would launch something by itself makes the step
unbindable: it then runs through its ops every time.

Decode steps come again with every token, and are bound when they first run. What a step with prefill rows launches also
depends on the lengths of its requests: chunks of a server come again where they begin and end at the same tokens, and
many never do. Such a step is bound when it comes the second time.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels.formats import round_up
from cute_kernels.runtime import record
from cute_kernels.runtime.compile import function, hold_tensors, is_calling, record_launches
from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.ops import CHECKED, NAMESPACE, NVTX

from .indexer import step_columns
from .metadata import DeepseekV4Metadata, Places

MOST_STEPS = 32
"""Bound steps that a layer keeps: the batch sizes of a server's decode steps. The one used longest ago goes first."""

MOST_PREFILL_STEPS, MOST_SEEN = 64, 256
"""The same of steps with prefill rows; and of those that came once, and are bound when they come again."""

MOST_KEYS = 4096
CHUNK_BYTES = 64 << 20
ALIGNMENT = 256

_ALLOCATIONS = ("aten::empty.memory_format", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
                "aten::empty_like")  # fmt: skip


class Scratch:
    """Memory for the intermediate tensors of a layer, given out from the start again for every step that is recorded.

    Layers of a thread run one after the other on their stream, so all of them use the same bytes. Chunks are never
    moved or freed while a bound step refers to them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._chunks: list[torch.Tensor] = []
        self._chunk, self._offset = 0, 0

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks)

    def rewind(self) -> None:
        self._chunk, self._offset = 0, 0

    def take(self, size: int) -> torch.Tensor:
        """uint8 [size], uninitialized."""
        while self._chunk < len(self._chunks):
            chunk = self._chunks[self._chunk]
            if self._offset + size <= chunk.nbytes:
                start, self._offset = self._offset, round_up(self._offset + size, ALIGNMENT)
                return chunk[start : start + size]
            self._chunk, self._offset = self._chunk + 1, 0
        self._chunks.append(torch.empty(max(size, CHUNK_BYTES), dtype=torch.uint8, device=self.device))
        return self.take(size)


class _OfThread(threading.local):
    """Scratch by device and stream, a thread's own: two threads never share any, nor do two streams."""

    def __init__(self) -> None:
        self.scratch: dict[tuple[int, int], Scratch] = {}


_of_thread = _OfThread()


def scratch_of(device: torch.device, stream: int) -> Scratch:
    """This thread's scratch for work on a stream, given as its number."""
    assert device.index is not None
    key = device.index, stream
    if key not in _of_thread.scratch:
        _of_thread.scratch[key] = Scratch(device)
    return _of_thread.scratch[key]


class _Watch(TorchDispatchMode):
    """Takes what ops allocate from scratch, and notes torch operations that launch something by themselves."""

    def __init__(self, scratch: Scratch) -> None:
        super().__init__()
        self.scratch = scratch
        self.foreign: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.name(), kwargs or {}
        if name in _ALLOCATIONS:
            wanted = func(*args, **(kwargs | {"device": "meta"}))
            given = kwargs.get("device")
            device = torch.device(given) if given is not None else getattr(args[0], "device", torch.device("cpu"))
            if device.type == "cuda":
                size = wanted.untyped_storage().nbytes()
                memory = (
                    self.scratch.take(size).view(wanted.dtype)
                    if size
                    else torch.empty(0, dtype=wanted.dtype, device=device)
                )
                return memory.as_strided(wanted.shape, wanted.stride())
        elif not (func.namespace == NAMESPACE or func.is_view or is_calling()):
            self.foreign.append(name)
        return func(*args, **kwargs)


@dataclass
class _View:
    """An argument that is a view of the hidden states or of the result, or all of it."""

    of: int  # 0: the hidden states, 1: the result
    arguments: list[Any]
    position: int
    is_all: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements from the tensor's first


_numbers: dict[Any, int] = {}
_prefill_numbers: dict[Any, int] = {}
"""Of steps with prefill rows, many of which never come again: they leave the others' numbers alone."""
_counter = itertools.count()


def bound_key(m: DeepseekV4Metadata) -> int:
    """What the launches of a step depend on in its metadata: addresses, shapes and the numbers that a launch is chosen
    by, with prefill rows the lengths of all requests, as a number that stands for all of it. Found once for all layers
    of a kind."""
    if m.bound_key is None:
        places = Places() if m.places is None else m.places
        if places.number is None:
            tensors = [value for value in vars(m).values() if isinstance(value, torch.Tensor)]
            places.number = _number_of(tuple((t.data_ptr(), tuple(t.shape), t.stride()) for t in tensors), _numbers)
        columns = step_columns(m.max_seq_len // max(m.compress_ratio, 1))
        key: tuple[Any, ...] = (places.number, m.compress_ratio, m.decode_batch(), columns)
        if m.num_prefill_tokens:
            key += m.num_decodes, m.query_start_loc_cpu, m.seq_lens_cpu
        m.bound_key = _number_of(key, _prefill_numbers if m.num_prefill_tokens else _numbers)
    return m.bound_key


def _number_of(key: Any, numbers: dict[Any, int]) -> int:
    number = numbers.get(key)
    if number is None:
        if len(numbers) >= MOST_KEYS:
            numbers.clear()
        number = numbers[key] = next(_counter)
    return number


class BoundStep:
    """The launches of one pass. `hidden_states` and `out` are those of that pass; later ones have the same shape."""

    def __init__(
        self, launches: list[tuple[Any, int, tuple[Any, ...]]], hidden_states: torch.Tensor, out: torch.Tensor
    ) -> None:
        self.calls: list[tuple[Callable[..., None], list[Any]]] = []
        self.views: list[_View] = []
        self.is_whole = True
        for key, device_index, args in launches:
            arguments = list(args)
            run = function(key, device_index) if isinstance(key, KernelKey) else key
            self.calls.append((run, arguments))
            self.is_whole &= device_index == hidden_states.device.index
            for position, value in enumerate(args):
                for of, base in enumerate((hidden_states, out)):
                    self._note(of, base, arguments, position, value)
            if isinstance(key, KernelKey):
                hold_tensors(arguments, {view.position for view in self.views if view.arguments is arguments})

    def _note(self, of: int, base: torch.Tensor, arguments: list[Any], position: int, value: Any) -> None:
        if not isinstance(value, torch.Tensor) or value.numel() == 0:
            return
        start, end = base.data_ptr(), base.data_ptr() + _extent(base)
        if not start <= value.data_ptr() < end:
            return
        distance = value.data_ptr() - start
        if value.dtype != base.dtype or distance % base.element_size():
            self.is_whole = False  # a reinterpreted view: nothing here makes one
            return
        offset = distance // base.element_size()
        shape, stride = tuple(value.shape), value.stride()
        is_all = offset == 0 and (shape, stride) == (tuple(base.shape), base.stride())
        self.views.append(_View(of, arguments, position, is_all, shape, stride, offset))

    def run(self, hidden_states: torch.Tensor, out: torch.Tensor) -> None:
        bases = hidden_states, out
        for view in self.views:
            base = bases[view.of]
            if not view.is_all:
                base = base.as_strided(view.shape, view.stride, base.storage_offset() + view.offset)
            view.arguments[view.position] = base
        for run, arguments in self.calls:
            run(*arguments)


def _extent(x: torch.Tensor) -> int:
    """Bytes from a tensor's first element to behind its last."""
    if x.numel() == 0:
        return 0
    return (sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1) * x.element_size()


class BoundSteps:
    """The bound steps of one layer, by key."""

    def __init__(self) -> None:
        self._decodes: OrderedDict[Any, BoundStep | None] = OrderedDict()
        self._prefills: OrderedDict[Any, BoundStep | None] = OrderedDict()
        self._seen: OrderedDict[Any, None] = OrderedDict()
        self.foreign: set[str] = set()
        """Torch operations that kept steps from being bound."""

    def __len__(self) -> int:
        return sum(step is not None for steps in (self._decodes, self._prefills) for step in steps.values())

    @staticmethod
    def apply(hidden_states: torch.Tensor) -> bool:
        """Whether a call may be bound at all: plain tensors on a GPU, nobody listening, capturing or tracing."""
        return (
            hidden_states.is_cuda
            and type(hidden_states) is torch.Tensor
            and not torch.compiler.is_compiling()
            and not torch.cuda.is_current_stream_capturing()
            and record.active() is None
            and torch._C._len_torch_dispatch_stack() == 0
            and not CHECKED
            and not NVTX
        )

    def run(
        self,
        key: Any,
        hidden_states: torch.Tensor,
        out: torch.Tensor,
        body: Callable[[torch.Tensor, torch.Tensor], None],
        has_prefills: bool = False,
    ) -> None:
        """`body(hidden_states, out)`, or the launches that it came down to when it last ran for this key.

        key            everything but the two tensors' addresses that the launches depend on
        has_prefills   whether there are prefill rows
        """
        device = hidden_states.device
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        key = (key, hidden_states.stride(), stream, threading.get_ident())
        steps, most = (self._prefills, MOST_PREFILL_STEPS) if has_prefills else (self._decodes, MOST_STEPS)
        if key in steps:
            step = steps[key]
            steps.move_to_end(key)
            if step is None:
                body(hidden_states, out)
            elif device.index == torch.cuda.current_device():
                step.run(hidden_states, out)
            else:
                with torch.cuda.device(device):
                    step.run(hidden_states, out)
            return
        if has_prefills and key not in self._seen:
            body(hidden_states, out)
            # not before: a step that failed may come again without the workspace that it needs, and while a step is
            # recorded that would be made in scratch, which other steps write
            self._seen[key] = None
            if len(self._seen) > MOST_SEEN:
                self._seen.popitem(last=False)
            return
        scratch = scratch_of(device, stream)
        scratch.rewind()
        with record_launches() as launches, _Watch(scratch) as watch:
            body(hidden_states, out)
        self.foreign.update(watch.foreign)
        step = None if watch.foreign else BoundStep(launches, hidden_states, out)
        self._seen.pop(key, None)
        steps[key] = step if step is not None and step.is_whole else None
        if len(steps) > most:
            steps.popitem(last=False)
