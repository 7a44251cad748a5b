# SPDX-License-Identifier: Apache-2.0
"""Ranks of a layer: a pool of processes that are a process group, threads, and what tests have them do."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed

from layers import Communicator, GroupCommunicator, TensorParallel, ThreadCommunicator
from layers.attention import DeepseekV4MultiHeadLatentAttentionWrapper
from tests.layers.engine import Engine, Request, hidden_rows, make_layer

TIMEOUT_S = 60.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _serve(rank: int, size: int, backend: str, port: int, timeout_s: float, pipe: Connection) -> None:
    """A process of the pool: functions come in, (result, error) goes out."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    timeout = timedelta(seconds=timeout_s)
    torch.distributed.init_process_group(backend, rank=rank, world_size=size, timeout=timeout)
    groups = {count: torch.distributed.new_group(range(count), timeout=timeout) for count in range(2, size + 1)}
    while True:
        message = pipe.recv()
        if message is None:
            break
        count, function, arguments = message
        try:
            pipe.send((function(GroupCommunicator(groups[count]), *arguments), None))
        except Exception as error:
            pipe.send((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    torch.distributed.destroy_process_group()


class RankPool:
    """Processes of one process group, which run functions in groups of the first few."""

    def __init__(self, size: int, backend: str = "gloo", timeout_s: float = TIMEOUT_S) -> None:
        # a process that has imported all this makes those that see no GPU: to import it takes each of them seconds
        context = multiprocessing.get_context("spawn" if backend == "nccl" else "forkserver")
        if backend != "nccl":
            context.set_forkserver_preload([__name__])
        port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            arguments = rank, size, backend, port, timeout_s, there
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def start(self, count: int, function: Callable[..., Any], *arguments: Any) -> None:
        for pipe in self.pipes[:count]:
            pipe.send((count, function, arguments))

    def outcomes(self, count: int, timeout_s: float = 2 * TIMEOUT_S) -> list[tuple[Any, str | None]]:
        """Of each rank its result and its error."""
        found = []
        for rank, pipe in enumerate(self.pipes[:count]):
            if not pipe.poll(timeout_s):
                raise TimeoutError(f"rank {rank} has not answered for {timeout_s} s")
            found.append(pipe.recv())
        return found

    def run(self, count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(communicator, *arguments)` on the first `count` ranks: their results."""
        self.start(count, function, *arguments)
        outcomes = self.outcomes(count)
        for _, error in outcomes:
            if error is not None:
                raise AssertionError(error)
        return [result for result, _ in outcomes]

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                try:
                    pipe.send(None)
                except OSError:
                    process.kill()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def run_threads(size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """`function(communicator, *arguments)` on as many threads: their results, or the exceptions they raised."""
    results: list[Any] = [None] * size

    def work(communicator: Communicator) -> None:
        try:
            results[communicator.rank] = function(communicator, *arguments)
        except Exception as error:
            results[communicator.rank] = error

    threads = [threading.Thread(target=work, args=(c,)) for c in ThreadCommunicator.group(size, timeout_s)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def exchange(communicator: Communicator) -> list[torch.Tensor]:
    """What the collectives give of tensors that tell their rank, number and place."""
    rank, size, device = communicator.rank, communicator.size, communicator.device
    x = (100 * rank + torch.arange(6, device=device)).view(2, 3)
    gathered = torch.empty(size, 2, 3, dtype=x.dtype, device=device)
    communicator.all_gather(gathered, x)
    raw = torch.empty(size, 4, dtype=torch.uint8, device=device)
    communicator.all_gather(raw, torch.full((4,), rank + 250 - size, dtype=torch.uint8, device=device))
    parts = 100.0 * rank + torch.arange(size * 2, device=device).view(size, 2).float()
    received = torch.empty_like(parts)
    communicator.all_to_all(received, parts)
    total = torch.full((5,), 1.5 + rank, dtype=torch.bfloat16, device=device)
    communicator.all_reduce(total)
    communicator.barrier()
    return [t.cpu() for t in (gathered, raw, received, total)]


def ragged_steps(layer: DeepseekV4MultiHeadLatentAttentionWrapper, requests: int) -> dict[str, Any]:
    """Chunked prefill, steps of both, decode with drafts: outputs, picks and the bytes of all caches."""
    engine, all_requests = Engine(layer, seed=5), [Request() for _ in range(requests)]
    hidden = [hidden_rows(400, seed=10 + n, config=layer.config) for n in range(requests)]
    outputs: list[torch.Tensor] = []
    picks: list[torch.Tensor] = []

    def step(decodes: Sequence[tuple[int, int]], prefills: Sequence[tuple[int, int]] = ()) -> None:
        work = [
            [(all_requests[n], hidden[n][all_requests[n].length :][:rows]) for n, rows in part]
            for part in (decodes, prefills)
        ]
        outs = engine.step(*work)
        outputs.append(torch.cat(outs).cpu())
        if layer.indexer is not None:
            picks.append(layer.indexer.indexer_op.topk_indices_buffer[: len(outputs[-1])].clone().cpu())

    every = range(requests)
    step([], [(n, 150 + 11 * n) for n in every])
    step([(0, 1)], [(n, 30 - n) for n in every[1:]])
    step([(n, 1) for n in every])
    step([(n, 2) for n in every])
    step([(n, 1 + n % 2) for n in every])
    caches = [data for request in all_requests for data in (*engine.entries(request), *engine.window(request))]
    return {"outputs": outputs, "picks": picks, "caches": [c.cpu() for c in caches]}


def parallel_layer(communicator: Communicator, ratio: int, requests: int, options: dict[str, Any]) -> dict[str, Any]:
    """`ragged_steps` of this rank's layer. options: of make_layer, and of TensorParallel those with tp_ before them."""
    of_tp = {name[3:]: value for name, value in options.items() if name.startswith("tp_")}
    others = {name: value for name, value in options.items() if not name.startswith("tp_")}
    layer = make_layer(ratio, tp=TensorParallel(group=communicator, **of_tp), **others)
    layer(torch.zeros(4, dtype=torch.int64), torch.zeros(4, layer.config.hidden_size, dtype=torch.bfloat16))
    return ragged_steps(layer, requests)
