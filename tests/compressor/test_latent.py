# SPDX-License-Identifier: Apache-2.0
"""Latents of V4.1 and what is stored of them: against float64 formulas, and the same bits however a request is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cute_kernels import formats
from cute_kernels.compressor.ops import compress_latent, k_norm_rope_store, rope_quant_insert
from cute_kernels.runtime.ops import OPS
from tests import oracle
from tests.helpers import POISON_BYTE, bits, generator, poisoned_pool, raw_bytes, spread

MAX_POS = 300
TABLE = oracle.cos_sin_table(MAX_POS)
EPS = 1e-20
RING = 8


def weight_of(dim: int) -> torch.Tensor:
    return (torch.randn(dim, generator=generator(9)) + 1).bfloat16()


def run(
    kv_score: torch.Tensor, state: torch.Tensor, starts: list[int], positions: torch.Tensor, block: int = 1
) -> torch.Tensor:
    """compress_latent of a batch of requests whose rings are blocks `block`, `block` + 1, ..."""
    request = torch.tensor([r for r in range(len(starts) - 1) for _ in range(starts[r + 1] - starts[r])])
    return compress_latent(
        kv_score,
        positions,
        weight_of(512),
        EPS,
        2,
        state_cache=state,
        slot_mapping=(request + block) * RING + positions % RING,
        query_start_loc=torch.tensor(starts).int(),
        token_to_req_indices=request.int(),
        out=torch.full((kv_score.shape[0], 512), 7.0, dtype=torch.bfloat16),
    )


def meaning(kv_score: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 [T, 512] of one request from its first token on; rows at even positions are NaN."""
    out = np.full((len(positions), 512), np.nan)
    for t, p in enumerate(positions):
        if p % 2 == 1:
            kv, gate = kv_score[t - 1 : t + 1, :512], kv_score[t - 1 : t + 1, 512:]
            share = 1 / (1 + np.exp(gate[1] - gate[0]))
            mean = oracle.bf16_round((share * kv[0] + (1 - share) * kv[1]).astype(np.float32))
            normed = oracle.rms_norm(mean, oracle.to_numpy(weight_of(512)), EPS)
            out[t] = oracle.bf16_round(normed.astype(np.float32))
    return out


def test_ratio_1_norms_rounded_rows() -> None:
    x = spread((9, 512), 1, torch.float32)
    out = compress_latent(x, torch.arange(9), weight_of(512), EPS, 1)
    rounded = oracle.bf16_round(oracle.to_numpy(x))
    want = oracle.bf16_round(oracle.rms_norm(rounded, oracle.to_numpy(weight_of(512)), EPS).astype(np.float32))
    np.testing.assert_array_equal(oracle.to_numpy(out), want)
    zeros = compress_latent(torch.zeros(1, 512), torch.zeros(1, dtype=torch.int64), weight_of(512), EPS, 1)
    assert not zeros.any()


@pytest.mark.parametrize("cuts", [(41,), (1,) * 41, (9, 1, 2, 3, 8, 18), (8, 33)])
def test_ratio_2_whole_in_chunks_and_token_by_token(cuts: tuple[int, ...]) -> None:
    x = torch.randn(41, 1024, generator=generator(2))
    x[4:6] = 0
    state = poisoned_pool(formats.compressor_state(512, 2), 3, RING, 64)
    positions, at, outs = torch.arange(41), 0, []
    for count in cuts:
        outs.append(run(x[at : at + count], state, [0, count], positions[at : at + count]))
        at += count
    got, want = oracle.to_numpy(torch.cat(outs)), meaning(oracle.to_numpy(x), positions.numpy())
    np.testing.assert_array_equal(got[1::2], want[1::2])
    assert (got[0::2] == 7.0).all()
    # the ring has the last rows; other blocks and what lies between are as they were
    assert torch.equal(state[1, positions[-RING:] % RING], x[-RING:])
    state[1] = 0
    assert (raw_bytes(state[[0, 2]].clone()) == POISON_BYTE).all()


def test_ratio_2_rejected_drafts_are_written_again() -> None:
    x, other = (torch.randn(30, 1024, generator=generator(seed)) for seed in (3, 4))
    want = meaning(oracle.to_numpy(x), np.arange(30))
    for accepted in range(1, 6):
        state = poisoned_pool(formats.compressor_state(512, 2), 2, RING)
        positions, at, outs = torch.arange(30), 0, []
        while at < 30:
            stop = min(at + 6, 30)
            drafts = torch.cat([x[at : at + accepted], other[at + accepted : stop]])[: stop - at]
            outs.append(run(drafts, state, [0, stop - at], positions[at:stop])[: min(accepted, stop - at)])
            at += accepted
        np.testing.assert_array_equal(oracle.to_numpy(torch.cat(outs))[1::2], want[1::2])


def test_ratio_2_rows_without_a_slot_or_a_request_do_nothing() -> None:
    state = poisoned_pool(formats.compressor_state(512, 2), 2, RING)
    x = torch.randn(4, 1024, generator=generator(5))
    out = torch.full((4, 512), 7.0, dtype=torch.bfloat16)
    slots = torch.tensor([-1, 2 * RING, 2**40, 3])
    compress_latent(
        x,
        torch.tensor([1, 1, 3, 3]),
        weight_of(512),
        EPS,
        2,
        state_cache=state,
        slot_mapping=slots,
        query_start_loc=torch.tensor([0, 4]).int(),
        token_to_req_indices=torch.tensor([0, 0, 0, 1]).int(),
        out=out,
    )
    assert (out == 7.0).all()
    assert (raw_bytes(state) == POISON_BYTE).all()


