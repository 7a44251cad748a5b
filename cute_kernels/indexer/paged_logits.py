"""paged_mqa_logits on a GPU. The call: call.py; the choice of a kernel: select.py."""

from __future__ import annotations

from typing import Any

from cute_kernels.indexer import call as calls
from cute_kernels.indexer import select
from cute_kernels.indexer.call import PagedLogitsCall
from cute_kernels.runtime.compile import KernelKey


def deployment_keys(config: Any, tp: int, arch: str) -> list[KernelKey]:
    """One of each format for every size of a group, on pages of 64 keys. Every rank has all index heads."""
    return select.deployment_keys(config, arch, paged=True)


def supports(*args: Any) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    why = PagedLogitsCall(*args).why_not()
    return not why, why


def launch(*args: Any, skip: int = 0, op: str = "paged_mqa_logits") -> None:
    """Run the kernel on the current stream of out's device. Arguments in the schema's order, checked, supported."""
    run(PagedLogitsCall(*args), skip, op)


def run(call: PagedLogitsCall, skip: int, op: str) -> None:
    """The same for an op. Rows that see no more than `skip` keys are not scored."""
    if call.out.numel() == 0:
        return
    if call.kv_cache.shape[0] == 0 or call.block_tables.shape[1] == 0:
        call.out.fill_(float("-inf"))
        return
    calls.launch(call, op, skip)
