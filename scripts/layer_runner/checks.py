# SPDX-License-Identifier: Apache-2.0
"""What a run says about itself."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cute_kernels.paging import own_entries
from layer_runner.pools import Pools
from layer_runner.requests import Request

TOLERANCE = {"cpu": 1e-5, "cuda": 5e-2}
"""Largest relative Frobenius difference of two ways to compute the same outputs. GEMMs on the CPU accumulate in
float64, those on a GPU depend on the number of rows: their last bits move FP8 codes, and products that differ by a
factor of 1 +- 1e-5 already give outputs that differ by 2e-2."""

RANKS_TOLERANCE = {"cpu": 4e-3, "cuda": 5e-2}
"""The same of several ranks and one process: partial outputs are rounded to bf16 before they are added up."""


@dataclass(frozen=True)
class Check:
    """A self-check and how it went."""

    name: str
    passed: bool
    detail: str


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Frobenius norm of a - b, relative to that of b; NaN if anything is not finite."""
    difference, norm = (a.double() - b.double()).norm(), b.double().norm()
    return float(difference if norm == 0 else difference / norm)


def check_finite(outputs: Sequence[torch.Tensor]) -> Check:
    """No output is NaN or infinite; poisoned cache rows would make some."""
    bad = sum(int((~torch.isfinite(out)).sum()) for out in outputs)
    total = sum(out.numel() for out in outputs)
    return Check("outputs are finite", bad == 0, f"{bad} of {total} values are not")


def check_consistent(outputs: Sequence[torch.Tensor], alone: Sequence[torch.Tensor], device: str) -> Check:
    """Chunked prefill and decode in a batch give what one prefill of each request alone gives."""
    differences = [relative_difference(a, b) for a, b in zip(outputs, alone, strict=True)]
    worst = max(differences, key=lambda d: float("inf") if d != d else d)
    limit = TOLERANCE[device]
    detail = f"relative difference {worst:.2e}, limit {limit:.0e}"
    return Check("batch with decode = each request in one prefill", worst < limit, detail)


def check_ranks_result(outputs: Sequence[torch.Tensor], whole: Sequence[torch.Tensor], size: int, device: str) -> Check:
    """Several ranks give what one process by itself gives."""
    difference = relative_difference(torch.cat(list(outputs)), torch.cat(list(whole)))
    limit = RANKS_TOLERANCE[device]
    detail = f"relative difference {difference:.2e}, limit {limit:.0e}"
    return Check(f"{size} ranks = one process", difference < limit, detail)


def digest(tensors: Sequence[torch.Tensor]) -> str:
    """Of their bytes."""
    content = hashlib.sha256()
    for tensor in tensors:
        content.update(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return content.hexdigest()


def check_ranks_agree(digests: Sequence[dict[str, str]]) -> Check:
    """All ranks hold the same bytes. digests: of each rank, by what they are of."""
    different = [
        f"{name} of rank {rank}"
        for rank, held in enumerate(digests)
        for name in digests[0]
        if held[name] != digests[0][name]
    ]
    detail = f"{', '.join(different)} differ" if different else ", ".join(digests[0])
    return Check("all ranks hold the same bytes", not different, detail)


def check_caches(
    batch: Pools, alone: Pools, requests: Sequence[Request], name: str = "caches hold the same bytes both ways"
) -> Check:
    """Both ways leave the same bytes in the live rows of every cache that both have."""

    def is_different(cache: str, number: int, length: int) -> bool:
        rows = batch.live_rows(cache, number, length)
        slots, others = (pools.slots(cache, number, *rows) for pools in (batch, alone))
        both = (slots >= 0) & (others >= 0)
        return not torch.equal(batch.records(cache, slots[both]), alone.records(cache, others[both]))

    different = [
        f"{cache} of request {number}"
        for cache in batch.by_name()
        for number, request in enumerate(requests)
        if is_different(cache, number, request.length)
    ]
    detail = f"{', '.join(different)} differ" if different else f"{len(batch.by_name())} caches"
    return Check(name, not different, detail)


def check_shares(
    shares: Sequence[tuple[int, dict[str, str]]], whole: Pools, requests: Sequence[Request], ranks: int
) -> Check:
    """Every rank of a context group holds the records of its own pages that one process has in them. shares: of each
    process its rank in the group, and by cache a digest of its records."""
    different = []
    for number, (rank, held) in enumerate(shares):
        for cache, found in held.items():
            page = whole.by_name()[cache][0].block_size
            records = []
            for request, of in enumerate(requests):
                slots = whole.live_slots(cache, request, of.length)
                is_own = own_entries(torch.arange(len(slots), device=slots.device), page, ranks, rank) >= 0
                records.append(whole.records(cache, slots[is_own]))
            if digest(records) != found:
                different.append(f"{cache} of process {number}")
    detail = f"{', '.join(different)} differ" if different else f"{len(shares)} processes, {ranks} shares"
    return Check("shared caches are one process's together", not different, detail)


def check_untouched(*pools: Pools) -> Check:
    """Nothing was written outside the rows of the requests' tokens."""
    stray = sorted({name for p in pools for name in p.stray_writes()})
    detail = f"stray writes in {', '.join(stray)}" if stray else "spare pages, unused rows and page padding"
    return Check("memory of no request is untouched", not stray, detail)


def visible_entries(rows: int, compress_ratio: int, device: torch.device) -> torch.Tensor:
    """int64 [rows]: entries that the tokens at positions 0 .. rows - 1 may see."""
    return torch.div(torch.arange(1, rows + 1, device=device), compress_ratio, rounding_mode="floor")


def truncated_rows(topk: Sequence[torch.Tensor], compress_ratio: int) -> tuple[int, int]:
    """(rows that see more entries than top-k keeps, rows)."""
    truncated = 0
    for picks in topk:
        truncated += int((visible_entries(picks.shape[0], compress_ratio, picks.device) > picks.shape[1]).sum())
    return truncated, sum(picks.shape[0] for picks in topk)


def check_topk(topk: Sequence[torch.Tensor], compress_ratio: int) -> Check:
    """Every row picks min(visible, K) entries, each of them visible, none twice."""
    bad = 0
    for picks in topk:
        rows, width = picks.shape
        visible = visible_entries(rows, compress_ratio, picks.device)[:, None]
        ordered = picks.sort(dim=1).values
        picked = ordered >= 0
        twice = (ordered.diff(dim=1) == 0) & picked[:, 1:]
        wrong = (ordered >= visible) | (ordered < -1)
        count = picked.sum(dim=1) != visible[:, 0].clamp(max=width)
        bad += int((twice.any(dim=1) | wrong.any(dim=1) | count).sum())
    rows = sum(picks.shape[0] for picks in topk)
    return Check("top-k picks visible entries, each once", bad == 0, f"{bad} of {rows} rows do not")


def check_repeatable(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> Check:
    """The same batch, run again, gives the same bits."""
    same = sum(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return Check("a second run gives the same bits", same == len(first), f"{same} of {len(first)} requests")
