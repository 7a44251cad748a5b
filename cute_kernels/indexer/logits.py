"""mqa_logits on a GPU. The call: call.py; the choice of a kernel: select.py."""

from __future__ import annotations

from typing import Any

from cute_kernels.indexer import call as calls
from cute_kernels.indexer import select
from cute_kernels.indexer.call import LogitsCall
from cute_kernels.runtime.compile import KernelKey


def deployment_keys(config: Any, tp: int, arch: str) -> list[KernelKey]:
    """One for each format: a prefill may have any number of rows. Every rank has all index heads."""
    return select.deployment_keys(config, arch, paged=False)


def supports(*args: Any) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    why = LogitsCall(*args).why_not()
    return not why, why


def launch(*args: Any, skip: int = 0, op: str = "mqa_logits") -> None:
    """Run the kernel on the current stream of out's device. Arguments in the schema's order, checked, supported."""
    run(LogitsCall(*args), skip, op)


def run(call: LogitsCall, skip: int, op: str) -> None:
    """The same for an op. Rows that see no more than `skip` keys are not scored."""
    if call.out.numel() == 0:
        return
    if call.k.shape[0] == 0:
        if call.clean_logits:
            call.out.fill_(float("-inf"))
        return
    calls.launch(call, op, skip)
