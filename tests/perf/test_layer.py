# SPDX-License-Identifier: Apache-2.0
"""What `perf layer` measures and what it calls a floor; no GPU."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels.runtime.record import Cost
from cute_kernels.sparse_mla.schedule import LEAST_HALVED, choose_splits, head_groups, may_halve, num_tiles
from layers import PRESETS, AttentionOptions
from layers.attention import DeepseekV4MultiHeadLatentAttentionWrapper
from perf import layer, measure
from perf.cli import main
from perf.layer import Case
from perf.measure import Timing
from perf.records import load
from perf.timeline import Launch, Timeline
from tests.perf import synthetic

MACHINE = ("gpu", "cpu", "driver", "torch", "dsl", "tvm_ffi", "python", "commit", "date")


def test_cases_are_named_apart_and_as_the_records_say() -> None:
    between = [case for case in layer.cases() if case.is_between]
    names = [case.name for case in layer.cases() if not case.is_between]
    assert len(set(names)) == len(names)
    expected = {
        f"{model} {kind} {step}"
        for model in ("v4-flash", "v4-pro")
        for kind in ("swa", "c4a", "c128a")
        for step in [
            *(f"decode b{b} ctx{context}" for b in (1, 8, 64, 256) for context in (8192, 65536)),
            *(f"decode b{b} ctx1048576" for b in (1, 8)),
            *(f"decode b{b} ctx8192 {more}" for b in (1, 64) for more in ("n4", "tp8")),
            *(f"prefill {rows} ctx{context}" for rows in (512, 2048, 4096) for context in (0, 65536)),
        ]
    }
    expected |= {
        f"{step}{more}"
        for step in ("v4-flash c128a decode b48 ctx131072", "v4-pro c4a decode b48 ctx16384 tp2")
        for more in ("", " one-long", " zipf")
    }
    expected |= {f"{model} model decode b{b} ctx8192" for model in ("v4-flash", "v4-pro") for b in (1, 8, 64)}
    assert set(names) == expected
    assert not {case.name.removesuffix(" between") for case in between} & expected
    unequal = [case for case in between if case.unequal]
    assert [(case.model, case.kind, case.phase) for case in unequal] == [
        ("v4-flash", "c128a", "decode"),
        ("v4-pro", "c4a", "decode"),
    ]
    between = [case for case in between if case not in unequal]
    slow = [case for case in between if 33 <= case.requests <= 47]
    assert [(case.model, case.phase, case.tp) for case in slow] == [(model, "decode", 1) for model in PRESETS]
    for model in ("v4-flash", "v4-pro"):
        for kind in ("swa", "c4a", "c128a"):
            found = [case for case in between if (case.model, case.kind) == (model, kind) and case not in slow]
            assert [(case.phase, case.tp > 1) for case in found] == [
                *(("decode", False), ("decode", False), ("decode", True), ("prefill", False))
            ]
    full = [case.name for case in layer.cases(full=True)]
    assert len(set(full)) == len(full) > 1000
    assert "v4-pro c4a decode b8 ctx1048576" in full
    assert "v4-flash c128a decode b1024 ctx2048 n4 tp8" in full


def test_a_model_runs_the_layers_of_its_config() -> None:
    flash = Case("v4-flash", "model", "decode", 1, 1, 8192).ratios
    assert (len(flash), flash.count(1), flash.count(4), flash.count(128)) == (43, 2, 21, 20)
    pro = Case("v4-pro", "model", "decode", 1, 1, 8192).ratios
    assert (len(pro), pro.count(1), pro.count(4), pro.count(128)) == (61, 0, 30, 31)
    assert Case("v4-pro", "c4a", "decode", 1, 1, 8192).ratios == (4, 4, 4)


@pytest.mark.parametrize("kind", layer.KINDS)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_chain_of_layers_passes_through_l2(kind: str, tp: int) -> None:
    """Else its weights would be in L2 when they are read again, and a replay could not go round it several times."""
    case = Case("v4-flash", kind, "decode", 1, 1, 8192, tp)
    config = PRESETS["v4-flash"]
    heads, hidden, rank = config.num_attention_heads // tp, config.hidden_size, config.q_lora_rank
    own = heads * config.head_dim * (rank + config.o_lora_rank) + 8 // tp * config.o_lora_rank * hidden
    assert case.calls == len(case.ratios) <= layer.MOST_LAYERS
    assert case.calls * (own + hidden * (rank + config.head_dim)) >= measure.COLD_BYTES


def test_lengths() -> None:
    case = Case("v4-flash", "c4a", "decode", 256, 1, 8192)
    assert len(case.lengths()) == 256
    assert max(case.lengths()) == 8192
    assert min(case.lengths()) > 8192 - 256
    # in one of four requests a step closes a group of four
    assert 48 <= sum(length % 4 == 0 for length in case.lengths()) <= 80
    assert Case("v4-flash", "swa", "prefill", 1, 512, 65536).lengths() == [66048]
    one_long = Case("v4-flash", "c128a", "decode", 48, 1, 131072, unequal="one-long")
    short = sorted(one_long.lengths())[:-1]
    assert min(short) > 8192 - 256
    assert max(short) <= 8192
    assert 131072 - 256 < max(one_long.lengths()) <= 131072
    assert len({length % 128 for length in short}) > 40, "else all requests would close a group in the same step"
    assert min(Case("v4-flash", "c128a", "decode", 48, 1, 9, unequal="zipf").lengths()) == 9


@pytest.mark.parametrize(
    "case", [case for model in PRESETS for case in layer.cases_of_long_rows(model)], ids=lambda c: c.name
)
def test_steps_of_long_rows_are_cut_in_halves(case: Case) -> None:
    """By the shapes of their attention on an H200, and at least one row by its length."""
    config, clusters = PRESETS[case.model], 132 // 2
    heads, ratio = config.num_attention_heads // case.tp, layer.KINDS[case.kind]
    entries = [length // ratio for length in case.lengths()]
    width = config.index_topk if ratio == 4 else max(entries)
    tiles = num_tiles(config.sliding_window) + num_tiles(width)
    rows = case.tokens * head_groups(heads)
    assert heads == 64
    assert choose_splits(case.tokens, head_groups(heads), tiles, clusters) == 1
    assert may_halve(rows, clusters, tiles)
    longest = min(max(entries), width)
    assert num_tiles(config.sliding_window) + num_tiles(longest) >= LEAST_HALVED
    assert case.unequal == "" or min(entries) < width // 2


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
            config.layer_of_kind(case.ratios[0]),
            options=AttentionOptions(max_model_len=64, max_num_tokens=64),
            device="meta",
        )
    work = layer.least_work(built, case.query_lengths(), case.lengths())
    assert (work.bytes, work.flops) == by_hand(kind)


@pytest.mark.parametrize("kind", layer.KINDS)
@pytest.mark.parametrize(("rows", "length"), [(3000, 3000), (4, 2053), (7, 9000)])
def test_the_floor_counts_what_each_row_sees(kind: str, rows: int, length: int) -> None:
    """Of a chunk from the begin of a prompt, of rows of which some need no scores, and of long contexts."""
    config, ratio = PRESETS["v4-flash"], layer.KINDS[kind]
    with torch.device("meta"):
        built = DeepseekV4MultiHeadLatentAttentionWrapper(
            config,
            config.layer_of_kind(ratio),
            options=AttentionOptions(max_model_len=64, max_num_tokens=64),
            device="meta",
        )
    attended = keys = 0
    for tokens in range(length - rows + 1, length + 1):
        entries = tokens // ratio if ratio > 1 else 0
        keys += entries if kind == "c4a" and entries > 512 else 0
        attended += min(tokens, 128) + (min(entries, 512) if kind == "c4a" else entries)
    # the first token of a prompt attends to itself
    products = layer.least_work(built, [1], [1]).flops - 4 * 64 * 512
    work = layer.least_work(built, [rows], [length])
    assert work.flops == rows * products + 4 * attended * 64 * 512 + 2 * keys * 64 * 128


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of narrow layers, which the CPU runs."""
    monkeypatch.setattr(layer, "DEVICE", "cpu")
    small = {name: config.reduced() for name, config in PRESETS.items()}
    monkeypatch.setattr(layer, "PRESETS", small)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize(
    "case",
    [
        Case("v4-flash", "swa", "decode", 2, 1, 300),
        Case("v4-flash", "c4a", "decode", 3, 2, 300),
        Case("v4-flash", "c4a", "prefill", 1, 12, 200),
        Case("v4-flash", "c128a", "decode", 2, 1, 300),
        Case("v4-flash", "c128a", "decode", 3, 1, 1000, unequal="zipf"),
        Case("v4-pro", "c4a", "decode", 3, 1, 1000, unequal="one-long"),
        Case("v4-pro", "c128a", "prefill", 1, 12, 0),
    ],
    ids=lambda case: case.name,
)
def test_a_step_runs(case: Case) -> None:
    """Its block tables, caches and metadata fit together, and a capture gives what the layer gives."""
    layers = layer.build_layers(case, max(case.lengths()) + 64)
    step = layer.Step(case, layers)
    assert len(step.calls()) == len(step.layers) == layer.LAYERS
    assert step.is_right()
    assert len({caches.swa.data.data_ptr() for caches in step.caches}) == layer.LAYERS
    # by bytes alone: ops move more than a layer must
    bytes_only = {"copy": 1e-3}
    assert layer.ops_floor_us(step, bytes_only) > layer.floor_us(layer.work_of(case, layers), bytes_only, None) > 0
    assert layer.ops_floor_us(step, {}) == 0


