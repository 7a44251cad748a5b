# SPDX-License-Identifier: Apache-2.0
"""Whole layers against their formulas: exactly when both round alike, to bf16 precision when the formulas do not."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from layers import BlockTables, DeepseekV4Config, DeepseekV4MetadataBuilder, LayerCaches, random_layer_tensors
from layers.attention import DeepseekV4MultiHeadLatentAttentionWrapper
from tests import oracle
from tests.layers import meaning
from tests.layers.engine import CONFIG, KINDS, Engine, Request, hidden_rows, make_layer
from tests.layers.meaning import Meaning, Numbers, Past, Result, Rounded

Array = np.ndarray
# A short original context puts every position of a test past it, and the ramp over frequencies that turn.
SHORT = replace(CONFIG, rope_original_max_position=64, compress_rope_theta=500.0, rope_theta=300.0)
CHANGED = 1e-3
"""Largest share of elements that may differ. Layer and meaning add the same float64 products in another order, so a sum
beside a rounding boundary may fall to the other side: rarely one, and then a whole row of the next product moves."""
CLOSE = 1e-4
"""Largest relative error: one changed bf16 bit (2^-9) in CHANGED of the elements is 2^-9 * CHANGED^0.5 = 6e-5."""


def numbers_of(config: DeepseekV4Config, ratio: int) -> Numbers:
    c = config
    compressed = ratio > 1
    return Numbers(
        ratio=ratio,
        heads=c.num_attention_heads,
        groups=c.o_groups,
        index_heads=c.index_n_heads,
        index_topk=c.index_topk,
        window=c.sliding_window,
        eps=c.rms_norm_eps,
        theta=c.compress_rope_theta if compressed else c.rope_theta,
        rope_factor=c.rope_factor if compressed else 1.0,
        beta_fast=c.rope_beta_fast,
        beta_slow=c.rope_beta_slow,
        original=c.rope_original_max_position,
    )


def plain(tensors: dict[str, torch.Tensor]) -> dict[str, Array]:
    """Weights as float64; FP8 ones by the table of code values."""
    result = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            result[name] = oracle.E4M3[tensor.view(torch.uint8).numpy()]
        else:
            result[name] = oracle.to_numpy(tensor)
    return result


def uneven_tensors(config: DeepseekV4Config, ratio: int, seed: int, quantized: bool = True) -> dict[str, torch.Tensor]:
    """Seeded weights whose FP8 scales differ from block to block and whose norms make columns of tiny values, down to
    below the smallest absmax that blocks are scaled for."""
    tensors = random_layer_tensors(
        config, config.layer_of_kind(ratio), seed, quantized=quantized, wo_a_quantized=quantized
    )
    g = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if name.endswith(".scale"):
            tensor *= torch.exp2(torch.randint(-2, 3, tensor.shape, generator=g))
            if name == "wo_a.scale":
                tensor[:, ::4] *= 2.0**10  # the tiny columns, the first 128 of each head, weigh as much as the others
        elif name in ("kv_norm.weight", "compressor.norm.weight"):
            tensor[:64] *= 2.0**-9
            tensor[64:128] *= 2.0**-17
        elif name == "indexer.compressor.norm.weight":
            tensor[:32] *= 2.0**-9
            tensor[32:64] *= 2.0**-17
    return tensors


@dataclass
class Run:
    """A layer that ran, and what it captured for one of its requests."""

    layer: DeepseekV4MultiHeadLatentAttentionWrapper
    engine: Engine
    request: Request
    hidden: Array
    out: Array
    capture: dict[str, Array] = field(default_factory=dict)


def scaled(layer: DeepseekV4MultiHeadLatentAttentionWrapper, q_scale: float, kv_scale: float) -> None:
    if layer.options.kv_cache == "fp8":
        layer.mla_attn.init_layer_buffers(q_scale, kv_scale)


def run_layer(layer: DeepseekV4MultiHeadLatentAttentionWrapper, config: DeepseekV4Config, total: int = 292) -> Run:
    """Two chunks of prefill, then decode steps of one and of three tokens, next to a second request."""
    hidden, other = hidden_rows(total, 1, config), hidden_rows(total, 2, config)
    engine = Engine(layer, seed=3)
    first, second = Request(), Request()
    outs, captures = [], []

    def record(results: list[torch.Tensor], capture: dict[str, torch.Tensor], start: int, count: int) -> None:
        outs.append(results[0])
        captures.append({name: rows[start : start + count] for name, rows in capture.items()})

    for count in (total - 130, 101):
        capture: dict[str, torch.Tensor] = {}
        rows = hidden[first.length : first.length + count]
        record(engine.step([], [(first, rows)], capture=capture), capture, 0, count)
    engine.step([], [(second, other[:77])])
    while first.length < total:
        capture = {}
        count = min((first.length % 2) * 2 + 1, total - first.length)
        rows = hidden[first.length : first.length + count]
        tail = other[second.length : second.length + 2]
        record(engine.step([(first, rows), (second, tail)], capture=capture), capture, 0, count)
    joined = {name: oracle.to_numpy(torch.cat([c[name] for c in captures])) for name in captures[0]}
    return Run(layer, engine, first, oracle.to_numpy(hidden), oracle.to_numpy(torch.cat(outs)), joined)


def error(got: Array, expected: Array) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def agree(name: str, got: Array, expected: Array) -> None:
    assert got.shape == expected.shape, name
    assert np.isfinite(got).all(), name
    # A capture of per-tensor codes is their fp32 product with the scale, 2^-24 beside the exact one.
    changed = (np.abs(got - expected) > 1e-6 * np.abs(expected)).mean()
    assert changed <= CHANGED, f"{name}: {changed:.2e} of the elements differ"
    assert error(got, expected) <= CLOSE, f"{name}: relative error {error(got, expected):.2e}"


def same_picks(run: Run, result: Result, ratio: int, topk: int) -> None:
    """The indexer's picks are the best scores; an entry may stand for another one whose score is equal to 1e-5."""
    truncated = 0
    assert result.scores is not None
    for t, row in enumerate(run.capture["topk"].astype(int)):
        visible = (t + 1) // ratio
        picks = sorted(row[row >= 0].tolist())
        assert (row[len(picks) :] == -1).all(), "no holes before the tail"
        assert len(set(picks)) == len(picks) == min(visible, topk)
        truncated += visible > topk
        for wrong, right in zip(
            sorted(set(picks) - set(result.topk[t])), sorted(set(result.topk[t]) - set(picks)), strict=True
        ):
            a, b = result.scores[t, wrong], result.scores[t, right]
            assert abs(a - b) <= 1e-5 * abs(b), (t, wrong, right)
    assert truncated > 100, "selection must be exercised"


