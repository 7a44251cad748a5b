# SPDX-License-Identifier: Apache-2.0
"""Memory of the model: what is not input holds 0xFF, NaN in every format, and nobody reaches beyond what there is."""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np

from tests.model.ptx import TYPES

POISON = 0xFF


class Bytes:
    """Memory that warps read and write by vectors of positions."""

    def __init__(self, size: int) -> None:
        self.bytes = np.full(size, POISON, np.uint8)
        self.views = {bits: self.bytes.view(TYPES[bits]) for bits in (8, 16, 32, 64)}
        # what is accessed at a time, whatever it holds: one element instead of several is much quicker
        self.views[128] = self.bytes.view(np.complex128)

    def load(self, at: Any, bits: int, count: int) -> Any:
        """[n, count] elements from the positions at[n] on, which are multiples of all of them, or of 16 bytes."""
        if bits * count > 128:
            half = count // 2
            return np.hstack([self.load(at, bits, half), self.load(at + bits // 8 * half, bits, half)])
        found = self.views[bits * count][at // (bits * count // 8)]
        return found.view(TYPES[bits]).reshape(-1, count)

    def store(self, at: Any, values: Any, bits: int) -> None:
        """[n, count] elements."""
        count = values.shape[1]
        if bits * count > 128:
            half = count // 2
            self.store(at, values[:, :half], bits)
            self.store(at + bits // 8 * half, values[:, half:], bits)
            return
        view = self.views[bits * count]
        view[at // (bits * count // 8)] = np.ascontiguousarray(values, TYPES[bits]).view(view.dtype)[:, 0]


class GlobalMemory(Bytes):
    """Tensors, far from each other. Whoever reads or writes outside of them, or writes to an input, is told."""

    BASE = (1 << 40) + (3 << 31)
    GAP = 4096

    def __init__(self, size: int = 1 << 24) -> None:
        super().__init__(size)
        self.readable = np.zeros(size, np.bool_)
        self.writable = np.zeros(size, np.bool_)
        self.written = np.zeros(size, np.uint8)
        self._end = self.GAP
        self._tensors: list[tuple[int, int, bool]] = []
        """Of each, in order: where it is, where it ends, whether it can be written."""

    def put(self, values: Any, align: int = 256) -> int:
        """Address of a copy of an array, which is input."""
        raw = np.ascontiguousarray(values).view(np.uint8).ravel()
        start = self._reserve(raw.size, align)
        self.bytes[start : start + raw.size] = raw
        self.readable[start : start + raw.size] = True
        self._tensors.append((start, start + raw.size, False))
        return self.BASE + start

    def reserve(self, size: int, align: int = 256) -> int:
        """Address of so many bytes for results."""
        start = self._reserve(size, align)
        self.readable[start : start + size] = self.writable[start : start + size] = True
        self._tensors.append((start, start + size, True))
        return self.BASE + start

    def get(self, address: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array from there."""
        start = address - self.BASE
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.bytes[start : start + size].view(dtype).reshape(shape).copy()

    def _reserve(self, size: int, align: int) -> int:
        start = -(-self._end // align) * align
        self._end = start + size + self.GAP
        if self._end > self.bytes.size:
            raise MemoryError(f"the model has {self.bytes.size} bytes of global memory")
        return start

    def position(self, address: Any, width: int, is_write: bool = False) -> Any:
        """Of addresses (uint64) of `width` bytes each."""
        at = address.astype(np.int64) - self.BASE
        if self._is_in_one_tensor(at, width, is_write):
            return at
        allowed = self.writable if is_write else self.readable
        inside = (at >= 0) & (at < self.bytes.size - width)
        if not inside.all() or not (allowed[at] & allowed[at + width - 1]).all():
            raise IndexError(f"global {'write' if is_write else 'read'} of {width} bytes at {_first(address, inside)}")
        if (at % min(width, 16)).any():
            raise IndexError(
                f"global access of {width} bytes at {_first(address, at % min(width, 16) == 0)}: misaligned"
            )
        return at

    def _is_in_one_tensor(self, at: Any, width: int, is_write: bool) -> bool:
        """Whether all of them are in the same tensor and aligned, as they nearly always are."""
        numbers = at.tolist()
        if not numbers:
            return False
        first = bisect.bisect(self._tensors, (min(numbers), self.bytes.size)) - 1
        if first < 0:
            return False
        _, end, is_writable = self._tensors[first]
        is_inside = max(numbers) + width <= end and (is_writable or not is_write)
        return is_inside and not np.bitwise_or.reduce(at) % min(width, 16)

    def note_written(self, at: Any, width: int) -> None:
        """Count how often bytes were written."""
        self.written[at[:, None] + np.arange(width)] += 1


class SharedMemory(Bytes):
    """Of all blocks of a cluster. An address is the block's rank << 24, and a number from BASE on."""

    SPAN = 1 << 18
    BASE = 1024
    RANK = 24

    def __init__(self, blocks: int, size: int) -> None:
        super().__init__(blocks * self.SPAN)
        self.blocks, self.size = blocks, size

    def base(self, rank: int) -> int:
        return rank << self.RANK | self.BASE

    def position(self, address: Any, width: int) -> Any:
        """Of addresses (uint32) of `width` bytes each."""
        address = address.astype(np.int64)
        numbers = address.tolist()
        if numbers:
            start = min(numbers) & ~((1 << self.RANK) - 1)
            if (
                min(numbers) - start >= self.BASE
                and max(numbers) - start + width <= self.BASE + self.size
                and start >> self.RANK < self.blocks
                and not np.bitwise_or.reduce(address) % width
            ):
                return address + ((start >> self.RANK) * self.SPAN - start)
        rank, offset = address >> self.RANK, address & ((1 << self.RANK) - 1)
        inside = (rank < self.blocks) & (offset >= self.BASE) & (offset + width <= self.BASE + self.size)
        if not inside.all():
            raise IndexError(f"shared access of {width} bytes at {_first(address, inside)}, there are {self.size}")
        if (offset % width).any():
            raise IndexError(f"shared access of {width} bytes at {_first(address, offset % width == 0)}: misaligned")
        return rank * self.SPAN + offset

    def place(self, address: int, width: int) -> int:
        """Of one address."""
        rank, offset = address >> self.RANK, address & ((1 << self.RANK) - 1)
        if rank < self.blocks and self.BASE <= offset <= self.BASE + self.size - width and offset % width == 0:
            return rank * self.SPAN + offset
        return int(self.position(np.array([address]), width)[0])


def _first(address: Any, is_right: Any) -> str:
    return hex(int(np.asarray(address)[~np.asarray(is_right)][0])) if not np.all(is_right) else hex(int(address[0]))
