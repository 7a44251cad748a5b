# SPDX-License-Identifier: Apache-2.0
"""Which source files the code of a kernel depends on: that of its key's class, those of all modules which that one
imports, of those which they import, and so on, whether imported at the top or inside a function.

Imports are found in the text, without running anything. A name that a package's own file brings counts with that file
and what it imports; other files of packages on the way to a module do not, since all they have is a description and
imports (a test holds them to it).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_FROM = re.compile(rb"^[ \t]*from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]*(\([^)]*\)|[^\n]*)", re.MULTILINE)
_IMPORT = re.compile(rb"^[ \t]*import[ \t]+([^\n]*)", re.MULTILINE)
_COMMENT = re.compile(rb"#[^\n]*")
_OWN_FILE = "__init__.py"


def _names(listed: bytes) -> list[str]:
    """`a` and `b.c` of "(a, b.c as d)"."""
    parts = _COMMENT.sub(b"", listed).strip(b" \t\n()").split(b",")
    return [words[0].decode() for part in parts if (words := part.split())]


@dataclass
class Sources:
    """The Python files of a package, as they were when they were read.

    folder   of the package
    files    path below the folder -> content
    """

    folder: Path
    files: Mapping[str, bytes]
    _modules: dict[str, str] = field(init=False, repr=False)
    _digests: dict[str, str] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._modules = {self._module(path): path for path in self.files}

    @classmethod
    def read(cls, folder: Path) -> Sources:
        paths = sorted(folder.rglob("*.py"))
        return cls(folder, {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths})

    def _module(self, path: str) -> str:
        """The dotted name of a file's module."""
        parts = [self.folder.name, *path.removesuffix(".py").split("/")]
        return ".".join(parts[:-1] if path.endswith(_OWN_FILE) else parts)

    def imports(self, module: str) -> set[str]:
        """Modules of the package that the text of one imports."""
        path = self._modules[module]
        content = self.files[path]
        package = module.split(".") if path.endswith(_OWN_FILE) else module.split(".")[:-1]
        found = {name for listed in _IMPORT.findall(content) for name in _names(listed) if name in self._modules}
        for dots, name, listed in _FROM.findall(content):
            above = package[: len(package) + 1 - len(dots)] if dots else []
            base = ".".join([*above, *([name.decode()] if name else [])])
            for wanted in _names(listed):
                found |= {f"{base}.{wanted}", base} & self._modules.keys() if wanted == "*" else self._one(base, wanted)
        return found

    def _one(self, base: str, name: str) -> set[str]:
        """What `from base import name` is: the module of that name, or else the file that brings it."""
        return {next(iter([m for m in (f"{base}.{name}", base) if m in self._modules]), base)} & self._modules.keys()

    def closure(self, module: str) -> tuple[str, ...]:
        """A module and all it depends on, in order of names."""
        found, open_ = {module}, [module]
        while open_:
            new = self.imports(open_.pop()) - found
            found |= new
            open_ += new
        return tuple(sorted(found))

    def paths(self, module: str) -> list[str]:
        """The files that `module` depends on; of a module that is not of this package, all files."""
        if module not in self._modules:
            return sorted(self.files)
        return [self._modules[name] for name in self.closure(module)]

    def digest(self, module: str) -> str:
        """Hash of the names and contents of the files that `module` depends on; empty if there are none."""
        if module not in self._digests:
            self._digests[module] = self._hash(self.paths(module))
        return self._digests[module]

    @property
    def whole(self) -> str:
        """Hash of the names and contents of all files; empty if there are none."""
        return self._hash(sorted(self.files))

    def _hash(self, paths: Iterable[str]) -> str:
        digest, is_empty = hashlib.sha256(), True
        for path in paths:
            content, is_empty = self.files[path], False
            digest.update(f"{path}\0{len(content)}\0".encode() + content)
        return "" if is_empty else digest.hexdigest()

    def is_current(self, module: str | None = None) -> bool:
        """Whether the files that `module` depends on, or all of the package, are still what was read."""
        if module is None:
            return Sources.read(self.folder).files == self.files
        try:
            return all((self.folder / path).read_bytes() == self.files[path] for path in self.paths(module))
        except OSError:
            return False
