# SPDX-License-Identifier: Apache-2.0
"""How ops are defined, which implementation runs, and what importing the package costs."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_kernels
from cute_kernels.norm.ops import mtp_shared_head_rmsnorm
from cute_kernels.runtime import ops
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.key import OpKernel
from cute_kernels.runtime.ops import OPS, Cost, Op, define_op, nbytes
from cute_kernels.runtime.record import record_calls
from tests import helpers

PUBLIC_MODULES = [
    name
    for _, name, is_package in pkgutil.walk_packages(cute_kernels.__path__, "cute_kernels.")
    if not is_package and name.split(".")[-1].startswith(("ops", "reference")) and ".runtime." not in name
]

calls: list[str] = []


class DoubleCall(NamedTuple):
    x: torch.Tensor
    out: torch.Tensor
    factor: float


def check_double(call: DoubleCall) -> None:
    c = Checker("test_double")
    c.tensor("x", call.x, torch.float32, ("T",))
    c.tensor("out", call.out, torch.float32, ("T",))


def reference_double(call: DoubleCall) -> None:
    calls.append("reference")
    call.out.copy_(call.x * call.factor)


call_double = define_op(
    "test_double(Tensor x, Tensor(a!) out, float factor) -> ()",
    DoubleCall,
    check=check_double,
    reference=reference_double,
    cost=lambda call: Cost(nbytes(call.x), call.x.numel()),
)
DOUBLE = OPS.pop("test_double")


def double(x: torch.Tensor, out: torch.Tensor, factor: float) -> None:
    call_double(DoubleCall(x, out, factor))


class TripleCall(NamedTuple):
    x: torch.Tensor
    out: torch.Tensor


def test_a_record_of_the_call_is_what_checks_and_references_take() -> None:
    seen: list[TripleCall] = []

    def reference(call: TripleCall) -> None:
        call.out.copy_(3 * call.x)

    def cost(call: TripleCall) -> Cost:
        return Cost(nbytes(call.x, call.out))

    schema = "test_triple(Tensor x, Tensor(a!) out) -> ()"
    triple = define_op(schema, TripleCall, check=seen.append, reference=reference, cost=cost)
    op = OPS.pop("test_triple")
    x, out = torch.ones(2), torch.zeros(2)
    triple(TripleCall(x, out))
    assert out.tolist() == [3.0, 3.0]
    ((call_x, call_out),) = seen
    assert call_x is x
    assert call_out is out
    assert op.cost is not None
    assert op.cost(x, out) == Cost(16)


def test_a_record_has_the_schemas_arguments_in_its_order() -> None:
    schema = "test_triple_turned(Tensor(a!) out, Tensor x) -> ()"
    with pytest.raises(TypeError, match=r"test_triple_turned: expected a call record with \('out', 'x'\), got \('x', "):
        define_op(schema, TripleCall, check=len, reference=len)


@pytest.fixture
def kernel() -> OpKernel[DoubleCall]:
    """It takes calls with at most two elements."""
    return OpKernel(
        lambda call: calls.append("kernel"),
        lambda call: "" if call.x.numel() <= 2 else "it takes at most 2 elements",
        lambda *_: [],
    )


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    calls.clear()
    monkeypatch.delenv(ops.FALLBACK_VARIABLE, raising=False)


def op_with(kernel: OpKernel[DoubleCall] | None) -> Op:
    return replace(DOUBLE, kernel=None if kernel is None else lambda: kernel)


def args(n: int) -> tuple[Any, ...]:
    return torch.ones(n), torch.zeros(n), 2.0


# ---- every op of the package -----------------------------------------------------------------------------------------


def broken_rules(op: Op) -> Iterator[str]:
    schema = op.overload._schema
    names = [a.name for a in schema.arguments]
    if schema.name != f"cute_kernels::{op.name}":
        yield f"is called {schema.name}"
    if schema.returns:
        yield "returns something"
    if not any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        yield "mutates nothing"
    if any(a.kwarg_only or a.has_default_value() for a in schema.arguments):
        yield "has keyword-only arguments or defaults"
    for role, function in (("check", op.check), ("reference", op.reference)):
        if list(inspect.signature(function).parameters) != names:
            yield f"{role} has other arguments than the schema"
    if torch.Tag.pt2_compliant_tag not in op.overload.tags:
        yield "is not tagged for torch.compile"
    for key in ("CPU", "CUDA", "Meta"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(op.overload.name(), key):
            yield f"has no {key} implementation"


def test_registered_ops_keep_the_rules() -> None:
    for module in PUBLIC_MODULES:
        importlib.import_module(module)
    assert {"quantize_and_insert_k_cache", "dequantize_and_gather_k_cache"} <= set(OPS)
    assert [f"{name} {problem}" for name, op in OPS.items() for problem in broken_rules(op)] == []
    assert all(name == op.name for name, op in OPS.items())


def test_the_rules_find_what_breaks_them() -> None:
    assert list(broken_rules(DOUBLE)) == []
    function = torch.ops.aten.add.Tensor
    problems = set(broken_rules(Op("add", function, DoubleCall, DOUBLE.check, DOUBLE.reference, None, None)))
    assert {"is called aten::add", "returns something", "mutates nothing"} <= problems
    assert {"has keyword-only arguments or defaults", "check has other arguments than the schema"} <= problems


@pytest.mark.parametrize("module", [m for m in PUBLIC_MODULES if m.split(".")[-1].startswith("ops")])
def test_public_functions_explain_themselves(module: str) -> None:
    for name, function in vars(importlib.import_module(module)).items():
        if inspect.isfunction(function) and function.__module__ == module and not name.startswith("_"):
            assert function.__doc__, name
            assert "return" in function.__annotations__, name


def test_the_package_exports_what_it_names() -> None:
    assert sorted(cute_kernels.__all__) == list(cute_kernels.__all__)
    assert all(callable(getattr(cute_kernels, name)) for name in cute_kernels.__all__)


# ---- definition ------------------------------------------------------------------------------------------------------


def test_cpu_runs_the_reference() -> None:
    x, out, factor = args(3)
    assert double(x, out, factor) is None
    assert out.tolist() == [2.0] * 3
    assert torch.ops.cute_kernels.test_double(x, out, 3.0) is None
    assert out.tolist() == [3.0] * 3
    assert calls == ["reference"] * 2


def test_checks_come_before_anything_is_written() -> None:
    out = torch.zeros(4)
    with pytest.raises(ValueError, match=r"test_double: out: expected shape \[T\] with T = 3 as in x, got \[4\]"):
        double(torch.ones(3), out, 2.0)
    assert calls == []
    assert not out.any()


def test_fake_tensors_run_the_checks_and_nothing_else() -> None:
    with FakeTensorMode():
        double(torch.ones(3), torch.zeros(3), 2.0)
        with pytest.raises(ValueError, match="test_double: out"):
            double(torch.ones(3), torch.zeros(4), 2.0)
    double(torch.ones(3, device="meta"), torch.zeros(3, device="meta"), 2.0)
    assert calls == []


def test_opcheck_and_compile() -> None:
    helpers.check_op("test_double", *args(3), traces=True)

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def f(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        double(x, out, 2.0)
        return out + 1

    for n in (3, 5):
        assert f(torch.ones(n)).tolist() == [3.0] * n


def test_cost_is_recorded() -> None:
    with record_calls() as recording:
        double(*args(3))
    assert [(c.op, c.implementation, c.cost) for c in recording.calls] == [("test_double", "reference", Cost(12, 3))]


def test_an_op_without_cost_is_recorded_too() -> None:
    bare = replace(DOUBLE, name="bare", cost=None)
    with record_calls() as recording:
        ops._execute(bare, "reference", DOUBLE.reference, args(1))
    assert recording.calls[0].cost == Cost(0, 0)


def test_a_name_is_defined_once() -> None:
    with pytest.raises(RuntimeError, match="test_double"):
        define_op("test_double(Tensor x, Tensor(a!) out) -> ()", TripleCall, check=len, reference=len)
    assert "test_double" not in OPS


def test_nbytes() -> None:
    assert nbytes() == 0
    assert nbytes(torch.zeros(3, dtype=torch.int64), None, torch.zeros(2, 5, dtype=torch.bfloat16)[:, 1:]) == 24 + 16


# ---- choice of the CUDA implementation -------------------------------------------------------------------------------


def test_a_supported_call_runs_the_kernel(kernel: OpKernel[DoubleCall], monkeypatch: pytest.MonkeyPatch) -> None:
    body, implementation = ops._choose_cuda(op_with(kernel), args(2))
    body(*args(2))
    assert (implementation, calls) == ("kernel", ["kernel"])
    monkeypatch.setenv(ops.FALLBACK_VARIABLE, "reference")
    assert ops._choose_cuda(op_with(kernel), args(2))[1] == "kernel"


def test_an_unsupported_call_says_why(kernel: OpKernel[DoubleCall]) -> None:
    with pytest.raises(NotImplementedError) as caught:
        ops._choose_cuda(op_with(kernel), args(3))
    for part in ("test_double", "it takes at most 2 elements", "CUTE_KERNELS_FALLBACK=reference"):
        assert part in str(caught.value)


def test_an_op_without_kernel_says_so() -> None:
    with pytest.raises(NotImplementedError, match=r"test_double: .*no CUDA kernel.*CUTE_KERNELS_FALLBACK=reference"):
        ops._choose_cuda(op_with(None), args(3))


@pytest.mark.parametrize("with_kernel", [False, True])
def test_the_fallback_is_opt_in(
    with_kernel: bool, kernel: OpKernel[DoubleCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    op = op_with(kernel if with_kernel else None)
    monkeypatch.setenv(ops.FALLBACK_VARIABLE, "none")
    with pytest.raises(NotImplementedError):
        ops._choose_cuda(op, args(3))
    monkeypatch.setenv(ops.FALLBACK_VARIABLE, "reference")
    body, implementation = ops._choose_cuda(op, args(3))
    assert (body, implementation) == (op.reference, "reference")


def test_a_bad_value_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("1", "", "Reference"):
        monkeypatch.setenv(ops.FALLBACK_VARIABLE, value)
        with pytest.raises(ValueError, match=rf"CUTE_KERNELS_FALLBACK: expected 'none' or 'reference', got '{value}'"):
            ops._choose_cuda(op_with(None), args(3))


def test_a_kernel_is_loaded_at_the_first_cuda_call_only() -> None:
    def load() -> OpKernel[DoubleCall]:
        raise ModuleNotFoundError("no compiler")

    with_kernel = define_op(
        "test_loads(Tensor x, Tensor(a!) out, float factor) -> ()",
        DoubleCall,
        check=check_double,
        reference=reference_double,
        kernel=load,
    )
    op = OPS.pop("test_loads")
    with_kernel(DoubleCall(*args(2)))
    with pytest.raises(ModuleNotFoundError, match="no compiler"):
        ops._choose_cuda(op, args(2))


def test_a_call_without_results_does_nothing(kernel: OpKernel[DoubleCall]) -> None:
    op = op_with(kernel)
    body, implementation = ops._choose_cuda(op, (torch.ones(3), torch.zeros(0), 2.0))
    body(torch.ones(3), torch.zeros(0), 2.0)
    assert (implementation, calls) == ("kernel", [])


def test_empty_tensors_reach_a_kernel_with_plain_strides() -> None:
    """What a compiled kernel demands of strides and addresses must not fail where there is nothing to read."""
    seen: list[torch.Tensor] = []
    kernel: OpKernel[DoubleCall] = OpKernel(
        lambda call: seen.append(call.x),
        lambda call: "it must be aligned" if call.x.data_ptr() % 16 else "",
        lambda *_: [],
    )
    memory = torch.zeros(100)
    odd = (memory[1:].as_strided((3, 0), (7, 5)), memory[1:1], memory.as_strided((0, 8), (16, 2)))
    for x in odd:
        call = (x, torch.zeros(2), 2.0)
        ops._choose_cuda(op_with(kernel), call)[0](*call)
        assert (seen[-1].shape, seen[-1].stride()) == (x.shape, x.new_empty(x.shape).stride())
    for x in (torch.zeros(0, 8), memory):
        call = (x, torch.zeros(2), 2.0)
        ops._choose_cuda(op_with(kernel), call)[0](*call)
        assert seen[-1] is x


# ---- import ----------------------------------------------------------------------------------------------------------

PROBE = """
import time
import torch
start = time.process_time()
import cute_kernels
print(time.process_time() - start)
"""


def test_import_is_light() -> None:
    best = float("inf")
    for _ in range(3):
        run = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
        assert run.stderr == ""
        best = min(best, float(run.stdout))
        if best < 0.3:
            break
    assert best < 0.3


@pytest.mark.parametrize("value", [[1.0], "rows", 3, np.zeros((2, 4)), None])
def test_a_value_of_another_type_than_the_schema_names_op_and_argument(value: object) -> None:
    with pytest.raises(TypeError, match=r"^mtp_shared_head_rmsnorm: weight: expected a tensor, got "):
        mtp_shared_head_rmsnorm(torch.ones(2, 4, dtype=torch.bfloat16), value, 1e-6)  # type: ignore[arg-type]


def test_references_record_nothing_for_a_backward_pass() -> None:
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    with torch.no_grad():
        out = mtp_shared_head_rmsnorm(x, torch.ones(4, requires_grad=True), 1e-6)
    assert not out.requires_grad


class Elsewhere(torch.Tensor):
    """A tensor that says it lies on the first GPU."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Elsewhere:
        return data.as_subclass(cls)

    def get_device(self) -> int:
        return 0


