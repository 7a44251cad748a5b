# SPDX-License-Identifier: Apache-2.0
"""Whether a wrong kernel is found: kernels that are wrong in every way, run on the CPU in place of real ones."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from cute_kernels.kv_cache import ops as kv_ops
from cute_kernels.kv_cache.call import InsertCall
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime import verify
from cute_kernels.runtime.isolated import kept_processes, run_isolated
from cute_kernels.runtime.key import KernelKey, OpKernel
from cute_kernels.runtime.ops import OPS, Op
from cute_kernels.runtime.registry import all_ops
from cute_kernels.runtime.verify import Example, Verdict, clone_arguments, compare_arguments, verify_op

CPU = torch.device("cpu")
INSERT = OPS["quantize_and_insert_k_cache"]
GATHER = OPS["dequantize_and_gather_k_cache"]
assert kv_ops


def op_with(
    launch: Callable[..., None] = INSERT.reference, why_not: Callable[[InsertCall], str] = lambda call: ""
) -> Op:
    """INSERT with another kernel: a right one, if not said otherwise. launch: takes arguments one by one"""
    kernel = OpKernel[InsertCall](lambda call: launch(*call), why_not, lambda *_: [])
    return replace(INSERT, kernel=lambda: kernel)


def wrong(change: Callable[..., None]) -> Callable[..., None]:
    def launch(*args: Any) -> None:
        INSERT.reference(*args)
        change(*args)

    return launch


def test_a_right_kernel_passes() -> None:
    verdict = verify_op(op_with(), CPU)
    assert (verdict.status, verdict.detail) == ("pass", "")
    assert verdict.cases >= 6


def flip(k: torch.Tensor, k_cache: torch.Tensor, *_: Any) -> None:
    verify.raw_memory(k_cache)[-1] ^= 1


def write_input(k: torch.Tensor, *_: Any) -> None:
    if k.numel():
        verify.raw_memory(k)[0] ^= 1


def write_bad_slots(k: torch.Tensor, k_cache: torch.Tensor, slots: torch.Tensor, block_size: int, fmt: str) -> None:
    bad = (slots < 0) | (slots >= k_cache.shape[0] * block_size)
    if bad.any():
        INSERT.reference(k[: len(slots)][bad][:1], k_cache, torch.zeros(1, dtype=torch.int64), block_size, fmt)


def skip_last_row(*args: Any) -> None:
    _, k_cache, slots, block_size, _ = args
    if slots.shape[0] > 1000:
        k_cache.as_strided((1,), (1,), int(slots[-1]) // block_size * k_cache.stride(0)).fill_(0xA5)


class Flaky:
    """Right the first time, wrong the second."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: Any) -> None:
        INSERT.reference(*args)
        self.calls += 1
        if self.calls % 2 == 0:
            flip(*args)


def crash(*args: Any) -> None:
    raise RuntimeError("CUDA error: an illegal instruction was encountered\nmore")


@pytest.mark.parametrize(
    ("launch", "detail"),
    [
        (wrong(flip), r"k_cache: 1 of \d+ bytes differ, the first at byte \d+: expected \d+, got \d+"),
        (wrong(write_input), r"k: 1 of \d+ bytes differ"),
        (wrong(write_bad_slots), "k_cache: "),
        (wrong(skip_last_row), r"(1025|4099) rows.*k_cache: "),
        (lambda *args: None, "k_cache: "),
        (Flaky(), "the second run differs from the first: k_cache: 1 of"),
        (crash, "^RuntimeError: CUDA error: an illegal instruction was encountered$"),
    ],
)
def test_a_wrong_kernel_is_reported(launch: Callable[..., None], detail: str) -> None:
    verdict = verify_op(op_with(launch), CPU)
    assert verdict.status == "fail"
    assert verdict.name == "quantize_and_insert_k_cache"
    assert re.search(detail, verdict.detail), verdict.detail


def test_what_a_kernel_does_not_take_is_no_failure() -> None:
    verdict = verify_op(op_with(why_not=lambda call: "sm_80 has no e4m3 conversion"), CPU)
    assert (verdict.status, verdict.cases) == ("unsupported", 0)
    assert "sm_80 has no e4m3 conversion" in verdict.detail
    verdict = verify_op(op_with(why_not=lambda call: "too many rows" if call.k.shape[0] == 1025 else ""), CPU)
    assert verdict.status == "pass"
    assert verdict.detail.startswith("1 not supported here, 1025 rows")


