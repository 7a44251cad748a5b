# SPDX-License-Identifier: Apache-2.0
"""Which of its two forms a prefill step takes: rows gathered into a workspace first, or read straight from the pages.

The table is of times on an H200 (perf/results, perf/notes/prefill_paged.md). Gathering costs with the context,
once for all new tokens; reading from the pages costs with the keys of every token.
"""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")

PREFILL_FORMS = ("auto", "gathered", "paged")

MOST_TOKENS: dict[str, dict[int, dict[int, dict[int, int]]]] = {
    "sm_90a": {
        4: {64: {131072: 256}, 65: {131072: 64}},
        128: {64: {131072: 64}, 65: {131072: 32}},
    },
}
"""By architecture and compress ratio: with at least so many heads, and contexts of at least so many tokens, how many
new ones read the pages faster. Where nothing was measured none do."""


def prefill_form(arch: str, compress_ratio: int, heads: int, new_tokens: int, context: int) -> str:
    """The faster form, "gathered" or "paged", of a step with so many new tokens in all and a longest context.

    arch    a compile target as in cute_kernels.runtime.arch, or "" on a CPU
    heads   of this rank
    """
    by_heads = MOST_TOKENS.get(arch, {}).get(max(compress_ratio, 1), {})
    by_context = _last(by_heads, heads, {})
    return "paged" if new_tokens <= _last(by_context, context, 0) else "gathered"


def _last(table: dict[int, T], number: int, otherwise: T) -> T:
    """The value of the largest key up to `number`."""
    least = max((key for key in table if key <= number), default=None)
    return otherwise if least is None else table[least]
