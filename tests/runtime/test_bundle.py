# SPDX-License-Identifier: Apache-2.0
"""Bundles whose digest is demanded: what is in the list is loaded, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cute_kernels.runtime import bundle
from cute_kernels.runtime.bundle import BadBundle
from cute_kernels.runtime.cache import FORMAT


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle._listed.cache_clear()
    monkeypatch.delenv(bundle.DIGEST_VARIABLE, raising=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / f"v{FORMAT}" / "sm_90a" / "env"
    folder.mkdir(parents=True)
    (folder / "kernel.o").write_bytes(b"code")
    (folder / "kernel.json").write_bytes(b"{}")
    (folder / "kernel.lock").write_bytes(b"")
    return tmp_path


def read(path: Path) -> bytes:
    data = path.read_bytes()
    bundle.check(path.parents[3], path, data)
    return data


def files(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("kernel.*") if p.suffix != ".lock")


def test_what_was_sealed_is_loaded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = bundle.seal(root)
    listed = json.loads((root / f"v{FORMAT}" / bundle.MANIFEST).read_text())
    assert listed["format"] == bundle.FORMAT
    assert list(listed["files"]) == ["sm_90a/env/kernel.json", "sm_90a/env/kernel.o"]
    assert bundle.seal(root) == digest
    monkeypatch.setenv(bundle.DIGEST_VARIABLE, digest)
    assert [read(path) for path in files(root)] == [b"{}", b"code"]


def test_nothing_else_is(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = bundle.seal(root)
    json_path, object_path = files(root)
    object_path.write_bytes(b"edoc")
    (json_path.parent / "new.o").write_bytes(b"code")
    assert read(object_path) == b"edoc", "nothing is demanded"
    monkeypatch.setenv(bundle.DIGEST_VARIABLE, digest)
    with pytest.raises(BadBundle, match=r"kernel\.o: is not what the bundle lists.*CUTE_KERNELS_CACHE_DIGEST"):
        read(object_path)
    with pytest.raises(BadBundle, match=r"new\.o: is not in the bundle"):
        read(json_path.parent / "new.o")
    assert read(json_path) == b"{}"


def test_a_list_with_another_digest_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle.seal(root)
    monkeypatch.setenv(bundle.DIGEST_VARIABLE, "0" * 64)
    with pytest.raises(BadBundle, match="expected the digest 0000"):
        read(files(root)[0])
    bundle._listed.cache_clear()
    (root / f"v{FORMAT}" / bundle.MANIFEST).unlink()
    with pytest.raises(BadBundle, match=r"manifest\.json cannot be read"):
        read(files(root)[0])
