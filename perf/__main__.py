# SPDX-License-Identifier: Apache-2.0
"""python -m perf sweep | report | compiled | compare"""

from __future__ import annotations

import sys

from perf.cli import main

if __name__ == "__main__":
    sys.exit(main())
