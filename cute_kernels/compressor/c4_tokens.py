"""What the lanes of a warp know about the tokens of a step, for the kernels of ratio 4.

Lane l of a warp knows token first - BEHIND + l: the tokens its team takes and their neighbours. One round of loads
tells everything about all of them, other lanes' shares come by shuffles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from cute_kernels.compressor import entry
from cute_kernels.dsl import ptx

RATIO = 4
WINDOW = 2 * RATIO

BEHIND = WINDOW - 1
"""Tokens before a team's first that its windows reach back to. As many after its last say whether a later entry of the
step covers a row."""

MOST_TOKENS = 32 - 2 * BEHIND
"""That a team can take."""

_LAST_INT32 = 0x7FFFFFFF


class Tokens(NamedTuple):
    """Addresses of what is known about the tokens of the step, their number, and how many a team takes."""

    slots: Int64
    entry_slots: Int64
    positions: Int64
    requests: Int64
    number: Int32
    per_team: Int32


class State(NamedTuple):
    """The state cache and its block table, int32 [requests, columns]. Strides in bytes."""

    pool: Int64
    page_stride: Int64
    pages: Int32
    rows: Int32
    page_rows: cute.FastDivmodDivisorV2
    table: Int64
    table_stride: Int64
    requests: Int32
    columns: Int32

    def row(self, page: Any, row: Any, row_bytes: int) -> Any:
        """Address of a row of a page."""
        return self.pool + Int64(page) * self.page_stride + Int64(row) * row_bytes


class Step(NamedTuple):
    """What only the fused kernel reads: projections, bias, first tokens of the requests, and what is to be saved.

    min_restart is an address or 0, keep_every a number of tokens or 0, save_all 0 or 1. Strides in bytes.
    """

    kv_score: Int64
    row_stride: Int64
    ape: Int64
    ape_stride: Int64
    starts: Int64
    min_restart: Int64
    keep_every: Int64
    save_all: Int32


class Known(NamedTuple):
    """A lane's token.

    position     negative ones and those beyond int32 are brought to one near zero or near the end with the same phase
    first        first token of its request in this step, in the fused kernel
    target       where its state is saved, if it is
    """

    token: Any
    position: Any
    request: Any
    entry_slot: Any
    closes: Any
    first: Any
    is_saved: Any
    target: Any

    def of(self, lane: Any) -> Known:
        """What another lane knows. All lanes must call."""
        return Known(*(cute.arch.shuffle_sync(value, lane) for value in self))


class Loads(NamedTuple):
    """What `look` has loaded and `settle` needs: position in full, slot or -1, what starts and min_restart say."""

    position: Any
    slot: Any
    first: Any
    restart: Any


@cute.jit
def look(tokens: Tokens, state: State, step: Step, cache: entry.Cache, token: Any, fused: bool) -> tuple[Known, Loads]:
    """A lane's token without what `settle` adds."""
    is_token = (token >= 0) & (token < tokens.number)
    source = Int64(token if is_token else Int32(0))
    position = ptx.load_global_s64_in_order(tokens.positions + source * 8)
    slot = ptx.load_global_s64_in_order(tokens.slots + source * 8)
    entry_slot = ptx.load_global_s64_in_order(tokens.entry_slots + source * 8)
    request = ptx.load_global_s32_in_order(tokens.requests + source * 4)
    has_request = (request >= 0) & (request < state.requests)
    first, restart = Int32(0), Int32(0)
    if const_expr(fused):
        # Both always load something, as a load with a predicate would be moved down to where it is used.
        offset = Int64(request if has_request else Int32(0)) * 4
        first = ptx.load_global_s32_in_order(step.starts + offset)
        restart = ptx.load_global_s32_in_order((step.min_restart if step.min_restart != 0 else step.starts) + offset)
    has_slot = is_token & (slot >= 0) & (slot < Int64(state.rows))
    has_entry_slot = (entry_slot >= 0) & (entry_slot < Int64(cache.capacity))
    phase = Int32(position) & (RATIO - 1)
    near = Int32(position)
    if position > _LAST_INT32:
        near = Int32(_LAST_INT32 - RATIO + 1)
    if position < 0:
        near = Int32(-RATIO)
    near = (near & -RATIO) | phase
    closes = has_slot & has_entry_slot & has_request & (near >= 0) & (phase == RATIO - 1)
    known = Known(
        token,
        near,
        request if has_request else Int32(-1),
        Int32(entry_slot if has_entry_slot else Int64(0)),
        Int32(1) if closes else Int32(0),
        Int32(0),
        Int32(0),
        Int64(0),
    )
    return known, Loads(position, Int32(slot) if has_slot else Int32(-1), first, restart)


@cute.jit
def settle(state: State, step: Step, known: Known, loads: Loads, row_bytes: int) -> Known:
    """`known` with what the fused kernel needs besides."""
    has_request = known.request >= 0
    # what does not wait for the last loads comes first
    page, row = divmod(cutlass.max(loads.slot, 0), state.page_rows)
    target = state.row(page, row, row_bytes)
    is_kept = Boolean(False)
    if step.keep_every > 0:
        rest = loads.position % step.keep_every
        rest = rest + step.keep_every if rest < 0 else rest
        is_kept = rest >= step.keep_every - RATIO
    # in 64 bits: a start may be any number
    first_position = loads.position - (Int64(known.token) - Int64(loads.first))
    oldest = Int64(loads.restart) if step.min_restart != 0 else first_position
    is_needed = has_request & (is_kept | (loads.position >= (oldest & -RATIO) - RATIO))
    is_saved = (loads.slot >= 0) & ((step.save_all != 0) | is_needed)
    return known._replace(first=cutlass.max(loads.first, 0), is_saved=Int32(1) if is_saved else Int32(0), target=target)


@cute.jit
def is_covered(known: Known, distance: Any, group: int) -> Any:
    """Whether an entry of the step has this lane's row in its window: `group` 0 its own group's, 1 the next one's.

    distance   from the token to its own group's last
    """
    away = distance + group * RATIO
    other = known.of(cute.arch.lane_idx() + away)
    return (other.closes != 0) & (known.token >= other.first) & (other.position >= away)


def lowest_bit(mask: Any) -> Any:
    """Number of the lowest bit that is set."""
    return cute.arch.popc((mask & -mask) - 1)
