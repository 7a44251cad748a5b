# SPDX-License-Identifier: Apache-2.0
"""Calls that this package's kernels are verified with: edge cases of sizes, strides, batches, tables and numbers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cute_kernels.indices.call import StepLayout
from cute_kernels.indices.ops import combined_width, mixed_width
from cute_kernels.runtime.verify import Example

_POISON = -77_777
_WRONG = (-1, -1_000_000, -(2**31), 2**31 - 1)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _integers(low: int, high: int, shape: tuple[int, ...], g: torch.Generator, wrong: float = 0.0) -> torch.Tensor:
    """int32 of low .. high - 1, a share of them replaced by numbers that name nothing."""
    values = torch.randint(low, high, shape, generator=g)
    others = torch.tensor(_WRONG)[torch.randint(0, len(_WRONG), shape, generator=g)]
    return values.where(torch.rand(shape, generator=g) >= wrong, others).int()


def _sliced(values: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """The same numbers as a column slice of a wider, poisoned matrix."""
    rows, columns = values.shape
    whole = torch.full((rows, before + columns + after), _POISON, dtype=torch.int32)
    whole[:, before : before + columns] = values
    return whole[:, before : before + columns]


def _poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, _POISON, dtype=torch.int32)


def _output(rows: int, columns: int, aligned: bool) -> torch.Tensor:
    """A poisoned matrix, rows 16-byte aligned or not, with a gap after each."""
    return _sliced(_poisoned(rows, columns), 4 if aligned else 1, 8 if aligned else 2)


def _table(requests: int, columns: int, g: torch.Generator) -> torch.Tensor:
    """A block table, rows apart, with wrong pages in between."""
    return _sliced(_integers(0, 5000, (requests, columns), g, 0.1), 1, 2)


def _batch(requests: int, longest: int, first: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(query_start_loc, seq_lens, rows) with empty requests and contexts that are shorter than their queries."""
    queries = torch.randint(0, longest + 1, (requests,), generator=g)
    queries[torch.rand(requests, generator=g) < 0.3] = 0
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), queries.cumsum(0)]) + first
    prefixes = torch.randint(0, 5000, (requests,), generator=g)
    prefixes[torch.rand(requests, generator=g) < 0.2] = 0
    seq_lens = prefixes + queries
    short = torch.rand(requests, generator=g) < 0.1
    seq_lens[short] = queries[short] // 2
    seq_lens[torch.rand(requests, generator=g) < 0.05] = -3
    return starts.int(), seq_lens.int(), int(queries.sum())


def _owners(starts: torch.Tensor, rows: int, g: torch.Generator) -> torch.Tensor:
    """The request of each row, a few replaced by others; rows past the last request name anything."""
    owner = torch.searchsorted(starts[1:].long() - starts[0].long(), torch.arange(rows), right=True)
    other = _integers(-2, len(starts) + 1, (rows,), g, 0.3)
    return other.where(torch.rand(rows, generator=g) < 0.05, owner.int())


