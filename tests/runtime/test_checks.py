# SPDX-License-Identifier: Apache-2.0
"""Every message names the op, the argument, what was expected and what came."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_kernels.runtime.checks import Checker


def refused(error: type[Exception], *parts: str) -> Any:
    return pytest.raises(error, match=".*".join(re.escape(p) for p in parts))


def test_fail_and_require() -> None:
    c = Checker("my_op")
    with refused(ValueError, "my_op: size: expected 3, got 4"):
        c.fail("size", "3", 4)
    with refused(TypeError, "my_op: size: expected 3, got 4"):
        c.fail("size", "3", 4, TypeError)
    with refused(ValueError, "my_op: size: expected 3, got 4"):
        c.require(False, "size", "3", 4)
    c.require(True, "size", "3", 4)


def test_one_of() -> None:
    c = Checker("my_op")
    c.one_of("mode", "a", ["a", "b"])
    with refused(ValueError, "my_op: mode: expected one of 'a', 'b', got 'c'"):
        c.one_of("mode", "c", ["a", "b"])
    c.one_of("ratio", 4, (1, 4))
    c.one_of("flag", True, (True, None))
    for value, choices in ((True, (1, 4)), (4.0, (1, 4)), (1, (True, None)), (0, (False,))):
        with pytest.raises(ValueError, match=re.escape(f"got {value!r}")):
            c.one_of("ratio", value, choices)


def test_pair() -> None:
    c = Checker("my_op")
    assert c.pair("x", (1, "a"), "n, s") == c.pair("x", [1, "a"], "n, s") == (1, "a")
    for value, name in ((5, "int"), (None, "NoneType"), ((1, 2, 3), "tuple"), ([1], "list")):
        with refused(TypeError, f"my_op: x: expected a pair (n, s), got {name}"):
            c.pair("x", value, "n, s")


def test_not_a_tensor() -> None:
    c = Checker("my_op")
    with refused(TypeError, "my_op: x: expected a tensor, got None"):
        c.tensor("x", None, torch.float32)
    with refused(TypeError, "my_op: x: expected a tensor, got list"):
        c.tensor("x", [1.0], torch.float32)
    c.tensor("x", None, torch.float32, optional=True)
    with refused(TypeError, "got list"):
        c.tensor("x", [1.0], torch.float32, optional=True)


def test_dtype() -> None:
    c = Checker("my_op")
    both = (torch.int32, torch.int64)
    for dtype in both:
        c.tensor("x", torch.zeros(2, dtype=dtype), both)
    with refused(TypeError, "my_op: x: expected dtype torch.int32 or torch.int64, got torch.float32"):
        c.tensor("x", torch.zeros(2), both)


def test_device_of_the_first_tensor_rules() -> None:
    c = Checker("my_op")
    c.tensor("x", torch.zeros(2), torch.float32)
    with refused(ValueError, "my_op: y: expected a tensor on cpu, got one on meta"):
        c.tensor("y", torch.zeros(2, device="meta"), torch.float32)
    Checker("my_op").tensor("y", torch.zeros(2, device="meta"), torch.float32)


def test_shape() -> None:
    c = Checker("my_op")
    c.tensor("x", torch.zeros(2, 3), torch.float32, ("T", 3))
    with refused(ValueError, "my_op: x: expected 2 dimensions [T, 3], got shape [2]"):
        c.tensor("x", torch.zeros(2), torch.float32, ("T", 3))
    with refused(ValueError, "my_op: x: expected shape [any, 3], got [5, 4]"):
        c.tensor("x", torch.zeros(5, 4), torch.float32, (None, 3))
    with refused(ValueError, "my_op: y: expected shape [T] with T = 2 as in x, got [5]"):
        c.tensor("y", torch.zeros(5), torch.float32, ("T",))
    c.tensor("y", torch.zeros(2), torch.float32, ("T",))
    c.tensor("z", torch.zeros(9, 9, 9), torch.float32)


def test_names_do_not_leak_into_the_next_call() -> None:
    Checker("my_op").tensor("x", torch.zeros(2), torch.float32, ("T",))
    Checker("my_op").tensor("x", torch.zeros(3), torch.float32, ("T",))


def test_strides() -> None:
    c = Checker("my_op")
    wide = torch.zeros(4, 8)
    c.tensor("x", wide[:, 2:5], torch.float32)
    with refused(ValueError, "my_op: x: expected a contiguous tensor, got strides (8, 1)"):
        c.tensor("x", wide[:, 2:5], torch.float32, contiguous=True)
    with refused(ValueError, "my_op: x: expected stride 1 in the last dimension, got strides (1, 8)"):
        c.tensor("x", wide.t(), torch.float32)
    c.tensor("x", wide.t(), torch.float32, dense_last=False)
    c.tensor("x", wide[:, ::8], torch.float32)  # one column: its stride means nothing
    c.tensor("x", torch.zeros(()), torch.float32)
    c.tensor("x", torch.zeros(0, 8), torch.float32, contiguous=True)


def test_fake_tensors_are_checked_by_metadata() -> None:
    with FakeTensorMode():
        c = Checker("my_op")
        c.tensor("x", torch.empty(2, 3), torch.float32, ("T", 3), contiguous=True)
        with refused(ValueError, "my_op: y: expected shape [T] with T = 2 as in x, got [3]"):
            c.tensor("y", torch.empty(3), torch.float32, ("T",))
