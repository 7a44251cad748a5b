# SPDX-License-Identifier: Apache-2.0
"""Against vLLM 0.33.0's kernels, and FlashMLA's and DeepGEMM's in its wheel, as they ran on an H100.

Bytes, codes, scales and indices are the same. A bf16 number that a norm made may be a step apart, as sums are rounded
in another order; attention, scores and products as far as tensor cores are: Hopper's keep some 14 bits of a sum of e4m3
products. tests/goldens/test_deep_gemm.py compares scores with exact ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels import formats
from cute_kernels.compat import deep_gemm, flash_mla, vllm
from tests.compat.agreement import tensors
from tests.goldens.compare import DEVICES, near, same_bits, steps_apart
from tests.goldens.records import FOLDER, Case, load

KERNELS = ("vllm", "flash_mla_kernels", "deep_gemm_kernels")
FILES = [path.stem for path in sorted(FOLDER.glob("*.npz")) if path.stem.startswith(KERNELS)]
CASES = {f"{file}: {name}": case for file in FILES for name, case in load(file).cases.items()}
TENSOR_CORES = {"attention": 2**-7, "scores": 2**-9, "products": 2**-7}


def test_every_file_is_here() -> None:
    from tests.goldens.make_vllm import FILES as made

    assert set(FILES) == set(made)


def kind_of(name: str) -> str:
    kinds = {"flash_mla": "attention", "mqa_logits": "scores", "einsum": "products"}
    return next((kind for part, kind in kinds.items() if part in name), "")


def function_of(name: str) -> Any:
    module = {"attention": flash_mla, "scores": deep_gemm}.get(kind_of(name), vllm)
    return getattr(module, name.split(": ")[1].split(" ")[0])


def written(case: Case, result: Any, after: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pairs = [*zip(tensors(result), tensors(case.result), strict=True)]
    return pairs + [(after[argument], want) for argument, want in case.changed.items()]


def same_entries(got: torch.Tensor, want: torch.Tensor) -> None:
    """Records alike but for sums that cancel, which may be a tiny number for one and zero for the other."""
    rows = want.shape[1]
    fmt = formats.FP8_DS_MLA if want.shape[2] == formats.FP8_DS_MLA.row_elements else formats.INDEXER_FP8
    values = [fmt.read(cache, rows, torch.arange(want.shape[0] * rows)) for cache in (got, want)]
    near(*values, 2**-20)
    assert int((got != want).sum()) <= 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_same(name: str, device: str) -> None:
    case = CASES[name]
    for got, want in written(case, *case.replay(function_of(name), device)):
        if kind_of(name) and want.is_floating_point():
            near(got, want, TENSOR_CORES[kind_of(name)])
        elif "top_k_per_row" in name:
            same_bits(got.sort(dim=1).values, want.sort(dim=1).values)
        elif "compress_norm" in name:
            same_entries(got, want)
        elif want.dtype == torch.bfloat16:
            steps_apart(got, want, 1, 0.001)
        else:
            same_bits(got, want)
