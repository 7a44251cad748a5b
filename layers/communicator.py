# SPDX-License-Identifier: Apache-2.0
"""Collectives between the ranks of a layer, over torch.distributed or over the threads of one process.

Every rank calls the same collectives in the same order, with tensors of the same shapes. Bytes of a collective in a
recording (cute_kernels.runtime.record) are those that a rank receives.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

from cute_kernels.runtime import record
from cute_kernels.runtime.record import Cost


class CommunicatorError(RuntimeError):
    """A collective that did not happen: another rank raised, died or did not come in time."""


class Communicator(ABC):
    """The ranks that share a layer.

    rank, size   this rank, from 0, and how many there are
    device       where the tensors of collectives lie
    """

    rank: int
    size: int
    device: torch.device
    transport: str

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """out [size, *x.shape]: every rank's x, in the order of ranks. Both are contiguous."""
        if out.shape != (self.size, *x.shape):
            self._refuse("all_gather", f"out of shape {[self.size, *x.shape]}, got {list(out.shape)}")
        self._check("all_gather", out, x)
        received = (self.size - 1) * x.nbytes
        self._record("all_gather", received, x.device, lambda: self._all_gather(out, x))

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """out[s] = rank s's x[rank]: x [size, ...] has a part for every rank, and out one from every rank. Both are
        contiguous."""
        if out.shape != x.shape or x.dim() == 0 or x.shape[0] != self.size:
            self._refuse("all_to_all", f"two tensors [{self.size}, ...], got {list(out.shape)} and {list(x.shape)}")
        self._check("all_to_all", out, x)
        received = x.nbytes // self.size * (self.size - 1)
        self._record("all_to_all", received, x.device, lambda: self._all_to_all(out, x))

    def all_reduce(self, x: torch.Tensor) -> None:
        """x = the sum of every rank's x, with the same bits on all of them. x is contiguous."""
        self._check("all_reduce", x)
        received = 2 * x.nbytes * (self.size - 1) // self.size
        self._record("all_reduce", received, x.device, lambda: self._all_reduce(x))

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has come here."""

    @abstractmethod
    def abort(self) -> None:
        """Give the group up: this rank comes to no more collectives, and those that wait for it end with an error, at
        the latest after the group's timeout."""

    @abstractmethod
    def _all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None: ...

    @abstractmethod
    def _all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> None: ...

    @abstractmethod
    def _all_reduce(self, x: torch.Tensor) -> None: ...

    def _refuse(self, what: str, expected: str) -> None:
        raise ValueError(f"{type(self).__name__}.{what}: expected {expected}")

    def _check(self, what: str, *tensors: torch.Tensor) -> None:
        first = tensors[0]
        if any(not x.is_contiguous() or x.dtype != first.dtype or x.device != first.device for x in tensors):
            self._refuse(what, "contiguous tensors of one dtype on one device")

    def _record(self, what: str, received: int, device: torch.device, body: Callable[[], None]) -> None:
        recording = None if torch.compiler.is_compiling() else record.active()
        if recording is None:
            body()
        else:
            recording.run(what, self.transport, Cost(bytes=received), device, body)


class GroupCommunicator(Communicator):
    """A process group of torch.distributed: NCCL between GPUs, gloo between CPUs.

    group   a ProcessGroup, a DeviceMesh of one dimension, or None: the default group

    Timeouts are the group's own (`timeout=` of init_process_group and new_group). With NCCL they are kept by its
    watchdog, which ends the process (TORCH_NCCL_ASYNC_ERROR_HANDLING).
    """

    def __init__(self, group: Any = None) -> None:
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            raise ValueError("GroupCommunicator: torch.distributed: expected init_process_group before the first use")
        if isinstance(group, torch.distributed.DeviceMesh):
            if group.ndim != 1:
                raise ValueError(f"GroupCommunicator: group: expected a mesh of one dimension, got {group.ndim}")
            group = group.get_group()
        self.group: Any = torch.distributed.group.WORLD if group is None else group
        self.rank, self.size = torch.distributed.get_rank(self.group), torch.distributed.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("GroupCommunicator: group: expected one that this process belongs to")
        self.transport = torch.distributed.get_backend(self.group)
        on_gpu = self.transport == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self._is_aborted = False

    def barrier(self) -> None:
        flag = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._all_reduce(flag)
        flag.item()

    def abort(self) -> None:
        if not self._is_aborted:
            self._is_aborted = True
            # a backend that cannot do it leaves the others to their timeout
            with contextlib.suppress(RuntimeError):
                self.group.abort()

    def _all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        whole = out.view(self.size * x.shape[0], *x.shape[1:]) if x.dim() else out
        # torch 2.13 has another name for it, and warns of the older one
        gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
        self._call("all_gather", gather, whole, x)

    def _all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> None:
        self._call("all_to_all", torch.distributed.all_to_all_single, out, x)

    def _all_reduce(self, x: torch.Tensor) -> None:
        self._call("all_reduce", torch.distributed.all_reduce, x)

    def _call(self, what: str, collective: Callable[..., Any], *tensors: torch.Tensor) -> None:
        if self._is_aborted:
            raise CommunicatorError(f"rank {self.rank}: {what}: the group was given up after an error")
        try:
            collective(*tensors, group=self.group)
        except RuntimeError as error:
            raise CommunicatorError(
                f"rank {self.rank}: {what} between {self.size} ranks failed: another rank raised, died or did not "
                f"come in time ({' '.join(str(error).split())})"
            ) from error


class _Meeting:
    """What the threads of a group share: a place for each one's tensor, and the barrier between writing and reading."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.tensors: list[torch.Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=timeout_s)


class ThreadCommunicator(Communicator):
    """Ranks that are threads of one process, on a CPU: for tests of many ranks."""

    transport = "threads"
    device = torch.device("cpu")

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank, self.size, self._meeting = rank, size, meeting

    @classmethod
    def group(cls, size: int, timeout_s: float = 60.0) -> list[ThreadCommunicator]:
        """A communicator for each of `size` threads."""
        meeting = _Meeting(size, timeout_s)
        return [cls(rank, size, meeting) for rank in range(size)]

    def barrier(self) -> None:
        self._wait("barrier")

    def abort(self) -> None:
        self._meeting.barrier.abort()

    def _all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        def read(tensors: list[torch.Tensor]) -> None:
            for part, tensor in zip(out, tensors, strict=True):
                part.copy_(tensor)

        self._exchange("all_gather", x, read)

    def _all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> None:
        def read(tensors: list[torch.Tensor]) -> None:
            for part, tensor in zip(out, tensors, strict=True):
                part.copy_(tensor[self.rank])

        self._exchange("all_to_all", x, read)

    def _all_reduce(self, x: torch.Tensor) -> None:
        total = torch.empty_like(x)

        def read(tensors: list[torch.Tensor]) -> None:
            total.copy_(tensors[0])
            for tensor in tensors[1:]:
                total.add_(tensor)

        self._exchange("all_reduce", x, read)
        x.copy_(total)

    def _exchange(self, what: str, x: torch.Tensor, read: Callable[[list[torch.Tensor]], None]) -> None:
        """Read all ranks' tensors, which stay as they are until all have done so."""
        self._meeting.tensors[self.rank] = x
        self._wait(what)
        read([tensor for tensor in self._meeting.tensors if tensor is not None])
        self._wait(what)

    def _wait(self, what: str) -> None:
        try:
            self._meeting.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise CommunicatorError(
                f"rank {self.rank}: {what} between {self.size} ranks failed: another rank raised or did not come in "
                "time"
            ) from error
