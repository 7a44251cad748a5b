# SPDX-License-Identifier: Apache-2.0
"""python -m cute_kernels info | precompile | verify"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from cute_kernels.cli import main

    sys.exit(main())
