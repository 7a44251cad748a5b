# SPDX-License-Identifier: Apache-2.0
"""torch.library.opcheck of every op, with paged caches that have room between their pages.

opcheck copies arguments with `clone`, which drops that room: an op that refused such caches would fail here.
"""

from __future__ import annotations

import pytest
import torch

from cute_kernels.runtime import registry, verify
from tests import helpers
from tests.contract.test_fuzz import calls_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", sorted(registry.all_ops()))
def test_opcheck(name: str) -> None:
    _, padded = calls_of(name)
    assert padded is not None, "no example has room between the pages of its caches"
    helpers.check_op(name, *verify.clone_arguments(padded, CPU), traces=True)