@pytest.mark.usefixtures("on_the_cpu")
def test_a_step_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = (1, 4, 128, 4)
    monkeypatch.setattr(Case, "ratios", property(lambda self: ratios))
    case = Case("v4-flash", "model", "decode", 2, 1, 300)
    layers = layer.build_layers(case, 400)
    step = layer.Step(case, layers)
    assert set(step.metadata) == {1, 4, 128}
    assert step.is_right()
    one, other = (call() for call in step.calls())
    assert not torch.equal(one, other)
    hidden = step.hidden[0]
    for number in range(len(ratios)):
        hidden = step.run(number, hidden)
    assert torch.equal(step.calls()[0](), hidden)
    costs = [layer.least_work(built, case.query_lengths(), case.lengths()) for built in layers]
    work = layer.work_of(case, layers)
    assert work == Cost(sum(cost.bytes for cost in costs), sum(cost.flops for cost in costs))


def test_the_work_of_a_kind_is_that_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "least_work", lambda *_: Cost(10, 20))
    built: Any = [None] * layer.LAYERS
    assert layer.work_of(Case("v4-flash", "swa", "decode", 1, 1, 8192), built) == Cost(10, 20)
    whole: Any = [None] * 43
    assert layer.work_of(Case("v4-flash", "model", "decode", 1, 1, 8192), whole) == Cost(430, 860)


