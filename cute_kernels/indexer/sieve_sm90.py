"""Score kernels on Hopper that keep, of each row, scores that may be among its k best: those of logits_sm90 and
mxfp4_sm90 for pages and groups of one row, with a sieve (sieve.py) as the last warp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cute_kernels.dsl import barriers
from cute_kernels.indexer.logits_plan import Plan
from cute_kernels.indexer.logits_scores import Scores
from cute_kernels.indexer.logits_sm90 import LogitsKernel, LogitsKey, fake_arguments
from cute_kernels.indexer.mxfp4_scores import Mxfp4Scores
from cute_kernels.indexer.mxfp4_sm90 import Mxfp4LogitsKernel, Mxfp4LogitsKey
from cute_kernels.indexer.sieve import Sieve, SievedScores, sieve_words


def smem_bytes(plan: Plan) -> int:
    """Shared memory of the kernel of that plan, with a sieve."""
    return plan.smem_bytes + plan.stages * barriers.BYTES_PER_STAGE + 4 * sieve_words(plan.stages)


@dataclass(frozen=True)
class SieveKey(LogitsKey):
    """As LogitsKey."""

    rows: int = 1
    paged: bool = True

    @property
    def smem_bytes(self) -> int:
        return smem_bytes(self.plan)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return SieveKernel(self), fake_arguments()


@dataclass(frozen=True)
class Mxfp4SieveKey(Mxfp4LogitsKey):
    """As LogitsKey."""

    rows: int = 1
    paged: bool = True

    @property
    def smem_bytes(self) -> int:
        return smem_bytes(self.plan)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return Mxfp4SieveKernel(self), fake_arguments(has_head_scales=True)


class _FP8Scores(SievedScores, Scores):
    """Into a sieve."""


class _Mxfp4Scores(SievedScores, Mxfp4Scores):
    """Into a sieve."""


class _Sieved:
    """To be mixed into a score kernel. Its `out` is not that of scores: it begins where the lists are (sieve_plan), and
    has as many columns as a row may have keys. `skip` is k."""

    plan: Plan
    name: str
    scores: Any

    def sift(self, scores: Any) -> None:
        """Let the scores go through a sieve."""
        self.sieve = scores.sieve = Sieve(self.plan)
        self.scores, self.name = scores, self.name + "_sieve"

    def allocate_beside(self, smem: Any) -> None:
        self.sieve.allocate(smem)

    def initialize_beside(self) -> None:
        self.sieve.initialize()

    def has_beside(self, clean: Any) -> Any:
        return True

    def run_beside(self, groups: Any, windows: Any, at: Any, out: Any, out_stride: Any) -> None:
        self.sieve.run(groups, windows, at.sums, out)


class SieveKernel(_Sieved, LogitsKernel):
    """Entry point: as LogitsKernel."""

    def __init__(self, key: SieveKey) -> None:
        super().__init__(key)
        self.sift(_FP8Scores(key.plan, key.paged, self.walk))


class Mxfp4SieveKernel(_Sieved, Mxfp4LogitsKernel):
    """Entry point: as Mxfp4LogitsKernel."""

    def __init__(self, key: Mxfp4SieveKey) -> None:
        super().__init__(key)
        self.sift(_Mxfp4Scores(key.plan, key.paged, self.walk))