def window() -> Iterator[Example]:
    """compute_decode_swa_indices(positions, token_to_req_indices, is_valid_token, block_table, block_size, window_size,
    out_indices, out_lens)"""
    cases = ((0, 128, 64, True), (1, 128, 64, True), (257, 128, 64, True), (33, 128, 3, False), (65, 300, 1, False))
    for rows, size, block_size, aligned in (*cases, (130, 4, 64, True), (70, 513, 2, False)):
        g = _generator(rows + size)
        positions = torch.randint(-3, 2000, (rows,), generator=g)
        positions[5::9] = torch.tensor([10**6, 2**31 - 1, 2**31, 2**40, -(2**62), 2**62]).repeat(rows)[
            : (rows + 3) // 9
        ]
        for dtype in (torch.int64, torch.int32):
            yield Example(
                f"{rows} rows of {size}, pages of {block_size}, {'aligned' if aligned else 'odd'}, {dtype}",
                (
                    positions.to(dtype),
                    _integers(-1, 6, (rows + 2,), g, 0.05),
                    torch.rand(rows + 1, generator=g) < 0.8,
                    _table(5, 1500 // block_size + 1, g),
                    block_size,
                    size,
                    _output(rows, size, aligned)[:, None],
                    _poisoned(rows),
                ),
            )


def translate() -> Iterator[Example]:
    """compute_global_topk_indices_and_lens(topk_indices, token_to_req_indices, block_table, block_size, is_valid_token,
    out_indices, out_lens)"""
    cases = ((0, 512, 64, True), (1, 512, 64, True), (131, 512, 64, True), (77, 1024, 2, True), (40, 2052, 64, True))
    many = ((600, 516, 64, True), (4100, 1024, 2, True), (4100, 132, 3, True))
    for rows, columns, block_size, aligned in (
        *cases,
        *many,
        (33, 513, 3, False),
        (35, 517, 8, False),
        (9, 1, 7, False),
        (5, 0, 64, True),
    ):
        g = _generator(rows + columns)
        width = 37
        picks = _integers(0, width * block_size + 5, (rows, columns), g, 0.1)
        yield Example(
            f"{rows} rows of {columns}, pages of {block_size}, {'aligned' if aligned else 'odd'}",
            (
                _sliced(picks, 4, 4) if aligned else _sliced(picks, 2, 3),
                _integers(-1, 6, (rows + 3,), g, 0.05),
                _table(5, width, g),
                block_size,
                torch.rand(rows + 1, generator=g) < 0.8,
                _output(rows, columns, aligned),
                _poisoned(rows),
            ),
        )
    empty = torch.empty(0, 4, dtype=torch.int32)
    picks, nobody = _integers(0, 9, (3, 8), _generator(0)), torch.zeros(3, dtype=torch.int32)
    for name, table in (("no requests", empty), ("no pages", torch.empty(4, 0, dtype=torch.int32))):
        valid = torch.ones(3, dtype=torch.bool)
        yield Example(name, (picks, nobody, table, 64, valid, _poisoned(3, 8), _poisoned(3)))


def c128a() -> Iterator[Example]:
    """build_c128a_topk_metadata(positions, compress_ratio, num_decode_tokens, token_to_req_indices, block_table,
    block_size, slot_mapping, global_decode_buffer, decode_lens_buffer, prefill_buffer, max_compressed_tokens)"""
    for rows, decode, columns, block_size, ratio, aligned in (
        (0, 0, 128, 2, 128, True),
        (1, 1, 128, 2, 128, True),
        (37, 20, 1024, 2, 128, True),
        (20, 0, 8192, 2, 128, True),
        (30, 30, 640, 3, 7, False),
        (19, 5, 2176, 64, 1, False),
        (7, 3, 0, 2, 128, True),
    ):
        g = _generator(rows + columns)
        positions = torch.randint(-3, max(columns, 1) * ratio * 3 // 2, (rows,), generator=g)
        positions[4::7] = torch.tensor([2**31 - 1, 2**31, 2**40, 2**62, -(2**62)]).repeat(rows)[: (rows + 2) // 7]
        for dtype in (torch.int64, torch.int32):
            yield Example(
                f"{decode} of {rows} rows, {columns} columns, pages of {block_size}, ratio {ratio}, {dtype}",
                (
                    positions.to(dtype),
                    ratio,
                    decode,
                    _integers(-1, 6, (rows + 1,), g, 0.05),
                    _table(5, columns // block_size + 1, g),
                    block_size,
                    torch.randint(-5, 20, (rows,), generator=g),
                    _output(decode + 1, columns + 128, aligned),
                    _poisoned(decode + 2),
                    _output(rows - decode + 1, columns, aligned),
                    columns,
                ),
            )


def combine() -> Iterator[Example]:
    """combine_topk_swa_indices(topk_indices, query_start_loc, seq_lens, gather_lens, window_size, compress_ratio, topk,
    M, N, out_indices, out_lens)"""
    for requests, longest, size, ratio, topk, M, N, aligned in (
        (4, 60, 128, 4, 512, 6000, 1300, True),
        (1, 300, 128, 4, 1024, 6000, 1300, True),
        (31, 9, 128, 4, 512, 6000, 1300, True),
        (32, 9, 128, 4, 512, 6000, 1300, True),
        (2500, 1, 128, 128, 64, 900, 30, True),
        (40, 7, 5, 1, 70, 500, 90, False),
        (3, 50, 128, 4, 512, 2**31 - 1, 2**30, True),
        (3, 20, 128, 0, 0, 6000, 0, True),
        (5, 20, 300, 4, 9, 2**29, 2**29 - 100, False),
        (0, 0, 128, 4, 8, 100, 50, True),
    ):
        g = _generator(requests + topk)
        starts, seq_lens, covered = _batch(requests, longest, 17 if requests % 2 else 0, g)
        rows = covered + 5
        gather_lens = _integers(0, 3000, (requests,), g, 0.1)
        picks = _integers(0, 1400, (rows, topk), g, 0.1)
        yield Example(
            f"{requests} requests, {rows} rows, window {size}, ratio {ratio}, {topk} picks, M {M}, N {N}",
            (
                _sliced(picks, 4, 8) if aligned else _sliced(picks, 1, 2),
                *(starts, seq_lens, gather_lens, size, ratio, topk, M, N),
                _output(rows, combined_width(topk, size), aligned),
                _poisoned(rows),
            ),
        )


def mixed() -> Iterator[Example]:
    """build_flashinfer_mixed_sparse_indices(decode_swa_indices, decode_compressed_indices, decode_compressed_topk_lens,
    prefill_topk_indices, query_start_loc, seq_lens, token_to_req_indices, swa_block_table, swa_block_size,
    compressed_block_table, compressed_block_size, window_size, compress_ratio, topk,
    decode_compressed_indices_are_local, decode_is_valid_token, sparse_indices, sparse_topk_lens)"""
    for requests, longest, decode, compressed, picked, topk, size, ratio, is_local, optional, aligned, block_size in (
        (9, 5, 1000, 512, 512, 512, 128, 4, True, True, True, 64),
        (9, 5, 7, 512, 512, 512, 128, 4, True, False, True, 64),
        (9, 9, 20, 1024, 1024, 1024, 128, 4, True, True, True, 64),
        (400, 5, 500, 512, 512, 512, 128, 4, True, True, True, 64),
        (3000, 5, 4000, 256, 256, 256, 128, 4, True, True, True, 64),
        (9, 9, 20, 2048, 2048, 2048, 128, 128, False, True, True, 64),
        (70, 3, 0, None, 0, 0, 128, 1, False, False, True, 64),
        (5, 9, 11, None, 8, 70, 128, 4, True, True, True, 64),
        (5, 9, 11, 0, 8, 512, 128, 4, True, True, True, 64),
        (6, 9, 10, 70, 33, 9, 5, 4, False, True, False, 3),
        (6, 9, 10, 513, 66, 64, 131, 1, True, True, False, 3),
        (6, 9, 10, 64, 600, 512, 300, 4, False, False, True, 64),
        (6, 9, 10, 70, 33, 9, 5, 4, False, True, False, 8),
        (6, 9, 10, 513, 66, 64, 131, 1, True, True, False, 8),
        (0, 0, 0, 8, 8, 8, 128, 4, True, True, True, 64),
    ):
        g = _generator(requests + topk)
        starts, seq_lens, covered = _batch(requests, longest, 23 if requests % 2 else 0, g)
        rows = covered + 4
        decode = min(decode, rows)
        window_slots = _integers(0, 10**6, (decode, size), g, 0.1)
        slots = None if compressed is None else _integers(0, 1500, (decode, compressed), g, 0.1)
        picks = _integers(0, 1300, (rows - decode, picked), g, 0.1)
        has_table = compressed is not None or (topk > 0 and picked > 0)
        margins = (4, 4) if aligned else (1, 2)
        yield Example(
            f"{decode} of {rows} rows, {compressed} and {picked} columns, window {size}, ratio {ratio}, {topk} picks, "
            f"{'request-local' if is_local else 'slots'}, {'all' if optional else 'few'} arguments, "
            f"pages of {block_size}",
            (
                _sliced(window_slots, *margins),
                None if slots is None else _sliced(slots, *margins),
                _integers(-3, (compressed or 0) + 9, (decode + 1,), g, 0.1) if optional else None,
                _sliced(picks, *margins),
                *(starts, seq_lens, _owners(starts, rows + 1, g)),
                *(_table(requests, 5000 // block_size, g), block_size),
                *((_table(requests, 1300 // 16, g), 16) if has_table else (None, 0)),
                *(size, ratio, topk, is_local),
                torch.rand(decode + 1, generator=g) < 0.8 if optional else None,
                _output(rows, mixed_width(size, topk, slots), aligned),
                _poisoned(rows),
            ),
        )


def step() -> Iterator[Example]:
    """build_step_metadata(upload, seq_lens, min_restart, swa_block_table, c4_swa_block_table,
    c4_compressed_block_table, c4_state_block_table, c128_swa_block_table, c128_compressed_block_table,
    c128_state_block_table, key_starts, buffer, c128a_decode_buffer, c128a_prefill_buffer, num_requests, num_tokens,
    num_decodes, num_decode_tokens, max_num_tokens, window_size, index_topk, c128a_columns, swa_block_size,
    kv_block_size, c4_state_block_size, c128_state_block_size, use_pdl)"""
    for requests, longest, decodes, ratios, window_size, columns, is_given, aligned, use_pdl in (
        (1, 1, 1, (1, 4, 128), 128, 128, False, True, False),
        (7, 9, 4, (1, 4, 128), 128, 640, True, True, True),
        (40, 5, 40, (1, 4, 128), 128, 1024, False, True, False),
        (3, 200, 1, (4, 128), 128, 128, True, False, True),
        (300, 2, 150, (1, 4), 128, 0, False, True, False),
        (9, 40, 5, (128,), 64, 256, False, False, False),
        (6, 30, 3, (1,), 128, 0, True, True, True),
        (11, 7, 6, (1, 4, 128), 5, 0, False, False, False),
        (4, 0, 2, (1, 4, 128), 128, 128, False, True, False),
        (0, 0, 0, (1, 4, 128), 128, 128, False, True, False),
    ):
        g = _generator(requests + longest)
        starts, seq_lens, covered = _batch(requests, longest, 0, g)
        tokens, decode_tokens = covered + (3 if requests else 0), int(starts[decodes])
        short = _integers(0, 300, (requests,), g)
        seq_lens = short.where(torch.rand(requests, generator=g) < 0.3, seq_lens)
        most = max(tokens, requests, 1) + 5
        size = StepLayout(most, window_size, len(ratios)).nbytes
        tables: dict[int, tuple[torch.Tensor | None, ...]] = {1: (None,), 4: (None,) * 3, 128: (None,) * 3}
        for ratio in ratios:
            widths = (5000 // 64 - 2,) if ratio == 1 else (5000 // 64 - 2, 17, 5000 // (4 if ratio == 4 else 8))
            tables[ratio] = tuple(_table(requests, width, g) for width in widths)
        lists: tuple[torch.Tensor | None, ...] = None, None
        if 128 in ratios and columns:
            prefills = _output(tokens - decode_tokens + 1, columns, True)
            lists = _output(decode_tokens + 1, columns + 128, True), None if columns == 640 else prefills
        given = _integers(0, 3000, (requests,), g, 0.1)
        yield Example(
            f"{requests} requests, {tokens} rows, ratios {ratios}, window {window_size}, lists of {columns}",
            (
                torch.cat([starts, torch.full_like(seq_lens, _POISON) if is_given else seq_lens]),
                *((seq_lens, given) if is_given else (None, None)),
                *(*tables[1], *tables[4], *tables[128]),
                torch.cat([starts.new_zeros(1), seq_lens.cumsum(0).int() // 4]) if 4 in ratios and is_given else None,
                torch.full((size + 64,), 0xA5, dtype=torch.uint8)[16 if aligned else 32 :],
                *lists,
                *(requests, tokens, decodes, decode_tokens, most, window_size, 512 if aligned else 9, columns),
                *(64, 256, 4, 8, use_pdl),
            ),
        )


EXAMPLES = {
    "build_step_metadata": step,
    "build_c128a_topk_metadata": c128a,
    "build_flashinfer_mixed_sparse_indices": mixed,
    "combine_topk_swa_indices": combine,
    "compute_decode_swa_indices": window,
    "compute_global_topk_indices_and_lens": translate,
}
