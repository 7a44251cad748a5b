# SPDX-License-Identifier: Apache-2.0
"""What ran on the GPU, launch by launch, and where the time between first and last launch went.

Kernels that are launched as dependents begin before the one ahead has ended and then wait for it: their own durations
count time twice. So a launch is charged with what it adds: from the end of everything before it, or its start if that
is later, to its own end. What launches add and the gaps between them sum up to the whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

KINDS: tuple[tuple[str, str], ...] = (
    ("copies", r"Memcpy|Memset"),
    (
        "scores and picks",
        r"mqa_logits|^top_k_per_row|cooperative_topk|persistent_topk|topKPerRow|cp_gather_indexer|^all_visible",
    ),
    ("attention", r"^sparse_mla_|^merge_attention_states|flash_fwd|sparse_attn_fwd"),
    (
        "caches and compression",
        r"insert|Insert|compress|^save_partial|^dequantize_and_gather|^fused_indexer_q|^kernel_cutlass",
    ),
    ("products", r"gemm|nvjet|cublas|cutlass|xmma|splitK|einsum"),
    ("torch", r"at::native|at_cuda|^cub::|elementwise|reduce_kernel"),
    ("norms and quantization", r"^rms_norm|^_?quantize_|^fused_inv_rope"),
    ("indices", r"indices|topk_metadata|slot_mapping|step_metadata"),
)
"""What a launch is for -> what its name contains, the first that fits. Of the peers' Triton kernels most are called
`kernel`."""

OTHER = "other"


@dataclass(frozen=True)
class Launch:
    """A kernel, a copy or a fill: when it began and how long it took, in microseconds."""

    name: str
    start: float
    us: float

    @property
    def end(self) -> float:
        return self.start + self.us

    @property
    def kind(self) -> str:
        return next((kind for kind, pattern in KINDS if re.search(pattern, self.name)), OTHER)


@dataclass(frozen=True)
class Timeline:
    """Launches in the order in which they began."""

    launches: tuple[Launch, ...]

    @classmethod
    def of(cls, launches: Iterable[Launch]) -> Timeline:
        return cls(tuple(sorted(launches, key=lambda launch: launch.start)))

    @property
    def span(self) -> float:
        """From the first start to the last end."""
        if not self.launches:
            return 0.0
        return max(launch.end for launch in self.launches) - self.launches[0].start

    @property
    def gaps(self) -> float:
        """Time within the span in which nothing ran."""
        return self.span - sum(self.added())

    def added(self) -> list[float]:
        """What each launch adds to the time before it."""
        found = []
        end = self.launches[0].start if self.launches else 0.0
        for launch in self.launches:
            found.append(max(0.0, launch.end - max(launch.start, end)))
            end = max(end, launch.end)
        return found

    def by_kind(self) -> dict[str, tuple[int, float]]:
        """(launches, microseconds that they add) of each kind, in the order of KINDS."""
        found: dict[str, tuple[int, float]] = {}
        for launch, us in zip(self.launches, self.added(), strict=True):
            count, total = found.get(launch.kind, (0, 0.0))
            found[launch.kind] = count + 1, total + us
        order = [*dict(KINDS), OTHER]
        return {kind: found[kind] for kind in order if kind in found}


def profile(call: Callable[[], Any]) -> Timeline:
    """What `call` launches on the GPU at hand. It has run before: what compiles or loads is done."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        call()
        torch.cuda.synchronize()
    on_gpu = (event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    return Timeline.of(
        Launch(event.name, float(event.time_range.start), float(event.time_range.elapsed_us())) for event in on_gpu
    )