# ---- kernels that run in the place of others -------------------------------------------------------------------------


@dataclass(frozen=True)
class Tuned(KernelKey):
    kernel_name: ClassVar[str] = "tests.tuned"
    tuning: ClassVar[tuple[str, ...]] = ("rows",)
    rows: int = 1
    norm: bool = False


FEW, MANY, OTHER = Tuned("sm_90a"), Tuned("sm_90a", 4), Tuned("sm_90a", 4, norm=True)


class TunedKernels:
    """INSERT with kernels that the number of rows chooses from; all calls are short.

    ran     those that ran
    wrong   the one that is
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[KernelKey] = []
        self.wrong: KernelKey | None = None
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(compile_, "_functions", {})
        monkeypatch.setattr(compile_, "_link_once", lambda key: lambda call: self.run(key, call))
        kernel = OpKernel[InsertCall](
            lambda call: compile_.launch(FEW, 0, call), lambda call: "", lambda *_: [FEW, MANY, OTHER]
        )
        self.op = replace(INSERT, kernel=lambda: kernel)

    def run(self, key: KernelKey, call: InsertCall) -> None:
        self.ran.append(key)
        INSERT.reference(*call)
        if key == self.wrong:
            flip(*call)


def test_kernels_that_differ_in_tuning_run_in_the_place_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = TunedKernels(monkeypatch)
    needs = verify.needs_of(kernels.op, CPU)
    assert set(needs.keys) == {FEW, MANY}
    assert needs.deployed == (FEW, MANY, OTHER)
    verdict = verify_op(kernels.op, CPU)
    assert (verdict.status, verdict.detail) == ("pass", "")
    assert kernels.ran == [FEW, FEW, FEW, MANY] * verdict.cases
    kernels.wrong = MANY
    assert re.search(
        r"tests\.tuned\(.*rows=4\) differs: k_cache: 1 of \d+ bytes differ", verify_op(kernels.op, CPU).detail
    )
    kernels.op.load_kernel().launch(InsertCall(*next(iter((verify.examples_of(INSERT) or list)())).args))
    assert kernels.ran[-1] == FEW


def forget_devices() -> None:
    """What functions of the package know of devices."""
    for name, module in list(sys.modules.items()):
        for value in vars(module).values() if name.startswith("cute_kernels.") else ():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


CLUSTERS = (9, 0), (10, 0)
"""Capabilities with kernels whose CTAs work together."""


def kind_of_cluster(key: KernelKey) -> tuple[str, ...]:
    """Kernel, and what makes its CTAs work together in another way."""
    values = {name: getattr(key, name, None) for name in ("cluster", "splits", "blocks", "operands")}
    return key.kernel_name, *(f"{name}={value}" for name, value in values.items() if value is not None)


def zeros(*size: Any, generator: torch.Generator | None = None, **options: Any) -> torch.Tensor:
    return torch.zeros(*size, **options)


CAPABILITIES = (8, 0), (9, 0), (10, 0), (12, 0)


@pytest.fixture(scope="module")
def needs() -> dict[tuple[int, int], list[verify.Needs]]:
    """What each op needs on GPUs of each capability: its examples, which take longest, are made once."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    found: dict[tuple[int, int], list[verify.Needs]] = {capability: [] for capability in CAPABILITIES}
    capabilities = list(CAPABILITIES)
    cases_of, made = verify.cases_of, {}

    def cases_once(op: Op, kind: str = "EXAMPLES") -> Callable[[], Iterable[Any]] | None:
        cases = cases_of(op, kind)
        if cases is not None and (op.name, kind) not in made:
            made[op.name, kind] = list(cases())
        return None if cases is None else lambda: made[op.name, kind]

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: None)
        patch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[0])
        patch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(multi_processor_count=132))
        for op in all_ops().values():
            verify.examples_of(op)  # what it imports takes the function that is replaced now
        # nothing is written, and nobody reads numbers
        patch.setattr(verify, "clone_arguments", lambda args, device: tuple(args))
        patch.setattr(torch, "randn", zeros)
        patch.setattr(verify, "cases_of", cases_once)
        for op in (op for op in all_ops().values() if op.kernel is not None):
            made.clear()
            for capability in CAPABILITIES:
                capabilities[0] = capability
                forget_devices()
                found[capability].append(verify.needs_of(op, CPU))
    torch.set_num_threads(threads)
    forget_devices()
    return found


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_of_a_deployment_runs(
    needs: dict[tuple[int, int], list[verify.Needs]], capability: tuple[int, int]
) -> None:
    """Called on a GPU of that capability, examples ask for all keys that deployments have, and soaks for clusters'."""
    deployed = {key for need in needs[capability] for key in need.deployed}
    reached = {key for need in needs[capability] for key in need.keys}
    assert len(deployed) > 200
    assert sorted(key.identity for key in deployed - reached) == []
    # those whose CTAs work together run hundreds of times, with delays
    soaked = {kind_of_cluster(key) for need in needs[capability] for key in need.soaked}
    together = {kind_of_cluster(key) for key in deployed if "barrier.cluster" in key.instructions}
    assert bool(together) == (capability in CLUSTERS)
    assert sorted(together - soaked) == []
    for key, other in itertools.combinations(deployed, 2):
        if key.stands_for(other):
            kinds, others = ([type(argument) for argument in one.build()[1]] for one in (key, other))
            assert kinds == others, f"{key}, {other}"