def decoded_rows(kv: str, fields: list[torch.Tensor], scale: float) -> Array:
    """float64 [n, 512] of the raw bytes of cache rows."""
    if kv == "fp8_ds_mla":
        data, exponents = (f.numpy() for f in fields)
        assert not exponents[:, 7].any()
        nope = oracle.E4M3[data[:, :448]] * np.exp2(exponents[:, :7].astype(float) - 127).repeat(64, axis=1)
        return np.concatenate([nope, bf16_values(data[:, 448:])], axis=1)
    (data,) = (f.numpy() for f in fields)
    return bf16_values(data) if kv == "bf16" else oracle.E4M3[data] * scale


def bf16_values(raw: Array) -> Array:
    return (np.ascontiguousarray(raw).view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def decoded_keys(index: str, fields: list[torch.Tensor]) -> tuple[Array, Array]:
    """(keys as the scores multiply them, their factors) of the raw bytes of indexer cache rows."""
    data, raw = (np.ascontiguousarray(f.numpy()) for f in fields)
    if index == "fp8":
        return oracle.E4M3[data], raw.view("<f4")[:, 0].astype(float)
    codes = np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), 128)
    values = np.where(codes & 8, -1.0, 1.0) * oracle.E2M1[codes & 7]
    return values * np.exp2(raw.astype(float) - 127).repeat(32, axis=1), np.ones(len(data))


def check_caches(run: Run, result: Result, rounding: Rounded) -> None:
    window = decoded_rows(rounding.kv, run.engine.window(run.request), rounding.kv_scale)
    agree("window", window, result.window[-len(window) :])
    fields = run.engine.entries(run.request)
    if result.entries is not None:
        main = 2 if rounding.kv == "fp8_ds_mla" else 1
        agree("entries", decoded_rows(rounding.kv, fields[:main], rounding.kv_scale), result.entries)
        fields = fields[main:]
    if result.index_keys is not None:
        keys, factor = decoded_keys(rounding.index, fields)
        agree("index keys", keys * factor[:, None], result.index_keys[0] * result.index_keys[1][:, None])


