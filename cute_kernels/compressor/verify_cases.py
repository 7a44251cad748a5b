# SPDX-License-Identifier: Apache-2.0
"""Calls that the kernels of this package are verified with, edge cases of values, sizes, strides and slots, and what
counts as agreement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.formats import HEAD_DIM, INDEX_DIM, compressor_state
from cute_kernels.runtime.verify import Example, compare_arguments, raw_memory, same_bytes

_POISON = 0xA5


def save() -> Iterator[Example]:
    """save_partial_states(kv, score, ape, positions, state_cache, slot_mapping, block_size, compress_ratio)"""
    cases = (
        (HEAD_DIM, 4, 1, 4, 0),
        (HEAD_DIM, 4, 1023, 4, 576),
        (HEAD_DIM, 128, 517, 8, 64),
        (INDEX_DIM, 4, 300, 4, 16),
        (INDEX_DIM, 128, 130, 8, 0),
        (HEAD_DIM, 4, 0, 4, 0),
        # rows enough for the kernels of long calls
        (HEAD_DIM, 4, 2051, 4, 576),
        (HEAD_DIM, 128, 4099, 8, 64),
        (INDEX_DIM, 4, 16387, 4, 16),
    )
    for dim, ratio, rows, block_size, extra in cases:
        g = torch.Generator().manual_seed(dim + ratio + rows)
        fmt = compressor_state(dim, ratio)
        columns = torch.randn(rows + 3, 2 * fmt.width, generator=g)
        for column, value in enumerate((float("inf"), float("-inf"), float("nan"), -0.0, 3.4e38, 1e-45)):
            columns[:, column * 7 :: 97] = value
        kv, score = columns.chunk(2, dim=1)
        blocks = -(-rows // block_size) + 2
        pool = fmt.allocate(blocks, block_size, page_stride=fmt.page_bytes(block_size) + extra)
        raw_memory(pool).fill_(_POISON)
        capacity = blocks * block_size
        slots = torch.randperm(capacity, generator=g)[:rows]
        slots[3::4] = torch.tensor([-1, capacity, 2**33, -(2**62)]).repeat(rows)[: len(slots[3::4])]
        positions = torch.randint(0, 2**20, (rows + 1,), generator=g)
        ape = torch.randn(ratio, fmt.width, generator=g)
        yield Example(
            f"ratio {ratio}, {dim} columns, {rows} rows, {extra} bytes between pages",
            (kv, score, ape, positions, pool, slots, block_size, ratio),
        )


def slots() -> Iterator[Example]:
    """get_compressed_slot_mapping(out, query_start_loc, seq_lens, block_table, slot_mapping, num_tokens, block_size,
    compress_ratio)"""
    for requests, longest, ratio, page_rows, first, has_own in (
        (1, 1, 4, 64, 0, True),
        (64, 1, 4, 64, 0, True),
        (31, 40, 128, 2, 0, False),
        (33, 700, 4, 64, 0, True),
        (3000, 2, 4, 3, 7, False),
        (1, 5000, 1, 5, 0, True),
        (0, 0, 4, 64, 0, False),
    ):
        g = torch.Generator().manual_seed(requests + longest)
        queries = torch.randint(0, longest + 1, (requests,), generator=g)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), queries.cumsum(0)]) + first
        seq_lens = queries + torch.randint(-1, 5000, (requests,), generator=g)
        seq_lens[5::11] = torch.tensor([2**31 - 1, 0, -(2**31)]).repeat(requests)[: (requests + 5) // 11]
        table = torch.randint(-1, 2**22, (requests, 3000 // page_rows), generator=g)
        table[:, 7::9] = -1_000_000
        rows = int(starts[-1]) + 3
        own = torch.randint(-2, 9, (rows + 1,), generator=g)
        yield Example(
            f"{requests} requests of at most {longest} rows, ratio {ratio}, pages of {page_rows}",
            (
                torch.full((rows + 70,), 77),
                *(starts.int(), seq_lens.int(), table.int()[:, 1:-1], own if has_own else None),
                *(rows, page_rows * ratio, ratio),
            ),
        )


# ---- entries

BAD_SLOTS = (-1, -7, 2**31, 2**32 + 1, -(2**62), 2**62)
# Of a format: the largest relative error of one rounding step, and the smallest step against a record's largest value.
_STEPS = {
    "plain_bf16/1": (2**-7, 0.0),
    "fp8_ds_mla/1": (0.13, 2**-15),
    "plain_fp8/1": (0.13, 2**-9),
    "indexer_fp8/1": (0.13, 2**-15),
    "indexer_mxfp4/1": (0.51, 0.2),
    "indexer_mxfp4_wide/1": (0.51, 0.2),
}
_COMPRESS_ORDER = (
    *("state_cache", "token_to_req_indices", "positions", "slot_mapping", "block_table", "cos_sin_cache", "kv_cache"),
    *("kv_slot_mapping", "rms_norm_weight", "fp8_scale", "rms_norm_eps", "compress_ratio", "kv_format"),
    *("e2m1_rounding", "index_hadamard"),
)


def _poisoned(fmt: Any, blocks: int, block_size: int, extra: int) -> torch.Tensor:
    pool: torch.Tensor = fmt.allocate(blocks, block_size, page_stride=fmt.page_stride(block_size) + extra)
    raw_memory(pool).fill_(_POISON)
    return pool


def entry_difference(kv_format: str, got: torch.Tensor, want: torch.Tensor, slots: torch.Tensor) -> str:
    """Why pools of entries on the CPU differ by more than sums in another order explain, or "".

    A rounding step here and there in the records at the valid ones of `slots`; every other byte is the same.
    """
    fmt: Any = formats.FORMATS[kv_format]
    rows = want.shape[1]
    slots = slots[formats.valid_slots(slots, want.shape[0] * rows)].unique()
    mine, theirs = (fmt.read_fields(cache, rows, slots) for cache in (got, want))
    a, b = (torch.nan_to_num(fmt.read(cache, rows, slots).float(), nan=1e30) for cache in (got, want))
    relative, least = _STEPS[kv_format]
    bound = relative * b.abs() + least * b.abs().amax(dim=1, keepdim=True)
    wrong = int(((a - b).abs() > bound).sum())
    if wrong:
        return f"{wrong} of {a.numel()} columns differ by more than a rounding step"
    # the bits of a NaN are anyone's
    told = (b != 1e30).all(dim=1)
    changed = sum(int((x[told] != y[told]).sum()) for x, y in zip(mine, theirs, strict=True))
    total = sum(x[told].numel() for x in mine)
    if changed > 4 + 0.003 * total:
        return f"{changed} of {total} bytes differ"
    merged = torch.empty(0, dtype=want.dtype).set_(
        raw_memory(want).clone().untyped_storage(), want.storage_offset(), want.shape, want.stride()
    )
    fmt.write_fields(merged, rows, slots, *mine)
    return "" if same_bytes(raw_memory(merged), raw_memory(got)) else "bytes outside the records differ"


def random_step(
    kv_format: str,
    ratio: int,
    lengths: list[int],
    seed: int = 0,
    *,
    longest_prefix: int = 40,
    bad: bool = True,
    state_rows: int = 4,
    entry_rows: int = 4,
    fp32_weight: bool = False,
    options: tuple[str, bool] = ("ties_to_lower", False),
    at_ends: bool = False,
    columns: int = 0,
    raw_scores: bool = False,
) -> dict[str, Any]:
    """Arguments of the fused op on the CPU: requests with so many tokens each behind prefixes of random lengths.

    All pages hold numbers, so that any prefix can be read. No state slot that the step writes holds a row it reads.
    With `bad`, some slots name no row, some pages do not exist, and a few rows belong to nobody. With `at_ends`, every
    request's first token is the last of a group. With `columns`, the table is cyclic and has so many, and only a step
    of one token for each request saves.
    """
    g = torch.Generator().manual_seed(seed)
    fmt: Any = formats.FORMATS[kv_format]
    state_format = formats.compressor_state(fmt.dim, ratio)
    width, requests = state_format.width, len(lengths)
    prefixes = torch.randint(0, longest_prefix + 1, (requests,), generator=g).tolist()
    if at_ends:
        prefixes = [p // ratio * ratio + ratio - 1 for p in prefixes]
    positions = [p for a, n in zip(prefixes, lengths, strict=True) for p in range(a, a + n)]
    owners = [r for r, n in enumerate(lengths) for _ in range(n)]
    pad = 3
    rows = len(positions) + pad
    position = torch.tensor([*positions, *[ratio - 1] * pad], dtype=torch.int64)
    request = torch.tensor([*owners, *[0] * pad], dtype=torch.int32)
    deepest = max([a + n for a, n in zip(prefixes, lengths, strict=True)] + [1])
    cycle = columns
    columns = columns or -(-deepest // state_rows)
    pages = max(requests, 1) * columns + 1
    table = torch.randperm(pages, generator=g)[: requests * columns].view(requests, columns).int()
    slots = torch.full((rows,), -1)
    if positions:
        at = torch.tensor(positions)
        slots[:-pad] = table[torch.tensor(owners), at // state_rows % columns].long() * state_rows + at % state_rows
    entries = (rows if at_ends else -(-rows // ratio)) + 8
    entry_pages = -(-entries // entry_rows) + 1
    closing = (position + 1) % ratio == 0
    entry_slots = torch.full((rows,), -1)
    entry_slots[closing] = torch.randperm(entry_pages * entry_rows, generator=g)[: rows + 8][: int(closing.sum())]
    if bad:
        wrong = torch.tensor([*BAD_SLOTS, pages * state_rows])
        chosen = torch.rand(rows, generator=g) < 0.05
        slots[chosen] = wrong[torch.randint(0, len(wrong), (int(chosen.sum()),), generator=g)]
        wrong = torch.tensor([*BAD_SLOTS, entry_pages * entry_rows])
        chosen = torch.rand(rows, generator=g) < 0.05
        entry_slots[chosen] = wrong[torch.randint(0, len(wrong), (int(chosen.sum()),), generator=g)]
        lost = torch.rand(table.shape, generator=g) < 0.05
        nowhere = torch.tensor([-1, -1_000_000, pages, 2**30], dtype=torch.int32)
        table[lost] = nowhere[torch.randint(0, 4, (int(lost.sum()),), generator=g)]
    state = _poisoned(state_format, pages, state_rows, 64)
    state.copy_(torch.randn(state.shape, generator=g))
    wide = torch.randn(rows + 2, 2 * width + 4, generator=g)
    wide[:, width:] *= 3
    wide[rows - pad : rows] = float("nan")
    weight = torch.randn(fmt.dim, generator=g) * torch.exp2(torch.arange(fmt.dim) % 9 - 6)
    angles = torch.arange(deepest - 2 if deepest > 8 else 8)[:, None] * 160000.0 ** (-torch.arange(32) / 32)
    scaled = fmt is formats.PLAIN_FP8
    saves = not cycle or max([*lengths, 0]) <= 1
    return {
        "kv_score": wide[:, : 2 * width],
        "ape": torch.randn(ratio, width, generator=g),
        "positions": position,
        "token_to_req_indices": request,
        "query_start_loc": torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()]).int(),
        "state_cache": state,
        "slot_mapping": slots,
        "block_table": table,
        "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], dim=1).float(),
        "kv_cache": _poisoned(fmt, entry_pages, entry_rows, 512),
        "kv_slot_mapping": entry_slots,
        "rms_norm_weight": weight if fp32_weight else weight.bfloat16(),
        "min_restart": None if saves else torch.full((requests,), 2**31 - 1, dtype=torch.int32),
        "fp8_scale": torch.tensor([0.3]) if scaled else None,
        "rms_norm_eps": 1e-6,
        "compress_ratio": ratio,
        "keep_every": 0,
        "kv_format": kv_format,
        "persist": "all" if saves else "window",
        "e2m1_rounding": options[0],
        "index_hadamard": options[1],
        "use_pdl": False,
        "cyclic_table": cycle > 0,
        "raw_scores": raw_scores,
    }


def compress_arguments(a: dict[str, Any]) -> dict[str, Any]:
    """Arguments of compress_norm_rope_store from those of the fused op."""
    return {name: a[name] for name in _COMPRESS_ORDER}


def _agree(names: list[str], got: Sequence[Any], want: Sequence[Any]) -> str:
    g, w = dict(zip(names, got, strict=True)), dict(zip(names, want, strict=True))
    difference = entry_difference(w["kv_format"], g["kv_cache"], w["kv_cache"], w["kv_slot_mapping"])
    if difference:
        return difference
    others = [name for name in names if name != "kv_cache"]
    return compare_arguments(others, [g[name] for name in others], [w[name] for name in others])


def _example(name: str, a: dict[str, Any]) -> Example:
    return Example(name, tuple(a.values()), partial(_agree, list(a)))


# Tokens of the requests of a step.
_MIXED = [1, 9, 1, 2, 30, 4, 4, 1, 3, 17, 0, 5, 64, 1, 1, 7]
_LONG = [1, 300, 128, 2, 129]
_C4: tuple[tuple[str, dict[str, Any]], ...] = (
    (formats.FP8_DS_MLA.id, {}),
    (formats.PLAIN_BF16.id, {"fp32_weight": True}),
    (formats.PLAIN_BF16.id, {}),
    (formats.PLAIN_FP8.id, {}),
    (formats.INDEXER_FP8.id, {"options": ("ties_to_lower", True)}),
    (formats.INDEXER_FP8.id, {"state_rows": 3, "entry_rows": 3}),
    (formats.INDEXER_MXFP4.id, {"options": ("ties_to_lower", False)}),
    *((formats.INDEXER_MXFP4.id, {"options": ("ties_to_even", transformed)}) for transformed in (False, True)),
    (formats.INDEXER_MXFP4.id, {"options": ("ties_to_lower", True)}),
    (formats.INDEXER_MXFP4_WIDE.id, {}),
)
_C128: tuple[tuple[str, dict[str, Any]], ...] = (
    (formats.FP8_DS_MLA.id, {}),
    (formats.PLAIN_BF16.id, {"fp32_weight": True}),
    (formats.PLAIN_BF16.id, {}),
    (formats.PLAIN_FP8.id, {}),
)


def _steps() -> Iterator[tuple[str, dict[str, Any]]]:
    for kv_format, options in _C4:
        yield f"{kv_format}, ratio 4, {options}", random_step(kv_format, 4, _MIXED, **options)
    for kv_format, options in _C128:
        a = random_step(kv_format, 128, _LONG, longest_prefix=300, state_rows=8, entry_rows=2, **options)
        yield f"{kv_format}, ratio 128, {options}", a
    yield "no rows", {**random_step(formats.FP8_DS_MLA.id, 4, [1]), "slot_mapping": torch.empty(0, dtype=torch.int64)}


def compress() -> Iterator[Example]:
    """compress_norm_rope_store(state_cache, token_to_req_indices, positions, slot_mapping, block_table, ...)"""
    for name, a in _steps():
        yield _example(name, compress_arguments(a))


def fused() -> Iterator[Example]:
    """fused_compress_norm_rope_store(kv_score, ape, positions, token_to_req_indices, query_start_loc, ...)"""
    for name, a in _steps():
        yield _example(f"{name}, saving all", a)
        yield _example(
            f"{name}, saving what is needed",
            {**a, "persist": "window", "keep_every": 8 * a["compress_ratio"], "use_pdl": True},
        )
    for lengths in (_MIXED, [1] * 40):
        for kv_format, hadamard in ((formats.FP8_DS_MLA.id, False), (formats.INDEXER_FP8.id, True)):
            ring: dict[str, Any] = {"columns": 2, "options": ("ties_to_lower", hadamard)}
            a = random_step(kv_format, 4, lengths, len(lengths), longest_prefix=90, raw_scores=hadamard, **ring)
            yield _example(f"{kv_format}, ratio 4, cyclic tables, {len(lengths)} requests", a)
        ring = {"state_rows": 128, "columns": 1, "entry_rows": 2, "raw_scores": lengths[1] > 1}
        a = random_step(
            formats.FP8_DS_MLA.id,
            128,
            [n * 8 for n in lengths] if lengths[1] > 1 else lengths,
            3,
            longest_prefix=600,
            **ring,
        )
        yield _example(f"ratio 128, cyclic tables, {len(lengths)} requests", a)


def soak_fused() -> Iterator[Example]:
    """fused_compress_norm_rope_store by clusters of eight, four and two CTAs: 116 entries, several for each cluster."""
    for tokens in (1, 9, 36):
        lengths = [tokens] * 116
        a = random_step(formats.FP8_DS_MLA.id, 128, lengths, longest_prefix=0, state_rows=8, entry_rows=2, at_ends=True)
        yield _example(f"{len(lengths)} requests of {tokens} tokens", a)


# ---- V4.1: latents, and what is stored of them


def latent_step(lengths: list[int], ratio: int, ring: int = 8, seed: int = 0, bad: bool = True) -> dict[str, Any]:
    """Arguments of compress_latent on the CPU: requests with so many tokens each behind prefixes of random lengths.
    Of ratio 2 all rings are full of numbers; with `bad`, some slots name no row, and a few rows belong to nobody."""
    g = torch.Generator().manual_seed(seed)
    prefixes = torch.randint(0, 1000, (len(lengths),), generator=g).tolist()
    position = torch.tensor([p for a, n in zip(prefixes, lengths, strict=True) for p in range(a, a + n)] + [5, 6])
    request = torch.tensor([r for r, n in enumerate(lengths) for _ in range(n)] + [-1, len(lengths)])
    rows = position.shape[0]
    wide = torch.randn(rows + 2, HEAD_DIM * ratio + 4, generator=g)
    wide[3::7] *= 1e-3
    wide[5::11] = 0
    kv_score = wide[: rows + (1 if ratio == 2 else 0), : HEAD_DIM * ratio]
    ring_of: tuple[Any, ...] = (None, None, None, None)
    if ratio == 2:
        fmt = compressor_state(HEAD_DIM, 2)
        blocks = len(lengths) + 1
        state = fmt.allocate(blocks, ring, page_stride=fmt.page_bytes(ring) + 64)
        raw_memory(state).fill_(_POISON)
        state.copy_(torch.randn(state.shape, generator=g))
        block = torch.randperm(blocks, generator=g)[request.clamp(0, len(lengths) - 1)]
        slots = block * ring + position % ring
        if bad:
            wrong = torch.tensor([*BAD_SLOTS, blocks * ring])
            chosen = torch.rand(rows, generator=g) < 0.05
            slots[chosen] = wrong[torch.randint(0, len(wrong), (int(chosen.sum()),), generator=g)]
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        ring_of = request.int(), starts, state, slots
    out = torch.full((kv_score.shape[0], HEAD_DIM + 8), 7.0, dtype=torch.bfloat16)[:, :HEAD_DIM]
    weight = (torch.randn(HEAD_DIM, generator=g) * torch.exp2(torch.arange(HEAD_DIM) % 9 - 6)).bfloat16()
    names = "token_to_req_indices", "query_start_loc", "state_cache", "slot_mapping"
    return {
        "kv_score": kv_score,
        "positions": position,
        **dict(zip(names, ring_of, strict=True)),
        "norm_weight": weight,
        "eps": 1e-20,
        "compress_ratio": ratio,
        "out": out,
        "use_pdl": False,
    }


def _latents_agree(names: list[str], got: Sequence[Any], want: Sequence[Any]) -> str:
    g, w = dict(zip(names, got, strict=True)), dict(zip(names, want, strict=True))
    a, b = g["out"].float(), w["out"].float()
    bound = 2.0**-6 * b.abs() + 1e-5 * b.abs().amax(dim=1, keepdim=True)
    wrong, changed = int(((a - b).abs() > bound).sum()), int((a != b).sum())
    if wrong or changed > 4 + 0.01 * a.numel():
        return f"{wrong} of {a.numel()} columns differ by more than roundings do, {changed} differ"
    others = [name for name in names if name != "out"]
    return compare_arguments(others, [g[name] for name in others], [w[name] for name in others])


_LATENTS = (
    (_MIXED, 2, 8),
    (_MIXED * 4, 2, 8),
    (_MIXED, 1, 8),
    ([300, 1, 129], 2, 16),
    ([1] * 70, 2, 8),
    ([700], 1, 8),
)
"""(tokens of the requests, ratio, rows of a ring)"""


def latents() -> Iterator[Example]:
    """compress_latent(kv_score, positions, token_to_req_indices, query_start_loc, state_cache, slot_mapping,
    norm_weight, eps, compress_ratio, out, use_pdl)"""
    for lengths, ratio, ring in _LATENTS:
        a = latent_step(lengths, ratio, ring, seed=len(lengths))
        a["use_pdl"] = len(lengths) > 3
        agree = partial(_latents_agree, list(a))
        yield Example(f"ratio {ratio}, {sum(lengths)} tokens, rings of {ring}", tuple(a.values()), agree)


def stored_step(kv_format: str, rows: int, ratio: int, page_rows: int = 4, seed: int = 0) -> dict[str, Any]:
    """Arguments of rope_quant_insert or k_norm_rope_store on the CPU, some slots of which name no row."""
    g = torch.Generator().manual_seed(seed + rows)
    fmt: Any = formats.FORMATS[kv_format]
    x = torch.randn(rows + 1, fmt.dim + 8, generator=g) * torch.exp2(torch.randint(-20, 9, (rows + 1, 1), generator=g))
    x[2::9] = 0
    x[4::13, 5] = float("nan")
    pages = -(-rows // page_rows) + 1
    slots = torch.randperm(pages * page_rows, generator=g)[:rows]
    chosen = torch.rand(rows, generator=g) < 0.05
    slots[chosen] = torch.tensor([*BAD_SLOTS, pages * page_rows])[
        torch.randint(0, len(BAD_SLOTS) + 1, (int(chosen.sum()),), generator=g)
    ]
    positions = torch.randint(-3, 500, (rows + 1,), generator=g)
    angles = torch.rand(400, formats.ROPE_DIM // 2, generator=g) * 6.3
    cache = _poisoned(fmt, pages, page_rows, 64)
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    is_key = fmt.dim == INDEX_DIM
    weight = (torch.randn(INDEX_DIM, generator=g)).bfloat16()
    return {
        ("k" if is_key else "latent"): x.bfloat16()[:, : fmt.dim],
        **({"norm_weight": weight, "eps": 1e-20} if is_key else {}),
        "positions": positions,
        "cos_sin_cache": table,
        "kv_cache": cache,
        "slot_mapping": slots,
        "compress_ratio": ratio,
        "kv_format": kv_format,
        "use_pdl": rows > 50,
    }


def rope_inserts() -> Iterator[Example]:
    """rope_quant_insert(latent, positions, cos_sin_cache, kv_cache, slot_mapping, ratio, kv_format, use_pdl)"""
    for fmt in (formats.FP8_DS_MLA, *formats.V41_FORMATS):
        for rows, ratio, page_rows in ((1, 1, 32), (61, 2, 4), (300, 1, 3), (0, 1, 4)):
            a = stored_step(fmt.id, rows, ratio, page_rows)
            yield Example(f"{fmt.id}, ratio {ratio}, {rows} rows, pages of {page_rows}", tuple(a.values()))


def _keys_agree(names: list[str], got: Sequence[Any], want: Sequence[Any]) -> str:
    g, w = dict(zip(names, got, strict=True)), dict(zip(names, want, strict=True))
    slots = w["slot_mapping"].where(stored(w), torch.full_like(w["slot_mapping"], -1))
    difference = entry_difference(w["kv_format"], g["kv_cache"], w["kv_cache"], slots)
    others = [name for name in names if name != "kv_cache"]
    return difference or compare_arguments(others, [g[name] for name in others], [w[name] for name in others])


def stored(a: dict[str, Any]) -> torch.Tensor:
    """bool [T'], the rows of a step that close an entry."""
    positions = a["positions"][: a["slot_mapping"].shape[0]]
    return (positions >= 0) & ((positions + 1) % a["compress_ratio"] == 0)


def key_stores() -> Iterator[Example]:
    """k_norm_rope_store(k, norm_weight, eps, positions, cos_sin_cache, kv_cache, slot_mapping, ratio, kv_format,
    use_pdl)"""
    for fmt in (formats.INDEXER_FP8, formats.INDEXER_MXFP4):
        for rows, ratio, page_rows in ((1, 1, 32), (61, 2, 4), (300, 1, 3), (0, 1, 4)):
            a = stored_step(fmt.id, rows, ratio, page_rows)
            agree = partial(_keys_agree, list(a))
            yield Example(f"{fmt.id}, ratio {ratio}, {rows} rows, pages of {page_rows}", tuple(a.values()), agree)


SOAK = {"fused_compress_norm_rope_store": soak_fused}

EXAMPLES = {
    "compress_latent": latents,
    "compress_norm_rope_store": compress,
    "fused_compress_norm_rope_store": fused,
    "get_compressed_slot_mapping": slots,
    "k_norm_rope_store": key_stores,
    "rope_quant_insert": rope_inserts,
    "save_partial_states": save,
}