def test_ops_without_kernel_or_examples_are_listed() -> None:
    assert verify_op(replace(INSERT, name="x", kernel=None), CPU) == Verdict("x", "no kernel")
    assert verify_op(replace(op_with(), name="stranger"), CPU).status == "no examples"


WITH_KERNEL = {op.name: op for op in all_ops().values() if op.kernel is not None}


def test_which_ops_have_kernels() -> None:
    assert {"quantize_and_insert_k_cache", "dequantize_and_gather_k_cache", "save_partial_states"} <= {*WITH_KERNEL}


LARGE = 4 << 20
"""Bytes of an example whose reference takes long."""


@pytest.mark.parametrize("op", WITH_KERNEL.values(), ids=list(WITH_KERNEL))
def test_every_op_with_a_kernel_has_examples_that_are_legal_calls(op: Op, thorough: bool) -> None:
    """Without --thorough, of large examples the first one alone is run."""
    examples = verify.examples_of(op)
    assert examples is not None
    arguments = [argument.name for argument in op.overload._schema.arguments]
    names, launches, has_large = [], set(), False
    for example in examples():
        names.append(example.name)
        launches.add(dict(zip(arguments, example.args, strict=True)).get("use_pdl"))
        args = clone_arguments(example.args, CPU)
        op.check(*args)
        is_large = sum(a.untyped_storage().nbytes() for a in args if isinstance(a, torch.Tensor)) > LARGE
        if is_large and has_large and not thorough:
            continue
        has_large |= is_large
        op.reference(*args)
        mutated = compare_arguments([str(n) for n in range(len(args))], clone_arguments(args, CPU), example.args)
        empty = any(isinstance(a, torch.Tensor) and a.numel() == 0 for a in args)
        assert mutated or empty, f"{example.name}: does nothing"
        if example.agree is not None:
            assert example.agree(clone_arguments(args, CPU), args) == "", example.name
            if mutated:
                assert example.agree(clone_arguments(example.args, CPU), args), example.name
    assert len(names) == len(set(names)) >= 3
    assert launches == ({False, True} if "use_pdl" in arguments else {None}), "dependent launches or not"


def test_clones_keep_views_strides_and_gaps() -> None:
    base = torch.arange(40, dtype=torch.float32).view(4, 10)
    left, right, other = base[:, 1:3], base[::2, 4:], torch.tensor([7], dtype=torch.int64)
    copies = clone_arguments((left, 5, right, None, other), CPU)
    assert copies[1] == 5
    assert copies[3] is None
    for copy, original in ((copies[0], left), (copies[2], right), (copies[4], other)):
        assert torch.equal(copy, original)
        assert (copy.stride(), copy.storage_offset()) == (original.stride(), original.storage_offset())
        assert copy.data_ptr() != original.data_ptr()
    copies[0].fill_(-1.0)
    assert copies[2].untyped_storage().data_ptr() == copies[0].untyped_storage().data_ptr()
    assert base.min() == 0
    assert torch.equal(verify.raw_memory(copies[0]).view(torch.float32).view(4, 10)[:, 3:], base[:, 3:])


