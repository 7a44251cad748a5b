# SPDX-License-Identifier: Apache-2.0
"""What an op's schema alone asks of its arguments: scalars, gradients, elements that tensors share."""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from cute_kernels.runtime import ops
from cute_kernels.runtime.contract import MOST_DISTANCES, Contract, Layout, lies_apart, shares_element
from cute_kernels.runtime.key import OpKernel
from cute_kernels.runtime.ops import OPS, define_op

calls: list[str] = []


class Call(NamedTuple):
    x: Any
    number: Any
    factor: Any
    flag: Any
    word: Any
    sizes: Any
    y: Any
    z: Any
    a_cache: Any
    b_cache: Any


def reference(call: Call) -> None:
    calls.append("ran")
    for out in (call.y, call.z, call.a_cache, call.b_cache):
        out.fill_(1)


call_copy = define_op(
    "test_contract(Tensor x, SymInt number, float factor, bool flag, str word, int[] sizes, Tensor(a!) y, "
    "Tensor(b!) z, Tensor(c!) a_cache, Tensor(d!) b_cache) -> ()",
    Call,
    check=lambda call: None,
    reference=reference,
    in_place={"y": "x"},
)
del OPS["test_contract"]


def copy(*args: Any) -> None:
    call_copy(Call(*args))


@pytest.fixture(autouse=True)
def fresh() -> None:
    calls.clear()


def arguments(**changed: Any) -> list[Any]:
    tensors = {name: torch.zeros(4, 8) for name in ("x", "y", "z", "a_cache", "b_cache")}
    scalars = {"number": 3, "factor": 0.5, "flag": False, "word": "a", "sizes": [1, 2]}
    both = tensors | scalars | changed
    return [both[n] for n in ("x", "number", "factor", "flag", "word", "sizes", "y", "z", "a_cache", "b_cache")]


def refuse(error: type[Exception], message: str, **changed: Any) -> None:
    args = arguments(**changed)
    with pytest.raises(error, match=rf"^test_contract: {message}"):
        copy(*args)
    assert calls == []


def accept(**changed: Any) -> None:
    copy(*arguments(**changed))
    assert calls == ["ran"]
    calls.clear()


@pytest.mark.parametrize(
    ("argument", "value", "error", "message"),
    [
        ("number", None, TypeError, "expected an int, got None"),
        ("number", "64", TypeError, "expected an int, got '64'"),
        ("number", 1.5, TypeError, "expected an int, got 1.5"),
        ("number", True, TypeError, "expected an int, got True"),
        ("number", torch.tensor(3), TypeError, "expected an int, got Tensor"),
        ("number", 2**31, ValueError, "expected an int of 32 bits, got 2147483648"),
        ("number", 2**64, ValueError, "expected an int of 32 bits, got 18446744073709551616"),
        ("number", -(2**31) - 1, ValueError, "expected an int of 32 bits, got -2147483649"),
        ("factor", None, TypeError, "expected a number, got None"),
        ("factor", True, TypeError, "expected a number, got True"),
        ("factor", "1", TypeError, "expected a number, got '1'"),
        ("factor", float("nan"), ValueError, "expected a finite fp32 number, got nan"),
        ("factor", -float("inf"), ValueError, "expected a finite fp32 number, got -inf"),
        ("factor", 1e39, ValueError, r"expected a finite fp32 number, got 1e\+39"),
        ("flag", 1, TypeError, "expected True or False, got 1"),
        ("flag", None, TypeError, "expected True or False, got None"),
        ("word", 3, TypeError, "expected a string, got 3"),
        ("word", None, TypeError, "expected a string, got None"),
        ("sizes", 3, TypeError, "expected a list of ints, got 3"),
        ("sizes", [1, 2.5], TypeError, "expected an int, got 2.5"),
        ("sizes", [1, 2**40], ValueError, "expected an int of 32 bits"),
    ],
)
def test_scalars(argument: str, value: Any, error: type[Exception], message: str) -> None:
    refuse(error, f"{argument}: {message}", **{argument: value})


def test_scalars_at_their_limits() -> None:
    for number in (-(2**31), 0, 2**31 - 1):
        accept(number=number)
    for factor in (-3.4e38, 0, 1, 3.4e38, 1e-300):
        accept(factor=factor)
    accept(sizes=(1, 2))


