# SPDX-License-Identifier: Apache-2.0
"""Calls of deepseek_v4_fp8_einsum on a GPU, and what they have to give: of a model's sizes where none are given."""

from __future__ import annotations

import dataclasses

import torch

from cute_kernels.linear.scales import pack_words
from cute_kernels.linear.verify_cases import PRODUCTS, ROUNDING
from cute_kernels.output.ops import deepseek_v4_fp8_einsum
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.arch import arch_of, multiprocessors
from cute_kernels.runtime.record import record_calls

EQUATION, RECIPE, PACKED = "bhr,hdr->bhd", [1, 128, 128], [1, 1, 128]


@dataclasses.dataclass
class Call:
    a: torch.Tensor
    a_scale: torch.Tensor
    b: torch.Tensor
    b_scale: torch.Tensor
    out: torch.Tensor

    @classmethod
    def make(cls, tokens: int, groups: int, rank: int = 1024, width: int = 4096, seed: int = 0) -> Call:
        """Inputs as the quantizer lays them out: rows group by group, scales [G, K / 128, T rounded up to 4]."""
        g = torch.Generator(device="cuda").manual_seed(seed)

        def codes(*shape: int) -> torch.Tensor:
            x = torch.randn(*shape, device="cuda", generator=g) * 100
            return x.clamp_(-448, 448).to(torch.float8_e4m3fn)

        def powers(*shape: int) -> torch.Tensor:
            return torch.exp2(torch.randint(-12, -2, shape, device="cuda", generator=g).float())

        a = codes(groups, tokens, width).transpose(0, 1)
        a_scale = powers(groups, width // 128, -(-tokens // 4) * 4).permute(2, 0, 1)[:tokens]
        b, b_scale = codes(groups, rank, width), powers(groups, -(-rank // 128), width // 128)
        return cls(a, a_scale, b, b_scale, poison(tokens, groups, rank))

    def run(self) -> torch.Tensor:
        with record_calls() as recording:
            deepseek_v4_fp8_einsum(self.a, self.a_scale, self.b, self.b_scale, self.out, EQUATION, RECIPE)
        assert [call.implementation for call in recording.calls] == ["kernel"]
        return self.out

    def run_packed(self, a_scale: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
        """The results with scales in words."""
        out = poison(*self.out.shape)
        deepseek_v4_fp8_einsum(self.a, a_scale, self.b, b_scale, out, EQUATION, PACKED)
        return out

    def rows(self, rows: slice) -> Call:
        """The call for some of the rows alone."""
        a, a_scale = self.a[rows], self.a_scale[rows]
        return Call(a, a_scale, self.b, self.b_scale, poison(a.shape[0], *self.out.shape[1:]))

    def expected(self, of_columns: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 results, and the sums of the products' magnitudes. of_columns: scales of each column of its own."""
        a = self.a.double() * self.a_scale.double().repeat_interleave(128, -1)
        if of_columns is None:
            of_columns = self.b_scale.repeat_interleave(128, 1)[:, : self.b.shape[1]]
        b = self.b.double() * of_columns.double().repeat_interleave(128, -1)
        a, b = a.transpose(0, 1), b.transpose(1, 2)
        return (a @ b).transpose(0, 1), (a.abs() @ b.abs()).transpose(0, 1)


def portable(call: Call) -> torch.Tensor:
    """The results of the portable kernel, with the tiles it has for the call."""
    from cute_kernels.linear import launch as calls

    tokens, groups, rank = call.out.shape
    key, blocks = calls.portable_choice(arch_of(0), tokens, groups, rank, multiprocessors(0), False)
    out = poison(*call.out.shape)
    compile_.launch(key, 0, call.a, call.a_scale, call.b, call.b_scale, out, blocks)
    return out


def words(scale: torch.Tensor) -> torch.Tensor:
    """Powers of two, four in a word."""
    return pack_words((torch.frexp(scale).exponent + 126).to(torch.uint8))


def poison(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda")


def close(got: torch.Tensor, expected: tuple[torch.Tensor, torch.Tensor]) -> bool:
    want, magnitude = expected
    return bool(((got.double() - want).abs() <= ROUNDING * want.abs() + PRODUCTS * magnitude).all())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))
