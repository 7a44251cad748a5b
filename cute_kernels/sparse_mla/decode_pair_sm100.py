"""sparse_mla_decode on Blackwell (sm_100a, sm_103a) for more than 64 heads: decode_sm100.py for pairs of blocks.

Compiled, inspected and run in a model of the GPU; nobody has run it on one.

Every row is gathered, converted and stored once for 128 heads. Both blocks have all roles, but for the products, which
a warp of the first block starts for both; what it waits for are barriers of the first block. decode_pair_sm100_plan.py
says which block has what. Here is what roles do otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass.cute as cute

from cute_kernels.dsl import ptx
from cute_kernels.sparse_mla import decode_pair_sm100_plan
from cute_kernels.sparse_mla.decode_args import fake_arguments
from cute_kernels.sparse_mla.decode_pair_sm100_plan import BLOCKS, PairBarriers, smem_bytes
from cute_kernels.sparse_mla.decode_pair_sm100_rows import PairFront, PairGather
from cute_kernels.sparse_mla.decode_pair_sm100_scores import PairScores
from cute_kernels.sparse_mla.decode_sm100 import BlackwellDecodeKey, DecodeKernel
from cute_kernels.sparse_mla.decode_sm100_products import Products
from cute_kernels.sparse_mla.params import TileScheduler


@dataclass(frozen=True)
class BlackwellPairDecodeKey(BlackwellDecodeKey):
    """As BlackwellDecodeKey. A pair of blocks takes two of the items of 64 heads that calls are cut into."""

    kernel_name: ClassVar[str] = "sparse_mla.blackwell.decode_2cta"

    @property
    def smem_bytes(self) -> int:
        return smem_bytes()

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return PairDecodeKernel(self), fake_arguments(self.out_fp32)


class PairProducts(Products):
    plan = decode_pair_sm100_plan

    @cute.jit
    def run(self, ready: PairBarriers, at: Any) -> None:
        """Multiply every tile, for both blocks. By a warp of each: the first block's."""
        if ptx.rank_again() == 0:
            Products.run(self, ready, at)


class PairItems(TileScheduler):
    """Of a pair. A block's heads are those of a block of 64."""

    def coords(self, item: Any) -> tuple[Any, Any, Any, Any]:
        batch, token, part, head_block = super().coords(item)
        return batch, token, part, head_block * BLOCKS + ptx.rank_again()


class PairDecodeKernel(DecodeKernel):
    name = "sparse_mla_decode_blackwell_pair"
    plan = decode_pair_sm100_plan
    barriers = PairBarriers
    roles = (PairFront, PairProducts, PairScores, PairGather)

    def own(self, items: TileScheduler, block: Any) -> TileScheduler:
        return PairItems(*items)._replace(first=block // BLOCKS)

    def synchronize(self) -> None:
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
