"""What `perf layer` measures and what it calls a floor; no GPU."""

from __future__ import annotations

import re

import pytest
import torch

from layers import PRESETS, AttentionOptions
from layers.attention import DeepseekV4MultiHeadLatentAttentionWrapper
from perf import layer
from perf.cli import main
from perf.layer import Case


def test_cases_are_named_apart_and_as_the_records_say() -> None:
    names = [case.name for case in layer.cases()]
    assert len(set(names)) == len(names)
    assert {
        "v4-flash c4a decode b64 ctx8192",
        "v4-pro c4a decode b64 ctx65536",
        "v4-flash c128a prefill 4096 ctx65536",
        "v4-pro swa decode b1 ctx8192 tp8",
        "v4-flash c4a decode b64 ctx8192 n4",
    } <= set(names)
    pattern = r"v4-(flash|pro) (swa|c4a|c128a) (decode b\d+|prefill \d+) ctx\d+( n4)?( tp8)?"
    assert all(re.fullmatch(pattern, name) for name in names)
    full = [case.name for case in layer.cases(full=True)]
    assert len(set(full)) == len(full) > 1000
    assert "v4-pro c4a decode b8 ctx1048576" in full


def test_lengths() -> None:
    case = Case("v4-flash", "c4a", "decode", 256, 1, 8192)
    assert len(case.lengths()) == 256
    assert max(case.lengths()) == 8192
    assert min(case.lengths()) > 8192 - 256
    # in one of four requests a step closes a group of four
    assert 48 <= sum(length % 4 == 0 for length in case.lengths()) <= 80
    assert Case("v4-flash", "swa", "prefill", 1, 512, 65536).lengths() == [66048]


def by_hand(kind: str) -> tuple[int, int]:
    """Bytes and FLOPs of a v4-flash decode step of two requests of 8192 and 8131 tokens."""
    fp8 = 1536 * 4096 + 32768 * 1024 + 8 * 1024 * 4096 + 4096 * 8192
    bf16 = {"swa": 0, "c128a": 1024 * 4096, "c4a": (2048 + 512 + 64) * 4096}[kind]
    fp8 += 8192 * 1024 if kind == "c4a" else 0
    rows = {"swa": 2 * 128, "c128a": 2 * 128 + 64 + 63, "c4a": 2 * (128 + 512)}[kind]
    keys = 2048 + 2032 if kind == "c4a" else 0
    moved = fp8 + 2 * bf16 + rows * 584 + keys * 132 + 2 * 2 * 2 * 4096
    return moved, 2 * 2 * (fp8 + bf16) + 4 * rows * 64 * 512 + 2 * keys * 64 * 128


@pytest.mark.parametrize("kind", layer.KINDS)
def test_the_floor_counts_what_must_move(kind: str) -> None:
    config = PRESETS["v4-flash"]
    case = Case("v4-flash", kind, "decode", 2, 1, 8192)
    with torch.device("meta"):
        built = DeepseekV4MultiHeadLatentAttentionWrapper(
            config,
            config.layer_of_kind(case.ratio),
            options=AttentionOptions(max_model_len=64, max_num_tokens=64),
            device="meta",
        )
    work = layer.least_work(case, built)
    assert (work.bytes, work.flops) == by_hand(kind)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--replays", "3"], "--replays: expected at least 15, got 3"),
        (["--only", "("], "--only: '(' is no regular expression"),
        (["--only", "nothing"], "--only: no cell's name has 'nothing'"),
        ([], "there is no CUDA device here"),
    ],
)
def test_requests_that_cannot_be_met(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available() and not words:
        pytest.skip("here is one")
    assert main(["layer", *words]) == 2
    assert why in capsys.readouterr().err
