# SPDX-License-Identifier: Apache-2.0
"""May files of a folder be run as code? Only if nobody else could have written them.

A folder counts as this user's if each folder from the root down to it, links resolved, belongs to this user or to root,
and no other can write to it: others only where it is sticky (/tmp: they cannot exchange what is ours), the group only
where it is the private one of the user or of root (of that name, without other members). The same holds for the files.
CUTE_KERNELS_CACHE_SHARED=1 turns this off, for bundles that somebody else prepared.
"""

from __future__ import annotations

import os
import stat
from functools import cache
from pathlib import Path

SHARED_VARIABLE = "CUTE_KERNELS_CACHE_SHARED"


def is_shared_allowed() -> bool:
    """Whether objects may belong to anybody (CUTE_KERNELS_CACHE_SHARED=1)."""
    value = os.environ.get(SHARED_VARIABLE, "0")
    if value not in ("0", "1", ""):
        raise ValueError(f"{SHARED_VARIABLE}: expected '0' or '1', got {value!r}")
    return value == "1"


@cache
def _private_group(uid: int) -> int | None:
    """The group that only this user is in, or None."""
    try:
        import grp
        import pwd

        user = pwd.getpwuid(uid)
        group = grp.getgrgid(user.pw_gid)
    except (ImportError, KeyError):
        return None
    is_private = group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    return group.gr_gid if is_private else None


def why_foreign(path: Path, status: os.stat_result, is_last: bool = True) -> str:
    """Why somebody else could have written a file or folder of this status, or nothing. Others may write to a sticky
    folder, unless it is the last one of a chain, where objects lie."""
    uid = os.geteuid()
    if status.st_uid not in (uid, 0):
        return f"{path} belongs to user {status.st_uid}, not to {uid} or root"
    is_sticky = stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_ISVTX) and not is_last
    if status.st_mode & stat.S_IWOTH and not is_sticky:
        return f"{path} can be written by everybody"
    is_own_group = status.st_gid == _private_group(uid) or (status.st_gid == 0 and _private_group(0) == 0)
    if status.st_mode & stat.S_IWGRP and not is_sticky and not is_own_group:
        return f"{path} can be written by group {status.st_gid}"
    return ""


def why_foreign_chain(folder: Path) -> str:
    """Why somebody else could put files into a folder, or nothing. A folder that does not exist is nobody's."""
    try:
        whole = folder.resolve(strict=True)
        chain = [*reversed(whole.parents), whole]
        found = (why_foreign(part, part.stat(), part == whole) for part in chain)
        return next((why for why in found if why), "")
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{folder} cannot be looked at ({error})"


class ForeignFile(RuntimeError):
    """A file that is not loaded because somebody else could have written it."""

    def __init__(self, root: Path, why: str) -> None:
        super().__init__(
            f"cute_kernels: objects in {root} are code that this process would run, but {why}. Remove that permission "
            f"(chmod go-w, chown) or set CUTE_KERNELS_CACHE_DIR to a folder of your own; {SHARED_VARIABLE}=1 loads "
            "them nevertheless, which is for bundles from somebody you trust (docs/kernel_cache.md)."
        )


def read_own(root: Path, path: Path) -> bytes:
    """The bytes of a file below `root` that nobody else could have written, or ForeignFile. OSError as of `open`."""
    with open(path, "rb") as file:
        if hasattr(os, "geteuid") and not is_shared_allowed():
            why = why_foreign(path, os.fstat(file.fileno())) or why_foreign_chain(path.parent)
            if why:
                raise ForeignFile(root, why)
        return file.read()


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, such that others cannot write to them, whatever the umask."""
    for part in (*reversed(folder.parents), folder):
        if not part.is_dir():
            part.mkdir(mode=0o755, exist_ok=True)