def test_numbers_agree_if_both_are_nan() -> None:
    def tensors(values: list[int], dtype: torch.dtype) -> tuple[torch.Tensor]:
        return (torch.tensor(values, dtype=torch.int32).view(dtype),)

    nan, other_nan = 0x7FC00000, -1
    assert compare_arguments(["x"], tensors([nan, 1], torch.float32), tensors([other_nan, 1], torch.float32)) == ""
    for one in (nan, other_nan, -1):
        assert compare_arguments(["x"], tensors([one, 1], torch.float32), tensors([-1, 1], torch.float32)) == ""
    assert compare_arguments(["x"], tensors([nan], torch.float32), tensors([1], torch.float32)) != ""
    assert compare_arguments(["x"], tensors([nan], torch.int32), tensors([other_nan], torch.int32)) != ""
    zero = compare_arguments(["x"], tensors([0], torch.float32), tensors([-(2**31)], torch.float32))
    assert zero == "x: 1 of 4 bytes differ, the first at byte 3: expected 128, got 0"


# ---- processes -------------------------------------------------------------------------------------------------------


def worker(name: str) -> Verdict:
    """What the isolated process runs."""
    if name == "dies":
        os._exit(7)
    if name == "hangs":
        time.sleep(600)
    return Verdict(name, "pass", cases=os.getpid())


def test_what_breaks_breaks_alone() -> None:
    with kept_processes():
        one, two, dies, three = run_isolated(["one", "two", "dies", "three"], worker)
        # a process that has imported everything: what is slow to start must not pass for one that hangs
        (hangs,) = run_isolated(["hangs"], worker, timeout=0.5)
        (four,) = run_isolated(["four"], worker)
        # processes that are kept go on, whatever they are to do
        five, six = run_isolated(["five", "six"], worker)
        (other,) = run_isolated(["other function"], answer)
        assert len(multiprocessing.active_children()) == 1
    assert not multiprocessing.active_children()
    assert [v.status for v in (one, two, three, four, five, six, other)] == ["pass"] * 7
    assert (dies.status, hangs.status) == ("fail", "fail")
    assert one.cases == two.cases != os.getpid()
    assert len({one.cases, three.cases, four.cases}) == 3
    assert [v.cases for v in (five, six, other)] == [four.cases] * 3
    assert dies.detail == "the process died with exit code 7"
    assert hangs.detail == "no answer within 0.5 s: stopped"


class Unreadable:
    """An answer that cannot be read, by the caller's main thread for another reason than elsewhere."""

    def __reduce__(self) -> Any:
        return read_there, (os.getpid(),)


def read_there(process: int) -> str:
    if os.getpid() == process or threading.current_thread() is not threading.main_thread():
        raise RuntimeError("not here")
    raise ImportError("half imported")


def answer(name: str) -> Any:
    return Unreadable() if name == "unreadable" else Verdict(name, "pass", os.getpid())


def test_an_answer_that_cannot_be_read_spoils_no_other() -> None:
    verdicts = list(run_isolated(["one", "unreadable", "two"], answer))
    assert [(v.name, v.status) for v in verdicts] == [("one", "pass"), ("unreadable", "fail"), ("two", "pass")]
    assert verdicts[1].detail == "the answer cannot be read: ImportError('half imported')"
    assert verdicts[0].cases == verdicts[2].cases, "the process goes on"


def test_processes_side_by_side_and_none_left_behind() -> None:
    results = run_isolated(["hangs", "one"], worker, timeout=600, workers=2)
    verdict = next(results)
    assert (verdict.name, verdict.status) == ("one", "pass"), "one that hangs holds up no other"
    results.close()
    assert not multiprocessing.active_children()
    assert list(run_isolated([], worker, workers=2)) == []


def test_examples_are_deterministic() -> None:
    examples: Callable[[], Any] | None = verify.examples_of(GATHER)
    assert examples is not None
    first, second = (list(examples()) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert isinstance(a, Example)
        assert a.name == b.name
        assert compare_arguments([str(n) for n in range(len(a.args))], clone_arguments(a.args, CPU), b.args) == ""
