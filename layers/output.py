# SPDX-License-Identifier: Apache-2.0
"""The output projection: inverse rotation, grouped low-rank projection wo_a, then wo_b."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cute_kernels.linear.ops import fp8_grouped_linear
from cute_kernels.output.ops import (
    deepseek_v4_fp8_einsum,
    fused_inv_rope_fp8_quant,
    output_scale_shape,
    pack_block_scales,
)
from cute_kernels.runtime import record
from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.compile import call
from cute_kernels.runtime.record import Cost

from .config import AttentionConfig
from .linear import WEIGHT_BLOCK, Fp8Rows, Linear, matmul
from .parallel import TensorParallel

RECIPES = {False: (1, 128, 128), True: (1, 1, 128)}


def _multiply_groups_into(x: torch.Tensor, columns: torch.Tensor, out: torch.Tensor) -> None:
    """out [G, T, out] = x [G, T, in] @ columns [G, in, out] by cuBLAS, which takes rows of any stride."""
    torch.bmm(x, columns, out=out)


class OutputProjection(nn.Module):
    """hidden = wo_b(wo_a(inverse-rotated attention output)), this rank's partial sum over its groups.

    wo_a_quantized      FP8 wo_a: the rotated output is quantized per 128 columns and multiplied as FP8; otherwise bf16
    tma_aligned_scales  packed ue8m0 scales (the Blackwell recipe) instead of fp32 ones
    """

    wo_a: torch.Tensor
    wo_a_scale: torch.Tensor | None

    def __init__(
        self,
        config: AttentionConfig,
        tp: TensorParallel,
        *,
        wo_a_quantized: bool,
        wo_b_quantized: bool,
        tma_aligned_scales: bool = False,
        batch_invariant: bool = False,
        use_pdl: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.batch_invariant, self.use_pdl = batch_invariant, use_pdl
        self._gemm: dict[str, Any] = {"batch_invariant": batch_invariant, "use_pdl": use_pdl}
        self.groups = tp.shard(config.o_groups, "o_groups")
        self.heads_per_group, self.rank = config.heads_per_group, config.o_lora_rank
        self.tma_aligned_scales = tma_aligned_scales
        columns = self.heads_per_group * config.head_dim
        if wo_a_quantized and config.o_lora_rank % WEIGHT_BLOCK:
            raise ValueError(
                f"OutputProjection: o_lora_rank: expected a multiple of {WEIGHT_BLOCK} for an FP8 wo_a, "
                f"got {config.o_lora_rank}"
            )
        dtype = torch.float8_e4m3fn if wo_a_quantized else torch.bfloat16
        self.register_buffer("wo_a", torch.zeros(self.groups, self.rank, columns, dtype=dtype, device=device))
        blocks = (self.groups, self.rank // WEIGHT_BLOCK, columns // WEIGHT_BLOCK)
        self.register_buffer("wo_a_scale", torch.ones(blocks, device=device) if wo_a_quantized else None)
        self.wo_b = Linear(
            self.groups * self.rank,
            config.hidden_size,
            quantized=wo_b_quantized,
            label="wo_b",
            out_dtype=torch.bfloat16 if tp.size == 1 else tp.partial_dtype,
            batch_invariant=batch_invariant,
            use_pdl=use_pdl,
            device=device,
        )
        self._packed: torch.Tensor | None = None

    def _einsum_scale(self) -> torch.Tensor:
        assert self.wo_a_scale is not None
        if not self.tma_aligned_scales:
            return self.wo_a_scale
        if self._packed is None:
            self._packed = pack_block_scales(self.wo_a_scale, self.rank)
        return self._packed

    @property
    def takes_codes(self) -> bool:
        """Whether attention may rotate and quantize its results for wo_a."""
        return self.wo_a_scale is not None and not self.tma_aligned_scales

    def allocate_codes(self, rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for them: codes e4m3 [T, groups, columns], and that of their scales."""
        codes = torch.empty(rows, self.groups, self.wo_a.shape[2], dtype=torch.float8_e4m3fn, device=device)
        shape = output_scale_shape(rows, self.groups, self.heads_per_group)
        return codes, torch.empty(shape, dtype=torch.float32, device=device)

    def project_a(self, rotated: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """bf16 [T, groups, o_lora_rank] from rotated output [T, groups, heads_per_group * 512], and its scales if it is
        quantized."""
        if self.wo_a_scale is None:
            return self._grouped(rotated)
        if not self.tma_aligned_scales and rotated.is_cuda:
            z, _ = fp8_grouped_linear(rotated, scale, self.wo_a, self.wo_a_scale, **self._gemm)
            return z
        z = torch.empty(rotated.shape[0], self.groups, self.rank, dtype=torch.bfloat16, device=rotated.device)
        recipe = list(RECIPES[self.tma_aligned_scales])
        deepseek_v4_fp8_einsum(rotated, scale, self.wo_a, self._einsum_scale(), z, "bhr,hdr->bhd", recipe)
        return z

    def _quantizes(self, rotated: torch.Tensor) -> bool:
        """Whether wo_a's product comes out quantized for wo_b, on Hopper. The bytes are those of quantizing it
        afterwards."""
        if self.wo_a_scale is None or self.tma_aligned_scales or not rotated.is_cuda:
            return False
        return arch_of(rotated.device.index) == "sm_90a" and self.wo_b.quantized

    def _grouped(self, rotated: torch.Tensor) -> torch.Tensor:
        """bf16 products [T, groups, o_lora_rank], of a bf16 wo_a."""
        by_group, rows = rotated.transpose(0, 1), rotated.shape[0]

        def product() -> torch.Tensor:
            if rotated.device.type == "cpu" or torch.compiler.is_compiling():
                return matmul(by_group, self.wo_a, torch.bfloat16).transpose(0, 1)
            z = torch.empty(rows, self.groups, self.rank, dtype=torch.bfloat16, device=rotated.device)
            call(_multiply_groups_into, rotated.get_device(), by_group, self.wo_a.transpose(1, 2), z.transpose(0, 1))
            return z

        recording = None if torch.compiler.is_compiling() else record.active()
        if recording is None:
            return product()
        size = self.wo_a.numel() + rotated.numel() + rows * self.groups * self.rank
        cost = Cost(bytes=2 * size, flops=2 * rows * self.wo_a.numel())
        return recording.run("linear wo_a", "torch", cost, rotated.device, product)

    def forward(
        self,
        o: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        capture: dict[str, torch.Tensor] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, hidden], in `out` if there is one, from attention output [T, heads, 512].

        capture   receives o (inverse-rotated, bf16 [T, heads, 512]) and oa (bf16 [T, groups, rank])
        """
        rotated, scale = fused_inv_rope_fp8_quant(
            o,
            positions,
            cos_sin_cache,
            self.groups,
            self.heads_per_group,
            tma_aligned_scales=self.tma_aligned_scales,
            quantize=self.wo_a_scale is not None,
            use_pdl=self.use_pdl,
        )
        if capture is None:
            return self.project(rotated, scale, out)
        plain, _ = fused_inv_rope_fp8_quant(
            o, positions, cos_sin_cache, self.groups, self.heads_per_group, quantize=False
        )
        capture["o"] = plain.reshape(o.shape)
        capture["oa"] = self.project_a(rotated, scale)
        return self.wo_b(capture["oa"].flatten(1), out)

    def project(self, rotated: torch.Tensor, scale: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[T, hidden] from rotated output, as `project_a` takes it."""
        if not self._quantizes(rotated):
            return self.wo_b(self.project_a(rotated, scale).flatten(1), out)
        assert self.wo_a_scale is not None
        codes, z_scale = fp8_grouped_linear(
            rotated, scale, self.wo_a, self.wo_a_scale, out_dtype=torch.float8_e4m3fn, **self._gemm
        )
        assert z_scale is not None
        return self.wo_b.multiply(Fp8Rows(codes.flatten(1), z_scale), out)
