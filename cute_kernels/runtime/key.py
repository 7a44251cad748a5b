# SPDX-License-Identifier: Apache-2.0
"""What a compiled kernel is known by."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, TypeVar

from cute_kernels.models import ModelConfig

Call = TypeVar("Call", bound="tuple[Any, ...]")
"""The record of an op's arguments: a NamedTuple in the order of its schema."""

_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+")

_named: dict[str, str] = {}
"""Kernel name -> module and name of the key class that has it."""


@dataclass(frozen=True)
class KernelKey:
    """What the machine code of one kernel depends on. Each kernel derives its own key from it.

    kernel_name   the kernel's name, "<package>.<instruction set>.<kernel>" or "<package>.<kernel>", such as
                  "sparse_mla.hopper.decode": each class that is made into keys has one of its own, which stays when the
                  class moves or is renamed. What is compiled ahead is found by it: a new name is another kernel
    tuning        names of the fields that only make calls faster: kernels that differ in nothing else take the same
                  arguments and leave the same bytes. Verification runs each of them in the place of the others
    arch          compile target, as runtime.arch names it

    Fields are strings, numbers, booleans and None, so that equal keys have equal names in every process; their order
    does not matter.

    Deriving a class with the kernel_name of another raises TypeError, since the two would load each other's objects. So
    does asking for the identity of a key whose class has none of its own; a class that others only derive from needs
    none.
    """

    kernel_name: ClassVar[str]
    tuning: ClassVar[tuple[str, ...]] = ()
    arch: str

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        name = vars(cls).get("kernel_name")
        if name is None:
            return
        here = f"{cls.__module__}.{cls.__qualname__}"
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise TypeError(f"{here}: kernel_name: expected lower-case words joined by dots, got {name!r}")
        if _named.setdefault(name, here) != here:
            raise TypeError(f"{here}: kernel_name: {name!r} is that of {_named[name]}")

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
        """The key as text: kernel name, architecture, and the other fields by name."""
        if "kernel_name" not in vars(type(self)):
            raise TypeError(f"{type(self).__module__}.{type(self).__qualname__}: expected a kernel_name of its own")
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "arch"}
        others = "".join(f", {name}={value!r}" for name, value in sorted(values.items()))
        return f"{self.kernel_name}(arch={self.arch!r}{others})"

    def stands_for(self, other: KernelKey) -> bool:
        """Whether it is another key than `other`, and may be launched in its place."""
        if type(self) is not type(other) or self == other:
            return False
        named = [field.name for field in fields(self) if field.name not in self.tuning]
        return all(getattr(self, name) == getattr(other, name) for name in named)

    @property
    def digest(self) -> str:
        """Short hash of the identity."""
        return hashlib.sha256(self.identity.encode()).hexdigest()[:16]

    @property
    def symbol(self) -> str:
        """Name of the compiled function inside its object."""
        return f"cute_kernels_{self.digest}"


@dataclass(frozen=True)
class OpKernel(Generic[Call]):
    """How an op reaches its kernels. Calls are checked; those that are launched are ones with nothing in their way.

    launch            runs on the current stream of the tensors' device
    why_not           why no kernel can take a call: alignment and sizes, never data; empty if one can
    deployment_keys   (config, tp, arch) -> all keys that a model's layers need on one of `tp` ranks; none where the
                      kernel does not run on `arch`
    """

    launch: Callable[[Call], None]
    why_not: Callable[[Call], str]
    deployment_keys: Callable[[ModelConfig, int, str], Sequence[KernelKey]]
