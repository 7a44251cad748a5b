# SPDX-License-Identifier: Apache-2.0
"""python -m cute_kernels info | precompile | verify"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import cute_kernels
from cute_kernels import cli, support
from cute_kernels.models import MODELS
from cute_kernels.runtime import arch as arch_
from cute_kernels.runtime import cache, registry
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime import precompile as precompile_
from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.report import Facts, Report

ROOT = Path(__file__).parent.parent.parent
Capture = pytest.CaptureFixture[str]


@dataclass(frozen=True)
class Key(KernelKey):
    kernel_name: ClassVar[str] = "tests.cli"
    rows: int = 1


FACTS = Facts(40, 0, 0, 0, 2048, {"wgmma": 32, "bulk.load": 4}, 1.5)


pytestmark = pytest.mark.usefixtures("machine")


def run(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    try:
        status = cli.main(arguments)
    except SystemExit as error:
        status = int(error.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


# ---- info ------------------------------------------------------------------------------------------------------------


def test_info_says_what_is_supported(capsys: Capture) -> None:
    status, out, err = run(capsys, "info")
    assert (status, err) == (0, "")
    assert torch.__version__ in out
    assert out.startswith("No GPU here")
    groups = listed_ops(out)
    assert "quantize_and_insert_k_cache" in groups["measured sm_90a, compiled sm_80 sm_89 sm_100a sm_103a sm_120a"]
    assert sorted(name for names in groups.values() for name in names) == sorted(registry.all_ops())
    assert "reference everywhere" not in groups


def listed_ops(out: str) -> dict[str, list[str]]:
    """What `info` says of ops -> their names."""
    lists = re.findall(r"^  (\S.*): (\d+) ops?\n((?:    .*\n)+)", out, re.M)
    groups = {what: names.replace("\n", " ").replace(" ", "").split(",") for what, _, names in lists}
    assert [len(names) for names in groups.values()] == [int(count) for _, count, _ in lists]
    return groups


def test_info_lists_ops_without_a_kernel(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "all_ops", lambda: ["norm_of_tomorrow"])
    _, out, _ = run(capsys, "info")
    assert listed_ops(out) == {"reference everywhere": ["norm_of_tomorrow"]}


def test_info_as_json(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    store = cache.Store(cache.default_directory() or Path())
    store.write(Key("sm_90a"), b"x" * 100, FACTS)
    status, out, _ = run(capsys, "info", "--json")
    found = json.loads(out)
    assert status == 0
    assert (found["gpus"], found["arch"]) == ([], "sm_100a")
    assert found["cache"]["directory"] == str(store.root)
    assert [(c["arch"], c["objects"], c["bytes"], c["current"]) for c in found["cache"]["contents"]] == [
        ("sm_90a", 1, 100, True)
    ]
    assert found["variables"]["CUTE_KERNELS_CACHE_DIR"] == str(store.root)
    assert set(found["support"]) == set(registry.all_ops())
    for by_arch in found["support"].values():
        assert list(by_arch) == list(support.ARCHS)
        assert all(cell["status"] in ("measured", "compiled", "partly", "reference", "no") for cell in by_arch.values())
        assert all((cell["record"] is not None) == (cell["status"] == "measured") for cell in by_arch.values())
    assert "sm_90a: 1 kernels" in run(capsys, "info")[1]


def test_info_on_gpus(capsys: Capture, gpu: SimpleNamespace) -> None:
    found = json.loads(run(capsys, "info", "--json")[1])
    assert found["gpus"] == [{"name": "A GPU", "arch": "sm_90a", "unsupported": None, "verdicts": {}}]
    assert found["arch"] == "sm_90a"
    arch_.arch_of.cache_clear()
    gpu.capability = (7, 5)
    found = json.loads(run(capsys, "info", "--json")[1])
    assert found["gpus"][0]["arch"] is None
    assert "got 7.5" in found["gpus"][0]["unsupported"]
    status, out, _ = run(capsys, "info")
    assert status == 0
    assert out.startswith("A GPU: no kernel runs on this GPU")
    assert "got 7.5" in out


@pytest.mark.parametrize(
    ("capability", "sentence"),
    [
        (
            (9, 0),
            r"A GPU, sm_90a: of \d+ ops \d+ have kernels measured on it(, \d+ kernels? compiled [^,]*)?\.\n",
        ),
        ((10, 0), r"A GPU, sm_100a: of \d+ ops \d+ kernels compiled .* run once `python -m cute_kernels verify` has"),
        ((8, 6), r"A GPU, sm_86: .* were never run: start with `python -m cute_kernels verify`"),
    ],
)
def test_info_says_what_a_gpu_will_run(
    capsys: Capture, gpu: SimpleNamespace, capability: tuple[int, int], sentence: str
) -> None:
    gpu.capability = capability
    out = run(capsys, "info")[1]
    assert re.match(sentence, out)
    arch = arch_.ARCH_OF_CAPABILITY[capability]
    if arch in support.ARCHS:
        assert {what.split()[1] for what in listed_ops(out)} == {arch}


# ---- the whole -------------------------------------------------------------------------------------------------------


def test_without_a_command_it_helps(capsys: Capture) -> None:
    status, out, err = run(capsys)
    assert (status, err) == (0, "")
    assert "{info,precompile,verify}" in out


def test_version(capsys: Capture) -> None:
    assert run(capsys, "--version") == (0, f"cute_kernels {cute_kernels.__version__}\n", "")


# ---- precompile ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--arch", "sm_75"], "kernels need sm_80 or newer"),
        (["--arch", "sm_77x"], "arch: expected one of sm_80"),
        (["--arch", "sm_90"], "got 'sm_90': did you mean sm_90a?"),
        (["--arch", "sm100"], "did you mean sm_100a?"),
        ([], "--arch: expected a compile target"),
        (["--arch", "sm_90a", "--tp", "3"], "tp: expected a divisor of num_attention_heads = 64, got 3"),
        (["--arch", "sm_90a", "--tp", "0"], "--tp: expected a positive integer"),
        (["--arch", "sm_90a", "--tp", "two"], "--tp: invalid integer value"),
        (["--arch", "sm_90a", "--model", "v3"], "--model: invalid choice"),
        (["--arch", "sm_90a", "--config", "/nowhere/config.json"], "cannot read /nowhere/config.json"),
        (["--arch", "sm_90a", "--model", "v4-pro", "--all"], "not allowed with"),
        (
            ["--arch", "sm_90a", "--out", "/dev/null/x"],
            "--out: expected a folder that can be written, got /dev/null/x",
        ),
        (["--arch", "sm_90a", "--out", __file__], "test_cli.py: File exists"),
    ],
)
def test_requests_that_cannot_be_met(capsys: Capture, arguments: list[str], why: str) -> None:
    status, out, err = run(capsys, "precompile", *arguments)
    assert (status, out) == (2, "")
    assert why in err
    assert err.startswith("python -m cute_kernels precompile: error: ")
    assert err.count("\n") == 1


def test_a_gpu_that_is_too_old(capsys: Capture, gpu: SimpleNamespace) -> None:
    gpu.capability = (7, 5)
    for command in ("precompile", "verify"):
        status, _, err = run(capsys, command)
        assert status == 2
        assert "expected compute capability 8.0" in err
        assert "got 7.5" in err


def test_deployments(tmp_path: Path) -> None:
    def wanted(*arguments: str) -> list[tuple[Any, int]]:
        return cli.wanted_deployments(cli.make_parser().parse_args(["precompile", *arguments]))

    flash, pro, newer = (MODELS[name] for name in ("v4-flash", "v4-pro", "v4.1-flash"))
    assert wanted() == [(flash, 1)]
    assert wanted("--model", "v4-pro", "--tp", "8") == [(pro, 8)]
    assert wanted("--all") == [(m, tp) for m in (flash, pro, newer) for tp in (1, 2, 4, 8)]
    assert wanted("--all", "--tp", "4") == [(flash, 4), (pro, 4), (newer, 4)]
    (tmp_path / "config.json").write_text('{"hidden_size": 7168, "num_attention_heads": 128}')
    ((shape, tp),) = wanted("--config", str(tmp_path / "config.json"), "--tp", "2")
    assert (shape.hidden_size, tp) == (7168, 2)


def test_the_gpus_architecture_is_the_default(gpu: SimpleNamespace) -> None:
    assert cli.wanted_archs(None) == ["sm_90a"]
    assert cli.wanted_archs(["sm_100a", "sm_103a", "sm_100a"]) == ["sm_100a", "sm_103a"]


OUTCOMES = [
    precompile_.Outcome(Key("sm_90a"), "compiled", FACTS, (), 2.0),
    precompile_.Outcome(Key("sm_90a", 2), "cached", FACTS, (), 0.0),
]


@pytest.mark.parametrize(
    ("extra", "status", "shown"),
    [
        ([], 0, "2 of 2 kernels in"),
        (
            [precompile_.Outcome(Key("sm_90a", 3), "failed", None, ("no such [x]",), 1.0)],
            1,
            "2 of 3 kernels",
        ),
        ([precompile_.Outcome(Key("sm_90a", 3), "compiled", FACTS, ("spills: 4 bytes",), 1.0)], 1, "spills: 4 bytes"),
    ],
)
def test_what_precompile_shows(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, extra: list[Any], status: int, shown: str
) -> None:
    outcomes = [*OUTCOMES, *extra]
    asked: list[Any] = []

    def compile_all(keys: Iterable[Any], folder: Path, workers: int | None) -> Any:
        asked.append((list(keys), folder, workers))
        return reversed(outcomes)

    monkeypatch.setattr(registry, "deployment_keys", lambda model, tp, arch: [o.key for o in outcomes])
    monkeypatch.setattr(precompile_, "precompile", compile_all)
    arguments = ["precompile", "--arch", "sm_90a", "--out", str(tmp_path / "out"), "--workers", "3"]
    got, out, err = run(capsys, *arguments)
    assert got == status
    assert shown in out
    for part in ("sm_90a", "40 registers", "0 bytes spilled", "2048 bytes of shared memory", "32 wgmma", "4 bulk.load"):
        assert part in out
    assert (f"CUTE_KERNELS_CACHE_DIR={tmp_path / 'out'} CUTE_KERNELS_JIT=forbid" in out) is ("2 of 3" not in out)
    assert asked == [([o.key for o in outcomes], tmp_path / "out", 3)]
    assert re.match(rf"{len(outcomes)} kernels, \d process(es)?: about \d+ s if none of them is there yet\n", err)
    got, out, _ = run(capsys, *arguments, "--json")
    assert got == status
    quiet = run(capsys, *arguments, "--quiet")
    assert (quiet[0], quiet[2]) == (status, "")
    assert quiet[1].count("tests.cli") == len(extra)
    assert shown in quiet[1]
    kernels = json.loads(out)["kernels"]
    assert [k["status"] for k in kernels] == [o.status for o in outcomes]
    assert kernels[0]["facts"]["instructions"] == {"wgmma": 32, "bulk.load": 4}


def test_progress_without_a_terminal(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line at most every so often, with what is left."""
    now = iter(range(0, 10**6, 4))
    monkeypatch.setattr(cli.time, "perf_counter", lambda: float(next(now)))
    assert list(cli.with_progress(iter("abcdefg"), 7, "compiling")) == list("abcdefg")
    assert capsys.readouterr().err == (
        "compiling: 3 of 7 in 12 s, about 16 s left\ncompiling: 6 of 7 in 24 s, about 4 s left\n"
    )


