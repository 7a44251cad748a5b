# SPDX-License-Identifier: Apache-2.0
"""A layer's attention on the GPU with what the CPU's layer called it with, and both layers from end to end.

The CPU's layer prefills in chunks and decodes; each of its calls of an attention op is held, with its queries, pages,
tables and picks, and made again on the GPU. So the two sides differ in nothing but the kernel.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.runtime import ops, record
from cute_kernels.runtime.ops import FALLBACK_VARIABLE, Op
from cute_kernels.runtime.verify import clone_arguments
from layers.linear import Linear
from tests.gpu.prefill_checks import ATOL, LARGEST, LOG_ATOL, LOG_RTOL, RTOL
from tests.layers.engine import KINDS, Engine, Request, hidden_rows, make_layer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

ATTENTION = {
    "fp8_ds_mla": {"sparse_mla_decode", "sparse_mla_prefill_paged"},
    "bf16": {"sparse_mla_mixed"},
    "fp8": {"sparse_mla_mixed"},
}
"""Cache kind -> the attention ops of a layer's steps."""

TOKENS, CHUNK, DECODED = 600, 250, 3

Held = list[tuple[Op, tuple[Any, ...], tuple[Any, ...]]]
"""Calls: op, arguments before and after."""


def run(device: str, ratio: int, **options: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output rows of a request, prefilled in chunks and then decoded, and picked entries of each step."""
    engine, request = Engine(make_layer(ratio, device=device, **options), seed=1), Request()
    hidden = hidden_rows(TOKENS + DECODED, seed=2)
    outs, picked = [], []
    for rows in hidden[:TOKENS].split(CHUNK):
        capture: dict[str, torch.Tensor] = {}
        outs += engine.step([], [(request, rows)], capture=capture)
        picked += [capture["topk"].cpu()] if "topk" in capture else []
    for row in hidden[TOKENS:].split(1):
        capture = {}
        outs += engine.step([(request, row)], capture=capture)
        picked += [capture["topk"].cpu()] if "topk" in capture else []
    return torch.cat(outs).cpu(), picked


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Calls of attention ops on the CPU."""
    calls: Held = []
    execute, names, cpu = ops._execute, set.union(*ATTENTION.values()), torch.device("cpu")

    def hold(op: Op, implementation: str, body: Any, args: tuple[Any, ...]) -> None:
        before = clone_arguments(args, cpu) if op.name in names else ()
        execute(op, implementation, body, args)
        if op.name in names:
            calls.append((op, before, clone_arguments(args, cpu)))

    monkeypatch.setattr(ops, "_execute", hold)
    return calls


@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize("kv", ATTENTION)
def test_attention_of_a_layer_is_the_references(
    ratio: int, kv: str, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("cpu", ratio, kv_cache=kv)
    assert {op.name for op, _, _ in held} == ATTENTION[kv]
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)
    for op, before, after in held.copy():
        args = clone_arguments(before, torch.device("cuda"))
        op.overload(*args)
        results, expected = op.mutated(args), op.mutated(after)
        for name in results.keys() - {"workspace"}:
            x, y = results[name].cpu().double(), expected[name].double()
            if name != "out":
                atol, rtol = LOG_ATOL, LOG_RTOL
            else:
                # what rounding weights does grows with the values, and ATOL is that of values up to LARGEST
                atol, rtol = ATOL * max(1.0, float(y.abs().max()) / LARGEST), RTOL + 2.0**-9
                # over plain fp8 caches weights are f16
                atol = max(atol, 1e-2) if kv == "fp8" else atol
            wrong = ~((x == y) | ((x - y).abs() <= (rtol * y.abs()).clamp(min=atol)))
            assert not wrong.any(), (
                f"{op.name}: {name}: {int(wrong.sum())} of {wrong.numel()} elements, first at "
                f"{wrong.nonzero()[0].tolist()}: expected {float(y[wrong][0])}, got {float(x[wrong][0])}"
            )


@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize("kv", ATTENTION)
@pytest.mark.parametrize("fp8_product", [False, True])
def test_end_to_end(ratio: int, kv: str, fp8_product: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fp8_product:
        monkeypatch.setattr(Linear, "_has_fp8_product", lambda self, device: False)
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)
    want, want_picked = run("cpu", ratio, kv_cache=kv)
    with record.record_calls() as recording:
        got, got_picked = run("cuda", ratio, kv_cache=kv)
    assert "reference" not in {call.implementation for call in recording.calls}
    off = (got - want).double().norm(dim=1) / want.double().norm(dim=1)
    # FP8 tensor cores sum with 14 bits; over fp8 caches that moves codes of one more quantization
    assert off.median() < (3.5e-2 if fp8_product and kv == "fp8" else 3e-2)
    steps = -(-TOKENS // CHUNK) + DECODED
    assert len(want_picked) == len(got_picked) == (steps if ratio == 4 else 0)
    same = total = 0
    for x, y in zip(got_picked, want_picked, strict=True):
        assert x.shape == y.shape
        both = (x[:, :, None] == y[:, None, :]) & (y >= 0)[:, None, :]
        same, total = same + int(both.sum()), total + int((y >= 0).sum())
    assert same >= 0.98 * total
