# SPDX-License-Identifier: Apache-2.0
"""Kernels from disk on a GPU: compiled ahead without one, loaded in fresh processes, first launched in a capture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels.runtime.arch import arch_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ROOT = Path(__file__).parent.parent.parent

PRELUDE = """
import json, sys, time
import torch
from cute_kernels import quantize_and_insert_k_cache, warmup
from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.models import MODELS
from cute_kernels.runtime import cache, compile as c
import cute_kernels.kv_cache.insert

rows = torch.randn(100, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
slots = torch.randperm(128, generator=torch.Generator().manual_seed(2))[:100]
slots[3::7] = -1
want = FP8_DS_MLA.allocate(2, 64)
quantize_and_insert_k_cache(rows, want, slots)

class Call:
    def __init__(self, device="cuda"):
        self.k, self.slots, self.pool = rows.to(device), slots.to(device), FP8_DS_MLA.allocate(2, 64, device)
    def __call__(self):
        quantize_and_insert_k_cache(self.k, self.pool, self.slots)
    def right(self):
        return bool(torch.equal(self.pool.cpu(), want))
"""


def python(code: str, folder: Path, **variables: str) -> Any:
    """What a fresh process prints, as JSON."""
    environment = {**os.environ, "CUTE_KERNELS_CACHE_DIR": str(folder), "CUTE_KERNELS_FALLBACK": "none", **variables}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


COUNTS = "[c.compilations(), c.disk_loads()]"


def object_name() -> str:
    """File of the kernel that a Call runs."""
    from cute_kernels.formats import FP8_DS_MLA
    from cute_kernels.kv_cache.insert import key_for
    from cute_kernels.runtime.cache import Store

    return Store(Path()).object_path(key_for(arch_of(0), FP8_DS_MLA.id, 100)).name


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels for this GPU, compiled in processes that do not see it."""
    folder = tmp_path_factory.mktemp("bundle")
    command = [sys.executable, "-m", "cute_kernels", "precompile", "--arch", arch_of(0), "--out", str(folder), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    kernels = json.loads(done.stdout)["kernels"]
    other = [kernel for kernel in kernels if kernel["status"] != "compiled" or kernel["problems"]]
    assert not other, f"{other}\n{done.stderr}"
    assert done.returncode == 0, done.stderr
    return folder


def test_a_bundle_runs_without_a_compiler(bundle: Path) -> None:
    code = f"call = Call(); call(); print(json.dumps([call.right(), {COUNTS}]))"
    assert python(code, bundle, CUTE_KERNELS_JIT="forbid") == [True, [0, 1]]


def test_warmup_loads_everything_and_a_capture_needs_no_call_before(bundle: Path) -> None:
    """The first launch of all happens inside the capture, in the strictest mode."""
    code = """
keys = warmup(MODELS["v4-flash"])
call = Call()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="global"):
    call()
torch.cuda.synchronize()
before = call.right()
graph.replay()
torch.cuda.synchronize()
print(json.dumps([before, call.right(), len(keys) == c.disk_loads(), c.compilations()]))
"""
    assert python(code, bundle, CUTE_KERNELS_JIT="forbid") == [False, True, True, 0]


def test_a_missing_kernel_in_a_capture_names_warmup(bundle: Path) -> None:
    code = f"""
call = Call()
stream = torch.cuda.Stream()
message = ""
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        call()
except RuntimeError as error:
    message = str(error)
torch.cuda.synchronize()
call()
print(json.dumps([message, call.right(), {COUNTS}]))
"""
    message, right, counts = python(code, bundle)
    assert "InsertKey" in message
    assert "cute_kernels.warmup(config, tp=..., arch=" in message
    assert right
    assert counts == [0, 1]


def test_the_first_call_with_a_warm_disk_cache_is_quick(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuTe DSL is imported before, and the GPU awake. Python keeps bytecode, as in any installation."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    code = """
import cutlass.cute
call = Call()
torch.cuda.synchronize()
start = time.perf_counter()
call()
torch.cuda.synchronize()
print(json.dumps([time.perf_counter() - start, call.right(), c.disk_loads()]))
"""
    runs = [python(code, bundle) for _ in range(3)]
    assert all(right and loads == 1 for _, right, loads in runs)
    assert min(seconds for seconds, _, _ in runs) < 0.05


def test_forbid_without_the_kernel_says_how_to_get_it(tmp_path: Path) -> None:
    code = """
try:
    Call()()
except RuntimeError as error:
    print(json.dumps(str(error)))
"""
    message = python(code, tmp_path / "empty", CUTE_KERNELS_JIT="forbid")
    assert "CUTE_KERNELS_JIT=forbid" in message
    assert "python -m cute_kernels precompile --arch" in message
    assert not (tmp_path / "empty").exists()


@pytest.mark.parametrize("spoil", ["truncate", "flip", "foreign", "sidecar"])
def test_a_spoiled_object_is_compiled_again(bundle: Path, tmp_path: Path, spoil: str) -> None:
    folder = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(bundle), str(folder)], check=True)
    path = next(folder.rglob(object_name()))
    data = path.read_bytes()
    other = next(p for p in folder.rglob("*.o") if p != path)
    if spoil == "truncate":
        path.write_bytes(data[: len(data) // 2])
    elif spoil == "flip":
        path.write_bytes(data[:5000] + bytes([data[5000] ^ 255]) + data[5001:])
    elif spoil == "foreign":
        path.write_bytes(other.read_bytes())
        path.with_suffix(".json").write_bytes(other.with_suffix(".json").read_bytes())
    else:
        path.with_suffix(".json").write_text("{")
    code = f"call = Call(); call(); print(json.dumps([call.right(), {COUNTS}]))"
    assert python(code, folder) == [True, [1, 0]]
    assert python(code, folder) == [True, [0, 1]]


def test_compiled_here_and_loaded_there_are_the_same_bytes(bundle: Path, tmp_path: Path) -> None:
    """Whether the compiling process sees the GPU makes no difference."""
    code = f"call = Call(); call(); print(json.dumps([call.right(), {COUNTS}]))"
    assert python(code, tmp_path) == [True, [1, 0]]
    (here,), (ahead,) = tmp_path.rglob("kv_cache.insert-*.o"), bundle.rglob(object_name())
    assert here.name == ahead.name
    assert here.read_bytes() == ahead.read_bytes()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_device_that_is_not_current(bundle: Path) -> None:
    code = f"""
first, second = Call("cuda:1"), Call("cuda:0")
first(); second()
current = torch.cuda.current_device()
torch.cuda.synchronize(0); torch.cuda.synchronize(1)
print(json.dumps([first.right(), second.right(), current, {COUNTS}]))
"""
    assert python(code, bundle, CUTE_KERNELS_JIT="forbid") == [True, True, 0, [0, 1]]
