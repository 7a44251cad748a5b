# SPDX-License-Identifier: Apache-2.0
"""What every op promises, whatever it computes: each promise for each op and for each kernel that it can run here.

A test runs the smallest calls that ops are verified with and that between them launch all of their kernels, in memory
with guards (`promises.Call`). Their results agree with the reference; a promise is held against these results, bit for
bit, or against the reference where a promise is about other data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch

from cute_kernels.models import MODELS
from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.registry import deployment_keys
from cute_kernels.runtime.verify import Example
from tests.gpu import promises
from tests.gpu.promises import CASES, NAMING, NO_ROWS, OPS, ROWS, Call, chosen_examples, examples, result_of
from tests.helpers import bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

WAIT_CLOCKS = 2_000_000
"""A millisecond: longer than any launch of these calls takes, so that what does not wait for it comes too early."""


@pytest.fixture(autouse=True)
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "kernel" in request.fixturenames:
        op, kernel = (request.getfixturevalue(name) for name in ("op", "kernel"))
        promises.use_kernel(op, kernel, monkeypatch)


def calls(op: str, kernel: str, poison: int | None = None) -> Iterator[tuple[str, Call, tuple[torch.Tensor, ...]]]:
    """(name, call, memory after it) of the chosen examples."""
    for number in chosen_examples(op, kernel):
        example = examples(op)[number]
        yield example.name, Call(OPS[op], example.args, poison), result_of(op, kernel, number)


def check(name: str, call: Call, want: Any, got: Any = None) -> None:
    why = call.difference(call.memories if got is None else got, want)
    assert not why, f"{name}: {why}"


def name_of(value: str) -> str:
    return value.replace(" ", "-")


def of_cases(ops: Collection[str]) -> pytest.MarkDecorator:
    """The cases of some ops. With `--dist loadgroup` a process has all tests of a case: what they share, results and
    references above all, is made once."""
    cases = [pytest.param(*case, marks=pytest.mark.xdist_group("-".join(case))) for case in CASES if case[0] in ops]
    return pytest.mark.parametrize(("op", "kernel"), cases, ids=name_of)


each_kernel = of_cases(OPS)


# ---- what is run -----------------------------------------------------------------------------------------------------


def test_every_kernel_of_a_deployment_is_in_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = set()
    for op, kernel in CASES:
        with monkeypatch.context() as patch:
            promises.use_kernel(op, kernel, patch)
            found = {key.kernel_name for keys in promises.launched(op, kernel) for key in keys or ()}
        assert kernel != "portable" or any("mma_sync" in name for name in found), f"{op}: {found} are not portable"
        launched |= found
    arch = arch_of(0)
    deployed = {key.kernel_name for model in MODELS.values() for key in deployment_keys(model, 1, arch)}
    assert deployed <= launched


@each_kernel
def test_results_agree_with_the_reference(op: str, kernel: str) -> None:
    """Of every example, so that others can rely on results."""
    for number, keys in enumerate(promises.launched(op, kernel)):
        if keys is not None:
            result_of(op, kernel, number)


# ---- memory ----------------------------------------------------------------------------------------------------------


@each_kernel
@pytest.mark.parametrize("poison", [0xFF, 0x7C, 0x00])
def test_views_of_larger_memory(op: str, kernel: str, poison: int) -> None:
    """What lies between and around elements, pages and tensors is neither written nor of any influence: NaN, large
    numbers, slots and lengths that exist."""
    for name, call, result in calls(op, kernel, poison):
        want = call.expected(result)
        call.run()
        check(name, call, want)


@each_kernel
def test_strides(op: str, kernel: str, record_property: Callable[[str, object], None]) -> None:
    """Slices of larger tensors, wherever the op takes them, are read and written as dense tensors are."""
    found = set()
    for number in chosen_examples(op, kernel):
        example = examples(op)[number]
        names, args = promises.strided(op, example.args)
        found |= set(names)
        plain, call = Call(OPS[op], example.args), Call(OPS[op], args, poison=0xFF)
        for each in (plain, call):
            each.run()
        check(example.name, call, call.expected(call.memories))
        for place, (mine, want) in enumerate(zip(call.args, plain.args, strict=True)):
            if isinstance(want, torch.Tensor):
                argument = OPS[op].overload._schema.arguments[place].name
                assert torch.equal(bits(mine), bits(want)), f"{example.name}: {argument} differs"
    record_property("strided", sorted(found))
    assert found, f"{op}: it takes no slices"


# ---- bits, streams and graphs ----------------------------------------------------------------------------------------


@each_kernel
def test_every_run_gives_the_same_bits(op: str, kernel: str) -> None:
    for name, call, _ in calls(op, kernel):
        want = call.result()
        for _ in range(50):
            check(name, call, want, call.result())


@each_kernel
def test_streams(op: str, kernel: str) -> None:
    """Two calls of which each has a stream of its own, behind a wait. Neither runs anywhere else, disturbs the other
    or allocates."""
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    for number in chosen_examples(op, kernel):
        example, result = examples(op)[number], result_of(op, kernel, number)
        pair = [Call(OPS[op], example.args) for _ in streams]
        wants = [call.expected(result) for call in pair]
        for call in pair:
            call.run()
            call.clear()
        torch.cuda.synchronize()
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(WAIT_CLOCKS)
        for _ in range(3):
            for call, stream in zip(pair, streams, strict=True):
                with torch.cuda.stream(stream):
                    call.reset()
                    before = torch.cuda.memory_stats()["allocation.all.allocated"]
                    call.run()
                    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, (
                        f"{example.name}: it allocates"
                    )
        torch.cuda.synchronize()
        for call, want in zip(pair, wants, strict=True):
            check(example.name, call, want)


@each_kernel
@pytest.mark.parametrize("use_pdl", [False, True])
def test_graphs(op: str, kernel: str, use_pdl: bool) -> None:
    """Captured over zeros, a call is of what lies in memory when the graph is replayed. As dependents, calls wait for
    what is before them and hold up what is behind."""
    names = [argument.name for argument in OPS[op].overload._schema.arguments]
    if use_pdl and "use_pdl" not in names:
        pytest.skip("it is never launched as a dependent")
    for number in chosen_examples(op, kernel):
        example, result = examples(op)[number], result_of(op, kernel, number)
        args = list(example.args)
        if "use_pdl" in names:
            args[names.index("use_pdl")] = use_pdl
        pair = Call(OPS[op], args), Call(OPS[op], args)
        sources = [[torch.zeros_like(memory) for memory in call.memories] for call in pair]
        copies = [[torch.empty_like(memory) for memory in call.memories] for call in pair]
        for call in pair:
            call.clear()
            call.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(2):
                for call, source in zip(pair, sources, strict=True):
                    for memory, other in zip(call.memories, source, strict=True):
                        memory.copy_(other)
                for call in pair:
                    call.run()
                for call, copy in zip(pair, copies, strict=True):
                    for memory, other in zip(call.memories, copy, strict=True):
                        other.copy_(memory)
                    call.clear()
        for call, source in zip(pair, sources, strict=True):
            for start, other in zip(call.start, source, strict=True):
                other.copy_(start)
        for _ in range(2):
            graph.replay()
            for call, copy in zip(pair, copies, strict=True):
                check(example.name, call, call.expected(result), copy)


@of_cases(ROWS)
def test_rows_alone_and_in_a_batch(op: str, kernel: str) -> None:
    """A call in three pieces, the first of one row where results may be that small, leaves the same memory."""
    tried = 0
    for number, (example, keys) in enumerate(zip(examples(op), promises.launched(op, kernel), strict=True)):
        if keys is None:
            continue
        call = Call(OPS[op], example.args)
        parts = promises.pieces(op, call.args)
        if parts is None or any(promises.kernels_of(OPS[op], part) is None for part in parts):
            continue
        for part in parts:
            OPS[op].overload(*part)
        check(example.name, call, call.but_scratch(call.expected(result_of(op, kernel, number))))
        tried += 1
    assert tried, f"{op}: no example can be cut"


# ---- data ------------------------------------------------------------------------------------------------------------


def check_data(op: str, example: Example, label: str, args: tuple[Any, ...]) -> None:
    """The call with data of its own does no harm, and what the reference says if that says anything."""
    call = Call(OPS[op], args)
    call.run()
    why = call.harm()
    if not why and promises.is_defined(op, args):
        why = promises.disagreement(OPS[op], example, args, call.on_cpu())
    assert not why, f"{example.name}, {label}: {why}"


@of_cases(NAMING)
def test_what_is_not_named_is_not_read(op: str, kernel: str) -> None:
    chosen, launched = chosen_examples(op, kernel), promises.launched(op, kernel)
    tried = 0
    for number in (*chosen, *(n for n, keys in enumerate(launched) if keys and n not in chosen)):
        if tried and number not in chosen:
            break
        example = examples(op)[number]
        args = promises.with_nan_where_nothing_is_read(op, example.args)
        if args is not None:
            check_data(op, example, "NaN where nothing is read", args)
            tried += 1
    assert tried, f"{op}: every example reads all that it has"


@each_kernel
def test_bad_numbers(op: str, kernel: str) -> None:
    """A third of any argument's integers, or all, name nothing: harmless, and as the reference has it."""
    for number in chosen_examples(op, kernel):
        example = examples(op)[number]
        for label, args in promises.with_bad_numbers(op, example.args):
            check_data(op, example, label, args)


@each_kernel
def test_nan_in_data(op: str, kernel: str) -> None:
    """NaN in few elements of each argument spoils what the reference says, and nothing else."""
    for number in chosen_examples(op, kernel):
        example = examples(op)[number]
        for label, args in promises.with_nan(op, example.args):
            check_data(op, example, label, args)


@pytest.mark.parametrize("op", NO_ROWS)
def test_no_rows(op: str) -> None:
    """A call without a row is accepted, launches nothing and leaves everything as it is."""
    for args in promises.without_rows(op):
        call = Call(OPS[op], args)
        assert promises.launches_of(call.run) == 0
        check("no rows", call, call.start)
