# SPDX-License-Identifier: Apache-2.0
"""What the attention ops share in checking their arguments, at the limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_kernels import formats
from cute_kernels.runtime.checks import Checker
from cute_kernels.sparse_mla import arguments

BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def fine(check: Callable[..., Any], *args: Any) -> Any:
    return check(Checker("op"), *args)


def refused(argument: str, check: Callable[..., Any], *args: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^op: {argument}: expected "):
        check(Checker("op"), *args)


def test_one_head_to_128() -> None:
    for heads in (1, 128):
        fine(arguments.check_query, "q", torch.zeros(2, heads, 512, dtype=BF16), (BF16,), ("T",))
    for heads in (0, 129):
        refused("q", arguments.check_query, "q", torch.zeros(2, heads, 512, dtype=BF16), (BF16,), ("T",))


def test_a_page_has_a_row() -> None:
    fmt = formats.PLAIN_BF16
    fine(arguments.check_cache, "cache", fmt.allocate(2, 1), fmt)
    refused("cache", arguments.check_cache, "cache", fmt.allocate(2, 1)[:, :0], fmt)


def test_lengths_are_of_requests_or_of_rows() -> None:
    for lengths in (None, torch.zeros(3, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32)):
        fine(arguments.check_lengths, "lengths", lengths)
    refused("lengths", arguments.check_lengths, "lengths", torch.zeros(3, 2, 1, dtype=torch.int32))
    c = Checker("op")
    c.tensor("q", torch.zeros(3, 2), F32, ("b", "s_q"))
    with pytest.raises(ValueError, match="lengths"):
        arguments.check_lengths(c, "lengths", torch.zeros(2, dtype=torch.int32))


def test_tiles_of_the_lists() -> None:
    cache, wide = torch.zeros(9, 64, 584, dtype=torch.uint8), torch.zeros(2, 1, 129)
    assert arguments.list_tiles(wide, None, None, None) == 3
    assert arguments.list_tiles(wide, cache, wide, None) == 6
    assert arguments.list_tiles(wide, cache, None, torch.zeros(2, 5)) == 3 + 5
    assert arguments.list_tiles(wide, None, None, torch.zeros(2, 5)) == 3
    assert arguments.list_tiles(wide, torch.zeros(9), None, torch.zeros(2, 5)) == 3
    assert arguments.list_tiles("no tensor", None, torch.zeros(()), None) == 0


def test_logs_may_have_any_strides_that_keep_them_apart() -> None:
    memory = torch.zeros(64)
    for shape, strides in (((3, 2), (2, 1)), ((3, 2), (1, 3)), ((3, 1), (1, 0)), ((1, 2), (0, 1)), ((2, 0), (0, 0))):
        fine(arguments.check_logs, "lse", memory.as_strided(shape, strides), ("b", "h"))
    for shape, strides in (((3, 2), (1, 1)), ((3, 2), (0, 1)), ((3, 2), (1, 2)), ((2, 1), (0, 1))):
        refused("lse", arguments.check_logs, "lse", memory.as_strided(shape, strides), ("b", "h"))
    fine(arguments.check_logs, "lse", None, ("b", "h"))


def test_a_partial_result_has_no_sink() -> None:
    sink = torch.zeros(4)
    for out, given in ((torch.zeros(1, dtype=BF16), sink), (torch.zeros(1), None)):
        fine(arguments.check_partial, out, given)
    refused("attn_sink", arguments.check_partial, torch.zeros(1), sink)


def quantized(**changes: Any) -> tuple[Any, ...]:
    """A call of 3 rows of 4 heads in 2 groups."""
    given = {
        "q": torch.zeros(3, 4, 512, dtype=BF16),
        "out": torch.zeros(3, 2, 1024, dtype=E4M3),
        "positions": torch.zeros(3, 2, dtype=torch.int64)[:, 0],
        "cos_sin_cache": torch.zeros(1, 64),
        "out_scale": torch.zeros(2, 8, 4),
    }
    return tuple((given | changes).values())


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"positions": None}, "positions"),
        ({"cos_sin_cache": None}, "cos_sin_cache"),
        ({"out_scale": None}, "out_scale"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, "positions"),
        ({"cos_sin_cache": torch.zeros(0, 64)}, "cos_sin_cache"),
        ({"out": torch.zeros(3, 2, 512, dtype=E4M3)}, "out"),
        ({"out": torch.zeros(3, 8, 256, dtype=E4M3)}, "out"),
        ({"out": torch.zeros(2, 2, 1024, dtype=E4M3)}, "out"),
        ({"out_scale": torch.zeros(2, 8, 3)}, "out_scale"),
    ],
)
def test_a_quantized_result_comes_whole(change: dict[str, Any], argument: str) -> None:
    refused(argument, arguments.check_quantized, *quantized(**change))


def test_quantized_results() -> None:
    assert fine(arguments.check_quantized, *quantized())
    plain = {"positions": None, "cos_sin_cache": None, "out_scale": None}
    assert not fine(arguments.check_quantized, *quantized(**plain))


def test_sums_of_squares_come_with_angles() -> None:
    q, positions = torch.zeros(3, 4, 512, dtype=BF16), torch.zeros(3, dtype=torch.int64)
    squares = torch.zeros(3, 4 * 4)
    for eps in (0.0, 1e-6):
        fine(arguments.check_q_norm, q, squares, eps, positions)
    fine(arguments.check_q_norm, q, None, -1.0, None)
    refused("q_norm", arguments.check_q_norm, q, squares, -1e-30, positions)
    refused("q_norm", arguments.check_q_norm, q, squares, 0.0, None)
    refused("q_norm", arguments.check_q_norm, q, squares[:, :15], 0.0, positions)


@pytest.mark.parametrize("taken", [arguments.norm_arguments, arguments.quant_tensors])
def test_tuples_have_their_length(taken: Any) -> None:
    names = {arguments.norm_arguments: "q_norm", arguments.quant_tensors: "output_quant"}
    size = {arguments.norm_arguments: 2, arguments.quant_tensors: 3}[taken]
    assert taken(tuple(range(size)), "op") == tuple(range(size))
    assert taken(None, "op") in ((None, 0.0), (None, None, None))
    for wrong in (tuple(range(size + 1)), tuple(range(size - 1)), list(range(size)), 5):
        with pytest.raises(TypeError, match=f"op: {names[taken]}: "):
            taken(wrong, "op")


def at(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> torch.Tensor:
    return torch.zeros(4096, dtype=BF16).as_strided(shape, strides, offset)


def test_addresses_and_strides_of_16_bytes() -> None:
    """The stride of an axis that has one place leads nowhere, nor does any of a tensor without elements."""
    for tensor in (at((3, 8), (8, 1)), at((1, 8), (7, 1)), at((2, 3, 8), (24, 8, 1), 8), at((0, 8), (7, 1), 3)):
        assert arguments.misaligned("x", tensor, tuple(range(tensor.dim() - 1))) == ""
    for tensor in (at((2, 8), (7, 1)), at((3, 8), (8, 1), 1), at((2, 3, 8), (31, 8, 1)), at((2, 3, 8), (32, 9, 1))):
        why = arguments.misaligned("x", tensor, tuple(range(tensor.dim() - 1)))
        assert why.startswith("x must be 16-byte aligned, got address 0x")
    assert arguments.misaligned("x", at((2, 3, 8), (31, 8, 1)), (1,)) == ""


def test_addresses_of_quantized_results() -> None:
    angles = torch.zeros(64 * 9).as_strided((2, 64), (66, 1))
    assert arguments.misaligned_quant(at((2, 3, 8), (24, 8, 1)), torch.zeros(2, 64)) == ""
    assert arguments.misaligned_quant(at((1, 3, 8), (25, 8, 1)), angles[:1]) == ""
    assert arguments.misaligned_quant(at((2, 3, 8), (25, 8, 1)), angles[:1]).startswith("rows of out must")
    assert arguments.misaligned_quant(at((2, 3, 8), (24, 8, 1)), angles).startswith("rows of cos_sin_cache must")
    for rows, is_too_many in ((2**31 - 1, False), (2**31, True)):
        why = arguments.misaligned_quant(at((2, 3, 8), (24, 8, 1)), torch.zeros(1, 64).expand(rows, 64))
        assert (why == "cos_sin_cache must have fewer than 2^31 rows") == is_too_many


def test_splits() -> None:
    for splits in ((0, 0), (1, 0), (9, 0), (0, 64), (0, 128)):
        fine(arguments.check_splits, *splits)
    for splits, argument in (
        ((-1, 0), "num_splits"),
        ((0, -64), "split_tokens"),
        ((0, 63), "split_tokens"),
        ((1, 64), "split_tokens"),
    ):
        refused(argument, arguments.check_splits, *splits)


def test_a_start_more_than_requests() -> None:
    starts, lens = torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    fine(arguments.check_batch, "starts", starts, lens)
    for count in (3, 5):
        refused("starts", arguments.check_batch, "starts", torch.zeros(count, dtype=torch.int32), lens)


def test_a_workspace_of_bytes_is_taken_as_floats() -> None:
    floats, memory = torch.arange(4.0), torch.zeros(32, dtype=torch.uint8)
    assert arguments.as_floats(floats, 8) is floats
    taken = arguments.as_floats(memory, 12)
    assert (taken.dtype, taken.shape, taken.data_ptr()) == (F32, (3,), memory.data_ptr())
