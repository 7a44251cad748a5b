"""fused_q_kv_rmsnorm with the kernel of rms.py: the rows of both matrices, each with its own width and weight."""

from __future__ import annotations

from functools import cache
from typing import Any

from cute_kernels.formats import HEAD_DIM
from cute_kernels.norm.rms import RmsNormKey, supports_matrix
from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.compile import launch as launch_key


def deployment_keys(config: Any, tp: int, arch: str) -> list[RmsNormKey]:
    """Every layer norms its latent query and its KV vector; checkpoints have bf16 weights."""
    return [RmsNormKey(arch, config.q_lora_rank, False, HEAD_DIM, False)]


@cache
def _key(device_index: int, width: int, is_fp32: bool, kv_width: int, kv_is_fp32: bool) -> RmsNormKey:
    return RmsNormKey(arch_of(device_index), width, is_fp32, kv_width, kv_is_fp32)


def supports(
    qr: Any, kv: Any, q_weight: Any, kv_weight: Any, eps: float, qr_out: Any, kv_out: Any, use_pdl: bool
) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    for name, x, weight, out in (("qr", qr, q_weight, qr_out), ("kv", kv, kv_weight, kv_out)):
        supported, why = supports_matrix(name, x, weight, out)
        if not supported:
            return False, why
    return True, ""


def launch(
    qr: Any, kv: Any, q_weight: Any, kv_weight: Any, eps: float, qr_out: Any, kv_out: Any, use_pdl: bool
) -> None:
    """Run the kernel on the current stream of qr's device. Arguments in the schema's order, checked and supported."""
    if qr.shape[0] == 0:
        return
    device_index = qr.device.index
    is_fp32, kv_is_fp32 = q_weight.element_size() == 4, kv_weight.element_size() == 4
    launch_key(
        _key(device_index, qr.shape[1], is_fp32, kv.shape[1], kv_is_fp32),
        device_index,
        qr,
        q_weight,
        qr_out,
        kv,
        kv_weight,
        kv_out,
        None,
        eps,
        use_pdl,
    )
