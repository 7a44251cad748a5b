# SPDX-License-Identifier: Apache-2.0
"""Bundles: a kernel cache that is made in one place and used in others, with a list of what is in it.

    <root>/v3/manifest.json    {"format": 1, "files": {path below <root>/v3: sha256}}

`seal` writes the list and returns its sha256, the bundle's digest. Where CUTE_KERNELS_CACHE_DIGEST is set to it, only
files that are in the list, with the bytes they had then, are loaded: whoever can write to the folder but not to the
environment of the process cannot exchange them.
"""

from __future__ import annotations

import hashlib
import json
import os
from functools import cache
from pathlib import Path

from cute_kernels.runtime.ownership import make_folder

DIGEST_VARIABLE = "CUTE_KERNELS_CACHE_DIGEST"
FORMAT = 1
MANIFEST = "manifest.json"
SUFFIXES = (".o", ".json")


class BadBundle(RuntimeError):
    """A kernel cache, or a file in it, is not what CUTE_KERNELS_CACHE_DIGEST demands."""


def _top(root: Path) -> Path:
    from cute_kernels.runtime import cache as kernel_cache

    return root / f"v{kernel_cache.FORMAT}"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def seal(root: Path) -> str:
    """List the objects and sidecars below `root`, and return the list's digest."""
    from cute_kernels.runtime.cache import replace_file

    top = _top(root)
    paths = [p for p in sorted(top.rglob("*")) if p.suffix in SUFFIXES and p.is_file() and p.name != MANIFEST]
    files = {path.relative_to(top).as_posix(): _sha256(path.read_bytes()) for path in paths}
    data = (json.dumps({"format": FORMAT, "files": files}, indent=1, sort_keys=True) + "\n").encode()
    make_folder(top)
    replace_file(top / MANIFEST, data)
    return _sha256(data)


def demanded() -> str:
    """The digest that the kernel cache must have, or nothing."""
    return os.environ.get(DIGEST_VARIABLE, "")


@cache
def _listed(top: Path, digest: str) -> dict[str, str]:
    """The files of a bundle with this digest. Read once."""
    path = top / MANIFEST
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadBundle(f"{DIGEST_VARIABLE} is set, but {path} cannot be read: {error}") from error
    if _sha256(data) != digest:
        raise BadBundle(f"{path}: expected the digest {digest} ({DIGEST_VARIABLE}), got {_sha256(data)}")
    files: dict[str, str] = json.loads(data)["files"]
    return files


def check(root: Path, path: Path, data: bytes) -> None:
    """Raise BadBundle if a digest is demanded and `data`, read from `path`, is not what the bundle lists there."""
    digest = demanded()
    if not digest:
        return
    top = _top(root)
    want = _listed(top, digest).get(path.relative_to(top).as_posix())
    if want != _sha256(data):
        what = "is not in the bundle" if want is None else "is not what the bundle lists"
        raise BadBundle(f"{path}: {what} with the digest {digest} ({DIGEST_VARIABLE})")
