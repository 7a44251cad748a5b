# SPDX-License-Identifier: Apache-2.0
"""The second stream of captured steps: nobody else's, and beside the captured one."""

from __future__ import annotations

import math
import threading

import cuda.bindings.driver as driver
import pytest
import torch

from cute_kernels.runtime.streams import make_stream
from layers.streams import graph_streams, run_on_streams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

POOL = 64
"""More streams of a priority than torch has: every one of its pool."""


def second_stream(device: torch.device, captured: torch.cuda.Stream | None = None) -> torch.cuda.Stream:
    """That of a step that is captured on a stream, or on torch's own for that."""
    number = torch.zeros(1, device=device)
    with torch.cuda.device(device), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=captured):
        number.add_(1)
        (found,) = graph_streams(device)
    return found


def pooled() -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(priority=priority) for priority in (0, -1) for _ in range(POOL)]


@pytest.mark.parametrize("index", range(max(1, torch.cuda.device_count())))
def test_it_is_no_stream_of_torchs_pool(index: int) -> None:
    device = torch.device("cuda", index)
    with torch.cuda.device(device):
        own = second_stream(device)
        assert own.device == device
        others = [*pooled(), torch.cuda.default_stream(), make_stream(index)]
    assert own.cuda_stream not in {other.cuda_stream for other in others}
    assert own not in others


def test_it_stays_the_same_whatever_stream_is_captured() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    own = second_stream(device)
    for captured in (torch.cuda.Stream(), torch.cuda.Stream(priority=-1), make_stream(device.index)):
        assert second_stream(device, captured) == own


def test_a_step_on_it_takes_no_other() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    own, number = second_stream(device), torch.zeros(1, device=device)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=own):
        number.add_(1)
        assert graph_streams(device) == ()


def test_threads_that_capture_at_a_time_have_their_own() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    found = [second_stream(device)]
    thread = threading.Thread(target=lambda: found.append(second_stream(device, torch.cuda.Stream())))
    thread.start()
    thread.join()
    assert len(found) == 2
    assert found[0] != found[1]


def side_by_side(graph: torch.cuda.CUDAGraph) -> tuple[int, int]:
    """(nodes of a captured graph, pairs of them of which neither waits for the other)"""
    handle = driver.CUgraph(graph.raw_cuda_graph())
    *_, count = driver.cuGraphGetEdges(handle)
    error, sources, targets, *_ = driver.cuGraphGetEdges(handle, count)
    assert error == driver.CUresult.CUDA_SUCCESS
    ahead = {(int(a), int(b)) for a, b in zip(sources, targets, strict=True)}
    nodes = {node for edge in ahead for node in edge}
    for middle in nodes:
        ahead |= {(a, b) for a in nodes for b in nodes if (a, middle) in ahead and (middle, b) in ahead}
    return len(nodes), math.comb(len(nodes), 2) - len(ahead)


@pytest.mark.parametrize("is_own", [True, False])
def test_a_graph_has_two_branches(is_own: bool) -> None:
    """On the captured stream itself it has one."""
    device = torch.device("cuda", torch.cuda.current_device())
    captured, x = torch.cuda.Stream(), torch.arange(4.0, device=device)
    y = [torch.empty_like(x) for _ in range(3)]
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=captured):
        torch.mul(x, 2, out=y[0])
        streams = graph_streams(device) if is_own else (captured,)
        tasks = [lambda: torch.add(y[0], 1, out=y[1]), lambda: torch.add(y[0], 5, out=y[2])]
        first, second = run_on_streams(tasks, streams, device)
        torch.add(first, second, out=y[0])
    assert side_by_side(graph) == (4, 1 if is_own else 0)
    graph.instantiate()
    graph.replay()
    assert y[0].tolist() == [6 + 4 * i for i in range(4)]
