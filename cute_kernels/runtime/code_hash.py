# SPDX-License-Identifier: Apache-2.0
"""Hashes of the machine code of kernels, and what differs between two lists of them.

A change that only moves or renames device code leaves every hash as it was. The kernel's own symbol in the code does
not count: it is replaced before hashing, in the PTX and in the disassembly.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cute_kernels.runtime.compile import compile_report
from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.precompile import in_processes
from cute_kernels.runtime.report import Report

SASS_ARCHS = ("sm_90a",)
"""Targets whose disassembly is hashed as well, where nvdisasm is installed. For the others the PTX stands for the code:
for sm_100a, ptxas numbers uniform registers of the same PTX now one way and now another."""

_ENTRY = re.compile(r"\.entry\s+([\w$]+)")


@dataclass(frozen=True)
class CodeHash:
    """The code of one key.

    key     its identity
    ptx     sha256 of the PTX, None if the key did not compile
    sass    sha256 of the disassembly, None where there is none
    error   why it did not compile, or None
    """

    key: str
    ptx: str | None
    sass: str | None = None
    error: str | None = None


def mask(text: str, symbols: Sequence[str]) -> str:
    """The text with its kernels' symbols replaced by entry0, entry1, ... in the order given."""
    for number, symbol in sorted(enumerate(symbols), key=lambda item: -len(item[1])):
        text = text.replace(symbol, f"entry{number}")
    return text


def hash_report(report: Report) -> CodeHash:
    """Hashes of compiled code."""
    symbols = list(dict.fromkeys(_ENTRY.findall(report.ptx)))
    if not symbols:
        raise RuntimeError(f"{report.key}: expected a kernel in its PTX, got none")
    sass = report.sass if report.key.arch in SASS_ARCHS else None
    return CodeHash(report.key.identity, _sha256(mask(report.ptx, symbols)), sass and _sha256(mask(sass, symbols)))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def hash_one(key: KernelKey) -> CodeHash:
    """Compile a key, keeping nothing, and hash what came out."""
    try:
        return hash_report(compile_report(key))
    except Exception as error:
        return CodeHash(key.identity, None, error=str(error).strip() or type(error).__name__)


def hash_keys(keys: Iterable[KernelKey], workers: int | None = None) -> Iterator[CodeHash]:
    """Hashes of the code of each key, as they come, from processes that see no GPU; `workers`: as for precompile."""
    for key, result in in_processes(hash_one, keys, "", workers):
        yield result if isinstance(result, CodeHash) else CodeHash(key.identity, None, error=result)


def write_list(path: Path, hashes: Iterable[CodeHash]) -> None:
    """Write a JSON list of hashes, in the order of the keys' identities."""
    lines = [{name: value for name, value in vars(line).items() if name != "error" or value} for line in hashes]
    path.write_text(json.dumps(sorted(lines, key=lambda line: str(line["key"])), indent=1) + "\n")


def read_list(path: Path) -> dict[str, CodeHash]:
    """Hashes of a file of `write_list`, by key. ValueError if it is none."""
    try:
        raw: Any = json.loads(path.read_text())
        return {line["key"]: CodeHash(**line) for line in raw}
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: no list of hashes: {error}") from error


@dataclass(frozen=True)
class Comparison:
    """Keys of two lists. Each key is in one of the four.

    equal      both lists have the same code
    changed    key -> what differs: "PTX", "SASS" (where both lists have it), or why there is no code in one of them
    """

    equal: tuple[str, ...]
    changed: dict[str, str]
    only_old: tuple[str, ...]
    only_new: tuple[str, ...]


def compare(old: dict[str, CodeHash], new: dict[str, CodeHash]) -> Comparison:
    """What became of the code of each key."""
    both = [key for key in sorted(old) if key in new]
    changed = {key: why for key in both if (why := _difference(old[key], new[key]))}
    return Comparison(
        equal=tuple(key for key in both if key not in changed),
        changed=changed,
        only_old=tuple(sorted(old.keys() - new.keys())),
        only_new=tuple(sorted(new.keys() - old.keys())),
    )


def _difference(old: CodeHash, new: CodeHash) -> str:
    for name, line in (("old", old), ("new", new)):
        if line.ptx is None:
            return f"{name}: does not compile: {line.error}"
    parts = ["PTX"] if old.ptx != new.ptx else []
    if old.sass and new.sass and old.sass != new.sass:
        parts.append("SASS")
    return ", ".join(parts)
