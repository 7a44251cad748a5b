# SPDX-License-Identifier: Apache-2.0
"""Names of kernels and of their keys."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest

import cute_kernels
from cute_kernels.runtime.key import KernelKey


@dataclass(frozen=True)
class Key(KernelKey):
    kernel_name: ClassVar[str] = "tests.key.first"
    rows: int = 1
    access: str = "dense"


@dataclass(frozen=True)
class Moved(KernelKey):
    """Another class with other fields' order."""

    kernel_name: ClassVar[str] = "tests.key.second"
    access: str = "dense"
    rows: int = 1


@dataclass(frozen=True)
class Nameless(Key):
    """Has no name of its own."""


def test_a_key_is_known_by_its_name_and_fields() -> None:
    key = Key("sm_90a", rows=2)
    assert key.identity == "tests.key.first(arch='sm_90a', access='dense', rows=2)"
    assert key.symbol == f"cute_kernels_{key.digest}"
    names = {key.identity, Key("sm_90a").identity, Key("sm_100a", 2).identity, Key("sm_90a", 2, "paged").identity}
    assert len(names) == 4
    assert len({key.digest, Key("sm_90a").digest}) == 2


def test_what_a_key_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    key, others = Key("sm_90a"), (Key("sm_90a", rows=2), Key("sm_90a", access="paged"), Key("sm_100a"), Moved("sm_90a"))
    assert not any(other.stands_for(key) for other in others)
    monkeypatch.setattr(Key, "tuning", ("rows",))
    assert [other.stands_for(key) for other in (key, *others)] == [False, True, False, False, False]


def test_neither_class_nor_module_nor_order_of_fields_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Moved, "kernel_name", Key.kernel_name)
    one, other = Key("sm_90a", 2, "paged"), Moved("sm_90a", "paged", 2)
    assert (one.identity, one.symbol) == (other.identity, other.symbol)


def test_a_class_without_a_name_makes_no_keys() -> None:
    for names in (lambda: Nameless("sm_90a").identity, lambda: Nameless("sm_90a").symbol):
        with pytest.raises(TypeError, match=r"test_key\.Nameless: expected a kernel_name of its own"):
            names()


def test_two_classes_have_two_names() -> None:
    with pytest.raises(TypeError, match=r"Twin: kernel_name: 'tests.key.first' is that of tests.runtime.test_key.Key"):
        type("Twin", (KernelKey,), {"kernel_name": "tests.key.first", "__module__": __name__})
    for _ in range(2):  # the same class made again, as by a reloaded module, keeps it
        type("Again", (KernelKey,), {"kernel_name": "tests.key.again", "__module__": __name__})


@pytest.mark.parametrize("name", ["", "decode", "sparse_mla.", "Sparse.decode", "a/b.c", "a.b*", 3])
def test_names_that_are_none(name: object) -> None:
    with pytest.raises(TypeError, match="expected lower-case words joined by dots"):
        type("Odd", (KernelKey,), {"kernel_name": name, "__module__": __name__})


def derived(base: type[KernelKey]) -> Iterator[type[KernelKey]]:
    for cls in base.__subclasses__():
        yield cls
        yield from derived(cls)


def test_every_kernel_of_the_package_has_a_name() -> None:
    """Classes that can be built; that no two names are equal is checked when they are made."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    for module in pkgutil.walk_packages(cute_kernels.__path__, "cute_kernels."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    classes = {cls for cls in derived(KernelKey) if cls.__module__.startswith("cute_kernels.")}
    kernels = {cls for cls in classes if cls.build is not KernelKey.build}
    assert len(kernels) > 40
    assert [cls for cls in kernels if "kernel_name" not in vars(cls)] == []
    packages = {module.name for module in pkgutil.iter_modules(cute_kernels.__path__) if module.ispkg}
    packages |= {"isa_probes"}
    assert {cls.kernel_name.partition(".")[0] for cls in kernels} <= packages