def test_calls_that_differ_in_metadata_are_checked_apart() -> None:
    """What an op remembers a checked call by: everything that checks and `why_not` may look at."""
    x = torch.zeros(8, 64, dtype=torch.bfloat16)
    base = (x[:4, :32], None, 3, 0.5, "a", [1, 2])
    others = [
        (x[:3, :32], *base[1:]),
        (x[:4, :31], *base[1:]),
        (x[::2, :32], *base[1:]),
        (x[:4, 1:33], *base[1:]),
        (x[:4, :32].float(), *base[1:]),
        (x[:4, :32].to("meta"), *base[1:]),
        (x[:4, :32].reshape(2, 2, 32), *base[1:]),
        (None, *base[1:]),
        (base[0], x[0], *base[2:]),
        (*base[:2], 4, *base[3:]),
        (*base[:3], 0.25, *base[4:]),
        (*base[:4], "b", base[5]),
        (*base[:5], [1, 3]),
    ]
    described = [ops._describe(args)[0] for args in (base, *others, (Elsewhere(x[:4, :32]), *base[1:]))]
    assert len(set(described)) == len(described)
    assert ops._describe((x[:4, :32].clone()[:, :], *base[1:]))[0] != ops._describe(base)[0]  # other strides
    assert ops._describe(base) == ops._describe((x[:4, :32], *base[1:]))
    later = x.view(-1)[ops.ALIGNMENT // 2 :][: 4 * 64].view(4, 64)[:, :32]  # as aligned as base's, at another address
    assert ops._describe((later, *base[1:]))[0] == ops._describe(base)[0]
    assert ops._describe((later, *base[1:]))[1] != ops._describe(base)[1]


def test_a_call_that_needs_gradients_is_not_remembered_as_one_that_does_not() -> None:
    x = torch.zeros(4)
    plain = ops._describe((x,))
    with torch.no_grad():
        assert ops._describe((x,)) == ops._describe((x.detach().requires_grad_(),))
    x.requires_grad_()
    assert ops._describe((x,))[0] != plain[0]
