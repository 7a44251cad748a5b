# SPDX-License-Identifier: Apache-2.0
"""The shapes that prefill is measured in; what is measured in them needs a GPU."""

from __future__ import annotations

from cute_kernels.runtime.ops import OPS
from perf.prefill import OP, PER_ROW, SHAPES, in_order
from perf.targets import TARGETS_US


def test_names_tell_shapes_apart() -> None:
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)


def test_targets_are_those_of_shapes() -> None:
    stated = {case for _, op, case in TARGETS_US if op == OP}
    assert stated
    assert stated <= {shape.name for shape in SHAPES}


def test_arguments_are_in_the_schemas_order() -> None:
    names = [argument.name for argument in OPS[OP].overload._schema.arguments]
    assert in_order(OP, {name: name for name in sorted(names)}) == tuple(names)
    assert set(PER_ROW) < set(names)
