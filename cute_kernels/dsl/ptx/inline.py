# SPDX-License-Identifier: Apache-2.0
"""How PTX gets into a kernel."""

from __future__ import annotations

import cutlass.cute as cute

inline_ptx = cute.arch.inline_ptx
