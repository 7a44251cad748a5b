# SPDX-License-Identifier: Apache-2.0
"""The public functions as the benchmarks call them: the same op with the same arguments."""

from __future__ import annotations

import importlib
from itertools import islice

import pytest
import torch

from cute_kernels.runtime.ops import OPS
from cute_kernels.runtime.verify import clone_arguments, examples_of, raw_memory
from perf import public
from perf.cli import MODULES

for _module in sorted(set(MODULES.values())):
    importlib.import_module(_module)


@pytest.mark.parametrize("op", sorted(MODULES))
def test_the_public_function_does_what_the_op_does(op: str) -> None:
    examples = examples_of(OPS[op])
    assert examples is not None
    for example in islice(examples(), 2):
        args, same = (clone_arguments(example.args, torch.device("cpu")) for _ in range(2))
        OPS[op].overload(*args)
        public.bind(op, same)()
        for name, tensor in OPS[op].mutated(args).items():
            assert torch.equal(raw_memory(tensor), raw_memory(OPS[op].mutated(same)[name])), name