ROUNDED = [
    (1, {}, {}, {}),
    (1, {"kv": "bf16"}, {}, {}),
    (1, {"kv": "fp8", "q_scale": 0.017, "kv_scale": 0.3}, {}, {"quantized": False}),
    (4, {}, {}, {}),
    (4, {"hadamard": True}, {"prefill": "paged"}, {"quantized": False}),
    (4, {"index": "mxfp4"}, {"prefill": "paged"}, {}),
    (4, {"kv": "bf16", "index": "mxfp4", "ties": "ties_to_even", "hadamard": True}, {}, {}),
    (4, {"kv": "fp8", "q_scale": 0.017, "kv_scale": 0.3, "index": "mxfp4", "ties": "ties_to_even"}, {}, {}),
    (128, {}, {}, {"quantized": False}),
    (128, {}, {"prefill": "paged", "tma_aligned_scales": True}, {}),
    (128, {"kv": "bf16"}, {}, {}),
    (128, {"kv": "fp8", "q_scale": 0.017, "kv_scale": 0.3}, {}, {}),
]


@pytest.mark.parametrize(("ratio", "formats", "options", "weights"), ROUNDED)
def test_a_layer_rounds_where_the_formats_round_and_nowhere_else(
    ratio: int, formats: dict[str, Any], options: dict[str, Any], weights: dict[str, bool]
) -> None:
    rounding = Rounded(**formats)
    quantized = weights.get("quantized", True)
    tensors = uneven_tensors(SHORT, ratio, 5, quantized)
    layer = make_layer(
        ratio,
        config=SHORT,
        tensors=tensors,
        kv_cache=rounding.kv,
        index_cache=rounding.index,
        index_hadamard=rounding.hadamard,
        e2m1_rounding=rounding.ties,
        **options,
    )
    scaled(layer, rounding.q_scale, rounding.kv_scale)
    run = run_layer(layer, SHORT)
    whole = Meaning(numbers_of(SHORT, ratio), plain(tensors), rounding)
    result = whole.run(run.hidden)
    for name in ("kv", "q", "idx_q"):
        expected = getattr(result, name)
        assert (name in run.capture) == (expected is not None)
        if expected is not None:
            agree(name, run.capture[name], expected)
    if ratio == 4:
        same_picks(run, result, ratio, SHORT.index_topk)
    check_caches(run, result, rounding)
    agree("o_raw", run.capture["o_raw"], result.o_raw)
    np.testing.assert_allclose(run.capture["lse"], result.lse, rtol=0, atol=2e-6)  # fp32 of numbers below 16
    check_projection(run, whole)
    # A changed bit of o_raw can change a code, and with it every sum that the code takes part in.
    for name, got in (("o", run.capture["o"]), ("oa", run.capture["oa"]), ("out", run.out)):
        assert error(got, getattr(result, name)) <= 10 * CLOSE, name


def check_projection(run: Run, whole: Meaning) -> None:
    """The output projection, each half from what the layer itself put into it."""
    o, oa, _ = whole.project(run.capture["o_raw"], np.arange(len(run.out)))
    agree("o", run.capture["o"], o)
    agree("oa", run.capture["oa"], oa)
    agree("out", run.out, whole.hidden(run.capture["oa"]))


@pytest.mark.parametrize("ratio", KINDS)
def test_a_bf16_layer_computes_the_formulas(ratio: int) -> None:
    """bf16 weights and caches against no rounding at all: what remains is bf16's 2^-9 in a chain of ten roundings."""
    config = replace(SHORT, index_topk=128)  # every entry is picked, so no rounding can change the selection
    tensors = random_layer_tensors(config, config.layer_of_kind(ratio), 6, quantized=False, wo_a_quantized=False)
    run = run_layer(make_layer(ratio, config=config, tensors=tensors, kv_cache="bf16"), config)
    result = Meaning(numbers_of(config, ratio), plain(tensors)).run(run.hidden)
    for name in ("kv", "q", "o_raw", "o", "oa"):
        assert error(run.capture[name], getattr(result, name)) < 0.006, name
    np.testing.assert_allclose(run.capture["lse"], result.lse, rtol=0, atol=0.02)
    assert error(run.out, result.out) < 0.006


