# SPDX-License-Identifier: Apache-2.0
"""python -m cute_kernels verify: what it runs, what it says, and what it keeps."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from cute_kernels import cli_verify
from cute_kernels.isa_probes import check
from cute_kernels.runtime import cache, registry, trust
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime import isolated as isolated_
from cute_kernels.runtime import precompile as precompile_
from cute_kernels.runtime import verify as verify_
from cute_kernels.runtime.key import KernelKey, OpKernel
from cute_kernels.runtime.verify import Verdict
from tests.runtime.test_cli import Capture, run

pytestmark = pytest.mark.usefixtures("machine")


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> list[KernelKey]:
    """What is compiled ahead."""
    compiled: list[KernelKey] = []

    def precompile(keys: Iterable[KernelKey], folder: Path, workers: int | None, delayed: bool) -> Iterator[None]:
        for key in () if delayed else keys:
            compiled.append(key)
            yield None

    monkeypatch.setattr(precompile_, "precompile", precompile)
    monkeypatch.setattr(trust, "gpu_of", lambda index: {"name": "A GPU"})
    return compiled


def test_verify_without_a_gpu_verifies_nothing(capsys: Capture) -> None:
    for arguments in ((), ("--json",), ("--layers",)):
        status, out, err = run(capsys, "verify", *arguments)
        assert (status, out) == (2, "")
        assert "no CUDA device" in err
    status, _, err = run(capsys, "verify", "--op", "sparse")
    assert status == 2
    assert "sparse_mla_decode" in err


VERDICTS = {
    "quantize_and_insert_k_cache": Verdict("quantize_and_insert_k_cache", "pass", 7, "", 3.25),
    "save_partial_states": Verdict("save_partial_states", "unsupported", 0, "sm_75 [old]"),
}


@pytest.mark.parametrize("bad", [None, "fail", "no examples"])
def test_verify_reports_a_verdict_per_op(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, gpu: SimpleNamespace, bad: str | None
) -> None:
    found = dict(VERDICTS)
    if bad:
        found["mqa_logits"] = Verdict("mqa_logits", bad, 1, "out: 3 of 9 bytes differ")

    def isolated(names: Iterable[str], function: Any, timeout: float, workers: int) -> Any:
        if function is verify_.needs_by_name:
            return [verify_.Needs(name, ()) for name in names]
        assert function is verify_.verify_by_name
        return [found.get(name, Verdict(name, "no kernel")) for name in names]

    monkeypatch.setattr(isolated_, "run_isolated", isolated)
    status, out, _ = run(capsys, "verify")
    assert status == (1 if bad else 0)
    assert "A GPU, sm_90a" in out
    assert "pass        quantize_and_insert_k_cache, 7 examples in 3.2 s" in out
    assert "sm_75 [old]" in out
    assert "no kernel   sparse_mla_decode" in out
    assert ("out: 3 of 9 bytes differ" in out) is bool(bad)
    counts = Counter(found[name].status if name in found else "no kernel" for name in registry.all_ops())
    assert dict(part.split(" ", 1)[::-1] for part in out.splitlines()[-1].split(", ")) == {
        status: str(count) for status, count in counts.items()
    }
    status, out, _ = run(capsys, "verify", "--json")
    assert status == (1 if bad else 0)
    parsed = json.loads(out)
    assert (parsed["gpu"], parsed["arch"]) == ("A GPU", "sm_90a")
    assert {v["name"] for v in parsed["verdicts"]} == set(registry.all_ops())
    only = json.loads(run(capsys, "verify", "--json", "--op", "save_partial_states")[1])
    assert [v["name"] for v in only["verdicts"]] == ["save_partial_states"]


def test_verify_runs_layers_when_asked(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, gpu: SimpleNamespace, no_compiler: list[KernelKey]
) -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from layers import verify as layers_verify

    asked: list[str] = []

    def isolated(names: Iterable[str], function: Any, timeout: float, workers: int) -> Any:
        asked.append(f"{function.__module__}.{function.__name__}")
        if function is verify_.needs_by_name:
            return [verify_.Needs(name, ()) for name in names]
        return [Verdict(name, "pass", 1) for name in names]

    monkeypatch.setattr(isolated_, "run_isolated", isolated)
    status, out, _ = run(capsys, "verify", "--layers", "--json")
    assert status == 0
    assert asked == [
        "cute_kernels.runtime.verify.needs_by_name",
        "cute_kernels.runtime.verify.verify_by_name",
        "cute_kernels.layers.verify.verify_layer",
    ]
    assert set(no_compiler) == set(layers_verify.keys("sm_90a"))
    assert {"layer SWA", "layer C4A", "layer C128A", "layers V4.1"} <= {v["name"] for v in json.loads(out)["verdicts"]}
    monkeypatch.setattr(cli_verify.importlib.util, "find_spec", lambda name: None)
    status, _, err = run(capsys, "verify", "--layers", "--op", "mqa_logits")
    assert status == 2
    assert "the package cute_kernels.layers is not installed" in err


@pytest.mark.full
def test_layers_agree_with_themselves_and_a_wrong_op_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from layers import verify as layers_verify

    verdict = layers_verify.verify_layer("layer SWA", "cpu")
    assert (verdict.status, verdict.cases) == ("pass", len(layers_verify.STEPS))
    assert "ops ran their references" in verdict.detail
    assert "CUTE_KERNELS_FALLBACK" not in os.environ
    right = layers_verify._run
    factor = {"cpu": 1.0, "x": 1.1}
    monkeypatch.setattr(layers_verify, "_run", lambda ratio, device: right(ratio, "cpu") * factor[device])
    wrong = layers_verify.verify_layer("layer SWA", "x")
    assert wrong.status == "fail"
    assert "relative difference 0.1" in wrong.detail
    monkeypatch.setattr(layers_verify, "_run", lambda ratio, device: right(7, device))
    broken = layers_verify.verify_layer("layer SWA", "cpu")
    assert broken.status == "fail"
    assert "ConfigError" in broken.detail


# ---- an architecture's own kernel beside a portable one --------------------------------------------------------------


@dataclass(frozen=True)
class Own(KernelKey):
    kernel_name: ClassVar[str] = "tests.own"

    @property
    def instructions(self) -> tuple[str, ...]:
        return ("tcgen05.mma",)


@dataclass(frozen=True)
class Pair(Own):
    kernel_name: ClassVar[str] = "tests.pair"


@dataclass(frozen=True)
class Portable(KernelKey):
    kernel_name: ClassVar[str] = "tests.portable"


OP = "quantize_and_insert_k_cache"
OWN, PAIR, PORTABLE = (f"{OP} ({kernel})" for kernel in (Own.kernel_name, Pair.kernel_name, verify_.PORTABLE))


class Blackwell:
    """A machine where OP has three kernels, of which some may be wrong, all in this process and on the CPU.

    ran        kernels that ran, by key
    wrong      kernels that are
    is_taken   which calls own kernels are for
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpu: SimpleNamespace) -> None:
        gpu.capability = (10, 0)
        monkeypatch.setattr(check, "ARCHS", ())  # no facts: test_verify_facts.py
        self.monkeypatch = monkeypatch
        self.ran: list[KernelKey] = []
        self.wrong: set[type] = set()
        self.is_taken = lambda *args: True
        op = registry.all_ops()[OP]
        self.reference = op.reference
        kernel = OpKernel[Any](lambda call: self.launch(*call), lambda call: "", lambda *_: [])
        ops = {OP: replace(op, kernel=lambda: kernel)}
        for module in (registry, verify_):
            monkeypatch.setattr(module, "all_ops", lambda: ops)
        small = [example for example in (verify_.examples_of(op) or list)() if example.args[0].shape[0] < 20]
        monkeypatch.setattr(verify_, "examples_of", lambda op: lambda: small)
        monkeypatch.setattr(verify_, "_device", lambda: torch.device("cpu"))
        monkeypatch.setattr(compile_, "_link_once", lambda key: lambda *args: self.ran.append(key))
        monkeypatch.setattr(compile_, "_functions", {})
        monkeypatch.setattr(compile_, "_relaxed_capture", contextlib.nullcontext)

        def in_this_process(names: Iterable[str], function: Any, timeout: float, workers: int) -> Iterator[Any]:
            return map(function, reversed(list(names)))

        monkeypatch.setattr(isolated_, "run_isolated", in_this_process)
        self.restart()

    def launch(self, *args: Any) -> None:
        owns = (Pair, Own) if self.is_taken(*args) else ()
        key = next((own for own in owns if trust.is_trusted(OP, own.kernel_name, 0)), Portable)("sm_100a")
        before = len(self.ran)
        compile_.launch(key, 0)
        if len(self.ran) > before:
            self.reference(*args)
            if type(key) in self.wrong:
                verify_.raw_memory(args[1])[-1] ^= 1

    def restart(self) -> None:
        """A new process, which knows what is on disk."""
        self.monkeypatch.setattr(trust, "_known", {})
        self.monkeypatch.setattr(trust, "_warned", set())

    def trusts(self) -> list[type]:
        self.restart()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [own for own in (Pair, Own) if trust.is_trusted(OP, own.kernel_name, 0)]


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch, gpu: SimpleNamespace) -> Blackwell:
    return Blackwell(monkeypatch, gpu)