@pytest.mark.parametrize("ratio", [1, 2])
def test_entries_are_rotated_and_rounded_before_they_are_quantized(ratio: int) -> None:
    latent = spread((40, 512), 6)
    positions = torch.arange(MAX_POS - 20, MAX_POS + 20)
    slots = torch.randperm(44, generator=generator(0))[:40]
    slots[::7] = torch.tensor([-1, 44, 2**40, -(2**50), 45, 46])
    pool = poisoned_pool(formats.FP8_DS_MLA, 4, 11, 64)
    rope_quant_insert(latent, positions, TABLE, pool, slots, ratio)
    want = poisoned_pool(formats.FP8_DS_MLA, 4, 11, 64)
    for t, slot in enumerate(slots.tolist()):
        p = int(positions[t])
        if not 0 <= slot < 44 or (p + 1) % ratio:
            continue
        angles = oracle.to_numpy(TABLE)[min(p // ratio * ratio, MAX_POS - 1)]
        x = oracle.to_numpy(latent[t])
        codes, scales = oracle.quantize_blocks(x[None, :448], 64, "e4m3")
        turned = oracle.bf16_bytes(oracle.rope_f32(x[448:], angles[:32], angles[32:]))
        page, row = divmod(slot, 11)
        record = np.concatenate([codes[0], turned])
        flat = want[page].view(-1)
        flat[row * 576 : row * 576 + 576] = torch.from_numpy(record)
        flat[11 * 576 + row * 8 : 11 * 576 + row * 8 + 8] = torch.from_numpy(np.append(scales[0], np.uint8(0)))
    assert torch.equal(raw_bytes(pool), raw_bytes(want))


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("fmt", [formats.INDEXER_FP8, formats.INDEXER_MXFP4], ids=lambda fmt: fmt.id)
def test_index_keys_are_rounded_behind_their_norm_and_their_rotation(
    fmt: formats.IndexerFp8Format | formats.IndexerMxfp4Format, ratio: int
) -> None:
    k = spread((40, 128), 7)
    weight = weight_of(128)
    weight[32:64] = 2.0**-60
    weight[96:] = 2.0**-126
    positions, slots = torch.arange(40), torch.arange(40).flip(0)
    pool = poisoned_pool(fmt, 4, 11, 64)
    k_norm_rope_store(k, weight, EPS, positions, TABLE, pool, slots, ratio, kv_format=fmt.id)
    closing = (positions + 1) % ratio == 0
    normed = oracle.rms_norm(oracle.to_numpy(k[closing]), oracle.to_numpy(weight), EPS)
    y = torch.from_numpy(normed.astype(np.float32)).bfloat16()
    angles = oracle.to_numpy(TABLE)[(positions[closing] // ratio * ratio).numpy()]
    turned = oracle.rope_f32(oracle.to_numpy(y)[:, 64:], angles[:, :32], angles[:, 32:])
    x = torch.cat([y[:, :64], torch.from_numpy(turned).bfloat16()], dim=1)
    kind, block, more = ("e2m1", 32, {"floor": 6 * 2.0**-126, "rounding": "ties_to_even"})
    if fmt is formats.INDEXER_FP8:
        kind, block, more = "e4m3", 128, {}
    codes, scales = oracle.quantize_blocks(oracle.to_numpy(x), block, kind, **more)  # type: ignore[arg-type]
    got = fmt.read_fields(pool, 11, slots[closing])
    if kind == "e2m1":
        codes = codes[:, 0::2] + 16 * codes[:, 1::2]
        np.testing.assert_array_equal(got[1].numpy(), scales)
        assert scales.min() == 1
    else:
        exponents = got[1].contiguous().view(torch.float32).log2() + 127
        np.testing.assert_array_equal(exponents.numpy(), scales)
    np.testing.assert_array_equal(got[0].numpy(), codes)


def test_results_do_not_depend_on_the_batch() -> None:
    x = torch.randn(20, 1024, generator=generator(8))
    fmt = formats.compressor_state(512, 2)
    together, alone = fmt.allocate(3, RING), fmt.allocate(3, RING)
    positions = torch.tensor([*range(4, 15), *range(7, 16)])
    both = run(x, together, [0, 11, 20], positions, block=0)
    first = run(x[:11], alone, [0, 11], positions[:11], block=0)
    second = run(x[11:], alone, [0, 9], positions[11:], block=1)
    assert torch.equal(bits(both), bits(torch.cat([first, second])))
    assert torch.equal(together, alone)


def test_checked_mode_refuses_a_row_of_another_request() -> None:
    validate = OPS["compress_latent"].validate
    assert validate is not None
    rows = torch.randn(4, 1024, generator=generator(3)), torch.tensor([0, 1, 0, 1])
    ring = torch.tensor([0, 2, 4]).int(), torch.zeros(3, RING, 1024), torch.tensor([8, 9, 16, 17])
    rest = weight_of(512), EPS, 2, torch.empty(4, 512, dtype=torch.bfloat16), False
    validate(*rows, torch.tensor([0, 0, 1, 1]).int(), *ring, *rest)
    message = r"token_to_req_indices\[1\]: expected a request whose rows include row 1, got 1, rows 2 to 3"
    with pytest.raises(ValueError, match=message):
        validate(*rows, torch.tensor([0, 1, 1, 1]).int(), *ring, *rest)
