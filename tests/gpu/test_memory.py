# SPDX-License-Identifier: Apache-2.0
"""Memory that runs out in the middle of a step, and memory that captured steps use."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cute_kernels.norm.ops import mtp_shared_head_rmsnorm
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from cute_kernels.runtime.record import record_calls
from layers.bound import CHUNK_BYTES
from layers.mla import Workspace
from tests.gpu.test_bound_steps import Server, chunk, pair
from tests.layers.engine import KINDS, hidden_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

CUDA = torch.device("cuda", 0)
MEGABYTES = (0, 2, 4, 20, 22, 40, 60, 62, 64, 66, 80, 84, 120, 160, 320, 1000)


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


@contextlib.contextmanager
def at_most(more: int) -> Iterator[None]:
    """So many bytes more than there are, and nothing kept for later."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def fails(server: Server, more: int, *step: Any) -> bool:
    """Whether the step runs out of memory. Then what it had taken is free again, but for scratch."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    failed = False
    with at_most(more):
        try:
            chunk(server, *step)
        except torch.OutOfMemoryError:
            failed = True
    gc.collect()
    if failed:
        assert torch.cuda.memory_allocated() - before < CHUNK_BYTES + (1 << 20)
    return failed


@pytest.mark.parametrize("bind_steps", [True, False])
@pytest.mark.parametrize("ratio", KINDS)
def test_a_chunk_without_memory_can_run_again(ratio: int, bind_steps: bool) -> None:
    """The step that failed and those behind it have the bits of a server with memory."""
    outcomes = []
    rich = Server(ratio, 2, prefill="gathered", bind_steps=False)
    poor = Server(ratio, 2, prefill="gathered", bind_steps=bind_steps)
    for server in (rich, poor):
        server.prefill(300)
    for seed, megabytes in enumerate(MEGABYTES):
        step = [600, 800], [1500, 1700], 0, seed
        outcomes.append(fails(poor, megabytes << 20, *step))
        assert torch.equal(chunk(poor, *step), chunk(rich, *step)), megabytes
        hidden = hidden_rows(2, seed).cuda()
        lengths = [1501, 1701]
        assert torch.equal(poor.decode(lengths, hidden), rich.decode(lengths, hidden)), megabytes
        assert all(map(torch.equal, poor.bytes(), rich.bytes())), megabytes
    assert outcomes[0]
    assert not outcomes[-1]


@pytest.mark.parametrize("ratio", KINDS)
def test_a_decode_step_that_cannot_be_bound_for_want_of_memory(ratio: int) -> None:
    poor, rich = pair(ratio, 2)
    outcomes = []
    with torch.cuda.stream(torch.cuda.Stream()):  # whose scratch is not there yet
        for rows, megabytes in enumerate((0, 2, 20, 40, 62, 100, 200), start=1):
            step = [rows] * 2, [310 + rows] * 2, 2, rows
            outcomes.append(fails(poor, megabytes << 20, *step))
            for _ in range(2):
                assert torch.equal(chunk(poor, *step), chunk(rich, *step)), megabytes
            assert poor.layer._bound is not None
            assert not poor.layer._bound.foreign
        torch.cuda.synchronize()
    assert all(map(torch.equal, poor.bytes(), rich.bytes()))
    assert outcomes[0]


# ---- memory of captured steps ----------------------------------------------------------------------------------------


def take_memory() -> list[torch.Tensor]:
    """Much of what is free, full of NaN: whoever still uses freed memory sees it."""
    return [torch.full((size << 18,), torch.nan, device=CUDA) for size in (1, 2, 8, 20, 64, 256) for _ in range(4)]


def test_workspace_of_a_captured_step_is_kept() -> None:
    workspace, source = Workspace(), torch.arange(512, device=CUDA).bfloat16()
    graph = torch.cuda.CUDAGraph()
    workspace.get(3, 70, 512, CUDA)
    with torch.cuda.graph(graph):
        memory = workspace.get(3, 70, 512, CUDA)
        memory.copy_(source.expand(3, 70, 512))
        out = memory.sum(dim=2, dtype=torch.float32)
    place = memory.data_ptr()
    del memory
    grown = workspace.get(300, 70, 512, CUDA)
    assert grown.data_ptr() != place
    grown.fill_(torch.nan)
    others = take_memory()
    assert all(not other.data_ptr() <= place < other.data_ptr() + other.nbytes for other in others)
    source.mul_(2)
    graph.replay()
    assert torch.equal(out, source.float().sum().expand(3, 70))
    assert all(bool(other.isnan().all()) for other in [grown, *others])


def test_workspace_does_not_grow_inside_a_capture() -> None:
    workspace = Workspace()
    small = workspace.get(1, 1, 512, CUDA)
    for grow in (lambda: workspace.get(1, 2, 512, CUDA), lambda: workspace.parts(4096, CUDA)):
        with (
            pytest.raises(RuntimeError, match=r"Workspace: expected \d+ bytes .* before a CUDA graph is captured"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            grow()
        assert workspace.get(1, 1, 512, CUDA).data_ptr() == small.data_ptr()
    assert workspace.get(1, 2, 512, CUDA).shape == (1, 2, 512)


@pytest.mark.parametrize("ratio", KINDS)
def test_a_captured_chunk_survives_a_larger_one(ratio: int) -> None:
    server = Server(ratio, 2, prefill="gathered", bind_steps=False)
    server.prefill(300)
    m = server.metadata([40, 64], [340, 364], 0)
    hidden = hidden_rows(104, seed=1).cuda()
    for _ in range(2):  # compiles, and makes the workspace
        want = server.layer(m.positions, hidden, m, server.caches)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = server.layer(m.positions, hidden, m, server.caches)
    address = server.layer.mla_attn.workspace.addresses[0]
    other = Server(ratio, 2, prefill="gathered", bind_steps=False, workspace=server.layer.mla_attn.workspace)
    chunk(other, [900, 900], [900, 900], 0, 3)
    assert other.layer.mla_attn.workspace.addresses[0] != address
    kept = take_memory()
    out.fill_(torch.nan)
    # the builder's tensors are its own: this step's numbers are there again
    server.metadata([40, 64], [340, 364], 0)
    graph.replay()
    assert torch.equal(out, want)
    assert all(bool(memory.isnan().all()) for memory in kept)


# ---- recordings ------------------------------------------------------------------------------------------------------


def test_recordings_are_of_a_thread_whatever_its_device() -> None:
    def norm(rows: int, device: torch.device) -> torch.Tensor:
        x = torch.ones(rows, 1024, device=device).bfloat16()
        return mtp_shared_head_rmsnorm(x, x[0].clone(), 1e-6)

    others: list[Any] = []

    def work(device: torch.device) -> None:
        norm(7, device)  # of nobody
        with record_calls() as own:
            for _ in range(3):
                norm(5, device)
        others.append(own)

    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())][-2:]
    norm(1, CUDA)
    with record_calls() as recording:
        threads = [threading.Thread(target=work, args=(device,)) for device in devices * 2]
        for thread in threads:
            thread.start()
        norm(2, devices[-1])
        for thread in threads:
            thread.join()
        norm(3, CUDA)
    assert [call.op for call in recording.calls] == ["mtp_shared_head_rmsnorm"] * 2
    assert [len(own.calls) for own in others] == [3] * len(threads)
    done = [call for one in (recording, *others) for call in one.calls]
    assert all(call.implementation == "kernel" and call.seconds > 0 for call in done)
