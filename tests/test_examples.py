# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/examples run, on the CPU with what needs a GPU skipped, on a GPU as a whole."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.runtime.compile import compile_report
from tests.model.launch import pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.problems import put
from tests.model.ptx import parse

EXAMPLES = Path(__file__).parent.parent / "docs/examples"
SHOWN = {
    "decode_loop.py": ("prefill of (150, 7, 64) tokens: [221, 512], all finite: True", "step 3: lengths [155, 12, 69]"),
    "layer_from_checkpoint.py": ("layer 0, ratio 1", "layer 2, ratio 4", "layer 3, ratio 128", "output [100, 128]"),
    "profile_step.py": ("build_step_metadata", "sparse_mla_decode", "linear wo_b"),
    "replace_flashmla.py": ("out [3, 1, 16, 512], lse [3, 16, 1]; relative to float64",),
    "torch_compile.py": ("5 tokens in one graph", "17 tokens in one graph"),
}
"""Program -> what it prints wherever it runs."""
KERNEL = "own_kernel.py"
ON_GPU = {
    "decode_loop.py": ("step 3: lengths [155, 12, 69]",),
    "profile_step.py": ("kernel ", "Self CUDA"),
    "replace_flashmla.py": (),
    "torch_compile.py": (),
}
"""Those that take --device cuda, and what they print there."""


def run(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr("sys.argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_every_example_is_run() -> None:
    assert sorted([*SHOWN, KERNEL]) == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.full
@pytest.mark.parametrize("name", SHOWN)
def test_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(name, monkeypatch, capsys)
    for part in SHOWN[name]:
        assert part in out
    assert ("is skipped: there is no GPU in this run" in out) == (name in ("decode_loop.py", "profile_step.py"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ON_GPU)
def test_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(name, monkeypatch, capsys, "--device", "cuda")
    for part in (*ON_GPU[name], *SHOWN[name]):
        assert part in out
    assert "skipped" not in out


def test_own_kernel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It compiles without a GPU, and in the model of the SM its PTX gives what torch does."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module: Any = importlib.import_module("own_kernel")
    module.main()
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["sm_80", "sm_90a", "sm_100a"]

    x = torch.randn(5, 2 * 512, generator=torch.Generator().manual_seed(0)).bfloat16()[:, :512]  # rows apart
    x[1, 511], x[2, 0], x[3] = -100.0, 50.0, 0.0
    key, memory = module.RowMaxKey("sm_90a", warps=2), GlobalMemory()
    program = parse(compile_report(key).ptx)
    out = memory.reserve(5 * 4)
    parameters = pack(program, [put(memory, x), x.stride(0) * 2, out, 5])
    run_grid(program, parameters, memory, blocks=3, size=key.smem_bytes, seed=1)
    got = torch.from_numpy(memory.get(out, (5,), np.float32))
    assert torch.equal(got, x.float().abs().amax(dim=1))
    assert got[1:4].tolist() == [100.0, 50.0, 0.0]


def test_a_step_is_the_same_alone_and_in_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the loop computes is attention over the right tokens: a request alone gives the same."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    loop: Any = runpy.run_path(str(EXAMPLES / "decode_loop.py"))
    config = loop["PRESETS"]["v4-flash"].reduced()
    hidden = torch.randn(20, config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    both, alone = (loop["Engine"](config, (2,), requests, "cpu") for requests in (2, 1))
    both.prefill(torch.cat([hidden[:5], hidden]), (5, 20))
    alone.prefill(hidden, (20,))
    row = hidden[:1]
    together = both.forward(torch.cat([row, row]), both.next_step())
    assert torch.equal(together[1:], alone.forward(row, alone.next_step()))
    assert not torch.equal(together[:1], together[1:])
