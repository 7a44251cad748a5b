# SPDX-License-Identifier: Apache-2.0
"""build_step_metadata against loops over requests and rows."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from cute_kernels.indices.call import StepCall, StepLayout
from cute_kernels.indices.ops import build_step_metadata
from cute_kernels.runtime.ops import OPS
from cute_kernels.runtime.record import record_calls
from tests.helpers import check_op
from tests.indices.batches import INT32_MAX, Table, int32, make_table, poisoned, slot_of, table_tensor

POISON = 0xA5
PAGES = {1: (64,), 4: (64, 64, 4), 128: (64, 2, 8)}
"""Rows per page of the tables of each kind."""


class Step:
    """A random step: padded requests, requests without rows, contexts shorter than their rows, pages that are none."""

    def __init__(self, seed: int, ratios: tuple[int, ...] = (1, 4, 128), window: int = 128, columns: int = 128) -> None:
        rnd = random.Random(seed)
        self.ratios, self.window, self.columns = ratios, window, columns
        self.requests = rnd.randint(0, 6)
        self.num_decodes = rnd.randint(0, self.requests)
        self.counts = [rnd.choice([0, 1, 1, 2, 9, 130]) for _ in range(self.requests)]
        self.seq_lens = [
            rnd.choice([0, -5, n, n + 1, n + 127, n + rnd.randrange(3000), max(n - 2, 0)]) for n in self.counts
        ]
        self.starts = [sum(self.counts[:r]) for r in range(self.requests + 1)]
        self.decodes = self.starts[self.num_decodes]
        self.tokens = self.starts[-1] + (2 if self.requests and rnd.random() < 0.5 else 0)
        longest = [max(n, 0) for n in self.seq_lens]
        self.tables: dict[int, list[Table]] = {
            ratio: [
                make_table(rnd, [n // (ratio if i == 1 else 1) for n in longest], rows, pages=rnd.choice([50, 2**25]))
                for i, rows in enumerate(PAGES[ratio])
            ]
            for ratio in ratios
        }
        for tables in self.tables.values():
            for table in tables:
                for row in table:
                    if row and rnd.random() < 0.5:
                        row[rnd.randrange(len(row))] = -1
        self.most = self.tokens + self.requests + 3

    def rows(self) -> list[tuple[int, int]]:
        """(request, position) of every row."""
        result = []
        for r, (count, length) in enumerate(zip(self.counts, self.seq_lens, strict=True)):
            result += [(r, max(length - count + i, -1) if length > 0 else -1) for i in range(count)]
        return result + [(-1, -1)] * (self.tokens - len(result))

    def arguments(self, **options: Any) -> dict[str, Any]:
        given = {ratio: tuple(table_tensor(table) for table in tables) for ratio, tables in self.tables.items()}
        named = {
            "upload": int32([*self.starts, *self.seq_lens, 99]),
            "num_requests": self.requests,
            "num_tokens": self.tokens,
            "num_decodes": self.num_decodes,
            "num_decode_tokens": self.decodes,
            "swa_block_table": given[1][0] if 1 in given else None,
            "c4_block_tables": given.get(4),
            "c128_block_tables": given.get(128),
            "max_num_tokens": self.most,
            "window_size": self.window,
            "index_topk": 20,
            "c128a_columns": self.columns if 128 in given else 0,
        }
        return {**named, **options}

    def arrays(self, buffer: torch.Tensor, kind: int) -> dict[str, torch.Tensor]:
        layout, found = StepLayout(self.most, self.window, len(self.ratios)), {}
        for name, (offset, dtype, columns) in layout.arrays(kind).items():
            element = getattr(torch, dtype)
            view = buffer[offset : offset + layout.room * max(columns, 1) * element.itemsize].view(element)
            found[name] = view.view(layout.room, 1, columns) if columns else view
        return found

    def check(
        self, buffer: torch.Tensor, restarts: list[int] | None = None, key_starts: list[int] | None = None
    ) -> None:
        """Every element that is written, and that nothing else is."""
        written = torch.zeros_like(buffer, dtype=torch.bool)

        def same(name: str, array: torch.Tensor, expected: list[Any]) -> None:
            assert array[: len(expected)].tolist() == expected, name
            start = array.storage_offset() * array.element_size() - buffer.storage_offset()
            written[start : start + array[: len(expected)].numel() * array.element_size()] = True

        rows, decodes, window = self.rows(), self.decodes, self.window
        for number, ratio in enumerate(self.ratios):
            a = self.arrays(buffer, number)
            same("query_start_loc", a["query_start_loc"], self.starts)
            same("seq_lens", a["seq_lens"], self.seq_lens)
            before = [n - c for n, c in zip(self.seq_lens, self.counts, strict=True)]
            restart = [max(b, 0) for b in before[: self.num_decodes]] + self.seq_lens[self.num_decodes :]
            same("min_restart", a["min_restart"], restart if restarts is None else restarts)
            gathered = [c + min(b, window - 1) for c, b in zip(self.counts, before, strict=True)]
            same("gather_lens", a["gather_lens"], gathered)
            same("token_to_req_indices", a["token_to_req_indices"], [r for r, _ in rows])
            same("positions", a["positions"], [p for _, p in rows])
            swa, *others = self.tables[ratio]
            slots = [self.slot(swa, r, p, 64) for r, p in rows]
            same("slot_mapping", a["slot_mapping"], slots)
            same("is_valid_token", a["is_valid_token"], [slot >= 0 for slot in slots])
            lens = [min(p + 1, window) if slot >= 0 else 0 for slot, (_, p) in zip(slots, rows, strict=True)]
            same("decode_swa_lens", a["decode_swa_lens"], lens[:decodes])
            indices = [
                [[slot_of(swa, r, p + 1 - n + j, 64) if j < n else -1 for j in range(window)]]
                for n, (r, p) in zip(lens[:decodes], rows, strict=False)
            ]
            same("decode_swa_indices", a["decode_swa_indices"], indices)
            if not others:
                continue
            compressed, state = others
            page, state_page = PAGES[ratio][1:]
            same("state_slot_mapping", a["state_slot_mapping"], [self.slot(state, r, p, state_page) for r, p in rows])
            closing = [
                self.slot(compressed, r, p // ratio, page) if slot >= 0 and (p + 1) % ratio == 0 else -1
                for slot, (r, p) in zip(slots, rows, strict=True)
            ]
            same("compressed_slot_mapping", a["compressed_slot_mapping"], closing)
            visible = [(p + 1) // ratio if slot >= 0 else 0 for slot, (_, p) in zip(slots, rows, strict=True)]
            same("visible", a["visible"], visible)
            if ratio == 4 and key_starts is not None:
                same("key_starts", a["key_starts"], key_starts)
                firsts = [key_starts[r] if r >= 0 else 0 for r, _ in rows]
                same("row_key_starts", a["row_key_starts"], firsts)
                same("row_key_ends", a["row_key_ends"], [n + v for n, v in zip(firsts, visible, strict=True)])
            most = 20 if ratio == 4 else self.columns
            same("decode_topk_lens", a["decode_topk_lens"], [min(n, most) for n in visible[:decodes]])
        assert (buffer[~written] == POISON).all()

    @staticmethod
    def slot(table: Table, request: int, position: int, rows: int) -> int:
        """Slot of a position, beyond int32 too."""
        if request < 0 or position < 0 or position // rows >= len(table[request]):
            return -1
        page = table[request][position // rows]
        return page * rows + position % rows if page >= 0 else -1


def poisoned_buffer(step: Step) -> torch.Tensor:
    size = StepLayout(step.most, step.window, len(step.ratios)).nbytes
    return torch.full((size + 48,), POISON, dtype=torch.uint8)[32:]


@pytest.mark.parametrize("ratios", [(1, 4, 128), (4,), (1, 128), (1,)])
def test_against_loops(ratios: tuple[int, ...]) -> None:
    for seed in range(25):
        step = Step(seed, ratios, window=(128, 5, 64)[seed % 3])
        buffer = poisoned_buffer(step)
        assert build_step_metadata(**step.arguments(out=buffer)) is buffer
        step.check(buffer)


def test_numbers_that_only_the_device_knows() -> None:
    for seed in range(10):
        step = Step(seed)
        buffer, restarts = poisoned_buffer(step), [seed + r for r in range(step.requests)]
        given = {"upload": int32(step.starts), "seq_lens": int32(step.seq_lens), "min_restart": int32(restarts)}
        build_step_metadata(**step.arguments(out=buffer, **given))
        step.check(buffer, restarts)


def test_keys_of_prefills() -> None:
    """Where entries lie that are gathered for the indexer, and which of them a row sees."""
    for seed in range(12):
        step = Step(seed, ((1, 4, 128), (4,))[seed % 2])
        buffer, starts = poisoned_buffer(step), [0]
        for length in step.seq_lens:
            starts.append(starts[-1] + max(length, 0) // 4)
        build_step_metadata(**step.arguments(out=buffer, key_starts=int32(starts)))
        step.check(buffer, key_starts=starts)


def test_lists_of_c128a() -> None:
    """As build_c128a_topk_metadata fills them, in rows of any stride; the rest of the tables is not touched."""
    for seed in range(12):
        step = Step(seed, (4, 128))
        buffer = poisoned_buffer(step)
        tables = poisoned(step.decodes + 1, 160), poisoned(step.tokens - step.decodes, 132)[:, :128]
        decode, prefill = (tables[0], None) if seed % 3 == 0 else tables
        build_step_metadata(**step.arguments(out=buffer, c128a_decode_buffer=decode, c128a_prefill_buffer=prefill))
        step.check(buffer)
        compressed = step.tables[128][1]
        for t, (r, p) in enumerate(step.rows()):
            count = min((p + 1) // 128, step.columns)
            if t < step.decodes:
                want = [slot_of(compressed, r, j, 2) if j < count else -1 for j in range(128)]
                assert tables[0][t].tolist() == want + poisoned(32).tolist()
            elif prefill is not None:
                assert prefill[t - step.decodes].tolist() == [j if j < count else -1 for j in range(128)]
        assert (tables[0][step.decodes] == poisoned(1)).all()


def test_longest_contexts() -> None:
    """Positions up to those of int32, where tables end before."""
    table = torch.zeros(2, 3, dtype=torch.int32)
    upload = int32([0, 1, 3, INT32_MAX, INT32_MAX])
    given = {"swa_block_table": table, "c4_block_tables": (table,) * 3, "max_num_tokens": 3}
    buffer = build_step_metadata(upload, 2, 3, 2, 3, **given)
    layout = StepLayout(3, 128, 2)
    offset = layout.arrays(0)["positions"][0]
    assert buffer[offset : offset + 24].view(torch.int64).tolist() == [INT32_MAX - 1, INT32_MAX - 2, INT32_MAX - 1]
    offset = layout.arrays(1)["visible"][0]
    assert buffer[offset : offset + 12].view(torch.int32).tolist() == [0, 0, 0]


def test_arrays_lie_apart() -> None:
    """At multiples of 128 bytes, each behind the other, whatever the sizes."""
    for most, window, kinds in ((1, 128, 3), (127, 5, 1), (128, 64, 2), (8192, 128, 3)):
        layout = StepLayout(most, window, kinds)
        assert layout.room > most
        places = {}
        for kind in range(kinds):
            for offset, dtype, columns in layout.arrays(kind).values():
                size = layout.room * max(columns, 1) * getattr(torch, dtype).itemsize
                assert offset % 128 == 0
                places[offset] = offset + size
        ends = sorted(places.items())
        assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])]
        assert ends[-1][1] == layout.nbytes


def small_call() -> dict[str, Any]:
    step = Step(0)
    assert 0 < step.decodes < step.tokens
    return step.arguments(
        out=poisoned_buffer(step),
        c128a_decode_buffer=poisoned(step.decodes, 128),
        c128a_prefill_buffer=poisoned(step.tokens - step.decodes, 128),
    )


def in_order(call: dict[str, Any]) -> StepCall:
    """The arguments of the op."""
    values = {name: value for name, value in call.items() if name in StepCall._fields}
    names = ("swa", "compressed", "state")
    for prefix in ("c4", "c128"):
        tables = call[f"{prefix}_block_tables"] or (None,) * 3
        values |= {f"{prefix}_{name}_block_table": table for name, table in zip(names, tables, strict=True)}
    defaults = {"seq_lens": None, "min_restart": None, "swa_block_size": 64, "kv_block_size": 256}
    defaults |= {"c4_state_block_size": 4, "c128_state_block_size": 8, "use_pdl": False, "key_starts": None}
    return StepCall(**{**defaults, **values, "buffer": call["out"]})


def test_buffer_with_gaps() -> None:
    call = small_call()
    gaps = torch.zeros(2 * len(call["out"]), dtype=torch.uint8)[::2]
    with pytest.raises(ValueError, match="build_step_metadata: buffer: expected a contiguous tensor"):
        build_step_metadata(**{**call, "out": gaps})
    assert not gaps.any()


def test_op() -> None:
    check_op("build_step_metadata", *in_order(small_call()))


def test_recorded_bytes() -> None:
    step = Step(0)
    with record_calls() as recording:
        build_step_metadata(**step.arguments())
    (entry,) = recording.calls
    t, d, r = step.tokens, step.decodes, step.requests
    windows = 3 * d * 4 * (129 + 3)
    rest = 4 * (6 * r + 2) + t * (12 + 3 * 9 + 2 * 20) + 8 * d
    assert (entry.op, entry.cost.bytes, entry.cost.flops) == ("build_step_metadata", windows + rest, 0)


@pytest.mark.parametrize(
    ("change", "error", "argument"),
    [
        ({"upload": torch.zeros(3)}, TypeError, "upload"),
        ({"upload": int32([0, 1])}, ValueError, "upload"),
        ({"num_requests": -1}, ValueError, "num_requests"),
        ({"num_tokens": 10**6}, ValueError, "num_tokens"),
        ({"num_decodes": 10**6}, ValueError, "num_decodes"),
        ({"num_decode_tokens": 10**6}, ValueError, "num_decode_tokens"),
        ({"max_num_tokens": 0}, ValueError, "max_num_tokens"),
        ({"seq_lens": int32([1] * 99)}, ValueError, "seq_lens"),
        ({"min_restart": torch.zeros(1)}, TypeError, "min_restart"),
        ({"key_starts": int32([1] * 99)}, ValueError, "key_starts"),
        ({"key_starts": torch.zeros(1)}, TypeError, "key_starts"),
        ({"swa_block_table": int32([1])}, ValueError, "swa_block_table"),
        ({"c4_block_tables": (None, None, torch.zeros(0))}, TypeError, "c4_state_block_table"),
        ({"swa_block_table": None, "c4_block_tables": None, "c128_block_tables": None}, ValueError, "swa_block_table"),
        ({"window_size": 0}, ValueError, "window_size"),
        ({"kv_block_size": 192}, ValueError, "kv_block_size"),
        ({"index_topk": -1}, ValueError, "index_topk"),
        ({"c128a_columns": 100}, ValueError, "c128a_columns"),
        ({"c128a_columns": 256}, ValueError, "c128a_decode_buffer"),
        ({"c128_block_tables": None}, ValueError, "c128a_decode_buffer"),
        ({"out": torch.zeros(8, dtype=torch.uint8)}, ValueError, "buffer"),
        ({"out": torch.zeros(10**6, dtype=torch.uint8)[8:]}, ValueError, "buffer"),
    ],
)
def test_errors(change: dict[str, Any], error: type[Exception], argument: str) -> None:
    call = small_call()
    build_step_metadata(**call)
    with pytest.raises(error, match=rf"build_step_metadata: {argument}: expected"):
        build_step_metadata(**{**call, **change})


def test_starts_that_descend_are_found() -> None:
    """By checked mode; seq_lens, which come behind them in the upload, may be anything."""
    validate, call = OPS["build_step_metadata"].validate, in_order(small_call())
    assert validate is not None
    assert call.num_requests > 1
    call.upload[call.num_requests + 1] = -5
    validate(*call)
    call.upload[1] = call.upload[call.num_requests] + 1
    with pytest.raises(ValueError, match=r"build_step_metadata: upload\[\d+\]: expected at least"):
        validate(*call)


def test_tables_of_a_kind_belong_together() -> None:
    call = small_call()
    swa, _, state = call["c4_block_tables"]
    with pytest.raises(ValueError, match="c4_compressed_block_table: expected tables of all three caches of ratio 4"):
        build_step_metadata(**{**call, "c4_block_tables": (swa, None, state)})
