# SPDX-License-Identifier: Apache-2.0
"""What both plug-ins share: the variable, the versions, patches that wait for an import, one line a reason."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cute_kernels import plugins
from cute_kernels.plugins import PARTS, VARIABLE, Plugin, numbers, on_import, rebind
from tests.plugins import seams

ROOT = Path(__file__).parents[2]


PROVEN = "decode", "norm"


def plugin(version: str = "0.33.0") -> Plugin:
    found = Plugin("vllm", ((0, 33), (0, 34)), proven=PROVEN, release=(0, 33, 0))
    found.version = lambda: version  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        (None, PROVEN),
        ("", PROVEN),
        ("off", ()),
        ("force", ()),
        ("all", PARTS),
        ("decode, prefill", ("decode", "prefill")),
        ("all,force", PARTS),
    ],
)
def test_the_variable_names_parts(value: str | None, parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    assert plugin().requested() == set(parts)


@pytest.mark.parametrize(
    ("value", "capability", "reason"),
    [
        (None, (9, 0), ""),
        (None, (10, 0), f"the GPU has compute capability 10.0 and {VARIABLE} asks for nothing"),
        (None, None, f"there is no GPU and {VARIABLE} asks for nothing"),
        ("decode", (10, 0), ""),
        ("all", None, ""),
    ],
)
def test_by_default_only_gpus_that_parts_have_run_on(
    value: str | None, capability: tuple[int, int] | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: capability is not None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    found = plugin()
    assert found.requested()
    assert found.unproven() == reason


def test_an_engine_that_is_not_installed(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "all")
    assert not Plugin("no-such-engine", ((0, 33), (0, 34))).requested()
    assert "no-such-engine is unknown, known is 0.33 to below 0.34" in caplog.text


def test_a_part_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "decode,decoder")
    with pytest.raises(ValueError, match=f"^{VARIABLE}: expected off, all, .*, got 'decoder'$"):
        plugin().requested()
    monkeypatch.setenv(VARIABLE, "decode,indexer")
    assert Plugin("vllm", ((0,), (99,)), ("decode",)).own == ("decode",)


@pytest.mark.parametrize(
    ("version", "known"), [("0.33.0", True), ("0.33.2+cu130", True), ("0.32.9", False), ("0.34.0rc1", False)]
)
def test_other_versions_are_left_alone(
    version: str, known: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "all")
    found = plugin(version)
    for _ in range(2):
        assert bool(found.requested()) == known
    assert len(caplog.records) == (not known)
    monkeypatch.setenv(VARIABLE, "all,force")
    assert found.requested() == set(PARTS)


@pytest.mark.parametrize(
    ("version", "proven"), [("0.33.0", True), ("0.33.0+cu130", True), ("0.33.1", False), ("0.32.9", False)]
)
def test_by_default_only_the_release_that_parts_have_run_with(
    version: str, proven: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    caplog.set_level("INFO")
    assert plugin(version).requested() == (set(PROVEN) if proven else set())
    assert ("0.33.0 has run with its parts" in caplog.text) == (not proven)


def test_numbers_of_versions() -> None:
    assert numbers("0.5.23.post1") == (0, 5, 23)
    assert numbers("unknown") == ()


def test_reasons_are_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    found = plugin()
    with caplog.at_level(logging.INFO, "vllm.cute_kernels"):
        for _ in range(2):
            found.fall_back("decode", "it rains")
            found.announce("all")
    assert [record.getMessage() for record in caplog.records] == [
        "cute_kernels: decode: the engine's own, as it rains",
        "cute_kernels: in use in vllm 0.33.0: all",
    ]
    monkeypatch.setenv(VARIABLE, "all")
    found.requested()
    found.fall_back("norm", "it snows")
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.INFO, logging.WARNING]


def test_a_patch_waits_for_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "an_engine").mkdir()
    (tmp_path / "an_engine/__init__.py").touch()
    (tmp_path / "an_engine/kernels.py").write_text("def run(): return 'own'\n")
    (tmp_path / "an_engine/backend.py").write_text("from an_engine.kernels import run\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    acted: list[str] = []

    def act(module: ModuleType) -> None:
        acted.append(module.__name__)
        rebind(module, "run", lambda: "ours")

    on_import("an_engine.kernels", act)
    assert "an_engine" not in sys.modules
    import an_engine.backend  # type: ignore[import-not-found]
    import an_engine.kernels  # type: ignore[import-not-found]

    assert (an_engine.backend.run(), an_engine.kernels.run()) == ("ours", "ours")
    on_import("an_engine.kernels", act)
    assert acted == ["an_engine.kernels"] * 2
    rebind(an_engine.kernels, "run", lambda: "later")
    assert an_engine.backend.run() == "later"
    assert Path(an_engine.kernels.__spec__.loader.get_filename()).name == "kernels.py"
    for name in [name for name in sys.modules if name.startswith("an_engine")]:
        monkeypatch.delitem(sys.modules, name)


def test_a_seam_that_is_gone_leaves_the_engine_alone(caplog: pytest.LogCaptureFixture) -> None:
    def act(module: ModuleType) -> Any:
        return module.selector

    plugin().guard(act)(ModuleType("an_engine.model"))
    assert "an_engine.model is not what it was" in caplog.text


@pytest.mark.full
def test_entry_points_register_without_an_engine() -> None:
    """They import neither an engine nor a compiler."""
    tables = r'^\[project\.entry-points\."([\w.]+)"\]\ncute_kernels = "([\w.:]+)"$'
    named = dict(re.findall(tables, (ROOT / "pyproject.toml").read_text(), re.M))
    assert set(named) == {"vllm.general_plugins", "sglang.srt.plugins"}
    code = "import sys\n"
    for entry in named.values():
        module, _, function = entry.partition(":")
        code += f"import {module}; {module}.{function}(); {module}.{function}()\n"
    code += "sys.exit(bool({'vllm', 'sglang', 'cutlass', 'triton'} & {*sys.modules}))\n"
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
    assert plugins.PARTS == PARTS


def test_the_check_of_sources_finds_what_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.py").write_text(
        "class Layer:\n"
        "    rows: int\n"
        "    def __init__(self): self.heads = 1\n"
        "    def forward(self, q: int, scale: float = 1.0, *, out=None) -> None: run(q=q, out=out)\n"
    )

    def found(signature: str, field: str, attribute: str, keywords: set[str]) -> int:
        tables: list[tuple[str, Any]] = [
            ("SIGNATURES", {"Layer.forward": signature}),
            ("FIELDS", {"Layer": {field}}),
            ("ATTRIBUTES", {"Layer": {attribute}}),
            ("KEYWORDS", {"run": keywords}),
        ]
        for name, table in tables:
            monkeypatch.setattr(seams, name, {"engine": {"model.py": table}})
        return len(seams.differences("engine", tmp_path))

    assert found("self, q, scale=1.0, *, out=None", "rows", "heads", {"q", "out"}) == 0
    assert found("self, q", "columns", "groups", {"q"}) == 4
