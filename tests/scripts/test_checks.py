# SPDX-License-Identifier: Apache-2.0
"""The self-checks of scripts/run_layer.py can fail, and its parts do what they say."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from layers import (
    AttentionOptions,
    DeepseekV4Config,
    DeepseekV4MetadataBuilder,
    build_layer,
    random_layer_tensors,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import layer_runner.run
from layer_runner import checks, report, timing
from layer_runner.pools import POISON, Pools, raw_pages
from layer_runner.requests import Request, make_requests, plan_decode, schedule, split_text
from layer_runner.run import max_rows
from layer_runner.stepping import run_batch

from cute_kernels.runtime.record import Call, Cost
from perf.timeline import Launch, Timeline
from tests.scripts.runs import (
    TINY,
    status,
)


def small_run(checkpoint: Path, *flags: object) -> int:
    return status("--checkpoint", checkpoint, "--layer", 2, "--prefill", 50, "--decode", 3, *flags)


def test_a_wrong_output_fails(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_alone = layer_runner.run.run_alone

    def off_by_a_bit(*arguments: Any, **keywords: Any) -> list[torch.Tensor]:
        outputs = run_alone(*arguments, **keywords)
        outputs[1][3, 5] *= 1.5
        return outputs

    monkeypatch.setattr(layer_runner.run, "run_alone", off_by_a_bit)
    assert small_run(checkpoint, "--json", tmp_path / "r.json") == 1
    assert "FAIL batch with decode" in capsys.readouterr().out
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["passed"] is False
    assert [c["passed"] for c in written["layers"][0]["checks"]].count(False) == 1


def test_a_stray_write_fails(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One byte in a page of nobody, in page padding, or in an unused row of a request's page."""
    config = DeepseekV4Config.from_dict(TINY)
    pools = Pools(config, 4, [70, 9], kv_cache="fp8_ds_mla", index_cache="fp8", device="cpu", seed=1)
    assert pools.stray_writes() == []
    table = pools.tables.swa
    assert (table[0, :2] != table[1, 0]).all()
    spare = int(table[0, 2])
    row = pools.slots("window cache", 1, 9, 10)
    pages = raw_pages(pools.caches.swa)
    for place in ((spare, 0), (0, pages.shape[1] - 1), (int(row[0]) // 64, int(row[0]) % 64 * 576)):
        pages[place] ^= 1
        assert pools.stray_writes() == ["window cache"]
        pages[place] ^= 1
    pages[int(table[1, 0]), 8 * 576] = 0
    assert pools.stray_writes() == []

    run_batch = layer_runner.run.run_batch

    def clumsy(layer: Any, builder: Any, requests: Any, target: Pools, *rest: Any, **keywords: Any) -> Any:
        result = run_batch(layer, builder, requests, target, *rest, **keywords)
        raw_pages(target.by_name()["indexer state"][0])[int(target.tables.state[0, -1]), 0] = 0  # type: ignore[index]
        return result

    monkeypatch.setattr(layer_runner.run, "run_batch", clumsy)
    assert small_run(checkpoint) == 1
    assert "FAIL memory of no request is untouched (stray writes in indexer state)" in capsys.readouterr().out


def test_different_cache_bytes_fail(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_batch = layer_runner.run.run_batch

    def clumsy(layer: Any, builder: Any, requests: Any, target: Pools, *rest: Any, **keywords: Any) -> Any:
        result = run_batch(layer, builder, requests, target, *rest, **keywords)
        target.caches.compressed.data[target.tables.compressed[1, 0], 0, 0] += 1  # type: ignore[union-attr, index]
        return result

    monkeypatch.setattr(layer_runner.run, "run_batch", clumsy)
    assert small_run(checkpoint) == 1
    assert "(compressed cache of request 1 differ)" in capsys.readouterr().out


def test_pages_are_strewn_and_owned() -> None:
    """Requests share no page, pages do not lie in order, and a table names a spare page after a request's last."""
    config = DeepseekV4Config.from_dict(TINY)
    pools = Pools(config, 4, [1000, 130, 700], kv_cache="bf16", index_cache="fp8", device="cpu", seed=2)
    for table, size in ((pools.tables.swa, 64), (pools.tables.compressed, 256), (pools.tables.state, 4)):
        assert table is not None
        counts = [-(-n // size) for n in (1000, 130, 700)]
        owned = torch.cat([row[:n] for row, n in zip(table, counts, strict=True)])
        assert owned.unique().numel() == owned.numel() == sum(counts)
        assert not torch.equal(owned, owned.sort().values)
        spare = torch.cat([row[n:] for row, n in zip(table, counts, strict=True)])
        assert not torch.isin(spare, owned).any()
        assert spare.numel() >= 3


def test_live_rows() -> None:
    """What a request of 203 tokens needs to go on: all entries, and the state of the group that is open."""
    config = DeepseekV4Config.from_dict(TINY)

    def live(ratio: int, length: int) -> dict[str, tuple[int, int]]:
        pools = Pools(config, ratio, [length], kv_cache="bf16", index_cache="fp8", device="cpu", seed=0)
        return {name: pools.live_rows(name, 0, length) for name in pools.by_name()}

    assert live(1, 203) == {"window cache": (0, 203)}
    assert live(4, 203) == {
        "window cache": (0, 203),
        "compressed cache": (0, 50),
        "compressor state": (196, 203),
        "indexer cache": (0, 50),
        "indexer state": (196, 203),
    }
    assert live(128, 203) == {"window cache": (0, 203), "compressed cache": (0, 1), "compressor state": (128, 203)}
    assert live(4, 3)["compressor state"] == (0, 3)


def test_poison_is_not_a_number() -> None:
    """A row that nobody wrote reads as NaN in every cache format, so that using it shows in the outputs."""
    config = DeepseekV4Config.from_dict(TINY)
    for kv_cache in ("fp8_ds_mla", "bf16", "fp8"):
        pools = Pools(config, 4, [9], kv_cache=kv_cache, index_cache="fp8", device="cpu", seed=0)
        for name, (cache, _, _) in pools.by_name().items():
            read = cache.kv_format.read(cache.data, cache.block_size, pools.slots(name, 0, 0, 2))
            assert torch.isnan(read.float()).all(), (kv_cache, name)
    assert POISON == 0xFF


def test_topk_check() -> None:
    good = torch.full((12, 2), -1, dtype=torch.int32)
    for row, picks in {3: [0, -1], 7: [1, 0], 11: [2, 0]}.items():
        good[row : row + 4] = torch.tensor(picks)
    assert checks.check_topk([good], 4).passed
    assert checks.truncated_rows([good, good[:9]], 4) == (1, 21)
    for row, picks in ((0, [0, -1]), (3, [-1, -1]), (7, [1, 1]), (7, [2, 0]), (11, [0, -1]), (5, [0, -2])):
        bad = good.clone()
        bad[row] = torch.tensor(picks)
        assert not checks.check_topk([good, bad], 4).passed, (row, picks)


def test_number_checks() -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    nan = x.clone()
    nan[2, 2] = torch.nan
    near = x.clone()
    near[0] *= 1.01
    zero = torch.zeros_like(x)
    assert checks.check_finite([x]).passed
    assert not checks.check_finite([x, nan]).passed
    assert checks.check_consistent([x, zero], [x, zero], "cpu").passed
    assert checks.check_consistent([near], [x], "cuda").passed
    for a, b in ((near, x), (nan, x), (x, nan), (x, zero), (zero, x)):
        assert not checks.check_consistent([x, a], [x, b], "cpu").passed
    assert checks.check_repeatable([x, near], [x, near.clone()]).passed
    assert not checks.check_repeatable([x, near], [x, x]).passed


# --- parts --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    limit=st.none() | st.integers(1, 30),
    decode=st.integers(0, 9),
    draft=st.integers(1, 4),
    chunk=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_every_token_goes_through_once(
    lengths: list[int], limit: int | None, decode: int, draft: int, chunk: int, seed: int
) -> None:
    sequences = [torch.arange(1, n + 1).bfloat16()[:, None] for n in lengths]
    requests = make_requests(sequences, prefill_limit=limit, decode=decode, draft=draft, max_positions=1000, seed=seed)
    for request, length in zip(requests, lengths, strict=True):
        assert request.prefill >= 1
        assert limit is None or request.prefill <= limit
        assert request.length == request.prefill + sum(request.decode) <= length
        assert limit is not None or request.length == length
        assert len(request.decode) <= decode
        assert all(1 <= accepted <= draft for accepted in request.decode)
    seen: list[list[float]] = [[] for _ in requests]
    reach = [0] * len(requests)
    most = 0
    for parts, steps in schedule(requests, chunk):
        decodes = sum(step is not None for step in steps)
        assert all(step is None for step in steps[decodes:])
        assert sum(part.rows for part in parts[decodes:]) <= chunk
        assert len({part.request for part in parts}) == len(parts)
        most = max(most, sum(part.rows for part in parts))
        for part, step in zip(parts, steps, strict=True):
            request = requests[part.request]
            assert part.start == len(seen[part.request])
            rows = request.rows(part, step)
            assert rows.shape[0] == part.rows == (draft if step is not None else part.accepted)
            seen[part.request] += rows[: part.accepted, 0].tolist()
            reach[part.request] = max(reach[part.request], part.start + part.rows)
            rest = request.hidden_states[part.start + part.accepted : part.start + part.rows]
            assert not torch.equal(rest, rows[part.accepted :]) or part.accepted == part.rows
    for request, positions in zip(requests, seen, strict=True):
        assert positions == request.hidden_states[:, 0].tolist()
    assert reach == [request.reach for request in requests]
    assert max_rows(requests, chunk) >= max(most, *(request.length for request in requests))


def test_decode_plan() -> None:
    generator = torch.Generator().manual_seed(1)
    assert plan_decode(100, None, 5, 1, generator) == [1] * 5
    assert plan_decode(3, None, 5, 1, generator) == [1, 1]
    assert plan_decode(1, None, 5, 3, generator) == []
    assert len(set(plan_decode(100, None, 30, 3, generator))) == 3


def test_one_shot_has_no_decode() -> None:
    states = torch.ones(9, 4).bfloat16()
    request = Request(states, 5, (1, 3), 3, torch.zeros(2, 3, 4).bfloat16())
    assert request.reach == 9
    assert replace(request, decode=(3, 1)).reach == 11
    assert request.one_shot().reach == 9
    [(parts, steps)] = schedule([request.one_shot()], 9)
    assert [(p.start, p.rows, p.accepted) for p in parts] == [(0, 9, 9)]
    assert steps == [None]


def test_split_text() -> None:
    assert split_text(b"one\n\ntwo\n \nthree\n\nfour", 3) == [b"one", b"two", b"three\n\nfour"]
    assert split_text(b"one\n\ntwo", 1) == [b"one\n\ntwo"]
    pieces = split_text(b"abcdefghi", 3)
    assert b"".join(pieces) == b"abcdefghi"
    assert len(pieces) == 3
    assert all(pieces)


def test_table_of_calls() -> None:
    calls = [
        Call("b", "kernel", Cost(2_000_000, 10), 1e-3),
        Call("a", "reference", Cost(5, 0), 0.5),
        Call("b", "kernel", Cost(1_000_000, 10), 2e-3),
        Call("b", "reference"),
    ]
    rows = report.summarize(calls)
    assert [(r.op, r.implementation, r.calls) for r in rows] == [
        ("b", "kernel", 2),
        ("a", "reference", 1),
        ("b", "reference", 1),
    ]
    assert (rows[0].seconds, rows[0].bytes, rows[0].flops) == (3e-3, 3_000_000, 20)
    assert rows[0].as_json(False)["seconds"] == 3e-3
    assert "seconds" not in rows[0].as_json(True), "ops that are waited for one by one do not add up to a layer"

    def headers(on_gpu: bool) -> list[str]:
        return [str(column.header) for column in report.render(rows, "t", on_gpu).columns]

    assert headers(False) == ["op", "by", "calls", "ms", "bytes", "of time"]
    assert headers(True) == ["op", "by", "calls", "bytes", "of bytes"]
    for on_gpu, shares, total in ((False, ("1%", "99%", "0%"), "503.00"), (True, ("100%", "0%", "0%"), "3.0 MB")):
        *ops, whole = zip(*(column.cells for column in report.render(rows, "t", on_gpu).columns), strict=True)
        assert [cells[-1].split()[0] for cells in ops] == list(shares)
        assert whole[:3] == ("all", "", "4")
        assert total in whole


# ---- what a step takes on a GPU --------------------------------------------------------------------------------------


def test_the_steps_that_are_timed() -> None:
    hidden = torch.zeros(60, 8)
    requests = [Request(hidden[:40], 36, (1, 1, 1, 1), 2, hidden[:4, None].repeat(1, 2, 1)),
                Request(hidden[:10], 8, (1, 1), 2, hidden[:2, None].repeat(1, 2, 1))]  # fmt: skip
    (prefill, decode) = timing.chosen_steps(requests, 36)
    assert prefill[0] == "prefill, 36 + 0 decode rows"
    assert [(part.request, part.rows) for part in prefill[1]] == [(0, 36)]
    assert decode[0] == "decode, 4 rows of 2 requests"
    assert [(part.request, part.rows) for part in decode[1]] == [(0, 2), (1, 2)]
    assert all(number is not None for number in decode[2])
    one_shot = [request.one_shot() for request in requests]
    assert [name for name, _, _ in timing.chosen_steps(one_shot, 64)] == ["prefill, 50 + 0 decode rows"]


@pytest.mark.parametrize("layer_index", [0, 2, 3])
def test_timed_steps_run_on_the_caches_of_the_batch(layer_index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step alone, again, gives what it gave in the batch."""
    config = DeepseekV4Config.from_dict(TINY)
    options = AttentionOptions(max_model_len=200, max_num_tokens=64)
    layer = build_layer(config, layer_index, random_layer_tensors(config, layer_index), options=options)
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randn(n, 128, generator=generator).bfloat16() for n in (45, 31)]
    requests = make_requests(sequences, prefill_limit=28, decode=3, draft=1, max_positions=200, seed=0)
    pools = Pools(config, layer.compress_ratio, [r.reach for r in requests], kv_cache="fp8_ds_mla", index_cache="fp8",
                  device="cpu", seed=0)  # fmt: skip
    builder = DeepseekV4MetadataBuilder(config, 64, 200)
    batch = run_batch(layer, builder, requests, pools, 64)
    ran: list[tuple[str, torch.Tensor, Cost]] = []

    def note(name: str, call: Any, least: Cost) -> Any:
        ran.append((name, call(), least))

    monkeypatch.setattr(timing, "time_call", note)
    timing.time_steps(layer, builder, requests, pools, 64)
    assert [name for name, _, _ in ran] == ["prefill, 56 + 0 decode rows", "decode, 2 rows of 2 requests"]
    assert torch.equal(ran[0][1], torch.cat([out[:28] for out in batch.outputs]))
    assert ran[1][1].shape == (2, 128)
    assert ran[0][2].flops > ran[1][2].flops > 0


TIMES = timing.StepTimes(
    "decode, 2 rows of 2 requests",
    25.0,
    60.0,
    40.0,
    Timeline.of([Launch("gemm_a", 100.0, 8.0), Launch("gemm_b[x]", 102.0, 10.0), Launch("memo" * 50, 115.0, 5.0)]),
    Cost(bytes=42_800_000, flops=10),
)


def test_tables_of_steps() -> None:
    roofs = report.CEILINGS["NVIDIA H200"]
    assert report.share_of_floor(TIMES, roofs) == pytest.approx(0.4)
    assert report.share_of_floor(replace(TIMES, graph_us=None), roofs) == pytest.approx(10 / 60)
    assert report.share_of_floor(TIMES, None) is None

    def lines(table: Any) -> list[str]:
        console = Console(width=140)
        with console.capture() as captured:
            console.print(table)
        return captured.get().splitlines()

    (line,) = [line for line in lines(report.render_steps([TIMES], roofs)) if "2 requests" in line]
    assert line.split()[-6:] == ["25.0", "60.0", "40.0", "3", "3.0", "40.0"]
    assert "% of floor" not in "".join(lines(report.render_steps([TIMES], None)))
    launches = lines(report.render_launches(TIMES))
    (line,) = [line for line in launches if "gemm_b[x]" in line]
    assert line.split() == ["gemm_b[x]", "products", "2.00", "10.00", "4.00", "24%", "████"]
    assert any("memomemo" in line and "..." in line for line in launches)
    written = report.step_as_json(TIMES, roofs)
    assert written["of_floor"] == pytest.approx(0.4)
    assert [launch["adds_us"] for launch in written["launches"]] == [8.0, 4.0, 5.0]
    json.dumps(written)