def test_gradients() -> None:
    for name in ("x", "y", "a_cache"):
        needs = torch.zeros(4, 8, requires_grad=True)
        refuse(ValueError, rf"{name}: expected a tensor that needs no gradient, .*Detach it", **{name: needs})
        with torch.no_grad():
            accept(**{name: torch.zeros(4, 8, requires_grad=True)})
        with torch.inference_mode():
            accept(**{name: torch.zeros(4, 8, requires_grad=True)})
        accept(**{name: needs.detach()})


def test_a_traced_call_that_needs_gradients_raises_when_it_is_traced() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        args = arguments(x=x)
        copy(*args)
        return args[6] + 1

    traced = torch.compile(step, fullgraph=True, backend="eager")
    assert traced(torch.zeros(4, 8)).eq(2).all()
    with pytest.raises(Exception, match="test_contract: x: expected a tensor that needs no gradient"):
        torch.compile(step, fullgraph=True, backend="eager")(torch.zeros(4, 8, requires_grad=True))


def test_results_hold_each_element_once() -> None:
    apart = r"expected a tensor whose elements lie apart, got strides \(0, 1\) of shape \[4, 8\]"
    refuse(ValueError, f"y: {apart}", y=torch.zeros(1, 8).expand(4, 8))
    refuse(ValueError, "z: expected a tensor whose", z=torch.zeros(32).as_strided((4, 8), (1, 1)))
    accept(x=torch.zeros(1, 8).expand(4, 8))
    accept(y=torch.zeros(1, 8).expand(1, 8))
    accept(y=torch.zeros(8, 4).t())


def test_results_share_nothing() -> None:
    memory = torch.zeros(4, 32)
    both = memory[:, :8]
    refuse(ValueError, "y: expected memory that z has no element of, got a tensor that overlaps z", y=both, z=both)
    refuse(ValueError, "y: expected memory that z has", y=memory[:, 7:15], z=both)
    refuse(ValueError, "z: expected memory that x has no element of", z=both, x=both)
    refuse(ValueError, "z: expected memory that a_cache has", z=both, a_cache=memory)
    accept(y=both, z=memory[:, 8:16], a_cache=memory[:, 16:], x=torch.zeros(4, 8))
    accept(y=memory[:, 0::2], z=memory[:, 1::2])


def test_what_is_worked_on_in_place_is_the_very_tensor() -> None:
    memory = torch.zeros(5, 16)
    accept(x=memory[:4, :8], y=memory[:4, :8])
    refuse(
        ValueError, "y: expected memory that x has no .*, or the very tensor x, got", x=memory[:4, :8], y=memory[1:, :8]
    )
    refuse(ValueError, "y: expected memory that x has", x=memory[:4, :8], y=memory[:4].as_strided((4, 8), (8, 1)))


def test_caches_may_be_views_of_one_pool() -> None:
    pool = torch.zeros(4, 32)
    accept(a_cache=pool[:, :8], b_cache=pool[:, 8:])
    accept(a_cache=pool, b_cache=pool)
    refuse(ValueError, "y: expected memory that b_cache has", y=pool[:, :8], b_cache=pool)


def test_results_without_elements_are_nowhere() -> None:
    memory = torch.zeros(4, 8)
    accept(y=memory[:0], z=memory)
    accept(y=memory.as_strided((0, 8), (0, 0)))


@pytest.mark.parametrize("device", ["meta", "fake", "cpu"])
def test_tensors_without_addresses(device: str) -> None:
    def run() -> None:
        where = "cpu" if device == "fake" else device
        memory = torch.empty(4, 32, device=where)
        rest = {name: torch.empty(4, 8, device=where) for name in ("x", "a_cache", "b_cache")}
        copy(*arguments(**rest, y=memory[:, :8], z=memory[:, 8:16]))
        for y in (memory[:, 1:9], memory[:1, :8].expand(4, 8)):
            with pytest.raises(ValueError, match="test_contract: y"):
                copy(*arguments(**rest, y=y, z=memory[:, 8:16]))

    if device == "fake":
        with FakeTensorMode():
            run()
    else:
        run()