def test_floors() -> None:
    roofs = {"copy": 4000.0, "bf16": 500.0, "e4m3": 1000.0}
    assert layer.floor_us(Cost(bytes=4_000_000), roofs, None) == 1.0
    assert layer.floor_us(Cost(bytes=4_000_000, flops=3_000_000_000), roofs, "e4m3") == 3.0
    assert layer.floor_us(Cost(bytes=4_000_000, flops=3_000_000_000), roofs, "bf16") == 6.0
    assert layer.floor_us(Cost(bytes=4_000_000, flops=3_000_000_000), roofs, None) == 1.0
    kinds = {"fp8_gemm": "e4m3", "score_top_k_decode": "e4m3", "paged_mqa_logits": "e4m3", "bf16_gemm": "bf16",
             "linear hidden": "bf16", "sparse_mla_prefill_paged": "bf16", "fused_inv_rope_fp8_quant": None}  # fmt: skip
    assert {op: layer.products_of(op) for op in kinds} == kinds


# ---- where the time goes ---------------------------------------------------------------------------------------------

STEP = """quantize_fp8_1x128_0 gemm_swap_ab_e4m3_bf16_t64_s4_halves_0 nvjet_sm90_tss_96x64_64x10_2x4_h_bz_TNN
rms_norm_quant_q1024_bf16_kv512_bf16_spread_0 deepseek_v4_fp8_einsum_64x128s8d2_0 qnorm_rope_insert_fp8_ds_mla_n1r2w4_0
fused_compress_c4_fp8_ds_mla_1_0 fused_indexer_q_rope_quant_fp8_g1w4_0 qkv_insert_compress_index_r1g1_0
paged_mqa_logits_b64_h64r1_0 top_k_per_row_w8v4c1t1_0 sparse_mla_decode_h64_listed_quant_0
merge_attention_states_bf16_bf16_1_0 fused_inv_rope_row_h64_0 combine_topk_swa_indices_c640g1w4_0
Memset"""


