# SPDX-License-Identifier: Apache-2.0
"""Whether an architecture's own kernel may run: by what verify has kept of these sources and this GPU alone."""

from __future__ import annotations

import json
import multiprocessing
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_kernels import support
from cute_kernels.runtime import arch as arch_
from cute_kernels.runtime import cache, trust
from tests.runtime.test_cache import ENVIRONMENT

OP, KERNEL = "sparse_mla_decode", "sparse_mla.blackwell.decode"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A Blackwell whose name, driver and capability can be set; `forget` is a new process, `edit` another source."""
    state = SimpleNamespace(name="B", driver="CUDA 13.0", capability=(10, 0), environment=dict(ENVIRONMENT))

    def forget() -> None:
        arch_.arch_of.cache_clear()
        monkeypatch.setattr(trust, "_known", {})
        monkeypatch.setattr(trust, "_warned", set())

    def edit(content: bytes) -> None:
        monkeypatch.setattr(cache, "SOURCES", cache.Sources(cache.PACKAGE, {"numerics.py": content}))

    def gpu_of(index: int) -> dict[str, str]:
        return {"name": state.name, "capability": str(state.capability), "driver": state.driver}

    state.forget, state.edit = forget, edit
    monkeypatch.setattr(trust, "gpu_of", gpu_of)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: state.capability)
    monkeypatch.setattr(cache, "environment", lambda: dict(state.environment))
    monkeypatch.setattr(cache.Sources, "is_current", lambda self, module=None: True)
    edit(b"as it was")
    forget()
    yield state
    arch_.arch_of.cache_clear()


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def answer(gpu: SimpleNamespace, op: str = OP, kernel: str = KERNEL) -> bool:
    """What a new process is told."""
    gpu.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trust.is_trusted(op, kernel, 0)


def test_a_kernel_that_fails_takes_no_other_with_it(gpu: SimpleNamespace) -> None:
    pair = "sparse_mla.blackwell.decode_2cta"
    trust.keep(OP, KERNEL, 0, "pass", 9, "")
    trust.keep(OP, pair, 0, "fail", 1, "hangs")
    assert answer(gpu)
    assert not answer(gpu, kernel=pair)
    assert trust.verdicts(0) == {OP: {KERNEL: "pass", pair: "fail"}}


def verdict_file(folder: Path) -> Path:
    (found,) = folder.rglob("*.json")
    return found


def test_nothing_is_trusted_before_verify_has_passed_it(gpu: SimpleNamespace, folder: Path) -> None:
    assert not answer(gpu)
    assert not folder.exists(), "asking writes nothing"
    assert trust.keep(OP, KERNEL, 0, "pass", 9, "") == ""
    assert answer(gpu)
    assert not answer(gpu, "mqa_logits")
    assert not answer(gpu, kernel="sparse_mla.blackwell.decode_2cta")
    assert trust.keep(OP, KERNEL, 0, "fail", 3, "out differs") == ""
    assert not answer(gpu)
    assert [p.name for p in folder.rglob("*") if p.is_file()] == [verdict_file(folder).name]


@pytest.mark.parametrize(("status", "cases"), [("unsupported", 0), ("no examples", 0), ("pass", 0)])
def test_what_did_not_run_is_not_trusted(gpu: SimpleNamespace, folder: Path, status: str, cases: int) -> None:
    trust.keep(OP, KERNEL, 0, "pass", 9, "")
    assert trust.keep(OP, KERNEL, 0, status, cases, "") == ""
    assert not answer(gpu)
    assert not list(folder.rglob("*.json"))


@pytest.mark.parametrize(
    "change",
    [
        lambda gpu: setattr(gpu, "name", "B Ultra"),
        lambda gpu: setattr(gpu, "driver", "CUDA 13.1"),
        lambda gpu: setattr(gpu, "capability", (10, 3)),
        lambda gpu: gpu.edit(b"edited"),
        lambda gpu: gpu.environment.update(dsl="4.9.0"),
    ],
)
def test_a_verdict_is_of_one_gpu_and_one_set_of_sources(gpu: SimpleNamespace, folder: Path, change: Any) -> None:
    trust.keep(OP, KERNEL, 0, "pass", 9, "")
    before = verdict_file(folder)
    change(gpu)
    assert not answer(gpu)
    gpu.forget()
    here = trust.path_of(cache.Store(folder), OP, KERNEL, 0)
    here.parent.mkdir(parents=True, exist_ok=True)
    here.write_bytes(before.read_bytes())
    assert not answer(gpu), "nor does a copy under another name count"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[1]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"status": "pass"}',
        b'{"status": "pass", "detail": ""}',
    ],
)
def test_what_cannot_be_read_is_no_verdict(gpu: SimpleNamespace, folder: Path, content: bytes) -> None:
    trust.keep(OP, KERNEL, 0, "pass", 9, "")
    path = verdict_file(folder)
    path.write_bytes(content)
    assert not answer(gpu)
    path.unlink()
    path.mkdir()
    assert not answer(gpu)


def test_another_status_is_no_verdict(gpu: SimpleNamespace, folder: Path) -> None:
    trust.keep(OP, KERNEL, 0, "pass", 9, "")
    path = verdict_file(folder)
    path.write_text(json.dumps({**json.loads(path.read_text()), "status": "passed"}))
    assert not answer(gpu)


def test_a_record_counts_unless_verify_failed_here(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(support.RECORDS, (OP, "sm_100a"), "b200/sparse_mla_decode.json")
    gpu.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trust.is_trusted(OP, KERNEL, 0)
    monkeypatch.setattr(support, "PORTABLE_RECORDS", frozenset({(OP, "sm_100a")}))
    assert not answer(gpu)
    monkeypatch.setattr(support, "PORTABLE_RECORDS", frozenset())
    assert answer(gpu)
    trust.keep(OP, KERNEL, 0, "fail", 0, "hangs")
    assert not answer(gpu)


def test_hopper_needs_no_verdict(gpu: SimpleNamespace) -> None:
    gpu.capability = (9, 0)
    assert answer(gpu)


def test_the_warning_says_once_what_runs_and_how_to_change_that(gpu: SimpleNamespace) -> None:
    asked = ((OP, KERNEL, 0), (OP, "other", 0), (OP, KERNEL, 1), ("mqa_logits", "indexer.blackwell.logits", 0))
    with pytest.warns(RuntimeWarning) as caught:
        assert not any(trust.is_trusted(*who) for who in asked)
    first, second = (str(w.message) for w in caught)
    assert "sparse_mla_decode: a slower kernel runs" in first
    assert f"{KERNEL} has not been verified on this GPU (B)" in first
    assert first.endswith("python -m cute_kernels verify --op sparse_mla_decode.")
    assert "mqa_logits" in second
    trust.keep(OP, KERNEL, 0, "fail", 1, "out: 3 of 9 bytes differ")
    gpu.forget()
    with pytest.warns(RuntimeWarning, match="failed on this GPU .out: 3 of 9 bytes differ. .B."):
        trust.is_trusted(OP, KERNEL, 0)


def test_without_a_cache_nothing_is_kept(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, "")
    assert "there is no kernel cache" in trust.keep(OP, KERNEL, 0, "pass", 9, "")
    with pytest.warns(RuntimeWarning, match=f"set {cache.DIRECTORY_VARIABLE}"):
        assert not trust.is_trusted(OP, KERNEL, 0)


def test_a_folder_that_cannot_be_written(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise OSError(30, "Read-only file system")

    trust.keep(OP, KERNEL, 0, "fail", 0, "hangs")
    monkeypatch.setattr(cache, "replace_file", refuse)
    assert "Read-only" in trust.keep(OP, KERNEL, 0, "pass", 9, "")
    assert not answer(gpu)


def test_sources_that_changed_meanwhile_are_not_judged(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.Sources, "is_current", lambda self, module=None: False)
    assert "changed" in trust.keep(OP, KERNEL, 0, "pass", 9, "")
    assert not answer(gpu)


def test_a_choice_wins_and_leaves_no_trace(gpu: SimpleNamespace) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with trust.choose(True) as asked:
            assert trust.is_trusted(OP, KERNEL, 0)
            with trust.choose(False) as inner:
                assert not trust.is_trusted("mqa_logits", "logits", 0)
            with trust.choose("pair") as one:
                assert [trust.is_trusted(OP, kernel, 0) for kernel in (KERNEL, "pair")] == [False, True]
        assert (list(asked), list(inner)) == ([(OP, KERNEL)], [("mqa_logits", "logits")])
        assert list(one) == [(OP, KERNEL), (OP, "pair")]
    assert not answer(gpu)


def write_often(folder: str, status: str, patch: pytest.MonkeyPatch, both: Any) -> None:
    patch.setenv(cache.DIRECTORY_VARIABLE, folder)
    patch.setattr(cache, "environment", lambda: dict(ENVIRONMENT))
    patch.setattr(trust, "gpu_of", lambda index: {"name": "B"})
    patch.setattr(trust, "arch_of", lambda index: "sm_100a")
    both.wait(60)
    for number in range(100):
        assert trust.keep(OP, KERNEL, 0, status, 9, f"{status} {number}") == ""
        found = trust.read(OP, KERNEL, 0)
        assert found is not None
        assert found["detail"].startswith(found["status"])


def write_from_elsewhere(folder: str, both: Any) -> None:
    write_often(folder, "fail", pytest.MonkeyPatch(), both)


@pytest.mark.full
def test_processes_do_not_disturb_each_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader finds one writer's verdict whole, never a piece of it, never none."""
    context = multiprocessing.get_context("spawn")
    both = context.Barrier(2)
    writer = context.Process(target=write_from_elsewhere, args=(str(folder), both))
    writer.start()
    write_often(str(folder), "pass", monkeypatch, both)
    writer.join()
    assert writer.exitcode == 0
    assert len([p for p in folder.rglob("*") if p.is_file()]) == 1
