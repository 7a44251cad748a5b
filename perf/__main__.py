# SPDX-License-Identifier: Apache-2.0
"""python -m perf sweep | layer | engines | report | show | compare | compiled | scaling | parallel"""

from __future__ import annotations

import sys

from perf.cli import main

if __name__ == "__main__":
    sys.exit(main())
