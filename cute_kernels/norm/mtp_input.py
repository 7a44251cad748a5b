"""fused_mtp_input_rmsnorm with the kernel of rms.py: rows of embeddings, and residual streams as second matrix."""

from __future__ import annotations

from functools import cache
from typing import Any

from cute_kernels.norm.rms import RmsNormKey, supports_matrix
from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.compile import launch as launch_key


def key_for(arch: str, width: int, enorm_is_fp32: bool, hnorm_is_fp32: bool, positions: str) -> RmsNormKey:
    """The kernel that serves rows of this width."""
    return RmsNormKey(arch, width, enorm_is_fp32, width, hnorm_is_fp32, positions)


def deployment_keys(config: Any, tp: int, arch: str) -> list[RmsNormKey]:
    """The layer of multi-token prediction; checkpoints have bf16 weights, positions are int64."""
    return [key_for(arch, config.hidden_size, False, False, "int64")]


@cache
def _key(device_index: int, width: int, enorm_is_fp32: bool, hnorm_is_fp32: bool, positions: str) -> RmsNormKey:
    return key_for(arch_of(device_index), width, enorm_is_fp32, hnorm_is_fp32, positions)


def supports(
    inputs_embeds: Any,
    positions: Any,
    previous_hidden_states: Any,
    enorm_weight: Any,
    hnorm_weight: Any,
    eps: float,
    hc_mult: int,
    enorm_out: Any,
    hnorm_out: Any,
    use_pdl: bool,
) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    rows = inputs_embeds.shape[0] * (hc_mult + 1)
    if rows >= 2**31:
        return False, f"there must be fewer than 2^31 rows, embeddings and streams, got {rows}"
    supported, why = supports_matrix("inputs_embeds", inputs_embeds, enorm_weight, enorm_out)
    if not supported:
        return False, why
    return supports_matrix("previous_hidden_states", previous_hidden_states, hnorm_weight, hnorm_out)


def launch(
    inputs_embeds: Any,
    positions: Any,
    previous_hidden_states: Any,
    enorm_weight: Any,
    hnorm_weight: Any,
    eps: float,
    hc_mult: int,
    enorm_out: Any,
    hnorm_out: Any,
    use_pdl: bool,
) -> None:
    """Run the kernel on the current stream of the tensors' device. Arguments in the schema's order, checked and
    supported."""
    if inputs_embeds.shape[0] == 0:
        return
    device_index = inputs_embeds.device.index
    is_fp32 = enorm_weight.element_size() == 4, hnorm_weight.element_size() == 4
    kind = "int64" if positions.element_size() == 8 else "int32"
    launch_key(
        _key(device_index, inputs_embeds.shape[1], *is_fp32, kind),
        device_index,
        inputs_embeds,
        enorm_weight,
        enorm_out,
        previous_hidden_states,
        hnorm_weight,
        hnorm_out,
        positions,
        eps,
        use_pdl,
    )
