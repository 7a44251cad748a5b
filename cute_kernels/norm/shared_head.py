"""mtp_shared_head_rmsnorm with the kernel of rms.py."""

from __future__ import annotations

from functools import cache
from typing import Any

from cute_kernels.norm.rms import RmsNormKey, supports_matrix
from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.compile import launch as launch_key


def deployment_keys(config: Any, tp: int, arch: str) -> list[RmsNormKey]:
    """The layer of multi-token prediction; checkpoints have bf16 weights."""
    return [RmsNormKey(arch, config.hidden_size, False)]


@cache
def _key(device_index: int, width: int, is_fp32: bool) -> RmsNormKey:
    return RmsNormKey(arch_of(device_index), width, is_fp32)


def supports(hidden_states: Any, weight: Any, eps: float, out: Any, use_pdl: bool) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    return supports_matrix("hidden_states", hidden_states, weight, out)


def launch(hidden_states: Any, weight: Any, eps: float, out: Any, use_pdl: bool) -> None:
    """Run the kernel on the current stream of the tensors' device. Arguments in the schema's order, checked and
    supported."""
    if hidden_states.shape[0] == 0:
        return
    device_index = hidden_states.device.index
    key = _key(device_index, hidden_states.shape[1], weight.element_size() == 4)
    launch_key(key, device_index, hidden_states, weight, out, None, None, None, None, eps, use_pdl)
