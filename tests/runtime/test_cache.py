# SPDX-License-Identifier: Apache-2.0
"""Objects on disk: what is loaded again, and everything that is not."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import filelock
import pytest

from cute_kernels.runtime import bundle, cache
from cute_kernels.runtime.cache import Miss, Store
from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.ownership import ForeignFile
from cute_kernels.runtime.report import Facts
from cute_kernels.runtime.sources import Sources

DATA = bytes(range(256)) * 20
FACTS = Facts(32, 0, 0, 0, 1024, {"mma.sync": 4}, 0.5)
ENVIRONMENT: dict[str, Any] = {
    "dsl": "4.8.1",
    "toolkit": "12.9",
    "tvm_ffi": "0.1.15",
    "python": "cpython-3.11",
    "machine": "linux-x86_64",
    "flags": "--x",
    "variables": {},
}


@dataclass(frozen=True)
class Key(KernelKey):
    kernel_name: ClassVar[str] = "tests.cache"
    rows: int = 1


KEY = Key("sm_90a")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    values = dict(ENVIRONMENT)
    monkeypatch.setattr(cache, "environment", lambda: dict(values))
    monkeypatch.setattr(cache, "_warned", False)
    monkeypatch.setattr(cache, "host_level", lambda: "x86-64-v3")
    return values


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


@pytest.fixture
def kept(store: Store) -> Store:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.write(KEY, DATA, FACTS)
    return store


def files(store: Store) -> set[str]:
    return {p.name for p in store.root.rglob("*") if p.is_file()}


def sidecar(store: Store) -> Path:
    return store.object_path(KEY).with_suffix(".json")


def test_an_object_comes_back_whole(kept: Store) -> None:
    entry = kept.read(KEY)
    assert (entry.data, entry.symbol, entry.facts, entry.from_disk) == (DATA, KEY.symbol, FACTS, True)
    assert files(kept) == {kept.object_path(KEY).name, sidecar(kept).name}
    assert kept.object_path(KEY).parent.parent.name == "sm_90a"
    assert kept.root / "v3" in kept.object_path(KEY).parents


def test_looking_makes_nothing(store: Store) -> None:
    with pytest.raises(Miss, match="does not hold it"):
        store.read(KEY)
    assert store.contents() == []
    assert store.explain(KEY) == ""
    assert not store.root.exists()


@pytest.mark.parametrize("other", [Key("sm_100a"), Key("sm_90a", rows=2)])
def test_other_keys_are_other_objects(kept: Store, other: Key) -> None:
    assert other.symbol != KEY.symbol
    with pytest.raises(Miss):
        kept.read(other)


@pytest.mark.parametrize("name", list(ENVIRONMENT))
def test_every_part_of_the_environment_counts(kept: Store, environment: dict[str, Any], name: str) -> None:
    environment[name] = {"CUTE_DSL_LINEINFO": "1"} if name == "variables" else environment[name] + "x"
    with pytest.raises(Miss):
        kept.read(KEY)
    explained = kept.explain(KEY)
    assert f"{name} " in explained
    assert f"(here {environment[name]})" in explained
    kept.write(KEY, DATA[:-1], FACTS)
    assert kept.read(KEY).data == DATA[:-1]
    environment.update(ENVIRONMENT)
    assert kept.read(KEY).data == DATA


def edit(name: str, value: Any) -> Callable[[Store], None]:
    def change(store: Store) -> None:
        raw = json.loads(sidecar(store).read_text())
        if value is None:
            del raw[name]
        else:
            raw[name] = value
        sidecar(store).write_text(json.dumps(raw))

    return change


def damage(data: bytes) -> Callable[[Store], None]:
    return lambda store: store.object_path(KEY).write_bytes(data) and None


def foreign(store: Store) -> None:
    """Another key's pair of files under this key's name."""
    other = Key("sm_90a", rows=7)
    store.write(other, DATA, FACTS)
    for suffix in (".o", ".json"):
        shutil.copy(store.object_path(other).with_suffix(suffix), store.object_path(KEY).with_suffix(suffix))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (damage(b""), "damaged"),
        (damage(DATA[:-1]), "damaged"),
        (damage(DATA + b"\0"), "damaged"),
        (damage(DATA[:100] + b"\1" + DATA[101:]), "damaged"),
        (lambda store: store.object_path(KEY).unlink(), "cannot be read"),
        (lambda store: sidecar(store).unlink(), "does not hold it"),
        (lambda store: sidecar(store).write_bytes(b"\xff\xfe\0"), "cannot be read"),
        (lambda store: sidecar(store).write_text("[1]"), "cannot be read"),
        (lambda store: sidecar(store).write_text(sidecar(store).read_text()[:-20]), "cannot be read"),
        (edit("format", 1), "format"),
        (edit("key", Key("sm_90a", rows=3).identity), "key"),
        (edit("arch", "sm_100a"), "arch"),
        (edit("symbol", "another"), "symbol"),
        (edit("environment", {**ENVIRONMENT, "dsl": "4.9"}), "environment"),
        (edit("environment", None), "environment"),
        (edit("sources", "0" * 64), "sources"),
        (edit("host", "x86-64-v9"), "host code"),
        (edit("host", None), "host code"),
        (edit("object", {"bytes": len(DATA), "sha256": "0" * 64}), "damaged"),
        (edit("object", None), "damaged"),
        (edit("facts", None), "cannot be read"),
        (edit("facts", {"registers": "many"}), "cannot be read"),
        (edit("facts", []), "cannot be read"),
        (edit("facts", {**FACTS.to_json(), "registers": float("inf")}), "cannot be read"),
        (lambda store: sidecar(store).write_text("[" * 200_000), "cannot be read"),
        (lambda store: sidecar(store).write_text('{"a": ' * 200_000), "cannot be read"),
        (lambda store: sidecar(store).write_text("1e400"), "cannot be read"),
        (lambda store: sidecar(store).write_text('{"format": 1e400}'), "format"),
        (lambda store: sidecar(store).write_text('{"format": 3, "key": ' + "9" * 5000 + "}"), "cannot be read"),
        (lambda store: sidecar(store).write_text(""), "cannot be read"),
        (lambda store: sidecar(store).write_text('"\\ud800"'), "cannot be read"),
        (foreign, "key"),
    ],
)
def test_what_is_not_right_is_not_loaded_and_can_be_replaced(
    kept: Store, spoil: Callable[[Store], None], why: str
) -> None:
    spoil(kept)
    with pytest.raises(Miss, match=why):
        kept.read(KEY)
    kept.write(KEY, DATA, FACTS)
    assert kept.read(KEY).data == DATA


@pytest.mark.parametrize(
    "text", ["[" * 200_000, "1e400", '{"environment": 7}', '{"environment": {"dsl": []}}', "\0", ""]
)
def test_a_bad_file_in_another_environment_breaks_nothing(kept: Store, environment: dict[str, Any], text: str) -> None:
    other = kept.folder("sm_90a").with_name("other")
    other.mkdir()
    (other / sidecar(kept).name).write_text(text)
    (other / "gone.o").symlink_to("nowhere")
    kept.explain(KEY)
    assert [line["environment"] for line in kept.contents()] == sorted([kept.folder("sm_90a").name, "other"])
    assert kept.read(KEY).data == DATA


def test_what_somebody_else_could_have_written_is_not_loaded(kept: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.object_path(KEY).chmod(0o666)
    with pytest.raises(ForeignFile, match="can be written by everybody"):
        kept.read(KEY)
    kept.object_path(KEY).chmod(0o644)
    kept.object_path(KEY).parent.chmod(0o777)
    with pytest.raises(ForeignFile, match="can be written by everybody"):
        kept.read(KEY)
    monkeypatch.setenv("CUTE_KERNELS_CACHE_SHARED", "1")
    assert kept.read(KEY).data == DATA


def test_a_demanded_bundle_is_the_only_one(kept: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(bundle.DIGEST_VARIABLE, bundle.seal(kept.root))
    assert kept.read(KEY).data == DATA
    other = Key("sm_90a", rows=2)
    kept.write(other, DATA, FACTS)
    with pytest.raises(bundle.BadBundle, match="is not in the bundle"):
        kept.read(other)


# ---- hosts -----------------------------------------------------------------------------------------------------------

V2 = {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}
V3 = V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        (set(), "v1"), (V2, "v2"), (V3, "v3"), (V4, "v4"), (V3 - {"fma"}, "v2"), (V4 - {"avx2"}, "v2"),
        (V4 - {"avx512vl"}, "v3"), (V4 - {"popcnt"}, "v1"),
    ],
)  # fmt: skip
def test_levels_of_x86(flags: set[str], level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert cache.host_level(flags, "x86_64") == f"x86-64-{level}"


def test_this_machine_has_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert cache.host_level(None, "aarch64") == "aarch64"
    assert cache.runs_on(cache.host_level(), cache.host_level())


@pytest.mark.parametrize(
    ("built", "here", "runs"),
    [
        ("x86-64-v3", "x86-64-v4", True),
        ("x86-64-v4", "x86-64-v4", True),
        ("x86-64-v4", "x86-64-v3", False),
        ("aarch64", "aarch64", True),
        ("aarch64", "x86-64-v4", False),
        ("x86-64-v1", "aarch64", False),
        (None, "x86-64-v4", False),
    ],
)
def test_host_code_runs_where_the_processor_is_as_capable(built: object, here: str, runs: bool) -> None:
    assert cache.runs_on(built, here) is runs


# ---- folders that cannot be used -------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_is_warned_about_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "cache")
    with pytest.raises(Miss):
        store.read(KEY)
    with pytest.warns(RuntimeWarning, match=r"cannot keep compiled kernels in .*file.*CUTE_KERNELS_CACHE_DIR"):
        assert store.acquire(KEY) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.write(KEY, DATA, FACTS)
        assert store.acquire(KEY) is None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
@pytest.mark.parametrize("at", ["write", "replace"])
def test_a_full_or_read_only_folder_keeps_nothing_half(
    store: Store, code: int, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(code, os.strerror(code))

    class Full(io.FileIO):
        write = fail

    with monkeypatch.context() as patch:
        if at == "write":
            patch.setattr(cache, "open", Full, raising=False)
        else:
            patch.setattr(os, "replace", fail)
        with pytest.warns(RuntimeWarning, match=os.strerror(code)):
            store.write(KEY, DATA, FACTS)
    assert files(store) == set()
    with pytest.raises(Miss):
        store.read(KEY)
    store.write(KEY, DATA, FACTS)
    assert store.read(KEY).data == DATA


def test_a_sidecar_that_could_not_be_written_leaves_no_stale_pair(kept: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def only_objects(source: Any, target: Any) -> None:
        if str(target).endswith(".json"):
            raise OSError(errno.ENOSPC, "full")
        replace(source, target)

    monkeypatch.setattr(os, "replace", only_objects)
    with pytest.warns(RuntimeWarning, match="full"):
        kept.write(KEY, DATA[::-1], FACTS)
    with pytest.raises(Miss, match="damaged"):
        kept.read(KEY)


def test_the_lock_is_exclusive_and_given_up_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = store.acquire(KEY)
    other = store.acquire(Key("sm_90a", rows=2))
    assert lock.is_locked
    assert other.is_locked
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.1)
    with pytest.warns(RuntimeWarning, match="lock"):
        assert store.acquire(KEY) is None
    lock.release()
    again = store.acquire(KEY)
    assert again is not None
    again.release()
    other.release()
    with filelock.FileLock(store.object_path(KEY).with_suffix(".lock")).acquire(timeout=0.1):
        pass


# ---- which folder, which sources -------------------------------------------------------------------------------------


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv(cache.DIRECTORY_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.default_directory() == tmp_path / "home/.cache/cute_kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert cache.default_directory() == tmp_path / "home/.cache/cute_kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.default_directory() == tmp_path / "xdg/cute_kernels"
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, "~/mine")
    assert cache.default_directory() == tmp_path / "home/mine"
    assert cache.current() == Store(tmp_path / "home/mine")
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, "")
    assert cache.default_directory() is None
    assert cache.current() is None


def test_without_sources_there_is_no_disk_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(cache, "SOURCES", Sources(cache.PACKAGE, {}))
    assert cache.current() is None


def test_other_sources_are_other_objects(kept: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    before, edited = cache.SOURCES, {**cache.SOURCES.files, "dsl/ptx/narrow.py": b"x = 1"}
    monkeypatch.setattr(cache, "SOURCES", Sources(cache.PACKAGE, edited))
    with pytest.raises(Miss):
        kept.read(KEY)
    assert f"(here {cache.sources_of(KEY)})" in kept.explain(KEY)
    kept.write(KEY, DATA[:-1], FACTS)
    monkeypatch.setattr(cache, "SOURCES", before)
    assert kept.read(KEY).data == DATA


def test_sources_edited_under_the_process_are_not_stored(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.Sources, "is_current", lambda self, module=None: False)
    store.write(KEY, DATA, FACTS)
    assert not store.root.exists()


def test_contents(kept: Store, environment: dict[str, Any]) -> None:
    (line,) = kept.contents()
    assert (line["arch"], line["objects"], line["bytes"], line["current"]) == ("sm_90a", 1, len(DATA), True)
    environment["dsl"] = "4.9"
    kept.write(KEY, DATA, FACTS)
    kept.write(Key("sm_100a"), DATA, FACTS)
    assert [(c["arch"], c["current"]) for c in kept.contents()].count(("sm_90a", True)) == 1
    assert len(kept.contents()) == 3


def test_the_real_environment_names_versions_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    monkeypatch.undo()
    values = cache.environment()
    assert set(values) == set(ENVIRONMENT)
    assert values["dsl"].startswith("4.")
    first = cache.fingerprint(values)
    monkeypatch.setenv("CUTE_DSL_LOG_LEVEL", "20")
    assert cache.fingerprint(cache.environment()) == first
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert cache.environment()["variables"] == {"CUTE_DSL_LINEINFO": "1"}
    assert cache.fingerprint(cache.environment()) != first
