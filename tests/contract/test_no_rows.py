# SPDX-License-Identifier: Apache-2.0
"""Calls of no rows, on a CPU: every op takes them, and leaves what it may write as it was."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from cute_kernels.runtime import verify
from tests.gpu import promises


@pytest.mark.parametrize("op", sorted(promises.NO_ROWS))
def test_no_rows(op: str) -> None:
    cpu, examples = torch.device("cpu"), verify.examples_of(promises.OPS[op])
    assert examples is not None
    for args in promises.without_rows(op, islice(examples(), 2)):
        called = verify.clone_arguments(args, cpu)
        promises.OPS[op].overload(*called)
        names = [argument.name for argument in promises.OPS[op].overload._schema.arguments]
        assert not verify.compare_arguments(names, called, args)