def test_outcomes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a worker makes of a key: compiled, cached, failed, or with nowhere to keep it."""
    made: list[KernelKey] = []

    def compile_object(key: KernelKey) -> tuple[bytes, Report]:
        if key == Key("sm_90a", 13):
            raise RuntimeError("no\nsuch")
        made.append(key)
        return b"object", Report(**vars(FACTS), key=key, ptx="", cubin=b"")

    monkeypatch.setattr(compile_, "compile_object", compile_object)
    monkeypatch.setattr(cache, "_warned", True)
    first, second = (precompile_.compile_one(Key("sm_90a")) for _ in range(2))
    assert (first.status, second.status, len(made)) == ("compiled", "cached", 1)
    assert first.facts == second.facts == FACTS
    folder = cache.default_directory()
    assert folder is not None
    (known,) = precompile_.precompile([Key("sm_90a"), Key("sm_90a")], folder)
    assert (known.status, known.facts) == ("cached", FACTS), "no process is needed for what is there"
    failed = precompile_.compile_one(Key("sm_90a", 13))
    assert (failed.status, failed.facts, failed.problems) == ("failed", None, ("no\nsuch",))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path / "file"))
    lost = precompile_.compile_one(Key("sm_90a"))
    assert lost.status == "failed", "a kernel that could not be kept is no success"
    assert "file" in lost.problems[0]


@dataclass(frozen=True)
class Deadly(KernelKey):
    """Takes its compiler down with it."""

    kernel_name: ClassVar[str] = "tests.deadly"

    def build(self) -> Any:
        os._exit(3)


def test_a_compiler_that_dies_fails_its_kernel(tmp_path: Path) -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    (outcome,) = precompile_.precompile([Deadly("sm_90a")], tmp_path, workers=1)
    assert (outcome.key, outcome.status) == (Deadly("sm_90a"), "failed")
    assert outcome.problems == ("the compiling process died",)


def test_a_pool_that_breaks_early_fails_each_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its worker dies before all kernels are submitted."""
    submit, submitted = ProcessPoolExecutor.submit, []

    def submit_late(pool: ProcessPoolExecutor, *work: Any) -> Future[Any]:
        if submitted:
            submitted[0].exception()
        submitted.append(submit(pool, *work))
        return submitted[-1]

    monkeypatch.setattr(ProcessPoolExecutor, "submit", submit_late)
    keys = [Deadly("sm_90a"), Key("sm_90a", 1), Key("sm_90a", 2)]
    outcomes = list(precompile_.precompile(keys, tmp_path, workers=1))
    assert len(submitted) == 1
    assert {outcome.key for outcome in outcomes} == set(keys)
    assert {(outcome.status, outcome.problems) for outcome in outcomes} == {("failed", ("the compiling process died",))}


@pytest.mark.parametrize(("seconds", "said"), [(0, "0 s"), (99, "99 s"), (100, "2 min"), (6000, "100 min")])
def test_durations(seconds: float, said: str) -> None:
    assert cli._duration(seconds) == said
