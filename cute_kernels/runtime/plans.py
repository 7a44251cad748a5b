# SPDX-License-Identifier: Apache-2.0
"""Plans: a public function's call as the launches that it comes down to.

Such a call checks its arguments, allocates results, chooses kernels and works out their arguments. All of that follows
from the metadata of its tensors and from the values of its other arguments. A plan is what one call with just these
did: the tensors that it allocated, its launches and its result. A call that agrees with it does the same, without the
checks that the other one passed, torch's dispatcher and the choices.

Only where tensors lie differs between such calls. The arguments of launches are constants, tensors of the call, views
of them and addresses inside them: these are found when the plan is made, and filled in whenever it runs. How addresses
are aligned belongs to what calls must agree in. Whether tensors share elements that they must not is asked every time:
if more than first and last bytes has to be compared, that call runs without a plan.

Without plans run calls that somebody watches (a trace, a dispatch or function mode, of which torch.set_default_device
is one, a recording, the profiler), those whose arguments are more than tensors, numbers, strings and dtypes or
containers of them, and those in which torch does more than allocate and make views. A plan is made when a call comes
the second time: many never do.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, NoneType
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels.runtime import arch, kept, record, trust
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.contract import Contract, disjoint, span
from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.ops import ALIGNMENT, CHECKED, NAMESPACE, NVTX, OPS

MOST_PLANS, MOST_FORMS = 512, 32
"""Of a form, and of a function: the one that came first goes first."""

LEAST_ADDRESS = 1 << 32
"""Numbers from here on may be addresses of memory: a launch with one that is in no tensor is in no plan."""

OFFSETS = 16
"""Checks ask what places in storages are multiples of, up to this many elements."""

P = ParamSpec("P")
R = TypeVar("R")


_ALLOCATIONS = ("aten::empty.memory_format", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
                "aten::empty_like")  # fmt: skip
_CONTAINERS = frozenset((tuple, list, dict))
_PLAIN = (NoneType, bool, int, str, torch.dtype)
_UNSEEN, _SEEN, _NEVER = "unseen", "seen once", "no plan"


def planned(function: Callable[P, R], reads: Mapping[str, str] = MappingProxyType({})) -> Callable[P, R]:
    """`function`, with plans for calls that come again.

    It may depend on nothing but its arguments, what `_is_watched` looks at and what `kept.forget` is called for, and
    launches kernels through ops of this package only.

    reads   arguments of any type -> the attribute that is all it reads of them
    """
    if CHECKED or NVTX or _WATCHES is None:
        return function
    forms: dict[Any, _Form] = kept.table()
    names = [*inspect.signature(function).parameters]
    read = [(names.index(name), name, attribute) for name, attribute in reads.items()]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or _is_watched():
            return function(*args, **kwargs)
        values: Sequence[Any] = (*args, *kwargs.values())
        for place, name, attribute in read:
            at = place if place < len(args) else len(args) + [*kwargs, name].index(name)
            found = (getattr(value, attribute, None) for value in values[at : at + 1])
            values = (*values[:at], *found, *values[at + 1 :])
        kinds: tuple[Any, ...] = tuple(map(type, values))
        pattern = (len(args), *kwargs, *kinds)
        form = forms.get(pattern)
        if form is None:
            if not _CONTAINERS.isdisjoint(kinds):
                values, kinds = _flatten(values)
                pattern = (len(args), *kwargs, *kinds)
                form = forms.get(pattern)
            if form is None:
                _keep(forms, pattern, form := _Form(_describer(tuple(_leaves(kinds))), {}), MOST_FORMS)
        if form.describe is None:
            return function(*args, **kwargs)
        try:
            metadata, tensors, addresses = form.describe(values)
        except RuntimeError:  # tensors without strides or addresses
            return function(*args, **kwargs)
        plan = form.plans.get(metadata, _UNSEEN)
        if isinstance(plan, _Plan) and plan.fits(addresses):
            return plan.run(tensors, addresses)
        if plan is not _SEEN:
            result = function(*args, **kwargs)
            if plan is _UNSEEN:
                _keep(form.plans, metadata, _SEEN, MOST_PLANS)
            return result
        with compile_.record_launches() as launches, _Watch() as watch:
            result = function(*args, **kwargs)
        _keep(form.plans, metadata, _plan(tensors, watch, launches, result) or _NEVER, MOST_PLANS)
        return result

    # torch.compile keeps what it makes of functions with their code, and only so much: each has code of its own
    own: Any = call
    own.__code__ = own.__code__.replace(co_name=function.__name__)
    return call


def _find_watches(private: Any) -> tuple[Callable[[], Any], ...] | None:
    """What is true while somebody would miss what a call does beside its launches; None if torch's own module has not
    all of it, as another version may not: then there are no plans."""
    names = (
        "_len_torch_dispatch_stack",
        "_len_torch_function_stack",
        "_functorch.peek_interpreter_stack",
        "_get_tracing_state",
        "_autograd._profiler_enabled",
    )
    try:
        return (*(operator.attrgetter(name)(private) for name in names), record.active)
    except AttributeError:
        return None


_WATCHES = _find_watches(torch._C)

_FUNCTIONS = compile_._functions


def _is_watched() -> bool:
    """Whether somebody would miss something; or other kernels run than otherwise, or in other grids."""
    for watch in _WATCHES or ():
        if watch():
            return True
    return (
        compile_._recorder.launches is not None
        or compile_._functions is not _FUNCTIONS
        or arch._most_ctas is not None
        or trust._chosen is not None
    )


def _keep(known: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    if key not in known and len(known) >= most:
        for oldest in list(known)[:1]:  # a copy, as other threads may change the table
            known.pop(oldest, None)
    known[key] = value


# ---- what calls agree in


@dataclass(slots=True)
class _Form:
    """Calls whose arguments have the same names and types.

    describe   values -> (what they must agree in to have the same plan, tensors, their addresses); None: there are
               types of which that cannot be said
    plans      by what describe says first: a plan, or why there is none yet
    """

    describe: Callable[[Sequence[Any]], tuple[Any, tuple[torch.Tensor, ...], tuple[int, ...]]] | None
    plans: dict[Any, Any]


def _flatten(values: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...]]:
    """(values, with those inside containers in their place; types, where a container's is followed by those inside)"""
    flat: list[Any] = []
    kinds: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in _CONTAINERS:
            inner, inner_kinds = _flatten([part for item in value.items() for part in item] if kind is dict else value)
            flat += inner
            kinds.append((kind, *inner_kinds))
        else:
            flat.append(value)
            kinds.append(kind)
    return flat, tuple(kinds)


def _leaves(kinds: Sequence[Any]) -> list[type]:
    """The types of the values that `_flatten` returns with these."""
    return [leaf for kind in kinds for leaf in (_leaves(kind[1:]) if isinstance(kind, tuple) else (kind,))]


def _is_tensor(kind: type) -> bool:
    """Whether values of a type are tensors and behave like it: parameters do, and what engines derive from them."""
    return kind is torch.Tensor or (
        issubclass(kind, torch.nn.Parameter) and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


@functools.lru_cache(maxsize=1024)
def _describer(kinds: tuple[type, ...]) -> Any:
    """`describe` of calls with values of these types: one expression, as every call asks."""
    tensors = [i for i, kind in enumerate(kinds) if _is_tensor(kind)]
    parts = ["grad"]
    for i, kind in enumerate(kinds):
        if i in tensors:
            parts.append(f"v{i}.dtype, v{i}.get_device(), v{i}.shape, v{i}.stride()")
            # the dispatcher makes plain tensors of those whose memory has the negative (is_neg), or that have none
            parts.append(f"p{i} % {ALIGNMENT} if p{i} else None, v{i}.storage_offset() % {OFFSETS}, v{i}.is_neg()")
            parts.append(f"grad and v{i}.requires_grad")
        elif kind is float:
            parts.append(f"v{i} or str(v{i})")  # 0.0 is not -0.0
        elif kind in _PLAIN:
            parts.append(f"v{i}")
        else:
            return None
    lines = ["def describe(values):", " grad = is_grad_enabled()"]
    lines += [" " + "".join(f"v{i}, " for i in range(len(kinds))) + "= values"] if kinds else []
    lines += [f" p{i} = v{i}.data_ptr()" for i in tensors]
    listed = ["(" + "".join(f"{letter}{i}, " for i in tensors) + ")" for letter in "vp"]
    lines += [f" return ({', '.join(parts)},), {listed[0]}, {listed[1]}"]
    defined: dict[str, Any] = {"is_grad_enabled": torch.is_grad_enabled}
    exec("\n".join(lines), defined)
    return defined["describe"]


# ---- plans


@dataclass(slots=True)
class _View:
    """Of a tensor: the same memory with another shape, maybe as another dtype.

    offset   elements, of the tensor, from its first to that of the view
    size     elements of the tensor that the view spans, if that is of another dtype: bytes then
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    size: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.offset == 0 and self.dtype == tensor.dtype:
            return tensor.as_strided(self.shape, self.strides)  # two thirds of the time of the next one
        start = tensor.storage_offset() + self.offset
        if self.dtype == tensor.dtype:
            return tensor.as_strided(self.shape, self.strides, start)
        return tensor.as_strided((self.size,), (1,), start).view(self.dtype).as_strided(self.shape, self.strides)


@functools.lru_cache(maxsize=1024)
def _launcher(arguments: tuple[str, ...]) -> Any:
    """(function, constants c0, c1, ...) -> the launch of tensors t and their addresses a, which calls the function with
    these arguments: one expression, as every call asks."""
    constants = "".join(f", c{i}" for i in range(len(arguments)))
    lines = [f"def make(function{constants}):", " def launch(t, a):", f"  function({', '.join(arguments)})"]
    defined: dict[str, Any] = {}
    exec("\n".join([*lines, " return launch"]), defined)
    return defined["make"]


@dataclass(slots=True)
class _Plan:
    """What a call comes down to.

    device        of the launches
    sizes         bytes that its tensors span
    is_disjoint   whether tensors that must share nothing do not, of addresses and sizes
    ties          (tensor, tensor, bytes from one to the other) of those that meet: what is true of them is true of
                  others at this distance
    allocations   (shape, strides, dtype, device) of tensors that it makes, numbered behind those of the call
    result        those tensors -> what it returns
    """

    device: int
    sizes: tuple[int, ...]
    is_disjoint: Callable[[Sequence[int], Sequence[int]], bool]
    ties: list[tuple[int, int, int]]
    allocations: list[tuple[Any, Any, torch.dtype, torch.device]]
    launches: list[Callable[[Sequence[torch.Tensor], Sequence[int]], None]]
    result: Callable[[Sequence[torch.Tensor]], Any]

    def fits(self, addresses: tuple[int, ...]) -> bool:
        """Whether it is that of a call with tensors at these addresses as well."""
        for first, second, distance in self.ties:
            if addresses[second] - addresses[first] != distance:
                return False
        return self.is_disjoint(addresses, self.sizes)

    def run(self, tensors: tuple[torch.Tensor, ...], addresses: tuple[int, ...]) -> Any:
        if self.device != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self.run(tensors, addresses)
        if self.allocations:
            made = [_empty(*allocation) for allocation in self.allocations]
            tensors = (*tensors, *made)
            addresses = (*addresses, *[tensor.data_ptr() for tensor in made])
        for launch in self.launches:
            launch(tensors, addresses)
        return self.result(tensors)


def _empty(shape: Any, strides: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


class _Watch(TorchDispatchMode):
    """Inside, what torch is asked to do is noted.

    allocated    tensors, in order
    calls        contracts and arguments of ops of this package
    is_foreign   whether there was anything else than those and views
    """

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[torch.Tensor] = []
        self.calls: list[tuple[Contract, Sequence[Any]]] = []
        self.is_foreign = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == NAMESPACE and _are_on_gpu(args):
            op = OPS[func._schema.name.partition("::")[2]]
            assert op.contract is not None
            assert op.on_cuda is not None
            self.calls.append((op.contract, args))
            with self:  # not through the dispatcher: what the op asks torch for would pass unseen
                return op.on_cuda(*args)
        result = func(*args, **(kwargs or {}))
        if func.name() in _ALLOCATIONS and _are_on_gpu((result,)):
            self.allocated.append(result)
        elif not func.is_view:
            self.is_foreign = True
        return result


def _are_on_gpu(values: Sequence[Any]) -> bool:
    return all(value.is_cuda for value in values if isinstance(value, torch.Tensor))


class _Unplanned(Exception):
    """There is something in a call that cannot be said of others."""


def _plan(
    tensors: Sequence[torch.Tensor],
    watch: _Watch,
    launches: Sequence[tuple[KernelKey | Callable[..., None], int, tuple[Any, ...]]],
    result: Any,
) -> _Plan | None:
    """The plan of a call with such tensors that did all this; None: there is none."""
    devices = {device for _, device, _ in launches}
    if watch.is_foreign or len(devices) != 1:
        return None
    device = devices.pop()
    found = _Bases([*tensors, *watch.allocated], len(tensors))
    try:
        pairs, ties = found.pairs(watch.calls)
        return _Plan(
            device,
            tuple(end - first for first, end in found.spans[: len(tensors)]),
            disjoint(len(tensors), pairs),
            ties,
            [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in watch.allocated],
            [found.launch(key, device, arguments) for key, _, arguments in launches],
            found.result(result),
        )
    except _Unplanned:
        return None


class _Bases:
    """The tensors of a call: the first `given` of them are its arguments, the others it allocated."""

    def __init__(self, tensors: Sequence[torch.Tensor], given: int) -> None:
        self.tensors, self.given = tensors, given
        self.spans = [span(tensor)[1:] for tensor in tensors]

    def pairs(self, calls: Sequence[tuple[Contract, Sequence[Any]]]) -> tuple[Any, list[tuple[int, int, int]]]:
        """(pairs of arguments that must share nothing, ties of those that meet)"""
        places, spans = range(self.given), self.spans
        meeting = [
            (i, j) for i in places for j in range(i) if max(spans[i][0], spans[j][0]) < min(spans[i][1], spans[j][1])
        ]
        pairs: set[tuple[int, int]] = set()
        for contract, args in calls:
            bases = {i: self.base(args[i]) for i in contract.tensors if args[i] is not None and args[i].numel()}
            for i, j in contract.apart:
                pair = {bases[i], bases[j]} if i in bases and j in bases else set()
                if len(pair) == 2 and max(pair) < self.given:
                    pairs.add((min(pair), max(pair)))
        apart = tuple(sorted(pair for pair in pairs if pair[::-1] not in meeting))
        return apart, [(i, j, spans[j][0] - spans[i][0]) for i, j in meeting]

    def base(self, tensor: torch.Tensor) -> int:
        """The first tensor that holds all elements of one."""
        _, first, end = span(tensor)
        for place, (base_first, base_end) in enumerate(self.spans):
            if base_first <= first and end <= base_end and self.tensors[place].device == tensor.device:
                return place
        raise _Unplanned

    def launch(
        self, key: KernelKey | Callable[..., None], device: int, arguments: Sequence[Any]
    ) -> Callable[[Sequence[torch.Tensor], Sequence[int]], None]:
        """The same launch of tensors in the place of these, and of their addresses."""
        constants, parts = list(arguments), [f"c{i}" for i in range(len(arguments))]
        for i, value in enumerate(arguments):
            if isinstance(value, torch.Tensor) and value.numel() == 0:
                constants[i] = value.new_empty(0).as_strided(value.shape, value.stride())
            elif isinstance(value, torch.Tensor):
                place, view = self.find(value)
                parts[i], constants[i] = (f"t[{place}]", None) if view is None else (f"c{i}(t[{place}])", view.of)
            elif type(value) is int:
                inside = [place for place, (first, end) in enumerate(self.spans) if first <= value < end]
                behind = [place for place, (_, end) in enumerate(self.spans) if value == end]
                for place in (inside or behind)[:1]:
                    constants[i] = value - self.spans[place][0]
                    parts[i] = f"a[{place}] + c{i}" if constants[i] else f"a[{place}]"
                if not (inside or behind or abs(value) < LEAST_ADDRESS):
                    raise _Unplanned
            elif type(value) not in (bool, float, str, NoneType):
                raise _Unplanned
        function = compile_.function(key, device) if isinstance(key, KernelKey) else key
        launch: Callable[[Sequence[torch.Tensor], Sequence[int]], None] = _launcher(tuple(parts))(function, *constants)
        return launch

    def find(self, tensor: torch.Tensor) -> tuple[int, _View | None]:
        """(which tensor one is, None) or (that of which it is a view, the view)"""
        for place in range(len(self.tensors) - 1, -1, -1):  # results are the last ones of those that are given twice
            if tensor is self.tensors[place]:
                return place, None
        memory = tensor.untyped_storage()._cdata
        if all(base.untyped_storage()._cdata != memory for base in self.tensors):
            raise _Unplanned
        place = self.base(tensor)
        base, size = self.tensors[place], self.tensors[place].element_size()
        if base.dtype != tensor.dtype and size != 1:
            raise _Unplanned
        first, end = span(tensor)[1:]
        offset = first - self.spans[place][0]
        view = _View(tuple(tensor.shape), tensor.stride(), tensor.dtype, offset // size, end - first)
        is_whole = view == _View(tuple(base.shape), base.stride(), base.dtype, 0, view.size)
        return place, None if is_whole else view

    def result(self, value: Any) -> Callable[[Sequence[torch.Tensor]], Any]:
        """Tensors in the place of these -> what the call would return."""
        if type(value) is tuple:
            parts = [self.result(part) for part in value]
            return lambda tensors: tuple(part(tensors) for part in parts)
        if isinstance(value, torch.Tensor) and value.numel() == 0 and all(value is not base for base in self.tensors):
            nothing = value.shape, value.stride(), value.dtype, value.device
            return lambda tensors: _empty(*nothing)
        if isinstance(value, torch.Tensor):
            place, view = self.find(value)
            return lambda tensors: tensors[place] if view is None else view.of(tensors[place])
        if value is not None:
            raise _Unplanned
        return lambda tensors: None