def test_all_kernels_are_verified_and_the_verdicts_kept(
    capsys: Capture, blackwell: Blackwell, no_compiler: list[KernelKey]
) -> None:
    assert not blackwell.trusts()
    status, out, _ = run(capsys, "verify", "--json")
    assert status == 0
    found = {v["name"]: (v["status"], v["op"], v["kernel"]) for v in json.loads(out)["verdicts"]}
    assert found == {
        OWN: ("pass", OP, "tests.own"),
        PAIR: ("pass", OP, "tests.pair"),
        PORTABLE: ("pass", "", ""),
    }
    assert set(no_compiler) == set(blackwell.ran) == {Own("sm_100a"), Pair("sm_100a"), Portable("sm_100a")}
    assert no_compiler[-1] == Portable("sm_100a"), "what takes longest comes first"
    assert blackwell.trusts() == [Pair, Own]
    info = json.loads(run(capsys, "info", "--json")[1])
    assert info["gpus"][0]["verdicts"] == {OP: {"tests.own": "pass", "tests.pair": "pass"}}
    assert f"{OP}: tests.own: pass (verify)" in run(capsys, "info")[1]


@pytest.mark.parametrize(("wrong", "name"), [(Own, OWN), (Pair, PAIR), (Portable, PORTABLE)])
def test_a_wrong_kernel_fails_alone(capsys: Capture, blackwell: Blackwell, wrong: type, name: str) -> None:
    run(capsys, "verify")
    blackwell.wrong = {wrong}
    status, out, err = run(capsys, "verify")
    assert status == 1
    assert f"fail        {name}\n" in out
    assert out.count("bytes differ") == 1
    assert f"fail: {name}: " in err
    assert blackwell.trusts() == [own for own in (Pair, Own) if own is not wrong]


