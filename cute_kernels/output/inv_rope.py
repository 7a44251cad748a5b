"""fused_inv_rope, the form of fused_inv_rope_fp8_quant without quantization, with the kernel of inv_rope_quant.py."""

from __future__ import annotations

from typing import Any

from cute_kernels.output.inv_rope_quant import InvRopeKey, key_of_call, keys_of, supports_rotation
from cute_kernels.runtime.compile import launch as launch_key


def deployment_keys(config: Any, tp: int, arch: str) -> list[InvRopeKey]:
    """For checkpoints with a bf16 output projection, and for looking into the layers."""
    return keys_of("none", arch)


def supports(
    o: Any, positions: Any, cos_sin_cache: Any, out: Any, n_groups: int, heads_per_group: int, use_pdl: bool
) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    return supports_rotation(o, cos_sin_cache, out)


def launch(
    o: Any, positions: Any, cos_sin_cache: Any, out: Any, n_groups: int, heads_per_group: int, use_pdl: bool
) -> None:
    """Run the kernel on the current stream of o's device. Arguments in the schema's order, checked and supported."""
    if o.shape[0] == 0:
        return
    key = key_of_call(o, "none")
    launch_key(key, o.device.index, o, positions, cos_sin_cache, out, None, heads_per_group, use_pdl)
