# SPDX-License-Identifier: Apache-2.0
"""torch.library.opcheck of every op, with paged caches that have room between their pages.

opcheck copies arguments with `clone`, which drops that room: an op that refused such caches would fail here.
"""

from __future__ import annotations

import pytest
import torch

from cute_kernels.runtime import registry, verify
from cute_kernels.runtime.contract import is_cache
from cute_kernels.runtime.ops import Op
from tests import helpers
from tests.contract.test_fuzz import verified_calls

CPU = torch.device("cpu")


def padded(op: Op) -> tuple[object, ...]:
    """A good call; if the op has paged caches, one with at least two pages apart from one another."""
    places = [i for i, argument in enumerate(op.overload._schema.arguments) if is_cache(argument.name)]
    for call in verified_calls(op):
        caches = [call[i] for i in places if call[i] is not None]
        if all(c.shape[0] > 1 and c.stride(0) > c[0].numel() for c in caches) and (caches or not places):
            return verify.clone_arguments(call, CPU)
    raise AssertionError(f"{op.name}: no example has room between the pages of its caches")


@pytest.mark.parametrize("name", sorted(registry.all_ops()))
def test_opcheck(name: str) -> None:
    helpers.check_op(name, *padded(registry.all_ops()[name]))