def test_only_calls_that_own_kernels_took_count(capsys: Capture, blackwell: Blackwell) -> None:
    blackwell.is_taken = lambda k, *_: k.shape[0] > 1
    cases = {v["name"]: v["cases"] for v in json.loads(run(capsys, "verify", "--json")[1])["verdicts"]}
    assert 0 < cases[OWN] == cases[PAIR] < cases[PORTABLE]
    assert blackwell.trusts() == [Pair, Own]
    blackwell.is_taken = lambda *args: False
    assert [v["name"] for v in json.loads(run(capsys, "verify", "--json")[1])["verdicts"]] == [OP]
    assert not blackwell.trusts(), "what never ran is not trusted, whatever passed"


def test_a_kernel_that_fails_its_soak_is_not_trusted(
    capsys: Capture, blackwell: Blackwell, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = verify_.examples_of(registry.all_ops()[OP])
    monkeypatch.setattr(verify_, "cases_of", lambda op, kind="EXAMPLES": cases)
    monkeypatch.setattr(verify_, "SOAK_RUNS", 3)
    status, out, _ = run(capsys, "verify")
    assert (status, f"pass        {PAIR}, soak" in out, f"pass        {OWN}, soak" in out) == (0, True, True)
    assert blackwell.trusts() == [Pair, Own]
    monkeypatch.setattr(verify_, "_first_other", lambda *args: 2)
    status, out, _ = run(capsys, "verify")
    assert status == 1
    assert f"fail        {PAIR}, soak\n" in out
    assert "run 2 of 3 differs from the first" in out
    assert not blackwell.trusts()


def test_interrupted_while_compiling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels with delays, which compile beside the others, are not waited for."""
    begun = threading.Event()

    def precompile(keys: Iterable[KernelKey], folder: Path, workers: int | None, delayed: bool) -> Iterator[None]:
        if not delayed:
            assert begun.wait(60)
            raise KeyboardInterrupt
        assert folder == tmp_path
        for _ in range(10**5):
            begun.set()
            time.sleep(0.01)
            yield None

    monkeypatch.setattr(precompile_, "precompile", precompile)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        cli_verify._compile([Own("sm_90a")], [Own("sm_90a")], None, tmp_path)
    assert time.monotonic() - start < 100


def test_what_was_verified_before_an_interruption_is_kept(
    capsys: Capture, blackwell: Blackwell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def isolated(names: Iterable[str], function: Any, timeout: float, workers: int) -> Iterator[Any]:
        for name in names:
            if name == OWN:
                raise KeyboardInterrupt
            yield function(name)

    def run_again(needs: Any, name: str) -> Any:
        found = needs(name)
        return replace(found, kernels=tuple(sorted(found.kernels, reverse=True)))

    monkeypatch.setattr(verify_, "needs_by_name", partial(run_again, verify_.needs_by_name))
    monkeypatch.setattr(isolated_, "run_isolated", isolated)
    status, out, err = run(capsys, "verify")
    assert status == 130
    assert f"pass        {PAIR}," in out
    assert OWN not in out
    assert "interrupted" in err
    assert blackwell.trusts() == [Pair]


def test_a_process_that_dies_is_a_failure_of_the_kernel(
    capsys: Capture, blackwell: Blackwell, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(capsys, "verify")
    assert blackwell.trusts()

    def isolated(names: Iterable[str], function: Any, timeout: float, workers: int) -> Iterator[Any]:
        for name in names:
            hangs = name in (OWN, PAIR) and function is verify_.verify_by_name
            yield Verdict(name, "fail", detail="hung") if hangs else function(name)

    monkeypatch.setattr(isolated_, "run_isolated", isolated)
    status, out, _ = run(capsys, "verify")
    assert (status, "hung" in out) == (1, True)
    assert not blackwell.trusts()


@pytest.mark.parametrize("dies", [False, True])
def test_an_op_whose_kernels_are_not_found_is_a_failure(
    capsys: Capture, blackwell: Blackwell, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    run(capsys, "verify")
    assert blackwell.trusts()
    blackwell.ran.clear()

    def broken(op: Any) -> Any:
        raise RuntimeError("no examples today\nmore")

    def isolated(names: Iterable[str], function: Any, timeout: float, workers: int) -> Iterator[Any]:
        assert function is verify_.needs_by_name or not list(names)
        for name in names:
            yield Verdict(name, "fail", detail="the process died with exit code 1") if dies else function(name)

    monkeypatch.setattr(verify_, "examples_of", broken)
    monkeypatch.setattr(isolated_, "run_isolated", isolated)
    status, out, _ = run(capsys, "verify", "--json")
    assert status == 1
    (verdict,) = json.loads(out)["verdicts"]
    why = "the process died with exit code 1" if dies else "RuntimeError: no examples today"
    assert (verdict["name"], verdict["status"], verdict["detail"]) == (OP, "fail", f"finding kernels: {why}")
    assert blackwell.ran == []
    assert not blackwell.trusts()


def test_edited_sources_are_verified_again(
    capsys: Capture, blackwell: Blackwell, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(capsys, "verify")
    edited = cache.Sources(cache.PACKAGE, {**cache.SOURCES.files, "numerics.py": b"edited"})
    monkeypatch.setattr(cache, "SOURCES", edited)
    monkeypatch.setattr(cache.Sources, "is_current", lambda self, module=None: True)
    assert not blackwell.trusts()
    run(capsys, "verify")
    assert blackwell.trusts()


@pytest.mark.parametrize("has_folder", [True, False])
def test_without_a_folder_to_write_to(
    capsys: Capture, blackwell: Blackwell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_folder: bool
) -> None:
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file" / "cache") if has_folder else ""
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, folder)
    status, out, err = run(capsys, "verify")
    assert status == 0
    assert f"pass        {OWN}," in out
    assert "the verdicts were not kept: " in err
    assert ("Not a directory" if has_folder else "there is no kernel cache") in err
    assert os.environ[cache.DIRECTORY_VARIABLE] == folder
    assert not blackwell.trusts()


def test_nothing_is_compiled_where_that_is_forbidden(
    capsys: Capture, blackwell: Blackwell, monkeypatch: pytest.MonkeyPatch, no_compiler: list[KernelKey]
) -> None:
    monkeypatch.setenv(compile_.JIT_VARIABLE, "forbid")
    assert run(capsys, "verify")[0] == 0
    assert no_compiler == []
    assert blackwell.trusts()
