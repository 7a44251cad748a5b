# SPDX-License-Identifier: Apache-2.0
"""A run over several processes, a rank each: started here, or by torchrun. Rank 0 speaks for all of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from cute_kernels.layers import CommunicatorError, GroupCommunicator
from layer_runner.report import Row
from layer_runner.requests import InputError

TIMEOUT_S = 300.0
"""A collective that other ranks do not come to in this time ends the run."""

LONGEST_S = 86400.0
"""What ranks wait while rank 0 runs the layer by itself; if it ends, they know at once."""

GRACE_S = 10.0
"""Between the end of a rank that failed and that of the others, who may still have to say what they know."""

COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")

STARTED_HERE = "RUN_LAYER_STARTED_HERE"
"""Set in the environment of ranks that `start` has made: they end when their input, held by the first process, does."""


def own_rank() -> int | None:
    """This process's number among those that torchrun, or `start`, has made; None: nobody has."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() and os.environ.get("WORLD_SIZE", "").isdigit() else None


def start(script: Path, argv: Sequence[str], size: int) -> int:
    """Run the script as `size` processes; their exit status."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = []
    for rank in range(size):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
        environment = os.environ | {name: str(number) for name, number in numbers.items()}
        environment |= {"MASTER_ADDR": "127.0.0.1", STARTED_HERE: "1"}
        quiet = None if rank == 0 else subprocess.DEVNULL
        command = [sys.executable, str(script), *argv]
        processes.append(
            subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=quiet,
                stderr=quiet,
                start_new_session=True,
            )
        )
    try:
        while all(process.poll() in (None, 0) for process in processes):
            if all(process.returncode == 0 for process in processes):
                return 0
            time.sleep(0.05)
        lost, code = next((rank, p.returncode) for rank, p in enumerate(processes) if p.returncode not in (None, 0))
        deadline = time.monotonic() + GRACE_S
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    if processes[0].returncode > 0:
        return processes[0].returncode
    how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
    raise CommunicatorError(f"rank {lost} {how}")


def _end_with_the_first_process() -> None:
    # no Python stream, whose lock this thread would hold when the interpreter ends
    while os.read(0, 1):
        pass
    os._exit(1)


@dataclass
class Ranks:
    """The processes of a run, seen from one of them. tp, cp: its tensor-parallel and its context group."""

    rank: int
    size: int
    store: Any
    tp: GroupCommunicator
    cp: GroupCommunicator | None

    def leave(self) -> None:
        """The end of a run that went well."""
        torch.distributed.destroy_process_group()

    @property
    def speaks(self) -> bool:
        return self.rank == 0

    def wait_for(self, what: str) -> None:
        """Return once rank 0 has told that `what` is done."""
        self.store.wait([what], timedelta(seconds=LONGEST_S))

    def tell(self, what: str) -> None:
        self.store.set(what, "done")

    def gather(self, what: str, values: Any) -> list[Any]:
        """Every rank's values, which JSON can hold."""
        self.store.set(f"{what}/{self.rank}", json.dumps(values))
        return [json.loads(self.store.get(f"{what}/{rank}")) for rank in range(self.size)]

    def report_failure(self, text: str) -> None:
        """Leave the reason why this rank ends for rank 0 to say."""
        self.store.set("failure", f"rank {self.rank}: {text}")

    def failure(self) -> str | None:
        """What another rank has left there."""
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            if self.store.check(["failure"]):
                return str(self.store.get("failure").decode())
            time.sleep(0.05)
        return None


def join(tp: int, cp: int, dcp: int, device: str) -> Ranks:
    """Become one of tp * cp ranks, as the environment says which: tensor-parallel ranks are neighbours. dcp: ranks of
    a context group of neighbours among these, if it is more than one."""
    world, size = int(os.environ["WORLD_SIZE"]), tp * cp
    if world != size:
        product = "--tp" if cp == 1 else "--tp * --cp"
        raise InputError(f"{product}: expected the number of processes, {world}, got {size}")
    if os.environ.get(STARTED_HERE):
        threading.Thread(target=_end_with_the_first_process, daemon=True).start()
    if device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        check_gpus(local + 1)
        torch.cuda.set_device(local)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    timeout = timedelta(seconds=TIMEOUT_S)
    store, rank, _ = next(iter(torch.distributed.rendezvous("env://", timeout=timeout)))
    torch.distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=torch.distributed.PrefixStore("group", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
    )

    def group_of(groups: list[list[int]]) -> GroupCommunicator:
        """That of this rank; all ranks make all of them."""
        made = [(ranks, torch.distributed.new_group(ranks, timeout=timeout)) for ranks in groups]
        return GroupCommunicator(next(group for ranks, group in made if rank in ranks))

    of_tp = group_of([list(range(first, first + tp)) for first in range(0, size, tp)])
    of_cp = None
    if cp > 1:
        of_cp = group_of([list(range(first, size, tp)) for first in range(tp)])
    elif dcp > 1:
        of_cp = group_of([list(range(first, first + dcp)) for first in range(0, size, dcp)])
    return Ranks(rank, size, torch.distributed.PrefixStore("run", store), of_tp, of_cp)


def check_gpus(size: int, flags: str = "--tp") -> None:
    count = torch.cuda.device_count()
    if size > count:
        raise InputError(f"{flags}: expected at most {count}, the GPUs of this machine, got {size}")


def collectives(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What a rank exchanged: by collective its calls, the bytes that came over the wire, and seconds with waiting."""
    return [
        {
            "collective": row.op,
            "over": row.implementation,
            "calls": row.calls,
            "bytes": row.bytes,
            "seconds": row.seconds,
        }
        for row in rows
        if row.op in COLLECTIVES
    ]
