# SPDX-License-Identifier: Apache-2.0
"""What is logged, and that nothing is unless somebody asks."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import torch

from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime import log, ops
from cute_kernels.runtime.key import OpKernel
from tests.helpers import run_in_forks
from tests.runtime.test_compile import Compiler, Key, compiler, forget  # noqa: F401
from tests.runtime.test_ops import DoubleCall, args, kernel, op_with  # noqa: F401


@pytest.fixture(autouse=True)
def unconfigured() -> Iterator[None]:
    """The logger as the variable may have set it up is put back."""
    before = list(log.logger.handlers), log.logger.level, log.logger.propagate
    yield
    log.logger.handlers[:], log.logger.level, log.logger.propagate = before
    log.logger.manager._clear_cache()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("value", "printed"), [("info", "1"), ("debug", "12"), ("", "")])
def test_the_variable(value: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(value)
    log.logger.info("1")
    log.logger.debug("2")
    lines = capsys.readouterr().err.splitlines()
    assert "".join(line[-1] for line in lines) == printed
    assert all(f" {os.getpid()} cute_kernels " in line for line in lines)


def test_another_value_is_refused() -> None:
    with pytest.raises(ValueError, match="CUTE_KERNELS_LOG: expected 'info' or 'debug', got 'loud'"):
        log.configure("loud")


@pytest.mark.full
def test_the_variable_is_read_at_import() -> None:
    code = "import os; os.environ[{!r}] = {!r}; import cute_kernels, logging; "
    code += "logging.getLogger('cute_kernels').info('{}')"
    done = run_in_forks([code.format(log.VARIABLE, *each) for each in (("", "silence"), ("info", "hello"))])
    assert (done.returncode, done.stdout) == (0, "")
    assert (done.stderr.count("hello"), done.stderr.count("silence")) == (1, 0)


def test_compiling_and_loading(
    compiler: Compiler,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    key = Key("sm_90a")
    with caplog.at_level(logging.INFO, "cute_kernels"):
        compile_.function(key)
        first = caplog.messages
        caplog.clear()
        forget(monkeypatch)
        compile_.function(key)
        second = caplog.messages
        caplog.clear()
        compile_.function(key)(1)
        assert caplog.messages == [], "what repeats is not logged"
    assert [line.removeprefix(f"{key.identity}: ").split()[0] for line in first] == ["compiling", "compiled", "loaded"]
    assert "does not hold it" in first[0]
    assert "compiled in 0.5 s, 32 registers" in first[1]
    assert [line.removeprefix(f"{key.identity}: ").split()[0] for line in second] == ["in", "loaded"]


def test_a_reference_in_place_of_a_kernel_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ops, "_told", set())
    monkeypatch.setenv(ops.FALLBACK_VARIABLE, "reference")
    with caplog.at_level(logging.INFO, "cute_kernels"):
        for _ in range(2):
            ops._choose_cuda(op_with(None), args(3))
    (line,) = caplog.messages
    assert line == "test_double: the reference runs, slowly: no kernel for this call: it has no CUDA kernel yet"


@pytest.mark.parametrize("recording", [False, True])
def test_a_call_names_its_kernels(
    compiler: Compiler,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    recording: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def body(*given: object) -> None:
        compile_.launch(Key("sm_90a", 7), 0, given)

    op = op_with(None)
    with caplog.at_level(logging.DEBUG, "cute_kernels"):
        if recording:
            with compile_.record_launches() as launches:
                compile_.launch(Key("sm_90a", 1), 0)
                ops._logged(op, body)(torch.ones(2, 3).bfloat16(), 4)
            assert [key for key, *_ in launches] == [Key("sm_90a", 1), Key("sm_90a", 7)]
        else:
            ops._logged(op, body)(torch.ones(2, 3).bfloat16(), 4)
    assert caplog.messages[-1] == "test_double(bfloat16[2, 3], 4): tests.compile(arch='sm_90a', rows=7)"


def test_nothing_is_printed_without_the_variable(
    kernel: OpKernel[DoubleCall],  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.logger.warning("even a warning is the application's to show")
    ops._choose_cuda(op_with(kernel), args(2))
    assert capsys.readouterr() == ("", "")
