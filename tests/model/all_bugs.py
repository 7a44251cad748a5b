# SPDX-License-Identifier: Apache-2.0
"""All bugs in the order of Blackwell's kernels: `python -m tests.model.all_bugs [NAME ...]`, half a minute each."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.compile import reports
from tests.model.test_planted_sm100 import KERNELS


def main(names: list[str]) -> None:
    for name in names or KERNELS:
        make, left = KERNELS[name]
        count, missed = make().check(left)
        print(f"{name}: {count - missed} of {count} found, and it is said why not the others", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        reports.folder = Path(folder)
        main(sys.argv[1:])
