# SPDX-License-Identifier: Apache-2.0
"""Plans hide no error, follow every change of a call, and hold nothing of it. On tensors of the CPU, with a kernel that
notes its arguments (the fixture `launched`); tests/gpu/test_plans.py has them on a GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels.runtime import arch, kept, plans, trust
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.key import KernelKey, OpKernel
from cute_kernels.runtime.ops import OPS, define_op
from cute_kernels.runtime.plans import planned
from cute_kernels.runtime.record import record_calls
from tests.runtime.conftest import Launches


@dataclass(frozen=True)
class ScaleKey(KernelKey):
    kernel_name: ClassVar[str] = "tests.scale"


class ScaleCall(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor | None
    out: torch.Tensor
    factor: float
    is_filled: bool


def check_scale(call: ScaleCall) -> None:
    c = Checker("test_scale")
    c.tensor("x", call.x, torch.float32, ("T", "N"), dense_last=True)
    c.tensor("weight", call.weight, torch.float32, ("N",), optional=True)
    c.tensor("out", call.out, torch.float32, ("T", "N"), dense_last=True)


def launch_scale(call: ScaleCall) -> None:
    if call.is_filled:
        call.out.fill_(0)
    weight = 0 if call.weight is None else call.weight.data_ptr()
    numbers = call.x.data_ptr() + 4, weight, call.x.stride(0), call.factor, arch.grid_size(100)
    compile_.launch(ScaleKey("sm_90a"), call.out.device.index, call.out, call.x[:, 1:], call.out[None], *numbers)


def reference_scale(call: ScaleCall) -> None:
    call.out.copy_(call.x * call.factor)


_scale = define_op(
    "test_scale(Tensor x, Tensor? weight, Tensor(a!) out, float factor, bool is_filled) -> ()",
    ScaleCall,
    check=check_scale,
    reference=reference_scale,
    kernel=lambda: OpKernel(launch_scale, lambda call: "", lambda *_: []),
    in_place={"out": "x"},
)
SCALE = OPS.pop("test_scale")


ran: list[str] = []


@planned
def scale(
    x: torch.Tensor,
    factor: float,
    weights: tuple[torch.Tensor | None, ...] = (None,),
    *,
    out: torch.Tensor | None = None,
    size: int = 0,
    options: dict[str, Any] | None = None,
    is_filled: bool = False,
) -> torch.Tensor:
    """x [T, N] -> out [T, N]"""
    ran.append("scale")
    Checker("test_scale").ints(size=size)
    if out is None:
        out = torch.empty_like(x)
    _scale(ScaleCall(x, weights[0], out, factor, is_filled))
    return out


@pytest.fixture(autouse=True)
def op(launched: Launches, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(OPS, "test_scale", SCALE)
    ran.clear()
    yield
    kept.forget()


misaligned: list[torch.Tensor] = []


def numbers(rows: int = 3, columns: int = 8) -> torch.Tensor:
    """Aligned, as memory of a GPU is."""
    while (memory := torch.zeros(rows * columns)).data_ptr() % plans.ALIGNMENT:
        misaligned.append(memory)
    misaligned.clear()
    return memory.view(rows, columns)


def is_planned(call: Callable[[], Any]) -> bool:
    """Whether a call ran without checks."""
    before = len(ran)
    call()
    return len(ran) == before


def plan_of(*args: Any, **kwargs: Any) -> None:
    """Make calls until there is a plan."""
    for _ in range(2):
        assert not is_planned(lambda: scale(*args, **kwargs))
    assert is_planned(lambda: scale(*args, **kwargs))


def test_the_third_call_of_a_kind_runs_the_launches_alone(launched: Launches) -> None:
    weight, given = torch.ones(8), []
    for _ in range(4):
        x, out = numbers(), numbers()
        given.append((x, out))
        assert scale(x, 2.0, (weight,), out=out) is out
    assert len(ran) == 2
    assert len(launched) == 3  # the first call went to the reference
    for (x, out), (key, args) in zip(given[1:], launched, strict=True):
        assert key == ScaleKey("sm_90a")
        assert args[0] is out
        assert args[1].data_ptr() == x.data_ptr() + 4
        assert (args[1].shape, args[1].stride()) == ((3, 7), (8, 1))
        assert args[2].data_ptr() == out.data_ptr()
        assert args[2].shape == (1, 3, 8)
        assert args[3:] == (x.data_ptr() + 4, weight.data_ptr(), 8, 2.0, 100)


def test_results_that_nobody_gives_are_new_ones() -> None:
    x = numbers()
    plan_of(x, 2.0)
    first, second = scale(x, 2.0), scale(x, 2.0)
    assert first.data_ptr() != second.data_ptr()
    assert (first.shape, first.stride(), first.dtype) == (x.shape, x.stride(), x.dtype)


def other_calls() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    x, out, wide = numbers(), numbers(), numbers(3, 16)
    return {
        "shape": ((numbers(4), 2.0), {"out": numbers(4)}),
        "stride": ((wide[:, :8], 2.0), {"out": out}),
        "stride of the result": ((x, 2.0), {"out": wide[:, :8]}),
        "alignment": ((wide.view(-1)[16:40].view(3, 8), 2.0), {"out": out}),
        "weight": ((x, 2.0, (torch.ones(8),)), {"out": out}),
        "number": ((x, 3.0), {"out": out}),
        "sign of zero": ((x, -0.0), {"out": out}),
        "option": ((x, 2.0), {"out": out, "size": 1}),
        "no result": ((x, 2.0), {}),
        "names": ((x,), {"factor": 2.0, "out": out}),
        "container": ((x, 2.0, [None]), {"out": out}),
        "inside a container": ((x, 2.0), {"out": out, "options": {"launch": True}}),
    }


@pytest.mark.parametrize("change", other_calls())
def test_a_call_that_differs_has_a_plan_of_its_own(change: str) -> None:
    plan_of(numbers(), 2.0, out=numbers())
    plan_of(numbers(), 0.0, out=numbers())
    args, kwargs = other_calls()[change]
    plan_of(*args, **kwargs)


def bad_calls() -> dict[str, tuple[Callable[[], Any], type[Exception], str]]:
    x, out, memory = numbers(), numbers(), numbers(10).view(-1)
    above, below = memory[:24].view(3, 8), memory[23:47].view(3, 8)
    with_gradient = numbers().requires_grad_()
    return {
        "shape": (lambda: scale(x, 2.0, out=numbers(4)), ValueError, "out: expected shape"),
        "dtype": (lambda: scale(x.double(), 2.0, out=out), TypeError, "x: expected dtype"),
        "stride": (lambda: scale(numbers(8, 3).T, 2.0, out=out), ValueError, "x: expected stride 1"),
        "no tensor": (lambda: scale(x, 2.0, out=[]), TypeError, "out: expected a tensor"),  # type: ignore[arg-type]
        "bool for a number": (lambda: scale(x, True, out=out), TypeError, "factor: expected a number"),
        "bool for an int": (lambda: scale(x, 2.0, out=out, size=False), TypeError, "size: expected an int"),
        "overlap": (lambda: scale(above, 2.0, out=below), ValueError, "out: expected memory that x has no"),
        "gradient": (lambda: scale(with_gradient, 2.0, out=out), ValueError, "x: expected a tensor that needs no"),
        "device": (lambda: scale(x, 2.0, out=out.to("meta")), ValueError, "out: expected a tensor on cpu"),
    }


@pytest.mark.parametrize("mistake", bad_calls())
def test_a_bad_call_is_refused_whatever_has_a_plan(mistake: str) -> None:
    good: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((numbers(), 2.0), {"out": numbers()}),
        ((numbers(), 1.0), {"out": numbers()}),
        ((numbers(), 2.0), {"out": numbers(), "size": 0}),
        ((numbers(10).view(-1)[:24].view(3, 8), 2.0), {"out": numbers(10).view(-1)[23:47].view(3, 8)}),
    ]
    for args, kwargs in good:
        plan_of(*args, **kwargs)
    with torch.no_grad():
        plan_of(numbers().requires_grad_(), 2.0, out=numbers())
    call, error, message = bad_calls()[mistake]
    for _ in range(4):
        with pytest.raises(error, match=message):
            call()


def test_tensors_that_meet_have_a_plan_at_their_distance() -> None:
    rows = numbers(8, 32)
    beside = [(rows[i : i + 3, :8], rows[i : i + 3, 16:24]) for i in range(4)]
    plan_of(beside[0][0], 2.0, out=beside[0][1])
    assert all(is_planned(partial(scale, x, 2.0, out=out)) for x, out in beside)
    # as far apart as to have no element in common as well, but that takes a look
    assert not is_planned(lambda: scale(rows[:3, :8], 2.0, out=rows[:3, 24:]))
    with pytest.raises(ValueError, match="out: expected memory that x has no element of"):
        scale(rows[:3, :8], 2.0, out=rows[1:4, :8])


def test_in_place_is_a_plan_of_the_very_tensor(launched: Launches) -> None:
    rows = numbers(64, 8)
    plan_of(rows[:3], 2.0, out=rows[:3])
    assert is_planned(lambda: scale(rows[16:19], 2.0, out=rows[16:19]))
    assert launched[-1][1][3] == rows[16:].data_ptr() + 4
    assert not is_planned(lambda: scale(rows[16:19], 2.0, out=rows[32:35]))
    with pytest.raises(ValueError, match="out: expected memory that x has no element of, or the very tensor x"):
        scale(rows[16:19], 2.0, out=rows[17:20])


def test_the_result_is_the_tensor_that_was_given() -> None:
    rows, other, empty = numbers(64, 8), numbers(), numbers()[:0]
    plan_of(rows[:3], 2.0, out=rows[:3])
    x, out = rows[:3], rows[:3]
    assert scale(x, 2.0, out=out) is out
    bases = plans._Bases([other, empty], 2)
    assert bases.result((other, empty))([other, empty])[1] is empty


# ---- calls without plans


def test_tensors_that_are_not_what_their_memory_holds_have_no_plan() -> None:
    out = numbers()
    plan_of(numbers(), 2.0, out=out)
    negative = torch._neg_view(numbers())
    for _ in range(4):
        assert not is_planned(lambda: scale(negative, 2.0, out=out))
        with pytest.raises(ValueError, match="x: expected stride 1"):  # zeros as the dispatcher makes them
            scale(torch._efficientzerotensor((3, 8)), 2.0, out=out)


LOST = numbers()


@pytest.mark.parametrize(
    "argument", [LOST, LOST.data_ptr(), (1, 2), 1 << 40], ids=["tensor", "address", "tuple", "number"]
)
def test_launches_that_the_call_does_not_explain_are_in_no_plan(argument: Any) -> None:
    x, key = numbers(), ScaleKey("sm_90a")
    assert plans._plan([x], plans._Watch(), [(key, 0, (x, x.data_ptr(), 5, 0.5, None))], x) is not None
    assert plans._plan([x], plans._Watch(), [(key, 0, (x, argument))], x) is None


class Dispatches(TorchDispatchMode):
    seen: ClassVar[list[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


WATCHERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dispatch mode": Dispatches,
    "function mode": Functions,
    "recording of calls": record_calls,
    "recording of launches": compile_.record_launches,
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
}


@pytest.mark.parametrize("watcher", WATCHERS)
def test_a_watched_call_runs_as_an_op(watcher: str) -> None:
    x, out = numbers(), numbers()
    plan_of(x, 2.0, out=out)
    with WATCHERS[watcher]():
        assert not is_planned(lambda: scale(x, 2.0, out=out))
    assert is_planned(lambda: scale(x, 2.0, out=out))


def test_traces_have_the_op() -> None:
    x, out = numbers(), numbers()
    plan_of(x, 2.0, out=out)
    graph = make_fx(lambda x, out: scale(x, 2.0, out=out))(x, out)
    assert "cute_kernels.test_scale" in graph.code
    compiled = torch.compile(lambda x, out: scale(x, 2.0, out=out) + 1, fullgraph=True, backend="aot_eager")
    assert compiled(torch.ones(3, 8), out).tolist() == [[3.0] * 8] * 3
    with pytest.raises(RuntimeError):
        torch.func.vmap(lambda row: scale(row[None], 2.0, out=torch.empty_like(row)[None]))(x)


def test_functions_are_compiled_each_for_itself() -> None:
    """torch.compile gives up on code that it has compiled for many functions."""
    assert planned(lambda x: x).__code__ is not planned(lambda x: x).__code__
    assert scale.__code__.co_name == scale.__name__ == "scale"


def test_what_torch_does_beside_launches_is_in_no_plan() -> None:
    for _ in range(4):
        assert not is_planned(lambda: scale(numbers(), 2.0, is_filled=True))


class Engines:
    pass


def test_arguments_that_say_nothing_of_themselves_have_no_plan() -> None:
    other: Any = Engines()
    for _ in range(4):
        assert not is_planned(lambda: scale(numbers(), 2.0, options={"engine": other}))


# ---- how long


CHANGES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "small grids": lambda: arch.small_grids(7),
    "trust": lambda: trust.choose(False),
    "collection": compile_.collect,
    "substitution": lambda: compile_.substitute({}),
    "folder": lambda: compile_.use_folder("/nowhere"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_where_other_kernels_would_run_there_are_no_plans(change: str) -> None:
    x, out, other = numbers(), numbers(), numbers(4)
    plan_of(x, 2.0, out=out)
    with CHANGES[change]():
        for _ in range(4):
            assert not is_planned(lambda: scale(x, 2.0, out=out))
            assert not is_planned(lambda: scale(other, 2.0))
    assert is_planned(lambda: scale(x, 2.0, out=out))
    plan_of(other, 2.0)


def test_a_verdict_ends_all_plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trust.cache, "current", lambda: trust.cache.Store(tmp_path))
    monkeypatch.setattr(trust, "gpu_of", lambda index: {"name": "A GPU"})
    x, out = numbers(), numbers()
    plan_of(x, 2.0, out=out)
    assert trust.keep("test_scale", "tests.scale", None, "fail", 1, "") == ""  # type: ignore[arg-type]
    plan_of(x, 2.0, out=out)


def scale_of_object(x: torch.Tensor, given: Any) -> torch.Tensor:
    return scale.__wrapped__(x, given.factor)  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_named", [True, False])
def test_of_an_object_what_the_function_reads_counts(launched: Launches, is_named: bool) -> None:
    known, x = planned(scale_of_object, {"given": "factor"}), numbers()

    def call(**attributes: Any) -> None:
        given = SimpleNamespace(**attributes)
        known(given=given, x=x) if is_named else known(x, given)

    for factor in (2.0, 3.0):
        assert not is_planned(partial(call, factor=factor))
        assert not is_planned(partial(call, factor=factor, other=object()))
        assert is_planned(partial(call, factor=factor, other=object()))
        assert factor in [value for value in launched[-1][1] if isinstance(value, float)]
    with pytest.raises(AttributeError):
        call(other=2.0)
    with pytest.raises(TypeError):
        known(x)  # type: ignore[call-arg]


def test_another_torch_may_have_no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tells whether a call is watched is private to torch."""
    assert plans._find_watches(torch._C) is not None
    assert plans._find_watches(SimpleNamespace(_len_torch_dispatch_stack=int)) is None
    monkeypatch.setattr(plans, "_WATCHES", None)
    assert planned(test_functions_are_compiled_each_for_itself) is test_functions_are_compiled_each_for_itself


def test_plans_hold_no_memory(launched: Launches) -> None:
    x, weight = numbers(), torch.ones(8)
    result = scale(x, 2.0, (weight,))
    plan_of(x, 2.0, (weight,), out=result)
    for _ in range(3):
        made = scale(x, 2.0, (weight,))
    watched = [weakref.ref(tensor) for tensor in (x, weight, result, made)]
    del x, weight, result, made
    launched.clear()
    ran.clear()
    gc.collect()
    assert [reference() for reference in watched] == [None] * 4


def test_there_are_only_so_many_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MOST_PLANS", 4)
    x, out = numbers(), numbers()
    for size in range(8):
        plan_of(x, 2.0, out=out, size=size)
    assert not is_planned(lambda: scale(x, 2.0, out=out, size=0))
    assert is_planned(lambda: scale(x, 2.0, out=out, size=7))
