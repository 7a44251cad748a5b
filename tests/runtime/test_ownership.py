# SPDX-License-Identifier: Apache-2.0
"""Whose files are run as code: this user's and root's that nobody else can write, and nobody else's."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cute_kernels.runtime import cache, ownership
from cute_kernels.runtime.ownership import ForeignFile, make_folder, read_own, why_foreign, why_foreign_chain

ME, MY_GROUP, OTHER = 1000, 1000, 1001
FOLDER, FILE = stat.S_IFDIR, stat.S_IFREG


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> None:
    """User 1000, whose group 1000 is private."""
    monkeypatch.setattr(os, "geteuid", lambda: ME)
    monkeypatch.setattr(ownership, "_private_group", {ME: MY_GROUP, 0: 0}.get)


def status(mode: int, uid: int = ME, gid: int = MY_GROUP) -> os.stat_result:
    return os.stat_result((mode, 0, 0, 1, uid, gid, 0, 0, 0, 0))


@pytest.mark.usefixtures("user")
@pytest.mark.parametrize(
    ("found", "is_last", "why"),
    [
        (status(FOLDER | 0o755), True, ""),
        (status(FOLDER | 0o700), True, ""),
        (status(FOLDER | 0o755, uid=0, gid=0), True, ""),  # baked into a container image by root
        (status(FOLDER | 0o755, uid=OTHER), True, f"belongs to user {OTHER}"),
        (status(FILE | 0o644, uid=OTHER), True, f"belongs to user {OTHER}"),
        (status(FOLDER | 0o777), True, "can be written by everybody"),
        (status(FOLDER | 0o777, uid=0), False, "can be written by everybody"),
        (status(FOLDER | 0o1777, uid=0, gid=0), False, ""),  # /tmp on the way
        (status(FOLDER | 0o1777, uid=0, gid=0), True, "can be written by everybody"),
        (status(FILE | 0o1666), True, "can be written by everybody"),
        (status(FOLDER | 0o775), True, ""),  # the private group of this user: umask 002
        (status(FOLDER | 0o2775, gid=2000), True, "can be written by group 2000"),  # a volume owned by a group
        (status(FOLDER | 0o775, uid=0, gid=2000), False, "can be written by group 2000"),
        (status(FOLDER | 0o775, uid=0, gid=0), True, ""),
        (status(FILE | 0o664, gid=2000), True, "can be written by group 2000"),
    ],
)
def test_who_could_have_written(found: os.stat_result, is_last: bool, why: str) -> None:
    got = why_foreign(Path("/x"), found, is_last)
    assert why in got
    assert bool(got) == bool(why)


def test_a_private_group_has_its_users_name_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    import grp
    import pwd

    user = pwd.struct_passwd(("ann", "x", 1000, 1000, "", "/", ""))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    for name, members, private in (
        ("ann", [], 1000),
        ("ann", ["ann"], 1000),
        ("ann", ["bob"], None),
        ("staff", [], None),
    ):
        monkeypatch.setattr(grp, "getgrgid", lambda gid, n=name, m=members: grp.struct_group((n, "x", 1000, m)))
        ownership._private_group.cache_clear()
        assert ownership._private_group(1000) == private
    ownership._private_group.cache_clear()


def test_every_folder_of_the_chain_counts(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b" / "c"
    make_folder(folder)
    assert why_foreign_chain(folder) == ""
    assert why_foreign_chain(tmp_path / "missing") == ""
    (tmp_path / "a").chmod(0o777)
    assert "can be written by everybody" in why_foreign_chain(folder)
    (tmp_path / "a").chmod(0o1777)
    assert why_foreign_chain(folder) == ""
    link = tmp_path / "link"
    link.symlink_to(folder)
    folder.chmod(0o777)
    assert "can be written by everybody" in why_foreign_chain(link)


def test_a_foreign_file_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kernel.o"
    path.write_bytes(b"code")
    path.chmod(0o644)
    assert read_own(tmp_path, path) == b"code"
    path.chmod(0o666)
    with pytest.raises(ForeignFile) as caught:
        read_own(tmp_path, path)
    for part in (
        str(path),
        "written by everybody",
        "chmod go-w",
        "CUTE_KERNELS_CACHE_SHARED=1",
        "CUTE_KERNELS_CACHE_DIR",
    ):
        assert part in str(caught.value)
    monkeypatch.setenv(ownership.SHARED_VARIABLE, "1")
    assert read_own(tmp_path, path) == b"code"
    monkeypatch.setenv(ownership.SHARED_VARIABLE, "yes")
    with pytest.raises(ValueError, match="CUTE_KERNELS_CACHE_SHARED: expected '0' or '1', got 'yes'"):
        read_own(tmp_path, path)


def test_what_this_process_makes_others_cannot_write(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_folder(tmp_path / "x" / "y")
        cache.replace_file(tmp_path / "x" / "y" / "file", b"1")
    finally:
        os.umask(before)
    for path in (tmp_path / "x", tmp_path / "x" / "y", tmp_path / "x" / "y" / "file"):
        assert path.stat().st_mode & 0o022 == 0
