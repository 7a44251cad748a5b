# SPDX-License-Identifier: Apache-2.0
"""Modules that an engine imports and a CPU has not: empty classes under any name that is asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class AnyType(type):
    """A class that is whatever its users do with it when they are imported: a base, a decorator, a type's parameter."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make(name)

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls


def make(name: str) -> Any:
    def decorate(self: Any, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) and not kwargs else self

    return AnyType(name, (), {"__init__": lambda self, *args, **kwargs: None, "__call__": decorate})


class StubModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = make(name)
        setattr(self, name, value)
        return value


class Finder(MetaPathFinder, Loader):
    """The last one that is asked: for modules nobody else finds."""

    def __init__(self, packages: Iterable[str]) -> None:
        self.packages = frozenset(packages)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in self.packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install(*packages: str) -> None:
    sys.meta_path.append(Finder(packages))
