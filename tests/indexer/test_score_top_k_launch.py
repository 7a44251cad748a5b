# SPDX-License-Identifier: Apache-2.0
"""What scores and picks in one op launch, and on which memory. Needs CuTe DSL and no GPU: nothing is launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels import formats
from cute_kernels.models import MODELS, ModelShape
from cute_kernels.runtime.ops import OPS

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.indexer import chunks, topk_select
from cute_kernels.indexer import launch as calls
from cute_kernels.indexer import ops as _registered  # noqa: F401
from cute_kernels.indexer.blackwell.logits import BlackwellLogitsKey
from cute_kernels.indexer.mma_sync.logits import PortableLogitsKey
from cute_kernels.runtime import trust
from tests.indexer.test_logits_launch import NAMES as SCORE_NAMES
from tests.indexer.test_logits_launch import codes
from tests.indexer.test_topk_launch import names_of

SMS = 132
INT = torch.int32


class Launches:
    """Stands for a GPU, Hopper's if not said otherwise: keeps what would be launched, scores and picks in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, arch: str = "sm_90a") -> None:
        self.kept: list[tuple[str, Any, dict[str, Any]]] = []
        for module in (calls, topk_select):
            monkeypatch.setattr(module, "arch_of", lambda index: arch)
        monkeypatch.setattr(calls, "multiprocessors", lambda index: SMS)
        monkeypatch.setattr(calls, "launch_key", lambda key, index, *args: self.keep("scores", key, args))
        monkeypatch.setattr(topk_select, "launch_key", lambda key, index, *args: self.keep("picks", key, args))
        topk_select.choose.cache_clear()

    def keep(self, kind: str, key: Any, args: Any) -> None:
        names = SCORE_NAMES[type(key)] if kind == "scores" else names_of(key)
        self.kept.append((kind, key, dict(zip(names, args, strict=True))))

    def run(self, op: str, args: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Arguments of the launches of scores and picks, chunk after chunk."""
        OPS[op].check(*args.values())
        module = OPS[op].load_kernel()
        call = OPS[op].call_type(*args.values())
        assert module.why_not(call) == ""
        self.kept.clear()
        module.launch(call)
        assert [kind for kind, _, _ in self.kept] == ["scores", "picks"] * (len(self.kept) // 2)
        found = [given for _, _, given in self.kept]
        return list(zip(found[::2], found[1::2], strict=True))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


def prefill(rows: int = 10, keys: int = 900, k: int = 512, width: int = 0, fit: int = 4, **changes: Any) -> Any:
    args = {
        "q": codes(rows, 64, 128),
        "q_scale": None,
        "k": codes(keys, 128),
        "k_scale": torch.ones(keys),
        "weights": torch.ones(rows, 64),
        "cu_seq_len_k_start": torch.zeros(rows, dtype=INT),
        "cu_seq_len_k_end": torch.zeros(rows, dtype=INT),
        "max_seqlen_k": width,
        "out": torch.zeros(rows, k + 3, dtype=INT)[:, :k],
        "workspace": torch.zeros(fit * chunks.row_bytes(width or keys) // 4),
    }
    return {**args, **changes}


def decode(requests: int = 9, next_n: int = 2, columns: int = 900, k: int = 512, fit: int = 3, **changes: Any) -> Any:
    args = {
        "q": codes(requests, next_n, 64, 128),
        "q_scale": None,
        "kv_cache": formats.INDEXER_FP8.allocate(20, 64),
        "weights": torch.ones(requests * next_n, 64),
        "context_lens": torch.zeros(requests, next_n + 1, dtype=INT)[:, :next_n],
        "block_tables": torch.zeros(requests, 16, dtype=INT),
        "max_model_len": columns,
        "kv_format": "indexer_fp8/1",
        "out": torch.zeros(requests * next_n, k, dtype=INT),
        "workspace": torch.zeros(fit * next_n * chunks.row_bytes(columns) // 4),
        "slot_block_table": None,
        "slot_rows_per_page": 0,
    }
    return {**args, **changes}


def test_chunks_of_a_prefill_share_the_workspace(gpu: Launches) -> None:
    args = prefill()
    found = gpu.run("score_top_k_prefill", args)
    first = 0
    for (scores, picks), rows in zip(found, (4, 4, 2), strict=True):
        assert scores["q"] == args["q"].data_ptr() + first * 64 * 128
        assert scores["weights"].data_ptr() == args["weights"].data_ptr() + first * 256
        for name in ("starts", "ends"):
            given = args[f"cu_seq_len_k_{name[:-1]}"].data_ptr() + first * 4
            assert scores[name] == picks[name] == given
        assert (scores["row_count"], scores["limit"], scores["skip"], scores["clean"]) == (rows, 900, 512, 0)
        assert scores["out"].data_ptr() == picks["scores"] == args["workspace"].data_ptr()
        assert (scores["out"].shape, scores["out"].stride()) == ((rows, 900), (1024, 1))
        assert (picks["scores_stride"], picks["columns"], picks["limit"], picks["rows"]) == (4096, 900, 900, rows)
        assert (picks["k"], scores["shifts"], picks["shifts"]) == (512, 0, 0)
        assert picks["out"].data_ptr() == args["out"].data_ptr() + first * 515 * 4
        first += rows
    assert first == 10


def test_columns_may_begin_at_the_rows_starts(gpu: Launches) -> None:
    ((scores, picks),) = gpu.run("score_top_k_prefill", prefill(width=600, fit=10))
    assert (scores["out"].shape[1], picks["columns"], scores["limit"], picks["limit"]) == (600, 600, 900, 900)
    assert (scores["shifts"], picks["shifts"]) == (-1, -1)


def test_chunks_of_decode_are_whole_requests(gpu: Launches) -> None:
    args = decode()
    found = gpu.run("score_top_k_decode", args)
    first = 0
    for scores, picks in found:
        assert scores["q"] == args["q"].data_ptr() + first * 2 * 64 * 128
        assert scores["weights"].data_ptr() == args["weights"].data_ptr() + first * 2 * 256
        assert scores["ends"] == picks["ends"] == args["context_lens"].data_ptr() + first * 12
        assert scores["table"] == args["block_tables"].data_ptr() + first * 64
        assert (scores["requests"], scores["row_count"], scores["skip"], scores["clean"]) == (3, 2, 512, 0)
        assert scores["out"].data_ptr() == picks["scores"] == args["workspace"].data_ptr()
        assert (picks["rows"], picks["tokens"], picks["ends_request"], picks["ends_token"]) == (6, 2, 12, 4)
        assert picks["out"].data_ptr() == args["out"].data_ptr() + first * 2 * 512 * 4
        first += 3
    assert first == 9


def test_chunks_take_their_rows_of_the_table_of_slots(gpu: Launches) -> None:
    table = torch.zeros(9, 40, dtype=INT)[:, 3:20]
    found = gpu.run("score_top_k_decode", decode(slot_block_table=table, slot_rows_per_page=16))
    assert [picks["table"] - table.data_ptr() for _, picks in found] == [0, 3 * 160, 6 * 160]
    assert {(picks["table_stride"], picks["table_columns"], picks["page_rows"]) for _, picks in found} == {
        (160, 17, 16)
    }


def test_more_memory_makes_fewer_chunks(gpu: Launches) -> None:
    for fit, count in ((1, 9), (2, 5), (4, 3), (8, 2), (9, 1), (50, 1)):
        assert len(gpu.run("score_top_k_decode", decode(fit=fit))) == count
    assert len(gpu.run("score_top_k_prefill", prefill(4096, fit=1000))) == 5


def test_the_portable_kernels_do_as_well(gpu: Launches) -> None:
    """Of MXFP4 here, and of pages whose rows are no multiple of 8."""
    q, scale = torch.zeros(10, 64, 64, dtype=torch.uint8), torch.zeros(10, 64, dtype=INT)
    keys = {"k": torch.zeros(900, 64, dtype=torch.uint8), "k_scale": torch.zeros(900, dtype=INT)}
    found = gpu.run("score_top_k_prefill", {**prefill(q=q, q_scale=scale), **keys})
    assert [scores["q_scale"] - scale.data_ptr() for scores, _ in found] == [0, 4 * 256, 8 * 256]
    found += gpu.run("score_top_k_decode", decode(kv_cache=formats.INDEXER_FP8.allocate(9, 12)))
    assert [scores["skip"] for scores, _ in found] == [512] * 6


def test_nothing_is_scored_where_all_fits(gpu: Launches) -> None:
    for op, args in (
        ("score_top_k_prefill", prefill(keys=512, workspace=None)),
        ("score_top_k_decode", decode(columns=512, workspace=None)),
        ("score_top_k_prefill", prefill(width=100, workspace=None)),
    ):
        module = OPS[op].load_kernel()
        call = OPS[op].call_type(*args.values())
        assert module.why_not(call) == ""
        gpu.kept.clear()
        module.launch(call)
        ((kind, _, given),) = gpu.kept
        assert kind == "picks"
        assert given["columns"] <= given["k"]
        assert given["rows"] == len(args["out"])


def test_nothing_is_launched_without_rows(gpu: Launches) -> None:
    assert gpu.run("score_top_k_prefill", prefill(0)) == []
    assert gpu.run("score_top_k_decode", decode(0)) == []


@pytest.mark.parametrize(
    ("op", "args", "why"),
    [
        ("score_top_k_prefill", prefill(k=4097, keys=5000), "k must be at most 4096, got 4097"),
        ("score_top_k_prefill", prefill(q=codes(10, 64, 144)[..., 8:136]), "q must be 16-byte aligned"),
        ("score_top_k_decode", decode(1, columns=(1 << 20) + 1), "rows must have at most 1048576 columns"),
    ],
)
def test_calls_that_are_refused(gpu: Launches, op: str, args: dict[str, Any], why: str) -> None:
    reason = OPS[op].load_kernel().why_not(OPS[op].call_type(*args.values()))
    assert why in reason


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_keys_of_a_deployment_are_those_of_the_pairs(arch: str) -> None:
    pairs = (calls.SCORE_TOP_K_PREFILL, calls.MQA_LOGITS), (calls.SCORE_TOP_K_DECODE, calls.PAGED_MQA_LOGITS)
    for kernel, score in pairs:
        keys = {*kernel.deployment_keys(MODELS["v4-flash"], 1, arch)}
        scores = score.deployment_keys(MODELS["v4-flash"], 1, arch)
        assert keys == {*scores, *topk_select.deployment_keys(MODELS["v4-flash"], 1, arch)}
        assert kernel.deployment_keys(ModelShape(compress_ratios=(1, 128)), 1, arch) == []


@pytest.mark.parametrize("trusted", ["score_top_k_prefill", "score_top_k_decode"])
def test_blackwells_scores_run_where_the_op_is_trusted(monkeypatch: pytest.MonkeyPatch, trusted: str) -> None:
    monkeypatch.setattr(trust, "is_trusted", lambda op, kernel, index: op == trusted)
    gpu = Launches(monkeypatch, "sm_100a")
    for op, args in (("score_top_k_prefill", prefill()), ("score_top_k_decode", decode())):
        gpu.run(op, args)
        kinds = {type(key) for kind, key, _ in gpu.kept if kind == "scores"}
        assert kinds == {BlackwellLogitsKey if op == trusted else PortableLogitsKey}