def test_symbolic_sizes_are_traced_once() -> None:
    @torch.compile(fullgraph=True, backend="eager", dynamic=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(x.shape[0], 16)
        caches = [torch.zeros_like(x) for _ in range(2)]
        copy(x, x.shape[0], 0.5, False, "a", [1, 2], y[:, :8], y[:, 8:], *caches)
        return y

    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (3, 5, 9):
            assert step(torch.zeros(rows, 8)).eq(1).all()


# ---- calls at new addresses ------------------------------------------------------------------------------------------


def at(addresses: list[int], args: list[Any]) -> list[Any]:
    """The tensors among `args`, each at a byte of one memory; other arguments are as they were."""
    memory, places = torch.zeros(1 << 12, dtype=torch.uint8), iter(addresses)

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        first = next(places)
        return memory[first : first + (1 << 11)].view(value.dtype).as_strided(value.shape, value.stride())

    return [move(value) for value in args]


def some_call(draw: random.Random) -> list[Any]:
    def tensor() -> torch.Tensor:
        view = some_view(draw)
        return view if draw.random() < 0.9 else view[:0]

    shape = some_view(draw)
    alike = {"x": shape, "y": shape} if draw.random() < 0.5 else {"x": tensor(), "y": tensor()}
    return arguments(**alike, z=tensor(), a_cache=tensor(), b_cache=tensor())


def is_refused(function: Any, *args: Any) -> bool:
    try:
        function(*args)
    except ValueError:
        return True
    return False


def test_calls_at_new_addresses_are_refused_as_first_ones_are() -> None:
    draw, counts = random.Random(2), [0, 0]
    contract = Contract("test_contract", torch.ops.cute_kernels.test_contract.default._schema, {"y": "x"})
    for _ in range(300):
        args = some_call(draw)
        layout = Layout(contract, args)
        for _ in range(6):
            args = at([8 * draw.randint(0, 60) for _ in range(5)], args)
            if draw.random() < 0.3:
                args[6] = args[0] if args[6].shape == args[0].shape else args[6]
            addresses = [value.data_ptr() for value in args if isinstance(value, torch.Tensor)]
            want = is_refused(contract.check_apart, args)
            assert is_refused(layout.check, addresses, args) == want
            assert is_refused(layout.check, addresses, args) == want  # remembered
            counts[want] += 1
    assert min(counts) > 300


def test_tensors_at_a_known_distance_are_looked_into_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    contract = Contract("test_contract", torch.ops.cute_kernels.test_contract.default._schema, {})
    memory, row = torch.zeros(4096), 16
    pair = [memory[first:].as_strided((4, 8), (row, 1)) for first in (0, 8)]
    args = arguments(y=pair[0], z=pair[1])
    layout = Layout(contract, args)
    monkeypatch.setattr(contract, "check_pair", lambda *given: looked.append(given[-1]))

    def check(first: int, second: int) -> None:
        args[6:8] = [memory[at:].as_strided((4, 8), (row, 1)) for at in (first, second)]
        layout.check([value.data_ptr() for value in args if isinstance(value, torch.Tensor)], args)

    for first in (0, 64, 640):
        check(first, first + 8)
        check(first, first + 1024)
    assert looked == [32]
    for first in range(2 * MOST_DISTANCES):
        check(1024, 1024 - 56 + first)
    assert len(layout.apart) <= MOST_DISTANCES


def test_the_cuda_implementation_checks_a_remembered_call_at_new_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors of the CPU, with a kernel that notes its calls."""
    bodies: dict[str, Any] = {}
    launched: list[Any] = []
    checked: list[Any] = []
    kernel = OpKernel[Any](launched.append, lambda call: "", lambda *_: [])
    implement = ops._library.impl

    def noted(name: str, body: Any, key: str, **options: Any) -> None:
        bodies[key] = body
        implement(name, body, key, **options)

    monkeypatch.setattr(ops._library, "impl", noted)
    define_op(
        "test_contract_on_cuda(Tensor x, Tensor(a!) y, Tensor(b!) z) -> ()",
        NamedTuple("Three", [("x", Any), ("y", Any), ("z", Any)]),
        check=checked.append,
        reference=lambda call: None,
        kernel=lambda: kernel,
        in_place={"y": "x"},
    )
    del OPS["test_contract_on_cuda"]
    memory = torch.zeros(64, 64)

    def call(x: int, y: int, z: int) -> None:
        bodies["CUDA"](*(memory[first : first + 4, :8] for first in (x, y, z)))

    for places in ((0, 4, 8), (0, 4, 8), (0, 4, 12), (20, 20, 24), (24, 24, 20)):
        call(*places)
    assert (len(launched), len(checked)) == (5, 1)
    for places, message in (((0, 3, 8), "y: .*overlaps x"), ((0, 4, 7), "z: .*overlaps y|y: .*overlaps z")):
        for _ in range(2):
            with pytest.raises(ValueError, match=f"test_contract_on_cuda: (?:{message})"):
                call(*places)
    call(0, 4, 8)
    assert (len(launched), len(checked)) == (6, 1)
    for first in range(2 * ops.MOST_PLACES):
        call(0, 4, 8 + first % 50)
    assert len(launched) == 6 + 2 * ops.MOST_PLACES


# ---- shared elements, against all addresses written out -------------------------------------------------------------


def addresses(tensor: torch.Tensor) -> list[int]:
    """First bytes of all elements, counted from the start of memory."""
    places = itertools.product(*(range(size) for size in tensor.shape))
    size, start = tensor.element_size(), tensor.storage_offset()
    return [size * (start + sum(i * s for i, s in zip(p, tensor.stride(), strict=True))) for p in places]


def some_view(draw: random.Random) -> torch.Tensor:
    shape = [draw.randint(1, 4) for _ in range(draw.randint(1, 3))]
    strides = [draw.choice([0, 1, 2, 3, 4, 8, 12]) for _ in shape]
    memory = torch.zeros(256, dtype=draw.choice([torch.uint8, torch.float32, torch.int64]))
    return memory.as_strided(shape, strides, draw.randint(0, 20))


def test_lies_apart_never_accepts_what_overlaps() -> None:
    draw = random.Random(0)
    accepted = 0
    for _ in range(2000):
        view = some_view(draw)
        is_apart = len(set(addresses(view))) == view.numel()
        if lies_apart(view):
            accepted += 1
            assert is_apart
        elif is_apart:  # refused although apart: strides are not nested, as of addresses 0, 2, 3, 5
            spans = sorted((s, n) for s, n in zip(view.stride(), view.shape, strict=True) if n > 1)
            assert any(stride <= sum((n - 1) * s for s, n in spans[:at]) for at, (stride, _) in enumerate(spans))
    assert accepted > 500


def test_shared_elements_are_found() -> None:
    draw = random.Random(1)
    found = [0, 0]
    for _ in range(2000):
        a, b = some_view(draw), some_view(draw)
        distance = b.storage_offset() * b.element_size() - a.storage_offset() * a.element_size()
        bytes_of = [{at + i for at in addresses(t) for i in range(t.element_size())} for t in (a, b)]
        shares = bool(bytes_of[0] & bytes_of[1])
        assert shares_element(a, b, distance) == shares
        found[shares] += 1
    assert min(found) > 300


def test_what_would_take_long_to_decide_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_hard(*_: object, **__: object) -> bool:
        raise np.exceptions.TooHardError

    memory = torch.zeros(64)
    assert shares_element(memory[::2], memory[2::2], 8)
    monkeypatch.setattr(np, "shares_memory", too_hard)
    assert not shares_element(memory[::2], memory[2::2], 8)


def test_of_symbolic_sizes_a_stride_of_0_is_seen() -> None:
    """Where more than one element has it, whatever the sizes will be."""
    mode, any_size = FakeTensorMode(shape_env=ShapeEnv()), StatelessSymbolicContext([DimDynamic.DYNAMIC])
    row = mode.from_tensor(torch.zeros(5), symbolic_context=any_size)
    with mode:
        size = row.shape[0]
        assert isinstance(size, torch.SymInt)
        assert lies_apart(row)
        assert not lies_apart(row.as_strided((2, size), (0, 1)))
        assert lies_apart(row.as_strided((1, size), (0, 1)))
        assert lies_apart(row.as_strided((2, size), (size, 1)))
