# SPDX-License-Identifier: Apache-2.0
"""The model of several GPUs: bytes that can be counted by hand, and that it prefers what must be faster."""

from __future__ import annotations

import pytest

from cute_kernels.layers import PRESETS
from perf import scaling
from perf.cli import main

FLASH = PRESETS["v4-flash"]


def test_bytes_of_a_step() -> None:
    divided, whole, plain = scaling.weight_numbers(FLASH, 4)
    assert divided == 1024 * 64 * 512 + 64 * 512 * 1024 + 8 * 1024 * 4096
    assert (whole, plain) == (4096 * 1536 + 1024 * 64 * 128, 4096 * (2 * 1024 + 512 + 64))
    one = scaling.decode(FLASH, 128, "dp", 1 << 20, 1, 2)
    assert one.attention == pytest.approx((8192 + 128) * 584 / scaling.COPY)
    assert (one.wire, one.received) == (0, 0)
    shared = scaling.decode(FLASH, 128, "dcp", 1 << 20, 8, 2)
    # queries in bf16 and partial results in fp32 of the other rank's 32 heads, and half of the outputs' sum
    assert shared.received == 8 * (32 * 512 * 2 + 32 * 513 * 4 + 2 * 2 * 4096 // 2)


def test_collectives_grow_with_bytes_and_hosts() -> None:
    assert scaling.collective("all_gather", 0, 8) == scaling.collective("all_gather", 1000, 1) == 0
    times = [scaling.collective("all_to_all", 1 << n, 8) for n in range(10, 28)]
    assert times == sorted(times)
    assert scaling.collective("all_gather", 1 << 10, 16) >= scaling.BETWEEN_HOSTS[0]
    assert scaling.collective("all_gather", 1 << 28, 64) > scaling.collective("all_gather", 1 << 28, 8)


@pytest.mark.parametrize("model", ["v4-flash", "v4-pro"])
def test_what_is_faster(model: str) -> None:
    config = PRESETS[model]

    def decode(form: str, context: int, requests: int, gpus: int = 8) -> float:
        return scaling.decode_model(config, form, context, requests, gpus)

    assert decode("tp rows", 1 << 20, 64) < decode("tp", 1 << 20, 64) / 2
    assert decode("tp", 1 << 16, 1) < decode("tp rows", 1 << 16, 1)
    assert decode("tp", 1 << 16, 1) < decode("dcp", 1 << 16, 1)
    assert decode("dp", 1 << 20, 64) < decode("dcp", 1 << 20, 64)
    assert scaling.cache_bytes(config, "dcp", 1 << 20, 8, 8) == scaling.cache_bytes(config, "tp", 1 << 20, 8, 8) / 8
    one, eight = (scaling.prefill_model(config, "pcp", 1 << 18, gpus) for gpus in (1, 8))
    assert one / 8 < eight < one / 6


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scaling", "--gpus", "2,16"]) == 0
    printed = capsys.readouterr().out
    assert "Assumed:" in printed
    assert "1024k" in printed
    assert main(["scaling", "--gpus", "12"]) == 2
    assert "expected 2 to 8, or whole hosts of 8, got 12" in capsys.readouterr().err