def test_kinds_of_launches() -> None:
    kinds = [Launch(name, 0, 1).kind for name in STEP.split()]
    assert kinds == [
        "norms and quantization", "products", "products",
        "norms and quantization", "products", "caches and compression",
        "caches and compression", "caches and compression", "caches and compression",
        "scores and picks", "scores and picks", "attention",
        "attention", "norms and quantization", "indices",
        "copies",
    ]  # fmt: skip
    peers = {
        "_quantize_rows": "norms and quantization",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 0u, 1536u>": "products",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>": "products",
        "void deep_gemm::sm90_fp8_paged_mqa_logits<1u, 64u>": "scores and picks",
        "void vllm::cooperative::cooperative_topk_cs8<512u>": "scores and picks",
        "void vllm::topKPerRowPrefill<512, false>(float const*)": "scores and picks",
        "void vllm::fused_ops::fusedDeepseekV4QNormRopeKVRopeQuantInsertKernel<64>": "caches and compression",
        "kernel_cutlass_device_kernel_tensorptrf32gmemalign16o1024i64div16": "caches and compression",
        "void smxx::decode::flash_fwd_mla_combine_kernel<cutlass::bfloat16_t, 512>": "attention",
        "void legacy::sm90::prefill::sparse_fwd::sparse_attn_fwd_kernel<cutlass::half>": "attention",
        "kernel": "other",
    }
    assert {name: Launch(name, 0, 1).kind for name in peers} == peers
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>(int, int)"
    assert Launch(name, 0, 1).kind == "torch"
    assert Launch("something", 0, 1).kind == "other"


def test_overlapping_launches_are_charged_once() -> None:
    """The second waits for the first, the third runs within it, the fourth comes after a gap."""
    found = Timeline.of(
        [
            Launch("gemm_b", 2.0, 10.0),
            Launch("gemm_a", 0.0, 8.0),
            Launch("sparse_mla_decode_h64", 3.0, 1.0),
            Launch("something", 15.0, 5.0),
        ]
    )
    assert [launch.name for launch in found.launches] == ["gemm_a", "gemm_b", "sparse_mla_decode_h64", "something"]
    assert found.added() == [8.0, 4.0, 0.0, 5.0]
    assert (found.span, found.gaps) == (20.0, 3.0)
    assert found.by_kind() == {"products": (2, 12.0), "attention": (1, 0.0), "other": (1, 5.0)}
    assert layer.facts_of(found, 2) == {
        "launches": 2.0,
        "gaps_us": 1.5,
        "kernels": {"products": [1.0, 6.0], "attention": [0.5, 0.0], "other": [0.5, 2.5]},
    }
    nothing = Timeline.of([])
    assert (nothing.span, nothing.gaps, nothing.by_kind()) == (0.0, 0.0, {})


# ---- the sweep -------------------------------------------------------------------------------------------------------