@pytest.mark.parametrize("index", ["fp8", "mxfp4"])
def test_a_truncated_selection_follows_from_the_indexers_own_inputs(index: str) -> None:
    """The picks against scores of the layer's own queries and cached keys, and its output against the formulas with the
    layer's own picks."""
    tensors = random_layer_tensors(SHORT, SHORT.layer_of_kind(4), 7, quantized=False, wo_a_quantized=False)
    run = run_layer(make_layer(4, config=SHORT, tensors=tensors, kv_cache="bf16", index_cache=index), SHORT)
    numbers, rounding = numbers_of(SHORT, 4), Rounded(kv="bf16", index=index)
    keys = decoded_keys(index, run.engine.entries(run.request)[1:])
    whole = Meaning(numbers, plain(tensors), rounding)
    scores = whole.scores(run.hidden, run.capture["idx_q"], keys)
    picks = [[int(e) for e in row if e >= 0] for row in run.capture["topk"]]
    for t, row in enumerate(scores):
        assert set(picks[t]) == set(meaning.best(row[: (t + 1) // 4], SHORT.index_topk)), t
    result = Meaning(numbers, plain(tensors)).run(run.hidden, picks=picks)
    assert result.idx_q is not None
    assert error(run.capture["idx_q"], result.idx_q) < 0.006
    assert error(run.out, result.out) < 0.006


@pytest.mark.parametrize(("index", "ties", "hadamard"), [("fp8", "ties_to_lower", False),
                                                        ("fp8", "ties_to_lower", True),
                                                        ("mxfp4", "ties_to_lower", False),
                                                        ("mxfp4", "ties_to_even", True)])  # fmt: skip
def test_codes_and_weights_of_the_indexers_queries(index: str, ties: str, hadamard: bool) -> None:
    """12 heads: their scale is not a power of two, so the order of the factors shows."""
    config = replace(SHORT, index_n_heads=12)
    tensors = uneven_tensors(config, 4, 9)
    layer = make_layer(
        4, config=config, tensors=tensors, index_cache=index, e2m1_rounding=ties, index_hadamard=hadamard
    )
    assert layer.indexer is not None
    given: list[Any] = []
    layer.indexer.indexer_op.register_forward_pre_hook(lambda module, arguments: given.append(arguments[:2]))
    hidden = hidden_rows(20, 4, config)
    Engine(layer).step([], [(Request(), hidden)])
    ((query, weights),) = given
    rounding = Rounded(index=index, ties=ties, hadamard=hadamard)
    whole = Meaning(numbers_of(config, 4), plain(tensors), rounding)
    result = whole.run(oracle.to_numpy(hidden))
    assert result.idx_q is not None
    values, scale = rounding.index_query(result.idx_q)
    if index == "fp8":
        got = oracle.E4M3[query.view(torch.uint8).numpy()]
    else:
        packed, exponents = query[0].flatten(0, 1), query[1].flatten()[:, None].view(torch.uint8)
        got = decoded_keys("mxfp4", [packed, exponents])[0].reshape(20, 12, 128)
    agree("query codes", got, values)
    agree("weights", oracle.to_numpy(weights), whole.head_weights(oracle.to_numpy(hidden), scale))


FAR = 70013
"""First position of a step far out: five tokens of which one closes a group of 4 and one of 128."""


@pytest.mark.parametrize(("ratio", "kv", "index"), [(1, "fp8_ds_mla", "fp8"), (4, "fp8_ds_mla", "fp8"),
                                                    (4, "bf16", "mxfp4"), (128, "fp8", "fp8"),
                                                    (128, "fp8_ds_mla", "fp8")])  # fmt: skip
@pytest.mark.parametrize("decode", [True, False])
def test_positions_beyond_the_original_context(ratio: int, kv: str, index: str, decode: bool) -> None:
    """A step at position 70013, with DeepSeek's own rotation, on caches that were filled by hand."""
    count = 5
    assert any((FAR + t + 1) % 128 == 0 for t in range(count))
    rounding = Rounded(kv=kv, index=index, q_scale=0.02, kv_scale=0.25)
    tensors = uneven_tensors(CONFIG, ratio, 8)
    layer = make_layer(ratio, tensors=tensors, kv_cache=kv, index_cache=index, max_model_len=FAR + count)
    scaled(layer, rounding.q_scale, rounding.kv_scale)
    past, caches, tables = far_caches(ratio, rounding, FAR, count)
    builder = DeepseekV4MetadataBuilder(CONFIG, count, FAR + count)
    metadata = builder.build(ratio, [count], [FAR + count], tables, 1 if decode else 0)
    hidden = hidden_rows(count, 9)
    capture: dict[str, torch.Tensor] = {}
    out = layer(metadata.positions, hidden, metadata, caches, capture=capture)
    whole = Meaning(numbers_of(CONFIG, ratio), plain(tensors), rounding)
    result = whole.run(oracle.to_numpy(hidden), FAR, past)
    for name in ("kv", "q", "idx_q"):
        if name in capture:
            agree(name, oracle.to_numpy(capture[name]), getattr(result, name))
    if ratio == 4:
        assert [sorted(row.tolist()) for row in capture["topk"]] == [sorted(row) for row in result.topk]
        assert max(max(row) for row in result.topk) > 1 << 14
    assert error(oracle.to_numpy(capture["o_raw"]), result.o_raw) <= CLOSE
    np.testing.assert_allclose(oracle.to_numpy(capture["lse"]), result.lse, rtol=0, atol=2e-6)
    assert error(oracle.to_numpy(out), result.out) <= 10 * CLOSE
    if ratio > 1:
        assert caches.compressed is not None
        assert tables.compressed is not None
        entry = FAR // ratio  # began before this step and closes in it
        rows = caches.compressed.block_size
        slot = int(tables.compressed[0, entry // rows]) * rows + entry % rows
        fields = caches.compressed.kv_format.read_fields(caches.compressed.data, rows, torch.tensor([slot]))
        assert result.entries is not None
        agree("entry", decoded_rows(kv, list(fields), rounding.kv_scale)[0], result.entries[entry])


def far_caches(ratio: int, rounding: Rounded, first: int, count: int) -> tuple[Past, LayerCaches, BlockTables]:
    """Random rows of all tokens before `first` that a step of `count` tokens can read, in shuffled pages."""
    g = torch.Generator().manual_seed(ratio)
    swa_pages, entry_pages, state_tokens = 4, -(-(first + count) // 256), {4: 4, 128: 8}.get(ratio, 1)
    state_pages = 40
    caches = LayerCaches.allocate(
        CONFIG,
        ratio,
        swa_blocks=swa_pages,
        compressed_blocks=entry_pages,
        state_blocks=state_pages,
        kv_cache=rounding.kv,
        index_cache=rounding.index,
    )

    def table(pages: int, tokens: int, live: int) -> torch.Tensor:
        """Only the last `live` logical pages up to the step's end exist."""
        last = (first + count - 1) // tokens
        result = torch.full((1, last + 3), -7, dtype=torch.int32)
        result[0, last - live + 1 : last + 1] = torch.randperm(pages, generator=g)[:live].int()
        return result

    tables = BlockTables(table(swa_pages, 64, swa_pages))
    if ratio > 1:
        live = min(state_pages, 128 // state_tokens + 2)
        tables = replace(
            tables,
            compressed=table(entry_pages, 256, entry_pages),
            state=table(state_pages, state_tokens, live),
        )

    def fill(cache: Any, block_table: torch.Tensor, start: int, rows: torch.Tensor, **scale: float) -> None:
        number = start + torch.arange(len(rows))
        slots = block_table[0, number // cache.block_size].long() * cache.block_size + number % cache.block_size
        cache.kv_format.write(cache.data, cache.block_size, slots, rows, **scale)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).bfloat16().float()

    scale = {"scale": rounding.kv_scale} if rounding.kv == "fp8" else {}
    window = normal(127, 512)
    fill(caches.swa, tables.swa, first - 127, window, **scale)
    past = Past(rounding.window_row(oracle.to_numpy(window)))
    if ratio == 1:
        return past, caches, tables
    assert tables.compressed is not None
    assert tables.state is not None
    entries = normal(first // ratio, 512)
    fill(caches.compressed, tables.compressed, 0, entries, **scale)
    past.entries = rounding.window_row(oracle.to_numpy(entries))
    before = 128 if ratio == 128 else 8

    def state(cache: Any) -> tuple[Array, Array]:
        rows = torch.randn(before, cache.kv_format.row_elements, generator=g)
        fill(cache, tables.state, first - before, rows)
        kv, score = np.split(oracle.to_numpy(rows), 2, axis=1)
        return kv, score

    past.state = state(caches.state)
    if ratio == 4:
        keys = normal(first // 4, 128)
        fill(caches.indexer, tables.compressed, 0, keys)
        past.index_keys = rounding.index_key(oracle.to_numpy(keys))
        past.index_state = state(caches.indexer_state)
    return past, caches, tables


def test_the_meaning_is_independent_of_the_package() -> None:
    imported = set()
    for node in ast.walk(ast.parse(Path(meaning.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    assert imported == {"__future__", "math", "dataclasses", "numpy", "tests"}
