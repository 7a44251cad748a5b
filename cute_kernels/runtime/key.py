"""What a compiled kernel is known by."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KernelKey:
    """What the machine code of one kernel depends on. Each kernel derives its own key from it.

    arch   compile target, as runtime.arch names it

    Fields are strings, numbers, booleans and None, so that equal keys have equal names in every process.
    """

    arch: str

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """The kernel's entry point and the fake arguments it is compiled for, the stream last."""
        raise NotImplementedError

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block. The compiler does not check it against the architecture's limit."""
        return 0

    @property
    def instructions(self) -> tuple[str, ...]:
        """Names among runtime.report.INSTRUCTIONS that the PTX must contain: what makes the kernel fast."""
        return ()

    @property
    def identity(self) -> str:
        """The key as text: module, class and every field."""
        return f"{type(self).__module__}.{self!r}"

    @property
    def symbol(self) -> str:
        """Name of the compiled function inside its object."""
        return "cute_kernels_" + hashlib.sha256(self.identity.encode()).hexdigest()[:16]
