# SPDX-License-Identifier: Apache-2.0
"""Whether an indexer has picked the best of what it may pick. Places do not tell: keys that are alike score alike, and
any of them may be picked."""

from __future__ import annotations

import torch

TIED = 1e-5
"""Part of a row's largest score by which kernels that sum heads in another order may differ."""


def is_listed(lists: torch.Tensor, count: int) -> torch.Tensor:
    """bool [rows, count]: whether a row's list, in which -1 is none, has each of so many numbers."""
    found = torch.zeros(len(lists), count + 1, dtype=torch.bool, device=lists.device)
    return found.scatter_(1, torch.where((lists < 0) | (lists > count), count, lists).long(), True)[:, :count]


def largest(scores: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each row's scores, of those that may be picked; not 0."""
    return scores.where(scores > -torch.inf, 0.0).abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny)


def shortfall(scores: torch.Tensor, picks: torch.Tensor) -> torch.Tensor:
    """By how much the worst pick of each row is below the best that is left out; infinite where there are too few, or
    one that may not be picked. Scores that are -inf may not be picked."""
    may_be, is_picked = scores > -torch.inf, is_listed(picks, scores.shape[1])
    count = may_be.sum(dim=1).clamp(max=picks.shape[1])
    is_whole = (is_picked.sum(dim=1) == count) & ((picks >= 0).sum(dim=1) == count) & (may_be | ~is_picked).all(dim=1)
    worst = scores.where(is_picked, torch.inf).amin(dim=1)
    best = scores.where(may_be & ~is_picked, -torch.inf).amax(dim=1)
    return torch.where(is_whole, (best - worst).clamp(min=0.0), torch.inf)