class Machine:
    """A GPU of so many free bytes, whose cells take no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        self.built: list[str] = []
        self.now = 0.0
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, free))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(layer, "build_layers", self._build)
        monkeypatch.setattr(layer, "Step", lambda case, layers: (case, layers))
        monkeypatch.setattr(layer, "measure", lambda case, *_: {"shape": {"case": case.name}})
        monkeypatch.setattr(layer.time, "monotonic", self._clock)

    def _build(self, case: Case, longest: int) -> list[Any]:
        self.built.append(f"{case.name} up to {longest}")
        return []

    def _clock(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Machine]:
    return lambda free: Machine(monkeypatch, free)


SWEPT = [
    Case("v4-flash", "swa", "decode", 1, 1, 8192),
    Case("v4-flash", "swa", "decode", 64, 1, 8192),
    Case("v4-flash", "c4a", "decode", 64, 1, 65536),
    Case("v4-flash", "swa", "prefill", 1, 512, 0),
]


def test_cells_that_do_not_fit_are_left_out_with_their_bytes(machine: Callable[[int], Machine]) -> None:
    found = machine(1 << 30)
    told: list[Any] = []
    cells, left_out, is_cut = layer.sweep(SWEPT, 15, math.inf, {}, lambda case, cell: told.append((case.name, cell)))
    assert [cell["shape"]["case"] for cell in cells] == [SWEPT[i].name for i in (0, 1, 3)]
    needed = 3 * 64 * (584 * 129 + 16384 * 716)
    assert left_out == [
        {"case": "v4-flash c4a decode b64 ctx65536", "reason": f"its caches take {needed} bytes", "bytes": needed}
    ]
    assert not is_cut
    assert [name for name, _ in told] == [case.name for case in SWEPT]
    # layers are built once for the cells that share them, for the most rows and the longest sequence
    assert found.built == ["v4-flash swa decode b64 ctx8192 up to 8256", "v4-flash swa prefill 512 ctx0 up to 576"]


def test_a_budget_stops_between_cells(machine: Callable[[int], Machine]) -> None:
    machine(1 << 40)
    cells, left_out, is_cut = layer.sweep(SWEPT, 15, 2.5, {}, lambda case, cell: None)
    assert [cell["shape"]["case"] for cell in cells] == [case.name for case in SWEPT[:2]]
    assert (left_out, is_cut) == ([], True)


@pytest.mark.usefixtures("on_the_cpu")
def test_the_record_of_a_sweep(
    machine: Callable[[int], Machine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From the command to a record that the report takes, with everything that asks a GPU in its place made up."""
    build, step, one = layer.build_layers, layer.Step, layer.measure
    machine(1 << 40)
    monkeypatch.setattr(layer, "build_layers", build)
    monkeypatch.setattr(layer, "Step", step)
    monkeypatch.setattr(layer, "measure", one)
    wanted = [
        Case("v4-flash", "c4a", "decode", 2, 1, 300),
        Case("v4-flash", "model", "decode", 1, 1, 300),
        Case("v4-flash", "c4a", "decode", 1 << 14, 1, 1 << 20),
    ]
    monkeypatch.setattr(layer, "cases", lambda full: iter(wanted))
    monkeypatch.setattr(Case, "ratios", property(lambda self: (1, 4, 128) if self.kind == "model" else (4,) * 3))

    class Graph:
        def replay(self) -> None:
            pass

    def time_graphs(
        candidates: Any, work: float, replays: int, target_us: float, failures: Any, flops_per_set: float, queued: bool
    ) -> dict[str, Timing]:
        ((name, calls),) = candidates.items()
        for call in calls:
            call()
        return {name: Timing(50.0, 49.0, 51.0, 48.0, 60.0, replays, len(calls), len(calls))}

    monkeypatch.setattr(layer, "time_graphs", time_graphs)
    monkeypatch.setattr(layer, "time_apart", lambda candidates, *_, **__: (dict.fromkeys(candidates, 55.0), 1.5))
    monkeypatch.setattr(layer, "capture", lambda calls: (Graph(), len(calls)))
    monkeypatch.setattr(layer, "profile", lambda call: Timeline.of([Launch("gemm_a", 0, 8), Launch("gemm_b", 9, 8)]))
    monkeypatch.setattr(layer, "peak", lambda call: 1000)
    monkeypatch.setattr(layer, "workspace_bytes", lambda step: 2000)
    ticks = itertools.count()
    monkeypatch.setattr(layer.time, "perf_counter", lambda: next(ticks) * 1e-6)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    facts = {name: value for name, value in synthetic.record([]).items() if name in MACHINE}
    monkeypatch.setattr(measure, "environment", lambda: facts)
    monkeypatch.setattr(measure, "cold_bytes", lambda: 180e6)
    ceilings = tmp_path / "ceilings.json"
    ceilings.write_text(json.dumps(synthetic.record([])["ceilings"]))
    assert main(["layer", "--ceilings", str(ceilings), "--json", str(tmp_path / "h200")]) == 0
    found = load(tmp_path / "h200/layer.json")
    assert not found.partial
    assert [(cell.case, cell.ours.us, cell.ours.sets) for cell in found.cells] == [
        ("v4-flash c4a decode b2 ctx300", 50.0, 3),
        ("v4-flash model decode b1 ctx300", 50.0, 2),
    ]
    steps = [cell.step for cell in found.cells]
    assert steps[0] is not None
    assert steps[1] is not None
    assert (steps[0].launches, steps[1].launches) == (0.67, 2.0)
    assert (steps[0].eager_host_us, steps[0].eager_us) == (0.3, 0.7)
    assert (steps[1].eager_host_us, steps[1].eager_us, steps[1].metadata_us) == (1.0, 2.0, 2.0)
    assert steps[1].kernels == (("products", 2.0, 16.0),)
    assert [case.case for case in found.left_out] == ["v4-flash c4a decode b16384 ctx1048576"]
    assert found.cells[0].ours.percent is not None
    assert [cell.ours.apart for cell in found.cells] == [55.0, 55.0]


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
