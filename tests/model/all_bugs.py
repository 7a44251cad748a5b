# SPDX-License-Identifier: Apache-2.0
"""All bugs in the order of Blackwell's kernels: `python -m tests.model.all_bugs [NAME ...]`, half a minute each.

With `--schedules 100` it says in how many of so many random schedules a bug is found, by one schedule alone, of a
sample of those that are found at all: every `--every`-th.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.compile import reports
from tests.model.planted import Kernel
from tests.model.test_planted_sm100 import KERNELS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(KERNELS), metavar="NAME", help="kernels")
    parser.add_argument("--schedules", type=int, default=0, metavar="N")
    parser.add_argument("--every", type=int, default=10, metavar="N")
    args = parser.parse_args()
    for name in args.names:
        make, left = KERNELS[name]
        if args.schedules:
            print(f"{name}: {rates(make(), args.schedules, args.every)}", flush=True)
        else:
            count, missed = make().check(left)
            print(f"{name}: {count - missed} of {count} found, and it is said why not the others", flush=True)


def rates(kernel: Kernel, schedules: int, every: int) -> str:
    found = sorted(kernel.rates(schedules, every), key=lambda one: one[0])
    whole = sum(count == schedules for count, _ in found)
    ops = kernel.traces[0].record.program.ops
    rest = [f"{count} {one.name}, {one.op}: {ops[one.op].text}" for count, one in found if count < schedules]
    return "\n    ".join([f"{whole} of {len(found)} bugs in all {schedules} schedules; fewer:", *rest])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        reports.folder = Path(folder)
        main()
